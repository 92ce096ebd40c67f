"""What an experiment is given and gives back; its folder, which it works in alone."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import socket
import time
from collections.abc import Generator
from pathlib import Path

from normjax.errors import UserError
from normjax.runs import files
from normjax.runs.signals import StopRequest as StopRequest
from normjax.runs.signals import stop_on_signals as stop_on_signals

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


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
    with open(files.open_to_append(workdir / ".lock"), "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
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
            files.refuse_links(options.workdir)
            yield options.workdir
    except OSError as error:
        what = f"{error.strerror or error} ({error.filename or 'a file'})"
        raise UserError(
            f"workdir={options.workdir}: {what}; put that right and go on with: {options.command}"
        ) from None


def check_address(argument: str, value: str) -> None:
    """Raise :class:`UserError` where a folder is named by an address such as ``gs://bucket/runs``.

    Nothing here writes to a bucket: a local folder of that name would be made, and soon be gone.

    >>> check_address("--workdir", "runs/a:b")
    """
    if _ADDRESS.match(value):
        raise UserError(
            f"{argument}={value}: is an address, and files are written to folders only; name a"
            " folder, such as --workdir=runs/mine, and copy it there afterwards"
        )


def check_workdir(workdir: Path) -> None:
    """Find out before any work whether the folder can be made and written to."""
    check_address("workdir", str(workdir))
    try:
        folder = next(folder for folder in (workdir, *workdir.parents) if folder.exists())
        if not folder.is_dir():
            raise UserError(f"workdir={workdir}: {folder} is a file; name a folder")
        probe = folder / f".normjax-{time.time_ns()}"
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"workdir={workdir}: cannot write there ({error.strerror}); name another folder"
        ) from None
