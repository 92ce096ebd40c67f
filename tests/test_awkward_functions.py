"""Functions of every awkward kind on every public route: right within the bound, or one clear line.

The truth is the same function written plainly, with its Jacobian by ``jax.jacfwd`` in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import normjax
from normjax.errors import UserError
from normjax.jacobians.verification import VerificationError

T, D = 3, 4
H = np.random.default_rng(5).normal(size=(T, D))
W = np.random.default_rng(6).normal(size=(D, D)) / D**0.5


def rms(x):
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def layer(x):
    return x + jnp.tanh(x @ W)


@jax.custom_vjp
def by_hand(x):
    return rms(x)


by_hand.defvjp(lambda x: jax.vjp(rms, x), lambda pull, w: pull(w))


@jax.custom_vjp
def clipped(x):
    return 2 * x


clipped.defvjp(lambda x: (2 * x, None), lambda _, w: (jnp.clip(2 * w, -1, 1),))


@jax.custom_jvp
def ruled(x):
    return jnp.sin(x)


ruled.defjvp(lambda p, t: (jnp.sin(p[0]), jnp.cos(p[0]) * t[0]))


@jax.custom_jvp
def narrowly_ruled(x):
    return jnp.sin(x)


narrowly_ruled.defjvp(
    lambda p, t: (jnp.sin(p[0]), (jnp.cos(p[0]) * t[0]).astype(jnp.float32).astype(p[0].dtype))
)


def upcast(x):
    h = x.astype(jnp.float32)
    return rms(h).astype(x.dtype)


def newton(x):
    """The square root of 1 + x^2, to a tolerance."""
    target = 1 + x * x

    def turn(y):
        return 0.5 * (y + target / y)

    far = lambda y: jnp.max(jnp.abs(y * y - target)) > 1e-13  # noqa: E731
    return turn(turn(jax.lax.while_loop(far, turn, target)))


def scanned(x):
    return jax.lax.scan(lambda c, _: (layer(c), None), x, None, length=3)[0]


def scanned_narrow(x):
    """The narrow float is in what one turn hands to the next."""
    turn = lambda c, _: ((c[1], layer(c[0]).astype(jnp.float32).astype(c[0].dtype)), None)  # noqa: E731
    return jax.lax.scan(turn, (x, x), None, length=2)[0][0]


def library_attention(x):
    q = x.reshape(1, T, 2, D // 2)
    return jax.nn.dot_product_attention(q, q, q, is_causal=True).reshape(T, D)


@dataclasses.dataclass(frozen=True)
class CallableTree:
    """As an Equinox module is: callable, with arrays in it, and no hash."""

    weight: Any

    def __call__(self, x):
        return x + jnp.tanh(x @ self.weight)


class Transformed(NamedTuple):
    """As a Haiku transform is."""

    init: Any
    apply: Any


class Linen(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(D, use_bias=False, dtype=self.dtype)(x)


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        return nn.Dropout(0.5, deterministic=deterministic)(2 * x)


class Normalized(nn.Module):
    train: bool = False

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=not self.train, epsilon=1.0)(x)


LINEN = {"params": {"Dense_0": {"kernel": jnp.asarray(W, jnp.float32)}}}
BATCH = {
    "params": {"BatchNorm_0": {"scale": jnp.ones(D), "bias": jnp.zeros(D)}},
    "batch_stats": {"BatchNorm_0": {"mean": jnp.zeros(D), "var": jnp.ones(D)}},
}


def nnx_linear():
    module = nnx.Linear(D, D, use_bias=False, rngs=nnx.Rngs(0))
    module.kernel[...] = jnp.asarray(W, jnp.float32)
    return module


class Hidden:
    """Draws from NumPy at every call: what is traced once is one function."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __call__(self, x):
        return x * (3.0 + 0.0 * self.rng.random())


W32 = np.asarray(W, np.float32).astype(np.float64)
FINE: dict[str, tuple[Callable, Callable, Any]] = {
    # name: (function, the same plainly, point)
    "plain": (layer, layer, H),
    "a norm": (rms, rms, H),
    "jit": (jax.jit(layer), layer, H),
    "jit with a static argument": (
        partial(jax.jit(lambda n, x: n * layer(x), static_argnums=0), 2), lambda x: 2 * layer(x), H,
    ),
    "remat": (jax.checkpoint(layer), layer, H),
    "vmap": (jax.vmap(layer), layer, H),
    "vmap of vmap": (jax.vmap(jax.vmap(jnp.sin)), jnp.sin, H),
    "custom_vjp": (by_hand, rms, H),
    "custom_vjp in jit in scan": (
        lambda x: jax.lax.scan(lambda c, _: (jax.jit(by_hand)(c), None), x, None, length=2)[0],
        lambda x: rms(rms(x)), H,
    ),
    "custom_jvp": (ruled, jnp.sin, H),
    "relu": (jax.nn.relu, lambda x: jnp.where(x > 0, x, 0.0), H),
    "gelu": (jax.nn.gelu, lambda x: jax.nn.gelu(x), H),
    "a loop to a tolerance": (newton, lambda x: jnp.sqrt(1 + x * x), H),
    "fori_loop": (lambda x: jax.lax.fori_loop(0, 3, lambda i, c: layer(c), x),
                  lambda x: layer(layer(layer(x))), H),
    "scan": (scanned, lambda x: layer(layer(layer(x))), H),
    "associative_scan": (lambda x: jax.lax.associative_scan(jnp.add, x),
                         lambda x: jnp.cumsum(x, axis=0), H),
    "cond": (lambda x: jax.lax.cond(x[0, 0] > 9, jnp.sin, jnp.cos, x), jnp.cos, H),
    "switch": (lambda x: jax.lax.switch(1, [jnp.sin, jnp.cos], x), jnp.cos, H),
    "pmap over one device": (lambda x: jax.pmap(layer)(x[None])[0], layer, H),
    "a draw with a key": (lambda x: x * jax.random.normal(jax.random.key(1), (T, D), jnp.float64),
                          lambda x: x * jax.random.normal(jax.random.key(1), (T, D), jnp.float64),
                          H),
    "a draw in float32, constant": (
        lambda x: x * jax.random.normal(jax.random.key(1), (T, D), jnp.float32),
        lambda x: x * jax.random.normal(jax.random.key(1), (T, D), jnp.float32), H,
    ),
    "a mask in float32": (lambda x: (x > 0).astype(jnp.float32) * x, jax.nn.relu, H),
    "a one-hot in bfloat16": (
        lambda x: x * jax.nn.one_hot(jnp.argmax(x, -1), D, dtype=jnp.bfloat16).astype(x.dtype),
        lambda x: x * (x == x.max(-1, keepdims=True)), H,
    ),
    "parameters in float32": (lambda x: x @ jnp.asarray(W, jnp.float32), lambda x: x @ W32, H),
    "a Fourier transform": (lambda x: jnp.fft.fft(x, axis=0).real,
                            lambda x: jnp.cos(2 * jnp.pi * np.outer(range(T), range(T)) / T) @ x,
                            H),
    "complex inside": (lambda x: jnp.abs(jnp.exp(1j * x) * (2 + x)), lambda x: jnp.abs(2 + x), H),
    "linear algebra": (lambda x: jnp.linalg.solve(jnp.eye(T) * 3 + x @ x.T, x),
                       lambda x: jnp.linalg.inv(jnp.eye(T) * 3 + x @ x.T) @ x, H),
    "sort": (lambda x: jnp.sort(x, axis=0), lambda x: jnp.take_along_axis(
        x, jnp.argsort(x, axis=0), axis=0), H),
    "stop_gradient": (lambda x: x * jax.lax.stop_gradient(x), lambda x: x * H, H),
    "tiny": (lambda x: 1e-200 * layer(x), lambda x: 1e-200 * layer(x), H),
    "tinier": (lambda x: 1e-290 * layer(x), lambda x: 1e-290 * layer(x), H),
    "huge": (lambda x: 1e200 * layer(x), lambda x: 1e200 * layer(x), H),
    "a huge point": (lambda x: rms(1e-100 * x), lambda x: rms(1e-100 * x), 1e100 * H),
    "zero": (lambda x: 0.0 * x, lambda x: 0.0 * x, H),
    "constant": (lambda x: jnp.ones((T, D)) + 0 * x, lambda x: 0.0 * x, H),
    "identity": (lambda x: x, lambda x: x, H),
    "a point in float32": (layer, layer, H.astype(np.float32)),
    "a point of integers": (layer, layer, np.arange(1, T * D + 1).reshape(T, D)),
    "a point as a list": (layer, layer, H.tolist()),
    "a callable tree": (CallableTree(jnp.asarray(W, jnp.float32)),
                        lambda x: x + jnp.tanh(x @ W32), H),
    "NNX": (nnx_linear(), lambda x: x @ W32, H),
    "Linen": (normjax.as_function(Linen(), LINEN), lambda x: x + x @ W32, H),
    "dropout switched off": (normjax.as_function(Dropped(), {}), lambda x: 2 * x, H),
    "dropout with a key": (
        normjax.as_function(Dropped(), {}, deterministic=False,
                            rngs={"dropout": jax.random.key(3)}),
        lambda x: Dropped().apply({}, x, False, rngs={"dropout": jax.random.key(3)}), H,
    ),
    "batch statistics, frozen": (normjax.as_function(Normalized(), BATCH),
                                 lambda x: x / 2**0.5, H),
    "a Haiku transform": (
        normjax.as_function(Transformed(None, lambda params, rng, x: x @ params["w"]),
                            {"w": jnp.asarray(W, jnp.float32)}), lambda x: x @ W32, H,
    ),
    "a hidden generator": (Hidden(), lambda x: 3 * x, H),
    "a debugging print": (lambda x: (jax.debug.print("{}", x[0, 0]), layer(x))[1], layer, H),
    "a partial": (partial(lambda a, x: a * x, 2.0), lambda x: 2 * x, H),
}  # fmt: skip
REFUSED: dict[str, tuple[Any, str, Any]] = {
    "narrow inside": (upcast, r"upcast: computes in float32 \(test_awkward_functions.py", H),
    "narrow in a loop": (scanned_narrow, "computes in float32", H),
    "narrow in a branch": (
        lambda x: jax.lax.cond(x[0, 0] > 9, lambda y: y, upcast, x), "computes in float32", H,
    ),
    "narrow behind stop_gradient": (
        lambda x: x * jax.lax.stop_gradient(upcast(x)), "computes in float32", H,
    ),
    "a narrow rule": (narrowly_ruled, "computes in float32", H),
    "narrow result": (lambda x: layer(x).astype(jnp.bfloat16), "computes in bfloat16", H),
    "less precision": (lambda x: jax.lax.reduce_precision(x, 8, 7), "7 bits of mantissa", H),
    "complex64 inside": (
        lambda x: jnp.fft.fft(x.astype(jnp.complex64)).real.astype(x.dtype), "float32", H,
    ),
    "the library's attention": (library_attention, "computes in float32", H),
    "a narrow module": (
        normjax.as_function(Linen(jnp.bfloat16), LINEN), "Linen: returns|computes in bfloat16", H,
    ),
    "batch statistics, live": (
        normjax.as_function(Normalized(train=True), BATCH, mutable=["batch_stats"]),
        "returns tuple", H,
    ),
    "a backward pass that clips": (clipped, "not linear in the cotangent", H),
    "a callback": (
        lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        "callback", H,
    ),
    "NumPy inside": (lambda x: np.tanh(x), "cannot be traced by JAX", H),
    "a Python condition": (lambda x: x if x[0, 0] > 0 else -x, "cannot be traced by JAX", H),
    "two results": (lambda x: (x, x), "not 2 arrays", H),
    "a result in a tuple": (lambda x: (x,), "not a tuple of one", H),
    "a boolean result": (lambda x: x > 0, "not bool", H),
    "a complex result": (lambda x: x + 1j, "not complex128", H),
    "an empty result": (lambda x: x[:, :0], "at least one entry", H),
    "two arguments": (lambda x, y: x, "must take one array", H),
    "no function": (3.0, "must be a function", H),
    "a complex point": (layer, "must be real", H * 1j),
    "a point of text": (layer, "must be an array of numbers", "text"),
    "a dict as point": (layer, "must be an array of numbers", {"x": H}),
    "an empty point": (layer, "at least one entry|must be", np.ones((0, D))),
    "a NaN in the point": (layer, "must be finite", H * np.nan),
    "NaN as result": (lambda x: jnp.log(-x * x), "returns NaN or infinity|not finite|differs", H),
}  # fmt: skip


def truth(plain, x):
    with jax.enable_x64(True):
        at = jnp.asarray(np.asarray(x, np.float64))
        return np.asarray(jax.jacfwd(plain)(at)).reshape(at.size, at.size)


def wide(x):
    return np.asarray(x, np.float64)


def check_spectrum(f, x, J):
    found = normjax.spectrum(f, x)
    expected = np.linalg.svd(J, compute_uv=False)
    assert np.all(np.abs(found.values - expected) <= found.bounds)
    assert found.bounds.max() <= 1e-11 * max(expected[0], 1e-300)


def check_top(f, x, J, narrow=False):
    found = normjax.top_singular_values(f, wide(x), 2)
    expected = np.linalg.svd(J, compute_uv=False)[:2]
    assert np.all(np.abs(found.values - expected) <= found.bounds + 1e-15 * expected[0])
    assert found.resolved and found.bounds.max() <= (1.0 if narrow else 1e-8) * expected[0]


def check_spectrum_of_two(f, x, J):
    found = normjax.spectrum(f, x, k=2)
    expected = np.linalg.svd(J, compute_uv=False)[:2]
    assert found.resolved and found.converged
    assert np.all(np.abs(found.values - expected) <= found.bounds + 1e-15 * expected[0])


def check_frobenius(f, x, J):
    found = normjax.frobenius_norm(f, wide(x), probes=64)
    scale = np.abs(J).max() or 1.0
    expected = scale * np.linalg.norm(J / scale)
    assert abs(found.value - expected) <= 6 * found.standard_error + 1e-12 * expected


def check_density(f, x, J):
    found = normjax.spectral_density(f, wide(x), steps=T * D, probes=30)
    scale = np.abs(J).max() or 1.0
    mean = found.mean(lambda s: (s / scale) ** 2)
    expected = np.sum((J / scale) ** 2) / J.shape[0]
    assert abs(mean.value - expected) <= 6 * mean.standard_error + 1e-12


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12 * np.abs(expected).max())


def check_tokens(f, x, J):
    blocks = J.reshape(T, D, T, D)
    close(normjax.token_jacobians(f, x), blocks[range(T), :, range(T)])


def check_pair(f, x, J):
    close(normjax.pair_jacobian(f, x, 2, 1), J.reshape(T, D, T, D)[2, :, 1])


def check_sequence(f, x, J):
    close(normjax.sequence_jacobian(f, x), J.reshape(T, D, T, D))


def check_verify(f, x, J):
    closed = lambda y: J.reshape(T, D, T, D)  # noqa: E731
    normjax.verify(f, closed, at=x, scales=(1.0,)).check()
    wrong = J.copy()
    wrong[0, 0] += 1e-6 * (np.abs(J).max() or 1.0)
    assert not normjax.verify(f, lambda y: wrong.reshape(T, D, T, D), at=x, scales=(1.0,)).passed


def check_radial(f, x, J):
    if not J.any():  # a result of zeros has no direction
        return
    with jax.enable_x64(True):
        after = np.asarray(f(jnp.asarray(wide(x))))
    if np.any(np.all(after == 0, axis=-1)):
        return
    found = normjax.radial_report(f, x)
    expected = normjax.radial_gains(J.reshape(T, D, T, D), wide(x), after)
    for name in ("rr", "rt", "tr"):
        scale = np.abs(J).max()
        assert abs(getattr(found, name) - getattr(expected, name)) <= 1e-10 * scale, name


ROUTES = {
    "spectrum": check_spectrum, "spectrum of two": check_spectrum_of_two, "top": check_top,
    "frobenius": check_frobenius, "density": check_density, "tokens": check_tokens,
    "pair": check_pair, "sequence": check_sequence, "verify": check_verify,
    "radial": check_radial,
}  # fmt: skip
CALLS = {
    "spectrum": normjax.spectrum, "spectrum of two": partial(normjax.spectrum, k=2),
    "frobenius": normjax.frobenius_norm, "density": normjax.spectral_density,
    "tokens": normjax.token_jacobians, "pair": lambda f, x: normjax.pair_jacobian(f, x, 0, 0),
    "sequence": normjax.sequence_jacobian, "radial": normjax.radial_report,
    "verify": lambda f, x: normjax.verify(
        f, lambda y: np.zeros((T, D, T, D)), at=x, scales=(1.0,)
    ).check(),
}  # fmt: skip


def test_there_are_enough_of_them():
    assert len(FINE) + len(REFUSED) >= 70


QUICK = ("spectrum", "tokens")
"""In ``make test``; the others, in ``make test-all``, take the derivative from the same place."""


def check(name, routes):
    function, plain, x = FINE[name]
    J = truth(plain, x)
    for route in routes:
        try:
            ROUTES[route](function, x, J)
        except UserError as error:
            raise AssertionError(f"{route}: {error}") from error


@pytest.mark.parametrize("name", FINE)
def test_right_on_some_routes(name):
    check(name, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", FINE)
def test_right_on_every_other_route(name):
    check(name, [route for route in ROUTES if route not in QUICK])


@pytest.mark.parametrize("name", ["plain", "custom_vjp", "a loop to a tolerance", "huge", "tiny"])
def test_right_on_every_route(name):
    check(name, [route for route in ROUTES if route not in QUICK])


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line_on_every_route(name):
    function, words, x = REFUSED[name]
    for route, call in CALLS.items():
        accepted = (UserError, VerificationError) if route == "verify" else UserError
        with pytest.raises(accepted, match=words) as caught:
            call(function, x)
        assert "\n" not in str(caught.value), route


def test_bounds_allow_for_narrow_floats():
    """At a point of the narrow type, or of any, the largest values come with what it costs."""
    for function, at in ((upcast, 30 * H), (lambda x: layer(x).astype(jnp.bfloat16), H)):
        plain = rms if function is upcast else layer
        check_top(function, at, truth(plain, at), narrow=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: normjax.spectrum(layer, H, k=2.0), "k=2.0: must be a whole number; pass k=2"),
        (lambda: normjax.spectrum(layer, H, k="two"), "k='two': must be a whole number"),
        (lambda: normjax.verify(rms, None, at=[]), "at of shape"),
        (lambda: normjax.verify("rmsnorm_plain", None, at=[]), "at of shape"),
        (lambda: normjax.radial_report(layer, H, probes=2.5), "probes=2.5: must be a whole"),
        (lambda: normjax.pair_jacobian(layer, H, 0.5, 0), "i=0.5: must be a whole number"),
    ],
)
def test_arguments_are_named(call, words):
    with pytest.raises(UserError, match=words):
        call()
