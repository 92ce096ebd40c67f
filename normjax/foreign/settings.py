"""What a checkpoint says of its model: values by name, each held to what it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from normjax.errors import UserError, suggest

_MISSING = object()


class Settings:
    """The values of a config.json, or of a GGUF file under the same names.

    What is wrong is collected in ``problems``, so that all of it is said at once; what is returned
    in its place is a value of the right type.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json") -> None:
        self.values, self.source = values, source
        self.problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def wrong(self, name: str, what: str) -> None:
        """Note that a value is not what it may be."""
        self.problems.append(f"{self.source}: {name}={self.values.get(name)!r}: {what}")

    def whole(self, name: str, default: Any = _MISSING, least: int = 1, most: int = 2**31) -> int:
        """Return a whole number; one that is missing or null is ``default``."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.wrong(name, f"must be a whole number from {least} to {most}")
            return least
        return value

    def number(self, name: str, default: Any = _MISSING, above: float = 0.0) -> float:
        """Return a finite number above ``above``."""
        value = self._value(name, default)
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not math.isfinite(value) or value <= above:
            self.wrong(name, f"must be a number above {above:g}")
            return above + 1.0
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.wrong(name, "must be true or false")
            return default
        return value

    def one_of(self, name: str, choices: Mapping[str, str], default: Any = _MISSING) -> str:
        """Return what ``choices`` has for a value."""
        value = self._value(name, default)
        if not isinstance(value, str) or value not in choices:
            hint = suggest(str(value), choices)
            self.wrong(name, f"must be one of {', '.join(choices)}{hint}")
            return next(iter(choices.values()))
        return choices[value]

    def only(self, name: str, *allowed: Any, why: str = "") -> None:
        """Refuse a value that is none of those; one that is missing or null is allowed."""
        if name in self and self.values[name] not in allowed:
            words = " or ".join(str(each).lower() for each in allowed) or "absent"
            self.wrong(name, f"must be {words}" + (f": {why}" if why else ""))

    def names(self, name: str, count: int, choices: Sequence[str]) -> list[str] | None:
        """Return a list of ``count`` names, or None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or set(map(str, value)) - {*choices}:
            self.problems.append(
                f"{self.source}: {name}: must list {count} times one of {', '.join(choices)};"
                " what else it may be needs a branch that we do not have"
            )
            return None
        return value

    def part(self, name: str) -> Settings:
        """Return the settings of a nested object; what is wrong there is noted here."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            self.wrong(name, "must be an object")
        inner = Settings(value if isinstance(value, dict) else {}, f"{self.source}: {name}")
        inner.problems = self.problems
        return inner

    def _value(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None and default is not _MISSING else value


def listed(problems: Sequence[str], said: str, most: int = 8) -> UserError:
    """Return the problems of a checkpoint as one error, the first ones of many."""
    text = "; ".join(problems[:most])
    more = f"; and {len(problems) - most} more" if len(problems) > most else ""
    return UserError(f"{said}: {text}{more}")
