"""Jacobians of any function at a hidden state by autodiff: per token, per pair, whole sequence.

A function here maps (T, d) to (T, d') in JAX: a plain function, a :class:`normjax.blocks.Part`, or
any Flax module through :func:`as_function`. Everything runs in float64 under a local 64-bit mode,
and goes through :mod:`normjax.traced`: a function that computes in a narrower dtype inside is
refused, since its derivatives would not be right to more than that dtype's digits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.errors import UserError, whole_number
from normjax.jacobians.blocks import check_dense, check_finite, to_float64
from normjax.norm_derivatives import Floats
from normjax.spectra.dense import matrix
from normjax.spectra.linearized import Linearized
from normjax.traced import LinearMaps, real_point, trace

Function = Callable[[Any], Any]


def as_function(module: Any, variables: Any, **arguments: Any) -> Function:
    """Return a Flax module with its variables as a function x -> y in float64.

    Args:
      module: anything with ``apply(variables, x, **arguments)``, such as a Flax Linen module; or
        with ``apply(params, rng, x)``, such as a Haiku transform, whose rng is then an argument.
      variables: {"params": ...}; floating arrays are cast to float64.
      **arguments: passed on to ``apply`` (``method=...``, ``deterministic=True``).

    Returns:
      A function of one array. It raises :class:`UserError` for a module that returns another dtype
      (Flax layers with ``dtype=None`` follow their input) or more than one array. Whatever takes
      its derivative refuses one that computes in a narrower dtype inside.

    >>> import flax.linen as nn
    >>> layer = nn.Dense(3, use_bias=False)
    >>> f = as_function(layer, layer.init(jax.random.key(0), jnp.ones((1, 2))))
    >>> f(np.ones((5, 2))).dtype
    dtype('float64')
    """
    if not hasattr(module, "apply"):
        raise UserError(
            f"module of type {type(module).__name__}: must have apply(variables, x); a plain"
            " function needs no as_function"
        )
    wide, first = to_float64(variables), []
    if _takes_generator(module.apply):
        first = [arguments.pop("rng", None)]
    name = type(module).__name__

    def function(x: Any) -> Array:
        with jax.enable_x64(True):
            y = module.apply(wide, *first, jnp.asarray(x, jnp.float64), **arguments)
            if getattr(y, "dtype", None) != jnp.float64:
                kind = getattr(y, "dtype", type(y).__name__)
                raise UserError(
                    f"{name}: returns {kind} for a float64 input; must return one float64 array:"
                    " take out fixed dtypes (dtype=None in Flax layers) and further outputs"
                )
            return y

    function.__name__ = name
    return function


def _takes_generator(apply: Any) -> bool:
    """Whether apply is (params, rng, x), as a Haiku transform's is."""
    try:
        names = list(inspect.signature(apply).parameters)
    except (TypeError, ValueError):
        return False
    return len(names) > 2 and names[1] == "rng"


def prepared(fn: Any, h: Any, least_axes: int) -> LinearMaps:
    """Return the derivative of fn at h in float64; call under 64-bit mode."""
    x = real_point("h", h, np.float64)
    if x.ndim < least_axes:
        raise UserError(f"h of shape {x.shape}: must be a sequence (T, d)")
    return trace(fn, x).linearized()


def _pushed(found: LinearMaps, m: Any) -> Array:
    """Return the derivatives along unit steps of position m: (d, T, d')."""
    shape = found.of.point.shape
    d = shape[-1]
    steps = jnp.zeros((d, *shape)).at[:, m].set(jnp.eye(d))
    # A function with a backward pass alone is pushed by the transpose of that.
    images = jax.vmap(found.push)(steps)
    check_finite("h", images, f"the Jacobian of {found.of.name}")
    return images


def _per_token(found: LinearMaps) -> None:
    own, shape = found.of, found.of.point.shape
    if len(own.shape) != 2 or own.shape[0] != shape[0]:
        raise UserError(
            f"{own.name}: returns shape {own.shape} for {shape}; must be one row per token;"
            " sequence_jacobian takes any shape"
        )


def _position(name: str, value: int, length: int) -> int:
    if not -length <= whole_number(name, value) < length:
        raise UserError(f"{name}={value}: must be a position from 0 to {length - 1}")
    return value % length


def token_jacobians(fn: Function, h: Any) -> Floats:
    """Return d fn(h)_i / d h_i of every position, by d products with the derivative for each.

    For parts of the decoder ``Part.token_jacobians`` gives the same numbers in closed form, for all
    positions at the cost of one.

    Args:
      fn: (T, d) -> (T, d').
      h: (T, d).

    Returns:
      (T, d', d) float64.

    Raises:
      UserError: h not finite or not (T, d); a result that is not finite or not float64.

    >>> token_jacobians(lambda h: h * h, np.array([[1.0], [2.0]]))[:, 0, 0]
    array([2., 4.])
    """
    with jax.enable_x64(True):
        found = prepared(fn, h, 2)
        _per_token(found)
        x = found.of.point
        jacobians = np.empty((len(x), found.value.shape[-1], x.shape[-1]))
        for i in range(len(x)):
            jacobians[i] = np.asarray(_pushed(found, i)[:, i]).T
        return jacobians


def pair_jacobian(fn: Function, h: Any, i: int, m: int) -> Floats:
    """Return d fn(h)_i / d h_m of one pair of positions: (d', d) float64.

    Args:
      fn: (T, d) -> (T, d').
      h: (T, d).
      i: position of the output, m of the input; negative ones count from the end.

    Raises:
      UserError: as :func:`token_jacobians`; a position outside the sequence.

    >>> pair_jacobian(lambda h: jnp.cumsum(h, axis=0), np.ones((3, 1)), i=2, m=0)
    array([[1.]])
    """
    with jax.enable_x64(True):
        found = prepared(fn, h, 2)
        _per_token(found)
        length = len(found.of.point)
        i, m = _position("i", i, length), _position("m", m, length)
        return np.asarray(_pushed(found, m)[:, i]).T


def sequence_jacobian(fn: Function, h: Any, chunk: int = 128) -> Floats:
    """Return the whole Jacobian by chunked linearization: output shape + input shape, float64.

    By :func:`normjax.dense.dense_jacobian`, which also takes functions of other shapes.

    Args:
      fn: a function of one array of any shape.
      h: where; at most 4096 entries.
      chunk: columns at once.

    Raises:
      UserError: as :func:`token_jacobians`; more than 4096 entries.

    >>> sequence_jacobian(lambda h: 3 * h[::-1], np.ones(2))
    array([[0., 3.],
           [3., 0.]])
    """
    x = real_point("h", h, np.float64)
    check_dense(x.size)
    if whole_number("chunk", chunk) < 1:
        raise UserError(f"chunk={chunk}: must be at least 1; the default is 128")
    linear = Linearized(fn, x)
    return matrix(linear, batch=chunk).reshape(linear.full_shape)
