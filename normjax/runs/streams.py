"""Standard input, output and error that may be lost: a display never stops the work.

A reader that went away or stopped reading, a terminal that was closed, a full disk behind a
redirection, an encoding that lacks a letter: what cannot be written is dropped, and the work goes
on. Results, on standard output, wait for their reader; the display, on standard error, does so for
some seconds only.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import Any

PATIENCE_MS = 5000
"""How long the display waits for a reader who does not read, once."""
_PIECE = 4096  # bytes that a pipe takes at once, without waiting, where it takes any
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Nobody is there to read: no more is wanted."""


class Tolerant(io.RawIOBase):
    """A file descriptor to which writing never fails; ``lost`` is the first error.

    Args:
      descriptor: of the open file.
      patience_ms: how long to wait for a reader, the first time; None: for ever.
    """

    def __init__(self, descriptor: int, patience_ms: int | None = None):
        super().__init__()
        self._descriptor, self._patience = descriptor, patience_ms
        self.lost: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Write what can be written; return the number of bytes that are done with."""
        try:
            if not wait(self._descriptor, self._patience):
                self._patience = 0
                raise OSError(errno.EAGAIN, "nobody reads")
            return os.write(self._descriptor, data[:_PIECE])
        except OSError as error:
            self.lost = self.lost or error
            return len(data)


def wait(descriptor: int, patience_ms: int | None) -> bool:
    """Wait until a file takes what is written to it; return whether it does."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(patience_ms))


def install() -> None:
    """Put tolerant streams in the place of this process's own, closed ones included."""
    for descriptor in (0, 1, 2):
        # A closed one would be given to the next file that is opened, and be written to as output.
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (for good)
    sys.stdout = _tolerant(1, sys.stdout)
    sys.stderr = _tolerant(2, sys.stderr)


def _tolerant(descriptor: int, old: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(Tolerant(descriptor, PATIENCE_MS if descriptor == 2 else None)),
        encoding=getattr(old, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )


def lost(stream: Any = None) -> OSError | None:
    """Return why a part of standard output was lost; None where all was written or unwanted."""
    stream = stream or sys.stdout
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if not isinstance(raw, Tolerant):
        return None
    stream.flush()
    return None if raw.lost is None or raw.lost.errno in _GONE else raw.lost
