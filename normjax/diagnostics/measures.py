"""Numbers from arrays: sizes, angles, attention, hidden units. Pure functions, float32 at least.

A non-finite input gives a non-finite output, never an error: comparisons, which would turn NaN into
"no", are made to pass it on.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from normjax.diagnostics.definitions import DEAD, SATURATED
from normjax.norm_derivatives import unit
from normjax.norm_functions import power_of_two_near


def wide(x: Array) -> Array:
    """Return x in float32, or in float64 where it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def rms(x: Array, axis: Any = None) -> Array:
    """Return sqrt(mean(x^2)), without overflow or underflow of the squares.

    >>> f"{float(rms(jnp.array([3e30, 4e30]))):.4g}"
    '3.536e+30'
    """
    x = wide(x)
    c, inverse = power_of_two_near(jnp.max(jnp.abs(x), axis=axis, keepdims=True))
    root = jnp.sqrt(jnp.mean(jnp.square(x * inverse), axis=axis, keepdims=True)) * c
    return jnp.squeeze(root, axis=axis)


def cosine(x: Array, y: Array) -> Array:
    """Return the mean over tokens of the cosine between x and y, both (..., d).

    >>> round(float(cosine(jnp.array([[3.0, 4.0]]), jnp.array([[1.0, 0.0]]))), 6)
    0.6
    """
    return jnp.mean(jnp.sum(unit(wide(x)) * unit(wide(y)), axis=-1))


def token_similarity(x: Array) -> Array:
    """Return the mean cosine between different tokens of a sequence: (..., T, d) -> ().

    sum_{s != t} u_s . u_t = |sum_t u_t|^2 - sum_t |u_t|^2 over T (T - 1) pairs; NaN for T = 1.

    >>> round(float(token_similarity(jnp.array([[1.0, 0.0], [0.0, 1.0], [0.0, 2.0]]))), 6)
    0.333333
    """
    u = unit(wide(x))
    tokens = x.shape[-2]
    total = jnp.sum(jnp.square(jnp.sum(u, axis=-2)), axis=-1)
    pairs = jnp.asarray(tokens * (tokens - 1), u.dtype)
    return jnp.mean((total - jnp.sum(jnp.square(u), axis=(-2, -1))) / pairs)


def attention(logits: Array, probabilities: Array) -> dict[str, Array]:
    """Return the diagnostics of causal attention per head, from (B, H, T, T) logits, masked or not.

    The entropy of a query is -log max p + sum p (max l - l), from p = exp(l - log sum exp l): no
    term is negative and no logarithm of a small p is taken.
    """
    logits, p = wide(logits), wide(probabilities)
    length = logits.shape[-1]
    seen = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    keys = jnp.arange(1, length + 1, dtype=logits.dtype)
    several = keys > 1
    count = jnp.sum(several).astype(logits.dtype)

    def over_several(x: Array) -> Array:  # (B, H, T) -> (H,): mean over queries of two keys or more
        return jnp.mean(jnp.sum(jnp.where(several, x, 0), axis=-1) / count, axis=0)

    visible = jnp.where(seen, logits, 0)
    highest = jnp.max(jnp.where(seen, logits, -jnp.inf), axis=-1)
    top = jnp.max(p, axis=-1)
    below = jnp.where(seen, highest[..., None] - logits, 0)
    entropy = jnp.sum(p * below, axis=-1) - jnp.log(top)
    # Counted from the highest logit, which keeps the digits of a small spread on a large mean.
    c, inverse = power_of_two_near(jnp.max(below, axis=(0, 2, 3), keepdims=True))
    small = below * inverse
    mean = jnp.sum(small, axis=-1) / keys
    variance = jnp.sum(jnp.where(seen, jnp.square(small - mean[..., None]), 0), axis=-1) / keys
    saturated = jnp.where(jnp.isnan(top), top, (top > SATURATED).astype(p.dtype))
    share = entropy / jnp.log(jnp.where(several, keys, 2))
    return {
        "attention/logit_max": jnp.max(jnp.abs(visible), axis=(0, 2, 3)),
        "attention/logit_std": jnp.sqrt(over_several(variance)) * c[0, :, 0, 0],
        "attention/entropy": jnp.mean(entropy, axis=(0, 2)),
        "attention/entropy_share": over_several(share),
        "attention/saturated_share": over_several(saturated),
    }


def hidden(x: Array) -> dict[str, Array]:
    """Return the diagnostics of an MLP's hidden layer (..., F)."""
    size = rms(x)
    largest = jnp.max(jnp.abs(wide(x)), axis=tuple(range(x.ndim - 1)))
    dead = (largest <= DEAD * size).astype(size.dtype)
    dead = jnp.where(jnp.isfinite(largest), dead, largest - largest)
    return {"mlp/activation_rms": size, "mlp/dead_share": jnp.mean(dead)}
