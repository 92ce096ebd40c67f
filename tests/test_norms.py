"""Norms against 60-digit arithmetic, closed-form Jacobians, and the hazards of float ranges."""

import functools
import json
import math
from decimal import Decimal, getcontext

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from normjax.errors import UserError
from normjax.norm_functions import identity, layer_norm, rms_norm
from normjax.norms import NORMS, Identity, LayerNorm, NormLayer, Parameter, RMSNorm

getcontext().prec = 60
DTYPES = (jnp.float16, jnp.bfloat16, jnp.float32)
EAGER = {"rms": rms_norm, "layer": layer_norm}
# Compiled once per shape: eagerly, every operation would be compiled on its own.
FUNCTIONS = {k: jax.jit(f, static_argnames="eps") for k, f in EAGER.items()}
RMS, LAYER = FUNCTIONS["rms"], FUNCTIONS["layer"]

pytestmark = pytest.mark.usefixtures("optimized")

# --- referees -------------------------------------------------------------------------------------


def exact(row, *, centred, eps):
    """y = c / sqrt(mean(c^2) + eps) of one row, in 60 digits, rounded once to float64."""
    x = [Decimal(float(v)) for v in row]
    if centred:
        mean = sum(x) / len(x)
        # A vector of equal entries is centred exactly; 60 digits of sum / n need not be.
        x = [Decimal(0)] * len(x) if len(set(x)) == 1 else [v - mean for v in x]
    s = (sum(v * v for v in x) / len(x) + Decimal(eps)).sqrt()
    return np.array([float(v / s) if s else 0.0 for v in x])


def exact_rows(rows, **kwargs):
    return np.stack([exact(row, **kwargs) for row in np.asarray(rows, np.float64)])


def closed_form_jacobian(h, gain, *, centred, eps):
    """RMSNorm (1/s) G (I - h h^T / (d s^2)); LayerNorm (1/s) G (C - c c^T / (d s^2))."""
    d = len(h)
    projection = np.eye(d) - 1 / d if centred else np.eye(d)
    c = h - h.mean() if centred else h
    s = np.sqrt(np.mean(c * c) + eps)
    if s == 0:
        return np.zeros((d, d))
    return gain[:, None] * (projection - np.outer(c / s, c / s) / d) / s


def naive(x, gain, bias, *, centred, eps):
    """The formula as one would write it without care; right in float64 at ordinary scales."""
    c = x - jnp.mean(x) if centred else x
    return gain * c / jnp.sqrt(jnp.mean(c * c) + eps) + bias


def assert_rounded(actual, expected, dtype, *, of_row=False):
    """Elementwise closeness in units of the arithmetic and of the output's dtype.

    d positive terms summed in any order lose about sqrt(d) roundings; the rest is a handful. One
    more half unit goes to the final cast. Where ``of_row``, errors count relative to the largest
    entry of the row (a centred entry near zero has lost its own digits to the mean's). Results
    below the smallest normal number may be flushed.
    """
    wide = jnp.finfo(jnp.promote_types(dtype, jnp.float32))
    info = jnp.finfo(dtype)
    expected = np.asarray(expected, np.float64)
    actual = np.asarray(actual.astype(wide.dtype), np.float64)
    unit = (8 + math.sqrt(expected.shape[-1])) * float(wide.eps)
    reference = np.abs(expected)
    base = reference.max(-1, keepdims=True) if of_row else reference
    allowed = unit * base + 0.51 * float(info.eps) * reference + float(info.smallest_normal)
    worst = np.max(np.abs(actual - expected) / allowed)
    assert worst <= 1, f"error is {worst:.3g} times what rounding explains"


def scaled_rows(dtype, d):
    """Rows of d entries, the largest from the smallest subnormal to the largest finite number."""
    info = jnp.finfo(dtype)
    top, tiny = float(info.max), float(info.smallest_subnormal)
    lowest, highest = math.log10(tiny), math.log10(top)
    scales = [tiny, float(info.smallest_normal), *np.logspace(lowest + 0.5, highest - 0.5, 12), 1.0]
    rng = np.random.default_rng(d)
    signs = np.where(np.arange(d) % 2, -1.0, 1.0)
    outlier = np.full(d, 1e-3) * signs
    outlier[d // 2] = 1.0
    mixed = rng.uniform(-1, 1, d)
    patterns = [np.ones(d), signs, outlier, mixed / np.abs(mixed).max(), -np.arange(1, d + 1) / d]
    rows = [pattern * scale for scale in [*scales, top] for pattern in patterns]
    cast = np.array([*rows, np.zeros(d)]).astype(np.dtype(dtype))
    assert np.isfinite(cast.astype(np.float64)).all()
    return cast


def without_subnormals(rows):
    """Rows of zeros and normal numbers only (float16's subnormals are normal in float32)."""
    wide = rows.astype(np.float64)
    lowest = float(jnp.finfo(jnp.promote_types(rows.dtype, jnp.float32)).smallest_normal)
    return rows[np.all((np.abs(wide) >= lowest) | (wide == 0), axis=-1)]


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_every_scale_of_every_dtype(kind, dtype, d):
    """From the smallest subnormal number to the largest finite one, for every eps."""
    rows = without_subnormals(scaled_rows(dtype, d))
    for eps in (0.0, 1e-12, 1e-6, 1e-2):
        y = jax.jit(functools.partial(FUNCTIONS[kind], eps=eps))(rows)
        assert y.dtype == dtype
        assert bool(jnp.all(jnp.isfinite(y.astype(jnp.float32))))
        expected = exact_rows(rows, centred=kind == "layer", eps=eps)
        assert_rounded(y, expected, dtype, of_row=kind == "layer")


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32), ids=lambda t: t.__name__)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_rows_with_subnormal_entries(kind, dtype):
    rows = scaled_rows(dtype, 7)
    for eps in (0.0, 1e-12, 1e-6, 1e-2):
        y = jax.jit(functools.partial(FUNCTIONS[kind], eps=eps))(rows)
        expected = exact_rows(rows, centred=kind == "layer", eps=eps)
        assert_rounded(y, expected, dtype, of_row=kind == "layer")


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_rows_with_subnormal_entries_for_eps_zero(kind):
    rows = scaled_rows(jnp.float32, 6)
    y = jax.jit(functools.partial(FUNCTIONS[kind], eps=0.0))(rows)
    expected = exact_rows(rows, centred=kind == "layer", eps=0.0)
    assert_rounded(y, expected, jnp.float32, of_row=kind == "layer")


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_every_scale_of_float64(kind, x64):
    rows = without_subnormals(scaled_rows(jnp.float64, 5))
    for eps in (0.0, 1e-6):
        y = jax.jit(functools.partial(FUNCTIONS[kind], eps=eps))(rows)
        assert y.dtype == jnp.float64
        expected = exact_rows(rows, centred=kind == "layer", eps=eps)
        assert_rounded(y, expected, jnp.float64, of_row=kind == "layer")


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_compiled_eager_and_mapped_agree_at_every_scale(kind, dtype, eps):
    """A compiler that reassociates (x r)(x r) to (x x)(r r) overflows at one end of the range."""
    rows = jnp.asarray(scaled_rows(dtype, 4))
    f = functools.partial(EAGER[kind], eps=eps)
    wide = [np.asarray(y.astype(jnp.float32)) for y in
            (f(rows), jax.jit(f)(rows), jax.vmap(f)(rows), jax.jit(jax.vmap(f))(rows))]  # fmt: skip
    unit = 8 * float(jnp.finfo(jnp.float32).eps) + float(jnp.finfo(dtype).eps)
    for other in wide[1:]:
        chex.assert_trees_all_close(other, wide[0], rtol=unit, atol=unit)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_product_of_neighbours_in_one_program(kind):
    """Square, product and norm fused into one program: the order of products must hold."""
    f = FUNCTIONS[kind]

    def fused(x, c):
        y = f(x * c, eps=0.0)
        return jnp.sum(y * y, -1), f(y * c, eps=0.0)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)), jnp.float32)
    for c in (1e-30, 1e-20, 1e-10, 1.0, 1e10, 1e20, 1e30):
        square, again = jax.jit(fused)(x, jnp.float32(c))
        chex.assert_trees_all_close(square, jnp.full(3, 8.0), rtol=1e-5)
        chex.assert_trees_all_close(again, f(x, eps=0.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
def test_long_vectors(dtype):
    """d = 32768: 100 + 0.01 N, N(2000, 1), one outlier, and entries near the dtype's largest."""
    rng = np.random.default_rng(1)
    d = 32768
    outlier = rng.normal(size=d)
    outlier[17] = 3e4
    top = float(jnp.finfo(dtype).max)
    rows = np.stack([100 + 0.01 * rng.normal(size=d), rng.normal(2000, 1, d), outlier,
                     top * rng.uniform(-1, 1, d)]).astype(np.dtype(dtype))  # fmt: skip
    for kind, f in FUNCTIONS.items():
        centred = kind == "layer"
        assert_rounded(f(rows), exact_rows(rows, centred=centred, eps=1e-6), dtype, of_row=centred)


def test_large_mean_small_spread():
    """Where E[x^2] - E[x]^2 loses everything, two passes lose nothing that x still holds."""
    rng = np.random.default_rng(2)
    rows = np.stack([rng.normal(2000, 1, 64), rng.normal(-1e6, 1, 64), rng.normal(1e30, 1e24, 64)])
    rows = rows.astype(np.float32)
    y = LAYER(rows, eps=0.0)
    assert_rounded(y, exact_rows(rows, centred=True, eps=0.0), jnp.float32, of_row=True)


@pytest.mark.parametrize("value", [0.1, 31415.927, 1e-30, 1e-40, 3e38, -7.7e22])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("d", [1, 3, 65])
def test_layernorm_of_a_constant_is_exactly_the_bias(value, eps, d):
    bias = jnp.linspace(-1, 1, d, dtype=jnp.float32)
    for f in (layer_norm, LAYER):
        y = f(jnp.full(d, value, jnp.float32), jnp.full(d, 3.0), bias, eps=eps)
        chex.assert_trees_all_equal(y, bias)


def test_layernorm_of_a_constant_in_float64(x64):
    for value in (31415.927, 1e300, 1e-310):
        x = jnp.full(65, value, jnp.float64)
        chex.assert_trees_all_equal(LAYER(x, eps=0.0), jnp.zeros(65, jnp.float64))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
@pytest.mark.parametrize("name", NORMS)
def test_every_row_gives_its_dtype_back_and_zeros_for_zeros(name, dtype):
    layer = NormLayer(NORMS[name], eps=0.0)
    x = jnp.zeros((2, 3, 5), dtype)
    variables = layer.init(jax.random.key(0), x)
    y = layer.apply(variables, x)
    assert y.dtype == dtype
    chex.assert_trees_all_equal(y, x)


@pytest.mark.parametrize(
    "name",
    ["rmsnorm", "rmsnorm_offset", "rmsnorm_plain",
     "layernorm", "layernorm_nobias", "layernorm_plain"],
)  # fmt: skip
def test_every_row_of_the_two_is_its_formula(name):
    """y = gain * x / rms(x) + bias with the gain, the bias and the centring that its name says."""
    row = NORMS[name]
    rng = np.random.default_rng(3)
    x, g, b = (rng.normal(size=s).astype(np.float32) for s in ((6, 8), (8,), (8,)))
    has, drawn = {p.name for p in row.parameters}, {"gain": g, "bias": b}
    parameters = {each: drawn[each] for each in has}
    gain = g.astype(np.float64) + ("offset" in name) if "gain" in has else np.ones(8)
    y = row(jnp.asarray(x), jax.tree.map(jnp.asarray, parameters), 1e-3)
    plain = exact_rows(x, centred=name.startswith("layernorm"), eps=1e-3)
    expected = gain * plain + (b if "bias" in has else 0)
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=2e-6)


def test_the_table_says_what_each_row_learns_and_forgets():
    facts = {
        name: (tuple((p.name, p.started(1).item(), p.offset) for p in row.parameters), row.forgets)
        for name, row in NORMS.items()
        if name != "gatednorm"
    }
    gain, offset, bias = ("gain", 1.0, 0.0), ("gain", 0.0, 1.0), ("bias", 0.0, 0.0)
    alpha, shift = ("alpha", 0.5, 0.0), ("shift", 0.0, 0.0)
    assert facts == {
        "rmsnorm": ((gain,), "length"), "rmsnorm_offset": ((offset,), "length"),
        "rmsnorm_plain": ((), "length"), "layernorm": ((gain, bias), "length and mean"),
        "layernorm_nobias": ((gain,), "length and mean"),
        "layernorm_plain": ((), "length and mean"), "identity": ((), "nothing"),
        "rmsnorm_simple": ((), "length"), "rmsnorm_eps_outside": ((gain,), "length"),
        "prmsnorm": ((gain,), "length"), "crmsnorm": ((), "length"),
        "scalenorm": ((gain,), "length"), "l2norm": ((), "length"), "l2clip": ((), "nothing"),
        "dyt": ((gain, bias, alpha), "nothing"), "derf": ((gain, bias, alpha, shift), "nothing"),
        "seednorm": ((gain, ("alpha", 1.0, 0.0), ("beta", 0.0, 0.0)), "nothing"),
        "centring": ((), "mean"), "affine": ((gain, shift), "nothing"),
        "gradient_preserving": ((("alpha", 0.0, 0.0),), "nothing"),
    }  # fmt: skip
    gate = NORMS["gatednorm"]
    assert gate.forgets == "length" and gate.parameters[0] == Parameter("gain")
    drawn = {p.name: np.asarray(p.started(64, jax.random.key(0))) for p in gate.parameters}
    assert {k: v.shape for k, v in drawn.items()} == {
        "gain": (64,), "down": (64, 128), "up": (128, 64)
    }  # fmt: skip
    for name in ("down", "up"):  # 8192 normal numbers of standard deviation 0.02
        assert abs(drawn[name].std() / 0.02 - 1) < 5 / math.sqrt(2 * 8192)
        assert abs(drawn[name].mean()) < 5 * 0.02 / math.sqrt(8192)
    assert {d: NORMS["scalenorm"].started(d)["gain"].item() for d in (4, 9)} == {4: 2.0, 9: 3.0}
    assert all(row.name == name for name, row in NORMS.items())


# --- invariances ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_powers_of_two_leave_no_trace(kind):
    """N(c h) = N(h), bit for bit, for c a power of two and eps = 0."""
    f = jax.jit(functools.partial(FUNCTIONS[kind], eps=0.0))
    h = jnp.asarray(np.random.default_rng(4).normal(size=(5, 16)), jnp.float32)
    base = f(h)
    for exponent in (-110, -64, -20, -1, 1, 20, 64, 110, 124):
        chex.assert_trees_all_equal(f(h * np.float32(2.0**exponent)), base)
    chex.assert_trees_all_equal(f(-h), -base)


def test_length_is_the_root_of_d():
    """|N(h)| = sqrt(d) for eps = 0 without gain; LayerNorm's mean is 0 as well."""
    h = jnp.asarray(np.random.default_rng(5).normal(3, 1, size=(9, 50)), jnp.float32)
    for f in (RMS, LAYER):
        length = jnp.linalg.norm(f(h, eps=0.0), axis=-1)
        chex.assert_trees_all_close(length, jnp.full(9, math.sqrt(50)), rtol=1e-6)
    chex.assert_trees_all_close(jnp.mean(LAYER(h, eps=0.0), -1), jnp.zeros(9), atol=1e-6)


def test_layernorm_ignores_a_shift_and_rmsnorm_of_centred_is_layernorm():
    c = jnp.asarray(np.random.default_rng(6).integers(-8, 9, size=(4, 8)), jnp.float32)
    chex.assert_trees_all_equal(LAYER(c + 1024.0), LAYER(c))
    chex.assert_trees_all_close(LAYER(c), RMS(c - jnp.mean(c, -1, keepdims=True)),
                                rtol=1e-6, atol=1e-6)  # fmt: skip


def test_non_finite_inputs_are_not_hidden():
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        x = jnp.array([1.0, bad, 2.0])
        for f in (RMS, LAYER):
            assert not bool(jnp.all(jnp.isfinite(f(x))))


# --- gains and casts ------------------------------------------------------------------------------


def test_gain_one_plus_g_is_formed_in_float32():
    """In bfloat16 arithmetic 1 + 15.8125 is not 16.8125."""
    g = jnp.full(4, 15.8125, jnp.bfloat16)
    y = NORMS["rmsnorm_offset"](jnp.ones(4, jnp.float32), {"gain": g}, 0.0)
    chex.assert_trees_all_equal(y, jnp.full(4, 16.8125, jnp.float32))
    assert float(jnp.bfloat16(1) + g[0]) != 16.8125


def test_the_cast_comes_last():
    """The gain multiplies in float32: only one rounding to bfloat16 is visible."""
    rng = np.random.default_rng(7)
    x = jnp.asarray(rng.normal(size=(64, 32)), jnp.bfloat16)
    gain = jnp.asarray(rng.uniform(0.5, 2, 32), jnp.float32)
    bias = jnp.asarray(rng.normal(size=32), jnp.float32)
    wide = exact_rows(np.asarray(x.astype(jnp.float32)), centred=True, eps=1e-6)
    once = (wide * np.asarray(gain, np.float64) + np.asarray(bias, np.float64)).astype(jnp.bfloat16)
    early = jnp.asarray(wide.astype(jnp.bfloat16)) * gain.astype(jnp.bfloat16)
    early = early + bias.astype(jnp.bfloat16)
    y = LAYER(x, gain, bias)
    # Float32's own error can still tip a number that lies on the edge between two bfloat16.
    assert int(jnp.sum(y != once)) <= 2
    assert int(jnp.sum(early != once)) > 200


@pytest.mark.parametrize("parameter_dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: t.__name__)
def test_parameters_of_another_dtype_do_not_widen_the_output(dtype, parameter_dtype):
    x = jnp.ones((2, 4), dtype)
    p = jnp.ones(4, parameter_dtype)
    assert RMS(x, p).dtype == dtype
    assert LAYER(x, p, p).dtype == dtype


def test_scalar_gain_and_bias_arrays():
    x = jnp.array([[1.0, 3.0]])
    y = LAYER(x, jnp.float32(2.0), jnp.float32(1.0), eps=0.0)
    chex.assert_trees_all_equal(y, jnp.array([[-1.0, 3.0]]))


# --- first derivatives ----------------------------------------------------------------------------

D = 6
GAINS = {
    "uniform": np.ones(D),
    "lognormal": np.random.default_rng(8).lognormal(0, 1, D),
    "zeros": np.array([1.0, 0.0, -2.0, 0.0, 3.0, 0.5]),
}
SCALES = (0.0, 1e-3, 1.0, 1e3, 1e100, 1e-100)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-2])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_jacobian_is_the_closed_form(kind, eps, x64):
    """Forward, reverse, compiled and mapped, against (1/s) G (I - h h^T / (d s^2))."""
    h = np.random.default_rng(9).normal(0.3, 1, D)
    points = np.stack([h * scale for scale in SCALES])
    gains = np.stack(list(GAINS.values()))
    expected = np.stack([
        [closed_form_jacobian(x, g, centred=kind == "layer", eps=eps) for x in points]
        for g in gains
    ])  # fmt: skip

    def f(x, g):
        return FUNCTIONS[kind](x, g, eps=eps)

    for derivative in (jax.jacfwd, jax.jacrev):
        over_points = jax.vmap(derivative(f), in_axes=(0, None))
        actual = jax.jit(jax.vmap(over_points, in_axes=(None, 0)))(points, gains)
        # Each entry is a difference of terms of the size of the largest entry: a few roundings
        # of that size, never more.
        size = np.abs(expected).max(axis=(-2, -1), keepdims=True)
        error = np.abs(np.asarray(actual) - expected)
        assert np.all(error <= 32 * np.finfo(np.float64).eps * size)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_float32_jacobian_scales_as_the_inverse_at_every_scale(kind):
    """J(c h) = J(h) / c, bit for bit, for powers of two: no hidden square over- or underflows."""
    h = jnp.asarray(np.random.default_rng(10).normal(size=D), jnp.float32)
    f = functools.partial(FUNCTIONS[kind], eps=0.0)
    for derivative in (jax.jacfwd, jax.jacrev):
        jacobian = jax.jit(derivative(f))
        base = jacobian(h)
        for exponent in (-120, -80, -30, 30, 80, 110):
            c = np.float32(2.0**exponent)
            chex.assert_trees_all_equal(jacobian(h * c) * c, base)


def test_radial_and_tangential_gain(x64):
    """J u = (eps / s^3) g u along the vector (nothing for eps = 0), and 1 / s across it."""
    rng = np.random.default_rng(11)
    h = jnp.asarray(rng.normal(size=D))
    u = h / jnp.linalg.norm(h)
    for eps in (0.0, 0.5):
        s = jnp.sqrt(jnp.mean(h * h) + eps)
        _, radial = jax.jvp(lambda x, e=eps: RMS(x, eps=e), (h,), (u,))
        chex.assert_trees_all_close(radial, eps / s**3 * u, atol=1e-15)
    jacobian = jax.jit(jax.jacfwd(functools.partial(RMS, eps=0.5)))(h)
    values = jnp.linalg.svd(jacobian, compute_uv=False)
    chex.assert_trees_all_close(values[:-1], jnp.full(D - 1, 1 / s), rtol=1e-14)
    chex.assert_trees_all_close(values[-1], 0.5 / s**3, rtol=1e-13)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_derivative_at_the_zero_vector(kind):
    """G C / sqrt(eps) for eps > 0, and zero, not NaN, for eps = 0; to every order."""
    zero, gain = jnp.zeros(4), jnp.array([1.0, 2.0, -3.0, 0.0])
    projection = np.eye(4) - (0.25 if kind == "layer" else 0)
    for eps in (0.0, 1e-12, 1e-2):
        f = functools.partial(FUNCTIONS[kind], gain=gain, eps=eps)
        derivatives = [transform(f) for transform in (jax.jacfwd, jax.jacrev, jax.hessian)]
        first, again, second = jax.jit(lambda x, fs=derivatives: [g(x) for g in fs])(zero)
        expected = gain[:, None] * projection / math.sqrt(eps) if eps else jnp.zeros((4, 4))
        chex.assert_trees_all_close(first, expected, rtol=1e-6)
        chex.assert_trees_all_close(again, expected, rtol=1e-6)
        chex.assert_trees_all_equal(second, jnp.zeros((4, 4, 4)))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_large_tangent_at_the_zero_vector_for_eps_zero(kind):
    """The derivative there is zero by convention, along every tangent."""
    f = functools.partial(FUNCTIONS[kind], eps=0.0)
    v = jnp.array([10.0, -1e3, 1e30, 0.0])
    _, tangent = jax.jvp(f, (jnp.zeros(4),), (v,))
    chex.assert_trees_all_equal(tangent, jnp.zeros(4))


def test_one_zero_row_does_not_disturb_the_others():
    x = jnp.array([[0.0, 0.0], [3.0, 4.0]])
    g = jax.grad(lambda x: jnp.sum(RMS(x, eps=0.0) * jnp.array([1.0, 0.0])))(x)
    chex.assert_tree_all_finite(g)
    expected = closed_form_jacobian(np.array([3.0, 4.0]), np.ones(2), centred=False, eps=0.0)[0]
    chex.assert_trees_all_close(g[1], jnp.asarray(expected, jnp.float32), rtol=1e-6)


@pytest.mark.parametrize("value", [1.0, 31415.927, 1e16])
def test_layernorm_derivative_at_a_constant(value):
    """(1/sqrt(eps)) (I - 11^T/d), wherever the constant lies."""
    jacobian = jax.jit(jax.jacrev(LAYER))(jnp.full(4, value, jnp.float32))
    chex.assert_trees_all_close(jacobian, 1e3 * (jnp.eye(4) - 0.25), rtol=1e-5)


@pytest.mark.parametrize("value", [1e17, 1e25, 1e34])
def test_layernorm_derivative_at_a_huge_constant(value):
    test_layernorm_derivative_at_a_constant(value)


def test_gradients_of_gain_and_bias():
    """dL/dg = sum of w times the plain norm, dL/db = sum of w, over all leading axes."""
    rng = np.random.default_rng(12)
    x, w = (jnp.asarray(rng.normal(size=(3, 5, D)), jnp.float32) for _ in range(2))
    gain, bias = (jnp.asarray(rng.normal(size=D), jnp.float32) for _ in range(2))
    gradient = jax.jit(jax.grad(lambda g, b: jnp.sum(w * LAYER(x, g, b)), argnums=(0, 1)))
    dg, db = gradient(gain, bias)
    chex.assert_trees_all_close(dg, jnp.sum(w * LAYER(x), (0, 1)), rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(db, jnp.sum(w, (0, 1)), rtol=1e-5, atol=1e-5)
    row = NORMS["rmsnorm_offset"]
    dg = jax.grad(lambda g: jnp.sum(w * row(x, {"gain": g}, 1e-6)))(gain)
    chex.assert_trees_all_close(dg, jnp.sum(w * RMS(x), (0, 1)), rtol=1e-5, atol=1e-5)


def test_forward_and_reverse_are_transposes_in_low_precision():
    """<J v, w> = <v, J^T w> in bfloat16 and float16 up to a few of their roundings."""
    rng = np.random.default_rng(13)
    for dtype in (jnp.bfloat16, jnp.float16):
        x, v, w = (jnp.asarray(rng.normal(size=64), dtype) for _ in range(3))
        _, jv = jax.jvp(LAYER, (x,), (v,))
        _, pull = jax.vjp(LAYER, x)
        (jw,) = pull(w)
        assert jv.dtype == jw.dtype == dtype
        wide = [np.asarray(a.astype(jnp.float32), np.float64) for a in (jv, w, v, jw)]
        bound = 2 * float(jnp.finfo(dtype).eps) * np.linalg.norm(wide[1]) * np.linalg.norm(wide[2])
        assert abs(wide[0] @ wide[1] - wide[2] @ wide[3]) <= bound


# --- higher derivatives ---------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [0.0, 1e-2])
@pytest.mark.parametrize("kind", FUNCTIONS)
def test_second_and_third_derivatives(kind, eps, x64):
    """Every order of forward and reverse agrees with autodiff of the plain formula in float64."""
    rng = np.random.default_rng(14)
    h, gain, bias = (jnp.asarray(rng.normal(0.5, 1, 4)) for _ in range(3))
    f = functools.partial(FUNCTIONS[kind], gain=gain, eps=eps)
    plain = functools.partial(naive, gain=gain, bias=bias, centred=kind == "layer", eps=eps)
    fwd, rev = jax.jacfwd, jax.jacrev
    second = [(fwd, fwd), (rev, fwd), (fwd, rev), (rev, rev)]
    third = [(fwd, fwd, fwd), (rev, fwd, rev)]

    def derivatives(function, orders):
        def all_at_once(x):
            return [functools.reduce(lambda g, t: t(g), order, function)(x) for order in orders]

        return jax.jit(all_at_once)(h)

    for orders in (second, third):
        (expected,) = derivatives(plain, orders[:1])
        # Third derivatives of the plain formula lose a few dozen roundings of their own.
        allowed = 256 * np.finfo(np.float64).eps * float(jnp.max(jnp.abs(expected)))
        for actual in derivatives(f, orders):
            chex.assert_trees_all_close(actual, expected, rtol=0, atol=allowed)


def test_second_derivative_across_a_vector(x64):
    """D^2 N [v, v] = -(sqrt(d) / r^2) u for a unit v orthogonal to h, eps = 0."""
    h = jnp.array([3.0, 0.0, 4.0, 0.0])
    v = jnp.array([0.0, 0.6, 0.0, 0.8])
    second = jax.jit(jax.hessian(functools.partial(RMS, eps=0.0)))(h)
    expected = -(2.0 / 25.0) * h / 5.0
    chex.assert_trees_all_close(jnp.einsum("ijk,j,k->i", second, v, v), expected, atol=1e-16)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_float32_hessian_scales_as_the_inverse_square(kind):
    h = jnp.asarray(np.random.default_rng(15).normal(size=4), jnp.float32)
    hessian = jax.jit(jax.hessian(functools.partial(FUNCTIONS[kind], eps=0.0)))
    base = hessian(h)
    for exponent in (-55, -30, 30, 55):
        c = np.float32(2.0**exponent)
        chex.assert_trees_all_close(hessian(h * c) * c * c, base, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_derivatives_against_finite_differences(kind, x64):
    rng = np.random.default_rng(16)
    x, gain = jnp.asarray(rng.normal(size=(2, 4))), jnp.asarray(rng.normal(size=4))

    def f(x, gain):
        return FUNCTIONS[kind](x, gain, eps=1e-2)

    check_grads(jax.jit(f), (x, gain), order=2, modes=("fwd", "rev"), atol=1e-6, rtol=1e-6)


def test_derivatives_under_vmap_scan_and_jit():
    """Forward over reverse under vmap, and through a scan: the same numbers as by hand."""
    rng = np.random.default_rng(17)
    x = jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)
    w = jnp.asarray(rng.normal(size=4), jnp.float32)

    def loss(x):
        return jnp.sum(w * jnp.tanh(LAYER(x)))

    hessians = jax.jit(jax.vmap(jax.jacfwd(jax.grad(loss))))(x)
    hessian = jax.jit(jax.hessian(loss))
    one_by_one = jnp.stack([hessian(row) for row in x])
    chex.assert_trees_all_close(hessians, one_by_one, rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close(hessians, jnp.swapaxes(hessians, 1, 2), rtol=1e-5, atol=1e-5)

    def step(h):
        return h + 0.5 * jnp.sin(RMS(h, w))

    def scanned(h):
        return jnp.sum(jax.lax.scan(lambda h, _: (step(h), None), h, None, length=3)[0] ** 2)

    def unrolled(h):
        return jnp.sum(step(step(step(h))) ** 2)

    expected = jax.jit(jax.grad(unrolled))(x)
    chex.assert_trees_all_close(jax.jit(jax.grad(scanned))(x), expected, rtol=1e-5, atol=1e-5)


# --- what is not finite ---------------------------------------------------------------------------

BY_FEATURE = ("dyt", "derf", "affine", "gradient_preserving", "identity")


@pytest.mark.parametrize("name", BY_FEATURE)
def test_a_bad_feature_of_what_shares_no_statistics_is_its_own(name):
    row = NORMS[name]
    own = {k: jnp.asarray(v, jnp.float32) for k, v in row.started(4).items()}
    x = jnp.asarray([1.0, 0.0, 3.0, 4.0])
    for bad in (math.nan, math.inf):
        found, right = (
            jax.jvp(lambda v: row(v, own, 1e-6), (each,), (jnp.ones(4),))
            for each in (x.at[1].set(bad), x)
        )
        assert bool(jnp.isnan(found[0][1])) == math.isnan(bad)
        others = jnp.array([0, 2, 3])
        for one, other in zip(found, right, strict=True):
            chex.assert_trees_all_equal(one[others], other[others])


@pytest.mark.parametrize(
    "dtype",
    ["float32", *(pytest.param(d, marks=pytest.mark.slow)
                  for d in ("float16", "bfloat16", "float64"))],
)  # fmt: skip
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [n for n in NORMS if n not in BY_FEATURE])
def test_one_bad_feature_is_seen_in_every_one(name, bad, dtype):
    """[1, nan, 3, 4] is no vector of which zeros are known; its neighbours in a batch are fine."""
    row = NORMS[name]
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray([[1.0, bad, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]], dtype)
        own = {k: jnp.asarray(v, dtype) for k, v in row.started(4).items()}
        apply, ones = lambda v: row(v, own, 1e-6), jnp.ones_like(x)
        both = lambda v: (*jax.jvp(apply, (v,), (ones,)), *jax.vjp(apply, v)[1](ones))  # noqa: E731
        for each in map(np.asarray, jax.jit(both)(x)):
            assert np.isnan(each[0]).all() and np.isfinite(each[1].astype(float)).all()
    found = row.derivative_at(np.array([1.0, bad, 3.0, 4.0]), {}, 1e-6)
    assert np.isnan(found.matrix()).all()


# --- Flax modules ---------------------------------------------------------------------------------


ONE, ZERO = np.ones(8), np.zeros(8)
STARTS = {
    "": {"gain": ONE, "bias": ZERO, "shift": ZERO, "alpha": 0.5},
    "rmsnorm_offset": {"gain": ZERO}, "scalenorm": {"gain": math.sqrt(8)},
    "derf": {"shift": 0.0}, "seednorm": {"alpha": ONE, "beta": ZERO},
    "gradient_preserving": {"alpha": 0.0},
}  # fmt: skip
"""Of eight features, of the row that is named, else of all."""


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_module_parameters(param_dtype):
    x = jnp.ones((2, 3, 8), jnp.bfloat16)
    for row in NORMS.values():
        layer = NormLayer(row, param_dtype=param_dtype)
        parameters = layer.init(jax.random.key(0), x).get("params", {})
        own = STARTS.get(row.name, {})
        expected = {
            p.name: jnp.asarray(own.get(p.name, STARTS[""].get(p.name)), param_dtype)
            for p in row.parameters if not p.spread
        }  # fmt: skip
        drawn = {p.name for p in row.parameters if p.spread}
        assert all(parameters[k].dtype == param_dtype and bool(parameters[k].any()) for k in drawn)
        parameters = {k: v for k, v in parameters.items() if k not in drawn}
        chex.assert_trees_all_equal(dict(parameters), expected)
        chex.assert_trees_all_equal_dtypes(dict(parameters), expected)


def test_modules_equal_those_of_flax_on_ordinary_input():
    rng = np.random.default_rng(18)
    x = jnp.asarray(rng.normal(1, 2, size=(5, 16)), jnp.float32)
    gain, bias = (jnp.asarray(rng.normal(size=16), jnp.float32) for _ in range(2))
    theirs = nn.RMSNorm(epsilon=1e-6).apply({"params": {"scale": gain}}, x)
    ours = RMSNorm(eps=1e-6).apply({"params": {"gain": gain}}, x)
    chex.assert_trees_all_close(ours, theirs, rtol=2e-6, atol=2e-6)
    reference = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False)
    theirs = reference.apply({"params": {"scale": gain, "bias": bias}}, x)
    ours = LayerNorm(eps=1e-5).apply({"params": {"gain": gain, "bias": bias}}, x)
    chex.assert_trees_all_close(ours, theirs, rtol=2e-6, atol=2e-6)
    chex.assert_trees_all_equal(Identity().apply({}, x), x)
    chex.assert_trees_all_equal(identity(x, gain, eps=1.0), x)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("f", [rms_norm, layer_norm])
@pytest.mark.parametrize("eps", [-1e-6, math.nan, math.inf])
def test_impossible_eps(f, eps):
    with pytest.raises(UserError, match=r"^eps=.*: must be finite and at least 0; .*$"):
        f(jnp.ones(3), eps=eps)


def test_other_refusals():
    x = jnp.ones((2, 3))
    cases = [
        (lambda: rms_norm(jnp.ones(3, jnp.int32)), "x of dtype int32"),
        (lambda: rms_norm(jnp.ones(3, jnp.complex64)), "x of dtype complex64"),
        (lambda: rms_norm(x, jnp.ones(4)), r"gain of shape \(4,\)"),
        (lambda: rms_norm(x, jnp.ones((2, 3))), r"gain of shape \(2, 3\)"),
        (lambda: rms_norm(x, jnp.ones(1)), r"gain of shape \(1,\)"),
        (lambda: layer_norm(x, None, jnp.ones(2)), r"bias of shape \(2,\)"),
    ]
    for call, message in cases:
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_gain_may_be_a_plain_number():
    chex.assert_trees_all_equal(rms_norm(jnp.ones(3), 2.0, eps=0.0), jnp.full(3, 2.0, jnp.float32))


@pytest.mark.parametrize("x", [np.float32(1.0), np.ones((2, 0), np.float32)], ids=["0-d", "empty"])
def test_x_without_features_is_refused_in_one_line(x):
    with pytest.raises(UserError, match="x of shape"):
        rms_norm(x)


def test_the_record_of_a_norm_is_its_values_at_an_eps_of_a_millionth():
    """They are in the name of every run: at points of mean square 1e-6 another eps is another."""
    at = np.array([-2.0, -1.1, -0.4, 0.03, 0.2, 0.7, 1.5, 3.0])
    x = np.outer([1.0, 1e-3, 30.0], at)
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    found = NORMS["rmsnorm"].record()["values"]
    np.testing.assert_allclose(found, expected.ravel(), rtol=6e-5)


def test_records_are_json_and_a_start_that_depends_on_the_width_is_seen_at_several():
    for row in NORMS.values():
        assert json.loads(json.dumps(row.record())) == row.record()
    plain = {"name": "gain", "start": 1.0, "shape": "feature", "offset": 0.0}
    assert NORMS["rmsnorm"].record()["parameters"] == [plain]
    (gain,) = NORMS["scalenorm"].record()["parameters"]
    assert gain["shape"] == "scalar"
    assert all(start == math.sqrt(int(width)) for width, start in gain["start"].items())
    down = NORMS["gatednorm"].record()["parameters"][1]
    assert (down["shape"], down["spread"]) == (["feature", 128], 0.02)
