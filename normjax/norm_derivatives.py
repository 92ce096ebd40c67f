"""The Jacobian of a norm as a value: what a row of the table of norms brings beside its function.

A norm that divides by a length of the point h, or acts feature by feature, has the Jacobian

    J = diag(w) (P - (1 - k) u u^T)

w is the gain over the scale, u the unit vector that the scale depends on (the direction of h, or
of h minus its mean), k what is left of the derivative along u, and P the identity or, where the
mean is removed, I - 1 1^T / d. RMSNorm and LayerNorm have k = eps / s^2; a division by r + e leaves
e / (r + e); a norm without eps leaves 0; an elementwise nonlinearity such as tanh has u = 0.

Where the scale is a length of another kind (of some features, or of x and its sum), the gradient of
the scale is not along u but along a v with v u = 1, and

    J = diag(w) (I - (1 - k) u v^T),        J u = k w u,        (v / w)^T J = k v^T

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
CLIP_EPS = 1e-6
"""What L2Clip adds to the length."""


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
      dual: v, (..., d), with v u = 1, zero where u is; None: u itself. Not beside ``centered``.
      removed: 1 - k, (...); None: that difference, where nothing better is known.
    """

    weight: Floats
    direction: Floats
    radial: Floats
    centered: bool = False
    dual: Floats | None = None
    removed: Any = None

    def __post_init__(self):
        if self.removed is None:
            object.__setattr__(self, "removed", np.asarray(1 - self.radial))

    @property
    def covector(self) -> Floats:
        """Return v, (..., d): u itself where the derivative has no other."""
        return self.direction if self.dual is None else self.dual

    def matrix(self) -> Floats:
        """Return J, (..., d, d), every entry right to rounding of its larger part.

        Off the diagonal -(1 - k) u_i v_j, on it what is left across u and k u_i v_i apart: where
        1 - k and k are given exactly no entry is a difference, but for the mean that is removed.
        """
        u, v, d = self.direction, self.covector, self.direction.shape[-1]
        outer, index = u[..., :, None] * v[..., None, :], np.arange(d)
        whole = (-1 / d if self.centered else 0.0) - self.removed[..., None, None] * outer
        across = self._tangent_diagonal() if self.dual is None else 1 - u * v
        whole[..., index, index] = across + self.radial[..., None] * u * v
        whole = np.where(self._has_tangent[..., None], whole, self.radial[..., None, None] * outer)
        return self.weight[..., :, None] * whole

    def jvp(self, v: Floats) -> Floats:
        """Return J v for v (..., d) in O(d)."""
        return self.weight * self._inner(v, self.direction, self.covector)

    def vjp(self, w: Floats) -> Floats:
        """Return J^T w for w (..., d) in O(d)."""
        return self._inner(self.weight * w, self.covector, self.direction)

    def radial_image(self) -> Floats:
        """Return J u = k w u, (..., d), without the cancellation of a general product."""
        return self.weight * self.direction * self.radial[..., None]

    def null_directions(self) -> NullDirections:
        """Return bases of all that one J (w of shape (d,)) maps to zero, exactly.

        J = diag(w) M with M = P - (1 - k) u v^T. The kernel of M is u where k = 0, and 1 where the
        mean is removed; on the left it is v, and 1, over w. A weight of zero adds e_i on the left,
        and on the right what M maps onto such e_i. What k > 0 leaves along u is small and not null.
        """
        w, u, k, d = self.weight, self.direction, float(self.radial), self.weight.shape[-1]
        v = self.covector
        kernel, image = np.zeros((d, 0)), np.zeros((d, 0))  # of M, and of M^T
        if np.any(u != 0) and k == 0:
            kernel, image = u[:, None], v[:, None] / np.linalg.norm(v)
        if self.centered:
            one = np.full(d, d**-0.5)
            kernel, image = np.column_stack([kernel, one]), np.column_stack([image, one])
        dead = np.flatnonzero(w == 0)
        axes = np.eye(d)[:, dead]
        # Right: M x in span(e_dead); M's range is what is orthogonal to the kernel of M^T. M only
        # moves things along u, so that one direction z with a part along v needs
        # M^-1 z ~ k z + (1 - k) <v, z> u.
        reached = axes @ _null_space(image[dead].T)
        along = v @ reached
        if k > 0 and np.linalg.norm(along) > d * np.finfo(float).eps:
            z = reached @ (along / np.linalg.norm(along))
            inverted = k * z + float(self.removed) * (v @ z) * u
            reached = np.column_stack([reached @ _null_space(along[None]), inverted])
        # Left: diag(w) x in the kernel of M^T, free where w = 0.
        combined = image @ _null_space(image[dead])
        inverse = np.divide(1.0, w, out=np.zeros(d), where=w != 0)
        left = np.column_stack([axes, inverse[:, None] * combined])
        return NullDirections(orthonormal(np.column_stack([kernel, reached])), orthonormal(left))

    @property
    def _has_tangent(self) -> NDArray[np.bool_]:
        # In so few dimensions nothing is orthogonal to u (and to the ones): only rounding is.
        few = self.direction.shape[-1] <= 1 + self.centered
        return ~(few & np.any(self.direction != 0, axis=-1, keepdims=True))

    def _inner(self, x: Floats, u: Floats, v: Floats) -> Floats:
        """Return (P - (1 - k) u v^T) x."""
        along = np.sum(v * x, axis=-1, keepdims=True)
        rest = x - x.mean(axis=-1, keepdims=True) if self.centered else x
        rest = rest - along * u
        rest = rest - np.sum(v * rest, axis=-1, keepdims=True) * u  # what rounding left along u
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

    def null_directions(self) -> NullDirections:
        """Return singular vectors of what one J (d, d) maps to zero, to d roundings of its norm."""
        if not np.all(np.isfinite(self.whole)):
            raise UserError("h: its derivative is NaN or infinite; look at where h comes from")
        left, s, right = np.linalg.svd(self.whole)
        null = s <= len(s) * np.finfo(float).eps * s[0]
        return NullDirections(right[null].T, left[:, null])


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
    x = _all_or_none(x)
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
    return NormDerivative(
        np.broadcast_to(weight, z.shape), unit(z), radial, centered, removed=removed
    )


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


def simple_rms_norm_derivative(x: Floats) -> NormDerivative:
    """RMSNorm without gain and eps: w = sqrt(d) / |h|, u = h / |h|, k = 0."""
    return _scaled_by_rms(x, None, 0.0, centered=False)


def l2_norm_derivative(x: Floats, gain: Floats | None = None) -> NormDerivative:
    """L2 norm and ScaleNorm: w = g / |h|, u = h / |h|, k = 0.

    >>> l2_norm_derivative(np.array([3.0, 4.0])).matrix().round(6)
    array([[ 0.128, -0.096],
           [-0.096,  0.072]])
    """
    scaled = (1.0 if gain is None else gain) * x.shape[-1] ** -0.5
    return _scaled_by_rms(x, scaled, 0.0, centered=False)


def rms_norm_eps_outside_derivative(
    x: Floats, gain: Floats | None = None, *, eps: float
) -> NormDerivative:
    """eps beside the root: w = g / (r + eps), u = h / |h|, k = eps / (r + eps), r = |h| / sqrt(d).

    >>> found = rms_norm_eps_outside_derivative(np.array([3.0, -3.0]), eps=1.0)
    >>> found.weight, found.radial
    (array([0.25, 0.25]), array(0.25))
    """
    x = _all_or_none(x)
    power = _power_of_two(np.maximum(np.max(np.abs(x), axis=-1, keepdims=True), eps))
    z, e = x / power, eps / power
    r = np.sqrt(np.mean(z * z, axis=-1, keepdims=True))
    total = r + e
    nonzero = np.where(total == 0, 1.0, total)
    with np.errstate(over="ignore"):
        weight = np.where(total == 0, 0.0, 1 / nonzero / power) * (1.0 if gain is None else gain)
    radial, removed = np.where(total == 0, 1.0, e / nonzero)[..., 0], (r / nonzero)[..., 0]
    weight = np.broadcast_to(weight, z.shape)
    return NormDerivative(weight, unit(z), radial, removed=removed)


def partial_rms_norm_derivative(
    x: Floats, gain: Floats | None = None, *, eps: float, share: float = 0.25
) -> NormDerivative:
    """pRMSNorm: w = g / s, k = eps / s^2, s of the first ceil(share d) features, f.

    u = h / |h|, and v = h_f |h| / |h_f|^2: what is divided is h, what the scale depends on h_f.
    """
    x = _all_or_none(x)
    first = np.arange(x.shape[-1]) < math.ceil(share * x.shape[-1])
    own = _scaled_by_rms(x[..., first], None, eps, centered=False)
    weight = own.weight[..., :1] * (1.0 if gain is None else gain)
    n = np.zeros(x.shape)
    n[..., first] = own.direction
    u = np.where(np.any(n != 0, axis=-1, keepdims=True), unit(x), 0.0)
    along = np.sum(n * u, axis=-1, keepdims=True)
    dual = n / np.where(along == 0, 1.0, along)
    removed = np.mean(np.square(own.weight * x[..., first]), axis=-1)
    return NormDerivative(
        np.broadcast_to(weight, x.shape), u, own.radial, dual=dual, removed=removed
    )


def crms_norm_derivative(x: Floats, *, eps: float) -> NormDerivative:
    """CRMSNorm: w = 1 / R, k = eps / R^2, R^2 = (|h|^2 + S^2) / (d + 1) + eps, S = sum(h).

    u = h / |h|, and v = (h + S) |h| / (|h|^2 + S^2).
    """
    x = _all_or_none(x)
    n = unit(x)
    total = n.sum(axis=-1, keepdims=True)
    square = np.sum(n * n, axis=-1, keepdims=True) + total**2  # 1 + S^2 / |h|^2, or 0
    whole = np.concatenate([x, -x.sum(axis=-1, keepdims=True)], axis=-1)
    own = _scaled_by_rms(whole, None, eps, centered=False)
    dual = (n + total) / np.where(square == 0, 1.0, square)
    removed = np.mean(np.square(own.weight * whole), axis=-1)
    return NormDerivative(own.weight[..., :-1], n, own.radial, dual=dual, removed=removed)


def l2_clip_derivative(x: Floats, *, threshold: float | None = None) -> NormDerivative:
    """L2Clip: the identity up to the threshold (w = 1, u = 0).

    Beyond it w = threshold / (|h| + e), u = h / |h|, k = e / (|h| + e), with e = 1e-6.
    """
    x, length = _all_or_none(x), x.shape[-1] ** 0.5
    threshold = length if threshold is None else threshold
    own = rms_norm_eps_outside_derivative(x, eps=CLIP_EPS / length)
    clipped = own.weight * (threshold / length)  # NaN where x is, and that is beyond
    passes = clipped[..., :1] >= 1
    return NormDerivative(
        np.where(passes, 1.0, clipped), np.where(passes, 0.0, own.direction),
        np.where(passes[..., 0], 1.0, own.radial),
        removed=np.where(passes[..., 0], 0.0, own.removed),
    )  # fmt: skip


def dynamic_tanh_derivative(
    x: Floats, gain: Floats | None = None, bias: Floats | None = None, alpha: Floats | float = 1.0
) -> NormDerivative:
    """DyT: J = diag(g alpha / cosh^2(alpha h)).

    >>> dynamic_tanh_derivative(np.array([0.0, 1.0]), alpha=0.5).weight.round(6)
    array([0.5     , 0.393224])
    """
    del bias
    return diagonal((1.0 if gain is None else gain) * alpha * _sech_square(alpha * x))


def dynamic_erf_derivative(
    x: Floats,
    gain: Floats | None = None,
    bias: Floats | None = None,
    alpha: Floats | float = 1.0,
    shift: Floats | float = 0.0,
) -> NormDerivative:
    """Derf: J = diag(g 2 alpha / sqrt(pi) exp(-(alpha h + shift)^2)).

    >>> dynamic_erf_derivative(np.array([0.0]), alpha=0.5).weight.round(6)
    array([0.56419])
    """
    del bias
    with np.errstate(over="ignore", under="ignore"):
        slope = np.exp(-np.square(alpha * x + shift))
    return diagonal((1.0 if gain is None else gain) * (2 / math.sqrt(math.pi)) * alpha * slope)


def seed_norm_derivative(
    x: Floats,
    gain: Floats | None = None,
    alpha: Floats | float = 1.0,
    beta: Floats | float = 0.0,
    *,
    eps: float,
) -> Matrices:
    """SeeDNorm: diag(alpha tanh(h . beta) + g) J_r + (alpha r) beta^T / cosh^2(h . beta).

    r(h) is RMSNorm without gain, J_r its derivative.
    """
    own, x = rms_norm_derivative(x, eps=eps), _all_or_none(x)
    beta = np.broadcast_to(beta, x.shape)
    product = np.sum(x * beta, axis=-1, keepdims=True)
    whole = alpha * np.tanh(product) + np.broadcast_to(1.0 if gain is None else gain, x.shape)
    turned = alpha * own.weight * x * _sech_square(product)
    return Matrices(whole[..., None] * own.matrix() + turned[..., None] * beta[..., None, :])


def gated_norm_derivative(
    x: Floats,
    gain: Floats | None = None,
    down: Floats | None = None,
    up: Floats | None = None,
    *,
    eps: float,
) -> NormDerivative | Matrices:
    """GatedNorm: (diag(t) + diag(z t (1 - t)) W_up^T diag(silu'(a)) W_down^T) J_z.

    z = RMSNorm(h), J_z its derivative, a = z W_down, t = sigmoid(silu(a) W_up).
    """
    own = rms_norm_derivative(x, gain, eps=eps)
    if down is None or up is None:
        return own
    z = own.weight * _all_or_none(x)
    a = z @ down
    t = _sigmoid((a * _sigmoid(a)) @ up)
    slope = _sigmoid(a) * (1 + a * _sigmoid(-a))
    turned = (z * t * (1 - t))[..., None] * ((up.T * slope[..., None, :]) @ down.T)
    turned[..., np.arange(x.shape[-1]), np.arange(x.shape[-1])] += t
    return Matrices(turned @ own.matrix())


def less_mean_derivative(x: Floats) -> NormDerivative:
    """Centring: J = I - 1 1^T / d (w = 1, u = 0).

    >>> less_mean_derivative(np.array([5.0, 7.0])).matrix()
    array([[ 0.5, -0.5],
           [-0.5,  0.5]])
    """
    whole = diagonal(np.where(np.isnan(_all_or_none(x)), np.nan, 1.0))
    return dataclasses.replace(whole, centered=True)


def affine_derivative(
    x: Floats, gain: Floats | None = None, shift: Floats | None = None
) -> NormDerivative:
    """A gain and a shift: J = diag(g)."""
    del shift
    return diagonal(np.broadcast_to(1.0 if gain is None else gain, x.shape))


def gradient_preserving_derivative(x: Floats, alpha: Floats) -> NormDerivative:
    """A shrinking by a learned number: J = (1 - SiLU(alpha)) I."""
    alpha = np.asarray(alpha)
    return diagonal((1 - alpha * _sigmoid(alpha)) * np.ones_like(x))


def all_passed_derivative(x: Floats, **parameters: Floats) -> NormDerivative:
    """What automatic differentiation takes a shrinking with a stop-gradient to have: J = I."""
    del parameters
    return diagonal(np.ones_like(x))


def _all_or_none(x: Floats) -> Floats:
    """Return x, NaN in all of a vector that is not finite: as norms with shared statistics do."""
    return np.where(np.all(np.isfinite(x), axis=-1, keepdims=True), x, np.nan)


def _sech_square(x: Floats) -> Floats:
    t = np.exp(-2 * np.abs(x))
    return 4 * t / np.square(1 + t)


def _sigmoid(x: Floats) -> Floats:
    t = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, t) / (1 + t)


def identity_derivative(
    x: Floats, gain: Floats | None = None, *, eps: float = 0.0
) -> NormDerivative:
    """No norm: J = I (w = 1, u = 0)."""
    del gain, eps
    return diagonal(np.ones_like(x))
