"""Optimizers on problems with an exact answer, O1 to O10: Optax and plain recursions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from experiments.claims.claim import Tolerance, digits
from experiments.published.result import Result, between, number
from experiments.published.setting import Board, seeds

KOSSON = "Kosson et al. 2023, arXiv 2305.17212"
COHEN = "Cohen et al. 2022, arXiv 2207.14484"
LEWKOWYCZ = "Lewkowycz et al. 2020, arXiv 2003.02218"
MUON = "Jordan et al. 2024, Muon"
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 in Muon's Newton-Schulz step."""


def walk(board: Board, rate: float, decay: float, momentum: float, purpose: int) -> np.ndarray:
    """Return rotation per step and root mean square under AdamW and pure noise, (seeds, 2)."""
    d, skipped = 256, int(6 / (rate * decay))
    steps = skipped + 10 * board.steps // 20
    optimizer = optax.adamw(rate, b1=momentum, b2=0.999, eps=1e-12, weight_decay=decay)

    def step(carry: Any, key: Any) -> Any:
        w, state = carry
        update, state = optimizer.update(jax.random.normal(key, (d,), jnp.float64), state, w)
        new = w + update
        cosine = jnp.vdot(w, new) / (jnp.linalg.norm(w) * jnp.linalg.norm(new))
        return (new, state), (jnp.arccos(jnp.minimum(cosine, 1.0)), jnp.mean(new**2))

    @jax.jit
    def run(key: Any) -> Any:
        w = jnp.full(d, math.sqrt(rate / (2 * decay)), jnp.float64)
        keys = jax.random.split(key, steps)
        _, (turn, square) = jax.lax.scan(step, (w, optimizer.init(w)), keys)
        turn, square = turn[skipped:], square[skipped:]
        return jnp.sqrt(jnp.mean(turn**2)), jnp.sqrt(jnp.mean(square))

    keys = [jax.random.key(int(g.integers(2**31))) for g in seeds(board, purpose)]
    return np.array([run(key) for key in keys], np.float64)


def stationary(rate: float, decay: float, momentum: float) -> float:
    """Return the root mean square of w' = (1 - rate decay) w - rate m with m an average of noise.

    m has the variance (1 - b) / (1 + b) and the correlation b^k over k steps, and f = 1 - rate
    decay: var w = rate^2 var m (1 + f b) / ((1 - f^2) (1 - f b)).
    """
    f, b = 1 - rate * decay, momentum
    variance = rate**2 * (1 - b) / (1 + b) * (1 + f * b) / ((1 - f * f) * (1 - f * b))
    return math.sqrt(variance)


def equilibrium(board: Board, momentum: float = 0.9) -> list[Result]:
    """O1, O2: AdamW on gradients that are noise alone."""
    rate, decay, b = 0.01, 1.0, 0.9
    found = walk(board, rate, decay, momentum, 110)
    slower = walk(board, rate / 4, decay, momentum, 111)
    turn = math.sqrt(2 * rate * decay * (1 - b) / (1 + b))
    size, less = math.sqrt(rate / (2 * decay)), math.sqrt(rate / 4 / (2 * decay))
    setup = f"η = {rate}, λ = {decay}, β₁ = {b}, β₂ = 0.999, 256 weights, normal gradients, Optax"
    closed = [stationary(r, decay, b) / s for r, s in ((rate, size), (rate / 4, less))]
    return [
        Result(
            "O1", "In equilibrium AdamW rotates weights by sqrt(2 η λ (1 − β₁)/(1 + β₁)) a step.",
            KOSSON, "recalled", setup, number(turn),
            Tolerance(turn * rate * decay, "terms of the next order in η λ = 0.01"),
            tuple(found[:, 0]),
        ),
        Result(
            "O2", "Their root mean square is sqrt(η / (2 λ)).", KOSSON, "recalled", setup,
            number(size),
            Tolerance(size * rate * decay, "terms of the next order in η λ = 0.01"),
            tuple(found[:, 1]),
            f"Measured over expected is {np.mean(found[:, 1]) / size:.4f}, and"
            f" {np.mean(slower[:, 1]) / less:.4f} at a quarter of the rate. The exact recursion"
            " with a momentum whose noise is correlated over 1/(1 − β₁) steps has"
            f" {closed[0]:.4f} and {closed[1]:.4f}: the missing term is of the order of"
            " η λ / (1 − β₁).",
        ),
    ]  # fmt: skip


def threshold(make: Callable[[float], optax.GradientTransformation], high: float) -> float:
    """Return the curvature at which an optimizer of rate 1 stops being stable on a quadratic.

    The state after a step is a linear map of that before: the largest |eigenvalue| passes 1 there.
    """
    optimizer = make(1.0)
    zero = (jnp.zeros(()), optimizer.init(jnp.zeros(())))
    flat, shape = ravel_pytree(zero)

    def radius(curvature: float) -> float:
        def step(x: Any) -> Any:
            w, state = shape(x)
            update, state = optimizer.update(curvature * w, state, w)
            return ravel_pytree((w + update, state))[0]

        return float(np.max(np.abs(np.linalg.eigvals(np.asarray(jax.jacfwd(step)(flat))))))

    low = 0.1
    for _ in range(48):
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle) <= 1 + 1e-12 else (low, middle)
    return low


def edge_of_stability(board: Board, momentum: float = 0.9) -> list[Result]:
    """O3 to O6: the largest curvature at which a step is stable."""
    del board
    b = momentum
    kinds = (
        ("O3", "gradient descent", "2/η", 2.0, lambda rate: optax.sgd(rate)),
        ("O4", "gradient descent with momentum 0.9", "3.8/η", 3.8,
         lambda rate: optax.sgd(rate, momentum=b)),
        ("O5", "Nesterov’s momentum 0.9", "1.357/η", 1.357,
         lambda rate: optax.sgd(rate, momentum=b, nesterov=True)),
        ("O6", "Adam with β₁ = 0.9, of the preconditioned curvature,", "38/η", 38.0,
         lambda rate: optax.chain(optax.ema(b, debias=False), optax.scale(-rate))),
    )  # fmt: skip
    return [
        Result(
            id, f"The largest stable curvature of {words} is {text}.", COHEN, "paper",
            "η = 1, one weight with loss λ w²/2, the step of Optax"
            + (" with its second moment held fixed" if id == "O6" else "")
            + " as a linear map; bisection on the spectral radius, float64",
            number(value),
            digits(3) if id == "O5" else Tolerance(
                1e-5, "bisection on a radius of eigenvalues, which rounding moves"
            ),
            (threshold(make, 100.0),),
        )
        for id, words, text, value, make in kinds
    ]  # fmt: skip


def two_layer(start: tuple[np.ndarray, np.ndarray], factor: float, steps: int = 200) -> np.ndarray:
    """Return outputs over steps of v . u / sqrt(n) on one input with target 0, rate factor / λ₀."""
    u, v = start
    n, out = len(u), []
    rate = factor / ((u @ u + v @ v) / n)
    for _ in range(steps):
        f = u @ v / n**0.5
        out.append(f)
        if abs(f) > 1e6:
            break
        u, v = u - rate * f * v / n**0.5, v - rate * f * u / n**0.5
    return np.array(out)


def catapult(board: Board) -> list[Result]:
    """O7, O8: where the loss of a wide two-layer linear network first grows, and where it ends."""
    n, ends = 16 * board.matrix, []
    for g in seeds(board, 112):
        start = g.standard_normal((2, n))
        own = []
        for low, high, holds in (
            (1.0, 3.0, lambda f: abs(f[1]) <= abs(f[0])),
            (3.0, 6.0, lambda f: abs(f[-1]) < 1e6),
        ):  # fmt: skip
            for _ in range(12):
                middle = (low + high) / 2
                good = holds(two_layer((start[0], start[1]), middle))
                low, high = (middle, high) if good else (low, middle)
            own.append((low + high) / 2)
        ends.append(own)
    found = np.array(ends)
    setup = (
        f"u · v / sqrt(n), n = {n}, one input, target 0, u and v N(0, 1), gradient descent at"
        " c/λ₀; bisection on c"
    )
    near = Tolerance(0.05, f"terms of the order of 1/sqrt(n) = {n**-0.5:.3f} and bisection")
    return [
        Result(
            "O7", "Up to a rate of 2/λ₀ the loss of a wide network falls from the first step on.",
            LEWKOWYCZ, "recalled", setup, number(2.0), near, tuple(found[:, 0]),
        ),
        Result(
            "O8", "Between 2/λ₀ and 4/λ₀ it grows, then ends in a flatter place (catapult); beyond"
            " 4/λ₀ a linear network diverges.",
            LEWKOWYCZ, "recalled", setup, number(4.0), near, tuple(found[:, 1]),
        ),
    ]  # fmt: skip


def newton_schulz(board: Board, steps: int = 5) -> list[Result]:
    """O9, O10: the image of [0.01, 1] under Muon's polynomial."""
    del board
    x = np.linspace(0.01, 1.0, 200_001)
    a, b, c = QUINTIC
    for _ in range(steps):
        x = a * x + b * x**3 + c * x**5
    setup = f"{steps} steps of 3.4445 x − 4.7750 x³ + 2.0315 x⁵ on 200,001 points of [0.01, 1]"
    return [
        Result(
            id, f"Muon’s Newton-Schulz iteration maps singular values of [0.01, 1] into about"
            f" [0.7, 1.2]: the {word}.", MUON, "recalled", setup, expected, digits(1), (value,),
        )
        for id, word, expected, value in (
            ("O9", "smallest", between(0.7, 1.2), float(x.min())),
            ("O10", "largest", between(0.7, 1.2), float(x.max())),
        )
    ]  # fmt: skip


ROWS = (equilibrium, edge_of_stability, catapult, newton_schulz)
