"""What one random block contributes to a product: its S-transform, through its free cumulants.

See :mod:`normjax.theory.matrix_products` for the equations. A block is described at a
parameter y, with u = y (1 + a^2 y) and the function K(u) of its random part, by

    psi = y (a^2 + (1 + a^2 y) K),      1 + psi = (1 + a^2 y)(1 + y K),
    1/S = (a^2 + (1 + a^2 y) K)(1 + y K).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from scipy.optimize import brentq


class Factor(Protocol):
    """One block of a product: GaussianBlock or TwoLayerBlock."""

    @property
    def a(self) -> float:
        """Weight of the identity."""

    @property
    def mean_square(self) -> float:
        """Mean of s^2."""

    @property
    def mean_fourth(self) -> float:
        """Mean of s^4."""

    @property
    def rank(self) -> float:
        """Fraction of singular values that are not 0."""

    def cumulants(self, u: Any) -> tuple[Any, Any]:
        """Return (K, dK/du) at u."""

    def cumulants_integral(self, u: Any) -> Any:
        """Return the integral of K from 0 to u."""

    def parameter(self, psi: Any, one_plus_psi: Any) -> tuple[Any, Any]:
        """Return (y, 1 + a^2 y) at real psi."""

    def branch_gap(self) -> float:
        """Return -1 - psi at the end of the real branch psi < -1; asked only where sigma < a."""


def transform(factor: Factor, y: Any, v: Any, one_plus_psi: Any) -> tuple[Any, Any, Any, Any]:
    """Return (log 1/S, psi) of one block and their derivatives by y, given y and v = 1 + a^2 y.

    1 + psi = v (1 + y K). Where sigma >= a the second factor loses its digits near psi = -1, and
    (1 + psi) / v takes its place, 1 + psi held constant; see :func:`vanishes`.
    """
    a2, slope = factor.a**2, 2 * v - 1
    k, dk = factor.cumulants(y * v)
    outer, d_outer = a2 + v * k, a2 * k + v * dk * slope
    if vanishes(factor):
        inner, d_log_inner = one_plus_psi / v, -a2 / v
    else:
        inner = 1 + y * k
        d_log_inner = (k + y * dk * slope) / inner
    log, d_log = np.log(outer) + np.log(inner), d_outer / outer + d_log_inner
    return log, y * outer, d_log, a2 + slope * (k + y * v * dk)


def vanishes(factor: Factor) -> bool:
    """Whether 1/S is 0 at psi = -1: sigma >= a, the smallest singular values go down to 0."""
    return bool(factor.cumulants(0.0)[0] >= factor.a**2)


def log_transform(factor: Factor, psi: Any, one_plus_psi: Any) -> tuple[Any, Any]:
    """Return (log 1/S, its derivative by psi) of one block at real psi."""
    log, _, d_log, d_psi = transform(factor, *factor.parameter(psi, one_plus_psi), one_plus_psi)
    with np.errstate(divide="ignore", invalid="ignore"):  # infinite at psi = -1 where sigma = a
        return log, d_log / d_psi + (1 / one_plus_psi if vanishes(factor) else 0.0)


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a function that changes its sign between ``low`` and ``high``.

    >>> root(lambda x: x * x - 2.25, 1.0, 2.0)
    1.5
    """
    found: Any = brentq(function, low, high, xtol=1e-300, rtol=1e-14, maxiter=1000)
    return float(found)
