"""The decoder: sub-layer, block, stack; every part can be replaced or removed by its config.

The rest of the program sees two functions: ``init(key) -> params`` and
``apply(params, tokens) -> logits``; no Flax type leaves the files of the model (this one,
attention.py, mlp.py, layers.py and norms.py). Parameters of the blocks are stacked along a leading
axis of length depth, whether the blocks are scanned or unrolled, so both read the same checkpoint.

Shapes: B sequences, T positions, D width, V vocabulary, L blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from normjax import placements
from normjax.decoder_config import DecoderConfig, check
from normjax.errors import UserError
from normjax.layers import (
    MLP,
    SHIFTS,
    SIGNALS,
    Attention,
    Linear,
    norm_layer,
    softcap,
    tapped,
    wide,
)

Params = dict[str, Any]
Layer = tuple[Params, tuple[Any, ...]]
"""Parameters of one block and its factors (a, b, c)."""

SUBLAYERS: dict[str, Callable[..., nn.Module]] = {"attention": Attention, "mlp": MLP}


def sublayers(config: DecoderConfig) -> tuple[str, ...]:
    """Names of the sub-layers that a block of this config has, in order.

    >>> sublayers(DecoderConfig(attention="none"))
    ('mlp',)
    """
    return tuple(name for name in SUBLAYERS if getattr(config, name) != "none")


def _passed(x: Array) -> Array:
    return x


class SubLayer(nn.Module):
    """One branch in its placement: h' = P(a h + b Q(F(c N(h))))."""

    config: DecoderConfig
    branch: str

    @nn.compact
    def __call__(self, h: Array, a: Any, b: Any, c: Any) -> Array:
        place = self.config.resolved_placement
        if place.learned_branch:
            shape = h.shape[-1:] if place.learned_branch == "vector" else ()
            start = b
            b = self.param(
                "branch_gain", lambda key: jnp.full(shape, start, self.config.param_dtype)
            )
        norms = {"read": place.read, "output": place.output, "stream": place.stream}
        maps = {k: norm_layer(self.config, k + "_norm") if on else _passed
                for k, on in norms.items()}  # fmt: skip
        branch = SUBLAYERS[self.branch](self.config, name="branch")
        # Gradients are wanted on both sides of every norm; "sum" is the stream itself without P.
        shifted = {"read": place.read, "sum": place.stream}
        tap = lambda name, x: tapped(self, name, x, shifted.get(name, False))  # noqa: E731
        h = tapped(self, "before", h, shifted=True)
        return tapped(self, "after", placements.combine(h, branch, **maps, a=a, b=b, c=c, tap=tap))


class Block(nn.Module):
    """The sub-layers of one block, in order, with this block's factors (a, b, c)."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, h: Array, factors: tuple[Any, ...]) -> tuple[Array, None]:
        for name in sublayers(self.config):
            h = SubLayer(self.config, name, name=name)(h, *factors)
        return h, None


class DecoderModule(nn.Module):
    """Embedding, positions, blocks, final norm, output layer."""

    config: DecoderConfig
    vocabulary: int
    window: int

    @nn.compact
    def __call__(self, x: Array, part: str = "all") -> Array:
        """Return logits of tokens (B, T), or the first or last part of the way to them.

        part "embedding" returns the stream (B, T, D) that block 1 reads; "readout" takes the stream
        that block L returns.
        """
        c = self.config
        std = c.initialization.embedding_stddev(c.width)
        embed_init = nn.initializers.normal(std)
        table_VD = self.param("embedding", embed_init, (self.vocabulary, c.width), c.param_dtype)
        h = x if part == "readout" else table_VD.astype(c.dtype)[x]
        if c.positions == "learned" and part != "readout":
            table_TD = self.param("positions", embed_init, (self.window, c.width), c.param_dtype)
            h = h + table_TD.astype(c.dtype)[: x.shape[1]]
        if part == "embedding":
            return h
        if sublayers(c) and part == "all":
            h = self._blocks(h)
        if c.has_final_norm:
            h = tapped(self, "last", h, shifted=True)
            h = tapped(self, "final", norm_layer(c, "final_norm")(h), shifted=True)
        else:
            h = tapped(self, "last", h, shifted=True)
        if c.tied:
            # Products of narrow numbers, summed and kept in float32 at least.
            flat = jnp.matmul(
                h.reshape(-1, c.width), table_VD.astype(h.dtype).T,
                preferred_element_type=wide(h.dtype),
            )  # fmt: skip
            logits = flat.reshape(*h.shape[:-1], self.vocabulary)
        else:
            out_std = c.initialization.stddev(c.width, self.vocabulary)
            logits = Linear(self.vocabulary, c, out_std, wide(h.dtype), name="output")(h)
        return softcap(logits.astype(wide(logits.dtype)), c.output_softcap)

    def _blocks(self, h: Array) -> Array:
        c = self.config
        block = nn.remat(Block, prevent_cse=not c.scan_layers) if c.remat else Block
        factors = _factors(c)

        def body(module: Block, carry: Array, varying: Any):
            rest = iter(varying)
            return module(carry, tuple(x if isinstance(x, float) else next(rest) for x in factors))

        scan = nn.scan(
            body, variable_axes={"params": 0, SIGNALS: 0, SHIFTS: 0}, split_rngs={"params": True},
            length=c.depth, unroll=1 if c.scan_layers else c.depth,
        )  # fmt: skip
        varying = tuple(x for x in factors if not isinstance(x, float))
        return scan(block(c, name="blocks"), h, varying)[0]


def _factors(config: DecoderConfig) -> list[Any]:
    """Return (a, b, c) of all blocks; see :func:`_per_block`."""
    place, dtype = config.resolved_placement, wide(config.dtype)
    schedules = (place.residual, place.branch, place.scale)
    return [_per_block(schedule, config.depth, dtype) for schedule in schedules]


def _per_block(schedule: placements.Schedule, depth: int, dtype: Any) -> Any:
    """Return a schedule's values as an array (L,), or as one number where they are all the same.

    A number costs nothing where it is 1 and takes the path out of the program where it is 0.
    """
    values = [schedule(block, depth) for block in range(1, depth + 1)]
    return float(values[0]) if len(set(values)) == 1 else jnp.asarray(values, dtype)


# --- what the rest of the program sees ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder for a vocabulary and a window, as two pure functions.

    >>> import jax
    >>> model = Decoder(DecoderConfig(depth=2, width=16, heads=2), vocabulary=11, window=8)
    >>> params = model.init(jax.random.key(0))
    >>> model.apply(params, jnp.zeros((3, 8), jnp.int32)).shape
    (3, 8, 11)
    """

    config: DecoderConfig
    vocabulary: int
    window: int

    def __post_init__(self):
        check(self.config)
        for name in ("vocabulary", "window"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: must be at least 1; for example 64")

    @property
    def _module(self) -> DecoderModule:
        return DecoderModule(self.config, self.vocabulary, self.window)

    def init(self, key: Array) -> Params:
        """Return the parameters: nested dicts of arrays, those of the blocks stacked."""
        # Scanned, the blocks' draws are compiled once, not per block; the numbers are the same.
        rolled = dataclasses.replace(self.config, scan_layers=True, remat=False)
        module = DecoderModule(rolled, self.vocabulary, self.window)
        # One compiled program, so that a caller's jit gives the same bits.
        make = jax.jit(partial(module.init, mutable=("params",)))
        variables: Any = make(key, jnp.zeros((1, self.window), jnp.int32))
        return variables["params"]

    def apply(self, params: Params, tokens: Array) -> Array:
        """Return logits (B, T, V), float32 at least, for tokens (B, T) with T <= window."""
        if tokens.shape[-1] > self.window:
            raise UserError(
                f"tokens of shape {tokens.shape}: more than window={self.window} positions; cut"
                " them, or build the decoder with a longer window"
            )
        logits: Any = self._module.apply({"params": params}, tokens)
        return logits

    def tapped(
        self, params: Params, tokens: Array, shifts: Params | None = None
    ) -> tuple[Array, Params]:
        """Return logits (B, T, V) and what the taps saw on the way to them.

        Args:
          params: of the model.
          tokens: (B, T).
          shifts: None, or arrays like those of :meth:`zero_shifts`, which are added on the way: the
            gradient with respect to one is that with respect to the array that it is added to.

        Returns:
          logits, and nested dicts of arrays: "last", the stream after block L (B, T, D); "final",
          the final norm of it; "blocks", with a leading axis of length L: per sub-layer "before",
          "read", "written", "sum", "after", and in "branch" what attention and MLP show.

        >>> model = Decoder(DecoderConfig(depth=2, width=16, heads=2), vocabulary=11, window=8)
        >>> params = model.init(jax.random.key(0))
        >>> _, taps = model.tapped(params, jnp.zeros((3, 8), jnp.int32))
        >>> taps["blocks"]["attention"]["read"].shape
        (2, 3, 8, 16)
        """
        variables = {"params": params, **({SHIFTS: shifts} if shifts else {})}
        logits, seen = self._module.apply(variables, tokens, mutable=(SIGNALS,))
        # Each tap is passed once in a pass: the tuple that Flax collects in holds one array.
        taps = jax.tree.map(lambda x: x[0], seen[SIGNALS], is_leaf=lambda x: isinstance(x, tuple))
        return logits, taps

    def zero_shifts(self, params: Params, tokens: Array) -> Params:
        """Return zeros for :meth:`tapped`: "last", "final"; per sub-layer "before", "read", "sum".

        "final" is there where there is a final norm, "read" and "sum" where N and P are norms.
        """
        make = lambda p, t: self._module.apply({"params": p}, t, mutable=(SHIFTS,))[1]  # noqa: E731
        shapes: Any = jax.eval_shape(make, params, tokens)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[SHIFTS])

    def embed(self, params: Params, tokens: Array) -> Array:
        """Return the stream (B, T, D) that block 1 reads."""
        h: Any = self._module.apply({"params": params}, tokens, "embedding")
        return h

    def readout(self, params: Params, h: Array) -> Array:
        """Return logits (B, T, V) of the stream (B, T, D) that block L returns."""
        logits: Any = self._module.apply({"params": params}, h, "readout")
        return logits

    def layer(self, params: Params, block: int) -> Layer:
        """Return the parameters and the factors (a, b, c) of one block, counted from 1."""
        if not 1 <= block <= self.config.depth:
            raise UserError(f"block={block}: must be from 1 to {self.config.depth}")
        sliced = jax.tree.map(lambda x: x[block - 1], params.get("blocks", {}))
        factors = _factors(self.config)
        return sliced, tuple(f if isinstance(f, float) else f[block - 1] for f in factors)

    def block(self, layer: Layer, h: Array, sublayer: str = "") -> Array:
        """Return what a block, or one of its sub-layers, makes of the stream h (B, T, D)."""
        params, factors = layer
        if sublayer:
            part, params = SubLayer(self.config, sublayer), params[sublayer]
            after: Any = part.apply({"params": params}, h, *factors)
            return after
        carried: Any = Block(self.config).apply({"params": params}, h, factors)
        return carried[0]

    def sublayer_parts(self, layer: Layer, sublayer: str) -> dict[str, Any]:
        """Return the arguments of :func:`normjax.placements.combine` that make up a sub-layer."""
        params, (a, b, c) = layer[0][sublayer], layer[1]
        place = self.config.resolved_placement
        norms = {"read": place.read, "output": place.output, "stream": place.stream}
        maps = {k: _applied(norm_layer(self.config, k), params.get(k + "_norm", {})) if on
                else _passed for k, on in norms.items()}  # fmt: skip
        branch = _applied(SUBLAYERS[sublayer](self.config), params["branch"])
        return {"branch": branch, **maps, "a": a, "b": params.get("branch_gain", b), "c": c}

    def hidden_states(self, params: Params, tokens: Array) -> Array:
        """Return the stream before block 1 and after every block: (L + 1, B, T, D).

        >>> model = Decoder(DecoderConfig(depth=2, width=16, heads=2), vocabulary=11, window=8)
        >>> params = model.init(jax.random.key(0))
        >>> model.hidden_states(params, jnp.zeros((3, 8), jnp.int32)).shape
        (3, 3, 8, 16)
        """
        states = [self.embed(params, tokens)]
        for block in range(1, self.config.depth + 1):
            states.append(self.block(self.layer(params, block), states[-1]))
        return jnp.stack(states)

    def parameter_count(self) -> int:
        """Number of learned numbers, without making them."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    def flops_per_token(self) -> float:
        """Multiply-adds of the matrix products, times two, for one training token.

        Forward 2 per weight and 4 T D per block for attention; backward twice as much (Kaplan et
        al. 2020, arXiv 2001.08361, section 2.1; their embedding look-up is not a product either).
        """
        c = self.config
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        flat = jax.tree_util.tree_flatten_with_path(shapes)[0]
        weights = sum(leaf.size for path, leaf in flat if _is_kernel(path))
        weights += self.vocabulary * c.width if c.tied else 0
        scores = 2 * c.depth * self.window * c.width if c.attention != "none" else 0
        return 6.0 * (weights + scores)


def _applied(module: nn.Module, params: Params) -> Callable[[Array], Array]:
    def function(x: Array) -> Array:
        y: Any = module.apply({"params": params}, x)
        return y

    return function


def _is_kernel(path: tuple[Any, ...]) -> bool:
    return path[-1].key == "kernel"
