"""Claims on how a stream's size goes with depth, A10 to A12, on decoders pinned to a linear rule.

An MLP with relu, W_in = [I, -I] and W_out = [M; -M] computes F(x) = M^T x for every x, since
relu(x) - relu(-x) = x; no entry is rounded on the way but for its product with M. A decoder of such
MLPs without attention is a linear residual stack made of the decoder's own modules.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from experiments.claims.claim import Check, CheckSeries, Claim, digits, exact, rounding
from experiments.claims.setting import Point, decoder_parts, draws
from normjax.norm_derivatives import Floats, unit

DEPTH, ALPHA = 16, Fraction(1, 10)
FIGURE = "stream-size"
AFTER = (1, 4, 16)
"""The layers after which sizes are compared."""


def linear_stack(point: Point, weights: Floats, placement: str) -> Floats:
    """Return the hidden states (L + 1, T, D) of a decoder of 16 blocks with F(x) = x M.

    Args:
      point: sizes and seed; the stream starts with entries of +-1 at random, of mean square 1.
      weights: M, (D, D).
      placement: "none" or "pre"; norms have gain 1 and no eps.
    """
    one = np.eye(point.width)
    given = {
        "embedding": draws(point, 10).choice([-1.0, 1.0], size=(point.tokens, point.width)),
        "in": np.hstack([one, -one]),
        "out": np.vstack([weights, -weights]),
    }
    parts = decoder_parts(
        point, given, gains=False, depth=DEPTH, attention="none", mlp="relu",
        mlp_width=2 * point.width, positions="none", placement=placement, norm_eps=0.0,
    )  # fmt: skip
    return np.asarray(parts.hidden_states(np.arange(point.tokens)))


def sizes(states: Floats) -> Floats:
    """Return the root mean square of the stream of every layer, (L + 1,)."""
    return np.sqrt(np.mean(states**2, axis=(1, 2)))


def _series(label: str, measured: Floats, expected: Floats) -> CheckSeries:
    return CheckSeries(FIGURE, label, tuple(range(DEPTH + 1)), tuple(measured), tuple(expected))


def proportional(point: Point) -> Claim:
    """A10: F(h) = h / 10 in a decoder without norms."""
    states = linear_stack(point, float(ALPHA) * np.eye(point.width), "none")
    measured = sizes(states)
    expected = np.array([float((1 + ALPHA) ** n) for n in range(DEPTH + 1)])
    near = rounding(3 * DEPTH + point.width * point.tokens + 4, expected[-1],
                    "0.1 and its product and sum in every layer, a mean at the end")  # fmt: skip
    return Claim(
        "A10",
        "Updates in proportion to the stream compound: with a tenth of it per layer, 16 layers"
        " multiply it by 1.1^16.",
        (
            Check(f"decoder without norms, F(h) = h / 10: size after {_listed(AFTER)} layers",
                  expected[list(AFTER)], measured[list(AFTER)], near),
            Check("1.1^16 to three decimals", 4.595, measured[-1], digits(3)),
            Check("each entry by the same factor", expected[-1] * states[0], states[-1], near),
        ),
        (_series("compounds, no norm", measured, expected),),
    )  # fmt: skip


def constant(point: Point) -> Claim:
    """A11: F(x) = x / 10 in a pre-norm decoder, where x is always of mean square 1."""
    states = linear_stack(point, float(ALPHA) * np.eye(point.width), "pre")
    measured = sizes(states)
    expected = np.array([float(1 + ALPHA * n) for n in range(DEPTH + 1)])
    near = rounding(DEPTH * (point.width + 16) + point.width * point.tokens, expected[-1],
                    "a norm over the features, a product and a sum in every layer")  # fmt: skip
    return Claim(
        "A11",
        "Updates of one size add: a tenth of a normalized stream per layer makes 1 + 0.1 * 16 after"
        " 16 layers.",
        (
            Check(f"pre-norm decoder, F(x) = x / 10: size after {_listed(AFTER)} layers",
                  expected[list(AFTER)], measured[list(AFTER)], near),
            Check("each entry by the same factor", expected[-1] * states[0], states[-1], near),
        ),
        (_series("adds, pre-norm", measured, expected),),
    )  # fmt: skip


def four_fates(point: Point) -> Claim:
    """A12: four decoders without norms, one branch each."""
    d, layers = point.width, np.arange(DEPTH + 1)
    turn = math.pi / 2 / DEPTH
    one, half = np.eye(d), np.diag(np.repeat([-1.0, 0.0], [d // 2, d - d // 2]))
    rotation = np.kron(np.eye(d // 2), [[math.cos(turn), math.sin(turn)],
                                        [-math.sin(turn), math.cos(turn)]])  # fmt: skip
    states = {
        "amplify": linear_stack(point, 0.1 * one, "none"),
        "shrink": linear_stack(point, -0.1 * one, "none"),
        "turn": linear_stack(point, rotation - one, "none"),
        "cancel": linear_stack(point, half, "none"),
    }
    kept = (d - d // 2) / d
    expected = {
        "amplify": np.array([float(Fraction(11, 10) ** int(n)) for n in layers]),
        "shrink": np.array([float(Fraction(9, 10) ** int(n)) for n in layers]),
        "turn": np.ones(DEPTH + 1),
        "cancel": np.where(layers == 0, 1.0, math.sqrt(kept)),
    }
    measured = {name: sizes(s) for name, s in states.items()}
    at = list(AFTER)
    words = {
        "amplify": "a branch that amplifies, F(h) = 0.1 h: size after",
        "shrink": "one that shrinks, F(h) = -0.1 h: size after",
        "turn": "one that rotates, F(h) = R h - h: size after",
        "cancel": "one that cancels half of the features: size after",
    }
    checks = [
        Check(f"{words[name]} {_listed(AFTER)} layers", expected[name][at], measured[name][at],
              rounding(8 * DEPTH + d * point.tokens + 4, float(expected[name].max() * 2**0.5),
                       "products and sums in every layer, a mean at the end"))
        for name in states
    ]  # fmt: skip
    before, after = unit(states["turn"][0]), unit(states["turn"][-1])
    checks += [
        Check("the one that rotates: cosine after 16 turns of 90 / 16 degrees, each token",
              np.zeros(point.tokens), np.sum(before * after, axis=-1),
              rounding(8 * DEPTH + 2 * d, 2**0.5, "products and sums in every layer")),
        Check("the one that cancels: that half is zero after one layer",
              np.zeros((point.tokens, d // 2)), states["cancel"][1][:, : d // 2],
              exact("a number and its opposite")),
        Check("and the other half is what it was, to the end",
              states["cancel"][0][:, d // 2 :], states["cancel"][-1][:, d // 2 :],
              exact("zero is added to it in every layer")),
    ]  # fmt: skip
    labels = {"shrink": "shrinks, no norm", "turn": "rotates, no norm", "cancel": "halved, no norm"}
    return Claim(
        "A12",
        "Taking the norms out does not decide what becomes of a stream: branches can amplify it,"
        " shrink it, rotate it or cancel it.",
        tuple(checks),
        tuple(_series(label, measured[name], expected[name]) for name, label in labels.items()),
    )  # fmt: skip


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(n) for n in numbers)


CLAIMS = (proportional, constant, four_fates)
