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

from experiments.mechanisms.data import Entry, Mechanisms, TaskResult
from experiments.mechanisms.verdicts import AT_FLOOR, COMPUTES, FAILS, NO_FLOOR, NO_RUN, UNRELIABLE
from normjax.reporting import drawing
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, GREEN, INK, MUTED, ORANGE, PANEL, VERMILLION, WINE
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
    FAILS: "fails to learn", NO_FLOOR: "no floor known", NO_RUN: "no run",
}  # fmt: skip


def all_figures(found: Mechanisms) -> list[Figure]:
    """Return every figure, in the order of the page."""
    return [verdicts(found), runs(found), learning(found)] if found.tasks else []


def verdict_marker(axes: Axes, x: float, y: float, kind: str, size: float = 8.0) -> None:
    """Put the sign of a verdict at a place in data coordinates."""
    colour, marker, filling, _ = SIGNS[kind]
    axes.plot(
        x, y, marker=marker, fillstyle=filling, ms=size, mew=1.2, color=colour,  # pyrefly: ignore
        markerfacecoloralt="none", mec=colour, ls="none", zorder=4,
    )  # fmt: skip


def verdicts(found: Mechanisms) -> Figure:
    """Draw the table of tasks and variants: excess over the optimum, floor, verdict."""
    tasks, variants = found.tasks, found.variants
    canvas = drawing.canvas(0.95 + 0.62 * len(tasks))
    axes = canvas.subplots()
    axes.set_xlim(0, len(variants))
    axes.set_ylim(len(tasks), 0)
    axes.xaxis.tick_top()
    axes.set_xticks(np.arange(len(variants)) + 0.5, [_folded(name) for name in variants])
    axes.set_yticks(
        np.arange(len(tasks)) + 0.5, [f"{t.name}\noptimum {number(t.optimum)}" for t in tasks]
    )
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    data: list[tuple[Any, ...]] = []
    for row, task in enumerate(tasks):
        for column, variant in enumerate(variants):
            entry = task.entry(variant)
            if entry is not None:
                _cell(axes, column, row, task, entry)
                data.append((
                    task.name, variant, entry.verdict.kind, entry.excess(task.optimum),
                    None if entry.floor.loss is None else entry.floor.loss - task.optimum,
                    len(entry.verdict.within), len(entry.verdict.counted),
                ))  # fmt: skip
    shown = list(dict.fromkeys(row[2] for row in data))
    canvas.legend(
        handles=[_handle(kind) for kind in SIGNS if kind in shown],
        loc="outside lower left", ncols=4, fontsize=8, handletextpad=0.3,
    )  # fmt: skip
    return Figure(
        "verdicts", "The table: tasks and variants",
        "In each cell: mean final loss at the best learning rate minus the exact optimum, in nats; "
        "how many runs came within the margin of what they could reach; and, where the variant "
        "has less information than the full decoder, how far its floor lies above the optimum. "
        "The sign is the verdict; a question mark says that the sampling error could change it; "
        "“a bound”: nobody has shown that the variant could get there.",
        canvas,
        ("task", "variant", "verdict", "excess", "floor_minus_optimum", "within", "runs"), data,
    )  # fmt: skip


def _folded(name: str) -> str:
    return drawing.elide(name, 16).replace("-", "-\n", 1)


def _handle(kind: str) -> Line2D:
    colour, marker, filling, _ = SIGNS[kind]
    return Line2D(
        [], [], color=colour, marker=marker, fillstyle=filling,  # pyrefly: ignore
        ls="none", ms=7, markerfacecoloralt="none", mec=colour, label=KEYS[kind],
    )  # fmt: skip


def _cell(axes: Axes, column: int, row: int, task: TaskResult, entry: Entry) -> None:
    verdict, colour = entry.verdict, SIGNS[entry.verdict.kind][0]
    axes.add_patch(Rectangle((column + 0.03, row + 0.05), 0.94, 0.9, color=PANEL, lw=0, zorder=1))
    axes.add_patch(
        Rectangle((column + 0.03, row + 0.05), 0.94, 0.9, color=colour, alpha=0.16, lw=0, zorder=2)
    )
    verdict_marker(axes, column + 0.16, row + 0.5, verdict.kind)
    excess = entry.excess(task.optimum)
    floor = entry.floor.loss
    apart = floor is not None and floor > task.optimum + 5e-4
    lines = [
        ("–" if excess is None else number(excess, signed=True), 8.5, "bold"),
        (verdict.k_of_n + (" ?" if verdict.close else ""), 7, "normal"),
    ]
    if apart and floor is not None:
        lines.append((f"floor {number(floor - task.optimum, signed=True)}", 6.5, "normal"))
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
    rates = sorted({o.rate for t in found.tasks for e in t.entries for o in e.outcomes})
    canvas, panels = _grid(found, 0.6 + 0.24 * len(variants), sharey=True)
    data: list[tuple[Any, ...]] = []
    for panel, task in zip(panels, found.tasks, strict=True):
        axes: Axes = panel
        axes.set_title(task.name)
        axes.axvline(task.optimum, color=INK, lw=1.2)
        axes.axvline(task.unigram, color=MUTED, lw=1.0, ls=drawing.REFERENCE.dash)
        known = [o.loss for e in task.entries for o in e.outcomes if o.loss is not None]
        right = max([task.unigram, *known])
        for row, variant in enumerate(variants):
            entry = task.entry(variant)
            if entry is not None:
                data += _row_of_runs(axes, row, task, entry, found, rates, right)
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
        Line2D([], [], color=INK, lw=1.2, label="exact optimum"),
        Line2D([], [], color=MUTED, lw=3, marker="|", ms=9, mew=3, ls="none", label="own floor"),
        Line2D([], [], color=MUTED, ls=drawing.REFERENCE.dash, label="best constant answer"),
        *(
            Line2D([], [], color=MUTED, marker=_RATES[i % len(_RATES)], ls="none", ms=4.5, mew=0,
                   label=f"rate {rate:g}")
            for i, rate in enumerate(rates)
        ),
    ]  # fmt: skip
    canvas.legend(handles=keys, loc="outside upper left", ncols=4, fontsize=8)
    return Figure(
        "runs", "Every run",
        "Each mark is the final loss of one run; its shape is the learning rate. The line is the "
        "optimum, the short bar the floor of the variant where that is higher, the dotted line the "
        "best constant answer. A cross at the right edge is a run that diverged.",
        canvas, ("task", "variant", "seed", "learning_rate", "outcome", "loss", "standard_error"),
        data,
    )  # fmt: skip


_RATES = ("o", "^", "s", "D", "v", "P")


def _row_of_runs(
    axes: Axes, row: int, task: TaskResult, entry: Entry, found: Mechanisms,
    rates: Sequence[float], right: float,
) -> list[tuple[Any, ...]]:  # fmt: skip
    floor = entry.floor.loss
    if floor is not None and floor > task.optimum + 5e-4:
        axes.plot([floor, floor], [row - 0.42, row + 0.42], color=MUTED, lw=3, zorder=2)
    look = found.looks[entry.variant]
    rows = []
    for o in entry.outcomes:
        index = rates.index(o.rate)
        shift = 0.5 * ((index + 0.5) / len(rates) - 0.5)
        rows.append((task.name, entry.variant, o.seed, o.rate, o.outcome, o.loss, o.error))
        if o.outcome == DIVERGED:
            axes.plot(
                right, row + shift, marker="x", color=look.colour, ms=6, mew=1.6, clip_on=False
            )
        elif o.loss is not None:
            axes.plot(
                o.loss, row + shift, marker=_RATES[index % len(_RATES)], color=look.colour, ms=4.5,
                mew=0, alpha=0.85, zorder=3, clip_on=False,
            )  # fmt: skip
    return rows


def learning(found: Mechanisms) -> Figure:
    """Draw validation loss against step at each variant's best rate, with the optimum."""
    canvas, panels = _grid(found, 2.5, sharey=False)
    data: list[tuple[Any, ...]] = []
    for panel, task in zip(panels, found.tasks, strict=True):
        axes: Axes = panel
        axes.set_title(task.name)
        axes.axhline(task.optimum, color=INK, lw=1.2)
        axes.axhline(task.unigram, color=MUTED, lw=1.0, ls=drawing.REFERENCE.dash)
        late = [task.unigram]
        for entry in task.entries:
            look = found.looks[entry.variant]
            names = {o.run for o in entry.outcomes if o.rate == entry.evidence.rate}
            shown = [run for run in task.results.runs if run.id in names]
            for run in shown:
                steps, losses = run.curve("validation/loss")
                axes.plot(steps, losses, color=look.colour, lw=0.6, alpha=0.5)
                data += [
                    (task.name, entry.variant, run.seed, entry.evidence.rate, *point)
                    for point in zip(steps, losses, strict=True)
                ]
                late += [run.final_loss] if run.final_loss is not None else []
            done = [run for run in shown if run.outcome == FINISHED]
            each = [dict(zip(*run.curve("validation/loss"), strict=True)) for run in done]
            steps = sorted(set.intersection(*map(set, each))) if each else []
            middle = [math.fsum(own[step] for own in each) / len(each) for step in steps]
            axes.plot(steps, middle, color=look.colour, ls=look.dash, lw=1.7)
            if steps:
                axes.plot(steps[-1], middle[-1], color=look.colour, marker=look.marker, ms=5,
                          mew=0, clip_on=False, zorder=5)  # fmt: skip
        room = 0.06 * (max(late) - task.optimum) or 0.05
        axes.set_ylim(task.optimum - room, max(late) + 2 * room)
        axes.set_xlim(0, max(task.steps, 1))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(axis="y")
    canvas.supxlabel("step", size=9)
    canvas.supylabel("validation loss (nats per scored token)", size=9)
    keys = [
        Line2D([], [], color=look.colour, ls=look.dash, marker=look.marker, ms=5, mew=0, label=name)
        for name, look in found.looks.items()
        if name in found.variants
    ]
    keys += [
        Line2D([], [], color=INK, lw=1.2, label="exact optimum"),
        Line2D([], [], color=MUTED, ls=drawing.REFERENCE.dash, label="best constant answer"),
    ]
    canvas.legend(handles=keys, loc="outside upper left", ncols=5, fontsize=7.5, handlelength=2.4)
    return Figure(
        "learning", "Learning curves",
        "Validation loss while training, at each variant's best learning rate: thin a seed, thick "
        "the mean. What lies above the axis at the start is cut off. Between the last step and the "
        "others the number of sequences differs, so curves may bend a little at the end.",
        canvas, ("task", "variant", "seed", "learning_rate", "step", "loss"), data,
    )  # fmt: skip


def _grid(found: Mechanisms, height: float, *, sharey: bool) -> tuple[Any, list[Axes]]:
    """Return a canvas with one panel for each task, two side by side."""
    count = len(found.tasks)
    columns = min(2, count)
    rows = math.ceil(count / columns)
    canvas = drawing.canvas(0.75 + height * rows)
    panels = canvas.subplots(rows, columns, squeeze=False, sharey=sharey).ravel()
    for axes in panels[count:]:
        axes.remove()
    return canvas, list(panels[:count])
