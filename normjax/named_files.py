"""Files that a person names on the command line, read whole; messages name the argument."""

from __future__ import annotations

from pathlib import Path

from normjax import regular_files
from normjax.errors import UserError


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
    try:
        return regular_files.read(path, most)
    except FileNotFoundError:
        raise
    except regular_files.Unread as found:
        raise UserError(f"{argument}: {found.words}; {allowed}") from None
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{argument}: cannot be read ({reason}); {allowed}") from None
