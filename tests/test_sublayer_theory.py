"""Predicted spectra of the decoder's sub-layers at initialization against their dense Jacobians."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad

from normjax.decoder import Decoder, DecoderConfig
from normjax.errors import UserError
from normjax.nonlinearities import NONLINEARITIES
from normjax.theory.layer_scale import attention_branch, gauss_hermite, mlp_branch
from normjax.theory.matrix_products import ProductLaw
from normjax.theory.sublayer_theory import dependent_weights, predict

WIDTH, LENGTH = 192, 8


@functools.cache
def setup(**changes):
    config = DecoderConfig(**{"depth": 4, "width": WIDTH, "heads": 4} | changes)
    model = Decoder(config, vocabulary=11, window=LENGTH)
    params = jax.jit(model.init)(jax.random.key(0))
    h = jax.random.normal(jax.random.key(1), (LENGTH, WIDTH), jnp.float32)
    return config, params, h * config.initialization.embedding_stddev(WIDTH)


def sublayer(config, params, block, name):
    model = Decoder(config, vocabulary=11, window=LENGTH)
    layer = model.layer(params, block + 1)
    return lambda h: model.block(layer, h[None], name)[0]


def spectrum(function, h, position):
    own = jax.jit(jax.jacfwd(lambda v: function(h.at[position].set(v))[position]))
    jacobian = own(h[position])
    return np.linalg.svd(np.asarray(jacobian, np.float64), compute_uv=False)[::-1]


def mean_square(h):
    return float(jnp.mean(h.astype(jnp.float32) ** 2))


CASES = [
    {"mlp": "gelu"},
    {"mlp": "relu"},
    {"mlp": "swiglu"},
    {"mlp": "gelu", "norm": "layernorm", "init": "fan_in", "bias": True},
    {"mlp": "gelu", "placement": "none", "init": "fan_in"},
    {"mlp": "gelu", "placement": "layernorm_scaling"},
    {"mlp": "gelu", "residual": False},
]


@pytest.mark.parametrize("changes", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_mlp_sublayer(changes):
    """At d = 192: sigma to 3 %, the upper edge to 8 % (edges fluctuate inward as d^(-2/3))."""
    config, params, h = setup(**changes)
    block = 1
    function = sublayer(config, params, block, "mlp")
    s = spectrum(function, h, 0)
    prediction = predict(config, params, block, "mlp", mean_square(h[0]))
    law = prediction.law
    assert law.mean_square == pytest.approx(np.mean(s**2), rel=0.04)
    assert s[-1] == pytest.approx(law.edges()[1], rel=0.08)
    part = law.cdf(s)
    assert np.max(np.abs(part - (np.arange(WIDTH) + 0.5) / WIDTH)) < 0.025
    assert mean_square(function(h)[0]) == pytest.approx(prediction.mean_square, rel=0.15)
    assert "initialization" in prediction.assumption and "\n" not in prediction.assumption


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_layernorm_divides_by_the_variance(placement):
    """A stream with a mean far above its spread: its mean square says nothing of LayerNorm."""
    config, params, h = setup(norm="layernorm", placement=placement, init="fan_in")
    h = h + 3 * mean_square(h[0]) ** 0.5
    s = spectrum(sublayer(config, params, 1, "mlp"), h, 0)
    ranks = (np.arange(WIDTH) + 0.5) / WIDTH
    told = predict(config, params, 1, "mlp", mean_square(h[0]), mean=float(jnp.mean(h[0])))
    assert np.max(np.abs(told.law.cdf(s) - ranks)) < 0.04
    blind = predict(config, params, 1, "mlp", mean_square(h[0]))
    assert np.max(np.abs(blind.law.cdf(s) - ranks)) > 0.2
    after = sublayer(config, params, 1, "mlp")(h)[0]
    assert told.mean_square == pytest.approx(mean_square(after), rel=0.15)
    assert told.mean == pytest.approx(float(jnp.mean(after)), abs=0.3 * mean_square(after) ** 0.5)
    with pytest.raises(UserError, match="mean=2.0: its square must be at most mean_square=1.0"):
        predict(config, params, 1, "mlp", 1.0, mean=2.0)


@pytest.mark.parametrize("counts", [(8,), (5, 3), (1,) * 8])
def test_repeated_tokens_are_counted_exactly(counts):
    """Simulated: o = sum_k w_k v_k, and Cov_w(v, k), over independent normal v and k."""
    rng, w = np.random.default_rng(0), np.array(counts) / 8
    v, k = rng.normal(size=(2, 20000, len(w), 3))
    mean_v, mean_k = np.einsum("i,nic->nc", w, v), np.einsum("i,nic->nc", w, k)
    cov = np.einsum("i,nic,nie->nce", w, v, k) - np.einsum("nc,ne->nce", mean_v, mean_k)
    value, output = np.eye(4), np.eye(4)
    own = [attention_branch(value, output, position=7, logit_variance=r2, shares=w)
           for r2 in (0.0, 1.0)]  # fmt: skip
    assert own[0].strengths == pytest.approx(1 / 64)
    moved = own[1].strengths - own[0].strengths
    assert moved == pytest.approx(np.mean(cov**2), rel=0.03, abs=1e-12)
    assert own[0].mean_square == pytest.approx(np.mean(mean_v**2), rel=0.03)
    if len(w) == 8:  # as without shares
        plain = attention_branch(value, output, position=7, logit_variance=1.0)
        assert plain.strengths == pytest.approx(own[1].strengths, rel=1e-14)
        assert plain.mean_square == pytest.approx(own[1].mean_square, rel=1e-14)


def test_weights_at_initialization_count_as_independent_and_others_do_not():
    for changes in ({}, {"mlp": "swiglu"}, {"kv_heads": 2}):
        config, params, _ = setup(width=48, depth=2, **changes)
        assert dependent_weights(config, params, 0) == dependent_weights(config, params, 1) == []
    rng = np.random.default_rng(0)
    copy = jax.tree.map(lambda x: np.array(x), params)
    branch = copy["blocks"]["mlp"]["branch"]
    branch["out"]["kernel"] = np.swapaxes(branch["in"]["kernel"], -1, -2)
    assert dependent_weights(config, copy, 0) == ["mlp in and out: are not independent"]
    along = rng.normal(size=(48, 1)) * rng.normal(size=(1, branch["in"]["kernel"].shape[-1]))
    branch["in"]["kernel"] = along[None] + 0 * branch["in"]["kernel"]
    assert "mlp in: has preferred directions" in dependent_weights(config, copy, 0)


@pytest.mark.parametrize(
    ("branch", "change", "said"),
    [
        ("mlp", lambda w: {"gate": w["in"]}, "in and gate: are not independent"),
        ("attention", lambda w: {"key": w["value"]}, "key and value: are not independent"),
        # The last query head of each group of two, which has 12 channels.
        ("attention", lambda w: {"query": np.stack([w["query"][..., :12], w["key"][..., :12],
                                                    w["query"][..., 24:36], w["key"][..., 12:]],
                                                   -2).reshape(w["query"].shape)},
         "query and key: are not independent"),
        ("mlp", lambda w: {"out": np.broadcast_to(w["out"][:1], w["out"].shape)},
         "out: is not independent of another block's"),
    ],
)  # fmt: skip
def test_any_two_matrices_that_meet_are_told_when_they_are_the_same(branch, change, said):
    config, params, _ = setup(width=48, heads=4, kv_heads=2, mlp="swiglu", depth=2)
    copy = jax.tree.map(np.asarray, params)
    own = copy["blocks"][branch]["branch"]
    made = change({name: own[name]["kernel"] for name in own})
    own |= {name: {"kernel": kernel} for name, kernel in made.items()}
    assert dependent_weights(config, copy, 0) == [f"{branch} {said}"]


def test_two_layer_form_is_closer_than_the_gaussian():
    config, params, h = setup(mlp="relu")
    s = spectrum(sublayer(config, params, 0, "mlp"), h, 0)
    prediction = predict(config, params, 0, "mlp", mean_square(h[0]))
    assert prediction.gaussian.sigma == prediction.sigma
    assert prediction.gaussian.edges()[1] < 0.93 * s[-1]
    assert prediction.law.edges()[1] == pytest.approx(s[-1], rel=0.05)


def branch_mean_square(config, params, h):
    """Of the MLP's output before any norm behind it, measured."""
    pieces = Decoder(config, vocabulary=11, window=LENGTH).pieces(params, 1, "mlp")
    x = pieces["pre_norm"](h) if "pre_norm" in pieces else h
    return mean_square(pieces["branch"](x[None])[0, 0])


SLOWER = (pytest.param(p, marks=pytest.mark.slow) for p in ("branch_output", "deepnorm"))


@pytest.mark.parametrize("placement", ["sandwich", "post", *SLOWER])
def test_norms_behind_the_branch(placement):
    """The radial direction, one singular value in d, is left out: quartiles are compared.

    A predicted mean square of d numbers has a standard deviation of sqrt(2/d) = 10 %, a measured
    one has none.
    """
    config, params, h = setup(placement=placement)
    s = spectrum(sublayer(config, params, 0, "mlp"), h, 0)
    quartiles, ms = np.quantile(s, [0.25, 0.5, 0.75]), mean_square(h[0])
    predicted = predict(config, params, 0, "mlp", ms).law
    np.testing.assert_allclose(quartiles, predicted.quantile([0.25, 0.5, 0.75]), rtol=0.12)
    output = branch_mean_square(config, params, h)
    informed = predict(config, params, 0, "mlp", ms, branch_mean_square=output).law
    np.testing.assert_allclose(quartiles, informed.quantile([0.25, 0.5, 0.75]), rtol=0.035)


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2}], ids=["heads", "grouped"])
@pytest.mark.parametrize("position", [0, 1, 7])
def test_attention_sublayer(changes, position):
    config, params, h = setup(**changes)
    s = spectrum(sublayer(config, params, 0, "attention"), h, position)
    prediction = predict(
        config, params, 0, "attention", mean_square(h[position]), position=position
    )
    lower, upper = prediction.law.edges()
    assert s[-1] == pytest.approx(upper, rel=0.06)
    assert s[0] == pytest.approx(lower, rel=0.06, abs=0.06)
    assert f"over {position + 1} distinct tokens" in prediction.assumption


def test_attention_that_is_not_uniform_has_no_law():
    config, params, h = setup(qk_norm=True)
    prediction = predict(config, params, 0, "attention", mean_square(h[3]), position=3)
    assert prediction.law is None and prediction.sigma is None and prediction.gaussian is None
    assert prediction.assumption.startswith("no law: attention logits have a standard deviation")
    first = predict(config, params, 0, "attention", mean_square(h[0]), position=0)
    assert first.law is not None  # one token: its weight is 1 whatever the logits


@pytest.mark.parametrize("name", ["attention", "mlp"])
def test_norms_that_start_as_rmsnorm_have_its_law(name):
    """ScaleNorm's gain sqrt(d) undoes its division by the length; and none for what states none."""
    said = []
    for norm in ("rmsnorm", "scalenorm", "rmsnorm_simple"):
        config, params, h = setup(norm=norm, norm_eps=0.0)
        said.append(predict(config, params, 0, name, mean_square(h[0])).law.edges())
    np.testing.assert_allclose(said[1:], [said[0]] * 2, rtol=1e-5)
    for norm, why in (("dyt", "DyT states none"), ("affine", "gain and shift .* learns shift")):
        config, params, h = setup(norm=norm)
        found = predict(config, params, 0, name, mean_square(h[0]))
        assert found.law is None and re.search(why, found.assumption)


def test_a_stack_of_mlps_from_the_embedding_and_from_the_measured_stream():
    depth = 8
    config, params, h = setup(depth=depth, attention="none")
    parts = [sublayer(config, params, block, "mlp") for block in range(depth)]

    def stack(v):
        return functools.reduce(lambda x, part: part(x), parts, v[None])[0]

    jacobian = np.asarray(jax.jit(jax.jacfwd(stack))(h[0]), np.float64)
    s = np.linalg.svd(jacobian, compute_uv=False)[::-1]
    laws, ms = [], mean_square(h[0])
    for block in range(depth):
        prediction = predict(config, params, block, "mlp", ms)
        laws, ms = [*laws, prediction.law], prediction.mean_square
    alone = ProductLaw(laws)
    assert s[-1] == pytest.approx(alone.edges()[1], rel=0.15)
    assert np.mean(s**2) == pytest.approx(alone.mean_square, rel=0.15)
    laws, x = [], h[:1]
    for block, part in enumerate(parts):
        laws, x = [*laws, predict(config, params, block, "mlp", mean_square(x)).law], part(x)
    informed = ProductLaw(laws)
    # Edges are those of infinite d: draws of this product lie 6 % inside at d = 192, 2 % at 384.
    assert 0.87 < s[-1] / informed.edges()[1] < 1.03
    assert np.mean(s**2) == pytest.approx(informed.mean_square, rel=0.06)
    some, fractions = s[::8], (np.arange(WIDTH)[::8] + 0.5) / WIDTH
    assert np.max(np.abs(informed.cdf(some) - fractions)) < 0.025


@pytest.mark.parametrize("name", NONLINEARITIES)
def test_activations_are_those_of_the_decoder(name):
    x = np.linspace(-5, 5, 41)
    with jax.enable_x64(True):
        theirs = np.asarray(NONLINEARITIES[name].function(jnp.asarray(x, jnp.float64)))
        slopes = np.asarray(
            jax.vmap(jax.grad(NONLINEARITIES[name].function))(jnp.asarray(x, jnp.float64))
        )
    np.testing.assert_allclose(NONLINEARITIES[name].value(x), theirs, atol=1e-14)
    away = x != 0
    np.testing.assert_allclose(NONLINEARITIES[name].slope(x)[away], slopes[away], atol=1e-14)


@pytest.mark.parametrize("name", NONLINEARITIES)
def test_gauss_hermite_against_adaptive_quadrature(name):
    z, w = gauss_hermite()

    def integrand(x):
        normal = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        return float(NONLINEARITIES[name].slope(np.asarray(0.9 * x)) ** 2) * normal

    exact = quad(integrand, -12, 12, points=[0.0], epsabs=1e-12)[0]
    assert w @ NONLINEARITIES[name].slope(0.9 * z) ** 2 == pytest.approx(exact, abs=1e-8)


def test_gain_slope_and_shift_enter():
    rng = np.random.default_rng(0)
    w_in, w_out = rng.standard_normal((32, 64)), rng.standard_normal((64, 32))
    gain = rng.uniform(0.5, 2, 32)
    plain = mlp_branch("gelu", gain[:, None] * w_in, w_out)
    gained = mlp_branch("gelu", w_in, w_out, gain=gain, slope=3.0)
    assert gained.weights @ gained.strengths == pytest.approx(9 * plain.weights @ plain.strengths)
    # A shift far above zero opens every relu, one far below closes it.
    full = mlp_branch("relu", w_in, w_out, shift=1e3)
    expected = np.mean(np.sum(w_in**2, 0) * np.sum(w_out**2, 1))
    assert full.weights @ full.strengths == pytest.approx(expected)
    assert mlp_branch("relu", w_in, w_out, shift=-1e3).strengths.max() == 0


def test_mistakes_are_one_line():
    config, params, _ = setup(depth=1)
    good = np.ones((4, 8))
    broken = jax.tree.map(lambda x: x * math.nan, params)
    cases = [
        (lambda: predict(config, params, 1, "mlp", 1.0), "block=1: must be between 0 and 0"),
        (lambda: predict(config, params, 0, "mpl", 1.0), "did you mean 'mlp'?"),
        (lambda: predict(config, params, 0, "mlp", -1.0), "mean_square=-1.0: must be at least 0"),
        (lambda: predict(config, params, 0, "mlp", math.inf), "mean_square=inf: must be finite"),
        (lambda: predict(config, broken, 0, "mlp", 1.0), "entries are not finite"),
        (lambda: mlp_branch("gelu", good, good), "w_out of shape (4, 8): must be (8, 4)"),
        (lambda: mlp_branch("swiglu", good, good.T), "w_gate: must be a matrix"),
        (lambda: mlp_branch("gelu", good, good.T, gain=np.ones(3)), "gain of shape (3,)"),
        (lambda: attention_branch(good, good.T, position=-1), "position=-1"),
        (lambda: attention_branch(good, good.T, shares=[0.5]), "shares: must be positive"),
        (lambda: attention_branch(good, good.T, groups=2), "w_output of shape (8, 4)"),
    ]
    for make, says in cases:
        with pytest.raises(UserError) as caught:
            make()
        assert says in str(caught.value) and "\n" not in str(caught.value)
    still = dataclasses.replace(config, norm_eps=0.0)
    with pytest.raises(UserError, match="mean_square=0"):
        predict(still, params, 0, "mlp", 0.0)
