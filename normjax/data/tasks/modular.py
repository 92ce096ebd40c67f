"""Sums modulo p: what no linear map of the inputs can begin to compute.

Blocks of m + 1 tokens: m operands, independent and uniform on 0 .. p - 1, then their sum modulo p.
Scored are the sums. With p = 2 this is the parity of m bits.

    full = 0      linear = current = current_position = nothing = log p

The multiset of tokens is worth something. For p = 2 it is worth everything, unordered = 0: the
tokens of every whole block have an even sum, so the parity of all tokens so far is the answer.

Any m - 1 operands say nothing of the sum, so the current token alone gives log p. So does every
predictor that is linear in one-hot inputs. Its logits at a sum are f(c) = sum_s W_s[x_s, c], s over
all positions up to the current one, and its expected loss L is convex in W. Adding i to one
operand o of the block, i' to another operand o' and i + i' to the sum leaves the law of the
sequence as it is, so L has the same value for the W so moved. The mean W' over all p^2 moves has at
most that loss, by convexity. It is W'_o[x, c] = mean_{i,i'} W_o[x + i, c + i + i'], where the mean
over i' runs over all c: it does not depend on c. Nor do W'_o', by the mean over i, and W'_s of any
other position s, which moves by c + i + i' alone. Logits that do not depend on c mean a uniform
answer: the least loss of all is log p.

References:
  Power et al. 2022, "Grokking", arXiv 2201.02177; Nanda et al. 2023, "Progress measures for
  grokking via mechanistic interpretability", arXiv 2301.05217. Parity: Minsky and Papert 1969,
  "Perceptrons".
"""

from __future__ import annotations

import dataclasses

import numpy as np

from normjax.data.tasks.counts import Counts
from normjax.data.tasks.task import Floats, Task, below, conditional_entropy

MOST_PLACES = 1 << 23


@dataclasses.dataclass(frozen=True)
class ModularSum(Task):
    """Operands and their sum modulo p, over and over.

    Attributes:
      modulus: p, at least 2; also the number of tokens.
      operands: m, at least 2.
    """

    modulus: int = 5
    operands: int = 2

    @property
    def vocabulary_size(self) -> int:
        return self.modulus

    @property
    def least_window(self) -> int:
        return self.operands

    @property
    def scored(self) -> np.ndarray:
        return np.arange(1, self.window + 1) % (self.operands + 1) == self.operands

    @property
    def uniforms_per_sequence(self) -> int:
        return self._blocks * self.operands

    @property
    def _blocks(self) -> int:
        return -(-(self.window + 1) // (self.operands + 1))

    def sequences(self, u: np.ndarray) -> np.ndarray:
        operands = below(u, self.modulus).reshape(len(u), self._blocks, self.operands)
        sums = operands.sum(axis=-1, keepdims=True) % self.modulus
        return np.concatenate([operands, sums], axis=-1).reshape(len(u), -1)[:, : self.window + 1]

    def pair_laws(self) -> Floats:
        return np.full((self.window, self.modulus, self.modulus), self.modulus**-2.0)

    def full_losses(self) -> Floats:
        return np.zeros(self.window)

    def linear_losses(self) -> Floats:
        """Return log p, by convexity and symmetry: see the head of this file."""
        return np.full(self.window, np.log(self.modulus))

    def unordered_losses(self) -> Floats | str:
        """Sum over the counts M of earlier tokens and the sum S of the block's earlier operands.

        The current token, the last operand o, is independent of (M, S), and the target is S + o: so
        the loss is H(S | M).
        """
        p, counts = self.modulus, Counts(self.modulus, self.window)
        if p * counts.places(self.window) > MOST_PLACES:
            return f"the counts of {self.window} tokens of {p} kinds are too many to add up"
        law, losses = np.zeros((p, 1)), np.zeros(self.window)  # law: [S, counts]
        law[0] = 1.0
        for t in range(self.window):
            place = t % (self.operands + 1)
            if place == self.operands - 1:
                losses[t] = conditional_entropy(law.T)
            if place < self.operands:  # x_t is an operand
                more = [counts.moved(law, t, x) / p for x in range(p)]
                law = sum((np.roll(m, x, axis=0) for x, m in enumerate(more)), np.zeros(()))
            else:  # x_t is the sum; the next block begins with the sum 0
                law = sum((counts.moved(law[s], t, s) for s in range(p)), np.zeros(()))
                law = np.stack([law, *np.zeros((p - 1, law.size))])
        return losses
