"""The map of where each placement trains, curves over the rate, sensitivity, early predictors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from experiments.stability.data import (
    DIVERGES,
    IS_STUCK,
    OPEN,
    MapCell,
    Place,
    Predictor,
    Stability,
)
from normjax.reporting import drawing, pictures
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import INK, Look
from normjax.reporting.pictures import Axis, Panel, Row, Span, by
from normjax.reporting.wording import counted

COLUMNS, SHOWN = 4, 14
COLOURS = colormaps["cividis_r"]
REACH = 0.3
"""Nats above the unigram loss up to which losses are drawn."""


def all_figures(stability: Stability, found: Sequence[Predictor]) -> list[Figure]:
    """Return every figure that the grid allows."""
    made = [region(stability), curves(stability), sensitivity(stability), predictors(found)]
    return [figure for figure in made if figure is not None]


def in_words(warmup: int) -> str:
    """Return a number of warm-up steps in words.

    >>> in_words(0), in_words(25)
    ('no warm-up', 'warm-up 25')
    """
    return f"warm-up {warmup}" if warmup else "no warm-up"


def _columns(cell: MapCell) -> Row:
    """Return the first columns of a row."""
    return {"series": cell.place.series, "warmup": cell.place.warmup, "depth": cell.place.depth,
            "learning_rate": cell.rate, "loss": cell.loss.mean}  # fmt: skip


def region(stability: Stability) -> Figure | None:
    """Draw the map: depth by learning rate, one panel per placement and warm-up."""
    known = [x for c in stability.cells(*stability.places) if (x := c.loss.mean) is not None]
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
    for panel in grid.ravel():
        panel.set_visible(False)
    rows: list[Row] = []
    for w, warmup in enumerate(warmups):
        for s, series in enumerate(stability.series):
            panel = grid[w * lines + s // columns, s % columns]
            panel.set_visible(True)
            places = [Place(series, depth, warmup) for depth in depths]
            for row, place in enumerate(places):
                _row_of_cells(panel, row, stability, place, shade)
            panel.set_title(f"{drawing.elide(series, 18)}, {in_words(warmup)}", size=8.5)
            panel.set_ylabel("" if s % columns else "blocks")
            _axes(panel, stability.rates, depths)
            rows += [
                {**_columns(c), "diverged": c.count(DIVERGES), "stuck": c.count(IS_STUCK),
                 "runs": len(c.trials)}
                for c in stability.cells(*places)
            ]  # fmt: skip
    canvas.supxlabel("peak learning rate", fontsize=9)
    bar = canvas.colorbar(
        ScalarMappable(shade, COLOURS), ax=grid.ravel().tolist(), location="top", shrink=0.5,
        aspect=40, pad=0.04,
    )  # fmt: skip
    bar.set_label(f"final test loss (nats per {stability.results.unit})", size=8.5)
    return drawing.figure(
        "stability_map", "Where each placement trains",
        "Mean final loss over seeds by depth and peak learning rate; bright is good. D: runs that "
        "diverged, S: runs stuck at or above the loss of knowing only how frequent tokens are, ·: "
        "unfinished, with their number where not all seeds are. The ring marks the best rate of a "
        "depth.",
        canvas, rows,
    )  # fmt: skip


def _row_of_cells(
    panel: Axes, row: int, stability: Stability, place: Place, shade: Normalize
) -> None:
    best = stability.best(place)
    for cell in stability.cells(place):
        left, mean = stability.rates.index(cell.rate), cell.loss.mean
        colour = COLOURS(shade(mean)) if mean is not None else (1, 1, 1, 1)
        panel.fill_between(
            [left, left + 1], row, row + 1, facecolor=colour, edgecolor="white", lw=1
        )
        ink = INK if np.dot(colour[:3], (0.2126, 0.7152, 0.0722)) > 0.45 else "white"
        if words := _letters(cell):
            panel.text(left + 0.5, row + 0.5, words, ha="center", va="center", size=7.5, color=ink)
        elif best is not None and best.rate == cell.rate:
            panel.plot(left + 0.5, row + 0.5, marker="o", mfc="none", mec=ink, ms=5, mew=1.1)


def _letters(cell: MapCell) -> str:
    counts = {mark: cell.count(x) for mark, x in (("D", DIVERGES), ("S", IS_STUCK), ("·", OPEN))}
    return " ".join(k if n == len(cell.trials) else f"{k}{n}" for k, n in counts.items() if n)


def _axes(panel: Axes, rates: Sequence[float], depths: Sequence[int]) -> None:
    panel.set_xlim(0, len(rates))
    panel.set_ylim(0, len(depths))
    panel.set_xticks(np.arange(len(rates)) + 0.5, [f"{rate:g}" for rate in rates], size=6.5)
    panel.set_yticks(np.arange(len(depths)) + 0.5, [str(depth) for depth in depths], size=7.5)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def curves(stability: Stability) -> Figure | None:
    """Draw final loss against learning rate by depth and warm-up."""
    depths, warmups = stability.values("depth"), stability.values("warmup")
    cells = [
        c for warmup in warmups for depth in depths for series in stability.series
        for c in stability.cells(Place(series, depth, warmup))
        if c.loss.mean is not None and not c.count(DIVERGES)
    ]  # fmt: skip
    if not cells:
        return None
    rows = [{**_columns(c), "low": c.loss.low, "high": c.loss.high} for c in cells]
    drawn = by((
        row if c.loss.n > 2 else {**row, "low": None, "high": None}
        for row, c in zip(rows, cells, strict=True)
    ), lambda row: (row["warmup"], row["depth"]))  # fmt: skip
    unigram, losses = stability.results.reference("unigram"), [c.loss.mean or 0.0 for c in cells]
    label = f"final test loss (nats per {stability.results.unit})"
    canvas = pictures.lines(
        [Panel(drawn.get((w, d), []), f"{counted(d, 'block')}, {in_words(w)}")
         for w in warmups for d in depths],
        stability.looks, Axis("learning_rate", "peak learning rate", "log"),
        Axis("loss", label, limits=_window(losses, unigram),
             marks=[] if unigram is None else [(unigram, "")]),
        height=0.8 + 1.8 * len(warmups), columns=len(depths), series="series",
        band=("low", "high"),
    )  # fmt: skip
    return drawing.figure(
        "loss_by_rate", "Final loss against learning rate",
        "Mean over seeds, with 95 % intervals from three seeds on; rates at which a run diverged "
        "are left out. Dotted: the unigram loss. A flat valley is a placement that forgives the "
        "choice of the rate.",
        canvas, rows,
    )  # fmt: skip


def _window(losses: Sequence[float], unigram: float | None) -> tuple[float, float]:
    """Return limits that show what is near or below the unigram loss; without any, the better half.

    >>> _window([2.0, 9.0], 3.0), _window([9.0, 10.0, 1e9], 3.0)
    ((1.95, 3.35), (2.95, 10.05))
    """
    low, high = min(losses), max(losses)
    if unigram is not None:
        enough = unigram + REACH if low < unigram + REACH else statistics.median(losses)
        low, high = min(low, unigram), min(high, enough)
    return round(low - 0.05, 9), round(high + 0.05, 9)


def sensitivity(stability: Stability) -> Figure | None:
    """Draw the learning-rate sensitivity against depth, one panel per warm-up."""
    depths, warmups = stability.values("depth"), stability.values("warmup")
    rows = [
        {"series": series, "warmup": warmup, "depth": depth, "sensitivity": found.mean,
         "low": found.low, "high": found.high, "seeds": found.n}
        for warmup in warmups for series in stability.series for depth in depths
        if (found := stability.sensitivity(Place(series, depth, warmup))).mean is not None
    ]  # fmt: skip
    if not rows:
        return None
    own = by(rows, "warmup")
    canvas = pictures.lines(
        [Panel(own.get(warmup, []), in_words(warmup)) for warmup in warmups], stability.looks,
        Axis("depth", "depth (blocks)", "log2", ticks=depths),
        Axis("sensitivity", "sensitivity (nats)", limits=(0, None)),
        height=3.0, columns=len(warmups), series="series",
    )  # fmt: skip
    return drawing.figure(
        "rate_sensitivity", "Learning-rate sensitivity",
        "E[min(L(rate), L₀) − L*] over the learning rates of the grid: what is lost on average by "
        "not knowing the best rate; L₀ is the loss at initialization, which a diverged run counts "
        "as (Wortsman et al. 2023). Mean over seeds.",
        canvas, rows,
    )  # fmt: skip


def predictors(found: Sequence[Predictor]) -> Figure | None:
    """Draw the strongest early predictors with their intervals."""
    if not found:
        return None
    rows = [
        {"predictor": p.name, "when": p.when, "correlation": p.value, "low": p.low, "high": p.high,
         "within_rate": p.within, "runs": p.runs}
        for p in found
    ]  # fmt: skip
    when = {"at initialization": "start", "in the first 1 % of steps": "first 1 %"}

    def name(row: Row) -> str:
        return f"{row['predictor']} ({when.get(row['when'], 'grid')})"

    canvas = pictures.intervals(
        [Panel(rows[:SHOWN])], {name(row): Look(INK, "o") for row in rows},
        Axis("correlation", "rank correlation with the final loss", limits=(-1.02, 1.02),
             marks=[(0.0, "")]),
        series=name, letters=80, row=0.27,
        spans=[Span("correlation", "low", "high"), Span("within_rate", "", "", True, "D")],
    )  # fmt: skip
    return drawing.figure(
        "early_predictors", "What is known early, and what it says of the end",
        "Spearman's correlation of one early number per run with the run's final loss, diverged "
        "runs last; bar: 95 % bootstrap interval over the cells of the grid; diamond: the same "
        "among runs of one learning rate. The strongest of many: their order is uncertain where "
        "bars overlap.",
        canvas, rows,
    )  # fmt: skip
