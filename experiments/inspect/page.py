"""The page of ``inspect``: verdict, tables, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.inspect import findings
from experiments.inspect.findings import ByDepth
from experiments.inspect.setting import Inspect
from normjax.diagnostics.block_gains import BlockGains
from normjax.diagnostics.walk import MASSIVE, Walk
from normjax.reporting import drawing, html, pictures, tables
from normjax.reporting.drawing import Figure
from normjax.reporting.html import Page, Section
from normjax.reporting.palette import BLUE, GREEN, ORANGE, VERMILLION, Look
from normjax.reporting.pictures import Axis, Panel
from normjax.reporting.statistics import Estimate
from normjax.reporting.tables import Column, Table, facts

BRANCHES = {"attention": Look(BLUE, "o"), "mlp": Look(ORANGE, "s", (0, (5, 2)))}


def write(
    folder: Path, found: Any, seen: Walk, gains: Sequence[BlockGains], asked: Inspect, text: str,
    record: Mapping[str, str],
) -> tuple[Path, list[str]]:  # fmt: skip
    """Write ``inspect.html``, ``inspect.csv`` and ``outliers.csv``; return page and sentences."""
    numbers, loss = findings.by_depth(seen), findings.loss(seen)
    config = found.held.decoder.config
    said = findings.sentences(config, seen, numbers, gains)
    told = f"{pm(loss)} nats per token over {seen.losses.size} tokens."
    rows = _rows(seen, numbers, gains)
    tables.write_text(folder / "inspect.csv", _TABLE.csv(rows))
    outliers = seen.outliers()
    tables.write_text(folder / "outliers.csv", _OUTLIERS.csv(outliers))
    figures = [
        _stream(seen, numbers), _branches(seen, numbers), _back(numbers), *_attention(seen),
        *_gains(gains), _spread(numbers),
    ]  # fmt: skip
    shown = [html.picture(f, drawing.save(f, folder / "figures", record["Command"]))
             for f in figures]  # fmt: skip
    model = [
        ("Model", found.said), ("Placement", config.placement_row.title),
        ("Norm", config.norm_row.title),
        ("Size", f"{config.depth} blocks, {config.width} features, {config.heads} heads,"
                 f" vocabulary {found.held.decoder.vocabulary:,}"),
        ("Text", text),
        ("Tokens set apart", f"{int((~seen.ordinary).sum())} of {seen.ordinary.size}: their stream"
                             f" is more than {MASSIVE:g} times the median of their window"),
    ]  # fmt: skip
    page = Page(
        "Inside a model", "What does the stream do from block to block, and who does it?",
        answer=[told, *said[:2]], details=said[2:],
        sections=[
            Section("model", "Model and text", [facts(model)]),
            Section("outliers", "What stands out", [_OUTLIERS(outliers)]),
            *html.figure_sections(shown),
            Section("table", "By block", [_TABLE(rows)]),
        ],
        reading=html.reading(
            "<b>Intervals.</b> Student’s t over the windows of this one text, 95 %: they say how"
            " much another stretch of it would change a number, not another text.",
            "<b>Tokens set apart</b> enter no mean; their largest value is drawn beside it.",
            "<b>Counts</b> of sinks, narrow heads and idle branches use thresholds that are rules"
            " of thumb: {sink:.0%} on the first key, {narrow:.0%} of the largest entropy,"
            " {idle:.0%} of the stream. No band of healthy models is claimed on this page.",
            sink=findings.SINK, narrow=findings.NARROW, idle=findings.IDLE,
        ),
        record=html.record(
            record["Command"], [(k, v) for k, v in record.items() if k != "Command"]
        ),
    )  # fmt: skip
    written = tables.write_text(folder / "inspect.html", page.render())
    return written, [told, *said]


def pm(x: Estimate) -> str:
    """Return a mean with half its interval."""
    if x.mean is None:
        return "–"
    return f"{x.mean:.4g}" + (f" ± {x.half_width:.2g}" if x.half_width is not None else "")


# --- tables ---------------------------------------------------------------------------------------


def _rows(seen: Walk, numbers: ByDepth, gains: Sequence[BlockGains]) -> list[dict[str, Any]]:
    by_block = {g.block: g for g in gains}
    rows: list[dict[str, Any]] = [
        {"block": 0, "branch": "embedding", "size": numbers.size[0],
         "apart": numbers.apart and numbers.apart[0], "gradient": numbers.gradient[0]}
    ]  # fmt: skip
    last = seen.branches[-1][1]
    for i, (block, branch) in enumerate(seen.branches):
        own = by_block.get(block) if branch == last else None
        rows.append({
            "block": block, "branch": branch, "size": numbers.size[i + 1],
            "apart": numbers.apart and numbers.apart[i + 1], "written": numbers.written[i],
            "turned": numbers.turned[i], "gradient": numbers.gradient[i + 1],
            "similarity": numbers.similarity[i + 1], "directions": numbers.participation[i + 1],
            "top": own and float(own.top.values[0]), "bound": own and float(own.top.bounds[0]),
            "rr": own and own.radial.rr, "tt": own and own.radial.tt,
        })  # fmt: skip
    return rows


def _estimate(name: str, title: str) -> list[Column]:
    """Return a mean for readers, and mean and ends for the file."""

    def of(row: Mapping[str, Any], what: str) -> float | None:
        found = row.get(name)
        return None if found is None else getattr(found, what)

    return [
        Column(name, lambda row: of(row, "mean"), title,
               lambda row: pm(row[name]) if row.get(name) else None, "n"),
        Column(f"{name}_low", lambda row: of(row, "low")),
        Column(f"{name}_high", lambda row: of(row, "high")),
    ]  # fmt: skip


def _number(name: str, title: str | None) -> Column:
    return Column(
        name, lambda row: row.get(name), title,
        lambda row: None if row.get(name) is None else f"{row[name]:.4g}", "n",
    )  # fmt: skip


_TABLE = Table([
    Column("block", lambda row: row["block"], "Block", lambda row: str(row["block"]), "n"),
    Column("branch", lambda row: row["branch"], "After", lambda row: row["branch"]),
    *_estimate("size", "Rms of the stream"), _number("apart", "Largest set apart"),
    *_estimate("written", "Written / stream"), *_estimate("turned", "Cosine to the stream"),
    *_estimate("gradient", "Gradient / last"), *_estimate("similarity", "Cosine of two tokens"),
    _number("directions", "Directions"), _number("top", "Largest singular value"),
    _number("bound", None), _number("rr", "Radial gain"), _number("tt", "Gain across"),
])  # fmt: skip

_OUTLIERS = Table(
    [
        Column("window", lambda p: p[0].window + 1, "Window", lambda p: str(p[0].window + 1), "n"),
        Column("position", lambda p: p[0].position + 1, "Position",
               lambda p: str(p[0].position + 1), "n"),
        Column("feature", lambda p: p[0].feature, "Feature", lambda p: str(p[0].feature), "n"),
        Column("written_by", lambda p: findings.place(p[0]), "Written by"),
        Column("before", lambda p: p[0].before, "From", lambda p: f"{p[0].before:,.0f}", "n"),
        Column("after", lambda p: p[0].after, "To", lambda p: f"{p[0].after:,.0f}", "n"),
        Column("taken_by", lambda p: p[1] and findings.place(p[1]), "Taken away by"),
        Column("left", lambda p: p[1] and p[1].after, "Leaving",
               lambda p: p[1] and f"{p[1].after:,.0f}", "n"),
    ],
    empty="No token of this text stands out.",
)  # fmt: skip


# --- pictures -------------------------------------------------------------------------------------


def _points(values: Sequence[Estimate], name: str, start: float = 0.0) -> list[dict[str, Any]]:
    """Return rows at every half block: before the first sub-layer, after each."""
    return [
        {"variant": name, "x": start + i / 2, "y": v.mean, "low": v.low, "high": v.high}
        for i, v in enumerate(values) if v.mean is not None
    ]  # fmt: skip


def figure(
    name: str, title: str, caption: str, panels: Sequence[Panel], looks: Mapping[str, Look],
    y: Axis, columns: int = 1, height: float = 3.4,
) -> Figure:  # fmt: skip
    """Return lines over the blocks passed, with bands."""
    with drawing.style():
        canvas = pictures.lines(
            panels, looks, Axis("x", "blocks passed"), y, height=height, columns=columns,
            band=("low", "high"), small=False,
        )  # fmt: skip
    listed = [
        (panel.title, row["variant"], row["x"], row["y"], row.get("low"), row.get("high"))
        for panel in panels for row in panel.rows
    ]  # fmt: skip
    return Figure(name, title, caption, canvas, ("panel", "what", "x", "y", "low", "high"), listed)


def _stream(seen: Walk, numbers: ByDepth) -> Figure:
    rows = _points(numbers.size, "ordinary tokens")
    if numbers.apart:
        rows += [{"variant": "largest token set apart", "x": i / 2, "y": y, "low": None,
                  "high": None} for i, y in enumerate(numbers.apart)]  # fmt: skip
    looks = {"ordinary tokens": Look(BLUE, "o"), "largest token set apart": Look(VERMILLION, "x")}
    return figure(
        "stream", "The stream",
        "Root mean square of the stream before block 1 and after every sub-layer.",
        [Panel(rows, "rms of the stream")], looks, Axis("y", scale="log"),
    )  # fmt: skip


def _branches(seen: Walk, numbers: ByDepth) -> Figure:
    def of(values: Sequence[Estimate]) -> list[dict[str, Any]]:
        return [
            {"variant": branch, "x": block, "y": v.mean, "low": v.low, "high": v.high}
            for (block, branch), v in zip(seen.branches, values, strict=True)
        ]

    panels = [
        Panel(of(numbers.written), "written, over the stream", y=Axis("y", scale="log")),
        Panel(of(numbers.turned), "cosine of what is written to the stream", y=Axis("y")),
    ]
    return figure(
        "branches", "What attention and MLP write",
        "Left: how much each adds, over the stream it reads. Right: below zero it takes from the"
        " stream, above it adds along it.", panels, BRANCHES, Axis("y"), columns=2,
    )  # fmt: skip


def _back(numbers: ByDepth) -> Figure:
    return figure(
        "gradient", "The gradient's way back",
        "Rms over tokens of the derivative of the loss by the stream, over that at the end.",
        [Panel(_points(numbers.gradient, "gradient"), "gradient, over that at the end")],
        {"gradient": Look(GREEN, "o")}, Axis("y", scale="log"),
    )  # fmt: skip


def _spread(numbers: ByDepth) -> Figure:
    directions = [
        {"variant": "stream", "x": i / 2, "y": y, "low": None, "high": None}
        for i, y in enumerate(numbers.participation)
    ]
    panels = [
        Panel(_points(numbers.similarity, "stream"), "cosine of two tokens", y=Axis("y")),
        Panel(directions, "directions that share the size", y=Axis("y", scale="log")),
    ]
    return figure(
        "spread", "How tokens differ",
        "Ordinary tokens. Right: (sum of s²)² / sum of s⁴ of the singular values of all of them.",
        panels, {"stream": Look(BLUE, "o")}, Axis("y"), columns=2,
    )  # fmt: skip


def _attention(seen: Walk) -> list[Figure]:
    if not seen.attention:
        return []
    rows = []
    for key, title in (("first", "share of the first key"), ("entropy", "entropy, of the largest")):
        for block, heads in enumerate(seen.attention[key].mean(1), 1):
            rows += [(title, f"head {h + 1}", block, float(v)) for h, v in enumerate(heads)]
    panels = []
    for title in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[0] == title]
        drawn = []
        for word, of in (("median", np.median), ("largest", np.max), ("smallest", np.min)):
            blocks = sorted({row[2] for row in own})
            for b in blocks:
                value = float(of([r[3] for r in own if r[2] == b]))
                drawn.append({"variant": word, "x": b, "y": value, "low": None, "high": None})
        panels.append(Panel(drawn, title, y=Axis("y", limits=(0.0, 1.0))))
    looks = {"median": Look(BLUE, "o"), "largest": Look(ORANGE, "^", (0, (5, 2))),
             "smallest": Look(GREEN, "v", (0, (1, 1.5)))}  # fmt: skip
    drawn = figure(
        "attention", "Where attention goes",
        "Over the heads of a block. Left: what queries give to the first key on average. Right:"
        " 0 where a head looks at one key, 1 where at all alike. Every head is in the data.",
        panels, looks, Axis("y"), columns=2,
    )  # fmt: skip
    return [Figure(drawn.name, drawn.title, drawn.caption, drawn.canvas,
                   ("what", "head", "block", "value"), rows)]  # fmt: skip


def _gains(gains: Sequence[BlockGains]) -> list[Figure]:
    if not gains:
        return []
    rows = []
    for g in gains:
        error = 2 * g.radial.tt_error
        for name, y, low, high in (
            ("largest singular value", float(g.top.values[0]), None, None),
            ("random change across", g.radial.tt, g.radial.tt - error, g.radial.tt + error),
            ("change along the stream", abs(g.radial.rr), None, None),
        ):
            rows.append({"variant": name, "x": g.block, "y": y, "low": low, "high": high})
    looks = {"largest singular value": Look(VERMILLION, "^"),
             "random change across": Look(BLUE, "o"),
             "change along the stream": Look(GREEN, "s", (0, (5, 2)))}  # fmt: skip
    return [figure(
        "gains", "What a block does to a small change",
        "Of the Jacobian of each block over the first tokens of a window, those set apart held"
        " fixed. Across: root mean square over random changes, with two standard errors of its"
        " probes.", [Panel(rows, "gain of a block")], looks, Axis("y", scale="log"),
    )]  # fmt: skip
