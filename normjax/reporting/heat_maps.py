"""Heat maps of signals: layer by step, one small panel per variant, one scale for all of them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize, to_rgba
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from normjax.diagnostics import definitions
from normjax.reporting import drawing
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import VERMILLION
from normjax.reporting.results import DIVERGED, Results
from normjax.reporting.signal_data import (
    CHOSEN,
    SMALLEST_HEAD,
    Grid,
    Signals,
    grid,
    short_title,
    slug,
)

COLOURS = "cividis"
"""Perceptually uniform, the same for colour-blind readers, monotone in a grey print."""
_COLUMNS, _MOST, _DECADES = 4, 16, 5


def figures(results: Results, signals: Signals) -> list[Figure]:
    """Return one figure per signal with layers that some run measured, the chosen ones first."""
    names = (*CHOSEN, *(name for name in signals.names() if name not in CHOSEN))
    made = [_figure(results, signals, name) for name in names]
    return [figure for figure in made if figure is not None]


def _figure(results: Results, signals: Signals, name: str) -> Figure | None:
    grids = {v.label: g for v in results.variants if (g := grid(signals, v, name)) is not None}
    if not grids:
        return None
    row = definitions.signal(name)
    steady = {v.label for v in results.variants if not v.count(DIVERGED)}
    scale, extend = _scale(
        [g for label, g in grids.items() if label in steady], list(grids.values()),
        row.scale == "log",
    )  # fmt: skip
    if scale is None:
        return None
    shown = dict(list(grids.items())[:_MOST])
    columns = min(_COLUMNS, len(shown))
    lines = math.ceil(len(shown) / columns)
    titles = {label: _title(label, 92 // columns) for label in shown}
    tall = max(title.count("\n") for title in titles.values()) > 1
    height = 0.85 + (1.75 if tall else 1.55) * lines
    canvas = drawing.fixed_canvas(height, 0.4, 0.95, 0.5, 0.45, (0.22, 0.75 if tall else 0.55))
    panels = canvas.subplots(lines, columns, squeeze=False)
    flat = list(panels.ravel())
    for i, (panel, (label, each)) in enumerate(zip(flat, shown.items(), strict=False)):
        _panel(panel, each, scale)
        panel.set_title(titles[label], size=6.5 if tall else 7.5)
        if i % columns == 0:
            panel.set_ylabel("block", size=8)
    for panel in flat[len(shown) :]:
        panel.remove()
    canvas.supxlabel("measured step", size=9, y=0.1 / height)
    _colour_bar(canvas, scale, extend, short_title(name))
    head = ""
    if "head" in row.axes:
        head = f" Of the heads the {'smallest' if name in SMALLEST_HEAD else 'largest'} is shown."
    more = f" The first {_MOST} of {len(grids)} variants." if len(grids) > _MOST else ""
    rows = "Rows: blocks, the input at the bottom"
    rows += ", each with attention below the MLP" if "sublayer" in row.axes else ""
    caption = (
        f"{row.title[0].upper()}{row.title[1:]}: {row.definition}. Median over seeds. {rows}; "
        "columns: the measured steps, unevenly spaced. Orange-red: not finite in a run. "
        "The scale is that of the variants without a diverged run; what lies beyond takes its end."
        f"{head}{more}"
    )
    data = [
        (label, int(step), *place, float(value), bool(lost))
        for label, g in grids.items()
        for step, values, bad in zip(g.steps, g.values, g.lost, strict=True)
        for place, value, lost in zip(g.rows, values, bad, strict=True)
    ]
    columns_named = ("variant", "step", "block", "sublayer", "median", "not_finite")
    title = f"{row.title[0].upper()}{row.title[1:]} by block and step"
    return Figure(f"signal_{slug(name)}", title, caption, canvas, columns_named, data)


def _title(label: str, limit: int) -> str:
    """Return a variant's name, its rates below, over up to three lines that fit a panel."""
    name, _, rest = label.partition(", ")
    rest = rest.replace("learning rate", "rate").replace("weight decay", "decay")
    below = textwrap.wrap(rest, limit)
    below = below if len(below) <= 2 else [below[0], drawing.elide(" ".join(below[1:]), limit)]
    return "\n".join([drawing.elide(name, limit), *below])


def _scale(
    steady: Sequence[Grid], every: Sequence[Grid], log: bool
) -> tuple[Normalize | None, str]:
    """Return the colour scale of all panels, and where it leaves values beyond its ends.

    The scale is that of the variants without a diverged run, where there are such.
    """

    def numbers(grids: Sequence[Grid]) -> np.ndarray:
        values = np.concatenate([np.zeros(0), *(g.values.ravel() for g in grids)])
        return values[np.isfinite(values) & ((values > 0) if log else True)]

    everything = numbers(every)
    values = numbers(steady) if len(numbers(steady)) else everything
    if not len(values):
        return None, "neither"
    low, high = float(values.min()), float(values.max())
    if log:
        if high > low * 10**_DECADES:  # extremes must not take the colours from all others
            low, high = (float(x) for x in np.quantile(values, (0.02, 0.9)))
            low = max(low, high / 10**_DECADES)
        if high < 1.5 * low:
            low, high = low / 1.25, high * 1.25
    elif high - low < 1e-3:
        low, high = low - 5e-4, high + 5e-4
    below, above = bool(everything.min() < low), bool(everything.max() > high)
    extend = {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[below, above]
    return (LogNorm if log else Normalize)(low, high, clip=True), extend


def _ends(scale: Normalize) -> tuple[float, float]:
    assert scale.vmin is not None and scale.vmax is not None
    return scale.vmin, scale.vmax


def _panel(panel: Axes, each: Grid, scale: Normalize) -> None:
    values = each.values.T
    positive = np.isfinite(values) & ((values > 0) if isinstance(scale, LogNorm) else True)
    # A zero on a logarithmic scale is its darkest colour; what no run measured stays blank.
    filled = np.where(positive, values, _ends(scale)[0])
    colours = matplotlib.colormaps[COLOURS](scale(filled))
    colours[~np.isfinite(values)] = (0, 0, 0, 0)
    colours[each.lost.T] = to_rgba(VERMILLION)
    panel.imshow(colours, aspect="auto", origin="lower", interpolation="none")
    blocks = [block for block, _ in each.rows]
    depth, per = max(blocks), len(blocks) // max(blocks)
    every = max(1, math.ceil(depth / 6))
    chosen = [b for b in range(1, depth + 1) if (b - 1) % every == 0 or b == depth]
    panel.set_yticks([per * (b - 1) + (per - 1) / 2 for b in chosen], [str(b) for b in chosen])
    for b in range(1, depth if depth <= 12 else 1):
        panel.axhline(per * b - 0.5, color="white", lw=0.6)
    last = len(each.steps) - 1
    ticks = sorted({0, last, *(round(last * f) for f in ((0.33, 0.67) if last > 4 else ()))})
    panel.set_xticks(ticks, [str(each.steps[i]) for i in ticks])
    panel.tick_params(length=2, labelsize=7)
    panel.spines[:].set_visible(False)


def _colour_bar(canvas: Canvas, scale: Normalize, extend: str, label: str) -> None:
    pars = canvas.subplotpars
    tall = min(pars.top - pars.bottom, 2.4 / canvas.get_figheight())
    middle = (pars.top + pars.bottom) / 2
    inch = 1 / drawing.WIDTH
    axes = canvas.add_axes((pars.right + 0.15 * inch, middle - tall / 2, 0.11 * inch, tall))
    bar = canvas.colorbar(ScalarMappable(scale, COLOURS), cax=axes, extend=extend)
    if bar.solids is not None:
        bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    bar.set_label(label, size=8)
    axis = bar.ax.yaxis
    if isinstance(scale, LogNorm):
        low, high = _ends(scale)
        decades = math.log10(high / low)
        if decades < 1.6:
            axis.set_major_locator(
                LogLocator(subs=(1, 2, 5) if decades > 0.7 else (1, 1.5, 2, 3, 5, 7))
            )
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        else:
            axis.set_major_locator(LogLocator(10.0 ** math.ceil(decades / 6), numticks=30))
            axis.set_major_formatter(lambda value, _: drawing.power_of_ten(value))
    else:
        axis.set_major_locator(MaxNLocator(5))
    axis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=7, length=2)
