"""What every diagnostic means: one table that the probe, the reports and the documentation read.

A name is ``area/name_unit``. Diagnostics of each parameter or norm come one by one: their names
carry it in brackets, ``gradient/parameter_rms[attention.branch.query.kernel]``. No JAX here.

Axes: "layer" is the block, first to last; "sublayer" the sub-layers that a block has, attention
before MLP; "head" the query heads. A parameter outside the blocks has no layer axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from normjax.errors import UserError, suggest

SUBLAYER_ORDER = ("attention", "mlp")
SATURATED = 0.99
"""From this largest probability on a query counts as saturated."""
DEAD = 1e-3
"""A hidden unit is dead if it stays below this part of the layer's RMS on every token."""


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One diagnostic.

    Attributes:
      title: what a legend calls it.
      definition: what it is, in words.
      unit: "" for a pure number.
      axes: of the array, such as ("layer", "sublayer"); () for one number.
      source: where it comes from.
      scale: "log" or "linear": how it is drawn.
      each: "" or what the brackets of its name hold, "parameter" or "norm".
    """

    title: str
    definition: str
    unit: str = ""
    axes: tuple[str, ...] = ("layer", "sublayer")
    source: str = ""
    scale: str = "linear"
    each: str = ""


_RMS = "root of the mean square over batch, positions and features of"
_COLLAPSE = "Dong et al. 2021, arXiv 2103.03404; Noci et al. 2022, arXiv 2206.03126"
_GROWTH = "Dehghani et al. 2023, arXiv 2302.05442; Wortsman et al. 2023, arXiv 2309.14322"

DIAGNOSTICS: dict[str, Diagnostic] = {
    "residual/rms_before": Diagnostic(
        "stream before", f"{_RMS} the stream h that the sub-layer starts from",
        source="Xiong et al. 2020, arXiv 2002.04745", scale="log",
    ),
    "residual/rms_after": Diagnostic(
        "stream after", f"{_RMS} the stream h' = P(a h + b Q(F(c N(h)))) that it returns",
        source="Xiong et al. 2020, arXiv 2002.04745", scale="log",
    ),
    "read/rms": Diagnostic("read", f"{_RMS} what the branch reads, c N(h)", scale="log"),
    "branch/rms": Diagnostic(
        "written", f"{_RMS} what the branch adds, b Q(F(c N(h)))", scale="log"
    ),
    "branch/stream_ratio": Diagnostic(
        "written / stream", "RMS of what the branch adds over the RMS of the stream before it",
        source="Liu et al. 2020, arXiv 2004.08249", scale="log",
    ),
    "branch/stream_cosine": Diagnostic(
        "cosine of written and stream",
        "cosine between what the branch adds and the stream before it, mean over tokens; 0 for a"
        " token where one of them is zero",
    ),
    "residual/token_similarity": Diagnostic(
        "token similarity",
        "cosine between the streams of two different tokens of one sequence after the sub-layer,"
        " mean over pairs and sequences; 1 where all tokens have become one direction",
        source=_COLLAPSE,
    ),
    "attention/logit_max": Diagnostic(
        "largest logit", "largest absolute logit that the softmax sees, over queries and the keys"
        " that they see; at every step of the batch's first sequence, at samples of all",
        axes=("layer", "head"), source=_GROWTH, scale="log",
    ),
    "attention/logit_std": Diagnostic(
        "spread of logits", "standard deviation of a query's logits over the keys that it sees,"
        " root mean square over queries of two keys or more",
        axes=("layer", "head"), source=_GROWTH, scale="log",
    ),
    "attention/entropy": Diagnostic(
        "attention entropy", "-sum p log p of a query's probabilities, mean over all queries",
        unit="nats", axes=("layer", "head"), source="Zhai et al. 2023, arXiv 2303.06296",
    ),
    "attention/entropy_share": Diagnostic(
        "attention entropy, of the largest possible",
        "entropy of a query over log n for the n keys that it sees, mean over queries of two keys"
        " or more; 1 is uniform attention, 0 is one key",
        axes=("layer", "head"), source="Zhai et al. 2023, arXiv 2303.06296",
    ),
    "attention/collision_share": Diagnostic(
        "collision entropy, of the largest possible",
        "-log sum p^2 of a query's probabilities (Renyi's entropy of order 2, at most the entropy)"
        " over log n for the n keys that it sees, mean over queries of two keys or more of"
        " the batch's first sequence; 1 is uniform attention, 0 is one key",
        axes=("layer", "head"), source="Renyi 1961",
    ),
    "attention/head_share": Diagnostic(
        "share of a head", "RMS of what a head returns times the length of the output matrix's rows"
        " for it, over the root of the sum of squares of that over the heads of its block: what it"
        " writes of what all write, were its features independent; 0 where none writes",
        axes=("layer", "head"), scale="log",
    ),
    "attention/saturated_share": Diagnostic(
        "saturated queries", f"share of the queries of two keys or more whose largest probability"
        f" is above {SATURATED}: their softmax passes at most 1 % of a gradient on",
        axes=("layer", "head"), source="Zhai et al. 2023, arXiv 2303.06296",
    ),
    "mlp/activation_rms": Diagnostic(
        "MLP activation", f"{_RMS} the MLP's hidden layer after its nonlinearity",
        axes=("layer",), scale="log",
    ),
    "mlp/dead_share": Diagnostic(
        "dead units", f"share of the hidden units whose absolute value stays at or below {DEAD} of"
        " the layer's RMS on every token of the batch; a ReLU unit that never fires is one",
        axes=("layer",), source="Lu et al. 2019, arXiv 1903.06733",
    ),
    "gradient/stream_rms": Diagnostic(
        "gradient of the stream", f"{_RMS} the loss's gradient with respect to the stream before"
        " the sub-layer, times the number of tokens of the batch: the gradient of one token's loss"
        " in size, whatever the batch", unit="nats", scale="log",
        source="Glorot and Bengio 2010; Xiong et al. 2020, arXiv 2002.04745",
    ),
    "residual/transfer": Diagnostic(
        "stream after / before", "RMS of the stream after the sub-layer over that before it",
        scale="log",
    ),
    "residual/depth_ratio": Diagnostic(
        "stream, end to end", "RMS of the stream after the last block over that before the first:"
        " the product of all sub-layers' ratios", axes=(), scale="log",
    ),
    "gradient/transfer": Diagnostic(
        "gradient before / after", "RMS of the gradient of the stream before the sub-layer over"
        " that after it", scale="log",
    ),
    "gradient/depth_ratio": Diagnostic(
        "gradient, end to end", "RMS of the gradient of the stream before the first block over that"
        " after the last: the product of all sub-layers' ratios", axes=(), scale="log",
        source="Glorot and Bengio 2010; Xiong et al. 2020, arXiv 2002.04745",
    ),
    "gradient/block_norm": Diagnostic(
        "gradient of a sub-layer", "length of the loss's gradient by the parameters of the"
        " sub-layer, before clipping", scale="log",
    ),
    "update/block_ratio": Diagnostic(
        "update / parameters", "length of the step that the optimizer takes in the matrices of the"
        " sub-layer over their length, both of one row in eight", scale="log",
        source="You et al. 2017, arXiv 1708.03888",
    ),
    "loss/jump": Diagnostic(
        "loss over its mean before", "loss of the step over the running mean of about five steps"
        " before it, from the sixth step on", axes=(), scale="log",
    ),
    "gradient/jump": Diagnostic(
        "gradient norm over its mean before", "the same of the gradient norm", axes=(), scale="log",
    ),
    "gradient/stream_rms_last": Diagnostic(
        "gradient of the last stream", "the same after the last block", unit="nats", axes=(),
        scale="log",
    ),
    "gradient/parameter_rms": Diagnostic(
        "gradient of a parameter", "root mean square of the loss's gradient, before clipping",
        axes=("layer",), scale="log", each="parameter",
    ),
    "update/parameter_ratio": Diagnostic(
        "update / parameter", "RMS of the update that the optimizer takes at this step (learning"
        " rate and weight decay included) over the RMS of the parameter; infinite where that is"
        " zero", axes=("layer",), scale="log", each="parameter",
        source="You et al. 2017, arXiv 1708.03888",
    ),
    "gain/mean": Diagnostic(
        "gain, mean", "mean over features of what the norm multiplies by, 1 + g where it learns g",
        axes=("layer",), each="norm",
    ),
    "gain/min": Diagnostic("gain, smallest", "the smallest of them", axes=("layer",), each="norm"),
    "gain/max": Diagnostic("gain, largest", "the largest of them", axes=("layer",), each="norm"),
    "loss/value": Diagnostic("loss", "mean loss of the step's batch", unit="nats", axes=()),
    "loss/slope": Diagnostic(
        "loss along the step", "g . u for the gradient g and the step u that the optimizer takes:"
        " what the loss changes by to first order", unit="nats", axes=(),
    ),
    "loss/curvature": Diagnostic(
        "curvature along the step", "u . H u for the Hessian H of this batch's loss and the step u;"
        " half of it is what the loss changes by to second order", unit="nats", axes=(),
        source="Cohen et al. 2021, arXiv 2103.00065",
    ),
    "gradient/norm": Diagnostic(
        "gradient norm", "length of the gradient of all parameters, before clipping", axes=(),
        scale="log",
    ),
    "update/norm": Diagnostic(
        "update norm", "length of the step of all parameters", axes=(), scale="log"
    ),
    "instrument/radial_defect": Diagnostic(
        "self-test", "largest relative defect over tokens of u . dL/dh = a u . dL/dh' (the radial"
        " gradient passes a branch behind a norm unchanged) and, for a norm on the stream, of"
        " u . dL/dx = 0 for the sum x that it reads, both with their exact terms in eps: rounding,"
        " or the derivatives are wrong", scale="log",
    ),
    "instrument/radial_defect_last": Diagnostic(
        "self-test of the final norm", "the same of u . dL/dh = 0 for the stream that the final"
        " norm reads", axes=(), scale="log",
    ),
}  # fmt: skip


def split(name: str) -> tuple[str, str]:
    """Return the diagnostic of a name and what its brackets hold, "" without them.

    >>> split("gain/mean[attention.pre_norm]")
    ('gain/mean', 'attention.pre_norm')
    >>> split("loss/value")
    ('loss/value', '')
    """
    diagnostic, _, part = name.partition("[")
    return diagnostic, part.removesuffix("]")


def diagnostic(name: str) -> Diagnostic:
    """Return the row of the table that a name, with or without brackets, belongs to.

    Raises:
      UserError: no such diagnostic.

    >>> diagnostic("gain/mean[attention.pre_norm]").title
    'gain, mean'
    """
    head = split(name)[0]
    if head not in DIAGNOSTICS:
        raise UserError(
            f"diagnostic={name}: must be one of {', '.join(DIAGNOSTICS)}"
            f"{suggest(head, DIAGNOSTICS)}"
        )
    return DIAGNOSTICS[head]


def sublayer_names(model: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what the sublayer axis holds, from the "model" part of a run's record.

    >>> sublayer_names({"attention": "softmax", "mlp": "none"})
    ('attention',)
    """
    return tuple(name for name in SUBLAYER_ORDER if model.get(name) != "none")
