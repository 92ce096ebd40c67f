"""Singular values at initialization, J1 to J18, of decoders and of products of random matrices."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from experiments.claims.claim import Tolerance, exact, rounding
from experiments.published.result import Result, number
from experiments.published.setting import Board, decoder, resolution, seeds, shown, weights
from normjax.jacobians.blocks import Parts
from normjax.spectra.depth_products import DepthProduct, depth_log_singular_values
from normjax.theory.matrix_products import ProductLaw
from normjax.theory.random_matrices import GaussianBlock

XIONG = "Xiong et al. 2020, arXiv 2002.04745"
WIDE = {"dtype": "float64", "param_dtype": "float64", "norm": "rmsnorm_plain", "norm_eps": 0.0}


def null_directions(
    board: Board, placements: tuple[Any, ...] = ("post", "deepnorm", "keel")
) -> list[Result]:
    """J1 to J3: singular values of a whole sequence's Jacobian that are zero."""
    d, T, L, rows = 32, 8, 4, []
    names = ("post-norm", "DeepNorm", "KEEL")
    sources = (XIONG, "Wang et al. 2022, arXiv 2203.00555", "Chen and Wei 2026, arXiv 2601.19895")
    for k, placement in enumerate(placements):
        model = decoder(placement, d, L, T, **WIDE)
        g = seeds(board, 70 + k)[0]
        parts = Parts(model, weights(model, g))
        h = g.standard_normal((T, d))
        jacobian = parts.stack(1, L).sequence_jacobian(h).reshape(T * d, T * d)
        values = np.linalg.svd(jacobian, compute_uv=False)
        gone = int(np.sum(values < 1e-12 * values[0]))
        rows.append(Result(
            f"J{k + 1}", f"In {names[k]} every token has one direction along which nothing leaves a"
            f" block, that of the stream: T of T d singular values are zero.",
            sources[k] + "; the radial null direction of the norm", "derived",
            f"{L} blocks, d = {d}, T = {T}, RMSNorm without eps, closed-form Jacobian of the whole"
            f" sequence; values below 1e-12 of the largest; the next is"
            f" {shown(values[T * d - gone - 1] / values[0])} of it",
            number(T), exact("a count"), (gone,),
        ))  # fmt: skip
    return rows


def token_values(board: Board, purpose: int, placement: Any) -> list[np.ndarray]:
    """Return the logarithms of the singular values of stacks of MLPs, a token each, by seed."""
    d, L = board.width // 2, board.depth // 2
    model, found = decoder(placement, d, L, 8, attention="none", **WIDE), []
    for g in seeds(board, purpose, 6):
        parts, h = Parts(model, weights(model, g)), g.standard_normal((1, d))
        factors = []
        for block in range(1, L + 1):
            part = parts.block(block)
            factors.append(part.token_jacobians(h)[0])
            h = np.asarray(part(h))
        found.append(depth_log_singular_values(factors))
    return found


def isometry(board: Board, pre: str = "pre", post: str = "post") -> list[Result]:
    """J4 to J7: mean square and geometric mean of the singular values."""
    d, L = board.width // 2, board.depth // 2
    found = {name: token_values(board, 73 + k, name) for k, name in enumerate((pre, post))}
    sizes = {
        name: tuple(float(np.sqrt(np.mean(np.exp(2 * each)))) for each in own)
        for name, own in found.items()
    }
    geometric = {
        name: tuple(float(np.mean(each[each > each[0] - 60])) / math.log(10) for each in own)
        for name, own in found.items()
    }
    setup = (
        f"{L} blocks of a ReLU MLP d → d → d without attention, d = {d}, weights N(0, 1/d), RMSNorm"
        " without eps; Jacobian of one token"
    )
    radial = f"each of {L} norms takes one direction of d out, {L}/d of the mean square"
    fall = -L / 2 * math.log10(1.5)
    return [
        Result(
            "J4", "Pre-norm: the root mean square of the singular values is that of the stream,"
            " sqrt(1 + L/2).",
            XIONG, "derived", setup, number(math.sqrt(1 + L / 2)),
            Tolerance(math.sqrt(1 + L / 2) * L / (2 * d), radial), sizes[pre],
        ),
        Result(
            "J5", "Pre-norm: their geometric mean is 1 (an identity plus a random matrix of"
            " spectral radius below 1 has mean log |λ| of 0).",
            XIONG + "; circular law", "derived", f"{setup}; decimal logarithm",
            number(0.0), Tolerance(0.1, f"{radial}, and blocks of finite d"), geometric[pre],
        ),
        Result(
            "J6", "Post-norm: the root mean square stays 1, whatever the depth.",
            XIONG, "derived", setup, number(1.0), Tolerance(L / (2 * d), radial), sizes[post],
            f"The largest value of a seed was {shown(max(sizes[post]))}, the median"
            f" {shown(float(np.median(sizes[post])))}: a mean over seeds with a long tail.",
        ),
        Result(
            "J7", "Post-norm: the geometric mean falls exponentially, by (2/3)^(1/2) per"
            " sub-layer: vanishing that the mean square does not show.",
            XIONG, "derived",
            f"{setup}; decimal logarithm, without the one value that is zero",
            number(fall), Tolerance(0.1, f"{radial}, and blocks of finite d"), geometric[post],
        ),
    ]  # fmt: skip


def identity_at_start(
    board: Board, placements: tuple[str, ...] = ("rezero", "skipinit", "branch_output")
) -> list[Result]:
    """J8 to J10: what starts as the identity."""
    d, T, L, rows = 32, 8, 4, []
    titles = (
        ("ReZero", "Bachlechner et al. 2020, arXiv 2003.04887", "derived"),
        ("SkipInit", "De and Smith 2020, arXiv 2002.10444", "derived"),
        ("Swin-v2’s norm on the branch’s output with gain 0", "Liu et al. 2021, arXiv 2111.09883",
         "code"),
    )  # fmt: skip
    for k, (placement, (title, source, basis)) in enumerate(zip(placements, titles, strict=True)):
        model = decoder(placement, d, L, T, **WIDE | {"norm": "rmsnorm", "norm_eps": 1e-6})
        g, worst = seeds(board, 76 + k)[0], 0.0
        params = weights(model, g)
        if k == 2:
            params = jax.tree_util.tree_map_with_path(
                lambda path, x: 0 * x if path[-1].key == "gain" else x, params
            )
        jacobian = Parts(model, params).stack(1, L).sequence_jacobian(g.standard_normal((T, d)))
        worst = float(np.max(np.abs(jacobian.reshape(T * d, T * d) - np.eye(T * d))))
        rows.append(Result(
            f"J{8 + k}", f"{title}: the Jacobian is the identity at initialization.",
            source, basis, f"{L} blocks, d = {d}, T = {T}; largest entry of J − I",
            number(0.0), exact("zero times a branch"), (worst,),
        ))  # fmt: skip
    return rows


@partial(jax.jit, static_argnums=(1, 2, 3))
def largest(key: Any, d: int, L: int, count: int) -> Any:
    """Return the largest squared singular value of ``count`` products of L Gaussian matrices."""

    def one(key: Any) -> Any:
        product = jnp.eye(d)
        for each in jax.random.split(key, L):
            product = jax.random.normal(each, (d, d)) @ product / d**0.5
        square = product @ product.T
        # Raised to the power 2^14 it is the projection on its largest eigenvector.
        power = square
        for _ in range(14):
            power = power / jnp.trace(power)
            power = power @ power
        return jnp.trace(square @ power) / jnp.trace(power)

    return jax.vmap(one)(jax.random.split(key, count))


def gaussian_products(board: Board) -> list[Result]:
    """J11 to J13: the largest singular value of a product of Gaussian matrices."""
    sizes, rows = [board.matrix // 2**k for k in range(3, -1, -1)], []
    x = np.array(sizes, np.float64) ** (-2 / 3)
    for k, L in enumerate((2, 3, 10)):
        expected = (L + 1) ** (L + 1) / L**L
        theory = ProductLaw([GaussianBlock(1.0, a=0.0)] * L).edges()[1] ** 2
        found = []
        for g in seeds(board, 80 + k, 2):
            key = jax.random.key(int(g.integers(2**31)))
            found.append(
                [float(jnp.mean(largest(key, d, L, min(8, 2 * board.matrix // d)))) for d in sizes]
            )
        intercepts = [float(np.polyfit(x, tops, 1)[1]) for tops in found]
        raw = np.mean(found, axis=0)
        rows.append(Result(
            f"J{11 + k}", f"The largest squared singular value of a product of {L} Gaussian"
            f" matrices goes to (L + 1)^(L + 1) / L^L = {expected:.2f}.",
            "Pennington et al. 2017, arXiv 1711.04735", "recalled",
            f"d = {', '.join(map(str, sizes))}, a line in d^(−2/3) through the means of each seed;"
            f" the program’s ProductLaw gives {theory:.4f}",
            number(expected), resolution(expected, 0.05), tuple(intercepts),
            "At the sizes themselves the mean is "
            + ", ".join(f"{v:.2f} (d = {d})" for v, d in zip(raw, sizes, strict=True)) + ".",
        ))  # fmt: skip
    return rows


def variances(board: Board) -> list[Result]:
    """J14 to J17: the variance of squared singular values over a mean of 1."""
    d, L, rows = board.matrix, 5, []
    kinds = (
        ("J14", "Gaussian weights without a nonlinearity", False, False, L),
        ("J15", "Gaussian weights and ReLU", False, True, 2 * L),
        ("J16", "orthogonal weights and ReLU", True, True, L),
        ("J17", "orthogonal weights without a nonlinearity", True, False, 0),
    )
    for k, (id, words, orthogonal, relu, expected) in enumerate(kinds):
        values = []
        for g in seeds(board, 84 + k):
            product = np.eye(d)
            for _ in range(L):
                w = g.standard_normal((d, d)) / d**0.5
                if orthogonal:
                    w, r = np.linalg.qr(w)
                    w = w * np.sign(np.diag(r))
                product = w @ product
                if relu:
                    product = (g.random(d) < 0.5)[:, None] * product * 2**0.5
            square = product @ product.T
            mean = np.trace(square) / d
            values.append(np.sum(square * square) / d / mean**2 - 1)
        # Of b = tr(A^2) / d one Gaussian factor makes a^2 + (1 + 1/d) b, and a fluctuates.
        size = L * (L + 1) / d * (2 if relu else 1)
        if expected == 0:
            tolerance = rounding(20 * d, 1.0, "five orthogonal factors and their squares")
        else:
            tolerance = Tolerance(
                max(0.03 * expected, 2 * size),
                f"the larger of 3 % and terms of the order of L²/d, {2 * size:.3f}",
            )
        rows.append(Result(
            id, f"The squared singular values of {L} layers with {words} have the variance"
            f" {expected} for a mean of 1.",
            "Pennington et al. 2018, arXiv 1802.09979", "recalled",
            f"L = {L}, d = {d}, NumPy; each ReLU is open with probability 1/2",
            number(expected), tolerance, tuple(values),
        ))  # fmt: skip
    return rows


def newman(board: Board) -> list[Result]:
    """J18, J19: Lyapunov exponents of Gaussian matrices of a small size."""
    d = 4
    found = []
    for g in seeds(board, 90, 4):
        product = DepthProduct(d)
        for w in g.standard_normal((board.steps, d, d)) / d**0.5:
            product.apply(w)
        found.append(product.log_singular_values() / board.steps)
    rows, said = [], "d = 4, {} factors a seed, the program’s product over depth"
    for k, (id, which) in {1: ("J18", "largest"), d: ("J19", "smallest")}.items():
        value = 0.5 * (math.log(2 / d) + float(special.digamma((d - k + 1) / 2)))
        rows.append(Result(
            id, f"The {which} Lyapunov exponent of products of 4 x 4 Gaussian matrices is"
            f" ½ (ln(2/d) + ψ((d − k + 1)/2)) = {value:.4f} at k = {k}.",
            "Newman 1986, Commun. Math. Phys. 103", "recalled", said.format(board.steps),
            number(value),
            Tolerance(40 / board.steps, "what a product of n factors owes to its ends, a few"
                      f" e-folds over n: 40/n would be ten of them at d = {d}"),
            tuple(float(each[k - 1]) for each in found),
        ))  # fmt: skip
    return rows


ROWS = (
    null_directions, isometry, identity_at_start, gaussian_products, variances, newman,
)  # fmt: skip
