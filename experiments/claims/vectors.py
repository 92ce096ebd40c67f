"""Claims on lengths, directions and projections: A1, A14 to A16, A18, A19, A21."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.claims.claim import Check, Claim, Tolerance, exact, rounding
from experiments.claims.setting import Point, draws
from normjax.norm_derivatives import unit
from normjax.norm_functions import rms_norm

WHOLE = exact("whole numbers")
QUOTIENT = exact("a quotient of exact numbers, rounded once")
RATIONAL = exact("arithmetic with fractions, rounded once at the end")


def length(h: Array) -> Array:
    """Return r = |h|."""
    return jnp.sqrt(jnp.sum(h * h))


def direction(h: Array) -> Array:
    """Return u = h / |h|."""
    return h / length(h)


def split(u: Sequence[Any], v: Sequence[Any]) -> tuple[Any, list[Any], list[Any]]:
    """Return u . v, the part of v along the unit vector u, and the rest; in any arithmetic.

    >>> split([Fraction(3, 5), Fraction(4, 5)], [5, 0])[0]
    Fraction(3, 1)
    """
    along = sum(a * b for a, b in zip(u, v, strict=True))
    parallel = [along * a for a in u]
    return along, parallel, [b - p for b, p in zip(v, parallel, strict=True)]


def length_and_direction(point: Point) -> Claim:
    """A1: [3, 4] and [9, 12] against lengths from whole numbers and directions from fractions."""
    short, long = np.array([3.0, 4.0]), np.array([9.0, 12.0])
    roots = [math.isqrt(9 + 16), math.isqrt(81 + 144)]
    ratio = [float(Fraction(3, roots[0])), float(Fraction(4, roots[0]))]
    return Claim(
        "A1", "A nonzero vector is a length times a direction.",
        (
            Check("lengths of [3, 4] and [9, 12]", roots,
                  [float(length(jnp.asarray(h))) for h in (short, long)], WHOLE),
            Check("direction of [3, 4]", ratio, unit(short), QUOTIENT),
            Check("[9, 12] points the same way", ratio, unit(long), QUOTIENT),
            Check("length times direction gives [9, 12] back", long,
                  float(length(jnp.asarray(long))) * unit(long),
                  rounding(2, 12, "a quotient and a product")),
        ),
    )  # fmt: skip


def change_of_length(point: Point) -> Claim:
    """A14: the derivative of the length by jax.jvp against the product with the direction."""
    h, dh = draws(point, 14).normal(size=(2, point.width))
    _, measured = jax.jvp(length, (jnp.asarray(h),), (jnp.asarray(dh),))
    size = float(np.linalg.norm(dh))
    why = "sums over the features, a root and a quotient"
    return Claim(
        "A14", "A small step changes the length by its part along the direction: dr = u . dh.",
        (Check("derivative of |h| along a random step", unit(h) @ dh, measured,
               rounding(2 * point.width + 8, size, why)),),
    )  # fmt: skip


def perpendicular_step(point: Point) -> Claim:
    """A15: the growth of a length of 5 under a perpendicular step, measured on the vector."""
    h, sideways = jnp.asarray([3.0, 4.0]), jnp.asarray([-0.8, 0.6])
    r, steps = 5.0, np.array([0.1, 0.05])

    def after(e: Any) -> Array:
        return length(h + e * sideways)

    growth = np.array([float(after(e)) - r for e in steps])
    slope = jax.grad(after)
    tiny = rounding(8, r, "two lengths of about 5, subtracted")
    quarter = 0.25 * steps[0] ** 2 / (4 * r**2) + tiny.value * 2 / growth[0]
    return Claim(
        "A15",
        "A perpendicular step e adds only e^2 / (sqrt(r^2 + e^2) + r), about e^2 / (2 r), to the"
        " length: a second-order effect.",
        (
            Check("growth of r = 5 by e = 0.1 and 0.05", steps**2 / (np.hypot(r, steps) + r),
                  growth, tiny),
            Check("the same against e^2 / (2 r)", steps**2 / (2 * r), growth,
                  Tolerance(float(steps[0] ** 4 / (8 * r**3)) + tiny.value,
                            "the next term of the series, e^4 / (8 r^3), and rounding")),
            Check("half the step, what part of the growth", 0.25, growth[1] / growth[0],
                  Tolerance(float(quarter),
                            "the ratio of the series' next terms, e^2 / (16 r^2), and rounding")),
            Check("first derivative in e at 0", 0.0, slope(0.0),
                  rounding(4, 1, "u . e for unit vectors in two dimensions")),
            Check("second derivative in e at 0, 1 / r", 1 / r, jax.grad(slope)(0.0),
                  rounding(12, 1 / r, "a root, two quotients and their products")),
        ),
    )  # fmt: skip


def change_of_direction(point: Point) -> Claim:
    """A16: jax.jacfwd of h / |h| against (I - u u^T) / r."""
    h = draws(point, 16).normal(size=point.width)
    r, u = float(np.linalg.norm(h)), unit(h)
    why = "a length over the features, quotients and products"
    return Claim(
        "A16",
        "The direction changes by the perpendicular part over the length:"
        " du = (I - u u^T) dh / r.",
        (Check("Jacobian of h / |h|", (np.eye(len(h)) - np.outer(u, u)) / r,
               jax.jacfwd(direction)(jnp.asarray(h)),
               rounding(2 * point.width + 12, 1 / r, why)),),
    )  # fmt: skip


def shadow(point: Point) -> Claim:
    """A18: a projection in fractions, exactly, and in floats."""
    u, v = [Fraction(3, 5), Fraction(4, 5)], [Fraction(5), Fraction(0)]
    along, parallel, rest = split(u, v)
    floats = split([0.6, 0.8], [5.0, 0.0])
    near = rounding(4, 5, "products of numbers that float64 rounds")
    return Claim(
        "A18",
        "Of v = [5, 0] the part along u = [0.6, 0.8] is (u . v) u; what is left is perpendicular"
        " to u.",
        (
            Check("u . v in fractions", 3, float(along), RATIONAL),
            Check("part along u in fractions", [9 / 5, 12 / 5], [float(x) for x in parallel],
                  RATIONAL),
            Check("the rest in fractions", [16 / 5, -12 / 5], [float(x) for x in rest], RATIONAL),
            Check("u . rest in fractions", 0, float(split(u, rest)[0]), RATIONAL),
            Check("part along u and rest in float64", [9 / 5, 12 / 5, 16 / 5, -12 / 5],
                  [*floats[1], *floats[2]], near),
        ),
    )  # fmt: skip


def projections(point: Point) -> Claim:
    """A19: the projections, the tangential one taken from the derivative of the real RMSNorm."""
    d = point.width
    h = draws(point, 19).normal(size=d)
    r, u = float(np.linalg.norm(h)), unit(h)
    jacobian = np.asarray(jax.jacfwd(lambda x: rms_norm(x, eps=0.0))(jnp.asarray(h)))
    along, across = np.outer(u, u), r / d**0.5 * jacobian
    once = rounding(2 * d + 20, 1, "entries of a projection, from a length over the features")
    twice = rounding(5 * d + 40, 2, "a product of two such matrices")
    ranks = [np.linalg.matrix_rank(m, tol=1e-8) for m in (along, across)]
    return Claim(
        "A19",
        "u u^T and I - u u^T are orthogonal projections that complement each other; the second is"
        " r / sqrt(d) times the Jacobian of RMSNorm.",
        (
            Check("u u^T twice", along, along @ along, twice),
            Check("r / sqrt(d) J_N twice", across, across @ across, twice),
            Check("u u^T is symmetric", along.T, along, exact("the same products")),
            Check("r / sqrt(d) J_N is symmetric", across.T, across, once),
            Check("the two add up to the identity", np.eye(d), along + across, once),
            Check("one after the other gives nothing", np.zeros((d, d)), across @ along, twice),
            Check("their ranks, 1 and d - 1", [1, d - 1], ranks, WHOLE),
        ),
    )  # fmt: skip


def chord(point: Point) -> Claim:
    """A21: the derivative of the direction is perpendicular to it, a finite chord is not."""
    h, dh = draws(point, 21).normal(size=(2, point.width))
    start, step = jnp.asarray(h), jnp.asarray(dh)
    u, du = (np.asarray(x) for x in jax.jvp(direction, (start,), (step,)))
    chords = [np.asarray(direction(start + t * step)) - u for t in (1.0, 0.1)]
    along = np.array([u @ c for c in chords])
    # A step of 5 across [3, 4] turns it by 45 degrees.
    right = direction(jnp.asarray([3.0 - 4.0, 4.0 + 3.0])) - jnp.asarray([0.6, 0.8])
    size = float(np.linalg.norm(dh) / np.linalg.norm(h))
    near = rounding(3 * point.width + 12, 2, "directions and their product, over the features")
    return Claim(
        "A21",
        "The infinitesimal move of a direction is perpendicular to it; the chord of a finite move"
        " is not: u . chord = -|chord|^2 / 2.",
        (
            Check("u . du, by jvp", 0.0, u @ du,
                  rounding(3 * point.width + 12, max(1.0, size),
                           "a derivative of size |dh| / r and a product over the features")),
            Check("u . chord of steps 1 and 0.1", [-(c @ c) / 2 for c in chords], along, near),
            Check("both are really negative", [-near.value] * 2, along,
                  Tolerance(0.0, "a bound: the rounding of u . chord"), "below"),
            Check("a turn by 45 degrees, cos 45 - 1", math.cos(math.pi / 4) - 1,
                  float(jnp.asarray([0.6, 0.8]) @ right),
                  rounding(16, 1, "directions in two dimensions")),
        ),
    )  # fmt: skip


CLAIMS = (
    length_and_direction, change_of_length, perpendicular_step, change_of_direction, shadow,
    projections, chord,
)  # fmt: skip
