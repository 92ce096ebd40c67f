"""Self-tests that ride along: what a norm does to the radial part of a gradient is known exactly.

A norm does not see the length of what it reads, so that no gradient comes back along it but a term
in eps: with u the direction of x (of x less its mean, for LayerNorm), s^2 = mean(x^2) + eps,
y = N(x) and G = dL/dy,

    u . J_N^T G = (eps / s^2) sum((y - bias) G) / |x|,      1 . J_N^T G = 0 for LayerNorm,

and with that, for a sub-layer h' = P(x) with x = a h + b Q(F(c N(h))),

    u_h . dL/dh = a u_h . dL/dx + (eps / s_h^2) sum((r - c bias) dL/dr) / |h|,   r = c N(h)
    u_x . dL/dx = (eps / s_x^2) sum((h' - bias) dL/dh') / |x|

diagnostics/identities.py tests with them in float64 on one sequence. The right sides take nothing
from the norm's derivative, so that a wrong one is noticed.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from normjax.diagnostics.measures import rms, wide
from normjax.norm_derivatives import unit
from normjax.norm_functions import power_of_two_near
from normjax.norms import Norm


def returned(norm: Norm, eps: float, x: Array, y: Array, pulled: Array, bias: Array) -> Array:
    """Return what a norm of x with output y lets back along what it forgets: (..., d) -> (..., m).

    Along u the term in eps; along the mean, where it is removed, nothing. Sizes are multiplied
    after the sum, so that no product leaves the range of float32.

    Args:
      norm, eps: the row and its eps.
      x, y, pulled: (..., d), input, output, gradient with respect to y (y may be c N(x)).
      bias: (d,) or 0, of the norm.
    """
    centred, c = _centred(norm, x)
    size = rms(centred, -1) * c
    share = norm.law.kept(jnp.square(size), eps) if norm.law else 0.0
    output, size_y = _near_one(wide(y) - bias)
    gradient, size_g = _near_one(wide(pulled))
    length = rms(centred, -1) * x.shape[-1] ** 0.5
    ratio = size_y / jnp.where(length == 0, 1, length) / c
    term = share * ratio * jnp.sum(output * gradient, axis=-1) * size_g
    return jnp.stack([term, *[jnp.zeros_like(term)] * norm.removes_mean], axis=-1)


def along(norm: Norm, x: Array, pulled: Array) -> Array:
    """Return pulled along the directions that the norm forgets at x: (..., d) -> (..., m).

    u, of x or of x less its mean; then, where the mean is removed, 1 / sqrt(d).
    """
    pulled = wide(pulled)
    found = [jnp.sum(unit(_centred(norm, x)[0]) * pulled, axis=-1)]
    if norm.removes_mean:
        found.append(jnp.sum(pulled, axis=-1) / x.shape[-1] ** 0.5)
    return jnp.stack(found, axis=-1)


def relative(defect: Array, *gradients: Array) -> Array:
    """Return the largest |defect| (..., m) over the largest length among gradients (..., d)."""
    sizes = [jnp.max(rms(g, -1)) * g.shape[-1] ** 0.5 for g in gradients]
    size = jnp.max(jnp.stack(sizes))
    return jnp.max(jnp.abs(defect)) / jnp.where(size == 0, 1, size)


def _near_one(x: Array) -> tuple[Array, Array]:
    """Return x (..., d) over a power of two near its largest entry, and that power (...)."""
    c, inverse = power_of_two_near(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    return x * inverse, c[..., 0]


def _centred(norm: Norm, x: Array) -> tuple[Array, Array]:
    """Return x, less its mean where the norm removes it, over a power of two, and that power."""
    z, c = _near_one(wide(x))
    return norm.centred(z), c
