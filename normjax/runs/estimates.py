"""What a grid will cost, before it runs: parameters, memory, time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from normjax.data.corpora import AnyCorpus
from normjax.data.tasks.corpus import TaskCorpus
from normjax.decoder import Decoder
from normjax.errors import UserError
from normjax.runs import machine
from normjax.runs.grid import CohortPlan
from normjax.runs.progress import duration

# Share of the matrix-product peak that training reaches on a CPU, and seconds to compile one cohort
# with initialization and evaluation: both are what the default experiment shows, and rough.
EFFICIENCY = 0.25
ORBAX_BYTES = 130_000  # what a checkpoint takes besides its numbers
COMPILE_SECONDS = 6.0


def training_flops(cohort: CohortPlan, vocabulary: int) -> float:
    """Return the floating-point operations of all training steps of a cohort."""
    config = cohort.config
    tokens = config.train.steps * config.train.batch_size * config.data.window
    return cohort.model(vocabulary).flops_per_token() * tokens * len(cohort.runs)


def run_bytes(model: Decoder, batch_size: int) -> int:
    """Return an estimate of the bytes that one run holds while it trains."""
    return _state_bytes(model) + _activation_bytes(model, batch_size)


def _state_bytes(model: Decoder) -> int:
    """Return the bytes of parameters, gradients and two moments."""
    return 4 * model.parameter_count() * jnp.dtype(model.config.param_dtype).itemsize


def _activation_bytes(model: Decoder, batch_size: int) -> int:
    """Return an estimate of the bytes that a backward pass keeps.

    About 16 vectors of the width, 3 of the MLP's width and 3 rows of attention per head, token and
    block, and 3 rows of logits per token.
    """
    c = model.config
    size = jnp.dtype(c.dtype).itemsize
    per_token = 16 * c.width + 3 * c.hidden_width * (c.mlp != "none")
    per_token += 3 * c.heads * model.window * (c.attention != "none")
    blocks = 1 if c.remat else c.depth
    tokens = batch_size * model.window
    return tokens * (size * blocks * per_token + 3 * 4 * model.vocabulary)


def checkpoint_bytes(model: Decoder) -> int:
    """Return the bytes of one checkpoint of one run: parameters, two moments, Orbax's own files."""
    size = jnp.dtype(model.config.param_dtype).itemsize
    return model.parameter_count() * (size + 2 * max(size, 4)) + ORBAX_BYTES


class Need(NamedTuple):
    """Bytes that a cohort holds while it trains, by the flag that they grow with."""

    model: int
    seeds: int
    batch: int
    chunk: int
    evaluation: int


def need(cohort: CohortPlan, corpus: AnyCorpus, devices: Sequence[Any]) -> Need:
    """Return an estimate of what a cohort needs of one memory: the machine's, or a device's.

    The states of all runs, the activations of those that train at the same time, and on the host
    the batches of a chunk (twice: drawn, and laid out for the devices) and the windows evaluated.
    """
    t, window = cohort.config.train, cohort.config.data.window
    model, runs = cohort.model(corpus.vocabulary_size), len(cohort.runs)
    on_cpu = devices[0].platform == "cpu"
    state, activations = _state_bytes(model), _activation_bytes(model, t.batch_size)
    split = t.parallel == "data" and len(devices) > 1
    if on_cpu:  # all devices share the memory, and lanes run in turn
        copies = runs * len(devices) if split else runs
        at_once = runs if t.lanes == "vmap" else min(runs, 1 if split else len(devices))
    else:
        copies = runs if split else -(-runs // len(devices))
        at_once = 1 if t.lanes == "map" else copies
        activations //= len(devices) if split else 1
    windows = max(t.evaluation_windows, t.final_windows)
    if not isinstance(corpus, TaskCorpus):
        most = -(-len(corpus.held_out) // 2) // window
        windows = min(windows or most, most)
    return Need(
        state, state * (copies - 1), activations * at_once,
        2 * 4 * runs * t.chunk_steps * t.batch_size * (window + 1), 3 * 4 * windows * (window + 1),
    )  # fmt: skip


def check(cohorts: Sequence[CohortPlan], corpus: AnyCorpus, devices: Sequence[Any]) -> None:
    """Refuse a grid that cannot fit into memory, before anything of it is made.

    Raises:
      UserError: one line with the field that takes most, what there is, and a value that would do.
    """
    total = machine.memory_bytes()
    for cohort in cohorts:
        found = need(cohort, corpus, devices)
        device = total if devices[0].platform == "cpu" else _device_bytes(devices[0])
        host = found.chunk + found.evaluation
        on_device = found.model + found.seeds + found.batch
        if devices[0].platform == "cpu":
            host, on_device = host + on_device, 0
        if host > total or on_device > device:
            raise UserError(_does_not_fit(cohort, found, device if on_device > device else total))


def _device_bytes(device: Any) -> float:
    """Return the memory of an accelerator; infinity where it does not say."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit", float("inf"))
    except RuntimeError:  # not every platform tells
        return float("inf")


def _does_not_fit(cohort: CohortPlan, found: Need, total: float) -> str:
    config, t = cohort.config, cohort.config.train
    most = max(Need._fields, key=lambda name: getattr(found, name))
    rest = total - (sum(found) - getattr(found, most))
    share = max(0.0, 0.9 * rest / getattr(found, most))
    flag, value = {
        "model": ("config.model.width", config.model.width),
        "seeds": ("config.grid.seeds", len(cohort.runs)),
        "batch": ("config.train.batch_size", t.batch_size),
        "chunk": ("config.train.chunk_steps", t.chunk_steps),
        "evaluation": ("config.train.final_windows", max(t.evaluation_windows, t.final_windows)),
    }[most]  # fmt: skip
    fits = int(value * share)
    fix = f"pass --{flag}={fits}, or fewer" if fits >= 1 else "take a smaller model or batch"
    if most == "model":
        size = f"{config.model.depth} blocks, {config.model.width} wide"
        fix = f"a model of {size} does not fit; take a smaller one"
    elif most == "seeds":
        fix = "train fewer runs at a time, in several workdirs"
    return (
        f"{flag}={value}: {cohort.name} needs about {gigabytes(sum(found))} of memory, and there"
        f" are {gigabytes(total)}; {fix}"
    )


def gigabytes(size: float) -> str:
    """Return a number of bytes in words.

    >>> gigabytes(23.6e9), gigabytes(4e6)
    ('24 GB', '0.004 GB')
    """
    return f"{size / 1e9:,.0f} GB" if size >= 9.5e9 else f"{size / 1e9:.1g} GB"


def matrix_peak(devices: Sequence[Any], size: int = 768, repeats: int = 4) -> float:
    """Return the floating-point operations per second of a float32 matrix product on one device."""
    a = jax.device_put(np.ones((size, size), np.float32), devices[0])
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, a))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(a, a))
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def describe(
    cohorts: Sequence[CohortPlan], corpus: AnyCorpus, devices: Sequence[Any],
    first: Sequence[CohortPlan] = (), share: float = 0.0,
) -> str:  # fmt: skip
    """Return what ``--dry_run`` prints: runs, cohorts, parameters, memory and time of a grid.

    ``first`` are cohorts that choose the rates, trained over ``share`` of their steps.
    """
    vocabulary, files = corpus.vocabulary_size, corpus.files
    runs = sum(len(cohort.runs) for cohort in cohorts)
    lines = [
        f"{runs} runs in {len(cohorts)} cohorts on {len(devices)} {devices[0].platform} device(s);"
        f" corpus {corpus.name}: {corpus.extent}, {vocabulary} different"
        + (f"; files: {files.total}" if files else ""),
        *(f"    left out: {reason}" for reason in (files.reasons if files else ())),
        f"{'cohort':<28}{'runs':>5}{'parameters':>12}{'steps':>7}{'MB a run':>10}",
    ]
    for cohort in cohorts:
        model, config = cohort.model(vocabulary), cohort.config.train
        memory = run_bytes(model, config.batch_size) / 1e6
        lines.append(
            f"{cohort.name:<28}{len(cohort.runs):>5}{model.parameter_count():>12,}"
            f"{config.steps:>7}{memory:>10.0f}"
        )
        lines += [f"    {run.id}" for run in cohort.runs]
    seconds = _seconds(cohorts, vocabulary, devices)
    if first:
        tried = sum(len(cohort.runs) for cohort in first)
        lines.append(f"before them, to choose rates: {tried} runs over {share:.0%} of the steps")
        seconds += _seconds(first, vocabulary, devices, share)
    lines.append(f"time: about {duration(seconds)} (from a matrix product timed now; rough)")
    return "\n".join(lines)


def _seconds(
    cohorts: Sequence[CohortPlan], vocabulary: int, devices: Sequence[Any], share: float = 1.0
) -> float:
    rate = matrix_peak(devices) * EFFICIENCY
    total = 0.0
    for cohort in cohorts:
        per_run = training_flops(cohort, vocabulary) / len(cohort.runs)
        rounds = -(-len(cohort.runs) // len(devices))
        total += COMPILE_SECONDS + share * per_run * rounds / rate
    return total
