"""Dense Jacobians against jax.jacfwd and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.errors import UserError
from normjax.spectra.dense import dense_jacobian, singular_values
from normjax.spectra.linearized import Linearized


def mixed(rows, columns, dtype="float64"):
    """A function with a full Jacobian whose input and output are matrices."""
    weights = np.random.default_rng(0).normal(size=(rows, columns)).astype(dtype)

    def function(x):
        return jnp.tanh(jnp.asarray(weights) @ x.reshape(-1)).reshape(-1, 1) * jnp.sum(x)

    return function


@pytest.mark.parametrize("rows, columns", [(7, 6), (3, 10), (10, 4), (1, 4), (5, 2)])
@pytest.mark.parametrize("batch", [1, 3, 128])
def test_it_is_the_jacobian_of_jacfwd(rows, columns, batch):
    function = mixed(rows, columns)
    x = np.random.default_rng(1).normal(size=(columns // 2, 2)) if columns % 2 == 0 else None
    x = np.random.default_rng(1).normal(size=columns) if x is None else x
    with jax.enable_x64(True):
        expected = np.asarray(jax.jacfwd(function)(jnp.asarray(x))).reshape(rows, columns)
    found = dense_jacobian(function, x, batch=batch)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_dtypes_and_given_dtype(dtype):
    function = mixed(4, 4, "float32")
    wide = dense_jacobian(function, np.full(4, 0.3))
    x = jnp.full(4, 0.3, dtype)
    found = dense_jacobian(lambda x: function(x.astype("float32")).astype(x.dtype), x, dtype=None)
    assert found.dtype == x.dtype
    np.testing.assert_allclose(
        found.astype(np.float64), wide, atol=8 * float(jnp.finfo(dtype).eps) * np.abs(wide).max()
    )


def test_a_reverse_rule_alone_is_enough():
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, w: (jnp.cos(x) * w,))
    x = np.linspace(0, 1, 5)
    np.testing.assert_allclose(dense_jacobian(sine, x), np.diag(np.cos(x)), atol=1e-16)
    linear = Linearized(sine, x)
    np.testing.assert_allclose(linear.matvec(np.ones(5)), np.cos(x), atol=1e-16)


def test_products_are_adjoint_and_accept_columns_and_any_scale():
    linear = Linearized(mixed(6, 4), np.arange(1.0, 5.0))
    rng = np.random.default_rng(2)
    v, w = rng.normal(size=4), rng.normal(size=6)
    np.testing.assert_allclose(w @ linear.matvec(v), v @ linear.rmatvec(w), rtol=1e-14)
    np.testing.assert_array_equal(linear.matvec(v[:, None]), linear.matvec(v))
    half = Linearized(lambda x: 3 * x, np.ones(2, np.float16))
    np.testing.assert_array_equal(half.matvec(np.array([2.0**-40, 2.0**90])), [0, 3 * 2.0**90])


def test_sixty_four_bits_inside_a_caller_that_has_them(x64):
    narrow = dense_jacobian(jnp.sin, np.ones(3, np.float32), dtype=None)
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(dense_jacobian(jnp.sin, np.ones(3)), np.eye(3) * np.cos(1.0))


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: dense_jacobian(jnp.sin, np.ones(4097)), "limit 4096.*top_singular_values"),
        (lambda: dense_jacobian(jnp.sin, np.ones(3), batch=0), "batch=0"),
        (lambda: dense_jacobian(jnp.sin, [1.0, np.nan]), r"x\[1\]=nan: must be finite"),
        (lambda: dense_jacobian(jnp.sin, np.ones(3, int), dtype=None), "x of dtype int64"),
        (lambda: dense_jacobian(jnp.sin, np.ones(3) * 1j), "x of dtype complex128"),
        (lambda: dense_jacobian(jnp.sin, np.ones((3, 0))), r"x of shape \(3, 0\)"),
        (lambda: dense_jacobian(jnp.sqrt, [0.0, 1.0]), "the Jacobian of function at x: 1 of 4"),
        (lambda: dense_jacobian(jnp.log, [-1.0, 1.0]), r"log\(x\): returns NaN"),
        (lambda: dense_jacobian(lambda x: (x, x), [1.0]), r"function\(x\): must return one"),
        (lambda: dense_jacobian(lambda x: x > 0, [1.0]), r"function\(x\): must return one"),
        (lambda: dense_jacobian(lambda x: x[:0], [1.0]), "at least one entry"),
        (lambda: dense_jacobian(jnp.sin, [1.0], dtype="int32"), "dtype=int32"),
        (lambda: singular_values(np.ones(3)), r"matrix of shape \(3,\)"),
        (lambda: singular_values([[np.inf]]), "matrix: 1 of 1"),
        (lambda: singular_values([[1j]]), "must be real"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises(UserError, match=named):
        call()


def test_singular_values_of_a_stack():
    rng = np.random.default_rng(3)
    left, right = np.linalg.qr(rng.normal(size=(2, 5, 5)))[0]
    exact = np.array([5.0, 3.0, 3.0, 1e-3, 0.0])
    stack = np.stack([(left * exact) @ right, np.eye(5)])
    np.testing.assert_allclose(singular_values(stack), [exact, np.ones(5)], atol=1e-14)
