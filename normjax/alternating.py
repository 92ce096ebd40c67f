"""Alternating updates: one stream of several goes through a block, the others are predicted.

The rows of H are n streams and, last, the one that the branches of the present block work on. A
block begins with two maps of the token's own, of which the first ends the block before it:

    correct   c_i = h_i + g_i(w) (w - h_0),     g(w) = 1 + C^T tanh(r(w) A / d)
    predict   q_j = c_j + sum_i E_ji(c_0) c_i,  E(c_0) = reshape(tanh(r(c_0) B / d) P)

with w the worked stream and r the division by the root mean square. The attention of the block
reads q_0; every row becomes its q_j, and the worked one ``share`` q_0. What is read out is the mean
of the corrected streams.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.norm_derivatives import Floats, rms_norm_derivative
from normjax.norm_functions import rms_norm


@dataclasses.dataclass(frozen=True)
class Alternating:
    """Weights over n streams and the worked one, as one of three places has them.

    Attributes:
      word: what they are called in the equation.
      place: "read" (q_0), "keep" (every q_j, and ``share`` q_0) or "readout" (the mean of c).
      share: of q_0 that the worked row begins with.
      spread: of A, B, C and P at the start.
      eps: in r.
      tied: as for other weights.

    References:
      Baykal et al. 2023, arXiv 2301.13310, as Gemma 3n in the transformers library has it, where
      one router serves as A of a block and as its B, and r has a gain: both are in the product of
      A or B with it.
    """

    word: str
    place: str
    share: float = 1.0
    spread: float = 0.02
    eps: float = 1e-6
    tied: str = ""
    per_feature = False

    def parameters(self, position: Any, rows: int, width: int) -> dict[str, Any]:
        """Return the arrays A (d, n), C (n, n) and, but for the readout, B (d, n), P (n, n n)."""
        n = rows - 1

        def drawn(*shape: int) -> Any:
            return lambda key: self.spread * jax.random.normal(key, shape, jnp.float32)

        own = {"corrects": drawn(width, n), "corrections": drawn(n, n)}
        if self.place != "readout":
            own |= {"predicts": drawn(width, n), "predictions": drawn(n, n * n)}
        return own

    def value(self, parameters: Mapping[str, Array], state: Array, position: Any) -> Array:
        """Return W (..., m, n + 1), computed in float32 at least."""
        H = state.astype(jnp.promote_types(state.dtype, jnp.float32))
        own = {k: v.astype(H.dtype) for k, v in parameters.items()}
        n = H.shape[-2] - 1

        def routed(x: Array, name: str) -> Array:
            return jnp.tanh(rms_norm(x, eps=self.eps) @ own[name] / x.shape[-1])

        gains = 1 + routed(H[..., n, :], "corrects") @ own["corrections"]
        corrected = jnp.eye(n, n + 1, dtype=H.dtype) + gains[..., None] * self._beside(n)
        if self.place == "readout":
            return jnp.mean(corrected, axis=-2, keepdims=True).astype(state.dtype)
        first = (corrected[..., 0, :, None] * H).sum(axis=-2)
        mixing = (routed(first, "predicts") @ own["predictions"]).reshape(*gains.shape, n)
        whole = (jnp.eye(n, dtype=H.dtype) + mixing) @ corrected
        return self._placed(whole, jnp).astype(state.dtype)

    def derivative(self, parameters: Mapping[str, Any], state: Floats, position: int) -> Floats:
        """Return dW / dH (..., m, n + 1, (n + 1) d)."""
        own = {k: np.asarray(v, np.float64) for k, v in parameters.items()}
        n, d = state.shape[-2] - 1, state.shape[-1]
        every = (n + 1) * d

        def routed(x: Floats, name: str, through: str) -> tuple[Floats, Floats]:
            """Return tanh(r(x) A / d) C and its derivative by x, (..., k) and (..., k, d)."""
            r = rms_norm_derivative(x[..., None, :], eps=self.eps)
            t = np.tanh(x @ own[name] / _rms(x, self.eps) / d)
            slopes = (1 - t**2)[..., None] * r.vjp(np.broadcast_to(own[name].T, (*t.shape, d))) / d
            return t @ own[through], np.swapaxes(own[through], -1, -2) @ slopes

        gains, slopes = routed(state[..., n, :], "corrects", "corrections")
        gains, beside = 1 + gains, self._beside(n)
        by_state = np.zeros((*gains.shape, every))
        by_state[..., n * d :] = slopes
        corrected = np.eye(n, n + 1) + gains[..., None] * beside
        moved = by_state[..., None, :] * beside[..., None]  # (..., n, n + 1, every)
        if self.place == "readout":
            return moved.mean(axis=-3, keepdims=True)
        first = np.einsum("...m,...md->...d", corrected[..., 0, :], state)
        turned = np.einsum("...mk,...md->...dk", moved[..., 0, :, :], state)
        direct = corrected[..., 0, None, :, None] * np.eye(d)[:, None, :]
        turned = turned + direct.reshape(*first.shape, every)
        mixing, slopes = routed(first, "predicts", "predictions")
        by_state = (slopes @ turned).reshape(*gains.shape, n, every)
        mixing = np.eye(n) + mixing.reshape(*gains.shape, n)
        whole = np.einsum("...jik,...im->...jmk", by_state, corrected)
        whole = whole + np.einsum("...ji,...imk->...jmk", mixing, moved)
        return np.moveaxis(self._placed(np.moveaxis(whole, -1, -3), np), -3, -1)

    def _beside(self, n: int) -> Floats:
        """Return w - h_0 as weights, (n + 1,)."""
        return np.eye(n + 1)[n] - np.eye(n + 1)[0]

    def _placed(self, whole: Any, xp: Any) -> Any:
        first = whole[..., :1, :]
        return first if self.place == "read" else xp.concatenate([whole, self.share * first], -2)

    def record(self) -> dict[str, Any]:
        """Return them as JSON."""
        own = {"tied": self.tied} if self.tied else {}
        return {"weights": type(self).__name__, "word": self.word} | own | {
            "place": self.place, "share": self.share, "spread": self.spread, "eps": self.eps,
        }  # fmt: skip


def _rms(x: Floats, eps: float) -> Floats:
    return np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
