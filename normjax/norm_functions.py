"""Normalizations as pure functions, right for every finite input.

Most norms divide a vector x of d features by a scale and multiply it by a gain,

    y = gain * x / s + bias,        s = sqrt(mean(x^2) + eps)        (RMSNorm)

with eps **inside** the root, in units of the mean square, unless a function says otherwise.
Statistics are computed in float32 at least (float64 stays float64), whatever the input's dtype; the
result is cast to that dtype last.

Range. A mean of squares overflows float32 for entries from 1.8e19 on and vanishes below 1e-19; both
give a silently wrong 0 or infinity. Here x is first divided by a power of two near its largest
entry, which is exact, so that the result is right for every finite input, subnormal numbers
included. (XLA reads subnormal floats as zero; they are recovered from their bits.) A zero vector
gives zeros; its derivative is gain/sqrt(eps), and zero by convention where the norm has no eps, or
eps = 0, and it is undefined. A vector with a NaN or an infinity is NaN in every feature, and so are
its derivatives: its scale is not known, and zeros beside the bad entry would look like an answer.
(For one infinite entry the limit is [0, .., sqrt(d), .., 0]; but an infinity is an overflow, not a
limit.) What acts feature by feature (tanh, erf, an affine map) shares nothing: a bad feature is its
own. One bound: at a constant vector beyond 8e34 the derivative of LayerNorm in float32 comes out as
zero, since sqrt(eps) relative to it is no normal float.

Derivatives are hand-written with ``jax.custom_jvp`` because autodiff would square the range problem
again. The rules are themselves made of such functions, so every order, forward and reverse, works.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from normjax.errors import UserError
from normjax.norm_derivatives import CLIP_EPS

# --- range-safe building blocks -----------------------------------------------------------------


def _statistics_dtype(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _bits(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"int{jnp.finfo(x.dtype).bits}"))


def _power_of_two(bits: Array, dtype: Any) -> Array:
    """The largest power of two not above x > 0, kept where it and its inverse are normal."""
    info = jnp.finfo(dtype)
    exponent = bits & jnp.asarray(((1 << info.nexp) - 1) << info.nmant, bits.dtype)
    power = jax.lax.bitcast_convert_type(exponent, dtype)
    return jnp.clip(power, info.smallest_normal, 0.25 / info.smallest_normal)


def power_of_two_near(largest: Array) -> tuple[Array, Array]:
    """Return (c, 1 / c) for numbers >= 0: c a power of two near them, both of them normal numbers.

    What is at most ``largest`` can be multiplied by 1 / c, squared and summed; dividing by
    ``largest`` itself would not do: near the end of the range its inverse is read as zero. 1 / c is
    walled off from the compiler, which would move it out of the sum of squares.
    """
    c = _power_of_two(_bits(largest), largest.dtype)
    return c, jax.lax.optimization_barrier(1 / c)


def _at_most(bound: float, product: Array) -> Array:
    """Return a product that is known not to pass ``bound``, walled off from the compiler.

    XLA reassociates products: (a r)(a r) becomes (a a)(r r), which overflows where a r does not.
    It does not look through a minimum.
    """
    return jnp.minimum(product, bound)


def _scaled(x: Array, r: Array) -> Array:
    """x r, with subnormal entries of x read from their bits."""
    info = jnp.finfo(x.dtype)
    bits = _bits(x)
    mantissa = bits & jnp.asarray((1 << info.nmant) - 1, bits.dtype)
    is_subnormal = (bits >> info.nmant) & ((1 << info.nexp) - 1) == 0
    significand = jnp.where(bits < 0, -mantissa, mantissa).astype(x.dtype) * 2.0**-info.nmant
    significand = _at_most(1.0, significand)
    return jnp.where(is_subnormal, significand * _at_most(1.0, info.smallest_normal * r), x * r)


@jax.custom_jvp
def _rescale(x: Array, floor: Array) -> tuple[Array, Array]:
    """Return (x r, r): r is the inverse of a power of two near max(|x|_max, floor)."""
    # Non-negative floats are ordered as their bits are, subnormal ones included.
    magnitude = _bits(x) & jnp.asarray(jnp.iinfo(_bits(x).dtype).max, _bits(x).dtype)
    largest = jnp.maximum(jnp.max(magnitude, axis=-1, keepdims=True), _bits(floor))
    # Where all is zero, a huge r would only turn a large tangent into infinity times zero.
    r = jnp.where(largest == 0, 1, 1 / _power_of_two(largest, x.dtype))
    return _scaled(x, r), r


@_rescale.defjvp
def _rescale_jvp(primals, tangents):
    z, r = _rescale(*primals)
    return (z, r), (tangents[0] * r, jnp.zeros_like(r))  # r is piecewise constant


@jax.custom_jvp
def _multiply(x: Array, r: Array) -> Array:
    """x r for a power of two r that is taken as constant, subnormal entries of x included."""
    return _scaled(x, r)


@_multiply.defjvp
def _multiply_jvp(primals, tangents):
    return _multiply(*primals), tangents[0] * primals[1]


@jax.custom_jvp
def _center(z: Array) -> Array:
    """Subtract the mean, twice: once as rounded, once as what rounding left of it."""
    mean = jnp.mean(z, axis=-1, keepdims=True)
    # A mean lies between the extremes; a rounded one need not, and then a constant vector would
    # not become exactly zero and its rounding noise would be normalized to size one.
    mean = jnp.clip(mean, jnp.min(z, -1, keepdims=True), jnp.max(z, -1, keepdims=True))
    z = z - mean
    return z - jnp.mean(z, axis=-1, keepdims=True)


@_center.defjvp
def _center_jvp(primals, tangents):
    (v,) = tangents
    return _center(*primals), v - jnp.mean(v, axis=-1, keepdims=True)


def _inverse(s: Array) -> Array:
    """Return 1 / s of a scale, 0 where it is 0, NaN where it is none.

    What is rescaled is at most 2 where x is finite: s is NaN or infinite for a point that is not.
    """
    inverse = jnp.where(s > 0, 1 / jnp.where(s > 0, s, 1), 0)
    return jnp.where(s < jnp.inf, inverse, jnp.nan)


@jax.custom_jvp
def _unit_rms(z: Array, root_eps: Array) -> tuple[Array, Array]:
    """Return (z / s, 1 / s) with s = sqrt(mean(z^2) + root_eps^2), and zeros where s = 0."""
    inverse = _inverse(jnp.sqrt(jnp.mean(z * z, axis=-1, keepdims=True) + root_eps * root_eps))
    return z * inverse, inverse


@_unit_rms.defjvp
def _unit_rms_jvp(primals, tangents):
    # d(z/s) = (v - y <y, v>/d) / s  and  d(1/s) = -<y, v>/d / s^2, with y = z/s.
    v = tangents[0]
    y, inverse = _unit_rms(*primals)
    p = jnp.mean(y * v, axis=-1, keepdims=True)
    return (y, inverse), ((v - y * p) * inverse, -inverse * inverse * p)


@jax.custom_jvp
def _over_rms_plus(z: Array, e: Array) -> tuple[Array, Array]:
    """Return (z / (s + e), 1 / (s + e)) with s = sqrt(mean(z^2)), and zeros where s + e = 0.

    Where z is so small that its square vanishes, e is near 1 and s does not count.
    """
    inverse = _inverse(jnp.sqrt(jnp.mean(z * z, axis=-1, keepdims=True)) + e)
    return z * inverse, inverse


@_over_rms_plus.defjvp
def _over_rms_plus_jvp(primals, tangents):
    # ds = <n, v>/d with n = z/s, hence d(z/(s + e)) = (v - y <n, v>/d) / (s + e).
    v = tangents[0]
    y, inverse = _over_rms_plus(*primals)
    n, _ = _unit_rms(primals[0], jnp.zeros_like(primals[1]))
    p = jnp.mean(n * v, axis=-1, keepdims=True)
    return (y, inverse), ((v - y * p) * inverse, -inverse * inverse * p)


@jax.custom_jvp
def _tanh(x: Array) -> Array:
    return jnp.tanh(x)


@jax.custom_jvp
def _sech_square(x: Array) -> Array:
    """The slope of tanh. 1 - tanh(x)^2 would have no digits left from x = 9 on in float32."""
    t = jnp.exp(-2 * jnp.abs(x))
    return 4 * t / jnp.square(1 + t)


_tanh.defjvps(lambda v, y, x: v * _sech_square(x))
_sech_square.defjvps(lambda v, y, x: -2 * v * _tanh(x) * y)


@jax.custom_jvp
def _less_mean(x: Array) -> Array:
    """x - mean(x), where the sum may leave the range though the result does not."""
    z, r = _rescale(x, jnp.zeros((), x.dtype))
    return jnp.where(_all_finite(x), _center(z) * (1 / r), jnp.nan)


@_less_mean.defjvp
def _less_mean_jvp(primals, tangents):
    (x,), (v,) = primals, tangents
    known = jnp.where(_all_finite(x), jnp.ones((), x.dtype), jnp.nan)
    return _less_mean(x), (v - jnp.mean(v, axis=-1, keepdims=True)) * known


def _all_finite(x: Array) -> Array:
    return jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)


def _standardize(x: Array, eps: float, center: Callable[[Array], Array] | None) -> Array:
    root_eps = jnp.asarray(math.sqrt(eps), x.dtype)
    z, root_eps = _rescaled_together(x, root_eps)
    if center is not None:
        # What centring leaves may be far smaller than x: its square, and that of root_eps beside
        # it, must not vanish either.
        z, root_eps = _rescaled_together(center(z), root_eps)
    return _unit_rms(z, root_eps)[0]


def _rescaled_together(x: Array, root_eps: Array) -> tuple[Array, Array]:
    z, r = _rescale(x, root_eps)
    return z, jax.lax.stop_gradient(_at_most(2.0, root_eps * r))


# --- pure functions -----------------------------------------------------------------------------


def _check_eps(eps: float) -> None:
    if not (math.isfinite(eps) and eps >= 0):
        raise UserError(f"eps={eps}: must be finite and at least 0; the usual value is 1e-6")


def _check_shape(name: str, parameter: Array | None, x: Array) -> None:
    if parameter is not None and jnp.shape(parameter) not in ((), (x.shape[-1],)):
        raise UserError(
            f"{name} of shape {jnp.shape(parameter)}: must be a scalar or of shape"
            f" ({x.shape[-1]},), the last axis of x"
        )


def _affine(y: Array, gain: Array | None, bias: Array | None, dtype: Any) -> Array:
    if gain is not None:
        y = y * jnp.asarray(gain, y.dtype)
    if bias is not None:
        y = y + jnp.asarray(bias, y.dtype)
    return y.astype(dtype)


def rms_norm(x: Array, gain: Array | None = None, *, eps: float = 1e-6) -> Array:
    """RMSNorm: y = gain * x / sqrt(mean(x^2) + eps).

    Args:
      x: (..., d), any floating dtype; leading axes are free.
      gain: (d,), a scalar, or None for no gain.
      eps: added to the mean square, inside the root; 0 is allowed.

    Returns:
      (..., d) in the dtype of x. Statistics and the product with the gain are in float32 at least.

    Raises:
      UserError: eps negative or not finite, or a gain of another shape.

    >>> import jax.numpy as jnp
    >>> rms_norm(jnp.array([3.0, 4.0]), eps=0.0) * jnp.sqrt(0.5)   # the direction of [3, 4]
    Array([0.6, 0.8], dtype=float32)

    References:
      Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", eq. 4 (there without eps).
    """
    return _norm(x, gain, None, eps, center=None)


def layer_norm(
    x: Array, gain: Array | None = None, bias: Array | None = None, *, eps: float = 1e-6
) -> Array:
    """LayerNorm: y = gain * c / sqrt(mean(c^2) + eps) + bias, with c = x - mean(x).

    The variance is computed from the centred values (two passes), never as E[x^2] - E[x]^2, and a
    constant vector gives exactly the bias.

    Args:
      x: (..., d), any floating dtype; leading axes are free.
      gain: (d,), a scalar, or None.
      bias: (d,), a scalar, or None.
      eps: added to the variance, inside the root; 0 is allowed.

    Returns:
      (..., d) in the dtype of x. Statistics are in float32 at least.

    Raises:
      UserError: eps negative or not finite, or a gain or bias of another shape.

    >>> import jax.numpy as jnp
    >>> layer_norm(jnp.array([1.0, 3.0]), eps=0.0)
    Array([-1.,  1.], dtype=float32)

    References:
      Ba, Kiros and Hinton 2016, "Layer Normalization", eq. 3.
    """
    return _norm(x, gain, bias, eps, center=_center)


def _norm(x, gain, bias, eps, center) -> Array:
    x, dtype = _widened(x)
    _check_eps(eps)
    _check_shape("gain", gain, x)
    _check_shape("bias", bias, x)
    return _affine(_standardize(x, eps, center), gain, bias, dtype)


def _widened(x: Any) -> tuple[Array, Any]:
    """Return x in float32 at least, and the dtype that it came in."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(
            f"x of dtype {x.dtype}: must be floating; cast it, e.g. x.astype('float32')"
        )
    if x.ndim == 0 or x.shape[-1] == 0:
        raise UserError(f"x of shape {x.shape}: must have a last axis of at least one feature")
    return x.astype(_statistics_dtype(x.dtype)), x.dtype


def simple_rms_norm(x: Array) -> Array:
    """RMSNorm without gain and without eps: y = sqrt(d) x / |x|; zeros for a zero vector.

    >>> import jax.numpy as jnp
    >>> simple_rms_norm(jnp.array([3.0, 4.0])) * jnp.sqrt(0.5)
    Array([0.6, 0.8], dtype=float32)

    References:
      SimpleRMSNorm of the x-transformers library (there |x| has a lower end of 1e-12).
    """
    return rms_norm(x, eps=0.0)


def l2_norm(x: Array, gain: Array | None = None) -> Array:
    """Return y = gain x / |x|, of length one without a gain; zeros for a zero vector.

    Args:
      x: (..., d), any floating dtype.
      gain: a scalar, (d,), or None. ScaleNorm is this with one learned number.

    >>> import jax.numpy as jnp
    >>> l2_norm(jnp.array([3.0, 4.0]), 10.0)
    Array([6., 8.], dtype=float32)

    References:
      Loshchilov et al. 2024, "nGPT", arXiv 2410.01131 (no gain); Nguyen and Salazar
      2019, "Transformers without Tears", arXiv 1910.05895 (a scalar gain; |x| has a lower
      end of 1e-5 in their code).
    """
    x, dtype = _widened(x)
    _check_shape("gain", gain, x)
    return _affine(_standardize(x, 0.0, None) * x.shape[-1] ** -0.5, gain, None, dtype)


def rms_norm_eps_outside(x: Array, gain: Array | None = None, *, eps: float = 1e-6) -> Array:
    """RMSNorm with eps beside the root, in units of x: y = gain x / (sqrt(mean(x^2)) + eps).

    Args, returns and errors as :func:`rms_norm`. At x = 0 the derivative is gain/eps, its limit.

    >>> import jax.numpy as jnp
    >>> rms_norm_eps_outside(jnp.array([3.0, -3.0]), eps=1.0)
    Array([ 0.75, -0.75], dtype=float32)

    References:
      Zhang and Sennrich 2019, arXiv 1910.07467: the authors' PyTorch code, with 1e-8.
    """
    x, dtype = _widened(x)
    _check_eps(eps)
    _check_shape("gain", gain, x)
    y, _ = _over_rms_plus(*_rescaled_together(x, jnp.asarray(eps, x.dtype)))
    return _affine(y, gain, None, dtype)


def partial_rms_norm(
    x: Array, gain: Array | None = None, *, eps: float = 1e-6, share: float = 0.25
) -> Array:
    """pRMSNorm: y = gain x / sqrt(mean(x_1^2 .. x_k^2) + eps), with k = ceil(share d).

    The other features are divided by the same scale and do not enter it. Where those k are zero and
    eps is 0 the result is zero.

    Args:
      x, gain, eps: as for :func:`rms_norm`.
      share: between 0 and 1.

    Raises:
      UserError: as :func:`rms_norm`; a share that is not above 0 and at most 1.

    >>> import jax.numpy as jnp
    >>> partial_rms_norm(jnp.array([2.0, 4.0, 6.0, 8.0]), eps=0.0)
    Array([1., 2., 3., 4.], dtype=float32)

    References:
      Zhang and Sennrich 2019, arXiv 1910.07467 (k is rounded down in the authors' code).
    """
    x, dtype = _widened(x)
    _check_eps(eps)
    _check_shape("gain", gain, x)
    if not 0 < share <= 1:
        raise UserError(f"share={share}: must be above 0 and at most 1; the usual value is 0.25")
    k = math.ceil(share * x.shape[-1])
    root_eps = jnp.asarray(math.sqrt(eps), x.dtype)
    z, r = _rescale(x[..., :k], root_eps)
    _, inverse = _unit_rms(z, jax.lax.stop_gradient(_at_most(2.0, root_eps * r)))
    inverse = jnp.where(_all_finite(x), inverse, jnp.nan)
    return _affine(_multiply(x, jax.lax.stop_gradient(r)) * inverse, gain, None, dtype)


def crms_norm(x: Array, *, eps: float = 1e-6) -> Array:
    """CRMSNorm: RMSNorm of (x, -sum(x)) without its last feature; no gain.

    y = x / R with R^2 = (sum(x^2) + sum(x)^2) / (d + 1) + eps: a vector of mean zero in d + 1
    dimensions is known by its first d entries, and this makes of them those of its LayerNorm.

    >>> import jax.numpy as jnp
    >>> crms_norm(jnp.array([3.0]), eps=0.0)      # LayerNorm of (3, -3) begins with 1
    Array([1.], dtype=float32)

    References:
      Jiang et al. 2023, "Pre-RMSNorm and Pre-CRMSNorm Transformers", arXiv 2305.14858.
    """
    x, dtype = _widened(x)
    _check_eps(eps)
    z, root_eps = _rescaled_together(x, jnp.asarray(math.sqrt(eps), x.dtype))
    whole = jnp.concatenate([z, -jnp.sum(z, axis=-1, keepdims=True)], axis=-1)
    return _unit_rms(whole, root_eps)[0][..., :-1].astype(dtype)


def l2_clip(x: Array, *, threshold: float | None = None) -> Array:
    """L2Clip: y = x min(1, threshold / (|x| + 1e-6)): shorter vectors pass as they are.

    At the threshold itself the derivative is that of the shorter side, the identity.

    Args:
      x: (..., d), any floating dtype.
      threshold: of the length; None: sqrt(d), the length of a vector of mean square one.

    Raises:
      UserError: a threshold that is not finite and above 0.

    >>> import jax.numpy as jnp
    >>> y = l2_clip(jnp.array([[1.0, 2.0], [6.0, 8.0]]), threshold=5.0)
    >>> [[round(float(v), 3) for v in row] for row in y]
    [[1.0, 2.0], [3.0, 4.0]]

    References:
      Inkling-2, queries and keys, as the transformers library 5.24 has it (inkling2).
    """
    x, dtype = _widened(x)
    length = x.shape[-1] ** 0.5
    threshold = length if threshold is None else threshold
    if not (math.isfinite(threshold) and threshold > 0):
        raise UserError(f"threshold={threshold}: must be finite and above 0; None is sqrt(d)")
    e = jnp.asarray(CLIP_EPS / length, x.dtype)
    z, r = _rescale(x, e)
    y, inverse = _over_rms_plus(z, jax.lax.stop_gradient(_at_most(2.0, e * r)))
    # |x| + 1e-6 <= threshold in units of r: |x| itself may leave the range. False for NaN.
    passes = length <= jax.lax.stop_gradient(threshold * r * inverse)
    return jnp.where(passes, x, y * (threshold / length)).astype(dtype)


def dynamic_tanh(
    x: Array, gain: Array | None = None, bias: Array | None = None, alpha: Any = 1.0
) -> Array:
    """DyT: y = gain tanh(alpha x) + bias, feature by feature.

    The slope keeps its digits where tanh is 1 to rounding.

    Args:
      x: (..., d), any floating dtype.
      gain, bias: (d,), a scalar, or None.
      alpha: a scalar.

    >>> slope = jax.grad(lambda x: dynamic_tanh(x[None])[0])(20.0)   # 4 e^-40; 1 - tanh^2 is 0
    >>> f"{float(slope):.3g}"
    '1.7e-17'

    References:
      Zhu et al. 2025, "Transformers without Normalization", arXiv 2503.10622.
    """
    x, dtype = _widened(x)
    _check_shape("gain", gain, x)
    _check_shape("bias", bias, x)
    return _affine(_tanh(jnp.asarray(alpha, x.dtype) * x), gain, bias, dtype)


def dynamic_erf(
    x: Array,
    gain: Array | None = None,
    bias: Array | None = None,
    alpha: Any = 1.0,
    shift: Any = 0.0,
) -> Array:
    """Derf: y = gain erf(alpha x + shift) + bias, feature by feature; alpha and shift are scalars.

    >>> import jax.numpy as jnp
    >>> dynamic_erf(jnp.array([0.0, 100.0]), gain=jnp.array([2.0, 3.0]))
    Array([0., 3.], dtype=float32)

    References:
      arXiv 2512.10938.
    """
    x, dtype = _widened(x)
    _check_shape("gain", gain, x)
    _check_shape("bias", bias, x)
    inner = jnp.asarray(alpha, x.dtype) * x + jnp.asarray(shift, x.dtype)
    return _affine(jax.lax.erf(inner), gain, bias, dtype)


def seed_norm(
    x: Array, gain: Array | None = None, alpha: Any = 1.0, beta: Any = 0.0, *, eps: float = 1e-6
) -> Array:
    """SeeDNorm: y = (alpha tanh(x . beta) + gain) x / sqrt(mean(x^2) + eps).

    The gain depends on the vector, by one product with beta.

    Args:
      x, eps: as for :func:`rms_norm`.
      gain, alpha, beta: (d,) or a scalar; a gain of None is 1.

    >>> import jax.numpy as jnp
    >>> seed_norm(jnp.array([1.0, -1.0]), beta=jnp.array([20.0, 0.0]), eps=0.0)   # gain 1 + 1
    Array([ 2., -2.], dtype=float32)

    References:
      arXiv 2510.22777; the formula is from others' code, the authors have published none.
    """
    x, dtype = _widened(x)
    _check_eps(eps)
    for name, each in (("gain", gain), ("alpha", alpha), ("beta", beta)):
        _check_shape(name, each, x)
    alpha, beta = (jnp.asarray(each, x.dtype) for each in (alpha, beta))
    # The product of the rescaled vector: terms that leave the range would make inf - inf.
    z, r = _rescale(x, jnp.zeros((), x.dtype))
    turn = _tanh(jnp.sum(z * beta, axis=-1, keepdims=True) * jax.lax.stop_gradient(1 / r))
    plain = 1.0 if gain is None else jnp.asarray(gain, x.dtype)
    return ((turn * alpha + plain) * _standardize(x, eps, None)).astype(dtype)


def gated_norm(
    x: Array,
    gain: Array | None = None,
    down: Array | None = None,
    up: Array | None = None,
    *,
    eps: float = 1e-6,
) -> Array:
    """GatedNorm: y = z sigmoid(silu(z W_down) W_up) with z = RMSNorm(x): a gate of low rank.

    Args:
      x, gain, eps: as for :func:`rms_norm`.
      down, up: (d, rank) and (rank, d); None for no gate, y = z.

    Raises:
      UserError: as :func:`rms_norm`; matrices that do not fit x.

    >>> import jax.numpy as jnp
    >>> gated_norm(jnp.array([1.0, -1.0]), down=jnp.ones((2, 1)), up=jnp.ones((1, 2)), eps=0.0)
    Array([ 0.5, -0.5], dtype=float32)

    References:
      arXiv 2601.22966; rank, order and nonlinearity as in the Marin project's code, which has no
      bias.
    """
    x, dtype = _widened(x)
    z = rms_norm(x, gain, eps=eps)
    if down is None or up is None:
        return z.astype(dtype)
    d, rank = x.shape[-1], jnp.shape(down)[-1]
    for name, each, shape in (("down", down, (d, rank)), ("up", up, (rank, d))):
        if jnp.shape(each) != shape:
            raise UserError(f"{name} of shape {jnp.shape(each)}: must be {shape}, to fit x")
    inner = jax.nn.silu(z @ jnp.asarray(down, z.dtype))
    return (z * jax.nn.sigmoid(inner @ jnp.asarray(up, z.dtype))).astype(dtype)


def less_mean(x: Array) -> Array:
    """Centring alone: y = x - mean(x), with the mean in float32 at least; a constant gives zeros.

    >>> import jax.numpy as jnp
    >>> less_mean(jnp.array([3.0, 1.0, 2.0]))
    Array([ 1., -1.,  0.], dtype=float32)
    """
    x, dtype = _widened(x)
    return _less_mean(x).astype(dtype)


def affine(x: Array, gain: Array | None = None, shift: Array | None = None) -> Array:
    """A learned gain and shift without a norm: y = gain (x + shift), feature by feature.

    >>> import jax.numpy as jnp
    >>> affine(jnp.array([1.0, 2.0]), gain=jnp.array([2.0, 3.0]), shift=jnp.array([1.0, 0.0]))
    Array([4., 6.], dtype=float32)

    References:
      ZAYA1's residual scaling, as the transformers library 5.24 has it (zaya).
    """
    x, dtype = _widened(x)
    _check_shape("gain", gain, x)
    _check_shape("shift", shift, x)
    return _affine(_affine(x, None, shift, x.dtype), gain, None, dtype)


def gradient_preserving(x: Array, alpha: Array, *, stops: bool = True) -> Array:
    """A learned shrinking that the backward pass does not see: y = x - SiLU(alpha) stop(x).

    The derivative is (1 - SiLU(alpha)) I; automatic differentiation takes it to be I.

    Args:
      x: (..., d), any floating dtype.
      alpha: a scalar.
      stops: False for the same values with the derivative that they have.

    >>> import jax, jax.numpy as jnp
    >>> x, alpha = jnp.ones(1), jnp.asarray(1.0)
    >>> [round(float(jax.jacfwd(lambda x, s=s: gradient_preserving(x, alpha, stops=s))(x)[0, 0]), 3)
    ...  for s in (True, False)]
    [1.0, 0.269]

    References:
      Chen et al. 2025, "GPAS", arXiv 2506.22049.
    """
    wide, dtype = _widened(x)
    _check_shape("alpha", alpha, x)
    left = 1 - jax.nn.silu(jnp.asarray(alpha, wide.dtype))
    return (_shrunk(wide, left) if stops else wide * left).astype(dtype)


# Not x - (1 - left) stop(x), which is NaN for an infinite x.
@jax.custom_jvp
def _shrunk(x: Array, left: Array) -> Array:
    return x * left


@_shrunk.defjvp
def _shrunk_jvp(primals, tangents):
    (x, left), (moved, changed) = primals, tangents
    return x * left, moved + x * changed


def identity(x: Array, gain: Array | None = None, *, eps: float = 0.0) -> Array:
    """No normalization: y = x. The gain and eps of the other norms are accepted and unused."""
    del gain, eps
    return x
