"""What happened to a run: diagnostics that left their bands, spikes, numbers that are not finite.

Which came first? The smaller step. Within a step the order of computation decides, since there
causes come before effects:

1. gains and weights;
2. the forward pass: block by block, in a block sub-layer by sub-layer, in a sub-layer from the
   stream before it through what it reads, logits, entropy and hidden units to what it writes and
   the stream after it;
3. the loss;
4. gradients, from the last block to the first;
5. the step of the optimizer.

So of several layers the one nearest the input counts as first, of gradients the one nearest the
output. Statistics use finite values only: a number that is not finite is an event of its own and
changes no other.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from normjax.diagnostics import definitions
from normjax.diagnostics.bands import Band
from normjax.diagnostics.evidence import METRICS, Evidence, Series

DRIFT, EXCURSION, SPIKE, NON_FINITE, SKIPPED = KINDS = (
    "drift", "excursion", "spike", "non-finite", "skipped",
)  # fmt: skip
MEDIAN_OVER = 5
"""A spike is measured against the median of so many finite values before it; two at least."""
MAY_BE_INFINITE = ("update/parameter_ratio",)
"""Not finite where a parameter is zero, as gains and biases are at initialization."""

_WEIGHTS, _FORWARD, _LOSS, _GRADIENTS, _STEP = range(5)
_WITHIN = (
    "residual/rms_before", "read/rms", "attention/logit_max", "attention/logit_std",
    "attention/entropy", "attention/entropy_share", "attention/saturated_share",
    "mlp/activation_rms", "mlp/dead_share", "branch/rms", "branch/stream_ratio",
    "branch/stream_cosine", "residual/rms_after", "residual/token_similarity",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened to one diagnostic, at the place where it happened first.

    Attributes:
      kind: "drift": left its band and stayed out to the end; "excursion": left it and came back;
        "spike": far above its running median and back; "non-finite"; "skipped": updates that were
        not made because something was not finite.
      diagnostic: its name, with brackets.
      step: before which it was measured; of metrics, the evaluation that shows it.
      layer: block, counted from 1, or None.
      sublayer: "attention", "mlp" or None.
      head: counted from 1, or None.
      value: there; None where it is not finite.
      factor: how many times beyond the bound, the median or the reference; None where it has none.
      limit: the bound that was passed, in units of ``against``.
      below: whether the bound is a lower one.
      against: what the bound is relative to; see :data:`normjax.diagnostics.bands.AGAINST`.
      places: at how many places (layers, heads) of the diagnostic it was so, of how many ``of``.
      until: the last step at which it was so.
      largest: the largest factor at any place and step.
      moving: whether the value at this place only moved further away.
      reason: what this means.
    """

    kind: str
    diagnostic: str
    step: int
    layer: int | None = None
    sublayer: str | None = None
    head: int | None = None
    value: float | None = None
    factor: float | None = None
    limit: float | None = None
    against: str = "value"
    places: int = 1
    of: int = 1
    until: int | None = None
    largest: float | None = None
    moving: bool = False
    below: bool = False
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """Return the event as JSON values."""
        return dataclasses.asdict(self)

    @property
    def part(self) -> str:
        """What the brackets of the diagnostic hold: a parameter or a norm."""
        return definitions.split(self.diagnostic)[1]


def ordered(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return events by step, and within a step in the order of computation."""
    return tuple(sorted(events, key=lambda e: (e.step, *_place_key(e))))


def _place_key(event: Event) -> tuple:
    return _key(event.diagnostic, event.layer, event.sublayer, event.head)


def _key(name: str, layer: int | None, sublayer: str | None, head: int | None) -> tuple:
    """Order of computation of a diagnostic at a place; see the head of this file."""
    diagnostic, part = definitions.split(name)
    order = definitions.SUBLAYER_ORDER
    # Attention's own diagnostics have no sub-layer axis, nor have the MLP's.
    implied = {"attention": "attention", "mlp": "mlp"}.get(diagnostic.split("/")[0])
    implied = implied or (part.split(".")[0] if part.split(".")[0] in order else None)
    at = order.index(sublayer or implied) if (sublayer or implied) in order else 0
    depth, head = layer or 0, head or 0
    if diagnostic.startswith("gain/"):
        return (_WEIGHTS, depth, at, 0, head, name)
    if diagnostic in _WITHIN:
        return (_FORWARD, depth, at, _WITHIN.index(diagnostic), head, name)
    if diagnostic in ("loss/value", "train/loss", "validation/loss"):
        return (_LOSS, 0, 0, 0, head, name)
    if diagnostic == "gradient/stream_rms_last":
        return (_GRADIENTS, -math.inf, 0, 0, head, name)
    if diagnostic == "gradient/norm":
        return (_GRADIENTS, math.inf, 0, 0, head, name)
    if diagnostic.startswith("gradient/"):
        return (_GRADIENTS, -depth, -at, int(bool(part)), head, name)
    return (_STEP, depth, at, 0, head, name)


# --- places ---------------------------------------------------------------------------------------


def place(series: Series, index: int, sublayers: Sequence[str]) -> dict[str, Any]:
    """Return layer (from 1), sub-layer and head (from 1) of a flat index into a series' places.

    >>> s = Series("residual/rms_after", np.arange(1), np.zeros((1, 3, 2)))
    >>> place(s, 3, ("attention", "mlp"))
    {'layer': 2, 'sublayer': 'mlp', 'head': None}
    """
    row = definitions.DIAGNOSTICS.get(definitions.split(series.name)[0])
    shape = series.values.shape[1:]
    out: dict[str, Any] = {"layer": None, "sublayer": None, "head": None}
    where = np.unravel_index(index, shape) if shape else ()
    for axis, i in zip(row.axes if row else (), where, strict=False):
        i = int(i)
        if axis == "sublayer":
            out[axis] = sublayers[i] if i < len(sublayers) else f"sub-layer {i + 1}"
        else:
            out[axis] = i + 1
    return out


def _first(
    series: Series, rows: np.ndarray, columns: np.ndarray, sublayers: Sequence[str]
) -> tuple[int, int, dict[str, Any]]:
    """Return row, column and place of the first of several places: by step, then by order."""
    row = rows.min()
    here = [(int(c), place(series, int(c), sublayers)) for c in columns[rows == row]]
    column, where = min(here, key=lambda h: _key(series.name, *h[1].values()))
    return int(row), column, where


# --- numbers that are not finite ------------------------------------------------------------------


def non_finite(series: Series, sublayers: Sequence[str]) -> list[Event]:
    """Return one event of all numbers of a diagnostic that are not finite, or none."""
    if definitions.split(series.name)[0] in MAY_BE_INFINITE:
        return []
    bad = ~np.isfinite(series.flat)
    if not bad.any():
        return []
    columns = np.flatnonzero(bad.any(axis=0))
    row, column, where = _first(series, bad.argmax(axis=0)[columns], columns, sublayers)
    nothing = "had no finite value at any measured step" if bad.all() else "was not finite"
    value = series.flat[row, column]
    what = "NaN" if np.isnan(value) else "infinite"
    last = int(series.steps[np.flatnonzero(bad.any(axis=1))[-1]])
    return [Event(
        NON_FINITE, series.name, int(series.steps[row]), **where, places=len(columns),
        of=bad.shape[1], until=last, reason=f"{nothing} ({what} there)",
    )]  # fmt: skip


def skipped(evidence: Evidence) -> list[Event]:
    """Return one event for all updates that were skipped, or none."""
    steps, counts = evidence.skipped
    rises = np.flatnonzero(np.diff(counts, prepend=0) > 0)
    if not len(rises):
        return []
    total, since = int(counts.max()), int(steps[rises[0] - 1]) if rises[0] else 0
    return [Event(
        SKIPPED, "update/skipped", int(steps[rises[0]]), value=float(total),
        until=int(steps[rises[-1]]),
        reason=f"{total} update{'s' * (total != 1)} skipped for a loss, gradient or step that was"
        f" not finite, the first after step {since}",
    )]  # fmt: skip


# --- bands ----------------------------------------------------------------------------------------


def departures(series: Series, band: Band, evidence: Evidence) -> list[Event]:
    """Return how a diagnostic left a band: at most one drift and one excursion."""
    values, since = series.flat, 0
    finite = np.isfinite(values)
    values = np.where(finite, values, np.nan)
    if band.against == "value":
        ratio = values
    elif band.against == "layers":
        ratio = _over_other_layers(series)
    else:
        begin = evidence.warmup if band.against == "warm-up" else 0
        settled = np.flatnonzero(series.steps >= begin)
        if not len(settled):
            return []
        since = int(settled[0])
        ratio = _over_first(values, since)
    return leave(series, band, ratio, since, evidence.sublayers)


def leave(
    series: Series, band: Band, ratio: np.ndarray, since: int, sublayers: Sequence[str]
) -> list[Event]:
    """Return how a ratio (n, places) left a band from row ``since`` on; see :func:`departures`."""
    known = np.isfinite(ratio)
    with np.errstate(invalid="ignore"):
        out = known & ((ratio < band.low) | (ratio > band.high))
    out[:since] = False
    columns = np.flatnonzero(out.any(axis=0))
    # Out from its first time on, at all later steps that have a number.
    after = np.arange(len(out))[:, None] >= out.argmax(axis=0)[None, :]
    stays = (out | ~known | ~after).all(axis=0)
    found = []
    for kind, chosen in ((DRIFT, columns[stays[columns]]), (EXCURSION, columns[~stays[columns]])):
        if len(chosen):
            found.append(_departure(kind, series, band, ratio, out, chosen, sublayers))
    return found


def _departure(
    kind: str, series: Series, band: Band, ratio: np.ndarray, out: np.ndarray,
    columns: np.ndarray, sublayers: Sequence[str],
) -> Event:  # fmt: skip
    row, column, where = _first(series, out.argmax(axis=0)[columns], columns, sublayers)
    here = float(ratio[row, column])
    high = here > band.high
    rest = ratio[row:, column]
    rest = rest[np.isfinite(rest)]
    moves = np.diff(rest) if high else -np.diff(rest)
    beyond = [_factor(float(r), band) for r in ratio[:, columns][out[:, columns]]]
    return Event(
        kind, series.name, int(series.steps[row]), **where, value=float(series.flat[row, column]),
        factor=_factor(here, band), limit=band.high if high else band.low, against=band.against,
        places=len(columns), of=ratio.shape[1],
        until=int(series.steps[np.flatnonzero(out[:, columns].any(axis=1))[-1]]),
        largest=max(beyond, key=lambda f: math.inf if f is None else f),
        moving=len(moves) > 1 and bool((moves > 0).all()), below=not high, reason=band.reason,
    )  # fmt: skip


def _factor(ratio: float, band: Band) -> float | None:
    """How many times beyond its bound a ratio lies; None where times mean nothing."""
    limit = band.high if ratio > band.high else band.low
    top, bottom = (ratio, limit) if ratio > band.high or limit < 0 else (limit, ratio)
    return top / bottom if bottom and top / bottom > 0 else None


def _over_first(values: np.ndarray, since: int) -> np.ndarray:
    """Divide each place by its first finite value from a row on; NaN where that is not above 0."""
    rest = np.isfinite(values[since:])
    reference = values[since + rest.argmax(axis=0), np.arange(values.shape[1])]
    return values / np.where(reference > 0, reference, np.nan)


def _over_other_layers(series: Series) -> np.ndarray:
    """Divide each place by the median of the other layers of its kind at the same step.

    (n, L, ...) -> (n, places). NaN where there is no other layer with a number above 0.
    """
    values = series.values
    if values.ndim < 2 or values.shape[1] < 2:
        return np.full_like(series.flat, np.nan)
    usable = np.where(np.isfinite(values) & (values > 0), values, np.nan)
    medians = [_median(np.delete(usable, i, axis=1)) for i in range(values.shape[1])]
    with np.errstate(invalid="ignore"):
        ratio = np.where(np.isfinite(values), values, np.nan) / np.stack(medians, axis=1)
    return ratio.reshape(len(values), -1)


def _median(values: np.ndarray) -> np.ndarray:
    """The median over axis 1 of the finite numbers; NaN without one."""
    ordered_values = np.sort(values, axis=1)  # NaN last
    count = np.isfinite(values).sum(axis=1, keepdims=True)
    low, high = (np.maximum(count - 1, 0) // 2, np.maximum(count, 1) // 2)
    pick = lambda i: np.take_along_axis(ordered_values, np.minimum(i, np.maximum(count - 1, 0)), 1)  # noqa: E731
    return ((pick(low) + pick(high)) / 2)[:, 0]


# --- spikes ---------------------------------------------------------------------------------------


def spikes(series: Series, factor: float) -> list[Event]:
    """Return the first and count all spikes of a series of single numbers.

    A spike is a value of ``factor`` times the median of the (up to) five finite values before it,
    which are two at least, that a later value comes back from.
    """
    finite = np.isfinite(series.flat[:, 0])
    steps, values = series.steps[finite], series.flat[finite, 0]
    found: list[tuple[int, float]] = []
    for i in range(2, len(values)):
        median = float(np.median(values[max(0, i - MEDIAN_OVER) : i]))
        back = values[i + 1 :] < factor * median
        if median > 0 and values[i] > factor * median and back.any():
            found.append((i, float(values[i] / median)))
    if not found:
        return []
    i, times = found[0]
    title = METRICS.get(series.name) or definitions.diagnostic(series.name).title
    count = len(found)
    return [Event(
        SPIKE, series.name, int(steps[i]), value=float(values[i]), factor=times, limit=factor,
        until=int(steps[found[-1][0]]), largest=max(t for _, t in found), places=count, of=count,
        reason=f"the {title} jumps above {factor:g} times its running median"
        + (f", {count} times in all" if count > 1 else ""),
    )]  # fmt: skip
