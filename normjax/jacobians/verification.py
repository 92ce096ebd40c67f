"""A Jacobian in closed form against automatic differentiation, in one line.

    verify(my_norm, my_jacobian, at=x).check()

The referee is ``jax.jacfwd`` of the function itself in float64, entry by entry, at several scales
of the given point: a formula that is right at scale 1 may be wrong where eps matters (1e-3), where
it does not (1e3) or at zero.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from normjax.errors import UserError
from normjax.jacobians.closed_forms import as_norm, norm_jacobian
from normjax.norm_derivatives import Floats
from normjax.norms import Norm
from normjax.rounding import RUNS, SAFETY, scatter
from normjax.traced import as_float64, real_point, trace

EPSILON = float(np.finfo(np.float64).eps)
SCALES = (0.0, 1e-3, 1.0, 1e3)


class VerificationError(AssertionError):
    """A closed form that does not agree with automatic differentiation; the message says where."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """What :func:`verify` found, at the scale and entry where the two agree least.

    Attributes:
      error: the difference of the two there, over the largest entry of the Jacobian (of both, at
        that scale).
      tolerance: what rounding explains of it there, over the same; see :func:`verify`.
      scale: the factor on the point.
      entry: index of the entry: (output..., input...).
      expected: that entry by ``jax.jacfwd``.
      got: that entry by the closed form.
      relative_error: their difference over the size of ``expected``; infinite where that is zero.
      name: of the function.
    """

    error: float
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
        return self.error <= self.tolerance

    @property
    def excess(self) -> float:
        """Error over tolerance; infinite where nothing is tolerated, or it is not a number."""
        if not self.error > 0:
            return 0.0 if self.error == 0 else math.inf
        return self.error / self.tolerance if self.tolerance > 0 else math.inf

    def check(self) -> Verification:
        """Return self, or raise :class:`VerificationError` with the worst entry."""
        if not self.passed:
            raise VerificationError(str(self))
        return self

    def __str__(self) -> str:
        if self.passed:
            return (
                f"{self.name}: closed form agrees with jax.jacfwd, error {self.error:.1e}"
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
            f" {self.relative_error:.2e}; {self.error:.1e} of the largest entry, rounding explains"
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

    Each entry has a tolerance of its own: what rounding may have put into it. Of the referee that
    is measured, by shaking each of its operations (:mod:`normjax.rounding`); of the closed form, by
    shaking its point and by computing it once more, in wider numbers where it is NumPy that keeps
    them, with shaken operations where it is JAX. So 1 - tanh(20)^2, of which nothing is left,
    raises no alarm, and an entry a millionth of the largest is held to its own digits. More than
    one epsilon of the largest entry is never allowed for the closed form's own rounding, and so
    much for one that is neither.

    Args:
      fn: a function of one array, or a row of the table of norms (or its name). Of a row with
        stop-gradients it is the true derivative; :meth:`normjax.Norm.surrogate` has the other one.
      jacobian: x -> array of shape (output shape + input shape). None takes the row's own.
      at: the point; a vector, or an array of any shape that fn accepts.
      parameters, eps: those of a row; a bare function closes over its own.
      scales: factors on the point. Leave out 0 for a function without a derivative there.
      tolerance: another one, relative to the largest entry and the same for all, for closed forms
        that lose more than their referee, such as one that solves a linear system.

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
    point = real_point("at", at, np.float64)
    function, closed, name = _resolve(fn, jacobian, parameters, eps)
    if not len(scales):
        raise UserError(
            "scales=(): must have at least one factor; the default is (0, 1e-3, 1, 1e3)"
        )
    with jax.enable_x64(True):
        program = _program(function, point, name)
        evaluate = jax.jit(jaxpr_as_fun(program))
    results = []
    for scale in scales:
        x = real_point(f"at times {scale}", point * scale)
        with jax.enable_x64(True):
            expected, shaken = np.asarray(evaluate(x)[0]), SAFETY * scatter(program, [x])
        got = _closed(closed, x)
        if got.shape != expected.shape:
            raise UserError(
                f"jacobian of shape {got.shape}: must be {expected.shape}, outputs then inputs"
            )
        largest = max(float(np.abs(expected).max()), float(np.abs(got).max()))
        if tolerance is None:
            allowed = shaken + _conditioning(closed, x, got) + _rounding(closed, x, got)
            allowed += 4 * EPSILON * (np.abs(expected) + np.abs(got))
        else:
            allowed = np.full(expected.shape, tolerance * largest)
        results.append(_compare(expected, got, allowed, largest, scale, name))
    return max(results, key=lambda r: r.excess)


def _resolve(fn, jacobian, parameters, eps) -> tuple[Callable, Callable, str]:
    if isinstance(fn, (Norm, str)):
        norm, given = as_norm(fn).exact(), dict(parameters or {})

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
    if x.dtype == np.float64:
        return norm_jacobian(norm, x, parameters, eps)
    return norm.derivative_at(x, {k: np.asarray(v) for k, v in parameters.items()}, eps).matrix()


def _program(function: Callable[[Any], Any], x: Floats, name: str) -> Any:
    """Return the program of the Jacobian by automatic differentiation."""
    found = trace(function, x, name=name)
    takes = jax.jacrev if found.reverse_only else jax.jacfwd
    return jax.make_jaxpr(takes(found))(found.point)


def _closed(closed: Callable[[Any], Any], x: Floats) -> Floats:
    with jax.enable_x64(True):
        return as_float64("jacobian(x)", np.asarray(closed(x)), finite=False)


def _conditioning(closed: Callable[[Any], Any], x: Floats, got: Floats) -> Floats:
    """Return how far the closed form moves with a point that is shaken by a machine epsilon."""
    rng, moved = np.random.default_rng(0), np.zeros(got.shape)
    with np.errstate(invalid="ignore"):
        for _ in range(RUNS):
            near = x * (1 + EPSILON * rng.uniform(-1, 1, x.shape))
            moved = np.fmax(moved, np.abs(_closed(closed, near) - got))
    return SAFETY * moved


def _rounding(closed: Callable[[Any], Any], x: Floats, got: Floats) -> Floats:
    """Return what rounding put into the closed form, entry by entry.

    Never more than one epsilon of the largest entry: a formula that differs from itself by more
    has another mistake.
    """
    most, found = np.full(got.shape, EPSILON * np.abs(got).max(initial=0.0)), None
    with contextlib.suppress(Exception), np.errstate(all="ignore"):
        found = closed(x.astype(np.longdouble))
    wide = isinstance(found, np.ndarray) and np.finfo(found.dtype).eps < EPSILON
    if wide and found.shape == got.shape and np.all(np.isfinite(found)):
        return np.fmin(most, 2 * np.abs(found - got).astype(np.float64))
    with contextlib.suppress(Exception), jax.enable_x64(True):
        return np.fmin(most, SAFETY * scatter(jax.make_jaxpr(closed)(x), [x]))
    return most


def _compare(
    expected: Floats, got: Floats, allowed: Floats, largest: float, scale: float, name: str
) -> Verification:
    with np.errstate(invalid="ignore", divide="ignore"):
        difference = np.abs(expected - got)
        difference = np.where(np.isfinite(difference), difference, np.inf)
        excess = np.where(difference == 0, 0.0, difference / allowed)
    excess = np.where(np.isfinite(difference), excess, np.inf)
    entry = np.unravel_index(np.argmax(excess), excess.shape)
    worst, reference = difference[entry], abs(expected[entry])
    size = largest if 0 < largest < math.inf else 1.0
    return Verification(
        error=float(worst / size),
        tolerance=float(allowed[entry] / size) if np.isfinite(worst) else 0.0,
        scale=float(scale),
        entry=tuple(int(i) for i in entry),
        expected=float(expected[entry]),
        got=float(got[entry]),
        relative_error=float(worst / reference) if reference > 0 else float("inf" if worst else 0),
        name=name,
    )
