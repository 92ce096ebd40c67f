"""Residual connections or normalization: which hurts more when removed."""

from __future__ import annotations

from collections.abc import Iterable

from normjax.reporting import explanations
from normjax.reporting.results import DIVERGED, Results, Variant
from normjax.reporting.tables import number
from normjax.reporting.wording import MAIN, Finding, difference, pairs

_REMOVED = ("residual connections", "normalization")


def residual_or_norm(results: Results, best: Iterable[Variant]) -> list[Finding]:
    """Say whether removing residual connections or removing normalization hurts more."""
    by_x: dict[float | None, dict[str, Variant]] = {}
    for variant in best:
        changes = explanations.effective(results, variant.cell)
        for what in _REMOVED:
            if explanations.removes(changes, what):
                by_x.setdefault(variant.cell.x, {}).setdefault(what, variant)
    duels = {x: cells for x, cells in by_x.items() if len(cells) == 2}
    if not duels:
        return []
    opening = "Residual connections or normalization?"
    if not results.x:
        text = _duel(*(next(iter(duels.values()))[what] for what in _REMOVED))
        return [Finding(MAIN, f"{opening} {text}")]
    name = results.x["name"]
    each = (
        f"at {name} {x:g} {_verdict(*(cells[what] for what in _REMOVED))}"
        for x, cells in sorted(duels.items(), key=lambda item: item[0] or 0.0)
    )
    return [Finding(MAIN, f"{opening} What hurts more to remove: {'; '.join(each)}.")]


def _verdict(residual: Variant, norm: Variant) -> str:
    """Return a duel's outcome in a few words."""
    if residual.all_diverged and norm.all_diverged:
        return "neither can be trained"
    if (norm.all_diverged and residual.losses) or (residual.all_diverged and norm.losses):
        lost, kept = _REMOVED[:: -1 if norm.all_diverged else 1]
        return f"{lost} (every run diverged; without {kept} some finished)"
    gap = difference(residual, norm)
    if gap.mean is None:
        return "not known yet"
    more = _REMOVED[0 if gap.mean > 0 else 1]
    if gap.low is None:
        return f"{more}, by {number(abs(gap.mean))} in a single pair"
    sure = "" if gap.excludes_zero else ", not decided: the interval contains 0"
    return f"{more}, by {number(abs(gap.mean))}\u00a0±\u00a0{number(gap.half_width)}{sure}"


def _duel(residual: Variant, norm: Variant) -> str:
    lost = (residual.count(DIVERGED), norm.count(DIVERGED))
    counts = (
        f"Without residual connections {lost[0]} of {len(residual.runs)} runs diverged, without "
        f"normalization {lost[1]} of {len(norm.runs)}."
    )
    if residual.all_diverged and norm.all_diverged:
        return "Every run diverged without either, so the loss cannot tell which hurts more."
    if norm.all_diverged and residual.loss.mean is not None:
        return _fatal(residual, "normalization", "residual connections")
    if residual.all_diverged and norm.loss.mean is not None:
        return _fatal(norm, "residual connections", "normalization")
    gap = difference(residual, norm)
    if gap.mean is None:
        return "Not enough finished runs to compare the two by seed."
    more, less = _REMOVED[:: 1 if gap.mean > 0 else -1]
    size = f"{number(abs(gap.mean))}" + (
        f"\u00a0±\u00a0{number(gap.half_width)}" if gap.half_width is not None else ""
    )
    if gap.excludes_zero:
        text = (
            f"Removing {more} hurts more than removing {less}, by {size} nats ({pairs(gap)}). The "
            "95 % interval of the paired difference excludes 0, so this is clear at that level."
        )
    elif gap.low is None:
        text = f"Removing {more} ended higher by {size} nats, but one pair decides nothing."
    else:
        text = (
            f"Not decided: removing {more} ended higher by {size} nats on average "
            f"({pairs(gap)}), but the 95 % interval of the paired difference contains 0."
        )
    return f"{text} {counts}" if any(lost) else text


def _fatal(survivor: Variant, lost: str, kept: str) -> str:
    return (
        f"Removing {lost} hurts more: every run without {lost} diverged, while "
        f"{survivor.loss.n} of {len(survivor.runs)} without {kept} finished, at a mean loss of "
        f"{number(survivor.loss.mean)}."
    )
