"""The look of every figure, and how it is saved: PNG, SVG and the data beside them.

Figures are made without pyplot: no global state, no display, the same bytes each time.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from normjax.reporting import tables
from normjax.reporting.palette import GRID, INK, MUTED, PAPER, Look
from normjax.runs import files

WIDTH = 7.4
"""Width of every figure in inches: at this size its 9 point text is read on a page."""

_STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "text.parse_math": False,
    "axes.titlesize": 9.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.linewidth": 0.8, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "axes.unicode_minus": True,
    "axes.formatter.useoffset": False,  # a tick says its whole number
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "grid.color": GRID, "grid.linewidth": 0.7, "legend.frameon": False,
    "figure.facecolor": PAPER, "axes.facecolor": "none", "savefig.facecolor": PAPER,
    "svg.hashsalt": "normjax", "svg.fonttype": "path", "lines.solid_capstyle": "round",
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A figure ready to be saved: file name without ending, words, canvas, and the data drawn."""

    name: str
    title: str
    caption: str
    canvas: Canvas
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def figure(
    name: str, title: str, caption: str, canvas: Canvas, rows: Sequence[Mapping[str, Any]]
) -> Figure:
    """Return a figure whose data are the rows that it was drawn from, all with the same keys."""
    return Figure(name, title, caption, canvas, list(rows[0]), [list(r.values()) for r in rows])


@contextmanager
def style() -> Iterator[None]:
    """Set the style while figures are made and saved, whatever the user's matplotlibrc says."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # A user's title may hold letters the font lacks: an empty box is no reason to fail.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def save(figure: Figure, folder: Path, description: str) -> str:
    """Write NAME.png, NAME.svg and NAME.csv.

    Args:
        figure: what to save.
        folder: where; made if absent.
        description: provenance, for the metadata of both pictures.

    Returns:
        The SVG text.
    """
    with style():
        png, svg = io.BytesIO(), io.BytesIO()
        words: dict[str, Any] = {"Title": figure.title, "Description": description}
        render(figure.canvas, png, "png", {**words, "Software": "normjax"}, dpi=200)
        words |= {"Date": None, "Creator": "normjax"}
        render(figure.canvas, svg, "svg", words)
    files.write_bytes(folder / f"{figure.name}.png", png.getvalue())
    files.write_bytes(folder / f"{figure.name}.svg", svg.getvalue())
    tables.write_text(folder / f"{figure.name}.csv", tables.csv_text(figure.columns, figure.rows))
    return svg.getvalue().decode()


def render(canvas: Canvas, file: IO[bytes], kind: str, words: dict[str, Any], **how: Any) -> None:
    """Draw a figure as "png" or "svg" into a file, whatever backend matplotlib is set to."""
    backend = {"png": "agg", "svg": "svg"}[kind]
    canvas.savefig(file, format=kind, backend=backend, metadata=words, **how)


REFERENCE = Look(MUTED, "", (0, (1, 2)))
"""How the loss of a reference model is drawn: a dotted line without marks."""


def elide(text: str, limit: int = 34) -> str:
    """Return text cut to ``limit`` letters: a user's long name must not crowd out the picture.

    >>> elide("abcdef", 4)
    'abc…'
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"


def canvas(height: float, width: float = WIDTH) -> Canvas:
    """Return an empty figure of a size in inches, laid out so that nothing is cut off."""
    return Canvas(figsize=(width, height), layout="constrained")


def fixed_canvas(
    height: float, left: float, right: float, bottom: float, top: float, gaps: tuple[float, float]
) -> Canvas:
    """Return an empty figure with margins in inches, for panels of a known layout.

    Gaps are between columns and between rows, as parts of a panel. Solving the layout of dozens of
    panels takes seconds.
    """
    made = Canvas(figsize=(WIDTH, height))
    made.subplots_adjust(
        left=left / WIDTH, right=1 - right / WIDTH, bottom=bottom / height, top=1 - top / height,
        wspace=gaps[0], hspace=gaps[1],
    )  # fmt: skip
    return made


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions as little as possible so that neighbours are at least ``gap`` apart.

    Least squares with an order constraint: after subtracting ``i gap`` from the i-th smallest the
    answer must not fall, which pooling adjacent violators solves exactly. The result is kept within
    ``[low, high]`` where that leaves room.

    >>> spread([0.0, 0.0], 1.0, -10.0, 10.0)
    [-0.5, 0.5]
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    pools: list[list[float]] = []
    for rank, index in enumerate(order):
        pools.append([positions[index] - rank * gap, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            value, weight = pools.pop()
            total = pools[-1][1] + weight
            pools[-1] = [(pools[-1][0] * pools[-1][1] + value * weight) / total, total]
    level = [value for value, weight in pools for _ in range(int(weight))]
    top = high - (len(level) - 1) * gap
    result = [0.0] * len(level)
    for rank, index in enumerate(order):
        result[index] = max(min(level[rank], top), low) + rank * gap
    return result


def end_labels(
    axes: Axes, ends: Sequence[tuple[float, float, str, Look]], size: float = 8.5
) -> None:
    """Write names at the right of a plot, moved apart, each tied to the end of its line.

    Args:
        axes: with its final limits and scales.
        ends: x and y (data), name and look of every line.
        size: points of the text.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    height = axes.get_position().height * figure.get_figheight() * 72
    to_axes = axes.transData + axes.transAxes.inverted()
    inside = [tuple(to_axes.transform((x, y))) for x, y, _, _ in ends]
    inside = [(float(x), min(max(float(y), 0.0), 1.0)) for x, y in inside]
    places = spread([y for _, y in inside], size * 1.4 / height, 0.0, 1.0)
    for (x, y), place, (_, _, name, look) in zip(inside, places, ends, strict=True):
        start = max(x, 1.0) if x > 0.95 else x
        middle = 1.012 if x > 0.95 else x
        axes.plot(
            [start, middle, 1.035], [y, y, place], color=look.colour, lw=0.8, clip_on=False,
            transform=axes.transAxes, alpha=1.0 if x > 0.95 else 0.5,
        )  # fmt: skip
        axes.plot(
            1.045, place, marker=look.marker, ls="none", ms=4.5, mew=0, color=look.colour,
            clip_on=False, transform=axes.transAxes,
        )  # fmt: skip
        axes.text(1.06, place, elide(name), va="center", size=size, transform=axes.transAxes)


def power_of_ten(value: float) -> str:
    """Return a power of ten as text with a raised exponent; 0.1, 1 and 10 as themselves.

    >>> power_of_ten(1e-12), power_of_ten(10.0)
    ('10⁻¹²', '10')
    """
    exponent = round(math.log10(value))
    if abs(exponent) <= 1:
        return f"{value:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def log_axis(axes: Axes, name: str = "y", every: int = 0, most: int = 6) -> None:
    """Make an axis logarithmic, ticked so that a page can be read: call it once all is drawn.

    Args:
        axes: of the plot.
        name: "x" or "y".
        every: powers of ten from tick to tick; 0 chooses, down to parts of a decade where the axis
            is short. An axis shorter than half a decade is widened to that: rounding must not look
            like a trend.
        most: how many ticks there may be.
    """
    getattr(axes, f"set_{name}scale")("log")
    low, high = getattr(axes, f"get_{name}lim")()
    if high / low < 3.2:
        middle = math.sqrt(low * high)
        low, high = middle / 1.8, middle * 1.8
        getattr(axes, f"set_{name}lim")(low, high)
    log_ticks(getattr(axes, f"{name}axis"), low, high, every, most)


def log_ticks(axis: Axis, low: float, high: float, every: int = 0, most: int = 6) -> None:
    """Tick an axis that is logarithmic already; see :func:`log_axis`."""
    axis.set_minor_locator(NullLocator())
    decades = math.log10(high / low)
    if decades < 1.6 and not every:
        subs = (1, 2, 5) if decades > 0.7 else (1, 1.5, 2, 3, 5, 7)
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        return
    axis.set_major_locator(LogLocator(10.0 ** (every or math.ceil(decades / most)), numticks=30))
    axis.set_major_formatter(lambda value, _: power_of_ten(value))


def legend(
    figure: Canvas, looks: Iterable[tuple[str, Look]], columns: int, inside: bool = False
) -> None:
    """Put one key for all panels above them."""
    handles = [
        Line2D([], [], color=look.colour, marker=look.marker, ls=look.dash, label=elide(name, 20),
               ms=5, mew=0)
        for name, look in looks
    ]  # fmt: skip
    place = "upper left" if inside else "outside upper left"  # outside: room is made for it
    figure.legend(handles=handles, loc=place, ncols=columns, handlelength=2.2)
