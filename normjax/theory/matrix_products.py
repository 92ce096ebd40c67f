"""Singular values of a product of independent random blocks, for any depth: J = T_L ... T_1.

Each T_l is a_l I plus a random matrix whose law does not change under rotations (GaussianBlock, or
TwoLayerBlock for W_2 D W_1). For large d such blocks are free, and S-transforms multiply
(Voiculescu 1987, "Multiplication of certain noncommuting random variables"): with

    chi(psi) = psi / (1 + psi) * prod_l S_l(psi),        1 / chi = x,

psi(x) = integral t / (x - t) over the law of the squared singular values t, so that -Im psi / pi is
the density of log x. A block enters through its free cumulants, the function K of

    psi = y (a^2 + (1 + a^2 y) K(u)),   1 / S = (a^2 + (1 + a^2 y) K)(1 + y K),   u = y (1 + a^2 y),

which is S = 2 / (a^2 + sigma^2 (1 + 2 psi) + sqrt((a^2 + sigma^2)^2 + 4 a^2 sigma^2 psi)) for
K = sigma^2. From it follow, with no matrix drawn:

- the edges: sigma_max^2 = 1 / max of chi over psi > 0, sigma_min^2 = 1 / min of chi over psi < -1;
- the Lyapunov exponents of infinite depth: -log S(-t) / 2 at the fraction t (Newman 1986, "The
  distribution of Lyapunov exponents: exact results for random matrices"). They are NOT the singular
  values of a finite product: 16 blocks with sigma = 0.25 have sigma_max 4.33, while the sum of
  their top exponents is exp(16 lambda) = 1.62;
- the whole density, by following psi from the negative axis of x, where it is real, to the positive
  one, and the distribution function, an elementary function of psi.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from normjax.errors import UserError
from normjax.theory.free_factors import Factor, log_transform, root, vanishes
from normjax.theory.product_density import distribution, follow
from normjax.theory.random_matrices import Floats, check_values, quantile


@dataclasses.dataclass(frozen=True)
class ProductLaw:
    """The singular values of a product of independent blocks, in any order.

    Attributes:
      factors: at least one block, each with its own sigma and a.

    Raises:
      UserError: no factor, or one that is identically zero.

    >>> from normjax.theory.random_matrices import GaussianBlock
    >>> smallest, largest = ProductLaw([GaussianBlock(0.25)] * 16).edges()
    >>> round(smallest, 4), round(largest, 4)
    (0.2039, 4.3268)
    """

    factors: Sequence[Factor]

    def __post_init__(self):
        if not len(self.factors):
            raise UserError("factors=[]: must hold at least one block")
        for number, factor in enumerate(self.factors):
            if not factor.mean_square > 0:
                raise UserError(f"factors[{number}]: a = sigma = 0, so the product is 0; remove it")

    @cached_property
    def _groups(self) -> list[tuple[Factor, int]]:
        return list(Counter(self.factors).items())

    @property
    def log_mean_square(self) -> float:
        """Log of ||J||_F^2 / d: the sum of log(a_l^2 + sigma_l^2)."""
        return math.fsum(n * math.log(f.mean_square) for f, n in self._groups)

    @property
    def mean_square(self) -> float:
        """Mean of s^2: the product of a_l^2 + sigma_l^2; infinite beyond the range of float64."""
        return _exp(self.log_mean_square)

    @property
    def mean_fourth(self) -> float:
        """Mean of s^4: mean_square^2 (1 + sum of the blocks' relative variances of s^2)."""
        spread = math.fsum(n * (f.mean_fourth / f.mean_square**2 - 1) for f, n in self._groups)
        return _exp(2 * self.log_mean_square) * (1 + spread)

    @property
    def rank(self) -> float:
        """Fraction of singular values that are not 0."""
        return min(f.rank for f, _ in self._groups)

    # --- edges ------------------------------------------------------------------------------------

    @cached_property
    def _log_edges(self) -> tuple[float, float]:
        if all(f.mean_fourth <= f.mean_square**2 for f, _ in self._groups):  # multiples of I
            return (self.log_mean_square / 2,) * 2
        psi = self._stationary(lambda t: (math.exp(t), 1 + math.exp(t)), 60.0)
        upper = (np.log1p(1 / psi[0]) + self._sum(*psi)[0]) / 2
        if any(vanishes(f) for f, _ in self._groups):
            return -math.inf, float(upper)
        end = min(60.0, math.log(min(f.branch_gap() for f, _ in self._groups)) - 1e-13)
        psi = self._stationary(lambda t: (-1 - math.exp(t), -math.exp(t)), end)
        lower = (math.log(psi[1] / psi[0]) + self._sum(*psi)[0]) / 2
        return float(lower), float(upper)

    def _stationary(self, psi: Callable[[float], tuple[float, float]], end: float):
        """Return the (psi, 1 + psi) where d log x / d psi = 0, x = (1 + psi) / psi prod 1/S_l."""

        def excess(t: float) -> float:
            value = psi(t)
            return math.log(value[0] * value[1] * self._sum(*value)[1])

        # psi (1 + psi) d(log 1/S) / d psi grows from 0 with |psi|: one root, met from small psi
        # on, because far beyond it a TwoLayerBlock's y comes too near to its pole.
        high = min(end, 0.0) - 40
        while high < end and excess(high) <= 0:
            high = min(high + 2, end)
        if excess(high) <= 0:
            return psi(high)
        return psi(root(excess, high - 60, high))

    def _sum(self, psi: float, one_plus_psi: float) -> tuple[float, float]:
        logs, slopes = 0.0, 0.0
        for factor, count in self._groups:
            log, slope = log_transform(factor, psi, one_plus_psi)
            logs, slopes = logs + count * float(log), slopes + count * float(slope)
        return logs, slopes

    def log_edges(self) -> tuple[float, float]:
        """Return the natural logarithms of the edges, within about 1e-12; -inf for a lower edge 0.

        >>> from normjax.theory.random_matrices import GaussianBlock
        >>> ProductLaw([GaussianBlock(3.0, a=0.0)] * 1000).log_edges()[1] > 1000
        True
        """
        return self._log_edges

    def edges(self) -> tuple[float, float]:
        """Return the smallest and largest singular value; 0 or infinite beyond float64's range."""
        lower, upper = self._log_edges
        return _exp(lower), _exp(upper)

    # --- infinite depth ---------------------------------------------------------------------------

    def lyapunov(self, fraction: ArrayLike) -> Floats:
        """Return Lyapunov exponents per block: the mean over blocks of -log S_l(-t) / 2.

        For one block this is log(y) / 2, y = [1 + sigma^2 (1 - 2 t) + sqrt((1 + sigma^2)^2 -
        4 sigma^2 t)] / 2 (a = 1). They belong to the factors repeated without end, in which d
        singular values separate as exp(n lambda); see the module's text for finite depth.

        Args:
          fraction: t = i/d in [0, 1), any shape; 0 gives the largest exponent.

        Returns:
          float64, the shape of t, in nats per block; -inf beyond the rank.

        Raises:
          UserError: a fraction outside [0, 1).

        >>> from normjax.theory.random_matrices import GaussianBlock
        >>> float(ProductLaw([GaussianBlock(1.0)]).lyapunov(0.0))      # log(1 + sigma^2) / 2
        0.34657359027997264
        """
        t = check_values("fraction", fraction)
        if t.size and not (t.min() >= 0 and t.max() < 1):
            raise UserError(f"fraction={t.min():g}..{t.max():g}: must be in [0, 1)")
        flat, total = t.ravel(), np.zeros(t.size)
        within = flat < self.rank
        for factor, count in self._groups:
            psi, one_plus_psi = -flat[within], 1 - flat[within]
            total[within] += count * log_transform(factor, psi, one_plus_psi)[0]
        total[~within] = -math.inf
        return (total / (2 * len(self.factors))).reshape(t.shape)

    # --- density ----------------------------------------------------------------------------------

    def log_density(self, log_s: ArrayLike) -> Floats:
        """Return the density of log s at ``log_s``: -2 Im psi / pi; 0 outside the edges.

        Args:
          log_s: natural logarithms of singular values, any shape.

        Returns:
          float64, the shape of log_s; integrates to the rank (1 unless a block without identity is
          narrower than d).

        Raises:
          UserError: log_s not finite, or all blocks multiples of the identity (no density).
        """
        log_s = check_values("log_s", log_s)
        return self._inside(log_s, lambda q, _: -2 * (1 / np.expm1(-q)).imag / math.pi, 0.0, 0.0)

    def density(self, s: ArrayLike) -> Floats:
        """Return the density of the singular values at s > 0, 0 outside the edges.

        >>> from normjax.theory.random_matrices import GaussianBlock
        >>> block = GaussianBlock(0.5)
        >>> bool(abs(ProductLaw([block]).density(1.2) - block.density(1.2)) < 1e-12)
        True
        """
        s = check_values("s", s)
        with np.errstate(divide="ignore"):
            usable = np.where(s > 0, np.log(np.where(s > 0, s, 1)), 0.0)
        return np.where(s > 0, self.log_density(usable) / np.where(s > 0, s, 1), 0.0)

    def log_cdf(self, log_s: ArrayLike) -> Floats:
        """Return the fraction of singular values whose natural logarithm is at most ``log_s``.

        F = 1 + Im{ log(1 + psi) - sum_l [2 u K - int_0^u K - log(1 + y K)] } / pi
        """
        log_s = check_values("log_s", log_s)
        part = self._inside(
            log_s, lambda q, ys: distribution(self._groups, q, ys), 1 - self.rank, 1.0
        )
        return np.clip(part, 1 - self.rank, 1.0)

    def cdf(self, s: ArrayLike) -> Floats:
        """Return the fraction of singular values up to s; see :meth:`log_cdf`."""
        s = check_values("s", s)
        with np.errstate(divide="ignore"):
            values = self.log_cdf(np.log(np.where(s > 0, s, 1)))
        return np.where(s > 0, values, np.where(s == 0, 1 - self.rank, 0.0))

    def quantile(self, p: ArrayLike) -> Floats:
        """Return the singular values below which a fraction p lies, found in log s.

        Quantiles of a law whose lower edge is 0 are resolved down to exp(-700).
        """
        lower, upper = self._log_edges
        return np.exp(quantile(self.log_cdf, (max(lower, -700.0), upper), p))

    def _inside(self, log_s: Floats, value: Callable, below: float, above: float) -> Floats:
        """Apply ``value`` to psi (see product_density) inside the edges, constants outside."""
        lower, upper = self._log_edges
        if lower == upper:
            if below == above:
                raise UserError(f"factors: all singular values are {_exp(upper):g}: no density")
            return np.where(log_s >= upper, above, below)
        flat = log_s.ravel()
        inside = (flat > lower) & (flat < upper)
        result = np.where(flat >= upper, above, below).astype(float)
        if inside.any():
            q, ys = follow(self._groups, self.rank, 2 * flat[inside])
            solved = ~np.isnan(q)  # elsewhere the rest of the spectrum is too little to count
            inside[inside] = solved
            result[inside] = value(q[solved], ys[solved])
        return result.reshape(log_s.shape)


def _exp(x: float) -> float:
    return math.exp(x) if x < 709.78 else math.inf
