"""When a comparison has seen enough seeds: looks at growing numbers of seeds, one error rate.

Each of m placements is compared with the baseline by the paired differences of n seeds, at K looks
n_1 < ... < n_K that are fixed beforehand. With p the two-sided p-value of Student's t at a look:

* it stops there where ``K m p < 0.05`` and the mean is not tiny: shown worse, so that it can no
  longer matter, or shown better. All others go on to n_K;
* what a page says at the end is Holm's method over the m values ``min(1, K p)``, each at the look
  at which the placement stopped.

Error rate: the chance that any placement that does not differ from the baseline is said to differ,
at any look or at the end, is at most 0.05, whatever holds of the others and however they depend on
each other, if the differences are normal. For P(K p_T <= a) <= sum over looks of P(p_k <= a / K) =
a, whatever rule chose the look T, so K p_T is a p-value and Holm's method keeps its level; and
``K m p < 0.05`` is a rejection by it too. Both corrections are Bonferroni's, hence conservative.

No rate is stated for what has no difference to test: a placement of which some runs diverged.

Sources: Bonferroni over looks: Jennison and Turnbull 2000, Group Sequential Methods; Holm 1979.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from normjax.reporting import statistics
from normjax.reporting.statistics import Estimate

Key = TypeVar("Key")


def at_a_look(gap: Estimate, looks: int, comparisons: int) -> float | None:
    """Return the p-value of a difference, ``min(1, K m p)``: corrected for looks and comparisons.

    >>> round(at_a_look(statistics.estimate([0.2, 0.21, 0.19]), looks=2, comparisons=3), 4)
    0.005
    """
    return None if gap.p is None else min(1.0, looks * comparisons * gap.p)


def at_the_end(gaps: Mapping[Key, Estimate], looks: int) -> dict[Key, float | None]:
    """Return Holm's p-values over all differences of a page, each corrected for the looks.

    >>> sure, unsure = statistics.estimate([0.2, 0.21, 0.19]), statistics.estimate([0.1, -0.1])
    >>> {k: p and round(p, 4) for k, p in at_the_end({"a": sure, "b": unsure}, 2).items()}
    {'a': 0.0033, 'b': 1.0}
    """
    corrected = [at_a_look(gap, looks, 1) for gap in gaps.values()]
    return dict(zip(gaps, statistics.holm(corrected), strict=True))


def climb(
    names: Sequence[Key], looks: Sequence[int],
    decided: Callable[[tuple[Key, ...], int], Collection[Key]],
) -> dict[Key, int]:  # fmt: skip
    """Return at how many seeds each comparison stopped.

    Args:
      names: what is compared with the baseline.
      looks: rising numbers of seeds.
      decided: given what is left and a number of seeds, brings each of them to it and returns those
        that are decided.

    >>> climb(["worse", "alike"], (3, 5), lambda left, seeds: {"worse"})
    {'worse': 3, 'alike': 5}
    """
    left, stopped = tuple(names), {}
    for seeds in looks:
        done = decided(left, seeds)
        ends = [name for name in left if name in done or seeds == looks[-1]]
        stopped |= dict.fromkeys(ends, seeds)
        left = tuple(name for name in left if name not in ends)
        if not left:
            break
    return stopped
