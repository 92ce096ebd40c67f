"""The Jacobian of RMSNorm as what it does to a small circle around h."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.figures.maths import circle, normalize, orthonormal_to, verified_jacobian
from experiments.figures.sheet import Camera, Sheet, SheetPanel, circle_in
from normjax.norm_derivatives import unit
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, GREEN, INK, MUTED, ORANGE

H = np.array([1.38, 1.84])
"""The point of the plane panels: 2.3 times [0.6, 0.8]."""
EPS, GAIN, RADIUS = 2.0, np.array([1.5, 0.6]), 0.5


def tangent_plane(seed: int = 0) -> Figure:
    """Draw small perturbations of h and their images under the Jacobian of RMSNorm.

    The Jacobians are closed forms checked against ``jax.jacfwd``.
    """
    sheet = Sheet(7.6)
    places = sheet.grid(2, 2)
    plain = sheet.panel(places[0, 0], "ε = 0: the circle falls flat")
    _plane(plain, None, 0.0)
    soft = sheet.panel(places[0, 1], f"ε = {EPS:g}: a little of the radial part is left")
    _plane(soft, None, EPS)
    gained = sheet.panel(places[1, 0], f"gain [{GAIN[0]:g}, {GAIN[1]:g}], ε = 0: flat, and turned")
    _plane(gained, GAIN, 0.0)
    _space(sheet.panel(places[1, 1], "d = 3, ε = 0: a ball becomes a disc", Camera(30, 18)), seed)
    caption = (
        "Around h a circle of perturbations dh (upper right of each panel), and what the norm "
        "makes of them to first order: J dh drawn at N(h). Orange is the radial perturbation, "
        "along u = h / ‖h‖; green the tangential one, across it. Top left: with ε = 0 the circle "
        "becomes a segment on the tangent of the sphere; the radial arrow is gone, the "
        "tangential one is multiplied by 1/s, s = ‖h‖/√d. Top right: with ε > 0 the image is a "
        "thin ellipse; along u the factor is ε/s³ with s² = ‖h‖²/d + ε (ε is large here to be "
        "seen; usual values of 10⁻⁶ look like top left). Bottom left: a gain multiplies the "
        "outputs, so that the segment lies on the tangent of the ellipse; still J u = 0. Bottom "
        "right: in space a ball of perturbations (dots on its surface) becomes a disc in the "
        "tangent plane. "
        "The arrows are the closed form, compared with jax.jacfwd when the figure is drawn. What "
        "follows: J is singular (or nearly so) in exactly one direction, h itself, and no "
        "gradient comes back along it: Jᵀ ∂L/∂y has no part along h."
    )
    return sheet.figure("tangent_plane", "The Jacobian of RMSNorm keeps the tangent", caption)


def _plane(panel: SheetPanel, gain: Any, eps: float) -> None:
    J, y = verified_jacobian(H, gain, eps), normalize(H, gain, eps)
    u = unit(H)
    t = orthonormal_to(u)[0]
    ring = circle(RADIUS)
    panel.origin()
    panel.curve("image of all directions", normalize(1e3 * circle(), gain), BLUE, lw=0.9, alpha=0.6)
    panel.curve("ray of h", [(0, 0), 1.3 * H], MUTED, lw=0.8, ls=(0, (3, 3)), zorder=1)
    panel.curve("h + dh", H + ring, INK, lw=1.2)
    panel.curve("N(h) + J dh", y + ring @ J.T, INK, lw=1.2)
    for name, direction, colour in (("radial", u, ORANGE), ("tangential", t, GREEN)):
        panel.arrow(f"{name} dh", H, H + RADIUS * direction, colour)
        image = RADIUS * J @ direction
        if np.linalg.norm(image) > 1e-12:
            panel.arrow(f"J dh, {name}", y, y + image, colour, mutation_scale=6)
        else:
            panel.record(f"J dh, {name}", [y, y + image])
    panel.dots("h and N(h)", [H, y], INK, ms=3, zorder=3.5)
    panel.label(H, "h", (5, -7))
    panel.label(
        y,
        "N(h)" if gain is None else "g ⊙ N(h)",
        (6, -17) if gain is None else (0, -6),
        ha="center",
    )
    gains = [float(np.linalg.norm(J @ v)) for v in (u, t)]
    panel.note(f"‖J u‖ = {gains[0]:.3f}", y=0.10, x=0.03, color=ORANGE, weight="bold")
    panel.note(f"‖J t‖ = {gains[1]:.3f}", y=0.03, x=0.03, color=GREEN, weight="bold")
    panel.window((-0.45, 2.55), (-0.45, 2.55))
    panel.axes.set_xticks([0, 1, 2])
    panel.axes.set_yticks([0, 1, 2])
    panel.names("first feature", "second feature")


def _space(panel: SheetPanel, seed: int) -> None:
    h = 2.9 * unit(np.array([-0.08, 0.9, 0.45]))
    J, y, u = verified_jacobian(h), normalize(h), unit(h)
    first, second = orthonormal_to(u)
    radius = 0.7
    ring = circle_in(first, second, radius)
    ball = radius * unit(np.random.default_rng(seed).normal(size=(70, 3)))
    panel.globe(3**0.5)
    panel.curve("ray of h", [(0, 0, 0), 1.35 * h], MUTED, lw=0.8, ls=(0, (3, 3)), zorder=1)
    panel.dots("h + dh", h + ball, MUTED, ms=2)
    panel.dots("N(h) + J dh", y + ball @ J.T, MUTED, ms=2)
    panel.curve("h + dh, tangential", h + ring, GREEN, lw=1.4)
    panel.curve("N(h) + J dh, tangential", y + ring @ J.T, GREEN, lw=1.4)
    panel.arrow("radial dh", h, h + radius * u, ORANGE)
    panel.arrow("tangential dh", h, h - radius * first, GREEN)
    panel.arrow("J dh, tangential", y, y - radius * J @ first, GREEN, mutation_scale=7)
    panel.record("J dh, radial", [y, y + radius * J @ u])
    panel.dots("h and N(h)", [h, y], INK, ms=3, zorder=3.5)
    panel.label(h, "h", (4, -9))
    panel.label(y, "N(h)", (-15, 9))
    panel.axes.set_xlim(-2.0, 3.9)
    panel.axes.set_ylim(-2.5, 3.4)
