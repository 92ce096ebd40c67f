"""The one exception for a user's mistake, and the "did you mean" that goes with it."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """A mistake in what the user asked for.

    The message is one line that names the argument, its value, what is allowed and the fix. The
    launcher prints it without a traceback and exits with code 2. Whatever it quotes, one line of
    text it stays.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(text: str) -> str:
    """Return a text in one line that can be printed; a number of hundreds of digits is cut.

    >>> one_line("depth=" + 90 * "9" + ":\\n too many"), one_line("a\\x1b\\udcffb")
    ('depth=99999999...: too many', 'a\\\\x1b\\\\udcffb')
    """
    text = re.sub(r"(\d{8})\d{72,}", r"\1...", " ".join(text.split()))
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def closest(name: str, choices: Iterable[str]) -> str | None:
    """Return the one of ``choices`` that ``name`` was most likely meant to be, if any is near.

    >>> closest("RMSNrom", ["rmsnorm", "layernorm"])
    'rmsnorm'
    """
    lowered = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(name.lower(), lowered, n=1)
    return lowered[close[0]] if close else None


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of ``choices``, or an empty string.

    >>> suggest("placment", ["placement", "depth"])
    "; did you mean 'placement'?"
    >>> suggest("zzz", ["placement", "depth"])
    ''
    """
    close = closest(name, choices)
    return f"; did you mean {close!r}?" if close else ""


def check_choice(argument: str, value: str, choices: Iterable[str]) -> None:
    """Raise :class:`UserError` unless ``value`` is one of ``choices``.

    >>> check_choice("model.mlp", "gelu", ["gelu", "relu"])
    """
    choices = list(choices)
    if value not in choices:
        hint = suggest(str(value), choices)
        raise UserError(f"{argument}={value}: must be one of {', '.join(choices)}{hint}")


def whole_number(argument: str, value: Any) -> int:
    """Return a whole number, or raise :class:`UserError`.

    >>> whole_number("k", 3)
    3
    """
    try:
        return operator.index(value)
    except TypeError:
        whole = isinstance(value, float) and value.is_integer()
        fix = f"; pass {argument}={int(value)}" if whole else ""
        raise UserError(f"{argument}={value!r}: must be a whole number{fix}") from None
