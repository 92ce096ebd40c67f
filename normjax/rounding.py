"""How far rounding alone moves a program's result: every operation shaken by a machine epsilon.

A program is run several times, each operation that rounds multiplied by 1 + e with e drawn anew,
uniform within one machine epsilon (twice what rounding does). Where parts nearly cancel, the
results scatter by as much as rounding may have put into the one that was computed, entry by entry:
of 1 - tanh(20)^2 = 1.7e-17 nothing is left, of a derivative that is a plain product all but the
last digit. Sums and matrix products shake their terms, since there what is lost goes with those and
not with the result; loops and branches are shaken where they begin and end, by the root of their
length.

It is an estimate and no bound: operations that round more than one unit, or in one direction, are
allowed for by :data:`SAFETY` alone.

Sources: Vignes 1993 (CESTAC); Parker 1997 (Monte Carlo arithmetic).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

SAFETY = 8.0
"""By how much the scatter of a few runs is multiplied."""
RUNS = 6
_EXACT = frozenset({
    "abs", "and", "argmax", "argmin", "broadcast_in_dim", "ceil", "clamp", "concatenate", "copy",
    "copy_p", "cummax", "cummin", "dynamic_slice", "dynamic_update_slice", "eq", "expand_dims",
    "floor", "gather", "ge", "gt", "imag", "iota", "is_finite", "le", "lt", "max", "min", "ne",
    "neg", "not", "or", "pad", "real", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "reshape", "rev", "round", "scatter", "select_n", "sign", "slice", "sort", "split", "squeeze",
    "stop_gradient", "transpose", "zeros_like",
})  # fmt: skip
_SUMS = frozenset({
    "add_any", "conv_general_dilated", "cumsum", "dot_general", "reduce_sum", "reduce_window_sum",
    "scatter-add", "scatter_add",
})  # fmt: skip
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_LOOPS = {"scan": "length", "while": "", "cond": ""}
_LENGTH = 1000.0
"""What a loop of unknown length is taken to have."""


def scatter(
    closed: Any, arguments: Sequence[Any], runs: int = RUNS, seed: int = 0
) -> NDArray[np.float64]:
    """Return how far the first result of a program moves under rounding, entry by entry.

    To be called under 64-bit mode for a program in float64.

    Args:
      closed: a closed jaxpr.
      arguments: of it.
      runs: with shaken operations.
      seed: of what they are shaken by.

    Returns:
      Of the result's shape: the largest distance of a shaken result to the plain one.

    >>> import jax
    >>> with jax.enable_x64(True):
    ...     program = jax.make_jaxpr(lambda x: jnp.stack([(1 + x) - 1, 3 * x]))(1e-9)
    ...     found = scatter(program, [1e-9])
    >>> bool(1e-17 < found[0] < 1e-15), bool(found[1] < 1e-23)
    (True, True)
    """
    plain = _result(closed, arguments, lambda x, factor: x)
    rng, dtype = np.random.default_rng(seed), closed.jaxpr.outvars[0].aval.dtype
    epsilon = float(jnp.finfo(dtype).eps)

    def shake(x: Any, factor: float) -> Any:
        if jnp.result_type(x) != dtype:  # no number, or a constant of another precision
            return x
        return x * jnp.asarray(1 + factor * epsilon * rng.uniform(-1, 1, np.shape(x)), dtype)

    with np.errstate(invalid="ignore"):
        moved = [np.abs(_result(closed, arguments, shake) - plain) for _ in range(runs)]
    return np.nan_to_num(np.max(moved, axis=0), nan=math.inf, posinf=math.inf)


def _result(closed: Any, arguments: Sequence[Any], shake: Callable) -> NDArray[np.float64]:
    return np.asarray(_run(closed.jaxpr, closed.consts, arguments, shake)[0], np.float64)


def _run(jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any], shake: Callable) -> list:
    """Run a program step by step, with what rounds shaken."""
    values: dict[Any, Any] = {}

    def read(variable: Any) -> Any:
        return variable.val if hasattr(variable, "val") else values[variable]

    values.update(zip(jaxpr.constvars, constants, strict=True))
    values.update(zip(jaxpr.invars, map(jnp.asarray, arguments), strict=True))
    for equation in jaxpr.eqns:
        kind, given = equation.primitive.name, [read(v) for v in equation.invars]
        inner = next((equation.params[k] for k in _CALLS if k in equation.params), None)
        if kind not in _LOOPS and inner is not None:
            jaxpr_of = getattr(inner, "jaxpr", inner)
            results = _run(jaxpr_of, getattr(inner, "consts", ()), given, shake)
        else:
            length = equation.params.get(_LOOPS.get(kind, ""), _LENGTH)
            factor = math.sqrt(length) if kind in _LOOPS else 1.0
            if kind in _LOOPS or kind in _SUMS:
                given = [shake(x, factor) if hasattr(x, "dtype") else x for x in given]
            results = equation.primitive.bind(*given, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
            if kind not in _EXACT and not _widens(equation):
                results = [shake(x, factor) for x in results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _widens(equation: Any) -> bool:
    """Whether a step changes the type to one that holds the same numbers."""
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    floats = all(jnp.issubdtype(d, jnp.floating) for d in (before, after))
    return not floats or bool(jnp.finfo(after).eps <= jnp.finfo(before).eps)
