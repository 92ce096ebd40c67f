"""The page of a survey: what was found, in words and in figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.spectrum import data
from experiments.spectrum import profiles as survey_profiles
from experiments.spectrum import spectra as survey_spectra
from experiments.spectrum.data import Point, Survey
from normjax.reporting import html, palette, report
from normjax.reporting.drawing import Figure
from normjax.reporting.html import flat
from normjax.reporting.wording import listed

TEMPLATE = Path(__file__).with_name("page.html.j2")

ROUNDING = 1e-12
"""Identities are tested in float64: a defect above this is a fault of the instrument."""


def write(workdir: Path) -> tuple[Path, str]:
    """Write ``spectrum.csv``, figures and ``spectrum.html``; return the page and its answer.

    Raises:
        UserError: if the workdir holds no usable plan.
    """
    survey = data.read_survey(Path(workdir))
    page = report.write_page(
        Path(workdir), "spectrum", data.csv(survey), survey.record,
        lambda: figures(survey), lambda drawn: render(survey, drawn),
    )  # fmt: skip
    return page, report.wrapped([*warnings(survey), *findings(survey)])


def figures(survey: Survey) -> list[Figure]:
    """Return every figure that the survey allows, in the order of the page."""
    trained = sorted({p.step for p in survey.points if p.measured and p.main})
    made: list[Figure | None] = [
        survey_spectra.blocks(survey), survey_spectra.stacks(survey),
        survey_profiles.conditions(survey, 0), survey_profiles.gains(survey, 0),
        survey_profiles.depths(survey), survey_profiles.training(survey),
    ]  # fmt: skip
    if trained and trained[-1] > 0:
        made += [
            survey_profiles.conditions(survey, trained[-1]),
            survey_profiles.gains(survey, trained[-1]),
        ]
    made.append(survey_spectra.sequences(survey))
    return [figure for figure in made if figure is not None]


def render(survey: Survey, drawn: Sequence[tuple[Figure, str]]) -> str:
    """Return the page as one self-contained HTML text."""
    return html.render(
        TEMPLATE,
        title="How each placement passes a small change on",
        record=survey.record,
        said=findings(survey),
        warnings=warnings(survey),
        figures=[html.picture(figure, svg) for figure, svg in drawn],
        laws=_laws(survey),
        defects=_defects(survey),
        table=_table(survey),
        settings=flat(survey.record.get("config") or {}),
        machine=flat(survey.record.get("environment") or {}),
    )


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


def _initial(survey: Survey) -> dict[str, list[Point]]:
    found = {name: survey.main(name, 0) for name in survey.series}
    return {name: points for name, points in found.items() if points}


def _logs(points: Sequence[Point]) -> np.ndarray:
    return np.concatenate([p.log_deflated() for p in points])


def _of_stacks(survey: Survey) -> str:
    spreads = {
        name: float(np.median(_logs(points)[:, 0] - _logs(points)[:, -1]) / math.log(10))
        for name, points in _initial(survey).items()
    }
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
    known, silent = {}, []
    for name, points in _initial(survey).items():
        law = next((law for p in points if (law := p.law("stack")) is not None), None)
        if law is None or law[0]["distance"] is None:
            silent.append(name)
        else:
            first = next(p for p in points if p.law("stack") is not None)
            known[name] = (law[0]["distance"], 1.36 / math.sqrt(first.log_deflated().size))
    if not known:
        return ""
    inside = [name for name, (distance, level) in known.items() if distance <= level]
    outside = [f"{n} ({d:.2f})" for n, (d, level) in known.items() if d > level]
    level = next(iter(known.values()))[1]
    text = (
        "Random-matrix theory, from the weights and the size of the embedding alone, gives the"
        f" stack's spectrum for {listed(inside) or 'none of them'}: the largest difference of the"
        f" two distribution functions stays below {level:.3f}, what chance makes of so many values."
    )
    if outside:
        text += f" It is farther off for {listed(outside)}."
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
            spread = [
                float(
                    np.median(
                        _logs(survey.main(name, s))[:, 0] - _logs(survey.main(name, s))[:, -1]
                    )
                )
                for s in (steps[0], steps[-1])
            ]
            changes[name] = (spread[1] - spread[0]) / math.log(10)
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
        f"The identities that the placements obey exactly were tested {len(worst)} times over"
        f" placements; the worst is off by {max(v for *_, v in worst):.0e}, rounding."
    )


def _laws(survey: Survey) -> list[dict[str, Any]]:
    """Return one row per law: what was measured, what theory says, the assumption."""
    rows = []
    for name, points in _initial(survey).items():
        for point in points:
            for part in point.entry.get("laws", {}):
                record = point.entry["laws"][part]
                if part == "stack":
                    logs = point.log_deflated()
                else:
                    block = int(part.split()[1]) - 1
                    logs = np.log(point.arrays["deflated"][block, :, -1])
                rows.append({
                    "series": name, "part": part,
                    "colour": palette.variable(survey.looks[name].colour),
                    "measured": (_g(np.exp(logs.min())), _g(np.exp(logs.max()))),
                    "theory": _edges(record), "distance": record["distance"],
                    "assumption": record["assumption"],
                })  # fmt: skip
    return rows


def _edges(record: dict[str, Any]) -> tuple[str, str] | None:
    if record["log_high"] is None:
        return None
    low = record["log_low"]
    return ("0" if low is None else _g(math.exp(low)), _g(math.exp(record["log_high"])))


def _g(value: float) -> str:
    return f"{value:.4g}"


def _defects(survey: Survey) -> list[dict[str, Any]]:
    return [
        {"series": series, "name": name, "value": f"{value:.1e}", "good": value <= ROUNDING}
        for series, name, value in _worst_defects(survey)
    ]


def _table(survey: Survey) -> list[dict[str, Any]]:
    """Return one row per series and step looked at in full: the stack in numbers."""
    rows = []
    for name in survey.series:
        for step in survey.steps(name):
            points = survey.main(name, step)
            logs, raw = _logs(points), np.concatenate([p.arrays["log_raw"][:, -1] for p in points])
            rows.append({
                "series": name, "step": step, "depth": points[0].depth, "seeds": len(points),
                "colour": palette.variable(survey.looks[name].colour),
                "largest": _g(np.exp(np.median(logs[:, 0]))),
                "middle": _g(np.exp(np.median(logs))),
                "smallest": _g(np.exp(np.median(logs[:, -1]))),
                "condition": _g(np.exp(np.median(logs[:, 0] - logs[:, -1]))),
                "raw": _g(np.exp(min(700.0, np.median(raw[:, 0] - raw[:, -1])))),
                "rms": _g(np.sqrt(np.median([p.arrays["mean_square"][-1, :, -1] for p in points]))),
            })  # fmt: skip
    return rows
