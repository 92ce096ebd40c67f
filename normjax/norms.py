"""Normalizations: pure functions, the table of them, and thin Flax modules.

Every norm divides a vector x of d features by a scale and multiplies it by a gain,

    y = gain * x / s + bias,        s = sqrt(mean(x^2) + eps)        (RMSNorm)

with eps **inside** the root, in units of the mean square. Statistics are computed in float32 at
least (float64 stays float64), whatever the input's dtype; the result is cast to that dtype last.

Range. A mean of squares overflows float32 for entries from 1.8e19 on and vanishes below 1e-19; both
give a silently wrong 0 or infinity. Here x is first divided by a power of two near its largest
entry, which is exact, so that the result is right for every finite input, subnormal numbers
included. (XLA reads subnormal floats as zero; they are recovered from their bits.) A zero vector
gives zeros; its derivative is gain/sqrt(eps), and zero by convention where eps = 0 leaves it
undefined. (One limit: at a constant vector beyond 8e34 the derivative of LayerNorm in float32 comes
out as zero, since sqrt(eps) relative to it is no normal float.)

Derivatives are hand-written with ``jax.custom_jvp`` because autodiff would square the range problem
again. The rules are themselves made of such functions, so every order, forward and reverse, works.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from normjax.errors import UserError
from normjax.norm_derivatives import (
    NormDerivative,
    identity_derivative,
    layer_norm_derivative,
    rms_norm_derivative,
)

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


@jax.custom_jvp
def _unit_rms(z: Array, root_eps: Array) -> tuple[Array, Array]:
    """Return (z / s, 1 / s) with s = sqrt(mean(z^2) + root_eps^2), and zeros where s = 0."""
    s = jnp.sqrt(jnp.mean(z * z, axis=-1, keepdims=True) + root_eps * root_eps)
    inverse = jnp.where(s > 0, 1 / jnp.where(s > 0, s, 1), 0)
    return z * inverse, inverse


@_unit_rms.defjvp
def _unit_rms_jvp(primals, tangents):
    # d(z/s) = (v - y <y, v>/d) / s  and  d(1/s) = -<y, v>/d / s^2, with y = z/s.
    v = tangents[0]
    y, inverse = _unit_rms(*primals)
    p = jnp.mean(y * v, axis=-1, keepdims=True)
    return (y, inverse), ((v - y * p) * inverse, -inverse * inverse * p)


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
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(
            f"x of dtype {x.dtype}: must be floating; cast it, e.g. x.astype('float32')"
        )
    if x.ndim == 0 or x.shape[-1] == 0:
        raise UserError(f"x of shape {x.shape}: must have a last axis of at least one feature")
    _check_eps(eps)
    _check_shape("gain", gain, x)
    _check_shape("bias", bias, x)
    y = _standardize(x.astype(_statistics_dtype(x.dtype)), eps, center)
    return _affine(y, gain, bias, x.dtype)


def identity(x: Array, gain: Array | None = None, *, eps: float = 0.0) -> Array:
    """No normalization: y = x. The gain and eps of the other norms are accepted and unused."""
    del gain, eps
    return x


# --- the table ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Norm:
    """A normalization as a value: its function and which parameters it learns.

    Attributes:
      function: ``(x, gain, [bias], *, eps) -> y`` on (..., d).
      gain: "g" (multiplies by g, starts at 1), "1+g" (multiplies by 1 + g, g starts at 0; the sum
        is formed in float32) or "none".
      bias: whether a bias is learned; it starts at 0.
      title: what a legend calls it.
      derivative: the closed form of its Jacobian, ``(x, gain, [bias], *, eps) ->``
        :class:`NormDerivative` in NumPy float64, verified against ``jax.jacfwd`` for every row.
    """

    function: Callable[..., Array]
    gain: str
    bias: bool
    title: str
    derivative: Callable[..., NormDerivative] | None = None

    def __call__(self, x: Array, parameters: Mapping[str, Array], eps: float) -> Array:
        """Apply the norm with the parameters it has: {"gain": (d,), "bias": (d,)}."""
        arguments = dict(parameters)
        if self.gain == "1+g":
            gain = arguments["gain"]
            arguments["gain"] = 1 + gain.astype(_statistics_dtype(gain.dtype))
        return self.function(x, **arguments, eps=eps)


NORMS: dict[str, Norm] = {
    "rmsnorm": Norm(rms_norm, "g", False, "RMSNorm", rms_norm_derivative),
    "rmsnorm_offset": Norm(rms_norm, "1+g", False, "RMSNorm, gain 1 + g", rms_norm_derivative),
    "rmsnorm_plain": Norm(rms_norm, "none", False, "RMSNorm without gain", rms_norm_derivative),
    "layernorm": Norm(layer_norm, "g", True, "LayerNorm", layer_norm_derivative),
    "layernorm_nobias": Norm(
        layer_norm, "g", False, "LayerNorm without bias", layer_norm_derivative
    ),
    "layernorm_plain": Norm(
        layer_norm, "none", False, "LayerNorm without gain and bias", layer_norm_derivative
    ),
    "identity": Norm(identity, "none", False, "no norm", identity_derivative),
}


# --- Flax modules -------------------------------------------------------------------------------


class NormLayer(nn.Module):
    """Any row of the table as a Flax Linen module on (..., d).

    Attributes:
      norm: the row.
      eps: inside the root, in units of the mean square.
      param_dtype: dtype of the gain and bias. The output has the dtype of the input.

    >>> import jax, jax.numpy as jnp
    >>> layer = NormLayer(NORMS["rmsnorm_offset"])
    >>> layer.init(jax.random.key(0), jnp.ones((2, 3)))["params"]["gain"]
    Array([0., 0., 0.], dtype=float32)
    """

    norm: Norm = NORMS["rmsnorm"]
    eps: float = 1e-6
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        parameters = {}
        if self.norm.gain != "none":
            start = nn.initializers.ones if self.norm.gain == "g" else nn.initializers.zeros
            parameters["gain"] = self.param("gain", start, (x.shape[-1],), self.param_dtype)
        if self.norm.bias:
            shape = (x.shape[-1],)
            parameters["bias"] = self.param("bias", nn.initializers.zeros, shape, self.param_dtype)
        return self.norm(x, parameters, self.eps)


class RMSNorm(NormLayer):
    """RMSNorm with a learned gain as a Flax module; see :func:`rms_norm` for the formula."""


class LayerNorm(NormLayer):
    """LayerNorm with learned gain and bias as a Flax module; see :func:`layer_norm`."""

    norm: Norm = NORMS["layernorm"]


class Identity(NormLayer):
    """The identity in the place of a norm: no parameters, y = x."""

    norm: Norm = NORMS["identity"]
