"""A run gives the same numbers in every company: on any device, in any lane, beside anyone.

Where a run is alone on its device its program is that of a run alone, and equality is bit for bit.
With several on one device, and with a batch split over devices, another program is compiled, which
takes sums in another order; the tolerance below follows from that.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax.decoder import Decoder, DecoderConfig
from normjax.training import train
from normjax.training.cohorts import Cohort
from normjax.training.train import Hyper, TrainConfig

V, T, B, STEPS, CHUNK = 7, 8, 4, 7, 4
CONFIG = TrainConfig(steps=20, warmup_steps=2, batch_size=B, patience=2, chunk_steps=CHUNK)
DECODER = Decoder(DecoderConfig(depth=1, width=8, heads=2, mlp="none"), V, T)


class Small:
    """A model that compiles fast: a token sees the mean of all before it through a hidden layer."""

    def init(self, key):
        a, b = 0.3 * jax.random.normal(key, (2, V, 6), jnp.float32)
        return {"embedding": a, "kernel": b, "gain": jnp.ones(6, jnp.float32)}

    def apply(self, params, tokens):
        h = params["embedding"][tokens]
        places = jnp.arange(1, tokens.shape[-1] + 1, dtype=jnp.float32)[:, None]
        h = jnp.tanh(h + jnp.cumsum(h, axis=-2) / places) * params["gain"]
        return h @ params["kernel"].T


MODEL_NORM = Small()
MEMBERS = [
    Hyper(0, 1e-2, 0.1, 1.0), Hyper(1, 1e-2, 0.1, 1.0), Hyper(0, 3e-2, 0.1, 1.0),
    Hyper(0, 1e-2, 0.5, 1.0), Hyper(3, 1e-2, 0.1, 2.0),
]  # fmt: skip
EPS = float(np.finfo(np.float32).eps)
# Another order of summation moves a gradient by a few EPS of its size. Adam divides every entry by
# its own size, so an entry that nearly cancels may have a relative error many times larger: allowed
# is 1000 EPS of the distance that a parameter can move, at most about 3 rates of 3e-2 a step.
LOOSE = 1000 * EPS * STEPS * 3 * 3e-2


def batches(member, first, count):
    """Return (count, B, T + 1) tokens, a function of seed and step only."""
    rows = [
        np.random.default_rng((member.seed, step)).integers(0, V, (B, T + 1))
        for step in range(first, first + count)
    ]
    return np.array(rows, np.int32).reshape(count, B, T + 1)


def windows_of(members, first, count):
    out = np.zeros((len(members), CHUNK, B, T + 1), np.int32)
    for i, member in enumerate(members):
        out[i, :count] = batches(member, first, count)
    return out


def go(cohort, members, first=0, last=STEPS, chunks=(CHUNK,)):
    """Train a cohort from step ``first`` to ``last`` in chunks of the given sizes, repeated."""
    step, i = first, 0
    while step < last:
        count = min(chunks[i % len(chunks)], last - step)
        cohort.advance(windows_of(members, step, count), count)
        step, i = step + count, i + 1
    return [cohort.member_state(m) for m in range(len(members))]


def run_alone(model, members):
    """Return member -> its state after STEPS steps, alone: plain jit, no cohort."""
    start = jax.jit(partial(train.init_state, model, CONFIG))
    chunk = jax.jit(partial(train.train_chunk, model, CONFIG))

    def run(member):
        hyper = Hyper(np.uint32(member.seed), *map(np.float32, member[1:]))
        state = chunk(start(hyper), hyper, batches(member, 0, STEPS), STEPS)
        return jax.tree.map(np.asarray, state)

    return {member: run(member) for member in members}


@pytest.fixture(scope="module")
def alone():
    return run_alone(MODEL_NORM, MEMBERS)


def assert_equal(a, b):
    for (path, x), y in zip(
        jax.tree_util.tree_flatten_with_path(a)[0], jax.tree.leaves(b), strict=True
    ):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=LOOSE)
    assert float(a.loss_sum) == pytest.approx(float(b.loss_sum), rel=1000 * EPS)
    assert int(a.step) == int(b.step) and int(a.sum_steps) == int(b.sum_steps)


def build(ways, members, model=MODEL_NORM):
    devices, changes = ways
    return Cohort(
        model, dataclasses.replace(CONFIG, **changes), members, jax.local_devices()[:devices]
    )


EXACT = {  # devices, changes of the configuration, members
    "one device, one run": (1, {}, 1),
    "two devices, one run each": (2, {}, 2),
    "four devices, three runs": (4, {}, 3),
}
CLOSE = {
    "one device, in turn": (1, {"lanes": "map"}, 3),
    "two devices, three runs in turn": (2, {"lanes": "auto"}, 3),
    "four devices, five runs in turn": (4, {"lanes": "map"}, 5),
    "one device, together": (1, {"lanes": "vmap"}, 3),
    "two devices, five runs together": (2, {"lanes": "vmap"}, 5),
    "batch over two devices": (2, {"parallel": "data"}, 2),
    "batch over four devices": (4, {"parallel": "data"}, 1),
}


@pytest.fixture(scope="module", params=[*EXACT, *CLOSE])
def way(request):
    """A started cohort of one way, with its members; what is compiled is shared by the tests."""
    devices, changes, count = (EXACT | CLOSE)[request.param]
    cohort = build((devices, changes), MEMBERS[:count])
    cohort.start()
    return request.param, cohort, MEMBERS[:count]


def test_every_member_is_as_alone(way, alone):
    name, cohort, members = way
    cohort.start()
    for member, state in zip(members, go(cohort, members), strict=True):
        (assert_equal if name in EXACT else assert_close)(state, alone[member])


def test_members_of_a_decoder_are_as_alone():
    """The same with attention, norms and residual path, on two devices."""
    expected = run_alone(DECODER, MEMBERS[:2])
    cohort = build((2, {}), MEMBERS[:2], DECODER)
    cohort.start()
    for member, state in zip(MEMBERS[:2], go(cohort, MEMBERS[:2]), strict=True):
        assert_equal(state, expected[member])


def test_members_differ(way):
    """What makes the test above one of something: no member stands in for another."""
    _, cohort, members = way
    cohort.start()
    states = go(cohort, members, last=3)
    for i, a in enumerate(states):
        for b in states[:i]:
            assert not np.array_equal(a.params["embedding"], b.params["embedding"])


def test_chunks_do_not_matter(way):
    """7 steps, 3 + 4, 1 by 1: every step is the same one."""
    _, cohort, members = way
    results = []
    for chunks in ((4, 3), (3, 4), (1,)):
        cohort.start()
        results.append(go(cohort, members, chunks=chunks))
    for other in results[1:]:
        assert_equal(results[0], other)


def test_stop_and_go_on_is_exact(way):
    """Through host arrays into a cohort that has meanwhile done something else."""
    _, cohort, members = way
    cohort.start()
    whole = go(cohort, members)
    cohort.start()
    saved = go(cohort, members, last=3)
    go(cohort, members, first=3, last=5)
    cohort.start(saved)
    assert_equal([cohort.member_state(i) for i in range(len(members))], saved)
    assert_equal(go(cohort, members, first=3), whole)


def test_saved_states_are_the_hosts_own(way):
    """The device reuses the memory of the state at the next step: what was saved stays."""
    _, cohort, members = way
    cohort.start()
    saved = go(cohort, members, last=2)
    copies = jax.tree.map(np.array, saved)
    go(cohort, members, first=2, last=6)
    assert_equal(saved, copies)


def test_no_steps_change_nothing(way):
    _, cohort, members = way
    cohort.start()
    before = go(cohort, members, last=2)
    cohort.advance(windows_of(members, 2, 4), 0)
    assert_equal([cohort.member_state(i) for i in range(len(members))], before)


def test_evaluation_is_a_plain_weighted_sum(way):
    _, cohort, members = way
    cohort.start()
    states = go(cohort, members, last=3)
    rng = np.random.default_rng(8)
    windows = rng.integers(0, V, (3, 5, T + 1)).astype(np.int32)
    weights = np.ones((3, 5, T), np.float32)
    weights[1, 3:], weights[2, 0, 4:] = 0, 0
    padded = windows.copy()
    padded[1, 3:] = 0
    for count in (1, 2, 3):
        got = cohort.evaluate(windows, weights, count)
        assert got.shape == (len(members), 3) and not got[:, count:].any()
        np.testing.assert_array_equal(got, cohort.evaluate(padded, weights, count))
        for loss, state in zip(got, states, strict=True):
            logits = np.stack(
                [np.asarray(_apply(state.params, w[:, :-1]), np.float64) for w in windows[:count]]
            )
            log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            picked = np.take_along_axis(log_p, windows[:count, :, 1:, None], -1)[..., 0]
            w = weights[:count]
            expected = -(picked * w).sum(axis=(1, 2))
            np.testing.assert_allclose(loss[:count], expected, rtol=1e-5)


_apply = jax.jit(MODEL_NORM.apply)


def test_counters_are_the_members(way):
    _, cohort, members = way
    cohort.start()
    states = go(cohort, members, last=3)
    counters = cohort.counters()
    for name, values in counters.items():
        assert values.shape == (len(members),)
        np.testing.assert_array_equal(values, [getattr(s, name) for s in states])
    assert counters["step"].tolist() == counters["sum_steps"].tolist() == [3] * len(members)


def test_resetting_the_sums_resets_nothing_else(way):
    _, cohort, members = way
    cohort.start()
    before = go(cohort, members, last=2)
    cohort.reset_sums()
    for i, state in enumerate(before):
        zeroed = state._replace(
            loss_sum=np.float32(0), norm_sum=np.float32(0), sum_steps=np.int32(0)
        )
        assert_equal(cohort.member_state(i), zeroed)
    after = go(cohort, members, first=2, last=4)
    assert [int(s.sum_steps) for s in after] == [2] * len(members)


# --- divergence -----------------------------------------------------------------------------------

RUNAWAY = Hyper(1, 1e30, 0.1, 1.0)  # its second step leads out of what float32 can hold


def test_a_diverging_member_does_not_disturb_the_others(alone):
    members = [MEMBERS[0], RUNAWAY, MEMBERS[2]]
    cohort = build((4, {}), members)
    cohort.start()
    states = go(cohort, members)
    assert_equal(states[0], alone[MEMBERS[0]])
    assert_equal(states[2], alone[MEMBERS[2]])
    assert int(states[1].diverged_at) > 0 and int(states[1].skipped) == CONFIG.patience
    assert [int(s.diverged_at) for s in (states[0], states[2])] == [-1, -1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states[1].params))


@pytest.mark.parametrize("lanes", ["map", "vmap"])
def test_a_diverging_member_does_not_disturb_the_others_of_its_device(lanes):
    """The same lanes with and without the runaway, bit for bit: nothing passes between them."""
    results = []
    for third in (RUNAWAY, MEMBERS[1]):
        members = [MEMBERS[0], MEMBERS[2], third]
        cohort = build((1, {"lanes": lanes}), members)
        cohort.start()
        results.append(go(cohort, members))
    assert int(results[0][2].diverged_at) > 0
    assert int(results[1][2].diverged_at) == -1
    assert_equal(results[0][:2], results[1][:2])


def test_every_device_of_a_split_batch_skips_a_step_that_one_of_them_cannot_take():
    """A fault in one device's part of the batch is a fault of the step."""

    class Poisoned(Small):
        """Token 6 makes the loss NaN."""

        def apply(self, params, tokens):
            return super().apply(params, tokens) + jnp.where(tokens == 6, jnp.nan, 0.0)[..., None]

    members = [MEMBERS[0]]
    cohort = build((2, {"parallel": "data"}), members, Poisoned())
    cohort.start()
    windows = windows_of(members, 0, CHUNK) % 6
    windows[0, 1, -1, 0] = 6  # in the second step, in the last device's part only
    cohort.advance(windows, 4)
    state = cohort.member_state(0)
    assert (int(state.step), int(state.skipped), int(state.sum_steps)) == (4, 1, 3)
    for leaf in jax.tree.leaves(cohort.state.params):
        copies = np.asarray(leaf)
        np.testing.assert_array_equal(copies[0], copies[1])


# --- layout and compilation -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "count", "used", "lanes"),
    [
        (1, 3, 1, 3),
        (2, 1, 1, 1),
        (2, 2, 2, 1),
        (2, 3, 2, 2),
        (4, 3, 3, 1),
        (4, 5, 4, 2),
        (4, 8, 4, 2),
    ],
)
def test_runs_are_spread_evenly(devices, count, used, lanes):
    members = [Hyper(i, 1e-2, 0.1, 1.0) for i in range(count)]
    cohort = build((devices, {}), members)
    assert (len(cohort.devices), cohort.lanes, cohort.size) == (used, lanes, count)


def test_a_cohort_that_was_not_started_says_so():
    with pytest.raises(RuntimeError, match="start"):
        build((1, {}), MEMBERS[:1]).state  # noqa: B018


def test_a_batch_that_cannot_be_split_is_refused():
    config = dataclasses.replace(CONFIG, parallel="data", batch_size=6)
    with pytest.raises(ValueError, match="batch_size=6"):
        Cohort(MODEL_NORM, config, MEMBERS[:1], jax.local_devices())


_compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: _compiled.append(event) if "backend_compile" in event else None
)


@pytest.mark.parametrize(
    "name", ["one device, in turn", "two devices, one run each", "batch over two devices"]
)
def test_the_training_program_is_compiled_once(name):
    """Not again after an evaluation or a restart from saved states, nor for other counts."""
    devices, changes, count = (EXACT | CLOSE)[name]
    members = MEMBERS[:count]
    cohort = build((devices, changes), members)
    windows = np.zeros((2, B, T + 1), np.int32)
    weights = np.ones((2, B, T), np.float32)

    def use(first):
        go(cohort, members, first=first, last=first + 2)
        cohort.evaluate(windows, weights, 2)
        cohort.counters()
        cohort.reset_sums()
        return go(cohort, members, first=first + 2, last=first + 3)

    cohort.start()
    cohort.advance(windows_of(members, 0, 0), 0)
    cohort.evaluate(windows, weights, 0)
    _compiled.clear()
    before_compiling = list(_compiled)
    saved = use(0)
    assert _compiled == before_compiling, "a program was compiled during training"
    cohort.start(saved)
    use(3)
    assert _compiled == before_compiling, "a program was compiled after going on from a saved state"
    jax.jit(lambda x: x + 12345)(1.0)
    assert _compiled, "this test would not have seen a compilation"
