"""What a row of the board is, and how a measured interval is judged against an expected value.

A :class:`Result` holds a published statement, the value that it gives, how far a measurement may
lie from that value and why, and what was measured: a number per independent seed, or one number
where nothing is random. With the interval [low, high] of the mean (Student's t, 95 %) and the
expected value between a and b,

    reproduced          a - tolerance <= low  and  high <= b + tolerance
    not reproduced      high < a - tolerance  or   low > b + tolerance
    not decided         anything else: the interval crosses an end

so that a wide interval decides nothing, whatever its mean is. No JAX here: pages read it.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any

from experiments.claims.claim import Tolerance
from normjax.reporting.statistics import estimate

REPRODUCED, NOT_REPRODUCED, UNDECIDED = VERDICTS = (
    "reproduced", "not reproduced", "not decided at this size",
)  # fmt: skip

BASES = {
    "paper": "the value as the paper or its authors state it",
    "code": "the value follows from released code",
    "derived": "the value follows from the set-up by algebra; the paper has the set-up or the law",
    "secondary": "the value as others report it, or measured it on released code",
    "recalled": "the value as it is known; not held against the paper's text",
}
"""Where an expected value comes from, and what that means."""
LEAST_SEEDS = 5


@dataclasses.dataclass(frozen=True)
class Expected:
    """A number, a range or a bound: what lies between ``low`` and ``high``, both included."""

    low: float
    high: float

    def __post_init__(self):
        if not self.low <= self.high:
            raise ValueError(f"low={self.low}: must be at most high={self.high}")


def number(value: float) -> Expected:
    """Return one number as what is expected.

    >>> number(1.5)
    Expected(low=1.5, high=1.5)
    """
    return Expected(float(value), float(value))


def between(low: float, high: float) -> Expected:
    """Return a range as what is expected."""
    return Expected(float(low), float(high))


def at_most(high: float) -> Expected:
    """Return an upper bound as what is expected."""
    return Expected(-math.inf, float(high))


def at_least(low: float) -> Expected:
    """Return a lower bound as what is expected."""
    return Expected(float(low), math.inf)


def judged(low: float, high: float, expected: Expected, tolerance: float) -> str:
    """Return the verdict on an interval; see the module's text.

    >>> judged(1.4, 1.6, number(1.5), 0.2), judged(1.4, 1.6, number(1.5), 0.05)
    ('reproduced', 'not decided at this size')
    >>> judged(1.4, 1.6, number(2.0), 0.3)
    'not reproduced'
    """
    least, most = expected.low - tolerance, expected.high + tolerance
    if least <= low and high <= most:
        return REPRODUCED
    return NOT_REPRODUCED if high < least or low > most else UNDECIDED


@dataclasses.dataclass(frozen=True)
class Result:
    """A row of the board.

    Attributes:
      id: such as "S1".
      statement: what was published, in words.
      source: paper with its arXiv number, or where the statement stands.
      basis: a key of :data:`BASES`.
      setup: sizes and what was measured.
      expected: the published value.
      tolerance: how far a measurement may lie from it, absolutely, and why.
      values: measured, one number per independent seed; a single one where nothing is random.
      note: for a row that does not reproduce, the reason that was looked for, with its numbers.

    Raises:
      ValueError: no value, or between 2 and 4: too few for an interval; one that is not finite; an
        unknown basis; a negative tolerance.
    """

    id: str
    statement: str
    source: str
    basis: str
    setup: str
    expected: Expected
    tolerance: Tolerance
    values: tuple[Any, ...]
    note: str = ""

    def __post_init__(self):
        object.__setattr__(self, "values", tuple(float(v) for v in self.values))
        if self.basis not in BASES:
            raise ValueError(f"{self.id}: basis={self.basis}: must be one of {', '.join(BASES)}")
        if not self.tolerance.value >= 0:
            raise ValueError(f"{self.id}: tolerance={self.tolerance.value}: must be at least 0")
        if len(self.values) != 1 and len(self.values) < LEAST_SEEDS:
            raise ValueError(
                f"{self.id}: {len(self.values)} values: must be one exact number, or a number for"
                f" each of at least {LEAST_SEEDS} seeds"
            )
        if not all(math.isfinite(v) for v in self.values):
            raise ValueError(f"{self.id}: measured {self.values}: must be finite")

    @property
    def exact(self) -> bool:
        """Whether nothing is random: one number that any seed would give again."""
        return len(self.values) == 1

    @cached_property
    def interval(self) -> tuple[float, float, float]:
        """The mean and the ends of its interval; of an exact number, the number itself."""
        found = estimate(self.values)
        if found.mean is None or found.low is None or found.high is None:
            return (self.values[0],) * 3
        return found.mean, found.low, found.high

    @property
    def verdict(self) -> str:
        """One of :data:`VERDICTS`."""
        _, low, high = self.interval
        return judged(low, high, self.expected, self.tolerance.value)
