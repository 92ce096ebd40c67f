"""What a placement is: a value of the one equation, with what belongs to it.

A :class:`Placement` says what every sub-layer puts into ``equation.fold``, how the streams begin
and are read out, how weights start and what happens to them after a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from normjax.equation import (
    FACTORS,
    INNER,
    SHARED_NORM,
    SLOTS,
    Learned,
    OnRows,
    Started,
    Sublayer,
    plain,
)
from normjax.errors import UserError
from normjax.mixing import Streams


@dataclasses.dataclass(frozen=True)
class Placement:
    """One value of the equation.

    Attributes:
      title: what a legend calls it.
      source: where it comes from.
      attention: what the attention sub-layers have; ``mlp``: the MLPs', None for the same.
      final_norm: whether the decoder normalizes the stream once more before the output layer;
        streams that a post-norm has just normalized do not need it.
      streams: how many streams the state has, how they begin and how they are read; None: one.
      init: the initialization it was published with, a name or a rule; "" for the model's own.
      branch_gain: factor on the initial value, output and MLP weights, as a function of depth.
      embedding_gain: the same on the initial token embedding.
      embedding_norm: what a slot holds, on the state before the first block; None for none.
      after_init: what is done to fresh parameters, ``(model, params) -> params``; traceable.
      after_step: what is done to the parameters after every optimizer step, ``params -> params``.
      pairs: whether its streams take for granted that attention and MLP alternate.
      value_gain: a further factor on the initial value weights.
      summary: what it does, in a few words, for lists of placements.
      action: what changing to it does, as a gerund, for sentences.
      colour: of its curves in every figure, as #rrggbb; "" for one that is free.
      name: in the table; set by :func:`register_placement`.
    """

    title: str
    source: str
    attention: Sublayer = Sublayer()
    mlp: Sublayer | None = None
    final_norm: bool = False
    streams: Streams | None = None
    init: Any = ""
    branch_gain: Callable[[int], float] = lambda depth: 1.0
    embedding_gain: Callable[[int], float] = lambda depth: 1.0
    embedding_norm: Any = None
    after_init: Callable[[Any, Any], Any] | None = None
    after_step: Callable[[Any], Any] | None = None
    pairs: bool = False
    value_gain: float = 1.0
    summary: str = ""
    action: str = ""
    colour: str = ""
    name: str = ""

    def of(self, branch: str) -> Sublayer:
        """Return what the sub-layers of a branch, "attention" or "mlp", have."""
        return self.mlp if branch == "mlp" and self.mlp is not None else self.attention

    def without_residual(self) -> Placement:
        """The same placement with A = 0: only the branch is passed on."""
        mlp = self.mlp and dataclasses.replace(self.mlp, keep=0.0)
        return dataclasses.replace(
            self, title=self.title + ", no residual", mlp=mlp,
            attention=dataclasses.replace(self.attention, keep=0.0),
        )  # fmt: skip

    def with_norms(self, function: Callable[[Any], Any]) -> Placement:
        """The same placement with ``function`` of every row of the table of norms that it names.

        >>> Placement("mine", "", Sublayer(post_norm="model")).with_norms(repr).attention.post_norm
        'model'
        """

        def of(held: Any) -> Any:
            if held is None or isinstance(held, str):
                return held
            if isinstance(held, OnRows | Started):
                return dataclasses.replace(held, norm=of(held.norm))
            if not hasattr(held, "record"):  # a schedule
                return lambda block, depth: of(held(block, depth))
            return function(held)

        def those(row: Sublayer | None) -> Sublayer | None:
            if row is None:
                return None
            return dataclasses.replace(row, **{slot: of(getattr(row, slot)) for slot in SLOTS})

        streams = self.streams and dataclasses.replace(self.streams, norm=of(self.streams.norm))
        return dataclasses.replace(
            self, attention=those(self.attention), mlp=those(self.mlp), streams=streams,
            embedding_norm=of(self.embedding_norm),
        )  # fmt: skip

    def record(self, depth: int) -> dict[str, Any]:
        """Return it as JSON, as a decoder of that depth has it: all that decides numbers.

        What only readers see stands under "shown".

        >>> Placement("half", "mine", Sublayer(keep=0.5)).record(8)["attention"]["keep"]
        0.5
        """
        return {
            "attention": self.attention.record(depth),
            "mlp": self.of("mlp").record(depth),
            "final_norm": self.final_norm,
            "streams": self.streams and self.streams.record(),
            "branch_gain": self.branch_gain(depth),
            "value_gain": self.value_gain,
            "embedding_gain": self.embedding_gain(depth),
            "embedding_norm": plain(self.embedding_norm),
            "after_init": self.after_init and getattr(self.after_init, "__name__", "a function"),
            "after_step": self.after_step and getattr(self.after_step, "__name__", "a function"),
            "shown": {
                "name": self.name, "title": self.title, "source": self.source,
                "summary": self.summary, "action": self.action, "colour": self.colour,
            },
        }  # fmt: skip


def check(row: Placement, depth: int = 12) -> None:
    """Raise :class:`UserError` for a placement that contradicts itself in a decoder of a depth."""
    many = row.streams is not None
    for branch, own in (("attention", row.attention), ("mlp", row.of("mlp"))):
        where = f"placement {row.title!r}, {branch}"
        if many != (own.read is not None):
            needs = "read: weights that read the branch's input from the streams" if many else (
                "streams=normjax.Streams(...) beside read"
            )  # fmt: skip
            raise UserError(f"{where}: must have {needs}")
        every = (True,) * depth
        shares = SHARED_NORM in own.norms("skip_norm", depth)
        if shares and list(own.norms("pre_norm", depth).values()) != [every]:
            raise UserError(
                f"{where}: skip_norm=SHARED_NORM needs a pre_norm to share, one for all blocks;"
                " name it, or give the skip norm parameters of its own"
            )
        known = [f"{name}{over}" for over in ("", " over heads") for name in INNER]
        unknown = [entry for entry in own.inner_norms if entry not in known]
        held = [norm for slot in SLOTS for norm in own.norms(slot, depth)]
        if not many and any(isinstance(norm, OnRows) for norm in held):
            raise UserError(f"{where}: has OnRows in a slot, and no streams whose rows these are")
        for name in FACTORS:
            factor = getattr(own, name)
            if isinstance(factor, Learned) and factor.shared and factor.name:
                raise UserError(f"{where}, {name}: what a block shares goes by its factor's name")
        if unknown:
            raise UserError(
                f"{where}: inner_norms has {unknown[0]!r}; must be of {', '.join(INNER)}, each with"
                " or without ' over heads'"
            )
