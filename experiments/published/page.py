"""The board for a reader: page, figure, CSV and terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from experiments.published.result import (
    BASES,
    NOT_REPRODUCED,
    REPRODUCED,
    UNDECIDED,
    VERDICTS,
    Result,
)
from normjax.reporting import drawing, html, pictures
from normjax.reporting.drawing import Figure
from normjax.reporting.html import Page, Section, muted
from normjax.reporting.palette import BLUE, MUTED, ORANGE, VERMILLION, Look
from normjax.reporting.pictures import Axis, Panel, Span
from normjax.reporting.tables import Column, Table, stacked, tag
from normjax.reporting.wording import counted, listed

SUBJECTS = {
    "S": "Sizes and growth over depth", "G": "Gradients at initialization",
    "A": "Attention and its softmax", "J": "Singular values", "I": "Exact identities",
    "O": "Optimization", "N": "Numerics",
}  # fmt: skip
"""By the first letter of a row."""
CLASSES = {REPRODUCED: "yes", NOT_REPRODUCED: "no", UNDECIDED: "open"}
COLOURS = {REPRODUCED: BLUE, NOT_REPRODUCED: VERMILLION, UNDECIDED: ORANGE}
_STYLE = """
body { max-width: 72rem; }
.board td.what { min-width: 20rem; }
.board td.what small, .board td.words small { white-space: normal; }
.board td { padding-right: .8rem; }
.board td:last-child { padding-right: 0; min-width: 5.6rem; }
.board td.words { min-width: 8rem; }
.board tr.no td, .verdicts a.no { background: var(--warn); }
.board tr.open td, .verdicts a.open { background: var(--panel); }
.verdicts { display: flex; flex-wrap: wrap; gap: .3rem; list-style: none; padding: 0; }
.verdicts a { display: block; min-width: 2.9rem; text-align: center; padding: .1rem .3rem;
  border: 1px solid var(--line); text-decoration: none; font-size: .9rem; }
.verdicts a.no { font-weight: 700; }
.pick { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .92rem; margin: .8rem 0; }
body:has(#only-no:checked) .board tr:is(.yes, .open),
body:has(#only-open:checked) .board tr:is(.yes, .no),
body:has(#only-yes:checked) .board tr:is(.no, .open) { display: none; }
@media print { .pick { display: none; } }
"""


# --- numbers --------------------------------------------------------------------------------------


def digits(value: float) -> str:
    """Return a number to five significant digits, with a true minus sign.

    >>> digits(0.0), digits(1.5), digits(-1.32834), digits(7.2e-16)
    ('0', '1.5', '−1.3283', '7.2e−16')
    """
    text = f"{value + 0.0:.5g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.2g}"
    return text.replace("-", "\N{MINUS SIGN}")


def expected(row: Result) -> str:
    """Return what was expected: a number, a range or a bound."""
    low, high = row.expected.low, row.expected.high
    if low == high:
        return digits(low)
    if math.isinf(low):
        return f"≤ {digits(high)}"
    return f"≥ {digits(low)}" if math.isinf(high) else f"{digits(low)} to {digits(high)}"


def _ends(row: Result) -> tuple[str, ...]:
    """Return the interval and how many seeds it is over, or that there is none."""
    if row.exact:
        return ("exact",)
    _, low, high = row.interval
    return f"{digits(low)} to {digits(high)}", f"{len(row.values)} seeds"


def _bound(value: float) -> Any:
    return None if math.isinf(value) else value


BOARD = Table([
    Column("id", lambda row: row.id, "", lambda row: tag("span", row.id, id=row.id), "id"),
    Column("statement", lambda row: row.statement, "Published result",
           lambda row: stacked(row.statement, row.setup,
                               f"Tolerance: {row.tolerance.reason}."), "what"),
    Column("setup", lambda row: row.setup),
    Column("source", lambda row: row.source, "Source",
           lambda row: stacked(row.source, row.basis), "words"),
    Column("basis", lambda row: row.basis),
    Column("expected_low", lambda row: _bound(row.expected.low), "Expected", expected, "n"),
    Column("expected_high", lambda row: _bound(row.expected.high)),
    Column("tolerance", lambda row: row.tolerance.value, "Tolerance",
           lambda row: digits(row.tolerance.value), "n"),
    Column("tolerance_reason", lambda row: row.tolerance.reason),
    Column("measured", lambda row: row.interval[0], "Measured",
           lambda row: stacked(digits(row.interval[0]), *_ends(row)), "n"),
    Column("low", lambda row: row.interval[1]),
    Column("high", lambda row: row.interval[2]),
    Column("seeds", lambda row: 0 if row.exact else len(row.values)),
    Column("verdict", lambda row: row.verdict, "Verdict",
           lambda row: tag("b", row.verdict) if row.verdict == NOT_REPRODUCED else row.verdict),
    Column("looked_for", lambda row: " ".join(reasons(row))),
],
    mark=lambda row: CLASSES[row.verdict],
    group=lambda row: SUBJECTS[row.id[0]],
    kind="stack board",
)  # fmt: skip


# --- words ----------------------------------------------------------------------------------------


def counts(rows: Sequence[Result]) -> dict[str, list[str]]:
    """Return the ids of each verdict."""
    return {verdict: [r.id for r in rows if r.verdict == verdict] for verdict in VERDICTS}


def answer(rows: Sequence[Result]) -> str:
    """Return what came out as one sentence."""
    found = counts(rows)
    parts = [f"{len(found[REPRODUCED])} are reproduced"]
    for verdict in (NOT_REPRODUCED, UNDECIDED):
        ids = found[verdict]
        named = f" ({', '.join(ids)})" if ids else ""
        parts.append(f"{len(ids)} {'is' if len(ids) == 1 else 'are'} {verdict}{named}")
    return f"Of {len(rows)} published results {listed(parts)}."


def reasons(row: Result) -> list[str]:
    """Return what was looked for where a row is not reproduced: its note, and what would decide."""
    if row.verdict == REPRODUCED:
        return []
    said = [row.note] if row.note else []
    if row.verdict == UNDECIDED and not row.exact:
        # The interval has to end before the nearest end of what is expected.
        (mean, _, high), n = row.interval, len(row.values)
        half = high - mean
        t = row.tolerance.value
        gaps = [abs(mean - end) for end in (row.expected.low - t, row.expected.high + t)]
        gap = min(g for g in gaps if math.isfinite(g))
        wanted = math.ceil(n * (half / gap) ** 2) if gap > 0 else 0
        if wanted and wanted < 1e6:
            said.append(
                f"The interval of {n} seeds reaches {digits(half)} to either side and the mean lies"
                f" {digits(gap)} from the nearest end of what is expected: with this mean and"
                f" scatter about {wanted} seeds would decide."
            )
    return said


def sources(rows: Sequence[Result]) -> str:
    """Return where expected values come from, counted."""
    kinds = {kind: sum(row.basis == kind for row in rows) for kind in BASES}
    return "Expected values: " + listed(f"{n} {kind}" for kind, n in kinds.items() if n) + "."


def text(rows: Sequence[Result]) -> str:
    """Return the board for a terminal, at most 100 columns, and the answer below."""
    lines = [_line("", "expected", "tolerance", "measured", "interval", "verdict")]
    for row in rows:
        ends = _ends(row)[0]
        said = textwrap.wrap(f"{row.id}  {row.statement}", 98, subsequent_indent="     ")
        lines += [*said, _line("", expected(row), digits(row.tolerance.value),
                               digits(row.interval[0]), ends, row.verdict)]  # fmt: skip
    return "\n".join([*lines, "", textwrap.fill(answer(rows), 98)])


def _line(*cells: str) -> str:
    head, want, tolerance, mean, ends, verdict = cells
    return f"{head:<4} {want:>18} {tolerance:>9} {mean:>11} {ends:>24}  {verdict}".rstrip()


# --- figure and page ------------------------------------------------------------------------------


def figures(rows: Sequence[Result]) -> list[Figure]:
    """Return the figure of all rows with an interval and two ends: where it lies between them."""
    points, looks = [], {}
    for row in rows:
        low, high = (
            row.expected.low - row.tolerance.value,
            row.expected.high + row.tolerance.value,
        )
        if row.exact or not math.isfinite(high - low) or high == low:
            continue
        name = f"{row.id}  {row.statement}"
        looks[name] = Look(COLOURS[row.verdict], "o")
        at = [(2 * value - low - high) / (high - low) for value in row.interval]
        points.append({"row": name, "at": at[0], "low": at[1], "high": at[2]})
    if not points:
        return []
    canvas = pictures.intervals(
        [Panel(points)], looks,
        Axis("at", "measured; −1 to 1: as expected",
             limits=(-3.2, 3.2), ticks=(-3, -2, -1, 0, 1, 2, 3),
             marks=((-1, "", Look(MUTED, "")), (1, "", Look(MUTED, "")))),
        series="row", spans=(Span("at", "low", "high"),), row=0.24, letters=44,
    )  # fmt: skip
    caption = (
        "Rows with independent seeds whose expected value has two ends. Marks: means; lines: 95 %"
        " intervals over seeds. Blue: reproduced, the whole interval lies between the lines at −1"
        " and 1; red: not reproduced; orange: not decided. Arrow: beyond the axis."
    )
    title = "Measured against expected, in units of what is allowed"
    return [drawing.figure("measured-and-expected", title, caption, canvas, points)]


def _filter() -> Markup:
    """Return choices of what the table shows; the page has no script."""
    found = []
    for key, word in (
        ("all", "all"),
        ("yes", REPRODUCED),
        ("no", NOT_REPRODUCED),
        ("open", UNDECIDED),
    ):
        box = Markup('<input type="radio" name="only" id="only-{}"{}>').format(
            key, Markup(" checked") if key == "all" else ""
        )
        found.append(tag("label", box, " ", word))
    return tag("div", *found, cls="pick", role="radiogroup", **{"aria-label": "Rows shown"})


def render(
    rows: Sequence[Result], drawn: Sequence[tuple[Figure, str]], record: Mapping[str, str]
) -> str:
    """Return the page as one self-contained HTML text.

    Args:
      rows: in order.
      drawn: figures, each with its SVG text.
      record: what was run, by name.
    """
    links = (
        tag("li", tag("a", row.id, href=f"#{row.id}", cls=CLASSES[row.verdict], title=row.verdict))
        for row in rows
    )
    missed = [
        html.part(f"{row.id}: {row.verdict}", row.statement,
                  tag("p", f"Expected {expected(row)}, measured {digits(row.interval[0])}"
                      f" ({', '.join(_ends(row))})."),
                  *(reasons(row) or ["Nothing more was measured."]))
        for row in rows if row.verdict != REPRODUCED
    ]  # fmt: skip
    return Page(
        "Published results, measured again",
        f"Do {counted(len(rows), 'quantitative result')} of papers come out again at a size that a"
        " small machine can hold?",
        answer=[answer(rows)],
        details=[sources(rows)],
        sections=[
            Section("board", "The board", [
                tag("nav", tag("ul", *links, cls="verdicts"), **{"aria-label": "Rows"}),
                muted(
                    "All numbers in full, to sort and to filter:"
                    ' <a href="published.csv">published.csv</a>. Small print: the set-up, the basis'
                    " of the expected value, the reason of the tolerance, the 95 % interval."
                ),
                _filter(),
                BOARD(rows),
            ]),
            *([Section("missed", "What did not reproduce, and what was looked for", missed)]
              if missed else []),
            *html.figure_sections(html.picture(figure, svg) for figure, svg in drawn),
        ],
        reading=html.reading(
            "<b>Reproduced:</b> the whole interval lies within the expected value, or range, and"
            " its tolerance. <b>Not reproduced:</b> the whole interval lies outside. <b>Not decided"
            " at this size:</b> it crosses an end. A wide interval reproduces nothing.",
            "<b>Interval.</b> Student’s t over independent seeds, 95 %: of twenty correct intervals"
            " about one misses the true mean. A row that says “exact” has nothing"
            " random in it but a choice of test points; its number is the interval.",
            "<b>Tolerance.</b> Rounding, the digits of the statement, a correction for finite size,"
            " or the share of a mean that the seeds are asked to tell.",
            "<b>Not registered beforehand.</b> While the board was built, rows whose intervals were"
            " wide got more seeds, S3, G2 and G4 got a range in place of a number, G5 the logarithm"
            " of a ratio, A12 another extrapolation, and N3 was added when the program’s own norm"
            " did not show the errors of N2: a first look at numbers came before these choices.",
            *(f"<b>{kind.capitalize()}:</b> {what}." for kind, what in BASES.items()),
            "<b>Reproduced here</b> says that the number comes out of these set-ups at these sizes;"
            " not that the paper’s own experiments were repeated.",
        ),
        record=html.record("", record.items()),
        style=_STYLE,
    ).render()  # fmt: skip
