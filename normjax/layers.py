"""The layers of a decoder as Flax modules: linear, rotary positions, attention, MLP, the norm.

Shapes: B sequences, T positions, D width, H heads, K key/value heads, G = H / K query heads that
share one of them, C head width, R = G T rows of a group, S positions that are seen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from normjax.decoder_config import DecoderConfig
from normjax.equation import MODEL_NORM
from normjax.mixing import softmax_over
from normjax.norms import NormLayer

DIAGNOSTICS, SHIFTS = "diagnostics", "shifts"
"""Flax collections: arrays that are looked at, and zeros added to some of them."""
WATCHED, METERS = "watched", "meters"
"""Flax collections: numbers of what passes, reduced on the spot, and zeros, one per metered array,
whose gradient is the mean square of that array's gradient."""


class Linear(nn.Module):
    """y = x W (+ b), computed on (tokens, features): one plain matrix product on every backend."""

    features: int
    config: DecoderConfig
    stddev: float
    out_dtype: Any = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c, shape = self.config, (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.normal(self.stddev), shape, c.param_dtype)
        y = jnp.matmul(
            x.reshape(-1, x.shape[-1]), kernel.astype(x.dtype),
            preferred_element_type=self.out_dtype or x.dtype,
        )  # fmt: skip
        if c.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), c.param_dtype)
            y = y + bias.astype(y.dtype)
        return y.reshape(*x.shape[:-1], self.features)


def softcap(x: Array, cap: float) -> Array:
    """Return cap tanh(x / cap), or x where cap is 0 (Gemma 2 2024, arXiv 2408.00118, section 2)."""
    return cap * jnp.tanh(x / cap) if cap else x


def wide(dtype: Any) -> Any:
    """Return the dtype, or float32 where it is narrower."""
    return jnp.promote_types(dtype, jnp.float32)


def tapped(module: nn.Module, name: str, x: Array, shifted: bool = False) -> Array:
    """Show x to whoever collects diagnostics; returns x, and adds nothing to a program without one.

    ``shifted`` also adds the array of that name in the collection "shifts", where there is one: the
    gradient with respect to it is that with respect to x.
    """
    if shifted:
        x = module.perturb(name, x, collection=SHIFTS)
    module.sow(DIAGNOSTICS, name, x)
    return x


def watched(module: nn.Module, name: str, number: Callable[[], Array]) -> None:
    """Show a number of what passes to whoever collects these; without one it is not computed.

    Nothing is differentiated through it.
    """
    if module.is_mutable_collection(WATCHED):
        module.sow(WATCHED, name, jax.lax.stop_gradient(number()))


def mean_square(x: Array, axis: Any = None) -> Array:
    """Return mean(x^2), in float32 at least."""
    return jnp.mean(jnp.square(x.astype(wide(x.dtype))), axis)


def metered(module: nn.Module, name: str, x: Array) -> Array:
    """Return x; where there are meters, the derivative of the loss by this one is made to be N^2
    times the mean square of that by x, N the tokens of x: no array is kept for it."""
    if module.has_variable(METERS, name) or module.is_mutable_collection(METERS):
        zero: Any = module.variable(METERS, name, jnp.zeros, (), jnp.float32)
        return _metered(x, zero.value)
    return x


# A reverse derivative of its own, which forward mode refuses: only training steps have meters.
@jax.custom_vjp
def _metered(x: Array, meter: Array) -> Array:
    return x


def _measured(x: Array, pulled: Array) -> tuple[Array, Array]:
    tokens = pulled.size // pulled.shape[-1]
    size = jnp.mean(jnp.square(pulled.astype(jnp.float32) * tokens))
    return pulled, size


_metered.defvjp(lambda x, meter: (x, None), _measured)


def norm_layer(config: DecoderConfig, name: str, norm: Any = MODEL_NORM) -> NormLayer:
    """Return what a slot holds, the config's own norm or another, as a module of that name."""
    return NormLayer(config.norm_of(norm), config.norm_eps, config.param_dtype, name=name)


# --- positions


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
      angles: (T, head_width/2) from :func:`rotary_angles`, or fewer: then only the first features
        are turned, and the others are returned as they are.

    Returns:
      Same shape and dtype; computed in float32 at least. Lengths are preserved, and the product of
      a rotated query and a rotated key depends on the distance of their positions only.

    References:
      Su et al. 2021, "RoFormer", arXiv 2104.09864, eq. 15 (in the half-split order of pairs).
    """
    turns = 2 * angles.shape[-1]
    if turns < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :turns], angles), x[..., turns:]], axis=-1)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos = jnp.cos(angles).astype(wide)[:, None, :]
    sin = jnp.sin(angles).astype(wide)[:, None, :]
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def angles_of(
    config: DecoderConfig, length: int, local: Any = False, dtype: Any = jnp.float32
) -> Array:
    """Return the angles of a block's queries and keys: (T, rotary width / 2)."""
    width, other = config.rotary_width, config.local_rotary_base
    angles = rotary_angles(length, width, base=config.rotary_base, dtype=dtype)
    if local is False or not other:
        return angles
    own = rotary_angles(length, width, base=other, dtype=dtype)
    return own if local is True else jnp.where(local, own, angles)


def seen_by(config: DecoderConfig, length: int, local: Any = False) -> Array:
    """Return which tokens (columns) each token sees: itself and those before it, (T, T).

    In local blocks no more than ``config.local_window`` (Beltagy et al. 2020, arXiv 2004.05150).
    """
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
    if local is False or not config.local_window:
        return causal
    oldest = jnp.arange(length) - (config.local_window - 1)
    near = causal & (jnp.arange(length)[None, :] >= oldest[:, None])
    return near if local is True else jnp.where(local, near, causal)


# --- branches


class Attention(nn.Module):
    """Causal softmax attention with grouped keys and values: softmax(q k^T / sqrt(C)) v W_o.

    ``local`` is whether the block is one of ``config.local_blocks``; an array () where blocks that
    are scanned differ. There, a token sees the last ``config.local_window`` tokens.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(self, x_BTD: Array, local: Any = False) -> Array:
        c = self.config
        batch, length, width = x_BTD.shape
        K, C, G = c.kv_head_count, c.head_width, c.heads // c.kv_head_count
        std = partial(c.initialization.stddev, width)
        gain = c.placement_row.branch_gain(c.depth)
        q = Linear(K * G * C, c, std(K * G * C), name="query")(x_BTD)
        k = Linear(K * C, c, std(K * C), name="key")(x_BTD)
        own = gain * c.placement_row.value_gain
        v = Linear(K * C, c, own * std(K * C), name="value")(x_BTD)
        q, k, v = (_normed_heads(c, n, x) for n, x in (("query", q), ("key", k), ("value", v)))
        if c.positions == "rotary":
            angles = angles_of(c, length, local, wide(q.dtype))
            q, k = rotate(q, angles), rotate(k, angles)
        # Laid out as plain batched products (B, K): twice as fast on a CPU as the einsum over the
        # heads where they stand. The G queries of a group are rows of one product.
        q_BKRC = _heads_first((q * c.attention_factor).reshape(batch, length, K, G, C))
        k_BKSC, v_BKSC = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        logits = jnp.matmul(
            q_BKRC, k_BKSC.transpose(0, 1, 3, 2), preferred_element_type=wide(q.dtype)
        )
        logits = tapped(self, "logits", softcap(logits, c.attention_softcap))
        causal = seen_by(c, length, local)
        p_BKRS = softmax_over(jnp.tile(causal, (G, 1)), logits)
        p_BKRS = tapped(self, "probabilities", p_BKRS).astype(v.dtype)
        # The dearest by far, T^2 numbers a head: one sequence of the batch stands for all.
        watched(self, "logit_max", lambda: _largest_seen(logits[:1], causal, G))
        watched(self, "collision", lambda: _collision_share(c, local, p_BKRS[:1], G))
        o = (p_BKRS @ v_BKSC).reshape(batch, K, G, length, C)
        o = o.transpose(0, 3, 1, 2, 4).reshape(batch, length, K * G * C)
        if c.placement_row.attention.head_scale:
            scale = self.param("head_scale", nn.initializers.ones, (c.heads,), c.param_dtype)
            o = o * jnp.repeat(scale, C).astype(o.dtype)
        o = _normed_heads(c, "output", o).reshape(o.shape)
        out_std = gain * c.initialization.output_stddev(K * G * C, width, c.depth)
        written = Linear(width, c, out_std, name="output")(o)
        watched(self, "head_square", lambda: _head_squares(
            o, self.variables["params"]["output"]["kernel"], c.heads
        ))  # fmt: skip
        return written


def _normed_heads(config: DecoderConfig, name: str, x: Array) -> Array:
    """Return an inner array by head, normed where it is to be: (B, T, H C) -> (B, T, H, C)."""
    over = config.inner_norms.get(name)
    if over == "heads":
        x = norm_layer(config, f"{name}_norm")(x)
    x = x.reshape(*x.shape[:-1], -1, config.head_width)
    return norm_layer(config, f"{name}_norm")(x) if over == "head" else x


def _largest_seen(logits: Array, causal: Array, group: int) -> Array:
    """Return the largest absolute logit that each head's queries see: (B, K, G T, S) -> (H,)."""
    seen = jnp.where(jnp.tile(causal, (group, 1)), jnp.abs(logits), 0)
    return jnp.max(seen.reshape(*seen.shape[:2], group, *causal.shape), (0, 3, 4)).ravel()


def _collision_share(config: DecoderConfig, local: Any, p: Array, group: int) -> Array:
    """Return -log sum p^2 of a query over log n for the n keys it sees, mean over queries of two
    keys or more, by head: (B, K, G T, S) -> (H,)."""
    batch, groups, rows, length = p.shape
    squares = jnp.sum(jnp.square(p.astype(wide(p.dtype))), -1)
    own = squares.reshape(batch, groups, group, rows // group)[..., 1:]
    keys = jnp.arange(2, length + 1, dtype=own.dtype)
    if local is not False and config.local_window:
        seen = jnp.sum(seen_by(config, length, local), -1)[1:]
        keys = jnp.maximum(seen, 2).astype(own.dtype)  # who sees one alone has a share of 0
    return jnp.mean(-jnp.log(own) / jnp.log(keys), (0, 3)).ravel()


def _head_squares(o: Array, kernel: Array, heads: int) -> Array:
    """Return mean(o_h^2) |W_h|^2 by head: of (B, T, H C) and the rows of (H C, D) it meets."""
    by_head = o.reshape(-1, heads, o.shape[-1] // heads)
    weight = kernel.astype(wide(kernel.dtype)).reshape(heads, -1)
    return mean_square(by_head, (0, 2)) * jnp.sum(jnp.square(weight), -1)


def _heads_first(q_BTKGC: Array) -> Array:
    """Return (B, K, R, C) with the R = G T rows of a group's queries, query head by query head."""
    batch, length, K, G, C = q_BTKGC.shape
    return q_BTKGC.transpose(0, 2, 3, 1, 4).reshape(batch, K, G * length, C)


class MLP(nn.Module):
    """W_out act(W_in x), or W_out (act(W_gate x) * W_in x) for gated nonlinearities.

    Between the two a norm, where the placement has one inside ("hidden").
    """

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c, width = self.config, x.shape[-1]
        act, gated = c.mlp_row.function, c.mlp_row.gated
        gain = c.placement_row.branch_gain(c.depth)
        std = gain * c.initialization.stddev(width, c.hidden_width)
        hidden = Linear(c.hidden_width, c, std, name="in")(x)
        if gated:
            hidden = act(Linear(c.hidden_width, c, std, name="gate")(x)) * hidden
        else:
            hidden = act(hidden)
        out_std = gain * c.initialization.output_stddev(c.hidden_width, width, c.depth)
        hidden = tapped(self, "hidden", hidden)
        if "hidden" in c.inner_norms:
            hidden = norm_layer(c, "hidden_norm")(hidden)
        return Linear(width, c, out_std, name="out")(hidden)
