"""A rate for every arm, before the runs that count: other seeds, judged on validation text.

Each arm trains at every rate with the schedule of the whole run. At each rung the better half goes
on, and after the last one the best rate is taken (successive halving, Jamieson and Talwalkar 2016).
Outcomes have the order of the report: a diverged run is worse than any loss. The seeds are no
others' and the test text is not looked at, so that what is reported is no luck of the choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from normjax.configs import field
from normjax.errors import UserError
from normjax.initializers import INITIALIZERS
from normjax.reporting import rank_correlation
from normjax.runs import grid
from normjax.runs.grid import Arm, CohortPlan, ExperimentConfig, Run
from normjax.runs.run_folder import TUNING, RunFolder, run_folder
from normjax.training import train

FIRST_SEED = 1_000_000
"""Tuning seeds are counted from here: seeds of a grid lie below."""
FOLDER = TUNING


@dataclasses.dataclass(frozen=True)
class TuningConfig:
    """How each variant gets its rate, and under which initializations all of them are compared."""

    rates: tuple[float, ...] = field(
        (), "learning rates tried for each variant; empty: all take train.learning_rate", above=0,
        most=train.MAX_RATE, distinct=True,
    )  # fmt: skip
    rungs: tuple[int, ...] = field(
        (100,), "steps after which the better half of the rates goes on; the best after the last",
        least=1, most=train.MAX_STEPS, fewest=1, distinct=True,
    )  # fmt: skip
    seeds: int = field(1, "runs per rate, with seeds that no other run has", least=1, most=1000)
    inits: tuple[str, ...] = field(
        (), "initializations that the variants are compared under; empty: model.init",
        choices=INITIALIZERS, distinct=True,
    )  # fmt: skip


def check(tuning: TuningConfig, config: ExperimentConfig) -> None:
    """Raise :class:`UserError` for tuning that cannot be done."""
    every, steps = config.train.evaluate_every, config.train.steps
    for rung in tuning.rungs if tuning.rates else ():
        if (rung % every and rung != steps) or rung > steps:
            raise UserError(
                f"config.tuning.rungs={rung}: must be a multiple of train.evaluate_every={every} up"
                f" to train.steps={steps}; pass --config.tuning.rungs={min(every, steps)}"
            )
    if list(tuning.rungs) != sorted(tuning.rungs):
        raise UserError(
            f"config.tuning.rungs={','.join(map(str, tuning.rungs))}: must rise; pass"
            f" --config.tuning.rungs={','.join(map(str, sorted(tuning.rungs)))}"
        )


def with_inits(arms: Sequence[Arm], tuning: TuningConfig) -> list[Arm]:
    """Return every arm under every initialization, as series of that many conditions."""
    if len(tuning.inits) < 2:
        setting = dict(zip(["model.init"], tuning.inits, strict=False))
        return [dataclasses.replace(arm, setting=setting) for arm in arms]
    return [
        dataclasses.replace(
            arm, name=f"{arm.name}-{init}", series=arm.name, condition=f"init {init}",
            setting={"model.init": init},
        )
        for init in tuning.inits for arm in arms
    ]  # fmt: skip


def first_cohorts(
    tuning: TuningConfig, config: ExperimentConfig, arms: Sequence[Arm], fingerprint: str
) -> list[CohortPlan]:
    """Return the cohorts of the first rung."""
    asked = dataclasses.replace(
        config.grid, seeds=tuning.seeds, first_seed=FIRST_SEED, learning_rates=tuning.rates
    )
    # Only where it ends counts, and nothing is measured inside.
    quiet = dataclasses.replace(config.train, diagnostics="off", keep_checkpoints=1)
    own = dataclasses.replace(config, grid=asked, train=quiet)
    return grid.plan(own, arms, fingerprint)


def share(tuning: TuningConfig, steps: int) -> float:
    """Return which part of the steps of the first rung's runs is trained, all rungs together.

    >>> share(TuningConfig(rates=(1e-3, 2e-3, 4e-3, 8e-3), rungs=(100, 200)), steps=400)
    0.375
    """
    tried, before, trained = len(tuning.rates), 0, 0
    for rung in tuning.rungs:
        trained += tried * (rung - before)
        tried, before = -(-tried // 2), rung
    return trained / (len(tuning.rates) * steps)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The rate of one arm and what it was chosen by.

    Attributes:
      rate: the chosen one.
      tried: (rate, rung, validation loss there: a mean over seeds; None where a run diverged).
    """

    rate: float
    tried: tuple[tuple[float, int, float | None], ...]


def tune(
    tuning: TuningConfig, cohorts: Sequence[CohortPlan], workdir: Path,
    train_to: Callable[[CohortPlan, int], None],
) -> dict[str, Choice]:  # fmt: skip
    """Return the choice for every arm.

    Args:
      tuning: rungs.
      cohorts: of the first rung.
      workdir: where the tuning runs lie.
      train_to: trains a cohort up to a step.
    """
    chosen: dict[str, Choice] = {}
    for cohort in cohorts:
        left = cohort  # of several arms where they share a program
        tried: dict[str, list[tuple[float, int, float | None]]] = {}
        for rung in tuning.rungs:
            train_to(left, rung)
            last = rung == tuning.rungs[-1]
            kept: list[Run] = []
            for arm, runs in _grouped(left.runs, lambda run: run.arm.name).items():
                rates = _grouped(runs, lambda run: run.hyper.learning_rate)
                losses = {
                    rate: [_loss_at(workdir, run, rung) for run in own]
                    for rate, own in rates.items()
                }
                for rate, own in losses.items():
                    mean = math.fsum(own) / len(own)
                    tried.setdefault(arm, []).append(
                        (rate, rung, mean if math.isfinite(mean) else None)
                    )
                order = sorted(losses, key=lambda r: (rank_correlation.standing(losses[r]), r))
                best = order[: 1 if last else -(-len(order) // 2)]
                kept += [run for rate in best for run in rates[rate]]
            left = CohortPlan(tuple(run for run in left.runs if run in kept))
        chosen |= {
            run.arm.name: Choice(run.hyper.learning_rate, tuple(tried[run.arm.name]))
            for run in left.runs
        }
    return chosen


def _grouped(runs: Iterable[Run], key: Callable[[Run], Any]) -> dict[Any, list[Run]]:
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups


def _loss_at(workdir: Path, run: Run, step: int) -> float:
    """Return the validation loss of a run at a step; infinity where it has diverged by then."""
    lines = RunFolder(run_folder(workdir, run.id), run.id).metrics()
    found = [line.get("validation/loss") for line in lines if line["step"] == step]
    return found[-1] if found and found[-1] is not None else math.inf


def tuned(arms: Sequence[Arm], chosen: dict[str, Choice]) -> list[Arm]:
    """Return arms at the rates that were chosen for them."""
    return [
        dataclasses.replace(
            arm, setting={**arm.setting, "train.learning_rate": chosen[arm.name].rate}
        )
        for arm in arms
    ]


def record(
    tuning: TuningConfig, chosen: dict[str, Choice], cohorts: Sequence[CohortPlan], workdir: Path
) -> dict[str, Any]:
    """Return the choices as grid.json holds them, and what they cost."""
    folders = [RunFolder(run_folder(workdir, run.id)) for c in cohorts for run in c.runs]
    times = [folder.value("time") or {} for folder in folders]
    return {
        "rates": list(tuning.rates), "rungs": list(tuning.rungs), "seeds": tuning.seeds,
        "first_seed": FIRST_SEED, "runs": len(folders),
        "run_steps": sum(folder.value("step") or 0 for folder in folders),
        "seconds": sum(time.get("train_s", 0.0) + time.get("compile_s", 0.0) for time in times),
        "chosen": {
            name: {"rate": choice.rate, "tried": [list(each) for each in choice.tried]}
            for name, choice in chosen.items()
        },
    }  # fmt: skip
