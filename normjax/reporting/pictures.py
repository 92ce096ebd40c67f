"""Pictures of the usual kinds, each drawn from tidy rows: the rows that lie beside it as CSV.

A row is a mapping from column to value, one per number drawn. Rows are spread over panels; what
they have in common (a series, a unit such as a seed, a place on x) is told by the columns' names.
:func:`lines` draws something over x, :func:`intervals` a row of marks for each name, :func:`grid` a
heat map.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize, to_rgba
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from normjax.reporting import drawing, statistics
from normjax.reporting.palette import GRID, MUTED, PAPER, VERMILLION, Look

Row = Mapping[str, Any]
COLOURS = "cividis"
"""Of heat maps: the same for colour-blind readers, monotone in a grey print."""
_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "p")


@dataclasses.dataclass(frozen=True)
class Axis:
    """What lies along x or y.

    Attributes:
      column: of the rows.
      label: for readers.
      scale: "linear", "log", "log2" or "steps": whole numbers.
      limits: None to choose them.
      ticks: where they are fixed.
      marks: lines across the plot, (value, name); a name "" is not written.
    """

    column: str
    label: str = ""
    scale: str = "linear"
    limits: tuple[float, float] | None = None
    ticks: Sequence[float] = ()
    marks: Sequence[tuple[float, str]] = ()


@dataclasses.dataclass(frozen=True)
class Panel:
    """Rows that share a pair of axes.

    Attributes:
      rows: in the order in which their names are drawn.
      title: above the panel.
      y: its own, where it does not share that of the picture.
      names: of :func:`intervals`, to show some that have no row, or another order.
    """

    rows: Sequence[Row]
    title: str = ""
    y: Axis | None = None
    names: Sequence[str] = ()


def by(rows: Iterable[Row], column: str) -> dict[Any, list[Row]]:
    """Return rows grouped by what they have in a column, in order of appearance."""
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.get(column)].append(row)
    return dict(groups)


def _frame(count: int, columns: int, height: float, small: bool, **more: Any):
    """Return a canvas and its panels; small ones in margins of a known size.

    Solving the layout of dozens of panels takes seconds.
    """
    lines = math.ceil(count / columns)
    made = drawing.canvas(height)
    if small:
        made = drawing.fixed_canvas(height, 0.62, 0.1, 0.5, 0.75, (0.46, 0.6))
    every = list(made.subplots(lines, columns, squeeze=False, **more).ravel())
    for axes in every[count:]:
        axes.remove()
    for axes in every[max(count - columns, 0) : count]:
        axes.tick_params(labelbottom=True)
    return made, every[:count]


# --- lines ----------------------------------------------------------------------------------------


def lines(
    panels: Sequence[Panel], looks: Mapping[str, Look], x: Axis, y: Axis, *, height: float,
    columns: int = 1, series: str = "variant", unit: str = "", dots: bool = False,
    ended: Mapping[tuple[str, Hashable], str] | None = None, small: bool = False,
    above: Sequence[Sequence[tuple[float, str]]] = (), key: Sequence[tuple[str, Look]] = (),
) -> Canvas:  # fmt: skip
    """Draw lines over x: one per series or, with units, their mean and range and each of them.

    Args:
      panels: what is drawn; all share y but those that bring their own.
      looks: by the name of a series.
      x: the horizontal axis.
      y: the vertical one.
      height: of the picture in inches.
      columns: of panels; a line is named at its end where there is one, else in a key above.
      series: column that tells the lines apart.
      unit: column that tells apart what a line is the mean of, such as seeds.
      dots: whether units are hollow marks and not thin lines.
      ended: marker of units that enter no mean, by series and unit: "x" diverged, "|" unfinished.
      small: whether panels are small and many.
      above: lines of text above the first panel, from the lowest: x and text.
      key: names and looks above the panels; without any those of the series.

    Returns:
      The canvas.
    """
    own = any(panel.y for panel in panels)
    canvas, every = _frame(len(panels), columns, height, small, sharex=not small, sharey=not own)
    ended = ended or {}
    drawn = []
    for axes, panel in zip(every, panels, strict=True):
        columns_of = (x.column, (panel.y or y).column, series, unit)
        drawn.append(_curves(axes, panel.rows, looks, columns_of, dots, ended))
    for axes, panel, ends in zip(every, panels, drawn, strict=True):
        up = panel.y or y
        _finish(axes, x, "x", small)
        _finish(axes, up, "y", small)
        _end_marks(axes, panel.rows, looks, (x.column, up.column, series, unit), ended)
        if panel.title:
            _title(axes, panel.title, small, 46 if columns > 1 else 80)
        for level, name in up.marks if columns == 1 else ():
            ends += [(axes.get_xlim()[1], level, name, drawing.REFERENCE)] if name else []
        if columns == 1:
            if axes is every[0]:
                _texts_above(axes, above)
            low, high = axes.get_ylim()
            drawing.end_labels(axes, [e for e in ends if panel.y is None or low <= e[1] <= high])
    if columns > 1:
        names = dict.fromkeys(row[series] for panel in panels for row in panel.rows)
        shown = list(key) or [(name, looks[name]) for name in looks if name in names]
        shown += [(name, drawing.REFERENCE) for _, name in y.marks if name]
        drawing.legend(canvas, shown, 5 if small else 4, inside=small)
    canvas.supxlabel(drawing.elide(x.label, 60), size=9, **_low(canvas, small))
    if not small:
        canvas.supylabel(y.label, size=9)
    return canvas


def _low(canvas: Canvas, small: bool) -> dict[str, float]:
    return {"y": 0.1 / canvas.get_figheight()} if small else {}


def _title(axes: Axes, title: str, small: bool, limit: int) -> None:
    if small:
        axes.set_title("\n".join(drawing.elide(x, 30) for x in title.split("\n")), size=7,
                       weight="normal")  # fmt: skip
    else:
        axes.set_title(drawing.elide(title, limit))


def _curves(
    axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look], columns: tuple[str, str, str, str],
    dots: bool, ended: Mapping[tuple[str, Hashable], str],
) -> list[tuple[float, float, str, Look]]:  # fmt: skip
    """Draw the lines of a panel; return where each ends, with its name and look."""
    x, y, series, unit = columns
    ends = []
    for name, mine in by(rows, series).items():
        look, units = looks[name], by(mine, unit)
        whole = {u: each for u, each in units.items() if (name, u) not in ended}
        at = by((row for each in whole.values() for row in each), x)
        at = {k: [row[y] for row in at[k]] for k in sorted(at) if dots or len(at[k]) == len(whole)}
        means = [math.fsum(values) / len(values) for values in at.values()]
        if unit:
            low, high = ([f(values) for values in at.values()] for f in (min, max))
            axes.fill_between(list(at), low, high, color=look.colour, alpha=0.16, lw=0)
        for each in units.values() if unit else ():
            hollow: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 3, "mew": 0.7}
            thin: dict[str, Any] = {"lw": 0.6, "alpha": 0.45}
            axes.plot([row[x] for row in each], [row[y] for row in each], color=look.colour,
                      mfc="none", **(hollow if dots else thin))  # fmt: skip
        size = 0 if unit and not dots else 5.5 if unit else 3
        axes.plot(list(at), means, color=look.colour, ls=look.dash, marker=look.marker, ms=size,
                  mew=0, lw=1.8 if unit and not dots else 1.3, zorder=3)  # fmt: skip
        if means:
            ends.append((float(max(at)), means[-1], name, look))
        elif mine:
            last = max(mine, key=lambda row: row[x])
            lost = {mark for (other, _), mark in ended.items() if other == name} == {"x"}
            note = " (diverged)" if lost else " (unfinished)"
            ends.append((float(last[x]), last[y], name + note, look))
    return ends


def _end_marks(
    axes: Axes, rows: Sequence[Row], looks: Mapping[str, Look], columns: tuple[str, str, str, str],
    ended: Mapping[tuple[str, Hashable], str],
) -> None:  # fmt: skip
    """Mark the last value of every unit that enters no mean, at the edge where it lies beyond."""
    x, y, series, unit = columns
    low, high = axes.get_ylim()
    for name, mine in by(rows, series).items() if unit else ():
        for each, own in by(mine, unit).items():
            if mark := ended.get((name, each)):
                axes.plot(own[-1][x], min(max(own[-1][y], low), high), mark, zorder=4, ms=7,
                          color=looks[name].colour, mew=1.6, clip_on=False)  # fmt: skip


def _finish(axes: Axes, given: Axis, side: str, small: bool) -> None:
    """Set scale, limits, ticks and marks of one side of a panel: call it once all is drawn."""
    axis = getattr(axes, f"{side}axis")
    for value, _ in given.marks:
        line = axes.axhline if side == "y" else axes.axvline
        line(value, color=MUTED, lw=0.9, ls=drawing.REFERENCE.dash if value else "-", zorder=1)
    if given.scale == "log2":
        getattr(axes, f"set_{side}scale")("log", base=2)
    if given.limits:
        getattr(axes, f"set_{side}lim")(*given.limits)
    if given.scale == "log" and not given.ticks:
        drawing.log_axis(axes, side, most=3 if small else 6)
    elif given.scale == "log":
        getattr(axes, f"set_{side}scale")("log")
    if given.ticks:
        axis.set_major_locator(FixedLocator(list(given.ticks)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    elif given.scale in ("linear", "steps") and (small or given.scale == "steps"):
        axis.set_major_locator(MaxNLocator(4 if small else 8, integer=given.scale == "steps"))
    if side == "y":
        axes.grid(axis="y")
        axes.spines["left"].set_color(GRID)
    axes.tick_params(length=2 if small else 3, **({"labelsize": 7} if small else {}))


def _texts_above(axes: Axes, above: Sequence[Sequence[tuple[float, str]]]) -> None:
    for row, texts in enumerate(above):
        for x, text in texts:
            axes.annotate(
                text, (x, 1), (0, 4 + 12 * row), xycoords=("data", "axes fraction"), size=7.5,
                textcoords="offset points", ha="center", va="bottom", annotation_clip=False,
            )  # fmt: skip


# --- intervals ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Span:
    """A mark with an interval, from columns of a row; hollow and dashed, or filled."""

    value: str
    low: str
    high: str
    hollow: bool = False


def intervals(
    panels: Sequence[Panel], looks: Mapping[str, Look], x: Axis, *, series: str = "variant",
    unit: str = "", spans: Sequence[Span] = (), notes: Mapping[str, str] | None = None,
    noted: str = "", shapes: Sequence[Hashable] = (), row: float = 0.3,
) -> Canvas:  # fmt: skip
    """Draw a row of marks for each name: a mean with its interval, and what it is the mean of.

    Args:
      panels: what is drawn, below one another.
      looks: by the name of a series.
      x: the horizontal axis, on which the marks lie.
      series: column with the names.
      unit: column of what a mean is over: the interval is Student's, small hollow marks show each.
      spans: without units, the marks of a row, which bring their intervals.
      notes: by name, written in the right margin.
      noted: what the notes are, above them.
      shapes: units in the order in which they take the shapes of their marks; () for rings.
      row: height of a row in inches.

    Returns:
      The canvas.
    """
    sizes = [len(p.names or by(p.rows, series)) for p in panels]
    titled = 0.42 * len(panels) * (len(panels) > 1)
    canvas, every = _frame(
        len(panels), 1, 0.65 + row * sum(sizes) + titled, False, sharex=True,
        height_ratios=[size + 0.2 for size in sizes],
    )  # fmt: skip
    drawn = [each for panel in panels for each in panel.rows]
    values = [r[x.column] for r in drawn] if unit else [
        r[c] for r in drawn for s in spans for c in (
            (s.value, s.low, s.high) if s.hollow else (s.value,)) if r[c] is not None
    ]  # fmt: skip
    found = {
        (i, name): _estimates(mine, x.column, spans, bool(unit))
        for i, panel in enumerate(panels)
        for name, mine in by(panel.rows, series).items()
    }
    reach = statistics.window(
        [*values, *(value for value, _ in x.marks)], [e for each in found.values() for e, _ in each]
    )
    for i, (axes, panel) in enumerate(zip(every, panels, strict=True)):
        names = panel.names or list(by(panel.rows, series))
        axes.set_xlim(*(x.limits or reach))
        axes.set_ylim(len(names) - 0.4, -0.6)
        short = [n.removesuffix(f", {panel.title}") if panel.title else n for n in names]
        axes.set_yticks(range(len(names)), [drawing.elide(name) for name in short])
        axes.set_title(drawing.elide(panel.title, 80))
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", length=3, labelbottom=axes is every[-1])
        for value, _ in x.marks:
            axes.axvline(value, color=MUTED, lw=1, ls=drawing.REFERENCE.dash if value else "-",
                         zorder=1)  # fmt: skip
        mine = by(panel.rows, series)
        for y, name in enumerate(names):
            marks = found.get((i, name), [])
            for k, (estimate, hollow) in enumerate(marks):
                off = 0.28 * (k - (len(marks) - 1) / 2)
                _interval(axes, y + off, estimate, looks[name], hollow)
            for each in mine.get(name, ()) if unit else ():
                shape = _SHAPES[shapes.index(each[unit]) % len(_SHAPES)] if shapes else "o"
                axes.plot(each[x.column], y + 0.24, shape, ms=3.6, mfc=PAPER, mew=0.9, zorder=4,
                          mec=looks[name].colour)  # fmt: skip
            if notes:
                _margin(axes, y, notes.get(name, ""), size=8, va="center")
    if noted:
        _margin(every[0], None, noted, size=7, color=MUTED, va="bottom")
    every[-1].set_xlabel(drawing.elide(x.label, 80))
    return canvas


def _estimates(
    rows: Sequence[Row], column: str, spans: Sequence[Span], units: bool
) -> list[tuple[statistics.Estimate, bool]]:
    """Return the means with their intervals of a row of marks, and whether each is hollow."""
    if units:
        return [(statistics.estimate(row[column] for row in rows), False)]
    return [
        (statistics.Estimate(1, row[s.value], None, row[s.low], row[s.high]), s.hollow)
        for row in rows for s in spans
    ]  # fmt: skip


def _interval(axes: Axes, y: float, found: statistics.Estimate, look: Look, hollow: bool) -> None:
    """Draw a mean and its interval, with an arrow where it leaves the axis."""
    low, high = axes.get_xlim()
    if found.low is not None and found.high is not None:
        axes.plot((max(found.low, low), min(found.high, high)), (y, y), color=look.colour, lw=2,
                  ls=(0, (3, 1.5)) if hollow else "-", solid_capstyle="butt", zorder=2)  # fmt: skip
        for beyond, mark, end in ((found.low < low, "<", low), (found.high > high, ">", high)):
            if beyond:
                axes.plot(end, y, mark, color=look.colour, ms=6, mew=0, clip_on=False)
    if found.mean is not None:
        axes.plot(found.mean, y, look.marker, mfc=PAPER if hollow else look.colour, ms=7,
                  mec=look.colour, mew=1.4 * hollow, zorder=3)  # fmt: skip


def _margin(axes: Axes, y: float | None, text: str, **look: Any) -> None:
    """Write in the right margin: at a row, or above all of them."""
    axes.annotate(
        text, (1, 1 if y is None else y), (6, y is None), textcoords="offset points",
        xycoords="axes fraction" if y is None else ("axes fraction", "data"),
        annotation_clip=False, **look,
    )  # fmt: skip


# --- heat maps ------------------------------------------------------------------------------------


def grid(
    panels: Sequence[Panel], x: Axis, value: Axis, *, height: float, columns: int,
    scale: Normalize, extend: str = "neither", y: str = "block", part: str = "sublayer",
    lost: str = "not_finite",
) -> Canvas:  # fmt: skip
    """Draw heat maps: columns are what x takes in a panel, rows the places on y, from the lowest.

    Args:
      panels: what is drawn.
      x: the horizontal axis.
      value: what the colours are.
      height: of the picture in inches.
      columns: of panels.
      scale: from values to the colour map; zero on a logarithmic one takes the darkest colour.
      extend: at which ends values lie beyond it: "neither", "min", "max" or "both".
      y: column of the rows' numbers from 1.
      part: column of what a row is split into.
      lost: column that says whether something was not finite there.

    Returns:
      The canvas.
    """
    tall = max(panel.title.count("\n") for panel in panels) > 1
    canvas = drawing.fixed_canvas(height, 0.4, 0.95, 0.5, 0.45, (0.22, 0.75 if tall else 0.55))
    every = list(canvas.subplots(math.ceil(len(panels) / columns), columns, squeeze=False).ravel())
    for axes in every[len(panels) :]:
        axes.remove()
    for i, (axes, panel) in enumerate(zip(every, panels, strict=False)):
        steps, places = by(panel.rows, x.column), by(panel.rows, y)
        cells = steps.values()
        values = np.array([[r[value.column] for r in own] for own in cells]).T
        _map(axes, values, np.array([[r[lost] for r in own] for own in cells]).T, scale)
        depth, per = len(places), len(by(next(iter(places.values())), part))
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
        axes.set_title(panel.title, size=6.5 if tall else 7.5)
        if i % columns == 0:
            axes.set_ylabel(y, size=8)
    canvas.supxlabel(x.label, size=9, **_low(canvas, True))
    _colour_bar(canvas, scale, extend, value.label)
    return canvas


def _map(axes: Axes, values: np.ndarray, lost: np.ndarray, scale: Normalize) -> None:
    drawn = np.isfinite(values) & ((values > 0) if isinstance(scale, LogNorm) else True)
    colours = matplotlib.colormaps[COLOURS](scale(np.where(drawn, values, scale.vmin)))
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
