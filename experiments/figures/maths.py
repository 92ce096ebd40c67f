"""What the figures are computed from: the project's norm and its Jacobian, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax.errors import UserError
from normjax.jacobians.closed_forms import norm_jacobian
from normjax.jacobians.verification import verify
from normjax.norm_derivatives import Floats, unit
from normjax.norm_functions import rms_norm
from normjax.traced import as_float64

_rms_norm = jax.jit(rms_norm, static_argnames="eps")


def normalize(h: Any, gain: Any = None, eps: float = 0.0) -> Floats:
    """Return RMSNorm(h) by :func:`normjax.norm_functions.rms_norm` in float64.

    Args:
        h: (..., d).
        gain: (d,) or None.
        eps: inside the root.

    Returns:
        (..., d) float64.

    >>> (normalize([3.0, 4.0]) / 2**0.5).round(12)
    array([0.6, 0.8])
    """
    h = as_float64("h", h)
    with jax.enable_x64(True):
        wide = None if gain is None else jnp.asarray(as_float64("gain", gain))
        return np.asarray(_rms_norm(jnp.asarray(h), wide, eps=eps))


def verified_jacobian(h: Any, gain: Any = None, eps: float = 0.0) -> Floats:
    """Return the closed-form Jacobian of RMSNorm at h, checked against ``jax.jacfwd`` on the way.

    Args:
        h: (d,).
        gain: (d,) or None.
        eps: inside the root.

    Returns:
        (d, d) float64.

    Raises:
        VerificationError: if the two disagree beyond rounding.

    >>> (verified_jacobian([1.0, 0.0], eps=0.5) * 2).round(12)   # eps/s^3 along h, 1/s across
    array([[1., 0.],
           [0., 2.]])
    """
    parameters = {} if gain is None else {"gain": gain}
    verify("rmsnorm", None, at=h, parameters=parameters, eps=eps, scales=(1.0,)).check()
    return norm_jacobian("rmsnorm", h, parameters, eps)


def projections(u: Any) -> tuple[Floats, Floats]:
    """Return the matrices u u^T and I - u u^T of the direction of u.

    Args:
        u: (d,), not zero; it need not have length 1.

    Returns:
        Two (d, d) float64 matrices: what is parallel to u, and what is left.

    Raises:
        UserError: if u is zero.

    >>> onto, rest = projections([3.0, 4.0])
    >>> (onto @ [5.0, 0.0]).round(12), (rest @ [5.0, 0.0]).round(12)
    (array([1.8, 2.4]), array([ 3.2, -2.4]))
    """
    u = unit(as_float64("u", u))
    if not np.any(u):
        raise UserError("u: is zero and has no direction; take another vector")
    onto = np.outer(u, u)
    return onto, np.eye(len(u)) - onto


def orthonormal_to(u: Any) -> Floats:
    """Return unit vectors (d - 1, d) orthogonal to u and to each other, for d = 2 or 3.

    >>> orthonormal_to([0.6, 0.8]).round(12)
    array([[-0.8,  0.6]])
    """
    u = unit(as_float64("u", u))
    if len(u) == 2:
        return np.array([[-u[1], u[0]]])
    first = unit(np.cross(u, np.eye(3)[np.argmin(np.abs(u))]))
    return np.stack([first, np.cross(u, first)])


def circle(radius: float = 1.0, count: int = 181) -> Floats:
    """Return points (count, 2) around a circle, the last one the first again.

    >>> circle(2.0, 5).round(12)[1]
    array([0., 2.])
    """
    angle = np.linspace(0.0, 2 * np.pi, count)
    return radius * np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def slope(x: Any, y: Any) -> float:
    """Return the least-squares slope of log y against log x.

    >>> round(slope([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]), 12)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
