"""What runs measure, in their folders: sampled steps, and extremes of all steps. Without JAX.

``diagnostics.jsonl`` has one line per sampled step:

    {"step": 16, "values": {"residual/rms_before": [[0.02, 0.31], ...], "loss/value": 3.1, ...}}

``extremes.jsonl`` has one line per evaluation, of all steps before it; the last one counts. Fields
are those of ``normjax.training.extremes.Extremes``; "expected" says what the placement's row has as
the start of a value, where its bands are to be taken relative to that.

    {"step": 100, "values": {"loss/value": {"first": 4.2, "low": 3.1, "low_step": 97, ...}, ...},
     "expected": {"branch/stream_ratio": [[1.0, 1.0], ...]}}

Arrays are nested lists, the layer axis first. Numbers that are not finite are the strings "NaN",
"Infinity" and "-Infinity": strict JSON, and a spike stays visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from normjax.runs.run_folder import RunFolder

FILE, EXTREMES_FILE = "diagnostics.jsonl", "extremes.jsonl"


def line(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the line of what was measured before a step, {name: array or number}."""
    return {"step": step, "values": {k: _listed(np.asarray(v)) for k, v in values.items()}}


def read_diagnostics(run: str | Path | RunFolder) -> list[tuple[int, dict[str, np.ndarray]]]:
    """Return [(step, {name: float64 array})] of a run, by step; empty where nothing was measured.

    Damaged lines are passed over; of a repeated step the last line counts: a resumed run measures
    the steps since its checkpoint again and gets the same numbers.
    """
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    return samples(folder.lines(FILE))


def extremes_line(
    step: int, values: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the line of the extremes of all steps before a step."""
    listed = {name: line(0, fields)["values"] for name, fields in values.items()}
    return {"step": step, "values": listed, "expected": line(0, expected)["values"]}


def extremes_of(
    line: Mapping[str, Any],
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return the extremes {name: {field: array}} and what is expected in a line; empty if none."""
    values = line.get("values")
    found = {k: _arrays(v) for k, v in values.items()} if isinstance(values, dict) else {}
    if None in found.values():
        return {}, {}
    return {k: v for k, v in found.items() if v}, _arrays(line.get("expected")) or {}


def read_extremes(run: RunFolder) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return a run's newest extremes and what is expected; see :func:`extremes_of`."""
    lines = run.lines(EXTREMES_FILE)
    return extremes_of(lines[-1]) if lines else ({}, {})


def samples(lines: Iterable[Mapping[str, Any]]) -> list[tuple[int, dict[str, np.ndarray]]]:
    """Return what lines of this kind hold."""
    return [(row["step"], found) for row in lines if (found := _arrays(row.get("values")))]


def _listed(array: np.ndarray) -> Any:
    if array.ndim:
        return [_listed(row) for row in array]
    value = float(array)
    if np.isnan(value):
        return "NaN"
    if np.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    # Nine digits give every float32 back.
    return value if array.dtype == np.float64 else float(f"{value:.9g}")


def _arrays(values: Any) -> dict[str, np.ndarray] | None:
    if not isinstance(values, dict):
        return None
    try:
        return {name: np.array(_numbers(value), np.float64) for name, value in values.items()}
    except (TypeError, ValueError):  # not numbers, or a ragged list
        return None


def _numbers(value: Any) -> Any:
    return [_numbers(v) for v in value] if isinstance(value, list) else float(value)
