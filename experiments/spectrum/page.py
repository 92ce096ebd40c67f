"""The page of a survey: what was found, in words and in figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.spectrum import data, figures
from experiments.spectrum.data import Survey, SurveyPoint, shown
from normjax.reporting import html, report, tables
from normjax.reporting.drawing import Figure
from normjax.reporting.html import Page, Section, details, muted
from normjax.reporting.tables import Table, dotted, number, stacked, view
from normjax.reporting.wording import counted, listed

ROUNDING = 1e-12
"""Identities are tested in float64: a defect above this is a fault of the instrument."""


def write(workdir: Path) -> tuple[Path, str]:
    """Write ``spectrum.csv``, figures and ``spectrum.html``; return the page and its answer.

    Raises:
        UserError: if the workdir holds no usable plan.
    """
    survey = data.read_survey(Path(workdir))
    rows = data.rows(survey)
    page = report.write_page(
        Path(workdir), "spectrum",
        tables.csv_text(list(rows[0]) if rows else (), [list(row.values()) for row in rows]),
        survey.record, lambda: figures.all_figures(survey), lambda drawn: render(survey, drawn),
    )  # fmt: skip
    return page, report.wrapped([*warnings(survey), *findings(survey)])


def render(survey: Survey, drawn: Sequence[tuple[Figure, str]]) -> str:
    """Return the page as one self-contained HTML text."""
    record = survey.record
    corpus, positions = record["corpus"], " and ".join(str(p) for p in record["positions"])
    files = corpus.get("files")
    text = html.prose(
        "{} <code>{}</code>{}, {} of {} tokens, at tokens {}", corpus["name"],
        corpus["fingerprint"][:16], f" (files: {files['words']})" if files else "",
        counted(record["sequences"], "sequence"), record["tokens"], positions,
    )  # fmt: skip
    return Page(
        "How each placement passes a small change on",
        "What are the singular values of the blocks of a decoder, and of all of them in a row, for"
        " each placement of the norm? What happens to a small change along the residual stream, and"
        " to one across it?",
        warnings=warnings(survey), answer=findings(survey), no_answer="Nothing could be measured.",
        sections=[
            Section("stack", "The stack in numbers", [
                muted(
                    "From the first block to the last, at the last token; medians over sequences"
                    " and seeds. Largest, middle, smallest and condition number without the radial"
                    " direction."
                ),
                _stacks(survey),
                muted('All numbers, block by block: <a href="spectrum.csv">spectrum.csv</a>; all'
                      ' singular values: <a href="spectra.npz">spectra.npz</a>, described by'
                      ' <a href="survey.json">survey.json</a>.'),
            ]),
            *html.figure_sections(html.picture(figure, svg) for figure, svg in drawn),
            Section("theory", "Theory beside measurement", [
                "For independent weights and a wide decoder the Jacobian of a sub-layer is a"
                " multiple of the identity plus a random matrix whose size follows from the"
                " weights, and products of such matrices have a known law. Distance: the largest"
                " difference between the two distribution functions; by chance: below it lie 95 %"
                " of matrices drawn from the law itself.",
                _laws(survey),
            ], "Theory"),
            Section("instrument", "The instrument", [
                "Some placements obey identities for any weights. They cost nothing to test and"
                " would show a wrong derivative at once. Numbers are relative, in float64, the"
                " worst of all tokens, of the first and the last block and of all steps.",
                DEFECTS(_worst_defects(survey)),
            ]),
        ],
        reading=html.reading(
            "<b>Jacobian.</b> The matrix of the derivatives of one token's stream after a block, or"
            " after all of them, with respect to that token's stream before, the other tokens held"
            " fixed. Its <b>singular values</b> are the factors by which it stretches small"
            " changes.",
            "<b>Radial and tangential.</b> h = r u: a radial change goes along u and changes the"
            " length r; a tangential one is orthogonal to u and changes the direction. A norm's"
            " Jacobian is diag(g)/s (I − u uᵀ) but for ε/s² of the radial part.",
            "<b>Raw and deflated.</b> A norm on the stream makes one singular value as small as ε:"
            " the raw condition number then is s²/ε whatever the network does. Deflated spectra"
            " leave the radial direction out on both sides.",
            "<b>Stack.</b> The product of the blocks' Jacobians. Its singular values are computed"
            " without ever forming the product and are right over hundreds of orders of magnitude;"
            " sums of the blocks' logarithms are not the same thing.",
            "<b>What varies.</b> Sequences, positions and seeds, where there are several; no"
            " interval is given for a single run, and none says anything of other sizes or texts.",
        ),
        record=html.record(
            record["command"], [("Text", text), *html.flat(record.get("environment") or {})],
            record.get("config"), title="What was measured",
        ),
    ).render()  # fmt: skip


# --- tables ---------------------------------------------------------------------------------------


class Stack(NamedTuple):
    """The points of a series at a step, and the log singular values of their stacks."""

    series: str
    points: list[SurveyPoint]
    logs: np.ndarray
    raw: np.ndarray


def _stacks(survey: Survey) -> str:
    """Return a row per series and step looked at in full: the stack in numbers."""
    rows = []
    for name in survey.series:
        for step in survey.steps(name):
            points = survey.main(name, step)
            raw = np.concatenate([p.arrays["log_raw"][:, -1] for p in points])
            rows.append(Stack(name, points, _logs(points), raw))

    def condition(row: Stack) -> str:
        return stacked(*(
            shown(float(np.median(logs[:, 0] - logs[:, -1]))) for logs in (row.logs, row.raw)
        ))  # fmt: skip

    def size(row: Stack) -> float:
        return np.sqrt(np.median([p.arrays["mean_square"][-1, :, -1] for p in row.points]))

    return Table([
        view("Series", lambda row: dotted(survey.looks[row.series].colour, row.series), "name"),
        view("Step", lambda row: row.points[0].step, "n"),
        view("Blocks", lambda row: row.points[0].depth, "n"),
        view("Largest", lambda row: shown(float(np.median(row.logs[:, 0]))), "n"),
        view("Middle", lambda row: shown(float(np.median(row.logs))), "n"),
        view("Smallest", lambda row: shown(float(np.median(row.logs[:, -1]))), "n"),
        view(stacked("Condition", "raw"), condition, "n"),
        view("RMS of the stream after", lambda row: _g(size(row)), "n"),
    ])(rows)  # fmt: skip


def _laws(survey: Survey) -> str:
    """Return a row per law: what was measured, what theory says, the assumption."""
    rows = [
        (point, part, law) for points in _initial(survey).values() for point in points
        for part, law in point.entry.get("laws", {}).items()
    ]  # fmt: skip

    def measured(row: tuple[SurveyPoint, str, dict[str, Any]]) -> str:
        logs = row[0].logs(row[1])
        return f"{shown(float(logs.min()))} to {shown(float(logs.max()))}"

    def theory(row: tuple[SurveyPoint, str, dict[str, Any]]) -> str | None:
        low, high = row[2]["log_low"], row[2]["log_high"]
        if high is None:
            return None
        return f"{'0' if low is None else shown(low)} to {shown(high)}"

    def distance(row: tuple[SurveyPoint, str, dict[str, Any]]) -> str:
        return stacked(number(row[2]["distance"]), number(row[2]["level"]))

    def broken(row: tuple[SurveyPoint, str, dict[str, Any]]) -> str:
        said = row[2]["broken"]
        return details(listed(said), "; ".join(said.values())) if said else "–"

    def assumed(row: tuple[SurveyPoint, str, dict[str, Any]]) -> str:
        return details(f"{row[2]['assumption'][:40]}…", row[2]["assumption"])

    return Table([
        view("Series", lambda r: dotted(survey.looks[r[0].series].colour, r[0].series), "name"),
        view("Part", lambda r: r[1], "name"),
        view("Measured, from and to", measured, "name"),
        view("Theory", theory, "name"),
        view(stacked("Distance", "by chance"), distance, "n"),
        view("Conditions that do not hold", broken, "words"),
        view("Assumed, or why there is no law", assumed, "words"),
    ])(rows)  # fmt: skip


DEFECTS = Table([
    view("Series", lambda row: row[0], "name"),
    view("Identity", lambda row: row[1], "words"),
    view("Off by", lambda row: f"{row[2]:.1e}{' (a fault)' * (row[2] > ROUNDING)}", "n"),
], empty="None of the series obeys one.")  # fmt: skip


def _g(value: float) -> str:
    return f"{value:.4g}"


# --- words ----------------------------------------------------------------------------------------


def warnings(survey: Survey) -> list[str]:
    """Return what the reader must know before anything else."""
    said = [
        f"{p.series}, seed {p.seed}, step {p.step}: not measured: {p.failed}"
        for p in survey.points if not p.measured
    ]  # fmt: skip
    return said + [
        f"A fault of the instrument: {name} is off by {value:.1e} for {series}."
        for series, name, value in _worst_defects(survey)
        if value > ROUNDING
    ]


def findings(survey: Survey) -> list[str]:
    """Return the answer in sentences, each from numbers of the survey."""
    return [
        sentence
        for sentence in (
            _of_stacks(survey), _of_radial(survey), _of_theory(survey), _of_depth(survey),
            _of_training(survey), _of_instrument(survey),
        )
        if sentence
    ]  # fmt: skip


def _initial(survey: Survey) -> dict[str, list[SurveyPoint]]:
    found = {name: survey.main(name, 0) for name in survey.series}
    return {name: points for name, points in found.items() if points}


def _logs(points: Sequence[SurveyPoint]) -> np.ndarray:
    return np.concatenate([p.log_deflated() for p in points])


def _span(points: Sequence[SurveyPoint]) -> float:
    """Return the powers of ten from the smallest to the largest singular value of the stack."""
    logs = _logs(points)
    return float(np.median(logs[:, 0] - logs[:, -1]) / math.log(10))


def _of_stacks(survey: Survey) -> str:
    spreads = {name: _span(points) for name, points in _initial(survey).items()}
    if not spreads:
        return ""
    ranked = sorted(spreads.items(), key=lambda pair: pair[1])
    depth = next(iter(_initial(survey).values()))[0].depth
    shown = listed(f"{name} {value:.2f}" for name, value in ranked)
    return (
        f"At initialization, from block 1 to block {depth} and without the radial direction, the"
        f" singular values of one token span this many powers of ten: {shown}."
    )


def _of_radial(survey: Survey) -> str:
    values = {
        name: float(np.median([np.median(p.arrays["gains/rr"][..., -1]) for p in points]))
        for name, points in _initial(survey).items()
    }
    removed = [name for name, value in values.items() if abs(value) < 1e-2]
    kept = [name for name, value in values.items() if abs(value - 1) < 0.15]
    text = ""
    if kept:
        text += f"A change along the stream passes a block unchanged, within 15 %: {listed(kept)}. "
    if removed:
        text += f"It is removed to less than 1 %: {listed(removed)}."
    return text.strip()


def _of_theory(survey: Survey) -> str:
    inside, outside, silent, broken = [], [], [], []
    for name, points in _initial(survey).items():
        law = next((law for p in points if (law := p.law("stack")) is not None), None)
        if law is None or law[0]["distance"] is None or law[0]["level"] is None:
            silent.append(name)
            continue
        distance, level = law[0]["distance"], law[0]["level"]
        near = distance <= level
        (inside if near else outside).append(f"{name} ({distance:.2f} of {level:.2f})")
        if "weights" in law[0]["broken"]:
            broken.append(name)
    if not inside + outside:
        return ""
    text = (
        "Random-matrix theory, from the weights and the size of the embedding and, where a norm"
        " follows a branch, of the branch's output, gives the stack's spectrum for"
        f" {listed(inside) or 'none of them'}: the largest difference of the two distribution"
        " functions stays below the one of 95 % of matrices drawn from the law itself."
    )
    if outside:
        text += f" It is farther off for {listed(outside)}."
    if broken:
        text += (
            f" The weights of {listed(broken)} are not as it assumes (independent, without"
            " preferred direction): it says nothing of them, near or not."
        )
    if silent:
        text += f" It has no law for {listed(silent)}; the table says why."
    return text


def _of_depth(survey: Survey) -> str:
    growth = {}
    for name in survey.series:
        by_depth = survey.initialized(name)
        if len(by_depth) > 1:
            first, last = list(by_depth)[0], list(by_depth)[-1]
            tops = [float(np.median(_logs(by_depth[d])[:, 0])) for d in (first, last)]
            growth[name] = (first, last, math.exp(tops[1] - tops[0]))
    if not growth:
        return ""
    first, last, _ = next(iter(growth.values()))
    ranked = sorted(growth.items(), key=lambda pair: pair[1][2])
    shown = listed(f"{name} {value:.3g}" for name, (_, _, value) in ranked)
    return f"From {first} to {last} blocks the stack's largest singular value grows by: {shown}."


def _of_training(survey: Survey) -> str:
    changes = {}
    for name in survey.series:
        steps = survey.steps(name)
        if len(steps) > 1:
            first, last = (_span(survey.main(name, step)) for step in (steps[0], steps[-1]))
            changes[name] = last - first
    if not changes:
        return ""
    ranked = sorted(changes.items(), key=lambda pair: pair[1])
    shown = listed(f"{name} {value:+.2f}".replace("-", "−") for name, value in ranked)
    return f"Training changes the span of the stack's spectrum, in powers of ten, by: {shown}."


def _worst_defects(survey: Survey) -> list[tuple[str, str, float]]:
    worst: dict[tuple[str, str], float] = {}
    for point in survey.points:
        for name, value in point.entry.get("defects", {}).items():
            key = (point.series, name)
            worst[key] = max(worst.get(key, 0.0), math.inf if value is None else value)
    return [(*key, value) for key, value in worst.items()]


def _of_instrument(survey: Survey) -> str:
    worst = _worst_defects(survey)
    if not worst:
        return ""
    return (
        "The identities that the placements obey exactly were tested"
        f" {counted(len(worst), 'time')} over placements; the worst is off by"
        f" {max(v for *_, v in worst):.0e}, rounding."
    )
