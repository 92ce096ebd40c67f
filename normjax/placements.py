"""Where the normalization stands: the table of placements, each a value of the one equation.

Adding a row, here or in a file of one's own, is all it takes to have it trained, verified,
measured, drawn and explained. What a row is: placement.py. Rows are as published, or as the code
that is named has them; what of a scheme its row leaves out stands beside its source.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.alternating import Alternating
from normjax.equation import MODEL_NORM, SHARED_NORM, Learned, OnRows, Started, Sublayer
from normjax.errors import UserError
from normjax.joins import LowRank, Tangential
from normjax.mixing import (
    LearnedWeights,
    RowGates,
    RowSizes,
    Sigmoid,
    Sinkhorn,
    SoftmaxOverSources,
    StateGates,
    Streams,
    Weights,
    appended,
    nth,
    one_hot,
)
from normjax.norms import NORMS
from normjax.placement import Placement, check
from normjax.registry import Registry

_PRE = Sublayer(pre_norm=MODEL_NORM)


def _blocks(position: Any) -> Any:
    """Number of the block, from 0, of a sub-layer in blocks of two."""
    return position // 2


def _fixed(word: str, *rows: Sequence[float]) -> Weights:
    """Constant weights, the same in every sub-layer."""
    return Weights(word, lambda position, n: np.asarray(rows, np.float64))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + x.__array_namespace__().exp(-x))


def _beam(extra: int) -> Sublayer:
    """h' = sqrt((k - 1) / k) h + sqrt(1 / k) Q(F(c N h)): the k-th term of a sum of k."""
    return Sublayer(
        pre_norm=MODEL_NORM, branch_norm=MODEL_NORM,
        keep=lambda block, depth: math.sqrt(1 - 1 / (2 * block + extra)),
        write=lambda block, depth: math.sqrt(1 / (2 * block + extra)),
    )  # fmt: skip


_MUSE = Sublayer(
    pre_norm=NORMS["rmsnorm_offset"], branch_norm=NORMS["rmsnorm_plain"],
    keep=Learned(
        0.0, "feature", name="gate",
        # b^2 <= 0.999: (1 - b)(1 + b) is 1 - b^2 without its cancellation.
        through=lambda g: g.__array_namespace__().maximum(
            (1 - _sigmoid(g / 0.3)) * (1 + _sigmoid(g / 0.3)), 1e-3
        ) ** 0.5,
    ),
    write=Learned(0.0, "feature", name="gate", through=lambda g: _sigmoid(g / 0.3)),
)  # fmt: skip


_TOWARDS = Sublayer(
    branch_norm=NORMS["rmsnorm_simple"], inner_norms=("query", "key"),
    keep=Learned(0.05, "feature", through=lambda a: 1 - abs(a), name="step"),
    write=Learned(0.05, "feature", through=abs, name="step"),
)  # fmt: skip
"""a n(F) + (1 - a) h: a step of size |a| from the stream towards the branch."""


def _unit_vectors(*given: Any) -> Any:
    """Return parameters with every vector of a matrix that meets the stream at length 1.

    Called with the parameters, after a step, or with the model as well, at the start.
    """

    def one(path: Any, x: Array) -> Array:
        names = [each.key for each in path]
        if names[-1] not in ("kernel", "embedding"):
            return x
        axis = -1 if names[-1] == "embedding" or names[-2] in ("output", "out") else -2
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return (wide / jnp.linalg.norm(wide, axis=axis, keepdims=True)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(one, given[-1])


def _current(position: Any, n: int) -> Any:
    """The row in which a block's stream is kept, of a list that begins with the embedding."""
    return jnp.arange(n) == 1 + _blocks(position)


def _of_seen(weights: Array, position: Any, n: int) -> Array:
    """The learned weights of the rows that are there before a block, (1, n)."""
    return jnp.where(jnp.arange(n) <= _blocks(position), weights, 0.0)[None]


def _into_current(weights: Array, position: Any, n: int) -> Array:
    """All rows as they are, but for the block's own, which becomes what the branch reads."""
    seen = jnp.broadcast_to(_of_seen(weights, position, n), (n, n))
    return jnp.where(_current(position, n)[:, None], seen, jnp.eye(n))


_WRITE_CURRENT = Weights("w", lambda position, n: _current(position, n)[:, None] * 1.0)


def _admin(model: Any, params: Any) -> Any:
    """Set every keep to the root of the variance that the stream has before it in one pass.

    w_1 = 1, w_{i+1}^2 = w_i^2 Var(h_i) + Var(F_i), over four sequences of tokens in order.
    """
    if any("keep" not in params["blocks"][name] for name in model.config.sublayers):
        return params  # without a residual path
    tokens = (jnp.arange(4 * model.window) % model.vocabulary).reshape(4, model.window)
    state, config = model.embed(params, tokens), model.config
    size = jnp.ones((), jnp.float32)
    for block in range(1, config.depth + 1):
        for name in config.sublayers:
            held = params["blocks"][name]["keep"]
            params["blocks"][name]["keep"] = held.at[block - 1].set(size.astype(held.dtype))
            layer = model.layer(params, block)
            seen = model.points(layer, state, name)
            before, written = (seen[k].astype(jnp.float32) for k in ("before", "written"))
            size = jnp.sqrt(size**2 * jnp.var(before) + jnp.var(written))
            state = seen["after"]
    return params


def _zeros(*shape: str) -> Callable[[Any, int], Any]:
    """Logits of zero: of one row ("1") or one for each stream ("n")."""
    return lambda position, n: jnp.zeros(tuple(n if each == "n" else 1 for each in shape))


_MHC_READ = StateGates("σ", _zeros("1", "n"), squash=Sigmoid(1.0, 1e-6))
_IHC_READ = StateGates(
    "σ",
    lambda position, n: jnp.full((1, n), -jnp.log(n - 1.0)),
    squash=Sigmoid(1.0, 1e-6),
    size=0.01,
)

_ROWS = {
    "pre": Placement(
        "pre-norm", "Xiong et al. 2020, arXiv 2002.04745", _PRE, final_norm=True,
        summary="the branch reads the normalized stream",
        action="normalizing before each branch",
    ),
    "post": Placement(
        "post-norm", "Vaswani et al. 2017, arXiv 1706.03762", Sublayer(post_norm=MODEL_NORM),
        summary="the sum is normalized", action="normalizing after the addition",
        colour="#56b4e9",
    ),
    "none": Placement(
        "no norm", "h + F(h)", summary="nothing is normalized", action="removing normalization",
        colour="#e69f00",
    ),
    "sandwich": Placement(
        "sandwich", "Ding et al. 2021, arXiv 2105.13290; Kim et al. 2025, arXiv 2502.02732",
        Sublayer(pre_norm=MODEL_NORM, branch_norm=MODEL_NORM), final_norm=True,
        summary="the branch's input and its output are normalized",
        action="normalizing before and after each branch", colour="#009e73",
    ),
    "branch_output": Placement(
        "branch-output norm", "Liu et al. 2021, arXiv 2111.09883; OLMo 2 2024, arXiv 2501.00656",
        Sublayer(branch_norm=MODEL_NORM), final_norm=True,
        summary="the branch's output is normalized",
        action="normalizing only the output of each branch", colour="#0072b2",
    ),
    "deepnorm": Placement(
        "DeepNorm", "Wang et al. 2022, arXiv 2203.00555, table of section 4, decoder-only",
        Sublayer(post_norm=MODEL_NORM, keep=lambda block, depth: (2 * depth) ** 0.25),
        init="xavier", branch_gain=lambda depth: (8 * depth) ** -0.25,
        summary="post-norm with a stronger residual path and smaller initial branches",
        action="using DeepNorm", colour="#cc79a7",
    ),
    "layernorm_scaling": Placement(
        "LayerNorm scaling", "Sun et al. 2025, arXiv 2502.05795",
        Sublayer(pre_norm=MODEL_NORM, scale=lambda block, depth: block**-0.5), final_norm=True,
        init="gpt2_plain", summary="deeper branches read a smaller normalized stream",
        action="scaling what each branch reads by its depth", colour="#882255",
    ),
    "skipinit": Placement(
        "SkipInit", "De and Smith 2020, arXiv 2002.10444", Sublayer(write=Learned(0.0)),
        summary="no norm; every branch starts at zero times a learned number",
        action="starting every branch at zero, without norms", colour="#999933",
    ),
    "layerscale": Placement(
        "LayerScale", "Touvron et al. 2021, arXiv 2103.17239, eq. 4",
        Sublayer(
            pre_norm=MODEL_NORM,
            write=Learned(
                lambda block, depth: 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6,
                "feature",
            ),
        ),
        final_norm=True, summary="pre-norm; each feature of a branch starts small",
        action="scaling each feature of a branch by a learned number", colour="#332288",
    ),
    "rezero": Placement(
        "ReZero", "Bachlechner et al. 2020, arXiv 2003.04887",
        Sublayer(write=Learned(0.0, shared=True)),
        summary="no norm; the branches of a block start at zero times one learned number",
        action="starting every block at zero, without norms", colour="#8c6d4f",
    ),
    "hybridnorm": Placement(
        "HybridNorm", "Zhuo et al. 2025, arXiv 2503.04598, as its released code has it",
        Sublayer(inner_norms=("query", "key", "value")),
        Sublayer(pre_norm=MODEL_NORM, skip_norm=SHARED_NORM), final_norm=True,
        summary="queries, keys and values are normalized; the MLP's norm is on the stream itself",
        action="normalizing queries, keys and values, and the stream before each MLP",
        colour="#0f5257",
    ),
    "hyper_connections": Placement(
        "hyper-connections, 2 streams", "Zhu et al. 2024, arXiv 2409.19606, static, eq. 1",
        Sublayer(
            pre_norm=MODEL_NORM, read=LearnedWeights("r", nth), keep=LearnedWeights("A", one_hot),
            write=LearnedWeights("b", lambda position, rows: [[1.0]] * rows),
        ),
        streams=Streams(2, "copies"), final_norm=True,
        summary="two streams, read, kept and written with learned weights",
        action="mixing two streams with learned weights", colour="#b33a3a",
    ),
    "normformer": Placement(
        "NormFormer", "Shleifer et al. 2021, arXiv 2110.09456; without its learned residual scales",
        Sublayer(pre_norm=MODEL_NORM, branch_norm=MODEL_NORM, head_scale=True),
        Sublayer(pre_norm=MODEL_NORM, inner_norms=("hidden",)), final_norm=True,
        summary="pre-norm; attention's output and the MLP's hidden layer are normalized, heads"
        " weighed",
        action="adding norms after attention and inside the MLP, and weights of heads",
    ),
    "sub_ln": Placement(
        "Sub-LN", "Wang et al. 2022 (Magneto), arXiv 2210.06423; torchscale",
        Sublayer(pre_norm=MODEL_NORM, inner_norms=("output over heads", "hidden")),
        final_norm=True, init="xavier",
        branch_gain=lambda depth: math.sqrt(math.log(2 * depth)),
        summary="pre-norm, and a norm before the output matrix of each branch",
        action="adding a norm before each output matrix",
    ),
    "zaya": Placement(
        "residual scaling", "ZAYA1, as the transformers library has it",
        Sublayer(
            pre_norm=MODEL_NORM, skip_norm=NORMS["affine"], branch_norm=NORMS["affine"]
        ),
        embedding_norm=NORMS["affine"], final_norm=True,
        summary="pre-norm; stream and branch each have a learned weight and shift of each feature",
        action="weighing and shifting each feature of stream and branch",
    ),
    "ngpt": Placement(
        "nGPT", "Loshchilov et al. 2024, arXiv 2410.01131, with root mean square 1 for its length"
        " 1; its scale of the logits and its rescaled learning rates are left out",
        dataclasses.replace(_TOWARDS, post_norm=NORMS["rmsnorm_simple"]),
        embedding_norm=NORMS["rmsnorm_simple"], after_init=_unit_vectors, after_step=_unit_vectors,
        summary="the stream moves on a sphere, by a learned step of each feature towards the"
        " branch",
        action="moving the stream on a sphere",
    ),
    "dory": Placement(
        "Dory", "NVIDIA Dory, as the transformers library has it, without eps and loops: nGPT with"
        " other brackets",
        dataclasses.replace(
            _TOWARDS, pre_norm=NORMS["rmsnorm_simple"], skip_norm=SHARED_NORM
        ),
        final_norm=True, after_init=_unit_vectors, after_step=_unit_vectors,
        summary="as nGPT, the stream put on its sphere where it is read",
        action="moving the stream towards each branch from its sphere",
    ),
    "keel": Placement(
        "KEEL", "Chen and Wei 2026, arXiv 2601.19895; a is the number of sub-layers",
        Sublayer(
            pre_norm=MODEL_NORM, post_norm=MODEL_NORM, keep=lambda block, depth: 2.0 * depth
        ),
        summary="pre-norm and post-norm, the stream weighed by the number of sub-layers",
        action="weighing the stream by the number of sub-layers between two norms",
    ),
    "mix_ln": Placement(
        "Mix-LN", "Li et al. 2025, arXiv 2412.13795, a quarter of the blocks post-norm",
        Sublayer(
            pre_norm=lambda block, depth: MODEL_NORM if 4 * block > depth else None,
            post_norm=lambda block, depth: MODEL_NORM if 4 * block <= depth else None,
        ),
        final_norm=True, summary="the first quarter of the blocks post-norm, the others pre-norm",
        action="beginning with post-norm blocks",
    ),
    "inverse_root_depth": Placement(
        "residual 1/√(2L)", "Radford et al. 2019 (GPT-2), as a factor and not as an initialization",
        Sublayer(pre_norm=MODEL_NORM, write=lambda block, depth: (2 * depth) ** -0.5),
        final_norm=True, init="gpt2_plain",
        summary="pre-norm; each branch over the root of the number of sub-layers",
        action="dividing each branch by the root of the number of sub-layers",
    ),
    "completep": Placement(
        "CompleteP, residual 1/L", "Dey et al. 2025, arXiv 2505.01618, alpha = 1, base depth 1;"
        " its rules for the optimizer are no part of the row",
        Sublayer(pre_norm=MODEL_NORM, write=lambda block, depth: 1.0 / depth), final_norm=True,
        init="gpt2_plain", summary="pre-norm; each branch over the number of blocks",
        action="dividing each branch by the number of blocks",
    ),
    "minicpm": Placement(
        "residual 1.4/√L", "Hu et al. 2024 (MiniCPM), arXiv 2404.06395",
        Sublayer(pre_norm=MODEL_NORM, write=lambda block, depth: 1.4 * depth**-0.5),
        final_norm=True, init="gpt2_plain",
        summary="pre-norm; each branch times 1.4 over the root of the number of blocks",
        action="multiplying each branch by 1.4 over the root of the depth",
    ),
    "depth_scaled_sandwich": Placement(
        "depth-scaled sandwich", "Yin et al. 2025 (Pangu Ultra), arXiv 2504.07866; its constant"
        " c of c / sqrt(L) is not known to us: 1",
        Sublayer(
            pre_norm=MODEL_NORM,
            branch_norm=lambda block, depth: Started(MODEL_NORM, depth**-0.5),
        ),
        final_norm=True, summary="sandwich; the gain of each branch's output starts at 1/√L",
        action="normalizing before and after each branch, with a small start",
    ),
    "zero_gain": Placement(
        "zero-gain output norm", "Liu et al. 2022 (Swin v2), arXiv 2111.09883, its released code",
        Sublayer(branch_norm=Started(MODEL_NORM, 0.0)), final_norm=True,
        summary="the branch's output is normalized, with a gain that starts at zero",
        action="starting every branch's output norm at zero",
    ),
    "minimax": Placement(
        "MiniMax-Text-01", "MiniMax 2025, arXiv 2501.08313, as the transformers library has it,"
        " with DeepNorm's constants",
        Sublayer(
            pre_norm=MODEL_NORM, skip_norm=SHARED_NORM,
            keep=lambda block, depth: (2 * depth) ** 0.25,
        ),
        final_norm=True, init="xavier", branch_gain=lambda depth: (8 * depth) ** -0.25,
        summary="the stream itself is normalized before each sub-layer, and weighed",
        action="normalizing the stream before each sub-layer",
    ),
    "beam": Placement(
        "Beam", "Beam 1.0, as the transformers library has it", _beam(0), _beam(1), final_norm=True,
        summary="sandwich; stream and branch weighed as the first k - 1 of k equal terms and the"
        " last",
        action="keeping the stream's size by the weights of a running mean",
    ),
    "muse_spark": Placement(
        "Muse Spark gates", "Muse Spark, as the transformers library has it; without the gate"
        " inside its attention and the gain on what its MLP's branch norm reads",
        _MUSE, embedding_norm=NORMS["rmsnorm_plain"], final_norm=True,
        summary="learned weights a and b of each feature, with a² + b² = 1",
        action="mixing stream and branch by gates with a² + b² = 1",
    ),
    "doge": Placement(
        "learned stream vector", "Doge, as the transformers library has it",
        Sublayer(pre_norm=MODEL_NORM, keep=Learned(1.0, "feature")), final_norm=True,
        summary="pre-norm; each feature of the stream has a learned weight",
        action="weighing each feature of the stream by a learned number",
    ),
    "t_fixup": Placement(
        "T-Fixup", "Huang et al. 2020, ICML, its decoder", init="xavier",
        branch_gain=lambda depth: (9 * depth) ** -0.25, value_gain=math.sqrt(2),
        embedding_gain=lambda depth: (9 * depth) ** -0.25,
        summary="no norm; branches and embedding start smaller in deeper decoders",
        action="removing norms and starting branches small by depth",
    ),
    "admin": Placement(
        "Admin", "Liu et al. 2020, arXiv 2004.08249, sizes from one pass over tokens",
        Sublayer(post_norm=MODEL_NORM, keep=Learned(1.0, "feature")), init="xavier",
        after_init=_admin,
        summary="post-norm; learned weights of the stream start at its size in a profiling pass",
        action="starting post-norm with a stream weighed by its measured size",
    ),
    "token_gate": Placement(
        "token gate", "prime-rl, residual type 'gated'",
        Sublayer(
            pre_norm=MODEL_NORM, read=_fixed("1", [1.0]),
            write=StateGates("g", _zeros("1", "1"), squash=Sigmoid(2.0), spread=0.0),
        ),
        streams=Streams(1), final_norm=True,
        summary="pre-norm; each token weighs each branch by a gate of its own that starts at 1",
        action="weighing each branch by a gate of the token",
    ),
    "parallel": Placement(
        "parallel", "Wang and Komatsuzaki 2021 (GPT-J); Black et al. 2022 (GPT-NeoX),"
        " arXiv 2204.06745, with a norm for each branch",
        Sublayer(
            pre_norm=MODEL_NORM, read=_fixed("h", [1.0, 0.0]),
            keep=_fixed("A", [1.0, 0.0], [1.0, 0.0]), write=_fixed("b", [0.0], [1.0]),
        ),
        Sublayer(
            pre_norm=MODEL_NORM, read=_fixed("h", [1.0, 0.0]),
            keep=_fixed("A", [0.0, 1.0], [0.0, 1.0]), write=_fixed("b", [1.0], [1.0]),
        ),
        streams=Streams(2, readout=_fixed("h", [1.0, 0.0])), final_norm=True, pairs=True,
        summary="attention and MLP read the same stream, and both are added",
        action="running attention and MLP in parallel",
    ),
    "residual": Placement(
        "ResiDual", "Xie et al. 2023, arXiv 2304.14802",
        Sublayer(
            post_norm=OnRows(MODEL_NORM, (0,)), read=_fixed("x", [1.0, 0.0]),
            write=_fixed("b", [1.0], [1.0]),
        ),
        streams=Streams(2, norm=OnRows(MODEL_NORM, (1,))),
        summary="a post-norm stream that is read, and a second one that only adds up",
        action="carrying a plain sum beside a post-norm stream",
    ),
    "siamesenorm": Placement(
        "SiameseNorm", "Li et al. 2026, arXiv 2602.08064, its released code",
        Sublayer(
            mix_norm=OnRows(MODEL_NORM, (1,)), pre_norm=MODEL_NORM,
            post_norm=OnRows(MODEL_NORM, (0,)), read=_fixed("sum", [1.0, 1.0]),
            write=Weights("b", lambda position, n: jnp.stack(
                [(2.0 * _blocks(position) + 2.0) ** -0.5, jnp.ones(())]
            )[:, None]),
        ),
        streams=Streams(2, norm=OnRows(MODEL_NORM, (1,))), 
        embedding_norm=OnRows(MODEL_NORM, (0,)), final_norm=True, pairs=True,
        summary="a normalized and a plain stream; branches read the sum of both",
        action="reading a normalized and a plain stream together",
    ),
    "spannorm": Placement(
        "SpanNorm", "arXiv 2601.22580, as third-party code has it; its initialization is not known"
        " to us: the model's own",
        Sublayer(
            pre_norm=lambda block, depth: MODEL_NORM if block == 1 else None,
            read=_fixed("x", [1.0, 0.0]),
            keep=_fixed("A", [1.0, 0.0], [1.0, 0.0]),
            write=_fixed("b", [0.0], [1.0]),
        ),
        Sublayer(
            pre_norm=MODEL_NORM, post_norm=MODEL_NORM, read=_fixed("y", [0.0, 1.0]),
            keep=_fixed("A", [1.0, 0.0], [1.0, 0.0]), write=_fixed("b", [1.0], [1.0]),
        ),
        streams=Streams(2, readout=_fixed("x", [1.0, 0.0])), pairs=True,
        summary="the MLP's residual path carries the block's input; the sum is normalized",
        action="letting the residual path span the block",
    ),
    "dynamic_hyper_connections": Placement(
        "dynamic hyper-connections, 2 streams", "Zhu et al. 2024, arXiv 2409.19606, dynamic",
        Sublayer(
            pre_norm=MODEL_NORM, read=RowGates("r", nth), keep=RowGates("A", one_hot),
            write=RowGates("b", lambda position, n: jnp.ones((n, 1)), writes=True),
        ),
        streams=Streams(2, "copies"), final_norm=True,
        summary="hyper-connections whose weights also depend on the streams",
        action="mixing two streams with weights that depend on them",
    ),
    "mhc": Placement(
        "mHC, 4 streams", "DeepSeek 2025, arXiv 2512.24880, as DeepSeek-V4 in the transformers"
        " library has it: each new stream is a mean of the old ones to 1e-6, the total of the"
        " streams is not exact",
        Sublayer(
            pre_norm=MODEL_NORM, read=_MHC_READ,
            keep=StateGates("A", _zeros("n", "n"), squash=Sinkhorn()),
            write=StateGates("b", _zeros("n", "1"), squash=Sigmoid(2.0)),
        ),
        streams=Streams(4, "copies", readout=_MHC_READ),
        final_norm=True,
        summary="four streams, mixed by a nearly doubly stochastic matrix of the token's own",
        action="mixing four streams by doubly stochastic matrices",
    ),
    "ihc": Placement(
        "independent hyper-connections, 4 streams", "HY-V4, as the transformers library has it",
        Sublayer(
            pre_norm=MODEL_NORM, read=_IHC_READ,
            write=StateGates("b", _zeros("n", "1"), squash=Sigmoid(2.0, 1e-6), size=0.01),
        ),
        streams=Streams(4, "copies", readout=_IHC_READ), final_norm=True,
        summary="four streams that are read and written by gates and never mixed",
        action="reading and writing four unmixed streams by gates",
    ),
    "block_attention_residuals": Placement(
        "attention residuals, by block", "Moonshot AI 2026, arXiv 2603.15031, block form, one block"
        " of the decoder in each",
        Sublayer(
            pre_norm=MODEL_NORM, read=SoftmaxOverSources("softmax", group=2),
            write=appended("append", 2),
        ),
        streams=Streams(
            lambda sublayers: 1 + -(-sublayers // 2), "first",
            SoftmaxOverSources("softmax", group=2),
        ),
        final_norm=True,
        summary="each branch reads a learned softmax mix of the sums of earlier blocks",
        action="reading a learned mix of the sums of earlier blocks",
    ),
    "denseformer": Placement(
        "DenseFormer", "Pagliardini et al. 2024, arXiv 2402.02622, dilation 1",
        Sublayer(
            pre_norm=MODEL_NORM,
            read=LearnedWeights("α", lambda position, n: jnp.arange(n) == _blocks(position),
                                form=_of_seen),
            keep=LearnedWeights("A", lambda position, n: jnp.arange(n) == _blocks(position),
                                tied="read", form=_into_current),
            write=_WRITE_CURRENT,
        ),
        Sublayer(
            pre_norm=MODEL_NORM, write=_WRITE_CURRENT,
            read=Weights("h", lambda position, n: _current(position, n)[None] * 1.0),
        ),
        streams=Streams(
            lambda sublayers: 1 + sublayers // 2, "first",
            LearnedWeights("α", lambda position, n: jnp.arange(n) == n - 1,
                           form=lambda w, position, n: w[None]),
        ),
        final_norm=True, pairs=True,
        summary="each block reads learned weights of the streams after all earlier blocks",
        action="reading learned weights of all earlier blocks",
    ),
    "x0_mix": Placement(
        "x0 mixing", "nanochat and modded-nanogpt, h := λ₀ h + λ₁ x₀ before each block",
        Sublayer(
            pre_norm=MODEL_NORM,
            read=LearnedWeights("λ", lambda position, n: [1.0, 0.0], form=lambda w, i, n: w[None]),
            keep=LearnedWeights(
                "A", lambda position, n: [1.0, 0.0], tied="read",
                form=lambda w, i, n: jnp.stack([w, jnp.asarray([0.0, 1.0], w.dtype)]),
            ),
            write=_fixed("b", [1.0], [0.0]),
        ),
        Sublayer(
            pre_norm=MODEL_NORM, read=_fixed("h", [1.0, 0.0]), write=_fixed("b", [1.0], [0.0]),
        ),
        streams=Streams(2, readout=_fixed("h", [1.0, 0.0])), final_norm=True, pairs=True,
        summary="each block reads the stream and the embedding with learned weights",
        action="mixing the embedding into the stream before each block",
    ),
    "nag": Placement(
        "norm-agnostic residual", "Figliolia and Millidge 2026 (NAG), arXiv 2606.16112, with its"
        " exponent beta at 1",
        Sublayer(
            pre_norm=NORMS["rmsnorm_simple"], join=Tangential(), read=_fixed("1", [1.0]),
            write=RowSizes("size", lambda position, n: jnp.full((n, 1), (position + 1.0) ** -0.5)),
        ),
        streams=Streams(1), final_norm=True,
        summary="each branch only turns the stream, by as much whatever the sizes of both",
        action="writing the part of each branch that is across the stream, at the stream's size",
    ),
    "altup": Placement(
        "AltUp and LAuReL, 4 streams", "Baykal et al. 2023, arXiv 2301.13310, and Menghani et al."
        " 2024, arXiv 2411.07501, as Gemma 3n in the transformers library has them; its"
        " inputs of each layer and its maps into and out of the streams are left out",
        Sublayer(
            pre_norm=MODEL_NORM, branch_norm=MODEL_NORM, join=LowRank(),
            read=Alternating("predicted", "read"),
            keep=Alternating("A", "keep", share=math.sqrt(0.5), tied="read"),
            write=_fixed("b", *[[0.0]] * 4, [math.sqrt(0.5)]),
        ),
        Sublayer(
            pre_norm=MODEL_NORM, branch_norm=MODEL_NORM,
            read=_fixed("h", [0.0, 0.0, 0.0, 0.0, 1.0]), write=_fixed("b", *[[0.0]] * 4, [1.0]),
        ),
        streams=Streams(5, "copies", Alternating("corrected", "readout")), final_norm=True,
        pairs=True,
        summary="one of four streams goes through the block, with a linear branch of low rank; the"
        " others are predicted, then corrected",
        action="working on one of four streams and predicting the others",
    ),
    "gpas": Placement(
        "GPAS", "Chen et al. 2025, arXiv 2506.22049",
        Sublayer(pre_norm=MODEL_NORM, post_norm=NORMS["gradient_preserving"]), final_norm=True,
        summary="pre-norm; the sum shrinks by a learned number that the gradient does not see",
        action="shrinking the stream behind the gradient's back",
    ),
    "attention_residuals": Placement(
        "attention residuals", "Moonshot AI 2026, arXiv 2603.15031, full",
        Sublayer(pre_norm=MODEL_NORM, read=SoftmaxOverSources("softmax"), write=appended("append")),
        streams=Streams(lambda sublayers: sublayers + 1, "first", SoftmaxOverSources("softmax")),
        final_norm=True, summary="each branch reads a learned softmax mix of all earlier outputs",
        action="reading a learned mix of all earlier outputs", colour="#5b5ea6",
    ),
}  # fmt: skip

COMMON = (
    "pre", "post", "none", "sandwich", "branch_output", "deepnorm", "layernorm_scaling", "skipinit",
    "layerscale", "rezero", "hybridnorm", "hyper_connections", "attention_residuals",
)  # fmt: skip
"""One row of each kind: what is taken where nobody says which, and all of them would take long."""

PLACEMENTS: Registry[Placement] = Registry(
    "placement", {name: dataclasses.replace(row, name=name) for name, row in _ROWS.items()}
)


def register_placement(name: str, row: Placement, *, replace: bool = False) -> Placement:
    """Add a placement to the table under a name, and return it with that name.

    From then on ``--config.model.placement=NAME`` trains it, and everything that goes through the
    table (Jacobians, spectra, stability map, pages) has it too.

    Args:
      name: a small letter, then small letters, digits or underscores.
      row: the placement.
      replace: whether a name that is taken may get another row.

    Raises:
      UserError: a name that is none or taken; a row that is no placement, or that cannot be one.

    >>> row = Placement("half", "mine", Sublayer(pre_norm=MODEL_NORM, keep=0.5), final_norm=True)
    >>> register_placement("half", row).record(4)["attention"]["keep"]
    0.5
    >>> del PLACEMENTS["half"]
    """
    if not isinstance(row, Placement):
        raise UserError(f"placement {name!r}: must be a normjax.Placement, not {row!r}")
    check(row)
    return PLACEMENTS.register(name, dataclasses.replace(row, name=name), replace=replace)
