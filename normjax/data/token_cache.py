"""The cache of tokens: arrays under the fingerprint of their content, read as memory maps."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normjax.data import scratch
from normjax.data.vocabulary import Vocabulary

FORMAT = 1  # of tokens and cache: raise it when the same text would give other tokens
HASHED_BYTES = 64 << 20  # arrays up to this size are hashed when read back, larger ones only sized
_PARTS = ("train", "validation")


class CacheEntry(NamedTuple):
    """What is stored: the vocabulary and the tokens, (N,) and (M,) unsigned integers."""

    vocabulary: Vocabulary
    train: np.ndarray
    validation: np.ndarray


def fingerprint(vocabulary: str, identity: str) -> str:
    """Return the SHA-256, in hex, of the format, the kind of vocabulary and a text's identity."""
    return _sha256(json.dumps((FORMAT, vocabulary, identity)).encode())


def root(configured: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder; it is created only when something is written to it."""
    if chosen := configured or environment.get("NORMJAX_CACHE", ""):
        return Path(os.path.expanduser(chosen)).absolute()
    if base := environment.get("XDG_CACHE_HOME", ""):
        return Path(base) / "normjax"
    try:
        home = Path.home()
    except RuntimeError:  # an account without a home
        return Path(tempfile.gettempdir()) / "normjax"
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "normjax"


def read(folder: Path) -> CacheEntry | None:
    """Return a cache entry as memory maps, or None when it is not there or not whole."""
    try:
        meta = json.loads((folder / "meta.json").read_text("utf-8"))
        stored = meta.pop("checksum")
        if stored != _sha256(_canonical(meta)):
            return None
        for part in _PARTS:
            path, expected = folder / f"{part}.npy", meta["arrays"][part]
            size = path.stat().st_size
            if size != expected["bytes"]:
                return None
            if size <= HASHED_BYTES and _sha256(path.read_bytes()) != expected["sha256"]:
                return None
        train, validation = (np.load(folder / f"{p}.npy", mmap_mode="r") for p in _PARTS)
        return CacheEntry(Vocabulary(meta["kind"], meta["characters"]), train, validation)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write(folder: Path, entry: CacheEntry) -> CacheEntry:
    """Store an entry as ``folder`` and return it as memory maps, or as it is where none can be.

    It is written aside and renamed when whole, so that two processes at once and a kill at any
    moment are harmless: whoever comes second finds a good entry and keeps it.
    """
    aside = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = scratch.make(folder.parent)
        for part in _PARTS:
            np.save(aside / f"{part}.npy", getattr(entry, part))
        meta = _meta(aside, entry.vocabulary)
        (aside / "meta.json").write_text(json.dumps(meta | {"checksum": _sha256(_canonical(meta))}))
        aside.chmod(0o755)
        if read(folder) is None:
            if folder.exists():  # damaged: a rename cannot replace a folder that is not empty
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
    entry.train.flags.writeable = entry.validation.flags.writeable = False
    return entry


def _meta(folder: Path, vocabulary: Vocabulary) -> dict[str, Any]:
    files = {part: folder / f"{part}.npy" for part in _PARTS}
    arrays = {
        part: {"bytes": path.stat().st_size, "sha256": _sha256(path.read_bytes())}
        for part, path in files.items()
    }
    characters = vocabulary.characters
    return {"format": FORMAT, "kind": vocabulary.kind, "characters": characters, "arrays": arrays}


def _canonical(meta: Mapping[str, Any]) -> bytes:
    return json.dumps(meta, sort_keys=True).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
