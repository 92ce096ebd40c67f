"""Layer profiles: every signal over the blocks, at the first and the last measured step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from normjax.diagnostics import definitions
from normjax.reporting import drawing
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import Look
from normjax.reporting.results import DIVERGED, Results, Variant
from normjax.reporting.signal_data import Signals, grid, short_title

_COLUMNS = 4
_WHEN = (("first", 0), ("last", -1))


def figures(results: Results, signals: Signals, looks: dict[str, Look]) -> list[Figure]:
    """Return profiles of the stream and branches, and of parameters and norms, first and last."""
    made = []
    kinds = (("", "layers"), ("norm", "gains"), ("parameter", "parameters"))
    for each, name in kinds:
        names = signals.names(each)
        for when, index in _WHEN:
            made.append(_figure(results, signals, looks, names, (name, when, index)))
    return [figure for figure in made if figure is not None]


def _figure(
    results: Results, signals: Signals, looks: dict[str, Look], names: Sequence[str],
    which: tuple[str, str, int],
) -> Figure | None:  # fmt: skip
    kind, when, index = which
    variants = list(results.variants)
    data: list[tuple] = []
    lines = {name: _lines(signals, variants, name, index) for name in names}
    lines = {name: found for name, found in lines.items() if found}
    if not lines:
        return None
    rows = math.ceil(len(lines) / _COLUMNS)
    height = 0.95 + 1.5 * rows
    canvas = drawing.fixed_canvas(height, 0.62, 0.1, 0.5, 0.75, (0.46, 0.6))
    flat = list(canvas.subplots(rows, _COLUMNS, squeeze=False).ravel())
    for panel, (name, found) in zip(flat, lines.items(), strict=False):
        for variant, step, x, y in found:
            look = looks[variant.cell.series]
            panel.plot(x, y, color=look.colour, ls=look.dash, marker=look.marker, ms=2.5, mew=0,
                       lw=1.1)  # fmt: skip
            data += [(variant.label, name, step, *pair) for pair in zip(x, y, strict=True)]
        steady = [y for v, _, _, ys in found if not v.count(DIVERGED) for y in ys]
        every = [y for *_, ys in found for y in ys]
        if steady and max(steady) > min(steady):
            _window(panel, name, steady, every)
        _finish(panel, name, max(x[-1] for _, _, x, _ in found))
    for panel in flat[len(lines) :]:
        panel.remove()
    canvas.supxlabel("block", size=9, y=0.1 / height)
    used = {variant.cell.series for found in lines.values() for variant, *_ in found}
    drawing.legend(canvas, [(n, looks[n]) for n in results.series if n in used], 5, inside=True)
    titles = {
        "layers": "Signals over the blocks", "gains": "Gains over the blocks",
        "parameters": "Gradients and updates over the blocks",
    }  # fmt: skip
    caption = (
        f"Every variant at its {when} measured step, median over seeds; what is not finite is left "
        "out. The attention sub-layer of a block stands at its number, its MLP half a block later. "
        "Of heads the largest, of their entropies the smallest. One colour per series; a line that "
        "leaves its panel is of a variant with a diverged run."
    )
    return Figure(
        f"profiles_{kind}_{when}", f"{titles[kind]}, {when} measured step", caption, canvas,
        ("variant", "signal", "step", "block", "median"), data,
    )  # fmt: skip


def _lines(
    signals: Signals, variants: Sequence[Variant], name: str, index: int
) -> list[tuple[Variant, int, list[float], list[float]]]:
    found = []
    for variant in variants:
        each = grid(signals, variant, name)
        if each is None:
            continue
        values = each.values[index]
        log = definitions.signal(name).scale == "log"
        kept = np.isfinite(values) & ((values > 0) if log else True)
        offset = {"mlp": 0.5}
        x = [block + offset.get(sublayer, 0.0) for block, sublayer in each.rows]
        if kept.any():
            pairs = [(a, float(b)) for a, b, k in zip(x, values, kept, strict=True) if k]
            xs, ys = (list(each) for each in zip(*pairs, strict=True))
            found.append((variant, int(each.steps[index]), xs, ys))
    return found


def _window(panel: Axes, name: str, steady: Sequence[float], every: Sequence[float]) -> None:
    """Set the axis to the variants without a diverged run where the others would flatten them."""
    low, high = min(steady), max(steady)
    if definitions.signal(name).scale == "log":
        margin = (high / low) ** 0.1
        if max(every) / min(every) > 30 * high / low:
            panel.set_ylim(low / margin, high * margin)
    elif max(every) - min(every) > 10 * (high - low):
        margin = 0.1 * (high - low)
        panel.set_ylim(low - margin, high + margin)


def _finish(panel: Axes, name: str, deepest: float) -> None:
    row, part = definitions.signal(name), definitions.split(name)[1]
    short = part.replace("attention.", "attn.").replace(".branch", "")
    lines = [short_title(name), *([short] if part else [])]
    panel.set_title("\n".join(drawing.elide(x, 30) for x in lines), size=7, weight="normal")
    if row.scale == "log":
        drawing.log_axis(panel)
        low, high = panel.get_ylim()
        if high > 100 * low:
            drawing.log_axis(panel, every=max(1, math.ceil(math.log10(high / low) / 3)))
    else:
        panel.yaxis.set_major_locator(MaxNLocator(4))
        panel.yaxis.set_minor_locator(NullLocator())
    blocks = int(deepest)
    ticks = range(1, blocks + 1, max(1, math.ceil(blocks / 5)))
    panel.xaxis.set_major_locator(FixedLocator(list(ticks)))
    panel.set_xlim(0.7, deepest + 0.3)
    panel.tick_params(labelsize=7, length=2)
    panel.grid(True, axis="y")
