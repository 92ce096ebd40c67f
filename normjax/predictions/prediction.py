"""What somebody expects of a grid, as a value: an order of its variants, or losses."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from normjax.errors import UserError, check_choice
from normjax.runs import files

RANKING, LOSSES = "ranking", "losses"
VARIANTS, SERIES = "variants", "series"
LEVELS = (80, 95)
LEVEL = LEVELS[0]
"""Per cent that stated intervals are meant to cover.

80 and not 95: of seven honest 95 % intervals all seven should cover most of the time, so that
intervals much too wide look the same; at 80 % one or two should miss.
"""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something that a prediction may name.

    Attributes:
      name: as a file names it.
      title: another spelling that is understood.
      description: what it is, for a person who is asked.
      subject: "variants", or "series" for all variants on one line over x.
      planned: whether this grid runs it.
    """

    name: str
    title: str = ""
    description: str = ""
    subject: str = VARIANTS
    planned: bool = True


@dataclasses.dataclass(frozen=True)
class Expected:
    """What is expected of one variant.

    Attributes:
      name: the variant or series.
      place: 1 for the lowest loss; equals share the place, and the next one counts them all.
      loss: expected validation loss in nats per token; None in a ranking.
      low: lower end of the interval, None without one.
      high: upper end of the interval, None without one.
    """

    name: str
    place: int
    loss: float | None = None
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A prediction, whoever made it and why.

    Attributes:
      kind: "ranking" or "losses".
      entries: from lowest to highest expected loss.
      author: whose it is, may be empty.
      reason: why, may be empty.
      level: per cent that the intervals are meant to cover.
      subject: what is ranked: "variants" or "series".
    """

    kind: str
    entries: tuple[Expected, ...]
    author: str = ""
    reason: str = ""
    level: int = LEVEL
    subject: str = VARIANTS


def ranking(groups: Sequence[Sequence[str]]) -> tuple[Expected, ...]:
    """Return the entries of names in order, lowest loss first; names of one group are equal.

    Equals stand in the order of their names: in which order they were written says nothing.

    >>> [(e.name, e.place) for e in ranking([["a"], ["b", "c"], ["d"]])]
    [('a', 1), ('b', 2), ('c', 2), ('d', 4)]
    """
    entries: list[Expected] = []
    for group in groups:
        place = len(entries) + 1
        entries += [Expected(name, place) for name in sorted(group)]
    return tuple(entries)


def by_loss(entries: Sequence[Expected]) -> tuple[Expected, ...]:
    """Return entries with losses in order of loss, each with its place.

    >>> [(e.name, e.place) for e in by_loss([Expected("a", 0, 2.0), Expected("b", 0, 1.0)])]
    [('b', 1), ('a', 2)]
    """
    losses = [entry.loss or 0.0 for entry in entries]
    placed = [
        dataclasses.replace(entry, place=1 + sum(other < loss for other in losses))
        for entry, loss in zip(entries, losses, strict=True)
    ]
    return tuple(sorted(placed, key=lambda entry: (entry.place, entry.name)))


def to_json(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as JSON holds it."""
    entries = [dataclasses.asdict(entry) for entry in prediction.entries]
    return dataclasses.asdict(prediction) | {"entries": entries}


def from_json(record: dict[str, Any]) -> Prediction:
    """Return the prediction of :func:`to_json`; other keys are ignored.

    Raises:
      UserError: the record is none.

    >>> p = Prediction(RANKING, ranking([["a"], ["b"]]), author="me")
    >>> from_json(to_json(p)) == p
    True
    """
    files.check_shape(record, _SHAPE)
    kind, level, subject = record["kind"], record["level"], record["subject"]
    check_choice("kind", kind, (RANKING, LOSSES))
    check_choice("subject", subject, (VARIANTS, SERIES))
    if level not in LEVELS:
        raise UserError(f"level={level}: must be one of {LEVELS}")
    entries = []
    for entry in record["entries"]:
        files.check_shape(entry, {"loss": float} if kind == LOSSES else {})
        whole = entry.get("low") is not None and entry.get("high") is not None
        ends = (entry["low"], entry["high"]) if whole else (None, None)
        entries.append(Expected(entry["name"], entry["place"], entry.get("loss"), *ends))
    return Prediction(kind, tuple(entries), record["author"], record["reason"], level, subject)


_ENTRY = {"name": str, "place": int, "loss?": float, "low?": float, "high?": float}
_SHAPE = {
    "kind": str, "entries": [_ENTRY], "author": str, "reason": str, "level": int, "subject": str,
}  # fmt: skip
