"""The decoder: attention, MLP, block, stack; every part can be replaced or removed by its config.

The rest of the program sees two functions: ``init(key) -> params`` and
``apply(params, tokens) -> logits``; no Flax type leaves this file and norms.py. Parameters of the
blocks are stacked along a leading axis of length depth, whether the blocks are scanned or unrolled,
so both read the same checkpoint.

Shapes: B sequences, T positions, D width, H heads, K key/value heads, G = H / K query heads that
share one of them, C head width, F MLP width, V vocabulary, L blocks.
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
from normjax.configs import field
from normjax.errors import UserError, check_choice
from normjax.initializers import INITIALIZERS, Initialization
from normjax.norms import NORMS, NormLayer
from normjax.positions import rotary_angles, rotate

Params = dict[str, Any]
Layer = tuple[Params, tuple[Any, ...]]
"""Parameters of one block and its factors (a, b, c)."""

ATTENTIONS = ("softmax", "none")
POSITIONS = ("rotary", "learned", "none")
MLPS: dict[str, tuple[Callable[[Array], Array], bool]] = {
    # name: (nonlinearity, whether a second projection is multiplied by it)
    "gelu": (partial(jax.nn.gelu, approximate=True), False),
    "relu": (jax.nn.relu, False),
    "swiglu": (jax.nn.silu, True),
    "none": (lambda x: x, False),
}
FINAL_NORMS = ("auto", "on", "off")
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What the decoder is. Every field is a flag: ``--config.model.depth=8``."""

    depth: int = field(4, "number of blocks L; a block is attention and MLP")
    width: int = field(128, "features D of the residual stream")
    heads: int = field(4, "attention heads; must divide the width")
    kv_heads: int = field(0, "heads of keys and values, shared by groups of queries; 0: as heads")
    attention: str = field("softmax", "softmax or none")
    mlp: str = field("gelu", "gelu, relu, swiglu or none")
    mlp_width: int = field(0, "hidden width of the MLP; 0: 4 D, or 8/3 D rounded to 8 for swiglu")
    positions: str = field("rotary", "rotary, learned or none")
    norm: str = field("rmsnorm", f"one of {', '.join(NORMS)}")
    norm_eps: float = field(1e-6, "eps of every norm, inside the root")
    placement: str = field("pre", f"one of {', '.join(placements.PLACEMENTS)}")
    residual: bool = field(True, "false: no residual path (a = 0), for any placement")
    final_norm: str = field("auto", "norm before the output layer: on, off, or auto by placement")
    qk_norm: bool = field(False, "normalize queries and keys per head")
    attention_softcap: float = field(0.0, "cap c of attention logits, c tanh(x/c); 0: none")
    output_softcap: float = field(0.0, "cap c of output logits, c tanh(x/c); 0: none")
    bias: bool = field(False, "biases in the linear layers")
    tied: bool = field(True, "the output layer is the transposed token embedding")
    init: str = field("auto", f"auto (the placement's own, else gpt2), {', '.join(INITIALIZERS)}")
    dtype: str = field("float32", "of the computation; logits and loss are float32 at least")
    param_dtype: str = field("float32", "of the parameters")
    scan_layers: bool = field(False, "scan the blocks: compile time independent of depth")
    remat: bool = field(False, "recompute activations of a block in the backward pass")

    @property
    def head_width(self) -> int:
        """Width C of one head."""
        return self.width // self.heads

    @property
    def kv_head_count(self) -> int:
        """Heads K of keys and values."""
        return self.kv_heads or self.heads

    @property
    def hidden_width(self) -> int:
        """Width F of the MLP's hidden layer."""
        if self.mlp_width:
            return self.mlp_width
        gated = MLPS[self.mlp][1]
        return max(8, round(self.width * 8 / 3 / 8) * 8) if gated else 4 * self.width

    @property
    def resolved_placement(self) -> placements.Placement:
        """The row of the placement table, with a = 0 where the residual path is removed."""
        return placements.resolve(self.placement, self.residual)

    @property
    def has_final_norm(self) -> bool:
        """Whether the stream is normalized before the output layer."""
        if self.final_norm == "auto":
            return self.resolved_placement.final_norm
        return self.final_norm == "on"

    @property
    def initialization(self) -> Initialization:
        """The row of the initialization table."""
        name = self.init if self.init != "auto" else self.resolved_placement.init or "gpt2"
        return INITIALIZERS[name]


def check(config: DecoderConfig, prefix: str = "config.model") -> None:
    """Raise :class:`UserError` for a decoder that cannot be built, naming field, value and fix."""
    c = config
    for name, least in (
        ("depth", 1),
        ("width", 1),
        ("heads", 1),
        ("kv_heads", 0),
        ("mlp_width", 0),
    ):
        if getattr(c, name) < least:
            usual = getattr(DecoderConfig(), name)
            raise UserError(
                f"{prefix}.{name}={getattr(c, name)}: must be at least {least};"
                f" pass --{prefix}.{name}={usual}"
            )
    choices = {
        "attention": ATTENTIONS, "mlp": MLPS, "positions": POSITIONS, "norm": NORMS,
        "placement": placements.PLACEMENTS, "final_norm": FINAL_NORMS,
        "init": ("auto", *INITIALIZERS), "dtype": DTYPES, "param_dtype": DTYPES,
    }  # fmt: skip
    for name, allowed in choices.items():
        check_choice(f"{prefix}.{name}", getattr(c, name), allowed)
    if c.width % c.heads:
        divisors = [h for h in range(1, c.width + 1) if c.width % h == 0]
        nearest = min(divisors, key=lambda h: abs(h - c.heads))
        raise UserError(
            f"{prefix}.heads={c.heads}: must divide the width {c.width}; for example {nearest}"
        )
    if c.heads % c.kv_head_count:
        divisors = [k for k in range(1, c.heads + 1) if c.heads % k == 0]
        nearest = min(divisors, key=lambda k: abs(k - c.kv_heads))
        raise UserError(
            f"{prefix}.kv_heads={c.kv_heads}: must divide heads={c.heads}; for example {nearest}"
        )
    if c.positions == "rotary" and c.attention != "none" and c.head_width % 2:
        raise UserError(
            f"{prefix}.heads={c.heads}: rotary positions need an even head width, not"
            f" {c.width}/{c.heads} = {c.head_width}; change heads, or use positions=learned"
        )
    for name in ("norm_eps", "attention_softcap", "output_softcap"):
        value = getattr(c, name)
        if not 0 <= value <= float(jnp.finfo(jnp.float32).max):
            usual = getattr(DecoderConfig(), name)
            raise UserError(
                f"{prefix}.{name}={value}: must be finite and at least 0;"
                f" pass --{prefix}.{name}={usual}"
            )
    for name in ("dtype", "param_dtype"):
        if getattr(c, name) == "float64" and not jax.config.read("jax_enable_x64"):
            raise UserError(
                f"{prefix}.{name}=float64: needs 64-bit mode; set JAX_ENABLE_X64=1, or in Python"
                " use `with jax.enable_x64(True)`"
            )


# --- layers -------------------------------------------------------------------------------------


class Linear(nn.Module):
    """y = x W (+ b), computed on (tokens, features): one plain matrix product on every backend."""

    features: int
    config: DecoderConfig
    stddev: float
    out_dtype: Any = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c, shape = self.config, (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.normal(self.stddev), shape, c.param_dtype)
        y = jnp.matmul(
            x.reshape(-1, x.shape[-1]), kernel.astype(x.dtype),
            preferred_element_type=self.out_dtype or x.dtype,
        )  # fmt: skip
        if c.bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,), c.param_dtype)
            y = y + bias.astype(y.dtype)
        return y.reshape(*x.shape[:-1], self.features)


def softcap(x: Array, cap: float) -> Array:
    """Return cap tanh(x / cap), or x where cap is 0 (Gemma 2 2024, arXiv 2408.00118, section 2)."""
    return cap * jnp.tanh(x / cap) if cap else x


class Attention(nn.Module):
    """Causal softmax attention with grouped keys and values: softmax(q k^T / sqrt(C)) v W_o."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        c = self.config
        batch, length, width = x_BTD.shape
        K, C, G = c.kv_head_count, c.head_width, c.heads // c.kv_head_count
        std = partial(c.initialization.stddev, width)
        gain = c.resolved_placement.branch_gain(c.depth)
        q = Linear(K * G * C, c, std(K * G * C), name="query")(x_BTD)
        k = Linear(K * C, c, std(K * C), name="key")(x_BTD)
        v = Linear(K * C, c, gain * std(K * C), name="value")(x_BTD)
        q = q.reshape(batch, length, K * G, C)
        k = k.reshape(batch, length, K, C)
        v = v.reshape(batch, length, K, C)
        if c.qk_norm:
            q, k = _norm_layer(c, "query_norm")(q), _norm_layer(c, "key_norm")(k)
        if c.positions == "rotary":
            angles = rotary_angles(length, C, dtype=_wide(q.dtype))
            q, k = rotate(q, angles), rotate(k, angles)
        # Laid out as plain batched products (B, K): twice as fast on a CPU as the einsum over the
        # heads where they stand. The G queries of a group are rows of one product.
        q_BKRC = _heads_first((q * C**-0.5).reshape(batch, length, K, G, C))
        k_BKSC, v_BKSC = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        logits = jnp.matmul(
            q_BKRC, k_BKSC.transpose(0, 1, 3, 2), preferred_element_type=_wide(q.dtype)
        )
        logits = softcap(logits, c.attention_softcap)
        causal = jnp.arange(length)[:, None] >= jnp.arange(length)[None, :]
        # The most negative finite number, not -inf: inf - inf in a derivative would be NaN.
        logits = jnp.where(jnp.tile(causal, (G, 1)), logits, jnp.finfo(logits.dtype).min)
        p_BKRS = jax.nn.softmax(logits, axis=-1).astype(v.dtype)
        o = (p_BKRS @ v_BKSC).reshape(batch, K, G, length, C)
        o = o.transpose(0, 3, 1, 2, 4).reshape(batch, length, K * G * C)
        out_std = gain * c.initialization.output_stddev(K * G * C, width, c.depth)
        return Linear(width, c, out_std, name="output")(o)


def _heads_first(q_BTKGC: Array) -> Array:
    """Return (B, K, R, C) with the R = G T rows of a group's queries, query head by query head."""
    batch, length, K, G, C = q_BTKGC.shape
    return q_BTKGC.transpose(0, 2, 3, 1, 4).reshape(batch, K, G * length, C)


class MLP(nn.Module):
    """W_out act(W_in x), or W_out (act(W_gate x) * W_in x) for gated nonlinearities."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c, width = self.config, x.shape[-1]
        act, gated = MLPS[c.mlp]
        gain = c.resolved_placement.branch_gain(c.depth)
        std = gain * c.initialization.stddev(width, c.hidden_width)
        hidden = Linear(c.hidden_width, c, std, name="in")(x)
        if gated:
            hidden = act(Linear(c.hidden_width, c, std, name="gate")(x)) * hidden
        else:
            hidden = act(hidden)
        out_std = gain * c.initialization.output_stddev(c.hidden_width, width, c.depth)
        return Linear(width, c, out_std, name="out")(hidden)


SUBLAYERS: dict[str, Callable[..., nn.Module]] = {"attention": Attention, "mlp": MLP}


def sublayers(config: DecoderConfig) -> tuple[str, ...]:
    """Names of the sub-layers that a block of this config has, in order.

    >>> sublayers(DecoderConfig(attention="none"))
    ('mlp',)
    """
    return tuple(name for name in SUBLAYERS if getattr(config, name) != "none")


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _norm_layer(config: DecoderConfig, name: str) -> NormLayer:
    return NormLayer(NORMS[config.norm], config.norm_eps, config.param_dtype, name=name)


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
        maps = {k: _norm_layer(self.config, k + "_norm") if on else _passed
                for k, on in norms.items()}  # fmt: skip
        branch = SUBLAYERS[self.branch](self.config, name="branch")
        return placements.combine(h, branch, **maps, a=a, b=b, c=c)


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
            h = _norm_layer(c, "final_norm")(h)
        if c.tied:
            # Products of narrow numbers, summed and kept in float32 at least.
            flat = jnp.matmul(
                h.reshape(-1, c.width), table_VD.astype(h.dtype).T,
                preferred_element_type=_wide(h.dtype),
            )  # fmt: skip
            logits = flat.reshape(*h.shape[:-1], self.vocabulary)
        else:
            out_std = c.initialization.stddev(c.width, self.vocabulary)
            logits = Linear(self.vocabulary, c, out_std, _wide(h.dtype), name="output")(h)
        return softcap(logits.astype(_wide(logits.dtype)), c.output_softcap)

    def _blocks(self, h: Array) -> Array:
        c = self.config
        block = nn.remat(Block, prevent_cse=not c.scan_layers) if c.remat else Block
        factors = _factors(c)

        def body(module: Block, carry: Array, varying: Any):
            rest = iter(varying)
            return module(carry, tuple(x if isinstance(x, float) else next(rest) for x in factors))

        scan = nn.scan(
            body, variable_axes={"params": 0}, split_rngs={"params": True},
            length=c.depth, unroll=1 if c.scan_layers else c.depth,
        )  # fmt: skip
        varying = tuple(x for x in factors if not isinstance(x, float))
        return scan(block(c, name="blocks"), h, varying)[0]


def _factors(config: DecoderConfig) -> list[Any]:
    """Return (a, b, c) of all blocks; see :func:`_per_block`."""
    place, dtype = config.resolved_placement, _wide(config.dtype)
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
        variables: Any = jax.jit(module.init)(key, jnp.zeros((1, self.window), jnp.int32))
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
        maps = {k: _applied(_norm_layer(self.config, k), params.get(k + "_norm", {})) if on
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
