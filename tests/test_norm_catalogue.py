"""Every row of the table of norms: its published formula, its range, its identities.

The formulas stand here once more, in NumPy and float64, from the papers and codes that the rows
name; nothing of ours is called to make them.
"""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.errors import UserError
from normjax.jacobians.closed_forms import norm_derivative, norm_jacobian
from normjax.jacobians.verification import VerificationError, verify
from normjax.norm_functions import (
    affine,
    crms_norm,
    dynamic_tanh,
    gated_norm,
    l2_clip,
    l2_norm,
    layer_norm,
    less_mean,
    partial_rms_norm,
    rms_norm,
    rms_norm_eps_outside,
    seed_norm,
    simple_rms_norm,
)
from normjax.norms import NORMS, NormLayer

# --- the formulas, of one vector ------------------------------------------------------------------


def rms(x, eps=0.0):
    return math.sqrt(sum(v * v for v in x) / len(x) + eps)


def over(x, s):
    return x / s if s else np.zeros_like(x)


def gate(z, down, up):
    a = z @ down
    return 1 / (1 + np.exp(-(a / (1 + np.exp(-a))) @ up))


def clipped(x, threshold):
    return x * min(1.0, threshold / (np.linalg.norm(x) + 1e-6))


FORMULAS = {
    "rmsnorm": lambda x, eps, gain: gain * over(x, rms(x, eps)),
    "rmsnorm_offset": lambda x, eps, gain: (1 + gain) * over(x, rms(x, eps)),
    "rmsnorm_plain": lambda x, eps: over(x, rms(x, eps)),
    "layernorm": lambda x, eps, gain, bias: (
        gain * over(x - x.mean(), rms(x - x.mean(), eps)) + bias
    ),
    "layernorm_nobias": lambda x, eps, gain: gain * over(x - x.mean(), rms(x - x.mean(), eps)),
    "layernorm_plain": lambda x, eps: over(x - x.mean(), rms(x - x.mean(), eps)),
    "rmsnorm_simple": lambda x, eps: over(x * math.sqrt(len(x)), np.linalg.norm(x)),
    "rmsnorm_eps_outside": lambda x, eps, gain: gain * over(x, rms(x) + eps),
    "prmsnorm": lambda x, eps, gain: gain * over(x, rms(x[: math.ceil(len(x) / 4)], eps)),
    "crmsnorm": lambda x, eps: over(
        x, math.sqrt((sum(x * x) + sum(x) ** 2) / (len(x) + 1) + eps)
    ),
    "scalenorm": lambda x, eps, gain: gain * over(x, np.linalg.norm(x)),
    "l2norm": lambda x, eps: over(x, np.linalg.norm(x)),
    "l2clip": lambda x, eps: clipped(x, math.sqrt(len(x))),
    "dyt": lambda x, eps, gain, bias, alpha: gain * np.tanh(alpha * x) + bias,
    "derf": lambda x, eps, gain, bias, alpha, shift: (
        gain * np.array([math.erf(alpha * v + shift) for v in x]) + bias
    ),
    "seednorm": lambda x, eps, gain, alpha, beta: (
        (np.tanh(x @ beta) * alpha + gain) * over(x, rms(x, eps))
    ),
    "gatednorm": lambda x, eps, gain, down, up: (
        (z := gain * over(x, rms(x, eps))) * gate(z, down, up)
    ),
    "centring": lambda x, eps: x - x.mean(),
    "affine": lambda x, eps, gain, shift: gain * (x + shift),
    "gradient_preserving": lambda x, eps, alpha: x - alpha / (1 + np.exp(-alpha)) * x,
    "identity": lambda x, eps: x,
}  # fmt: skip
D = 8


def drawn(name, d=D, seed=2):
    """Parameters of a row as they might be after training, in float32."""
    rng, row = np.random.default_rng(seed), NORMS[name]
    return {
        p.name: np.float32((0.1 if p.spread else 0.7) * rng.normal(size=p.shape_at(d)))
        for p in row.parameters
    }


def formula(name, rows, own, eps):
    wide = {k: np.asarray(v, np.float64) for k, v in own.items()}
    return np.stack([FORMULAS[name](x, eps, **wide) for x in np.asarray(rows, np.float64)])


def applied(name, own, eps):
    own = {k: jnp.asarray(v) for k, v in own.items()}
    return lambda x: NORMS[name](x, own, eps)


def test_every_row_has_a_formula_and_words():
    assert set(FORMULAS) == set(NORMS)
    for row in NORMS.values():
        assert row.title and (row.source or row.name == "identity")
        assert row.derivative is not None
    assert len({row.title for row in NORMS.values()}) == len(NORMS)


def test_a_norm_that_stops_gradients_has_both_derivatives():
    """The true one by differences of its values, and the one that autodiff is told."""
    row, x, own = NORMS["gradient_preserving"], np.array([0.3, -2.0]), {"alpha": 1.3}
    left = 1 - 1.3 / (1 + math.exp(-1.3))
    step = 1e-6 * np.eye(2)
    with jax.enable_x64(True):
        f = lambda x: np.asarray(row(jnp.asarray(x), {"alpha": jnp.float64(1.3)}, 0.0))  # noqa: E731
        moved = np.stack([(f(x + e) - f(x - e)) / 2e-6 for e in step], axis=-1)
    np.testing.assert_allclose(moved, left * np.eye(2), rtol=0, atol=1e-9)
    for each, expected in ((row, left), (row.exact(), left), (row.surrogate(), 1.0)):
        found = each.derivative_at(x, own, 0.0).matrix()
        np.testing.assert_allclose(found, expected * np.eye(2), rtol=0, atol=2.0**-51)
        verify(each, None, at=x, parameters=own).check()
    with pytest.raises(VerificationError, match="differs"):
        verify(
            dataclasses.replace(row, derivative=row.stopped.derivative), None, at=x, parameters=own
        ).check()
    assert row.record()["slopes"] != row.exact().record().get("slopes")


@pytest.mark.parametrize("name", NORMS)
def test_every_row_is_its_published_formula(name):
    """Eager, compiled and mapped, from float64 down to bfloat16, for parameters of any value."""
    own = drawn(name)
    rows = np.random.default_rng(3).normal(0.3, 2, size=(5, D))
    for eps in (0.0, 1e-6, 0.3):
        x = jnp.asarray(rows, jnp.float32)
        f, expected = applied(name, own, eps), formula(name, np.asarray(x), own, eps)
        for y in (f(x), jax.jit(f)(x), jax.vmap(f)(x)):
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
        with jax.enable_x64(True):
            y = applied(name, jax.tree.map(np.float64, own), eps)(jnp.asarray(rows))
            assert y.dtype == jnp.float64
            np.testing.assert_allclose(y, formula(name, rows, own, eps), rtol=1e-13, atol=1e-13)
        y = f(x.astype(jnp.bfloat16))
        assert y.dtype == jnp.bfloat16
        # All in float32 but the input and one cast: at most half a unit of bfloat16 is added.
        exact = formula(name, np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32)), own, eps)
        np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=0.51 * 2.0**-7, atol=1e-5)


SIZES = [1.5e-45, 1e-40, 1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e19, 1e30, 3e38]


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("name", NORMS)
def test_every_row_is_right_at_every_size_of_float32(name, eps):
    """From the smallest subnormal number to the largest; no square may leave the range."""
    own = {p.name: p.started(D) for p in NORMS[name].parameters}
    own = {k: np.float32(v) for k, v in own.items()}
    if name == "seednorm":
        own["beta"] = np.float32(np.random.default_rng(6).normal(size=D))
    pattern = np.array([0.9, -1.0, 0.3, -0.2, 0.7, 0.05, -0.6, 0.4])
    if name == "centring":  # else what is left may be beyond the largest number
        pattern = pattern - pattern.mean()
    rows = np.float32(np.outer(SIZES, pattern))
    assert np.isfinite(rows).all()
    found = jax.jit(applied(name, own, eps))(rows)
    expected = formula(name, rows, own, eps)
    smallest = float(jnp.finfo(jnp.float32).smallest_normal)  # below it results may be flushed
    tolerance = 3e-6 * np.abs(expected).max(-1, keepdims=True) + 2 * smallest
    assert np.all(np.abs(np.asarray(found, np.float64) - expected) <= tolerance)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("name", [n for n, row in NORMS.items() if row.forgets_length])
def test_what_forgets_the_length_gives_the_same_for_a_multiple(name):
    """Bit for bit for powers of two and eps = 0, values; and the derivative over the factor."""
    f = jax.jit(applied(name, drawn(name), 0.0))
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, D)), jnp.float32)
    slope = jax.jit(jax.jacfwd(f))
    for exponent in (-100, -30, 1, 40, 100):
        c = np.float32(2.0**exponent)
        chex.assert_trees_all_equal(f(x * c), f(x))
        chex.assert_trees_all_close(slope(x[0] * c) * c, slope(x[0]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("name", NORMS)
def test_nothing_is_nan_at_zero_or_near_it(name, eps):
    """Values and both derivatives, by x and by the parameters (trap: 0/0 of |x| at x = 0)."""
    x = jnp.asarray([np.zeros(D), np.full(D, 1e-30), np.full(D, 1e-40), np.eye(D)[7]], jnp.float32)
    own = {k: jnp.asarray(v) for k, v in drawn(name).items()}

    def loss(x, own):
        return jnp.sum(jnp.sin(NORMS[name](x, own, eps) * jnp.arange(1.0, D + 1)))

    # Beyond 1e38 a derivative of 1 / |x| is infinite, and rightly so: x of 1e-40 has values only.
    values, slopes = jax.jit(jax.value_and_grad(loss, (0, 1)))(x[jnp.array([0, 1, 3])], own)
    chex.assert_tree_all_finite((values, slopes, NORMS[name](x, own, eps)))
    tangents = jax.tree.map(jnp.ones_like, (x[:1], own))
    chex.assert_tree_all_finite(jax.jvp(loss, (x[:1], own), tangents))


@pytest.mark.parametrize("name", NORMS)
def test_second_derivatives_agree_in_both_modes_and_are_symmetric(name, x64):
    own = {k: jnp.asarray(v, jnp.float64) for k, v in drawn(name).items()}
    w = jnp.asarray(np.random.default_rng(7).normal(size=D))
    x = jnp.asarray(np.random.default_rng(8).normal(size=D)) * 2
    norm = NORMS[name].exact()

    def loss(x):
        return jnp.sum(w * norm(x, own, 1e-2) ** 2)

    forward, reverse = jax.jit(lambda x: (jax.jacfwd(jax.grad(loss))(x),
                                          jax.jacrev(jax.grad(loss))(x)))(x)  # fmt: skip
    size = float(jnp.abs(forward).max())
    chex.assert_trees_all_close(forward, reverse, rtol=0, atol=1e-13 * size)
    chex.assert_trees_all_close(forward, forward.T, rtol=0, atol=1e-13 * size)
    step, v = 1e-5, np.random.default_rng(9).normal(size=D)
    slope = jax.jit(jax.grad(loss))
    difference = (slope(x + step * v) - slope(x - step * v)) / (2 * step)
    chex.assert_trees_all_close(forward @ v, difference, rtol=0, atol=1e-7 * size)


@pytest.mark.parametrize("name", NORMS)
def test_every_row_trains_as_a_module(name):
    """Every parameter has a gradient at the start, and a step down it lowers a loss.

    But SeeDNorm's alpha, whose factor tanh(x . beta) is zero until beta has moved.
    """
    layer, x = NormLayer(NORMS[name]), jnp.asarray(np.random.default_rng(1).normal(size=(9, D)))
    own = layer.init(jax.random.key(1), x)
    target = jnp.cos(x)

    def loss(own):
        return jnp.mean(jnp.square(layer.apply(own, x) - target))

    before, slope = jax.jit(jax.value_and_grad(loss))(own)
    chex.assert_tree_all_finite(slope)
    still = {k for k, leaf in slope.get("params", {}).items() if not np.any(leaf)}
    assert still == ({"alpha"} if name == "seednorm" else set())
    assert len(jax.tree.leaves(slope)) == len(NORMS[name].parameters)
    if NORMS[name].parameters:
        after = jax.tree.map(lambda p, g: p - 1e-3 * g, own, slope)
        assert float(loss(after)) < float(before)


# --- exact identities -----------------------------------------------------------------------------


@pytest.fixture
def rows(x64):
    return jnp.asarray(np.random.default_rng(5).normal(1.0, 2.0, size=(6, D)))


def close(found, expected, tolerance=1e-14):
    chex.assert_trees_all_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("eps", [0.0, 0.2])
def test_layernorm_is_rmsnorm_or_crmsnorm_of_the_centred_vector(rows, eps):
    """arXiv 2305.14858: of a vector of mean zero the last feature need not be known."""
    centred = less_mean(rows)
    expected = layer_norm(rows, eps=eps)
    close(rms_norm(centred, eps=eps), expected)
    close(crms_norm(centred[:, :-1], eps=eps), expected[:, :-1])


def test_norms_of_the_length(rows):
    root = math.sqrt(D)
    close(l2_norm(rows) * root, simple_rms_norm(rows))
    close(jnp.linalg.norm(l2_norm(rows), axis=-1), jnp.ones(6))
    start = {k: jnp.asarray(v) for k, v in NORMS["scalenorm"].started(D).items()}
    close(NORMS["scalenorm"](rows, start, 0.0), simple_rms_norm(rows))
    close(partial_rms_norm(rows, eps=0.1, share=1.0), rms_norm(rows, eps=0.1))


def test_eps_outside_the_root_goes_to_the_simple_norm_linearly(rows):
    simple = simple_rms_norm(rows)
    for eps in (1e-2, 1e-4, 1e-6):
        size = jnp.sqrt(jnp.mean(rows**2, axis=-1, keepdims=True))
        close((simple - rms_norm_eps_outside(rows, eps=eps)) * (size + eps) / eps, simple, 1e-9)
    close(rms_norm_eps_outside(rows, eps=0.0), simple)


def test_seednorm_without_a_direction_is_rmsnorm(rows):
    start = {k: jnp.asarray(v) for k, v in NORMS["seednorm"].started(D).items()}
    close(NORMS["seednorm"](rows, start, 1e-6), rms_norm(rows, eps=1e-6))
    # Beyond tanh's reach the gain is one number more or less, by the side of the vector.
    side = jnp.sign(rows @ jnp.ones(D))[:, None]
    found = seed_norm(rows, 3.0, 2.0, jnp.full(D, 1e9), eps=0.0)
    close(found, (3 + 2 * side) * simple_rms_norm(rows))


def test_a_gate_without_its_second_matrix_is_half_of_rmsnorm(rows):
    gain, down = jnp.arange(1.0, D + 1), jnp.ones((D, 3))
    found = gated_norm(rows, gain, down, jnp.zeros((3, D)), eps=1e-6)
    close(found, 0.5 * rms_norm(rows, gain, eps=1e-6))
    close(gated_norm(rows, gain, eps=1e-6), rms_norm(rows, gain, eps=1e-6))


def test_clipping_passes_what_is_short_and_gives_the_rest_one_length(rows):
    length = jnp.linalg.norm(rows, axis=-1, keepdims=True)
    short, long = rows / length * 1.99, rows / length * 1e8
    chex.assert_trees_all_equal(l2_clip(short, threshold=2.0), short)
    close(jnp.linalg.norm(l2_clip(long, threshold=2.0), axis=-1), jnp.full(6, 2.0))
    own = norm_derivative("l2clip", short[0])
    np.testing.assert_array_equal(own.matrix(), np.eye(D))
    assert norm_derivative("l2clip", long[0]).radial == pytest.approx(1e-6 / (1e8 + 1e-6), rel=1e-9)


def test_slopes_at_zero(x64):
    """alpha g of tanh, 2 alpha g / sqrt(pi) of erf; gain / eps where eps is outside the root."""
    gain, zero = np.array([1.0, -2.0, 0.5]), np.zeros(3)
    own = {"gain": gain, "alpha": np.asarray(0.3)}
    np.testing.assert_allclose(norm_jacobian("dyt", zero, own), 0.3 * np.diag(gain), rtol=1e-15)
    np.testing.assert_allclose(norm_jacobian("derf", zero, own),
                               0.6 / math.sqrt(math.pi) * np.diag(gain), rtol=1e-15)  # fmt: skip
    outside = norm_jacobian("rmsnorm_eps_outside", zero, {"gain": gain}, eps=1e-3)
    np.testing.assert_allclose(outside, 1e3 * np.diag(gain), rtol=1e-15)
    for name in ("rmsnorm_simple", "l2norm", "scalenorm"):  # undefined: zero by convention
        assert not norm_jacobian(name, zero).any()
        assert not np.asarray(jax.jacrev(applied(name, {}, 0.0))(jnp.zeros(3))).any()


def test_tanh_keeps_the_digits_of_its_slope():
    """4 e^(-2x) / (1 + e^(-2x))^2, where 1 - tanh^2 in float32 is zero from x = 9 on."""
    for x in (0.3, 5.0, 12.0, 30.0):
        expected = 1 / math.cosh(x) ** 2
        slope = float(jax.grad(lambda v: dynamic_tanh(v[None])[0])(jnp.float32(x)))
        assert slope == pytest.approx(expected, rel=1e-5)


def test_the_null_directions_of_a_partial_norm_differ_on_its_two_sides():
    """Right: h. Left: its first features over the gain, not h over the gain."""
    h, gain = np.random.default_rng(1).normal(size=(2, D))
    right, left = NORMS["prmsnorm"].null_directions(h, {"gain": gain})
    assert abs(right[:, 0] @ h) == pytest.approx(np.linalg.norm(h), rel=1e-14)
    first = np.where(np.arange(D) < 2, h / gain, 0.0)
    assert abs(left[:, 0] @ first) == pytest.approx(np.linalg.norm(first), rel=1e-14)
    right, left = NORMS["crmsnorm"].null_directions(h)
    dual = h + h.sum()
    assert abs(right[:, 0] @ h) == pytest.approx(np.linalg.norm(h), rel=1e-14)
    assert abs(left[:, 0] @ dual) == pytest.approx(np.linalg.norm(dual), rel=1e-14)


@pytest.mark.parametrize("name", ["seednorm", "dyt", "derf", "l2clip", "affine", "identity"])
def test_what_is_said_to_forget_nothing_has_no_null_direction(name):
    own = drawn(name)
    for scale in (0.3, 1.0):  # of a vector that L2Clip lets pass
        h = scale * np.random.default_rng(1).normal(size=D) / 2
        values = np.linalg.svd(norm_jacobian(name, h, own, eps=0.0), compute_uv=False)
        assert values[-1] > 1e-3 * values[0]


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: partial_rms_norm(x, share=0.0), "share=0.0: must be above 0 and at most 1"),
        (lambda x: l2_clip(x, threshold=-1.0), "threshold=-1.0: must be finite and above 0"),
        (lambda x: rms_norm_eps_outside(x, eps=-1.0), "eps=-1.0: must be finite"),
        (lambda x: crms_norm(x, eps=math.nan), "eps=nan: must be finite"),
        (lambda x: affine(x, jnp.ones(4)), r"gain of shape \(4,\)"),
        (lambda x: seed_norm(x, beta=jnp.ones(2)), r"beta of shape \(2,\)"),
        (lambda x: gated_norm(x, down=jnp.ones((3, 2)), up=jnp.ones((3, 2))),
         r"up of shape \(3, 2\): must be \(2, 3\)"),
        (lambda x: l2_norm(x.astype(jnp.int32)), "x of dtype int32"),
        (lambda x: norm_jacobian("gatednorm", x, {"down": np.ones((3, 2))}),
         r"down of shape \(3, 2\): must be of shape \(3, 128\)"),
        (lambda x: norm_jacobian("dyt", x, {"alpha": np.ones(3)}), "alpha of shape .*: must be a"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(call, message):
    with pytest.raises(UserError, match=message) as caught:
        call(jnp.ones((2, 3)))
    assert "\n" not in str(caught.value)
