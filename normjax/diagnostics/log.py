"""``diagnostics.jsonl`` in a run folder: one line per measured step. No JAX is imported here.

    {"step": 16, "values": {"residual/rms_before": [[0.02, 0.31], ...], "loss/value": 3.1, ...}}

Arrays are nested lists, the layer axis first. Numbers that are not finite are the strings "NaN",
"Infinity" and "-Infinity": strict JSON, and a spike stays visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from normjax.runs.run_folder import RunFolder

FILE = "diagnostics.jsonl"


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
