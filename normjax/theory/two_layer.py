"""Singular values of a I + W_2 D W_1: a residual path and a branch with one hidden layer.

The Jacobian of an MLP is a sum over its F hidden units, sum_f p_f q_f^T with p_f = W_2[:, f] and
q_f = D_f W_1[f, :]. It is not a Gaussian matrix: with F = 4 d its largest singular value lies
several per cent above that of a Gaussian one of the same size. For random p_f, q_f, with

    tau_f = |p_f|^2 |q_f|^2,        K(u) = (F/d) mean_f[ tau_f / (1 - tau_f u) ],

u K(u) generates the free cumulants of the branch (a compound free Poisson law, R-diagonal; Nica and
Speicher 2006, "Lectures on the combinatorics of free probability", lectures 12 and 15), and all of
:mod:`normjax.theory.matrix_products` applies. For F/d -> infinity K -> sigma^2, the Gaussian block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from normjax.errors import UserError
from normjax.theory.free_factors import root
from normjax.theory.matrix_products import ProductLaw
from normjax.theory.random_matrices import Floats, GaussianBlock, check_number, check_values


@dataclasses.dataclass(frozen=True)
class TwoLayerBlock:
    """The singular values of a I + sum_f p_f q_f^T with independent random directions p_f, q_f.

    Attributes:
      strengths: values tau = |p_f|^2 |q_f|^2 that hidden units have, at least 0.
      weights: fraction of the hidden units at each strength, of the same length; they sum to 1.
      ratio: hidden units per feature F/d, positive.
      a: weight of the identity, at least 0.

    Raises:
      UserError: wrong lengths, negative or non-finite values, weights that do not sum to 1.

    >>> block = TwoLayerBlock((0.0, 0.25), (0.5, 0.5), ratio=4.0)   # relu: half the units are off
    >>> round(block.edges()[1], 4), round(block.gaussian.edges()[1], 4)
    (2.2637, 2.0998)
    """

    strengths: tuple[float, ...]
    weights: tuple[float, ...]
    ratio: float
    a: float = 1.0

    def __post_init__(self):
        check_number("a", self.a, 0.0)
        if check_number("ratio", self.ratio) <= 0:
            raise UserError(f"ratio={self.ratio}: must be positive, hidden units per feature")
        tau, weight = check_values("strengths", self.strengths), self._checked_weights()
        if tau.ndim != 1 or tau.size == 0 or tau.shape != weight.shape:
            raise UserError(
                f"strengths of shape {tau.shape}, weights of {weight.shape}: must be two equally"
                " long lists"
            )
        if tau.min() < 0:
            raise UserError(f"strengths: smallest is {tau.min():g}; squared norms must be >= 0")
        object.__setattr__(self, "strengths", tuple(tau.tolist()))
        object.__setattr__(self, "weights", tuple(weight.tolist()))

    def _checked_weights(self) -> Floats:
        weight = check_values("weights", self.weights)
        if weight.size and (weight.min() < 0 or abs(weight.sum() - 1) > 1e-9):
            raise UserError(f"weights: sum to {weight.sum():g}; must be >= 0 and sum to 1")
        return weight

    # --- moments, edges, density ------------------------------------------------------------------

    @property
    def sigma(self) -> float:
        """Size of the branch: sigma^2 = ||W_2 D W_1||_F^2 / d = ratio mean(tau)."""
        return math.sqrt(self.cumulants(0.0)[0])

    @property
    def gaussian(self) -> GaussianBlock:
        """The Gaussian block of the same a and sigma."""
        return GaussianBlock(self.sigma, self.a)

    @property
    def mean_square(self) -> float:
        """Mean of s^2: a^2 + sigma^2."""
        return self.a**2 + self.sigma**2

    @property
    def mean_fourth(self) -> float:
        """Mean of s^4: that of the Gaussian block plus ratio mean(tau^2)."""
        return self.gaussian.mean_fourth + float(self.cumulants(0.0)[1])

    @cached_property
    def _law(self) -> ProductLaw:
        return ProductLaw((self,))

    def edges(self) -> tuple[float, float]:
        """Return the smallest and the largest singular value: extrema of (1 + psi) / sqrt(u)."""
        return self._law.edges()

    def density(self, s: ArrayLike) -> Floats:
        """Return the density of the singular values at s; see :meth:`ProductLaw.density`."""
        return self._law.density(s)

    def cdf(self, s: ArrayLike) -> Floats:
        """Return the fraction of singular values up to s; see :meth:`ProductLaw.cdf`."""
        return self._law.cdf(s)

    def quantile(self, p: ArrayLike) -> Floats:
        """Return the singular values below which a fraction p lies."""
        return self._law.quantile(p)

    # --- as a factor of a product -----------------------------------------------------------------

    @property
    def rank(self) -> float:
        """Fraction of singular values that are not 0; below 1 for a narrow branch alone."""
        active = sum(w for t, w in zip(self.strengths, self.weights, strict=True) if t > 0)
        return 1.0 if self.a > 0 else min(1.0, self.ratio * active)

    @cached_property
    def _atoms(self) -> tuple[Floats, Floats]:
        return np.asarray(self.strengths), np.asarray(self.weights) * self.ratio

    def cumulants(self, u: Any) -> tuple[Any, Any]:
        """Return (K, dK/du) at u, real or complex, any shape."""
        tau, mass = self._atoms
        part = tau / (1 - tau * np.asarray(u)[..., None])
        return part @ mass, (part * part) @ mass

    def cumulants_integral(self, u: Any) -> Any:
        """Return the integral of K from 0 to u."""
        tau, mass = self._atoms
        return -np.log(1 - tau * np.asarray(u)[..., None]) @ mass

    def _psi(self, y: Any) -> tuple[Any, Any]:
        """Return (psi, d psi / dy) at y."""
        a2 = self.a**2
        v = 1 + a2 * y
        k, dk = self.cumulants(y * v)
        return y * (a2 + v * k), a2 + (2 * v - 1) * (k + y * v * dk)

    def _gap(self, t: Any) -> tuple[Any, Any]:
        """Return (-1 - psi, its derivative) at t = -1 - a^2 y >= 0, where psi < -1."""
        u, du = t * (1 + t) / self.a**2, (1 + 2 * t) / self.a**2
        k, dk = self.cumulants(u)
        return t - u * k, 1 - du * (k + u * dk)

    @cached_property
    def _branch(self) -> float:
        """The t where :meth:`_gap` is largest."""
        pole = _smaller_root(self.a**2, max(self.strengths)) * self.a**2
        end = pole * (1 - 1e-9)

        def slope(t: float) -> float:
            return float(self._gap(t)[1])

        return root(slope, 0.0, end) if slope(end) < 0 else end

    def branch_gap(self) -> float:
        """Return -1 - psi at the end of the real branch psi < -1 (sigma < a)."""
        return float(self._gap(self._branch)[0]) if self.sigma > 0 else math.inf

    @cached_property
    def _lowest(self) -> float:
        """The y in [-1/a^2, 0) where psi is -1, or (rank below 1) one as good as -infinity."""
        if self.sigma < self.a:
            return -1 / self.a**2
        far = -1e15 / self.mean_square
        floor = max(far, -1 / self.a**2) if self.a > 0 else far

        def rest(y: float) -> float:
            return float(1 + y * self.cumulants(y * (1 + self.a**2 * y))[0])

        return root(rest, floor, 0.0) if rest(floor) < 0 else floor

    def parameter(self, psi: Any, one_plus_psi: Any) -> tuple[Any, Any]:
        """Return (y, 1 + a^2 y) at real psi, by Newton's method inside a bracket."""
        psi, one_plus_psi = np.asarray(psi, np.float64), np.asarray(one_plus_psi, np.float64)
        if psi.size and psi.max() < -1:  # only the search for the lower edge comes here
            t = _bracketed(self._gap, -one_plus_psi, -one_plus_psi, self._branch)
            return -(1 + t) / self.a**2, -t
        with np.errstate(invalid="ignore"):
            guess = self.gaussian.parameter(psi, one_plus_psi)[0]
        top = _smaller_root(self.a**2, max(self.strengths)) * (1 - 1e-15)
        low = np.where(psi < 0, self._lowest, 0.0)
        high = np.where(psi < 0, 0.0, np.minimum(np.where(psi > 0, guess, 0.0), top))
        y = _bracketed(self._psi, psi, low, high)
        return y, 1 + self.a**2 * y


def _smaller_root(a2: float, largest: float) -> float:
    """Return the y > 0 where y (1 + a^2 y) largest = 1, the pole of K."""
    return 2 / (largest * (1 + math.sqrt(1 + 4 * a2 / largest))) if largest > 0 else 1e300


def _bracketed(function: Callable, target: Any, low: Any, high: Any) -> Any:
    """Return x in [low, high] with function(x)[0] = target: Newton, bisection where it leaves."""
    low, high = np.broadcast_arrays(low + 0 * target, high + 0 * target)
    x = (low + high) / 2
    for _ in range(100):
        value, slope = function(x)
        below = value < target
        low, high = np.where(below, x, low), np.where(below, high, x)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = x - (value - target) / slope
        inside = (step > low) & (step < high)
        following = np.where(inside, step, (low + high) / 2)
        done = np.abs(following - x) <= 1e-14 * np.abs(x)
        x = following
        if np.all(done):
            break
    return x


def compress(
    strengths: ArrayLike, weights: ArrayLike, count: int = 48, least: float = 0.0
) -> tuple[Floats, Floats]:
    """Return about ``count`` strengths and their weights, with the same mean.

    Strengths in the same of ``count`` equally wide bins are replaced by their mean; zeros stay
    apart, because they decide the rank. The variance changes by at most (range / count)^2 / 4.
    Where the strengths have a tail, the largest ones are first replaced by their common mean until
    that has a weight of ``least``: 1/F, because none of F units is as strong as the rest of a tail.

    >>> tau, weight = compress([0.0, 1.0, 2.0, 2.001], [0.25] * 4, count=10)
    >>> tau.round(4).tolist(), weight.tolist()
    ([0.0, 1.0, 2.0005], [0.25, 0.25, 0.5])
    """
    tau = check_values("strengths", strengths).ravel()
    mass = check_values("weights", weights).ravel()
    if not tau.size:
        raise UserError("strengths=[]: must hold at least one value")
    order = np.argsort(tau, kind="stable")[::-1]
    last = int(np.searchsorted(np.cumsum(mass[order]), least * mass.sum()))
    tail = order[: last + 1]
    if mass[tail].sum() > 0:
        tau = tau.copy()
        tau[tail] = (mass[tail] @ tau[tail]) / mass[tail].sum()
    width = tau.max() / count if tau.max() > 0 else 1.0
    bins = np.ceil(tau / width).astype(int)
    total = np.bincount(bins, mass)
    mean = np.bincount(bins, mass * tau)[total > 0] / total[total > 0]
    return mean, total[total > 0] / total.sum()
