"""Associative recall: key, value, key, value ...; a key has the same value throughout a sequence.

The map from K keys to V values is drawn anew for each sequence, all maps alike, and keys are drawn
uniformly. Keys and values are different tokens. Scored are the values. In pair i = 0, 1, ... the
key is new with probability (1 - 1/K)^i, and then its value can only be guessed, so that

    full_i = (1 - 1/K)^i log V      current = current_position = nothing = log V

unordered: with c earlier occurrences of the current key, counts n of the other keys and loads m of
the values, what remains is how many ways there are to give the other keys values so that the loads
come out right; all of them are gone through.

linear: the law is the same when the values are renamed, when the keys are renamed and when earlier
pairs are exchanged. The loss is convex in the weights, so (averaging over all of these) the best
logits are a_i m_v, with m_v the number of earlier values v and one number a_i for each pair:

    linear_i = min_a  E log sum_v exp(a m_v)  -  a i (1/K + (1 - 1/K) / V)

a convex function of one number, minimized to the last bits.

References:
  Ba et al. 2016, "Using Fast Weights to Attend to the Recent Past", arXiv 1610.06258; Arora et al.
  2023, "Zoology", arXiv 2312.04927. Olsson et al. 2022, "In-context Learning and Induction Heads",
  arXiv 2209.11895, for the circuit that solves it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable

import numpy as np

from normjax.data.tasks import counts
from normjax.data.tasks.task import Floats, Task, below

MOST_WAYS = 1 << 20
"""Ways to fill the last pair's counts that are gone through at most: a few seconds for a window."""

MOST_LOADS = 1 << 14
"""Loads of the last pair that are summed over at most."""


@dataclasses.dataclass(frozen=True)
class Recall(Task):
    """Key-value pairs with a map of the sequence's own.

    Attributes:
      keys: K, tokens 0 .. K - 1.
      values: V, tokens K .. K + V - 1.
    """

    keys: int = 6
    values: int = 4

    @property
    def vocabulary_size(self) -> int:
        return self.keys + self.values

    @property
    def least_window(self) -> int:
        return 3

    @property
    def scored(self) -> np.ndarray:
        return np.arange(self.window) % 2 == 0

    @property
    def _pairs(self) -> int:
        return self.window // 2 + 1

    @property
    def uniforms_per_sequence(self) -> int:
        return self.keys + self._pairs

    def sequences(self, u: np.ndarray) -> np.ndarray:
        chosen = below(u[:, : self.keys], self.values)
        keys = below(u[:, self.keys :], self.keys)
        values = self.keys + np.take_along_axis(chosen, keys, axis=1)
        return np.stack([keys, values], axis=-1).reshape(len(u), -1)[:, : self.window + 1]

    def pair_laws(self) -> Floats:
        laws = np.zeros((self.window, self.vocabulary_size, self.vocabulary_size))
        laws[:, : self.keys, self.keys :] = 1 / (self.keys * self.values)
        return laws

    def _at_values(self, losses: list[float]) -> Floats:
        """Return losses of the pairs at their positions."""
        out = np.zeros(self.window)
        out[::2] = losses
        return out

    @property
    def _scored_pairs(self) -> int:
        return int(self.scored.sum())

    def full_losses(self) -> Floats:
        new = (1 - 1 / self.keys) ** np.arange(self._scored_pairs)
        return self._at_values(list(new * math.log(self.values)))

    def linear_losses(self) -> Floats | str:
        last = self._scored_pairs - 1
        if _more_than(MOST_LOADS, counts.partitions(last, self.values)):
            return f"{last + 1} pairs can load the values in too many ways to add up"
        return self._at_values([self._linear(i) for i in range(self._scored_pairs)])

    def _linear(self, i: int) -> float:
        """Return the minimum over a of E log sum_v exp(a m_v) - a E m_target."""
        loads = np.array(list(counts.partitions(i, self.values)))
        weights = self._law_of_loads(loads)
        target = i * (1 / self.keys + (1 - 1 / self.keys) / self.values)

        def slope(a: float) -> float:
            p = np.exp(a * (loads - loads.max(axis=1, keepdims=True)))
            return float(weights @ ((p * loads).sum(axis=1) / p.sum(axis=1))) - target

        low, high = 0.0, 1.0  # at 0 the slope is i / V - target, never above 0
        while slope(high) < 0 and high < 64:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if slope(middle) < 0 else (low, middle)
        top = loads.max(axis=1)
        spread = np.log(np.exp(low * (loads - top[:, None])).sum(axis=1))
        return float(weights @ (low * top + spread)) - low * target

    def _law_of_loads(self, loads: np.ndarray) -> Floats:
        """Return the probability of loads (N, V) of i pairs, each row for all its orders.

        Given how many keys s_v each value has, the values drawn are independent: m is multinomial.
        """
        shares = np.array(
            [s for s in itertools.product(range(self.keys + 1), repeat=self.values)
             if sum(s) == self.keys]
        )  # fmt: skip
        log_maps = _log_multinomial(shares) - self.keys * math.log(self.values)
        log_share = np.log(np.where(shares > 0, shares, 1) / self.keys)
        log_p = loads @ log_share.T + log_maps
        log_p[(loads @ (shares == 0).T) > 0] = -np.inf  # a value without a key cannot come
        return _row_orders(loads) * np.exp(log_p + _log_multinomial(loads)[:, None]).sum(axis=1)

    def unordered_losses(self) -> Floats | str:
        last = self._scored_pairs - 1
        ways = len(_ways(self.keys - 1, self.values)[0])
        rows = (1 for c in range(1, last + 1) for _ in counts.partitions(last - c, self.keys - 1))
        if _more_than(MOST_WAYS // ways, rows):
            return f"{last + 1} pairs can be put together in too many ways to go through"
        return self._at_values([self._unordered(i) for i in range(self._scored_pairs)])

    def _unordered(self, i: int) -> float:
        """Return H(value | counts of keys, loads of values) in pair i.

        Values are alike, so the current key's may be taken to be the first. Then N(m), the number
        of ways to give the other keys values with loads m in all, stands beside the number of ways
        in which the current key has value v: N(m with entries 0 and v exchanged).
        """
        k, v = self.keys, self.values
        new = (1 - 1 / k) ** i  # then the value is independent of all that was seen
        rows, weights = [], []
        for c in range(1, i + 1):
            for others in counts.partitions(i - c, k - 1):
                rows.append((c, *others))
                log_p = math.lgamma(i + 1) - sum(math.lgamma(n + 1) for n in rows[-1])
                weights.append(_orders(others) * math.exp(log_p - i * math.log(k)))
        if not rows:
            return math.log(v)
        ways, each = _ways(k - 1, v)
        loads = np.einsum("rk,wkv->rwv", np.array(rows)[:, 1:], ways)  # (rows, ways, V)
        loads[..., 0] += np.array(rows)[:, :1]
        loads[..., 1:].sort(axis=-1)
        base = (i + 1) ** np.arange(v)
        at = np.arange(len(rows))[:, None] * (i + 1) ** v
        codes, where, same = np.unique(
            (loads @ base + at).ravel(), return_index=True, return_inverse=True
        )
        number = np.bincount(same, np.tile(each, len(rows)))  # of ways, all orders of the rest
        loads, row = loads.reshape(-1, v)[where], where // len(ways)
        one_order = number / _row_orders(loads[:, 1:])
        total = one_order.copy()
        for value in range(1, v):
            moved = loads[:, [value, *range(1, value), 0, *range(value + 1, v)]]
            moved[:, 1:].sort(axis=-1)
            code = moved @ base + at[row, 0]
            found = np.minimum(np.searchsorted(codes, code), len(codes) - 1)
            total += np.where(codes[found] == code, one_order[found], 0)
        share = np.array(weights)[row] * number / v ** (k - 1)
        return new * math.log(v) + float(-(share * np.log(one_order / total)).sum())


@functools.lru_cache(maxsize=8)
def _ways(keys: int, values: int) -> tuple[np.ndarray, Floats]:
    """Return the ways to give keys values, up to renaming all values but the first.

    Each is a (keys, values) array of 0 and 1, with the number of ways that it stands for.
    """
    ways, each = [], []
    for chosen in itertools.product(range(values), repeat=keys):
        seen = [value for value in dict.fromkeys(chosen) if value]
        if seen == list(range(1, len(seen) + 1)):
            ways.append(np.eye(values, dtype=np.int64)[list(chosen)])
            each.append(math.perm(values - 1, len(seen)))
    return np.array(ways), np.array(each, float)


def _row_orders(rows: np.ndarray) -> Floats:
    """Return for each sorted row in how many different orders its entries can stand."""
    run, orders = np.ones(len(rows)), np.ones(len(rows))
    for j in range(1, rows.shape[1]):
        run = np.where(rows[:, j] == rows[:, j - 1], run + 1, 1)
        orders *= (j + 1) / run
    return orders


def _log_multinomial(rows: np.ndarray) -> Floats:
    """Return log((n_1 + n_2 + ...)! / (n_1! n_2! ...)) of each row."""
    log_factorial = np.array([math.lgamma(n + 1) for n in range(int(rows.sum(axis=1).max()) + 1)])
    return log_factorial[rows.sum(axis=1)] - log_factorial[rows].sum(axis=1)


def _more_than(limit: int, things: Iterable[object]) -> bool:
    """Whether there are more things than a limit; no more than needed are looked at."""
    return sum(1 for _ in itertools.islice(things, limit + 1)) > limit


def _orders(parts: tuple[int, ...]) -> float:
    """Return in how many different orders the parts can stand."""
    same = (len(list(group)) for _, group in itertools.groupby(sorted(parts)))
    return math.factorial(len(parts)) / math.prod(math.factorial(n) for n in same)
