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
undefined. A vector with a NaN or an infinity is NaN in every feature, and so are its derivatives:
its scale is not known, and zeros beside the bad entry would look like an answer. (For one infinite
entry the limit is [0, .., sqrt(d), .., 0]; but an infinity is an overflow, not a limit.) One bound:
at a constant vector beyond 8e34 the derivative of LayerNorm in float32 comes out as zero, since
sqrt(eps) relative to it is no normal float.

Derivatives are hand-written with ``jax.custom_jvp`` because autodiff would square the range problem
again. The rules are themselves made of such functions, so every order, forward and reverse, works.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.errors import UserError, check_choice
from normjax.norm_derivatives import (
    Floats,
    Matrices,
    NormDerivative,
    NullDirections,
    identity_derivative,
    layer_norm_derivative,
    orthonormal,
    rms_norm_derivative,
)
from normjax.registry import Registry

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
    # z is at most 2 where x is finite: s is NaN or infinite for a point that is not.
    inverse = jnp.where(s < jnp.inf, inverse, jnp.nan)
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
class Parameter:
    """One array that a norm learns.

    Attributes:
      name: its keyword in the norm's function.
      start: the value that it begins with.
      shape: "feature" for (d,), "scalar" for ().
      offset: added before the function sees it, in float32 at least: 1 for a gain of 1 + g.
    """

    name: str
    start: float = 1.0
    shape: str = "feature"
    offset: float = 0.0


@dataclasses.dataclass(frozen=True)
class Law:
    """What a norm does to a stream of which only the mean square is known (less its mean, where it
    is centred), and to perturbations along it.

    Attributes:
      slope: ``(mean square, eps) -> 1 / s``, the factor on the stream and on what is across it.
      kept: ``(mean square, eps) -> k``, what is left of 1 / s along the stream.
    """

    slope: Callable[[Any, float], Any]
    kept: Callable[[Any, float], Any]


INVERSE_ROOT = Law(
    lambda mean_square, eps: (mean_square + eps) ** -0.5,
    lambda mean_square, eps: eps / (mean_square + eps),
)
"""Division by sqrt(mean square + eps)."""
UNCHANGED = Law(lambda mean_square, eps: 1.0, lambda mean_square, eps: 1.0)

FORGETS: dict[str, bool] = {"nothing": False, "length": False, "length and mean": True}
"""What a norm may forget, and whether the mean is a part of it."""


@dataclasses.dataclass(frozen=True)
class Norm:
    """A normalization as a value.

    Whoever needs a fact about a norm asks its row: what it learns, what it forgets, whether it has
    a closed form or a law. A row may answer that there is none.

    Attributes:
      title: what a legend calls it.
      function: ``(x, *, eps, **parameters) -> y`` on (..., d); it may leave out ``eps``.
      parameters: what it learns.
      derivative: the closed form of its Jacobian at points (..., d), ``(x, *, eps, **parameters)
        ->`` :class:`NormDerivative` or a matrix (..., d, d), in NumPy float64; verified against
        ``jax.jacfwd`` for every row. None: there is none.
      forgets: what of x does not reach y (but for eps): "nothing", "length", or "length and mean".
        The directions in which its Jacobian is null follow from it, see :meth:`null_directions`.
      law: what it does to a stream of known size, for theory and for the self-tests that ride
        along; None: no law, and nothing is claimed.
      source: where it comes from.
      action: what changing to it does, as a gerund, for sentences.
      directions: ``x -> (..., d, m)``, the directions in which it forgets, of any length, the one
        along its radius first, in NumPy float64; for a norm that forgets something else than
        ``forgets`` can say, such as the length of each group. None: as ``forgets`` says.
      name: in the table; set by :func:`register_norm`.
    """

    title: str
    function: Callable[..., Array]
    parameters: tuple[Parameter, ...] = ()
    derivative: Callable[..., Any] | None = None
    forgets: str = "nothing"
    law: Law | None = None
    source: str = ""
    action: str = ""
    name: str = ""
    directions: Callable[[Floats], Floats] | None = None

    def __call__(self, x: Array, parameters: Mapping[str, Array], eps: float) -> Array:
        """Apply the norm with the parameters it has, such as {"gain": (d,), "bias": (d,)}."""
        arguments = dict(parameters)
        for each in self.parameters:
            if each.offset and each.name in arguments:
                value = arguments[each.name]
                arguments[each.name] = each.offset + value.astype(_statistics_dtype(value.dtype))
        return _with_eps(self.function, x, arguments, eps)

    def derivative_at(self, x: Any, parameters: Mapping[str, Any], eps: float) -> Any:
        """Return its derivative at points x (..., d), of float64 parameters without offset yet.

        In wider numbers where x is of such and the closed form keeps them.
        """
        if self.derivative is None:
            raise UserError(
                f"norm={self.title}: has no closed form; give its row a derivative=, or use"
                " jax.jacfwd"
            )
        arguments = dict(parameters)
        for each in self.parameters:
            if each.name in arguments:
                arguments[each.name] = each.offset + arguments[each.name]
        found = _with_eps(self.derivative, x, arguments, eps)
        if hasattr(found, "jvp"):
            return found
        return Matrices(np.asarray(found, np.result_type(np.asarray(found), np.float64)))

    @property
    def has_identity(self) -> bool:
        """Whether it forgets the length of what it reads, and says how much eps lets through."""
        return self.forgets != "nothing" and self.law is not None and self.directions is None

    @property
    def removes_mean(self) -> bool:
        """Whether a shift of all features changes nothing."""
        return FORGETS[self.forgets]

    def centred(self, x: Any) -> Any:
        """Return x less its mean where the norm removes it: what its scale is the size of."""
        return x - x.mean(axis=-1, keepdims=True) if self.removes_mean else x

    def forgotten(self, x: Any) -> Floats:
        """Return the directions in which a change of x does not reach y, but for eps.

        x itself for a norm that forgets the length; x less its mean, and 1, for one that forgets
        the mean as well.

        Args:
          x: (..., d) points.

        Returns:
          (..., d, m) orthonormal columns, float64, the radial one first; m = 0 for a norm that
          forgets nothing.

        Raises:
          UserError: a point that is not finite, or of which the norm has no direction (zero, or
            constant where the mean is removed).

        >>> NORMS["layernorm"].forgotten([1.0, 3.0]).round(3)
        array([[-0.707,  0.707],
               [ 0.707,  0.707]])
        """
        x = np.asarray(x, np.float64)
        if not np.all(np.isfinite(x)):
            raise UserError("x: must be finite; look at where it comes from")
        if self.directions is not None:
            columns = np.asarray(self.directions(x), np.float64)
        elif self.forgets == "nothing":
            return np.zeros((*x.shape, 0))
        else:
            c = self.centred(self.centred(x))  # the second time: what rounding left
            some = np.max(np.abs(x), axis=-1, keepdims=True)
            c = np.where(np.abs(c).max(axis=-1, keepdims=True) > 2.0**-50 * some, c, 0.0)
            columns = np.stack([c, np.ones_like(x)] if self.removes_mean else [c], axis=-1)
        if not np.all(np.any(columns != 0, axis=-2)):
            raise UserError(
                f"norm={self.title}: has no direction at a point that is zero"
                f"{' or constant' if self.removes_mean else ''}; take another one"
            )
        return orthonormal(columns)

    def null_directions(
        self, x: Any, parameters: Mapping[str, Any] | None = None, eps: float = 1e-6
    ) -> NullDirections:
        """Return what its Jacobian at points x does not see and does not reach, but for eps.

        On the right what it forgets. On the left, where J = diag(w) S with a symmetric S, the same
        over w; for a row whose derivative is a matrix, or that has none, the left singular vectors
        of the m smallest values of its Jacobian at eps = 0 (at eps where that is not finite).

        Args:
          x: (..., d) points.
          parameters: as in the parameter tree, offsets not added yet.
          eps: inside the root.

        Returns:
          right and left, (..., d, m) each with orthonormal columns; m is the same for both. Gains
          of zero add what they hide.

        Raises:
          UserError: as :meth:`forgotten`; gains of zero that hide another number of directions at
            one point than at another.

        >>> row = NORMS["layernorm"]
        >>> right, left = row.null_directions([1.0, 2.0, 4.0], {"gain": np.array([1.0, 2.0, 4.0])})
        >>> bool(abs(left.T @ row.derivative_at(
        ...     np.array([1.0, 2.0, 4.0]), {"gain": np.array([1.0, 2.0, 4.0])}, 0.0).matrix()
        ... ).max() < 1e-15)
        True
        """
        x = np.asarray(x, np.float64)
        right, own = self.forgotten(x), parameters or {}
        if not right.shape[-1]:
            return NullDirections(right, right)
        found = self.derivative_at(x, own, eps) if self.derivative is not None else None
        if not isinstance(found, NormDerivative):
            return NullDirections(right, self._left_numerically(x, own, eps, right.shape[-1]))
        w = np.broadcast_to(found.weight, x.shape)
        if np.all(w != 0):
            # In units of the largest, so that the inverse of no weight leaves the range.
            inverse = np.max(np.abs(w), axis=-1, keepdims=True) / w
            return NullDirections(right, orthonormal(right * inverse[..., None]))
        exact = dataclasses.replace(
            found, weight=w, radial=np.zeros(x.shape[:-1]), removed=np.ones(x.shape[:-1])
        )
        pairs = [
            NormDerivative(weight, u, np.asarray(k), found.centered).null_directions()
            for weight, u, k in zip(
                w.reshape(-1, x.shape[-1]), exact.direction.reshape(-1, x.shape[-1]),
                exact.radial.ravel(), strict=True,
            )
        ]  # fmt: skip
        if len({pair.right.shape for pair in pairs}) > 1:
            raise UserError(
                "gain: has zeros, which hide another number of directions at one point than at"
                " another; take one point at a time"
            )
        sides = (np.stack(side).reshape(*x.shape, -1) for side in zip(*pairs, strict=True))
        return NullDirections(*sides)

    def _left_numerically(self, x: Floats, own: Any, eps: float, m: int) -> Floats:
        for each in (0.0, eps):
            if self.derivative is not None:
                J = self.derivative_at(x, own, each).matrix()
            else:
                with jax.enable_x64(True):
                    wide = {k: jnp.asarray(v, jnp.float64) for k, v in own.items()}
                    one = jax.jacfwd(functools.partial(self.__call__, parameters=wide, eps=each))
                    points = jnp.asarray(x.reshape(-1, x.shape[-1]))
                    J = np.asarray(jax.lax.map(one, points)).reshape(*x.shape, x.shape[-1])
            if np.all(np.isfinite(J)):
                return np.linalg.svd(J)[0][..., -m:]
        raise UserError(f"norm={self.title}: its derivative is not finite; look at x and eps")

    def started(self, width: int) -> dict[str, np.ndarray]:
        """Return the parameters of a fresh norm of d features."""
        shapes = {"feature": (width,), "scalar": ()}
        return {p.name: np.full(shapes[p.shape], p.start) for p in self.parameters}

    def starting(self, **starts: float) -> Norm:
        """Return the norm with other start values, as its function sees them.

        >>> NORMS["rmsnorm_offset"].starting(gain=0.0).parameters[0].start
        -1.0
        """
        known = [p.name for p in self.parameters]
        for name in starts:
            check_choice(f"norm={self.title}: the start of", name, known)
        own = tuple(
            dataclasses.replace(p, start=starts[p.name] - p.offset) if p.name in starts else p
            for p in self.parameters
        )
        return dataclasses.replace(self, parameters=own)

    def seen(self, name: str, value: Any) -> Any:
        """Return a parameter as the function sees it: with its offset."""
        offset = next((p.offset for p in self.parameters if p.name == name), 0.0)
        return value + offset if offset else value

    def record(self) -> dict[str, Any]:
        """Return it as JSON: all that decides numbers, its values at some points among them.

        What only readers see stands under "shown".
        """
        return {
            "parameters": [dataclasses.asdict(p) for p in self.parameters],
            "forgets": self.forgets,
            "values": list(_values(self)),
            "shown": {"name": self.name, "title": self.title, "source": self.source,
                      "action": self.action},
        }  # fmt: skip


def _with_eps(function: Callable[..., Any], x: Any, arguments: Any, eps: float) -> Any:
    takes = inspect.signature(function).parameters
    some = "eps" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
    return function(x, **arguments, **({"eps": eps} if some else {}))


@functools.lru_cache(maxsize=256)
def _values(norm: Norm) -> tuple[float, ...]:
    """What a fresh norm makes of some points, to five digits: another formula has other values."""
    with jax.enable_x64(True):
        # Also where eps counts, and where what saturates does.
        x = jnp.outer(jnp.asarray([1.0, 1e-3, 30.0]), jnp.asarray(_PROBES, jnp.float64))
        start = {k: jnp.asarray(v) for k, v in norm.started(len(_PROBES)).items()}
        try:
            y = norm(x, start, 1e-6)
            if y.shape != x.shape:
                raise UserError(f"makes shape {y.shape}; must keep the shape")
        except Exception as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(
                f"norm={norm.title}: its function fails on x of shape {x.shape} ({what})"
            ) from error
        return tuple(float(f"{float(value):.5g}") for value in y.ravel())


_PROBES = (-2.0, -1.1, -0.4, 0.03, 0.2, 0.7, 1.5, 3.0)

_GAIN, _OFFSET, _BIAS = (
    Parameter("gain"),
    Parameter("gain", 0.0, offset=1.0),
    Parameter("bias", 0.0),
)
_RMS: dict[str, Any] = {"forgets": "length", "law": INVERSE_ROOT,
                        "source": "Zhang and Sennrich 2019, arXiv 1910.07467"}  # fmt: skip
_LAYER: dict[str, Any] = {"forgets": "length and mean", "law": INVERSE_ROOT,
                          "source": "Ba, Kiros and Hinton 2016, arXiv 1607.06450"}  # fmt: skip

_ROWS = {
    "rmsnorm": Norm("RMSNorm", rms_norm, (_GAIN,), rms_norm_derivative, **_RMS),
    "rmsnorm_offset": Norm(
        "RMSNorm, gain 1 + g", rms_norm, (_OFFSET,), rms_norm_derivative, **_RMS
    ),
    "rmsnorm_plain": Norm("RMSNorm without gain", rms_norm, (), rms_norm_derivative, **_RMS),
    "layernorm": Norm("LayerNorm", layer_norm, (_GAIN, _BIAS), layer_norm_derivative, **_LAYER),
    "layernorm_nobias": Norm(
        "LayerNorm without bias", layer_norm, (_GAIN,), layer_norm_derivative, **_LAYER
    ),
    "layernorm_plain": Norm(
        "LayerNorm without gain and bias", layer_norm, (), layer_norm_derivative, **_LAYER
    ),
    "identity": Norm(
        "no norm", identity, (), identity_derivative, law=UNCHANGED,
        action="removing normalization",
    ),
}  # fmt: skip

NORMS: Registry[Norm] = Registry(
    "norm", {name: dataclasses.replace(row, name=name) for name, row in _ROWS.items()}
)


def register_norm(name: str, row: Norm, *, replace: bool = False) -> Norm:
    """Add a norm to the table under a name, and return it with that name.

    From then on ``--config.model.norm=NAME`` trains it in any placement.

    Args:
      name: a small letter, then small letters, digits or underscores.
      row: the norm.
      replace: whether a name that is taken may get another row.

    Raises:
      UserError: a name that is none or taken; a row that is no norm.

    >>> row = Norm("Softsign", lambda x, gain: gain * x / (1 + abs(x)), (Parameter("gain"),))
    >>> register_norm("softsign", row).record()["values"][7]
    0.75
    >>> del NORMS["softsign"]
    """
    if not isinstance(row, Norm):
        raise UserError(f"norm {name!r}: must be a normjax.Norm, not {row!r}")
    check_choice(f"norm {row.title!r}, forgets", row.forgets, FORGETS)
    return NORMS.register(name, dataclasses.replace(row, name=name), replace=replace)


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
        parameters = {
            name: self.param(name, lambda key, v=start: jnp.asarray(v, self.param_dtype))
            for name, start in self.norm.started(x.shape[-1]).items()
        }
        return self.norm(x, parameters, self.eps)


class RMSNorm(NormLayer):
    """RMSNorm with a learned gain as a Flax module; see :func:`rms_norm` for the formula."""


class LayerNorm(NormLayer):
    """LayerNorm with learned gain and bias as a Flax module; see :func:`layer_norm`."""

    norm: Norm = NORMS["layernorm"]


class Identity(NormLayer):
    """The identity in the place of a norm: no parameters, y = x."""

    norm: Norm = NORMS["identity"]
