"""What a run folder tells a judge: diagnostics over their steps, metrics, how the run ended.

No JAX is imported here. Nothing is required: a missing or damaged file is less evidence.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from normjax.diagnostics import definitions, log
from normjax.runs import files
from normjax.runs.run_folder import RunFolder

METRICS = {"train/loss": "loss of the training batches", "validation/loss": "validation loss",
           "test/loss": "test loss", "gradient/norm": "gradient norm"}  # fmt: skip

NO_COUNTS = (np.zeros(0, int), np.zeros(0, int))


@dataclasses.dataclass(frozen=True)
class Series:
    """One diagnostic of one run over the steps at which it was measured.

    Attributes:
      name: with brackets.
      steps: (n,) ascending.
      values: (n, ...) float64, the diagnostic's axes after the first; NaN and infinities included.
    """

    name: str
    steps: np.ndarray
    values: np.ndarray

    @property
    def flat(self) -> np.ndarray:
        """The values as (n, places)."""
        return self.values.reshape(len(self.steps), -1)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """All that is known of a run.

    Attributes:
      series: diagnostics by name.
      metrics: of metrics.jsonl by name: losses and gradient norm, NaN where they are null.
      skipped: (steps, skipped updates until then).
      state: as in the manifest; "missing" without one, "damaged" where it cannot be used.
      diverged_at: first step of the streak that ended it, counted from 1, or None.
      sublayers: what the sub-layer axis holds.
      warmup: steps of warm-up.
      steps: that the run is to take; 0 where that is not known.
      extremes: of what every step measured, {name: {field: array}}; see ``log``.
      expected: what the placement's row has as the start of a value, {name: array}.
      references: losses in nats per token of the test text of who knows how frequent tokens
        are ("unigram") and who knows it after each token ("bigram"); what is not known is absent.
    """

    series: Mapping[str, Series]
    metrics: Mapping[str, Series] = dataclasses.field(default_factory=dict)
    skipped: tuple[np.ndarray, np.ndarray] = NO_COUNTS
    state: str = "missing"
    diverged_at: int | None = None
    sublayers: tuple[str, ...] = definitions.SUBLAYER_ORDER
    warmup: int = 0
    steps: int = 0
    extremes: Mapping[str, Mapping[str, np.ndarray]] = dataclasses.field(default_factory=dict)
    expected: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    references: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def taken(self) -> int:
        """How many steps the run took, as its evaluations say."""
        return max((int(s.steps[-1]) for s in self.metrics.values() if len(s.steps)), default=0)


def gather(samples: Iterable[tuple[int, Mapping[str, np.ndarray]]]) -> dict[str, Series]:
    """Return the series of samples ``(step, {name: array})``, ascending.

    Of arrays with several shapes under one name those of the commonest shape are kept.

    >>> gather([(0, {"loss/value": np.array(3.0)}), (4, {})])["loss/value"].steps
    array([0])
    """
    found: dict[str, list[tuple[int, np.ndarray]]] = {}
    for step, values in samples:
        for name, value in values.items():
            found.setdefault(name, []).append((step, np.asarray(value, np.float64)))
    out = {}
    for name, pairs in found.items():
        shape, _ = Counter(value.shape for _, value in pairs).most_common(1)[0]
        kept = [(step, value) for step, value in pairs if value.shape == shape]
        if np.prod(shape, dtype=int):
            steps = np.array([step for step, _ in kept])
            out[name] = Series(name, steps, np.stack([value for _, value in kept]))
    return out


def read(run_dir: str | Path, references: Mapping[str, float] | None = None) -> Evidence:
    """Return the evidence in a run folder, which may be empty or absent.

    ``references`` None: those of the workdir's plan, where the folder lies in one.
    """
    run = RunFolder(run_dir)
    extremes, expected = log.read_extremes(run)
    lines = run.metrics()
    model, training = (_dict(run.record.get(name)) for name in ("model", "train"))
    warmup, steps = training.get("warmup_steps"), training.get("steps")
    if references is None:
        references = references_of(files.read_object(run.path.parent.parent / "grid.json") or {})
    return Evidence(
        series=gather(log.read_diagnostics(run)),
        metrics={
            name: _metric(name, lines) for name in METRICS if any(name in line for line in lines)
        },
        skipped=_skipped(lines),
        state=_state(run, lines),
        diverged_at=run.value("diverged_at"),
        sublayers=definitions.sublayer_names(model),
        warmup=warmup if isinstance(warmup, int) else 0,
        steps=steps if isinstance(steps, int) else 0,
        extremes=extremes,
        expected=expected,
        references=references,
    )


def references_of(plan: Mapping[str, Any]) -> dict[str, float]:
    """Return the reference losses in the corpus of a plan, grid.json.

    >>> references_of({"corpus": {"unigram_loss": 3.2}})
    {'unigram': 3.2}
    """
    corpus = _dict(plan.get("corpus"))
    found = {name: _number(corpus.get(f"{name}_loss")) for name in ("unigram", "bigram")}
    return {name: loss for name, loss in found.items() if np.isfinite(loss)}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain else float("nan")


def _metric(name: str, lines: list[dict[str, Any]]) -> Series:
    # At step 0 nothing has been trained: there is no training loss yet, rather than a bad one.
    lines = [line for line in lines if name == "validation/loss" or line["step"] > 0]
    lines = [line for line in lines if name in line]
    steps = np.array([line["step"] for line in lines], int)
    return Series(name, steps, np.array([_number(line.get(name)) for line in lines]))


def _skipped(lines: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    counts = [(line["step"], _number(line.get("update/skipped"))) for line in lines]
    kept = [(step, int(count)) for step, count in counts if 0 <= count < 2**63]
    return np.array([s for s, _ in kept], int), np.array([c for _, c in kept], int)


def _state(run: RunFolder, lines: list[dict[str, Any]]) -> str:
    """A run that came to its end without a finite loss counts as diverged."""
    if run.state == "done" and lines and lines[-1]["step"] == run.value("steps"):
        last = _number(lines[-1].get("validation/loss"))
        return "done" if np.isfinite(last) else "diverged"
    return run.state
