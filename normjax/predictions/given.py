"""What ``--predict`` names: a file, a prediction that comes with the program, or a question."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from normjax import named_files
from normjax.errors import UserError, suggest
from normjax.predictions import asking, parsing, record
from normjax.predictions.prediction import Candidate, Prediction

ASK = "ask"
MOST_BYTES = 1 << 20
"""Of a prediction's file: some thousand names with a long reason."""
_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return the names of the predictions that come with the program."""
    return sorted(path.stem for path in _FOLDER.glob("*.txt"))


def prepare(
    value: str, candidates: Sequence[Candidate], workdir: Path, grid: str, dry_run: bool = False
) -> Prediction | None:
    """Return the prediction that ``--predict=VALUE`` states; nothing is written.

    Asked for, it is asked only where none is stored yet and only if it is no dry run.

    Args:
      value: a path, a name, "ask", or "" for none.
      candidates: what may be named.
      workdir: where it is going to be stored.
      grid: SHA-256 of what the grid asks.
      dry_run: only find out whether anything is wrong.

    Raises:
      UserError: it cannot be read, understood or stored.
    """
    if not value:
        return None
    argument = f"--predict={value}"
    if value != ASK:
        prediction = parsing.parse(read(value), argument, candidates)
        record.check(workdir, argument, prediction, grid)
        return prediction
    stored = record.check(workdir, argument, None, grid)
    if stored is not None:
        return stored.prediction
    if not sys.stdin.isatty():
        raise UserError(
            f"{argument}: there is no terminal to ask on; pass a file, --predict=FILE, or"
            f" --predict={names()[0]}"
        )
    return None if dry_run else asking.ask(candidates, argument)


def read(value: str) -> str:
    """Return the text of a prediction by name or path; names come first.

    Raises:
      UserError: there is no such file, or it is no UTF-8 text.
    """
    argument = f"--predict={value}"
    allowed = f"pass a file, {ASK}, or {' or '.join(names())}"
    path = Path(os.path.expanduser(value))
    if value in names():
        path = _FOLDER / f"{value}.txt"
    try:
        return named_files.read(path, argument, MOST_BYTES, allowed).decode()
    except FileNotFoundError:
        close = suggest(value, [ASK, *names()])
        raise UserError(f"{argument}: no such file{close}; {allowed}") from None
    except UnicodeDecodeError:
        raise UserError(f"{argument}: not UTF-8 text; save it as UTF-8") from None
