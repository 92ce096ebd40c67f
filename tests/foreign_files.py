"""Tiny checkpoints, written by hand from the parameters of a decoder of ours.

Names, layouts and the order of GGUF's rotary pairs are written out here a second time.
"""

import json

import gguf
import jax
import numpy as np
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import save_file

from normjax.decoder import Decoder, DecoderConfig

VOCABULARY, WINDOW = 64, 16
CONFIG = DecoderConfig(
    depth=2, width=64, heads=4, kv_heads=2, mlp="swiglu", mlp_width=96, norm_eps=1e-5,
    rotary_base=500.0, tied=False, init="fan_in",
)  # fmt: skip
SETTINGS = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
    "vocab_size": VOCABULARY, "max_position_embeddings": WINDOW, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12) * 7 % VOCABULARY


def decoder():
    """The decoder and its parameters, gains away from 1."""
    model = Decoder(CONFIG, VOCABULARY, WINDOW)
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
    rng = np.random.default_rng(0)
    move = lambda x: (x + 0.3 * rng.standard_normal(x.shape)).astype(np.float32)  # noqa: E731
    return model, jax.tree_util.tree_map_with_path(
        lambda path, x: move(x) if path[-1].key == "gain" else x, params
    )


def llama_tensors(params):
    """Those parameters under llama's names."""
    out = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["final_norm"]["gain"],
        "lm_head.weight": params["output"]["kernel"].T,
    }
    attention, mlp = params["blocks"]["attention"], params["blocks"]["mlp"]
    for i in range(CONFIG.depth):
        at = f"model.layers.{i}."
        out[at + "input_layernorm.weight"] = attention["pre_norm"]["gain"][i]
        out[at + "post_attention_layernorm.weight"] = mlp["pre_norm"]["gain"][i]
        for name, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
            out[f"{at}self_attn.{name}_proj.weight"] = attention["branch"][ours]["kernel"][i].T
        for name, ours in (("gate", "gate"), ("up", "in"), ("down", "out")):
            out[f"{at}mlp.{name}_proj.weight"] = mlp["branch"][ours]["kernel"][i].T
    return {k: np.ascontiguousarray(v) for k, v in out.items()}


def write_folder(folder, tensors, settings=SETTINGS, shards=1):
    """Write a folder as the transformers library does, in one file or in several."""
    (folder / "config.json").write_text(json.dumps(settings))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    places = {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        own = dict(list(tensors.items())[i::shards])
        save_file(own, folder / name)
        places |= dict.fromkeys(own, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_tensors(tensors):
    """Llama's tensors under GGUF's names, rows of queries and keys with the two of a pair beside
    each other: feature 2 i of a head is our i, feature 2 i + 1 our i + C/2."""
    out = {}
    for name, value in tensors.items():
        stem = name.removesuffix(".weight")
        layer = ""
        if stem.startswith("model.layers."):
            _, _, number, stem = stem.split(".", 3)
            layer = f"blk.{number}."
        if stem.endswith(("q_proj", "k_proj")):
            C = CONFIG.head_width
            pairs = [(h * C + i, h * C + i + C // 2)
                     for h in range(len(value) // C) for i in range(C // 2)]  # fmt: skip
            value = value[np.ravel(pairs)]
        out[f"{layer}{GGUF_NAMES[stem]}.weight"] = value
    return out


KEYS = {
    "block_count": 2, "context_length": WINDOW, "embedding_length": 64, "feed_forward_length": 96,
    "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": VOCABULARY,
    "rope.dimension_count": 16,
}  # fmt: skip
NUMBERS = {"rope.freq_base": 500.0, "attention.layer_norm_rms_epsilon": 1e-5}


def write_gguf(path, tensors, kind=Q.F32, architecture="llama", keys=KEYS, more=()):
    """Write a GGUF file; matrices are quantized, vectors are not. Returns what it then holds."""
    writer, held = gguf.GGUFWriter(path, architecture), {}
    for key, value in keys.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    for key, value in NUMBERS.items():
        writer.add_float32(f"{architecture}.{key}", value)
    for add, key, value in more:
        getattr(writer, add)(key, value)
    for name, value in tensors.items():
        own = kind if value.ndim > 1 else Q.F32
        data = gguf.quants.quantize(value, own)
        writer.add_tensor(name, data, raw_dtype=own)
        held[name] = gguf.quants.dequantize(data, own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
