"""Corpora: a text as arrays of tokens: training, and held out in two halves, validation and test.

The text is that of the plays of Shakespeare (``plays``), of a text file or a folder of them, or of
a TFDS set (``tfds:NAME``). The arrays are cached and read back as memory maps. In place of a text
there may be a synthetic task (``task:NAME``), which training draws from in the same way.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from normjax import configs
from normjax.data import cache_folder, plays, text_files, tfds_text, token_cache
from normjax.data.accounts import Account
from normjax.data.tasks import corpus as task_corpus
from normjax.data.tasks.corpus import TaskCorpus
from normjax.data.vocabulary import VOCABULARIES, Vocabulary
from normjax.data.windows import batches, evaluation_windows
from normjax.errors import UserError
from normjax.registry import Registry
from normjax.regular_files import printable

MAX_WINDOW = 2**20


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which text, how it becomes tokens, and how long a window is."""

    corpus: str = configs.field(
        "plays", "text: plays, tfds:NAME, or the path of a text file or folder; or task:NAME"
    )
    vocabulary: str = configs.field(
        "char", "tokens: char (the text's own characters) or byte (UTF-8)", choices=VOCABULARIES
    )
    window: int = configs.field(64, "tokens a model sees at once", least=1, most=MAX_WINDOW)
    validation_fraction: float = configs.field(
        0.1, "last part of a file's or folder's characters that is held out (plays: whole plays)",
        above=0, below=1,
    )  # fmt: skip
    cache_dir: str = configs.field(
        "", "folder of cached tokens; empty: $NORMJAX_CACHE, else the user's"
    )
    suffixes: tuple[str, ...] = configs.field(
        text_files.SUFFIXES, "endings of the files that are read from a folder; * for all (.gz may"
        " follow)", fewest=1, distinct=True,
    )  # fmt: skip
    encoding: str = configs.field(
        text_files.ENCODING, "of text files: utf-8, utf-16, latin-1, cp1252, ..."
    )
    field: str = configs.field(
        "", "of JSON lines (*.jsonl, *.ndjson, *.json): the field that is the text; empty: they are"
        " read as they are"
    )  # fmt: skip
    max_bytes: int = configs.field(
        text_files.MOST_BYTES,
        "most bytes of a text that are read, decompressed",
        least=1,
        most=2**40,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A text as tokens.

    Attributes:
      name: as it appears in a report; the last part of a path.
      description: one sentence with the split rule.
      vocabulary: between text and tokens.
      train: (N,) unsigned integers, read-only.
      held_out: (M,) of the same type, read-only: never trained on. Its first half is the validation
        part, by which anything is chosen; its second half the test part, on which it is reported.
      fingerprint: SHA-256 of content, split rule, vocabulary and code format, in hex.
      files: what became of every entry of a folder; None where the text is none.
    """

    name: str
    description: str
    vocabulary: Vocabulary
    train: np.ndarray
    held_out: np.ndarray
    fingerprint: str
    files: Account | None = None

    @property
    def vocabulary_size(self) -> int:
        """Number of different tokens V."""
        return self.vocabulary.size

    @property
    def uniform_loss(self) -> float:
        """Nats per token of a model that knows nothing: log V."""
        return math.log(self.vocabulary_size)

    def part(self, name: str) -> np.ndarray:
        """Return the tokens of a held-out part, "validation" or "test"."""
        half = len(self.held_out) // 2
        return {"validation": self.held_out[:half], "test": self.held_out[half:]}[name]

    def references(self, window: int, count: int) -> dict[str, float]:
        """Return the losses of models that only count, on the windows of the final evaluation.

        unigram: how frequent tokens are, ``p(v) = (n_v + 1) / (N + V)`` with counts n in training.
        bigram: which token follows which, ``p(v | u) = (n_uv + p(v)) / (n_u + 1)``.

        Args:
          window: T.
          count: windows of the test part, 0 for all.

        Returns:
          {"unigram": nats per token, "bigram": nats per token}.
        """
        n = _counts(self.train, self.vocabulary_size)
        unigram = (n + 1) / (n.sum() + len(n))
        windows, weights = self.evaluation_set(window, count, "test")
        kept = weights > 0
        before, after = windows[:, :-1][kept], windows[:, 1:][kept]
        pairs = _pair_counts(self.train, self.vocabulary_size, before, after)
        starts = n - (np.arange(len(n)) == self.train[-1])  # the last token has no successor
        bigram = (pairs + unigram[after]) / (starts[before] + 1)
        return {"unigram": float(-np.log(unigram[after]).mean()),
                "bigram": float(-np.log(bigram).mean())}  # fmt: skip

    @property
    def extent(self) -> str:
        """How much there is to train and to evaluate on, in words."""
        parts = [f"{len(self.part(name)):,} {name}" for name in PARTS]
        return f"{len(self.train):,} training, {' and '.join(parts)} tokens"

    def training_batches(
        self, seed: int, first: int, count: int, size: int, window: int
    ) -> np.ndarray:
        """Return the windows of ``count`` steps from ``first`` on: (count, B, T + 1) int32."""
        return batches(self.train, seed, first, count, size, window)

    def evaluation_set(
        self, window: int, count: int = 0, part: str = "validation"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return fixed windows (W, T + 1) int32 and weights (W, T) float32; count 0: all."""
        return evaluation_windows(self.part(part), window, count)

    def evaluation_words(self, count: int, part: str) -> str:
        """Say what :meth:`evaluation_set` is, in words."""
        half = "second" if part == "test" else "first"
        spread = "evenly spaced over" if count else "all of"
        return f"non-overlapping windows, {spread} the {part} part (the {half} half held out)"

    def target_weights(self, window: int) -> np.ndarray | None:
        """Return the weights of target positions in training: None, all count."""
        return None

    def record(self) -> dict[str, Any]:
        """Return the corpus as a plan lists it."""
        return {
            "name": self.name, "description": self.description,
            "vocabulary": self.vocabulary.kind, "vocabulary_size": self.vocabulary_size,
            "train_tokens": len(self.train), "held_out_tokens": len(self.held_out),
            "fingerprint": self.fingerprint, "uniform_loss": self.uniform_loss,
            **({} if self.files is None else {"files": self.files.record()}),
        }  # fmt: skip

    def task_record(self) -> dict[str, Any] | None:
        """Return None: a text is no task."""
        return None


PARTS = ("validation", "test")
"""The held-out parts: to choose by, and to report on."""

AnyCorpus = Corpus | TaskCorpus
"""What training draws from: a text or a synthetic task."""


def _counts(tokens: np.ndarray, size: int, chunk: int = 1 << 22) -> np.ndarray:
    """Return how often each token occurs; in pieces, because bincount widens to 64 bits."""
    pieces = (tokens[i : i + chunk] for i in range(0, len(tokens), chunk))
    return sum((np.bincount(p, minlength=size) for p in pieces), np.zeros(size, np.int64))


def _pair_counts(
    tokens: np.ndarray, size: int, before: np.ndarray, after: np.ndarray, chunk: int = 1 << 22
) -> np.ndarray:
    """Return how often each pair (before, after) follows one another in the tokens."""
    wanted, places = np.unique(before.astype(np.int64) * size + after, return_inverse=True)
    found = np.zeros(len(wanted), np.int64)
    for i in range(0, len(tokens) - 1, chunk):
        piece = tokens[i : i + chunk + 1].astype(np.int64)
        codes, counts = np.unique(piece[:-1] * size + piece[1:], return_counts=True)
        at = np.searchsorted(wanted, codes)
        hit = wanted[np.minimum(at, len(wanted) - 1)] == codes
        found[at[hit]] += counts[hit]
    return found[places]


class Source(NamedTuple):
    """Where a text comes from.

    Attributes:
      name: as it appears in a report.
      description: what it is and what is held out, in one sentence.
      identity: what defines the text, such as a version that is raised with every change of it: a
        cached one is then not read again. "": only the text itself says that.
      texts: reads it: the training and the validation text.
      files: what became of every entry of a folder; None where the text is none.
    """

    name: str
    description: str
    identity: str
    texts: Callable[[], tuple[str, str]]
    files: Account | None = None


def register_corpus(
    name: str, source: Callable[[DataConfig], Source], *, replace: bool = False
) -> Callable[[DataConfig], Source]:
    """Add a corpus, which ``--config.data.corpus=NAME`` then names, and return its function.

    Args:
      name: small letters, digits, underscores.
      source: says for a configuration where the text comes from; called when it is asked for.
      replace: whether a name that is taken may get another function.

    Raises:
      UserError: a name that is none or is taken.

    Examples:
      register_corpus("limericks", lambda config: Source(
          "limericks", "limericks; every tenth is held out", "", read_limericks))
    """
    return CORPORA.register(name, source, replace=replace)


def open_corpus(config: DataConfig) -> AnyCorpus:
    """Return the corpus that a configuration names, from the cache when it was read before.

    A name task:NAME gives a :class:`normjax.data.tasks.corpus.TaskCorpus`; nothing of it is cached.

    Raises:
      UserError: anything wrong with the configuration or the text, before anything is written.

    Examples:
      open_corpus(DataConfig()).vocabulary_size  # 77
      open_corpus(DataConfig(corpus="poems/", vocabulary="byte"))
    """
    _check(config)
    if config.corpus.startswith(task_corpus.PREFIX):
        return _task(config)
    source, fingerprint = _identity(config)
    cache = cache_folder.folder(config.cache_dir)
    entry = token_cache.read(cache / fingerprint) if cache else None
    if entry is None:
        entry = _encode(config.vocabulary, *source.texts())
        _check_lengths(config, entry)
        entry = token_cache.write(cache / fingerprint, entry) if cache else token_cache.kept(entry)
    _check_lengths(config, entry)
    return Corpus(source.name, source.description, *entry, fingerprint, source.files)


def open_by_fingerprint(config: DataConfig, fingerprint: object) -> AnyCorpus:
    """Return the corpus that has a fingerprint: from the user's own cache, else as it is named.

    A text that has been moved or changed since, or whose path was relative to another folder, is
    found as long as its tokens are cached. The configuration may come from elsewhere: its cache_dir
    is not used, and no tokens are written.

    Args:
      config: as it was recorded.
      fingerprint: as it was recorded beside it.

    Raises:
      UserError: the tokens are not cached, and the text is gone or is another one now.

    Examples:
      open_by_fingerprint(DataConfig(corpus="poems/"), record["fingerprint"])
    """
    if not (isinstance(fingerprint, str) and re.fullmatch(r"[0-9a-f]{64}", fingerprint)):
        raise UserError(
            f"data.fingerprint={str(fingerprint)[:80]!r}: must be 64 digits of hex, as in"
            " its manifest; train it anew"
        )
    config = dataclasses.replace(config, cache_dir="")
    _check(config)
    gone = "its tokens are not in the cache; bring the old text back, or pass tokens of your own"
    if config.corpus.startswith(task_corpus.PREFIX):
        task = _task(config)
        if task.fingerprint != fingerprint:
            raise UserError(f"data.corpus={config.corpus}: is another task now; train it anew")
        return task
    cache = cache_folder.folder("")
    entry = token_cache.read(cache / fingerprint) if cache else None
    if entry is not None:
        _check_lengths(config, entry)
        name = printable(os.path.basename(config.corpus.rstrip("/").removeprefix("tfds:")))
        return Corpus(name, f"{name}, from the cache of tokens", *entry, fingerprint)
    try:
        source, found = _identity(config)
    except UserError as error:
        raise UserError(f"{error}; {gone}") from None
    if found != fingerprint:
        raise UserError(f"data.corpus={printable(config.corpus)}: is another text now, and {gone}")
    entry = token_cache.kept(_encode(config.vocabulary, *source.texts()))
    _check_lengths(config, entry)
    return Corpus(source.name, source.description, *entry, fingerprint, source.files)


def _identity(config: DataConfig) -> tuple[Source, str]:
    """Return where a text comes from, and its fingerprint."""
    source = _source(config)
    if not source.identity:
        known = _identified(source.texts(), source.name, source.description)
        source = known._replace(files=source.files)
    return source, token_cache.fingerprint(config.vocabulary, source.identity)


def _task(config: DataConfig) -> TaskCorpus:
    if config.vocabulary != DataConfig.vocabulary:
        raise UserError(
            f"data.vocabulary={config.vocabulary}: {config.corpus} has tokens of its own;"
            " leave --config.data.vocabulary away"
        )
    return task_corpus.open_task(config.corpus, config.window)


def _check(config: DataConfig) -> None:
    configs.check(config, "config.data")
    if not config.corpus.strip():
        raise UserError(f"data.corpus={config.corpus!r}: must name a text; pass {text_files.NAMES}")
    try:
        config.corpus.encode()
    except UnicodeEncodeError:  # no page could show it
        raise UserError(
            f"data.corpus={printable(config.corpus)}: must be UTF-8; rename the file or folder"
        ) from None
    text_files.check_encoding(config.encoding)
    if config.corpus.startswith(("tfds:", task_corpus.PREFIX)):
        for name in ("suffixes", "encoding", "field"):
            value = getattr(config, name)
            if value != getattr(DataConfig, name):
                raise UserError(
                    f"data.{name}={configs.shown(value)}: says how files are read, and"
                    f" {config.corpus} is none; leave --config.data.{name} away"
                )


def _source(config: DataConfig) -> Source:
    corpus = config.corpus
    name = "plays" if corpus == "tfds:plays" else corpus
    if name in CORPORA:
        return _registered(config, name)
    if corpus.startswith("tfds:"):
        return _named(config, corpus.removeprefix("tfds:"))
    how = text_files.How(config.suffixes, config.encoding, config.field, config.max_bytes)
    return _divided(config, *text_files.read(corpus, CORPORA, how))


def _registered(config: DataConfig, name: str) -> Source:
    source = CORPORA[name](config)
    if not isinstance(source, Source):
        raise UserError(
            f"data.corpus={name}: its function returned a {type(source).__name__}; it must return a"
            " normjax.Source"
        )
    # Two corpora may both call themselves "v1".
    known = not source.identity or source.identity.startswith(f"{name} ")
    return source if known else source._replace(identity=f"{name} {source.identity}")


def _plays(config: DataConfig) -> Source:
    held = ", ".join(p.replace("-", " ").title() for p in plays.HELD_OUT)
    return Source(
        "plays",
        f"38 plays of Shakespeare as plain text; held out for validation, whole: {held}",
        plays.identity(),
        lambda: plays.read(config.cache_dir),
    )


def _named(config: DataConfig, name: str) -> Source:
    if not name:
        raise UserError(
            f"data.corpus={config.corpus}: must name a TFDS set; "
            "pass --config.data.corpus=tfds:tiny_shakespeare"
        )
    train, validation, full_name = tfds_text.read(
        name, cache_folder.folder(config.cache_dir, "tfds")
    )
    if validation is None:
        return _divided(config, name, f"TFDS set {full_name}", train)
    texts = text_files.clean(config.corpus, train), text_files.clean(config.corpus, validation)
    return _identified(texts, name, f"TFDS set {full_name} with its own splits")


def _identified(texts: tuple[str, str], name: str, description: str) -> Source:
    """Return a source whose texts are at hand and say what it is."""
    return Source(name, description, " ".join(_sha256(t) for t in texts), lambda: texts)


CORPORA: Registry[Callable[[DataConfig], Source]] = Registry("corpus", {"plays": _plays})
"""The texts that have names of their own."""


def _divided(
    config: DataConfig, name: str, what: str, text: str, files: Account | None = None
) -> Source:
    """Return a source whose last characters are held out: the first ``int(n (1 - f))`` train."""
    text = text_files.clean(config.corpus, text)
    at = int(len(text) * (1 - config.validation_fraction))
    digest = _sha256(text)
    percent = f"{100 * config.validation_fraction:g} %"
    return Source(
        name,
        f"{what}, {len(text)} characters; held out for validation: the last {percent}",
        f"{digest} split at {at}",
        lambda: (text[:at], text[at:]),
        files,
    )


def _encode(kind: str, train: str, validation: str) -> token_cache.CacheEntry:
    vocabulary = Vocabulary.of(kind, train, validation)
    return token_cache.CacheEntry(
        vocabulary, vocabulary.encode(train), vocabulary.encode(validation)
    )


def _check_lengths(config: DataConfig, entry: token_cache.CacheEntry) -> None:
    halves = len(entry.held_out) // 2
    for part, tokens in (("training", len(entry.train)), ("validation", halves)):
        if tokens < config.window + 1:
            raise UserError(
                f"data.window={config.window}: the {part} part of {printable(config.corpus)} has "
                f"{tokens} tokens and a window needs {config.window + 1}; pass a longer text, "
                "a smaller --config.data.window or another --config.data.validation_fraction"
            )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
