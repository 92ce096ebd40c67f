"""What a claim is, and how a measured number is judged against an expected one.

A :class:`Claim` is a statement with one or more :class:`Check` values. A check holds a number or an
array that the program measured, one that a closed form or another implementation gives, and a
:class:`Tolerance` that is derived without looking at their difference. Rounding is counted so: n
roundings of numbers up to a size S put each of two computations off by at most n S eps / 2, where
eps is the machine epsilon, and their difference by at most n S eps.
"""

from __future__ import annotations

import dataclasses
import string
from typing import Any, Literal

import numpy as np

from normjax.norm_derivatives import Floats

EPS = float(np.finfo(np.float64).eps)
"""Machine epsilon of float64, 2^-52; a rounding is off by at most half of it."""

SHOWN = 4
"""Arrays up to this many entries are shown whole, larger ones by the entry that is off most."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far measured and expected may lie apart, absolutely, and why."""

    value: float
    reason: str


def exact(why: str) -> Tolerance:
    """Return a tolerance of 0: the same bits."""
    return Tolerance(0.0, f"the same bits: {why}")


def rounding(count: float, size: float, why: str, eps: float = EPS) -> Tolerance:
    """Return the tolerance of ``count`` roundings of numbers up to ``size``: count * size * eps.

    Args:
      count: roundings on the longest path of either computation; a sum of n terms has n.
      size: the largest sum of absolute values on the way.
      why: where the two come from.
      eps: machine epsilon of the dtype.

    >>> rounding(2, 8.0, "a sum of two").value == 16 * EPS
    True
    """
    kind = "" if eps == EPS else " (float32)"
    text = f"{count:.0f} roundings{kind} of numbers up to {size:.3g}: {why}"
    return Tolerance(float(count * size * eps), text)


def digits(places: int) -> Tolerance:
    """Return the tolerance of a number that a statement gives with so many decimals.

    >>> digits(3).value
    0.0005
    """
    return Tolerance(0.5 * 10.0**-places, f"the number is stated to {places} decimals")


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison of what was measured with what was expected.

    Attributes:
      what: what is compared, in words.
      expected: a number or an array; for "above" and "below" the bound.
      measured: of the same shape.
      tolerance: absolute, for every entry; the bounds of "above" and "below" have none to add.
      relation: "equal" (within the tolerance), "above" or "below" (strictly).

    >>> zero = exact("powers of two")
    >>> Check("half", 0.5, 0.25, zero).holds, Check("half", 0.5, 0.25, zero, "below").holds
    (False, True)
    """

    what: str
    expected: Any
    measured: Any
    tolerance: Tolerance
    relation: Literal["equal", "above", "below"] = "equal"

    def __post_init__(self):
        expected, measured = (np.asarray(x, np.float64) for x in (self.expected, self.measured))
        if expected.shape != measured.shape or expected.size == 0:
            raise ValueError(
                f"{self.what}: measured of shape {measured.shape} for expected {expected.shape}"
            )
        object.__setattr__(self, "expected", expected)
        object.__setattr__(self, "measured", measured)

    @property
    def excess(self) -> Floats:
        """Return by how much each entry misses; at most 0 where it holds."""
        if self.relation == "equal":
            with np.errstate(invalid="ignore"):  # of two infinities nothing can be said
                return np.abs(self.measured - self.expected) - self.tolerance.value
        # The next number after the bound is the first that counts.
        least = np.nextafter(self.expected, np.inf if self.relation == "above" else -np.inf)
        return least - self.measured if self.relation == "above" else self.measured - least

    @property
    def holds(self) -> bool:
        """Whether every entry does; one that is not a number never does."""
        return bool(np.all(self.excess <= 0))

    @property
    def error(self) -> float:
        """The largest distance of measured and expected; NaN where one is not a number."""
        with np.errstate(invalid="ignore"):
            return float(np.max(np.abs(self.measured - self.expected)))

    def shown(self) -> tuple[list[float], list[float]]:
        """Return expected and measured as lists to be shown: all entries, or the worst one."""
        expected, measured = self.expected.ravel(), self.measured.ravel()
        if expected.size <= SHOWN:
            return expected.tolist(), measured.tolist()
        excess = np.where(np.isnan(self.excess), np.inf, self.excess).ravel()
        # Of many entries without any error, the largest says most.
        worst = np.lexsort((np.abs(expected), excess))[-1]
        return [float(expected[worst])], [float(measured[worst])]

    @property
    def words(self) -> str:
        """What is compared, with the size of an array that is not shown whole."""
        n = self.expected.size
        return self.what if n <= SHOWN else f"{self.what} (worst of {n} entries)"


@dataclasses.dataclass(frozen=True)
class CheckSeries:
    """Points of a figure that belong to a claim: what was measured, and the closed form.

    Attributes:
      figure: the figure's name.
      label: of the line.
      x, measured, expected: as many numbers each; ``expected`` is the closed form.
    """

    figure: str
    label: str
    x: tuple[float, ...]
    measured: tuple[float, ...]
    expected: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement and the checks that decide it.

    Attributes:
      id: such as "A7".
      statement: in words.
      checks: all must hold.
      series: what of it can be drawn.
    """

    id: str
    statement: str
    checks: tuple[Check, ...]
    series: tuple[CheckSeries, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return bool(self.checks) and all(check.holds for check in self.checks)

    def parts(self) -> list[tuple[str, Check]]:
        """Return each check with its id: A7a, A7b; the claim's own where there is one only.

        >>> claim = Claim("A1", "One is one.", (Check("one", 1, 1, exact("1")),) * 2)
        >>> [name for name, _ in claim.parts()]
        ['A1a', 'A1b']
        """
        if len(self.checks) == 1:
            return [(self.id, self.checks[0])]
        return [(self.id + s, c) for s, c in zip(string.ascii_lowercase, self.checks, strict=False)]
