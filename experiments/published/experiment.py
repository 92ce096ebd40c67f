"""Do published results on norms, residual streams and optimizers come out again, measured small?

Question: seventy quantitative statements of papers (sizes over depth, gradients at
initialization, attention, singular values, identities between schemes, optimizers, rounding) that a
small machine can check: which are reproduced within a tolerance that is stated with its reason,
which are not, and which does this size not decide?

Hypothesis: those that follow from their set-up by algebra are reproduced; those that hold without
end (infinite width, depth or number of keys) miss by a correction that shrinks with size.

Command: python launch.py --experiment=published     70 rows; 200 s of processor time on two cores,
                                                     compiling included

Result: 64 are reproduced, 4 are not, 2 are not decided. Two of the four are corrections of finite
size: the entropy of a softmax collapses 10 % below sqrt(2 ln T) at 65,536 keys and extrapolates to
it, AdamW's weights are 4 % smaller than sqrt(eta / (2 lambda)) by the correlation of its momentum.
A pre-norm stream with uniform attention grows faster than a line, since attention writes more in
later blocks; and the plateau of a drawn Markov chain is its entropy rate, 0.481 for two states, not
the mean entropy of its rows, 0.5.

Left out, because the decoder has no switch for it: unmasked attention and everything with
encoders (A1 and S7 are in NumPy), a mixing matrix made by Sinkhorn (N6 to N9 are in NumPy), NAG's
projector, SeeDNorm, nGPT and Dory, muP. Left out for their cost: what needs training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from experiments.published import (
    attention,
    gradients,
    identities,
    numerics,
    optimization,
    page,
    setting,
    sizes,
    spectra,
)
from experiments.published.result import Result
from experiments.published.setting import Board, PublishedConfig
from normjax import configs
from normjax.reporting import report
from normjax.runs import measuring, preflight
from normjax.runs.experiment import Options, Outcome, check_workdir, working_in

GROUPS = (sizes, gradients, attention, spectra, identities, optimization, numerics)
PRESETS = {
    "default": ("70 results, 10 seeds, decoders of 32 blocks and 128 features", {}),
    "full": ("the same with 20 seeds, 64 blocks, 256 features, matrices of 512 and 2^18 keys", {
        "board.seeds": 20, "board.width": 256, "board.depth": 64, "board.matrix": 512,
        "board.steps": 20_000, "board.keys": 18,
    }),
}  # fmt: skip


def get_config(preset: str) -> PublishedConfig:
    """Return the configuration of a preset."""
    return configs.replace(PublishedConfig(), PRESETS[preset][1])


def run(config: PublishedConfig, preset: str, options: Options) -> Outcome | None:
    """Measure every row, write published.csv and published.html; code 0 where a row misses too."""
    setting.check(config)
    check_workdir(options.workdir)
    board = config.board
    size = (
        f"{board.seeds} seeds from {board.seed}, decoders up to {board.depth} blocks and"
        f" {board.width} features, matrices up to {board.matrix}, 2^{board.keys} keys"
    )
    if options.dry_run:
        print(f"{len(functions())} measurements of one to five rows each: {size}")
        return None
    start = time.monotonic()
    made = partial(measuring.record, options.command, start, Sizes=size)

    preflight.check_page()
    with working_in(options) as folder:
        results = compute(board)
        where = report.write_page(
            folder, "published", page.BOARD.csv(results), {"command": options.command},
            lambda: page.figures(results), lambda drawn: page.render(results, drawn, made()),
        )  # fmt: skip
    return Outcome(page.text(results), where)


def functions() -> list[Callable[[Board], list[Result]]]:
    """Return what measures the rows, in the order of the page."""
    return [function for group in GROUPS for function in group.ROWS]


def compute(board: Board) -> Sequence[Result]:
    """Return every row, in order; the measurements share the cores, each in 64-bit mode."""
    return [row for rows in measuring.side_by_side(functions(), board, most=2) for row in rows]
