"""The density of a product's singular values: its equation solved on the positive axis.

At x e^(i theta) with theta = pi everything is real and found from a table; psi is followed from
there to theta = 0, where -Im psi / pi is the density of log x. Unknown are q = log(psi / (1 + psi))
and every block's own y: as a function of psi alone y would have branch points on the way.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normjax.errors import UserError
from normjax.theory.free_factors import Factor, log_transform, transform, vanishes
from normjax.theory.random_matrices import Floats

Complex = NDArray[np.complex128]
Groups = list[tuple[Factor, int]]
"""The different blocks of a product, and how often each occurs."""

CORRECTION = 0.3
"""A step is trusted where its correction is at most this part of the step itself."""

DEEP = 600.0
"""The q beyond which (1 + psi below exp(-600)) nothing is followed."""


def follow(groups: Groups, rank: float, log_x: Floats) -> tuple[Complex, Complex]:
    """Return q = log(psi / (1 + psi)), (n,), and y per group, (n, groups), at x + i0.

    Args:
      groups: blocks and counts.
      rank: fraction of singular values of the product that are not 0.
      log_x: (n,), logarithms of squared singular values.

    Returns:
      q and y; nan below all but 1e-8 of the spectrum that is not 0 (1e-260 where the rank is 1).

    Raises:
      UserError: the equation could not be solved at a point; see the message.
    """
    start = _start(groups, rank, log_x)
    z = start.copy()
    open_ = np.nonzero(start[:, 0].real < DEEP)[0]
    z[start[:, 0].real >= DEEP] = np.nan
    # A singular point on the axis (s = a for a narrow branch) is approached geometrically.
    schedules = (np.linspace(1, 0, 41) ** 2, *(np.geomspace(1, 1e-14, n) for n in (200, 800)))
    for schedule in schedules:
        if open_.size:
            z[open_], good = _path(groups, log_x[open_], start[open_], math.pi * schedule)
            open_ = open_[~good]
    if open_.size:
        raise UserError(
            f"log_s={log_x[open_[0]] / 2:.17g}: the density did not converge; take a point farther"
            " from the edges, and not s = a if the branch is narrower than d/2"
        )
    return z[:, 0], z[:, 1:]


def distribution(groups: Groups, q: Complex, ys: Complex) -> Floats:
    """Return the fraction of singular values below the point where psi has these q and y.

        1 + Im{ log(1 + psi) - sum_l [2 u K - int_0^u K - log(1 + y K)] } / pi

    the integral of -Im psi / pi over log x, which is Im(psi d[q - sum log 1/S]) / pi.
    """
    # On real stretches (gaps of the support) the side from which they are reached counts.
    angle = -np.abs(np.angle(-1 / np.expm1(q)))
    total = angle
    for (factor, count), y in zip(groups, ys.T, strict=True):
        y = y.real - 1j * np.maximum(-y.imag, 1e-300)
        v = 1 + factor.a**2 * y
        k, integral = factor.cumulants(y * v)[0], factor.cumulants_integral(y * v)
        inner = angle - np.angle(v) if vanishes(factor) else np.angle(1 + y * k)
        total = total - count * ((2 * y * v * k - integral).imag - inner)
    return 1 + total / math.pi


def _path(groups: Groups, log_x: Floats, z: Complex, thetas: Floats):
    """Follow (q, y ...) along falling angles and then on the axis.

    Returns:
      (q, y ...) and whether they are trusted, (n,): residual small, on the right half plane, and
      no step so long that Newton's method may have landed on another solution.
    """

    def step(z: Complex, theta: float, ahead: float = 0.0) -> Complex:
        residual, jacobian = _system(groups, z, log_x, theta)
        residual[:, 0] -= 1j * ahead
        solution: Any = np.linalg.solve(jacobian, residual[..., None])
        return solution[..., 0]

    def size(change: Complex, z: Complex) -> Floats:
        relative = np.abs(change)
        relative[:, 1:] /= np.abs(z[:, 1:])
        return np.max(relative, axis=1)

    good = np.ones(len(log_x), bool)
    with np.errstate(all="ignore"), contextlib.suppress(np.linalg.LinAlgError):
        for _ in range(5):
            z = z - step(z, thetas[0])
        for before, theta in zip(thetas, [*thetas[1:], 0.0], strict=True):
            predicted = step(z, before, ahead=before - theta)
            corrected = step(z - predicted, theta)
            good &= size(corrected, z) <= CORRECTION * size(predicted, z) + 1e-7
            z = z - predicted - corrected
            z = z - step(z, theta)
        for _ in range(5):
            z = z - step(z, 0.0)
        residual = np.max(np.abs(_system(groups, z, log_x, 0.0)[0]), axis=1)
        # Near an edge the residual is quadratic in the error of psi, hence the small bound.
        return z, good & (residual < 1e-10) & (np.sin(z[:, 0].imag) <= 1e-6)
    return z, np.zeros(len(log_x), bool)


def _system(groups: Groups, z: Complex, log_x: Floats, theta: float) -> tuple[Complex, Complex]:
    """Return residuals (n, 1 + groups) of the equations for (q, y_1, ...), and derivatives.

    q - sum_l log 1/S_l(y_l) + log x + i theta = 0,      psi_l(y_l) / psi(q) - 1 = 0
    """
    q = z[:, 0]
    psi, one_plus_psi = 1 / np.expm1(-q), -1 / np.expm1(q)
    residual = np.zeros(z.shape, complex)
    jacobian = np.zeros((*z.shape, len(groups) + 1), complex)
    total = q + log_x + 1j * theta
    jacobian[:, 0, 0] = 1
    for column, (factor, count) in enumerate(groups, start=1):
        y = z[:, column]
        log, own, d_log, d_own = transform(factor, y, 1 + factor.a**2 * y, one_plus_psi)
        total = total - count * log
        if vanishes(factor):
            jacobian[:, 0, 0] -= count * psi  # d log(1 + psi) / dq
        jacobian[:, 0, column] = -count * d_log
        residual[:, column] = own / psi - 1
        jacobian[:, column, 0] = -one_plus_psi * own / psi
        jacobian[:, column, column] = d_own / psi
    # Logarithms are known up to 2 pi i; on a continuous path it is the nearest that counts.
    turns = np.round(total.imag / (2 * math.pi))
    residual[:, 0] = total - 2j * math.pi * turns
    return residual, jacobian


def _start(groups: Groups, rank: float, log_x: Floats) -> Complex:
    """Return (q, y per group), (n, 1 + groups), near -x, where psi is in (-rank, 0).

    There log x = sum log 1/S - q falls with q, and is read from a table; q without its imaginary
    part -pi is log(-psi / (1 + psi)). Below the table's end lies less than 1e-8 of the spectrum
    that is not 0, because psi comes that near to -rank only where x is below that part of it.
    """
    ceiling = math.log(rank / (1 - rank)) if rank < 1 else 701.0
    table = np.concatenate(
        [ceiling - np.geomspace(1e-9, 700, 400), np.sinh(np.linspace(-7.24, 7.24, 1000))]
    )
    table = np.sort(table[table < ceiling])[::-1]
    logs = -table
    for factor, count in groups:
        logs = logs + count * log_transform(factor, *_real_psi(table))[0]
    q = np.interp(log_x, logs, table)
    ys = [factor.parameter(*_real_psi(q))[0] for factor, _ in groups]
    q = np.where(log_x < logs[0], DEEP, q)
    return np.stack([q - 1j * math.pi, *ys], axis=1)


def _real_psi(q: Floats) -> tuple[Floats, Floats]:
    """Return (psi, 1 + psi) in (-1, 0) with q = log(-psi / (1 + psi))."""
    return -1 / (1 + np.exp(-q)), 1 / (1 + np.exp(q))
