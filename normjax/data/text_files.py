"""A text file, or the text files of a folder, as one text; what is wrong with them in one line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from normjax.errors import UserError, suggest

SUFFIXES = (".txt", ".md")
NAMES = "a path (with a slash, or of something that exists), plays, tfds:NAME, or task:NAME"
"""What ``data.corpus`` may be, as messages put it."""


class Text(NamedTuple):
    """A text with the last part of its path and with what it is, in words."""

    name: str
    description: str
    text: str


def read(corpus: str, names: Iterable[str] = ()) -> Text:
    """Return the text at a path; the files of a folder in the order of their relative paths.

    Args:
      corpus: the path.
      names: of texts that are no paths, to suggest where there is nothing at this one.

    Raises:
      UserError: nothing there, or something that cannot be read as UTF-8 text.
    """
    path = Path(os.path.expanduser(corpus))  # unlike Path's, it leaves a ``~`` of nobody alone
    try:
        if path.is_dir():
            files = _files_of(corpus, path)
            text, name = "\n".join(_read(corpus, file) for file in files), path.resolve().name
            return Text(name, f"{len(files)} text files of the folder {name}", text)
        if path.is_file():
            return Text(path.name, f"text file {path.name}", _read(corpus, path))
        exists = path.exists()
    except UserError:  # which is a ValueError too
        raise
    except (OSError, ValueError) as error:  # no permission on the way, a NUL or too long a name
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"data.corpus={corpus!r}: cannot be read ({reason}); pass {NAMES}"
        ) from None
    if exists:
        raise UserError(f"data.corpus={corpus}: neither a file nor a folder; pass {NAMES}")
    close = suggest(corpus, [*names, *_siblings(path)])
    raise UserError(f"data.corpus={corpus}: no such file or folder{close}; pass {NAMES}")


def _siblings(path: Path) -> list[str]:
    """Return the names beside a path that does not exist, written as the path was."""
    with contextlib.suppress(OSError, ValueError):
        return [str(p) for p in path.parent.iterdir()]
    return []


def _files_of(corpus: str, folder: Path) -> list[Path]:
    """Return the text files below a folder by relative path, without hidden ones."""
    found: list[str] = []

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [f for f in folders if not f.startswith(".")]
        paths = (Path(root, n).relative_to(folder) for n in names if not n.startswith("."))
        found += [p.as_posix() for p in paths if p.suffix.lower() in SUFFIXES]
    if not found:
        raise UserError(
            f"data.corpus={corpus}: the folder holds no text file "
            f"({' or '.join('*' + s for s in SUFFIXES)}, subfolders included); pass {NAMES}"
        )
    return [folder / p for p in sorted(found)]


def _read(corpus: str, path: Path) -> str:
    """Return a text file's characters.

    A byte order mark is dropped, and line ends become ``\\n``: a text copied through Windows has
    the same tokens, and no model spends capacity on carriage returns.
    """
    argument = f"data.corpus={corpus}"
    where = "" if str(path) == corpus else f"{path}: "
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{argument}: {where}cannot be read ({error.strerror}); "
            "pass a file that you may read, or change its permissions"
        ) from None
    fix = "save it as UTF-8 text, e.g. iconv -f ENCODING -t UTF-8"
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{argument}: {where}is UTF-16, not UTF-8; save it as UTF-8 text")
    if (at := data.find(b"\0")) >= 0:
        raise UserError(
            f"{argument}: {where}not a text file, zero byte at offset {at} "
            f"(line {_line(data, at)}); pass a UTF-8 text file"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        raise UserError(
            f"{argument}: {where}not UTF-8, byte 0x{data[at]:02x} at offset {at} "
            f"(line {_line(data, at)}); {fix}"
        ) from None
    return _unified(text)


def _line(data: bytes, at: int) -> int:
    return data.count(b"\n", 0, at) + 1


def _unified(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def clean(corpus: str, text: str) -> str:
    """Return a text without byte order mark and with plain line ends; it must not be blank."""
    text = _unified(text)
    if not text.strip():
        raise UserError(f"data.corpus={corpus}: the text is empty or only blank; pass {NAMES}")
    return text
