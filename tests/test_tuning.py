"""Rates are chosen by other runs than those that are reported, and by the order of outcomes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import run_folders

from experiments import ablation
from normjax import configs
from normjax.errors import UserError
from normjax.reporting import loading
from normjax.runs import grid, tuning
from normjax.runs.experiment import Options
from normjax.runs.grid import Arm, ExperimentConfig
from normjax.runs.run_folder import run_folder
from normjax.runs.tuning import TuningConfig

ARMS = (Arm("full", "full", "", {}), Arm("no-mlp", "no MLP", "", {"model.mlp": "none"}))


def cohorts(asked, **changes):
    config = configs.replace(ExperimentConfig(), changes)
    return tuning.first_cohorts(asked, config, ARMS, "f" * 64)


def choose(workdir, asked, losses):
    """Choose with made-up losses: (rate, rung) -> loss by seed, None where it diverged."""
    took = []

    def train_to(cohort, step):
        took.append((cohort.name, step, sorted({r.hyper.learning_rate for r in cohort.runs})))
        for run in cohort.runs:
            ends = losses[run.hyper.learning_rate, step]
            line = {"step": step, "validation/loss": ends[run.hyper.seed - tuning.FIRST_SEED]}
            run_folders.write(run_folder(workdir, run.id), [line], step=step)

    plans = cohorts(asked, **{"grid.arms": ()})[:1]
    return tuning.tune(asked, plans, workdir, train_to)["full"], took


def test_the_better_half_goes_on_and_the_best_is_taken(tmp_path):
    asked = TuningConfig(rates=(1e-3, 2e-3, 4e-3, 8e-3), rungs=(50, 100), seeds=2)
    losses = {(1e-3, 50): (3.0, 3.0), (2e-3, 50): (2.6, 2.6), (4e-3, 50): (2.5, 2.5),
              (8e-3, 50): (2.9, 2.9), (2e-3, 100): (2.0, 2.1), (4e-3, 100): (2.2, 2.2)}  # fmt: skip
    found, took = choose(tmp_path, asked, losses)
    assert found.rate == 2e-3
    assert took == [("full", 50, [1e-3, 2e-3, 4e-3, 8e-3]), ("full", 100, [2e-3, 4e-3])]
    assert (2e-3, 100, 2.05) in found.tried and (1e-3, 50, 3.0) in found.tried


def test_a_rate_with_a_diverged_run_loses_to_any_without(tmp_path):
    asked = TuningConfig(rates=(1e-3, 8e-3), rungs=(50,), seeds=2)
    found, _ = choose(tmp_path, asked, {(1e-3, 50): (4.0, 4.0), (8e-3, 50): (1.0, None)})
    assert found.rate == 1e-3 and (8e-3, 50, None) in found.tried


def test_arms_that_share_a_program_choose_for_themselves(tmp_path):
    """Where the MLP is off for all, the arm without it is the full one, and trains beside it."""
    asked = TuningConfig(rates=(1e-3, 2e-3, 4e-3), rungs=(50, 100))
    plans = cohorts(asked, **{"model.mlp": "none"})
    assert len(plans) == 1
    trained = []

    def train_to(cohort, step):
        for run in cohort.runs:
            rate = run.hyper.learning_rate
            trained.append((run.arm.name, rate, step))
            line = {"step": step, "validation/loss": rate if run.arm.name == "full" else -rate}
            run_folders.write(run_folder(tmp_path, run.id), [line], step=step)

    found = tuning.tune(asked, plans, tmp_path, train_to)
    assert {name: choice.rate for name, choice in found.items()} == {"full": 1e-3, "no-mlp": 4e-3}
    assert [a.setting["train.learning_rate"] for a in tuning.tuned(ARMS, found)] == [1e-3, 4e-3]
    assert sorted(t for t in trained if t[2] == 100) == [
        ("full", 1e-3, 100), ("full", 2e-3, 100), ("no-mlp", 2e-3, 100), ("no-mlp", 4e-3, 100),
    ]  # fmt: skip
    assert [(rate, step) for rate, step, _ in found["no-mlp"].tried] == [
        (1e-3, 50), (2e-3, 50), (4e-3, 50), (2e-3, 100), (4e-3, 100),
    ]  # fmt: skip
    steps = 3 * 50 + 2 * 50  # of each arm
    assert tuning.share(asked, 400) == steps / (3 * 400)


def test_tuning_seeds_are_no_others():
    plans = cohorts(TuningConfig(rates=(1e-3, 2e-3), seeds=3))
    seeds = {run.hyper.seed for plan in plans for run in plan.runs}
    assert seeds == {tuning.FIRST_SEED + i for i in range(3)}
    usual = grid.plan(ExperimentConfig(), ARMS, "f" * 64)
    assert not seeds & {run.hyper.seed for plan in usual for run in plan.runs}


def test_every_arm_is_there_under_every_initialization():
    two = tuning.with_inits(ARMS, TuningConfig(inits=("gpt2", "fan_in")))
    assert [(a.name, a.series, a.condition) for a in two] == [
        ("full-gpt2", "full", "init gpt2"), ("no-mlp-gpt2", "no-mlp", "init gpt2"),
        ("full-fan_in", "full", "init fan_in"), ("no-mlp-fan_in", "no-mlp", "init fan_in"),
    ]  # fmt: skip
    configured = [a.configured(ExperimentConfig()).model for a in two]
    assert [(m.init, m.mlp) for m in configured][1:3] == [("gpt2", "none"), ("fan_in", "gelu")]
    (one, _) = tuning.with_inits(ARMS, TuningConfig(inits=("fan_in",)))
    assert one.name == "full" and one.configured(ExperimentConfig()).model.init == "fan_in"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rungs": (30,)}, "tuning.rungs=30: must be a multiple of train.evaluate_every=100"),
        ({"rungs": (800,)}, "up to train.steps=400"),
        ({"rungs": (200, 100)}, "must rise; pass --config.tuning.rungs=100,200"),
    ],
)
def test_impossible_rungs(fields, words):
    asked = TuningConfig(rates=(1e-3,), **fields)
    with pytest.raises(UserError, match=words):
        tuning.check(asked, ExperimentConfig())


def test_a_tuned_grid_reports_other_runs_than_it_chose_by(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question: " * 120)
    config = configs.replace(ablation.get_config("smoke"), {
        "data.corpus": str(tmp_path / "text.txt"), "data.cache_dir": str(tmp_path / "cache"),
        "grid.arms": ("full", "no-mlp"), "tuning.inits": ("gpt2", "fan_in"), "model.depth": 1,
        "tuning.rates": (1e-3, 1e-2, 1e4), "tuning.rungs": (10,),
    })  # fmt: skip
    options = Options(tmp_path / "work", "the command", live=False)
    outcome = ablation.run(config, "smoke", options)
    results = loading.load(tmp_path / "work")
    chosen = results.plan["tuning"]["chosen"]
    assert set(chosen) == {f"{a}-{i}" for a in ("full", "no-mlp") for i in ("gpt2", "fan_in")}
    for arm in results.arms:
        rates = {run.rates.learning_rate for run in results.runs if run.arm == arm.name}
        assert rates == {chosen[arm.name]["rate"]} and rates <= {1e-3, 1e-2}
        tried = {rate: loss for rate, _, loss in chosen[arm.name]["tried"]}
        known = {rate: math.inf if loss is None else loss for rate, loss in tried.items()}
        assert chosen[arm.name]["rate"] == min(known, key=known.get)
    assert results.conditions == ("init gpt2", "init fan_in") and results.varied == ()
    assert all(run.parts and run.choice_loss != run.final_loss for run in results.runs)
    page = outcome.page.read_text()
    assert "How the rates were chosen" in page and "Spent on this choice: 12 runs, 120" in page
    before = {p: p.read_bytes() for p in (tmp_path / "work" / "runs").rglob("metrics.jsonl")}
    ablation.run(config, "smoke", options)  # again: nothing is left
    assert before == {
        p: p.read_bytes() for p in (tmp_path / "work" / "runs").rglob("metrics.jsonl")
    }
    untuned = dataclasses.replace(config, tuning=TuningConfig())
    ablation.run(untuned, "smoke", dataclasses.replace(options, workdir=tmp_path / "one"))
    assert loading.load(tmp_path / "one").conditions == ("",)
