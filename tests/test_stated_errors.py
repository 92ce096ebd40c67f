"""Whoever states an error promises something: how often the truth lies within it.

An error from chance is tested by repetition: the share of truths inside is the promised one within
four of its own standard deviations, so closely that half the error, or twice it, would be noticed.
An error bound is tested on hard cases: it holds there, and is not so wide that it says nothing.
"""

import math

import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest
from scipy import stats
from scipy.sparse.linalg import aslinearoperator

from experiments.mechanisms import verdicts
from experiments.stability import data as stability_data
from normjax.jacobians.closed_forms import norm_derivative, norm_jacobian, norm_jvp
from normjax.jacobians.radial import radial_gains, radial_report
from normjax.jacobians.verification import verify
from normjax.reporting import rank_correlation, statistics
from normjax.reporting.results import FINISHED
from normjax.runs import rescoring
from normjax.spectra.krylov import top_singular_values
from normjax.spectra.spectrum import spectrum
from normjax.spectra.stochastic import frobenius_norm, spectral_density, trace

SIZE = 30
MATRIX = np.random.default_rng(0).normal(size=(SIZE, SIZE)) / SIZE**0.5
VALUES = np.linalg.svd(MATRIX, compute_uv=False)
OPERATOR = aslinearoperator(MATRIX)


def share_is(inside, promised):
    """Whether the share of truths inside is the promised one, as far as so many trials tell."""
    inside = np.asarray(inside)
    return abs(inside.mean() - promised) < 4 * math.sqrt(promised * (1 - promised) / inside.size)


def calibrated(scores, freedom):
    """Whether errors in units of their standard error are distributed as Student's t.

    By the shares within one and two, which for half and twice the standard error must be wrong: a
    test that these pass would be none.
    """

    def judged(scores):
        size = np.abs(scores)
        return all(share_is(size <= k, 2 * stats.t.cdf(k, freedom) - 1) for k in (1, 2))

    scores = np.asarray(scores)
    assert not judged(scores / 2) and not judged(scores * 2) and not judged(scores * 4)
    return judged(scores)


# --- errors from chance ---------------------------------------------------------------------------


def density(seed):
    return spectral_density(OPERATOR, steps=SIZE, probes=16, seed=seed)


def share_below_one(seed):
    (value,), (error,) = density(seed).cumulative([1.0])
    return value, error, np.mean(VALUES <= 1.0)


def height_of_the_second_bin(seed):
    value, error = density(seed).histogram([0.5, 1.0, 1.6])
    return value[1], error[1], np.mean((VALUES >= 1.0) & (VALUES < 1.6)) / 0.6


def from_trace_estimate(function, truth):
    def run(seed):
        found = function(seed)
        assert found.probes == 16
        return found.value, found.standard_error, truth

    return run


ESTIMATES = {
    "Frobenius norm": from_trace_estimate(
        lambda seed: frobenius_norm(OPERATOR, probes=16, seed=seed), np.sqrt(np.sum(VALUES**2))
    ),
    "trace": from_trace_estimate(
        lambda seed: trace(OPERATOR, probes=16, seed=seed), np.trace(MATRIX)
    ),
    "mean of s^4": from_trace_estimate(
        lambda seed: density(seed).mean(lambda s: s**4), np.mean(VALUES**4)
    ),
    "share below 1": share_below_one,
    "height of a bin": height_of_the_second_bin,
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_estimates_from_probes_scatter_as_their_standard_errors_say(name):
    found = np.array([ESTIMATES[name](seed) for seed in range(300)])
    assert calibrated((found[:, 0] - found[:, 2]) / found[:, 1], 15)


@pytest.mark.slow
def test_the_tangential_gain_scatters_as_its_standard_error_says():
    """Sixteen probes each, in turn, of a function that mixes two tokens of six features."""
    rng = np.random.default_rng(1)
    matrix, h = rng.normal(size=(12, 12)), rng.normal(size=(2, 6))

    def function(x):
        return (jnp.asarray(matrix) @ x.ravel()).reshape(x.shape)

    after = (matrix @ h.ravel()).reshape(h.shape)
    exact = radial_gains(matrix.reshape(2, 6, 2, 6), h, after).tt
    reports = [radial_report(function, h, probes=16, seed=seed) for seed in range(300)]
    assert calibrated([(r.tt - exact) / r.tt_error for r in reports], 15)


def test_the_mean_loss_of_sequences_scatters_as_its_standard_error_says():
    rng = np.random.default_rng(2)
    draws = 1.5 + 0.3 * rng.normal(size=(1000, 12))
    assert calibrated([(x.mean() - 1.5) / rescoring.standard_error(x) for x in draws], 11)


@pytest.mark.parametrize("n", [2, 3, 10])
def test_seed_errors_and_intervals_cover_as_often_as_they_say(n):
    rng = np.random.default_rng(n)
    draws = 2.0 + 0.05 * rng.normal(size=(1000, n))
    found = [statistics.estimate(x) for x in draws]
    assert calibrated([(e.mean - 2.0) / e.seed_error for e in found], n - 1)
    for level in (0.5, 0.95):
        found = [statistics.estimate(x, level) for x in draws]
        assert share_is([e.low <= 2.0 <= e.high for e in found], level)
        half = [e.low / 2 + e.mean / 2 <= 2.0 <= e.high / 2 + e.mean / 2 for e in found]
        assert not share_is(half, level)


@pytest.mark.parametrize("seed_size, text_size", [(0.02, 0.2), (0.2, 0.02), (0.05, 0.1)])
def test_intervals_over_seeds_and_text_cover_as_often_as_they_say(seed_size, text_size):
    """Effects of four seeds and of sixteen stretches of text, whichever is larger."""
    rng, inside, gaps = np.random.default_rng(3), [], []
    for _ in range(1000):
        first, second = (
            2.0 + rng.normal(0, seed_size, (4, 1)) + rng.normal(0, text_size, (1, 16))
            for _ in range(2)
        )
        found = statistics.estimate(first.mean(axis=1), 0.5, first.tolist())
        inside.append(found.low <= 2.0 <= found.high)
        sides = [dict(enumerate(x.mean(axis=1).tolist())) for x in (first, second)]
        parts = tuple(dict(enumerate(x.tolist())) for x in (first, second))
        gap = statistics.paired(*sides, 0.5, parts)
        gaps.append(gap.low <= 0.0 <= gap.high)
    # Satterthwaite's degrees of freedom are an approximation, good to a few per cent here.
    assert 0.45 < np.mean(inside) < 0.57 and 0.45 < np.mean(gaps) < 0.57


def test_the_text_error_alone_is_calibrated():
    rng, scores = np.random.default_rng(4), []
    for _ in range(1000):
        losses = 2.0 + rng.normal(0, 0.1, (1, 12)) + np.zeros((3, 1))
        found = statistics.estimate(losses.mean(axis=1), parts=losses.tolist())
        assert found.seed_error < 1e-12
        scores.append((found.mean - 2.0) / found.text_error)
    assert calibrated(scores, 11)


def test_the_bootstrap_of_a_rank_correlation_is_as_wide_as_the_scatter_over_seeds():
    """Five seeds show four fifths of the variance; the interval spans 3.92 standard deviations."""
    predicted, means, inside, widths, values = [1, 0, 3, 2, 4, 5], np.arange(6.0), [], [], []
    truth = rank_correlation.spearman(predicted, list(means))
    rng = np.random.default_rng(5)
    for _ in range(200):
        drawn = means[:, None] + 2 * rng.normal(size=(6, 5))
        losses = [dict(enumerate(row.tolist())) for row in drawn]
        low, high = rank_correlation.bootstrap(rank_correlation.spearman, predicted, losses)
        inside.append(low <= truth <= high)
        widths.append(high - low)
        values.append(rank_correlation.spearman(predicted, list(drawn.mean(axis=1))))
    assert 0.7 < np.mean(widths) / (3.92 * math.sqrt(0.8) * np.std(values)) < 1.3
    assert 0.75 < np.mean(inside) < 0.99


def test_the_interval_of_a_predictor_covers_where_the_runs_of_a_cell_are_alike(
    tmp_path, monkeypatch
):
    """Three runs a cell that differ little are one piece of evidence, not three."""
    monkeypatch.setattr(stability_data, "SAMPLES", 100)
    rng, cells, inside = np.random.default_rng(6), 30, []
    truth = 6 / math.pi * math.asin(0.6 / 2)  # Spearman's of a normal pair with correlation 0.6
    for _ in range(100):
        x = np.repeat(rng.normal(size=cells), 3)
        y = 0.6 * x + 0.8 * np.repeat(rng.normal(size=cells), 3)
        trials = [
            stability_data.Trial(
                stability_data.Place("pre", 2, i // 3),
                1e-3,
                i % 3,
                "trains",
                loss,
                None,
                None,
                tmp_path,
            )
            for i, loss in enumerate(y.tolist())
        ]
        found = stability_data._predictor("it", "then", trials, x)
        inside.append(found.low <= truth <= found.high)
    assert 0.84 < np.mean(inside) < 0.995


def test_chance_puts_a_run_within_the_margin_or_raises_an_alarm_as_seldom_as_it_should():
    """At the edge of the margin two standard errors are met by 2.3 %; at the floor an alarm at two
    is raised by as many, at four by none."""
    rng, floor = np.random.default_rng(7), verdicts.OwnFloor(0.5, "full", True, "")

    def shares(mean, rule):
        found = [
            verdicts.judge(
                [verdicts.FinalLoss("run", 0, 1e-3, FINISHED, mean + 0.01 * z, 0.01)],
                0.5, floor, rule,
            )
            for z in rng.normal(size=4000)
        ]  # fmt: skip
        return [v.kind == verdicts.COMPUTES for v in found], [bool(v.alarms) for v in found]

    within, _ = shares(0.52, verdicts.Rule(margin=0.02))
    assert share_is(within, stats.norm.cdf(-2))
    _, alarms = shares(0.5, verdicts.Rule(alarm=2.0))
    assert share_is(alarms, stats.norm.cdf(-2))
    assert not any(shares(0.5, verdicts.Rule())[1])


# --- error bounds ---------------------------------------------------------------------------------


def orthogonal(n, rng):
    return np.linalg.qr(rng.normal(size=(n, n)))[0]


def test_bounds_of_the_largest_values_hold_and_say_something_before_convergence():
    """Chains that are stopped early: no bound below the error, the usual one within 200 times."""
    ratios = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        values = np.sort(rng.uniform(0, 2, 60))[::-1]
        matrix = (orthogonal(60, rng) * values) @ orthogonal(60, rng)
        exact = np.linalg.svd(matrix, compute_uv=False)[:3]
        for steps in (10, 15, 20):
            found = top_singular_values(
                aslinearoperator(matrix), k=3, max_steps=steps, seed=seed, tol=1e-12
            )
            error = np.abs(found.values - exact)
            assert np.all(error <= found.bounds)
            ratios += [b / e for b, e in zip(found.bounds, error, strict=True) if e > 1e-9]
    assert len(ratios) > 150 and min(ratios) < 4 and np.median(ratios) < 200


def test_the_bound_of_a_dense_spectrum_holds_and_is_within_a_hundred_times():
    """Against the singular values of the same matrix with forty digits."""
    shares = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        matrix = (orthogonal(16, rng) * np.geomspace(10, 1e-3, 16)) @ orthogonal(16, rng)
        found = spectrum(lambda x, m=matrix: jnp.asarray(m) @ x, np.ones(16))
        with mp.workdps(40):
            exact = mp.svd_r(mp.matrix(matrix.tolist()), compute_uv=False)
            error = [
                abs(float(v - mp.mpf(float(x)))) for v, x in zip(exact, found.values, strict=True)
            ]
        assert np.all(error <= found.bounds)
        shares.append(np.max(error / found.bounds))
    assert max(shares) > 0.01


@pytest.mark.parametrize("width", [12, 128])
@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_the_tolerance_of_a_verification_is_a_few_hundred_times_what_rounding_does(name, width):
    shares = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        h = rng.normal(size=width) + 100 * (seed % 2)
        found = verify(name, None, h, parameters={"gain": np.exp(rng.normal(size=width))})
        shares.append(found.excess)
    assert 1 / 500 < max(shares) < 1


# --- closed forms where a plain one cancels -------------------------------------------------------


def exact_jacobian(h, eps, centered):
    """diag(1) d/dh of h / sqrt(mean h^2 + eps), of h less its mean, with sixty digits."""
    with mp.workdps(60):
        h, d = [mp.mpf(float(x)) for x in h], len(h)
        mean = mp.fsum(h) / d if centered else mp.mpf(0)
        c = [x - mean for x in h]
        s2 = mp.fsum(x * x for x in c) / d + mp.mpf(eps)
        s = mp.sqrt(s2)
        kept = [[int(i == j) - (mp.mpf(1) / d if centered else 0) for j in range(d)]
                for i in range(d)]  # fmt: skip
        return np.array([[float((kept[i][j] - c[i] * c[j] / (d * s2)) / s) for j in range(d)]
                         for i in range(d)])  # fmt: skip


@pytest.mark.parametrize("small", [1e-2, 1e-5, 1e-7])
@pytest.mark.parametrize("name", ["rmsnorm_plain", "layernorm_plain"])
def test_an_entry_that_is_all_but_cancelled_keeps_its_digits(name, small):
    """One feature holds nearly all of h: 1 - u_0^2 would have lost up to all of its digits."""
    others = small * np.random.default_rng(0).normal(size=15)
    h, eps = np.insert(others, 4, -3.0), 1e-12
    exact = exact_jacobian(h, eps, name.startswith("layer"))
    found = norm_jacobian(name, h, eps=eps)
    assert found[4, 4] == pytest.approx(exact[4, 4], rel=1e-12, abs=0)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-14 * np.max(exact))
    # What it is guarded against: the plain difference is off by more than that.
    u = h - h.mean() if name.startswith("layer") else h
    u = u / np.linalg.norm(u)
    plain = 1 - u[4] ** 2 - (1 / 16 if name.startswith("layer") else 0)
    if small <= 1e-5:
        assert plain / np.sqrt(np.mean((h - h.mean()) ** 2)) != pytest.approx(
            exact[4, 4], rel=1e-9, abs=0
        )


@pytest.mark.parametrize("name", ["rmsnorm_plain", "layernorm_plain"])
def test_a_product_along_the_radius_keeps_what_eps_leaves(name):
    """u^T J u = eps / s^3 is 1e-18 of J: what rounding leaves along u must not be added to it."""
    h = 1e6 * np.random.default_rng(1).normal(size=24)
    derivative = norm_derivative(name, h, eps=1e-6)
    u = derivative.direction
    out = norm_jvp(name, h, 3 * u, eps=1e-6)
    with mp.workdps(50):
        along = float(
            mp.fsum(mp.mpf(float(a)) * mp.mpf(float(b)) for a, b in zip(u, out, strict=True))
        )
    assert along == pytest.approx(3 * derivative.weight[0] * derivative.radial, rel=1e-9, abs=0)
