"""The page of the experiment on mechanisms: the answer in words, the table, the evidence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from experiments.mechanisms import data, figures
from experiments.mechanisms.data import Entry, Mechanisms, Task
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
from normjax.reporting import html, palette, report
from normjax.reporting.drawing import Figure
from normjax.reporting.html import Page, Picture, Section, details, listing, muted, part, prose
from normjax.reporting.tables import Column, Table, dotted, facts, number, span, stacked, tag, view
from normjax.reporting.wording import capital, counted, listed

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
_LETTERS = {COMPUTES: "C", AT_FLOOR: "S", UNRELIABLE: "U", FAILS: "F", NO_FLOOR: "N", NO_RUN: "-"}
_STYLE = """
.verdicts { font-size: .82rem; }
.verdicts td { min-width: 6.1rem; }
.verdicts td b { font-size: .92rem; white-space: nowrap; }
.verdicts td small { white-space: normal; }
.sign { display: inline-block; min-width: 1.15em; font-weight: 700; }
tr.last td { border-bottom: 1.5px solid var(--muted); }
"""


def write(workdir: Path) -> tuple[Path, str, bool]:
    """Write ``mechanisms.csv``, figures and ``mechanisms.html``; return the page and its answer.

    Raises:
        UserError: if the workdir holds no usable plan.
    """
    found = data.read_mechanisms(Path(workdir))
    page = report.write_page(
        Path(workdir), "mechanisms", _evidence(found).csv(found.entries), found.record,
        lambda: figures.all_figures(found), lambda drawn: render(found, drawn),
    )  # fmt: skip
    broken = alarms(found)
    said = report.wrapped([*broken, *warnings(found), *answer(found)])
    return page, "\n".join([TITLE, "", _headline(found), "", said]), not broken


def render(found: Mechanisms, drawn: Sequence[tuple[Figure, str]]) -> str:
    """Return the page as one self-contained HTML text."""
    pictures = [html.picture(figure, svg) for figure, svg in drawn]
    broken, rule, record = alarms(found), found.rule, found.record
    times = [run.time for task in found.tasks for run in task.results.runs]
    train, compiling = (sum(t.get(k, 0.0) for t in times) for k in ("train_s", "compile_s"))
    return Page(
        TITLE,
        "On tasks whose least possible loss is known exactly: which parts of a decoder decide what"
        " it can compute, and which only how reliably it learns it?",
        alarms=["Something is wrong: do not use the numbers below.", *broken] if broken else [],
        warnings=warnings(found), answer=answer(found), details=_of_parts(found),
        sections=[
            _table(found, pictures[:1]), _separated(found), *html.figure_sections(pictures[1:]),
            Section("evidence", "The evidence, cell by cell", [
                muted(
                    "Goal: the optimum, or the variant’s floor where that is more than the margin"
                    " higher. Best, median, worst: over all finished runs. Interval: 95 %"
                    " t-interval over the seeds at the best rate. Error: the largest standard error"
                    " of one run’s final loss over the evaluation sample."
                ),
                _evidence(found)(found.entries),
            ], "The evidence"),
            Section("tasks", "The tasks and what each variant knows",
                    [_of_task(record, task) for task in found.tasks], "The tasks"),
        ],
        reading=html.reading(
            "<b>Optimum.</b> The least expected loss of any predictor that sees all earlier tokens"
            " in order, in nats per scored token. It is computed exactly from the law of the task,"
            " not estimated.",
            "<b>Floor.</b> The least expected loss for what a variant has access to. Where “a"
            " bound” is written, nobody has shown that decoders of the kind come close to it.",
            "<b>Within the margin.</b> A run counts as within {rule.margin:g} nats of its goal"
            " where its final loss plus {rule.errors:g} standard errors is. Its standard error"
            " comes from the evaluation sample: independent sequences, evaluated one by one. A"
            " verdict is “close” where minus instead of plus would give another.",
            "<b>Goal.</b> The optimum, or the floor where it lies more than the margin above the"
            " optimum.",
            "<b>Verdicts.</b> All runs within: computes it, or sits at its own floor. Some: learns"
            " unreliably, k of n. None: fails to learn. A run that diverged is not within; an"
            " unfinished one is not counted. Other seeds, rates, sizes or steps may give other"
            " verdicts, except where a decoder cannot compute more.",
            "<b>Self-test.</b> A final loss more than {rule.alarm:g} standard errors below its"
            " floor would mean that a floor or the evaluation is wrong, and would stand at the top"
            " of this page. So would a final loss that comes out differently when it is computed"
            " again.",
            rule=rule,
        ),
        record=html.record(
            str(record.get("command", "")), html.flat(record.get("environment") or {}),
            record.get("config"), before=[
                f"{counted(len(times), 'run')}; the sum of their training times is {train:.0f} s,"
                f" of compilation {compiling:.0f} s (runs that train side by side each count their"
                " own time)."
            ], notes=["Settings of single tasks stand with the tasks."],
        ),
        style=_STYLE,
    ).render()  # fmt: skip


# --- words ----------------------------------------------------------------------------------------


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
    """Say how many runs reach the optimum where the information for it is there."""
    reached: dict[str, int] = {}
    total: dict[str, int] = {}
    for entry in found.entries:
        if entry.verdict.goal <= entry.task.optimum + found.rule.margin and entry.verdict.counted:
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
    said = [f"{ACTIONS.get(v, v)} ({_names(each)})" for v, each in some.items() if each]
    if said:
        text += (
            f" Some runs but not all get there {listed(said)}: there the change decides how"
            " reliably the task is learned, not whether it can be computed."
        )
    return text


def _of(found: Mechanisms, variant: str) -> dict[str, list[Entry]]:
    """Return a variant on all tasks by verdict."""
    groups: dict[str, list[Entry]] = {}
    for entry in found.entries:
        if entry.variant == variant:
            groups.setdefault(entry.verdict.kind, []).append(entry)
    return groups


def _names(entries: Iterable[Entry]) -> str:
    return listed(entry.task.name for entry in entries)


def _counted(entries: Iterable[Entry]) -> str:
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
    groups: dict[str, list[str]] = {title: [] for title in _REASONS}
    for entry in found.entries:
        if title := _reason(entry):
            groups[title].append(_argument(entry))
    return groups


CANNOT, CAN, COULD, OPEN = (
    "Cannot compute", "Can compute, does not always learn", "Could compute, was not learned",
    "Not decided: above a bound that may be out of reach",
)  # fmt: skip
_REASONS = {
    CANNOT: "The information is not there. All runs sit at the exact loss of what is left, and no"
    " training can change that.",
    CAN: "One run within the margin proves that the goal is within reach of the decoder as it is."
    " The runs that miss it differ in seed or rate only: what is missing is learning.",
    COULD: "No run got there, but decoders of this kind, wide enough, come as close to the floor"
    " as one likes. More width, steps or other rates may change this verdict.",
    OPEN: "No run got there, and the floor is proven as a bound only: nobody has shown that"
    " decoders of this kind reach it. It takes other arguments to tell ability from learning.",
}  # fmt: skip


def _reason(entry: Entry) -> str:
    kind = entry.verdict.kind
    if kind in (FAILS, NO_FLOOR):
        return COULD if entry.floor.reached and kind == FAILS else OPEN
    return {AT_FLOOR: CANNOT, UNRELIABLE: CAN}.get(kind, "")


def _argument(entry: Entry) -> str:
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


def _level(entry: Entry) -> str:
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


# --- tables ---------------------------------------------------------------------------------------


def _headline(found: Mechanisms) -> str:
    """Return the table of verdicts as plain text."""

    def cell(task: Task, variant: str) -> str:
        entry = task.entry(variant)
        if entry is None or entry.verdict.kind == NO_RUN:
            return "-"
        verdict = entry.verdict
        return (
            f"{number(entry.excess(task.optimum), True)} {_LETTERS[verdict.kind]}"
            f" {len(verdict.within)}/{len(verdict.counted)}{'!' if verdict.alarms else ''}"
        )

    shown = [view(v, lambda task, v=v: cell(task, v)) for v in found.variants]
    key = (
        "mean final loss at the best rate minus the optimum (nats); C computes it, S sits at its"
        " own floor, U learns unreliably, F fails to learn, N no floor known; runs within the"
        " margin"
    )
    head = [view("task", lambda t: t.name), view("optimum", lambda t: number(t.optimum))]
    return "\n".join([Table([*head, *shown]).terminal(found.tasks), "", key])


def _table(found: Mechanisms, pictures: Sequence[Picture]) -> Section:
    """Return the section with the verdicts, as a picture and as text."""

    def cell(task: Task, variant: str) -> Markup | None:
        entry = task.entry(variant)
        if entry is None:
            return None
        verdict, excess = entry.verdict, number(entry.excess(task.optimum), True)
        more = {
            f"; floor {number(entry.apart, True)}": entry.apart is not None,
            "; floor not known": entry.floor.loss is None,
            "; above a bound": verdict.kind == FAILS and not entry.floor.reached,
        }
        return stacked(
            _sign(verdict.kind) + tag("b", excess)
            + (prose(" <b>(below its floor!)</b>") if verdict.alarms else ""),
            KEYS[verdict.kind] + (", close" if verdict.close else ""),
            f"{verdict.k_of_n} runs{''.join(text for text, true in more.items() if true)}",
        )  # fmt: skip

    shown = Table([
        view(prose("Task <small>optimum</small>"), lambda t: stacked(t.name, number(t.optimum))),
        *(view(name, lambda task, name=name: cell(task, name)) for name in found.variants),
    ], kind="stack verdicts")  # fmt: skip
    key = ((_sign(kind) + KEYS[kind], words) for kind, words in VERDICTS.items())
    return Section("table", "The table", [
        muted(
            "Mean final loss at the best learning rate minus the exact optimum, in nats per scored"
            " token; the verdict; how many runs, over all seeds and rates, came within {:g} nats of"
            " what they could reach. Floor: how far above the optimum the best lies that the"
            " variant’s information allows.", found.rule.margin,
        ),
        *pictures, muted("The same in text:"), shown(found.tasks), facts(key),
        muted('All numbers: <a href="mechanisms.csv">mechanisms.csv</a>, one row per task and'
              " variant."),
    ])  # fmt: skip


def _sign(kind: str) -> Markup:
    colour, _, _, sign = SIGNS[kind]
    return tag("span", sign, cls="sign", style=f"color: {palette.variable(colour)}")


def _separated(found: Mechanisms) -> Section:
    return Section("separated", "“Cannot compute” and “fails to learn”", [
        "A loss above the optimum has two possible reasons: the decoder lacks the information or"
        " the means, or training has not found what it could do. The exact floors tell them apart.",
        *(part(title, muted("{}", _REASONS[title]), listing(items, "None."))
          for title, items in separated(found).items()),
    ], "Computing and learning")  # fmt: skip


def _evidence(found: Mechanisms) -> Table:
    """Return the table of all that the verdicts rest on: a row for each task and variant."""

    def verdict(e: Entry) -> Markup:
        close = "close: the sampling error decides" if e.verdict.close else ""
        sign = tag("span", SIGNS[e.verdict.kind][3], cls="sign")
        return stacked(sign + KEYS[e.verdict.kind], close)

    def within(e: Entry) -> Markup:
        more = ((e.evidence.diverged, "diverged"), (e.evidence.unfinished, "not counted"))
        return stacked(e.verdict.k_of_n, *(f"{n} {word}" if n else "" for n, word in more))

    def over_floor(e: Entry) -> Markup:
        floor = "not known" if e.floor.loss is None else number(e.floor.loss)
        bound = "" if e.floor.reached else ", a bound"
        return stacked(number(e.excess(e.floor.loss), True), floor + bound)

    def at_rate(e: Entry) -> Markup:
        rate = "–" if e.evidence.rate is None else f"{e.evidence.rate:g}"
        return stacked(f"{number(e.evidence.at_rate.mean)} at {rate}", span(e.evidence.at_rate))

    def loss(name: str, title: str) -> Column:
        return Column(f"loss_{name}", lambda e: getattr(e.evidence, name), title,
                      lambda e: number(getattr(e.evidence, name)), "n")  # fmt: skip

    return Table([
        Column("task", lambda e: e.task.name, "Task", kind="name"),
        Column("variant", lambda e: e.variant, "Variant", kind="name",
               text=lambda e: dotted(found.looks[e.variant].colour, e.variant)),
        Column("verdict", lambda e: e.verdict.kind, "Verdict", verdict, "name"),
        Column("within", lambda e: len(e.verdict.within)),
        Column("runs", lambda e: len(e.verdict.counted)),
        Column("close", lambda e: int(e.verdict.close)),
        Column("goal", lambda e: e.verdict.goal, "Goal", lambda e: number(e.verdict.goal), "n"),
        view("Runs within", within, "n"),
        Column("optimum", lambda e: e.task.optimum),
        Column("floor", lambda e: e.floor.loss),
        Column("floor_information", lambda e: e.floor.information),
        Column("floor_reached", lambda e: int(e.floor.reached)),
        Column("excess_over_optimum", lambda e: e.excess(e.task.optimum), "Over optimum",
               lambda e: number(e.excess(e.task.optimum), True), "n"),
        Column("excess_over_floor", lambda e: e.excess(e.floor.loss),
               stacked("Over floor", "floor"), over_floor, "n"),
        Column("best_learning_rate", lambda e: e.evidence.rate),
        Column("loss_at_best_rate", lambda e: e.evidence.at_rate.mean),
        Column("loss_low", lambda e: e.evidence.at_rate.low),
        Column("loss_high", lambda e: e.evidence.at_rate.high),
        Column("seeds_at_best_rate", lambda e: e.evidence.at_rate.n),
        loss("best", "Best"), loss("median", "Median"), loss("worst", "Worst"),
        view(stacked("At the best rate", "interval"), at_rate, "n"),
        Column("standard_error", lambda e: e.evidence.error, "Error",
               lambda e: number(e.evidence.error, digits=4), "n"),
        Column("diverged", lambda e: e.evidence.diverged),
        Column("unfinished", lambda e: e.evidence.unfinished),
        Column("alarms", lambda e: len(e.verdict.alarms)),
        Column("unigram", lambda e: e.task.unigram),
        Column("parameters", lambda e: e.parameters),
        Column("steps", lambda e: e.task.steps),
        Column("window", lambda e: e.task.window),
    ], mark=lambda e: "last" if e is e.task.entries[-1] else "")  # fmt: skip


FLOORS = Table([
    view("Variant", lambda e: e.variant, "name"),
    view("Floor", lambda e: number(e.floor.loss), "n"),
    view("Information", lambda e: stacked(
        e.floor.information, "can be reached" if e.floor.reached else "a bound"), "name"),
    view("Why", lambda e: e.floor.reason, "words"),
])  # fmt: skip


def _of_task(plan: dict[str, Any], task: Task) -> Markup:
    """Return what a task is, what its runs had, and the floors of the variants."""
    settings = (plan.get("settings") or {}).get(task.name) or {}
    model, train = settings.get("model", {}), settings.get("train", {})
    evaluation, record = task.results.plan.get("evaluation") or {}, task.record
    rates = sorted({outcome.rate for entry in task.entries for outcome in entry.outcomes})
    optima = (f"{level} {number(value)}" for level, value in record["optimum"].items())
    return part(
        f"{task.name}: {record.get('title', '')}",
        tag("p", prose(
            '{} Least loss: <span class="equation">{}</span>. <span class="muted">{}.</span>',
            *(record.get(key, "") for key in ("description", "formula", "source")),
        )),
        muted(
            "Optimum by information: {}. {}, {} wide, {}, {} positions, window {}, {} of {},"
            " rates {}, {}; evaluated on {} sequences with {} scored tokens."
            ' <a href="{}/report.html">All of this task’s runs</a>.',
            ", ".join(optima), counted(model.get("depth"), "block"), model.get("width"),
            counted(model.get("heads"), "head"), model.get("positions"), task.window,
            counted(task.steps, "step"), counted(train.get("batch_size"), "sequence"),
            listed(f"{rate:g}" for rate in rates), counted(len(task.results.seeds), "seed"),
            evaluation.get("windows"), evaluation.get("tokens"), task.name,
        ),
        details("Floors and reasons", FLOORS(task.entries)), id=f"task-{task.name}",
    )  # fmt: skip
