"""Means, Student t intervals and differences paired by seed.

Pure functions of numbers. Sums are exact (``math.fsum``), so the order in which runs are listed
cannot change a digit of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scipy import special

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean of n values or pairs, None without any, with its interval.

    The standard deviation (``n - 1`` in the denominator) and the ends are None where ``n < 2``.
    """

    n: int
    mean: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        """Half the length of the interval, the number behind a plus-minus sign."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval and 0 lies outside it."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def t_factor(n: int, confidence: float = CONFIDENCE) -> float:
    """Return how many standard errors the interval of ``n`` values extends to each side.

    It is the ``(1 + confidence) / 2`` quantile of Student's t with ``n - 1`` degrees of freedom.

    Raises:
        ValueError: if ``n < 2`` or ``confidence`` is not strictly between 0 and 1.

    >>> round(t_factor(3), 3)
    4.303
    """
    if n < 2:
        raise ValueError(f"n={n}: an interval needs at least 2 values; run more seeds")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: must lie between 0 and 1; use 0.95")
    return float(special.stdtrit(n - 1, (1 + confidence) / 2))


def estimate(values: Iterable[float], confidence: float = CONFIDENCE) -> Estimate:
    """Estimate a mean: ``m +- t s / sqrt(n)`` with ``s^2 = sum (v - m)^2 / (n - 1)``.

    No value gives no mean, one value gives a mean without an interval.

    Raises:
        ValueError: if a value is not finite. Divergence is counted by the caller, not averaged.

    >>> estimate([1.0, 2.0, 3.0]).mean
    2.0
    >>> estimate([1.0]).low is None
    True
    """
    numbers = [float(value) for value in values]
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"values={numbers}: must be finite; count diverged runs separately")
    n = len(numbers)
    if n == 0:
        return Estimate(0)
    mean = math.fsum(numbers) / n
    if n == 1:
        return Estimate(1, mean)
    sd = math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (n - 1))
    reach = t_factor(n, confidence) * sd / math.sqrt(n)
    return Estimate(n, mean, sd, mean - reach, mean + reach)


def differences(minuend: Mapping[int, float], subtrahend: Mapping[int, float]) -> dict[int, float]:
    """Return ``minuend - subtrahend`` for every seed that both have, ordered by seed.

    >>> differences({0: 3.0, 1: 5.0}, {1: 4.0, 2: 9.0})
    {1: 1.0}
    """
    common = sorted(minuend.keys() & subtrahend.keys())
    return {seed: minuend[seed] - subtrahend[seed] for seed in common}


def paired(
    minuend: Mapping[int, float], subtrahend: Mapping[int, float], confidence: float = CONFIDENCE
) -> Estimate:
    """Estimate the mean of ``minuend - subtrahend`` over the seeds that both have.

    Two runs of one seed draw the same batches, so what the seed does to both cancels.

    >>> paired({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0}).mean
    1.0
    """
    return estimate(differences(minuend, subtrahend).values(), confidence)


def perplexity(loss: float) -> float:
    """Return ``exp(loss)`` of a loss in nats per token; infinite where it overflows.

    >>> perplexity(0.0)
    1.0
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits(loss: float) -> float:
    """Return a loss in bits: ``loss / ln 2``.

    >>> bits(math.log(2))
    1.0
    """
    return loss / math.log(2)


def window(values: Iterable[float], estimates: Iterable[Estimate | None]) -> tuple[float, float]:
    """Return axis limits that show all values, and intervals as far as they are sane.

    Two seeds give intervals of 12.7 standard errors; drawn whole they would flatten all else.
    """
    core = list(values)
    low, high = least, most = min(core), max(core)
    reach = 0.5 * (most - least) or 0.05
    for each in estimates:
        if each is not None and each.low is not None and each.high is not None:
            low = min(low, max(each.low, least - reach))
            high = max(high, min(each.high, most + reach))
    margin = 0.03 * (high - low) or 0.05
    return low - margin, high + margin
