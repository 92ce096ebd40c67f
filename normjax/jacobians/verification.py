"""A Jacobian in closed form against automatic differentiation, in one line.

    verify(my_norm, my_jacobian, at=x).check()

The referee is ``jax.jacfwd`` of the function itself in float64, entry by entry, at several scales
of the given point: a formula that is right at scale 1 may be wrong where eps matters (1e-3), where
it does not (1e3) or at zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax.errors import UserError
from normjax.jacobians.closed_forms import as_float64, as_norm, norm_jacobian
from normjax.norm_derivatives import Floats
from normjax.norms import Norm

SCALES = (0.0, 1e-3, 1.0, 1e3)


class VerificationError(AssertionError):
    """A closed form that does not agree with automatic differentiation; the message says where."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """What :func:`verify` found, at the scale where the two agree least.

    Attributes:
      max_error: the largest difference of two entries over the largest entry of the Jacobian (of
        both, at that scale).
      tolerance: what rounding explains; see :func:`verify`.
      scale: the factor on the point.
      entry: index of the worst entry: (output..., input...).
      expected: that entry by ``jax.jacfwd``.
      got: that entry by the closed form.
      relative_error: their difference over the size of ``expected``; infinite where that is zero.
      name: of the function.
    """

    max_error: float
    tolerance: float
    scale: float
    entry: tuple[int, ...]
    expected: float
    got: float
    relative_error: float
    name: str

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance (never for one that is not a number)."""
        return self.max_error <= self.tolerance

    def check(self) -> Verification:
        """Return self, or raise :class:`VerificationError` with the worst entry."""
        if not self.passed:
            raise VerificationError(str(self))
        return self

    def __str__(self) -> str:
        if self.passed:
            return (
                f"{self.name}: closed form agrees with jax.jacfwd, error {self.max_error:.1e}"
                f" (tolerance {self.tolerance:.1e})"
            )
        where = ", ".join(str(i) for i in self.entry)
        hint = (
            "; jax.jacfwd of the function itself is not finite there"
            if not np.isfinite(self.expected)
            else ""
        )
        return (
            f"{self.name}: closed form differs from jax.jacfwd at entry [{where}], scale"
            f" {self.scale:g}: expected {self.expected:.17g}, got {self.got:.17g}, relative error"
            f" {self.relative_error:.2e}; {self.max_error:.2e} of the largest entry, tolerance"
            f" {self.tolerance:.1e}{hint}"
        )


def verify(
    fn: Callable[[Any], Any] | Norm | str,
    jacobian: Callable[[Any], Any] | None,
    at: Any,
    *,
    parameters: Mapping[str, Any] | None = None,
    eps: float = 1e-6,
    scales: Sequence[float] = SCALES,
    tolerance: float | None = None,
) -> Verification:
    """Compare a Jacobian in closed form with ``jax.jacfwd`` in float64.

    The tolerance is 8 (4 + sqrt(n)) machine epsilons for n inputs, relative to the Jacobian's
    largest entry: 3e-14 at n = 128. A mean over n rounded numbers is off by about sqrt(n) epsilons,
    and a handful of such operations makes an entry.

    Args:
      fn: a function of one array, or a row of the table of norms (or its name).
      jacobian: x -> array of shape (output shape + input shape). None takes the row's own.
      at: the point; a vector, or an array of any shape that fn accepts.
      parameters, eps: those of a row; a bare function closes over its own.
      scales: factors on the point. Leave out 0 for a function without a derivative there, and 1e3
        for one that saturates: of tanh autodiff computes 1 - tanh^2, which is then all rounding.
      tolerance: another one, for functions that lose more than a norm does.

    Returns:
      A :class:`Verification`; ``.check()`` raises with a readable message, ``.passed`` tells.

    Raises:
      UserError: a point that is not finite, a closed form of another shape, or a function that does
        not compute in float64.

    >>> def unit(x): return x / jnp.sqrt(jnp.sum(x * x) + 1e-2)
    >>> def unit_jacobian(x):
    ...     n = np.sqrt(x @ x + 1e-2)
    ...     return np.eye(x.size) / n - np.outer(x, x) / n**3
    >>> verify(unit, unit_jacobian, at=[0.3, -1.0, 2.0]).check().passed
    True
    >>> verify("layernorm_plain", None, at=[0.3, -1.0, 2.0], eps=1e-2).passed
    True
    """
    point = as_float64("at", at)
    function, closed, name = _resolve(fn, jacobian, parameters, eps)
    if not scales:
        raise UserError(
            "scales=(): must have at least one factor; the default is (0, 1e-3, 1, 1e3)"
        )
    if tolerance is None:
        tolerance = float(8 * (4 + point.size**0.5) * np.finfo(np.float64).eps)
    results = []
    for scale in scales:
        x = as_float64(f"at times {scale}", point * scale)
        expected = _autodiff(function, x, name)
        with jax.enable_x64(True):
            got = np.asarray(closed(x))
        if got.shape != expected.shape:
            raise UserError(
                f"jacobian of shape {got.shape}: must be {expected.shape}, outputs then inputs"
            )
        results.append(_compare(expected, got.astype(np.float64), tolerance, scale, name))
    return max(results, key=lambda r: np.inf if np.isnan(r.max_error) else r.max_error)


def _resolve(fn, jacobian, parameters, eps) -> tuple[Callable, Callable, str]:
    if isinstance(fn, (Norm, str)):
        norm, given = as_norm(fn), dict(parameters or {})

        def function(x: Any) -> Any:
            return norm(x, {k: jnp.asarray(v, jnp.float64) for k, v in given.items()}, eps)

        closed = jacobian or partial(_row_jacobian, norm, given, eps)
        return function, closed, f"{norm.title} (eps={eps:g})"
    if parameters is not None:
        raise UserError("parameters: belong to a row of the table; a function closes over its own")
    if jacobian is None:
        raise UserError("jacobian=None: is for a row of the table of norms; give the closed form")
    return fn, jacobian, getattr(fn, "__name__", type(fn).__name__)


def _row_jacobian(norm: Norm, parameters: Mapping[str, Any], eps: float, x: Floats) -> Floats:
    return norm_jacobian(norm, x, parameters, eps)


def _autodiff(function: Callable[[Any], Any], x: Floats, name: str) -> Floats:
    with jax.enable_x64(True):
        out = jax.eval_shape(function, jnp.asarray(x, jnp.float64))
        if getattr(out, "dtype", None) != jnp.float64:
            raise UserError(
                f"{name}: returns {getattr(out, 'dtype', type(out).__name__)} for a float64 input;"
                " must return one float64 array to be compared: take out casts to a fixed dtype"
            )
        return np.asarray(jax.jacfwd(function)(jnp.asarray(x, jnp.float64)))


def _compare(
    expected: Floats, got: Floats, tolerance: float, scale: float, name: str
) -> Verification:
    difference = np.abs(expected - got)
    bad = ~np.isfinite(difference)
    difference = np.where(bad, np.inf, difference)
    entry = np.unravel_index(np.argmax(difference), difference.shape)
    worst = difference[entry]
    size = max(np.max(np.abs(expected)), np.max(np.abs(got))) if not bad.any() else 1.0
    reference = abs(expected[entry])
    return Verification(
        max_error=float(worst / size) if worst > 0 else 0.0,
        tolerance=float(tolerance),
        scale=float(scale),
        entry=tuple(int(i) for i in entry),
        expected=float(expected[entry]),
        got=float(got[entry]),
        relative_error=float(worst / reference) if reference > 0 else float("inf" if worst else 0),
        name=name,
    )
