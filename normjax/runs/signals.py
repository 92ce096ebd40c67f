"""What every signal means to the program, in one table, and the handlers that make it so.

While a grid trains, a signal is a request that the training loop looks at between chunks of steps.
Anywhere else there is nothing to save, and it ends the program at once. Nothing is saved inside a
handler: it may run in the middle of a save.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

STOPPED, INTERRUPTED = 75, 130
"""Exit codes: what was trained is saved; nothing was saved that could be gone on from."""


class Meaning(NamedTuple):
    """What a signal means.

    Attributes:
      words: why it is sent.
      code: the exit code of a training that it stops (130 before there is anything to save); None
        where it is ignored.
    """

    words: str
    code: int | None = STOPPED


SIGNALS = {
    "SIGINT": Meaning("Ctrl-C; a second one interrupts at once, with code 130"),
    "SIGTERM": Meaning("kill, a batch system, a machine that shuts down"),
    "SIGHUP": Meaning("the terminal or the connection is gone"),
    "SIGQUIT": Meaning("Ctrl-\\"),
    "SIGUSR1": Meaning("a batch system: the time is nearly up"),
    "SIGUSR2": Meaning("the same"),
    "SIGXCPU": Meaning("the processor time allowed is used up"),
    "SIGALRM": Meaning("a timer of whoever started the program has run out"),
    "SIGVTALRM": Meaning("the same, of processor time"),
    "SIGPROF": Meaning("the same"),
    "SIGPWR": Meaning("the power fails"),
    "SIGXFSZ": Meaning("a file would grow beyond its limit: the write fails, code 2", None),
    "SIGPIPE": Meaning("nobody reads the output any more: training goes on", None),
}
"""Signals that a system lacks are left out; those that tell of an error in the program, such as
SIGSEGV, and those that cannot be caught keep their effect."""

_OF_SHELLS = ("SIGINT", "SIGQUIT")
"""Shells set these to be ignored for what they start in the background; they are handled anyway."""


class Ended(KeyboardInterrupt):
    """A signal came where nothing is lost by ending at once; the message is its name.

    It is raised where the process is somebody else's; the program itself just ends.
    """


class StopRequest:
    """Whether a stop has been asked for, and by which signal."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self.waits = True

    def __bool__(self) -> bool:
        return self.signal is not None

    @contextlib.contextmanager
    def at_once(self) -> Generator[None]:
        """Let a signal end the work here at once: there is nothing to save.

        Raises:
          Ended: a signal has come, before or meanwhile.
        """
        before, self.waits = self.waits, False
        try:
            if self.signal:
                raise Ended(self.signal)
            yield
        finally:
            self.waits = before


LastWords = Callable[[str, bool], tuple[int, str]]
"""What is said where a signal ends the program at once: of its name, and whether work is lost by
it, the exit code and the line."""


def _first_words(name: str, forced: bool) -> tuple[int, str]:
    """Return what is said while nothing but the command is known."""
    command = shlex.join([sys.executable, *sys.argv])
    return INTERRUPTED, f"interrupted by {name}, not saved; go on with: {command}"


class _Now:
    """What a handler finds: who waits for a stop, and what is said where nobody does."""

    request: StopRequest | None = None
    words: LastWords | None = None  # None: the process is not this program's own


def _handle(number: int, frame: object) -> None:
    name, request = signal.Signals(number).name, _Now.request
    waits = request is not None and request.waits
    forced = waits and bool(request) and number == signal.SIGINT
    if request is not None:
        request.signal = request.signal or name
    if waits and not forced:
        return
    if _Now.words is None:
        raise KeyboardInterrupt if forced else Ended(name)
    _leave(name, forced)


def _leave(name: str, forced: bool) -> None:
    """End the process here: an exception may be swallowed by whatever runs, or come out of it as
    another one, above all while modules are imported."""
    words, _Now.words = _Now.words, lambda name, forced: os._exit(INTERRUPTED)
    code, line = (words or _first_words)(name, forced)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        shown = "\x1b[?25h" if os.isatty(2) else ""  # a live table hides the cursor
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if poll.poll(1000):  # nobody may be reading
            os.write(2, f"{shown}normjax: {line}\n".encode("utf-8", "backslashreplace"))
    os._exit(code)


def _handlers() -> dict[int, Any]:
    """Return the handler of every signal of the table that is not ignored on purpose."""
    found = {}
    for name, meaning in SIGNALS.items():
        number = getattr(signal, name, None)
        if number is None:
            continue
        if signal.getsignal(number) is signal.SIG_IGN and name not in _OF_SHELLS:
            continue  # as under nohup
        found[number] = signal.SIG_IGN if meaning.code is None else _handle
    return found


def install() -> None:
    """Give every signal its meaning from here to the end of the process, which is the program's."""
    _Now.words = _first_words
    for number, handler in _handlers().items():
        signal.signal(number, handler)


def say(words: LastWords) -> None:
    """Set what is said where a signal ends the program at once, now that more is known."""
    if _Now.words is not None:
        _Now.words = words


def finish() -> None:
    """Ignore what comes from here on: the work is done, and the process ends."""
    for number in _handlers():
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def stop_on_signals() -> Generator[StopRequest]:
    """Turn the first signal into a request; a second SIGINT interrupts at once.

    Only the main thread is told of signals: in another one nothing is requested.
    """
    request, before = StopRequest(), _Now.request
    _Now.request, previous = request, {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number, handler in _handlers().items():
                previous[number] = signal.signal(number, handler)
        yield request
    finally:
        _Now.request = before
        for number, handler in previous.items():
            # None: a handler that was not set from Python cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
