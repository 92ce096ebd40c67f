"""A vector as size times direction, as shadow plus rest, and the two projections at work."""

from __future__ import annotations

import numpy as np

from experiments.figures.maths import circle, orthonormal_to, projections
from experiments.figures.sheet import BEHIND, Sheet, SheetPanel
from normjax.norm_derivatives import Floats, unit
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, GREEN, GRID, INK, MUTED, ORANGE, PURPLE, VERMILLION


def magnitude_and_direction() -> Figure:
    """Draw [3, 4] and [9, 12] with their lengths and the direction that they share."""
    short, long = np.array([3.0, 4.0]), np.array([9.0, 12.0])
    u = unit(short)
    sheet = Sheet(3.9)
    places = sheet.grid(1, 2)
    left = sheet.panel(places[0, 0], "Two vectors on one ray")
    left.origin()
    for vector, colour, name in ((long, BLUE, "[9, 12]"), (short, ORANGE, "[3, 4]")):
        r = float(np.linalg.norm(vector))
        left.curve(f"circle of radius {r:g}", circle(r), GRID, lw=1.0, zorder=1)
        left.arrow(name, (0, 0), vector, colour, lw=2.4 if colour == ORANGE else 1.8)
        left.label(vector, f"{name}\nr = ‖h‖ = {r:g}", (8, -8), color=colour, bbox=BEHIND)
        left.dots(f"point of {name}", [vector], colour)
    left.window((-1.5, 16.5), (-1.5, 16.5))
    left.axes.set_xticks([0, 5, 10, 15])
    left.axes.set_yticks([0, 5, 10, 15])
    left.names("h₁", "h₂")
    right = sheet.panel(places[0, 1], "Their common direction u = h / r")
    right.origin()
    right.curve("unit circle", circle(), MUTED, lw=1.0)
    right.curve("u₁", [(u[0], 0), u], GREEN, lw=1.2, ls=(0, (3, 2)))
    right.curve("u₂", [(0, u[1]), u], GREEN, lw=1.2, ls=(0, (3, 2)))
    right.arrow("u", (0, 0), u, INK, lw=2.2)
    right.label(u, f"u = [{u[0]:.1f}, {u[1]:.1f}]", (4, 4))
    right.label((u[0], 0), f"{u[0]:.1f}", (0, -4), color=GREEN)
    right.label((0, u[1]), f"{u[1]:.1f}", (-4, 0), color=GREEN)
    right.label(circle(1.0, 9)[7], "all directions:\n‖u‖ = 1", (-12, 6), color=MUTED, ha="right",
                va="bottom")  # fmt: skip
    right.window((-1.3, 1.7), (-1.3, 1.7))
    right.axes.set_xticks([-1, 0, 1])
    right.axes.set_yticks([-1, 0, 1])
    right.names("u₁", "u₂")
    caption = (
        "Left: the vectors [3, 4] and [9, 12] in one plane, with the circles of their lengths 5 "
        "and 15. Right: each divided by its own length, h / ‖h‖; both arrive at the same point "
        "[0.6, 0.8] of the unit circle. Read a vector as two facts: how long it is (r, one "
        "number) and where it points (u, d − 1 free numbers). What follows: [9, 12] is [3, 4] "
        "with r three times as large and nothing else changed. A normalization is a map that "
        "keeps the second fact and replaces the first."
    )
    return sheet.figure("magnitude_and_direction", "Size and direction of a vector", caption)


def shadow() -> Figure:
    """Draw v = [5, 0], its shadow on the line of u = [0.6, 0.8] and what the shadow leaves."""
    u, v = np.array([0.6, 0.8]), np.array([5.0, 0.0])
    onto, across = projections(u)
    parallel, rest = onto @ v, across @ v
    t = orthonormal_to(u)[0]
    sheet = Sheet(4.6)
    panel = sheet.panel(sheet.grid(1, 1)[0, 0], "A vector is its shadow plus the rest")
    panel.origin()
    panel.curve("line of u", [-1.6 * u, 3.5 * u], MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
    panel.curve("line across u", [2.0 * t, -4.0 * t], MUTED, lw=0.9, ls=(0, (4, 3)), zorder=1)
    panel.curve("light ray", [v, parallel], VERMILLION, lw=1.1, ls=(0, (2, 2)))
    panel.curve("rest moved", [v, rest], GRID, lw=1.1, ls=(0, (2, 2)))
    panel.arrow("v", (0, 0), v, INK)
    panel.arrow("parallel", (0, 0), parallel, BLUE)
    panel.arrow("rest", (0, 0), rest, GREEN)
    panel.arrow("u", (0, 0), u, ORANGE, lw=2.6)
    panel.right_angle(parallel, -u, -t, 0.26)
    panel.right_angle((0, 0), -u, -t, 0.26)
    panel.label(v, "v = [5, 0]", (5, 5), ha="left")
    panel.label(u, "u = [0.6, 0.8]", (9, -7), color=ORANGE)
    panel.label(
        parallel, f"shadow  u uᵀv = [{parallel[0]:.1f}, {parallel[1]:.1f}]\nlength uᵀv = "
        f"{float(u @ v):g}", (16, 4), color=BLUE,
    )  # fmt: skip
    panel.label(
        rest, f"rest  (I − u uᵀ) v = [{rest[0]:.1f}, −{-rest[1]:.1f}]\nlength "
        f"{float(np.linalg.norm(rest)):g}", (8, -6), color=GREEN,
    )  # fmt: skip
    panel.window((-2.4, 6.8), (-3.4, 3.7))
    panel.names("first coordinate", "second coordinate")
    caption = (
        "v = [5, 0], a direction u = [0.6, 0.8] of length 1 (orange), and the two parts "
        "of v. The shadow (blue) is what v has along u: light that falls onto the line of u at "
        "a right angle (dotted red) casts the tip of v there. The rest (green) is v minus the "
        "shadow, and "
        "stands at a right angle to u; the small squares mark the right angles, and the axes are "
        "equal so that they look it. In numbers uᵀv = 0.6 · 5 = 3, the shadow is 3 u = [1.8, "
        "2.4], the rest is [3.2, −2.4], and 3² + 4² = 5². What follows: every change of h splits "
        "into a radial part, along u = h / ‖h‖, and a tangential part, across it, and the two do "
        "not mix in length: ‖v‖² = ‖shadow‖² + ‖rest‖²."
    )
    return sheet.figure("shadow", "Projection is casting a shadow", caption)


_EDGE = 2.3


def projection_matrices() -> Figure:
    """Draw a grid and the unit circle before and after each of the two projections."""
    u = np.array([0.6, 0.8])
    onto, across = projections(u)
    steps = np.linspace(-1.5, 1.5, 7)
    points = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
    sheet = Sheet(2.8)
    places = sheet.grid(1, 3)
    before = sheet.panel(places[0, 0], "Before: I")
    _draw(before, points, points, np.eye(2), BLUE)
    before.arrow("u", (0, 0), u, ORANGE, lw=2.2)
    before.label(u, "u", (4, 4), color=ORANGE)
    first = sheet.panel(places[0, 1], "u uᵀ: onto the line of u")
    _draw(first, points, points @ onto.T, onto, BLUE)
    second = sheet.panel(places[0, 2], "I − u uᵀ: across u")
    _draw(second, points, points @ across.T, across, GREEN)
    second.right_angle((0, 0), u, orthonormal_to(u)[0], 0.25)
    for panel in (first, second):
        panel.arrow("u", (0, 0), u, ORANGE, lw=2.2)
    caption = (
        "A grid of 49 points and the unit circle (pink) in the plane, under three matrices. Pale "
        "dots are where a point was, coloured dots where it is, thin lines show the way. u uᵀ "
        "moves every point straight to the line of u: the plane falls flat, and the circle "
        "becomes the segment from −u to u. I − u uᵀ takes away exactly that and keeps the part "
        "across u; the circle becomes a segment of length 2 at a right angle to u, and u itself "
        "goes to 0. The two matrices add up to I, each applied twice does no more than once (Q² "
        "= Q), and their product is 0. What follows: I − u uᵀ has eigenvalue 0 along u and 1 "
        "across it. It is the core of the derivative of RMSNorm and, once the mean is taken "
        "out, of LayerNorm."
    )
    return sheet.figure("projection_matrices", "Projection matrices acting on the plane", caption)


def _draw(panel: SheetPanel, points: Floats, images: Floats, matrix: Floats, colour: str) -> None:
    panel.origin()
    if np.any(points != images):
        panel.joins(points, images, lw=0.6)
        panel.dots("grid before", points, MUTED, ms=2.2, alpha=0.55)
    flat = np.linalg.matrix_rank(matrix) == 1
    panel.curve("unit circle", circle() @ matrix.T, PURPLE, lw=9 if flat else 2.5, alpha=0.6)
    panel.dots("grid after", images, colour, ms=3.6)
    panel.window((-_EDGE, _EDGE), (-_EDGE, _EDGE))
    panel.axes.set_xticks([-2, 0, 2])
    panel.axes.set_yticks([-2, 0, 2])
