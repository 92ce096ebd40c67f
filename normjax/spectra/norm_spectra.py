"""All singular values of the Jacobian of RMSNorm and LayerNorm, for any gain, in O(d^2).

With r = |h|, u = h / r, s^2 = r^2 / d + eps, q = eps / s^2 (what the norm leaves of the radial
direction) and G = diag(gain), RMSNorm has J = G (I - (1 - q) u u^T) / s, hence

    s^2 J J^T = G (I - (1 - q^2) u u^T) G

whose eigenvalues x are the roots of  sum_j w_j / (p_j - x) = 0  with a pole at each gain_j^2 of
weight (1 - q^2) u_j^2 and one more at 0 of weight q^2. That pole is what makes the smallest
singular value as accurate as the others: it is never formed as 1 - (1 - q).

LayerNorm projects on the vectors of mean zero too,

    s^2 J J^T = G (I - 1 1^T / d - (1 - q^2) u u^T) G,

with u the direction of the centred h and s^2 its mean square plus eps. Two secular equations in
turn: first that of G (I - 1 1^T / d) G, whose weights are all equal; then, with its roots m_k as
poles, the one of the remaining change, whose weights follow from

    w_k = (sum_j u_j / (p_j - m_k))^2 / sum_j 1 / (p_j - m_k)^2.

Equal gains and entries u_j = 0 take no special tolerance: equal poles are merged, which splits off
their copies exactly, and poles of weight zero are singular values themselves.

>>> import numpy as np
>>> rms_norm_singular_values([3.0, 4.0], 1.0, eps=0.0)         # 1 / s = sqrt(2) / 5, and 0
array([0.28284271, 0.        ])
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normjax.errors import UserError
from normjax.norm_derivatives import Matrices, NormDerivative
from normjax.spectra.secular import Poles, Vector, secular_roots

_SMALLEST_GAIN = {False: 1e-140, True: 1e-50}
"""Nonzero gains over the largest, by whether the mean is removed: squares of smaller ones leave the
range, and of LayerNorm's weights w_k fourth powers do."""


@dataclasses.dataclass(frozen=True)
class _Point:
    """Where a norm is linearized.

    Attributes:
      h: (d,) the given vector times a power of two.
      length: of h (of the centred h for LayerNorm); 0 where there is no radial direction.
      direction: (d,) the same at length 1, or zeros.
      gain: (d,) |gain| over its largest entry.
      unit: largest |gain| / s, the singular value that belongs to an eigenvalue 1.
      radial: q = eps / s^2.
      removed: 1 - q^2.
    """

    h: Vector
    length: float
    direction: Vector
    gain: Vector
    unit: float
    radial: float
    removed: float


def rms_norm_singular_values(
    h: ArrayLike, gain: ArrayLike | None = None, eps: float = 1e-6
) -> Vector:
    """Return all singular values of the Jacobian of RMSNorm at ``h``.

    Args:
      h: (d,) finite real vector.
      gain: (d,) any sign, zeros and repeated values allowed; a scalar; or None for 1. A uniform
        gain needs no equation: g / s (d - 1 times) and g eps / s^3.
      eps: added to the mean square; 0 is allowed. At h = 0 with eps = 0 the derivative is zero by
        convention, as in :mod:`normjax.norms`.

    Returns:
      (d,) float64, descending, each right to a few units of roundoff relative to itself, the
      smallest too; exactly zero where the Jacobian is singular.

    Raises:
      UserError: h, gain or eps not finite, of a wrong shape, or eps negative; nonzero gains that
        differ by more than 1e140.

    >>> rms_norm_singular_values([1.0, 1.0], [2.0, 0.5], eps=0.0).round(8)
    array([1.45773797, 0.        ])
    """
    return _rms_values(_point(h, gain, eps, centered=False))


def _rms_values(point: _Point) -> Vector:
    if _is_uniform(point.gain):
        return _uniform(point, zeros=0)
    groups = _groups(point)
    weights = point.removed * np.bincount(groups.index, point.direction**2)
    copies = np.repeat(groups.gain, groups.count - 1)
    zero = groups.gain[0] == 0
    root_weight = math.hypot(point.radial, math.sqrt(weights[0]) if zero else 0.0)
    nonzero = groups.gain > 0
    poles = Poles(groups.gain[nonzero], np.zeros(int(nonzero.sum())))
    return _assembled(point, _with_zero_pole(poles, weights[nonzero], root_weight), copies)


def layer_norm_singular_values(
    h: ArrayLike, gain: ArrayLike | None = None, eps: float = 1e-6
) -> Vector:
    """Return all singular values of the Jacobian of LayerNorm at ``h``.

    Args:
      h: (d,) finite real vector.
      gain: (d,), a scalar, or None for 1. A uniform gain gives g / s (d - 2 times), g eps / s^3
        and 0.
      eps: added to the variance; 0 is allowed. At constant h with eps = 0 the derivative is zero
        by convention.

    Returns:
      (d,) float64, descending. At least one is exactly zero: a shift of h changes nothing. The
      others are right relative to themselves, as for RMSNorm, unless a weight w_k cancels to far
      below 1 at a gain far below the others (its relative error is roundoff over its square root).

    Raises:
      UserError: h, gain or eps not finite, of a wrong shape, or eps negative; nonzero gains that
        differ by more than 1e50.

    >>> layer_norm_singular_values([1.0, 2.0, 3.0], 2.0, eps=0.0).round(8)
    array([2.44948974, 0.        , 0.        ])
    """
    return _layer_values(_point(h, gain, eps, centered=True))


def _layer_values(point: _Point) -> Vector:
    if _is_uniform(point.gain):
        return _uniform(point, zeros=1)
    groups = _groups(point)
    own = Poles(groups.gain, np.zeros(len(groups.gain)))
    between = secular_roots(own, groups.count.astype(np.float64), distances=True)
    # Within a group of equal gains: what of u is not constant there, at the group's own pole.
    inner = point.removed * np.bincount(groups.index, groups.inner**2)
    outer = point.removed * _coupling(own, between, groups, point.length or 1.0)
    zero = groups.gain[0] == 0
    root_weight = math.hypot(point.radial, math.sqrt(inner[0]) if zero else 0.0)
    repeated = np.flatnonzero((groups.count > 1) & (groups.gain > 0))
    place = np.concatenate([2 * repeated, 2 * np.arange(len(between)) + 1])  # they interlace
    order = np.argsort(place)
    poles = Poles(
        np.concatenate([own.root[repeated], between.root])[order],
        np.concatenate([own.offset[repeated], between.offset])[order],
    )
    weights = np.concatenate([inner[repeated], outer])[order]
    copies = np.repeat(groups.gain, np.maximum(groups.count - 2, 0))
    return _assembled(point, _with_zero_pole(poles, weights, root_weight), copies)


def derivative_singular_values(derivative: NormDerivative | Matrices) -> Vector:
    """Return all singular values of J = diag(w) (P - (1 - k) u v^T) at one point, of any norm.

    With v = u: the |w_i| themselves without a direction, |w| and |w| k where all |w_i| are equal,
    else the roots of a secular equation, as above with k for q. With another v and equal |w_i|,

        |w| (d - 2 times),  |w| s  and  |w| k / s,    s^2 = (t + (1 - k) |v| sqrt(t + 2 k)) / 2,
        t = 2 k + (1 - k)^2 |v|^2,

    because the two squares add up to t and have the product k^2. Else, and for a derivative that is
    a matrix, those of the matrix.

    Args:
      derivative: with a weight (d,) of any signs; see :mod:`normjax.norm_derivatives`.

    Returns:
      (d,) float64, descending.

    Raises:
      UserError: a weight that is not finite; nonzero weights too far apart, as above.

    >>> from normjax.norm_derivatives import diagonal
    >>> derivative_singular_values(diagonal(np.array([-1.0, 3.0])))
    array([3., 1.])
    """
    if isinstance(derivative, Matrices):
        return np.linalg.svd(_finite("J", derivative.matrix()), compute_uv=False)
    weight = np.abs(_finite("weight", derivative.weight))
    if derivative.dual is not None:
        return _oblique_values(derivative, weight)
    u, k = derivative.direction, float(derivative.radial)
    if not derivative.centered and not np.any(u != 0):
        return np.sort(weight)[::-1]
    largest = float(weight.max())
    relative = _relative_gains(weight, largest, derivative.centered)
    length = float(np.any(u != 0))
    point = _Point(u, length, u, relative, largest, k, float(derivative.removed) * (1 + k))
    return _layer_values(point) if derivative.centered else _rms_values(point)


def _oblique_values(derivative: NormDerivative, weight: Vector) -> Vector:
    k, length = float(derivative.radial), float(np.linalg.norm(derivative.covector))
    if not length:
        return np.sort(weight)[::-1]
    if not _is_uniform(weight):
        return np.linalg.svd(derivative.matrix(), compute_uv=False)
    if len(weight) == 1:
        return weight * k
    removed = float(derivative.removed) * length
    t = 2 * k + removed**2
    largest = math.sqrt((t + removed * math.sqrt(t + 2 * k)) / 2)
    result = np.ones(len(weight))
    result[0], result[-1] = largest, k / largest
    return result * weight


# --- the secular equations ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Coordinates of equal gain taken together.

    Attributes:
      gain: (m,) distinct gains, ascending.
      count: (m,) how many coordinates have each.
      index: (d,) the group of each coordinate.
      start: (m,) one entry of h of each group.
      mean: (m,) mean over the group of what h is more than that.
      inner: (d,) h minus the mean of its group, in units of the length of h.
    """

    gain: Vector
    count: NDArray[np.int64]
    index: NDArray[np.int64]
    start: Vector
    mean: Vector
    inner: Vector


def _groups(point: _Point) -> _Groups:
    gain, first, index, count = np.unique(
        point.gain, return_index=True, return_inverse=True, return_counts=True
    )
    # Differences of given numbers, so that near-equal entries of h keep their digits.
    start = point.h[first]
    difference = point.h - start[index]
    mean = np.bincount(index, difference) / count
    inner = difference - mean[index]
    return _Groups(gain, count, index, start, mean, inner / (point.length or 1.0))


def _coupling(own: Poles, between: Poles, groups: _Groups, length: float) -> Vector:
    """Return the weight of u at each root of the first equation of LayerNorm.

    Because sum_j count_j / (p_j - m) = 0 there, any constant may be taken from u; taking its value
    at the nearest pole removes the largest term, which would cancel against the others.
    """
    result = np.empty(len(between))
    rows = max(1, (1 << 17) // len(own))
    nearest = np.searchsorted(own.root, between.root)
    count = groups.count.astype(np.float64)
    repeated = bool(groups.mean.any())
    for start in range(0, len(between), rows):
        part = slice(start, start + rows)
        inverse = 1.0 / own.matrix_minus(between[part])
        norm = np.einsum("ij,ij,j->i", inverse, inverse, count)
        contrast = groups.start - groups.start[nearest[part], None]
        if repeated:
            contrast += groups.mean - groups.mean[nearest[part], None]
        inverse *= contrast
        result[part] = np.einsum("ij,j->i", inverse, count / length) ** 2 / norm
    return result


def _with_zero_pole(poles: Poles, weights: Vector, root_weight: float) -> Vector:
    """Return the square roots of the len(poles) roots, with one more pole at 0.

    Args:
      poles: ascending, above 0.
      weights: not negative; at a pole of weight zero the pole is a root.
      root_weight: the square root of the weight of the pole at 0.
    """
    weight = np.concatenate([[root_weight**2], weights])
    every = Poles(np.concatenate([[0.0], poles.root]), np.concatenate([[0.0], poles.offset]))
    kept = weight > 0
    roots = np.concatenate([secular_roots(every[kept], weight[kept]).value, every[~kept].value])
    result = np.sqrt(np.sort(roots))
    # A root far below the first pole is w_0 / sum(w_j / p_j): no square of root_weight is needed.
    value = poles.value
    total = float(np.sum(weights / value))
    if len(value) and total > 0 and (root_weight**2 / total) < 1e-18 * value[0]:
        result[0] = root_weight / math.sqrt(total)
    return result


def _assembled(point: _Point, values: Vector, copies: Vector) -> Vector:
    """Return all d singular values: solved for, split off, and zeros for the rest."""
    result = np.zeros(len(point.gain))
    result[: len(values) + len(copies)] = np.concatenate([values, copies])
    return np.sort(result)[::-1] * point.unit


def _uniform(point: _Point, zeros: int) -> Vector:
    d = len(point.gain)
    result = np.full(d, point.unit)
    if zeros:
        result[-1] = 0.0
    if d > zeros:
        result[d - 1 - zeros] *= point.radial if point.length else 1.0
    return result


def _is_uniform(gain: Vector) -> bool:
    return bool((gain == gain[0]).all())


# --- arguments ----------------------------------------------------------------------------------


def _point(h: ArrayLike, gain: ArrayLike | None, eps: float, centered: bool) -> _Point:
    vector = _finite("h", h)
    if vector.ndim != 1 or not len(vector):
        raise UserError(
            f"h of shape {vector.shape}: must be one vector (d,), d >= 1; pass one token"
        )
    d = len(vector)
    gains = np.abs(_finite("gain", 1.0 if gain is None else gain))
    if gains.shape not in ((), (d,)):
        raise UserError(f"gain of shape {gains.shape}: must be a scalar or of shape ({d},), as h")
    if not (math.isfinite(eps) and eps >= 0):
        raise UserError(f"eps={eps}: must be finite and at least 0; the usual value is 1e-6")
    largest = float(gains.max())
    relative = np.broadcast_to(_relative_gains(gains, largest, centered), (d,))
    exponent = int(np.frexp(np.abs(vector).max())[1])
    scaled = np.ldexp(vector, -exponent)
    radial = _centered(scaled) if centered else scaled
    length = float(np.linalg.norm(radial))
    with np.errstate(over="ignore"):
        rms = float(np.ldexp(length / math.sqrt(d), exponent))
    root_eps = math.sqrt(eps)
    s = math.hypot(rms, root_eps)
    if not math.isfinite(s) or (s and not math.isfinite(largest / s)):
        raise UserError(f"h, gain: 1/s={1 / s:.3g} times the gain leaves float64; rescale them")
    q, p = ((root_eps / s) ** 2, (rms / s) ** 2) if s else (1.0, 0.0)
    direction = radial / (length or 1.0)
    return _Point(scaled, length, direction, relative, largest / s if s else 0.0, q, p * (1 + q))


def _relative_gains(gains: Vector, largest: float, centered: bool) -> Vector:
    """Return gains over the largest one, checked for their range."""
    relative = gains / (largest or 1.0)
    least = _SMALLEST_GAIN[centered]
    if ((relative < least) & (relative > 0)).any():
        raise UserError(
            f"gain: nonzero entries below {least:g} of the largest: their powers leave the range of"
            " float64; set them to 0"
        )
    return relative


def _centered(vector: Vector) -> Vector:
    """Subtract the mean, and then the mean of what rounding left."""
    mean = min(max(math.fsum(vector) / len(vector), vector.min()), vector.max())
    vector = vector - mean
    return vector - math.fsum(vector) / len(vector)


def _finite(name: str, values: ArrayLike) -> Vector:
    array = np.asarray(values)
    if array.dtype.kind not in "fiub" and "float" not in array.dtype.name:
        raise UserError(f"{name} of dtype {array.dtype}: must be real numbers; cast it to float64")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise UserError(
            f"{name}: must be finite; it holds {int((~np.isfinite(array)).sum())} NaN or inf"
        )
    return array
