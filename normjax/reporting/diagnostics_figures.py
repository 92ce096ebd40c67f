"""Figures of diagnostics as lines: layer profiles, and autopsies of diverged runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from normjax.diagnostics import autopsy_record, definitions, verdict
from normjax.diagnostics.autopsy_record import Autopsy
from normjax.diagnostics.events import Event
from normjax.diagnostics.evidence import Series
from normjax.reporting import drawing, pictures
from normjax.reporting.diagnostics_data import Diagnostics, short_title, tidy
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, VERMILLION, Look
from normjax.reporting.pictures import Axis, Panel, Row
from normjax.reporting.results import DIVERGED, Results

_COLUMNS, _AUTOPSIES = 4, 6
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (5, 1.5, 1, 1.5)))


# --- profiles -------------------------------------------------------------------------------------

_KINDS = {
    "": ("layers", "Diagnostics over the blocks"), "norm": ("gains", "Gains over the blocks"),
    "parameter": ("parameters", "Gradients and updates over the blocks"),
}  # fmt: skip


def profiles(results: Results, diagnostics: Diagnostics, looks: Mapping[str, Look]) -> list[Figure]:
    """Return profiles of the stream and branches, and of parameters and norms, first and last."""
    made = [
        _profile(results, diagnostics, looks, each, when, index)
        for each in _KINDS
        for when, index in (("first", 0), ("last", -1))
    ]
    return [figure for figure in made if figure is not None]


def _profile(
    results: Results,
    diagnostics: Diagnostics,
    looks: Mapping[str, Look],
    each: str,
    when: str,
    index: int,
) -> Figure | None:
    found = {
        name: _profile_rows(results, diagnostics, name, index) for name in diagnostics.names(each)
    }
    found = {name: rows for name, rows in found.items() if rows}
    rows = [row for own in found.values() for row in own]
    if not rows:
        return None
    steady = {v.label for v in results.variants if not v.count(DIVERGED)}
    panels = [
        Panel(own, _profile_title(name), y=Axis("median", "", definitions.diagnostic(name).scale,
              _profile_window(own, steady, definitions.diagnostic(name).scale == "log")))
        for name, own in found.items()
    ]  # fmt: skip
    deepest = max(row["block"] for row in rows)
    ticks = range(1, int(deepest) + 1, max(1, math.ceil(int(deepest) / 5)))
    own, key = _told_apart(results, {row["variant"] for row in rows}, looks)
    canvas = pictures.lines(
        panels, own, Axis("block", "block", limits=(0.7, deepest + 0.3), ticks=ticks),
        Axis("median"), height=0.95 + 1.5 * math.ceil(len(panels) / _COLUMNS), columns=_COLUMNS,
        small=True, key=key,
    )  # fmt: skip
    kind, title = _KINDS[each]
    return drawing.figure(
        f"profiles_{kind}_{when}", f"{title}, {when} measured step",
        f"Every variant at its {when} measured step, median over seeds; what is not finite is left "
        "out. The attention sub-layer of a block stands at its number, its MLP half a block later. "
        "Of heads the largest, of their entropies the smallest. One colour per series; a line that "
        "leaves its panel is of a variant with a diverged run.",
        canvas, rows,
    )  # fmt: skip


def _profile_rows(results: Results, diagnostics: Diagnostics, name: str, index: int) -> list[Row]:
    log = definitions.diagnostic(name).scale == "log"
    return [
        {"variant": row["variant"], "diagnostic": name, "step": row["step"],
         "block": row["block"] + (0.5 if row["sublayer"] == "mlp" else 0.0),
         "median": row["median"]}
        for rows in tidy(results, diagnostics, name).values() for row in rows
        if row["step"] == rows[index]["step"]
        and math.isfinite(row["median"]) and (row["median"] > 0 or not log)
    ]  # fmt: skip


def _told_apart(
    results: Results, shown: set[str], looks: Mapping[str, Look]
) -> tuple[dict[str, Look], list[tuple[str, Look]]]:
    """Return looks by variant and a key: series have colours, what else varies has dashes."""
    panels = {k: _DASHES[i % len(_DASHES)] for i, k in enumerate(results.panels())}
    variants = [v for v in results.variants if v.label in shown]
    used = {v.arm.series for v in variants}
    key = [(name, looks[name]) for name in results.series if name in used]
    if len(panels) == 1:
        return {v.label: looks[v.arm.series] for v in variants}, key
    key += [(results.panel_title(k), Look(MUTED, "", dash)) for k, dash in panels.items()]
    return {
        v.label: dataclasses.replace(looks[v.arm.series], dash=panels[results.panel_key(v)])
        for v in variants
    }, key


def _profile_title(name: str) -> str:
    part = definitions.split(name)[1].replace("attention.", "attn.").replace(".branch", "")
    return short_title(name) + (f"\n{part}" if part else "")


def _profile_window(rows: Sequence[Row], steady: set[str], log: bool) -> tuple[float, float] | None:
    """Return limits for the variants without a diverged run where others would flatten them."""
    every = [row["median"] for row in rows]
    calm = [row["median"] for row in rows if row["variant"] in steady]
    low, high = min(calm, default=0.0), max(calm, default=0.0)
    if high <= low:
        return None
    if log:
        margin = (high / low) ** 0.1
        far = max(every) / min(every) > 30 * high / low
        return (low / margin, high * margin) if far else None
    margin = 0.1 * (high - low)
    return (low - margin, high + margin) if max(every) - min(every) > 100 * margin else None


# --- autopsies ------------------------------------------------------------------------------------

_LOOKS = [
    Look(colour, marker) for colour, marker in zip(
        (VERMILLION, BLUE, GREEN, ORANGE, PURPLE, INK), ("o", "s", "^", "D", "v", "P"), strict=True
    )
]  # fmt: skip


def autopsies(diagnostics: Diagnostics) -> list[Figure]:
    """Return the figures of the first autopsies in which a diagnostic moved."""
    made = [_autopsy(run, *each) for run, each in list(diagnostics.autopsies.items())[:_AUTOPSIES]]
    return [figure for figure in made if figure is not None]


def _autopsy(run_id: str, autopsy: Autopsy, series: dict[str, Series]) -> Figure | None:
    rows, names = [], {}
    for event in autopsy_record.leading(autopsy, len(_LOOKS)):
        if event.diagnostic in series:
            own = _ratios(event, series[event.diagnostic], autopsy.bad_step)
            rows += own
            names |= {event.diagnostic: _name(event)} if own else {}
    if not rows:
        return None
    width = 0.02 * max(autopsy.last - autopsy.first, 1)
    canvas = pictures.lines(
        [Panel([{**row, "name": names[row["diagnostic"]]} for row in rows])],
        dict(zip(names.values(), _LOOKS, strict=False)),
        Axis("step", "step", "steps", (autopsy.first - width, autopsy.last + width),
             marks=[(autopsy.bad_step, "")]),
        Axis("times_baseline", "times its baseline", "log"),
        height=2.2 + 0.3 * len(names), series="name",
    )  # fmt: skip
    caption = (
        "The diagnostics that moved first, each at the place where it moved first, over its own "
        "median at the beginning of the measured steps; named in the order in which they moved. "
        f"Dotted: step {autopsy.bad_step}, the first whose result was not finite. A line ends "
        "where its numbers do, or where they reach 0."
    )
    return drawing.figure(f"autopsy_{run_id}", f"Autopsy of {run_id}", caption, canvas, rows)


def _name(event: Event) -> str:
    place = verdict.where(event).replace("block ", "b").replace("attention", "attn")
    title = short_title(event.diagnostic)
    return f"{event.step}: {title}" + (f", {place.replace(', ', ' ')}" if place else "")


def _ratios(event: Event, series: Series, bad_step: int) -> list[Row]:
    """Return the ratios to the baseline at an event's place, where those are above 0."""
    ratio = autopsy_record.over_baseline(series, bad_step)
    own = ratio[:, _column(event, series) if ratio.shape[1] > 1 else 0]
    return [
        {"diagnostic": event.diagnostic, "place": verdict.where(event), "step": int(step),
         "times_baseline": float(value)}
        for step, value in zip(series.steps, own, strict=True) if math.isfinite(value) and value > 0
    ]  # fmt: skip


def _column(event: Event, series: Series) -> int:
    """Return the flat index of an event's place."""
    shape, index = series.values.shape[1:], []
    for axis, size in zip(definitions.diagnostic(event.diagnostic).axes, shape, strict=False):
        if axis == "sublayer":
            at = definitions.SUBLAYER_ORDER.index(event.sublayer or "attention")
            index.append(min(at, size - 1))
        else:
            index.append((getattr(event, axis) or 1) - 1)
    return int(np.ravel_multi_index(tuple(index), shape))
