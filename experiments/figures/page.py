"""The figures in the order of their story, with what leads to each, and the page that tells it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.figures import (
    attention_scale,
    gains,
    paths,
    second_order,
    sphere,
    stream_growth,
    tangent,
    vectors,
    zoom,
)
from normjax.errors import check_choice
from normjax.reporting import drawing, html, tables
from normjax.reporting.drawing import Figure
from normjax.reporting.html import Page, Section, muted
from normjax.reporting.tables import tag
from normjax.reporting.wording import counted


@dataclass(frozen=True)
class Illustration:
    """A figure of the story.

    Attributes:
        draw: the figure; from a seed, where something in it is random.
        formula: what it shows, as one line.
        lead: the sentence or two that lead to it.
        random: whether something in it is.
    """

    draw: Callable[..., Figure]
    formula: str
    lead: str
    random: bool = False


ILLUSTRATIONS: dict[str, Illustration] = {
    "magnitude_and_direction": Illustration(
        vectors.magnitude_and_direction,
        "h = r u,\u2003r = ‖h‖,\u2003‖u‖ = 1",
        "Inside a transformer every token is a vector h of d numbers. Everything on this page "
        "rests on one way of looking at it: as a size and a direction.",
    ),
    "onto_the_sphere": Illustration(
        sphere.onto_the_sphere,
        "N(h) = g ⊙ h / √(‖h‖²/d + ε)",
        "RMSNorm divides a vector by the root of the mean of its squares, so that the size "
        "becomes always the same, √d, and the direction stays. ε keeps the division safe at "
        "zero; g is a learned gain, one number per feature.",
        random=True,
    ),
    "attention_and_scale": Illustration(
        attention_scale.attention_and_scale,
        "softmax(c² qᵀk / √C)",
        "Why should the size be taken away? Because parts of the network react to it. Attention "
        "is the clearest case.",
        random=True,
    ),
    "placement_paths": Illustration(
        paths.placement_paths,
        "h′ = P( h + F( N(h) ) )",
        "A norm can be put in front of a branch or behind the addition. The two look alike on "
        "paper and differ in what the residual stream itself passes through. N stands for the "
        "norm in front, P for the one behind; each does nothing where a placement does not have "
        "it.",
    ),
    "stream_growth": Illustration(
        stream_growth.stream_growth,
        "h′ = 1.1 h\u2003against\u2003h′ = h + 0.1 h / rms(h)",
        "The first difference is in size: how large the stream is after many blocks.",
        random=True,
    ),
    "shadow": Illustration(
        vectors.shadow,
        "v = u uᵀv + (I − u uᵀ) v",
        "The second difference is in derivatives. To see it, a change of h has to be split into "
        "what happens along h and what happens across it. That split is a projection.",
    ),
    "projection_matrices": Illustration(
        vectors.projection_matrices,
        "(u uᵀ)² = u uᵀ,\u2003(I − u uᵀ) u = 0",
        "The two parts come from two matrices, which act on every vector at once.",
    ),
    "tangent_zoom": Illustration(
        zoom.tangent_zoom,
        "f(x + e v) = f(x) + e J v + O(e²)",
        "A derivative says what a function does to a small change. For vectors it is a matrix, "
        "the Jacobian J; it means the same as the slope of a curve.",
    ),
    "tangent_plane": Illustration(
        tangent.tangent_plane,
        "J = (1/s) (I − h hᵀ/(d s²)),\u2003with ε = 0:\u2003J = (√d/‖h‖) (I − u uᵀ)",
        "Now both ideas meet: the Jacobian of RMSNorm is a projection, divided by the size.",
        random=True,
    ),
    "second_order_step": Illustration(
        second_order.second_order_step,
        "√(r² + e²) − r ≈ e² / (2r)",
        "What a norm lets through is tangential, and gradients that come back through it are "
        "tangential too. What do steps across a vector do to its length?",
    ),
    "gradient_gains": Illustration(
        gains.gradient_gains,
        "‖J u‖,\u2003TT = ‖(I − u′u′ᵀ) J (I − u uᵀ)‖ / √(d − 1),\u2003‖u′ᵀ J‖",
        "Finally all of it at once: real decoders, many blocks, and what arrives of a radial and "
        "of a tangential perturbation.",
        random=True,
    ),
}
"""By name, in the order of the page."""


def chosen(names: Sequence[str]) -> list[str]:
    """Return the names in the order of the page; none given means all.

    Raises:
        UserError: an unknown name, with the closest one.

    >>> chosen(["shadow", "magnitude_and_direction"])
    ['magnitude_and_direction', 'shadow']
    """
    for name in names:
        check_choice("config.figures", name, ILLUSTRATIONS)
    return [name for name in ILLUSTRATIONS if name in names or not names]


def draw(name: str, seed: int) -> Figure:
    """Return a figure by name, in the style of every figure."""
    with drawing.style():
        entry = ILLUSTRATIONS[name]
        return entry.draw(seed) if entry.random else entry.draw()


def write(folder: Path, names: Sequence[str], seed: int) -> Path:
    """Draw figures, save PNG, SVG and CSV of each under ``figures/``, and write ``figures.html``.

    Args:
        folder: where; made if absent.
        names: of :data:`ILLUSTRATIONS`, in any order; none: all.
        seed: of everything random in them.

    Returns:
        The path of the page.

    Raises:
        UserError: an unknown name.
    """
    command = f"python launch.py --experiment=figures --config.seed={seed}"
    if names:
        command += f" --config.figures={','.join(chosen(names))}"
    sections = []
    for number, name in enumerate(chosen(names), 1):
        figure, entry = draw(name, seed), ILLUSTRATIONS[name]
        picture = html.picture(figure, drawing.save(figure, folder / "figures", command))
        formula = tag("p", entry.formula, cls="equation")
        blocks = [entry.lead, formula, picture]
        sections.append(Section(name, f"{number}. {figure.title}", blocks))
    page = Page(
        "The geometry of normalization",
        "What does a normalization do to a vector, to a change of that vector, and to a stack of"
        f" blocks? {counted(len(sections), 'figure')}, to be read in order.",
        lead=[
            "You need to know what a vector and a matrix are. The rest is built up here: size and"
            " direction, the sphere, why size matters, the two places for a norm, projections,"
            " derivatives, and what they mean together. Letters keep their meaning: h is the vector"
            " of a token with d features, ‖h‖ its length, u = h/‖h‖ its direction, N the norm, J a"
            " Jacobian (the matrix of first derivatives), ε the small constant inside the root,"
            " rms(h) = ‖h‖/√d.",
            muted(
                "Every point, curve and arrow is computed by the code that also trains the models,"
                " by its closed-form derivatives, or by automatic differentiation; the coordinates"
                " lie beside each picture as a table. The block diagrams are drawn from the table"
                " of placements."
            ),
        ],
        sections=sections, record=html.record(command, title="How this page was made"),
        no_answer="",
    )  # fmt: skip
    return tables.write_text(folder / "figures.html", page.render())
