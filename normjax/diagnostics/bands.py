"""Within what bounds a diagnostic is called healthy: one table, a row with reason and source each.

A band bounds a ratio: the value itself, or the value over a reference taken from the same run. The
bounds are rules of thumb, wide on purpose: they say where to look, not what is wrong. Every one can
be changed: ``--config.verdict.bands=attention/logit_max::50,mlp/dead_share::``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

from normjax.configs import field
from normjax.diagnostics import definitions
from normjax.errors import UserError, suggest

AGAINST = ("value", "start", "warm-up", "layers")
"""What a value is divided by before it is compared with the bounds.

value: 1. start: the same place at the first measured step. warm-up: the same place at the first
measured step from the end of the warm-up on. layers: the median of the other layers at that step.
"""
IN_WORDS = {
    "value": "", "start": " times its first value", "warm-up": " times its value after warm-up",
    "layers": " times the median of the other layers",
}  # fmt: skip


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
    """

    diagnostic: str
    low: float = -math.inf
    high: float = math.inf
    against: str = "value"
    part: str = "*"
    reason: str = ""
    source: str = ""

    def covers(self, name: str) -> bool:
        """Whether the band bounds the diagnostic of a name with brackets.

        >>> Band("gain/max", part="*.pre_norm").covers("gain/max[mlp.pre_norm]")
        True
        """
        diagnostic, part = definitions.split(name)
        return diagnostic == self.diagnostic and fnmatchcase(part, self.part)

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
_RULE = "rule of thumb of this project"

BANDS: tuple[Band, ...] = (
    Band(
        "gain/max", high=10.0, reason="a gain runs away: it takes over the scale of its layer",
        source=_RULE,
    ),
    Band("gain/min", low=-10.0, reason="a gain runs away, with its sign turned", source=_RULE),
    Band(
        "branch/rms", high=100.0, against="layers",
        reason="one branch writes far more than the others: it drowns them in the stream",
        source=_RULE,
    ),
    Band(
        "residual/rms_after", high=1e4,
        reason="the stream nears what half precision can hold (65504)", source="IEEE 754",
    ),
    Band(
        "residual/rms_after", high=100.0, against="warm-up",
        reason="the stream grows without end; small next to it, later branches lose their say",
        source="Liu et al. 2020, arXiv 2004.08249 (amplification), number: " + _RULE,
    ),
    Band(
        "residual/token_similarity", high=0.99,
        reason="rank collapse: all tokens have become one direction",
        source="Dong et al. 2021, arXiv 2103.03404; Noci et al. 2022, arXiv 2206.03126",
    ),
    Band(
        "attention/logit_max", high=1000.0,
        reason="attention logits grow: runs diverge with logits in the thousands", source=_LOGITS,
    ),
    Band(
        "attention/entropy_share", low=0.02,
        reason="entropy collapse: a head looks at one token only, and its softmax passes no"
        " gradient on", source="Zhai et al. 2023, arXiv 2303.06296",
    ),
    Band(
        "mlp/dead_share", high=0.5, reason="most hidden units are dead",
        source="Lu et al. 2019, arXiv 1903.06733",
    ),
    Band(
        "loss/value", high=1.25, against="start",
        reason="the loss is above where the run began", source=_RULE,
    ),
    Band(
        "gradient/stream_rms", low=1e-3, high=1e3, against="layers",
        reason="the gradient vanishes or explodes on its way through the layers",
        source="Glorot and Bengio 2010; Xiong et al. 2020, arXiv 2002.04745, number: " + _RULE,
    ),
    Band(
        "gradient/norm", high=100.0, against="warm-up", reason="the gradient norm grows",
        source="Wortsman et al. 2023, arXiv 2309.14322, number: " + _RULE,
    ),
    Band(
        "update/parameter_ratio", high=0.3, part="*kernel",
        reason="a step changes a matrix by much of itself; about 1e-3 is usual",
        source="a common rule; You et al. 2017, arXiv 1708.03888",
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
        1.5, "a loss of so many times its running median is a spike", above=1, most=1e30
    )
    gradient_spike: float = field(
        10.0, "a gradient norm of so many times its running median is a spike", above=1, most=1e30
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
                "configuration")  # fmt: skip


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
