"""What does the stream of a trained model do, from block to block, and who does it?

Question: how does the residual stream of a model grow, which tokens and features stand out and who
wrote them, where does attention go, what do blocks do to small changes and to the gradient?

Command: python launch.py --experiment=inspect --config.inspect.model=PATH
         python launch.py --experiment=inspect            SmolLM2-135M-Instruct, once installed

Result: inspect.html with a verdict in words; inspect.csv, every number by depth with its interval;
outliers.csv, the largest entries of tokens that stand out, and which branch wrote them.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from experiments.inspect.setting import Inspect
from normjax import configs
from normjax.diagnostics.block_gains import block_gains
from normjax.diagnostics.walk import walk
from normjax.runs import measuring
from normjax.runs.experiment import Options, Outcome, working_in
from normjax.runs.progress import duration


@dataclasses.dataclass(frozen=True)
class InspectConfig:
    """All that the experiment can be told."""

    inspect: Inspect = Inspect()


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("8 stretches of 128 tokens", {}),
    "quick": ("2 stretches of 32 tokens, no Jacobians", {
        "inspect.windows": 2, "inspect.length": 32, "inspect.gains_tokens": 0,
    }),
}  # fmt: skip


def get_config(preset: str) -> InspectConfig:
    """Return the configuration of a preset."""
    return configs.replace(InspectConfig(), PRESETS[preset][1])


def run(config: InspectConfig, preset: str, options: Options) -> Outcome | None:
    """Walk through the model and write the page."""
    del preset
    configs.check(config)
    from experiments.inspect import sources

    asked, start = config.inspect, time.monotonic()
    found = sources.find(asked)
    cost = sources.cost(found, asked)
    print(f"{found.said}; {cost}", flush=True)
    if options.dry_run:
        return None
    windows, text = sources.windows(found, asked)
    with working_in(options) as folder:
        from experiments.inspect import page

        told = _Told()
        seen = walk(found.held, windows, told("walked through"))
        gains = []
        if asked.gains_tokens:
            usual = int(np.argmax(seen.ordinary.sum(-1)))
            gains = block_gains(
                found.held, seen, usual, tokens=min(asked.gains_tokens, windows.shape[1] - 1),
                said=told("Jacobians of"),
            )  # fmt: skip
        record = measuring.record(options.command, start, Model=found.said, Text=text)
        written, said = page.write(folder, found, seen, gains, asked, text, record)
    return Outcome("\n".join(said), written)


class _Told:
    """Says how far the work is, at most every few seconds."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, what: str) -> Any:
        begun = time.monotonic()

        def said(done: int, of: int) -> None:
            now = time.monotonic()
            if now - self.last >= 5 and done < of:
                self.last = now
                left = (now - begun) / done * (of - done)
                print(f"{what} {done} of {of} blocks, {duration(left)} left", flush=True)

        return said
