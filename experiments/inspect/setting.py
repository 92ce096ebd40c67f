"""What ``inspect`` can be told."""

from __future__ import annotations

import dataclasses

from normjax.configs import field


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Which model, on which text, and how much of both."""

    model: tuple[str, ...] = field(
        (), "a folder with config.json and safetensors, a GGUF file, or a run folder of this"
        " program (RUN@STEP: at a step it kept); two are compared; empty: SmolLM2-135M-Instruct",
    )  # fmt: skip
    text: str = field("", "a text file; empty: the default corpus, or what a run was trained on")
    tokens: str = field("", "a file of token ids in place of a text")
    windows: int = field(8, "stretches of the text", least=1, most=4096)
    length: int = field(128, "tokens of each", least=2, most=2**15)
    gains_tokens: int = field(
        16, "tokens at which Jacobians of blocks are taken; 0: none are", least=0, most=512
    )
