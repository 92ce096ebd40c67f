"""Singular values of norm Jacobians against 50 digits, closed forms and structure."""

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

from normjax import norm_functions, norms
from normjax.errors import UserError
from normjax.jacobians.closed_forms import norm_singular_values, null_directions
from normjax.spectra.norm_spectra import layer_norm_singular_values, rms_norm_singular_values

VALUES = {"rms": rms_norm_singular_values, "layer": layer_norm_singular_values}


def reference(kind, h, gain, eps, digits=110):
    """Singular values of the Jacobian from its eigenvalue problem with 110 digits."""
    d = len(h)
    with mp.workdps(digits):
        h = [mp.mpf(float(x)) for x in h]
        if kind == "layer":
            mean = mp.fsum(h) / d
            h = [x - mean for x in h]
        square = mp.fsum(x * x for x in h) / d + mp.mpf(eps)
        if square == 0:
            return np.zeros(d)
        g = [mp.mpf(float(x)) for x in gain]
        constant = mp.mpf(1) / d if kind == "layer" else mp.mpf(0)
        s = mp.sqrt(square)
        jacobian = mp.matrix(d, d)
        for i in range(d):
            for j in range(d):
                inner = (1 if i == j else 0) - constant - h[i] * h[j] / (d * square)
                jacobian[i, j] = g[i] * inner / s
        eigenvalues = mp.eigsy(jacobian * jacobian.T, eigvals_only=True)
        # Zeros of the exact matrix come out near 1e-110; nothing else here is below 1e-80.
        values = [mp.sqrt(x) if x > mp.mpf(10) ** (30 - digits) else mp.mpf(0) for x in eigenvalues]
        return np.array([float(x) for x in values])[::-1]


def gains(name, d, rng):
    g = rng.normal(size=d)
    return {
        "normal": g,
        "uniform": np.full(d, 1.7),
        "zeros": np.where(np.arange(d) % 3 == 0, 0.0, g),
        "one zero": np.where(np.arange(d) == d // 2, 0.0, g),
        "repeated": np.array([0.5, -0.5, 2.0, 1.0])[np.arange(d) % 4],
        "two values": np.where(np.arange(d) < d - 1, 1.0, 1.0 + 2**-52),
        "clustered": 1 + 1e-13 * rng.integers(0, 50, d),
        "wide": 10 ** rng.uniform(-10, 0, d),
        "trained": np.exp(0.2 * g),
    }[name]


def vectors(name, d, rng):
    h = rng.normal(size=d)
    return {
        "normal": h,
        "sparse": np.where(np.arange(d) % 2 == 0, h, 0.0),
        "one": np.where(np.arange(d) == 1, 3.0, 0.0),
        "tiny entries": h * 10 ** rng.uniform(-9, 0, d),
        "shifted": h + 1e3,
    }[name]


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize(
    "gain",
    ["normal", "uniform", "zeros", "one zero", "repeated", "two values", "clustered", "wide"],
)
@pytest.mark.parametrize("vector", ["normal", "sparse", "one", "tiny entries", "shifted"])
def test_every_value_agrees_with_many_digits(kind, gain, vector):
    rng = np.random.default_rng([len(gain), len(vector)])
    for d, eps in [(1, 1e-6), (2, 0.0), (3, 1e-18), (4, 0.0), (5, 1e-6), (8, 1e-18), (8, 1e-2)]:
        g, h = gains(gain, d, rng), vectors(vector, d, rng)
        found = VALUES[kind](h, g, eps)
        np.testing.assert_allclose(found, reference(kind, h, g, eps), rtol=1e-12, atol=0)


def test_uniform_gain_is_the_closed_form():
    h, g, eps = np.random.default_rng(0).normal(size=64), -1.5, 1e-6
    s = np.sqrt(np.mean(h**2) + eps)
    expected = np.append(np.full(63, 1.5 / s), 1.5 * eps / s**3)
    for gain in (g, np.full(64, g)):
        np.testing.assert_allclose(rms_norm_singular_values(h, gain, eps), expected, rtol=1e-14)
    c = h - h.mean()
    s = np.sqrt(np.mean(c**2) + eps)
    expected = np.concatenate([np.full(62, 1.5 / s), [1.5 * eps / s**3, 0.0]])
    np.testing.assert_allclose(layer_norm_singular_values(h, g, eps), expected, rtol=1e-13)
    # A gain that is uniform but for one unit of roundoff takes the other route to the same values.
    nearly = np.full(64, g)
    nearly[3] *= 1 + 2**-52
    np.testing.assert_allclose(layer_norm_singular_values(h, nearly, eps), expected, rtol=1e-13)


@pytest.mark.parametrize(
    "kind, function", [("rms", norm_functions.rms_norm), ("layer", norm_functions.layer_norm)]
)
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-2])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
def test_values_are_those_of_the_norms_derivative(kind, function, eps, scale):
    rng = np.random.default_rng(1)
    h, g = scale * rng.normal(size=300), np.exp(0.3 * rng.normal(size=300))
    with jax.enable_x64(True):
        jacobian = jax.jacfwd(lambda x: function(x, jnp.asarray(g), eps=eps))(jnp.asarray(h))
        dense = np.linalg.svd(np.asarray(jacobian), compute_uv=False)
    values = VALUES[kind](h, g, eps)
    np.testing.assert_allclose(values, dense, atol=2e-14 * dense[0])  # all that a dense SVD knows


@pytest.mark.parametrize("kind", VALUES)
def test_hundreds_of_values_keep_the_invariants(kind):
    """Frobenius norm, interlacing with the gains, and the first-order smallest value."""
    rng = np.random.default_rng(2)
    d, eps = 3000, 1e-9
    h, g = rng.normal(size=d), np.exp(0.5 * rng.normal(size=d))
    values = VALUES[kind](h, g, eps)
    c = h - h.mean() if kind == "layer" else h
    s2 = np.mean(c**2) + eps
    u, q = c / np.linalg.norm(c), eps / s2
    kept = 1 - (1 / d if kind == "layer" else 0) - (1 - q * q) * u * u
    np.testing.assert_allclose(np.sum(values**2), np.sum(g * g * kept) / s2, rtol=1e-13)
    sorted_gains = np.sort(g)[::-1] / np.sqrt(s2)
    drop = 2 if kind == "layer" else 1
    assert (values <= sorted_gains * (1 + 1e-14)).all()
    assert (values[:-drop] >= sorted_gains[drop:] * (1 - 1e-14)).all()
    inverse = np.stack([c / g, np.ones(d) / g][:drop], axis=1) / np.linalg.norm(c)
    distance = np.linalg.qr(inverse[:, ::-1])[1][-1, -1]  # of G^-1 u from the span of G^-1 1
    np.testing.assert_allclose(values[-drop], q / abs(distance) / np.sqrt(s2), rtol=1e-12)


def test_scales_near_the_ends_of_float64():
    h, g = np.array([1.0, 2.0, -0.5]), np.array([0.5, 2.0, 3.0])
    base = rms_norm_singular_values(h, g, 0.0)
    for scale in (1e-150, 1e150, 1e300):
        np.testing.assert_allclose(rms_norm_singular_values(scale * h, g, 0.0) * scale, base)
    eps, scale = 1e-6, 1e80  # eps / s^2 = 1e-166, whose square is below every float64
    s = scale * np.sqrt(np.mean(h**2))
    u = h / np.linalg.norm(h)
    smallest = eps / s**2 / s / np.linalg.norm(u / g)
    np.testing.assert_allclose(
        rms_norm_singular_values(scale * h, g, eps)[-1], smallest, rtol=1e-14
    )


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm_nobias"])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.3])
@pytest.mark.parametrize("zeros", [(), (1,), (0, 2, 3)])
@pytest.mark.parametrize("sparse", [False, True])
def test_null_directions_are_null_and_as_many_as_values_that_are_zero(norm, eps, zeros, sparse):
    rng = np.random.default_rng(3)
    d = 7
    h, g = rng.normal(size=d), rng.normal(size=d)
    g[np.array(zeros, int)] = 0.0
    if sparse:
        h[np.array(zeros, int)] = 0.0
    kind = "layer" if norm.startswith("layer") else "rms"
    function = norm_functions.layer_norm if kind == "layer" else norm_functions.rms_norm
    with jax.enable_x64(True):
        jacobian = jax.jacfwd(lambda x: function(x, jnp.asarray(g), eps=eps))(jnp.asarray(h))
        jacobian = np.asarray(jacobian)
    found = null_directions(norm, h, {"gain": g}, eps)
    zero = int(np.sum(VALUES[kind](h, g, eps) < 1e-14))
    for basis, image in (
        (found.right, jacobian @ found.right),
        (found.left, jacobian.T @ found.left),
    ):
        assert basis.shape == (d, zero)
        np.testing.assert_allclose(basis.T @ basis, np.eye(zero), atol=1e-14)
        np.testing.assert_allclose(image, 0, atol=1e-13)


@pytest.mark.parametrize(
    "name",
    ["rmsnorm", "rmsnorm_offset", "rmsnorm_plain",
     "layernorm", "layernorm_nobias", "layernorm_plain", "identity"],
)  # fmt: skip
@pytest.mark.parametrize("gain", ["normal", "uniform", "zeros", "wide"])
def test_a_row_has_its_values_by_its_derivative(name, gain):
    """Any row that has a form is asked through it, to the digits of the functions above."""
    rng, row = np.random.default_rng(4), norms.NORMS[name]
    for d, eps in ((1, 1e-6), (5, 0.0), (8, 1e-6)):
        g, h = gains(gain, d, rng), rng.normal(size=d)
        own = {"gain": g - ("offset" in name)} if "gain" in row.started(d) else {}
        found = norm_singular_values(row, h, own, eps)
        if name == "identity":
            np.testing.assert_array_equal(found, np.ones(d))
            continue
        seen = own["gain"] + ("offset" in name) if own else np.ones(d)
        kind = "layer" if row.removes_mean else "rms"
        expected = reference(kind, h, seen, eps)
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", norms.NORMS)
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e3])
def test_the_values_of_every_row_are_those_of_its_dense_jacobian(name, scale):
    """By automatic differentiation and a dense SVD, as parameters start and after some steps."""
    row, rng = norms.NORMS[name], np.random.default_rng(11)
    # In two dimensions LayerNorm's is zero but for eps, and autodiff gives rounding instead.
    for d, eps in ((3, 0.0), (9, 0.0), (9, 1e-2)):
        h = scale * rng.normal(size=d)
        moved = {p.name: 0.3 * rng.normal(size=p.shape_at(d)) for p in row.parameters}
        for own in (row.started(d), moved):
            with jax.enable_x64(True):
                wide = {k: jnp.asarray(v) for k, v in own.items()}
                J = jax.jacfwd(lambda x, p=wide, e=eps: row.exact()(x, p, e))(jnp.asarray(h))
                dense = np.linalg.svd(np.asarray(J), compute_uv=False)
            found = norm_singular_values(row, h, own, eps)
            np.testing.assert_allclose(found, dense, rtol=0, atol=3e-14 * dense[0])


@pytest.mark.parametrize("eps", [0.0, 1e-18, 1e-6, 10.0])
@pytest.mark.parametrize("name", ["prmsnorm", "crmsnorm"])
def test_an_oblique_norm_with_one_gain_keeps_the_digits_of_its_smallest_value(name, eps):
    """J = (1/s)(I - A h h^T / s^2): d - 2 values 1/s, and two by 60 digits."""
    row, h = norms.NORMS[name], np.random.default_rng(12).normal(size=6)
    with mp.workdps(60):
        x = mp.matrix([mp.mpf(float(v)) for v in h])
        if name == "prmsnorm":  # mean of the first ceil(6 / 4) squares
            form = mp.diag([mp.mpf(1) / 2] * 2 + [mp.mpf(0)] * 4)
        else:
            form = (mp.eye(6) + mp.ones(6)) / 7
        square = (x.T * form * x)[0] + mp.mpf(eps)
        J = (mp.eye(6) - x * (form * x).T / square) / mp.sqrt(square)
        values = mp.svd_r(J, compute_uv=False)
        expected = np.array([float(v) if v > mp.mpf(10) ** -40 else 0.0 for v in values])
    own = {"gain": np.full(6, -1.0)} if row.parameters else {}
    np.testing.assert_allclose(norm_singular_values(row, h, own, eps), expected, rtol=1e-13)


@pytest.mark.parametrize("decades", [30, 49.9])
def test_gains_over_many_decades_are_right_or_refused(decades):
    rng = np.random.default_rng(9)
    for eps in (0.0, 1e-6, 1e-18):
        g, h = 10 ** rng.uniform(-decades, 0, 6), rng.normal(size=6)
        g[0], g[-1] = 1.0, 10.0**-decades
        found = layer_norm_singular_values(h, g, eps)
        np.testing.assert_allclose(found, reference("layer", h, g, eps, 300), rtol=1e-12, atol=0)
    with pytest.raises(UserError, match="nonzero entries below 1e-50 of the largest"):
        layer_norm_singular_values([1.0, 2.0, 4.0], [1.0, 1e-20, 1e-51])


@pytest.mark.parametrize(
    "arguments, named",
    [
        (([1.0, np.nan],), "h: must be finite"),
        (([[1.0, 2.0]],), r"h of shape \(1, 2\)"),
        (([],), "h of shape"),
        (([1.0, 2.0], [1.0, np.inf]), "gain: must be finite"),
        (([1.0, 2.0], [1.0, 2.0, 3.0]), r"gain of shape \(3,\)"),
        (([1.0, 2.0], None, -1.0), "eps=-1.0"),
        (([1.0, 2.0], None, np.nan), "eps=nan"),
        (([1.0, 2.0], [1.0, 1e-150]), "nonzero entries below"),
        (([1j, 2.0],), "h of dtype complex128"),
        (([1e-300, 1e-300], 1e20, 0.0), "leaves float64"),
    ],
)
@pytest.mark.parametrize("kind", VALUES)
def test_bad_input_is_named(kind, arguments, named):
    if kind == "layer" and arguments[0] == [1e-300, 1e-300]:
        arguments = ([1e-300, 2e-300], *arguments[1:])
    with pytest.raises(UserError, match=named):
        VALUES[kind](*arguments)
