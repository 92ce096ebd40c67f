"""The one table of model types: what their settings mean for our decoder, and where weights are.

A row makes fields of :class:`normjax.decoder_config.DecoderConfig` of a config.json, and says for
each of our parameters which tensor holds it. Names and formulas are those of the transformers
library; ours are dotted, below a block or at the ends. The parity suite reads the same table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from normjax.equation import MODEL_NORM, Sublayer
from normjax.foreign.settings import Settings
from normjax.placements import PLACEMENTS

Shape = tuple[int, ...]
Fields = dict[str, Any]


def as_it_is(x: np.ndarray) -> np.ndarray:
    """Return a tensor."""
    return x


@dataclasses.dataclass(frozen=True)
class Part:
    """Where a parameter of ours is.

    Attributes:
      name: of the tensor, below the root of the model and, of a block's parameters, below its
        layer; "" for one that is zero in all models of the type.
      read: our value, from the tensor.
      shape: of the tensor, from our shape.
    """

    name: str = ""
    read: Callable[[np.ndarray], np.ndarray] = as_it_is
    shape: Callable[[Shape], Shape] = lambda shape: shape


Parts = dict[str, Part]
ZERO = Part()


def turned(name: str) -> Part:
    """A matrix (inputs, outputs) that is stored as (outputs, inputs)."""
    return Part(name, lambda x: x.T, lambda shape: shape[::-1])


def third(which: int, name: str) -> Part:
    """Queries, keys or values of a tensor that has them side by side, (inputs, 3 outputs)."""
    return Part(
        name,
        lambda x: np.split(x, 3, axis=-1)[which],
        lambda shape: (*shape[:-1], 3 * shape[-1]),
    )


def third_of_heads(which: int, name: str, heads: int) -> Part:
    """Queries, keys or values of a tensor (heads, 3, C, inputs), head by head."""

    def read(x: np.ndarray) -> np.ndarray:
        own = x.reshape(heads, 3, -1, *x.shape[1:])[:, which]
        return own.reshape(-1, *x.shape[1:]).T

    return Part(name, read, lambda shape: (3 * shape[-1], *shape[:-1]))


def from_row(first: int, name: str) -> Part:
    """A table without its first rows."""
    return Part(name, lambda x: x[first:], lambda shape: (shape[0] + first, *shape[1:]))


def linear(ours: str, theirs: str, bias: bool | None) -> Parts:
    """A linear layer: its matrix, and a bias that is there, is zero, or (None) is not ours."""
    out = {f"{ours}.kernel": turned(f"{theirs}.weight")}
    if bias is not None:
        out[f"{ours}.bias"] = Part(f"{theirs}.bias") if bias else ZERO
    return out


def norm(ours: str, theirs: str, shifted: bool = False) -> Parts:
    """A norm: its gain, and its shift where it has one."""
    out = {f"{ours}.gain": Part(f"{theirs}.weight")}
    return out | ({f"{ours}.bias": Part(f"{theirs}.bias")} if shifted else {})


@dataclasses.dataclass(frozen=True)
class ModelType:
    """One row.

    Attributes:
      fields: of our configuration, and "vocabulary" and "window".
      blocks, ends: where the parameters are, of settings and fields.
      layer: what names of a block's tensors begin with; {} is its number from 0.
      root: what may be missing at the front of all names.
      tied: what tie_word_embeddings is where the settings do not say it.
      head: names that the output layer may have.
      ignored: tensors that hold nothing that is learned.
    """

    fields: Callable[[Settings], Fields]
    blocks: Callable[[Settings, Fields], Parts]
    ends: Callable[[Settings, Fields], Parts]
    layer: str = "model.layers.{}."
    root: str = "model."
    tied: bool = False
    head: tuple[str, ...] = ("lm_head.weight",)
    embedding: str = "model.embed_tokens.weight"
    ignored: str = r"rotary_emb\.inv_freq$"

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor is a buffer, which the settings say as well."""
        return re.search(self.ignored, name) is not None


# --- settings -------------------------------------------------------------------------------------

GELU = {
    "gelu": "gelu_exact", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu",
    "gelu_python": "gelu_exact", "quick_gelu": "gelu_quick", "relu": "relu",
}  # fmt: skip
GATED = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu_exact", "gelu_new": "geglu",
    "gelu_pytorch_tanh": "geglu",
}  # fmt: skip
LINEAR_ROPE = "rotary positions scaled by {} are not what our decoder computes"


def _sizes(s: Settings, depth: str, width: str, heads: str, window: str) -> Fields:
    return {
        "depth": s.whole(depth, most=10_000), "width": s.whole(width, most=2**16),
        "heads": s.whole(heads, most=2**16), "vocabulary": s.whole("vocab_size"),
        "window": s.whole(window),
    }  # fmt: skip


_PLAIN = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")


def _rope(s: Settings, name: str = "") -> Settings:
    """Return the settings of rotary positions, refusing those that scale them."""
    own = s.part("rope_parameters" if "rope_parameters" in s else "rope_scaling")
    own = own.part(name) if name else own
    for key in ("rope_type", "type"):
        if own.values.get(key) not in (None, "default"):
            kind = own.values[key]
            own.wrong(key, f"must be default; {LINEAR_ROPE.format(kind)}")
    return own


def _base(s: Settings, own: Settings, *others: str, default: float = 10000.0) -> float:
    for where, name in ((own, "rope_theta"), *((s, each) for each in ("rope_theta", *others))):
        if name in where:
            return where.number(name, above=1)
    return default


def _rotary(s: Settings, **more: Any) -> Fields:
    """Return the fields that all decoders with rotary positions and gated MLPs share."""
    fields = _sizes(s, *_PLAIN)
    heads = fields["heads"]
    kv_heads = s.whole("num_key_value_heads", heads, most=2**16)
    own = fields["width"] // heads
    head = s.whole("head_dim", own, most=2**16)
    act = "hidden_activation" if "hidden_activation" in s else "hidden_act"
    return fields | {
        "kv_heads": 0 if kv_heads == heads else kv_heads,
        "head_features": 0 if head * heads == fields["width"] else head,
        "mlp": s.one_of(act, GATED, "silu"), "mlp_width": s.whole("intermediate_size", most=2**20),
        "norm_eps": s.number("rms_norm_eps", 1e-6), "norm": "rmsnorm",
        "rotary_base": _base(s, _rope(s)), "positions": "rotary",
        "bias": s.flag("attention_bias", False) or s.flag("mlp_bias", False),
    } | more  # fmt: skip


def _local(s: Settings, fields: Fields, usual: Callable[[int], bool]) -> Fields:
    """Return the fields of local attention: layer_types as they are listed, or as usual."""
    depth, window = fields["depth"], s.whole("sliding_window", 0, least=0)
    kinds = s.names("layer_types", depth, ("sliding_attention", "full_attention"))
    local = [
        (kinds[i] == "sliding_attention") if kinds else usual(i) for i in range(depth)
    ]  # fmt: skip
    blocks = tuple(i + 1 for i, own in enumerate(local) if own)
    return {"local_blocks": blocks, "local_window": window} if blocks and window else {}


def _cap(s: Settings, name: str) -> float:
    return s.number(name) if name in s else 0.0


# --- rows -----------------------------------------------------------------------------------------


def _split(branches: Mapping[str, Mapping[str, tuple[str, bool | None]]]) -> Parts:
    out: Parts = {}
    for branch, own in branches.items():
        for ours, (theirs, bias) in own.items():
            out |= linear(f"{branch}.branch.{ours}", theirs, bias)
    return out


def _llama_branches(s: Settings, c: Fields, qkv: bool | None = None) -> Parts:
    """Four matrices of attention, three of a gated MLP; ``qkv``: biases of these only."""
    has = c["bias"] or None
    attention = has and s.flag("attention_bias", False)
    mlp = has and s.flag("mlp_bias", False)
    names = {"query": "q", "key": "k", "value": "v", "output": "o"}
    own = {
        ours: (f"self_attn.{k}_proj", has and ((qkv and ours != "output") or attention))
        for ours, k in names.items()
    }
    return _split({
        "attention": own,
        "mlp": {ours: (f"mlp.{theirs}_proj", mlp) for ours, theirs in (
            ("gate", "gate"), ("in", "up"), ("out", "down"))},
    })  # fmt: skip


def _ends(root: str, embedding: str, final: str = "", shifted: bool = False, **more: Part) -> Any:
    """Return the ends: embedding, final norm, and the output layer where it is not tied."""

    def ends(s: Settings, c: Fields) -> Parts:
        out = {"embedding": Part(root + embedding), **more}
        if final:
            out |= norm("final_norm", root + final, shifted)
        if not c["tied"]:
            out |= linear("output", "lm_head", False if c["bias"] else None)
        return out

    return ends


_LLAMA_ENDS = _ends("model.", "embed_tokens.weight", "norm")
_PRE_NORMS = norm("attention.pre_norm", "input_layernorm") | norm(
    "mlp.pre_norm", "post_attention_layernorm"
)
_BRANCH_NORMS = norm("attention.branch_norm", "post_attention_layernorm") | norm(
    "mlp.branch_norm", "post_feedforward_layernorm"
)
_SANDWICH = _BRANCH_NORMS | norm("attention.pre_norm", "input_layernorm") | norm(
    "mlp.pre_norm", "pre_feedforward_layernorm"
)  # fmt: skip
_QK_NORMS = norm("attention.branch.query_norm", "self_attn.q_norm") | norm(
    "attention.branch.key_norm", "self_attn.k_norm"
)


def _llama(s: Settings) -> Fields:
    return _rotary(s, placement="pre")


def _mistral(s: Settings) -> Fields:
    fields = _llama(s)
    return fields | _local(s, fields, lambda i: True)


def _granite(s: Settings) -> Fields:
    write = s.number("residual_multiplier", 1.0)
    row: Any = "pre"
    if write != 1:
        row = dataclasses.replace(
            PLACEMENTS["pre"], title=f"pre-norm, branches times {write:g}", name="",
            attention=Sublayer(pre_norm=MODEL_NORM, write=write),
        )  # fmt: skip
    return _rotary(s, placement=row) | {
        "embedding_scale": s.number("embedding_multiplier", 1.0),
        "attention_scale": s.number("attention_multiplier", 1.0),
        "output_scale": 1 / s.number("logits_scaling", 1.0),
    }


def _olmo2(s: Settings) -> Fields:
    return _rotary(s, placement="branch_output", qk_norm=True, qk_norm_over="heads")


def _gemma(s: Settings) -> Fields:
    row = "rmsnorm_offset" if s.flag("gains_from_one", True) else "rmsnorm"
    fields = _rotary(s, placement="sandwich", norm=row)
    s.only("use_bidirectional_attention", False, why="our attention is causal")
    scale = s.number("query_pre_attn_scalar", 256.0) ** -0.5
    return fields | {
        "mlp": s.one_of("hidden_activation", GATED, "gelu_pytorch_tanh"),
        "attention_scale": scale, "embedding_scale": fields["width"] ** 0.5,
        "attention_softcap": _cap(s, "attn_logit_softcapping"),
        "output_softcap": _cap(s, "final_logit_softcapping"),
    }  # fmt: skip


def _gemma2(s: Settings) -> Fields:
    fields = _gemma(s)
    return fields | _local(s, fields, lambda i: i % 2 == 0)


def _gemma3(s: Settings) -> Fields:
    fields = _gemma(s) | {"qk_norm": True}
    pattern = s.whole("sliding_window_pattern", 6)
    found = fields | _local(s, fields, lambda i: (i + 1) % pattern != 0)
    both = "full_attention" in s.part("rope_parameters")
    whole = _rope(s, "full_attention" if both else "")
    found["rotary_base"] = _base(s, whole, default=1e6)
    if both:
        local = _rope(s, "sliding_attention").number("rope_theta", 10000.0, above=1)
    else:
        local = s.number("rope_local_base_freq", 10000.0, above=1)
    return found | ({"local_rotary_base": local} if "local_blocks" in found else {})


def _qwen2(s: Settings) -> Fields:
    fields = _rotary(s, placement="pre", bias=True)
    if not s.flag("use_sliding_window", False):
        return fields
    first = s.whole("max_window_layers", 28, least=0)
    return fields | _local(s, fields, lambda i: i >= first)


def _qwen3(s: Settings) -> Fields:
    fields = _rotary(s, placement="pre", qk_norm=True)
    if not s.flag("use_sliding_window", False):
        return fields
    first = s.whole("max_window_layers", 28, least=0)
    return fields | _local(s, fields, lambda i: i >= first)


def _gpt_neox(s: Settings) -> Fields:
    own = _rope(s)
    parallel = s.flag("use_parallel_residual", True)
    share = own if "partial_rotary_factor" in own else s
    name = "partial_rotary_factor" if share is own else "rotary_pct"
    return _sizes(s, *_PLAIN) | {
        "placement": "parallel" if parallel else "pre", "norm": "layernorm", "bias": True,
        "norm_eps": s.number("layer_norm_eps", 1e-5), "positions": "rotary",
        "mlp": s.one_of("hidden_act", GELU, "gelu"),
        "mlp_width": s.whole("intermediate_size", most=2**20),
        "rotary_base": _base(s, own, "rotary_emb_base"), "rotary_share": share.number(name, 0.25),
    }  # fmt: skip


def _gpt_neox_blocks(s: Settings, c: Fields) -> Parts:
    out: Parts = {}
    for i, ours in enumerate(("query", "key", "value")):
        for kind, theirs in (("kernel", "weight"), ("bias", "bias")):
            if theirs == "bias" and not s.flag("attention_bias", True):
                out[f"attention.branch.{ours}.{kind}"] = ZERO
                continue
            out[f"attention.branch.{ours}.{kind}"] = third_of_heads(
                i, f"attention.query_key_value.{theirs}", c["heads"]
            )
    out |= norm("attention.pre_norm", "input_layernorm", True)
    out |= norm("mlp.pre_norm", "post_attention_layernorm", True)
    return out | _split({
        "attention": {"output": ("attention.dense", s.flag("attention_bias", True))},
        "mlp": {"in": ("mlp.dense_h_to_4h", True), "out": ("mlp.dense_4h_to_h", True)},
    })  # fmt: skip


def _gpt(s: Settings) -> Fields:
    """Return the fields that GPT and GPT-2 share."""
    fields = _sizes(s, "n_layer", "n_embd", "n_head", "n_positions")
    inner = s.whole("n_inner", 4 * fields["width"], most=2**20)
    return fields | {
        "norm": "layernorm", "norm_eps": s.number("layer_norm_epsilon", 1e-5), "bias": True,
        "positions": "learned", "mlp_width": inner,
    }  # fmt: skip


def _openai_gpt(s: Settings) -> Fields:
    act = {"gelu": "gelu", "gelu_new": "gelu", "relu": "relu"}  # its gelu is the one with tanh
    return _gpt(s) | {"placement": "post", "mlp": s.one_of("afn", act, "gelu")}


def _gpt2(s: Settings) -> Fields:
    s.only("scale_attn_by_inverse_layer_idx", False, why="our logits have one scale in all blocks")
    s.only("add_cross_attention", False, why="our decoder reads one text")
    scaled = s.flag("scale_attn_weights", True)
    return _gpt(s) | {
        "placement": "pre", "mlp": s.one_of("activation_function", GELU, "gelu_new"),
        "attention_scale": 0.0 if scaled else 1.0,
    }  # fmt: skip


def _gpt_blocks(norms: Mapping[str, str]) -> Callable[[Settings, Fields], Parts]:
    def blocks(s: Settings, c: Fields) -> Parts:
        out: Parts = {}
        for i, ours in enumerate(("query", "key", "value")):
            for kind, theirs in (("kernel", "weight"), ("bias", "bias")):
                out[f"attention.branch.{ours}.{kind}"] = third(i, f"attn.c_attn.{theirs}")
        for ours, theirs in (
            ("attention.branch.output", "attn.c_proj"), ("mlp.branch.in", "mlp.c_fc"),
            ("mlp.branch.out", "mlp.c_proj"),
        ):  # fmt: skip
            out[f"{ours}.kernel"] = Part(f"{theirs}.weight")
            out[f"{ours}.bias"] = Part(f"{theirs}.bias")
        for ours, theirs in norms.items():
            out |= norm(ours, theirs, True)
        return out

    return blocks


def _opt(s: Settings) -> Fields:
    fields = _sizes(s, *_PLAIN)
    s.only("word_embed_proj_dim", fields["width"], why="our embedding is as wide as the stream")
    before = s.flag("do_layer_norm_before", True)
    has_gain = s.flag("layer_norm_elementwise_affine", True)
    final = before and not s.flag("_remove_final_layer_norm", False)
    return fields | {
        "placement": "pre" if before else "post", "positions": "learned",
        "norm": "layernorm" if has_gain else "layernorm_plain", "norm_eps": 1e-5,
        "bias": s.flag("enable_bias", True), "final_norm": "on" if final else "off",
        "mlp": s.one_of("activation_function", GELU, "relu"),
        "mlp_width": s.whole("ffn_dim", most=2**20),
    }  # fmt: skip


def _opt_blocks(s: Settings, c: Fields) -> Parts:
    has = c["bias"] or None
    out = _split({
        "attention": {
            ours: (f"self_attn.{theirs}_proj", has) for ours, theirs in (
                ("query", "q"), ("key", "k"), ("value", "v"), ("output", "out"))
        },
        "mlp": {"in": ("fc1", has), "out": ("fc2", has)},
    })  # fmt: skip
    slot = f"{c['placement']}_norm"
    if c["norm"] == "layernorm":
        out |= norm(f"attention.{slot}", "self_attn_layer_norm", True)
        out |= norm(f"mlp.{slot}", "final_layer_norm", True)
    return out


def _opt_ends(s: Settings, c: Fields) -> Parts:
    root = "model.decoder."
    final = "final_layer_norm" if c["final_norm"] == "on" and c["norm"] == "layernorm" else ""
    table = from_row(2, f"{root}embed_positions.weight")  # two rows that no token reads
    return _ends(root, "embed_tokens.weight", final, True, positions=table)(s, c)


def _llama_like(
    fields: Callable[[Settings], Fields], norms: Parts = _PRE_NORMS, qkv: bool | None = None,
    tied: bool = False,
) -> ModelType:  # fmt: skip
    return ModelType(
        fields, lambda s, c: _llama_branches(s, c, qkv) | norms, _LLAMA_ENDS, tied=tied
    )


_GPT_BUFFERS = r"attn\.(masked_)?bias$"

MODEL_TYPES: dict[str, ModelType] = {
    "openai-gpt": ModelType(
        _openai_gpt, _gpt_blocks({"attention.post_norm": "ln_1", "mlp.post_norm": "ln_2"}),
        _ends("transformer.", "tokens_embed.weight",
              positions=Part("transformer.positions_embed.weight")),
        "transformer.h.{}.", "transformer.", True, embedding="transformer.tokens_embed.weight",
        ignored=_GPT_BUFFERS,
    ),
    "gpt2": ModelType(
        _gpt2, _gpt_blocks({"attention.pre_norm": "ln_1", "mlp.pre_norm": "ln_2"}),
        _ends("transformer.", "wte.weight", "ln_f", True, positions=Part("transformer.wpe.weight")),
        "transformer.h.{}.", "transformer.", True, embedding="transformer.wte.weight",
        ignored=_GPT_BUFFERS,
    ),
    "opt": ModelType(
        _opt, _opt_blocks, _opt_ends, "model.decoder.layers.{}.", "model.", True,
        embedding="model.decoder.embed_tokens.weight",
    ),
    "llama": _llama_like(_llama),
    "mistral": _llama_like(_mistral),
    "granite": _llama_like(_granite),
    "olmo2": _llama_like(_olmo2, _BRANCH_NORMS | _QK_NORMS),
    "gemma2": _llama_like(_gemma2, _SANDWICH, tied=True),
    "gemma3_text": _llama_like(_gemma3, _SANDWICH | _QK_NORMS, tied=True),
    "qwen2": _llama_like(_qwen2, qkv=True),
    "qwen3": _llama_like(_qwen3, _PRE_NORMS | _QK_NORMS),
    "gpt_neox": ModelType(
        _gpt_neox, _gpt_neox_blocks,
        _ends("gpt_neox.", "embed_in.weight", "final_layer_norm", True),
        "gpt_neox.layers.{}.", "gpt_neox.", head=("embed_out.weight", "lm_head.weight"),
        embedding="gpt_neox.embed_in.weight",
        ignored=r"attention\.(masked_)?bias$|rotary_emb\.inv_freq$",
    ),
}  # fmt: skip

_EXPERTS = "its MLPs are experts with a router, which we do not have"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "olmoe", "gpt_oss", "llama4_text",
         "beam", "muse_spark_text", "zaya", "hy_v4"), _EXPERTS,
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v4", "minicpm3", "glm5_next_text"),
        "its attention is latent (MLA), which we do not have",
    ),
    "minimax": "it has linear attention and experts, which we do not have",
    "qwen3_next": "it has linear attention, which we do not have",
    "mamba": "it has a state space in place of attention, which we do not have",
    "doge": "its attention has a mask that it computes from values, which we do not have",
    "dory": "it loops its layers and weighs each token's logit, which we do not do",
    "gemma3": "it reads pictures as well; pass its text part, of type gemma3_text",
    "gemma3n_text": "it has inputs of each layer, which we do not have",
    "smollm3": "some of its layers have no positions, which we do not have",
    "cohere": "its rotary pairs are neighbours and attention and MLP share a norm",
}  # fmt: skip
"""Model types that are known and not read, with the reason."""
