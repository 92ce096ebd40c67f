"""A placement at initialization, by depth, and in a first few steps of training, by learning rate.

At initialization eps is 0, so that what norms forget is exactly a zero singular value, and is
counted as one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from normjax.decoder import Decoder
from normjax.decoder_config import DecoderConfig
from normjax.jacobians.blocks import Parts
from normjax.training.train import token_losses

VOCABULARY, ZERO = 32, 1e-13
"""A singular value below ``ZERO`` of the largest is zero to rounding."""
STEPS, WARMUP, LAST, BATCH = 60, 10, 10, 8
RATES = (1e-3, 4e-3, 1.6e-2, 6.4e-2, 0.256, 1.024)

Rows = list[dict[str, Any]]


def config_of(placement: str, depth: int, width: int) -> DecoderConfig:
    """Return the decoder in which a placement is looked at."""
    return DecoderConfig(depth=depth, width=width, heads=2, placement=placement, norm_eps=0.0)


def profile(config: DecoderConfig, tokens: int, seeds: int) -> tuple[Rows, Rows]:
    """Return a row for each depth from 0, and one for each singular value at depths 1, 2, 4, ...

    In the first, means over seeds and tokens:
    ``stream_rms`` is over the streams that hold something, ``jacobian_rms`` the root mean square of
    all singular values of the token Jacobian from block 1, ``jacobian_mean_log10`` the mean of
    log10 of those that are not zero, ``zeros`` the mean number of those that are, ``gradient_norm``
    that of the loss's gradient with respect to the parameters of the block. In the second "share",
    of the singular values of the token Jacobian those that are as large or larger, and "value", its
    median over seeds and tokens; what is zero to rounding is left out.

    Raises:
      UserError: where its Jacobian has no closed form, or something is not finite.
    """
    model = Decoder(config, VOCABULARY, tokens)
    scanned = dataclasses.replace(config, scan_layers=True)
    trained = dataclasses.replace(model, config=scanned)
    make = jax.jit(model.init)
    slope = jax.jit(jax.grad(lambda p, t: jnp.mean(token_losses(trained, p, t))))
    found = [_one(model, make, slope, tokens, seed) for seed in range(seeds)]
    by_depth = [
        {"depth": depth}
        | {k: float(np.mean([one[0][depth][k] for one in found])) for k in found[0][0][depth]}
        for depth in range(config.depth + 1)
    ]
    spectra = []
    for depth in (2**k for k in range(config.depth.bit_length())):
        values = np.median(np.concatenate([one[1][depth - 1] for one in found]), axis=0)
        spectra += [
            {"depth": depth, "share": k / len(values), "value": float(value)}
            for k, value in enumerate(values, 1) if value > ZERO * values[0]
        ]  # fmt: skip
    return by_depth, spectra


def trained(placement: str, depths: tuple[int, ...], width: int, seeds: int) -> Rows:
    """Return the loss after a few steps by depth and learning rate: where a placement trains.

    AdamW without decay, linear warm-up, gradients clipped to length 1, on random words of a Markov
    chain in which each of 32 symbols has four successors: a loss of ln 4 is all that can be had,
    ln 32 is what knows nothing. The chain and the words are the same for all rows.

    Returns:
      For each depth and rate of ``RATES`` "loss", the mean of the last ten of 60 steps over seeds;
      None where one of them is not finite.
    """
    window = 16
    rng = np.random.default_rng(0)
    after = rng.integers(0, VOCABULARY, (VOCABULARY, 4))
    words = np.empty((STEPS, BATCH, window + 1), np.int32)
    words[..., 0] = rng.integers(0, VOCABULARY, (STEPS, BATCH))
    for t in range(window):
        words[..., t + 1] = after[words[..., t], rng.integers(0, 4, (STEPS, BATCH))]
    rise = jnp.minimum(1.0, jnp.arange(1, STEPS + 1) / WARMUP)
    out = []
    for depth in depths:
        own = DecoderConfig(
            depth=depth, width=width, heads=2, placement=placement, scan_layers=True
        )
        model = Decoder(own, VOCABULARY, window)
        rule = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(0.9, 0.95))

        def run(rate: Any, seed: Any, model: Any = model, rule: Any = rule) -> Any:
            def step(held: Any, given: Any) -> Any:
                (params, state), (batch, size) = held, given
                loss, slope = jax.value_and_grad(lambda p: jnp.mean(token_losses(model, p, batch)))(
                    params
                )
                moved, state = rule.update(slope, state, params)
                params = jax.tree.map(lambda p, m: p - size * rate * m, params, moved)
                return (model.after_step(params), state), loss

            params = model.init(jax.random.key(seed))
            _, losses = jax.lax.scan(step, (params, rule.init(params)), (words, rise))
            return jnp.mean(losses[-LAST:])

        every = jax.vmap(jax.vmap(run, (None, 0)), (0, None))
        found = np.asarray(jax.jit(every)(jnp.asarray(RATES), jnp.arange(seeds)))
        for rate, losses in zip(RATES, found, strict=True):
            whole = bool(np.all(np.isfinite(losses)))
            loss = float(losses.mean()) if whole else None
            out.append({"depth": depth, "rate": rate, "loss": loss})
    return out


def _one(model: Decoder, make: Any, slope: Any, tokens: int, seed: int) -> tuple[Rows, list[Any]]:
    c, params = model.config, make(jax.random.key(seed))
    window = np.random.default_rng(seed).integers(0, VOCABULARY, tokens + 1)
    parts = Parts(model, params)
    states = np.asarray(parts.hidden_states(window[:-1]))
    gradients = jax.tree.leaves(slope(params, window[None]).get("blocks", {}))
    by_block = [np.asarray(g).reshape(c.depth, -1) for g in gradients]
    squares = np.sum(np.concatenate(by_block, axis=1) ** 2, axis=1)
    total, rows, spectra = np.eye(c.state_width), [], []
    for depth, state in enumerate(states):
        held = state.reshape(-1, c.width)
        rms = np.sqrt(np.mean(held[np.any(held != 0, axis=-1)] ** 2))
        row: dict[str, Any] = {"stream_rms": float(rms)}
        if depth:
            total = parts.block(depth).token_jacobians(states[depth - 1]) @ total
            values = np.linalg.svd(total, compute_uv=False)
            spectra.append(values)
            there = values > ZERO * values.max(axis=-1, keepdims=True)
            row |= {
                "jacobian_rms": float(np.sqrt(np.mean(values**2))),
                "jacobian_mean_log10": float(np.mean(np.log10(values[there]))),
                "zeros": float(np.mean(np.sum(~there, axis=-1))),
                "gradient_norm": float(np.sqrt(squares[depth - 1])),
            }
        rows.append(row)
    return rows, spectra
