"""Where a parameter of our decoder is found in a model of the transformers library.

A map is ``{ours: theirs}`` by dotted names: ours below a block, theirs below a layer; a value may
be ``(function, name, ...)`` of several of theirs, as NumPy arrays. :func:`values` reads a map off a
model, blocks stacked, under the names of our parameter tree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.parity.tiny_models import HEADS, MODELS, WIDTH, part

Map = dict[str, str | tuple[Any, ...]]


def values(model_type: str, model: torch.nn.Module, blocks: Map, others: Map) -> dict[str, Any]:
    """Return our parameters by dotted name: of the blocks (L, ...), and the others."""
    layers = list(part(model, MODELS[model_type].layers))
    found = {k: np.stack([_read(layer, v) for layer in layers]) for k, v in blocks.items()}
    return {f"blocks.{k}": v for k, v in found.items()} | {
        k: _read(model, v) for k, v in others.items()
    }


def _read(module: torch.nn.Module, held: Any) -> np.ndarray:
    function, *names = (held,) if callable(held) else held if isinstance(held, tuple) else (_, held)
    found = [part(module, name) for name in names]
    return function(*(x.detach().numpy() if isinstance(x, torch.Tensor) else x for x in found))


def _(x: np.ndarray) -> np.ndarray:
    return x


def turned(x: np.ndarray) -> np.ndarray:
    """Return a matrix (inputs, outputs) from theirs (outputs, inputs)."""
    return x.T


def norms(**slots: str) -> Map:
    """Return a map of gains; ``attention_pre="input_layernorm"`` is attention.pre_norm.gain."""
    out: Map = {}
    for slot, name in slots.items():
        branch, _, kind = slot.partition("_")
        out[f"{branch}.{kind}_norm.gain"] = f"{name}.weight"
    return out


def with_shifts(gains: Map) -> Map:
    """Return a map of gains together with that of their norms' biases."""
    return gains | {
        k.replace(".gain", ".bias"): str(v).replace(".weight", ".bias") for k, v in gains.items()
    }


PRE = norms(attention_pre="input_layernorm", mlp_pre="post_attention_layernorm")
BRANCH = norms(attention_branch="post_attention_layernorm", mlp_branch="post_feedforward_layernorm")
SANDWICH = BRANCH | norms(attention_pre="input_layernorm", mlp_pre="pre_feedforward_layernorm")
FINAL: Map = {"final_norm.gain": "model.norm.weight"}

LLAMA: Map = {
    f"attention.branch.{ours}.kernel": (turned, f"self_attn.{theirs}_proj.weight")
    for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
} | {
    f"mlp.branch.{ours}.kernel": (turned, f"mlp.{theirs}_proj.weight")
    for ours, theirs in (("gate", "gate"), ("in", "up"), ("out", "down"))
}
"""Branches as Llama's: four matrices of attention, a gated MLP of three."""
QUERY_KEY: Map = {
    f"attention.branch.{ours}_norm.gain": f"self_attn.{theirs}_norm.weight"
    for ours, theirs in (("query", "q"), ("key", "k"))
}
HEAD: Map = {
    "embedding": "model.embed_tokens.weight", "output.kernel": (turned, "lm_head.weight"),
}  # fmt: skip


def _third(which: int, axis: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return queries, keys or values of a matrix that has all three: by head, or in thirds."""

    def of_heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(HEADS, 3, WIDTH // HEADS, *x.shape[1:])[:, which].reshape(
            WIDTH, *x.shape[1:]
        ).T  # fmt: skip

    return of_heads if axis == 0 else lambda x: np.split(x, 3, -1)[which]


GPT_NEOX: Map = {
    f"attention.branch.{ours}.{kind}": (_third(i, 0), f"attention.query_key_value.{theirs}")
    for i, ours in enumerate(("query", "key", "value"))
    for kind, theirs in (("kernel", "weight"), ("bias", "bias"))
} | {
    f"{branch}.branch.{ours}.{kind}": (turned, f"{name}.{theirs}")
    for branch, ours, name in (
        ("attention", "output", "attention.dense"), ("mlp", "in", "mlp.dense_h_to_4h"),
        ("mlp", "out", "mlp.dense_4h_to_h"),
    ) for kind, theirs in (("kernel", "weight"), ("bias", "bias"))
}  # fmt: skip
OPENAI: Map = {
    f"attention.branch.{ours}.{kind}": (_third(i, -1), f"attn.c_attn.{theirs}")
    for i, ours in enumerate(("query", "key", "value"))
    for kind, theirs in (("kernel", "weight"), ("bias", "bias"))
} | {
    f"{branch}.branch.{ours}.{kind}": f"{name}.{theirs}"
    for branch, ours, name in (
        ("attention", "output", "attn.c_proj"), ("mlp", "in", "mlp.c_fc"),
        ("mlp", "out", "mlp.c_proj"),
    ) for kind, theirs in (("kernel", "weight"), ("bias", "bias"))
}  # fmt: skip


def gates(ours: str, theirs: str, place: int, rows: slice, shape: tuple[int, int]) -> Map:
    """Return the map of gates that theirs stacks in one matrix: some rows, one of its scales."""
    return {
        f"{ours}_projection": (lambda fn: fn[rows].T, f"{theirs}.fn"),
        f"{ours}_base": (lambda base: base[rows].reshape(shape), f"{theirs}.base"),
        f"{ours}_size": (lambda scale: scale[place], f"{theirs}.scale"),
    }


def hyper_connections(branch: str, theirs: str, mixes: bool, n: int = 4) -> Map:
    """Return the map of a sub-layer's gates on n streams; ``mixes``: with those that mix them."""
    out = gates(f"{branch}.read", theirs, 0, slice(n), (1, n))
    out |= gates(f"{branch}.write", theirs, 1, slice(n, 2 * n), (n, 1))
    return out | (gates(f"{branch}.keep", theirs, 2, slice(2 * n, None), (n, n)) if mixes else {})


def streams(mixes: bool) -> Map:
    """Return the map of the gates of both sub-layers."""
    return hyper_connections("attention", "attn_hc", mixes) | hyper_connections(
        "mlp", "ffn_hc", mixes
    )


GATED_HEAD: Map = {
    "readout_projection": (turned, "model.hc_head.hc_fn"),
    "readout_base": (lambda x: x[None], "model.hc_head.hc_base"),
    "readout_size": (lambda x: x[0], "model.hc_head.hc_scale"),
}


def _routed(gain: np.ndarray, router: np.ndarray) -> np.ndarray:
    return gain[:, None] * router.T


_ROUTER = (_routed, "altup.router_norm.weight", "altup.modality_router.weight")
GEMMA3N: Map = {
    "attention.read_predicts": _ROUTER,
    "attention.read_corrects": _ROUTER,
    "attention.read_predictions": (turned, "altup.prediction_coefs.weight"),
    "attention.read_corrections": (turned, "altup.correction_coefs.weight"),
    "attention.join_left": (turned, "laurel.linear_left.weight"),
    "attention.join_right": (turned, "laurel.linear_right.weight"),
    "attention.join_gain": "laurel.post_laurel_norm.weight",
}


def one_block_later(found: dict[str, Any]) -> dict[str, Any]:
    """Return parameters with the corrections of each block in the next one, or where streams are
    read out: there our row has them."""
    found = dict(found)
    for name in ("corrects", "corrections"):
        own = found[f"blocks.attention.read_{name}"]
        found[f"blocks.attention.read_{name}"] = np.roll(own, 1, axis=0)
        found[f"readout_{name}"] = own[-1]
    return found
