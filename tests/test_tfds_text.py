"""TFDS text sets by name: generated, downloaded, prepared before, mistaken."""

from __future__ import annotations

import io
import os
import socket
import sys

import numpy as np
import pytest
from corpus_texts import VERSE, error, write

from normjax.data import corpora, scratch, tensorflow_free
from normjax.data.corpora import DataConfig

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture(scope="module")
def sets():
    """Two sets registered in TFDS as any other: one generates, one downloads with TensorFlow."""
    with tensorflow_free.tensorflow_free():
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
    corpus = corpora.open_corpus(DataConfig(corpus=f"tfds:normjax_verses/{config}"))
    assert corpus.vocabulary.decode(corpus.train) == verses("train")
    assert corpus.vocabulary.decode(corpus.held_out) == verses(held)
    assert f"normjax_verses/{config}/1.0.0" in corpus.description
    assert ("(not read: test)" in corpus.description) is (config == "both")
    prepared = tmp_path / "cache" / "tfds" / "normjax_verses" / config / "1.0.0"
    assert list(prepared.glob("*.array_record*"))
    assert not [p for p in (tmp_path / "cache" / "tfds").iterdir() if p.name.startswith(".")]


def test_preparing_a_set_sweeps_their_folder(sets, tmp_path):
    """Where a kill in the middle of a download left its folder behind, a day and more ago."""
    left = tmp_path / "cache" / "tfds" / (scratch.PREFIX + "left")
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    corpora.open_corpus(DataConfig(corpus="tfds:normjax_verses/both"))
    assert [p.name for p in left.parent.iterdir()] == ["normjax_verses"]


def test_a_tfds_set_of_one_split_is_divided(sets):
    corpus = corpora.open_corpus(
        DataConfig(corpus="tfds:normjax_verses/alone", validation_fraction=0.2)
    )
    text = verses("train")
    n = int(len(text) * 0.8)
    assert corpus.vocabulary.decode(corpus.train) == text[:n]
    assert corpus.vocabulary.decode(corpus.held_out) == text[n:]


def test_the_only_text_feature_is_taken(sets):
    corpus = corpora.open_corpus(DataConfig(corpus="tfds:normjax_verses/titled", window=4))
    tokens = np.concatenate([corpus.train, corpus.held_out])
    assert corpus.vocabulary.decode(tokens) == "\n".join(f"T{i}" for i in range(40))


def test_a_prepared_set_is_read_and_not_made_again(sets, tmp_path, monkeypatch):
    config = DataConfig(corpus="tfds:normjax_verses/both")
    first = corpora.open_corpus(config)
    monkeypatch.setattr(sets[0], "_split_generators", None)
    assert corpora.open_corpus(config).fingerprint == first.fingerprint


def test_a_set_in_tfds_own_folder_is_found(sets, tmp_path, monkeypatch):
    from tensorflow_datasets.core import constants

    monkeypatch.setattr(constants, "DATA_DIR", str(tmp_path / "own"))
    with tensorflow_free.tensorflow_free():
        sets[0](data_dir=tmp_path / "own", config="both").download_and_prepare(
            file_format="array_record"
        )
    monkeypatch.setattr(sets[0], "_split_generators", None)
    corpus = corpora.open_corpus(DataConfig(corpus="tfds:normjax_verses/both"))
    assert corpus.vocabulary.decode(corpus.held_out) == verses("validation")
    assert not (tmp_path / "cache" / "tfds").exists()


def test_an_unwritable_folder_does_not_stop_a_set(sets, tmp_path):
    blocked = write(tmp_path / "file") + "/x"
    corpus = corpora.open_corpus(DataConfig(corpus="tfds:normjax_verses/both", cache_dir=blocked))
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
        assert timeout == tensorflow_free.TIMEOUT_S  # nothing waits for ever
        assert self.max_retries.total == tensorflow_free.RETRIES
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
    corpus = corpora.open_corpus(DataConfig(corpus="tfds:normjax_downloaded/plain"))
    tokens = np.concatenate([corpus.train, corpus.held_out])
    assert corpus.vocabulary.decode(tokens) == VERSE * 20
    message = error(corpus="tfds:normjax_downloaded/tensors")
    assert "needs TensorFlow" in message
    assert "tensorflow" not in sys.modules
    assert not isinstance(tf, tensorflow_free._Files)  # what stood in for it is gone
    assert capfd.readouterr() == ("", "")


def test_a_changed_download_is_refused(monkeypatch):
    import requests

    monkeypatch.setattr(requests.adapters.HTTPAdapter, "send", answer(b"not Shakespeare"))
    assert "cannot be prepared" in error(corpus="tfds:tiny_shakespeare")
