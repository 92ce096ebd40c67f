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
from collections.abc import Iterator

import numpy as np

from normjax.tasks.task import Floats, Task, conditional_entropy


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

    def _laws(self) -> Iterator[tuple[Floats, np.ndarray]]:
        """Yield for each t P(x_0, x_t, n_01, n_11, x_{t+1}), (2, 2, N, N, 2), and the ones before.

        The ones among x_0 .. x_{t-1} are given for each (x_0, x_t, n_01, n_11).
        """
        n = self.window + 1
        first, now, to_one, stay = np.ogrid[:2, :2, :n, :n]
        back = to_one - now + first  # n_10
        law = np.zeros((2, 2, n, n))
        law[0, 0, 0, 0] = law[1, 1, 0, 0] = 0.5
        for t in range(self.window):
            rest = t - to_one - back - stay  # n_00; where it is negative the law is 0
            hits = np.where(now == 1, stay, to_one) + 1
            seen = np.where(now == 1, stay + back, to_one + rest) + 2
            one = np.where(law > 0, hits / np.where(seen > 0, seen, 1), 0.0)
            joint = law[..., None] * np.stack([1 - one, one], axis=-1)
            yield joint, np.broadcast_to(back + stay, law.shape)
            law = np.zeros_like(law)
            law[:, 0] = joint[:, 0, ..., 0] + joint[:, 1, ..., 0]
            law[:, 1, 1:] += joint[:, 0, :-1, :, 1]
            law[:, 1, :, 1:] += joint[:, 1, :, :-1, 1]

    def pair_laws(self) -> Floats:
        return np.array([joint.sum(axis=(0, 2, 3)) for joint, _ in self._laws()])

    def full_losses(self) -> Floats:
        """Return the mean entropy of the rule of succession, (T,)."""
        return np.array([conditional_entropy(joint) for joint, _ in self._laws()])

    def unordered_losses(self) -> Floats:
        """Sum over (x_t, ones among x_0 .. x_{t-1})."""
        losses = []
        for joint, ones in self._laws():
            together = np.zeros((2, self.window + 2, 2))
            kept = joint.sum(axis=-1) > 0
            np.add.at(together, (np.nonzero(kept)[1], ones[kept]), joint[kept])
            losses.append(conditional_entropy(together))
        return np.array(losses)

    def linear_losses(self) -> str:
        return "transitions are pairs of tokens, and the best sum of terms has no closed form"
