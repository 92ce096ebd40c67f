"""Tiny random models of the transformers library, built from its own configs and classes.

One table: a model's type, the class of its config and of the model, the config's keywords, and
where its parts are. Nothing is downloaded. Branches are whatever the model has (experts, latent or
compressed attention); the table only makes them small.

    model = build("llama", wide=True)     float64, :class:`Widened`
    model = build("llama", wide=False)    float32, as the library ships it
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.overrides import TorchFunctionMode

DEPTH, WIDTH, HEADS, VOCABULARY, LENGTH = 3, 16, 2, 53, 6
EPS = 1e-3
"""Of every norm whose eps the config sets: large, so that its place in the formula is seen."""

MIXING_EPS = 1e-6
"""Of models that mix streams: our weights have this one in their norm, so theirs has to be it."""


class Widened(TorchFunctionMode):
    """Answer every request for float32 with float64.

    Most of the library's norms, gates and softmaxes cast to float32 by themselves, also in a model
    of float64. Inside of this mode those casts are to float64, and nothing else is changed: the
    library's formulas, in its own code, to sixteen digits.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call the function, float64 in the place of float32 among its arguments."""
        func = torch.Tensor.double if func is torch.Tensor.float else func
        kwargs = {k: _wider(v) for k, v in (kwargs or {}).items()}
        return func(*map(_wider, args), **kwargs)


def _wider(x: Any) -> Any:
    return torch.float64 if x is torch.float32 else x


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model of a type.

    Attributes:
      module: of its code, under ``transformers.models``: folder and the end of the file's name.
      config: class of the config.
      model: class of the model.
      keywords: of the config, beside :data:`COMMON`.
      without: keys of :data:`COMMON` that the config has under another name.
      layers, head, embedding: where the layers, the output layer and the token embedding are.
      attention, mlp: names of the branches in a layer.
      streams_first: whether a state of several streams is (n, B, T, D); else (B, T, n, D).
    """

    module: str
    config: str
    model: str
    keywords: dict[str, Any] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()
    layers: str = "model.layers"
    head: str = "lm_head"
    embedding: str = "model.embed_tokens"
    attention: str = "self_attn"
    mlp: str = "mlp"
    streams_first: bool = False


COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS, "intermediate_size": 24, "rms_norm_eps": EPS,
    "max_position_embeddings": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 1}
_EIGHT = {"head_dim": WIDTH // HEADS}
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_SLIDING = ["sliding_attention", "full_attention", "full_attention"]


def _gemma(name: str, prefix: str, **keywords: Any) -> Tiny:
    own = {"hidden_activation": "silu", "query_pre_attn_scalar": WIDTH // HEADS}
    return Tiny(name, f"{prefix}Config", f"{name.capitalize()}ForCausalLM",
                _GROUPED | _EIGHT | own | keywords)  # fmt: skip


MODELS: dict[str, Tiny] = {
    "llama": Tiny("llama", "LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "olmo2": Tiny("olmo2", "Olmo2Config", "Olmo2ForCausalLM", _GROUPED),
    "gemma2": _gemma("gemma2", "Gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_text": _gemma(
        "gemma3", "Gemma3Text",
        rope_parameters={"sliding_attention": _ROTARY, "full_attention": _ROTARY},
    ),
    "gpt_neox": Tiny(
        "gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM",
        {
            "hidden_act": "gelu_new", "layer_norm_eps": EPS,
            "rope_parameters": _ROTARY | {"partial_rotary_factor": 1.0},
        },
        ("rms_norm_eps",), "gpt_neox.layers", "lm_head", "gpt_neox.embed_in", "attention",
    ),
    "openai-gpt": Tiny(
        "openai", "OpenAIGPTConfig", "OpenAIGPTLMHeadModel",
        {
            "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS, "n_positions": LENGTH,
            "layer_norm_epsilon": EPS, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
         "rms_norm_eps", "max_position_embeddings"),
        "transformer.h", "lm_head", "transformer.tokens_embed", "attn",
    ),
    "bitnet": Tiny(
        "bitnet", "BitNetConfig", "BitNetForCausalLM",
        _GROUPED | {"hidden_act": "silu", "rope_parameters": _ROTARY},
    ),
    "granite": Tiny("granite", "GraniteConfig", "GraniteForCausalLM", _GROUPED),
    "minicpm3": Tiny(
        "minicpm3", "MiniCPM3Config", "MiniCPM3ForCausalLM",
        {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
         "v_head_dim": 8, "num_key_value_heads": HEADS, "dim_model_base": WIDTH},
    ),
    "hyperclovax": Tiny("hyperclovax", "HyperCLOVAXConfig", "HyperCLOVAXForCausalLM", _GROUPED),
    "beam": Tiny(
        "beam", "BeamConfig", "BeamForCausalLM",
        _GROUPED | _EIGHT | {
            "layer_types": _SLIDING, "mlp_layer_types": ["dense", "sparse", "sparse"],
            "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "sliding_window": 4,
        },
    ),
    "dory": Tiny(
        "dory", "DoryConfig", "DoryForCausalLM",
        _GROUPED | _EIGHT | {
            "layer_types": _SLIDING, "n_input_layers": 0, "n_recurrent_layers": 0,
            "n_output_layers": DEPTH, "sliding_window": 4,
        },
        ("rms_norm_eps",),
    ),
    "minimax": Tiny(
        "minimax", "MiniMaxConfig", "MiniMaxForCausalLM",
        _GROUPED | _EIGHT | {"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4},
    ),
    "doge": Tiny("doge", "DogeConfig", "DogeForCausalLM", _GROUPED | {"keep_window_size": LENGTH}),
    "zaya": Tiny(
        "zaya", "ZayaConfig", "ZayaForCausalLM",
        _GROUPED | _EIGHT | {
            "moe_intermediate_size": 8, "num_experts": 4, "router_hidden_size": 8,
        },
        ("intermediate_size",),
    ),
    "muse_spark_text": Tiny(
        "muse_spark", "MuseSparkTextConfig", "MuseSparkTextModel",
        _GROUPED | _EIGHT | {
            "mlp_layer_types": ["dense", "sparse", "sparse"], "moe_intermediate_size": 8,
            "moe_hidden_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
            "post_norm_eps": EPS, "sliding_window": 4,
        },
        layers="layers", head="", embedding="embed_tokens",
    ),
    "deepseek_v4": Tiny(
        "deepseek_v4", "DeepseekV4Config", "DeepseekV4ForCausalLM",
        _EIGHT | {
            "num_key_value_heads": 1, "rms_norm_eps": MIXING_EPS, "q_lora_rank": 8,
            "layer_types": ["sliding_attention"] * DEPTH, "mlp_layer_types": ["moe"] * DEPTH,
            "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "o_groups": 2, "o_lora_rank": 4, "sliding_window": 4, "partial_rotary_factor": 0.5,
        },
        ("intermediate_size",),
    ),
    "hy_v4": Tiny(
        "hy_v4", "HYV4Config", "HYV4ForCausalLM",
        {
            "num_key_value_heads": HEADS, "rms_norm_eps": MIXING_EPS, "q_lora_rank": 8,
            "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8,
            "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "index_topk": 4, "index_head_dim": 8, "index_n_heads": 2,
        },
    ),
    "gemma3n_text": Tiny(
        "gemma3n", "Gemma3nTextConfig", "Gemma3nForCausalLM",
        _GROUPED | _EIGHT | {
            "rms_norm_eps": MIXING_EPS, "laurel_rank": 64, "hidden_size_per_layer_input": 4,
            "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": None, "layer_types": _SLIDING, "sliding_window": 4,
            "hidden_activation": "silu",
            "rope_parameters": {"sliding_attention": _ROTARY, "full_attention": _ROTARY},
        },
        streams_first=True,
    ),
    "glm5_next_text": Tiny(
        "glm5_next", "Glm5NextTextConfig", "Glm5NextTextModel",
        {
            "num_key_value_heads": HEADS, "rms_norm_eps": MIXING_EPS, "q_lora_rank": 8,
            "kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "linear_head_dim": 8,
            "linear_num_heads": HEADS, "layer_types": ["linear_attention"] * DEPTH,
            "moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"], "index_topk": 4, "index_kpool": 2,
            "index_head_dim": 8, "index_n_heads": 2,
        },
        layers="layers", head="", embedding="embed_tokens",
    ),
}  # fmt: skip


@contextlib.contextmanager
def precision(wide: bool):
    """Build and run in float64, casts included, or in float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if wide else torch.float32)
    try:
        with Widened() if wide else contextlib.nullcontext(), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def build(
    model_type: str, wide: bool, seed: int = 0, disturbed: bool = True, **keywords: Any
) -> torch.nn.Module:
    """Return a model of a type, every parameter of it away from where it starts (or there)."""
    tiny = MODELS[model_type]
    folder, _, name = tiny.module.partition("/")
    code = importlib.import_module(f"transformers.models.{folder}.modeling_{name or folder}")
    made = importlib.import_module(f"transformers.models.{folder}.configuration_{name or folder}")
    common = {k: v for k, v in COMMON.items() if k not in tiny.without}
    config = getattr(made, tiny.config)(**(common | tiny.keywords | keywords))
    with precision(wide):
        torch.manual_seed(seed)
        dtype = torch.float64 if wide else torch.float32
        # The plain code paths: no fused attention, no fused experts.
        model = getattr(code, tiny.model)._from_config(
            config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
        )
        model = model.to(dtype).eval()
        if disturbed:
            disturb(model, seed)
    return model


def disturb(model: torch.nn.Module, seed: int) -> None:
    """Move every parameter, so that no start value hides an error; the same in any dtype.

    Gains, shifts, gates and constants (up to one axis) by 0.3 N(0, 1); of matrices the entries are
    N(0, 1 / inputs), so that gates and logits that they lead to have a size of about 1.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if parameter.ndim > 1:
            parameter.data.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.data.copy_(parameter.data.double() + 0.3 * noise)


def tokens(seed: int = 0) -> torch.Tensor:
    """Return two sequences of tokens (2, T)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (2, LENGTH), generator=generator)


def part(model: torch.nn.Module, path: str) -> Any:
    """Return a module or a parameter of a model by its dotted name."""
    found: Any = model
    for name in path.split("."):
        found = found[int(name)] if name.isdigit() else getattr(found, name)
    return found
