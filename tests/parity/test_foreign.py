"""Whole checkpoints that the transformers library saves, read by our table of model types.

Its float32 model against ours, by logits: the same weights through two programs.
"""

import pytest

pytest.importorskip("torch", reason="torch and transformers: `make test-parity` installs them")
pytest.importorskip("transformers", reason="transformers: `make test-parity` installs it")

import importlib

import numpy as np
import torch

from normjax.foreign.mappings import MODEL_TYPES
from normjax.foreign.opened import open_model
from tests.parity.tiny_models import COMMON, HEADS, VOCABULARY, WIDTH, disturb, precision

pytestmark = pytest.mark.slow

LENGTH = 12
_ROTARY = {"rope_type": "default", "rope_theta": 500.0}
_GROUPED = {"num_key_value_heads": 1}
_GPT = {
    "n_embd": WIDTH, "n_layer": 4, "n_head": HEADS, "n_positions": 32,
    "layer_norm_epsilon": 1e-3, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_GEMMA = _GROUPED | {"head_dim": 6, "query_pre_attn_scalar": 7, "sliding_window": 4}
_PERIOD = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_OPT = {"ffn_dim": 24, "word_embed_proj_dim": WIDTH, "dropout": 0.0, "activation_function": "gelu"}

# Type, module, config, model, keywords: what their defaults leave at 1, and more than one branch.
CASES = [
    ("openai-gpt", "openai", "OpenAIGPTConfig", "OpenAIGPTLMHeadModel", _GPT),
    ("gpt2", "gpt2", "GPT2Config", "GPT2LMHeadModel", _GPT | {"n_inner": 24}),
    ("gpt2", "gpt2", "GPT2Config", "GPT2LMHeadModel",
     _GPT | {"activation_function": "quick_gelu", "scale_attn_weights": False}),
    ("opt", "opt", "OPTConfig", "OPTForCausalLM", _OPT),
    ("opt", "opt", "OPTConfig", "OPTForCausalLM", _OPT | {"do_layer_norm_before": False}),
    ("opt", "opt", "OPTConfig", "OPTForCausalLM", _OPT | {"enable_bias": False}),
    ("llama", "llama", "LlamaConfig", "LlamaForCausalLM", _GROUPED | {"rope_parameters": _ROTARY}),
    ("llama", "llama", "LlamaConfig", "LlamaForCausalLM",
     {"attention_bias": True, "mlp_bias": True, "head_dim": 6, "tie_word_embeddings": True}),
    ("mistral", "mistral", "MistralConfig", "MistralForCausalLM",
     _GROUPED | {"sliding_window": 4, "rope_parameters": _ROTARY}),
    ("granite", "granite", "GraniteConfig", "GraniteForCausalLM",
     _GROUPED | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2,
                 "residual_multiplier": 0.4, "logits_scaling": 2.5}),
    ("olmo2", "olmo2", "Olmo2Config", "Olmo2ForCausalLM", _GROUPED),
    ("gemma2", "gemma2", "Gemma2Config", "Gemma2ForCausalLM",
     _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    ("gemma3_text", "gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM",
     _GEMMA | {"layer_types": _PERIOD, "rope_parameters": {
         "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
         "full_attention": {"rope_type": "default", "rope_theta": 9000.0}}}),
    ("qwen2", "qwen2", "Qwen2Config", "Qwen2ForCausalLM",
     _GROUPED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    ("qwen3", "qwen3", "Qwen3Config", "Qwen3ForCausalLM", _GROUPED | {"head_dim": 6}),
    ("gpt_neox", "gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM",
     {"layer_norm_eps": 1e-3, "rope_parameters": _ROTARY | {"partial_rotary_factor": 0.5}}),
    ("gpt_neox", "gpt_neox", "GPTNeoXConfig", "GPTNeoXForCausalLM",
     {"use_parallel_residual": False, "hidden_act": "gelu_new"}),
]  # fmt: skip
_ABSENT = {
    "gpt": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
            "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"),
    "opt": ("intermediate_size", "rms_norm_eps"),
    "gpt_neox": ("rms_norm_eps",),
}  # fmt: skip


def built(model_type, module, config, model, keywords):
    """Return a tiny model of the library, every parameter of it away from its start."""
    kind = "gpt" if "gpt" in model_type and model_type != "gpt_neox" else model_type
    common = COMMON | {"num_hidden_layers": 4}
    common = {k: v for k, v in common.items() if k not in _ABSENT.get(kind, ())}
    made = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    code = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    with precision(False):
        torch.manual_seed(0)
        own = getattr(made, config)(**(common | keywords))
        net = getattr(code, model)._from_config(own, attn_implementation="eager").eval()
        disturb(net, 0)
        net.tie_weights()
    return net


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{'-'.join(c[4])[:40]}")
def test_a_saved_checkpoint_computes_what_the_library_does(case, tmp_path):
    net = built(*case)
    net.save_pretrained(tmp_path)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with precision(False):
        theirs = net(tokens).logits.numpy()
    model = open_model(tmp_path)
    assert model.model_type == case[0]
    ours = np.asarray(model.decoder().apply(model.params(), tokens.numpy()))
    # Four layers in float32 on either side: some tens of roundings of the largest entry.
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


def test_every_row_of_the_table_is_compared():
    assert {case[0] for case in CASES} == set(MODEL_TYPES)
