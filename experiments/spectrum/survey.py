"""A survey: many decoders measured one after the other, and what is written down of them.

Two files: ``survey.json`` with what each condition was, and ``spectra.npz`` with its arrays under
``NUMBER/NAME``. The page, the figures and ``spectrum.csv`` are made from those, without JAX
(:mod:`experiments.spectrum.data`).
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np

from experiments.spectrum.data import log_of
from experiments.spectrum.measured import Measured, measure
from experiments.spectrum.predicted import Overlay, Tokens, overlay, scales
from normjax.errors import UserError
from normjax.jacobians.blocks import Parts
from normjax.reporting.wording import counted
from normjax.runs import files

FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Condition:
    """One decoder to measure.

    Attributes:
      series: what a legend calls it: a placement, or the variant of a run.
      seed: of its initialization.
      step: training steps taken; 0 is the initialization.
      parts: makes its parts, when its turn comes.
      tokens: (B, T) integers to measure at.
      main: whether it is looked at in full: theory, identities, whole sequence. The others give
        their block and stack spectra only.
      run: the folder of the run, or "".
    """

    series: str
    seed: int
    step: int
    parts: Callable[[], Parts]
    tokens: np.ndarray
    main: bool = True
    run: str = ""

    @property
    def label(self) -> str:
        """Return the condition in a few words."""
        return f"{self.series}, seed {self.seed}, step {self.step}"


def survey(
    conditions: Iterable[Condition], positions: tuple[int, ...], sequence_length: int, folder: Path,
    record: dict[str, Any], say: Callable[[str], None],
) -> None:  # fmt: skip
    """Measure every condition and write ``survey.json`` and ``spectra.npz``.

    A decoder that cannot be measured (values that are not finite) is recorded with the reason and
    passed over: the others are worth having.
    """
    entries: list[dict[str, Any]] = []
    arrays: dict[str, np.ndarray] = {}
    for number, condition in enumerate(conditions):
        parts = None
        entry: dict[str, Any] = {
            "series": condition.series, "seed": condition.seed, "step": condition.step,
            "main": condition.main, "run": condition.run, "positions": list(positions),
        }  # fmt: skip
        try:
            parts = condition.parts()
            entry |= {
                "depth": parts.config.depth, "width": parts.config.width,
                "norm": parts.config.norm_row.title, "placement": parts.config.placement_row.title,
                "colour": parts.config.placement_row.colour,
                "residual": parts.config.residual, "norm_eps": parts.config.norm_eps,
            }  # fmt: skip
            found = measure(
                parts, condition.tokens, positions,
                sequence_length=sequence_length if condition.main else 0,
                identities=condition.main and condition.seed == record["first_seed"],
            )  # fmt: skip
        except UserError as error:
            entry["failed"] = str(error)
            say(f"{condition.label}: not measured: {error}")
            entries.append(entry)
            continue
        entry["defects"] = found.defects
        kept = _arrays(found)
        if condition.step == 0 and condition.seed == record["first_seed"]:
            laws = _laws(parts, positions[-1], found, condition)
            entry["laws"] = {name: _law_record(law, found, name) for name, law in laws.items()}
            for name, law in laws.items():
                kept |= {
                    f"law/{name}/log_s": law.log_s, f"law/{name}/log_density": law.log_density,
                    f"scale/{name}": law.scales,
                }  # fmt: skip
        elif condition.step == 0 and condition.main:
            for name, blocks in _pieces(parts.config.depth, True).items():
                tokens = _tokens(found, blocks, condition)
                kept[f"scale/{name}"] = scales(parts, blocks, positions[-1], tokens)
        arrays |= {f"{number}/{name}": array for name, array in kept.items()}
        entries.append(entry)
        say(f"{condition.label}: {counted(parts.config.depth, 'block')} measured")
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **cast(dict[str, Any], arrays))
    files.write_bytes(folder / "spectra.npz", buffer.getvalue())
    found = {"format": FORMAT, **record, "conditions": entries}
    files.write_sealed(folder / "survey.json", found, beside=("spectra.npz",))


def _arrays(found: Measured) -> dict[str, np.ndarray]:
    names = ("raw", "deflated", "log_raw", "log_deflated", "mean_square", "sequence")
    return {name: getattr(found, name) for name in names} | {
        f"gains/{name}": values for name, values in found.gains.items()
    }


def _pieces(depth: int, whole: bool) -> dict[str, range]:
    """Return the stack and, where wanted, the first, middle and last block, as ranges of blocks."""
    pieces = {"stack": range(1, depth + 1)}
    if whole:
        pieces |= {f"block {b}": range(b, b + 1) for b in sorted({1, (depth + 1) // 2, depth})}
    return pieces


def _tokens(found: Measured, blocks: range, condition: Condition) -> Tokens:
    entering = blocks[0] - 1
    sizes, means = found.mean_square[entering, :, -1], found.mean[entering, :, -1]
    return Tokens(sizes, means, condition.tokens)


def _laws(parts: Parts, position: int, found: Measured, condition: Condition) -> dict[str, Overlay]:
    return {
        name: overlay(parts, blocks, position, _tokens(found, blocks, condition), condition.main)
        for name, blocks in _pieces(parts.config.depth, condition.main).items()
    }


def _law_record(law: Overlay, found: Measured, name: str) -> dict[str, Any]:
    if name == "stack":
        logs = found.log_deflated[:, -1]
    else:
        block = int(name.split()[1]) - 1
        logs = log_of(found.deflated[block, :, -1], found.raw[block, :, -1])
    low, high = law.log_edges or (None, None)
    return {
        "assumption": law.assumption, "log_low": low, "log_high": high, "log_rms": law.log_rms,
        "distance": law.distance(logs) if np.isfinite(logs).all() else None,
        "level": law.level, "broken": law.broken,
    }  # fmt: skip
