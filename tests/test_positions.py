"""Rotary positions against complex multiplication and their invariances."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.layers import rotary_angles, rotate


def random(shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(("length", "width"), [(1, 2), (7, 6), (64, 32)])
def test_angles_are_position_times_frequency(length, width):
    angles = rotary_angles(length, width)
    chex.assert_shape(angles, (length, width // 2))
    for t in (0, length // 2, length - 1):
        for i in range(width // 2):
            # Three float32 roundings in the frequency, one in the product.
            np.testing.assert_allclose(angles[t, i], t * 10000.0 ** (-2 * i / width), rtol=1e-6)


def test_the_base_sets_the_slowest_frequency():
    chex.assert_trees_all_close(
        rotary_angles(2, 4, base=100.0)[1], jnp.array([1.0, 0.1]), rtol=1e-6
    )


def test_rotation_is_multiplication_by_a_unit_complex_number():
    """The pair (x_i, x_{i + w/2}) as x_i + j x_{i + w/2}, times exp(j angle)."""
    x = random((2, 5, 3, 8), 0)
    angles = rotary_angles(5, 8)
    turned = np.asarray(rotate(x, angles))
    z = np.asarray(x)[..., :4] + 1j * np.asarray(x)[..., 4:]
    z = z * np.exp(1j * np.asarray(angles, np.float64))[None, :, None, :]
    np.testing.assert_allclose(turned[..., :4], z.real, atol=2e-6)
    np.testing.assert_allclose(turned[..., 4:], z.imag, atol=2e-6)


def test_position_zero_is_left_alone():
    x = random((1, 4, 2, 6), 1)
    chex.assert_trees_all_equal(rotate(x, rotary_angles(4, 6))[:, 0], x[:, 0])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_lengths_and_dtype_are_kept(dtype):
    x = random((2, 16, 2, 8), 2, dtype)
    turned = rotate(x, rotary_angles(16, 8))
    assert turned.dtype == dtype
    before, after = (jnp.linalg.norm(a.astype(jnp.float32), axis=-1) for a in (x, turned))
    chex.assert_trees_all_close(after, before, rtol=2 * float(jnp.finfo(dtype).eps))


def test_low_precision_is_rounded_once():
    x = random((1, 8, 1, 4), 3, jnp.bfloat16)
    angles = rotary_angles(8, 4)
    once = rotate(x.astype(jnp.float32), angles).astype(jnp.bfloat16)
    chex.assert_trees_all_equal(rotate(x, angles), once)


def test_products_depend_on_the_distance_only():
    """<R_s q, R_t k> = <R_{s+n} q, R_{t+n} k>."""
    length, width, n = 12, 8, 5
    q, k = random((width,), 4), random((width,), 5)
    everywhere = lambda v: jnp.broadcast_to(v, (1, length, 1, width))  # noqa: E731
    angles = rotary_angles(length, width)
    a, b = rotate(everywhere(q), angles)[0, :, 0], rotate(everywhere(k), angles)[0, :, 0]
    products = a @ b.T
    chex.assert_trees_all_close(products[n:, n:], products[:-n, :-n], atol=2e-5)
    assert float(jnp.max(jnp.abs(products - products[0, 0]))) > 0.1


def test_rotation_is_linear_and_its_transpose_is_its_inverse():
    x, w = random((1, 6, 1, 4), 6), random((1, 6, 1, 4), 7)
    angles = rotary_angles(6, 4)
    _, pull = jax.vjp(lambda x: rotate(x, angles), x)
    chex.assert_trees_all_close(pull(w)[0], rotate(w, -angles), atol=1e-6)
    chex.assert_trees_all_close(rotate(rotate(x, angles), -angles), x, atol=1e-6)


def test_angles_of_a_float64_model_are_float64(x64):
    x = random((1, 64, 1, 8), 8, jnp.float64)
    turned = np.asarray(rotate(x, rotary_angles(64, 8, dtype=jnp.float64)))
    angles = np.arange(64)[:, None] * 10000.0 ** (-2 * np.arange(4) / 8)
    z = (np.asarray(x)[0, :, 0, :4] + 1j * np.asarray(x)[0, :, 0, 4:]) * np.exp(1j * angles)
    np.testing.assert_allclose(turned[0, :, 0, :4], z.real, rtol=0, atol=1e-13)
