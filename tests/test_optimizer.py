"""The schedule, AdamW and clipping against formulas written out in NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from normjax.training import optimizer

EPS32 = float(np.finfo(np.float32).eps)


# --- schedule -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "warmup", "final"),
    [(10, 1, 0.1), (100, 30, 0.0), (50, 0, 0.2), (20, 20, 0.1), (1, 0, 1.0)],
)
def test_schedule_is_its_formula(steps, warmup, final):
    schedule = optimizer.unit_schedule(steps, warmup, final)
    for step in range(steps + 5):
        if step < warmup:
            expected = (step + 1) / (warmup + 1)
        else:
            along = min((step - warmup) / max(steps - warmup, 1), 1)
            expected = final + (1 - final) * (1 + math.cos(math.pi * along)) / 2
        assert float(schedule(step)) == pytest.approx(expected, abs=1e-6), step


def test_schedule_wastes_no_step_and_never_passes_the_peak():
    factors = [float(optimizer.unit_schedule(40, 10, 0.1)(s)) for s in range(41)]
    assert min(factors) > 0
    assert max(factors) == factors[10] == 1
    assert factors == sorted(factors[:11]) + sorted(factors[11:], reverse=True)
    assert factors[-1] == pytest.approx(0.1, abs=1e-6)


def test_schedule_of_a_traced_step_is_the_same():
    schedule = optimizer.unit_schedule(40, 10, 0.1)
    steps = jnp.arange(45)
    np.testing.assert_allclose(
        jax.jit(jax.vmap(schedule))(steps), [float(schedule(int(s))) for s in steps], atol=1e-6
    )


# --- AdamW ----------------------------------------------------------------------------------------


def _adamw_in_numpy(params, gradients, beta1, beta2, eps, decay, rate):
    """Return the parameters after every step: Loshchilov and Hutter 2019, algorithm 2, float64."""
    params = {k: v.astype(np.float64) for k, v in params.items()}
    mean = {k: np.zeros_like(v) for k, v in params.items()}
    square = {k: np.zeros_like(v) for k, v in params.items()}
    history = []
    for t, gradient in enumerate(gradients, start=1):
        for k, g in gradient.items():
            g = g.astype(np.float64)
            mean[k] = beta1 * mean[k] + (1 - beta1) * g
            square[k] = beta2 * square[k] + (1 - beta2) * g**2
            mean_hat, square_hat = mean[k] / (1 - beta1**t), square[k] / (1 - beta2**t)
            wanted = decay if k in ("kernel", "embedding", "positions") else 0
            params[k] = params[k] - rate * (
                mean_hat / (np.sqrt(square_hat) + eps) + wanted * params[k]
            )
        history.append(dict(params))
    return history


def _tree(rng, scale=1.0):
    shapes = {
        "kernel": (3, 4), "embedding": (5, 3), "positions": (2, 3),
        "gain": (3,), "bias": (4,), "write": (),
    }  # fmt: skip
    return {k: (scale * rng.standard_normal(s)).astype(np.float32) for k, s in shapes.items()}


@pytest.mark.parametrize("decay", [0.0, 0.1, 0.5])
def test_adamw_is_the_published_algorithm(decay):
    rng = np.random.default_rng(0)
    params = _tree(rng)
    # From step to step the size of the gradient changes a hundredfold: bias corrections show.
    gradients = [_tree(rng, 10.0 ** (i % 3 - 1)) for i in range(7)]
    beta1, beta2, eps, rate = 0.9, 0.99, 1e-8, 0.03
    expected = _adamw_in_numpy(params, gradients, beta1, beta2, eps, decay, rate)
    transformation = optimizer.adamw(beta1, beta2, eps, jnp.float32(decay))
    state, now = transformation.init(params), params
    for gradient, wanted in zip(gradients, expected, strict=True):
        updates, state = transformation.update(gradient, state, now)
        now = jax.tree.map(lambda p, u: p - rate * u, now, updates)
        for k in wanted:
            # The corrections 1 - beta^t lose digits at t = 1: some tens of epsilon in all.
            np.testing.assert_allclose(now[k], wanted[k], rtol=1e-5, atol=1e-5 * rate, err_msg=k)


def test_decay_is_of_matrices_only():
    params = _tree(np.random.default_rng(1))
    transformation = optimizer.adamw(0.9, 0.99, 1e-8, jnp.float32(0.1))
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = transformation.update(zero, transformation.init(params), params)
    for name in ("kernel", "embedding", "positions"):
        np.testing.assert_allclose(updates[name], 0.1 * params[name], rtol=1e-6)
    for name in ("gain", "bias", "write"):
        np.testing.assert_array_equal(updates[name], np.zeros_like(params[name]))


def test_decay_mask_follows_the_name_of_the_leaf_at_any_depth():
    tree = {"blocks": {"mlp": {"in": {"kernel": 0, "bias": 0}, "pre_norm": {"gain": 0}}},
            "positions": 0, "embedding": 0, "attention": {"write": 0}}  # fmt: skip
    assert optimizer.decay_mask(tree) == {
        "blocks": {"mlp": {"in": {"kernel": True, "bias": False}, "pre_norm": {"gain": False}}},
        "positions": True, "embedding": True, "attention": {"write": False},
    }  # fmt: skip


def test_one_program_serves_every_weight_decay():
    params = _tree(np.random.default_rng(2))

    traced = []

    @jax.jit
    def update(decay, gradient):
        traced.append(decay)
        transformation = optimizer.adamw(0.9, 0.99, 1e-8, decay)
        return transformation.update(gradient, transformation.init(params), params)[0]

    first = update(jnp.float32(0.0), params)
    second = update(jnp.float32(1.0), params)
    assert len(traced) == 1
    np.testing.assert_allclose(
        second["kernel"] - first["kernel"], params["kernel"], rtol=1e-5, atol=1e-6
    )


# --- clipping -------------------------------------------------------------------------------------


def _norm64(tree):
    leaves = [np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(leaves))


def _first(pair):
    return jax.tree.map(lambda x: x[0], pair)


_clip = jax.jit(optimizer.clip, static_argnums=1)
_clip_each = jax.jit(
    lambda g, limit: jax.vmap(lambda one: optimizer.clip(one, limit))(g), static_argnums=1
)
_clip_in_turn = jax.jit(
    lambda g, limit: jax.lax.map(lambda one: optimizer.clip(one, limit), g), static_argnums=1
)


def _with_a_small_neighbour(gradients):
    """A cohort of two whose scale must not be shared: the second member's gradient is small."""
    return jax.tree.map(lambda g: jnp.stack([g, (g * 0 + 1e-3).astype(g.dtype)]), gradients)


WAYS = {
    "plain": optimizer.clip,
    "jit": _clip,
    "vmap": lambda g, limit: _first(_clip_each(_with_a_small_neighbour(g), limit)),
    "map": lambda g, limit: _first(_clip_in_turn(_with_a_small_neighbour(g), limit)),
}
HARD = {
    "1e20 beside 1": [1e20, 1.0],
    "1e38 in every entry": [1e38] * 8,
    "largest float": [float(np.finfo(np.float32).max)] * 3,
    "1e-5 beside 1e38": [1e38, 1e-5],
    "mixed signs": [-3e30, 4e30],
    "just above the limit": [1.0, 1e-3],
    "ordinary": [3.0, -4.0, 12.0],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", HARD)
def test_clipped_gradient_has_the_limit_as_norm_and_keeps_its_direction(way, case):
    padded = HARD[case] + [0.0] * (8 - len(HARD[case]))  # one shape: compiled once
    g = {"a": jnp.array(padded, jnp.float32), "b": jnp.zeros(2, jnp.float32)}
    clipped, _ = WAYS[way](g, 1.0)
    # float64: what float32 should have come to; entries below the smallest normal may be flushed.
    expected = np.asarray(g["a"], np.float64) / _norm64(g)
    np.testing.assert_allclose(
        clipped["a"], expected, rtol=8 * EPS32, atol=float(np.finfo(np.float32).tiny)
    )
    assert _norm64(clipped) == pytest.approx(1, rel=1e-6)
    np.testing.assert_array_equal(clipped["b"], np.zeros(2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("limit", [1e-3, 1.0, 100.0])
def test_norm_of_large_gradients_is_reported(way, limit):
    g = {"a": jnp.array([3e30, 4e30], jnp.float32)}
    _, norm = WAYS[way](g, limit)
    assert float(norm) == pytest.approx(5e30, rel=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("way", WAYS)
def test_half_precision_leaves_are_clipped_and_keep_their_type(way, dtype):
    g = {"half": jnp.full((1000,), 6e4, dtype), "single": jnp.ones((2,), jnp.float32)}
    clipped, norm = WAYS[way](g, 1.0)
    assert clipped["half"].dtype == dtype
    assert clipped["single"].dtype == jnp.float32
    # The norm, 1.9e6, is far above what float16 can hold.
    assert float(norm) == pytest.approx(_norm64(g), rel=1e-5)
    np.testing.assert_allclose(
        np.asarray(clipped["half"], np.float64), 1000**-0.5, rtol=float(jnp.finfo(dtype).eps) + 1e-6
    )


def test_bfloat16_near_its_largest_value():
    g = {"a": jnp.full((4,), 1e38, jnp.bfloat16)}
    clipped, norm = optimizer.clip(g, 1.0)
    np.testing.assert_allclose(np.asarray(clipped["a"], np.float64), 0.5, rtol=2**-8)
    assert float(norm) == pytest.approx(2e38, rel=1e-2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("values", [[0.0, 0.0], [1e-30, -2e-30], [0.3, 0.4], [1e-42, 0.0]])
def test_gradients_within_the_limit_are_left_alone(way, values):
    g = {"a": jnp.array(values, jnp.float32)}
    clipped, norm = WAYS[way](g, 1.0)
    # Subnormal numbers may be flushed to zero by the processor; nothing else may change.
    np.testing.assert_allclose(clipped["a"], g["a"], rtol=0, atol=float(np.finfo(np.float32).tiny))
    if max(map(abs, values)) > 1e-37:
        np.testing.assert_array_equal(clipped["a"], g["a"])
        assert float(norm) == pytest.approx(_norm64(g), rel=1e-6)
    assert np.isfinite(norm)


def test_small_gradients_are_clipped_at_a_smaller_limit():
    # Squares of 1e-25 are below float32's range: a plain norm would be 0 and clip nothing.
    clipped, norm = optimizer.clip({"a": jnp.array([3e-25, 4e-25], jnp.float32)}, 1e-26)
    assert float(norm) == pytest.approx(5e-25, rel=1e-5)
    np.testing.assert_allclose(clipped["a"], [6e-27, 8e-27], rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_limit_zero_switches_clipping_off(way):
    g = {"a": jnp.array([1e20, 1.0], jnp.float32), "h": jnp.array([6e4], jnp.float16)}
    clipped, norm = WAYS[way](g, 0)
    np.testing.assert_array_equal(clipped["a"], g["a"])
    np.testing.assert_array_equal(clipped["h"], g["h"])
    assert float(norm) == pytest.approx(1e20, rel=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("way", WAYS)
def test_a_non_finite_entry_is_not_hidden(way, bad):
    """The step has to see it: in the norm and in the gradient, whatever the limit."""
    clipped, norm = WAYS[way]({"a": jnp.array([bad, 1.0], jnp.float32), "b": jnp.ones(1)}, 1.0)
    assert not np.isfinite(float(norm))
    assert not np.isfinite(np.asarray(clipped["a"])).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("limit", [0.1, 1.0, 30.0])
def test_ordinary_gradients_are_clipped_as_optax_does(scale, limit):
    g = _tree(np.random.default_rng(3), scale)
    expected, _ = optax.clip_by_global_norm(limit).update(g, optax.EmptyState())
    clipped, norm = optimizer.clip(g, limit)
    assert float(norm) == pytest.approx(float(optax.tree.norm(g)), rel=1e-6)
    for k in g:
        np.testing.assert_allclose(clipped[k], expected[k], rtol=1e-6, err_msg=k)


@pytest.mark.parametrize("exponent", range(-120, 126, 15))
def test_norm_scales_with_its_argument(exponent):
    """|2^k g| = 2^k |g|, for every k whose result float32 can hold."""
    g = np.random.default_rng(4).standard_normal(50).astype(np.float32)
    m, c = optimizer.global_norm({"a": jnp.asarray(np.ldexp(g, exponent))})
    assert float(m) * float(c) == pytest.approx(np.ldexp(_norm64({"a": g}), exponent), rel=1e-6)
