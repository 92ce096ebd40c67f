"""The claims for a reader: page, figures, CSV and terminal, with what was expected and measured."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from experiments.claims.claim import Check, Claim
from normjax.reporting import drawing, html, palette, pictures
from normjax.reporting.drawing import Figure
from normjax.reporting.html import Page, Section, muted
from normjax.reporting.pictures import Axis, Panel
from normjax.reporting.tables import Column, Table, stacked, tag, view

SIGNS = {"equal": "", "above": "> ", "below": "< "}
FIGURES = {
    "scale-invariance": (
        "What eps does to scale invariance (A4)",
        "How much longer RMSNorm's output becomes when its input is ten times as large. Marks:"
        " measured on the module; line: the square root of (1 + x) / (1 + x / 100), minus 1, with x"
        " the eps over the mean square of the input. Without eps it is 0.",
        Axis("x", "eps / mean(h²)", "log"), Axis("measured", "|N(10 h)| / |N(h)| − 1", "log"),
    ),
    "stream-size": (
        "The size of a stream over depth (A10, A11, A12)",
        "Root mean square of the residual stream after each of 16 layers. Marks: measured on"
        " decoders whose branches are pinned to a linear rule; lines: the closed forms 1.1ⁿ,"
        " 1 + 0.1 n, 0.9ⁿ, 1 and √½. Without norms the branch decides; with one in front of it,"
        " updates of one size add.",
        Axis("x", "layers n", ticks=range(0, 17, 4)),
        Axis("measured", "size of the stream (it starts at 1)", "log",
             ticks=(0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0)),
    ),
    "taylor-remainder": (
        "What first order leaves (A13)",
        "Size of f(t) − f(0) − t f′(0). Marks: measured; lines: t² |f″(0)| / 2, of slope 2. Longer"
        " steps feel the third order, short ones only rounding, which no step makes smaller; where"
        " that happened to leave exactly 0, there is no mark.",
        Axis("x", "step t", "log"), Axis("measured", "what is left", "log"),
    ),
}  # fmt: skip
"""Title, caption and axes of every figure."""
_STYLE = """
.claims th.group { font-weight: 600; font-size: .95rem; line-height: 1.4; padding: 1.6rem 0 .4rem; }
.claims th.group b { margin-right: .5em; }
.claims td.what { min-width: 15rem; }
.claims td.what small { white-space: normal; margin-top: .15rem; }
.claims td.n { padding-left: .6rem; }
.claims tr.fails td { background: var(--warn); }
.verdicts { display: flex; flex-wrap: wrap; gap: .3rem; list-style: none; padding: 0; }
.verdicts a { display: block; min-width: 3.1rem; text-align: center; padding: .1rem .4rem;
  background: var(--panel); text-decoration: none; font-size: .9rem; }
.verdicts a.fails { background: var(--warn); font-weight: 700; }
"""


# --- numbers and rows -----------------------------------------------------------------------------


class Row(NamedTuple):
    """A check, its id, and the claim that it belongs to."""

    name: str
    check: Check
    claim: Claim


def rows(claims: Iterable[Claim]) -> list[Row]:
    """Return one row per check."""
    return [Row(name, check, claim) for claim in claims for name, check in claim.parts()]


def number(value: float) -> str:
    """Return a number to six significant digits.

    >>> number(0.6), number(2.6645352591003757e-14), number(3.0)
    ('0.6', '2.66454e-14', '3')
    """
    if not math.isfinite(value):
        return str(value)
    short = f"{value + 0.0:.6g}"  # no -0
    return f"{value:.2e}" if len(short) > 12 else short


def _expected(check: Check) -> list[str]:
    """Return what was expected as texts, one per number that is shown."""
    return [SIGNS[check.relation] + number(value) for value in check.shown()[0]]


def _measured(check: Check) -> list[str]:
    return [number(value) for value in check.shown()[1]]


def _in_full(values: Iterable[float]) -> str:
    return " ".join(map(repr, values))


def _typeset(*texts: str) -> Markup:
    """Return numbers below one another, with true minus signs."""
    return Markup("<br>").join(text.replace("-", "\N{MINUS SIGN}") for text in texts)


def _small(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _if_equal(check: Check, value: float) -> Markup:
    return _typeset(_small(value) if check.relation == "equal" else "")


# In the file, of an array with more entries than are shown, the one that is off most.
CHECKS = Table([
    Column("id", lambda row: row.name, "", kind="id"),
    Column("claim", lambda row: f"{row.claim.statement} | {row.check.words}", "What is compared",
           lambda row: stacked(row.check.words, row.check.tolerance.reason), "what"),
    Column("expected",
           lambda row: SIGNS[row.check.relation] + _in_full(row.check.shown()[0]), "Expected",
           lambda row: _typeset(*_expected(row.check)), "n"),
    Column("measured", lambda row: _in_full(row.check.shown()[1]), "Measured",
           lambda row: _typeset(*_measured(row.check)), "n"),
    view("Off by", lambda row: _if_equal(row.check, row.check.error), "n"),
    Column("tolerance", lambda row: row.check.tolerance.value, "Tolerance",
           lambda row: _if_equal(row.check, row.check.tolerance.value), "n"),
    Column("holds", lambda row: "yes" if row.check.holds else "no", "Holds",
           lambda row: "yes" if row.check.holds else tag("b", "no"), "n"),
],
    mark=lambda row: "" if row.check.holds else "fails",
    group=lambda row: tag("b", row.claim.id, id=row.claim.id) + row.claim.statement,
    kind="stack claims",
)  # fmt: skip


# --- words ----------------------------------------------------------------------------------------


def answer(claims: Sequence[Claim]) -> str:
    """Return what came out as one sentence."""
    failing = [claim.id for claim in claims if not claim.holds]
    if not failing:
        return f"All {len(claims)} claims hold, in {len(rows(claims))} comparisons."
    verb = "does" if len(failing) == 1 else "do"
    parts = [row.name for row in rows(claims) if not row.check.holds]
    return (
        f"{len(failing)} of {len(claims)} claims {verb} not hold: {', '.join(failing)}"
        f" (comparisons {', '.join(parts)})."
    )


def text(claims: Sequence[Claim]) -> str:
    """Return all claims as a table of at most 100 columns, and the answer below."""
    lines = [_line("", "", "expected", "measured", "tolerance", "holds")]
    for claim in claims:
        said = textwrap.wrap(f"{claim.id}  {claim.statement}", 98, subsequent_indent="    ")
        lines += ["", *said]
        for name, check, _ in rows([claim]):
            cells = [
                [name], textwrap.wrap(check.words, 42), _expected(check), _measured(check),
                [_small(check.tolerance.value)], ["yes" if check.holds else "NO"],
            ]  # fmt: skip
            tall = max(map(len, cells))
            padded = [[*cell, *[""] * (tall - len(cell))] for cell in cells]
            lines += [_line(*parts) for parts in zip(*padded, strict=True)]
    return "\n".join([*lines, "", textwrap.fill(answer(claims), 98)])


def _line(name: str, words: str, *cells: str) -> str:
    expected, measured, tolerance, holds = cells
    shown = f" {name:<5}  {words:<42}  {expected:>14}  {measured:>13}  {tolerance:>9}  {holds}"
    return shown.rstrip()


# --- figures and page -----------------------------------------------------------------------------


def figures(claims: Sequence[Claim]) -> list[Figure]:
    """Return the figures for which the claims hold series, in the order of the page."""
    made = []
    for name, (title, caption, x, y) in FIGURES.items():
        series = [s for claim in claims for s in claim.series if s.figure == name]
        points = [
            {"series": s.label, "x": float(at), "measured": float(m), "closed_form": float(e)}
            for s in series for at, m, e in zip(s.x, s.measured, s.expected, strict=True)
        ]  # fmt: skip
        if points:
            seen = [{**point, "measured": point["measured"] or None} for point in points]
            canvas = pictures.lines(
                [Panel(seen)], palette.looks([s.label for s in series], series[0].label), x, y,
                height=3.6, series="series", theory="closed_form", joined=False,
            )  # fmt: skip
            made.append(drawing.figure(name, title, caption, canvas, points))
    return made


def render(
    claims: Sequence[Claim], drawn: Sequence[tuple[Figure, str]], record: Mapping[str, str]
) -> str:
    """Return the page as one self-contained HTML text.

    Args:
      claims: in order.
      drawn: figures, each with its SVG text.
      record: what was run, by name.
    """
    links = (
        tag("li", tag("a", f"{c.id}{'' if c.holds else ' fails'}", href=f"#{c.id}",
                      cls="" if c.holds else "fails"))
        for c in claims
    )  # fmt: skip
    return Page(
        "Claims, computed",
        f"Does each of {len(claims)} statements about lengths, directions, norms and residual"
        " blocks hold for the program’s own modules, to rounding?",
        answer=[answer(claims)],
        sections=[
            Section("claims", "", [
                tag("nav", tag("ul", *links, cls="verdicts"), **{"aria-label": "Claims"}),
                muted(
                    "Everything below was computed on this machine in float64: “measured” by the"
                    " program’s own norms, attention, MLPs and decoders, “expected” by a closed"
                    " form or another implementation. The small print says where the tolerance"
                    " comes from. Of arrays that are too large to show, the row holds the entry"
                    " that is off most. A bound (&gt; or &lt;) must be passed. All numbers in full:"
                    ' <a href="claims.csv">claims.csv</a>.'
                ),
                CHECKS(rows(claims)),
            ]),
            *html.figure_sections(html.picture(figure, svg) for figure, svg in drawn),
        ],
        reading=html.reading(
            "<b>Rounding.</b> A float64 operation is off by at most half of the machine epsilon,"
            " 2<sup>−52</sup>, relative to its result. n roundings of numbers up to a size S put"
            " each of two computations off by at most n S 2<sup>−53</sup>, and their difference by"
            " at most n S 2<sup>−52</sup>. A sum over the features counts as many roundings as it"
            " has terms.",
            "<b>Rounding, seen in float32.</b> For a whole attention layer that worst case is a"
            " million times what happens. There the same program is run in float32 too; what it"
            " loses, times 2<sup>−29</sup>, is what float64 loses.",
            "<b>The next term.</b> Where a claim is an approximation, the tolerance is the first"
            " term that it leaves out, from its own formula or from a derivative of one order"
            " more.",
            "<b>The same bits.</b> A tolerance of 0, where both computations round alike or not at"
            " all.",
            title="How to read the tolerances",
        ),
        record=html.record("", record.items()),
        style=_STYLE, heading="Norms and residual streams: the claims, computed",
    ).render()  # fmt: skip
