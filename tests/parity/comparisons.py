"""Which row of our table is compared with which model of the transformers library, and how."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from normjax.placements import PLACEMENTS
from tests.parity import maps
from tests.parity.maps import Map
from tests.parity.replay import Seen, largest, replayed, watch
from tests.parity.tiny_models import (
    DEPTH,
    EPS,
    MIXING_EPS,
    MODELS,
    VOCABULARY,
    WIDTH,
    build,
    part,
    tokens,
)

ROUNDOFFS = {False: 16, True: 64}
"""Of a sub-layer, by whether branches are compared as well, in units of the dtype's roundoff and of
the largest entry. Between branches: squares and the sum of at most 64, root, quotient, gain,
factor, sum of stream and branch, about eight roundings on either side. With branches, two matrix
products and a softmax more on either side, four times as much. Both sides compute in the dtype of
the comparison: in float64 theirs is :class:`tests.parity.tiny_models.Widened`, in float32 as it is.
"""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One row against one model.

    Attributes:
      model_type, row: of both tables.
      blocks, others: where the scheme's parameters are, see :mod:`tests.parity.maps`.
      config: of our decoder.
      keywords: of their config.
      branches, ends, plain: maps of the weights of branches, of embedding and output, and the
        config that the decoder's own branches need; None where it has no such branches.
      raw: whether the stream begins with the rows of the embedding table as they stand; else with
        what their first layer reads.
      unit: how many times theirs our stream is.
      gains: by branch, of theirs, what is counted to the branch's last matrix: 1 + g.
      row_of: a stream of ours that theirs has as its only one.
      prepared: what is done to their model first.
      placed: what is done to our parameters.
      reads_only: whether only what branches read is compared.
      note: what the comparison leaves out, or changes.
    """

    model_type: str
    row: str
    blocks: Map = dataclasses.field(default_factory=dict)
    others: Map = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    branches: Map | None = None
    ends: Map = dataclasses.field(default_factory=lambda: maps.HEAD)
    plain: dict[str, Any] = dataclasses.field(default_factory=dict)
    raw: bool = False
    unit: float = 1.0
    gains: dict[str, str] = dataclasses.field(default_factory=dict)
    row_of: int | None = None
    prepared: Callable[[torch.nn.Module], None] | None = None
    placed: Callable[[dict[str, Any]], dict[str, Any]] = dict
    reads_only: bool = False
    note: str = ""

    @property
    def name(self) -> str:
        """The row and the model."""
        return f"{self.row}-{self.model_type}"


_GATED = {"mlp": "swiglu", "mlp_width": 24, "kv_heads": 1}


def _without_eps(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.0


def _without_layer_inputs(model: torch.nn.Module) -> None:
    """Equal streams at the start, and nothing of a layer's own input."""
    for projection in model.model.altup_projections:
        projection.weight.data.copy_(torch.eye(WIDTH))
    for layer in model.model.layers:
        layer.post_per_layer_input_norm.weight.data.zero_()


def _scaled(function: Callable[[int], float]) -> dict[str, Any]:
    return {"residual_multiplier": function(DEPTH)}


COMPARISONS = [
    Comparison("llama", "pre", maps.PRE, maps.FINAL, branches=maps.LLAMA, plain=_GATED),
    Comparison(
        "olmo2", "branch_output", maps.BRANCH, maps.FINAL, branches=maps.LLAMA | maps.QUERY_KEY,
        plain=_GATED | {"qk_norm": True, "qk_norm_over": "heads"},
    ),
    Comparison(
        "gemma2", "sandwich", maps.SANDWICH, maps.FINAL, {"norm": "rmsnorm_offset"},
        branches=maps.LLAMA, plain=_GATED | {"attention_softcap": 2.0, "output_softcap": 3.0},
        ends=maps.HEAD | {
            "embedding": (lambda x: x * WIDTH**0.5, "model.embed_tokens.weight"),
        },
        note="MLP with SiLU",
    ),
    Comparison(
        "gemma3_text", "sandwich", maps.SANDWICH, maps.FINAL, {"norm": "rmsnorm_offset"},
        branches=maps.LLAMA | maps.QUERY_KEY, plain=_GATED | {"qk_norm": True},
        ends=maps.HEAD | {
            "embedding": (lambda x: x * WIDTH**0.5, "model.embed_tokens.weight"),
        },
        note="MLP with SiLU",
    ),
    Comparison(
        "gpt_neox", "parallel", maps.with_shifts(maps.PRE),
        maps.with_shifts({"final_norm.gain": "gpt_neox.final_layer_norm.weight"}),
        {"norm": "layernorm"}, branches=maps.GPT_NEOX, row_of=0,
        plain={"mlp_width": 24, "bias": True},
        ends={
            "embedding": "gpt_neox.embed_in.weight",
            "output.kernel": (maps.turned, "lm_head.weight"),
            "output.bias": lambda: np.zeros(VOCABULARY),
        },
    ),
    Comparison(
        "openai-gpt", "post",
        maps.with_shifts(maps.norms(attention_post="ln_1", mlp_post="ln_2")), {},
        {"norm": "layernorm"}, branches=maps.OPENAI,
        plain={"mlp_width": 4 * WIDTH, "bias": True, "positions": "learned"},
        ends={
            "embedding": "transformer.tokens_embed.weight",
            "positions": "transformer.positions_embed.weight",
            "output.kernel": (maps.turned, "lm_head.weight"),
            "output.bias": lambda: np.zeros(VOCABULARY),
        },
    ),
    Comparison(
        "bitnet", "sub_ln", maps.PRE, maps.FINAL, plain=_GATED,
        branches=maps.LLAMA | {
            "attention.branch.output_norm.gain": "self_attn.attn_sub_norm.weight",
            "mlp.branch.hidden_norm.gain": "mlp.ffn_sub_norm.weight",
        },
        note="in full precision, MLP with SiLU",
    ),
    Comparison(
        "hyperclovax", "sandwich",
        maps.PRE | maps.norms(attention_branch="post_norm1", mlp_branch="post_norm2"), maps.FINAL,
        branches=maps.LLAMA, plain=_GATED, note="multipliers 1",
    ),
    Comparison(
        "granite", "completep", maps.PRE, maps.FINAL,
        keywords=_scaled(lambda depth: 1 / depth), note="their multiplier set to 1/L",
    ),
    Comparison(
        "granite", "inverse_root_depth", maps.PRE, maps.FINAL,
        keywords=_scaled(lambda depth: (2 * depth) ** -0.5),
        note="their multiplier set to 1/sqrt(2L)",
    ),
    Comparison("minicpm3", "minicpm", maps.PRE, maps.FINAL, note="logit scale 1"),
    Comparison("beam", "beam", maps.SANDWICH, maps.FINAL),
    Comparison(
        "dory", "dory",
        {
            f"{branch}.step": (operator.mul, f"lambda_{i}", "lambda_scale")
            for i, branch in ((1, "attention"), (2, "mlp"))
        },
        {}, {"norm": "rmsnorm_simple"}, unit=WIDTH**0.5, prepared=_without_eps,
        note="their eps set to 0; no loops",
    ),
    Comparison(
        "minimax", "minimax", maps.PRE, maps.FINAL,
        keywords=dict.fromkeys(
            ("full_attn_alpha_factor", "linear_attn_alpha_factor", "mlp_alpha_factor"),
            (2 * DEPTH) ** 0.25,
        ),
        note="their factors set to (2L)^(1/4)",
    ),
    Comparison(
        "doge", "doge",
        maps.PRE | {"attention.keep": "input_residual", "mlp.keep": "post_attention_residual"},
        maps.FINAL,
    ),
    Comparison(
        "zaya", "zaya",
        maps.PRE | {
            f"{branch}.{slot}_norm.{ours}": f"post_{name}_residual_scale.{theirs}_{kind}"
            for branch, name in (("attention", "attention"), ("mlp", "mlp"))
            for slot, theirs in (("skip", "residual"), ("branch", "hidden_states"))
            for ours, kind in (("gain", "scale"), ("shift", "bias"))
        },
        maps.FINAL | {
            "embedding_norm.gain": "model.input_hidden_states_scale",
            "embedding_norm.shift": "model.input_hidden_states_bias",
        },
        raw=True,
    ),
    Comparison(
        "muse_spark_text", "muse_spark",
        maps.norms(attention_pre="input_layernorm", mlp_pre="pre_feedforward_layernorm") | {
            "attention.gate": "post_attention_residual_gate.gate",
            "mlp.gate": "post_feedforward_residual_gate.gate",
        },
        {"final_norm.gain": "norm.weight"}, raw=True,
        gains={"mlp": "post_feedforward_layernorm.weight"},
        note="one eps for all norms; the gain before the MLP's branch norm counted to the MLP",
    ),
    Comparison(
        "deepseek_v4", "mhc", maps.PRE | maps.streams(True), maps.FINAL | maps.GATED_HEAD,
    ),
    Comparison(
        "gemma3n_text", "altup", maps.SANDWICH | maps.GEMMA3N, maps.FINAL,
        prepared=_without_layer_inputs, placed=maps.one_block_later, reads_only=True,
        note="without its inputs of each layer, streams equal at the start; what branches read",
    ),
    Comparison(
        "hy_v4", "ihc", maps.PRE | maps.streams(False), maps.FINAL | maps.GATED_HEAD,
        note="1e-6 for eps of all norms, where it ships 1e-5",
    ),
]  # fmt: skip

NO_ROWS = {
    "glm5_next_text": "the streams of mhc; its output layer reads their plain mean",
    "inkling2_text": "attention residuals over normalized sources, logits over sqrt(d); the sources"
    " of our rows are mixed as they stand",
}
"""Models whose scheme is near a row of ours and not the same; there is a test of each."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a comparison found: ``difference`` by what was compared, relative to the largest."""

    comparison: Comparison
    whole: bool
    dtype: str
    difference: dict[str, float]
    tolerance: float

    @property
    def largest(self) -> float:
        """The largest of all differences; NaN where one is."""
        return float(np.max(list(self.difference.values())))


def compare(c: Comparison, wide: bool, whole: bool, **changes: Any) -> Result:
    """Run their model and ours, and return the differences.

    Args:
      c: what is compared.
      wide: in float64, else float32.
      whole: with our own branches and their weights; else with what their branches returned.
      changes: of our decoder's config, to see a wrong one fail.
    """
    model = build(c.model_type, wide, **c.keywords)
    if c.prepared is not None:
        c.prepared(model)
    given = tokens()
    seen = watch(c.model_type, model, given, wide)
    held = c.placed(maps.values(c.model_type, model, c.blocks, c.others))
    eps = MIXING_EPS if seen.states.ndim == 5 else EPS
    config: dict[str, Any] = {"placement": c.row, "norm": "rmsnorm", "norm_eps": eps} | c.config
    if whole:
        held |= maps.values(c.model_type, model, c.branches or {}, c.ends)
        config |= c.plain | changes
        logits, taps = replayed(held, given.numpy(), VOCABULARY, wide, None, **config)
    else:
        start = seen.start[..., 0, :] if seen.start.ndim == 4 else seen.start
        if c.raw:
            start = part(model, MODELS[c.model_type].embedding).weight.detach().numpy()[given]
        held["embedding"] = c.unit * start.reshape(-1, WIDTH)
        held["output.kernel"] = np.zeros((WIDTH, given.numel()))
        own = np.arange(given.numel()).reshape(given.shape)
        returned = dict(seen.returned)
        for branch, name in c.gains.items():
            gain = 1 + maps.values(c.model_type, model, {branch: name}, {})[f"blocks.{branch}"]
            returned[branch] = returned[branch] * gain[:, None, None]
        config |= {"positions": "none"} | changes
        logits, taps = replayed(held, own, given.numel(), wide, returned, **config)
    blocks = taps["blocks"]
    difference = {
        f"{branch} reads": largest(blocks[branch]["read"], c.unit * seen.read[branch])
        for branch in seen.read
    }
    if not c.reads_only:
        difference |= _after(c, seen, taps)
    if whole:
        difference["logits"] = largest(logits, seen.logits)
    roundoff = np.finfo(np.float64 if wide else np.float32).eps
    tolerance = float(ROUNDOFFS[whole] * 2 * DEPTH * roundoff)
    return Result(c, whole, "float64" if wide else "float32", difference, tolerance)


def _after(c: Comparison, seen: Seen, taps: dict[str, Any]) -> dict[str, float]:
    """Return the differences of the stream after every block and of what the head reads."""
    blocks = taps["blocks"]
    states = blocks["mlp"]["after"].reshape(*seen.states.shape[:3], -1, WIDTH)
    states = states[..., c.row_of, :] if c.row_of is not None else states
    return {
        "states": largest(states.reshape(seen.states.shape), c.unit * seen.states),
        "output layer reads": largest(
            taps["final" if "final" in taps else "last"], c.unit * seen.head
        ),
    }


def cases() -> list[tuple[Comparison, bool, bool]]:
    """Return all comparisons that there are: which, in float64 or not, whole or not."""
    return [
        (c, wide, whole)
        for c in COMPARISONS
        for whole in ((False, True) if c.branches is not None else (False,))
        for wide in (True, False)
    ]


def row_of(c: Comparison) -> Any:
    """Return the row of our table."""
    return PLACEMENTS[c.row]
