"""The page of the claims: every statement with what was expected and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claims import listing
from experiments.claims.claim import Check, Claim
from normjax.reporting import html
from normjax.reporting.drawing import Figure

TEMPLATE = Path(__file__).with_name("page.html.j2")


def render(
    claims: Sequence[Claim], figures: Sequence[tuple[Figure, str]], record: Mapping[str, str]
) -> str:
    """Return the page as one self-contained HTML text.

    Args:
      claims: in order.
      figures: each with its SVG text.
      record: what was run, by name.
    """
    return html.render(
        TEMPLATE,
        answer=listing.answer(claims),
        holds=all(claim.holds for claim in claims),
        claims=[_entry(claim) for claim in claims],
        figures=[html.picture(figure, svg) for figure, svg in figures],
        record=list(record.items()),
    )


def _entry(claim: Claim) -> dict[str, Any]:
    rows = [_row(name, check) for name, check in claim.parts()]
    return {"id": claim.id, "statement": claim.statement, "holds": claim.holds, "rows": rows}


def _row(name: str, check: Check) -> dict[str, Any]:
    equal = check.relation == "equal"
    return {
        "id": name,
        "what": check.words,
        "expected": [_typeset(text) for text in listing.expected(check)],
        "measured": [_typeset(text) for text in listing.measured(check)],
        "error": _typeset(f"{check.error:.1e}" if check.error else "0") if equal else "",
        "tolerance": _typeset(f"{check.tolerance.value:.1e}") if check.tolerance.value else "0",
        "equal": equal,
        "reason": check.tolerance.reason,
        "holds": check.holds,
    }


def _typeset(text: str) -> str:
    """Return a number with a true minus sign."""
    return text.replace("-", "\N{MINUS SIGN}")
