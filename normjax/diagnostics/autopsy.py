"""A diverged run replayed with its diagnostics measured before every step around the first bad one.

    autopsy("runs/ablation-default/runs/no-norm-s0-...").sentence

The replay starts from the run's last checkpoint that leaves room for the steps before, else from
its initialization; batches are functions of (seed, step), the step is the one function of
``normjax.training.train``. So the run comes again, which is checked: the same first bad step, the
same parameters before it, the same diagnostics where the run had measured some.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from normjax.configs import to_dict
from normjax.decoder import Decoder
from normjax.diagnostics import autopsy_record, definitions, log
from normjax.diagnostics.autopsy_record import Autopsy, ReplayCheck
from normjax.diagnostics.probe import Probe
from normjax.errors import UserError
from normjax.runs.run_folder import RunFolder
from normjax.training import optimizer, train
from normjax.training.train import Hyper, State, TrainConfig
from normjax.training.trained import TrainedRun

BEFORE = 30
"""So many steps before the first bad one are measured."""
AFTER = 4
"""So many more bad steps are measured: parameters stand still there, only the batches change."""
CLOSE = 1e-3
"""Largest relative difference of a replay that still counts as the run again.

A run that had a device to itself comes again bit for bit; among lanes or devices it was another
program, whose last bits differ and grow as it diverges.
"""


WRITTEN = 5e-9
"""diagnostics.jsonl holds nine digits."""


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
      UserError: the run did not diverge, has no checkpoint, its text is gone, or it would take more
        steps than allowed.
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
    replay = _Replay(run, start)
    replay.advance(first - start)
    samples = []
    while replay.step <= last:
        if replay.step == bad:
            replay.keep_params()
        samples.append((replay.step, replay.measure()))
        replay.advance(1)
    checks = _checks(run, replay, samples, bad)
    schedule = optimizer.unit_schedule(
        run.train_config.steps, run.train_config.warmup_steps, run.train_config.final_fraction
    )
    rates = {step: float(np.asarray(schedule(step))) for step, _ in samples}
    names = definitions.sublayer_names(to_dict(run.model.config))
    result = autopsy_record.examine(samples, bad, start, checks, names, rates)
    autopsy_record.write(folder, result, samples)
    return result


@lru_cache(maxsize=2)
def _chunk(model: Decoder, config: TrainConfig, weights: tuple[float, ...] | None) -> Any:
    """The training program of a run alone; runs of one program share it."""
    target = None if weights is None else np.array(weights, np.float32)
    return jax.jit(
        lambda state, hyper, windows, count: train.train_chunk(
            model, config, state, hyper, windows, count, None, target
        )
    )


@lru_cache(maxsize=2)
def _probe(model: Decoder, config: TrainConfig) -> Probe:
    return Probe(model, config)


class _Replay:
    """The state of a run, taken on from one of its steps."""

    def __init__(self, run: TrainedRun, start: int):
        self._run, self._config, self.step = run, run.train_config, start
        self.state: State = run.state(start)
        self.bad: int | None = None
        self.params: Any = None
        seed, *rates = run.hyper
        self._hyper = Hyper(np.uint32(seed), *(np.float32(x) for x in rates))

    @cached_property
    def _weights(self) -> np.ndarray | None:
        return self._run.corpus.target_weights(self._run.data.window)

    def _batches(self, count: int) -> np.ndarray:
        return self._run.corpus.training_batches(
            self._run.hyper.seed, self.step, count, self._config.batch_size, self._run.data.window
        )

    def advance(self, count: int) -> None:
        """Take steps, in chunks as the run did."""
        key = None if self._weights is None else tuple(float(w) for w in self._weights)
        program = _chunk(self._run.model, self._config, key)
        size = self._config.chunk_steps
        while count:
            now = min(size, count)
            windows = np.zeros((size, self._config.batch_size, self._run.data.window + 1), np.int32)
            windows[:now] = self._batches(now)
            self.state = program(self.state, self._hyper, windows, np.int32(now))
            self.step, count = self.step + now, count - now
        streak = int(self.state.bad_streak)
        self.bad = self.step - streak if streak else None

    def measure(self) -> dict[str, np.ndarray]:
        """Return all diagnostics before the next step, on its batch."""
        probe = _probe(self._run.model, self._config)
        return probe(self.state, self._hyper, self._batches(1)[0], self._weights)

    def keep_params(self) -> None:
        """Keep the parameters where it stands."""
        self.params = jax.tree.map(np.asarray, self.state.params)


# --- is it the run again? -------------------------------------------------------------------------


def _checks(
    run: TrainedRun, replay: _Replay, samples: list[tuple[int, dict[str, np.ndarray]]], bad: int
) -> list[ReplayCheck]:
    found = "none" if replay.bad is None else str(replay.bad)
    out = [ReplayCheck(
        "bad step", replay.bad == bad,
        f"its first bad step is {found}" + ("" if replay.bad == bad else f", the run's was {bad}"),
    )]  # fmt: skip
    later = [step for step in run.steps if step > bad]
    if later and replay.params is not None:
        # A run that has diverged stands still: its last checkpoint holds what it had before.
        saved = jax.tree.leaves(run.params(later[-1]))
        pairs = zip(jax.tree.leaves(replay.params), saved, strict=True)
        worst = max(_difference(a, np.asarray(b)) for a, b in pairs)
        out.append(
            ReplayCheck("parameters", worst <= CLOSE, "its parameters there " + _said(worst))
        )
    own, dense = dict(log.read_diagnostics(run.folder)), dict(samples)
    shared = [step for step in own if step in dense]
    for name in ("loss/value", "gradient/norm"):
        values = [(dense[s][name], own[s][name]) for s in shared if name in own[s]]
        if values:
            worst = max(_difference(np.asarray(a, np.float64), b) for a, b in values)
            title = definitions.DIAGNOSTICS[name].title
            steps = f"{len(values)} step{'s' * (len(values) > 1)}"
            text = f"its {title} at {steps} that the run measured {_said(worst, WRITTEN)}"
            out.append(ReplayCheck(name, worst <= CLOSE, text))
    return out


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    """Return max |a - b| over max |b|; what is not finite must be so in both."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    finite = np.isfinite(b)
    if (np.isfinite(a) != finite).any():
        return float("inf")
    if not finite.any():
        return 0.0
    scale = float(np.abs(b[finite]).max())
    return float(np.abs(a[finite] - b[finite]).max()) / (scale or 1.0)


def _said(worst: float, digits: float = 0.0) -> str:
    if worst == 0:
        return "agree bit for bit"
    if worst <= digits:
        return "agree in all digits written"
    return f"differ by {worst:.1e} of the largest"
