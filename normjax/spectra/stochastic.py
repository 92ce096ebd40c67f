"""Averages over all singular values from random probes, each with its standard error.

For a random vector z of signs, E |J z|^2 = |J|_F^2, and the bidiagonalization started at z gives
the Gauss quadrature of the density of singular values as z sees it: nodes are the singular values
of the small matrix B, weights the squared first entries of its right singular vectors (stochastic
Lanczos quadrature). Both need only products; probes are independent, so their spread gives the
error. What depends on the smallest values (log-determinant, condition number) is not resolved.

Sources: Hutchinson 1990; Ubaru, Chen and Saad 2017.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from normjax.errors import UserError, whole_number
from normjax.spectra.bidiagonal import Chain, Operator, Vector


@dataclasses.dataclass(frozen=True)
class TraceEstimate:
    """A mean over probes.

    Attributes:
      value: the estimate.
      standard_error: its standard deviation, from the spread of the probes.
      probes: how many.
    """

    value: float
    standard_error: float
    probes: int


@dataclasses.dataclass(frozen=True)
class SpectralDensity:
    """The density of the min(outputs, inputs) singular values as a set of weighted nodes.

    Attributes:
      nodes: (probes, steps) singular values; padded with zeros of weight zero.
      weights: (probes, steps), each row sums to one.
      count: how many singular values there are.
    """

    nodes: Vector
    weights: Vector
    count: int

    def mean(self, function: Callable[[Vector], Vector]) -> TraceEstimate:
        """Return the mean of ``function`` over all singular values; smooth functions fare best.

        >>> import numpy as np
        >>> density = spectral_density(lambda x: 2.0 * x, np.ones(4), probes=2)
        >>> density.mean(lambda s: s**2)
        TraceEstimate(value=4.0, standard_error=0.0, probes=2)
        """
        each = np.sum(self.weights * np.where(self.weights > 0, function(self.nodes), 0.0), axis=1)
        return _estimate(each)

    def cumulative(self, at: Vector) -> tuple[Vector, Vector]:
        """Return the share of singular values at or below each of ``at``, and standard errors."""
        at = np.asarray(at, np.float64)
        below = self.nodes[..., None] <= at
        each = np.sum(self.weights[..., None] * below, axis=1)
        return each.mean(axis=0), each.std(axis=0, ddof=1) / np.sqrt(len(each))

    def histogram(self, edges: Vector) -> tuple[Vector, Vector]:
        """Return the density between neighbouring ``edges`` (share over width), and errors."""
        edges = np.asarray(edges, np.float64)
        if edges.ndim != 1 or len(edges) < 2 or not (np.diff(edges) > 0).all():
            raise UserError("edges: must be at least two ascending numbers; use numpy.linspace")
        each = np.stack(
            [
                np.histogram(nodes, edges, weights=weights)[0]
                for nodes, weights in zip(self.nodes, self.weights, strict=True)
            ]
        ) / np.diff(edges)
        return each.mean(axis=0), each.std(axis=0, ddof=1) / np.sqrt(len(each))


def spectral_density(
    function: Any, x: Any = None, *, steps: int = 40, probes: int = 10, seed: int = 0
) -> SpectralDensity:
    """Return the density of the singular values of the Jacobian of ``function`` at ``x``.

    Args:
      function, x: as in :func:`normjax.krylov.top_singular_values`.
      steps: of each bidiagonalization, two products each; features narrower than about
        1 / steps of the range are smoothed into a few nodes.
      probes: independent start vectors, at least 2.
      seed: of the probes.

    Returns:
      Nodes and weights, from which means, shares and histograms follow with standard errors.

    Raises:
      UserError: steps below 1 or probes below 2; x or a product not finite.
    """
    operator, rng = Operator(function, x), _probes(probes, seed)
    if whole_number("steps", steps) < 1:
        raise UserError(f"steps={steps}: must be at least 1; the default is 40")
    steps = min(steps, operator.domain)
    nodes, weights = np.zeros((probes, steps)), np.zeros((probes, steps))
    none = np.empty((0, operator.image)), np.empty((0, operator.domain))
    for i in range(probes):
        start = rng.choice([-1.0, 1.0], size=operator.domain)
        chain = Chain(operator, none, steps, 0.0, start, rng)
        while not chain.full:
            chain.step()
            if chain.ended:  # the quadrature of this start is exact; what follows is another's
                break
        _, values, right, *_ = chain.small()
        nodes[i, : len(values)] = np.ldexp(values, operator.exponent)
        weights[i, : len(values)] = right[:, 0] ** 2
    return SpectralDensity(nodes, weights, operator.domain)


def frobenius_norm(
    function: Any, x: Any = None, *, probes: int = 16, seed: int = 0
) -> TraceEstimate:
    """Return |J|_F, the root of the sum of squared singular values, with its standard error.

    Args:
      function, x: as in :func:`normjax.krylov.top_singular_values`.
      probes: independent vectors, at least 2; one product each.
      seed: of the probes.

    Returns:
      The estimate; its error is that of |J|_F^2 over 2 |J|_F.

    Raises:
      UserError: probes below 2; x or a product not finite.

    >>> import jax.numpy as jnp
    >>> frobenius_norm(lambda x: x * jnp.array([3.0, 4.0]), jnp.ones(2), probes=2)
    TraceEstimate(value=5.0, standard_error=0.0, probes=2)
    """
    operator, rng = Operator(function, x), _probes(probes, seed)
    each = np.empty(probes)
    for i in range(probes):
        image = operator.forward(rng.choice([-1.0, 1.0], size=operator.domain))
        each[i] = image @ image
    square = _estimate(each)
    value = float(np.sqrt(square.value))
    error = square.standard_error / (2 * value) if value else 0.0
    return _scaled(TraceEstimate(value, error, probes), operator)


def trace(function: Any, x: Any = None, *, probes: int = 16, seed: int = 0) -> TraceEstimate:
    """Return the trace of a square Jacobian, E z^T J z, with its standard error.

    Args and errors as :func:`frobenius_norm`; also UserError where J is not square.

    >>> import jax.numpy as jnp
    >>> trace(lambda x: x * jnp.array([3.0, 4.0]), jnp.ones(2), probes=2)
    TraceEstimate(value=7.0, standard_error=0.0, probes=2)
    """
    operator, rng = Operator(function, x), _probes(probes, seed)
    if operator.domain != operator.image:
        raise UserError(
            f"function: its Jacobian has sides {operator.image} and {operator.domain}; only a"
            " square one has a trace; use frobenius_norm"
        )
    each = np.empty(probes)
    for i in range(probes):
        z = rng.choice([-1.0, 1.0], size=operator.domain)
        each[i] = z @ operator.forward(z)
    return _scaled(_estimate(each), operator)


def _scaled(found: TraceEstimate, operator: Operator) -> TraceEstimate:
    """Return what was found of 2^-exponent J for J."""
    size = operator.exponent
    return dataclasses.replace(
        found, value=math.ldexp(found.value, size),
        standard_error=math.ldexp(found.standard_error, size),
    )  # fmt: skip


def _probes(probes: int, seed: int) -> np.random.Generator:
    if whole_number("probes", probes) < 2:
        raise UserError(f"probes={probes}: must be at least 2, for a standard error")
    return np.random.default_rng(seed)


def _estimate(each: Vector) -> TraceEstimate:
    error = float(each.std(ddof=1) / np.sqrt(len(each)))
    return TraceEstimate(float(each.mean()), error, len(each))
