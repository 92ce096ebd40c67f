"""Tasks in place of a text: what training and the record get, and one real run."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpus_texts import error, write

from normjax.data import corpora
from normjax.data.corpora import DataConfig
from normjax.data.tasks import corpus as task_corpus
from normjax.data.tasks.table import TASKS, build
from normjax.data.tasks.task import INFORMATION
from normjax.data.windows import batches, evaluation_windows
from normjax.decoder import DecoderConfig
from normjax.errors import UserError
from normjax.reporting import figures, loading, palette
from normjax.runs import estimates, grid, runner
from normjax.runs.experiment import Options
from normjax.runs.grid import Arm, ExperimentConfig, Question
from normjax.training import train
from normjax.training.cohorts import Cohort
from normjax.training.train import Hyper, TrainConfig


def opened(name: str, window: int = 32):
    return corpora.open_corpus(DataConfig(corpus=f"task:{name}", window=window))


# --- the surface ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_batches_are_the_tasks_own_samples(name):
    corpus, task = opened(name), build(name, 32)
    got = corpus.training_batches(7, 40, 3, 4, 32)
    assert got.shape == (3, 4, 33) and got.dtype == np.int32
    np.testing.assert_array_equal(got, [task.sample(7, step, 4) for step in (40, 41, 42)])
    weights = corpus.target_weights(32)
    np.testing.assert_array_equal(task.scored if weights is None else weights > 0, task.scored)
    assert (weights is None) == bool(task.scored.all())
    assert corpus.vocabulary_size == task.vocabulary_size
    assert corpus.uniform_loss == pytest.approx(math.log(corpus.vocabulary_size), abs=1e-15)
    assert corpus.references(32, 0) == {
        "unigram": task.optimum("nothing"), "bigram": task.optimum("current")
    }  # fmt: skip


@pytest.mark.parametrize("name", TASKS)
def test_evaluation_is_fixed_and_of_no_training_seed(name):
    corpus = opened(name)
    rows, weights = corpus.evaluation_set(32, 64)
    assert rows.shape == (64, 33) and rows.dtype == np.int32
    assert weights.shape == (64, 32) and weights.dtype == np.float32
    assert (weights == build(name, 32).scored).all()
    np.testing.assert_array_equal(opened(name).evaluation_set(32, 10)[0], rows[:10])
    tested = {row.tobytes() for row in corpus.evaluation_set(32, 64, "test")[0]}
    if corpus.vocabulary_size > 2:
        assert not tested & {row.tobytes() for row in rows}
    whole, _ = corpus.evaluation_set(32, 0)
    assert len(whole) == 4096
    np.testing.assert_array_equal(whole[:64], rows)
    seen = {
        row.tobytes() for seed in range(3) for row in corpus.training_batches(seed, 0, 1, 64, 32)[0]
    }
    if corpus.vocabulary_size > 2:  # sequences of bits may well agree by chance
        assert not seen & {row.tobytes() for row in rows}
    with pytest.raises(UserError, match=r"seed=9223372036854775808: must be below 2\*\*63"):
        corpus.training_batches(1 << 63, 0, 1, 1, 32)
    assert task_corpus.EVALUATION_SEED > grid.MAX_SEED


def test_fingerprints_tell_tasks_and_parameters_apart(monkeypatch):
    prints = [opened(name).fingerprint for name in TASKS]
    assert len(set(prints)) == len(TASKS) and all(len(f) == 64 for f in prints)
    assert (
        opened("copy").fingerprint == opened("copy", 16).fingerprint
    )  # the window is the run's own
    noisy = dataclasses.replace(
        TASKS["copy"], build=lambda window: dataclasses.replace(build_copy(window), noise=0.3)
    )
    build_copy = TASKS["copy"].build
    before = opened("copy").fingerprint
    monkeypatch.setitem(TASKS, "copy", noisy)
    assert opened("copy").fingerprint != before


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"corpus": "task:marcov1"}, "data.corpus=task:marcov1: must be one of task:markov1, "),
        ({"corpus": "task:marcov1"}, "did you mean 'task:markov1'?"),
        ({"corpus": "task:"}, "data.corpus=task:: must be one of task:markov1"),
        ({"corpus": "task:clock", "window": 15}, "data.window=15: task:clock needs at least 16"),
        ({"corpus": "task:copy", "window": 3}, "pass --config.data.window=32"),
        ({"corpus": "task:copy", "window": 0}, "data.window=0: must be from 1 to 1048576"),
        ({"corpus": "task:copy", "vocabulary": "byte"}, "data.vocabulary=byte: task:copy has"),
    ],
)
def test_impossible_values(fields, words):
    assert words in error(**fields)


@pytest.mark.usefixtures("own_folders")
def test_a_text_has_the_same_surface(tmp_path):
    corpus = corpora.open_corpus(DataConfig(corpus=write(tmp_path / "t.txt"), window=8))
    np.testing.assert_array_equal(
        corpus.training_batches(3, 5, 2, 4, 8), batches(corpus.train, 3, 5, 2, 4, 8)
    )
    for count in (0, 5):
        for got, expected in zip(
            corpus.evaluation_set(8, count),
            evaluation_windows(corpus.part("validation"), 8, count), strict=True,
        ):  # fmt: skip
            np.testing.assert_array_equal(got, expected)
    assert corpus.target_weights(8) is None and corpus.task_record() is None
    record = corpus.record()
    assert record["train_tokens"] == len(corpus.train) and "optimum_loss" not in record


# --- weights in training --------------------------------------------------------------------------

V, T, B = 5, 8, 4


class Small:
    """A model that compiles fast: a table of the current token."""

    def init(self, key):
        return {"kernel": 0.3 * jax.random.normal(key, (V, V), jnp.float32)}

    def apply(self, params, tokens):
        return params["kernel"][tokens]


MODEL = Small()
CONFIG = TrainConfig(steps=20, warmup_steps=2, batch_size=B, chunk_steps=3)
HYPER = Hyper(np.uint32(0), np.float32(1e-2), np.float32(0.1), np.float32(1))


def windows(seed=0):
    return np.random.default_rng(seed).integers(0, V, (3, B, T + 1)).astype(np.int32)


def program(*more):
    state = jax.eval_shape(partial(train.init_state, MODEL, CONFIG), HYPER)
    chunk = partial(train.train_chunk, MODEL, CONFIG)
    return str(jax.make_jaxpr(lambda s, w: chunk(s, HYPER, w, 3, *more))(state, windows()))


def test_without_weights_the_program_is_that_of_the_plain_mean(monkeypatch):
    with_weights = program(None, np.array([1, 0] * 4, np.float32))
    without = program()
    assert without == program(None, None) != with_weights
    monkeypatch.setattr(train, "mean_loss", lambda losses, weights: jnp.mean(losses))
    assert program() == without


def test_the_loss_is_the_mean_over_scored_targets():
    """One step's recorded loss against the definition in float64."""
    weights = np.array([0, 1, 0, 0, 1, 0, 0, 1], np.float32)
    cohort = Cohort(MODEL, CONFIG, [HYPER], jax.local_devices()[:1], target_weights=weights)
    cohort.start()
    params = cohort.member_state(0).params
    batch = windows()
    logits = np.asarray(MODEL.apply(params, batch[0, :, :-1]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(log_p, batch[0, :, 1:, None], -1)[..., 0]
    cohort.advance(batch[None], 1)
    expected = losses[:, weights > 0].mean()
    assert cohort.counters()["loss_sum"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("devices, changes", [(1, {}), (2, {"parallel": "data"})])
def test_targets_that_do_not_count_teach_nothing(devices, changes):
    """The last token is a target only: unscored, it changes no bit of the state."""
    config = dataclasses.replace(CONFIG, **changes)
    states = []
    for last in (0, 1):
        cohort = Cohort(
            MODEL, config, [HYPER], jax.local_devices()[:devices],
            target_weights=np.array([1] * (T - 1) + [0], np.float32),
        )  # fmt: skip
        cohort.start()
        batch = windows()
        batch[..., -1] = last
        cohort.advance(batch[None], 3)
        states.append(cohort.member_state(0))
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)


# --- the real program -----------------------------------------------------------------------------


def question():
    return Question("tasks", "tiny", "A task", "Is it learned?", "It is.", "full")


def configuration(name, **changes):
    base = dataclasses.replace(
        ExperimentConfig(),
        model=DecoderConfig(depth=1, width=16, heads=2, mlp_width=16, positions="learned"),
        data=DataConfig(corpus=f"task:{name}", window=16),
        train=TrainConfig(
            steps=150, batch_size=32, learning_rate=1e-2, warmup_steps=10, evaluate_every=75,
            evaluation_windows=256, final_windows=1024, chunk_steps=25,
        ),
    )  # fmt: skip
    return dataclasses.replace(base, grid=dataclasses.replace(base.grid, seeds=1))


ARMS = (
    Arm("full", "full model", "Everything.", {}),
    Arm("no-attention", "minus attention", "Only itself.", {"model.attention": "none"}),
)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    outcome = runner.carry_out(
        question(), ARMS, configuration("copy"), Options(folder, "python launch.py", live=False)
    )
    assert outcome is not None and outcome.page is not None
    return folder


def final_loss(workdir, arm):
    (path,) = workdir.glob(f"runs/{arm}-s0-*/metrics.jsonl")
    return json.loads(path.read_text().splitlines()[-1])["test/loss"]


def test_training_comes_between_nothing_and_the_optimum(workdir):
    """Copying needs attention: with it the loss falls, without it it stays at guessing.

    The fixed evaluation sequences are a sample: 1024 sequences of 12 scored tokens whose losses, at
    the optimum, have a standard deviation below 1.1 nats. Six standard errors are 0.06.
    """
    task = build("copy", 16)
    full, without = final_loss(workdir, "full"), final_loss(workdir, "no-attention")
    assert task.optimum("full") - 0.06 < full < task.optimum("nothing") - 0.3
    assert task.optimum("current_position") - 0.06 < without


def test_the_record_says_what_is_known(workdir):
    plan = json.loads((workdir / "grid.json").read_text())
    task, corpus = build("copy", 16), plan["corpus"]
    assert corpus["name"] == plan["config"]["data"]["corpus"] == "task:copy"
    assert corpus["unigram_loss"] == task.optimum("nothing")
    assert corpus["optimum_loss"] == task.optimum("full")
    assert set(plan["task"]["optimum"]) == set(INFORMATION)
    for level, loss in plan["task"]["optimum"].items():
        assert loss == task.optimum(level)
    assert plan["task"]["scored_fraction"] == 12 / 16
    assert plan["task"]["title"] == TASKS["copy"].title
    assert plan["evaluation"]["windows"] == 1024
    assert plan["evaluation"]["tokens"] == 1024 * 12


def test_the_page_names_unit_and_optimum(workdir):
    page = (workdir / "report.html").read_text()
    assert "nats per token" in page and "nats per character" not in page
    assert "The least loss possible is 0.485" in page
    assert "75 % of the positions are scored" in page


def test_learning_curves_reach_down_to_the_optimum(workdir):
    results = loading.load(workdir)
    figure = figures.learning_curves(results, palette.looks(results.series, results.baseline))
    assert figure is not None
    (axes,) = figure.canvas.axes
    optimum = build("copy", 16).optimum("full")
    assert optimum is not None and axes.get_ylim()[0] < optimum
    levels = [line.get_ydata()[0] for line in axes.lines if len(set(line.get_ydata())) == 1]
    assert optimum in levels
    assert "optimum" in {text.get_text() for text in axes.texts}


def test_a_dry_run_says_what_is_drawn():
    config = configuration("parity")
    corpus = corpora.open_corpus(config.data)
    cohorts = grid.plan(config, ARMS, corpus.fingerprint)
    text = estimates.describe(cohorts, corpus, jax.local_devices())
    assert "corpus task:parity: fresh sequences for training" in text and "2 different" in text
