"""Tasks: their exact optima against all sequences gone through one by one, and their samples."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest
from scipy import optimize, stats

from experiments import ablation
from normjax.data.philox import uniforms
from normjax.data.tasks.clock import WORD, Clock
from normjax.data.tasks.copying import Copying
from normjax.data.tasks.counts import Counts, partitions
from normjax.data.tasks.floors import DECODERS, FLOORS, INFORMATION_OF, floor
from normjax.data.tasks.in_context import InContextChain
from normjax.data.tasks.markov import Markov1, Markov2
from normjax.data.tasks.modular import ModularSum
from normjax.data.tasks.recall import Recall
from normjax.data.tasks.table import TASKS, build, parameters
from normjax.data.tasks.task import INFORMATION
from normjax.errors import UserError

# --- the law of each task, from its words: every sequence with its probability --------------------


def markov1(task):
    pairs = np.array(task.pairs, float)
    start = pairs.sum(axis=1) / pairs.sum()
    for x in itertools.product(range(len(pairs)), repeat=task.window + 1):
        p = start[x[0]]
        for a, b in itertools.pairwise(x):
            p *= pairs[a, b] / pairs[a].sum()
        yield x, p


def markov2(task):
    size = len(task.current)

    def weight(y, x, z):
        return task.current[(z - x) % size] * task.before[(z - y) % size]

    for x in itertools.product(range(size), repeat=task.window + 1):
        p = size**-2.0
        for y, now, z in zip(x, x[1:], x[2:], strict=False):
            p *= weight(y, now, z) / sum(weight(y, now, other) for other in range(size))
        yield x, p


def in_context(task):
    """Integrals of q^a (1 - q)^b over the unknown probabilities: Beta functions, as fractions."""
    for x in itertools.product(range(2), repeat=task.window + 1):
        n = Counter(itertools.pairwise(x))
        p = Fraction(1, 2)
        for a in range(2):
            zero, one = n[a, 0], n[a, 1]
            p *= Fraction(
                math.factorial(zero) * math.factorial(one), math.factorial(zero + one + 1)
            )
        yield x, float(p)


def recall(task):
    k, v, length = task.keys, task.values, task.window + 1
    pairs = -(-length // 2)
    for chosen in itertools.product(range(v), repeat=k):
        for keys in itertools.product(range(k), repeat=pairs):
            x = tuple(itertools.chain.from_iterable((key, k + chosen[key]) for key in keys))
            yield x[:length], v**-k * k ** -float(pairs)


def received(sent, got, size, noise):
    return (1 - noise) * (sent == got) + noise / size


def copying(task):
    for x in itertools.product(range(task.size), repeat=task.window + 1):
        p = 1.0
        for t, token in enumerate(x):
            fresh = t < task.distance
            p *= (
                1 / task.size if fresh
                else received(x[t - task.distance], token, task.size, task.noise)
            )  # fmt: skip
        yield x, p


def clock(task):
    size = max(task.word) + 1
    for x in itertools.product(range(size), repeat=task.window + 1):
        yield (
            x,
            math.prod(
                received(task.word[t % len(task.word)], token, size, task.noise)
                for t, token in enumerate(x)
            ),
        )


def modular(task):
    p, m = task.modulus, task.operands
    length = task.window + 1
    blocks = -(-length // (m + 1))
    for operands in itertools.product(range(p), repeat=m * blocks):
        x = []
        for i in range(0, m * blocks, m):
            x += [*operands[i : i + m], sum(operands[i : i + m]) % p]
        yield tuple(x[:length]), p ** -float(m * blocks)


SMALL = [
    (markov1, Markov1(4)),
    (markov1, Markov1(7, pairs=((3, 1), (1, 5)))),
    (markov2, Markov2(6)),
    (markov2, Markov2(8, current=(1, 4), before=(5, 1))),
    (in_context, InContextChain(2)),
    (in_context, InContextChain(9)),
    (recall, Recall(6, keys=3, values=2)),
    (recall, Recall(7, keys=2, values=4)),
    (recall, Recall(8, keys=3, values=3)),
    (recall, Recall(9, keys=4, values=2)),
    (copying, Copying(6)),
    (copying, Copying(6, size=3, distance=2, noise=0.3)),
    (copying, Copying(9, size=2, distance=4, noise=0.1)),
    (copying, Copying(8, size=2, distance=3, noise=0.5)),
    (clock, Clock(9, word=(0, 0, 1, 1), noise=0.3)),
    (clock, Clock(5, word=(0, 1, 2), noise=0.6)),
    (modular, ModularSum(8, modulus=3)),
    (modular, ModularSum(7, modulus=4)),
    (modular, ModularSum(5, modulus=5)),
    (modular, ModularSum(11, modulus=2, operands=3)),
    (modular, ModularSum(7, modulus=3, operands=3)),
]
IDS = [repr(task) for _, task in SMALL]
KNOWN = {
    "full": lambda x, t: x[: t + 1],
    "unordered": lambda x, t: (x[t], *sorted(x[:t])),
    "current_position": lambda x, t: (t, x[t]),
    "current": lambda x, t: x[t],
    "nothing": lambda x, t: None,
}  # the number of earlier tokens tells the position in the first two


def probabilities(law, task):
    """Return {sequence: probability}; sequences cut at the window's end may come several times."""
    together = defaultdict(float)
    for x, p in law(task):
        together[x] += p
    assert math.fsum(together.values()) == pytest.approx(1, abs=1e-13)
    return together


def scored_positions(law, task):
    """Which positions count, from the words of the task."""
    t = range(task.window)
    return {
        recall: lambda: [i for i in t if i % 2 == 0],
        copying: lambda: [i for i in t if i + 1 >= task.distance],
        modular: lambda: [i for i in t if (i + 2) % (task.operands + 1) == 0],
    }.get(law, lambda: list(t))()


@pytest.mark.parametrize("law, task", SMALL, ids=IDS)
def test_optima_against_all_sequences(law, task):
    sequences, scored = probabilities(law, task), scored_positions(law, task)
    assert np.flatnonzero(task.scored).tolist() == scored
    for level, known in KNOWN.items():
        joint = defaultdict(lambda: defaultdict(float))
        by_position = defaultdict(lambda: defaultdict(float))
        for x, p in sequences.items():
            for t in scored:
                joint[known(x, t)][x[t + 1]] += p
                by_position[t][known(x, t), x[t + 1]] += p
        expected = np.full(task.window, np.nan)
        for t in scored:
            expected[t] = -math.fsum(
                p * math.log(joint[k][target] / math.fsum(joint[k].values()))
                for (k, target), p in by_position[t].items()
            )
        # Sums of fewer than 10^5 positive terms below 1: errors of some 10^-13 at the very most.
        got = task.optimum_by_position(level)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12, err_msg=level)
        assert task.optimum(level) == pytest.approx(np.nanmean(expected), abs=1e-12)


def best_linear(prefixes, targets):
    """Minimize the expected loss over all weights of one-hot (position, token) features."""
    rows = np.array(list(prefixes))
    size = rows.max() + 1
    one_hot = np.eye(size)[rows].reshape(len(rows), -1)
    law = np.array([[row.get(v, 0.0) for v in targets] for row in prefixes.values()])
    mass = law.sum(axis=1, keepdims=True)

    def loss(flat):
        logits = one_hot @ flat.reshape(-1, len(targets))
        logits -= logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        gradient = one_hot.T @ (np.exp(log_p) * mass - law)
        return -(law * log_p).sum(), gradient.ravel()

    start = np.random.default_rng(0).normal(size=one_hot.shape[1] * len(targets))
    found = optimize.minimize(
        loss, start, jac=True, method="L-BFGS-B",
        options={"maxiter": 3000, "maxfun": 5000, "ftol": 1e-15, "gtol": 1e-9},
    )  # fmt: skip
    return found.fun


@pytest.mark.parametrize("law, task", SMALL, ids=IDS)
def test_linear_optima_against_a_minimization_over_all_weights(law, task):
    """What is found cannot lie below the optimum, and a convex search comes close to it."""
    if isinstance(task, InContextChain):
        assert task.optimum("linear") is task.optimum_by_position("linear") is None
        assert "closed form" in task.why_unknown("linear")
        return
    sequences, optimum = probabilities(law, task), task.optimum_by_position("linear")
    for t in scored_positions(law, task):
        prefixes = defaultdict(lambda: defaultdict(float))
        for x, p in sequences.items():
            prefixes[x[: t + 1]][x[t + 1]] += p
        targets = sorted({v for row in prefixes.values() for v in row})
        found = best_linear(prefixes, targets)
        assert optimum[t] - 1e-10 <= found <= optimum[t] + 1e-6, t


@pytest.mark.parametrize("law, task", SMALL, ids=IDS)
def test_samples_follow_the_law(law, task):
    """Whole sequences: none outside the law, and frequencies by a chi-square test, fixed seed."""
    sequences, size = probabilities(law, task), 60_000
    drawn = Counter(map(tuple, task.sample(2024, 5, size).tolist()))
    assert not [x for x in drawn if sequences.get(x, 0.0) == 0.0]
    expected, got = [], []
    rest_p = rest_n = 0.0
    for x, p in sequences.items():
        if p * size >= 10:
            expected.append(p * size)
            got.append(drawn[x])
        else:
            rest_p, rest_n = rest_p + p * size, rest_n + drawn[x]
    if rest_p > 10:
        expected.append(rest_p)
        got.append(rest_n)
    elif expected:  # too few to test alone
        expected[-1] += rest_p
        got[-1] += rest_n
    assert len(expected) > 3
    assert stats.chisquare(got, expected, sum_check=False).pvalue > 1e-4


# --- the tasks of the table -----------------------------------------------------------------------

DEFAULT = {name: build(name, 32) for name in TASKS}


@pytest.mark.parametrize("name", TASKS)
def test_more_information_never_costs(name):
    task = DEFAULT[name]
    loss = {level: task.optimum(level) for level in INFORMATION}
    chains = [
        ("full", "unordered", "current_position", "current", "nothing"),
        ("full", "linear", "current_position"),
    ]
    for chain in chains:
        known = [loss[level] for level in chain if loss[level] is not None]
        for less, more in itertools.pairwise(known):
            assert less <= more + 1e-12
    assert loss["nothing"] <= math.log(task.vocabulary_size) + 1e-12
    assert [level for level in INFORMATION if loss[level] is None] == (
        ["linear"] if name == "in_context_chain" else []
    )
    for level in INFORMATION:
        assert bool(task.why_unknown(level)) == (loss[level] is None)


SEPARATED = {  # which of full, unordered, current_position, nothing are to be told apart by a loss
    "markov1": [("full", "nothing")],
    "markov2": [("full", "unordered"), ("unordered", "current_position"), ("current", "nothing")],
    "in_context_chain": [("full", "unordered"), ("unordered", "current_position")],
    "recall": [("full", "unordered"), ("unordered", "linear"), ("linear", "current_position")],
    "copy": [("full", "unordered"), ("unordered", "current")],
    "clock": [("current_position", "current")],
    "modular_addition": [("full", "unordered"), ("unordered", "linear")],
    "parity": [("full", "linear"), ("unordered", "current")],
}


@pytest.mark.parametrize("name", TASKS)
def test_levels_are_far_enough_apart_to_be_measured(name):
    """An evaluation on 1024 sequences of 32 tokens has an error of about 0.01 nats."""
    for low, high in SEPARATED[name]:
        assert DEFAULT[name].optimum(high) - DEFAULT[name].optimum(low) > 0.03, (low, high)


def test_closed_forms_of_the_default_tasks():
    """Values by hand: entropies of channels and tables, and what symmetry says."""
    h = lambda *p: -sum(q * math.log(q) for q in p)  # noqa: E731
    copy, wheel, add, parity = (DEFAULT[n] for n in ("copy", "clock", "modular_addition", "parity"))
    assert copy.optimum("full") == pytest.approx(h(13 / 15, 1 / 15, 1 / 15), abs=1e-14)
    assert wheel.optimum("full") == pytest.approx(h(0.625, 0.125, 0.125, 0.125), abs=1e-14)
    # 32 positions are two whole rounds of the word, in which all pairs stand equally often.
    assert wheel.optimum("current") == pytest.approx(math.log(4), abs=1e-14)
    assert sorted(itertools.pairwise([*WORD, WORD[0]])) == list(
        itertools.product(range(4), repeat=2)
    )
    assert add.optimum("full") == parity.optimum("full") == 0
    assert add.optimum("linear") == pytest.approx(math.log(5), abs=1e-14)
    # All whole blocks of bits have even parity: the multiset tells the sum.
    assert parity.optimum("unordered") == pytest.approx(0, abs=1e-14)
    pairs = np.array(DEFAULT["markov1"].pairs)
    np.testing.assert_array_equal(pairs.sum(axis=0), pairs.sum(axis=1))
    rate = h(*(pairs.ravel() / 100)) - h(*(pairs.sum(axis=1) / 100))
    assert DEFAULT["markov1"].optimum("full") == pytest.approx(rate, abs=1e-14)


def test_the_first_number_is_known_where_nothing_else_has_come():
    """Modular addition, first sum: the only earlier token is the other number."""
    losses = DEFAULT["modular_addition"].optimum_by_position("unordered")
    assert losses[1] == 0 and 0 < losses[4] < losses[-1] < math.log(5)
    assert np.isnan(losses[[0, 2, 3]]).all()


@pytest.mark.parametrize("name", ["recall", "copy", "modular_addition", "markov2"])
def test_impossible_sums_are_refused_with_a_reason(name):
    task = build(name, 4000)
    assert task.optimum("unordered") is None
    assert task.optimum_by_position("unordered") is None
    assert "too many" in task.why_unknown("unordered")


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_a_pure_function_of_seed_and_step(name):
    task = DEFAULT[name]
    x = task.sample(3, 7, 5)
    assert x.shape == (5, 33) and x.dtype == np.int32
    assert x.min() >= 0 and x.max() < task.vocabulary_size
    np.random.seed(1)
    task.sample(4, 7, 2)
    np.testing.assert_array_equal(build(name, 32).sample(3, 7, 5), x)
    np.testing.assert_array_equal(task.sample(3, 7, 2), x[:2])  # fewer are the first of more
    others = [task.sample(*key, 5) for key in ((3, 8), (7, 3), (4, 7), (2**63, 7))]
    for other in others:
        assert not any((row == first).all() for row in other for first in x)


GOLDEN = {
    "markov1": "012230301012230101",
    "markov2": "002020202020120101",
    "in_context_chain": "010101010110101111",
    "recall": "162828590836085936",
    "copy": "002010000200001010",
    "clock": "211220321313120210",
    "modular_addition": "303331033000410224",
    "parity": "101000110000101001",
}


@pytest.mark.parametrize("name", TASKS)
def test_golden_samples(name):
    """These must never change: a run that is resumed would go on with other data."""
    got = "".join(map(str, build(name, 17).sample(1, 2, 2)[1].tolist()))
    assert got == GOLDEN[name], (
        "the sequences of a (seed, step) changed; if that was meant, raise tasks.corpus.FORMAT and"
        " say so in the changelog: old runs cannot be resumed"
    )


@pytest.mark.parametrize("name", TASKS)
def test_the_structure_of_large_samples(name):
    """Laws of pairs at every position, within six standard deviations and one count."""
    task, n = DEFAULT[name], 4000
    x, laws = task.sample(11, 0, n), task.pair_laws()
    for t in np.flatnonzero(task.scored):
        found = np.zeros(laws.shape[1:])
        np.add.at(found, (x[:, t], x[:, t + 1]), 1)
        sd = np.sqrt(n * laws[t] * (1 - laws[t]))
        assert (np.abs(found - n * laws[t]) <= 6 * sd + 1).all()
    if name == "recall":
        for row in x[:200]:
            seen = dict(zip(row[0:-1:2].tolist(), row[1::2].tolist(), strict=True))
            assert all(seen[k] == v for k, v in zip(row[0:-1:2], row[1::2], strict=True))
    if name == "modular_addition":
        assert ((x[:, :-2:3] + x[:, 1:-1:3]) % 5 == x[:, 2::3]).all()
    if name == "parity":
        bits = x[:, :32].reshape(n, 8, 4)
        assert (bits.sum(axis=-1) % 2 == 0).all()
    if name == "copy":
        same, trials = (x[:, 5:] == x[:, :-5]).sum(), x[:, 5:].size
        p = 1 - 0.2 * 2 / 3
        assert abs(same - trials * p) <= 6 * math.sqrt(trials * p * (1 - p))


def test_uniforms_are_the_upper_bits_of_the_words():
    got = uniforms(5, 6, 1000)
    words = np.random.Philox(key=np.array([5, 6], np.uint64)).random_raw(1000).tolist()
    assert got.tolist() == [(w // 2**11) / 2**53 for w in words]
    assert (got >= 0).all() and (got < 1).all()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: build("coppy", 8), "task=coppy: must be one of .* did you mean 'copy'"),
        (lambda: build("copy", 4), "window=4: must be at least 5"),
        (lambda: build("clock", 15), "window=15: must be at least 16"),
        (lambda: build("markov1", 0), "window=0: must be at least 1"),
        (
            lambda: DEFAULT["copy"].optimum("curent"),
            "information=curent: .* did you mean 'current'",
        ),
        (lambda: DEFAULT["copy"].sample(0, 0, 0), "size=0: must be at least 1"),
        (lambda: DEFAULT["copy"].sample(-1, 0, 1), "seed=-1: must be between"),
        (lambda: floor("copy", DEFAULT["copy"], "no-mpl"), "did you mean 'no-mlp'"),
    ],
)
def test_impossible_requests(make, words):
    with pytest.raises(UserError, match=words):
        make()


# --- counts ---------------------------------------------------------------------------------------


def test_counts_against_all_sequences():
    """Three biased tokens drawn four times, with one moved in, against the multinomial law."""
    p, n, counts = np.array([0.5, 0.3, 0.2]), 4, Counts(3, 9)
    law = np.ones(1)
    for i in range(n):
        law = sum(p[v] * counts.moved(law, i, v) for v in range(3))
    codes = [sum(x.count(v) * counts.stride(v) for v in range(3))
             for x in itertools.product(range(3), repeat=n)]  # fmt: skip
    weights = [math.prod(p[list(x)]) for x in itertools.product(range(3), repeat=n)]
    expected = np.zeros(max(codes) + 1)
    np.add.at(expected, codes, weights)
    np.testing.assert_allclose(law, expected[np.unique(codes)], rtol=1e-13)
    assert counts.places(n) == len(set(codes))
    two = sum(p[v] * counts.moved(p[[2, 0, 1]], 1, v) for v in range(3))
    np.testing.assert_allclose(counts.convolved(two, 2, two, 2), law, rtol=1e-13)


def test_partitions_are_known_numbers():
    """Partitions of n into at most k parts: OEIS A008284, summed."""
    assert sum(1 for _ in partitions(10, 10)) == 42
    assert sum(1 for _ in partitions(10, 3)) == 14
    assert list(partitions(0, 2)) == [(0, 0)] and list(partitions(1, 0)) == []


# --- floors ---------------------------------------------------------------------------------------


def test_every_task_and_decoder_has_a_floor_with_a_reason():
    assert set(FLOORS) == set(TASKS)
    for name, row in FLOORS.items():
        assert set(row) == set(DECODERS) == set(INFORMATION_OF)
        for decoder, entry in row.items():
            assert entry.information in INFORMATION
            assert entry.information != "linear"  # attention is not linear in its inputs
            assert entry.reason.endswith(".") and entry.reason.count(". ") == 0
            loss, same = floor(name, DEFAULT[name], decoder)
            assert same == entry and loss == DEFAULT[name].optimum(entry.information)


def test_every_variant_of_the_ablation_has_a_floor():
    assert {cell.name for cell in ablation.ARMS} <= set(DECODERS)


def test_rows_say_what_they_are():
    for name, row in TASKS.items():
        assert row.title and row.description.endswith(".") and row.formula and row.source
        assert "window" not in parameters(DEFAULT[name])
