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
from normjax.training.checkpoints import KEPT, Checkpoints

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
    """Save the given steps and close, as a process that ends does."""
    checkpoints = Checkpoints(folder)
    for step in steps:
        checkpoints.save(step, tree(step))
    checkpoints.close()
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run folder with checkpoints of steps 10 and 20; tests work on copies."""
    return saved(tmp_path_factory.mktemp("template"), 10, 20)


@pytest.fixture
def run_dir(template, tmp_path):
    return Path(shutil.copytree(template, tmp_path / "run", symlinks=True))


def newest(folder):
    """Return the newest step that can be restored, restored."""
    checkpoints = Checkpoints(folder)
    steps = checkpoints.verified_steps()
    restored = checkpoints.restore(steps[-1], tree(0))
    checkpoints.close()
    assert_same(restored, tree(steps[-1]))
    return steps


# --- round trip -----------------------------------------------------------------------------------


def test_every_bit_comes_back(run_dir):
    checkpoints = Checkpoints(run_dir)
    assert checkpoints.verified_steps() == [10, 20]
    for step in (20, 10):
        assert_same(checkpoints.restore(step, tree(0)), tree(step))
    checkpoints.close()


def test_the_saving_process_reads_what_it_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.verified_steps() == []
    checkpoints.save(0, tree(0))
    assert checkpoints.verified_steps() == [0]
    assert_same(checkpoints.restore(0, tree(3)), tree(0))
    checkpoints.close()


def test_a_folder_without_checkpoints_has_none(tmp_path):
    assert Checkpoints(tmp_path).verified_steps() == []
    assert Checkpoints(tmp_path / "missing").verified_steps() == []


def test_the_last_ones_are_kept(tmp_path):
    saved(tmp_path, 1, 2, 3, 10, 9)
    assert Checkpoints(tmp_path).verified_steps() == [9, 10]
    assert len([p for p in (tmp_path / "checkpoints").iterdir() if p.is_dir()]) == KEPT == 2
    assert {p.name for p in (tmp_path / "checkpoint_hashes").iterdir()} == {"9.json", "10.json"}


def test_a_step_older_than_what_is_there_is_kept_when_it_is_saved(run_dir):
    """A run that went back further than another member saves steps that are not the newest."""
    checkpoints = Checkpoints(run_dir)
    checkpoints.save(5, tree(5))
    assert 5 in checkpoints.verified_steps()
    assert_same(checkpoints.restore(5, tree(0)), tree(5))
    checkpoints.close()


def test_saving_a_step_twice_leaves_the_first(run_dir):
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run_dir.rglob("*") if p.is_file()}
    checkpoints = Checkpoints(run_dir)
    checkpoints.save(20, tree(20))
    checkpoints.close()
    after = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run_dir.rglob("*") if p.is_file()}
    assert before == after


def test_going_on_after_a_restart(run_dir):
    saved(run_dir, 30)
    assert newest(run_dir) == [20, 30]


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
    checkpoints = Checkpoints(run_dir)
    with pytest.raises(UserError, match=f"{leaf}.*{words}|{words}.*{leaf}") as caught:
        checkpoints.restore(20, change(tree(0)))
    assert "\n" not in str(caught.value) and str(run_dir) in str(caught.value)
    assert_same(checkpoints.restore(20, tree(0)), tree(20))
    checkpoints.close()


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
    checkpoints = Checkpoints(run_dir)
    with pytest.warns(UserWarning, match="damaged.*going back") as caught:
        assert checkpoints.verified_steps() == [10]
    assert len(caught) == 1 and damaged in str(caught[0].message)
    assert_same(checkpoints.restore(10, tree(0)), tree(10))
    # It is set aside, not deleted, and does not warn again; the step can be saved anew.
    assert list((run_dir / "quarantine").iterdir())
    assert checkpoints.verified_steps() == [10]
    checkpoints.save(20, tree(20))
    checkpoints.close()
    assert newest(run_dir) == [10, 20]


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
                with pytest.warns(UserWarning, match="damaged"):
                    assert Checkpoints(copy).verified_steps() == [10], (name, position)
                path.write_bytes(whole)
            continue
        else:
            new = {"truncated": size - 1, "zeroed": size, "empty": 0}[kind]
            data = path.read_bytes()[:new]
            path.write_bytes(bytes(new) if kind == "zeroed" else data)
        with pytest.warns(UserWarning, match="damaged") as caught:
            assert Checkpoints(run_dir).verified_steps() == [10], name
        assert name in str(caught[0].message)


def test_after_damage_the_run_goes_on_from_the_one_before(run_dir, template):
    largest = max(_names(template), key=lambda n: (template / "checkpoints/20" / n).stat().st_size)
    _flip(run_dir / "checkpoints/20" / largest, 40)
    _assert_falls_back(run_dir, largest)


def test_a_file_too_many_is_damage(run_dir):
    (run_dir / "checkpoints/20/default/stray").write_text("x")
    _assert_falls_back(run_dir, "stray")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"a',
        b"[]",
        b"null",
        b"3",
        b"{}",
        b"\xff\xfe\x00",
        b'{"_METADATA": 3}',
        bytes(300),
    ],
)
def test_damaged_hashes_are_damage(run_dir, content):
    (run_dir / "checkpoint_hashes/20.json").write_bytes(content)
    _assert_falls_back(run_dir, "20")


def test_a_flipped_bit_in_the_hashes_is_damage(template, tmp_path):
    size = (template / "checkpoint_hashes/20.json").stat().st_size
    for position in range(0, size, size // 12):
        run_dir = Path(shutil.copytree(template, tmp_path / str(position)))
        _flip(run_dir / "checkpoint_hashes/20.json", position)
        checkpoints = Checkpoints(run_dir)
        try:
            with pytest.warns(UserWarning, match="damaged"):
                assert checkpoints.verified_steps() == [10]
        except pytest.fail.Exception:  # a bit in white space between the hashes means nothing
            assert checkpoints.verified_steps() == [10, 20]
            assert_same(checkpoints.restore(20, tree(0)), tree(20))
        checkpoints.close()


def test_a_checkpoint_without_hashes_does_not_count(run_dir):
    """A kill between the save and its hashes."""
    (run_dir / "checkpoint_hashes/20.json").unlink()
    assert newest(run_dir) == [10]
    saved(run_dir, 20)
    assert newest(run_dir) == [10, 20]


def test_hashes_without_a_checkpoint_do_not_count(run_dir):
    """A kill between the removal of an old checkpoint and that of its hashes."""
    shutil.rmtree(run_dir / "checkpoints/10")
    assert newest(run_dir) == [20]


def test_nothing_starts_afresh_in_silence_where_all_are_damaged(run_dir):
    for step in (10, 20):
        _flip(_files(run_dir / "checkpoints" / str(step))[-1], 3)
    with pytest.raises(UserError) as caught:
        Checkpoints(run_dir).verified_steps()
    message = str(caught.value)
    assert str(run_dir) in message and "damaged" in message and "delete" in message
    assert "\n" not in message


def test_damage_to_the_only_one_is_an_error_too(tmp_path):
    saved(tmp_path, 5)
    _flip(_files(tmp_path / "checkpoints/5")[-1], 3)
    with pytest.raises(UserError, match="damaged"):
        Checkpoints(tmp_path).verified_steps()


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


def _stray_hashes(folder):
    (folder / "checkpoint_hashes/notes.json").write_text("{}")


def _torn_hashes(folder):
    (folder / "checkpoint_hashes/.20.json.123").write_text("{")


STRAYS = [
    _empty_step, _unfinished, _temporary, _notes, _loop, _numbered_loop, _plain_file, _stray_hashes,
    _torn_hashes,
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

    checkpoints = Checkpoints(run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(os, name, die)
        with pytest.raises(Killed):
            checkpoints.save(30, tree(30))
    assert newest(run_dir) == [10, 20] or newest(run_dir) == [20]
    saved(run_dir, 30)
    assert newest(run_dir)[-1] == 30


def test_a_full_disk_leaves_the_one_before_in_force(run_dir, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(run_dir)
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
    Checkpoints(run).save(30, t.tree(30))
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
