"""A figure that keeps what it draws: every curve, point and arrow goes into its table as well.

The CSV beside a picture is therefore the picture's own coordinates, not a second computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.gridspec import SubplotSpec

from normjax.norm_derivatives import Floats
from normjax.placements import PLACEMENTS
from normjax.reporting import drawing, palette
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import GRID, INK, MUTED, PAPER

COLUMNS = ("panel", "series", "x", "y", "z")
"""Columns of a sheet's table; z is empty where a panel is plane."""

SHOWN = ("pre", "post", "none")
"""The placements that are laid side by side."""
LOOKS = palette.looks(SHOWN, SHOWN[0], {n: PLACEMENTS[n].colour for n in SHOWN[1:]})
BEHIND = {"fc": PAPER, "ec": "none", "pad": 1.0}
"""The box of a label that must cover lines behind it."""


@dataclass(frozen=True)
class Camera:
    """A parallel projection of space onto the page; lengths on the page keep one scale.

    Attributes:
        azimuth, elevation: degrees, from where the eye looks at the origin.
    """

    azimuth: float = 28.0
    elevation: float = 20.0

    def frame(self) -> Floats:
        """Return the orthonormal rows right, up and toward the eye: (3, 3)."""
        a, e = np.radians([self.azimuth, self.elevation])
        toward = np.array([np.cos(e) * np.cos(a), np.cos(e) * np.sin(a), np.sin(e)])
        right = np.array([-np.sin(a), np.cos(a), 0.0])
        return np.stack([right, np.cross(toward, right), toward])

    def flat(self, points: Any) -> Floats:
        """Return where points (n, 3) lie on the page: (n, 2)."""
        return np.asarray(points) @ self.frame()[:2].T

    def depth(self, points: Any) -> Floats:
        """Return how far points (n, 3) lie toward the eye: (n,)."""
        return np.asarray(points) @ self.frame()[2]


@dataclass
class Sheet:
    """A canvas and the table of what is drawn on it."""

    height: float
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.canvas = drawing.canvas(self.height)

    def grid(self, rows: int, columns: int, **ratios: Any) -> Any:
        """Return the places of panels, as matplotlib's gridspec."""
        return self.canvas.add_gridspec(rows, columns, **ratios)

    def panel(self, place: SubplotSpec, name: str, camera: Camera | None = None) -> SheetPanel:
        """Return a panel with its name as title."""
        axes = self.canvas.add_subplot(place)
        axes.set_title(name)
        if camera is not None:
            axes.set_aspect("equal")
            axes.set_axis_off()
        return SheetPanel(axes, name, self.rows, camera)

    def figure(self, name: str, title: str, caption: str) -> Figure:
        """Return the finished figure."""
        return Figure(name, title, caption, self.canvas, COLUMNS, self.rows)


@dataclass(frozen=True)
class SheetPanel:
    """One set of axes that records; points are arrays (n, 2), or (n, 3) where it has a camera."""

    axes: Axes
    name: str
    rows: list[tuple[Any, ...]]
    camera: Camera | None = None

    def flat(self, points: Any) -> Floats:
        """Return the points as they lie on the page: (n, 2)."""
        points = np.atleast_2d(np.asarray(points, np.float64))
        return points if self.camera is None else self.camera.flat(points)

    def record(self, series: str, points: Any) -> Floats:
        """Put points into the table and return them as they lie on the page."""
        for point in np.atleast_2d(np.asarray(points, np.float64)):
            values = [float(v) for v in point]
            self.rows.append((self.name, series, *values, *[None] * (3 - len(values))))
        return self.flat(points)

    def curve(self, series: str, points: Any, colour: str = INK, **style: Any) -> None:
        """Draw a line through points."""
        style = {"lw": 1.6, **style}
        self.axes.plot(*self.record(series, points).T, color=colour, **style)

    def dots(self, series: str, points: Any, colour: str = INK, **style: Any) -> None:
        """Draw points."""
        style = {"marker": "o", "ms": 4, "mew": 0, **style}
        self.axes.plot(*self.record(series, points).T, color=colour, ls="none", **style)

    def arrow(self, series: str, start: Any, end: Any, colour: str = INK, **style: Any) -> None:
        """Draw an arrow from start to end, exactly from point to point."""
        tail, tip = self.record(series, [start, end])
        arrow = {"arrowstyle": "-|>", "color": colour, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
        self.axes.annotate(
            "", tip, tail, arrowprops={**arrow, "mutation_scale": 11, **style}, zorder=4
        )
        # An annotation does not count when the limits are chosen; its ends do.
        self.axes.update_datalim([tail, tip])

    def joins(self, starts: Any, ends: Any, colour: str = GRID, **style: Any) -> None:
        """Draw a thin line from each start to its end; both are recorded as dots elsewhere."""
        gap = np.full((len(starts), 2), np.nan)
        path = np.stack([self.flat(starts), self.flat(ends), gap], axis=1).reshape(-1, 2)
        style = {"lw": 0.8, "zorder": 1, **style}
        self.axes.plot(*path.T, color=colour, **style)

    def label(
        self, point: Any, text: str, offset: tuple[float, float] = (0, 0), **style: Any
    ) -> None:
        """Write text beside a point, moved by an offset in printer's points."""
        dx, dy = offset
        side = "left" if dx > 0 else "right" if dx < 0 else "center"
        height = "bottom" if dy > 0 else "top" if dy < 0 else "center"
        style = {"ha": side, "va": height, "size": 8.5, "zorder": 6, **style}
        place = tuple(self.flat(point)[0])
        self.axes.annotate(text, place, offset, textcoords="offset points", **style)

    def right_angle(self, corner: Any, first: Any, second: Any, size: float) -> None:
        """Mark the right angle at a corner between two unit directions."""
        corner, first, second = (np.asarray(v, np.float64) for v in (corner, first, second))
        path = [corner + size * first, corner + size * (first + second), corner + size * second]
        self.axes.plot(*self.flat(path).T, color=INK, lw=1.0, zorder=3)

    def window(self, x: Sequence[float], y: Sequence[float]) -> None:
        """Show a window of the plane with equal axes: an angle on the page is a true angle."""
        self.axes.set_aspect("equal")
        self.axes.set_xlim(*x)
        self.axes.set_ylim(*y)

    def origin(self) -> None:
        """Draw thin lines through the origin."""
        self.axes.axhline(0, color=GRID, lw=0.8, zorder=0)
        self.axes.axvline(0, color=GRID, lw=0.8, zorder=0)

    def names(self, x: str, y: str) -> None:
        """Name the axes."""
        self.axes.set_xlabel(x)
        self.axes.set_ylabel(y)

    def note(self, text: str, x: float = 0.02, y: float = 0.98, **style: Any) -> None:
        """Write text at a place of the panel, in fractions of its width and height."""
        side, height = "left" if x < 0.5 else "right", "top" if y > 0.5 else "bottom"
        style = {"size": 8, "color": MUTED, "ha": side, "va": height, **style}
        self.axes.text(x, y, text, transform=self.axes.transAxes, **style)

    def logarithmic(self, axes: str = "xy", every: int = 1) -> None:
        """Make axes logarithmic, with a tick at every ``every``-th power of ten."""
        for name in axes:
            drawing.log_axis(self.axes, name, every)

    def globe(self, radius: float) -> None:
        """Draw a sphere about the origin: outline, and circles faint where they pass behind."""
        assert self.camera is not None
        rows = self.camera.frame()
        outline = circle_in(rows[0], rows[1], radius)
        self.curve("sphere", outline, MUTED, lw=1.0, zorder=1)
        for normal in np.eye(3):
            first, second = (row for row in np.eye(3) if not np.array_equal(row, normal))
            ring = circle_in(first, second, radius)
            front = self.camera.depth(ring) >= 0
            flat = self.flat(ring)
            for side, colour, width in ((front, MUTED, 0.8), (~front, GRID, 0.8)):
                self.axes.plot(
                    *np.where(side[:, None], flat, np.nan).T, color=colour, lw=width, zorder=1
                )


def circle_in(first: Any, second: Any, radius: float = 1.0, count: int = 181) -> Floats:
    """Return points (count, d) of the circle in the plane of two orthonormal vectors.

    >>> circle_in([1.0, 0.0, 0.0], [0.0, 0.0, 1.0], 2.0, 5).round(12)[1]
    array([0., 0., 2.])
    """
    angle = np.linspace(0.0, 2 * np.pi, count)[:, None]
    return radius * (np.cos(angle) * np.asarray(first) + np.sin(angle) * np.asarray(second))
