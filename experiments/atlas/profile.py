"""A placement at initialization: its stream, the Jacobian of its stack and its gradient by depth.

eps is 0, so that what norms forget is exactly a zero singular value, and is counted as one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax.decoder import Decoder
from normjax.decoder_config import DecoderConfig
from normjax.jacobians.blocks import Parts
from normjax.training.train import token_losses

VOCABULARY, ZERO = 32, 1e-13
"""A singular value below ``ZERO`` of the largest is zero to rounding."""


def config_of(placement: str, depth: int, width: int) -> DecoderConfig:
    """Return the decoder in which a placement is looked at."""
    return DecoderConfig(depth=depth, width=width, heads=2, placement=placement, norm_eps=0.0)


def profile(config: DecoderConfig, tokens: int, seeds: int) -> list[dict[str, Any]]:
    """Return a row for each depth from 0, means over seeds and tokens.

    ``stream_rms`` is over the streams that hold something, ``jacobian_rms`` the root mean square of
    all singular values of the token Jacobian from block 1, ``jacobian_mean_log10`` the mean of
    log10 of those that are not zero, ``zeros`` the mean number of those that are, ``gradient_norm``
    that of the loss's gradient with respect to the parameters of the block.

    Raises:
      UserError: where its Jacobian has no closed form, or something is not finite.
    """
    model = Decoder(config, VOCABULARY, tokens)
    scanned = dataclasses.replace(config, scan_layers=True)
    trained = dataclasses.replace(model, config=scanned)
    make = jax.jit(model.init)
    slope = jax.jit(jax.grad(lambda p, t: jnp.mean(token_losses(trained, p, t))))
    found = [_one(model, make, slope, tokens, seed) for seed in range(seeds)]
    return [
        {"depth": depth}
        | {k: float(np.mean([one[depth][k] for one in found])) for k in found[0][depth]}
        for depth in range(config.depth + 1)
    ]


def _one(model: Decoder, make: Any, slope: Any, tokens: int, seed: int) -> list[dict[str, Any]]:
    c, params = model.config, make(jax.random.key(seed))
    window = np.random.default_rng(seed).integers(0, VOCABULARY, tokens + 1)
    parts = Parts(model, params)
    states = np.asarray(parts.hidden_states(window[:-1]))
    gradients = jax.tree.leaves(slope(params, window[None]).get("blocks", {}))
    by_block = [np.asarray(g).reshape(c.depth, -1) for g in gradients]
    squares = np.sum(np.concatenate(by_block, axis=1) ** 2, axis=1)
    total, rows = np.eye(c.state_width), []
    for depth, state in enumerate(states):
        held = state.reshape(-1, c.width)
        rms = np.sqrt(np.mean(held[np.any(held != 0, axis=-1)] ** 2))
        row: dict[str, Any] = {"stream_rms": float(rms)}
        if depth:
            total = parts.block(depth).token_jacobians(states[depth - 1]) @ total
            values = np.linalg.svd(total, compute_uv=False)
            there = values > ZERO * values.max(axis=-1, keepdims=True)
            row |= {
                "jacobian_rms": float(np.sqrt(np.mean(values**2))),
                "jacobian_mean_log10": float(np.mean(np.log10(values[there]))),
                "zeros": float(np.mean(np.sum(~there, axis=-1))),
                "gradient_norm": float(np.sqrt(squares[depth - 1])),
            }
        rows.append(row)
    return rows
