"""Figures to files and one page that tells their story."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.figures import all_figures
from normjax.reporting import drawing, html, tables

TEMPLATE = Path(__file__).with_name("page.html.j2")


def write(folder: Path, names: Sequence[str], seed: int) -> Path:
    """Draw figures, save PNG, SVG and CSV of each under ``figures/``, and write ``figures.html``.

    Args:
        folder: where; made if absent.
        names: of :data:`experiments.figures.all_figures.ILLUSTRATIONS`, in any order.
        seed: of everything random in them.

    Returns:
        The path of the page.

    Raises:
        UserError: an unknown name.
    """
    command = f"python launch.py --experiment=figures --config.seed={seed}"
    if names:
        command += f" --config.figures={','.join(all_figures.chosen(names))}"
    entries = []
    for name in all_figures.chosen(names):
        figure = all_figures.draw(name, seed)
        svg = drawing.save(figure, folder / "figures", command)
        entry = all_figures.ILLUSTRATIONS[name]
        entries.append(
            {**vars(html.picture(figure, svg)), "lead": entry.lead, "formula": entry.formula}
        )
    page = html.render(TEMPLATE, figures=entries, command=command)
    return tables.write_text(folder / "figures.html", page)
