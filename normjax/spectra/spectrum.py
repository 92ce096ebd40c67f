"""The singular values of any function's Jacobian, by the route that fits its size.

>>> import jax.numpy as jnp
>>> spectrum(lambda x: x * jnp.arange(1.0, 4.0), [1.0, 1.0, 1.0]).values
array([3., 2., 1.])
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from normjax.errors import UserError, whole_number
from normjax.spectra.dense import matrix, singular_values
from normjax.spectra.krylov import top_singular_values
from normjax.spectra.linearized import Linearized
from normjax.traced import LIMIT


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """Singular values with what is known of their errors.

    Attributes:
      values: (n,) all of them, or the k largest, descending; float64.
      bounds: (n,) on |true value - value|, absolute. Of a matrix that is formed: n machine epsilons
        of the largest value for the decomposition, and what rounding put into the matrix, as
        estimated by :mod:`normjax.rounding`. Matrix-free: measured residuals, and the products'
        rounding.
      complete: whether ``values`` are all of them.
      resolved: whether no copy of a repeated value can be missing (always, where complete).
      converged: whether every bound is within the tolerance asked for (always, where complete).
      square: whether the Jacobian has as many outputs as inputs.
    """

    values: np.ndarray
    bounds: np.ndarray
    complete: bool
    resolved: bool
    converged: bool = True
    square: bool = True

    @property
    def condition(self) -> float:
        """Largest over smallest value, of a complete spectrum; infinite where that is 0.

        Raises:
          UserError: not all values are known.
        """
        self._needs_all("condition")
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            return float(self.values[0] / self.values[-1]) if self.values[-1] > 0 else math.inf

    @property
    def log_determinant(self) -> float:
        """Natural logarithm of |det J|, the sum of the logarithms; -inf where a value is 0.

        Raises:
          UserError: not all values are known, or J is not square.

        >>> import jax.numpy as jnp
        >>> found = spectrum(lambda x: jnp.array([2.0, 0.5, 3.0]) * x, np.ones(3))
        >>> round(found.log_determinant, 12)
        1.098612288668
        """
        self._needs_all("log_determinant")
        if not self.square:
            raise UserError("log_determinant: the Jacobian is not square and has none")
        with np.errstate(divide="ignore"):
            return math.fsum(np.log(self.values)) if self.values[-1] > 0 else -math.inf

    def _needs_all(self, what: str) -> None:
        if not self.complete:
            raise UserError(f"{what}: needs all singular values; leave k out")


def spectrum(function: Any, x: Any, k: int | None = None, *, tol: float = 1e-10) -> Spectrum:
    """Return singular values of the Jacobian of ``function`` at ``x``, in float64.

    Args:
      function: of one real array of any shape to one real array of any shape: a JAX function, a
        part of a decoder, a Flax module through :func:`normjax.as_function`.
      x: the point.
      k: how many of the largest; None for all, which forms the matrix and takes up to 4096 inputs
        and outputs. With k nothing is formed and n may be a million.
      tol: with k, the bound that ends the work, relative to the largest value.

    Returns:
      A :class:`Spectrum`.

    Raises:
      UserError: x or a derivative not finite; k below 1 or above n; too many inputs for all; a
        function that :func:`normjax.traced.trace` refuses, such as one that computes in float32
        inside.

    >>> import jax.numpy as jnp
    >>> top = spectrum(lambda x: 2 * jnp.cumsum(x), np.ones(300), k=1)
    >>> bool(abs(top.values[0] - 1 / np.sin(np.pi / 1202)) < 1e-7), top.complete   # closed form
    (True, False)
    """
    k = None if k is None else whole_number("k", k)
    linear = Linearized(function, x, np.float64)
    square = linear.shape[0] == linear.shape[1]
    if k is not None:
        top = top_singular_values(linear, k=k, tol=tol)
        return Spectrum(top.values, top.bounds, False, top.resolved, top.converged, square)
    if max(linear.shape) > LIMIT:
        raise UserError(
            f"x: a Jacobian of {linear.shape[0]} by {linear.shape[1]}: all singular values are"
            f" found of up to {LIMIT}; pass k=10 for the ten largest, or use spectral_density"
        )
    values = np.asarray(singular_values(matrix(linear)))
    bound = np.finfo(np.float64).eps * max(linear.shape) * float(values[0]) + linear.rounding()
    return Spectrum(values, np.full(len(values), bound), True, True, True, square)
