"""Claims as a table for a terminal, as CSV, and as one sentence."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from experiments.claims.claim import Check, Claim
from normjax.reporting import tables

COLUMNS = ("id", "claim", "expected", "measured", "tolerance", "holds")
SIGNS = {"equal": "", "above": "> ", "below": "< "}
_WIDTHS = (5, 42, 14, 13, 9, 5)
_GAP = 1


def number(value: float) -> str:
    """Return a number to six significant digits.

    >>> number(0.6), number(2.6645352591003757e-14), number(3.0)
    ('0.6', '2.66454e-14', '3')
    """
    if not math.isfinite(value):
        return str(value)
    short = f"{value + 0.0:.6g}"  # no -0
    return f"{value:.2e}" if len(short) > 12 else short


def expected(check: Check) -> list[str]:
    """Return what was expected as texts, one per number that is shown."""
    return [SIGNS[check.relation] + number(value) for value in check.shown()[0]]


def measured(check: Check) -> list[str]:
    """Return what was measured as texts, one per number that is shown."""
    return [number(value) for value in check.shown()[1]]


def csv_text(claims: Sequence[Claim]) -> str:
    """Return one row per check, floats in full; several numbers are separated by spaces.

    Of an array with more entries than are shown the row holds the one that is off most.
    """
    rows = []
    for claim in claims:
        for name, check in claim.parts():
            wanted, found = ([repr(value) for value in side] for side in check.shown())
            rows.append((
                name, f"{claim.statement} | {check.words}",
                SIGNS[check.relation] + " ".join(wanted), " ".join(found),
                check.tolerance.value, "yes" if check.holds else "no",
            ))  # fmt: skip
    return tables.csv_text(COLUMNS, rows)


def answer(claims: Sequence[Claim]) -> str:
    """Return what came out as one sentence."""
    failing = [claim.id for claim in claims if not claim.holds]
    total = sum(len(claim.checks) for claim in claims)
    if not failing:
        return f"All {len(claims)} claims hold, in {total} comparisons."
    verb = "does" if len(failing) == 1 else "do"
    parts = [name for claim in claims for name, check in claim.parts() if not check.holds]
    return (
        f"{len(failing)} of {len(claims)} claims {verb} not hold: {', '.join(failing)}"
        f" (comparisons {', '.join(parts)})."
    )


def text(claims: Sequence[Claim]) -> str:
    """Return all claims as a table of at most 100 columns, and the answer below."""
    lines = [_row([[c] for c in ("", "", "expected", "measured", "tolerance", "holds")])]
    for claim in claims:
        lines += [
            "",
            *textwrap.wrap(f"{claim.id}  {claim.statement}", 98, subsequent_indent="    "),
        ]
        for name, check in claim.parts():
            cells = [
                [name], textwrap.wrap(check.words, _WIDTHS[1]), expected(check), measured(check),
                [f"{check.tolerance.value:.1e}" if check.tolerance.value else "0"],
                ["yes" if check.holds else "NO"],
            ]  # fmt: skip
            lines += _rows(cells)
    return "\n".join([*lines, "", textwrap.fill(answer(claims), 98)])


def _rows(cells: Sequence[Sequence[str]]) -> list[str]:
    tall = max(len(cell) for cell in cells)
    padded = [[*cell, *[""] * (tall - len(cell))] for cell in cells]
    return [_row([[cell[i]] for cell in padded]) for i in range(tall)]


def _row(cells: Sequence[Sequence[str]]) -> str:
    right = (False, False, True, True, True, False)
    parts = [
        cell[0].rjust(width) if align else cell[0].ljust(width)
        for cell, width, align in zip(cells, _WIDTHS, right, strict=True)
    ]
    return (" " + (" " * (_GAP + 1)).join(parts)).rstrip()
