"""What a task is: a law of token sequences, and the least loss that given information allows.

A sequence x_0 .. x_T is aligned with the window: inputs are x_0 .. x_{T-1}, and position t predicts
x_{t+1}. A predictor that knows K_t(x) at position t has at best the loss

    H(x_{t+1} | K_t)  =  - sum_{k,v} P(K_t = k, x_{t+1} = v) log P(x_{t+1} = v | K_t = k)

in nats. One that does not know the position must give the same answer wherever it sees the same
token; at best it answers with the law pooled over the scored positions, and its loss at t is the
cross-entropy of that answer.
"""

from __future__ import annotations

import abc
import dataclasses
import functools

import numpy as np

from normjax.data.philox import uniforms
from normjax.errors import UserError, check_choice

Floats = np.ndarray

INFORMATION = {
    "full": "the position, the current token and all earlier tokens in order",
    "linear": (
        "all of that, but only through log-odds that are sums of one term for each"
        " (position, token) seen: one linear map from one-hot inputs to logits for each position"
    ),
    "unordered": (
        "the current token and the multiset of earlier tokens, hence also how many there are"
    ),
    "current_position": "the current token and its position",
    "current": "the current token, without its position",
    "nothing": "neither token nor position: one distribution for all scored positions",
}
"""What a predictor may know, by level, from most to least.

Each level can be computed from the one above, but for linear and unordered: neither of those two
contains the other; full contains both, and both contain current_position.
"""


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A law of sequences of T + 1 tokens.

    Attributes:
      window: T, inputs of a window.
    """

    window: int

    def __post_init__(self):
        if self.window < self.least_window:
            raise UserError(
                f"window={self.window}: must be at least {self.least_window}, the shortest in which"
                f" this task can be seen; pass window={self.least_window}"
            )

    # --- what a task states -----------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def vocabulary_size(self) -> int:
        """Number V of different tokens."""

    @property
    @abc.abstractmethod
    def least_window(self) -> int:
        """The shortest window with every kind of position in it."""

    @property
    def scored(self) -> np.ndarray:
        """Which positions t = 0 .. T - 1 count, by their target x_{t+1}: (T,) bool."""
        return np.ones(self.window, bool)

    @property
    @abc.abstractmethod
    def uniforms_per_sequence(self) -> int:
        """How many numbers in [0, 1) make one sequence."""

    @abc.abstractmethod
    def sequences(self, u: np.ndarray) -> np.ndarray:
        """Return sequences (B, T + 1) from numbers in [0, 1), (B, uniforms_per_sequence)."""

    @abc.abstractmethod
    def pair_laws(self) -> Floats:
        """Return P(x_t = x, x_{t+1} = v) as (T, V, V); rows of positions not scored are unused."""

    @abc.abstractmethod
    def full_losses(self) -> Floats:
        """Return H(x_{t+1} | x_0 .. x_t) in nats, (T,)."""

    @abc.abstractmethod
    def unordered_losses(self) -> Floats | str:
        """Return H(x_{t+1} | x_t, multiset of x_0 .. x_{t-1}), (T,), or why it is not known."""

    @abc.abstractmethod
    def linear_losses(self) -> Floats | str:
        """Return the least loss of logits that are linear in one-hot inputs, (T,), or why not."""

    # --- what follows -----------------------------------------------------------------------------

    def sample(self, seed: int, step: int, size: int) -> np.ndarray:
        """Return sequences, a pure function of (seed, step): (size, T + 1) int32.

        Fewer sequences are the first of more: ``sample(s, n, 2)`` begins ``sample(s, n, 5)``.

        Raises:
          UserError: size below 1, or seed or step outside 0 .. 2^64 - 1.
        """
        if size < 1:
            raise UserError(f"size={size}: must be at least 1; pass size=1")
        n = self.uniforms_per_sequence
        u = uniforms(seed, step, size * n).reshape(size, n)
        return self.sequences(u).astype(np.int32)

    def optimum_by_position(self, information: str) -> Floats | None:
        """Return the expected loss at each position of the best predictor: (T,) float64.

        Best means least on average over the scored positions; positions not scored are nan. None
        where the value is not known: :meth:`why_unknown` says why.

        Raises:
          UserError: not a level of :data:`INFORMATION`.
        """
        losses = _losses(self, information)
        return None if isinstance(losses, str) else losses.copy()

    def optimum(self, information: str) -> float | None:
        """Return the least expected loss in nats per scored token, or None where not known."""
        losses = _losses(self, information)
        return None if isinstance(losses, str) else float(losses[self.scored].mean())

    def why_unknown(self, information: str) -> str:
        """Return why there is no exact value at a level; "" where there is one."""
        losses = _losses(self, information)
        return losses if isinstance(losses, str) else ""


@functools.lru_cache(maxsize=256)
def _losses(task: Task, information: str) -> Floats | str:
    check_choice("information", information, INFORMATION)
    losses = _LEVELS[information](task)
    return (
        losses if isinstance(losses, str) else np.where(task.scored, losses + 0.0, np.nan)
    )  # no -0


def _current_position(task: Task) -> Floats:
    return np.array([conditional_entropy(law) for law in task.pair_laws()])


def _current(task: Task) -> Floats:
    laws = task.pair_laws()
    return _pooled(laws, task.scored)


def _nothing(task: Task) -> Floats:
    return _pooled(task.pair_laws().sum(axis=1, keepdims=True), task.scored)


def _pooled(laws: Floats, scored: np.ndarray) -> Floats:
    """Return the loss at each position of the answer that is best on average: (T, K, V) -> (T,)."""
    together = laws[scored].sum(axis=0)
    seen = together.sum(axis=-1, keepdims=True)
    answer = np.divide(together, seen, out=np.ones_like(together), where=together > 0)
    return -(laws * np.log(answer)).sum(axis=(1, 2))


_LEVELS = {
    "full": lambda task: task.full_losses(),
    "linear": lambda task: task.linear_losses(),
    "unordered": lambda task: task.unordered_losses(),
    "current_position": _current_position,
    "current": _current,
    "nothing": _nothing,
}


def entropy(p: Floats) -> Floats:
    """Return - sum p log p over the last axis, in nats, with 0 log 0 = 0.

    >>> float(entropy(np.array([0.5, 0.5, 0.0])) / np.log(2))
    1.0
    """
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1)


def conditional_entropy(joint: Floats) -> float:
    """Return H(target | knowledge) of a joint law (..., V), the target on the last axis, in nats.

    >>> conditional_entropy(np.array([[0.25, 0.25], [0.5, 0.0]])) == 0.5 * float(np.log(2))
    True
    """
    seen = joint.sum(axis=-1, keepdims=True)
    ratio = np.divide(joint, seen, out=np.ones_like(joint), where=joint > 0)
    return float(-(joint * np.log(ratio)).sum())


def categorical(u: Floats, probabilities: Floats) -> np.ndarray:
    """Return the index whose share of [0, 1) each number falls in.

    >>> categorical(np.array([0.0, 0.2, 0.7, 0.999]), np.array([0.2, 0.5, 0.3])).tolist()
    [0, 1, 2, 2]
    """
    return np.searchsorted(np.cumsum(probabilities)[:-1], u, side="right")


def below(u: Floats, n: int) -> np.ndarray:
    """Return floor(u n), uniform on 0 .. n - 1.

    It is never n: for u <= 1 - 2^-53 the product lies at least half a unit in the last place of
    the numbers just below n under it.
    """
    return (u * n).astype(np.int64)
