"""The largest singular values of any Jacobian without forming it, with bounds on their errors.

The singular values of the small matrix of a bidiagonalization approach those of J from below, the
largest first. A chain that does not break down sees only one direction of a repeated value;
therefore the found directions are deflated and a second chain looks for anything larger than the
k-th value (``resolved``). The bounds come from residuals |J v - s u|, |J^T u - s v| that are
measured at the end with fresh products, not estimated.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from normjax.errors import UserError, whole_number
from normjax.spectra.bidiagonal import Chain, Operator, Vector, residual_bounds
from normjax.spectra.dense import svd

_MEMORY = 4 << 30  # bytes for the basis vectors
_ROUNDS = 20
_SHARE = 1e8
_GUARDS = 5  # values kept beyond the k-th, where it has near neighbours


@dataclasses.dataclass(frozen=True)
class TopSingularValues:
    """The k largest singular values of J, with what is known about their errors.

    Attributes:
      values: (k,) float64, descending; never above the true ones but for rounding.
      bounds: (k,) on |true value - value|, absolute.
      resolved: whether a second chain, outside the directions found, showed nothing larger than the
        k-th value. Where False, ``bounds`` say how near *some* singular value is, and a copy of a
        repeated value (or one very near the k-th) may be missing.
      converged: whether every bound is within the tolerance asked for.
      left, right: (outputs, k), (inputs, k) singular vectors.
      products: products with J and J^T that were computed.
    """

    values: Vector
    bounds: Vector
    resolved: bool
    converged: bool
    left: Vector
    right: Vector
    products: int


def top_singular_values(
    function: Any,
    x: Any = None,
    k: int = 1,
    *,
    tol: float = 1e-10,
    max_steps: int | None = None,
    verify: bool = True,
    seed: int = 0,
) -> TopSingularValues:
    """Return the k largest singular values of the Jacobian of ``function`` at ``x``.

    Args:
      function: of one real array to one real array; or, without x, a linear operator with
        ``shape``, ``dtype``, ``matvec`` and ``rmatvec`` (SciPy's LinearOperator).
      x: the point; its dtype is that of the products. Pass float64 for the tightest bounds.
      k: how many.
      tol: a bound of tol times the largest value ends the work; not below the products' roundoff.
      max_steps: of a chain, two products each. By default 500, or what fits in 4 GiB.
      verify: whether to look for missed copies with a second chain, at most as long as the first.
      seed: of the start vectors.

    Returns:
      Values, error bounds and flags.

    Raises:
      UserError: k below 1 or above min(outputs, inputs); x or a product not finite; no x.

    >>> import jax.numpy as jnp
    >>> top = top_singular_values(lambda x: x * jnp.arange(1.0, 6.0), [1.0] * 5, k=2)
    >>> top.values.round(6), top.resolved
    (array([5., 4.]), True)
    """
    operator = Operator(function, x, widest=False)
    k = whole_number("k", k)
    if not 1 <= k <= operator.domain:
        raise UserError(
            f"k={k}: must be from 1 to {operator.domain}, the smaller side of the Jacobian"
            f" {operator.image} by {operator.domain}"
        )
    if not tol > 0:
        raise UserError(f"tol={tol}: must be above 0; the default is 1e-10")
    most = _MEMORY // (8 * (operator.domain + operator.image))
    most = min(most, 500) if max_steps is None else max_steps
    if most < k:
        raise UserError(f"max_steps={most}: must be at least k={k}; pass max_steps={4 * k}")
    rng = np.random.default_rng(seed)
    found = _Found(operator, k, max(tol, operator.roundoff), most, rng)
    found.first()
    if verify:
        found.look_for_more()
    return found.result(verify)


class _Found:
    """The k best pairs so far, and the search for more."""

    def __init__(self, operator: Operator, k: int, tol: float, most: int, rng):
        self._operator, self._k, self._tol, self._most, self._rng = operator, k, tol, most, rng
        self._left: Vector = np.empty((0, operator.image))
        self._right: Vector = np.empty((0, operator.domain))
        self._values: Vector = np.empty(0)
        self._next = 0.0  # from above, the value after the last
        self._tail: tuple[Vector, Vector] = np.empty(0), np.empty(0)  # what else the first saw
        self._length, self._shown = most, False
        self._history: list[tuple[int, float]] = []
        self._spare: tuple[Vector, Vector, Vector] | None = None

    def first(self) -> None:
        """Run the first chain until the k largest values are within the tolerance."""
        chain = self._chain(self._most, 0.0)
        k = self._k
        for _ in self._grown(chain):
            left, values, right, residuals, bounds = chain.small()
            if len(values) < k or (len(values) == k and not (chain.broke_down or chain.full)):
                continue
            self._history.append((len(chain), values[k - 1]))
            self._shown = bool(bounds[:k].max() <= self._tol * values[0])
            if self._shown or chain.full:
                self._tail = values[k:], residuals[k:]
                self._values, self._length = values[:k], len(chain)
                self._left, self._right = chain.vectors(left, right, slice(k))
                self._history = [(n, values[k - 1] - value) for n, value in self._history]
                return

    def look_for_more(self) -> None:
        """Merge what chains outside the found directions find, and judge whether all is found."""
        self._tail = np.empty(0), np.empty(0)
        for _ in range(_ROUNDS + self._k):
            if len(self._values) == self._operator.domain:
                return
            if not self._second_chain():
                return
        self._shown = False

    def add_guard(self) -> bool:
        """Keep the next value too, which separates the others from the rest; return whether."""
        if len(self._values) >= min(self._k + _GUARDS, self._operator.domain):
            return False
        if self._second_chain(fine=True):
            self.look_for_more()
            return True
        if self._spare is None:
            return False
        value, left, right = self._spare
        self._values = np.append(self._values, value)
        self._left = np.concatenate([self._left, left])
        self._right = np.concatenate([self._right, right])
        self._next = 0.0
        self.look_for_more()
        return True

    def _second_chain(self, fine: bool = False) -> bool:
        """Return whether a chain outside the found directions found a larger value.

        Were there one, this chain would be as near to it, after as many steps from a random start,
        as the first chain was to its k-th value, but for the share of the start in its direction.
        The first chain's course is known. So the chain may end once it stays below by that times
        the inverse of a share that is met once in ten thousand starts. Where the next value is
        too close for this (or in any case if ``fine``), it goes on until that value has converged.
        """
        chain = self._chain(min(3 * self._length + 20, self._most), self._values[0])
        slack = self._tol * self._values[0]
        last = self._values[-1]
        top, shown = 0.0, False
        left = right = values = np.empty(0)
        for _ in self._grown(chain):
            left, values, right, residuals, bounds = chain.small()
            top = values[0] + bounds[0]
            distance = last - values[0]
            if distance < -slack:
                if bounds[0] <= slack or chain.full:
                    self._merge(chain, left, values, right, residuals, slack)
                    return True
            elif not fine and distance > _SHARE * self._missing(len(chain)) + slack:
                top, shown = min(top, last - 0.5 * distance), True
                break
            elif bounds[0] <= slack and len(chain) >= min(self._length, chain.most):
                shown = True
                break
        self._shown = self._shown and shown
        self._next = max(self._next, top)
        self._spare = (values[:1], *chain.vectors(left, right, slice(1))) if shown else None
        return False

    def _missing(self, length: int) -> float:
        """Return by how much the first chain missed its k-th value when it was as long."""
        past = [missing for n, missing in self._history if n <= length]
        return past[-1] if past else np.inf

    def _merge(self, chain, left, values, right, residuals, slack) -> None:
        """Take every value of a chain that is larger than the last and as good as the first."""
        good = np.flatnonzero((values > self._values[-1]) & (residuals <= max(residuals[0], slack)))
        new_left, new_right = chain.vectors(left, right, good)
        merged = np.concatenate([self._values, values[good]])
        order = np.argsort(-merged)
        kept = order[: len(self._values)]
        self._next = max(self._next, merged[order[len(kept)]])
        self._values = merged[kept]
        self._left = np.concatenate([self._left, new_left])[kept]
        self._right = np.concatenate([self._right, new_right])[kept]

    def _chain(self, steps: int, scale: float) -> Chain:
        start = self._rng.normal(size=self._operator.domain)
        locked = (self._left, self._right)
        return Chain(self._operator, locked, steps, scale, start, self._rng)

    @staticmethod
    def _grown(chain: Chain):
        """Grow a chain, with a look at it after every eighth more of its length."""
        due = 1
        while not chain.full:
            chain.step()
            if len(chain) >= due or chain.full or chain.broke_down:
                due = len(chain) + max(1, len(chain) // 8)
                yield

    def result(self, verify: bool) -> TopSingularValues:
        """State values and bounds, with guards added as long as they make the bounds tighter."""
        values, bounds, left, right = self._measured()
        while verify and bounds[: self._k].max() > self._tol * values[0] and self.add_guard():
            values, bounds, left, right = self._measured()
        values, bounds = values[: self._k], bounds[: self._k] + self._operator.roundoff * values[0]
        left, right = left[: self._k].T, right[: self._k].T
        if self._operator.turned:
            left, right = right, left
        values, bounds = (np.ldexp(a, self._operator.exponent) for a in (values, bounds))
        converged = bool(bounds.max() <= (self._tol + 2 * self._operator.roundoff) * values[0])
        resolved = verify and self._shown
        products = self._operator.products
        return TopSingularValues(values, bounds, resolved, converged, left, right, products)

    def _measured(self) -> tuple[Vector, Vector, Vector, Vector]:
        """Return values and vectors of J between the found spaces, with bounds from residuals."""
        images = np.stack([self._operator.forward(v) for v in self._right])
        backs = np.stack([self._operator.backward(u) for u in self._left])
        inner = self._left @ images.T
        rotation_left, values, rotation_right = svd(inner, "operator between the found vectors")
        left, right = rotation_left.T @ self._left, rotation_right @ self._right
        one = rotation_right @ images - values[:, None] * left
        other = rotation_left.T @ backs - values[:, None] * right
        residuals = np.maximum(np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1))
        every = np.concatenate([values, self._tail[0]])
        residuals = np.concatenate([residuals, self._tail[1]])
        bounds = residuals
        for _ in range(2):
            below = np.append((every + bounds)[1:], self._next)
            bounds = residual_bounds(every, residuals, below)
        return values, bounds[: len(values)], left, right
