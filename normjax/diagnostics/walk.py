"""A decoder walked through block by block: what its stream holds, who wrote it, what comes back.

    model = held(decoder, params)                     # or one that is read from a checkpoint
    seen = walk(model, windows)                       # windows (B, T + 1) of tokens
    seen.sizes[seen.ordinary].mean(0)                 # rms of the stream by depth

Only one block's parameters are asked for at a time, so that a model larger than memory can be
walked through. The stream of every sub-layer is kept on the host: (2 L + 1) B T d float32.

Shapes: L blocks, S = sub-layers in all, B windows, T positions, d features, H heads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from normjax.decoder import Decoder, Params
from normjax.diagnostics.measures import rms
from normjax.errors import UserError
from normjax.norm_derivatives import unit

Floats = NDArray[Any]

MASSIVE = 10.0
"""A token is set apart where its stream is so many times the median of its window's tokens."""


@dataclasses.dataclass(frozen=True)
class Held:
    """A decoder whose parameters are asked for block by block.

    Attributes:
      decoder: what it computes.
      ends: its parameters without those of the blocks.
      block: ``l -> parameters of block l``, counted from 1.
    """

    decoder: Decoder
    ends: Params
    block: Callable[[int], Params]

    def layers(self, order: Any) -> Iterator[tuple[int, Any]]:
        """Return blocks and their layers, one after the other."""
        for block in order:
            yield block, (self.block(block), self.decoder.layer({}, block)[1])


def held(decoder: Decoder, params: Params) -> Held:
    """Return a decoder with all its parameters in memory."""
    ends = {k: v for k, v in params.items() if k != "blocks"}
    return Held(decoder, ends, lambda block: decoder.layer(params, block)[0])


@dataclasses.dataclass(frozen=True)
class Write:
    """One entry of one token that a branch wrote, or took away.

    Attributes:
      window, position: of the token, from 0.
      feature: of the stream, from 0.
      block, branch: the sub-layer, blocks counted from 1; 0 and "embedding".
      before, after: the entry before and after that.
    """

    window: int
    position: int
    feature: int
    block: int
    branch: str
    before: float
    after: float


@dataclasses.dataclass(frozen=True)
class Walk:
    """What :func:`walk` saw; sub-layers in order, tokens of all windows.

    Attributes:
      branches: (block, branch) of every sub-layer.
      states: (S + 1, B, T, d) the stream before the first sub-layer and after each.
      sizes: (B, T, S + 1) its root mean square.
      written: (B, T, S) that of what each sub-layer wrote.
      turned: (B, T, S) cosine of what it wrote to the stream that it read.
      gradients: (B, T, S + 1) root mean square of the derivative of the summed loss by the stream.
      losses: (B, T) nats of the next token.
      attention: by name, (A, B, H) for the A sub-layers of attention: "first", the share that goes
        to the first key, "entropy", over the largest possible, both means over queries of two keys
        and more; "logit", the largest absolute logit.
      ordinary: (B, T) tokens that are not set apart, see :data:`MASSIVE`.
    """

    branches: tuple[tuple[int, str], ...]
    states: Floats
    sizes: Floats
    written: Floats
    turned: Floats
    gradients: Floats
    losses: Floats
    attention: dict[str, Floats]
    ordinary: NDArray[np.bool_]

    def similarity(self) -> Floats:
        """Return the mean cosine of two ordinary tokens of a window, (S + 1, B); NaN for one."""
        u = unit(self.states) * self.ordinary[..., None]
        count = self.ordinary.sum(-1)
        total = np.sum(u.sum(-2) ** 2, -1) - np.sum(u**2, (-2, -1))
        pairs = count * (count - 1)
        return np.where(pairs > 0, total / np.maximum(pairs, 1), np.nan)

    def participation(self) -> Floats:
        """Return (sum s^2)^2 / sum s^4 of the singular values s of all ordinary tokens, (S + 1,).

        How many directions share the stream's size equally: 1 for one direction, at most d.
        """
        out = []
        for state in self.states:
            x = np.asarray(state[self.ordinary], np.float64)
            square = x.T @ x if len(x) > x.shape[1] else x @ x.T
            out.append(np.trace(square) ** 2 / np.sum(square**2))
        return np.asarray(out)

    def outliers(self, most: int = 20) -> list[tuple[Write, Write | None]]:
        """Return, of the tokens set apart, the largest entries: who wrote each, who took it away.

        What wrote an entry is what changed it most on the way to where it is largest; what took it
        away changed it most from there on, by half of it at least, else None.
        """
        found = []
        names = ((0, "embedding"), *self.branches)
        for window, position in np.argwhere(~self.ordinary):
            course = np.concatenate([
                np.zeros_like(self.states[:1, 0, 0]), self.states[:, window, position]
            ])  # fmt: skip
            top = np.abs(course).max(0)
            for feature in np.argsort(-top)[:3]:
                if top[feature] < 0.1 * top.max():
                    continue
                entry = course[:, feature]
                peak = int(np.argmax(np.abs(entry)))
                steps = np.abs(np.diff(entry))

                def of(i: int, w=window, p=position, f=feature, entry=entry) -> Write:
                    values = float(entry[i]), float(entry[i + 1])
                    return Write(int(w), int(p), int(f), *names[i], *values)

                wrote, took = of(int(np.argmax(steps[:peak]))), None
                if peak < len(steps) and steps[peak:].max() >= 0.5 * abs(entry[peak]):
                    took = of(peak + int(np.argmax(steps[peak:])))
                found.append((wrote, took))
        found.sort(key=lambda pair: -abs(pair[0].after))
        return found[:most]


def walk(
    model: Held, windows: Any, said: Callable[[int, int], None] = lambda done, of: None
) -> Walk:
    """Walk through a decoder on windows (B, T + 1) of tokens, forward and back.

    Args:
      model: of one stream.
      windows: tokens; the last one of each is only predicted.
      said: called with the blocks that are done, of so many: each is passed twice.

    Raises:
      UserError: tokens beyond the vocabulary, a window that is too long, several streams, or a
        stream that is not finite.
    """
    decoder, windows = model.decoder, np.asarray(windows)
    _check(decoder, windows)
    tokens, targets = jnp.asarray(windows[:, :-1]), jnp.asarray(windows[:, 1:])
    programs, names, depth = _programs(decoder), decoder.config.sublayers, decoder.config.depth
    h = programs["embed"](model.ends, tokens)
    states, seen, done = [np.asarray(h)], [], 0
    for block, layer in model.layers(range(1, depth + 1)):
        for name in names:
            h, own = programs["pass"](layer, h, name)
            seen.append(jax.tree.map(np.asarray, own))
            states.append(np.asarray(h))
        done += 1
        said(done, 2 * depth)
        if not np.all(np.isfinite(states[-1])):
            raise UserError(
                f"the stream is not finite after block {block}; look at that block's parameters, or"
                " compute in a wider dtype"
            )
    losses, pulled = programs["loss"](model.ends, h, targets)
    gradients = [np.asarray(rms(pulled, -1))]
    for _, layer in model.layers(range(depth, 0, -1)):
        for name in reversed(names):
            before = states[len(states) - len(gradients) - 1]
            pulled = programs["back"](layer, jnp.asarray(before), pulled, name)
            gradients.append(np.asarray(rms(pulled, -1)))
        done += 1
        said(done, 2 * depth)
    stacked = np.stack(states)
    sizes = np.moveaxis(np.asarray(rms(jnp.asarray(stacked), -1)), 0, -1)
    heads = [own for own in seen if "first" in own]
    written, turned = (np.stack([own[k] for own in seen], -1) for k in ("written", "turned"))
    return Walk(
        tuple((block, name) for block in range(1, depth + 1) for name in names),
        stacked, sizes, written, turned,
        np.stack(gradients[::-1], -1), np.asarray(losses),
        {k: np.stack([own[k] for own in heads]) for k in ("first", "entropy", "logit") if heads},
        ~np.any(sizes > MASSIVE * np.median(sizes, axis=1, keepdims=True), axis=-1),
    )  # fmt: skip


def _check(decoder: Decoder, windows: np.ndarray) -> None:
    if windows.ndim != 2 or windows.shape[1] < 2 or not np.issubdtype(windows.dtype, np.integer):
        raise UserError(
            f"windows of shape {windows.shape}: must be tokens (B, T + 1), T at least 1"
        )
    if windows.shape[1] - 1 > decoder.window:
        raise UserError(
            f"windows of {windows.shape[1] - 1} tokens: the model takes at most {decoder.window}"
        )
    if windows.min() < 0 or windows.max() >= decoder.vocabulary:
        raise UserError(
            f"windows: have tokens from {windows.min()} to {windows.max()}; the vocabulary ends at"
            f" {decoder.vocabulary - 1}"
        )
    if decoder.config.rows != 1:
        raise UserError(
            f"placement of {decoder.config.rows} streams: only decoders of one stream are walked"
            " through"
        )


@functools.lru_cache(maxsize=4)
def _programs(decoder: Decoder) -> dict[str, Any]:
    """Return what is compiled: all blocks share it, their parameters are arguments."""

    def passed(layer: Any, h: Array, name: str) -> tuple[Array, dict[str, Array]]:
        seen = decoder.shown(layer, h, name)
        written, before = seen["written"], seen["before"]
        own = {
            "written": rms(written, -1),
            "turned": jnp.sum(unit(before) * unit(written), -1),
        }
        probabilities = seen.get("branch", {}).get("probabilities")
        if probabilities is not None:
            own |= _attention(decoder, probabilities, seen["branch"]["logits"])
        return seen["after"], own

    def loss(ends: Params, h: Array, targets: Array) -> tuple[Array, Array]:
        def summed(h: Array) -> tuple[Array, Array]:
            logits = jax.nn.log_softmax(decoder.readout(ends, h), axis=-1)
            each = -jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            return jnp.sum(each), each

        slope, each = jax.grad(summed, has_aux=True)(h)
        return each, slope

    def back(layer: Any, h: Array, pulled: Array, name: str) -> Array:
        return jax.vjp(lambda x: decoder.block(layer, x, name), h)[1](pulled)[0]

    return {
        "embed": jax.jit(decoder.embed), "loss": jax.jit(loss),
        "pass": jax.jit(passed, static_argnames="name"),
        "back": jax.jit(back, static_argnames="name"),
    }  # fmt: skip


def _attention(decoder: Decoder, p: Array, logits: Array) -> dict[str, Array]:
    """Return "first", "entropy" and "logit" of (B, K, G T, T) by head, (B, H)."""
    batch, length = p.shape[0], p.shape[-1]
    p = p.reshape(batch, decoder.config.heads, length, length)
    logits = logits.reshape(p.shape)
    keys = jnp.arange(1, length + 1, dtype=p.dtype)
    entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), -1)
    share = entropy[..., 1:] / jnp.log(keys[1:])
    causal = jnp.arange(length)[:, None] >= jnp.arange(length)
    return {
        "first": jnp.mean(p[..., 1:, 0], -1), "entropy": jnp.mean(share, -1),
        "logit": jnp.max(jnp.where(causal, jnp.abs(logits), 0), (-2, -1)),
    }  # fmt: skip
