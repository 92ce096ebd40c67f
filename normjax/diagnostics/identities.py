"""Exact identities of placements: self-tests of an instrumented decoder.

Each returns a defect, a number that is rounding (1e-15 to 1e-13 in float64) where the decoder and
its derivatives are right, whatever the weights, the gains and eps.

    pre-norm      J (e_t x u_t) = a e_t x u_t + b c J_Q J_F (k w u)_t         scaling one token
    dual          u . grad_before = a u . grad_after + <the last term, grad_after>
    post-norm     (e_t x u_t / w_t)^T J = k u_t^T (a I + b c J_Q J_F J_N)      nothing radial leaves

w, u and k = eps/s^2 are the norm's (see norm_derivatives.py); for eps = 0 the terms with k vanish.
They hold for a sub-layer, attention included, and not for two in a row.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax.decoder import slot_norms
from normjax.decoder_config import DecoderConfig
from normjax.diagnostics import radial
from normjax.equation import Sublayer
from normjax.errors import UserError
from normjax.jacobians.blocks import Parts
from normjax.jacobians.closed_forms import norm_derivative
from normjax.norm_derivatives import Floats, NormDerivative
from normjax.norms import Norm
from normjax.traced import as_float64


class DualDefects(NamedTuple):
    """What :func:`dual_identities` returns; every entry is relative to the size of the gradient.

    Attributes:
      exact: (S,) for the S sub-layers in order: the defect of the identity with its eps term.
      plain: (S,): of u . grad_before = a u . grad_after alone; of the order of eps / mean square.
      final: |u . grad| of the stream that the final norm reads, of that order too; None without a
        final norm.
    """

    exact: Floats
    plain: Floats
    final: float | None


def prenorm_identity(parts: Parts, block: int, sublayer: str, h: Any) -> float:
    """Return the defect of J (e_t x u_t) = a e_t x u_t + b c J_Q J_F (k w u)_t, worst token.

    Left: one JVP of the decoder's own sub-layer per token. Right: the norm's closed form and a JVP
    of the branch alone.

    Args:
      parts: the decoder.
      block, sublayer: which, as for ``parts.sublayer``.
      h: (T, d).

    Returns:
      max over t of |left - right| / |left|.

    Raises:
      UserError: a placement without a read norm or with a norm on the stream; a norm without a
        direction at h; h not finite or not (T, d).
    """
    parts.sublayer(block, sublayer)  # both exist
    x = _sequence(parts, h)
    u, images, a = _radial_images(parts, block, sublayer, x)
    each = np.eye(len(x))[:, :, None]
    with jax.enable_x64(True):
        left, inner = _pushed(
            parts.model, parts.layer(block), jnp.asarray(x), each * u, each * images, sublayer
        )
    left, inner = np.asarray(left), np.asarray(inner)
    right = a * (each * u) + inner
    sizes = np.linalg.norm(left.reshape(len(x), -1), axis=1)
    defects = np.linalg.norm((left - right).reshape(len(x), -1), axis=1)
    return float(np.max(defects / np.where(sizes > 0, sizes, 1.0)))


def postnorm_identity(parts: Parts, block: int, sublayer: str, h: Any) -> float:
    """Return the defect of (e_t x u_t / w_t)^T J = k u_t^T (a I + b c J_Q J_F J_N), worst token.

    u is the direction of the stream that P reads, w its gain over its scale: for eps = 0 nothing
    leaves a post-norm sub-layer along u / g.

    Args:
      parts, block, sublayer, h: as for :func:`prenorm_identity`.

    Returns:
      max over t of |left - right|, relative to the size of the sub-layer's own derivative.

    Raises:
      UserError: a placement without a norm on the stream; a gain with zeros; a norm without a
        direction; h not finite or not (T, d).
    """
    parts.sublayer(block, sublayer)  # both exist
    if not has_postnorm_identity(parts.config, block, sublayer):
        raise UserError(
            f"placement={parts.config.placement_row.title}: has no norm on one stream that forgets"
            " its length, as post has"
        )
    x = _sequence(parts, h)
    layer, each = parts.layer(block), np.eye(len(x))[:, :, None]
    with jax.enable_x64(True):
        total = _summed(parts.model, layer, jnp.asarray(x), sublayer)
        D = _norm_at(parts, block, sublayer, "post_norm", np.asarray(total))
        if np.any(D.weight == 0):
            raise UserError("gain: has zeros, along which the output is null anyway; use another")
        null = D.direction / D.weight
        length = np.linalg.norm(null, axis=-1)
        left, inner = _pulled(
            parts.model, layer, jnp.asarray(x),
            each * (null / length[:, None]), each * D.direction, sublayer,
        )  # fmt: skip
    left, inner = (np.asarray(v).reshape(len(x), -1) for v in (left, inner))
    right = (D.radial / length)[:, None] * inner
    size = np.linalg.norm(inner, axis=1) * np.max(np.abs(D.weight), axis=-1)
    return float(np.max(np.linalg.norm(left - right, axis=1) / size))


def dual_identities(parts: Parts, tokens: Any) -> DualDefects:
    """Return the defects of u . grad_before = a u . grad_after, for every sub-layer in order.

    The gradients are those of the mean cross-entropy of the next token with respect to the stream
    before and after each sub-layer, u the direction of every token before it; the worst token
    counts. A scaling of the stream does not change what a pre-norm branch reads, so that nothing is
    gained or lost along it on the way back.

    Args:
      parts: a decoder whose placement reads through a norm and has none on the stream.
      tokens: (T + 1,) integers, T at most the window.

    Raises:
      UserError: another placement; fewer than 2 tokens.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or len(tokens) < 2:
        raise UserError(f"tokens of shape {tokens.shape}: must be (T + 1,) with T at least 1")
    names = parts.sublayer_names
    steps = [(block, name) for block in range(1, parts.config.depth + 1) for name in names]
    states = [parts.embed(tokens[:-1])]
    for block, name in steps:
        states.append(parts.sublayer(block, name)(states[-1]))
    with jax.enable_x64(True):
        grad = _loss_gradient(parts.model, parts.params, states[-1], jnp.asarray(tokens[1:]))
    final = _final_defect(parts, states[-1], grad)
    exact, plain = [], []
    for (block, name), h in zip(reversed(steps), reversed(states[:-1]), strict=True):
        row, norm = _reading(parts, block, name), slot_norms(parts.config, block, name)["pre_norm"]
        layer, after = parts.layer(block), grad
        with jax.enable_x64(True):
            grad, read, pulled = _returned(parts.model, layer, h, after, name)
            bias = row.scale * layer[0][name].get(norm[1], {}).get("bias", 0.0)
            term = radial.returned(norm[0], parts.config.norm_eps, h, read, pulled, bias)
            defect = radial.along(norm[0], h, grad) - row.keep * radial.along(norm[0], h, after)
            plain.append(float(radial.relative(defect[..., :1], after)))
            exact.append(float(radial.relative(defect - term, after)))
    return DualDefects(np.array(exact[::-1]), np.array(plain[::-1]), final)


def _sequence(parts: Parts, h: Any) -> Floats:
    x = as_float64("h", h, (parts.config.width,))
    if x.ndim != 2:
        raise UserError(f"h of shape {x.shape}: must be one sequence (T, {parts.config.width})")
    return x


def _norm_at(parts: Parts, block: int, sublayer: str, slot: str, x: Floats) -> NormDerivative:
    norm, holder = slot_norms(parts.config, block, sublayer)[slot]
    own = parts.layer(block)[0][sublayer].get(holder)
    return _directed(norm, norm_derivative(norm, x, own, parts.config.norm_eps))


def _directed(norm: Norm, D: Any) -> NormDerivative:
    if not np.all(np.any(D.direction != 0, axis=-1)):
        raise UserError(
            f"norm={norm.title}: has no direction at h; take a norm that divides by a length"
            " and an h without zero tokens"
        )
    return D


def _radial_images(
    parts: Parts, block: int, sublayer: str, x: Floats
) -> tuple[Floats, Floats, float]:
    """Return u (T, d), what the norm and c make of it (T, d), c k w u, and a."""
    row = _reading(parts, block, sublayer)
    D = _norm_at(parts, block, sublayer, "pre_norm", x)
    return D.direction, D.radial_image() * float(row.scale), float(row.keep)


def _reading(parts: Parts, block: int, sublayer: str) -> Sublayer:
    """Return what a sub-layer that has the pre-norm identity puts into the equation."""
    config = parts.config
    if not has_prenorm_identity(config, block, sublayer):
        raise UserError(
            f"placement={config.placement_row.title}: must read through a norm, keep a multiple of"
            " the stream and have no norm on it, such as pre"
        )
    return config.placement_row.of(sublayer).at(block, config.depth)


def has_prenorm_identity(config: DecoderConfig, block: int, sublayer: str) -> bool:
    """Whether a sub-layer adds, to a multiple of one stream, what a norm that forgets length read.

    Then a scaling of one token passes as a multiple of itself, but for the norm's eps.
    """
    norms = slot_norms(config, block, sublayer)
    row = config.placement_row.of(sublayer).at(block, config.depth)
    constant = isinstance(row.scale, int | float) and isinstance(row.keep, int | float)
    plain = "pre_norm" in norms and not {"skip_norm", "post_norm"} & set(norms)
    return plain and constant and config.rows == 1 and norms["pre_norm"][0].has_identity


def has_postnorm_identity(config: DecoderConfig, block: int, sublayer: str) -> bool:
    """Whether a sub-layer ends with a norm on one stream that forgets length."""
    norms = slot_norms(config, block, sublayer)
    return config.rows == 1 and "post_norm" in norms and norms["post_norm"][0].has_identity


# --- compiled once for all blocks: the parameters are arguments -----------------------------------


def _alone(model, name: str) -> Sublayer:
    """Return b Q(F(x)), without what a sub-layer reads through and keeps."""
    row = model.config.placement_row.of(name)
    return dataclasses.replace(row, pre_norm=None, post_norm=None, keep=0.0, scale=1.0)


@partial(jax.jit, static_argnums=(0, 5))
def _pushed(model, layer, x, tangents, images, name: str):
    """Return J v for the sub-layer (n, T, d), and b J_Q J_F w for the branch alone."""
    read = model.points(layer, x[None], name)["read"][0]

    def pushed(function, at, v):
        return jax.jvp(lambda z: function(z[None])[0], (at,), (v,))[1]

    whole = partial(model.block, layer, sublayer=name)
    branch = partial(model.block, layer, sublayer=name, row=_alone(model, name))
    left = jax.vmap(lambda v: pushed(whole, x, v))(tangents)
    return left, jax.vmap(lambda v: pushed(branch, read, v))(images)


@partial(jax.jit, static_argnums=(0, 4))
def _returned(model, layer, x, after, name: str):
    """Return the gradient before a sub-layer, what its branch reads, and the gradient there."""
    whole = jax.vjp(lambda z: model.block(layer, z[None], sublayer=name)[0], x)[1]
    read = model.points(layer, x[None], name)["read"][0]
    branch = jax.vjp(lambda z: model.block(
        layer, z[None], sublayer=name, row=_alone(model, name)
    )[0], read)[1]  # fmt: skip
    return whole(after)[0], read, branch(after)[0]


@partial(jax.jit, static_argnums=(0, 5))
def _pulled(model, layer, x, left, inner, name: str):
    """Return w^T J for the sub-layer (n, T, d), and w^T (a I + b c J_Q J_F J_N) for its sum."""
    whole = jax.vjp(lambda z: model.block(layer, z[None], sublayer=name)[0], x)[1]
    row = dataclasses.replace(model.config.placement_row.of(name), post_norm=None)
    total = jax.vjp(lambda z: model.block(layer, z[None], sublayer=name, row=row)[0], x)[1]
    return jax.vmap(whole)(left)[0], jax.vmap(total)(inner)[0]


@partial(jax.jit, static_argnums=(0, 3))
def _summed(model, layer, x, name: str):
    """Return the sum that P reads."""
    return model.points(layer, x[None], name)["sum"][0]


@partial(jax.jit, static_argnums=(0,))
def _loss_gradient(model, params, h, targets):
    return jax.grad(lambda z: _loss(model.readout(params, z[None])[0], targets))(h)


def _final_defect(parts: Parts, h: Any, grad: Array) -> float | None:
    if not parts.config.has_final_norm:
        return None
    with jax.enable_x64(True):
        return float(radial.relative(radial.along(parts.config.norm_row, h, grad), grad))


def _loss(logits: Any, targets: Any) -> Any:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=-1)
    return -jnp.mean(chosen)
