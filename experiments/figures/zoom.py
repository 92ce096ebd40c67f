"""A derivative is what is left of a function under a magnifying glass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.patches import Rectangle

from experiments.figures.maths import orthonormal_to
from experiments.figures.sheet import Sheet, SheetPanel
from normjax.norm_derivatives import Floats
from normjax.norm_functions import rms_norm
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, GREEN, GRID, INK, MUTED, ORANGE, VERMILLION

WINDOWS = (1.0, 0.1, 0.01)
"""Half widths of the three magnifications."""
U = np.array([0.6, 0.8])
STEPS = np.logspace(-10, 0, 61)


def square(x: Any) -> Any:
    """Return x^2."""
    return x * x


def norm(h: Any) -> Any:
    """Return RMSNorm(h) with eps = 0."""
    return rms_norm(h, eps=0.0)


def linearized(f: Callable[[Any], Any], x: Any, v: Any, steps: Any) -> tuple[Floats, Floats]:
    """Return f(x + e v) and its tangent f(x) + e J v at many steps e, J v by ``jax.jvp``.

    Args:
        f: a function of one array in JAX.
        x: where, a number or (d,).
        v: the direction, of the same shape.
        steps: (n,).

    Returns:
        Two float64 arrays (n, ...).

    >>> curve, line = linearized(square, 1.0, 1.0, [0.5])
    >>> float(curve[0]), float(line[0])
    (2.25, 2.0)
    """
    with jax.enable_x64(True):
        x, v = jnp.asarray(x, jnp.float64), jnp.asarray(v, jnp.float64)
        e = jnp.asarray(steps, jnp.float64)
        value, slope = jax.jit(lambda x, v: jax.jvp(f, (x,), (v,)))(x, v)
        along = jax.jit(jax.vmap(lambda s: f(x + s * v)))(e)
        tangent = value + e.reshape(-1, *[1] * slope.ndim) * slope
        return np.asarray(along), np.asarray(tangent)


def tangent_zoom() -> Figure:
    """Draw x^2 and the norm with their tangents at three magnifications, and the remainders."""
    sheet = Sheet(7.9)
    places = sheet.grid(3, 3, height_ratios=(1, 1, 1.15))
    for column, width in enumerate(WINDOWS):
        _parabola(sheet.panel(places[0, column], f"x² near 1, ± {width:g}"), width)
        _arc(sheet.panel(places[1, column], f"N near √2 u, ± {width:g}"), width)
    _remainders(sheet.panel(places[2, :], "What the tangent leaves out"))
    caption = (
        "Top: f(x) = x² (blue) and its tangent 1 + 2 (x − 1) (orange) in windows ten times "
        "smaller from panel to panel; the small grey box is the next window. Middle: the same "
        "for a vector function: h moves across u through the point √2 u of the circle; blue is "
        "the path of N(h) on the circle, orange the tangent line N(h) + e J t. In the last "
        "window curve and tangent cannot be told apart. Bottom: the distance between them "
        "against the step e, both axes logarithmic: a straight line of slope 2, so that a step "
        "ten times smaller leaves a remainder a hundred times smaller. The norm's line has slope "
        "2 as well: a curve on a sphere leaves its tangent by e²/(2 ‖h‖). Below 10⁻¹⁶ float64 "
        "can hold no more and only rounding is seen (remainders that come out as exactly 0 are "
        "not shown). What follows: f(x + e v) = f(x) + e J v + "
        "O(e²). The Jacobian J is the whole function as seen from close by, for vectors as for "
        "numbers."
    )
    return sheet.figure("tangent_zoom", "A derivative seen under a magnifying glass", caption)


def _parabola(panel: SheetPanel, width: float) -> None:
    steps = np.linspace(-width, width, 121)
    curve, line = linearized(square, 1.0, 1.0, steps)
    panel.curve("tangent", np.stack([1 + steps, line], axis=-1), ORANGE, lw=3.0)
    panel.curve("x²", np.stack([1 + steps, curve], axis=-1), BLUE, lw=1.5)
    panel.dots("point", [(1.0, 1.0)], INK, ms=4.5, zorder=5)
    if width == WINDOWS[0]:
        panel.label((1.9, 3.61), "x²", (-8, 0), color=BLUE)
        panel.label((0.4, -0.2), "tangent", (7, -5), color=ORANGE)
    _ticks(panel, 1.0, 1.0, width, 3 * width)
    panel.axes.set_box_aspect(1)
    _next(panel, 1.0, 1.0, width, 3 * width)


def _arc(panel: SheetPanel, width: float) -> None:
    h, t = 2**0.5 * U, orthonormal_to(U)[0]
    steps = np.linspace(-2.2 * width, 2.2 * width, 161)
    curve, line = linearized(norm, h, t, steps)
    panel.curve("tangent", line, ORANGE, lw=3.0)
    panel.curve("N(h + e t)", curve, BLUE, lw=1.5)
    panel.dots("point", [h], INK, ms=4.5, zorder=5)
    if width == WINDOWS[0]:
        panel.label(line[105], "tangent", (5, 3), color=ORANGE)
        panel.label(curve[47], "N(h + e t)", (-6, -5), color=BLUE)
    panel.window((h[0] - width, h[0] + width), (h[1] - width, h[1] + width))
    _ticks(panel, h[0], h[1], width, width)
    _next(panel, h[0], h[1], width, width)


def _ticks(panel: SheetPanel, x: float, y: float, wide: float, tall: float) -> None:
    """Show the window about (x, y); ticks say the distance from it."""
    panel.axes.set_xlim(x - wide, x + wide)
    panel.axes.set_ylim(y - tall, y + tall)
    for axis, middle, half in ((panel.axes.xaxis, x, wide), (panel.axes.yaxis, y, tall)):
        names = [f"−{half:g}", "0", f"+{half:g}"]
        axis.set_ticks([middle - half, middle, middle + half], names, size=8)


def _next(panel: SheetPanel, x: float, y: float, wide: float, tall: float) -> None:
    """Draw where the next window lies."""
    if wide > WINDOWS[-1]:
        corner = (x - wide / 10, y - tall / 10)
        panel.axes.add_patch(
            Rectangle(corner, wide / 5, tall / 5, fc="none", ec=MUTED, lw=0.9, zorder=6)
        )


def _remainders(panel: SheetPanel) -> None:
    h, t = 2**0.5 * U, orthonormal_to(U)[0]
    series = (
        ("x²", square, 1.0, 1.0, BLUE, "o", "e² left by the tangent of x²", (30, 8, "right")),
        ("N", norm, h, t, GREEN, "^", "left by the tangent of N", (44, -10, "left")),
    )
    for name, f, x, v, colour, marker, text, (index, shift, side) in series:
        curve, line = linearized(f, x, v, STEPS)
        size = np.abs(curve - line).reshape(len(STEPS), -1)
        size = np.sqrt(np.sum(size * size, axis=1))
        seen = size > 0  # an exact zero has no place on a logarithmic axis
        points = np.stack([STEPS[seen], size[seen]], axis=-1)
        panel.dots(f"remainder of {name}", points, colour, marker=marker, ms=3.6)
        place = (STEPS[index], STEPS[index] ** 2)
        offset = (-10, shift) if side == "right" else (10, shift)
        panel.label(place, text, offset, color=colour)
    panel.curve("slope 2", np.stack([STEPS[20:], STEPS[20:] ** 2], axis=-1), GRID, lw=1.0, zorder=1)
    panel.axes.axhline(float(np.finfo(np.float64).eps), color=VERMILLION, lw=0.9, ls=(0, (2, 2)))
    panel.label((1.0, np.finfo(np.float64).eps), "rounding of float64, 2.2 · 10⁻¹⁶", (-2, 3),
                color=VERMILLION, ha="right")  # fmt: skip
    panel.logarithmic(every=2)
    panel.axes.set_ylim(1e-18, 30)
    panel.names("step e", "‖f(x + e v) − f(x) − e J v‖")
