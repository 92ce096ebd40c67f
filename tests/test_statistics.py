"""Estimates against scipy.stats, closed forms and what must hold of any numbers."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from normjax.reporting import statistics


def _close(a: float | None, b: float) -> bool:
    return a is not None and math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 30])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_interval_equals_one_sample_t_test(n, confidence):
    rng = random.Random(n)
    values = [rng.gauss(1.9, 0.02) for _ in range(n)]
    ours = statistics.estimate(values, confidence)
    theirs = stats.ttest_1samp(values, 0).confidence_interval(confidence)
    assert _close(ours.low, theirs.low) and _close(ours.high, theirs.high)
    assert _close(ours.sd, stats.tstd(values))
    assert _close(ours.half_width, (theirs.high - theirs.low) / 2)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_paired_interval_equals_related_t_test(n):
    rng = random.Random(n)
    first = {seed: rng.gauss(2.1, 0.05) for seed in range(n)}
    second = {seed: first[seed] - rng.gauss(0.1, 0.01) for seed in range(n)}
    ours = statistics.paired(first, second)
    theirs = stats.ttest_rel(list(first.values()), list(second.values())).confidence_interval()
    assert _close(ours.low, theirs.low) and _close(ours.high, theirs.high)


def test_pairing_is_by_seed_not_by_place():
    first = {3: 30.0, 1: 10.0, 2: 20.0}
    second = {1: 1.0, 2: 2.0, 3: 3.0, 9: 100.0}
    assert statistics.differences(first, second) == {1: 9.0, 2: 18.0, 3: 27.0}
    assert statistics.paired(first, second).n == 3
    assert statistics.paired(first, {7: 1.0}) == statistics.Estimate(0)


def test_t_factor_closed_forms():
    # One degree of freedom is the Cauchy distribution; two have an algebraic quantile.
    assert math.isclose(statistics.t_factor(2), math.tan(math.pi * 0.475), rel_tol=1e-12)
    p = 0.975
    two = (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    assert math.isclose(statistics.t_factor(3), two, rel_tol=1e-12)


def test_small_samples():
    assert statistics.estimate([]) == statistics.Estimate(0)
    one = statistics.estimate([1.5])
    assert (one.mean, one.low, one.high, one.sd, one.half_width) == (1.5, None, None, None, None)
    assert not one.excludes_zero
    same = statistics.estimate([0.25, 0.25, 0.25])
    assert (same.low, same.high, same.sd) == (0.25, 0.25, 0.0) and same.excludes_zero


def test_excludes_zero_is_the_t_test_at_five_percent():
    rng = random.Random(0)
    verdicts = set()
    for _ in range(50):
        values = [rng.gauss(0.4, 0.3) for _ in range(3)]
        expected = bool(stats.ttest_1samp(values, 0).pvalue < 0.05)
        assert statistics.estimate(values).excludes_zero == expected
        verdicts.add(expected)
    assert verdicts == {True, False}


def test_order_does_not_change_a_digit():
    rng = random.Random(1)
    values = [rng.uniform(-1, 1) * 10 ** rng.randint(-8, 8) for _ in range(40)]
    expected = statistics.estimate(values)
    for _ in range(20):
        rng.shuffle(values)
        assert statistics.estimate(values) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_refused(bad):
    with pytest.raises(ValueError, match="finite"):
        statistics.estimate([1.0, bad])


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="n=1"):
        statistics.t_factor(1)
    with pytest.raises(ValueError, match="confidence=1"):
        statistics.t_factor(3, 1)


def test_units():
    assert math.isclose(statistics.perplexity(math.log(84)), 84)
    assert math.isclose(statistics.bits(math.log(256)), 8)
    assert statistics.perplexity(1e6) == math.inf
