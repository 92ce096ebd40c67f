"""What became of every entry of a folder: read, or left out and why."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

NAMES = 3
"""How many names of each reason are kept."""


@dataclasses.dataclass
class Group:
    """The entries that were left out for one reason.

    Attributes:
      count: how many.
      size: their bytes as the file system tells them.
      names: the first few, by path.
      fixes: what would read them, and how many of them.
    """

    count: int = 0
    size: int = 0
    names: list[str] = dataclasses.field(default_factory=list)
    fixes: Counter[str] = dataclasses.field(default_factory=Counter)


@dataclasses.dataclass
class Account:
    """Of a folder that was read as text; every entry that is no folder is counted once.

    >>> account = Account()
    >>> account.add_read(120)
    >>> account.leave_out("hidden", ".git/config", 80)
    >>> account.words
    '1 read (120 bytes), 1 left out: 1 hidden (80 bytes; .git/config)'

    Attributes:
      read: how many files were read.
      read_size: their bytes on disk.
      repeated: how many of those have the same text as one before.
      left_out: the others by reason.
    """

    read: int = 0
    read_size: int = 0
    repeated: int = 0
    left_out: dict[str, Group] = dataclasses.field(default_factory=dict)

    def add_read(self, size: int, repeated: bool = False) -> None:
        """Count a file that was read."""
        self.read, self.read_size = self.read + 1, self.read_size + size
        self.repeated += repeated

    def leave_out(self, reason: str, name: str, size: int, fix: str = "") -> None:
        """Count an entry that was not, under its printable name."""
        group = self.left_out.setdefault(reason, Group())
        group.count, group.size = group.count + 1, group.size + size
        if len(group.names) < NAMES:
            group.names.append(name)
        if fix:
            group.fixes[fix] += 1

    @property
    def missing(self) -> int:
        """How many entries were left out."""
        return sum(group.count for group in self.left_out.values())

    @property
    def reasons(self) -> list[str]:
        """A line for each reason: count, bytes, the first names, what would read them."""
        return [_line(reason, group) for reason, group in self.left_out.items()]

    @property
    def total(self) -> str:
        """How many were read and left out, in words."""
        again = f", {self.repeated:,} of them repeat another's text" if self.repeated else ""
        return (
            f"{self.read:,} read ({self.read_size:,} bytes{again}), "
            f"{self.missing or 'none':{',' if self.missing else ''}} left out"
        )

    @property
    def words(self) -> str:
        """All of it in one sentence."""
        return self.total + (": " if self.left_out else "") + "; ".join(self.reasons)

    def record(self) -> dict[str, Any]:
        """Return the account as plain JSON."""
        groups = [
            {"reason": reason, "count": group.count, "bytes": group.size, "names": group.names}
            for reason, group in self.left_out.items()
        ]
        return {
            "read": self.read, "read_bytes": self.read_size, "repeated": self.repeated,
            "left_out": groups, "words": self.words,
        }  # fmt: skip


def _line(reason: str, group: Group) -> str:
    names = ", ".join(group.names) + (", ..." if group.count > len(group.names) else "")
    shown = [fix if n == group.count else f"{fix} ({n:,} of them)"
             for fix, n in group.fixes.most_common(2)]  # fmt: skip
    fixes = f"; read by {' or '.join(shown)}" if shown else ""
    return f"{group.count:,} {reason} ({group.size:,} bytes; {names}{fixes})"
