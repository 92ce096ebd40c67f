"""Placements: h' = P(a h + b Q(F(c N(h)))) written out, its Jacobian, and constants."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.norms import layer_norm, rms_norm
from normjax.placements import PLACEMENTS, combine, one, resolve, zero

D = 5
DEPTH = 6
EVERY = [(name, residual) for name in PLACEMENTS for residual in (True, False)]

# Which of N, Q and P is a norm, whether the decoder ends with one, and (a, b, c) of block 3 of 6.
PUBLISHED = {
    "pre": ("N", True, (1, 1, 1)),
    "post": ("P", False, (1, 1, 1)),
    "none": ("", False, (1, 1, 1)),
    "sandwich": ("NQ", True, (1, 1, 1)),
    "branch_output": ("Q", True, (1, 1, 1)),
    "deepnorm": ("P", False, (12**0.25, 1, 1)),
    "layernorm_scaling": ("N", True, (1, 1, 3**-0.5)),
    "skipinit": ("", False, (1, 0, 1)),
    "layerscale": ("N", True, (1, 0.1, 1)),
}


def same(x):
    return x


def factors(placement, block=3, depth=DEPTH):
    schedules = placement.residual, placement.branch, placement.scale
    return tuple(schedule(block, depth) for schedule in schedules)


def maps_of(placement, norms):
    """read, output, stream: the given maps where the placement has a norm, else the identity."""
    flags = placement.read, placement.output, placement.stream
    return [norm if on else same for norm, on in zip(norms, flags, strict=True)]


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_row_is_as_published(name):
    row = PLACEMENTS[name]
    norms, final, constants = PUBLISHED[name]
    flags = {"N": row.read, "Q": row.output, "P": row.stream}
    assert "".join(letter for letter, on in flags.items() if on) == norms
    assert row.final_norm == final
    assert factors(row) == pytest.approx(constants, rel=1e-15)
    assert row.title
    assert row.source


def test_deepnorm_constants():
    """alpha = (2 L)^(1/4), beta = (8 L)^(-1/4) with L blocks: the decoder-only row."""
    row = resolve("deepnorm")
    for depth in (1, 4, 18, 100):
        for block in (1, depth):
            assert row.residual(block, depth) == pytest.approx((2 * depth) ** 0.25, rel=1e-15)
        assert row.branch_gain(depth) == pytest.approx(1 / (8 * depth) ** 0.25, rel=1e-15)
    # Deeper decoders weigh the path up and the branch down (a beta of (8 L)^(+1/4) would not):
    # beta^2 / alpha^2 = 1 / (4 L), so that 2 L sub-layers together stay at 1/2.
    assert 2 * 8 * (row.branch_gain(8) / row.residual(1, 8)) ** 2 == pytest.approx(0.5)
    assert row.branch_gain(100) < 1 < row.residual(1, 100)
    assert row.init == "xavier"


def test_layernorm_scaling_is_one_over_the_root_of_the_block():
    row = resolve("layernorm_scaling")
    assert [row.scale(block, 9) for block in (1, 4, 9)] == pytest.approx([1, 1 / 2, 1 / 3])
    assert row.init == "gpt2_plain"


def test_what_is_learned():
    learned = {name: row.learned_branch for name, row in PLACEMENTS.items() if row.learned_branch}
    assert learned == {"skipinit": "scalar", "layerscale": "vector"}


def test_layerscale_starts_smaller_in_deeper_decoders():
    row = resolve("layerscale")
    assert [row.branch(1, depth) for depth in (12, 18, 24)] == [0.1, 0.1, 1e-5]


def test_layerscale_of_very_deep_decoders():
    assert resolve("layerscale").branch(1, 36) == 1e-6


@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_residual_is_a_equal_to_zero_and_nothing_else(name):
    with_path, without = resolve(name), resolve(name, residual=False)
    assert with_path is PLACEMENTS[name]
    assert [without.residual(block, 8) for block in (1, 5, 8)] == [0.0] * 3
    for field in ("read", "output", "stream", "branch", "scale", "learned_branch", "final_norm",
                  "init", "write", "source"):  # fmt: skip
        assert getattr(with_path, field) == getattr(without, field)
    assert without.title != with_path.title


def test_constants():
    assert (one(3, 7), zero(3, 7)) == (1.0, 0.0)
    assert len({row.title for row in PLACEMENTS.values()}) == len(PLACEMENTS)


# --- the equation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "residual"), EVERY)
def test_combine_is_the_equation_with_matrices(name, residual, x64):
    """With linear maps in place of F, N, Q, P the result is (P (a I + b c Q F N)) h, row by row."""
    rng = np.random.default_rng(0)
    placement = resolve(name, residual)
    f, n, q, p = (rng.normal(size=(D, D)) for _ in range(4))
    h = rng.normal(size=(2, 3, D))
    a, _, c = factors(placement)
    b = 0.7 if placement.learned_branch else factors(placement)[1]
    linear = [lambda x, m=m: x @ m.T for m in (n, q, p)]
    read, output, stream = maps_of(placement, linear)
    actual = combine(jnp.asarray(h), lambda x: x @ f.T, read=read, output=output, stream=stream,
                     a=a, b=b, c=c)  # fmt: skip
    n, q, p = (m if on else np.eye(D) for m, on in
               ((n, placement.read), (q, placement.output), (p, placement.stream)))  # fmt: skip
    matrix = p @ ((0.0 if not residual else a) * np.eye(D) + b * c * q @ f @ n)
    # Three products of D terms: a few dozen roundings.
    np.testing.assert_allclose(actual, h @ matrix.T, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("norm", [rms_norm, layer_norm])
@pytest.mark.parametrize(("name", "residual"), EVERY)
def test_jacobian_is_composed_of_its_parts(name, residual, norm, x64):
    """J = J_P (a I + b c J_Q J_F J_N), every factor taken at the point where it acts."""
    rng = np.random.default_rng(1)
    placement = resolve(name, residual)
    w, v = (jnp.asarray(rng.normal(size=(D, D))) for _ in range(2))
    gains = [jnp.asarray(rng.uniform(0.5, 2, D)) for _ in range(3)]
    norms = [functools.partial(norm, gain=gain) for gain in gains]
    read, output, stream = maps_of(placement, norms)
    a, b, c = factors(placement)
    b = 0.3 if placement.learned_branch else b

    def branch(x):
        return jnp.tanh(x @ w) @ v

    def block(h):
        return combine(h, branch, read=read, output=output, stream=stream, a=a, b=b, c=c)

    def by_parts(h):
        inner = c * read(h)
        outer = branch(inner)
        before = a * h + b * output(outer)
        jacobian = [jax.jacfwd(f)(x) for f, x in
                    ((stream, before), (output, outer), (branch, inner), (read, h))]  # fmt: skip
        j_p, j_q, j_f, j_n = jacobian
        return j_p @ (a * jnp.eye(D) + b * c * j_q @ j_f @ j_n)

    h = jnp.asarray(rng.normal(size=D))
    expected = jax.jit(by_parts)(h)
    allowed = 256 * np.finfo(np.float64).eps * float(jnp.max(jnp.abs(expected)))
    for derivative in (jax.jacfwd, jax.jacrev):
        chex.assert_trees_all_close(jax.jit(derivative(block))(h), expected, rtol=0, atol=allowed)


def test_zero_times_the_stream_is_no_path_at_all():
    """a = 0 leaves no trace of h, not even of its infinities."""
    h = jnp.array([jnp.inf, jnp.nan, 1.0])
    y = combine(h, jnp.ones_like, read=same, output=same, stream=same, a=0.0)
    chex.assert_trees_all_equal(y, jnp.ones(3))


def test_a_vector_weight_multiplies_features():
    h, b = jnp.ones((2, 3)), jnp.array([0.0, 1.0, 2.0])
    y = combine(h, lambda x: 5 * x, read=same, output=same, stream=same, b=b)
    chex.assert_trees_all_equal(y, jnp.broadcast_to(jnp.array([1.0, 6.0, 11.0]), (2, 3)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_float32_factors_do_not_widen_the_stream(dtype):
    h = jnp.ones((2, 4), dtype)
    factor = jnp.float32(0.5)
    for a, b, c in [(factor,) * 3, (0.5,) * 3, (1.0, jnp.full(4, 0.5, jnp.float32), 1.0)]:
        y = combine(h, same, read=same, output=same, stream=same, a=a, b=b, c=c)
        assert y.dtype == dtype


def test_numpy_factors_do_not_widen_the_stream():
    h = jnp.ones(4, jnp.bfloat16)
    y = combine(h, same, read=same, output=same, stream=same, b=np.float64(0.5))
    assert y.dtype == jnp.bfloat16


def test_whole_numbers_are_factors():
    h = jnp.ones(4)
    y = combine(h, same, read=same, output=same, stream=same, a=0, b=2)
    chex.assert_trees_all_equal(y, 2 * h)
