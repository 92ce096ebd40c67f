"""TensorFlow stays out, and what TFDS wants of it is lent."""

from __future__ import annotations

import os
import types

import pytest
from corpus_texts import ROOT, run, write

from normjax.data.tensorflow_free import file_functions

pytestmark = pytest.mark.usefixtures("own_folders")


def test_no_tensorflow_even_where_it_is_installed(tmp_path):
    """A stand-in package that raises when it is imported lies on the path."""
    package = tmp_path / "site" / "tensorflow"
    package.mkdir(parents=True)
    write(package / "__init__.py", "raise RuntimeError('TensorFlow was imported')")
    code = """
        import importlib.util
        import sys
        from normjax.data import corpora
        from normjax.errors import UserError
        from normjax.data.tensorflow_free import tensorflow_free
        slow = {"tensorflow_datasets", "jax", "flax", "scipy"} & set(sys.modules)
        assert not slow, slow
        corpora.open_corpus(corpora.DataConfig())
        assert "tensorflow_datasets" in sys.modules
        try:
            corpora.open_corpus(corpora.DataConfig(corpus="tfds:no_such_set"))
        except UserError:
            pass
        with tensorflow_free():
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


def test_the_file_functions_do_what_those_of_python_do(tmp_path):
    module = types.ModuleType("a_set")
    module.tf = before = object()
    path = tmp_path / "é.txt"
    path.write_bytes("naïve\r\nend\n".encode())
    with file_functions(module):
        gfile = module.tf.io.gfile
        with gfile.GFile(path) as f:
            assert f.read() == "naïve\r\nend\n"  # line ends as they are, UTF-8 in any locale
        with gfile.Open(path, "rb") as f:
            assert f.read() == path.read_bytes()
        assert gfile.exists(path) and gfile.isdir(tmp_path) and not gfile.isdir(path)
        assert gfile.listdir(tmp_path) == ["é.txt"]
        assert gfile.glob(tmp_path / "*.txt") == [str(path)]
        assert [module.tf.compat.as_text(x) for x in ("é", "é".encode())] == ["é", "é"]
        with pytest.raises(AttributeError, match="tf.constant needs TensorFlow"):
            module.tf.constant(1)
    assert module.tf is before


def test_a_module_without_tensorflow_is_left_alone():
    module = types.ModuleType("a_set")
    with file_functions(module):
        assert not hasattr(module, "tf")
