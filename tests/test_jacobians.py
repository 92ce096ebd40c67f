"""Closed-form Jacobians against autodiff in float64, and against facts that need neither."""

import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.equation import FACTORS, SLOTS, Learned, fold
from normjax.errors import UserError
from normjax.jacobians.branch_jacobians import softmax_gauge, softmax_jacobian
from normjax.jacobians.closed_forms import (
    norm_derivative,
    norm_jacobian,
    norm_jvp,
    norm_singular_values,
    norm_vjp,
    null_directions,
    placement_jacobian,
)
from normjax.jacobians.verification import SCALES, VerificationError, verify
from normjax.norm_derivatives import NormDerivative
from normjax.norm_functions import rms_norm
from normjax.norms import NORMS, Norm, Parameter
from normjax.placements import COMMON, PLACEMENTS

WIDTH = 12
EPS = (0.0, 1e-6, 1e-2)
GAINS = ("uniform", "spread", "zeros")


def parameters_of(norm, kind, d=WIDTH, seed=1):
    """Parameters of a row whose effective gain is uniform, lognormal, or has zeros."""
    rng = np.random.default_rng(seed)
    gain = {"uniform": np.full(d, 1.5), "spread": np.exp(rng.standard_normal(d))}.get(kind)
    if gain is None:
        gain = np.exp(rng.standard_normal(d)) * (np.arange(d) % 3 > 0)
    bias, drawn = rng.standard_normal(d), {}
    for p in norm.parameters:
        given = {"gain": gain, "bias": bias}.get(p.name, 0.4 * rng.standard_normal(p.shape_at(d)))
        drawn[p.name] = (given if p.shape_at(d) else np.ravel(given)[-1]) - p.offset
    return drawn


def point(seed=0, d=WIDTH):
    return np.random.default_rng(seed).standard_normal(d)


def cases():
    """Every row, with every eps and kind of gain that makes a difference to it."""
    for name, norm in NORMS.items():
        learns = any(p.name == "gain" for p in norm.parameters)
        for eps in EPS if takes_eps(norm) else EPS[:1]:
            yield from ((name, eps, gains) for gains in (GAINS if learns else GAINS[:1]))


def takes_eps(norm):
    return "eps" in inspect.signature(norm.function).parameters


# --- every row of the table of norms --------------------------------------------------------------


@pytest.mark.parametrize("name, eps, gains", list(cases()))
def test_every_norm_equals_autodiff_at_every_scale(name, eps, gains):
    result = verify(name, None, point(), parameters=parameters_of(NORMS[name], gains), eps=eps)
    result.check()
    assert result.tolerance < 1e-13


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NORMS)
def test_products_are_those_of_the_matrix_and_adjoint_to_each_other(name, scale, eps):
    parameters = parameters_of(NORMS[name], "spread")
    h, v, w = point() * scale, point(2), point(3)
    J = norm_jacobian(name, h, parameters, eps)
    size = np.max(np.abs(J)) * 50
    np.testing.assert_allclose(norm_jvp(name, h, v, parameters, eps), J @ v, 0, 1e-15 * size)
    np.testing.assert_allclose(norm_vjp(name, h, w, parameters, eps), J.T @ w, 0, 1e-15 * size)
    left = norm_jvp(name, h, v, parameters, eps) @ w
    assert left == pytest.approx(v @ norm_vjp(name, h, w, parameters, eps), abs=1e-14 * size)


def test_at_zero_the_gain_over_root_eps_and_zero_by_convention_without_eps():
    g = np.array([1.0, 2.0, 0.5])
    J = norm_jacobian("rmsnorm", np.zeros(3), {"gain": g}, 1e-6)
    np.testing.assert_allclose(J, np.diag(g) * 1e3, rtol=1e-15)
    mean_free = np.eye(3) - 1 / 3
    J = norm_jacobian("layernorm", np.full(3, 7.0), {"gain": g}, 1e-6)
    np.testing.assert_allclose(J, np.diag(g) @ mean_free * 1e3, rtol=1e-13)
    assert not np.any(norm_jacobian("rmsnorm", np.zeros(3), {"gain": g}, 0.0))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e6])
def test_the_radial_residue_keeps_its_digits(scale):
    """J u = eps/s^3 u: at scale 1e6 it is 1e-18 of the rest, far below 1 - (1 - eps/s^2)."""
    h, eps = point() * scale, 1e-6
    s = np.sqrt(np.mean(h * h) + eps)
    derivative = norm_derivative("rmsnorm_plain", h, eps=eps)
    assert derivative.radial == pytest.approx(eps / s**2, rel=1e-14, abs=0)
    u = h / np.linalg.norm(h)
    np.testing.assert_allclose(derivative.radial_image(), eps / s**3 * u, rtol=1e-13)
    # One feature: the whole derivative is the residue, and so for LayerNorm of two.
    J = norm_jacobian("rmsnorm_plain", [scale], eps=eps)
    assert J[0, 0] == pytest.approx(eps / (scale**2 + eps) ** 1.5, rel=1e-14, abs=0)
    J = norm_jacobian("layernorm_plain", [scale, -scale], eps=eps)
    wanted = eps / (scale**2 + eps) ** 1.5 / 2
    np.testing.assert_allclose(J, [[wanted, -wanted], [-wanted, wanted]], rtol=1e-13)


@pytest.mark.parametrize("norm", ["rmsnorm_plain", "layernorm_plain"])
def test_where_eps_is_the_larger_what_is_removed_keeps_its_digits(norm):
    """1 - k = v / (v + eps) with v = 1e-12 eps: off the diagonal all of J, but for the mean."""
    h = np.array([3.0, -1.0, -2.0]) * 1e-6
    v, eps = np.mean(h * h), np.mean(h * h) * 1e12
    u, lost, s = h / np.linalg.norm(h), v / (v + eps), np.sqrt(v + eps)
    assert norm_derivative(norm, h, eps=eps).removed == pytest.approx(lost, rel=1e-14, abs=0)
    if norm == "rmsnorm_plain":
        off = norm_jacobian(norm, h, eps=eps)[0, 1:]
        np.testing.assert_allclose(off, -lost * u[0] * u[1:] / s, rtol=1e-14, atol=0)


def test_one_large_feature_does_not_cancel():
    """Of h = (1, 0, ...): J_00 = eps/s^3, though 1 - u_0^2 is 0 to rounding."""
    h = np.zeros(64)
    h[5] = 3.0
    s2 = 9 / 64 + 1e-10
    J = norm_jacobian("rmsnorm_plain", h, eps=1e-10)
    assert J[5, 5] == pytest.approx(1e-10 / s2**1.5, rel=1e-13, abs=0)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_the_range_of_squares_is_no_limit(scale):
    """Without eps the Jacobian is homogeneous of degree -1 in h."""
    one = norm_jacobian("layernorm_plain", point(), eps=0.0)
    with np.errstate(all="raise"):
        far = norm_jacobian("layernorm_plain", point() * scale, eps=0.0)
    np.testing.assert_allclose(far * scale, one, rtol=0, atol=1e-14 * np.max(np.abs(one)))


def test_leading_axes_are_many_points():
    h = np.random.default_rng(0).standard_normal((2, 3, WIDTH))
    parameters = parameters_of(NORMS["layernorm"], "spread")
    all_at_once = norm_jacobian("layernorm", h, parameters, 1e-2)
    assert all_at_once.shape == (2, 3, WIDTH, WIDTH)
    one = norm_jacobian("layernorm", h[1, 2], parameters, 1e-2)
    np.testing.assert_array_equal(all_at_once[1, 2], one)


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("name", NORMS)
def test_singular_values_for_a_uniform_gain(name, eps):
    parameters = parameters_of(NORMS[name], "uniform")
    values = norm_singular_values(name, point(), parameters, eps)
    dense = np.linalg.svd(norm_jacobian(name, point(), parameters, eps), compute_uv=False)
    np.testing.assert_allclose(values, dense, rtol=0, atol=1e-14 * dense[0])


def test_condition_number_of_rmsnorm_is_mean_square_over_eps():
    h = point()
    values = norm_singular_values("rmsnorm_plain", h, eps=1e-6)
    assert values[0] / values[-1] == pytest.approx(1 + np.mean(h * h) / 1e-6, rel=1e-13)


@pytest.mark.parametrize("name, eps, gains", list(cases()))
def test_null_directions_are_all_of_the_null_space(name, eps, gains):
    parameters = parameters_of(NORMS[name], gains)
    J = norm_jacobian(name, point(), parameters, eps)
    right, left = null_directions(name, point(), parameters, eps)
    size = np.max(np.abs(J))
    assert np.max(np.abs(J @ right), initial=0) < 1e-14 * size
    assert np.max(np.abs(left.T @ J), initial=0) < 1e-14 * size
    np.testing.assert_allclose(right.T @ right, np.eye(right.shape[1]), atol=1e-14)
    np.testing.assert_allclose(left.T @ left, np.eye(left.shape[1]), atol=1e-14)
    values = np.linalg.svd(J, compute_uv=False)
    dimension = np.sum(values < 1e-13 * values[0])
    assert right.shape[1] == left.shape[1] == dimension


def test_left_null_direction_is_the_radial_one_over_the_gain():
    h, g = point(), np.exp(point(4))
    right, left = null_directions("rmsnorm", h, {"gain": g})
    assert abs(right[:, 0] @ h) == pytest.approx(np.linalg.norm(h), rel=1e-14)
    assert abs(left[:, 0] @ (h / g)) == pytest.approx(np.linalg.norm(h / g), rel=1e-14)


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("name", NORMS)
def test_a_row_says_of_many_points_what_its_derivative_is_blind_to(name, eps):
    """What the closed form at eps = 0 maps to zero, at all points at once, for any gain."""
    row = NORMS[name]
    x = np.random.default_rng(8).standard_normal((2, 3, WIDTH)) + 0.3
    parameters = parameters_of(row, "spread", seed=9)
    right, left = row.null_directions(x, parameters, eps)
    m = {"nothing": 0, "length": 1, "mean": 1, "length and mean": 2}[row.forgets]
    assert right.shape == left.shape == (*x.shape, m)
    J = row.derivative_at(x, parameters, 0.0).matrix()
    np.testing.assert_allclose(J @ right, 0, atol=2e-14)
    np.testing.assert_allclose(np.swapaxes(left, -1, -2) @ J, 0, atol=2e-14)
    for basis in (right, left):
        eye = np.broadcast_to(np.eye(m), (2, 3, m, m))
        np.testing.assert_allclose(np.swapaxes(basis, -1, -2) @ basis, eye, atol=1e-14)


def group_norm(x, gain, *, eps):
    z = x.reshape(*x.shape[:-1], 2, -1)
    z = z / jnp.sqrt(jnp.mean(z * z, axis=-1, keepdims=True) + eps)
    return gain * z.reshape(x.shape)


def group_directions(x):
    half = np.arange(x.shape[-1]) < x.shape[-1] // 2
    return np.stack([np.where(half, x, 0.0), np.where(half, 0.0, x)], axis=-1)


@pytest.mark.parametrize("how", ["none", "matrix"])
def test_a_norm_of_ones_own_may_say_its_directions(how):
    """A norm by halves forgets two lengths; left ones are found from its Jacobian at eps = 0."""

    def matrix(x, gain, *, eps):
        with jax.enable_x64(True):
            one = jax.jacfwd(lambda v: group_norm(v, jnp.asarray(gain), eps=eps))
            return np.asarray(one(jnp.asarray(x)))

    row = Norm("by halves", group_norm, (Parameter("gain"),), None if how == "none" else matrix,
               forgets="length", directions=group_directions)  # fmt: skip
    h, gain = point(), np.exp(point(4))
    right, left = row.null_directions(h, {"gain": gain})
    expected = np.linalg.qr(group_directions(h) / gain[:, None])[0]
    np.testing.assert_allclose(left @ left.T, expected @ expected.T, atol=1e-13)
    np.testing.assert_allclose(np.abs(right.T @ group_directions(h)).max(0),
                               np.linalg.norm(group_directions(h), axis=0), rtol=1e-14)  # fmt: skip
    assert not row.has_identity
    silent = Norm("tanh", lambda x: jnp.tanh(x))
    assert silent.null_directions(h).left.shape == (WIDTH, 0)


def test_gains_of_zero_hide_more():
    row, h, gain = NORMS["layernorm"], point(), np.exp(point(4))
    gain[[2, 5, 6]] = 0.0  # two of them hide no more than the two of the norm
    right, left = row.null_directions(h[None], {"gain": gain})
    J = norm_jacobian(row, h, {"gain": gain}, eps=0.0)
    assert right.shape == left.shape == (1, WIDTH, 3)
    np.testing.assert_allclose(J @ right[0], 0, atol=1e-13)
    np.testing.assert_allclose(left[0].T @ J, 0, atol=1e-13)


def test_a_point_without_direction_is_refused():
    with pytest.raises(UserError, match="LayerNorm: has no direction at a point that is zero or"):
        NORMS["layernorm"].forgotten(np.full(8, 0.1))
    with pytest.raises(UserError, match="x: must be finite"):
        NORMS["rmsnorm"].forgotten([1.0, np.nan])


@pytest.mark.parametrize("name", [name for name, norm in NORMS.items() if norm.law])
def test_the_law_of_a_norm_is_its_jacobian_along_and_across_the_stream(name):
    """J u = k / s u along it and J t = t / s across; the derivative has the same k."""
    law, eps = NORMS[name].law, 0.3
    h = point() - point().mean()
    u, mean_square = h / np.linalg.norm(h), np.mean(h * h)
    t = point(2) - point(2).mean()
    t = t - (u @ t) * u
    J = norm_jacobian(name, h, eps=eps)
    slope, kept = law.factor(mean_square, eps, WIDTH), law.kept(mean_square, eps)
    np.testing.assert_allclose(J @ u, slope * kept * u, rtol=0, atol=1e-14)
    np.testing.assert_allclose(J @ t, slope * t, rtol=0, atol=1e-14)
    assert norm_derivative(name, h, eps=eps).radial == pytest.approx(kept, rel=1e-14)


# --- a norm of the user's own ---------------------------------------------------------------------


def dyt(x, gain=None, *, eps=0.0):
    return jnp.tanh(0.5 * x) * (1.0 if gain is None else gain)


def dyt_derivative(x, gain=None, *, eps=0.0):
    slope = 0.5 / np.cosh(0.5 * np.clip(x, -600, 600)) ** 2
    weight = slope * (1.0 if gain is None else gain)
    return NormDerivative(weight, np.zeros_like(x), np.ones(x.shape[:-1]))


def l2(x, gain=None, *, eps):
    r = jnp.sqrt(jnp.sum(x * x))
    return x / (r + eps) * (1.0 if gain is None else gain)


def l2_derivative(x, gain=None, *, eps):
    r = np.linalg.norm(x, axis=-1, keepdims=True)
    weight = np.ones_like(x) / (r + eps) * (1.0 if gain is None else gain)
    return NormDerivative(weight, x / r, (eps / (r + eps))[..., 0])


def test_a_new_row_brings_its_closed_form():
    row = Norm("tanh", dyt, (Parameter("gain"),), dyt_derivative)
    # Not at 1e3: there autodiff's 1 - tanh^2 is rounding, and the closed form is not.
    scales = (0.0, 1e-3, 1.0)
    verify(row, None, point(), parameters={"gain": np.exp(point(1))}, scales=scales).check()
    row = Norm("L2, eps outside", l2, (Parameter("gain"),), l2_derivative)
    for eps in (1e-2, 1e-6):
        verify(row, None, point(), eps=eps, scales=(1e-3, 1.0, 1e3)).check()


def test_verify_names_the_entry_of_a_wrong_formula():
    def wrong(x):
        J = norm_jacobian("rmsnorm_plain", x)
        J[2, 7] *= 1 + 1e-9
        return J

    result = verify(lambda x: rms_norm(x), wrong, point(), scales=(1.0,))
    assert not result.passed and result.entry == (2, 7)
    assert result.relative_error == pytest.approx(1e-9, rel=1e-3)
    assert result.expected == pytest.approx(norm_jacobian("rmsnorm_plain", point())[2, 7])
    with pytest.raises(VerificationError, match=r"at entry \[2, 7\], scale 1: expected .* got "):
        result.check()


def test_verify_finds_the_classical_mistakes():
    """eps forgotten in the residue; the mean not removed; the gain on the wrong side."""
    h, g = point(), np.exp(point(1))
    without_eps = lambda x: norm_jacobian("rmsnorm", x, {"gain": g}, 0.0)  # noqa: E731
    assert not verify("rmsnorm", without_eps, h, parameters={"gain": g}).passed
    no_mean = lambda x: norm_jacobian("rmsnorm_plain", x)  # noqa: E731
    assert not verify("layernorm_plain", no_mean, h).passed
    transposed = lambda x: norm_jacobian("rmsnorm", x, {"gain": g}).T  # noqa: E731
    assert not verify("rmsnorm", transposed, h, parameters={"gain": g}).passed


@pytest.mark.parametrize("n", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0, 40.0])
def test_the_gauge_of_softmax_is_a_norm_of_its_jacobian(n, scale):
    """max |J t|_1 over all signs t."""
    logits = scale * np.random.default_rng(n).normal(size=(3, n))
    signs = np.array(list(itertools.product([-1.0, 1.0], repeat=n)))
    expected = np.abs(softmax_jacobian(logits) @ signs.T).sum(axis=-2).max(axis=-1)
    found = softmax_gauge(logits)
    np.testing.assert_allclose(found.value, expected, rtol=1e-12, atol=1e-15)
    assert not found.bound.any()
    masked = softmax_gauge(np.c_[logits, logits], np.arange(2 * n) < n)
    np.testing.assert_allclose(masked.value, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("n", [25, 64, 500])
def test_the_gauge_of_many_entries_is_within_its_bound(n):
    found = softmax_gauge(np.random.default_rng(n).normal(size=(4, n)))
    assert np.all(found.value <= 1) and np.all(found.value + found.bound >= 1 - 1e-15)
    assert found.bound.max() < 1e-6


@pytest.mark.parametrize(
    ("fn", "closed", "at"),
    [
        ("rmsnorm_plain", None, [0.7]),
        ("layernorm_plain", None, [0.3, -1.0]),
        ("layernorm_plain", None, [3e4, 3e4 + 1.0]),
        (jnp.tanh, lambda x: np.diag(np.cosh(x) ** -2.0), [0.1, 3.0, 25.0]),
        (lambda x: (1 + x) - 1, lambda x: np.eye(len(x)), [1e-12, 1.0]),
    ],
)
def test_what_is_tiny_against_its_parts_raises_no_alarm(fn, closed, at):
    verify(fn, closed, at=at, scales=(1.0, 10.0)).check()


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize("xp", [np, jnp])
def test_small_entries_are_held_to_their_own_digits(size, xp):
    """An entry that is wrong by 1e-9 of itself is found, in a formula of NumPy's or of JAX's."""
    weights = np.array([1.0, size])
    right = lambda x: xp.diag(weights * x)  # noqa: E731
    wrong = lambda x: xp.diag(weights * x * np.array([1.0, 1 + 1e-9]))  # noqa: E731
    function = lambda x: jnp.asarray(weights) * x * x / 2  # noqa: E731
    assert verify(function, right, at=[0.3, 0.7]).passed
    found = verify(function, wrong, at=[0.3, 0.7])
    assert not found.passed and found.entry == (1, 1)


def test_what_a_closed_form_loses_itself_is_allowed():
    """(1 + x^2) - 1 in place of x^2: 1e-16 in all, much of what is left."""
    lossy = lambda x: np.array([[(1 + x[0] ** 2) - 1, 0.0], [0.0, 1.0 + 0 * x[1]]])  # noqa: E731
    function = lambda x: jnp.stack([x[0] ** 3 / 3, x[1]])  # noqa: E731
    assert verify(function, lossy, at=[1e-6, 1.0], scales=(1.0,)).passed
    assert not verify(function, lambda x: 1.01 * lossy(x), at=[1e-6, 1.0], scales=(1.0,)).passed


def test_where_a_closed_form_cannot_be_told_one_epsilon_of_the_largest_is_allowed():
    """A formula that is neither NumPy's nor JAX's, such as a table of numbers."""

    def table(off):
        return lambda x: np.diag([float(x[0]) * 1.0, float(np.float64(x[1])) * 1e-9 * (1 + off)])

    function = lambda x: jnp.asarray([1.0, 1e-9]) * x * x / 2  # noqa: E731
    for off, passes in ((0.0, True), (1e-9, True), (1e-6, False)):
        found = verify(function, table(off), at=[0.3, 0.7], scales=(1.0,))
        assert found.passed == passes, off


def test_verify_says_when_autodiff_itself_is_not_finite():
    """x / |x| has no derivative at zero; JAX gives NaN there, whatever the closed form says."""
    closed = lambda x: np.zeros((x.size, x.size))  # noqa: E731
    result = verify(lambda x: x / jnp.linalg.norm(x), closed, point(), scales=(0.0,))
    assert not result.passed and "itself is not finite" in str(result)
    nan = lambda x: np.full((x.size, x.size), np.nan)  # noqa: E731
    assert not verify("rmsnorm_plain", nan, point()).passed


def test_verify_refuses_what_it_cannot_judge():
    closed = lambda x: np.eye(x.size)  # noqa: E731
    with pytest.raises(UserError, match="computes in float32"):
        verify(lambda x: x.astype(jnp.float32), closed, point())
    with pytest.raises(UserError, match=r"jacobian of shape \(3, 4\): must be \(4, 4\)"):
        verify(lambda x: x, lambda x: np.ones((3, 4)), point(d=4))
    with pytest.raises(UserError, match=r"at\[1\]=nan: must be finite"):
        verify(lambda x: x, closed, [1.0, np.nan])
    with pytest.raises(UserError, match="jacobian=None"):
        verify(lambda x: x, None, point())
    with pytest.raises(UserError, match="norm=rmsnrm: must be one of .*did you mean 'rmsnorm'"):
        verify("rmsnrm", None, point())


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rmsnorm", [1.0, np.inf]), r"h\[1\]=inf: must be finite"),
        (("rmsnorm", 3.0), r"h of shape \(\): must be \(..., d\)"),
        (("rmsnorm", "text"), "h of type str: must be an array of numbers"),
        (("rmsnorm", [1.0, 2.0], {"gain": [1.0]}), r"gain of shape \(1,\): must be a scalar or"),
        (("rmsnorm", [1.0, 2.0], {"gian": [1.0]}), "did you mean 'gain'"),
        (("rmsnorm_plain", [1.0, 2.0], {"gain": 1.0}), "has no parameters"),
        (("rmsnorm", [1.0, 2.0], {}, -1.0), "eps=-1.0: must be finite and at least 0"),
        (("rmsnorm", [1e-320, 0.0], {}, 0.0), "out of the range of float64"),
        ((Norm("tanh", dyt), [1.0]), "norm=tanh: has no closed form"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(UserError, match=message):
        norm_jacobian(*arguments)


def test_bad_products_and_values_are_named():
    with pytest.raises(UserError, match=r"v of shape \(3,\): must be \(..., 2,\)"):
        norm_jvp("rmsnorm", [1.0, 2.0], np.ones(3))
    with pytest.raises(UserError, match="below 1e-50 of the largest"):
        norm_singular_values("layernorm", [1.0, 2.0], {"gain": [1.0, 1e-60]})
    with pytest.raises(UserError, match="must be one vector"):
        null_directions("rmsnorm", np.ones((2, 2)))


# --- every row of the table of placements ---------------------------------------------------------


def branch_weights(d=WIDTH):
    rng = np.random.default_rng(5)
    return rng.standard_normal((d, 2 * d)) / 3, rng.standard_normal((2 * d, d)) / 3


def branch(x):
    W1, W2 = branch_weights()
    return jnp.tanh(x @ W1 + 0.1) @ W2


def branch_jacobian(x):
    W1, W2 = branch_weights()
    return W2.T @ np.diag(1 - np.tanh(x @ W1 + 0.1) ** 2) @ W1.T


class Functions:
    """The equation on plain functions: what the closed form of a placement is compared with."""

    def __init__(self, norms, factors):
        self.norms, self.factors, self.points = norms, factors, {}

    def norm(self, slot, norm, x):
        self.points[slot] = x
        return x if norm is None else self.norms[slot](x)

    def branch(self, x):
        self.points["branch"] = x
        return branch(x)

    def join(self, join, x, read):
        return x

    def times(self, name, factor, x):
        return self.factors[name] * x

    def mix(self, name, weights, state, x):
        return x if name == "read" else self.times(name, weights, x)

    def plus(self, kept, written):
        return kept + written


ONE_STREAM = [name for name in COMMON if PLACEMENTS[name].streams is None]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("gains", GAINS)
@pytest.mark.parametrize("name", ONE_STREAM)
def test_every_placement_of_a_branch_equals_autodiff(name, gains, eps, residual):
    place = PLACEMENTS[name] if residual else PLACEMENTS[name].without_residual()
    row = place.of("mlp").at(3, 6)
    parameters = {k: parameters_of(NORMS["rmsnorm"], gains, seed=i) for i, k in enumerate(SLOTS)}
    # As learned after some steps: nothing like the start.
    after = {"scalar": np.asarray(0.7), "feature": np.exp(point(8))}
    factors = {
        k: after[f.shape] if isinstance(f := getattr(row, k), Learned) else f for k in FACTORS
    }

    def algebra():
        maps = {
            k: lambda x, p=p: rms_norm(x, jnp.asarray(p["gain"]), eps=eps)
            for k, p in parameters.items()
        }
        return Functions(maps, {k: jnp.asarray(f) for k, f in factors.items()})

    def closed(h):
        own = algebra()
        fold(row, jnp.asarray(h), own)
        maps = {k: norm_jacobian("rmsnorm", own.points[k], parameters[k], eps)
                for k in SLOTS if getattr(row, k) is not None}  # fmt: skip
        a, b, c = (factors[k] for k in ("keep", "write", "scale"))
        inner = branch_jacobian(np.asarray(own.points["branch"]))
        return placement_jacobian(inner, **maps, a=a, b=b, c=c)

    result = verify(lambda h: fold(row, h, algebra()), closed, point(), tolerance=1e-13).check()
    assert result.error <= 1e-13


def test_placements_of_one_feature_by_hand():
    """h' = P(a h + b Q(F(c N(h)))) with slopes 2, 3, 5, 7: 7 (a + b c 3 2 5)."""
    J = placement_jacobian(
        [[2.0]], branch_norm=[[3.0]], pre_norm=[[5.0]], post_norm=[[7.0]], a=11, b=13, c=17
    )
    assert J[0, 0] == 7 * (11 + 13 * 17 * 3 * 2 * 5)
    vector = placement_jacobian(np.ones((2, 2)), b=[2.0, 3.0], a=0.0)
    np.testing.assert_array_equal(vector, [[2, 2], [3, 3]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"branch": np.ones((2, 3))}, r"branch of shape \(2, 3\): must be square"),
        ({"branch": np.eye(2), "pre_norm": np.eye(3)}, r"pre_norm of shape \(3, 3\): must be"),
        ({"branch": np.eye(2), "b": [1.0, 2.0, 3.0]}, r"b of shape \(3,\): must be a number or"),
        ({"branch": np.eye(2), "a": np.nan}, "a.*=nan: must be finite"),
    ],
)
def test_bad_placements_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        placement_jacobian(**arguments)


def test_sixty_four_bit_mode_is_left_as_found():
    assert not jax.config.jax_enable_x64
    verify("rmsnorm", None, point())
    assert not jax.config.jax_enable_x64
    with jax.enable_x64(True):
        verify("rmsnorm", None, point())
        assert jax.config.jax_enable_x64


def test_a_row_keeps_its_function_when_its_closed_form_is_replaced():
    row = dataclasses.replace(NORMS["rmsnorm"], derivative=None)
    with pytest.raises(UserError, match="no closed form"):
        verify(row, None, point())
