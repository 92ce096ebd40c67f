"""Figures of a survey over blocks, over depth and over training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.spectrum.data import Point, Survey
from normjax.reporting import drawing
from normjax.reporting.drawing import Figure

Quantity = Callable[[Point], np.ndarray]
"""A point to (L, n) values: n of them for every block."""

GAIN_TITLES = {
    "rr": "radial to radial (RR)", "rt": "radial to tangential (RT)",
    "tr": "tangential to radial (TR)", "tt": "tangential to tangential (TT)",
}  # fmt: skip


def conditions(survey: Survey, step: int) -> Figure | None:
    """Draw raw and deflated condition numbers by block."""
    panels: list[tuple[str, Quantity]] = [
        ("without the radial direction", lambda p: _ratio(p.arrays["deflated"])),
        ("raw", lambda p: _ratio(p.arrays["raw"])),
    ]
    made = _profiles(survey, step, panels, "condition number", log=True)
    if made is None:
        return None
    canvas, data = made
    return Figure(
        f"condition_{_slug(step)}", f"Condition numbers by block, {_when(step)}",
        "Largest over smallest singular value of each block's token Jacobian, median over "
        "sequences, positions and seeds, band from the lower to the upper quartile. The raw number "
        "of a norm on the stream is s²/ε, a statement about ε alone; without the radial direction "
        "it says how unevenly the block treats what the network can see.",
        canvas, ("series", "panel", "block", "median", "low", "high"), data,
    )  # fmt: skip


def gains(survey: Survey, step: int) -> Figure | None:
    """Draw the four radial and tangential gains by block."""
    panels: list[tuple[str, Quantity]] = [
        (title, lambda p, name=name: np.abs(p.arrays[f"gains/{name}"]).reshape(p.depth, -1))
        for name, title in GAIN_TITLES.items()
    ]
    made = _profiles(survey, step, panels, "gain", log=True, floor=1e-9)
    if made is None:
        return None
    canvas, data = made
    return Figure(
        f"gains_{_slug(step)}", f"Radial and tangential gains by block, {_when(step)}",
        "What a small change of the stream is multiplied by in each block. Radial: along the "
        "token's own direction, a change of its length. Tangential: across it, a change of its "
        "direction. A pre-norm block passes the radial part on; a norm on the stream removes it "
        "(what is left is ε). Medians and quartiles as above; absolute values.",
        canvas, ("series", "panel", "block", "median", "low", "high"), data,
    )  # fmt: skip


def _ratio(values: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        ratio = values[..., 0] / values[..., -1]
    return ratio.reshape(len(ratio), -1)


def _slug(step: int) -> str:
    return "initialization" if step == 0 else "trained"


def _when(step: int) -> str:
    return "at initialization" if step == 0 else f"after {step} steps"


def _profiles(
    survey: Survey, step: int, panels: Sequence[tuple[str, Quantity]], label: str, *,
    log: bool, floor: float = 0.0,
):  # fmt: skip
    """Draw one panel per quantity with a line per series; return the canvas and the data."""
    lines = {name: survey.main(name, step) for name in survey.series}
    lines = {name: points for name, points in lines.items() if points}
    if not lines:
        return None
    rows = math.ceil(len(panels) / 2)
    canvas = drawing.canvas(0.7 + 2.5 * rows)
    grid = canvas.subplots(rows, 2, squeeze=False).ravel()
    data: list[tuple] = []
    deepest = max(p.depth for points in lines.values() for p in points)
    for panel, (title, quantity) in zip(grid, panels, strict=False):
        for name, points in lines.items():
            values = np.concatenate([quantity(p) for p in points], axis=1)
            values = np.maximum(values, floor) if floor else values
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75), axis=1)
            blocks = np.arange(1, len(middle) + 1)
            look = survey.looks[name]
            panel.plot(
                blocks, middle, color=look.colour, marker=look.marker, ls=look.dash, ms=4, mew=0
            )
            panel.fill_between(blocks, low, high, color=look.colour, alpha=0.13, lw=0)
            data += [
                (name, title, *row)
                for row in zip(
                    blocks.tolist(), middle.tolist(), low.tolist(), high.tolist(), strict=True
                )
            ]
        panel.set_title(title)
        _block_axis(panel, deepest)
        if log:
            drawing.log_axis(panel)
        panel.grid(True, axis="y")
        panel.set_ylabel(label)
    drawing.legend(canvas, [(n, survey.looks[n]) for n in lines], 5)
    return canvas, data


def _block_axis(panel: Axes, deepest: int) -> None:
    ticks = sorted({1, deepest, *range(1, deepest + 1, max(1, math.ceil(deepest / 8)))})
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(0.7, deepest + 0.3)
    panel.set_xlabel("block")


def depths(survey: Survey) -> Figure | None:
    """Draw the ends of the stack's spectrum at initialization against depth, with theory."""
    lines = {name: survey.initialized(name) for name in survey.series}
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    if not lines:
        return None
    canvas = drawing.canvas(3.6)
    panels = canvas.subplots(1, 3)
    titles = ("largest", "root mean square", "smallest")
    data: list[tuple] = []
    for name, by_depth in lines.items():
        look, x = survey.looks[name], list(by_depth)
        for panel, title in zip(panels, titles, strict=True):
            y = [_end(points, title) for points in by_depth.values()]
            panel.plot(x, y, color=look.colour, marker=look.marker, ls=look.dash, ms=4, mew=0, lw=1)
            theory = [_theory(points, title) for points in by_depth.values()]
            known = [(a, b) for a, b in zip(x, theory, strict=True) if b]
            if known:
                panel.plot(
                    *zip(*known, strict=True), color=look.colour, ls=drawing.REFERENCE.dash, lw=1.2
                )
            data += [(name, title, *row) for row in zip(x, y, theory, strict=True)]
    ticks = sorted({depth for by_depth in lines.values() for depth in by_depth})
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title)
        panel.set_xscale("log", base=2)
        drawing.log_axis(panel)
        panel.xaxis.set_major_locator(FixedLocator(ticks))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_xlabel("depth (blocks)")
        panel.grid(True, axis="y")
    panels[0].set_ylabel("singular value of the stack")
    drawing.legend(canvas, [(n, survey.looks[n]) for n in lines], 5)
    return Figure(
        "stack_over_depth", "The stack over depth, at initialization",
        "Singular values from the first block to the last, without the radial direction, at the "
        "last token: largest and smallest (median over sequences and seeds) and root mean square. "
        "Dotted: theory, from the weights and the size of the embedding.",
        canvas, ("series", "end", "depth", "measured", "theory"), data,
    )  # fmt: skip


def _end(points: Sequence[Point], title: str) -> float:
    logs = np.concatenate([p.log_deflated() for p in points])
    if title == "root mean square":
        return float(np.sqrt(np.mean(np.exp(2 * logs))))
    return float(np.exp(np.median(logs[:, 0 if title == "largest" else -1])))


def _theory(points: Sequence[Point], title: str) -> float | None:
    law = next((law for p in points if (law := p.law("stack")) is not None), None)
    if law is None or law[0]["log_high"] is None:
        return None
    names = {"largest": "log_high", "root mean square": "log_rms", "smallest": "log_low"}
    value = law[0][names[title]]
    return None if value is None else float(np.exp(value))


def training(survey: Survey) -> Figure | None:
    """Draw how the stack's spectrum moves as training goes on."""
    names = [name for name in survey.series if len(survey.steps(name)) > 1]
    if not names:
        return None
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    canvas = drawing.canvas(0.6 + 1.75 * rows)
    panels = canvas.subplots(rows, columns, squeeze=False).ravel()
    levels = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
    data: list[tuple] = []
    for name, panel in zip(names, panels, strict=False):
        steps, look = survey.steps(name), survey.looks[name]
        pooled = [
            np.exp(np.concatenate([p.log_deflated().ravel() for p in survey.main(name, s)]))
            for s in steps
        ]
        bands = np.array([np.quantile(values, levels) for values in pooled]).T
        for low, high, alpha in ((0, 6, 0.15), (1, 5, 0.25), (2, 4, 0.35)):
            panel.fill_between(steps, bands[low], bands[high], color=look.colour, alpha=alpha, lw=0)
        panel.plot(steps, bands[3], color=look.colour, marker=look.marker, ms=4, mew=0)
        drawing.log_axis(panel)
        panel.set_title(drawing.elide(name, 22))
        panel.grid(True, axis="y")
        panel.xaxis.set_major_locator(
            FixedLocator(steps if len(steps) < 6 else steps[:: len(steps) // 4])
        )
        data += [
            (name, step, level, float(value))
            for step, column in zip(steps, bands.T, strict=True)
            for level, value in zip(levels, column, strict=True)
        ]
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    canvas.supxlabel("training step", fontsize=9)
    canvas.supylabel("singular value of the stack", fontsize=9)
    return Figure(
        "stack_over_training", "The stack as training goes on",
        "Singular values from the first block to the last, without the radial direction, at the "
        "last token, all sequences and seeds together. Line: median; bands: middle half, middle "
        "90 %, all.",
        canvas, ("series", "step", "quantile", "singular_value"), data,
    )  # fmt: skip
