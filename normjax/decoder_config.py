"""What a decoder is: its configuration, the tables of choices, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from normjax import configs, placement
from normjax.configs import field
from normjax.equation import MODEL_NORM, OnRows, Started, inner_norm
from normjax.errors import UserError
from normjax.initializers import INITIALIZERS, Initialization
from normjax.nonlinearities import NONLINEARITIES, Nonlinearity
from normjax.norms import NORMS, Norm
from normjax.placement import Placement
from normjax.placements import PLACEMENTS

MAX_DEPTH = 10_000
SCANNED_FROM = 8
"""Blocks from which on scanned ones compile faster than they cost in running."""
ATTENTIONS = ("softmax", "none")
POSITIONS = ("rotary", "learned", "none")
FINAL_NORMS = ("auto", "on", "off")
DTYPES = ("float32", "bfloat16", "float16", "float64")
LATER = (
    "head_features", "attention_scale", "rotary_base", "rotary_share", "local_blocks",
    "local_window", "local_rotary_base", "embedding_scale", "output_scale",
)  # fmt: skip
"""Fields that came after runs had been named; at its default none of them changes a name."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What the decoder is. Every field is a flag: ``--config.model.depth=8``."""

    depth: int = field(
        4, "number of blocks L; a block is attention and MLP", least=1, most=MAX_DEPTH
    )
    width: int = field(128, "features D of the residual stream", least=1, most=2**16)
    heads: int = field(4, "attention heads; must divide the width", least=1, most=2**16)
    kv_heads: int = field(
        0, "heads of keys and values, shared by groups of queries; 0: as heads", least=0, most=2**16
    )
    attention: str = field("softmax", "what mixes tokens", choices=ATTENTIONS)
    mlp: str = field(
        "gelu", "what the MLP computes with", choices=lambda: (*NONLINEARITIES, "none")
    )
    head_features: int = field(0, "features C of one head; 0: D / heads", least=0, most=2**16)
    attention_scale: float = field(
        0.0, "factor on the products of queries and keys; 0: 1/sqrt(C)", least=0, most=1e6
    )
    mlp_width: int = field(
        0, "hidden width of the MLP; 0: 4 D, or 8/3 D rounded to 8 for swiglu", least=0, most=2**20
    )
    positions: str = field("rotary", "how attention is told of order", choices=POSITIONS)
    rotary_base: float = field(
        10000.0, "base b of rotary positions, pair i turns by b^(-2 i / C) a token",
        above=1, most=1e12,
    )  # fmt: skip
    rotary_share: float = field(
        1.0, "share of a head's features, the first ones, that rotary positions turn",
        above=0, most=1,
    )  # fmt: skip
    local_blocks: tuple[int, ...] = field(
        (), "blocks, counted from 1, whose attention is local", least=1, most=MAX_DEPTH,
        distinct=True,
    )  # fmt: skip
    local_window: int = field(
        0, "tokens that local attention sees, the token itself included; 0: all before it",
        least=0, most=2**30,
    )  # fmt: skip
    local_rotary_base: float = field(
        0.0, "base of rotary positions in local blocks; 0: as in the others", least=0, most=1e12
    )
    norm: str = field("rmsnorm", "every norm of the decoder", choices=NORMS)
    norm_eps: float = field(1e-6, "eps of every norm, inside the root", least=0, most=1e6)
    placement: str = field("pre", "where the norm stands", choices=PLACEMENTS)
    residual: bool = field(True, "false: no residual path (a = 0), for any placement")
    final_norm: str = field(
        "auto", "norm before the output layer; auto: by placement", choices=FINAL_NORMS
    )
    qk_norm: bool = field(False, "normalize queries and keys")
    qk_norm_over: str = field(
        "head", "what qk_norm takes its statistics from: each head, or all heads together",
        choices=("head", "heads"),
    )  # fmt: skip
    attention_softcap: float = field(
        0.0, "cap c of attention logits, c tanh(x/c); 0: none", least=0, most=1e6
    )
    output_softcap: float = field(
        0.0, "cap c of output logits, c tanh(x/c); 0: none", least=0, most=1e6
    )
    embedding_scale: float = field(
        1.0, "factor on the token embedding where it is read", above=0, most=1e6
    )
    output_scale: float = field(
        1.0, "factor on the output logits, before their cap", above=0, most=1e6
    )
    bias: bool = field(False, "biases in the linear layers")
    tied: bool = field(True, "the output layer is the transposed token embedding")
    init: str = field(
        "auto", "initialization; auto: the placement's own, else gpt2",
        choices=lambda: ("auto", *INITIALIZERS),
    )  # fmt: skip
    dtype: str = field(
        "float32", "of the computation; logits and loss are float32 at least", choices=DTYPES
    )
    param_dtype: str = field("float32", "of the parameters", choices=DTYPES)
    scan_layers: bool = field(False, "scan the blocks: compile time independent of depth")
    remat: bool = field(False, "recompute activations of a block in the backward pass")

    @property
    def head_width(self) -> int:
        """Width C of one head."""
        return self.head_features or self.width // self.heads

    @property
    def attention_factor(self) -> float:
        """Factor on the products of queries and keys."""
        return self.attention_scale or self.head_width**-0.5

    @property
    def rotary_width(self) -> int:
        """Features of a head that rotary positions turn: the first ones."""
        return int(self.head_width * self.rotary_share)

    @property
    def kv_head_count(self) -> int:
        """Heads K of keys and values."""
        return self.kv_heads or self.heads

    @property
    def hidden_width(self) -> int:
        """Width F of the MLP's hidden layer."""
        if self.mlp_width:
            return self.mlp_width
        gated = "mlp" in self.sublayers and self.mlp_row.gated
        return max(8, round(self.width * 8 / 3 / 8) * 8) if gated else 4 * self.width

    # --- rows: a field holds the name of one or the row itself; these are the rows ----------------

    @property
    def placement_row(self) -> Placement:
        """The placement, with A = 0 where the residual path is removed."""
        row = _row(PLACEMENTS, self.placement)
        return row if self.residual else row.without_residual()

    @property
    def norm_row(self) -> Norm:
        """The norm of every slot that names none of its own."""
        return _row(NORMS, self.norm)

    def norm_of(self, held: Any) -> Norm:
        """Return the norm that a slot holds, as a row.

        Raises:
          UserError: a gain that starts otherwise, of a norm that has none.
        """
        if isinstance(held, OnRows):
            return self.norm_of(held.norm)
        if isinstance(held, Started):
            return self.norm_of(held.norm).starting(gain=held.gain)
        return self.norm_row if held == MODEL_NORM else held

    @property
    def mlp_row(self) -> Nonlinearity:
        """The nonlinearity of the MLP."""
        return _row(NONLINEARITIES, self.mlp)

    @property
    def sublayers(self) -> tuple[str, ...]:
        """Names of the sub-layers that a block has, in order."""
        return tuple(name for name in ("attention", "mlp") if getattr(self, name) != "none")

    @property
    def inner_norms(self) -> dict[str, str]:
        """What is normalized inside of the branches, and over what: each "head" by itself, or all
        "heads" together. Where the placement says something, that holds."""
        asked = dict.fromkeys(("query", "key") if self.qk_norm else (), self.qk_norm_over)
        own = [self.placement_row.of(branch).inner_norms for branch in ("attention", "mlp")]
        return asked | dict(map(inner_norm, (*own[0], *own[1])))

    @property
    def rows(self) -> int:
        """Streams, or sources, of the state; 1 for a plain residual stream."""
        streams = self.placement_row.streams
        return streams.rows(self.depth * len(self.sublayers)) if streams else 1

    @property
    def state_width(self) -> int:
        """Features of the state: all its rows, one behind the other."""
        return self.rows * self.width

    def with_rows(self) -> DecoderConfig:
        """Return it with rows in place of names: what the table holds later does not matter."""
        values: dict[str, Any] = {
            "placement": _row(PLACEMENTS, self.placement), "norm": self.norm_row,
        }  # fmt: skip
        if "mlp" in self.sublayers:
            values["mlp"] = self.mlp_row
        return dataclasses.replace(self, **values)

    def with_norms(self, function: Callable[[Norm], Norm]) -> DecoderConfig:
        """Return it with ``function`` of every norm that it has."""
        placement, norm = self.placement_row.with_norms(function), function(self.norm_row)
        return dataclasses.replace(self, placement=placement, norm=norm)

    def identity(self) -> dict[str, Any]:
        """Return what defines the decoder as JSON: its fields, and the numbers behind the names.

        Fields of :data:`LATER` that stand at their default are left out: names of runs hash this.
        """
        usual = DecoderConfig()
        fields = configs.to_dict(self)
        for name in LATER:
            if getattr(self, name) == getattr(usual, name):
                del fields[name]
        return fields | {"rows": decided(self.record())}

    def record(self) -> dict[str, Any]:
        """Return the rows that it names as JSON: the numbers behind the names."""
        kinds = {"norm": self.norm_row.record()}
        if "mlp" in self.sublayers:
            kinds["mlp"] = self.mlp_row.record()
        return {
            "placement": self.placement_row.record(self.depth),
            "has_final_norm": self.has_final_norm, **kinds,
            "init": self.initialization.record(self.width, self.hidden_width, self.depth),
        }  # fmt: skip

    @property
    def has_final_norm(self) -> bool:
        """Whether the stream is normalized before the output layer."""
        if self.final_norm == "auto":
            return self.placement_row.final_norm
        return self.final_norm == "on"

    @property
    def initialization(self) -> Initialization:
        """The row of the initialization table."""
        chosen = self.init if self.init != "auto" else self.placement_row.init or "gpt2"
        return _row(INITIALIZERS, chosen)


def decided(record: Any) -> Any:
    """Return a record of rows without what only readers see.

    >>> decided({"keep": 1.0, "shown": {"title": "pre-norm"}})
    {'keep': 1.0}
    """
    if isinstance(record, dict):
        return {k: decided(v) for k, v in record.items() if k != "shown"}
    return [decided(v) for v in record] if isinstance(record, list) else record


def _row(table: Any, value: Any) -> Any:
    return table[value] if isinstance(value, str) else value


def check(config: DecoderConfig, prefix: str = "config.model") -> None:
    """Raise :class:`UserError` for a decoder that cannot be built, naming field, value and fix."""
    configs.check(config, prefix)
    c = config
    placement.check(c.placement_row, c.depth)
    if c.placement_row.pairs and len(c.sublayers) != 2:
        raise UserError(
            f"{prefix}.placement={c.placement_row.title}: needs attention and an MLP in each block,"
            " between which its streams alternate; use both, or another placement"
        )
    if c.width % c.heads and not c.head_features:
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
    if c.positions == "rotary" and c.attention != "none":
        _check_rotary(c, prefix)
    if beyond := [block for block in c.local_blocks if block > c.depth]:
        raise UserError(
            f"{prefix}.local_blocks={configs.shown(c.local_blocks)}: there is no block"
            f" {beyond[0]} at depth={c.depth}; name blocks from 1 to {c.depth}"
        )
    if 0 < c.local_rotary_base <= 1:
        raise UserError(
            f"{prefix}.local_rotary_base={c.local_rotary_base:g}: must be above 1, or 0 for that of"
            f" the other blocks; pass --{prefix}.local_rotary_base=10000"
        )
    for name in ("dtype", "param_dtype"):
        if getattr(c, name) == "float64" and not jax.config.read("jax_enable_x64"):
            raise UserError(
                f"{prefix}.{name}=float64: needs 64-bit mode; set JAX_ENABLE_X64=1, or in Python"
                " use `with jax.enable_x64(True)`"
            )


def _check_rotary(c: DecoderConfig, prefix: str) -> None:
    if c.head_width % 2 and c.rotary_share == 1:
        field = "head_features" if c.head_features else "heads"
        share = "" if c.head_features else f"{c.width}/{c.heads} = "
        raise UserError(
            f"{prefix}.{field}={getattr(c, field)}: rotary positions need an even head width, not"
            f" {share}{c.head_width}; change {field}, or use positions=learned"
        )
    if c.rotary_width % 2 or not c.rotary_width:
        raise UserError(
            f"{prefix}.rotary_share={c.rotary_share:g}: must turn an even number of the"
            f" {c.head_width} features of a head, not {c.rotary_width}; for example"
            f" {2 / c.head_width:g}"
        )
