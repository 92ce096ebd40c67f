"""How large the stream gets with depth: two recurrences, and real random initializations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.figures.maths import slope
from experiments.figures.sheet import LOOKS, SHOWN, Sheet, SheetPanel
from normjax.decoder import Decoder, DecoderConfig
from normjax.jacobians.blocks import Parts
from normjax.norm_derivatives import Floats
from normjax.placements import PLACEMENTS
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import MUTED

DEPTH, SHARE, WIDTH = 20, 0.1, 8
RANDOM_DEPTH, SEEDS = 24, 3


def rms(h: Any) -> float:
    """Return the root of the mean square of all entries.

    >>> rms([3.0, 4.0, 0.0, 0.0])
    2.5
    """
    return float(np.sqrt(np.mean(np.square(np.asarray(h, np.float64)))))


def pinned_parts(placement: str) -> Parts:
    """Return a decoder whose branch is F(x) = SHARE x, exactly, in every sub-layer.

    A ReLU MLP with W_in = [I, -I] and W_out = SHARE [I; -I] passes x on as relu(x) - relu(-x).
    There is no attention, and the norm has no gain and eps = 0.

    Args:
        placement: a row of the placement table.

    Returns:
        DEPTH blocks of one sub-layer each.
    """
    config = DecoderConfig(
        depth=DEPTH, width=WIDTH, heads=1, attention="none", mlp="relu", mlp_width=2 * WIDTH,
        norm="rmsnorm_plain", norm_eps=0.0, placement=placement, positions="none",
    )  # fmt: skip
    pair = np.concatenate([np.eye(WIDTH), -np.eye(WIDTH)], axis=1)
    into = np.broadcast_to(pair, (DEPTH, *pair.shape))
    branch = {"in": {"kernel": into}, "out": {"kernel": SHARE * np.swapaxes(into, 1, 2)}}
    params = {"embedding": np.zeros((2, WIDTH)), "blocks": {"mlp": {"branch": branch}}}
    return Parts(Decoder(config, vocabulary=2, window=1), params)


def pinned_sizes(placement: str) -> Floats:
    """Return the stream's RMS before block 1 and after every block, from RMS 1: (DEPTH + 1,)."""
    parts = pinned_parts(placement)
    h: Any = np.ones((1, WIDTH)) * np.where(np.arange(WIDTH) % 2, 1.0, -1.0)
    sizes = [rms(h)]
    for block in range(1, DEPTH + 1):
        h = parts.block(block)(h)
        sizes.append(rms(h))
    return np.array(sizes)


def random_sizes(placement: str, seeds: Sequence[int]) -> Floats:
    """Return the stream's RMS by block of randomly initialized decoders.

    Args:
        placement: a row of the placement table.
        seeds: of weights and tokens, one decoder each.

    Returns:
        (seeds, RANDOM_DEPTH + 1) float64.
    """
    config = DecoderConfig(
        depth=RANDOM_DEPTH, width=64, heads=4, placement=placement, init="fan_in"
    )
    model = Decoder(config, vocabulary=64, window=16)
    # Compiled once for all seeds and blocks: the weights are arguments.
    start, step = jax.jit(model.init), jax.jit(model.block)
    sizes = []
    for seed in seeds:
        params = start(jax.random.key(seed))
        tokens = np.random.default_rng(seed).integers(0, 64, (1, 16), dtype=np.int32)
        stream = [model.embed(params, jnp.asarray(tokens))]
        for block in range(1, RANDOM_DEPTH + 1):
            stream.append(step(model.layer(params, block), stream[-1]))
        sizes.append([rms(h) for h in stream])
    return np.array(sizes)


def stream_growth(seed: int = 0) -> Figure:
    """Draw the size of the stream by depth, for pinned and for random weights."""
    sheet = Sheet(3.9)
    places = sheet.grid(1, 2)
    _pinned(sheet.panel(places[0, 0], "Pinned weights, F(x) = 0.1 x"))
    rate = _random(sheet.panel(places[0, 1], "Random weights"), seed)
    caption = (
        "The root mean square (RMS) of the stream, ‖h‖/√d. Left: sub-layers whose branch "
        "multiplies what it reads by exactly 0.1 (a ReLU MLP with weights set to do so), run "
        "through the decoder's own code (marks) beside the two recurrences (lines). Without a "
        "norm each update is in proportion to the stream, h′ = h + 0.1 h, and 20 of them give "
        "1.1²⁰ = 6.7. With pre-norm the branch reads a vector of RMS 1, so that each update has "
        "RMS 0.1 whatever the stream is: 1 + 0.1 · 20 = 3. With post-norm the sum is put back to "
        "1. Right: attention and MLP with random weights of variance 1/fan-in, one line per "
        "seed, vertical axis logarithmic. Without a norm the stream grows by a factor per block. "
        "With pre-norm updates keep their size and point in new directions, nearly at right "
        "angles to the stream, so that squares add and the RMS grows about like the root of the "
        f"depth: like lᵖ with p = {rate:.2f} over the second half of the blocks. "
        "Post-norm stays at 1. What follows: pre-norm turns exponential growth into growth "
        "between √l and l; and as the stream grows, updates of constant size turn it less and "
        "less, so that late blocks change its direction little."
    )
    return sheet.figure("stream_growth", "How the stream grows with depth", caption)


def _pinned(panel: SheetPanel) -> None:
    depth = np.arange(DEPTH + 1)
    # name: law in words and in numbers, where its label stands and on which side
    laws = {
        "none": ("1.1ⁿ", (1 + SHARE) ** depth, 16, (-8, 2)),
        "pre": ("1 + 0.1 n", 1 + SHARE * depth, 12, (6, -7)),
        "post": ("1", np.ones(DEPTH + 1), 12, (6, -7)),
    }
    for name, (law, values, index, offset) in laws.items():
        look = LOOKS[name]
        panel.curve(f"{name}: {law}", np.stack([depth, values], -1), look.colour, lw=1.1)
        points = np.stack([depth, pinned_sizes(name)], -1)
        panel.dots(f"{name}: decoder", points, look.colour, marker=look.marker)
        text = f"{PLACEMENTS[name].title}: {law}"
        panel.label((depth[index], values[index]), text, offset, color=look.colour)
    panel.axes.set_ylim(0, 7.2)
    panel.axes.set_xticks(range(0, DEPTH + 1, 5))
    panel.names("sub-layers passed, n", "RMS of the stream")


def _random(panel: SheetPanel, seed: int) -> float:
    """Draw the random decoders; return the exponent p of pre-norm's growth l^p, second half."""
    depth = np.arange(RANDOM_DEPTH + 1)
    seeds = range(seed, seed + SEEDS)
    rate = 0.0
    for name, offset in (("pre", (-2, 8)), ("post", (-2, -6)), ("none", (-40, 0))):
        sizes = random_sizes(name, seeds)
        for number, line in zip(seeds, sizes, strict=True):
            points = np.stack([depth, line], -1)
            panel.curve(f"{name}, seed {number}", points, LOOKS[name].colour, lw=1.2)
        end = (depth[-1], sizes[:, -1].max())
        panel.label(end, PLACEMENTS[name].title, offset, color=LOOKS[name].colour, ha="right")
        if name == SHOWN[0]:
            half = RANDOM_DEPTH // 2
            rate = slope(depth[half:], np.sqrt(np.mean(sizes[:, half:] ** 2, axis=0)))
    panel.logarithmic("y")
    panel.axes.axhline(1, color=MUTED, lw=0.6, zorder=0)
    panel.axes.set_xlabel("blocks passed, l")
    return rate
