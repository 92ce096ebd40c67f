"""What a person sees while a grid trains: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Concatenate, ParamSpec

from rich.console import Console
from rich.live import Live
from rich.table import Table

P = ParamSpec("P")


def _may_fail(
    show: Callable[Concatenate[Progress, P], None],
) -> Callable[Concatenate[Progress, P], None]:
    """Let a display go blind where it fails: what it shows goes on without it."""

    @functools.wraps(show)
    def shown(self: Progress, *arguments: P.args, **named: P.kwargs) -> None:
        if self.blind:
            return
        try:
            show(self, *arguments, **named)
        except (Exception, SystemExit):  # rich exits where nobody reads
            self.blind = True

    return shown


class TimeLeft:
    """Estimates the rest of a grid from the work done per training second; compiling,
    evaluating and saving are left out.

    Work is in floating-point operations, so that cells of different size count as what they are.
    A run that is left and taken up again counts once.

    >>> left = TimeLeft(total=400.0)
    >>> left.reached(["a", "b"], 50.0)  # done before
    >>> left.reached(["a", "b"], 100.0, seconds=2.0)
    >>> str(left)  # half of the work, at 50 a second
    '0:04'
    """

    def __init__(self, total: float):
        self._total = total
        self._done: dict[str, float] = {}
        self._worked = 0.0
        self._seconds = 0.0

    def reached(self, runs: Iterable[str], work: float, seconds: float = 0.0) -> None:
        """Note the work done so far on each of some runs, and the seconds of it just now.

        Args:
          runs: names, of runs that stand equally far.
          work: floating-point operations of one of them, from its start.
          seconds: 0 for what was done before.
        """
        for run in runs:
            before = self._done.get(run, 0.0)
            self._done[run] = max(work, before)
            self._worked += (self._done[run] - before) * (seconds > 0)
        self._seconds += seconds

    def __str__(self) -> str:
        if not self._worked:
            return "?"
        rest = self._total - math.fsum(self._done.values())
        return duration(rest * self._seconds / self._worked)


def duration(seconds: float) -> str:
    """Return a duration as people say it.

    >>> duration(75), duration(3700)
    ('1:15', '1:01:40')
    """
    total = max(0, round(seconds))
    hours, minutes, rest = total // 3600, total // 60 % 60, total % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _loss(values: list[float | None]) -> str:
    """Mean of the finite values; the others are said to be lost."""
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if not finite:
        return "-" if not values else "not finite"
    return f"{sum(finite) / len(finite):.4f}"


class Progress:
    """Rows of cohorts: step, losses (means over the runs), tokens/s, time left."""

    COLUMNS = ("cohort", "runs", "step", "train loss", "validation loss", "tokens/s", "time left")

    def __init__(self, names: list[str], live: bool | None = None, console: Console | None = None):
        self._console = console or Console(file=sys.stderr)
        self._live_wanted = self._console.is_terminal if live is None else live
        self._rows = {name: [name, "", "waiting", "", "", "", ""] for name in names}
        self._width = max((len(name) for name in names), default=0)
        self._live: Live | None = None
        self._last_line = 0.0
        self.blind = False

    def __enter__(self) -> Progress:
        if self._live_wanted:
            self._begin()
        return self

    @_may_fail
    def _begin(self) -> None:
        self._live = Live(get_renderable=self._table, console=self._console, refresh_per_second=4)
        self._live.__enter__()

    @_may_fail
    def _end(self) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._end()

    def _table(self) -> Table:
        table = Table(*self.COLUMNS, title="normjax")
        for row in self._rows.values():
            table.add_row(*row)
        return table

    @_may_fail
    def say(self, text: str) -> None:
        """Print one line, above the table where there is one."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @_may_fail
    def state(self, name: str, runs: str, text: str) -> None:
        """Show what a cohort is doing besides training: compiling, resumed, done before."""
        self._rows[name][1:3] = [runs, text]
        if self._live is None:
            self.say(f"{name:<{self._width}}  {text}")

    @_may_fail
    def training(
        self, name: str, step: int, steps: int, train: list[float | None],
        validation: list[float | None], tokens_per_s: float | None, left: str, evaluated: bool,
    ) -> None:  # fmt: skip
        """Show how far a cohort is; in plain lines only evaluations and every ten seconds."""
        row = self._rows[name]
        row[2:] = [
            f"{step}/{steps}", _loss(train) if train else row[3],
            _loss(validation) if validation else row[4],
            f"{tokens_per_s:,.0f}" if tokens_per_s else row[5], left if step < steps else "",
        ]  # fmt: skip
        now = time.monotonic()
        if self._live is None and (evaluated or now - self._last_line > 10):
            self._last_line = now
            self.say(
                f"{name:<{self._width}}  step {row[2]:<10} train {row[3]:<8}"
                f" validation {row[4]:<8} {row[5]:>9} tokens/s  {left} left"
            )
