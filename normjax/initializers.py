"""Initialization rules by name: the standard deviation of every weight matrix.

All weights are normal with mean zero. Gains start at one (or zero, for gain 1 + g), biases at zero.
A placement may multiply value, output and MLP weights by a factor of its own (DeepNorm's beta).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from normjax.registry import Registry


def _unscaled(depth: int) -> float:
    return 1.0


def _per_sublayer(depth: int) -> float:
    return (2 * depth) ** -0.5


@dataclasses.dataclass(frozen=True)
class Initialization:
    """One rule.

    Attributes:
      stddev: of a matrix, as a function of (fan_in, fan_out).
      embedding_stddev: of token and position embeddings, as a function of the width.
      output_scale: factor on the last matrix of every branch, as a function of the depth.
      source: where the rule comes from.
    """

    stddev: Callable[[int, int], float]
    embedding_stddev: Callable[[int], float]
    output_scale: Callable[[int], float]
    source: str

    def output_stddev(self, fan_in: int, fan_out: int, depth: int) -> float:
        """Standard deviation of the last matrix of a branch."""
        return self.stddev(fan_in, fan_out) * self.output_scale(depth)

    def record(self, width: int, hidden: int, depth: int) -> dict[str, Any]:
        """Return it as JSON: the standard deviations of a decoder of that size."""
        shapes = {"square": (width, width), "in": (width, hidden), "out": (hidden, width)}
        return {
            **{name: self.stddev(*shape) for name, shape in shapes.items()},
            "embedding": self.embedding_stddev(width), "output_scale": self.output_scale(depth),
        }  # fmt: skip


INITIALIZERS: Registry[Initialization] = Registry("initialization", {
    "gpt2": Initialization(
        lambda fan_in, fan_out: 0.02, lambda width: 0.02, _per_sublayer,
        "GPT-2 (Radford et al. 2019, section 2.3): 0.02, branch outputs times 1/sqrt(2 L)",
    ),
    "gpt2_plain": Initialization(
        lambda fan_in, fan_out: 0.02, lambda width: 0.02, _unscaled, "0.02 everywhere"
    ),
    "fan_in": Initialization(
        lambda fan_in, fan_out: fan_in**-0.5, lambda width: width**-0.5, _unscaled,
        "1/sqrt(fan_in): keeps the variance of a linear layer's output (LeCun et al. 1998)",
    ),
    "fan_in_scaled": Initialization(
        lambda fan_in, fan_out: fan_in**-0.5, lambda width: width**-0.5, _per_sublayer,
        "1/sqrt(fan_in), branch outputs times 1/sqrt(2 L)",
    ),
    "xavier": Initialization(
        lambda fan_in, fan_out: (2 / (fan_in + fan_out)) ** 0.5, lambda width: width**-0.5,
        _unscaled, "Glorot and Bengio 2010, eq. 12 as a normal distribution",
    ),
})  # fmt: skip
