"""Workdirs with made-up but realistic numbers, for the tests of the report."""

from __future__ import annotations

import csv
import math
import random
import zlib
from pathlib import Path
from typing import Any

import run_folders

from normjax.predictions import record
from normjax.predictions.prediction import Prediction
from normjax.reporting import loading
from normjax.reporting.results import Results
from normjax.runs import files
from normjax.runs.run_folder import FORMAT, MANIFEST

ABLATION = {
    # arm: (title, description, changes, final loss, rate of descent)
    "full": ("the full model", "Nothing is removed.", {}, 1.92, 6.0),
    "no-attention": (
        "minus attention", "Each place sees only its own character.",
        {"model.attention": "none"}, 2.47, 9.0,
    ),
    "no-mlp": ("minus MLP", "Attention only.", {"model.mlp": "none"}, 2.13, 5.0),
    "no-positions": (
        "minus positions", "Attention without positions.", {"model.positions": "none"}, 2.05, 4.5
    ),
    "no-norm": (
        "minus normalization", "No norm anywhere.", {"model.placement": "none"}, 1.97, 4.0
    ),
    "no-residual": (
        "minus residual", "Each sub-layer replaces its input.", {"model.residual": False}, 2.9, 2.5
    ),
    "post-norm": (
        "post-norm", "The norm stands after the addition.", {"model.placement": "post"}, 1.925, 5.0
    ),
}  # fmt: skip
CONFIG = {
    "model": {
        "depth": 4, "width": 64, "heads": 4, "attention": "softmax", "mlp": "gelu",
        "positions": "rotary", "norm": "rmsnorm", "placement": "pre", "residual": True,
        "final_norm": "auto", "tied": True,
    },
    "data": {"corpus": "plays", "vocabulary": "char", "window": 64},
    "train": {"steps": 600, "batch": 12, "learning_rate": 0.003, "seeds": [0, 1, 2]},
}  # fmt: skip
START, UNIGRAM, UNIFORM = 4.52, 3.31, math.log(84)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def finals(
    workdir: Path, arms: list[dict[str, Any]], losses: dict[str, list[float | None]], **more: Any
) -> Results:
    """A grid with exact final losses by arm and seed; None stands for a diverged run."""
    runs = [planned(c["name"], s) for c in arms for s in range(len(losses[c["name"]]))]
    files.write_sealed(workdir / "grid.json", plan(arms, runs, **more))
    for run in runs:
        loss = losses[run["arm"]][run["seed"]]
        folder = workdir / "runs" / run["id"]
        state = {"state": "done"} if loss is not None else {"state": "diverged", "diverged_at": 7}
        line = {"step": 600, "validation/loss": loss, "test/loss": loss}
        run_folders.write(folder, [line], **state, step=600, steps=600)
    return loading.load(workdir)


def rows(changes: dict[str, Any]) -> dict[str, Any]:
    """What the rows of an arm record, as far as the words and the diagram read it."""
    place = changes.get("model.placement", "pre")
    slots = {"pre_norm": None, "branch_norm": None, "skip_norm": None, "post_norm": None}
    slots |= {"pre": {"pre_norm": "model"}, "post": {"post_norm": "model"}}.get(place, {})
    keep = 1.0 if changes.get("model.residual", True) else 0.0
    own = slots | {"scale": 1.0, "keep": keep, "write": 1.0, "read": None, "inner_norms": []}
    actions = {"none": "removing normalization", "post": "normalizing after the addition"}
    shown = {"name": place, "title": place, "action": actions.get(place, "")}
    return {
        "placement": {"attention": own, "mlp": own, "shown": shown}, "norm": {"shown": {}},
        "has_final_norm": place == "pre",
    }  # fmt: skip


def arm(name: str, title: str, description: str, changes: dict, **more: Any) -> dict[str, Any]:
    """One entry of the plan's arms."""
    return {
        "name": name, "series": name, "x": None, "title": title, "description": description,
        "changes": changes, "parameters": 218432, "flops_per_token": 1.3e6,
        "rows": rows(changes), **more,
    }  # fmt: skip


def planned(arm_name: str, seed: int, rate: float = 0.003, steps: int = 600) -> dict[str, Any]:
    """One entry of the plan's runs."""
    return {
        "id": f"{arm_name}-s{seed}-{rate:g}", "arm": arm_name, "seed": seed,
        "learning_rate": rate, "weight_decay": 0.1, "init_scale": 1.0, "steps": steps,
    }  # fmt: skip


def plan(arms: list[dict], runs: list[dict], **more: Any) -> dict[str, Any]:
    """A whole grid.json."""
    return {
        "format": FORMAT, "experiment": "ablation", "preset": "default",
        "command": "python launch.py --experiment=ablation --workdir=out",
        "title": "What each part of a decoder is worth",
        "question": "How much does the validation loss rise when a part is taken away?",
        "hypothesis": "Removing residual connections hurts more than removing normalization.",
        "notes": ["Batches of one seed are the same in every variant."],
        "baseline": "full", "x": None, "config": CONFIG, "rows": rows({}),
        "corpus": {
            "name": "plays", "description": "The plays of Shakespeare, whole plays held out.",
            "vocabulary": "char", "vocabulary_size": 84, "train_tokens": 4700000,
            "held_out_tokens": 520000, "fingerprint": "9f2c66d1a4b7e803",
            "unigram_loss": UNIGRAM, "uniform_loss": UNIFORM,
        },
        "evaluation": {
            "windows": 512, "tokens": 32768, "description": "512 evenly spaced windows of 64."
        },
        "arms": arms, "runs": runs, **more,
    }  # fmt: skip


def predicted(workdir: Path, stated: Prediction, planned: record.Planned | None = None) -> None:
    """Give a made-up workdir a prediction, as if it had been stored before its runs."""
    plan = files.read_sealed(workdir / "grid.json") or {}
    seeds = {run["seed"] for run in plan["runs"]}
    planned = planned or record.Planned(tuple(arm["name"] for arm in plan["arms"]), len(seeds))
    kept = record.settle(workdir / "before", "--predict=x", stated, "G", planned)
    assert kept is not None
    (workdir / "before" / record.FILE).rename(workdir / record.FILE)
    files.write_sealed(workdir / "grid.json", drawn(plan, kept["sha256"]) | {"identity": "G"})
    stored = files.read_sealed(workdir / record.FILE)
    for path in workdir.glob(f"runs/*/{MANIFEST}"):
        manifest = files.read_sealed(path) or {}
        manifest["segments"][0]["environment"]["started"] = stored["stored"]
        files.write_sealed(path, manifest)


def drawn(plan: dict[str, Any], seal: str) -> dict[str, Any]:
    """Return a plan whose runs have the seeds of the prediction with that seal."""
    first, least = record.first_seed(seal), min(run["seed"] for run in plan["runs"])
    runs = [run | {"seed": first + run["seed"] - least} for run in plan["runs"]]
    return plan | {"runs": runs, "prediction": {"sha256": seal, "first_seed": first}}


def noise(*key: Any) -> random.Random:
    """A generator that depends on the key only, in any process."""
    return random.Random(zlib.crc32(repr(key).encode()))


def train(
    workdir: Path,
    run: dict[str, Any],
    final: float,
    descent: float = 5.0,
    *,
    state: str = "done",
    stop: int | None = None,
    spread: float = 0.012,
) -> None:
    """Write the folder of one run whose loss falls from START to about ``final``."""
    steps, seed = run["steps"], run["seed"]
    shared, own = noise("seed", seed).gauss(0, spread), noise(run["id"]).gauss(0, spread / 2)
    lines, rng = [], noise(run["id"], "steps")
    for step in range(0, steps + 1, steps // 12):
        if stop is not None and step > stop:
            break
        fall = math.exp(-descent * (step / steps) ** 0.55)
        floor = math.exp(-descent)
        loss = final + (START - final) * (fall - floor) / (1 - floor)
        loss += (shared + own + rng.gauss(0, 0.004)) * min(1, 4 * step / steps)
        bad = state == "diverged" and stop is not None and step >= stop
        lines.append(
            {
                "step": step, "tokens": step * 768,
                "train/loss": None if step == 0 or bad else loss - 0.03,
                "validation/loss": None if bad else loss,
                **({"test/loss": None if bad else loss} if step == steps else {}),
                "gradient/norm": None if step == 0 or bad else 0.4 + 2 * fall + rng.random() / 9,
                "learning_rate": run["learning_rate"], "update/skipped": 3 if bad else 0,
                "time/wall_s": step * 0.011, "time/tokens_per_s": None if step == 0 else 69000.0,
            }
        )  # fmt: skip
    at = lines[-1]["step"]
    run_folders.write(
        workdir / "runs" / run["id"], lines, record={"format": FORMAT, "id": run["id"], **CONFIG},
        environment={
            "versions": {"python": "3.11.2", "jax": "0.10.2", "normjax": "0.1.0"},
            "devices": ["cpu:0", "cpu:1"], "platform": "cpu", "cpu": "A processor", "cores": 2,
            "commit": "0a1b2c3+dirty", "flags": ["--experiment=ablation"], "xla_flags": "",
            "isa": "avx2", "hostname": "laptop", "started": "2026-01-02T03:04:05",
        },
        state=state, step=at, steps=steps, diverged_at=at if state == "diverged" else None,
        reason="non-finite loss" if state == "diverged" else None,
        time={"compile_s": 2.5, "train_s": at * 0.011, "peak_memory_mb": 612.0},
    )  # fmt: skip


def ablation(workdir: Path, seeds: int = 3, rates: tuple[float, ...] = (0.003,)) -> Path:
    """A finished default grid."""
    arms = [arm(name, *ABLATION[name][:3]) for name in ABLATION]
    runs = [planned(n, s, rate) for n in ABLATION for rate in rates for s in range(seeds)]
    files.write_sealed(workdir / "grid.json", plan(arms, runs))
    for run in runs:
        final, descent = ABLATION[run["arm"]][3:]
        off = abs(math.log(run["learning_rate"] / 0.003))
        train(workdir, run, final + 0.06 * off**2, descent)
    return workdir


def troubled(workdir: Path) -> Path:
    """A default grid with diverged, interrupted, running and missing runs."""
    arms = [arm(name, *ABLATION[name][:3]) for name in ABLATION]
    runs = [planned(name, seed) for name in ABLATION for seed in range(3)]
    files.write_sealed(workdir / "grid.json", plan(arms, runs))
    fates = {
        ("no-norm", 1): {"state": "diverged", "stop": 250},
        ("no-mlp", 2): {"state": "interrupted", "stop": 400},
        ("no-positions", 0): {"state": "running", "stop": 150},
        **{("no-residual", s): {"state": "diverged", "stop": 100 + 50 * s} for s in range(3)},
    }
    for run in runs:
        if (run["arm"], run["seed"]) == ("post-norm", 2):
            continue
        final, descent = ABLATION[run["arm"]][3:]
        train(workdir, run, final, descent, **fates.get((run["arm"], run["seed"]), {}))
    return workdir


DEPTH = {
    # series: (changes, loss by depth, depths at which seeds diverge)
    "pre": ({}, {2: 2.05, 4: 1.93, 8: 1.86, 16: 1.82}, {}),
    "post": ({"model.placement": "post"}, {2: 2.0, 4: 1.91, 8: 1.93, 16: 2.4}, {16: 1}),
    "none": ({"model.placement": "none"}, {2: 2.08, 4: 1.99, 8: 1.97, 16: 2.1}, {16: 3}),
    "sandwich": ({"model.placement": "sandwich"}, {2: 2.06, 4: 1.935, 8: 1.855, 16: 1.81}, {}),
    "deepnorm": ({"model.placement": "deepnorm"}, {2: 2.1, 4: 1.96, 8: 1.88, 16: 1.825}, {}),
    "no-residual": ({"model.residual": False}, {2: 2.35, 4: 2.8, 8: 3.3, 16: 3.31}, {}),
}


def depth(workdir: Path, seeds: int = 3) -> Path:
    """A depth grid: six series, loss against depth."""
    arms, runs = [], []
    for name, (changes, losses, _) in DEPTH.items():
        for x in losses:
            where = {"model.depth": x, **changes}
            entry = arm(f"{name}-{x}", f"{name}, {x} blocks", "", where, series=name, x=x)
            arms.append(entry | {"parameters": 5000 + 50000 * x})
            runs += [planned(entry["name"], seed) for seed in range(seeds)]
    axis = {"name": "depth", "label": "depth (blocks)", "scale": "log2"}
    more = {"baseline": "pre", "x": axis, "experiment": "depth", "title": "Norms by depth"}
    files.write_sealed(workdir / "grid.json", plan(arms, runs, **more))
    for run in runs:
        name, x = run["arm"].rsplit("-", 1)
        _, losses, lost = DEPTH[name]
        fate = {"state": "diverged", "stop": 200} if run["seed"] < lost.get(int(x), 0) else {}
        train(workdir, run, losses[int(x)], **fate)
    return workdir
