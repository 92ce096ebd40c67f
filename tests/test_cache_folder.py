"""Where the cache lies, and who else could have put something there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from corpus_texts import VERSE, write

from normjax.data import cache_folder, corpora
from normjax.data.corpora import DataConfig
from normjax.runs import machine

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture(autouse=True)
def every_line_anew(monkeypatch):
    monkeypatch.setattr(cache_folder, "_said", set())


def test_where_the_cache_lies(tmp_path, monkeypatch):
    where = cache_folder.where
    assert where(str(tmp_path), {"NORMJAX_CACHE": "/a"}) == tmp_path
    assert where("", {"NORMJAX_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert where("", {"XDG_CACHE_HOME": "/b"}) == Path("/b/normjax")
    monkeypatch.setenv("HOME", "/home/me")
    for environment in ({}, {"XDG_CACHE_HOME": "relative"}):
        assert where("", environment).is_relative_to("/home/me")
        assert where("", environment).name == "normjax"
    assert where("relative", {}).is_absolute()


@pytest.fixture
def homeless(tmp_path, monkeypatch):
    """An account without a home; its temporary folder is anybody's, as usual."""
    for name in ("NORMJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(public))
    return public / f"normjax-{os.geteuid()}"


def of_another(folder, monkeypatch):
    """Let a folder belong to the user after this one."""
    lstat = os.lstat

    def answer(path, *args, **kwargs):
        state = lstat(path, *args, **kwargs)
        if Path(path) != folder:
            return state
        return os.stat_result([*state[:4], state.st_uid + 1, *state[5:]])

    monkeypatch.setattr(os, "lstat", answer)


def spoil(folder, how, monkeypatch):
    if how == "link":
        (folder.parent / "target").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "target")
        return
    folder.mkdir(mode=0o700)
    if how == "owner":
        of_another(folder, monkeypatch)
    else:
        folder.chmod(how)


WRONG = ["owner", 0o777, 0o770, 0o702, 0o1777, 0o720]


@pytest.mark.parametrize("how", [*WRONG, "link"])
def test_without_a_home_the_cache_is_private_or_there_is_none(homeless, how, monkeypatch, capfd):
    config = DataConfig(corpus=write(homeless.parents[1] / "t.txt"))
    assert isinstance(corpora.open_corpus(config).train, np.memmap)
    assert homeless.stat().st_mode & 0o777 == 0o700
    assert capfd.readouterr().err == ""
    homeless.rename(homeless.parent / "old")
    spoil(homeless, how, monkeypatch)
    before = sorted(homeless.rglob("*"))
    corpus = corpora.open_corpus(config)
    assert corpus.vocabulary.decode(corpus.train) == (VERSE * 20)[: len(corpus.train)]
    assert not isinstance(corpus.train, np.memmap)
    assert sorted(homeless.rglob("*")) == before
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f"the cache {homeless} is not used: " in said
    assert "NORMJAX_CACHE=" in said


@pytest.mark.parametrize("how", WRONG)
def test_tokens_and_programs_of_others_are_not_used(tmp_path, how, monkeypatch, capfd):
    set_to = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: set_to.update({name: value}))
    place = tmp_path / "cache"
    machine.set_up(4, "", cache_folder.folder(""))
    (programs,) = (v for k, v in set_to.items() if k == "jax_compilation_cache_dir")
    assert Path(programs).parent == place and Path(programs).stat().st_mode & 0o777 == 0o700
    config = DataConfig(corpus=write(tmp_path / "t.txt"))
    corpora.open_corpus(config)
    set_to.clear()
    place.rename(tmp_path / "aside")
    spoil(place, how, monkeypatch)
    machine.set_up(4, "", cache_folder.folder(""))
    machine.set_up(4, str(place))
    assert "jax_compilation_cache_dir" not in set_to
    assert not isinstance(corpora.open_corpus(config).train, np.memmap)
    assert capfd.readouterr().err.count("\n") == 1  # said once
    assert not list(place.iterdir())


@pytest.mark.parametrize("how", ["link", "owner", 0o777])
def test_a_folder_inside_the_cache_is_held_to_the_same(tmp_path, how, monkeypatch, capfd):
    inside = tmp_path / "cache" / "tfds"
    assert cache_folder.make(inside.parent)
    assert cache_folder.folder("", "tfds") == inside
    spoil(inside, how, monkeypatch)
    assert cache_folder.folder("") == inside.parent
    assert cache_folder.folder("", "tfds") is None
    assert cache_folder.folder("", "tfds", "below") is None
    assert f"the cache {inside} is not used" in capfd.readouterr().err


def test_a_chosen_folder_may_be_a_link_of_ones_own(tmp_path, monkeypatch, capfd):
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "mine").symlink_to(tmp_path / "disk")
    config = DataConfig(corpus=write(tmp_path / "t.txt"), cache_dir=str(tmp_path / "mine"))
    corpora.open_corpus(config)
    assert len(list((tmp_path / "disk").iterdir())) == 1
    of_another(tmp_path / "mine", monkeypatch)
    assert cache_folder.folder(config.cache_dir) is None
    assert "a link of another user's" in capfd.readouterr().err
