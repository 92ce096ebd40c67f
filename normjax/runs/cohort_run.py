"""One cohort in a workdir: resume it, train it, log it, save it, stop it."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from normjax import configs
from normjax.data.corpora import AnyCorpus
from normjax.diagnostics import log, sampling
from normjax.diagnostics.probe import Probe
from normjax.errors import UserError
from normjax.runs import grid, segments
from normjax.runs.experiment import StopRequest
from normjax.runs.grid import CohortPlan
from normjax.runs.progress import Progress, TimeLeft
from normjax.runs.run_folder import FINISHED, METRICS, RunFolder, RunWriter, run_folder
from normjax.training import extremes, optimizer
from normjax.training.checkpoints import Checkpoints, SavedStates
from normjax.training.cohorts import Cohort, devices_for

CHUNK_SECONDS = 1.5  # how long the host may be away from signals and the display


BLOCKS = 32
"""The test text is divided into so many stretches; their losses give its part of an error."""


class WindowSet(NamedTuple):
    """Windows to evaluate on: (N, B, T + 1) tokens, (N, B, T) weights, how many of N are filled."""

    windows: np.ndarray
    weights: np.ndarray
    filled: int

    def mean(self, sums: np.ndarray) -> float:
        """Return the mean loss per token from the batches' summed losses (N,)."""
        return float(sums.sum(dtype=np.float64) / self.weights.sum(dtype=np.float64))

    def blocks(self, sums: np.ndarray) -> list[float]:
        """Return the mean losses of consecutive stretches of the text, of equally many batches."""
        weights = self.weights[: self.filled].sum(axis=(1, 2), dtype=np.float64)
        pairs = zip(*(np.array_split(x, min(BLOCKS, self.filled))
                      for x in (sums[: self.filled].astype(np.float64), weights)),
                    strict=True)  # fmt: skip
        return [float(a.sum() / b.sum()) for a, b in pairs]


def _padded(windows: np.ndarray, weights: np.ndarray, rows: int, size: int) -> WindowSet:
    tokens = np.zeros((rows * size, windows.shape[1]), np.int32)
    kept = np.zeros((rows * size, weights.shape[1]), np.float32)
    tokens[: len(windows)], kept[: len(windows)] = windows, weights
    filled = -(-len(windows) // size)
    return WindowSet(tokens.reshape(rows, size, -1), kept.reshape(rows, size, -1), filled)


class Member:
    """One run of a cohort: its record, its folder, its checkpoints, the step that it stands at."""

    def __init__(self, run: grid.Run, record: dict[str, Any], writer: RunWriter, kept: int):
        self.run, self.record, self.writer = run, record, writer
        self.checkpoints = Checkpoints(writer, kept)
        self.step = max(self.checkpoints.steps, default=0)
        self.carried: dict[str, Any] = {}  # of the evaluation at ``step``, by a shorter run

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do: it ended, and its last evaluation is on record."""
        writer = self.writer
        if writer.state not in FINISHED or writer.problems():
            return False
        return writer.state == "diverged" or writer.value("step") in _steps(writer)


def _steps(run: RunFolder) -> list[int]:
    return [line["step"] for line in run.metrics()]


class CohortRun:
    """One cohort from where its runs stand to their end.

    Each run keeps its own step. Runs at equal steps train together; those behind catch up first.
    """

    def __init__(
        self, plan: CohortPlan, corpus: AnyCorpus, workdir: Path, progress: Progress,
        left: TimeLeft, flops: float, environment: dict[str, Any],
    ):  # fmt: skip
        self._plan, self._corpus, self._progress, self._left = plan, corpus, progress, left
        self._train = plan.config.train
        taken = devices_for(self._train, len(jax.local_devices()), len(plan.runs))
        self._environment = environment | {"devices_taken": taken, "cohort_runs": len(plan.runs)}
        self._flops = flops / len(plan.runs)  # of one run
        self._members = [self._member(run, run_folder(workdir, run.id)) for run in plan.runs]

    def carry_on(self, stop: StopRequest, until: int | None = None) -> bool:
        """Train until done; return False where a signal stopped it (after saving).

        Args:
          stop: what a signal sets.
          until: a step at which to stop before the end, a multiple of ``evaluate_every``.
        """
        end = min(self._train.steps, until or self._train.steps)
        # Runs that are finished take no part: lanes do not depend on each other.
        members = [m for m in self._members if not m.finished and (m.step < end or until is None)]
        waiting = {id(member) for member in members}
        self._left.reached(
            (m.run.id for m in self._members if id(m) not in waiting),
            self._flops * end / self._train.steps,
        )
        open_runs = f"{len(members)}/{len(self._members)}"
        if not members:
            self._progress.state(self._plan.name, open_runs, "finished before")
            return True
        for member in members:
            self._begin(member)
        standing = sorted({member.step for member in members})
        for step, until in zip(standing, [*standing[1:], end], strict=True):
            # Those that diverged on the way to the others have ended before them.
            together = [m for m in members if m.step <= step and not m.finished]
            if not together:
                continue
            if any(member.step > step for member in members):
                self._progress.say(
                    f"{self._plan.name}: {', '.join(m.run.id for m in together)} from step {step};"
                    f" the others stand at step {until} and wait"
                )
            self._progress.state(self._plan.name, open_runs, "compiling")
            lockstep = Lockstep(
                self._plan, together, self._corpus, self._progress, self._left, self._flops
            )
            if step:
                self._progress.state(self._plan.name, open_runs, f"resumed at step {step}")
            if not lockstep.train(step, until, stop):
                return False
        return True

    # --- what is there ----------------------------------------------------------------------------

    def _record(self, run: grid.Run) -> dict[str, Any]:
        """Return what a run is, as JSON gives it back."""
        record = {
            "format": grid.FORMAT, "id": run.id, "arm": run.arm.name, "seed": run.hyper.seed,
            "hyper": run.hyper._asdict(), "model": run.config.model.identity(),
            "data": configs.to_dict(run.config.data) | {"fingerprint": self._corpus.fingerprint},
            "train": configs.to_dict(run.config.train),
        }  # fmt: skip
        return json.loads(json.dumps(record))

    def _member(self, run: grid.Run, folder: Path) -> Member:
        """Return a run with its folder; refuse one that holds another run, or cannot be read."""
        writer, record = RunWriter(folder, run.id), self._record(run)
        if writer.state == "damaged":
            raise UserError(
                f"{folder}: {writer.problem}; bring the manifest back, use another --workdir, or"
                " delete that folder to train the run from the start"
            )
        changed = configs.differences(grid.defines(writer.record), grid.defines(record))
        if writer.segments and changed:
            raise UserError(
                f"{folder}: holds another run under this name ({'; '.join(changed[:8])}); use"
                " another --workdir, or delete that folder to train it again"
            )
        if writer.problem:
            self._progress.say(f"{run.id}: {writer.problem}; the manifest before it is in force")
        return Member(run, record, writer, self._train.keep_checkpoints)

    def _begin(self, member: Member) -> None:
        """Open a run's next segment, and say where it starts and why there."""
        run, writer, saved = member.run, member.writer, member.checkpoints
        for step, file in saved.damaged.items():
            self._progress.say(f"{run.id}: the checkpoint of step {step} is damaged ({file})")
        if saved.damaged and not saved.steps:
            raise UserError(
                f"every checkpoint of {writer.path} is damaged; bring one back, or delete the run"
                " folder to train it from the start"
            )
        if writer.state == "missing":
            self._go_on_from_a_shorter_run(member)
        for problem in writer.problems():
            self._progress.say(f"{run.id}: {problem}; what is left of them is kept")
        reached = writer.value("step") or 0
        if member.step < reached:
            why = "no later checkpoint is whole" if member.step or saved.damaged else (
                "it has no checkpoint yet"
            )  # fmt: skip
            self._progress.say(
                f"{run.id}: had reached step {reached}, goes on from step {member.step}: {why}; the"
                " steps between are taken again and give the same numbers"
            )
        now = {"config": member.record, "environment": self._environment}
        joins, free = bool(writer.segments), []
        if joins:
            found = segments.differences(writer.segments[-1], now)
            joins = not found[segments.WARN] and not found[segments.REFUSE]
            free = found[segments.FREE]
            if not joins:
                said = "; ".join((found[segments.REFUSE] + found[segments.WARN])[:6])
                self._progress.say(
                    f"{run.id}: goes on from step {member.step} under other conditions ({said}):"
                    " the last bits of its numbers may differ from an uninterrupted run"
                )
        identity = configs.digest(grid.defines(member.record), 64)
        writer.begin(member.record, identity, self._environment, member.step, joins, free)

    def _go_on_from_a_shorter_run(self, member: Member) -> None:
        """Take over a finished run that differs in its number of steps only, where that is exact.

        It is where the learning rate does not know the end (final_fraction 1) and the shorter run
        ended at an evaluation. Of every other run of the name it is said what differs.
        """
        run, folder = member.run, member.writer.path
        beside = {other.id for other in self._plan.runs}  # those differ on purpose
        for path in sorted(folder.parent.glob(f"{run.id.rsplit('-', 1)[0]}-*")):
            other = RunFolder(path)
            if path.name in beside or not other.segments:
                continue
            old, wanted = grid.defines(other.record), grid.defines(member.record)
            changed, end = configs.differences(old, wanted), other.value("step")
            longer = [c.split(":")[0] for c in changed] == ["train.steps"]
            if (
                longer and other.state == "done" and end < run.config.train.steps
                and self._train.final_fraction == 1 and end % self._train.evaluate_every == 0
                and end in SavedStates(other).steps
            ):  # fmt: skip
                member.writer.adopt(other, end)
                member.checkpoints = Checkpoints(member.writer, self._train.keep_checkpoints)
                member.step = end
                member.carried = next(line for line in other.metrics() if line["step"] == end)
                self._progress.say(f"{run.id}: goes on from {path.name}, which ended at step {end}")
                return
            why = "; ".join(changed[:4]) + ("; ..." if len(changed) > 4 else "")
            if longer:
                why += (
                    "; it can go on only where the learning rate does not fall towards the end"
                    " (train.final_fraction=1) and the end is an evaluation"
                )
            self._progress.say(f"{run.id}: trained anew; {path.name} is another run ({why})")


class Lockstep:
    """Runs of a cohort that stand at one step, trained together from there."""

    def __init__(
        self, plan: CohortPlan, members: Sequence[Member], corpus: AnyCorpus, progress: Progress,
        left: TimeLeft, flops: float,
    ):  # fmt: skip
        self._name, self._members, self._planned = plan.name, members, len(plan.runs)
        self._runs = [member.run for member in members]
        self._model = plan.model(corpus.vocabulary_size)
        self._corpus, self._progress, self._left, self._flops = corpus, progress, left, flops
        self._config, self._train = plan.config, plan.config.train
        self._unit_schedule = optimizer.unit_schedule(
            self._train.steps, self._train.warmup_steps, self._train.final_fraction
        )
        self._sampled = sampling.sampled_steps(self._train)
        self._seconds = 0.0
        self._compile_s = 0.0
        self._per_step: float | None = None

    def train(self, step: int, until: int, stop: StopRequest) -> bool:
        """Train from a step to another, and save; return False where a signal stopped it."""
        with stop.at_once():  # there is nothing new to save yet
            cohort = self._begin(step)
        self._reached(step)
        reached = self._loop(cohort, step, until, stop)
        for member in self._members:
            member.step = reached
        return not stop or reached == self._train.steps or self._all_diverged(cohort, reached)

    def _reached(self, step: int, seconds: float = 0.0) -> None:
        """Note how far the runs are, and the seconds that it took from the last time."""
        work = self._flops * step / self._train.steps
        self._left.reached((run.id for run in self._runs), work, seconds)

    # --- begin ------------------------------------------------------------------------------------

    def _begin(self, step: int) -> Cohort:
        """Return the compiled cohort, every run at the step."""
        started = time.perf_counter()
        cohort = Cohort(
            self._model, self._train, [run.hyper for run in self._runs],
            target_weights=self._corpus.target_weights(self._config.data.window),
            planned=self._planned,
        )  # fmt: skip
        cohort.start()
        if step:
            like = cohort.member_state(0)
            cohort.start([member.checkpoints.restore(step, like) for member in self._members])
            before = [x for x in self._members[0].writer.metrics() if x["step"] <= step]
            self._seconds = (before[-1]["time/wall_s"] or 0.0) if before else 0.0
        cohort.advance(self._batches(0, 0), 0)  # compiles
        self._validation, self._test = self._window_sets()
        cohort.evaluate(self._test.windows, self._test.weights, 0)
        self._measure = self._compiled_probe(cohort)
        self._compile_s = time.perf_counter() - started
        return cohort

    def _window_sets(self) -> tuple[WindowSet, WindowSet]:
        """Return the windows of the evaluations between and at the end, in arrays of one shape.

        One shape means one compiled program for both.
        """
        t, window = self._train, self._config.data.window
        sets = [
            self._corpus.evaluation_set(window, count, part)
            for count, part in ((t.evaluation_windows, "validation"), (t.final_windows, "test"))
        ]
        size = min(t.batch_size, max(len(windows) for windows, _ in sets))
        rows = max(-(-len(windows) // size) for windows, _ in sets)
        validation, test = (_padded(windows, weights, rows, size) for windows, weights in sets)
        return validation, test

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

    def _loop(self, cohort: Cohort, step: int, until: int, stop: StopRequest) -> int:
        """Return the step that was reached and saved."""
        t = self._train
        last_save = time.monotonic()
        if self._evaluates_at(step) and self._unrecorded(step):
            self._evaluate(cohort, step)
        while step < until and not stop and not self._all_diverged(cohort, step):
            if step in self._sampled:
                self._sample(step)
            count = min(self._chunk(step), until - step)
            started = time.perf_counter()
            cohort.advance(self._batches(step, count), count)
            elapsed = time.perf_counter() - started
            self._seconds += elapsed
            self._per_step = elapsed / count
            step += count
            self._reached(step, elapsed)
            if self._evaluates_at(step):
                self._evaluate(cohort, step)
            else:
                self._show(step, self._running_loss(cohort), [], False)
            due = time.monotonic() - last_save > t.checkpoint_seconds
            due |= bool(t.checkpoint_every) and step % t.checkpoint_every == 0
            if due and step < until:
                self._save(cohort, step, "running")
                last_save = time.monotonic()
        finished = step == t.steps or self._all_diverged(cohort, step)
        self._save(cohort, step, "finished" if finished else "interrupted" if stop else "running")
        return step

    def _unrecorded(self, step: int) -> bool:
        """Whether a run has no evaluation of this step: a first one, or one that was lost."""
        return any(step not in _steps(member.writer) for member in self._members)

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
        for i, member in enumerate(self._members):
            own = {name: value[i] for name, value in values.items()}
            member.writer.append(log.FILE, log.line(step, own))
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
        losses = cohort.evaluate(*self._validation)
        tested = cohort.evaluate(*self._test) if step == t.steps else None
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
                "validation/loss": None if diverged else self._validation.mean(losses[i]),
                **self._tested(None if tested is None or diverged else tested[i]),
                "gradient/norm": mean(counters["norm_sum"][i]),
                "learning_rate": run.hyper.learning_rate * self._schedule(max(step - 1, 0)),
                "update/skipped": int(counters["skipped"][i]),
                "time/wall_s": self._seconds,
                "time/tokens_per_s": rate and rate / len(self._runs),
            })  # fmt: skip
        measured, expected = cohort.extremes(), extremes.expected(self._model)
        for i, line in enumerate(lines):
            member = self._members[i]
            if step:
                found = log.extremes_line(step, measured[i], expected)
                member.writer.append(log.EXTREMES_FILE, found)
            if member.carried and member.carried["step"] == step:
                line |= {k: v for k, v in member.carried.items() if k in line and line[k] is None}
            member.writer.append(METRICS, line)
            member.writer.commit(step=step, **self._status(i, "running", counters))
        cohort.reset_sums()
        train_losses = [line["train/loss"] for line in lines] if step else []
        self._show(step, train_losses, [line["validation/loss"] for line in lines], True)

    def _tested(self, sums: np.ndarray | None) -> dict[str, Any]:
        if sums is None:
            return {}
        return {"test/loss": self._test.mean(sums), "test/blocks": self._test.blocks(sums)}

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
        """Checkpoint every run, with where it stands in the same manifest."""
        counters = cohort.counters()
        for i, member in enumerate(self._members):
            outcome = "diverged" if counters["diverged_at"][i] >= 0 else "done"
            status = self._status(i, outcome if state == "finished" else state, counters)
            member.checkpoints.save(step, cohort.member_state(i), **status)

    def _status(self, member: int, state: str, counters: dict[str, np.ndarray]) -> dict[str, Any]:
        at = int(counters["diverged_at"][member])
        reason = None
        if at >= 0:
            reason = f"{self._train.patience} non-finite steps in a row from step {at} on"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "state": state, "diverged_at": at if at >= 0 else None, "reason": reason,
            "time": {
                # One program for all: each run bears its part, so that sums are right.
                "compile_s": self._compile_s / len(self._runs), "train_s": self._seconds,
                "peak_memory_mb": peak / (1 << 20 if sys.platform == "darwin" else 1 << 10),
            },
        }  # fmt: skip
