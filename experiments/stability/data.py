"""A grid of placement, depth, learning rate and warm-up read back, and what it says. No JAX.

An outcome is one of three: a run that diverged, one that is stuck (its final loss is no better
than that of knowing how frequent tokens are, within ``STUCK`` nats), one that trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normjax.diagnostics import verdict
from normjax.diagnostics.log import read_diagnostics
from normjax.reporting import explanations, loading, palette, rank_correlation, statistics
from normjax.reporting.palette import Look
from normjax.reporting.results import DIVERGED, UNFINISHED, Results, RunResult
from normjax.reporting.statistics import Estimate
from normjax.runs.run_folder import run_folder

ARMS = PRE, POST, BARE, NO_RESIDUAL = "pre", "post", "none", "no-residual"
"""The arms that the answers speak of: placements of the table, and the first without residual."""
STUCK = 0.05
"""A final loss within so many nats of the unigram loss, or above it, counts as not trained."""
NEAR = 0.1
"""A learning rate works if the loss stays within so many nats of the best rate's."""
EARLY = 0.01
"""Diagnostics of this first part of the steps count as known beforehand."""
TRAINS, IS_STUCK, DIVERGES, OPEN = "trains", "stuck", "diverged", "unfinished"
SAMPLES = 400


class Place(NamedTuple):
    """What the grid varies besides rate and seed."""

    series: str
    depth: int
    warmup: int


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
      place: placement, depth and warm-up.
      rate: peak learning rate.
      seed: of the run.
      outcome: TRAINS, IS_STUCK, DIVERGES or OPEN.
      loss: final test loss; infinite where it diverged, None where it is not finished.
      choice: final validation loss, by which rates are chosen; likewise.
      start: validation loss at initialization.
      folder: of the run.
      others: its weight decay and initial scale.
      parts: its loss over stretches of the test text.
      verdict: on its diagnostics as it lies in the folder, empty without one.
    """

    place: Place
    rate: float
    seed: int
    outcome: str
    loss: float | None
    choice: float | None
    start: float | None
    folder: Path
    verdict: dict[str, Any] = field(default_factory=dict)
    others: tuple[float, float] = (0.0, 1.0)
    parts: tuple[float, ...] = ()

    @property
    def state(self) -> str:
        """In a word, what the verdict says; "" without one."""
        return str(self.verdict.get("state", ""))


@dataclass(frozen=True)
class MapCell:
    """All seeds of one place and rate, and of one weight decay and initial scale."""

    place: Place
    rate: float
    trials: tuple[Trial, ...]

    @property
    def _ended(self) -> list[Trial]:
        return [t for t in self.trials if t.loss is not None and math.isfinite(t.loss)]

    @property
    def loss(self) -> Estimate:
        """Mean final loss of the runs that did not diverge, with its interval."""
        return statistics.estimate(t.loss for t in self._ended if t.loss is not None)

    @property
    def standing(self) -> tuple[bool, tuple[float, float]]:
        """What the best cell is chosen by, less is better: unknown, then outcomes' order."""
        losses = [t.choice for t in self.trials if t.choice is not None]
        return bool(self.count(OPEN)), rank_correlation.standing(losses)

    def above(self, other: MapCell) -> Estimate:
        """Return what its losses lie above those of another cell, paired by seed and text."""
        sides = [{t.seed: t.loss for t in cell._ended if t.loss is not None}
                 for cell in (self, other)]  # fmt: skip
        parts = [{t.seed: t.parts for t in cell._ended} for cell in (self, other)]
        return statistics.paired(sides[0], sides[1], parts=(parts[0], parts[1]))

    def count(self, outcome: str) -> int:
        """Number of runs with an outcome."""
        return sum(t.outcome == outcome for t in self.trials)

    @property
    def trains(self) -> bool:
        """Whether every run of the cell trains."""
        return bool(self.trials) and self.count(TRAINS) == len(self.trials)


@dataclass(frozen=True)
class Stability:
    """The whole grid.

    Attributes:
      results: the workdir as the main report reads it.
      trials: every run.
    """

    results: Results
    trials: tuple[Trial, ...]

    @property
    def series(self) -> list[str]:
        """Placements in order."""
        return list(dict.fromkeys(t.place.series for t in self.trials))

    def values(self, name: str) -> list[int]:
        """Return the depths or warm-ups of the grid, ascending."""
        return sorted({getattr(t.place, name) for t in self.trials})

    @cached_property
    def rates(self) -> list[float]:
        """Learning rates, ascending."""
        return sorted({t.rate for t in self.trials})

    @property
    def places(self) -> list[Place]:
        """Every placement, depth and warm-up."""
        return list(dict.fromkeys(t.place for t in self.trials))

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Colour and marker by placement."""
        own = {k.split(",")[0]: v for k, v in explanations.colours(self.results).items()}
        return palette.looks(self.series, self.series[0], own)

    @cached_property
    def _runs(self) -> dict[tuple[Place, float], dict[tuple[float, float], list[Trial]]]:
        groups: dict[tuple[Place, float], dict[tuple[float, float], list[Trial]]] = {}
        for trial in self.trials:
            own = groups.setdefault((trial.place, trial.rate), {})
            own.setdefault(trial.others, []).append(trial)
        return groups

    def cell(self, place: Place, rate: float) -> MapCell:
        """Return the runs of one place and rate.

        Where several weight decays or initial scales were tried, those of the best are returned.
        """
        every = self._runs.get((place, rate), {}).values()
        cells = [MapCell(place, rate, tuple(trials)) for trials in every]
        return min(cells, key=lambda c: c.standing, default=MapCell(place, rate, ()))

    def cells(self, *places: Place) -> list[MapCell]:
        """Return the cells of places that have runs, by learning rate."""
        found = (self.cell(place, rate) for place in places for rate in self.rates)
        return [cell for cell in found if cell.trials]

    def best(self, place: Place) -> MapCell | None:
        """Return the best cell by validation loss among those none of whose runs diverged."""
        return self.best_of([place])

    def best_of(self, places: Sequence[Place]) -> MapCell | None:
        """Return the best cell of several places; None where every one has a diverged run."""
        whole = [
            c for c in self.cells(*places)
            if c.loss.mean is not None and not c.count(DIVERGES) and not c.count(OPEN)
        ]  # fmt: skip
        return min(whole, key=lambda c: c.standing, default=None)

    def sensitivities(self, place: Place) -> dict[int, float]:
        """Return the learning-rate sensitivity of a place by seed.

        E over learning rates of min(L(rate), L_0) - L*, with L_0 the loss at initialization, which
        a diverged run counts as, and L* the lowest loss over the rates, each within one seed
        (Wortsman et al. 2023, arXiv 2309.14322, section 2.2). The rates of the grid count alike.
        """
        own: dict[int, list[float]] = {}
        for trial in (t for cell in self.cells(place) for t in cell.trials):
            if trial.loss is not None and trial.start is not None:
                own.setdefault(trial.seed, []).append(min(trial.loss, trial.start))
        return {
            seed: math.fsum(losses) / len(losses) - min(losses)
            for seed, losses in own.items() if len(losses) == len(self.rates)
        }  # fmt: skip

    def sensitivity(self, place: Place) -> Estimate:
        """Return the mean of the sensitivities of a place over its seeds."""
        return statistics.estimate(self.sensitivities(place).values())

    def working_range(self, place: Place) -> float | None:
        """Return how many powers of ten of learning rate lie within NEAR of the best loss.

        None where not even the best rate trains: there, all rates are as good as none.
        """
        best = self.best(place)
        if best is None or best.loss.mean is None or best.count(IS_STUCK):
            return None
        near = [
            c.rate for c in self.cells(place)
            if not c.count(DIVERGES) and c.loss.mean is not None
            and c.loss.mean <= best.loss.mean + NEAR
        ]  # fmt: skip
        return math.log10(max(near) / min(near))


def read_stability(workdir: Path) -> Stability:
    """Read a workdir of the experiment.

    Raises:
      UserError: it holds no usable plan.
    """
    results = loading.load(workdir)
    usual = int(results.plan.get("config", {}).get("train", {}).get("warmup_steps", 0))
    arms = {arm.name: arm for arm in results.arms}
    unigram = results.reference("unigram")
    trials = []
    for run in results.runs:
        arm = arms[run.arm]
        changes = arm.changes
        place = Place(
            arm.series.split(",")[0],
            int(changes.get("model.depth", arm.x or 0)),
            int(changes.get("train.warmup_steps", usual)),
        )
        trials.append(_trial(results, run, place, unigram))
    return Stability(results, tuple(trials))


def _trial(results: Results, run: RunResult, place: Place, unigram: float | None) -> Trial:
    start = run.evaluations[0].get("validation/loss") if run.evaluations else None
    folder = run_folder(results.workdir, run.id)
    loss: float | None = run.final_loss
    if run.outcome == DIVERGED:
        outcome, loss = DIVERGES, math.inf
    elif run.outcome == UNFINISHED or loss is None:
        outcome, loss = OPEN, None
    else:
        outcome = IS_STUCK if unigram is not None and loss > unigram - STUCK else TRAINS
    said = verdict.read(folder)
    others = (run.rates.weight_decay, run.rates.init_scale)
    return Trial(
        place, run.rates.learning_rate, run.seed, outcome, loss, run.choice_loss, start, folder,
        said, others, run.parts,
    )  # fmt: skip


# --- what predicts the outcome ----------------------------------------------------------------


@dataclass(frozen=True)
class Predictor:
    """A number known early and how well it orders the outcomes.

    Attributes:
      name: the diagnostic and how its layers became one number.
      when: "at initialization" or "in the first 1 % of steps".
      value: Spearman's correlation with the final loss over all runs (diverged ones last).
      low, high: its 95 % bootstrap interval over the cells of the grid.
      within: the same within one learning rate, mean over the rates; None where undefined.
      runs: how many.
    """

    name: str
    when: str
    value: float
    low: float
    high: float
    within: float | None
    runs: int


REDUCTIONS: dict[str, Callable[[np.ndarray], float]] = {
    "largest": lambda x: float(np.max(x)),
    "smallest": lambda x: float(np.min(x)),
    "last over first layer": lambda x: float(np.mean(x[-1]) / np.mean(x[0])),
}


def predictors(stability: Stability) -> list[Predictor]:
    """Return every early diagnostic with its rank correlation, the strongest first.

    Diagnostics of each parameter and norm are taken together, by their largest and smallest value.
    """
    finished = [t for t in stability.trials if t.loss is not None]
    steps = {t.folder: t for t in finished}
    tables: dict[tuple[str, str], dict[Path, float]] = {}
    for folder in steps:
        for key, value in _early(folder, stability.results):
            tables.setdefault(key, {})[folder] = value
    found = []
    for (name, when), values in tables.items():
        own = [t for t in finished if t.folder in values]
        x = np.array([values[t.folder] for t in own])
        if len(own) < 8 or len(own) < 0.9 * len(finished) or np.all(x == x[0]):
            continue
        found.append(_predictor(name, when, own, x))
    for name, function in (
        ("learning rate", lambda t: t.rate), ("depth", lambda t: float(t.place.depth)),
        ("warm-up steps", lambda t: float(t.place.warmup)),
    ):  # fmt: skip
        x = np.array([function(t) for t in finished])
        if len(x) >= 8 and not np.all(x == x[0]):
            found.append(_predictor(name, "set by the grid", finished, x))
    return sorted(found, key=lambda p: -abs(p.value))


def _early(folder: Path, results: Results) -> Iterable[tuple[tuple[str, str], float]]:
    """Yield (name, when) and one number for every diagnostic sampled early enough."""
    total = int(results.plan.get("config", {}).get("train", {}).get("steps", 0))
    limit = max(1, int(EARLY * total))
    sampled = [(step, values) for step, values in read_diagnostics(folder) if step <= limit]
    for when, picked in (
        ("at initialization", [v for step, v in sampled if step == 0]),
        ("in the first 1 % of steps", [v for step, v in sampled if step > 0][-1:]),
    ):
        for values in picked:
            for name, array in _grouped(values).items():
                for reduction, function in REDUCTIONS.items():
                    layered = array.ndim > 0 and array.shape[0] > 1
                    if reduction == "last over first layer" and not layered:
                        continue
                    if reduction != "largest" and array.size == 1:
                        continue
                    with np.errstate(all="ignore"):
                        value = function(array)
                    label = name if array.size == 1 else f"{name}, {reduction}"
                    yield (label, when), value if math.isfinite(value) else math.inf


def _grouped(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join the diagnostics that come one per parameter or norm."""
    joined: dict[str, list[np.ndarray]] = {}
    for name, array in values.items():
        joined.setdefault(name.split("[")[0], []).append(np.asarray(array, float))
    return {
        name: parts[0] if len(parts) == 1 else np.concatenate([p.ravel() for p in parts])[None]
        for name, parts in joined.items()
    }


def _predictor(name: str, when: str, trials: Sequence[Trial], x: np.ndarray) -> Predictor:
    y = np.array([t.loss for t in trials], float)
    value = _spearman(x, y)
    keys = [(t.place, t.rate) for t in trials]
    groups = [np.flatnonzero([k == key for k in keys]) for key in dict.fromkeys(keys)]
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(SAMPLES):
        picked = np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))])
        drawn.append(_spearman(x[picked], y[picked]))
    drawn = [d for d in drawn if not math.isnan(d)]
    low, high = np.quantile(drawn, (0.025, 0.975)) if drawn else (-1.0, 1.0)
    inside = []
    for rate in dict.fromkeys(t.rate for t in trials):
        own = np.flatnonzero([t.rate == rate for t in trials])
        each = _spearman(x[own], y[own])
        if not math.isnan(each):
            inside.append(each)
    within = float(np.mean(inside)) if inside else None
    return Predictor(name, when, value, float(low), float(high), within, len(trials))


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    value = rank_correlation.spearman(x.tolist(), y.tolist())
    return math.nan if value is None else value
