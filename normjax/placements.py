"""Where the normalization stands: the table of placements, each a value of the one equation.

A :class:`Placement` says what every sub-layer puts into ``equation.fold``, how the streams begin
and are read out, how weights start and what happens to them after a step. Adding a row, here or in
a file of one's own, is all it takes to have it trained, verified, measured, drawn and explained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from normjax.equation import INNER, MODEL_NORM, SHARED_NORM, Learned, Sublayer
from normjax.errors import UserError
from normjax.mixing import LearnedWeights, SoftmaxOverSources, Streams, append, nth, one_hot
from normjax.registry import Registry


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
      after_step: what is done to the parameters after every optimizer step, ``params -> params``.
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
    after_step: Callable[[Any], Any] | None = None
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

    def record(self, depth: int) -> dict[str, Any]:
        """Return it as JSON, as a decoder of that depth has it: all that decides numbers.

        What only readers see stands under "shown".

        >>> PLACEMENTS["deepnorm"].record(8)["attention"]["keep"]
        2.0
        """
        return {
            "attention": self.attention.record(depth),
            "mlp": self.of("mlp").record(depth),
            "final_norm": self.final_norm,
            "streams": self.streams and self.streams.record(),
            "branch_gain": self.branch_gain(depth),
            "after_step": self.after_step and getattr(self.after_step, "__name__", "a function"),
            "shown": {
                "name": self.name, "title": self.title, "source": self.source,
                "summary": self.summary, "action": self.action, "colour": self.colour,
            },
        }  # fmt: skip


def register_placement(name: str, row: Placement, *, replace: bool = False) -> Placement:
    """Add a placement to the table under a name, and return it with that name.

    From then on ``--config.model.placement=NAME`` trains it, and everything that goes through the
    table (Jacobians, spectra, stability map, pages) has it too.

    Args:
      name: a small letter, then small letters, digits or underscores.
      row: the placement.
      replace: whether a name that is taken may get another row.

    Raises:
      UserError: a name that is none or taken; a row that is no placement, or that cannot be one.

    >>> row = Placement("half", "mine", Sublayer(pre_norm=MODEL_NORM, keep=0.5), final_norm=True)
    >>> register_placement("half", row).record(4)["attention"]["keep"]
    0.5
    >>> del PLACEMENTS["half"]
    """
    if not isinstance(row, Placement):
        raise UserError(f"placement {name!r}: must be a normjax.Placement, not {row!r}")
    check(row)
    return PLACEMENTS.register(name, dataclasses.replace(row, name=name), replace=replace)


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
        if unknown:
            raise UserError(
                f"{where}: inner_norms has {unknown[0]!r}; must be query, key, value, each with or"
                " without ' over heads'"
            )


_PRE = Sublayer(pre_norm=MODEL_NORM)

_ROWS = {
    "pre": Placement(
        "pre-norm", "Xiong et al. 2020, arXiv 2002.04745", _PRE, final_norm=True,
        summary="the branch reads the normalized stream",
        action="normalizing before each branch",
    ),
    "post": Placement(
        "post-norm", "Vaswani et al. 2017, arXiv 1706.03762", Sublayer(post_norm=MODEL_NORM),
        summary="the sum is normalized", action="normalizing after the addition",
        colour="#56b4e9",
    ),
    "none": Placement(
        "no norm", "h + F(h)", summary="nothing is normalized", action="removing normalization",
        colour="#e69f00",
    ),
    "sandwich": Placement(
        "sandwich", "Ding et al. 2021, arXiv 2105.13290; Kim et al. 2025, arXiv 2502.02732",
        Sublayer(pre_norm=MODEL_NORM, branch_norm=MODEL_NORM), final_norm=True,
        summary="the branch's input and its output are normalized",
        action="normalizing before and after each branch", colour="#009e73",
    ),
    "branch_output": Placement(
        "branch-output norm", "Liu et al. 2021, arXiv 2111.09883; OLMo 2 2024, arXiv 2501.00656",
        Sublayer(branch_norm=MODEL_NORM), final_norm=True,
        summary="the branch's output is normalized",
        action="normalizing only the output of each branch", colour="#0072b2",
    ),
    "deepnorm": Placement(
        "DeepNorm", "Wang et al. 2022, arXiv 2203.00555, table of section 4, decoder-only",
        Sublayer(post_norm=MODEL_NORM, keep=lambda block, depth: (2 * depth) ** 0.25),
        init="xavier", branch_gain=lambda depth: (8 * depth) ** -0.25,
        summary="post-norm with a stronger residual path and smaller initial branches",
        action="using DeepNorm", colour="#cc79a7",
    ),
    "layernorm_scaling": Placement(
        "LayerNorm scaling", "Sun et al. 2025, arXiv 2502.05795",
        Sublayer(pre_norm=MODEL_NORM, scale=lambda block, depth: block**-0.5), final_norm=True,
        init="gpt2_plain", summary="deeper branches read a smaller normalized stream",
        action="scaling what each branch reads by its depth", colour="#882255",
    ),
    "skipinit": Placement(
        "SkipInit", "De and Smith 2020, arXiv 2002.10444", Sublayer(write=Learned(0.0)),
        summary="no norm; every branch starts at zero times a learned number",
        action="starting every branch at zero, without norms", colour="#999933",
    ),
    "layerscale": Placement(
        "LayerScale", "Touvron et al. 2021, arXiv 2103.17239, eq. 4",
        Sublayer(
            pre_norm=MODEL_NORM,
            write=Learned(
                lambda block, depth: 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6,
                "feature",
            ),
        ),
        final_norm=True, summary="pre-norm; each feature of a branch starts small",
        action="scaling each feature of a branch by a learned number", colour="#332288",
    ),
    "rezero": Placement(
        "ReZero", "Bachlechner et al. 2020, arXiv 2003.04887",
        Sublayer(write=Learned(0.0, shared=True)),
        summary="no norm; the branches of a block start at zero times one learned number",
        action="starting every block at zero, without norms", colour="#8c6d4f",
    ),
    "hybridnorm": Placement(
        "HybridNorm", "Zhuo et al. 2025, arXiv 2503.04598, as its released code has it",
        Sublayer(inner_norms=("query", "key", "value")),
        Sublayer(pre_norm=MODEL_NORM, skip_norm=SHARED_NORM), final_norm=True,
        summary="queries, keys and values are normalized; the MLP's norm is on the stream itself",
        action="normalizing queries, keys and values, and the stream before each MLP",
        colour="#0f5257",
    ),
    "hyper_connections": Placement(
        "hyper-connections, 2 streams", "Zhu et al. 2024, arXiv 2409.19606, static, eq. 1",
        Sublayer(
            pre_norm=MODEL_NORM, read=LearnedWeights("r", nth), keep=LearnedWeights("A", one_hot),
            write=LearnedWeights("b", lambda position, rows: [[1.0]] * rows),
        ),
        streams=Streams(2, "copies"), final_norm=True,
        summary="two streams, read, kept and written with learned weights",
        action="mixing two streams with learned weights", colour="#b33a3a",
    ),
    "attention_residuals": Placement(
        "attention residuals", "Moonshot AI 2026, arXiv 2603.15031, full",
        Sublayer(pre_norm=MODEL_NORM, read=SoftmaxOverSources("softmax"), write=append),
        streams=Streams(lambda sublayers: sublayers + 1, "first", SoftmaxOverSources("softmax")),
        final_norm=True, summary="each branch reads a learned softmax mix of all earlier outputs",
        action="reading a learned mix of all earlier outputs", colour="#5b5ea6",
    ),
}  # fmt: skip

PLACEMENTS: Registry[Placement] = Registry(
    "placement", {name: dataclasses.replace(row, name=name) for name, row in _ROWS.items()}
)
