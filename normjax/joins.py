"""What a sub-layer makes of its branch's output together with what the branch read.

K of the equation takes y = Q(F(z)) and z = c N(x), and returns what is written to the stream. As
weights and norms do, a join carries its own derivative, by both of its arguments. A class of one's
own needs five things: ``word``, ``parameters``, ``value``, ``derivative``, ``record``.

Shapes: leading axes are free (batch, positions), d features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.norm_derivatives import Floats, rms_norm_derivative, unit
from normjax.norm_functions import l2_norm, rms_norm, simple_rms_norm


@dataclasses.dataclass(frozen=True)
class Tangential:
    """K = m sqrt(d) t / |t|, with t the part of y less its mean that is across z.

    m = sum_c softmax(p)_c sigmoid(z . w_c + b_c) says how far to go, between 0 and 1; p, w and b
    are learned. Its length does not depend on that of y, and it does not move along z: a sub-layer
    that adds a multiple of it turns the stream. Zeros where t is zero.

    Attributes:
      gates: how many w there are.
      spread: of w at the start; p and b start at zero, so that m starts near 1 / 2.

    References:
      Figliolia and Millidge 2026, arXiv 2606.16112, eqs. 3 to 14, with their exponent at its
      default of 1.

    >>> turn = Tangential(gates=1)
    >>> own = {"directions": jnp.zeros((3, 1)), "offsets": jnp.zeros(1), "logits": jnp.zeros(1)}
    >>> moved = turn.value(own, jnp.array([5.0, 1.0, 0.0]), jnp.array([2.0, 0.0, 0.0]), 1e-6)
    >>> [round(float(each), 3) for each in moved]
    [0.0, -0.387, -0.775]
    """

    gates: int = 8
    spread: float = 0.02
    word: str = "turn"

    def parameters(self, width: int) -> dict[str, Any]:
        """Return directions (d, gates), offsets (gates,), logits (gates,)."""
        shape = (width, self.gates)
        return {
            "directions": lambda key: self.spread * jax.random.normal(key, shape, jnp.float32),
            "offsets": jnp.zeros(self.gates, jnp.float32),
            "logits": jnp.zeros(self.gates, jnp.float32),
        }

    def value(self, parameters: Mapping[str, Array], y: Array, z: Array, eps: float) -> Array:
        """Return K (..., d) in the dtype of y, computed in float32 at least; eps is not used."""
        del eps
        dtype = jnp.promote_types(y.dtype, jnp.float32)
        own = {k: v.astype(dtype) for k, v in parameters.items()}
        f, z = y.astype(dtype), z.astype(dtype)
        across = _across(f - jnp.mean(f, axis=-1, keepdims=True), l2_norm(z))
        gates = jax.nn.sigmoid(z @ own["directions"] + own["offsets"])
        size = gates @ jax.nn.softmax(own["logits"])
        return (size[..., None] * simple_rms_norm(across)).astype(y.dtype)

    def derivative(
        self, parameters: Mapping[str, Any], y: Floats, z: Floats, eps: float
    ) -> tuple[Floats, Floats]:
        """Return dK / dy and dK / dz, (..., d, d) float64.

        With u = z / |z|, v = t / |t|, P_x = I - x x^T, C the removal of the mean and g = C y:
        dK/dy = m sqrt(d) P_v P_u C / |t| and
        dK/dz = sqrt(d) ( v (dm/dz)^T - m P_v ((u . g) I + u g^T) P_u / (|t| |z|) ).
        """
        del eps
        own = {k: np.asarray(v, np.float64) for k, v in parameters.items()}
        d = y.shape[-1]
        eye = np.eye(d)
        g = y - y.mean(axis=-1, keepdims=True)
        u, long = unit(z), np.linalg.norm(z, axis=-1)[..., None, None]
        t = _across(g, u)
        size = np.linalg.norm(t, axis=-1)[..., None, None]
        v = unit(t)
        gates = 1 / (1 + np.exp(-(z @ own["directions"] + own["offsets"])))
        p = np.exp(own["logits"] - own["logits"].max())
        p = p / p.sum()
        m = (gates @ p)[..., None, None]
        slope = (p * gates * (1 - gates)) @ own["directions"].T
        around = np.sqrt(d) * m * (eye - _outer(v, v)) / size
        beside = eye - _outer(u, u)
        moved = (np.sum(u * g, axis=-1)[..., None, None] * eye + _outer(u, g)) @ beside / long
        by_z = np.sqrt(d) * _outer(v, slope) - around @ moved
        return around @ beside @ (eye - 1 / d), by_z

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"join": type(self).__name__, "word": self.word} | {
            "gates": self.gates, "spread": self.spread
        }  # fmt: skip


def _across(x: Any, u: Any) -> Any:
    """Return the part of x across the unit vector u; the second time removes what rounding left."""
    for _ in range(2):
        x = x - u * (x * u).sum(axis=-1, keepdims=True)
    return x


def _outer(x: Floats, y: Floats) -> Floats:
    return x[..., :, None] * y[..., None, :]


@dataclasses.dataclass(frozen=True)
class LowRank:
    """K = y + z + g r(z L R): the branch beside a second, linear one of low rank.

    r divides by the root mean square; L (d, rank), R (rank, d) and the gain g are learned.

    Attributes:
      rank: of L R.
      spread: of L and R at the start.

    References:
      LAuReL, Menghani et al. 2024, arXiv 2411.07501; Gemma 3n in the transformers library.

    >>> own = {"left": jnp.eye(2)[:, :1], "right": jnp.eye(2)[:1], "gain": jnp.ones(2)}
    >>> LowRank(1).value(own, jnp.zeros(2), jnp.array([3.0, 4.0]), 0.0).round(3)
    Array([4.414, 4.   ], dtype=float32)
    """

    rank: int = 64
    spread: float = 0.02
    word: str = "LAuReL"

    def parameters(self, width: int) -> dict[str, Any]:
        """Return left (d, rank), right (rank, d), gain (d,)."""

        def drawn(*shape: int) -> Any:
            return lambda key: self.spread * jax.random.normal(key, shape, jnp.float32)

        return {
            "left": drawn(width, self.rank), "right": drawn(self.rank, width),
            "gain": jnp.ones(width, jnp.float32),
        }  # fmt: skip

    def value(self, parameters: Mapping[str, Array], y: Array, z: Array, eps: float) -> Array:
        """Return K (..., d) in the dtype of y; eps is that of the root mean square."""
        own = {k: v.astype(y.dtype) for k, v in parameters.items()}
        return y + z + rms_norm(z @ own["left"] @ own["right"], own["gain"], eps=eps)

    def derivative(
        self, parameters: Mapping[str, Any], y: Floats, z: Floats, eps: float
    ) -> tuple[Floats, Floats]:
        """Return dK / dy = I and dK / dz = I + J_r R^T L^T, (..., d, d) float64."""
        own = {k: np.asarray(v, np.float64) for k, v in parameters.items()}
        both = own["left"] @ own["right"]
        J = rms_norm_derivative(z @ both, own["gain"], eps=eps).matrix()
        eye = np.eye(y.shape[-1])
        return np.broadcast_to(eye, J.shape), eye + J @ both.T

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"join": type(self).__name__, "word": self.word} | {
            "rank": self.rank, "spread": self.spread
        }  # fmt: skip
