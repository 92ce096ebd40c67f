"""A walk through a decoder: the same numbers as its parts give, and outliers with their authors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.decoder import Decoder, DecoderConfig
from normjax.diagnostics.block_gains import block_gains
from normjax.diagnostics.walk import Walk, held, walk
from normjax.errors import UserError
from normjax.jacobians.blocks import Parts
from normjax.jacobians.radial import radial_report
from normjax.spectra.spectrum import spectrum

B, T, D, L, V = 2, 6, 8, 3, 11


@pytest.fixture(scope="module", params=["pre", "post", "sandwich"])
def case(request):
    config = DecoderConfig(depth=L, width=D, heads=2, placement=request.param)
    model = Decoder(config, V, T)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32),
        jax.jit(model.init)(jax.random.key(0)),
    )
    windows = rng.integers(0, V, (B, T + 1))
    return model, params, windows, walk(held(model, params), windows)


def test_a_walk_sees_what_the_whole_model_has(case):
    model, params, windows, seen = case
    tokens, targets = windows[:, :-1], windows[:, 1:]
    states = np.asarray(model.hidden_states(params, jnp.asarray(tokens)))
    np.testing.assert_allclose(seen.states[::2], states, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        np.moveaxis(seen.sizes[..., ::2], -1, 0), np.sqrt(np.mean(states**2, -1)), rtol=1e-4
    )
    logits = np.asarray(model.apply(params, jnp.asarray(tokens)), np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    chosen = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    expected = np.log(np.exp(logits).sum(-1)) - chosen
    np.testing.assert_allclose(seen.losses, expected, rtol=0, atol=1e-5)

    def loss(shifts):
        logits, taps = model.tapped(params, jnp.asarray(tokens), shifts)
        each = jax.nn.log_softmax(logits)
        return -jnp.sum(jnp.take_along_axis(each, jnp.asarray(targets)[..., None], -1)), taps

    slopes, taps = jax.grad(loss, has_aux=True)(model.zero_shifts(params, jnp.asarray(tokens)))
    for i, (block, name) in enumerate(seen.branches):
        own = np.asarray(slopes["blocks"][name]["before"][block - 1])
        size = np.sqrt(np.mean(own**2, -1))
        np.testing.assert_allclose(seen.gradients[..., i], size, rtol=1e-3, atol=1e-6)
        wrote = np.asarray(taps["blocks"][name]["written"][block - 1])
        size = np.sqrt(np.mean(wrote**2, -1))
        np.testing.assert_allclose(seen.written[..., i], size, rtol=1e-4, atol=1e-6)


def test_attention_is_summed_up_by_head(case):
    model, params, windows, seen = case
    taps = model.tapped(params, jnp.asarray(windows[:, :-1]))[1]["blocks"]["attention"]["branch"]
    p = np.asarray(taps["probabilities"], np.float64).reshape(L, B, 2, T, T)
    np.testing.assert_allclose(seen.attention["first"], p[..., 1:, 0].mean(-1), atol=1e-5)
    safe = np.where(p > 0, p, 1)
    share = -np.sum(p * np.log(safe), -1)[..., 1:] / np.log(np.arange(2, T + 1))
    np.testing.assert_allclose(seen.attention["entropy"], share.mean(-1), atol=1e-5)


def test_gains_of_blocks_are_those_of_their_jacobians(case):
    model, params, _, seen = case
    assert seen.ordinary.all()
    parts = Parts(model, params)
    for own in block_gains(held(model, params), seen, tokens=4, tol=1e-8):
        h = np.float64(seen.states[2 * (own.block - 1), 0, :4])
        with jax.enable_x64(True):
            expected = radial_report(parts.block(own.block), h, norm="rmsnorm", seed=own.block)
            values = spectrum(parts.block(own.block), h).values
        # The walk's own stream after the block is in float32.
        for name in ("rr", "rt", "tr", "tt", "cosine"):
            found = getattr(own.radial, name)
            assert found == pytest.approx(getattr(expected, name), rel=1e-5, abs=1e-6)
        assert own.top.values[0] == pytest.approx(values[0], rel=1e-7)


def test_who_wrote_an_outlier_and_who_took_it_away():
    """Feature 5 of one token jumps in the fourth sub-layer and is gone after the last."""
    rng = np.random.default_rng(1)
    states = rng.normal(size=(2 * L + 1, B, T, D))
    states[4:6, 1, 2, 5] += 900.0
    sizes = np.moveaxis(np.sqrt(np.mean(states**2, -1)), 0, -1)
    branches = tuple((b, n) for b in (1, 2, 3) for n in ("attention", "mlp"))
    ordinary = np.ones((B, T), bool)
    ordinary[1, 2] = False
    empty = np.zeros((B, T, 2 * L))
    seen = Walk(branches, states, sizes, empty, empty, sizes, sizes[..., 0], {}, ordinary)
    (wrote, took), *rest = seen.outliers()
    assert rest == []
    assert (wrote.window, wrote.position, wrote.feature) == (1, 2, 5)
    assert (wrote.block, wrote.branch) == (2, "mlp") and wrote.after > 890 > 10 > wrote.before
    assert (took.block, took.branch) == (3, "mlp") and took.before > 890 > 10 > took.after
    states[6:, 1, 2, 5] += 900.0  # and nothing takes it away
    assert seen.outliers()[0][1] is None
    states[:, 1, 2, 5] = 2000.0  # the embedding has it already
    wrote, took = seen.outliers()[0]
    assert (wrote.block, wrote.branch, took) == (0, "embedding", None)


def test_a_token_ten_times_the_median_is_set_apart():
    model = Decoder(DecoderConfig(depth=1, width=D, heads=2), V, T)
    params = model.init(jax.random.key(0))
    params["embedding"] = params["embedding"].at[7, 3].set(50.0)
    seen = walk(held(model, params), np.array([[1, 7, 2, 3, 4, 5, 6]]))
    assert seen.ordinary.tolist() == [[True, False, True, True, True, True]]
    assert seen.outliers()[0][0].branch == "embedding"
    gains = block_gains(held(model, params), seen)
    assert [g.block for g in gains] == [1]


def test_similarity_and_participation_have_their_closed_forms():
    """Equal tokens: cosine 1 and one direction; orthogonal ones: 0 and as many as there are."""
    same = np.broadcast_to(np.arange(1.0, 5.0), (1, 1, 4, 4))
    states = np.concatenate([same, np.eye(4)[None, None]])
    empty = np.zeros((1, 4, 1))
    seen = Walk(((1, "mlp"),), states, empty, empty, empty, empty, empty[..., 0], {},
                np.ones((1, 4), bool))  # fmt: skip
    np.testing.assert_allclose(seen.similarity()[:, 0], [1, 0], atol=1e-12)
    np.testing.assert_allclose(seen.participation(), [1, 4], rtol=1e-12)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([[1, 2, V]], "the vocabulary ends at 10"),
        ([list(range(8))], "at most 6"),
        ([[1.0, 2.0]], "must be tokens"),
    ],
)
def test_bad_windows_are_one_line(windows, message):
    model = Decoder(DecoderConfig(depth=1, width=D, heads=2), V, T)
    with pytest.raises(UserError, match=message):
        walk(held(model, model.init(jax.random.key(0))), windows)
