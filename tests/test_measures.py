"""Measures of arrays at every size that float32 can hold, compiled as users compile them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.diagnostics import measures, radial
from normjax.norm_derivatives import unit
from normjax.norms import NORMS

F32 = float(np.finfo(np.float32).eps)

pytestmark = pytest.mark.usefixtures("optimized")


@pytest.mark.parametrize("size", [3e-38, 1e-30, 1e-20, 1.0, 1e20, 1e30, 3e38])
def test_every_measure_is_right_at_every_size(size):
    """Where a square would vanish or overflow, and where the inverse of a number would."""
    rng = np.random.default_rng(0)
    draw = rng.uniform(0.5, 1, (2, 3, 8)) * rng.choice([-1, 1], (2, 3, 8))
    x, y = jnp.asarray(draw * size, jnp.float32), jnp.asarray(draw[::-1], jnp.float32)
    X, Y = (np.asarray(z, np.float64) for z in (x, y))
    U, W = (Z / np.linalg.norm(Z, axis=-1, keepdims=True) for Z in (X, Y))
    pairs = (np.sum(np.sum(U, -2) ** 2, -1) - 3) / 6
    cases = [
        (measures.rms, (x,), np.sqrt(np.mean(X**2))),
        (lambda x: measures.rms(x, -1), (x,), np.sqrt(np.mean(X**2, -1))),
        (unit, (x,), U),
        (measures.cosine, (x, y), np.mean(np.sum(U * W, -1))),
        (measures.token_similarity, (x,), np.mean(pairs)),
    ]
    for function, arguments, exact in cases:
        # A mean of cosines may be near zero; a size never is.
        atol = 0 if function is measures.rms or np.ndim(exact) else 16 * F32
        found = jax.jit(function)(*arguments)
        np.testing.assert_allclose(found, exact, rtol=16 * F32, atol=atol)


def test_a_direction_is_the_same_function_in_numpy_and_jax():
    for x in ([3.0, 4.0], [0.0, 0.0], [np.inf, 1.0], [np.nan, 1.0]):
        found, expected = unit(jnp.asarray(x)), unit(np.asarray(x))
        np.testing.assert_allclose(found, expected, rtol=4 * F32)
        assert np.isnan(expected).all() == (not np.isfinite(x).all())


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25, 1e37])
def test_the_spread_of_logits_is_right_at_every_size(size):
    logits = np.float32(size) * np.array([[[[2.0, 0.0], [-1.0, 3.0]]]], np.float32)
    values = jax.jit(measures.attention)(logits, jax.nn.softmax(logits))
    # One query sees two keys, 4 apart: they are 2 from their mean.
    assert float(values["attention/logit_std"][0]) == pytest.approx(2 * size, rel=1e-6)


@pytest.mark.parametrize("exponent", [-100, -70, 0, 70, 100])
def test_the_self_test_knows_no_size(exponent):
    """The gradient along a token is judged by the gradient's own size, and by the stream's."""
    x, pulled = (jnp.asarray(np.random.default_rng(i).normal(size=(3, 8)), jnp.float32)
                 for i in range(2))  # fmt: skip
    row, c = NORMS["rmsnorm_plain"], np.float32(2.0**exponent)
    whole = float(radial.relative(radial.along(row, x, pulled), pulled))
    assert whole > 0.1
    scaled = radial.relative(radial.along(row, x, pulled * c), pulled * c)
    assert float(scaled) == pytest.approx(whole, rel=1e-5)
    # With an eps of the stream's own size, what comes back is eps / s^3 u . g whatever that size.
    X, G = (np.asarray(z, np.float64) for z in (x, pulled))
    inverse = 1 / np.sqrt(np.mean(X**2, -1) + 1)
    exact = inverse**3 * np.sum(X / np.linalg.norm(X, axis=-1, keepdims=True) * G, -1)
    if abs(exponent) <= 60:
        back = radial.returned(row, float(c) ** 2, x * c, row(x, {}, 1.0), pulled, 0.0) * c
        np.testing.assert_allclose(back[..., 0], exact, rtol=1e-5)  # one direction
