"""How sure a run's final loss is: the finished runs of a workdir evaluated sequence by sequence.

The sequences of a task are independent, so the mean of n of them has the standard error

    s = sqrt( sum_i (l_i - mean)^2 / (n - 1) ) / sqrt(n),     l_i the mean loss of sequence i

over its scored positions, of which each sequence has the same number. Tokens of one sequence are
not independent; sequences are what is counted.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np

from normjax.data.tasks.corpus import TaskCorpus
from normjax.decoder import Decoder, Params
from normjax.errors import UserError
from normjax.runs import files
from normjax.runs.run_folder import RunFolder, run_folder
from normjax.training import train
from normjax.training.trained import TrainedRun

SEQUENCES = 256
"""Sequences in one call of the program."""


def standard_error(losses: np.ndarray) -> float:
    """Return the standard error of the mean of independent values (n,).

    >>> standard_error(np.array([1.0, 3.0]))
    1.0
    """
    if len(losses) < 2:
        raise UserError(
            f"config.train.final_windows={len(losses)}: a standard error needs 2 sequences or more;"
            " pass --config.train.final_windows=0 for all"
        )
    return float(np.std(losses, ddof=1) / math.sqrt(len(losses)))


@functools.lru_cache(maxsize=8)
def _program(model: Decoder):
    return jax.jit(functools.partial(train.token_losses, model))


def sequence_losses(
    model: Decoder, params: Params, sequences: np.ndarray, scored: np.ndarray
) -> np.ndarray:
    """Return the mean loss of each sequence over its scored positions, (n,) float64 nats.

    Args:
      model: the decoder.
      params: its parameters.
      sequences: (n, T + 1) int32.
      scored: (T,) bool.
    """
    found = []
    for first in range(0, len(sequences), SEQUENCES):
        part = sequences[first : first + SEQUENCES]
        padded = np.zeros((SEQUENCES, sequences.shape[1]), np.int32)  # one shape, one program
        padded[: len(part)] = part
        losses = np.asarray(_program(model)(params, padded), np.float64)[: len(part)]
        found.append(losses[:, scored].mean(axis=1))
    return np.concatenate(found)


def rescore(workdir: Path, corpus: TaskCorpus, count: int) -> None:
    """Write ``sampling.json`` of a task's workdir: each finished run's loss and standard error.

    What the file holds already is kept: a run's name says all that its numbers depend on.

    Args:
      workdir: with grid.json and runs/.
      corpus: the task that the runs were trained on.
      count: sequences of the final evaluation, 0 for all, as in ``train.final_windows``.
    """
    path = workdir / "sampling.json"
    known: dict[str, Any] = (files.read_object(path) or {}).get("runs", {})
    sequences, weights = corpus.evaluation_set(corpus.window, count, "test")
    planned = files.read_object(workdir / "grid.json") or {}
    for run in planned.get("runs", []):
        folder = run_folder(workdir, run["id"])
        if run["id"] in known or RunFolder(folder).state != "done":
            continue
        opened = TrainedRun(folder)
        losses = sequence_losses(
            opened.model, opened.params(run["steps"]), sequences, weights[0] > 0
        )
        known[run["id"]] = {
            "loss": float(losses.mean()), "standard_error": standard_error(losses),
            "sequences": len(losses),
        }  # fmt: skip
    files.write_sealed(path, {"format": 1, "runs": known})
