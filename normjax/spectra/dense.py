"""The whole Jacobian of any function as a matrix, and its singular values.

    J_ij = d f(x)_i / d x_j

``jax.jacfwd`` pushes all basis vectors at once and needs memory for all of them; here a batch at a
time is pushed (or pulled, where the output is smaller), by one compiled program, into a host array.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from normjax.errors import UserError, whole_number
from normjax.spectra.linearized import Linearized
from normjax.traced import LIMIT, precision


def dense_jacobian(
    function: Any, x: Any, *, batch: int = 128, dtype: Any = np.float64, limit: int = LIMIT
) -> NDArray:
    """Return the Jacobian of ``function`` at ``x`` as an (outputs, inputs) matrix.

    Args:
      function: of one real array of any shape to one real array of any shape; both are flattened.
      x: the point; cast to ``dtype``.
      batch: basis vectors a pass; more is faster and takes more memory.
      dtype: of the computation and the result. None keeps that of x.
      limit: the most inputs or outputs accepted.

    Returns:
      (outputs, inputs) host array, finite.

    Raises:
      UserError: too many inputs or outputs; x or a derivative not finite; see ``Linearized``.

    >>> import jax.numpy as jnp
    >>> dense_jacobian(lambda x: jnp.stack([x[0] * x[1], x[1]]), [2.0, 3.0])
    array([[3., 2.],
           [0., 1.]])
    """
    return matrix(Linearized(function, x, dtype), batch=batch, limit=limit)


def matrix(linear: Linearized, *, batch: int = 128, limit: int = LIMIT) -> NDArray:
    """Return the matrix of a linearized function; see :func:`dense_jacobian`."""
    if whole_number("batch", batch) < 1:
        raise UserError(f"batch={batch}: must be at least 1; the default is 128")
    rows, columns = linear.shape
    if max(rows, columns) > limit:
        raise UserError(
            f"x: a Jacobian of {rows} by {columns} is above the limit {limit} of the dense route;"
            " use top_singular_values, spectral_density or frobenius_norm, which need no matrix,"
            " or pass limit="
        )
    by_column = columns <= rows or bool(linear.one_way)
    count = columns if by_column else rows
    batch = min(batch, count)
    product = linear.push if by_column else linear.pull

    @jax.jit
    def block(start):
        wanted = start + jnp.arange(batch)
        return product((wanted[:, None] == jnp.arange(count)).astype(linear.dtype))

    result = np.empty((rows, columns), linear.dtype)
    lines = result.T if by_column else result
    with precision(linear.dtype):
        for start in range(0, count, batch):
            lines[start : start + batch] = np.asarray(block(start))[: count - start]
    _check_finite("the Jacobian of function at x", result)
    return result


def singular_values(matrix: ArrayLike) -> NDArray[np.floating]:
    """Return all singular values of a matrix (or of a stack of them), descending.

    Args:
      matrix: (..., m, n) real. The decomposition is LAPACK's gesdd without vectors, in float64 on
        the host: each value is right to about 1e-16 of the largest.

    Returns:
      (..., min(m, n)) float64.

    Raises:
      UserError: not real, not a matrix, or not finite (before or after the decomposition).

    >>> singular_values([[3.0, 0.0], [0.0, -4.0]])
    array([4., 3.])
    """
    array = np.asarray(matrix)
    if array.ndim < 2 or 0 in array.shape[-2:]:
        raise UserError(f"matrix of shape {array.shape}: must be (..., m, n) with m, n >= 1")
    if np.iscomplexobj(array):
        raise UserError(f"matrix of dtype {array.dtype}: must be real")
    array = array.astype(np.float64)
    _check_finite("matrix", array)
    values = np.linalg.svd(array, compute_uv=False)
    _check_finite("the singular values of matrix", values)  # LAPACK may fail without saying so
    return values


def svd(matrix: NDArray, what: str) -> tuple[NDArray, NDArray, NDArray]:
    """Return the singular value decomposition (u, s, v^T) of a matrix that must be finite.

    LAPACK hangs, or returns numbers, for one that is not.

    Raises:
      UserError: an entry that is NaN or infinite, before or after; ``what`` names the matrix.
    """
    _check_finite(what, matrix)
    u, values, vt = np.linalg.svd(matrix)
    _check_finite(f"the singular values of {what}", values)
    return u, values, vt


def _check_finite(what: str, array: NDArray) -> None:
    bad = array.size - int(np.isfinite(array).sum())
    if bad:
        raise UserError(
            f"{what}: {bad} of {array.size} entries are NaN or infinite; look for the layer that"
            " makes them, e.g. with jax.debug_nans"
        )
