"""The size of a branch's Jacobian from the branch's own weights.

For a branch with hidden units f the Jacobian of F(G x / s) is sum_f p_f q_f^T, and with weights at
initialization, independent and without preferred direction, only their strengths count:

    MLP        |p_f|^2 |q_f|^2 = |W_out[f]|^2 |G W_in[:, f]|^2 phi'(z_f)^2,  z_f ~ N(mean, variance)
    swiglu     |W_out[f]|^2 (|G W_gate[:, f]|^2 (act'(z) v)^2 + |G W_in[:, f]|^2 act(z)^2)
    attention  |W_o[f]|^2 |G W_v[:, f]|^2 (1 + t r^2) / (t + 1)^2 at position t, r^2 the variance of
               the logits: each of t + 1 positions has the weight 1/(t + 1)

Where tokens repeat, the t + 1 positions hold fewer distinct ones, with shares w of the positions:
1/(t + 1) in the output's mean square is then sum w^2, and t/(t + 1)^2 the squared size of
diag(w) - w w^T, sum w^2 - 2 sum w^3 + (sum w^2)^2;

so that sigma^2 = (1/d) sum_f E|p_f|^2 |q_f|^2, which for equal variances is the familiar
s_1^2 s_2^2 E[phi'(s_1 z)^2] / mean(h^2). Expectations over z are Gauss-Hermite sums. What stands
around the branch, norms and residual path, is in :mod:`normjax.theory.sublayer_theory`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from normjax.errors import UserError, check_choice
from normjax.nonlinearities import NONLINEARITIES, Nonlinearity
from normjax.theory.random_matrices import Floats, check_number, check_values
from normjax.theory.two_layer import TwoLayerBlock, compress

NODES = 64


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch F as the sum of its hidden units, for an input of given mean square.

    Attributes:
      strengths: (n,) values of |p_f|^2 |q_f|^2 of the Jacobian of F(c G x / s).
      weights: (n,) fractions of the hidden units.
      hidden: number of hidden units.
      mean_square: of the branch's output.
    """

    strengths: Floats
    weights: Floats
    hidden: int
    mean_square: float


def gauss_hermite(nodes: int = NODES) -> tuple[Floats, Floats]:
    """Return z, w with sum w f(z) = E f(Z) for a standard normal Z, exact for degree < 2 nodes.

    >>> z, w = gauss_hermite()
    >>> round(float(w @ z**4), 12)
    3.0
    """
    z, w = np.polynomial.hermite_e.hermegauss(nodes)
    return z, w / w.sum()


def mlp_branch(
    activation: Nonlinearity | str,
    w_in: ArrayLike,
    w_out: ArrayLike,
    *,
    w_gate: ArrayLike | None = None,
    gain: ArrayLike = 1.0,
    input_mean_square: float = 1.0,
    slope: float = 1.0,
    shift: ArrayLike = 0.0,
    gate_shift: ArrayLike = 0.0,
) -> Branch:
    """Return the hidden units of F(x) = W_out act(W_in x), or of the gated MLP.

    Args:
      activation: a row of the table of nonlinearities or its name; a gated one needs ``w_gate``.
      w_in, w_gate: (d, F). w_out: (F, d).
      gain: scalar or (d,), what the input is multiplied by after it is made isotropic.
      input_mean_square: mean square of the input before that gain.
      slope: derivative of that input by h: c / s behind a norm, 1 without one.
      shift, gate_shift: scalar or (F,), added to the pre-activations: biases.

    Returns:
      Strengths over hidden units and Gauss-Hermite nodes, and the mean square of the output.

    Raises:
      UserError: unknown activation, shapes that do not fit, non-finite values.

    >>> rng = np.random.default_rng(0)
    >>> w_in, w_out = rng.normal(size=(64, 256)) / 8, rng.normal(size=(256, 64)) / 16
    >>> branch = mlp_branch("relu", w_in, w_out)           # sigma^2 = E relu'^2 = 1/2
    >>> bool(abs(256 / 64 * branch.weights @ branch.strengths - 0.5) < 0.02)
    True
    """
    if isinstance(activation, str):
        check_choice("activation", activation, NONLINEARITIES)
        activation = NONLINEARITIES[activation]
    value, derivative = activation.value, activation.slope
    w_in, w_out = _matrix("w_in", w_in), _matrix("w_out", w_out)
    if w_out.shape != w_in.shape[::-1]:
        raise UserError(f"w_out of shape {w_out.shape}: must be {w_in.shape[::-1]}, as w_in.T")
    d, hidden = w_in.shape
    ms = check_number("input_mean_square", input_mean_square, 0.0)
    rows = np.sum(w_out**2, axis=1)
    columns = column_squares(w_in, gain)
    z, w = gauss_hermite()
    first = np.sqrt(ms * columns)[:, None] * z + _shift("shift", shift, hidden)[:, None]
    if not activation.gated:
        squares = columns[:, None] * derivative(first) ** 2
        output = value(first) ** 2 @ w
    else:
        gate = _matrix("w_gate", w_gate)
        if gate.shape != w_in.shape:
            raise UserError(f"w_gate of shape {gate.shape}: must be {w_in.shape}, as w_in")
        gates = column_squares(gate, gain)
        second = np.sqrt(ms * gates)[:, None] * z
        second = second + _shift("gate_shift", gate_shift, hidden)[:, None]
        # Gate and value are independent: a product grid, thinned to 16 values of the value.
        coarse, u = gauss_hermite(16)
        linear = np.sqrt(ms * columns)[:, None] * coarse + _shift("shift", shift, hidden)[:, None]
        squares = (
            gates[:, None, None] * (derivative(second)[:, :, None] * linear[:, None, :]) ** 2
            + columns[:, None, None] * value(second)[:, :, None] ** 2
        ).reshape(hidden, -1)
        output = (value(second) ** 2 @ w) * (linear**2 @ u)
        w = np.outer(w, u).ravel()
    tau, mass = compress(
        slope**2 * rows[:, None] * squares,
        np.broadcast_to(w / hidden, squares.shape),
        least=1 / hidden,
    )
    return Branch(tau, mass, hidden, float(rows @ output) / d)


def attention_branch(
    w_value: ArrayLike,
    w_output: ArrayLike,
    *,
    groups: int = 1,
    head_width: int | None = None,
    position: int = 0,
    logit_variance: float = 0.0,
    shares: ArrayLike | None = None,
    gain: ArrayLike = 1.0,
    input_mean_square: float = 1.0,
    slope: float = 1.0,
) -> Branch:
    """Return the hidden units of uniform causal attention, by the token's own position t.

    d o_t / d h_t = W_v p_tt + Cov(v, k) W_q / sqrt(C), of which the second, over t + 1 independent
    tokens, has t r^2 times the square of the first.

    Args:
      w_value: (d, K C). w_output: (K G C, d), heads of a group next to each other.
      groups: query heads G that share one head of values; their rows of w_output add.
      head_width: C; needed where groups > 1.
      position: t, from 0.
      logit_variance: r^2.
      shares: (n,) of the distinct tokens among the t + 1 positions, their sum 1; None: all differ.
      gain, input_mean_square, slope: as in :func:`mlp_branch`.

    Raises:
      UserError: shapes that do not fit, a negative position, non-finite values.
    """
    w_value, w_output = _matrix("w_value", w_value), _matrix("w_output", w_output)
    d, hidden = w_value.shape
    width = hidden if head_width is None else head_width
    if w_output.shape != (hidden * groups, d) or hidden % width:
        raise UserError(
            f"w_output of shape {w_output.shape}: must be {(hidden * groups, d)} for w_value of"
            f" {w_value.shape} and groups={groups}"
        )
    if position < 0:
        raise UserError(f"position={position}: must be at least 0, the first position")
    variance = check_number("logit_variance", logit_variance, 0.0)
    summed = w_output.reshape(hidden // width, groups, width, d).sum(axis=1).reshape(hidden, d)
    strength = np.sum(summed**2, axis=1) * column_squares(w_value, gain)
    if shares is None:
        own, mixed = (1 + position * variance) / (position + 1) ** 2, float(position + 1)
    else:
        w = check_values("shares", shares)
        if w.ndim != 1 or not np.all(w > 0) or abs(float(w.sum()) - 1) > 1e-9:
            raise UserError("shares: must be positive numbers (n,) whose sum is 1")
        square = float(w @ w)
        moved = max(square - 2 * float(w @ w**2) + square**2, 0.0)  # |diag(w) - w w^T|_F^2
        own, mixed = 1 / (position + 1) ** 2 + variance * moved, 1 / square
    tau, mass = compress(slope**2 * own * strength, np.full(hidden, 1 / hidden))
    output = check_number("input_mean_square", input_mean_square, 0.0) * strength.sum() / d
    return Branch(tau, mass, hidden, float(output) / mixed)


def block_law(branch: Branch, width: int, a: float, factor: float = 1.0) -> TwoLayerBlock:
    """Return the law of ``a I + factor J_F`` for a branch on ``width`` features.

    >>> branch = Branch(np.array([0.25]), np.array([1.0]), hidden=8, mean_square=1.0)
    >>> round(block_law(branch, width=4, a=1.0, factor=2.0).sigma ** 2, 12)    # 4 * 8/4 * 0.25
    2.0
    """
    tau = tuple((factor**2 * branch.strengths).tolist())
    return TwoLayerBlock(tau, tuple(branch.weights.tolist()), branch.hidden / width, a)


def _matrix(name: str, values: Any) -> Floats:
    matrix = check_values(name, values) if values is not None else np.empty(0)
    if matrix.ndim != 2 or 0 in matrix.shape:
        raise UserError(f"{name}: must be a matrix, not of shape {matrix.shape}")
    return matrix


def column_squares(matrix: Floats, gain: ArrayLike) -> Floats:
    """Return |G W[:, f]|^2 of every column."""
    gain = check_values("gain", gain)
    if gain.shape not in ((), matrix.shape[:1]):
        raise UserError(f"gain of shape {gain.shape}: must be a scalar or {matrix.shape[:1]}")
    return np.sum((np.broadcast_to(gain, matrix.shape[:1])[:, None] * matrix) ** 2, axis=0)


def _shift(name: str, values: ArrayLike, hidden: int) -> Floats:
    values = check_values(name, values)
    if values.shape not in ((), (hidden,)):
        raise UserError(f"{name} of shape {values.shape}: must be a scalar or ({hidden},)")
    return np.broadcast_to(values, (hidden,))
