"""Any TFDS text set by name, as training and validation text.

Everything here imports ``tensorflow_datasets`` inside functions: it takes half a second.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shutil
import socket
import sys
import tempfile
import urllib.error
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from normjax.data import cache_folder, scratch
from normjax.data.tensorflow_free import file_functions, tensorflow_free
from normjax.errors import UserError, suggest

_PACKAGES = ("text", "question_answering", "summarization", "text_simplification", "translate")


def read(name: str, folder: Path | None) -> tuple[str, str | None, str]:
    """Return the texts of a TFDS set, downloading and preparing it when that was not done yet.

    The text is the feature ``text``, else the only string feature. Validation is the split
    ``validation`` (or ``valid``, ``val``, ``dev``), else ``test``. Examples are joined by newlines.
    A set prepared in TFDS's own folder (``$TFDS_DATA_DIR``, else ``~/tensorflow_datasets``) in a
    random-access format is read there.

    Args:
      name: ``NAME``, ``NAME/CONFIG`` or ``NAME/CONFIG:VERSION`` as TFDS writes it.
      folder: where prepared sets are kept; None keeps none.

    Returns:
      The training text, the validation text or None, and the full name with version and with the
      splits that are not read.

    Raises:
      UserError: an unknown name, a set that cannot be downloaded, one without a single text
        feature, or one whose own code needs TensorFlow.
    """
    with tensorflow_free():
        import tensorflow_datasets as tfds

        cls = _find(name)
        module = sys.modules[cls.__module__]
        try:
            # None is TFDS's own folder.
            make = functools.partial(tfds.builder, name)
            with file_functions(module), prepared(make, folder, [None]) as builder:
                return _texts(name, builder)
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
def prepared(
    make: Callable[..., Any], folder: Path | None, folders: Sequence[Path | None] = ()
) -> Generator[Any]:
    """Yield a builder whose data lies on disk in a random-access format.

    Args:
      make: the builder for ``data_dir``.
      folders: where the data may lie, None for TFDS's own folder.
      folder: where it is kept when it must be prepared, and may lie; None prepares it for now.
    """
    for place in (*folders, *([folder] if folder else [])):
        builder = make(data_dir=place and str(place))
        if builder.is_prepared() and _random_access(builder):
            yield builder
            return
    with _aside(folder) as aside:
        builder = make(data_dir=aside)
        builder.download_and_prepare(
            download_dir=os.path.join(aside, "downloads"),
            download_config=_download_config(),
            file_format="array_record",
        )
        # Prepared aside and moved when whole: an interrupted download leaves nothing behind, and
        # of two processes one wins.
        if folder is not None:
            final = folder / builder.data_path.relative_to(aside)
            with contextlib.suppress(OSError):
                if cache_folder.make(final.parent):
                    os.rename(builder.data_path, final)
            if not builder.data_path.exists():
                builder = make(data_dir=str(folder))
        yield builder


@contextlib.contextmanager
def _aside(folder: Path | None) -> Generator[str]:
    """Yield a temporary folder inside ``folder``, or elsewhere where that cannot be written to."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()] if folder else []
    with contextlib.ExitStack() as stack:
        aside = None
        if folder is not None and cache_folder.make(folder):
            with contextlib.suppress(OSError):
                aside = str(scratch.make(folder))
        aside = aside or tempfile.mkdtemp(prefix="normjax-tfds-")
        for path in reversed(missing):  # a failed download leaves no empty folder
            stack.callback(_remove_empty, path)
        stack.callback(shutil.rmtree, aside, ignore_errors=True)
        yield aside


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _random_access(builder: Any) -> bool:
    from tensorflow_datasets.core import file_adapters

    formats = file_adapters.FileFormat.with_random_access()
    return bool(builder.info.available_file_formats() & formats)


def _download_config() -> Any:
    """Return TFDS's configuration of a download from a set's own source, not from a mirror."""
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
    text, name = joined(builder, train, feature), builder.info.full_name
    if unread := [s for s in splits if s not in (train, held)]:
        name += f" (not read: {', '.join(unread)})"
    return text, held and joined(builder, held, feature), name


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


def joined(builder: Any, split: str, feature: str) -> str:
    """Return a feature of all examples of a split, joined by newlines."""
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
