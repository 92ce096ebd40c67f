"""One cohort in a workdir: resume it, train it, log it, save it, stop it."""

from __future__ import annotations

import json
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normjax import configs
from normjax.data.corpora import AnyCorpus
from normjax.diagnostics import log, sampling
from normjax.diagnostics.probe import Probe
from normjax.errors import UserError
from normjax.runs import grid, provenance, runlog
from normjax.runs.experiment import StopRequest
from normjax.runs.grid import CohortPlan
from normjax.runs.progress import Progress, TimeLeft
from normjax.training import optimizer
from normjax.training.checkpoints import Checkpoints
from normjax.training.cohorts import Cohort

CHUNK_SECONDS = 1.5  # how long the host may be away from signals and the display


class WindowSet(NamedTuple):
    """Windows to evaluate on: (N, B, T + 1) tokens, (N, B, T) weights, how many of N are filled."""

    windows: np.ndarray
    weights: np.ndarray
    filled: int


def _padded(windows: np.ndarray, weights: np.ndarray, rows: int, size: int) -> WindowSet:
    tokens = np.zeros((rows * size, windows.shape[1]), np.int32)
    kept = np.zeros((rows * size, weights.shape[1]), np.float32)
    tokens[: len(windows)], kept[: len(windows)] = windows, weights
    filled = -(-len(windows) // size)
    return WindowSet(tokens.reshape(rows, size, -1), kept.reshape(rows, size, -1), filled)


class CohortRun:
    """One cohort from where its runs stand to their end."""

    def __init__(
        self, plan: CohortPlan, corpus: AnyCorpus, workdir: Path, progress: Progress,
        left: TimeLeft, flops: float, environment: dict[str, Any],
    ):  # fmt: skip
        self._name, self._planned = plan.name, len(plan.runs)
        self._model = plan.model(corpus.vocabulary_size)
        self._corpus, self._progress, self._left = corpus, progress, left
        self._config, self._train = plan.config, plan.config.train
        # Runs that are finished take no part: lanes do not depend on each other.
        folders = {run.id: runlog.run_folder(workdir, run.id) for run in plan.runs}
        for run in plan.runs:
            self._check_folder(run, folders[run.id])
        self._runs = [
            run for run in plan.runs if runlog.run_state(folders[run.id]) not in runlog.FINISHED
        ]
        self._folders = [folders[run.id] for run in self._runs]
        self._checkpoints = [
            Checkpoints(folder, self._train.keep_checkpoints) for folder in self._folders
        ]
        self._flops = flops / self._planned  # of one run
        self._environment = environment
        self._unit_schedule = optimizer.unit_schedule(
            self._train.steps, self._train.warmup_steps, self._train.final_fraction
        )
        self._sampled = sampling.sampled_steps(self._train)
        self._seconds = 0.0
        self._compile_s = 0.0
        self._per_step: float | None = None

    def carry_on(self, stop: StopRequest) -> bool:
        """Train until done; return False where a signal stopped it (after saving)."""
        self._left.skip(self._flops * (self._planned - len(self._runs)))
        open_runs = f"{len(self._runs)}/{self._planned}"
        if not self._runs:
            self._progress.state(self._name, open_runs, "finished before")
            return True
        self._progress.state(self._name, open_runs, "compiling")
        with stop.at_once():  # there is nothing new to save yet
            cohort, step = self._begin()
        if step:
            self._left.skip(self._work(step))
            self._progress.state(self._name, open_runs, f"resumed at step {step}")
        return self._loop(cohort, step, stop)

    def _work(self, steps: int) -> float:
        """Floating-point operations of so many steps of all runs."""
        return self._flops * len(self._runs) * steps / self._train.steps

    # --- begin ------------------------------------------------------------------------------------

    def _begin(self) -> tuple[Cohort, int]:
        """Return the compiled cohort and the step that it stands at."""
        started = time.perf_counter()
        for run, folder in zip(self._runs, self._folders, strict=True):
            self._open_folder(run, folder)
        cohort = Cohort(
            self._model, self._train, [run.hyper for run in self._runs],
            target_weights=self._corpus.target_weights(self._config.data.window),
        )  # fmt: skip
        cohort.start()
        step = self._restore(cohort)
        cohort.advance(self._batches(0, 0), 0)  # compiles
        self._between, self._final = self._window_sets()
        cohort.evaluate(self._final.windows, self._final.weights, 0)
        self._measure = self._compiled_probe(cohort)
        self._compile_s = time.perf_counter() - started
        return cohort, step

    def _record(self, run: grid.Run) -> dict[str, Any]:
        return {
            "format": grid.FORMAT, "id": run.id, "arm": run.arm.name, "seed": run.hyper.seed,
            "hyper": run.hyper._asdict(), "model": run.config.model.identity(),
            "data": configs.to_dict(run.config.data) | {"fingerprint": self._corpus.fingerprint},
            "train": configs.to_dict(run.config.train),
        }  # fmt: skip

    def _check_folder(self, run: grid.Run, folder: Path) -> None:
        """Refuse a folder that holds another run under this name; tell of one like it."""
        saved = runlog.read_object(folder / "config.json")
        wanted = json.loads(json.dumps(self._record(run)))
        if saved is not None and saved.get("format") != grid.FORMAT:
            raise UserError(
                f"{folder}: written in format {saved.get('format')}, this version reads format"
                f" {grid.FORMAT}; use another --workdir"
            )
        if saved is not None:
            changed = configs.differences(grid.defines(saved), grid.defines(wanted))
            if changed:
                raise UserError(
                    f"{folder}: holds another run under this name ({'; '.join(changed[:8])}); use"
                    " another --workdir, or delete that folder to train it again"
                )
            return
        for other in sorted(folder.parent.glob(f"{run.id.rsplit('-', 1)[0]}-*/config.json")):
            old = grid.defines(runlog.read_object(other) or {})
            changed = configs.differences(old, grid.defines(wanted))
            self._progress.say(
                f"{run.id}: trained anew; {other.parent.name} is another run"
                f" ({'; '.join(changed[:4])}{'; ...' if len(changed) > 4 else ''})"
            )

    def _open_folder(self, run: grid.Run, folder: Path) -> None:
        record = self._record(run)
        before = runlog.read_object(folder / "environment.json")
        if before:
            changed = provenance.differences(before, self._environment)
            if changed:
                self._progress.say(
                    f"{run.id}: resumed in another environment ({'; '.join(changed)}): the last"
                    " bits of its numbers may differ from an uninterrupted run"
                )
        runlog.write_json(folder / "config.json", record)
        runlog.write_json(folder / "environment.json", self._environment)

    def _restore(self, cohort: Cohort) -> int:
        """Put every run at the newest step that all of them have saved, and return it.

        Runs save in lockstep, so after a kill between two saves they share the one before. With no
        step in common the cohort starts at step 0, which gives the same numbers again.
        """
        common = set.intersection(*(set(c.verified_steps()) for c in self._checkpoints))
        if not common:
            return 0
        step, like = max(common), cohort.member_state(0)
        cohort.start([checkpoints.restore(step, like) for checkpoints in self._checkpoints])
        before = [line for line in runlog.read_metrics(self._folders[0]) if line["step"] <= step]
        self._seconds = before[-1]["time/wall_s"] if before else 0.0
        return step

    def _window_sets(self) -> tuple[WindowSet, WindowSet]:
        """Return the windows of the evaluations between and at the end, in arrays of one shape.

        One shape means one compiled program for both.
        """
        t, window = self._train, self._config.data.window
        sets = [
            self._corpus.evaluation_set(window, count)
            for count in (t.evaluation_windows, t.final_windows)
        ]
        size = min(t.batch_size, max(len(windows) for windows, _ in sets))
        rows = max(-(-len(windows) // size) for windows, _ in sets)
        between, final = (_padded(windows, weights, rows, size) for windows, weights in sets)
        return between, final

    def _batches(self, first: int, count: int) -> np.ndarray:
        """Return the batches of ``count`` steps, padded to the chunk that the program takes."""
        t, window = self._train, self._config.data.window
        shape = (len(self._runs), t.chunk_steps, t.batch_size, window + 1)
        out = np.zeros(shape, np.int32)
        if count:
            for i, run in enumerate(self._runs):
                out[i, :count] = self._corpus.training_batches(
                    run.hyper.seed, first, count, t.batch_size, window
                )
        return out

    # --- train ------------------------------------------------------------------------------------

    def _loop(self, cohort: Cohort, step: int, stop: StopRequest) -> bool:
        t = self._train
        last_save = time.monotonic()
        if step == 0:
            self._evaluate(cohort, 0)
        while step < t.steps and not stop and not self._all_diverged(cohort, step):
            if step in self._sampled:
                self._sample(step)
            count = self._chunk(step)
            started = time.perf_counter()
            cohort.advance(self._batches(step, count), count)
            elapsed = time.perf_counter() - started
            self._seconds += elapsed
            self._per_step = elapsed / count
            self._left.add(self._work(count), elapsed)
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

    def _compiled_probe(self, cohort: Cohort) -> Any:
        """Return what measures all runs where they stand, compiled; None where nothing will."""
        if not self._sampled:
            return None
        probe = Probe(self._model, self._train)
        weights = self._corpus.target_weights(self._config.data.window)
        measure = cohort.measurement(partial(probe.measure, weights=weights))
        measure(self._batches(0, 1)[:, 0])
        return measure

    def _sample(self, step: int) -> None:
        """Measure every run before its step, on the batch of that step."""
        started = time.perf_counter()
        values = self._measure(self._batches(step, 1)[:, 0])
        for i, folder in enumerate(self._folders):
            log.append_diagnostics(folder, step, {name: value[i] for name, value in values.items()})
        self._seconds += time.perf_counter() - started

    def _evaluates_at(self, step: int) -> bool:
        return step % self._train.evaluate_every == 0 or step == self._train.steps

    def _all_diverged(self, cohort: Cohort, step: int) -> bool:
        """Whether nothing is left to train; asked at evaluations only, whose steps are fixed."""
        if not self._evaluates_at(step):
            return False
        return bool((cohort.counters()["diverged_at"] >= 0).all())

    def _chunk(self, step: int) -> int:
        """Return how many steps to take before the host looks again."""
        t = self._train
        stops = [t.steps, (step // t.evaluate_every + 1) * t.evaluate_every]
        sample = sampling.next_sampled(self._sampled, step)
        if sample is not None:
            stops.append(sample)
        if t.checkpoint_every:
            stops.append((step // t.checkpoint_every + 1) * t.checkpoint_every)
        fits = 5 if self._per_step is None else int(CHUNK_SECONDS / max(self._per_step, 1e-6))
        return max(1, min(t.chunk_steps, fits, min(stops) - step))

    def _evaluate(self, cohort: Cohort, step: int) -> None:
        t = self._train
        windows = self._final if step == t.steps else self._between
        losses = cohort.evaluate(*windows)
        counters = cohort.counters()
        tokens = step * t.batch_size * self._config.data.window
        rate = self._rate()
        lines = []
        for i, run in enumerate(self._runs):
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
                "time/tokens_per_s": rate and rate / len(self._runs),
            })  # fmt: skip
        for i, line in enumerate(lines):
            runlog.append_metrics(self._folders[i], line)
            self._write_status(i, "running", step, counters)
        cohort.reset_sums()
        train_losses = [line["train/loss"] for line in lines] if step else []
        self._show(step, train_losses, [line["validation/loss"] for line in lines], True)

    def _schedule(self, step: int) -> float:
        return float(np.asarray(self._unit_schedule(step)))

    def _running_loss(self, cohort: Cohort) -> list[float | None]:
        counters = cohort.counters()
        pairs = zip(counters["loss_sum"], counters["sum_steps"], strict=True)
        return [float(total / n) if n else None for total, n in pairs]

    def _rate(self) -> float | None:
        if self._per_step is None:
            return None
        t = self._train
        return len(self._runs) * t.batch_size * self._config.data.window / self._per_step

    def _show(self, step: int, train: list, validation: list, evaluated: bool) -> None:
        self._progress.training(
            self._name, step, self._train.steps, train, validation, self._rate(),
            str(self._left), evaluated,
        )  # fmt: skip

    def _save(self, cohort: Cohort, step: int, state: str) -> None:
        """Checkpoint every run, then say so in its status."""
        counters = cohort.counters()
        for i, checkpoints in enumerate(self._checkpoints):
            checkpoints.save(step, cohort.member_state(i))
        for i, diverged_at in enumerate(counters["diverged_at"]):
            outcome = "diverged" if diverged_at >= 0 else "done"
            self._write_status(i, outcome if state == "finished" else state, step, counters)

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
                # One program for all: each run bears its part, so that sums are right.
                "compile_s": self._compile_s / len(self._runs), "train_s": self._seconds,
                "peak_memory_mb": peak / (1 << 20 if sys.platform == "darwin" else 1 << 10),
            },
        })  # fmt: skip
