"""What each block of a walked decoder does to a small change of its stream, without a matrix.

Of one window, and of its ordinary tokens alone: those that are set apart are held fixed, and what
comes out at them is left out. Products are in float64, with parameters of that block only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax.decoder import Decoder
from normjax.diagnostics.walk import Held, Walk
from normjax.errors import UserError
from normjax.jacobians.blocks import to_float64
from normjax.jacobians.radial import RadialReport, report_of
from normjax.norm_derivatives import Floats, spanned, unit
from normjax.spectra.krylov import TopSingularValues, top_singular_values


@dataclasses.dataclass(frozen=True)
class BlockGains:
    """Gains of one block's Jacobian over the ordinary tokens of a window.

    Attributes:
      block: counted from 1.
      radial: what is radial, what is tangential; see :mod:`normjax.jacobians.radial`.
      top: the largest singular values, with bounds.
    """

    block: int
    radial: RadialReport
    top: TopSingularValues


@dataclasses.dataclass(frozen=True)
class _Operator:
    """What ``top_singular_values`` takes in place of a function."""

    shape: tuple[int, int]
    matvec: Callable[[Floats], Floats]
    rmatvec: Callable[[Floats], Floats]
    dtype: Any = np.dtype(np.float64)


def block_gains(
    model: Held, seen: Walk, window: int = 0, *, tokens: int = 32, k: int = 1, tol: float = 1e-3,
    probes: int = 8, said: Callable[[int, int], None] = lambda done, of: None,
) -> list[BlockGains]:  # fmt: skip
    """Return the gains of every block at what a walk has seen.

    Args:
      model: that was walked through.
      seen: what was seen.
      window: which of the walk's windows.
      tokens: at most so many of its first positions.
      k, tol: how many singular values, and how near, relative to the largest.
      probes: of the tangential gain.
      said: called with the blocks that are done, of so many.

    Raises:
      UserError: no ordinary token among these.
    """
    decoder = model.decoder
    index = np.flatnonzero(seen.ordinary[window, :tokens])
    if not len(index):
        raise UserError(f"window={window}: has no ordinary token among its first {tokens}")
    names, depth, row = decoder.config.sublayers, decoder.config.depth, decoder.config.norm_row
    push, pull = _products(decoder)
    out = []
    for block, layer in model.layers(range(1, depth + 1)):
        ends = (seen.states[len(names) * i, window, :tokens] for i in (block - 1, block))
        before, after = (np.asarray(x, np.float64) for x in ends)
        read, write = (_radial(row, x[index]) for x in (before, after))
        with jax.enable_x64(True):
            wide, at = (to_float64(layer[0]), layer[1]), jnp.asarray(before)
            forward = functools.partial(push, wide, at, jnp.asarray(index))
            backward = functools.partial(pull, wide, at, jnp.asarray(index))
            radial = report_of(forward, backward, read, write, probes, block)
            n, shape = before[index].size, before[index].shape

            def product(v: Any, of: Any = forward, shape: Any = shape) -> Floats:
                with jax.enable_x64(True):
                    return np.asarray(of(jnp.asarray(v.reshape(shape)))).ravel()

            operator = _Operator((n, n), product, functools.partial(product, of=backward))
            top = top_singular_values(operator, k=k, tol=tol, seed=block)
        out.append(BlockGains(block, radial, top))
        said(block, depth)
    return out


def _radial(row: Any, x: Floats) -> Floats:
    """Return what is radial at x: what the model's norm forgets, the direction of x first."""
    u = unit(x)[..., None]
    if row.forgets == "nothing":
        return u
    found = row.forgotten(x)
    return found if row.forgets_length else spanned(u, found)


@functools.lru_cache(maxsize=4)
def _products(decoder: Decoder) -> tuple[Any, Any]:
    wide = {"dtype": "float64", "param_dtype": "float64"}
    with jax.enable_x64(True):
        model = dataclasses.replace(decoder, config=dataclasses.replace(decoder.config, **wide))

    def moved(layer: Any, at: Any, index: Any, v: Any) -> Any:
        return model.block(layer, at.at[index].add(v)[None])[0][index]

    def push(layer: Any, at: Any, index: Any, v: Any) -> Any:
        zero = jnp.zeros_like(v)
        return jax.jvp(lambda x: moved(layer, at, index, x), (zero,), (v,))[1]

    def pull(layer: Any, at: Any, index: Any, w: Any) -> Any:
        zero = jnp.zeros_like(w)
        return jax.vjp(lambda x: moved(layer, at, index, x), zero)[1](w)[0]

    return jax.jit(push), jax.jit(pull)
