"""Closed-form Jacobians in float64: every norm of the table, and placements composed of them.

    norm        J = diag(w) (P - (1 - k) u u^T)                      (see norm_derivatives.py)
    placement   J = J_P (a I + b c J_Q J_F J_N)                      h' = P(a h + b Q(F(c N(h))))

Everything here is NumPy in float64, with leading axes free for many points at once, and needs no
64-bit mode. What autodiff gives for the same functions is the referee: see
:func:`normjax.verification.verify`. The branches F have their own file, branch_jacobians.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from normjax.errors import UserError, check_choice, suggest
from normjax.norm_derivatives import Floats, NormDerivative, unit
from normjax.norms import NORMS, Norm

# --- checks ---------------------------------------------------------------------------------------


def as_float64(name: str, x: Any, shape: tuple[int, ...] | None = None) -> Floats:
    """Return x as a float64 array.

    Raises:
      UserError: x is not numeric, not finite, or its last axes are not ``shape``.
    """
    try:
        array = np.asarray(x, np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{name} of type {type(x).__name__}: must be an array of numbers") from None
    if shape is not None and array.shape[max(0, array.ndim - len(shape)) :] != shape:
        raise UserError(f"{name} of shape {array.shape}: must be (..., {str(shape)[1:-1]})")
    if not np.all(np.isfinite(array)):
        where = np.argwhere(~np.isfinite(array))[0].tolist()
        raise UserError(
            f"{name}{where}={array[tuple(where)]}: must be finite; look at where it comes from"
        )
    return array


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
) -> NormDerivative:
    """Return the derivative of a norm at h as a value: weight, direction, radial factor.

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
    if norm.derivative is None:
        raise UserError(
            f"norm={norm.title}: has no closed form; give its row a derivative=, or use jax.jacfwd"
        )
    h = as_float64("h", h)
    if h.ndim == 0 or h.shape[-1] == 0:
        raise UserError(f"h of shape {h.shape}: must be (..., d) with at least one feature")
    if not (np.isfinite(eps) and eps >= 0):
        raise UserError(f"eps={eps}: must be finite and at least 0; the usual value is 1e-6")
    arguments = _norm_arguments(norm, parameters or {}, h.shape[-1])
    derivative = norm.derivative(h, **arguments, eps=float(eps))
    if not np.all(np.isfinite(derivative.weight)):
        raise UserError(
            f"h of largest entry {np.max(np.abs(h)):.3g} at eps={eps}: 1/s is out of the range of"
            " float64; use a larger eps or h"
        )
    return derivative


def _norm_arguments(norm: Norm, parameters: Mapping[str, Any], d: int) -> dict[str, Floats]:
    allowed = (["gain"] if norm.gain != "none" else []) + (["bias"] if norm.bias else [])
    arguments = {}
    for name, value in parameters.items():
        if name not in allowed:
            what = ", ".join(allowed) or "no parameters"
            hint = suggest(name, allowed)
            raise UserError(f"parameters[{name!r}]: {norm.title} has {what}{hint}")
        value = as_float64(name, value)
        if value.shape not in ((), (d,)):
            raise UserError(f"{name} of shape {value.shape}: must be a scalar or of shape ({d},)")
        arguments[name] = value
    if norm.gain == "1+g" and "gain" in arguments:
        arguments["gain"] = 1 + arguments["gain"]
    return arguments


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


def norm_singular_values(
    norm: Norm | str, h: Any, parameters: Mapping[str, Any] | None = None, eps: float = 1e-6
) -> Floats:
    """Return all singular values of a norm with uniform gain, largest first, in O(d).

    They are |w| (d - 1 times; d - 2 where the mean is removed), |w| k, and 0 for the mean; for a
    row without a direction (identity, elementwise) the |w_i| themselves, uniform or not.

    Raises:
      UserError: h is not one vector, or the gain is not uniform: then the values are the roots of a
        secular equation, which the module norm_spectra solves.

    >>> norm_singular_values("layernorm", [1.0, 2.0, 3.0, 6.0], {"gain": 2.0}, eps=0.5)
    array([1.   , 1.   , 0.125, 0.   ])
    """
    D = norm_derivative(norm, h, parameters, eps)
    if D.weight.ndim != 1:
        raise UserError(f"h of shape {D.weight.shape}: must be one vector (d,)")
    w, d = np.abs(D.weight), D.weight.size
    directed = bool(np.any(D.direction != 0))
    if (directed or D.centered) and not np.allclose(w, w[0], rtol=4e-16, atol=0):
        raise UserError(
            f"gain from {w.min():.3g} to {w.max():.3g} (over s): must be uniform here; for any gain"
            " use normjax.spectra.norm_spectra"
        )
    factors = np.ones(d)
    if D.centered:
        factors[-1] = 0.0
    if directed:
        factors[d - 1 - D.centered] = D.radial
    return np.sort(w * factors)[::-1]


def null_directions(
    norm: Norm | str, h: Any, parameters: Mapping[str, Any] | None = None, eps: float = 0.0
) -> tuple[Floats, Floats]:
    """Return what a norm's Jacobian maps to zero: bases of its right and left null space.

    J = diag(w) M with M = P - (1 - k) u u^T. For eps = 0 and gains without zeros J u = 0 (and J 1 =
    0 where the mean is removed) and, on the left, (u / w)^T J = 0. A gain of zero adds e_i on the
    left and on the right what M maps onto such e_i. For eps > 0 only what is exactly zero is
    counted: k > 0 takes u out.

    Returns:
      right (d, m) with J right = 0 and left (d, m) with left^T J = 0, orthonormal columns, float64.

    Raises:
      UserError: see :func:`norm_derivative`; or h is not one vector.

    >>> right, left = null_directions("rmsnorm", [3.0, 4.0], {"gain": [3.0, 4.0]})
    >>> abs(right[:, 0]).round(3), abs(left[:, 0]).round(3)     # u, and u / g normalized
    (array([0.6, 0.8]), array([0.707, 0.707]))
    """
    D = norm_derivative(norm, h, parameters, eps)
    if D.weight.ndim != 1:
        raise UserError(f"h of shape {D.weight.shape}: must be one vector (d,)")
    w, u, k, d = D.weight, D.direction, float(D.radial), D.weight.size
    kernel = np.zeros((d, 0))  # of M
    if D.centered:
        kernel = np.column_stack([kernel, np.full(d, d**-0.5)])
    if np.any(u != 0) and k == 0:
        kernel = np.column_stack([kernel, u])
    dead = np.flatnonzero(w == 0)
    axes = np.eye(d)[:, dead]
    # Right: M v in span(e_dead); M's range is what is orthogonal to its kernel. M only stretches
    # along u, so that one direction z with a part along u needs M^-1 z ~ k z + (1 - k) <u, z> u.
    reached = axes @ _null_space(kernel[dead].T)
    along = u @ reached
    if k > 0 and np.any(along != 0):
        z = reached @ (along / np.linalg.norm(along))
        inverted = k * z + (1 - k) * (u @ z) * u
        reached = np.column_stack([reached @ _null_space(along[None]), inverted])
    # Left: diag(w) x in the kernel of M, free where w = 0.
    combined = kernel @ _null_space(kernel[dead])
    inverse = np.divide(1.0, w, out=np.zeros(d), where=w != 0)
    left = np.column_stack([axes, inverse[:, None] * combined])
    return _orthonormal(np.column_stack([kernel, reached])), _orthonormal(left)


def _null_space(a: Floats) -> Floats:
    """Orthonormal basis (n, k) of the null space of a (m, n), m or n small."""
    if a.shape[0] == 0:
        return np.eye(a.shape[1])
    _, s, vt = np.linalg.svd(a)
    rank = int(np.sum(s > max(a.shape) * np.finfo(float).eps * max(1.0, s.max(initial=0.0))))
    return vt[rank:].T


def _orthonormal(columns: Floats) -> Floats:
    """Orthonormal basis of independent columns of any lengths."""
    return np.linalg.qr(unit(columns.T).T)[0] if columns.shape[1] else columns


# --- placements -----------------------------------------------------------------------------------


def placement_jacobian(
    branch: Any,
    *,
    read: Any = None,
    output: Any = None,
    stream: Any = None,
    a: Any = 1.0,
    b: Any = 1.0,
    c: Any = 1.0,
) -> Floats:
    """Return the Jacobian of h' = P(a h + b Q(F(c N(h)))): J_P (a I + diag(b) c J_Q J_F J_N).

    The same names as :func:`normjax.placements.combine`, with matrices for functions: J_F is taken
    at c N(h), J_Q at F(c N(h)), J_P at the sum.

    Args:
      branch: J_F, (..., d, d).
      read, output, stream: J_N, J_Q, J_P, each (..., d, d) or None for the identity.
      a, c: numbers, or arrays over the leading axes.
      b: a number or (d,), the weight of the branch.

    Returns:
      (..., d, d) float64.

    Raises:
      UserError: a matrix that is not square, not finite, or of another d; a b of another shape.

    >>> placement_jacobian([[2.0]], read=[[3.0]], stream=[[0.5]], a=4.0, b=5.0, c=0.1)
    array([[3.5]])
    """
    product = as_float64("branch", branch)
    if product.ndim < 2 or product.shape[-1] != product.shape[-2]:
        raise UserError(f"branch of shape {product.shape}: must be square matrices (..., d, d)")
    square = product.shape[-2:]
    given = {"read": read, "output": output, "stream": stream}
    maps = {k: as_float64(k, v, square) for k, v in given.items() if v is not None}
    a, b, c = as_float64("a", a), as_float64("b", b), as_float64("c", c)
    if b.shape not in ((), square[:1]):
        raise UserError(f"b of shape {b.shape}: must be a number or of shape ({square[0]},)")
    if "read" in maps:
        product = product @ maps["read"]
    if "output" in maps:
        product = maps["output"] @ product
    product = c[..., None, None] * (b[..., None] * product)
    product = a[..., None, None] * np.eye(square[0]) + product
    return maps["stream"] @ product if "stream" in maps else product
