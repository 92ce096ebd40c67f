"""Closed-form Jacobians of the branches: softmax, the MLP, and attention over a whole sequence.

    softmax     J = diag(p) - p p^T
    MLP         J = W_out diag(act'(z)) W_in                                      z = W_in x
    attention   do_i/dx_m = p_im W_v + p_im c_im (v_m - o_i) (dl_im/dk_m K_m)
                            + [i = m] sum_n p_in c_in (v_n - o_i) (dl_in/dq_i Q_i)

for one head, before its output matrix: l_im = q_i . k_m / sqrt(C) are the logits, p_i their softmax
after the cap, c_im the slope of the cap, o_i = sum_m p_im v_m, and Q_i, K_m the Jacobians (C, d) of
the query and key with respect to their token: the weight matrix, then the norm of queries and keys
where there is one, then the rotation of the position. Only m <= i has p_im > 0.

NumPy in float64. The parameters are those of the decoder's own modules, of any dtype.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from normjax.decoder_config import DecoderConfig
from normjax.errors import UserError
from normjax.jacobians.closed_forms import norm_jacobian
from normjax.layers import angles_of, rotate, seen_by
from normjax.norm_derivatives import Floats
from normjax.traced import as_float64

_EXACT = 24
"""Up to so many entries all sets are compared: 2^12 sums on each side."""

# --- softmax and MLP ------------------------------------------------------------------------------


def softmax_jacobian(logits: Any, where: Any = None) -> Floats:
    """Return the Jacobian of softmax at the logits: J = diag(p) - p p^T.

    1 - p of the largest entry is summed from the others, so that a saturated softmax keeps all its
    digits.

    Args:
      logits: (..., n), finite.
      where: (..., n) booleans; False is masked: p = 0. A row without any True has J = 0.

    Returns:
      (..., n, n) float64, symmetric; its rows sum to zero and its norm is at most 1/2.

    >>> softmax_jacobian([0.0, 0.0])
    array([[ 0.25, -0.25],
           [-0.25,  0.25]])
    """
    p = _softmax(logits, where)
    rest = 1 - p
    largest = np.argmax(p, axis=-1)[..., None]
    others = p.copy()
    np.put_along_axis(others, largest, 0.0, axis=-1)
    np.put_along_axis(rest, largest, others.sum(-1, keepdims=True), axis=-1)
    jacobian = -p[..., :, None] * p[..., None, :]
    index = np.arange(p.shape[-1])
    jacobian[..., index, index] = p * rest
    return jacobian


def _softmax(logits: Any, where: Any) -> Floats:
    x = as_float64("logits", logits)
    mask = np.ones(x.shape, bool) if where is None else np.broadcast_to(where, x.shape)
    top = np.max(np.where(mask, x, -np.inf), axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.where(mask, np.exp(np.where(mask, x - top, 0.0)), 0.0)
    total = e.sum(-1, keepdims=True)
    return e / np.where(total > 0, total, 1.0)


class Gauge(NamedTuple):
    """A saturation gauge (...) between 0 and 1, and bounds (...) on how far above it may lie."""

    value: Floats
    bound: Floats


def softmax_gauge(logits: Any, where: Any = None) -> Gauge:
    """Return how far softmax is from saturated: max_S 4 P(S) (1 - P(S)) over sets S of entries.

    It is the norm of the Jacobian from the largest entry to the sum, max |J t|_1 over |t_i| <= 1:
    1 where some set holds half of the probability, 0 where one entry holds all of it.

    Exact where one entry holds half or more, and for up to 24 entries (all sums of two halves are
    compared). Of more, the largest differencing (Karmarkar and Karp 1982) leaves a gap g between
    two sets, and 1 - g^2 is within g^2 of the maximum.

    Args:
      logits, where: as for :func:`softmax_jacobian`.

    Source: arXiv 2602.18849, where a set of half the probability is called balanced mass.

    >>> softmax_gauge([0.0, 0.0]).value, softmax_gauge([0.0, 800.0]).value
    (array(1.), array(0.))
    """
    p = np.sort(_softmax(logits, where), axis=-1)[..., ::-1]
    rows = p.reshape(-1, p.shape[-1])
    gaps = np.array([_gap(row[row > 0]) for row in rows]).reshape(*p.shape[:-1], 2)
    largest, others = p[..., 0], p[..., 1:].sum(axis=-1)
    value = np.where(largest >= 0.5, 4 * largest * others, 1 - gaps[..., 0] ** 2)
    value = np.where(p.sum(axis=-1) > 0, value, 0.0)
    return Gauge(value, np.where(largest >= 0.5, 0.0, gaps[..., 1]))


def _gap(p: Floats) -> tuple[float, float]:
    """Return |P(S) - P(not S)| of the best set found, and how far its gauge may be too low."""
    if len(p) <= _EXACT:
        one, other = (_sums(half) for half in (p[::2], p[1::2]))
        other = np.sort(other)
        wanted = 0.5 * p.sum() - one
        at = np.searchsorted(other, wanted)
        near = [other[np.clip(i, 0, len(other) - 1)] for i in (at - 1, at)]
        return 2 * float(min(np.abs(x - wanted).min() for x in near)), 0.0
    heap = [-x for x in p]
    heapq.heapify(heap)
    while len(heap) > 1:
        heapq.heappush(heap, heapq.heappop(heap) - heapq.heappop(heap))
    return -heap[0], heap[0] ** 2


def _sums(p: Floats) -> Floats:
    """Return the sums of all sets of entries."""
    sums = np.zeros(1)
    for x in p:
        sums = np.concatenate([sums, sums + x])
    return sums


def linear_map(parameters: Mapping[str, Any], x: Floats) -> Floats:
    """Return x W (+ b) for {"kernel": (n, m), "bias": (m,)}, in float64."""
    y = x @ np.asarray(parameters["kernel"], np.float64)
    return y + np.asarray(parameters["bias"], np.float64) if "bias" in parameters else y


def mlp_jacobian(config: DecoderConfig, parameters: Mapping[str, Any], x: Any) -> Floats:
    """Return the Jacobian of the decoder's MLP at x.

    W_out diag(act'(z)) W_in with z = W_in x; gated, with y = act(z_gate) * z,
    W_out (diag(act'(z_gate) z) W_gate + diag(act(z_gate)) W_in). A norm of what the output matrix
    reads has its own Jacobian before that.

    Args:
      config: which nonlinearity, by ``config.mlp``.
      parameters: those of the MLP: {"in": {"kernel": (d, F)}, "out": ..., "gate": ...}.
      x: (..., d), what the MLP reads.

    Returns:
      (..., d, d) float64.

    Raises:
      UserError: x not finite or not (..., d).
    """
    kernels = {
        k: np.asarray(v["kernel"], np.float64) for k, v in parameters.items() if "kernel" in v
    }
    x = as_float64("x", x, kernels["in"].shape[:1])
    hidden, act = linear_map(parameters["in"], x), config.mlp_row
    gate = linear_map(parameters["gate"], x) if act.gated else hidden
    with jax.enable_x64(True):
        opened = np.asarray(act.function(jnp.asarray(gate)))
    out = kernels["out"].T
    if "hidden" in config.inner_norms:
        read = opened * hidden if act.gated else opened
        own = parameters.get("hidden_norm", {})
        out = out @ norm_jacobian(config.norm_row, read, own, config.norm_eps)
    if not act.gated:
        return (out * act.slope(hidden)[..., None, :]) @ kernels["in"].T
    through_gate = out * (act.slope(gate) * hidden)[..., None, :]
    through_in = out * opened[..., None, :]
    return through_gate @ kernels["gate"].T + through_in @ kernels["in"].T


# --- attention ------------------------------------------------------------------------------------


class _Heads(NamedTuple):
    """What attention's Jacobian is made of; H query heads, T positions, C head width."""

    q: Floats  # (H, T, C), as they enter the logits, with their factor 1/sqrt(C)
    k: Floats  # (H, T, C), keys of a group repeated for each of its queries
    v: Floats  # (H, T, C)
    o: Floats  # (H, T, C) = p v
    p: Floats  # (H, T, T), rows sum to one, zero above the diagonal
    weight: Floats  # (H, T, T) = p times the slope of the cap
    dq: Floats  # (H, T, C, d), the derivative of q_i by x_i
    dk: Floats  # (H, T, C, d)
    dv: Floats  # (H, C, d), or (H, T, C, d) where values are normalized
    out: Floats  # (H, C, d), the output matrix's rows of each head
    after: Floats | None = None  # (T, d, d): what follows, where a norm stands before that matrix


def attention_jacobian(
    config: DecoderConfig, parameters: Mapping[str, Any], x: Any, local: bool = False
) -> Floats:
    """Return the Jacobian of the decoder's attention over a whole sequence.

    Causal, with grouped heads, rotary positions, norm of queries and keys, capped logits and biases
    as the config has them.

    Args:
      config: of the decoder.
      parameters: those of the attention: {"query": {"kernel": (d, H C)}, "key": ..., "value": ...,
        "output": ...} and "query_norm", "key_norm" where the config has them.
      x: (T, d), what attention reads.
      local: whether the block is one of ``config.local_blocks``.

    Returns:
      (T, d, T, d) float64, the layout of ``jax.jacfwd``: [i, :, m, :] is d o_i / d x_m, zero for
      m > i.

    Raises:
      UserError: x not finite or not (T, d).
    """
    heads = _heads(config, parameters, x, local)
    H, T, C = heads.q.shape
    d = heads.out.shape[-1]
    if heads.dv.ndim == 3:
        rows = heads.p.reshape(H, -1).T @ (heads.out.transpose(0, 2, 1) @ heads.dv).reshape(H, -1)
        jacobian = rows.reshape(T, T, d, d)
    else:
        through = heads.out.transpose(0, 2, 1)[:, None] @ heads.dv  # (H, m, d, d)
        jacobian = np.einsum("him,hmab->imab", heads.p, through)
    # (v_m - o_i) through the output matrix, beside the gradient of the logit by x_m: rank one each.
    spread = (heads.v @ heads.out)[:, None] - (heads.o @ heads.out)[:, :, None]
    left = heads.weight[..., None] * spread
    right = np.swapaxes(heads.q[:, None] @ heads.dk, 1, 2)  # (H, i, m, d): q_i^T K_m
    jacobian += np.einsum("himd->imdh", left) @ np.einsum("hime->imhe", right)
    index = np.arange(T)
    jacobian[index, index] += _through_output(heads, _query_part(heads))
    if heads.after is not None:
        jacobian = heads.after[:, None] @ jacobian
    return np.ascontiguousarray(jacobian.transpose(0, 2, 1, 3))


def attention_token_jacobians(
    config: DecoderConfig, parameters: Mapping[str, Any], x: Any, local: bool = False
) -> Floats:
    """Return d o_i / d x_i of every position at once, keys and values of the others held fixed.

    The diagonal blocks of :func:`attention_jacobian`, at about the cost of d forward passes.

    Args:
      config, parameters, x, local: as there.

    Returns:
      (T, d, d) float64.
    """
    heads = _heads(config, parameters, x, local)
    own = np.einsum("hii->hi", heads.p)[..., None, None]
    own_weight = np.einsum("hii->hi", heads.weight)[..., None]
    inner = _query_part(heads) + own * (heads.dv[:, None] if heads.dv.ndim == 3 else heads.dv)
    gradient = (heads.q[:, :, None, :] @ heads.dk)[:, :, 0]  # q_i^T K_i
    inner += (own_weight * (heads.v - heads.o))[..., :, None] * gradient[..., None, :]
    own_output = _through_output(heads, inner)
    return own_output if heads.after is None else heads.after @ own_output


def _query_part(heads: _Heads) -> Floats:
    """Return sum_n p_in c_in (v_n - o_i) k_n^T Q_i: (H, T, C, d), a covariance of v and k."""
    weighted = heads.weight[..., None] * heads.k[:, None]  # (H, i, n, C)
    spread = heads.v[:, None] - heads.o[:, :, None]
    return (np.swapaxes(spread, -1, -2) @ weighted) @ heads.dq


def _through_output(heads: _Heads, inner: Floats) -> Floats:
    """Return sum over heads of W_o^T inner: (H, T, C, d) -> (T, d, d)."""
    H, T, C, d = inner.shape
    return heads.out.reshape(H * C, -1).T @ inner.transpose(1, 0, 2, 3).reshape(T, H * C, d)


def _heads(config: DecoderConfig, parameters: Mapping[str, Any], x: Any, local: bool) -> _Heads:
    kernels = {
        k: np.asarray(parameters[k]["kernel"], np.float64)
        for k in ("query", "key", "value", "output")
    }
    x = as_float64("x", x, kernels["query"].shape[:1])
    if x.ndim != 2:
        raise UserError(f"x of shape {x.shape}: must be one sequence (T, {x.shape[-1]})")
    C, group = config.head_width, config.heads // config.kv_head_count
    q, dq = _projected(config, parameters, "query", x, local)
    k, dk = _projected(config, parameters, "key", x, local)
    if "value" in config.inner_norms:
        v, dv = _projected(config, parameters, "value", x, local)
    else:
        v = linear_map(parameters["value"], x).reshape(len(x), -1, C).transpose(1, 0, 2)
        dv = kernels["value"].T.reshape(-1, C, x.shape[1])
    k, dk, v, dv = (np.repeat(each, group, axis=0) for each in (k, dk, v, dv))
    q, dq = q * config.attention_factor, dq * config.attention_factor
    p, weight = _attend(config, q @ np.swapaxes(k, -1, -2), local)
    out, o, after = kernels["output"].reshape(config.heads, C, -1), p @ v, None
    scale = np.asarray(parameters.get("head_scale", 1.0), np.float64).reshape(-1, 1, 1)
    if over := config.inner_norms.get("output"):
        # Heads come to themselves; norm and matrix follow, token by token.
        read = (o * scale).transpose(1, 0, 2).reshape(len(x), 1 if over == "heads" else len(o), -1)
        own = parameters.get("output_norm", {})
        J = norm_jacobian(config.norm_row, read, own, config.norm_eps)  # (T, groups, c, c)
        rows = kernels["output"].reshape(*J.shape[1:3], -1)
        after = np.einsum("gcd,tgce->tdge", rows, J).reshape(len(x), rows.shape[-1], -1)
        out = np.eye(config.heads * C).reshape(config.heads, C, -1)
    return _Heads(q, k, v, o, p, weight, dq, dk, dv, out * scale, after)


def _projected(
    config: DecoderConfig, parameters: Mapping[str, Any], name: str, x: Floats, local: bool
) -> tuple[Floats, Floats]:
    """Return queries, keys or values (heads, T, C) and their Jacobians by their token."""
    T, d = x.shape
    C = config.head_width
    value = linear_map(parameters[name], x).reshape(T, -1, C)
    kernel = np.asarray(parameters[name]["kernel"], np.float64).T.reshape(-1, C, d)
    jacobian = np.broadcast_to(kernel, (T, *kernel.shape))
    if over := config.inner_norms.get(name):
        shape = value.shape
        if over == "heads":
            value, jacobian = value.reshape(T, 1, -1), jacobian.reshape(T, 1, -1, d)
        norm, of_norm = config.norm_row, parameters.get(f"{name}_norm", {})
        jacobian = norm_jacobian(norm, value, of_norm, config.norm_eps) @ jacobian
        with jax.enable_x64(True):
            wide = {k: jnp.asarray(v, jnp.float64) for k, v in of_norm.items()}
            value = np.asarray(norm(jnp.asarray(value), wide, config.norm_eps))
        value, jacobian = value.reshape(shape), jacobian.reshape(*shape, d)
    if config.positions == "rotary" and name != "value":
        columns = np.concatenate(
            [value[None], np.moveaxis(jacobian, -1, 0)]
        )  # (1 + d, T, heads, C)
        with jax.enable_x64(True):  # a rotation is linear: values and derivatives turn alike
            turned = np.asarray(_rotated(columns, angles_of(config, len(x), local, jnp.float64)))
        value, jacobian = turned[0], np.moveaxis(turned[1:], 0, -1)
    return value.transpose(1, 0, 2), jacobian.transpose(1, 0, 2, 3)


@jax.jit
def _rotated(x: Any, angles: Any) -> Any:
    return rotate(x, angles)


def _attend(config: DecoderConfig, logits: Floats, local: bool) -> tuple[Floats, Floats]:
    """Return the causal softmax of the (capped) logits, and the same times the cap's slope."""
    slope: Any = 1.0
    if cap := config.attention_softcap:
        t = np.tanh(logits / cap)
        logits, slope = cap * t, 1 - t * t
    causal = np.asarray(seen_by(config, logits.shape[-1], local))
    logits = np.where(causal, logits, -np.inf)
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    p = e / e.sum(axis=-1, keepdims=True)
    return p, p * slope
