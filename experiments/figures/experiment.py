"""What does normalization do to a vector? The geometry in pictures, all of it computed.

Question: what do RMSNorm, its Jacobian and its place in the block do to the size and the direction
of a vector, to a small change of it, and to both over many blocks?

Command: python launch.py --experiment=figures
         python launch.py --experiment=figures --config.figures=shadow,tangent_plane

Cost: no training; half a minute on two cores.

Result: figures.html, a page to be read from top to bottom; figures/ holds each figure as PNG and
SVG with its coordinates as CSV.
"""

from __future__ import annotations

import dataclasses

from normjax import configs
from normjax.configs import field
from normjax.runs.experiment import Options, Outcome, working_in


@dataclasses.dataclass(frozen=True)
class FiguresConfig:
    """Which figures are drawn, and from what randomness."""

    figures: tuple[str, ...] = field((), "names of the figures to draw, as --dry_run; empty: all")
    seed: int = field(
        0, "of the points, weights and tokens that are random", least=0, most=2**32 - 1
    )


PRESETS = {"default": ("every figure and the page", {})}


def get_config(preset: str) -> FiguresConfig:
    """Return the configuration of a preset."""
    return configs.replace(FiguresConfig(), PRESETS[preset][1])


def run(config: FiguresConfig, preset: str, options: Options) -> Outcome | None:
    """Draw the figures and write the page."""
    del preset
    configs.check(config)
    # Drawing takes a while to import: not something that --help should wait for.
    from experiments.figures import page

    names = page.chosen(config.figures)
    if options.dry_run:
        for name in names:
            print(f"{name}: {page.ILLUSTRATIONS[name].formula}")
        return None
    with working_in(options) as folder:
        written = page.write(folder, config.figures, config.seed)
    count = "1 figure with its data" if len(names) == 1 else f"{len(names)} figures with their data"
    return Outcome(f"{count}: {options.workdir / 'figures'}", written)
