"""Gradients of the weights at initialization, G1 to G7, on the decoder."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.claim import Tolerance, rounding
from experiments.claims.taylor import slope
from experiments.published.result import Result, at_least, at_most, between, number
from experiments.published.setting import Board, decoder, seeds, shown, weights
from normjax.decoder import Decoder
from normjax.reporting.statistics import estimate

XIONG = "Xiong et al. 2020, arXiv 2002.04745"
NORMFORMER = "Shleifer et al. 2021, arXiv 2110.09456 (NormFormer)"
NOCI = "Noci et al. 2022, arXiv 2206.03126"


def gradient(model: Decoder) -> Any:
    """Return a compiled (params, tokens (T,), targets (T,)) -> gradient of the mean loss."""

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        scores = jax.nn.log_softmax(model.apply(params, tokens[None])[0])
        return -jnp.mean(jnp.take_along_axis(scores, targets[:, None], axis=-1))

    return jax.jit(jax.grad(loss))


def profiles(
    board: Board, purpose: int, placement: Any, depth: int, positions: int | None = None
) -> np.ndarray:
    """Return |dL/dW2| of the MLPs, the root of the sum of squares: (seeds, L).

    The loss is over the first ``positions`` of the sequence, all of them by default.
    """
    T = board.tokens
    model, n = decoder(placement, board.width // 2, depth, T), positions or T
    gradients, found = gradient(model), []
    for g in seeds(board, purpose, 4):
        params = weights(model, g, query=0)
        own = gradients(params, jnp.arange(n), jnp.asarray(g.integers(T, size=n)))
        kernel = np.asarray(own["blocks"]["mlp"]["branch"]["out"]["kernel"], np.float64)
        found.append(np.sqrt(np.sum(kernel**2, axis=(1, 2))))
    return np.array(found)


def over_depth(
    board: Board, post: str = "post", pre: str = "pre"
) -> list[Result]:  # fmt: skip
    """G1 to G5: the last MLP's gradient over depth, and the profile over the blocks."""
    depths = [board.depth // 8 * 2**k for k in range(4)]
    d, L = board.width // 2, depths[-1]
    found = {p: [profiles(board, 20 + k, p, n) for k, n in enumerate(depths)] for p in (post, pre)}
    single = [profiles(board, 24 + k, post, n, 1) for k, n in enumerate(depths)]
    alone = estimate(
        [slope(depths, [each[s, -1] for each in single]) for s in range(len(single[0]))]
    )
    slopes = {
        p: tuple(slope(depths, [each[s, -1] for each in own]) for s in range(len(own[0])))
        for p, own in found.items()
    }
    ratios = {p: tuple(own[-1][:, 0] / own[-1][:, -1]) for p, own in found.items()}
    setup = (
        f"depths {', '.join(map(str, depths))}, d = {d}, {board.tokens} tokens, weights"
        " N(0, 1/fan in), W_q = 0, cross-entropy of random targets; Frobenius norm of the gradient"
        " of the last MLP's second matrix"
    )
    least = math.log((1 + L / 2) / (1 + depths[0] / 2)) / math.log(L / depths[0]) / 2
    start = math.sqrt((1 + L / 2) / (1 + 1 / 2))
    profile = f"{L} blocks, otherwise as G1; the ratio of the first block's gradient to the last's"
    return [
        Result(
            "G1", "In a post-norm decoder the gradient of the last MLP does not depend on depth:"
            " slope 0 of its logarithm over that of L.",
            XIONG + ", theorem 1", "recalled", setup, number(0.0),
            Tolerance(0.05, "a tenth of the difference between post-norm and pre-norm"),
            slopes[post],
            "The loss is a mean over positions. With a loss on one position alone the same slope is"
            f" {shown(alone.mean or 0.0)} ± {shown(alone.half_width or 0.0)}.",
        ),
        Result(
            "G2", "In a pre-norm decoder it falls like 1/sqrt(L): slope −1/2.",
            XIONG + ", theorem 1", "recalled",
            f"as G1; the root of a stream 1 + c L with c at least 1/2 has there a slope between"
            f" −1/2 and {-least:.3f}".replace("-", "−"),
            between(-0.5, -least), Tolerance(0.05, "as for G1"),
            slopes[pre],
        ),
        Result(
            "G3", "In a pre-norm decoder early blocks have the larger gradients at initialization.",
            NORMFORMER, "recalled", profile, at_least(1.0),
            Tolerance(0.0, "the statement is an inequality"), ratios[pre],
        ),
        Result(
            "G4", "They fall along the depth as the stream grows, l^(−1/2): sqrt(L) from first to"
            " last.",
            NORMFORMER + "; the power from the growth of the stream", "derived",
            f"{profile}; a stream 1 + c l with c at least 1/2 makes it between {start:.2f} and"
            f" {math.sqrt(L):.2f}",
            between(start, math.sqrt(L)), Tolerance(0.0, "the range holds what is not known of c"),
            ratios[pre],
            f"Over seeds the ratio has the median {shown(float(np.median(ratios[pre])))}.",
        ),
        Result(
            "G5", "In a post-norm decoder gradients grow towards the output instead.",
            XIONG, "recalled", profile + ", its natural logarithm", at_most(0.0),
            Tolerance(0.0, "the statement is an inequality"), tuple(np.log(ratios[post])),
            f"In {np.mean(np.array(ratios[post]) < 1):.0%} of {len(ratios[post])} draws the first"
            " block has the smaller gradient.",
        ),
    ]  # fmt: skip


def alike_tokens(board: Board, spreads: tuple[float, ...] = (0.0, 1e-3, 1e-4)) -> list[Result]:
    """G6, G7: tokens that are all alike, and tokens that nearly are."""
    T, d = 8, 32
    changes = {"norm_eps": 0.0, "dtype": "float64", "param_dtype": "float64"}
    model = decoder("pre", d, 2, T, **changes)
    gradients, own = gradient(model), []
    for g in seeds(board, 30):
        one, each, targets = g.standard_normal(d), g.standard_normal((T, d)), g.integers(T, size=T)
        params, sizes = weights(model, g), []
        for spread in spreads:
            params["embedding"] = jnp.asarray(one + spread * each)
            found = gradients(params, jnp.arange(T), jnp.asarray(targets))["blocks"]["attention"]
            norms = [
                np.linalg.norm(found["branch"][n]["kernel"]) for n in ("query", "key", "value")
            ]
            sizes.append([norms[0], norms[1], norms[2]])
        own.append(sizes)
    found = np.array(own)
    relative = found[:, :, :2] / found[:, :, 2:]
    count = 2 * d * T * 8
    return [
        Result(
            "G6", "Where all tokens are alike, the gradients of W_q and W_k vanish exactly, that of"
            " W_v does not.",
            NOCI + ", theorem on rank one", "recalled",
            f"2 blocks of a pre-norm decoder, d = {d}, {T} equal tokens without positions, float64;"
            f" the largest |dL/dW_q| or |dL/dW_k| over |dL/dW_v| of {board.seeds} seeds",
            number(0.0), rounding(count, 1.0, "two blocks forward and backward, relative to the"
                                  " gradient of W_v"),
            (np.max(relative[:, 0]),),
        ),
        Result(
            "G7", "They vanish with the square of the spread of the tokens.",
            NOCI + "; the power by expansion of the softmax", "derived",
            f"as G6, spreads {spreads[1]:g} and {spreads[2]:g} of tokens of size 1; slope of the"
            " logarithm of |dL/dW_q|",
            number(2.0), Tolerance(0.02, "terms of the next order, in proportion to the spread"),
            tuple(math.log(a / b) / math.log(spreads[1] / spreads[2])
                  for a, b in found[:, 1:, 0]),
        ),
    ]  # fmt: skip


ROWS = (over_depth, alike_tokens)
