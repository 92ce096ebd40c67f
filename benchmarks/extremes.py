"""What the extremes of every step cost: a training with them beside the same one without.

Command: python -m benchmarks.extremes

Processor time, which other work on the machine changes less than the clock. One run on one device.
Blocks of a few steps of both, in turn, the first one changing; the median over blocks of the ratio
within a block, with the quartiles. Whether both end with the same parameters, bit for bit, is said
too.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

from experiments import ablation
from normjax.decoder import Decoder
from normjax.training.cohorts import Cohort
from normjax.training.train import Hyper

BLOCKS, SECONDS = 31, 0.5
PRESETS = ("default", "standard")


class Unwatched:
    """A decoder that shows a training step nothing but its logits."""

    def __init__(self, model: Decoder):
        self.config, self._model = model.config, model
        self.init, self.apply, self.after_step = model.init, model.apply, model.after_step


def main() -> None:
    """Measure and print one table."""
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    heads = ("ms a step without", "slower, median", "quartiles", "same bits")
    print(f"{'':<12}" + "".join(f"{head:>22}" for head in heads))
    for preset in sys.argv[1:] or PRESETS:
        print(f"{preset:<12}" + row(preset), flush=True)


def row(preset: str) -> str:
    """Return one row of the table."""
    config = ablation.get_config(preset)
    t, window = config.train, config.data.window
    model = Decoder(config.model, 65, window)
    shape = (1, t.chunk_steps, t.batch_size, window + 1)
    windows = np.random.default_rng(0).integers(0, 65, shape).astype(np.int32)
    both: tuple[Any, ...] = (Unwatched(model), model)
    pair = [Cohort(each, t, [Hyper(0, 1e-3, 0.1, 1.0)], jax.local_devices()[:1]) for each in both]
    for cohort in pair:
        cohort.start()
        cohort.advance(windows, 2)
    started = time.process_time()
    pair[0].advance(windows, 2)
    pair[1].advance(windows, 2)
    steps = max(1, min(t.chunk_steps, int(SECONDS / (time.process_time() - started) * 4)))
    plain, ratios = [], []
    for block in range(BLOCKS):
        taken = [0.0, 0.0]
        for i in (0, 1) if block % 2 else (1, 0):
            started = time.process_time()
            pair[i].advance(windows, steps)
            taken[i] = (time.process_time() - started) / steps
        plain.append(taken[0])
        ratios.append(taken[1] / taken[0] - 1)
    low, middle, high = statistics.quantiles(ratios, n=4)
    leaves = [jax.tree.leaves(cohort.state.params) for cohort in pair]
    same = all(np.array_equal(a, b) for a, b in zip(*leaves, strict=True))
    spread = f"{low:.1%} to {high:.1%}"
    return (
        f"{1e3 * statistics.median(plain):>22.2f}{middle:>22.1%}{spread:>22}"
        f"{'yes' if same else 'no':>22}"
    )


if __name__ == "__main__":
    main()
