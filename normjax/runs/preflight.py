"""What the end of a night will need, tried before its first step.

A checkpoint is written, hashed, opened again and read, where all others will be; a figure is drawn;
a temporary file is made; the disk is asked for the room that all planned checkpoints take. What
fails here fails in a second and in one line.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from normjax.errors import UserError
from normjax.reporting import drawing
from normjax.runs import estimates
from normjax.runs.grid import CohortPlan
from normjax.runs.run_folder import FINISHED, RunFolder, RunWriter, run_folder
from normjax.training.checkpoints import Checkpoints, SavedStates

PREFIX = ".preflight-"
PAGE_BYTES = 8_000_000  # a report with its figures, and the logs of a few runs


def check_room(workdir: Path, cohorts: Sequence[CohortPlan], vocabulary: int) -> None:
    """Compare the room on disk with what the checkpoints of the runs that are left will take.

    Raises:
      UserError: they cannot fit.
    """
    needed = PAGE_BYTES
    for cohort in cohorts:
        t = cohort.config.train
        left = [
            run for run in cohort.runs
            if RunFolder(run_folder(workdir, run.id), run.id).state not in FINISHED
        ]  # fmt: skip
        planned = 1 + (t.steps // t.checkpoint_every if t.checkpoint_every else 0)
        kept = min(t.keep_checkpoints + 1, planned) if t.keep_checkpoints else planned
        needed += len(left) * kept * estimates.checkpoint_bytes(cohort.model(vocabulary))
    place = next(folder for folder in (workdir.absolute(), *workdir.absolute().parents)
                 if folder.exists())  # fmt: skip
    free = shutil.disk_usage(place).free
    if needed > free:
        raise UserError(
            f"workdir={workdir}: the checkpoints and the page of this grid take about"
            f" {estimates.gigabytes(needed)}, and {estimates.gigabytes(free)} are free there; name"
            " another --workdir, or keep fewer: --config.train.keep_checkpoints=1"
        )


def check(workdir: Path) -> None:
    """Try in a workdir, which exists and is locked, what its end will need.

    Raises:
      UserError, OSError: something of it cannot be done.
    """
    check_page()
    _checkpoint(workdir)


def check_page() -> None:
    """Try what a page needs where nothing is trained: a temporary file and a figure.

    Raises:
      UserError, OSError: something of it cannot be done.
    """
    _temporary_file()
    _figure()


def _temporary_file() -> None:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"tried")
    except OSError as error:
        named = f"TMPDIR={os.environ['TMPDIR']}" if os.environ.get("TMPDIR") else "TMPDIR"
        raise UserError(
            f"{named}: no temporary file can be written ({error.strerror}); set TMPDIR to a folder"
            " with room"
        ) from None


def _figure() -> None:
    with drawing.style():
        canvas = drawing.canvas(0.5, 0.5)
        canvas.add_subplot().plot([0, 1], [0, 1])
        drawing.render(canvas, io.BytesIO(), "png", {}, dpi=20)
        drawing.render(canvas, io.BytesIO(), "svg", {})


def _checkpoint(workdir: Path) -> None:
    for stale in workdir.glob(f"{PREFIX}*"):  # of a process that was killed; this one has the lock
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=workdir))
    try:
        tree = {"tried": np.arange(4, dtype=np.float32)}
        run = RunWriter(folder)
        run.begin({"train": {"steps": 0}}, "", {}, 0, False)
        Checkpoints(run).save(0, tree)  # which reads it back
        again = SavedStates(RunFolder(folder))
        if again.steps != [0] or not np.array_equal(again.restore(0, tree)["tried"], tree["tried"]):
            raise UserError(
                f"workdir={workdir}: a checkpoint written there is not what is read back; name"
                " another --workdir"
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
