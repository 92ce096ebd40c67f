"""Positions inside attention: rotary embedding. (Learned positions are a table in the decoder.)"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array


def rotary_angles(
    length: int, head_width: int, base: float = 10000.0, dtype: Any = jnp.float32
) -> Array:
    """Return the angles t * base^(-2 i / head_width) of position t, pair i: (T, head_width/2)."""
    frequency = base ** (-jnp.arange(0, head_width, 2, dtype=dtype) / head_width)
    return jnp.arange(length, dtype=dtype)[:, None] * frequency[None, :]


def rotate(x: Array, angles: Array) -> Array:
    """Rotate the pairs (x_i, x_{i + width/2}) of queries or keys by the angle of their position.

    Args:
      x: (B, T, H, head_width), head_width even.
      angles: (T, head_width/2) from :func:`rotary_angles`.

    Returns:
      Same shape and dtype; computed in float32 at least. Lengths are preserved, and the product of
      a rotated query and a rotated key depends on the distance of their positions only.

    References:
      Su et al. 2021, "RoFormer", arXiv 2104.09864, eq. 15 (in the half-split order of pairs).
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos = jnp.cos(angles).astype(wide)[:, None, :]
    sin = jnp.sin(angles).astype(wide)[:, None, :]
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
