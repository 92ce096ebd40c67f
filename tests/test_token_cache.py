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

from normjax.data import cache_folder, corpora, token_cache
from normjax.data.corpora import DataConfig
from normjax.data.vocabulary import Vocabulary
from normjax.errors import UserError

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
        assert corpus.references(8, 4) == first.references(8, 4)
        for part in ("train", "held_out"):
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
    want = np.array(first.train), np.array(first.held_out)
    folder = entry_of(first, tmp_path)
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    del first
    spoil(folder / name, how)
    again = corpora.open_corpus(config)
    np.testing.assert_array_equal(again.train, want[0])
    np.testing.assert_array_equal(again.held_out, want[1])
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [again.fingerprint]


def test_changed_characters_in_the_entry_are_noticed(tmp_path):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    first = corpora.open_corpus(config)
    path = entry_of(first, tmp_path) / "meta.json"
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"characters": meta["characters"][::-1]}))
    assert corpora.open_corpus(config).vocabulary == first.vocabulary


def test_every_array_is_hashed_however_large(tmp_path, capfd):
    """One bit in the middle of 70 MB, after which the times are put back."""
    folder, few = tmp_path / "cache" / ("0" * 64), np.zeros(9, np.uint8)
    entry = token_cache.CacheEntry(Vocabulary("byte"), np.zeros(70_000_000, np.uint8), few)
    assert isinstance(token_cache.write(folder, entry).train, np.memmap)
    path = folder / "train.npy"
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(35_000_000)
        file.write(b"\1")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert token_cache.read(folder) is None
    assert "train.npy is damaged" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["renamed", "swapped", "linked"])
def test_an_entry_under_another_key_is_not_taken_for_it(tmp_path, how, capfd):
    texts = [VERSE * 20, VERSE.upper() * 20]
    configs = [DataConfig(corpus=write(tmp_path / f"{i}.txt", t)) for i, t in enumerate(texts)]
    one, two = (entry_of(corpora.open_corpus(config), tmp_path) for config in configs)
    aside = tmp_path / "aside"
    two.rename(aside)
    if how == "swapped":
        one.rename(two)
        aside.rename(one)
    elif how == "renamed":
        one.rename(two)
    else:
        two.symlink_to(aside)
    for config, text in zip(configs, texts, strict=True):
        corpus = corpora.open_corpus(config)
        assert corpus.vocabulary.decode(corpus.train) == text[: len(corpus.train)]
    said = capfd.readouterr().err
    assert ("it is a link" if how == "linked" else "are those of another text") in said
    assert all(line.startswith("normjax: the cached tokens ") for line in said.splitlines())
    for config in configs:
        corpora.open_corpus(config)
    assert capfd.readouterr().err == ""  # they have been made anew


def test_an_entry_that_others_may_write_to_is_made_anew(tmp_path, capfd):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    folder = entry_of(corpora.open_corpus(config), tmp_path)
    (folder / "train.npy").chmod(0o666)
    corpora.open_corpus(config)
    assert "others may write to it" in capfd.readouterr().err
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}


def test_a_pipe_in_the_place_of_an_array_is_no_wait(tmp_path, capfd, monkeypatch):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    folder = entry_of(corpora.open_corpus(config), tmp_path)
    for name in ("train.npy", "meta.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        monkeypatch.setattr(cache_folder, "_said", set())
        assert isinstance(corpora.open_corpus(config).train, np.memmap)
        assert "a pipe" in capfd.readouterr().err
        assert (folder / name).is_file()


def damage(rng: np.random.Generator, cache: Path) -> str:
    """Spoil one thing in a cache and say what."""
    entries = sorted(p for p in cache.iterdir() if p.is_dir())
    files = sorted(p for e in entries for p in e.iterdir() if p.is_file())
    kind, path = (
        rng.choice(["bit", "cut", "grow", "junk", "gone", "swap", "move"]),
        rng.choice(files),
    )
    data = path.read_bytes() or b"?"
    at = int(rng.integers(len(data)))
    if kind == "bit":
        path.write_bytes(
            data[:at] + bytes([data[at] ^ (1 << int(rng.integers(8)))]) + data[at + 1 :]
        )
    elif kind in ("cut", "grow", "junk"):
        new = {"cut": data[:at], "grow": data + data[:1], "junk": rng.bytes(at)}
        path.write_bytes(new[kind])
    elif kind == "gone":
        path.unlink()
    elif kind == "swap":
        other = rng.choice(files)
        path.write_bytes(other.read_bytes())
    else:
        path.parent.rename(path.parent.with_name(f"{rng.integers(1 << 60):064x}"))
    return f"{kind} {path.name}"


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 400), marks=pytest.mark.slow)])
def test_whatever_is_damaged_the_tokens_are_right(tmp_path, seeds):
    texts = [VERSE * 5, "ab" * 200]
    configs = [
        DataConfig(corpus=write(tmp_path / f"{i}.txt", t), window=8) for i, t in enumerate(texts)
    ]
    for seed in seeds:
        rng = np.random.default_rng(seed)
        for config in configs:
            corpora.open_corpus(config)
        done = [damage(rng, tmp_path / "cache") for _ in range(int(rng.integers(1, 4)))]
        for config, text in zip(configs, texts, strict=True):
            corpus = corpora.open_corpus(config)
            tokens = np.concatenate([corpus.train, corpus.held_out])
            assert corpus.vocabulary.decode(tokens) == text, f"seed {seed}: {done}"


# --- opened by fingerprint ------------------------------------------------------------------------


def test_tokens_are_found_by_fingerprint_wherever_the_text_is(tmp_path, monkeypatch):
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    elsewhere.mkdir()
    write(home / "t.txt")
    monkeypatch.chdir(home)
    config = DataConfig(corpus="t.txt")
    first = corpora.open_corpus(config)
    monkeypatch.chdir(elsewhere)
    write(elsewhere / "t.txt", "another text " * 99)  # the same relative path leads to it
    found = corpora.open_by_fingerprint(config, first.fingerprint)
    np.testing.assert_array_equal(found.train, first.train)
    np.testing.assert_array_equal(found.held_out, first.held_out)
    assert (found.name, found.vocabulary) == ("t.txt", first.vocabulary)
    monkeypatch.setenv("NORMJAX_CACHE", str(tmp_path / "empty"))
    with pytest.raises(UserError, match="is another text now, and its tokens are not in the cache"):
        corpora.open_by_fingerprint(config, first.fingerprint)
    (elsewhere / "t.txt").unlink()
    with pytest.raises(UserError, match="no such file or folder.* tokens are not in the cache"):
        corpora.open_by_fingerprint(config, first.fingerprint)
    monkeypatch.chdir(home)
    again = corpora.open_by_fingerprint(config, first.fingerprint)
    np.testing.assert_array_equal(again.train, first.train)
    assert not (tmp_path / "empty").exists()  # nothing is written


@pytest.mark.parametrize("fingerprint", [None, 7, "", "../../cache", "f" * 63, "F" * 64, "g" * 64])
def test_what_is_no_fingerprint_is_no_path(tmp_path, fingerprint):
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    with pytest.raises(UserError, match="must be 64 digits of hex"):
        corpora.open_by_fingerprint(config, fingerprint)


def test_a_folder_that_a_record_names_is_neither_read_nor_written(tmp_path):
    theirs = tmp_path / "theirs"
    path = write(tmp_path / "t.txt")
    first = corpora.open_corpus(DataConfig(corpus=path))
    config = DataConfig(corpus=path, cache_dir=str(theirs))
    assert corpora.open_by_fingerprint(config, first.fingerprint).fingerprint == first.fingerprint
    assert not theirs.exists()


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


def test_same_tokens_in_every_process(tmp_path):
    path = write(tmp_path / "t.txt", VERSE * 50 + "naïve 漢字 " * 30)
    code = f"""
        import hashlib
        from normjax.data import corpora, windows
        c = corpora.open_corpus(corpora.DataConfig(corpus={path!r}))
        b = windows.batch(c.train, 5, 17, 12, 64)
        print(c.fingerprint, hashlib.sha256(b.tobytes() + bytes(c.held_out)).hexdigest())
    """
    outputs = {
        run(code, PYTHONHASHSEED=seed, NORMJAX_CACHE=str(tmp_path / folder), LC_ALL=locale)
        for seed, folder, locale in (("0", "x", "C"), ("1", "x", "C.UTF-8"), ("2", "y", "POSIX"))
    }
    assert len(outputs) == 1
