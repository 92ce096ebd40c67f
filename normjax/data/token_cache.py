"""The cache of tokens: arrays under the fingerprint of their content, read as memory maps.

An entry says whose it is: the fingerprint stands in its checksummed ``meta.json``, with the SHA-256
of every array. All of it is hashed whenever it is opened, which takes about a second a gigabyte
on a processor with instructions for it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from normjax import regular_files
from normjax.data import cache_folder, scratch
from normjax.data.vocabulary import VOCABULARIES, Vocabulary
from normjax.regular_files import Unread

FORMAT = 1  # of tokens and cache: raise it when the same text would give other tokens
META_BYTES = 1 << 24  # of meta.json: a vocabulary of all characters takes 13 MB
_PARTS = ("train", "validation")  # as files of an entry, in its order


class CacheEntry(NamedTuple):
    """What is stored: the vocabulary and the tokens, (N,) and (M,) unsigned integers."""

    vocabulary: Vocabulary
    train: np.ndarray
    held_out: np.ndarray


def fingerprint(vocabulary: str, identity: str) -> str:
    """Return the SHA-256, in hex, of the format, the kind of vocabulary and a text's identity."""
    return _sha256(json.dumps((FORMAT, vocabulary, identity)).encode())


def read(folder: Path) -> CacheEntry | None:
    """Return a cache entry as memory maps, or None when it is not there or is not to be trusted.

    Args:
      folder: named by the fingerprint of its content.
    """
    if not os.path.lexists(folder):
        return None
    try:
        if wrong := cache_folder.refusal(folder, links=False):
            raise Unread(wrong)
        return _read(folder)
    except Unread as unread:
        reason = unread.words
    except OSError as error:
        reason = f"{os.path.basename(error.filename or '')}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        reason = "meta.json is damaged"  # what it says is not what is written here
    cache_folder.say(f"the cached tokens {folder} are not used ({reason}); the text is read again")
    return None


def _read(folder: Path) -> CacheEntry:
    raw = regular_files.read(folder / "meta.json", META_BYTES, links=False, own=True)
    meta = json.loads(raw.decode("utf-8"))
    if meta.pop("checksum") != _sha256(_canonical(meta)):
        raise Unread("meta.json is damaged")
    if (named := meta.get("fingerprint")) != folder.name:
        raise Unread(f"they are those of {'another text' if named else 'an earlier version'}")
    if meta["kind"] not in VOCABULARIES or not isinstance(meta["characters"], str):
        raise Unread("another kind of tokens")
    vocabulary = Vocabulary(meta["kind"], meta["characters"])
    arrays = (_array(folder / f"{p}.npy", meta["arrays"][p], vocabulary.dtype) for p in _PARTS)
    return CacheEntry(vocabulary, *arrays)


def _array(path: Path, expected: Mapping[str, Any], dtype: np.dtype[Any]) -> np.ndarray:
    """Return a stored array as a map of the very file whose bytes were compared."""
    with regular_files.opened(path, links=False, own=True) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected["bytes"] or hashed(file) != expected["sha256"]:
            raise Unread(f"{path.name} is damaged")
        file.seek(0)
        np.lib.format.read_magic(file)
        shape, _, stored = np.lib.format.read_array_header_1_0(file)
        if stored != dtype or len(shape) != 1:  # an object's dtype would be a pickle
            raise Unread(f"{path.name} holds other numbers")
        return np.memmap(file, dtype=stored, mode="r", offset=file.tell(), shape=shape)


def hashed(file: IO[bytes] | io.RawIOBase) -> str:
    """Return the SHA-256 of an open file from its start, in hex."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[bad-argument-type]


def write(folder: Path, entry: CacheEntry) -> CacheEntry:
    """Store an entry as ``folder`` and return it as memory maps, or as it is where none can be.

    It is written aside and renamed when whole, so that two processes at once and a kill at any
    moment are harmless: whoever comes second finds a good entry and keeps it.
    """
    aside = None
    try:
        if cache_folder.make(folder.parent):
            aside = scratch.make(folder.parent)  # for this user alone, as mkdtemp makes it
            for part, tokens in zip(_PARTS, (entry.train, entry.held_out), strict=True):
                np.save(aside / f"{part}.npy", tokens, allow_pickle=False)
            meta = _meta(aside, folder.name, entry.vocabulary)
            text = json.dumps(meta | {"checksum": _sha256(_canonical(meta))})
            (aside / "meta.json").write_text(text)
            for path in aside.iterdir():  # whatever files are made with here
                path.chmod(0o600)
            if read(folder) is None:
                if os.path.lexists(folder):  # damaged: a folder with files cannot be replaced
                    broken = scratch.make(folder.parent)
                    folder.rename(broken / "entry")
                    shutil.rmtree(broken, ignore_errors=True)
                aside.rename(folder)
    except OSError:
        pass
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    if stored := read(folder):
        return stored
    return kept(entry)


def kept(entry: CacheEntry) -> CacheEntry:
    """Return an entry that is held in memory only, read-only like a stored one."""
    entry.train.flags.writeable = entry.held_out.flags.writeable = False
    return entry


def _meta(folder: Path, fingerprint: str, vocabulary: Vocabulary) -> dict[str, Any]:
    arrays = {}
    for part in _PARTS:
        with open(folder / f"{part}.npy", "rb") as file:
            arrays[part] = {"sha256": hashed(file), "bytes": os.fstat(file.fileno()).st_size}
    return {
        "format": FORMAT, "fingerprint": fingerprint, "kind": vocabulary.kind,
        "characters": vocabulary.characters, "arrays": arrays,
    }  # fmt: skip


def _canonical(meta: Mapping[str, Any]) -> bytes:
    return json.dumps(meta, sort_keys=True).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
