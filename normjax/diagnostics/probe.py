"""The probe: one program that measures everything on one batch, beside the training program.

It takes the state before a step and the step's batch, and changes neither. It costs one gradient,
one second derivative along the step, and the reductions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.decoder import Decoder, Params, slot_norms
from normjax.diagnostics import measures, radial
from normjax.diagnostics.measures import rms, wide
from normjax.equation import FACTORS
from normjax.norms import Norm
from normjax.training import optimizer, train
from normjax.training.train import Hyper, State, TrainConfig

Values = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Probe:
    """Everything in :data:`normjax.diagnostics.definitions.DIAGNOSTICS`, of one run at one step.

    Attributes:
      model: the decoder that is trained.
      config: how.

    >>> from normjax.decoder import DecoderConfig
    >>> model = Decoder(DecoderConfig(depth=2, width=8, heads=2), vocabulary=5, window=4)
    >>> config = TrainConfig(batch_size=2)
    >>> hyper = Hyper(np.uint32(0), np.float32(1e-3), np.float32(0.1), np.float32(1.0))
    >>> state = train.init_state(model, config, hyper)
    >>> values = Probe(model, config)(state, hyper, np.zeros((2, 5), np.int32))
    >>> values["residual/rms_before"].shape, values["attention/entropy"].shape
    ((2, 2), (2, 2))
    """

    model: Decoder
    config: TrainConfig

    def __call__(
        self, state: State, hyper: Hyper, windows: np.ndarray, weights: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Return {name: array} on the host; arguments as for :meth:`measure`."""
        return jax.tree.map(np.asarray, self._program(state, hyper, windows, weights))

    @cached_property
    def _program(self) -> Callable[..., Values]:
        return jax.jit(self.measure)

    def measure(
        self, state: State, hyper: Hyper, windows: Array, weights: Any = None
    ) -> dict[str, Array]:
        """Return {name: array}; a function of arrays, to be compiled by the caller.

        Args:
          state: of one run, after s steps.
          hyper: of the run.
          windows: (B, T + 1), the batch of step s.
          weights: (T,) of the target positions in the loss, or None.
        """
        # Recomputing activations would hide them. Scanned blocks compile several times faster; how
        # the training program lays out its blocks is left alone.
        config = dataclasses.replace(self.model.config, remat=False, scan_layers=True)
        model = dataclasses.replace(self.model, config=config)
        tokens, targets = windows[:, :-1], windows[:, 1:]

        def loss(params: Params, shifts: Params) -> tuple[Array, Params]:
            logits, taps = model.tapped(params, tokens, shifts)
            return train.mean_loss(train.cross_entropy(logits, targets), weights), taps

        def plain(params: Params) -> Array:
            return train.mean_loss(train.token_losses(model, params, windows), weights)

        shifts = model.zero_shifts(state.params, tokens)
        (value, taps), (gradients, pulled) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
            state.params, shifts
        )
        plan = train.plan_step(self.config, state, hyper, gradients)
        step = jax.tree.map(lambda u: -plan.rate * u, plan.updates)
        out = {
            "loss/value": value,
            "loss/slope": _dot(gradients, step),
            "loss/curvature": _curvature(plain, state.params, step),
            "gradient/norm": plan.norm,
            "update/norm": jnp.multiply(*optimizer.global_norm(step)),
        }
        out |= _parameters(state.params, gradients, step)
        out |= _gains(config.norm_row, state.params)
        out["gradient/stream_rms_last"] = rms(pulled["last"]) * tokens.size
        if config.sublayers:
            out |= _stream(config.sublayers, taps["blocks"], pulled["blocks"], tokens.size)
            out |= _branches(config.heads, taps["blocks"])
        out |= _self_tests(model, state.params, taps, pulled)
        return out


def _dot(a: Params, b: Params) -> Array:
    products = jax.tree.map(lambda x, y: jnp.sum(wide(x) * wide(y)), a, b)
    return sum(jax.tree.leaves(products), start=jnp.zeros((), jnp.float32))


def _curvature(loss: Callable[[Params], Array], params: Params, step: Params) -> Array:
    """Return u^T H u, the second derivative of the loss along the step, exact.

    Twice forward: cheaper than a derivative of the gradient, without its memory. A difference
    2 (L(p + u) - L(p) - g . u) would cost less and lose most digits of float32, L being 1e3 to 1e5
    times larger.
    """
    u = jax.tree.map(lambda p, s: s.astype(p.dtype), params, step)
    slope = lambda p: jax.jvp(loss, (p,), (u,))[1]  # noqa: E731
    return jax.jvp(slope, (params,), (u,))[1]


# --- parameters -----------------------------------------------------------------------------------


def _leaves(tree: Params) -> dict[str, tuple[Array, tuple[int, ...]]]:
    """Return {dotted name: (leaf, its axes besides the layers')}."""
    out = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = [part.key for part in path]
        first = int(names[0] == "blocks")
        out[".".join(names[first:])] = leaf, tuple(range(first, leaf.ndim))
    return out


def _parameters(params: Params, gradients: Params, step: Params) -> Values:
    out, steps = {}, _leaves(step)
    sizes = {name: rms(leaf, axes) for name, (leaf, axes) in _leaves(params).items()}
    for name, (leaf, axes) in _leaves(gradients).items():
        out[f"gradient/parameter_rms[{name}]"] = rms(leaf, axes)
        out[f"update/parameter_ratio[{name}]"] = rms(steps[name][0], axes) / sizes[name]
    return out


def _gains(norm: Norm, params: Params) -> Values:
    """Gains of norms, and learned factors of the equation, which stand under their own name."""
    out = {}
    for name, (leaf, axes) in _leaves(params).items():
        holder, _, kind = name.rpartition(".")
        if kind not in ("gain", *FACTORS):
            continue
        gain = norm.seen(kind, wide(leaf)) if kind == "gain" else wide(leaf)
        part = holder if kind == "gain" else name
        out[f"gain/mean[{part}]"] = jnp.mean(gain, axes)
        out[f"gain/min[{part}]"] = jnp.min(gain, axes)
        out[f"gain/max[{part}]"] = jnp.max(gain, axes)
    return out


# --- the stream and the branches ------------------------------------------------------------------


def _stream(names: tuple[str, ...], taps: Params, pulled: Params, tokens: int) -> Values:
    def each(function: Callable[..., Array], *keys: str, of: Params = taps) -> Array:
        """Apply a function to named taps of every layer and sub-layer: (L, S)."""
        columns = [jax.vmap(function)(*(of[name][key] for key in keys)) for name in names]
        return jnp.stack(columns, axis=1)

    before, written = each(rms, "before"), each(rms, "written")
    return {
        "residual/rms_before": before,
        "residual/rms_after": each(rms, "after"),
        "read/rms": each(rms, "read"),
        "branch/rms": written,
        "branch/stream_ratio": written / before,
        "branch/stream_cosine": each(measures.cosine, "written", "before"),
        "residual/token_similarity": each(measures.token_similarity, "after"),
        "gradient/stream_rms": each(rms, "before", of=pulled) * tokens,
    }


def _branches(heads: int, taps: Params) -> Values:
    out: Values = {}
    if "attention" in taps:
        seen = taps["attention"]["branch"]
        length = seen["logits"].shape[-1]
        # (L, B, K, G T, S): the queries of a group are rows of one product.
        logits, p = (
            seen[key].reshape(*seen[key].shape[:2], heads, length, length)
            for key in ("logits", "probabilities")
        )
        out |= jax.vmap(measures.attention)(logits, p)
    if "mlp" in taps:
        out |= jax.vmap(measures.hidden)(taps["mlp"]["branch"]["hidden"])
    return out


# --- self-tests -----------------------------------------------------------------------------------


def _self_tests(model: Decoder, params: Params, taps: Params, pulled: Params) -> Values:
    """Return the radial defects of the norms that have an identity; see radial.py."""
    config, out = model.config, {}
    norm, eps = config.norm_row, config.norm_eps
    if config.has_final_norm and norm.has_identity:
        h, g = taps["last"], pulled["last"]
        bias = params.get("final_norm", {}).get("bias", 0.0)
        back = radial.returned(norm, eps, h, taps["final"], pulled["final"], bias)
        out["instrument/radial_defect_last"] = radial.relative(radial.along(norm, h, g) - back, g)
    names, columns = config.sublayers, []
    for i, name in enumerate(names):
        defect = _defect(config, name)
        if defect is None:
            continue
        seen, back, own = taps["blocks"][name], pulled["blocks"][name], params["blocks"][name]
        # What comes after a sub-layer is what the next one starts from.
        if i + 1 < len(names):
            after = pulled["blocks"][names[i + 1]]["before"]
        else:
            first = pulled["blocks"][names[0]]["before"]
            after = jnp.concatenate([first[1:], pulled["last"][None]])
        row = config.placement_row.of(name)
        found = [row.at(block, config.depth) for block in range(1, config.depth + 1)]
        a, c = (
            jnp.asarray([getattr(each, factor) for each in found], jnp.float32)
            for factor in ("keep", "scale")
        )
        biases = [
            own.get(slot, {}).get("bias", jnp.zeros((config.depth, 1), jnp.float32))
            for slot in ("pre_norm", "post_norm")
        ]
        columns.append(jax.vmap(defect)(seen, back, after, a, c, *biases))
    if columns:
        out["instrument/radial_defect"] = jnp.stack(columns, axis=1)
    return out


def _defect(config: Any, name: str) -> Callable[..., Array] | None:
    """Return the function that tests a sub-layer of one block; None where nothing is known."""
    eps, norms = config.norm_eps, [
        slot_norms(config, block, name) for block in range(1, config.depth + 1)
    ]  # fmt: skip
    row = config.placement_row.of(name).at(1, config.depth)
    constant = all(isinstance(each, int | float) for each in (row.keep, row.scale))
    if config.rows > 1 or not constant or any(each != norms[0] for each in norms):
        return None
    pre, post = (norms[0].get(slot, (None,))[0] for slot in ("pre_norm", "post_norm"))
    if pre is not None and ("skip_norm" in norms[0] or not pre.has_identity):
        pre = None
    if post is not None and not post.has_identity:
        post = None
    if pre is None and post is None:
        return None
    summed = "post_norm" in norms[0]

    def defect(seen, back, after, a, c, pre_bias, post_bias) -> Array:
        out = []
        if pre is not None:
            h, g, total = seen["before"], back["before"], back["sum"] if summed else after
            term = radial.returned(pre, eps, h, seen["read"], back["read"], c * wide(pre_bias))
            difference = radial.along(pre, h, g) - a * radial.along(pre, h, total) - term
            out.append(radial.relative(difference, g, a * wide(total)))
        if post is not None:
            x, g = seen["sum"], back["sum"]
            term = radial.returned(post, eps, x, seen["after"], after, wide(post_bias))
            out.append(radial.relative(radial.along(post, x, g) - term, g))
        return jnp.max(jnp.stack(out))

    return defect
