"""What random-matrix theory says of the same Jacobians, from the weights and the stream's size.

Each sub-layer has its law (:func:`normjax.theory.sublayer_theory.predict`); a block is the product
of its two, the stack that of all. The mean square of the stream that enters is measured for a
block, and for the stack it is carried on from the embedding by theory alone. Where a norm follows
the branch, the size of the branch's own output decides: that is measured in every block, because
theory knows it for independent tokens only, and contexts share theirs.

Theory asks whether it applies: how many of the tokens are distinct (repeats are counted), and
whether the weights are as independent ones are. What is not so is said beside the law. How far a
spectrum of this size is from its own law by chance is found by drawing such matrices.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from normjax.decoder import slot_norms
from normjax.errors import UserError
from normjax.jacobians.blocks import Parts
from normjax.norm_derivatives import Floats
from normjax.spectra.dense import singular_values
from normjax.theory.matrix_products import ProductLaw
from normjax.theory.sublayer_theory import PredictedLaw, dependent_weights, predict

POINTS = 81
DRAWS = 40
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
      broken: the conditions that do not hold, "tokens" or "weights", in words; empty where all do.
      level: the distance that 95 % of matrices drawn from the law itself stay below.
    """

    assumption: str
    log_edges: tuple[float, float] | None = None
    log_rms: float | None = None
    scales: Floats = dataclasses.field(default_factory=lambda: np.empty(0))
    log_s: Floats = dataclasses.field(default_factory=lambda: np.empty(0))
    log_density: Floats = dataclasses.field(default_factory=lambda: np.empty(0))
    broken: dict[str, str] = dataclasses.field(default_factory=dict)
    level: float | None = None

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


class Tokens(NamedTuple):
    """What theory is told of the tokens that a law is for.

    Attributes:
      mean_squares: (B,) of the streams that enter, at the position.
      means: (B,) of the same over their features; None: 0.
      sequences: (B, T) the tokens themselves; None: all of them distinct.
    """

    mean_squares: Floats
    means: Floats | None = None
    sequences: np.ndarray | None = None

    def shares(self, position: int, which: int) -> Floats | None:
        """Return the shares of the distinct tokens up to a position, by first appearance."""
        if self.sequences is None:
            return None
        counts = np.unique(self.sequences[which, : position + 1], return_counts=True)[1]
        return None if np.all(counts == 1) else np.sort(counts)[::-1] / counts.sum()

    def of_mean_size(self, position: int) -> tuple[float, float, Floats | None]:
        """Return mean square and mean of the mean stream, and the shares of the mean sequence.

        The latter are those of the sequence whose sum of squares is the median one.
        """
        each = [self.shares(position, b) for b in range(len(self.mean_squares))]
        squares = [1 / (position + 1) if w is None else float(w @ w) for w in each]
        middle = int(np.argsort(squares)[len(squares) // 2])
        mean = 0.0 if self.means is None else float(np.sqrt(np.mean(np.square(self.means))))
        return float(np.mean(self.mean_squares)), mean, each[middle]

    def of(self, position: int, which: int) -> tuple[float, float, Floats | None]:
        """Return the same of one sequence."""
        mean = 0.0 if self.means is None else float(self.means[which])
        return float(self.mean_squares[which]), mean, self.shares(position, which)


def scales(parts: Parts, blocks: range, position: int, tokens: Tokens) -> Floats:
    """Return the log root mean square singular value for the stream of each token, (B,).

    Empty where there is no law.
    """
    sizes = _branch_sizes(parts, blocks, position, tokens)
    each = [
        _chain(parts, blocks, position, *tokens.of(position, b), sizes)[0]
        for b in range(len(tokens.mean_squares))
    ]
    if not each or any(p.law is None for own in each for p in own) or not each[0]:
        return np.empty(0)
    return np.array([_product(own).log_mean_square / 2 for own in each])


def predicted_mean_squares(parts: Parts, position: int, mean_square: float) -> list[float]:
    """Return the stream's mean square before block 1 and after every block, by theory."""
    blocks = range(1, parts.config.depth + 1)
    return _chain(parts, blocks, position, mean_square, 0.0, None, {})[1]


def _branch_sizes(
    parts: Parts, blocks: range, position: int, tokens: Tokens
) -> dict[tuple[int, str], float]:
    """Return the measured mean square of the branches that a norm follows, where there are tokens.

    At the position, the mean over sequences.
    """
    if tokens.sequences is None or parts.config.rows > 1:
        return {}
    found = {}
    h = parts.stack(1, blocks[0] - 1)(parts.embed(tokens.sequences)) if blocks[0] > 1 else (
        parts.embed(tokens.sequences)
    )  # fmt: skip
    for block in blocks:
        for name in parts.sublayer_names:
            if "branch_norm" in slot_norms(parts.config, block, name):
                output = parts.sublayer(block, name).points(h)["output"][:, position]
                found[block, name] = float(np.mean(np.square(output)))
            h = parts.sublayer(block, name)(h)
    return found


def _chain(
    parts: Parts, blocks: range, position: int, mean_square: float, mean: float,
    shares: Floats | None, sizes: dict[tuple[int, str], float],
) -> tuple[list[PredictedLaw], list[float]]:  # fmt: skip
    predictions, streams = [], [mean_square]
    for block in blocks:
        for name in parts.sublayer_names:
            made = predict(
                parts.config, parts.params, block - 1, name, mean_square, position=position,
                mean=mean, shares=shares, branch_mean_square=sizes.get((block, name)),
            )  # fmt: skip
            predictions.append(made)
            mean_square, mean = made.mean_square, made.mean
            if made.law is None:
                return predictions, streams
        streams.append(mean_square)
    return predictions, streams


def _broken(parts: Parts, blocks: range, position: int, tokens: Tokens) -> dict[str, str]:
    """Return the conditions of theory that do not hold, in words."""
    found, count = {}, len(tokens.mean_squares)
    repeated = sum(tokens.shares(position, b) is not None for b in range(count))
    if repeated and "attention" in parts.sublayer_names:
        found["tokens"] = (
            f"{repeated} of {count} sequences repeat tokens: counted, as if the same token were"
            " the same vector in every block"
        )
    weights = [
        f"block {block}: {what}"
        for block in blocks for what in dependent_weights(parts.config, parts.params, block - 1)
    ]  # fmt: skip
    return found | ({"weights": "; ".join(weights)} if weights else {})


def overlay(
    parts: Parts, blocks: range, position: int, tokens: Tokens, density: bool = True
) -> Overlay:
    """Return the law of some blocks in a row at one position.

    Args:
      parts: the decoder.
      blocks: numbers of the blocks, counted from 1, such as ``range(1, depth + 1)``.
      position: of the token.
      tokens: what enters the first of them.
      density: whether the density and the level are wanted; edges and root mean square alone are
        found at once.
    """
    sizes = _branch_sizes(parts, blocks, position, tokens)
    predictions = _chain(parts, blocks, position, *tokens.of_mean_size(position), sizes)[0]
    missing = [p.assumption for p in predictions if p.law is None]
    if missing or not predictions:
        return Overlay(missing[0] if missing else "no law: no sub-layer")
    law = _product(predictions)
    low, high = law.log_edges()
    if low == high:
        return Overlay(f"no law: every singular value is {np.exp(high):g}")
    assumption = "; ".join(dict.fromkeys(p.assumption for p in predictions))
    own = scales(parts, blocks, position, tokens)
    broken = _broken(parts, blocks, position, tokens)
    made = Overlay(assumption, (low, high), law.log_mean_square / 2, own, broken=broken)
    if not density:
        return made
    start = low if np.isfinite(low) else high - SPAN
    # Closer together near the edges, where the density is steepest; at them it is 0.
    log_s = (start + high) / 2 - (high - start) / 2 * np.cos(np.linspace(0, np.pi, POINTS))
    try:
        inside = law.log_density(log_s[1:-1])
    except UserError as error:
        return dataclasses.replace(made, assumption=f"no density: {error}")
    made = dataclasses.replace(made, log_s=log_s, log_density=np.pad(inside, 1))
    return dataclasses.replace(made, level=_level(made, predictions, parts.config.width))


def _level(made: Overlay, predictions: list[PredictedLaw], width: int) -> float:
    """Return the distance to the law that 95 % of products drawn from it stay below.

    Each factor is a I + sum_f sqrt(tau_f) p_f q_f^T with p and q independent normal vectors, whose
    entries have variance 1/d, and the strengths tau of the factor's own law.
    """
    rng, found = np.random.default_rng(0), []
    centre = dataclasses.replace(made, scales=np.full(1, made.log_rms))
    for _ in range(DRAWS):
        product = np.eye(width)
        for each in predictions:
            law = each.law
            assert law is not None  # asked before
            hidden = max(1, round(law.ratio * width))
            share = np.cumsum(law.weights) / np.sum(law.weights)
            at = np.searchsorted(share, (np.arange(hidden) + 0.5) / hidden)
            tau = np.asarray(law.strengths)[np.minimum(at, len(share) - 1)]
            p, q = rng.normal(scale=width**-0.5, size=(2, hidden, width))
            product = law.a * product + (p * np.sqrt(tau)[:, None]).T @ (q @ product)
        with np.errstate(divide="ignore"):
            found.append(centre.distance(np.log(singular_values(product))[None]))
    return float(np.quantile(np.asarray(found, np.float64), 0.95))


def _product(predictions: list[PredictedLaw]) -> ProductLaw:
    return ProductLaw([p.law for p in predictions if p.law is not None])
