"""Run folders survive kills; a workdir has one writer; a signal is a request."""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import report_workdirs
import run_folders

from normjax.diagnostics import autopsy_record
from normjax.errors import UserError
from normjax.reporting import report
from normjax.runs import checking, files, machine, provenance, segments
from normjax.runs.experiment import LockedError, locked, stop_on_signals
from normjax.runs.run_folder import (
    FINISHED,
    METRICS,
    RunFolder,
    RunWriter,
    run_folder,
    text_of,
)

ROOT = Path(__file__).parents[1]


def strict(text):
    """Parse as strict JSON: no NaN, no Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def line(step, loss=1.5):
    return {"step": step, "validation/loss": loss}


def metrics(folder):
    return RunFolder(folder).metrics()


# --- records --------------------------------------------------------------------------------------


def test_metrics_come_back_as_they_were_written(tmp_path):
    lines = [line(0, 4.25), line(10, 0.1 + 0.2), line(20, None)]
    run_folders.write(tmp_path, lines)
    assert metrics(tmp_path) == lines  # floats to the last bit


def test_what_the_manifest_does_not_name_is_not_there(tmp_path):
    assert metrics(tmp_path) == [] and RunFolder(tmp_path).state == "missing"
    (tmp_path / "metrics.jsonl").write_bytes(text_of(line(0)))
    assert metrics(tmp_path) == []
    run = run_folders.write(tmp_path)
    run.append(METRICS, line(5))
    assert metrics(tmp_path) == []  # appended, not committed
    run.commit()
    assert metrics(tmp_path) == [line(5)]


def test_of_a_repeated_step_the_last_line_counts(tmp_path):
    steps = ((0, 4.0), (10, 3.0), (20, 2.5), (10, 3.25), (20, 2.25))
    run_folders.write(tmp_path, [line(step, loss) for step, loss in steps])
    assert metrics(tmp_path) == [line(0, 4.0), line(10, 3.25), line(20, 2.25)]


@pytest.mark.parametrize("keep", range(0, 80, 9))
def test_a_kill_in_the_middle_of_a_line_costs_that_line_only(tmp_path, keep):
    run_folders.write(tmp_path, [line(0)])
    with open(tmp_path / METRICS, "ab") as file:
        file.write(text_of(line(10, 1 / 3))[:keep])
    assert metrics(tmp_path) == [line(0)]
    run_folders.write(tmp_path, [line(10, 0.5), line(20, 0.25)])
    assert metrics(tmp_path) == [line(0), line(10, 0.5), line(20, 0.25)]
    text = (tmp_path / METRICS).read_text()
    assert [strict(each)["step"] for each in text.splitlines()] == [0, 10, 20]
    assert RunFolder(tmp_path).problems() == []


def test_every_flipped_bit_of_a_record_is_noticed_and_costs_its_line_only(tmp_path):
    lines = [line(step, 1 / (step + 3)) for step in range(0, 60, 10)]
    run_folders.write(tmp_path, lines)
    whole = (tmp_path / METRICS).read_bytes()
    for bit in range(0, 8 * len(whole), 13):
        torn = bytearray(whole)
        torn[bit // 8] ^= 1 << bit % 8
        (tmp_path / METRICS).write_bytes(torn)
        run = RunFolder(tmp_path)
        left = run.metrics()
        assert len(run.problems()) == 1 and all(each in lines for each in left)
        assert len(left) >= len(lines) - 2  # a lost line end joins two lines
    run = run_folders.write(tmp_path)  # the writer keeps what is good, and what was there
    run.begin(run.record, "0" * 64, run.environment, 0, True)
    assert run.problems() == [] and run.metrics() == left
    assert [p.read_bytes() for p in (tmp_path / "quarantine").iterdir()] == [bytes(torn)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, float(np.float32("nan"))])
def test_what_is_not_finite_is_null(tmp_path, value):
    run_folders.write(tmp_path, [{"step": 0, "a": value, "b": [value, 1.0], "c": {"d": value}}])
    files.write_sealed(tmp_path / "x.json", {"a": (value, 2), "b": {"c": value}})
    found = strict((tmp_path / METRICS).read_text())
    assert found.pop("check") and found == {"step": 0, "a": None, "b": [None, 1.0],
                                            "c": {"d": None}}  # fmt: skip
    kept = strict((tmp_path / "x.json").read_text())
    assert kept.pop("seal") and kept == {"a": [None, 2], "b": {"c": None}}


# --- the manifest ---------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    """The one before is in force then; with both damaged nothing of the run is believed."""
    run_folders.write(tmp_path, [line(0)], step=0)
    run_folders.write(tmp_path, [line(10)], step=10, state="done")
    whole = (tmp_path / "manifest.json").read_bytes()
    plain = json.loads(whole)
    for bit in range(0, 8 * len(whole), 37):
        torn = bytearray(whole)
        torn[bit // 8] ^= 1 << bit % 8
        (tmp_path / "manifest.json").write_bytes(torn)
        run = RunFolder(tmp_path)
        try:
            same = json.loads(torn) == plain  # a bit in white space
        except ValueError:
            same = False
        if same:
            assert (run.problem, run.value("step")) == ("", 10)
        else:
            assert run.problem and (run.value("step"), run.state) == (0, "running"), bit
    (tmp_path / "manifest.before.json").write_text("{")
    run = RunFolder(tmp_path)
    assert run.state == "damaged" and run.metrics() == [] and run.manifest is None


def test_manifests_are_chained_and_the_writer_reads_back(tmp_path):
    run = run_folders.write(tmp_path, [line(0)])
    first = json.loads((tmp_path / "manifest.json").read_text())
    run.commit(step=3)
    second = json.loads((tmp_path / "manifest.json").read_text())
    assert second["previous"] == first["seal"] and second["number"] == first["number"] + 1
    plain = {k: v for k, v in second.items() if k != "seal"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    assert second["seal"] == hashlib.sha256(text).hexdigest()


def test_a_folder_of_another_run_is_not_this_run(tmp_path):
    run_folders.write(tmp_path / "full-s0", [line(0)])
    (tmp_path / "full-s0").rename(tmp_path / "full-s1")
    run = RunFolder(tmp_path / "full-s1", "full-s1")
    assert run.state == "damaged" and "of the run 'full-s0', not of 'full-s1'" in run.problem
    assert RunFolder(tmp_path / "full-s1").state == "running"  # a copy may have any name


@pytest.mark.parametrize(
    "change",
    [
        {"state": "finished"}, {"step": "7"}, {"checkpoints": {"../x": {}}},
        {"checkpoints": {"7": {"a": 1}}}, {"records": {"../../x": {}}}, {"segments": [3]},
        {"records": {"metrics.jsonl": {"bytes": -1.5, "lines": 0, "sha256": ""}}},
        {"format": 2}, {"time": []}, {"run": None},
    ],
)  # fmt: skip
def test_a_sealed_manifest_of_another_kind_is_refused_in_one_line(tmp_path, change):
    """Whoever can write a folder can seal it: what it holds is checked all the same."""
    run_folders.write(tmp_path, [line(0)])
    found = json.loads((tmp_path / "manifest.json").read_text())
    for name in ("manifest.json", "manifest.before.json"):
        files.write_sealed(tmp_path / name, found | change)
    run = RunFolder(tmp_path)
    assert run.state == "damaged" and "\n" not in run.problem


def test_a_manifest_of_another_version_names_both(tmp_path):
    run_folders.write(tmp_path, [line(0)])
    found = json.loads((tmp_path / "manifest.json").read_text())
    for name in ("manifest.json", "manifest.before.json"):
        files.write_sealed(tmp_path / name, found | {"format": 2})
    assert "written in format 2, this version reads format 4" in RunFolder(tmp_path).problem


def test_a_run_that_goes_on_elsewhere_has_segments(tmp_path):
    record = {"train": {"steps": 20, "chunk_steps": 4}}
    old = {"versions": {"jax": "0.10.1"}, "hostname": "a", "code": "x"}
    run = RunWriter(tmp_path)
    run.begin(record, "0" * 64, old, 0, False)
    for new, warns in ((old | {"hostname": "b"}, False), (old | {"code": "y"}, True)):
        found = segments.differences(run.segments[-1], {"config": record, "environment": new})
        assert bool(found[segments.WARN]) is warns and not found[segments.REFUSE]
        run.begin(record, "0" * 64, new, 10, not warns)
    assert [part["from"] for part in run.segments] == [0, 10]
    assert run.segments[0]["environment"] == old  # nothing is overwritten
    assert segments.said(run.segments) == 'from step 10 with environment.code: "x" -> "y"'


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("config.model.width", segments.REFUSE), ("config.train.beta1", segments.REFUSE),
        ("config.train.lanes", segments.WARN), ("config.train.keep_checkpoints", segments.FREE),
        ("environment.settings.jax_default_matmul_precision", segments.WARN),
        ("environment.started", segments.FREE), ("config.data.cache_dir", segments.FREE),
        ("config.data.window", segments.REFUSE),
    ],
)  # fmt: skip
def test_one_table_says_what_another_value_means(field, kind):
    *path, last = field.split(".")
    before, now = ({"config": {}, "environment": {}} for _ in range(2))
    for value, whole in ((1, before), (2, now)):
        for name in path:
            whole = whole.setdefault(name, {})
        whole[last] = value
    found = segments.differences(before, now)
    assert found == {k: [f"{field}: 1 -> 2"] * (k == kind) for k in found}


# --- files below a workdir ------------------------------------------------------------------------


def test_json_comes_back_and_folders_are_made(tmp_path):
    value = {"text": "naïve ☃", "list": [1, 2.5, None, True], "nested": {"a": {}}}
    files.write_sealed(tmp_path / "a/b/c.json", value)
    assert files.read_object(tmp_path / "a/b/c.json") == value
    assert files.read_object(tmp_path / "a/b/none.json") is None


def test_what_is_not_as_sealed_is_not_read(tmp_path):
    path, other = tmp_path / "x.json", tmp_path / "x.bin"
    other.write_bytes(b"abc")
    seal = files.write_sealed(path, {"a": 1}, beside=("x.bin",))
    assert files.read_object(path) == {"a": 1} and files.read_sealed(path)["seal"] == seal
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"a": 1', b'"a": 2'))
    with pytest.raises(ValueError, match="it is not what was sealed"):
        files.read_sealed(path)
    assert files.read_object(path) is None
    path.write_bytes(whole)
    other.write_bytes(b"abd")
    with pytest.raises(ValueError, match="x.bin is not what was sealed"):
        files.read_sealed(path)
    other.unlink()
    with pytest.raises(ValueError, match="x.bin: cannot be read"):
        files.read_sealed(path)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_does_not_end_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "x.json"
    files.write_sealed(path, {"state": "running"})

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(OSError, match="No space"):
            files.write_sealed(path, {"state": "done"})
    assert files.read_object(path) == {"state": "running"}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]  # nothing is left lying about


def test_a_value_that_is_no_json_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    files.write_sealed(path, {"state": "running"})
    with pytest.raises(TypeError):
        files.write_sealed(path, {"state": object()})
    assert files.read_object(path) == {"state": "running"}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_readers_see_the_old_or_the_new_file_never_half(tmp_path):
    path, stop, seen = tmp_path / "x.json", threading.Event(), set()
    files.write_sealed(path, {"values": [0] * 5000})

    def read():
        while not stop.is_set():
            seen.add(tuple(files.read_sealed(path)["values"]))

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(1, 40):
        files.write_sealed(path, {"values": [i] * 5000})
    stop.set()
    reader.join()
    assert all(len(set(value)) == 1 and len(value) == 5000 for value in seen)


@pytest.mark.parametrize(
    "name", ["../../x", "/etc/passwd", ".hidden", "a/b", "", "a\0b", 7, "a..b"]
)
def test_a_name_from_a_file_that_leaves_the_folder_is_refused(tmp_path, name):
    with pytest.raises(UserError, match="holds the name") as caught:
        run_folder(tmp_path, name)
    assert "\n" not in str(caught.value)


def test_links_and_what_is_no_file_are_never_opened(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.json").write_text("{}")
    work = tmp_path / "work"
    (work / "runs").mkdir(parents=True)
    files.refuse_links(work)
    (work / "runs" / "full").symlink_to(outside)
    for call in (lambda: files.refuse_links(work), lambda: run_folder(work, "full")):
        with pytest.raises(UserError, match="link"):
            call()
    (work / "x.json").symlink_to(outside / "x.json")
    with pytest.raises(UserError, match="is a link"):
        files.read_bytes(work / "x.json")
    files.write_bytes(work / "x.json", b"new")  # the link is replaced
    assert (outside / "x.json").read_text() == "{}" and not (work / "x.json").is_symlink()
    os.mkfifo(work / "pipe")
    for path, kind in ((work / "pipe", "a pipe"), (work / "runs", "a folder")):
        with pytest.raises(UserError, match=f"is {kind}, not a file"):
            files.read_bytes(path)
    with open(work / "sparse", "wb") as file:
        file.truncate(1 << 41)
    with pytest.raises(UserError, match="has 2199023255552 bytes; at most"):
        files.read_bytes(work / "sparse")


def test_nothing_else_opens_files_for_writing():
    """Below a workdir, writing is files.py's and that of what it is handed to by name."""
    allowed = {
        "normjax/runs/files.py", "normjax/runs/run_folder.py", "normjax/training/checkpoints.py",
        "normjax/runs/experiment.py",  # the lock and its probe
        "normjax/runs/preflight.py",  # its own folder, made and removed
        "normjax/runs/streams.py",  # the null device
    }  # fmt: skip
    methods = {"write_text", "write_bytes", "touch", "mkdir", "unlink", "rename", "replace",
               "symlink_to", "rmdir", "rmtree", "move", "copytree", "copyfile", "copy", "savez",
               "savez_compressed", "makedirs", "truncate"}  # fmt: skip
    owners = {"os", "shutil", "np", "path", "folder", "temporary", "probe"}
    found = {}
    for path in sorted([*ROOT.glob("normjax/**/*.py"), *ROOT.glob("experiments/**/*.py")]):
        name = path.relative_to(ROOT).as_posix()
        if name in allowed or name.startswith("normjax/data/"):  # the cache has rules of its own
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            if isinstance(function, ast.Name) and function.id == "open":
                found[name, node.lineno] = "open"
            if isinstance(function, ast.Attribute) and function.attr in methods:
                owner = function.value.id if isinstance(function.value, ast.Name) else ""
                if owner in owners or function.attr in ("write_text", "write_bytes", "mkdir"):
                    found[name, node.lineno] = f"{owner}.{function.attr}"
    left = {k: v for k, v in found.items() if v not in ("files.write_bytes", "tables.write_text")}
    assert set(left.values()) <= {"np.savez_compressed"}, left  # into memory, in survey.py


def test_the_state_of_a_run(tmp_path):
    folder = run_folder(tmp_path, "full-s0-abc")
    assert folder == tmp_path / "runs" / "full-s0-abc"
    assert RunFolder(folder).state == "missing"
    for state in ("running", "interrupted", "done", "diverged"):
        run_folders.write(folder, state=state)
        assert RunFolder(folder).state == state
    assert set(FINISHED) == {"done", "diverged"}


def test_reading_writes_nothing(tmp_path):
    run_folders.write(tmp_path, [line(0)])
    (tmp_path / METRICS).write_bytes(b"torn")
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("*")}
    run = RunFolder(tmp_path)
    assert run.problems() and run.metrics() == [] and run.damaged_checkpoints() == {}
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.rglob("*")}


# --- one writer -----------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from normjax.runs.experiment import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_writer_is_refused_and_told_who_is_there(tmp_path, holder):
    for _ in range(2):  # and being refused does not spoil the owner's name
        with pytest.raises(LockedError) as caught, locked(tmp_path):
            pass
        message = str(caught.value)
        assert f"process {holder.pid} " in message and str(tmp_path) in message
        assert os.uname().nodename in message and "\n" not in message


def test_the_lock_of_a_killed_owner_is_free(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()


def test_a_lock_is_given_back_even_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locked(tmp_path / "new"):
            1 / 0  # noqa: B018


def test_two_workdirs_are_two_locks(tmp_path):
    with locked(tmp_path / "a"), locked(tmp_path / "b"):
        pass


def test_the_same_process_cannot_lock_twice(tmp_path):
    with locked(tmp_path), pytest.raises(LockedError), locked(tmp_path):
        pass


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_request(number):
    before = signal.getsignal(number)
    with stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), number)
        assert stop and stop.signal == signal.Signals(number).name
    assert signal.getsignal(number) is before


def test_terminating_twice_is_still_a_request_but_a_second_interrupt_is_not():
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), stop_on_signals():
        1 / 0  # noqa: B018
    assert signal.getsignal(signal.SIGTERM) is before


# --- provenance -----------------------------------------------------------------------------------


def test_the_environment_is_json_and_complete():
    environment = provenance.environment(["--a=1"])
    assert strict(json.dumps(environment)) == environment
    assert set(environment["versions"]) == {
        "python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "normjax",
    }  # fmt: skip
    assert environment["devices"] == [f"cpu:{i}" for i in range(4)]
    assert environment["flags"] == ["--a=1"] and environment["cores"] >= 1
    assert environment["code"] == provenance.code() and len(environment["code"]) == 64
    assert environment["settings"]["jax_default_prng_impl"] == "threefry2x32"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"isa": "sse4_2"}, "isa"), ({"xla_flags": "--x"}, "xla_flags"),
        ({"threads": 64}, "threads"), ({"platform": "gpu"}, "platform"),
        ({"devices": ["cpu:0"]}, "devices"),
        ({"versions": {"jax": "0.0.1"}}, 'jax: "0.0.1" -> '), ({"code": "0"}, "code"),
        ({"settings": {"jax_default_prng_impl": "rbg"}}, "prng_impl"),
    ],
)  # fmt: skip
def test_a_changed_environment_is_noticed(change, words):
    now = {"config": {}, "environment": provenance.environment([])}
    before = {"config": {}, "environment": {**now["environment"], **change}}
    assert any(words in text for text in segments.differences(before, now)[segments.WARN])
    moved = {**now["environment"], "started": "2001", "hostname": "elsewhere", "flags": ["--b"]}
    same = {"config": {}, "environment": moved}
    assert segments.differences(same, now)[segments.WARN] == []


def test_threads_are_those_that_the_compiler_divides_for(monkeypatch):
    """It asks NPROC before it counts cores; never fewer than there are devices."""
    monkeypatch.setattr(machine, "usable_cores", lambda: 7)
    for told, expected in (("", 7), ("5", 5), ("0", 7), ("many", 7)):
        monkeypatch.setenv("NPROC", told)
        assert machine.threads() == expected
    monkeypatch.setenv("NPROC", "2")
    assert provenance.environment([])["threads"] == 4


SETTINGS = """
import jax, numpy as np, sys
from normjax.decoder import Decoder, DecoderConfig
from normjax.training import train
from normjax.training.train import Hyper, TrainConfig
model = Decoder(DecoderConfig(depth=1, width=8, heads=2), 5, 4)
hyper = Hyper(np.uint32(3), np.float32(1), np.float32(0), np.float32(1))
state = train.init_state(model, TrainConfig(), hyper)
print(*(float(x).hex() for leaf in jax.tree.leaves(state.params) for x in np.ravel(leaf)))
"""


def test_no_setting_of_jax_changes_initial_values():
    settings = {"JAX_DEFAULT_PRNG_IMPL": "rbg", "JAX_THREEFRY_PARTITIONABLE": "0",
                "JAX_RANDOM_SEED_OFFSET": "7", "JAX_ENABLE_X64": "1",
                "JAX_DEFAULT_MATMUL_PRECISION": "float32"}  # fmt: skip
    out = []
    for extra in ({}, settings):
        environment = {k: v for k, v in os.environ.items() if k not in settings} | extra
        done = subprocess.run([sys.executable, "-c", SETTINGS], cwd=ROOT, env=environment,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        out.append(done.stdout)
    assert out[0] == out[1]


# --- all of a workdir -----------------------------------------------------------------------------


def test_whatever_is_changed_in_a_workdir_is_found(tmp_path):
    report_workdirs.ablation(tmp_path)
    report.write(tmp_path)
    run = next((tmp_path / "runs").iterdir())
    autopsy_record.write(run, autopsy_record.examine([], 9, 5, ()), [(6, {"loss/value": [1.0]})])
    (tmp_path / "notes.txt").write_text("mine")
    lines, bad = checking.check(tmp_path)
    assert bad == 0 and all("as sealed" in line for line in lines)
    inside = [p for p in tmp_path.rglob("*.json*") if p.name != "manifest.before.json"]
    names = {"grid.json", "manifest.json", "verdict.json", "autopsy.json", "autopsy.jsonl",
             "metrics.jsonl"}  # fmt: skip
    assert {p.name for p in inside} >= names
    for path in inside:
        whole = path.read_bytes()
        if not whole:
            continue
        at = whole.index(b":") + 2
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        lines, bad = checking.check(tmp_path)
        assert bad == 1, path
        path.write_bytes(whole)
    assert checking.check(tmp_path)[1] == 0
