"""A diverged run replayed with its diagnostics measured before every step around the first bad one.

    autopsy("runs/ablation-default/runs/no-norm-s0-...").sentence

The replay starts from the run's last checkpoint that leaves room for the steps before, else from
its initialization. Batches are functions of (seed, step), and the steps are those of the cohort's
own program: as many devices, as many lanes, all of them filled with this run. So the run comes
again, bit for bit: the same first bad step, and in its last checkpoint the same parameters, the
same moments and the same extremes of everything that its steps measured. Where one bit differs the
replay is another run, and nothing is told.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from normjax.configs import to_dict
from normjax.decoder import Decoder
from normjax.diagnostics import autopsy_record, definitions
from normjax.diagnostics.autopsy_record import Autopsy, ReplayCheck
from normjax.diagnostics.probe import Probe
from normjax.errors import UserError
from normjax.runs.run_folder import RunFolder
from normjax.training import optimizer, train
from normjax.training.cohorts import Cohort
from normjax.training.train import State, TrainConfig
from normjax.training.trained import TrainedRun

BEFORE = 30
"""So many steps before the first bad one are measured."""
AFTER = 4
"""So many more bad steps are measured: parameters stand still there, only the batches change."""


def autopsy(
    run_folder: str | Path, before: int = BEFORE, after: int = AFTER,
    most_replayed: int | None = None,
) -> Autopsy:  # fmt: skip
    """Replay a diverged run and write ``autopsy.jsonl`` and ``autopsy.json`` into its folder.

    Args:
      run_folder: ``WORKDIR/runs/NAME`` of a run that diverged.
      before: steps before the first bad one to measure.
      after: bad steps to measure besides the first, at most to the end of the streak.
      most_replayed: None, or so many steps may be taken at most.

    Raises:
      UserError: the run did not diverge, has no checkpoint, its text is gone, it took more devices
        than there are, or it would take more steps than allowed.
    """
    folder = Path(run_folder).expanduser()
    found = RunFolder(folder)
    at = found.value("diverged_at")
    if at is None or at < 1:
        raise UserError(
            f"run={run_folder}: did not diverge (state {found.state}); an autopsy is for runs whose"
            " manifest.json has diverged_at"
        )
    run, bad = TrainedRun(folder), at - 1  # diverged_at counts from 1, steps before which from 0
    first = max(0, bad - before)
    start = max(step for step in run.steps if step <= first)
    last = min(bad + min(after, run.train_config.patience - 1), run.train_config.steps - 1)
    if most_replayed is not None and last + 1 - start > most_replayed:
        raise UserError(
            f"run={run_folder}: {last + 1 - start} steps to replay, more than {most_replayed};"
            f' autopsy("{folder}") does it'
        )
    replay = _Replay(run, start, found.environment)
    replay.advance(first - start)
    samples = []
    while replay.step <= last:
        if replay.step == bad:
            replay.keep()
        samples.append((replay.step, replay.measure()))
        replay.advance(1)
    # To the end of the streak: its steps are part of the extremes.
    replay.advance(min(bad + run.train_config.patience, run.train_config.steps) - replay.step)
    checks = _checks(run, replay, bad)
    schedule = optimizer.unit_schedule(
        run.train_config.steps, run.train_config.warmup_steps, run.train_config.final_fraction
    )
    rates = {step: float(np.asarray(schedule(step))) for step, _ in samples}
    names = definitions.sublayer_names(to_dict(run.model.config))
    result = autopsy_record.examine(samples, bad, start, checks, names, rates)
    autopsy_record.write(folder, result, samples if result.reproduced else [])
    return result


@lru_cache(maxsize=2)
def _cohort(
    model: Decoder, config: TrainConfig, weights: tuple[float, ...] | None, runs: int, devices: int
) -> Cohort:
    """A cohort of so many runs on so many devices; diverged runs of one cohort share it."""
    target = None if weights is None else np.array(weights)
    nobody = [train.Hyper(0, 0.0, 0.0, 0.0)] * runs
    return Cohort(model, config, nobody, jax.local_devices()[:devices], target, planned=runs)


@lru_cache(maxsize=2)
def _probe(model: Decoder, config: TrainConfig) -> Probe:
    return Probe(model, config)


class _Replay:
    """A run, taken on from one of its steps by the program of its cohort."""

    def __init__(self, run: TrainedRun, start: int, environment: dict[str, Any]):
        self._run, self._config, self.step = run, run.train_config, start
        self._lanes = int(environment.get("cohort_runs", 1))
        devices, here = int(environment.get("devices_taken", 1)), len(jax.local_devices())
        if devices > here:
            raise UserError(
                f"run={run.folder}: was trained on {devices} devices, here are {here}: its numbers"
                " would not come again"
            )
        key = None if self._weights is None else tuple(self._weights.tolist())
        self._cohort = _cohort(run.model, self._config, key, self._lanes, devices)
        self._cohort.enlist([run.hyper] * self._lanes)
        self._cohort.start([run.state(start)] * self._lanes if start else None)
        self.kept: State | None = None

    @property
    def state(self) -> State:
        """Where the run stands."""
        return self._cohort.member_state(0)

    @property
    def bad(self) -> int | None:
        """The first step of the streak of bad ones that it stands in, or ended in."""
        at, streak = int(self.state.diverged_at), int(self.state.bad_streak)
        return at - 1 if at >= 0 else self.step - streak if streak else None

    @cached_property
    def _weights(self) -> np.ndarray | None:
        return self._run.corpus.target_weights(self._run.data.window)

    def _batches(self, count: int) -> np.ndarray:
        return self._run.corpus.training_batches(
            self._run.hyper.seed, self.step, count, self._config.batch_size, self._run.data.window
        )

    def advance(self, count: int) -> None:
        """Take steps, in chunks as the run did."""
        c = self._config
        while count > 0:
            now = min(c.chunk_steps, count)
            windows = np.zeros((c.chunk_steps, c.batch_size, self._run.data.window + 1), np.int32)
            windows[:now] = self._batches(now)
            self._cohort.advance(np.stack([windows] * self._lanes), now)
            self.step, count = self.step + now, count - now

    def measure(self) -> dict[str, np.ndarray]:
        """Return all diagnostics before the next step, on its batch."""
        probe = _probe(self._run.model, self._config)
        hyper = train.Hyper(np.uint32(self._run.hyper.seed), *map(np.float32, self._run.hyper[1:]))
        return probe(self.state, hyper, self._batches(1)[0], self._weights)

    def keep(self) -> None:
        """Keep the state where it stands."""
        self.kept = self.state


def _checks(run: TrainedRun, replay: _Replay, bad: int) -> list[ReplayCheck]:
    """Return whether the replay is the run again, bit for bit."""
    found = "none" if replay.bad is None else str(replay.bad)
    out = [ReplayCheck(
        "bad step", replay.bad == bad,
        f"its first bad step is {found}" + ("" if replay.bad == bad else f", the run's was {bad}"),
    )]  # fmt: skip
    later = [step for step in run.steps if step > bad]
    if not later or replay.kept is None:
        text = "the run has no checkpoint after its first bad step to be compared with"
        return [*out, ReplayCheck("parameters", False, text)]
    # A run that has diverged stands still: its last checkpoint holds what it had before.
    saved = run.state(later[-1])
    for name, own, other in (
        ("parameters", replay.kept.params, saved.params),
        ("moments", replay.kept.moments, saved.moments),
        ("extremes", replay.state.extremes, saved.extremes),
    ):
        same = _same(own, other)
        text = f"its {name} there {'agree bit for bit' if same else 'are others'}"
        out.append(ReplayCheck(name, same, text))
    return out


def _same(a: Any, b: Any) -> bool:
    """Whether two trees have the same numbers, NaN and the sign of 0 included."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)
