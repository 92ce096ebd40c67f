"""Pre-norm and post-norm as paths: where the stream meets the norms, from the placement table."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from experiments.figures.sheet import LOOKS, SHOWN
from normjax.equation import SLOTS
from normjax.placement import Placement
from normjax.placements import PLACEMENTS
from normjax.reporting import drawing, explanations
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, INK, MUTED, ORANGE, PANEL, PAPER

BRANCHES = ("attention", "MLP")
_STREAM, _BRANCH, _HALF, _TALL = 0.55, 1.45, 0.48, 0.3


def placement_paths() -> Figure:
    """Draw one block of pre-norm, post-norm and no norm side by side."""
    canvas = drawing.canvas(5.5)
    panels = canvas.subplots(1, len(SHOWN))
    for axes, name in zip(panels, SHOWN, strict=True):
        _draw(axes, PLACEMENTS[name])
        axes.set_title(PLACEMENTS[name].title, color=LOOKS[name].colour, loc="center", fontsize=11)
    rows = [
        (n, *(_has(PLACEMENTS[n], slot) for slot in SLOTS), PLACEMENTS[n].final_norm) for n in SHOWN
    ]
    caption = (
        "One block of each, read downwards: the thick blue line is the residual stream, the "
        "branches leave it to the right, compute, and are added (+). Follow the blue line from "
        "top to bottom. With pre-norm it meets only additions: the norms (orange) stand inside "
        "the branches, and the stream itself is normalized once, before the output layer. With "
        "post-norm it passes through a norm after every addition. Without norms it meets "
        "additions too, but nothing controls the size of what the branches read. Below each: "
        "what one sub-layer computes, and its Jacobian J, where DF and DNorm are the Jacobians "
        "of the branch and of the norm. What follows: with pre-norm J contains the identity, so "
        "that a gradient has one path back through any number of blocks on which nothing "
        "multiplies it, while the size of the stream is free to grow. With post-norm the size "
        "is fixed at √d after every sub-layer (while gains are 1), and every gradient passes "
        "through every DNorm on "
        "its way."
    )
    words = ("placement_paths", "Two paths: norm in the branch, norm on the stream", caption)
    return Figure(*words, canvas, ("placement", *SLOTS, "final_norm"), rows)


def _has(place: Placement, slot: str) -> bool:
    return getattr(place.attention, slot) is not None


def _draw(axes: Axes, place: Placement) -> None:
    y = 0.0
    axes.text(_STREAM, 0.07, "h", ha="center", va="bottom", size=10, style="italic")
    for branch in BRANCHES:
        y = _sublayer(axes, place, branch, y)
    _stream(axes, y, y - 0.5)
    axes.text(_STREAM + 0.13, y - 0.27, "… more blocks", size=8, color=MUTED, va="center")
    y -= 0.5
    if place.final_norm:
        _box(axes, _STREAM, y - _TALL, "final norm", ORANGE)
        y -= _TALL
    _stream(axes, y, y - 0.35, head=True)
    rows = {"placement": place.record(1)}
    axes.text(1.0, -5.8, explanations.equation(rows) or "", ha="center", size=9.5)
    axes.text(1.0, -6.15, explanations.jacobian(rows) or "", ha="center", size=8.5, color=MUTED)
    axes.set_xlim(-0.02, 2.02)
    axes.set_ylim(-6.25, 0.3)
    axes.set_aspect("equal")
    axes.set_axis_off()


def _sublayer(axes: Axes, place: Placement, branch: str, y: float) -> float:
    """Draw one sub-layer below height y and return where it ends."""
    leave = y - 0.25
    at = leave - 0.2
    axes.plot([_STREAM, _BRANCH, _BRANCH], [leave, leave, at], color=INK, lw=1.2, zorder=2)
    boxes = [("norm", ORANGE)] if _has(place, "pre_norm") else []
    boxes += [(branch, "")]
    boxes += [("norm", ORANGE)] if _has(place, "branch_norm") else []
    # Every placement gets the height of a branch with one norm, so that the columns line up.
    at -= 0.0 if len(boxes) > 1 else 0.27
    if len(boxes) == 1:
        axes.plot([_BRANCH] * 2, [leave - 0.2, at], color=INK, lw=1.2, zorder=2)
    for text, colour in boxes:
        _box(axes, _BRANCH, at - _TALL, text, colour)
        axes.plot([_BRANCH] * 2, [at - _TALL, at - _TALL - 0.22], color=INK, lw=1.2, zorder=2)
        at -= _TALL + 0.22
    plus = leave - 0.2 - 2 * (_TALL + 0.22) - 0.12
    axes.plot([_BRANCH] * 2, [at, plus], color=INK, lw=1.2, zorder=2)
    axes.annotate(
        "", (_STREAM + 0.13, plus), (_BRANCH, plus), zorder=2,
        arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.2, "shrinkA": 0, "shrinkB": 0},
    )  # fmt: skip
    _stream(axes, y, plus)
    axes.plot(_STREAM, plus, "o", color=BLUE, ms=14, mfc=PAPER, mec=BLUE, mew=1.6, zorder=3)
    axes.text(_STREAM, plus, "+", ha="center", va="center_baseline", size=12, zorder=4)
    end = plus - 0.32
    _stream(axes, plus, end)
    if _has(place, "post_norm"):
        _box(axes, _STREAM, end - _TALL, "norm", ORANGE)
        end -= _TALL
    return end


def _stream(axes: Axes, top: float, bottom: float, head: bool = False) -> None:
    arrow = {"arrowstyle": "-|>" if head else "-", "color": BLUE, "lw": 3.0, "shrinkA": 0,
             "shrinkB": 0, "mutation_scale": 14}  # fmt: skip
    axes.annotate("", (_STREAM, bottom), (_STREAM, top), arrowprops=arrow, zorder=1)


def _box(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x - _HALF, y), 2 * _HALF, _TALL, boxstyle="round,pad=0,rounding_size=0.06",
            fc=PAPER if colour else PANEL, ec=colour or INK, lw=1.8 if colour else 1.1, zorder=3,
        )
    )  # fmt: skip
    axes.text(x, y + _TALL / 2, text, ha="center", va="center_baseline", size=8.5, zorder=4)
