"""The answer in words where loss is drawn against x: trends, crossings, where runs diverge."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from normjax.reporting import statistics
from normjax.reporting.findings import (
    best_rates,
    comparison,
    divergence,
    no_better_than_counting,
    residual_or_norm,
)
from normjax.reporting.results import Results, Variant
from normjax.reporting.statistics import Estimate
from normjax.reporting.tables import number
from normjax.reporting.wording import (
    DETAIL,
    MAIN,
    Finding,
    change,
    difference,
    listed,
    no_baseline,
    references,
    representatives,
)

Lines = dict[str, dict[float, Variant]]


class Crossing(NamedTuple):
    """``first`` is lower at x = before, ``second`` at x = after."""

    first: str
    second: str
    before: float
    after: float
    clear: bool


def lines(results: Results) -> Lines:
    """Return the representative variant of every series at every x, x ascending."""
    found: Lines = {name: {} for name in results.series}
    for variant in representatives(results):
        if variant.cell.x is not None:
            found[variant.cell.series][variant.cell.x] = variant
    return {name: dict(sorted(points.items())) for name, points in found.items()}


def answer(results: Results) -> list[Finding]:
    """Return the findings of a grid, main ones first."""
    return sweep(results) if results.x else comparison(results)


def sweep(results: Results) -> list[Finding]:
    """Return the findings of a grid with an x axis."""
    every = lines(results)
    found = [_worst(results, every), _best(results, every)]
    found += residual_or_norm(results, representatives(results))
    found += [_baseline(results, every)]
    found += [_trend(results, every, name) for name in every if name != results.baseline]
    found += _crossings(results, every)
    found += divergence(results)
    found += no_better_than_counting(results, representatives(results))
    found += best_rates(results, representatives(results))
    return [finding for finding in found if finding is not None]


def crossings(every: Lines) -> list[Crossing]:
    """Return where the means of two series change order.

    A crossing is clear when the paired interval excludes 0 at both x that bracket it; they need
    not be neighbours.
    """
    found = []
    for first, second in combinations(every, 2):
        shared = [x for x in every[first] if x in every[second]]
        gaps = {x: difference(every[first][x], every[second][x]) for x in shared}
        sure = _sign_changes({x: gap for x, gap in gaps.items() if gap.excludes_zero})
        noisy = _sign_changes({x: gap for x, gap in gaps.items() if gap.mean})
        covered = [new for new in noisy if any(a <= new[0] and new[1] <= b for a, b, _ in sure)]
        for before, after, down in sure + [new for new in noisy if new not in covered]:
            names = (first, second) if down else (second, first)
            found.append(Crossing(*names, before, after, (before, after, down) in sure))
    return found


def _sign_changes(gaps: dict[float, Estimate]) -> list[tuple[float, float, bool]]:
    """Return neighbouring x between which the mean changes sign, and whether it begins below 0."""
    pairs = zip(gaps, list(gaps)[1:], strict=False)
    means = {x: gap.mean or 0.0 for x, gap in gaps.items()}
    return [(a, b, means[a] < 0) for a, b in pairs if means[a] * means[b] < 0]


def _at(results: Results, x: float) -> str:
    return f"{results.x['name'] if results.x else 'x'} {x:g}"


def _worst(results: Results, every: Lines) -> Finding | None:
    """Say what hurts most at the largest x, where differences are meant to show."""
    last = max((x for points in every.values() for x in points), default=None)
    base = every.get(results.baseline, {}).get(last) if last is not None else None
    if last is None or base is None:
        return None
    here = {name: points[last] for name, points in every.items() if last in points}
    lost = [name for name, v in here.items() if v.all_diverged and name != results.baseline]
    gaps = {name: difference(v, base) for name, v in here.items() if name != results.baseline}
    known = [(name, gap) for name, gap in gaps.items() if gap.mean is not None]
    parts = [f"every run of {listed(lost)} diverged"] if lost else []
    if known:
        name, gap = max(known, key=lambda item: item[1].mean or 0.0)
        sure = "" if gap.excludes_zero else _mark(gap) or " (no interval)"
        word = "of those that trained, " if lost else ""
        parts.append(
            f"{word}{name} lies furthest above {results.baseline}, by "
            f"{change(gap)} nats per {results.unit}{sure}"
            if (gap.mean or 0.0) > 0
            else f"{word}none lies above {results.baseline}"
        )
    return Finding(MAIN, f"At {_at(results, last)}, {'; '.join(parts)}.") if parts else None


def _best(results: Results, every: Lines) -> Finding | None:
    each = []
    for x in sorted({x for points in every.values() for x in points}):
        here = [points[x] for points in every.values() if x in points]
        here = sorted((v for v in here if v.loss.mean is not None), key=lambda v: v.loss.mean or 0)
        if not here:
            each.append(f"at {_at(results, x)} none")
            continue
        text = f"at {_at(results, x)} {here[0].cell.series} ({number(here[0].loss.mean)})"
        if len(here) > 1 and not difference(here[1], here[0]).excludes_zero:
            text += f", not separated from {here[1].cell.series} ({number(here[1].loss.mean)})"
        each.append(text)
    if not each:
        return None
    unit = f"nats per {results.unit}"
    return Finding(MAIN, f"Lowest mean validation loss ({unit}): {'; '.join(each)}.")


def _baseline(results: Results, every: Lines) -> Finding | None:
    points = every.get(results.baseline, {})
    known = {x: v for x, v in points.items() if v.loss.mean is not None}
    if not known:
        return Finding(MAIN, no_baseline(results))
    first, last = min(known), max(known)
    text = f"The baseline ({results.baseline}) ends at {number(known[first].loss.mean)} nats"
    text += f" at {_at(results, first)}"
    if last != first:
        text += f" and at {number(known[last].loss.mean)} at {_at(results, last)}"
        gap = difference(known[last], known[first])
        text += f", a change of {change(gap)}{_certainty(gap)}"
    return Finding(DETAIL, f"{text}. {references(results)}".strip())


def _certainty(gap: Estimate) -> str:
    if gap.low is None:
        return " (no interval)"
    return "" if gap.excludes_zero else " (the interval contains 0)"


def _trend(results: Results, every: Lines, name: str) -> Finding | None:
    """Say how a series' difference to the baseline goes with x."""
    base, points = every.get(results.baseline, {}), every[name]
    gaps = {x: difference(v, base[x]) for x, v in points.items() if x in base}
    known = {x: gap for x, gap in gaps.items() if gap.mean is not None}
    lost = [x for x, v in points.items() if v.all_diverged]
    tail = f" Every run diverged at {listed(_at(results, x) for x in lost)}." if lost else ""
    if not known:
        return Finding(DETAIL, f"{name} has no loss to compare with {results.baseline}.{tail}")
    each = ", ".join(f"{change(gap)}{_mark(gap)} at {_at(results, x)}" for x, gap in known.items())
    text = f"{name} against {results.baseline}: {each}."
    first, last = min(known), max(known)
    if first != last:
        text += " " + _growth(results, points, base, first, last)
    return Finding(DETAIL, text + tail)


def _mark(gap: Estimate) -> str:
    return " (contains 0)" if gap.low is not None and not gap.excludes_zero else ""


def _growth(
    results: Results,
    points: dict[float, Variant],
    base: dict[float, Variant],
    first: float,
    last: float,
) -> str:
    """Compare the difference at both ends of x, seed by seed."""
    ends = [statistics.differences(points[x].losses, base[x].losses) for x in (last, first)]
    growth = statistics.paired(ends[0], ends[1])
    place = f"from {_at(results, first)} to {last:g}"
    if growth.mean is None:
        return f"No seed finished at both ends, so its change {place} is not known."
    word = "rises" if growth.mean > 0 else "falls"
    if growth.low is None:
        return f"It {word} by {number(abs(growth.mean))} {place}, without an interval."
    if growth.excludes_zero:
        half = number(growth.half_width)
        return f"It {word} {place}, by {number(abs(growth.mean))}\u00a0±\u00a0{half} nats."
    return f"Its change {place}, {change(growth)}, has an interval that contains 0."


def _crossings(results: Results, every: Lines) -> list[Finding]:
    found = crossings(every)
    if not found:
        return [Finding(DETAIL, "The mean curves do not cross.")]
    sure = [
        f"{c.first} is lower at {_at(results, c.before)}, {c.second} at {c.after:g}"
        for c in found
        if c.clear
    ]
    rest = len(found) - len(sure)
    text = f"Curves that clearly cross: {'; '.join(sure)}." if sure else ""
    if rest:
        unsure = [
            f"{c.first} and {c.second} ({c.before:g} to {c.after:g})" for c in found if not c.clear
        ]
        text += (
            f" The means also cross within the noise: {listed(unsure)}."
            if sure
            else (f"The means cross only within the noise: {listed(unsure)}.")
        )
    return [Finding(DETAIL, text.strip())]
