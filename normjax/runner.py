"""Carry out a grid in a workdir: plan, resume, train, log, stop, report."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from normjax import configs, corpora, estimates, grid, optimizer, provenance, report, runlog
from normjax.checkpoints import Checkpoints
from normjax.cohorts import Cohort
from normjax.corpora import Corpus
from normjax.errors import UserError
from normjax.grid import Cell, CohortPlan, ExperimentConfig, Question
from normjax.locking import locked
from normjax.progress import Progress, TimeLeft
from normjax.stopping import StopRequest, stop_on_signals
from normjax.train import State

CHUNK_SECONDS = 1.5  # how long the host may be away from signals and the display


@dataclasses.dataclass(frozen=True)
class Options:
    """How an experiment is carried out, besides its configuration."""

    workdir: Path
    command: str
    dry_run: bool = False
    live: bool | None = None


class Interrupted(Exception):
    """The grid was stopped by a signal after saving; the message says how to go on."""


def carry_out(
    question: Question, cells: Sequence[Cell], config: ExperimentConfig, options: Options
) -> Path | None:
    """Run what is left of a grid and write its report; return the report's path.

    Everything that can be wrong with the request is found before anything is written.

    Raises:
      UserError: the request cannot be carried out.
      LockedError: another process works in the workdir.
      Interrupted: a signal asked to stop; all is saved.
    """
    cells = grid.select(cells, config.grid.variants)
    devices = jax.local_devices()
    grid.check(config, cells, len(devices))
    _check_workdir(options.workdir)
    corpus = corpora.load(config.data)
    cohorts = grid.plan(config, cells, corpus.fingerprint)
    if options.dry_run:
        print(estimates.describe(cohorts, corpus, devices))
        return None
    try:
        with locked(options.workdir), stop_on_signals() as stop:
            plan = _record(question, cells, config, corpus, cohorts, options.command)
            runlog.write_json(options.workdir / "grid.json", plan)
            with Progress([cohort.name for cohort in cohorts], options.live) as progress:
                _train_all(cohorts, corpus, options, progress, stop)
            return report.write(options.workdir)
    except OSError as error:
        what = f"{error.strerror or error} ({error.filename or 'a file'})"
        raise UserError(
            f"workdir={options.workdir}: {what}; put that right and go on with: {options.command}"
        ) from None


def _check_workdir(workdir: Path) -> None:
    for folder in (workdir, *workdir.parents):
        if folder.exists():
            if not folder.is_dir():
                raise UserError(f"workdir={workdir}: {folder} is a file; name a folder")
            probe = folder / f".normjax-{time.time_ns()}"
            try:
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise UserError(
                    f"workdir={workdir}: cannot write there ({error.strerror}); name another folder"
                ) from None
            return


def _record(
    question: Question, cells: Sequence[Cell], config: ExperimentConfig, corpus: Corpus,
    cohorts: Sequence[CohortPlan], command: str,
) -> dict[str, Any]:  # fmt: skip
    """Return the plan as grid.json holds it: the report is made from this and the run folders."""
    models = {}
    for cell in cells:
        changed = configs.replace(config, cell.changes)
        models[cell.name] = grid.Decoder(changed.model, corpus.vocabulary_size, changed.data.window)
    windows, weights = corpora.evaluation_windows(
        corpus.validation, config.data.window, config.train.final_windows
    )
    series = {cell.series or cell.name for cell in cells}
    baseline = (
        question.baseline if question.baseline in series else (cells[0].series or cells[0].name)
    )
    return {
        "format": grid.FORMAT,
        "experiment": question.experiment, "preset": question.preset, "command": command,
        "title": question.title, "question": question.question,
        "hypothesis": question.hypothesis, "notes": list(question.notes), "baseline": baseline,
        "x": dataclasses.asdict(question.x) if question.x else None,
        "config": configs.to_dict(config),
        "corpus": {
            "name": corpus.name, "description": corpus.description,
            "vocabulary": corpus.vocabulary.kind, "vocabulary_size": corpus.vocabulary_size,
            "train_tokens": len(corpus.train), "validation_tokens": len(corpus.validation),
            "fingerprint": corpus.fingerprint,
            "unigram_loss": corpus.unigram_loss, "uniform_loss": corpus.uniform_loss,
        },
        "evaluation": {
            "windows": len(windows), "tokens": int(weights.sum()),
            "description": "non-overlapping windows, "
            + ("the whole validation part" if config.train.final_windows == 0
               else "evenly spaced over the validation part")
            + f"; between, every {config.train.evaluate_every} steps, on"
            f" {config.train.evaluation_windows or 'all'} of them",
        },
        "cells": [
            {
                "name": cell.name, "series": cell.series or cell.name, "x": cell.x,
                "title": cell.title, "description": cell.description,
                "changes": dict(cell.changes),
                "parameters": models[cell.name].parameter_count(),
                "flops_per_token": models[cell.name].flops_per_token(),
            }
            for cell in cells
        ],
        "runs": [run.record() for cohort in cohorts for run in cohort.runs],
    }  # fmt: skip


def _train_all(
    cohorts: Sequence[CohortPlan], corpus: Corpus, options: Options, progress: Progress,
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


class CohortRun:
    """One cohort from where its runs stand to their end."""

    def __init__(
        self, plan: CohortPlan, corpus: Corpus, workdir: Path, progress: Progress, left: TimeLeft,
        flops: float, environment: dict[str, Any],
    ):  # fmt: skip
        self._plan, self._corpus, self._progress, self._left = plan, corpus, progress, left
        self._config = plan.config
        self._train = plan.config.train
        self._folders = [runlog.run_folder(workdir, run.id) for run in plan.runs]
        self._states = [runlog.run_state(folder) for folder in self._folders]
        self._checkpoints = [Checkpoints(folder) for folder in self._folders]
        self._flops = flops / self._train.steps
        self._environment = environment
        self._unit_schedule = optimizer.unit_schedule(
            self._train.steps, self._train.warmup_steps, self._train.final_fraction
        )
        self._seconds = 0.0
        self._compile_s = 0.0
        self._per_step: float | None = None

    @property
    def _open(self) -> list[int]:
        """Members that are not finished."""
        return [i for i, state in enumerate(self._states) if state not in runlog.FINISHED]

    def carry_on(self, stop: StopRequest) -> bool:
        """Train until done; return False where a signal stopped it (after saving)."""
        total, name = len(self._plan.runs), self._plan.name
        if not self._open:
            self._left.skip(self._flops * self._train.steps)
            self._progress.state(name, f"{total}/{total}", "finished before")
            return True
        self._progress.state(name, f"{len(self._open)}/{total}", "compiling")
        cohort = self._begin()
        step = int(cohort.counters()["step"].max())
        self._left.skip(self._flops * step)
        if step:
            self._progress.state(name, f"{len(self._open)}/{total}", f"resumed at step {step}")
        return self._loop(cohort, step, stop)

    # --- begin ------------------------------------------------------------------------------------

    def _begin(self) -> Cohort:
        started = time.perf_counter()
        for i in self._open:
            self._open_folder(i)
        members = [run.hyper for run in self._plan.runs]
        cohort = Cohort(self._plan.model(self._corpus.vocabulary_size), self._train, members)
        self._window_sets()
        cohort.start()
        self._restore(cohort)
        cohort.advance(self._batches(0, 0), 0)  # compiles
        cohort.evaluate(self._windows, self._weights, 0)
        self._compile_s = time.perf_counter() - started
        return cohort

    def _open_folder(self, member: int) -> None:
        folder, run = self._folders[member], self._plan.runs[member]
        record = {
            "format": grid.FORMAT, "id": run.id, "cell": run.cell.name, "seed": run.hyper.seed,
            "hyper": run.hyper._asdict(), "model": configs.to_dict(run.config.model),
            "data": configs.to_dict(run.config.data) | {"fingerprint": self._corpus.fingerprint},
            "train": configs.to_dict(run.config.train),
        }  # fmt: skip
        saved = runlog.read_json(folder / "config.json")
        if saved is not None and saved.get("format") != grid.FORMAT:
            raise UserError(
                f"{folder}: written in format {saved.get('format')}, this version reads format"
                f" {grid.FORMAT}; use another --workdir"
            )
        before = runlog.read_json(folder / "environment.json")
        if before:
            changed = provenance.differences(before, self._environment)
            if changed:
                self._progress.say(
                    f"{run.id}: resumed in another environment ({'; '.join(changed)}): the last"
                    " bits of its numbers may differ from an uninterrupted run"
                )
        runlog.write_json(folder / "config.json", record)
        runlog.write_json(folder / "environment.json", self._environment)

    def _restore(self, cohort: Cohort) -> None:
        """Put every member at the newest step that all unfinished members have saved.

        Members save in lockstep, so after a kill between two saves they share the one before. With
        no step in common the cohort starts at step 0, which gives the same numbers again.
        """
        saved = {i: set(self._checkpoints[i].verified_steps()) for i in self._open}
        common = set.intersection(*saved.values())
        if not common:
            return
        step = max(common)
        like = cohort.member_state(self._open[0])
        states: list[State] = [like] * len(self._plan.runs)
        for i in range(len(states)):
            # A finished member keeps its place, so that the program stays the one it was; what its
            # lane computes is not recorded again.
            source = i if i in saved else self._open[0]
            states[i] = self._checkpoints[source].restore(step, like)
        cohort.start(states)
        lines = runlog.read_metrics(self._folders[self._open[0]])
        before = [line["time/wall_s"] for line in lines if line["step"] <= step]
        self._seconds = before[-1] if before else 0.0

    def _window_sets(self) -> None:
        """Make one array of windows for both evaluations, so that one program serves both."""
        t, window = self._train, self._config.data.window
        sets = [
            corpora.evaluation_windows(self._corpus.validation, window, count)
            for count in (t.evaluation_windows, t.final_windows)
        ]
        size = min(t.batch_size, max(len(windows) for windows, _ in sets))
        batches = max(-(-len(windows) // size) for windows, _ in sets)
        shape = (batches, size)
        self._sets = []
        for windows, weights in sets:
            padded = np.zeros((batches * size, window + 1), np.int32)
            kept = np.zeros((batches * size, window), np.float32)
            padded[: len(windows)], kept[: len(windows)] = windows, weights
            count = -(-len(windows) // size)
            self._sets.append((padded.reshape(*shape, -1), kept.reshape(*shape, -1), count))
        self._windows, self._weights, _ = self._sets[0]

    def _batches(self, first: int, count: int) -> np.ndarray:
        """Return the batches of ``count`` steps, padded to the chunk that the program takes."""
        t, window = self._train, self._config.data.window
        shape = (len(self._plan.runs), t.chunk_steps, t.batch_size, window + 1)
        out = np.zeros(shape, np.int32)
        for i, run in enumerate(self._plan.runs):
            if count:
                out[i, :count] = corpora.batches(
                    self._corpus.train, run.hyper.seed, first, count, t.batch_size, window
                )
        return out

    # --- train ------------------------------------------------------------------------------------

    def _loop(self, cohort: Cohort, step: int, stop: StopRequest) -> bool:
        t = self._train
        last_save = time.monotonic()
        if step == 0:
            self._evaluate(cohort, 0)
        while step < t.steps and not stop and not self._all_diverged(cohort, step):
            count = self._chunk(step)
            started = time.perf_counter()
            cohort.advance(self._batches(step, count), count)
            elapsed = time.perf_counter() - started
            self._seconds += elapsed
            self._per_step = elapsed / count
            self._left.add(self._flops * count, elapsed)
            step += count
            if self._evaluates_at(step):
                self._evaluate(cohort, step)
            else:
                self._show(step, self._running_loss(cohort), [], False)
            due = time.monotonic() - last_save > t.checkpoint_seconds
            due |= bool(t.checkpoint_every) and step % t.checkpoint_every == 0
            if due and step < t.steps:
                self._save(cohort, step, "running")
                last_save = time.monotonic()
        finished = step == t.steps or self._all_diverged(cohort, step)
        self._save(cohort, step, "finished" if finished else "interrupted")
        for checkpoints in self._checkpoints:
            checkpoints.close()
        return finished

    def _evaluates_at(self, step: int) -> bool:
        return step % self._train.evaluate_every == 0 or step == self._train.steps

    def _all_diverged(self, cohort: Cohort, step: int) -> bool:
        """Whether nothing is left to train; asked at evaluations only, whose steps are fixed."""
        if not self._evaluates_at(step):
            return False
        return bool((cohort.counters()["diverged_at"][self._open] >= 0).all())

    def _chunk(self, step: int) -> int:
        """Return how many steps to take before the host looks again."""
        t = self._train
        stops = [t.steps, (step // t.evaluate_every + 1) * t.evaluate_every]
        if t.checkpoint_every:
            stops.append((step // t.checkpoint_every + 1) * t.checkpoint_every)
        fits = 5 if self._per_step is None else int(CHUNK_SECONDS / max(self._per_step, 1e-6))
        return max(1, min(t.chunk_steps, fits, min(stops) - step))

    def _evaluate(self, cohort: Cohort, step: int) -> None:
        t = self._train
        windows, weights, batches = self._sets[step == t.steps]
        losses = cohort.evaluate(windows, weights, batches)
        counters = cohort.counters()
        tokens = step * t.batch_size * self._config.data.window
        rate = self._rate()
        lines = []
        for i, run in enumerate(self._plan.runs):
            steps = int(counters["sum_steps"][i])
            diverged = counters["diverged_at"][i] >= 0
            mean = lambda total, n=steps: float(total) / n if n else None  # noqa: E731
            lines.append({
                "step": step,
                "tokens": tokens,
                "train/loss": mean(counters["loss_sum"][i]),
                "validation/loss": None if diverged else float(losses[i]),
                "gradient/norm": mean(counters["norm_sum"][i]),
                "learning_rate": run.hyper.learning_rate * self._schedule(max(step - 1, 0)),
                "update/skipped": int(counters["skipped"][i]),
                "time/wall_s": self._seconds,
                "time/tokens_per_s": rate,
            })  # fmt: skip
        for i in self._open:
            runlog.append_metrics(self._folders[i], lines[i])
            self._write_status(i, "running", step, counters)
        cohort.reset_sums()
        chosen = [lines[i] for i in self._open]
        self._show(
            step, [line["train/loss"] for line in chosen] if step else [],
            [line["validation/loss"] for line in chosen], True,
        )  # fmt: skip

    def _schedule(self, step: int) -> float:
        return float(np.asarray(self._unit_schedule(step)))

    def _running_loss(self, cohort: Cohort) -> list[float | None]:
        counters = cohort.counters()
        sums, steps = counters["loss_sum"][self._open], counters["sum_steps"][self._open]
        return [float(total / n) if n else None for total, n in zip(sums, steps, strict=True)]

    def _rate(self) -> float | None:
        if self._per_step is None:
            return None
        t = self._train
        return len(self._plan.runs) * t.batch_size * self._config.data.window / self._per_step

    def _show(self, step: int, train: list, validation: list, evaluated: bool) -> None:
        self._progress.training(
            self._plan.name, step, self._train.steps, train, validation, self._rate(),
            str(self._left), evaluated,
        )  # fmt: skip

    def _save(self, cohort: Cohort, step: int, state: str) -> None:
        """Checkpoint every open member, then say so in its status."""
        counters = cohort.counters()
        for i in self._open:
            self._checkpoints[i].save(step, cohort.member_state(i))
        for i in list(self._open):
            diverged = counters["diverged_at"][i] >= 0
            final = ("diverged" if diverged else "done") if state == "finished" else state
            self._write_status(i, final, step, counters)
            if state == "finished":
                self._states[i] = final

    def _write_status(
        self, member: int, state: str, step: int, counters: dict[str, np.ndarray]
    ) -> None:
        at = int(counters["diverged_at"][member])
        reason = None
        if at >= 0:
            reason = f"{self._train.patience} non-finite steps in a row from step {at} on"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        runlog.write_json(self._folders[member] / "status.json", {
            "state": state, "step": step, "steps": self._train.steps,
            "diverged_at": at if at >= 0 else None, "reason": reason,
            "time": {
                "compile_s": self._compile_s, "train_s": self._seconds,
                "peak_memory_mb": peak / (1 << 20 if sys.platform == "darwin" else 1 << 10),
            },
        })  # fmt: skip
