"""Radial and tangential gains, the deflated spectrum, and the identities of the placements."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax
from normjax.decoder import Decoder, DecoderConfig
from normjax.diagnostics.identities import dual_identities, postnorm_identity, prenorm_identity
from normjax.errors import UserError
from normjax.jacobians.blocks import Parts
from normjax.jacobians.closed_forms import norm_jacobian, null_directions
from normjax.jacobians.radial import deflated_spectrum, radial_gains, radial_report
from normjax.norms import NORMS

WIDTH, LENGTH = 8, 4


def parameters(model, seed=1):
    """Parameters as after some training: gains and biases are not what they start at."""
    rng = np.random.default_rng(seed)
    start = 0.0 if model.config.norm == "rmsnorm_offset" else 1.0

    def draw(path, leaf):
        name, z = path[-1].key, rng.standard_normal(leaf.shape)
        if name == "kernel":
            return z / leaf.shape[-2] ** 0.5
        return z if name == "embedding" else 0.3 * z + (start if name == "gain" else 0.0)

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def make(**changes):
    model = Decoder(DecoderConfig(depth=2, width=WIDTH, heads=2, **changes), 11, LENGTH)
    return Parts(model, parameters(model))


def stream(seed=0, scale=1.0):
    return scale * np.random.default_rng(seed).standard_normal((LENGTH, WIDTH))


def projector(x):
    return np.eye(len(x)) - np.outer(x, x) / (x @ x)


# --- gains ----------------------------------------------------------------------------------------


def test_gains_of_a_matrix_are_their_definitions():
    rng = np.random.default_rng(0)
    J, h, after = rng.standard_normal((6, 6)), rng.standard_normal(6), rng.standard_normal(6)
    u, v = h / np.linalg.norm(h), after / np.linalg.norm(after)
    report = radial_gains(J, h, after)
    assert report.rr == pytest.approx(v @ J @ u, rel=1e-13)
    assert report.rt == pytest.approx(np.linalg.norm(projector(v) @ J @ u), rel=1e-13)
    assert report.tr == pytest.approx(np.linalg.norm(v @ J @ projector(u)), rel=1e-13)
    inner = projector(v) @ J @ projector(u)
    assert report.tt == pytest.approx(np.linalg.norm(inner) / 5**0.5, rel=1e-13)
    assert report.tt_error == 0  # nothing was drawn
    total = report.rr**2 + report.rt**2 + report.tr**2 + 5 * report.tt**2
    assert total == pytest.approx(np.sum(J * J), rel=1e-13)  # the four parts are all of J
    assert report.cosine == pytest.approx(u @ v)


def test_gains_of_a_norm_are_those_of_the_closed_form():
    """RMSNorm of gain 1: eps/s^3 along h, 1/s across, nothing in between."""
    h, eps = stream()[0], 1e-2
    s = np.sqrt(np.mean(h * h) + eps)
    report = radial_gains(norm_jacobian("rmsnorm_plain", h, eps=eps), h, h)
    assert report.rr == pytest.approx(eps / s**3, rel=1e-12, abs=0)
    assert report.tt == pytest.approx(1 / s, rel=1e-13)
    assert max(report.rt, report.tr) < 1e-15 and report.cosine == pytest.approx(1.0)


def test_three_ways_to_the_same_gains():
    """Probes, per-token Jacobians and the whole one, where tokens do not mix (no attention)."""
    parts = make(attention="none")
    part, h = parts.block(1), stream()
    after = np.asarray(part(h))
    tokens = radial_gains(part.token_jacobians(h), h, after)
    whole = radial_gains(part.sequence_jacobian(h), h, after)
    probed = radial_report(part, h, probes=200)
    assert np.mean(tokens.rr) == pytest.approx(whole.rr, rel=1e-12)
    assert whole.tt_error == 0 and tokens.tt_error.tolist() == [0.0] * LENGTH
    for name in ("rt", "tr", "tt"):
        root_mean_square = np.sqrt(np.mean(getattr(tokens, name) ** 2))
        assert root_mean_square == pytest.approx(getattr(whole, name), rel=1e-12)
    for name in ("rr", "rt", "tr"):
        assert getattr(probed, name) == pytest.approx(getattr(whole, name), rel=1e-12)
    assert 0 < probed.tt_error < 0.05
    assert abs(probed.tt - whole.tt) < 4 * probed.tt_error


def test_probes_agree_with_the_whole_jacobian_where_tokens_mix():
    part, h = make(placement="sandwich").block(1), stream()
    after = np.asarray(part(h))
    whole = radial_gains(part.sequence_jacobian(h), h, after)
    probed = radial_report(part, h, probes=200)
    for name in ("rr", "rt", "tr", "cosine"):
        assert getattr(probed, name) == pytest.approx(getattr(whole, name), rel=1e-12)
    assert abs(probed.tt - whole.tt) < 4 * probed.tt_error
    again = radial_report(part, h, probes=200)
    assert again == probed  # the probes are a function of the seed
    assert radial_report(part, h, probes=200, seed=1).tt != probed.tt


def test_placements_differ_in_what_is_radial():
    """Pre-norm keeps a scaling (RR = cosine), post-norm loses it, none amplifies it."""
    h, eps = stream(), 0.0
    pre = make(placement="pre", norm_eps=eps).sublayer(1, "mlp")
    report = radial_report(pre, h)
    assert report.rr == pytest.approx(report.cosine, abs=1e-14)
    post = make(placement="post", norm="rmsnorm_plain", norm_eps=eps).sublayer(1, "mlp")
    report = radial_report(post, h)
    assert abs(report.rr) < 1e-14 and abs(report.tr) < 1e-14 < report.rt
    none = make(placement="none", mlp="relu").sublayer(1, "mlp")  # homogeneous: J h = h'
    after = np.asarray(none(h))
    exact = radial_gains(none.token_jacobians(h), h, after)
    growth = np.linalg.norm(after, axis=1) / np.linalg.norm(h, axis=1)
    np.testing.assert_allclose(exact.rr, growth, rtol=1e-12)
    np.testing.assert_allclose(exact.rt, 0, atol=1e-13)


# --- the deflated spectrum ------------------------------------------------------------------------


def test_deflated_values_are_those_of_the_projected_matrix():
    rng = np.random.default_rng(0)
    J, h, after = rng.standard_normal((6, 6)), rng.standard_normal(6), rng.standard_normal(6)
    spectrum = deflated_spectrum(J, h, after)
    dense = np.linalg.svd(projector(after) @ J @ projector(h), compute_uv=False)
    np.testing.assert_allclose(spectrum.deflated, dense[:5], rtol=1e-12)
    assert spectrum.raw.shape == (6,) and dense[5] < 1e-14
    # Interlacing: each projection lowers the values by at most one place.
    assert np.all(spectrum.deflated <= spectrum.raw[:5] + 1e-14)
    assert np.all(spectrum.deflated[:-1] >= spectrum.raw[2:] - 1e-14)


def test_the_condition_number_is_an_artefact_of_eps_and_the_deflated_one_is_not():
    h, raw, deflated = stream(), [], []
    for eps in (1e-10, 1e-8, 1e-6):
        parts = make(placement="post", norm="rmsnorm_plain", norm_eps=eps)
        part = parts.sublayer(1, "mlp")
        spectrum = deflated_spectrum(part.token_jacobians(h), h, np.asarray(part(h)))
        raw.append(spectrum.condition)
        deflated.append(spectrum.deflated_condition)
    np.testing.assert_allclose(np.array(raw[1]) / raw[2], 100, rtol=1e-3)
    np.testing.assert_allclose(deflated[0], deflated[2], rtol=1e-5)
    np.testing.assert_allclose(deflated[0], deflated[1], rtol=1e-7)


def test_one_norm_is_perfectly_conditioned_across_the_radius():
    h = stream()[0]
    spectrum = deflated_spectrum(norm_jacobian("rmsnorm_plain", h), h, h)
    assert spectrum.condition == pytest.approx(1 + np.mean(h * h) / 1e-6, rel=1e-9)
    assert spectrum.deflated_condition == pytest.approx(1.0, abs=1e-14)


def test_a_gain_that_is_not_uniform_needs_its_own_left_direction():
    """The range of J is orthogonal to u / g: with that, deflation loses no value but the null."""
    h, gain = stream()[0], {"gain": np.exp(stream()[1])}
    J = norm_jacobian("rmsnorm", h, gain, eps=0.0)
    left = null_directions("rmsnorm", h, gain)[1][:, 0]
    spectrum = deflated_spectrum(J, h, h, write=left)
    np.testing.assert_allclose(spectrum.deflated, spectrum.raw[:-1], rtol=1e-12)


@pytest.mark.parametrize("norm", ["layernorm_plain", "rmsnorm_plain"])
def test_a_norm_of_unit_gain_is_perfectly_conditioned_across_what_it_forgets(norm):
    h = stream() + 0.7
    J = norm_jacobian(norm, h)
    after = np.asarray(NORMS[norm](jnp.asarray(h, jnp.float32), {}, 1e-6), np.float64)
    found = deflated_spectrum(J, h, after, norm=norm)
    m = 2 if norm == "layernorm_plain" else 1
    assert found.deflated.shape == (LENGTH, WIDTH - m)
    np.testing.assert_allclose(found.deflated_condition, 1, rtol=2e-6)  # after is in float32
    read, write = NORMS[norm].null_directions(h)
    exact = deflated_spectrum(J, h, h, read=read, write=write)
    np.testing.assert_allclose(exact.deflated_condition, 1, rtol=1e-14)
    size = np.sqrt(np.mean((h - (m == 2) * h.mean(-1, keepdims=True)) ** 2, axis=-1) + 1e-6)
    np.testing.assert_allclose(exact.deflated, np.repeat(1 / size[:, None], WIDTH - m, axis=1))


def test_a_norm_that_forgets_only_the_mean_keeps_the_radial_direction_first():
    """C = I - 11^T/d: what is across h and 1 has gain one; h keeps its part without the mean."""
    h = stream()[:1] + 0.7
    report = radial_report(lambda x: x - x.mean(-1, keepdims=True), h, norm="centring")
    after = h - h.mean()
    assert report.rr == pytest.approx(np.linalg.norm(after) / np.linalg.norm(h), rel=1e-13)
    assert report.cosine == pytest.approx(report.rr, rel=1e-13)


def test_a_value_that_is_all_rounding_is_no_condition_number():
    """Without the direction of the mean LayerNorm's smallest value is 0 exactly: no 1e16."""
    h = stream()[0] - stream()[0].mean()
    found = deflated_spectrum(norm_jacobian("layernorm_plain", h), h, h)
    assert found.condition == found.deflated_condition == np.inf
    assert deflated_spectrum(np.zeros((3, 3)), [1, 2, 3], [1, 2, 3]).condition == np.inf


@pytest.mark.parametrize("norm", ["layernorm", "layernorm_plain", "rmsnorm", "rmsnorm_offset"])
@pytest.mark.parametrize("placement", ["post", "deepnorm"])
def test_behind_a_postnorm_deflation_loses_no_value_but_the_null(norm, placement):
    """With trained gains and biases, and free of eps: compared with eps = 0 by many digits."""
    deflated = []
    for eps in (0.0, 1e-7):
        parts = make(placement=placement, norm=norm, norm_eps=eps)
        part, h = parts.block(2), stream()
        J, after = part.token_jacobians(h), np.asarray(part(h))
        read, write = part.null_directions(h)
        m = write.shape[-1]
        assert m == (2 if norm.startswith("layer") else 1)
        reached = np.abs(np.swapaxes(write, 1, 2) @ J).max()
        assert reached < (1e-13 if eps == 0 else 1e-5)
        deflated.append(deflated_spectrum(J, h, after, read=read, write=write))
        # The left side takes out null directions only: all others are as they were.
        values = np.linalg.svd(J, compute_uv=False)[:, :-m]
        left = deflated_spectrum(J, h, after, read=np.zeros((*h.shape, 0)), write=write)
        np.testing.assert_allclose(left.deflated, values, rtol=1e-6)
    np.testing.assert_allclose(deflated[0].deflated, deflated[1].deflated, rtol=1e-4)
    assert deflated[1].deflated_condition.max() < 1e4
    assert np.all(deflated[0].condition == np.inf)


def test_gains_leave_out_the_mean_where_the_norm_does():
    """LayerNorm of gain 1: eps/s^3 along h less its mean, 1/s across it and the mean."""
    h, eps = stream()[0] + 3.0, 1e-2
    c = h - h.mean()
    s = np.sqrt(np.mean(c * c) + eps)
    J = norm_jacobian("layernorm_plain", h, eps=eps)
    report = radial_gains(J, h, c, norm="layernorm_plain")
    assert report.rr == pytest.approx(eps / s**3, rel=1e-12)
    assert report.tt == pytest.approx(1 / s, rel=1e-13)
    assert max(report.rt, report.tr) < 1e-14 and report.cosine == pytest.approx(1.0)

    def function(x):
        return normjax.layer_norm(x, eps=eps)

    probed = radial_report(function, h, norm="layernorm_plain", probes=500)
    assert probed.rr == pytest.approx(report.rr, rel=1e-11)
    assert abs(probed.tt - report.tt) < 4 * probed.tt_error
    tokens = np.stack([J, J])
    whole = np.zeros((2, WIDTH, 2, WIDTH))
    whole[[0, 1], :, [0, 1]] = J
    hs, cs = np.stack([h, h]), np.stack([c, c])
    assert radial_gains(whole, hs, cs, norm="layernorm_plain").tt == pytest.approx(1 / s)
    np.testing.assert_allclose(radial_gains(tokens, hs, cs, norm="layernorm_plain").tt, 1 / s)


def test_the_whole_sequence_is_deflated_by_one_direction_per_token():
    part, h = make(placement="post", norm="rmsnorm_plain").sublayer(1, "attention"), stream()
    J, after = part.sequence_jacobian(h), np.asarray(part(h))
    spectrum = deflated_spectrum(J, h, after)
    assert spectrum.raw.shape == (32,) and spectrum.deflated.shape == (28,)
    assert np.all(spectrum.raw[-LENGTH:] < 1e-4) and np.all(spectrum.deflated > 1e-3)


# --- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sublayer", ["attention", "mlp"])
@pytest.mark.parametrize(
    ("placement", "norm", "eps"),
    [
        ("pre", "rmsnorm", 0.0),
        ("pre", "rmsnorm", 1e-2),
        ("pre", "layernorm", 1e-2),
        ("sandwich", "rmsnorm_offset", 1e-2),
        ("layernorm_scaling", "rmsnorm", 1e-2),
        ("layerscale", "rmsnorm", 1e-2),
    ],
)
def test_prenorm_passes_a_scaling_of_one_token(placement, norm, eps, sublayer):
    parts = make(placement=placement, norm=norm, norm_eps=eps, bias=True)
    assert prenorm_identity(parts, 2, sublayer, stream()) < 1e-14
    assert prenorm_identity(parts, 2, sublayer, stream(scale=30.0)) < 1e-14


def test_without_eps_the_scaling_is_an_eigenvector():
    """J (e_t x u_t) = e_t x u_t, attention included; at eps = 0.1 it is not."""
    h = stream()
    u = h / np.linalg.norm(h, axis=1, keepdims=True)
    for eps, close in ((0.0, True), (0.1, False)):
        J = make(norm_eps=eps).sublayer(1, "attention").sequence_jacobian(h)
        moved = J[:, :, 2] @ u[2]
        expected = np.zeros_like(h)
        expected[2] = u[2]
        assert (np.max(np.abs(moved - expected)) < 1e-14) == close


@pytest.mark.parametrize("sublayer", ["attention", "mlp"])
@pytest.mark.parametrize("placement", ["post", "deepnorm"])
def test_nothing_radial_leaves_postnorm(placement, sublayer):
    for norm, eps in (("rmsnorm", 0.0), ("rmsnorm", 1e-2), ("layernorm", 1e-6)):
        parts = make(placement=placement, norm=norm, norm_eps=eps)
        assert postnorm_identity(parts, 1, sublayer, stream()) < 1e-14


def test_the_identities_notice_what_is_wrong():
    """A defect must not be small for another reason: with eps off by a little it shows."""
    for placement, identity in (("pre", prenorm_identity), ("post", postnorm_identity)):
        parts = make.__wrapped__(norm_eps=1e-2, placement=placement)
        parts.config = dataclasses.replace(parts.config, norm_eps=1.001e-2)
        assert identity(parts, 1, "mlp", stream()) > 1e-9


def test_the_gradient_along_the_stream_is_conserved():
    tokens = np.array([1, 5, 2, 10, 3])
    exact = dual_identities(make(norm_eps=0.0), tokens)
    assert exact.exact.shape == (4,)
    assert max(exact.exact.max(), exact.plain.max(), exact.final) < 1e-14
    some = dual_identities(make(norm_eps=1e-3), tokens)
    assert some.exact.max() < 1e-14
    assert 1e-7 < some.plain.max() < 1e-1 and 1e-7 < some.final < 1e-1
    assert dual_identities(make(final_norm="off"), tokens).final is None


# --- bad input ------------------------------------------------------------------------------------


def test_bad_input_is_named():
    h, zero = stream(), stream()
    zero[2] = 0
    parts = make(placement="post")
    eye = np.eye(WIDTH)
    checks = [
        (lambda: radial_gains(eye, h[0], zero[2]), r"after\[\]: is zero and has no direction"),
        (lambda: radial_report(lambda x: x, zero), r"h\[2\]: is zero and has no direction"),
        (lambda: radial_report(lambda x: 0 * x, h), r"\(h\)\[0\]: is zero"),
        (lambda: radial_report(lambda x: x[:2], h), r"returns shape \(2, 8\) for \(4, 8\)"),
        (lambda: radial_report(lambda x: x, h, probes=1), "probes=1: must be at least 2"),
        (lambda: radial_gains(eye[:3], h[0], h[0]), r"jacobian of shape \(3, 8\): must be"),
        (lambda: radial_gains(eye, h[0], h), r"after of shape \(4, 8\): must be that of h"),
        (lambda: radial_gains(eye * np.nan, h[0], h[0]), "jacobian.*=nan: must be finite"),
        (lambda: radial_gains([[1.0]], [1.0], [1.0]), "with d at least 2"),
        (
            lambda: prenorm_identity(parts, 1, "mlp", h),
            "placement=post-norm: must read through a norm",
        ),
        (lambda: dual_identities(parts, [1, 2]), "placement=post-norm: must read through a norm"),
        (lambda: dual_identities(parts, [1]), r"tokens of shape \(1,\)"),
        (
            lambda: postnorm_identity(make(), 1, "mlp", h),
            "placement=pre-norm: has no norm on one stream",
        ),
        (lambda: prenorm_identity(make(norm="identity"), 1, "mlp", h), "must read through a norm"),
        (lambda: prenorm_identity(make(), 1, "mlp", h[0]), "must be one sequence"),
    ]
    for call, message in checks:
        with pytest.raises(UserError, match=message):
            call()
    assert radial_report(lambda x: 2 * jnp.asarray(x), h[0]).rr == pytest.approx(2.0)
