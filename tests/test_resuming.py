"""Every run keeps what it has: laggards, lost folders, torn records, more seeds, more steps."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from normjax import configs
from normjax.data import corpora
from normjax.errors import UserError
from normjax.runs import grid, segments
from normjax.runs.cohort_run import CohortRun
from normjax.runs.progress import Progress, TimeLeft
from normjax.runs.run_folder import METRICS, RunFolder
from normjax.runs.signals import StopRequest
from normjax.training.checkpoints import SavedStates
from normjax.training.trained import TrainedRun

ARM = grid.Arm("full", "full", "", {})
STEPS = 12
ROOT = Path(__file__).parents[1]


class After(StopRequest):
    """A stop that comes at the n-th look of the training loop."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks

    def __bool__(self):
        self.looks -= 1
        return self.looks < 0


class World:
    def __init__(self, folder):
        (folder / "text.txt").write_text("the quick brown fox jumps over a lazy dog " * 40)
        self.config = configs.replace(grid.ExperimentConfig(), {
            "data.corpus": str(folder / "text.txt"), "data.window": 4, "model.depth": 1,
            "data.cache_dir": str(folder / "cache"),
            "model.width": 8, "model.heads": 2, "model.mlp": "none", "train.steps": STEPS,
            "train.warmup_steps": 2, "train.batch_size": 2, "train.evaluate_every": 4,
            "train.evaluation_windows": 4, "train.final_windows": 4, "train.chunk_steps": 2,
            "train.checkpoint_every": 2, "grid.seeds": 2,
        })  # fmt: skip
        self.corpus = corpora.open_corpus(self.config.data)

    def train(self, workdir, stop=None, environment=None, **changes):
        """Train what is left in a workdir; return whether it ended, and what was said."""
        config = configs.replace(self.config, {k.replace("__", "."): v for k, v in changes.items()})
        (plan,) = grid.plan(config, [ARM], self.corpus.fingerprint)
        said = []
        with Progress([plan.name], False) as progress:
            progress.say = said.append
            run = CohortRun(
                plan, self.corpus, workdir, progress, TimeLeft(1.0), 1.0, environment or {"code": 1}
            )  # fmt: skip
            ended = run.carry_on(StopRequest() if stop is None else stop)
        return ended, "\n".join(said)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def reference(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference") / "work"
    assert world.train(folder)[0]
    return folder


@pytest.fixture(scope="module")
def stopped(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "work"
    assert not world.train(folder, After(4))[0]  # asked before each of four chunks: step 8 or so
    return folder


@pytest.fixture
def again(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "again")


def numbers(workdir):
    """Return, by run, all that it measured and what it became: every bit of its last state."""
    return {
        path.name: [{k: v for k, v in line.items() if not k.startswith("time/")}
                    for line in RunFolder(path, path.name).metrics()] + [last_state(path)]
        for path in sorted((workdir / "runs").iterdir())
    }  # fmt: skip


def last_state(run):
    """Return step and SHA-256 of the parameters, moments and counters that were saved last."""
    saved = SavedStates(RunFolder(run))
    step = saved.steps[-1]
    like = {k: np.zeros(*kind) for k, kind in saved.shapes(step).items()}
    total = hashlib.sha256()
    for name, leaf in sorted(saved.restore(step, like).items()):
        total.update(name.encode() + leaf.tobytes())
    return {"step": step, "state": total.hexdigest()}


def runs(workdir):
    return sorted((workdir / "runs").iterdir())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


def spoil(run, step):
    flip(max((run / "checkpoints" / str(step)).rglob("*"), key=lambda p: p.stat().st_size))


def test_a_stopped_cohort_goes_on_where_it_was(world, again, reference):
    steps = {RunFolder(run).value("step") for run in runs(again)}
    assert len(steps) == 1 and 0 < min(steps) < STEPS
    ended, said = world.train(again)
    assert ended and said.count("resumed at step") == 1 and "goes on from" not in said
    assert numbers(again) == numbers(reference)


def test_the_newest_of_one_and_the_oldest_of_another_damaged_is_no_start_at_zero(
    world, again, reference
):
    first, second = runs(again)
    older, newer = sorted(map(int, RunFolder(first).value("checkpoints")))
    spoil(first, newer)
    spoil(second, older)
    ended, said = world.train(again)
    assert ended and f"the checkpoint of step {newer} is damaged" in said
    assert f"had reached step {newer}, goes on from step {older}" in said
    assert f"from step {older}; the others stand at step {newer} and wait" in said
    assert numbers(again) == numbers(reference)


def test_a_lost_folder_costs_that_run_only(world, again, reference):
    shutil.rmtree(runs(again)[0])
    before = RunFolder(runs(again)[0]).value("step")
    ended, said = world.train(again)
    assert ended and f"from step 0; the others stand at step {before} and wait" in said
    assert numbers(again) == numbers(reference)


def test_one_that_diverges_while_it_catches_up_does_not_stop_the_others(world, tmp_path):
    work = tmp_path / "work"
    rates = {"grid__learning_rates": (1e-3, 1e4), "grid__seeds": 1, "train__patience": 2}
    assert not world.train(work, After(5), **rates)[0]
    calm, wild = sorted(runs(work), key=lambda r: RunFolder(r).record["hyper"]["learning_rate"])
    assert RunFolder(calm).value("step") == 10 and RunFolder(wild).value("diverged_at") is not None
    shutil.rmtree(wild)  # alone it ends before the other's step
    assert world.train(work, **rates)[0]
    assert (RunFolder(calm).state, RunFolder(calm).value("step")) == ("done", STEPS)
    assert RunFolder(wild).state == "diverged" and RunFolder(wild).value("step") < 10


def test_swapped_folders_and_checkpoints_are_never_taken_for_each_other(world, again, reference):
    first, second = runs(again)
    for name in ("checkpoints", None):
        copy = shutil.copytree(again, again.with_name(f"swapped-{name}"))
        a, b = (copy / "runs" / run.name / (name or "") for run in (first, second))
        a.rename(copy / "kept")
        b.rename(a)
        (copy / "kept").rename(b)
        with pytest.raises(UserError, match="damaged|of the run") as caught:
            world.train(copy)
        assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_what_the_manifest_does_not_name_is_ignored(world, again, reference):
    run = runs(again)[0]
    newest = max((run / "checkpoints").iterdir(), key=lambda p: int(p.name))
    newest.rename(newest.with_name("99"))  # past the last step
    ended, _ = world.train(again)
    assert ended and numbers(again) == numbers(reference)


def test_more_seeds_leave_what_is_there(world, again, reference):
    reached = RunFolder(runs(again)[0]).value("step")
    ended, said = world.train(again, grid__seeds=3)
    assert ended and "s2-" in said and f"the others stand at step {reached} and wait" in said
    assert "goes on from step 0" not in said
    found = numbers(again)
    assert len(found) == 3 and all(lines[-1]["step"] == STEPS for lines in found.values())
    for name, lines in numbers(reference).items():  # last bits may differ: other devices
        for old, new in zip(lines[:-1], found[name][:-1], strict=True):
            assert new["validation/loss"] == pytest.approx(old["validation/loss"], rel=1e-5)


def test_a_finished_run_with_torn_records_is_evaluated_again(world, reference, tmp_path):
    work = shutil.copytree(reference, tmp_path / "work")
    run = runs(work)[0]
    lines = (run / METRICS).read_bytes().splitlines(keepends=True)
    (run / METRICS).write_bytes(b"".join(lines[:-1]))
    assert RunFolder(run).problems() == ["metrics.jsonl: 1 of 4 lines are lost or damaged"]
    ended, said = world.train(work)
    assert ended and "1 of 4 lines are lost or damaged; what is left of them is kept" in said
    last, expected = (RunFolder(r).metrics()[-1] for r in (run, runs(reference)[0]))
    assert last["validation/loss"] == expected["validation/loss"] and last["step"] == STEPS
    assert RunFolder(run).problems() == [] and RunFolder(run).state == "done"


@pytest.mark.slow
def test_a_finished_run_goes_on_where_its_schedule_allows(world, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flat = {"train__final_fraction": 1.0}
    assert world.train(whole, **flat, train__steps=16)[0]
    assert world.train(parts, **flat)[0]
    ended, said = world.train(parts, **flat, train__steps=16)
    assert ended and said.count("which ended at step 12") == 2
    found = {name: lines for name, lines in numbers(parts).items() if name in numbers(whole)}
    assert found == numbers(whole)
    # A rate that falls towards the end knows the end: said, and trained anew.
    falling = tmp_path / "falling"
    assert world.train(falling)[0]
    ended, said = world.train(falling, train__steps=16)
    assert ended and "trained anew" in said and "train.final_fraction=1" in said
    # Runs of one grid differ on purpose.
    ended, said = world.train(tmp_path / "rates", grid__learning_rates=(1e-3, 2e-3))
    assert ended and "trained anew" not in said


def test_other_code_is_said_and_kept_as_a_segment(world, again):
    _, said = world.train(again, environment={"code": 2})
    assert "goes on from step" in said and "environment.code: 1 -> 2" in said
    for run in runs(again):
        first, second = RunFolder(run).segments
        assert (first["environment"]["code"], second["environment"]["code"]) == (1, 2)
        assert first["from"] == 0 < second["from"]


def test_what_may_change_is_kept_with_both_values(world, again):
    """Where nothing that counts is another, the segment goes on and says what else is."""
    environment = {"code": 1, "hostname": "b"}
    ended, said = world.train(again, environment=environment, train__keep_checkpoints=1)
    assert ended and "under other conditions" not in said
    for run in runs(again):
        (segment,) = RunFolder(run).segments
        (resumed,) = segment["resumed"]
        assert 0 < resumed["from"] < STEPS and resumed["changes"] == [
            "config.train.keep_checkpoints: 2 -> 1", 'environment.hostname: "absent" -> "b"',
        ]  # fmt: skip


AROUND = """
import json, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_resuming as t
from normjax.runs import machine, provenance
machine.set_up(1)
if len(sys.argv) > 2:
    print(json.dumps(provenance.environment([])))
    sys.exit()
world = t.World(Path(sys.argv[1]))
assert world.train(Path(sys.argv[1]) / "work", environment=provenance.environment([]))[0]
print(*(line["state"] for lines in t.numbers(Path(sys.argv[1]) / "work").values()
        for line in lines[-1:]))
"""


def under(folder, *more, head=(), **changes):
    """Train in a process of its own, in an environment of its own; return what it prints."""
    folder.mkdir()
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    environment |= {"PYTHONPATH": str(ROOT), **changes}
    done = subprocess.run(
        [*head, sys.executable, "-c", AROUND.format(tests=str(ROOT / "tests")), str(folder), *more],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_what_surrounds_a_run_changes_no_bit_or_is_on_record(tmp_path):
    """Seed of hashes, locale, zone, folder: nothing. Cores and vector units: written down."""
    plain = under(tmp_path / "plain", PYTHONHASHSEED="0")
    other = {"PYTHONHASHSEED": "1", "TZ": "Asia/Tokyo", "LC_ALL": "C", "HOME": str(tmp_path)}
    assert under(tmp_path / "other", **other) == plain
    one_core = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
    flags = "--xla_cpu_max_isa=SSE4_2"
    narrow = under(tmp_path / "narrow", "environment", head=one_core, XLA_FLAGS=flags)
    before = RunFolder(runs(tmp_path / "plain/work")[0]).segments[-1]
    said = segments.differences(before, before | {"environment": json.loads(narrow)})
    warned = {line.split(":")[0].removeprefix("environment.") for line in said[segments.WARN]}
    assert warned - {"devices_taken"} == {"threads", "xla_flags"} - (
        {"threads"} if len(os.sched_getaffinity(0)) == 1 else set()
    )
    assert not said[segments.REFUSE]


@pytest.mark.slow
def test_one_checkpoint_kept_is_enough(world, reference, tmp_path):
    work = tmp_path / "work"
    assert not world.train(work, After(4), train__keep_checkpoints=1)[0]
    assert [len(RunFolder(run).value("checkpoints")) for run in runs(work)] == [1, 1]
    assert world.train(work, train__keep_checkpoints=1)[0]
    assert numbers(work) == numbers(reference)


def test_opening_a_run_changes_nothing(again):
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in again.rglob("*") if p.is_file()}
    run = TrainedRun(runs(again)[0])
    assert np.isfinite(np.asarray(run.params(run.steps[-1])["embedding"])).all()
    spoil(runs(again)[1], max(map(int, RunFolder(runs(again)[1]).value("checkpoints"))))
    with pytest.warns(UserWarning, match="is damaged"):
        TrainedRun(runs(again)[1])
    after = {p: p.stat().st_mtime_ns for p in again.rglob("*") if p.is_file()}
    assert after.keys() == before.keys()
    assert json.loads((runs(again)[0] / "manifest.json").read_text())["state"] == "interrupted"
