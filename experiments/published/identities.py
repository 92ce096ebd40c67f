"""Exact identities between schemes, I1 to I4, on the decoder in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.claim import Tolerance
from experiments.published.result import Result, number
from experiments.published.setting import Board, decoder, seeds, weights
from normjax.decoder import Decoder
from normjax.placements import PLACEMENTS

d, T, L = 32, 8, 4
_WIDE = {"dtype": "float64", "param_dtype": "float64", "norm": "rmsnorm_plain", "norm_eps": 0.0}
_LOSS = (
    "both sides in float64: {} roundings of numbers of size 1, more than the operations on the way"
    " of a number through {} blocks"
)


def near() -> Tolerance:
    """Return the rounding of a decoder of L blocks."""
    count = 1000 * L
    return Tolerance(count * 2.0**-52, _LOSS.format(count, L))


def both(board: Board, purpose: int, one: Any, other: Any, unit: bool = False) -> Any:
    """Return two decoders and parameters with the same matrices; what they lack is left out."""
    models = [decoder(placement, d, L, T, **_WIDE) for placement in (one, other)]
    params = [weights(model, seeds(board, purpose)[0]) for model in models]
    second = _with(params[1], params[0])
    if unit:
        table = params[0]["embedding"]
        table = table / jnp.sqrt(jnp.mean(table**2, axis=-1, keepdims=True))
        params[0], second = params[0] | {"embedding": table}, second | {"embedding": table}
    return [(models[0], params[0]), (models[1], second)]


def _with(own: Any, other: Any) -> Any:
    """Return parameters with those of the same names from another decoder."""
    if not isinstance(own, dict):
        return other
    return {k: _with(v, other[k]) if k in other else v for k, v in own.items()}


def logits(model: Decoder, params: Any) -> np.ndarray:
    """Return what a decoder makes of one token of each kind, (T, V)."""
    return np.asarray(jax.jit(model.apply)(params, jnp.arange(T)[None])[0])


def off(sides: Any) -> float:
    """Return the largest difference of two decoders' logits over the largest logit."""
    one, other = (logits(*side) for side in sides)
    return float(np.max(np.abs(one - other)) / np.max(np.abs(one)))


def equal_schemes(board: Board, base: Any = "pre") -> list[Result]:
    """I1 to I4: two placements with the same matrices."""
    setup = f"{L} blocks, d = {d}, {T} tokens, RMSNorm without eps, the same matrices"
    apart = f"{setup}; largest difference of the logits over the largest logit"
    rows = [
        Result(
            "I1", "Attention residuals with queries at zero, read through a final norm, are"
            " pre-norm: the mean of the sources is a multiple of their sum.",
            "Moonshot AI 2026, arXiv 2603.15031; identity from the equation", "derived", apart,
            number(0.0), near(), (off(both(board, 100, base, "attention_residuals")),),
        ),
        Result(
            "I2", "Hyper-connections from equal streams, kept by the identity, are pre-norm.",
            "Zhu et al. 2024, arXiv 2409.19606; identity from the equation", "derived", apart,
            number(0.0), near(), (off(both(board, 101, base, "hyper_connections")),),
        ),
    ]  # fmt: skip
    streams = [
        np.asarray(model.hidden_states(params, jnp.arange(T)[None])[-1])
        for model, params in both(board, 102, "sandwich", "beam")
    ]
    scaled = (2 * L + 1) ** 0.5 * streams[1]
    rows.append(Result(
        "I3", "Beam’s running mean times sqrt(k) is Peri-LN: its stream after k − 1 sub-layers.",
        "Beam-1.0, released code; identity from the equation", "derived",
        f"{setup}; largest difference of the last streams over the largest entry",
        number(0.0), near(),
        (float(np.max(np.abs(streams[0] - scaled)) / np.max(np.abs(streams[0]))),),
    ))  # fmt: skip
    deepnorm = dataclasses.replace(PLACEMENTS["deepnorm"], final_norm=False)
    rows.append(Result(
        "I4", "MiniMax’s h := N(h), h' = a h + F(h) is DeepNorm, bracketed at another place.",
        "MiniMax-Text-01 and Wang et al. 2022, arXiv 2203.00555; identity from the equation",
        "derived", f"{apart}; embeddings of root mean square 1",
        number(0.0), near(), (off(both(board, 103, deepnorm, "minimax", unit=True)),),
    ))  # fmt: skip
    return rows


ROWS = (equal_schemes,)
