"""What random-matrix theory says of the same Jacobians, from the weights and the stream's size.

Each sub-layer has its law (:func:`normjax.theory.sublayer_theory.predict`); a block is the product
of its two, the stack that of all. The mean square of the stream that enters is measured for a
block, and for the stack it is carried on from the embedding by theory alone.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from normjax.errors import UserError
from normjax.jacobians.blocks import Parts
from normjax.norm_derivatives import Floats
from normjax.theory.matrix_products import ProductLaw
from normjax.theory.sublayer_theory import PredictedLaw, predict

POINTS = 81
SPAN = 9.0
"""e-folds below the largest singular value to which a law with lower edge 0 is followed."""


@dataclasses.dataclass(frozen=True)
class Overlay:
    """A law, ready to be drawn: that of a token whose stream has the mean size.

    Attributes:
      assumption: what is assumed, or the reason why there is no law.
      log_edges: natural logarithms of the smallest and the largest singular value, or None.
      log_rms: natural logarithm of the root mean square singular value, or None.
      scales: (B,) the same for the size of each token's own stream: tokens whose streams differ in
        size have spectra that differ by about this factor.
      log_s: (n,) natural logarithms of singular values, from edge to edge; empty without a density.
      log_density: (n,) the density of log s there.
    """

    assumption: str
    log_edges: tuple[float, float] | None = None
    log_rms: float | None = None
    scales: Floats = dataclasses.field(default_factory=lambda: np.empty(0))
    log_s: Floats = dataclasses.field(default_factory=lambda: np.empty(0))
    log_density: Floats = dataclasses.field(default_factory=lambda: np.empty(0))

    def distance(self, logs: Floats) -> float | None:
        """Return the Kolmogorov-Smirnov distance of measured log singular values (B, n) to the law.

        Each token is put on the scale of the mean one first. The distribution function is the
        integral of the density by the trapezoidal rule, which is off by less than 1e-3.
        """
        if not len(self.log_s):
            return None
        logs = np.sort((logs - self.scales[:, None] + (self.log_rms or 0.0)).ravel())
        steps = np.diff(self.log_s) * (self.log_density[1:] + self.log_density[:-1]) / 2
        cdf = 1 - np.append(np.cumsum(steps[::-1])[::-1], 0.0)  # from above: a tail may lie below
        expected = np.interp(logs, self.log_s, cdf)
        n = len(logs)
        up, down = np.arange(1, n + 1) / n - expected, expected - np.arange(n) / n
        return float(max(np.max(up), np.max(down)))


def scales(parts: Parts, blocks: range, position: int, mean_squares: Floats) -> Floats:
    """Return the log root mean square singular value for the stream of each token, (B,).

    Empty where there is no law.
    """
    each = [_chain(parts, blocks, position, float(size))[0] for size in mean_squares]
    if not each or any(p.law is None for own in each for p in own) or not each[0]:
        return np.empty(0)
    return np.array([_product(own).log_mean_square / 2 for own in each])


def predicted_mean_squares(parts: Parts, position: int, mean_square: float) -> list[float]:
    """Return the stream's mean square before block 1 and after every block, by theory."""
    return _chain(parts, range(1, parts.config.depth + 1), position, mean_square)[1]


def _chain(
    parts: Parts, blocks: range, position: int, mean_square: float
) -> tuple[list[PredictedLaw], list[float]]:
    predictions, sizes = [], [mean_square]
    for block in blocks:
        for name in parts.sublayer_names:
            made = predict(
                parts.config, parts.params, block - 1, name, mean_square, position=position
            )
            predictions.append(made)
            mean_square = made.mean_square
            if made.law is None:
                return predictions, sizes
        sizes.append(mean_square)
    return predictions, sizes


def overlay(
    parts: Parts, blocks: range, position: int, mean_squares: Floats, density: bool = True
) -> Overlay:
    """Return the law of some blocks in a row at one position.

    Args:
      parts: the decoder.
      blocks: numbers of the blocks, counted from 1, such as ``range(1, depth + 1)``.
      position: of the token.
      mean_squares: (B,) of the streams that enter the first of them.
      density: whether the density is wanted; edges and root mean square alone are found at once.
    """
    predictions = _chain(parts, blocks, position, float(np.mean(mean_squares)))[0]
    missing = [p.assumption for p in predictions if p.law is None]
    if missing or not predictions:
        return Overlay(missing[0] if missing else "no law: no sub-layer")
    law = _product(predictions)
    low, high = law.log_edges()
    if low == high:
        return Overlay(f"no law: every singular value is {np.exp(high):g}")
    assumption = "; ".join(dict.fromkeys(p.assumption for p in predictions))
    own = scales(parts, blocks, position, mean_squares)
    made = Overlay(assumption, (low, high), law.log_mean_square / 2, own)
    if not density:
        return made
    start = low if np.isfinite(low) else high - SPAN
    # Closer together near the edges, where the density is steepest; at them it is 0.
    log_s = (start + high) / 2 - (high - start) / 2 * np.cos(np.linspace(0, np.pi, POINTS))
    try:
        inside = law.log_density(log_s[1:-1])
    except UserError as error:
        return dataclasses.replace(made, assumption=f"no density: {error}")
    return dataclasses.replace(made, log_s=log_s, log_density=np.pad(inside, 1))


def _product(predictions: list[PredictedLaw]) -> ProductLaw:
    return ProductLaw([p.law for p in predictions if p.law is not None])
