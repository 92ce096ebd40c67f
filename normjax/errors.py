"""The one exception for a user's mistake, and the "did you mean" that goes with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user asked for.

    The message is one line that names the argument, its value, what is allowed and the fix. The
    launcher prints it without a traceback and exits with code 2.
    """


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
