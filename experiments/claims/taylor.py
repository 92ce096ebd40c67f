"""The claim on first-order Taylor expansions, A13, for a parabola and for a real block.

With f(t) = F(h + t D) the remainder f(t) - f(0) - t f'(0) is t^2 f''(0) / 2 up to t^3 / 6 times the
largest third derivative on the way (Lagrange), and up to rounding, which no step makes smaller.
Halving t therefore divides it by four, within bounds that the derivatives give beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.block_claims import echo, in_float32
from experiments.claims.claim import EPS, Check, CheckSeries, Claim, Tolerance, exact, rounding
from experiments.claims.setting import Point, decoder_parts, draws, stream

FIGURE = "taylor-remainder"
DRAWN = 2.0 ** -np.arange(1, 41)
"""Steps at which remainders are drawn."""
LONGEST, WITHIN = 2.0**-4, 0.02
"""The slope of the block is taken over steps up to the first at which third order and rounding are
below 2 % of the second order."""


def derivatives(f: Callable[[Any], Any], order: int) -> Callable[[Any], list[Any]]:
    """Return t -> [f(t), f'(t), ..., up to ``order``], by nested jvp."""
    chain = [f]
    for _ in range(order):
        chain.append(lambda t, g=chain[-1]: jax.jvp(g, (t,), (jnp.ones_like(t),))[1])
    return lambda t: [g(t) for g in chain]


def slope(x: Any, y: Any) -> float:
    """Return the slope of the line of least squares through (log x, log y).

    >>> slope(np.array([1.0, 2.0, 4.0]), np.array([5.0, 20.0, 80.0]))
    2.0
    """
    a, b = np.log2(x), np.log2(y)
    a = a - a.mean()
    return float(a @ (b - b.mean()) / (a @ a))


def first_order(point: Point) -> Claim:
    """A13: x^2 where its slope is 3, then a pre-norm block along a random line."""
    parabola, line = _parabola(), _block(point)
    return Claim(
        "A13",
        "To first order a function changes by slope times step; what is left falls with the square"
        " of the step, until rounding.",
        (*parabola[0], *line[0]),
        (parabola[1], line[1]),
    )


def _parabola() -> tuple[list[Check], CheckSeries]:
    def f(x: Any) -> Any:
        return x * x

    at, step = jnp.asarray(1.5), 0.01
    value, gradient = f(at), jax.grad(f)(at)
    change = float(f(at + step) - value)
    powers = 2.0 ** -np.arange(1, 25)  # (1.5 + 2^-k)^2 has 2 k + 2 bits: up to k = 25 no rounding
    rest = np.asarray(f(at + powers) - value - gradient * powers, np.float64)
    steps = DRAWN
    drawn = np.abs(np.asarray(f(at + steps) - value - gradient * steps))
    checks = [
        Check("x^2 at x = 1.5 has the slope 3", 3, gradient, exact("small numbers of few bits")),
        Check("a step of 0.01 changes it by about 0.03", 0.03, change,
              Tolerance(step**2 + 8 * EPS, "the term of second order, 0.01^2, and rounding")),
        Check("what is left is 0.01^2", step**2, change - float(gradient) * step,
              rounding(4, 2.4, "a square, and differences of numbers up to 2.3")),
        Check("slope of what is left, steps 1/2 to 2^-24", 2, slope(powers, rest),
              rounding(2 * len(powers) + 8, 48, "logarithms to the base 2 down to -48")),
    ]  # fmt: skip
    return checks, CheckSeries(FIGURE, "x² at 1.5", tuple(steps), tuple(drawn), tuple(steps**2))


def _block(point: Point) -> tuple[list[Check], CheckSeries]:
    parts = decoder_parts(point, placement="pre")
    h, along = stream(point, 13), draws(point, 113).normal(size=(point.tokens, point.width))
    start, direction, block = jnp.asarray(h), jnp.asarray(along), parts.block(1)

    def f(t: Any) -> Any:
        return block(start + t * direction)

    chain, way = jax.jit(jax.vmap(derivatives(f, 2))), np.linspace(0.0, LONGEST, 33)
    values = [np.asarray(v) for v in chain(jnp.asarray(way))]
    curved = float(np.linalg.norm(values[2][0]))
    # The largest third derivative up to the longest step, from the second at points of the way.
    third = float(np.max(np.linalg.norm(np.diff(values[2], axis=0), axis=(1, 2))) / way[1])
    value, first = values[0][0], values[1][0]
    remainder = np.asarray(jax.jit(jax.vmap(lambda t: f(t) - value - t * first))(DRAWN))
    remainder = np.linalg.norm(remainder, axis=(1, 2))
    narrow = in_float32(parts, ("attention", "mlp"))(jnp.asarray(h, jnp.float32))
    noise = echo(value, narrow, "the block")
    floor = noise.value * value.size**0.5  # as a length, of rounding in every entry

    off = DRAWN * third / (3 * curved) + 2 * floor / (DRAWN**2 * curved)  # of t^2 |f''| / 2
    used = (off < WITHIN) & (DRAWN <= LONGEST)
    steps, rest, off = DRAWN[used], remainder[used], off[used]
    if len(steps) < 3:
        raise ValueError(f"only {len(steps)} steps at which the second order stands out")
    spread = float(np.max(np.log2((1 + off[:-1]) / (1 - off[1:]))))
    best = int(np.argmin(off))
    tiny = float(remainder[-1])
    span = f"2^{np.log2(steps[0]):.0f} to 2^{np.log2(steps[-1]):.0f}"
    both = "the term of third order and rounding"
    checks = [
        Check(f"block: slope of what is left, steps {span}", 2, slope(steps, rest),
              Tolerance(spread, both + ", at the worst pair of neighbouring steps")),
        Check(f"block: what is left over t^2 at t = 2^{np.log2(steps[best]):.0f}, |f''| / 2",
              curved / 2, rest[best] / steps[best] ** 2,
              Tolerance(float(off[best] * curved / 2), both)),
        Check("block: at 2^-40 no more than rounding is left", floor, tiny,
              Tolerance(0.0, "a bound: " + noise.reason), "below"),
        Check("block: and there more than the second order", DRAWN[-1] ** 2 * curved, tiny,
              Tolerance(0.0, "a bound: twice the term of second order"), "above"),
    ]  # fmt: skip
    expected = tuple(DRAWN**2 * curved / 2)
    return checks, CheckSeries(FIGURE, "pre-norm block", tuple(DRAWN), tuple(remainder), expected)


CLAIMS = (first_order,)
