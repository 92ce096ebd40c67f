"""The answer in words where loss is drawn against x: trends, crossings, where runs diverge."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

from normjax.reporting import effects, statistics
from normjax.reporting.findings import (
    best_rates,
    comparison,
    divergence,
    many,
    no_better_than_counting,
    residual_or_norm,
    seen_under,
)
from normjax.reporting.results import DIVERGED, Results, Variant, difference
from normjax.reporting.statistics import Estimate
from normjax.reporting.tables import number
from normjax.reporting.wording import (
    DETAIL,
    MAIN,
    Finding,
    change,
    listed,
    no_baseline,
    references,
    representatives,
)

Lines = dict[str, dict[float, Variant]]
Place = tuple[str, float]
"""Series and x."""


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
        if variant.arm.x is not None:
            found[variant.arm.series][variant.arm.x] = variant
    return {name: dict(sorted(points.items())) for name, points in found.items()}


def answer(results: Results) -> list[Finding]:
    """Return the findings of a grid, main ones first where it has no x axis."""
    if not results.x:
        return comparison(results)
    every, best = lines(results), representatives(results)
    compared = compare(results, every)
    main = [*_worst(results, every, compared), *_best(results, every, compared)]
    details = [
        *(text for name in every if name != results.baseline
          for text in _trend(results, every, name, compared)),
        _crossings(results, every, compared), *divergence(results),
        *no_better_than_counting(results, best), *best_rates(results, best),
        *many(compared.count),
    ]  # fmt: skip
    return [
        *(Finding(MAIN, text) for text in main),
        *residual_or_norm(results, best, compared.tells_apart),
        Finding(MAIN, seen_under(results)), _baseline(results, every, compared),
        *(Finding(DETAIL, text) for text in details),
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Compared:
    """The comparisons of a page with an x axis, judged together by Holm's method.

    Attributes:
      gaps: ((series, x), (series, x)) -> what the first lies above the second: of every two series
        at each x, and of the baseline's ends.
      growth: series -> how its difference to the baseline changes from the first x to the last.
    """

    gaps: dict[tuple[Place, Place], Estimate]
    growth: dict[str, Estimate]

    @functools.cached_property
    def _shown(self) -> dict[Any, bool]:
        return effects.shown({**self.gaps, **self.growth})

    @property
    def count(self) -> int:
        """How many comparisons the p-values are adjusted for."""
        return sum(gap.p is not None for gap in (*self.gaps.values(), *self.growth.values()))

    def tells_apart(self, a: Variant, b: Variant) -> bool:
        """Whether two variants are shown to differ."""
        own, other = ((v.arm.series, v.arm.x) for v in (a, b))
        return self._shown.get((own, other), False) or self._shown.get((other, own), False)

    def grows(self, name: str) -> bool:
        """Whether a series' difference to the baseline is shown to change."""
        return self._shown.get(name, False)


def compare(results: Results, every: Lines) -> Compared:
    """Return all that the sentences compare."""
    gaps, growth = {}, {}
    for a, b in combinations(every, 2):
        for x in (x for x in every[a] if x in every[b]):
            gaps[(a, x), (b, x)] = difference(every[a][x], every[b][x])
    base = every.get(results.baseline, {})
    ends = [x for x, v in base.items() if v.loss.mean is not None]
    if len(ends) > 1:
        first, last = min(ends), max(ends)
        own = (results.baseline, last), (results.baseline, first)
        gaps[own] = difference(base[last], base[first])
    for name, points in every.items():
        known = [
            x for x, v in points.items() if x in base and difference(v, base[x]).mean is not None
        ]
        if name != results.baseline and len(known) > 1:
            first, last = min(known), max(known)
            after, before = (
                statistics.differences(points[x].losses, base[x].losses) for x in (last, first)
            )
            growth[name] = statistics.paired(after, before)
    return Compared(gaps, growth)


def crossings(every: Lines, compared: Compared) -> list[Crossing]:
    """Return where the means of two series change order.

    A crossing is clear when the difference is shown at both x that bracket it; they need not be
    neighbours.
    """
    found = []
    for first, second in combinations(every, 2):
        shared = [x for x in every[first] if x in every[second]]
        gaps = {x: difference(every[first][x], every[second][x]) for x in shared}
        sure = _sign_changes({
            x: gap for x, gap in gaps.items()
            if compared.tells_apart(every[first][x], every[second][x])
        })  # fmt: skip
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


def _worst(results: Results, every: Lines, compared: Compared) -> Iterator[str]:
    """Say what hurts most at the largest x, where differences are meant to show."""
    last = max((x for points in every.values() for x in points), default=None)
    base = every.get(results.baseline, {}).get(last) if last is not None else None
    if last is None or base is None:
        return
    here = {n: v[last] for n, v in every.items() if last in v and n != results.baseline}
    lost = [name for name, v in here.items() if v.all_diverged]
    some = {n: v.count(DIVERGED) for n, v in here.items() if n not in lost}
    gaps = [(name, difference(v, base)) for name, v in here.items() if not some.get(name)]
    known = [(name, gap) for name, gap in gaps if gap.mean is not None]
    parts = [f"every run of {listed(lost)} diverged"] if lost else []
    parts += [f"{k} of {len(here[n].runs)} runs of {n} diverged" for n, k in some.items() if k]
    if known:
        name, gap = max(known, key=lambda item: item[1].mean or 0.0)
        sure = _mark(gap, compared.tells_apart(here[name], base))
        word = "of those without a diverged run, " if parts else ""
        parts.append(
            f"{word}{name} lies furthest above {results.baseline}, by "
            f"{change(gap)} nats per {results.unit}{sure}"
            if (gap.mean or 0.0) > 0
            else f"{word}none lies above {results.baseline}"
        )
    if parts:
        yield f"At {_at(results, last)}, {'; '.join(parts)}."


def _best(results: Results, every: Lines, compared: Compared) -> Iterator[str]:
    each = []
    for x in sorted({x for points in every.values() for x in points}):
        here = [points[x] for points in every.values() if x in points]
        here = sorted((v for v in here if v.standing and v.losses), key=lambda v: v.standing or ())
        shown = [f"{v.arm.series} ({number(v.loss.mean)})" for v in here[:2]]
        if len(here) > 1 and compared.tells_apart(*here[:2]):
            del shown[1]
        each.append(f"at {_at(results, x)} {', not separated from '.join(shown) or 'none'}")
    if each:
        unit = f"nats per {results.unit}"
        yield f"Lowest mean test loss ({unit}): {'; '.join(each)}."


def _baseline(results: Results, every: Lines, compared: Compared) -> Finding:
    points = every.get(results.baseline, {})
    known = {x: v for x, v in points.items() if v.loss.mean is not None}
    if not known:
        return Finding(MAIN, no_baseline(results))
    first, last = min(known), max(known)
    text = f"The baseline ({results.baseline}) ends at {number(known[first].loss.mean)} nats"
    text += f" at {_at(results, first)}"
    if last != first:
        gap = difference(known[last], known[first])
        text += (
            f" and at {number(known[last].loss.mean)} at {_at(results, last)}, a change of"
            f" {change(gap)}{_mark(gap, compared.tells_apart(known[last], known[first]))}"
        )
    return Finding(DETAIL, f"{text}. {references(results)}".strip())


def _trend(results: Results, every: Lines, name: str, compared: Compared) -> Iterator[str]:
    """Say how a series' difference to the baseline goes with x."""
    base, points = every.get(results.baseline, {}), every[name]
    gaps = {x: difference(v, base[x]) for x, v in points.items() if x in base}
    known = {x: gap for x, gap in gaps.items() if gap.mean is not None}
    lost = [x for x, v in points.items() if v.all_diverged]
    tail = f" Every run diverged at {listed(_at(results, x) for x in lost)}." if lost else ""
    if not known:
        yield f"{name} has no loss to compare with {results.baseline}.{tail}"
        return
    each = ", ".join(
        f"{change(gap)}{_mark(gap, compared.tells_apart(points[x], base[x]))} at {_at(results, x)}"
        for x, gap in known.items()
    )
    first, last = min(known), max(known)
    growth = "" if first == last else f" {_growth(results, name, first, last, compared)}"
    yield f"{name} against {results.baseline}: {each}.{growth}{tail}"


def _mark(gap: Estimate, shown: bool) -> str:
    if gap.low is None:
        return " (no interval)"
    return "" if shown else " (not shown)"


def _growth(results: Results, name: str, first: float, last: float, compared: Compared) -> str:
    """Compare the difference at both ends of x, seed by seed."""
    growth = compared.growth[name]
    place = f"from {_at(results, first)} to {last:g}"
    if growth.mean is None:
        return f"No seed finished at both ends, so its change {place} is not known."
    word, size = "rises" if growth.mean > 0 else "falls", number(abs(growth.mean))
    if growth.low is None:
        return f"It {word} by {size} {place}, without an interval."
    if compared.grows(name):
        return f"It {word} {place}, by {size}\u00a0±\u00a0{number(growth.half_width)} nats."
    return f"Its change {place}, {change(growth)}, is not shown to be one."


def _crossings(results: Results, every: Lines, compared: Compared) -> str:
    found = crossings(every, compared)
    sure = [
        f"{c.first} is lower at {_at(results, c.before)}, {c.second} at {c.after:g}"
        for c in found if c.clear
    ]  # fmt: skip
    rest = [
        f"{c.first} and {c.second} ({c.before:g} to {c.after:g})" for c in found if not c.clear
    ]  # fmt: skip
    said = [f"Curves that clearly cross: {'; '.join(sure)}."] if sure else []
    if rest:
        opening = "The means also cross within" if sure else "The means cross only within"
        said.append(f"{opening} the noise: {listed(rest)}.")
    return " ".join(said) or "The mean curves do not cross."
