"""The matrices u u^T and I - u u^T acting on a grid of points."""

from __future__ import annotations

import numpy as np

from experiments.figures.maths import circle, orthonormal_to, projections
from experiments.figures.sheet import Panel, Sheet
from normjax.norm_derivatives import Floats
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, GREEN, MUTED, ORANGE, PURPLE

_EDGE = 2.3


def projection_matrices(seed: int = 0) -> Figure:
    """Draw a grid and the unit circle before and after each of the two projections.

    Args:
        seed: unused; nothing here is random.

    Returns:
        The figure; equal axes.
    """
    del seed
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


def _draw(panel: Panel, points: Floats, images: Floats, matrix: Floats, colour: str) -> None:
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
