"""GGUF files under the names of the transformers library: settings, tensors, rotary pairs.

What a GGUF file says of its model is turned into the values of a config.json and its tensors get
the names of the safetensors files, so that one table of model types reads both. Keys and names are
those of the gguf library (``gguf.constants``) and of llama.cpp's converters, which
- store the query and key rows of some types pair by pair, (C/2, 2) in place of our halves (2, C/2);
- store 1 + g where Gemma's norms learn g;
- store a matrix of GPT-2 as (outputs, inputs), where its safetensors have (inputs, outputs).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normjax.errors import UserError, suggest
from normjax.foreign.settings import Settings
from normjax.foreign.tensors import Floats, Gguf, Tensor

_LLAMA = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
_PRE = _LLAMA | {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
_BRANCH = _LLAMA | {
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"
}  # fmt: skip
_SANDWICH = _BRANCH | {"input_layernorm": "attn_norm", "pre_feedforward_layernorm": "ffn_norm"}
_GPT2 = {
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_GPT2_ENDS = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm", "lm_head": "output",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How a general.architecture is stored.

    Attributes:
      model_type: the row of our table.
      layer: names below a layer, theirs of the transformers library to those below blk.N.
      ends: the other names.
      prefix: of a layer's names there.
      pairs: whether the rows of queries and keys are stored pair by pair.
      turned: names below a layer whose matrices are stored the other way round.
      values: settings that the file does not say.
    """

    model_type: str
    layer: dict[str, str]
    ends: dict[str, str] = dataclasses.field(default_factory=lambda: _ENDS)
    prefix: str = "model.layers."
    pairs: bool = False
    turned: tuple[str, ...] = ()
    values: dict[str, Any] = dataclasses.field(default_factory=dict)


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "gains_from_one": False}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _PRE, pairs=True),
    "granite": Architecture("granite", _PRE, pairs=True),
    "qwen2": Architecture("qwen2", _PRE),
    "qwen3": Architecture("qwen3", _PRE),
    "olmo2": Architecture("olmo2", _BRANCH),
    "gemma2": Architecture("gemma2", _SANDWICH, values=_GEMMA),
    "gemma3": Architecture("gemma3_text", _SANDWICH, values=_GEMMA),
    "gpt2": Architecture(
        "gpt2", _GPT2, _GPT2_ENDS, "transformer.h.",
        turned=("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"),
    ),
}  # fmt: skip
_KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.key_length": "head_dim",
    "attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "vocab_size": "vocab_size",
    "attention.sliding_window": "sliding_window", "embedding_scale": "embedding_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping", "logit_scale": "logits_scaling",
    "final_logit_softcapping": "final_logit_softcapping", "residual_scale": "residual_multiplier",
    "rope.freq_base_swa": "rope_local_base_freq", "attention.scale": "attention_multiplier",
}  # fmt: skip
_GPT2_KEYS = {
    "block_count": "n_layer", "context_length": "n_positions", "embedding_length": "n_embd",
    "feed_forward_length": "n_inner", "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon", "vocab_size": "vocab_size",
}  # fmt: skip
_SAID_ELSEWHERE = ("rope.dimension_count", "attention.value_length", "rope.scaling.type")
"""Keys that are held against others below, and say nothing more."""
_SCALED = (
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.finetuned", "rope.scale_linear",
)  # fmt: skip


def translated(tensors: Gguf, argument: str) -> tuple[Settings, Renamed]:
    """Return settings and tensors of a GGUF file under the names of the transformers library.

    Raises:
      UserError: an architecture that is not read; a key that would change what is computed.
    """
    name = tensors.values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UserError(
            f"{argument}: general.architecture={name}: must be one of {', '.join(ARCHITECTURES)}"
            f"{suggest(str(name), ARCHITECTURES)}"
        )
    row = ARCHITECTURES[name]
    own = {
        key.removeprefix(f"{name}."): value
        for key, value in tensors.values.items() if key.startswith(f"{name}.")
    }  # fmt: skip
    keys = _GPT2_KEYS if row.model_type == "gpt2" else _KEYS
    values = {keys[key]: value for key, value in own.items() if key in keys}
    vocabulary = tensors.values.get("tokenizer.ggml.tokens")
    if isinstance(vocabulary, list):
        values.setdefault("vocab_size", len(vocabulary))
    there = set(tensors.names())
    values |= {
        "model_type": row.model_type, "tie_word_embeddings": "output.weight" not in there,
        "attention_bias": "blk.0.attn_output.bias" in there, **row.values,
    }  # fmt: skip
    settings = Settings(values, "header")
    settings.problems += _unread(name, own, keys, values)
    if row.model_type.startswith("gemma"):
        values["query_pre_attn_scalar"] = _gemma_scale(name, values)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    counts = {k: values.get(v, values.get("num_attention_heads")) for k, v in heads.items()}
    return settings, Renamed(tensors, row, counts if row.pairs else {})


def _unread(name: str, own: dict[str, Any], keys: Any, values: dict[str, Any]) -> list[str]:
    """Return what the header says that would be left out."""
    out = []
    head = values.get("head_dim")
    width, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if head is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        head = width // heads
    for key, value in own.items():
        at = f"header: {name}.{key}={str(value)[:40]}"
        if key == "rope.scaling.type" and value != "none":
            out.append(f"{at}: must be none: scaled rotary positions are not what we compute")
        elif key in ("rope.dimension_count", "attention.value_length") and value != head:
            out.append(f"{at}: must be the {head} features of a head")
        elif key in ("expert_count", "expert_used_count") and value:
            out.append(f"{at}: experts with a router are a branch that we do not have")
        elif key not in (*keys, *_SAID_ELSEWHERE, "expert_count", "expert_used_count"):
            if key in _SCALED and own.get("rope.scaling.type", "none") == "none":
                continue
            if key not in _SCALED:
                out.append(f"{at}: a key that we do not know, and so may not pass over")
    return out


def _gemma_scale(name: str, values: dict[str, Any]) -> float:
    """Return query_pre_attn_scalar: not stored; the features of a head but for the 27B models."""
    sizes = [values.get(k) for k in ("hidden_size", "num_attention_heads", "head_dim")]
    width, heads, head = (each if isinstance(each, int) and each > 0 else 0 for each in sizes)
    of_heads, largest = width // max(heads, 1), {"gemma2": 46, "gemma3": 62}[name]
    is_largest = values.get("num_hidden_layers") == largest
    return float(of_heads if is_largest else head or of_heads)


class Renamed:
    """The tensors of a GGUF file under the names, and in the order of rows, of safetensors."""

    form = "gguf"

    def __init__(self, inner: Gguf, row: Architecture, heads: dict[str, Any]) -> None:
        self.inner, self._row, self._heads = inner, row, heads
        self.files: Sequence[Path] = inner.files
        self.dtypes: Sequence[str] = inner.dtypes
        layer = {theirs: ours for ours, theirs in row.layer.items()}
        ends = {theirs: ours for ours, theirs in row.ends.items()}
        self._stored: dict[str, str] = {}
        for name in inner.names():
            found = re.fullmatch(r"blk\.(\d+)\.(.+)\.(weight|bias)", name)
            stem, _, kind = name.rpartition(".")
            if found and found[2] in layer:
                new = f"{row.prefix}{found[1]}.{layer[found[2]]}.{found[3]}"
            else:
                new = f"{ends[stem]}.{kind}" if stem in ends else name
            if new in self._stored:
                raise UserError(
                    f"{inner.argument}: {name} and {self._stored[new]} are the same tensor; convert"
                    " it again"
                )
            self._stored[new] = name

    def names(self) -> list[str]:
        return list(self._stored)

    def called(self, name: str) -> str:
        if name in self._stored:
            return self._stored[name]
        stem, _, kind = name.rpartition(".")
        if stem in self._row.ends:
            return f"{self._row.ends[stem]}.{kind}"
        number, _, below = stem.removeprefix(self._row.prefix).partition(".")
        return f"blk.{number}.{self._row.layer[below]}.{kind}" if below in self._row.layer else name

    def tensor(self, name: str) -> Tensor:
        found = self.inner.tensor(self._stored[name])
        return dataclasses.replace(found, shape=found.shape[::-1]) if self._turns(name) else found

    def read(self, name: str) -> Floats:
        found = self.inner.read(self._stored[name])
        if self._turns(name):
            return found.T
        for end, heads in self._heads.items():
            if re.search(rf"self_attn\.{end}\.(weight|bias)$", name):
                return halves_of_pairs(found, heads)
        return found

    def _turns(self, name: str) -> bool:
        return self._stored[name].endswith(self._row.turned or ("\0",))


def halves_of_pairs(x: Floats, heads: int) -> Floats:
    """Return rows (H C, ...) of queries or keys with the two of each pair C/2 apart, not beside.

    >>> halves_of_pairs(np.arange(4.0), 1)
    array([0., 2., 1., 3.])
    """
    pairs = x.reshape(heads, -1, 2, *x.shape[1:])
    return np.swapaxes(pairs, 1, 2).reshape(x.shape)
