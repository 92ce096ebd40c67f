"""A prediction laid beside what was measured: ranks, pairs, losses, and where it was most wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from normjax.predictions import record
from normjax.predictions.prediction import LOSSES, SERIES, Expected, Prediction
from normjax.reporting import rank_correlation, statistics
from normjax.reporting.rank_correlation import Correlation
from normjax.reporting.results import DIVERGED, Results, Variant
from normjax.reporting.statistics import Estimate
from normjax.reporting.wording import representatives


@dataclass(frozen=True)
class Item:
    """One variant or series that was predicted and measured.

    Attributes:
      entry: what was expected of it.
      series: whose colour it has.
      losses: final loss by seed; of a series the mean over its variants.
      diverged: whether all its runs diverged (of a series: all those of one of its variants).
      lost: how many of its runs diverged.
      parameters: mean number over its variants; None where unknown.
    """

    entry: Expected
    series: str
    losses: dict[int, float]
    diverged: bool
    lost: int
    parameters: float | None

    @property
    def name(self) -> str:
        """The name by which it was predicted."""
        return self.entry.name

    @property
    def measured(self) -> Estimate:
        """Mean final loss over seeds with its interval; empty where it diverged."""
        return Estimate(0) if self.diverged else statistics.estimate(self.losses.values())

    @property
    def value(self) -> float:
        """Mean final loss in nats per token; infinite where it diverged, which ranks it last."""
        mean = self.measured.mean
        return math.inf if mean is None else mean

    @property
    def error(self) -> float | None:
        """Expected less measured loss; None in a ranking or where it diverged."""
        mean = self.measured.mean
        return None if mean is None or self.entry.loss is None else self.entry.loss - mean

    @property
    def covered(self) -> bool | None:
        """Whether the expected interval holds the measured mean; None without an interval.

        A diverged variant has no loss, so the statement about its loss was wrong.
        """
        low, high = self.entry.low, self.entry.high
        return None if low is None or high is None else low <= self.value <= high


class Pairs(NamedTuple):
    """Pairs whose order the data can tell, by what was said of them; ``wrong`` names them.

    The first name of a wrong pair was expected to be better and is worse.
    """

    decided: int
    right: int
    equal: int
    wrong: tuple[tuple[str, str], ...]


class LossScore(NamedTuple):
    """How far the expected losses are from the measured ones.

    ``absolute`` and ``signed`` are the means of ``|expected - measured|`` and of ``expected -
    measured`` in nats per token over ``n`` variants; of the stated intervals some are covered.
    """

    n: int
    absolute: float | None
    signed: float | None
    intervals: int
    covered: int


@dataclass(frozen=True)
class Score:
    """A prediction scored; ``predicted`` and ``measured`` are ranks, 1 the lowest loss."""

    items: tuple[Item, ...]
    predicted: tuple[float, ...]
    measured: tuple[float, ...]
    spearman: Correlation
    kendall: Correlation
    by_size: Correlation
    pairs: Pairs
    losses: LossScore | None
    worst: int | None


@dataclass(frozen=True)
class Judged:
    """A workdir's prediction for its report.

    Attributes:
      stored: the record; its ``problem`` says why nothing is scored.
      score: None where there is a problem, or less than two were measured.
      open: names that were predicted and have no outcome (yet).
      missing: names that were measured and not predicted.
    """

    stored: record.Stored
    score: Score | None = None
    open: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def judge(results: Results) -> Judged | None:
    """Return a workdir's prediction with its score; None where there never was one."""
    stored = record.read_stored(results.workdir, results.plan)
    if stored is None:
        return None
    prediction = stored.prediction
    if stored.problem or prediction is None:
        return Judged(stored)
    found = {entry.name: _item(results, entry, prediction) for entry in prediction.entries}
    items = [item for item in found.values() if item is not None]
    there = results.series if prediction.subject == SERIES else [c.name for c in results.arms]
    enough = len(items) >= (1 if prediction.kind == LOSSES else 2)
    return Judged(
        stored, score(items, prediction.kind) if enough else None,
        tuple(name for name, item in found.items() if item is None),
        tuple(name for name in there if name not in found),
    )  # fmt: skip


def score(items: Sequence[Item], kind: str) -> Score:
    """Score what was expected of items against what they came to.

    The prediction's places are taken among these items alone.
    """
    expected = [float(item.entry.place) for item in items]
    predicted, measured = _places(items)
    return Score(
        tuple(items), tuple(predicted), tuple(measured),
        _correlation(rank_correlation.spearman, expected, items),
        _correlation(rank_correlation.kendall, expected, items),
        by_size(items), pairs(items), losses(items) if kind == LOSSES else None, worst(items, kind),
    )  # fmt: skip


def _places(items: Sequence[Item]) -> tuple[list[float], list[float]]:
    """Return the predicted and the measured ranks."""
    expected = [float(item.entry.place) for item in items]
    return rank_correlation.ranks(expected), rank_correlation.ranks([i.value for i in items])


def by_size(items: Sequence[Item]) -> Correlation:
    """Return Spearman's correlation of "more parameters, lower loss" with what was measured."""
    if any(item.parameters is None for item in items):
        return Correlation(None)
    order = [-(item.parameters or 0.0) for item in items]
    return _correlation(rank_correlation.spearman, order, items)


def pairs(items: Sequence[Item]) -> Pairs:
    """Go through the pairs that the data can tell apart.

    Those are: the 95 % interval of the difference paired by seed excludes 0, or one of them
    diverged and the other did not. Intervals are not widened for the number of pairs.
    """
    said, wrong = [], []
    for a, b in itertools.combinations(sorted(items, key=lambda item: item.value), 2):
        gap = statistics.paired(b.losses, a.losses)
        if a.diverged != b.diverged or not a.diverged and gap.excludes_zero:
            better, worse = (a, b) if a.diverged != b.diverged or (gap.mean or 0) > 0 else (b, a)
            said.append(worse.entry.place - better.entry.place)
            wrong += [(worse.name, better.name)] if said[-1] < 0 else []
    return Pairs(len(said), sum(x > 0 for x in said), said.count(0), tuple(wrong))


def losses(items: Sequence[Item]) -> LossScore:
    """Compare expected losses with measured ones; diverged variants enter no mean."""
    errors = [item.error for item in items if item.error is not None]
    covered = [item.covered for item in items if item.covered is not None]
    n = len(errors)
    means = [math.fsum(each) / n if n else None for each in (map(abs, errors), errors)]
    return LossScore(n, means[0], means[1], len(covered), sum(covered))


def worst(items: Sequence[Item], kind: str) -> int | None:
    """Return the index of the item furthest from its prediction; None where none is off.

    By loss where losses were stated (a diverged variant is beyond any), else by rank.
    """
    if kind == LOSSES:
        off = [math.inf if item.error is None else abs(item.error) for item in items]
    else:
        off = [abs(p - m) for p, m in zip(*_places(items), strict=True)]
    most = max(off, default=0.0)
    return off.index(most) if most else None


def _correlation(
    statistic: rank_correlation.Statistic, order: Sequence[float], items: Sequence[Item]
) -> Correlation:
    found = rank_correlation.correlate(statistic, order, [item.value for item in items])
    own = [{} if item.diverged else item.losses for item in items]
    ends = None if found.value is None else rank_correlation.bootstrap(statistic, order, own)
    low, high = ends or (None, None)
    return Correlation(found.value, found.p, found.exact, low, high)


def _item(results: Results, entry: Expected, prediction: Prediction) -> Item | None:
    """Return an entry with its outcome; None where it was not run or has not finished."""
    best = representatives(results)
    series = prediction.subject == SERIES
    own = [v for v in best if entry.name == (v.arm.series if series else v.arm.name)]
    if not own:
        return None
    diverged, by_seed = any(v.all_diverged for v in own), _mean_losses(own)
    if not diverged and (not by_seed or any(v.loss.mean is None for v in own)):
        return None
    counts = [v.arm.parameters for v in own if v.arm.parameters is not None]
    parameters = math.fsum(counts) / len(counts) if len(counts) == len(own) else None
    lost = sum(v.count(DIVERGED) for v in own)
    return Item(entry, own[0].arm.series, by_seed, diverged, lost, parameters)


def _mean_losses(variants: Sequence[Variant]) -> dict[int, float]:
    """Return the mean over variants by seed, for the seeds that all of them have."""
    common = sorted(set.intersection(*(set(v.losses) for v in variants)))
    return {s: math.fsum(v.losses[s] for v in variants) / len(variants) for s in common}
