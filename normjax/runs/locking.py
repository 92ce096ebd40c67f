"""One writer per workdir: a lock that dies with its owner."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Generator
from pathlib import Path


class LockedError(RuntimeError):
    """Another process writes to the workdir; the message says which."""


@contextlib.contextmanager
def locked(workdir: Path) -> Generator[None]:
    """Hold the workdir's lock; raise :class:`LockedError` at once where another process holds it.

    The lock is the kernel's (flock), not the file's existence: a killed owner leaves none behind.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / ".lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise LockedError(
                f"workdir {workdir} is in use by {owner}; wait for it, or use another --workdir"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
