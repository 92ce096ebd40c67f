"""What a durable, verified save costs, with few and with many checkpoints kept.

    python -m benchmarks.saves

Saves of the default run's state, alternating between a run that keeps two checkpoints and one that
keeps all; the share is of the default grid's training time that README states.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from experiments import ablation
from normjax.decoder import Decoder
from normjax.runs.run_folder import RunWriter
from normjax.training import train
from normjax.training.checkpoints import Checkpoints
from normjax.training.train import Hyper

SAVES, VOCABULARY, RUNS, SECONDS = 40, 77, 21, 219.0
"""Saves of each; runs of the default grid, one save each in it, and its seconds (README)."""


def main() -> None:
    """Print seconds a save, and the share of the default grid."""
    config = ablation.get_config("default")
    model = Decoder(config.model, VOCABULARY, config.data.window)
    hyper = Hyper(np.uint32(0), *(np.float32(x) for x in (1e-3, 0.1, 1.0)))
    state = jax.tree.map(np.asarray, jax.jit(
        lambda h: train.init_state(model, config.train, h)
    )(hyper))  # fmt: skip
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    times: dict[int, list[float]] = {2: [], 0: []}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        savers = {}
        for kept in times:
            run = RunWriter(Path(folder) / str(kept))
            run.begin({"train": {"steps": 10**6}}, "", {}, 0, False)
            savers[kept] = Checkpoints(run, kept)
        for step in range(SAVES):
            for kept, saver in savers.items():
                began = time.perf_counter()
                saver.save(step, state)
                times[kept].append(time.perf_counter() - began)
    print(f"state of {size / 1e6:.1f} MB; seconds a save, median (first and last ten):")
    for kept, seconds in times.items():
        first, last = (statistics.median(part) for part in (seconds[:10], seconds[-10:]))
        name = f"keep {kept}" if kept else "keep all"
        print(f"    {name:<10}{statistics.median(seconds):.3f}  ({first:.3f}, {last:.3f})")
    share = RUNS * statistics.median(times[2]) / SECONDS
    print(f"{RUNS} saves are {share:.2%} of the default grid's {SECONDS:.0f} s")


if __name__ == "__main__":
    main()
