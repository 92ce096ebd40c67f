"""What attention, MLP and decoder are made of: a linear layer, a soft cap, the config's norm."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from normjax.decoder_config import DecoderConfig
from normjax.norms import NORMS, NormLayer

SIGNALS, SHIFTS = "signals", "shifts"
"""Flax collections: arrays that are looked at, and zeros added to some of them."""


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
    """Show x to whoever collects signals; returns x, and adds nothing to a program without one.

    ``shifted`` also adds the array of that name in the collection "shifts", where there is one: the
    gradient with respect to it is that with respect to x.
    """
    if shifted:
        x = module.perturb(name, x, collection=SHIFTS)
    module.sow(SIGNALS, name, x)
    return x


def norm_layer(config: DecoderConfig, name: str) -> NormLayer:
    """Return the config's norm as a module of that name."""
    return NormLayer(NORMS[config.norm], config.norm_eps, config.param_dtype, name=name)
