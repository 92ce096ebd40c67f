"""How does each placement pass a small change on, block by block and end to end?

Question: what are the singular values of the blocks' Jacobians, and of the whole stack, for every
placement of the norm: at initialization, over depth, and as training goes on; what happens to a
change along the stream (radial) and to one across it (tangential); and does random-matrix theory
say it beforehand?

Hypothesis: at initialization theory gives every spectrum to within sampling error; the stack of a
pre-norm decoder stays near the identity, that of a post-norm decoder forgets the radial direction
in every block; training spreads all spectra.

Command: python launch.py --experiment=spectrum                      trains all placements first
         python launch.py --experiment=spectrum --preset=quick       four placements, smaller
         python launch.py --experiment=spectrum --preset=init        initialization only
         python launch.py --experiment=spectrum --config.spectrum.runs=runs/ablation-default
Cost:    quick 63 processor seconds, 1 minute. default: training 2 to 4 minutes, the survey 405
         processor seconds; 12 minutes for the survey when measured, on a machine that others used.

Result (default): theory gives the stack's spectrum at initialization to within sampling error for
pre, post, none, layernorm_scaling and layerscale, and (measured again, --preset=init, 4 blocks, one
seed) for sandwich and branch_output, 0.03 and 0.02 in the distribution with 0.04 by chance, since
it counts tokens that repeat and measures the branches that a norm follows. It has no law for
deepnorm (its attention is not near uniform). From 2 to 16 blocks the largest singular value grows
1.07 times for pre, 1.00 for post and none, 1.98 for sandwich. Post and deepnorm remove the radial
direction in every block. Training widens the spectrum of all but sandwich and branch_output: pre by
1.46 powers of ten, none by 2.84.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from experiments.spectrum import page as its_page
from experiments.spectrum.survey import Condition, survey
from normjax import configs, decoder_config
from normjax.configs import field, part
from normjax.data import corpora
from normjax.data.corpora import MAX_WINDOW, AnyCorpus, DataConfig
from normjax.decoder import Decoder
from normjax.decoder_config import MAX_DEPTH, DecoderConfig
from normjax.errors import UserError
from normjax.jacobians.blocks import MAX_DENSE, Parts
from normjax.placements import COMMON, PLACEMENTS
from normjax.reporting.wording import counted
from normjax.runs import estimates, machine, preflight, provenance, runner
from normjax.runs.experiment import Options, Outcome, working_in
from normjax.runs.grid import MAX_SEEDS, Arm, ExperimentConfig, GridConfig, Question
from normjax.training import train
from normjax.training.train import Hyper, TrainConfig
from normjax.training.trained import TrainedRun, run_folders


@dataclasses.dataclass(frozen=True)
class SpectrumConfig:
    """What is measured."""

    placements: tuple[str, ...] = field(COMMON, "of the table", choices=PLACEMENTS, fewest=1)
    depths: tuple[int, ...] = field(
        (2, 4, 8, 16), "depths at which stacks are initialized", least=1, most=MAX_DEPTH
    )
    seeds: int = field(2, "initializations, and runs, of each placement", least=1, most=MAX_SEEDS)
    sequences: int = field(8, "sequences of the validation text to measure at", least=1, most=2**16)
    tokens: int = field(
        32, "tokens of each; the first and the last of them are looked at", least=2, most=MAX_WINDOW
    )
    sequence_tokens: int = field(
        8, "tokens of the whole-sequence Jacobian; 0: none", least=0, most=MAX_DENSE
    )
    runs: tuple[str, ...] = field((), "run folders or workdirs to measure; empty: train here")


@dataclasses.dataclass(frozen=True)
class SpectrumExperiment:
    """All that the experiment can be told."""

    model: DecoderConfig = DecoderConfig(width=64)
    data: DataConfig = DataConfig(window=32)
    train: TrainConfig = part(
        TrainConfig(
            steps=300, learning_rate=2e-3, batch_size=16, checkpoint_every=100, keep_checkpoints=0,
            evaluation_windows=128, final_windows=256,
        ), steps={"least": 0},
    )  # fmt: skip
    spectrum: SpectrumConfig = SpectrumConfig()


QUICK = {
    "model.width": 32, "model.heads": 2, "train.steps": 100, "train.checkpoint_every": 50,
    "train.batch_size": 8, "spectrum.placements": ("pre", "post", "none", "sandwich"),
    "spectrum.depths": (2, 4, 8), "spectrum.sequences": 4, "spectrum.tokens": 16,
    "data.window": 16,
}  # fmt: skip

PRESETS = {
    "default": ("all placements, 4 blocks, 64 wide, trained 300 steps; depth 2 to 16", {}),
    "quick": ("four placements, 32 wide, trained 100 steps; depth 2 to 8", QUICK),
    "init": ("all placements at initialization only; depth 2 to 32", {
        "train.steps": 0, "spectrum.depths": (2, 4, 8, 16, 32),
    }),
}  # fmt: skip


def get_config(preset: str) -> SpectrumExperiment:
    """Return the configuration of a preset."""
    return configs.replace(SpectrumExperiment(), PRESETS[preset][1])


def run(config: SpectrumExperiment, preset: str, options: Options) -> Outcome | None:
    """Train what is to be measured, measure it, draw the page."""
    check(config)
    names = config.spectrum.placements
    folders = [folder for path in config.spectrum.runs for folder in run_folders(path)]
    corpus = corpora.open_corpus(config.data)
    if options.dry_run:
        print(_plan(config, names, folders))
        if corpus.files:
            print(f"corpus {corpus.name}: {corpus.files.words}")
        return None
    if not folders and config.train.steps:
        _train(config, names, preset, options)
        folders = run_folders(options.workdir / "training")
        # In the order of the table, not of the alphabet.
        folders.sort(key=lambda folder: names.index(folder.name.rsplit("-", 2)[0]))
    preflight.check_page()
    with working_in(options) as workdir:
        record = {
            "command": options.command, "experiment": "spectrum", "preset": preset,
            "config": configs.to_dict(config), "environment": provenance.environment(),
            "first_seed": 0, "positions": [0, config.spectrum.tokens - 1],
            "tokens": config.spectrum.tokens, "sequences": config.spectrum.sequences,
            "corpus": {
                "name": corpus.name, "fingerprint": corpus.fingerprint,
                **({"files": corpus.files.record()} if corpus.files else {}),
            },
        }  # fmt: skip
        survey(
            [*_of_runs(config, folders), *_over_depth(config, names, corpus)],
            (0, config.spectrum.tokens - 1), config.spectrum.sequence_tokens, workdir, record,
            lambda line: print(line, flush=True),
        )  # fmt: skip
        page, text = its_page.write(workdir)
    return Outcome(text, page)


def check(config: SpectrumExperiment) -> None:
    """Raise :class:`UserError` for what cannot be measured, naming field, value and fix."""
    configs.check(config)
    s = config.spectrum
    if s.tokens > config.data.window:
        raise UserError(
            f"config.spectrum.tokens={s.tokens}: must be at most data.window="
            f"{config.data.window}; pass --config.data.window={s.tokens}"
        )
    if s.sequence_tokens > s.tokens or s.sequence_tokens * config.model.width > MAX_DENSE:
        most = min(s.tokens, MAX_DENSE // config.model.width)
        raise UserError(
            f"config.spectrum.sequence_tokens={s.sequence_tokens}: must be at most {most} here;"
            f" pass --config.spectrum.sequence_tokens={most}"
        )
    if config.train.steps:
        train.check(config.train)
    decoder_config.check(config.model)
    # A (D, D) matrix of 8-byte numbers for every token, of one block at a time.
    needed, there = 8 * s.sequences * s.tokens * config.model.width**2, machine.memory_bytes()
    if not s.runs and needed > there:
        raise UserError(
            f"config.model.width={config.model.width}: the Jacobians of {s.sequences} sequences of"
            f" {s.tokens} tokens take {estimates.gigabytes(needed)} of memory, and there are"
            f" {estimates.gigabytes(there)}; take a smaller width, spectrum.sequences or"
            " spectrum.tokens"
        )


def _plan(config: SpectrumExperiment, names: tuple[str, ...], folders: list[Path]) -> str:
    s = config.spectrum
    lines = [f"run folder {folder}" for folder in folders]
    if not folders and config.train.steps:
        lines.append(
            f"train {counted(len(names), 'placement')} x {counted(s.seeds, 'seed')},"
            f" {counted(config.model.depth, 'block')}, {counted(config.train.steps, 'step')},"
            " then measure every checkpoint"
        )
    depths = ", ".join(str(d) for d in s.depths)
    seeds, sequences = counted(s.seeds, "seed"), counted(s.sequences, "sequence")
    lines.append(f"measure at initialization: {', '.join(names)}; depths {depths}; {seeds}")
    lines.append(f"at {sequences} of {s.tokens} tokens, the first and the last token")
    return "\n".join(lines)


def _train(
    config: SpectrumExperiment, names: tuple[str, ...], preset: str, options: Options
) -> None:
    """Train one run per placement and seed in a workdir of its own inside the experiment's."""
    question = Question(
        "spectrum", preset, "Runs for the survey of spectra",
        "How far do the placements get in the training whose checkpoints are measured?",
        "All of them learn; the loss is not what this experiment is about.", names[0],
    )  # fmt: skip
    rows = {name: PLACEMENTS[name] for name in names}
    arms = [
        Arm(name, row.title, row.source, {"model.placement": name}, colour=row.colour)
        for name, row in rows.items()
    ]
    whole = ExperimentConfig(
        config.model, config.data, config.train, GridConfig(seeds=config.spectrum.seeds)
    )
    inner = dataclasses.replace(options, workdir=options.workdir / "training")
    runner.carry_out(question, arms, whole, inner)


def _of_runs(config: SpectrumExperiment, folders: list[Path]) -> Iterator[Condition]:
    """Yield the initialization and every kept checkpoint of the runs."""
    s = config.spectrum
    for folder in folders:
        opened = TrainedRun(folder)
        tokens = opened.windows(s.sequences)[:, : s.tokens]
        if tokens.shape[1] < s.tokens:
            raise UserError(
                f"config.spectrum.tokens={s.tokens}: the window of {folder} has"
                f" {tokens.shape[1]}; pass --config.spectrum.tokens={tokens.shape[1]}"
            )
        for step in opened.steps:
            yield Condition(
                opened.arm, int(opened.hyper.seed), step,
                lambda opened=opened, step=step: opened.parts(step), tokens,
                main=True, run=str(folder),
            )  # fmt: skip


def _over_depth(
    config: SpectrumExperiment, names: tuple[str, ...], corpus: AnyCorpus
) -> Iterator[Condition]:
    """Yield initializations of every placement at every depth."""
    s = config.spectrum
    tokens = corpus.evaluation_set(config.data.window, s.sequences)[0]
    if s.runs:
        return
    for name in names:
        for depth in dict.fromkeys((config.model.depth, *s.depths)):
            for seed in range(s.seeds):
                if config.train.steps and depth == config.model.depth:
                    continue  # step 0 of the runs
                changed = dataclasses.replace(config.model, placement=name, depth=depth)
                yield Condition(
                    name, seed, 0,
                    lambda changed=changed, seed=seed: _initialized(config, changed, corpus, seed),
                    tokens[:, : s.tokens], main=depth == config.model.depth,
                )  # fmt: skip


def _initialized(
    config: SpectrumExperiment, model: DecoderConfig, corpus: AnyCorpus, seed: int
) -> Parts:
    made = Decoder(model, corpus.vocabulary_size, config.data.window)
    hyper = Hyper(np.uint32(seed), *(np.float32(x) for x in (1, 0, config.train.init_scale)))
    state = jax.jit(lambda: train.init_state(made, config.train, hyper))()
    return Parts(made, state.params)
