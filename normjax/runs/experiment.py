"""What an experiment is given and gives back; its folder, which it works in alone; its stop.

A signal becomes a flag that the training loop looks at between chunks of steps. Nothing is saved
inside a signal handler: it may run in the middle of a save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import socket
import time
from collections.abc import Generator
from pathlib import Path

from normjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Options:
    """How an experiment is carried out, besides its configuration.

    Attributes:
      workdir: the folder of everything that it writes.
      command: the command line that goes on with it.
      dry_run: say what would be done and what it would cost; do nothing.
      live: whether to show a live table; None: where there is a terminal.
      predict: what is expected, before it runs: a file, "ask" or a name; "" for nothing.
    """

    workdir: Path
    command: str
    dry_run: bool = False
    live: bool | None = None
    predict: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What an experiment ended with.

    Attributes:
      text: the result for a terminal, without a trailing newline.
      page: the page to open.
      code: the exit code; 0 where what was asked was found to hold.
    """

    text: str
    page: Path | None = None
    code: int = 0


class Interrupted(Exception):
    """An experiment was stopped by a signal after saving; the message says how to go on."""


class LockedError(RuntimeError):
    """Another process writes to the workdir; the message says which."""


@contextlib.contextmanager
def locked(workdir: Path) -> Generator[None]:
    """Hold the workdir's lock; raise :class:`LockedError` at once where another process holds it.

    The lock is the kernel's (flock), not the file's existence: a killed owner leaves none behind.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    with open(workdir / ".lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise LockedError(
                f"workdir {workdir} is in use by {owner}; wait for it, or use another --workdir"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def working_in(options: Options) -> Generator[Path]:
    """Hold the workdir's lock while an experiment writes there, and put file errors into one line.

    Raises:
      UserError: the folder cannot be written to, before or during the work.
      LockedError: another process works there.
    """
    check_workdir(options.workdir)
    try:
        with locked(options.workdir):
            yield options.workdir
    except OSError as error:
        what = f"{error.strerror or error} ({error.filename or 'a file'})"
        raise UserError(
            f"workdir={options.workdir}: {what}; put that right and go on with: {options.command}"
        ) from None


def check_workdir(workdir: Path) -> None:
    """Find out before any work whether the folder can be made and written to."""
    try:
        folder = next(folder for folder in (workdir, *workdir.parents) if folder.exists())
        if not folder.is_dir():
            raise UserError(f"workdir={workdir}: {folder} is a file; name a folder")
        probe = folder / f".normjax-{time.time_ns()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"workdir={workdir}: cannot write there ({error.strerror}); name another folder"
        ) from None


class StopRequest:
    """Whether a stop has been asked for, and by which signal."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals() -> Generator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request; a second SIGINT interrupts at once."""
    request = StopRequest()

    def handle(number: int, frame: object) -> None:
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number).name

    previous = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
