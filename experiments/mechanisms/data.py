"""The experiment on mechanisms read back: one workdir per task, and what their runs came to.

WORKDIR/mechanisms.json      the plan: command, rule, and for every task the floors
WORKDIR/TASK/                a workdir with grid.json and runs/
WORKDIR/TASK/sampling.json   for every finished run the standard error of its final loss
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.mechanisms.verdicts import (
    FinalLoss,
    OwnFloor,
    Rule,
    TaskEvidence,
    TaskVerdict,
    evidence,
    judge,
)
from normjax.errors import UserError
from normjax.reporting import explanations, loading, palette
from normjax.reporting.palette import Look
from normjax.reporting.results import Results, RunResult, finite
from normjax.runs import files

FORMAT = 1
AGREEMENT = 1e-4
"""Nats by which a loss may differ between the two programs that compute it in float32."""
VISIBLE = 5e-4
"""Nats by which a floor has to lie above the optimum to be shown apart from it."""


@dataclass(frozen=True)
class ArmOnTask:
    """One variant on one task.

    Attributes:
        task: of the variant.
        variant: its name.
        floor: the best that its information allows.
        outcomes: what its planned runs came to.
        verdict: of the rule.
        evidence: what the verdict rests on.
        parameters: number of weights.
    """

    task: Task
    variant: str
    floor: OwnFloor
    outcomes: tuple[FinalLoss, ...]
    verdict: TaskVerdict
    evidence: TaskEvidence
    parameters: int | None

    def excess(self, over: float | None) -> float | None:
        """Return the mean loss at the best rate minus a loss; None where either is missing."""
        loss = self.evidence.at_rate.mean
        return None if loss is None or over is None else loss - over

    @property
    def apart(self) -> float | None:
        """How far the floor lies above the optimum, where it is known and can be seen."""
        above = 0.0 if self.floor.loss is None else self.floor.loss - self.task.optimum
        return above if above > VISIBLE else None

    @property
    def alone(self) -> str:
        """The variant and the task in words."""
        return f"{self.variant} on {self.task.name}"


@dataclass(frozen=True)
class Task:
    """One task: its optimum, its variants, and its own workdir.

    Attributes:
        name: of the task.
        record: the task as its plan lists it, with title, description and optima.
        results: its workdir read back.
        floors: of the variants.
        rule: of the verdicts.
        sampled: by run, its final loss computed again, and the standard error of that.
    """

    name: str
    record: dict[str, Any]
    results: Results
    floors: dict[str, Any]
    rule: Rule
    sampled: dict[str, Any]

    @property
    def optimum(self) -> float:
        """The least expected loss with full information, nats per scored token."""
        return float(self.record["optimum"]["full"])

    @property
    def unigram(self) -> float:
        """The loss of the best constant answer."""
        return float(self.record["optimum"]["nothing"])

    @property
    def window(self) -> int:
        """Tokens of a sequence that are read."""
        return int(self.record["window"])

    @property
    def steps(self) -> int:
        """Optimizer steps of a run."""
        return max((run.rates.steps for run in self.results.runs), default=0)

    @cached_property
    def entries(self) -> tuple[ArmOnTask, ...]:
        """One per variant, in the order of the plan."""
        found = []
        for arm in self.results.arms:
            floor = OwnFloor(**self.floors[arm.name])
            runs = [run for run in self.results.runs if run.arm == arm.name]
            outcomes = tuple(_outcome(run, self.sampled.get(run.id)) for run in runs)
            verdict = judge(outcomes, self.optimum, floor, self.rule)
            found.append(ArmOnTask(
                self, arm.name, floor, outcomes, verdict, evidence(outcomes), arm.parameters
            ))  # fmt: skip
        return tuple(found)

    def entry(self, variant: str) -> ArmOnTask | None:
        """Return the entry of a variant, or None."""
        return next((entry for entry in self.entries if entry.variant == variant), None)

    @property
    def disagreements(self) -> list[tuple[str, float]]:
        """Runs whose two computations of the final loss differ, with the difference."""
        found = []
        for run in self.results.runs:
            again = finite((self.sampled.get(run.id) or {}).get("loss"))
            if run.final_loss is not None and again is not None:
                difference = again - run.final_loss
                if abs(difference) > AGREEMENT * max(1.0, abs(run.final_loss)):
                    found.append((run.id, difference))
        return found


@dataclass(frozen=True)
class Mechanisms:
    """The whole experiment.

    Attributes:
        record: mechanisms.json.
        rule: of the verdicts.
        tasks: those whose workdir exists.
        waiting: names of planned tasks that have not begun.
    """

    record: dict[str, Any]
    rule: Rule
    tasks: tuple[Task, ...]
    waiting: tuple[str, ...]

    @cached_property
    def entries(self) -> tuple[ArmOnTask, ...]:
        """All variants on all tasks."""
        return tuple(entry for task in self.tasks for entry in task.entries)

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """Names of all variants, in the order of the plan."""
        return tuple(dict.fromkeys(entry.variant for entry in self.entries))

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Colour and marker of every variant."""
        if not self.tasks:
            return {}
        own = explanations.colours(self.tasks[0].results)
        return palette.looks(self.variants, self.variants[0], own)


def read_mechanisms(folder: Path) -> Mechanisms:
    """Read the experiment's workdir.

    Raises:
        UserError: there is no usable plan.
    """
    record = files.read_object(Path(folder) / "mechanisms.json")
    if record is None or record.get("format") != FORMAT:
        raise UserError(
            f"workdir={folder}: holds no mechanisms.json of format {FORMAT}; pass the workdir of"
            " --experiment=mechanisms"
        )
    rule = Rule(**record["rule"])
    begun = {n: (Path(folder) / n / "grid.json").exists() for n in record["floors"]}
    tasks = (
        _task(Path(folder) / name, name, record["floors"][name], rule)
        for name, there in begun.items() if there
    )  # fmt: skip
    waiting = tuple(name for name, there in begun.items() if not there)
    return Mechanisms(record, rule, tuple(tasks), waiting)


def _task(folder: Path, name: str, floors: dict[str, Any], rule: Rule) -> Task:
    results = loading.load(folder)
    record = results.plan.get("task")
    if not isinstance(record, dict):
        raise UserError(f"workdir={folder}: its plan is of no task; delete it and start again")
    sampled = (files.read_object(folder / "sampling.json") or {}).get("runs", {})
    return Task(name, record, results, floors, rule, sampled)


def _outcome(run: RunResult, sampled: dict[str, Any] | None) -> FinalLoss:
    """Return what a run came to, with the standard error of its final loss where it is known."""
    error = None if sampled is None else finite(sampled.get("standard_error"))
    return FinalLoss(run.id, run.seed, run.rates.learning_rate, run.outcome, run.final_loss, error)


def plan_record(floors: dict[str, dict[str, OwnFloor]], rule: Rule, **more: Any) -> dict[str, Any]:
    """Return mechanisms.json: floors by task and variant, the rule, and what else is to be kept."""
    listed = {
        task: {variant: dataclasses.asdict(floor) for variant, floor in by_variant.items()}
        for task, by_variant in floors.items()
    }
    return {"format": FORMAT, "rule": dataclasses.asdict(rule), "floors": listed, **more}
