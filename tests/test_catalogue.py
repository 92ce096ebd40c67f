"""Every placement of the catalogue: equal to its published recurrence, and to what it must equal.

The recurrences are written here a second time, from the sources, in plain NumPy: the model lends
only its branches F and its parameters. Where a scheme is a known one under a condition, that is
tested too, with the condition.
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.decoder import Decoder, DecoderConfig
from normjax.jacobians.blocks import Parts
from normjax.placements import COMMON, PLACEMENTS
from normjax.reporting import explanations

V, T, D, L = 11, 4, 8, 4
EPS = 1e-2
TOKENS = np.array([[7, 2, 9, 0], [4, 4, 1, 10]])
CATALOGUE = [name for name in PLACEMENTS if name not in COMMON]


def built(name, depth=L, spread=0.3, **changes):
    """A decoder in float64 and its parameters, each away from where it starts."""
    fixed = {"depth": depth, "width": D, "heads": 2, "norm_eps": EPS, "placement": name}
    with jax.enable_x64(True):
        config = DecoderConfig(**(fixed | {"dtype": "float64", "param_dtype": "float64"} | changes))
        model = Decoder(config, V, T)
        params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
    rng = np.random.default_rng(1)
    return model, jax.tree.map(lambda x: x + spread * rng.normal(size=x.shape), params)


def logits(model, params):
    with jax.enable_x64(True):
        return np.asarray(model.apply(params, jnp.asarray(TOKENS)))


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
        self.steps = [(l, s) for l in range(1, self.L + 1) for s in ("attention", "mlp")]

    def F(self, l, s, x):
        with jax.enable_x64(True):
            branch = self.model.pieces(self.params, l, s)["branch"]
            return np.asarray(branch(jnp.asarray(x)))

    def own(self, l, s, *path):
        found = self.params["blocks"][s]
        for key in path:
            found = found[key]
        return found[l - 1]

    def N(self, l, s, x, slot="pre_norm", offset=0.0):
        return rms(x, offset + self.own(l, s, slot, "gain"))

    def out(self, h, name="final_norm"):
        return rms(h, self.params[name]["gain"]) @ self.params["embedding"].T


def pre_like(a=lambda r, l, s: 1.0, b=lambda r, l, s: 1.0, q=False):
    def recurrence(r):
        h = r.h
        for l, s in r.steps:
            out = r.F(l, s, r.N(l, s, h))
            h = a(r, l, s) * h + b(r, l, s) * (r.N(l, s, out, "branch_norm") if q else out)
        return r.out(h)

    return recurrence


def keel(r):
    h = r.h
    for l, s in r.steps:
        h = r.N(l, s, 2 * r.L * h + r.F(l, s, r.N(l, s, h)), "post_norm")
    return h @ r.params["embedding"].T


def mix_ln(r):
    h = r.h
    for l, s in r.steps:
        if l <= r.L / 4:
            h = r.N(l, s, h + r.F(l, s, h), "post_norm")
        else:
            h = h + r.F(l, s, r.N(l, s, h))
    return r.out(h)


def branch_normed(r):
    h = r.h
    for l, s in r.steps:
        h = h + r.N(l, s, r.F(l, s, h), "branch_norm")
    return r.out(h)


def minimax(r):
    h = r.h
    for l, s in r.steps:
        h = r.N(l, s, h)
        h = (2 * r.L) ** 0.25 * h + r.F(l, s, h)
    return r.out(h)


def beam_k(l, s):
    return 2 * l + (s == "mlp")


def muse_spark(r):
    h = rms(r.h)
    for l, s in r.steps:
        b = sigmoid(r.own(l, s, "gate") / 0.3)
        a = np.sqrt(np.maximum(1 - b**2, 1e-3))
        h = a * h + b * rms(r.F(l, s, r.N(l, s, h, offset=1.0)))
    return r.out(h)


def no_norm(r):
    h = r.h
    for l, s in r.steps:
        h = h + r.F(l, s, h)
    return h @ r.params["embedding"].T


def admin(r):
    h = r.h
    for l, s in r.steps:
        h = r.N(l, s, r.own(l, s, "keep") * h + r.F(l, s, h), "post_norm")
    return h @ r.params["embedding"].T


def token_gate(r):
    h = r.h
    for l, s in r.steps:
        p = {k: r.own(l, s, f"write_{k}") for k in ("projection", "base", "size")}
        g = 2 * sigmoid(p["size"] * (rms(h, eps=1e-6) @ p["projection"]) + p["base"][0])
        h = h + g * r.F(l, s, r.N(l, s, h))
    return r.out(h)


def parallel(r):
    h = r.h
    for l in range(1, r.L + 1):
        h = h + sum(r.F(l, s, r.N(l, s, h)) for s in ("attention", "mlp"))
    return r.out(h)


def residual(r):
    x = total = r.h
    for l, s in r.steps:
        f = r.F(l, s, x)
        x, total = r.N(l, s, x + f, "post_norm"), total + f
    h = x + rms(total, r.params["readout_norm"]["gain"])
    return h @ r.params["embedding"].T


def siamesenorm(r):
    gains = [r.params["embedding_norm"]["gain"]]
    gains += [r.own(l, s, "post_norm", "gain") for l, s in r.steps]
    x = y = r.h
    for (l, s), g in zip(r.steps, gains, strict=False):
        x = rms(x, g)
        z = r.F(l, s, r.N(l, s, x + r.N(l, s, y, "mix_norm")))
        x, y = x + z / np.sqrt(2 * ((l - 1) + 1)), y + z
    return r.out(rms(x, gains[-1]) + rms(y, r.params["readout_norm"]["gain"]))


def spannorm(r):
    x = r.h
    for l in range(1, r.L + 1):
        read = r.N(l, "attention", x) if l == 1 else x
        y = r.N(l, "mlp", x + r.F(l, "attention", read))
        x = r.N(l, "mlp", x + r.F(l, "mlp", y), "post_norm")
    return x @ r.params["embedding"].T


def dynamic_hyper_connections(r):
    """H' = A_r^T H + B F(A_m^T H)^T, each of them static + s tanh(r(H) W), as in the paper."""
    H = np.stack([r.h, r.h], axis=-2)  # (B, T, n, D)
    for l, s in r.steps:
        p = {f"{w}_{k}": r.own(l, s, f"{w}_{k}") for w in ("read", "keep", "write")
             for k in ("static", "vectors", "size")}  # fmt: skip
        turned = {w: p[f"{w}_size"] * np.tanh(rms(H, eps=1e-6) @ p[f"{w}_vectors"])
                  for w in ("read", "keep", "write")}  # fmt: skip
        A_m = p["read_static"].T + turned["read"]  # (n, 1): how much of each stream is read
        A_r = p["keep_static"].T + turned["keep"]  # (n, n): from the first to the second index
        B = p["write_static"] + turned["write"]  # (n, 1)
        x = np.einsum("btnm,btnd->btmd", A_m, H)[..., 0, :]
        f = r.F(l, s, r.N(l, s, x))
        H = np.einsum("btnm,btnd->btmd", A_r, H) + B * f[..., None, :]
    return r.out(H.sum(axis=-2))


def gates(r, H, get, prefix, shape):
    flat = rms(H.reshape(*H.shape[:2], -1), eps=1e-6)
    logits = get(f"{prefix}_size") * (flat @ get(f"{prefix}_projection"))
    return logits.reshape(*H.shape[:2], *shape) + get(f"{prefix}_base")


def mhc(r):
    """DeepSeek-V4 as shipped: softmax + eps, columns, 19 x (rows, columns); streams comb^T H."""
    H = np.stack([r.h] * 4, axis=-2)
    for l, s in r.steps:
        get = partial(r.own, l, s)
        pre = sigmoid(gates(r, H, get, "read", (4,))[..., :]) + 1e-6
        post = 2 * sigmoid(gates(r, H, get, "write", (4, 1)))[..., 0]
        comb = gates(r, H, get, "keep", (4, 4))
        comb = np.exp(comb) / np.exp(comb).sum(-1, keepdims=True) + 1e-6
        comb = comb / (comb.sum(-2, keepdims=True) + 1e-6)
        for _ in range(19):
            comb = comb / (comb.sum(-1, keepdims=True) + 1e-6)
            comb = comb / (comb.sum(-2, keepdims=True) + 1e-6)
        x = np.einsum("btn,btnd->btd", pre.reshape(*H.shape[:3]), H)
        f = r.F(l, s, r.N(l, s, x))
        H = post[..., None] * f[..., None, :] + np.swapaxes(comb, -1, -2) @ H
    w = sigmoid(gates(r, H, r.params.__getitem__, "readout", (1, 4)))[..., 0, :]
    return r.out(np.einsum("btn,btnd->btd", w, H))


def ihc(r):
    H = np.stack([r.h] * 4, axis=-2)
    for l, s in r.steps:
        get = partial(r.own, l, s)
        pre = sigmoid(gates(r, H, get, "read", (1, 4)))[..., 0, :]
        post = 2 * sigmoid(gates(r, H, get, "write", (4, 1)))
        H = H + post * r.F(l, s, r.N(l, s, np.einsum("btn,btnd->btd", pre, H)))[..., None, :]
    return r.out(H.sum(axis=-2))


def block_attention_residuals(r):
    def read(sources, query):
        keys = np.stack(sources, axis=-2)
        e = np.exp(rms(keys, eps=1e-6) @ query)
        return np.einsum("btn,btnd->btd", e / e.sum(-1, keepdims=True), keys)

    done, running = [r.h], None
    for l, s in r.steps:
        sources = done if running is None else [*done, running]
        f = r.F(l, s, r.N(l, s, read(sources, r.own(l, s, "read_query"))))
        running = f if running is None else running + f
        if s == "mlp":
            done, running = [*done, running], None
    return r.out(read(done, r.params["readout_query"]))


def denseformer(r):
    states = [r.h]
    for l in range(1, r.L + 1):
        alpha = r.own(l, "attention", "read_weights")
        h = sum(a * x for a, x in zip(alpha, states, strict=False))
        for s in ("attention", "mlp"):
            h = h + r.F(l, s, r.N(l, s, h))
        states.append(h)
    alpha = r.params["readout_weights"]
    return r.out(sum(a * x for a, x in zip(alpha, states, strict=True)))


def x0_mix(r):
    h = r.h
    for l, s in r.steps:
        if s == "attention":
            own, first = r.own(l, s, "read_weights")
            h = own * h + first * r.h
        h = h + r.F(l, s, r.N(l, s, h))
    return r.out(h)


RECURRENCES = {
    "keel": keel,
    "mix_ln": mix_ln,
    "inverse_root_depth": pre_like(b=lambda r, l, s: (2 * r.L) ** -0.5),
    "completep": pre_like(b=lambda r, l, s: 1 / r.L),
    "minicpm": pre_like(b=lambda r, l, s: 1.4 / np.sqrt(r.L)),
    "depth_scaled_sandwich": pre_like(q=True),
    "zero_gain": branch_normed,
    "minimax": minimax,
    "beam": pre_like(
        lambda r, l, s: np.sqrt((beam_k(l, s) - 1) / beam_k(l, s)),
        lambda r, l, s: np.sqrt(1 / beam_k(l, s)), q=True,
    ),
    "muse_spark": muse_spark,
    "doge": pre_like(lambda r, l, s: r.own(l, s, "keep")),
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
}  # fmt: skip


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_row_is_its_published_recurrence(name):
    model, params = built(name)
    found, expected = logits(model, params), RECURRENCES[name](Run(model, params))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())
