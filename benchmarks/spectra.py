"""What the spectra cost and how right they are.

Commands:
  python -m benchmarks.spectra norms     # 2 min: secular equation beside a dense SVD, d = 4096
  python -m benchmarks.spectra top       # 15 min: top ten beside the full spectrum, T d = 8192
  python -m benchmarks.spectra large     # 1 min: the top value with its bound, T d = 262144
  python -m benchmarks.spectra tokens    # 1 min: per-token Jacobians beside one jacfwd per token
  python -m benchmarks.spectra depth     # 5 min: product of 64 post-norm Jacobians, many digits
  python -m benchmarks.spectra small     # 1 min: all four at small sizes

Ways that are compared are measured in turn, block by block, so that a machine whose speed drifts
slows them alike: read ratios of medians. On a machine that others use too the processor's time is
the steadier one; OMP_NUM_THREADS=1 keeps BLAS threads from waiting for each other there. ``depth``
takes its reference at d = 128 from python-flint if that is installed (it is no dependency), else at
d = 16 from mpmath.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np

from normjax.decoder import Decoder, DecoderConfig
from normjax.jacobians.blocks import Parts
from normjax.runs.machine import usable_cores
from normjax.spectra.dense import dense_jacobian, singular_values
from normjax.spectra.depth_products import depth_log_singular_values
from normjax.spectra.krylov import top_singular_values
from normjax.spectra.norm_spectra import layer_norm_singular_values, rms_norm_singular_values

Times = dict[str, list[tuple[float, float]]]


def alternate(ways: dict[str, tuple[Callable[[], Any], int]], blocks: int) -> Times:
    """Return (wall, processor) seconds of each call, each way called so often in every block."""
    times: Times = {name: [] for name in ways}
    for _ in range(blocks):
        for name, (call, repeats) in ways.items():
            for _ in range(repeats):
                wall, processor = time.perf_counter(), time.process_time()
                call()
                times[name].append(
                    (time.perf_counter() - wall, time.process_time() - processor),
                )
    return times


def table(times: Times, referee: str) -> None:
    """Print medians, spreads and ratios to the referee, by the wall clock and by the processors."""
    base = [statistics.median(column) for column in zip(*times[referee], strict=True)]
    print(f"  {'':<46}{'wall s':>9} {'(least to largest)':<20}{'ratio':>8}{'cpu s':>9}{'ratio':>8}")
    for name, values in times.items():
        wall, processor = zip(*values, strict=True)
        spread = f"({min(wall):.3g} to {max(wall):.3g})"
        medians = statistics.median(wall), statistics.median(processor)
        print(
            f"  {name:<46}{medians[0]:>9.3g} {spread:<20}{base[0] / medians[0]:>8.1f}"
            f"{medians[1]:>9.3g}{base[1] / medians[1]:>8.1f}"
        )


def norms(d: int = 4096, blocks: int = 3) -> None:
    """Secular equation beside a dense SVD of the given Jacobian; both against 50 digits."""
    rng = np.random.default_rng(0)
    h, gain, eps = rng.normal(size=d), np.exp(0.2 * rng.normal(size=d)), 1e-6
    s = np.sqrt(np.mean(h * h) + eps)
    jacobian = gain[:, None] / s * (np.eye(d) - np.outer(h, h) / (d * s * s))
    dense = np.linalg.svd(jacobian[:8, :8], compute_uv=False)  # load LAPACK
    values = rms_norm_singular_values(h, gain, eps)
    ways = {
        "numpy SVD of the given Jacobian, values only": (
            lambda: np.linalg.svd(jacobian, compute_uv=False),
            1,
        ),
        "rms_norm_singular_values": (lambda: rms_norm_singular_values(h, gain, eps), 5),
        "layer_norm_singular_values": (lambda: layer_norm_singular_values(h, gain, eps), 3),
    }
    print(f"norms, d = {d}, nonuniform gain, all singular values")
    table(alternate(ways, blocks), "numpy SVD of the given Jacobian, values only")
    dense = np.linalg.svd(jacobian, compute_uv=False)
    print(f"  largest difference over the largest value: {np.abs(dense - values).max():.1e}")
    errors = {"secular": 0.0, "secular, smallest": 0.0, "dense SVD, smallest": 0.0}
    for eps, size in ((1e-6, 24), (1e-12, 12), (1e-16, 24)):
        h, gain = rng.normal(size=size), np.exp(rng.normal(size=size))
        exact, plain = _fifty_digits(h, gain, eps)
        found = rms_norm_singular_values(h, gain, eps)
        relative = np.abs(found / exact - 1)
        errors["secular"] = max(errors["secular"], relative.max())
        errors["secular, smallest"] = max(errors["secular, smallest"], relative[-1])
        smallest = abs(np.linalg.svd(plain, compute_uv=False)[-1] / exact[-1] - 1)
        errors["dense SVD, smallest"] = max(errors["dense SVD, smallest"], smallest)
    print("  relative error against 50 digits, d = 12 and 24, eps 1e-6, 1e-12, 1e-16:")
    for name, error in errors.items():
        print(f"    {name:<22}{error:.1e}")


def _fifty_digits(h, gain, eps: float):
    """Return the exact singular values of RMSNorm's Jacobian, and the Jacobian in float64."""
    with mp.workdps(100):  # the eigenvalues of J J^T, to 50 digits of their roots
        x, g = mp.matrix(h.tolist()), mp.diag(gain.tolist())
        d = len(h)
        square = mp.fsum(v * v for v in x) / d + mp.mpf(eps)
        jacobian = g * (mp.eye(d) - x * x.T / (d * square)) / mp.sqrt(square)
        values = [mp.sqrt(v) for v in mp.eigsy(jacobian * jacobian.T, eigvals_only=True)]
        exact = np.array([float(v) for v in values])[::-1]
        return exact, np.array(jacobian.tolist(), dtype=np.float64)


def _block(tokens: int, width: int):
    """Return a pre-norm block of a fresh decoder as a function, and a hidden state, in float64."""
    config = DecoderConfig(depth=1, width=width, heads=max(1, width // 64))
    model = Decoder(config, 65, tokens)
    part = Parts(model, model.init(jax.random.key(0))).block(1)
    return part, np.random.default_rng(0).normal(size=(tokens, width))


def top(tokens: int = 64, width: int = 128, blocks: int = 1, k: int = 10) -> None:
    """Top ten of a whole-sequence block Jacobian beside its full dense spectrum."""
    function, h = _block(tokens, width)
    n = tokens * width
    kept: dict[str, Any] = {}

    def dense() -> None:
        kept["dense"] = singular_values(dense_jacobian(function, h, limit=n))

    def krylov(name: str, verify: bool) -> None:
        kept[name] = top_singular_values(function, h, k=k, verify=verify)

    ways = {
        f"top {k}, with the second chain": (lambda: krylov("with", True), 3),
        f"top {k}, without it": (lambda: krylov("without", False), 3),
        "dense Jacobian and all singular values": (dense, 1),
    }
    print(f"top {k}, pre-norm block, T = {tokens}, d = {width}, T d = {n}, float64")
    krylov("warm", True)
    table(alternate(ways, blocks), "dense Jacobian and all singular values")
    exact = kept["dense"][:k]
    for name in ("with", "without"):
        found = kept[name]
        error = np.abs(found.values - exact).max()
        print(
            f"  {name:<8} largest error {error:.1e}, largest bound {found.bounds.max():.1e},"
            f" resolved {found.resolved}, {found.products} products"
        )


def large(tokens: int = 512, width: int = 512) -> None:
    """The top value of a large block with its bound."""
    function, h = _block(tokens, width)
    start = time.perf_counter()
    found = top_singular_values(function, h, tol=1e-6)
    seconds = time.perf_counter() - start
    print(f"top value, T = {tokens}, d = {width}, T d = {tokens * width}, float64")
    print(
        f"  {found.values[0]:.10f}, bound {found.bounds[0]:.1e}, resolved {found.resolved},"
        f" {found.products} products, {seconds:.1f} s with compilation"
    )


def tokens(length: int = 256, width: int = 128, sample: int = 8) -> None:
    """Per-token Jacobians of all positions in closed form, beside one jacfwd per token."""
    part, h = _block(length, width)
    kept: dict[str, Any] = {}
    with jax.enable_x64(True):
        x = jnp.asarray(h)
        one = jax.jit(lambda x, i: jax.jacfwd(lambda row: part(x.at[i].set(row))[i])(x[i]))
        one(x, 0).block_until_ready()  # compiled once, the position is an argument
        part.token_jacobians(h)

        def autodiff() -> None:
            picked = np.linspace(0, length - 1, sample).astype(int)
            kept["jacfwd"] = picked, [np.asarray(one(x, int(i))) for i in picked]

        def closed() -> None:
            kept["closed"] = part.token_jacobians(h)

        ways = {
            f"jacfwd per token, {sample} of {length} tokens": (autodiff, 1),
            f"closed form, all {length} tokens": (closed, 2),
        }
        times = alternate(ways, 3)
    print(f"per-token Jacobians, pre-norm block, T = {length}, d = {width}, float64")
    table(times, next(iter(ways)))
    for name, part_of in (("wall", 0), ("processor", 1)):
        each = [statistics.median(t[part_of] for t in times[name]) for name in ways]
        print(f"  ratio for all tokens, {name}: {each[0] * length / sample / each[1]:.0f}")
    picked, referee = kept["jacfwd"]
    error = max(np.abs(kept["closed"][i] - r).max() for i, r in zip(picked, referee, strict=True))
    print(f"  largest difference over the largest entry: {error / np.abs(referee).max():.1e}")


def depth(d: int = 128, depth: int = 64) -> None:
    """Log singular values of a post-norm product against many digits."""
    try:
        import flint
    except ImportError:
        flint, d = None, min(d, 16)
    rng = np.random.default_rng(0)
    h, factors, eps = rng.normal(size=d), [], 1e-6
    for _ in range(depth):
        w1 = rng.normal(size=(4 * d, d)) / np.sqrt(d)
        w2 = rng.normal(size=(d, 4 * d)) / np.sqrt(4 * d)
        a = np.tanh(w1 @ h)
        y = h + w2 @ a
        s = np.sqrt(np.mean(y * y) + eps)
        branch = np.eye(d) + w2 @ ((1 - a * a)[:, None] * w1)
        factors.append((np.eye(d) - np.outer(y, y) / (d * s * s)) @ branch / s)
        h = y / s
    start = time.perf_counter()
    found = depth_log_singular_values(factors)
    seconds = time.perf_counter() - start
    exact = _many_digits(factors) if flint is None else _flint_digits(flint, factors)
    tens = exact[[0, -1]] / np.log(10)
    print(f"depth product, post-norm, L = {depth}, d = {d}, in {seconds:.2f} s")
    print(
        f"  singular values 1e{tens[0]:.1f} to 1e{tens[1]:.1f}; largest error of a logarithm"
        f" {np.abs(found - exact).max():.1e}"
    )


def _many_digits(factors):
    with mp.workdps(900):
        product = mp.matrix(factors[0].tolist())
        for factor in factors[1:]:
            product = mp.matrix(factor.tolist()) * product
        values = mp.eigsy(product * product.T, eigvals_only=True)
        return np.array([float(mp.log(v) / 2) for v in values])[::-1]


def _flint_digits(flint, factors):
    flint.ctx.prec = 3400
    d = len(factors[0])
    product = flint.arb_mat(d, d, [flint.arb(int(i == j)) for i in range(d) for j in range(d)])
    for factor in factors:
        product = flint.arb_mat(d, d, [flint.arb(float(v)) for v in factor.ravel()]) * product
    values = flint.acb_mat(product.transpose() * product).eig(algorithm="approx")
    return np.sort([float(flint.arb(v.real).mid().log()) / 2 for v in values])[::-1]


def small() -> None:
    """Run all five at sizes that take a minute."""
    norms(512)
    top(16, 32, k=5)
    large(64, 64)
    tokens(32, 32)
    depth(16)


def main() -> None:
    """Run the measurement that the command line names."""
    ways = {
        "norms": norms, "top": top, "large": large, "tokens": tokens, "depth": depth,
        "small": small,
    }  # fmt: skip
    if len(sys.argv) != 2 or sys.argv[1] not in ways:
        sys.exit(f"usage: python -m benchmarks.spectra {'|'.join(ways)}")
    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    print(f"{usable_cores()} cores, OMP_NUM_THREADS {threads}, numpy {np.__version__}")
    ways[sys.argv[1]]()


if __name__ == "__main__":
    main()
