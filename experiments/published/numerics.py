"""What finite arithmetic, eps and unfinished iterations do, N1 to N9."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.claim import Tolerance
from experiments.claims.taylor import slope
from experiments.published.result import Result, at_least, at_most, number
from experiments.published.setting import Board, decoder, resolution, seeds
from normjax.norm_functions import layer_norm

MHC = "DeepSeek 2025, arXiv 2512.24880"
RATIOS = (30.0, 100.0, 300.0, 1000.0)


def variance_errors(board: Board) -> list[Result]:
    """N1 to N3: LayerNorm in float32 where the mean is large against the deviation."""
    functions = {
        "N1": flax_layer_norm(True), "N2": flax_layer_norm(False),
        "N3": jax.jit(lambda x: layer_norm(x, eps=1e-6)),
    }  # fmt: skip
    found: dict[str, list[float]] = {id: [] for id in functions}
    for g in seeds(board, 120):
        z = g.standard_normal((256, 512))
        for id, function in functions.items():
            errors = []
            for ratio in RATIOS:
                x = (z + ratio).astype(np.float32)
                wide = x.astype(np.float64)
                right = wide - wide.mean(axis=1, keepdims=True)
                right = right / np.sqrt(np.mean(right**2, axis=1, keepdims=True) + 1e-6)
                off = np.asarray(function(jnp.asarray(x)), np.float64) - right
                errors.append(float(np.sqrt(np.mean(off**2))))
            found[id].append(slope(RATIOS, errors))
    setup = (
        f"256 vectors of 512 float32 features a seed, mean over deviation {RATIOS[0]:g} to"
        f" {RATIOS[-1]:g}; slope of the logarithm of the root mean square error against float64"
    )
    rough = Tolerance(0.25, "sums are rounded in an order that the compiler chooses")
    return [
        Result(
            "N1", "LayerNorm by E[x²] − E[x]², Flax’s default, loses digits with the square of mean"
            " over deviation.", "flax/linen/normalization.py; rounding of E[x²]", "derived",
            setup + "; flax.linen.LayerNorm", number(2.0), rough, tuple(found["N1"]),
        ),
        Result(
            "N2", "Subtracting the mean first loses them with the first power.",
            "rounding of the mean itself", "derived",
            setup + "; flax.linen.LayerNorm, use_fast_variance=False",
            number(1.0), rough, tuple(found["N2"]),
        ),
        Result(
            "N3", "Subtracting what is left of the mean once more loses none of them.",
            "rounding of the mean itself", "derived", setup + "; the program’s layer_norm",
            number(0.0), rough, tuple(found["N3"]),
        ),
    ]  # fmt: skip


def flax_layer_norm(fast: bool) -> Any:
    """Return Flax's LayerNorm without parameters, with one pass for the variance or two."""
    module = nn.LayerNorm(
        epsilon=1e-6, use_bias=False, use_scale=False, use_fast_variance=fast
    )  # fmt: skip
    return jax.jit(lambda x: module.apply({}, x))


def small_branches(board: Board, placement: Any = "beam") -> list[Result]:
    """N4, N5: an output norm with an eps beside which the branch is small."""
    T, d, found = 8, 32, {}
    for eps in (1e-12, 1e-5):
        model = decoder(
            placement, d, 1, T, norm="rmsnorm_plain", norm_eps=eps, mlp="swiglu", mlp_width=0,
            init="gpt2_plain", dtype="float64", param_dtype="float64",
        )  # fmt: skip
        start, run = jax.jit(model.init), jax.jit(model.hidden_states)
        found[eps] = [
            float(jnp.sqrt(jnp.mean(run(start(jax.random.key(int(g.integers(2**31)))),
                                        jnp.arange(T)[None])[-1] ** 2)))
            for g in seeds(board, 121)
        ]  # fmt: skip
    whole = math.sqrt(2 / 3)
    setup = f"one block of Beam, d = {d}, SwiGLU, all weights N(0, 0.02²), {T} tokens, eps "
    return [
        Result(
            "N4", "Beam’s weights keep the stream’s variance where its branches have variance 1:"
            " sqrt(2/3) after a block, from next to nothing.",
            "Beam-1.0, released code", "derived", setup + "1e-12; root mean square of the stream",
            number(whole), resolution(whole, 0.05), tuple(found[1e-12]),
        ),
        Result(
            "N5", "With an eps of 1e-5 the output norm does not make a small branch of size 1, and"
            " the stream stays below nine tenths of that.",
            "measured on released code in another place: .418 for .816", "secondary",
            setup + "1e-5; root mean square of the stream",
            at_most(0.9 * whole), Tolerance(0.0, "the statement is an inequality"),
            tuple(found[1e-5]),
        ),
    ]  # fmt: skip


def sinkhorn(logits: np.ndarray, rounds: int = 20, columns_last: bool = True) -> np.ndarray:
    """Return the mixing matrix as the released code makes it, or with the sides exchanged."""
    axis = -1 if columns_last else -2
    p = np.exp(logits - logits.max(axis=axis, keepdims=True))
    p = p / p.sum(axis=axis, keepdims=True) + 1e-6
    first, second = (-2, -1) if columns_last else (-1, -2)
    p = p / (p.sum(axis=first, keepdims=True) + 1e-6)
    for _ in range(rounds - 1):
        for side in (second, first):
            p = p / (p.sum(axis=side, keepdims=True) + 1e-6)
    return p


def mixing(board: Board, columns_last: bool = True) -> list[Result]:
    """N6 to N9: hyper-connections' doubly stochastic matrix."""
    columns, rows_off = 0.0, []
    for g in seeds(board, 122):
        p = sinkhorn(5 * g.standard_normal((4096, 4, 4)), columns_last=columns_last)
        columns = max(columns, float(np.max(np.abs(p.sum(axis=-2) - 1))))
        rows_off.append(float(np.mean(np.max(np.abs(p.sum(axis=-1) - 1), axis=-1))))
    flat = np.linalg.svd(sinkhorn(np.zeros((4, 4))), compute_uv=False)
    own = np.linalg.svd(sinkhorn(np.eye(4)), compute_uv=False)
    tiny = Tolerance(1e-5, "1e-6 is added to each of a few sums")
    setup = "20 rounds of Sinkhorn in float64, n = 4, as the released code orders them"
    return [
        Result(
            "N6", "In DeepSeek-V4 columns are normalized last and used as rows: each new stream is"
            " a convex mix of the old ones, to 1e-6.",
            "transformers, deepseek_v4; " + MHC, "code",
            f"{setup}, logits N(0, 25), 4,096 matrices a seed; the largest deviation of a column’s"
            " sum from 1",
            at_most(1e-6), Tolerance(5e-7, "1e-6 has one digit"), (columns,),
        ),
        Result(
            "N7", "The other side is not exact after 20 rounds: the total of the streams leaks by"
            " percents at logits of standard deviation 5.",
            "transformers, deepseek_v4; " + MHC, "secondary",
            f"{setup}; mean over matrices of the largest deviation of a row’s sum from 1",
            at_least(0.01), Tolerance(0.0, "percents: at least one"), tuple(rows_off),
        ),
        Result(
            "N8", "From logits of 0 all streams become their mean in the first layer: singular"
            " values 1, 0, 0, 0.",
            "MaxText, mHC; " + MHC, "code", f"{setup}; the second singular value", number(0.0),
            tiny, (float(flat[1]),),
        ),
        Result(
            "N9", "From the identity as logits the other three are (e − 1)/(e + 3) = 0.3005.",
            "hyper-connections by lucidrains; " + MHC, "derived",
            f"{setup}; the second singular value", number((math.e - 1) / (math.e + 3)), tiny,
            (float(own[1]),),
        ),
    ]  # fmt: skip


ROWS = (variance_errors, small_branches, mixing)
