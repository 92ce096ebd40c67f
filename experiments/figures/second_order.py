"""Steps across a vector lengthen it at second order only."""

from __future__ import annotations

import numpy as np

from experiments.figures.maths import circle
from experiments.figures.sheet import Sheet, SheetPanel
from normjax.errors import UserError
from normjax.norm_derivatives import Floats
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, GRID, INK, MUTED, ORANGE, VERMILLION

R = 5.0
STEPS = np.logspace(-3, 1, 61)


def growth(r: float, e: Floats | float) -> Floats:
    """Return sqrt(r^2 + e^2) - r, how much a step e across a vector of length r lengthens it.

    As e^2 / (sqrt(r^2 + e^2) + r): the difference itself would lose all digits for small e.

    Args:
        r: length, above 0.
        e: length of the step, any shape.

    Returns:
        float64 of the shape of e.

    Raises:
        UserError: r not above 0.

    >>> float(growth(5.0, 12.0))
    8.0
    """
    if not r > 0:
        raise UserError(f"r={r}: must be above 0; for example 5")
    e = np.asarray(e, np.float64)
    return e * e / (np.hypot(r, e) + r)


def second_order_step() -> Figure:
    """Draw a step across a vector and one along it, and the growth of length by each."""
    sheet = Sheet(3.9)
    places = sheet.grid(1, 2, width_ratios=(1.15, 1))
    _geometry(sheet.panel(places[0, 0], "r = 5 and a step of 2"))
    _growth(sheet.panel(places[0, 1], "How much longer the vector gets"))
    caption = (
        "Left: h of length 5 with a step of length 2 along it (orange) and one across it (blue), "
        "and the circle of all vectors of length 5. The step along h lengthens it by the whole "
        "2; the step across runs along the tangent and leaves the circle only by the short red "
        "piece. Right: the growth of length against the step, both axes logarithmic. Along: "
        "growth e, slope 1. Across: √(r² + e²) − r = e² / (√(r² + e²) + r), for small e nearly "
        "e²/(2r) (dashed), slope 2: a step of 0.1 lengthens by 0.001, one of 0.05 by 0.00025, "
        "half the step a quarter of the growth. What follows: a stream that gets many small "
        "updates across itself grows like the root of their number, since squares of lengths "
        "add: ‖h + v‖² = ‖h‖² + ‖v‖² for v across h. The same holds for weights whose scale does "
        "not matter (those that a norm reads): their gradients stand across them, so that each "
        "step of size e lengthens them by e²/(2r)."
    )
    return sheet.figure(
        "second_order_step", "A step across changes length at second order", caption
    )


def _geometry(panel: SheetPanel) -> None:
    e = 2.0
    h = np.array([R, 0.0])
    tip, far = np.array([R, e]), np.array([R + e, 0.0])
    arc = circle(R, 721)
    on_arc = R * tip / np.linalg.norm(tip)
    panel.curve("length 5", arc, MUTED, lw=1.0, zorder=1)
    panel.curve("h + step across", [(0, 0), tip], GRID, lw=1.0, zorder=1)
    panel.arrow("h", (0, 0), h, INK)
    panel.arrow("step along", h, far, ORANGE)
    panel.arrow("step across", h, tip, BLUE)
    panel.curve("growth", [on_arc, tip], VERMILLION, lw=3.0, zorder=5)
    panel.right_angle(h, (-1.0, 0.0), (0.0, 1.0), 0.28)
    panel.label((2.3, 0), "h, r = 5", (0, -5))
    panel.label(far, "along: + 2", (-2, -6), color=ORANGE, ha="center")
    panel.label((R, 1.0), "across", (5, 0), color=BLUE)
    panel.label(tip, f"+ {float(growth(R, e)):.3f}", (4, 4), color=VERMILLION)
    panel.label(circle(R, 13)[2], "all vectors\nof length 5", (3, 3), color=MUTED)
    panel.window((-0.4, 7.6), (-1.2, 5.6))
    panel.axes.set_xticks([0, 2, 4, 6, 8])
    panel.axes.set_yticks([0, 2, 4])


def _growth(panel: SheetPanel) -> None:
    panel.curve("along: e", np.stack([STEPS, STEPS], -1), ORANGE)
    panel.curve("across: e²/(2r)", np.stack([STEPS, STEPS**2 / (2 * R)], -1), MUTED,
                ls=(0, (4, 3)), lw=1.2)  # fmt: skip
    panel.curve("across, exact", np.stack([STEPS, growth(R, STEPS)], -1), BLUE)
    marked = np.array([0.05, 0.1])
    panel.dots("across, marked", np.stack([marked, growth(R, marked)], -1), BLUE, ms=5.5)
    for e in marked:
        value = float(growth(R, e))
        panel.label((e, value), f"e = {e:g}: {value:.2g}", (8, -4), color=BLUE)
    panel.logarithmic()
    panel.label((0.02, 0.02), "along, slope 1", (-4, 6), color=ORANGE)
    panel.label((1.6, float(growth(R, 1.6))), "across, slope 2", (8, -6), color=BLUE)
    panel.label((10.0, 10.0**2 / (2 * R)), "e²/(2r)", (5, 0), color=MUTED)
    panel.names("length of the step e", "growth of length")
