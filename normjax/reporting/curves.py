"""Figures over training steps: validation loss and gradient norm, with what the seeds do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator

from normjax.reporting import drawing
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import GRID, MUTED, Look
from normjax.reporting.results import DIVERGED, FINISHED, UNFINISHED, Results, Run, Variant

_COLUMNS = 2
Curve = Callable[[Run], tuple[list[int], list[float]]]


def learning_curves(results: Results, looks: dict[str, Look]) -> Figure | None:
    """Draw validation loss against step; None without an evaluation."""
    low, high, off = _window(results)
    if low is None or high is None:
        return None

    known = {name: results.reference(name) for name in ("unigram", "optimum")}
    shown = [(name, loss) for name, loss in known.items() if loss is not None and low < loss < high]

    def finish(axes: Axes) -> None:
        axes.set_ylim(low, high)
        for _, loss in shown:
            axes.axhline(loss, color=MUTED, lw=0.9, ls=drawing.REFERENCE.dash)

    caption = (
        "Validation loss while training. Thick: mean over the finished seeds; band: from the "
        "lowest to the highest of them; thin: each seed. A cross marks the last finite value of a "
        f"run that diverged, a bar where an unfinished run stands.{off}"
    )
    return _figure(
        results,
        looks,
        ("learning_curves", "Learning curves", caption),
        ("validation/loss", f"validation loss (nats per {results.unit})"),
        finish,
        shown,
    )


def gradient_norms(results: Results, looks: dict[str, Look]) -> Figure | None:
    """Draw the norm of the gradient before clipping against step; None without one."""
    values = [v for run in results.runs for v in run.curve("gradient/norm")[1] if v > 0]
    if not values:
        return None

    def finish(axes: Axes) -> None:
        axes.set_yscale("log")
        near = max(values) < 10 * min(values)
        subs = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0) if near else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(min(values) / 1.15, max(values) * 1.15)

    caption = (
        "Norm of the whole gradient before clipping, mean since the previous evaluation, on a "
        "logarithmic scale. Lines, bands and marks as in the learning curves."
    )
    return _figure(
        results,
        looks,
        ("gradient_norm", "Gradient norm", caption),
        ("gradient/norm", "gradient norm"),
        finish,
    )


def _window(results: Results) -> tuple[float | None, float | None, str]:
    """Choose the loss axis so that the ends can be told apart; say what lies above it.

    The axis shows everything from a tenth of the training on. What is above the loss of guessing
    is cut off unless a finished run ends there.
    """
    ends, late, start = [], [], []
    for run in results.runs:
        steps, losses = run.curve("validation/loss")
        start += [loss for step, loss in zip(steps, losses, strict=True) if step == 0]
        late += [
            loss for step, loss in zip(steps, losses, strict=True) if step >= 0.1 * run.rates.steps
        ]
        ends += [run.final_loss] if run.final_loss is not None else []
    late = late or start
    if not late:
        return None, None, ""
    uniform = results.reference("uniform")
    top = max(late) if uniform is None else min(max(late), uniform)
    top = max([top, *ends])
    optimum = results.reference("optimum")
    bottom = min(late) if optimum is None else min(*late, optimum)
    margin = 0.04 * (top - bottom) or 0.1
    high = top + margin
    off = ""
    if start and max(start) > high:
        where = f"{min(start):.2f}"
        where += f" to {max(start):.2f}" if f"{max(start):.2f}" != where else ""
        off = f" At step 0 the loss is {where}, above this axis."
    return bottom - margin, high, off


def _figure(
    results: Results,
    looks: dict[str, Look],
    words: tuple[str, str, str],
    metric: tuple[str, str],
    finish: Callable[[Axes], None],
    references: Sequence[tuple[str, float]] = (),
) -> Figure:
    panels = results.panels()
    key, label = metric
    columns = 1 if len(panels) == 1 else _COLUMNS
    rows = math.ceil(len(panels) / columns)
    figure = drawing.canvas(4.3 if len(panels) == 1 else 0.5 + 2.7 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    spare = list(chain.from_iterable(grid))
    for axes, (panel, variants) in zip(spare, panels.items(), strict=False):
        _panel(axes, variants, looks, key)
        finish(axes)
        _end_marks(axes, variants, looks, key)
        axes.set_title(drawing.elide(results.panel_title(panel), 46))
    for axes in spare[len(panels) :]:
        axes.remove()
    for axes in spare[max(len(panels) - columns, 0) : len(panels)]:
        axes.tick_params(labelbottom=True)
    figure.supxlabel("step", size=9)
    figure.supylabel(label, size=9)
    if len(panels) == 1:
        ends = _ends(panels, looks, key)
        right = spare[0].get_xlim()[1]
        ends += [(right, loss, name, drawing.REFERENCE) for name, loss in references]
        drawing.end_labels(spare[0], ends)
    else:
        keys = [(name, looks[name]) for name in results.series]
        keys += [(name, drawing.REFERENCE) for name, _ in references]
        drawing.legend(figure, keys, 4)
    data = [
        (v.label, run.seed, step, value, run.state)
        for v in results.variants
        for run in v.runs
        for step, value in zip(*run.curve(key), strict=True)
    ]
    return Figure(*words, figure, ("variant", "seed", "step", key, "state"), data)


def _panel(axes: Axes, variants: Sequence[Variant], looks: dict[str, Look], key: str) -> None:
    axes.grid(axis="y")
    last = max((run.rates.steps for v in variants for run in v.runs), default=1)
    axes.set_xlim(0, last)
    for variant in variants:
        look = looks[variant.cell.series]
        finished = [run for run in variant.runs if run.outcome == FINISHED]
        for run in variant.runs:
            steps, values = run.curve(key)
            axes.plot(steps, values, color=look.colour, lw=0.6, alpha=0.45)
        steps, band = mean_band(finished, key)
        if steps:
            axes.fill_between(steps, band[0], band[2], color=look.colour, alpha=0.16, lw=0)
            axes.plot(steps, band[1], color=look.colour, ls=look.dash, lw=1.8, zorder=3)
    axes.tick_params(length=3)
    axes.spines["left"].set_color(GRID)


def _end_marks(axes: Axes, variants: Sequence[Variant], looks: dict[str, Look], key: str) -> None:
    """Mark the last value of every run that did not finish, at the edge where it lies beyond."""
    low, high = axes.get_ylim()
    for variant in variants:
        for run in variant.runs:
            steps, values = run.curve(key)
            if steps and run.outcome != FINISHED:
                axes.plot(
                    steps[-1], min(max(values[-1], low), high),
                    {DIVERGED: "x", UNFINISHED: "|"}[run.outcome],
                    color=looks[variant.cell.series].colour, ms=7, mew=1.6, zorder=4,
                    clip_on=False,
                )  # fmt: skip


def mean_band(
    runs: Sequence[Run], key: str
) -> tuple[list[int], tuple[list[float], list[float], list[float]]]:
    """Return the steps that all runs evaluated, and there the lowest, mean and highest value."""
    curves = [dict(zip(*run.curve(key), strict=True)) for run in runs]
    if not curves:
        return [], ([], [], [])
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = [[curve[step] for curve in curves] for step in shared]
    return shared, (
        [min(here) for here in values],
        [math.fsum(here) / len(here) for here in values],
        [max(here) for here in values],
    )


def _ends(
    panels: dict[tuple, list[Variant]], looks: dict[str, Look], key: str
) -> list[tuple[float, float, str, Look]]:
    """Return where each variant's label is tied: the end of its mean, else of its longest run."""
    ends = []
    for variant in chain.from_iterable(panels.values()):
        runs = [run for run in variant.runs if run.outcome == FINISHED]
        steps, band = mean_band(runs, key)
        name = variant.label
        if steps:
            ends.append((float(steps[-1]), band[1][-1], name, looks[variant.cell.series]))
            continue
        curves = [curve for run in variant.runs if (curve := run.curve(key))[0]]
        if curves:
            steps, values = max(curves, key=lambda curve: curve[0][-1])
            note = " (diverged)" if variant.all_diverged else " (unfinished)"
            ends.append((float(steps[-1]), values[-1], name + note, looks[variant.cell.series]))
    return ends
