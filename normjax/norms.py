"""The table of normalizations, and thin Flax modules of its rows.

A row says all that anyone asks about a norm; the functions themselves are in
:mod:`normjax.norm_functions`, with what they do at the ends of the range, at zero and at NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from normjax import norm_derivatives as derivatives
from normjax import norm_functions as functions
from normjax.errors import UserError, check_choice
from normjax.norm_derivatives import Floats, Matrices, NormDerivative, NullDirections, orthonormal
from normjax.registry import Registry

# --- the table ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array that a norm learns.

    Attributes:
      name: its keyword in the norm's function.
      start: the value that it begins with, a number or a function of the width d.
      shape: "feature" for (d,), "scalar" for (), or its axes, each "feature" for d or a number:
        ("feature", 128) for (d, 128).
      offset: added before the function sees it, in float32 at least: 1 for a gain of 1 + g.
      spread: standard deviation of the normal numbers that are added to the start; 0 for none.
    """

    name: str
    start: float | Callable[[int], float] = 1.0
    shape: str | tuple[str | int, ...] = "feature"
    offset: float = 0.0
    spread: float = 0.0

    def shape_at(self, width: int) -> tuple[int, ...]:
        """Return its shape in a norm of d features.

        >>> Parameter("down", shape=("feature", 128)).shape_at(32)
        (32, 128)
        """
        named = {"scalar": (), "feature": ("feature",)}
        axes = named[self.shape] if isinstance(self.shape, str) else self.shape
        return tuple(width if axis == "feature" else int(axis) for axis in axes)

    def started(self, width: int, key: Array | None = None) -> Any:
        """Return its values in a fresh norm of d features; without a key those without spread."""
        shape = self.shape_at(width)
        start = self.start(width) if callable(self.start) else self.start
        if key is None or not self.spread:
            return np.full(shape, start)
        return start + self.spread * jax.random.normal(key, shape)

    def record(self) -> dict[str, Any]:
        """Return it as JSON; a start that depends on the width as what it is at some widths."""
        start = self.start
        found: dict[str, Any] = {
            "name": self.name,
            "start": {str(d): start(d) for d in _WIDTHS} if callable(start) else start,
            "shape": self.shape if isinstance(self.shape, str) else list(self.shape),
            "offset": self.offset,
        }
        return found | ({"spread": self.spread} if self.spread else {})


_WIDTHS = (1, 8, 128, 1000)


@dataclasses.dataclass(frozen=True)
class Law:
    """What a norm does to a stream of which only the mean square is known (less its mean, where it
    is centred), and to perturbations along it.

    Attributes:
      slope: ``(mean square, eps) -> 1 / s``, the factor on the stream and on what is across it.
      kept: ``(mean square, eps) -> k``, what is left of 1 / s along the stream.
      power: of the width d, by which the slope is multiplied: -1/2 for a division by the length.
    """

    slope: Callable[[Any, float], Any]
    kept: Callable[[Any, float], Any]
    power: float = 0.0

    def factor(self, mean_square: Any, eps: float, width: int) -> Any:
        """Return the factor on a stream of that width, the slope times the power of the width."""
        return self.slope(mean_square, eps) * width**self.power


INVERSE_ROOT = Law(
    lambda mean_square, eps: (mean_square + eps) ** -0.5,
    lambda mean_square, eps: eps / (mean_square + eps),
)
"""Division by sqrt(mean square + eps)."""
ROOT_AND_EPS = Law(
    lambda mean_square, eps: 1 / (mean_square**0.5 + eps),
    lambda mean_square, eps: eps / (mean_square**0.5 + eps),
)
"""Division by sqrt(mean square) + eps."""
ROOT = Law(lambda mean_square, eps: mean_square**-0.5, lambda mean_square, eps: 0.0)
"""Division by sqrt(mean square), without eps."""
LENGTH = dataclasses.replace(ROOT, power=-0.5)
"""Division by the length."""
UNCHANGED = Law(lambda mean_square, eps: 1.0, lambda mean_square, eps: 1.0)

FORGETS: dict[str, tuple[str, ...]] = {
    "nothing": (), "length": ("length",), "mean": ("mean",), "length and mean": ("length", "mean"),
}  # fmt: skip
"""What a norm may forget."""


@dataclasses.dataclass(frozen=True)
class Stopped:
    """What a norm with stop-gradients is, to autodiff and without them.

    Attributes:
      plain: the norm's function without its stop-gradients: the same values.
      derivative: what autodiff takes the norm's function to have, in the form of a norm's own.
    """

    plain: Callable[..., Array]
    derivative: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Norm:
    """A normalization as a value.

    Whoever needs a fact about a norm asks its row: what it learns, what it forgets, whether it has
    a closed form or a law. A row may answer that there is none.

    Attributes:
      title: what a legend calls it.
      function: ``(x, *, eps, **parameters) -> y`` on (..., d); it may leave out ``eps``.
      parameters: what it learns.
      derivative: the closed form of its Jacobian at points (..., d), ``(x, *, eps, **parameters)
        ->`` :class:`NormDerivative` or a matrix (..., d, d), in NumPy float64; verified against
        ``jax.jacfwd`` for every row. None: there is none.
      forgets: what of x does not reach y (but for eps): "nothing", "length", "mean", or "length
        and mean".
        The directions in which its Jacobian is null follow from it, see :meth:`null_directions`.
      law: what it does to a stream of known size, for theory and for the self-tests that ride
        along; None: no law, and nothing is claimed.
      source: where it comes from.
      action: what changing to it does, as a gerund, for sentences.
      directions: ``x -> (..., d, m)``, the directions in which it forgets, of any length, the one
        along its radius first, in NumPy float64; for a norm that forgets something else than
        ``forgets`` can say, such as the length of each group. None: as ``forgets`` says.
      stopped: for a function with stop-gradients, of which autodiff takes another derivative than
        ``derivative``, which is the true one: both without them. None: they agree.
      name: in the table; set by :func:`register_norm`.
    """

    title: str
    function: Callable[..., Array]
    parameters: tuple[Parameter, ...] = ()
    derivative: Callable[..., Any] | None = None
    forgets: str = "nothing"
    law: Law | None = None
    source: str = ""
    action: str = ""
    name: str = ""
    directions: Callable[[Floats], Floats] | None = None
    stopped: Stopped | None = None

    def exact(self) -> Norm:
        """Return the norm without stop-gradients: what autodiff takes it to have is its derivative.

        >>> f, x = NORMS["gradient_preserving"], jnp.ones(2)
        >>> alpha = {"alpha": jnp.asarray(1.0)}
        >>> [round(float(jax.grad(lambda x, row=row: row(x, alpha, 0.0)[0])(x)[0]), 3)
        ...  for row in (f, f.exact())]
        [1.0, 0.269]
        """
        if self.stopped is None:
            return self
        return dataclasses.replace(self, function=self.stopped.plain, stopped=None)

    def surrogate(self) -> Norm:
        """Return the norm with what autodiff takes it to have in the place of its derivative."""
        if self.stopped is None:
            return self
        return dataclasses.replace(self, derivative=self.stopped.derivative, stopped=None)

    def __call__(self, x: Array, parameters: Mapping[str, Array], eps: float) -> Array:
        """Apply the norm with the parameters it has, such as {"gain": (d,), "bias": (d,)}."""
        arguments = dict(parameters)
        for each in self.parameters:
            if each.offset and each.name in arguments:
                value = arguments[each.name]
                arguments[each.name] = each.offset + value.astype(
                    jnp.promote_types(value.dtype, jnp.float32)
                )
        return _with_eps(self.function, x, arguments, eps)

    def derivative_at(self, x: Any, parameters: Mapping[str, Any], eps: float) -> Any:
        """Return its derivative at points x (..., d), of float64 parameters without offset yet.

        In wider numbers where x is of such and the closed form keeps them.
        """
        if self.derivative is None:
            raise UserError(
                f"norm={self.title}: has no closed form; give its row a derivative=, or use"
                " jax.jacfwd"
            )
        arguments = dict(parameters)
        for each in self.parameters:
            if each.name in arguments:
                arguments[each.name] = each.offset + arguments[each.name]
        found = _with_eps(self.derivative, x, arguments, eps)
        if hasattr(found, "jvp"):
            return found
        return Matrices(np.asarray(found, np.result_type(np.asarray(found), np.float64)))

    @property
    def has_identity(self) -> bool:
        """Whether it forgets the length of what it reads, and says how much eps lets through."""
        return self.forgets_length and self.law is not None and self.directions is None

    @property
    def forgets_length(self) -> bool:
        """Whether a multiple of x gives the same y, but for eps."""
        return "length" in FORGETS[self.forgets]

    @property
    def removes_mean(self) -> bool:
        """Whether a shift of all features changes nothing."""
        return "mean" in FORGETS[self.forgets]

    def centred(self, x: Any) -> Any:
        """Return x less its mean where the norm removes it: what its scale is the size of."""
        return x - x.mean(axis=-1, keepdims=True) if self.removes_mean else x

    def forgotten(self, x: Any) -> Floats:
        """Return the directions in which a change of x does not reach y, but for eps.

        x itself for a norm that forgets the length; x less its mean, and 1, for one that forgets
        the mean as well; 1 for one that forgets only that.

        Args:
          x: (..., d) points.

        Returns:
          (..., d, m) orthonormal columns, float64, the radial one first where the norm forgets the
          length; m = 0 for a norm that forgets nothing.

        Raises:
          UserError: a point that is not finite, or of which the norm has no direction (zero, or
            constant where the mean is removed).

        >>> NORMS["layernorm"].forgotten([1.0, 3.0]).round(3)
        array([[-0.707,  0.707],
               [ 0.707,  0.707]])
        """
        x = np.asarray(x, np.float64)
        if not np.all(np.isfinite(x)):
            raise UserError("x: must be finite; look at where it comes from")
        if self.directions is not None:
            columns = np.asarray(self.directions(x), np.float64)
        elif not self.forgets_length:
            columns = np.ones((*x.shape, int(self.removes_mean)))
        else:
            c = self.centred(self.centred(x))  # the second time: what rounding left
            some = np.max(np.abs(x), axis=-1, keepdims=True)
            c = np.where(np.abs(c).max(axis=-1, keepdims=True) > 2.0**-50 * some, c, 0.0)
            columns = np.stack([c, np.ones_like(x)] if self.removes_mean else [c], axis=-1)
        if not np.all(np.any(columns != 0, axis=-2)):
            raise UserError(
                f"norm={self.title}: has no direction at a point that is zero"
                f"{' or constant' if self.removes_mean else ''}; take another one"
            )
        return orthonormal(columns)

    def null_directions(
        self, x: Any, parameters: Mapping[str, Any] | None = None, eps: float = 1e-6
    ) -> NullDirections:
        """Return what its Jacobian at points x does not see and does not reach, but for eps.

        On the right what it forgets. On the left, where J = diag(w) (P - (1 - k) u v^T), v for u,
        and all of that over w; for a row whose derivative is a matrix, or that has none, the left
        singular vectors of the m smallest values of its Jacobian at eps = 0 (at eps where that is
        not finite).

        Args:
          x: (..., d) points.
          parameters: as in the parameter tree, offsets not added yet.
          eps: inside the root.

        Returns:
          right and left, (..., d, m) each with orthonormal columns; m is the same for both. Gains
          of zero add what they hide.

        Raises:
          UserError: as :meth:`forgotten`; gains of zero that hide another number of directions at
            one point than at another.

        >>> row = NORMS["layernorm"]
        >>> right, left = row.null_directions([1.0, 2.0, 4.0], {"gain": np.array([1.0, 2.0, 4.0])})
        >>> bool(abs(left.T @ row.derivative_at(
        ...     np.array([1.0, 2.0, 4.0]), {"gain": np.array([1.0, 2.0, 4.0])}, 0.0).matrix()
        ... ).max() < 1e-15)
        True
        """
        x = np.asarray(x, np.float64)
        right, own = self.forgotten(x), parameters or {}
        if not right.shape[-1]:
            return NullDirections(right, right)
        found = self.derivative_at(x, own, eps) if self.derivative is not None else None
        if not isinstance(found, NormDerivative):
            return NullDirections(right, self._left_numerically(x, own, eps, right.shape[-1]))
        w = np.broadcast_to(found.weight, x.shape)
        if np.all(w != 0):
            # In units of the largest, so that the inverse of no weight leaves the range.
            inverse = np.max(np.abs(w), axis=-1, keepdims=True) / w
            image = right if found.dual is None else found.dual[..., None]
            return NullDirections(right, orthonormal(image * inverse[..., None]))
        radial = np.zeros(()) if self.forgets_length else np.ones(())
        each = [z.reshape(-1, x.shape[-1]) for z in (w, found.direction, found.covector)]
        pairs = [
            NormDerivative(weight, u, radial, found.centered, v).null_directions()
            for weight, u, v in zip(*each, strict=True)
        ]
        if len({pair.right.shape for pair in pairs}) > 1:
            raise UserError(
                "gain: has zeros, which hide another number of directions at one point than at"
                " another; take one point at a time"
            )
        sides = (np.stack(side).reshape(*x.shape, -1) for side in zip(*pairs, strict=True))
        return NullDirections(*sides)

    def _left_numerically(self, x: Floats, own: Any, eps: float, m: int) -> Floats:
        for each in (0.0, eps):
            if self.derivative is not None:
                J = self.derivative_at(x, own, each).matrix()
            else:
                with jax.enable_x64(True):
                    wide = {k: jnp.asarray(v, jnp.float64) for k, v in own.items()}
                    one = jax.jacfwd(functools.partial(self.__call__, parameters=wide, eps=each))
                    points = jnp.asarray(x.reshape(-1, x.shape[-1]))
                    J = np.asarray(jax.lax.map(one, points)).reshape(*x.shape, x.shape[-1])
            if np.all(np.isfinite(J)):
                return np.linalg.svd(J)[0][..., -m:]
        raise UserError(f"norm={self.title}: its derivative is not finite; look at x and eps")

    def started(self, width: int) -> dict[str, np.ndarray]:
        """Return the parameters of a fresh norm of d features, those with a spread without it."""
        return {p.name: p.started(width) for p in self.parameters}

    def starting(self, **starts: float) -> Norm:
        """Return the norm with other start values, as its function sees them.

        >>> NORMS["rmsnorm_offset"].starting(gain=0.0).parameters[0].start
        -1.0
        """
        known = [p.name for p in self.parameters]
        for name in starts:
            check_choice(f"norm={self.title}: the start of", name, known)
        own = tuple(
            dataclasses.replace(p, start=starts[p.name] - p.offset) if p.name in starts else p
            for p in self.parameters
        )
        return dataclasses.replace(self, parameters=own)

    def seen(self, name: str, value: Any) -> Any:
        """Return a parameter as the function sees it: with its offset."""
        offset = next((p.offset for p in self.parameters if p.name == name), 0.0)
        return value + offset if offset else value

    def record(self) -> dict[str, Any]:
        """Return it as JSON: all that decides numbers, its values at some points among them.

        What only readers see stands under "shown".
        """
        slopes = {} if self.stopped is None else {"slopes": list(_slopes(self))}
        return {
            "parameters": [p.record() for p in self.parameters],
            "forgets": self.forgets,
            "values": list(_values(self)), **slopes,
            "shown": {"name": self.name, "title": self.title, "source": self.source,
                      "action": self.action},
        }  # fmt: skip


def _with_eps(function: Callable[..., Any], x: Any, arguments: Any, eps: float) -> Any:
    takes = inspect.signature(function).parameters
    some = "eps" in takes or any(p.kind is p.VAR_KEYWORD for p in takes.values())
    return function(x, **arguments, **({"eps": eps} if some else {}))


@functools.lru_cache(maxsize=256)
def _values(norm: Norm) -> tuple[float, ...]:
    """What a fresh norm makes of some points, to five digits: another formula has other values."""
    with jax.enable_x64(True):
        # Also where eps counts, and where what saturates does.
        x = jnp.outer(jnp.asarray([1.0, 1e-3, 30.0]), jnp.asarray(_PROBES, jnp.float64))
        start = {p.name: jnp.asarray(_probed(p)) for p in norm.parameters}
        try:
            y = norm(x, start, 1e-6)
            if y.shape != x.shape:
                raise UserError(f"makes shape {y.shape}; must keep the shape")
        except Exception as error:
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(
                f"norm={norm.title}: its function fails on x of shape {x.shape} ({what})"
            ) from error
        return tuple(float(f"{float(value):.5g}") for value in y.ravel())


@functools.lru_cache(maxsize=256)
def _slopes(norm: Norm) -> tuple[float, ...]:
    """What training takes the derivative of a fresh norm to be, times a vector at a point."""
    with jax.enable_x64(True):
        x = jnp.asarray(_PROBES, jnp.float64)
        start = {p.name: jnp.asarray(_probed(p)) for p in norm.parameters}
        slopes = jax.jvp(lambda x: norm(x, start, 1e-6), (x,), (jnp.cos(x),))[1]
        return tuple(float(f"{float(value):.5g}") for value in slopes)


def _probed(parameter: Parameter) -> np.ndarray:
    """Return its start, with numbers that everyone has in place of those that are drawn."""
    start = parameter.started(len(_PROBES))
    return start + parameter.spread * np.cos(np.arange(start.size)).reshape(start.shape)


_PROBES = (-2.0, -1.1, -0.4, 0.03, 0.2, 0.7, 1.5, 3.0)

PARTIAL_SHARE, GATE_RANK = 0.25, 128
"""Of pRMSNorm's row, the share of the features that its scale is taken from; of GatedNorm's, the
features of its gate."""

_GAIN, _OFFSET, _BIAS = (
    Parameter("gain"),
    Parameter("gain", 0.0, offset=1.0),
    Parameter("bias", 0.0),
)
_LENGTH_GAIN = Parameter("gain", lambda width: width**0.5, "scalar")
_ALPHA = Parameter("alpha", 0.5, "scalar")
_RMS: dict[str, Any] = {
    "derivative": derivatives.rms_norm_derivative, "forgets": "length", "law": INVERSE_ROOT,
    "source": "Zhang and Sennrich 2019, arXiv 1910.07467",
}  # fmt: skip
_LAYER: dict[str, Any] = {
    "derivative": derivatives.layer_norm_derivative, "forgets": "length and mean",
    "law": INVERSE_ROOT, "source": "Ba, Kiros and Hinton 2016, arXiv 1607.06450",
}  # fmt: skip

_ROWS = {
    "rmsnorm": Norm("RMSNorm", functions.rms_norm, (_GAIN,), **_RMS),
    "rmsnorm_offset": Norm("RMSNorm, gain 1 + g", functions.rms_norm, (_OFFSET,), **_RMS),
    "rmsnorm_plain": Norm("RMSNorm without gain", functions.rms_norm, (), **_RMS),
    "layernorm": Norm("LayerNorm", functions.layer_norm, (_GAIN, _BIAS), **_LAYER),
    "layernorm_nobias": Norm("LayerNorm without bias", functions.layer_norm, (_GAIN,), **_LAYER),
    "layernorm_plain": Norm("LayerNorm without gain and bias", functions.layer_norm, (), **_LAYER),
    "rmsnorm_simple": Norm(
        "simple RMSNorm", functions.simple_rms_norm, (), derivatives.simple_rms_norm_derivative,
        forgets="length", law=ROOT, source="x-transformers, SimpleRMSNorm",
    ),
    "rmsnorm_eps_outside": Norm(
        "RMSNorm, eps outside the root", functions.rms_norm_eps_outside, (_GAIN,),
        derivatives.rms_norm_eps_outside_derivative, forgets="length", law=ROOT_AND_EPS,
        source="Zhang and Sennrich 2019, arXiv 1910.07467, as in the authors' PyTorch code",
    ),
    "prmsnorm": Norm(
        "pRMSNorm, first quarter", partial(functions.partial_rms_norm, share=PARTIAL_SHARE),
        (_GAIN,), partial(derivatives.partial_rms_norm_derivative, share=PARTIAL_SHARE),
        forgets="length", source="Zhang and Sennrich 2019, arXiv 1910.07467",
    ),
    "crmsnorm": Norm(
        "CRMSNorm", functions.crms_norm, (), derivatives.crms_norm_derivative, forgets="length",
        source="Jiang et al. 2023, arXiv 2305.14858",
    ),
    "scalenorm": Norm(
        "ScaleNorm", functions.l2_norm, (_LENGTH_GAIN,), derivatives.l2_norm_derivative,
        forgets="length", law=LENGTH, source="Nguyen and Salazar 2019, arXiv 1910.05895",
    ),
    "l2norm": Norm(
        "L2 norm", functions.l2_norm, (), derivatives.l2_norm_derivative, forgets="length",
        law=LENGTH, source="Loshchilov et al. 2024, arXiv 2410.01131",
    ),
    # Forgets the length beyond its threshold, and nothing before: nothing is claimed.
    "l2clip": Norm(
        "L2Clip at sqrt(d)", functions.l2_clip, (), derivatives.l2_clip_derivative,
        source="transformers 5.24, inkling2 (there with a threshold of the model's own)",
    ),
    "dyt": Norm(
        "DyT", functions.dynamic_tanh, (_GAIN, _BIAS, _ALPHA),
        derivatives.dynamic_tanh_derivative, source="Zhu et al. 2025, arXiv 2503.10622",
    ),
    "derf": Norm(
        "Derf", functions.dynamic_erf, (_GAIN, _BIAS, _ALPHA, Parameter("shift", 0.0, "scalar")),
        derivatives.dynamic_erf_derivative, source="arXiv 2512.10938",
    ),
    # The gain reads the length of x: with beta other than zero nothing is forgotten.
    "seednorm": Norm(
        "SeeDNorm", functions.seed_norm,
        (_GAIN, Parameter("alpha"), Parameter("beta", 0.0)),
        derivatives.seed_norm_derivative, source="arXiv 2510.22777, from others' code",
    ),
    "gatednorm": Norm(
        f"GatedNorm, rank {GATE_RANK}", functions.gated_norm,
        (
            _GAIN, Parameter("down", 0.0, ("feature", GATE_RANK), spread=0.02),
            Parameter("up", 0.0, (GATE_RANK, "feature"), spread=0.02),
        ),
        derivatives.gated_norm_derivative, forgets="length",
        source="arXiv 2601.22966, as in the Marin project's code",
    ),
    "centring": Norm(
        "centring alone", functions.less_mean, (), derivatives.less_mean_derivative,
        forgets="mean", law=UNCHANGED, source="the mean of LayerNorm without its scale",
    ),
    "affine": Norm(
        "gain and shift without norm", functions.affine, (_GAIN, Parameter("shift", 0.0)),
        derivatives.affine_derivative, law=UNCHANGED,
        source="transformers 5.24, zaya, residual scaling",
    ),
    "gradient_preserving": Norm(
        "gradient-preserving scaling",
        functions.gradient_preserving, (Parameter("alpha", 0.0, "scalar"),),
        derivatives.gradient_preserving_derivative,
        source="Chen et al. 2025 (GPAS), arXiv 2506.22049",
        stopped=Stopped(
            partial(functions.gradient_preserving, stops=False), derivatives.all_passed_derivative
        ),
    ),
    "identity": Norm(
        "no norm", functions.identity, (), derivatives.identity_derivative, law=UNCHANGED,
        action="removing normalization",
    ),
}  # fmt: skip

NORMS: Registry[Norm] = Registry(
    "norm", {name: dataclasses.replace(row, name=name) for name, row in _ROWS.items()}
)


def register_norm(name: str, row: Norm, *, replace: bool = False) -> Norm:
    """Add a norm to the table under a name, and return it with that name.

    From then on ``--config.model.norm=NAME`` trains it in any placement.

    Args:
      name: a small letter, then small letters, digits or underscores.
      row: the norm.
      replace: whether a name that is taken may get another row.

    Raises:
      UserError: a name that is none or taken; a row that is no norm.

    >>> row = Norm("Softsign", lambda x, gain: gain * x / (1 + abs(x)), (Parameter("gain"),))
    >>> register_norm("softsign", row).record()["values"][7]
    0.75
    >>> del NORMS["softsign"]
    """
    if not isinstance(row, Norm):
        raise UserError(f"norm {name!r}: must be a normjax.Norm, not {row!r}")
    check_choice(f"norm {row.title!r}, forgets", row.forgets, FORGETS)
    return NORMS.register(name, dataclasses.replace(row, name=name), replace=replace)


# --- Flax modules -------------------------------------------------------------------------------


class NormLayer(nn.Module):
    """Any row of the table as a Flax Linen module on (..., d).

    Attributes:
      norm: the row.
      eps: inside the root, in units of the mean square.
      param_dtype: dtype of the gain and bias. The output has the dtype of the input.

    >>> import jax, jax.numpy as jnp
    >>> layer = NormLayer(NORMS["rmsnorm_offset"])
    >>> layer.init(jax.random.key(0), jnp.ones((2, 3)))["params"]["gain"]
    Array([0., 0., 0.], dtype=float32)
    """

    norm: Norm = NORMS["rmsnorm"]
    eps: float = 1e-6
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        parameters = {
            p.name: self.param(
                p.name,
                lambda key, p=p: jnp.asarray(p.started(x.shape[-1], key), self.param_dtype),
            )
            for p in self.norm.parameters
        }
        return self.norm(x, parameters, self.eps)


class RMSNorm(NormLayer):
    """RMSNorm with a learned gain as a Flax module; :func:`normjax.rms_norm` has the formula."""


class LayerNorm(NormLayer):
    """LayerNorm with learned gain and bias as a Flax module; see :func:`normjax.layer_norm`."""

    norm: Norm = NORMS["layernorm"]


class Identity(NormLayer):
    """The identity in the place of a norm: no parameters, y = x."""

    norm: Norm = NORMS["identity"]
