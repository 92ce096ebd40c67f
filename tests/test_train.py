"""One step against NumPy and optax, and what a step that is not finite may and may not do."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from normjax.decoder import Decoder, DecoderConfig
from normjax.errors import UserError
from normjax.training import optimizer, train
from normjax.training.train import Hyper, TrainConfig

V, T, B = 11, 8, 4
CONFIG = TrainConfig(steps=50, warmup_steps=3, batch_size=B, patience=3, weight_decay=0.1)
MODEL = Decoder(DecoderConfig(depth=1, width=8, heads=2), V, T)


def hyper(seed=0, learning_rate=1e-2, weight_decay=0.1, init_scale=1.0):
    rest = (np.float32(x) for x in (learning_rate, weight_decay, init_scale))
    return Hyper(np.uint32(seed), *rest)


token_losses = jax.jit(partial(train.token_losses, MODEL))


def random_windows(steps, seed=0):
    return np.random.default_rng(seed).integers(0, V, (steps, B, T + 1)).astype(np.int32)


class Counted:
    """A jitted function that counts its traces; jit's own count is of a cache that may forget."""

    def __init__(self, fn):
        self.traces = 0

        def counting(*args):
            self.traces += 1
            return fn(*args)

        self.jitted = jax.jit(counting)

    def __call__(self, *args):
        return self.jitted(*args)


@pytest.fixture(scope="module")
def step():
    """The real decoder's step, compiled once for the module."""
    return Counted(partial(train.train_step, MODEL, CONFIG))


@pytest.fixture(scope="module")
def initial():
    return Counted(partial(train.init_state, MODEL, CONFIG))


# --- loss -----------------------------------------------------------------------------------------


def _cross_entropy64(logits, targets):
    x = np.asarray(logits, np.float64)
    top = x.max(-1, keepdims=True)
    log_z = top[..., 0] + np.log(np.exp(x - top).sum(-1))
    return log_z - np.take_along_axis(x, np.asarray(targets)[..., None], -1)[..., 0]


@pytest.mark.parametrize("scale", [0.0, 1.0, 50.0, 1e4, 1e30])
def test_cross_entropy_is_minus_log_softmax(scale):
    rng = np.random.default_rng(0)
    logits = (scale * rng.standard_normal((3, 5, 7))).astype(np.float32)
    targets = rng.integers(0, 7, (3, 5))
    loss = train.cross_entropy(jnp.asarray(logits), jnp.asarray(targets))
    # The difference of two numbers of this size: epsilon times the size is what float32 can give.
    np.testing.assert_allclose(
        loss, _cross_entropy64(logits, targets), rtol=1e-5, atol=4e-7 * max(scale, 1)
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_cross_entropy_of_half_precision_logits_is_float32(dtype):
    logits = jnp.asarray(np.random.default_rng(1).standard_normal((4, 300)) * 20, dtype)
    targets = jnp.arange(4)
    loss = train.cross_entropy(logits, targets)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, _cross_entropy64(logits, targets), rtol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_gradient_of_cross_entropy_is_softmax_minus_onehot(scale):
    rng = np.random.default_rng(2)
    logits = (scale * rng.standard_normal((6, 9))).astype(np.float32)
    targets = rng.integers(0, 9, 6)
    gradient = jax.grad(lambda x: train.cross_entropy(x, targets).sum())(jnp.asarray(logits))
    x = logits.astype(np.float64)
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient, p - np.eye(9)[targets], atol=1e-6)


def test_a_new_model_knows_nothing(initial):
    """Small random weights give nearly equal probabilities: the loss is log V."""
    params = initial(hyper()).params
    loss = np.stack([token_losses(params, windows) for windows in random_windows(8)])
    assert loss.shape == (8, B, T)
    assert float(loss.mean()) == pytest.approx(math.log(V), abs=0.02)


def test_token_losses_score_the_next_token(initial):
    params, windows = initial(hyper()).params, random_windows(1)[0]
    expected = _cross_entropy64(jax.jit(MODEL.apply)(params, windows[:, :-1]), windows[:, 1:])
    np.testing.assert_allclose(token_losses(params, windows), expected, rtol=1e-5)


# --- initialization -------------------------------------------------------------------------------


def test_init_scale_multiplies_matrices_only(initial):
    one, three = initial(hyper()).params, initial(hyper(init_scale=3.0)).params
    mask = optimizer.decay_mask(one)
    for a, b, matrix in zip(*map(jax.tree.leaves, (one, three, mask)), strict=True):
        np.testing.assert_allclose(b, a * (3 if matrix else 1), rtol=1e-6)
    assert {True, False} == set(jax.tree.leaves(mask))


def test_seeds_differ_and_repeat(initial):
    first, again, other = (initial(hyper(seed)).params["embedding"] for seed in (5, 5, 6))
    np.testing.assert_array_equal(first, again)
    assert np.abs(np.corrcoef(np.ravel(first), np.ravel(other))[0, 1]) < 0.5


def test_a_run_starts_with_empty_counters(initial):
    state = initial(hyper())
    assert int(state.step) == int(state.skipped) == int(state.bad_streak) == 0
    assert int(state.diverged_at) == -1
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.moments))


# --- one step -------------------------------------------------------------------------------------


def test_steps_are_those_of_optax(step, initial):
    """An independent step from optax's own loss, clipping, schedule and AdamW."""
    h = hyper(weight_decay=0.3)
    state = initial(h)
    params = state.params
    schedule = optimizer.unit_schedule(CONFIG.steps, CONFIG.warmup_steps, CONFIG.final_fraction)
    reference = optax.chain(
        optax.clip_by_global_norm(CONFIG.clip),
        optax.adamw(
            lambda count: 1e-2 * schedule(count), CONFIG.beta1, CONFIG.beta2, CONFIG.adam_eps,
            weight_decay=0.3, mask=optimizer.decay_mask,
        ),
    )  # fmt: skip
    opt_state = reference.init(params)

    @jax.jit
    def reference_step(params, opt_state, windows):
        def loss_of(params):
            logits = MODEL.apply(params, windows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

        loss, gradient = jax.value_and_grad(loss_of)(params)
        updates, opt_state = reference.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(gradient)

    losses, norms = [], []
    for windows in random_windows(6):
        state = step(state, h, windows)
        params, opt_state, loss, norm = reference_step(params, opt_state, windows)
        losses.append(loss)
        norms.append(norm)
    assert int(state.step) == int(state.sum_steps) == 6
    assert float(state.loss_sum) == pytest.approx(float(sum(losses)), rel=1e-5)
    assert float(state.norm_sum) == pytest.approx(float(sum(norms)), rel=1e-4)
    # Adam divides by the gradient's own size, so that rounding of tiny gradients counts: the bound
    # is a thousandth of the distance gone, 6 steps of 1e-2.
    for mine, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=6e-5, rtol=0)


def test_a_learnable_sequence_is_learned(step, initial):
    counting = (np.arange(T + 1) + np.arange(B)[:, None]) % V  # a token tells the next
    h = hyper(learning_rate=3e-2)
    state = initial(h)
    before = float(token_losses(state.params, counting).mean())
    for offset in range(CONFIG.steps):
        state = step(state, h, ((counting + offset) % V).astype(np.int32))
    after = float(token_losses(state.params, counting).mean())
    assert before == pytest.approx(math.log(V), abs=0.05)
    assert after < 0.2 * before
    assert int(state.skipped) == 0


GOLDEN = (2.4003136, 2.3923204, 2.4103184)


def test_first_losses_are_what_they_were(initial, step):
    """Numbers of this program at fixed seed: they show a change that nobody meant."""
    h, losses = hyper(seed=3), []
    state = initial(h)
    for windows in random_windows(3, seed=4):
        before = float(state.loss_sum)
        state = step(state, h, windows)
        losses.append(float(state.loss_sum) - before)
    assert losses == pytest.approx(GOLDEN, abs=2e-5), (
        f"the first three training losses are {losses}. If initialization, model, optimizer or"
        " schedule was meant to change, put these numbers into GOLDEN and say in CHANGELOG.md that"
        " results move; if not, the change is a mistake"
    )


def test_what_differs_between_runs_does_not_recompile(step, initial):
    """Seed, learning rate, weight decay and initial scale are arrays of one program."""
    windows = random_windows(1)[0]
    first = step(initial(hyper()), hyper(), windows)
    step(first, hyper(), windows)
    made, stepped = initial.traces, step.traces
    for other in (hyper(7), hyper(learning_rate=3.0), hyper(weight_decay=0), hyper(init_scale=2.0)):
        after = step(initial(other), other, windows)
        # And they do something: only a changed decay alone keeps the initial state.
        assert not np.array_equal(after.params["embedding"], first.params["embedding"])
    assert (initial.traces, step.traces) == (made, stepped)


# --- steps that are not finite --------------------------------------------------------------------

PLAIN, HUGE, INF_LOSS, INF_GRADIENT, NAN = 5, 6, 7, 8, 9


class Faulty:
    """A table of logits per token that fails as the tokens say: the fault comes with the batch.

    HUGE: a right value, a gradient 1e25 times too large. INF_LOSS: the probability of token 0 is 0,
    with a finite gradient. INF_GRADIENT: a finite value with an infinite gradient. NAN: both.
    """

    def __init__(self, dtype=jnp.float32):
        self.dtype = dtype

    def init(self, key):
        table = 0.1 * jax.random.normal(key, (10, 10), jnp.float32)
        return {"kernel": table.astype(self.dtype), "gain": jnp.ones(10, self.dtype)}

    def apply(self, params, tokens):
        table = params["kernel"] * params["gain"]
        logits = table[tokens]
        is_ = lambda fault: (tokens == fault)[..., None]  # noqa: E731
        none = logits - jax.lax.stop_gradient(logits)
        logits = logits + jnp.where(is_(HUGE), 1e25, 0.0) * none
        logits = logits + jnp.where(is_(INF_LOSS) & (jnp.arange(10) == 0), -jnp.inf, 0.0)
        logits = logits + jnp.sqrt(jnp.where(is_(INF_GRADIENT), none, 1.0))
        return logits + jnp.where(is_(NAN), jnp.nan, 0.0)


def batch_with(fault, seed=0):
    windows = np.random.default_rng(seed).integers(0, PLAIN, (B, T + 1)).astype(np.int32)
    windows[:, -1] = 0  # what INF_LOSS gives no probability
    windows[0, -2] = fault
    return windows


@pytest.fixture(scope="module")
def faulty():
    model = Faulty()
    start = jax.jit(partial(train.init_state, model, CONFIG))
    return start, jax.jit(partial(train.train_step, model, CONFIG))


def play(faulty, faults, h=None):
    """Return the states after each step of a sequence of faults, the initial state first."""
    start, step = faulty
    h = h or hyper(learning_rate=0.1)
    states = [start(h)]
    for i, fault in enumerate(faults):
        states.append(step(states[-1], h, batch_with(fault, seed=i)))
    return states


def learned(state):
    return jax.tree.leaves((state.params, state.moments))


def assert_same(a, b):
    for x, y in zip(learned(a), learned(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_faults_are_what_they_claim():
    model = Faulty()
    params = model.init(jax.random.key(0))
    expected = {  # fault: (finite loss, finite gradient)
        PLAIN: (True, True), HUGE: (True, True), INF_LOSS: (False, True),
        INF_GRADIENT: (True, False), NAN: (False, False),
    }  # fmt: skip
    for fault, finite in expected.items():
        mean_loss = lambda p, w: train.token_losses(model, p, w).mean()  # noqa: E731
        loss, gradient = jax.value_and_grad(mean_loss)(params, batch_with(fault))
        assert bool(jnp.isfinite(loss)) is finite[0], fault
        gradient_finite = bool(jnp.isfinite(jnp.concatenate(
            [leaf.ravel() for leaf in jax.tree.leaves(gradient)])).all())  # fmt: skip
        assert gradient_finite is finite[1], fault
        if fault == HUGE:
            assert not jnp.isfinite(optax.tree.norm(gradient))  # a plain norm overflows
            assert jnp.isfinite(optimizer.clip(gradient, 1.0)[0]["kernel"]).all()


@pytest.mark.parametrize("fault", [INF_LOSS, INF_GRADIENT, NAN])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_bad_step_changes_nothing_but_counters(faulty, fault, at):
    faults = [PLAIN] * 6
    faults[at - 1] = fault
    states = play(faulty, faults)
    before, after = states[at - 1], states[at]
    assert_same(before, after)
    assert int(after.step) == at
    assert int(after.skipped) == int(after.bad_streak) == 1
    assert float(after.loss_sum) == float(before.loss_sum)
    assert float(after.norm_sum) == float(before.norm_sum)
    assert int(after.sum_steps) == at - 1
    end = states[-1]
    assert int(end.skipped) == 1 and int(end.sum_steps) == 5 and int(end.diverged_at) == -1
    if at < 6:
        assert int(end.bad_streak) == 0
        assert not np.array_equal(end.params["kernel"], after.params["kernel"])


def test_a_skipped_step_is_as_if_only_its_number_had_passed(faulty):
    """Moments, their count and parameters go on from where they were; the schedule moves on."""
    start, step = faulty
    h = hyper(learning_rate=0.1)
    with_fault = play(faulty, [PLAIN, NAN, PLAIN], h)[-1]
    alone = play(faulty, [PLAIN], h)[-1]
    alone = alone._replace(step=alone.step + 1)
    assert_same(with_fault, step(alone, h, batch_with(PLAIN, seed=2)))


@pytest.mark.parametrize("fault", [INF_LOSS, INF_GRADIENT, NAN])
@pytest.mark.parametrize("first", [1, 4])
def test_permanent_faults_freeze_the_run(faulty, fault, first):
    faults = [PLAIN] * (first - 1) + [fault] * 5
    states = play(faulty, faults)
    out = first - 1 + CONFIG.patience
    assert [int(s.diverged_at) for s in states] == [-1] * out + [first] * (len(states) - out)
    assert int(states[-1].skipped) == CONFIG.patience
    assert_same(states[first - 1], states[-1])
    assert all(np.isfinite(leaf).all() for leaf in learned(states[-1]))


def test_a_frozen_run_stays_frozen_when_the_data_are_fine_again(faulty):
    states = play(faulty, [PLAIN, NAN, NAN, NAN, PLAIN, PLAIN, NAN])
    end = states[-1]
    assert int(end.diverged_at) == 2
    assert_same(states[1], end)
    assert int(end.step) == 7 and int(end.skipped) == 3 and int(end.sum_steps) == 1
    assert float(end.loss_sum) == float(states[1].loss_sum)


def test_recovery_resets_the_streak(faulty):
    """Faults that are not in a row do not add up; the step named is that of the final streak."""
    states = play(faulty, [NAN, NAN, PLAIN, NAN, NAN, PLAIN, NAN, NAN, NAN])
    assert [int(s.bad_streak) for s in states[:8]] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [int(s.diverged_at) for s in states] == [-1] * 9 + [7]
    assert int(states[-1].skipped) == 7


def test_patience_one_freezes_at_the_first_fault():
    config = dataclasses.replace(CONFIG, patience=1)
    start = jax.jit(partial(train.init_state, Faulty(), config))
    step = jax.jit(partial(train.train_step, Faulty(), config))
    states = play((start, step), [PLAIN, NAN, PLAIN])
    assert [int(s.diverged_at) for s in states] == [-1, -1, 2, 2]
    assert_same(states[1], states[3])


def test_a_norm_that_overflows_still_trains(faulty):
    """The gradient is finite, its norm's square is not: the step is taken, at the clipped size."""
    states = play(faulty, [HUGE] * 4)
    end = states[-1]
    assert int(end.skipped) == 0 and int(end.sum_steps) == 4
    assert np.isfinite(float(end.norm_sum)) and float(end.norm_sum) > 1e18
    assert np.isfinite(np.concatenate([np.ravel(leaf) for leaf in learned(end)])).all()
    for before, after in zip(states, states[1:], strict=False):
        assert not np.array_equal(before.params["kernel"], after.params["kernel"])
    # The first moment is (1 - beta1) times the clipped gradient, whose norm is 1.
    mu = states[1].moments[0].mu
    assert float(optax.tree.norm(mu)) == pytest.approx(0.1, rel=1e-5)


def test_the_state_stays_finite_where_the_update_overflows():
    """Loss and gradients may be finite where the new parameters are not."""
    config = dataclasses.replace(CONFIG, clip=0.0, warmup_steps=0, patience=2)
    h = hyper(learning_rate=3.4e38, weight_decay=10.0)
    start = jax.jit(partial(train.init_state, Faulty(), config))
    step = jax.jit(partial(train.train_step, Faulty(), config))
    states = play((start, step), [PLAIN] * 4, h)
    for state in states:
        assert all(np.isfinite(leaf).all() for leaf in learned(state))
    assert int(states[-1].diverged_at) > 0


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_parameters_of_half_precision_stay_finite_and_learn(dtype):
    """float16 cannot hold Adam's epsilon, nor the square of a small gradient."""
    model, h = Faulty(dtype), hyper(learning_rate=3e-2)
    state = jax.jit(partial(train.init_state, model, CONFIG))(h)
    step = jax.jit(partial(train.train_step, model, CONFIG))
    counting = (np.arange(T + 1) + np.arange(B)[:, None]).astype(np.int32)  # tokens of no fault
    before = float(train.token_losses(model, state.params, counting % PLAIN).mean())
    for offset in range(30):
        state = step(state, h, (counting + offset) % PLAIN)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params)), offset + 1
    assert int(state.skipped) == 0
    after = float(train.token_losses(model, state.params, counting % PLAIN).mean())
    assert after < before - 0.5
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(dtype)}


def test_faults_do_not_pass_between_lanes(faulty):
    """Two runs in one vmap: the one without a fault is what it is beside a run without one."""
    start, _ = faulty
    step = jax.jit(jax.vmap(partial(train.train_step, Faulty(), CONFIG)))
    h = jax.tree.map(lambda x: np.stack([x, x]), hyper(learning_rate=0.1))
    clean = disturbed = jax.vmap(start)(h)
    for i in range(5):
        plain = batch_with(PLAIN, seed=i)
        clean = step(clean, h, np.stack([plain, plain]))
        disturbed = step(disturbed, h, np.stack([batch_with(NAN, seed=i), plain]))
    assert disturbed.diverged_at.tolist() == [1, -1]
    for a, b in zip(learned(clean), learned(disturbed), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[1], np.asarray(b)[1])


# --- chunks and evaluation ------------------------------------------------------------------------


def test_a_chunk_takes_as_many_steps_as_asked(faulty):
    start, step = faulty
    h = hyper(learning_rate=0.1)
    windows = np.stack([batch_with(PLAIN, seed=i) for i in range(5)])
    chunk = Counted(partial(train.train_chunk, Faulty(), CONFIG))
    state = start(h)
    assert_same(chunk(state, h, windows, 0), state)
    for count in (1, 3, 5):
        expected = play(faulty, [PLAIN] * count, h)[-1]
        after = chunk(start(h), h, windows, count)
        assert int(after.step) == count
        for x, y in zip(learned(after), learned(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert chunk.traces == 1


def test_evaluation_is_the_weighted_sum_of_each_batch(initial):
    params = initial(hyper()).params
    rng = np.random.default_rng(5)
    windows = random_windows(5, seed=6)
    weights = rng.integers(0, 2, (5, B, T)).astype(np.float32)
    evaluate = Counted(partial(train.evaluate, MODEL))
    losses = np.stack([token_losses(params, w) for w in windows]).astype(np.float64)
    for count in (1, 3, 5):
        expected = (losses * weights).sum(axis=(1, 2)) * (np.arange(5) < count)
        found = evaluate(params, windows, weights, count)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert evaluate.traces == 1
    assert not evaluate(params, windows, 0 * weights, 5).any()


def test_windows_of_weight_zero_do_not_count(faulty):
    params = faulty[0](hyper(init_scale=30.0)).params  # far from uniform: every token counts
    windows = np.stack([batch_with(PLAIN, seed=0), batch_with(PLAIN, seed=1)])
    weights = np.ones((2, B, T), np.float32)
    weights[1, 2:] = 0
    padded = windows.copy()
    padded[1, 2:] = 3
    evaluate = jax.jit(partial(train.evaluate, Faulty()))
    one, other = (np.asarray(evaluate(params, w, weights, 2)) for w in (windows, padded))
    assert (one == other).all()
    assert (one != evaluate(params, windows, np.ones_like(weights), 2)).any()


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0), ("batch_size", 0), ("warmup_steps", -1), ("patience", 0),
        ("evaluate_every", 0), ("evaluation_windows", -1), ("final_windows", -1),
        ("chunk_steps", 0), ("checkpoint_every", -1), ("learning_rate", -1e-3),
        ("learning_rate", math.nan), ("learning_rate", math.inf), ("weight_decay", -0.1),
        ("clip", -1.0), ("clip", math.nan), ("init_scale", -1.0), ("checkpoint_seconds", -1.0),
        ("final_fraction", -0.1), ("final_fraction", 1.1), ("beta1", 1.0), ("beta2", 1.0),
        ("beta1", -0.1), ("beta2", math.nan), ("adam_eps", 0.0), ("adam_eps", math.inf),
        ("warmup_steps", 51), ("parallel", "date"), ("lanes", "vmapp"),
    ],
)  # fmt: skip
def test_impossible_training_is_refused_in_one_line(field, value):
    with pytest.raises(UserError) as caught:
        train.check(dataclasses.replace(CONFIG, **{field: value}))
    message = str(caught.value)
    assert message.startswith(f"config.train.{field}={value}") and "\n" not in message
    assert "must" in message


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"warmup_steps": 0}, {"warmup_steps": 50}, {"learning_rate": 0.0}, {"clip": 0.0},
        {"final_fraction": 1.0}, {"final_fraction": 0.0}, {"beta1": 0.0}, {"patience": 1},
        {"evaluation_windows": 0, "final_windows": 0}, {"parallel": "data", "batch_size": 8},
    ],
)  # fmt: skip
def test_possible_training_is_accepted(changes):
    train.check(dataclasses.replace(CONFIG, **changes), devices=4)


def test_a_batch_that_does_not_divide_is_refused():
    config = dataclasses.replace(CONFIG, parallel="data", batch_size=6)
    with pytest.raises(UserError, match="batch_size=6.*multiple of the 4 devices"):
        train.check(config, devices=4)
