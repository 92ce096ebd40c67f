"""Every singular value of a product over depth, J_L ... J_1, over hundreds of orders of magnitude.

A product that is multiplied out loses all singular values below 1e-16 of the largest. Here it is
kept as U diag(e^l) T with U orthogonal, l logarithms, and T well conditioned: each factor is
applied to U, the columns are put in the order of their sizes, and a QR decomposition moves the
sizes into l.

The singular values of diag(e^l) T are then found by one-sided Jacobi rotations of its rows, each
kept at length one with the logarithm of its length beside it. Such rotations are accurate relative
to each singular value, and no number leaves the range of float64 whatever l is. (LAPACK's dgejsv
does the same with plain numbers and ends at 1e-308; JAX has no Jacobi SVD on CPUs.)

Sums of log |R_ii| along the depth, the usual Lyapunov sums, are not the singular values of a finite
product: they are e-folds off.

What float64 factors cannot give: where early factors stretch a direction that later ones shrink by
1e16 and more, the product depends on digits that the factors do not have.

Sources: Loh et al. 1989 (UDT); Drmac and Veselic 2008 (Jacobi SVD after QR).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from normjax.errors import UserError

Vector = NDArray[np.floating]

_SWEEPS = 60


class DepthProduct:
    """The product of the factors applied so far.

    >>> import numpy as np
    >>> product = DepthProduct(2)
    >>> for _ in range(200):
    ...     product.apply(np.array([[1e5, 0.0], [0.0, 1e-5]]))
    >>> product.log_singular_values() / np.log(10)     # e^l alone would not fit a float64
    array([ 1000., -1000.])
    """

    def __init__(self, size: int):
        """Start from the identity of the given size."""
        self._u = np.eye(size)
        self._log = np.zeros(size)
        self._t = np.eye(size)

    def apply(self, factor: ArrayLike) -> None:
        """Multiply by one more factor from the left.

        Args:
          factor: (d, d) real and finite. A direction that it sends to less than about d roundoffs
            of what its other columns leave is taken as sent to zero (log -inf).

        Raises:
          UserError: another shape, complex or not finite.
        """
        size = len(self._log)
        factor = np.asarray(factor)
        if factor.shape != (size, size) or np.iscomplexobj(factor):
            raise UserError(
                f"factor of shape {factor.shape} and dtype {factor.dtype}: must be real, of shape"
                f" ({size}, {size}), as the first; blocks of one residual stream are"
            )
        factor = factor.astype(np.float64)
        if not np.isfinite(factor).all():
            raise UserError("factor: must be finite; it holds NaN or infinity")
        exponent = int(np.frexp(np.abs(factor).max())[1])
        columns = np.ldexp(factor, -exponent) @ self._u
        norm = np.linalg.norm(columns, axis=0)
        with np.errstate(divide="ignore"):
            log = np.log(norm) + exponent * np.log(2.0) + self._log
        order = np.argsort(-log, kind="stable")
        log, norm = log[order], norm[order]
        columns = columns[:, order] / np.where(norm > 0, norm, 1.0)
        self._u, r = np.linalg.qr(columns)
        diagonal = np.abs(np.diag(r))
        alive = (diagonal > 8 * size * np.finfo(np.float64).eps) & (log > -np.inf)
        step = r / np.where(alive, diagonal, 1.0)[:, None] * _ratios(log)
        step[~alive] = np.eye(size)[~alive]  # of no weight from here on
        self._t = step @ self._t[order]
        self._log = np.where(alive, np.log(np.where(alive, diagonal, 1.0)) + log, -np.inf)

    def log_singular_values(self) -> Vector:
        """Return the natural logarithms of all d singular values, descending; -inf for zero."""
        alive = self._log > -np.inf
        norm = np.linalg.norm(self._t[alive], axis=1)
        log = self._log[alive] + np.log(norm)
        order = np.argsort(-log, kind="stable")
        rows, log = (self._t[alive] / norm[:, None])[order], log[order]
        result = np.full(len(self._log), -np.inf)
        if len(log):
            # diag(e^l) T = diag(e^l) R^T Q^T: of the rows of R diag(e^l) each is nearly its own
            # singular vector already, which saves sweeps.
            r = np.linalg.qr(rows.T)[1]
            result[: len(log)] = _jacobi(r * _ratios(log), log)
        return np.sort(result)[::-1]


def depth_log_singular_values(factors: Iterable[ArrayLike]) -> Vector:
    """Return the natural logarithms of the singular values of J_L ... J_1.

    Args:
      factors: J_1, ..., J_L, (d, d) each, in the order in which they are applied; may be a
        generator.

    Returns:
      (d,) float64, descending; -inf for a singular value that is zero. The error does not depend
      on its size; it is of the order of roundoff times the condition number of the factors.

    Raises:
      UserError: no factor; not square matrices of one size; not finite.

    >>> import numpy as np
    >>> depth_log_singular_values([np.diag([2.0, 1.0]), np.diag([2.0, 0.0])])
    array([1.38629436,       -inf])
    """
    product = None
    for factor in factors:
        shape = np.shape(factor)
        if product is None:
            if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
                raise UserError(f"factors: the first has shape {shape}; must be square (d, d)")
            product = DepthProduct(shape[0])
        product.apply(factor)
    if product is None:
        raise UserError("factors: must hold at least one matrix")
    return product.log_singular_values()


def _ratios(log: Vector) -> Vector:
    """Return e^(l_j - l_i) for rows i and columns j >= i of descending l, and 0 elsewhere."""
    finite = np.where(log > -np.inf, log, 0.0)
    ratio = np.exp(np.minimum(finite[None, :] - finite[:, None], 0.0))
    return np.triu(ratio * (log > -np.inf))


def _jacobi(rows: Vector, log: Vector) -> Vector:
    """Return the logarithms of the singular values of the matrix with rows e^log_i rows_i."""
    rows, log = rows.copy(), log.copy()
    size = len(log)
    _normalize(rows, log, slice(None))
    players = np.arange(size + size % 2)
    for _ in range(_SWEEPS):
        largest = 0.0
        for _ in range(len(players) - 1):
            half = len(players) // 2
            one, two = players[:half], players[half:][::-1]
            real = (one < size) & (two < size)  # an odd number leaves one row alone
            largest = max(largest, _rotate(rows, log, one[real], two[real]))
            players[1:] = np.roll(players[1:], 1)  # every row meets every other once a sweep
        if largest <= 1e-8:  # convergence is quadratic: what this sweep left is its square
            return log
    raise RuntimeError("Jacobi rotations did not converge; please report the factors")


def _rotate(rows: Vector, log: Vector, one, two) -> float:
    """Make each pair of rows orthogonal; return the largest cosine that was found."""
    swap = log[one] < log[two]
    one, two = np.where(swap, two, one), np.where(swap, one, two)
    cosine = np.einsum("ij,ij->i", rows[one], rows[two])
    turned = np.abs(cosine) > 1e-16
    if not turned.any():
        return 0.0
    one, two, cosine = one[turned], two[turned], cosine[turned]
    q = np.exp(log[two] - log[one])  # the lengths are 1 and q <= 1
    gap = (1 - q) * (1 + q)
    tangent = 2 * cosine / (gap + np.sqrt(gap * gap + 4 * (q * cosine) ** 2))  # over q
    c = 1 / np.sqrt(1 + (q * tangent) ** 2)
    large, small = rows[one], rows[two]
    rows[one] = c[:, None] * (large + (q * q * tangent)[:, None] * small)
    rows[two] = c[:, None] * (small - tangent[:, None] * large)
    _normalize(rows, log, one)
    _normalize(rows, log, two)
    return float(np.abs(cosine).max())


def _normalize(rows: Vector, log: Vector, which) -> None:
    norm = np.linalg.norm(rows[which], axis=1)
    rows[which] /= norm[:, None]
    log[which] += np.log(norm)
