"""What becomes of radial and tangential perturbations on their way through the blocks."""

from __future__ import annotations

import jax
import numpy as np

from experiments.figures.sheet import LOOKS, SHOWN, Sheet
from normjax.decoder import Decoder, DecoderConfig
from normjax.jacobians.blocks import Parts
from normjax.jacobians.radial import radial_gains
from normjax.norm_derivatives import Floats
from normjax.placements import PLACEMENTS
from normjax.reporting import drawing
from normjax.reporting.drawing import Figure

DEPTH, WIDTH, LENGTH = 16, 32, 8
PANELS = ("Radial in: ‖J u‖", "Tangential in and out: TT", "Radial out: ‖u′ᵀ J‖")


def random_decoder(placement: str, seed: int) -> tuple[Parts, Floats]:
    """Return a randomly initialized decoder, and the stream (LENGTH, WIDTH) of random tokens.

    Args:
        placement: a row of the placement table.
        seed: of weights and tokens.
    """
    config = DecoderConfig(depth=DEPTH, width=WIDTH, heads=4, placement=placement, init="fan_in")
    model = Decoder(config, vocabulary=32, window=LENGTH)
    parts = Parts(model, model.init(jax.random.key(seed)))
    tokens = np.random.default_rng(seed).integers(0, 32, LENGTH)
    return parts, np.asarray(parts.embed(tokens))


def gains_by_depth(parts: Parts, start: Floats) -> Floats:
    """Return three gains of the stack of blocks 1..l, for every l.

    Args:
        parts: a decoder of L blocks.
        start: the stream (T, d) before its first block.

    Returns:
        (L, 3): |J u|, TT of :mod:`normjax.jacobians.radial`, and |u'^T J|, root mean squares over
        tokens.
    """
    h, total, gains = start, np.eye(start.shape[-1]), []
    for block in range(1, parts.config.depth + 1):
        part = parts.block(block)
        total = part.token_jacobians(h) @ total
        h = np.asarray(part(h))
        report = radial_gains(total, start, h)
        sizes = (np.hypot(report.rr, report.rt), report.tt, np.hypot(report.rr, report.tr))
        gains.append([float(np.sqrt(np.mean(size**2))) for size in sizes])
    return np.array(gains)


def gradient_gains(seed: int = 0) -> Figure:
    """Draw radial and tangential gains from the embedding to block l for three placements."""
    sheet = Sheet(3.9)
    places = sheet.grid(1, 3)
    panels = [sheet.panel(places[0, i], title) for i, title in enumerate(PANELS)]
    depth = np.arange(1, DEPTH + 1)
    for name in SHOWN:
        look = LOOKS[name]
        for panel, values in zip(
            panels, gains_by_depth(*random_decoder(name, seed)).T, strict=True
        ):
            points = np.stack([depth, values], -1)
            panel.curve(name, points, look.colour, marker=look.marker, ms=3.5, mew=0, lw=1.2)
    for panel in panels:
        panel.logarithmic("y", every=2 if panel is panels[-1] else 1)
        panel.axes.set_xlabel("blocks passed, l")
    panels[0].axes.set_ylabel("gain")
    drawing.legend(sheet.canvas, ((PLACEMENTS[n].title, LOOKS[n]) for n in SHOWN), len(SHOWN))
    caption = (
        "Jacobians J of the first l blocks of randomly initialized decoders, one per token "
        "(what a change of that token's embedding does to that token), as three numbers: root "
        "mean squares over tokens, logarithmic. A gradient on its way back is multiplied by Jᵀ, "
        "so that the same numbers hold for it, read from the output to the input. Left: what "
        "becomes of a change along h. With pre-norm the first branch cannot see it (DNorm · u = "
        "0) and the residual path hands it on as it is; later branches see the part that stands "
        "across their own h. Middle: the same for a random change across h, ‖·‖ being the root "
        "of the sum of squares. With pre-norm it is larger than the left one, because the "
        "branches multiply it by 1/s and the embeddings are small; then both grow slowly. With "
        "post-norm the first norm magnifies once, and every further one divides by the size of "
        "a sum. Without norms both grow like the stream. Right: how much of any change comes "
        "out along h′; read backwards, how much of a gradient that points along h′ arrives. "
        "With post-norm that is of the order of ε = 10⁻⁶: h′ has just been normalized and "
        "cannot change its length. What follows: a norm costs one direction per token, no more; "
        "how the other d − 1 fare with depth is decided by where it stands."
    )
    return sheet.figure("gradient_gains", "What comes through many blocks", caption)
