"""The edge of the program: signals, lost displays, absurd requests, its own mistakes; from outside.

Whatever happens, the program ends in one line and a code of the table in `edge.py`, and a training
that was under way is saved.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import pytest
from rich.console import Console

from experiments import cli
from normjax import configs
from normjax.configs import field
from normjax.errors import UserError
from normjax.reporting import drawing
from normjax.runs import edge, estimates, machine, preflight, signals, streams
from normjax.runs.experiment import Interrupted, LockedError
from normjax.runs.progress import Progress

ROOT = Path(__file__).parents[1]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
GUARD_S = 300  # a hang, on any machine


class World:
    """A folder with a text and a cache, and processes of the program in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "text.txt").write_text("the quick brown fox jumps over a lazy dog\n" * 60)

    def command(self, workdir, *more):
        return [
            sys.executable, str(ROOT / "launch.py"), "--preset=smoke", "--cpu_devices=1",
            "--config.grid.arms=full", "--config.grid.seeds=1",
            f"--config.data.corpus={self.folder / 'text.txt'}", *more,
            f"--workdir={self.folder / workdir}",
        ]  # fmt: skip

    def start(self, workdir, *more, environment=None, **options):
        settings = {
            **os.environ, "JAX_PLATFORMS": "cpu", "NORMJAX_CACHE": str(self.folder / "cache"),
            **(environment or {}),
        }  # fmt: skip
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            self.command(workdir, *more), cwd=self.folder, env=settings, text=True,
            errors="replace", **pipes | options,
        )  # fmt: skip

    def run(self, workdir, *more, **options):
        return end(self.start(workdir, *more, **options))


def end(process):
    out, err = process.communicate(timeout=GUARD_S)
    return process.returncode, out, err


def results(workdir):
    return [line.split(",")[:9] for line in (workdir / "results.csv").read_text().splitlines()]


def states(workdir):
    return [json.loads(p.read_text())["state"] for p in workdir.glob("runs/*/manifest.json")]


def python(source, **options):
    """Run a few lines in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=GUARD_S,
        **options,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def reference(world):
    """The workdir of a run that nothing disturbs."""
    code, _, err = world.run("reference")
    assert code == 0, err
    return world.folder / "reference"


# --- a display that is lost -----------------------------------------------------------------------


def test_a_night_goes_on_where_nobody_reads_and_nothing_around_it_is_as_it_should_be(
    world, reference
):
    """A closed pipe, an encoding without letters, a notebook's backend, checks of other code."""
    read, write = os.pipe()
    os.close(read)
    process = world.start(
        "unread", stdout=write, stderr=write,
        environment={
            "PYTHONIOENCODING": "ascii", "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "JAX_NUMPY_RANK_PROMOTION": "raise", "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        },
    )  # fmt: skip
    os.close(write)
    assert process.wait(timeout=GUARD_S) == 0
    assert results(world.folder / "unread") == results(reference)
    assert (world.folder / "unread" / "report.html").exists()


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("lost", ["stdout", "stderr"])
def test_a_full_disk_behind_the_display_stops_nothing(world, reference, lost):
    with open("/dev/full", "w") as full:
        code, _, err = world.run(f"full-{lost}", **{lost: full})
    assert code == 0
    assert results(world.folder / f"full-{lost}") == results(reference)
    assert lost == "stderr" or err.strip().endswith("report.html")  # said where it can be


@LINUX
@pytest.mark.slow
def test_closed_streams_are_nothing_to_stumble_over(world, reference):
    command = ["bash", "-c", '"$@" <&- >&- 2>&-', "-", *world.command("closed")]
    environment = {**os.environ, "NORMJAX_CACHE": str(world.folder / "cache")}
    done = subprocess.run(command, cwd=world.folder, env=environment, timeout=GUARD_S)
    assert done.returncode == 0
    assert results(world.folder / "closed") == results(reference)


STREAMS = "from normjax.runs import streams; streams.install()\n"


@pytest.mark.parametrize(
    "encoding", [{}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "utf-16"}]
)
def test_any_letter_can_be_printed(encoding):
    code, out, err = python(STREAMS + "print('\\u03b5', '\\udcff', 'done')",
                            env={**os.environ, **encoding}, errors="replace")  # fmt: skip
    assert (code, err) == (0, "") and "d" in out


@LINUX
def test_a_result_that_is_lost_is_told_but_a_reader_who_left_is_not():
    show = STREAMS + "print('x' * 10**6); import sys; print(streams.lost(), file=sys.stderr)"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", show], cwd=ROOT, stdout=full,
                              stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert done.returncode == 0 and os.strerror(errno.ENOSPC) in done.stderr
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", show], cwd=ROOT, stdout=write,
                          stderr=subprocess.PIPE, text=True)  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr.strip()) == (0, "None")


def test_a_reader_who_stops_reading_does_not_stop_the_display():
    """The pipe behind standard error is full from the start, and stays so."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    os.set_blocking(write, True)
    show = "import sys; from normjax.runs import streams; streams.PATIENCE_MS = 100\n"
    show += "streams.install()\nfor _ in range(99): print('x' * 9999, file=sys.stderr)\n"
    show += "print('done')"
    done = subprocess.run([sys.executable, "-c", show], cwd=ROOT, stdout=subprocess.PIPE,
                          stderr=write, text=True, timeout=GUARD_S)  # fmt: skip
    os.close(read)
    os.close(write)
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_a_folder_that_is_gone_is_no_traceback(tmp_path):
    command = f"cd {tmp_path} && rmdir {tmp_path} && exec {sys.executable} {ROOT / 'launch.py'} "
    done = subprocess.run(["sh", "-c", command + "--workdir=x"], capture_output=True, text=True)
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    assert done.returncode == edge.MISTAKE


@pytest.mark.parametrize("error", [OSError(5, "gone"), BrokenPipeError(), ValueError("closed")])
@pytest.mark.parametrize("live", [True, False])
def test_a_table_that_fails_goes_blind(error, live):
    class Broken:
        encoding = "utf-8"

        def write(self, text):
            raise error

        def flush(self):
            raise error

    console = Console(file=Broken(), force_terminal=live)
    with Progress(["full"], live=live, console=console) as progress:
        progress.state("full", "1/1", "compiling")
        progress.training("full", 1, 2, [1.0], [1.0], 1.0, "?", True)
        progress.say("a line")
    assert progress.blind


def test_a_table_that_works_sees(capsys):
    with Progress(["full"], live=False) as progress:
        progress.say("a line")
    assert not progress.blind and capsys.readouterr().err == "a line\n"


# --- signals --------------------------------------------------------------------------------------

WAITING = """
import sys, time
from normjax.runs import signals
signals.install()
with signals.stop_on_signals() as stop:
    print("ready", flush=True)
    while not stop:
        time.sleep(0.01)
print(stop.signal, flush=True)
time.sleep(float(sys.argv[1]))
"""
STOPPING = [name for name, m in signals.SIGNALS.items() if m.code and hasattr(signal, name)]


def waiting(source=WAITING, sleep=0.0, head=()):
    process = subprocess.Popen(
        [*head, sys.executable, "-c", source, str(sleep)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", STOPPING)
def test_every_signal_of_the_table_is_a_request_while_training(name):
    process = waiting()
    process.send_signal(getattr(signal, name))
    assert end(process) == (0, f"{name}\n", "")


@pytest.mark.parametrize("name", STOPPING)
def test_every_signal_of_the_table_ends_in_one_line_elsewhere(name):
    process = waiting(sleep=GUARD_S)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    process.send_signal(getattr(signal, name))
    code, _, err = end(process)
    assert code == signals.INTERRUPTED and err.count("\n") == 1
    assert f"interrupted by {name}, not saved; go on with: " in err


def test_every_signal_that_ends_a_process_has_a_meaning():
    """But for those that cannot be caught and those that tell of an error in the program."""
    harmless = "SIGCHLD SIGCLD SIGCONT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGWINCH SIGINFO"
    errors = "SIGABRT SIGIOT SIGBUS SIGEMT SIGFPE SIGILL SIGSEGV SIGSYS SIGTRAP SIGSTKFLT SIGKILL"
    others = "SIGIO SIGPOLL SIGRTMIN SIGRTMAX"  # sent to those who asked for them
    known = {*harmless.split(), *errors.split(), *others.split(), *signals.SIGNALS}
    assert {each.name for each in signal.Signals} <= known


def test_a_second_interrupt_ends_at_once_and_a_second_of_another_kind_does_not():
    endless = WAITING.replace("while not stop", "while True")
    process = waiting(endless)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, _, err = end(process)
    assert code == signals.INTERRUPTED and err.count("\n") == 1


def test_what_is_ignored_on_purpose_stays_ignored():
    """As under nohup; but shells ignore an interrupt for what they start in the background."""
    process = waiting(head=("sh", "-c", "trap '' HUP INT; exec \"$@\"", "-"))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert end(process) == (0, "SIGINT\n", "")


def test_a_file_beyond_its_limit_is_an_error_of_the_write(tmp_path):
    source = f"""
import resource
from normjax.runs import signals
signals.install()
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    with open({str(tmp_path / "file")!r}, "wb") as file:
        file.write(bytes(100))
except OSError as error:
    print(error.errno)
"""
    assert python(source)[:2] == (0, f"{errno.EFBIG}\n")


def catches(process, number):
    """Whether a process has a handler for a signal by now."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (number - 1) & 1


@LINUX
@pytest.mark.parametrize(
    ("name", "after"), [("SIGTERM", 0.0), ("SIGINT", 0.05), ("SIGUSR1", 0.3), ("SIGINT", 0.9)]
)
def test_a_signal_before_anything_is_done_is_one_line(world, name, after):
    """While Python starts up, while modules are imported, while the command is understood."""
    process = world.start("early")
    # SIGTERM is only caught once the program's own first statement has run.
    while process.poll() is None and not catches(process, signal.SIGTERM):
        time.sleep(0.001)
    time.sleep(after)
    process.send_signal(getattr(signal, name))
    code, out, err = end(process)
    assert (code, out) == (signals.INTERRUPTED, "")
    assert err.count("\n") == 1 and f"interrupted by {name}, not saved; go on with: " in err
    assert not states(world.folder / "early")


def test_a_signal_while_compiling_is_one_line_and_one_while_training_saves(world, reference):
    """The same workdir: ended before there is anything to save; then stopped; then finished."""
    long = ("--config.train.steps=20000", "--config.train.evaluate_every=5")
    workdir = world.folder / "stopped"
    process = world.start("stopped", *long)
    while process.poll() is None and not list(workdir.glob("runs/*/manifest.json")):
        time.sleep(0.005)
    process.send_signal(signal.SIGUSR2)
    code, _, err = end(process)
    assert code == signals.INTERRUPTED and "Traceback" not in err
    assert "interrupted by SIGUSR2" in err.splitlines()[-1]
    assert states(workdir) == ["running"] and not list(workdir.glob("runs/*/checkpoints/*"))

    process = world.start("stopped", *long)
    while process.poll() is None and not (
        (lines := list(workdir.glob("runs/*/metrics.jsonl")))
        and lines[0].read_bytes().count(b"\n") > 2
    ):
        time.sleep(0.005)
    process.send_signal(signal.SIGUSR1)
    code, _, err = end(process)
    assert code == signals.STOPPED and states(workdir) == ["interrupted"]
    assert "stopped by SIGUSR1; go on with: " in err.splitlines()[-1]
    assert list(workdir.glob("runs/*/checkpoints/[0-9]*"))

    # Before it trains again there is nothing new to save, and all of the old is.
    process = world.start("stopped", *long)
    while process.poll() is None and "compiling" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGHUP)
    code, _, err = end(process)
    assert code == signals.STOPPED and "SIGHUP" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPPING)
def test_every_signal_saves_a_training(world, reference, name):
    workdir = world.folder / name
    process = world.start(name, "--config.train.steps=20000", "--config.train.evaluate_every=5")
    while process.poll() is None and not list(workdir.glob("runs/*/metrics.jsonl")):
        time.sleep(0.005)
    process.send_signal(getattr(signal, name))
    code, _, err = end(process)
    assert code == signals.STOPPED and states(workdir) == ["interrupted"], err


# --- what JAX is told from outside ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "word"),
    [({"JAX_ENABLE_X64": "maybe"}, "JAX_ENABLE_X64=maybe"),
     ({"JAX_PLATFORMS": "cuda,nonsense"}, "JAX_PLATFORMS=cuda,nonsense")],
)  # fmt: skip
def test_what_jax_cannot_do_is_one_line(world, environment, word):
    code, out, err = world.run("no-jax", environment=environment)
    assert (code, out) == (edge.MISTAKE, "") and err.count("\n") == 1 and word in err
    assert not (world.folder / "no-jax").exists()


@pytest.mark.parametrize("name", machine.SETTINGS)
def test_a_setting_of_jax_is_right_here_or_refused(name):
    needed, why = machine.SETTINGS[name]
    if not hasattr(jax.config, name):
        pytest.skip("this version of JAX has no such setting")
    before = getattr(jax.config, name)
    others = {"allow": "raise", "standard": "strict", None: "disallow", "threefry2x32": "rbg"}
    other = others.get(needed) or (not needed if isinstance(needed, bool) else 1)
    machine.import_jax()
    jax.config.update(name, other)
    try:
        if why is None:
            machine.import_jax()
            assert getattr(jax.config, name) == needed
        else:
            with pytest.raises(UserError, match=f"{name.upper()}=.*; unset {name.upper()}"):
                machine.import_jax()
    finally:
        jax.config.update(name, before)


# --- numbers --------------------------------------------------------------------------------------


def unbounded(config):
    """Return the numeric fields that lack an end of their range."""
    return [
        leaf.path for leaf in configs.leaves(config)
        if leaf.kind in (int, float)
        and ((leaf.limits.most is None and leaf.limits.below is None)
             or (leaf.limits.least is None and leaf.limits.above is None))
    ]  # fmt: skip


@pytest.mark.parametrize("name", cli.names())
def test_every_number_of_every_experiment_has_a_range(name):
    experiment = cli.find(name)
    for preset in experiment.PRESETS:
        assert unbounded(experiment.get_config(preset)) == []


def test_a_number_without_an_end_is_found():
    import dataclasses

    fields = [("open", int, field(1, "", least=0)), ("closed", int, field(1, "", least=0, most=2))]
    assert unbounded(dataclasses.make_dataclass("Config", fields)()) == ["open"]


@pytest.mark.parametrize("value", [10**400, -(10**400), float("inf"), float("nan")])
def test_a_number_beyond_all_floats_is_refused(value):
    limits = configs.Limits(least=0, most=8)
    assert not limits.admit(value) and limits.admit(8) and limits.admit(0.5)


def test_memory_is_that_of_the_machine_or_less(monkeypatch):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < machine.memory_bytes() <= whole
    monkeypatch.setattr(machine, "_group_limits", lambda: [1 << 20])
    assert machine.memory_bytes() == 1 << 20


# --- the program's own mistakes -------------------------------------------------------------------

KNOWN = edge.Known("python launch.py --workdir=here")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("config.x=1: must be 2"), 2, ["config.x=1: must be 2"]),
        (LockedError("in use by process 1"), 3, ["in use"]),
        (Interrupted("stopped by SIGTERM; go on with: it"), 75, ["go on with"]),
        (KeyboardInterrupt(), 130, ["not saved", KNOWN.command]),
        (signals.Ended("SIGTERM"), 130, ["SIGTERM", "not saved", KNOWN.command]),
        (MemoryError(), 2, ["memory", "smaller"]),
        (RuntimeError("INTERNAL: Out of memory allocating 9 bytes"), 2, ["memory", "smaller"]),
        (RecursionError("maximum recursion depth exceeded"), 2, ["nested"]),
        (OSError(errno.ENOSPC, "No space left", "/there"), 2, ["/there", "make room"]),
        (OSError(errno.EDQUOT, "Quota", "/there"), 2, ["/there", "quota"]),
        (OSError(errno.EFBIG, "File too large", "/there"), 2, ["/there", "ulimit -f"]),
        (PermissionError(errno.EACCES, "Denied", "/there"), 2, ["/there", "permissions"]),
        (OSError(errno.EROFS, "Read-only", "/there"), 2, ["/there", "can be written"]),
        (OSError("no number, no file"), 2, ["no number, no file"]),
        (UnicodeEncodeError("ascii", "\xe9", 0, 1, "no"), 2, ["UTF-8"]),
        (ModuleNotFoundError("No module named 'x'", name="x"), 2, ["x is missing", "pip install"]),
        (TypeError("two\nlines"), 70, ["TypeError: two lines", "report", "traceback in"]),
        (AssertionError(), 70, ["AssertionError", "traceback in"]),
    ],
)  # fmt: skip
def test_every_error_is_one_line_and_a_code(capsys, tmp_path, monkeypatch, error, code, words):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert edge.tell(error, KNOWN) == code
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("normjax: ") and err.count("\n") == 1
    assert [word for word in words if word not in err] == []
    assert len(list(tmp_path.iterdir())) == (code == edge.INTERNAL)


def test_a_mistake_of_the_program_leaves_its_traceback(capsys, tmp_path, monkeypatch):
    def fail():
        raise TypeError("a mistake")

    try:
        fail()
    except TypeError as error:
        assert edge.tell(error, edge.Known("the command", tmp_path)) == edge.INTERNAL
        shown = capsys.readouterr().err
        monkeypatch.setenv(edge.TRACEBACK, "1")
        edge.tell(error, edge.Known("the command", tmp_path / "absent"))
    kept = (tmp_path / "crash.txt").read_text()
    assert "the command" in kept and "in fail" in kept and 'TypeError("a mistake")' in kept
    assert f"traceback in {tmp_path / 'crash.txt'}" in shown and "Traceback" not in shown
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("shown", ["", "1"])
def test_the_threads_of_libraries_print_no_traceback_unless_asked(shown):
    source = """
import logging, sys, threading
from normjax.runs import edge
edge.quiet()
def fail():
    raise ValueError("in a thread")
logging.basicConfig()
logging.getLogger().handlers[0].addFilter(edge.without_traceback)
thread = threading.Thread(target=fail)
thread.start()
thread.join()
try:
    fail()
except ValueError:
    logging.exception("logged")
    """
    code, _, err = python(source, env={**os.environ, edge.TRACEBACK: shown})
    assert code == 0 and "logged" in err
    assert err.count("Traceback") == (2 if shown else 0)


# --- before the first step ------------------------------------------------------------------------


def test_what_the_end_needs_is_tried_and_nothing_stays(tmp_path):
    (tmp_path / f"{preflight.PREFIX}killed").mkdir()
    preflight.check(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "name", "error"),
    [
        (drawing, "render", ValueError("no such backend")),
        (preflight.Checkpoints, "save", OSError(errno.ENOSPC, "No space left")),
        (preflight.SavedStates, "restore", UserError("damaged")),
    ],
)
def test_what_fails_at_the_end_fails_at_the_start(tmp_path, monkeypatch, what, name, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(what, name, fail)
    with pytest.raises(type(error)):
        preflight.check(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_reads_back_otherwise_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.SavedStates, "restore", lambda *_: {"tried": jax.numpy.ones(4)})
    with pytest.raises(UserError, match="not what is read back"):
        preflight.check(tmp_path)


def test_a_machine_without_temporary_files_is_told(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("TMPDIR", "/full")
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(UserError, match="TMPDIR=/full: .*No space left.*; set TMPDIR"):
        preflight.check(tmp_path)


def test_sizes_are_said_in_gigabytes():
    assert estimates.gigabytes(2.5e12) == "2,500 GB"


def test_no_test_leaves_a_stream_behind():
    assert not isinstance(getattr(sys.stdout, "buffer", None), streams.Tolerant)
