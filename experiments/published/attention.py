"""Attention and its softmax, A1 to A13: the decoder's own where it has the set-up, else NumPy."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import integrate, optimize, special

from experiments.claims.attention_claims import AttentionProbe
from experiments.claims.claim import Tolerance, digits, rounding
from experiments.claims.setting import Point
from experiments.published.result import Result, at_most, number
from experiments.published.setting import Board, decoder, resolution, seeds, weights
from normjax.data.tasks.table import build
from normjax.jacobians.branch_jacobians import softmax_gauge, softmax_jacobian
from normjax.layers import softcap
from normjax.reporting.statistics import estimate

DONG = "Dong et al. 2021, arXiv 2103.03404"
WU = "Wu et al. 2024, arXiv 2405.18781"
EDELMAN = "Edelman et al. 2024, arXiv 2402.11004"
MANY = 64
"""Softmaxes of Gaussian logits in a mean."""
SMALL = (1e-3, 1e-4)
"""Spreads of tokens at which the order of a map is taken."""


def residual(x: Any) -> float:
    """Return |x - its mean over tokens|."""
    return float(np.linalg.norm(x - np.mean(x, axis=0)))


def order(function: Any, one: Any, each: Any) -> float:
    """Return the power of the spread of nearly equal tokens in the spread of a function of them."""
    out = [residual(np.asarray(function(one + c * each))) / residual(each) for c in SMALL]
    return math.log(out[0] / out[1]) / math.log(SMALL[0] / SMALL[1])


def unmasked(x: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return softmax(x q k^T x^T / sqrt(d)) x v without a mask."""
    logits = (x @ q) @ (x @ k).T / q.shape[1] ** 0.5
    p = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True) @ x @ v


def collapse(board: Board, residual_path: bool = False) -> list[Result]:
    """A1, A2: the order of an attention layer in the spread of its tokens."""
    d, T = 32, 8
    free = []
    for g in seeds(board, 40):
        q, k, v = g.standard_normal((3, d, d)) / d**0.5
        x = g.standard_normal(d), g.standard_normal((T, d))
        free.append(order(lambda z, w=(q, k, v): unmasked(z, *w), *x))
    model = decoder(
        "none", d, 1, T, mlp="none", residual=residual_path, norm="identity", dtype="float64",
        param_dtype="float64",
    )  # fmt: skip
    run = jax.jit(lambda params, x: model.block(model.layer(params, 1), x[None])[0])
    masked = [
        order(partial(run, weights(model, g)), g.standard_normal(d), g.standard_normal((T, d)))
        for g in seeds(board, 41)
    ]
    tolerance = Tolerance(0.05, "terms of the next order in the spread, 1e-3 and 1e-4")
    return [
        Result(
            "A1", "Attention without skip and mask collapses to rank one with a cubic rate: what"
            " tokens differ by is cubed in each layer.",
            DONG, "recalled",
            f"one layer, d = {d}, {T} tokens, weights N(0, 1/d), in NumPy; order of the output’s"
            " spread in the input’s",
            number(3.0), tolerance, tuple(free),
        ),
        Result(
            "A2", "With a causal mask the collapse is exponential, not doubly: a layer is of order"
            " one in the spread.",
            WU, "paper",
            f"one layer of the decoder without skip, MLP and norm, d = {d}, {T} tokens",
            number(1.0), tolerance, tuple(masked),
        ),
    ]  # fmt: skip


def query_key_norm(board: Board, normed: bool = True) -> list[Result]:
    """A3: the bound on logits, where it is reached and where weights are random."""
    point = Point(board.seed, 64, 2, 6)
    bound, own = (point.width // point.heads) ** 0.5, []
    for aligned in (False, True):
        probe, largest = AttentionProbe(point, qk_norm=normed), 0.0
        if normed:  # gains of 1
            probe.params = {
                name: jax.tree.map(jnp.ones_like, leaf) if name.endswith("_norm") else leaf
                for name, leaf in probe.params.items()
            }
        if aligned:
            probe.params = probe.params | {"key": probe.params["query"]}
        for g in seeds(board, 42):
            x = 100 * g.standard_normal((point.tokens, point.width))
            largest = max(largest, float(np.max(np.abs(probe.logits(x)))))
        own.append(largest)
    setup = f"{point.heads} heads of {point.width // point.heads}, rotary positions, float64"
    return [
        Result(
            "A3", "RMSNorm of queries and keys with gains 1 bounds every logit by sqrt(d_h).",
            "Henry et al. 2020, arXiv 2010.04245; bound by Cauchy and Schwarz", "derived",
            f"{setup}, random weights, inputs of size 100; the largest logit of {board.seeds}"
            " draws",
            at_most(bound), rounding(256, bound, "two norms and a product over the head"),
            (own[0],),
        ),
        Result(
            "A4", "The bound is reached: where W_q = W_k a token’s logit with itself is sqrt(d_h).",
            "Henry et al. 2020, arXiv 2010.04245; bound by Cauchy and Schwarz", "derived", setup,
            number(bound), rounding(256, bound, "two norms and a product over the head"),
            (own[1],),
        ),
    ]  # fmt: skip


def softmax_norms(board: Board) -> list[Result]:
    """A5 to A7: norms of the softmax's Jacobian, by brute force."""
    V, temperature = 6, 0.7
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=V)))
    off, most, ends = 0.0, 0.0, []
    for g in seeds(board, 43, 10):
        z = 3 * g.standard_normal(V)
        jacobian = np.asarray(jax.jacfwd(lambda x: jax.nn.softmax(x / temperature))(jnp.asarray(z)))
        brute = float(np.max(np.sum(np.abs(signs @ jacobian.T), axis=1)))
        gauge = float(softmax_gauge(z / temperature).value) / temperature
        off = max(off, abs(brute - gauge))
        p = np.asarray(jax.nn.softmax(jnp.asarray(z)))
        one = softmax_jacobian(z)
        most = max(most, *(np.linalg.norm(one, kind) for kind in (1, 2, np.inf)))
        ends.append(abs(np.linalg.norm(one, np.inf) - np.max(2 * p * (1 - p))))
    half = max(np.linalg.norm(softmax_jacobian([0.0, 0.0]), kind) for kind in (1, 2, np.inf))
    near = rounding(64, 2.0, "a softmax and sums over its entries")
    draws = f"{V} logits N(0, 9), {10 * board.seeds} draws"
    return [
        Result(
            "A5", "The norm of the softmax’s Jacobian from the largest entry to the sum is max over"
            " sets S of 4 p(S) (1 − p(S)) / τ.",
            "arXiv 2602.18849", "paper",
            f"{draws}, τ = {temperature}; largest difference between the program’s gauge and all"
            f" {len(signs)} vectors of signs on jax.jacfwd",
            number(0.0), near, (off,),
        ),
        Result(
            "A6", "Softmax is 1/2-Lipschitz in the 1-, 2- and ∞-norm, and no less: two equal"
            " entries reach it.",
            "arXiv 2510.23012", "paper",
            f"{draws}, and two equal logits; the largest norm of a Jacobian",
            number(0.5), near, (max(most, half),),
        ),
        Result(
            "A7", "Its ∞-norm is max over entries of 2 p (1 − p).", "arXiv 2510.23012", "paper",
            f"{draws}; largest difference", number(0.0), near, (max(ends),),
        ),
    ]  # fmt: skip


def frozen(board: Board) -> list[Result]:
    """A8, A9: the entropy of a softmax of Gaussian logits, the random energy model."""
    level = 1.0  # nats: where the entropy is this small, about e keys are left
    # Frozen, probabilities follow Poisson and Dirichlet: E H = psi(1) - psi(1 - m), m = b_c / b.
    share: Any = optimize.brentq(
        lambda m: special.digamma(1) - special.digamma(1 - m) - level, 0.01, 0.9
    )
    powers = range(board.keys - 8, board.keys + 1, 2)
    logs = np.array([n * math.log(2) for n in powers])
    found, quarter = np.zeros((board.seeds, len(powers))), []
    for k, n in enumerate(powers):
        critical = math.sqrt(2 * logs[k])
        for s, g in enumerate(seeds(board, 50 + n)):
            z = g.standard_normal((MANY, 2**n))
            mean = lambda b, z=z: float(np.mean(entropy(b * z))) - level  # noqa: E731
            found[s, k] = share * optimize.brentq(mean, 0.3 * critical, 6 * critical, xtol=0.01)
            if n == powers[-1]:
                quarter.append(float(np.mean(entropy(critical / 2 * z))) / logs[k])
    n, T, critical = powers[-1], 2 ** powers[-1], math.sqrt(2 * logs[-1])
    ratios = found / np.sqrt(2 * logs)
    # A largest of T Gaussians lies this much below sqrt(2 ln T).
    shift = (np.log(logs) + math.log(4 * math.pi)) / (4 * logs)
    line = [estimate(c) for c in zip(*(np.polyfit(shift, own, 1) for own in ratios), strict=True)]
    setup = f"T = 2^{n} Gaussian logits, {MANY} softmaxes a seed"
    return [
        Result(
            "A8", "Below the collapse the entropy of attention with logits of standard deviation"
            " x sqrt(2 ln T) is (1 − x²) ln T.",
            "arXiv 2505.24333; random energy model, Derrida 1981", "derived",
            f"{setup}, x = 1/2; entropy over ln T", number(0.75),
            Tolerance(0.01, f"Z of T terms fluctuates by T^(-1/4) = {T**-0.25:.3f}, to the second"
                      f" order {T**-0.5:.3f}, over ln T"),
            tuple(quarter),
        ),
        Result(
            "A9", "Entropy collapses where the standard deviation of the logits is sqrt(2 ln T).",
            "arXiv 2505.24333", "derived",
            f"{setup}; {share:.3f} times the standard deviation at which the mean entropy is 1"
            f" nat; {share:.3f} is what it is of that in a frozen model without end, by"
            " ψ(1) − ψ(1 − m) = 1",
            number(critical), resolution(critical, 0.05), tuple(found[:, -1]),
            "Measured over expected is "
            + ", ".join(
                f"{m:.3f} at 2^{p}" for m, p in zip(ratios.mean(axis=0), powers, strict=True)
            )
            + " keys. The largest of T Gaussians lies below sqrt(2 ln T) by the share"
            " (ln ln T + ln 4π) / (4 ln T), "
            + ", ".join(f"{each:.3f}" for each in shift)
            + ". A line through the ratios over these shares goes, where the share is 0, to"
            f" {line[1].mean:.3f} ± {line[1].half_width:.3f}.",
        ),
    ]  # fmt: skip


def entropy(logits: np.ndarray) -> np.ndarray:
    """Return the entropy in nats of the softmax over the last axis."""
    z = logits - logits.max(axis=-1, keepdims=True)
    p = np.exp(z)
    total = p.sum(axis=-1)
    return np.log(total) - np.sum(p * z, axis=-1) / total


def caps(board: Board, cap: float = 5.0) -> list[Result]:
    """A10, A11: a cap of logits behind the mask, and the decoder's, in front of it."""
    masked = softcap(jnp.where(jnp.asarray([True, False]), jnp.zeros(2), -1e30), cap)
    leak = float(jax.nn.softmax(masked)[1])
    model = decoder("pre", 32, 1, 8, attention_softcap=cap)
    seen = jax.jit(lambda params: model.tapped(params, jnp.arange(8)[None])[1]["blocks"])
    worst = 0.0
    for g in seeds(board, 45):
        params = weights(model, g)
        p = np.asarray(seen(params)["attention"]["branch"]["probabilities"]).reshape(8, 8)
        worst = max(worst, float(np.max(np.triu(p, 1))))
    return [
        Result(
            "A10", "A soft cap c behind the mask leaks: a masked key beside one of logit 0 keeps"
            " 1 / (1 + e^c), 6.7e-3 for c = 5.",
            "Gemma 2, arXiv 2408.00118, for the cap; flash-attention PR 1025 for its place",
            "derived", "two keys, c = 5, float64: the program’s cap applied to a masked logit",
            number(6.7e-3), digits(4), (leak,),
        ),
        Result(
            "A11", "In front of the mask it leaks nothing.", "flash-attention PR 1025", "derived",
            f"the decoder with a cap of {cap:g}, 8 tokens, {board.seeds} draws; the largest"
            " probability of a later token",
            number(0.0), Tolerance(0.0, "the same bits: e^(−∞) is 0"), (worst,),
        ),
    ]  # fmt: skip


def in_context(board: Board) -> list[Result]:
    """A12, A13: entropies of Markov chains that are drawn anew for every sequence."""
    losses = build("in_context_chain", 256).full_losses()
    limits = [_limit(losses, [t, 2 * t, 4 * t]) for t in (32, 64)]
    # A row is met as often as its state: rows that are seldom left weigh more.
    rate = 2 * integrate.quad(lambda a: special.entr([a, 1 - a]).sum()
                              * (1 - a * math.log((1 + a) / a)), 0, 1)[0]  # fmt: skip
    k, means = 3, []
    for g in seeds(board, 46):
        p = g.dirichlet(np.ones(k), 20_000)
        means.append(float(np.mean(-np.sum(np.where(p > 0, p * np.log(p), 0.0), axis=1))))
    said = "of a chain of {} states with rows Dirichlet(1): sum over j = 2..k of 1/j"
    return [
        Result(
            "A12", "The loss plateau of the in-context bigram solution is the mean entropy "
            + said.format("two") + ", 1/2.",
            EDELMAN, "derived",
            "the program’s exact mean entropy of Laplace’s rule over all transition counts after"
            " 64, 128 and 256 tokens; limit c of c + a ln T / T + b / T",
            number(0.5), Tolerance(2 * abs(limits[1] - limits[0]),
                                   "twice what the limit moves from 32, 64, 128 tokens to these"),
            (limits[1],),
            "Rows count as often as their state is visited, and one that is seldom left has little"
            " entropy. The entropy rate with the stationary weights, the integral of"
            f" 2 h(a) (1 − a ln((1 + a) / a)), is {rate:.4f}; the limit is {limits[1]:.4f}.",
        ),
        Result(
            "A13", "The mean entropy " + said.format("three") + " is 0.8333.", EDELMAN, "derived",
            "20,000 rows a seed, in NumPy", number(0.8333),
            Tolerance(0.003, "what 20,000 rows a seed resolve, ten of their standard errors"),
            tuple(means),
        ),
    ]  # fmt: skip


def _limit(losses: np.ndarray, lengths: list[int]) -> float:
    """Return c of c + a ln T / T + b / T through the losses at three lengths."""
    T = np.array(lengths, np.float64)
    terms = np.stack([np.ones(3), np.log(T) / T, 1 / T], axis=1)
    return float(np.linalg.solve(terms, losses[np.array(lengths) - 1])[0])


ROWS = (collapse, query_key_norm, softmax_norms, frozen, caps, in_context)
