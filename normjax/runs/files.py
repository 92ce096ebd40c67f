"""Files below a workdir: the one place that opens them, in a way that trusts nothing in it.

A workdir may come from elsewhere. Below the folder that a user named no link is followed, nothing
but regular files is opened, a name read from a file must fit a pattern before it is part of a path,
and JSON is sealed: it holds the SHA-256 of itself, and of files that belong to it. Files are
written whole (temporary file, fsync, rename, fsync of the folder): readers see the old file or the
new one, never half.

No JAX is imported here: the folders are read on any laptop.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from normjax import regular_files
from normjax.errors import UserError
from normjax.regular_files import Unread

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+=-]{0,199}")
"""What a name below a workdir may be: no separator, no leading dot."""
MOST_BYTES = 1 << 30
"""A file that is read whole is at most this large."""
MOST_NESTED = 64
"""Brackets in brackets in JSON; what is written here has about ten."""
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC


def below(folder: Path, *names: str) -> Path:
    """Return ``folder/NAME/...`` for names that were read from a file.

    Raises:
      UserError: a name that leaves the folder or is none, or a link on the way.

    >>> str(below(Path("out"), "runs", "full-s0-1a2b"))
    'out/runs/full-s0-1a2b'
    """
    path = folder
    for name in names:
        if not isinstance(name, str) or not NAME.fullmatch(name) or ".." in name:
            raise UserError(
                f"{folder}: holds the name {str(name)[:60]!r}; a name there is letters, digits and"
                " _ . , + = -, and starts with a letter, a digit or _"
            )
        path = path / name
        if path.is_symlink():
            raise UserError(f"{path}: is a link; nothing below a workdir may be one, remove it")
    return path


def refuse_links(workdir: Path) -> None:
    """Raise :class:`UserError` where anything below a workdir is a link (it may be one itself)."""
    for entry in _entries(workdir):
        if entry.is_symlink():
            raise UserError(
                f"workdir={workdir}: {os.path.relpath(entry.path, workdir)} is a link; nothing"
                " below a workdir may be one; remove it, or name another workdir"
            )


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            entries = list(found)
    except FileNotFoundError:
        return
    for entry in entries:
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes | None:
    """Return what a regular file holds; None where there is none.

    Raises:
      UserError: it is a link, no regular file, or larger than ``most`` bytes.
    """
    try:
        with _opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size > most:
                raise Unread("too large", f"has {size} bytes; at most {most} are read")
            return regular_files.collected(file, most)
    except FileNotFoundError:
        return None
    except Unread as found:
        raise UserError(f"{path}: {found.words}; remove it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def digest(path: Path) -> str:
    """Return the SHA-256 of a regular file of any size.

    Raises:
      UserError: it is a link, no regular file, or cannot be read.
    """
    try:
        with _opened(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[no-matching-overload]
    except Unread as found:
        raise UserError(f"{path}: {found.words}; remove it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _opened(path: Path) -> contextlib.AbstractContextManager[io.FileIO]:
    return regular_files.opened(path, links=False)


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file whole and durably; a link in its place is replaced, not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OPEN, 0o666)
        with open(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(number)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return path


def sync_folder(folder: Path) -> None:
    """Make names in a folder durable, where the file system can."""
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def open_to_append(path: Path) -> int:
    """Return a file descriptor that reads and appends; a link is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _OPEN, 0o666)


# --- JSON -----------------------------------------------------------------------------------------


def strict(value: Any) -> Any:
    """Return a value as JSON has it: NaN and infinity as None, tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return value


def canonical(value: Any) -> bytes:
    """Return a value as JSON with sorted keys and no spaces: what is hashed."""
    return json.dumps(
        strict(value), sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()


def sha256(content: bytes) -> str:
    """Return the SHA-256 of bytes, in hex."""
    return hashlib.sha256(content).hexdigest()


def parsed(content: bytes) -> Any:
    """Return the value of JSON from elsewhere, which then can be computed with, drawn and written.

    Raises:
      ValueError: no JSON, or one that nothing here writes: text that UTF-8 cannot hold, a whole
        number beyond 64 bits, NaN or an infinity, or brackets nested too deeply.
    """
    text = content.decode()
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None
    level = [value]
    for _ in range(MOST_NESTED):
        if not (level := [part for each in level for part in _parts(each)]):
            break
    else:
        raise ValueError(f"brackets nested more than {MOST_NESTED} deep")
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # half a pair of surrogates is no text
    return value


def _whole(digits: str) -> int:
    if len(digits) > 20 or not -(1 << 63) <= int(digits) < 1 << 63:
        raise ValueError(f"the number {digits[:40]} is beyond 64 bits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:40]} is not finite")
    return number


def _parts(value: Any) -> Iterable[Any]:
    """Return the lists and objects in a list or an object."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for each in inner if isinstance(each, (dict, list))]


def check_shape(value: Any, shape: Any, name: str = "") -> None:
    """Hold a JSON value to the shape that this version writes.

    Args:
      value: what was read.
      shape: ``str``, ``bool``, ``dict``, ``list``; ``int``, a whole number from 0 on; ``float``,
        any number; ``[shape]``, a list of those; a dict of shapes by key, in which a key that ends
        with "?" may be absent or null, and "*" stands for all keys.
      name: of the value, in dotted form.

    Raises:
      UserError: the name of the first part that is of another kind.

    >>> check_shape({"runs": [{"id": "a"}]}, {"runs": [{"id": str}], "x?": {"name": str}})
    >>> check_shape({"runs": [{"id": 1}]}, {"runs": [{"id": str}]})
    Traceback (most recent call last):
    normjax.errors.UserError: runs.0.id is not as this version writes it
    """
    kind = shape if isinstance(shape, type) else type(shape)
    kinds: Any = (int, float) if kind is float else kind
    fits = isinstance(value, kinds) and (kind is bool or not isinstance(value, bool))
    if not fits or (kind is int and value < 0):
        shown = regular_files.printable(name.lstrip(".")[:60]) or "it"
        raise UserError(f"{shown} is not as this version writes it")
    if isinstance(shape, list):
        for number, each in enumerate(value):
            check_shape(each, shape[0], f"{name}.{number}")
    elif isinstance(shape, dict):
        for key, inner in shape.items():
            plain = key.removesuffix("?")
            for each in value if key == "*" else [plain]:
                if key == plain or value.get(each) is not None:
                    check_shape(value.get(each), inner, f"{name}.{each}")


def write_sealed(path: Path, value: dict[str, Any], beside: tuple[str, ...] = ()) -> str:
    """Write an object with the SHA-256 of its canonical form under "seal"; return the seal.

    Non-finite floats become null. ``beside`` names files of the same folder, written before, that
    count only together with it: their SHA-256 is sealed too, under "files".
    """
    plain = json.loads(json.dumps(strict(value), allow_nan=False))  # as it will be read
    plain.pop("seal", None)
    if beside:
        plain["files"] = {name: digest(path.with_name(name)) for name in beside}
    seal = sha256(canonical(plain))
    text = json.dumps(plain | {"seal": seal}, indent=1, allow_nan=False) + "\n"
    write_bytes(path, text.encode())
    return seal


def read_sealed(path: Path) -> dict[str, Any] | None:
    """Return a sealed object; None where there is no file.

    Raises:
      ValueError: it is no sealed object, or another one than was sealed, or a file that belongs to
        it is; or it is no file to be read (``UserError``).
    """
    content = read_bytes(path)
    if content is None:
        return None
    value = parsed(content)
    if not isinstance(value, dict) or "seal" not in value:
        raise ValueError("it is not sealed")
    plain = {k: v for k, v in value.items() if k != "seal"}
    if sha256(canonical(plain)) != value["seal"]:
        raise ValueError("it is not what was sealed")
    check_shape(value.get("files", {}), {"*": str}, "files")
    for name, wanted in value.get("files", {}).items():
        if digest(below(path.parent, name)) != wanted:
            raise ValueError(f"{name} is not what was sealed")
    return value


def read_object(path: Path) -> dict[str, Any] | None:
    """Return what was given to be sealed, or None where it is missing or damaged."""
    try:
        value = read_sealed(path)
    except ValueError:
        return None
    return value and {k: v for k, v in value.items() if k not in ("seal", "files")}
