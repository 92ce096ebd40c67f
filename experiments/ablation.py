"""What does each part of a decoder contribute? Remove one at a time and measure.

Question: how much does the loss of a small decoder rise when attention, MLP, positions, the norms
of the branches, the final norm, all norms or the residual path is removed, or the normalization
moved behind the addition? And is that so with another initialization too?

Each variant trains at a rate of its own, chosen on validation text with seeds of their own; losses
are of test text that nothing was chosen by.

Hypothesis: attention hurts most, since without it a character sees only itself; the residual path
hurts more than the normalization; moving the norm costs little in a model this shallow.

Command: python launch.py                       two initializations, four rates
         python launch.py --preset=quick        one initialization, fewer seeds and steps
         python launch.py --preset=standard     the size of a well-known recipe for a CPU

Result:  in README.md, as printed by the first command.
"""

from __future__ import annotations

import dataclasses

from normjax import configs
from normjax.errors import UserError
from normjax.placements import PLACEMENTS
from normjax.reporting import palette
from normjax.runs import runner, tuning
from normjax.runs.experiment import Options, Outcome
from normjax.runs.grid import Arm, ExperimentConfig, Question
from normjax.runs.tuning import TuningConfig

ARMS = (
    Arm("full", "full model", "Everything in place, as configured.", {}),
    Arm(
        "no-attention", "minus attention",
        "Attention is removed; a token sees only itself, through the MLPs.",
        {"model.attention": "none"}, colour=palette.BLUE,
    ),
    Arm(
        "no-mlp", "minus MLP",
        "The MLPs are removed; attention and a linear read-out remain.", {"model.mlp": "none"},
        colour=palette.GREEN,
    ),
    Arm(
        "no-positions", "minus positions",
        "Attention gets no positions; only the causal mask tells it anything of order.",
        {"model.positions": "none"}, colour=palette.PURPLE,
    ),
    Arm(
        "no-norm", "minus normalization",
        "Every norm is removed, the final one too; the residual path remains.",
        {"model.norm": "identity"}, colour=PLACEMENTS["none"].colour,
    ),
    Arm(
        "no-residual", "minus residual",
        "The residual path is removed (a = 0); each branch passes on only what it computes.",
        {"model.residual": False}, colour=palette.VERMILLION,
    ),
    Arm(
        "post-norm", "post-norm",
        "The norm stands behind the addition, on the residual path itself.",
        {"model.placement": "post"}, colour=PLACEMENTS["post"].colour,
    ),
)  # fmt: skip

NORMS_APART = (
    Arm(
        "no-branch-norm", "minus branch norms",
        "The branches read the stream as it is; the final norm remains.",
        {"model.placement": "none", "model.final_norm": "on"}, colour=palette.OLIVE,
    ),
    Arm(
        "no-final-norm", "minus final norm",
        "The output layer reads the stream as it is; the branches keep their norms.",
        {"model.final_norm": "off"}, colour=palette.WINE,
    ),
)  # fmt: skip
"""With no-norm and full a two by two: branch norms and final norm, each there or not."""

INITS = ("gpt2", "fan_in_scaled")
RATES = (1e-3, 4e-3, 8e-3, 1.6e-2)

STANDARD = {
    "model.depth": 4, "model.width": 128, "model.heads": 4, "data.window": 64,
    "train.batch_size": 12, "train.steps": 2000, "train.warmup_steps": 100,
    "train.learning_rate": 4e-3, "train.evaluate_every": 250, "train.final_windows": 0,
    "tuning.inits": INITS, "tuning.rates": RATES, "tuning.rungs": (250, 500),
}  # fmt: skip

SMALL = {
    "model.width": 64, "model.heads": 4, "train.steps": 250, "train.learning_rate": 4e-3,
    "train.batch_size": 12, "train.evaluation_windows": 128, "train.final_windows": 512,
    "grid.seeds": 4, "tuning.inits": INITS, "tuning.rates": RATES,
}  # fmt: skip

PRESETS = {
    "default": ("4 layers, 64 wide, 250 steps, 2 initializations, 4 rates, 4 seeds", SMALL),
    "quick": ("32 wide, 200 steps, one initialization, 3 rates, 2 seeds", SMALL | {
        "model.width": 32, "model.heads": 2, "train.steps": 200, "train.batch_size": 8,
        "grid.seeds": 2, "train.evaluate_every": 50, "tuning.inits": (),
        "tuning.rates": (1e-3, 4e-3, 1.6e-2), "tuning.rungs": (50,),
    }),
    "standard": ("4 layers, 128 wide, batch 12, 2000 steps: a known recipe's size", STANDARD),
    "smoke": ("2 layers, 16 wide, 20 steps: whether everything runs", {
        "model.depth": 2, "model.width": 16, "model.heads": 2, "data.window": 16,
        "train.steps": 20, "train.warmup_steps": 5, "train.batch_size": 4,
        "train.evaluate_every": 10, "train.evaluation_windows": 8, "train.final_windows": 16,
        "train.chunk_steps": 5, "grid.seeds": 2,
    }),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class AblationConfig(ExperimentConfig):
    """All that the experiment can be told."""

    tuning: TuningConfig = TuningConfig()


def get_config(preset: str) -> AblationConfig:
    """Return the configuration of a preset."""
    return configs.replace(AblationConfig(), PRESETS[preset][1])


def run(config: AblationConfig, preset: str, options: Options) -> Outcome | None:
    """Train what is left of the grid and write the report."""
    question = Question(
        experiment="ablation",
        preset=preset,
        title="What each part of a decoder contributes",
        question=(
            "How much does the loss of a small decoder rise when one part is removed: attention,"
            " the MLP, positions, normalization (of the branches, the final one, all), the residual"
            " path; or when the normalization is moved from before the branch to after the"
            " addition? And does the answer depend on the initialization?"
        ),
        hypothesis=(
            "Removing attention hurts most. Removing the residual path hurts more than removing the"
            " normalization. In a model this shallow, moving the norm costs little."
        ),
        baseline="full",
        notes=("Parameters differ between variants: a removed part takes its weights along.",),
    )
    if config.grid.depths:
        depths = ",".join(str(depth) for depth in config.grid.depths)
        raise UserError(
            f"config.grid.depths={depths}: this experiment has one depth; use --config.model.depth,"
            " or --experiment=depth"
        )
    tuning.check(config.tuning, config)
    arms = tuning.with_inits((*ARMS, *NORMS_APART), config.tuning)
    return runner.carry_out(question, arms, config, options, config.tuning)
