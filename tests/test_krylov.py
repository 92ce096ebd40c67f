"""Top singular values: right within their stated bounds, or a named error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from normjax.errors import UserError
from normjax.spectra.dense import svd
from normjax.spectra.krylov import top_singular_values
from normjax.spectra.stochastic import frobenius_norm, spectral_density, trace


def orthogonal(n, rng):
    return np.linalg.qr(rng.normal(size=(n, n)))[0]


def with_values(values, rng):
    n = len(values)
    return (orthogonal(n, rng) * values) @ orthogonal(n, rng)


def operators(name):
    rng = np.random.default_rng(0)
    n = 50
    u = rng.normal(size=n)
    u /= np.linalg.norm(u)
    tail = rng.uniform(0, 3, n - 5)
    low = rng.normal(size=(n, 3))
    return {
        "identity": np.eye(n),
        "zero": np.zeros((n, n)),
        "projection": 3 * (np.eye(n) - np.outer(u, u)),
        "rank three and identity": np.eye(n) + low @ low.T,
        "rank three": low @ rng.normal(size=(3, n)),
        "repeated": with_values(np.append([5.0, 5, 5, 4, 4], tail), rng),
        "clustered": with_values(np.append([5, 5 - 1e-9, 5 - 2e-9, 4, 4], tail), rng),
        "graded": with_values(np.logspace(0, -12, n), rng),
        "rotation": orthogonal(n, rng),
        "nilpotent": np.eye(n, k=1),
        "wide": rng.normal(size=(20, 70)),
        "tall": rng.normal(size=(70, 20)),
        "row": rng.normal(size=(1, 9)),
        "one": np.array([[-2.0]]),
        "huge": 1e150 * rng.normal(size=(20, 20)),
        "tiny": 1e-150 * rng.normal(size=(20, 20)),
    }[name]


@pytest.mark.parametrize("k", [1, 2, 5, 10])
@pytest.mark.parametrize(
    "name",
    [
        *("identity", "zero", "projection", "rank three and identity", "rank three", "repeated"),
        *("graded", "rotation", "nilpotent", "wide", "tall", "row", "one", "huge", "tiny"),
    ],
)
def test_hard_operators_are_right_and_resolved(name, k):
    matrix = operators(name)
    exact = np.linalg.svd(matrix, compute_uv=False)
    if k > len(exact):
        with pytest.raises(UserError, match=f"k={k}: must be from 1 to {len(exact)}"):
            top_singular_values(aslinearoperator(matrix), k=k)
        return
    found = top_singular_values(aslinearoperator(matrix), k=k)
    error = np.abs(found.values - exact[:k])
    assert (error <= found.bounds).all() and found.resolved
    assert error.max() <= 1e-9 * exact[0] and found.bounds.max() <= 1e-7 * exact[0]
    scale = max(exact[0], 1e-300)
    image = matrix @ found.right / scale - found.left * found.values / scale
    np.testing.assert_allclose(image, 0, atol=1e-4)
    np.testing.assert_allclose(found.right.T @ found.right, np.eye(k), atol=1e-12)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 10])
def test_a_cluster_is_right_within_its_bound_or_said_to_be_open(k):
    matrix = operators("clustered")
    exact = np.linalg.svd(matrix, compute_uv=False)[:k]
    found = top_singular_values(aslinearoperator(matrix), k=k)
    assert (np.abs(found.values - exact) <= found.bounds).all()
    assert found.converged or not found.resolved


def test_without_a_second_chain_copies_are_not_claimed():
    found = top_singular_values(aslinearoperator(operators("repeated")), k=2, verify=False)
    assert not found.resolved
    full = top_singular_values(aslinearoperator(operators("repeated")), k=2)
    assert full.resolved and full.values[1] > found.values[1] + 0.5


def test_the_bound_holds_in_two_hundred_random_trials():
    rng = np.random.default_rng(5)
    for trial in range(200):
        rows, columns = rng.integers(2, 60, 2)
        spread = rng.choice([0.0, 1.0, 4.0])
        matrix = rng.normal(size=(rows, columns)) * 10 ** (-spread * rng.uniform(size=columns))
        if trial % 4 == 0 and columns > 3:
            matrix[:, 1] = 0.0
        k = int(rng.integers(1, min(rows, columns, 8) + 1))
        steps = int(rng.integers(k, k + 30))
        exact = np.linalg.svd(matrix, compute_uv=False)[:k]
        for tol in (1e-3, 1e-10):
            found = top_singular_values(
                aslinearoperator(matrix), k=k, tol=tol, max_steps=steps, seed=trial
            )
            assert (np.abs(found.values - exact) <= found.bounds).all(), (trial, tol)
            if found.converged:
                assert found.bounds.max() <= 1.1 * tol * exact[0] + 1e-13 * exact[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("sixty_four", [False, True])
def test_functions_of_every_dtype_with_and_without_sixty_four_bits(dtype, sixty_four):
    rng = np.random.default_rng(6)
    weights = rng.normal(size=(24, 12)) / 5

    def function(x):
        return jnp.tanh(jnp.asarray(weights.astype(np.float32)).astype(x.dtype) @ x)

    start = (0.3 * rng.normal(size=12)).astype(jnp.dtype(dtype))
    wide = start.astype(np.float64)
    single = weights.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)
    jacobian = (1 - np.tanh(single @ wide) ** 2)[:, None] * single
    exact = np.linalg.svd(jacobian, compute_uv=False)[:3]
    with jax.enable_x64(sixty_four):
        found = top_singular_values(function, start, k=3)
    assert (np.abs(found.values - exact) <= found.bounds).all() and found.resolved
    assert found.bounds.max() <= 64 * float(jnp.finfo(dtype).eps) * exact[0]


def test_a_function_of_a_matrix_and_its_vectors():
    weights = np.random.default_rng(7).normal(size=(5, 5))

    def function(x):
        return jnp.asarray(weights) @ x @ jnp.asarray(weights).T

    found = top_singular_values(function, np.ones((5, 5)), k=4)
    single = np.linalg.svd(weights, compute_uv=False)
    exact = np.sort(np.outer(single, single).ravel())[::-1][:4]  # every product twice
    np.testing.assert_allclose(found.values, exact, rtol=1e-9)
    assert found.resolved and found.right.shape == (25, 4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_product_that_is_not_finite_is_named(value):
    matrix = np.eye(4)
    matrix[2, 1] = value
    operator = LinearOperator(
        (4, 4), matvec=lambda v: matrix @ v, rmatvec=lambda v: matrix.T @ v, dtype=np.float64
    )
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(UserError, match="operator: a product with the Jacobian"),
    ):
        top_singular_values(operator)
    with pytest.raises(UserError, match="operator: a product with the Jacobian"):
        top_singular_values(jnp.sqrt, [0.0, 1.0])


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: top_singular_values(jnp.sin), "x: missing"),
        (lambda: top_singular_values(jnp.sin, np.ones(3), k=4), "k=4: must be from 1 to 3"),
        (lambda: top_singular_values(jnp.sin, np.ones(3), k=0), "k=0"),
        (lambda: top_singular_values(jnp.sin, np.ones(3), tol=0), "tol=0"),
        (lambda: top_singular_values(jnp.sin, np.ones(3), k=2, max_steps=1), "max_steps=1"),
        (lambda: top_singular_values(jnp.sin, [np.nan]), r"x\[0\]=nan: must be finite"),
        (lambda: top_singular_values(aslinearoperator(np.eye(2) * 1j)), "complex128"),
        (lambda: frobenius_norm(jnp.sin, np.ones(3), probes=1), "probes=1"),
        (lambda: spectral_density(jnp.sin, np.ones(3), steps=0), "steps=0"),
        (lambda: trace(lambda x: x[:2], np.ones(3)), "sides 3 and 2"),
        (lambda: spectral_density(jnp.sin, np.ones(3)).histogram([1.0]), "edges"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises(UserError, match=named):
        call()


def test_averages_are_within_their_standard_errors():
    """Over many seeds the estimates scatter as their standard errors say."""
    rng = np.random.default_rng(8)
    matrix = rng.normal(size=(60, 40)) / np.sqrt(40)
    values = np.linalg.svd(matrix, compute_uv=False)
    operator = aslinearoperator(matrix)
    square = aslinearoperator(matrix[:40])
    scores = []
    for seed in range(40):
        estimate = frobenius_norm(operator, seed=seed)
        scores.append((estimate.value - np.sqrt(np.sum(values**2))) / estimate.standard_error)
        estimate = trace(square, seed=seed)
        scores.append((estimate.value - np.trace(matrix[:40])) / estimate.standard_error)
        density = spectral_density(operator, steps=12, probes=12, seed=seed)
        estimate = density.mean(lambda s: s**4)
        scores.append((estimate.value - np.mean(values**4)) / estimate.standard_error)
    scores = np.array(scores)
    assert 0.7 < np.sqrt(np.mean(scores**2)) < 1.6 and np.abs(scores).max() < 7


def test_the_density_of_a_square_gaussian_is_the_quarter_circle():
    """A draw of size 300 against (1/pi) sqrt(4 - s^2), within a few standard errors."""
    matrix = np.random.default_rng(9).normal(size=(300, 300)) / np.sqrt(300)
    density = spectral_density(aslinearoperator(matrix), steps=30, probes=20)
    at = np.array([0.5, 1.0, 1.5, 1.9])
    share, error = density.cumulative(at)
    exact = (at * np.sqrt(4 - at**2) / 2 + 2 * np.arcsin(at / 2)) / np.pi
    assert (np.abs(share - exact) < 0.02 + 3 * error).all() and (error < 0.03).all()
    height, spread = density.histogram(np.linspace(0, 2.2, 12))
    np.testing.assert_allclose(np.sum(height) * 0.2, 1.0, rtol=1e-12)
    assert spread.shape == (11,)
    np.testing.assert_allclose(density.weights.sum(axis=1), 1.0, rtol=1e-12)


def test_densities_of_degenerate_operators_are_exact():
    for matrix in (np.eye(9), np.zeros((9, 9)), np.diag([2.0] * 4 + [0.0] * 4)):
        exact = np.mean(np.diag(matrix) ** 2)
        estimate = spectral_density(aslinearoperator(matrix), probes=3).mean(lambda s: s**2)
        np.testing.assert_allclose(estimate.value, exact, rtol=1e-12)
    # Starts of signs see every coordinate alike, so a diagonal matrix is exact whatever it holds.
    values = np.arange(1.0, 6.0)
    density = spectral_density(aslinearoperator(np.diag(values)), probes=2)
    np.testing.assert_allclose(density.mean(np.log).value, np.mean(np.log(values)), rtol=1e-10)


def test_the_caller_keeps_its_mode_and_seeds_repeat():
    x = np.ones(6)
    first = top_singular_values(jnp.sin, x, k=2, seed=3)
    assert not jax.config.jax_enable_x64
    second = top_singular_values(jnp.sin, x, k=2, seed=3)
    np.testing.assert_array_equal(first.right, second.right)


def test_a_product_that_overflows_between_vectors_is_refused():
    """Every product is finite, 1.7e308, and their sums are not: LAPACK must not see them."""
    matrix = np.full((3, 3), 1.7e308)
    with np.errstate(over="ignore", invalid="ignore"), pytest.raises(UserError, match="infinite"):
        top_singular_values(aslinearoperator(matrix), k=1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_decomposition_with_vectors_refuses_what_is_not_finite(bad):
    with pytest.raises(UserError, match="the matrix: 1 of 4 entries are NaN or infinite"):
        svd(np.array([[1.0, bad], [0.0, 1.0]]), "the matrix")
