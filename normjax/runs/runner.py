"""Carry out a grid in a workdir: check it, plan it, train what is left, report."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from normjax import configs, plugins
from normjax.data import corpora
from normjax.data.corpora import AnyCorpus
from normjax.decoder import Decoder
from normjax.diagnostics import autopsy_record
from normjax.diagnostics.autopsy import autopsy
from normjax.errors import UserError
from normjax.predictions import given, record
from normjax.predictions.prediction import SERIES, Candidate
from normjax.reporting import report
from normjax.runs import edge, estimates, files, grid, preflight, provenance
from normjax.runs import tuning as tuning_stage
from normjax.runs.cohort_run import CohortRun
from normjax.runs.experiment import (
    Interrupted,
    Options,
    Outcome,
    StopRequest,
    check_workdir,
    stop_on_signals,
    working_in,
)
from normjax.runs.grid import Arm, CohortPlan, ExperimentConfig, GridConfig, Question
from normjax.runs.progress import Progress, TimeLeft
from normjax.runs.run_folder import RunFolder, run_folder
from normjax.runs.tuning import TuningConfig

MOST_REPLAYED = 2000
"""Diverged runs that take more steps to replay are left to a call of one's own."""


def carry_out(
    question: Question, arms: Sequence[Arm], config: ExperimentConfig, options: Options,
    tuning: TuningConfig | None = None,
) -> Outcome | None:  # fmt: skip
    """Run what is left of a grid and write its report; return its headline and its page.

    Everything that can be wrong with the request is found before anything is written. With
    ``tuning`` every arm is trained at a rate of its own, which is chosen first.

    Raises:
      UserError: the request cannot be carried out.
      LockedError: another process works in the workdir.
      Interrupted: a signal asked to stop; all is saved.
      Ended: a signal came before there was anything to save.
    """
    every, arms = arms, grid.select(arms, config.grid.arms)
    devices = jax.local_devices()
    grid.check(config, arms, len(devices))
    check_workdir(options.workdir)
    grid.check_format(options.workdir)
    corpus = corpora.open_corpus(config.data)
    seal = record.seal_of(options.workdir)
    if seal is not None or options.predict:
        config = _drawn(config, seal)
    cohorts = grid.plan(config, arms, corpus.fingerprint)
    asked = grid.identity(question, config, corpus.fingerprint)
    prediction = given.prepare(
        options.predict, _candidates(every, arms), options.workdir, asked, options.dry_run
    )
    estimates.check(cohorts, corpus, devices)
    first = []
    if tuning is not None and tuning.rates:
        first = tuning_stage.first_cohorts(tuning, config, arms, corpus.fingerprint)
    preflight.check_room(options.workdir, [*first, *cohorts], corpus.vocabulary_size)
    if options.dry_run:
        share = tuning_stage.share(tuning, config.train.steps) if tuning and first else 0.0
        print(estimates.describe(cohorts, corpus, devices, first, share))
        if options.predict and seal is None:
            print("seeds: drawn from the prediction when it is stored, and the names with them")
        return None
    try:
        with working_in(options):
            preflight.check(options.workdir)
            argument = f"--predict={options.predict}"
            planned = record.Planned(tuple(arm.name for arm in arms), config.grid.seeds)
            stored = record.settle(options.workdir, argument, prediction, asked, planned)
            more = {"identity": asked, **({"prediction": stored} if stored else {})}
            if stored is not None and seal is None:
                config = _drawn(config, stored["sha256"])
                cohorts = grid.plan(config, arms, corpus.fingerprint)

            def write_plan() -> None:
                plan = _record(question, arms, config, corpus, cohorts, options.command)
                files.write_sealed(options.workdir / "grid.json", plan | more)

            if not first:
                write_plan()
            elif stored is not None:
                # The prediction counts from here on, before the first step of any run.
                files.write_sealed(options.workdir / "grid.json", {"format": grid.FORMAT} | more)
            with stop_on_signals() as stop:
                names = [cohort.name for cohort in cohorts]
                with Progress(names, options.live) as progress:
                    if corpus.files and corpus.files.left_out:
                        progress.say(f"corpus {corpus.name}: {corpus.files.words}")
                    if tuning is not None and first:
                        chosen = _tune(tuning, first, corpus, options, progress, stop)
                        arms = tuning_stage.tuned(arms, chosen)
                        cohorts = grid.plan(config, arms, corpus.fingerprint)
                        more["tuning"] = tuning_stage.record(
                            tuning, chosen, first, options.workdir / tuning_stage.FOLDER
                        )
                        write_plan()
                    _train_all(cohorts, corpus, options, progress, stop)
                    _autopsies(cohorts, options, progress, stop)
                page = report.write(options.workdir)
        return Outcome(report.headline(options.workdir), page)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not edge.is_memory(error):
            raise
        raise UserError(
            f"config.train.batch_size={config.train.batch_size}: not enough memory; take a smaller"
            " batch_size, model or train.chunk_steps, or --config.model.remat"
        ) from None


def _drawn(config: ExperimentConfig, seal: str | None) -> ExperimentConfig:
    """Return a configuration with the seeds that are drawn from a prediction, once it is stored.

    Raises:
      UserError: the seeds are chosen, and then they need not be unknown.
    """
    chosen = config.grid.first_seed
    if chosen != GridConfig().first_seed:
        raise UserError(
            f"config.grid.first_seed={chosen}: a prediction is scored by seeds that are drawn from"
            " it, so that nobody knows their numbers; pass"
            f" --config.grid.first_seed={GridConfig().first_seed}, or leave out --predict and take"
            " another --workdir"
        )
    if seal is None:
        return config
    return configs.replace(config, {"grid.first_seed": record.first_seed(seal)})


def _candidates(every: Sequence[Arm], planned: Sequence[Arm]) -> list[Candidate]:
    """Return what a prediction may name: variants, and the series of several of them."""
    names = {arm.name for arm in planned}
    found = [
        Candidate(arm.name, arm.title, arm.description, planned=arm.name in names) for arm in every
    ]
    running = {arm.series for arm in planned}
    taken = {arm.name for arm in every}
    lines = dict.fromkeys(arm.series for arm in every if arm.series not in ("", *taken))
    return found + [Candidate(name, subject=SERIES, planned=name in running) for name in lines]


def _record(
    question: Question, arms: Sequence[Arm], config: ExperimentConfig, corpus: AnyCorpus,
    cohorts: Sequence[CohortPlan], command: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the plan as grid.json holds it: the report is made from this and the run folders."""
    models = {}
    for arm in arms:
        changed = arm.configured(config)
        models[arm.name] = Decoder(changed.model, corpus.vocabulary_size, changed.data.window)
    final = config.train.final_windows
    windows, weights = corpus.evaluation_set(config.data.window, final, "test")
    between, _ = corpus.evaluation_set(config.data.window, config.train.evaluation_windows)
    references = corpus.references(config.data.window, final)
    task = corpus.task_record()
    series = {arm.series or arm.name for arm in arms}
    baseline = (
        question.baseline if question.baseline in series else (arms[0].series or arms[0].name)
    )
    return {
        "format": grid.FORMAT,
        "experiment": question.experiment, "preset": question.preset, "command": command,
        "title": question.title, "question": question.question,
        "hypothesis": question.hypothesis, "notes": list(question.notes), "baseline": baseline,
        "x": dataclasses.asdict(question.x) if question.x else None,
        "config": configs.to_dict(config), "rows": config.model.record(), **plugins.entry(),
        "corpus": corpus.record() | {f"{name}_loss": loss for name, loss in references.items()},
        **({"task": task} if task else {}),
        "evaluation": {
            "windows": len(windows), "tokens": int(weights.sum()),
            "description": corpus.evaluation_words(final, "test")
            + f"; every {config.train.evaluate_every} steps, and to choose by, on {len(between)}"
            f" {corpus.evaluation_words(config.train.evaluation_windows, 'validation')}",
        },
        "arms": [
            {
                "name": arm.name, "series": arm.series or arm.name, "x": arm.x,
                "title": arm.title, "description": arm.description,
                "changes": dict(arm.changes), "setting": dict(arm.setting),
                "condition": arm.condition, "colour": arm.colour,
                "rows": arm.configured(config).model.record(),
                "parameters": models[arm.name].parameter_count(),
                "flops_per_token": models[arm.name].flops_per_token(),
            }
            for arm in arms
        ],
        "runs": [run.record() for cohort in cohorts for run in cohort.runs],
    }  # fmt: skip


def _train_all(
    cohorts: Sequence[CohortPlan], corpus: AnyCorpus, options: Options, progress: Progress,
    stop: StopRequest,
) -> None:  # fmt: skip
    work = [estimates.training_flops(cohort, corpus.vocabulary_size) for cohort in cohorts]
    left = TimeLeft(sum(work))
    environment = provenance.environment()
    for cohort, flops in zip(cohorts, work, strict=True):
        trainer = CohortRun(cohort, corpus, options.workdir, progress, left, flops, environment)
        finished = not stop and trainer.carry_on(stop)
        if not finished:
            raise Interrupted(f"stopped by {stop.signal}; go on with: {options.command}")


def _tune(
    tuning: TuningConfig, cohorts: Sequence[CohortPlan], corpus: AnyCorpus, options: Options,
    progress: Progress, stop: StopRequest,
) -> dict[str, tuning_stage.Choice]:  # fmt: skip
    """Return the rate of every arm, after training what is left of the runs that decide it."""
    workdir = options.workdir / tuning_stage.FOLDER
    environment = provenance.environment()
    vocabulary, steps = corpus.vocabulary_size, cohorts[0].config.train.steps
    left = TimeLeft(
        tuning_stage.share(tuning, steps)
        * sum(estimates.training_flops(cohort, vocabulary) for cohort in cohorts)
    )

    def train_to(cohort: CohortPlan, step: int) -> None:
        flops = estimates.training_flops(cohort, vocabulary)
        trainer = CohortRun(cohort, corpus, workdir, progress, left, flops, environment)
        if stop or not trainer.carry_on(stop, step):
            raise Interrupted(f"stopped by {stop.signal}; go on with: {options.command}")

    return tuning_stage.tune(tuning, cohorts, workdir, train_to)


def _autopsies(
    cohorts: Sequence[CohortPlan], options: Options, progress: Progress, stop: StopRequest
) -> None:
    """Replay diverged runs that were not yet, where signals are measured."""
    for run in (run for cohort in cohorts for run in cohort.runs):
        folder = run_folder(options.workdir, run.id)
        if run.config.train.diagnostics == "off" or RunFolder(folder, run.id).state != "diverged":
            continue
        if stop or files.read_object(folder / autopsy_record.FILE) is not None:
            continue
        try:
            said = autopsy(folder, most_replayed=MOST_REPLAYED).sentence
        except UserError as error:
            said = f"no autopsy: {error}"
        progress.say(f"{run.id}: {said}")
