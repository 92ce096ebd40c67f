"""Faults on a tiny grid, many of them: kills, torn files, writes that fail. Nothing may be lost.

    python -m tests.faults                        the long list, as `make test-faults`
    python -m tests.faults --kills=500 --damage=300 --writes=0 --seed=7

Every trial is a process of its own, forked from one that has imported the program but computed
nothing. A trial holds where the grid, started again until it ends, has the numbers of the grid that
nobody disturbed; or where it is refused in one line that names what is damaged. The table counts
the others, and the seed that makes them again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
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


def failing(world: World, reference: Path, workdir: Path, k: int) -> str:
    """Refuse the k-th opening for writing below the workdir with "no space", then go on."""

    def first() -> None:
        seen = 0

        def hook(event: str, arguments: tuple) -> None:
            nonlocal seen
            if event != "open" or not isinstance(arguments[2], int):
                return
            if arguments[2] & (os.O_WRONLY | os.O_RDWR) and str(workdir) in str(arguments[0]):
                seen += 1
                if seen == k:
                    raise OSError(28, "No space left on device", str(arguments[0]))

        sys.addaudithook(hook)

    code = world.run(workdir, first=first)
    said = world.said(workdir)
    if "Traceback" in said or code not in (0, 2):
        return f"code {code} where write {k} was refused"
    return same_or_refused(world, reference, workdir, may_refuse=False)


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
    folder: Path, found: Found, seed: int, kills: int, damage: int, writes: int, limits: int
) -> None:
    """Try them all, and put into ``found`` what comes out."""
    world, rng = World(folder), random.Random(seed)
    reference, seconds = prepared(world)

    def trial(kind: str, index: int, function: Callable[..., str], *arguments: object) -> None:
        workdir = folder / f"{kind}-{index}"
        wrong = function(world, reference, workdir, *arguments)
        count, all_wrong = found.get(kind, (0, []))
        found[kind] = (count + 1, all_wrong + ([f"{index}: {wrong}"] if wrong else []))
        shutil.rmtree(workdir, ignore_errors=True)

    for i in range(kills):
        trial("killed", i, killed, rng, seconds)
    for i in range(damage):
        kind = rng.choice(["bit", "bit", "cut", "zero", "gone"])
        trial(kind, i, damaged, rng, kind)
    for k in range(1, writes + 1):
        trial("refused write", k, failing, k)
    for i in range(limits):
        trial("limited size", i, limited, rng)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    for name, default in (("kills", 500), ("damage", 300), ("writes", 120), ("limits", 40),
                          ("seed", int(time.time()))):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    chosen = vars(parser.parse_args())
    print(f"seed {chosen['seed']}", flush=True)
    found: Found = {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # the table so far
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(SystemExit):
        campaign(Path(folder), found, **chosen)
    print(f"{'fault':<16}{'tried':>8}{'lost':>8}")
    for kind, (tried, wrong) in found.items():
        print(f"{kind:<16}{tried:>8}{len(wrong):>8}")
        print(*(f"    {line}\n" for line in wrong), sep="", end="")
    return int(any(wrong for _, wrong in found.values()))


if __name__ == "__main__":
    sys.exit(main())
