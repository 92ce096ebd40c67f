"""Corpora: the split, the fingerprint, the reference losses, impossible values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from corpus_texts import VERSE, error, write

from normjax.data import corpora, windows
from normjax.data.corpora import DataConfig
from normjax.data.windows import batch

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.mark.parametrize("fraction", [0.1, 0.25, 1 / 3])
def test_a_file_splits_by_characters(tmp_path, fraction):
    rng = np.random.default_rng(0)
    text = "".join(chr(c) for c in rng.integers(32, 97, 12_347))
    path = write(tmp_path / "text.txt", text)
    corpus = corpora.open_corpus(DataConfig(corpus=path, validation_fraction=fraction))
    n = int(len(text) * (1 - fraction))
    assert corpus.vocabulary.decode(corpus.train) == text[:n]
    assert corpus.vocabulary.decode(corpus.held_out) == text[n:]
    assert corpus.vocabulary.characters == "".join(sorted(set(text)))
    assert corpus.name == "text.txt"
    assert str(tmp_path) not in corpus.description


def test_the_split_of_the_well_known_recipe():
    """The 1,115,394 characters of tiny Shakespeare split as that recipe does: int(0.9 n)."""
    source = corpora._divided(DataConfig(), "t", "t", "x" * 1_115_394)
    assert [len(part) for part in source.texts()] == [1_003_854, 111_540]


def test_the_vocabulary_covers_characters_of_the_validation_part_only(tmp_path):
    path = write(tmp_path / "text", "a" * 900 + "bé" * 50)
    corpus = corpora.open_corpus(DataConfig(corpus=path, window=32))
    assert corpus.vocabulary.characters == "abé"
    assert set(corpus.train.tolist()) == {0}
    assert set(corpus.held_out.tolist()) == {1, 2}


def test_byte_tokens_split_at_the_same_character(tmp_path):
    text = "é" * 500 + "a" * 500
    corpus = corpora.open_corpus(
        DataConfig(
            corpus=write(tmp_path / "t.txt", text), vocabulary="byte", validation_fraction=0.4
        )
    )
    assert bytes(corpus.train) == text[:600].encode()
    assert bytes(corpus.held_out) == text[600:].encode()
    assert corpus.vocabulary_size == 256


def test_a_text_of_exactly_one_window_is_enough(tmp_path):
    """A window of T inputs needs T + 1 tokens in each part."""
    path = write(tmp_path / "t.txt", "ab" * 15)  # 10 and twice 10 tokens
    corpus = corpora.open_corpus(DataConfig(corpus=path, validation_fraction=2 / 3, window=9))
    assert batch(corpus.train, 0, 0, 3, 9).tolist() == [[0, 1] * 5] * 3
    message = error(corpus=path, validation_fraction=2 / 3, window=10)
    assert "data.window=10: the training part" in message and "needs 11" in message
    assert "the validation part" in error(corpus=path, validation_fraction=0.1, window=9)


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"window": 0},
            "config.data.window=0: must be from 1 to 1048576; pass --config.data.window=64",
        ),
        ({"window": -3}, "data.window=-3"),
        (
            {"validation_fraction": 0.0},
            "data.validation_fraction=0.0: must be above 0 and below 1; pass",
        ),
        (
            {"validation_fraction": 1.0},
            "data.validation_fraction=1.0: must be above 0 and below 1; pass",
        ),
        (
            {"validation_fraction": math.nan},
            "data.validation_fraction=nan: must be above 0 and below 1; pass",
        ),
        ({"vocabulary": "bytes"}, "data.vocabulary=bytes: must be one of char, byte; did you mean"),
        ({"corpus": "tfds:"}, "must name a TFDS set"),
    ],
)
def test_impossible_values(fields, words):
    assert words in error(**fields)


def test_the_fingerprint_is_of_content(tmp_path):
    base = corpora.open_corpus(DataConfig(corpus=write(tmp_path / "a.txt")))
    (tmp_path / "elsewhere").mkdir()
    same = corpora.open_corpus(DataConfig(corpus=write(tmp_path / "elsewhere" / "b")))
    assert same.fingerprint == base.fingerprint
    assert same.name == "b"  # names are of the path, not of the cache
    wider = corpora.open_corpus(DataConfig(corpus=str(tmp_path / "a.txt"), window=3))
    assert wider.fingerprint == base.fingerprint
    changed = write(tmp_path / "a.txt", VERSE * 19 + VERSE.replace("fox", "cat"))
    prints = {
        base.fingerprint,
        corpora.open_corpus(DataConfig(corpus=changed)).fingerprint,
        corpora.open_corpus(DataConfig(corpus=changed, vocabulary="byte")).fingerprint,
        corpora.open_corpus(DataConfig(corpus=changed, validation_fraction=0.2)).fingerprint,
    }
    assert len(prints) == 4
    assert all(len(f) == 64 and int(f, 16) >= 0 for f in prints)


def test_reference_losses_against_the_definition(tmp_path):
    text = "aaab" * 50 + "abbc" * 20
    corpus = corpora.open_corpus(
        DataConfig(corpus=write(tmp_path / "t.txt", text), validation_fraction=2 / 7, window=8)
    )
    train, test = text[: len(corpus.train)], text[(len(text) + len(corpus.train)) // 2 :]
    p = {c: (train.count(c) + 1) / (len(train) + 3) for c in "abc"}
    follows = {a: sum(x == a for x in train[:-1]) for a in "abc"}
    both = {a + b: sum(train[i : i + 2] == a + b for i in range(len(train))) for a in p for b in p}
    found = corpus.references(8, 0)
    unigram = -sum(math.log(p[c]) for c in test[1:]) / (len(test) - 1)
    assert found["unigram"] == pytest.approx(unigram, rel=1e-14)
    losses = [-math.log((both[a + b] + p[b]) / (follows[a] + 1))
              for a, b in zip(test, test[1:], strict=False)]  # fmt: skip
    assert found["bigram"] == pytest.approx(sum(losses) / len(losses), rel=1e-14)
    assert corpus.uniform_loss == pytest.approx(math.log(3), rel=1e-15)
    # They are of the windows that a final evaluation has, and of no others.
    few = corpus.references(8, 2)
    starts = corpus.evaluation_set(8, 2, "test")[0][:, 1:].ravel()
    expected = -sum(math.log(p["abc"[c]]) for c in starts) / len(starts)
    assert few["unigram"] == pytest.approx(expected, rel=1e-14)


def test_the_held_out_text_is_divided_into_two_halves(tmp_path):
    corpus = corpora.open_corpus(DataConfig(corpus=write(tmp_path / "t.txt"), window=8))
    parts = [corpus.part(name) for name in corpora.PARTS]
    np.testing.assert_array_equal(np.concatenate(parts), corpus.held_out)
    assert 0 <= len(parts[1]) - len(parts[0]) <= 1
    for name, part in zip(corpora.PARTS, parts, strict=True):
        got = corpus.evaluation_set(8, 0, name)[0]
        np.testing.assert_array_equal(got, windows.evaluation_windows(part, 8, 0)[0])


def test_pairs_counted_in_pieces_equal_pairs_counted_at_once():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 5, 1000).astype(np.uint8)
    before, after = rng.integers(0, 5, (2, 50))
    pairs = zip(before, after, strict=True)
    expected = [sum((tokens[:-1] == a) & (tokens[1:] == b)) for a, b in pairs]
    for chunk in (7, 64, 999, 5000):
        np.testing.assert_array_equal(
            corpora._pair_counts(tokens, 5, before, after, chunk), expected
        )


def test_counts_in_pieces_equal_counts_at_once():
    tokens = np.random.default_rng(0).integers(0, 7, 1000).astype(np.uint8)
    expected = np.bincount(tokens, minlength=9)
    np.testing.assert_array_equal(corpora._counts(tokens, 9, chunk=64), expected)
