"""RMSNorm as a map of the plane and of space onto a circle and a sphere."""

from __future__ import annotations

import numpy as np

from experiments.figures.maths import circle, normalize
from experiments.figures.sheet import Camera, Sheet, SheetPanel
from normjax.norm_derivatives import Floats, unit
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, GRID, INK, MUTED, ORANGE, VERMILLION

EPS = 0.25
GAIN = np.array([1.6, 0.55])
_EDGE = 3.1


def onto_the_sphere(seed: int = 0) -> Figure:
    """Draw random points and where RMSNorm puts them: eps = 0, eps > 0, a gain, and in space."""
    generator = np.random.default_rng(seed)
    points = _scattered(generator, 26)
    sheet = Sheet(7.5)
    places = sheet.grid(2, 2)
    plain = sheet.panel(places[0, 0], "ε = 0: onto the circle of radius √2")
    _plane(plain, points, normalize(points))
    plain.note("‖N(h)‖ = √2 for every h", color=BLUE)
    soft = sheet.panel(places[0, 1], f"ε = {EPS}: small vectors stay inside")
    near = np.linspace(0.08, 0.68, 9)[:, None] * circle(1.0, 10)[:9]
    crowd = np.concatenate([points[np.linalg.norm(points, axis=1) > 1.1], near])
    _plane(soft, crowd, normalize(crowd, eps=EPS), small=len(near))
    limit = (2 * EPS) ** 0.5
    soft.curve("|h| = sqrt(d eps)", circle(limit), VERMILLION, lw=1.0, ls=(0, (2, 2)))
    soft.note(f"dotted: ‖h‖ = √(dε) = {limit:.2f}", color=VERMILLION)
    soft.note(f"there ‖N(h)‖ = {np.linalg.norm(normalize([limit, 0.0], eps=EPS)):.2f}", y=0.92)
    gained = sheet.panel(places[1, 0], f"gain [{GAIN[0]:g}, {GAIN[1]:g}]: onto an ellipse")
    _plane(gained, points, normalize(points, GAIN), GAIN)
    h = np.array([1.5, 2.4])
    image = normalize(h, GAIN)
    gained.arrow("h", (0, 0), h, INK)
    gained.arrow("N(h)", (0, 0), image, VERMILLION)
    gained.label(h, "h", (-5, 3))
    gained.note("red arrow: g ⊙ N(h)", color=VERMILLION)
    _space(sheet, places, generator)
    caption = (
        "Small dots are random vectors h, larger coloured dots their images, a thin line joins "
        "each "
        "pair. Top left: with ε = 0 every image has length √d (here √2), and the line to it runs "
        "along the ray from the origin: only the length changed. Top right: with ε > 0 the image "
        "has length √d r / √(r² + dε); at r = √(dε) (dotted circle) that is √d / √2, and short "
        "vectors (orange) stay well inside: the shorter they are, the closer the factor is to "
        "1/√ε. Only the direction is kept as before. Bottom "
        "left: a gain that is not uniform multiplies each coordinate by its own number after the "
        "division; the circle becomes an ellipse and the direction turns (arrows). Bottom right: "
        "in d = 3 the images cover the sphere of radius √3; points behind it are pale. What "
        "follows: a norm without gain loses exactly one number per vector, its length, and what "
        "reads its output sees a point of a sphere."
    )
    return sheet.figure("onto_the_sphere", "RMSNorm puts every vector on a sphere", caption)


def _scattered(generator: np.random.Generator, count: int) -> Floats:
    """Return points (count, 2) all around the origin at random distances from 0.35 to 2.5."""
    angle = (np.arange(count) + generator.uniform(0, 0.8, count)) * 2 * np.pi / count
    r = generator.uniform(0.35, 2.5, count)
    return r[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=-1)


def _plane(
    panel: SheetPanel, points: Floats, images: Floats, gain: Floats | None = None, small: int = 0
) -> None:
    """Draw points and images over the curve that images of eps = 0 lie on."""
    panel.origin()
    panel.curve("image of all directions", normalize(circle(), gain), BLUE, lw=1.0, alpha=0.6)
    panel.joins(points, images)
    panel.dots("h", points, INK, ms=3)
    far = len(points) - small
    panel.dots("N(h)", images[:far], BLUE, ms=4.5)
    if small:
        panel.dots("N(h) of small h", images[far:], ORANGE, ms=4.5)
    panel.window((-_EDGE, _EDGE), (-_EDGE, _EDGE))
    panel.names("first feature", "second feature")


def _space(sheet: Sheet, places: object, generator: np.random.Generator) -> None:
    camera = Camera()
    panel = sheet.panel(places[1, 1], "d = 3: onto the sphere of radius √3", camera)  # type: ignore[index]
    points = unit(generator.normal(size=(26, 3))) * generator.uniform(0.6, 2.9, (26, 1))
    images = normalize(points)
    panel.globe(3**0.5)
    front = camera.depth(images) >= 0
    for side, ink, blue in ((~front, GRID, BLUE), (front, INK, BLUE)):
        style = {"alpha": 1.0 if ink == INK else 0.35}
        panel.joins(points[side], images[side], MUTED if ink == INK else GRID, lw=0.7)
        panel.dots("h", points[side], ink, ms=3)
        panel.dots("N(h)", images[side], blue, ms=4.5, **style)
    panel.axes.set_xlim(-_EDGE, _EDGE)
    panel.axes.set_ylim(-_EDGE, _EDGE)
