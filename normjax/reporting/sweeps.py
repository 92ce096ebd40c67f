"""Figures of final loss against an axis of the experiment, or against a rate that was varied."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from normjax.reporting import drawing, statistics
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import GRID, MUTED, Look
from normjax.reporting.results import DIVERGED, Results, Variant
from normjax.reporting.wording import representatives


def by_x(results: Results, looks: dict[str, Look], relative: bool = False) -> Figure | None:
    """Draw final loss (or its difference to the baseline) against x, one line per series."""
    axis = results.x or {}
    best = [v for v in representatives(results) if v.cell.x is not None]
    base = {v.cell.x: v.losses for v in best if v.cell.series == results.baseline}
    lines: dict[str, dict[float, dict[int, float]]] = {name: {} for name in results.series}
    lost: dict[str, dict[float, tuple[int, int]]] = {name: {} for name in results.series}
    for variant in best:
        x = float(variant.cell.x or 0.0)
        values = variant.losses
        if relative:
            values = statistics.differences(values, base.get(x, {}))
        lines[variant.cell.series][x] = values
        if variant.count(DIVERGED):
            lost[variant.cell.series][x] = (variant.count(DIVERGED), len(variant.runs))
    if relative:
        lines.pop(results.baseline, None)
        lost.pop(results.baseline, None)
    name = str(axis.get("name", "x"))
    words = _x_words(results, name, relative)
    scale = (str(axis.get("scale", "linear")), str(axis.get("label", name)))
    reference = 0.0 if relative else results.reference("unigram")
    return _against(results, looks, words, scale, lines, lost, reference)


def _x_words(results: Results, name: str, relative: bool) -> tuple[str, str, str]:
    caption = (
        "Line: mean over finished seeds; band: from the lowest to the highest seed; hollow marks: "
        "seeds. The strip at the top counts diverged runs."
    )
    if relative:
        title = f"Difference to {results.baseline} by {name}"
        caption = f"Paired by seed; above 0 is worse than {results.baseline}. " + caption
        return (f"difference_by_{_slug(name)}", title, caption)
    return (f"loss_by_{_slug(name)}", f"Final loss by {name}", caption)


def _slug(name: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name) or "x"


def by_rate(results: Results, looks: dict[str, Look], name: str) -> Figure | None:
    """Draw final loss against a rate that takes several values, one line per series."""
    lines: dict[str, dict[float, dict[int, float]]] = {series: {} for series in results.series}
    lost: dict[str, dict[float, tuple[int, int]]] = {series: {} for series in results.series}
    chosen: dict[tuple[str, float], Variant] = {}
    for variant in results.variants:
        key = (variant.cell.series, float(getattr(variant.rates, name, 0.0)))
        rival = chosen.get(key)
        if rival is None or _mean(variant) < _mean(rival):
            chosen[key] = variant
    for (series, value), variant in sorted(chosen.items()):
        if variant.rates is not None:
            lines[series][value] = variant.losses
            if variant.count(DIVERGED):
                lost[series][value] = (variant.count(DIVERGED), len(variant.runs))
    words = name.replace("_", " ")
    caption = (
        "Line: mean over finished seeds; band: from the lowest to the highest seed; hollow marks: "
        "seeds. The strip at the top counts diverged runs."
    )
    if len(results.varied) > 1 or results.x:
        caption += " At each value the best of whatever else was varied."
    values = [value for points in lines.values() for value in points]
    scale = "log10" if values and min(values) > 0 else "linear"
    title = (f"loss_by_{name}", f"Final loss by {words}", caption)
    return _against(
        results, looks, title, (scale, words), lines, lost, results.reference("unigram")
    )


def _mean(variant: Variant) -> float:
    return math.inf if variant.loss.mean is None else variant.loss.mean


def _against(
    results: Results,
    looks: dict[str, Look],
    words: tuple[str, str, str],
    scale: tuple[str, str],
    lines: dict[str, dict[float, dict[int, float]]],
    lost: dict[str, dict[float, tuple[int, int]]],
    reference: float | None,
) -> Figure | None:
    values = [v for points in lines.values() for seeds in points.values() for v in seeds.values()]
    ticks = sorted({x for points in lines.values() for x in points})
    if not values:
        return None
    counts = [name for name in lost if lost[name]]
    relative = reference == 0.0
    zoom = _zoom(values) if relative else None
    figure = drawing.canvas(4.2 + 0.17 * len(counts) + (2.8 if zoom else 0))
    panels = figure.subplots(2 if zoom else 1, 1, squeeze=False, sharex=True)[:, 0]
    what = f"validation loss (nats per {results.unit})"
    figure.supylabel(f"difference in {what}" if relative else what, size=9)
    unigram = None
    for axes in panels:
        _lines(axes, looks, lines)
        _x_axis(axes, ticks, scale[0])
        unigram = _reference(axes, reference, values)
    _diverged_strip(panels[0], lost, counts)
    panels[-1].set_xlabel(drawing.elide(scale[1], 60))
    if zoom:
        panels[-1].set_ylim(*zoom)
        panels[-1].set_title("the same, enlarged around 0")
    for axes in panels:
        low, high = axes.get_ylim()
        ends = [end for end in _ends(looks, lines) if low <= end[1] <= high]
        if unigram is not None:
            ends.append((axes.get_xlim()[1], unigram, "unigram", drawing.REFERENCE))
        drawing.end_labels(axes, ends)
    data = [
        (name, x, seed, value)
        for name, points in lines.items()
        for x, seeds in points.items()
        for seed, value in seeds.items()
    ]
    column = "difference" if relative else "validation_loss"
    return Figure(*words, figure, ("series", scale[1], "seed", column), data)


def _lines(
    axes: Axes, looks: dict[str, Look], lines: dict[str, dict[float, dict[int, float]]]
) -> None:
    for name, points in lines.items():
        look = looks[name]
        shown = {x: list(seeds.values()) for x, seeds in sorted(points.items()) if seeds}
        means = [math.fsum(here) / len(here) for here in shown.values()]
        ranges = [min(v) for v in shown.values()], [max(v) for v in shown.values()]
        axes.fill_between(list(shown), *ranges, color=look.colour, alpha=0.16, lw=0)
        axes.plot(
            list(shown), means, color=look.colour, marker=look.marker, ls=look.dash, ms=5.5, mew=0
        )
        for x, here in shown.items():
            axes.plot([x] * len(here), here, "o", ms=3, mfc="none", mec=look.colour, mew=0.7)


def _ends(
    looks: dict[str, Look], lines: dict[str, dict[float, dict[int, float]]]
) -> list[tuple[float, float, str, Look]]:
    """Return the right end of every line with its name and look."""
    ends = []
    for name, points in lines.items():
        known = [x for x, seeds in points.items() if seeds]
        if known:
            values = list(points[max(known)].values())
            ends.append((max(known), math.fsum(values) / len(values), name, looks[name]))
    return ends


def _zoom(values: Sequence[float]) -> tuple[float, float] | None:
    """Return a window around 0 that holds most values where a few large ones hide the others."""
    sizes = sorted(abs(value) for value in values)
    reach = 3 * sizes[len(sizes) // 2]
    if not 0 < reach < sizes[-1] / 3:
        return None
    inside = [value for value in values if abs(value) <= reach]
    margin = 0.12 * (max([0, *inside]) - min([0, *inside]))
    return min([0, *inside]) - margin, max([0, *inside]) + margin


def _x_axis(axes: Axes, ticks: Sequence[float], scale: str) -> None:
    if scale != "linear":
        axes.set_xscale("log", base=2 if scale == "log2" else 10)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(axis="y")
    axes.spines["left"].set_color(GRID)
    axes.set_xlim(*_padded(ticks, scale))


def _padded(ticks: Sequence[float], scale: str) -> tuple[float, float]:
    low, high = ticks[0], ticks[-1]
    if scale == "linear":
        pad = 0.04 * (high - low) or 0.5
        return low - pad, high + pad
    factor = (high / low) ** 0.04 if high > low else 1.5
    return low / factor, high * factor


def _reference(axes: Axes, value: float | None, values: Sequence[float]) -> float | None:
    """Draw a line at 0, or at the unigram loss where it is near; return the latter if drawn."""
    if value is None:
        return None
    if value == 0.0:
        axes.axhline(0, color=MUTED, lw=1)
    elif value <= max(values) + 0.15 * (max(values) - min(values)):
        axes.axhline(value, color=MUTED, lw=0.9, ls=drawing.REFERENCE.dash)
        return value
    return None


def _diverged_strip(
    axes: Axes,
    lost: dict[str, dict[float, tuple[int, int]]],
    names: Sequence[str],
) -> None:
    """Write one line per series with diverged runs above the plot: a cross and the count."""
    for index, name in enumerate(names):
        for x, (count, runs) in lost[name].items():
            axes.annotate(
                f"× {drawing.elide(name, 20)}: {count} of {runs} diverged", (x, 1),
                (0, 4 + 12 * (len(names) - 1 - index)), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", va="bottom", size=7.5,
                annotation_clip=False,
            )  # fmt: skip
