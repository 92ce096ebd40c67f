"""Where the normalization stands: one equation and the table of its values.

Every sub-layer (attention or MLP, the branch F) of the decoder computes

    h' = P( a h + b Q( F( c N(h) ) ) )

N is what the branch reads through, Q what its output passes, P what the whole stream passes; each
is the model's norm or the identity. a is the weight of the residual path, b of the branch, c of
what the branch reads: constants, or functions of the block's number l = 1..L, or (b) learned.
A :class:`Placement` is one such value; adding a row to :data:`PLACEMENTS` is all it takes to have
it trained, compared and reported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import Array

Schedule = Callable[[int, int], float]
"""A constant of block l (counted from 1) in a decoder of L blocks: ``(l, L) -> value``."""


def one(block: int, depth: int) -> float:
    """The constant 1."""
    return 1.0


def zero(block: int, depth: int) -> float:
    """The constant 0."""
    return 0.0


@dataclasses.dataclass(frozen=True)
class Placement:
    """One value of the equation h' = P(a h + b Q(F(c N(h)))).

    Attributes:
      title: what a legend calls it.
      source: where it comes from.
      read, output, stream: whether N, Q and P are the model's norm (True) or the identity.
      residual: a, the weight of the residual path.
      branch: b, the weight of the branch; where it is learned, its value at initialization.
      scale: c, the factor on what the branch reads.
      learned_branch: "" for a constant b, "scalar" for one learned number per sub-layer, "vector"
        for one per feature.
      final_norm: whether the decoder normalizes the stream once more before the output layer;
        streams that P has just normalized do not need it.
      init: the initialization rule it was published with, or "" for the model's own.
      branch_gain: factor on the initial value, output and MLP weights, as a function of depth.
    """

    title: str
    source: str
    read: bool = False
    output: bool = False
    stream: bool = False
    residual: Schedule = one
    branch: Schedule = one
    scale: Schedule = one
    learned_branch: str = ""
    final_norm: bool = False
    init: str = ""
    branch_gain: Callable[[int], float] = lambda depth: 1.0

    def without_residual(self) -> Placement:
        """The same placement with a = 0: only the branch is passed on."""
        return dataclasses.replace(self, title=self.title + ", no residual", residual=zero)


PLACEMENTS: dict[str, Placement] = {
    "pre": Placement(
        "pre-norm", "Xiong et al. 2020, arXiv 2002.04745", read=True, final_norm=True
    ),
    "post": Placement("post-norm", "Vaswani et al. 2017, arXiv 1706.03762", stream=True),
    "none": Placement("no norm", "h + F(h)"),
    "sandwich": Placement(
        "sandwich", "Ding et al. 2021, arXiv 2105.13290; Kim et al. 2025, arXiv 2502.02732",
        read=True, output=True, final_norm=True,
    ),
    "branch_output": Placement(
        "branch-output norm", "Liu et al. 2021, arXiv 2111.09883; OLMo 2 2024, arXiv 2501.00656",
        output=True, final_norm=True,
    ),
    "deepnorm": Placement(
        "DeepNorm", "Wang et al. 2022, arXiv 2203.00555, table of section 4, decoder-only",
        stream=True, residual=lambda block, depth: (2 * depth) ** 0.25,
        init="xavier", branch_gain=lambda depth: (8 * depth) ** -0.25,
    ),
    "layernorm_scaling": Placement(
        "LayerNorm scaling", "Sun et al. 2025, arXiv 2502.05795",
        read=True, scale=lambda block, depth: block**-0.5, final_norm=True, init="gpt2_plain",
    ),
    "skipinit": Placement(
        "SkipInit", "De and Smith 2020, arXiv 2002.10444", branch=zero, learned_branch="scalar"
    ),
    "layerscale": Placement(
        "LayerScale", "Touvron et al. 2021, arXiv 2103.17239, eq. 4", read=True,
        branch=lambda block, depth: 0.1 if depth <= 18 else 1e-5 if depth <= 24 else 1e-6,
        learned_branch="vector", final_norm=True,
    ),
}  # fmt: skip


def resolve(name: str, residual: bool = True) -> Placement:
    """Return a row of the table, with a = 0 where ``residual`` is False.

    >>> resolve("pre", residual=False).residual(1, 4)
    0.0
    """
    placement = PLACEMENTS[name]
    return placement if residual else placement.without_residual()


Map = Callable[[Array], Array]
Tap = Callable[..., Array]
"""Sees a named array on its way and returns it: ``(name, x) -> x``."""
Factor = Any
"""A Python float, a scalar array, or an array of shape (d,)."""


def untapped(name: str, x: Array) -> Array:
    """The tap that sees nothing: returns x."""
    return x


def combine(
    h: Array,
    branch: Map,
    *,
    read: Map,
    output: Map,
    stream: Map,
    a: Factor = 1.0,
    b: Factor = 1.0,
    c: Factor = 1.0,
    tap: Tap = untapped,
) -> Array:
    """Return h' = P(a h + b Q(F(c N(h)))) with F = branch, N = read, Q = output, P = stream.

    Args:
      h: (..., d), the residual stream.
      branch, read, output, stream: functions (..., d) -> (..., d).
      a, b, c: Python floats, scalars, or (for b) an array of shape (d,).
      tap: called with "read", c N(h); "written", b Q(F(c N(h))); "sum", what P reads.

    Returns:
      (..., d) in the dtype of h: factors are cast to it, so that a float32 constant does not widen
      a bfloat16 stream.

    >>> import jax.numpy as jnp
    >>> same = lambda x: x
    >>> h = jnp.array([1.0, 2.0])
    >>> combine(h, lambda x: 3 * x, read=same, output=same, stream=same, a=0.0)
    Array([3., 6.], dtype=float32)
    """
    f = tap("written", _times(b, output(branch(tap("read", _times(c, read(h)))))))
    if isinstance(a, int | float) and a == 0:
        return stream(tap("sum", f))
    return stream(tap("sum", _times(a, h) + f))


def _times(factor: Factor, x: Array) -> Array:
    if isinstance(factor, int | float):  # float(): a numpy float64 would widen x
        return x if factor == 1 else x * float(factor)
    return x * factor.astype(x.dtype)
