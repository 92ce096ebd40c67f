"""results.csv, summary.csv and the table for the terminal."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from normjax.reporting.results import DIVERGED, FINISHED, RATES, Results, Run, Variant, finite
from normjax.reporting.statistics import Estimate

RESULT_COLUMNS = (
    *("run", "cell", "series", "x", "seed", *RATES, "step", "tokens", "train_loss"),
    *("validation_loss", "gradient_norm", "skipped_updates", "state", "diverged_at"),
    *("time_wall_s", "time_tokens_per_s"),
)
SUMMARY_COLUMNS = (
    *("cell", "series", "x", *RATES, "steps", "runs", "finished", "diverged", "rank"),
    *("validation_loss", "validation_loss_low", "validation_loss_high", "validation_loss_sd"),
    *("difference", "difference_low", "difference_high", "pairs", "parameters"),
)


def text(value: Any) -> str:
    """Return a CSV field: floats in their shortest exact form, None as an empty field.

    >>> text(0.1), text(None), text(3)
    ('0.1', '', '3')
    """
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return CSV text with a header line and ``\\n`` line ends."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([text(value) for value in row] for row in rows)
    return out.getvalue()


def write_text(path: Path, content: str) -> Path:
    """Write a whole UTF-8 file atomically, creating its folder."""
    return write_bytes(path, content.encode())


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a whole file atomically, creating its folder: readers see the old file or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def results_csv(results: Results) -> str:
    """Return one row per run and evaluation; a run without evaluations has one row.

    Columns that hold times stand last, so that all others of two equal runs agree byte for byte.
    """
    cells = {cell.name: cell for cell in results.cells}
    rows = []
    for run in results.runs:
        cell = cells[run.cell]
        head = (run.id, run.cell, cell.series, cell.x, run.seed, *run.rates[:3])
        for line in run.evaluations or ({},):
            rows.append((*head, *_evaluation(run, line)))
    return csv_text(RESULT_COLUMNS, rows)


def _evaluation(run: Run, line: dict[str, Any]) -> tuple[Any, ...]:
    return (
        line.get("step"),
        line.get("tokens"),
        finite(line.get("train/loss")),
        finite(line.get("validation/loss")),
        finite(line.get("gradient/norm")),
        line.get("update/skipped"),
        run.state,
        run.diverged_at,
        finite(line.get("time/wall_s")),
        finite(line.get("time/tokens_per_s")),
    )


def summary_csv(results: Results) -> str:
    """Return one row per variant, in plan order."""
    return csv_text(SUMMARY_COLUMNS, (_summary(variant) for variant in results.variants))


def _summary(variant: Variant) -> tuple[Any, ...]:
    cell, rates = variant.cell, variant.rates or (None,) * 4
    loss, change = variant.loss, variant.difference or Estimate(0)
    return (
        *(cell.name, cell.series, cell.x, *rates, len(variant.runs)),
        *(variant.count(FINISHED), variant.count(DIVERGED), variant.rank),
        *(loss.mean, loss.low, loss.high, loss.sd),
        *(change.mean, change.low, change.high, change.n, cell.parameters),
    )


def number(value: float | None, signed: bool = False, digits: int = 3) -> str:
    """Return a number with fixed decimals and a true minus sign; a dash for None.

    >>> number(1.23456), number(0.5, signed=True), number(None)
    ('1.235', '+0.500', '–')
    """
    if value is None:
        return "–"
    shown = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    return shown.replace("-", "−")


def span(estimate: Estimate | None, signed: bool = False) -> str:
    """Return ``low to high`` of an interval; a dash where there is none."""
    if estimate is None or estimate.low is None:
        return "–"
    return f"{number(estimate.low, signed)} to {number(estimate.high, signed)}"


def plain(content: str) -> str:
    """Return text with the report's own signs in ASCII; letters of the user's names stay."""
    swaps = {
        "−": "-",
        "±": "+/-",
        "–": "-",
        "×": "x",
        "“": '"',
        "”": '"',
        "’": "'",
        "…": "...",
        "\u00a0": " ",
    }
    return content.translate(str.maketrans(swaps))


def ranking(results: Results) -> str:
    """Return the ranked variants as an aligned plain-text table."""
    titles = ("rank", "variant", "loss", "95 % interval", "vs baseline", "95 % interval", "runs")
    rows = [titles]
    for variant in results.ranked():
        change = variant.difference
        rows.append(
            (
                "-" if variant.rank is None else str(variant.rank),
                variant.label,
                number(variant.loss.mean),
                span(variant.loss),
                number(change.mean if change else None, signed=True),
                span(change, signed=True),
                runs_text(variant),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    lines = ("  ".join(f.ljust(w) for f, w in zip(row, widths, strict=True)) for row in rows)
    return plain("\n".join(line.rstrip() for line in lines))


def runs_text(variant: Variant) -> str:
    """Return how the runs of a variant ended, such as ``2 of 3, 1 diverged``."""
    finished, diverged = variant.count(FINISHED), variant.count(DIVERGED)
    open_runs = len(variant.runs) - finished - diverged
    parts = [f"{finished} of {len(variant.runs)}"]
    if diverged:
        parts.append(f"{diverged} diverged")
    if open_runs:
        parts.append(f"{open_runs} unfinished")
    return ", ".join(parts)
