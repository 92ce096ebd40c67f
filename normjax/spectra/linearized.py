"""The derivative of a function at a point as a linear map: J v and J^T w without a matrix.

The function is linearized once and the linear map transposed once; a product then costs about one
forward pass and needs no primal again. 64-bit mode is on only inside, and only for float64.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import jaxpr_as_fun
from numpy.typing import NDArray

from normjax.errors import UserError

Function = Callable[[Array], Array]


def precision(dtype: Any) -> contextlib.AbstractContextManager:
    """Return a context with 64-bit mode on for float64, and one that changes nothing otherwise."""
    wide = np.dtype(dtype) == np.float64
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


class Linearized:
    """J = df/dx at one point, with flattened input and output.

    Attributes:
      shape: (outputs, inputs) of J.
      dtype: in which the products are computed.
    """

    def __init__(self, function: Function, x: Any, dtype: Any = None):
        """Linearize.

        Args:
          function: of one real array, of any shape, to one real array of any shape.
          x: the point.
          dtype: floating dtype to which x is cast; None keeps that of x.

        Raises:
          UserError: x not floating or not finite; the function returns something else than one
            floating array, or non-finite values, or has no derivative.
        """
        point = _point(x, dtype)
        self.dtype = np.dtype(point.dtype)
        with precision(self.dtype):
            point = jnp.asarray(point)
            self._in_shape = point.shape
            value, push, pull = _linear_maps(function, point)
            self._out_shape = value.shape
            self._out_dtype = value.dtype
            if not bool(jnp.isfinite(value).all()):
                raise UserError(
                    "function(x): returns NaN or infinity at this x; there is no Jacobian there"
                )
            self._push, self._pull = push, pull
        self.shape = (math.prod(self._out_shape), math.prod(self._in_shape))

    def push(self, v: Array) -> Array:
        """Return J v for v (..., inputs); traceable, to be called under ``precision(dtype)``."""
        return self._map(self._push, v, self._in_shape, self.dtype)

    def pull(self, w: Array) -> Array:
        """Return J^T w for w (..., outputs); traceable, to be called under ``precision(dtype)``."""
        return self._map(self._pull, w, self._out_shape, self._out_dtype)

    @staticmethod
    def _map(product, vector: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        def flat(v: Array) -> Array:
            return product(v.reshape(shape).astype(dtype)).reshape(-1)

        for _ in vector.shape[:-1]:
            flat = jax.vmap(flat)
        return flat(vector)

    def matvec(self, v: NDArray) -> NDArray[np.float64]:
        """Return J v in float64 on the host, computed in ``dtype``."""
        return self._on_host(self.push, v)

    def rmatvec(self, w: NDArray) -> NDArray[np.float64]:
        """Return J^T w in float64 on the host, computed in ``dtype``."""
        return self._on_host(self.pull, w)

    def _on_host(self, product, vector: NDArray) -> NDArray[np.float64]:
        vector = np.ravel(vector)  # ARPACK passes columns (n, 1)
        largest = float(np.abs(vector).max(initial=0.0))
        # By a power of two to size one: half precision has neither room below nor above.
        exponent = int(np.frexp(largest)[1]) if math.isfinite(largest) else 0
        with precision(self.dtype):
            scaled = jnp.asarray(np.ldexp(vector, -exponent).astype(self.dtype))
            result = np.asarray(product(scaled), np.float64)
        return np.ldexp(result, exponent)


def _point(x: Any, dtype: Any) -> NDArray:
    array = np.asarray(x)
    if dtype is None and not jnp.issubdtype(array.dtype, jnp.floating):
        raise UserError(
            f"x of dtype {array.dtype}: must be floating; cast it, e.g. x.astype('float64')"
        )
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise UserError(f"x of dtype {array.dtype}: must be real; split it in two real arrays")
    if dtype is not None and not jnp.issubdtype(np.dtype(dtype), jnp.floating):
        raise UserError(f"dtype={dtype}: must be floating, e.g. 'float64'")
    array = array if dtype is None else array.astype(np.dtype(dtype))
    if array.size == 0:
        raise UserError(f"x of shape {array.shape}: must have at least one entry")
    if not np.isfinite(array.astype(np.float64)).all():
        raise UserError(f"x: must be finite in {array.dtype}; it holds NaN or infinity")
    return array


def _linear_maps(function: Function, x: Array):
    """Return f(x) and the two compiled products."""
    shape = jax.eval_shape(function, x)
    if not (hasattr(shape, "dtype") and jnp.issubdtype(shape.dtype, jnp.floating)):
        raise UserError(
            f"function(x): must return one real floating array, not {shape};"
            " wrap it, e.g. lambda x: f(x)[0]"
        )
    if math.prod(shape.shape) == 0:
        raise UserError(f"function(x) of shape {shape.shape}: must have at least one entry")
    compiled = jax.jit(function)
    try:
        value, forward = jax.linearize(compiled, x)
        push = _compiled(forward, x)
        pull = _transposed(forward, x)
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        # No forward rule: take the reverse one, which is linear too, and transpose that.
        value, backward = jax.vjp(compiled, x)
        pull = _compiled(lambda w: backward(w)[0], value)
        push = _transposed(lambda w: backward(w)[0], value)
    return value, push, pull


def _compiled(linear, example: Array):
    """Compile a linear map with what it closes over as arguments, not as constants."""
    closed = jax.make_jaxpr(linear)(example)
    evaluate = jax.jit(lambda constants, v: jaxpr_as_fun(closed.replace(consts=constants))(v)[0])
    return lambda v: evaluate(closed.consts, v)


def _transposed(linear, example: Array):
    return _compiled(lambda w: jax.linear_transpose(linear, example)(w)[0], linear(example))
