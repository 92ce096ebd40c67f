"""Closed-form Jacobians in float64: every norm of the table, and placements composed of them.

    norm        J = diag(w) (P - (1 - k) u v^T), or a matrix         (see norm_derivatives.py)
    placement   J = J_P (A J_S + B J_Q J_F c J_N J_R J_U) + what moves the weights A, B and R

Everything here is NumPy in float64, with leading axes free for many points at once, and needs no
64-bit mode. What autodiff gives for the same functions is the referee: see
:func:`normjax.verification.verify`. The branches F have their own file, branch_jacobians.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from normjax.equation import Sublayer, fold
from normjax.errors import UserError, check_choice, suggest
from normjax.norm_derivatives import Floats, Matrices, NormDerivative, NullDirections
from normjax.norms import NORMS, Norm
from normjax.spectra.norm_spectra import derivative_singular_values
from normjax.traced import as_float64


def as_norm(norm: Norm | str) -> Norm:
    """Return a row of the table from its name; a row is passed on.

    >>> as_norm("rmsnorm").title
    'RMSNorm'
    """
    if isinstance(norm, Norm):
        return norm
    check_choice("norm", norm, NORMS)
    return NORMS[norm]


# --- norms ----------------------------------------------------------------------------------------


def norm_derivative(
    norm: Norm | str, h: Any, parameters: Mapping[str, Any] | None = None, eps: float = 1e-6
) -> NormDerivative | Matrices:
    """Return the derivative of a norm at h as a value: weight, direction, radial factor; or, for a
    row that gives no such form, its matrices.

    Args:
      norm: a row of :data:`normjax.norms.NORMS` or its name.
      h: (..., d), the points.
      parameters: {"gain": (d,), "bias": (d,)}, those that the row has; missing ones have no effect.
      eps: inside the root.

    Raises:
      UserError: an unknown norm or parameter, a wrong shape, a value that is not finite, a row
        without a closed form, or a derivative beyond the range of float64.
    """
    norm = as_norm(norm)
    h = as_float64("h", h)
    if h.ndim == 0 or h.shape[-1] == 0:
        raise UserError(f"h of shape {h.shape}: must be (..., d) with at least one feature")
    if not (np.isfinite(eps) and eps >= 0):
        raise UserError(f"eps={eps}: must be finite and at least 0; the usual value is 1e-6")
    derivative = norm.derivative_at(
        h, _checked_parameters(norm, parameters or {}, h.shape[-1]), float(eps)
    )
    if not np.all(np.isfinite(derivative.weight)):
        raise UserError(
            f"h of largest entry {np.max(np.abs(h)):.3g} at eps={eps}: 1/s is out of the range of"
            " float64; use a larger eps or h"
        )
    return derivative


def _checked_parameters(norm: Norm, parameters: Mapping[str, Any], d: int) -> dict[str, Floats]:
    shapes = {p.name: p.shape_at(d) for p in norm.parameters}
    found = {}
    for name, value in parameters.items():
        if name not in shapes:
            what = ", ".join(shapes) or "no parameters"
            raise UserError(
                f"parameters[{name!r}]: {norm.title} has {what}{suggest(name, list(shapes))}"
            )
        value = as_float64(name, value)
        shape = shapes[name]
        if value.shape != shape and not (value.shape == () and len(shape) < 2):
            one = {0: "a scalar", 1: f"a scalar or of shape {shape}"}
            needs = one.get(len(shape), f"of shape {shape}")
            raise UserError(f"{name} of shape {value.shape}: must be {needs}")
        found[name] = value
    return found


def norm_jacobian(
    norm: Norm | str, h: Any, parameters: Mapping[str, Any] | None = None, eps: float = 1e-6
) -> Floats:
    """Return the Jacobian of a norm at h: J = diag(w) (P - (1 - k) u u^T).

    For RMSNorm (g / s)(I - h h^T / (d s^2)); at h = 0 it is g / sqrt(eps) I, and zero by convention
    where eps = 0 leaves it undefined.

    Args:
      norm, h, parameters, eps: see :func:`norm_derivative`.

    Returns:
      (..., d, d) float64; row i is the gradient of output i.

    Raises:
      UserError: see :func:`norm_derivative`.

    >>> norm_jacobian("rmsnorm", [1.0, 0.0], {"gain": [2.0, 3.0]}, eps=0.5)
    array([[1., 0.],
           [0., 3.]])
    """
    return norm_derivative(norm, h, parameters, eps).matrix()


def norm_jvp(
    norm: Norm | str,
    h: Any,
    v: Any,
    parameters: Mapping[str, Any] | None = None,
    eps: float = 1e-6,
) -> Floats:
    """Return J v in O(d), for v (..., d); other arguments as for :func:`norm_derivative`.

    >>> norm_jvp("rmsnorm", [1.0, 0.0], [4.0, 1.0], eps=0.5)   # 4 eps/s^3 along h, 1/s across
    array([2., 1.])
    """
    derivative = norm_derivative(norm, h, parameters, eps)
    return derivative.jvp(as_float64("v", v, derivative.weight.shape[-1:]))


def norm_vjp(
    norm: Norm | str,
    h: Any,
    w: Any,
    parameters: Mapping[str, Any] | None = None,
    eps: float = 1e-6,
) -> Floats:
    """Return J^T w in O(d), for w (..., d); other arguments as for :func:`norm_derivative`."""
    derivative = norm_derivative(norm, h, parameters, eps)
    return derivative.vjp(as_float64("w", w, derivative.weight.shape[-1:]))


def _one_vector(norm: Norm | str, h: Any, parameters: Any, eps: float) -> Any:
    D = norm_derivative(norm, h, parameters, eps)
    if D.weight.ndim != 1:
        raise UserError(f"h of shape {D.weight.shape}: must be one vector (d,)")
    return D


def norm_singular_values(
    norm: Norm | str, h: Any, parameters: Mapping[str, Any] | None = None, eps: float = 1e-6
) -> Floats:
    """Return all singular values of a norm at one point, largest first.

    They are |w| (d - 1 times; d - 2 where the mean is removed), |w| k, and 0 for the mean, where
    the gain is uniform; for a row without a direction (identity, elementwise) the |w_i| themselves;
    else the roots of a secular equation, or those of the matrix: see
    :func:`normjax.spectra.norm_spectra.derivative_singular_values`.

    Returns:
      (d,) float64, each right relative to itself, the smallest too; where they are those of the
      matrix, to roundings of the largest.

    Raises:
      UserError: see :func:`norm_derivative`; h is not one vector; nonzero gains too far apart.

    >>> norm_singular_values("layernorm", [1.0, 2.0, 3.0, 6.0], {"gain": 2.0}, eps=0.5)
    array([1.   , 1.   , 0.125, 0.   ])
    """
    values = derivative_singular_values(_one_vector(norm, h, parameters, eps))
    return np.asarray(values, np.float64)


def null_directions(
    norm: Norm | str, h: Any, parameters: Mapping[str, Any] | None = None, eps: float = 0.0
) -> NullDirections:
    """Return what a norm's Jacobian maps to zero: bases of its right and left null space.

    For eps = 0 and gains without zeros J u = 0 (and J 1 = 0 where the mean is removed) and, on the
    left, (u / w)^T J = 0 (and (1 / w)^T J = 0). A gain of zero adds e_i on the left and one more on
    the right. For eps > 0 only what is exactly zero is counted: k > 0 takes u out. For a row
    whose derivative is a matrix, what is zero to d roundings of its norm. For many points see
    :meth:`normjax.Norm.null_directions`.

    Returns:
      right (d, m) with J right = 0 and left (d, m) with left^T J = 0, orthonormal columns, float64.

    Raises:
      UserError: see :func:`norm_derivative`; or h is not one vector.

    >>> right, left = null_directions("rmsnorm", [3.0, 4.0], {"gain": [3.0, 4.0]})
    >>> right[:, 0].round(3), left[:, 0].round(3)     # u, and u / g normalized
    (array([0.6, 0.8]), array([0.707, 0.707]))
    """
    return _one_vector(norm, h, parameters, eps).null_directions()


# --- placements -----------------------------------------------------------------------------------


class Mix(NamedTuple):
    """Weights that mix rows, at a point: W, its derivative by H, and the rows it is applied to.

    Attributes:
      weights: (..., m, n) or, per feature, (..., m, n, d).
      slope: (..., m, n, n d), or None for weights that do not depend on H.
      rows: (..., n, d).
    """

    weights: Floats
    slope: Floats | None
    rows: Floats


class Tangents:
    """The algebra of Jacobians for ``equation.fold``: derivatives by H in place of values.

    One is (..., r, n d), r the features of the value and n d those of H; None stands for the
    identity. Where the branch mixes T tokens, J_F is (T, T, d, d), [i, m] by the token m, and so is
    what comes after it; what acts on each token alone is (T, r, n d) still.

    Args:
      maps: J of the norm in each slot that has one, at its point, (..., d, d).
      branch: J_F, (..., d, d) or (T, T, d, d).
      factors: c, A and B by name, as arrays that multiply (..., r, n d); absent ones are 1.
      mixes: the :class:`Mix` of each of "read", "keep", "write" that mixes rows.
      copies: how many rows a branch is written to where no weights say so.
      joined: the derivatives of K by the branch's output and by what it read, (..., d, d) each.
    """

    def __init__(
        self, maps: Mapping[str, Floats], branch: Floats, factors: Mapping[str, Any],
        mixes: Mapping[str, Mix] | None = None, whole: bool = False, copies: int = 1,
        joined: tuple[Floats, Floats] | None = None,
    ):  # fmt: skip
        self.maps, self.own, self.factors = maps, branch, factors
        self.mixes, self.whole, self.copies = mixes or {}, whole, copies
        self.joined = joined

    def norm(self, slot: str, norm: Any, x: Any) -> Any:
        J = self.maps.get(slot)
        if J is None:
            return x
        if self.copies == 1 or slot in ("pre_norm", "branch_norm"):
            return J if x is None else self._left(J, x) @ x
        n, d = J.shape[-3], J.shape[-1]  # every row by itself
        x = np.broadcast_to(np.eye(n * d), (*J.shape[:-3], n * d, n * d)) if x is None else x
        split = x.reshape(*x.shape[:-2], n, d, x.shape[-1])
        return (self._left(J, x) @ split).reshape(x.shape)

    def branch(self, x: Any) -> Any:
        if x is None:
            return self.own
        return self.own @ (x[None] if self.whole else x)

    def join(self, join: Any, x: Any, read: Any) -> Any:
        if self.joined is None:
            return x
        by_output, by_read = self.joined
        return self.plus(
            by_read if read is None else self._left(by_read, read) @ read,
            self._left(by_output, x) @ x,
        )

    def times(self, name: str, factor: Any, x: Any) -> Any:
        w = self.factors.get(name, 1.0)
        if np.ndim(w) == 0 and w == 1:
            return x
        return w * (np.eye(self.own.shape[-1] * self.copies) if x is None else x)

    def mix(self, name: str, weights: Any, state: Any, x: Any) -> Any:
        found = self.mixes.get(name)
        if found is None:
            x = x if name == "read" else self.times(name, weights, x)
            return np.tile(x, (self.copies, 1)) if name == "write" and self.copies > 1 else x
        w, slope, rows = found
        n, d = rows.shape[-2:]
        if x is None:
            x = np.broadcast_to(np.eye(n * d), (*rows.shape[:-2], n * d, n * d))
        split = x.reshape(*x.shape[:-2], n, d, x.shape[-1])
        w = w if w.ndim == rows.ndim + 1 else np.broadcast_to(w[..., None], (*w.shape, d))
        moved = np.einsum("...mnd,...ndk->...mdk", self._left(w, x), split)
        moved = moved.reshape(*moved.shape[:-3], -1, moved.shape[-1])
        if slope is None:
            return moved
        turned = np.einsum("...mnk,...nd->...mdk", slope, rows)
        return self.plus(moved, turned.reshape(*turned.shape[:-3], -1, turned.shape[-1]))

    def plus(self, kept: Any, written: Any) -> Any:
        kept = np.eye(written.shape[-1]) if kept is None else kept
        if self.whole and kept.ndim == 2:
            kept = np.broadcast_to(kept, (len(written), *kept.shape))
        if not self.whole:
            return kept + written
        whole, local = (kept, written) if self._mixed(kept) else (written, kept)
        if not self._mixed(whole) or self._mixed(local):
            return whole + local
        spread, index = np.zeros(whole.shape), np.arange(len(whole))
        spread[index, index] = local
        return spread + whole

    def _mixed(self, x: Any) -> bool:
        return self.whole and x.ndim == 4

    def _left(self, J: Floats, x: Floats) -> Floats:
        return J[:, None] if self._mixed(x) else J


def placement_jacobian(
    branch: Any,
    *,
    pre_norm: Any = None,
    branch_norm: Any = None,
    skip_norm: Any = None,
    post_norm: Any = None,
    a: Any = 1.0,
    b: Any = 1.0,
    c: Any = 1.0,
) -> Floats:
    """Return the Jacobian of h' = P(a S(h) + b Q(F(c N(h)))): J_P (a J_S + diag(b) J_Q J_F c J_N).

    Each factor is taken at its point: J_F at c N(h), J_Q at F(c N(h)), J_P at the sum.

    Args:
      branch: J_F, (..., d, d).
      pre_norm, branch_norm, skip_norm, post_norm: J_N, J_Q, J_S, J_P, each (..., d, d) or None for
        the identity.
      a, c: numbers, or arrays over the leading axes.
      b: a number or (d,), the weight of the branch.

    Returns:
      (..., d, d) float64.

    Raises:
      UserError: a matrix that is not square, not finite, or of another d; a b of another shape.

    >>> placement_jacobian([[2.0]], pre_norm=[[3.0]], post_norm=[[0.5]], a=4.0, b=5.0, c=0.1)
    array([[3.5]])
    """
    own = as_float64("branch", branch)
    if own.ndim < 2 or own.shape[-1] != own.shape[-2]:
        raise UserError(f"branch of shape {own.shape}: must be square matrices (..., d, d)")
    square = own.shape[-2:]
    given = {
        "pre_norm": pre_norm, "branch_norm": branch_norm,
        "skip_norm": skip_norm, "post_norm": post_norm,
    }  # fmt: skip
    maps = {k: as_float64(k, v, square) for k, v in given.items() if v is not None}
    a, b, c = as_float64("a", a), as_float64("b", b), as_float64("c", c)
    if b.shape not in ((), square[:1]):
        raise UserError(f"b of shape {b.shape}: must be a number or of shape ({square[0]},)")
    columns = {
        "keep": a[..., None, None] if a.ndim else a,
        "write": b[..., None] if b.ndim else b,
        "scale": c[..., None, None] if c.ndim else c,
    }
    found = fold(Sublayer(), None, Tangents(maps, own, columns))
    return np.broadcast_to(found, np.broadcast_shapes(found.shape, own.shape)).copy()
