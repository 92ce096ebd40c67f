"""Singular values of a I + sigma X with Gaussian X: edges, density, distribution, moments.

X is (d, d) with independent entries of variance 1/d, and d is large. It is the model of a block's
Jacobian at initialization: a is the weight of the residual path, sigma the size of the branch.
The Stieltjes transform m of the squared singular values x solves a cubic in w = 1 + sigma^2 m,

    x w^3 - x w^2 + (sigma^2 - 1) w + 1 = 0        (a = 1)

and the density of x is Im m / pi (Dozier and Silverstein 2007, "On the empirical distribution of
eigenvalues of large dimensional information-plus-noise-type matrices", eq. 1.1, at A = I, c = 1).
In the singular value s = sqrt(x) itself, with v = s w and any a, it becomes a cubic that is regular
everywhere, at s = 0 and at a = 0 too,

    v^3 - s v^2 + (sigma^2 - a^2) v + a^2 s = 0,        density of s = 2 Im v / (pi sigma^2),

whose discriminant is a quadratic in s^2: its roots are the edges. At a = 0 this is the quarter
circle on [0, 2 sigma]. Nothing here is sampled or integrated numerically.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normjax.errors import UserError

Floats = NDArray[np.float64]


def check_number(name: str, value: float, least: float | None = None) -> float:
    """Return ``value`` as a float.

    Raises:
      UserError: it is not a finite number, or below ``least``.

    >>> check_number("sigma", 1)
    1.0
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(f"{name}={value!r}: must be one number") from None
    if not math.isfinite(number):
        raise UserError(f"{name}={number}: must be finite; check the weights it was computed from")
    if least is not None and number < least:
        raise UserError(f"{name}={number}: must be at least {least:g}; pass its absolute value")
    return number


def check_values(name: str, values: ArrayLike) -> Floats:
    """Return ``values`` as a float64 array of any shape.

    Raises:
      UserError: an entry is not a finite number.
    """
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{name}: must be real numbers, not {type(values).__name__}") from None
    bad = int(np.sum(~np.isfinite(array)))
    if bad:
        raise UserError(f"{name}: {bad} of {array.size} entries are not finite; remove them first")
    return array


def quantile(cdf, edges: tuple[float, float], p: ArrayLike) -> Floats:
    """Return the values s with cdf(s) = p by bisection between the edges.

    Args:
      cdf: a nondecreasing function of an array.
      edges: the ends of the support.
      p: probabilities in [0, 1], any shape.

    Returns:
      float64, the shape of p, each within 1e-15 of the support's width.

    Raises:
      UserError: p outside [0, 1].
    """
    p = check_values("p", p)
    if p.size and not (p.min() >= 0 and p.max() <= 1):
        raise UserError(f"p={p.min():g}..{p.max():g}: must be between 0 and 1")
    low, high = np.full(p.shape, edges[0]), np.full(p.shape, edges[1])
    for _ in range(52):
        middle = (low + high) / 2
        below = cdf(middle) < p
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.where(p >= 1, edges[1], np.where(p <= 0, edges[0], (low + high) / 2))


@dataclasses.dataclass(frozen=True)
class GaussianBlock:
    """The singular values of a I + sigma X, X of independent Gaussian entries of variance 1/d.

    Attributes:
      sigma: size of the random part, at least 0; ||sigma X||_F^2 / d = sigma^2.
      a: weight of the identity, at least 0; 0 leaves sigma X alone.

    Raises:
      UserError: sigma or a negative or not finite.

    >>> GaussianBlock(0.3).edges()
    (0.6009161784386656, 1.4446019335757063)
    >>> GaussianBlock(0.5, a=0.0).edges()
    (0.0, 1.0)
    """

    sigma: float
    a: float = 1.0

    def __post_init__(self):
        check_number("sigma", self.sigma, 0.0)
        check_number("a", self.a, 0.0)

    @property
    def mean_square(self) -> float:
        """Mean of s^2, that is ||J||_F^2 / d: a^2 + sigma^2."""
        return self.a**2 + self.sigma**2

    @property
    def mean_fourth(self) -> float:
        """Mean of s^4: a^4 + 4 a^2 sigma^2 + 2 sigma^4."""
        return self.a**4 + 4 * self.a**2 * self.sigma**2 + 2 * self.sigma**4

    def _unit(self) -> tuple[float, float, float]:
        """Return (a, sigma) divided by the larger one, and that one."""
        scale = max(self.a, self.sigma)
        return (self.a / scale, self.sigma / scale, scale) if scale else (0.0, 0.0, 1.0)

    def edges(self) -> tuple[float, float]:
        """Return the smallest and the largest singular value.

            s^2 = [8 a^4 + 20 a^2 sigma^2 - sigma^4 -+ sigma (sigma^2 + 8 a^2)^(3/2)] / (8 a^2)

        and smallest 0 where sigma >= a. The product of the two roots, (a^2 - sigma^2)^3 / a^2,
        gives the one that would be a difference of nearly equal numbers.

        >>> GaussianBlock(1.0).edges()[1] ** 2        # 27/4
        6.75
        """
        a, sigma, scale = self._unit()
        upper, shifted = _squared_edges(a, sigma)
        lower = math.sqrt(shifted) / a if sigma < a else 0.0
        return scale * lower, scale * math.sqrt(upper)

    def density(self, s: ArrayLike) -> Floats:
        """Return the density of the singular values at s, 0 outside the edges.

        Args:
          s: singular values, any shape.

        Returns:
          float64, the shape of s, in units of 1/s; its integral over s is 1.

        Raises:
          UserError: s not finite; or sigma = 0, where all values are a and there is no density.

        >>> float(GaussianBlock(1.0, a=0.0).density(0.0))        # 2/pi
        0.6366197723675813
        """
        s, scale = self._prepared(s)
        root = _cubic_root(s / scale, *self._unit()[:2])
        return 2 * root.imag / (math.pi * (self.sigma / scale) ** 2) / scale

    def squared_density(self, x: ArrayLike) -> Floats:
        """Return the density of the squared singular values at x > 0: density(sqrt(x)) / 2 sqrt(x).

        >>> float(GaussianBlock(0.5).squared_density(1.0)) > 0
        True
        """
        root = np.sqrt(np.maximum(check_values("x", x), 0))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(root > 0, self.density(root) / (2 * root), 0.0)

    def cdf(self, s: ArrayLike) -> Floats:
        """Return the fraction of singular values up to s.

            F(s) = [ (s/sigma^2) Im v (1 - a^2/|v|^2) + arg(1 - s/v) ] / pi

        from the integral of m, which is elementary in w. For sigma = 0 it is the step at a.

        >>> float(GaussianBlock(0.5).cdf(10.0))
        1.0
        """
        values = check_values("s", s)
        if self.sigma == 0:
            return np.where(values >= self.a, 1.0, 0.0)
        a, sigma, scale = self._unit()
        s = values / scale
        v = _cubic_root(s, a, sigma)
        inside = v.imag > 0
        v = np.where(inside, v, 1j)
        bulk = s * v.imag / sigma**2 * (1 - a**2 / (v.real**2 + v.imag**2))
        part = np.clip((bulk + np.angle(1 - s / v)) / math.pi, 0.0, 1.0)
        lower, upper = self.edges()
        return np.where(inside, part, np.where(values >= (lower + upper) / 2, 1.0, 0.0))

    def quantile(self, p: ArrayLike) -> Floats:
        """Return the singular values below which a fraction p lies; see :func:`quantile`.

        >>> float(GaussianBlock(0.3).quantile(1.0)) == GaussianBlock(0.3).edges()[1]
        True
        """
        return quantile(self.cdf, self.edges(), p)

    def _prepared(self, s: ArrayLike) -> tuple[Floats, float]:
        values = check_values("s", s)
        if self.sigma == 0:
            raise UserError(
                f"sigma=0: all singular values are {self.a:g} and have no density; use cdf or edges"
            )
        return values, self._unit()[2]

    # --- as a factor of a product (see matrix_products) -------------------------------------------

    @property
    def rank(self) -> float:
        """Fraction of singular values that are not 0."""
        return 1.0 if max(self.a, self.sigma) > 0 else 0.0

    def cumulants(self, u):
        """Return (K, dK/du) at u; K = sigma^2: a Gaussian has no higher cumulants."""
        return self.sigma**2 + 0 * u, 0 * u

    def cumulants_integral(self, u):
        """Return the integral of K from 0 to u."""
        return self.sigma**2 * u

    def parameter(self, psi, one_plus_psi):
        """Return (y, 1 + a^2 y), psi = y (a^2 + (1 + a^2 y) sigma^2): the y that is 0 at 0."""
        difference = (self.a - self.sigma) * (self.a + self.sigma)
        root = np.sqrt(difference**2 + 4 * (self.a * self.sigma) ** 2 * one_plus_psi)
        total = self.mean_square + root
        return 2 * psi / total, (root - difference + 2 * self.a**2 * one_plus_psi) / total

    def branch_gap(self) -> float:
        """Return -1 - psi where the two roots :meth:`parameter` chooses from meet (sigma < a).

        >>> GaussianBlock(0.5).branch_gap()
        0.5625
        """
        if self.sigma == 0:
            return math.inf
        return ((self.a / self.sigma - self.sigma / self.a) / 2) ** 2


def _squared_edges(a: float, sigma: float) -> tuple[float, float]:
    """Return (x_upper, a^2 x_lower): the second is negative where the lower edge is 0."""
    total = 8 * a**4 + 20 * (a * sigma) ** 2 - sigma**4
    spread = sigma * (sigma**2 + 8 * a**2) ** 1.5
    cube = (a - sigma) ** 3 * (a + sigma) ** 3
    if total >= 0:
        upper = (total + spread) / (8 * a**2) if a else 0.0
        return upper, cube / upper if upper else 0.0
    return 8 * -cube / (spread - total), (total - spread) / 8


def _cubic_root(s: Floats, a: float, sigma: float) -> NDArray[np.complex128]:
    """Return the root v with Im v >= 0 of the cubic; Im v = 0 outside the support.

    Cardano's formula, with the discriminant in factored form and the difference of the two cube
    roots as (difference of cubes) / (sum of squares): no cancellation near an edge.
    """
    upper, shifted = _squared_edges(a, sigma)
    x = s * s
    low = math.sqrt(shifted) if shifted > 0 else 0.0
    above = (a * s - low) * (a * s + low) if shifted > 0 else a**2 * x - shifted
    edge = math.sqrt(upper)
    discriminant = np.maximum((edge - s) * (edge + s) * above / 27, 0)
    discriminant = np.where(s >= 0, discriminant, 0)
    root = np.sqrt(discriminant)
    b = (sigma - a) * (sigma + a)
    p = b - x / 3
    q = s * (-2 * x / 27 + (sigma**2 + 2 * a**2) / 3)
    larger = -np.copysign(np.cbrt(np.abs(q) / 2 + root), q)
    with np.errstate(divide="ignore", invalid="ignore"):
        smaller = np.where(larger != 0, -p / (3 * larger), 0)
        squares = larger**2 + larger * smaller + smaller**2
        imaginary = np.where(root > 0, math.sqrt(3) * root / squares, 0)
    return (s / 3 - (larger + smaller) / 2) + 1j * imaginary
