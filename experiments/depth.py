"""Where does the norm have to stand as the decoder gets deeper? Placements over depth.

Question: how does the loss of each placement, and of a decoder without residual path,
change from 2 to 16 blocks, at one learning rate and one number of steps?

Hypothesis: where the residual path is clear of norms (pre, sandwich, branch output), depth helps or
does no harm; post-norm falls behind with depth; without a residual path a deep decoder does not
train.

Command: python launch.py --experiment=depth                    the whole map
         python launch.py --experiment=depth --preset=quick     depth 2 to 8, fewer steps
Cost:    19 and 3 minutes on two cores, by the same commands with --dry_run.
Result:  not run whole yet.
"""

from __future__ import annotations

from normjax import configs
from normjax.decoder_config import SCANNED_FROM
from normjax.errors import UserError
from normjax.placements import PLACEMENTS
from normjax.reporting import palette
from normjax.reporting.wording import counted
from normjax.runs import runner
from normjax.runs.experiment import Options, Outcome
from normjax.runs.grid import Arm, ExperimentConfig, Question, SweepAxis

SHOWN = ("pre", "post", "none", "sandwich", "branch_output", "deepnorm")
NO_RESIDUAL = "no-residual"
"""Pre-norm with a = 0. Any other placement of the table is shown if config.grid.arms names it.
"""

DEPTHS = (2, 4, 8, 16)

SMALL = {
    "model.width": 64,
    "train.steps": 300,
    "train.batch_size": 16,
    "train.learning_rate": 2e-3,
    "train.final_windows": 512,
    "train.evaluation_windows": 128,
}

PRESETS = {
    "default": ("depth 2, 4, 8, 16; 64 wide, 300 steps, 3 seeds", SMALL),
    "quick": (
        "depth 2, 4, 8; 32 wide, 200 steps, 2 seeds",
        SMALL
        | {
            "model.width": 32,
            "model.heads": 2,
            "train.steps": 200,
            "grid.seeds": 2,
            "grid.depths": (2, 4, 8),
        },
    ),
}


def get_config(preset: str) -> ExperimentConfig:
    """Return the configuration of a preset."""
    return configs.replace(ExperimentConfig(), PRESETS[preset][1])


def arms(config: ExperimentConfig) -> list[Arm]:
    """Return one arm per placement and depth."""
    depths = config.grid.depths or DEPTHS
    found = []
    for series in dict.fromkeys((*SHOWN, NO_RESIDUAL, *_asked(config))):
        removed = series == NO_RESIDUAL
        row = PLACEMENTS[SHOWN[0] if removed else series]
        changes = {"model.placement": row.name} | ({"model.residual": False} if removed else {})
        title = f"{row.title}, no residual" if removed else row.title
        what = "only the branch is passed on (a = 0)" if removed else row.summary or row.title
        for depth in sorted(set(depths)):
            blocks = counted(depth, "block")
            scanned = {"model.depth": depth, "model.scan_layers": depth >= SCANNED_FROM}
            found.append(
                Arm(
                    f"{series}-{depth}", f"{title}, {blocks}", f"{blocks}; {what}.",
                    changes | scanned, series, depth,
                    palette.VERMILLION if removed else row.colour,
                )
            )  # fmt: skip
    return found


def _asked(config: ExperimentConfig) -> list[str]:
    """Return the placements of the table that the flag of variants names."""
    names = [name.rsplit("-", 1)[0] for name in config.grid.arms]
    return [name for name in (*config.grid.arms, *names) if name in PLACEMENTS]


def _check_unvaried(config: ExperimentConfig, preset: str) -> None:
    """Refuse a value for what this experiment varies itself: it would be ignored."""
    usual = get_config(preset).model
    for name, way in (
        ("depth", "config.grid.depths=2,4"),
        ("placement", "config.grid.arms=pre,post"),
        ("residual", "config.grid.arms=pre,no-residual"),
        ("scan_layers", ""),
    ):
        value = getattr(config.model, name)
        if value != getattr(usual, name):
            hint = f"; use --{way}" if way else ""
            raise UserError(f"config.model.{name}={value}: this experiment varies it itself{hint}")


def run(config: ExperimentConfig, preset: str, options: Options) -> Outcome | None:
    """Train what is left of the grid and write the report."""
    _check_unvaried(config, preset)
    question = Question(
        experiment="depth",
        preset=preset,
        title="Placement of the norm, over depth",
        question=(
            "How does the loss change with depth for each placement of the norm, and"
            " without a residual path, at one learning rate and one number of steps?"
        ),
        hypothesis=(
            "Where the residual path is clear of norms, depth helps or does no harm. Post-norm"
            " falls behind with depth. Without a residual path a deep decoder does not train."
        ),
        baseline="pre",
        notes=(
            "One learning rate for all: a placement that needs another is not shown at its best.",
            "DeepNorm comes with its own initialization; all others share the GPT-2 rule.",
        ),
        x=SweepAxis("depth", "depth (blocks)", "log2"),
    )
    return runner.carry_out(question, arms(config), config, options)
