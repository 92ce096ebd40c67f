"""At which steps diagnostics are measured: log-spaced, few enough to cost little."""

from __future__ import annotations

from normjax.training.train import TrainConfig

STEPS_PER_SAMPLE = 6.5
"""What one measurement costs in training steps, at most: python -m benchmarks.diagnostics."""
MOST = 0.03
"""Part of the training time that measurements may take where their number is not given."""
MOST_POINTS = 64
"""More are taken only where they are asked for: a profile over training needs no more."""


def sampled_steps(config: TrainConfig) -> tuple[int, ...]:
    """Return the steps before which diagnostics are measured, ascending; empty where they are off.

    Step 0 and the last one, ``steps - 1``, and between them steps in equal ratios, as near as
    whole numbers can be. Their number is ``diagnostic_points``, or as many as cost 3 % of the
    training, but 2 at least and 64 at most; steps that fall together are taken once. Multiples of
    ``diagnostic_every`` come on top.

    >>> sampled_steps(TrainConfig(steps=1000, diagnostics="on"))
    (0, 1, 32, 999)
    >>> sampled_steps(TrainConfig(steps=10, diagnostics="on", warmup_steps=0, diagnostic_every=4))
    (0, 4, 8, 9)
    """
    if config.diagnostics == "off":
        return ()
    last = config.steps - 1
    points = config.diagnostic_points or min(
        MOST_POINTS, max(2, int(MOST * config.steps / STEPS_PER_SAMPLE))
    )
    found = {0, last} if points > 1 else {0}
    between = max(points - 2, 0)
    found |= {round(max(last, 1) ** (i / between)) for i in range(between)} if last else set()
    if config.diagnostic_every:
        found |= set(range(0, config.steps, config.diagnostic_every))
    return tuple(sorted(found))


def next_sampled(steps: tuple[int, ...], step: int) -> int | None:
    """Return the first of the ascending steps after ``step``, or None.

    >>> next_sampled((0, 1, 4), 1), next_sampled((0, 1, 4), 4)
    (4, None)
    """
    return next((s for s in steps if s > step), None)
