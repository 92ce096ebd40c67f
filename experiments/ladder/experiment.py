"""All placements against each other, each at its own best rate: what it gains, and what it costs.

Question: over depth, with the initialization that each was published with and at a learning rate of
its own, which placements end below pre-norm and which above; what does each cost in arithmetic,
time and parameters; how far does it forgive a wrong rate; and what does its stack do to a small
change, before and after training?

Rates are chosen on validation text with seeds of their own (:mod:`normjax.runs.tuning`). A
comparison that is decided gets no more seeds: :mod:`experiments.ladder.sequential` has the rule and
its error rate.

Hypothesis: none of the placements is shown to end below pre-norm; a decoder without norms, and
post-norm where it is deep, end above it.

Command: python launch.py --experiment=ladder                   13 placements, two cores
         python launch.py --experiment=ladder --preset=night    all placements, three depths
Cost:    default 11:35 minutes on two cores that others used too, nothing precompiled (884 processor
         seconds). night: not run; --dry_run said 3 hours for the rates and the first look, and the
         second doubles the runs of what is not decided.

Result (default: 4 blocks, 300 steps on the plays, rates from 5e-4 to 6.4e-2; 136 runs, 20 of 156
not needed): none is shown to end below pre-norm (2.449). Above it end, in nats: rezero +0.038,
hybridnorm +0.098, none +0.102, post +0.105, deepnorm +0.202, branch_output +0.403, sandwich +0.462.
Not decided after 12 seeds: layernorm_scaling -0.025 (-0.042 to -0.009 by itself, 0.078 after
correction), hyper_connections, attention_residuals, skipinit, layerscale. The rates chosen go from
0.002 (deepnorm) to 0.032 (skipinit, rezero, branch_output), none at an end of the range. The
hypothesis holds here, of one depth and one short training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp

from experiments.ladder import data as its_data
from experiments.ladder import page as its_page
from experiments.ladder import sequential
from experiments.spectrum.survey import Condition, survey
from normjax import configs
from normjax.configs import field
from normjax.data import corpora
from normjax.data.corpora import DataConfig
from normjax.decoder_config import MAX_DEPTH, SCANNED_FROM, DecoderConfig
from normjax.errors import UserError
from normjax.placements import COMMON, PLACEMENTS
from normjax.reporting import effects, loading
from normjax.reporting.wording import counted
from normjax.runs import files, preflight, runner, tuning
from normjax.runs.experiment import Options, Outcome, check_workdir, working_in
from normjax.runs.grid import MAX_SEEDS, Arm, ExperimentConfig, GridConfig, Question, SweepAxis
from normjax.runs.tuning import TuningConfig
from normjax.training.train import TrainConfig
from normjax.training.trained import TrainedRun


@dataclasses.dataclass(frozen=True)
class LadderConfig:
    """Who is compared, over what, and when there are seeds enough."""

    placements: tuple[str, ...] = field(
        COMMON, "of the table; the first is what the others are compared with", choices=PLACEMENTS,
        fewest=2, distinct=True,
    )  # fmt: skip
    depths: tuple[int, ...] = field(
        (4,), "depths in blocks", least=1, most=MAX_DEPTH, fewest=1, distinct=True
    )
    # Compiling is most of the default's time: looks that add as many seeds share their programs.
    looks: tuple[int, ...] = field(
        (4, 8, 12), "seeds at which comparisons that are decided stop; the last: at most so many",
        least=2, most=MAX_SEEDS, fewest=1, distinct=True,
    )  # fmt: skip
    sequences: int = field(2, "sequences at which stacks are taken apart", least=1, most=2**16)
    tokens: int = field(
        8, "tokens of each; the last of them is looked at", least=1, most=corpora.MAX_WINDOW
    )


@dataclasses.dataclass(frozen=True)
class LadderExperiment:
    """All that the experiment can be told."""

    model: DecoderConfig = DecoderConfig(width=32, heads=2)
    data: DataConfig = DataConfig(window=32)
    train: TrainConfig = TrainConfig(
        steps=300, warmup_steps=30, batch_size=8, evaluate_every=100, evaluation_windows=128,
        final_windows=256, keep_checkpoints=1, patience=10,
    )  # fmt: skip
    tuning: TuningConfig = TuningConfig(
        rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2), rungs=(100,)
    )
    ladder: LadderConfig = LadderConfig()


PRESETS = {
    "default": ("13 placements, 4 blocks, 32 wide, 300 steps, 4 to 12 seeds", {}),
    "night": ("all placements, 2, 4 and 8 blocks, 64 wide, 400 steps, 6 to 12 seeds", {
        "model.width": 64, "model.heads": 4, "data.window": 64, "train.steps": 400,
        "train.warmup_steps": 50, "train.batch_size": 16, "train.evaluate_every": 100,
        "train.final_windows": 512, "tuning.rungs": (100, 200),
        "ladder.placements": tuple(PLACEMENTS), "ladder.depths": (2, 4, 8), "ladder.looks": (6, 12),
    }),
    "smoke": ("2 placements, one block, 4 steps: whether everything runs", {
        "model.width": 8, "data.window": 8, "train.steps": 4, "train.warmup_steps": 1,
        "train.batch_size": 2, "train.evaluate_every": 2, "train.evaluation_windows": 4,
        "train.final_windows": 8, "tuning.rates": (1e-3, 1e-2), "tuning.rungs": (2,),
        "ladder.placements": ("pre", "post"), "ladder.depths": (1,), "ladder.looks": (2, 3),
        "ladder.tokens": 4, "ladder.sequences": 1,
    }),
}  # fmt: skip


def get_config(preset: str) -> LadderExperiment:
    """Return the configuration of a preset."""
    return configs.replace(LadderExperiment(), PRESETS[preset][1])


def arms(config: LadderExperiment) -> list[Arm]:
    """Return one arm per placement and depth."""
    found = []
    for name in config.ladder.placements:
        row = PLACEMENTS[name]
        for depth in sorted(config.ladder.depths):
            blocks = counted(depth, "block")
            changes = {
                "model.placement": name, "model.depth": depth,
                "model.scan_layers": depth >= SCANNED_FROM,
            }  # fmt: skip
            found.append(Arm(
                f"{name}-{depth}", f"{row.title}, {blocks}", f"{blocks}; {row.summary}.", changes,
                name, depth, row.colour,
            ))  # fmt: skip
    return found


def check(config: LadderExperiment) -> None:
    """Raise :class:`UserError` for what cannot be compared, naming field, value and fix."""
    configs.check(config)
    looks, usual = config.ladder.looks, DecoderConfig()
    if list(looks) != sorted(looks):
        shown = ",".join(map(str, sorted(looks)))
        given = ",".join(map(str, looks))
        raise UserError(
            f"config.ladder.looks={given}: must rise; pass --config.ladder.looks={shown}"
        )
    if config.ladder.tokens > config.data.window:
        raise UserError(
            f"config.ladder.tokens={config.ladder.tokens}: must be at most data.window="
            f"{config.data.window}; pass --config.ladder.tokens={config.data.window}"
        )
    for name, way in (
        ("depth", "use --config.ladder.depths"), ("placement", "use --config.ladder.placements"),
        ("init", "each placement has its own"), ("scan_layers", "leave it out"),
    ):  # fmt: skip
        if (value := getattr(config.model, name)) != getattr(usual, name):
            raise UserError(
                f"config.model.{name}={configs.shown(value)}: this experiment sets it; {way}"
            )
    if config.tuning.inits:
        raise UserError(
            f"config.tuning.inits={','.join(config.tuning.inits)}: each placement has its own"
            " initialization here; leave it out"
        )
    tuning.check(config.tuning, _whole(config, 0, looks[0]))


def run(config: LadderExperiment, preset: str, options: Options) -> Outcome | None:
    """Choose rates, climb from look to look, take the stacks apart, write the page."""
    check(config)
    asked, every, looks = _question(config, preset), arms(config), config.ladder.looks
    first = _whole(config, 0, looks[0])
    if options.dry_run:
        inner = dataclasses.replace(options, workdir=its_data.folder_of(options.workdir, looks[0]))
        runner.carry_out(asked, every, first, inner, config.tuning)
        more = (looks[-1] - looks[0]) * len(every)
        print(f"after that at most {more} runs more, of what is not decided by then; then spectra")
        return None
    check_workdir(options.workdir)
    preflight.check_page()
    with working_in(options) as workdir:
        corpus = corpora.open_corpus(config.data)
        tried = []
        if config.tuning.rates:
            tried = tuning.first_cohorts(config.tuning, first, every, corpus.fingerprint)
        record = {
            "command": options.command, "title": asked.title, "question": asked.question,
            "hypothesis": asked.hypothesis, "config": configs.to_dict(config),
            "looks": list(looks), "itemsize": jnp.dtype(config.model.param_dtype).itemsize,
            "tuning_runs": [run.id for cohort in tried for run in cohort.runs],
        }  # fmt: skip
        base = config.ladder.placements[0]
        names = tuple(arm.name for arm in every if arm.series != base)
        reached: list[int] = []

        def decided(left: tuple[str, ...], seeds: int) -> set[str]:
            here = [arm for arm in every if arm.name in left]
            depths = {arm.x for arm in here}
            here = [a for a in every if a in here or (a.series == base and a.x in depths)]
            stage = dataclasses.replace(options, workdir=its_data.folder_of(workdir, seeds))
            own = _whole(config, reached[-1] if reached else 0, seeds)
            if reached:
                runner.carry_out(asked, _tuned(here, workdir, looks[0]), own, stage)
            else:
                runner.carry_out(asked, here, own, stage, config.tuning)
            reached.append(seeds)
            files.write_sealed(workdir / its_data.RECORD, {**record, "reached": reached})
            judged = its_data.read(workdir).at_a_look()
            done = {
                name for name in left if judged[name].kind in (effects.WORSE, effects.BETTER)
            }  # fmt: skip
            print(f"{counted(seeds, 'seed')}: decided {len(done)} of {len(left)}", flush=True)
            return done

        sequential.climb(names, looks, decided)
        print(f"taking the stacks of {counted(len(every), 'variant')} apart", flush=True)
        _take_apart(config, its_data.read(workdir), options, workdir)
        page, text = its_page.write(workdir)
    return Outcome(text, page)


def _whole(config: LadderExperiment, first_seed: int, seeds: int) -> ExperimentConfig:
    """Return the grid of the seeds from one number to another."""
    asked = GridConfig(seeds=seeds - first_seed, first_seed=first_seed)
    return ExperimentConfig(config.model, config.data, config.train, asked)


def _tuned(here: list[Arm], workdir: Path, look: int) -> list[Arm]:
    """Return arms at the rates that were chosen before the first look."""
    plan = loading.load(its_data.folder_of(workdir, look)).plan
    chosen = (plan.get("tuning") or {}).get("chosen", {})
    if not chosen:
        return here
    return tuning.tuned(here, {k: tuning.Choice(v["rate"], ()) for k, v in chosen.items()})


def _question(config: LadderExperiment, preset: str) -> Question:
    base = PLACEMENTS[config.ladder.placements[0]].title
    return Question(
        experiment="ladder", preset=preset, title="All placements against each other",
        question=(
            "With the initialization that each was published with, and at a learning rate of its"
            f" own, which placements end below {base} and which above, and what does each cost?"
        ),
        hypothesis=(
            f"None is shown to end below {base}. A decoder without norms, and post-norm where it is"
            " deep, end above it."
        ),
        baseline=config.ladder.placements[0],
        notes=("Each variant has a rate of its own, chosen on validation text by other seeds.",),
        x=SweepAxis("depth", "depth (blocks)", "log2"),
    )  # fmt: skip


def _take_apart(
    config: LadderExperiment, found: its_data.Ladder, options: Options, workdir: Path
) -> None:
    """Measure the stack of each placement's first seed before and after training."""
    at = (config.ladder.tokens - 1,)
    record = {"command": options.command, "experiment": "ladder", "first_seed": -1}  # no laws
    survey(_conditions(config, found), at, 0, workdir, record, lambda line: None)


def _conditions(config: LadderExperiment, found: its_data.Ladder) -> Iterator[Condition]:
    for run in (run for variant in found.results.variants for run in variant.runs[:1]):
        opened = TrainedRun(found.folders[run.id])
        tokens = opened.windows(config.ladder.sequences)[:, : config.ladder.tokens]
        for step in dict.fromkeys((0, opened.steps[-1])):
            yield Condition(
                run.arm, run.seed, step, lambda opened=opened, step=step: opened.parts(step),
                tokens, main=False, run=str(opened.folder),
            )  # fmt: skip
