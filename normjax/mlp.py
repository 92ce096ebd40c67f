"""The MLP, plain or gated, as a Flax module."""

from __future__ import annotations

import flax.linen as nn
from jax import Array

from normjax.decoder_config import MLPS, DecoderConfig
from normjax.layers import Linear, tapped


class MLP(nn.Module):
    """W_out act(W_in x), or W_out (act(W_gate x) * W_in x) for gated nonlinearities."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c, width = self.config, x.shape[-1]
        act, gated = MLPS[c.mlp]
        gain = c.resolved_placement.branch_gain(c.depth)
        std = gain * c.initialization.stddev(width, c.hidden_width)
        hidden = Linear(c.hidden_width, c, std, name="in")(x)
        if gated:
            hidden = act(Linear(c.hidden_width, c, std, name="gate")(x)) * hidden
        else:
            hidden = act(hidden)
        out_std = gain * c.initialization.output_stddev(c.hidden_width, width, c.depth)
        return Linear(width, c, out_std, name="out")(tapped(self, "hidden", hidden))
