"""Causal attention with grouped heads, as a Flax module.

Shapes: B sequences, T positions, D width, H heads, K key/value heads, G = H / K query heads that
share one of them, C head width, R = G T rows of a group, S positions that are seen.
"""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from normjax.decoder_config import DecoderConfig
from normjax.layers import Linear, norm_layer, softcap, tapped, wide
from normjax.positions import rotary_angles, rotate


class Attention(nn.Module):
    """Causal softmax attention with grouped keys and values: softmax(q k^T / sqrt(C)) v W_o."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        c = self.config
        batch, length, width = x_BTD.shape
        K, C, G = c.kv_head_count, c.head_width, c.heads // c.kv_head_count
        std = partial(c.initialization.stddev, width)
        gain = c.resolved_placement.branch_gain(c.depth)
        q = Linear(K * G * C, c, std(K * G * C), name="query")(x_BTD)
        k = Linear(K * C, c, std(K * C), name="key")(x_BTD)
        v = Linear(K * C, c, gain * std(K * C), name="value")(x_BTD)
        q = q.reshape(batch, length, K * G, C)
        k = k.reshape(batch, length, K, C)
        v = v.reshape(batch, length, K, C)
        if c.qk_norm:
            q, k = norm_layer(c, "query_norm")(q), norm_layer(c, "key_norm")(k)
        if c.positions == "rotary":
            angles = rotary_angles(length, C, dtype=wide(q.dtype))
            q, k = rotate(q, angles), rotate(k, angles)
        # Laid out as plain batched products (B, K): twice as fast on a CPU as the einsum over the
        # heads where they stand. The G queries of a group are rows of one product.
        q_BKRC = _heads_first((q * C**-0.5).reshape(batch, length, K, G, C))
        k_BKSC, v_BKSC = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        logits = jnp.matmul(
            q_BKRC, k_BKSC.transpose(0, 1, 3, 2), preferred_element_type=wide(q.dtype)
        )
        logits = tapped(self, "logits", softcap(logits, c.attention_softcap))
        causal = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
        # The most negative finite number, not -inf: inf - inf in a derivative would be NaN.
        logits = jnp.where(jnp.tile(causal, (G, 1)), logits, jnp.finfo(logits.dtype).min)
        p_BKRS = tapped(self, "probabilities", jax.nn.softmax(logits, axis=-1)).astype(v.dtype)
        o = (p_BKRS @ v_BKSC).reshape(batch, K, G, length, C)
        o = o.transpose(0, 3, 1, 2, 4).reshape(batch, length, K * G * C)
        out_std = gain * c.initialization.output_stddev(K * G * C, width, c.depth)
        return Linear(width, c, out_std, name="output")(o)


def _heads_first(q_BTKGC: Array) -> Array:
    """Return (B, K, R, C) with the R = G T rows of a group's queries, query head by query head."""
    batch, length, K, G, C = q_BTKGC.shape
    return q_BTKGC.transpose(0, 2, 3, 1, 4).reshape(batch, K, G * length, C)
