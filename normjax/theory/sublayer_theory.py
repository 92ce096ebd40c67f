"""The law of a sub-layer's Jacobian at one position, from the decoder's weights, and when it holds.

A sub-layer h' = P(a h + b Q(F(c N(h)))) has at one position the Jacobian

    J = J_P (a I + b c J_Q J_F J_N),        J_N = G / s,   s = sqrt(mean(h^2) + eps),

up to the radial direction of each norm, one in d. The branch is that of
:mod:`normjax.theory.layer_scale`; gains of Q and P count by their root mean square. The mean
square of the stream is carried along, so that the product over all blocks follows from the
embedding's alone. Every result carries its assumption as text, or the reason why there is no law.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from normjax.decoder import DecoderConfig, sublayers
from normjax.errors import UserError, check_choice
from normjax.norms import NORMS
from normjax.theory.layer_scale import (
    Branch,
    attention_branch,
    block_law,
    column_squares,
    mlp_branch,
)
from normjax.theory.random_matrices import Floats, GaussianBlock, check_number, check_values
from normjax.theory.two_layer import TwoLayerBlock

LARGEST_LOGIT = 0.5
"""Standard deviation of attention logits up to which attention counts as uniform."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What theory says of one sub-layer's Jacobian at one position.

    Attributes:
      law: the law of its singular values, with ``edges``, ``density``, ``cdf``, ``quantile``; a
        factor of :class:`ProductLaw`. None where the theory does not apply.
      assumption: one line for a plot: what is assumed or, where ``law`` is None, why there is none.
      mean_square: predicted mean square of the stream after the sub-layer (nan without a law).
    """

    law: TwoLayerBlock | None
    assumption: str
    mean_square: float = math.nan

    @property
    def sigma(self) -> float | None:
        """Size of the random part, or None."""
        return None if self.law is None else self.law.sigma

    @property
    def gaussian(self) -> GaussianBlock | None:
        """The block a I + sigma X of the same size, or None: simpler, and narrower than the law."""
        return None if self.law is None else self.law.gaussian


def predict(
    config: DecoderConfig,
    params: Mapping[str, Any],
    block: int,
    name: str,
    mean_square: float,
    *,
    position: int = 0,
    branch_mean_square: float | None = None,
) -> Prediction:
    """Return the law of the Jacobian of one sub-layer of the decoder at one position.

    Args:
      config: the :class:`DecoderConfig`.
      params: the decoder's parameters.
      block: l, from 0.
      name: "attention" or "mlp".
      mean_square: of the stream that enters the sub-layer, at this position (its variance over the
        features for LayerNorm).
      position: t, from 0; attention depends on it.
      branch_mean_square: of the branch's output, if measured; else predicted. It counts where a
        norm follows the branch.

    Returns:
      The prediction; without a law, and with a reason, where attention is not near uniform.

    Raises:
      UserError: a sub-layer or block that does not exist, a negative mean square, non-finite
        weights.

    >>> import jax
    >>> from normjax.decoder import Decoder
    >>> config = DecoderConfig(depth=2, width=64, heads=2)
    >>> params = Decoder(config, vocabulary=9, window=4).init(jax.random.key(0))
    >>> prediction = predict(config, params, 0, "mlp", mean_square=4e-4)
    >>> prediction.law.a, prediction.law.edges()[0] < 1 < prediction.law.edges()[1]
    (1.0, True)
    """
    check_choice("name", name, sublayers(config))
    if not 0 <= block < config.depth:
        raise UserError(f"block={block}: must be between 0 and {config.depth - 1}")
    ms = check_number("mean_square", mean_square, 0.0)
    place, leaf = config.resolved_placement, _reader(params["blocks"][name], block)
    a, b, c = (s(block + 1, config.depth) for s in (place.residual, place.branch, place.scale))
    if place.learned_branch:
        b = _rms(leaf("branch_gain"))
    read = _Norm(config, leaf, "read_norm") if place.read else _Norm(config, None, "")
    branch = _branch(config, leaf, name, read, c, ms, position)
    if isinstance(branch, str):
        return Prediction(None, branch)
    if branch_mean_square is not None:
        output = check_number("branch_mean_square", branch_mean_square, 0.0)
        branch = dataclasses.replace(branch, mean_square=output)
    written = _Norm(config, leaf if place.output else None, "output_norm")
    factor, after = b * written.slope(branch.mean_square), written.output(branch.mean_square)
    total = a * a * ms + b * b * after
    stream = _Norm(config, leaf if place.stream else None, "stream_norm")
    scale = stream.slope(total)
    law = block_law(branch, config.width, a * scale, factor * scale)
    return Prediction(law, _assumption(name, position), stream.output(total))


def _assumption(name: str, position: int) -> str:
    text = (
        f"weights independent and without preferred direction (as at initialization), d large,"
        f" the radial direction of norms left out, J of the {name} in its two-layer form W_2 D W_1"
    )
    if name == "attention":
        text += f"; attention uniform over {position + 1} distinct tokens, its own position only"
    return text


def _branch(config, leaf, name, read, c, ms, position) -> Branch | str:
    scale = c * read.unit_slope(ms)
    common: dict[str, Any] = {"gain": read.gain, "input_mean_square": scale**2 * ms, "slope": scale}
    shift = c * read.bias
    if name == "mlp":
        gated = config.mlp == "swiglu"
        w_in, w_gate = leaf("branch", "in", "kernel"), leaf("branch", "gate", "kernel")
        return mlp_branch(
            config.mlp, w_in, leaf("branch", "out", "kernel"),
            w_gate=w_gate if gated else None,
            shift=shift @ w_in + _or_zero(leaf("branch", "in", "bias")),
            gate_shift=shift @ w_gate + _or_zero(leaf("branch", "gate", "bias")) if gated else 0.0,
            **common,
        )  # fmt: skip
    variance = _logit_variance(config, leaf, read.gain, common["input_mean_square"])
    if position > 0 and not variance <= LARGEST_LOGIT**2:
        return (
            f"no law: attention logits have a standard deviation of {math.sqrt(variance):.2g}"
            f" (uniform attention is assumed, at most {LARGEST_LOGIT:g})"
        )
    return attention_branch(
        leaf("branch", "value", "kernel"), leaf("branch", "output", "kernel"),
        groups=config.heads // config.kv_head_count, head_width=config.head_width,
        position=position, logit_variance=variance, **common,
    )  # fmt: skip


def _logit_variance(config, leaf, gain, ms: float) -> float:
    """Variance of q k / sqrt(C) for independent tokens: the mean squares of q and k multiply."""
    if config.qk_norm:
        gains = [leaf("branch", f"{side}_norm", "gain") for side in ("query", "key")]
        offset = 1.0 if config.norm == "rmsnorm_offset" else 0.0
        return math.prod(1.0 if g is None else _rms(g + offset) ** 2 for g in gains)
    kernels = [leaf("branch", side, "kernel") for side in ("query", "key")]
    return math.prod(ms * float(np.mean(column_squares(kernel, gain))) for kernel in kernels)


class _Norm:
    """One norm of a sub-layer as numbers: gain, bias, and 1/s of a given mean square."""

    def __init__(self, config: DecoderConfig, leaf: Callable | None, name: str):
        row = NORMS["identity"] if leaf is None else NORMS[config.norm]
        self._eps, self._identity = config.norm_eps, row is NORMS["identity"]
        gain = leaf(name, "gain") if leaf and row.gain != "none" else None
        bias = leaf(name, "bias") if leaf and row.bias else None
        offset = 1.0 if row.gain == "1+g" else 0.0
        self.gain = np.ones(config.width) if gain is None else gain + offset
        self.bias = np.zeros(config.width) if bias is None else bias

    def unit_slope(self, mean_square: float) -> float:
        """1/s, or 1 without a norm."""
        if self._identity:
            return 1.0
        if mean_square + self._eps <= 0:
            raise UserError(
                "mean_square=0: a norm with eps = 0 has no derivative there; pass a positive one"
            )
        return (mean_square + self._eps) ** -0.5

    def slope(self, mean_square: float) -> float:
        """The size of the Jacobian: rms gain / s."""
        return _rms(self.gain) * self.unit_slope(mean_square)

    def output(self, mean_square: float) -> float:
        """Mean square of the norm's output."""
        squares = _rms(self.gain) ** 2 * mean_square * self.unit_slope(mean_square) ** 2
        return squares + float(np.mean(self.bias**2))


def _reader(tree: Mapping[str, Any], block: int) -> Callable[..., Any]:
    def leaf(*path: str) -> Floats | None:
        node: Any = tree
        for key in path:
            if key not in node:
                return None
            node = node[key]
        return check_values("/".join(path), np.asarray(node)[block])

    return leaf


def _rms(x: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _or_zero(x: Floats | None) -> Floats | float:
    return 0.0 if x is None else x
