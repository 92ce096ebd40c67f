"""Pictures of the usual kinds, each drawn from tidy rows: the rows that lie beside it as CSV.

A row is a mapping from column to value, one per number drawn. Rows are spread over panels; what
they have in common (a series, a unit such as a seed, a place on x) is told by the columns' names.
:func:`lines` draws something over x, :func:`intervals` a row of marks for each name.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from normjax.reporting import drawing, statistics
from normjax.reporting.palette import GRID, MUTED, PAPER, Look

Row = Mapping[str, Any]
Told = str | Callable[[Row], Hashable]
"""What rows have in common: a column, or a function of a row."""
Points = Sequence[tuple[Any, float]]
Curves = dict[str, dict[Hashable, Points]]
Ended = Mapping[tuple[str, Hashable], str]
_SHAPES = ("o", "s", "^", "D", "v", "P", "X", "p")


@dataclasses.dataclass(frozen=True)
class Axis:
    """What lies along x or y.

    Attributes:
      column: of the rows.
      label: for readers.
      scale: "linear", "log", "log2" or "steps": whole numbers.
      limits: None to choose them, or one of them.
      ticks: where they are fixed.
      marks: lines across the plot, value, name and perhaps look; a name "" is not written.
    """

    column: str
    label: str = ""
    scale: str = "linear"
    limits: tuple[float | None, float | None] | None = None
    ticks: Sequence[float] = ()
    marks: Sequence[tuple[float, str] | tuple[float, str, Look]] = ()


@dataclasses.dataclass(frozen=True)
class Panel:
    """Rows that share a pair of axes.

    Attributes:
      rows: in the order in which their names are drawn.
      title: above the panel.
      x, y: its own, where it does not share those of the picture.
      names: of :func:`intervals`, to show some that have no row, or another order.
    """

    rows: Sequence[Row]
    title: str = ""
    x: Axis | None = None
    y: Axis | None = None
    names: Sequence[str] = ()


def by(rows: Iterable[Row], told: Told) -> dict[Any, list[Row]]:
    """Return rows grouped by what they have in common, in order of appearance."""
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        groups[told(row) if callable(told) else row.get(told)].append(row)
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
    columns: int = 1, series: Told = "variant", unit: Told = "", dots: bool = False,
    ended: Ended | None = None, small: bool = False, band: tuple[str, str] | None = None,
    theory: str = "", joined: bool = True,
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
      series: what tells the lines apart.
      unit: what tells apart what a line is the mean of, such as seeds.
      dots: whether units are hollow marks and not thin lines.
      ended: marker of units that enter no mean, by series and unit: "x" diverged, "|" unfinished.
      small: whether panels are small and many.
      band: columns of the ends of a band about a line; None where a row has none.
      theory: column of what a closed form gives: dotted, or whole where marks are not joined.
      joined: whether the marks of a series are.
      above: lines of text above the first panel, from the lowest: x and text.
      key: names and looks above the panels; without any those of the series.

    Returns:
      The canvas.
    """
    canvas, every = _frame(
        len(panels), columns, height, small, sharey=not any(panel.y for panel in panels),
        sharex=not small and not any(panel.x for panel in panels),
    )  # fmt: skip
    ended = ended or {}
    curves: list[Curves] = []
    for axes, panel in zip(every, panels, strict=True):
        up = (panel.y or y).column
        found = by((row for row in panel.rows if row[up] is not None), series)
        curves.append({
            name: {u: _points(rows, x, up) for u, rows in by(own, unit).items()}
            for name, own in found.items()
        })  # fmt: skip
        _draw_curves(axes, curves[-1], looks, ended, bool(unit), dots, joined)
        for name, own in by(panel.rows, series).items():
            look, dash = looks[name], drawing.REFERENCE.dash if joined else looks[name].dash
            known = [row for row in own if band and row[band[0]] is not None]
            if band and known:
                at, low, high = ([row[column] for row in known] for column in (x.column, *band))
                axes.fill_between(at, low, high, color=look.colour, alpha=0.13, lw=0)
            if points := _points(own, x, theory):
                axes.plot(*zip(*points, strict=True), color=look.colour, ls=dash, lw=1.2)
    for axes, panel, drawn in zip(every, panels, curves, strict=True):
        _finish(axes, panel.x or x, "x", small)
        _finish(axes, panel.y or y, "y", small)
        _title(axes, panel.title, small, 46 if columns > 1 else 80)
        low, high = axes.get_ylim()
        for (name, each), mark in ended.items():
            if points := drawn.get(name, {}).get(each):
                axes.plot(points[-1][0], min(max(points[-1][1], low), high), mark, zorder=4, ms=7,
                          color=looks[name].colour, mew=1.6, clip_on=False)  # fmt: skip
        ends = _ends(drawn, looks, ended, dots)
        for at, value, name, look in ends if columns > 1 and unit and not dots else ():
            if name in drawn and low <= value <= high:  # a key finds its lines by their marks
                axes.plot(at, value, look.marker, color=look.colour, ms=5.5, mew=0, zorder=5,
                          clip_on=False)  # fmt: skip
        if columns == 1:
            _texts_above(axes, above if axes is every[0] else ())
            ends += [(axes.get_xlim()[1], v, n, drawing.REFERENCE)
                     for v, n, *_ in (panel.y or y).marks if n]  # fmt: skip
            drawing.end_labels(axes, [e for e in ends if panel.y is None or low <= e[1] <= high])
    if columns > 1:
        names = set().union(*curves)
        shown = list(key) or [(name, look) for name, look in looks.items() if name in names]
        shown += [(name, drawing.REFERENCE) for _, name, *_ in y.marks if name]
        drawing.legend(canvas, shown, 5 if small else 4, inside=small)
    canvas.supxlabel(drawing.elide(x.label, 60), size=9, **_low(canvas, small))
    canvas.supylabel("" if small else y.label, size=9)
    return canvas


def _points(rows: Iterable[Row], x: Axis, column: str) -> list[tuple[Any, float]]:
    """Return where the rows that have a value in a column lie."""
    return [(row[x.column], row[column]) for row in rows if row.get(column) is not None]


def _low(canvas: Canvas, small: bool) -> dict[str, float]:
    return {"y": 0.1 / canvas.get_figheight()} if small else {}


def _title(axes: Axes, title: str, small: bool, limit: int) -> None:
    text = "\n".join(drawing.elide(x, 30 if small else limit) for x in title.split("\n"))
    axes.set_title(text, size=7 if small else 9.5, weight="normal" if small else "bold")


def _means(
    units: Mapping[Hashable, Points], name: str, ended: Ended, dots: bool
) -> dict[Any, list[float]]:
    """Return by x what the units that count have there; without dots where all of them have."""
    whole = [points for unit, points in units.items() if (name, unit) not in ended]
    at: dict[Any, list[float]] = defaultdict(list)
    for x, y in itertools.chain.from_iterable(whole):
        at[x].append(y)
    return {x: at[x] for x in sorted(at) if dots or len(at[x]) == len(whole)}


def _draw_curves(
    axes: Axes, curves: Curves, looks: Mapping[str, Look], ended: Ended, several: bool, dots: bool,
    joined: bool,
) -> None:  # fmt: skip
    for name, units in curves.items():
        look, at = looks[name], _means(units, name, ended, dots)
        if several:
            low, high = ([pick(values) for values in at.values()] for pick in (min, max))
            axes.fill_between(list(at), low, high, color=look.colour, alpha=0.16, lw=0)
        for points in units.values() if several else ():
            axes.plot(
                *zip(*points, strict=True), color=look.colour, ls="none" if dots else "-", ms=3,
                marker="o" if dots else "", mew=0.7, mfc="none", lw=0.6, alpha=1 if dots else 0.45,
            )  # fmt: skip
        size = 0 if several and not dots else 5.5 if several else 3 if joined else 4.5
        axes.plot(
            list(at), [math.fsum(v) / len(v) for v in at.values()], color=look.colour,
            ls=look.dash if joined else "none", marker=look.marker, ms=size, mew=0,
            lw=1.3 if size else 1.8, zorder=3,
        )  # fmt: skip


def _ends(
    curves: Curves, looks: Mapping[str, Look], ended: Ended, dots: bool
) -> list[tuple[float, float, str, Look]]:
    """Return where each name is tied: the end of its mean, else of its longest unit."""
    ends = []
    for name, units in curves.items():
        if at := _means(units, name, ended, dots):
            x, values = max(at.items())
            ends.append((float(x), math.fsum(values) / len(values), name, looks[name]))
        else:
            x, y = max(itertools.chain.from_iterable(units.values()), key=lambda point: point[0])
            lost = {mark for (other, _), mark in ended.items() if other == name} == {"x"}
            note = " (diverged)" if lost else " (unfinished)"
            ends.append((float(x), y, name + note, looks[name]))
    return ends


def _finish(axes: Axes, given: Axis, side: str, small: bool) -> None:
    """Set scale, limits, ticks and marks of one side of a panel: call it once all is drawn."""
    axis = getattr(axes, f"{side}axis")
    _marks(axes, given, side)
    if given.scale.startswith("log"):
        getattr(axes, f"set_{side}scale")("log", base=2 if given.scale == "log2" else 10)
    if given.limits:
        getattr(axes, f"set_{side}lim")(*given.limits)
    if given.ticks:
        axis.set_major_locator(FixedLocator(list(given.ticks)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    elif given.scale == "log":
        drawing.log_axis(axes, side, most=3 if small else 6)
    elif small or given.scale == "steps":
        axis.set_major_locator(MaxNLocator(4 if small else 8, integer=given.scale == "steps"))
    if side == "y":
        axes.grid(axis="y")
        axes.spines["left"].set_color(GRID)
    axes.tick_params(length=2 if small else 3, labelsize=7 if small else 9)


def _marks(axes: Axes, given: Axis, side: str) -> None:
    """Draw lines across the plot: dotted, or whole at 0, unless they have a look of their own."""
    for value, _, *own in given.marks:
        line = axes.axhline if side == "y" else axes.axvline
        look = own[0] if own else drawing.REFERENCE if value else Look(MUTED, "")
        line(value, color=look.colour, lw=0.9, ls=look.dash, zorder=1)


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
    """A mark with an interval, from columns of a row; hollow and dashed, or filled.

    Attributes:
      value, low, high: columns; the ends may be "".
      hollow: the mark.
      marker: its shape, where it is not that of the series.
    """

    value: str
    low: str
    high: str
    hollow: bool = False
    marker: str = ""


def intervals(
    panels: Sequence[Panel], looks: Mapping[str, Look], x: Axis, *, series: Told = "variant",
    unit: str = "", spans: Sequence[Span] = (), notes: Mapping[str, str] | None = None,
    noted: str = "", shapes: Sequence[Hashable] = (), row: float = 0.3, letters: int = 34,
) -> Canvas:  # fmt: skip
    """Draw a row of marks for each name: a mean with its interval, and what it is the mean of.

    Args:
      panels: what is drawn, below one another.
      looks: by the name of a series.
      x: the horizontal axis, on which the marks lie.
      series: what names the rows.
      unit: column of what a mean is over: the interval is Student's, small hollow marks show each.
      spans: without units, the marks of a row, which bring their intervals.
      notes: by name, written in the right margin.
      noted: what the notes are, above them.
      shapes: units in the order in which they take the shapes of their marks; () for rings.
      row: height of a row in inches.
      letters: to which names are cut.

    Returns:
      The canvas.
    """
    shown = [list(p.names) or list(by(p.rows, series)) for p in panels]
    sizes = [len(names) for names in shown]
    titled = 0.42 * len(panels) * (len(panels) > 1)
    canvas, every = _frame(
        len(panels), 1, 0.65 + row * sum(sizes) + titled, False, sharex=True,
        height_ratios=[size + 0.2 for size in sizes],
    )  # fmt: skip
    rows = [each for panel in panels for each in panel.rows]
    found = [
        {name: _estimates(own, x.column, spans) for name, own in by(panel.rows, series).items()}
        for panel in panels
    ]
    core = [each[x.column] for each in rows] if unit else [
        each.get(column) for each in rows for s in spans
        for column in ((s.value, s.low, s.high) if s.hollow else (s.value,))
    ]  # fmt: skip
    core += [value for value, *_ in x.marks]
    estimates = [e for own in found for each in own.values() for e, *_ in each]
    reach = statistics.window([value for value in core if value is not None], estimates)
    for axes, panel, names, own in zip(every, panels, shown, found, strict=True):
        axes.set_xlim(*(x.limits or reach))
        axes.set_ylim(len(names) - 0.4, -0.6)
        tail = f", {panel.title}" if panel.title else ""
        named = [drawing.elide(name.removesuffix(tail), letters) for name in names]
        axes.set_yticks(range(len(names)), named)
        axes.set_title(drawing.elide(panel.title, 80))
        axes.grid(axis="x")
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", length=3, labelbottom=axes is every[-1])
        _marks(axes, x, "x")
        for y, name in enumerate(names):
            marks = own.get(name, [])
            for k, (estimate, hollow, marker) in enumerate(marks):
                off = 0.28 * (k - (len(marks) - 1) / 2)
                look = dataclasses.replace(looks[name], marker=marker or looks[name].marker)
                _interval(axes, y + off, estimate, look, hollow)
            if notes:
                _margin(axes, y, notes.get(name, ""), size=8, va="center")
        each_of = by(panel.rows, series) if unit else {}
        for name, each in ((name, each) for name, own in each_of.items() for each in own):
            shape = _SHAPES[shapes.index(each[unit]) % len(_SHAPES)] if shapes else "o"
            axes.plot(each[x.column], names.index(name) + 0.24, shape, ms=3.6, mfc=PAPER, mew=0.9,
                      zorder=4, mec=looks[name].colour)  # fmt: skip
    _margin(every[0], None, noted, size=7, color=MUTED, va="bottom")
    every[-1].set_xlabel(drawing.elide(x.label, 80))
    return canvas


def _estimates(
    rows: Sequence[Row], column: str, spans: Sequence[Span]
) -> list[tuple[statistics.Estimate, bool, str]]:
    """Return the mean with its interval of each mark, whether it is hollow, and its shape."""
    if not spans:
        return [(statistics.estimate(row[column] for row in rows), False, "")]
    return [
        (statistics.Estimate(1, row[s.value], None, *map(row.get, (s.low, s.high))), s.hollow,
         s.marker)
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
