"""Figures with one row per variant: final losses, and differences to the baseline by seed."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from normjax.reporting import drawing, statistics
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import MUTED, PAPER, Look
from normjax.reporting.results import DIVERGED, Results, Variant
from normjax.reporting.statistics import Estimate
from normjax.reporting.tables import number

_SEED_MARKS = ("o", "s", "^", "D", "v", "P", "X", "p")
Row = tuple[Variant, Estimate, dict[int, float]]


def final_losses(results: Results, looks: dict[str, Look]) -> Figure | None:
    """Draw the final loss of every variant: seeds, mean and interval."""
    if not any(v.losses for v in results.variants):
        return None
    caption = (
        "Validation loss at the last step. Filled mark: mean; line: 95 % t-interval (none from a "
        "single seed; an arrow where it leaves the axis); small hollow marks: seeds."
    )
    unigram = results.reference("unigram")
    every = [loss for v in results.variants for loss in v.losses.values()]
    near = unigram is not None and unigram <= max(every) + 0.15 * (max(every) - min(every))
    if near:
        caption += " Dotted: loss of the unigram model."
    rows = [(v, v.loss, v.losses) for v in results.ranked()]
    figure = _forest(
        results,
        looks,
        rows,
        f"validation loss (nats per {results.unit})",
        unigram if near else None,
        signed=False,
    )
    data = [(v.label, seed, loss) for v in results.variants for seed, loss in v.losses.items()]
    columns = ("variant", "seed", "validation_loss")
    return Figure("final_loss", "Final loss", caption, figure, columns, data)


def paired_differences(results: Results, looks: dict[str, Look]) -> Figure | None:
    """Draw the difference of every variant to the baseline, seed by seed."""
    bases = {results.panel_key(v): v for v in results.variants if v.cell.series == results.baseline}
    rows = []
    for variant in results.ranked():
        base = bases.get(results.panel_key(variant))
        if variant.difference is not None and base is not None:
            gaps = statistics.differences(variant.losses, base.losses)
            rows.append((variant, variant.difference, gaps))
    if not any(gaps for _, _, gaps in rows):
        return None
    caption = (
        f"What each variant costs against {results.baseline}, seed by seed: both runs of a pair "
        "see the same batches. Right of 0 is worse. Filled mark: mean; line: 95 % t-interval of "
        "the paired differences; small hollow marks: one per seed, the shape tells which."
    )
    label = f"validation loss minus that of {results.baseline} (nats per {results.unit})"
    figure = _forest(results, looks, rows, label, 0.0, signed=True)
    data = [(v.label, seed, gap) for v, _, gaps in rows for seed, gap in gaps.items()]
    return Figure(
        "paired_differences",
        "Difference to the baseline, seed by seed",
        caption,
        figure,
        ("variant", "seed", "difference"),
        data,
    )


def _forest(
    results: Results,
    looks: dict[str, Look],
    rows: Sequence[Row],
    label: str,
    line: float | None,
    *,
    signed: bool,
) -> drawing.Canvas:
    groups: dict[tuple, list[Row]] = {key: [] for key in results.panels()}
    for row in rows:
        groups[results.panel_key(row[0])].append(row)
    groups = {key: group for key, group in groups.items() if group}
    low, high = limits(rows, line)
    sizes = [len(group) for group in groups.values()]
    titled = len(groups) > 1
    figure = drawing.canvas(0.65 + 0.3 * sum(sizes) + 0.42 * titled * len(groups))
    grid = figure.subplots(
        len(groups), 1, sharex=True, squeeze=False, height_ratios=[size + 0.2 for size in sizes]
    )
    for (key, group), (axes,) in zip(groups.items(), grid, strict=True):
        axes.set_title(drawing.elide(results.panel_title(key), 80))
        axes.set_xlim(low, high)
        _forest_panel(axes, results, looks, group, line, signed)
    bars = any(estimate.low is not None for _, estimate, _ in rows)
    grid[0][0].annotate(
        "mean ± 95 % interval" if bars else "mean", (1, 1), (6, 1), xycoords="axes fraction",
        textcoords="offset points", va="bottom", size=7, color=MUTED,
    )  # fmt: skip
    for (axes,) in grid[:-1]:
        axes.tick_params(labelbottom=False)
    grid[-1][0].set_xlabel(drawing.elide(label, 80))
    return figure


def _forest_panel(
    axes: Axes,
    results: Results,
    looks: dict[str, Look],
    group: Sequence[Row],
    line: float | None,
    signed: bool,
) -> None:
    axes.set_ylim(len(group) - 0.4, -0.6)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=3)
    names = [drawing.elide(_short(results, variant)) for variant, _, _ in group]
    axes.set_yticks(range(len(group)), names)
    if line is not None:
        axes.axvline(line, color=MUTED, lw=1, ls="-" if signed else (0, (1, 2)), zorder=1)
    for y, (variant, estimate, seeds) in enumerate(group):
        look = looks[variant.cell.series]
        _interval(axes, y, estimate, look)
        for seed, value in seeds.items():
            mark = _SEED_MARKS[results.seeds.index(seed) % len(_SEED_MARKS)] if signed else "o"
            axes.plot(value, y + 0.24, mark, ms=3.6, mfc=PAPER, mec=look.colour, mew=0.9, zorder=4)
        axes.annotate(
            _note(variant, estimate, signed), (1, y), (6, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", va="center", size=8, annotation_clip=False,
        )  # fmt: skip


def _short(results: Results, variant: Variant) -> str:
    """Return a variant's name without what the panel's title already says."""
    title = results.panel_title(results.panel_key(variant))
    return variant.label.removesuffix(f", {title}") if title else variant.label


def _note(variant: Variant, estimate: Estimate, signed: bool) -> str:
    """Return the numbers of a row as text, with what did not finish."""
    parts = []
    if estimate.mean is not None:
        half = estimate.half_width
        text = number(estimate.mean, signed)
        parts.append(text if half is None else f"{text} ± {number(half)}")
    diverged = variant.count(DIVERGED)
    left = len(variant.runs) - len(variant.losses) - diverged
    parts += [f"{diverged} of {len(variant.runs)} diverged"] if diverged else []
    parts += [f"{left} of {len(variant.runs)} unfinished"] if left else []
    return ", ".join(parts) or "no run"


def _interval(axes: Axes, y: float, estimate: Estimate, look: Look) -> None:
    low, high = axes.get_xlim()
    if estimate.low is not None and estimate.high is not None:
        ends = max(estimate.low, low), min(estimate.high, high)
        axes.plot(ends, (y, y), color=look.colour, lw=2, solid_capstyle="butt", zorder=2)
        for beyond, mark, end in (
            (estimate.low < low, "<", low),
            (estimate.high > high, ">", high),
        ):
            if beyond:
                axes.plot(end, y, mark, color=look.colour, ms=6, mew=0, clip_on=False)
    if estimate.mean is not None:
        axes.plot(estimate.mean, y, look.marker, color=look.colour, ms=7, mew=0, zorder=3)


def limits(rows: Sequence[Row], line: float | None) -> tuple[float, float]:
    """Return axis limits that show all seeds and means, and intervals as far as they are sane.

    Two seeds give intervals of 12.7 standard errors; drawn whole they would flatten all else.
    """
    core = [value for _, _, seeds in rows for value in seeds.values()]
    core += [] if line is None else [line]
    low, high = min(core), max(core)
    reach = 0.5 * (high - low) or 0.05
    for _, estimate, _ in rows:
        if estimate.low is not None and estimate.high is not None:
            low = min(low, max(estimate.low, min(core) - reach))
            high = max(high, min(estimate.high, max(core) + reach))
    margin = 0.03 * (high - low) or 0.05
    return low - margin, high + margin
