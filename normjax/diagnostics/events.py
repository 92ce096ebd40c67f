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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from normjax.diagnostics import bands, definitions
from normjax.diagnostics.bands import Band
from normjax.diagnostics.evidence import METRICS, Evidence, Series

DRIFT, IDLE, SPIKE = bands.DRIFTS, bands.IDLES, bands.JUMPS
NON_FINITE, SKIPPED, NOT_LEARNING, TOO_SLOW = (
    "non-finite", "skipped", "not learning", "too slow",
)  # fmt: skip
MEDIAN_OVER = 5
"""A spike is measured against the median of so many finite values before it; two at least."""
MAY_BE_INFINITE = ("update/parameter_ratio", "branch/stream_ratio")
"""Not finite where a parameter is zero, as gains and biases are at initialization, or a stream."""

_WEIGHTS, _FORWARD, _LOSS, _GRADIENTS, _STEP = range(5)
_WITHIN = (
    "residual/rms_before", "read/rms", "attention/logit_max", "attention/logit_std",
    "attention/entropy", "attention/entropy_share", "attention/collision_share",
    "attention/saturated_share", "attention/head_share", "mlp/activation_rms", "mlp/dead_share",
    "branch/rms", "branch/stream_ratio", "branch/stream_cosine", "residual/rms_after",
    "residual/transfer", "residual/depth_ratio", "residual/token_similarity",
)  # fmt: skip
_WRITTEN = ("attention/head_share", "branch/stream_ratio")


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that happened to one diagnostic, at the place where it happened first.

    Attributes:
      kind: "drift": was outside its band; "idle": a part that did next to nothing; "spike": far
        above what it was just before; "non-finite"; "skipped": updates that were not made because
        something was not finite; "not learning", "too slow": of the final loss.
      diagnostic: its name, with brackets.
      step: before which it was measured; of metrics, the evaluation that shows it. Of extremes of
        all steps 0 where the first value was outside, else that of the largest departure.
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
      undated: whether ``step`` is that of the largest departure, the first being unknown.
      throughout: whether it was so at every step; ``step`` is 0.
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
    undated: bool = False
    throughout: bool = False
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """Return the event as JSON values."""
        return dataclasses.asdict(self)

    @property
    def part(self) -> str:
        """What the brackets of the diagnostic hold: a parameter or a norm."""
        return definitions.split(self.diagnostic)[1]


def ordered(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return events by step, and within a step in the order of computation.

    Of undated events the earliest step counts for all. What was so at every step comes after what
    was off at the first, and there causes come first too: a part that no step changes keeps what it
    began with, and a part that writes nothing is never taught what to read.
    """
    events = list(events)
    undated = min((e.step for e in events if e.undated), default=0)
    return tuple(sorted(events, key=lambda e: (undated if e.undated else e.step, *_place_key(e))))


def _place_key(event: Event) -> tuple:
    key = _key(event.diagnostic, event.layer, event.sublayer, event.head)
    cause = 0
    if event.throughout and key[0] != _STEP:
        cause = 1 if definitions.split(event.diagnostic)[0] in _WRITTEN else 2
    return (event.throughout, cause, *key)


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
    if diagnostic in ("loss/value", "loss/jump", "train/loss", "validation/loss"):
        return (_LOSS, 0, 0, 0, head, name)
    if diagnostic == "gradient/stream_rms_last":
        return (_GRADIENTS, -math.inf, 0, 0, head, name)
    if diagnostic in ("gradient/norm", "gradient/jump"):
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


def over_steps(
    name: str, fields: Mapping[str, np.ndarray], band: Band, evidence: Evidence
) -> list[Event] | None:
    """Return how the extremes of all steps left a band, one event at most; None: cannot be told."""
    settled = "settled_" * (band.against == "warm-up")
    low, high, low_step, high_step = (
        np.ravel(fields[settled + field]) for field in ("low", "high", "low_step", "high_step")
    )
    first, reference = np.ravel(fields["first"]), np.ones_like(low)
    if band.against in ("start", "warm-up"):
        reference = first if band.against == "start" else np.ravel(fields["settled"])
        reference = np.where(reference > 0, reference, np.nan)
    elif band.against == "expected":
        reference = np.ravel(evidence.expected.get(name, reference))
    elif band.against == "layers":
        return None
    if np.shape(reference) != np.shape(low) or not np.isfinite(reference * low).any():
        return None
    with np.errstate(invalid="ignore"):
        if band.always:  # a part that starts at nothing may do nothing, but not to the end
            under, over = high <= band.low * reference, low >= band.high * reference
            under_step = over_step = np.zeros(len(low), int)
        else:
            under, over = low < band.low * reference, high > band.high * reference
            early = first * (not settled)
            under_step = np.where(early < band.low * reference, 0, low_step)
            over_step = np.where(early > band.high * reference, 0, high_step)
    columns = np.flatnonzero(under | over)
    if not len(columns):
        return []
    steps = np.where(over, over_step, under_step).astype(int)
    series = Series(name, np.zeros(1, int), fields["low"][None])
    row = np.unique(steps[columns])[0]
    chosen = columns[steps[columns] == row]
    _, column, where = _first(series, np.zeros(len(chosen), int), chosen, evidence.sublayers)
    is_over = bool(over[column])
    # Where it was always outside, what came nearest tells how far.
    values = (low if band.always else high) if is_over else (high if band.always else low)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = values / reference
    if band.blamed in evidence.extremes:
        where = _blamed(band.blamed, evidence, is_over)
    return [Event(
        band.kind, name, int(row), **where, value=float(values[column]),
        factor=_factor(float(ratios[column]), band), limit=band.high if is_over else band.low,
        against=band.against, places=len(columns), of=len(low),
        largest=max((_factor(float(r), band) or 0.0 for r in ratios[columns]), default=0.0) or None,
        below=not is_over, undated=bool(row > 0), throughout=band.always,
        reason=band.reason,
    )]  # fmt: skip


def _blamed(name: str, evidence: Evidence, over: bool) -> dict[str, Any]:
    """Return the place that has the largest part in a product over the places of a diagnostic.

    Of several that are as large within 10 % the first in the order of computation.
    """
    fields = evidence.extremes[name]
    with np.errstate(divide="ignore"):
        sizes = np.log(np.ravel(fields["high"])) if over else -np.log(np.ravel(fields["low"]))
    sizes = np.where(np.isnan(sizes), -np.inf, sizes)
    series = Series(name, np.zeros(1, int), fields["low"][None])
    worst = np.flatnonzero(sizes >= sizes.max() - math.log(1.1))
    return _first(series, np.zeros(len(worst), int), worst, evidence.sublayers)[2]


def departures(series: Series, band: Band, evidence: Evidence) -> list[Event] | None:
    """Return how samples of a diagnostic left a band, one event at most; None: cannot be told."""
    values = np.where(np.isfinite(series.flat), series.flat, np.nan)
    if band.always or band.against == "expected":
        return None
    if band.against == "value":
        ratio = values
    elif band.against == "layers":
        ratio = _over_other_layers(series)
    else:
        begin = evidence.warmup if band.against == "warm-up" else 0
        settled = np.flatnonzero(series.steps >= begin)
        if len(settled) < 2 or (band.against == "start" and series.steps[0] != 0):
            return None
        since = int(settled[0])
        ratio = _over_earlier(values, since, band)
    if not np.isfinite(ratio).any():
        return None
    return leave(series, band, ratio, evidence.sublayers)


def leave(
    series: Series, band: Band, ratio: np.ndarray, sublayers: Sequence[str], stays: bool = False
) -> list[Event]:
    """Return how a ratio (n, places) left a band, one event at most.

    With ``stays`` only where it stayed outside, at all later steps that have a number.
    """
    known = np.isfinite(ratio)
    with np.errstate(invalid="ignore"):
        out = known & ((ratio < band.low) | (ratio > band.high))
    columns = np.flatnonzero(out.any(axis=0))
    if stays:
        after = np.arange(len(out))[:, None] >= out.argmax(axis=0)[None, :]
        columns = columns[(out | ~known | ~after).all(axis=0)[columns]]
    if not len(columns):
        return []
    return [_departure(band.kind, series, band, ratio, out, columns, sublayers)]


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


def _over_earlier(values: np.ndarray, since: int, band: Band) -> np.ndarray:
    """Divide each place by what it was at a row before, from a row on; NaN where that is not above
    0. Against the start that row is the first; else the one that takes it furthest, so that a row
    more never takes a departure away."""
    ratio = np.full_like(values, np.nan)
    for row in range(since + 1, len(values)):
        before = values[since : since + 1] if band.against == "start" else values[since:row]
        before = np.where(before > 0, before, np.nan)
        known = np.isfinite(before).any(axis=0)
        least, most = (f(np.where(known, before, 1.0), axis=0) for f in (np.nanmin, np.nanmax))
        with np.errstate(invalid="ignore"):
            up, down = values[row] / least, values[row] / most
        ratio[row] = np.where(known, np.where((down < band.low) & ~(up > band.high), down, up),
                              np.nan)  # fmt: skip
    return ratio


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
    """Return the first and count all spikes of evaluations, a series of single numbers.

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
