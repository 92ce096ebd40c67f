"""What the runs say, in sentences: what is wrong, what is missing, the answer, the arguments."""

from __future__ import annotations

from collections.abc import Iterable

from experiments.mechanisms.data import ArmOnTask, Mechanisms, Task
from experiments.mechanisms.verdicts import AT_FLOOR, COMPUTES, FAILS, NO_FLOOR, UNRELIABLE
from normjax.reporting.tables import number
from normjax.reporting.wording import capital, counted, listed

ACTIONS = {
    "full": "the full decoder", "no-attention": "without attention", "no-mlp": "without MLP",
    "no-positions": "without positions", "no-norm": "without norms",
    "no-residual": "without the residual path", "post-norm": "with the norm behind the addition",
}  # fmt: skip
PARTS = {
    "no-attention": "attention", "no-mlp": "the MLP", "no-positions": "positions",
    "no-norm": "norms", "no-residual": "the residual path", "post-norm": "the place of the norm",
}  # fmt: skip


def alarms(found: Mechanisms) -> list[str]:
    """Return what shows that a floor or the evaluation is wrong; empty where nothing does."""
    said = []
    for entry in found.entries:
        for outcome in entry.verdict.alarms:
            bound = entry.task.optimum if entry.floor.loss is None else entry.floor.loss
            assert outcome.loss is not None and outcome.error is not None
            below = bound - outcome.loss
            times = f"{below / outcome.error:.1f}" if outcome.error else "infinitely many"
            said.append(
                f"Run {outcome.run} of {entry.alone} ended at"
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
    if not any(entry.verdict.counted for entry in found.entries):
        return []
    said = [_of_computing(found), _of_learning(found), _of_full(found), _of_errors(found)]
    return [text for text in said if text]


def _of_computing(found: Mechanisms) -> str:
    """Say which parts decide what can be computed, of what the full decoder gets to."""
    held = {v: [e for e in _of(found, v).get(AT_FLOOR, []) if _reached(e.task)]
            for v in found.variants}  # fmt: skip
    said = [f"{PARTS.get(v, v)} ({_names(entries)})" for v, entries in held.items() if entries]
    if not said:
        return "No part that was removed is shown to decide what can be computed."
    return (
        f"What can be computed is decided by {listed(said)}: without it every run sits at the exact"
        " loss of the information that is left, whatever the seed and rate."
    )


def _reached(task: Task) -> bool:
    """Whether some run of the full decoder comes within the margin, where it is among them."""
    full = task.entry("full")
    return full is None or bool(full.verdict.within)


def _of_learning(found: Mechanisms) -> str:
    """Say how many runs reach the optimum where it is shown to be within reach.

    Where the information is there but nobody has shown that a decoder of the kind reaches it, a run
    that misses it tells nothing of learning: those are not counted.
    """
    reached: dict[str, int] = {}
    total: dict[str, int] = {}
    for entry in found.entries:
        shown = entry.floor.reached or bool(entry.verdict.within)
        near = entry.verdict.goal <= entry.task.optimum + found.rule.margin
        if near and shown and entry.verdict.counted:
            name = entry.variant
            reached[name] = reached.get(name, 0) + len(entry.verdict.within)
            total[name] = total.get(name, 0) + len(entry.verdict.counted)
    if not total:
        return ""
    listed_counts = listed(f"{name} {reached[name]} of {n}" for name, n in total.items())
    text = (
        "Where the optimum is shown to be within reach, by an argument or by a run, what is left"
        f" is learning; so many runs get there, over tasks, seeds and rates: {listed_counts}. The"
        " rates were chosen for the full decoder: a variant may do better at others."
    )
    some = {v: _of(found, v).get(UNRELIABLE, []) for v in found.variants if v != "full"}
    said = [f"{ACTIONS.get(v, v)} ({_names(each)})" for v, each in some.items() if each]
    if said:
        text += (
            f" Some runs but not all get there {listed(said)}: there the change decides how"
            " reliably the task is learned, not whether it can be computed."
        )
    return text


def _of(found: Mechanisms, variant: str) -> dict[str, list[ArmOnTask]]:
    """Return a variant on all tasks by verdict."""
    groups: dict[str, list[ArmOnTask]] = {}
    for entry in found.entries:
        if entry.variant == variant:
            groups.setdefault(entry.verdict.kind, []).append(entry)
    return groups


def _names(entries: Iterable[ArmOnTask]) -> str:
    return listed(entry.task.name for entry in entries)


def _counted(entries: Iterable[ArmOnTask]) -> str:
    return listed(f"{entry.task.name} ({entry.verdict.k_of_n} runs)" for entry in entries)


def _of_full(found: Mechanisms) -> str:
    groups = _of(found, "full")
    if not groups:
        return ""
    total, done = sum(map(len, groups.values())), len(groups.get(COMPUTES, []))
    text = f"The full decoder comes within {found.rule.margin:g} nats of the exact optimum "
    if done == total:
        every = f"all {total} tasks" if total > 1 else "the one task"
        text += f"on {every}, with every seed and rate."
    else:
        text += f"with every seed and rate on {done} of {counted(total, 'task')}."
    if UNRELIABLE in groups:
        text += f" Only some of its runs do on {_counted(groups[UNRELIABLE])}."
    if FAILS in groups:
        text += (
            f" None does on {_names(groups[FAILS])}: there these settings are too small, and what"
            " the other variants do says little."
        )
    return text


def parts(found: Mechanisms) -> list[str]:
    """Return a sentence for each variant: what it computes, learns, and does not."""
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
            proven = [entry for entry in groups.get(kind, []) if entry.floor.reached]
            bound = [entry for entry in groups.get(kind, []) if not entry.floor.reached]
            if proven:
                clauses.append(f"fails to learn {_names(proven)} though it could compute it")
            if bound:
                clauses.append(
                    f"stays above the bound on {_names(bound)}, which it fails to learn or cannot"
                    " compute"
                )
        if clauses:
            known = f"{capital(ACTIONS.get(variant, ''))} the decoder"
            subject = known if variant in ACTIONS else f"The variant {variant}"
            said.append(f"{subject} {'; it '.join(clauses)}.")
    return said


def _of_errors(found: Mechanisms) -> str:
    errors = [e.evidence.error for e in found.entries if e.evidence.error is not None]
    if not errors:
        return ""
    close = [entry.alone for entry in found.entries if entry.verdict.close]
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


def separated(found: Mechanisms) -> dict[str, list[str]]:
    """Return the cells by what keeps them from the optimum, with the evidence for each."""
    groups: dict[str, list[str]] = {title: [] for title in REASONS}
    for entry in found.entries:
        if title := _reason(entry):
            groups[title].append(_argument(entry))
    return groups


CANNOT, CAN, COULD, OPEN = (
    "Cannot compute", "Can compute, does not always learn", "Could compute, was not learned",
    "Not decided: above a bound that may be out of reach",
)  # fmt: skip
REASONS = {
    CANNOT: "The information is not there. All runs sit at the exact loss of what is left, and no"
    " training can change that.",
    CAN: "One run within the margin proves that the goal is within reach of the decoder as it is."
    " The runs that miss it differ in seed or rate only: what is missing is learning.",
    COULD: "No run got there, but decoders of this kind, wide enough, come as close to the floor"
    " as one likes. More width, steps or other rates may change this verdict.",
    OPEN: "No run got there, and the floor is proven as a bound only: nobody has shown that"
    " decoders of this kind reach it. It takes other arguments to tell ability from learning.",
}  # fmt: skip
"""What it means that a cell stands below a heading."""


def _reason(entry: ArmOnTask) -> str:
    kind = entry.verdict.kind
    if kind in (FAILS, NO_FLOOR):
        return COULD if entry.floor.reached and kind == FAILS else OPEN
    return {AT_FLOOR: CANNOT, UNRELIABLE: CAN}.get(kind, "")


def _argument(entry: ArmOnTask) -> str:
    verdict, seen, floor = entry.verdict, entry.evidence, entry.floor
    if verdict.kind == AT_FLOOR:
        return (
            f"{entry.alone}: {verdict.k_of_n} runs within {entry.task.rule.margin:g} of the floor"
            f" {number(floor.loss)} (best {number(seen.best)}, worst {number(seen.worst)});"
            f" the optimum is {number(entry.task.optimum)}. {floor.reason}"
        )
    lost = f" {seen.diverged} diverged." if seen.diverged else ""
    if verdict.kind == UNRELIABLE:
        rates = listed(f"{k} of {n} at rate {rate:g}" for rate, (k, n) in verdict.by_rate().items())
        return (
            f"{entry.alone}: {rates}. Best {number(seen.best)}, worst {number(seen.worst)},"
            f" goal {number(verdict.goal)}.{lost}"
        )
    best = None if seen.best is None else seen.best - verdict.goal
    return (
        f"{entry.alone}: none of {counted(len(verdict.counted), 'run')}; the best is"
        f" {number(best)} above {number(verdict.goal)}.{lost}{_level(entry)} {floor.reason}"
    )


def _level(entry: ArmOnTask) -> str:
    """Say which information's exact optimum the best run ends at, if it is one above the goal."""
    best, margin, optima = entry.evidence.best, entry.task.rule.margin, entry.task.record["optimum"]
    off = {
        name: abs(best - value) for name, value in optima.items()
        if best is not None and value is not None and value > entry.verdict.goal + margin
    }  # fmt: skip
    least = min(off.values(), default=margin)
    if least >= margin:
        return ""
    names = [name for name, distance in off.items() if distance <= least + 1e-9]
    value = number(optima[names[0]])
    if "nothing" in names:
        return f" That is {value}, what the best constant answer gives: nothing was learned."
    return f" That is {value}, the exact optimum of the information “{names[0]}”."
