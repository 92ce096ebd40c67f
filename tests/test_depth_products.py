"""Products over depth against many digits, exact constructions and scipy's Jacobi SVD."""

import mpmath as mp
import numpy as np
import pytest

from normjax.errors import UserError
from normjax.spectra.depth_products import DepthProduct, depth_log_singular_values


def reference(factors, digits):
    """Logarithms of the singular values of the product, multiplied out with many digits."""
    with mp.workdps(digits):
        product = mp.matrix(factors[0].tolist())
        for factor in factors[1:]:
            product = mp.matrix(factor.tolist()) * product
        eigenvalues = mp.eigsy(product * product.T, eigvals_only=True)
        return np.array([float(mp.log(x) / 2) for x in eigenvalues])[::-1]


def post_norm_stack(d, depth, eps, rng):
    """Jacobians of h <- RMSNorm(h + W_2 tanh(W_1 h)) along one trajectory."""
    h, factors = rng.normal(size=d), []
    for _ in range(depth):
        w1 = rng.normal(size=(2 * d, d)) / np.sqrt(d)
        w2 = rng.normal(size=(d, 2 * d)) / np.sqrt(2 * d)
        a = np.tanh(w1 @ h)
        y = h + w2 @ a
        s = np.sqrt(np.mean(y * y) + eps)
        branch = np.eye(d) + w2 @ ((1 - a * a)[:, None] * w1)
        factors.append((np.eye(d) - np.outer(y, y) / (d * s * s)) @ branch / s)
        h = y / s
    return factors


def stack(name, rng):
    d = 10
    gaussian = [rng.normal(size=(d, d)) / np.sqrt(d) for _ in range(64)]
    return {
        "pre": [np.eye(d) + 0.5 * x for x in gaussian],
        "rough": [np.eye(d) + x for x in gaussian],
        "no residual": [3 * x for x in gaussian],
        "post": post_norm_stack(d, 64, 1e-6, rng),
        "post, huge": [1e30 * j for j in post_norm_stack(d, 24, 1e-6, rng)],
        "one": gaussian[:1],
        "odd": [x[:3, :3] for x in gaussian],
        "equal": [np.linalg.qr(x)[0] for x in gaussian[:8]],
        "scalar": [x[:1, :1] for x in gaussian],
    }[name]


@pytest.mark.parametrize(
    "name",
    ["pre", "rough", "no residual", "post", "post, huge", "one", "odd", "equal", "scalar"],
)
def test_every_log_singular_value_agrees_with_many_digits(name):
    factors = stack(name, np.random.default_rng(0))
    expected = reference(factors, 60 if name in ("one", "equal", "scalar") else 900)
    found = depth_log_singular_values(iter(factors))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)
    if name == "post":
        assert expected[-1] < np.log(1e-300)  # plain numbers would have ended here


@pytest.mark.parametrize("d", [48, pytest.param(128, marks=pytest.mark.slow)])
def test_a_product_of_full_size_with_known_values(d):
    """Factors that share their bases: logarithms add, here down to e^-880 at L = 64."""
    rng = np.random.default_rng(1)
    depth = 64
    bases = [np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(depth + 1)]
    values = np.sort(10 ** rng.uniform(-1, 1, (depth, d)))[:, ::-1] * np.logspace(0, -5, d)
    factors = [(bases[i + 1] * values[i]) @ bases[i].T for i in range(depth)]
    found = depth_log_singular_values(factors)
    assert found[-1] < -850
    np.testing.assert_allclose(found, np.sort(np.log(values).sum(axis=0))[::-1], rtol=0, atol=1e-7)


def test_the_product_may_be_read_after_every_factor():
    rng = np.random.default_rng(2)
    product, plain = DepthProduct(6), np.eye(6)
    for _ in range(5):
        factor = rng.normal(size=(6, 6))
        product.apply(factor)
        plain = factor @ plain
        expected = np.log(np.linalg.svd(plain, compute_uv=False))
        np.testing.assert_allclose(product.log_singular_values(), expected, atol=1e-9)


def test_transposed_order_has_the_same_values():
    factors = stack("post", np.random.default_rng(3))
    forward = depth_log_singular_values(factors)
    backward = depth_log_singular_values([f.T for f in reversed(factors)])
    np.testing.assert_allclose(forward, backward, rtol=0, atol=1e-7)


def test_zero_singular_values_are_minus_infinity_and_the_others_stay():
    rng = np.random.default_rng(4)
    d = 8
    center = np.eye(d) - 1 / d
    factors = [center @ (np.eye(d) + 0.3 * rng.normal(size=(d, d))) for _ in range(20)]
    found = depth_log_singular_values(factors)
    basis = np.linalg.qr(center[:, 1:])[0]  # the same product between the vectors of mean zero
    reduced = [basis.T @ f @ basis for f in factors[1:]]
    assert found[-1] == -np.inf and np.isfinite(found[:-1]).all()
    expected = reference([basis.T @ factors[0], *reduced], 200)
    np.testing.assert_allclose(found[:-1], expected, rtol=0, atol=1e-9)
    assert (depth_log_singular_values([np.zeros((3, 3))]) == -np.inf).all()
    assert (depth_log_singular_values([np.eye(3), np.zeros((3, 3)), np.eye(3)]) == -np.inf).all()


@pytest.mark.parametrize(
    "factors, named",
    [
        ([], "at least one"),
        ([np.ones((2, 3))], r"shape \(2, 3\)"),
        ([np.ones(3)], r"shape \(3,\)"),
        ([np.eye(2), np.eye(3)], r"shape \(3, 3\)"),
        ([np.array([[np.nan]])], "must be finite"),
        ([np.array([[1j]])], "must be real"),
    ],
)
def test_bad_input_is_named(factors, named):
    with pytest.raises(UserError, match=named):
        depth_log_singular_values(factors)
