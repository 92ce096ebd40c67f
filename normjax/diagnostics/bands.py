"""Within what bounds a diagnostic is called healthy: one table, a row with reason and source each.

A band bounds a ratio: the value itself, or the value over a reference taken from the same run. The
bounds are rules of thumb, wide on purpose: they say where to look, not what is wrong. Every one can
be changed: ``--config.verdict.bands=attention/logit_max::50,mlp/dead_share::``. Each comes with
planted runs that it must notice and healthy ones that it must not: tests/planted.py.

Where every step measures a diagnostic, a band is held against the extremes of all steps, whatever
was sampled; elsewhere against every sample. One value outside is a departure: more samples can add
departures and take none away.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from normjax.configs import field
from normjax.diagnostics import definitions
from normjax.errors import UserError, suggest

AGAINST = ("value", "start", "warm-up", "layers", "expected")
"""What a value is divided by before it is compared with the bounds.

value: 1. start: the same place at the first step. warm-up: the same place at the step that ends the
warm-up; where samples alone tell, any sample before it from there on. layers: the median of the
other layers at that step. expected: what the placement's row says beforehand; see ``evidence``.
"""
IN_WORDS = {
    "value": "", "start": " times its first value", "warm-up": " times its value after warm-up",
    "layers": " times the median of the other layers",
    "expected": " times what its placement starts with",
}  # fmt: skip
NEEDS = {
    "value": "a measurement", "start": "step 0 and a later step",
    "warm-up": "the end of the warm-up and a later step",
    "layers": "a measurement of two layers", "expected": "every step",
}  # fmt: skip
"""Which measurements a band cannot do without."""
DRIFTS, IDLES, JUMPS = "drift", "idle", "spike"
"""What a departure means: something moved off, a part does nothing, a jump from step to step."""


@dataclasses.dataclass(frozen=True)
class Band:
    """Where a diagnostic may lie.

    Attributes:
      diagnostic: its name, without brackets.
      low: least healthy ratio; -inf: none.
      high: largest healthy ratio; inf: none.
      against: one of :data:`AGAINST`: what the ratio is taken to.
      part: pattern of what the brackets of the name hold, such as ``*.kernel``.
      reason: what lies beyond, in words.
      source: who found it.
      kind: what a departure means, "drift", "idle" or "spike".
      always: whether only a value outside at *every* step is a departure; needs all steps.
      one_sided: why there is no bound on the other side; "" for a band with both.
      blamed: "" or, for a ratio from end to end, the diagnostic whose place has the largest part
        in it: that place is named.
    """

    diagnostic: str
    low: float = -math.inf
    high: float = math.inf
    against: str = "value"
    part: str = "*"
    reason: str = ""
    source: str = ""
    kind: str = DRIFTS
    always: bool = False
    one_sided: str = ""
    blamed: str = ""

    def covers(self, name: str) -> bool:
        """Whether the band bounds the diagnostic of a name with brackets.

        >>> Band("gain/max", part="*.pre_norm").covers("gain/max[mlp.pre_norm]")
        True
        """
        diagnostic, part = definitions.split(name)
        return diagnostic == self.diagnostic and fnmatchcase(part, self.part)

    @property
    def needs(self) -> str:
        """What must have been measured for the band to be judged, in words."""
        return NEEDS["expected"] if self.always else NEEDS[self.against]

    @property
    def text(self) -> str:
        """The band as it is given in a configuration.

        >>> Band("attention/logit_max", high=50.0).text
        'attention/logit_max::50'
        """
        name = self.diagnostic + (f"[{self.part}]" if self.part != "*" else "")
        bounds = ("" if math.isinf(x) else f"{x:.12g}" for x in (self.low, self.high))
        return ":".join((name, *bounds, *([self.against] if self.against != "value" else [])))


_LOGITS = "Dehghani et al. 2023, arXiv 2302.05442; Wortsman et al. 2023, arXiv 2309.14322"
_DEPTH = "Glorot and Bengio 2010; Xiong et al. 2020, arXiv 2002.04745, numbers: "
_RULE = "rule of thumb of this project"

BANDS: tuple[Band, ...] = (
    Band(
        "gain/max", high=10.0, reason="a gain runs away: it takes over the scale of its layer",
        source=_RULE, one_sided="the smallest gain has a band of its own",
    ),
    Band(
        "gain/min", low=-10.0, reason="a gain runs away, with its sign turned", source=_RULE,
        one_sided="the largest gain has a band of its own",
    ),
    Band(
        "branch/stream_ratio", high=300.0,
        reason="one branch writes far more than the stream holds: it drowns what came before",
        source=_RULE, one_sided="a branch that writes little at some steps is no fault; at all"
        " steps: the next band",
    ),
    Band(
        "branch/stream_ratio", low=1e-3, against="expected", kind=IDLES, always=True,
        reason="the branch writes next to nothing: the block is as if it had none",
        source=_RULE, one_sided="a branch that writes much has the band above",
    ),
    Band(
        "residual/rms_before", low=1e-6, high=1e4,
        reason="the stream nears what half precision can hold (6e-8 to 65504)", source="IEEE 754",
    ),
    Band(
        "residual/rms_after", low=0.1, high=20.0, against="warm-up",
        reason="the stream does not keep its size; beside a stream that grows, later branches lose"
        " their say", source="Liu et al. 2020, arXiv 2004.08249 (amplification), numbers: " + _RULE,
    ),
    Band(
        "residual/depth_ratio", low=1e-3, high=1e3, blamed="residual/transfer",
        reason="the stream vanishes or explodes on its way through the layers",
        source=_DEPTH + _RULE,
    ),
    Band(
        "residual/token_similarity", high=0.99,
        reason="rank collapse: all tokens have become one direction",
        source="Dong et al. 2021, arXiv 2103.03404; Noci et al. 2022, arXiv 2206.03126",
        one_sided="tokens without any likeness are healthy",
    ),
    Band(
        "attention/logit_max", high=1000.0,
        reason="attention logits grow: runs diverge with logits in the thousands", source=_LOGITS,
        one_sided="small logits at some steps are no fault; at all steps: the next band",
    ),
    Band(
        "attention/logit_max", low=1e-3, kind=IDLES, always=True,
        reason="all keys have one logit: attention is a plain mean over what came before",
        source=_RULE, one_sided="large logits have the band above",
    ),
    Band(
        "attention/collision_share", low=1e-7,
        reason="entropy collapse: every query of the head looks at one token only, and its softmax"
        " passes no gradient on", source="Zhai et al. 2023, arXiv 2303.06296",
        one_sided="uniform attention is usual at the start; for good: the band of small logits",
    ),
    Band(
        "attention/head_share", low=1e-3, kind=IDLES, always=True,
        reason="the head is dead: it writes next to nothing of what its block writes",
        source="Michel et al. 2019, arXiv 1905.10650, number: " + _RULE,
        one_sided="a block whose heads but one are dead is told by those",
    ),
    Band(
        "mlp/dead_share", high=0.9, kind=IDLES, reason="nearly all hidden units are dead",
        source="Lu et al. 2019, arXiv 1903.06733", one_sided="a share of 0 is the best",
    ),
    Band(
        "loss/value", high=1.25, against="start",
        reason="the loss is above where the run began", source=_RULE,
        one_sided="a loss is meant to fall; one that does not is told against its references",
    ),
    Band(
        "loss/jump", high=1.5, kind=JUMPS, reason="the loss jumps from one step to the next",
        source=_RULE, one_sided="a loss is meant to fall",
    ),
    Band(
        "gradient/depth_ratio", low=1e-4, high=1e4, blamed="gradient/transfer",
        reason="the gradient vanishes or explodes on its way through the layers",
        source=_DEPTH + _RULE,
    ),
    Band(
        "gradient/norm", high=100.0, against="warm-up", reason="the gradient norm grows",
        source="Wortsman et al. 2023, arXiv 2309.14322, number: " + _RULE,
        one_sided="a gradient falls as a model learns",
    ),
    Band(
        "gradient/jump", high=100.0, kind=JUMPS,
        reason="the gradient norm jumps from one step to the next", source=_RULE,
        one_sided="a gradient falls as a model learns",
    ),
    Band(
        "update/block_ratio", high=0.3, reason="a step changes the matrices by much of themselves;"
        " about 1e-3 is usual", source="a common rule; You et al. 2017, arXiv 1708.03888",
        one_sided="small steps are usual at both ends of a run; at all steps: the next band",
    ),
    Band(
        "update/block_ratio", low=1e-5, kind=IDLES, always=True,
        reason="no step changes the matrices by more than next to nothing of themselves",
        source="You et al. 2017, arXiv 1708.03888, number: " + _RULE,
        one_sided="large steps have the band above",
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class VerdictConfig:
    """How runs are judged. Every field is a flag: ``--config.verdict.loss_spike=2``."""

    bands: tuple[str, ...] = field(
        (), "bands of diagnostics, name:low:high or name:low:high:against, in place of the table's;"
        " name:: for none",
    )  # fmt: skip
    loss_spike: float = field(
        1.5, "a loss of so many times its running mean is a spike", above=1, most=1e30
    )
    margin: float = field(
        0.05, "a final loss must be so many nats below the unigram loss for a run to have learned,"
        " below the bigram loss for more than the last token to show",
        least=0, most=1e6,
    )  # fmt: skip
    gradient_spike: float = field(
        100.0, "a gradient norm of so many times its running mean is a spike", above=1, most=1e30
    )


def parse(text: str) -> Band:
    """Return the band that ``name:low:high`` or ``name:low:high:against`` means.

    Raises:
      UserError: it is no such text.

    >>> parse("residual/rms_after::5:start").high
    5.0
    """
    name, *rest = text.split(":")
    form = "must be name:low:high or name:low:high:against, such as attention/logit_max::50"
    if len(rest) not in (2, 3):
        raise UserError(f"config.verdict.bands={text}: {form}")
    diagnostic, part = definitions.split(name)
    if diagnostic not in definitions.DIAGNOSTICS:
        raise UserError(
            f"config.verdict.bands={text}: there is no diagnostic {diagnostic}"
            f"{suggest(diagnostic, definitions.DIAGNOSTICS) or '; ' + form}"
        )
    ends = (-math.inf, math.inf)
    try:
        low, high = (float(x) if x.strip() else end for x, end in zip(rest, ends, strict=False))
    except ValueError:
        raise UserError(f"config.verdict.bands={text}: bounds must be numbers; {form}") from None
    if not low < high:
        raise UserError(f"config.verdict.bands={text}: low must be below high; {form}")
    against = rest[2] if len(rest) == 3 else "value"
    if against not in AGAINST:
        raise UserError(
            f"config.verdict.bands={text}: against={against} must be one of {', '.join(AGAINST)}"
            f"{suggest(against, AGAINST)}"
        )
    return Band(diagnostic, low, high, against, part or "*", "outside the configuration's band",
                "configuration", one_sided="as configured")  # fmt: skip


def of(config: VerdictConfig) -> tuple[Band, ...]:
    """Return the bands of a configuration: its own, and what it says of spikes.

    Raises:
      UserError: a text is no band.
    """
    own = {parse(text).diagnostic for text in config.bands}
    spikes = {"loss/jump": config.loss_spike, "gradient/jump": config.gradient_spike}
    return tuple(
        dataclasses.replace(band, high=spikes[band.diagnostic])
        if band.diagnostic in spikes and band.diagnostic not in own else band
        for band in adjusted(config.bands)
    )  # fmt: skip


def adjusted(texts: Sequence[str]) -> tuple[Band, ...]:
    """Return the table with the bands of a configuration: they replace those of their diagnostics.

    Raises:
      UserError: a text is no band.

    >>> len(adjusted(["mlp/dead_share::"])) == len(BANDS) - 1
    True
    """
    own = [parse(text) for text in texts]
    named = {band.diagnostic for band in own}
    kept = [band for band in (*BANDS, *own) if band.diagnostic not in named or band in own]
    return tuple(band for band in kept if not (math.isinf(band.low) and math.isinf(band.high)))
