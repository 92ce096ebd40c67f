"""Claims on RMSNorm and its derivative: A2 to A5, A17, A20, A23."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.claims.claim import Check, CheckSeries, Claim, Tolerance, exact, rounding
from experiments.claims.setting import Point, draws
from normjax.jacobians.closed_forms import norm_jacobian
from normjax.norm_derivatives import Floats, unit
from normjax.norms import NORMS, NormLayer, RMSNorm

TWICE = exact("a factor of 2 changes no digit")


def normalized(h: Any, gain: Any = None, eps: float = 0.0) -> Array:
    """Return what the program's Flax module makes of h (..., d), in the dtype of h."""
    h = jnp.asarray(h)
    module, params = NormLayer(NORMS["rmsnorm_plain"], eps), {}
    if gain is not None:
        module = RMSNorm(NORMS["rmsnorm"], eps, h.dtype)
        params = {"gain": jnp.asarray(gain, h.dtype)}
    y: Any = module.apply({"params": params}, h)
    return y


def angle(a: Any, b: Any) -> float:
    """Return the angle of two vectors; unlike an arc cosine it keeps its digits near 0."""
    a, b = unit(np.asarray(a)), unit(np.asarray(b))
    return float(2 * np.arctan2(np.linalg.norm(a - b), np.linalg.norm(a + b)))


def _formula(h: Any, gain: Any, eps: float) -> Floats:
    """Return g h / sqrt(|h|^2 / d + eps) with sums that are rounded once."""
    scale = math.sqrt(math.fsum(float(x) * float(x) for x in h) / len(h) + eps)
    return np.array([float(g) * float(x) / scale for g, x in zip(gain, h, strict=True)])


def definition(point: Point) -> Claim:
    """A2: the module against sums in exact arithmetic and against Flax's own RMSNorm."""
    generator, eps = draws(point, 2), 1e-3
    h, gain = generator.normal(size=point.width), generator.uniform(0.5, 2.0, point.width)
    expected = _formula(h, gain, eps)
    own = normalized(h, gain, eps)
    theirs = nn.RMSNorm(epsilon=eps, dtype=jnp.float64, param_dtype=jnp.float64).apply(
        {"params": {"scale": jnp.asarray(gain)}}, jnp.asarray(h)
    )
    h32, gain32 = h.astype(np.float32), gain.astype(np.float32)
    narrow = normalized(h32, gain32, eps)
    count, size = point.width + 12, float(np.max(np.abs(expected)))
    why = "a mean over the features, a root, a quotient, a gain"
    return Claim(
        "A2", "RMSNorm is N(h) = g h / sqrt(|h|^2 / d + eps).",
        (
            Check("module and formula, float64", expected, own, rounding(count, size, why)),
            Check("module and the RMSNorm of the Flax library, float64", theirs, own,
                  rounding(count, size, why)),
            Check("module and formula, float32", _formula(h32, gain32, eps), narrow,
                  rounding(count, size, why, float(np.finfo(np.float32).eps))),
        ),
    )  # fmt: skip


def sphere(point: Point) -> Claim:
    """A3: outputs at three sizes of h against sqrt(d) u."""
    d = point.width
    h = draws(point, 3).normal(size=d)
    points = h * np.array([1e-6, 1.0, 1e6])[:, None]
    y, root = np.array([normalized(x) for x in points]), d**0.5
    why = "a mean over the features, a root and a quotient, on both sides"
    return Claim(
        "A3", "Without gain and eps RMSNorm gives sqrt(d) u: every output is sqrt(d) long.",
        (
            Check("outputs for h of sizes 1e-6, 1, 1e6", root * unit(points), y,
                  rounding(d + 12, root, why)),
            Check("their lengths", [root] * 3, np.linalg.norm(y, axis=-1),
                  rounding(2 * d + 16, root, "the same and a length")),
        ),
    )  # fmt: skip


def scale_invariance(point: Point) -> Claim:
    """A4: N(c h) against N(h), and their ratio against sqrt((1 + x) / (1 + x / c^2))."""
    d, c = point.width, 10.0
    h = draws(point, 4).normal(size=d)
    mean_square = float(h @ h) / d
    near = rounding(2 * d + 24, 4, "two norms over the features")
    ratios = 10.0 ** np.arange(-6, 4)
    expected = np.sqrt((1 + ratios) / (1 + ratios / c**2)) - 1
    measured = np.array([_stretch(h, c, x * mean_square) for x in ratios])
    chosen = [0, 3, 6, 9]
    closed = rounding(4 * d + 40, 10, "four norms and lengths over the features, up to 9.5")
    return Claim(
        "A4",
        "N(c h) = N(h) for c > 0: exactly without eps, with eps only nearly, and less so the larger"
        " eps is against the mean square of h.",
        (
            Check("eps = 0: N(2 h) = N(h), bit for bit", normalized(h), normalized(2 * h), TWICE),
            Check("eps = 0: N(c h) = N(h) for c = 0.3, 10, 1e5", np.tile(normalized(h), (3, 1)),
                  [normalized(x * h) for x in (0.3, 10.0, 1e5)], near),
            Check("|N(10 h)| / |N(h)| - 1 at eps / mean(h^2) = 1e-6, 1e-3, 1, 1e3",
                  expected[chosen], measured[chosen], closed),
            Check("so that at 1e-6 already it is not exact", closed.value, measured[0],
                  Tolerance(0.0, "a bound: what rounding alone could do"), "above"),
        ),
        (
            CheckSeries(
                "scale-invariance", "c = 10", tuple(ratios), tuple(measured), tuple(expected)
            ),
        ),
    )  # fmt: skip


def _stretch(h: Floats, c: float, eps: float) -> float:
    long, short = (np.linalg.norm(np.asarray(normalized(x, eps=eps))) for x in (c * h, h))
    return float(long / short) - 1


def gains_turn(point: Point) -> Claim:
    """A5: angles between h and its norm, for uniform and other gains."""
    d, generator = point.width, draws(point, 5)
    h, gain = generator.normal(size=d), generator.uniform(0.25, 2.0, d)
    u = unit(h)
    cosine = float(gain @ u**2 / np.linalg.norm(gain * u))
    turned = angle(normalized(h, gain), h)
    near = rounding(3 * d + 24, 1, "a norm, and two directions over the features")
    why = "the same, and an arc cosine, whose slope is 1 / sin"
    return Claim(
        "A5", "A gain that is not the same for all features turns the output too.",
        (
            Check("[1, 1] with gains [1, 2] turns by atan(1/3)", math.atan(1 / 3),
                  angle(normalized(np.ones(2), [1.0, 2.0]), np.ones(2)),
                  rounding(24, 1, "a norm and two directions in two dimensions")),
            Check("angle by random gains, arccos(g . u^2 / |g u|)", math.acos(cosine), turned,
                  rounding(3 * d + 24, 1 / math.sqrt(1 - cosine**2), why)),
            Check("that angle is really there", near.value, turned,
                  Tolerance(0.0, "a bound: the rounding of an angle of 0"), "above"),
            Check("gain 1.7 for all: no angle", 0.0, angle(normalized(h, np.full(d, 1.7)), h),
                  near),
        ),
    )  # fmt: skip


def _jacobian(h: Floats, gain: Any = None, eps: float = 0.0) -> Floats:
    return np.asarray(jax.jacfwd(lambda x: normalized(x, gain, eps))(jnp.asarray(h)))


def plain_jacobian(point: Point) -> Claim:
    """A17: jax.jacfwd of the module against sqrt(d) (I - u u^T) / r."""
    d = point.width
    h = draws(point, 17).normal(size=d)
    r, u = float(np.linalg.norm(h)), unit(h)
    expected = d**0.5 / r * (np.eye(d) - np.outer(u, u))
    why = "a length over the features, quotients and products"
    return Claim(
        "A17",
        "Without gain and eps the Jacobian of RMSNorm is sqrt(d) (I - u u^T) / r: the Jacobian of"
        " the direction, sqrt(d) times.",
        (Check("Jacobian of the module", expected, _jacobian(h),
               rounding(2 * d + 16, d**0.5 / r, why)),),
    )  # fmt: skip


def radial_direction(point: Point) -> Claim:
    """A20: jax.jvp of the module along its own input, without eps and with it."""
    d = point.width
    h = draws(point, 20).normal(size=d)
    u, mean_square = unit(h), float(h @ h) / d
    values = np.array([1e-6, 1e-3, 1.0])
    scales = np.sqrt(mean_square + values)

    def along(eps: float) -> Floats:
        function = lambda x: normalized(x, eps=eps)  # noqa: E731
        return np.asarray(jax.jvp(function, (jnp.asarray(h),), (jnp.asarray(u),))[1])

    images = np.array([along(eps) for eps in values])
    near = rounding(2 * d + 16, 1 / mean_square**0.5,
                    "u - y (y . u) / d over the features, of size 1 / s")  # fmt: skip
    return Claim(
        "A20",
        "RMSNorm does not see a step along h: J_N u = 0 without eps; with eps the derivative along"
        " u is eps / s^3, s^2 = mean(h^2) + eps.",
        (
            Check("J_N u without eps", np.zeros(d), along(0.0), near),
            Check("[6, 8] against [3, 4], bit for bit", normalized(np.array([3.0, 4.0])),
                  normalized(np.array([6.0, 8.0])), TWICE),
            Check("u . J_N u for eps = 1e-6, 1e-3, 1", values / scales**3, images @ u, near),
            Check("J_N u for these has no other part", values[:, None] / scales[:, None] ** 3 * u,
                  images, near),
        ),
    )  # fmt: skip


def full_jacobian(point: Point) -> Claim:
    """A23: jax.jacfwd of the module with gain and eps at three sizes of h."""
    d, generator, eps = point.width, draws(point, 23), 1e-6
    h, gain = generator.normal(size=d), generator.uniform(0.5, 2.0, d)
    checks = []
    for scale in (1e-3, 1.0, 1e3):
        x = scale * h
        s = math.sqrt(float(x @ x) / d + eps)
        formula = np.diag(gain) @ (np.eye(d) - np.outer(x, x) / (d * s**2)) / s
        near = rounding(2 * d + 20, float(gain.max()) / s,
                        "a mean over the features, quotients and products")  # fmt: skip
        measured = _jacobian(x, gain, eps)
        checks.append(Check(f"Jacobian of the module at {scale:g} h", formula, measured, near))
        checks.append(Check(f"the program's closed form at {scale:g} h", measured,
                            norm_jacobian("rmsnorm", x, {"gain": gain}, eps), near))  # fmt: skip
    x, plain = 1e-3 * h, 1e-3 * float(np.linalg.norm(h))
    shortcut = d**0.5 / plain * (np.eye(d) - np.outer(unit(x), unit(x)))
    gap = float(np.max(np.abs(shortcut - checks[0].measured)))
    least = Tolerance(0.0, "a bound: what rounding alone could do")
    checks.append(Check("largest gap to the form without gain and eps, at 0.001 h",
                        checks[0].tolerance.value, gap, least, "above"))  # fmt: skip
    return Claim(
        "A23",
        "With gain and eps the Jacobian of RMSNorm is diag(g) (I - h h^T / (d s^2)) / s, not the"
        " form without them.",
        tuple(checks),
    )  # fmt: skip


CLAIMS = (
    definition, sphere, scale_invariance, gains_turn, plain_jacobian, radial_direction,
    full_jacobian,
)  # fmt: skip
