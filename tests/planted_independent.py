"""A second table of planted faults; every expectation was written before any run was trained.

    python -m tests.planted_independent              the whole table
    python -m tests.planted_independent NAME ...     some faults, and no healthy runs

It was written from what the diagnostics mean, without sight of their bands or of the other table.
A fault is named right where state, cause and place are each one of those that are expected; there
are several of them only where several things really begin at the same step.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

try:
    import planted
    from planted import ATTENTION, MLP, Case, Edit, K, O, Q, V, every, put, times
except ModuleNotFoundError:  # as python -m tests.planted_independent
    from tests import planted
    from tests.planted import ATTENTION, MLP, Case, Edit, K, O, Q, V, every, put, times

from normjax.diagnostics import verdict
from normjax.diagnostics.verdict import Verdict
from normjax.norms import Norm
from normjax.placements import PLACEMENTS

Place = tuple[int | None, str | None, int | None]
"""Layer, sub-layer, head; None where a diagnostic has none."""


@dataclasses.dataclass(frozen=True)
class Planted:
    """One fault and what must be said of it.

    Attributes:
      reason: why it is expected.
      seed: of the run.
      states, causes, places: what is accepted; causes without brackets.
      fault: what is planted.
    """

    reason: str
    seed: int
    states: frozenset[str]
    causes: frozenset[str]
    places: frozenset[Place]
    fault: planted.Fault


def plant(
    reason: str, seed: int, states: str | set[str], causes: str | set[str], places: set[Place],
    **changes: Any,
) -> Planted:  # fmt: skip
    """Return a fault; ``changes`` are what ``planted.Fault`` takes."""
    states = {states} if isinstance(states, str) else states
    causes = {causes} if isinstance(causes, str) else causes
    fault = planted.Fault(" or ".join(sorted(states)), " or ".join(sorted(causes)), **changes)
    return Planted(
        reason, seed, frozenset(states), frozenset(causes), frozenset(places), fault
    )  # fmt: skip


# --- places and causes ----------------------------------------------------------------------------

NOWHERE: set[Place] = {(None, None, None)}


def sub(*layers: int, of: Iterable[str] = ("attention", "mlp")) -> set[Place]:
    """Return sub-layers of blocks."""
    return {(layer, name, None) for layer in layers for name in of}


def block(*layers: int) -> set[Place]:
    """Return whole blocks: of diagnostics with the layer alone."""
    return {(layer, None, None) for layer in layers}


def head(*layers: int, of: Iterable[int] = (1, 2)) -> set[Place]:
    """Return heads of blocks."""
    return {(layer, None, number) for layer in layers for number in of}


def attn(*layers: int) -> set[Place]:
    """Return the attention sub-layers of blocks."""
    return sub(*layers, of=("attention",))


def mlp(*layers: int) -> set[Place]:
    """Return the MLP sub-layers of blocks."""
    return sub(*layers, of=("mlp",))


LOSS = {"loss/value", "train/loss", "validation/loss", "test/loss"}
JUMPS = {"loss/jump", "gradient/jump"}
LOGITS = {
    "attention/logit_max", "attention/logit_std", "attention/entropy", "attention/entropy_share",
    "attention/collision_share", "attention/saturated_share",
}  # fmt: skip
WRITTEN = {"branch/rms", "branch/stream_ratio"}
STREAM = {"residual/rms_after", "residual/transfer", "residual/depth_ratio"}
BACK = {"gradient/transfer", "gradient/depth_ratio"}
GAINS = {"gain/mean", "gain/min", "gain/max"}
SHARE, DEAD, UPDATE = "attention/head_share", "mlp/dead_share", "update/block_ratio"
RATIO = "branch/stream_ratio"

# --- builders -------------------------------------------------------------------------------------


def ruled(rule: Callable[[Any], Any], base: str = "pre") -> dict[str, Any]:
    """Return a placement with a rule of its own after every step."""
    row = dataclasses.replace(PLACEMENTS[base], after_step=rule, name=f"{base} of its own")
    return {"placement": row}


def held(base: str, *paths: tuple[str, ...], number: int) -> dict[str, Any]:
    """Return a placement that puts arrays of one block back to zero after every step."""
    every_path = [list(path) for path in paths]

    def rule(params: Any) -> Any:
        def changed(keys: Any, leaf: Any) -> Any:
            names = [key.key for key in keys][1:]
            return leaf.at[number - 1].set(0) if names in every_path else leaf

        return jax.tree_util.tree_map_with_path(changed, params)

    return ruled(rule, base)


def silent(base: str, number: int, *names: str) -> dict[str, Any]:
    """Return a placement in which branches of one block never write."""
    last = {"attention": "output", "mlp": "out"}
    paths = [(n, "branch", last[n], leaf) for n in names for leaf in ("kernel", "bias")]
    return held(base, *paths, number=number)


def hushed(number: int, *names: str) -> Edit:
    """Return the edit for it: nothing is written, by matrices of the size of trained ones."""
    edits = {
        "attention": (times(0, *O, block=number), times(12, *V, block=number)),
        "mlp": (
            times(0, *MLP, "out", "kernel", block=number),
            times(12, *MLP, "in", "kernel", block=number),
        ),
    }
    return every(*(edit for name in names for edit in edits[name]))


def rows_held(base: str, number: int, rows: slice) -> dict[str, Any]:
    """Return a placement that keeps rows of one block's attention output at zero."""

    def rule(params: Any) -> Any:
        def changed(keys: Any, leaf: Any) -> Any:
            names = [key.key for key in keys][1:]
            return leaf.at[number - 1, rows].set(0) if names == list(O) else leaf

        return jax.tree_util.tree_map_with_path(changed, params)

    return ruled(rule, base)


def factors(base: str, changed: Iterable[int], **values: float) -> dict[str, Any]:
    """Return a placement with other factors (keep, write) in some blocks."""
    chosen, row = tuple(changed), PLACEMENTS[base]

    def schedule(value: float) -> Callable[[int, int], float]:
        return lambda number, depth: value if number in chosen else 1.0

    own = dataclasses.replace(row.attention, **{k: schedule(v) for k, v in values.items()})
    return {"placement": dataclasses.replace(row, attention=own, name=f"{base} of its own")}


def normed(base: str, slot: str, norm: Norm, number: int, *names: str) -> dict[str, Any]:
    """Return a placement with a norm of its own in a slot of branches of one block."""
    row = PLACEMENTS[base]

    def changed(name: str) -> Any:
        own = row.of(name)
        if name not in names:
            return own
        return dataclasses.replace(
            own, **{slot: lambda layer, depth: norm if layer == number else None}
        )

    return {
        "placement": dataclasses.replace(
            row, attention=changed("attention"), mlp=changed("mlp"), name=f"{base} of its own"
        )
    }


STOPPED = Norm("no gradient", lambda x: jax.lax.stop_gradient(x))
LOUD = Norm(
    "a gradient times 1000",
    lambda x: jax.lax.stop_gradient(x) + 1e3 * (x - jax.lax.stop_gradient(x)),
)


def levelled(params: Any) -> Any:
    """Return parameters in which all tokens have one embedding, their mean."""
    mean = params["embedding"].mean(axis=0, keepdims=True)
    return params | {"embedding": 0 * params["embedding"] + mean}


def unread(params: Any) -> Any:
    """Return parameters with an output layer that reads nothing."""
    output = params["output"]
    return params | {"output": output | {"kernel": 0 * output["kernel"]}}


def outside(value: float, *path: str, index: Any) -> Edit:
    """Return what sets entries of an array that is in no block."""

    def edit(params: dict[str, Any]) -> None:
        tree = params
        for name in path:
            tree = tree[name]
        tree[index] = value

    return edit


def enlarged(factor: float, *path: str) -> Edit:
    """Return what multiplies an array that is in no block."""

    def edit(params: dict[str, Any]) -> None:
        tree = params
        for name in path:
            tree = tree[name]
        tree *= factor

    return edit


# --- faults ---------------------------------------------------------------------------------------

FAULTS: dict[str, Planted] = {
    # Heads.
    "sandwich: head 2 of the last block dead": plant(
        "neither values nor rows that read them: no gradient ever reaches the head",
        11, "idle part", SHARE, head(3, of=(2,)),
        edit=planted.dead_head(3, 2), model={"placement": "sandwich"},
    ),
    "post: head 1 of block 1 of four dead": plant(
        "the same beside normalized queries and keys, which stay alive",
        12, "idle part", SHARE, head(1, of=(1,)),
        edit=planted.dead_head(1, 1),
        model={"placement": "post", "depth": 4, "qk_norm": True, "mlp": "gelu"},
    ),
    "branch_output: one head dead in each of two blocks": plant(
        "both from the first step on: either may be named",
        13, "idle part", SHARE, {(1, None, 2), (2, None, 1)},
        edit=every(planted.dead_head(2, 1), planted.dead_head(1, 2)),
        model={"placement": "branch_output"},
    ),
    "attention_residuals: head 1 of block 2 dead": plant(
        "a dead head is one whatever the streams are",
        14, "idle part", SHARE, head(2, of=(1,)),
        edit=planted.dead_head(2, 1), model={"placement": "attention_residuals"},
    ),
    "pre: head 3 of four of block 2 is never read": plant(
        "its values live, the rows of the output matrix for it are put back to zero every step",
        15, "idle part", SHARE, head(2, of=(3,)),
        edit=put(0, *O, index=(1, slice(8, 12))),
        model={"heads": 4, **rows_held("pre", 2, slice(8, 12))},
    ),
    # Branches and blocks.
    "pre: MLP of block 2 writes nothing": plant(
        "its last matrix and bias are put back to zero every step, its hidden units live",
        16, "idle part", RATIO, mlp(2),
        edit=hushed(2, "mlp"), model=silent("pre", 2, "mlp"),
    ),
    "post: attention of block 3 writes nothing": plant(
        "as above; where no head writes, every head's share is 0 at the same steps",
        17, "idle part", {RATIO, SHARE}, attn(3) | head(3),
        edit=hushed(3, "attention"), model=silent("post", 3, "attention"),
    ),
    "layernorm_scaling: block 3 of four does nothing": plant(
        "both of its branches are silent, its heads with them",
        18, "idle part", {RATIO, SHARE, "residual/transfer"}, sub(3) | head(3) | block(3),
        edit=hushed(3, "attention", "mlp"),
        model={"depth": 4, **silent("layernorm_scaling", 3, "attention", "mlp")},
    ),
    "rezero: the factor of block 2 stays at zero": plant(
        "it starts at zero and is put back every step: nothing is written, and no gradient comes",
        19, "idle part", {RATIO, UPDATE}, sub(2),
        model=held("rezero", ("write",), number=2),
    ),
    "skipinit: the factor of the first MLP stays at zero": plant(
        "as above, for one branch",
        20, "idle part", {RATIO, UPDATE}, mlp(1),
        model=held("skipinit", ("mlp", "write"), number=1),
    ),
    "pre, no biases: attention of block 2 reads nothing": plant(
        "the gain of its norm is put back to zero every step: it reads and writes exact zeros",
        21, {"idle part", "drifting"}, {*GAINS, RATIO, SHARE, "read/rms", "branch/rms"},
        block(2) | attn(2) | head(2),
        edit=put(0, "attention", "pre_norm", "gain", index=1),
        model={"bias": False, **held("pre", ("attention", "pre_norm", "gain"), number=2)},
    ),
    # Frozen blocks.
    "pre: block 2 frozen": plant(
        "no gradient enters its branches, which write; without decay no step changes them",
        22, "idle part", {UPDATE, "gradient/block_norm"}, sub(2), decay=0.0,
        model={
            "init": "fan_in_scaled",
            **normed("pre", "branch_norm", STOPPED, 2, "attention", "mlp"),
        },
    ),
    "post: MLP of block 1 of two frozen": plant(
        "as above, for one branch",
        23, "idle part", {UPDATE, "gradient/block_norm"}, mlp(1), decay=0.0,
        model={
            "depth": 2, "init": "fan_in_scaled",
            **normed("post", "branch_norm", STOPPED, 1, "mlp"),
        },
    ),
    # Hidden units.
    "post: all hidden units of block 1 dead": plant(
        "a bias of -50 below every input; only the output bias is still written",
        24, "idle part", DEAD, block(1),
        edit=put(-50.0, *MLP, "in", "bias", index=0), model={"placement": "post"},
    ),
    "layernorm_scaling: gelu units of block 4 dead": plant(
        "gelu(-50) and its derivative are 0 in float32",
        25, "idle part", DEAD, block(4),
        edit=put(-50.0, *MLP, "in", "bias", index=3),
        model={"placement": "layernorm_scaling", "depth": 4, "mlp": "gelu"},
    ),
    "pre: all gates of block 2 shut": plant(
        "silu(-200) is 0 in float32: the product is 0 whatever the other half is",
        26, "idle part", DEAD, block(2),
        edit=put(-200.0, *MLP, "gate", "bias", index=1), model={"mlp": "swiglu"},
    ),
    "pre: 62 of 64 hidden units of block 3 dead": plant(
        "a branch of two units is no MLP of 64",
        27, "idle part", DEAD, block(3),
        edit=put(-50.0, *MLP, "in", "bias", index=(2, slice(2, None))),
    ),
    "hyper_connections: no hidden units in blocks 1 and 2": plant(
        "their first matrix is zero and relu'(0) = 0: they never come to life",
        28, "idle part", DEAD, block(1, 2),
        edit=every(*(times(0, *MLP, "in", "kernel", block=number) for number in (1, 2))),
        model={"placement": "hyper_connections"},
    ),
    # Attention.
    "pre: logits of block 1 explode": plant(
        "queries and keys 200 times too large: logits of some thousands at the first step",
        29, {"drifting", "unstable"}, LOGITS, head(1),
        edit=every(times(200, *Q, block=1), times(200, *K, block=1)),
    ),
    "sandwich: logits of head 2 of block 2 explode": plant(
        "as above, for one head",
        30, {"drifting", "unstable"}, LOGITS, head(2, of=(2,)),
        edit=every(times(200, *Q, block=2, head=2), times(200, *K, block=2, head=2)),
        model={"placement": "sandwich", "mlp": "gelu"},
    ),
    "pre: queries of block 3 grow by 20 % a step": plant(
        "the logits follow them; nothing of the stream or of what is written does",
        31, {"drifting", "unstable"}, LOGITS, head(3), model=planted.after(1.2, *Q, block=3),
    ),
    "qk_norm: gain of the queries of block 1 is 1000": plant(
        "gain and logits are beyond all use from the first step on",
        32, {"drifting", "unstable"}, LOGITS | GAINS, block(1) | head(1),
        edit=put(1000.0, *ATTENTION, "query_norm", "gain", index=0), model={"qk_norm": True},
    ),
    "post: every query of block 2 sees itself alone": plant(
        "equal biases of 6 of queries and keys: rotary positions leave them one key",
        33, "drifting", LOGITS, head(2),
        edit=every(
            put(6.0, *ATTENTION, "query", "bias", index=1),
            put(6.0, *ATTENTION, "key", "bias", index=1),
        ),
        model={"placement": "post"},
    ),
    "hybridnorm: keys and queries without direction": plant(
        "with gains of zero, put back every step, attention of block 2 stays exactly uniform",
        34, {"drifting", "idle part"}, LOGITS | GAINS, block(2) | head(2),
        edit=every(
            put(0, *ATTENTION, "query_norm", "gain", index=1),
            put(0, *ATTENTION, "key_norm", "gain", index=1),
        ),
        model=held(
            "hybridnorm", (*ATTENTION, "query_norm", "gain"), (*ATTENTION, "key_norm", "gain"),
            number=2,
        ),
    ),
    "branch_output: attention of block 3 exactly uniform": plant(
        "no queries and no keys: neither gets a gradient without the other",
        35, {"drifting", "idle part"}, LOGITS, head(3),
        edit=planted.uniform(3), model={"placement": "branch_output"},
    ),
    "deepnorm: head 1 of block 1 exactly uniform": plant(
        "as above, for one head",
        36, {"drifting", "idle part"}, LOGITS, head(1, of=(1,)),
        edit=planted.uniform(1, 1), model={"placement": "deepnorm", "depth": 2},
    ),
    "pre: logits capped at a millionth": plant(
        "attention of all blocks is uniform and stays so",
        37, {"drifting", "idle part"}, LOGITS, head(1, 2, 3), model={"attention_softcap": 1e-6},
    ),
    # Rates, decay, optimizer.
    "pre: learning rate 0": plant(
        "no step changes anything",
        38, "not learning", {UPDATE, *LOSS}, sub(1, 2, 3) | NOWHERE, rate=0.0,
    ),
    "post: learning rate 1e-7": plant(
        "five orders of magnitude too small: the steps are, and the loss stays where it was",
        39, {"not learning", "too slow"}, {UPDATE, *LOSS}, sub(1, 2, 3) | NOWHERE,
        rate=1e-7, decay=0.0, model={"placement": "post"},
    ),
    "pre: learning rate 5e-5": plant(
        "the loss falls from the first step to the last and does not reach the unigram loss",
        40, "too slow", {UPDATE, *LOSS}, sub(1, 2, 3) | NOWHERE, rate=5e-5,
    ),
    "pre: learning rate 10": plant(
        "the first step is 24 times as long as the matrices; no loss can come of it",
        41, {"unstable", "diverged", "not learning"}, UPDATE, sub(1, 2, 3), rate=10.0,
    ),
    "none: learning rate 30, four blocks": plant(
        "as above; without norms the eight sub-layers multiply what the matrices have become",
        42, {"unstable", "diverged"}, UPDATE, sub(1, 2, 3, 4), rate=30.0,
        model={"placement": "none", "depth": 4},
    ),
    "post: learning rate 1": plant(
        "the first step is more than twice as long as the matrices",
        43, {"unstable", "diverged", "not learning"}, UPDATE, sub(1, 2, 3), rate=1.0,
        model={"placement": "post"},
    ),
    "pre: weight decay 1000": plant(
        "rate times decay is 10 at the peak: every step multiplies the matrices by -9",
        44, {"diverged", "unstable"}, UPDATE, sub(1, 2, 3), decay=1000.0,
    ),
    "sandwich: weight decay 600 at rate 1e-3": plant(
        "matrices and embedding are held at 1/600: all logits stay near zero",
        45, "not learning", {UPDATE, *LOSS}, sub(1, 2, 3) | NOWHERE, rate=1e-3, decay=600.0,
        model={"placement": "sandwich"},
    ),
    "pre: Adam's epsilon 1000": plant(
        "steps are the gradient over 1000: a ten-thousandth of what they should be",
        46, {"not learning", "too slow"}, {UPDATE, *LOSS}, sub(1, 2, 3) | NOWHERE, decay=0.0,
        train={"adam_eps": 1e3},
    ),
    "branch_output: clip 1e-14": plant(
        "what is left of the gradients is far below Adam's epsilon of 1e-8",
        47, {"not learning", "too slow"}, {UPDATE, *LOSS}, sub(1, 2, 3) | NOWHERE, decay=0.0,
        train={"clip": 1e-14}, model={"placement": "branch_output"},
    ),
    # Streams and gradients.
    "none: block 2 divides the stream by a million": plant(
        "keep and write of both sub-layers are 1e-3: stream and gradient lose it alike",
        49, "not learning", {"residual/rms_after", "residual/transfer", *STREAM, *BACK},
        sub(2) | NOWHERE, model=factors("none", [2], keep=1e-3, write=1e-3),
    ),
    "pre: block 2 divides the stream by 10^8": plant(
        "below the norms' eps: no token gets through, what is left is the unigram loss",
        50, "not learning", STREAM | BACK, sub(2) | NOWHERE,
        model=factors("pre", [2], keep=1e-4, write=1e-4),
    ),
    "pre: the last block multiplies the stream by 10^4": plant(
        "keep and write are 100; the final norm takes it back, and the run learns",
        51, "drifting", STREAM | BACK, sub(4) | NOWHERE,
        model={"depth": 4, **factors("pre", [4], keep=100.0, write=100.0)},
    ),
    "none: block 3 multiplies the stream by a million": plant(
        "nothing takes it back: logits of some thousands at the first step",
        52, {"not learning", "unstable", "diverged"}, STREAM | BACK, sub(3) | NOWHERE,
        model=factors("none", [3], keep=1e3, write=1e3),
    ),
    "none: block 2 keeps nothing": plant(
        "its stream is what its branches write, at first a thousandth of what they read",
        53, {"drifting", "not learning", "too slow"}, STREAM | BACK, sub(2) | NOWHERE,
        model=factors("none", [2], keep=0.0),
    ),
    "hyper_connections: an MLP keeps a thousandfold": plant(
        "the learned matrix that keeps the streams is 1000 times the identity",
        54, "drifting", STREAM | BACK, mlp(2) | NOWHERE,
        edit=times(1e3, "mlp", "keep_weights", block=2), model={"placement": "hyper_connections"},
    ),
    "pre: no gradient below block 3": plant(
        "it is cut behind the MLP of block 2: two blocks never hear of the loss",
        55, {"drifting", "idle part"},
        {*BACK, "gradient/stream_rms", "gradient/block_norm", UPDATE, "instrument/radial_defect"},
        sub(1, 2) | NOWHERE, decay=0.0, model=normed("pre", "post_norm", STOPPED, 2, "mlp"),
    ),
    "pre: a derivative of block 2 is 1000 times too large": plant(
        "values are right, gradients before the MLP of block 2 are not",
        56, {"drifting", "unstable"},
        {*BACK, "gradient/stream_rms", "instrument/radial_defect"}, mlp(2) | NOWHERE,
        model=normed("pre", "post_norm", LOUD, 2, "mlp"),
    ),
    # What branches write.
    "pre: the first MLP writes 10^4 times too much": plant(
        "its last matrix is; the stream behind it is what it writes",
        57, "drifting", WRITTEN | STREAM, mlp(1) | NOWHERE,
        edit=times(1e4, *MLP, "out", "kernel", block=1),
    ),
    "none: attention of block 2 writes 10^6 times too much": plant(
        "its output matrix is; the stream behind it is what it writes",
        58, {"drifting", "unstable", "not learning"}, WRITTEN | STREAM, attn(2) | NOWHERE,
        edit=times(1e6, *O, block=2), model={"placement": "none"},
    ),
    "sandwich: gain behind the MLP of block 2 is 1000": plant(
        "what it writes is 1000, where every other branch writes 1",
        59, "drifting", GAINS | WRITTEN | STREAM, block(2) | mlp(2) | NOWHERE,
        edit=put(1000.0, "mlp", "branch_norm", "gain", index=1), model={"placement": "sandwich"},
    ),
    "sandwich: gain before the MLP of block 3 is 10^4": plant(
        "it reads 10^4 and its hidden layer follows; the norm behind it hides it",
        60, "drifting", GAINS | {"read/rms", "mlp/activation_rms"}, block(3) | mlp(3),
        edit=put(1e4, "mlp", "pre_norm", "gain", index=2), model={"placement": "sandwich"},
    ),
    "layerscale: the MLP of block 2 scaled by 10^5": plant(
        "its learned scale starts at a million times its start",
        61, {"drifting", "unstable"}, WRITTEN | STREAM, mlp(2) | NOWHERE,
        edit=put(1e5, "mlp", "write", index=1), model={"placement": "layerscale"},
    ),
    "rezero: block 1 scaled by 10^6": plant(
        "both of its branches write thousands of times the stream, and nothing takes it back",
        62, {"not learning", "unstable", "diverged"}, WRITTEN | STREAM, sub(1) | NOWHERE,
        edit=put(1e6, "write", index=0), model={"placement": "rezero"},
    ),
    "hybridnorm: values of block 3 a thousand times": plant(
        "the gain of its values' norm; attention writes over all of the stream",
        63, {"drifting", "not learning"}, GAINS | WRITTEN | STREAM, block(3) | attn(3) | NOWHERE,
        edit=put(1000.0, *ATTENTION, "value_norm", "gain", index=2),
        model={"placement": "hybridnorm"},
    ),
    "pre: MLP of block 1 grows by 20 % a step": plant(
        "10^9 in all: the stream behind it grows with it, the norms hide it from the loss",
        64, {"drifting", "unstable"}, WRITTEN | STREAM, mlp(1) | NOWHERE,
        model=planted.after(1.2, *MLP, "out", "kernel", block=1),
    ),
    "post: attention of block 2 grows by 30 % a step": plant(
        "its share of the sum grows until nothing of the stream is left, whose gradient goes too",
        65, {"drifting", "not learning", "unstable"}, WRITTEN | {"gradient/transfer"}, attn(2),
        model=planted.after(1.3, *O, block=2, base="post"),
    ),
    "pre: MLP of block 2 grows a thousandfold a step": plant(
        "the stream shows it at the second step, float32 ends at the thirteenth",
        66, "diverged", WRITTEN | STREAM, mlp(2) | NOWHERE,
        model=planted.after(1e3, *MLP, "out", "kernel", block=2),
    ),
    "pre: the final gain doubles every step": plant(
        "logits and gradients double with it: the loss blows up within a dozen steps",
        67, {"unstable", "diverged"}, {*JUMPS, "gradient/stream_rms"},
        sub(1, 2, 3) | NOWHERE, model=planted.after(2.0, "final_norm", "gain", block=None),
    ),
    "pre: the embedding grows by half every step": plant(
        "it is the output layer too: logits and loss grow with it",
        68, {"unstable", "diverged"}, {*JUMPS, "residual/rms_before"}, attn(1) | NOWHERE,
        model=planted.after(1.5, "embedding", block=None),
    ),
    # Not finite.
    "pre: a NaN in the embedding": plant(
        "the stream that block 1 starts from is the first to have it",
        69, "diverged", {"residual/rms_before", "residual/rms_after", "residual/transfer",
                         "read/rms", *WRITTEN}, attn(1),
        edit=outside(np.nan, "embedding", index=(3, 5)),
    ),
    "post: a NaN in the MLP of block 3": plant(
        "its hidden layer and what it writes are the first that are not finite",
        70, "diverged", {*WRITTEN, *STREAM, DEAD, "mlp/activation_rms"}, mlp(3) | block(3),
        edit=put(np.nan, *MLP, "in", "kernel", index=(2, 4, 7)), model={"placement": "post"},
    ),
    "branch_output: an infinite value weight in block 2": plant(
        "head 1 returns what is not finite, and attention writes it",
        71, "diverged", {*WRITTEN, *STREAM, SHARE}, attn(2) | head(2, of=(1,)),
        edit=put(np.inf, *V, index=(1, 0, 0)), model={"placement": "branch_output"},
    ),
    "none: a NaN in a query of head 2 of block 1": plant(
        "its logits are the first that are not finite; then all that attention writes is",
        72, "diverged", {*LOGITS, SHARE, *WRITTEN, *STREAM}, head(1, of=(2,)) | attn(1),
        edit=put(np.nan, *Q, index=(0, 2, 12)), model={"placement": "none"},
    ),
    "pre: a NaN in the final gain": plant(
        "every stream is finite: gain, logits and loss are not",
        73, "diverged", {*LOSS, *GAINS}, NOWHERE,
        edit=outside(np.nan, "final_norm", "gain", index=2),
    ),
    # Embedding, output, scales.
    "untied: all tokens have one embedding": plant(
        "put back every step: all streams of a sequence are one direction, no token is known",
        74, "not learning", "residual/token_similarity", sub(1, 2, 3),
        edit=planted.alike, model={"tied": False, **ruled(levelled)},
    ),
    "pre: embedding a thousand times too large": plant(
        "a stream of 20 hides every branch, and logits of hundreds predict the token itself",
        75, {"not learning", "too slow"},
        {RATIO, "residual/rms_before", "residual/rms_after", *LOSS}, sub(1, 2, 3) | NOWHERE,
        edit=enlarged(1e3, "embedding"),
    ),
    "untied: the output layer reads nothing": plant(
        "its matrix stays zero: only its bias learns, and no gradient reaches a stream",
        76, "not learning",
        {*LOSS, UPDATE, "gradient/stream_rms", "gradient/stream_rms_last", "gradient/block_norm",
         "gradient/parameter_rms"},
        sub(1, 2, 3) | block(1, 2, 3) | NOWHERE,
        edit=enlarged(0, "output", "kernel"), model={"tied": False, **ruled(unread)},
    ),
    "pre: all matrices start at zero": plant(
        "every value and every gradient is zero and stays zero: nothing lives",
        77, "not learning",
        {*LOSS, *WRITTEN, UPDATE, SHARE, DEAD, "residual/rms_before", "residual/rms_after",
         "gradient/norm", "gradient/stream_rms", "gradient/block_norm", "gradient/parameter_rms"},
        sub(1, 2, 3) | block(1, 2, 3) | head(1, 2, 3) | NOWHERE, scale=0.0,
    ),
    "none: initial scale 50, four blocks": plant(
        "matrices of 1 in place of 0.02: logits, stream and gradients explode at the first step",
        78, {"not learning", "unstable", "diverged"}, LOGITS | WRITTEN | STREAM | BACK,
        sub(1, 2, 3, 4) | head(1, 2, 3, 4) | NOWHERE, scale=50.0,
        model={"placement": "none", "depth": 4},
    ),
    "pre: output logits capped at 0.001": plant(
        "no prediction but the uniform one can be made, whatever is learned",
        79, "not learning", LOSS, NOWHERE, model={"output_softcap": 1e-3},
    ),
    "pre: eps of the norms is a million": plant(
        "they divide by 1000 in place of the stream's size: branches and logits vanish",
        80, {"not learning", "too slow"},
        {*WRITTEN, *LOSS, "read/rms", "mlp/activation_rms", "gradient/stream_rms"},
        sub(1, 2, 3) | block(1, 2, 3) | NOWHERE, model={"norm_eps": 1e6},
    ),
    "post: a gain of zero behind the first attention": plant(
        "put back every step: the stream ends there, no token gets through",
        81, "not learning", GAINS | {"residual/rms_after", "residual/transfer", *BACK,
                                     "residual/rms_before"}, block(1) | sub(1) | NOWHERE,
        edit=put(0, "attention", "post_norm", "gain", index=0),
        model=held("post", ("attention", "post_norm", "gain"), number=1),
    ),
}  # fmt: skip

# --- healthy runs ---------------------------------------------------------------------------------


def healthy() -> list[Case]:
    """Return healthy runs: every placement in several settings, no two with one seed."""
    out: list[Case] = []

    def add(name: str, what: str, model: dict[str, Any], **changes: Any) -> None:
        fault = planted.Fault("well behaved", "", model={"placement": name, **model}, **changes)
        seed = 301 + len(out)
        out.append(Case(f"{name}, {what}, seed {seed}", fault, seed))

    for name in PLACEMENTS:
        row = PLACEMENTS[name]
        bare = not row.final_norm and row.attention.post_norm is None
        add(name, "as it is", {})
        add(name, "gelu, two blocks, no decay", {"mlp": "gelu", "depth": 2}, rate=8e-3, decay=0.0)
        # Without norms a gated branch of matrices of 0.02 would start as good as absent.
        add(
            name, "swiglu, LayerNorm, normalized queries, four blocks",
            {"mlp": "swiglu", "norm": "layernorm", "qk_norm": True, "depth": 4,
             **({"init": "fan_in_scaled"} if bare else {})}, rate=6e-3,
        )  # fmt: skip
        add(
            name, "four heads, learned positions, untied, no biases",
            {"heads": 4, "positions": "learned", "tied": False, "bias": False},
        )  # fmt: skip
        if not bare:
            add(
                name, "gelu, gain 1 + g, two blocks, rate 3e-3",
                {"mlp": "gelu", "norm": "rmsnorm_offset", "depth": 2}, rate=3e-3,
            )  # fmt: skip
    return out


# --- runs -----------------------------------------------------------------------------------------


def right(expected: Planted, found: Verdict) -> tuple[bool, bool]:
    """Return whether state, cause and place are among those expected, and whether the state is."""
    state, first = found.state in expected.states, found.first
    if first is None:
        return False, state
    named = first.diagnostic.split("[")[0] in expected.causes
    return state and named and (first.layer, first.sublayer, first.head) in expected.places, state


def _place(place: Place) -> str:
    words = [str(x) for x in place if x is not None]
    return " ".join(words) or "no place"


def expectation(expected: Planted) -> str:
    """Return what is accepted, in words."""
    places = sorted(_place(place) for place in expected.places)
    parts = (sorted(expected.states), sorted(expected.causes), places)
    return "; ".join(" | ".join(part) for part in parts)


def main() -> None:
    """Print the table and its counts."""
    chosen = sys.argv[1:] or list(FAULTS)
    cases = [Case(name, FAULTS[name].fault, FAULTS[name].seed) for name in chosen]
    all_right = states_right = 0
    for case, found in planted.evidence(cases):
        judged = verdict.judge(found)
        ok, state = right(FAULTS[case.name], judged)
        all_right, states_right = all_right + ok, states_right + state
        first = judged.first
        named = "nothing" if first is None else (
            f"{first.diagnostic} at {_place((first.layer, first.sublayer, first.head))}"
        )  # fmt: skip
        print(
            f"{'right' if ok else 'WRONG':<6}{case.name}\n      {judged.sentence}\n"
            f"      first: {judged.state}; {named}\n"
            f"      expected: {expectation(FAULTS[case.name])}\n"
            f"      because: {FAULTS[case.name].reason}",
            flush=True,
        )
    print(f"{all_right} of {len(cases)} planted faults named right: state, cause and place")
    print(f"{states_right} of {len(cases)} with the right state")
    if sys.argv[1:]:
        return
    runs, alarms, idle = healthy(), [], []
    for case, found in planted.evidence(runs):
        judged = verdict.judge(found)
        line = f"{case.name}: {judged.sentence}"
        if judged.state in ("not learning", "too slow"):  # its loss says so: not healthy after all
            idle.append(line)
        elif judged.state != "well behaved":
            alarms.append(line)
    print("\n".join([*alarms, *idle]))
    print(
        f"{len(alarms)} false alarms on {len(runs) - len(idle)} healthy runs of {len(PLACEMENTS)}"
        f" placements; {len(idle)} more did not learn"
    )


if __name__ == "__main__":
    main()
