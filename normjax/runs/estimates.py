"""What a grid will cost, before it runs: parameters, memory, time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax.data.corpora import AnyCorpus
from normjax.decoder import Decoder
from normjax.runs.grid import CohortPlan
from normjax.runs.progress import duration

# Share of the matrix-product peak that training reaches on a CPU, and seconds to compile one cohort
# with initialization and evaluation: both are what the default experiment shows, and rough.
EFFICIENCY = 0.25
COMPILE_SECONDS = 6.0


def training_flops(cohort: CohortPlan, vocabulary: int) -> float:
    """Return the floating-point operations of all training steps of a cohort."""
    config = cohort.config
    tokens = config.train.steps * config.train.batch_size * config.data.window
    return cohort.model(vocabulary).flops_per_token() * tokens * len(cohort.runs)


def run_bytes(model: Decoder, batch_size: int) -> int:
    """Return an estimate of the bytes that one run holds while it trains.

    Parameters, gradients and two moments; and the activations that a backward pass keeps: about 16
    vectors of the width, 3 of the MLP's width and 3 rows of attention per head, token and block.
    """
    c = model.config
    size = jnp.dtype(c.dtype).itemsize
    state = 4 * model.parameter_count() * jnp.dtype(c.param_dtype).itemsize
    per_token = 16 * c.width + 3 * c.hidden_width * (c.mlp != "none")
    per_token += 3 * c.heads * model.window * (c.attention != "none")
    blocks = 1 if c.remat else c.depth
    tokens = batch_size * model.window
    return state + tokens * (size * blocks * per_token + 3 * 4 * model.vocabulary)


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


def describe(cohorts: Sequence[CohortPlan], corpus: AnyCorpus, devices: Sequence[Any]) -> str:
    """Return what ``--dry_run`` prints: runs, cohorts, parameters, memory and time of a grid."""
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
    lines.append(f"time: about {duration(seconds)} (from a matrix product timed now; rough)")
    return "\n".join(lines)


def _seconds(cohorts: Sequence[CohortPlan], vocabulary: int, devices: Sequence[Any]) -> float:
    rate = matrix_peak(devices) * EFFICIENCY
    total = 0.0
    for cohort in cohorts:
        per_run = training_flops(cohort, vocabulary) / len(cohort.runs)
        rounds = -(-len(cohort.runs) // len(devices))
        total += COMPILE_SECONDS + per_run * rounds / rate
    return total
