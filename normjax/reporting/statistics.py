"""Means, Student t intervals, differences paired by seed, and what many comparisons need.

Two things make a measured loss another one: the seed, and the text that it is measured on. Where
losses come with their parts over stretches of the text, both are in the interval.

Pure functions of numbers. Sums are exact (``math.fsum``), so the order in which runs are listed
cannot change a digit of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scipy import special

CONFIDENCE = 0.95
Parts = Mapping[int, Sequence[float]]
"""By seed: the losses over stretches of the evaluation text."""


@dataclass(frozen=True)
class Estimate:
    """The mean of n values or pairs, None without any, with its interval.

    The standard deviation (``n - 1`` in the denominator), the errors and the ends are None where
    ``n < 2``; ``text_error`` also where no parts were given.

    Attributes:
      seed_error, text_error: standard errors from the scatter over seeds and over the text.
      freedom: degrees of freedom of both together.
    """

    n: int
    mean: float | None = None
    sd: float | None = None
    low: float | None = None
    high: float | None = None
    seed_error: float | None = None
    text_error: float | None = None
    freedom: float | None = None

    @property
    def p(self) -> float | None:
        """Two-sided p-value of "the mean is 0" by Student's t; None without an interval.

        >>> round(estimate([1.0, 2.0, 3.0]).p, 4)
        0.0742
        """
        if self.mean is None or self.seed_error is None or self.freedom is None:
            return None
        error = math.hypot(self.seed_error, self.text_error or 0.0)
        if error == 0:
            return 0.0 if self.mean else 1.0
        return float(2 * special.stdtr(self.freedom, -abs(self.mean) / error))

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


def estimate(
    values: Iterable[float], confidence: float = CONFIDENCE,
    parts: Sequence[Sequence[float]] | None = None,
) -> Estimate:  # fmt: skip
    """Estimate a mean: ``m +- t s / sqrt(n)`` with ``s^2 = sum (v - m)^2 / (n - 1)``.

    With parts the squared error of the text, that of the means over values of the K columns, is
    added to the squared error of the seeds, and t has the degrees of freedom of Satterthwaite
    (1946): ``(a + b)^2 / (a^2 / (n - 1) + b^2 / (K - 1))``. What scatters with both is then counted
    twice, so the interval is rather too wide.

    No value gives no mean, one value gives a mean without an interval.

    Args:
      values: n numbers.
      confidence: of the interval.
      parts: (n, K): each value's parts over the same K stretches of a text, K at least 2.

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
    sd = _scatter(numbers)
    seeds, text, freedom = sd / math.sqrt(n), None, float(n - 1)
    if parts and len(parts[0]) > 1:
        columns = [math.fsum(column) / n for column in zip(*parts, strict=True)]
        text = _scatter(columns) / math.sqrt(len(columns))
        a, b = seeds**2, text**2
        if a + b:
            freedom = (a + b) ** 2 / (a**2 / (n - 1) + b**2 / (len(columns) - 1))
    t = float(special.stdtrit(freedom, (1 + confidence) / 2))
    reach = t * math.hypot(seeds, text or 0.0)
    return Estimate(n, mean, sd, mean - reach, mean + reach, seeds, text, freedom)


def _scatter(numbers: Sequence[float]) -> float:
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted for their number by Holm's method (1979); None stays None.

    The k-th smallest of m is multiplied by m - k + 1, and none is smaller than one before it.

    >>> holm([0.01, 0.04, None, 0.03])
    [0.03, 0.06, None, 0.06]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    out: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, i) in enumerate(known):
        least = min(1.0, max(least, p * (len(known) - rank)))
        out[i] = least
    return out


def differences(minuend: Mapping[int, float], subtrahend: Mapping[int, float]) -> dict[int, float]:
    """Return ``minuend - subtrahend`` for every seed that both have, ordered by seed.

    >>> differences({0: 3.0, 1: 5.0}, {1: 4.0, 2: 9.0})
    {1: 1.0}
    """
    common = sorted(minuend.keys() & subtrahend.keys())
    return {seed: minuend[seed] - subtrahend[seed] for seed in common}


def paired(
    minuend: Mapping[int, float], subtrahend: Mapping[int, float], confidence: float = CONFIDENCE,
    parts: tuple[Parts, Parts] = ({}, {}),
) -> Estimate:  # fmt: skip
    """Estimate the mean of ``minuend - subtrahend`` over the seeds that both have.

    Two runs of one seed draw the same batches, so what the seed does to both cancels; so does what
    the text does, where ``parts`` hold both sides' losses over stretches of it.

    >>> paired({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0}).mean
    1.0
    """
    found = differences(minuend, subtrahend)
    sides = [[side.get(seed, ()) for seed in found] for side in parts]
    both = [
        [x - y for x, y in zip(a, b, strict=True)] if len(a) == len(b) else []
        for a, b in zip(*sides, strict=True)
    ]
    whole = both and len({len(row) for row in both}) == 1 and both[0]
    return estimate(found.values(), confidence, both if whole else None)


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
