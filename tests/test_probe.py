"""The probe against a two-layer decoder written out in NumPy, float64, and against itself."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax import norm_functions, norms
from normjax.decoder import Decoder, DecoderConfig
from normjax.diagnostics import definitions, measures, radial
from normjax.diagnostics.probe import Probe
from normjax.placements import PLACEMENTS
from normjax.training import train
from normjax.training.train import Hyper, TrainConfig

V, T, B, D, H, L = 5, 6, 3, 8, 2, 2
C = D // H
EPS = 1e-6
TRAIN = TrainConfig(batch_size=B, steps=10, warmup_steps=2, clip=0.5)
HYPER = Hyper(0, 1e-2, 0.1, 1.0)
TINY = DecoderConfig(depth=L, width=D, heads=H, mlp="relu", mlp_width=12, positions="none")
WINDOWS = np.random.default_rng(1).integers(0, V, (B, T + 1)).astype(np.int32)
F32 = float(np.finfo(np.float32).eps)


def started(config, hyper=HYPER, scale=0.3):
    """A probe and a state whose parameters are all of an ordinary size."""
    probe = probe_of(config)
    arrays = Hyper(np.uint32(hyper.seed), *(np.float32(x) for x in hyper[1:]))
    state = jax.jit(functools.partial(train.init_state, probe.model, TRAIN))(arrays)
    rng = np.random.default_rng(3)
    params = jax.tree.map(
        lambda p: jnp.asarray(np.asarray(p) * 0.5 + scale * rng.standard_normal(p.shape), p.dtype),
        state.params,
    )
    return probe, state._replace(params=params), arrays


@functools.cache
def probe_of(config):
    """One compiled program for all tests of a decoder."""
    return Probe(Decoder(config, V, T), TRAIN)


def measured(config, **options):
    probe, state, hyper = started(config, **options)
    return probe(state, hyper, WINDOWS), state


# --- written out ----------------------------------------------------------------------------------


def plain_norm(x, gain):
    return gain * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)


def plain_attention(p, r):
    split = lambda name: (r @ p[name]["kernel"]).reshape(B, T, H, C)  # noqa: E731
    q, k, v = split("query"), split("key"), split("value")
    out, logits, probabilities = np.zeros((B, T, H, C)), {}, {}
    for b in range(B):
        for h in range(H):
            for t in range(T):
                seen = np.array([q[b, t, h] @ k[b, s, h] / np.sqrt(C) for s in range(t + 1)])
                e = np.exp(seen)
                logits[b, h, t], probabilities[b, h, t] = seen, e / e.sum()
                out[b, t, h] = probabilities[b, h, t] @ v[b, : t + 1, h]
    return out.reshape(B, T, D) @ p["output"]["kernel"], logits, probabilities


def plain_run(params, placement):
    """Return every array of the way, and the loss, from float64 parameters."""
    h, states = params["embedding"][WINDOWS[:, :-1]], []
    for layer in range(L):
        block = jax.tree.map(lambda x, i=layer: x[i], params["blocks"])
        for name in ("attention", "mlp"):
            p = block[name]
            read = plain_norm(h, p["pre_norm"]["gain"]) if placement == "pre" else h
            seen = {"name": name, "before": h, "read": read}
            if name == "attention":
                f, seen["logits"], seen["p"] = plain_attention(p["branch"], read)
            else:
                seen["hidden"] = np.maximum(read @ p["branch"]["in"]["kernel"], 0)
                f = seen["hidden"] @ p["branch"]["out"]["kernel"]
            h = h + f
            if placement == "post":
                h = plain_norm(h, p["post_norm"]["gain"])
            states.append(seen | {"written": f, "after": h})
    last = plain_norm(h, params["final_norm"]["gain"]) if placement == "pre" else h
    logits = last @ params["embedding"].T
    z = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, WINDOWS[:, 1:, None], -1)[..., 0]
    return states, np.mean(z - picked)


def plain_rms(x):
    return np.sqrt(np.mean(np.square(x)))


def plain_similarity(x):
    out = []
    for sequence in x:
        for s in range(T):
            out += [sequence[s] @ sequence[t] / np.linalg.norm(sequence[s])
                    / np.linalg.norm(sequence[t]) for t in range(T) if t != s]  # fmt: skip
    return np.mean(out)


def plain_diagnostics(states):
    """Return the diagnostics of the forward pass, by name, (layer, sublayer) or (layer, head)."""
    pairs = {
        "residual/rms_before": lambda s: plain_rms(s["before"]),
        "residual/rms_after": lambda s: plain_rms(s["after"]),
        "read/rms": lambda s: plain_rms(s["read"]),
        "branch/rms": lambda s: plain_rms(s["written"]),
        "branch/stream_ratio": lambda s: plain_rms(s["written"]) / plain_rms(s["before"]),
        "branch/stream_cosine": lambda s: np.mean(
            np.sum(s["written"] * s["before"], -1)
            / np.linalg.norm(s["written"], axis=-1) / np.linalg.norm(s["before"], axis=-1)
        ),
        "residual/token_similarity": lambda s: plain_similarity(s["after"]),
    }  # fmt: skip
    out = {k: np.array([f(s) for s in states]).reshape(L, 2) for k, f in pairs.items()}
    heads = {
        "attention/logit_max": lambda z, p: max(np.abs(x).max() for x in z),
        "attention/logit_std": lambda z, p: np.sqrt(np.mean([np.var(x) for x in z if len(x) > 1])),
        "attention/entropy": lambda z, p: np.mean([-np.sum(x * np.log(x)) for x in p]),
        "attention/entropy_share": lambda z, p: np.mean(
            [-np.sum(x * np.log(x)) / np.log(len(x)) for x in p if len(x) > 1]
        ),
        "attention/saturated_share": lambda z, p: np.mean(
            [x.max() > 0.99 for x in p if len(x) > 1]
        ),
    }
    attention = [s for s in states if s["name"] == "attention"]
    of = lambda d, h: [x for (_, head, _), x in d.items() if head == h]  # noqa: E731
    for k, f in heads.items():
        out[k] = np.array([[f(of(s["logits"], h), of(s["p"], h)) for h in range(H)]
                           for s in attention])  # fmt: skip
    hidden = [s["hidden"] for s in states if s["name"] == "mlp"]
    out["mlp/activation_rms"] = np.array([plain_rms(x) for x in hidden])
    out["mlp/dead_share"] = np.array(
        [np.mean(np.abs(x).max((0, 1)) <= 1e-3 * plain_rms(x)) for x in hidden]
    )
    return out


def as_float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_forward_diagnostics_are_those_written_out(placement):
    config = dataclasses.replace(TINY, placement=placement)
    # Sharp attention, so that some queries are saturated and some are not.
    values, state = measured(config, scale=1.0)
    expected = plain_diagnostics(plain_run(as_float64(state.params), placement)[0])
    assert 0 < expected["attention/saturated_share"].mean() < 1
    for name, value in expected.items():
        assert values[name].shape == value.shape, name
        # Sums of some hundred float32 terms through up to 4 sub-layers that each amplify a little.
        np.testing.assert_allclose(values[name], value, rtol=3000 * F32, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(
        values["mlp/dead_share"], expected["mlp/dead_share"].astype(np.float32)
    )


def test_gradients_are_slopes_of_the_written_out_loss():
    config = dataclasses.replace(TINY, placement="pre")
    values, state = measured(config)
    params = as_float64(state.params)
    assert values["loss/value"] == pytest.approx(plain_run(params, "pre")[1], rel=100 * F32)

    def slope(get, at):
        delta, losses = 1e-5, []
        for sign in (1, -1):
            moved = jax.tree.map(np.copy, params)
            get(moved)[at] += sign * delta
            losses.append(plain_run(moved, "pre")[1])
        return (losses[0] - losses[1]) / (2 * delta)

    # Every entry of two gains and of one matrix, by central differences.
    for name, get in {
        "attention.pre_norm.gain": lambda p: p["blocks"]["attention"]["pre_norm"]["gain"],
        "mlp.branch.out.kernel": lambda p: p["blocks"]["mlp"]["branch"]["out"]["kernel"],
        "final_norm.gain": lambda p: p["final_norm"]["gain"],
    }.items():
        array = get(params)
        g = np.array([slope(get, at) for at in np.ndindex(array.shape)]).reshape(array.shape)
        axes = tuple(range(1, g.ndim)) if name != "final_norm.gain" else None
        np.testing.assert_allclose(
            values[f"gradient/parameter_rms[{name}]"], np.sqrt(np.mean(g * g, axis=axes)), rtol=1e-4
        )


def test_gradients_of_the_stream_are_those_of_the_rest_of_the_network():
    config = dataclasses.replace(TINY, placement="pre")
    values, state = measured(config)
    model, params = Decoder(config, V, T), state.params

    def rest(h, start):
        steps = [(block, name) for block in (1, 2) for name in ("attention", "mlp")]
        for block, name in steps[start:]:
            h = model.block(model.layer(params, block), h, sublayer=name)
        losses = train.cross_entropy(model.readout(params, h), WINDOWS[:, 1:])
        return jnp.mean(losses)

    h = model.embed(params, WINDOWS[:, :-1])
    for i in range(5):
        g = jax.grad(rest)(h, i)
        got = [*values["gradient/stream_rms"].ravel(), values["gradient/stream_rms_last"]][i]
        assert got == pytest.approx(plain_rms(np.asarray(g, np.float64)) * B * T, rel=1e-4)
        if i < 4:
            name = ("attention", "mlp")[i % 2]
            h = model.block(model.layer(params, i // 2 + 1), h, sublayer=name)


def test_update_slope_and_curvature_are_those_of_the_step_taken(x64):
    config = dataclasses.replace(TINY, dtype="float64", param_dtype="float64", mlp="gelu")
    probe, state, hyper = started(config)
    values = probe(state, hyper, WINDOWS)
    after = train.train_step(probe.model, TRAIN, state, hyper, jnp.asarray(WINDOWS))
    u = jax.tree.map(lambda new, old: np.asarray(new - old), after.params, state.params)
    loss = lambda t: float(jnp.mean(train.token_losses(  # noqa: E731
        probe.model, jax.tree.map(lambda p, d: p + t * d, state.params, u), WINDOWS)))  # fmt: skip
    # Central differences in float64: truncation t^2 times the next derivatives, rounding eps / t^2.
    t = 1e-2
    assert values["loss/slope"] == pytest.approx((loss(t) - loss(-t)) / (2 * t), rel=1e-4)
    second = (loss(t) - 2 * loss(0) + loss(-t)) / t**2
    assert values["loss/curvature"] == pytest.approx(second, rel=1e-4)
    length = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(u)))
    assert values["update/norm"] == pytest.approx(length, rel=1e-6)
    got = values["update/parameter_ratio[mlp.branch.in.kernel]"]
    for layer in range(L):
        d, p = (
            tree["blocks"]["mlp"]["branch"]["in"]["kernel"][layer] for tree in (u, state.params)
        )
        assert got[layer] == pytest.approx(plain_rms(d) / plain_rms(np.asarray(p)), rel=1e-6)
    assert values["gradient/norm"] == pytest.approx(float(after.norm_sum), rel=1e-6)


@pytest.mark.slow
def test_gains_are_what_the_norm_multiplies_by():
    values, state = measured(dataclasses.replace(TINY, norm="rmsnorm_offset", qk_norm=True))
    gain = 1 + as_float64(state.params["blocks"]["attention"]["branch"]["query_norm"]["gain"])
    part = "[attention.branch.query_norm]"
    np.testing.assert_allclose(values["gain/mean" + part], gain.mean(-1), rtol=10 * F32)
    np.testing.assert_allclose(values["gain/min" + part], gain.min(-1), rtol=10 * F32)
    np.testing.assert_allclose(values["gain/max" + part], gain.max(-1), rtol=10 * F32)
    values, state = measured(dataclasses.replace(TINY, placement="layerscale"))
    b = state.params["blocks"]["mlp"]["write"]
    np.testing.assert_allclose(
        values["gain/mean[mlp.write]"], np.mean(b, -1), rtol=100 * F32, atol=F32
    )


@pytest.mark.slow
def test_grouped_heads_are_counted_by_query_head(x64):
    """Heads of one group share their keys: with equal queries they have equal diagnostics."""
    config = dataclasses.replace(
        TINY, kv_heads=1, dtype="float64", param_dtype="float64", placement="post"
    )
    probe, state, hyper = started(config)
    kernel = state.params["blocks"]["attention"]["branch"]["query"]["kernel"]
    first = jnp.concatenate([kernel[..., :C], kernel[..., :C]], axis=-1)
    values = {}
    for name, query in {"equal": first, "own": kernel}.items():
        params = jax.tree.map(lambda x: x, state.params)
        params["blocks"]["attention"]["branch"]["query"]["kernel"] = query
        values[name] = probe(state._replace(params=params), hyper, WINDOWS)["attention/entropy"]
    np.testing.assert_allclose(values["equal"][:, 0], values["equal"][:, 1], rtol=1e-12)
    np.testing.assert_allclose(values["equal"][0, 0], values["own"][0, 0], rtol=1e-12)
    assert abs(values["own"][0, 0] - values["own"][0, 1]) > 1e-3


# --- every decoder --------------------------------------------------------------------------------

SOME = {
    "no attention": {"attention": "none"}, "no mlp": {"mlp": "none"},
    "neither": {"attention": "none", "mlp": "none"}, "no residual": {"residual": False},
    "identity": {"norm": "identity"},
    "everything": {"norm": "layernorm", "bias": True, "mlp": "swiglu", "qk_norm": True,
                   "tied": False, "positions": "learned", "attention_softcap": 5.0,
                   "output_softcap": 5.0, "remat": True, "scan_layers": True},
}  # fmt: skip


CASES = {p: {"placement": p} for p in PLACEMENTS} | SOME
FAST = ("pre", "post", "neither", "everything")


@pytest.mark.parametrize(
    "changes",
    [pytest.param(changes, id=name, marks=[] if name in FAST else pytest.mark.slow)
     for name, changes in CASES.items()],
)  # fmt: skip
def test_every_decoder_can_be_measured(changes):
    config = dataclasses.replace(TINY, **changes)
    values, _ = measured(config)
    sizes = {"layer": L, "head": H, "sublayer": len(definitions.sublayer_names(vars(config)))}
    for name, value in values.items():
        row = definitions.diagnostic(name)
        assert row.each == "" or definitions.split(name)[1], name
        shape = tuple(sizes[axis] for axis in row.axes)
        assert value.shape == shape or (row.each and value.shape == ()), name
        assert np.isfinite(value).all(), name
    assert re.fullmatch(r"[a-z]+/[a-z_]+(\[[a-z_.]+\])?", name)
    norm = config.norm_row.forgets != "nothing"
    row = config.placement_row.attention
    if norm and sizes["sublayer"] and (row.pre_norm or row.post_norm):
        # A scalar product of D terms in float32, and what rounding left in its gradients.
        assert np.all(values["instrument/radial_defect"] < 100 * D * F32)
    else:
        assert "instrument/radial_defect" not in values
    if config.has_final_norm and norm:
        assert values["instrument/radial_defect_last"] < 100 * D * F32


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_the_self_tests_hold_in_float64_with_a_large_eps(placement, x64):
    """With eps of the size of the mean square its terms are no small correction."""
    config = dataclasses.replace(
        TINY, placement=placement, norm="layernorm", norm_eps=0.3, dtype="float64",
        param_dtype="float64",
    )  # fmt: skip
    values, _ = measured(config)
    assert np.all(values["instrument/radial_defect"] < 100 * D * np.finfo(np.float64).eps)


@pytest.mark.parametrize("placement", ["pre", pytest.param("post", marks=pytest.mark.slow)])
def test_a_wrong_derivative_of_the_norm_is_noticed(placement, monkeypatch):
    """The scale taken for a constant, as if the norm did not see it move."""

    def wrong(x, gain=None, *, eps):
        s = jax.lax.stop_gradient(jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps))
        return x / s * gain

    row = dataclasses.replace(norms.NORMS["rmsnorm"], function=wrong)
    monkeypatch.setitem(norms.NORMS, "rmsnorm", row)
    # A width of its own: the right program of the same decoder may be compiled already.
    values, _ = measured(dataclasses.replace(TINY, placement=placement, mlp_width=10))
    assert np.all(values["instrument/radial_defect"] > 1e-3)


@pytest.mark.parametrize("placement", ["pre", pytest.param("post", marks=pytest.mark.slow)])
def test_a_mean_that_comes_back_through_layernorm_is_noticed(placement, monkeypatch):
    """The mean taken for a constant: right along u, wrong along the ones."""

    def wrong(x, gain=None, bias=0.0, *, eps):
        c = x - jax.lax.stop_gradient(jnp.mean(x, axis=-1, keepdims=True))
        return norm_functions.rms_norm(c, gain, eps=eps) + bias

    row = dataclasses.replace(norms.NORMS["layernorm"], function=wrong)
    monkeypatch.setitem(norms.NORMS, "layernorm", row)
    config = dataclasses.replace(TINY, placement=placement, mlp_width=14, norm="layernorm")
    values, _ = measured(config)
    assert np.all(values["instrument/radial_defect"] > 1e-3)


@pytest.mark.parametrize("norm", ["rmsnorm_plain", "layernorm_plain"])
@pytest.mark.parametrize("stream", [1e-25, 1.0, 1e19])
@pytest.mark.parametrize("gradient", [1e-20, 1.0, 1e19])
def test_the_self_test_reads_the_same_at_any_size(norm, stream, gradient):
    """Rounding where all is right, 0.1 where a tenth of the gradient is put along u."""
    if stream > 1e10 and gradient < 1:
        pytest.skip("the gradient of the stream is 1e-39, which float32 does not hold")
    rng, row = np.random.default_rng(5), norms.NORMS[norm]
    x = jnp.asarray(rng.normal(size=(5, 64)) * stream, jnp.float32)
    G = jnp.asarray(rng.normal(size=(5, 64)) * gradient, jnp.float32)
    y, pull = jax.vjp(lambda v: row(v, {}, EPS), x)
    (g,) = pull(G)
    u = np.asarray(x, np.float64)
    u = u - u.mean(axis=-1, keepdims=True) * row.removes_mean
    u /= np.linalg.norm(u, axis=-1, keepdims=True)
    tenth = 0.1 * np.linalg.norm(np.asarray(g, np.float64), axis=-1, keepdims=True) * u
    found = []
    for each in (g, g + jnp.asarray(tenth, jnp.float32)):
        back = radial.returned(row, EPS, x, y, G, jnp.zeros(()))
        assert back.shape == (5, 2 if row.removes_mean else 1)
        found.append(float(radial.relative(radial.along(row, x, each) - back, each)))
    assert found[0] < 64 * F32 and found[1] == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_layer_does_not_blind_the_ones_before(bad):
    probe, state, hyper = started(TINY)
    whole = probe(state, hyper, WINDOWS)
    params = jax.tree.map(lambda x: x, state.params)
    branch = params["blocks"]["attention"]["branch"]
    branch["query"]["kernel"] = branch["query"]["kernel"].at[1, 0, 0].set(bad)
    values = probe(state._replace(params=params), hyper, WINDOWS)
    for name in (
        "residual/rms_before",
        "residual/rms_after",
        "read/rms",
        "branch/rms",
        "branch/stream_ratio",
        "branch/stream_cosine",
        "residual/token_similarity",
    ):
        np.testing.assert_array_equal(values[name][0], whole[name][0], err_msg=name)
        assert not np.isfinite(values[name][1, 1]), name
    for name in whole:
        if name.startswith(("attention/", "mlp/")):
            np.testing.assert_array_equal(values[name][0], whole[name][0], err_msg=name)
            assert not np.isfinite(values[name][1]).all(), name
    assert np.isnan(values["loss/value"]) and np.isnan(values["loss/curvature"])
    np.testing.assert_array_equal(
        values["gain/mean[mlp.pre_norm]"], whole["gain/mean[mlp.pre_norm]"]
    )


@pytest.mark.slow
def test_weights_of_positions_enter_the_loss_and_its_gradient():
    probe, state, hyper = started(TINY)
    weights = np.array([0, 0, 0, 0, 0, 1.0])
    values = probe(state, hyper, WINDOWS, weights)
    losses = train.token_losses(probe.model, state.params, WINDOWS)
    assert values["loss/value"] == pytest.approx(float(jnp.mean(losses[:, -1])), rel=10 * F32)


def test_blocks_in_a_loop_show_what_scanned_ones_show():
    probe, state, _ = started(TINY)
    taps = []
    for scan in (False, True):
        model = Decoder(dataclasses.replace(TINY, scan_layers=scan), V, T)
        taps.append(model.tapped(state.params, WINDOWS[:, :-1])[1])
    a, b = (jax.tree.leaves_with_path(t) for t in taps)
    for (path, x), (other, y) in zip(a, b, strict=True):
        assert path == other
        np.testing.assert_allclose(x, y, rtol=1000 * F32, atol=1e-5)


# --- single measures ------------------------------------------------------------------------------


def test_sizes_survive_where_squares_do_not():
    x = jnp.asarray([3e-30, 4e-30], jnp.float32)
    assert float(measures.rms(x)) == pytest.approx(3.5355339e-30, rel=10 * F32, abs=0)
    assert np.isinf(measures.rms(jnp.asarray([1.0, np.inf])))
    assert np.isnan(measures.rms(jnp.asarray([1.0, np.nan])))
    assert float(measures.rms(jnp.zeros(3))) == 0


def test_one_token_has_no_pair_and_no_choice():
    x = jnp.ones((1, 1, 4))
    assert np.isnan(measures.token_similarity(x))
    values = measures.attention(jnp.zeros((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1)))
    assert float(values["attention/entropy"][0]) == 0
    assert np.isnan(values["attention/saturated_share"][0])
