"""What a model of the transformers library did, replayed by the shipped decoder with our row.

:func:`watch` runs their model and records, by layer and branch, what the branch read and what it
returned, the stream before the first layer and after every layer, and what the output layer read.
:func:`replayed` then runs ``normjax.decoder.Decoder`` with the row in question and with their
scheme's parameters; the branches are Flax modules that hand back what theirs returned. All that
lies between branches is ours: embedding's spread, norms, factors, mixing, read-out, final norm.
With ``whole`` the branches are the decoder's own too, with their weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch

from normjax.decoder import BRANCHES, Decoder
from normjax.decoder_config import DecoderConfig
from tests.parity.tiny_models import DEPTH, HEADS, MODELS, WIDTH, part, precision


class Returned(nn.Module):
    """A branch whose one parameter is what it returns."""

    config: Any

    @nn.compact
    def __call__(self, x):
        return self.param("returned", nn.initializers.zeros, x.shape, self.config.param_dtype)


@dataclasses.dataclass
class Seen:
    """What passed in their model: L layers, B sequences, T positions, D features, n streams.

    read, returned: by branch, (L, B, T, D); start: what the first layer read; states: after each
    layer, (L, B, T, D) or (L, B, T, n, D); head: what the output layer read; logits.
    """

    read: dict[str, np.ndarray]
    returned: dict[str, np.ndarray]
    start: np.ndarray
    states: np.ndarray
    head: np.ndarray
    logits: np.ndarray


def watch(model_type: str, model: torch.nn.Module, given: torch.Tensor, wide: bool) -> Seen:
    """Run a model and return what passed."""
    tiny = MODELS[model_type]
    read: dict[str, list] = {"attention": [], "mlp": []}
    returned: dict[str, list] = {"attention": [], "mlp": []}
    starts, states, heads, handles = [], [], [], []

    def taken(to):
        def hook(module, args, kwargs):
            to.append(_numpy(args[0] if args else kwargs["hidden_states"]))

        return lambda module: handles.append(
            module.register_forward_pre_hook(hook, with_kwargs=True)
        )

    def given_back(to):
        hook = lambda module, args, out: to.append(_numpy(out))  # noqa: E731
        return lambda x: handles.append(x.register_forward_hook(hook))

    for index, layer in enumerate(part(model, tiny.layers)):
        for name, own in (("attention", tiny.attention), ("mlp", tiny.mlp)):
            taken(read[name])(part(layer, own))
            given_back(returned[name])(part(layer, own))
        if index == 0:
            taken(starts)(layer)
        given_back(states)(layer)
    if tiny.head:
        taken(heads)(part(model, tiny.head))
    with precision(wide):
        out = model(given)
    for handle in handles:
        handle.remove()
    if tiny.streams_first:
        starts, states = ([np.moveaxis(x, 0, -2) for x in each] for each in (starts, states))
    last = _numpy(out.logits if tiny.head else out.last_hidden_state)
    return Seen(
        {k: np.stack(v) for k, v in read.items()}, {k: np.stack(v) for k, v in returned.items()},
        starts[0], np.stack(states), heads[0] if tiny.head else last, last,
    )  # fmt: skip


def _numpy(x: Any) -> np.ndarray:
    x = x[0] if isinstance(x, tuple | list) else x
    return x.detach().clone().numpy()


def filled(shapes: Any, values: dict[str, Any], dtype: Any, at: str = "") -> Any:
    """Return a parameter tree of the shapes, from values by dotted name: all of them, no other."""
    if not isinstance(shapes, dict):
        value = np.asarray(values.pop(at), dtype)
        assert at.endswith(".returned") or value.shape == shapes.shape, (at, value.shape, shapes)
        return jnp.asarray(value)
    tree = {k: filled(v, values, dtype, f"{at}.{k}" if at else k) for k, v in shapes.items()}
    assert at or not values, f"of theirs, no place in ours: {sorted(values)}"
    return tree


def replayed(
    values: dict[str, Any], given: np.ndarray, vocabulary: int, wide: bool,
    returned: dict[str, np.ndarray] | None, **config: Any,
) -> tuple[np.ndarray, dict[str, Any]]:  # fmt: skip
    """Return our logits and taps.

    Args:
      values: parameters by dotted name; those of blocks stacked.
      given: tokens (B, T).
      returned: by branch (L, B, T, D), what the branches are to return; None: our own branches.
      config: of our decoder: the row, its norm and eps.
    """
    dtype = "float64" if wide else "float32"
    fields = {
        "depth": DEPTH, "width": WIDTH, "heads": HEADS, "dtype": dtype, "param_dtype": dtype,
        "tied": False, "scan_layers": True, "init": "gpt2",
    }  # fmt: skip
    lent = dict.fromkeys(BRANCHES, Returned) if returned is not None else {}
    values = dict(values)
    for name, out in (returned or {}).items():
        values[f"blocks.{name}.branch.returned"] = out
    with jax.enable_x64(wide), mock.patch.dict(BRANCHES, lent):
        model = Decoder(DecoderConfig(**(fields | config)), vocabulary, given.shape[1])
        params = filled(jax.eval_shape(model.init, jax.random.key(0)), values, dtype)
        logits, taps = jax.jit(model.tapped)(params, jnp.asarray(given))
        return np.asarray(logits), jax.tree.map(np.asarray, taps)


def largest(ours: Any, theirs: Any) -> float:
    """Return the largest difference, over their largest entry."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))
