"""Nonlinearities of the MLP: the table of them, each with its derivative."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import Array
from scipy.special import expit

from normjax.norm_derivatives import Floats
from normjax.registry import Registry


@dataclasses.dataclass(frozen=True)
class Nonlinearity:
    """One row: act(x), applied entry by entry.

    Attributes:
      title: what a legend calls it.
      function: act in JAX.
      value: act in NumPy float64, written out apart from ``function``.
      slope: act' in NumPy float64.
      gated: whether act(W_gate x) multiplies W_in x; else the hidden layer is act(W_in x).
    """

    title: str
    function: Callable[[Array], Array]
    value: Callable[[Floats], Floats]
    slope: Callable[[Floats], Floats]
    gated: bool = False

    def record(self) -> dict[str, Any]:
        """Return it as JSON: its values at some points, to five digits."""
        x = np.array([-2.0, -0.5, 0.1, 1.0, 3.0])
        return {
            "values": [float(f"{v:.5g}") for v in self.value(x)], "gated": self.gated,
            "shown": {"title": self.title},
        }  # fmt: skip


_ROOT = (2 / np.pi) ** 0.5


def _gelu(x: Floats) -> Floats:
    return 0.5 * x * (1 + np.tanh(_ROOT * (x + 0.044715 * x**3)))


def _gelu_slope(x: Floats) -> Floats:
    # Of the tanh form; beyond +-30 the slope is 0 or 1 to rounding, and x^3 stays in range. (There
    # autodiff of jax.nn.gelu is the one that errs, by the rounding of 1 - tanh^2 times x^3.)
    x = np.clip(x, -30, 30)
    t = np.tanh(_ROOT * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _ROOT * (1 + 3 * 0.044715 * x * x)


def _sigmoid(x: Floats) -> Floats:
    return 0.5 * (1 + np.tanh(0.5 * x))


NONLINEARITIES: Registry[Nonlinearity] = Registry(
    "nonlinearity",
    {
        "gelu": Nonlinearity("gelu", partial(jax.nn.gelu, approximate=True), _gelu, _gelu_slope),
        "relu": Nonlinearity(
            "relu", jax.nn.relu, lambda x: np.maximum(x, 0.0),
            lambda x: (x > 0).astype(np.float64),
        ),
        "swiglu": Nonlinearity(
            "swiglu", jax.nn.silu, lambda x: x * expit(x),
            lambda x: _sigmoid(x) * (1 + x * _sigmoid(-x)), gated=True,
        ),
    },
)  # fmt: skip
