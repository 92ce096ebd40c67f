"""The same for a model of your own: name tensors where they arise, and profile a loss.

    def loss(params, x, y):
        for i, layer in enumerate(params):
            x = tap(f"block{i}", jnp.tanh(x @ layer))
        return jnp.mean((x - y) ** 2)

    for name, numbers in profile(loss, params, x, y).taps.items(): ...

Outside a profile ``tap`` returns its argument: it adds nothing to a program. A profile runs the
function operation by operation, functions under jit and loops of ``lax`` included, so that a tap in
a loop is seen at every turn; turns are numbered, ``block``, ``block#2``, ...
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.diagnostics.measures import rms, token_similarity, wide
from normjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class TapProfile:
    """What one tapped tensor looked like.

    Attributes:
      shape: of the tensor.
      rms, max_abs, mean: of its entries.
      zeros: share of them that are exactly 0.
      gradient_rms: RMS of the loss's derivative with respect to it.
      token_similarity: mean cosine between two of its rows for a tensor (..., tokens, features)
        with two tokens or more, else None.
    """

    shape: tuple[int, ...]
    rms: float
    max_abs: float
    mean: float
    zeros: float
    gradient_rms: float
    token_similarity: float | None


@dataclasses.dataclass(frozen=True)
class Profile:
    """What :func:`profile` returns.

    Attributes:
      loss: its value.
      taps: {name: :class:`TapProfile`} in the order in which they were passed.
      parameters: {dotted name: RMS of the gradient}.
    """

    loss: float
    taps: dict[str, TapProfile]
    parameters: dict[str, float]


class _Visit:
    """One pass through the function: counts names, adds shifts, keeps tensors."""

    def __init__(self, shifts: dict[str, Array] | None = None):
        self.shifts, self.seen = shifts, {}
        self.abstract: set[str] = set()
        self.counts: dict[str, int] = {}

    def pass_by(self, name: str, x: Array) -> Array:
        if not _has_value(x):  # a trial trace, whose result is thrown away, or a transformation
            self.abstract.add(name)
            return x
        self.counts[name] = self.counts.get(name, 0) + 1
        turn = self.counts[name]
        key = name if turn == 1 else f"{name}#{turn}"
        if self.shifts is not None:
            x = x + self.shifts[key]
        self.seen[key] = x
        return x


_visit: contextvars.ContextVar[_Visit | None] = contextvars.ContextVar("visit", default=None)


def tap(name: str, x: Array) -> Array:
    """Return x; where a profile runs, show it under a name.

    Raises:
      UserError: while a profile runs, x is not a floating array.

    >>> tap("block1", 3.0)
    3.0
    """
    visit = _visit.get()
    if visit is None:
        return x
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise UserError(f"tap {name}: of dtype {jnp.result_type(x)}: must be a floating array")
    return visit.pass_by(name, x)


def profile(loss: Callable[..., Any], params: Any, *batch: Any) -> Profile:
    """Run a loss with its gradient once and return what its taps and parameters looked like.

    Args:
      loss: ``(params, *batch) -> scalar``; a plain function or one that applies a Flax module.
      params: a tree; its floating arrays are differentiated, whatever else it holds (counters,
        keys, flags, functions) is passed on as it is.
      batch: further arguments.

    Raises:
      UserError: the loss is no floating scalar; a tap inside ``jax.vmap``, ``jax.checkpoint`` or
        another transformation that hides its values.

    >>> def loss(w, x):
    ...     return jnp.sum(tap("hidden", x * w))
    >>> found = profile(loss, jnp.array([1.0, -3.0]), jnp.array([2.0, 0.0]))
    >>> found.taps["hidden"].max_abs, found.taps["hidden"].zeros, found.taps["hidden"].gradient_rms
    (2.0, 0.5, 1.0)
    """
    first = _Visit()
    value = _passed(first, loss, params, batch)
    if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise UserError(
            f"loss: returned {jnp.result_type(value)} of shape {jnp.shape(value)}: must be one"
            " floating number"
        )
    hidden = sorted(first.abstract - set(first.counts))
    if hidden:
        raise UserError(
            f"tap {hidden[0]}: is inside jax.vmap, jax.checkpoint or the like, where a tensor has"
            " no value of its own; tap it outside, or leave the transformation out"
        )
    zeros = {name: jnp.zeros_like(x) for name, x in first.seen.items()}
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    own = {i: x for i, (_, x) in enumerate(leaves) if _is_floating(x)}

    def shifted(own: dict[int, Any], shifts: dict[str, Array]) -> tuple[Any, dict[str, Array]]:
        visit = _Visit(shifts)
        whole = structure.unflatten(own.get(i, x) for i, (_, x) in enumerate(leaves))
        return _passed(visit, loss, whole, batch), visit.seen

    (value, seen), (gradients, pulled) = jax.value_and_grad(shifted, (0, 1), has_aux=True)(
        own, zeros
    )
    flat = [(leaves[i][0], g) for i, g in gradients.items()]
    return Profile(
        float(value),
        {name: _described(x, pulled[name]) for name, x in seen.items()},
        {jax.tree_util.keystr(path, simple=True, separator="."): float(rms(g)) for path, g in flat},
    )


def _is_floating(x: Any) -> bool:
    dtype = getattr(x, "dtype", None) or (np.dtype(float) if isinstance(x, float) else None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _passed(visit: _Visit, loss: Callable[..., Any], params: Any, batch: tuple[Any, ...]) -> Any:
    token = _visit.set(visit)
    try:
        with jax.disable_jit():  # a program compiled without taps would be taken from the cache
            return loss(params, *batch)
    finally:
        _visit.reset(token)


def _has_value(x: Any) -> bool:
    try:
        np.asarray(jax.lax.stop_gradient(x))
    except jax.errors.JAXTypeError:
        return False
    return True


def _described(x: Array, gradient: Array) -> TapProfile:
    values = wide(x)
    tokens = x.ndim >= 2 and x.shape[-2] >= 2
    return TapProfile(
        x.shape, float(rms(x)), float(jnp.max(jnp.abs(values))), float(jnp.mean(values)),
        float(jnp.mean(x == 0)), float(rms(gradient)),
        float(token_similarity(x)) if tokens else None,
    )  # fmt: skip
