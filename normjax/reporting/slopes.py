"""Figures of a prediction: from expected to measured place, or expected beside measured losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from normjax.predictions.prediction import LEVEL
from normjax.reporting import drawing
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import MUTED, PAPER, Look
from normjax.reporting.prediction import Item, Judged, Score
from normjax.reporting.results import Results
from normjax.reporting.tables import number

COLUMNS = (
    *("name", "predicted_rank", "measured_rank", "expected_loss", "expected_low", "expected_high"),
    *("measured_loss", "measured_low", "measured_high", "diverged"),
)


def figure(judged: Judged | None, results: Results, looks: Mapping[str, Look]) -> Figure | None:
    """Draw a scored prediction; None where nothing is scored."""
    if judged is None or judged.score is None or judged.stored.prediction is None:
        return None
    score = judged.score
    if score.losses is None:
        caption = (
            "Left: the predicted order, lowest loss on top; right: the measured one, with mean "
            "losses. A level line was predicted right; equals share the mean of their places."
        )
        canvas = _slopes(score, looks)
    else:
        level = judged.stored.prediction.level or LEVEL
        caption = (
            f"Hollow: expected loss, its stated {level} % interval dashed. Filled: mean of the "
            "measured losses, its 95 % t-interval over seeds solid (an arrow where an interval "
            "leaves the axis)."
        )
        canvas = _losses(score, looks, f"validation loss (nats per {results.unit})")
    data = [_row(score, i) for i in range(len(score.items))]
    return Figure("prediction", "Predicted and measured", caption, canvas, COLUMNS, data)


def _row(score: Score, i: int) -> tuple[Any, ...]:
    item = score.items[i]
    loss = item.measured
    return (
        *(item.name, score.predicted[i], score.measured[i]),
        *(item.entry.loss, item.entry.low, item.entry.high),
        *(loss.mean, loss.low, loss.high, int(item.diverged)),
    )


def _slopes(score: Score, looks: Mapping[str, Look]) -> drawing.Canvas:
    n = len(score.items)
    canvas = drawing.canvas(0.6 + 0.3 * n)
    axes = canvas.subplots()
    axes.set_axis_off()
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(n + 0.7, 0.25)
    for i, item in enumerate(score.items):
        look = looks[item.series]
        ends = (score.predicted[i], score.measured[i])
        axes.plot((0, 1), ends, color=look.colour, lw=1.8, ls=look.dash, zorder=2)
        axes.plot((0, 1), ends, look.marker, color=look.colour, ms=6, mew=0, zorder=3)
    names = [drawing.elide(item.name, 28) for item in score.items]
    left = [f"{name}  {score.predicted[i]:g}" for i, name in enumerate(names)]
    right = [f"{score.measured[i]:g}  {n}  {_came(score.items[i])}" for i, n in enumerate(names)]
    _labels(axes, score.predicted, left, score, looks, -1)
    _labels(axes, score.measured, right, score, looks, 1)
    for end, side, title in ((-0.045, "right", "predicted"), (1.045, "left", "measured, loss")):
        axes.annotate(
            title, (end, 0.3), (3 if end > 0 else -3, 0), textcoords="offset points", ha=side,
            va="bottom", size=8.5, weight="bold", annotation_clip=False,
        )  # fmt: skip
    return canvas


def _labels(
    axes: Axes, ranks: Sequence[float], texts: Sequence[str], score: Score,
    looks: Mapping[str, Look], side: int,
) -> None:  # fmt: skip
    """Write the names beside one end of the lines, moved apart where they share a place."""
    x = 0 if side < 0 else 1
    places = drawing.spread(ranks, 0.62, 0.4, len(ranks) + 0.6)
    for rank, place, text, item in zip(ranks, places, texts, score.items, strict=True):
        colour = looks[item.series].colour
        start, end = x + side * 0.012, x + side * 0.045
        axes.plot((start, end), (rank, place), color=colour, lw=0.8, clip_on=False)
        axes.annotate(
            text, (end, place), (side * 3, 0), textcoords="offset points", size=8.5,
            ha="right" if side < 0 else "left", va="center", annotation_clip=False,
        )  # fmt: skip


def _came(item: Item) -> str:
    return "diverged" if item.diverged else number(item.measured.mean)


def _losses(score: Score, looks: Mapping[str, Look], label: str) -> drawing.Canvas:
    order = sorted(range(len(score.items)), key=lambda i: score.items[i].value)
    items = [score.items[i] for i in order]
    canvas = drawing.canvas(0.75 + 0.36 * len(items))
    axes = canvas.subplots()
    axes.set_ylim(len(items) - 0.4, -0.6)
    axes.set_yticks(range(len(items)), [drawing.elide(item.name) for item in items])
    axes.set_xlim(*_limits(items))
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)
    for y, item in enumerate(items):
        look, loss, entry = looks[item.series], item.measured, item.entry
        _interval(axes, y - 0.14, entry.low, entry.high, look.colour, (0, (3, 1.5)))
        _interval(axes, y + 0.14, loss.low, loss.high, look.colour, "-")
        if entry.loss is not None:
            axes.plot(entry.loss, y - 0.14, look.marker, mfc=PAPER, mec=look.colour, ms=6.5,
                      mew=1.4, zorder=3)  # fmt: skip
        if loss.mean is not None:
            axes.plot(loss.mean, y + 0.14, look.marker, color=look.colour, ms=6.5, mew=0, zorder=3)
        note = "diverged" if item.error is None else number(item.error, signed=True)
        axes.annotate(
            note, (1, y), (6, 0), xycoords=("axes fraction", "data"), va="center", size=8,
            textcoords="offset points", annotation_clip=False,
        )  # fmt: skip
    axes.annotate(
        "expected − measured", (1, 1), (6, 1), xycoords="axes fraction", size=7, color=MUTED,
        textcoords="offset points", va="bottom",
    )  # fmt: skip
    return canvas


def _limits(items: Sequence[Item]) -> tuple[float, float]:
    """Return limits that hold every mean and stated value, and intervals as far as is sane."""
    core = [
        value
        for item in items
        for value in (item.entry.loss, item.entry.low, item.entry.high, item.measured.mean)
        if value is not None
    ]
    low, high = min(core), max(core)
    reach = 0.5 * (high - low) or 0.05
    for loss in (item.measured for item in items):
        if loss.low is not None and loss.high is not None:
            low = min(low, max(loss.low, min(core) - reach))
            high = max(high, min(loss.high, max(core) + reach))
    margin = 0.04 * (high - low) or 0.05
    return low - margin, high + margin


def _interval(
    axes: Axes, y: float, low: float | None, high: float | None, colour: str, dash: str | tuple
) -> None:
    if low is None or high is None:
        return
    left, right = axes.get_xlim()
    ends = (max(low, left), min(high, right))
    axes.plot(ends, (y, y), color=colour, lw=1.8, ls=dash, solid_capstyle="butt", zorder=2)
    for beyond, mark, end in ((low < left, "<", left), (high > right, ">", right)):
        if beyond:
            axes.plot(end, y, mark, color=colour, ms=5, mew=0, clip_on=False)
