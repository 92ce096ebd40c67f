"""Weights that mix the rows of a state: how a branch reads streams, keeps them and writes to them.

R, A and B of the equation are one kind of thing. H has n rows (streams, or a list of sources that
is filled from the front) of d features; weights W are (m, n), or (m, n, d) for one weight per
feature, and give the rows sum_n W_mn H_n. They are constants, learned, or functions of H; then they
carry their own derivative, as a norm does.

A class of one's own needs four things: ``parameters``, ``value``, ``derivative``, ``record``.

Shapes: leading axes are free (batch, positions), n rows, d features, position = number of the
sub-layer from 0, which may be traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.norm_derivatives import Floats, rms_norm_derivative
from normjax.norm_functions import rms_norm


def softmax_over(there: Array, logits: Array) -> Array:
    """Return the softmax over the last axis of the entries that are there; each row has one.

    The others are -inf, not the most negative number: a logit may overflow to -inf, and beside that
    number it would give all weight to what is not there. So it is NaN, which is noticed.
    """
    return jax.nn.softmax(jnp.where(there, logits, -jnp.inf), axis=-1)


Start = Callable[[Any, int], Any]
"""Values of weights at a sub-layer: ``(position, rows) -> (m, n)``, JAX or nested lists."""


def one_hot(position: Any, rows: int) -> Any:
    """The identity: every stream keeps itself."""
    del position
    return jnp.eye(rows)


def nth(position: Any, rows: int) -> Any:
    """Sub-layer number l reads stream l modulo n alone."""
    return (jnp.arange(rows) == position % rows).astype(jnp.float32)[None]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Constant weights of every sub-layer.

    Attributes:
      word: what they are called in the equation.
      start: their values.
      per_feature: whether a weight is a vector of d: W is (m, n, d) then.

    >>> mean = Weights("mean", lambda position, rows: np.full((1, rows), 1 / rows))
    >>> mean.value({}, jnp.ones((3, 2, 4)), 0).shape
    (1, 2)
    """

    word: str
    start: Start
    per_feature: bool = False

    def parameters(self, position: Any, rows: int, width: int) -> dict[str, Array]:
        """Return the start values of what is learned, by name."""
        del position, rows, width
        return {}

    def value(self, parameters: Mapping[str, Array], state: Array, position: Any) -> Array:
        """Return W (..., m, n) or (..., m, n, d) at a state (..., n, d)."""
        del parameters
        return jnp.asarray(self.start(position, state.shape[-2]), state.dtype)

    def derivative(self, parameters: Mapping[str, Any], state: Floats, position: int) -> Any:
        """Return dW / dH, (..., m, n, n d) in float64, or None for weights that do not move."""
        del parameters, state, position

    def record(self) -> dict[str, Any]:
        """Return them as JSON: the values at the first three sub-layers, of two and three rows."""
        values = [
            np.asarray(self.start(position, rows), np.float64).round(5).tolist()
            for rows in (2, 3) for position in range(3)
        ]  # fmt: skip
        return {"weights": type(self).__name__, "word": self.word, "start": values}


class LearnedWeights(Weights):
    """Weights that are learned and do not depend on the state; ``start`` is where they begin."""

    def parameters(self, position: Any, rows: int, width: int) -> dict[str, Array]:
        """Return {"weights": (m, n)}."""
        return {"weights": jnp.asarray(self.start(position, rows), jnp.float32)}

    def value(self, parameters: Mapping[str, Array], state: Array, position: Any) -> Array:
        """Return the learned values."""
        return parameters["weights"].astype(state.dtype)


@dataclasses.dataclass(frozen=True)
class SoftmaxOverSources:
    """softmax_i(q . r(H_i)) over the sources that are there: r divides by the root mean square.

    q is learned and starts at zero: then all sources weigh the same. Before sub-layer number l
    there are l + 1 sources (the embedding and l outputs).

    References:
      Attention residuals, arXiv 2603.15031, sections 3 and 4.
    """

    word: str
    eps: float = 1e-6
    per_feature = False

    def parameters(self, position: Any, rows: int, width: int) -> dict[str, Array]:
        """Return {"query": (d,)}."""
        return {"query": jnp.zeros(width, jnp.float32)}

    def value(self, parameters: Mapping[str, Array], state: Array, position: Any) -> Array:
        """Return W (..., 1, n), in float32 at least: zero for rows that are not filled yet."""
        wide = state.astype(jnp.promote_types(state.dtype, jnp.float32))
        logits = rms_norm(wide, eps=self.eps) @ parameters["query"].astype(wide.dtype)
        filled = jnp.arange(state.shape[-2]) <= position
        return softmax_over(filled, logits)[..., None, :].astype(state.dtype)

    def derivative(self, parameters: Mapping[str, Any], state: Floats, position: int) -> Floats:
        """Return dW / dH (..., 1, n, n d): W_i (s_i - sum_j W_j s_j) with s_i = d logit_i / dH."""
        n, d = state.shape[-2:]
        query = np.asarray(parameters["query"], np.float64)
        filled = np.arange(n) <= position
        logits = np.where(filled, state @ query / _rms(state, self.eps), -np.inf)
        w = np.exp(logits - logits.max(-1, keepdims=True))
        w = w / w.sum(-1, keepdims=True)
        slopes = rms_norm_derivative(state, eps=self.eps).vjp(np.broadcast_to(query, state.shape))
        own = np.zeros((*state.shape[:-2], n, n, d))
        index = np.arange(n)
        own[..., index, index, :] = slopes
        own = own.reshape(*state.shape[:-2], n, n * d)
        mean = np.sum(w[..., None] * own, axis=-2, keepdims=True)
        return (w[..., None] * (own - mean))[..., None, :, :]

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"weights": type(self).__name__, "word": self.word, "eps": self.eps}


def _rms(x: Floats, eps: float) -> Floats:
    return np.sqrt(np.mean(x * x, axis=-1) + eps)


append = Weights(
    "append",
    lambda position, rows: (jnp.arange(rows) == position + 1).astype(jnp.float32)[:, None],
)
"""B that puts a branch's output behind all that is there: the list of sources grows by one."""


@dataclasses.dataclass(frozen=True)
class Streams:
    """The rows of a state: how many, how they begin, how the output layer reads them.

    Attributes:
      count: n, or a function of the number of sub-layers of the whole decoder.
      start: "copies" (every row begins as the embedding) or "first" (the first one does, the
        others are zero until they are written).
      readout: weights (1, n) over the rows before the final norm; None for their sum.
    """

    count: Any
    start: str = "copies"
    readout: Any = None

    def rows(self, sublayers: int) -> int:
        """Return n for a decoder of so many sub-layers."""
        return self.count(sublayers) if callable(self.count) else self.count

    def record(self) -> dict[str, Any]:
        """Return them as JSON: the count for 1 to 4 sub-layers."""
        readout = self.readout and self.readout.record()
        counts = [self.rows(sublayers) for sublayers in range(1, 5)]
        return {"count": counts, "start": self.start, "readout": readout}


def mixed(weights: Array, rows: Array, per_feature: bool = False) -> Array:
    """Return the rows W x: (..., m, n) or (..., m, n, d) over (..., n, d) gives (..., m, d)."""
    letters = "...mnd,...nd->...md" if per_feature else "...mn,...nd->...md"
    return jnp.einsum(letters, weights, rows)
