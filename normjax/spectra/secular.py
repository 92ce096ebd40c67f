"""All roots of a secular equation, each to full relative accuracy, in O(n^2) time and O(n) memory.

For poles p_0 < ... < p_{n-1}, p_0 >= 0, and weights w_j > 0 the function

    f(x) = sum_j w_j / (p_j - x)

rises from minus to plus infinity between neighbouring poles, so that each of the n - 1 gaps holds
one root. These are the eigenvalues of a diagonal matrix changed by a matrix of rank one.

Accuracy. A root is found as the distance from its nearer pole, and differences of poles are formed
from differences of their square roots, so that no p_j - x loses digits. At a root the positive and
the negative part of f are equal, and the poles below are nearer than x itself; hence an error of a
few units of roundoff in f moves x by the same few units relative to x, however small x is.

Source: R.-C. Li 1993, "Solving secular equations stably and efficiently" (LAPACK working note 89),
the scheme with the weight of the nearer pole kept fixed, here for many roots at once.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from normjax.runs.machine import usable_cores

Vector = NDArray[np.floating]

_CHUNK = 1 << 17  # entries of the work array of one thread; a few of them fit a second-level cache
_PARALLEL = 1 << 19  # roots times poles from which several threads pay
_ROUNDING = 2e-15
_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Poles:
    """Numbers p_j = root_j^2 + offset_j >= 0 in ascending order, whose differences keep all digits.

    Attributes:
      root: (n,) square roots, not negative.
      offset: (n,) corrections; zero where p_j is the square of a given number.
    """

    root: Vector
    offset: Vector

    def __len__(self) -> int:
        """Return n."""
        return len(self.root)

    def __getitem__(self, index) -> Poles:
        """Return the poles at ``index``."""
        return Poles(self.root[index], self.offset[index])

    @property
    def value(self) -> Vector:
        """Return the (n,) numbers p_j."""
        return self.root * self.root + self.offset

    def minus(self, other: Poles) -> Vector:
        """Return p_j - q_j, elementwise under broadcasting."""
        product = (self.root - other.root) * (self.root + other.root)
        return product + (self.offset - other.offset)

    def matrix_minus(self, other: Poles) -> Vector:
        """Return the (len(other), len(self)) matrix p_j - q_i."""
        result = self.root - other.root[:, None]
        result *= self.root + other.root[:, None]
        if self.offset.any() or other.offset.any():
            result += self.offset - other.offset[:, None]
        return result


def secular_roots(poles: Poles, weights: Vector, *, distances: bool = False) -> Poles:
    """Return the n - 1 roots of sum_j w_j / (p_j - x) = 0.

    Args:
      poles: n >= 1 ascending poles.
      weights: (n,) positive weights.
      distances: whether the distances of the roots from their nearer poles must be right relative
        to themselves, not only the roots. They can be where the weights are of one size.

    Returns:
      The roots in ascending order, again as poles: the square root of the nearer pole and the
      distance from it. Relative error: a few units of roundoff each.

    >>> import numpy as np
    >>> poles = Poles(np.array([0.0, 1.0]), np.zeros(2))
    >>> secular_roots(poles, np.array([1e-32, 1.0])).value     # x = w_0 / (w_0 + w_1)
    array([1.e-32])
    """
    count = len(poles) - 1
    rows = max(1, _CHUNK // len(poles))
    starts = range(0, count, rows)

    def solve(start: int) -> tuple[NDArray[np.int64], Vector]:
        return _solve_rows(poles, weights, np.arange(start, min(start + rows, count)), distances)

    threads = min(usable_cores(), len(starts)) if count * len(poles) >= _PARALLEL else 1
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(solve, starts))
    else:
        parts = [solve(start) for start in starts]
    if not parts:
        return Poles(np.zeros(0), np.zeros(0))
    base = np.concatenate([part[0] for part in parts])
    return Poles(poles.root[base], poles.offset[base] + np.concatenate([part[1] for part in parts]))


def _sums(difference: Vector, x: Vector, weights: Vector, base, work: Vector):
    """Return f(x) and f'(x) without the term of the base pole."""
    work = work[: len(x)]
    np.subtract(difference, x[:, None], out=work)
    np.divide(1.0, work, out=work)
    work[np.arange(len(x)), base] = 0.0
    value = np.einsum("ij,j->i", work, weights)
    np.multiply(work, work, out=work)
    return value, np.einsum("ij,j->i", work, weights)


def _solve_rows(poles: Poles, weights: Vector, row: NDArray[np.int64], distances: bool):
    """Return the base pole of each root in the gaps ``row`` and the distance of the root from it.

    In each gap the distance z >= 0 from the base pole is sought, z in (0, gap / 2]; ``side`` is 1
    where the base is the lower end and -1 where it is the upper one.
    """
    gap = poles[row + 1].minus(poles[row])
    half = 0.5 * gap
    work = np.empty((len(row), len(poles)))
    difference = poles.matrix_minus(poles[row])
    value, slope = _sums(difference, half, weights, row, work)
    upper = value - weights[row] / half < 0
    base = np.where(upper, row + 1, row)
    side = np.where(upper, -1.0, 1.0)
    # The sums without the other end of the gap instead, at the same point.
    exchange = np.where(upper, 1.0, 0.0)
    value = value - exchange * (weights[row] + weights[row + 1]) / half
    slope = slope + exchange * (weights[row] - weights[row + 1]) / (half * half)
    difference[upper] = poles.matrix_minus(poles[base[upper]])
    pole = poles.value[base]

    distance = half.copy()
    low, high = np.zeros_like(half), half.copy()
    z, before, moved = half, half, half
    active = np.flatnonzero(gap > (0 if distances else _ROUNDING) * poles.value[row + 1])
    value, slope, z, before, moved = (v[active] for v in (value, slope, z, before, moved))
    difference = difference if len(active) == len(row) else difference[active]
    for step in range(_STEPS):
        if not len(active):
            return base, side * distance
        k, s, width = base[active], side[active], gap[active]
        new = _next(s * value, slope, weights[k], z, width)
        slow = (step > 3) & (step % 2 == 0) & (moved > 0.25 * z)
        new, halved = _kept_inside(new, low[active], high[active], slow | (step > 40))
        moved = np.abs(new - z)
        distance[active] = new
        scale = new if distances else pole[active] + s * new
        # Convergence is quadratic: the error left is about moved^2 (moved / before^2).
        left = moved * (moved / before) ** 2
        small = (1e-13 if distances else _ROUNDING) * scale
        done = (left <= 1e-19 * scale) & (moved <= 1e-4 * new)
        done |= (moved <= small) & (moved <= 1e-2 * new)  # slow progress is small too
        open_ = ~(done | (high[active] <= small))
        # The length of a bisection says nothing about the error it started from.
        before = np.where(halved, np.minimum(moved, 1e-8 * new), moved)
        if not open_.all():
            active, new = active[open_], new[open_]
            before, moved = before[open_], moved[open_]
            difference = difference[open_]
        z = new
        if not len(active):
            continue
        k, s = base[active], side[active]
        value, slope = _sums(difference, s * z, weights, k, work)
        above = s * value - weights[k] / z > 0  # the root is nearer to the base than z
        high[active[above]] = z[above]
        low[active[~above]] = z[~above]
    raise RuntimeError("secular equation: no convergence; please report the input")


def _next(value: Vector, slope: Vector, weight: Vector, z: Vector, width: Vector) -> Vector:
    """Return the root of c - weight / y + s / (width - y) with the value and slope at z.

    Near the root c and s lose digits that the step from z does not need, so the step is solved for;
    where the root is far smaller than z, the step would lose the digits, and the root itself is.
    """
    far = width - z
    slope = np.maximum(slope, 0.0)
    c = value - slope * far
    total = value - weight / z
    step = _quadratic_root(
        c, (far - z) * total + z * far * (slope + weight / (z * z)), -z * far * total
    )
    root = _quadratic_root(c, c * width + weight + slope * far * far, weight * width)
    return np.where(step < -0.5 * z, root, z + step)


def _quadratic_root(c: Vector, a: Vector, b: Vector) -> Vector:
    """Return the root (a - sqrt(a^2 - 4 b c)) / (2 c) of c y^2 - a y + b without cancellation."""
    root = np.sqrt(np.maximum(a * a - 4 * b * c, 0.0))
    positive = a > 0
    small = 2 * b / np.where(positive, a + root, 1.0)
    return np.where(positive, small, (a - root) / np.where(positive | (c == 0), 1.0, 2 * c))


def _kept_inside(new: Vector, low: Vector, high: Vector, halve):
    """Return ``new`` where it lies in its bracket, else, and on request, a bisection; and where."""
    # A step past a bound by rounding only is at its goal; past it by more it is not trusted.
    clipped = np.clip(new, low, high)
    good = (np.abs(new - clipped) <= 1e-6 * clipped) & ~halve
    geometric = np.sqrt(np.maximum(low, 1e-40 * high) * high)
    middle = np.where(high > 4 * low, geometric, 0.5 * (low + high))
    return np.where(good, clipped, middle), ~good
