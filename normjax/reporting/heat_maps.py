"""Heat maps of diagnostics: layer by step, a small panel per variant, one scale for all."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize, to_rgba
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator, NullLocator

from normjax.diagnostics import definitions
from normjax.reporting import drawing
from normjax.reporting.diagnostics_data import (
    CHOSEN,
    SMALLEST_HEAD,
    Diagnostics,
    short_title,
    slug,
    tidy,
)
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import VERMILLION
from normjax.reporting.pictures import Row, by
from normjax.reporting.results import DIVERGED, Results
from normjax.reporting.wording import capital

COLOURS = "cividis"
"""Perceptually uniform, the same for colour-blind readers, monotone in a grey print."""
_COLUMNS, _MOST, _DECADES = 4, 16, 5


def figures(results: Results, diagnostics: Diagnostics) -> list[Figure]:
    """Return one figure per diagnostic with layers that a run measured, the chosen ones first."""
    names = (*CHOSEN, *(name for name in diagnostics.names() if name not in CHOSEN))
    made = [_heat_map(results, diagnostics, name) for name in names]
    return [figure for figure in made if figure is not None]


def _heat_map(results: Results, diagnostics: Diagnostics, name: str) -> Figure | None:
    definition = definitions.diagnostic(name)
    rows = tidy(results, diagnostics, name)
    every = [row for own in rows.values() for row in own]
    steady = {v.label for v in results.variants if not v.count(DIVERGED)}
    scale, extend = _scale(every, steady, definition.scale == "log")
    if scale is None:
        return None
    canvas = _draw(dict(list(rows.items())[:_MOST]), scale, extend, short_title(name))
    head = ""
    if "head" in definition.axes:
        head = f" Of the heads the {'smallest' if name in SMALLEST_HEAD else 'largest'} is shown."
    more = f" The first {_MOST} of {len(rows)} variants." if len(rows) > _MOST else ""
    places = "Rows: blocks, the input at the bottom"
    places += ", each with attention below the MLP" if "sublayer" in definition.axes else ""
    title = capital(definition.title)
    caption = (
        f"{title}: {definition.definition}. Median over seeds. {places}; columns: the measured "
        "steps, unevenly spaced. Orange-red: not finite in a run. The scale is that of the "
        f"variants without a diverged run; what lies beyond takes its end.{head}{more}"
    )
    title = f"{title} by block and step"
    return drawing.figure(f"diagnostic_{slug(name)}", title, caption, canvas, every)


def _title(label: str, limit: int) -> str:
    """Return a variant's name, its rates below, over up to three lines that fit a panel."""
    name, _, rest = label.partition(", ")
    rest = rest.replace("learning rate", "rate").replace("weight decay", "decay")
    below = textwrap.wrap(rest, limit)
    below = below if len(below) <= 2 else [below[0], drawing.elide(" ".join(below[1:]), limit)]
    return "\n".join([drawing.elide(name, limit), *below])


def _scale(rows: Sequence[Row], steady: set[str], log: bool) -> tuple[Normalize | None, str]:
    """Return the colour scale of all panels, and where it leaves values beyond its ends.

    The scale is that of the variants without a diverged run, where there are such.
    """
    known = [row for row in rows if math.isfinite(row["median"]) and (row["median"] > 0 or not log)]
    if not known:
        return None, "neither"
    every = np.array([row["median"] for row in known])
    values = np.array([row["median"] for row in known if row["variant"] in steady])
    values = values if len(values) else every
    low, high = float(values.min()), float(values.max())
    if log:
        if high > low * 10**_DECADES:  # extremes must not take the colours from all others
            low, high = (float(x) for x in np.quantile(values, (0.02, 0.9)))
            low = max(low, high / 10**_DECADES)
        if high < 1.5 * low:
            low, high = low / 1.25, high * 1.25
    elif high - low < 1e-3:
        low, high = low - 5e-4, high + 5e-4
    below, above = bool(every.min() < low), bool(every.max() > high)
    extend = {(0, 0): "neither", (1, 0): "min", (0, 1): "max", (1, 1): "both"}[below, above]
    return (LogNorm if log else Normalize)(low, high, clip=True), extend


def _draw(panels: Mapping[str, Sequence[Row]], scale: Normalize, extend: str, label: str) -> Canvas:
    """Draw a panel for each variant; zero on a logarithmic scale takes its darkest colour."""
    columns = min(_COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    titles = [_title(name, 92 // columns) for name in panels]
    tall = max(title.count("\n") for title in titles) > 1
    height = 0.85 + (1.75 if tall else 1.55) * lines
    canvas = drawing.fixed_canvas(height, 0.4, 0.95, 0.5, 0.45, (0.22, 0.75 if tall else 0.55))
    every = list(canvas.subplots(lines, columns, squeeze=False).ravel())
    for axes in every[len(panels) :]:
        axes.remove()
    for i, (axes, rows, title) in enumerate(zip(every, panels.values(), titles, strict=False)):
        steps, blocks = by(rows, "step"), by(rows, "block")
        _map(axes, steps.values(), scale)
        depth, per = len(blocks), len(rows) // len(steps) // len(blocks)
        gap = max(1, math.ceil(depth / 6))
        shown = [b for b in range(1, depth + 1) if (b - 1) % gap == 0 or b == depth]
        axes.set_yticks([per * (b - 1) + (per - 1) / 2 for b in shown], [str(b) for b in shown])
        for b in range(1, depth if depth <= 12 else 1):
            axes.axhline(per * b - 0.5, color="white", lw=0.6)
        last, names = len(steps) - 1, list(steps)
        ticks = sorted({0, last, *(round(last * f) for f in ((0.33, 0.67) if last > 4 else ()))})
        axes.set_xticks(ticks, [str(names[k]) for k in ticks])
        axes.tick_params(length=2, labelsize=7)
        axes.spines[:].set_visible(False)
        axes.set_title(title, size=6.5 if tall else 7.5)
        axes.set_ylabel("" if i % columns else "block", size=8)
    canvas.supxlabel("measured step", size=9, y=0.1 / height)
    _colour_bar(canvas, scale, extend, label)
    return canvas


def _map(axes: Axes, columns: Collection[Sequence[Row]], scale: Normalize) -> None:
    values = np.array([[row["median"] for row in column] for column in columns]).T
    lost = np.array([[row["not_finite"] for row in column] for column in columns]).T
    drawn = np.isfinite(values) & ((values > 0) if isinstance(scale, LogNorm) else True)
    colours = matplotlib.colormaps[COLOURS](scale(np.where(drawn, values, scale.vmin or 0.0)))
    colours[~np.isfinite(values)] = (0, 0, 0, 0)  # what no run measured stays blank
    colours[lost] = to_rgba(VERMILLION)
    axes.imshow(colours, aspect="auto", origin="lower", interpolation="none")


def _colour_bar(canvas: Canvas, scale: Normalize, extend: str, label: str) -> None:
    pars, inch = canvas.subplotpars, 1 / drawing.WIDTH
    tall = min(pars.top - pars.bottom, 2.4 / canvas.get_figheight())
    low = (pars.top + pars.bottom - tall) / 2
    axes = canvas.add_axes((pars.right + 0.15 * inch, low, 0.11 * inch, tall))
    bar = canvas.colorbar(ScalarMappable(scale, COLOURS), cax=axes, extend=extend)
    if bar.solids is not None:
        bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    bar.set_label(label, size=8)
    if isinstance(scale, LogNorm) and scale.vmin and scale.vmax:
        drawing.log_ticks(bar.ax.yaxis, scale.vmin, scale.vmax)
    else:
        bar.ax.yaxis.set_major_locator(MaxNLocator(5))
        bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=7, length=2)
