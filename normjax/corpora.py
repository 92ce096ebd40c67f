"""Text to tokens to batches: corpora, vocabularies, the token cache, windows.

A corpus is two arrays of tokens, training and validation. It comes from the plays of Shakespeare
(``plays``), from a text file or a folder of them, or from a TFDS set (``tfds:NAME``). The arrays
are cached under a fingerprint of their content and read back as memory maps.

A batch is a pure function of ``(seed, step)``: nothing has to be saved to resume, and any number of
runs and processes draw from one array.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import operator
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normjax import plays
from normjax.configs import field
from normjax.errors import UserError, check_choice, suggest

FORMAT = 1  # of tokens and cache: raise it when the same text would give other tokens
VOCABULARIES = ("char", "byte")
SUFFIXES = (".txt", ".md")
HASHED_BYTES = 64 << 20  # arrays up to this size are hashed when read back, larger ones only sized
_NAMES = "a path (with a slash, or of something that exists), plays, or tfds:NAME"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text, how it becomes tokens, and how long a window is."""

    corpus: str = field("plays", "text: plays, tfds:NAME, or the path of a text file or folder")
    vocabulary: str = field("char", "tokens: char (the text's own characters) or byte (UTF-8)")
    window: int = field(64, "tokens a model sees at once")
    validation_fraction: float = field(
        0.1, "last part of a file's or folder's characters that is held out (plays: whole plays)"
    )
    cache_dir: str = field("", "folder of cached tokens; empty: $NORMJAX_CACHE, else the user's")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A bijection between characters (or bytes) and ``0 .. size-1``.

    >>> vocabulary = Vocabulary.of("char", "hello")
    >>> vocabulary.characters
    'ehlo'
    >>> vocabulary.decode(vocabulary.encode("hole"))
    'hole'
    """

    kind: str
    characters: str = ""  # sorted by code point; empty for bytes

    @classmethod
    def of(cls, kind: str, *texts: str) -> Vocabulary:
        """Return the vocabulary of all characters in ``texts``, or that of bytes."""
        check_choice("data.vocabulary", kind, VOCABULARIES)
        if kind == "byte":
            return cls(kind)
        points = [np.unique(_code_points(text)) for text in texts]
        return cls(kind, _from_code_points(np.unique(np.concatenate(points))))

    @property
    def size(self) -> int:
        """Number of different tokens V."""
        return 256 if self.kind == "byte" else len(self.characters)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds every token."""
        return np.min_scalar_type(max(self.size - 1, 0))

    @functools.cached_property
    def _points(self) -> np.ndarray:
        return _code_points(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text.

        Raises:
          UserError: a character that is not in the vocabulary.
        """
        if self.kind == "byte":
            return np.frombuffer(text.encode("utf-8"), np.uint8).copy()
        points = _code_points(text)
        ids = np.searchsorted(self._points, points)
        unknown = np.take(self._points, ids, mode="clip") != points
        if unknown.any():
            at = int(np.argmax(unknown))
            raise UserError(
                f"character {text[at]!r} (U+{ord(text[at]):04X}, position {at}): not among the "
                f"{self.size} characters of the corpus; leave it out, or train on bytes with "
                "--config.data.vocabulary=byte"
            )
        return ids.astype(self.dtype)

    def decode(self, ids: Any) -> str:
        """Return the text of tokens; bytes that are not UTF-8 become U+FFFD.

        Raises:
          UserError: a token outside ``0 .. size-1``.
        """
        ids = np.asarray(ids, dtype=np.int64).ravel()
        if ids.size and not 0 <= ids.min() <= ids.max() < self.size:
            bad = int(ids[(ids < 0) | (ids >= self.size)][0])
            raise UserError(f"token {bad}: must be between 0 and {self.size - 1}")
        if self.kind == "byte":
            return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
        return _from_code_points(self._points[ids])


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.dtype("<u4"))


def _from_code_points(points: np.ndarray) -> str:
    return points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text as tokens.

    Attributes:
      name: as it appears in a report; the last part of a path.
      description: one sentence with the split rule.
      vocabulary: between text and tokens.
      train: (N,) unsigned integers, read-only.
      validation: (M,) of the same type, read-only.
      fingerprint: SHA-256 of content, split rule, vocabulary and code format, in hex.
    """

    name: str
    description: str
    vocabulary: Vocabulary
    train: np.ndarray
    validation: np.ndarray
    fingerprint: str

    @property
    def vocabulary_size(self) -> int:
        """Number of different tokens V."""
        return self.vocabulary.size

    @property
    def uniform_loss(self) -> float:
        """Nats per token of a model that knows nothing: log V."""
        return math.log(self.vocabulary_size)

    @functools.cached_property
    def unigram_loss(self) -> float:
        """Nats per validation token of a model that knows only how frequent tokens are.

        ``-sum_v m_v log((n_v + 1) / (N + V)) / M`` with counts n in training and m in validation.
        """
        n, m = (_counts(x, self.vocabulary_size) for x in (self.train, self.validation))
        return float(-(m * np.log((n + 1) / (n.sum() + len(n)))).sum() / m.sum())


def _counts(tokens: np.ndarray, size: int, chunk: int = 1 << 22) -> np.ndarray:
    """Return how often each token occurs; in pieces, because bincount widens to 64 bits."""
    pieces = (tokens[i : i + chunk] for i in range(0, len(tokens), chunk))
    return sum((np.bincount(p, minlength=size) for p in pieces), np.zeros(size, np.int64))


# ---------------------------------------------------------------------------------------- sources


class _Source(NamedTuple):
    """Where a text comes from; ``identity`` says what it is without reading more than needed."""

    name: str
    description: str
    identity: str
    texts: Callable[[], tuple[str, str]]


def load(config: DataConfig) -> Corpus:
    """Return the corpus that a configuration names, from the cache when it was read before.

    Raises:
      UserError: anything wrong with the configuration or the text, before anything is written.

    Examples:
      load(DataConfig()).vocabulary_size  # 77
      load(DataConfig(corpus="poems/", vocabulary="byte"))
    """
    _check(config)
    source = _source(config)
    parts = (FORMAT, config.vocabulary, source.identity)
    fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    folder = _cache_dir(config.cache_dir)
    entry = _read_entry(folder / fingerprint)
    if entry is None:
        entry = _encode(config.vocabulary, *source.texts())
        _check_lengths(config, *entry[1:])
        entry = _write_entry(folder, fingerprint, *entry)
    _check_lengths(config, *entry[1:])
    return Corpus(source.name, source.description, *entry, fingerprint)


def _check(config: DataConfig) -> None:
    check_choice("data.vocabulary", config.vocabulary, VOCABULARIES)
    if not config.corpus.strip():
        raise UserError(f"data.corpus={config.corpus!r}: must name a text; pass {_NAMES}")
    if config.window < 1:
        raise UserError(
            f"data.window={config.window}: must be at least 1; pass --config.data.window=64"
        )
    if not 0 < config.validation_fraction < 1:
        raise UserError(
            f"data.validation_fraction={config.validation_fraction}: must lie between 0 and 1; "
            "pass --config.data.validation_fraction=0.1"
        )


def _source(config: DataConfig) -> _Source:
    corpus = config.corpus
    if corpus == "plays":
        return _plays()
    if corpus.startswith("tfds:"):
        return _named(config, corpus.removeprefix("tfds:"))
    return _path(config, corpus)


def _plays() -> _Source:
    held = ", ".join(p.replace("-", " ").title() for p in plays.HELD_OUT)
    return _Source(
        "plays",
        f"38 plays of Shakespeare as plain text; held out for validation, whole: {held}",
        plays.plays_identity(),
        plays.read_plays,
    )


def _named(config: DataConfig, name: str) -> _Source:
    if not name:
        raise UserError(
            f"data.corpus={config.corpus}: must name a TFDS set; "
            "pass --config.data.corpus=tfds:tiny_shakespeare"
        )
    folder = _cache_dir(config.cache_dir) / "tfds"
    train, validation, full_name = plays.read_named(name, folder)
    if validation is None:
        return _divided(config, name, f"TFDS set {full_name}", train)
    texts = _clean_text(config, train), _clean_text(config, validation)
    identity = " ".join(_sha256(t.encode("utf-8", "surrogatepass")) for t in texts)
    return _Source(name, f"TFDS set {full_name} with its own splits", identity, lambda: texts)


def _path(config: DataConfig, corpus: str) -> _Source:
    path = Path(corpus).expanduser()
    try:
        if path.is_dir():
            files = _files_of(config, path)
            text = "\n".join(_read(config, file) for file in files)
            what = f"{len(files)} text files of the folder {path.resolve().name}"
            return _divided(config, path.resolve().name, what, text)
        if path.is_file():
            return _divided(config, path.name, f"text file {path.name}", _read(config, path))
        exists = path.exists()
    except (OSError, ValueError) as error:  # no permission on the way, a NUL or too long a name
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"data.corpus={corpus!r}: cannot be read ({reason}); pass {_NAMES}"
        ) from None
    if exists:
        raise UserError(f"data.corpus={corpus}: neither a file nor a folder; pass {_NAMES}")
    choices = ["plays", *_siblings(path)]
    close = suggest(corpus, choices)
    raise UserError(f"data.corpus={corpus}: no such file or folder{close}; pass {_NAMES}")


def _siblings(path: Path) -> list[str]:
    """Return the names beside a path that does not exist, written as the path was."""
    with contextlib.suppress(OSError, ValueError):
        return [str(p) for p in path.parent.iterdir()]
    return []


def _files_of(config: DataConfig, folder: Path) -> list[Path]:
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
            f"data.corpus={config.corpus}: the folder holds no text file "
            f"({' or '.join('*' + s for s in SUFFIXES)}, subfolders included); pass {_NAMES}"
        )
    return [folder / p for p in sorted(found)]


def _read(config: DataConfig, path: Path) -> str:
    """Return a text file's characters.

    A byte order mark is dropped, and line ends become ``\\n``: a text copied through Windows has
    the same tokens, and no model spends capacity on carriage returns.
    """
    argument = f"data.corpus={config.corpus}"
    where = "" if str(path) == config.corpus else f"{path}: "
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
    return _unify(text)


def _line(data: bytes, at: int) -> int:
    return data.count(b"\n", 0, at) + 1


def _unify(text: str) -> str:
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _clean_text(config: DataConfig, text: str) -> str:
    text = _unify(text)
    if not text.strip():
        raise UserError(
            f"data.corpus={config.corpus}: the text is empty or only blank; pass {_NAMES}"
        )
    return text


def _divided(config: DataConfig, name: str, what: str, text: str) -> _Source:
    """Return a source whose last characters are held out: the first ``int(n (1 - f))`` train."""
    text = _clean_text(config, text)
    at = int(len(text) * (1 - config.validation_fraction))
    digest = _sha256(text.encode("utf-8", "surrogatepass"))
    percent = f"{100 * config.validation_fraction:g} %"
    return _Source(
        name,
        f"{what}, {len(text)} characters; held out for validation: the last {percent}",
        f"{digest} split at {at}",
        lambda: (text[:at], text[at:]),
    )


def _encode(kind: str, train: str, validation: str) -> _Entry:
    vocabulary = Vocabulary.of(kind, train, validation)
    return vocabulary, vocabulary.encode(train), vocabulary.encode(validation)


def _check_lengths(config: DataConfig, train: np.ndarray, validation: np.ndarray) -> None:
    for part, tokens in (("training", train), ("validation", validation)):
        if len(tokens) < config.window + 1:
            raise UserError(
                f"data.window={config.window}: the {part} part of {config.corpus} has "
                f"{len(tokens)} tokens and a window needs {config.window + 1}; pass a longer text, "
                "a smaller --config.data.window or another --config.data.validation_fraction"
            )


# ------------------------------------------------------------------------------------------ cache

_Entry = tuple[Vocabulary, np.ndarray, np.ndarray]
_PARTS = ("train", "validation")


def _cache_dir(configured: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the cache folder; it is created only when something is written to it."""
    if chosen := configured or environment.get("NORMJAX_CACHE", ""):
        return Path(chosen).expanduser().absolute()
    if base := environment.get("XDG_CACHE_HOME", ""):
        return Path(base) / "normjax"
    try:
        home = Path.home()
    except RuntimeError:  # an account without a home
        return Path(tempfile.gettempdir()) / "normjax"
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "normjax"


def _read_entry(folder: Path) -> _Entry | None:
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
        return Vocabulary(meta["kind"], meta["characters"]), train, validation
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _write_entry(
    root: Path, fingerprint: str, vocabulary: Vocabulary, train: np.ndarray, validation: np.ndarray
) -> _Entry:
    """Store an entry and return it as memory maps; without a writable folder, return the arrays.

    It is written aside and renamed when whole, so that two processes at once and a kill at any
    moment are harmless: whoever comes second finds a good entry and keeps it.
    """
    final, aside = root / fingerprint, None
    try:
        root.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
        arrays = {"train": train, "validation": validation}
        for part, tokens in arrays.items():
            np.save(aside / f"{part}.npy", tokens)
        meta = _meta(aside, vocabulary)
        (aside / "meta.json").write_text(json.dumps(meta | {"checksum": _sha256(_canonical(meta))}))
        aside.chmod(0o755)
        if _read_entry(final) is None:
            if final.exists():  # damaged: a rename cannot replace a folder that is not empty
                broken = Path(tempfile.mkdtemp(prefix=".old-", dir=root))
                final.rename(broken / "entry")
                shutil.rmtree(broken, ignore_errors=True)
            aside.rename(final)
    except OSError:
        pass
    finally:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    if entry := _read_entry(final):
        return entry
    train.flags.writeable = validation.flags.writeable = False
    return vocabulary, train, validation


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


# ---------------------------------------------------------------------------------------- windows


def batch(tokens: np.ndarray, seed: int, step: int, size: int, window: int) -> np.ndarray:
    """Return the training windows of one step: a pure function of ``(seed, step)``.

    Row r starts at ``floor(x_r (n - window) / 2^64)`` where ``x_0, x_1, ...`` are the 64-bit words
    of Philox-4x64 with key ``(seed, step)`` and counter from 1. NumPy guarantees that stream, so a
    batch is the same in every process, on every machine and with every version.

    Args:
      tokens: (n,) integers with ``n > window``.
      seed: of the run, from 0 to 2^64 - 1.
      step: from 0 to 2^64 - 1.
      size: windows B, at least 1.
      window: inputs per window T, at least 1.

    Returns:
      (B, T + 1) int32; inputs are ``[:, :-1]`` and targets ``[:, 1:]``.

    >>> batch(np.arange(100), seed=0, step=0, size=2, window=3)
    array([[ 1,  2,  3,  4],
           [23, 24, 25, 26]], dtype=int32)
    """
    starts = _starts(len(tokens), _key(seed, step), size, window)
    return _gather(tokens, starts, window)


def batches(
    tokens: np.ndarray, seed: int, first_step: int, steps: int, size: int, window: int
) -> np.ndarray:
    """Return :func:`batch` for ``steps`` steps from ``first_step``: (steps, B, T + 1) int32."""
    _at_least("steps", steps, 1)
    _key(seed, first_step + steps - 1)
    keys = (_key(seed, first_step + i) for i in range(steps))
    starts = [_starts(len(tokens), key, size, window) for key in keys]
    return _gather(tokens, starts, window)


def _key(seed: int, step: int) -> np.ndarray:
    for name, value in (("seed", seed), ("step", step)):
        if not 0 <= operator.index(value) < 1 << 64:
            raise UserError(f"{name}={value}: must be between 0 and 2**64 - 1; pass {name}=0")
    return np.array([seed, step], np.uint64)


def _starts(length: int, key: np.ndarray, size: int, window: int) -> list[int]:
    _at_least("size", size, 1)
    _at_least("window", window, 1)
    places = length - window
    if places < 1:
        raise UserError(f"window={window}: needs {window + 1} tokens, there are {length}")
    # Multiply-shift in Python's integers: exact for every length, and fast for a batch.
    return [(x * places) >> 64 for x in np.random.Philox(key=key).random_raw(size).tolist()]


def _gather(tokens: np.ndarray, starts: Any, window: int) -> np.ndarray:
    """Return (..., window + 1) int32 from starts (...)."""
    at = np.asarray(starts, np.int64)[..., None] + np.arange(window + 1)
    return np.asarray(tokens)[at].astype(np.int32)  # a plain view: indexing a memmap is slower


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name}={value}: must be at least {least}; pass {name}={max(least, 1)}")


def evaluation_windows(
    tokens: np.ndarray, window: int, count: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return fixed windows to evaluate on; each target token is predicted at most once.

    The part is cut into consecutive windows: window i reads tokens ``i T .. i T + T - 1`` and
    predicts the T tokens one further. With ``count=0`` all of them are returned, so that every
    token but the first is predicted exactly once; the last one is filled up with zeros of weight 0.
    With ``count=k`` k of the m whole windows are returned, evenly spaced: those numbered
    ``floor((2 i + 1) m / (2 k))``; all m where k is larger.

    Args:
      tokens: (n,) integers, at least two; with ``count > 0`` more than ``window``.
      window: T, at least 1.
      count: windows wanted, 0 for the whole part.

    Returns:
      Windows (W, T + 1) int32 and weights (W, T) float32, 1 for a target that counts.

    >>> windows, weights = evaluation_windows(np.arange(6), window=3)
    >>> windows.tolist()
    [[0, 1, 2, 3], [3, 4, 5, 0]]
    >>> weights.tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    """
    _at_least("window", window, 1)
    _at_least("count", count, 0)
    targets = len(tokens) - 1
    needed = window if count else 1
    if targets < needed:
        raise UserError(f"window={window}: needs {needed + 1} tokens, there are {len(tokens)}")
    whole = targets // window
    if count:
        count = min(count, whole)
        numbers = (2 * np.arange(count) + 1) * whole // (2 * count)
        return _gather(tokens, numbers * window, window), np.ones((count, window), np.float32)
    rows = -(-targets // window)
    padded = np.zeros(rows * window + 1, np.int32)
    padded[: len(tokens)] = tokens
    windows = np.lib.stride_tricks.sliding_window_view(padded, window + 1)[::window].copy()
    weights = (np.arange(rows * window) < targets).astype(np.float32).reshape(rows, window)
    return windows, weights
