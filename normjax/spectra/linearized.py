"""The derivative of a function at a point as a linear map: J v and J^T w without a matrix.

The function is traced and linearized once (:mod:`normjax.traced`) and the linear map transposed
once; a product then costs about one forward pass and needs no primal again. 64-bit mode is on only
inside, and only for float64.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from normjax.traced import precision, real_point, trace


class Linearized:
    """J = df/dx at one point, with flattened input and output.

    Attributes:
      name: of the function, for messages.
      shape: (outputs, inputs) of J.
      full_shape: of J before both are flattened.
      dtype: in which the products are computed.
      epsilon: machine epsilon of the narrowest float between input and output.
      one_way: "" or why there is no J^T w.
    """

    def __init__(self, function: Any, x: Any, dtype: Any = None, *, widest: bool = True):
        """Linearize.

        Args:
          function: of one real array, of any shape, to one real array of any shape.
          x: the point.
          dtype: floating dtype to which x is cast; None keeps that of x.
          widest: whether a function that computes in narrower floats than that is refused; else
            ``epsilon`` tells.

        Raises:
          UserError: as :func:`normjax.traced.real_point` and :func:`normjax.traced.trace`.
        """
        point = real_point("x", x, dtype)
        self.dtype = np.dtype(point.dtype)
        with precision(self.dtype):
            traced = trace(function, point, widest=widest)
            found = traced.linearized()
        self.name, self.epsilon, self.one_way = traced.name, traced.epsilon, found.one_way
        self.rounding = traced.rounding
        self._in_shape, self._out_shape = point.shape, traced.shape
        self._out_dtype = traced.out_dtype
        self._push, self._pull = found.push, found.pull
        self.full_shape = (*self._out_shape, *self._in_shape)
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

    def matvec(self, v: NDArray, exponent: int = 0) -> NDArray[np.float64]:
        """Return 2^-exponent J v in float64 on the host, computed in ``dtype``."""
        return self._on_host(self.push, v, exponent)

    def rmatvec(self, w: NDArray, exponent: int = 0) -> NDArray[np.float64]:
        """Return 2^-exponent J^T w in float64 on the host, computed in ``dtype``."""
        return self._on_host(self.pull, w, exponent)

    def _on_host(self, product, vector: NDArray, exponent: int) -> NDArray[np.float64]:
        vector = np.ravel(vector)  # ARPACK passes columns (n, 1)
        largest = float(np.abs(vector).max(initial=0.0))
        # By a power of two to a size that leaves as much room below as above: half precision has
        # little of either, and a Jacobian of size 2^exponent takes half of it.
        own = int(np.frexp(largest)[1]) if math.isfinite(largest) else 0
        own += exponent // 2
        with precision(self.dtype):
            scaled = jnp.asarray(np.ldexp(vector, -own).astype(self.dtype))
            result = np.asarray(product(scaled), np.float64)
        return np.ldexp(result, own - exponent)
