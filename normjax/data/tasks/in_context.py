"""A chain whose transition probabilities differ from sequence to sequence: learned in context.

Two tokens. P(x_{t+1} = 1 | x_t = x) = q_x, with q_0 and q_1 drawn uniformly from [0, 1] for each
sequence and x_0 a fair coin. With n_xy the number of earlier transitions, Bayes' rule gives

    P(x_{t+1} = y | x_0 .. x_t)  =  (n_xy + 1) / (n_x0 + n_x1 + 2)        x = x_t

(Laplace's rule of succession), and full is the mean of its entropy over all transition counts. They
are carried along exactly: n_01 and n_10 differ by what the first and the current token say, so that
(x_0, x_t, n_01, n_11) is all there is. unordered comes from the same sum, because the ones among
x_0 .. x_{t-1} are the transitions out of 1. A predictor has to count what followed earlier
occurrences of the current token: a statistical induction head.

References:
  Edelman et al. 2024, "The Evolution of Statistical Induction Heads", arXiv 2402.11004.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from normjax.data.tasks.task import Floats, Task, conditional_entropy


@dataclasses.dataclass(frozen=True)
class InContextChain(Task):
    """A binary chain with its own transition probabilities in each sequence."""

    @property
    def vocabulary_size(self) -> int:
        return 2

    @property
    def least_window(self) -> int:
        return 2

    @property
    def uniforms_per_sequence(self) -> int:
        return self.window + 3

    def sequences(self, u: np.ndarray) -> np.ndarray:
        ones, x = u[:, :2], np.empty((len(u), self.window + 1), np.int64)
        x[:, 0] = u[:, 2] >= 0.5
        for t in range(self.window):
            x[:, t + 1] = u[:, t + 3] < np.take_along_axis(ones, x[:, t, None], axis=1)[:, 0]
        return x

    def pair_laws(self) -> Floats:
        return _sums(self.window).pairs

    def full_losses(self) -> Floats:
        """Return the mean entropy of the rule of succession, (T,)."""
        return _sums(self.window).full

    def unordered_losses(self) -> Floats:
        """Sum over (x_t, ones among x_0 .. x_{t-1})."""
        return _sums(self.window).unordered

    def linear_losses(self) -> str:
        return "transitions are pairs of tokens, and the best sum of terms has no closed form"


class _Sums(NamedTuple):
    pairs: Floats
    full: Floats
    unordered: Floats


@functools.lru_cache(maxsize=8)
def _sums(window: int) -> _Sums:
    """Carry P(x_0, x_t, n_01, n_11) through the window, and sum up what is asked for on the way."""
    pairs, full, unordered = np.zeros((window, 2, 2)), np.zeros(window), np.zeros(window)
    law = np.array([[0.5, 0.0], [0.0, 0.5]])[:, :, None, None]
    for t in range(window):
        joint, ones = _next(law, t)
        pairs[t] = joint.sum(axis=(0, 2, 3))
        full[t] = conditional_entropy(joint)
        possible = law > 0
        kind = (ones + (t + 1) * np.arange(2)[:, None, None])[possible]
        together = [np.bincount(kind, joint[possible, y], 2 * (t + 1)) for y in range(2)]
        unordered[t] = conditional_entropy(np.stack(together, axis=-1))
        # n_01 and n_10 alternate, so that neither passes half of the transitions, rounded up.
        law = np.zeros((2, 2, (t + 2) // 2 + 1, t + 2))
        n01, n11 = joint.shape[2:4]
        law[:, 0, :n01, :n11] = joint[:, 0, ..., 0] + joint[:, 1, ..., 0]
        law[:, 1, 1:n01, :n11] += joint[:, 0, : n01 - 1, :, 1]
        law[:, 1, n01 : n01 + 1, :n11] += joint[:, 0, n01 - 1 :, :, 1][:, : law.shape[2] - n01]
        law[:, 1, :n01, 1 : n11 + 1] += joint[:, 1, ..., 1]
    return _Sums(pairs, full, unordered)


def _next(law: Floats, t: int) -> tuple[Floats, np.ndarray]:
    """Return the law with x_{t+1} as a last axis, and the ones among x_0 .. x_{t-1}."""
    first, now, to_one, stay = np.ogrid[:2, :2, : law.shape[2], : law.shape[3]]
    back = to_one - now + first  # n_10
    rest = t - to_one - back - stay  # n_00; where it is negative the law is 0
    hits = np.where(now == 1, stay, to_one) + 1
    seen = np.where(now == 1, stay + back, to_one + rest) + 2
    one = np.where(law > 0, hits / np.maximum(seen, 1), 0.0)
    return law[..., None] * np.stack([1 - one, one], axis=-1), np.broadcast_to(
        back + stay, law.shape
    )
