"""Run folders made up for tests, through the writer that real runs have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from normjax.diagnostics import log
from normjax.runs.run_folder import METRICS, RunWriter


def write(
    folder: Path, lines: Iterable[Mapping[str, Any]] = (), *,
    record: Mapping[str, Any] | None = None, environment: Mapping[str, Any] | None = None,
    samples: Iterable[tuple[int, Mapping[str, Any]]] = (), **changes: Any,
) -> RunWriter:  # fmt: skip
    """Make a run folder, or add to one: evaluations, diagnostics, and how the run stands.

    A record given for a folder that has one already begins another segment.
    """
    run = RunWriter(folder)
    if run.manifest is None or record is not None:
        steps = changes.get("steps", 600)
        full = {"train": {"steps": steps}, **(record or {})}
        full["train"] = {"steps": steps, **full["train"]}
        run.begin(full, "0" * 64, environment or {}, 0, False)
    for line in lines:
        run.append(METRICS, line)
    for step, values in samples:
        run.append(log.FILE, log.line(step, values))
    run.commit(**changes)
    return run
