"""What does the stream of a trained model do, from block to block, and who does it?

Question: how does the residual stream of a model grow, which tokens and features stand out and who
wrote them, where does attention go, what do blocks do to small changes and to the gradient?

Command: python launch.py --experiment=inspect --config.inspect.model=PATH
         python launch.py --experiment=inspect            SmolLM2-135M-Instruct, once installed
         python launch.py --experiment=inspect --config.inspect.model=A,B       two side by side

Result: inspect.html with a verdict in words; inspect.csv, every number by depth with its interval;
outliers.csv, the largest entries of tokens that stand out, and which branch wrote them. Of two
models compared.csv, their differences by block on the same windows.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
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
    models = sources.find(asked)
    for found in models:
        print(f"{found.said}; {sources.cost(found, asked)}", flush=True)
    if options.dry_run:
        return None
    given = [sources.windows(found, asked) for found in models]
    with working_in(options) as folder:
        told = _Told()
        walks = [
            walk(found.held, windows, told("walked through"))
            for found, (windows, _) in zip(models, given, strict=True)
        ]
        text = given[0][1]
        said = "; ".join(found.said for found in models)
        record = measuring.record(options.command, start, Model=said, Text=text)
        if len(models) > 1:
            written, lines = _compared(folder, models, given, walks, record)
        else:
            written, lines = _inspected(folder, models[0], walks[0], asked, text, told, record)
    return Outcome("\n".join(lines), written)


def _inspected(folder, found, seen, asked, text, told, record) -> tuple[Path, list[str]]:
    from experiments.inspect import page

    gains = []
    if asked.gains_tokens:
        usual = int(np.argmax(seen.ordinary.sum(-1)))
        gains = block_gains(
            found.held, seen, usual, tokens=min(asked.gains_tokens, seen.losses.shape[1]),
            said=told("Jacobians of"),
        )  # fmt: skip
    return page.write(folder, found, seen, gains, asked, text, record)


def _compared(folder, models, given, walks, record) -> tuple[Path, list[str]]:
    from experiments.inspect import compare

    names = [found.name for found in models]
    if names[0] == names[1]:
        names = [f"{name} ({which})" for name, which in zip(names, ("1st", "2nd"), strict=True)]
    pair = [compare.One(*each) for each in zip(names, models, walks, strict=True)]
    same = np.array_equal(given[0][0], given[1][0])
    return compare.write(folder, pair, same, given[0][1], record)


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
