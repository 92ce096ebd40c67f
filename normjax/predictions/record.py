"""A prediction in a workdir: stored once, before the first step, with its time and its hash.

``prediction.json`` holds what was expected, when it was stored, how many steps the workdir's runs
had taken then, the SHA-256 of the grid that it is about, what that grid was to run, and 16 random
bytes. It is sealed, and its seal is written into ``grid.json`` too. The seeds of the runs that it
is scored by are drawn from the seal: runs from before it have others, but for one chance in 10^9,
and so has another prediction, or the same one in another workdir.

A record that was edited, replaced, removed or added later is noticed, and so are runs with other
seeds or that had begun before it was stored, by the clock of the machine. What is not noticed:

- whoever writes the sealed files or this program anew with care, or sets the clock;
- several predictions in several workdirs, or one workdir deleted after another, of which the best
  is shown. Runs of the seeds drawn, trained anywhere once they are known, tell which;
- what was known before: other seeds of the same grid tell nearly everything about these.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normjax.errors import UserError
from normjax.predictions.prediction import Prediction, from_json, to_json
from normjax.runs import files
from normjax.runs.run_folder import TUNING, RunFolder, run_folder

FORMAT = 3
FILE = "prediction.json"
FIRST, LAST = 2**20, 2**31 - 1 - 10_000
"""The first of the seeds drawn: above those of tuning, and the most seeds of a grid still fit."""
_SHAPE = {"stored": str, "grid_sha256": str, "planned": {"arms": [str], "seeds": int}}


@dataclass(frozen=True)
class Planned:
    """What a grid is to run when a prediction of it is stored: its variants, seeds for each."""

    arms: tuple[str, ...]
    seeds: int


@dataclass(frozen=True)
class Stored:
    """A workdir's prediction read back; ``problem`` says in a sentence why it is not to be scored.

    Where there is a problem, ``prediction`` and ``record`` may be missing.
    """

    prediction: Prediction | None
    record: dict[str, Any]
    problem: str = ""

    @property
    def planned(self) -> Planned:
        """What the grid was to run when it was stored."""
        planned = self.record["planned"]
        return Planned(tuple(planned["arms"]), planned["seeds"])


def first_seed(seal: str) -> int:
    """Return the first of the seeds that a prediction's runs have; the others follow it.

    >>> first_seed("a") == first_seed("a") != first_seed("b")
    True
    """
    drawn = int(files.sha256(files.canonical({"first seed of": seal})), 16)
    return FIRST + drawn % (LAST - FIRST + 1)


def seal_of(workdir: Path) -> str | None:
    """Return the seal of the prediction that a workdir's grid goes on with, None without one."""
    path, known = workdir / FILE, _registered(workdir)
    if known is None and path.exists() and not steps_taken(workdir):
        stored = _read(path)  # a kill came between the two files
        known = None if stored.problem else stored.record["seal"]
    return known


def steps_taken(workdir: Path) -> int:
    """Return the furthest step that any run of a workdir has taken, by any trace of it."""
    most = 0
    folders = [*workdir.glob("runs/*"), *workdir.glob("*/runs/*")]
    for folder in folders:
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
    workdir: Path, argument: str, prediction: Prediction | None, grid: str, planned: Planned
) -> dict[str, Any] | None:
    """Store a prediction unless it is; return what grid.json says of the one that is stored.

    Without a prediction, what was stored earlier stays. To be called with the workdir's lock held,
    before the first step, and before the seeds of the runs are settled.

    Raises:
      UserError: as :func:`check`.
    """
    if prediction is None:
        seal = seal_of(workdir)
        return None if seal is None else _entry(seal)
    stored = check(workdir, argument, prediction, grid)
    if stored is not None:
        return _entry(stored.record["seal"])
    record = {
        "format": FORMAT,
        "stored": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps_taken": steps_taken(workdir),
        "source": argument,
        **to_json(prediction),
        "grid_sha256": grid,
        "planned": {"arms": list(planned.arms), "seeds": planned.seeds},
        "nonce": secrets.token_hex(16),
    }
    return _entry(files.write_sealed(workdir / FILE, record))


def _entry(seal: str) -> dict[str, Any]:
    return {"sha256": seal, "first_seed": first_seed(seal)}


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
        problem = _wrong_seeds(plan, registered) or _begun_before(workdir, plan, stored.record)
    return Stored(stored.prediction, stored.record, problem)


def _wrong_seeds(plan: dict[str, Any], seal: str) -> str:
    """Say so where the runs of a plan have other seeds than those drawn from a prediction."""
    seeds, first = {run["seed"] for run in plan.get("runs", [])}, first_seed(seal)
    if seeds == set(range(first, first + len(seeds))):
        return ""
    return "is not what the seeds of these runs were drawn from, so they may be older than it"


def _begun_before(workdir: Path, plan: dict[str, Any], kept: dict[str, Any]) -> str:
    """Say so where a run of a plan, or one that chose its rates, had begun before a record."""
    folders = [run_folder(workdir, run["id"]) for run in plan.get("runs", [])]
    if plan.get("tuning"):
        folders += sorted(workdir.glob(f"{TUNING}/runs/*"))
    stored = _time(kept["stored"])
    for run in map(RunFolder, folders):
        if not run.segments:
            continue
        started = run.segments[0]["environment"].get("started")
        time = _time(started)
        if time is None or stored is None:
            return f"cannot be shown to be older than the run {run.path.name}: a time is missing"
        if time < stored:
            return f"was stored at {kept['stored']}, after the run {run.path.name} began, {started}"
    return ""


def _time(value: Any) -> datetime | None:
    """Return a time with its zone; None for anything else, which cannot be compared."""
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo else None


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
        files.check_shape(record, _SHAPE)
        return Stored(from_json(record), record)
    except ValueError:  # a UserError too
        return Stored(None, {}, "was changed after it was stored")
