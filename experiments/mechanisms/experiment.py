"""Which parts of a decoder decide what it can compute, and which only how reliably it learns it?

Question: on tasks whose least possible loss is known exactly, does a decoder without attention,
MLP, positions, norms or residual path, or with the norm moved, reach the optimum; if not, does it
reach the best that its information allows; and with how many seeds and learning rates?

Hypothesis: attention decides what can be computed at all: without it every task that needs an
earlier token stays at the loss of the current token. Norms and the residual path carry no
information: without them the optimum is missed by some seeds and rates, not by all.

Command: python launch.py --experiment=mechanisms
         python launch.py --experiment=mechanisms --preset=full
         python launch.py --experiment=mechanisms --config.mechanisms.tasks=copy,parity

Cost (default): 662 processor seconds without a cache of compiled programs, so 5.5 minutes if two
cores did nothing else and were never idle; 25 minutes when measured, on a machine that others used.
Cost (full): not run. --dry_run says about 40 minutes on a busy machine for seven of the tasks and
hours for recall.

Result (default; verdicts over 2 seeds x 2 rates). Without attention copy, modular addition and
parity cannot be computed: all runs end within 0.001 nats of the exact loss of the current token.
Where the information is there, runs within 0.02 nats of the optimum: full 18 of 20, without MLP 15,
post-norm 15, without norms 7, without positions 4, without residual path 2. One run without MLP
computes parity and two compute modular addition, so the MLP is not needed for either. Without
positions copying ends at the optimum of the unordered information. The first part of the hypothesis
holds; the second does in part: on the two sums no run without norms, and none without the residual
path, gets there. The full decoder comes within the margin in all runs on three of the five tasks,
in 3 of 4 on copy and modular addition.

These counts are of an evaluation on other sequences than today's, and they took "without positions"
for a question of learning on every task; where nobody has shown that a decoder without positions
reaches the optimum, the page no longer counts it. Rates were chosen for the full decoder.

With settings of the full preset, or fewer steps, the full variant alone came within 0.02 nats of
every optimum, with one seed or two: see :data:`LARGE`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.ablation import ARMS
from experiments.mechanisms import data as mechanisms_data
from experiments.mechanisms import page as its_page
from experiments.mechanisms.verdicts import OwnFloor, Rule
from normjax import configs
from normjax.configs import field
from normjax.data import corpora
from normjax.data.corpora import MAX_WINDOW, DataConfig
from normjax.data.tasks import floors
from normjax.data.tasks.corpus import PREFIX, TaskCorpus
from normjax.data.tasks.table import TASKS
from normjax.decoder import DecoderConfig
from normjax.errors import UserError
from normjax.runs import files, grid, provenance, rescoring, runner
from normjax.runs.experiment import Options, Outcome, check_workdir, working_in
from normjax.runs.grid import ExperimentConfig, GridConfig, Question
from normjax.training.train import TrainConfig


@dataclasses.dataclass(frozen=True)
class MechanismsConfig:
    """Which tasks, and when a loss counts as reached."""

    tasks: tuple[str, ...] = field(
        (), "which tasks; empty: the preset's", choices=TASKS, distinct=True
    )
    window: int = field(0, "tokens of a sequence; 0: each task's own", least=0, most=MAX_WINDOW)
    margin: float = field(0.02, "nats within which a loss counts as reached", above=0, most=1000)
    errors: float = field(
        2.0, "standard errors of the evaluation that it must be inside of that", above=0, most=1000
    )
    alarm: float = field(
        4.0, "standard errors below its floor at which a loss is an alarm", above=0, most=1000
    )


@dataclasses.dataclass(frozen=True)
class MechanismsExperiment:
    """All that the experiment can be told.

    Model, training and rates are those of all tasks but for what :data:`SETTINGS` says of one; a
    field that is not what the preset has wins over that table.
    """

    model: DecoderConfig = DecoderConfig(depth=2, width=32, heads=2)
    train: TrainConfig = TrainConfig(
        steps=400, batch_size=32, warmup_steps=30, final_fraction=0.02, weight_decay=0.0,
        evaluate_every=50, evaluation_windows=512, final_windows=0, keep_checkpoints=1,
    )  # fmt: skip
    grid: GridConfig = GridConfig(seeds=2, learning_rates=(4e-3, 8e-3))
    mechanisms: MechanismsConfig = MechanismsConfig()


SMALL: dict[str, dict[str, Any]] = {
    "markov1": {"mechanisms.window": 16, "train.steps": 150},
    "copy": {"mechanisms.window": 24, "train.steps": 450, "grid.learning_rates": (2e-3, 4e-3)},
    "clock": {"mechanisms.window": 24, "train.steps": 150, "model.positions": "learned"},
    "modular_addition": {"mechanisms.window": 11, "train.steps": 400},
    "parity": {"mechanisms.window": 11, "model.width": 48, "grid.learning_rates": (1e-3, 2e-3)},
}
# Behind each row: how far the full variant ended above the exact optimum when it was tried alone.
LARGE: dict[str, dict[str, Any]] = {
    "markov1": {"mechanisms.window": 16, "train.steps": 300},  # -0.002, 2 rates, 150 steps
    "markov2": {
        "mechanisms.window": 48, "train.batch_size": 16, "train.steps": 600,
        "grid.learning_rates": (2e-3, 4e-3, 6e-3),
    },  # 0.014, 2 rates, 400 steps
    "in_context_chain": {
        "mechanisms.window": 24, "train.steps": 800, "grid.learning_rates": (2e-3, 3e-3, 4e-3),
    },  # 0.014 at 3e-3, 0.022 at 1e-2, 600 steps
    "recall": {
        "mechanisms.window": 24, "train.batch_size": 64, "train.steps": 4000, "model.width": 64,
        "model.heads": 4, "model.positions": "learned",
        "grid.learning_rates": (5e-4, 7e-4, 1e-3),
    },  # 0.006 at 7e-4 (0.021 in 3000 steps); with rotary positions 0.53, 2500 steps
    "copy": {
        "mechanisms.window": 24, "train.steps": 600, "grid.learning_rates": (2e-3, 3e-3, 4e-3),
    },  # -0.001 and 0.001 at 3e-3, 2 seeds, 450 steps
    "clock": {
        "mechanisms.window": 24, "train.steps": 300, "model.positions": "learned",
    },  # -0.001, 2 rates, 150 steps
    "modular_addition": {"mechanisms.window": 11, "train.steps": 600},  # 0.003 at 4e-3, 400 steps
    "parity": {
        "mechanisms.window": 11, "train.steps": 600, "model.width": 48,
        "grid.learning_rates": (5e-4, 1e-3, 2e-3),
    },  # 0.000 to 0.002, 2 seeds, 2 rates
}  # fmt: skip
SMOKE: dict[str, dict[str, Any]] = {
    "markov1": {"mechanisms.window": 6}, "copy": {"mechanisms.window": 6},
}  # fmt: skip
SETTINGS = {"default": SMALL, "full": LARGE, "smoke": SMOKE}
"""For each preset its tasks, in order, and what a task needs that differs from the preset."""

PRESETS = {
    "default": ("five tasks, 2 blocks, 32 wide, 2 seeds, 2 rates", {}),
    "full": ("all tasks, 3 seeds, 3 rates: hours on two cores", {
        "grid.seeds": 3, "grid.learning_rates": (2e-3, 4e-3, 8e-3),
    }),
    "smoke": ("two tasks, two variants, 5 steps: whether everything runs", {
        "model.depth": 1, "model.width": 8, "train.steps": 5, "train.warmup_steps": 1,
        "train.batch_size": 4, "train.evaluate_every": 5,
        "train.evaluation_windows": 8, "train.final_windows": 64,
        "grid.seeds": 1, "grid.arms": ("full", "no-attention"),
    }),
}  # fmt: skip

_REMOVED = {"attention": "none", "mlp": "none", "positions": "none", "norm": "identity"}
_LEARNED = (
    "It has a learned vector for each position; the bound is that of full information, and what is"
    " measured is learning."
)
_SHALLOW = "With one block only the bound is claimed, not that it can be reached. "


def get_config(preset: str) -> MechanismsExperiment:
    """Return the configuration of a preset."""
    return configs.replace(MechanismsExperiment(), PRESETS[preset][1])


def run(config: MechanismsExperiment, preset: str, options: Options) -> Outcome | None:
    """Train what is left of every task's grid, evaluate, judge, draw the page."""
    configs.check(config)
    plans = {name: of_task(config, preset, name) for name in tasks_of(config, preset)}
    sources = check(config, plans)
    if options.dry_run:
        for name, plan in plans.items():
            print(f"task {name}: {plan.train.steps} steps, window {plan.data.window}")
            runner.carry_out(_question(name, preset), ARMS, plan, options)
        return None
    check_workdir(options.workdir)
    with working_in(options) as workdir:
        rule = Rule(config.mechanisms.margin, config.mechanisms.errors, config.mechanisms.alarm)
        record = mechanisms_data.plan_record(
            {name: floors_of(plan, sources[name]) for name, plan in plans.items()}, rule,
            command=options.command, preset=preset, config=configs.to_dict(config),
            settings={name: configs.to_dict(plan) for name, plan in plans.items()},
            environment=provenance.environment(),
        )  # fmt: skip
        files.write_sealed(workdir / "mechanisms.json", record)
        for name, plan in plans.items():
            inner = dataclasses.replace(options, workdir=workdir / name)
            print(f"task {name}", flush=True)
            runner.carry_out(_question(name, preset), ARMS, plan, inner)
            rescoring.rescore(inner.workdir, sources[name], plan.train.final_windows)
        page, text, sound = its_page.write(workdir)
    return Outcome(text, page, 0 if sound else 1)


def tasks_of(config: MechanismsExperiment, preset: str) -> tuple[str, ...]:
    """Return the names of the tasks, in the order of the preset."""
    return config.mechanisms.tasks or tuple(SETTINGS[preset])


def of_task(config: MechanismsExperiment, preset: str, name: str) -> ExperimentConfig:
    """Return the configuration of one task: what the table says, unless a flag says otherwise.

    A task that is not among the preset's has the settings of the full preset.
    """
    base = get_config(preset)
    told = {leaf.path: leaf.value for leaf in configs.leaves(config)}
    usual = {leaf.path: leaf.value for leaf in configs.leaves(base)}
    own = SETTINGS[preset].get(name, LARGE.get(name, {}))
    own = {path: value for path, value in own.items() if told[path] == usual[path]}
    changed = configs.replace(config, own)
    window = changed.mechanisms.window or 32
    data = DataConfig(corpus=PREFIX + name, window=window)
    return ExperimentConfig(changed.model, data, changed.train, changed.grid)


def check(
    config: MechanismsExperiment, plans: dict[str, ExperimentConfig]
) -> dict[str, TaskCorpus]:
    """Find out what cannot be run before anything is; return the tasks as corpora.

    Raises:
      UserError: naming the field, its value, what is allowed and the fix.
    """
    if config.grid.depths:
        raise UserError(
            f"config.grid.depths={','.join(str(d) for d in config.grid.depths)}: this experiment"
            " has one depth; use --config.model.depth"
        )
    for name, value in _REMOVED.items():
        if getattr(config.model, name) == value:
            raise UserError(
                f"config.model.{name}={value}: this experiment removes the parts itself; pass"
                f" --config.model.{name}={getattr(DecoderConfig(), name)}"
            )
    if not config.model.residual:
        raise UserError(
            "config.model.residual=false: this experiment removes the parts itself; pass"
            " --config.model.residual"
        )
    if config.train.final_windows == 1:
        raise UserError(
            "config.train.final_windows=1: a standard error needs 2 sequences or more; pass"
            " --config.train.final_windows=0 for all"
        )
    sources = {}
    for name, plan in plans.items():
        grid.check(plan, grid.select(ARMS, plan.grid.arms), 1)
        try:
            source = corpora.open_corpus(plan.data)
        except UserError as error:  # the window has another name here
            text = str(error).replace("data.window", "mechanisms.window")
            raise UserError(text) from None
        assert isinstance(source, TaskCorpus)
        sources[name] = source
    return sources


def floors_of(plan: ExperimentConfig, source: TaskCorpus) -> dict[str, OwnFloor]:
    """Return the floor of every variant for a task."""
    found = {}
    for arm in grid.select(ARMS, plan.grid.arms):
        kind = decoder_of(arm.name, plan.model)
        loss, entry = floors.floor(source.task_name, source.task, kind)
        reached, reason = entry.reached, entry.reason
        if plan.model.positions == "learned" and kind in ("full", "no-mlp"):
            reached, reason = False, _LEARNED  # the table speaks of rotary positions
        if plan.model.depth < 2 and kind in ("full", "no-mlp"):
            reached, reason = False, _SHALLOW + reason
        found[arm.name] = OwnFloor(loss, entry.information, reached, reason)
    return found


def decoder_of(variant: str, model: DecoderConfig) -> str:
    """Return what the table of floors calls a variant of a model.

    >>> decoder_of("no-attention", DecoderConfig(positions="learned"))
    'no-attention-learned-positions'
    """
    if variant == "no-attention" and model.positions == "learned":
        return "no-attention-learned-positions"
    if variant == "no-positions" and model.depth == 1:
        return "no-positions-one-block"
    return variant


def _question(name: str, preset: str) -> Question:
    row = TASKS[name]
    return Question(
        experiment="mechanisms", preset=preset,
        title=f"Which parts of a decoder does it take: {row.title}",
        question=f"{row.description} Which parts does a decoder need to reach the optimum?",
        hypothesis="What a variant's information allows is reached by some run of it.",
        baseline="full",
        notes=(
            "Parameters differ between variants: a removed part takes its weights along.",
            "This page is one task's part of the experiment; mechanisms.html, one folder up, has"
            " the verdicts.",
        ),
    )  # fmt: skip
