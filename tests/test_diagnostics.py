"""Diagnostics in a run: when they are measured, how they are written; training is untouched."""

import dataclasses
import json
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import run_folders

from normjax import configs
from normjax.data import corpora
from normjax.decoder import Decoder, DecoderConfig
from normjax.diagnostics import log, sampling
from normjax.diagnostics.any_model import profile, tap
from normjax.diagnostics.probe import Probe
from normjax.errors import UserError
from normjax.layers import DIAGNOSTICS, SHIFTS
from normjax.runs import grid
from normjax.runs.cohort_run import CohortRun
from normjax.runs.experiment import StopRequest
from normjax.runs.progress import Progress, TimeLeft
from normjax.runs.run_folder import RunFolder, run_folder
from normjax.training import train
from normjax.training.checkpoints import SavedStates
from normjax.training.cohorts import Cohort
from normjax.training.train import Hyper, TrainConfig
from normjax.training.trained import TrainedRun

F32 = float(np.finfo(np.float32).eps)

# --- when -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 5, 400, 2000, 100_000])
@pytest.mark.parametrize("points", [0, 1, 2, 7, 40])
def test_sampled_steps_are_steps_of_the_run(steps, points):
    config = TrainConfig(steps=steps, diagnostics="on", diagnostic_points=points, warmup_steps=0)
    found = sampling.sampled_steps(config)
    assert found == tuple(sorted(set(found))) and found[0] == 0 and found[-1] < steps
    assert len(found) <= (points or max(2, 0.03 * steps / sampling.STEPS_PER_SAMPLE))
    assert len(found) <= max(points, sampling.MOST_POINTS)
    assert points == 1 or found[-1] == steps - 1
    if points == 7 and steps >= 2000:  # equal ratios, but for rounding to whole numbers
        ratios = np.diff(np.log(np.array(found[1:], float)))
        assert ratios.max() < 1.2 * ratios.min()


def test_diagnostics_are_off_and_no_part_of_a_name():
    assert sampling.sampled_steps(TrainConfig()) == ()
    assert {"diagnostics", "diagnostic_points", "diagnostic_every"} <= set(grid.MANNER)


# --- how they are written -------------------------------------------------------------------------


def test_every_float32_and_every_non_finite_number_comes_back(tmp_path):
    rng = np.random.default_rng(0)
    array = rng.standard_normal((3, 2)).astype(np.float32) * np.float32(1e-20)
    array[0], array[1, 1] = (np.nan, np.inf), -np.inf
    samples = [(0, {"a/x": array, "b/y": np.float32(1) / np.float32(3)}),
               (8, {"a/x": array[::-1], "c/z": np.float64(0.1)})]  # fmt: skip
    run_folders.write(tmp_path, samples=samples)
    text = (tmp_path / "diagnostics.jsonl").read_text()
    refuse = lambda word: pytest.fail(f"not strict JSON: {word}")  # noqa: E731
    first = json.loads(text.splitlines()[0], parse_constant=refuse)
    assert first["values"]["a/x"][:2] == [["NaN", "Infinity"], [first["values"]["a/x"][1][0],
                                                                "-Infinity"]]  # fmt: skip
    (step, values), (later, others) = log.read_diagnostics(tmp_path)
    assert (step, later) == (0, 8)
    np.testing.assert_array_equal(values["a/x"].astype(np.float32), array)
    np.testing.assert_array_equal(others["a/x"].astype(np.float32), array[::-1])
    assert np.float32(values["b/y"]) == np.float32(1) / np.float32(3) and others["c/z"] == 0.1
    assert values["b/y"].shape == ()


def test_torn_repeated_and_foreign_lines(tmp_path):
    assert log.read_diagnostics(tmp_path) == []
    samples = [(step, {"a/x": value}) for step, value in ((0, 1.0), (4, 2.0), (0, 3.0))]
    run = run_folders.write(tmp_path, samples=samples)
    for foreign in ({"step": 5, "values": {"a/x": ["what"]}}, {"step": 6}):
        run.append(log.FILE, foreign)
    run.commit()
    with open(tmp_path / "diagnostics.jsonl", "a") as file:
        file.write('{"step": 7, "val')
    assert [(s, float(v["a/x"])) for s, v in log.read_diagnostics(tmp_path)] == [(0, 3.0), (4, 2.0)]
    run_folders.write(tmp_path, samples=[(8, {"a/x": 4.0})])
    assert [s for s, _ in log.read_diagnostics(tmp_path)] == [0, 4, 8]


# --- the training program -------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"scan_layers": True, "remat": True}])
def test_without_a_probe_the_taps_are_not_in_the_program(changes, monkeypatch):
    config = DecoderConfig(depth=2, width=8, heads=2, placement="sandwich", **changes)
    model, t = Decoder(config, 5, 4), TrainConfig(batch_size=2)
    hyper = Hyper(np.uint32(0), np.float32(1e-2), np.float32(0.1), np.float32(1.0))

    def program():
        state = jax.eval_shape(partial(train.init_state, model, t), hyper)
        step = jax.jit(lambda *a: train.train_step(model, t, *a))
        return step.lower(state, hyper, np.zeros((2, 5), np.int32)).as_text()

    with_taps = program()
    monkeypatch.setattr("normjax.decoder.tapped", lambda module, name, x, shifted=False: x)
    assert program() == with_taps


def test_init_and_apply_make_nothing_but_parameters():
    model = Decoder(DecoderConfig(depth=1, width=8, heads=2), 5, 4)
    assert not {DIAGNOSTICS, SHIFTS} & set(model.init(jax.random.key(0)))


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_measuring_leaves_every_bit_and_chunks_may_end_anywhere(devices):
    model = Decoder(DecoderConfig(depth=1, width=8, heads=2, mlp="none"), 5, 4)
    t = TrainConfig(batch_size=2, chunk_steps=4, steps=20, warmup_steps=2)
    members = [Hyper(seed, 1e-2, 0.1, 1.0) for seed in (0, 1)]
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 5, (2, 6, 2, 5)).astype(np.int32)

    def padded(first, count):
        out = np.zeros((2, 4, 2, 5), np.int32)
        out[:, :count] = windows[:, first : first + count]
        return out, count

    watched = Cohort(model, t, members, jax.local_devices()[:devices])
    measure = watched.measurement(Probe(model, t).measure)
    watched.start()
    watched.advance(*padded(0, 4))
    watched.advance(*padded(4, 2))
    plain = [watched.member_state(i) for i in range(2)]
    watched.start()
    step = 0
    for count in (1, 1, 2, 2):
        values = measure(windows[:, step])
        watched.advance(*padded(step, count))
        step += count
    states = [watched.member_state(i) for i in range(2)]
    for x, y in zip(jax.tree.leaves(plain), jax.tree.leaves(states), strict=True):
        np.testing.assert_array_equal(x, y)
    # What was measured is each member's own: the loss of its state on its batch.
    values = measure(windows[:, 0])
    for i in range(2):
        losses = train.token_losses(model, watched.member_state(i).params, windows[i, 0])
        assert values["loss/value"][i] == pytest.approx(float(jnp.mean(losses)), rel=10 * F32)
        assert values["attention/entropy"][i].shape == (1, 2)


def test_a_run_with_diagnostics_is_the_run_without(tmp_path, own_folders):
    text = "the quick brown fox jumps over a lazy dog " * 40
    (tmp_path / "text.txt").write_text(text)
    base = configs.replace(grid.ExperimentConfig(), {
        "data.corpus": str(tmp_path / "text.txt"), "data.window": 4, "model.depth": 1,
        "model.width": 8, "model.heads": 2, "model.mlp": "none", "train.steps": 10,
        "train.warmup_steps": 2, "train.batch_size": 2, "train.evaluate_every": 5,
        "train.evaluation_windows": 4, "train.final_windows": 4, "train.chunk_steps": 5,
        "grid.seeds": 2,
    })  # fmt: skip
    corpus = corpora.open_corpus(base.data)
    arm = grid.Arm("full", "full", "", {})
    runs = {}
    for diagnostics in ("off", "on"):
        config = configs.replace(
            base, {"train.diagnostics": diagnostics, "train.diagnostic_points": 3}
        )
        (plan,) = grid.plan(config, [arm], corpus.fingerprint)
        with Progress([plan.name], False) as progress:
            run = CohortRun(plan, corpus, tmp_path / diagnostics, progress, TimeLeft(1.0), 1.0, {})
            assert run.carry_on(StopRequest())
        runs[diagnostics] = [run_folder(tmp_path / diagnostics, r.id) for r in plan.runs]
    for off, on in zip(runs["off"], runs["on"], strict=True):
        assert off.name == on.name
        states = []
        for folder in (off, on):
            like = jax.eval_shape(TrainedRun(folder)._initial)
            states.append(SavedStates(RunFolder(folder)).restore(10, like))
        for x, y in zip(*map(jax.tree.leaves, states), strict=True):
            np.testing.assert_array_equal(x, y)
        measured = [
            [{k: v for k, v in line.items() if "time" not in k} for line in RunFolder(f).metrics()]
            for f in (off, on)
        ]
        assert measured[0] == measured[1]
        assert not (off / "diagnostics.jsonl").exists()
        diagnostics = log.read_diagnostics(on)
        assert [step for step, _ in diagnostics] == [0, 1, 9]
        first_loss = float(diagnostics[0][1]["loss/value"])
        assert first_loss == pytest.approx(np.log(corpus.vocabulary_size), rel=0.05)
    first = [log.read_diagnostics(folder)[0][1]["gradient/norm"] for folder in runs["on"]]
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"diagnostics": "yes"}, "diagnostics=yes"),
        ({"diagnostic_points": -1}, "diagnostic_points=-1"),
    ],
)
def test_impossible_diagnostics_are_refused(changes, word):
    with pytest.raises(UserError, match=word):
        train.check(dataclasses.replace(TrainConfig(), **changes))


# --- any model ------------------------------------------------------------------------------------


def loss(params, x):
    for w in params["layers"]:
        x = tap("hidden", jax.nn.relu(x @ w))
    return jnp.mean(jnp.square(tap("out", x @ params["head"])))


def small():
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return {"layers": [make(3, 4), make(4, 4)], "head": make(4, 2)}, make(5, 3)


@pytest.mark.parametrize("function", [loss, jax.jit(loss)])
def test_a_profile_of_a_plain_function_is_worked_out_by_hand(function):
    params, x = small()
    function(params, x)  # what is compiled already has no taps in it
    found = profile(function, params, x)
    a, b, head = (np.asarray(w, np.float64) for w in (*params["layers"], params["head"]))
    first = np.maximum(np.asarray(x, np.float64) @ a, 0)
    second = np.maximum(first @ b, 0)
    out = second @ head
    d_out = 2 * out / out.size
    d_second = d_out @ head.T
    d_first = (d_second * (second > 0)) @ b.T
    assert list(found.taps) == ["hidden", "hidden#2", "out"]
    expected = {"hidden": (first, d_first), "hidden#2": (second, d_second), "out": (out, d_out)}
    for name, (value, gradient) in expected.items():
        got = found.taps[name]
        assert got.rms == pytest.approx(np.sqrt(np.mean(value**2)), rel=1e-5)
        assert got.max_abs == pytest.approx(np.abs(value).max(), rel=1e-5)
        assert got.mean == pytest.approx(value.mean(), rel=1e-5, abs=1e-6)
        assert got.zeros == pytest.approx(np.mean(value == 0))
        assert got.gradient_rms == pytest.approx(np.sqrt(np.mean(gradient**2)), rel=1e-5)
    d_head = second.T @ d_out
    assert found.parameters["head"] == pytest.approx(np.sqrt(np.mean(d_head**2)), rel=1e-5)
    assert list(found.parameters) == ["head", "layers.0", "layers.1"]
    assert found.loss == pytest.approx(float(loss(params, x)), rel=1e-6)


def test_taps_in_a_scan_are_seen_at_every_turn():
    def scanned(w, x):
        body = lambda h, _: (tap("h", jnp.tanh(h * w)), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(body, x, None, length=3)[0])

    found = profile(scanned, jnp.float32(0.5), jnp.ones(2))
    assert list(found.taps) == ["h", "h#2", "h#3"]
    h = 1.0
    for name in found.taps:
        h = np.tanh(0.5 * h)
        assert found.taps[name].rms == pytest.approx(h, rel=1e-5)
    assert found.taps["h#3"].gradient_rms == pytest.approx(1.0)


def test_a_flax_module_and_a_scanned_one():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return tap("layer", x + nn.Dense(4)(x)), None

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            stack = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True},
                            length=2)  # fmt: skip
            return stack()(x, None)[0]

    x = jax.random.normal(jax.random.key(0), (2, 3, 4))
    params = Net().init(jax.random.key(1), x)
    found = profile(lambda p, x: jnp.sum(Net().apply(p, x)), params, x)
    assert list(found.taps) == ["layer", "layer#2"]
    out = np.asarray(Net().apply(params, x))
    assert found.taps["layer#2"].rms == pytest.approx(np.sqrt(np.mean(out**2)), rel=1e-5)
    assert found.taps["layer#2"].gradient_rms == pytest.approx(1.0)
    assert -1 < found.taps["layer"].token_similarity < 1


def test_outside_a_profile_a_tap_is_nothing():
    params, x = small()
    assert tap("x", x) is x
    text = str(jax.make_jaxpr(lambda x: tap("x", x) + 1)(x))
    assert text == str(jax.make_jaxpr(lambda x: x + 1)(x))


def test_profiles_refuse_what_they_cannot_see():
    params, x = small()
    with pytest.raises(UserError, match=r"tap h: is inside jax\.vmap"):
        profile(
            lambda p, x: jnp.sum(jax.vmap(lambda r: tap("h", r @ p["layers"][0]))(x)), params, x
        )
    with pytest.raises(UserError, match="loss: returned float32 of shape"):
        profile(lambda p, x: x, params, x)
    with pytest.raises(UserError, match="tap i: of dtype int32"):
        profile(lambda p, x: jnp.sum(tap("i", jnp.arange(3))), params, x)
