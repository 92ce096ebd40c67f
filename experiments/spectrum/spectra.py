"""Histograms of singular values with the law that theory gives, and whole-sequence spectra."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.spectrum.data import Point, Survey
from normjax.reporting import drawing
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import INK, MUTED, Look
from normjax.reporting.wording import counted

BINS = 32


def blocks(survey: Survey) -> Figure | None:
    """Draw the singular values of the first, middle and last block at initialization."""
    rows = [(name, survey.main(name, 0)) for name in survey.series]
    rows = [(name, points) for name, points in rows if points]
    if not rows:
        return None
    canvas = drawing.canvas(0.5 + 0.92 * len(rows))
    grid = canvas.subplots(len(rows), 3, squeeze=False)
    data: list[tuple] = []
    for number, ((name, points), axes) in enumerate(zip(rows, grid, strict=True)):
        depth = points[0].depth
        picked = (1, (depth + 1) // 2, depth)
        values = [_pooled(points, f"block {b}") for b in picked]
        for block, logs, panel in zip(picked, values, axes, strict=True):
            law = points[0].law(f"block {block}")
            data += _histogram(panel, logs, law, survey.looks[name], (name, f"block {block}"))
            if number == 0:
                panel.set_title(f"block {block}" if depth > 1 else "the block")
        axes[0].set_ylabel(drawing.elide(name, 18), rotation=0, ha="right", va="center")
    canvas.supxlabel("singular value (logarithmic scale)", fontsize=9)
    return Figure(
        "block_spectra", "Spectra of the blocks at initialization",
        "Singular values of the Jacobian of one token with respect to itself, without the radial "
        "direction, at the last token looked at; all sequences and seeds together. Bars: measured. "
        "Line: random-matrix theory from the weights of the first seed and the size of the stream, "
        "nothing fitted. Tokens whose streams differ in size have spectra of different size: each "
        "is put on the scale of the mean token by the factor that theory gives. "
        "Where a line is missing the table below says why. Each panel has a scale "
        "of its own.",
        canvas, ("series", "part", "kind", "log_singular_value", "density"), data,
    )  # fmt: skip


def stacks(survey: Survey) -> Figure | None:
    """Draw the singular values from the first block to the last at initialization."""
    cells = [(name, survey.main(name, 0)) for name in survey.series]
    cells = [(name, points) for name, points in cells if points]
    if not cells:
        return None
    columns = 3 if len(cells) > 2 else len(cells)
    lines = math.ceil(len(cells) / columns)
    canvas = drawing.canvas(0.6 + 1.5 * lines)
    panels = canvas.subplots(lines, columns, squeeze=False).ravel()
    data: list[tuple] = []
    for (name, points), panel in zip(cells, panels, strict=False):
        logs = _pooled(points, "stack")
        look = survey.looks[name]
        data += _histogram(
            panel, logs[np.isfinite(logs)], points[0].law("stack"), look, (name, "stack")
        )
        panel.set_title(f"{drawing.elide(name, 22)}, {counted(points[0].depth, 'block')}")
    for panel in panels[len(cells) :]:
        panel.set_visible(False)
    canvas.supxlabel("singular value (logarithmic scale)", fontsize=9)
    return Figure(
        "stack_spectra", "Spectra from the first block to the last, at initialization",
        "As above, for the product over all blocks. The line follows from the weights and the size "
        "of the embedding alone: theory carries the size of the stream through all blocks.",
        canvas, ("series", "part", "kind", "log_singular_value", "density"), data,
    )  # fmt: skip


def _pooled(points: Sequence[Point], part: str) -> np.ndarray:
    """Return the log singular values of all seeds and sequences, on the scale of the law shown."""
    law = points[0].law(part)
    reference = law[0]["log_rms"] if law is not None else None
    return np.concatenate([p.relative(part, reference) for p in points])


def _histogram(
    panel: Axes, logs: np.ndarray, law: tuple | None, look: Look, key: tuple[str, str]
) -> list[tuple]:
    """Draw one panel over log s and return its data."""
    low, high = np.quantile(logs, (0.002, 0.998))
    if law is not None and len(law[1]):
        high = max(high, law[1][-1])
        low = min(low, max(law[1][0], low - 1.0))
    margin = max(0.06 * (high - low), 0.002)  # values that are all the same need an axis too
    low, high = low - margin, high + margin
    density, edges = np.histogram(logs, bins=BINS, range=(low, high))
    density = density / (len(logs) * np.diff(edges))
    panel.stairs(density, edges, fill=True, color=look.colour, alpha=0.45, lw=0)
    middle = (edges[1:] + edges[:-1]) / 2
    rows = [(*key, "measured", float(x), float(y)) for x, y in zip(middle, density, strict=True)]
    if law is not None and len(law[1]):
        panel.plot(law[1], law[2], color=INK, lw=1.1)
        rows += [(*key, "theory", float(x), float(y)) for x, y in zip(law[1], law[2], strict=True)]
    panel.set_xlim(low, high)
    panel.set_ylim(0, None)
    panel.set_yticks([])
    panel.spines["left"].set_visible(False)
    if low < 0 < high:
        panel.axvline(0, color=MUTED, lw=0.7, ls=drawing.REFERENCE.dash, zorder=0)
    log_ticks(panel, low, high)
    return rows


def log_ticks(panel: Axes, low: float, high: float, most: int = 4) -> None:
    """Put round singular values on an axis whose coordinate is their natural logarithm."""
    panel.xaxis.set_major_locator(FixedLocator([math.log(t) for t in round_ticks(low, high, most)]))
    panel.xaxis.set_major_formatter(lambda value, _: f"{math.exp(value):.6g}")
    panel.xaxis.set_minor_locator(NullLocator())


def round_ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return up to ``most`` round numbers whose natural logarithms lie between low and high.

    >>> round_ticks(math.log(0.009), math.log(110.0))
    [0.01, 0.1, 1.0, 10.0, 100.0]
    >>> round_ticks(math.log(0.985), math.log(1.016))
    [0.99, 1.0, 1.01]
    """
    decades = [
        10.0**k for k in range(math.ceil(low / math.log(10)), math.floor(high / math.log(10)) + 1)
    ]
    if len(decades) >= 3:
        return decades[:: math.ceil(len(decades) / (most + 1))]
    first, last = math.exp(low), math.exp(high)
    if last / first > 3:
        best: list[float] = []
        for subs in ((1, 2, 5), (1, 3), (1,)):
            best = [
                s * 10.0**k
                for k in range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
                for s in subs
                if first <= s * 10.0**k <= last
            ]
            if len(best) <= most:
                return best
        return best[:: math.ceil(len(best) / most)]
    step = 10 ** math.floor(math.log10(last - first))
    for factor in (0.2, 0.5, 1, 2, 5, 10):
        size = step * factor
        ticks = [
            round(i * size, 12) for i in range(math.ceil(first / size), math.floor(last / size) + 1)
        ]
        if len(ticks) <= most:
            return ticks
    return ticks


def sequences(survey: Survey) -> Figure | None:
    """Draw the sorted singular values of the whole-sequence Jacobian, before and after training."""
    cells = []
    for name in survey.series:
        points = [p for p in survey.main(name) if p.arrays["sequence"].size]
        if points:
            ends = sorted({p.step for p in points})
            cells.append((name, [p for p in points if p.step in (ends[0], ends[-1])]))
    if not cells:
        return None
    canvas = drawing.canvas(3.4)
    panels = canvas.subplots(1, 2, sharey=True)
    data, drawn = [], []
    for name, points in cells:
        look = survey.looks[name]
        last = max(p.step for p in points)
        for panel, step in zip(panels, dict.fromkeys((0, last)), strict=False):
            curves = [p.arrays["sequence"] for p in points if p.step == step]
            if not curves:
                continue
            middle = np.exp(np.mean([np.log(np.maximum(c, 1e-300)) for c in curves], axis=0))
            share = (np.arange(len(middle)) + 0.5) / len(middle)
            panel.plot(share, middle, color=look.colour, ls=look.dash, lw=1.3)
            drawn.append((name, look))
            data += [(name, step, float(x), float(y)) for x, y in zip(share, middle, strict=True)]
    _finish_sequences(panels, sorted({p.step for _, points in cells for p in points}), data)
    drawing.legend(canvas, dict(drawn).items(), 5)
    return Figure(
        "sequence_spectra", "Whole-sequence spectra of the stack",
        "All singular values of the Jacobian of a short sequence with respect to itself, from the "
        "first block to the last: what every token does to every later one. Sorted, as a share of "
        "their number; mean over seeds of the logarithm. The tail below is the norms' radial "
        "direction, one per token, and is a matter of ε.",
        canvas, ("series", "step", "share", "singular_value"), data,
    )  # fmt: skip


def _finish_sequences(panels: Sequence[Axes], steps: list[int], data: list[tuple]) -> None:
    values = sorted(v for *_, v in data if v > 0)
    low = values[len(values) // 50]
    for panel, step in zip(panels, dict.fromkeys((0, steps[-1])), strict=False):
        panel.set_title("initialization" if step == 0 else f"step {step}")
    if steps[-1] == 0:
        panels[1].set_visible(False)
    for panel in panels:
        panel.set_ylim(max(low / 3, 1e-8), values[-1] * 2)
        drawing.log_axis(panel)
        panel.set_xlabel("share of singular values above")
        panel.grid(True, axis="y")
    panels[0].set_ylabel("singular value")
