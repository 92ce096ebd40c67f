"""A task as a source of training and evaluation windows, in place of a text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from typing import Any

import numpy as np

from normjax.data.tasks.table import TASKS, Row, build, parameters
from normjax.data.tasks.task import INFORMATION, Task
from normjax.errors import UserError, check_choice

FORMAT = 1  # of sequences: raise it when the same (seed, step) would give others
PREFIX = "task:"
EVALUATION_SEED = 1 << 63  # training seeds lie below
_STEPS = {"validation": 0, "test": 1}
_REFERENCES = {"unigram": "nothing", "bigram": "current"}
ALL = 4096
"""Sequences of an evaluation on "all"."""


@dataclasses.dataclass(frozen=True, eq=False)
class TaskCorpus:
    """A task that training can draw from without end.

    Attributes:
      task_name: a key of :data:`normjax.data.tasks.table.TASKS`.
      window: T that reference losses are stated for.
    """

    task_name: str
    window: int

    @property
    def name(self) -> str:
        """As it appears in a report: task:NAME."""
        return PREFIX + self.task_name

    @property
    def description(self) -> str:
        """What the task is and how it is drawn, in one sentence."""
        return (
            f"synthetic task, {TASKS[self.task_name].title}; fresh sequences in every step, and"
            " fixed others for validation and test"
        )

    @property
    def extent(self) -> str:
        """How much there is to train and to evaluate on, in words."""
        return "fresh sequences for training and fixed ones for validation and test"

    @property
    def files(self) -> None:
        """A task is read from no files."""
        return None

    @property
    def task(self) -> Task:
        """The task for the corpus' own window."""
        return _build(self.task_name, self.window)

    @property
    def vocabulary_size(self) -> int:
        """Number of different tokens V."""
        return self.task.vocabulary_size

    @property
    def uniform_loss(self) -> float:
        """Nats per token of a model that knows nothing: log V."""
        return math.log(self.vocabulary_size)

    def references(self, window: int, count: int) -> dict[str, float]:
        """Return the least losses of models that know nothing, and only the current token: exact.

        Returns:
          {"unigram": nats per scored token, "bigram": nats per scored token}.
        """
        losses = {name: self.task.optimum(level) for name, level in _REFERENCES.items()}
        return {name: loss for name, loss in losses.items() if loss is not None}

    @property
    def fingerprint(self) -> str:
        """SHA-256 of name, parameters and format, in hex."""
        identity = ("task", FORMAT, self.task_name, parameters(self.task))
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def training_batches(
        self, seed: int, first: int, count: int, size: int, window: int
    ) -> np.ndarray:
        """Return the sequences of ``count`` steps from ``first`` on: (count, B, T + 1) int32.

        Raises:
          UserError: a seed from 2^63 on, which belong to evaluation.
        """
        if seed >= EVALUATION_SEED:
            raise UserError(
                f"seed={seed}: must be below 2**63, from where on seeds are those of evaluation"
            )
        task = _build(self.task_name, window)
        return np.stack([task.sample(seed, first + i, size) for i in range(count)])

    def evaluation_set(
        self, window: int, count: int = 0, part: str = "validation"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return fixed sequences (W, T + 1) int32 and weights (W, T) float32: 1 where scored.

        With ``count=0`` there are 4096 of them; fewer are the first of more.
        """
        task = _build(self.task_name, window)
        sequences = task.sample(EVALUATION_SEED, _STEPS[part], count or ALL)
        return sequences, np.tile(task.scored.astype(np.float32), (len(sequences), 1))

    def evaluation_words(self, count: int, part: str) -> str:
        """Say what :meth:`evaluation_set` is, in words."""
        return f"{part} sequences, which are never trained on, scored targets only"

    def target_weights(self, window: int) -> np.ndarray | None:
        """Return the weights of target positions in training, (T,) float32; None if all count."""
        scored = _build(self.task_name, window).scored
        return None if scored.all() else scored.astype(np.float32)

    def record(self) -> dict[str, Any]:
        """Return the corpus as a plan lists it."""
        return {
            "name": self.name, "description": self.description, "vocabulary": "task",
            "vocabulary_size": self.vocabulary_size, "fingerprint": self.fingerprint,
            "uniform_loss": self.uniform_loss,
            "optimum_loss": self.task.optimum("full"),
        }  # fmt: skip

    def task_record(self) -> dict[str, Any] | None:
        """Return the task as a plan lists it: what it is, and the exact optimum of each level."""
        row, task = TASKS[self.task_name], self.task
        return {
            "name": self.task_name, "title": row.title, "description": row.description,
            "formula": row.formula, "source": row.source, "parameters": parameters(task),
            "window": self.window, "scored_fraction": float(task.scored.mean()),
            "optimum": {level: task.optimum(level) for level in INFORMATION},
            "unknown": {level: why for level in INFORMATION if (why := task.why_unknown(level))},
        }  # fmt: skip


def _build(name: str, window: int) -> Task:
    return _built(TASKS[name], window)


@functools.lru_cache(maxsize=64)
def _built(row: Row, window: int) -> Task:
    return row.build(window)


def open_task(corpus: str, window: int) -> TaskCorpus:
    """Return the corpus of ``task:NAME``.

    Raises:
      UserError: no such task, or a window too short for it, naming the flags.

    >>> open_task("task:copy", 16).vocabulary_size
    3
    """
    check_choice("data.corpus", corpus, [PREFIX + name for name in TASKS])
    name = corpus.removeprefix(PREFIX)
    least = build(name, 1 << 10).least_window  # the same whatever the window
    if window < least:
        raise UserError(
            f"data.window={window}: {corpus} needs at least {least} to show what it asks for;"
            f" pass --config.data.window={max(least, 32)}"
        )
    return TaskCorpus(name, window)
