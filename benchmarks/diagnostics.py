"""What diagnostics cost, in training steps, and what they slow a run by at the usual cadence.

Command: python -m benchmarks.diagnostics

One run on one device: a block is a few training steps and one measurement, its line in the run
folder included; medians over blocks, so that a machine whose speed drifts slows both alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from experiments import ablation
from normjax import configs
from normjax.decoder import Decoder
from normjax.diagnostics import log, sampling
from normjax.diagnostics.probe import Probe
from normjax.runs.run_folder import RunWriter
from normjax.training.cohorts import Cohort
from normjax.training.train import Hyper

BLOCKS, STEPS = 9, 8
PRESETS = ("smoke", "default", "standard")
PLACEMENTS = ("pre", "post")


def main() -> None:
    """Measure and print one table."""
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    heads = ("ms a step", "ms a sample", "steps a sample", "samples/steps", "slower", "compile s")
    print(f"{'':<16}" + "".join(f"{head:>16}" for head in heads))
    for preset in PRESETS:
        for placement in PLACEMENTS:
            print(f"{preset + ', ' + placement:<16}" + row(preset, placement), flush=True)


def row(preset: str, placement: str) -> str:
    """Return one row of the table."""
    changes = {"model.placement": placement, "train.diagnostics": "on"}
    config = configs.replace(ablation.get_config(preset), changes)
    t, window = config.train, config.data.window
    model = Decoder(config.model, 65, window)
    cohort = Cohort(model, t, [Hyper(0, 1e-3, 0.1, 1.0)], jax.local_devices()[:1])
    shape = (1, max(t.chunk_steps, STEPS), t.batch_size, window + 1)
    windows = np.random.default_rng(0).integers(0, 65, shape).astype(np.int32)
    cohort.start()
    cohort.advance(windows, STEPS)
    measure = cohort.measurement(Probe(model, t).measure)
    started = time.perf_counter()
    measure(windows[:, 0])
    compile_s = time.perf_counter() - started
    steps, samples = [], []
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(Path(folder) / "run")
        for _ in range(BLOCKS):
            started = time.perf_counter()
            cohort.advance(windows, STEPS)
            steps.append((time.perf_counter() - started) / STEPS)
            started = time.perf_counter()
            values = measure(windows[:, 0])
            writer.append(log.FILE, log.line(0, {name: v[0] for name, v in values.items()}))
            samples.append(time.perf_counter() - started)
    step, sample = statistics.median(steps), statistics.median(samples)
    count = len(sampling.sampled_steps(t))
    slower = count * sample / (t.steps * step)
    ratio = f"{count}/{t.steps}"
    return (
        f"{1e3 * step:>16.1f}{1e3 * sample:>16.1f}{sample / step:>16.2f}{ratio:>16}{slower:>16.2%}"
        f"{compile_s:>16.1f}"
    )


if __name__ == "__main__":
    main()
