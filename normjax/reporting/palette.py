"""One colour and one marker per series, the same in every figure, table and diagram.

The colours are those of Okabe and Ito, chosen to stay apart for colour-blind readers, without
their yellow (illegible on white). A marker shape repeats the distinction for grey prints.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

INK = "#1b1b1b"
MUTED = "#666666"
GRID = "#dddddd"
PAPER = "#ffffff"
PANEL = "#f3f3f1"

BLUE, GREEN, PURPLE = "#0072b2", "#009e73", "#cc79a7"
ORANGE, VERMILLION, SKY = "#e69f00", "#d55e00", "#56b4e9"
WINE, OLIVE, INDIGO, BROWN = "#882255", "#999933", "#332288", "#8c6d4f"

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
}

# Related variants of different experiments keep one colour: what "none" is by depth, "no-norm" is
# in the ablation.
_PREFERRED = {
    "no-attention": BLUE,
    "no-mlp": GREEN,
    "no-positions": PURPLE,
    "no-norm": ORANGE,
    "none": ORANGE,
    "no-residual": VERMILLION,
    "post-norm": SKY,
    "post": SKY,
    "sandwich": GREEN,
    "deepnorm": PURPLE,
    "branch-output": BLUE,
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


def looks(series: Sequence[str], baseline: str) -> dict[str, Look]:
    """Assign a look to every series; the baseline is dark with round markers.

    Args:
        series: names in plan order, repetitions allowed.
        baseline: the name that differences refer to.

    Returns:
        Look by name. Within the first ten other names no colour repeats; later ones change their
        dashes.

    >>> looks(["full", "no-mlp"], "full")["full"].colour == INK
    True
    """
    names = [name for name in dict.fromkeys(series) if name != baseline]
    chosen: dict[str, str] = {}
    for name in names:
        colour = _PREFERRED.get(name)
        if colour is not None and colour not in chosen.values():
            chosen[name] = colour
    free = [colour for colour in _CYCLE if colour not in chosen.values()]
    waiting = [name for name in names if name not in chosen]
    spare = free + list(_CYCLE) * (1 + len(waiting) // len(_CYCLE))
    chosen |= dict(zip(waiting, spare, strict=False))
    result = {baseline: Look(INK, "o")}
    for index, name in enumerate(names):
        dash = _DASHES[index // len(_CYCLE) % len(_DASHES)]
        result[name] = Look(chosen[name], _MARKERS[index % len(_MARKERS)], dash)
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
