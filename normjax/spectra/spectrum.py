"""The singular values of any function's Jacobian, by the route that fits its size.

>>> import jax.numpy as jnp
>>> spectrum(lambda x: x * jnp.arange(1.0, 4.0), [1.0, 1.0, 1.0]).values
array([3., 2., 1.])
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from normjax.errors import UserError
from normjax.spectra.dense import LIMIT, dense_jacobian, singular_values
from normjax.spectra.krylov import top_singular_values
from normjax.spectra.linearized import Linearized


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """Singular values with what is known of their errors.

    Attributes:
      values: (n,) all of them, or the k largest, descending; float64.
      bounds: (n,) on |true value - value|, absolute. Dense: rounding, n machine epsilons of the
        largest value. Matrix-free: measured residuals.
      complete: whether ``values`` are all of them.
      resolved: whether no copy of a repeated value can be missing (always, where complete).
    """

    values: np.ndarray
    bounds: np.ndarray
    complete: bool
    resolved: bool

    @property
    def condition(self) -> float:
        """Largest over smallest value, of a complete spectrum; infinite where that is 0."""
        if not self.complete:
            raise UserError("condition: needs all singular values; leave k out")
        return float(self.values[0] / self.values[-1]) if self.values[-1] > 0 else float("inf")


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
      UserError: x or a derivative not finite; k below 1 or above n; too many inputs for all.

    >>> import jax.numpy as jnp
    >>> top = spectrum(lambda x: 2 * jnp.cumsum(x), np.ones(300), k=1)
    >>> bool(abs(top.values[0] - 1 / np.sin(np.pi / 1202)) < 1e-7), top.complete   # closed form
    (True, False)
    """
    point = np.asarray(x, np.float64)
    if k is None:
        shape = Linearized(function, point, np.float64).shape if point.size > LIMIT else (0, 0)
        if max(shape) > LIMIT:
            raise UserError(
                f"x of {point.size} entries: all singular values are found of up to {LIMIT};"
                " pass k=10 for the ten largest, or use spectral_density"
            )
        values = singular_values(dense_jacobian(function, point))
        bound = np.finfo(np.float64).eps * point.size * float(values[0])
        return Spectrum(np.asarray(values), np.full(len(values), bound), True, True)
    top = top_singular_values(function, point, k, tol=tol)
    return Spectrum(top.values, top.bounds, False, top.resolved)
