"""Nonlinearities of the MLP: the table of them, each with its derivative."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import ndtr
from scipy.special import erfc, expit

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
_QUICK = 1.702
_ALL_OR_NOTHING = 440.0
"""From here on the sigmoid of 1.702 x is 0 or 1 in every dtype; the product may overflow later."""
_NO_DENSITY = 40.0
"""From here on exp(-x^2/2) x is 0 in every dtype."""
_SATURATED = 10.0
"""From here on tanh is 1 in every dtype, and x^3 in none of them beyond what it holds."""


def gelu(x: Array) -> Array:
    """Return x Phi(x) by its form with tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415).

    Value and derivatives are right for every finite x: without a bound x^2 overflows, in float16
    from 256 on, and its product with the zero of 1 - tanh^2 is NaN.
    """
    bounded = partial(jnp.clip, min=-_SATURATED, max=_SATURATED)
    # Bounded once for each use: the terms of the derivative are added as jax.nn.gelu adds them.
    cubic = 0.044715 * bounded(x) ** 3
    return x * (0.5 * (1 + jnp.tanh(_ROOT * (bounded(x) + cubic))))


def _gelu(x: Floats) -> Floats:
    z = np.clip(x, -_SATURATED, _SATURATED)
    return 0.5 * x * (1 + np.tanh(_ROOT * (z + 0.044715 * z**3)))


def _gelu_slope(x: Floats) -> Floats:
    x = np.clip(x, -_SATURATED, _SATURATED)
    t = np.tanh(_ROOT * (x + 0.044715 * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _ROOT * (1 + 3 * 0.044715 * x * x)


def gelu_exact(x: Array) -> Array:
    """Return x Phi(x), Phi the normal distribution function (arXiv 1606.08415, section 2)."""
    wide = jnp.clip(x, -_NO_DENSITY, _NO_DENSITY).astype(jnp.promote_types(x.dtype, jnp.float32))
    return x * ndtr(wide).astype(x.dtype)


def _gelu_exact(x: Floats) -> Floats:
    return 0.5 * x * erfc(-x / np.sqrt(2))


def _gelu_exact_slope(x: Floats) -> Floats:
    z = np.clip(x, -_NO_DENSITY, _NO_DENSITY)
    return 0.5 * erfc(-z / np.sqrt(2)) + z * np.exp(-z * z / 2) / np.sqrt(2 * np.pi)


def gelu_quick(x: Array) -> Array:
    """Return x sigma(1.702 x) (Hendrycks and Gimpel 2016, arXiv 1606.08415, section 2)."""
    return x * jax.nn.sigmoid(_QUICK * jnp.clip(x, -_ALL_OR_NOTHING, _ALL_OR_NOTHING))


def _gelu_quick(x: Floats) -> Floats:
    return x * expit(_QUICK * x)


def _gelu_quick_slope(x: Floats) -> Floats:
    z = np.clip(x, -_ALL_OR_NOTHING, _ALL_OR_NOTHING)
    return expit(_QUICK * z) * (1 + _QUICK * z * expit(-_QUICK * z))


def _sigmoid(x: Floats) -> Floats:
    return 0.5 * (1 + np.tanh(0.5 * x))


NONLINEARITIES: Registry[Nonlinearity] = Registry(
    "nonlinearity",
    {
        "gelu": Nonlinearity("gelu", gelu, _gelu, _gelu_slope),
        "gelu_exact": Nonlinearity("exact gelu", gelu_exact, _gelu_exact, _gelu_exact_slope),
        "gelu_quick": Nonlinearity("quick gelu", gelu_quick, _gelu_quick, _gelu_quick_slope),
        "geglu": Nonlinearity("geglu", gelu, _gelu, _gelu_slope, gated=True),
        "geglu_exact": Nonlinearity(
            "exact geglu", gelu_exact, _gelu_exact, _gelu_exact_slope, gated=True
        ),
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
