"""Whether a workdir is what was sealed: every manifest, record, checkpoint and result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from normjax.errors import UserError
from normjax.runs import files, segments
from normjax.runs.run_folder import BEFORE, MANIFEST, RunFolder, run_folder


def check(workdir: Path) -> tuple[list[str], int]:
    """Return lines on every run of a workdir and on damaged results, and how many are damaged.

    A workdir whose experiment keeps several grids in folders of their own is checked grid by grid.

    Raises:
      UserError: it holds no grid, or a link.
    """
    files.refuse_links(workdir)
    plans = sorted(workdir.rglob("grid.json"))
    if not plans:
        raise UserError(f"--verify={workdir}: holds no grid.json; name the workdir of a grid")
    lines, bad = [], 0
    for plan in plans:
        for name, problems, more in _runs(plan):
            bad += bool(problems)
            lines.append(f"{name}: {'; '.join(problems) if problems else 'as sealed'}{more}")
    found = list(_results(workdir))
    return lines + found, bad + len(found)


def _results(workdir: Path) -> Iterator[str]:
    """Yield a line on every result of a workdir, its grids and runs that is not as sealed."""
    for path in sorted(workdir.rglob("*.json")):
        if path.name in ("grid.json", MANIFEST, BEFORE) or {"checkpoints", "quarantine"} & {
            *path.relative_to(workdir).parts
        }:
            continue
        try:
            files.read_sealed(path)
        except ValueError as error:
            yield f"{path.relative_to(workdir)}: {error}"


def _runs(plan: Path) -> Iterator[tuple[str, list[str], str]]:
    """Yield each run's name, what is wrong, and what else is to be known."""
    try:
        grid = files.read_sealed(plan) or {}
        planned = [str(run["id"]) for run in grid["runs"]]
    except (ValueError, KeyError, TypeError) as error:
        yield str(plan), [f"cannot be used ({error})"], ""
        planned = []
    runs = plan.parent / "runs"
    there = sorted(p.name for p in runs.iterdir() if p.is_dir()) if runs.is_dir() else []
    for name in dict.fromkeys((*planned, *there)):
        run = RunFolder(run_folder(plan.parent, name), name)
        problems = run.problems() + [
            f"checkpoint {step}: {file} is not what was saved"
            for step, file in run.damaged_checkpoints().items()
        ]
        if run.manifest is None:
            yield name, problems, "" if problems else " (not begun)"
            continue
        saved = ", ".join(sorted(run.value("checkpoints"), key=int)) or "none"
        more = f" ({run.state} at step {run.value('step')}; checkpoints: {saved})"
        if hybrid := segments.said(run.segments):
            more += f"; {hybrid}"
        if name not in planned:
            more += "; grid.json does not list it"
        yield name, problems, more
