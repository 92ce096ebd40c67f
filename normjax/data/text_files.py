"""A text file, or the text files of a folder, as one text; what is wrong with them in one line.

A path that was named is read or refused. In a folder every entry is read or left out, and an
account says how many, which and why.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import io
import itertools
import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from normjax import regular_files
from normjax.data.accounts import Account
from normjax.errors import UserError, suggest
from normjax.regular_files import Unread, printable

SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
ENCODING = "utf-8"
MOST_BYTES = 1 << 30
"""Of a text, decompressed, where nothing else is said: it is held in memory several times."""
MOST_ENTRIES = 5_000_000
"""Entries of a folder; one with more is hardly meant as a text."""
NAMES = "a path (with a slash, or of something that exists), plays, tfds:NAME, or task:NAME"
"""What ``data.corpus`` may be, as messages put it."""
_TRANSFORMS = ("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape", "utf-7")


class How(NamedTuple):
    """How files become text.

    Attributes:
      suffixes: endings of the files that are read from a folder; ``*`` for all.
      encoding: of their characters.
      field: of JSON lines, which is the text of each; "" to read such files as they are.
      most: bytes of the whole text, decompressed.
    """

    suffixes: tuple[str, ...] = SUFFIXES
    encoding: str = ENCODING
    field: str = ""
    most: int = MOST_BYTES

    @property
    def endings(self) -> tuple[str, ...]:
        """The endings in small letters, with a dot; none where all are read.

        >>> How(("py", "*.C")).endings, How(field="text").endings[2:], How(("*",)).endings
        (('.py', '.c'), ('.jsonl', '.ndjson', '.json'), ())
        """
        if any(s.strip("*.") == "" for s in self.suffixes):
            return ()
        own = tuple("." + s.removeprefix("*").lower().lstrip(".") for s in self.suffixes)
        return own + (JSON_SUFFIXES if self.field else ())


USUAL = How()


class Text(NamedTuple):
    """A text with the last part of its path, what it is in words, and what became of a folder."""

    name: str
    description: str
    text: str
    files: Account | None = None


def read(corpus: str, names: Iterable[str] = (), how: How = USUAL) -> Text:
    """Return the text at a path; the files of a folder in the order of their relative paths.

    Args:
      corpus: the path.
      names: of texts that are no paths, to suggest where there is nothing at this one.
      how: which files of a folder are read, and how.

    Raises:
      UserError: nothing there, or something that is no text.
    """
    argument = f"data.corpus={printable(corpus)}"
    path = os.path.expanduser(corpus)  # unlike Path's, it leaves a ``~`` of nobody alone
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        close = suggest(corpus, [*names, *_siblings(Path(path))])
        raise UserError(f"{argument}: no such file or folder{close}; pass {NAMES}") from None
    except (OSError, ValueError) as error:  # no permission on the way, a NUL or too long a name
        raise UserError(f"{argument}: cannot be read ({_reason(error)}); pass {NAMES}") from None
    name = printable(os.path.basename(os.path.realpath(path) if is_folder else path))
    if is_folder:
        text, account = _folder(argument, path, how)
        entries = "entry" if account.missing == 1 else "entries"
        left = f" ({account.missing:,} {entries} left out)" if account.missing else ""
        what = f"{account.read:,} text files of the folder {name}{left}"
        return Text(name, what, text, account)
    try:
        return Text(name, f"text file {name}", _text(path, how))
    except Unread as unread:
        raise UserError(f"{argument}: {unread.words}; {unread.fix or f'pass {NAMES}'}") from None
    except OSError as error:
        raise UserError(
            f"{argument}: cannot be read ({_reason(error)}); "
            "pass a file that you may read, or change its permissions"
        ) from None


def check_encoding(encoding: str) -> None:
    """Raise unless there is an encoding of text by this name.

    Raises:
      UserError: there is none.

    >>> check_encoding("utf-16")
    """
    with contextlib.suppress(LookupError, ValueError, UnicodeError):
        found = codecs.lookup(encoding)
        if found.name not in _TRANSFORMS and isinstance("".encode(encoding), bytes):
            return
    known = ("utf-8", "utf-16", "utf-32", "latin-1", "cp1252", "shift_jis", "gb18030", "koi8-r")
    raise UserError(
        f"data.encoding={encoding!r}: no encoding of text has this name{suggest(encoding, known)};"
        f" pass one such as --config.data.encoding=utf-8 ({', '.join(known[1:])})"
    )


def _siblings(path: Path) -> list[str]:
    """Return the names beside a path that does not exist, written as the path was."""
    with contextlib.suppress(OSError, ValueError):
        return [str(p) for p in itertools.islice(path.parent.iterdir(), 5000)]
    return []


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


# --- a folder -------------------------------------------------------------------------------------


def _folder(argument: str, folder: str, how: How) -> tuple[str, Account]:
    account, texts, seen, size = Account(), [], set(), 0
    flags: dict[str, str] = {}
    # Sorted as text with slashes, whatever the folder's own order: the same text on every machine.
    for name in sorted(_entries(argument, folder, account)):
        path, shown, length = os.path.join(folder, name), printable(name), 0
        try:
            length = os.lstat(path).st_size
            text = _text(_wanted(folder, path, name, how, flags), how, links=False)
            digest = hashlib.sha256(text.encode()).digest()
            if text and name.lower().endswith(".gz") and digest in seen:
                raise Unread("the same text compressed")
        except Unread as unread:
            account.leave_out(unread.reason, shown, length, _flag(unread.fix))
            continue
        except OSError as error:
            account.leave_out(f"unreadable: {_reason(error)}", shown, length)
            continue
        # An empty file keeps the empty line that it always made between its neighbours, and a
        # folder its fingerprint.
        texts.append(text)
        if not text:
            account.leave_out("empty", shown, length)
            continue
        account.add_read(length, digest in seen)
        seen.add(digest)
        size += len(text)
        if size > how.most:
            raise UserError(
                f"{argument}: its files have more than {how.most:,} characters together; pass"
                " --config.data.max_bytes=MORE, if the memory holds it, or a smaller folder"
            )
    if not account.read:
        endings = " or ".join("*" + e for e in how.endings) or "of any name"
        found = f"; it holds {'; '.join(account.reasons)}" if account.left_out else ""
        raise UserError(
            f"{argument}: the folder holds no text file ({endings}, subfolders included){found};"
            f" pass {NAMES}"
        )
    return "\n".join(texts), account


def _entries(argument: str, folder: str, account: Account) -> Iterator[str]:
    """Yield all below a folder that is none itself, by relative path; count what has no list."""
    pending, count = [""], 0
    while pending:
        below = pending.pop()
        try:
            with os.scandir(os.path.join(folder, below)) as entries:
                for entry in entries:
                    if (count := count + 1) > MOST_ENTRIES:
                        raise UserError(
                            f"{argument}: the folder has more than {MOST_ENTRIES:,} entries; pass"
                            " one that holds little but texts"
                        )
                    name = os.path.join(below, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(name)
                    else:
                        yield name
        except OSError as error:
            if not below:
                raise UserError(
                    f"{argument}: cannot be read ({_reason(error)}); pass {NAMES}"
                ) from None
            account.leave_out(f"unreadable: {_reason(error)}", printable(below) + "/", 0)


def _wanted(folder: str, path: str, name: str, how: How, flags: dict[str, str]) -> str:
    """Return where an entry's bytes lie, or raise because it is not to be read.

    ``flags`` holds what would read each other ending met so far.
    """
    if any(part.startswith(".") for part in name.split("/")):
        raise Unread("hidden")
    if os.path.islink(path):
        path = _target(folder, path)
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise Unread("not a regular file")
    endings = how.endings
    if endings and not _plain_name(name).endswith(endings):
        ending = os.path.splitext(_plain_name(name))[1]
        if not flags.get(ending):
            flags[ending] = _ending_flag(ending, how) if _begins_as_text(path, how) else ""
        raise Unread("with another ending", fix=flags[ending])
    return path


def _target(folder: str, link: str) -> str:
    """Return what a link leads to; it must lie in the folder, or a text could hold any file."""
    try:
        target, inside = os.path.realpath(link, strict=True), os.path.realpath(folder)
    except OSError:
        raise Unread("a link that leads nowhere") from None
    if os.path.commonpath([target, inside]) != inside:
        raise Unread("a link out of the folder")
    if os.path.isdir(target):
        raise Unread("a link to a folder")
    return target


def _plain_name(name: str) -> str:
    return name.lower().removesuffix(".gz")


def _ending_flag(ending: str, how: How) -> str:
    if ending in JSON_SUFFIXES:
        return "--config.data.field=NAME"
    plain = ending.isascii() and ending[1:].isalnum()
    return f"--config.data.suffixes={','.join((*how.suffixes, ending)) if plain else '*'}"


def _begins_as_text(path: str, how: How) -> bool:
    """Whether a file could be read, by its first bytes: no flag is named in vain."""
    try:
        with regular_files.opened(path, links=False) as file:
            source = gzip.GzipFile(fileobj=file) if path.lower().endswith(".gz") else file
            piece = source.read(4096) or b""
            _Look(how.encoding)(piece, 0)
            return bool(codecs.getincrementaldecoder(how.encoding)().decode(piece))
    except (Unread, OSError, LookupError, UnicodeError, EOFError, zlib.error):
        return False


def _flag(fix: str) -> str:
    """Return the first flag in a fix, if there is one."""
    return next((w.rstrip(",;") for w in fix.split() if w.startswith("--config.")), "")


# --- a file ---------------------------------------------------------------------------------------


def _text(path: str, how: How, links: bool = True) -> str:
    """Return a text file's characters.

    A byte order mark is dropped, and line ends become ``\\n``: a text copied through Windows has
    the same tokens, and no model spends capacity on carriage returns.

    Raises:
      Unread: it is no text, or too large a one.
      OSError: it cannot be read.
    """
    text = _unified(_decoded(_bytes(path, how, links), how.encoding))
    if how.field and _plain_name(path).endswith(JSON_SUFFIXES):
        text = _unified("\n".join(_documents(text, how.field)))
    return text


def _bytes(path: str, how: How, links: bool) -> bytes:
    try:
        if not path.lower().endswith(".gz"):
            return regular_files.read(path, how.most, _Look(how.encoding), links=links)
        data = io.BytesIO(regular_files.read(path, how.most, links=links))
        with gzip.GzipFile(fileobj=data) as file:
            return regular_files.collected(file, how.most, _Look(how.encoding))
    except Unread as unread:
        if unread.reason != "too large":
            raise
        fix = f"pass --config.data.max_bytes={unread.size or 'MORE'}, if the memory holds it"
        raise Unread(unread.reason, unread.words, fix) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        words = f"named .gz and not whole gzip ({_reason(error)})"
        raise Unread("damaged gzip", words, "compress it again, or pass it uncompressed") from None


class _Look:
    """Notices, piece by piece, what is no text, so that no more is read."""

    def __init__(self, encoding: str) -> None:
        self._encoding, self._line = encoding, 1
        self._narrow = "a".encode(encoding) == b"a"  # else zero bytes are parts of letters

    def __call__(self, piece: bytes, before: int) -> None:
        if not self._narrow:
            return
        if before == 0 and piece[:2] in (b"\xff\xfe", b"\xfe\xff") and len(piece) > 2:
            words = f"is UTF-16, not {self._encoding.upper()}"
            fix = "pass --config.data.encoding=utf-16 or save it as UTF-8 text"
            raise Unread("in UTF-16", words, fix)
        if (at := piece.find(b"\0")) >= 0:
            line = self._line + piece.count(b"\n", 0, at)
            words = f"not a text file, zero byte at offset {before + at} (line {line})"
            raise Unread("binary", words, f"pass a {self._encoding.upper()} text file")
        self._line += piece.count(b"\n")


def _decoded(data: bytes, encoding: str) -> str:
    name = encoding.upper()
    try:
        text = data.decode(encoding)
        text.encode("utf-8")  # half a pair of surrogates is no character
    except UnicodeDecodeError as error:
        at = error.start
        line = data.count(b"\n", 0, at) + 1
        words = f"not {name}, byte 0x{data[at]:02x} at offset {at} (line {line})"
    except UnicodeError as error:
        words = f"not {name} ({' '.join(str(error).split())[:100]})"
    else:
        if (at := text.find("\0")) < 0:
            return text
        words = f"not a text file, zero character at {at} when read as {name}"
        raise Unread("binary", words, f"pass a text file in {name}")
    others = "latin-1 or utf-16" if encoding == ENCODING else "utf-8"
    fix = (
        f"pass --config.data.encoding=NAME, such as {others}, or save it as UTF-8 text,"
        " e.g. iconv -f ENCODING -t UTF-8"
    )
    raise Unread(f"not {name}", words, fix)


def _documents(text: str, field: str) -> Iterator[str]:
    """Yield a field of every line of JSON lines; each must have it and hold a text there."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        known: list[str] = []
        try:
            value = json.loads(line)
            known = [key for key, each in value.items() if isinstance(each, str)]
            document = value[field]
            document.encode("utf-8")
        except (ValueError, AttributeError, KeyError, RecursionError) as error:
            if isinstance(error, UnicodeError):
                words = f"line {number} has half a pair of surrogates"
            elif known:
                fields = printable(", ".join(known)[:100])
                words = f"line {number} has no text {field!r}, but {fields}"
            else:
                words = f"line {number} is not an object of JSON with a text {field!r}"
            fix = (
                "pass the field that every line has, --config.data.field=NAME, or"
                " --config.data.field= to read it as it is"
            )
            raise Unread(f"without {field!r} in every line", words, fix) from None
        yield document


def _unified(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def clean(corpus: str, text: str) -> str:
    """Return a text without byte order mark and with plain line ends; it must not be blank."""
    text = _unified(text)
    if not text.strip():
        raise UserError(
            f"data.corpus={printable(corpus)}: the text is empty or only blank; pass {NAMES}"
        )
    return text
