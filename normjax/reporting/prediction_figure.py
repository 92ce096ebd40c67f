"""The figure of a prediction: expected and measured places, or losses beside one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from normjax.predictions.prediction import LEVEL
from normjax.reporting import drawing, pictures, prediction_words
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import Look
from normjax.reporting.pictures import Axis, Panel, Row, Span
from normjax.reporting.prediction import Judged, Score
from normjax.reporting.results import Results
from normjax.reporting.tables import number

Looks = Mapping[str, Look]


def predicted(judged: Judged | None, results: Results, looks: Looks) -> Figure | None:
    """Draw a scored prediction; None where nothing is scored."""
    if judged is None or judged.score is None or judged.stored.prediction is None:
        return None
    score, prediction = judged.score, judged.stored.prediction
    table = prediction_words.table(prediction, score)
    values = table.values(prediction_words.placed(score, {}))
    rows = [dict(zip(table.names, each, strict=True)) for each in values]
    own = {item.name: looks[item.series] for item in score.items}
    if score.losses is None:
        caption = (
            "Left: the predicted order, lowest loss on top; right: the measured one, with mean "
            "losses. A level line was predicted right; equals share the mean of their places."
        )
        lost = {item.name: prediction_words.lost(item) for item in score.items}
        canvas = _slopes(rows, own, lost)
    else:
        caption = (
            f"Hollow: expected loss, its stated {prediction.level or LEVEL} % interval dashed. "
            "Filled: mean of the measured losses, its 95 % t-interval over seeds solid (an arrow "
            "where an interval leaves the axis)."
        )
        canvas = _losses(rows, own, score, f"test loss (nats per {results.unit})")
    return drawing.figure("prediction", "Predicted and measured", caption, canvas, rows)


def _losses(rows: Sequence[Row], looks: Looks, score: Score, label: str) -> drawing.Canvas:
    items = sorted(score.items, key=lambda item: item.standing)
    notes = {
        i.name: prediction_words.lost(i) if i.error is None else number(i.error, True)
        for i in items
    }
    panel = Panel(rows, names=[item.name for item in items])
    expected = Span("expected_loss", "expected_low", "expected_high", hollow=True)
    measured = Span("measured_loss", "measured_low", "measured_high")
    return pictures.intervals(
        [panel], looks, Axis("", label), series="name", spans=(expected, measured), notes=notes,
        noted="expected − measured", row=0.36,
    )  # fmt: skip


def _slopes(rows: Sequence[Row], looks: Looks, lost: Mapping[str, str]) -> drawing.Canvas:
    """Draw a line from every predicted place to the measured one."""
    canvas = drawing.canvas(0.6 + 0.3 * len(rows))
    axes = canvas.subplots()
    axes.set_axis_off()
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(len(rows) + 0.7, 0.25)
    for row in rows:
        look, ends = looks[row["name"]], (row["predicted_rank"], row["measured_rank"])
        axes.plot((0, 1), ends, color=look.colour, lw=1.8, ls=look.dash, zorder=2)
        axes.plot((0, 1), ends, look.marker, color=look.colour, ms=6, mew=0, zorder=3)
    for side, column, title in (
        (-1, "predicted_rank", "predicted"), (1, "measured_rank", "measured, loss")
    ):  # fmt: skip
        x = max(side, 0)
        ranks = [row[column] for row in rows]
        for row, place in zip(
            rows, drawing.spread(ranks, 0.62, 0.4, len(ranks) + 0.6), strict=True
        ):
            name = drawing.elide(row["name"], 28)
            came = lost.get(row["name"]) or number(row["measured_loss"])
            text = f"{row[column]:g}  {name}  {came}" if side > 0 else f"{name}  {row[column]:g}"
            axes.plot((x + side * 0.012, x + side * 0.045), (row[column], place), lw=0.8,
                      color=looks[row["name"]].colour, clip_on=False)  # fmt: skip
            _beside(axes, side, x, place, text, va="center", size=8.5)
        _beside(axes, side, x, 0.3, title, va="bottom", size=8.5, weight="bold")
    return canvas


def _beside(axes: Axes, side: int, x: int, y: float, text: str, **look: Any) -> None:
    axes.annotate(
        text, (x + side * 0.045, y), (side * 3, 0), textcoords="offset points",
        ha="right" if side < 0 else "left", annotation_clip=False, **look,
    )  # fmt: skip
