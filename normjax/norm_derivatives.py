"""The Jacobian of a norm as a value: what a row of the table of norms brings beside its function.

A norm that divides by a length of the point h, or acts feature by feature, has the Jacobian

    J = diag(w) (P - (1 - k) u u^T)

w is the gain over the scale, u the unit vector that the scale depends on (the direction of h, or
of h minus its mean), k what is left of the derivative along u, and P the identity or, where the
mean is removed, I - 1 1^T / d. RMSNorm and LayerNorm have k = eps / s^2; a division by r + e leaves
e / (r + e); a norm without eps leaves 0; an elementwise nonlinearity such as tanh has u = 0.

Both k and 1 - k are kept where both are known: k = 1 - (1 - k) would lose six digits at a mean
square of 1 and eps = 1e-6, twelve at 1e6, and 1 - k as many where eps is the larger. NumPy in
float64, no JAX: exact to rounding and independent of the 64-bit mode.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from normjax.errors import UserError

Floats = NDArray[np.float64]


class NullDirections(NamedTuple):
    """What a Jacobian J does not see and what it does not reach.

    Attributes:
      right: (..., d, m), orthonormal columns with J right = 0.
      left: (..., d, m), orthonormal columns with left^T J = 0.
    """

    right: Floats
    left: Floats


@dataclasses.dataclass(frozen=True)
class NormDerivative:
    """The derivative J = diag(w) (P - (1 - k) u u^T) of a norm at one or many points.

    Attributes:
      weight: w, (..., d).
      direction: u, (..., d); unit length, or zero where the scale does not depend on the point.
      radial: k, (...), the factor left along u; J u = k w u.
      centered: whether P removes the mean (then u has mean zero).
      removed: 1 - k, (...); None: that difference, where nothing better is known.
    """

    weight: Floats
    direction: Floats
    radial: Floats
    centered: bool = False
    removed: Any = None

    def __post_init__(self):
        if self.removed is None:
            object.__setattr__(self, "removed", np.asarray(1 - self.radial))

    def matrix(self) -> Floats:
        """Return J, (..., d, d), every entry right to rounding of its larger part.

        Off the diagonal -(1 - k) u_i u_j, on it what is orthogonal to u and k u_i^2 apart: where
        1 - k or k is given exactly no entry is a difference, but for the mean that is removed.
        """
        u, d = self.direction, self.direction.shape[-1]
        outer = u[..., :, None] * u[..., None, :]
        whole = -self.removed[..., None, None] * outer - (1 / d if self.centered else 0.0)
        index = np.arange(d)
        whole[..., index, index] = self._tangent_diagonal() + self.radial[..., None] * u * u
        whole = np.where(self._has_tangent[..., None], whole, self.radial[..., None, None] * outer)
        return self.weight[..., :, None] * whole

    def jvp(self, v: Floats) -> Floats:
        """Return J v for v (..., d) in O(d)."""
        return self.weight * self._symmetric(v)

    def vjp(self, w: Floats) -> Floats:
        """Return J^T w for w (..., d) in O(d)."""
        return self._symmetric(self.weight * w)

    def radial_image(self) -> Floats:
        """Return J u = k w u, (..., d), without the cancellation of a general product."""
        return self.weight * self.direction * self.radial[..., None]

    def null_directions(self) -> NullDirections:
        """Return bases of all that one J (w of shape (d,)) maps to zero, exactly.

        J = diag(w) M with M = P - (1 - k) u u^T. The kernel of M is u where k = 0, and 1 where the
        mean is removed; on the left it is that over w. A weight of zero adds e_i on the left, and
        on the right what M maps onto such e_i. What k > 0 leaves along u is small and not null.
        """
        w, u, k, d = self.weight, self.direction, float(self.radial), self.weight.shape[-1]
        kernel = np.zeros((d, 0))  # of M
        if np.any(u != 0) and k == 0:
            kernel = u[:, None]
        if self.centered:
            kernel = np.column_stack([kernel, np.full(d, d**-0.5)])
        dead = np.flatnonzero(w == 0)
        axes = np.eye(d)[:, dead]
        # Right: M v in span(e_dead); M's range is what is orthogonal to its kernel. M only
        # stretches along u, so that one direction z with a part along u needs
        # M^-1 z ~ k z + (1 - k) <u, z> u.
        reached = axes @ _null_space(kernel[dead].T)
        along = u @ reached
        if k > 0 and np.linalg.norm(along) > d * np.finfo(float).eps:
            z = reached @ (along / np.linalg.norm(along))
            inverted = k * z + float(self.removed) * (u @ z) * u
            reached = np.column_stack([reached @ _null_space(along[None]), inverted])
        # Left: diag(w) x in the kernel of M, free where w = 0.
        combined = kernel @ _null_space(kernel[dead])
        inverse = np.divide(1.0, w, out=np.zeros(d), where=w != 0)
        left = np.column_stack([axes, inverse[:, None] * combined])
        return NullDirections(orthonormal(np.column_stack([kernel, reached])), orthonormal(left))

    @property
    def _has_tangent(self) -> NDArray[np.bool_]:
        # In so few dimensions nothing is orthogonal to u (and to the ones): only rounding is.
        few = self.direction.shape[-1] <= 1 + self.centered
        return ~(few & np.any(self.direction != 0, axis=-1, keepdims=True))

    def _symmetric(self, v: Floats) -> Floats:
        """Return (P - (1 - k) u u^T) v."""
        u = self.direction
        along = np.sum(u * v, axis=-1, keepdims=True)
        rest = v - v.mean(axis=-1, keepdims=True) if self.centered else v
        rest = rest - along * u
        rest = rest - np.sum(u * rest, axis=-1, keepdims=True) * u  # what rounding left along u
        return self._has_tangent * rest + self.radial[..., None] * along * u

    def _tangent_diagonal(self) -> Floats:
        """The diagonal of P - u u^T; at most one entry would be lost to cancellation."""
        u, d = self.direction, self.direction.shape[-1]
        diagonal = 1 - u * u - (1 / d if self.centered else 0.0)
        top = np.argmax(np.abs(u), axis=-1)[..., None]
        largest = np.take_along_axis(u, top, axis=-1)
        others = u + largest / (d - 1) if self.centered and d > 1 else u.copy()
        np.put_along_axis(others, top, 0.0, axis=-1)
        exact = np.sum(others * others, axis=-1, keepdims=True)
        exact *= (d - 1) / d if self.centered else 1.0
        old = np.take_along_axis(diagonal, top, axis=-1)
        np.put_along_axis(diagonal, top, np.where(largest**2 > 0.5, exact, old), axis=-1)
        return diagonal


@dataclasses.dataclass(frozen=True)
class Matrices:
    """A derivative of no special form, (..., d, d): what a norm has whose row gives a matrix."""

    whole: Floats

    @property
    def weight(self) -> Floats:
        """The diagonal, (..., d)."""
        return np.diagonal(self.whole, axis1=-2, axis2=-1)

    def matrix(self) -> Floats:
        """Return J, (..., d, d)."""
        return self.whole

    def jvp(self, v: Floats) -> Floats:
        """Return J v for v (..., d)."""
        return np.einsum("...ij,...j->...i", self.whole, v)

    def vjp(self, w: Floats) -> Floats:
        """Return J^T w for w (..., d)."""
        return np.einsum("...ij,...i->...j", self.whole, w)


def diagonal(weight: Floats) -> NormDerivative:
    """Return the derivative of a function that acts feature by feature: J = diag(w)."""
    return NormDerivative(weight, np.zeros_like(weight), np.ones(weight.shape[:-1]))


def _power_of_two(x: Floats) -> Floats:
    """A power of two near x >= 0; 1 for 0. Dividing by it is exact and keeps squares in range."""
    exponent = np.frexp(x)[1]
    return np.where(x > 0, np.ldexp(1.0, np.clip(exponent, -1000, 1000)), 1.0)


def unit(x: Any) -> Any:
    """Return x / |x| along the last axis of NumPy's or JAX's floats, and zeros for a zero vector.

    At any scale, in the dtype of x. A vector with a NaN or an infinity has no direction: NaN.

    >>> unit(np.array([3e-200, 4e-200])).round(12)
    array([0.6, 0.8])
    """
    xp = x.__array_namespace__()
    largest, info = xp.max(xp.abs(x), axis=-1, keepdims=True), xp.finfo(x.dtype)
    # Dividing by a power of two near the largest is exact and keeps squares in range; its inverse,
    # by which a compiler multiplies, is a normal number too.
    exponent = xp.clip(xp.frexp(largest)[1], info.minexp, info.maxexp - 2)
    z = x / xp.ldexp(xp.ones_like(largest), exponent)
    length = xp.sqrt(xp.sum(z * z, axis=-1, keepdims=True))
    length = xp.where(length == 0, xp.ones_like(length), length)
    return z / xp.where(length < xp.inf, length, xp.nan)  # no comparison with a NaN holds


def orthonormal(columns: Floats) -> Floats:
    """Return an orthonormal basis of independent columns (..., d, m) of any lengths.

    The first keeps its direction: for m = 1 it is divided by its length.
    """
    if not columns.shape[-1]:
        return columns
    rows = unit(np.swapaxes(columns, -1, -2))
    if columns.shape[-1] == 1:
        return np.swapaxes(rows, -1, -2)
    q, r = np.linalg.qr(np.swapaxes(rows, -1, -2))
    return q * np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)[..., None, :]


def spanned(*bases: Floats) -> Floats:
    """Return an orthonormal basis of the span of some orthonormal bases (..., d, m).

    What of a later one is less than 1e-8 outside of those before it, at every point, is left out.
    """
    found = bases[0]
    for basis in bases[1:]:
        for j in range(basis.shape[-1]):
            rest = basis[..., j : j + 1]
            for _ in range(2):
                rest = rest - found @ (np.swapaxes(found, -1, -2) @ rest)
            if np.any(np.linalg.norm(rest, axis=-2) > 1e-8):
                found = np.concatenate([found, orthonormal(rest)], axis=-1)
    return found


def _null_space(a: Floats) -> Floats:
    """Orthonormal basis (n, k) of the null space of a finite a (m, n), m or n small."""
    if a.shape[0] == 0:
        return np.eye(a.shape[1])
    if not np.all(np.isfinite(a)):
        raise UserError("h: its direction is NaN or infinite; look at where h comes from")
    _, s, vt = np.linalg.svd(a)
    rank = int(np.sum(s > max(a.shape) * np.finfo(float).eps * max(1.0, s.max(initial=0.0))))
    return vt[rank:].T


def _scaled_by_rms(x: Floats, gain: Floats | None, eps: float, centered: bool) -> NormDerivative:
    root_eps = math.sqrt(eps)
    x = np.where(np.all(np.isfinite(x), axis=-1, keepdims=True), x, np.nan)  # as the norm itself
    power = _power_of_two(np.maximum(np.max(np.abs(x), axis=-1, keepdims=True), root_eps))
    z, root = x / power, root_eps / power
    if centered:
        # As the norm itself: a rounded mean outside the extremes would give a constant vector a
        # direction made of rounding noise.
        low, high = z.min(-1, keepdims=True), z.max(-1, keepdims=True)
        z = z - np.clip(z.mean(-1, keepdims=True), low, high)
        z = z - z.mean(-1, keepdims=True)
    s = np.sqrt(np.mean(z * z, axis=-1, keepdims=True) + root * root)
    nonzero = np.where(s == 0, 1.0, s)
    # At h = 0 and eps = 0 nothing is defined; the derivative is zero there by convention.
    with np.errstate(over="ignore"):  # 1/s of a subnormal h; callers refuse what is not finite
        weight = np.where(s == 0, 0.0, 1 / nonzero / power) * (1.0 if gain is None else gain)
    radial = np.where(s == 0, 1.0, (root / nonzero) ** 2)[..., 0]
    removed = np.mean((z / nonzero) ** 2, axis=-1)
    return NormDerivative(np.broadcast_to(weight, z.shape), unit(z), radial, centered, removed)


def rms_norm_derivative(x: Floats, gain: Floats | None = None, *, eps: float) -> NormDerivative:
    """RMSNorm: w = g / s, u = h / |h|, k = eps / s^2 with s^2 = |h|^2 / d + eps.

    Args:
      x: the points h, (..., d) float64.
      gain: (d,), a scalar or None.
      eps: inside the root.

    >>> rms_norm_derivative(np.array([3.0, 4.0]), eps=0.0).matrix().round(6)   # (I - u u^T) / s
    array([[ 0.181019, -0.135765],
           [-0.135765,  0.101823]])
    """
    return _scaled_by_rms(x, gain, eps, centered=False)


def layer_norm_derivative(
    x: Floats, gain: Floats | None = None, bias: Floats | None = None, *, eps: float
) -> NormDerivative:
    """LayerNorm: as RMSNorm with c = h - mean(h) for h, and P = I - 1 1^T / d; see there.

    >>> layer_norm_derivative(np.array([1.0, 3.0]), eps=3.0).matrix()   # d = 2: eps/s^3 u u^T
    array([[ 0.1875, -0.1875],
           [-0.1875,  0.1875]])
    """
    del bias
    return _scaled_by_rms(x, gain, eps, centered=True)


def identity_derivative(
    x: Floats, gain: Floats | None = None, *, eps: float = 0.0
) -> NormDerivative:
    """No norm: J = I (w = 1, u = 0)."""
    del gain, eps
    return diagonal(np.ones_like(x))
