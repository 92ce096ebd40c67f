"""What is saved comes back bit for bit; what is damaged, torn or foreign never does."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from normjax.errors import UserError
from normjax.runs import files
from normjax.runs.run_folder import RunFolder, RunWriter
from normjax.training import checkpoints as module
from normjax.training.checkpoints import KEPT, Checkpoints, SavedStates

ROOT = Path(__file__).parents[1]


class Pair(NamedTuple):
    """A tree node as the training state has it."""

    params: dict
    step: np.ndarray


def tree(x):
    """Return a state with every dtype that training keeps, and numbers that are easily lost."""
    odd = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3.4e38, x], np.float32)
    return Pair(
        {
            "blocks": {
                "kernel": np.random.default_rng(x).standard_normal((2, 3, 5)).astype(np.float32),
                "gain": np.full((2, 3), x, np.float16),
            },
            "odd": odd,
            "scalar": np.float32(x),
        },
        np.array(x, np.int32),
    )  # fmt: skip


def assert_same(a, b):
    assert a.step.dtype == b.step.dtype and a.step == b.step
    flat = lambda p: {**p, **p["blocks"]}  # noqa: E731
    for name, x in flat(a.params).items():
        y = flat(b.params)[name]
        if name == "blocks":
            continue
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()), name


def saved(folder, *steps):
    """Save the given steps, as a process of its own would."""
    run = RunWriter(folder)
    if run.manifest is None:
        run.begin({"train": {"steps": 99}}, "0" * 64, {}, 0, False)
    checkpoints = Checkpoints(run)
    for step in steps:
        checkpoints.save(step, tree(step))
    return folder


def states(folder):
    return SavedStates(RunFolder(folder))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run folder with checkpoints of steps 10 and 20; tests work on copies."""
    return saved(tmp_path_factory.mktemp("template"), 10, 20)


@pytest.fixture
def run_dir(template, tmp_path):
    return Path(shutil.copytree(template, tmp_path / "run", symlinks=True))


def newest(folder):
    """Return the steps that can be restored; the newest is restored and compared."""
    found = states(folder)
    assert_same(found.restore(found.steps[-1], tree(0)), tree(found.steps[-1]))
    return found.steps


# --- round trip -----------------------------------------------------------------------------------


def test_every_bit_comes_back(run_dir):
    found = states(run_dir)
    assert found.steps == [10, 20] and found.damaged == {}
    for step in (20, 10):
        assert_same(found.restore(step, tree(0)), tree(step))


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert states(tmp_path).steps == states(tmp_path / "missing").steps == []


def test_the_last_ones_are_kept(tmp_path):
    saved(tmp_path, 1, 2, 3, 9, 10)
    assert states(tmp_path).steps == [9, 10]
    assert len([p for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()]) == KEPT == 2


@pytest.mark.parametrize("kept", [0, 1])
def test_none_is_dropped_before_its_successor_is_proven(run_dir, monkeypatch, kept):
    """Also with one checkpoint kept: an unreadable successor leaves the older one."""
    checkpoints = Checkpoints(RunWriter(run_dir), kept)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_read", lambda folder, names: {k: np.zeros(1) for k in names})
        with pytest.raises(OSError, match="read back differs"):
            checkpoints.save(30, tree(30))
    assert newest(run_dir) == [10, 20]
    Checkpoints(RunWriter(run_dir), kept).save(30, tree(30))
    assert newest(run_dir) == ([10, 20, 30] if kept == 0 else [30])


def test_saving_a_step_twice_leaves_the_first(run_dir):
    def look():
        return {p: (p.read_bytes(), p.stat().st_mtime_ns)
                for p in (run_dir / "checkpoints").rglob("*") if p.is_file()}  # fmt: skip

    before = look()
    saved(run_dir, 20)
    assert before == look()


def test_going_on_after_a_restart(run_dir):
    saved(run_dir, 30)
    assert newest(run_dir) == [20, 30]


def test_the_cost_does_not_grow_with_the_number_kept(tmp_path, monkeypatch):
    """A save reads and writes its own files and the manifest, whatever else is kept."""
    calls = []
    digest = files.digest
    monkeypatch.setattr(files, "digest", lambda path: calls.append(path) or digest(path))
    run = RunWriter(tmp_path)
    run.begin({"train": {"steps": 99}}, "0" * 64, {}, 0, False)
    checkpoints = Checkpoints(run, 0)
    for step in range(1, 8):
        calls.clear()
        checkpoints.save(step, tree(step))
        assert calls and all(checkpoints.folder(step) in path.parents for path in calls)
    assert len(checkpoints.steps) == 7


# --- foreign states -------------------------------------------------------------------------------


def _without(state):
    return state._replace(params={k: v for k, v in state.params.items() if k != "scalar"})


def _changed(name, value):
    return lambda state: state._replace(params={**state.params, name: value})


FOREIGN = {
    "a leaf too many in the checkpoint": (_without, "params.scalar", "absent"),
    "a leaf missing from it": (_changed("new", np.zeros(2, np.float32)), "params.new", "absent"),
    "another dtype": (_changed("scalar", np.float64(1)), "params.scalar", "float64"),
    "half precision": (_changed("odd", np.zeros(8, np.float16)), "params.odd", "float16"),
    "another shape": (_changed("odd", np.zeros(9, np.float32)), "params.odd", r"\(9,\)"),
    "a shape of the same size": (
        _changed("odd", np.zeros((2, 4), np.float32)), "params.odd", r"\(2, 4\)"
    ),
    "a scalar for a vector of one": (
        _changed("scalar", np.zeros(1, np.float32)), "params.scalar", r"\(1,\)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_another_state_is_refused_in_one_line(run_dir, case):
    change, leaf, words = FOREIGN[case]
    checkpoints = states(run_dir)
    with pytest.raises(UserError, match=f"{leaf}.*{words}|{words}.*{leaf}") as caught:
        checkpoints.restore(20, change(tree(0)))
    assert "\n" not in str(caught.value) and str(run_dir) in str(caught.value)
    assert_same(checkpoints.restore(20, tree(0)), tree(20))


# --- damage ---------------------------------------------------------------------------------------


def _files(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def _names(template):
    folder = template / "checkpoints/20"
    return [str(p.relative_to(folder)) for p in _files(folder)]


def _flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


def _assert_falls_back(run_dir, damaged):
    found = states(run_dir)
    assert found.steps == [10] and damaged in found.damaged[20]
    assert_same(found.restore(10, tree(0)), tree(10))
    assert not (run_dir / "quarantine").exists()  # a reader moves nothing
    saved(run_dir, 20)
    assert newest(run_dir) == [10, 20]
    assert list((run_dir / "quarantine").iterdir())  # set aside, not deleted


@pytest.mark.parametrize("kind", ["flipped bits", "truncated", "zeroed", "empty", "deleted"])
def test_damage_to_any_file_is_detected(template, tmp_path, kind):
    """Every file of the newest checkpoint in turn; for bits at offsets all over it."""
    for number, name in enumerate(_names(template)):
        size = (template / "checkpoints/20" / name).stat().st_size
        run_dir = Path(shutil.copytree(template, tmp_path / str(number)))
        path = run_dir / "checkpoints/20" / name
        if kind == "deleted":
            path.unlink()
        elif not size:
            continue
        elif kind == "flipped bits":
            for position in sorted({0, size // 3, size // 2, size - 1}):
                whole = path.read_bytes()
                _flip(path, position)
                copy = Path(shutil.copytree(run_dir, tmp_path / f"{number}-{position}"))
                assert states(copy).steps == [10], (name, position)
                path.write_bytes(whole)
            continue
        else:
            new = {"truncated": size - 1, "zeroed": size, "empty": 0}[kind]
            data = path.read_bytes()[:new]
            path.write_bytes(bytes(new) if kind == "zeroed" else data)
        found = states(run_dir)
        assert found.steps == [10] and found.damaged == {20: name}


def test_after_damage_the_run_goes_on_from_the_one_before(run_dir, template):
    largest = max(_names(template), key=lambda n: (template / "checkpoints/20" / n).stat().st_size)
    _flip(run_dir / "checkpoints/20" / largest, 40)
    _assert_falls_back(run_dir, largest)


def test_a_file_too_many_is_damage(run_dir):
    (run_dir / "checkpoints/20/stray").write_text("x")
    _assert_falls_back(run_dir, "stray")


def test_checkpoints_of_two_runs_that_are_swapped_are_damage(template, tmp_path):
    runs = [Path(shutil.copytree(template, tmp_path / name)) for name in "ab"]
    saved(runs[1], 30)  # its own files, of other names
    for run, other in (runs, runs[::-1]):
        shutil.move(run / "checkpoints/20", tmp_path / f"{other.name}-20")
    for run in runs:
        shutil.move(tmp_path / f"{run.name}-20", run / "checkpoints/20")
    # Both were copies of one folder, so these are the same bits; with others they are not.
    assert [newest(run) for run in runs] == [[10, 20], [20, 30]]
    shutil.rmtree(runs[0] / "checkpoints/20")
    shutil.copytree(runs[1] / "checkpoints/30", runs[0] / "checkpoints/20")
    assert newest(runs[0]) == [10]
    shutil.copytree(runs[1] / "checkpoints/30", runs[0] / "checkpoints/99")
    assert newest(runs[0]) == [10]  # what the manifest does not name is not there


def test_a_damaged_older_one_does_not_stop_a_save(run_dir):
    _flip(_files(run_dir / "checkpoints/10")[-1], 3)
    saved(run_dir, 30)
    assert newest(run_dir) == [20, 30]
    assert [p.name for p in (run_dir / "quarantine").iterdir()] == ["10-0"]


def test_where_all_are_damaged_there_is_none(run_dir):
    for step in (10, 20):
        _flip(_files(run_dir / "checkpoints" / str(step))[-1], 3)
    found = states(run_dir)
    assert found.steps == [] and set(found.damaged) == {10, 20}


# --- stray entries --------------------------------------------------------------------------------


def _empty_step(folder):
    (folder / "checkpoints/99").mkdir()


def _unfinished(folder):
    (folder / "checkpoints/99.orbax-checkpoint-tmp").mkdir()


def _temporary(folder):
    (folder / "checkpoints/99.tmp").mkdir()


def _notes(folder):
    (folder / "checkpoints/notes").mkdir()
    (folder / "checkpoints/notes/today").write_text("fine")


def _loop(folder):
    (folder / "checkpoints/loop").symlink_to(folder / "checkpoints/loop")


def _numbered_loop(folder):
    (folder / "checkpoints/98").symlink_to(folder / "checkpoints/98")


def _plain_file(folder):
    (folder / "checkpoints/97").write_text("not a folder")


STRAYS = [
    _empty_step, _unfinished, _temporary, _notes, _loop, _numbered_loop, _plain_file,
]  # fmt: skip


@pytest.mark.parametrize("stray", STRAYS, ids=lambda f: f.__name__.strip("_"))
def test_stray_entries_are_ignored(run_dir, stray):
    stray(run_dir)
    assert newest(run_dir) == [10, 20]
    saved(run_dir, 30)
    assert newest(run_dir) == [20, 30]


# --- faults inside a save -------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the end of the process: nothing in the library catches it."""


@pytest.mark.parametrize("name", ["replace", "fsync"])
def test_a_save_that_does_not_end_leaves_the_one_before_in_force(run_dir, monkeypatch, name):
    def die(*_, **__):
        raise Killed

    checkpoints = Checkpoints(RunWriter(run_dir))
    with monkeypatch.context() as patch:
        patch.setattr(os, name, die)
        with pytest.raises(Killed):
            checkpoints.save(30, tree(30))
    assert newest(run_dir) == [10, 20] or newest(run_dir) == [20]
    saved(run_dir, 30)
    assert newest(run_dir)[-1] == 30


def test_all_is_on_disk_before_the_manifest_names_it(run_dir, monkeypatch):
    """Every file and folder of a save is synced as it is then; so is the manifest's own file."""
    synced, named = {}, []
    fsync, replace = os.fsync, os.replace

    def look(number):
        fsync(number)
        state = os.fstat(number)
        synced[state.st_ino] = state.st_mtime_ns

    def rename(old, new):
        if Path(new).name == "manifest.json":
            folder = run_dir / "checkpoints/30"
            all_of_it = [Path(old), folder, folder.parent, *folder.rglob("*")]
            named.append([p for p in all_of_it if p.exists()
                          and synced.get(p.stat().st_ino) != p.stat().st_mtime_ns])  # fmt: skip
        replace(old, new)

    monkeypatch.setattr(os, "fsync", look)
    monkeypatch.setattr(os, "replace", rename)
    Checkpoints(RunWriter(run_dir)).save(30, tree(30))
    assert named and named[0] == [], named
    assert newest(run_dir)[-1] == 30


def test_a_full_disk_leaves_the_one_before_in_force(run_dir, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(RunWriter(run_dir))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises((OSError, UserError), match="No space"):
            checkpoints.save(30, tree(30))
    assert newest(run_dir)[-1] == 20
    saved(run_dir, 30)
    assert newest(run_dir)[-1] == 30


# Kills a process at its k-th change of the file system inside a save, for k = 1, 2, ...: each in a
# child of its own, and the children's folders are read by another child. Prints what was left.
KILLS = """
import os, shutil, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_checkpoints as t
from normjax.runs.run_folder import RunWriter
from normjax.training.checkpoints import Checkpoints

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime",
           "shutil.move", "shutil.rmtree")
folder, template, first, stride = Path({folder!r}), Path({template!r}), {first}, {stride}


def save_and_die(run, k):
    shutil.copytree(template, run)
    armed, seen = [], 0

    def hook(event, arguments):
        nonlocal seen
        if not armed:
            return
        flags = arguments[2] if event == "open" and isinstance(arguments[2], int) else 0
        if event in CHANGES or flags & (os.O_WRONLY | os.O_RDWR):
            seen += 1
            if seen == k:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    armed.append(True)
    Checkpoints(RunWriter(run)).save(30, t.tree(30))
    os._exit(0)


def look(run):
    steps = t.newest(run)
    t.saved(run, 30)
    again = t.newest(run)
    print(*steps, "then", *again, flush=True)
    os._exit(0)


def child(function, *arguments):
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
        finally:
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


k = first
while True:
    run = folder / str(k)
    code = child(save_and_die, run, k)
    if code == 0:
        break
    assert code == -signal.SIGKILL, code
    assert child(look, run) == 0
    k += stride
print("all", k - 1)
"""


def _killed_at(tmp_path, template, first, stride):
    script = KILLS.format(
        tests=str(ROOT / "tests"), folder=str(tmp_path), template=str(template),
        first=first, stride=stride,
    )  # fmt: skip
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert out.returncode == 0, out.stderr[-2000:]
    *kills, end = out.stdout.splitlines()
    assert len(kills) >= 3 and end.startswith("all")
    for line in kills:
        before, after = (part.split() for part in line.split(" then "))
        # Never nothing, and never the step whose save did not end unless it is whole: newest() has
        # compared every bit of what it restored.
        assert before[-1] in ("20", "30") and after[-1] == "30", line
    return kills


def test_a_kill_inside_a_save_leaves_the_one_before_in_force(template, tmp_path):
    kills = _killed_at(tmp_path, template, first=2, stride=7)
    assert kills[0].startswith("10 20 then")


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save_leaves_the_one_before_in_force(template, tmp_path):
    kills = _killed_at(tmp_path, template, first=1, stride=1)
    assert sum(line.startswith(("10 20 then", "20 then")) for line in kills) > len(kills) // 2
