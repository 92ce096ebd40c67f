"""How good stated intervals are: the score of Gneiting and Raftery (2007), and a baseline for it.

An interval from l to u that is meant to hold x with the probability 1 - alpha scores

    S = (u - l) + 2/alpha max(l - x, 0) + 2/alpha max(x - u, 0)

in the unit of x, less is better. Its expectation is least where l and u are the alpha/2 and 1 -
alpha/2 quantiles of what one believes (their equation 43), so neither wide nor narrow intervals
gain anything. The skill 1 - S / S_ref is 1 for what is perfect, 0 for what is no better than a
baseline, negative for what is worse.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

FEWEST = 4
"""Other losses that a baseline is made from; fewer are no range."""


def interval_score(low: float, high: float, level: int, value: float) -> float:
    """Return S of an interval that is meant to hold the value in ``level`` per cent of all cases.

    >>> interval_score(1.0, 2.0, 80, 1.5), interval_score(1.0, 2.0, 80, 2.5)
    (1.0, 6.0)
    """
    outside = max(low - value, 0.0) + max(value - high, 0.0)
    return high - low + 200 / (100 - level) * outside


def baseline(
    others: Sequence[float], level: int, ceiling: float | None
) -> tuple[float, float] | None:
    """Return the interval of somebody who knows what the other variants came to, and nothing else.

    It is the central range of the others: from the k-th smallest to the k-th largest, between
    neighbours in proportion, with k = (m + 1) alpha/2 of m others (least and largest where that is
    less than 1). For variants in random order it would hold the next one with the probability
    ``level``, or as near below it as m others allow. Fewer than ``FEWEST`` tell too little: then
    it is 0 to ``ceiling``, None without one.

    >>> baseline([1.0, 2.0, 3.0, 4.0], 80, 9.0), baseline([1.0], 80, 9.0)
    ((1.0, 4.0), (0.0, 9.0))
    """
    if len(others) < FEWEST:
        return None if ceiling is None else (0.0, ceiling)
    tail = (100 - level) / 200
    low, high = np.quantile(others, (tail, 1 - tail), method="weibull")
    return float(low), float(high)
