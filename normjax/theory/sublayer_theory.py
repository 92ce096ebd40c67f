"""The law of a sub-layer's Jacobian at one position, from the decoder's weights, and when it holds.

A sub-layer h' = P(a h + b Q(F(c N(h)))) has at one position the Jacobian

    J = J_P (a I + b c J_Q J_F J_N),        J_N = G / s,   s = sqrt(mean(h^2) + eps),

up to the radial direction of each norm, one in d. The branch is that of
:mod:`normjax.theory.layer_scale`; gains of Q and P count by their root mean square. The mean
square of the stream, and its mean over the features, are carried along, so that the product over
all blocks follows from the embedding's alone; a norm that removes the mean divides by the root of
the variance, mean square less squared mean. Every result carries its assumption as text, or the
reason why there is no law; :func:`dependent_weights` asks whether the weights are as assumed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from normjax.decoder import slot_norms
from normjax.decoder_config import DecoderConfig
from normjax.equation import Learned, fold
from normjax.errors import UserError, check_choice
from normjax.norms import Norm
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
class PredictedLaw:
    """What theory says of one sub-layer's Jacobian at one position.

    Attributes:
      law: the law of its singular values, with ``edges``, ``density``, ``cdf``, ``quantile``; a
        factor of :class:`ProductLaw`. None where the theory does not apply.
      assumption: one line for a plot: what is assumed or, where ``law`` is None, why there is none.
      mean_square: predicted mean square of the stream after the sub-layer (nan without a law).
      mean: predicted mean of that stream over its features.
    """

    law: TwoLayerBlock | None
    assumption: str
    mean_square: float = math.nan
    mean: float = 0.0

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
    mean: float = 0.0,
    shares: ArrayLike | None = None,
) -> PredictedLaw:
    """Return the law of the Jacobian of one sub-layer of the decoder at one position.

    Args:
      config: the :class:`DecoderConfig`.
      params: the decoder's parameters.
      block: l, from 0.
      name: "attention" or "mlp".
      mean_square: of the stream that enters the sub-layer, at this position.
      position: t, from 0; attention depends on it.
      branch_mean_square: of the branch's output, if measured; else predicted. It counts where a
        norm follows the branch.
      mean: of the stream over its features; its square is taken from the mean square where a norm
        removes it.
      shares: (n,) of the distinct tokens among the positions up to this one, as for
        :func:`normjax.theory.layer_scale.attention_branch`; None: all of them differ.

    Returns:
      The prediction; without a law, and with a reason, where attention is not near uniform.

    Raises:
      UserError: a sub-layer or block that does not exist, a negative mean square, one below the
        squared mean, non-finite weights.

    >>> import jax
    >>> from normjax.decoder import Decoder
    >>> config = DecoderConfig(depth=2, width=64, heads=2)
    >>> params = Decoder(config, vocabulary=9, window=4).init(jax.random.key(0))
    >>> prediction = predict(config, params, 0, "mlp", mean_square=4e-4)
    >>> prediction.law.a, prediction.law.edges()[0] < 1 < prediction.law.edges()[1]
    (1.0, True)
    """
    check_choice("name", name, config.sublayers)
    if not 0 <= block < config.depth:
        raise UserError(f"block={block}: must be between 0 and {config.depth - 1}")
    ms = check_number("mean_square", mean_square, 0.0)
    if not float(mean) ** 2 <= ms * (1 + 1e-12):
        raise UserError(f"mean={mean}: its square must be at most mean_square={ms}")
    row = config.placement_row.of(name).at(block + 1, config.depth)
    algebra = _Sizes(config, params, block, name, position, branch_mean_square, shares)
    try:
        found = fold(row, _Size(ms, float(mean), kept=1.0), algebra)
    except _NoLawError as reason:
        return PredictedLaw(None, f"no law: {reason}")
    law = block_law(algebra.own, config.width, found.kept, found.written)
    text = _assumption(name, position, shares, branch_mean_square is not None)
    return PredictedLaw(law, text, found.mean_square, found.mean)


class _NoLawError(Exception):
    """Why there is no law."""


@dataclasses.dataclass(frozen=True)
class _Size:
    """A signal as theory sees it: its mean square, and the sizes of its derivative's two parts.

    Attributes:
      mean_square: of the signal.
      mean: of the signal over its features.
      kept: the multiple of the identity in its derivative.
      written: the multiple of the branch's derivative.
      unit: the factor on the stream before gain, in what a branch reads.
      gain, bias: of the norm that a branch reads through, (d,), without the factor.
    """

    mean_square: float
    mean: float = 0.0
    kept: float = 0.0
    written: float = 0.0
    unit: float = 1.0
    gain: Any = None
    bias: Any = None


class _Sizes:
    """The algebra of mean-field theory for ``equation.fold``."""

    def __init__(self, config, params, block, name, position, branch_mean_square, shares):
        self.shares = shares
        self.config, self.name, self.position = config, name, position
        self.shared = _reader(params["blocks"], block)
        self.leaf = _reader(params["blocks"][name], block)
        self.measured = branch_mean_square
        self.norms = slot_norms(config, block + 1, name)
        self.local = name == "attention" and block + 1 in config.local_blocks

    def norm(self, slot: str, norm: Any, x: _Size) -> _Size:
        if slot not in self.norms:
            return x
        row, holder = self.norms[slot]
        if row.law is None:
            raise _NoLawError(f"{row.title} states none")
        seen = max(x.mean_square - x.mean**2, 0.0) if row.removes_mean else x.mean_square
        if seen + self.config.norm_eps <= 0 and row.forgets_length:
            raise UserError(
                "mean_square=0: a norm with eps = 0 has no derivative there; pass a positive one"
            )
        unit = float(row.law.factor(seen, self.config.norm_eps, self.config.width))
        gain, bias = (self._parameter(row, holder, name) for name in ("gain", "bias"))
        gain, bias = 1.0 if gain is None else gain, 0.0 if bias is None else bias
        slope = _rms(gain) * unit
        square = _rms(gain) ** 2 * seen * unit**2 + float(np.mean(np.square(bias)))
        mean = 0.0 if row.removes_mean else float(np.mean(gain)) * unit * x.mean
        mean += float(np.mean(bias))
        if slot == "pre_norm":  # the branch counts the gain of every feature
            return dataclasses.replace(x, mean_square=seen, unit=unit, gain=gain, bias=bias)
        return _Size(square, mean, slope * x.kept, slope * x.written)

    def _parameter(self, row: Norm, holder: str, name: str) -> Any:
        known = {p.name for p in row.parameters}
        if unknown := known - {"gain", "bias"}:
            raise _NoLawError(f"{row.title} learns {', '.join(sorted(unknown))} as well")
        return row.seen(name, self.leaf(holder, name)) if name in known else None

    def times(self, name: str, factor: Any, x: _Size) -> _Size:
        if isinstance(factor, Learned):
            own = factor.name or name
            factor = _rms(factor.made_of(self.shared(own) if factor.shared else self.leaf(own)))
        if not isinstance(factor, int | float):
            raise _NoLawError("what mixes streams has none")
        w = float(factor)
        if name == "scale":
            bias = None if x.bias is None else w * x.bias
            return dataclasses.replace(x, unit=w * x.unit, bias=bias)
        return _Size(w * w * x.mean_square, w * x.mean, w * x.kept, w * x.written)

    def mix(self, name: str, weights: Any, state: _Size, x: _Size) -> _Size:
        if name == "read":
            if weights is not None:
                raise _NoLawError("what mixes streams has none")
            return x
        return self.times(name, weights, x)

    def join(self, join: Any, x: _Size, read: _Size) -> _Size:
        if join is not None:
            raise _NoLawError("what joins a branch with what it read has none")
        return x

    def branch(self, x: _Size) -> _Size:
        if self.local and 0 < self.config.local_window <= self.position:
            raise _NoLawError("attention to the last tokens only has none")
        self.own = _branch(self.config, self.leaf, self.name, x, self.position, self.shares)
        if self.measured is not None:
            output = check_number("branch_mean_square", self.measured, 0.0)
            self.own = dataclasses.replace(self.own, mean_square=output)
        return _Size(self.own.mean_square, written=1.0)

    def plus(self, kept: _Size, written: _Size) -> _Size:
        square = kept.mean_square + written.mean_square
        sums = (kept.kept + written.kept, kept.written + written.written)
        return _Size(square, kept.mean + written.mean, *sums)


def _assumption(name: str, position: int, shares: Any, measured: bool) -> str:
    text = (
        f"weights independent and without preferred direction (as at initialization), d large,"
        f" the radial direction of norms left out, J of the {name} in its two-layer form W_2 D W_1"
    )
    if name == "attention":
        tokens = f"{position + 1} distinct tokens"
        if shares is not None and len(np.asarray(shares)) <= position:
            tokens = f"{position + 1} tokens, {len(np.asarray(shares))} of them distinct"
        text += f"; attention uniform over {tokens}, its own position only"
    return text + "; the size of the branch measured" * measured


def _branch(
    config: DecoderConfig, leaf: Any, name: str, x: _Size, position: int, shares: Any
) -> Branch:
    """Return the branch for what it reads."""
    gain = np.ones(config.width) if x.gain is None else x.gain * np.ones(config.width)
    shift = np.zeros(config.width) if x.bias is None else x.bias * np.ones(config.width)
    read = x.unit**2 * x.mean_square
    common: dict[str, Any] = {"gain": gain, "input_mean_square": read, "slope": x.unit}
    inside = {"hidden"} if name == "mlp" else {"value", "output"}
    if found := sorted(inside & set(config.inner_norms)):
        raise _NoLawError(f"a norm inside the branch ({', '.join(found)}) has none")
    if name == "mlp":
        act, w_in = config.mlp_row, leaf("branch", "in", "kernel")
        w_gate = leaf("branch", "gate", "kernel")
        return mlp_branch(
            act, w_in, leaf("branch", "out", "kernel"), w_gate=w_gate,
            shift=shift @ w_in + _or_zero(leaf("branch", "in", "bias")),
            gate_shift=shift @ w_gate + _or_zero(leaf("branch", "gate", "bias"))
            if act.gated else 0.0,
            **common,
        )  # fmt: skip
    variance = _logit_variance(config, leaf, gain, read)
    if leaf("branch", "head_scale") is not None:
        raise _NoLawError("heads with weights of their own have none")
    if position > 0 and not variance <= LARGEST_LOGIT**2:
        raise _NoLawError(
            f"attention logits have a standard deviation of {math.sqrt(variance):.2g}"
            f" (uniform attention is assumed, at most {LARGEST_LOGIT:g})"
        )
    return attention_branch(
        leaf("branch", "value", "kernel"), leaf("branch", "output", "kernel"),
        groups=config.heads // config.kv_head_count, head_width=config.head_width,
        position=position, logit_variance=variance, shares=shares, **common,
    )  # fmt: skip


CHANCE = 5.0
"""Standard deviations from what independent weights have, from which they count as dependent."""


def dependent_weights(config: DecoderConfig, params: Mapping[str, Any], block: int) -> list[str]:
    """Return what of a block's weights is not as theory assumes, in words; [] where all is.

    Three conditions, each with the exact mean and variance of its statistic where it holds:

    - no preferred direction: the squared cosines of the F weight vectors of a matrix, in d
      dimensions, have the mean 1/d and the variance 2 (d - 1) / (d^2 (d + 2)), pair by pair
      independent;
    - the matrices of a branch independent, every two of them that meet in its hidden units: of
      sum_{f != f'} (p_f . p_f') (q_f . q_f'), the part of |W_in W_out|_F^2 that is not
      sum |p_f|^2 |q_f|^2, random signs of the units make a number of mean 0 and of variance
      2 sum ((p_f . p_f') (q_f . q_f'))^2; the cosines of p_f and q_f have mean 0 and variance 1/d;
    - the blocks independent: so have those of the same unit in this block and in another.

    Args:
      config, params: as for :func:`predict`.
      block: l, from 0.

    Raises:
      UserError: weights that are not finite.
    """
    found = []
    for name in config.sublayers:
        tree = params["blocks"][name]
        blocks = [_units(config, _reader(tree, other), name) for other in range(config.depth)]
        own, rest = blocks[block], blocks[:block] + blocks[block + 1 :]
        for which, vectors in own.items():
            if any(len(v) > 1 and abs(_alignment(v)) > CHANCE for v in vectors):
                found.append(f"{name} {which}: has preferred directions")
            pairs = [pair for each in rest for pair in zip(vectors, each[which], strict=True)]
            if any(abs(_alike(p, q)) > CHANCE for p, q in pairs):
                found.append(f"{name} {which}: is not independent of another block's")
        for (one, first), (other, second) in itertools.combinations(own.items(), 2):
            pairs = [(p, q) for p, q in zip(first, second, strict=True) if len(p) > 1]
            if any(max(abs(_agreement(p, q)), abs(_alike(p, q))) > CHANCE for p, q in pairs):
                found.append(f"{name} {one} and {other}: are not independent")
    return found


def _units(config: DecoderConfig, leaf: Any, name: str) -> dict[str, list[Floats]]:
    """Return each matrix of a branch as (F, d) vectors of the same hidden units.

    Of attention once for each query head of a group, with the keys and values that it meets.
    """
    if name == "mlp":
        kernels = {k: leaf("branch", k, "kernel") for k in ("in", "gate", "out")}
        return {k: [w if k == "out" else w.T] for k, w in kernels.items() if w is not None}
    K, C = config.kv_head_count, config.head_width
    groups, found = config.heads // K, {}
    for k in ("query", "key", "value", "output"):
        w = leaf("branch", k, "kernel")
        rows = (w if k == "output" else w.T).reshape(K, -1, C, config.width)
        found[k] = [rows[:, g % rows.shape[1]].reshape(K * C, -1) for g in range(groups)]
    return found


def _alignment(vectors: Floats) -> float:
    """Return by how many standard deviations (F, d) vectors have aligned directions."""
    count, d = vectors.shape
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    if d < 2 or not np.all(length > 0):
        return 0.0
    cosines = (vectors / length) @ (vectors / length).T
    pairs = count * (count - 1) / 2
    excess = (np.sum(cosines**2) - count) / 2 - pairs / d
    return float(excess / np.sqrt(pairs * 2 * (d - 1) / (d * d * (d + 2))))


def _alike(p: Floats, q: Floats) -> float:
    """Return by how many standard deviations vectors (F, d) point as their counterparts do."""
    count, d = p.shape
    length = np.linalg.norm(p, axis=1) * np.linalg.norm(q, axis=1)
    if not np.all(length > 0):
        return 0.0
    return float(np.sum(np.sum(p * q, axis=1) / length) / np.sqrt(count / d))


def _agreement(p: Floats, q: Floats) -> float:
    """Return by how many standard deviations the units' two sides (F, d) go together."""
    products = (p @ p.T) * (q @ q.T)
    np.fill_diagonal(products, 0.0)
    spread = np.sqrt(2 * np.sum(products**2))
    return float(np.sum(products) / spread) if spread > 0 else 0.0


def _logit_variance(config: DecoderConfig, leaf: Any, gain: Any, ms: float) -> float:
    """Variance of s q k for independent tokens: the mean squares of q and k multiply, and s^2 C."""
    found = config.attention_factor**2 * config.head_width if config.attention_scale else 1.0
    for side in ("query", "key"):
        if side in config.inner_norms:
            row = config.norm_row
            if row.law is None or not row.forgets_length:
                raise _NoLawError(f"{row.title} of queries and keys has none")
            own = leaf("branch", f"{side}_norm", "gain")
            heads = {"query": config.heads, "key": config.kv_head_count}[side]
            width = config.head_width * (heads if config.inner_norms[side] == "heads" else 1)
            size = (1.0 if own is None else _rms(row.seen("gain", own))) * width**row.law.power
            found *= size**2
        else:
            squares = column_squares(leaf("branch", side, "kernel"), gain)
            found *= ms * float(np.mean(squares))
    return found


def _reader(tree: Mapping[str, Any], block: int) -> Callable[..., Any]:
    def leaf(*path: str) -> Floats | None:
        node: Any = tree
        for key in path:
            if key not in node:
                return None
            node = node[key]
        return check_values("/".join(path), np.asarray(node)[block])

    return leaf


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _or_zero(x: Floats | None) -> Floats | float:
    return 0.0 if x is None else x
