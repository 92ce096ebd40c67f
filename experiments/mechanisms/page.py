"""The page of the experiment on mechanisms: the answer in words, the table, the evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.mechanisms import data, figures
from experiments.mechanisms.data import Entry, Mechanisms, TaskResult
from experiments.mechanisms.figures import KEYS, SIGNS
from experiments.mechanisms.verdicts import (
    AT_FLOOR,
    COMPUTES,
    FAILS,
    NO_FLOOR,
    NO_RUN,
    UNRELIABLE,
    VERDICTS,
)
from normjax.reporting import html, palette, report, tables
from normjax.reporting.drawing import Figure
from normjax.reporting.html import flat
from normjax.reporting.tables import number, span
from normjax.reporting.wording import capital, listed

TEMPLATE = Path(__file__).with_name("page.html.j2")

TITLE = "What each part of a decoder is needed for: computing or learning"

ACTIONS = {
    "full": "the full decoder", "no-attention": "without attention", "no-mlp": "without MLP",
    "no-positions": "without positions", "no-norm": "without norms",
    "no-residual": "without the residual path", "post-norm": "with the norm behind the addition",
}  # fmt: skip


PARTS = {
    "no-attention": "attention", "no-mlp": "the MLP", "no-positions": "positions",
    "no-norm": "norms", "no-residual": "the residual path", "post-norm": "the place of the norm",
}  # fmt: skip


def write(workdir: Path) -> tuple[Path, str, bool]:
    """Write ``mechanisms.csv``, figures and ``mechanisms.html``; return the page and its answer.

    Raises:
        UserError: if the workdir holds no usable plan.
    """
    found = data.read_mechanisms(Path(workdir))
    page = report.write_page(
        Path(workdir), "mechanisms", data.csv(found), found.record,
        lambda: figures.all_figures(found), lambda drawn: render(found, drawn),
    )  # fmt: skip
    broken = alarms(found)
    head = [TITLE, "", tables.plain(headline(found)), ""]
    said = report.wrapped([*broken, *warnings(found), *answer(found)])
    return page, "\n".join([*head, said]), not broken


def render(found: Mechanisms, drawn: Sequence[tuple[Figure, str]]) -> str:
    """Return the page as one self-contained HTML text."""
    return html.render(
        TEMPLATE,
        title=TITLE,
        record=found.record,
        rule=found.rule,
        alarms=alarms(found),
        warnings=warnings(found),
        answer=answer(found),
        parts=_of_parts(found),
        variants=[(name, palette.variable(look.colour)) for name, look in found.looks.items()
                  if name in found.variants],
        table=[_table_row(found, task) for task in found.tasks],
        figures=[html.picture(figure, svg) for figure, svg in drawn],
        separated=separated(found),
        evidence=[_evidence(found, task, entry) for task, entry in _cells(found)],
        tasks=[_task(found, task) for task in found.tasks],
        verdicts=[(SIGNS[kind][3], palette.variable(SIGNS[kind][0]), KEYS[kind], words)
                  for kind, words in VERDICTS.items()],
        machine=flat(found.record.get("environment") or {}),
        settings=flat(found.record.get("config") or {}),
        cost=_cost(found),
    )  # fmt: skip


def _cells(found: Mechanisms) -> list[tuple[TaskResult, Entry]]:
    return [(task, entry) for task in found.tasks for entry in task.entries]


# --- words ----------------------------------------------------------------------------------------


def alarms(found: Mechanisms) -> list[str]:
    """Return what shows that a floor or the evaluation is wrong; empty where nothing does."""
    said = []
    for task, entry in _cells(found):
        for outcome in entry.verdict.alarms:
            bound = task.optimum if entry.floor.loss is None else entry.floor.loss
            assert outcome.loss is not None and outcome.error is not None
            below = bound - outcome.loss
            times = f"{below / outcome.error:.1f}" if outcome.error else "infinitely many"
            said.append(
                f"Run {outcome.run} of {entry.variant} on {task.name} ended at"
                f" {number(outcome.loss, digits=4)}, {number(below, digits=4)} nats or {times}"
                f" standard errors below {number(bound, digits=4)}, which no decoder of its kind"
                " can get below: this floor or the evaluation is wrong."
            )
    for task in found.tasks:
        said += [
            f"The final loss of {run} on {task.name} is {number(difference, True, 5)} nats off when"
            " it is computed again sequence by sequence: the evaluation is not to be trusted."
            for run, difference in task.disagreements
        ]
    return said


def warnings(found: Mechanisms) -> list[str]:
    """Return what is missing."""
    said = []
    if found.waiting:
        said.append(f"Not begun yet: {listed(found.waiting)}.")
    for task in found.tasks:
        missing = {e.variant: e.evidence.unfinished for e in task.entries if e.evidence.unfinished}
        if missing:
            said.append(
                f"{task.name}: runs are missing, unfinished or without a standard error, and not"
                f" counted: {listed(f'{n} of {name}' for name, n in missing.items())}."
            )
    return said


def answer(found: Mechanisms) -> list[str]:
    """Return the answer in sentences, each from the verdicts."""
    if not any(entry.verdict.counted for _, entry in _cells(found)):
        return []
    said = [_of_computing(found), _of_learning(found), _of_full(found), _of_errors(found)]
    return [text for text in said if text]


def _of_computing(found: Mechanisms) -> str:
    """Say which parts decide what can be computed."""
    held = {variant: _of(found, variant).get(AT_FLOOR, []) for variant in found.variants}
    said = [
        f"{PARTS.get(variant, variant)} ({_names(cells)})"
        for variant, cells in held.items()
        if cells
    ]
    if not said:
        return "No part that was removed is shown to decide what can be computed."
    return (
        f"What can be computed is decided by {listed(said)}: without it every run sits at the exact"
        " loss of the information that is left, whatever the seed and rate."
    )


def _of_learning(found: Mechanisms) -> str:
    """Say how many runs reach the optimum where the information for it is there."""
    reached: dict[str, int] = {}
    total: dict[str, int] = {}
    for task, entry in _cells(found):
        if entry.verdict.goal <= task.optimum + found.rule.margin and entry.verdict.counted:
            name = entry.variant
            reached[name] = reached.get(name, 0) + len(entry.verdict.within)
            total[name] = total.get(name, 0) + len(entry.verdict.counted)
    if not total:
        return ""
    shown = listed(f"{name} {reached[name]} of {n}" for name, n in total.items())
    text = (
        "Where the information for the optimum is there, what is left is learning; so many runs"
        f" get there, over tasks, seeds and rates: {shown}."
    )
    some = {v: _of(found, v).get(UNRELIABLE, []) for v in found.variants if v != "full"}
    said = [f"{ACTIONS.get(v, v)} ({_names(cells)})" for v, cells in some.items() if cells]
    if said:
        text += (
            f" Some runs but not all get there {listed(said)}: there the change decides how"
            " reliably the task is learned, not whether it can be computed."
        )
    return text


def _of(found: Mechanisms, variant: str) -> dict[str, list[tuple[TaskResult, Entry]]]:
    """Return the cells of a variant by verdict."""
    groups: dict[str, list[tuple[TaskResult, Entry]]] = {}
    for task, entry in _cells(found):
        if entry.variant == variant:
            groups.setdefault(entry.verdict.kind, []).append((task, entry))
    return groups


def _names(cells: Iterable[tuple[TaskResult, Entry]]) -> str:
    return listed(task.name for task, _ in cells)


def _counted(cells: Iterable[tuple[TaskResult, Entry]]) -> str:
    return listed(f"{task.name} ({entry.verdict.k_of_n} runs)" for task, entry in cells)


def _of_full(found: Mechanisms) -> str:
    groups = _of(found, "full")
    if not groups:
        return ""
    total = sum(len(cells) for cells in groups.values())
    margin = f"{found.rule.margin:g}"
    done = groups.get(COMPUTES, [])
    if len(done) == total:
        text = (
            f"The full decoder comes within {margin} nats of the exact optimum on all {total}"
            " tasks, with every seed and rate."
        )
    else:
        text = (
            f"The full decoder comes within {margin} nats of the exact optimum with every seed and"
            f" rate on {len(done)} of {total} tasks."
        )
    if UNRELIABLE in groups:
        text += f" Only some of its runs do on {_counted(groups[UNRELIABLE])}."
    if FAILS in groups:
        text += (
            f" None does on {_names(groups[FAILS])}: there these settings are too small, and what"
            " the other variants do says little."
        )
    return text


def _of_parts(found: Mechanisms) -> list[str]:
    said = []
    for variant in found.variants:
        groups = _of(found, variant)
        if variant == "full" or not groups:
            continue
        clauses = []
        if AT_FLOOR in groups:
            clauses.append(
                f"cannot compute {_names(groups[AT_FLOOR])}: every run sits at the best that its"
                " information allows"
            )
        if COMPUTES in groups:
            clauses.append(f"computes {_names(groups[COMPUTES])} with every seed and rate")
        if UNRELIABLE in groups:
            clauses.append(f"learns only with some seeds or rates {_counted(groups[UNRELIABLE])}")
        for kind in (FAILS, NO_FLOOR):
            proven = [pair for pair in groups.get(kind, []) if pair[1].floor.reached]
            bound = [pair for pair in groups.get(kind, []) if not pair[1].floor.reached]
            if proven:
                clauses.append(f"fails to learn {_names(proven)} though it could compute it")
            if bound:
                clauses.append(
                    f"stays above the bound on {_names(bound)}, which it fails to learn or cannot"
                    " compute"
                )
        if clauses:
            said.append(f"{_subject(variant)} {'; it '.join(clauses)}.")
    return said


def _subject(variant: str) -> str:
    phrase = ACTIONS.get(variant)
    return f"{capital(phrase)} the decoder" if phrase else f"The variant {variant}"


def _of_errors(found: Mechanisms) -> str:
    errors = [e.evidence.error for _, e in _cells(found) if e.evidence.error is not None]
    if not errors:
        return ""
    close = [f"{entry.variant} on {task.name}" for task, entry in _cells(found)
             if entry.verdict.close]  # fmt: skip
    text = (
        f"The optimum is exact; the measured losses have standard errors of at most"
        f" {number(max(errors), digits=4)} nats."
    )
    if close:
        text += (
            f" So near the margin that another sample could change the verdict: {listed(close)}."
        )
    if not alarms(found):
        text += (
            f" No run lies more than {found.rule.alarm:g} standard errors below its floor: floors"
            " and evaluation agree."
        )
    return text


def separated(found: Mechanisms) -> list[dict[str, Any]]:
    """Return the cells sorted by what keeps them from the optimum, with the evidence for each."""
    groups: dict[str, list[str]] = {title: [] for title, _ in _SECTIONS}
    for task, entry in _cells(found):
        title = _section(entry)
        if title:
            groups[title].append(_argument(found, task, entry))
    return [{"title": title, "words": words, "items": groups[title]} for title, words in _SECTIONS]


CANNOT, CAN, COULD, OPEN = (
    "Cannot compute", "Can compute, does not always learn", "Could compute, was not learned",
    "Not decided: above a bound that may be out of reach",
)  # fmt: skip
_SECTIONS = (
    (CANNOT, "The information is not there. All runs sit at the exact loss of what is left, and no"
     " training can change that."),
    (CAN, "One run within the margin proves that the goal is within reach of the decoder as it is."
     " The runs that miss it differ in seed or rate only: what is missing is learning."),
    (COULD, "No run got there, but decoders of this kind, wide enough, come as close to the floor"
     " as one likes. More width, steps or other rates may change this verdict."),
    (OPEN, "No run got there, and the floor is proven as a bound only: nobody has shown that"
     " decoders of this kind reach it. It takes other arguments to tell ability from learning."),
)  # fmt: skip


def _section(entry: Entry) -> str:
    kind = entry.verdict.kind
    if kind in (FAILS, NO_FLOOR):
        return COULD if entry.floor.reached and kind == FAILS else OPEN
    return {AT_FLOOR: CANNOT, UNRELIABLE: CAN}.get(kind, "")


def _argument(found: Mechanisms, task: TaskResult, entry: Entry) -> str:
    verdict, seen, floor = entry.verdict, entry.evidence, entry.floor
    head = f"{entry.variant} on {task.name}"
    if verdict.kind == AT_FLOOR:
        return (
            f"{head}: {verdict.k_of_n} runs within {found.rule.margin:g} of the floor"
            f" {number(floor.loss)} (best {number(seen.best)}, worst {number(seen.worst)});"
            f" the optimum is {number(task.optimum)}. {floor.reason}"
        )
    rates = listed(f"{k} of {n} at rate {rate:g}" for rate, (k, n) in verdict.by_rate().items())
    if verdict.kind == UNRELIABLE:
        return (
            f"{head}: {rates}. Best {number(seen.best)}, worst {number(seen.worst)},"
            f" goal {number(verdict.goal)}.{_lost(entry)}"
        )
    best = None if seen.best is None else seen.best - verdict.goal
    return (
        f"{head}: none of {len(verdict.counted)} runs; the best is {number(best)} above"
        f" {number(verdict.goal)}.{_lost(entry)}{_level(found, task, entry)} {floor.reason}"
    )


def _level(found: Mechanisms, task: TaskResult, entry: Entry) -> str:
    """Say which information's exact optimum the best run ends at, if it is one above the goal."""
    best, margin = entry.evidence.best, found.rule.margin
    levels = [
        (abs(best - value), name) for name, value in task.record["optimum"].items()
        if best is not None and value is not None and value > entry.verdict.goal + margin
    ]  # fmt: skip
    off = min((off for off, _ in levels), default=margin)
    if off >= margin:
        return ""
    names = [name for distance, name in levels if distance <= off + 1e-9]
    value = number(task.record["optimum"][names[0]])
    if "nothing" in names:
        return f" That is {value}, what the best constant answer gives: nothing was learned."
    return f" That is {value}, the exact optimum of the information “{names[0]}”."


def _lost(entry: Entry) -> str:
    n = entry.evidence.diverged
    return f" {n} diverged." if n else ""


# --- tables ---------------------------------------------------------------------------------------


def _table_row(found: Mechanisms, task: TaskResult) -> dict[str, Any]:
    cells = []
    for variant in found.variants:
        entry = task.entry(variant)
        cells.append(None if entry is None else _table_cell(task, entry))
    return {"name": task.name, "optimum": number(task.optimum), "cells": cells}


def _table_cell(task: TaskResult, entry: Entry) -> dict[str, Any]:
    floor = entry.floor.loss
    colour, _, _, sign = SIGNS[entry.verdict.kind]
    apart = floor is not None and floor > task.optimum + 5e-4
    return {
        "variant": entry.variant, "sign": sign, "colour": palette.variable(colour),
        "verdict": KEYS[entry.verdict.kind], "excess": number(entry.excess(task.optimum), True),
        "runs": entry.verdict.k_of_n, "close": entry.verdict.close,
        "alarm": bool(entry.verdict.alarms),
        "floor": number(floor - task.optimum, True) if apart and floor is not None else "",
        "unknown": floor is None,
        "bound": entry.verdict.kind == FAILS and not entry.floor.reached,
    }  # fmt: skip


def _evidence(found: Mechanisms, task: TaskResult, entry: Entry) -> dict[str, Any]:
    seen, verdict = entry.evidence, entry.verdict
    return {
        "task": task.name, "variant": entry.variant, "last": entry is task.entries[-1],
        "colour": palette.variable(found.looks[entry.variant].colour),
        "sign": SIGNS[verdict.kind][3], "verdict": KEYS[verdict.kind], "close": verdict.close,
        "goal": number(verdict.goal), "runs": verdict.k_of_n,
        "floor": "not known" if entry.floor.loss is None else number(entry.floor.loss),
        "bound": not entry.floor.reached, "information": entry.floor.information,
        "excess": number(entry.excess(task.optimum), True),
        "over_floor": number(entry.excess(entry.floor.loss), True),
        "best": number(seen.best), "median": number(seen.median), "worst": number(seen.worst),
        "rate": "–" if seen.rate is None else f"{seen.rate:g}",
        "at_rate": number(seen.at_rate.mean), "interval": span(seen.at_rate),
        "error": number(seen.error, digits=4), "diverged": seen.diverged,
        "unfinished": seen.unfinished,
    }  # fmt: skip


def _task(found: Mechanisms, task: TaskResult) -> dict[str, Any]:
    settings = (found.record.get("settings") or {}).get(task.name) or {}
    model, train = settings.get("model", {}), settings.get("train", {})
    evaluation = task.results.plan.get("evaluation") or {}
    entries = task.entries
    return {
        "name": task.name, "title": task.record.get("title", ""),
        "description": task.record.get("description", ""),
        "formula": task.record.get("formula", ""), "source": task.record.get("source", ""),
        "window": task.window, "steps": task.steps, "batch": train.get("batch_size"),
        "depth": model.get("depth"), "width": model.get("width"), "heads": model.get("heads"),
        "positions": model.get("positions"),
        "rates": listed(
            f"{r:g}" for r in sorted({o.rate for e in entries for o in e.outcomes})
        ),
        "seeds": len(task.results.seeds), "sequences": evaluation.get("windows"),
        "scored": evaluation.get("tokens"),
        "optima": [(level, number(value)) for level, value in task.record["optimum"].items()],
        "reasons": [
            {"variant": e.variant, "floor": number(e.floor.loss), "reached": e.floor.reached,
             "information": e.floor.information, "reason": e.floor.reason}
            for e in entries
        ],
    }  # fmt: skip


def _cost(found: Mechanisms) -> dict[str, float]:
    times = [run.time for task in found.tasks for run in task.results.runs]
    return {
        "runs": len(times), "train_s": sum(time.get("train_s", 0.0) for time in times),
        "compile_s": sum(time.get("compile_s", 0.0) for time in times),
    }  # fmt: skip


def headline(found: Mechanisms) -> str:
    """Return the table of verdicts and the answer as plain text."""
    rows = [["task", "optimum", *found.variants]]
    for task in found.tasks:
        row = [task.name, number(task.optimum)]
        for variant in found.variants:
            entry = task.entry(variant)
            row.append("-" if entry is None or entry.verdict.kind == NO_RUN else (
                f"{number(entry.excess(task.optimum), True)} {_LETTERS[entry.verdict.kind]}"
                f" {len(entry.verdict.within)}/{len(entry.verdict.counted)}"
                + ("!" if entry.verdict.alarms else "")
            ))  # fmt: skip
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(f.ljust(w) for f, w in zip(row, widths, strict=True)) for row in rows]
    key = (
        "mean final loss at the best rate minus the optimum (nats); C computes it, S sits at its"
        " own floor, U learns unreliably, F fails to learn, N no floor known; runs within the"
        " margin"
    )
    return "\n".join([line.rstrip() for line in lines] + ["", key])


_LETTERS = {COMPUTES: "C", AT_FLOOR: "S", UNRELIABLE: "U", FAILS: "F", NO_FLOOR: "N", NO_RUN: "-"}
