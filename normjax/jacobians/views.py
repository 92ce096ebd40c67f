"""Jacobians of any function at a hidden state by autodiff: per token, per pair, whole sequence.

A function here maps (T, d) to (T, d') in JAX: a plain function, a :class:`normjax.blocks.Part`, or
any Flax module through :func:`as_function`. Everything runs in float64 under a local 64-bit mode; a
function that falls back to a narrower dtype inside is refused, since its derivatives would not be
right to more than that dtype's digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.errors import UserError
from normjax.jacobians.blocks import check_dense, check_finite, to_float64
from normjax.jacobians.closed_forms import as_float64
from normjax.norm_derivatives import Floats
from normjax.spectra.dense import dense_jacobian

Function = Callable[[Any], Any]


def as_function(module: Any, variables: Any, **arguments: Any) -> Function:
    """Return a Flax module with its variables as a function x -> y in float64.

    Args:
      module: anything with ``apply(variables, x, **arguments)``, such as a Flax Linen module.
      variables: {"params": ...}; floating arrays are cast to float64.
      **arguments: passed on to ``apply`` (``method=...``, ``deterministic=True``).

    Returns:
      A function of one array. It raises :class:`UserError` for a module that computes in another
      dtype (Flax layers with ``dtype=None`` follow their input) or returns more than one array.

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
    wide = to_float64(variables)

    def function(x: Any) -> Array:
        with jax.enable_x64(True):
            y = module.apply(wide, jnp.asarray(x, jnp.float64), **arguments)
            _check_output(y, type(module).__name__)
            return y

    return function


def _check_output(y: Any, name: str) -> None:
    if getattr(y, "dtype", None) != jnp.float64:
        kind = getattr(y, "dtype", type(y).__name__)
        raise UserError(
            f"{name}: returns {kind} for a float64 input; must return one float64 array:"
            " take out fixed dtypes (dtype=None in Flax layers) and further outputs"
        )


def prepared(fn: Function, h: Any, least_axes: int) -> tuple[Function, Array]:
    """Return fn with its output checked, and h in float64; call under 64-bit mode."""
    x = jnp.asarray(as_float64("h", h))
    if x.ndim < least_axes or x.size == 0:
        raise UserError(f"h of shape {x.shape}: must be a sequence (T, d)")
    name = getattr(fn, "__name__", None) or str(fn)

    def checked(y: Any) -> Array:
        out = fn(y)
        _check_output(out, name)
        return out

    return checked, x


def _pushed(fn: Function, linear: Function, tangents: Array, m: Any) -> Array:
    """Return the derivatives of fn along unit steps of position m: (d, T, d')."""
    images = jax.vmap(linear)(tangents.at[:, m].set(jnp.eye(tangents.shape[-1])))
    check_finite("h", images, f"the Jacobian of {getattr(fn, '__name__', fn)}")
    return images


def _position(name: str, value: int, length: int) -> int:
    if not -length <= value < length:
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
        fn_, x = prepared(fn, h, 2)
        y, linear = jax.linearize(fn_, x)
        zeros = jnp.zeros((x.shape[-1], *x.shape))
        jacobians = np.empty((len(x), y.shape[-1], x.shape[-1]))
        for i in range(len(x)):
            jacobians[i] = np.asarray(_pushed(fn, linear, zeros, i)[:, i]).T
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
        fn_, x = prepared(fn, h, 2)
        i, m = _position("i", i, len(x)), _position("m", m, len(x))
        linear = jax.linearize(fn_, x)[1]
        return np.asarray(_pushed(fn, linear, jnp.zeros((x.shape[-1], *x.shape)), m)[:, i]).T


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
    with jax.enable_x64(True):
        fn, x = prepared(fn, h, 1)
        check_dense(x.size)
        shape = jax.eval_shape(fn, x).shape
    return dense_jacobian(fn, np.asarray(x), batch=chunk).reshape(*shape, *x.shape)
