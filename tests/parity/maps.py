"""Where a parameter of our decoder is found in a model of the transformers library.

A map is ``{ours: theirs}`` by dotted names: ours below a block, theirs below a layer; a value may
be ``(function, name, ...)`` of several of theirs, as NumPy arrays. :func:`values` reads a map off a
model, blocks stacked, under the names of our parameter tree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from normjax.foreign.mappings import MODEL_TYPES, as_it_is
from normjax.foreign.settings import Settings
from tests.parity.tiny_models import HEADS, MODELS, part

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


def of_table(model_type: str, branches: bool | None) -> Map:
    """Return where the table of foreign model types has parameters of a block: of its branches, of
    its norms, or (None) those at the ends."""
    row, settings, fields = MODEL_TYPES[model_type], Settings({}), {"bias": False, "tied": False}
    if model_type in ("openai-gpt", "gpt_neox"):
        fields |= {"bias": True, "heads": HEADS}
    parts = (row.ends if branches is None else row.blocks)(settings, fields)
    return {
        ours: part.name if part.read is as_it_is else (part.read, part.name)
        for ours, part in parts.items() if branches in (None, ".branch." in ours)
    }  # fmt: skip


PRE, BRANCH, SANDWICH = (of_table(name, False) for name in ("llama", "olmo2", "gemma2"))
LLAMA, GPT_NEOX, OPENAI = (of_table(name, True) for name in ("llama", "gpt_neox", "openai-gpt"))
"""Branches; Llama's are four matrices of attention and a gated MLP of three."""
QUERY_KEY = {k: v for k, v in of_table("olmo2", True).items() if k not in LLAMA}
_ENDS = of_table("llama", None)
FINAL: Map = {k: v for k, v in _ENDS.items() if k == "final_norm.gain"}
HEAD: Map = {k: v for k, v in _ENDS.items() if k not in FINAL}


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
