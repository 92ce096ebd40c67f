"""Laws of token counts: what the multiset of so many tokens is reckoned with.

The counts (n_0 .. n_{V-1}) of n tokens are C(n + V - 1, V - 1) places, numbered in the order of
their codes n_0 + n_1 B + n_2 B^2 + ... over all tokens but the last. One more token v adds its own
term to the code, and independent counts add: their laws are convolved. All numbers are sums of
products of probabilities, without cancellation, so errors stay relative.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of tokens of V kinds.

    Attributes:
      kinds: V.
      most: the largest number of tokens; the base B is one more.
    """

    kinds: int
    most: int

    def places(self, n: int) -> int:
        """Return how many different counts n tokens can have.

        >>> Counts(3, 9).places(2)
        6
        """
        return math.comb(n + self.kinds - 1, self.kinds - 1)

    def stride(self, token: int) -> int:
        """Return what one more of a token adds to the code."""
        return (self.most + 1) ** token if token < self.kinds - 1 else 0

    def moved(self, law: np.ndarray, n: int, token: int) -> np.ndarray:
        """Return the law of the counts with one token more: (..., places(n)) -> (n + 1).

        >>> Counts(2, 9).moved(np.array([0.25, 0.75]), 1, 0)  # one of token 1, or one of token 0
        array([0.  , 0.25, 0.75])
        """
        out = np.zeros((*law.shape[:-1], self.places(n + 1)))
        out[..., self._at(n, n + 1, self.stride(token))] = law
        return out

    def convolved(self, law: np.ndarray, n: int, other: np.ndarray, m: int) -> np.ndarray:
        """Return the law of the sum of independent counts of n and m tokens: (places(n + m),)."""
        out = np.zeros(self.places(n + m))
        for p, code in zip(other, _codes(self, m), strict=True):
            if p:
                out[self._at(n, n + m, int(code))] += p * law
        return out

    def _at(self, n: int, later: int, more: int) -> np.ndarray:
        """Return the places among the later counts of the codes of n tokens plus ``more``."""
        return np.searchsorted(_codes(self, later), _codes(self, n) + more)


@functools.lru_cache(maxsize=256)
def _codes(counts: Counts, n: int) -> np.ndarray:
    """Return the codes of all counts of n tokens, in order: (places(n),)."""
    codes, left = np.zeros(1, np.int64), np.array([n])
    for token in range(counts.kinds - 1):
        here = left + 1
        starts = np.repeat(np.cumsum(here) - here, here)
        digit = np.arange(here.sum()) - starts
        codes = np.repeat(codes, here) + digit * counts.stride(token)
        left = np.repeat(left, here) - digit
    return np.sort(codes)


def partitions(total: int, parts: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a sum of so many parts, 0 included, largest first.

    >>> list(partitions(4, 2))
    [(4, 0), (3, 1), (2, 2)]
    """
    if parts == 0:
        if total == 0:
            yield ()
        return
    top = total if largest is None else min(total, largest)
    for first in range(top, -1, -1):
        if first * parts < total:
            return
        for rest in partitions(total - first, parts - 1, first):
            yield (first, *rest)
