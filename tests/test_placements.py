"""Placements: the one equation written out, what the rows say, and rows of one's own."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.decoder import Decoder, DecoderConfig
from normjax.equation import FACTORS, MODEL_NORM, SHARED_NORM, SLOTS, Learned, Sublayer, fold
from normjax.errors import UserError
from normjax.initializers import Initialization
from normjax.jacobians.blocks import Parts
from normjax.mixing import SoftmaxOverSources, Streams, Weights
from normjax.norms import NORMS
from normjax.placement import Placement
from normjax.placements import COMMON, PLACEMENTS, register_placement
from normjax.training import train
from normjax.training.train import Hyper, TrainConfig

D = 5
DEPTH = 6

# Which of N, Q, S, P and U is a norm in attention and MLP, whether the decoder ends with one, and
# (a, b, c) of block 3 of 6; None where weights mix streams.
PUBLISHED = {
    "pre": ("N", "N", True, (1, 1, 1)),
    "post": ("P", "P", False, (1, 1, 1)),
    "none": ("", "", False, (1, 1, 1)),
    "sandwich": ("NQ", "NQ", True, (1, 1, 1)),
    "branch_output": ("Q", "Q", True, (1, 1, 1)),
    "deepnorm": ("P", "P", False, (12**0.25, 1, 1)),
    "layernorm_scaling": ("N", "N", True, (1, 1, 3**-0.5)),
    "skipinit": ("", "", False, (1, 0, 1)),
    "layerscale": ("N", "N", True, (1, 0.1, 1)),
    "rezero": ("", "", False, (1, 0, 1)),
    "hybridnorm": ("", "NS", True, (1, 1, 1)),
    "hyper_connections": ("N", "N", True, (None, None, 1)),
    "attention_residuals": ("N", "N", True, (1, None, 1)),
}


def factors(row):
    """(a, b, c), of what is learned the start, None for weights that mix streams."""
    found = [getattr(row, name) for name in ("keep", "write", "scale")]
    found = [f.start if isinstance(f, Learned) else f for f in found]
    return tuple(f if isinstance(f, int | float) else None for f in found)


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMON)
def test_every_row_is_as_published(name):
    row = PLACEMENTS[name]
    *norms, final, constants = PUBLISHED[name]
    for branch, letters in zip(("attention", "mlp"), norms, strict=True):
        own = row.of(branch).at(3, DEPTH)
        held = "".join(letter for letter, slot in zip("NQSPU", SLOTS, strict=True)
                       if getattr(own, slot) is not None)  # fmt: skip
        assert held == letters
        for found, published in zip(factors(own), constants, strict=True):
            assert found == (published and pytest.approx(published, rel=1e-15))
    assert row.final_norm == final
    assert row.title and row.source and row.summary and row.action
    assert row.name == name


def test_deepnorm_constants():
    """alpha = (2 L)^(1/4), beta = (8 L)^(-1/4) with L blocks: the decoder-only row."""
    row = PLACEMENTS["deepnorm"]
    keep = lambda block, depth: row.attention.at(block, depth).keep  # noqa: E731
    for depth in (1, 4, 18, 100):
        for block in (1, depth):
            assert keep(block, depth) == pytest.approx((2 * depth) ** 0.25, rel=1e-15)
        assert row.branch_gain(depth) == pytest.approx(1 / (8 * depth) ** 0.25, rel=1e-15)
    # Deeper decoders weigh the path up and the branch down (a beta of (8 L)^(+1/4) would not):
    # beta^2 / alpha^2 = 1 / (4 L), so that 2 L sub-layers together stay at 1/2.
    assert 2 * 8 * (row.branch_gain(8) / keep(1, 8)) ** 2 == pytest.approx(0.5)
    assert row.branch_gain(100) < 1 < keep(1, 100)
    assert row.init == "xavier"


def test_layernorm_scaling_is_one_over_the_root_of_the_block():
    row = PLACEMENTS["layernorm_scaling"]
    scales = [row.attention.at(block, 9).scale for block in (1, 4, 9)]
    assert scales == pytest.approx([1, 1 / 2, 1 / 3])
    assert row.init == "gpt2_plain"


def test_what_is_learned():
    learned = {
        name: (row.attention.write.shape, row.attention.write.shared)
        for name, row in ((name, PLACEMENTS[name]) for name in COMMON)
        if isinstance(row.attention.write, Learned)
    }
    assert learned == {
        "skipinit": ("scalar", False), "layerscale": ("feature", False), "rezero": ("scalar", True)
    }  # fmt: skip


def test_layerscale_starts_smaller_in_deeper_decoders():
    row = PLACEMENTS["layerscale"].attention
    starts = [row.at(1, depth).write.start for depth in (12, 18, 24, 36)]
    assert starts == [0.1, 0.1, 1e-5, 1e-6]


@pytest.mark.parametrize("name", PLACEMENTS)
def test_no_residual_is_a_equal_to_zero_and_nothing_else(name):
    with_path, without = PLACEMENTS[name], PLACEMENTS[name].without_residual()
    before, after = with_path.record(8), without.record(8)
    for branch in ("attention", "mlp"):
        assert after[branch].pop("keep") == 0.0
        before[branch].pop("keep")
    assert before.pop("shown") != after.pop("shown")
    assert before == after


def test_titles_and_colours_are_told_apart():
    rows = PLACEMENTS.values()
    assert len({row.title for row in rows}) == len(PLACEMENTS)
    colours = [row.colour for row in rows if row.colour]
    assert len(set(colours)) == len(colours) == len(COMMON) - 1  # pre-norm: the baseline's


# --- the equation ---------------------------------------------------------------------------------


class Matrices:
    """The equation on matrices: a product of linear maps."""

    def __init__(self, norms, branch, factors):
        self.norms, self.own, self.factors = norms, branch, factors

    def norm(self, slot, norm, x):
        return x if norm is None else self.norms[slot] @ x

    def branch(self, x):
        return self.own @ x

    def join(self, join, x, read):
        return x

    def times(self, name, factor, x):
        return self.factors[name] * x

    def mix(self, name, weights, state, x):
        return x if name == "read" else self.times(name, weights, x)

    def plus(self, kept, written):
        return kept + written


def test_the_fold_is_the_equation():
    """With linear maps it is P (a S + b Q F c N), each map in its own place."""
    rng = np.random.default_rng(0)
    n, q, s, p, u, f = (rng.normal(size=(D, D)) for _ in range(6))
    row = Sublayer(**dict.fromkeys(SLOTS, MODEL_NORM))
    algebra = Matrices(
        dict(zip(SLOTS, (n, q, s, p, u), strict=True)), f, {"scale": 0.3, "keep": 1.7, "write": 0.7}
    )
    expected = p @ (1.7 * s + 0.7 * q @ f @ (0.3 * n @ u))
    np.testing.assert_allclose(fold(row, np.eye(D), algebra), expected, rtol=1e-13)


def test_zero_times_the_stream_is_no_path_at_all():
    """a = 0 leaves no trace of h, not even of its infinities."""
    config = DecoderConfig(
        depth=1, width=4, heads=1, attention="none", placement="none", residual=False, bias=True
    )
    model = Decoder(config, vocabulary=5, window=2)
    params = jax.tree.map(jnp.zeros_like, model.init(jax.random.key(0)))
    h = jnp.full((1, 2, 4), jnp.inf)
    row = dataclasses.replace(config.placement_row.attention, scale=0.0)
    kept = model.block(model.layer(params, 1), jnp.ones_like(h), "mlp")
    assert np.all(np.isfinite(np.asarray(kept)))
    assert not np.any(np.isinf(np.asarray(model.block(model.layer(params, 1), h, "mlp", row))))


# --- identities between rows ----------------------------------------------------------------------


def logits(placement, params=None, seed=0, **changes):
    """Float64 logits of a decoder with random weights, and its parameters."""
    config = DecoderConfig(depth=3, width=16, heads=2, placement=placement, init="fan_in",
                           dtype="float64", param_dtype="float64", **changes)  # fmt: skip
    model = Decoder(config, vocabulary=11, window=6)
    made = model.init(jax.random.key(seed))
    tokens = np.array([[7, 2, 9, 0, 4, 5]], np.int32)
    return np.asarray(jax.jit(model.apply)(made if params is None else params, tokens)), made


@pytest.mark.parametrize("placement", ["attention_residuals", "hyper_connections"])
def test_streams_that_are_not_told_apart_are_pre_norm(placement, x64):
    """Zero query: the mean of the sources is read, of which a norm sees the direction of the sum.

    Equal streams with fixed weights stay equal: each is the pre-norm stream.
    """
    expected, params = logits("pre", norm_eps=0.0)
    found, _ = logits(placement, norm_eps=0.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14 * np.abs(expected).max())


def test_rezero_starts_as_the_identity_and_shares_its_scalar():
    config = DecoderConfig(depth=3, width=16, heads=2, placement="rezero")
    params = Decoder(config, 11, 6).init(jax.random.key(0))
    assert params["blocks"]["write"].shape == (3,)
    assert not np.any(params["blocks"]["write"])
    assert "write" not in params["blocks"]["mlp"]


# --- rows of one's own ----------------------------------------------------------------------------


class Gate(Weights):
    """W = sigmoid(sum of all entries of H): weights of a stranger's own, with their derivative."""

    def value(self, parameters, state, position):
        total = jnp.sum(state, axis=(-2, -1))[..., None, None]
        return jnp.asarray(self.start(position, state.shape[-2])) * jax.nn.sigmoid(total)

    def derivative(self, parameters, state, position):
        g = 1 / (1 + np.exp(-np.sum(state, axis=(-2, -1))))[..., None, None, None]
        start = np.asarray(self.start(position, state.shape[-2]), np.float64)[..., None]
        return start * g * (1 - g) * np.ones(state.shape[-2] * state.shape[-1])


OWN = {
    "norms by block": Placement(
        "half post", "here",
        Sublayer(pre_norm=lambda block, depth: MODEL_NORM if block > 1 else NORMS["layernorm"],
                 post_norm=lambda block, depth: MODEL_NORM if block == 1 else None),
    ),
    "norms by branch and skip": Placement(
        "mixed", "here", Sublayer(pre_norm=NORMS["layernorm"], branch_norm=MODEL_NORM, keep=0.5),
        Sublayer(skip_norm=NORMS["layernorm_nobias"], write=Learned(0.5, "feature")),
    ),
    "gates on three streams": Placement(
        "gated", "here",
        Sublayer(
            pre_norm=MODEL_NORM, post_norm=MODEL_NORM,
            read=Gate("g", lambda position, rows: np.ones((1, rows))),
            keep=Gate("K", lambda position, rows: np.eye(rows)[::-1]),
            write=Gate("W", lambda position, rows: np.arange(1.0, rows + 1)[:, None]),
        ),
        streams=Streams(3),
    ),
    "weights per feature": Placement(
        "per feature", "here",
        Sublayer(
            read=Weights("m", lambda position, rows: np.full((1, rows, 6), 0.5), per_feature=True),
            keep=Learned(1.0), write=2.0,
        ),
        streams=Streams(2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_row_of_ones_own_is_verified_like_the_others(name):
    config = DecoderConfig(depth=2, width=6, heads=1, placement=OWN[name])
    model = Decoder(config, vocabulary=7, window=3)
    rng = np.random.default_rng(5)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: 0.4 * rng.normal(size=x.shape).astype(np.float32) + 0.1, shapes)
    parts, h = Parts(model, params), rng.normal(size=(2, model.config.state_width))
    for block in (1, 2):
        part = parts.block(block)
        with jax.enable_x64(True):
            expected = np.asarray(jax.jacfwd(part)(jnp.asarray(h)))
        np.testing.assert_allclose(
            part.sequence_jacobian(h), expected, rtol=0, atol=1e-13 * np.abs(expected).max()
        )


def test_a_rule_acts_on_the_parameters_after_every_step():
    """Weights of unit length per column, whatever the optimizer did to them."""

    def unit(path, x):
        return x / jnp.linalg.norm(x, axis=-2, keepdims=True) if path[-1].key == "kernel" else x

    row = Placement(
        "unit weights", "here", Sublayer(pre_norm=MODEL_NORM),
        after_step=lambda params: jax.tree_util.tree_map_with_path(unit, params),
    )  # fmt: skip
    model = Decoder(DecoderConfig(depth=1, width=6, heads=1, placement=row), 7, 3)
    config = TrainConfig(steps=5, warmup_steps=0, batch_size=2)
    hyper = Hyper(np.uint32(0), np.float32(0.1), np.float32(0), np.float32(1))

    @jax.jit
    def after_one_step(hyper, windows):
        state = train.init_state(model, config, hyper)
        return train.train_step(model, config, state, hyper, windows)

    state = after_one_step(hyper, np.ones((2, 4), np.int32))
    kernel = state.params["blocks"]["mlp"]["branch"]["in"]["kernel"]
    np.testing.assert_allclose(np.linalg.norm(kernel, axis=-2), 1, rtol=1e-6)


def test_a_row_brings_its_own_initialization():
    rule = Initialization(lambda a, b: 0.5, lambda width: 0.25, lambda depth: 0.0, "here")
    row = Placement("own start", "here", Sublayer(pre_norm=MODEL_NORM), init=rule)
    config = DecoderConfig(depth=1, width=32, heads=1, placement=row)
    params = Decoder(config, 50, 3).init(jax.random.key(0))
    assert np.std(params["embedding"]) == pytest.approx(0.25, rel=0.1)
    branch = params["blocks"]["mlp"]["branch"]
    assert np.std(branch["in"]["kernel"]) == pytest.approx(0.5, rel=0.1)
    assert not np.any(branch["out"]["kernel"])
    assert config.record()["init"]["square"] == 0.5


def test_norms_that_a_block_does_not_have_are_not_counted():
    row = OWN["norms by block"]
    counts = [Decoder(DecoderConfig(depth=2, width=6, heads=1, placement=p), 7, 3).parameter_count()
              for p in (Placement("bare", "here"), row)]  # fmt: skip
    # Per sub-layer: a LayerNorm (2 x 6) and a post-norm (6) in block 1, a pre-norm (6) in block 2.
    assert counts[1] - counts[0] == 2 * (12 + 6 + 6)


def test_a_table_that_is_edited_changes_no_decoder_that_exists(monkeypatch):
    """Forward pass, closed form and record are those of the row that the decoder was made with."""
    model = Decoder(DecoderConfig(depth=1, width=6, heads=1), 7, 3)
    params = model.init(jax.random.key(0))
    edited = dataclasses.replace(
        PLACEMENTS["pre"], attention=dataclasses.replace(PLACEMENTS["pre"].attention, keep=5.0)
    )
    monkeypatch.setitem(PLACEMENTS, "pre", edited)
    later = Decoder(DecoderConfig(depth=1, width=6, heads=1), 7, 3)
    h = np.random.default_rng(0).normal(size=(2, 6))
    for made, a in ((model, 1.0), (later, 5.0)):
        part = Parts(made, params).sublayer(1, "mlp")
        with jax.enable_x64(True):
            auto = np.asarray(jax.jacfwd(part)(jnp.asarray(h)))
        np.testing.assert_allclose(part.sequence_jacobian(h), auto, rtol=0, atol=1e-13)
        assert np.trace(auto[0, :, 0]) == pytest.approx(6 * a, rel=0.2)
        assert made.config.record()["placement"]["attention"]["keep"] == a


@pytest.mark.parametrize("name", PLACEMENTS)
def test_records_are_plain_json_and_say_what_decides(name):
    record = PLACEMENTS[name].record(DEPTH)
    assert json.loads(json.dumps(record)) == record
    changed = dataclasses.replace(
        PLACEMENTS[name], attention=dataclasses.replace(PLACEMENTS[name].attention, scale=0.5)
    )
    assert changed.record(DEPTH)["attention"] != record["attention"]
    assert set(FACTORS) | set(SLOTS) <= set(record["mlp"])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("pre", "must be a normjax.Placement"),
        (Placement("x", "y", Sublayer(skip_norm=SHARED_NORM)), "needs a pre_norm to share"),
        (
            Placement(
                "x",
                "y",
                Sublayer(
                    pre_norm=lambda block, depth: NORMS["layernorm" if block > 1 else "rmsnorm"],
                    skip_norm=SHARED_NORM,
                ),
            ),
            "one for all blocks",
        ),
        (Placement("x", "y", streams=Streams(2)), "must have read"),
        (
            Placement("x", "y", Sublayer(inner_norms=("logits",))),
            "must be of query, key, value, output, hidden",
        ),
        (
            Placement("x", "y", Sublayer(inner_norms=("key over all",))),
            "has 'key over all'; must be",
        ),
    ],
)
def test_rows_that_cannot_be_are_refused_in_one_line(row, message):
    with pytest.raises(UserError, match=message) as error:
        register_placement("mine", row)
    assert "\n" not in str(error.value)
    assert "mine" not in PLACEMENTS


def test_weights_over_sources_are_the_softmax_of_their_normed_products(x64):
    """Two of three sources are there, one so small that the eps of its norm, 1e-6, counts."""
    rng = np.random.default_rng(0)
    state, query = rng.normal(size=(3, 8)) * [[1.0], [1e-3], [1.0]], rng.normal(size=8)
    found = SoftmaxOverSources("it").value({"query": jnp.asarray(query)}, jnp.asarray(state), 1)
    normed = state / np.sqrt(np.mean(state**2, axis=-1, keepdims=True) + 1e-6)
    e = np.exp(normed @ query) * [1, 1, 0]
    np.testing.assert_allclose(found, [e / e.sum()], rtol=1e-12)
