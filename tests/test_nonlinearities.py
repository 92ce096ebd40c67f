"""Nonlinearities against many digits, over all that each dtype can hold."""

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import pytest

from normjax.nonlinearities import NONLINEARITIES

DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
# By row of the table, as published: gelu with tanh, relu, and the silu of a gated layer.
EXACT = {
    "gelu": lambda x: x / 2 * (1 + mpmath.tanh(
        mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
    "gelu_exact": lambda x: x * mpmath.ncdf(x),
    "gelu_quick": lambda x: x / (1 + mpmath.exp(mpmath.mpf("-1.702") * x)),
    "relu": lambda x: max(x, mpmath.mpf(0)),
    "swiglu": lambda x: x / (1 + mpmath.exp(-x)),
}  # fmt: skip


def points(dtype):
    """Both signs, from 1e-3 to the largest finite number; 200 is where float16 loses x^2 x."""
    top = float(jnp.finfo(dtype).max)
    sizes = [*np.logspace(-3, 1, 9), 11.0, 41.0, 200.0, 300.0, *np.geomspace(1e3, top, 12)[:-1]]
    return jnp.asarray([s * x for x in (*sizes, top) for s in (1, -1)], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("name", EXACT)
def test_values_and_slopes_are_right_at_every_size(name, dtype):
    x = points(dtype)
    function = NONLINEARITIES[name].function
    value, slope, second = (
        np.asarray(jax.jit(jax.vmap(f))(x), np.float64)
        for f in (function, jax.grad(function), jax.grad(jax.grad(function)))
    )
    with mpmath.workdps(40):
        at = [mpmath.mpf(float(v)) for v in x]
        expected = np.array([float(EXACT[name](v)) for v in at])
        # Beyond 40 nothing but a line is left, to less than any of the dtypes can tell.
        slopes = np.array(
            [float(mpmath.diff(EXACT[name], v)) if abs(v) < 40 else float(v > 0) for v in at]
        )
    # A few roundings of the largest term, which near a zero of gelu or silu is x itself.
    eps = float(jnp.finfo(dtype).eps)
    away = np.abs(np.asarray(x, np.float64))
    assert np.all(np.abs(value - expected) <= 8 * eps * np.minimum(away, 1 + np.abs(expected)))
    assert np.all(np.abs(slope - slopes) <= 24 * eps)
    assert np.isfinite(second).all()


@pytest.mark.parametrize("name", EXACT)
def test_the_closed_forms_hold_out_to_the_end_of_float64(name):
    row = NONLINEARITIES[name]
    x = np.array([-1e300, -1e103, -50.0, 50.0, 1e103, 1e300])
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_allclose(row.value(x), np.maximum(x, 0), atol=1e-15)
        np.testing.assert_allclose(row.slope(x), x > 0, atol=1e-15)
