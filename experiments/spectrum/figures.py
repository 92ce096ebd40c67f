"""Figures of a survey: over blocks, depth and training; histograms with what theory says."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from experiments.spectrum.data import TEN, Survey, SurveyPoint, log_of
from normjax.reporting import drawing, pictures
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import INK, MUTED, Look
from normjax.reporting.pictures import Axis, Panel, Row, by
from normjax.reporting.wording import counted

Quantity = Callable[[SurveyPoint], np.ndarray]
"""A point to (L, n) values: n of them for every block."""
BINS = 32
GAIN_TITLES = {
    "rr": "radial to radial (RR)", "rt": "radial to tangential (RT)",
    "tr": "tangential to radial (TR)", "tt": "tangential to tangential (TT)",
}  # fmt: skip
INITIAL = "initialization"
LEVELS = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def all_figures(survey: Survey) -> list[Figure]:
    """Return every figure that the survey allows, in the order of the page."""
    last = max((p.step for p in survey.points if p.measured and p.main), default=0)
    made = [
        blocks(survey), stacks(survey), conditions(survey, 0), gains(survey, 0), depths(survey),
        training(survey), *([conditions(survey, last), gains(survey, last)] if last else []),
        sequences(survey),
    ]  # fmt: skip
    return [figure for figure in made if figure is not None]


# --- over blocks, depth and training --------------------------------------------------------------


def conditions(survey: Survey, step: int) -> Figure | None:
    """Draw raw and deflated condition numbers by block."""

    def ratio(point: SurveyPoint, name: str) -> np.ndarray:
        values = point.arrays[name]
        zero = ~np.isfinite(log_of(values[..., -1:], point.arrays["raw"])[..., 0])
        found = np.where(zero, np.inf, values[..., 0] / np.where(zero, 1.0, values[..., -1]))
        return found.reshape(len(values), -1)

    panels = {
        "without the radial direction": lambda p: ratio(p, "deflated"),
        "raw": lambda p: ratio(p, "raw"),
    }
    return _profiles(
        survey, step, panels, "condition", "Condition numbers", "condition number",
        "Largest over smallest singular value of each block's token Jacobian, median over "
        "sequences, positions and seeds, band from the lower to the upper quartile. The raw number "
        "of a norm on the stream is s²/ε, a statement about ε alone; without the radial direction "
        "it says how unevenly the block treats what the network can see. Where the smallest value "
        "is no more than rounding there is no number.",
    )  # fmt: skip


def gains(survey: Survey, step: int) -> Figure | None:
    """Draw the four radial and tangential gains by block."""
    panels = {
        title: lambda p, name=name: np.abs(p.arrays[f"gains/{name}"]).reshape(p.depth, -1)
        for name, title in GAIN_TITLES.items()
    }  # fmt: skip
    return _profiles(
        survey, step, panels, "gains", "Radial and tangential gains", "gain",
        "What a small change of the stream is multiplied by in each block. Radial: along the "
        "token's own direction, a change of its length. Tangential: across it, a change of its "
        "direction. A pre-norm block passes the radial part on; a norm on the stream removes it "
        "(what is left is ε). Medians and quartiles as above; absolute values.",
    )  # fmt: skip


def _profiles(
    survey: Survey, step: int, panels: Mapping[str, Quantity], name: str, title: str, label: str,
    caption: str,
) -> Figure | None:  # fmt: skip
    """Draw one panel per quantity with a line per series."""
    rows = [
        {"series": series, "panel": panel, "block": block,
         **dict(zip(("median", "low", "high"), at.tolist(), strict=True))}
        for panel, quantity in panels.items() for series in survey.series
        if (points := survey.main(series, step))
        for block, at in enumerate(_quartiles(
            np.concatenate([quantity(p) for p in points], axis=1)
        ), 1)
    ]  # fmt: skip
    if not rows:
        return None
    canvas = pictures.lines(
        [Panel(own, title, y=Axis("median", scale="log"))
         for title, own in by(rows, "panel").items()],
        survey.looks,
        Axis("block", "block", "steps", (0.7, max(float(row["block"]) for row in rows) + 0.3)),
        Axis("median", label), height=0.7 + 2.5 * math.ceil(len(panels) / 2), columns=2,
        series="series", band=("low", "high"),
    )  # fmt: skip
    slug, when = ("trained", f"after {step} steps") if step else (INITIAL, f"at {INITIAL}")
    return drawing.figure(f"{name}_{slug}", f"{title} by block, {when}", caption, canvas, rows)


def _quartiles(x: np.ndarray) -> np.ndarray:
    """Return median and quartiles (L, 3) of (L, n) numbers; infinite beside an infinite one."""
    with np.errstate(invalid="ignore"):
        found = np.quantile(x, (0.5, 0.25, 0.75), axis=1).T
    return np.where(np.isnan(found), np.inf, found)


def depths(survey: Survey) -> Figure | None:
    """Draw the ends of the stack's spectrum at initialization against depth, with theory."""
    lines = {name: survey.initialized(name) for name in survey.series}
    ends: dict[str, tuple[str, Callable[[np.ndarray], Any]]] = {
        "largest": ("log_high", lambda logs: np.median(logs[:, 0])),
        "root mean square": ("log_rms", lambda logs: (
            logs.max() + np.log(np.mean(np.exp(2 * (logs - logs.max())))) / 2
        )),
        "smallest": ("log_low", lambda logs: np.median(logs[:, -1])),
    }  # fmt: skip
    rows = [
        {"series": name, "end": end, "depth": depth,
         "measured": value(log), "theory": None if law is None else value(law),
         "log10_measured": log / TEN, "log10_theory": None if law is None else law / TEN}
        for name, by_depth in lines.items() if len(by_depth) > 1
        for end, (key, measure) in ends.items() for depth, points in by_depth.items()
        for log in (float(measure(np.concatenate([p.log_deflated() for p in points]))),)
        for law in (_theory(points, key),)
    ]  # fmt: skip
    if not rows:
        return None
    canvas = pictures.lines(
        [Panel(own, end, y=Axis("measured", scale="log")) for end, own in by(rows, "end").items()],
        survey.looks,
        Axis("depth", "depth (blocks)", "log2", ticks=sorted(by(rows, "depth"))),
        Axis("measured", "singular value of the stack"), height=3.6, columns=3, series="series",
        theory="theory",
    )  # fmt: skip
    return drawing.figure(
        "stack_over_depth", "The stack over depth, at initialization",
        "Singular values from the first block to the last, without the radial direction, at the "
        "last token: largest and smallest (median over sequences and seeds) and root mean square. "
        "Dotted: theory, from the weights and the size of the embedding.",
        canvas, rows,
    )  # fmt: skip


def value(log: float) -> float:
    """Return e^log; 0 or infinite beyond float64, which a figure leaves out: its data has log10."""
    with np.errstate(over="ignore"):
        return float(np.exp(log))


def _theory(points: Sequence[SurveyPoint], key: str) -> float | None:
    law = next((law for p in points if (law := p.law("stack")) is not None), None)
    if law is None or law[0]["log_high"] is None or law[0][key] is None:
        return None
    return float(law[0][key])


def training(survey: Survey) -> Figure | None:
    """Draw how the stack's spectrum moves as training goes on."""
    names = [name for name in survey.series if len(survey.steps(name)) > 1]
    if not names:
        return None
    canvas, panels = _grid(len(names), 1.75)
    rows: list[Row] = []
    for name, panel in zip(names, panels, strict=True):
        steps, look = survey.steps(name), survey.looks[name]
        pooled = (
            np.concatenate([p.log_deflated().ravel() for p in survey.main(name, s)]) for s in steps
        )
        bands = np.array([np.exp(np.quantile(logs, LEVELS)) for logs in pooled]).T
        for low, high, alpha in ((0, 6, 0.15), (1, 5, 0.25), (2, 4, 0.35)):
            panel.fill_between(steps, bands[low], bands[high], color=look.colour, alpha=alpha, lw=0)
        panel.plot(steps, bands[3], color=look.colour, marker=look.marker, ms=4, mew=0)
        drawing.log_axis(panel)
        panel.set_title(drawing.elide(name, 22))
        panel.grid(axis="y")
        panel.xaxis.set_major_locator(
            FixedLocator(steps if len(steps) < 6 else steps[:: len(steps) // 4])
        )
        rows += [
            {"series": name, "step": step, "quantile": level, "singular_value": float(value)}
            for step, column in zip(steps, bands.T, strict=True)
            for level, value in zip(LEVELS, column, strict=True)
        ]
    canvas.supxlabel("training step", fontsize=9)
    canvas.supylabel("singular value of the stack", fontsize=9)
    return drawing.figure(
        "stack_over_training", "The stack as training goes on",
        "Singular values from the first block to the last, without the radial direction, at the "
        "last token, all sequences and seeds together. Line: median; bands: middle half, middle "
        "90 %, all.",
        canvas, rows,
    )  # fmt: skip


def _grid(count: int, height: float) -> tuple[Any, list[Axes]]:
    """Return a canvas and its panels, up to three in a row."""
    columns = min(3, count)
    lines = math.ceil(count / columns)
    canvas = drawing.canvas(0.6 + height * lines)
    panels = list(canvas.subplots(lines, columns, squeeze=False).ravel())
    for panel in panels[count:]:
        panel.set_visible(False)
    return canvas, panels[:count]


def sequences(survey: Survey) -> Figure | None:
    """Draw the sorted singular values of the whole-sequence Jacobian, before and after training."""
    rows: list[Row] = []
    for name in survey.series:
        points = [p for p in survey.main(name) if p.arrays["sequence"].size]
        for step in dict.fromkeys((0, *sorted({p.step for p in points})[-1:])):
            curves = [p.arrays["sequence"] for p in points if p.step == step]
            if curves:
                with np.errstate(divide="ignore"):  # one that is zero makes a mean of zero
                    logs = np.mean([np.log(curve) for curve in curves], axis=0)
                rows += [
                    {"series": name, "step": step, "share": (i + 0.5) / len(logs),
                     "singular_value": value}
                    for i, value in enumerate(np.exp(logs).tolist())
                ]  # fmt: skip
    if not rows:
        return None
    values = sorted(row["singular_value"] for row in rows if row["singular_value"] > 0)
    low = values[len(values) // 50]
    canvas = pictures.lines(
        [Panel(own, f"step {step}" if step else INITIAL)
         for step, own in sorted(by(rows, "step").items())],
        {name: dataclasses.replace(look, marker="") for name, look in survey.looks.items()},
        Axis("share", "share of singular values above"),
        Axis("singular_value", "singular value", "log", (max(low / 3, 1e-8), values[-1] * 2)),
        height=3.4, columns=2, series="series",
    )  # fmt: skip
    return drawing.figure(
        "sequence_spectra", "Whole-sequence spectra of the stack",
        "All singular values of the Jacobian of a short sequence with respect to itself, from the "
        "first block to the last: what every token does to every later one. Sorted, as a share of "
        "their number; mean over seeds of the logarithm. The tail below is the norms' radial "
        "direction, one per token, and is a matter of ε.",
        canvas, rows,
    )  # fmt: skip


# --- histograms and laws --------------------------------------------------------------------------


def blocks(survey: Survey) -> Figure | None:
    """Draw the singular values of the first, middle and last block at initialization."""
    lines = {name: points for name in survey.series if (points := survey.main(name, 0))}
    if not lines:
        return None
    canvas = drawing.canvas(0.5 + 0.92 * len(lines))
    grid = canvas.subplots(len(lines), 3, squeeze=False)
    rows: list[Row] = []
    for number, ((name, points), axes) in enumerate(zip(lines.items(), grid, strict=True)):
        depth = points[0].depth
        for block, panel in zip((1, (depth + 1) // 2, depth), axes, strict=True):
            rows += _histogram(panel, points, f"block {block}", survey.looks[name])
            if number == 0:
                panel.set_title(f"block {block}" if depth > 1 else "the block")
        axes[0].set_ylabel(drawing.elide(name, 18), rotation=0, ha="right", va="center")
    canvas.supxlabel("singular value (logarithmic scale)", fontsize=9)
    return drawing.figure(
        "block_spectra", "Spectra of the blocks at initialization",
        "Singular values of the Jacobian of one token with respect to itself, without the radial "
        "direction, at the last token looked at; all sequences and seeds together. Bars: measured. "
        "Line: random-matrix theory from the weights of the first seed and the size of the stream, "
        "nothing fitted. Tokens whose streams differ in size have spectra of different size: each "
        "is put on the scale of the mean token by the factor that theory gives. "
        "Where a line is missing the table below says why. Each panel has a scale "
        "of its own.",
        canvas, rows,
    )  # fmt: skip


def stacks(survey: Survey) -> Figure | None:
    """Draw the singular values from the first block to the last at initialization."""
    lines = {name: points for name in survey.series if (points := survey.main(name, 0))}
    if not lines:
        return None
    canvas, panels = _grid(len(lines), 1.5)
    rows: list[Row] = []
    for (name, points), panel in zip(lines.items(), panels, strict=True):
        rows += _histogram(panel, points, "stack", survey.looks[name])
        panel.set_title(f"{drawing.elide(name, 22)}, {counted(points[0].depth, 'block')}")
    canvas.supxlabel("singular value (logarithmic scale)", fontsize=9)
    return drawing.figure(
        "stack_spectra", "Spectra from the first block to the last, at initialization",
        "As above, for the product over all blocks. The line follows from the weights and the size "
        "of the embedding alone: theory carries the size of the stream through all blocks.",
        canvas, rows,
    )  # fmt: skip


def _histogram(panel: Axes, points: Sequence[SurveyPoint], part: str, look: Look) -> Iterable[Row]:
    """Draw the singular values of a part over all seeds and sequences; return what was drawn."""
    law = points[0].law(part)
    reference = law[0]["log_rms"] if law is not None else None
    logs = np.concatenate([p.relative(part, reference) for p in points])
    logs = logs[np.isfinite(logs)]
    low, high = np.quantile(logs, (0.002, 0.998))
    if law is not None and len(law[1]):
        high = max(high, law[1][-1])
        low = min(low, max(law[1][0], low - 1.0))
    margin = max(0.06 * (high - low), 0.002)  # values that are all the same need an axis too
    low, high = low - margin, high + margin
    density, edges = np.histogram(logs, bins=BINS, range=(low, high))
    density = density / (len(logs) * np.diff(edges))
    panel.stairs(density, edges, fill=True, color=look.colour, alpha=0.45, lw=0)
    drawn = [("measured", (edges[1:] + edges[:-1]) / 2, density)]
    if law is not None and len(law[1]):
        panel.plot(law[1], law[2], color=INK, lw=1.1)
        drawn.append(("theory", law[1], law[2]))
    panel.set_xlim(low, high)
    panel.set_ylim(0, None)
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)
    if low < 0 < high:
        panel.axvline(0, color=MUTED, lw=0.7, ls=drawing.REFERENCE.dash, zorder=0)
    log_ticks(panel, low, high)
    return [
        {"series": points[0].series, "part": part, "kind": kind, "log_singular_value": float(x),
         "density": float(y)}
        for kind, at, values in drawn for x, y in zip(at, values, strict=True)
    ]  # fmt: skip


def log_ticks(panel: Axes, low: float, high: float, most: int = 4) -> None:
    """Put round singular values on an axis whose coordinate is their natural logarithm."""
    panel.xaxis.set_major_locator(FixedLocator([math.log(t) for t in round_ticks(low, high, most)]))
    panel.xaxis.set_major_formatter(lambda value, _: f"{math.exp(value):.6g}")
    panel.xaxis.set_minor_locator(NullLocator())


def round_ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return up to ``most`` round numbers whose natural logarithms lie between low and high.

    >>> round_ticks(math.log(0.009), math.log(110.0))
    [0.01, 0.1, 1.0, 10.0, 100.0]
    >>> round_ticks(math.log(0.985), math.log(1.016))
    [0.99, 1.0, 1.01]
    """
    first, last = math.floor(low / math.log(10)), math.ceil(high / math.log(10))
    for subs in ((1, 2, 5), (1, 3), (1,)):
        ticks = [s * 10.0**k for k in range(first, last + 1) for s in subs]
        ticks = [t for t in ticks if low <= math.log(t) <= high]
        if 2 < len(ticks) <= most:
            return ticks
    if last - first > 2:
        return ticks[:: math.ceil(len(ticks) / (most + 1))]
    span = math.exp(low), math.exp(high)
    found = MaxNLocator(most - 1, steps=[1, 2, 5, 10]).tick_values(*span)
    return [round(float(t), 12) for t in found if span[0] <= t <= span[1]]
