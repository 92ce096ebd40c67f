"""The decoder: sub-layer, block, stack; every part can be replaced or removed by its config.

The rest of the program sees two functions: ``init(key) -> params`` and
``apply(params, tokens) -> logits``; no Flax type leaves the files of the model (this one,
attention.py, mlp.py, layers.py and norms.py). Parameters of the blocks are stacked along a leading
axis of length depth, whether the blocks are scanned or unrolled, so both read the same checkpoint.

Shapes: B sequences, T positions, D width, V vocabulary, L blocks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.decoder_config import DecoderConfig, check
from normjax.equation import FACTORS, SHARED_NORM, SLOTS, Learned, OnRows, Sublayer, fold
from normjax.errors import UserError
from normjax.layers import (
    DIAGNOSTICS,
    METERS,
    MLP,
    SHIFTS,
    WATCHED,
    Attention,
    Linear,
    mean_square,
    metered,
    norm_layer,
    softcap,
    tapped,
    watched,
    wide,
)
from normjax.mixing import mixed, prefix
from normjax.norms import Norm, NormLayer

Params = dict[str, Any]
Factors = dict[str, dict[str, Any]]
"""By branch, what differs between blocks: schedules of c, A and B, norms that some blocks have."""
Layer = tuple[Params, Factors]
"""Parameters and factors of one block."""

OF_BRANCHES = ("local",)
"""Factors that a branch is called with, where blocks differ in them."""
BRANCHES: dict[str, Callable[..., nn.Module]] = {"attention": Attention, "mlp": MLP}


class _Values:
    """The algebra of the model: arrays (B, T, n D), n rows one behind the other; mostly n = 1."""

    def __init__(self, module: SubLayer, row: Sublayer, factors: Any, shared: Params):
        self.module, self.config, self.row = module, module.config, row
        self.factors, self.shared = factors, shared
        self.layers: dict[str, NormLayer] = {}
        self.made: Params = {}  # by name: what is tied is made once

    def norm(self, slot: str, norm: Any, x: Array) -> Array:
        if slot == "pre_norm":
            x = tapped(self.module, "mixed", x)
        if slot == "post_norm":
            x = tapped(self.module, "sum", x, shifted=norm is not None)
        if slot == "branch_norm":
            x = tapped(self.module, "output", x)
        if norm is None:
            return x
        for index, own in enumerate(self.row.norms(slot, self.config.depth)):
            on = self.factors.get(f"{slot}{index}", True)
            x = normed(self.config, self._layer(slot, index, own), own, x, on)
        return tapped(self.module, "normed", x) if slot == "mix_norm" else x

    def _layer(self, slot: str, index: int, norm: Any) -> NormLayer:
        if norm == SHARED_NORM:
            return self.layers["pre_norm"]
        name = slot if index == 0 else f"{slot}_{index + 1}"
        return self.layers.setdefault(name, norm_layer(self.config, name, norm))

    def branch(self, x: Array) -> Array:
        x = tapped(self.module, "read", x, shifted=self.row.pre_norm is not None)
        own = {k: self.factors[k] for k in OF_BRANCHES if k in self.factors}
        return BRANCHES[self.module.branch](self.config, name="branch")(x, **own)

    def join(self, join: Any, x: Array, read: Array) -> Array:
        if join is None:
            return x
        own = made_by(self.module, "join_", join.parameters(self.config.width), self.made)
        x = tapped(self.module, "returned", x)
        return join.value(own, x, read, self.config.norm_eps).astype(x.dtype)

    def times(self, name: str, factor: Any, x: Array) -> Array:
        if isinstance(factor, Learned):
            own, held = factor.name or name, self.shared if factor.shared else self.made
            if not factor.shared and own not in held:
                held[own] = learned(self.module, own, factor, self.factors[name])
            factor = factor.made_of(held[own])
        elif not isinstance(factor, int | float):
            factor = self.factors[name]
        if isinstance(factor, int | float):  # float(): a numpy float64 would widen x
            return x if factor == 1 else x * float(factor)
        return x * factor.astype(x.dtype)

    def mix(self, name: str, weights: Any, state: Array, x: Array) -> Array | None:
        if name == "write":
            x = tapped(self.module, "branched", x)
        if hasattr(weights, "value"):
            x = mixed_by(self.module, name, weights, state, x, self.factors["position"], self.made)
        elif name == "keep" and self._constant(name, weights) == 0.0:
            return None  # no path at all: not even of what is infinite
        elif name != "read":
            x = self.times(name, weights, x)
            if name == "write" and x.shape != state.shape:
                x = jnp.tile(x, self.config.rows)
        if name == "write":
            watched(self.module, "written", lambda: mean_square(x))
            x = tapped(self.module, "written", x)
        return x

    def plus(self, kept: Array | None, written: Array) -> Array:
        return written if kept is None else kept + written

    def _constant(self, name: str, factor: Any) -> float | None:
        """Return a factor that is one number in all blocks, else None; what is learned is none."""
        if isinstance(factor, Learned):
            return None
        found = factor if isinstance(factor, int | float) else self.factors.get(name)
        return found if isinstance(found, int | float) else None


def normed(config: DecoderConfig, layer: NormLayer, held: Any, x: Array, on: Any = True) -> Array:
    """Return x (..., n D) with the norm that a slot holds on each row that is to have it."""
    rows = x if x.shape[-1] == config.width else x.reshape(*x.shape[:-1], -1, config.width)
    if isinstance(held, OnRows):
        on = on & np.isin(np.arange(rows.shape[-2]), held.rows)[:, None]
    out = layer(rows)
    return (out if on is True else jnp.where(on, out, rows)).reshape(x.shape)


def learned(module: Any, name: str, factor: Learned, start: Any) -> Array:
    """Return a learned factor of a module, () or (D,)."""
    shape = (module.config.width,) if factor.shape == "feature" else ()
    return module.param(name, lambda key: jnp.full(shape, start, module.config.param_dtype))


def mixed_by(
    module: Any, name: str, weights: Any, state: Array, x: Array, position: Any, made: Params
) -> Array:
    """Return the rows of x (B, T, k D), mixed by weights that may depend on the state's rows.

    ``made``: the parameters that the sub-layer has made so far, by name; what is tied is in it.
    """
    rows, own = (z.reshape(*z.shape[:-1], -1, module.config.width) for z in (state, x))
    starts = weights.parameters(position, *rows.shape[-2:])
    params = made_by(module, prefix(weights, name), starts, made)
    w = weights.value(params, rows, position).astype(x.dtype)
    out = mixed(w, own, weights.per_feature)
    return out.reshape(*out.shape[:-2], -1)


def made_by(module: Any, before: str, starts: Params, made: Params) -> Params:
    """Return parameters of a module by name: those that ``made`` has, and the others from a start,
    a value or a function of a key for one; ``before`` is what their names begin with."""
    out, dtype = {}, module.config.param_dtype
    for k, start in starts.items():
        if before + k not in made:
            draw = start if callable(start) else lambda key, v=start: v
            made[before + k] = module.param(before + k, lambda key, d=draw: d(key).astype(dtype))
        out[k] = made[before + k]
    return out


class SubLayer(nn.Module):
    """One branch in its placement: ``equation.fold`` in the algebra of the model.

    ``row`` is what it puts into the equation; None: what the config's placement says.
    """

    config: DecoderConfig
    branch: str
    row: Sublayer | None = None

    @nn.compact
    def __call__(self, state: Array, factors: Any, shared: Params) -> Array:
        row = self.row or self.config.placement_row.of(self.branch)
        # Gradients are wanted on both sides of every norm.
        before = metered(self, "before", tapped(self, "before", state, shifted=True))
        watched(self, "before", lambda: mean_square(before))
        return tapped(self, "after", fold(row, before, _Values(self, row, factors, shared)))


class Block(nn.Module):
    """The sub-layers of one block, in order, with what this block has of its own."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, state: Array, factors: Factors) -> tuple[Array, None]:
        shared = {}
        for branch in self.config.sublayers:
            row = self.config.placement_row.of(branch)
            for name in FACTORS:
                factor = getattr(row, name)
                if isinstance(factor, Learned) and factor.shared and name not in shared:
                    shared[name] = learned(self, name, factor, factors[branch][name])
            sublayer = SubLayer(self.config, branch, name=branch)
            state = sublayer(state, factors[branch], shared)
        return state, None


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
        std = c.initialization.embedding_stddev(c.width) * c.placement_row.embedding_gain(c.depth)
        embed_init = nn.initializers.normal(std)
        table_VD = self.param("embedding", embed_init, (self.vocabulary, c.width), c.param_dtype)
        h = x if part == "readout" else table_VD.astype(c.dtype)[x]
        if c.embedding_scale != 1 and part != "readout":
            h = h * c.embedding_scale
        if c.positions == "learned" and part != "readout":
            table_TD = self.param("positions", embed_init, (self.window, c.width), c.param_dtype)
            h = h + table_TD.astype(c.dtype)[: x.shape[1]]
        if part != "readout":
            h = self._normed("embedding_norm", c.placement_row.embedding_norm, self._spread(h))
        if part == "embedding":
            return h
        if c.sublayers and part == "all":
            h = self._blocks(h)
        watched(self, "last", lambda: mean_square(h))
        h = self._read_out(metered(self, "last", h))
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
        logits = logits.astype(wide(logits.dtype))
        if c.output_scale != 1:
            logits = logits * c.output_scale
        return softcap(logits, c.output_softcap)

    def _spread(self, h: Array) -> Array:
        """Return the state (B, T, n D) that begins with the embedding (B, T, D)."""
        n, streams = self.config.rows, self.config.placement_row.streams
        if streams is None:
            return h
        if streams.start == "copies":
            return jnp.tile(h, n)
        return jnp.pad(h, ((0, 0), (0, 0), (0, (n - 1) * self.config.width)))

    def _normed(self, name: str, held: Any, state: Array) -> Array:
        own = None if held is None else norm_layer(self.config, name, held)
        return state if own is None else normed(self.config, own, held, state)

    def _read_out(self, state: Array) -> Array:
        """Return what the output layer reads of the state: (B, T, D)."""
        c, streams = self.config, self.config.placement_row.streams
        if streams is None:
            return state
        state = self._normed("readout_norm", streams.norm, state)
        if streams.readout is not None:
            position = c.depth * len(c.sublayers)
            return mixed_by(self, "readout", streams.readout, state, state, position, {})
        return jnp.sum(state.reshape(*state.shape[:-1], c.rows, c.width), axis=-2)

    def _blocks(self, h: Array) -> Array:
        c = self.config
        block = nn.remat(Block, prevent_cse=not c.scan_layers) if c.remat else Block
        leaves, tree = jax.tree.flatten(_factors(c))
        varies = [not isinstance(leaf, float | bool) for leaf in leaves]

        def body(module: Block, carry: Array, varying: Any):
            rest = iter(varying)
            own = [next(rest) if moves else x for x, moves in zip(leaves, varies, strict=True)]
            return module(carry, jax.tree.unflatten(tree, own))

        scan = nn.scan(
            body, split_rngs={"params": True},
            variable_axes={"params": 0, DIAGNOSTICS: 0, SHIFTS: 0, WATCHED: 0, METERS: 0},
            length=c.depth, unroll=1 if c.scan_layers else c.depth,
        )  # fmt: skip
        varying = tuple(x for x, moves in zip(leaves, varies, strict=True) if moves)
        return scan(block(c, name="blocks"), h, varying)[0]


def _factors(config: DecoderConfig) -> Factors:
    """Return what differs between blocks, over all of them; see :func:`_per_block`."""
    blocks, names = range(1, config.depth + 1), config.sublayers
    out: Factors = {}
    for i, branch in enumerate(names):
        row = config.placement_row.of(branch)
        found = [row.at(block, config.depth) for block in blocks]
        own: dict[str, Any] = {}
        for name in FACTORS:
            values = [getattr(each, name) for each in found]
            values = [v.start if isinstance(v, Learned) else v for v in values]
            if all(isinstance(v, int | float) for v in values):
                own[name] = _per_block(values, config)
        for slot in SLOTS:
            for index, on in enumerate(row.norms(slot, config.depth).values()):
                if not all(on):
                    own[f"{slot}{index}"] = jnp.asarray(on)
        if config.placement_row.streams is not None:
            own["position"] = jnp.asarray([(block - 1) * len(names) + i for block in blocks])
        if branch == "attention" and config.local_blocks:
            local = [block in config.local_blocks for block in blocks]
            own["local"] = True if all(local) else jnp.asarray(local)
        out[branch] = own
    return out


def _per_block(values: list[float], config: DecoderConfig) -> Any:
    """Return a schedule's values as an array (L,), or as one number where they are all the same.

    A number costs nothing where it is 1 and takes the path out of the program where it is 0.
    """
    same = len(set(values)) == 1
    return float(values[0]) if same else jnp.asarray(values, wide(config.dtype))


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
        # What the names stand for is settled here: a table that is edited later changes nothing.
        object.__setattr__(self, "config", self.config.with_rows())
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
        with jax.threefry_partitionable(True):  # the words of a key, whatever JAX is set to
            variables: Any = make(key, jnp.zeros((1, self.window), jnp.int32))
            rule = self.config.placement_row.after_init
            if rule is None:
                return variables["params"]
            return jax.jit(partial(rule, self))(variables["params"])

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
        logits, seen = self._module.apply(variables, tokens, mutable=(DIAGNOSTICS,))
        # Each tap is passed once in a pass: the tuple that Flax collects in holds one array.
        taps = jax.tree.map(
            lambda x: x[0], seen[DIAGNOSTICS], is_leaf=lambda x: isinstance(x, tuple)
        )
        return logits, taps

    def zero_shifts(self, params: Params, tokens: Array) -> Params:
        """Return zeros for :meth:`tapped`: "last", "final"; per sub-layer "before", "read", "sum".

        "final" is there where there is a final norm, "read" and "sum" where N and P are norms.
        """
        make = lambda p, t: self._module.apply({"params": p}, t, mutable=(SHIFTS,))[1]  # noqa: E731
        shapes: Any = jax.eval_shape(make, params, tokens)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[SHIFTS])

    def watched(
        self, params: Params, tokens: Array, meters: Params
    ) -> tuple[Array, dict[str, Params]]:
        """Return logits (B, T, V), and numbers of what passed on the way to them.

        Args:
          params: of the model.
          tokens: (B, T).
          meters: like :meth:`meters`; the gradient with respect to one is the mean square of the
            loss's gradient with respect to the stream there, times the squared number of tokens.

        Returns:
          logits, and by sub-layer, over the blocks: "before", "written", mean squares (L,); of
          attention by head (L, H) "logit_max" and "collision" (Renyi's entropy of order 2 over the
          largest possible), both of the batch's first sequence, and "head_square" (mean square of
          what a head returns times the squares of the output matrix's rows for it). Under "" there
          is "last", the mean square of the state after block L.
        """
        variables = {"params": params, METERS: meters}
        logits, found = self._module.apply(variables, tokens, mutable=(WATCHED,))
        seen: Any = found
        out: dict[str, Params] = {"": {"last": seen[WATCHED]["last"][0]}}
        for name, own in seen[WATCHED].get("blocks", {}).items():
            out[name] = {k: v[0] for k, v in (own | own.get("branch", {})).items() if k != "branch"}
        return logits, out

    def meters(self) -> Params:
        """Return zeros for :meth:`watched`: "last", and "before" of every sub-layer (L,)."""
        zeros = {
            name: {"before": jnp.zeros(self.config.depth, jnp.float32)}
            for name in self.config.sublayers
        }
        return {"last": jnp.zeros((), jnp.float32), **({"blocks": zeros} if zeros else {})}

    def embed(self, params: Params, tokens: Array) -> Array:
        """Return the stream (B, T, D) that block 1 reads."""
        h: Any = self._module.apply({"params": params}, tokens, "embedding")
        return h

    def readout(self, params: Params, h: Array) -> Array:
        """Return logits (B, T, V) of the stream (B, T, D) that block L returns."""
        logits: Any = self._module.apply({"params": params}, h, "readout")
        return logits

    def layer(self, params: Params, block: int) -> Layer:
        """Return the parameters and the factors of one block, counted from 1."""
        if not 1 <= block <= self.config.depth:
            raise UserError(f"block={block}: must be from 1 to {self.config.depth}")
        sliced = jax.tree.map(lambda x: x[block - 1], params.get("blocks", {}))
        return sliced, self.factors(block)

    def factors(self, block: int) -> Factors:
        """Return the factors of one block, counted from 1: what its parameters do not say."""
        one = lambda x: x if isinstance(x, float | bool) else x[block - 1]  # noqa: E731
        return jax.tree.map(one, _factors(self.config))

    def block(
        self, layer: Layer, h: Array, sublayer: str = "", row: Sublayer | None = None
    ) -> Array:
        """Return what a block, or one of its sub-layers, makes of the state h (B, T, n D).

        ``row`` puts something else into a sub-layer's equation, such as one norm less.
        """
        params, factors = layer
        if sublayer:
            after: Any = SubLayer(self.config, sublayer, row).apply(
                {"params": params[sublayer]}, h, factors[sublayer], _shared(params)
            )
            return after
        carried: Any = Block(self.config).apply({"params": params}, h, factors)
        return carried[0]

    def points(self, layer: Layer, h: Array, sublayer: str) -> dict[str, Array]:
        """Return where the parts of a sub-layer's equation are, for a state h (B, T, n D).

        "before", H; "mixed", R(H); "read", what F reads; "output", what F returns; "branched", Q of
        it; "written", B of that; "sum", what P reads; "after", H'. All (B, T, D) or (B, T, n D).
        """
        shown = self.shown(layer, h, sublayer)
        return {k: v for k, v in shown.items() if not isinstance(v, dict)}

    def shown(self, layer: Layer, h: Array, sublayer: str) -> Params:
        """Return the same, and in "branch" what the branch shows: attention "logits" and
        "probabilities" (B, K, G T, T), the MLP "hidden" (B, T, F)."""
        params, factors = layer
        _, seen = SubLayer(self.config, sublayer).apply(
            {"params": params[sublayer]}, h, factors[sublayer], _shared(params),
            mutable=(DIAGNOSTICS,),
        )  # fmt: skip
        return jax.tree.map(
            lambda x: x[0], seen[DIAGNOSTICS], is_leaf=lambda x: isinstance(x, tuple)
        )

    def pieces(
        self, params: Params, block: int, sublayer: str
    ) -> dict[str, Callable[[Array], Array]]:
        """Return the branch of a sub-layer and the norms that it has as functions, by slot."""
        config, (held, found) = self.config, self.layer(params, block)
        own, factors = held[sublayer], found[sublayer]
        modules: dict[str, Any] = {
            slot: (norm_layer(config, slot, norm), own.get(name, {}))
            for slot, (norm, name) in slot_norms(config, block, sublayer).items()
        }
        modules["branch"] = BRANCHES[sublayer](config), own["branch"]
        more = {"branch": {k: factors[k] for k in OF_BRANCHES if k in factors}}
        return {name: _applied(*each, **more.get(name, {})) for name, each in modules.items()}

    def with_norms(self, function: Callable[[Norm], Norm]) -> Decoder:
        """Return it with ``function`` of every norm it has; itself where that changes none."""
        config, names = self.config, self.config.sublayers
        row, streams = config.placement_row, config.placement_row.streams
        held = [config.norm_row, row.embedding_norm, streams and streams.norm]
        held = [config.norm_of(each) for each in held if each is not None]
        for block in range(1, config.depth + 1):
            held += [n for name in names for n, _ in slot_norms(config, block, name).values()]
        if all(function(norm) == norm for norm in held):
            return self
        return dataclasses.replace(self, config=config.with_norms(function))

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

    def after_step(self, params: Params) -> Params:
        """Return what the placement makes of the parameters after an optimizer step."""
        rule = self.config.placement_row.after_step
        return params if rule is None else rule(params)

    def parameter_count(self) -> int:
        """Number of learned numbers, without making them."""
        shapes = parameter_shapes(self)
        idle = 0  # a norm that only some blocks have is stored, but not used, in the others
        for branch in self.config.sublayers:
            row = self.config.placement_row.of(branch)
            for slot in SLOTS:
                for index, on in enumerate(row.norms(slot, self.config.depth).values()):
                    name = slot if index == 0 else f"{slot}_{index + 1}"
                    own = jax.tree.leaves(shapes["blocks"][branch].get(name, {}))
                    idle += sum(leaf.size for leaf in own) * on.count(False) // len(on)
        return sum(leaf.size for leaf in jax.tree.leaves(shapes)) - idle

    def flops_per_token(self) -> float:
        """Multiply-adds of the matrix products, times two, for one training token.

        Forward 2 per weight and 4 T D per block for attention; backward twice as much (Kaplan et
        al. 2020, arXiv 2001.08361, section 2.1; their embedding look-up is not a product either).
        """
        c = self.config
        flat = jax.tree_util.tree_flatten_with_path(parameter_shapes(self))[0]
        weights = sum(leaf.size for path, leaf in flat if _is_kernel(path))
        weights += self.vocabulary * c.width if c.tied else 0
        scores = 2 * c.depth * self.window * c.heads * c.head_width if c.attention != "none" else 0
        return 6.0 * (weights + scores)


@functools.lru_cache(maxsize=64)
def parameter_shapes(model: Decoder) -> Any:
    """Return the parameters' shapes, without making any: blocks are traced once, not per block."""
    return jax.eval_shape(model.init, jax.random.key(0))


def slot_norms(config: DecoderConfig, block: int, sublayer: str) -> dict[str, tuple[Norm, str]]:
    """Return, by slot, the norm of a block's sub-layer and the name of its parameters."""
    row, found = config.placement_row.of(sublayer), {}
    for slot in SLOTS:
        for index, (norm, on) in enumerate(row.norms(slot, config.depth).items()):
            if on[block - 1]:
                name = slot if index == 0 else f"{slot}_{index + 1}"
                if norm == SHARED_NORM:
                    norm, name = row.at(block, config.depth).pre_norm, "pre_norm"
                found[slot] = config.norm_of(norm), name
    return found


def _shared(params: Params) -> Params:
    """Return the learned factors that the sub-layers of a block share."""
    return {name: params[name] for name in FACTORS if name in params}


def _applied(module: nn.Module, params: Params, **factors: Any) -> Callable[[Array], Array]:
    def function(x: Array) -> Array:
        y: Any = module.apply({"params": params}, x, **factors)
        return y

    return function


def _is_kernel(path: tuple[Any, ...]) -> bool:
    return path[-1].key == "kernel"
