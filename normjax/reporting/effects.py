"""An effect: what a series costs against another, under a condition, and what it is evidence for.

Whatever a page says of two series is made from here, so it cannot say more than was compared: each
effect has its interval, its number of pairs, its condition, and a p-value adjusted by Holm's method
for all comparisons that the page makes. What holds under one condition is not said of another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any, TypeVar

from normjax.reporting import statistics
from normjax.reporting.results import Results, Variant, difference
from normjax.reporting.statistics import Estimate
from normjax.reporting.wording import representatives

Key = TypeVar("Key", bound=Hashable)
LEVEL = 0.05
RESOLUTION = 5e-4
"""Nats. Less is shown as 0.000, and nothing is said of it."""
WORSE, BETTER, UNDECIDED, UNKNOWN = "worse", "better", "undecided", "unknown"


def is_shown(gap: Estimate, adjusted: float | None) -> bool:
    """Whether a difference is shown not to be 0, by its p-value after Holm's correction.

    >>> is_shown(statistics.estimate([0.2, 0.21, 0.19]), 0.01)
    True
    """
    sure = adjusted is not None and adjusted < LEVEL
    return sure and gap.mean is not None and abs(gap.mean) >= RESOLUTION


def shown(gaps: Mapping[Key, Estimate]) -> dict[Key, bool]:
    """Return which differences are shown not to be 0, adjusted for all of them.

    >>> both = {"a": statistics.estimate([0.2, 0.21, 0.19]), "b": statistics.estimate([0.1, -0.1])}
    >>> shown(both)
    {'a': True, 'b': False}
    """
    return {key: is_shown(gap, p) for (key, gap), p in zip(gaps.items(), _holm(gaps), strict=True)}


def _holm(gaps: Mapping[Any, Estimate]) -> list[float | None]:
    """Return the p-values of "no difference", adjusted for all of them by Holm's method."""
    return statistics.holm([gap.p for gap in gaps.values()])


@dataclasses.dataclass(frozen=True)
class Effect:
    """What a variant's loss lies above that of another, both at their best rates.

    Attributes:
      variant, base: of one condition.
      gap: difference of final losses over the pairs of which both runs finished.
      adjusted: p-value of "no difference", adjusted for all comparisons of the page; None without
        an interval.
    """

    variant: Variant
    base: Variant
    gap: Estimate
    adjusted: float | None = None

    @property
    def condition(self) -> str:
        """The circumstances that it was seen under."""
        return self.variant.arm.condition

    @property
    def kind(self) -> str:
        """WORSE or BETTER where that is shown at the level of the page, UNDECIDED, UNKNOWN.

        A diverged run is worse than any loss: where all of one side diverged and none of the other,
        that decides; where some did, a mean of the others decides nothing in their favour.
        """
        a, b = self.variant.standing, self.base.standing
        if a is None or b is None:
            return UNKNOWN
        if a[0] != b[0]:
            if {a[0], b[0]} == {0.0, 1.0}:
                return WORSE if a > b else BETTER
            return UNDECIDED
        mean = self.gap.mean
        if mean is None:
            return UNDECIDED if a[0] == 1.0 else UNKNOWN
        if not is_shown(self.gap, self.adjusted):
            return UNDECIDED
        return WORSE if mean > 0 else BETTER


@dataclasses.dataclass(frozen=True)
class Effects:
    """All comparisons of a page.

    Attributes:
      by_series: series -> condition -> its effect against the baseline.
      pairs: (first, second) of two other series -> condition -> the first against the second.
      conditions: all of them, in plan order.
    """

    by_series: dict[str, dict[str, Effect]]
    pairs: dict[tuple[str, str], dict[str, Effect]]
    conditions: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many comparisons the p-values are adjusted for."""
        every = [*self.by_series.values(), *self.pairs.values()]
        return sum(effect.gap.p is not None for own in every for effect in own.values())

    def agreed(self, name: str) -> str:
        """Return the kind that a series' effect has under every condition, "" where they differ."""
        return _agreed(self.by_series[name], self.conditions)

    def tells_apart(self, a: Variant, b: Variant) -> bool:
        """Whether two variants of other series and of one condition are shown to differ."""
        names, condition = {a.arm.series, b.arm.series}, a.arm.condition
        for key, own in self.pairs.items():
            if set(key) == names and condition in own:
                return own[condition].kind in (WORSE, BETTER)
        return False

    def order(self, first: str, second: str) -> str:
        """Return the kind of first against second that all conditions agree on, "" where none."""
        if (first, second) in self.pairs:
            return _agreed(self.pairs[first, second], self.conditions)
        opposite = {WORSE: BETTER, BETTER: WORSE}
        found = _agreed(self.pairs.get((second, first), {}), self.conditions)
        return opposite.get(found, found)


def _agreed(own: dict[str, Effect], conditions: Sequence[str]) -> str:
    kinds = {own[name].kind if name in own else UNKNOWN for name in conditions}
    return kinds.pop() if len(kinds) == 1 else ""


def compare(results: Results) -> Effects:
    """Compare every series with the baseline and with one another, under each condition.

    For a grid without an x axis; each arm is represented by its best rates.
    """
    found: dict[str, dict[str, Variant]] = {}
    for variant in representatives(results):
        if variant.runs:
            found.setdefault(variant.arm.series, {}).setdefault(variant.arm.condition, variant)
    base = found.pop(results.baseline, {})
    by_series = {
        name: {c: _effect(v, base[c]) for c, v in own.items() if c in base}
        for name, own in found.items()
    }
    pairs = {
        (a, b): {c: _effect(v, found[b][c]) for c, v in found[a].items() if c in found[b]}
        for a, b in combinations(found, 2)
    }
    every = [*by_series.values(), *pairs.values()]
    listed = {(i, c): effect.gap for i, own in enumerate(every) for c, effect in own.items()}
    for (i, c), p in zip(listed, _holm(listed), strict=True):
        every[i][c] = dataclasses.replace(every[i][c], adjusted=p)
    return Effects(by_series, pairs, results.conditions)


def _effect(variant: Variant, base: Variant) -> Effect:
    return Effect(variant, base, difference(variant, base))
