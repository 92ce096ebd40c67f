"""One block of any placement, drawn by folding the equation: streams as lines, norms as boxes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from normjax.equation import FACTORS, fold
from normjax.reporting import drawing
from normjax.reporting.drawing import Figure
from normjax.reporting.explanations import Rows, branch_rows, lookup
from normjax.reporting.palette import BLUE, INK, MUTED, ORANGE, PAPER

BRANCHES = ("attention", "mlp")
_STEP, _MOST = 0.5, 4


@dataclasses.dataclass(frozen=True)
class Path:
    """What a sub-layer does: labels on the way of the branch, of what is kept, and after the sum.

    A label that begins with "norm" is a norm.
    """

    read: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    joined: bool = True


class _Boxes:
    """The algebra of boxes for ``equation.fold``: tuples of labels, in the end a :class:`Path`."""

    def __init__(self, name: str):
        self.name = name

    def norm(self, slot: str, norm: Any, x: Any) -> Any:
        if norm is None:
            return x
        rows = lookup(norm, "rows") if isinstance(norm, Mapping) else None
        label = "norm" + (f", stream {', '.join(str(r + 1) for r in rows)}" if rows else "")
        return dataclasses.replace(x, after=(label,)) if isinstance(x, Path) else (*x, label)

    def branch(self, x: Any) -> Any:
        return (*x, self.name)

    def join(self, join: Any, x: Any, read: Any) -> Any:
        return x if join is None else (*x, f"{join['word']} with its input")

    def times(self, name: str, factor: Any, x: Any) -> Any:
        return x if factor == 1 or x is None else (*x, f"× {FACTORS[name]}")

    def mix(self, name: str, weights: Any, state: Any, x: Any) -> Any:
        if isinstance(weights, Mapping) and "word" in weights:
            return (*x, f"{'read' if name == 'read' else '×'} {weights['word']}")
        if name == "read":
            return x
        return None if name == "keep" and weights == 0 else self.times(name, weights, x)

    def plus(self, kept: Any, written: Any) -> Path:
        return Path(written, kept or (), (), kept is not None)


def paths(rows: Rows) -> list[tuple[int, tuple[Path, ...]]]:
    """Return the forms that blocks of a decoder have, each with the first block that has it."""
    own = [[fold(row, (), _Boxes(name)) for row in branch_rows(rows, name)] for name in BRANCHES]
    most = max(map(len, own))
    forms: dict[tuple[Path, ...], int] = {}
    for block in range(most):
        form = tuple(each[min(block, len(each) - 1)] for each in own)
        forms.setdefault(form, block + 1)
    return [(first, form) for form, first in forms.items()]


def figure(rows: Rows, streams: int, name: str, title: str) -> Figure:
    """Draw one block of each form, read downwards.

    Args:
      rows: as ``DecoderConfig.record`` gives them.
      streams: rows of the state; of more than four, four lines are drawn.
      name: of the files.
      title: of the placement.
    """
    forms = paths(rows)
    canvas = drawing.canvas(4.6, 3.2 * len(forms))
    panels = canvas.subplots(1, len(forms), squeeze=False)[0]
    for axes, (first, form) in zip(panels, forms, strict=True):
        _draw(axes, form, streams)
        if len(forms) > 1:
            axes.set_title(f"from block {first}", loc="center")
    caption = (
        "One block, read downwards. Thick blue: the residual stream"
        + (f"s, {streams} of them" if streams > 1 else "")
        + (f", {_MOST} drawn" if streams > _MOST else "")
        + "; orange: norms; what leaves to the right is the branch. Letters are those of the"
        " equation."
    )
    listed = [
        (first, branch, " > ".join(path.read), " > ".join(path.kept), " > ".join(path.after))
        for first, form in forms
        for branch, path in zip(BRANCHES, form, strict=True)
    ]
    columns = ("from_block", "branch", "written", "kept", "after")
    return Figure(name, f"One block of {title}", caption, canvas, columns, listed)


def _draw(axes: Axes, form: tuple[Path, ...], streams: int) -> None:
    shown = min(streams, _MOST)
    at, right = [0.1 * k - 0.05 * (shown - 1) for k in range(shown)], 1.5
    axes.text(0, 0.1, "H" if streams > 1 else "h", ha="center", va="bottom", style="italic")
    y = 0.0
    for path in form:
        top = y
        low = top - _STEP * (max(len(path.read), len(path.kept)) + 0.8)
        axes.plot([0, right, right, 0], [top - 0.2, top - 0.2, low, low], color=INK, lw=1.2)
        for k, label in enumerate(path.read):
            _box(axes, right, top - _STEP * (k + 0.8), label)
        end = low - 0.2 - _STEP * len(path.after)
        for x in at:
            axes.plot([x, x], [top if path.joined or top == 0 else top - 0.2, top - 0.2],
                      color=BLUE, lw=2.5)  # fmt: skip
            axes.plot([x, x], [top - 0.2 if path.joined else low, end], color=BLUE, lw=2.5)
        for k, label in enumerate(path.kept):
            _box(axes, 0, top - _STEP * (k + 0.8), label)
        axes.plot(0, low, "o", color=BLUE, ms=12, mfc=PAPER, mew=1.5, zorder=5)
        axes.text(0, low, "+", ha="center", va="center_baseline", zorder=6)
        for k, label in enumerate(path.after):
            _box(axes, 0, low - _STEP * (k + 0.8), label)
        y = end
    axes.annotate("", (0, y - 0.3), (0, y), arrowprops={"arrowstyle": "-|>", "color": BLUE})
    axes.set_xlim(-1, 2.6)
    axes.set_ylim(y - 0.35, 0.4)
    axes.set_axis_off()


def _box(axes: Axes, x: float, y: float, label: str) -> None:
    edge = ORANGE if label.startswith("norm") else MUTED if label[0] == "×" else INK
    box = {"boxstyle": "round,pad=0.35", "fc": PAPER, "ec": edge, "lw": 1.3}
    axes.text(x, y, label, ha="center", va="center", size=8, zorder=4, bbox=box)
