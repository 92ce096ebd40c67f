"""Estimates against scipy.stats, closed forms and what must hold of any numbers."""

from __future__ import annotations

import math
import random

import numpy as np
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


def test_p_is_that_of_the_t_test():
    values = [0.3, 0.1, 0.45, 0.2]
    assert statistics.estimate(values).p == pytest.approx(
        stats.ttest_1samp(values, 0).pvalue, rel=1e-12
    )
    assert statistics.estimate([0.5, 0.5]).p == 0.0 and statistics.estimate([0.0, 0.0]).p == 1.0
    assert statistics.estimate([0.5]).p is None


def test_holm_is_the_step_down_of_bonferroni():
    """The definition: of m, the k-th is rejected where each j <= k has p_j <= a / (m - j + 1)."""
    rng = random.Random(0)
    for _ in range(50):
        p = [rng.random() ** 3 for _ in range(rng.randint(1, 9))]
        adjusted, order = statistics.holm(p), sorted(range(len(p)), key=p.__getitem__)
        for level in (0.01, 0.05, 0.3):
            rejected = []
            for rank, i in enumerate(order):
                if p[i] > level / (len(p) - rank):
                    break
                rejected.append(i)
            assert {i for i, a in enumerate(adjusted) if a <= level} == set(rejected)


def test_both_seed_and_text_are_in_the_interval():
    """Losses with a random effect of the seed and of the stretch of text: the mean is covered."""
    rng = np.random.default_rng(1)
    n, parts, inside, alone = 4, 16, 0, 0
    for _ in range(400):
        seed, text = rng.normal(0, 0.02, (n, 1)), rng.normal(0, 0.2, (1, parts))
        losses = 2.0 + seed + text + rng.normal(0, 0.02, (n, parts))
        found = statistics.estimate(losses.mean(axis=1), parts=losses.tolist())
        inside += found.low <= 2.0 <= found.high
        seeds = statistics.estimate(losses.mean(axis=1))
        alone += seeds.low <= 2.0 <= seeds.high
    assert inside >= 0.93 * 400 > 0.75 * 400 > alone


def test_what_the_text_does_to_both_sides_cancels():
    rng = np.random.default_rng(2)
    text = rng.normal(0, 0.5, 16)
    sides = [{s: (2.0 + text + rng.normal(0, 1e-3, 16)).tolist() for s in range(4)}
             for _ in range(2)]  # fmt: skip
    means = [{s: float(np.mean(x)) for s, x in side.items()} for side in sides]
    gap = statistics.paired(*means, parts=tuple(sides))
    one = statistics.estimate(means[0].values(), parts=list(sides[0].values()))
    assert gap.text_error < 1e-3 < 0.1 < one.text_error
    assert statistics.paired(*means, parts=(sides[0], {})).text_error is None
