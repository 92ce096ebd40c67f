"""What the atlas can be told."""

from __future__ import annotations

import dataclasses

from normjax.configs import field


@dataclasses.dataclass(frozen=True)
class Atlas:
    """Which rows, and the decoder in which placements are measured."""

    rows: tuple[str, ...] = field((), "names of placements and norms; empty: all")
    depth: int = field(8, "blocks of the decoder that is measured", least=1, most=64)
    width: int = field(16, "its features; a multiple of 4", least=4, most=64)
    tokens: int = field(4, "of the sequence", least=1, most=64)
    seeds: int = field(3, "initializations", least=1, most=64)
    train_depths: tuple[int, ...] = field(
        (2, 8), "blocks of the decoders that are trained for a few steps; none: nothing is trained",
        least=1, most=64, fewest=0,
    )  # fmt: skip
    ladder: str = field("", "a ladder.csv whose lines are shown; empty: none")
