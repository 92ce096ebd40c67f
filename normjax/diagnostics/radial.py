"""Self-tests that ride along: what a norm does to the radial part of a gradient is known exactly.

A norm does not see the length of what it reads, so that no gradient comes back along it but a term
in eps: with u the direction of x (of x less its mean, for LayerNorm), s^2 = mean(x^2) + eps,
y = N(x) and G = dL/dy,

    u . J_N^T G = (eps / s^2) sum((y - bias) G) / |x|

and with that, for a sub-layer h' = P(x) with x = a h + b Q(F(c N(h))),

    u_h . dL/dh = a u_h . dL/dx + (eps / s_h^2) sum((r - c bias) dL/dr) / |h|,   r = c N(h)
    u_x . dL/dx = (eps / s_x^2) sum((h' - bias) dL/dh') / |x|

See jacobians/identities.py for the same in float64 on one sequence. The right sides take nothing
from the norm's derivative, so that a wrong one is noticed.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from normjax.diagnostics.measures import rms, unit, wide
from normjax.norms import Norm


def returned(norm: Norm, eps: float, x: Array, y: Array, pulled: Array, bias: Array) -> Array:
    """Return what a norm of x with output y lets back along u: the term in eps, (..., d) -> (...).

    Args:
      norm, eps: the row and its eps.
      x, y, pulled: (..., d), input, output, gradient with respect to y (y may be c N(x)).
      bias: (d,) or 0, of the norm.
    """
    centred, y, pulled = _centred(norm, x), wide(y), wide(pulled)
    size = rms(centred, -1)
    length = size * x.shape[-1] ** 0.5
    share = norm.law.kept(jnp.square(size), eps) if norm.law else 0.0
    return share * jnp.sum((y - bias) * pulled, axis=-1) / jnp.where(length == 0, 1, length)


def along(norm: Norm, x: Array, pulled: Array) -> Array:
    """Return u . pulled for the direction u of x that the norm forgets: (..., d) -> (...)."""
    return jnp.sum(unit(_centred(norm, x)) * wide(pulled), axis=-1)


def relative(defect: Array, *gradients: Array) -> Array:
    """Return the largest |defect| (...) over the largest length among gradients (..., d)."""
    sizes = [jnp.max(rms(g, -1)) * g.shape[-1] ** 0.5 for g in gradients]
    size = jnp.max(jnp.stack(sizes))
    return jnp.max(jnp.abs(defect)) / jnp.where(size == 0, 1, size)


def _centred(norm: Norm, x: Array) -> Array:
    x = wide(x)
    return x - jnp.mean(x, axis=-1, keepdims=True) if "mean" in norm.forgets else x
