"""The page of the experiment on mechanisms: the answer in words, the table, the evidence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from experiments.mechanisms import answers, data, figures
from experiments.mechanisms.data import ArmOnTask, Mechanisms, Task
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
from normjax.reporting.wording import counted, listed

TITLE = "What each part of a decoder is needed for: computing or learning"

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
    broken = answers.alarms(found)
    said = report.wrapped([*broken, *answers.warnings(found), *answers.answer(found)])
    return page, "\n".join([TITLE, "", _headline(found), "", said]), not broken


def render(found: Mechanisms, drawn: Sequence[tuple[Figure, str]]) -> str:
    """Return the page as one self-contained HTML text."""
    pictures = [html.picture(figure, svg) for figure, svg in drawn]
    broken, rule, record = answers.alarms(found), found.rule, found.record
    times = [run.time for task in found.tasks for run in task.results.runs]
    train, compiling = (sum(t.get(k, 0.0) for t in times) for k in ("train_s", "compile_s"))
    return Page(
        TITLE,
        "On tasks whose least possible loss is known exactly: which parts of a decoder decide what"
        " it can compute, and which only how reliably it learns it?",
        alarms=["Something is wrong: do not use the numbers below.", *broken] if broken else [],
        warnings=answers.warnings(found), answer=answers.answer(found),
        details=answers.parts(found),
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
            " unreliably, k of n. None: not reached, for want of learning where it has been shown"
            " that the floor can be reached, else for one of two reasons that are not told apart. A"
            " run that diverged is not within; an unfinished one is not counted. Other seeds,"
            " rates, sizes or steps may give other verdicts, except where a decoder cannot compute"
            " more.",
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
        " own floor, U learns unreliably, F not reached, N no floor known; runs within the"
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
        *(part(title, muted("{}", answers.REASONS[title]), listing(items, "None."))
          for title, items in answers.separated(found).items()),
    ], "Computing and learning")  # fmt: skip


def _evidence(found: Mechanisms) -> Table:
    """Return the table of all that the verdicts rest on: a row for each task and variant."""

    def verdict(e: ArmOnTask) -> Markup:
        close = "close: the sampling error decides" if e.verdict.close else ""
        sign = tag("span", SIGNS[e.verdict.kind][3], cls="sign")
        return stacked(sign + KEYS[e.verdict.kind], close)

    def within(e: ArmOnTask) -> Markup:
        more = ((e.evidence.diverged, "diverged"), (e.evidence.unfinished, "not counted"))
        return stacked(e.verdict.k_of_n, *(f"{n} {word}" if n else "" for n, word in more))

    def over_floor(e: ArmOnTask) -> Markup:
        floor = "not known" if e.floor.loss is None else number(e.floor.loss)
        bound = "" if e.floor.reached else ", a bound"
        return stacked(number(e.excess(e.floor.loss), True), floor + bound)

    def at_rate(e: ArmOnTask) -> Markup:
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
