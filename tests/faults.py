"""Faults on a tiny grid, many of them: kills, torn files, writes that fail. Nothing may be lost.

    python -m tests.faults                        some minutes, as `make test-faults`
    python -m tests.faults --long                 hours: 500 grids killed, and as much of the rest
    python -m tests.faults --kills=500 --damage=300 --changed=0 --seed=7

Every trial is a process of its own, forked from one that has imported the program but computed
nothing. A trial holds where the grid, started again until it ends, has the numbers of the grid that
nobody disturbed; or where it is refused in one line that names what is damaged. The table counts
the others, and the seed that makes them again.

Writes are killed, torn and refused below Python and below Orbax's storage by a preloaded library
(`torn_writes.c`); disks that are full or read-only are small tmpfs in a name space of the trial's
own. Where there is no C compiler, or no right to mount, the table says that it was not tried.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from normjax.runs import checking
from normjax.runs.run_folder import RunFolder

FLAGS = (
    "--preset=smoke", "--config.grid.arms=full", "--config.grid.seeds=2", "--cpu_devices=1",
    "--config.model.depth=1", "--config.train.steps=24", "--config.train.evaluate_every=4",
    "--config.train.chunk_steps=2", "--config.train.checkpoint_every=4",
)  # fmt: skip


class World:
    """A folder with a text, a cache and workdirs."""

    def __init__(self, folder: Path):
        self.folder = folder
        words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
        (folder / "text.txt").write_text(" ".join(random.Random(0).choices(words, k=600)))
        os.environ |= {"JAX_PLATFORMS": "cpu", "NORMJAX_CACHE": str(folder / "cache")}

    def start(self, workdir: Path, *more: str, first: Callable[[], None] | None = None) -> int:
        """Fork a process that carries out the grid; return its number."""
        flags = [*FLAGS, f"--config.data.corpus={self.folder / 'text.txt'}", *more]
        process = os.fork()
        if process:
            return process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            out = os.open(f"{workdir}.out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.argv = ["launch.py", *flags, f"--workdir={workdir}"]
            from experiments import start
            from normjax.runs import runner

            # Pages are tested elsewhere, and take longer than the training here.
            runner.report.write = lambda workdir: workdir / "report.html"
            runner.report.headline = lambda workdir: "done"
            if first:
                first()
            start.run()
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        finally:
            os._exit(99)

    def run(self, workdir: Path, *more: str, first: Callable[[], None] | None = None) -> int:
        """Carry out the grid and return the exit code, negative for a signal."""
        return ended(self.start(workdir, *more, first=first))

    @staticmethod
    def said(workdir: Path) -> str:
        """Return what the last process of a workdir printed."""
        return Path(f"{workdir}.out").read_text(errors="replace")


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def numbers(workdir: Path) -> dict[str, list[dict]]:
    """Return every run's evaluations to the last bit, without what depends on the clock."""
    return {
        path.name: [
            {k: v for k, v in line.items() if not k.startswith("time/")}
            for line in RunFolder(path, path.name).metrics()
        ]
        for path in sorted((workdir / "runs").iterdir())
    }


# --- trials: each returns "" where it holds, else what went wrong ---------------------------------


def killed(world: World, reference: Path, workdir: Path, rng: random.Random, seconds: float) -> str:
    """Kill at random moments until the grid ends; then a last time undisturbed."""
    for _ in range(rng.randint(1, 3)):
        process = world.start(workdir)
        time.sleep(rng.uniform(0.2, 1.0) * seconds)
        os.kill(process, signal.SIGKILL)
        ended(process)
    return same_or_refused(world, reference, workdir, may_refuse=False)


def damaged(world: World, reference: Path, workdir: Path, rng: random.Random, kind: str) -> str:
    """Damage one file of a stopped or finished workdir, then go on."""
    source = reference if rng.random() < 0.5 else reference.with_name("stopped")
    shutil.copytree(source, workdir)
    files = sorted(p for p in (workdir / "runs").rglob("*") if p.is_file())
    victim = rng.choice([*files, workdir / "grid.json"])
    content = bytearray(victim.read_bytes())
    at = rng.randrange(max(1, len(content)))
    if kind == "bit" and content:
        content[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    elif kind == "zero":
        content[at:] = bytes(len(content) - at)
    if kind == "gone":
        victim.unlink()
    else:
        victim.write_bytes(content)
    found = same_or_refused(world, reference, workdir)
    return found and f"{found} after {kind} at {at} of {victim.relative_to(workdir)}"


COUNT, TORN = 1, {"kill": 2, "tear": 3, "refuse": 4}
"""What torn_writes.c does to a write."""


def _arm(workdir: Path, k: int, kind: int) -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.changes.restype = ctypes.c_long
    library.arm(os.fsencode(f"{workdir}/"), ctypes.c_long(k), kind)
    return library


def torn(world: World, reference: Path, workdir: Path, kind: str, k: int) -> str:
    """Kill at, tear or refuse the k-th change of a file below the workdir, then go on."""
    code = world.run(workdir, first=lambda: _arm(workdir, k, TORN[kind]))
    said = world.said(workdir)
    if "Traceback" in said or code not in (0, 2, -signal.SIGKILL):
        return f"code {code} where change {k} met a {kind}"
    found = same_or_refused(world, reference, workdir, may_refuse=False)
    return found and f"{found} after a {kind} at change {k}"


def changes(world: World, workdir: Path) -> int:
    """Return how many changes of files an undisturbed grid makes below its workdir."""
    count = workdir.with_suffix(".count")

    def first() -> None:
        library = _arm(workdir, 0, COUNT)
        leave = os._exit

        def counted(code: int) -> None:
            count.write_text(str(library.changes()))
            leave(code)

        os._exit = counted

    world.run(workdir, first=first)
    return int(count.read_text())


def full(world: World, reference: Path, workdir: Path, rng: random.Random, seconds: float) -> str:
    """Fill the workdir's file system at a random moment; make room again, then go on."""
    _mount(workdir, "size=16m")
    process = world.start(workdir)
    ballast = workdir / "ballast"

    def fill() -> None:
        time.sleep(rng.uniform(0, 1) * seconds)
        with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
            size = 1 << 20
            while size:  # to the last byte
                try:
                    file.write(bytes(size))
                except OSError:
                    size //= 2

    filling = threading.Thread(target=fill)
    filling.start()
    code = ended(process)
    filling.join()
    ballast.unlink()
    if "Traceback" in world.said(workdir) or code not in (0, 2):
        return f"code {code} on a full disk"
    return same_or_refused(world, reference, workdir, may_refuse=False)


def read_only(world: World, reference: Path, workdir: Path, rng: random.Random) -> str:
    """Go on in a workdir on a read-only file system: refused, nothing changed; then go on."""
    source = rng.choice([reference, reference.with_name("stopped")])
    _mount(workdir, "size=64m")
    shutil.copytree(source, workdir, dirs_exist_ok=True)
    _mount(workdir, "", MS_REMOUNT | MS_RDONLY)
    code = world.run(workdir)
    said = world.said(workdir)
    if "Traceback" in said or code != 2 or not said.strip().startswith("normjax: "):
        return f"code {code} on a read-only disk"
    _mount(workdir, "", MS_REMOUNT)
    return same_or_refused(world, reference, workdir, may_refuse=False)


MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000


def _mount(folder: Path, options: str, flags: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(flags), options.encode())


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def alone(function: Callable[..., str], *arguments: object) -> str:
    """Call a trial in a process whose mounts are its own; return what it returns.

    Raises:
      OSError: this user may not mount.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        try:
            _call("unshare", CLONE_NEWNS | (CLONE_NEWUSER if os.getuid() else 0))
            _call("mount", b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
            found = function(*arguments)
        except BaseException as error:
            found = f"may not: {error}" if isinstance(error, OSError) else repr(error)
        os.write(writer, found.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        found = pipe.read()
    ended(process)
    if found.startswith("may not: "):
        raise OSError(found)
    return found


def limited(world: World, reference: Path, workdir: Path, rng: random.Random) -> str:
    """Files may not grow beyond a random size."""
    size = int(10 ** rng.uniform(1, 5.5))
    code = world.run(
        workdir, first=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    )  # fmt: skip
    said = world.said(workdir)
    if "Traceback" in said or code not in (0, 2):
        return f"code {code} under a limit of {size} bytes a file"
    return same_or_refused(world, reference, workdir, may_refuse=False)


def same_or_refused(world: World, reference: Path, workdir: Path, may_refuse: bool = True) -> str:
    """Start the grid again: it ends with the same numbers, or one line says why it cannot."""
    code = world.run(workdir)
    said = world.said(workdir)
    if "Traceback" in said:
        return "a traceback"
    if code == 2 and may_refuse and said.strip().splitlines()[-1].startswith("normjax: "):
        return ""
    if code:
        return f"code {code}"
    found, wanted = numbers(workdir), numbers(reference)
    if may_refuse and "are lost or damaged" in said:  # announced: the others must be whole
        wanted = {
            name: [line for line in lines if line["step"] in {x["step"] for x in found[name]}]
            for name, lines in wanted.items()
        }
        if any(lines[-1]["step"] != 24 for lines in found.values()):
            return "a lost last evaluation was not made anew"
        for lines in (*found.values(), *wanted.values()):  # of one made anew only the loss is known
            lines[:] = [{k: line[k] for k in ("step", "validation/loss")} for line in lines]
    if found != wanted:
        return "other numbers"
    # A damaged checkpoint that was not needed may still lie there: --verify names it.
    lines, bad = ([], 0) if may_refuse else checking.check(workdir)
    return "; ".join(lines) if bad else ""


# --- all of them ----------------------------------------------------------------------------------


def prepared(world: World) -> tuple[Path, float]:
    """Return the workdir that nobody disturbed, and its seconds; beside it is a stopped one."""
    import jax  # noqa: F401  (imported, not used: its children start at once)

    from normjax.runs import runner  # noqa: F401

    reference = world.folder / "reference"
    if world.run(world.folder / "warm"):
        raise SystemExit(world.said(world.folder / "warm"))
    began = time.monotonic()
    world.run(reference)
    seconds = time.monotonic() - began
    stopped = world.folder / "stopped"
    process = world.start(stopped)
    while not list(stopped.glob("runs/*-s1-*/checkpoints/8")):
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    ended(process)
    return reference, seconds


Found = dict[str, tuple[int, list[str]]]
"""By kind of fault: how many were tried, and what went wrong in some."""


def campaign(
    folder: Path, found: Found, preloaded: bool, seed: int, kills: int, damage: int, changed: int,
    limits: int, disks: int,
) -> None:  # fmt: skip
    """Try them all, and put into ``found`` what comes out."""
    world, rng = World(folder), random.Random(seed)
    reference, seconds = prepared(world)

    def trial(kind: str, index: int, function: Callable[..., str], *arguments: object) -> None:
        workdir = folder / f"{kind.replace(' ', '-')}-{index}"
        wrong = function(world, reference, workdir, *arguments)
        count, all_wrong = found.get(kind, (0, []))
        found[kind] = (count + 1, all_wrong + ([f"{index}: {wrong}"] if wrong else []))
        shutil.rmtree(workdir, ignore_errors=True)

    for i in range(kills):
        trial("killed", i, killed, rng, seconds)
    for i in range(damage):
        kind = rng.choice(["bit", "bit", "cut", "zero", "gone"])
        trial(kind, i, damaged, rng, kind)
    if changed and preloaded:
        count = changes(world, folder / "counted")
        first = max(1, (count - changed) // 2)
        print(f"{count} changes of files in one grid; of them from {first} on", flush=True)
        for k in range(first, min(first + changed, count + 1)):
            for kind in TORN:
                trial(f"{kind} at change", k, torn, kind, k)
    elif changed:
        found["changes: not tried, no C compiler"] = (0, [])
    for i in range(limits):
        trial("limited size", i, limited, rng)
    try:
        for i in range(disks):
            trial("full disk", i, lambda *a: alone(full, *a), rng, seconds)
            trial("read-only disk", i, lambda *a: alone(read_only, *a), rng)
    except OSError as error:
        found[f"disks: not tried, {error}"] = (0, [])


LIBRARY = "torn_writes.so"


def preload() -> bool:
    """Start this program again with the library that tears writes; return whether it is loaded."""
    before = Path(os.environ.pop("LD_PRELOAD", ""))
    if before.name == LIBRARY:
        shutil.rmtree(before.parent)  # loaded it stays, and children need no second copy
        return True
    library = Path(tempfile.mkdtemp()) / LIBRARY
    source = Path(__file__).with_name("torn_writes.c")
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    except (OSError, subprocess.CalledProcessError):
        shutil.rmtree(library.parent)
        return False
    os.environ["LD_PRELOAD"] = str(library)
    return bool(os.execv(sys.executable, [sys.executable, "-m", "tests.faults", *sys.argv[1:]]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    some = (
        ("kills", 40, 500, "grids killed one to three times at random moments"),
        ("damage", 60, 300, "workdirs with one file damaged"),
        ("changed", 15, 200, "changes of files in a row, each killed, torn and refused"),
        ("limits", 10, 40, "grids whose files may not grow beyond a size"),
        ("disks", 4, 20, "grids on a disk that fills up, and on a read-only one"),
    )
    for name, few, many, meaning in some:
        parser.add_argument(f"--{name}", type=int, help=f"{meaning} ({few}; --long: {many})")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="makes the same list")
    parser.add_argument("--long", action="store_true", help="as many as one has hours for")
    chosen = vars(parser.parse_args())
    long = chosen.pop("long")
    for name, few, many, _ in some:
        if chosen[name] is None:
            chosen[name] = many if long else few
    found: Found = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the table so far
    preloaded = preload()
    print(f"seed {chosen['seed']}", flush=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(SystemExit):
        campaign(Path(folder).resolve(), found, preloaded, **chosen)
    print(f"{'fault':<20}{'tried':>8}{'lost':>8}")
    for kind, (tried, wrong) in found.items():
        print(f"{kind:<20}{tried:>8}{len(wrong):>8}")
        print(*(f"    {line}\n" for line in wrong), sep="", end="")
    return int(any(wrong for _, wrong in found.values()))


if __name__ == "__main__":
    sys.exit(main())
