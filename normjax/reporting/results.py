"""A workdir read back: its plan, its runs and what each variant came to.

Nothing is dropped. A run that was planned but never started, was stopped or diverged is here with
that state. Outcomes have one order, which ranking, choice of rates and words share: a finished run
is as good as its loss, a diverged one worse than any loss, an unfinished one unknown. Only finished
runs enter a mean; a variant with diverged runs stands behind every one with fewer of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from normjax.reporting import rank_correlation, statistics
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
    """A planned configuration; ``series`` and ``x`` say on which line and where it is drawn.

    ``condition`` is under what circumstances it is compared with the others that have the same.
    """

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
    condition: str = ""


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
    def _last(self) -> dict[str, Any] | None:
        """The evaluation at the planned last step of a run that is done."""
        last = self.evaluations[-1] if self.evaluations else {}
        return last if self.state == "done" and last.get("step") == self.rates.steps else None

    @cached_property
    def final_loss(self) -> float | None:
        """Test loss (nats per token) at the planned last step of a finished run."""
        return finite((self._last or {}).get("test/loss"))

    @cached_property
    def parts(self) -> tuple[float, ...]:
        """The final loss over stretches of the test text; empty where they are not known."""
        given = (self._last or {}).get("test/blocks")
        found = [finite(x) for x in given] if isinstance(given, list) else []
        return tuple(x for x in found if x is not None) if None not in found else ()

    @cached_property
    def choice_loss(self) -> float | None:
        """Validation loss there, by which rates are chosen: infinity where it diverged."""
        if self.outcome == DIVERGED:
            return math.inf
        return finite((self._last or {}).get("validation/loss"))

    @cached_property
    def outcome(self) -> str:
        """FINISHED, DIVERGED or UNFINISHED.

        A run that reached its last step without a finite loss counts as diverged.
        """
        if self.final_loss is not None:
            return FINISHED
        ended = self.state == "diverged" or self._last is not None
        return DIVERGED if ended else UNFINISHED

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
        """Final test loss by seed, finished runs only."""
        return {run.seed: run.final_loss for run in self.runs if run.final_loss is not None}

    @cached_property
    def parts(self) -> dict[int, tuple[float, ...]]:
        """The same losses over stretches of the test text."""
        return {run.seed: run.parts for run in self.runs if run.final_loss is not None}

    @cached_property
    def standing(self) -> tuple[float, float] | None:
        """Its place in the order of outcomes, less is better; None where it is unknown.

        First the share of its runs that diverged, then the mean loss of the others.
        """
        return self._standing([run.final_loss for run in self.runs])

    @cached_property
    def choice(self) -> tuple[float, float, float]:
        """What its rates are chosen by, less is better: as its standing, on validation text."""
        found = self._standing([run.choice_loss for run in self.runs])
        return (1.0, 0.0, 0.0) if found is None else (0.0, *found)

    def _standing(self, losses: Iterable[float | None]) -> tuple[float, float] | None:
        if not self.runs or self.count(UNFINISHED):
            return None
        return rank_correlation.standing([math.inf if x is None else x for x in losses])

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
    def conditions(self) -> tuple[str, ...]:
        """The circumstances under which the series are compared, in plan order."""
        return tuple(dict.fromkeys(arm.condition for arm in self.arms))

    @cached_property
    def varied(self) -> tuple[str, ...]:
        """The rates that take several values for one arm."""
        every: dict[str, list[Rates]] = {}
        for run in self.runs:
            every.setdefault(run.arm, []).append(run.rates)
        return tuple(
            name for name in RATES
            if any(len({getattr(r, name) for r in own}) > 1 for own in every.values())
        )  # fmt: skip

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds of the plan, in order."""
        return tuple(sorted({run.seed for run in self.runs}))

    def reference(self, name: str) -> float | None:
        """Return ``unigram``, ``bigram``, ``uniform`` or ``optimum`` loss in nats per token.

        Those of counting are of the windows that final losses are measured on.

        Only a synthetic task has an optimum: the least loss that is possible.
        """
        return finite(self.plan.get("corpus", {}).get(f"{name}_loss"))

    def ranked(self) -> list[Variant]:
        """Return the variants from best to worst, by x where there is one.

        Those whose runs all diverged rank last; those without an outcome yet follow unranked.
        """

        conditions = {name: i for i, name in enumerate(self.conditions)}

        def place(v: Variant) -> tuple:
            unknown = (v.rank is None, v.loss.mean is None)
            return (*unknown, v.rank or 0, v.loss.mean or 0.0)

        def panel(v: Variant) -> tuple:
            return (conditions[v.arm.condition], v.arm.x is None, v.arm.x or 0.0)

        return sorted(self.variants, key=lambda v: (*panel(v), *place(v)))

    def base_of(self, variant: Variant) -> Variant | None:
        """Return the baseline that a variant is compared with: of its panel."""
        key = self.panel_key(variant)
        found = [v for v in self.variants if v.arm.series == self.baseline]
        return next((v for v in found if self.panel_key(v) == key), None)

    def gaps(self, variant: Variant) -> dict[int, float]:
        """Return by seed what a variant's losses lie above those of the baseline beside it."""
        base = self.base_of(variant) if variant.difference is not None else None
        return {} if base is None else statistics.differences(variant.losses, base.losses)

    def panels(self) -> dict[tuple[Any, ...], list[Variant]]:
        """Group the variants that are compared with one another: same condition, x, rates."""
        groups: dict[tuple[Any, ...], list[Variant]] = {}
        for variant in self.variants:
            groups.setdefault(self.panel_key(variant), []).append(variant)
        return groups

    def panel_key(self, variant: Variant) -> tuple[Any, ...]:
        """Return ``(condition, x, rates that vary...)`` of a variant."""
        rates = [getattr(variant.rates, name) if variant.rates else None for name in self.varied]
        return (variant.arm.condition, variant.arm.x, *rates)

    def panel_title(self, key: tuple[Any, ...]) -> str:
        """Return a panel's heading, such as ``depth 4, learning rate 0.001``; "" for only one."""
        names = [self.x["name"] if self.x else "", *(n.replace("_", " ") for n in self.varied)]
        condition, *rest = key
        told = [(n, v) for n, v in zip(names, rest, strict=True) if n and v is not None]
        return ", ".join([*filter(None, [condition]), *(f"{n} {value:g}" for n, value in told)])


def difference(variant: Variant, base: Variant | None) -> Estimate:
    """Return what a variant's losses lie above those of another, paired by seed and by text."""
    if base is None:
        return Estimate(0)
    return statistics.paired(variant.losses, base.losses, parts=(variant.parts, base.parts))


def finite(value: Any) -> float | None:
    """Return a finite float, or None for null, text, NaN and infinity.

    >>> finite(None) is finite(float("nan")) is None
    True
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
