"""Measurements that an experiment makes without training: side by side, and how they were made."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import jax

from normjax.runs import machine, provenance

Asked = TypeVar("Asked")
Found = TypeVar("Found")


def in_64_bits(function: Callable[[Asked], Found], asked: Asked) -> Found:
    """Return what a function makes of its argument, in 64-bit mode."""
    with jax.enable_x64(True):
        return function(asked)


def side_by_side(
    functions: Sequence[Callable[[Asked], Found]], asked: Asked, most: int
) -> list[Found]:
    """Return what each function makes of the same argument, in order, in 64-bit mode.

    Most of the time goes into compiling, one program after the other: the functions share the
    cores, ``most`` of them at once.

    >>> side_by_side([lambda x: x + 1, lambda x: 2 * x], 3, most=2)
    [4, 6]
    """
    with ThreadPoolExecutor(min(most, machine.usable_cores())) as pool:
        futures = [pool.submit(in_64_bits, function, asked) for function in functions]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def record(command: str, start: float, **more: str) -> dict[str, str]:
    """Return how a page was made, by name, for its last section.

    Args:
      command: that made it.
      start: ``time.monotonic()`` at its beginning.
      more: what else is to be said, behind the command.
    """
    environment = provenance.environment()
    return {
        "Command": command, **more,
        "Time": f"{time.monotonic() - start:.0f} s, compiling included",
        "Versions": ", ".join(f"{k} {v}" for k, v in environment["versions"].items()),
        "Machine": f"{environment['cpu']}, {', '.join(environment['devices'])}",
        "Commit": environment["commit"] or "unknown",
    }  # fmt: skip
