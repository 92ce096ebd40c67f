"""The parts of a decoder as plain functions in float64, and their Jacobians in closed form.

    parts = Parts(model, params)
    f = parts.block(3)                  # or parts.sublayer(3, "mlp"), parts.stack(1, 4)
    f(h)                                # (T, d) -> (T, d), the decoder's own modules
    f.token_jacobians(h)                # (T, d, d): d h'_i / d h_i of every position at once
    f.sequence_jacobian(h)              # (T, d, T, d)

The functions run the decoder's own Flax modules with the parameters of that block; the Jacobians
are closed forms composed by the placement's equation. For what autodiff says of these and of any
other function see :mod:`normjax.jacobians.views`. Everything runs under a local 64-bit mode, on a
float64 copy of the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.decoder import Decoder, Layer, slot_norms
from normjax.equation import FACTORS, Learned, OnRows, fold
from normjax.errors import UserError, check_choice
from normjax.jacobians.branch_jacobians import (
    attention_jacobian,
    attention_token_jacobians,
    mlp_jacobian,
)
from normjax.jacobians.closed_forms import Mix, Tangents, norm_jacobian
from normjax.mixing import prefix
from normjax.norm_derivatives import Floats, NullDirections, spanned, unit
from normjax.norms import Norm
from normjax.traced import as_float64

MAX_DENSE = 4096
"""Largest n = T d of which a dense n x n Jacobian is made: 128 MiB of float64."""
MAX_TOKEN_BYTES = 2**32
"""Largest stack (T, d, d) of per-token Jacobians, in bytes."""


def to_float64(tree: Any) -> Any:
    """Return a tree with its floating arrays as float64 arrays of JAX."""
    with jax.enable_x64(True):
        return jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            tree,
        )


def check_finite(name: str, x: Any, source: str) -> None:
    """Raise :class:`UserError` for a concrete array that is not finite; tracers pass."""
    if not isinstance(x, jax.core.Tracer) and not np.all(np.isfinite(np.asarray(x))):
        raise UserError(
            f"{name}: {source} is not finite; look at the parameters and the scale of h"
        )


class Parts:
    """A decoder with its parameters, taken apart; blocks are counted from 1.

    Args:
      model: the decoder, of any dtype.
      params: its parameters, as ``model.init`` or a checkpoint gives them.
      surrogate: of a decoder whose norms stop gradients, whether the derivatives are those that
        training takes it to have; else they are its own, and autodiff of its parts gives the same.

    Raises:
      UserError: parameters that are not finite.

    >>> from normjax.decoder import DecoderConfig
    >>> model = Decoder(DecoderConfig(depth=2, width=8, heads=2), vocabulary=11, window=4)
    >>> parts = Parts(model, model.init(jax.random.key(0)))
    >>> h = parts.embed([1, 2, 3])
    >>> parts.stack(1, 2)(h).shape, parts.block(2).token_jacobians(h).shape
    ((3, 8), (3, 8, 8))
    """

    def __init__(self, model: Decoder, params: Any, surrogate: bool = False):
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
            check_finite(f"params{jax.tree_util.keystr(path)}", leaf, "a value")
        wide = {"dtype": "float64", "param_dtype": "float64", "remat": False}
        with jax.enable_x64(True):
            self.model = dataclasses.replace(
                model, config=dataclasses.replace(model.config, **wide)
            )
            self.model = self.model.with_norms(Norm.surrogate if surrogate else Norm.exact)
        self.params = to_float64(params)
        self.config = self.model.config
        self._sublayer, self._point = _programs(self.model)
        self._layers: dict[int, Layer] = {}

    def sublayer(self, block: int, name: str) -> Part:
        """Return one sub-layer, "attention" or "mlp", of a block, with its norms and residual."""
        check_choice("sublayer", name, self.config.sublayers)
        self.layer(block)
        return Part(self, ((block, name),))

    def block(self, block: int) -> Part:
        """Return one block: its sub-layers in order."""
        return self.stack(block, block)

    def stack(self, first: int, last: int) -> Part:
        """Return the blocks from ``first`` to ``last``, both included."""
        if first > last:
            raise UserError(f"first={first}: must be at most last={last}")
        blocks = range(first, last + 1)
        for block in (first, last):
            self.layer(block)
        return Part(self, tuple((block, name) for block in blocks for name in self.sublayer_names))

    @property
    def sublayer_names(self) -> tuple[str, ...]:
        """The sub-layers that every block has, in order."""
        return self.config.sublayers

    def layer(self, block: int) -> Layer:
        """Return the float64 parameters and factors (a, b, c) of a block."""
        if block not in self._layers:
            with jax.enable_x64(True):
                self._layers[block] = self.model.layer(self.params, block)
        return self._layers[block]

    @functools.cached_property
    def forgetting(self) -> tuple[Norm, ...]:
        """The norms of the blocks that forget something, each once."""
        found = (
            norm
            for block in range(1, self.config.depth + 1)
            for name in self.sublayer_names
            for norm, _ in slot_norms(self.config, block, name).values()
        )
        return tuple(dict.fromkeys(norm for norm in found if norm.forgets != "nothing"))

    def forgotten(self, h: Any) -> Floats:
        """Return what the norms of the blocks forget at h, and the direction of h itself.

        Args:
          h: (..., d) points of the stream.

        Returns:
          (..., d, m) orthonormal columns: for RMSNorm, and for a decoder without norms, the
          direction of h, m = 1; for LayerNorm that of h less its mean, and that of the mean, m = 2.
          With several streams those of the whole state, m = 1.

        Raises:
          UserError: h not finite, or zero at a token.
        """
        h = as_float64("h", h)
        zero = np.argwhere(~np.any(h != 0, axis=-1))
        if len(zero):
            raise UserError(f"h{zero[0].tolist()}: is zero and has no direction; take another h")
        rows = self.forgetting if self.config.rows == 1 else ()
        return spanned(*(row.forgotten(h) for row in rows), unit(h)[..., None])

    def embed(self, tokens: Any) -> Array:
        """Return the stream that block 1 reads: (T, d) for tokens (T,), (B, T, d) for (B, T)."""
        return self._of_tokens(self.model.embed, tokens)

    def hidden_states(self, tokens: Any) -> Array:
        """Return the stream before block 1 and after every block: (L + 1, [B,] T, d)."""
        tokens = self._tokens(tokens)
        h = self.embed(tokens)
        states = [h]
        for block in range(1, self.config.depth + 1):
            states.append(self.block(block)(states[-1]))
        with jax.enable_x64(True):
            return jnp.stack(states)

    def logits(self, h: Any) -> Array:
        """Return logits ([B,] T, V) of the stream after block L; the final norm is inside."""
        with jax.enable_x64(True):
            h = self._stream(h)
            y = self.model.readout(self.params, h.reshape(-1, *h.shape[-2:]))
            return y.reshape(*h.shape[:-1], y.shape[-1])

    def _of_tokens(self, function: Any, tokens: Any) -> Array:
        tokens = self._tokens(tokens)
        with jax.enable_x64(True):
            out = function(self.params, jnp.atleast_2d(tokens))
            return out[0] if tokens.ndim == 1 else out

    def _tokens(self, tokens: Any) -> np.ndarray:
        tokens = np.asarray(tokens)
        V, window = self.model.vocabulary, self.model.window
        if tokens.ndim not in (1, 2) or not np.issubdtype(tokens.dtype, np.integer):
            raise UserError(
                f"tokens of shape {tokens.shape}, {tokens.dtype}: must be integers (T,) or (B, T)"
            )
        if not 1 <= tokens.shape[-1] <= window:
            raise UserError(f"tokens of length {tokens.shape[-1]}: must be from 1 to {window}")
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < V):
            raise UserError(f"tokens from {tokens.min()} to {tokens.max()}: must be in 0..{V - 1}")
        return tokens

    def _stream(self, h: Any) -> Array:
        """Return h in float64; call under 64-bit mode."""
        h = jnp.asarray(h, jnp.float64)
        width = self.config.state_width
        if h.ndim not in (2, 3) or h.shape[-1] != width or 0 in h.shape:
            raise UserError(
                f"h of shape {h.shape}: must be (T, {width}) or (B, T, {width}), the width of the"
                " decoder's state"
            )
        check_finite("h", h, "an entry")
        return h


@functools.lru_cache(maxsize=16)
def _programs(model: Decoder) -> tuple[Any, Any]:
    """Return a sub-layer and the points of its equation, compiled.

    The parameters are arguments, so that all blocks, and all parameters of one decoder, share them.
    """
    compiled = [jax.jit(f, static_argnames="sublayer") for f in (model.block, model.points)]
    return compiled[0], compiled[1]


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of sub-layers as a function h -> h', with its Jacobians in closed form.

    Calling it inside a transformation of your own (jax.jacfwd, jax.linearize) needs
    ``with jax.enable_x64(True)`` around that; the views of :mod:`normjax.jacobians.views` do so.
    """

    parts: Parts
    steps: tuple[tuple[int, str], ...]

    def __call__(self, h: Any) -> Array:
        """Return h' for h (T, d) or (B, T, d), float64.

        Raises:
          UserError: h of another shape or not finite, or a result that is not finite.
        """
        with jax.enable_x64(True):
            h = self.parts._stream(h)
            out = h.reshape(-1, *h.shape[-2:])
            for block, name in self.steps:
                out = self.parts._sublayer(self.parts.layer(block), out, sublayer=name)
            check_finite("h", out, f"the output of {self}")
            return out.reshape(h.shape)

    def __str__(self) -> str:
        if not self.steps:
            return "a block without sub-layers"
        (first, _), (last, name) = self.steps[0], self.steps[-1]
        if len(self.steps) == 1:
            return f"{name} of block {first}"
        return f"block {first}" if first == last else f"blocks {first} to {last}"

    def token_jacobians(self, h: Any) -> Floats:
        """Return d h'_i / d h_i of every position, keys and values of the others held fixed.

        The decoder is causal: what h_i does to the others never comes back to position i, so that
        these are the diagonal blocks of the whole Jacobian, and those of a stack are the products
        of those of its sub-layers.

        Args:
          h: (T, d) or (B, T, d).

        Returns:
          (T, d, d) or (B, T, d, d) float64.

        Raises:
          UserError: as for a call; or more than 4 GiB of result.
        """
        h = self._checked(h)
        size = h.size * h.shape[-1] * 8
        if size > MAX_TOKEN_BYTES:
            raise UserError(
                f"h of shape {h.shape}: its Jacobians take {size / 2**30:.1f} GiB, at most"
                f" {MAX_TOKEN_BYTES >> 30} are made; use views.pair_jacobian for single positions"
            )
        if h.ndim == 3:
            return np.stack([self.token_jacobians(each) for each in h])
        total = None
        for step in self.steps:
            own, h = self._step_jacobian(step, h, whole=False)
            total = own if total is None else own @ total
        if total is None:
            total = np.broadcast_to(np.eye(h.shape[-1]), (*h.shape, h.shape[-1])).copy()
        return total

    def sequence_jacobian(self, h: Any) -> Floats:
        """Return d h'_i / d h_m of all pairs of positions.

        Args:
          h: (T, d) with T d at most 4096.

        Returns:
          (T, d, T, d) float64, the layout of ``jax.jacfwd``; zero for m > i.

        Raises:
          UserError: as for a call; more than one sequence; T d above 4096.
        """
        h = self._checked(h)
        if h.ndim != 2:
            raise UserError(f"h of shape {h.shape}: must be one sequence (T, d)")
        check_dense(h.size)
        T, d = h.shape
        total = np.eye(T * d)
        for step in self.steps:
            own, h = self._step_jacobian(step, h, whole=True)
            total = own.transpose(0, 2, 1, 3).reshape(T * d, T * d) @ total
        return total.reshape(T, d, T, d)

    def points(self, h: Any) -> dict[str, Floats]:
        """Return what the equation of a sub-layer passes: "read", "output", "sum" and others.

        Args:
          h: (B, T, d), for a part of one sub-layer.
        """
        ((block, name),) = self.steps
        with jax.enable_x64(True):
            found = self.parts._point(self.parts.layer(block), self.parts._stream(h), sublayer=name)
        return {key: np.asarray(value) for key, value in found.items()}

    def null_directions(self, h: Any) -> NullDirections:
        """Return what is taken out of the part's Jacobians for their deflated spectrum.

        On the right what the blocks' norms forget at h (:meth:`Parts.forgotten`): a post-norm
        before it lets nothing arrive along it, a pre-norm in it does not read it. On the left,
        where the part ends with a norm P on the stream, what never leaves P: u / w and, where it
        removes the mean, 1 / w, with u of the sum that P reads and w its gain over its scale. That
        is null whatever the branch. Where it does not end so, what the norms forget of its output.
        (What J maps to zero on the right of such a part, J_P (I + J_F) v = 0, is another direction
        than h, moved by the branch: that a change along h passes says something, and stays.)

        Args:
          h: (T, d) or (B, T, d).

        Returns:
          right and left, (..., T, d, m): ``read`` and ``write`` of
          :func:`normjax.deflated_spectrum`.

        Raises:
          UserError: as for a call; a token, or the output at one, that is zero.

        >>> from normjax.decoder import DecoderConfig
        >>> config = DecoderConfig(depth=1, width=8, heads=2, placement="post", norm="layernorm")
        >>> model = Decoder(config, vocabulary=11, window=4)
        >>> part = Parts(model, model.init(jax.random.key(0))).block(1)
        >>> h = np.random.default_rng(0).normal(size=(3, 8))
        >>> left = part.null_directions(h).left
        >>> bool(abs(np.swapaxes(left, 1, 2) @ part.token_jacobians(h)).max() < 1e-4)   # O(eps)
        True
        """
        parts, h = self.parts, self._checked(h)
        right = parts.forgotten(h)
        if self.steps:
            block, name = self.steps[-1]
            found = slot_norms(parts.config, block, name).get("post_norm")
            if found and parts.config.rows == 1 and found[0].forgets != "nothing":
                layer = parts.layer(block)
                before = Part(parts, self.steps[:-1])(h)
                flat = before.reshape(-1, *h.shape[-2:])
                z = Part(parts, self.steps[-1:]).points(flat)["sum"]
                own = jax.tree.map(np.asarray, layer[0][name].get(found[1], {}))
                left = found[0].null_directions(z.reshape(h.shape), own, parts.config.norm_eps).left
                return NullDirections(right, left)
        return NullDirections(right, parts.forgotten(np.asarray(self(h))))

    def _checked(self, h: Any) -> Floats:
        with jax.enable_x64(True):
            return as_float64("h", self.parts._stream(h))

    def _step_jacobian(
        self, step: tuple[int, str], h: Floats, whole: bool
    ) -> tuple[Floats, Floats]:
        """Return a sub-layer's Jacobian, (T, n d, n d) or (T, T, n d, n d), and its output."""
        (block, name), config = step, self.parts.config
        n, d = config.rows, config.width
        layer = self.parts.layer(block)
        params, factors = layer[0][name], layer[1][name]
        row = config.placement_row.of(name).at(block, config.depth)
        with jax.enable_x64(True):
            seen = self.parts._point(layer, jnp.asarray(h)[None], sublayer=name)
        at = {k: np.asarray(v[0]) for k, v in seen.items()}
        rows = {k: v.reshape(*v.shape[:-1], -1, d) for k, v in at.items()}
        mixes = {
            k: self._mix(k, getattr(row, k), params, rows["before"], factors, x)
            for k, x in (
                ("read", rows.get("normed", rows["before"])), ("keep", rows["before"]),
                ("write", rows["branched"]),
            )
            if hasattr(getattr(row, k), "value")
        }  # fmt: skip
        points = {
            "pre_norm": at["mixed"], "branch_norm": at["output"],
            "skip_norm": rows["before"] if n > 1 else h, "post_norm": at["sum"],
            "mix_norm": rows["before"] if n > 1 else h,
        }  # fmt: skip
        if n > 1:
            points["post_norm"] = rows["sum"]
        maps = {
            slot: norm_jacobian(norm, points[slot], params.get(holder), config.norm_eps)
            for slot, (norm, holder) in slot_norms(config, block, name).items()
        }
        for slot, J in maps.items():
            held = getattr(row, slot)
            if isinstance(held, OnRows):
                others = [i for i in range(n) if i not in held.rows]
                J[..., others, :, :] = np.eye(d)
        inner = self._branch_jacobian(name, block, params["branch"], at["read"], whole)
        columns = {k: _column(self._factor(k, getattr(row, k), params, block)) for k in FACTORS}
        joined = None
        if row.join is not None:
            own = _named(params, "join_")
            joined = row.join.derivative(own, at["returned"], at["read"], config.norm_eps)
        algebra = Tangents(maps, inner, columns, mixes, whole, n, joined)
        return fold(row, None, algebra), at["after"]

    def _factor(self, name: str, factor: Any, params: Any, block: int) -> Any:
        """Return c, A or B of a block as a number or one per feature; 1 where weights mix rows."""
        if isinstance(factor, Learned):
            held = self.parts.layer(block)[0] if factor.shared else params
            return np.asarray(factor.made_of(np.asarray(held[factor.name or name], np.float64)))
        return factor if isinstance(factor, int | float) else 1.0

    def _mix(self, name, weights, params, state, factors, rows) -> Mix:
        own = _named(params, prefix(weights, name))
        position = int(factors["position"])
        with jax.enable_x64(True):
            w = np.asarray(weights.value(own, jnp.asarray(state), position), np.float64)
        w = np.broadcast_to(w, (len(state), *w.shape[-3 if weights.per_feature else -2 :]))
        return Mix(w, weights.derivative(own, state, position), rows)

    def _branch_jacobian(
        self, name: str, block: int, params: Any, x: Floats, whole: bool
    ) -> Floats:
        config = self.parts.config
        if name == "mlp":
            own = mlp_jacobian(config, params, x)
            return own * np.eye(len(x))[..., None, None] if whole else own
        if name == "attention":
            local = block in config.local_blocks
            if whole:
                return attention_jacobian(config, params, x, local).transpose(0, 2, 1, 3)
            return attention_token_jacobians(config, params, x, local)
        raise UserError(
            f"sublayer={name}: has no closed form; use normjax.jacobians.views on the function"
        )


def _named(params: Any, start: str) -> dict[str, Any]:
    """Return the parameters whose names begin so, without that."""
    return {k.removeprefix(start): v for k, v in params.items() if k.startswith(start)}


def _column(factor: Any) -> Any:
    """Return a factor as what multiplies a Jacobian (..., d, n d) from the left."""
    return factor[:, None] if np.ndim(factor) else float(factor)


def check_dense(n: int) -> None:
    """Raise :class:`UserError` where a dense n x n Jacobian would be too large."""
    if n > MAX_DENSE:
        raise UserError(
            f"h of {n} entries: a dense Jacobian is made of at most {MAX_DENSE}; take a shorter"
            " sequence, one position at a time, or the matrix-free route of normjax.spectra.krylov"
        )
