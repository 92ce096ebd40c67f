"""A clock: tokens are independent, and their law depends on the position alone.

    x_t = f_{t mod m} + e_t mod V,   e_t = 0 with probability 1 - r + r/V, else uniform

with a table f of period m: a circular word in which every ordered pair of tokens stands as often
as every other (a de Bruijn word), so that the current token says nothing of the next:

    full = linear = unordered = current_position = H(e)      current = nothing = log V

exactly where the window holds whole periods, and by the pooled law elsewhere. The levels at the
optimum are those that contain the position: full and linear by definition, unordered because it
counts the earlier tokens. A decoder without absolute positions is not shut out: two neighbours
that are both likeliest tokens betray the phase, so it can be guessed from the order of earlier
tokens. The noise makes that slow: a token tells log V - H(e) = 0.31 of the log m = 2.8 nats.

References:
  de Bruijn 1946, "A combinatorial problem".
"""

from __future__ import annotations

import dataclasses

import numpy as np

from normjax.data.tasks.copying import channel, through
from normjax.data.tasks.task import Floats, Task, entropy

WORD = (0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3)
"""Every ordered pair of four tokens once, around the circle."""


@dataclasses.dataclass(frozen=True)
class Clock(Task):
    """Independent tokens with a law of period m.

    Attributes:
      word: (m,) the likeliest token of each phase.
      noise: r, the probability that a uniform token replaces it.
    """

    word: tuple[int, ...] = WORD
    noise: float = 0.5

    @property
    def vocabulary_size(self) -> int:
        return max(self.word) + 1

    @property
    def least_window(self) -> int:
        return len(self.word)

    @property
    def uniforms_per_sequence(self) -> int:
        return self.window + 1

    def _likeliest(self) -> np.ndarray:
        return np.asarray(self.word)[np.arange(self.window + 1) % len(self.word)]

    def sequences(self, u: np.ndarray) -> np.ndarray:
        return through(self._likeliest(), u, self.vocabulary_size, self.noise)

    def pair_laws(self) -> Floats:
        laws = channel(self.vocabulary_size, self.noise)[self._likeliest()]
        return laws[:-1, :, None] * laws[1:, None, :]

    def full_losses(self) -> Floats:
        return np.full(self.window, entropy(channel(self.vocabulary_size, self.noise)[0]))

    def unordered_losses(self) -> Floats:
        """As full: how many tokens came before is the position, and nothing else matters."""
        return self.full_losses()

    def linear_losses(self) -> Floats:
        """As full: a constant for each position."""
        return self.full_losses()
