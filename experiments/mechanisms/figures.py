"""Figures of the experiment on mechanisms: the table of verdicts, every run, learning curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from experiments.mechanisms.data import ArmOnTask, Mechanisms, Task
from experiments.mechanisms.verdicts import AT_FLOOR, COMPUTES, FAILS, NO_FLOOR, NO_RUN, UNRELIABLE
from normjax.reporting import drawing, pictures
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, GREEN, INK, MUTED, ORANGE, PANEL, VERMILLION, WINE, Look
from normjax.reporting.pictures import Axis, Panel, by
from normjax.reporting.results import DIVERGED, FINISHED
from normjax.reporting.tables import number

SIGNS = {
    COMPUTES: (GREEN, "o", "full", "●"),
    AT_FLOOR: (BLUE, "s", "full", "■"),
    UNRELIABLE: (ORANGE, "o", "left", "◐"),
    FAILS: (VERMILLION, "X", "full", "✕"),
    NO_FLOOR: (WINE, "D", "none", "◇"),
    NO_RUN: (MUTED, "_", "full", "–"),
}
"""Colour, marker and filling of every verdict, and its sign in text."""

KEYS = {
    COMPUTES: "computes it", AT_FLOOR: "sits at its own floor", UNRELIABLE: "learns unreliably",
    FAILS: "not reached", NO_FLOOR: "no floor known", NO_RUN: "no run",
}  # fmt: skip
_RATES = ("o", "^", "s", "D", "v", "P")
_OPTIMUM = ("exact optimum", Look(INK, ""))
_CONSTANT = ("best constant answer", drawing.REFERENCE)


def all_figures(found: Mechanisms) -> list[Figure]:
    """Return every figure, in the order of the page."""
    made = [verdicts(found), runs(found), learning(found)] if found.tasks else []
    return [figure for figure in made if figure is not None]


def verdicts(found: Mechanisms) -> Figure:
    """Draw the table of tasks and variants: excess over the optimum, floor, verdict."""
    tasks, variants = found.tasks, found.variants
    canvas = drawing.canvas(0.95 + 0.62 * len(tasks))
    axes = canvas.subplots()
    axes.set_xlim(0, len(variants))
    axes.set_ylim(len(tasks), 0)
    axes.xaxis.tick_top()
    folded = [drawing.elide(name, 16).replace("-", "-\n", 1) for name in variants]
    axes.set_xticks(np.arange(len(variants)) + 0.5, folded)
    axes.set_yticks(
        np.arange(len(tasks)) + 0.5, [f"{t.name}\noptimum {number(t.optimum)}" for t in tasks]
    )
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    for entry in found.entries:
        _cell(axes, variants.index(entry.variant), tasks.index(entry.task), entry)
    rows = [
        {"task": e.task.name, "variant": e.variant, "verdict": e.verdict.kind,
         "excess": e.excess(e.task.optimum),
         "floor_minus_optimum": None if e.floor.loss is None else e.floor.loss - e.task.optimum,
         "within": len(e.verdict.within), "runs": len(e.verdict.counted)}
        for e in found.entries
    ]  # fmt: skip
    kinds = by(rows, "verdict")
    canvas.legend(
        handles=[Line2D([], [], label=KEYS[k], ms=7, **_sign(k)) for k in SIGNS if k in kinds],
        loc="outside lower left", ncols=4, fontsize=8, handletextpad=0.3,
    )  # fmt: skip
    return drawing.figure(
        "verdicts", "The table: tasks and variants",
        "In each cell: mean final loss at the best learning rate minus the exact optimum, in nats; "
        "how many runs came within the margin of what they could reach; and, where the variant "
        "has less information than the full decoder, how far its floor lies above the optimum. "
        "The sign is the verdict; a question mark says that the sampling error could change it; "
        "“a bound”: nobody has shown that the variant could get there.",
        canvas, rows,
    )  # fmt: skip


def _sign(kind: str) -> dict[str, Any]:
    """Return how matplotlib draws the sign of a verdict."""
    colour, marker, filling, _ = SIGNS[kind]
    return {"color": colour, "marker": marker, "fillstyle": filling, "mec": colour, "ls": "none",
            "markerfacecoloralt": "none"}  # fmt: skip


def _cell(axes: Axes, column: int, row: int, entry: ArmOnTask) -> None:
    verdict = entry.verdict
    for colour, alpha in ((PANEL, 1.0), (SIGNS[verdict.kind][0], 0.16)):
        box = Rectangle((column + 0.03, row + 0.05), 0.94, 0.9, color=colour, alpha=alpha, lw=0)
        axes.add_patch(box)
    axes.plot(column + 0.16, row + 0.5, ms=8.0, mew=1.2, zorder=4, **_sign(verdict.kind))
    excess = number(entry.excess(entry.task.optimum), signed=True)
    lines = [(excess, 8.5, "bold"), (verdict.k_of_n + (" ?" if verdict.close else ""), 7, "normal")]
    if entry.apart is not None:
        lines.append((f"floor {number(entry.apart, signed=True)}", 6.5, "normal"))
    elif verdict.kind == FAILS and not entry.floor.reached:
        lines.append(("a bound", 6.5, "normal"))
    places = {2: (0.36, 0.68), 3: (0.25, 0.53, 0.79)}[len(lines)]
    for (text, size, weight), y in zip(lines, places, strict=True):
        axes.text(
            column + 0.29, row + y, text, size=size, weight=weight, va="center", color=INK, zorder=5
        )
    if verdict.alarms:
        axes.text(column + 0.9, row + 0.3, "!", weight="bold", color=VERMILLION, size=11, zorder=6)


def runs(found: Mechanisms) -> Figure:
    """Draw every run's final loss as a dot, a panel for each task and a row for each variant."""
    variants = found.variants
    rates = sorted({outcome.rate for entry in found.entries for outcome in entry.outcomes})
    columns = min(2, len(found.tasks))
    lines = math.ceil(len(found.tasks) / columns)
    canvas = drawing.canvas(0.75 + (0.6 + 0.24 * len(variants)) * lines)
    panels = canvas.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axes in panels[len(found.tasks) :]:
        axes.remove()
    for axes, task in zip(panels, found.tasks, strict=False):
        axes.set_title(task.name)
        axes.axvline(task.optimum, color=INK, lw=1.2)
        axes.axvline(task.unigram, color=MUTED, lw=1.0, ls=drawing.REFERENCE.dash)
        known = [o.loss for e in task.entries for o in e.outcomes if o.loss is not None]
        right = max([task.unigram, *known])
        for entry in task.entries:
            y, colour = variants.index(entry.variant), found.looks[entry.variant].colour
            _row_of_runs(axes, y, entry, rates, right, colour)
        room = 0.05 * (right - task.optimum) or 0.05
        axes.set_xlim(task.optimum - room, right + 2 * room)
        axes.set_ylim(len(variants) - 0.4, -0.6)
        axes.set_yticks(range(len(variants)), variants)
        axes.tick_params(length=0, axis="y")
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="y")
    canvas.supxlabel("final loss (nats per scored token)", size=9)
    keys = [
        Line2D([], [], color=INK, lw=1.2, label=_OPTIMUM[0]),
        Line2D([], [], color=MUTED, lw=3, marker="|", ms=9, mew=3, ls="none", label="own floor"),
        Line2D([], [], color=MUTED, ls=drawing.REFERENCE.dash, label=_CONSTANT[0]),
        *(
            Line2D([], [], color=MUTED, marker=_RATES[i % len(_RATES)], ls="none", ms=4.5, mew=0,
                   label=f"rate {rate:g}")
            for i, rate in enumerate(rates)
        ),
    ]  # fmt: skip
    canvas.legend(handles=keys, loc="outside upper left", ncols=4, fontsize=8)
    return drawing.figure(
        "runs", "Every run",
        "Each mark is the final loss of one run; its shape is the learning rate. The line is the "
        "optimum, the short bar the floor of the variant where that is higher, the dotted line the "
        "best constant answer. A cross at the right edge is a run that diverged.",
        canvas,
        [
            {"task": e.task.name, "variant": e.variant, "seed": o.seed, "learning_rate": o.rate,
             "outcome": o.outcome, "loss": o.loss, "standard_error": o.error}
            for e in found.entries for o in e.outcomes
        ],
    )  # fmt: skip


def _row_of_runs(
    axes: Axes, y: int, entry: ArmOnTask, rates: Sequence[float], right: float, colour: str
) -> None:
    if entry.apart is not None and entry.floor.loss is not None:
        axes.plot([entry.floor.loss] * 2, [y - 0.42, y + 0.42], color=MUTED, lw=3, zorder=2)
    for o in entry.outcomes:
        index = rates.index(o.rate)
        at = y + 0.5 * ((index + 0.5) / len(rates) - 0.5)
        if o.outcome == DIVERGED:
            axes.plot(right, at, marker="x", color=colour, ms=6, mew=1.6, clip_on=False)
        elif o.loss is not None:
            axes.plot(o.loss, at, marker=_RATES[index % len(_RATES)], color=colour, ms=4.5, mew=0,
                      alpha=0.85, zorder=3, clip_on=False)  # fmt: skip


def learning(found: Mechanisms) -> Figure | None:
    """Draw validation loss against step at each variant's best rate; None without an evaluation."""
    shown = [
        (entry, run) for entry in found.entries for run in entry.task.results.runs
        if run.arm == entry.variant and run.rates.learning_rate == entry.evidence.rate
    ]  # fmt: skip
    rows = [
        {"task": entry.task.name, "variant": entry.variant, "seed": run.seed,
         "learning_rate": entry.evidence.rate, "step": step, "loss": loss}
        for entry, run in shown for step, loss in zip(*run.curve("validation/loss"), strict=True)
    ]  # fmt: skip
    if not rows:
        return None
    own = by(rows, "task")
    columns = min(2, len(found.tasks))
    canvas = pictures.lines(
        [_curves(task, own.get(task.name, [])) for task in found.tasks], found.looks,
        Axis("step", "step"), Axis("loss", "validation loss (nats per scored token)"),
        height=0.75 + 2.5 * math.ceil(len(found.tasks) / columns), columns=columns,
        unit=lambda row: (row["task"], row["seed"]),
        ended={(e.variant, (e.task.name, run.seed)): "" for e, run in shown
               if run.outcome != FINISHED},
        key=[*found.looks.items(), _OPTIMUM, _CONSTANT],
    )  # fmt: skip
    return drawing.figure(
        "learning", "Learning curves",
        "Validation loss while training, at each variant's best learning rate: thin a seed, thick "
        "the mean. What lies above the axis at the start is cut off. Between the last step and the "
        "others the number of sequences differs, so curves may bend a little at the end.",
        canvas, rows,
    )  # fmt: skip


def _curves(task: Task, rows: Sequence[pictures.Row]) -> Panel:
    """Return a panel whose axis tells the ends apart; the start may lie above it."""
    best = {(e.variant, e.evidence.rate) for e in task.entries}
    ends = [r.final_loss for r in task.results.runs if (r.arm, r.rates.learning_rate) in best]
    late = max([task.unigram, *(loss for loss in ends if loss is not None)])
    room = 0.06 * (late - task.optimum) or 0.05
    marks = [(task.optimum, *_OPTIMUM), (task.unigram, *_CONSTANT)]
    return Panel(
        rows, task.name, Axis("step", scale="steps", limits=(0, max(task.steps, 1))),
        Axis("loss", limits=(task.optimum - room, late + 2 * room), marks=marks),
    )  # fmt: skip
