"""What an experiment is given, what it gives back, and the folder that it works in."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Generator
from pathlib import Path

from normjax.errors import UserError
from normjax.runs.locking import locked


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
