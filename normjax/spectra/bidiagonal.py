"""Golub-Kahan-Lanczos bidiagonalization with full reorthogonalization, guarded at breakdown.

The basis is in float64 on the host; the operator's products are computed in its own dtype. After m
steps

    J V = U B,     J^T U = V B^T + beta v e_m^T

with B upper bidiagonal. Where the process breaks down (an invariant subspace: identity, zero, low
rank) it goes on from a fresh direction, with a zero in B, so that repeated values are met again.

Sources: Golub and Kahan 1965; Simon and Zha 2000 for reorthogonalization; Li and Li 2005 for the
quadratic residual bound, |error| <= |residual|^2 / gap.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from normjax.errors import UserError
from normjax.spectra.dense import svd
from normjax.spectra.linearized import Linearized

Vector = NDArray[np.floating]

_ROUNDING = 16.0  # error of a product in units of roundoff, relative to the largest singular value


# --- the operator -------------------------------------------------------------------------------


class Operator:
    """Products with 2^-exponent J or its transpose, whichever has the smaller domain.

    They are counted and checked. The exponent takes what is found of J to about one, so that no
    square of a length leaves the range of float64.

    Attributes:
      domain, image: sides of the matrix.
      turned: whether it is J^T.
      exponent: of two.
      roundoff: of a product, relative to the largest singular value.
      products: how many were computed.
    """

    def __init__(self, function: Any, x: Any, *, widest: bool = True):
        if x is not None:
            self._inner = Linearized(function, x, widest=widest)
        elif hasattr(function, "matvec") and hasattr(function, "rmatvec"):
            self._inner = function
        else:
            raise UserError(
                "x: missing; pass the point at which the function is linearized, or an operator"
                " with matvec, rmatvec, shape and dtype"
            )
        rows, columns = (int(n) for n in self._inner.shape)
        self.turned = columns > rows
        self.domain, self.image = (rows, columns) if self.turned else (columns, rows)
        dtype = np.dtype(self._inner.dtype if self._inner.dtype is not None else np.float64)
        if dtype.kind == "c":
            raise UserError(f"operator of dtype {dtype}: must be real")
        epsilon = getattr(self._inner, "epsilon", None) or _machine_epsilon(dtype)
        self.roundoff = _ROUNDING * epsilon
        self.exponent = self._size(dtype)
        self.products = 0

    def _size(self, dtype: np.dtype) -> int:
        """Return the power of two that J is about as large as; 0 where it is zero."""
        z = np.random.default_rng(0).choice([-1.0, 1.0], size=self.domain)
        product = self._inner.rmatvec if self.turned else self._inner.matvec
        scales = isinstance(self._inner, Linearized)
        room = int(0.6 * jnp.finfo(dtype).maxexp) if scales else 0
        for exponent in (0, room, -room):
            image = np.asarray(product(z, exponent) if scales else product(z), np.float64)
            largest = float(np.abs(image).max(initial=0.0))
            if math.isfinite(largest) and largest > 0:
                return exponent + int(np.frexp(largest)[1])
        return 0

    def forward(self, v: Vector) -> Vector:
        """Return 2^-exponent J v (or of J^T where turned)."""
        return self._checked(self._inner.rmatvec if self.turned else self._inner.matvec, v)

    def backward(self, u: Vector) -> Vector:
        """Return 2^-exponent J^T u (or of J where turned)."""
        return self._checked(self._inner.matvec if self.turned else self._inner.rmatvec, u)

    def _checked(self, product, vector: Vector) -> Vector:
        self.products += 1
        if isinstance(self._inner, Linearized):
            result = product(vector, self.exponent)
        else:
            result = np.ldexp(np.asarray(product(vector), np.float64).ravel(), -self.exponent)
        if not np.isfinite(result).all():
            raise UserError(
                "operator: a product with the Jacobian is NaN or infinite; check the function and"
                " the point, or compute in a wider dtype"
            )
        return result


def _machine_epsilon(dtype: np.dtype) -> float:
    inexact = jnp.issubdtype(dtype, jnp.floating)  # also knows bfloat16
    return float(jnp.finfo(dtype if inexact else np.float64).eps)


# --- one chain ----------------------------------------------------------------------------------


class Chain:
    """Bidiagonalization of the operator outside of locked directions (rows of two matrices)."""

    def __init__(self, operator: Operator, locked, steps: int, scale: float, start: Vector, rng):
        self._operator, self._rng, self.scale = operator, rng, scale
        self._locked_left, self._locked_right = locked
        self.most = min(steps, operator.domain - len(self._locked_right))
        self._right = np.empty((self.most + 1, operator.domain))
        self._left = np.empty((self.most, operator.image))
        self._alpha: list[float] = []
        self._beta: list[float] = []
        self._right[0] = self._fresh(start, self._right[:0], self._locked_right)

    def __len__(self) -> int:
        return len(self._alpha)

    @property
    def full(self) -> bool:
        """Whether no further step is allowed or possible."""
        return len(self) >= self.most

    @property
    def broke_down(self) -> bool:
        """Whether the last step ended in an invariant subspace."""
        return bool(self._beta) and self._beta[-1] == 0

    @property
    def ended(self) -> bool:
        """Whether the space of the start vector is exhausted: what follows has no part of it."""
        return self.broke_down or (bool(self._alpha) and self._alpha[-1] == 0)

    def step(self) -> None:
        """Add one left and one right direction."""
        j = len(self)
        u = self._operator.forward(self._right[j])
        if j:
            u -= self._beta[-1] * self._left[j - 1]
        alpha, u = self._orthogonal(u, self._left[:j], self._locked_left)
        self._left[j] = u
        self._alpha.append(alpha)
        w = self._operator.backward(u) - alpha * self._right[j]
        if j + 1 + len(self._locked_right) >= self._operator.domain:
            self._beta.append(0.0)  # the whole space: B is exact
            return
        beta, w = self._orthogonal(w, self._right[: j + 1], self._locked_right)
        self._beta.append(beta)
        self._right[j + 1] = w

    def _orthogonal(self, vector: Vector, basis: Vector, locked: Vector) -> tuple[float, Vector]:
        """Return length and direction outside the basis; 0 and a fresh direction at breakdown."""
        vector = _without(_without(vector, basis, locked), basis, locked)
        length = float(np.linalg.norm(vector))
        self.scale = max(self.scale, length)
        if length > 0.25 * self._operator.roundoff * self.scale:
            return length, vector / length
        return 0.0, self._fresh(self._rng.normal(size=vector.shape), basis, locked)

    def _fresh(self, vector: Vector, basis: Vector, locked: Vector) -> Vector:
        for _ in range(3):
            vector = _without(_without(vector, basis, locked), basis, locked)
            length = np.linalg.norm(vector)
            if length > 1e-6:
                return vector / length
            vector = self._rng.normal(size=vector.shape)
        raise RuntimeError("no direction left; please report the operator")

    def small(self) -> tuple[Vector, Vector, Vector, Vector, Vector]:
        """Return left vectors, values, right vectors (rows), residuals, and bounds on errors."""
        matrix = np.diag(self._alpha) + np.diag(self._beta[:-1], 1)
        left, values, right = svd(matrix, "the bidiagonal matrix of operator")
        residuals = self._beta[-1] * np.abs(left[-1])
        bounds = residuals
        for _ in range(2):  # once more, with what the first pass says about the values below
            bounds = residual_bounds(values, residuals, np.append(values[1:] + bounds[1:], np.inf))
        return left, values, right, residuals, bounds

    def vectors(self, left: Vector, right: Vector, which) -> tuple[Vector, Vector]:
        """Return the approximate singular vectors ``which`` as rows."""
        m = len(self)
        return left[:, which].T @ self._left[:m], right[which] @ self._right[:m]


def _without(vector: Vector, *bases: Vector) -> Vector:
    for basis in bases:
        if len(basis):
            vector = vector - basis.T @ (basis @ vector)
    return vector


def residual_bounds(values: Vector, residuals: Vector, below: Vector) -> Vector:
    """Return bounds on the errors of the largest values from the residuals of their vectors.

    Either the residual of all of them together, plus what the next value may be larger than this
    one; or for any l >= i the residual of the l first, squared, over the gap that separates these
    from the rest; whichever is less.

    Args:
      values: (k,) descending.
      residuals: (k,) norms.
      below: (k,) estimates from above of the value after each.
    """
    square = np.cumsum(residuals**2)
    gap = values - below
    quadratic = np.where(gap > 0, square / np.where(gap > 0, gap, 1.0), np.inf)
    best = np.minimum.accumulate(quadratic[::-1])[::-1]
    last = below[-1] if np.isfinite(below[-1]) else 0.0
    return np.minimum(best, np.sqrt(square[-1]) + np.maximum(last - values, 0.0))
