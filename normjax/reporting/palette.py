"""One colour and one marker per series, the same in every figure, table and diagram.

The colours are those of Okabe and Ito, chosen to stay apart for colour-blind readers, without
their yellow (illegible on white). A marker shape repeats the distinction for grey prints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

INK = "#1b1b1b"
MUTED = "#666666"
GRID = "#dddddd"
PAPER = "#ffffff"
PANEL = "#f3f3f1"

BLUE, GREEN, PURPLE = "#0072b2", "#009e73", "#cc79a7"
ORANGE, VERMILLION, SKY = "#e69f00", "#d55e00", "#56b4e9"
WINE, OLIVE, INDIGO, BROWN = "#882255", "#999933", "#332288", "#8c6d4f"
TEAL, CRIMSON, SLATE = "#0f5257", "#b33a3a", "#5b5ea6"

# Light colours of the page and what stands for them on a dark screen.
DARK = {
    INK: "#ececec",
    MUTED: "#a8a8a8",
    GRID: "#3c3f44",
    PAPER: "#16181c",
    PANEL: "#22252b",
    BLUE: "#4d9be6",
    GREEN: "#1fbf92",
    PURPLE: "#e39cc6",
    ORANGE: "#f0b030",
    VERMILLION: "#f47b33",
    SKY: "#8fd3fa",
    WINE: "#d06a98",
    OLIVE: "#c2c25a",
    INDIGO: "#8f85e0",
    BROWN: "#c2a184",
    TEAL: "#4fb3bb",
    CRIMSON: "#e57373",
    SLATE: "#9ea0e0",
}

_CYCLE = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, WINE, OLIVE, INDIGO, BROWN)
_MARKERS = ("s", "^", "D", "v", "P", "X", "p", "h", "*", "d")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))


@dataclass(frozen=True)
class Look:
    """How a series is drawn: colour (hex), matplotlib marker and matplotlib line style."""

    colour: str
    marker: str
    dash: str | tuple = "-"


def looks(
    series: Sequence[str], baseline: str, colours: Mapping[str, str] | None = None
) -> dict[str, Look]:
    """Assign a look to every series.

    Args:
        series: names in plan order, repetitions allowed.
        baseline: the name that differences refer to: dark with round markers, unless it has a
            colour of its own.
        colours: of the series that have one of their own, such as placements.

    Returns:
        Look by name. Free colours do not repeat within the first ten; series that share a colour
        differ in their dashes.

    >>> looks(["full", "no-mlp"], "full")["full"].colour == INK
    True
    >>> looks(["a", "b"], "a", {"b": "#123456"})["b"].colour
    '#123456'
    """
    names = [name for name in dict.fromkeys(series) if name != baseline]
    chosen = {baseline: INK} | {k: v for k, v in (colours or {}).items() if k in (*names, baseline)}
    waiting = [name for name in names if name not in chosen]
    free = [colour for colour in _CYCLE if colour not in chosen.values()]
    spare = free + list(_CYCLE) * (1 + len(waiting) // len(_CYCLE))
    chosen |= dict(zip(waiting, spare, strict=False))
    result, used = {baseline: Look(chosen[baseline], "o")}, [chosen[baseline]]
    for index, name in enumerate(names):
        dash = _DASHES[used.count(chosen[name]) % len(_DASHES)]
        result[name] = Look(chosen[name], _MARKERS[index % len(_MARKERS)], dash)
        used.append(chosen[name])
    return result


def variable(colour: str) -> str:
    """Return the CSS reference to a colour of the page, such as ``var(--c0072b2)``."""
    return f"var(--c{colour[1:]})"


def use_variables(svg: str) -> str:
    """Replace the palette's colours in SVG text by CSS variables, so that a theme can set them."""

    def swap(match: re.Match[str]) -> str:
        colour = match.group(0).lower()
        return variable(colour) if colour in DARK else match.group(0)

    return re.sub(r"#[0-9a-fA-F]{6}\b", swap, svg)
