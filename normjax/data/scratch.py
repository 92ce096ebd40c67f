"""Folders in a cache that are filled aside and renamed when whole.

Whoever makes one removes it, unless the process is killed: what a kill has left behind is removed
by whoever writes to the same cache a day later.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = ".new-normjax-"  # the name says whose it is: a cache may be any folder of the user's
STALE_S = 24 * 3600.0


def make(root: Path) -> Path:
    """Return a new folder inside ``root``, which exists, and remove stale ones of before.

    Raises:
      OSError: ``root`` cannot be written to.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    sweep(root)
    return folder


def sweep(root: Path) -> None:
    """Remove the folders made here in which nothing was written for ``STALE_S`` seconds."""
    limit = time.time() - STALE_S
    with contextlib.suppress(OSError):
        for path in root.glob(PREFIX + "*"):
            if path.is_dir() and not path.is_symlink() and _last_write(path) < limit:
                shutil.rmtree(path, ignore_errors=True)


def _last_write(folder: Path) -> float:
    """Return the time of the newest change below a folder: a long download only shows inside."""
    newest = folder.stat().st_mtime
    for root, _, files in os.walk(folder):
        for path in (root, *(os.path.join(root, f) for f in files)):
            with contextlib.suppress(OSError):  # removed meanwhile
                newest = max(newest, os.lstat(path).st_mtime)
    return newest
