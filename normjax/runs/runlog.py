"""The run folder: what a run is, where it ran, what it measured, how it ended.

JSON files are written whole (temporary file, fsync, rename); metrics are appended line by line, so
a kill at any moment costs at most a torn last line, which the reader ignores and the next writer
cuts off. No JAX is imported here: the folders are read on any laptop.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

FORMAT = 2
"""Of grid.json and of run folders; another one is refused."""


def strict(value: Any) -> Any:
    """Return a value as :func:`write_json` writes it: NaN and infinity as None, tuples as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return value


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, atomically: readers see the old file or the new one, never half.

    Non-finite floats become null.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(strict(value), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """Return the JSON value of a file, or None where the file does not exist."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object of a file, or None where it is missing or damaged."""
    try:
        value = read_json(path)
    except ValueError:  # not JSON, or not UTF-8
        return None
    return value if isinstance(value, dict) else None


def append_metrics(run_dir: Path, line: dict[str, Any]) -> None:
    """Append one JSON line to ``metrics.jsonl``, cutting off a torn line left by a kill."""
    append_line(run_dir / "metrics.jsonl", line)


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append one JSON line to a file, cutting off a torn line left by a kill.

    Non-finite floats become null.
    """
    text = json.dumps(strict(line), allow_nan=False) + "\n"
    with open(path, "a+b") as file:
        _cut_torn_line(file)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def _cut_torn_line(file: Any) -> None:
    """Truncate an open file to the end of its last whole line."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    whole = file.read().rfind(b"\n") + 1
    file.truncate(whole)
    file.seek(0, os.SEEK_END)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run in order of step; see :func:`read_lines`."""
    return read_lines(run_dir / "metrics.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that have a step, in its order; of a repeated step the last.

    A resumed run repeats the steps since its checkpoint with the same numbers. Torn lines are
    ignored; a missing file gives an empty list.
    """
    if not path.exists():
        return []
    by_step: dict[int, dict[str, Any]] = {}
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            by_step[line["step"]] = line
    return [by_step[step] for step in sorted(by_step)]


def run_folder(workdir: Path, run_id: str) -> Path:
    """Return the folder of a run in a workdir."""
    return workdir / "runs" / run_id


def run_state(run_dir: Path) -> str:
    """Return how a run stands: "missing", "running", "interrupted", "done" or "diverged"."""
    path = run_dir / "status.json"
    if not path.exists():
        return "missing"
    # Damaged: what there is of the run is found from its checkpoints.
    return (read_object(path) or {}).get("state", "interrupted")


FINISHED = ("done", "diverged")
