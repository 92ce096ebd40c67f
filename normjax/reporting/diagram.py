"""The decoder drawn from the configuration, with a numbered mark wherever a variant changes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from normjax.equation import FACTORS, SLOTS, fold
from normjax.reporting import drawing, explanations
from normjax.reporting.drawing import Figure
from normjax.reporting.explanations import Rows, branch_rows, change_text, lookup
from normjax.reporting.palette import INK, MUTED, PANEL, PAPER, Look
from normjax.reporting.results import Results

_MIDDLE, _HALF, _TALL = 2.0, 0.78, 0.3
_SKIP = 0.72  # where the residual path runs, left of the boxes
_LABELS = 4.25  # where the variants' names begin

# What a configuration path belongs to in the picture; a path that is not here is listed beneath.
_PLACES = {
    "model.attention": ("attention",),
    "model.heads": ("attention",),
    "model.kv_heads": ("attention",),
    "model.qk_norm": ("attention",),
    "model.qk_norm_over": ("attention",),
    "model.attention_softcap": ("attention",),
    "model.head_features": ("attention",),
    "model.attention_scale": ("attention",),
    "model.local_blocks": ("attention",),
    "model.local_window": ("attention",),
    "model.mlp": ("mlp",),
    "model.mlp_width": ("mlp",),
    "model.positions": ("positions",),
    "model.rotary_base": ("positions",),
    "model.rotary_share": ("positions",),
    "model.local_rotary_base": ("positions",),
    "model.residual": ("skip1", "skip2"),
    "model.final_norm": ("final_norm",),
    "model.tied": ("head",),
    "model.output_softcap": ("head",),
    "model.output_scale": ("head",),
    "model.embedding_scale": ("embedding",),
    "model.width": ("embedding",),
    "model.depth": ("blocks",),
}
_NUMBERED = ((1, "attention"), (2, "mlp"))


@dataclass
class _Sketch:
    """Axes with a pen that moves down, and where the parts came to lie."""

    axes: Axes
    y: float = 0.0
    spots: dict[str, tuple[float, float]] = field(default_factory=dict)

    def box(self, name: str, text: str, face: str = PAPER, ghost: bool = False) -> None:
        """Draw a part below the last one; a ghost is where only a variant has one."""
        self.arrow(0.2)
        edge = MUTED if ghost else INK
        self.axes.add_patch(
            FancyBboxPatch(
                (_MIDDLE - _HALF, self.y - _TALL), 2 * _HALF, _TALL,
                boxstyle="round,pad=0,rounding_size=0.06", fc=face, ec=edge,
                lw=0.8 if ghost else 1.1, ls=(0, (2, 2)) if ghost else "-", zorder=3,
            )
        )  # fmt: skip
        self.axes.text(
            _MIDDLE, self.y - _TALL / 2, drawing.elide(text, 20), ha="center", va="center",
            size=8.5, color=edge, zorder=4, style="italic" if ghost else "normal",
        )  # fmt: skip
        self.spots[name] = (_MIDDLE + _HALF, self.y - _TALL / 2)
        self.y -= _TALL

    def arrow(self, length: float, head: bool = True) -> None:
        """Draw the stream going down by ``length``."""
        _arrow(self.axes, (_MIDDLE, self.y), (_MIDDLE, self.y - length), head)
        self.y -= length

    def plus(self, name: str, start: float, residual: bool, weight: str, how: str) -> None:
        """Draw the addition that ends a sub-layer, and its residual path from height ``start``."""
        self.arrow(0.2, head=residual)
        if not residual:
            return
        centre = self.y - 0.1
        self.axes.plot(_MIDDLE, centre, "o", ms=13, mfc=PAPER, mec=INK, mew=1.1, zorder=3)
        self.axes.text(_MIDDLE, centre - 0.004, "+", ha="center", va="center", size=11, zorder=4)
        self.axes.plot([_MIDDLE, _SKIP, _SKIP], [start, start, centre], color=INK, lw=1.3, zorder=2)
        _arrow(self.axes, (_SKIP, centre), (_MIDDLE - 0.1, centre), True)
        middle = (start + centre) / 2
        self.axes.text(
            _SKIP - 0.13, middle, f"{how}residual{f' × {weight}' if weight else ''}", rotation=90,
            ha="right", va="center", size=7.5, color=MUTED,
        )  # fmt: skip
        self.spots[name] = (_SKIP, middle)
        self.y -= 0.2


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], head: bool) -> None:
    axes.annotate(
        "", end, start, zorder=2,
        arrowprops={"arrowstyle": "-|>" if head else "-", "color": INK, "lw": 1.2, "shrinkA": 0,
                    "shrinkB": 0, "mutation_scale": 8},
    )  # fmt: skip


def decoder(results: Results, looks: dict[str, Look]) -> Figure | None:
    """Draw the decoder; None where the plan holds no model configuration.

    Args:
        results: its plan's ``config.model`` says what is drawn, its arms what is marked.
        looks: colour by series.

    Returns:
        The figure; its data is the list of marks and what each changes.
    """
    config = results.plan.get("config") or {}
    if not isinstance(config.get("model"), Mapping):
        return None
    variants = {
        name: changes
        for name, changes in explanations.series_changes(results).items()
        if name != results.baseline
    }
    own = results.plan.get("rows") or {}
    rows = {arm.series: arm.rows for arm in reversed(results.arms) if arm.series in variants}
    figure = drawing.canvas(7.0)
    axes = figure.subplots()
    sketch = _Sketch(axes)
    _draw(sketch, config, own, list(rows.values()), _depth(results), results.unit)
    marks = {
        name: _spots(own, rows.get(name, {}), changes, sketch) for name, changes in variants.items()
    }
    _mark(sketch, marks, looks, variants, rows)
    loose = [
        f"{number}  {name}: {change_text(variants[name]) or 'no change of the configuration'}"
        for number, (name, spots) in enumerate(marks.items(), start=1)
        if not spots
    ]
    for index, text in enumerate(loose):
        line = "Changed outside this picture:  " if index == 0 else ""
        axes.text(0.2, sketch.y - 0.25 - 0.2 * index, drawing.elide(line + text, 105), size=8)
    axes.set_xlim(0, drawing.WIDTH - 0.3)
    axes.set_ylim(sketch.y - 0.1 - 0.22 * len(loose), 0.1)
    axes.set_aspect("equal")
    axes.set_axis_off()
    figure.set_figheight(0.2 - axes.get_ylim()[0])
    rows = [
        (number, name, path, str(value))
        for number, name in enumerate(variants, start=1)
        for path, value in variants[name].items()
    ]
    caption = (
        "The decoder as configured, read from top to bottom. A numbered mark stands at each part "
        "that a variant removes, moves or changes; dashed boxes exist only in a variant."
    )
    words = ("decoder", "The decoder and where it is changed", caption)
    return Figure(*words, figure, ("mark", "variant", "changed", "value"), rows)


def _depth(results: Results) -> str:
    """Return how many times the block is repeated, as text."""
    depths = sorted({arm.x for arm in results.arms if arm.x is not None})
    if results.x and results.x["name"] == "depth" and depths:
        return f"{depths[0]:g}–{depths[-1]:g} ×"
    depth = lookup(results.plan.get("config") or {}, "model.depth")
    return "block" if depth is None else f"{depth} ×"


def _draw(
    sketch: _Sketch, config: Mapping[str, Any], own: Rows, others: Sequence[Rows], depth: str,
    unit: str,
) -> None:  # fmt: skip
    model = config["model"]
    positions = model.get("positions", "none")
    sketch.axes.text(_MIDDLE, 0.0, "text", ha="center", va="center", size=9)
    sketch.y = -0.1
    sketch.box("embedding", "token embedding", PANEL)
    if positions == "learned":
        sketch.box("positions", "+ learned positions", PANEL)
    sketch.arrow(0.14, head=False)
    top = sketch.y
    norm = str(lookup(own, "norm.shown.title", "") or model.get("norm", "norm"))
    for number, part in _NUMBERED:
        sketch.arrow(0.12, head=False)
        kinds = [_slots(rows, part) for rows in others]
        row = (branch_rows(own, part) or [_PLAIN])[0]
        fold(row, "h", _Drawing(sketch, number, part, model, row, kinds, norm))
    sketch.arrow(0.1, head=False)
    _frame(sketch, top, depth)
    final = bool(own.get("has_final_norm"))
    if final or any(rows.get("has_final_norm") for rows in others):
        sketch.box("final_norm", "final norm", ghost=not final)
    sketch.box("head", "output head" + (" (tied)" if model.get("tied") else ""), PANEL)
    sketch.arrow(0.2)
    sketch.axes.text(
        _MIDDLE, sketch.y - 0.1, f"scores of the next {unit}", ha="center", va="center", size=9
    )
    sketch.y -= 0.2
    if positions == "rotary" and "attention" in sketch.spots:
        _rotary(sketch)


_PLAIN = SimpleNamespace(**dict.fromkeys((*SLOTS, "read", "join")), scale=1, keep=1, write=1)


def _slots(rows: Rows, branch: str) -> set[str]:
    """Return the slots of a branch that hold a norm in any block."""
    found = branch_rows(rows, branch)
    return {slot for row in found for slot in SLOTS if getattr(row, slot) is not None}


class _Drawing:
    """The algebra of the picture for ``equation.fold``: what it meets is drawn, downwards."""

    def __init__(
        self, sketch: _Sketch, number: int, part: str, model: Any, row: Any, others: list,
        norm_title: str,
    ):  # fmt: skip
        self.sketch, self.number, self.part, self.model = sketch, number, part, model
        self.others, self.start, self.skip = others, sketch.y, ""
        self.row, self.model_norm = row, norm_title

    def norm(self, slot: str, norm: Any, x: str) -> str:
        if slot == "skip_norm":  # on the residual path, which is drawn with the addition
            self.skip = "normalized " if norm is not None else ""
        elif norm is not None or any(slot in kinds for kinds in self.others):
            shown = lookup(norm, "shown.title") if isinstance(norm, Mapping) else None
            name = str(shown or self.model_norm)
            self.sketch.box(f"{slot}{self.number}", name, ghost=norm is None)
        return x

    def branch(self, x: str) -> str:
        kind = self.model.get(self.part, "")
        missing = kind == "none"
        text = "attention" if self.part == "attention" else f"MLP ({kind})" if kind else "MLP"
        text = f"no {self.part}" if missing else text
        self.sketch.box(self.part, text, PANEL, ghost=missing)
        return x

    def join(self, join: Any, x: str, read: str) -> str:
        if join is not None:
            self.sketch.box(f"join{self.number}", f"{join['word']} with its input")
        return x

    def times(self, name: str, factor: Any, x: str) -> str:
        return "" if factor == 0 else x if factor == 1 else FACTORS[name]

    def mix(self, name: str, weights: Any, state: str, x: str) -> str:
        if isinstance(weights, Mapping) and "word" in weights:
            if name == "read":
                self.sketch.box(f"read{self.number}", f"{weights['word']} of streams")
            return str(weights["word"])
        return x if name == "read" else self.times(name, weights, x)

    def plus(self, kept: str, written: str) -> str:
        weight = "" if self.row.keep in (0, 1) else kept
        name = f"skip{self.number}"
        self.sketch.plus(name, self.start, self.row.keep != 0, weight, self.skip)
        return kept


def _frame(sketch: _Sketch, top: float, depth: str) -> None:
    left, right = _SKIP - 0.42, _MIDDLE + _HALF + 0.9
    sketch.axes.add_patch(
        Rectangle(
            (left, sketch.y), right - left, top - sketch.y, fc="none", ec=MUTED, lw=0.9,
            ls=(0, (4, 2)), zorder=1,
        )
    )  # fmt: skip
    sketch.axes.text(
        right - 0.08, top - 0.13, depth, size=9, weight="bold", va="center", ha="right"
    )
    sketch.spots["blocks"] = (left, top - 0.13)


def _rotary(sketch: _Sketch) -> None:
    """Draw rotary positions, which enter inside attention and not the stream."""
    right, y = sketch.spots["attention"]
    left = right + 0.2
    sketch.axes.text(
        left + 0.02, y, "rotary", size=7.5, va="center", zorder=4,
        bbox={"boxstyle": "round,pad=0.4", "fc": PANEL, "ec": INK, "lw": 0.8},
    )  # fmt: skip
    sketch.axes.plot([right, left], [y, y], color=INK, lw=1)
    sketch.spots["positions"] = (left + 0.53, y)


def _spots(
    own: Rows, new: Rows, changes: Mapping[str, Any], sketch: _Sketch
) -> list[tuple[float, float]]:
    """Return where a variant's marks go; nothing for changes that the picture does not show."""
    names: list[str] = []
    for path in changes:
        names += _PLACES.get(path, ())
    if {"model.norm", "model.norm_eps"} & set(changes):
        names += [f"{slot}{n}" for n, part in _NUMBERED for slot in _slots(own, part)]
        names.append("final_norm")
    if "model.placement" in changes:
        for number, part in _NUMBERED:
            names += [f"{slot}{number}" for slot in _slots(own, part) ^ _slots(new, part)]
            before, after = ((branch_rows(rows, part) or [_PLAIN])[0] for rows in (own, new))
            if before.keep != after.keep:
                names.append(f"skip{number}")
            inner = ("write", "scale", "read", "join")
            if any(getattr(before, k) != getattr(after, k) for k in inner):
                names.append(part)
        if bool(own.get("has_final_norm")) != bool(new.get("has_final_norm")):
            names.append("final_norm")
    return [sketch.spots[name] for name in dict.fromkeys(names) if name in sketch.spots]


def _mark(
    sketch: _Sketch,
    marks: Mapping[str, list[tuple[float, float]]],
    looks: dict[str, Look],
    variants: Mapping[str, Mapping[str, Any]],
    rows: Mapping[str, Rows],
) -> None:
    """Draw the numbered marks and, at the right, what each number means."""
    drawn = {name: spots for name, spots in marks.items() if spots}
    taken: dict[tuple[float, float], int] = {}
    for number, (name, spots) in enumerate(marks.items(), start=1):
        for spot in spots:
            place = taken.get(spot, 0)
            taken[spot] = place + 1
            side = -1 if spot[0] == _SKIP else 1
            x, y = (
                (spot[0], spot[1] + 0.2 * place) if side < 0 else (spot[0] + 0.21 * place, spot[1])
            )
            _badge(sketch.axes, (x, y), number, looks[name].colour)
    order = {name: number for number, name in enumerate(marks, start=1)}
    top = sketch.y / 2 + 0.23 * (len(drawn) - 1)
    for index, name in enumerate(drawn):
        place = top - 0.46 * index
        _badge(sketch.axes, (_LABELS, place), order[name], looks[name].colour)
        label, phrase = drawing.elide(name), explanations.action(variants[name], rows.get(name, {}))
        what = drawing.elide(phrase or change_text(variants[name]), 44)
        sketch.axes.text(_LABELS + 0.17, place + 0.015, label, size=9, weight="bold", va="bottom")
        sketch.axes.text(_LABELS + 0.17, place - 0.015, what, size=8, va="top", color=MUTED)


def _badge(axes: Axes, spot: tuple[float, float], number: int, colour: str) -> None:
    axes.plot(*spot, "o", ms=11.5, color=colour, mec=PAPER, mew=1, zorder=6)
    axes.text(
        *spot, str(number), ha="center", va="center_baseline", size=7.5, weight="bold",
        color=PAPER if dark(colour) else INK, zorder=7,
    )  # fmt: skip


def dark(colour: str) -> bool:
    """Whether white text reads better than black on a colour (hex), by relative luminance.

    >>> dark("#000000"), dark("#ffffff")
    (True, False)
    """
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] < 0.18
