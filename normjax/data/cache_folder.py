"""Where the cache lies, and whether what lies there can be trusted.

It holds tokens, prepared sets and compiled machine code. What somebody else could have put there is
not used: every folder of it belongs to this user, and nobody else may write to it.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from normjax import regular_files

_said: set[str] = set()


def say(line: str) -> None:
    """Print a line on the error stream, once in a process."""
    if line not in _said:
        _said.add(line)
        print(f"normjax: {line}", file=sys.stderr, flush=True)


def where(configured: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where the cache belongs, whether or not it can be used; None where it has no place.

    >>> where("", {"XDG_CACHE_HOME": "/x"}), where("/mine", {"NORMJAX_CACHE": "/other"})
    (PosixPath('/x/normjax'), PosixPath('/mine'))
    """
    if chosen := configured or environment.get("NORMJAX_CACHE", ""):
        return Path(os.path.expanduser(chosen)).absolute()
    base = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "normjax"
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        return Path(home) / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "normjax"
    try:  # an account without a home
        return Path(tempfile.gettempdir()) / f"normjax-{os.geteuid()}"
    except OSError:
        return None


def folder(configured: str, *below: str, environment: Mapping[str, str] = os.environ
           ) -> Path | None:  # fmt: skip
    """Return the cache, or a folder in it, where it can be trusted; None after a line where not.

    A folder that is not there is none to mistrust; :func:`make` makes it.

    Args:
      configured: the folder that the user chose, "" for the usual one.
      *below: the names of folders, each in the one before.
      environment: where NORMJAX_CACHE and XDG_CACHE_HOME are looked up.
    """
    place = where(configured, environment)
    if place is None:
        return None
    # A folder of the user's own choice may be a link; in the cache nothing is one, and where
    # anybody may write, as in a temporary folder, neither.
    if not _trusted(place, links=not _is_public(place.parent)):
        return None
    for name in below:
        place = place / name
        if not _trusted(place, links=False):
            return None
    return place


def make(place: Path) -> bool:
    """Make a folder, and those that it lies in, for this user alone; whether it can be used.

    Where it is there already it is held to the same rule.
    """
    try:
        for each in (*reversed(place.parents), place):
            if not each.exists():
                each.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return False
    return _trusted(place, links=True) and place.is_dir()


def _is_public(place: Path) -> bool:
    try:
        return bool(place.stat().st_mode & 0o002)
    except OSError:
        return False


def _trusted(place: Path, links: bool) -> bool:
    if wrong := refusal(place, links):
        say(
            f"the cache {regular_files.printable(str(place))} is not used: {wrong}; remove it, or"
            " close it (chmod -R go-w) if it is your own, or choose another, NORMJAX_CACHE=FOLDER"
        )
    return not wrong


def refusal(place: Path, links: bool = True) -> str:
    """Return why a folder is not trusted, in words; "" where it is, or is not there.

    Args:
      place: the folder.
      links: whether it may be a link, of this user's.
    """
    try:
        state = os.lstat(place)
        if stat.S_ISLNK(state.st_mode):
            if not links:
                return "it is a link"
            if state.st_uid != os.geteuid():
                return f"it is a link of another user's (uid {state.st_uid})"
            state = os.stat(place)
    except OSError:
        return ""
    if not stat.S_ISDIR(state.st_mode):
        return "it is no folder"
    if state.st_uid != os.geteuid():
        return f"it belongs to another user (uid {state.st_uid})"
    if state.st_mode & 0o022:
        return f"others may write to it (mode {stat.S_IMODE(state.st_mode):o})"
    return ""
