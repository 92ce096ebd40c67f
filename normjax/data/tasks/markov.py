"""Markov chains of order 1 and 2: how far back does a predictor have to look?

Order 1. x_{t+1} depends on x_t alone, and the chain starts in its stationary law p, so that

    full = current = H(F) - H(p),   nothing = H(p)

with F(x, y) = P(x_t = x, x_{t+1} = y). Order 2. x_0 and x_1 are uniform and

    P(z | y, x)  =  a[z - x] b[z - y] / sum_z' a[z' - x] b[z' - y]    (x = x_t, y = x_{t-1}, mod V)

so that log-odds of z are a sum of one term for the current token and one for the token before:
the whole answer is linear in one-hot inputs, and what is needed besides is attention to one place.

References:
  Edelman et al. 2024, "The Evolution of Statistical Induction Heads", arXiv 2402.11004; Makkuva et
  al. 2024, "Attention with Markov", arXiv 2402.04161.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from normjax.data.tasks.counts import Counts
from normjax.data.tasks.task import Floats, Task, below, categorical, conditional_entropy, entropy

MOST_PLACES = 1 << 20

# Pairs in hundredths: 2 of each, 12 around 0 1 2 3, 8 to and fro between 0 and 1, 4 that stay at 2.
# Circles leave every token as often as they enter it, so the law of one token is stationary.
PAIRS = ((2, 22, 2, 2), (10, 2, 14, 2), (2, 2, 6, 14), (14, 2, 2, 2))


@dataclasses.dataclass(frozen=True)
class Markov1(Task):
    """A stationary chain of order 1.

    Attributes:
      pairs: (V, V) relative frequencies of pairs (x_t, x_{t+1}), all positive; each token's row and
        column have the same sum.
    """

    pairs: tuple[tuple[float, ...], ...] = PAIRS

    @property
    def vocabulary_size(self) -> int:
        return len(self.pairs)

    @property
    def least_window(self) -> int:
        return 1

    @property
    def uniforms_per_sequence(self) -> int:
        return self.window + 1

    def _pair(self) -> Floats:
        pairs = np.asarray(self.pairs, float)
        return pairs / pairs.sum()

    def sequences(self, u: np.ndarray) -> np.ndarray:
        pair = self._pair()
        steps = np.cumsum(pair / pair.sum(axis=1, keepdims=True), axis=1)[:, :-1]
        x = np.empty(u.shape, np.int64)
        x[:, 0] = categorical(u[:, 0], pair.sum(axis=1))
        for t in range(self.window):
            x[:, t + 1] = (u[:, t + 1, None] >= steps[x[:, t]]).sum(axis=1)
        return x

    def pair_laws(self) -> Floats:
        return np.broadcast_to(self._pair(), (self.window, *self._pair().shape))

    def full_losses(self) -> Floats:
        return np.full(self.window, conditional_entropy(self._pair()))

    def unordered_losses(self) -> Floats:
        """As full: given x_t, the tokens before say nothing of x_{t+1}."""
        return self.full_losses()

    def linear_losses(self) -> Floats:
        """As full: log P(y | x_t) is a term for the current token."""
        return self.full_losses()


@dataclasses.dataclass(frozen=True)
class Markov2(Task):
    """A chain of order 2 that starts with two uniform tokens.

    Attributes:
      current: a, (V,) positive weights of z - x_t mod V.
      before: b, (V,) positive weights of z - x_{t-1} mod V.
    """

    current: tuple[float, ...] = (1, 3, 1)
    before: tuple[float, ...] = (12, 1, 2)

    @property
    def vocabulary_size(self) -> int:
        return len(self.current)

    @property
    def least_window(self) -> int:
        return 2

    @property
    def uniforms_per_sequence(self) -> int:
        return self.window + 1

    def table(self) -> Floats:
        """Return P(z | y, x) with x = x_t and y = x_{t-1} as an array [y, x, z]."""
        v = np.arange(self.vocabulary_size)
        by = np.asarray(self.current, float)[(v[None, :] - v[:, None]) % len(v)]
        before = np.asarray(self.before, float)[(v[None, :] - v[:, None]) % len(v)]
        weights = before[:, None, :] * by[None, :, :]
        return weights / weights.sum(axis=-1, keepdims=True)

    def sequences(self, u: np.ndarray) -> np.ndarray:
        steps = np.cumsum(self.table(), axis=-1)[..., :-1]
        x = np.empty(u.shape, np.int64)
        x[:, :2] = below(u[:, :2], self.vocabulary_size)
        for t in range(1, self.window):
            x[:, t + 1] = (u[:, t + 1, None] >= steps[x[:, t - 1], x[:, t]]).sum(axis=1)
        return x

    def pair_laws(self) -> Floats:
        size, table = self.vocabulary_size, self.table()
        laws = [np.full((size, size), size**-2.0)]
        for _ in range(1, self.window):
            laws.append(np.einsum("yx,yxz->xz", laws[-1], table))
        return np.array(laws)

    def full_losses(self) -> Floats:
        """Return log V at t = 0, then sum_{y,x} P(x_{t-1} = y, x_t = x) H(P(. | y, x))."""
        rows = entropy(self.table())
        later = [(law * rows).sum() for law in self.pair_laws()[:-1]]
        return np.array([np.log(self.vocabulary_size), *later])

    def linear_losses(self) -> Floats:
        """As full: the log-odds are log a[z - x_t] + log b[z - x_{t-1}], and constant at t = 0."""
        return self.full_losses()

    def unordered_losses(self) -> Floats | str:
        """Sum over (x_{t-1}, x_t, counts of x_0 .. x_{t-1}), carried from t to t + 1."""
        size, table = self.vocabulary_size, self.table()
        counts = Counts(size, self.window)
        if size**2 * counts.places(self.window) > MOST_PLACES:
            return f"the counts of {self.window} tokens of {size} kinds are too many to add up"
        law = np.full((size, size, 1), size**-2.0)  # [x_0, x_1, counts of no tokens]
        joint, losses = law.swapaxes(1, 2), [np.log(size)]
        for t in range(1, self.window):
            law = np.stack([counts.moved(joint[y].T, t - 1, y) for y in range(size)])
            joint = np.einsum("yxn,yxz->xnz", law, table)  # law: [x_{t-1}, x_t, counts before x_t]
            losses.append(conditional_entropy(joint))
        return np.array(losses)
