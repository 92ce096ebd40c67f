"""Initialization rules: the published numbers, and the variance that they are meant to keep."""

import math

import numpy as np
import pytest

from normjax.initializers import INITIALIZERS, Initialization
from normjax.placements import PLACEMENTS


def test_gpt2_numbers():
    rule = INITIALIZERS["gpt2"]
    assert rule.stddev(128, 512) == rule.embedding_stddev(128) == 0.02
    for depth in (1, 2, 12):  # two branches in each of L blocks add up on the stream
        assert rule.output_stddev(128, 512, depth) == pytest.approx(0.02 / math.sqrt(2 * depth))
    assert INITIALIZERS["gpt2_plain"].output_stddev(128, 512, 12) == 0.02


@pytest.mark.parametrize("name", ["fan_in", "fan_in_scaled"])
def test_fan_in_keeps_the_variance_of_a_linear_layer(name):
    rng = np.random.default_rng(0)
    fan_in, fan_out = 400, 300
    kernel = rng.normal(size=(fan_in, fan_out)) * INITIALIZERS[name].stddev(fan_in, fan_out)
    y = rng.normal(size=(200, fan_in)) @ kernel
    # 60000 products of independent draws: the relative error of the variance is about 1 %.
    assert np.var(y) == pytest.approx(1, abs=0.05)


def test_xavier_is_the_geometric_middle_of_forward_and_backward():
    stddev = INITIALIZERS["xavier"].stddev
    assert stddev(300, 300) == pytest.approx(300**-0.5)
    assert stddev(100, 500) == stddev(500, 100) == pytest.approx(math.sqrt(2 / 600))


def test_scaled_rules_sum_to_one_over_all_branches():
    """2 L independent branches, each scaled by 1/sqrt(2 L), add the variance of one."""
    for name in ("gpt2", "fan_in_scaled"):
        rule = INITIALIZERS[name]
        for depth in (1, 3, 24):
            total = 2 * depth * rule.output_stddev(64, 64, depth) ** 2
            assert total == pytest.approx(rule.stddev(64, 64) ** 2)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_every_rule_is_positive_and_says_where_it_comes_from(name):
    rule = INITIALIZERS[name]
    assert isinstance(rule, Initialization)
    assert rule.source
    for depth in (1, 4, 100):
        assert 0 < rule.output_stddev(16, 64, depth) <= rule.stddev(16, 64)
    assert rule.embedding_stddev(64) > 0


def test_placements_name_rules_that_exist():
    assert {row.init for row in PLACEMENTS.values()} - {""} <= set(INITIALIZERS)
