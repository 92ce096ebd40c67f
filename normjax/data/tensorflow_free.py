"""TFDS without TensorFlow: what hides it, and what stands in for it.

Everything here imports ``tensorflow_datasets`` inside functions: it takes half a second.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.resources
import io
import logging
import os
import socket
import sys
import types
import warnings
from collections.abc import Generator
from typing import Any

RETRIES, TIMEOUT_S = 2, (10.0, 30.0)  # of a download; seconds to connect and to read


@contextlib.contextmanager
def tensorflow_free() -> Generator[None]:
    """Run TFDS silently, without TensorFlow, and with downloads that give up in bounded time."""
    with contextlib.ExitStack() as stack:
        # TFDS would import an installed TensorFlow, which claims the whole memory of a GPU.
        stack.enter_context(_hidden("tensorflow"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        import absl.logging
        from requests.adapters import HTTPAdapter
        from tensorflow_datasets.core import dataset_builder
        from tensorflow_datasets.core.download import downloader
        from tensorflow_datasets.core.utils import tqdm_utils

        stack.callback(absl.logging.set_verbosity, absl.logging.get_verbosity())
        absl.logging.set_verbosity(absl.logging.FATAL)
        # TFDS names this package without requiring it; the standard library has the same names.
        stack.enter_context(_patched(dataset_builder, "importlib_resources", importlib.resources))
        stack.enter_context(_patched(tqdm_utils, "_active", False))
        stack.enter_context(_patched(logging.getLogger("urllib3.connectionpool"), "disabled", True))
        # TFDS sets no time-out and tries eleven times, minutes on a machine without network.
        stack.enter_context(_patched(downloader, "MAX_RETRIES", RETRIES))
        stack.enter_context(_patched(HTTPAdapter, "send", _with_timeout(HTTPAdapter.send)))
        stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(TIMEOUT_S[1])
        yield


class _Without:
    """A finder of modules that does not find one of them."""

    def __init__(self, finder: Any, hidden: str) -> None:
        self.finder, self.hidden = finder, hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return what the finder finds, or None for the hidden module."""
        return None if name == self.hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.finder, attribute)


@contextlib.contextmanager
def _hidden(module: str) -> Generator[None]:
    """Make a module that is not imported yet look as if it were not installed.

    ``sys.modules[module] = None`` would not do: TFDS takes the entry for an imported module.
    """
    sys.meta_path[:] = [_Without(finder, module) for finder in sys.meta_path]
    try:
        yield
    finally:  # finders that came meanwhile stay
        sys.meta_path[:] = [f.finder if isinstance(f, _Without) else f for f in sys.meta_path]


def _with_timeout(send: Any) -> Any:
    @functools.wraps(send)
    def bounded(*args: Any, timeout: Any = None, **kwargs: Any) -> Any:
        return send(*args, timeout=timeout or TIMEOUT_S, **kwargs)

    return bounded


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Generator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def file_functions(module: types.ModuleType) -> Generator[None]:
    """Lend a set's module TensorFlow's file functions, where it has a ``tf`` to call them on."""
    with _patched(module, "tf", _Files()) if hasattr(module, "tf") else contextlib.nullcontext():
        yield


class _NeedsTensorFlow(AttributeError):
    """Raised where a set's code uses more of TensorFlow than its file functions."""

    def __init__(self, attribute: str) -> None:
        super().__init__(f"tf.{attribute} needs TensorFlow", name="tensorflow")


class _Files(types.SimpleNamespace):
    """Stands for ``tf`` in a set's code, which mostly wants it for opening files.

    ``tfds:tiny_shakespeare``, for one, asks TensorFlow for ``isdir`` and ``GFile`` and no more.
    """

    def __init__(self) -> None:
        gfile = types.SimpleNamespace(
            GFile=_open,
            Open=_open,
            exists=os.path.exists,
            isdir=os.path.isdir,
            listdir=os.listdir,
            glob=lambda pattern: sorted(glob.glob(os.fspath(pattern))),
            walk=os.walk,
        )
        as_text = types.SimpleNamespace(as_text=lambda x: x.decode() if isinstance(x, bytes) else x)
        super().__init__(io=types.SimpleNamespace(gfile=gfile), compat=as_text)

    def __getattr__(self, attribute: str) -> Any:
        raise _NeedsTensorFlow(attribute)


def _open(path: Any, mode: str = "r") -> Any:
    """Open a file as ``tf.io.gfile.GFile`` does: UTF-8, line ends as they are."""
    return open(path, mode) if "b" in mode else open(path, mode, encoding="utf-8", newline="\n")
