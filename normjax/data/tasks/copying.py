"""Copying at a fixed distance k through noise: a predictor must look at one place and no other.

    x_t uniform for t < k;   x_t = x_{t-k} + e_t mod V, with e_t = 0 with probability 1 - r + r/V
                                                   and any other value with probability r/V

(with probability r the copy is replaced by a fresh token). Scored are the copies. The tokens are k
chains that know nothing of each other, so

    full = linear = H(e)      current = current_position = nothing = log V

and the multiset of earlier tokens contains the one to copy, but not which it is: its value is a sum
over the counts of the k chains.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from normjax.data.tasks.counts import Counts
from normjax.data.tasks.task import Floats, Task, below, conditional_entropy, entropy

MOST_PLACES = 1 << 15


def channel(size: int, noise: float) -> Floats:
    """Return P(received | sent), (V, V): the token itself, with probability r a fresh one.

    >>> channel(2, 0.5)
    array([[0.75, 0.25],
           [0.25, 0.75]])
    """
    return (1 - noise) * np.eye(size) + noise / size


def through(sent: np.ndarray, u: np.ndarray, size: int, noise: float) -> np.ndarray:
    """Return tokens received through the channel, from one number in [0, 1) each.

    A number below r / V (V - 1) moves the token by 1 .. V - 1, each for an equal share of them.
    """
    wrong = noise / size * (size - 1)
    moves = 1 + np.minimum(below(u / wrong if wrong else u, size - 1), size - 2)
    return np.where(u < wrong, (sent + moves) % size, sent)


@dataclasses.dataclass(frozen=True)
class Copying(Task):
    """Copying at a fixed distance.

    Attributes:
      size: V, tokens.
      distance: k, at least 2: x_{t+1} is copied from x_{t+1-k}.
      noise: r, the probability that a fresh token replaces the copy.
    """

    size: int = 3
    distance: int = 5
    noise: float = 0.2

    @property
    def vocabulary_size(self) -> int:
        return self.size

    @property
    def least_window(self) -> int:
        return self.distance

    @property
    def scored(self) -> np.ndarray:
        return np.arange(1, self.window + 1) >= self.distance

    @property
    def uniforms_per_sequence(self) -> int:
        return self.window + 1

    def sequences(self, u: np.ndarray) -> np.ndarray:
        k, x = self.distance, np.empty(u.shape, np.int64)
        x[:, :k] = below(u[:, :k], self.size)
        for t in range(k, self.window + 1, k):
            end = min(t + k, self.window + 1)
            x[:, t:end] = through(x[:, t - k : end - k], u[:, t:end], self.size, self.noise)
        return x

    def pair_laws(self) -> Floats:
        return np.full((self.window, self.size, self.size), self.size**-2.0)

    def full_losses(self) -> Floats:
        return np.full(self.window, entropy(channel(self.size, self.noise)[0]))

    def linear_losses(self) -> Floats:
        """As full: log P(x_{t+1} | x_{t+1-k}) is a term for one place."""
        return self.full_losses()

    def unordered_losses(self) -> Floats | str:
        """Sum over counts; by symmetry of the tokens the current one may be taken to be 0."""
        counts = Counts(self.size, self.window)
        if self.distance * counts.places(self.window) > MOST_PLACES:
            return f"the counts of {self.window} tokens of {self.size} kinds are too many to add up"
        k, losses = self.distance, np.zeros(self.window)
        for t in np.flatnonzero(self.scored):
            # Each chain counts its tokens among x_0 .. x_{t-1}; chain c holds x_c, x_{c+k}, ...
            lengths = [len(range(c, t, k)) for c in range(k)]
            here, target = t % k, (t + 1) % k
            # x_t = 0 stands for all: times V, by symmetry of the tokens.
            law, n = self._sent_on(_counted(self, lengths[here]))[0] * self.size, lengths[here]
            for c in range(k):
                if c not in (here, target):
                    other = _counted(self, lengths[c]).sum(axis=0)
                    law, n = counts.convolved(law, n, other, lengths[c]), n + lengths[c]
            coming = self._sent_on(_counted(self, lengths[target]))
            joint = [counts.convolved(law, n, next, lengths[target]) for next in coming]
            losses[t] = conditional_entropy(np.stack(joint, axis=-1))
        return losses

    def _sent_on(self, law: Floats) -> Floats:
        """Return the law with the last token replaced by the next of its chain."""
        return channel(self.size, self.noise).T @ law


@functools.lru_cache(maxsize=256)
def _counted(task: Copying, length: int) -> Floats:
    """Return P(last token, counts) of a chain of so many tokens: (V, places).

    For no tokens the "last" one is uniform, so that sending it on gives the first token.
    """
    counts = Counts(task.size, task.window)
    law = np.full((task.size, 1), 1 / task.size)
    for n in range(length):
        sent = task._sent_on(law)
        law = np.stack([counts.moved(sent[v], n, v) for v in range(task.size)])
    return law
