"""A user's function traced once at a point: what it computes with, how it can be differentiated.

Everything that takes a function (``spectrum``, ``token_jacobians``, ``radial_report``, ``verify``)
asks here, so that all accept the same and refuse the same, in one line. The derivative's program is
walked for what would make its numbers wrong without a word: floats narrower than those asked for
between input and output (a norm that computes in float32 inside and casts its result back),
callbacks, generators with hidden state. What is constant there may be of any type, and so may masks
and indices: they round nothing.

Tracing once has a second use: a function that draws from a hidden generator, or changes what it
closes over, is one function from here on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import jaxpr_as_fun
from numpy.typing import NDArray

from normjax import rounding
from normjax.errors import UserError

LIMIT = 4096
"""The most inputs or outputs of a Jacobian that is made as a matrix."""
_OURS = (Path(__file__).parent, Path(jax.__file__).parent)
"""What is not the user's own."""
_HIDDEN = ("rng_uniform",)
"""Primitives that draw other numbers at every call."""
_CALLBACKS = ("pure_callback", "io_callback")
_TRACING = (
    jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError, jax.errors.NonConcreteBooleanIndexError,
    jax.errors.UnexpectedTracerError,
)  # fmt: skip


def precision(dtype: Any) -> contextlib.AbstractContextManager:
    """Return a context with 64-bit mode on for float64, and one that changes nothing otherwise."""
    wide = np.dtype(dtype) == np.float64
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


# --- the point ------------------------------------------------------------------------------------


def real_point(name: str, x: Any, dtype: Any = None) -> NDArray:
    """Return a point as a real floating array.

    Args:
      name: of the argument, for messages.
      x: an array or numbers.
      dtype: floating dtype to which it is cast; None keeps its own, which must be floating.

    Raises:
      UserError: no array of numbers, complex, empty, or not finite.

    >>> real_point("x", [1, 2], "float64")
    array([1., 2.])
    """
    array = _numbers(name, x)
    if dtype is not None and not jnp.issubdtype(np.dtype(dtype), jnp.floating):
        raise UserError(f"dtype={dtype}: must be floating, e.g. 'float64'")
    if dtype is None and not jnp.issubdtype(array.dtype, jnp.floating):
        raise UserError(
            f"{name} of dtype {array.dtype}: must be floating; cast it, e.g. x.astype('float64')"
        )
    array = array if dtype is None else array.astype(np.dtype(dtype))
    if array.size == 0:
        raise UserError(f"{name} of shape {array.shape}: must have at least one entry")
    return _finite(name, array)


def as_float64(
    name: str, x: Any, shape: tuple[int, ...] | None = None, finite: bool = True
) -> NDArray[np.float64]:
    """Return any numbers, many points or none among them, as a float64 array.

    Args:
      name, x: as for :func:`real_point`.
      shape: that the last axes must have; None: any.
      finite: whether NaN and infinity are refused.

    Raises:
      UserError: no array of numbers, complex, not finite, or of another shape.

    >>> as_float64("x", [1, 2], (2,))
    array([1., 2.])
    """
    array = _numbers(name, x).astype(np.float64)
    if shape is not None and array.shape[max(0, array.ndim - len(shape)) :] != shape:
        raise UserError(f"{name} of shape {array.shape}: must be (..., {str(shape)[1:-1]})")
    return _finite(name, array) if finite else array


def _numbers(name: str, x: Any) -> NDArray:
    try:
        array = np.asarray(x)
    except (TypeError, ValueError):  # JAX's own, of a traced value, among them
        raise UserError(_kind(name, x)) from None
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise UserError(
            f"{name} of dtype {array.dtype}: must be real; take a function of its real and"
            " imaginary parts, e.g. lambda z: f(z[0] + 1j * z[1]), with a real result"
        )
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool):
        raise UserError(_kind(name, x))
    return array


def _finite(name: str, array: NDArray) -> NDArray:
    bad = np.argwhere(~np.isfinite(array.astype(np.float64)))
    if len(bad):
        at = bad[0].tolist() or ""
        raise UserError(
            f"{name}{at}={array[tuple(bad[0])]}: must be finite in {array.dtype}; look at where it"
            " comes from"
        )
    return array


def _kind(name: str, x: Any) -> str:
    what = (
        " (a traced value):" if isinstance(x, jax.core.Tracer) else f" of type {type(x).__name__}:"
    )
    return f"{name}{what} must be an array of numbers"


# --- the function ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of one array, traced at a point.

    Attributes:
      name: what messages call it.
      point: (...) where it was traced, in the dtype of the computation.
      shape, out_dtype: of its result.
      epsilon: machine epsilon of the narrowest float between input and output.
      narrow: "" or where a float narrower than the point's is, in words.
      derivative: the program of (x, v) -> J v, or of (x, w) -> J^T w where there is only that.
      reverse_only: which of the two.
    """

    name: str
    point: Array
    shape: tuple[int, ...]
    out_dtype: np.dtype
    epsilon: float
    narrow: str
    derivative: Any = dataclasses.field(repr=False)
    reverse_only: bool
    _function: Callable[[Array], Array] = dataclasses.field(repr=False)

    def __call__(self, x: Array) -> Array:
        """Return the function at a point of the same shape and dtype."""
        return self._function(x)

    def linearized(self) -> LinearMaps:
        """Return the derivative at the point as linear maps; to be called outside of a trace.

        Raises:
          UserError: the function is not finite at the point, or has no derivative.
        """
        value = self(self.point)
        if not bool(jnp.isfinite(value).all()):
            raise UserError(
                f"{self.name}(x): returns NaN or infinity at this x; there is no Jacobian there"
            )
        push, pull, one_way = _linear_maps(self, value)
        return LinearMaps(self, value, one_way, push, pull)

    def rounding(self, probes: int = 3, runs: int = 4) -> float:
        """Return an estimate of how far rounding moved J, as the Frobenius norm of that; float64.

        For z of random signs E |D z|^2 = |D|_F^2, and D z is told by :mod:`normjax.rounding`.
        """
        rng, shape = np.random.default_rng(0), self.shape if self.reverse_only else self.point.shape
        found = []
        with precision(self.point.dtype):
            for i in range(probes):
                z = jnp.asarray(rng.choice([-1.0, 1.0], size=shape), self.point.dtype)
                moved = rounding.scatter(self.derivative, (self.point, z), runs, seed=i)
                largest = float(moved.max(initial=0.0)) or 1.0  # a square may leave the range
                found.append(largest * float(np.linalg.norm(moved / largest)))
        return rounding.SAFETY * max(found)


@dataclasses.dataclass(frozen=True)
class LinearMaps:
    """The derivative of a function at a point: J v and J^T w as compiled programs.

    Attributes:
      of: the function.
      value: (...) its result at the point.
      one_way: "" or why J^T w cannot be had at the cost of one evaluation.
    """

    of: Traced
    value: Array
    one_way: str
    _push: Callable[[Array], Array] = dataclasses.field(repr=False)
    _pull: Callable[[Array], Array] | None = dataclasses.field(repr=False)

    def push(self, v: Array) -> Array:
        """Return J v; traceable, to be called under ``precision(dtype)``."""
        return self._push(v)

    def pull(self, w: Array) -> Array:
        """Return J^T w; traceable, to be called under ``precision(dtype)``.

        Without a reverse mode the whole of J is made once, column by column.

        Raises:
          UserError: there is no reverse mode, and J is too large to be made.
        """
        if self._pull is not None:
            return self._pull(w)
        return (w.reshape(-1) @ self._matrix).reshape(self.of.point.shape)

    @functools.cached_property
    def _matrix(self) -> Array:
        point = self.of.point
        if max(point.size, self.value.size) > LIMIT:
            raise UserError(f"{self.of.name}: {self.one_way}, or at most {LIMIT} entries")
        with jax.ensure_compile_time_eval():
            columns = [
                self._push(unit.reshape(point.shape)).reshape(-1)
                for unit in jnp.eye(point.size, dtype=point.dtype)
            ]
            return jnp.stack(columns, axis=1)


def trace(function: Any, point: NDArray, *, name: str = "", widest: bool = True) -> Traced:
    """Return a function traced at a point; to be called under ``precision(point.dtype)``.

    Args:
      function: of one real array of any shape to one real array of any shape: a JAX function, a
        part of a decoder, a callable of any kind, hashable or not.
      point: as :func:`real_point` returns it.
      name: what messages call it; "" for its own.
      widest: whether a float narrower than the point's is refused, rather than told.

    Raises:
      UserError: the function is none, cannot be traced, returns something else than one real
        floating array, computes in narrower floats than it was given, calls back to Python, draws
        from a generator with hidden state, or has no derivative.

    >>> with precision("float64"):
    ...     found = trace(lambda x: 3 * x, np.ones(2))
    ...     found.linearized().push(jnp.ones(2)), found.narrow
    (Array([3., 3.], dtype=float64), '')
    """
    name = name or _named(function)
    if not callable(function):
        raise UserError(f"{name}: must be a function of one array, not {type(function).__name__}")
    try:
        inspect.signature(function).bind(point)
    except TypeError as error:
        raise UserError(
            f"{name}: must take one array ({error}); bind what else it takes, e.g. lambda x:"
            f" {name}(x, ...)"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    x = jnp.asarray(point)
    closed, out = _traced(function, x, name)
    f = _evaluated(closed)
    # A derivative given as a backward pass has no forward one.
    reverse_only = any(kind.startswith("custom_vjp") for kind in _kinds(closed.jaxpr))
    derivative = _derivative(f, x, out, name, reverse_only)
    epsilon, narrow = _narrowest([(closed, [True]), (derivative, [True, True])], x.dtype, name)
    if widest and narrow:
        raise UserError(
            f"{name}: computes in {narrow} between its {x.dtype} input and its result, so that its"
            f" derivative is right to about {epsilon:.0e} only and nothing bounds how far its small"
            " singular values are off; take out the cast (dtype=None in Flax layers, no"
            " .astype), or ask top_singular_values at a point of that dtype, whose bounds allow"
            " for it"
        )
    return Traced(
        name, x, out.shape, np.dtype(out.dtype), epsilon, narrow, derivative, reverse_only, f
    )


def _named(function: Any) -> str:
    name = getattr(function, "__name__", None)
    return "function" if name in (None, "<lambda>") else str(name)


def _traced(function: Any, x: Array, name: str) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Return the program of a function, and what it returns."""
    try:
        # A lambda of its own: JAX keeps what it traces in a table, and not all that is callable
        # can be a key of it.
        closed, out = jax.make_jaxpr(lambda y: function(y), return_shape=True)(x)
    except _TRACING as error:
        why = str(error).split("\n")[0]
        raise UserError(
            f"{name}: cannot be traced by JAX ({why}); use jax.numpy in place of NumPy, and"
            " jnp.where or jax.lax.cond where a Python condition asks for a value"
        ) from error
    leaves = jax.tree.leaves(out)
    if len(leaves) != 1 or leaves[0] is not out:
        kind = f"{len(leaves)} arrays" if len(leaves) != 1 else f"a {type(out).__name__} of one"
        raise UserError(
            f"{name}(x): must return one real floating array, not {kind}; wrap it, e.g."
            " lambda x: f(x)[0]"
        )
    if not jnp.issubdtype(out.dtype, jnp.floating):
        is_complex = jnp.issubdtype(out.dtype, jnp.complexfloating)
        fix = "; wrap it, e.g. lambda x: f(x).real" if is_complex else ""
        raise UserError(f"{name}(x): must return one real floating array, not {out.dtype}{fix}")
    if out.size == 0:
        raise UserError(f"{name}(x) of shape {out.shape}: must have at least one entry")
    return closed, out


def _evaluated(closed: Any) -> Callable[[Array], Array]:
    """Return a program of one array as a function; its constants are arguments, not literals."""
    evaluate = jax.jit(lambda constants, v: jaxpr_as_fun(closed.replace(consts=constants))(v)[0])
    return lambda v: evaluate(closed.consts, v)


_ONE_WAY = (
    "has no reverse mode (a loop whose length depends on values, lax.while_loop, or a rule that is"
    " not linear); J^T w needs lax.scan or lax.fori_loop with fixed bounds"
)
_UNABLE = (TypeError, ValueError, NotImplementedError, AssertionError)
"""What JAX raises where it cannot differentiate or transpose."""


def _derivative(
    f: Callable[[Array], Array], x: Array, out: jax.ShapeDtypeStruct, name: str, reverse_only: bool
) -> Any:
    """Return the program of (x, v) -> J v, or of (x, w) -> J^T w."""
    try:
        if reverse_only:
            w = jnp.zeros(out.shape, out.dtype)
            transposed = lambda a, v: jax.linear_transpose(lambda c: jax.vjp(f, a)[1](c)[0], w)(v)  # noqa: E731
            jax.make_jaxpr(transposed)(x, x)  # whether there is any
            return jax.make_jaxpr(lambda a, c: jax.vjp(f, a)[1](c)[0])(x, w)
        return jax.make_jaxpr(lambda a, v: jax.jvp(f, (a,), (v,))[1])(x, x)
    except _UNABLE as error:
        if reverse_only and ("ranspose" in str(error) or isinstance(error, AssertionError)):
            raise UserError(
                f"{name}: its custom_vjp has a backward pass that is not linear in the cotangent"
                " (as where a gradient is clipped); such a function has no Jacobian"
            ) from error
        raise _no_derivative(name, error) from error


def _linear_maps(f: Traced, value: Array) -> tuple[Callable, Callable | None, str]:
    """Return J v and J^T w as compiled programs, and why the second is missing."""
    x = f.point
    if f.reverse_only:  # its backward pass is linear too; transpose that
        backward = jax.vjp(f, x)[1]
        pull = _compiled(lambda c: backward(c)[0], value)
        push = _compiled(lambda v: jax.linear_transpose(lambda c: backward(c)[0], value)(v)[0], x)
        return push, pull, ""
    try:
        _, forward = jax.linearize(f, x)
        push = _compiled(forward, x)
    except _UNABLE as error:
        raise _no_derivative(f.name, error) from error
    try:
        return push, _compiled(lambda c: jax.linear_transpose(forward, x)(c)[0], value), ""
    except _UNABLE:
        return push, None, _ONE_WAY


def _no_derivative(name: str, error: Exception) -> UserError:
    why = str(error).split("\n")[0]
    return UserError(f"{name}: has no derivative that JAX can take ({why})")


def _compiled(linear: Callable[[Array], Array], example: Array) -> Callable[[Array], Array]:
    """Compile a linear map with what it closes over as arguments, not as constants."""
    return _evaluated(jax.make_jaxpr(linear)(example))


# --- what a program computes with -----------------------------------------------------------------


Program = tuple[Any, list[bool]]
"""A closed jaxpr, and which of its inputs hang together with the point or a tangent."""


def _narrowest(programs: Sequence[Program], dtype: Any, name: str) -> tuple[float, str]:
    """Return the largest machine epsilon on the way through programs, and where, in words.

    Raises:
      UserError: a callback, or a generator with hidden state.
    """
    epsilon, where = float(jnp.finfo(dtype).eps), ""
    for closed, linked in programs:
        inputs = _pairs(closed.jaxpr.invars, linked)
        known = {variable for variable, is_linked in inputs if is_linked}
        for equation, variables in _walk(closed.jaxpr, known):
            kind = equation.primitive.name
            if kind in _HIDDEN:
                raise UserError(
                    f"{name}: draws other numbers at every call ({kind}); use jax.random with a key"
                )
            if kind in _CALLBACKS:
                raise UserError(
                    f"{name}: calls back to Python ({kind}), which JAX cannot differentiate; write"
                    " that part with jax.numpy"
                )
            for variable in variables:
                own, words = _epsilon(equation, variable.aval.dtype)
                if own > epsilon * 1.5:
                    epsilon, where = own, words + _line(equation)
    return epsilon, where


def _epsilon(equation: Any, dtype: Any) -> tuple[float, str]:
    """Return what a step rounds to, and its type in words."""
    if equation.primitive.name == "reduce_precision":
        bits = equation.params["mantissa_bits"]
        return 2.0**-bits, f"{bits} bits of mantissa"
    if jnp.issubdtype(dtype, jnp.complexfloating):
        dtype = np.dtype(dtype).type(0).real.dtype
    return float(jnp.finfo(dtype).eps), str(dtype)


def _line(equation: Any) -> str:
    """Return where a step was written, in words; "" where that is not kept."""
    traceback = getattr(equation.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        path = Path(frame.file_name)
        inside = any(path.is_relative_to(folder) for folder in _OURS)
        if not inside and not frame.file_name.startswith("<"):
            return f" ({path.name}, line {frame.line_num})"
    return ""


def _inexact(variable: Any) -> bool:
    dtype = getattr(variable.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _walk(jaxpr: Any, known: set[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the steps of a program that hang together with known variables by floats.

    Each with its inexact outputs, which are added to ``known``. What a step inside of another
    calls comes before that.
    """
    for equation in jaxpr.eqns:
        linked = [not _literal(v) and v in known and _inexact(v) for v in equation.invars]
        inner = list(_inner(equation, linked))
        if not any(linked):
            continue
        results = [True] * len(equation.outvars)
        for sub, own in inner:
            within = {v for v, is_linked in _pairs(sub.invars, own) if is_linked}
            while True:  # what a turn of a loop makes is linked at the next
                steps = list(_walk(sub, within))
                carried = _carried(equation, sub, within)
                if carried <= within:
                    break
                within |= carried
            yield from steps
            if len(inner) == 1 and len(sub.outvars) == len(results):
                results = [not _literal(v) and v in within for v in sub.outvars]
        outputs = [v for v, r in zip(equation.outvars, results, strict=True) if r and _inexact(v)]
        known.update(outputs)
        if outputs and not inner:
            yield equation, outputs


def _kinds(jaxpr: Any) -> Iterator[str]:
    """Yield the names of all primitives of a program."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner, _ in _inner(equation, [False] * len(equation.invars)):
            yield from _kinds(inner)


def _literal(variable: Any) -> bool:
    return hasattr(variable, "val")


def _inner(equation: Any, linked: list[bool]) -> Iterator[tuple[Any, list[bool]]]:
    """Yield the programs that a step calls, and which of their inputs are linked."""
    for value in equation.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            jaxpr = getattr(each, "jaxpr", each)
            if not (hasattr(jaxpr, "eqns") and hasattr(jaxpr, "invars")):
                continue
            count = len(jaxpr.invars)
            if count == len(linked):
                own = linked
            elif equation.primitive.name == "cond" and count == len(linked) - 1:
                own = linked[1:]
            elif equation.primitive.name == "while":
                own = _of_while(equation, jaxpr, linked)
            else:
                own = [any(linked)] * count
            yield jaxpr, own


def _of_while(equation: Any, jaxpr: Any, linked: list[bool]) -> list[bool]:
    first, second = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    carry = linked[first + second :]
    if _is_body(equation, jaxpr):
        return linked[first : first + second] + carry
    return linked[:first] + carry


def _is_body(equation: Any, jaxpr: Any) -> bool:
    body = equation.params["body_jaxpr"]
    return jaxpr is getattr(body, "jaxpr", body)


def _pairs(outside: Sequence[Any], inside: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(outside, inside, strict=True)


def _carried(equation: Any, sub: Any, within: set[Any]) -> set[Any]:
    """Return the inputs of a loop's body that its linked results become at the next turn."""
    kind, params = equation.primitive.name, equation.params
    if kind == "scan":  # what is carried has one shape inside and outside, what is stacked has not
        count = sum(o.aval.shape == i.aval.shape for o, i in _pairs(equation.outvars, sub.outvars))
        stacked = sum(o.aval.shape != i.aval.shape for o, i in _pairs(equation.invars, sub.invars))
        first = len(sub.invars) - count - stacked
    elif kind == "while" and _is_body(equation, sub):
        first, count = params["body_nconsts"], len(sub.outvars)
    else:
        return set()
    turns = zip(sub.invars[first : first + count], sub.outvars[:count], strict=True)
    return {before for before, after in turns if not _literal(after) and after in within}
