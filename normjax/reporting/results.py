"""A workdir read back: its plan, its runs and what each variant came to.

Nothing is dropped. A run that was planned but never started, was stopped or diverged is here with
that state; only finished runs enter a mean, and diverged ones are counted beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from normjax.reporting import statistics
from normjax.reporting.statistics import Estimate

FINISHED, DIVERGED, UNFINISHED = "finished", "diverged", "unfinished"
RATES = ("learning_rate", "weight_decay", "init_scale")


class Rates(NamedTuple):
    """What the runs of one variant share besides their arm."""

    learning_rate: float
    weight_decay: float
    init_scale: float
    steps: int


@dataclass(frozen=True)
class PlannedArm:
    """A planned configuration; ``series`` and ``x`` say on which line and where it is drawn."""

    name: str
    series: str
    x: float | None
    title: str
    description: str
    changes: dict[str, Any]
    parameters: int | None
    flops_per_token: float | None
    rows: dict[str, Any] = field(default_factory=dict)
    colour: str = ""


@dataclass(frozen=True)
class RunResult:
    """A planned run with what its folder holds; ``state`` is "missing" without a folder.

    ``segments`` say from which step on which configuration and environment made its numbers,
    ``problems`` what in its folder is not what was sealed.
    """

    id: str
    arm: str
    seed: int
    rates: Rates
    state: str
    step: int
    diverged_at: int | None
    reason: str | None
    evaluations: tuple[dict[str, Any], ...]
    time: dict[str, float]
    segments: tuple[dict[str, Any], ...] = ()
    problems: tuple[str, ...] = ()

    @cached_property
    def final_loss(self) -> float | None:
        """Validation loss (nats per token) at the planned last step of a finished run."""
        last = self.evaluations[-1] if self.evaluations else {}
        if self.state != "done" or last.get("step") != self.rates.steps:
            return None
        return finite(last.get("validation/loss"))

    @cached_property
    def outcome(self) -> str:
        """FINISHED, DIVERGED or UNFINISHED.

        A run that reached its last step without a finite loss counts as diverged.
        """
        if self.final_loss is not None:
            return FINISHED
        last = self.evaluations[-1] if self.evaluations else {}
        at_end = self.state == "done" and last.get("step") == self.rates.steps
        return DIVERGED if self.state == "diverged" or at_end else UNFINISHED

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps at which a metric is finite, and its values there."""
        points = [(line["step"], finite(line.get(key))) for line in self.evaluations]
        kept = [(step, value) for step, value in points if value is not None]
        return [step for step, _ in kept], [value for _, value in kept]


@dataclass(frozen=True)
class Variant:
    """An arm at one combination of rates: the runs that differ in their seed only.

    ``loss`` is over finished runs; ``difference`` to the baseline of the same x and rates is
    paired by seed (None for the baseline itself and where there is no such baseline).
    """

    arm: PlannedArm
    rates: Rates | None
    runs: tuple[RunResult, ...]
    loss: Estimate
    difference: Estimate | None = None
    rank: int | None = None
    label: str = ""

    @cached_property
    def losses(self) -> dict[int, float]:
        """Final validation loss by seed, finished runs only."""
        return {run.seed: run.final_loss for run in self.runs if run.final_loss is not None}

    def count(self, outcome: str) -> int:
        """Return the number of runs with an outcome."""
        return sum(run.outcome == outcome for run in self.runs)

    @property
    def all_diverged(self) -> bool:
        """Whether there are runs and every one of them diverged."""
        return bool(self.runs) and self.count(DIVERGED) == len(self.runs)


@dataclass(frozen=True)
class Results:
    """The plan (grid.json), its arms and its variants in plan order."""

    workdir: Path
    plan: dict[str, Any]
    arms: tuple[PlannedArm, ...]
    runs: tuple[RunResult, ...]
    variants: tuple[Variant, ...] = field(default=())

    @property
    def baseline(self) -> str:
        """Name of the series that differences refer to."""
        return str(self.plan.get("baseline", ""))

    @property
    def series(self) -> tuple[str, ...]:
        """Series names in plan order, once each."""
        return tuple(dict.fromkeys(arm.series for arm in self.arms))

    @property
    def x(self) -> dict[str, Any] | None:
        """The axis of an experiment that draws loss against something, or None."""
        return self.plan.get("x") or None

    @property
    def unit(self) -> str:
        """What a token is, in a word: character, byte or token."""
        kind = self.plan.get("corpus", {}).get("vocabulary", "")
        return {"char": "character", "byte": "byte"}.get(kind, "token")

    @property
    def varied(self) -> tuple[str, ...]:
        """The rates that take several values in this grid."""
        every = [run.rates for run in self.runs]
        return tuple(name for name in RATES if len({getattr(r, name) for r in every}) > 1)

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds of the plan, in order."""
        return tuple(sorted({run.seed for run in self.runs}))

    def reference(self, name: str) -> float | None:
        """Return the corpus' ``unigram``, ``uniform`` or ``optimum`` loss in nats per token.

        Only a synthetic task has an optimum: the least loss that is possible.
        """
        return finite(self.plan.get("corpus", {}).get(f"{name}_loss"))

    def ranked(self) -> list[Variant]:
        """Return the variants from best to worst, by x where there is one.

        Those whose runs all diverged rank last; those without an outcome yet follow unranked.
        """

        def place(v: Variant) -> tuple:
            return (v.arm.x or 0.0, v.loss.mean is None, v.rank is None, v.loss.mean or 0.0)

        return sorted(self.variants, key=lambda v: (v.arm.x is None, *place(v)))

    def gaps(self, variant: Variant) -> dict[int, float]:
        """Return by seed what a variant's losses lie above those of the baseline beside it."""
        place = (variant.arm.x, variant.rates)
        for base in self.variants if variant.difference is not None else ():
            if base.arm.series == self.baseline and (base.arm.x, base.rates) == place:
                return statistics.differences(variant.losses, base.losses)
        return {}

    def panels(self) -> dict[tuple[Any, ...], list[Variant]]:
        """Group the variants that are compared with one another: same x, same rates."""
        groups: dict[tuple[Any, ...], list[Variant]] = {}
        for variant in self.variants:
            groups.setdefault(self.panel_key(variant), []).append(variant)
        return groups

    def panel_key(self, variant: Variant) -> tuple[Any, ...]:
        """Return ``(x, rates that vary...)`` of a variant."""
        rates = [getattr(variant.rates, name) if variant.rates else None for name in self.varied]
        return (variant.arm.x, *rates)

    def panel_title(self, key: tuple[Any, ...]) -> str:
        """Return a panel's heading, such as ``depth 4, learning rate 0.001``; "" for only one."""
        names = [self.x["name"] if self.x else "", *(n.replace("_", " ") for n in self.varied)]
        told = [(n, v) for n, v in zip(names, key, strict=True) if n and v is not None]
        return ", ".join(f"{name} {value:g}" for name, value in told)


def finite(value: Any) -> float | None:
    """Return a finite float, or None for null, text, NaN and infinity.

    >>> finite(None) is finite(float("nan")) is None
    True
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
