"""The page of the stability map: the answers in sentences, each from numbers of the grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.stability import data
from experiments.stability import figures as stability_figures
from experiments.stability.data import (
    DIVERGES,
    EARLY,
    IS_STUCK,
    NEAR,
    OPEN,
    STUCK,
    TRAINS,
    Cell,
    Place,
    Predictor,
    Stability,
)
from normjax.reporting import explanations, html, palette, report, tables
from normjax.reporting.drawing import Figure
from normjax.reporting.html import flat
from normjax.reporting.palette import Look
from normjax.reporting.wording import counted, listed

TEMPLATE = Path(__file__).with_name("page.html.j2")

COLUMNS = (
    *("series", "depth", "warmup", "learning_rate", "loss", "loss_low", "loss_high"),
    *("trains", "stuck", "diverged", "unfinished", "runs", "verdict"),
)


def write(workdir: Path) -> tuple[Path, str]:
    """Write ``stability.csv``, figures and ``stability.html``; return the page and its answer.

    Raises:
        UserError: if the workdir holds no usable plan.
    """
    stability = data.read_stability(Path(workdir))
    found = data.predictors(stability)
    page = report.write_page(
        Path(workdir), "stability", csv(stability), stability.results.plan,
        lambda: figures(stability, found), lambda drawn: render(stability, found, drawn),
    )  # fmt: skip
    return page, report.wrapped(findings(stability, found))


def looks(stability: Stability) -> dict[str, Look]:
    """Return colour and marker by placement."""
    names = stability.series
    own = {}
    for series, colour in explanations.colours(stability.results).items():
        own |= {name: colour for name in names if series.startswith(f"{name}, ")}
    return palette.looks(names, names[0], own)


def figures(stability: Stability, found: Sequence[Predictor]) -> list[Figure]:
    """Return every figure that the grid allows."""
    shown = looks(stability)
    made = [
        stability_figures.region(stability), stability_figures.curves(stability, shown),
        stability_figures.sensitivity(stability, shown), stability_figures.predictors(found),
    ]  # fmt: skip
    return [figure for figure in made if figure is not None]


def csv(stability: Stability) -> str:
    """Return one row per cell: placement, depth, warm-up, rate."""
    rows = []
    for place in stability.places:
        for cell in stability.cells(place):
            if not cell.trials:
                continue
            loss = cell.loss
            counts = [cell.count(o) for o in (TRAINS, IS_STUCK, DIVERGES, OPEN)]
            states = [stability.verdicts.get(t.folder.name, {}).get("state") for t in cell.trials]
            verdict = "; ".join(dict.fromkeys(s for s in states if s))
            rows.append((*place, cell.rate, loss.mean, loss.low, loss.high, *counts,
                         len(cell.trials), verdict))  # fmt: skip
    return tables.csv_text(COLUMNS, rows)


def render(
    stability: Stability, found: Sequence[Predictor], drawn: Sequence[tuple[Figure, str]]
) -> str:
    """Return the page as one self-contained HTML text."""
    plan = stability.results.plan
    return html.render(
        TEMPLATE,
        plan=plan,
        said=findings(stability, found),
        figures=[html.picture(figure, svg) for figure, svg in drawn],
        table=_table(stability),
        verdicts=_verdicts(stability),
        predictors=found,
        unit=stability.results.unit,
        near=NEAR, stuck=STUCK, early=EARLY,
        settings=flat(plan.get("config") or {}),
    )  # fmt: skip


def findings(stability: Stability, found: Sequence[Predictor]) -> list[str]:
    """Return the answers in sentences."""
    said = [
        _open(stability), _residual_or_norm(stability), _without_norm(stability),
        _pre_or_post(stability), _sensitivity(stability), _judged(stability), _predicted(found),
    ]  # fmt: skip
    return [text for text in said if text]


def _open(stability: Stability) -> str:
    waiting = sum(t.outcome == OPEN for t in stability.trials)
    if not waiting:
        return ""
    return f"{waiting} of {len(stability.trials)} runs are not finished: what follows may change."


def _best_loss(stability: Stability, series: str, depth: int) -> float | None:
    """Return the lowest mean loss of a placement at a depth over rates and warm-ups."""
    cells = [stability.best(Place(series, depth, w)) for w in stability.values("warmup")]
    losses = [c.loss.mean for c in cells if c is not None and c.loss.mean is not None]
    return min(losses, default=None)


def _gap(stability: Stability, series: str, depth: int) -> float | None:
    own, base = _best_loss(stability, series, depth), _best_loss(stability, "pre", depth)
    return None if own is None or base is None else own - base


def _signed(value: float | None) -> str:
    return "no rate works" if value is None else tables.number(value, True, 2)


def _residual_or_norm(stability: Stability) -> str:
    if not {"pre", "none", "no-residual"} <= set(stability.series):
        return ""
    parts, more, less = [], [], []
    for depth in stability.values("depth"):
        residual = _gap(stability, "no-residual", depth)
        norm = _gap(stability, "none", depth)
        parts.append(f"{counted(depth, 'block')} {_signed(residual)} and {_signed(norm)}")
        if norm is not None:
            (more if residual is None or residual > norm else less).append(str(depth))
    text = (
        "Removing the residual path and removing every norm, each at its own best rate and warm-up,"
        f" cost against pre-norm, in nats: {listed(parts)}."
    )
    if more and not less:
        return text + " The residual path matters more at every depth here."
    if more:
        return text + (
            f" The residual path matters more at {listed(more)} blocks and not at {listed(less)}."
        )
    return text + " The residual path does not matter more at any depth here."


def _share(stability: Stability, series: str, depth: int) -> tuple[int, int]:
    cells = [
        c for w in stability.values("warmup") for c in stability.cells(Place(series, depth, w))
        if c.trials
    ]  # fmt: skip
    return sum(c.trains for c in cells), len(cells)


def _without_norm(stability: Stability) -> str:
    if not {"pre", "none"} <= set(stability.series):
        return ""
    parts = []
    for depth in stability.values("depth"):
        own, base = _share(stability, "none", depth), _share(stability, "pre", depth)
        parts.append(f"{counted(depth, 'block')} {own[0]} of {own[1]} (pre-norm {base[0]})")
    shallow = stability.values("depth")[0]
    gap = _gap(stability, "none", shallow)
    text = (
        "Without any norm a decoder trains in these numbers of cells of rate and warm-up:"
        f" {listed(parts)}."
    )
    if gap is None:
        return text
    word = "is not catastrophic" if gap < 0.5 else "is catastrophic even"
    return text + (
        f" At {counted(shallow, 'block')} and its best rate it ends {_signed(gap)} nats from"
        f" pre-norm: removing the norms {word} in a shallow model."
    )


def _pre_or_post(stability: Stability) -> str:
    if not {"pre", "post"} <= set(stability.series):
        return ""
    warmups = stability.values("warmup")
    parts = []
    for depth in stability.values("depth"):
        ranges = []
        for series in ("pre", "post"):
            for warmup in warmups:
                width = stability.working_range(Place(series, depth, warmup))
                ranges.append("none" if width is None else f"{width:.1f}")
        half = len(warmups)
        gap = _gap(stability, "post", depth)
        parts.append(
            f"{counted(depth, 'block')}: pre-norm {' / '.join(ranges[:half])}, post-norm"
            f" {' / '.join(ranges[half:])}, best losses {_signed(gap)} apart"
        )
    shown = " / ".join(f"warm-up {w}" if w else "no warm-up" for w in warmups)
    return (
        f"Pre-norm and post-norm: powers of ten of learning rate within {NEAR:g} nats of the best"
        f" ({shown}), and how far post-norm's best loss is from pre-norm's: {'; '.join(parts)}."
    )


def _sensitivity(stability: Stability) -> str:
    deepest = stability.values("depth")[-1]
    parts = []
    for warmup in stability.values("warmup"):
        places = [Place(series, deepest, warmup) for series in stability.series]
        values = [
            (stability.sensitivity(place).mean, place.series)
            for place in places
            if stability.working_range(place) is not None
        ]
        known = sorted((v, series) for v, series in values if v is not None)
        if known:
            ranked = listed(f"{s} {v:.2f}" for v, s in known)
            parts.append((f"warm-up {warmup}: " if warmup else "no warm-up: ") + ranked)
    if not parts:
        return ""
    return (
        f"Learning-rate sensitivity at {counted(deepest, 'block')}, in nats, from the most"
        f" forgiving on, of those that train at their best rate: {'; '.join(parts)}."
    )


def _judged(stability: Stability) -> str:
    """Say how the verdicts on the signals go with the outcomes."""
    counts: dict[str, list[int]] = {}
    for trial in stability.trials:
        state = str(stability.verdicts.get(trial.folder.name, {}).get("state", ""))
        if state and state != "unknown" and trial.outcome != OPEN:
            own = counts.setdefault(state, [0, 0])
            own[0] += trial.outcome == TRAINS
            own[1] += 1
    if not counts:
        return ""
    order = ("well behaved", "drifting", "unstable", "diverged")
    parts = [f"{counts[s][0]} of {counts[s][1]} {s}" for s in order if s in counts]
    return f"By the verdict on their signals, so many runs train: {listed(parts)}."


def _predicted(found: Sequence[Predictor]) -> str:
    signals = [p for p in found if p.when != "set by the grid"]
    if not signals:
        return ""
    best = signals[0]
    text = (
        f"Of the signals known early, {best.name} {best.when} orders the outcomes best: rank"
        f" correlation {tables.number(best.value, True, 2)}"
        f" ({tables.number(best.low, True, 2)} to {tables.number(best.high, True, 2)})."
    )
    rate = next((p for p in found if p.name == "learning rate"), None)
    if rate is not None:
        text += f" The learning rate alone gives {tables.number(rate.value, True, 2)}."
    inside = max(
        (p for p in signals if p.within is not None), key=lambda p: abs(p.within or 0), default=None
    )
    if inside is not None:
        text += (
            f" Among runs of one learning rate {inside.name} {inside.when} does best, with"
            f" {tables.number(inside.within, True, 2)} on average."
        )
    return text


def _table(stability: Stability) -> list[dict[str, Any]]:
    """Return one row per place: best rate, loss, range, sensitivity, counts."""
    shown = looks(stability)
    rows = []
    for place in sorted(stability.places, key=lambda p: (p.depth, p.warmup)):
        cells = stability.cells(place)
        best = stability.best(place)
        width, sensitivity = stability.working_range(place), stability.sensitivity(place)
        rows.append({
            "place": place, "colour": palette.variable(shown[place.series].colour),
            "best": best, "width": width, "sensitivity": sensitivity,
            "trains": sum(c.trains for c in cells), "cells": sum(bool(c.trials) for c in cells),
            "diverged": sum(c.count(DIVERGES) for c in cells),
            "stuck": sum(c.count(IS_STUCK) for c in cells),
            "verdicts": _states(stability, cells),
            "runs": sum(len(c.trials) for c in cells),
        })  # fmt: skip
    return rows


def _states(stability: Stability, cells: Sequence[Cell]) -> str:
    """Return the verdicts on the runs of some cells, counted."""
    states = [
        str(stability.verdicts.get(t.folder.name, {}).get("state", "not judged"))
        for c in cells
        for t in c.trials
    ]
    return ", ".join(f"{n} {state}" for state, n in Counter(states).most_common())


def _verdicts(stability: Stability) -> list[dict[str, Any]]:
    return [
        {"run": name, "state": str(v.get("state", "")), "sentence": str(v.get("sentence", ""))}
        for name, v in sorted(stability.verdicts.items())
    ]
