"""What does each part of a decoder contribute? Remove one at a time and measure.

Question: how much does the validation loss of a small decoder rise when attention, MLP, positions,
normalization or the residual path is removed, or the normalization moved behind the addition?

Hypothesis: attention hurts most, since without it a character sees only itself; the residual path
hurts more than the normalization; moving the norm costs little in a model this shallow.

Command: python launch.py                       3.5 minutes on two cores
         python launch.py --preset=standard     the size of a well-known recipe for a CPU; about
                                                40 minutes on two cores, by --dry_run

Result (default): without residual path +1.23 nats, without attention +0.44, without norms +0.35,
without positions +0.30, without MLP +0.16, post-norm not distinguishable. The first part of the
hypothesis is wrong at this size: the residual path hurts more than attention.
"""

from __future__ import annotations

from normjax import configs
from normjax.errors import UserError
from normjax.placements import PLACEMENTS
from normjax.reporting import palette
from normjax.runs import runner
from normjax.runs.experiment import Options, Outcome
from normjax.runs.grid import Arm, ExperimentConfig, Question

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

STANDARD = {
    "model.depth": 4, "model.width": 128, "model.heads": 4, "data.window": 64,
    "train.batch_size": 12, "train.steps": 2000, "train.warmup_steps": 100,
    "train.learning_rate": 4e-3, "train.evaluate_every": 250, "train.final_windows": 0,
}  # fmt: skip

PRESETS = {
    "default": ("4 layers, 64 wide, 400 steps: a few minutes on two cores", {
        "model.width": 64, "model.heads": 4, "train.steps": 400, "train.learning_rate": 4e-3,
        "train.batch_size": 16,
    }),
    "standard": ("4 layers, 128 wide, batch 12, 2000 steps: a known recipe's size", STANDARD),
    "smoke": ("2 layers, 16 wide, 20 steps: whether everything runs", {
        "model.depth": 2, "model.width": 16, "model.heads": 2, "data.window": 16,
        "train.steps": 20, "train.warmup_steps": 5, "train.batch_size": 4,
        "train.evaluate_every": 10, "train.evaluation_windows": 8, "train.final_windows": 16,
        "train.chunk_steps": 5, "grid.seeds": 2,
    }),
}  # fmt: skip


def get_config(preset: str) -> ExperimentConfig:
    """Return the configuration of a preset."""
    return configs.replace(ExperimentConfig(), PRESETS[preset][1])


def run(config: ExperimentConfig, preset: str, options: Options) -> Outcome | None:
    """Train what is left of the grid and write the report."""
    question = Question(
        experiment="ablation",
        preset=preset,
        title="What each part of a decoder contributes",
        question=(
            "How much does the validation loss of a small decoder rise when one part is removed:"
            " attention, the MLP, positions, normalization, the residual path; or when the"
            " normalization is moved from before the branch to after the addition?"
        ),
        hypothesis=(
            "Removing attention hurts most. Removing the residual path hurts more than removing the"
            " normalization. In a model this shallow, moving the norm costs little."
        ),
        baseline="full",
        notes=(
            "Parameters differ between variants: a removed part takes its weights along.",
            "All variants share one learning rate, initialization and step count, tuned for none.",
        ),
    )
    if config.grid.depths:
        depths = ",".join(str(depth) for depth in config.grid.depths)
        raise UserError(
            f"config.grid.depths={depths}: this experiment has one depth; use --config.model.depth,"
            " or --experiment=depth"
        )
    return runner.carry_out(question, ARMS, config, options)
