"""The edge of the program: whatever ends it becomes one line and an exit code, here and only here.

    UserError, a file that cannot be read or written, memory, text   2    what is wrong, the fix
    LockedError                                                      3    who works there
    anything else                                                    70   a mistake of the program
    Interrupted                                                      75   saved; how to go on
    Ended, KeyboardInterrupt                              75 or 130   whether anything is saved

A mistake of the program leaves its traceback in a file; ``NORMJAX_TRACEBACK=1`` shows every one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import os
import shlex
import shutil
import sys
import tempfile
import threading
import traceback
from pathlib import Path

from normjax.errors import UserError, one_line
from normjax.runs import files, signals
from normjax.runs.experiment import Interrupted, LockedError

MISTAKE, LOCKED, INTERNAL = 2, 3, 70
TRACEBACK = "NORMJAX_TRACEBACK"

_FIXES = {
    errno.ENOSPC: "make room there", errno.EDQUOT: "make room in the quota",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EROFS: "name a place that can be written to",
    errno.EACCES: "name a place that may be used, or change its permissions",
    errno.EPERM: "name a place that may be used, or change its permissions",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "close other programs, or take a smaller batch or model",
}  # fmt: skip


@dataclasses.dataclass
class Known:
    """What is known of the command so far.

    Attributes:
      command: the command line that does it again, or goes on with it.
      workdir: its folder, once it is known.
    """

    command: str
    workdir: Path | None = None


def program() -> list[str]:
    """Return what a person types to start this: names where they are found, else paths."""

    def short(name: str, path: str) -> str:
        try:
            found = shutil.which(name)
            return name if found and Path(found).absolute() == Path(path).absolute() else path
        except OSError:  # the folder that this was started in is gone
            return path

    if sys.argv[0].endswith(".py"):
        return [short("python", sys.executable), sys.argv[0]]
    return [short("normjax", sys.argv[0])]


def given() -> Known:
    """Return what is known before anything is understood: the command as it was typed."""
    return Known(shlex.join([*program(), *sys.argv[1:]]))


def _shows() -> bool:
    return os.environ.get(TRACEBACK, "") not in ("", "0")


def quiet() -> None:
    """Keep the threads of libraries from printing what they raise: whoever waits for them is told.

    On a full disk Orbax and tensorstore print dozens of tracebacks besides the error they return.
    """
    if not _shows():
        sys.excepthook = lambda *_: None
        threading.excepthook = lambda _: None
        sys.unraisablehook = lambda _: None


def without_traceback(record: logging.LogRecord) -> bool:
    """Strip the traceback of a logged error; a filter of handlers."""
    if not _shows():
        record.exc_info = record.exc_text = record.stack_info = None
    return True


def tell(error: BaseException, known: Known) -> int:
    """Say in one line why the command ends here, and return the exit code."""
    if _shows():
        traceback.print_exception(error)
    code, line = explained(error, known)
    print(f"normjax: {line}", file=sys.stderr)
    return code


def explained(error: BaseException, known: Known) -> tuple[int, str]:
    """Return the exit code that an exception stands for, and the line that says what it was."""
    if isinstance(error, Interrupted):
        return signals.STOPPED, str(error)
    if isinstance(error, KeyboardInterrupt):
        name = str(error) if isinstance(error, signals.Ended) else ""
        return interrupted(name, not name, known)
    if isinstance(error, LockedError):
        return LOCKED, str(error)
    found = _mistake(error)
    if found is not None:
        return MISTAKE, one_line(found)
    return INTERNAL, _internal(error, known)


def interrupted(name: str, forced: bool, known: Known) -> tuple[int, str]:
    """Return exit code and line where a signal ended the program at once.

    Args:
      name: of the signal; "" where it is not known.
      forced: whether steps since the last checkpoint are lost by it.
      known: the command and its folder.
    """
    by = f" by {name}" if name else ""
    if not forced and known.workdir is not None and _holds_checkpoints(known.workdir):
        return signals.STOPPED, f"stopped{by}, all is saved; go on with: {known.command}"
    return signals.INTERRUPTED, f"interrupted{by}, not saved; go on with: {known.command}"


def _holds_checkpoints(workdir: Path) -> bool:
    """Whether a run of a workdir, or of a grid inside of it, can be gone on with."""
    with contextlib.suppress(OSError):
        for runs in ("runs", "*/runs"):
            if any(workdir.glob(f"{runs}/*/checkpoints/[0-9]*")):
                return True
    return False


def is_memory(error: BaseException) -> bool:
    """Whether an exception says that memory was not enough: Python's, NumPy's or a device's."""
    if isinstance(error, MemoryError):
        return True
    words = ("resource_exhausted", "out of memory", "failed to allocate")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def _mistake(error: BaseException) -> str | None:
    """Return the line of what a person can put right; None of what only the program can."""
    said = str(error)
    if isinstance(error, UserError):
        return said
    if is_memory(error):
        what = "not enough memory"
        return f"{what}{f' ({said[:200]})' if said else ''}; take a smaller batch_size or model"
    if isinstance(error, RecursionError):
        return f"too deeply nested (at {_where(error)}); take a shallower model or file"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("normjax"):
        return f"the package {error.name} is missing; pip install -r requirements.txt"
    if isinstance(error, UnicodeError):
        return f"text that cannot be read or written: {error} (at {_where(error)}); use UTF-8"
    if isinstance(error, RuntimeError) and "home directory" in said:
        return "a path begins with ~ and a name that has no home here; write it out"
    if isinstance(error, OSError):
        place = f" ({error.filename})" if error.filename is not None else f" (at {_where(error)})"
        fix = _FIXES.get(error.errno or 0, "put that right and start again")
        return f"{error.strerror or said}{place}; {fix}"
    return None


def _internal(error: BaseException, known: Known) -> str:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    reason = reason if len(reason) <= 300 else reason[:299] + "…"
    text = f"{known.command}\n\n{''.join(traceback.format_exception(error))}"
    return (
        f"internal error: {reason} (at {_where(error)}); please report it with the command;"
        f" traceback {_kept(text, known.workdir)}"
    )


def _where(error: BaseException) -> str:
    """Return file and line of the last frame that is the program's own, else of the last one."""
    frames = traceback.extract_tb(error.__traceback__)
    root = str(Path(__file__).parents[2]) + os.sep
    own = [f for f in frames if f.filename.startswith(root) and "site-packages" not in
           f.filename.removeprefix(root)]  # fmt: skip
    for frame in reversed(own or frames):
        return f"{frame.filename.removeprefix(root)}:{frame.lineno}"
    return "unknown"


def _kept(text: str, workdir: Path | None) -> str:
    """Write a traceback where it can be written, and say where that is."""
    content = text.encode(errors="replace")
    for folder in (workdir, None):
        try:
            if folder is None:
                handle, path = tempfile.mkstemp(prefix="normjax-crash-", suffix=".txt")
                with os.fdopen(handle, "wb") as file:
                    file.write(content)
            elif folder.is_dir():
                path = files.write_bytes(folder / "crash.txt", content)
            else:
                continue
            return f"in {path}"
        except OSError:
            continue
    return f"with {TRACEBACK}=1"
