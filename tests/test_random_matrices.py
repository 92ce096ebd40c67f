"""Theory of a I + sigma X, of products and of two-layer branches against draws and closed forms."""

import math

import numpy as np
import pytest

from normjax.errors import UserError
from normjax.theory.matrix_products import ProductLaw
from normjax.theory.random_matrices import GaussianBlock
from normjax.theory.two_layer import TwoLayerBlock, compress


def draw(rng, sigma, d, a=1.0):
    return a * np.eye(d) + sigma * rng.standard_normal((d, d)) / math.sqrt(d)


def singular_values(matrix):
    return np.linalg.svd(matrix, compute_uv=False)[::-1]


def distance(cdf, s):
    """Kolmogorov-Smirnov distance to a sorted sample."""
    n, f = len(s), cdf(s)
    return max(np.max(f - np.arange(n) / n), np.max(np.arange(1, n + 1) / n - f))


def integrals(law, powers, points=4001):
    """Integrals of s^p times the density, in an angle that takes the square-root edges away."""
    lower, upper = law.edges()
    angle = np.linspace(-np.pi / 2, np.pi / 2, points)
    s = (lower + upper) / 2 + (upper - lower) / 2 * np.sin(angle)
    f = law.density(s) * (upper - lower) / 2 * np.cos(angle)
    return [np.trapezoid(f * s**p, angle) for p in powers]


SIZES = [(0.01, 1.0), (0.3, 1.0), (0.999, 1.0), (1.0, 1.0), (1.5, 1.0), (20.0, 1.0), (0.7, 0.0),
         (1.0, 3.0), (3e-7, 1e-6), (2.0, 1e-9)]  # fmt: skip


@pytest.mark.parametrize(("sigma", "a"), SIZES)
def test_density_has_its_moments(sigma, a):
    law = GaussianBlock(sigma, a)
    # At sigma = a the density rises as s^(1/3), which the quadrature resolves to 1e-7 only.
    one, square, fourth = integrals(law, (0, 2, 4))
    assert one == pytest.approx(1, abs=1e-7)
    assert square == pytest.approx(a**2 + sigma**2, rel=1e-9)
    assert fourth == pytest.approx(a**4 + 4 * a**2 * sigma**2 + 2 * sigma**4, rel=1e-9)
    assert law.mean_square == pytest.approx(square) and law.mean_fourth == pytest.approx(fourth)


@pytest.mark.parametrize(("sigma", "a"), SIZES)
def test_distribution_is_the_integral_of_the_density(sigma, a):
    law = GaussianBlock(sigma, a)
    lower, upper = law.edges()
    s = lower + (upper - lower) * np.linspace(0.2, 0.9, 20001)
    step = np.diff(s)
    f = law.density(s)
    summed = law.cdf(s[0]) + np.concatenate([[0], np.cumsum((f[1:] + f[:-1]) / 2 * step)])
    np.testing.assert_allclose(law.cdf(s), summed, atol=1e-7)
    assert law.cdf(lower) == 0 and law.cdf(upper) == 1
    np.testing.assert_allclose(law.cdf(law.quantile([0.1, 0.5, 0.9])), [0.1, 0.5, 0.9], atol=1e-9)


def test_density_solves_the_published_cubic():
    sigma, x = 0.8, np.linspace(0.05, 4, 50)
    law = GaussianBlock(sigma)
    for value, density in zip(x, law.squared_density(x), strict=True):
        roots = np.roots([value, -value, sigma**2 - 1, 1])
        assert density == pytest.approx(max(roots.imag) / (math.pi * sigma**2), abs=1e-9)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.9, 1.7])
def test_edges_are_where_the_density_ends(sigma):
    law = GaussianBlock(sigma)
    lower, upper = law.edges()
    assert law.density(upper * (1 - 1e-9)) > 0 == law.density(upper * (1 + 1e-9))
    if sigma < 1:
        assert law.density(lower * (1 + 1e-9)) > 0 == law.density(lower * (1 - 1e-9))
    else:
        assert lower == 0 and law.density(1e-9) > 0


def test_known_edges():
    np.testing.assert_allclose(GaussianBlock(0.3).edges(), [0.6009, 1.4446], atol=5e-5)
    assert GaussianBlock(1.0).edges()[1] ** 2 == pytest.approx(27 / 4, rel=1e-14)
    assert GaussianBlock(1.0).edges()[0] == 0
    np.testing.assert_allclose(GaussianBlock(0.7, 0.0).edges(), [0, 1.4], rtol=1e-15)
    assert GaussianBlock(0.0).edges() == (1.0, 1.0)
    # sigma -> 0: the symmetric part of X alone counts, a semicircle of radius sqrt(2).
    lower, upper = GaussianBlock(1e-6).edges()
    assert (upper - 1) / 1e-6 == pytest.approx(math.sqrt(2), rel=1e-5)
    assert (1 - lower) / 1e-6 == pytest.approx(math.sqrt(2), rel=1e-5)
    # The lower edge near sigma = 1, where the formula as written is a difference of equal numbers:
    # (1 - sigma^2)^3 / x_upper with x_upper -> 27/4.
    assert GaussianBlock(1 - 1e-8).edges()[0] == pytest.approx(
        math.sqrt((2e-8) ** 3 / 6.75), rel=1e-6, abs=0
    )


def test_quarter_circle():
    sigma, s = 0.7, np.linspace(0, 1.4, 9)
    expected = np.sqrt(4 * sigma**2 - s**2) / (math.pi * sigma**2)
    np.testing.assert_allclose(GaussianBlock(sigma, 0.0).density(s), expected, atol=1e-13)
    np.testing.assert_allclose(GaussianBlock(sigma, 1e-7).density(s), expected, atol=1e-5)


@pytest.mark.parametrize(("sigma", "a"), [(0.3, 1.0), (1.0, 1.0), (2.0, 1.0), (0.5, 0.0)])
def test_block_against_a_draw(sigma, a):
    s = singular_values(draw(np.random.default_rng(1), sigma, 512, a))
    law = GaussianBlock(sigma, a)
    lower, upper = law.edges()
    assert s[-1] == pytest.approx(upper, rel=0.03)
    assert s[0] == pytest.approx(lower, rel=0.03, abs=0.03)  # at sigma = 1 it is near d^(-3/4)
    assert distance(law.cdf, s) < 0.008
    assert np.mean(s**2) == pytest.approx(law.mean_square, rel=0.02)


# --- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "a"), [(0.05, 1.0), (0.6, 1.0), (1.0, 1.0), (1.0 - 1e-4, 1.0),
                                          (4.0, 1.0), (0.5, 0.0), (0.2, 0.5)])  # fmt: skip
def test_a_product_of_one_is_the_block(sigma, a):
    """The S-transform's equation and the cubic are derived independently."""
    block, law = GaussianBlock(sigma, a), ProductLaw([GaussianBlock(sigma, a)])
    np.testing.assert_allclose(law.edges(), block.edges(), rtol=1e-12)
    lower, upper = block.edges()
    s = np.linspace(lower, upper, 53)[1:-1]
    np.testing.assert_allclose(law.density(s), block.density(s), rtol=1e-8)
    np.testing.assert_allclose(law.cdf(s), block.cdf(s), atol=1e-9)
    assert law.mean_fourth == pytest.approx(block.mean_fourth)


def test_sixteen_blocks():
    law = ProductLaw([GaussianBlock(0.25)] * 16)
    np.testing.assert_allclose(law.edges(), [0.2039, 4.3268], atol=5e-5)
    assert law.mean_square == pytest.approx((1 + 0.25**2) ** 16, rel=1e-12)
    # The sum of the top Lyapunov exponents is not sigma_max of a finite product.
    assert math.exp(16 * law.lyapunov(0.0)) == pytest.approx(1.62, abs=0.01)


def test_product_of_different_blocks_against_a_draw():
    rng, d = np.random.default_rng(2), 400
    blocks = [GaussianBlock(0.3), GaussianBlock(0.5, 1.2), GaussianBlock(0.9), GaussianBlock(0.5)]
    matrix = np.eye(d)
    for block in blocks:
        matrix = draw(rng, block.sigma, d, block.a) @ matrix
    s, law = singular_values(matrix), ProductLaw(blocks)
    lower, upper = law.edges()
    assert s[-1] == pytest.approx(upper, rel=0.03)
    assert 0.9 * lower < s[0] < 1.6 * lower  # the hard edge of sigma near 1 converges slowly
    assert distance(law.cdf, s) < 0.01
    x = np.linspace(*law.log_edges(), 2001)
    f = law.log_density(x)
    assert np.trapezoid(f, x) == pytest.approx(1, abs=1e-4)
    assert np.trapezoid(f * np.exp(2 * x), x) == pytest.approx(law.mean_square, rel=1e-3)
    assert np.trapezoid(f * np.exp(4 * x), x) == pytest.approx(law.mean_fourth, rel=1e-3)
    assert law.edges() == pytest.approx(ProductLaw(blocks[::-1]).edges(), rel=1e-12)


def test_products_beyond_the_range_of_numbers():
    law = ProductLaw([GaussianBlock(3.0)] * 2000)
    assert law.log_mean_square == pytest.approx(2000 * math.log(10))
    assert law.mean_square == math.inf and law.edges() == (0.0, math.inf)
    assert 0 < law.log_edges()[1] - law.log_mean_square / 2 < 10
    x = np.linspace(-3000, law.log_edges()[1], 3001)
    assert np.trapezoid(law.log_density(x), x) == pytest.approx(1, abs=0.01)


def test_product_of_quarter_circles_is_fuss_catalan():
    """Moments of products of L square Gaussian matrices: binom((L+1) k, k) / (L k + 1)."""
    law = ProductLaw([GaussianBlock(1.0, 0.0)] * 3)
    assert law.edges()[1] ** 2 == pytest.approx(4**4 / 3**3, rel=1e-12)
    assert law.mean_fourth == pytest.approx(math.comb(8, 2) / 7)


def test_lyapunov_against_qr():
    rng, d, depth, sigma = np.random.default_rng(3), 128, 200, 0.5
    q, total, skip = np.eye(d), np.zeros(d), 20
    for step in range(depth + skip):
        q, r = np.linalg.qr(draw(rng, sigma, d) @ q)
        total += np.log(np.abs(np.diag(r))) * (step >= skip)
    t = (np.arange(d) + 0.5) / d
    theory = ProductLaw([GaussianBlock(sigma)]).lyapunov(t)
    expected = 0.5 * np.log(0.5 * (1 + sigma**2 * (1 - 2 * t)
                                   + np.sqrt((1 + sigma**2) ** 2 - 4 * sigma**2 * t)))  # fmt: skip
    np.testing.assert_allclose(theory, expected, rtol=1e-12, atol=1e-14)
    assert np.max(np.abs(np.sort(total / depth)[::-1] - theory)) < 0.015
    top, bottom = ProductLaw([GaussianBlock(sigma)]).lyapunov([0.0, 1 - 1e-15])
    assert top == pytest.approx(math.log(1 + sigma**2) / 2)
    assert bottom == pytest.approx(math.log(1 - sigma**2) / 2)


# --- two layers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("a", "ratio", "tau"), [(1.0, 4.0, 0.02), (1.0, 4.0, 1.0), (1.0, 1.0, 0.3),
                                                 (0.0, 2.0, 0.5), (1.0, 0.25, 2.0)])  # fmt: skip
def test_two_layers_against_a_draw(a, ratio, tau):
    rng, d = np.random.default_rng(4), 400
    hidden = int(ratio * d)
    on = np.arange(hidden) % 4 > 0
    w_in, w_out = rng.standard_normal((hidden, d)), rng.standard_normal((d, hidden)) * on
    s = singular_values(a * np.eye(d) + math.sqrt(tau) * w_out @ w_in / d)
    law = TwoLayerBlock((0.0, tau), (0.25, 0.75), ratio, a)
    lower, upper = law.edges()
    assert s[-1] == pytest.approx(upper, rel=0.03)
    assert s[0] == pytest.approx(lower, rel=0.04, abs=0.04)
    assert law.mean_square == pytest.approx(np.mean(s**2), rel=0.03)
    assert law.mean_fourth == pytest.approx(np.mean(s**4), rel=0.06)
    bulk = s[np.abs(s - a) > 1e-6] if ratio < 0.5 else s  # d - 2 F singular values are exactly a
    f = law.cdf(bulk)
    ranks = np.searchsorted(s, bulk) + 0.5
    assert np.max(np.abs(f - ranks / d)) < 0.012


def test_two_layers_with_many_units_are_gaussian():
    gaussian = GaussianBlock(0.6)
    many = TwoLayerBlock((0.36e-6,), (1.0,), 1e6)
    np.testing.assert_allclose(many.edges(), gaussian.edges(), rtol=1e-5)
    s = np.linspace(*gaussian.edges(), 9)[1:-1]
    np.testing.assert_allclose(many.density(s), gaussian.density(s), rtol=1e-4)
    np.testing.assert_allclose(many.cdf(s), gaussian.cdf(s), atol=1e-5)


def test_a_mixed_product_against_a_draw():
    rng, d, matrix, blocks = np.random.default_rng(5), 300, np.eye(300), []
    for tau in (0.02, 0.05, 0.03):
        w = rng.standard_normal((d, 4 * d)) @ rng.standard_normal((4 * d, d))
        matrix = (np.eye(d) + math.sqrt(tau) * w / d) @ draw(rng, 0.2, d) @ matrix
        blocks += [TwoLayerBlock((tau,), (1.0,), 4.0), GaussianBlock(0.2)]
    s, law = singular_values(matrix), ProductLaw(blocks)
    assert s[-1] == pytest.approx(law.edges()[1], rel=0.04)
    assert s[0] == pytest.approx(law.edges()[0], rel=0.06)
    assert distance(law.cdf, s) < 0.016
    assert np.all(np.diff(law.cdf(law.quantile(np.linspace(0.05, 0.95, 7)))) > 0)


def test_narrow_branch_alone_has_a_null_space():
    law = TwoLayerBlock((1.0,), (1.0,), ratio=0.25, a=0.0)
    assert law.rank == 0.25
    # The rest is sqrt(1/4) times a product of a square and a 4 : 1 Gaussian matrix.
    np.testing.assert_allclose(
        law.cdf([1e-200, 1e-9, 1e-3, 10.0]), [0.75, 0.75, 0.75, 1], atol=1e-5
    )
    x = np.linspace(math.log(1e-4), law._law.log_edges()[1], 4001)
    assert np.trapezoid(law._law.log_density(x), x) == pytest.approx(0.25, abs=1e-3)
    assert ProductLaw([law]).lyapunov(0.5) == -math.inf


def test_a_product_has_the_rank_of_its_narrowest_factor():
    rng, d = np.random.default_rng(9), 200
    narrow = TwoLayerBlock((1.0,), (1.0,), ratio=0.25, a=0.0)
    law = ProductLaw([GaussianBlock(0.3), narrow, GaussianBlock(0.2)])
    assert law.rank == 0.25 and law.edges()[0] == 0
    w = rng.standard_normal((d, d // 4)) @ rng.standard_normal((d // 4, d)) / d
    s = singular_values(draw(rng, 0.2, d) @ w @ draw(rng, 0.3, d))
    assert np.sum(s > 1e-12) == d // 4
    np.testing.assert_allclose(law.cdf([1e-200, 10.0]), [0.75, 1], atol=1e-5)
    assert distance(lambda t: (law.cdf(t) - 0.75) / 0.25, s[s > 1e-12]) < 0.06


def test_compress_keeps_the_mean_and_the_zeros():
    rng = np.random.default_rng(6)
    tau, weight = np.append(rng.exponential(size=1000), 0.0), np.full(1001, 1 / 1001)
    few, mass = compress(tau, weight, count=40, least=0.01)
    assert len(few) <= 41 and few[0] == 0 and mass[0] == pytest.approx(1 / 1001)
    assert mass @ few == pytest.approx(weight @ tau, rel=1e-12)
    assert mass[-1] >= 0.01 and few[-1] < tau.max()


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: GaussianBlock(-0.5), "sigma=-0.5: must be at least 0"),
        (lambda: GaussianBlock(math.nan), "sigma=nan: must be finite"),
        (lambda: GaussianBlock(1.0, math.inf), "a=inf: must be finite"),
        (lambda: GaussianBlock("x"), "sigma='x': must be one number"),  # type: ignore[arg-type]
        (lambda: GaussianBlock(1.0).density([1.0, math.nan]), "s: 1 of 2 entries are not finite"),
        (lambda: GaussianBlock(0.0).density(1.0), "sigma=0: all singular values are 1"),
        (lambda: GaussianBlock(1.0).quantile(1.5), "p=1.5..1.5: must be between 0 and 1"),
        (lambda: ProductLaw([]), "factors=[]"),
        (lambda: ProductLaw([GaussianBlock(0.0, 0.0)]), "factors[0]: a = sigma = 0"),
        (lambda: ProductLaw([GaussianBlock(0.0, 2.0)]).density(2.0), "all singular values are 2"),
        (lambda: ProductLaw([GaussianBlock(0.5)]).lyapunov(1.0), "fraction=1..1: must be in"),
        (lambda: TwoLayerBlock((1.0,), (0.5,), 1.0), "weights: sum to 0.5"),
        (lambda: TwoLayerBlock((-1.0,), (1.0,), 1.0), "strengths: smallest is -1"),
        (lambda: TwoLayerBlock((1.0,), (0.5, 0.5), 1.0), "two equally long lists"),
        (lambda: TwoLayerBlock((1.0,), (1.0,), 0.0), "ratio=0.0: must be positive"),
        (lambda: compress([], []), "strengths=[]"),
    ],
)
def test_mistakes_are_one_line(make, says):
    with pytest.raises(UserError) as caught:
        make()
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_singular_point_raises_instead_of_guessing():
    """A branch of rank below d/2 leaves singular values exactly at a: no density there."""
    law = TwoLayerBlock((1.0,), (1.0,), ratio=0.25)
    with pytest.raises(UserError, match="log_s=0: the density did not converge"):
        law.density(1.0)
    assert law.cdf(0.999) == pytest.approx(0.25, abs=1e-9) or law.cdf(0.999) < 0.25
    assert law.cdf(1.001) - law.cdf(0.999) == pytest.approx(0.5, abs=0.02)
