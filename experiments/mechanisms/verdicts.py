"""The rule that turns final losses into a verdict: what a decoder computes, and what it learns.

For a task whose least expected loss is known, let O be that of the full information, F that of
the information which the variant has (its floor, F >= O), m the margin and x +- s the final loss of
a run with the standard error of its evaluation. A run is *within* the margin of L where

    x + z s <= L + m

so that chance in the evaluation sample is no help, and it is an alarm where x < F - a s: no
decoder of that kind has an expected loss below F, so the floor or the evaluation would be wrong.
The goal of a variant is O where F <= O + m, else F. Of n finished and diverged runs, k are within:

    k = n, goal O    computes it
    k = n, goal F    sits at its own floor: it cannot compute more
    0 < k < n        learns unreliably: it can, in k of n runs
    k = 0            not reached: above its floor with every seed and rate

A run that diverged is not within. A verdict is *close* where it would be another one with x - z s
in place of x + z s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from normjax.reporting import statistics
from normjax.reporting.results import DIVERGED, FINISHED
from normjax.reporting.statistics import Estimate

COMPUTES, AT_FLOOR, UNRELIABLE, FAILS = "computes", "at floor", "unreliable", "fails"
NO_FLOOR, NO_RUN = "no floor known", "no run"
VERDICTS = {
    COMPUTES: "every run comes within the margin of the full optimum",
    AT_FLOOR: "every run comes within the margin of the best that its information allows, which is"
    " above the full optimum: it cannot compute more",
    UNRELIABLE: "some seeds or rates come within the margin, others do not",
    FAILS: "every run stays above the floor by more than the margin",
    NO_FLOOR: "stays above the full optimum, and its own floor is not known",
    NO_RUN: "none has finished",
}
"""Every verdict, in words."""


@dataclass(frozen=True)
class Rule:
    """The numbers of the rule.

    Attributes:
        margin: m in nats per scored token.
        errors: z, standard errors that a run must be inside the margin.
        alarm: a, standard errors below the floor from which on something is wrong.
        rounding: nats that float32 sums may be off.
    """

    margin: float = 0.02
    errors: float = 2.0
    alarm: float = 4.0
    rounding: float = 1e-5


@dataclass(frozen=True)
class FinalLoss:
    """What one run came to.

    Attributes:
        run: its name.
        seed: its seed.
        rate: its peak learning rate.
        outcome: FINISHED, DIVERGED or UNFINISHED.
        loss: x, nats per scored token; None unless finished.
        error: s, the standard error of the loss; None where it has not been evaluated.
    """

    run: str
    seed: int
    rate: float
    outcome: str
    loss: float | None = None
    error: float | None = None

    @property
    def counts(self) -> bool:
        """Whether the rule can use the run: diverged, or finished with loss and error."""
        finished = self.outcome == FINISHED and self.loss is not None and self.error is not None
        return finished or self.outcome == DIVERGED

    def reach(self, errors: float) -> float:
        """Return x + errors s; infinite for a run that diverged."""
        if self.loss is None or self.error is None:
            return math.inf
        return self.loss + errors * self.error


@dataclass(frozen=True)
class OwnFloor:
    """The best that a variant can do on a task.

    Attributes:
        loss: F in nats per scored token, None where its exact value is not known.
        information: the level of information that it stands for.
        reached: whether decoders of the kind come as close to it as one likes; else only a bound.
        reason: why, in one sentence.
    """

    loss: float | None
    information: str
    reached: bool
    reason: str


@dataclass(frozen=True)
class TaskVerdict:
    """What the rule says of one variant on one task.

    Attributes:
        kind: a key of :data:`VERDICTS`.
        goal: the loss that runs had to come within the margin of, O or F.
        within: the runs that did.
        counted: the runs that the rule could use.
        close: whether the sampling error could make it another verdict.
        alarms: the runs whose loss is significantly below the floor.
    """

    kind: str
    goal: float
    within: tuple[FinalLoss, ...]
    counted: tuple[FinalLoss, ...]
    close: bool
    alarms: tuple[FinalLoss, ...]

    @property
    def k_of_n(self) -> str:
        """How many runs came within, such as "3 of 4"."""
        return f"{len(self.within)} of {len(self.counted)}"

    def by_rate(self) -> dict[float, tuple[int, int]]:
        """Return for each learning rate how many runs came within, and of how many."""
        inside = {outcome.run for outcome in self.within}
        rates = sorted({outcome.rate for outcome in self.counted})
        runs = {rate: [o for o in self.counted if o.rate == rate] for rate in rates}
        return {
            rate: (sum(o.run in inside for o in some), len(some)) for rate, some in runs.items()
        }


def judge(
    outcomes: Sequence[FinalLoss], optimum: float, floor: OwnFloor, rule: Rule
) -> TaskVerdict:
    """Return the verdict on the runs of one variant on one task.

    Args:
        outcomes: all planned runs; unfinished ones are passed over.
        optimum: O, the least expected loss with full information.
        floor: of the variant.
        rule: margin and standard errors.

    >>> runs = [FinalLoss("a", 0, 1e-3, FINISHED, 0.51, 0.002)]
    >>> judge(runs, 0.5, OwnFloor(0.5, "full", True, ""), Rule()).kind
    'computes'
    """
    counted = tuple(outcome for outcome in outcomes if outcome.counts)
    known = floor.loss is not None
    bound = optimum if floor.loss is None else floor.loss
    apart = bound > optimum + rule.margin
    goal = bound if apart else optimum
    inside = {
        errors: tuple(o for o in counted if o.reach(errors) <= goal + rule.margin)
        for errors in (rule.errors, -rule.errors)
    }
    kinds = {
        errors: _kind(len(within), len(counted), apart, known) for errors, within in inside.items()
    }
    alarms = tuple(o for o in counted if o.reach(rule.alarm) < bound - rule.rounding)
    return TaskVerdict(
        kinds[rule.errors], goal, inside[rule.errors], counted,
        len(set(kinds.values())) > 1, alarms,
    )  # fmt: skip


def _kind(within: int, counted: int, apart: bool, known: bool) -> str:
    if not counted:
        return NO_RUN
    if within == counted:
        return AT_FLOOR if apart else COMPUTES
    if within:
        return UNRELIABLE
    return FAILS if known else NO_FLOOR


@dataclass(frozen=True)
class TaskEvidence:
    """Final losses of the finished runs of a cell.

    Attributes:
        best: the lowest.
        median: the middle one, or the mean of the two middle ones.
        worst: the highest.
        rate: the learning rate with the lowest mean over seeds.
        at_rate: mean and interval over the seeds at that rate.
        error: the largest standard error of an evaluation.
        diverged: runs that diverged.
        unfinished: runs that the rule could not use.
    """

    best: float | None
    median: float | None
    worst: float | None
    rate: float | None
    at_rate: Estimate
    error: float | None
    diverged: int
    unfinished: int


def evidence(outcomes: Sequence[FinalLoss]) -> TaskEvidence:
    """Return what the verdict rests on.

    Rates are compared by the mean of their finished runs, after the number of those that diverged:
    a rate at which one seed diverges is not the best because the others do well.
    """
    losses = sorted(o.loss for o in outcomes if o.counts and o.loss is not None)
    by_rate: dict[float, list[FinalLoss]] = {}
    for outcome in outcomes:
        if outcome.counts:
            by_rate.setdefault(outcome.rate, []).append(outcome)
    ranked = []
    for rate, runs in by_rate.items():
        values = [o.loss for o in runs if o.loss is not None]
        if values:
            ranked.append((len(runs) - len(values), math.fsum(values) / len(values), rate, values))
    _, _, rate, values = min(ranked, default=(0, 0.0, None, []))
    n = len(losses)
    return TaskEvidence(
        best=losses[0] if losses else None,
        median=(losses[(n - 1) // 2] + losses[n // 2]) / 2 if losses else None,
        worst=losses[-1] if losses else None,
        rate=rate,
        at_rate=statistics.estimate(values),
        error=max((o.error for o in outcomes if o.counts and o.error is not None), default=None),
        diverged=sum(o.outcome == DIVERGED for o in outcomes),
        unfinished=sum(not o.counts for o in outcomes),
    )
