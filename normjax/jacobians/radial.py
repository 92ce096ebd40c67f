"""Radial and tangential parts of a Jacobian: four gains, and the spectrum without the radial part.

At a point h with direction u = h/|h| and an output h' with direction u',

    RR = u'^T J u        RT = |(I - u' u'^T) J u|       TR = |u'^T J (I - u u^T)|
    TT = |(I - u' u'^T) J (I - u u^T)|_F / sqrt(d - 1)

The first letter is how a perturbation starts, the second how it comes out: RT is a radial one that
comes out tangential, TR the most that a tangential one can leave along u', TT what a random
tangential one is multiplied by. A norm's Jacobian is eps/s^3 along h, so that the condition number
of one norm is s^2/eps whatever the network does; the **deflated** spectrum, that of
(I - u' u'^T) J (I - u u^T) on the complements of u and u', is free of eps.

What a norm forgets is its own affair: RMSNorm the length, so that u is the direction of h;
LayerNorm also the mean, so that u is that of h less its mean, and the direction of the mean is
taken out beside it. With a norm these come from its row (:meth:`normjax.Norm.forgotten`), and
tangential is what is orthogonal to all m of them: T (d - m) in place of T (d - 1). Behind a norm
with a gain nothing leaves along u' / g rather than along u': see :func:`deflated_spectrum`.

Over a sequence every token has its own u_t. The radial direction is then that of all tokens scaled
together, R = sum_t e_t x u_t, and

    RR = R'^T J R / T     RT = |P' J R| / sqrt(T)     TR = |P J^T R'| / sqrt(T)
    TT = |P' J P|_F / sqrt(T (d - 1))

with P and P' the projections on what is tangential to every token. For T = 1 these are the above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from normjax.errors import UserError, whole_number
from normjax.jacobians.closed_forms import as_norm
from normjax.jacobians.views import prepared
from normjax.norm_derivatives import Floats, orthonormal, spanned, unit
from normjax.norms import Norm
from normjax.traced import as_float64


@dataclasses.dataclass(frozen=True)
class RadialReport:
    """The four gains of a Jacobian, dimensionless; floats, or arrays (T,) for the per-token view.

    Attributes:
      rr, rt, tr, tt: see the module's text.
      tt_error: standard error of tt; 0 where it is exact.
      cosine: u' . u, averaged over the tokens: how far the direction itself has turned.
    """

    rr: Any
    rt: Any
    tr: Any
    tt: Any
    tt_error: Any
    cosine: Any

    def times(self, exponent: int) -> RadialReport:
        """Return the gains of the Jacobian times a power of two."""
        names = ("rr", "rt", "tr", "tt", "tt_error")
        scaled = {name: np.ldexp(getattr(self, name), exponent) for name in names}
        plain = {k: x if np.ndim(x) else float(x) for k, x in scaled.items()}
        return dataclasses.replace(self, **plain)


@dataclasses.dataclass(frozen=True)
class DeflatedSpectrum:
    """Singular values of a Jacobian with and without the radial direction, largest first.

    Attributes:
      raw: (n,) or (T, d).
      deflated: (n - T m,) or (T, d - m): the tangential part's, m directions of each token less.
    """

    raw: Floats
    deflated: Floats

    @property
    def condition(self) -> NDArray[np.float64]:
        """Largest over smallest raw singular value; infinite where rounding may be all of it."""
        return _ratio(self.raw, self.raw)

    @property
    def deflated_condition(self) -> NDArray[np.float64]:
        """Largest over smallest singular value of the tangential part; infinite as above."""
        return _ratio(self.deflated, self.raw)


def _ratio(values: Floats, raw: Floats) -> NDArray[np.float64]:
    """Return largest over smallest; infinite where that is within rounding of zero.

    A decomposition finds each value to about n roundoffs of the largest: a smaller one is noise,
    and a ratio to it a number that nothing was computed of.
    """
    noise = raw.shape[-1] * np.finfo(np.float64).eps * raw[..., 0]
    smallest = values[..., -1]
    resolved = smallest > noise
    return np.where(resolved, values[..., 0] / np.where(resolved, smallest, 1.0), np.inf)


def directions(name: str, h: Any) -> Floats:
    """Return the unit vectors h_t/|h_t|, (..., d).

    Raises:
      UserError: h not finite, or a token that is zero and has no direction.
    """
    h = as_float64(name, h)
    if h.ndim == 0 or h.shape[-1] < 2:
        raise UserError(f"{name} of shape {h.shape}: must be (..., d) with d at least 2")
    zero = np.argwhere(~np.any(h != 0, axis=-1))
    if len(zero):
        raise UserError(f"{name}{zero[0].tolist()}: is zero and has no direction; take another h")
    return unit(h)


def _forgotten(name: str, x: Any, norm: Norm | str | None) -> Floats:
    """Return orthonormal directions (..., d, m), the radial one first."""
    u = directions(name, x)[..., None]
    if norm is None:
        return u
    row = as_norm(norm)
    found = row.forgotten(as_float64(name, x))
    return found if row.forgets_length else spanned(u, found)


def radial_report(
    fn: Callable[[Any], Any],
    h: Any,
    *,
    norm: Norm | str | None = None,
    probes: int = 8,
    seed: int = 0,
) -> RadialReport:
    """Return the four gains of fn at h from one JVP, one VJP and a few random probes.

    RR, RT and TR are exact. TT^2 is the mean over probes z of independent signs of |P' J P z|^2
    over T (d - m) (Hutchinson 1990), given with its standard error.

    Args:
      fn: (T, d) -> (T, d) or (d,) -> (d,), differentiable in JAX.
      h: where.
      norm: a row of the table or its name, whose directions at h and at fn(h) are taken; for None,
        and before those of a norm that does not forget the length, those of h and fn(h) themselves.
      probes: at least 2.
      seed: of the probes.

    Returns:
      A :class:`RadialReport` of floats.

    Raises:
      UserError: h not finite or with a zero token; an output that is not finite, not float64 or has
        a zero token; fewer than 2 probes.

    >>> report = radial_report(lambda h: 3 * h, np.array([1.0, 2.0, 2.0]))
    >>> round(report.rr, 12), round(report.rt, 12), round(report.cosine, 12)
    (3.0, 0.0, 1.0)
    """
    if whole_number("probes", probes) < 2:
        raise UserError(f"probes={probes}: must be at least 2 for a standard error")
    read = _forgotten("h", h, norm)
    with jax.enable_x64(True):
        found = prepared(fn, h, 1)
        name, out, shape = found.of.name, found.value, found.of.point.shape
        if out.shape != shape:
            raise UserError(f"{name}: returns shape {out.shape} for {shape}; must keep the shape")
        write = _forgotten(f"{name}(h)", out, norm)
        return report_of(found.push, found.pull, read, write, probes, seed)


def report_of(
    push: Callable[[Array], Array], pull: Callable[[Array], Array], read: Floats, write: Floats,
    probes: int, seed: int,
) -> RadialReport:  # fmt: skip
    """Return the four gains of a derivative that is given by its products; under 64-bit mode.

    Args:
      push, pull: J v and J^T w for v and w of the point's shape.
      read, write: (..., d, m) orthonormal, what is radial at the point and at its image.
      probes, seed: as for :func:`radial_report`.
    """
    u, v = read[..., 0], write[..., 0]
    radial = np.asarray(push(jnp.asarray(u)))
    pulled = pull(jnp.asarray(v))
    z = np.random.default_rng(seed).choice([-1.0, 1.0], size=(probes, *u.shape))
    # One at a time: memory stays that of one product, and compiled parts are reused.
    images = np.stack([np.asarray(push(jnp.asarray(p))) for p in _tangential(z, read)])
    pulled = np.asarray(pulled)
    for name, array in (("radial", radial), ("pulled", pulled), ("probes", images)):
        as_float64(f"derivative of fn ({name})", array)
    size, (radial, pulled, images) = _to_one(radial, pulled, images)
    tokens = u.size // u.shape[-1]
    squares = np.sum(_tangential(images, write).reshape(probes, -1) ** 2, axis=1)
    tt, error = _root_mean(squares / (tokens * (u.shape[-1] - read.shape[-1])))
    return RadialReport(
        rr=float(np.sum(v * radial) / tokens),
        rt=float(np.linalg.norm(_tangential(radial, write)) / tokens**0.5),
        tr=float(np.linalg.norm(_tangential(pulled, read)) / tokens**0.5),
        tt=tt,
        tt_error=error,
        cosine=float(np.mean(np.sum(u * v, axis=-1))),
    ).times(size)


def radial_gains(
    jacobian: Any,
    h: Any,
    after: Any,
    *,
    norm: Norm | str | None = None,
    read: Any = None,
    write: Any = None,
) -> RadialReport:
    """Return the four gains exactly, from a dense Jacobian.

    Args:
      jacobian: (d, d) at a vector h; (T, d, d), the per-token Jacobians at h (T, d); or
        (T, d, T, d), that of the whole sequence.
      h: (d,) or (T, d), where the Jacobian was taken.
      after: the function's value there, of the same shape.
      norm: as for :func:`radial_report`.
      read, write: other directions in place of those at h and at after, (..., d, m), the radial one
        first: what ``Parts.forgotten`` returns.

    Returns:
      A :class:`RadialReport` of floats, for (T, d, d) of arrays (T,), one gain per token.

    Raises:
      UserError: shapes that do not fit, values that are not finite, a zero token.

    >>> report = radial_gains(np.diag([2.0, 5.0]), [1.0, 0.0], [4.0, 0.0])
    >>> float(report.rr), float(report.rt), float(report.tr), float(report.tt)
    (2.0, 0.0, 0.0, 5.0)
    """
    J, whole = _dense(jacobian, h, after)
    read = _forgotten("h", h, norm) if read is None else _basis("read", read, np.ndim(h))
    write = (
        _forgotten("after", after, norm) if write is None else _basis("write", write, np.ndim(h))
    )
    size, (J,) = _to_one(J)
    u, v = read[..., 0], write[..., 0]
    cosine, kept = np.sum(u * v, axis=-1), u.shape[-1] - read.shape[-1]
    if not whole:
        radial = (J @ u[..., None])[..., 0]
        pulled = (v[..., None, :] @ J)[..., 0, :]
        inner = _tangential(J, read[..., None, :, :])
        inner = _tangential(np.swapaxes(inner, -1, -2), write[..., None, :, :])
        return RadialReport(
            rr=np.sum(v * radial, axis=-1),
            rt=np.linalg.norm(_tangential(radial, write), axis=-1),
            tr=np.linalg.norm(_tangential(pulled, read), axis=-1),
            tt=np.linalg.norm(inner, axis=(-2, -1)) / kept**0.5,
            tt_error=np.zeros(u.shape[:-1]),
            cosine=cosine,
        ).times(size)
    T = len(u)
    radial = np.einsum("iamb,mb->ia", J, u)
    pulled = np.einsum("iamb,ia->mb", J, v)
    inner = np.moveaxis(_tangential(J, read), 1, -1)  # (i, m, b, a)
    inner = _tangential(inner, write[:, None, None, :, :])
    return RadialReport(
        rr=float(np.sum(v * radial) / T),
        rt=float(np.linalg.norm(_tangential(radial, write)) / T**0.5),
        tr=float(np.linalg.norm(_tangential(pulled, read)) / T**0.5),
        tt=float(np.linalg.norm(inner) / (T * kept) ** 0.5),
        tt_error=0.0,
        cosine=float(np.mean(cosine)),
    ).times(size)


def deflated_spectrum(
    jacobian: Any,
    h: Any,
    after: Any,
    *,
    norm: Norm | str | None = None,
    read: Any = None,
    write: Any = None,
) -> DeflatedSpectrum:
    """Return the singular values of a Jacobian with and without the radial direction.

    Without more than h and after the directions of these two are taken out: right for RMSNorm
    without a gain. For other norms say which directions:

    - ``norm="layernorm"``: what that norm forgets, at h and at after;
    - ``read, write = parts.block(2).null_directions(h)``: for a part of a decoder, whatever its
      norms, gains and biases;
    - ``read, write = row.null_directions(h, parameters)``: for a norm's own Jacobian.

    Args:
      jacobian, h, after: as for :func:`radial_gains`.
      norm: a row of the table or its name. None, and a norm that forgets nothing: the directions of
        h and after themselves.
      read, write: other directions to take out on the input and on the output side, of the shape of
        h, or (..., d, m) for m of them, 0 for none. Where a norm with a gain g that is not
        uniform ends what the Jacobian is of, nothing leaves along u / g, nor, where it removes the
        mean, along 1 / g.

    Returns:
      A :class:`DeflatedSpectrum`; for (T, d, d) with a leading axis T; m values fewer in
      ``deflated``, the larger m of the two sides.

    Raises:
      UserError: as :func:`radial_gains`; as many directions as features.

    >>> spectrum = deflated_spectrum(np.diag([1e-6, 3.0, 2.0]), [1.0, 0, 0], [1.0, 0, 0])
    >>> spectrum.deflated.round(12), round(float(spectrum.deflated_condition), 12)
    (array([3., 2.]), 1.5)
    """
    J, whole = _dense(jacobian, h, after)
    sides = [
        _forgotten(name, x, norm) if own is None else _basis(side, own, np.ndim(h))
        for name, x, side, own in (("h", h, "read", read), ("after", after, "write", write))
    ]
    for side, basis in zip(("read", "write"), sides, strict=True):
        if basis.shape[:-1] != np.shape(h) or basis.shape[-1] >= basis.shape[-2]:
            raise UserError(
                f"{side} of shape {basis.shape}: must be of the shape {np.shape(h)} of h, with one"
                " more axis for several directions, fewer than there are features"
            )
    right, left = (_complement(basis) for basis in sides)
    if not whole:
        raw = _singular_values(J)
        inner = np.swapaxes(left, -1, -2) @ J @ right
        return DeflatedSpectrum(raw, _singular_values(inner))
    T, d = np.shape(h)
    raw = _singular_values(J.reshape(T * d, T * d))
    blocks = np.swapaxes(left, -1, -2)[:, None] @ J.transpose(0, 2, 1, 3) @ right[None]
    inner = blocks.transpose(0, 2, 1, 3).reshape(T * left.shape[-1], T * right.shape[-1])
    return DeflatedSpectrum(raw, _singular_values(inner))


def _basis(name: str, x: Any, axes: int) -> Floats:
    """Return directions (..., d) or (..., d, m) as orthonormal columns (..., d, m)."""
    if np.ndim(x) == axes:
        return directions(name, x)[..., None]
    if np.ndim(x) == axes + 1 and np.shape(x)[-1] == 0:
        return np.zeros(np.shape(x))
    columns = np.moveaxis(directions(name, np.moveaxis(np.asarray(x), -1, 0)), 0, -1)
    return orthonormal(columns)


def _singular_values(a: Floats) -> Floats:
    return np.asarray(np.linalg.svd(a, compute_uv=False), np.float64)


def _to_one(*arrays: Floats) -> tuple[int, list[Floats]]:
    """Return arrays over a power of two, about their largest entry, so that squares are finite."""
    largest = max(float(np.abs(x).max(initial=0.0)) for x in arrays)
    exponent = int(np.frexp(largest)[1])
    return exponent, [np.ldexp(x, -exponent) for x in arrays]


def _dense(jacobian: Any, h: Any, after: Any) -> tuple[Floats, bool]:
    """Return a Jacobian, checked against its points, and whether it is that of a sequence."""
    J, u, v = as_float64("jacobian", jacobian), directions("h", h), directions("after", after)
    if u.shape != v.shape:
        raise UserError(f"after of shape {v.shape}: must be that of h, {u.shape}")
    if u.ndim == 2 and J.shape == u.shape + u.shape:
        return J, True
    if J.shape != (*u.shape, u.shape[-1]):
        raise UserError(
            f"jacobian of shape {J.shape}: must be (d, d) for h (d,), and (T, d, d) or (T, d, T, d)"
            f" for h (T, d); h is {u.shape}"
        )
    return J, False


def _tangential(x: Floats, basis: Floats) -> Floats:
    """Return x (..., d) without its parts along the orthonormal columns of a basis (..., d, m)."""
    for j in range(basis.shape[-1]):
        u = basis[..., j]
        x = x - np.sum(x * u, axis=-1, keepdims=True) * u
    return x


def _complement(u: Floats) -> Floats:
    """Return an orthonormal basis (..., d, d - m) of what is orthogonal to columns (..., d, m).

    The last columns of the Householder reflection that takes the first one to the first axis; then
    the same for the next.
    """
    d, m = u.shape[-2:]
    if m == 0:
        return np.broadcast_to(np.eye(d), (*u.shape[:-1], d))
    w = u[..., 0].copy()
    w[..., 0] += np.where(w[..., 0] >= 0, 1.0, -1.0)
    w = unit(w)
    first = np.eye(d)[:, 1:] - 2 * w[..., :, None] * w[..., None, 1:]
    return first if m == 1 else first @ _complement(np.swapaxes(first, -1, -2) @ u[..., 1:])


def _root_mean(squares: Floats) -> tuple[float, float]:
    """Return the root of a mean and its standard error, from that of the mean."""
    mean = float(np.mean(squares))
    error = float(np.std(squares, ddof=1) / len(squares) ** 0.5)
    root = mean**0.5
    return root, error / (2 * root) if root > 0 else 0.0
