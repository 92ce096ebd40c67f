"""What is there? A page for every placement and every norm of the tables, made from them alone.

Question: what does each row put into the equation, where does it come from, where is it in the
code, what was it compared with, what does it do to a small decoder at initialization, and at which
learning rates does that train?

Command: python launch.py --experiment=atlas
         python launch.py --experiment=atlas --config.atlas.rows=pre,keel

Result: atlas.html, an index with pictures; atlas/NAME.html, a page for each row; atlas.csv, the
profiles in numbers.
"""

from __future__ import annotations

import dataclasses

from experiments.atlas.setting import Atlas
from normjax import configs
from normjax.errors import check_choice
from normjax.norms import NORMS
from normjax.placements import PLACEMENTS
from normjax.reporting.wording import counted
from normjax.runs.experiment import Options, Outcome, working_in


@dataclasses.dataclass(frozen=True)
class AtlasConfig:
    """All that the experiment can be told."""

    atlas: Atlas = Atlas()


PRESETS = {
    "default": ("every row, 8 blocks, 16 features, 3 seeds; trained for 60 steps at 6 rates", {}),
    "tiny": ("every row, 2 blocks, 8 features, 1 seed", {
        "atlas.depth": 2, "atlas.width": 8, "atlas.tokens": 3, "atlas.seeds": 1,
        "atlas.train_depths": (),
    }),
}  # fmt: skip


def get_config(preset: str) -> AtlasConfig:
    """Return the configuration of a preset."""
    return configs.replace(AtlasConfig(), PRESETS[preset][1])


def run(config: AtlasConfig, preset: str, options: Options) -> Outcome | None:
    """Write the pages."""
    del preset
    configs.check(config)
    for name in config.atlas.rows:
        check_choice("config.atlas.rows", name, [*PLACEMENTS, *NORMS])
    asked = config.atlas.rows
    chosen = [[n for n in table if n in asked or not asked] for table in (PLACEMENTS, NORMS)]
    said = f"{counted(len(chosen[0]), 'placement')}, {counted(len(chosen[1]), 'norm')}"
    if options.dry_run:
        print(f"a page for each of {said}: {', '.join(dict.fromkeys(chosen[0] + chosen[1]))}")
        return None
    # Drawing takes a while to import: not something that --help should wait for.
    from experiments.atlas import page

    with working_in(options) as folder:
        written = page.write(folder, chosen[0], chosen[1], config.atlas, options.command)
    return Outcome(f"{said}: {options.workdir / 'atlas'}", written)
