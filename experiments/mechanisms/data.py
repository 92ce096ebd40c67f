"""The experiment on mechanisms read back: one workdir per task, and what their runs came to.

WORKDIR/mechanisms.json      the plan: command, rule, and for every task the floors
WORKDIR/TASK/                a workdir with grid.json and runs/
WORKDIR/TASK/sampling.json   for every finished run the standard error of its final loss
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.mechanisms.verdicts import Evidence, Floor, Outcome, Rule, Verdict, evidence, judge
from normjax.errors import UserError
from normjax.reporting import explanations, loading, palette, tables
from normjax.reporting.palette import Look
from normjax.reporting.results import Results, Run, finite
from normjax.runs import runlog

FORMAT = 1
AGREEMENT = 1e-4
"""Nats by which a loss may differ between the two programs that compute it in float32."""

COLUMNS = (
    *("task", "variant", "verdict", "within", "runs", "close", "goal", "optimum", "floor"),
    *("floor_information", "floor_reached", "excess_over_optimum", "excess_over_floor"),
    *("best_learning_rate", "loss_at_best_rate", "loss_low", "loss_high", "seeds_at_best_rate"),
    *("loss_best", "loss_median", "loss_worst", "standard_error", "diverged", "unfinished"),
    *("alarms", "unigram", "parameters", "steps", "window"),
)


@dataclass(frozen=True)
class Entry:
    """One variant on one task.

    Attributes:
        variant: its name.
        floor: the best that its information allows.
        outcomes: what its planned runs came to.
        verdict: of the rule.
        evidence: what the verdict rests on.
        parameters: number of weights.
    """

    variant: str
    floor: Floor
    outcomes: tuple[Outcome, ...]
    verdict: Verdict
    evidence: Evidence
    parameters: int | None

    def excess(self, over: float | None) -> float | None:
        """Return the mean loss at the best rate minus a loss; None where either is missing."""
        loss = self.evidence.at_rate.mean
        return None if loss is None or over is None else loss - over


@dataclass(frozen=True)
class TaskResult:
    """One task: its optimum, its variants, and its own workdir.

    Attributes:
        name: of the task.
        record: the task as its plan lists it, with title, description and optima.
        results: its workdir read back.
        entries: one per variant, in the order of the plan.
        disagreements: runs whose two computations of the final loss differ, with the difference.
    """

    name: str
    record: dict[str, Any]
    results: Results
    entries: tuple[Entry, ...]
    disagreements: tuple[tuple[str, float], ...]

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

    def entry(self, variant: str) -> Entry | None:
        """Return the entry of a variant, or None."""
        return next((entry for entry in self.entries if entry.variant == variant), None)


@dataclass(frozen=True)
class Mechanisms:
    """The whole experiment.

    Attributes:
        folder: its workdir.
        record: mechanisms.json.
        rule: of the verdicts.
        tasks: those whose workdir exists.
        waiting: names of planned tasks that have not begun.
    """

    folder: Path
    record: dict[str, Any]
    rule: Rule
    tasks: tuple[TaskResult, ...]
    waiting: tuple[str, ...]

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """Names of all variants, in the order of the plan."""
        return tuple(dict.fromkeys(e.variant for task in self.tasks for e in task.entries))

    @cached_property
    def looks(self) -> dict[str, Look]:
        """Colour and marker of every variant."""
        first = self.tasks[0].results if self.tasks else None
        own = explanations.colours(first) if first else {}
        return palette.looks(self.variants, self.variants[0], own)


def read_mechanisms(folder: Path) -> Mechanisms:
    """Read the experiment's workdir.

    Raises:
        UserError: there is no usable plan.
    """
    record = runlog.read_object(Path(folder) / "mechanisms.json")
    if record is None or record.get("format") != FORMAT:
        raise UserError(
            f"workdir={folder}: holds no mechanisms.json of format {FORMAT}; pass the workdir of"
            " --experiment=mechanisms"
        )
    rule = Rule(**record["rule"])
    tasks, waiting = [], []
    for name, floors in record["floors"].items():
        if (Path(folder) / name / "grid.json").exists():
            tasks.append(_task(Path(folder) / name, name, floors, rule))
        else:
            waiting.append(name)
    return Mechanisms(Path(folder), record, rule, tuple(tasks), tuple(waiting))


def _task(folder: Path, name: str, floors: dict[str, Any], rule: Rule) -> TaskResult:
    results = loading.load(folder)
    record = results.plan.get("task")
    if not isinstance(record, dict):
        raise UserError(f"workdir={folder}: its plan is of no task; delete it and start again")
    sampled = (runlog.read_object(folder / "sampling.json") or {}).get("runs", {})
    entries = []
    for cell in results.cells:
        floor = Floor(**floors[cell.name])
        runs = [run for run in results.runs if run.cell == cell.name]
        outcomes = tuple(outcome(run, sampled.get(run.id)) for run in runs)
        entries.append(Entry(
            cell.name, floor, outcomes,
            judge(outcomes, float(record["optimum"]["full"]), floor, rule),
            evidence(outcomes), cell.parameters,
        ))  # fmt: skip
    return TaskResult(name, record, results, tuple(entries), _disagreements(results, sampled))


def outcome(run: Run, sampled: dict[str, Any] | None) -> Outcome:
    """Return what a run came to, with the standard error of its final loss where it is known."""
    error = None if sampled is None else finite(sampled.get("standard_error"))
    return Outcome(run.id, run.seed, run.rates.learning_rate, run.outcome, run.final_loss, error)


def _disagreements(results: Results, sampled: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    found = []
    for run in results.runs:
        again = finite((sampled.get(run.id) or {}).get("loss"))
        if run.final_loss is not None and again is not None:
            difference = again - run.final_loss
            if abs(difference) > AGREEMENT * max(1.0, abs(run.final_loss)):
                found.append((run.id, difference))
    return tuple(found)


def csv(mechanisms: Mechanisms) -> str:
    """Return one row per task and variant: the verdict and all that it rests on."""
    rows = []
    for task in mechanisms.tasks:
        for entry in task.entries:
            rows.append(_row(task, entry))
    return tables.csv_text(COLUMNS, rows)


def _row(task: TaskResult, entry: Entry) -> Sequence[Any]:
    verdict, found, floor = entry.verdict, entry.evidence, entry.floor
    return (
        task.name, entry.variant, verdict.kind, len(verdict.within), len(verdict.counted),
        int(verdict.close), verdict.goal, task.optimum, floor.loss, floor.information,
        int(floor.reached), entry.excess(task.optimum), entry.excess(floor.loss), found.rate,
        found.at_rate.mean, found.at_rate.low, found.at_rate.high, found.at_rate.n, found.best,
        found.median, found.worst, found.error, found.diverged, found.unfinished,
        len(verdict.alarms), task.unigram, entry.parameters, task.steps, task.window,
    )  # fmt: skip


def plan_record(floors: dict[str, dict[str, Floor]], rule: Rule, **more: Any) -> dict[str, Any]:
    """Return mechanisms.json: floors by task and variant, the rule, and what else is to be kept."""
    listed = {
        task: {variant: dataclasses.asdict(floor) for variant, floor in by_variant.items()}
        for task, by_variant in floors.items()
    }
    return {"format": FORMAT, "rule": dataclasses.asdict(rule), "floors": listed, **more}
