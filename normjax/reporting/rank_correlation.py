"""How well two orders agree: Spearman's rho, Kendall's tau-b, and what chance would give.

Values may be infinite (a diverged run has no loss and comes last); equal values share a rank.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

EXACT = 8
"""Up to so many entries all orders are gone through (8! = 40 320); beyond, orders are drawn."""
DRAWS = 20_000
EXACT_SEEDS = 6
"""Up to so many seeds all n^n resamples count (6^6 = 46 656, 462 kinds); beyond, some are drawn."""
RESAMPLES = 2_000
Statistic = Callable[[Sequence[float], Sequence[float]], float | None]


@dataclass(frozen=True)
class Correlation:
    """A rank correlation, None where all entries of one side are equal: there is no order.

    ``p`` is the share of all orders, equally likely, that agree at least as well (one-sided), and
    exact where all were gone through. The 95 % bootstrap interval is over seeds, at least two.
    """

    value: float | None
    p: float | None = None
    exact: bool = True
    low: float | None = None
    high: float | None = None


def ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1 for the smallest; equal values get the mean of the ranks they share.

    >>> ranks([2.0, float("inf"), 1.0, float("inf")])
    [2.0, 3.5, 1.0, 3.5]
    """
    array = np.asarray(values, float)
    below = np.searchsorted(np.sort(array), array, "left")
    upto = np.searchsorted(np.sort(array), array, "right")
    return ((below + upto + 1) / 2).tolist()


def standing(losses: Sequence[float]) -> tuple[float, float]:
    """Return the place of runs in the one order of outcomes: less is better.

    First the share that diverged, whose loss is infinite, then the mean of the others.

    >>> standing([1.0, 3.0]) < standing([9.0, 9.0]) < standing([1.0, float("inf")])
    True
    """
    known = [loss for loss in losses if math.isfinite(loss)]
    mean = math.fsum(known) / len(known) if known else math.inf
    return ((len(losses) - len(known)) / len(losses) if losses else 1.0), mean


def order(standings: Sequence[tuple[float, float]]) -> list[float]:
    """Return standings as numbers in the same order; equals stay equal."""
    known = sorted(set(standings))
    return [float(known.index(each)) for each in standings]


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return Pearson's correlation of the ranks.

    >>> spearman([1, 2, 3], [10, 30, 20])
    0.5
    """
    return _ratio(_products(a, b), _products(a, a), _products(b, b))


def kendall(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return tau-b: concordant less discordant pairs over ``sqrt(pairs untied in a, in b)``.

    >>> round(kendall([1, 2, 3], [10, 30, 20]), 4)
    0.3333
    """
    return _ratio(_agreement(a, b), _agreement(a, a), _agreement(b, b))


def correlate(
    statistic: Statistic, predicted: Sequence[float], measured: Sequence[float]
) -> Correlation:
    """Return a rank correlation with its permutation p-value, without an interval.

    Smaller values are better on both sides.
    """
    value = statistic(predicted, measured)
    if value is None:
        return Correlation(None)
    p, exact = _permutation(statistic, predicted, measured)
    return Correlation(value, p, exact)


def bootstrap(
    statistic: Statistic, predicted: Sequence[float], losses: Sequence[Mapping[int, float]]
) -> tuple[float, float] | None:
    """Return the 95 % percentile interval of a rank correlation over resampled seeds.

    A resample draws whole seeds, the same for all entries, since the runs of one seed share their
    batches. An entry stands where the drawn seeds that it has put it; without any of them, where
    all of its own do; without a run at all it comes last.

    Args:
      statistic: :func:`spearman` or :func:`kendall`.
      predicted: one value per entry.
      losses: final loss by seed, one mapping per entry; infinite where the run diverged.
    """
    seeds = sorted({seed for own in losses for seed in own})
    if len(seeds) < 2:
        return None
    found = []
    for drawn, times in _resamples(seeds):
        value = statistic(predicted, order([_standing(own, drawn) for own in losses]))
        if value is not None:
            found += [value] * times
    if not found:
        return None
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)


def _standing(own: Mapping[int, float], drawn: Sequence[int]) -> tuple[float, float]:
    return standing([own[seed] for seed in drawn if seed in own] or list(own.values()))


def _resamples(seeds: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """Return resamples with the number of ordered draws that each stands for."""
    n = len(seeds)
    if n <= EXACT_SEEDS:
        return [
            (drawn, math.factorial(n) // math.prod(math.factorial(drawn.count(s)) for s in seeds))
            for drawn in itertools.combinations_with_replacement(seeds, n)
        ]
    rows = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    return [(tuple(seeds[i] for i in row), 1) for row in rows]


def _ratio(both: int, first: int, second: int) -> float | None:
    return both / math.sqrt(first * second) if first and second else None


def _centred(values: Sequence[float]) -> np.ndarray:
    """Return twice the ranks less their mean: whole numbers, so that comparisons are exact."""
    return np.array([round(2 * rank) for rank in ranks(values)]) - (len(values) + 1)


def _products(a: Sequence[float], b: Sequence[float]) -> int:
    return int(_centred(a) @ _centred(b))


def _signs(values: Sequence[float]) -> np.ndarray:
    order = np.array([round(2 * rank) for rank in ranks(values)])
    return np.sign(order[:, None] - order[None, :])


def _agreement(a: Sequence[float], b: Sequence[float]) -> int:
    return int((_signs(a) * _signs(b)).sum()) // 2


def _permutation(
    statistic: Statistic, predicted: Sequence[float], measured: Sequence[float]
) -> tuple[float, bool]:
    """Return the share of orders of the prediction that agree at least as well, and if exact.

    What the statistics divide by does not depend on the order, so whole numbers are compared.
    """
    n, exact = len(predicted), len(predicted) <= EXACT
    if exact:
        orders = np.array(list(itertools.permutations(range(n))))
    else:
        rng = np.random.default_rng(0)
        orders = rng.permuted(np.tile(np.arange(n), (DRAWS, 1)), axis=1)
    if statistic is spearman:
        scores = _centred(predicted)[orders] @ _centred(measured)
        seen = _products(predicted, measured)
    else:
        first, second = np.triu_indices(n, 1)
        own, other = _signs(predicted), _signs(measured)[first, second]
        told = zip(first, second, other, strict=True)
        scores = sum(own[orders[:, i], orders[:, j]] * sign for i, j, sign in told)
        seen = _agreement(predicted, measured)
    count = int(np.count_nonzero(scores >= seen))
    return (count / len(orders), True) if exact else ((count + 1) / (len(orders) + 1), False)
