"""A prediction in a workdir: stored once, before the first step, with its time and its hash.

``prediction.json`` holds what was expected, when it was stored, how many steps the workdir's runs
had taken then, and the SHA-256 of the grid that it is about. It is sealed, and its seal is written
into ``grid.json`` too. A record that was edited, replaced, removed or added later is noticed;
whoever edits both files with care is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normjax.errors import UserError
from normjax.predictions.prediction import Prediction, from_json, to_json
from normjax.runs import files
from normjax.runs.run_folder import RunFolder

FORMAT = 2
FILE = "prediction.json"


@dataclass(frozen=True)
class Stored:
    """A workdir's prediction read back; ``problem`` says in a sentence why it is not to be scored.

    Where there is a problem, ``prediction`` and ``record`` may be missing.
    """

    prediction: Prediction | None
    record: dict[str, Any]
    problem: str = ""


def steps_taken(workdir: Path) -> int:
    """Return the furthest step that any run of a workdir has taken, by any trace of it."""
    most = 0
    runs = workdir / "runs"
    for folder in runs.iterdir() if runs.is_dir() else ():
        run = RunFolder(folder)
        most = max([most, run.value("step") or 0, *(line["step"] for line in run.metrics())])
        for saved in (*folder.glob("checkpoints/*"), *folder.glob("quarantine/*")):
            number = saved.name.split(".")[0].split("-")[0]
            most = max(most, int(number)) if number.isdecimal() else most
    return most


def check(workdir: Path, argument: str, prediction: Prediction | None, grid: str) -> Stored | None:
    """Find out whether a prediction may be stored; return the one that already is, if the same.

    Args:
      workdir: the folder, which may not exist yet.
      argument: what messages start with, such as ``--predict=mine.txt``.
      prediction: what is to be stored; None asks only whether one may be.
      grid: SHA-256 of what the grid asks.

    Raises:
      UserError: a run has taken a step, or another prediction is stored.
    """
    path = workdir / FILE
    steps = steps_taken(workdir)
    another = "; predict in a new --workdir, or leave out --predict to go on here"
    if not path.exists():
        if steps or _registered(workdir):
            why = f"has runs that took {steps} steps" if steps else "held one that is gone"
            raise UserError(
                f"{argument}: {workdir} {why}, and a prediction comes before the first{another}"
            )
        return None
    stored = _read(path)
    if stored.problem or stored.prediction is None:
        raise UserError(f"{argument}: {path} {stored.problem}{another}")
    if steps and _registered(workdir) != stored.record["seal"]:
        raise UserError(f"{argument}: {path} was not stored before the first step{another}")
    if stored.record.get("grid_sha256") != grid:
        raise UserError(
            f"{argument}: {path} was stored for another configuration of this grid{another}"
        )
    if prediction is not None and prediction != stored.prediction:
        when = stored.record.get("stored")
        raise UserError(
            f"{argument}: {path} holds another prediction, stored {when}, and it cannot be"
            f" changed{another}"
        )
    return stored


def settle(
    workdir: Path, argument: str, prediction: Prediction | None, grid: str
) -> dict[str, str] | None:
    """Store a prediction unless it is; return what grid.json says of the one that is stored.

    Without a prediction, what was stored earlier stays. To be called with the workdir's lock held,
    before the first step.

    Raises:
      UserError: as :func:`check`.
    """
    path = workdir / FILE
    if prediction is None:
        known = _registered(workdir)
        if known is None and path.exists() and not steps_taken(workdir):
            stored = _read(path)  # a kill came between the two files
            known = None if stored.problem else stored.record["seal"]
        return {"sha256": known} if known else None
    stored = check(workdir, argument, prediction, grid)
    if stored is not None:
        return {"sha256": stored.record["seal"]}
    record = {
        "format": FORMAT,
        "stored": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps_taken": steps_taken(workdir),
        "source": argument,
        **to_json(prediction),
        "grid_sha256": grid,
    }
    return {"sha256": files.write_sealed(path, record)}


def read_stored(workdir: Path, plan: dict[str, Any]) -> Stored | None:
    """Return a workdir's prediction as a report may use it, or None where there never was one.

    Args:
      workdir: the folder.
      plan: its grid.json.
    """
    path = workdir / FILE
    registered = _hash_of(plan)
    if not path.exists():
        if registered is None:
            return None
        return Stored(None, {}, "is gone: it was stored, and the file has been removed since")
    stored = _read(path)
    if stored.problem:
        return stored
    if registered is None:
        problem = "was not stored by this program before the runs began"
    elif registered != stored.record["seal"]:
        problem = "was changed after it was stored"
    elif stored.record.get("grid_sha256") != plan.get("identity"):
        problem = "was stored for another configuration of this grid than the one that ran"
    else:
        return stored
    return Stored(stored.prediction, stored.record, problem)


def _registered(workdir: Path) -> str | None:
    return _hash_of(files.read_object(workdir / "grid.json") or {})


def _hash_of(plan: dict[str, Any]) -> str | None:
    entry = plan.get("prediction")
    return str(entry["sha256"]) if isinstance(entry, dict) and entry.get("sha256") else None


def _read(path: Path) -> Stored:
    try:
        record = files.read_sealed(path) or {}
        if record.get("format") != FORMAT:
            return Stored(None, {}, f"has format {record.get('format')!r}, not {FORMAT}")
        return Stored(from_json(record), record)
    except ValueError:  # a UserError too
        return Stored(None, {}, "was changed after it was stored")
