"""Windows: batches as pure functions of seed and step, and windows to evaluate on."""

from __future__ import annotations

import numpy as np
import pytest

from normjax.data import windows
from normjax.data.windows import batch, batches, evaluation_windows
from normjax.errors import UserError


def philox(key: tuple[int, int], words: int) -> list[int]:
    """Philox-4x64-10 from its definition (Salmon et al. 2011), in Python's integers."""
    mask, out, counter = (1 << 64) - 1, [], 0
    while len(out) < words:
        counter += 1
        x, k = [counter, 0, 0, 0], list(key)
        for _ in range(10):
            a, b = 0xD2E7470EE14C6C93 * x[0], 0xCA5A826395121157 * x[2]
            x = [(b >> 64) ^ x[1] ^ k[0], b & mask, (a >> 64) ^ x[3] ^ k[1], a & mask]
            k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
        out += x
    return out[:words]


@pytest.mark.parametrize(
    "seed, step", [(0, 0), (3, 7), (7, 3), (123456789, 2**40), (2**63, 2**63), (2**64 - 1, 0)]
)
def test_batch_against_an_implementation_of_the_generator(seed, step):
    n, size, window = 10_007, 13, 5
    tokens = np.arange(n, dtype=np.uint16)
    got = batch(tokens, seed, step, size, window)
    starts = [(x * (n - window)) >> 64 for x in philox((seed, step), size)]
    np.testing.assert_array_equal(got, [range(s, s + window + 1) for s in starts])
    assert got.dtype == np.int32


GOLDEN = {
    (0, 0): [11546, 241533, 111418, 564378],
    (1, 0): [303548, 848654, 156124, 31104],
    (0, 1): [813302, 751283, 671606, 483093],
    (2**63, 123): [36256, 305194, 188836, 728867],
}


@pytest.mark.parametrize("seed, step", GOLDEN)
def test_golden_batches(seed, step):
    """These numbers must never change: runs resumed with another NumPy would see other data."""
    got = batch(np.arange(1_000_000), seed, step, 4, 64)[:, 0].tolist()
    assert got == GOLDEN[seed, step], (
        "the windows of a (seed, step) changed; if that was meant, say so in the changelog: "
        "old runs cannot be resumed"
    )


def test_batches_are_the_stack_of_batch():
    tokens = np.random.default_rng(0).integers(0, 99, 5000).astype(np.uint8)
    got = batches(tokens, 11, 2**62, 7, 12, 65)
    expected = [batch(tokens, 11, 2**62 + i, 12, 65) for i in range(7)]
    assert got.shape == (7, 12, 66) and got.dtype == np.int32
    np.testing.assert_array_equal(got, np.stack(expected))


def test_batch_leaves_the_global_generator_alone():
    np.random.seed(0)
    expected = np.random.random(3)
    np.random.seed(0)
    batch(np.arange(100), 1, 2, 3, 4)
    np.testing.assert_array_equal(np.random.random(3), expected)


def test_start_positions_are_uniform_and_reach_both_ends():
    from scipy import stats

    places = 50
    tokens = np.arange(places + 8)
    starts = batches(tokens, 2024, 0, 500, 40, 8)[..., 0].ravel()
    counts = np.bincount(starts, minlength=places)
    assert len(counts) == places and counts.min() > 0
    assert stats.chisquare(counts).pvalue > 0.001
    by_step = batches(tokens, 2024, 0, 500, 40, 8)[..., 0]
    pairs = np.bincount((by_step[:-1, 0] // 10) * 5 + by_step[1:, 0] // 10, minlength=25)
    assert stats.chisquare(pairs).pvalue > 0.001  # neighbouring steps are independent


def test_a_single_place():
    assert batch(np.arange(5), 9, 9, 3, 4).tolist() == [[0, 1, 2, 3, 4]] * 3


def test_more_tokens_than_32_bits_can_count():
    """A stand-in array of 2^40 equal tokens that takes one byte of memory."""
    tokens = np.broadcast_to(np.uint8(7), (2**40,))
    assert batch(tokens, 1, 2, 3, 4).tolist() == [[7] * 5] * 3
    starts = windows._starts(2**40, windows._key(1, 2), 100, 4)
    assert max(starts) > 2**39 and max(starts) < 2**40 - 4


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((-1, 0, 1, 4), "seed=-1: must be between"),
        ((0, -1, 1, 4), "step=-1: must be between"),
        ((2**64, 0, 1, 4), "seed=18446744073709551616"),
        ((0, 0, 0, 4), "size=0: must be at least 1"),
        ((0, 0, 1, 0), "window=0: must be at least 1"),
        ((0, 0, 1, 10), "window=10: needs 11 tokens, there are 10"),
    ],
)
def test_impossible_batches(arguments, words):
    with pytest.raises(UserError, match=words):
        batch(np.arange(10), *arguments)
    if arguments[1] >= 0:
        with pytest.raises(UserError, match=words):
            batches(np.arange(10), *arguments[:2], 1, *arguments[2:])


@pytest.mark.parametrize("n, window", [(2, 1), (2, 5), (10, 3), (11, 5), (12, 5), (100, 7)])
def test_the_whole_part_predicts_every_token_once(n, window):
    tokens = np.arange(1, n + 1).astype(np.uint8)
    rows, weights = evaluation_windows(tokens, window)
    assert rows.dtype == np.int32 and weights.dtype == np.float32
    assert rows.shape == (len(weights), window + 1) and weights.shape[1] == window
    assert set(np.unique(weights)) <= {0.0, 1.0}
    assert rows[:, 1:][weights == 1].tolist() == tokens[1:].tolist()
    inputs = rows[:, :-1][weights == 1]
    assert inputs.tolist() == tokens[:-1].tolist()  # each target follows its input
    assert weights[:-1].all() and weights[-1, 0] == 1  # only the tail is padded, never wholly


@pytest.mark.parametrize("count", [1, 2, 3, 7, 13, 14, 100])
def test_some_windows_are_whole_ones_evenly_spaced(count):
    n, window = 100, 7  # 99 targets: 14 whole windows
    tokens = np.arange(n)
    rows, weights = evaluation_windows(tokens, window, count)
    assert rows.shape == (min(count, 14), window + 1) and weights.all()
    starts = rows[:, 0]
    assert (starts % window == 0).all()
    np.testing.assert_array_equal(rows, starts[:, None] + np.arange(window + 1))
    gaps = np.diff(starts // window)
    assert (gaps >= 1).all()
    if len(gaps):
        assert gaps.max() - gaps.min() <= 1
    left, right = starts[0] // window, 13 - starts[-1] // window
    assert abs(left - right) <= 1  # as much is left out before as behind
    again, _ = evaluation_windows(tokens, window, count)
    np.testing.assert_array_equal(again, rows)


@pytest.mark.parametrize(
    "n, window, count", [(1, 4, 0), (0, 4, 0), (4, 4, 1), (9, 0, 0), (9, 4, -1)]
)
def test_impossible_evaluations(n, window, count):
    with pytest.raises(UserError):
        evaluation_windows(np.arange(n), window, count)
