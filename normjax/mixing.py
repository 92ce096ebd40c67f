"""Weights that mix the rows of a state: how a branch reads streams, keeps them and writes to them.

R, A and B of the equation are one kind of thing. H has n rows (streams, or a list of sources that
is filled from the front) of d features; weights W are (m, n), or (m, n, d) for one weight per
feature, and give the rows sum_n W_mn H_n. They are constants, learned, or functions of H; then they
carry their own derivative, as a norm does.

A class of one's own needs four things: ``parameters``, ``value``, ``derivative``, ``record``. With
``tied="read"`` weights have the parameters of those that read, in another form.

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

from normjax.equation import plain
from normjax.norm_derivatives import Floats, rms_norm_derivative, unit
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
      tied: the place ("read", ...) of the same sub-layer with whose parameters they are made; "":
        they have their own.

    >>> mean = Weights("mean", lambda position, rows: np.full((1, rows), 1 / rows))
    >>> mean.value({}, jnp.ones((3, 2, 4)), 0).shape
    (1, 2)
    """

    word: str
    start: Start
    per_feature: bool = False
    tied: str = ""

    def parameters(self, position: Any, rows: int, width: int) -> dict[str, Any]:
        """Return what is learned by name: its start values, or a function of a key for them."""
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
        own = {"tied": self.tied} if self.tied else {}
        return {
            "weights": type(self).__name__,
            "word": self.word,
            "start": _tried(self.start),
        } | own


def _tried(start: Start) -> list[Any]:
    return [
        np.asarray(start(position, rows), np.float64).round(5).tolist()
        for rows in (2, 3) for position in range(3)
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LearnedWeights(Weights):
    """Weights that are learned and do not depend on the state; ``start`` is where they begin.

    Attributes:
      form: W from what is learned, ``(learned, position, rows) -> (m, n)``; None: it is W itself.
    """

    form: Callable[[Array, Any, int], Array] | None = None

    def parameters(self, position: Any, rows: int, width: int) -> dict[str, Any]:
        """Return {"weights": start}."""
        return {"weights": jnp.asarray(self.start(position, rows), jnp.float32)}

    def value(self, parameters: Mapping[str, Array], state: Array, position: Any) -> Array:
        """Return the learned values, in their form."""
        own = parameters["weights"].astype(state.dtype)
        return own if self.form is None else self.form(own, position, state.shape[-2])

    def record(self) -> dict[str, Any]:
        """Return them as JSON: as constants, with the form of the start and of twice as much."""
        out, form = Weights.record(self), self.form
        if form is not None:
            out["form"] = _tried(lambda i, n: form(jnp.asarray(self.start(i, n)), i, n))
            out["form"] += _tried(lambda i, n: form(2.0 * jnp.asarray(self.start(i, n)), i, n))
        return out


@dataclasses.dataclass(frozen=True)
class RowSizes(Weights):
    """W_i1 = s_i rms(H_i): what is written to a row is as large as the row; s is learned.

    ``start`` is where s begins, (n, 1).
    """

    def parameters(self, position: Any, rows: int, width: int) -> dict[str, Any]:
        """Return {"size": start}."""
        return {"size": jnp.asarray(self.start(position, rows), jnp.float32)}

    def value(self, parameters: Mapping[str, Array], state: Array, position: Any) -> Array:
        """Return W (..., n, 1), computed in float32 at least."""
        wide = state.astype(jnp.promote_types(state.dtype, jnp.float32))
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        some = square > 0  # the root has no derivative at zero: there it is taken to be zero
        rms = jnp.where(some, jnp.sqrt(jnp.where(some, square, 1)), 0)
        return (parameters["size"].astype(wide.dtype) * rms).astype(state.dtype)

    def derivative(self, parameters: Mapping[str, Any], state: Floats, position: int) -> Floats:
        """Return dW / dH (..., n, 1, n d): s_i H_i / (sqrt(d) |H_i|) in the columns of row i."""
        n, d = state.shape[-2:]
        slope = np.asarray(parameters["size"], np.float64) * unit(state) / np.sqrt(d)
        out = np.zeros((*state.shape[:-2], n, n, d))
        index = np.arange(n)
        out[..., index, index, :] = slope
        return out.reshape(*state.shape[:-2], n, 1, n * d)


@dataclasses.dataclass(frozen=True)
class RowGates(Weights):
    """W = static + s tanh(r(H_i) . v): a weight that each row decides by itself.

    r divides by the root mean square. A weight W_mi of row i on its way to row m has the vector
    v_m; where branches are written, W_i1 = static_i + s tanh(r(H_i) . v), one vector for all rows.
    The static weights, v (from 0) and s are learned.

    Attributes:
      size: s at the start.
      writes: whether the rows of W are those of the state.
      eps: in r.

    References:
      Dynamic hyper-connections, arXiv 2409.19606, eqs. 10 to 13.
    """

    size: float = 0.01
    writes: bool = False
    eps: float = 1e-6

    def parameters(self, position: Any, rows: int, width: int) -> dict[str, Any]:
        """Return static (m, n), vectors (d, k), size ()."""
        static = jnp.asarray(self.start(position, rows), jnp.float32)
        count = static.shape[1 if self.writes else 0]
        return {
            "static": static, "vectors": jnp.zeros((width, count), jnp.float32),
            "size": jnp.asarray(self.size, jnp.float32),
        }  # fmt: skip

    def value(self, parameters: Mapping[str, Array], state: Array, position: Any) -> Array:
        """Return W (..., m, n), computed in float32 at least."""
        wide = jnp.promote_types(state.dtype, jnp.float32)
        own = {k: v.astype(wide) for k, v in parameters.items()}
        turned = jnp.tanh(rms_norm(state.astype(wide), eps=self.eps) @ own["vectors"])
        turned = turned if self.writes else jnp.swapaxes(turned, -1, -2)
        return (own["static"] + own["size"] * turned).astype(state.dtype)

    def derivative(self, parameters: Mapping[str, Any], state: Floats, position: int) -> Floats:
        """Return dW / dH (..., m, n, n d): s sech^2 J_r(H_i)^T v, in the columns of row i."""
        own = {k: np.asarray(v, np.float64) for k, v in parameters.items()}
        n, d = state.shape[-2:]
        vectors = own["vectors"].T
        logits = (state @ own["vectors"]) / _rms(state, self.eps)[..., None]
        slopes = rms_norm_derivative(state[..., None, :], eps=self.eps).vjp(vectors)
        slopes = slopes * (own["size"] / np.cosh(logits) ** 2)[..., None]  # (..., n, k, d)
        out = np.zeros((*state.shape[:-2], n, len(vectors), n, d))
        index = np.arange(n)
        out[..., index, :, index, :] = np.moveaxis(slopes, -3, 0)
        out = out.reshape(*out.shape[:-2], n * d)
        return out if self.writes else np.swapaxes(out, -2, -3)

    def record(self) -> dict[str, Any]:
        """Return them as JSON."""
        return Weights.record(self) | {"size": self.size, "writes": self.writes, "eps": self.eps}


@dataclasses.dataclass(frozen=True)
class StateGates(Weights):
    """W = squash(s V^T r(vec H) + base): weights that the whole state decides.

    r divides all rows together by their root mean square. base (``start``, in logits), s and V are
    learned; V is drawn from N(0, spread^2).

    Attributes:
      squash: what makes weights of logits (..., m, n): ``value``, ``derivative``, ``record``.
      size: s at the start.
      spread: of V at the start.
      eps: in r.

    References:
      Manifold-constrained hyper-connections, arXiv 2512.24880.
    """

    squash: Any = None
    size: float = 1.0
    spread: float = 0.02
    eps: float = 1e-6

    def parameters(self, position: Any, rows: int, width: int) -> dict[str, Any]:
        """Return base (m, n), projection (n d, m n), size ()."""
        base = jnp.asarray(self.start(position, rows), jnp.float32)
        shape = (rows * width, base.size)
        return {
            "base": base, "size": jnp.asarray(self.size, jnp.float32),
            "projection": lambda key: self.spread * jax.random.normal(key, shape, jnp.float32),
        }  # fmt: skip

    def value(self, parameters: Mapping[str, Array], state: Array, position: Any) -> Array:
        """Return W (..., m, n), computed in float32 at least."""
        wide = jnp.promote_types(state.dtype, jnp.float32)
        own = {k: v.astype(wide) for k, v in parameters.items()}
        flat = state.astype(wide).reshape(*state.shape[:-2], -1)
        logits = own["size"] * (rms_norm(flat, eps=self.eps) @ own["projection"])
        logits = logits.reshape(*logits.shape[:-1], *own["base"].shape) + own["base"]
        return self.squash.value(logits).astype(state.dtype)

    def derivative(self, parameters: Mapping[str, Any], state: Floats, position: int) -> Floats:
        """Return dW / dH (..., m, n, n d)."""
        own = {k: np.asarray(v, np.float64) for k, v in parameters.items()}
        flat = state.reshape(*state.shape[:-2], -1)
        vectors = own["projection"].T
        logits = own["size"] * (flat @ own["projection"]) / _rms(flat, self.eps)[..., None]
        slopes = rms_norm_derivative(flat[..., None, :], eps=self.eps).vjp(vectors)
        shape = (*state.shape[:-2], *own["base"].shape)
        slopes = own["size"] * slopes.reshape(*shape, flat.shape[-1])
        return self.squash.derivative(logits.reshape(shape) + own["base"], slopes)

    def record(self) -> dict[str, Any]:
        """Return them as JSON."""
        own = {"squash": self.squash.record(), "size": self.size, "spread": self.spread}
        return Weights.record(self) | own | {"eps": self.eps}


@dataclasses.dataclass(frozen=True)
class Sigmoid:
    """most / (1 + exp(-logit)) + least, entry by entry."""

    most: float = 1.0
    least: float = 0.0

    def value(self, logits: Array) -> Array:
        """Return it for logits of any shape."""
        return self.most * jax.nn.sigmoid(logits) + self.least

    def derivative(self, logits: Floats, slopes: Floats) -> Floats:
        """Return its derivative (..., k) from that of the logits (...), (..., k)."""
        p = 1 / (1 + np.exp(-logits))
        return (self.most * p * (1 - p))[..., None] * slopes

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"sigmoid": [self.least, self.most]}


@dataclasses.dataclass(frozen=True)
class Sinkhorn:
    """Logits (n, n) to a nearly doubly stochastic W, of which the rows are the exact side.

    Softmax over the last axis plus eps, division by the columns' sums, then rows and columns in
    turn, ``steps`` - 1 times; each sum plus eps. W is the transpose, so that the last division
    makes its rows sum to 1 but for eps: every new stream is a mean of the old ones. The columns,
    how much of an old stream is kept in all, are off by what the steps have left.

    References:
      arXiv 2512.24880, as DeepSeek-V4 and ports of it have it: the transpose is theirs.
    """

    steps: int = 20
    eps: float = 1e-6

    def value(self, logits: Array) -> Array:
        """Return W (..., n, n) of logits (..., n, n)."""
        P = jax.nn.softmax(logits, axis=-1) + self.eps
        for axis in self._axes():
            P = P / (jnp.sum(P, axis, keepdims=True) + self.eps)
        return jnp.swapaxes(P, -1, -2)

    def derivative(self, logits: Floats, slopes: Floats) -> Floats:
        """Return its derivative (..., n, n, k) from that of the logits (..., n, n, k)."""
        P = np.exp(logits - logits.max(-1, keepdims=True))
        P = P / P.sum(-1, keepdims=True)
        moved = P[..., None] * (slopes - np.sum(P[..., None] * slopes, -2, keepdims=True))
        P = P + self.eps
        for axis in self._axes():
            total = np.sum(P, axis, keepdims=True) + self.eps
            P = P / total
            lost = np.sum(moved, axis - 1, keepdims=True)  # the axis before the last one of k
            moved = (moved - P[..., None] * lost) / total[..., None]
        return np.swapaxes(moved, -2, -3)

    def _axes(self) -> tuple[int, ...]:
        return (-2, *((-1, -2) * (self.steps - 1)))

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"sinkhorn": self.steps, "eps": self.eps}


@dataclasses.dataclass(frozen=True)
class SoftmaxOverSources:
    """softmax_i(q . r(H_i)) over the sources that are there: r divides by the root mean square.

    q is learned and starts at zero: then all sources weigh the same. Before sub-layer number l
    there are 1 + l / group sources, rounded up: the embedding and the sums of ``group`` outputs,
    the last of them perhaps not whole.

    References:
      Attention residuals, arXiv 2603.15031, sections 3 and 4.
    """

    word: str
    eps: float = 1e-6
    group: int = 1
    per_feature = False

    def parameters(self, position: Any, rows: int, width: int) -> dict[str, Array]:
        """Return {"query": (d,)}."""
        return {"query": jnp.zeros(width, jnp.float32)}

    def value(self, parameters: Mapping[str, Array], state: Array, position: Any) -> Array:
        """Return W (..., 1, n), in float32 at least: zero for rows that are not filled yet."""
        wide = state.astype(jnp.promote_types(state.dtype, jnp.float32))
        logits = rms_norm(wide, eps=self.eps) @ parameters["query"].astype(wide.dtype)
        filled = jnp.arange(state.shape[-2]) <= -(-position // self.group)
        return softmax_over(filled, logits)[..., None, :].astype(state.dtype)

    def derivative(self, parameters: Mapping[str, Any], state: Floats, position: int) -> Floats:
        """Return dW / dH (..., 1, n, n d): W_i (s_i - sum_j W_j s_j) with s_i = d logit_i / dH."""
        n, d = state.shape[-2:]
        query = np.asarray(parameters["query"], np.float64)
        filled = np.arange(n) <= -(-position // self.group)
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
        own = {"group": self.group} if self.group != 1 else {}
        return {"weights": type(self).__name__, "word": self.word, "eps": self.eps} | own


def _rms(x: Floats, eps: float) -> Floats:
    return np.sqrt(np.mean(x * x, axis=-1) + eps)


def prefix(weights: Any, place: str) -> str:
    """Return what the names of the parameters of weights begin with, in a place such as "read"."""
    return f"{getattr(weights, 'tied', '') or place}_"


def appended(word: str, group: int = 1) -> Weights:
    """Return B that adds a branch's output to the row of its group: the list of sources grows.

    >>> [appended("append", 2).start(position, 3)[:, 0].tolist() for position in (0, 1, 2)]
    [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    return Weights(
        word, lambda position, n: (jnp.arange(n) == 1 + position // group)[:, None] * 1.0
    )


@dataclasses.dataclass(frozen=True)
class Streams:
    """The rows of a state: how many, how they begin, how the output layer reads them.

    Attributes:
      count: n, or a function of the number of sub-layers of the whole decoder.
      start: "copies" (every row begins as the embedding) or "first" (the first one does, the
        others are zero until they are written).
      readout: weights (1, n) over the rows before the final norm; None for their sum.
      norm: what a slot holds, on the rows that are read out; None for none.
    """

    count: Any
    start: str = "copies"
    readout: Any = None
    norm: Any = None

    def rows(self, sublayers: int) -> int:
        """Return n for a decoder of so many sub-layers."""
        return self.count(sublayers) if callable(self.count) else self.count

    def record(self) -> dict[str, Any]:
        """Return them as JSON: the count for 1 to 4 sub-layers."""
        readout = self.readout and self.readout.record()
        counts = [self.rows(sublayers) for sublayers in range(1, 5)]
        return {"count": counts, "start": self.start, "readout": readout, "norm": plain(self.norm)}


def mixed(weights: Array, rows: Array, per_feature: bool = False) -> Array:
    """Return the rows W x: (..., m, n) or (..., m, n, d) over (..., n, d) gives (..., m, d)."""
    letters = "...mnd,...nd->...md" if per_feature else "...mn,...nd->...md"
    return jnp.einsum(letters, weights, rows)
