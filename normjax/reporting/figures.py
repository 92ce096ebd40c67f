"""The figures of a grid of runs, in the order of the page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from normjax.reporting import (
    diagnostics_figures,
    diagram,
    drawing,
    heat_maps,
    pictures,
    prediction_figure,
    statistics,
)
from normjax.reporting.diagnostics_data import Diagnostics
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import Look
from normjax.reporting.pictures import Axis, Panel, Row
from normjax.reporting.prediction import Judged
from normjax.reporting.results import DIVERGED, FINISHED, UNFINISHED, Results, RunResult, Variant
from normjax.reporting.statistics import Estimate
from normjax.reporting.tables import number
from normjax.reporting.wording import representatives

Looks = Mapping[str, Look]


def all_figures(
    results: Results, looks: dict[str, Look], judged: Judged | None = None,
    diagnostics: Diagnostics | None = None,
) -> list[Figure]:  # fmt: skip
    """Return every figure that the results allow.

    Args:
        results: a workdir read back.
        looks: colour and marker by series.
        judged: a prediction and its score, where there is one.
        diagnostics: what the runs measured inside, where that is known.

    Returns:
        The figures; each is left out where it would be empty.
    """
    with drawing.style():
        made: list[Figure | None] = [prediction_figure.predicted(judged, results, looks)]
        if results.x:
            made += [by_x(results, looks), by_x(results, looks, relative=True)]
        made += [by_rate(results, looks, name) for name in results.varied]
        made += [
            learning_curves(results, looks), final_losses(results, looks),
            paired_differences(results, looks), gradient_norms(results, looks),
            diagram.decoder(results, looks),
        ]  # fmt: skip
        if diagnostics is not None and diagnostics.measured:
            made += heat_maps.figures(results, diagnostics)
            made += diagnostics_figures.profiles(results, diagnostics, looks)
            made += diagnostics_figures.autopsies(diagnostics)
    return [figure for figure in made if figure is not None]


def _by_label(results: Results, looks: Looks) -> dict[str, Look]:
    return {v.label: looks[v.arm.series] for v in results.variants}


# --- over steps -----------------------------------------------------------------------------------


def learning_curves(results: Results, looks: Looks) -> Figure | None:
    """Draw validation loss against step; None without an evaluation."""
    window = _window(results)
    if window is None:
        return None
    low, high, off = window
    known = ((results.reference(name), name) for name in ("unigram", "bigram", "optimum"))
    marks = [(loss, name) for loss, name in known if loss is not None and low < loss < high]
    label = f"validation loss (nats per {results.unit})"
    return _over_steps(
        results, looks, Axis("validation/loss", label, limits=(low, high), marks=marks),
        "learning_curves", "Learning curves",
        "Validation loss while training. Thick: mean over the finished seeds; band: from the "
        "lowest to the highest of them; thin: each seed. A cross marks the last finite value of a "
        f"run that diverged, a bar where an unfinished run stands.{off}",
    )  # fmt: skip


def gradient_norms(results: Results, looks: Looks) -> Figure | None:
    """Draw the norm of the gradient before clipping against step; None without one."""
    if not any(v > 0 for run in results.runs for v in run.curve("gradient/norm")[1]):
        return None
    return _over_steps(
        results, looks, Axis("gradient/norm", "gradient norm", "log"), "gradient_norm",
        "Gradient norm",
        "Norm of the whole gradient before clipping, mean since the previous evaluation, on a "
        "logarithmic scale. Lines, bands and marks as in the learning curves.",
    )  # fmt: skip


def _over_steps(
    results: Results, looks: Looks, y: Axis, name: str, title: str, caption: str
) -> Figure:
    def rows(variants: Sequence[Variant]) -> list[Row]:
        return [
            {"variant": v.label, "seed": run.seed, "step": step, y.column: value,
             "state": run.state}
            for v in variants for run in v.runs
            for step, value in zip(*run.curve(y.column), strict=True)
        ]  # fmt: skip

    panels = [Panel(rows(vs), results.panel_title(k)) for k, vs in results.panels().items()]
    marks = {DIVERGED: "x", UNFINISHED: "|"}
    single, last = len(panels) == 1, max((run.rates.steps for run in results.runs), default=1)
    canvas = pictures.lines(
        panels, _by_label(results, looks), Axis("step", "step", limits=(0, last)), y,
        height=4.3 if single else 0.5 + 2.7 * math.ceil(len(panels) / 2), unit="seed",
        columns=1 if single else 2, key=[(s, looks[s]) for s in results.series],
        ended={(v.label, run.seed): marks[run.outcome] for v in results.variants for run in v.runs
               if run.outcome != FINISHED},
    )  # fmt: skip
    return drawing.figure(name, title, caption, canvas, rows(results.variants))


def _window(results: Results) -> tuple[float, float, str] | None:
    """Choose the loss axis so that the ends can be told apart; say what lies above it.

    The axis shows everything from a tenth of the training on. What is above the loss of guessing
    is cut off unless a finished run ends there.
    """

    def losses(run: RunResult, first: float, last: float) -> list[float]:
        points = zip(*run.curve("validation/loss"), strict=True)
        return [loss for step, loss in points if first <= step <= last]

    start = [loss for run in results.runs for loss in losses(run, 0, 0)]
    late = [x for run in results.runs for x in losses(run, 0.1 * run.rates.steps, math.inf)]
    late = late or start
    if not late:
        return None
    uniform, optimum = results.reference("uniform"), results.reference("optimum")
    top = max(late) if uniform is None else min(max(late), uniform)
    top = max([top, *(run.final_loss for run in results.runs if run.final_loss is not None)])
    bottom = min(late) if optimum is None else min(*late, optimum)
    margin = 0.04 * (top - bottom) or 0.1
    off = ""
    if start and max(start) > top + margin:
        where = " to ".join(dict.fromkeys(f"{loss:.2f}" for loss in (min(start), max(start))))
        off = f" At step 0 the loss is {where}, above this axis."
    return bottom - margin, top + margin, off


# --- one row per variant --------------------------------------------------------------------------


def final_losses(results: Results, looks: Looks) -> Figure | None:
    """Draw the final loss of every variant: seeds, mean and interval."""
    every = [loss for v in results.variants for loss in v.losses.values()]
    if not every:
        return None
    caption = (
        "Test loss at the last step. Filled mark: mean; line: 95 % t-interval (none from a "
        "single seed; an arrow where it leaves the axis); small hollow marks: seeds."
    )
    near = _near(results.reference("unigram"), every)
    if near is not None:
        caption += " Dotted: loss of the unigram model."
    label = f"test loss (nats per {results.unit})"
    axis = Axis("test_loss", label, marks=[] if near is None else [(near, "")])
    shown = [(v, v.loss, v.losses) for v in results.ranked()]
    canvas = _rows(results, looks, axis, shown)
    rows = [_row(v, seed, axis, x) for v in results.variants for seed, x in v.losses.items()]
    return drawing.figure("final_loss", "Final loss", caption, canvas, rows)


def _near(level: float | None, values: Sequence[float]) -> float | None:
    """Return a reference's level where it lies near what was measured, else None."""
    far = level is None or level > max(values) + 0.15 * (max(values) - min(values))
    return None if far else level


def paired_differences(results: Results, looks: Looks) -> Figure | None:
    """Draw the difference of every variant to the baseline, seed by seed."""
    shown = [
        (v, v.difference, results.gaps(v)) for v in results.ranked() if v.difference is not None
    ]
    if not any(gaps for _, _, gaps in shown):
        return None
    label = f"test loss minus that of {results.baseline} (nats per {results.unit})"
    axis = Axis("difference", label, marks=[(0.0, "")])
    canvas = _rows(results, looks, axis, shown)
    return drawing.figure(
        "paired_differences", "Difference to the baseline, seed by seed",
        f"What each variant costs against {results.baseline}, seed by seed: both runs of a pair "
        "see the same batches. Right of 0 is worse. Filled mark: mean; line: 95 % interval of the "
        "paired differences, over seeds and text; small hollow marks: one per seed, the shape "
        "tells which.",
        canvas, [_row(v, seed, axis, gap) for v, _, own in shown for seed, gap in own.items()],
    )  # fmt: skip


def _row(variant: Variant, seed: int, axis: Axis, value: float) -> Row:
    return {"variant": variant.label, "seed": seed, axis.column: value}


def _rows(
    results: Results, looks: Looks, axis: Axis,
    shown: Sequence[tuple[Variant, Estimate, Mapping[int, float]]],
) -> drawing.Canvas:  # fmt: skip
    """Draw variants with their values by seed; differences have signs, and a shape per seed."""
    signed = axis.column == "difference"
    panels = []
    for key in results.panels():
        own = [(v, values) for v, _, values in shown if results.panel_key(v) == key]
        rows = [_row(v, seed, axis, x) for v, values in own for seed, x in values.items()]
        names = [v.label for v, _ in own]
        panels += [Panel(rows, results.panel_title(key), names=names)] if own else []
    bars = any(estimate.low is not None for _, estimate, _ in shown)
    return pictures.intervals(
        panels, _by_label(results, looks), axis, unit="seed",
        notes={v.label: _note(v, estimate, signed) for v, estimate, _ in shown},
        noted="mean ± 95 % interval" if bars else "mean", shapes=results.seeds if signed else (),
    )  # fmt: skip


def _note(variant: Variant, estimate: Estimate, signed: bool) -> str:
    """Return the numbers of a row as text, with what did not finish."""
    half = "" if estimate.half_width is None else f" ± {number(estimate.half_width)}"
    parts = [] if estimate.mean is None else [number(estimate.mean, signed) + half]
    for outcome in (DIVERGED, UNFINISHED):
        if count := variant.count(outcome):
            parts.append(f"{count} of {len(variant.runs)} {outcome}")
    return ", ".join(parts) or "no run"


# --- over an axis of the experiment, or a rate ----------------------------------------------------

_READING = (
    "Line: mean over finished seeds; band: from the lowest to the highest seed; hollow marks: "
    "seeds. The strip at the top counts diverged runs."
)


def by_x(results: Results, looks: Looks, relative: bool = False) -> Figure | None:
    """Draw final loss (or its difference to the baseline) against x, one line per series."""
    given = results.x or {}
    name = str(given.get("name", "x"))
    slug = "".join(c if c.isascii() and c.isalnum() else "_" for c in name) or "x"
    best = {(v.arm.series, float(v.arm.x)): v for v in representatives(results)
            if v.arm.x is not None}  # fmt: skip
    axis = (str(given.get("label", name)), str(given.get("scale", "linear")))
    if not relative:
        words = (f"loss_by_{slug}", f"Final loss by {name}", _READING)
        return _against(results, looks, words, axis, best)
    base = results.baseline
    words = (
        f"difference_by_{slug}", f"Difference to {base} by {name}",
        f"Paired by seed; above 0 is worse than {base}. {_READING}",
    )  # fmt: skip
    return _against(results, looks, words, axis, best, relative=True)


def by_rate(results: Results, looks: Looks, name: str) -> Figure | None:
    """Draw final loss against a rate that takes several values, one line per series."""
    chosen: dict[tuple[str, float], Variant] = {}
    for variant in results.variants:
        key = (variant.arm.series, float(getattr(variant.rates, name, 0.0)))
        if variant.rates and (key not in chosen or _mean(variant) < _mean(chosen[key])):
            chosen[key] = variant
    words, caption = name.replace("_", " "), _READING
    if len(results.varied) > 1 or results.x:
        caption += " At each value the best of whatever else was varied."
    scale = "log10" if chosen and min(value for _, value in chosen) > 0 else "linear"
    found = {key: chosen[key] for key in sorted(chosen)}
    title = (f"loss_by_{name}", f"Final loss by {words}", caption)
    return _against(results, looks, title, (words, scale), found)


def _mean(variant: Variant) -> float:
    return math.inf if variant.loss.mean is None else variant.loss.mean


def _against(
    results: Results, looks: Looks, words: tuple[str, str, str], axis: tuple[str, str],
    found: Mapping[tuple[str, float], Variant], relative: bool = False,
) -> Figure | None:  # fmt: skip
    """Draw variants by their series and place on x."""
    label, scale = axis
    column = "difference" if relative else "test_loss"
    names = [name for name in results.series if not relative or name != results.baseline]
    rows, above = [], []
    for name in names:
        own = {x: v for (series, x), v in found.items() if series == name}
        for x, v in own.items():
            base = found.get((results.baseline, x)) if relative else None
            below = base.losses if base else {}
            losses = statistics.differences(v.losses, below) if relative else v.losses
            rows += [{"series": name, label: x, "seed": s, column: y} for s, y in losses.items()]
        lost = {x: (n, len(v.runs)) for x, v in own.items() if (n := v.count(DIVERGED))}
        short = drawing.elide(name, 20)
        above.append([(x, f"× {short}: {n} of {of} diverged") for x, (n, of) in lost.items()])
    if not rows:
        return None
    above = [texts for texts in above[::-1] if texts]
    values = [row[column] for row in rows]
    unigram = _near(results.reference("unigram"), values)
    marks = [(0.0, "")] if relative else [] if unigram is None else [(unigram, "unigram")]
    what = f"test loss (nats per {results.unit})"
    y = Axis(column, f"difference in {what}" if relative else what, marks=marks)
    ticks = sorted({x for (name, x) in found if name in names})
    zoom = _zoom(values) if relative else None
    panels = [Panel(rows)]
    if zoom:
        near = Axis(column, limits=zoom, marks=marks)
        panels.append(Panel(rows, "the same, enlarged around 0", y=near))
    canvas = pictures.lines(
        panels, looks, _x_axis(label, scale, ticks), y, series="series", unit="seed", dots=True,
        height=4.2 + 0.17 * len(above) + 2.8 * bool(zoom), above=above,
    )  # fmt: skip
    return drawing.figure(*words, canvas, rows)


def _x_axis(label: str, scale: str, ticks: Sequence[float]) -> Axis:
    """Return an axis with a tick at every value and a little room beside them."""
    low, high = ticks[0], ticks[-1]
    if scale == "linear":
        pad = 0.04 * (high - low) or 0.5
        return Axis(label, label, "linear", (low - pad, high + pad), ticks)
    pad = (high / low) ** 0.04 if high > low else 1.5
    kind = "log2" if scale == "log2" else "log"
    return Axis(label, label, kind, (low / pad, high * pad), ticks)


def _zoom(values: Sequence[float]) -> tuple[float, float] | None:
    """Return a window around 0 that holds most values where a few large ones hide the others."""
    sizes = sorted(abs(value) for value in values)
    reach = 3 * sizes[len(sizes) // 2]
    if not 0 < reach < sizes[-1] / 3:
        return None
    inside = [0.0, *(value for value in values if abs(value) <= reach)]
    margin = 0.12 * (max(inside) - min(inside))
    return min(inside) - margin, max(inside) + margin
