"""The claim on attention and the size of its input, A6, on the decoder's own attention module.

Queries and keys are the module's own, caught on their way. Its probabilities are read out of its
output: with values chosen so that in every head the value of position s is the s-th unit vector,
and an output matrix that passes them on, what the module returns at position t is its softmax. A
head has fewer features than there may be positions, so these are read in turns.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.claim import Check, Claim, Tolerance, digits, rounding
from experiments.claims.setting import Point, decoder_parts, stream
from normjax.layers import Attention, rotary_angles, rotate
from normjax.norm_derivatives import Floats

SIZE = 0.15
"""Root mean square of the small inputs: logits of hundredths, and of a few for ten times it."""


class AttentionProbe:
    """The attention of a decoder with H heads of C = D / H features: its logits, its softmax."""

    def __init__(self, point: Point, qk_norm: bool):
        parts = decoder_parts(
            point, qk_norm=qk_norm, norm_eps=0.0, attention_softcap=0.0, bias=False
        )
        self.heads = point.heads
        self.module, self.params = Attention(parts.config), parts.layer(1)[0]["attention"]["branch"]
        self.qk_norm = qk_norm
        self._caught, self._output = jax.jit(self._queries_and_keys), jax.jit(self._applied)

    def _applied(self, params: Any, x: Any) -> Any:
        return self.module.apply({"params": params}, x[None])

    def _queries_and_keys(self, x: Any) -> Any:
        """Return queries and keys of x (T, D) as the module multiplies them: (H, T, C) each."""
        T, H, C = len(x), self.heads, x.shape[-1] // self.heads
        _, state = self.module.apply({"params": self.params}, x[None], capture_intermediates=True)
        caught: Any = state["intermediates"]
        kind = "_norm" if self.qk_norm else ""
        q, k = (caught[n + kind]["__call__"][0].reshape(1, T, H, C) for n in ("query", "key"))
        angles = rotary_angles(T, C, dtype=jnp.float64)
        return tuple(rotate(z, angles)[0].swapaxes(0, 1) for z in (q, k))

    def logits(self, x: Floats) -> Floats:
        """Return q_t . k_s / sqrt(C) for s <= t, row by row, by head: (H, T (T + 1) / 2)."""
        q, k = (np.asarray(z) for z in self._caught(jnp.asarray(x)))
        first, second = np.tril_indices(len(x))
        return (q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5)[:, first, second]

    def probabilities(self, x: Floats) -> Floats:
        """Return the module's softmax (H, T, T), read out of its output."""
        T, d = x.shape
        C = d // self.heads
        reader = np.zeros((d, -(-T // C) * C))
        reader[:, :T] = np.linalg.pinv(x)  # x times this is the identity: x has full row rank
        turns = []
        for first in range(0, T, C):  # the value of position first + c is the c-th unit vector
            values = np.tile(reader[:, first : first + C], self.heads)
            params = {
                **self.params,
                "value": {"kernel": jnp.asarray(values)},
                "output": {"kernel": jnp.eye(d, dtype=jnp.float64)},
            }
            turns.append(np.asarray(self._output(params, jnp.asarray(x))).reshape(T, self.heads, C))
        return np.concatenate(turns, axis=-1)[..., :T].swapaxes(0, 1)

    def logit_size(self, x: Floats) -> float:
        """Return a bound of the sums of absolute values that make up a logit at x."""
        token = float(np.max(np.linalg.norm(x, axis=-1)))
        q, k = (np.linalg.norm(self.params[n]["kernel"]) * token for n in ("query", "key"))
        C = x.shape[-1] // self.heads
        if not self.qk_norm:
            return float(q * k / C**0.5)
        # A norm divides by the length: what was rounded before it grows by sum over length.
        made = ((x @ np.asarray(self.params[n]["kernel"])).reshape(-1, C) for n in ("query", "key"))
        lengths = [np.linalg.norm(rows, axis=-1).min() for rows in made]
        return float(C**0.5 * (1 + q / lengths[0] + k / lengths[1]))


def _factor(after: Floats, before: Floats) -> float:
    """Return the factor of least squares that makes ``after`` of ``before``."""
    return float(np.sum(after * before) / np.sum(before * before))


def _softmax(rows: Floats, T: int) -> Floats:
    """Return the causal softmax (H, T, T) of logits given row by row."""
    logits = np.full((len(rows), T, T), -np.inf)
    first, second = np.tril_indices(T)
    logits[:, first, second] = rows
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention_and_scale(point: Point) -> Claim:
    """A6: the two pairs of logits, then the module without and with a norm of queries and keys."""
    x, (T, d) = SIZE * stream(point, 6), (point.tokens, point.width)
    small, large = (np.asarray(jax.nn.softmax(jnp.asarray(v))) for v in ([1.0, 2.0], [10.0, 20.0]))
    closed = [[1 / (1 + math.exp(g)), 1 / (1 + math.exp(-g))] for g in (1, 10)]
    count = 4 * d + T + 16

    plain, normed = AttentionProbe(point, qk_norm=False), AttentionProbe(point, qk_norm=True)
    before, after = plain.logits(x), plain.logits(10 * x)
    size = plain.logit_size(10 * x)
    why = "projections and a product over the features, and the factor 10"
    in_factor = size * before.size**0.5 / float(np.linalg.norm(before))
    read = float(np.linalg.norm(x) * np.linalg.norm(np.linalg.pinv(x)))
    normed_before, normed_after = normed.logits(x), normed.logits(10 * x)
    normed_size = normed.logit_size(x)
    normed_in_factor = normed_size * before.size**0.5 / float(np.linalg.norm(normed_before))
    through = "logits, a softmax, and values read through a pseudo-inverse"
    return Claim(
        "A6",
        "Ten times the input makes attention logits a hundred times as large, and the softmax sharp"
        " (linear queries and keys without bias); normalized queries and keys end that.",
        (
            Check("softmax of [1, 2] by its closed form", closed[0], small,
                  rounding(8, 1, "two exponentials and a quotient")),
            Check("to three decimals", [0.269, 0.731], small, digits(3)),
            Check("softmax of [10, 20] by its closed form", closed[1], large,
                  rounding(8, 1, "two exponentials and a quotient")),
            Check("to six decimals", [0.000045, 0.999955], large, digits(6)),
            Check("attention module: factor between its logits", 100.0, _factor(after, before),
                  rounding(count, in_factor, why + ", over the size of the small logits")),
            Check("attention module: every logit, 100 times the one before", 100 * before, after,
                  rounding(count, size, why)),
            Check("its softmax at 10 x is that of 100 times the logits at x",
                  _softmax(100 * before, T), plain.probabilities(10 * x),
                  rounding(count, 1 + size + read, through)),
            Check("and no longer the softmax at x: largest difference",
                  count * (1 + size + read) * 2.0**-52,
                  np.max(np.abs(plain.probabilities(10 * x) - plain.probabilities(x))),
                  Tolerance(0.0, "a bound: what rounding alone could do"), "above"),
            Check("with norms of queries and keys: factor 1", 1.0,
                  _factor(normed_after, normed_before),
                  rounding(count, normed_in_factor, why + ", and two norms")),
            Check("with norms of queries and keys: the same softmax",
                  normed.probabilities(x), normed.probabilities(10 * x),
                  rounding(count, 1 + normed_size + read, through)),
            Check("the first position sees only itself", [[1.0] + [0.0] * (T - 1)] * point.heads,
                  plain.probabilities(10 * x)[:, 0],
                  rounding(count, 1 + read, "values read through a pseudo-inverse"))
        ),
    )  # fmt: skip


CLAIMS = (attention_and_scale,)
