"""Files that come from elsewhere, read without a wait, without surprise, and never too much.

Only regular files are read: opening a pipe waits for a writer, and a device never ends.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Callable, Generator
from typing import Protocol

CHUNK = 1 << 20
Look = Callable[[bytes, int], None]


class Readable(Protocol):
    """What bytes come from in pieces, None where it would wait for more."""

    def read(self, size: int = -1, /) -> bytes | None: ...


class Unread(Exception):
    """A file that is not read.

    Attributes:
      reason: which kind of obstacle, the same words for all files that share it.
      words: what is wrong with this one.
      fix: what would read it; "" where nothing would.
      size: its bytes, where they are too many and known.
    """

    def __init__(self, reason: str, words: str = "", fix: str = "", size: int = 0) -> None:
        super().__init__(words or reason)
        self.reason, self.words, self.fix, self.size = reason, words or reason, fix, size


def read(path: str | os.PathLike[str], most: int, look: Look | None = None, *,
         links: bool = True, own: bool = False) -> bytes:  # fmt: skip
    """Return the bytes of a regular file.

    Args:
      path: of the file.
      most: bytes; a longer file is refused by its size, or where it turns out to be longer.
      look: is shown every piece and the bytes before it as it comes; it may raise.
      links: whether the last part of the path may be a link.
      own: whether it must belong to this user and be writable by nobody else.

    Raises:
      Unread: not a regular file, too large, changed meanwhile, or another's.
      OSError: it cannot be opened or read.
    """
    with opened(path, links=links, own=own) as file:
        before = os.fstat(file.fileno())
        if before.st_size > most:
            words = f"has {before.st_size:,} bytes, more than {most:,}"
            raise Unread("too large", words, size=before.st_size)
        data = collected(file, most, look)
        if _state(before) != _state(os.fstat(file.fileno())):
            words, fix = "changed while it was read", "pass a text that nobody writes to meanwhile"
            raise Unread(words, words, fix)
    return data


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str], *, links: bool = True, own: bool = False
) -> Generator[io.FileIO]:
    """Open a regular file for reading; arguments and errors are those of :func:`read`."""
    # Looked at before it is opened: opening alone has effects on some devices.
    _regular(os.stat(path, follow_symlinks=links))
    with io.FileIO(_descriptor(path, links), "rb") as file:
        state = os.fstat(file.fileno())
        _regular(state)
        if own and not is_own(state):
            raise Unread("another's", "belongs to somebody else, or others may write to it")
        yield file


def collected(file: Readable, most: int, look: Look | None = None) -> bytes:
    """Return what is left of an open file, never more than ``most`` bytes."""
    pieces, size = [], 0
    while piece := file.read(CHUNK):
        if size + len(piece) > most:
            raise Unread("too large", f"has more than {most:,} bytes")
        if look:
            look(piece, size)
        pieces.append(piece)
        size += len(piece)
    if piece is None:  # one of the kernel's, which would wait for more
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return b"".join(pieces)


def is_own(state: os.stat_result) -> bool:
    """Whether what a state is of belongs to this user, and nobody else may write to it."""
    return state.st_uid == os.geteuid() and not state.st_mode & 0o022


def _descriptor(path: str | os.PathLike[str], links: bool) -> int:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    return os.open(path, flags if links else flags | os.O_NOFOLLOW)


def _regular(state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise Unread("not a regular file", f"is {_kind(state)}, not a file")


def _kind(state: os.stat_result) -> str:
    kinds = {
        stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device", stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(state.st_mode), "something else")


def _state(state: os.stat_result) -> tuple[int, ...]:
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns


def printable(name: str) -> str:
    r"""Return a file's name as one line of text, whatever bytes it consists of.

    >>> printable("poems/été.txt"), printable("a\nb"), printable("\udcff.txt")
    ('poems/été.txt', 'a\\nb', '\\xff.txt')
    >>> printable("\ud800")
    '\\ud800'
    """
    return "".join(c if c.isprintable() else _escaped(c) for c in name)


def _escaped(letter: str) -> str:
    if "\udc80" <= letter <= "\udcff":  # a byte of a name that is no UTF-8
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode()
