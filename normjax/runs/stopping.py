"""Ctrl-C and SIGTERM as a flag that the training loop looks at between chunks of steps.

Nothing is saved inside a signal handler: it may run in the middle of a save.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator


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
