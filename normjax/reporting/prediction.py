"""A prediction laid beside what was measured: ranks, pairs, losses, and where it was most wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from normjax.predictions import record
from normjax.predictions.prediction import LEVEL, LOSSES, SERIES, Expected, Prediction
from normjax.reporting import effects, interval_score, loading, rank_correlation, statistics
from normjax.reporting.rank_correlation import Correlation
from normjax.reporting.results import FINISHED, Results, Variant
from normjax.reporting.statistics import Estimate
from normjax.reporting.wording import representatives


@dataclass(frozen=True)
class Item:
    """One variant or series that was predicted and measured.

    Attributes:
      entry: what was expected of it.
      series: whose colour it has.
      losses: final loss by seed, infinite where the run diverged; of a series the mean over its
        variants, infinite where one of them diverged.
      parameters: mean number over its variants; None where unknown.
    """

    entry: Expected
    series: str
    losses: dict[int, float]
    parameters: float | None

    @property
    def name(self) -> str:
        """The name by which it was predicted."""
        return self.entry.name

    @property
    def finished(self) -> dict[int, float]:
        """Final loss by seed, of the seeds of which all runs finished."""
        return {seed: loss for seed, loss in self.losses.items() if math.isfinite(loss)}

    @property
    def lost(self) -> int:
        """For how many seeds a run diverged."""
        return len(self.losses) - len(self.finished)

    @property
    def diverged(self) -> bool:
        """Whether none finished."""
        return not self.finished

    @property
    def standing(self) -> tuple[float, float]:
        """Its place in the order of outcomes; a diverged run is worse than any loss."""
        return rank_correlation.standing(list(self.losses.values()))

    @property
    def measured(self) -> Estimate:
        """Mean final loss over the seeds that finished, with its interval; to be shown."""
        return statistics.estimate(self.finished.values())

    @property
    def loss(self) -> float | None:
        """Mean final loss in nats per token, to score by; None where a run diverged.

        The mean of those that finished is not the loss of the variant.
        """
        return None if self.lost else self.measured.mean

    @property
    def error(self) -> float | None:
        """Expected less measured loss; None in a ranking or where a run diverged."""
        expected, loss = self.entry.loss, self.loss
        return None if expected is None or loss is None else expected - loss

    @property
    def covered(self) -> bool | None:
        """Whether the expected interval holds the measured mean; None without an interval.

        Where a run diverged there is no such loss, so the statement about it was wrong.
        """
        low, high, loss = self.entry.low, self.entry.high, self.loss
        return None if low is None or high is None else loss is not None and low <= loss <= high


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
    ``interval`` is the mean score of the ``scored`` ones whose variant has a loss, ``reference``
    that of the baseline for the same; ``ceiling`` is set where that took 0 to the unigram loss.
    """

    n: int
    absolute: float | None
    signed: float | None
    intervals: int
    covered: int
    scored: int = 0
    interval: float | None = None
    reference: float | None = None
    ceiling: float | None = None

    @property
    def skill(self) -> float | None:
        """1 - S / S_ref: 1 is perfect, 0 no better than the baseline; None without one."""
        if self.interval is None or not self.reference:
            return None
        return 1 - self.interval / self.reference


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
class Growth:
    """How what ran differs from what was planned when a prediction was stored.

    Attributes:
      added: variants that were not planned.
      dropped: planned variants that the grid has no more.
      seeds: how many it has.
      planned: how many were planned.
      score: over all that ran; None where nothing came on top.
    """

    added: tuple[str, ...]
    dropped: tuple[str, ...]
    seeds: int
    planned: int
    score: Score | None


@dataclass(frozen=True)
class Judged:
    """A workdir's prediction for its report.

    Attributes:
      stored: the record; its ``problem`` says why nothing is scored.
      score: over what was planned when it was stored; None where there is a problem, or less than
        two were measured.
      open: names that were predicted and have no outcome (yet).
      missing: names that were measured and not predicted.
      growth: how what ran differs from what was planned; None where it does not.
    """

    stored: record.Stored
    score: Score | None = None
    open: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    growth: Growth | None = None


def judge(results: Results) -> Judged | None:
    """Return a workdir's prediction with its score; None where there never was one."""
    stored = record.read_stored(results.workdir, results.plan)
    if stored is None:
        return None
    prediction = stored.prediction
    if stored.problem or prediction is None:
        return Judged(stored)
    named = {entry.name for entry in prediction.entries}
    there = list(results.series if prediction.subject == SERIES else [c.name for c in results.arms])
    first = record.first_seed(stored.record["seal"])
    planned = stored.planned
    part = loading.part(results, planned.arms, range(first, first + planned.seeds))
    measured = {i.name for each in (results, part) for i in _items(each, prediction)}
    arms = [arm.name for arm in results.arms]
    added = tuple(name for name in arms if name not in planned.arms)
    dropped = tuple(name for name in planned.arms if name not in arms)
    growth = None
    if added or dropped or len(results.seeds) != planned.seeds:
        more = added or len(results.seeds) > planned.seeds
        whole = _score(results, prediction) if more else None
        growth = Growth(added, dropped, len(results.seeds), planned.seeds, whole)
    return Judged(
        stored, _score(part, prediction),
        tuple(entry.name for entry in prediction.entries if entry.name not in measured),
        tuple(name for name in there if name not in named), growth,
    )  # fmt: skip


def _score(results: Results, prediction: Prediction) -> Score | None:
    """Return the score over results; None where too little was measured."""
    items = _items(results, prediction)
    if len(items) < (1 if prediction.kind == LOSSES else 2):
        return None
    by_series = prediction.subject == SERIES
    names = results.series if by_series else [arm.name for arm in results.arms]
    every = [_item(results, Expected(name, 0), prediction) for name in names]
    means = {i.name: i.loss for i in every if i is not None and i.loss is not None}
    return score(items, prediction.kind, prediction.level, means, results.reference("unigram"))


def _items(results: Results, prediction: Prediction) -> list[Item]:
    found = [_item(results, entry, prediction) for entry in prediction.entries]
    return [item for item in found if item is not None]


def score(
    items: Sequence[Item], kind: str, level: int = LEVEL, means: Mapping[str, float] | None = None,
    unigram: float | None = None,
) -> Score:  # fmt: skip
    """Score what was expected of items against what they came to.

    The prediction's places are taken among these items alone; the rest is as in :func:`losses`.
    """
    expected = [float(item.entry.place) for item in items]
    predicted, measured = _places(items)
    return Score(
        tuple(items), tuple(predicted), tuple(measured),
        _correlation(rank_correlation.spearman, expected, items),
        _correlation(rank_correlation.kendall, expected, items),
        by_size(items), pairs(items),
        losses(items, level, means, unigram) if kind == LOSSES else None, worst(items, kind),
    )  # fmt: skip


def _places(items: Sequence[Item]) -> tuple[list[float], list[float]]:
    """Return the predicted and the measured ranks."""
    expected = [float(item.entry.place) for item in items]
    measured = rank_correlation.order([item.standing for item in items])
    return rank_correlation.ranks(expected), rank_correlation.ranks(measured)


def by_size(items: Sequence[Item]) -> Correlation:
    """Return Spearman's correlation of "more parameters, lower loss" with what was measured."""
    if any(item.parameters is None for item in items):
        return Correlation(None)
    order = [-(item.parameters or 0.0) for item in items]
    return _correlation(rank_correlation.spearman, order, items)


def pairs(items: Sequence[Item]) -> Pairs:
    """Go through the pairs that the data can tell apart.

    Those are: all runs of one diverged and none of the other, or as many of both diverged and the
    difference paired by seed is shown not to be 0, after Holm's correction over all pairs. Where
    some diverged, a mean of the others decides nothing in their favour.
    """
    said, wrong = [], []
    ordered = sorted(items, key=lambda item: item.standing)
    gaps = {
        (i, j): statistics.paired(ordered[j].finished, ordered[i].finished)
        for i, j in itertools.combinations(range(len(ordered)), 2)
    }
    shown = effects.shown(gaps)
    for (i, j), gap in gaps.items():
        a, b = ordered[i], ordered[j]
        lost = a.standing[0], b.standing[0]
        if lost == (0.0, 1.0) or lost[0] == lost[1] and shown[i, j]:
            better, worse = (a, b) if lost[0] != lost[1] or (gap.mean or 0) > 0 else (b, a)
            said.append(worse.entry.place - better.entry.place)
            wrong += [(worse.name, better.name)] if said[-1] < 0 else []
    return Pairs(len(said), sum(x > 0 for x in said), said.count(0), tuple(wrong))


def losses(
    items: Sequence[Item], level: int = LEVEL, means: Mapping[str, float] | None = None,
    unigram: float | None = None,
) -> LossScore:  # fmt: skip
    """Compare expected losses with measured ones; where a run diverged there is none to compare.

    Args:
      items: what was expected and came out.
      level: per cent that the intervals are meant to cover.
      means: measured mean loss by name, of all that the baseline forecaster may know.
      unigram: loss of a model that knows no context, for that forecaster.
    """
    errors = [item.error for item in items if item.error is not None]
    covered = [item.covered for item in items if item.covered is not None]
    n = len(errors)
    absolute, signed = _mean(map(abs, errors)), _mean(errors)
    own, other, ceiling = [], [], None
    for item in items:
        low, high, loss = item.entry.low, item.entry.high, item.loss
        if low is None or high is None or loss is None:
            continue
        own.append(interval_score.interval_score(low, high, level, loss))
        others = [mean for name, mean in (means or {}).items() if name != item.name]
        ends = interval_score.baseline(others, level, unigram)
        if ends is not None:
            other.append(interval_score.interval_score(*ends, level, loss))
        if len(others) < interval_score.FEWEST:
            ceiling = unigram
    reference = _mean(other) if len(other) == len(own) else None
    return LossScore(
        n, absolute, signed, len(covered), sum(covered), len(own), _mean(own), reference, ceiling
    )


def _mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return math.fsum(values) / len(values) if values else None


def worst(items: Sequence[Item], kind: str) -> int | None:
    """Return the index of the item furthest from its prediction; None where none is off.

    By loss where losses were stated, the more so the more of its runs diverged, else by rank.
    """
    if kind == LOSSES:
        off = [(item.standing[0], abs(item.error or 0.0)) for item in items]
    else:
        off = [(0.0, abs(p - m)) for p, m in zip(*_places(items), strict=True)]
    most = max(off, default=(0.0, 0.0))
    return off.index(most) if most > (0.0, 0.0) else None


def _correlation(
    statistic: rank_correlation.Statistic, order: Sequence[float], items: Sequence[Item]
) -> Correlation:
    measured = rank_correlation.order([item.standing for item in items])
    found = rank_correlation.correlate(statistic, order, measured)
    own = [item.losses for item in items]
    ends = None if found.value is None else rank_correlation.bootstrap(statistic, order, own)
    low, high = ends or (None, None)
    return Correlation(found.value, found.p, found.exact, low, high)


def _item(results: Results, entry: Expected, prediction: Prediction) -> Item | None:
    """Return an entry with its outcome; None where it was not run or has not finished."""
    best = representatives(results)
    series = prediction.subject == SERIES
    own = [v for v in best if entry.name == (v.arm.series if series else v.arm.name)]
    if not own or any(v.standing is None for v in own):
        return None
    counts = [v.arm.parameters for v in own if v.arm.parameters is not None]
    parameters = math.fsum(counts) / len(counts) if len(counts) == len(own) else None
    return Item(entry, own[0].arm.series, _losses(own), parameters)


def _losses(variants: Sequence[Variant]) -> dict[int, float]:
    """Return the mean over variants by seed; infinite where one of their runs diverged."""
    by_seed: dict[int, list[float]] = {}
    for run in (run for variant in variants for run in variant.runs):
        loss = run.final_loss if run.outcome == FINISHED else None
        by_seed.setdefault(run.seed, []).append(math.inf if loss is None else loss)
    return {seed: math.fsum(own) / len(own) for seed, own in sorted(by_seed.items())}
