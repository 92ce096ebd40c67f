"""The program as a process: killed, stopped, damaged, refused; it always ends at the same numbers.

All runs share one cache of texts and compiled programs, so that a process starts in a few seconds.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_folders

from normjax.runs.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
# What a printed command starts with: the short name only where it is this interpreter.
PYTHON = "python" if shutil.which("python") == sys.executable else sys.executable
SEEDS, STEPS = (0, 1), 24
VARIANTS = ("full", "no-norm")
FLAGS = (
    "--preset=smoke", f"--config.grid.arms={','.join(VARIANTS)}", "--cpu_devices=2",
    f"--config.train.steps={STEPS}", "--config.train.evaluate_every=8",
    # Many short chunks, each of them saved: a run that lasts long enough to be hit.
    "--config.train.chunk_steps=2", "--config.train.checkpoint_every=2",
)  # fmt: skip
WATCHED = """
import runpy, sys
sys.argv = ["launch.py", *sys.argv[1:]]
try:
    runpy.run_path("launch.py", run_name="__main__")
finally:
    print("tensorflow:", "tensorflow" in sys.modules)
"""


class World:
    """A folder with a text and a cache, and the commands run in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
        (folder / "text.txt").write_text(" ".join(random.Random(0).choices(words, k=1200)))
        self.environment = {
            **os.environ, "JAX_PLATFORMS": "cpu", "NORMJAX_CACHE": str(folder / "cache"),
        }  # fmt: skip

    def command(self, workdir: str, *more: str) -> list[str]:
        corpus = f"--config.data.corpus={self.folder / 'text.txt'}"
        return ["launch.py", *FLAGS, corpus, *more, f"--workdir={self.folder / workdir}"]

    def start(self, workdir: str, *more: str, head: tuple[str, ...] = (), **options):
        """Start a process; its output is collected by wait()."""
        return subprocess.Popen(
            [sys.executable, *head, *self.command(workdir, *more)[bool(head):]],
            cwd=ROOT, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
        )  # fmt: skip

    def run(self, workdir: str, *more: str, **options):
        return wait(self.start(workdir, *more, **options))


def wait(process):
    out, err = process.communicate()
    return process.returncode, out, err


def hit(process, workdir, arm, lines, number):
    """Send a signal once a run of an arm has so many lines of metrics; return whether it was."""
    while process.poll() is None:
        for path in sorted(workdir.glob(f"runs/{arm}-s0-*/metrics.jsonl")):
            with contextlib.suppress(OSError):
                if path.read_bytes().count(b"\n") >= lines:
                    process.send_signal(number)
                    return True
        time.sleep(0.002)
    return False


def results(workdir):
    """Return results.csv without what depends on the clock."""
    rows = list(csv.reader(io.StringIO((workdir / "results.csv").read_text())))
    keep = [i for i, name in enumerate(rows[0]) if not name.startswith("time_")]
    assert len(keep) == len(rows[0]) - 2
    return [[row[i] for i in keep] for row in rows]


def assert_equal(workdir, reference):
    assert results(workdir) == results(reference)
    assert (workdir / "summary.csv").read_bytes() == (reference / "summary.csv").read_bytes()


def files(folder):
    """Return {relative path: (content, time of change)} of all files below a folder."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns
        )
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip


def metrics(workdir):
    """Return {run: list of its lines}, every line whole and strict."""
    return {
        path.parent.name: [json.loads(text) for text in path.read_text().splitlines()]
        for path in workdir.glob("runs/*/metrics.jsonl")
    }


def statuses(workdir):
    """Return {run: its manifest}."""
    return {p.name: RunFolder(p).manifest for p in workdir.glob("runs/*")}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def reference(world):
    """The workdir of an uninterrupted grid."""
    code, out, err = world.run("reference", head=("-c", WATCHED))
    assert code == 0, err
    assert "tensorflow: False" in out, "TensorFlow was imported"
    assert "report:" in out and "Traceback" not in err
    return world.folder / "reference"


@pytest.fixture(scope="module")
def stopped(world, reference):
    """A workdir stopped by SIGTERM in the middle of its first cohort, and what was said."""
    workdir = world.folder / "stopped"
    process = world.start("stopped")
    assert hit(process, workdir, "full", 2, signal.SIGTERM), "it ended before it could be stopped"
    asked = time.monotonic()
    code, out, err = wait(process)
    return workdir, code, out, err, time.monotonic() - asked


@pytest.fixture
def again(world, stopped):
    """A fresh copy of the stopped workdir."""
    copy = world.folder / "again"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(stopped[0], copy)
    return copy


# --- an undisturbed grid --------------------------------------------------------------------------


def test_every_run_is_there_whole(reference):
    plan = json.loads((reference / "grid.json").read_text())
    assert [(run["arm"], run["seed"]) for run in plan["runs"]] == [
        (variant, seed) for variant in VARIANTS for seed in SEEDS
    ]
    assert {p.name for p in (reference / "runs").iterdir()} == {run["id"] for run in plan["runs"]}
    for run, lines in metrics(reference).items():
        assert [line["step"] for line in lines] == [0, 8, 16, 24], run
        assert lines[-1]["validation/loss"] < lines[0]["validation/loss"]
        assert lines[0]["train/loss"] is None and lines[-1]["train/loss"] > 0
        assert [line["tokens"] for line in lines] == [step * 4 * 16 for step in (0, 8, 16, 24)]
    for status in statuses(reference).values():
        assert (status["state"], status["step"], status["steps"]) == ("done", STEPS, STEPS)
        assert status["time"]["compile_s"] > 0 and status["time"]["train_s"] > 0


def test_the_report_names_every_variant_and_run(reference):
    page = (reference / "report.html").read_text()
    summary = list(csv.DictReader(io.StringIO((reference / "summary.csv").read_text())))
    assert {row["arm"] for row in summary} == set(VARIANTS)
    for run in json.loads((reference / "grid.json").read_text())["runs"]:
        assert run["arm"] in page
    rows = {(row[1], row[4]) for row in results(reference)[1:]}
    assert rows == {(variant, str(seed)) for variant in VARIANTS for seed in SEEDS}
    assert not re.search(r"""(src|href)=["']https?://""", page)  # self-contained
    for kind in ("png", "svg", "csv"):
        assert list((reference / "figures").glob(f"*.{kind}"))


def test_run_again_when_finished_changes_no_run(world, reference):
    copy = world.folder / "finished"
    shutil.copytree(reference, copy)
    before = files(copy / "runs")
    code, _, err = world.run("finished")
    assert code == 0, err
    assert "finished before" in err
    assert files(copy / "runs") == before
    assert_equal(copy, reference)


@pytest.mark.slow
def test_the_same_command_gives_the_same_bytes(world, reference):
    code, _, err = world.run("same")
    assert code == 0, err
    assert_equal(world.folder / "same", reference)


@pytest.mark.slow
def test_how_a_run_is_computed_does_not_show_in_its_numbers(world, reference):
    """Other chunks, no checkpoints, another hash seed and locale, nothing precompiled."""
    world.environment |= {"PYTHONHASHSEED": "7", "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    code, _, err = world.run(
        "manner", "--config.train.chunk_steps=5", "--config.train.checkpoint_every=0",
        "--compilation_cache=off",
    )  # fmt: skip
    for name in ("PYTHONHASHSEED", "LC_ALL", "TZ"):
        world.environment.pop(name)
    assert code == 0, err
    assert_equal(world.folder / "manner", reference)


# --- stopped --------------------------------------------------------------------------------------


def test_a_stop_is_prompt_saves_and_names_the_command(stopped):
    workdir, code, out, err, seconds = stopped
    assert code == 75, err
    assert "Traceback" not in err and "report:" not in out
    assert "SIGTERM" in err
    assert f"go on with: {PYTHON} launch.py" in err
    # The next look is after one chunk of 2 steps: seconds even on a machine with other work.
    assert seconds < 30
    states = {run: status["state"] for run, status in statuses(workdir).items()}
    assert set(states.values()) == {"interrupted"} and len(states) == len(SEEDS)
    for status in statuses(workdir).values():
        assert 8 <= status["step"] < STEPS
        assert str(status["step"]) in status["checkpoints"]


def test_the_named_command_finishes_with_the_same_numbers(world, stopped, again, reference):
    _, _, _, err, _ = stopped
    command = err.rsplit("go on with: ", 1)[1].strip()
    assert str(stopped[0]) in command
    command = command.replace(str(stopped[0]), str(again))
    # Another environment on record, as after an update: said, not refused.
    for path in again.glob("runs/full-s0-*"):
        record = RunFolder(path).environment
        record["versions"]["jax"] = "0.0.1"
        run_folders.write(path, record=RunFolder(path).record, environment=record, steps=STEPS)
    out = subprocess.run(
        command, shell=True, cwd=ROOT, env=world.environment, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    assert_equal(again, reference)
    assert "resumed at step" in out.stderr
    assert "under other conditions" in out.stderr and 'versions.jax: "0.0.1" -> ' in out.stderr
    page = re.sub(r"<[^>]+>", "", (again / "report.html").read_text())
    said = "1 of 4 runs went on under other conditions than at the start (full-s0-"
    assert said in page and "environment.versions.jax: &#34;0.0.1&#34; -&gt; " in page


def test_a_damaged_checkpoint_is_set_aside_and_the_numbers_are_the_same(world, again, reference):
    run = sorted(again.glob("runs/full-s1-*"))[0]
    numbered = [p for p in (run / "checkpoints").iterdir() if p.name.isdecimal()]
    newest = max(numbered, key=lambda p: int(p.name))
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 16
    victim.write_bytes(data)
    code, _, err = world.run("again")
    assert code == 0, err
    assert victim.name in err and "damaged" in err and "Traceback" not in err
    assert_equal(again, reference)


def test_where_all_are_damaged_nothing_starts_in_silence(world, again):
    for path in again.glob("runs/full-s0-*/checkpoints/*/manifest.ocdbt"):
        path.write_bytes(b"")
    before = {name: value for name, value in files(again / "runs").items() if "metrics" in name}
    code, _, err = world.run("again")
    last = err.strip().splitlines()[-1]
    assert code == 2 and "Traceback" not in err
    assert "every checkpoint" in last and "damaged" in last and "delete the run folder" in last
    assert {n: v for n, v in files(again / "runs").items() if "metrics" in n} == before


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[]"])
@pytest.mark.parametrize("name", ["manifest.json", "metrics.jsonl"])
def test_a_damaged_record_of_a_run_is_no_traceback(world, again, reference, name, content):
    """Either the run is taken up again, with the same numbers, or one line says what to do."""
    for path in again.glob(f"runs/full-s0-*/{name}"):
        path.write_bytes(content)
    code, _, err = world.run("again")
    assert "Traceback" not in err
    if code == 0:
        assert_equal(again, reference)
    else:
        assert code == 2 and name in err.strip().splitlines()[-1]


# --- killed ---------------------------------------------------------------------------------------


def test_a_kill_and_a_second_writer_change_nothing(world, reference):
    """While one process writes another is refused; killed, it leaves no lock behind."""
    workdir = world.folder / "killed"
    first = world.start("killed")
    while first.poll() is None and not (workdir / "grid.json").exists():
        time.sleep(0.01)
    first.send_signal(signal.SIGSTOP)  # it holds the lock for as long as the second one needs
    before = files(workdir)
    code, out, err = world.run("killed")
    assert code == 3 and out == ""
    assert err.count("\n") == 1 and f"process {first.pid} on" in err and "Traceback" not in err
    assert files(workdir) == before
    first.send_signal(signal.SIGCONT)
    assert hit(first, workdir, "full", 2, signal.SIGKILL), "it ended before it could be killed"
    assert wait(first)[0] == -signal.SIGKILL
    code, _, err = world.run("killed")
    assert code == 0, err
    assert_equal(workdir, reference)


@pytest.mark.slow
def test_kills_at_many_moments(world, reference):
    """One workdir, killed again and again wherever it stands, is what it would have been."""
    workdir, hits = world.folder / "many", 0
    moments = [("full", 1, 0.0), ("full", 2, 0.05), ("full", 3, 0.3), ("no-norm", 1, 0.0),
               ("no-norm", 2, 0.1), ("no-norm", 4, 0.0)]  # fmt: skip
    for arm, lines, after in moments:
        process = world.start("many")
        while process.poll() is None:
            path = next(workdir.glob(f"runs/{arm}-s0-*/metrics.jsonl"), None)
            if path and path.read_bytes().count(b"\n") >= lines:
                time.sleep(after)
                process.kill()
                break
            time.sleep(0.002)
        hits += wait(process)[0] == -signal.SIGKILL
    assert hits >= 4
    # A torn line, as a kill inside a write leaves it.
    with open(next(workdir.glob("runs/no-norm-s1-*/metrics.jsonl")), "a") as file:
        file.write('{"step": 8, "tok')
    finished = {name: value for name, value in files(workdir / "runs").items() if "full" in name}
    code, _, err = world.run("many")
    assert code == 0, err
    assert {n: v for n, v in files(workdir / "runs").items() if "full" in n} == finished
    assert_equal(workdir, reference)
    # Repeated lines of a step, written before and after a kill, do not contradict one another.
    for run, lines in metrics_without_time(workdir).items():
        for step in {line["step"] for line in lines}:
            same = [line for line in lines if line["step"] == step]
            assert all(line == same[0] for line in same), (run, step)


def metrics_without_time(workdir):
    out = {}
    for path in workdir.glob("runs/*/metrics.jsonl"):
        lines = []
        for text in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                line = json.loads(text)
                lines.append({k: v for k, v in line.items() if not k.startswith("time/")})
        out[path.parent.name] = lines
    return out


# --- diverging ------------------------------------------------------------------------------------

RUNAWAY = ("--config.grid.learning_rates=0.001,1e30", "--config.train.patience=3")


@pytest.mark.slow
def test_a_diverging_run_is_recorded_and_disturbs_nobody(world):
    tame = ("--config.train.patience=3", "--config.train.learning_rate=0.001")
    code, _, err = world.run("tame", *tame)
    assert code == 0, err
    code, out, err = world.run("wild", *RUNAWAY)
    assert code == 0, err
    tame, wild = results(world.folder / "tame"), results(world.folder / "wild")
    good = {row[0] for row in tame[1:]}
    assert [row for row in wild if row[0] in good | {"run"}] == tame
    bad = {run: s for run, s in statuses(world.folder / "wild").items() if run not in good}
    assert len(bad) == len(VARIANTS) * len(SEEDS)
    for status in bad.values():
        assert status["state"] == "diverged" and 1 <= status["diverged_at"] <= 8
        assert "non-finite" in status["reason"]
    for run, lines in metrics(world.folder / "wild").items():
        if run in bad:
            assert lines[-1]["validation/loss"] is None and lines[-1]["update/skipped"] == 3
    assert "2 diverged" in out
    summary = list(csv.DictReader(io.StringIO((world.folder / "wild/summary.csv").read_text())))
    assert sorted(row["diverged"] for row in summary) == ["0", "0", "2", "2"]


@pytest.mark.slow
def test_where_all_diverge_what_is_recorded_does_not_depend_on_the_chunks(world):
    """Nothing is left to train after step 4; the next evaluation is recorded, and the last."""
    for name, chunk in (("all-1", 1), ("all-8", 8)):
        code, _, err = world.run(
            name, "--config.train.learning_rate=1e30", "--config.train.patience=3",
            f"--config.train.chunk_steps={chunk}", "--config.train.checkpoint_every=0",
            "--config.grid.arms=full",
        )  # fmt: skip
        assert code == 0, err
        assert {s["state"] for s in statuses(world.folder / name).values()} == {"diverged"}
        for lines in metrics(world.folder / name).values():
            assert [line["step"] for line in lines] == [0, 8]


# --- full disks -----------------------------------------------------------------------------------


LIMITED = """
import resource, runpy, sys
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
sys.argv = ["launch.py", *sys.argv[2:]]
runpy.run_path("launch.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [700, 20_000])
def test_a_full_disk_is_one_line_and_the_run_can_go_on(world, reference, size):
    """At 700 bytes the plan does not fit, at 20,000 a checkpoint does not."""
    name = f"disk-{size}"
    code, _, said = world.run(name, "--compilation_cache=off", head=("-c", LIMITED, str(size)))
    assert code not in (0, 75), said
    last = said.strip().splitlines()[-1]
    assert str(world.folder / name) in last and "go on with: " in last
    for lines in metrics(world.folder / name).values():
        assert lines  # whole lines only: metrics() has parsed them
    code, _, err = world.run(name)
    assert code == 0, err
    assert_equal(world.folder / name, reference)
    assert "Traceback" not in said, said  # reported: Orbax's threads print theirs at 20,000 bytes


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_workdir_that_cannot_be_written_is_one_line(world):
    folder = world.folder / "read-only"
    folder.mkdir(mode=0o555)
    code, out, err = world.run("read-only")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "cannot write" in err


def test_a_printed_command_quotes_what_a_shell_would_split(world, reference):
    """The command that goes on is one that a shell reads back as it was given."""
    plan = json.loads((reference / "grid.json").read_text())
    words = shlex.split(plan["command"])
    assert words[:2] == [PYTHON, "launch.py"] and words[-1] == f"--workdir={reference}"
    assert f"--config.train.steps={STEPS}" in words
    assert f"--config.data.corpus={world.folder / 'text.txt'}" in words
