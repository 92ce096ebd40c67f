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
from normjax.runs.grid import Arm, CohortPlan, ExperimentConfig, Question
from normjax.runs.progress import Progress, TimeLeft
from normjax.runs.run_folder import RunFolder, run_folder

MOST_REPLAYED = 2000
"""Diverged runs that take more steps to replay are left to a call of one's own."""


def carry_out(
    question: Question, arms: Sequence[Arm], config: ExperimentConfig, options: Options
) -> Outcome | None:
    """Run what is left of a grid and write its report; return its headline and its page.

    Everything that can be wrong with the request is found before anything is written.

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
    cohorts = grid.plan(config, arms, corpus.fingerprint)
    asked = grid.identity(question, config, corpus.fingerprint)
    prediction = given.prepare(
        options.predict, _candidates(every, arms), options.workdir, asked, options.dry_run
    )
    estimates.check(cohorts, corpus, devices)
    preflight.check_room(options.workdir, cohorts, corpus.vocabulary_size)
    if options.dry_run:
        print(estimates.describe(cohorts, corpus, devices))
        return None
    try:
        with working_in(options):
            preflight.check(options.workdir)
            plan = _record(question, arms, config, corpus, cohorts, options.command)
            argument = f"--predict={options.predict}"
            stored = record.settle(options.workdir, argument, prediction, asked)
            plan |= {"identity": asked, **({"prediction": stored} if stored else {})}
            files.write_sealed(options.workdir / "grid.json", plan)
            with stop_on_signals() as stop:
                with Progress([cohort.name for cohort in cohorts], options.live) as progress:
                    if corpus.files and corpus.files.left_out:
                        progress.say(f"corpus {corpus.name}: {corpus.files.words}")
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
        changed = configs.replace(config, arm.changes)
        models[arm.name] = Decoder(changed.model, corpus.vocabulary_size, changed.data.window)
    final = config.train.final_windows
    windows, weights = corpus.evaluation_set(config.data.window, final)
    between, _ = corpus.evaluation_set(config.data.window, config.train.evaluation_windows)
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
        "corpus": corpus.record(), **({"task": task} if task else {}),
        "evaluation": {
            "windows": len(windows), "tokens": int(weights.sum()),
            "description": corpus.evaluation_words(final)
            + f"; between, every {config.train.evaluate_every} steps, on {len(between)} windows"
            " of the same part",
        },
        "arms": [
            {
                "name": arm.name, "series": arm.series or arm.name, "x": arm.x,
                "title": arm.title, "description": arm.description,
                "changes": dict(arm.changes), "colour": arm.colour,
                "rows": configs.replace(config, arm.changes).model.record(),
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
