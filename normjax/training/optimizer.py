"""AdamW as used here: schedule, clipping that survives overflow, decay of matrices only."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

DECAYED = ("kernel", "embedding", "positions", "down", "up")
"""Leaf names that weight decay applies to; gains, biases and branch weights are left alone."""


def unit_schedule(steps: int, warmup: int, final_fraction: float) -> optax.Schedule:
    """Return step -> factor on the peak rate: linear warm-up to 1, then cosine to the final one.

    Step 0 already has 1/(warmup + 1), so that no step is lost.

    >>> schedule = unit_schedule(steps=10, warmup=1, final_fraction=0.1)
    >>> [round(float(schedule(s)), 3) for s in (0, 1, 10)]
    [0.5, 1.0, 0.1]
    """
    ramp = optax.linear_schedule(1 / (warmup + 1), 1.0, warmup)
    cosine = optax.cosine_decay_schedule(1.0, max(steps - warmup, 1), final_fraction)
    return optax.join_schedules([ramp, cosine], [warmup])


def global_norm(tree: Any) -> tuple[Array, Array]:
    """Return (m, c) with m c the root of the sum of squares; m is finite where the leaves are.

    c is a power of two near the largest entry, so that m neither overflows nor vanishes: a leaf of
    1e20 has a norm whose square float32 cannot hold. m c itself may still overflow.

    >>> m, c = global_norm({"a": jnp.full(4, 1e30)})
    >>> f"{float(m * c):.3g}"
    '2e+30'
    """
    leaves = [
        leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in jax.tree.leaves(tree)
    ]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in leaves]))
    # Not norm_functions.power_of_two_near: with it a run beside others differs in last bits from
    # one alone.
    _, exponent = jnp.frexp(jnp.where(largest > 0, largest, 1))
    most = -int(jnp.finfo(largest.dtype).minexp) - 26  # float32: 100
    c = jnp.ldexp(jnp.ones_like(largest), jnp.clip(exponent, -most, most))
    c = jnp.where(jnp.isfinite(largest), c, largest)
    # The barrier keeps the compiler from moving 1/c out of the sum of squares, which would undo it.
    inverse = jax.lax.optimization_barrier(1 / c)
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf * inverse)) for leaf in leaves)), c


def clip(gradients: Any, limit: float) -> tuple[Any, Array]:
    """Scale gradients so that their global norm is at most ``limit``; return them and the norm.

    Right for every finite input: entries of 1e20 are scaled down, not to zero, although their
    norm's square overflows. ``limit`` 0 switches clipping off. A non-finite entry gives a
    non-finite norm; the step that sees it is skipped.

    >>> clipped, norm = clip({"a": jnp.array([1e20, 1.0])}, 1.0)
    >>> clipped["a"].tolist()[0]
    1.0
    """
    m, c = global_norm(gradients)
    norm = m * c
    if limit == 0:
        return gradients, norm
    inverse = jax.lax.optimization_barrier(1 / c)
    over = m > limit * inverse
    factor = jnp.where(over, limit / jnp.where(m > 0, m, 1), 1.0)
    first = jnp.where(over, inverse, 1.0)
    return jax.tree.map(lambda g: ((g * first) * factor).astype(g.dtype), gradients), norm


def decay_mask(params: Any) -> Any:
    """Return a tree of booleans: True for matrices, False for gains, biases and branch weights."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in DECAYED, params)


def adamw(
    beta1: float, beta2: float, eps: float, weight_decay: Any
) -> optax.GradientTransformation:
    """Return AdamW without its learning rate (Loshchilov and Hutter 2019, arXiv 1711.05101).

    The weight decay may be a traced scalar: runs that differ in it share one program.
    """
    return optax.chain(
        optax.scale_by_adam(beta1, beta2, eps),
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
    )
