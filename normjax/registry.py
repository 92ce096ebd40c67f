"""Tables of named rows (norms, placements, tasks, corpora) that a file of one's own may add to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from normjax.errors import UserError

R = TypeVar("R")

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ABSENT = object()
_ADDED: list[tuple[Registry[Any], str, Any]] = []
"""Every row added, in order, with what its name stood for before."""


class Registry(dict[str, R]):
    """A dict of rows that says what kind of thing they are and how one more is added.

    >>> colours = Registry("colour", {"red": 0xFF0000})
    >>> colours.register("green", 0x00FF00)
    65280
    >>> list(colours)
    ['red', 'green']
    """

    def __init__(self, kind: str, rows: Mapping[str, R] = {}):  # noqa: B006 (only read)
        super().__init__(rows)
        self.kind = kind

    def register(self, name: str, row: R, *, replace: bool = False) -> R:
        """Add a row under a name and return it.

        Args:
          name: a small letter, then small letters, digits or underscores: it becomes part of flags
            and of folder names.
          row: what the table holds.
          replace: whether a name that is taken may get another row.

        Raises:
          UserError: a name that is none, or one that is taken by a row that is not equal.
        """
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise UserError(
                f"{self.kind} {name!r}: a name must be a small letter, then small letters, digits"
                " or underscores; for example my_" + self.kind
            )
        if not replace and name in self and not self._same(self[name], row):
            raise UserError(
                f"{self.kind} {name!r}: the name is taken; choose another one, or pass replace=True"
            )
        if self.get(name, _ABSENT) is not row:
            _ADDED.append((self, name, self.get(name, _ABSENT)))
            self[name] = row
        return row

    @staticmethod
    def _same(old: R, new: R) -> bool:
        """Whether two rows are one; rows that cannot be compared (arrays in them) are two."""
        try:
            return old is new or bool(old == new)
        except (TypeError, ValueError):
            return False


def added() -> int:
    """Return how many rows have been added so far, to all tables."""
    return len(_ADDED)


def take_back(to: int) -> None:
    """Undo what has been added since :func:`added` was ``to``.

    >>> colours, before = Registry("colour"), added()
    >>> colours.register("red", 0xFF0000) and take_back(before)
    >>> colours
    {}
    """
    while len(_ADDED) > to:
        table, name, before = _ADDED.pop()
        if before is _ABSENT:
            del table[name]
        else:
            table[name] = before
