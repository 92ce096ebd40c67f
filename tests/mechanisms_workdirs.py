"""Workdirs of the experiment on mechanisms with made-up runs and exact floors."""

from __future__ import annotations

from pathlib import Path

from experiments.mechanisms.data import plan_record
from experiments.mechanisms.verdicts import OwnFloor, Rule
from normjax.data.tasks import floors
from normjax.data.tasks.corpus import TaskCorpus
from normjax.data.tasks.table import TASKS
from normjax.runs import files
from normjax.runs.run_folder import RunFolder
from tests.report_workdirs import ABLATION, arm, plan, planned, train

VARIANTS = tuple(ABLATION)
RATES = (0.002, 0.005)


def exact(task: str, window: int = 16) -> dict[str, OwnFloor]:
    """The floors of all variants."""
    made = TaskCorpus(task, window).task
    found = {}
    for variant in VARIANTS:
        loss, entry = floors.floor(task, made, variant)
        found[variant] = OwnFloor(loss, entry.information, entry.reached, entry.reason)
    return found


def workdir(
    folder: Path, excess: dict[str, dict[str, float | None]], *, planned_only: tuple[str, ...] = (),
    command: str = "python launch.py --experiment=mechanisms",
) -> Path:  # fmt: skip
    """Write a workdir whose runs end so many nats above their floors; None: all diverged.

    The second rate is worse by a fixed amount where the excess is negative: some runs succeed.
    """
    record = plan_record(
        {task: exact(task) for task in (*excess, *planned_only)}, Rule(), command=command,
        preset="default", config={"train": {"steps": 600}}, environment={"cpu": "A processor"},
        settings={},
    )  # fmt: skip
    files.write_sealed(folder / "mechanisms.json", record)
    for task, by_variant in excess.items():
        inner, corpus = folder / task, TaskCorpus(task, 16)
        arms = [arm(name, *ABLATION[name][:3]) for name in by_variant]
        runs = [planned(n, s, rate) for n in by_variant for rate in RATES for s in (0, 1)]
        more = {"corpus": corpus.record(), "task": corpus.task_record(), "experiment": "mechanisms",
                "title": TASKS[task].title}  # fmt: skip
        files.write_sealed(inner / "grid.json", plan(arms, runs, **more))
        sampled = {}
        for run in runs:
            over, floor = by_variant[run["arm"]], exact(task)[run["arm"]].loss
            assert floor is not None
            if over is None:
                train(inner, run, floor + 1, state="diverged", stop=300)
                continue
            some = over + 0.3 * (run["learning_rate"] == RATES[1]) if over >= 1 else over
            final = floor + (some % 1 if over >= 1 else some)
            train(inner, run, final, spread=0.0)
            last = RunFolder(inner / "runs" / run["id"]).metrics()[-1]["test/loss"]
            sampled[run["id"]] = {"loss": last, "standard_error": 0.002, "sequences": 4096}
        files.write_sealed(inner / "sampling.json", {"format": 1, "runs": sampled})
    return folder


MIXED: dict[str, dict[str, float | None]] = {
    # over the variant's floor; 1 and more: the second rate ends 0.3 higher
    "markov1": dict.fromkeys(VARIANTS, 0.008),
    "copy": {
        "full": 0.008, "no-attention": 0.004, "no-mlp": 0.006, "no-positions": 0.35,
        "no-norm": 1.006, "no-residual": None, "post-norm": 0.007,
    },
    "modular_addition": {
        "full": 0.006, "no-attention": 0.004, "no-mlp": 1.4, "no-positions": 1.2,
        "no-norm": 0.2, "no-residual": 1.005, "post-norm": 1.006,
    },
    "recall": {
        "full": 0.3, "no-attention": 0.005, "no-mlp": 0.31, "no-positions": 0.4,
        "no-norm": 0.45, "no-residual": 0.5, "post-norm": 0.29,
    },
}  # fmt: skip
