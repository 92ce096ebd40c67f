"""The map of where each placement trains, curves over the rate, sensitivity, early predictors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.stability.data import DIVERGES, IS_STUCK, OPEN, Place, Predictor, Stability
from normjax.reporting import drawing
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import INK, MUTED, Look
from normjax.reporting.wording import counted

COLUMNS = 4
SHOWN = 14


def region(stability: Stability) -> Figure | None:
    """Draw the map: depth by learning rate, one panel per placement and warm-up."""
    losses = [c.loss.mean for p in stability.places for c in stability.cells(p)]
    known = [x for x in losses if x is not None]
    if not known:
        return None
    unigram = stability.results.reference("unigram")
    high = unigram if unigram is not None and unigram > min(known) else max(known)
    shade = Normalize(min(known), max(high, min(known) + 1e-6))
    warmups, depths = stability.values("warmup"), stability.values("depth")
    columns = min(COLUMNS, len(stability.series))
    lines = math.ceil(len(stability.series) / columns)
    canvas = drawing.canvas(0.9 + len(warmups) * lines * (0.75 + 0.24 * len(depths)))
    grid = canvas.subplots(len(warmups) * lines, columns, squeeze=False)
    data: list[tuple] = []
    for panel in grid.ravel():
        panel.set_visible(False)
    for w, warmup in enumerate(warmups):
        for s, series in enumerate(stability.series):
            panel = grid[w * lines + s // columns, s % columns]
            panel.set_visible(True)
            data += _map(panel, stability, series, warmup, shade)
            words = f"warm-up {warmup}" if warmup else "no warm-up"
            panel.set_title(f"{drawing.elide(series, 18)}, {words}", size=8.5)
            if s % columns == 0:
                panel.set_ylabel("blocks")
    canvas.supxlabel("peak learning rate", fontsize=9)
    key = colormaps["cividis_r"]
    mappable = matplotlib_mappable(shade, key)
    bar = canvas.colorbar(
        mappable, ax=grid.ravel().tolist(), location="top", shrink=0.5, aspect=40, pad=0.04
    )
    bar.set_label(f"final validation loss (nats per {stability.results.unit})", size=8.5)
    return Figure(
        "stability_map", "Where each placement trains",
        "Mean final loss over seeds by depth and peak learning rate; bright is good. D: runs that "
        "diverged, S: runs stuck at or above the loss of knowing only how frequent tokens are, ·: "
        "unfinished, with their number where not all seeds are. The ring marks the best rate of a "
        "depth.",
        canvas,
        ("series", "warmup", "depth", "learning_rate", "loss", "diverged", "stuck", "runs"), data,
    )  # fmt: skip


def matplotlib_mappable(shade: Normalize, key):
    """Return what a colour bar is made of."""
    from matplotlib.cm import ScalarMappable

    return ScalarMappable(shade, key)


def _map(
    panel: Axes, stability: Stability, series: str, warmup: int, shade: Normalize
) -> list[tuple]:
    depths, rates = stability.values("depth"), stability.rates
    key = colormaps["cividis_r"]
    data: list[tuple] = []
    for row, depth in enumerate(depths):
        place = Place(series, depth, warmup)
        best = stability.best(place)
        for column, rate in enumerate(rates):
            cell = stability.cell(place, rate)
            if not cell.trials:
                continue
            mean = cell.loss.mean
            colour = key(shade(mean)) if mean is not None else (1, 1, 1, 1)
            panel.fill_between(
                [column, column + 1], row, row + 1, facecolor=colour, edgecolor="white", lw=1
            )
            words = _letters(cell)
            luminance = float(np.dot(colour[:3], (0.2126, 0.7152, 0.0722)))
            ink = INK if luminance > 0.45 else "white"
            if words:
                panel.text(
                    column + 0.5, row + 0.5, words, ha="center", va="center", size=7.5, color=ink
                )
            elif best is not None and best.rate == rate:
                panel.plot(column + 0.5, row + 0.5, marker="o", mfc="none", mec=ink, ms=5, mew=1.1)
            counts = (cell.count(DIVERGES), cell.count(IS_STUCK), len(cell.trials))
            data.append((series, warmup, depth, rate, mean, *counts))
    panel.set_xlim(0, len(rates))
    panel.set_ylim(0, len(depths))
    panel.xaxis.set_major_locator(FixedLocator([i + 0.5 for i in range(len(rates))]))
    panel.set_xticklabels([f"{rate:g}" for rate in rates], size=6.5)
    panel.yaxis.set_major_locator(FixedLocator([i + 0.5 for i in range(len(depths))]))
    panel.set_yticklabels([str(d) for d in depths], size=7.5)
    panel.tick_params(length=0)
    for side in panel.spines.values():
        side.set_visible(False)
    return data


def _letters(cell) -> str:
    parts = []
    for letter, outcome in (("D", DIVERGES), ("S", IS_STUCK), ("·", OPEN)):
        count = cell.count(outcome)
        if count:
            parts.append(letter if count == len(cell.trials) else f"{letter}{count}")
    return " ".join(parts)


def curves(stability: Stability, looks: dict[str, Look]) -> Figure | None:
    """Draw final loss against learning rate by depth and warm-up."""
    depths, warmups = stability.values("depth"), stability.values("warmup")
    canvas = drawing.canvas(0.8 + 1.8 * len(warmups))
    grid = canvas.subplots(len(warmups), len(depths), squeeze=False, sharey=True)
    data: list[tuple] = []
    for row, warmup in enumerate(warmups):
        for column, depth in enumerate(depths):
            panel = grid[row, column]
            for series in stability.series:
                look = looks[series]
                cells = stability.cells(Place(series, depth, warmup))
                shown = [
                    (c.rate, c.loss)
                    for c in cells
                    if c.loss.mean is not None and not c.count(DIVERGES)
                ]
                if not shown:
                    continue
                x = [rate for rate, _ in shown]
                y = [loss.mean for _, loss in shown]
                panel.plot(
                    x, y, color=look.colour, marker=look.marker, ls=look.dash, ms=3.5, mew=0, lw=1.1
                )
                for rate, loss in shown:
                    if loss.low is not None and loss.high is not None and loss.n > 2:
                        panel.plot([rate] * 2, [loss.low, loss.high], color=look.colour, lw=0.8)
                data += [(series, warmup, depth, r, e.mean, e.low, e.high) for r, e in shown]
            drawing.log_axis(panel, "x")
            panel.grid(True, axis="y")
            if row == 0:
                panel.set_title(counted(depth, "block"))
            if column == 0:
                panel.set_ylabel(f"warm-up {warmup}" if warmup else "no warm-up")
    if not data:
        return None
    unigram = stability.results.reference("unigram")
    values = [row[4] for row in data]
    top = max(values) if unigram is None else min(max(values), unigram + 0.3)
    grid[0, 0].set_ylim(min(values) - 0.05, top + 0.05)
    if unigram is not None:
        for panel in grid.ravel():
            panel.axhline(unigram, color=MUTED, lw=0.9, ls=drawing.REFERENCE.dash)
    canvas.supxlabel("peak learning rate", fontsize=9)
    canvas.supylabel(f"final validation loss (nats per {stability.results.unit})", fontsize=9)
    drawing.legend(canvas, [(s, looks[s]) for s in stability.series], 5)
    return Figure(
        "loss_by_rate", "Final loss against learning rate",
        "Mean over seeds, with 95 % intervals from three seeds on; rates at which a run diverged "
        "are left out. Dotted: the unigram loss. A flat valley is a placement that forgives the "
        "choice of the rate.",
        canvas, ("series", "warmup", "depth", "learning_rate", "loss", "low", "high"), data,
    )  # fmt: skip


def sensitivity(stability: Stability, looks: dict[str, Look]) -> Figure | None:
    """Draw the learning-rate sensitivity against depth, one panel per warm-up."""
    warmups = stability.values("warmup")
    canvas = drawing.canvas(3.0)
    panels = canvas.subplots(1, len(warmups), squeeze=False, sharey=True)[0]
    data: list[tuple] = []
    for panel, warmup in zip(panels, warmups, strict=True):
        for series in stability.series:
            look = looks[series]
            points = [
                (depth, stability.sensitivity(Place(series, depth, warmup)))
                for depth in stability.values("depth")
            ]
            points = [(d, e) for d, e in points if e.mean is not None]
            if not points:
                continue
            panel.plot(
                [d for d, _ in points], [e.mean for _, e in points], color=look.colour,
                marker=look.marker, ls=look.dash, ms=4, mew=0, lw=1.2,
            )  # fmt: skip
            data += [(series, warmup, d, e.mean, e.low, e.high, e.n) for d, e in points]
        panel.set_title(f"warm-up {warmup}" if warmup else "no warm-up")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_locator(FixedLocator(stability.values("depth")))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.set_xlabel("depth (blocks)")
        panel.grid(True, axis="y")
    if not data:
        return None
    panels[0].set_ylim(0, None)
    panels[0].set_ylabel("sensitivity (nats)")
    drawing.legend(canvas, [(s, looks[s]) for s in stability.series], 5)
    return Figure(
        "rate_sensitivity", "Learning-rate sensitivity",
        "E[min(L(rate), L₀) − L*] over the learning rates of the grid: what is lost on average by "
        "not knowing the best rate; L₀ is the loss at initialization, which a diverged run counts "
        "as (Wortsman et al. 2023). Mean over seeds.",
        canvas, ("series", "warmup", "depth", "sensitivity", "low", "high", "seeds"), data,
    )  # fmt: skip


def predictors(found: Sequence[Predictor]) -> Figure | None:
    """Draw the strongest early predictors with their intervals."""
    shown = list(found[:SHOWN])
    if not shown:
        return None
    canvas = drawing.canvas(0.8 + 0.27 * len(shown))
    panel = canvas.add_subplot()
    for row, each in enumerate(reversed(shown)):
        panel.plot([each.low, each.high], [row, row], color=MUTED, lw=2)
        panel.plot(each.value, row, marker="o", color=INK, ms=5, mew=0)
        if each.within is not None:
            panel.plot(each.within, row, marker="D", mfc="none", mec=INK, ms=4.5)
    panel.set_yticks(range(len(shown)))
    panel.set_yticklabels([_label(p) for p in reversed(shown)], size=8)
    panel.axvline(0, color=MUTED, lw=0.8)
    panel.set_xlim(-1.02, 1.02)
    panel.set_xlabel("rank correlation with the final loss")
    panel.grid(True, axis="x")
    return Figure(
        "early_predictors", "What is known early, and what it says of the end",
        "Spearman's correlation of one early number per run with the run's final loss, diverged "
        "runs last; bar: 95 % bootstrap interval over the cells of the grid; diamond: the same "
        "among runs of one learning rate. The strongest of many: their order is uncertain where "
        "bars overlap.",
        canvas, ("predictor", "when", "correlation", "low", "high", "within_rate", "runs"),
        [(p.name, p.when, p.value, p.low, p.high, p.within, p.runs) for p in found],
    )  # fmt: skip


def _label(predictor: Predictor) -> str:
    when = {"at initialization": "start", "in the first 1 % of steps": "first 1 %"}
    return f"{predictor.name} ({when.get(predictor.when, 'grid')})"
