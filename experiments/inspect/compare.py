"""Two models side by side: their streams, and where they differ on the same windows.

A difference is that of two numbers of one window, or the logarithm of their ratio, and its interval
is over windows. Models that do not take the same tokens, or that have other blocks, are drawn side
by side without differences.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.inspect import findings
from experiments.inspect.page import figure, pm
from normjax.diagnostics.walk import Walk
from normjax.reporting import drawing, html, tables
from normjax.reporting.drawing import Figure
from normjax.reporting.html import Page, Section
from normjax.reporting.palette import BLUE, ORANGE, Look
from normjax.reporting.pictures import Axis, Panel
from normjax.reporting.statistics import Estimate, estimate
from normjax.reporting.tables import Column, Table, facts

LOOKS = (Look(BLUE, "o"), Look(ORANGE, "s", (0, (5, 2))))
RATIOS = {"size": "Rms of the stream", "written": "Written / stream", "gradient": "Gradient / last"}
"""What is compared by its ratio, with words for it; the cosines by their difference."""
DIFFERENCES = {"turned": "Cosine to the stream", "similarity": "Cosine of two tokens"}


@dataclasses.dataclass(frozen=True)
class One:
    """A model, what it is called here, and what was seen of it."""

    name: str
    found: Any
    seen: Walk

    @property
    def shape(self) -> tuple[Any, ...]:
        """What two models must share for their blocks to be compared one by one."""
        return self.seen.branches, self.seen.losses.shape


def write(
    folder: Path, pair: Sequence[One], same_tokens: bool, text: str, record: Mapping[str, str]
) -> tuple[Path, list[str]]:
    """Write ``inspect.html`` and ``compared.csv``; return page and sentences."""
    a, b = pair
    paired = same_tokens and a.shape == b.shape
    said = [
        f"{one.name}: {pm(findings.loss(one.seen))} nats per token; {findings.outliers(one.seen)}"
        for one in pair
    ]
    rows = differences(a.seen, b.seen) if paired else []
    if paired:
        loss = estimate((b.seen.losses - a.seen.losses).mean(-1))
        said.insert(0, f"{b.name} less {a.name}: {pm(loss)} nats per token on the same windows.")
        said += _largest(rows, a.name, b.name)
    else:
        why = "blocks" if same_tokens else "vocabularies"
        said.insert(0, f"No differences are taken: the two have other {why}.")
    tables.write_text(folder / "compared.csv", _TABLE.csv(rows))
    shown = [html.picture(f, drawing.save(f, folder / "figures", record["Command"]))
             for f in _figures(pair)]  # fmt: skip
    page = Page(
        "Two models", "Where do their streams differ?", answer=said[:1], details=said[1:],
        sections=[
            Section("models", "Models and text", [
                facts([(one.name, one.found.said) for one in pair] + [("Text", text)])
            ]),
            *html.figure_sections(shown),
            Section("table", "Differences by block", [_TABLE(rows)]),
        ],
        reading=html.reading(
            "<b>Differences</b> are paired: both models read the same windows. A ratio is that of"
            " the second to the first, the mean of its logarithm. Intervals are Student’s t over"
            " windows of one text, 95 %, one by one: of many lines some miss by chance.",
        ),
        record=html.record(
            record["Command"], [(k, v) for k, v in record.items() if k != "Command"]
        ),
    )  # fmt: skip
    return tables.write_text(folder / "inspect.html", page.render()), said


def differences(a: Walk, b: Walk) -> list[dict[str, Any]]:
    """Return, for the embedding and every sub-layer, b against a on the windows that both have.

    Under the names of :data:`RATIOS` estimates of log(b / a), of :data:`DIFFERENCES` of b - a.
    """
    one, other = findings.per_window(a), findings.per_window(b)
    rows = []
    for i, (block, branch) in enumerate(((0, "embedding"), *a.branches)):
        row: dict[str, Any] = {"block": block, "branch": branch}
        for name in (*RATIOS, *DIFFERENCES):
            of_sublayers = name in ("written", "turned")
            if of_sublayers and i == 0:
                continue
            x, y = (each[name][:, i - of_sublayers] for each in (one, other))
            with np.errstate(divide="ignore", invalid="ignore"):
                found = np.log(y / x) if name in RATIOS else y - x
            row[name] = estimate(v for v in found.tolist() if math.isfinite(v))
        rows.append(row)
    return rows


def _largest(rows: Sequence[dict[str, Any]], a: str, b: str) -> list[str]:
    out = []
    for name, words in RATIOS.items():
        known = [row for row in rows if name in row and row[name].excludes_zero]
        if known:
            most = max(known, key=lambda row: abs(row[name].mean))
            out.append(
                f"{words}: most apart after {most['branch']} of block {most['block']}, where {b}"
                f" has {math.exp(most[name].mean):.3g} times what {a} has"
                f" ({_ends(most[name])})."
            )
        else:
            out.append(f"{words}: no block differs beyond its interval.")
    return out


def _ends(x: Estimate) -> str:
    if x.low is None or x.high is None:
        return "no interval from one window"
    return f"{math.exp(x.low):.3g} to {math.exp(x.high):.3g}"


def _columns(name: str, title: str) -> list[Column]:
    def of(row: Mapping[str, Any], what: str) -> float | None:
        found = getattr(row[name], what) if name in row else None
        return math.exp(found) if found is not None and name in RATIOS else found

    def text(row: Mapping[str, Any]) -> str | None:
        if name not in row or row[name].mean is None:
            return None
        if name in RATIOS:
            return f"× {of(row, 'mean'):.3g} ({_ends(row[name])})"
        return pm(row[name])

    return [
        Column(name, lambda row: of(row, "mean"), title, text, "n"),
        Column(f"{name}_low", lambda row: of(row, "low")),
        Column(f"{name}_high", lambda row: of(row, "high")),
    ]


_TABLE = Table(
    [
        Column("block", lambda row: row["block"], "Block", lambda row: str(row["block"]), "n"),
        Column("branch", lambda row: row["branch"], "After"),
        *(c for k, v in (RATIOS | DIFFERENCES).items() for c in _columns(k, v)),
    ],
    empty="None were taken.",
)  # fmt: skip


def _figures(pair: Sequence[One]) -> list[Figure]:
    looks = dict(zip((one.name for one in pair), LOOKS, strict=True))
    out = []
    for name, title in (RATIOS | DIFFERENCES).items():
        rows = []
        for one in pair:
            numbers = getattr(findings.by_depth(one.seen), name)
            start = 0.5 if name in ("written", "turned") else 0.0
            rows += [
                {"variant": one.name, "x": start + i / len(numbers) * _blocks(one), "y": v.mean,
                 "low": v.low, "high": v.high} for i, v in enumerate(numbers) if v.mean is not None
            ]  # fmt: skip
        out.append(figure(
            name, title, f"{title} by depth, with 95 % intervals over windows.",
            [Panel(rows, title.lower())], looks,
            Axis("y", scale="log" if name in RATIOS else "linear"),
        ))  # fmt: skip
    return out


def _blocks(one: One) -> int:
    return one.seen.branches[-1][0]
