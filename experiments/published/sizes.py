"""Sizes of the stream over depth at initialization, S1 to S8: on the decoder, but for S7.

All weights are independent with mean zero, so that the mean square of a sum of branches is, in the
mean over weights, the sum of their mean squares.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.claim import Tolerance
from experiments.claims.taylor import slope
from experiments.published.result import Result, between, number
from experiments.published.setting import (
    Board,
    decoder,
    mean_squares,
    resolution,
    seeds,
    shown,
    weights,
)
from normjax.equation import Sublayer
from normjax.placement import Placement

XIONG = "Xiong et al. 2020, arXiv 2002.04745"
NOCI = "Noci et al. 2022, arXiv 2206.03126"
SCALED = Placement(
    "1/sqrt(L) residual", "h + F(h) / sqrt(L)", Sublayer(write=lambda block, depth: depth**-0.5)
)
_EXPECTATION = "weights N(0, 1/fan in), LayerNorm, one head, W_q = 0: uniform causal attention"


def blocks(
    board: Board, purpose: int, placement: Any, depth: int, times: int = 1, **changes: Any
) -> list[dict[str, np.ndarray]]:
    """Return mean squares over the blocks for each seed; attention is uniform."""
    model = decoder(placement, board.width, depth, board.tokens, **changes)
    measure, tokens = mean_squares(model), jnp.arange(board.tokens)[None]
    return [
        jax.tree.map(np.asarray, measure(weights(model, g, query=0), tokens))
        for g in seeds(board, purpose, times)
    ]  # fmt: skip


def post_norm_sum(board: Board, placement: str = "post") -> list[Result]:
    """S1: the sum that the norm after the MLP reads."""
    found = blocks(board, 1, placement, 4, 4)
    return [Result(
        "S1", "In a post-norm block the sum before the second norm has E|x|² = (3/2) d.",
        XIONG + ", lemma on post-LN sizes", "derived",
        f"4 blocks, d = {board.width}, {board.tokens} tokens, ReLU MLP d → d → d; {_EXPECTATION};"
        " mean over blocks and tokens of |x|²/d",
        number(1.5), resolution(1.5), tuple(np.mean(each["mlp.sum"]) for each in found),
    )]  # fmt: skip


def pre_norm_growth(board: Board, placement: str = "pre") -> list[Result]:
    """S2, S3: a pre-norm stream over depth, and why it grows faster than a line."""
    L = board.depth
    found = blocks(board, 2, placement, L, 4)
    ends = tuple(each["mlp.after"][-1] for each in found)
    first = L // 4
    at = np.arange(first, L + 1)
    plain = math.log((1 + L / 2) / (1 + first / 2)) / math.log(L / first)
    slopes = tuple(slope(at, each["mlp.after"][first - 1 :]) for each in found)
    alone = [
        slope(at, each["mlp.after"][first - 1 :])
        for each in blocks(board, 3, placement, L, attention="none")
    ]
    early, late = (
        np.mean([np.mean(each["attention.written"][part]) for each in found])
        for part in (slice(0, 4), slice(-4, None))
    )
    return [
        Result(
            "S2", "A pre-norm stream lies between (1 + l/2) d and (1 + 3l/2) d after l blocks.",
            XIONG + ", lemma on pre-LN sizes", "recalled",
            f"l = {L}, d = {board.width}, {board.tokens} tokens, E|x_0|² = d; {_EXPECTATION}",
            between(1 + L / 2, 1 + 1.5 * L), Tolerance(0.0, "the statement is a range"), ends,
        ),
        Result(
            "S3", "The mean square of a pre-norm stream grows linearly with depth: slope 1 of its"
            " logarithm over that of the depth.",
            "Sun et al. 2025, arXiv 2502.05795, after Xiong et al. 2020", "recalled",
            f"blocks {first} to {L}, otherwise as S2; a line 1 + c l with c at least 1/2 has there"
            f" a slope between {plain:.3f} and 1",
            between(plain, 1.0), resolution(1.0),
            slopes,
            "A block adds 1/2 by its MLP and, by attention, what averaging leaves of the values:"
            f" {shown(early)} over the first 4 blocks and {shown(late)} over the last 4. The same"
            f" decoder without attention has the slope {shown(float(np.mean(alone)))}; 1 + l/2 has"
            f" {plain:.3f}.",
        ),
    ]  # fmt: skip


def scaled_growth(board: Board, placement: str = "layernorm_scaling") -> list[Result]:
    """S4: LayerNorm scaling with MLPs alone."""
    L = board.depth
    found = blocks(board, 4, placement, L, 4, attention="none")
    harmonic = sum(1 / block for block in range(1, L + 1))
    return [Result(
        "S4", "LayerNorm scaling turns the linear growth of a pre-norm stream into a logarithmic"
        " one: a branch of degree 1 adds 1/l of what it would, so that E|x_L|²/d = 1 + H_L/2.",
        "Sun et al. 2025, arXiv 2502.05795", "derived",
        f"{L} blocks of a ReLU MLP without attention, d = {board.width}, weights N(0, 1/fan in);"
        f" H_{L} = {harmonic:.3f}",
        number(1 + harmonic / 2), resolution(1 + harmonic / 2),
        tuple(each["mlp.after"][-1] for each in found),
    )]  # fmt: skip


def sandwich_growth(board: Board, placement: str = "sandwich") -> list[Result]:
    """S5: one per sub-layer, and what one draw of the weights does to it."""
    L = board.depth
    found = blocks(board, 5, placement, L, 6)
    ends = tuple(each["mlp.after"][-1] for each in found)
    cross = [
        np.mean(each[f"{name}.after"] - each[f"{name}.before"] - each[f"{name}.written"])
        for each in found for name in ("attention", "mlp")
    ]  # fmt: skip
    return [Result(
        "S5", "With a norm on each branch's output (Peri-LN) every sub-layer adds 1 to the stream's"
        " variance: 1 + 2 L after L blocks.",
        "Kim et al. 2025, arXiv 2502.02732", "derived",
        f"{L} blocks, d = {board.width}, {board.tokens} tokens, gains 1; {_EXPECTATION}",
        number(1 + 2 * L), resolution(1 + 2 * L), ends,
        "The sum of mean squares leaves out twice the product of stream and branch, 0 in the mean"
        f" over weights. Measured it is {shown(float(np.mean(cross)))} per sub-layer on average"
        f" over the seeds, with a standard deviation of {shown(float(np.std(cross, ddof=1)))} from"
        " draw to draw, half of the layers and seeds on either side.",
    )]  # fmt: skip


def deepnorm_branch(board: Board, placement: str = "deepnorm") -> list[Result]:
    """S6: DeepNorm's constants give the size of a branch, by the decoder's own initialization."""
    L = board.depth
    model = decoder(placement, board.width, L, board.tokens, mlp_width=0)
    measure, tokens = mean_squares(model), jnp.arange(board.tokens)[None]
    keys, start = (
        [jax.random.key(int(g.integers(2**31))) for g in seeds(board, 6)],
        jax.jit(model.init),
    )
    found = [np.mean(measure(start(key), tokens)["mlp.written"]) for key in keys]
    return [Result(
        "S6", "DeepNorm's β = (8L)^(−1/4) on Xavier weights makes a ReLU MLP write a mean square"
        " of 0.32 β⁴ = 0.04/L beside a stream of α² = sqrt(2L).",
        "Wang et al. 2022, arXiv 2203.00555", "derived",
        f"{L} blocks, d = {board.width}, MLP d → 4d → d; the decoder’s own initialization; mean"
        " over blocks and tokens",
        number(0.04 / L), resolution(0.04 / L), tuple(found),
    )]  # fmt: skip


def uniform_attention(board: Board, placement: Any = SCALED) -> list[Result]:
    """S7, S8: residual uniform attention at 1/sqrt(L), by NumPy unmasked, and on the decoder."""
    L, T, d = 50, 8, board.width
    growth, tokens = (1 + 1 / L) ** L, []
    for g in seeds(board, 7, 10):
        x = g.standard_normal((T, d))
        start = np.sum(x.mean(axis=0) ** 2)
        for _ in range(L):
            x = x + (x.mean(axis=0) @ (g.standard_normal((d, d)) / d**0.5)) / L**0.5
        tokens.append(np.sum(x.mean(axis=0) ** 2) / start)
    model = decoder(placement, board.width, L, board.tokens, mlp="none", norm="identity")

    @jax.jit
    def first(params: Any) -> Any:
        taps = model.tapped(params, jnp.arange(board.tokens)[None])[1]["blocks"]["attention"]
        h = taps["after"][-1, 0, 0] @ taps["after"][-1, 0, 0]
        return h / (taps["before"][0, 0, 0] @ taps["before"][0, 0, 0])

    own = [float(first(weights(model, g, query=0))) for g in seeds(board, 8, 20)]
    said = "Residual uniform attention scaled by 1/sqrt(L) multiplies the energy of the {} by"
    return [
        Result(
            "S7", said.format("mean token") + " (1 + 1/L)^L, which goes to e.",
            NOCI, "derived", f"L = {L}, {T} tokens, d = {d}, no mask, in NumPy",
            number(growth), resolution(growth, 0.06), tuple(tokens),
        ),
        Result(
            "S8", said.format("first token, which sees itself alone,") + " (1 + 1/L)^L.",
            NOCI + ", here with a causal mask", "derived",
            f"L = {L}, d = {board.width}, the decoder without MLPs and norms, values and output"
            " N(0, 1/d)",
            number(growth), resolution(growth, 0.06), tuple(own),
        ),
    ]  # fmt: skip


ROWS = (
    post_norm_sum, pre_norm_growth, scaled_growth, sandwich_growth, deepnorm_branch,
    uniform_attention,
)  # fmt: skip
