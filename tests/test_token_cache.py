"""The cache of tokens: whole or rebuilt, shared by processes, never in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from corpus_texts import ROOT, VERSE, run, write

from normjax.data import corpora, token_cache
from normjax.data.corpora import DataConfig

pytestmark = pytest.mark.usefixtures("own_folders")


def entry_of(corpus, tmp_path) -> Path:
    return tmp_path / "cache" / corpus.fingerprint


def test_cached_equals_uncached(tmp_path):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    first, second = corpora.open_corpus(config), corpora.open_corpus(config)
    blocked = corpora.open_corpus(
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
    first = corpora.open_corpus(config)
    monkeypatch.setattr(corpora, "_encode", None)
    assert corpora.open_corpus(config).fingerprint == first.fingerprint


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
    first = corpora.open_corpus(config)
    want = np.array(first.train), np.array(first.validation)
    folder = entry_of(first, tmp_path)
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    del first
    spoil(folder / name, how)
    again = corpora.open_corpus(config)
    np.testing.assert_array_equal(again.train, want[0])
    np.testing.assert_array_equal(again.validation, want[1])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [again.fingerprint]


def test_changed_characters_in_the_entry_are_noticed(tmp_path):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    first = corpora.open_corpus(config)
    path = entry_of(first, tmp_path) / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"characters": meta["characters"][::-1]}))
    assert corpora.open_corpus(config).vocabulary == first.vocabulary


def test_large_arrays_are_checked_by_size(tmp_path, monkeypatch):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    first = corpora.open_corpus(config)
    want = np.array(first.train)
    monkeypatch.setattr(token_cache, "HASHED_BYTES", 0)
    spoil(entry_of(first, tmp_path) / "train.npy", "cut")
    np.testing.assert_array_equal(corpora.open_corpus(config).train, want)


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
    corpus = corpora.open_corpus(config)
    assert corpus.vocabulary.decode(corpus.train) == (VERSE * 20)[: len(corpus.train)]
    assert not corpus.train.flags.writeable
    cache = tmp_path / "cache"
    assert not cache.exists() or not list(cache.iterdir())


def test_two_processes_at_once(tmp_path):
    path = write(tmp_path / "t.txt", VERSE * 3000)
    code = f"""
        import time
        from normjax.data import corpora
        while time.time() < {{start}}: pass
        c = corpora.open_corpus(corpora.DataConfig(corpus={path!r}))
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
    where = token_cache.root
    assert where(str(tmp_path), {"NORMJAX_CACHE": "/a"}) == tmp_path
    assert where("", {"NORMJAX_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert where("", {"XDG_CACHE_HOME": "/b"}) == Path("/b/normjax")
    assert where("", {}).name == "normjax"
    assert where("relative", {}).is_absolute()


def test_same_tokens_in_every_process(tmp_path):
    path = write(tmp_path / "t.txt", VERSE * 50 + "naïve 漢字 " * 30)
    code = f"""
        import hashlib
        from normjax.data import corpora, windows
        c = corpora.open_corpus(corpora.DataConfig(corpus={path!r}))
        b = windows.batch(c.train, 5, 17, 12, 64)
        print(c.fingerprint, hashlib.sha256(b.tobytes() + bytes(c.validation)).hexdigest())
    """
    outputs = {
        run(code, PYTHONHASHSEED=seed, NORMJAX_CACHE=str(tmp_path / folder), LC_ALL=locale)
        for seed, folder, locale in (("0", "x", "C"), ("1", "x", "C.UTF-8"), ("2", "y", "POSIX"))
    }
    assert len(outputs) == 1
