"""Diverged runs replayed: the run comes again, and what went first is named."""

import shutil

import jax
import numpy as np
import pytest
import run_folders

from normjax import configs
from normjax.diagnostics import autopsy as replay
from normjax.diagnostics import autopsy_record, log, verdict
from normjax.diagnostics.autopsy_record import ReplayCheck
from normjax.diagnostics.evidence import Series, gather
from normjax.errors import UserError
from normjax.runs import files, runner
from normjax.runs.experiment import Options
from normjax.runs.grid import Arm, ExperimentConfig, Question
from normjax.runs.run_folder import RunFolder, lines_of
from normjax.training.trained import TrainedRun

STEPS, PATIENCE, RATE = 24, 3, 1000.0


@pytest.fixture(scope="module", autouse=True)
def _quick_to_compile():
    """Compiling is nearly all that these tests take; both sides of every comparison do without."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A grid of six runs on four devices, two of them in turn on two: healthy ones and others."""
    folder = tmp_path_factory.mktemp("autopsy")
    (folder / "text.txt").write_text("to be or not to be, that is the question: " * 60)
    config = configs.replace(ExperimentConfig(), {
        "model.depth": 3, "model.width": 8, "model.heads": 2, "model.mlp": "none", "data.window": 6,
        "data.corpus": str(folder / "text.txt"), "data.cache_dir": str(folder / "cache"),
        "train.steps": STEPS, "train.batch_size": 2, "train.warmup_steps": 2,
        "train.patience": PATIENCE, "train.evaluate_every": 12, "train.evaluation_windows": 2,
        "train.final_windows": 2, "train.checkpoint_every": 2, "train.keep_checkpoints": 0,
        "train.chunk_steps": 4, "train.diagnostics": "on", "train.diagnostic_points": 5,
        "grid.seeds": 2, "grid.learning_rates": (1e-3, RATE, 3 * RATE),
    })  # fmt: skip
    question = Question("test", "tiny", "A test", "Which?", "", "full")
    arms = [Arm("full", "full", "", {})]
    options = Options(folder / "work", "the command", live=False)
    with pytest.MonkeyPatch.context() as patch:  # pages are tested elsewhere, and take their time
        patch.setattr(runner.report, "write", lambda workdir: workdir / "report.html")
        assert runner.carry_out(question, arms, config, options) is not None
    return folder / "work"


def run_of(workdir, rate):
    plan = files.read_sealed(workdir / "grid.json")
    entry = next(run for run in plan["runs"] if run["learning_rate"] == rate)
    return workdir / "runs" / entry["id"]


def test_a_grid_replays_what_diverged(workdir):
    folder = run_of(workdir, RATE)
    bad = RunFolder(folder).value("diverged_at") - 1
    found, series = autopsy_record.read(folder)
    assert found.bad_step == bad > 0
    assert found.reproduced, found.checks
    assert [c.name for c in found.checks] == ["bad step", "parameters", "moments", "extremes"]
    steps = series["loss/value"].steps.tolist()
    assert steps == list(range(found.first, found.last + 1))
    assert found.last == bad + PATIENCE - 1
    # With a rate of 1000 the parameters are out of all proportion after the first step.
    first = autopsy_record.leading(found)[0]
    assert first.step == found.first + 1 and first.factor > 50
    assert f"before step {first.step}" in found.sentence
    assert not (run_of(workdir, 1e-3) / autopsy_record.FILE).exists()


def test_every_diverged_run_of_a_cohort_comes_again_bit_for_bit(workdir):
    diverged = [p for p in (workdir / "runs").iterdir() if RunFolder(p).state == "diverged"]
    assert len(diverged) == 4
    for folder in diverged:
        assert RunFolder(folder).environment["cohort_runs"] == 6
        found, _ = autopsy_record.read(folder)
        assert found.reproduced and "is the run again" in found.sentence, found.sentence


def test_another_layout_tells_no_story(workdir, tmp_path, monkeypatch):
    folder = shutil.copytree(run_of(workdir, RATE), tmp_path / "run")
    took = RunFolder(folder).environment | {"devices_taken": 8}
    monkeypatch.setattr(RunFolder, "environment", took)
    with pytest.raises(UserError, match="was trained on 8 devices, here are 4"):
        replay.autopsy(folder)


def test_the_verdicts_of_both_runs(workdir):
    sick, well = (verdict.judge_run(run_of(workdir, rate)) for rate in (RATE, 1e-3))
    assert (sick.state, sick.basis) == ("diverged", "diagnostics")
    assert sick.first.diagnostic == "update/block_ratio" and sick.first.step == 0
    # 24 steps of 1e-3 do not do better than knowing how frequent tokens are.
    assert well.state == "too slow" and len(well.events) == 1, well.sentence
    assert "the loss was still falling" in well.sentence


def test_a_replay_from_a_checkpoint_finds_the_same(workdir, tmp_path):
    folder = shutil.copytree(run_of(workdir, RATE), tmp_path / "run")
    whole, series = autopsy_record.read(folder)
    found = replay.autopsy(folder, before=2, after=1)
    bad = found.bad_step
    assert (found.first, found.last) == (bad - 2, bad + 1)
    assert 0 < found.start <= bad - 2 and found.reproduced
    assert "the checkpoint of step" in found.sentence
    again = gather(log.samples(lines_of((folder / autopsy_record.DIAGNOSTICS_FILE).read_bytes())))
    for name, values in again.items():
        rows = np.searchsorted(series[name].steps, values.steps)
        np.testing.assert_array_equal(values.values, series[name].values[rows], err_msg=name)


def test_a_replay_is_the_same_each_time(workdir, tmp_path):
    folder = shutil.copytree(run_of(workdir, RATE), tmp_path / "run")
    found = replay.autopsy(folder)
    assert found == autopsy_record.read(run_of(workdir, RATE))[0]
    before, now = (p / autopsy_record.DIAGNOSTICS_FILE for p in (run_of(workdir, RATE), folder))
    assert before.read_bytes() == now.read_bytes()


def test_a_replay_of_other_batches_says_that_it_is_not_the_run(workdir, tmp_path, monkeypatch):
    folder = shutil.copytree(run_of(workdir, RATE), tmp_path / "run")
    batches = replay._Replay._batches
    monkeypatch.setattr(replay._Replay, "_batches", lambda self, n: batches(self, n)[:, ::-1] * 0)
    found = replay.autopsy(folder, before=2, after=0)
    assert not found.reproduced and "not the run again" in found.sentence
    assert found.events == () and "First" not in found.sentence
    assert (folder / autopsy_record.DIAGNOSTICS_FILE).read_bytes() == b""


def test_what_cannot_be_replayed_is_one_line(workdir, tmp_path):
    with pytest.raises(UserError, match="did not diverge"):
        replay.autopsy(run_of(workdir, 1e-3))
    with pytest.raises(UserError, match="did not diverge"):
        replay.autopsy(tmp_path)
    with pytest.raises(UserError, match=r"steps to replay, more than 1; autopsy"):
        replay.autopsy(run_of(workdir, RATE), most_replayed=1)
    bare = tmp_path / "bare"
    shutil.copytree(run_of(workdir, RATE), bare, ignore=shutil.ignore_patterns("checkpoint*"))
    with pytest.raises(UserError, match="has no whole checkpoint"):
        replay.autopsy(bare)


def test_a_damaged_autopsy_is_none(workdir, tmp_path):
    assert autopsy_record.read(tmp_path) is None
    for text in ("{", "[]", '{"bad_step": 3}'):
        (tmp_path / autopsy_record.FILE).write_text(text)
        assert autopsy_record.read(tmp_path) is None


def trained(workdir, tmp_path, fault, steps=3):
    """Train the tiny model from a state with a fault, with diagnostics before every step."""
    run = TrainedRun(run_of(workdir, 1e-3))
    player = replay._Replay(run, 2, RunFolder(run.folder).environment)
    params = fault(jax.tree.map(np.array, player.state.params))
    player._cohort.start([player.state._replace(params=params)] * player._lanes)
    samples = []
    for step in range(steps):
        samples.append((step, player.measure()))
        player.advance(1)
    found = RunFolder(run.folder)
    run_folders.write(tmp_path, record=found.record, samples=samples, state=found.state)
    return verdict.judge_run(tmp_path)


def test_a_branch_of_a_real_model_that_is_scaled_is_named(workdir, tmp_path):
    def fault(params):
        params["blocks"]["attention"]["branch"]["output"]["kernel"][1] *= 1e5
        return params

    found = trained(workdir, tmp_path, fault)
    first = found.first
    assert found.state == "drifting", found.sentence
    assert (first.diagnostic, first.step) == ("branch/stream_ratio", 0)
    assert (first.layer, first.sublayer) == (2, "attention")
    (values,) = [v["branch/stream_ratio"] for s, v in log.read_diagnostics(tmp_path) if s == 0]
    assert first.factor == pytest.approx(values[1, 0] / 300, rel=1e-12)


def test_a_gain_of_a_real_model_that_ran_away_is_named(workdir, tmp_path):
    def fault(params):
        params["blocks"]["attention"]["pre_norm"]["gain"][2, 5] = 40.0
        return params

    first = trained(workdir, tmp_path, fault).first
    assert (first.diagnostic, first.step) == ("gain/max[attention.pre_norm]", 0)
    assert (first.layer, first.factor) == (3, 4.0)


# --- dense diagnostics, made up -------------------------------------------------------------------


def dense(steps=30, bad=25):
    """Noise around 1; the logits of block 2 grow from step 18 on, the stream after from 20 on."""
    rng = np.random.default_rng(0)
    samples = []
    for step in range(steps):
        values = {
            "attention/logit_max": 8 * np.exp(0.1 * rng.standard_normal((3, 2))),
            "residual/rms_after": np.exp(0.1 * rng.standard_normal((3, 2))),
            "gradient/norm": np.exp(0.1 * rng.standard_normal()) * np.ones(()),
        }
        values["attention/logit_max"][1, 1] *= 2.0 ** max(0, step - 17)
        values["residual/rms_after"][1:, 0] *= 10.0 ** max(0, step - 20)
        if step >= bad:
            values["residual/rms_after"][2] = np.inf
        samples.append((step, values))
    return samples


def test_the_diagnostic_that_moves_first_is_named():
    found = autopsy_record.examine(
        dense(), 25, 0, [ReplayCheck("bad step", True, "its first bad step is 25")]
    )
    first, second = autopsy_record.leading(found)
    # 2^3 is the first power of two beyond 5, whatever the noise of 10 %.
    assert (first.diagnostic, first.step, first.layer, first.head) == (
        "attention/logit_max",
        20,
        2,
        2,
    )
    assert first.factor == pytest.approx(8, rel=0.5)
    assert (second.diagnostic, second.step, second.layer) == ("residual/rms_after", 21, 2)
    assert second.sublayer == "attention"
    assert "largest logit in block 2, head 2, before step 20" in found.sentence
    assert "First not to be finite was the stream after in block 3" in found.sentence
    assert "is the run again" in found.sentence


def test_a_warmup_is_no_movement():
    steps = np.arange(20)
    rates = {int(s): (s + 1) / 20 for s in steps}
    series = Series("update/norm", steps, 1e-3 * (steps + 1.0))
    assert autopsy_record.moved(series, 20, (), rates) == []
    assert autopsy_record.moved(series, 20, ())[0].step > 0


def test_an_autopsy_reads_back(tmp_path):
    found = autopsy_record.examine(dense(), 25, 0, [ReplayCheck("bad step", False, "another")])
    autopsy_record.write(tmp_path, found, [])
    again, series = autopsy_record.read(tmp_path)
    assert again == found and series == {} and not again.reproduced
