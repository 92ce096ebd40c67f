"""Autopsies of diverged runs: the leading signals before the first bad step."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.ticker import MaxNLocator

from normjax.diagnostics import definitions, postmortem, verdict
from normjax.diagnostics.events import Event
from normjax.diagnostics.evidence import Series
from normjax.diagnostics.postmortem import Autopsy
from normjax.reporting import drawing
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, VERMILLION, Look
from normjax.reporting.signal_data import Signals, short_title
from normjax.reporting.wording import capital

MOST = 6
_LOOKS = [
    Look(colour, marker) for colour, marker in zip(
        (VERMILLION, BLUE, GREEN, ORANGE, PURPLE, INK), ("o", "s", "^", "D", "v", "P"), strict=True
    )
]  # fmt: skip


def figures(signals: Signals) -> list[tuple[str, Figure]]:
    """Return (run, figure) of the first autopsies in which a signal moved."""
    made = []
    for run_id, (autopsy, series) in list(signals.autopsies.items())[:MOST]:
        figure = _figure(run_id, autopsy, series)
        if figure is not None:
            made.append((run_id, figure))
    return made


def _figure(run_id: str, autopsy: Autopsy, series: dict[str, Series]) -> Figure | None:
    curves = []
    for event in postmortem.leading(autopsy, len(_LOOKS)):
        if event.signal in series:
            steps, ratio = _curve(event, series[event.signal], autopsy.bad_step)
            if len(steps):
                curves.append((event, steps, ratio))
    if not curves:
        return None
    canvas = drawing.canvas(0.6 + 0.3 * len(curves) + 1.6)
    axes = canvas.subplots()
    data: list[tuple] = []
    for (event, steps, ratio), look in zip(curves, _LOOKS, strict=False):
        axes.plot(steps, ratio, color=look.colour, marker=look.marker, ms=3.5, mew=0, lw=1.3)
        place = verdict.where(event)
        data += [(event.signal, place, int(s), float(r)) for s, r in zip(steps, ratio, strict=True)]
    axes.axvline(autopsy.bad_step, color=MUTED, lw=0.9, ls=drawing.REFERENCE.dash)
    width = max(autopsy.last - autopsy.first, 1)
    axes.set_xlim(autopsy.first - 0.02 * width, autopsy.last + 0.02 * width)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    drawing.log_axis(axes)
    axes.grid(True, axis="y")
    axes.set_xlabel("step")
    axes.set_ylabel("times its baseline")
    drawing.end_labels(axes, [
        (float(steps[-1]), float(ratio[-1]), _name(event), look)
        for (event, steps, ratio), look in zip(curves, _LOOKS, strict=False)
    ])  # fmt: skip
    caption = (
        "The signals that moved first, each at the place where it moved first, over its own median "
        "at the beginning of the measured steps; named in the order in which they moved. Dotted: "
        f"step {autopsy.bad_step}, the first whose result was not finite. A line ends where its "
        "numbers do, or where they reach 0."
    )
    return Figure(
        f"autopsy_{run_id}", f"Autopsy of {run_id}", caption, canvas,
        ("signal", "place", "step", "times_baseline"), data,
    )  # fmt: skip


def _name(event: Event) -> str:
    place = verdict.where(event).replace("block ", "b").replace("attention", "attn")
    title = short_title(event.signal)
    return f"{event.step}: {title}" + (f", {place.replace(', ', ' ')}" if place else "")


def _curve(event: Event, series: Series, bad_step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and ratios to the baseline at an event's place, where those are above 0."""
    ratio = postmortem.over_baseline(series, bad_step)
    places = ratio.shape[1]
    column = _column(event, series) if places > 1 else 0
    kept = np.isfinite(ratio[:, column]) & (ratio[:, column] > 0)
    return series.steps[kept], ratio[kept, column]


def _column(event: Event, series: Series) -> int:
    """The flat index of an event's place."""
    shape, index = series.values.shape[1:], []
    for axis, size in zip(definitions.signal(event.signal).axes, shape, strict=False):
        if axis == "sublayer":
            at = definitions.SUBLAYER_ORDER.index(event.sublayer or "attention")
            index.append(min(at, size - 1))
        else:
            index.append((getattr(event, axis) or 1) - 1)
    return int(np.ravel_multi_index(tuple(index), shape)) if math.prod(shape) > 1 else 0


def sentences(signals: Signals) -> list[tuple[str, str]]:
    """Return (run, what its autopsy says) of all autopsies."""
    return [(run, capital(autopsy.sentence)) for run, (autopsy, _) in signals.autopsies.items()]
