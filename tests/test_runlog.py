"""Run folders survive kills; a workdir has one writer; a signal is a request."""

from __future__ import annotations

import errno
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

from normjax.runs import provenance, runlog
from normjax.runs.experiment import LockedError, locked, stop_on_signals

ROOT = Path(__file__).parents[1]


def strict(text):
    """Parse as strict JSON: no NaN, no Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def line(step, loss=1.5):
    return {"step": step, "validation/loss": loss}


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_come_back_as_they_were_written(tmp_path):
    lines = [line(0, 4.25), line(10, 0.1 + 0.2), line(20, None)]
    for one in lines:
        runlog.append_metrics(tmp_path, one)
    assert runlog.read_metrics(tmp_path) == lines  # floats to the last bit


def test_no_metrics_are_an_empty_list(tmp_path):
    assert runlog.read_metrics(tmp_path) == []
    (tmp_path / "metrics.jsonl").touch()
    assert runlog.read_metrics(tmp_path) == []
    runlog.append_metrics(tmp_path, line(0))
    assert runlog.read_metrics(tmp_path) == [line(0)]


def test_of_a_repeated_step_the_last_line_counts(tmp_path):
    for step, loss in ((0, 4.0), (10, 3.0), (20, 2.5), (10, 3.25), (20, 2.25)):
        runlog.append_metrics(tmp_path, line(step, loss))
    assert runlog.read_metrics(tmp_path) == [line(0, 4.0), line(10, 3.25), line(20, 2.25)]


@pytest.mark.parametrize("keep", range(1, 40, 3))
def test_a_kill_in_the_middle_of_a_line_costs_that_line_only(tmp_path, keep):
    path = tmp_path / "metrics.jsonl"
    runlog.append_metrics(tmp_path, line(0))
    runlog.append_metrics(tmp_path, line(10, 1 / 3))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    torn = whole[: min(first + keep, len(whole) - 1)]
    path.write_bytes(torn)
    # A line that lacks nothing but its end may count or not, with its own numbers.
    assert runlog.read_metrics(tmp_path) in ([line(0)], [line(0), line(10, 1 / 3)])
    runlog.append_metrics(tmp_path, line(10, 0.5))
    runlog.append_metrics(tmp_path, line(20, 0.25))
    assert runlog.read_metrics(tmp_path) == [line(0), line(10, 0.5), line(20, 0.25)]
    assert [strict(text)["step"] for text in path.read_text().splitlines()] == [0, 10, 20]


def test_a_file_that_is_one_torn_line_is_begun_anew(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0, "valid')
    runlog.append_metrics(tmp_path, line(0))
    assert (tmp_path / "metrics.jsonl").read_text() == json.dumps(line(0)) + "\n"


def test_a_torn_character_does_not_stop_the_reader(tmp_path):
    runlog.append_metrics(tmp_path, line(0))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 5, "x": "\xe2\x82')
    assert runlog.read_metrics(tmp_path) == [line(0)]


@pytest.mark.parametrize(
    "junk", ["[1, 2]", "3", '"text"', "{}", '{"step": null}', "\0\0\0", "null"]
)
def test_lines_of_another_kind_are_ignored(tmp_path, junk):
    runlog.append_metrics(tmp_path, line(0))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(junk + "\n")
    runlog.append_metrics(tmp_path, line(1))
    assert runlog.read_metrics(tmp_path) == [line(0), line(1)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, float(np.float32("nan"))])
def test_what_is_not_finite_is_null(tmp_path, value):
    runlog.append_metrics(tmp_path, {"step": 0, "a": value, "b": [value, 1.0], "c": {"d": value}})
    runlog.write_json(tmp_path / "x.json", {"a": (value, 2), "b": {"c": value}})
    assert strict((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 0, "a": None, "b": [None, 1.0], "c": {"d": None},
    }  # fmt: skip
    assert strict((tmp_path / "x.json").read_text()) == {"a": [None, 2], "b": {"c": None}}


# --- whole files ----------------------------------------------------------------------------------


def test_json_comes_back_and_folders_are_made(tmp_path):
    value = {"text": "naïve ☃", "list": [1, 2.5, None, True], "nested": {"a": {}}}
    runlog.write_json(tmp_path / "a/b/c.json", value)
    assert runlog.read_json(tmp_path / "a/b/c.json") == value
    assert runlog.read_json(tmp_path / "a/b/none.json") is None


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_does_not_end_leaves_the_old_file(tmp_path, monkeypatch, step):
    path = tmp_path / "status.json"
    runlog.write_json(path, {"state": "running"})

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(OSError, match="No space"):
            runlog.write_json(path, {"state": "done"})
    assert runlog.read_json(path) == {"state": "running"}
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]  # nothing is left lying about


def test_a_value_that_is_no_json_leaves_the_old_file(tmp_path):
    path = tmp_path / "status.json"
    runlog.write_json(path, {"state": "running"})
    with pytest.raises(TypeError):
        runlog.write_json(path, {"state": object()})
    assert runlog.read_json(path) == {"state": "running"}
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_readers_see_the_old_or_the_new_file_never_half(tmp_path):
    path, stop, seen = tmp_path / "x.json", threading.Event(), set()
    runlog.write_json(path, [0] * 5000)

    def read():
        while not stop.is_set():
            seen.add(tuple(runlog.read_json(path)))

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(1, 40):
        runlog.write_json(path, [i] * 5000)
    stop.set()
    reader.join()
    assert all(len(set(value)) == 1 and len(value) == 5000 for value in seen)


def test_the_state_of_a_run(tmp_path):
    folder = runlog.run_folder(tmp_path, "full-s0-abc")
    assert folder == tmp_path / "runs" / "full-s0-abc"
    assert runlog.run_state(folder) == "missing"
    for state in ("running", "interrupted", "done", "diverged"):
        runlog.write_json(folder / "status.json", {"state": state})
        assert runlog.run_state(folder) == state
    assert set(runlog.FINISHED) == {"done", "diverged"}


def test_reading_needs_no_jax():
    script = (
        "import sys; from normjax.runs import runlog; heavy = {'jax', 'flax', 'optax', 'orbax'};"
        "print({module.split('.')[0] for module in sys.modules} & heavy)"
    )
    out = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert out.stdout.strip() == "set()", out.stderr


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
    assert provenance.differences(environment, environment) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"isa": "sse4_2"}, "isa"), ({"xla_flags": "--x"}, "xla_flags"),
        ({"platform": "gpu"}, "platform"), ({"devices": ["cpu:0"]}, "devices"),
        ({"versions": {"jax": "0.0.1"}}, "jax 0.0.1 -> "),
    ],
)  # fmt: skip
def test_a_changed_environment_is_noticed(change, words):
    now = provenance.environment([])
    changed = provenance.differences({**now, **change}, now)
    assert any(words in text for text in changed)


def test_what_does_not_move_numbers_is_no_difference():
    now = provenance.environment([])
    before = {**now, "started": "2001-01-01", "hostname": "elsewhere", "flags": ["--b"]}
    assert provenance.differences(before, now) == []
