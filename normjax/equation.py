"""The one equation, and the only place that knows its order.

Every sub-layer (attention or MLP, the branch F) of a decoder with the state H computes

    x = R(U(H)),    z = c N(x),    H' = P( A S(H) + B K( Q(F(z)), z ) )

N is the pre-norm, what the branch reads through; Q the branch norm, what its output passes; S the
skip norm, on what is kept; P the post-norm, on the whole; U the mix norm, on what R reads. K joins
the output to what the branch read; mostly it is the output alone. R reads the branch's input from
the streams, A keeps them, B writes the branch to them. With one stream, R = U = S = identity, no K
and numbers A = a, B = b it is h' = P(a h + b Q(F(c N(h)))).

:func:`fold` goes through it once. The model, its closed-form Jacobian, the mean-field sizes, the
words and the diagram are small algebras that it is folded with; each says what a norm, a branch, a
factor, a mix and a sum are to it. No JAX here: a page folds over what a run folder recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

SLOTS = ("pre_norm", "branch_norm", "skip_norm", "post_norm", "mix_norm")
"""N, Q, S, P and U, where a sub-layer may have a norm."""
INNER = ("query", "key", "value", "output", "hidden")
"""What a branch may normalize inside: queries, keys and values; what attention's output matrix
reads; what the MLP's reads."""
FACTORS = {"scale": "c", "keep": "a", "write": "b"}
"""What multiplies what the branch reads, what is kept, what the branch writes; with its letter."""
MODEL_NORM = "model"
"""In a slot: the norm that the decoder's configuration names, with parameters of its own."""
SHARED_NORM = "shared"
"""In the skip norm: the pre-norm again, with the same parameters."""

Schedule = Callable[[int, int], Any]
"""What block l (counted from 1) of a decoder of L blocks has: ``(l, L) -> value``."""


@dataclasses.dataclass(frozen=True)
class Learned:
    """A factor that is trained.

    Attributes:
      start: what is learned, at initialization, or a schedule of it.
      shape: "scalar" for one number, "feature" for one per feature.
      shared: whether the sub-layers of a block share it; else each has its own.
      through: the factor as a function of what is learned, in operators and
        ``x.__array_namespace__()``, so that NumPy and JAX have the same; None: the same.
      name: of what is learned; factors of a sub-layer that name the same are tied to one another.
        "": the factor's own.

    >>> Learned(0.2, through=lambda a: 1 - a, name="a").made_of(0.25)
    0.75
    """

    start: Any
    shape: str = "scalar"
    shared: bool = False
    through: Callable[[Any], Any] | None = None
    name: str = ""

    def made_of(self, learned: Any) -> Any:
        """Return the factor, from what is learned."""
        return learned if self.through is None else self.through(learned)

    def record(self) -> dict[str, Any]:
        """Return it as JSON (the start is evaluated by the sub-layer that has it)."""
        out = {"learned": self.shape, "start": self.start, "shared": self.shared}
        if self.through is not None:
            out["through"] = [float(f"{x:.5g}") for x in self.through(np.asarray(_PROBES))]
        return out | ({"name": self.name} if self.name else {})


_PROBES = (-2.0, -0.5, -0.1, 0.0, 0.05, 0.3, 1.0, 3.0)


@dataclasses.dataclass(frozen=True)
class OnRows:
    """In a slot: a norm of some rows of the state alone; the others pass unchanged.

    Attributes:
      norm: what the slot would hold.
      rows: which, from 0.
    """

    norm: Any
    rows: tuple[int, ...]

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"norm": plain(self.norm), "rows": list(self.rows)}


@dataclasses.dataclass(frozen=True)
class Started:
    """In a slot: a norm whose gain starts at another value than its row says.

    Attributes:
      norm: what the slot would hold.
      gain: the start, as the norm's function sees it.
    """

    norm: Any
    gain: float

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"norm": plain(self.norm), "gain": self.gain}


@dataclasses.dataclass(frozen=True)
class Sublayer:
    """What one sub-layer puts into the equation.

    A slot holds None (no norm), ``MODEL_NORM``, ``SHARED_NORM`` (the skip norm only), a row of the
    table of norms, or one of these in :class:`OnRows` or :class:`Started`; a factor a number,
    :class:`Learned`, or weights that mix streams (mixing.py). Each may be a schedule
    ``(l, L) -> value`` instead, so that blocks differ.

    Attributes:
      pre_norm, branch_norm, skip_norm, post_norm, mix_norm: N, Q, S, P and U.
      scale, keep, write: c, A and B.
      read: R, weights over streams; None for a decoder of one stream.
      join: K, what is made of the branch's output and what it read (joins.py); None: the output.
      inner_norms: which of :data:`INNER` the branch normalizes: "query" each head by itself, "query
        over heads" all heads together; "hidden" has no heads.
      head_scale: whether what each head returns is multiplied by a learned number that starts at 1.
    """

    pre_norm: Any = None
    branch_norm: Any = None
    skip_norm: Any = None
    post_norm: Any = None
    mix_norm: Any = None
    scale: Any = 1.0
    keep: Any = 1.0
    write: Any = 1.0
    read: Any = None
    join: Any = None
    inner_norms: tuple[str, ...] = ()
    head_scale: bool = False

    def at(self, block: int, depth: int) -> Sublayer:
        """Return what block l of L has: no schedule is left.

        >>> Sublayer(pre_norm=MODEL_NORM, scale=lambda block, depth: block**-0.5).at(4, 6).scale
        0.5
        """
        values = {}
        for each in dataclasses.fields(self):
            value = evaluated(getattr(self, each.name), block, depth)
            if isinstance(value, Learned):
                start = evaluated(value.start, block, depth)
                value = dataclasses.replace(value, start=start)
            values[each.name] = value
        return Sublayer(**values)

    def norms(self, slot: str, depth: int) -> dict[Any, tuple[bool, ...]]:
        """Return the norms of a slot, each with the blocks that have it.

        >>> Sublayer(post_norm=lambda block, depth: MODEL_NORM if block == 1 else None).norms(
        ...     "post_norm", 3
        ... )
        {'model': (True, False, False)}
        """
        found = [evaluated(getattr(self, slot), b, depth) for b in range(1, depth + 1)]
        each = dict.fromkeys(norm for norm in found if norm is not None)
        return {norm: tuple(own == norm for own in found) for norm in each}

    def record(self, depth: int) -> dict[str, Any]:
        """Return it as JSON: what all blocks share as it is, what differs as {"blocks": [...]}."""
        found = [self.at(block, depth) for block in range(1, depth + 1)]
        out = {}
        for each in dataclasses.fields(self):
            values = [plain(getattr(row, each.name)) for row in found]
            same = all(value == values[0] for value in values)
            out[each.name] = values[0] if same else {"blocks": values}
        return out


def inner_norm(entry: str) -> tuple[str, str]:
    """Return what an entry of ``inner_norms`` normalizes, and over what: "head" or "heads".

    >>> inner_norm("key"), inner_norm("key over heads")
    (('key', 'head'), ('key', 'heads'))
    """
    name, _, over = entry.partition(" over ")
    return name, over or "head"


def evaluated(value: Any, block: int, depth: int) -> Any:
    """Return a value of one block: a schedule's, or the value itself (rows are no schedules)."""
    return value(block, depth) if callable(value) and not hasattr(value, "record") else value


def plain(value: Any) -> Any:
    """Return what a slot or a factor holds as JSON."""
    if hasattr(value, "record"):
        return value.record()
    return list(value) if isinstance(value, tuple) else value


class Algebra(Protocol):
    """What the equation is made of, for one purpose."""

    def norm(self, slot: str, norm: Any, x: Any) -> Any:
        """A norm of x; ``norm`` is what the slot holds, None for none."""

    def branch(self, x: Any) -> Any:
        """F(x)."""

    def join(self, join: Any, x: Any, read: Any) -> Any:
        """K of x, the branch's output, and of what the branch read; None for x."""

    def times(self, name: str, factor: Any, x: Any) -> Any:
        """A factor times x."""

    def mix(self, name: str, weights: Any, state: Any, x: Any) -> Any:
        """Weights, which may depend on the state, over the rows of x."""

    def plus(self, kept: Any, written: Any) -> Any:
        """The sum of what is kept and what the branch writes."""


def fold(row: Any, state: Any, algebra: Any) -> Any:
    """Return H' = P(A S(H) + B K(Q(F(z)), z)) with z = c N(R(U(H))) in an algebra.

    Args:
      row: a :class:`Sublayer`, or anything with its attributes.
      state: H, in whatever form the algebra works on.
      algebra: an :class:`Algebra`.

    >>> class Letters:
    ...     def norm(self, slot, norm, x):
    ...         return f"{slot[0]}({x})" if norm else x
    ...     def branch(self, x):
    ...         return f"F({x})"
    ...     def join(self, join, x, read):
    ...         return x
    ...     def times(self, name, factor, x):
    ...         return x
    ...     def mix(self, name, weights, state, x):
    ...         return x
    ...     def plus(self, kept, written):
    ...         return f"{kept} + {written}"
    >>> fold(Sublayer(pre_norm=MODEL_NORM), "h", Letters())
    'h + F(p(h))'
    """
    x = algebra.mix("read", row.read, state, algebra.norm("mix_norm", row.mix_norm, state))
    read = algebra.times("scale", row.scale, algebra.norm("pre_norm", row.pre_norm, x))
    out = algebra.norm("branch_norm", row.branch_norm, algebra.branch(read))
    out = algebra.join(row.join, out, read)
    kept = algebra.norm("skip_norm", row.skip_norm, state)
    total = algebra.plus(
        algebra.mix("keep", row.keep, state, kept), algebra.mix("write", row.write, state, out)
    )
    return algebra.norm("post_norm", row.post_norm, total)
