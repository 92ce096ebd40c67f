"""A workdir read into :class:`normjax.reporting.results.Results`."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from normjax.errors import UserError
from normjax.reporting import statistics
from normjax.reporting.results import (
    RATES,
    PlannedArm,
    Rates,
    Results,
    RunResult,
    Variant,
    difference,
    finite,
)
from normjax.runs import files
from normjax.runs.run_folder import FORMAT, RunFolder, run_folder

_RATES = dict.fromkeys(RATES, float)
_ARM = {
    "name": str, "series?": str, "x?": float, "title?": str, "description?": str, "changes?": dict,
    "parameters?": float, "flops_per_token?": float, "rows?": dict, "colour?": str,
    "condition?": str, "setting?": dict,
}  # fmt: skip
_SHAPE = {
    "arms": [_ARM],
    "runs": [{"id": str, "arm": str, "seed": int, "steps": int, **_RATES}],
    **{f"{name}?": str for name in ("experiment", "preset", "command", "title", "question",
                                    "hypothesis", "baseline", "identity")},
    "notes?": [str], "x?": {"name": str, "label": str, "scale?": str}, "rows?": dict,
    "config?": {f"{name}?": dict for name in ("model", "train", "verdict")},
    "corpus?": {
        **{f"{name}?": str for name in ("name", "description", "vocabulary", "fingerprint")},
        **{f"{name}?": float for name in ("vocabulary_size", "train_tokens", "held_out_tokens",
                                          "unigram_loss", "bigram_loss", "uniform_loss",
                                          "optimum_loss")},
        "files?": {"words?": str},
    },
    "evaluation?": {"windows?": int, "tokens?": int, "description?": str},
    "task?": {
        **dict.fromkeys(("name", "title", "description", "formula", "source"), str),
        "scored_fraction": float, "optimum": dict, "unknown": {"*": str}, "parameters": dict,
    },
    "prediction?": {"sha256": str, "first_seed": int},
    "tuning?": {
        "rates": [float], "rungs": [int], "seeds": int, "first_seed": int,
        "runs": int, "run_steps": int, "seconds": float,
        "chosen": {"*": {"rate": float, "tried": [list]}},
    },
}  # fmt: skip
"""What pages are made from, as the runner writes it."""


def load(workdir: Path) -> Results:
    """Read a workdir.

    Args:
        workdir: folder with ``grid.json`` and ``runs/``.

    Returns:
        The results with every planned arm and run.

    Raises:
        UserError: if there is no usable ``grid.json``, or a link below the workdir.
    """
    workdir = Path(workdir)
    files.refuse_links(workdir)
    plan = _plan(workdir)
    arms = tuple(_arm(entry) for entry in plan["arms"])
    runs = tuple(_run(workdir, entry) for entry in plan["runs"])
    for run in runs:
        if all(run.arm != arm.name for arm in arms):
            raise UserError(
                f"workdir={workdir}: run {run.id} belongs to arm {run.arm!r}, which grid.json "
                "does not list; start the experiment again in a new workdir"
            )
    results = Results(workdir, plan, arms, runs)
    return dataclasses.replace(results, variants=tuple(_variants(results)))


def part(results: Results, arms: Container[str], seeds: Container[int]) -> Results:
    """Return results of some arms and seeds alone, as if no others had been planned."""
    found = dataclasses.replace(
        results, arms=tuple(arm for arm in results.arms if arm.name in arms),
        runs=tuple(run for run in results.runs if run.arm in arms and run.seed in seeds),
    )  # fmt: skip
    return dataclasses.replace(found, variants=tuple(_variants(found)))


def _plan(workdir: Path) -> dict[str, Any]:
    try:
        plan = files.read_sealed(workdir / "grid.json")
    except (ValueError, OSError) as error:
        raise UserError(
            f"workdir={workdir}: grid.json cannot be read ({error}); "
            "start the experiment again in a new workdir"
        ) from error
    if not isinstance(plan, dict):
        raise UserError(
            f"workdir={workdir}: holds no grid.json, so there is nothing to report; "
            "pass the workdir of an experiment that was started"
        )
    if plan.get("format") != FORMAT:
        raise UserError(
            f"workdir={workdir}: grid.json has format {plan.get('format')!r}, this version reads "
            f"format {FORMAT}; make the report with the version that ran the experiment"
        )
    try:
        files.check_shape(plan, _SHAPE)
    except UserError as error:
        raise UserError(
            f"workdir={workdir}: grid.json cannot be used: {error}; "
            "start the experiment again in a new workdir"
        ) from None
    return plan


def _arm(entry: dict[str, Any]) -> PlannedArm:
    parameters = finite(entry.get("parameters"))
    return PlannedArm(
        name=str(entry["name"]), series=str(entry.get("series") or entry["name"]),
        x=finite(entry.get("x")), title=str(entry.get("title") or entry["name"]),
        description=str(entry.get("description") or ""), changes=dict(entry.get("changes") or {}),
        parameters=None if parameters is None else int(parameters),
        flops_per_token=finite(entry.get("flops_per_token")),
        rows=dict(entry.get("rows") or {}),
        colour=str(entry.get("colour") or ""), condition=str(entry.get("condition") or ""),
    )  # fmt: skip


def _run(workdir: Path, entry: dict[str, Any]) -> RunResult:
    run = RunFolder(run_folder(workdir, entry["id"]), entry["id"])
    problems, evaluations, time = _read(run)
    last = evaluations[-1]["step"] if evaluations else 0
    return RunResult(
        id=run.path.name, arm=str(entry["arm"]), seed=int(entry["seed"]),
        rates=Rates(steps=int(entry["steps"]), **{name: float(entry[name]) for name in RATES}),
        state=run.state, step=max(run.value("step") or 0, last),
        diverged_at=run.value("diverged_at"), reason=run.value("reason"),
        evaluations=evaluations,
        time={k: v for k in _TIMES if (v := finite(time.get(k))) is not None},
        segments=tuple(run.segments), problems=problems,
    )  # fmt: skip


def _read(run: RunFolder) -> tuple[tuple[str, ...], tuple[dict[str, Any], ...], dict[str, Any]]:
    """Damage to one file must not cost the whole report: it is said instead."""
    try:
        return tuple(run.problems()), tuple(run.metrics()), run.value("time") or {}
    except UserError as error:
        return (str(error),), (), {}


_TIMES = ("compile_s", "train_s", "peak_memory_mb")


def _variants(results: Results) -> Iterable[Variant]:
    drafts = []
    for arm in results.arms:
        groups: dict[Rates | None, list[RunResult]] = {}
        for run in results.runs:
            if run.arm == arm.name:
                groups.setdefault(run.rates, []).append(run)
        for rates, runs in (groups or {None: []}).items():
            known = [run for run in runs if run.final_loss is not None]
            parts = [run.parts for run in known]
            whole = parts if len({len(row) for row in parts}) == 1 else None
            losses = [run.final_loss for run in known if run.final_loss is not None]
            loss = statistics.estimate(losses, parts=whole)
            drafts.append(Variant(arm, rates, tuple(runs), loss))
    ranks = _ranks(drafts)
    found = dataclasses.replace(results, variants=tuple(drafts))
    for v in drafts:
        base = found.base_of(v) if v.arm.series != results.baseline else None
        yield dataclasses.replace(
            v, difference=None if base is None else difference(v, base),
            rank=ranks.get((v.arm.name, v.rates)), label=_label(results, v),
        )  # fmt: skip


def _ranks(variants: list[Variant]) -> dict[tuple[str, Rates | None], int]:
    """Rank within a condition and x by standing; equals share a place, unknown ones have none."""
    ranks = {}
    panels: dict[tuple[str, float | None], list[Variant]] = {}
    for v in variants:
        panels.setdefault((v.arm.condition, v.arm.x), []).append(v)
    for here in panels.values():
        order = sorted(v.standing for v in here if v.standing is not None)
        ranks |= {
            (v.arm.name, v.rates): order.index(v.standing) + 1
            for v in here if v.standing is not None
        }  # fmt: skip
    return ranks


def _label(results: Results, variant: Variant) -> str:
    """Return the series name with the x and the rates that vary, to tell variants apart."""
    extra = results.panel_title(results.panel_key(variant))
    place = (variant.arm.series, variant.arm.x, variant.arm.condition)
    same = [c for c in results.arms if (c.series, c.x, c.condition) == place]
    name = variant.arm.series if len(same) == 1 else variant.arm.name
    return f"{name}, {extra}" if extra else name
