"""Every placement of the catalogue: equal to its published recurrence, and to what it must equal.

The recurrences are written here a second time, from the sources, in plain NumPy: the model lends
only its branches F and its parameters. Where a scheme is a known one under a condition, that is
tested too, with the condition.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.decoder import Decoder, DecoderConfig
from normjax.equation import FACTORS, SHARED_NORM, SLOTS, Learned
from normjax.jacobians.blocks import Parts
from normjax.mixing import Sigmoid, Sinkhorn
from normjax.placements import COMMON, PLACEMENTS
from normjax.reporting import explanations
from normjax.runs.run_folder import RunFolder, RunWriter
from normjax.training.checkpoints import Checkpoints, SavedStates

V, T, D, L = 11, 4, 8, 4
EPS = 1e-2
TOKENS = np.array([[7, 2, 9, 0], [4, 4, 1, 10]])
CATALOGUE = [name for name in PLACEMENTS if name not in COMMON]


def built(name, depth=L, spread=0.3, **changes):
    """A decoder in float64 and its parameters, each away from where it starts."""
    model, params = fresh(name, depth, tuple(sorted(changes.items())))
    rng = np.random.default_rng(1)
    return model, jax.tree.map(lambda x: x + spread * rng.normal(size=x.shape), params)


@functools.cache  # most tests compare a row with one that others have too
def fresh(name, depth, changes):
    fixed = {"depth": depth, "width": D, "heads": 2, "norm_eps": EPS, "placement": name,
             "mlp_width": D, "scan_layers": True}  # fmt: skip
    with jax.enable_x64(True):
        config = DecoderConfig(
            **(fixed | {"dtype": "float64", "param_dtype": "float64"} | dict(changes))
        )
        model = Decoder(config, V, T)
        return model, jax.tree.map(np.asarray, model.init(jax.random.key(0)))


@functools.cache
def program(model):
    return jax.jit(model.apply)


def logits(model, params):
    with jax.enable_x64(True):
        return np.asarray(program(model)(params, jnp.asarray(TOKENS)))


def rms(x, gain=1.0, eps=EPS):
    return gain * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# --- the published recurrences --------------------------------------------------------------------


class Run:
    """The parameters of a model, and its branches as functions, for a recurrence to use."""

    def __init__(self, model, params):
        self.model, self.params, self.L = model, params, model.config.depth
        self.h = params["embedding"][TOKENS]
        self.steps = [(b, s) for b in range(1, self.L + 1) for s in ("attention", "mlp")]

    def F(self, b, s, x):
        with jax.enable_x64(True):
            branch = self.model.pieces(self.params, b, s)["branch"]
            return np.asarray(branch(jnp.asarray(x)))

    def own(self, b, s, *path):
        found = self.params["blocks"][s]
        for key in path:
            found = found[key]
        return found[b - 1]

    def N(self, b, s, x, slot="pre_norm", offset=0.0):
        return rms(x, offset + self.own(b, s, slot, "gain"))

    def out(self, h, name="final_norm"):
        return rms(h, self.params[name]["gain"]) @ self.params["embedding"].T


def pre_like(keep=lambda r, b, s: 1.0, write=lambda r, b, s: 1.0, q=False):
    def recurrence(r):
        h = r.h
        for b, s in r.steps:
            out = r.F(b, s, r.N(b, s, h))
            out = r.N(b, s, out, "branch_norm") if q else out
            h = keep(r, b, s) * h + write(r, b, s) * out
        return r.out(h)

    return recurrence


def keel(r):
    h = r.h
    for b, s in r.steps:
        h = r.N(b, s, 2 * r.L * h + r.F(b, s, r.N(b, s, h)), "post_norm")
    return h @ r.params["embedding"].T


def mix_ln(r):
    h = r.h
    for b, s in r.steps:
        if b <= r.L / 4:
            h = r.N(b, s, h + r.F(b, s, h), "post_norm")
        else:
            h = h + r.F(b, s, r.N(b, s, h))
    return r.out(h)


def branch_normed(r):
    h = r.h
    for b, s in r.steps:
        h = h + r.N(b, s, r.F(b, s, h), "branch_norm")
    return r.out(h)


def minimax(r):
    h = r.h
    for b, s in r.steps:
        h = r.N(b, s, h)
        h = (2 * r.L) ** 0.25 * h + r.F(b, s, h)
    return r.out(h)


def beam_k(b, s):
    return 2 * b + (s == "mlp")


def muse_spark(r):
    h = rms(r.h)
    for b, s in r.steps:
        gate = sigmoid(r.own(b, s, "gate") / 0.3)
        a = np.sqrt(np.maximum(1 - gate**2, 1e-3))
        h = a * h + gate * rms(r.F(b, s, r.N(b, s, h, offset=1.0)))
    return r.out(h)


def no_norm(r):
    h = r.h
    for b, s in r.steps:
        h = h + r.F(b, s, h)
    return h @ r.params["embedding"].T


def admin(r):
    h = r.h
    for b, s in r.steps:
        h = r.N(b, s, r.own(b, s, "keep") * h + r.F(b, s, h), "post_norm")
    return h @ r.params["embedding"].T


def token_gate(r):
    h = r.h
    for b, s in r.steps:
        p = {k: r.own(b, s, f"write_{k}") for k in ("projection", "base", "size")}
        g = 2 * sigmoid(p["size"] * (rms(h, eps=1e-6) @ p["projection"]) + p["base"][0])
        h = h + g * r.F(b, s, r.N(b, s, h))
    return r.out(h)


def parallel(r):
    h = r.h
    for b in range(1, r.L + 1):
        h = h + sum(r.F(b, s, r.N(b, s, h)) for s in ("attention", "mlp"))
    return r.out(h)


def residual(r):
    x = total = r.h
    for b, s in r.steps:
        f = r.F(b, s, x)
        x, total = r.N(b, s, x + f, "post_norm"), total + f
    h = x + rms(total, r.params["readout_norm"]["gain"])
    return h @ r.params["embedding"].T


def siamesenorm(r):
    gains = [r.params["embedding_norm"]["gain"]]
    gains += [r.own(b, s, "post_norm", "gain") for b, s in r.steps]
    x = y = r.h
    for (b, s), g in zip(r.steps, gains, strict=False):
        x = rms(x, g)
        z = r.F(b, s, r.N(b, s, x + r.N(b, s, y, "mix_norm")))
        x, y = x + z / np.sqrt(2 * ((b - 1) + 1)), y + z
    return r.out(rms(x, gains[-1]) + rms(y, r.params["readout_norm"]["gain"]))


def spannorm(r):
    x = r.h
    for b in range(1, r.L + 1):
        read = r.N(b, "attention", x) if b == 1 else x
        y = r.N(b, "mlp", x + r.F(b, "attention", read))
        x = r.N(b, "mlp", x + r.F(b, "mlp", y), "post_norm")
    return x @ r.params["embedding"].T


def dynamic_hyper_connections(r):
    """H' = A_r^T H + B F(A_m^T H)^T, each of them static + s tanh(r(H) W), as in the paper."""
    H = np.stack([r.h, r.h], axis=-2)  # (B, T, n, D)
    for b, s in r.steps:
        p = {f"{w}_{k}": r.own(b, s, f"{w}_{k}") for w in ("read", "keep", "write")
             for k in ("static", "vectors", "size")}  # fmt: skip
        turned = {w: p[f"{w}_size"] * np.tanh(rms(H, eps=1e-6) @ p[f"{w}_vectors"])
                  for w in ("read", "keep", "write")}  # fmt: skip
        A_m = p["read_static"].T + turned["read"]  # (n, 1): how much of each stream is read
        A_r = p["keep_static"].T + turned["keep"]  # (n, n): from the first to the second index
        B = p["write_static"] + turned["write"]  # (n, 1)
        x = np.einsum("btnm,btnd->btmd", A_m, H)[..., 0, :]
        f = r.F(b, s, r.N(b, s, x))
        H = np.einsum("btnm,btnd->btmd", A_r, H) + B * f[..., None, :]
    return r.out(H.sum(axis=-2))


def gates(r, H, get, prefix, shape):
    flat = rms(H.reshape(*H.shape[:2], -1), eps=1e-6)
    logits = get(f"{prefix}_size") * (flat @ get(f"{prefix}_projection"))
    return logits.reshape(*H.shape[:2], *shape) + get(f"{prefix}_base")


def mhc(r):
    """DeepSeek-V4 as shipped: softmax + eps, columns, 19 x (rows, columns); streams comb^T H."""
    H = np.stack([r.h] * 4, axis=-2)
    for b, s in r.steps:
        get = partial(r.own, b, s)
        pre = sigmoid(gates(r, H, get, "read", (4,))[..., :]) + 1e-6
        post = 2 * sigmoid(gates(r, H, get, "write", (4, 1)))[..., 0]
        comb = gates(r, H, get, "keep", (4, 4))
        comb = np.exp(comb) / np.exp(comb).sum(-1, keepdims=True) + 1e-6
        comb = comb / (comb.sum(-2, keepdims=True) + 1e-6)
        for _ in range(19):
            comb = comb / (comb.sum(-1, keepdims=True) + 1e-6)
            comb = comb / (comb.sum(-2, keepdims=True) + 1e-6)
        x = np.einsum("btn,btnd->btd", pre.reshape(*H.shape[:3]), H)
        f = r.F(b, s, r.N(b, s, x))
        H = post[..., None] * f[..., None, :] + np.swapaxes(comb, -1, -2) @ H
    return r.out(gated_readout(r, H))


def gated_readout(r, H):
    w = sigmoid(gates(r, H, r.params.__getitem__, "readout", (1, 4)))[..., 0, :] + 1e-6
    return np.einsum("btn,btnd->btd", w, H)


def ihc(r):
    H = np.stack([r.h] * 4, axis=-2)
    for b, s in r.steps:
        get = partial(r.own, b, s)
        pre = sigmoid(gates(r, H, get, "read", (1, 4)))[..., 0, :] + 1e-6
        post = 2 * sigmoid(gates(r, H, get, "write", (4, 1))) + 1e-6
        H = H + post * r.F(b, s, r.N(b, s, np.einsum("btn,btnd->btd", pre, H)))[..., None, :]
    return r.out(gated_readout(r, H))


def block_attention_residuals(r):
    def read(sources, query):
        keys = np.stack(sources, axis=-2)
        e = np.exp(rms(keys, eps=1e-6) @ query)
        return np.einsum("btn,btnd->btd", e / e.sum(-1, keepdims=True), keys)

    done, running = [r.h], None
    for b, s in r.steps:
        sources = done if running is None else [*done, running]
        f = r.F(b, s, r.N(b, s, read(sources, r.own(b, s, "read_query"))))
        running = f if running is None else running + f
        if s == "mlp":
            done, running = [*done, running], None
    return r.out(read(done, r.params["readout_query"]))


def denseformer(r):
    states = [r.h]
    for b in range(1, r.L + 1):
        alpha = r.own(b, "attention", "read_weights")
        h = sum(a * x for a, x in zip(alpha, states, strict=False))
        for s in ("attention", "mlp"):
            h = h + r.F(b, s, r.N(b, s, h))
        states.append(h)
    alpha = r.params["readout_weights"]
    return r.out(sum(a * x for a, x in zip(alpha, states, strict=True)))


def x0_mix(r):
    h = r.h
    for b, s in r.steps:
        if s == "attention":
            own, first = r.own(b, s, "read_weights")
            h = own * h + first * r.h
        h = h + r.F(b, s, r.N(b, s, h))
    return r.out(h)


def zaya(r):
    start = r.params["embedding_norm"]
    h = start["gain"] * (r.h + start["shift"])
    for b, s in r.steps:
        f = r.F(b, s, r.N(b, s, h))
        s_r, b_r = (r.own(b, s, "skip_norm", k) for k in ("gain", "shift"))
        s_f, b_f = (r.own(b, s, "branch_norm", k) for k in ("gain", "shift"))
        h = s_r * (h + b_r) + s_f * (f + b_f)
    return r.out(h)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def ngpt(r):
    """With vectors of length 1, as published; a branch reads sqrt(d) times its stream."""
    h = unit(r.h)
    for b, s in r.steps:
        step = abs(r.own(b, s, "step"))
        h = unit(h + step * (unit(inner(r, b, s, np.sqrt(D) * h)) - h))
    return np.sqrt(D) * h @ r.params["embedding"].T


def dory(r):
    h = r.h
    for b, s in r.steps:
        h, step = unit(h), abs(r.own(b, s, "step"))
        h = h + step * (unit(inner(r, b, s, np.sqrt(D) * h)) - h)
    return r.out(np.sqrt(D) * h)


def inner(r, b, s, x):
    """A branch by hand, no positions, ReLU: with what is normalized inside of it."""

    def w(name):
        return r.own(b, s, "branch", name, "kernel")

    def norm(name, x):
        held = r.params["blocks"][s]["branch"]
        return rms(x, r.own(b, s, "branch", name, "gain")) if name in held else x

    if s == "mlp":
        return norm("hidden_norm", np.maximum(x @ w("in"), 0)) @ w("out")
    q, k, v = ((x @ w(n)).reshape(*x.shape[:2], 2, -1) for n in ("query", "key", "value"))
    q, k = norm("query_norm", q), norm("key_norm", k)
    scores = np.einsum("bihc,bjhc->bhij", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    o = np.einsum("bhij,bjhc->bihc", p / p.sum(-1, keepdims=True), v)
    if "head_scale" in r.params["blocks"][s]["branch"]:
        o = o * r.own(b, s, "branch", "head_scale")[:, None]
    return norm("output_norm", o.reshape(x.shape)) @ w("output")


def sub_ln(r):
    h = r.h
    for b, s in r.steps:
        h = h + inner(r, b, s, r.N(b, s, h))
    return r.out(h)


def normformer(r):
    h = r.h
    for b, s in r.steps:
        f = inner(r, b, s, r.N(b, s, h))
        h = h + (r.N(b, s, f, "branch_norm") if s == "attention" else f)
    return r.out(h)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def nag(r, turned=None):
    """Equations 3 to 14: rho = rms(h), the part across h of the branch less its mean."""
    h = r.h
    for b, s in r.steps:
        rho = np.sqrt(np.mean(h * h, axis=-1, keepdims=True))
        f = r.F(b, s, h / rho)
        f = f - f.mean(-1, keepdims=True)
        f = f - np.sum(f * h / rho, -1, keepdims=True) / D * h / rho
        u = np.sqrt(D) * f / np.linalg.norm(f, axis=-1, keepdims=True)
        own = {k: r.own(b, s, f"join_{k}") for k in ("directions", "offsets", "logits")}
        gates = sigmoid(h / rho @ own["directions"] + own["offsets"])
        m = np.sum(softmax(own["logits"]) * gates, -1, keepdims=True)
        h = h + rho * r.own(b, s, "write_size")[0] * m * u
        if turned is not None:
            turned.append(h)
    return r.out(h)


def gpas(r):
    h = r.h
    for b, s in r.steps:
        alpha = r.own(b, s, "post_norm", "alpha")
        h = (1 - alpha * sigmoid(alpha)) * (h + r.F(b, s, r.N(b, s, h)))
    return r.out(h)


def altup(r):
    """Gemma 3n: predict, the active stream through the block, correct all by what it gained."""
    n, streams = 4, np.stack([r.h] * 4)

    def route(x, router, coefficients):
        return np.tanh(rms(x, eps=1e-6) @ router / D) @ coefficients

    for b in range(1, r.L + 1):
        own = partial(r.own, b, "attention")
        R = route(streams[0], own("read_predicts"), own("read_predictions"))
        R = R.reshape(*r.h.shape[:2], n, n)
        predicted = streams + np.einsum("btji,ibtd->jbtd", R, streams)
        active = predicted[0]
        z = r.N(b, "attention", active)
        laurel = z + rms(z @ own("join_left") @ own("join_right"), own("join_gain"))
        f = r.N(b, "attention", r.F(b, "attention", z), "branch_norm")
        active = (active + f + laurel) / np.sqrt(2)
        f = r.F(b, "mlp", r.N(b, "mlp", active))
        active = active + r.N(b, "mlp", f, "branch_norm")
        # A block's corrections stand with the next one, or with what reads out.
        last, where = b == r.L, "readout" if b == r.L else "read"
        held = r.params.__getitem__ if last else partial(r.own, b + 1, "attention")
        g = 1 + route(active, held(f"{where}_corrects"), held(f"{where}_corrections"))
        streams = predicted + np.moveaxis(g, -1, 0)[..., None] * (active - predicted[0])
    return r.out(streams.mean(0))


INSIDE = ("normformer", "sub_ln", "ngpt", "dory")
"""Rows that change what is inside of a branch: those are computed by hand."""
RECURRENCES = {
    "zaya": zaya,
    "ngpt": ngpt,
    "dory": dory,
    "sub_ln": sub_ln,
    "normformer": normformer,
    "keel": keel,
    "mix_ln": mix_ln,
    "inverse_root_depth": pre_like(write=lambda r, b, s: (2 * r.L) ** -0.5),
    "completep": pre_like(write=lambda r, b, s: 1 / r.L),
    "minicpm": pre_like(write=lambda r, b, s: 1.4 / np.sqrt(r.L)),
    "depth_scaled_sandwich": pre_like(q=True),
    "zero_gain": branch_normed,
    "minimax": minimax,
    "beam": pre_like(
        lambda r, b, s: np.sqrt((beam_k(b, s) - 1) / beam_k(b, s)),
        lambda r, b, s: np.sqrt(1 / beam_k(b, s)), q=True,
    ),
    "muse_spark": muse_spark,
    "doge": pre_like(lambda r, b, s: r.own(b, s, "keep")),
    "t_fixup": no_norm,
    "admin": admin,
    "token_gate": token_gate,
    "parallel": parallel,
    "residual": residual,
    "siamesenorm": siamesenorm,
    "spannorm": spannorm,
    "dynamic_hyper_connections": dynamic_hyper_connections,
    "mhc": mhc,
    "ihc": ihc,
    "block_attention_residuals": block_attention_residuals,
    "denseformer": denseformer,
    "x0_mix": x0_mix,
    "nag": nag,
    "altup": altup,
    "gpas": gpas,
}  # fmt: skip


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_row_is_its_published_recurrence(name):
    changes = {"mlp": "relu", "positions": "none"} if name in INSIDE else {}
    model, params = built(name, **changes)
    found, expected = logits(model, params), RECURRENCES[name](Run(model, params))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


# --- the board of exact identities ----------------------------------------------------------------

STARTS_AS_PRE = ("token_gate", "gpas", "doge", "x0_mix", "denseformer", "zaya")
"""At their start these are pre-norm, whatever the weights and eps."""
IN_PROPORTION = (
    "hyper_connections", "dynamic_hyper_connections", "attention_residuals",
    "block_attention_residuals",
)  # fmt: skip
"""At their start these carry multiples of pre-norm's stream: the same for norms without eps."""
SCALED = {"inverse_root_depth": (2 * L) ** -0.5, "completep": 1 / L, "minicpm": 1.4 * L**-0.5}


def lent(name, params, **changes):
    """A decoder of a row with the parameters of another, what only it has at its start."""
    model, fresh = built(name, spread=0.0, **changes)

    def merged(own, other):
        if isinstance(own, dict):
            return {k: merged(v, other.get(k)) if other else v for k, v in own.items()}
        return own if other is None else other

    return model, merged(fresh, params)


def agree(one, other, tolerance=1e-12):
    expected = logits(*other)
    np.testing.assert_allclose(
        logits(*one), expected, rtol=0, atol=tolerance * np.abs(expected).max()
    )


@pytest.mark.parametrize("name", STARTS_AS_PRE)
def test_a_gate_a_vector_a_mix_start_as_prenorm(name):
    pre = built("pre", bias=True)
    agree(lent(name, pre[1], bias=True), pre)
    moved, params = lent(name, pre[1], bias=True)
    params = jax.tree.map(lambda x: x + 0.1, params)
    assert np.abs(logits(moved, params) - logits(pre[0], jax.tree.map(lambda x: x + 0.1, pre[1]))
                  ).max() > 1e-3 * np.abs(logits(*pre)).max()  # fmt: skip


@pytest.mark.parametrize("name", IN_PROPORTION)
def test_equal_streams_and_equal_sources_are_prenorm_in_proportion(name):
    """A mean, or n copies, of what pre-norm sums; with an eps its norms see another size."""
    pre = built("pre", norm_eps=0.0)
    model, params = lent(name, pre[1], norm_eps=0.0)
    params = _without_projections(params)
    agree((model, params), pre)
    agree_not = lent(name, built("pre", norm_eps=0.3)[1], norm_eps=0.3)
    with pytest.raises(AssertionError):
        agree((agree_not[0], _without_projections(agree_not[1])), built("pre", norm_eps=0.3))


def _without_projections(params):
    flat, tree = jax.tree_util.tree_flatten_with_path(params)
    zero = [np.zeros_like(x) if "projection" in path[-1].key else x for path, x in flat]
    return jax.tree.unflatten(tree, zero)


EXACT = {
    "mhc": {"keep": Sinkhorn(20, 0.0)},
    "ihc": {"read": Sigmoid(), "write": Sigmoid(2.0)},
}  # fmt: skip
"""What has no eps in the place of what is shipped."""


@pytest.mark.parametrize("name", EXACT)
def test_gated_equal_streams_are_prenorm_where_no_eps_is_in_their_weights(name):
    """As shipped they are so to 1e-6 a sub-layer, without eps to rounding."""
    pre = built("pre", norm_eps=0.0)
    row = PLACEMENTS[name]
    own = {
        place: dataclasses.replace(getattr(row.attention, place), squash=squash)
        for place, squash in EXACT[name].items()
    }
    exact = dataclasses.replace(row, attention=dataclasses.replace(row.attention, **own))
    found = {}
    for each in (exact, name):
        model, params = lent(each, pre[1], norm_eps=0.0)
        params = _without_projections(params)
        found[each == name] = np.abs(logits(model, params) - logits(*pre)).max()
    assert found[False] < 1e-12 * np.abs(logits(*pre)).max()
    assert 1e-12 < found[True] < 1e-4


def test_the_exact_side_of_sinkhorn_is_that_of_its_last_division():
    """Rows of W, each new stream, sum to 1 but for eps; columns leak with the logits' spread."""
    rng = np.random.default_rng(0)
    off = {}
    for spread in (0.3, 5.0):
        with jax.enable_x64(True):
            W = np.asarray(Sinkhorn().value(jnp.asarray(spread * rng.normal(size=(200, 4, 4)))))
        assert np.abs(W.sum(-1) - 1).max() < 2e-6 and W.min() > 0
        off[spread] = np.abs(W.sum(-2) - 1).max()
    assert off[0.3] < 1e-4 and off[5.0] > 1e-3
    # At the shipped start all logits are zero: the streams collapse to their mean at once.
    values = np.linalg.svd(np.asarray(Sinkhorn().value(jnp.zeros((4, 4)))))[1]
    np.testing.assert_allclose(values, [1, 0, 0, 0], atol=1e-5)


def test_beam_times_the_root_of_k_is_the_sandwich():
    """sqrt(k) h of Beam is the sandwich's stream; its norms must see no eps (T17)."""
    sandwich = built("sandwich", norm_eps=0.0)
    agree(lent("beam", sandwich[1], norm_eps=0.0), sandwich)


def test_minimax_is_deepnorm_with_other_brackets():
    """The post-norm of one sub-layer is the norm of the next; the embedding must have size 1."""
    deepnorm, params = built("deepnorm", norm_eps=0.0)
    params["embedding"] = rms(params["embedding"], eps=0.0)
    model, own = lent("minimax", params, norm_eps=0.0)
    gains = [params["blocks"][s]["post_norm"]["gain"][b] for b in range(L)
             for s in ("attention", "mlp")]  # fmt: skip
    for i, gain in enumerate([np.ones(D), *gains[:-1]]):
        own["blocks"][("attention", "mlp")[i % 2]]["pre_norm"]["gain"][i // 2] = gain
    own["final_norm"]["gain"] = gains[-1]
    agree((model, own), (deepnorm, params))


def test_dory_is_ngpt_with_other_brackets():
    """What nGPT normalizes at the end of a sub-layer Dory normalizes where it is read next."""
    plain = {"norm": "rmsnorm_plain", "norm_eps": 0.0}
    ngpt = built("ngpt", **plain)
    agree(lent("dory", ngpt[1], **plain), ngpt)


def test_vectors_on_the_sphere_have_length_one():
    """At the start and after every step: of each matrix those that meet the stream."""
    model, params = built("ngpt", spread=0.0)
    own = params["blocks"]["mlp"]["branch"]
    for vectors, axis in ((params["embedding"], -1), (own["in"]["kernel"], -2),
                          (own["out"]["kernel"], -1)):  # fmt: skip
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=axis), 1, rtol=1e-6)
    with jax.enable_x64(True):
        moved = model.after_step(jax.tree.map(lambda x: 3 * x + 0.1, params))
    np.testing.assert_allclose(
        np.linalg.norm(moved["blocks"]["attention"]["branch"]["query"]["kernel"], axis=-2), 1,
        rtol=1e-6,
    )  # fmt: skip
    np.testing.assert_allclose(moved["blocks"]["mlp"]["step"], 3 * 0.05 + 0.1, rtol=1e-6)


@pytest.mark.parametrize("name", SCALED)
def test_a_constant_on_the_branch_is_one_on_its_output_matrix(name):
    pre, params = built("pre")
    smaller = jax.tree.map(np.copy, params)
    smaller["blocks"]["attention"]["branch"]["output"]["kernel"] *= SCALED[name]
    smaller["blocks"]["mlp"]["branch"]["out"]["kernel"] *= SCALED[name]
    agree(lent(name, params), (pre, smaller))


def test_mix_ln_without_a_post_norm_block_is_prenorm():
    pre = built("pre", depth=3)  # a quarter of three blocks is none
    agree(lent("mix_ln", pre[1], depth=3), pre, tolerance=1e-15)


def test_what_residual_reads_is_postnorm():
    post = built("post")
    model, params = lent("residual", post[1])
    params["readout_norm"]["gain"] = np.zeros(D)
    agree((model, params), post)


def test_admin_with_equal_weights_is_postnorm_and_its_start_is_the_profile():
    post = built("post")
    model, params = lent("admin", post[1])
    for s in ("attention", "mlp"):
        params["blocks"][s]["keep"] = np.ones((L, D))
    agree((model, params), post)
    # w_1 = 1, w_{i+1}^2 = w_i^2 Var(h_i) + Var(F_i), in a pass with these weights.
    model, params = built("admin", spread=0.0)
    run = Run(model, params)
    h, w = params["embedding"][(np.arange(4 * T) % V).reshape(4, T)], 1.0
    for b, s in run.steps:
        np.testing.assert_allclose(run.own(b, s, "keep"), w, rtol=1e-6)
        f = run.F(b, s, h)
        h, w = run.N(b, s, w * h + f, "post_norm"), np.sqrt(w**2 * h.var() + f.var())
    assert w > 1.2


@pytest.mark.parametrize("name", ["rezero", "skipinit", "zero_gain"])
def test_what_starts_at_zero_is_the_identity(name):
    model, params = built(name, depth=2, spread=0.0)
    part = Parts(model, params).stack(1, 2)
    h = np.random.default_rng(0).normal(size=(3, D))
    np.testing.assert_array_equal(part(h), h)
    J = part.sequence_jacobian(h).reshape(3 * D, 3 * D)
    np.testing.assert_array_equal(J, np.eye(3 * D))


def test_a_row_that_stops_gradients_has_both_jacobians():
    """Of a sub-layer of GPAS training sees J / (1 - SiLU(a)); autodiff of each is its own."""
    model, params = built("gpas", depth=1)
    h = np.random.default_rng(0).normal(size=(3, D))
    alpha = params["blocks"]["mlp"]["post_norm"]["alpha"][0]
    found = []
    for surrogate in (False, True):
        part = Parts(model, params, surrogate=surrogate).sublayer(1, "mlp")
        with jax.enable_x64(True):
            expected = np.asarray(jax.jit(jax.jacfwd(part))(jnp.asarray(h)))
        found.append(part.sequence_jacobian(h))
        np.testing.assert_allclose(found[-1], expected, rtol=0, atol=1e-14 * abs(expected).max())
    np.testing.assert_allclose(found[0], (1 - alpha * sigmoid(alpha)) * found[1], rtol=1e-12)
    with jax.enable_x64(True):  # and training takes the model as it is
        own = model.layer(params, 1)
        seen = jax.jacfwd(lambda x: model.block(own, x, "mlp"))(jnp.asarray(h)[None])
    np.testing.assert_allclose(np.asarray(seen)[0, :, :, 0], found[1], rtol=0, atol=1e-13)


def test_nag_turns_and_grows_as_its_sizes_say():
    """Each step is across the stream; with m = 1 and a = l^(-1/2), |h_l|^2 = (l + 1) |h_0|^2."""
    model, params = built("nag", spread=0.0)
    for s in ("attention", "mlp"):
        params["blocks"][s]["join_offsets"] += 100.0
    run, turned = Run(model, params), []
    nag(run, turned)
    size = np.linalg.norm(np.stack([run.h, *turned]), axis=-1)
    grown = np.sqrt(np.arange(2 * L + 1) + 1.0)[:, None, None] * size[0]
    np.testing.assert_allclose(size, grown, rtol=1e-6)  # the sizes are float32 at the start
    found = Parts(model, params).hidden_states(TOKENS)
    np.testing.assert_allclose(found[1:], turned[1::2], rtol=0, atol=1e-12 * size.max())
    steps = np.diff(np.stack([run.h, *turned]), axis=0)
    before = np.stack([run.h, *turned[:-1]])
    assert np.abs(np.sum(steps * before, -1)).max() < 1e-12 * size.max() ** 2


def test_muse_spark_keeps_the_sum_of_squares():
    row = PLACEMENTS["muse_spark"].attention
    g = np.linspace(-2, 0.9, 50)
    a, b = row.keep.made_of(g), row.write.made_of(g)
    np.testing.assert_allclose(a**2 + b**2, 1, rtol=1e-15)
    assert row.keep.made_of(np.array(30.0)) == np.sqrt(1e-3)  # where 1 - b^2 is cut off


def test_starts_are_as_documented():
    for name, gain in (("depth_scaled_sandwich", L**-0.5), ("zero_gain", 0.0)):
        for norm, offset in (("rmsnorm", 0.0), ("rmsnorm_offset", 1.0)):
            params = built(name, spread=0.0, norm=norm)[1]
            start = offset + params["blocks"]["mlp"]["branch_norm"]["gain"]
            np.testing.assert_allclose(start, gain, rtol=1e-7)
    fixed, plain = (built(name, spread=0.0, init="xavier")[1] for name in ("t_fixup", "none"))
    for path, factor in {
        ("embedding",): (9 * L) ** -0.25,
        ("blocks", "attention", "branch", "query", "kernel"): 1.0,
        ("blocks", "attention", "branch", "value", "kernel"): (9 * L) ** -0.25 * 2**0.5,
        ("blocks", "mlp", "branch", "out", "kernel"): (9 * L) ** -0.25,
    }.items():
        one, other = fixed, plain
        for key in path:
            one, other = one[key], other[key]
        np.testing.assert_allclose(one, factor * other, rtol=1e-6)


# --- every row ------------------------------------------------------------------------------------


QUICK = ("muse_spark", "siamesenorm", "dynamic_hyper_connections", "altup", "nag")
"""One row of each new kind; the others take the same way in the longer checks."""
EACH = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PLACEMENTS]


@pytest.mark.parametrize("name", EACH)
def test_every_row_is_a_decoder(name):
    """Causal by gradient, gradients finite, scanned = unrolled = vmapped = pmapped, closed form =
    autodiff of each kind of sub-layer."""
    model, params = built(name, depth=2)
    unrolled = built(name, depth=2, scan_layers=False)[0]
    with jax.enable_x64(True):
        tokens = jnp.asarray(TOKENS)
        whole = program(model)(params, tokens)
        agree = partial(np.testing.assert_allclose, rtol=0, atol=1e-12 * float(abs(whole).max()))
        agree(jax.jit(unrolled.apply)(params, tokens), whole)
        stacked = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), params)
        agree(jax.vmap(program(model), (0, None))(stacked, tokens)[0], whole)
        agree(jax.pmap(model.apply, in_axes=(0, None))(stacked, tokens)[0], whole)
        state = model.embed(params, tokens)

        def seen(h):  # what the first two positions come to, by all states before block 1
            for block in (1, 2):
                h = model.block(model.layer(params, block), h)
            return jnp.sum(jnp.sin(model.readout(params, h)[:, :2]))

        slope = np.asarray(jax.jit(jax.grad(seen))(state))
        assert np.all(slope[:, 2:] == 0) and np.all(np.any(slope[:, :2] != 0, axis=-1))
        loss = lambda p: jnp.sum(jnp.sin(model.apply(p, tokens)))  # noqa: E731
        gradients = jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params))
    assert all(np.all(np.isfinite(g)) for _, g in gradients)
    idle = [jax.tree_util.keystr(path) for path, g in gradients if not np.any(g)]
    assert not idle, f"parameters that change nothing: {idle}"
    parts = Parts(model, params)
    h = np.random.default_rng(0).normal(size=(3, model.config.state_width))
    for part in (parts.sublayer(2, "attention"), parts.sublayer(2, "mlp")):
        with jax.enable_x64(True):
            expected = np.asarray(jax.jit(jax.jacfwd(part))(jnp.asarray(h)))
        np.testing.assert_allclose(
            part.sequence_jacobian(h), expected, rtol=0, atol=1e-13 * np.abs(expected).max()
        )


@pytest.mark.parametrize("name", EACH)
def test_every_row_comes_back_from_a_checkpoint(name, tmp_path):
    """Bit for bit, by the names that its own parameters have."""
    params = fresh(name, L, ())[1]
    run = RunWriter(tmp_path)
    run.begin({"train": {"steps": 1}}, "0" * 64, {}, 0, False)
    Checkpoints(run).save(1, params)
    empty = jax.tree.map(np.zeros_like, params)
    back = SavedStates(RunFolder(tmp_path)).restore(1, empty)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    assert jax.tree.structure(back) == jax.tree.structure(params)


def test_every_row_starts_as_it_says():
    """Gains, learned factors, weights of streams, and the sizes of the matrices."""
    for name in (*CATALOGUE, *COMMON):
        row = PLACEMENTS[name]
        model, params = fresh(name, L, ())
        if row.after_init is not None:
            continue  # what it does has tests of its own
        # The initialization that the row names, of a decoder without anything of the row.
        plain = fresh("none", L, (("init", row.init),) if row.init else ())[1]
        gain = row.branch_gain(L)
        for s, matrix, factor in (
            ("attention", "query", 1.0), ("attention", "value", gain * row.value_gain),
            ("attention", "output", gain), ("mlp", "in", gain), ("mlp", "out", gain),
        ):  # fmt: skip
            own, other = (p["blocks"][s]["branch"][matrix]["kernel"] for p in (params, plain))
            np.testing.assert_allclose(own, factor * other, rtol=1e-6, err_msg=name)
        for s in ("attention", "mlp"):
            held, sublayer = params["blocks"][s], row.of(s)
            for slot in SLOTS:
                norms = sublayer.norms(slot, L)
                for i, norm in enumerate(n for n in norms if n != SHARED_NORM):
                    own = held.get(slot if i == 0 else f"{slot}_{i + 1}", {})
                    for k, start in model.config.norm_of(norm).started(D).items():
                        np.testing.assert_allclose(own[k], np.stack([start] * L), rtol=1e-6)
            for b in range(1, L + 1):
                at = sublayer.at(b, L)
                for k in FACTORS:
                    factor = getattr(at, k)
                    if isinstance(factor, Learned):
                        where = params["blocks"] if factor.shared else held
                        own = where[factor.name or k][b - 1]
                        np.testing.assert_allclose(own, factor.start, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_row_is_said_and_recorded(name):
    row = PLACEMENTS[name]
    assert row.title and row.source and row.summary and row.action
    record = DecoderConfig(depth=L, placement=name).record()
    assert json.loads(json.dumps(record)) == record
    said = explanations.equation(record)
    assert said and "F(" in said and explanations.jacobian(record)


@pytest.mark.parametrize("name", EACH)
def test_every_row_computes_in_bfloat16(name):
    """Finite, and as far from float32 as the 8 bits of its numbers are, over two blocks."""
    params = Decoder(DecoderConfig(depth=2, width=D, heads=2, placement=name), V, T).init(
        jax.random.key(0)
    )
    whole, narrow = (
        Decoder(DecoderConfig(depth=2, width=D, heads=2, placement=name, dtype=dtype), V, T)
        for dtype in ("float32", "bfloat16")
    )
    expected = np.asarray(whole.apply(params, jnp.asarray(TOKENS)))
    found = np.asarray(narrow.apply(params, jnp.asarray(TOKENS)), np.float32)
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
