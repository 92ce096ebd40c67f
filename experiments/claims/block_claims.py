"""Claims on the Jacobian of a sub-layer by placement, A7 to A9, and along the stream, A22.

Measured: ``jax.jacfwd`` or ``jax.linearize`` of the decoder's own attention and MLP sub-layers.
Expected: the branch and the norm differentiated each alone and put together as the claim says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.claim import EPS, Check, Claim, Tolerance
from experiments.claims.setting import Point, decoder_parts, stream
from normjax.jacobians.blocks import Parts
from normjax.jacobians.closed_forms import placement_jacobian
from normjax.norm_derivatives import Floats, unit

Function = Callable[[Any], Any]

SAFETY = 16
"""Two computations that may err in opposite ways, in any of many entries, and a factor of 4 for the
scatter of the largest of these."""


def echo(wide: Any, narrow: Any, what: str) -> Tolerance:
    """Return the rounding of a float64 result, from what float32 makes of the same program.

    A worst case over all sums of an attention layer lies a million times above what rounding does.
    The same program in float32 shows it: rounding errors are to first order in proportion to the
    machine epsilon, so that those of float64 are 2^-29 times as large.

    Args:
      wide: the result in float64.
      narrow: the same in float32.
      what: was computed.
    """
    lost = float(np.max(np.abs(np.asarray(wide, np.float64) - np.asarray(narrow, np.float64))))
    ratio = EPS / float(np.finfo(np.float32).eps)
    reason = f"{what} loses {lost:.1e} in float32; times 2^-29, times {SAFETY} for two computations"
    return Tolerance(SAFETY * ratio * lost, reason + " and the scatter of the largest entry")


def bound(check: Check) -> float:
    """Return what a number has to pass to be more than the rounding of a check."""
    return check.tolerance.value


def matrix(function: Function, h: Any, dtype: Any = np.float64) -> Floats:
    """Return the Jacobian of a function (T, D) -> (T, D) by jacfwd as a matrix (T D, T D)."""
    x = jnp.asarray(h, dtype)
    return np.asarray(jax.jit(jax.jacfwd(function))(x)).reshape(x.size, x.size)


def in_float32(parts: Parts, names: tuple[str, ...]) -> Function:
    """Return sub-layers of block 1 in a row as a function of float32, (T, D) -> (T, D)."""
    config = dataclasses.replace(parts.config, dtype="float32", param_dtype="float32")
    model = dataclasses.replace(parts.model, config=config)
    params, factors = parts.layer(1)
    layer = (jax.tree.map(lambda x: x.astype(jnp.float32), params), factors)

    def function(h: Any) -> Any:
        h = h[None]
        # A GPU would otherwise multiply with fewer digits than float32 has.
        with jax.default_matmul_precision("highest"):
            for name in names:
                h = model.block(layer, h, name)
        return h[0]

    return jax.jit(function)


def _composed(parts: Parts, name: str, h: Any) -> Floats:
    """Return the Jacobian of a sub-layer put together from J_F and J_N, each by jacfwd alone."""
    found = parts.model.pieces(parts.params, 1, name)
    pieces = {k: jax.jit(lambda x, f=f: f(x[None])[0]) for k, f in found.items()}
    with jax.enable_x64(True):
        seen = parts.model.points(parts.layer(1), jnp.asarray(h)[None], name)
    at = {"pre_norm": h, "branch": seen["read"][0], "post_norm": seen["sum"][0]}
    # The statement knows these alone: a norm in another place of the block makes it wrong.
    return placement_jacobian(**{k: matrix(pieces[k], x) for k, x in at.items() if k in pieces})


def _placement_claim(point: Point, id: str, placement: str, statement: str) -> Claim:
    parts, h = decoder_parts(point, placement=placement), jnp.asarray(stream(point))
    between = parts.sublayer(1, "attention")(h)
    checks = []
    for name, at in (("attention", h), ("mlp", between)):
        measured = matrix(parts.sublayer(1, name), at)
        narrow = matrix(in_float32(parts, (name,)), at, np.float32)
        expected = _composed(parts, name, at)
        checks.append(Check(f"jacfwd of the {name} sub-layer", expected, measured,
                            echo(measured, narrow, "it")))  # fmt: skip
    for name, check in zip(("attention", "the MLP"), checks, strict=False):
        # The formula would say little where the branch hardly mattered.
        rest = np.max(np.abs(check.measured - np.eye(h.size)))
        checks.append(Check(f"what {name} changes of the identity, largest entry", bound(check),
                            rest, Tolerance(0.0, "a bound: the rounding of that Jacobian"),
                            "above"))  # fmt: skip
    return Claim(id, statement, tuple(checks))


def pre_norm(point: Point) -> Claim:
    """A7: a pre-norm decoder's sub-layers."""
    return _placement_claim(
        point, "A7", "pre", "A pre-norm block h + F(N(h)) has the Jacobian I + J_F J_N."
    )


def post_norm(point: Point) -> Claim:
    """A8: a post-norm decoder's sub-layers."""
    return _placement_claim(
        point, "A8", "post", "A post-norm block N(h + F(h)) has the Jacobian J_N (I + J_F)."
    )


def no_norm(point: Point) -> Claim:
    """A9: the sub-layers of a decoder without norms."""
    return _placement_claim(
        point, "A9", "none", "A block without norm h + F(h) has the Jacobian I + J_F."
    )


def radial_step(point: Point) -> Claim:
    """A22: each token's own direction through both sub-layers, and through the block of two."""
    parts = decoder_parts(point, placement="pre", norm_eps=0.0)
    h = jnp.asarray(stream(point, 22))
    between = parts.sublayer(1, "attention")(h)
    checks = []
    for name, at in (("attention", h), ("mlp", between)):
        u = unit(np.asarray(at))
        steps = np.eye(len(u))[:, :, None] * u  # the token's direction, one token at a time
        measured = _pushed(parts.sublayer(1, name), at, steps)
        narrow = _pushed(in_float32(parts, (name,)), at, steps, np.float32)
        checks.append(Check(f"J u = u for the {name} sub-layer, each token", steps, measured,
                            echo(measured, narrow, "it")))  # fmt: skip
    steps = unit(np.asarray(h))[None]
    measured = _pushed(parts.block(1), h, steps)
    narrow = _pushed(in_float32(parts, ("attention", "mlp")), h, steps, np.float32)
    second = parts.sublayer(1, "mlp").sequence_jacobian(between)
    after = Check("attention and MLP in a row: J_mlp u, J_mlp in closed form",
                  np.einsum("iamb,smb->sia", second, steps), measured,
                  echo(measured, narrow, "it"))  # fmt: skip
    turned = Check("which is no longer u: largest difference", bound(after),
                   np.max(np.abs(measured - steps)),
                   Tolerance(0.0, "a bound: the rounding of the line before"), "above")  # fmt: skip
    return Claim(
        "A22",
        "A pre-norm sub-layer passes a step along the stream's own direction on unchanged:"
        " J u = u without eps. (Of two in a row the second does not: the stream has turned.)",
        (*checks, after, turned),
    )


def _pushed(function: Function, h: Any, steps: Floats, dtype: Any = np.float64) -> Floats:
    """Return J v for every v of ``steps`` (S, T, D), by the function's linearization at h."""

    def images(x: Any, v: Any) -> Any:
        return jax.vmap(jax.linearize(function, x)[1])(v)

    return np.asarray(jax.jit(images)(jnp.asarray(h, dtype), jnp.asarray(steps, dtype)))


CLAIMS = (pre_norm, post_norm, no_norm, radial_step)
