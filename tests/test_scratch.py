"""Folders filled aside: what a kill left behind goes after a day, and nothing else does."""

from __future__ import annotations

import os
import time

import pytest
from corpus_texts import VERSE, write

from normjax.data import corpora, scratch
from normjax.data.corpora import DataConfig

pytestmark = pytest.mark.usefixtures("own_folders")


def aged(path, hours):
    """Set the times of a path, and of all below it, to some hours ago."""
    then = time.time() - 3600 * hours
    for p in (path, *path.rglob("*")):
        os.utime(p, (then, then))
    return path


def left_behind(root, hours, name="left"):
    folder = root / (scratch.PREFIX + name)
    (folder / "downloads").mkdir(parents=True)
    write(folder / "downloads" / "train.npy")
    return aged(folder, hours)


def test_a_day_is_the_limit(tmp_path):
    old, young = left_behind(tmp_path, 24.1, "old"), left_behind(tmp_path, 23.9, "young")
    future = left_behind(tmp_path, -100, "future")  # the clock was set back
    scratch.sweep(tmp_path)
    assert not old.exists()
    assert young.exists() and future.exists()


def test_a_folder_that_is_still_written_to_stays(tmp_path):
    """A download of days changes nothing but the file it writes."""
    folder = left_behind(tmp_path, 100)
    os.utime(folder / "downloads" / "train.npy")
    scratch.sweep(tmp_path)
    assert (folder / "downloads" / "train.npy").exists()


def test_what_was_not_made_here_stays(tmp_path):
    root, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    elsewhere.mkdir()
    mine = [root / ".new-mine", root / "entry", root / "below" / (scratch.PREFIX + "x")]
    for folder in mine:
        folder.mkdir(parents=True)
    write(root / (scratch.PREFIX + "file"))
    aged(root, 100)
    aged(elsewhere, 100)
    (root / (scratch.PREFIX + "link")).symlink_to(elsewhere, target_is_directory=True)
    before = sorted(root.rglob("*"))
    scratch.sweep(root)
    assert sorted(root.rglob("*")) == before and elsewhere.exists()


def test_no_folder_is_no_mistake(tmp_path):
    scratch.sweep(tmp_path / "none")
    assert not list(tmp_path.iterdir())


def test_writing_tokens_sweeps_their_cache(tmp_path):
    cache = tmp_path / "cache"
    old, young = left_behind(cache, 30, "old"), left_behind(cache, 1, "young")
    config = DataConfig(corpus=write(tmp_path / "t.txt", VERSE * 20))
    corpus = corpora.open_corpus(config)
    assert {p.name for p in cache.iterdir()} == {corpus.fingerprint, young.name}
    again = left_behind(cache, 30, "old")
    corpora.open_corpus(config)  # only read: nothing is swept
    assert again == old and again.exists()
