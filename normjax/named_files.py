"""Files that a person names, read whole: only plain ones, only up to a size, never waiting.

A pipe that nobody writes to, a device without an end, a folder, a file of a terabyte are told at
once by what they are.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from normjax.errors import UserError

_KINDS = (
    (stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"), (stat.S_ISSOCK, "a socket"),
)  # fmt: skip


def read(path: Path, argument: str, most: int, allowed: str) -> bytes:
    """Return the content of a plain file of at most ``most`` bytes.

    Args:
      path: where it is.
      argument: what messages start with, such as ``--predict=mine.txt``.
      most: bytes.
      allowed: what may be named instead, in words.

    Raises:
      FileNotFoundError: there is none; who calls knows names that are like it.
      UserError: anything else that keeps it from being read.
    """
    descriptor = -1
    try:
        # Without O_NONBLOCK the opening of a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        kind = next((kind for test, kind in _KINDS if test(found.st_mode)), None)
        if kind is not None:
            raise UserError(f"{argument}: is {kind}, not a file; {allowed}")
        content = b""
        if found.st_size <= most:
            with os.fdopen(os.dup(descriptor), "rb") as file:
                content = file.read(most + 1)  # one that grows, or has no size, as in /proc
        if max(found.st_size, len(content)) > most:
            raise UserError(
                f"{argument}: has {max(found.st_size, len(content)):,} bytes or more, at most"
                f" {most:,} are read; {allowed}"
            )
        return content
    except FileNotFoundError:
        raise
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{argument}: cannot be read ({reason}); {allowed}") from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)
