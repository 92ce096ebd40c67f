"""The decoder's parts as functions, and their closed-form Jacobians against autodiff of them."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.decoder import Decoder, DecoderConfig
from normjax.equation import Sublayer
from normjax.errors import UserError
from normjax.jacobians import views
from normjax.jacobians.blocks import Parts
from normjax.jacobians.branch_jacobians import (
    attention_jacobian,
    attention_token_jacobians,
    mlp_jacobian,
    softmax_jacobian,
)
from normjax.jacobians.verification import SCALES, verify
from normjax.layers import MLP, Attention
from normjax.nonlinearities import NONLINEARITIES
from normjax.placement import Placement
from normjax.placements import COMMON, PLACEMENTS

WIDTH, LENGTH, DEPTH, VOCABULARY = 8, 4, 3, 11


def parameters(model, seed=1):
    """Parameters as after some training: gains and biases are not what they start at."""
    rng = np.random.default_rng(seed)
    start = 1.0 - sum(p.offset for p in model.config.norm_row.parameters)

    def draw(path, leaf):
        name, z = path[-1].key, rng.standard_normal(leaf.shape)
        if name == "kernel":
            return z / leaf.shape[-2] ** 0.5
        return z if name == "embedding" else 0.3 * z + (start if name == "gain" else 0.0)

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def make(**changes):
    config = DecoderConfig(**{"depth": DEPTH, "width": WIDTH, "heads": 2, **changes})
    model = Decoder(config, VOCABULARY, LENGTH)
    return Parts(model, parameters(model))


def stream(seed=0, scale=1.0, length=LENGTH, width=WIDTH):
    return scale * np.random.default_rng(seed).standard_normal((length, width))


def relative(got, expected):
    size = np.max(np.abs(expected))
    return np.max(np.abs(got - expected)) / size if size > 0 else np.max(np.abs(got))


def jacfwd(fn, h):
    """The referee, in float64; not jitted, so that it is compiled once for all points."""
    with jax.enable_x64(True):
        return np.asarray(jax.jacfwd(fn)(jnp.asarray(h)))


@pytest.fixture(scope="module")
def pre():
    return make()


# --- branches -------------------------------------------------------------------------------------

VALUES_TOO = Placement(
    "values over heads",
    "here",
    Sublayer(inner_norms=("query", "key over heads", "value over heads")),
)
ATTENTIONS = [
    {},
    {"kv_heads": 2},
    {"kv_heads": 1, "bias": True, "positions": "none"},
    {"qk_norm": True},
    {"qk_norm": True, "norm": "layernorm", "norm_eps": 1e-2, "kv_heads": 2},
    {"qk_norm": True, "qk_norm_over": "heads"},
    {
        "qk_norm": True,
        "qk_norm_over": "heads",
        "norm": "layernorm",
        "norm_eps": 1e-2,
        "kv_heads": 2,
        "bias": True,
    },
    {"placement": VALUES_TOO, "norm_eps": 1e-2, "kv_heads": 2},
    {"qk_norm": True, "norm": "prmsnorm", "norm_eps": 1e-2},
    {"attention_softcap": 1.5},
    {"kv_heads": 2, "qk_norm": True, "attention_softcap": 1.5, "bias": True},
    {"head_features": 6, "kv_heads": 2, "attention_scale": 0.3, "rotary_base": 50.0},
    {"rotary_share": 0.5, "kv_heads": 2},
    {"local_blocks": (1,), "local_window": 2, "local_rotary_base": 30.0},
]


@pytest.mark.parametrize("changes", ATTENTIONS, ids=lambda c: "-".join(c) or "plain")
def test_attention_equals_autodiff_of_the_decoders_own_module(changes):
    with jax.enable_x64(True):
        wide = {"dtype": "float64", "param_dtype": "float64", "init": "fan_in"}
        config = DecoderConfig(width=16, heads=4, **wide, **changes)
        x = np.random.default_rng(0).standard_normal((5, 16))
        module = Attention(config)
        shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.asarray(x)[None])["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: 0.5 * rng.standard_normal(leaf.shape), shapes)
    local = bool(config.local_blocks)
    function = lambda x: module.apply({"params": params}, x, local=local)  # noqa: E731
    future = np.triu_indices(5, 1)
    for scale in (0.0, 1.0, 30.0):
        expected = jacfwd(lambda x: function(x[None])[0], scale * x)
        got = attention_jacobian(config, params, scale * x, local)
        assert relative(got, expected) < 1e-13
        assert not np.any(got[future[0], :, future[1]])  # causal, exactly
        own = attention_token_jacobians(config, params, scale * x, local)
        diagonal = np.einsum("iaib->iab", got)
        np.testing.assert_allclose(own, diagonal, 0, 1e-14 * np.max(np.abs(got)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", NONLINEARITIES)
def test_mlp_equals_autodiff_of_the_decoders_own_module(kind, bias):
    with jax.enable_x64(True):
        wide = {"dtype": "float64", "param_dtype": "float64", "init": "fan_in"}
        config = DecoderConfig(width=8, heads=2, mlp=kind, bias=bias, **wide)
        module = MLP(config)
        shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, 8)))["params"]
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: 0.5 * rng.standard_normal(leaf.shape), shapes)
    function = views.as_function(module, {"params": params})
    closed = lambda x: mlp_jacobian(config, params, x)  # noqa: E731
    # Beyond saturation autodiff of the smooth ones is rounding times a power of x.
    scales = SCALES if kind in ("relu", "none") else SCALES[:3]
    verify(function, closed, stream()[0], tolerance=1e-13, scales=scales).check()


def test_softmax_of_two_logits_by_hand():
    """p(1 - p) at logits (1, 2) and, ten times as large, at (10, 20): a factor of 2166."""
    J = softmax_jacobian([[1.0, 2.0], [10.0, 20.0]])
    p = 1 / (1 + np.e)
    np.testing.assert_allclose(J[0], p * (1 - p) * np.array([[1, -1], [-1, 1]]), rtol=1e-15)
    p = 1 / (1 + np.exp(10))
    np.testing.assert_allclose(J[1], p * (1 - p) * np.array([[1, -1], [-1, 1]]), rtol=1e-15)
    assert p == pytest.approx(4.5398e-5, rel=1e-5)


def test_softmax_equals_autodiff_and_is_bounded_by_a_half():
    x = np.random.default_rng(0).standard_normal(9) * 3
    verify(jax.nn.softmax, softmax_jacobian, x).check()
    J = softmax_jacobian(np.random.default_rng(1).standard_normal((50, 6)) * 5)
    assert np.linalg.norm(J, 2, axis=(-2, -1)).max() <= 0.5
    np.testing.assert_allclose(J.sum(-1), 0, atol=1e-16)


def test_softmax_keeps_the_digits_of_a_saturated_row():
    J = softmax_jacobian([0.0, 100.0])
    assert J[1, 1] == pytest.approx(np.exp(-100), rel=1e-14, abs=0)


def test_softmax_of_a_masked_row_is_finite():
    x = np.random.default_rng(0).standard_normal((2, 3))
    J = softmax_jacobian(x, where=[[True, False, True], [False, False, False]])
    assert np.all(np.isfinite(J)) and not np.any(J[1])
    np.testing.assert_allclose(J[0][::2, ::2], softmax_jacobian(x[0, ::2]), rtol=1e-15)
    assert not np.any(J[0][1]) and not np.any(J[0][:, 1])


# --- functions ------------------------------------------------------------------------------------


def test_the_parts_together_are_the_decoder():
    for changes in (
        {
            "placement": "layernorm_scaling",
            "positions": "learned",
            "output_softcap": 3.0,
            "tied": False,
            "bias": True,
        },
        {"placement": "deepnorm", "scan_layers": True, "remat": True, "attention": "none"},
    ):
        parts = make(depth=2, **changes)
        tokens = np.array([[1, 5, 2, 10], [3, 3, 0, 7]])
        with jax.enable_x64(True):
            expected = np.asarray(parts.model.apply(parts.params, jnp.asarray(tokens)))
        stack = parts.stack(1, 2)
        together = np.asarray(parts.logits(stack(parts.embed(tokens))))
        assert together.dtype == np.float64
        np.testing.assert_allclose(together, expected, rtol=0, atol=1e-13)
        one = np.asarray(parts.logits(stack(parts.embed(tokens[1]))))
        np.testing.assert_allclose(one, expected[1], rtol=0, atol=1e-13)

    states = np.asarray(parts.hidden_states(tokens))
    with jax.enable_x64(True):
        own = np.asarray(parts.model.hidden_states(parts.params, jnp.asarray(tokens)))
    np.testing.assert_allclose(states, own, rtol=0, atol=1e-13)
    np.testing.assert_allclose(states[2], np.asarray(parts.block(2)(states[1])), atol=1e-14)


def test_a_block_is_its_sublayers(pre):
    h = stream()
    after = pre.sublayer(2, "mlp")(pre.sublayer(2, "attention")(h))
    np.testing.assert_array_equal(np.asarray(pre.block(2)(h)), np.asarray(after))
    assert [str(p) for p in (pre.sublayer(2, "mlp"), pre.block(2), pre.stack(1, 2))] == [
        "mlp of block 2", "block 2", "blocks 1 to 2",
    ]  # fmt: skip


CASES = [
    *(pytest.param(name, {}, marks=() if name in COMMON else pytest.mark.slow)
      for name in PLACEMENTS),
    ("post", {"norm_eps": 0.0}),
    pytest.param("sandwich", {"norm_eps": 0.0}, marks=pytest.mark.slow),
    *((name, {"residual": False}) for name in ("pre", "post")),
    *(pytest.param(name, {"residual": False}, marks=pytest.mark.slow)
      for name in PLACEMENTS if name not in ("pre", "post")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), CASES, ids=str)
def test_every_sublayer_equals_autodiff_at_every_scale(name, changes):
    """The closed form of the real sub-layers, composed by the placement, against jax.jacfwd."""
    # Autodiff of the tanh form of GELU multiplies the rounding of 1 - tanh^2 by x^3: at 1e3 it is
    # off by 1e-8 of the slope; what a norm has not scaled goes through a ReLU here.
    mlp = "gelu" if PLACEMENTS[name].of("mlp").pre_norm else "relu"
    parts = make(placement=name, mlp=mlp, **changes)
    for sublayer in ("attention", "mlp"):
        part = parts.sublayer(2, sublayer)
        for scale in SCALES:
            h = stream(scale=scale, width=parts.config.state_width)
            expected = jacfwd(part, h)
            assert relative(part.sequence_jacobian(h), expected) < 1e-13, (sublayer, scale)
            own = np.einsum("iaib->iab", expected)
            assert np.max(np.abs(part.token_jacobians(h) - own)) <= 1e-13 * np.max(np.abs(expected))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm_offset", "identity"])
def test_other_norms_in_a_stack(norm):
    parts = make(norm=norm, placement="sandwich", mlp="swiglu", bias=True)
    part, h = parts.stack(1, 2), stream()
    expected = jacfwd(part, h)
    assert relative(part.sequence_jacobian(h), expected) < 1e-13
    own = np.einsum("iaib->iab", expected)
    assert relative(part.token_jacobians(h), own) < 1e-13


def test_the_views_agree_with_each_other_and_with_jacfwd(pre):
    part, h = pre.stack(2, 3), stream()
    expected = jacfwd(part, h)
    whole = views.sequence_jacobian(part, h, chunk=5)
    assert relative(whole, expected) < 1e-14
    np.testing.assert_allclose(views.pair_jacobian(part, h, 3, 1), expected[3, :, 1], atol=1e-14)
    np.testing.assert_allclose(views.pair_jacobian(part, h, -1, 0), expected[3, :, 0], atol=1e-14)
    assert not np.any(views.pair_jacobian(part, h, 1, 2))  # the future
    tokens = views.token_jacobians(part, h)
    np.testing.assert_allclose(tokens, np.einsum("iaib->iab", expected), atol=1e-14)
    assert relative(part.token_jacobians(h), tokens) < 1e-14
    batch = part.token_jacobians(np.stack([h, 2 * h]))
    np.testing.assert_array_equal(batch[0], part.token_jacobians(h))


def test_a_token_jacobian_is_that_of_the_last_token_with_the_others_frozen(pre):
    """Finite differences of the decoder itself: outside truth for what the view means."""
    part, h, step = pre.block(1), stream(), 1e-5
    J = part.token_jacobians(h)
    for i in (0, LENGTH - 1):
        moved = np.array(h)
        moved[i, 3] += step
        back = np.array(h)
        back[i, 3] -= step
        slope = (np.asarray(part(moved)) - np.asarray(part(back)))[i] / (2 * step)
        np.testing.assert_allclose(J[i, :, 3], slope, atol=1e-8)


def test_a_decoder_without_sublayers_is_the_identity():
    parts = make(attention="none", mlp="none")
    np.testing.assert_array_equal(np.asarray(parts.block(1)(stream())), stream())
    np.testing.assert_array_equal(parts.block(1).token_jacobians(stream())[2], np.eye(WIDTH))
    np.testing.assert_array_equal(
        parts.block(1).sequence_jacobian(stream()).reshape(32, 32), np.eye(32)
    )
    parts = make(attention="none")
    whole = parts.block(1).sequence_jacobian(stream())
    assert not np.any(whole[0, :, 1]) and np.any(whole[1, :, 1])


def test_any_flax_module_is_a_function():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, scale=1.0):
            y = nn.LayerNorm(use_fast_variance=False)(x)
            return x + scale * nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(7)(y)))

    module, x = Block(), stream()
    variables = module.init(jax.random.key(0), jnp.ones((1, WIDTH)))
    f = views.as_function(module, variables, scale=0.5)
    np.testing.assert_allclose(f(x), module.apply(variables, jnp.asarray(x), 0.5), atol=1e-5)
    whole = views.sequence_jacobian(f, x)
    own = views.token_jacobians(f, x)
    np.testing.assert_allclose(np.einsum("iaib->iab", whole), own, atol=1e-15)
    step = np.zeros_like(x)
    step[1, 2] = 1e-6
    slope = (np.asarray(f(x + step)) - np.asarray(f(x - step))) / 2e-6
    np.testing.assert_allclose(whole[:, :, 1, 2], slope, atol=1e-8)


def test_a_flax_module_that_computes_in_float32_is_refused():
    layer = nn.Dense(3, dtype=jnp.float32)
    f = views.as_function(layer, layer.init(jax.random.key(0), jnp.ones((1, 2))))
    with pytest.raises(UserError, match="Dense: returns float32 for a float64 input"):
        f(np.ones((1, 2)))
    with pytest.raises(UserError, match=r"must have apply\(variables, x\)"):
        views.as_function(lambda x: x, {})


# --- 64-bit mode and seeds ------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_model_before_and_after():
    model = Decoder(DecoderConfig(depth=2, width=8, heads=2), VOCABULARY, LENGTH)
    before = model.init(jax.random.key(7))
    logits = model.apply(before, jnp.arange(4)[None])
    parts = Parts(model, before)
    part = parts.stack(1, 2)
    h = parts.embed(np.arange(4))
    part.token_jacobians(h)
    views.sequence_jacobian(part, h)
    assert not jax.config.jax_enable_x64
    after = model.init(jax.random.key(7))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert old.dtype == new.dtype == jnp.float32
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(logits, model.apply(after, jnp.arange(4)[None]))
    with jax.enable_x64(True):
        part.sequence_jacobian(h)
        assert jax.config.jax_enable_x64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_decoder_of_any_dtype_is_analysed_in_float64(dtype):
    config = DecoderConfig(depth=2, width=8, heads=2, dtype=dtype, param_dtype=dtype)
    model = Decoder(config, VOCABULARY, LENGTH)
    parts = Parts(model, jax.tree.map(lambda x: jnp.asarray(x, dtype), parameters(model)))
    h = jnp.asarray(stream(), dtype)  # exactly representable numbers either way
    out = parts.block(1)(h)
    assert out.dtype == np.float64
    expected = jacfwd(parts.block(1), np.asarray(h, np.float64))
    assert relative(parts.block(1).sequence_jacobian(h), expected) < 1e-14


# --- bad input ------------------------------------------------------------------------------------


def test_bad_input_is_named(pre):
    bad = stream()
    bad[1, 2] = np.nan
    checks = [
        (lambda: pre.block(4), "block=4: must be from 1 to 3"),
        (lambda: pre.block(0), "block=0: must be from 1 to 3"),
        (lambda: pre.stack(3, 2), "first=3: must be at most last=2"),
        (lambda: pre.sublayer(1, "mpl"), "sublayer=mpl: must be one of .*did you mean 'mlp'"),
        (lambda: pre.block(1)(np.ones(8)), r"h of shape \(8,\): must be \(T, 8\)"),
        (lambda: pre.block(1)(np.ones((2, 9))), r"h of shape \(2, 9\): must be \(T, 8\)"),
        (lambda: pre.block(1)(bad), "h: an entry is not finite"),
        (lambda: pre.block(1).token_jacobians(bad), "h: an entry is not finite"),
        (lambda: pre.embed([0, 11]), r"tokens from 0 to 11: must be in 0..10"),
        (lambda: pre.embed([0] * 5), "tokens of length 5: must be from 1 to 4"),
        (lambda: pre.embed([0.5]), "must be integers"),
        (lambda: pre.block(1).sequence_jacobian(np.ones((513, 8))), "at most 4096.*krylov"),
        (lambda: pre.block(1).sequence_jacobian(np.ones((1, 2, 8))), "must be one sequence"),
        (lambda: views.sequence_jacobian(pre.block(1), np.ones((513, 8))), "at most 4096"),
        (lambda: views.sequence_jacobian(lambda x: x, stream(), chunk=0), "must be at least 1"),
        (lambda: views.pair_jacobian(pre.block(1), stream(), 4, 0), "i=4: must be a position"),
        (lambda: views.token_jacobians(pre.block(1), bad), r"h\[1, 2\]=nan"),
        (lambda: views.token_jacobians(lambda x: x, np.ones(3)), r"must be a sequence \(T, d\)"),
        (lambda: views.token_jacobians(lambda x: x.astype("float32"), stream()), "in float32"),
        (lambda: views.sequence_jacobian(jnp.sqrt, -np.ones(3)), "NaN or infinity"),
    ]
    for call, message in checks:
        with pytest.raises(UserError, match=message):
            call()


def test_parameters_that_are_not_finite_are_named(pre):
    model = Decoder(DecoderConfig(depth=1, width=8, heads=2), VOCABULARY, LENGTH)
    params = parameters(model)
    params["embedding"][0, 0] = np.inf
    with pytest.raises(UserError, match=r"params\['embedding'\]: a value is not finite"):
        Parts(model, params)


def test_an_output_out_of_range_is_named():
    parts = make(placement="none", attention="none", mlp="swiglu")
    with pytest.raises(UserError, match="the output of mlp of block 1 is not finite"):
        parts.block(1)(np.full((2, WIDTH), 1e200))


def test_a_config_is_copied_not_changed():
    model = Decoder(DecoderConfig(depth=1, width=8, heads=2), VOCABULARY, LENGTH)
    copy = dataclasses.replace(model)
    Parts(model, parameters(model))
    assert model == copy and model.config.dtype == "float32"
