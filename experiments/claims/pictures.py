"""The figures of the page: what of the claims goes with a size, a depth or a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

from experiments.claims.claim import Claim, Series
from normjax.reporting import drawing, palette
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import Look


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one figure is drawn, but for its series.

    Attributes:
      title, caption: as on the page.
      x, y: the words on the axes.
      x_scale: of the horizontal axis; the vertical one is logarithmic in every figure.
      y_ticks: where they are fixed.
    """

    title: str
    caption: str
    x: str
    y: str
    x_scale: Literal["linear", "log"] = "log"
    y_ticks: tuple[float, ...] = ()


PLANS = {
    "scale-invariance": Plan(
        "What eps does to scale invariance (A4)",
        "How much longer RMSNorm's output becomes when its input is ten times as large. Marks:"
        " measured on the module; line: the square root of (1 + x) / (1 + x / 100), minus 1, with x"
        " the eps over the mean square of the input. Without eps it is 0.",
        "eps / mean(h²)", "|N(10 h)| / |N(h)| − 1",
    ),
    "stream-size": Plan(
        "The size of a stream over depth (A10, A11, A12)",
        "Root mean square of the residual stream after each of 16 layers. Marks: measured on"
        " decoders whose branches are pinned to a linear rule; lines: the closed forms 1.1ⁿ,"
        " 1 + 0.1 n, 0.9ⁿ, 1 and √½. Without norms the branch decides; with one in front of it,"
        " updates of one size add.",
        "layers n", "size of the stream (it starts at 1)", "linear",
        (0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0),
    ),
    "taylor-remainder": Plan(
        "What first order leaves (A13)",
        "Size of f(t) − f(0) − t f′(0). Marks: measured; lines: t² |f″(0)| / 2, of slope 2. Longer"
        " steps feel the third order, short ones only rounding, which no step makes smaller; where"
        " that happened to leave exactly 0, there is no mark.",
        "step t", "what is left",
    ),
}  # fmt: skip


def figures(claims: Sequence[Claim]) -> list[Figure]:
    """Return the figures for which the claims hold series, in the order of the page."""
    with drawing.style():
        made = []
        for name, plan in PLANS.items():
            series = [s for claim in claims for s in claim.series if s.figure == name]
            if series:
                made.append(_figure(name, plan, series))
    return made


def _figure(name: str, plan: Plan, series: Sequence[Series]) -> Figure:
    looks = palette.looks([s.label for s in series], series[0].label)
    canvas = drawing.canvas(3.6)
    axes = canvas.add_subplot()
    for s in series:
        _draw(axes, s, looks[s.label])
    axes.set_xscale(plan.x_scale)
    axes.set_yscale("log")
    axes.set_xlabel(plan.x)
    axes.set_ylabel(plan.y)
    axes.grid(True)
    if plan.y_ticks:
        axes.yaxis.set_major_locator(FixedLocator(plan.y_ticks))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.yaxis.set_major_locator(LogLocator(numticks=9))
        axes.yaxis.set_major_formatter(lambda value, _: drawing.power_of_ten(value))
    if plan.x_scale == "log":
        axes.xaxis.set_major_locator(LogLocator(numticks=12))
        axes.xaxis.set_major_formatter(lambda value, _: drawing.power_of_ten(value))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(FixedLocator(range(0, len(series[0].x), 4)))
    axes.yaxis.set_minor_locator(NullLocator())
    if len(series) > 1:
        drawing.legend(canvas, [(s.label, looks[s.label]) for s in series], 3)
    rows = [
        (s.label, float(x), float(m), float(e))
        for s in series
        for x, m, e in zip(s.x, s.measured, s.expected, strict=True)
    ]
    columns = ("series", "x", "measured", "closed_form")
    return Figure(name, plan.title, plan.caption, canvas, columns, rows)


def _draw(axes: Axes, series: Series, look: Look) -> None:
    axes.plot(series.x, series.expected, color=look.colour, ls=look.dash, lw=1.1)
    seen = [(x, y) for x, y in zip(series.x, series.measured, strict=True) if y > 0]
    axes.plot(
        [x for x, _ in seen], [y for _, y in seen], color=look.colour, marker=look.marker,
        ls="none", ms=4, mew=0,
    )  # fmt: skip
