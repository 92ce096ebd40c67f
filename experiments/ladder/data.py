"""The ladder read back: losses of all looks, and what each placement costs and does. No JAX."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from experiments.ladder import sequential
from experiments.spectrum.data import TEN, SurveyPoint, read_survey
from experiments.stability.data import TRAINS, Place, Stability, Trial
from normjax.diagnostics.log import read_extremes
from normjax.errors import UserError
from normjax.reporting import loading
from normjax.reporting.effects import Effect
from normjax.reporting.results import Results, RunResult, Variant, difference, finite
from normjax.reporting.statistics import Estimate
from normjax.runs import files
from normjax.runs.run_folder import TUNING, RunFolder, run_folder

RECORD = "ladder.json"


def folder_of(workdir: Path, seeds: int) -> Path:
    """Return the workdir of the runs that a look adds, a grid with a report of its own."""
    return workdir / f"look-{seeds}"


@dataclasses.dataclass(frozen=True)
class Passed:
    """How a stack passes small changes on, over tokens and seeds.

    Attributes:
      mean_log10: mean of log10 of its singular values, without the directions that norms forget.
      rms: root mean square of all of them.
    """

    mean_log10: float
    rms: float


@dataclasses.dataclass(frozen=True)
class Rung:
    """One placement at one depth, and all that the table says of it.

    Attributes:
      variant: its runs and losses.
      effect: against the baseline at its depth, with the p-value of the page; None for itself.
      rates: tried, ascending; empty where all take the same.
      sensitivity: to the learning rate, over the seeds of tuning.
      seconds: of wall time for a step of one run among those that train together, the fastest.
      itemsize: bytes of a parameter.
      before, after: of the stack at initialization and at the end of training; None: not measured.
      growth: of the residual stream from the first sub-layer to the last, the largest of a step.
      entropy: of attention, the smallest of a head and step, as a share of the largest possible.
      front: whether no other rung has both a lower mean loss and lower cost.
    """

    variant: Variant
    effect: Effect | None = None
    rates: tuple[float, ...] = ()
    sensitivity: Estimate = Estimate(0)
    seconds: float | None = None
    itemsize: int = 4
    before: Passed | None = None
    after: Passed | None = None
    growth: float | None = None
    entropy: float | None = None
    front: bool = False

    @property
    def depth(self) -> int:
        """In blocks."""
        return int(self.variant.arm.x or 0)

    @property
    def rate(self) -> float | None:
        """The learning rate that was chosen for it."""
        return None if self.variant.rates is None else self.variant.rates.learning_rate

    @property
    def at_edge(self) -> bool:
        """Whether a rate beyond those that were tried may be better still."""
        return len(self.rates) > 1 and self.rate in (self.rates[0], self.rates[-1])

    @property
    def multiply_adds(self) -> float | None:
        """Of the matrix products, for one training token, backward pass included."""
        flops = self.variant.arm.flops_per_token
        return None if flops is None else flops / 2

    @property
    def parameter_bytes(self) -> int | None:
        """Of all parameters."""
        count = self.variant.arm.parameters
        return None if count is None else count * self.itemsize


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The workdir of the experiment.

    Attributes:
      record: what ``ladder.json`` says was asked.
      results: arms of the first look, with the runs of all looks.
      folders: of the runs, by id.
    """

    record: Mapping[str, Any]
    results: Results
    folders: Mapping[str, Path]

    @property
    def looks(self) -> tuple[int, ...]:
        """Numbers of seeds, rising."""
        return tuple(self.record["looks"])

    @property
    def compared(self) -> list[Variant]:
        """The variants that have a baseline beside them and are not it."""
        r = self.results
        return [v for v in r.variants if v.arm.series != r.baseline and r.base_of(v) is not None]

    def effects(self, adjusted: Mapping[str, float | None]) -> dict[str, Effect]:
        """Return by arm what it costs against the baseline, with p-values that are given."""
        found = {}
        for variant in self.compared:
            name, base = variant.arm.name, self.results.base_of(variant)
            if base is not None:
                gap = difference(variant, base)
                found[name] = Effect(variant, base, gap, adjusted.get(name))
        return found

    @property
    def _gaps(self) -> dict[str, Estimate]:
        return {name: effect.gap for name, effect in self.effects({}).items()}

    def at_a_look(self) -> dict[str, Effect]:
        """Return the effects as a look judges them."""
        gaps, looks = self._gaps, len(self.looks)
        return self.effects({
            name: sequential.at_a_look(gap, looks, len(gaps)) for name, gap in gaps.items()
        })  # fmt: skip

    @cached_property
    def rungs(self) -> tuple[Rung, ...]:
        """Every placement at every depth, by depth and then from best to worst."""
        effects = self.effects(sequential.at_the_end(self._gaps, len(self.looks)))
        rates = tuple(sorted((self.results.plan.get("tuning") or {}).get("rates", ())))
        tuned, spectra = self._tuned, self._spectra
        found = [
            Rung(
                v, effects.get(v.arm.name), rates, tuned.sensitivity(Place(v.arm.name, 0, 0)),
                self._seconds(v), int(self.record["itemsize"]),
                passed(spectra.get((v.arm.name, False), ())),
                passed(spectra.get((v.arm.name, True), ())),
                self._signal(v, "residual/depth_ratio", "high"),
                self._signal(v, "attention/collision_share", "low"),
            )
            for v in self.results.ranked()
        ]  # fmt: skip
        best = front([(rung.variant.loss.mean, rung.multiply_adds, rung.seconds) for rung in found])
        return tuple(
            dataclasses.replace(rung, front=on) for rung, on in zip(found, best, strict=True)
        )

    def _seconds(self, variant: Variant) -> float | None:
        config = self.results.plan.get("config", {})
        train, window = config.get("train", {}), config.get("data", {}).get("window")
        batch = train.get("batch_size")
        look_of = {run.id: bisect.bisect_right(self.looks, run.seed) for run in variant.runs}
        together = Counter(look_of.values())
        speeds = [
            speed * together[look_of[run.id]] for run in variant.runs for line in run.evaluations
            if (speed := finite(line.get("time/tokens_per_s")))
        ]  # fmt: skip
        return batch * window / max(speeds) if speeds and batch and window else None

    def _signal(self, variant: Variant, name: str, end: str) -> float | None:
        found = [
            extremes[name][end]
            for run in variant.runs if run.id in self.folders
            for extremes in [read_extremes(RunFolder(self.folders[run.id], run.id))[0]]
            if end in extremes.get(name, {})
        ]  # fmt: skip
        every = np.concatenate([np.ravel(each) for each in found]) if found else np.empty(0)
        known = every[~np.isnan(every)]
        return float({"high": np.max, "low": np.min}[end](known)) if known.size else None

    @property
    def _tuned(self) -> Stability:
        """The runs that chose the rates, as far as all of them went: to the first rung."""
        rungs = (self.results.plan.get("tuning") or {}).get("rungs") or [0]
        folder = folder_of(Path(self.results.workdir).parent, self.looks[0]) / TUNING
        trials = [_trial(folder, each, min(rungs)) for each in self.record["tuning_runs"]]
        return Stability(self.results, tuple(trials))

    @property
    def _spectra(self) -> dict[tuple[str, bool], list[SurveyPoint]]:
        try:
            points = read_survey(Path(self.results.workdir).parent).points
        except UserError:  # before they are measured
            return {}
        found: dict[tuple[str, bool], list[SurveyPoint]] = {}
        for point in points:
            if point.measured:
                found.setdefault((point.series, point.step > 0), []).append(point)
        return found


def _trial(folder: Path, run_id: str, rung: int) -> Trial:
    """Return a tuning run as the stability map has runs: its arm stands for the place."""
    run = RunFolder(run_folder(folder, run_id), run_id)
    record, lines = run.record or {}, {line["step"]: line for line in run.metrics()}
    hyper = record.get("hyper") or {}
    start = finite(lines.get(0, {}).get("validation/loss"))
    loss = finite(lines.get(rung, {}).get("validation/loss"))
    ended = math.inf if loss is None and run.state == "diverged" else loss
    return Trial(
        Place(str(record.get("arm")), 0, 0), float(hyper.get("learning_rate", 0)),
        int(hyper.get("seed", 0)), TRAINS, ended, ended, start, run.path,
    )  # fmt: skip


def passed(points: Sequence[SurveyPoint]) -> Passed | None:
    """Return what the stacks of some points pass on; None without any."""
    if not points:
        return None
    inner = np.concatenate([np.ravel(point.arrays["log_deflated"]) for point in points])
    every = np.concatenate([np.ravel(point.arrays["log_raw"]) for point in points])
    with np.errstate(over="ignore"):
        rms = math.sqrt(float(np.mean(np.exp(2 * every))))
    return Passed(float(np.mean(inner)) / TEN, rms)


def front(costs: Sequence[tuple[float | None, ...]]) -> list[bool]:
    """Return which rows no other one beats: as low in every number and lower in one.

    The first number is the loss; a row that lacks it or another is not on the front.

    >>> front([(2.0, 5.0), (3.0, 1.0), (3.0, 6.0), (None, 1.0)])
    [True, True, False, False]
    """
    whole = [row for row in costs if None not in row]

    def beaten(row: tuple[Any, ...]) -> bool:
        return any(
            other != row and all(a <= b for a, b in zip(other, row, strict=True)) for other in whole
        )

    return [None not in row and not beaten(row) for row in costs]


def read(workdir: Path) -> Ladder:
    """Read a workdir of the experiment.

    Raises:
      UserError: it holds no usable record or no first look.
    """
    workdir = Path(workdir)
    record = files.read_sealed(workdir / RECORD)
    if record is None:
        raise UserError(
            f"workdir={workdir}: holds no {RECORD}; run python launch.py --experiment=ladder"
        )
    first, *later = (loading.load(folder_of(workdir, seeds)) for seeds in record["reached"])
    return joined(record, first, later)


def joined(record: Mapping[str, Any], first: Results, later: Iterable[Results]) -> Ladder:
    """Return the ladder of a first look, which has every arm, and of what later ones added."""
    every = [first, *later]
    runs: tuple[RunResult, ...] = tuple(run for look in every for run in look.runs)
    folders = {run.id: run_folder(look.workdir, run.id) for look in every for run in look.runs}
    whole = dataclasses.replace(first, runs=runs)
    names, seeds = {arm.name for arm in first.arms}, {run.seed for run in runs}
    return Ladder(record, loading.part(whole, names, seeds), folders)
