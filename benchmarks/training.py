"""How fast the standard preset trains, beside the matrix-product peak of the same minute.

Command: python -m benchmarks.training

All rows are measured in turn, block by block, so that a machine whose speed drifts slows them all
alike: read ratios. A block is a few steps of every row and one matrix product; medians over blocks.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time

import jax
import numpy as np

from normjax.runs.machine import usable_cores

BLOCKS, STEPS = 9, 6


def main() -> None:
    """Measure and print one table."""
    cores = usable_cores()
    jax.config.update("jax_num_cpu_devices", cores)
    from experiments import ablation
    from normjax import configs
    from normjax.decoder import Decoder
    from normjax.runs import estimates
    from normjax.training.cohorts import Cohort
    from normjax.training.train import Hyper

    config = ablation.get_config("standard")
    model = Decoder(config.model, 65, config.data.window)
    tokens = config.train.batch_size * config.data.window
    devices = jax.local_devices()
    rows = {
        "one run, one device": (1, devices[:1], "auto"),
        f"{cores} runs, one per device": (cores, devices, "auto"),
        f"{2 * cores} runs, two per device in turn": (2 * cores, devices, "map"),
        f"{2 * cores} runs, two per device under vmap": (2 * cores, devices, "vmap"),
    }
    cohorts, compile_s = {}, {}
    rng = np.random.default_rng(0)
    for name, (runs, used, lanes) in rows.items():
        train = configs.replace(config, {"train.lanes": lanes}).train
        cohort = Cohort(model, train, [Hyper(s, 1e-3, 0.1, 1.0) for s in range(runs)], used)
        shape = (runs, train.chunk_steps, train.batch_size, config.data.window + 1)
        windows = rng.integers(0, 65, shape).astype(np.int32)
        start = time.perf_counter()
        cohort.start()
        cohort.advance(windows, 0)
        compile_s[name] = time.perf_counter() - start
        cohorts[name] = (cohort, windows, runs)
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    peaks = []
    for _ in range(BLOCKS):
        peaks.append(estimates.matrix_peak(devices, size=2048, repeats=2))
        for name, (cohort, windows, runs) in cohorts.items():
            start = time.perf_counter()
            cohort.advance(windows, STEPS)
            seconds[name].append((time.perf_counter() - start) / STEPS / runs)
    peak = statistics.median(peaks)
    print(f"{cores} cores, jax {jax.__version__}; matrix product {peak / 1e9:.0f} GFLOP/s")
    heads = ("ms a run-step", "spread", "tokens/s", "of peak", "compile s")
    print(f"{'':<38}{heads[0]:>14}{heads[1]:>14}{heads[2]:>10}{heads[3]:>9}{heads[4]:>11}")
    flops = model.flops_per_token() * tokens
    for name, values in seconds.items():
        median = statistics.median(values)
        spread = f"{1e3 * min(values):.1f}-{1e3 * max(values):.1f}"
        print(
            f"{name:<38}{1e3 * median:>14.1f}{spread:>14}{tokens / median:>10,.0f}"
            f"{flops / median / peak:>9.0%}{compile_s[name]:>11.1f}"
        )
    scale = 1 << 20 if sys.platform == "darwin" else 1 << 10
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale
    print(f"peak memory of this process, all rows together: {used:.0f} MiB")


if __name__ == "__main__":
    main()
