"""One function for every size: its values, its bounds, its refusals."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import ortho_group

from normjax.errors import UserError
from normjax.spectra.spectrum import spectrum

EPS = np.finfo(np.float64).eps


def known(n, values, seed=0):
    """A linear function with known singular values."""
    left, right = (ortho_group.rvs(n, random_state=seed + i) for i in range(2))
    matrix = left @ np.diag(values) @ right

    def function(x):
        return jnp.asarray(matrix) @ x

    return function


def test_all_values_are_within_their_bounds():
    values = np.geomspace(10, 1e-3, 40)
    found = spectrum(known(40, values), np.ones(40))
    assert found.complete and found.resolved
    assert np.all(np.abs(found.values - values) <= found.bounds)
    assert found.bounds[0] < 100 * EPS * 10
    assert abs(found.condition - 1e4) < 1e4 * found.bounds[0] / 1e-3


def test_the_largest_values_agree_with_all_of_them():
    f = known(60, np.geomspace(10, 1e-3, 60))
    everything, top = spectrum(f, np.ones(60)), spectrum(f, np.ones(60), k=4)
    assert not top.complete and len(top.values) == 4
    assert np.all(np.abs(top.values - everything.values[:4]) <= top.bounds + everything.bounds[:4])


def test_shapes_are_flattened_and_floats_widened():
    found = spectrum(lambda x: x[:, :1] * 2, np.ones((3, 2), np.float32))
    assert found.values.dtype == np.float64
    np.testing.assert_allclose(found.values, [2, 2, 2], rtol=4 * EPS)


def test_what_is_refused():
    with pytest.raises(UserError, match=r"x: a Jacobian of 5000 by 5000: .* pass k=10"):
        spectrum(lambda x: x, np.ones(5000))
    with pytest.raises(UserError, match=r"k=4: must be from 1 to 3"):
        spectrum(lambda x: x, np.ones(3), k=4)
    with pytest.raises(UserError, match=r"x\[1\]=nan: must be finite"):
        spectrum(lambda x: x, np.array([1.0, np.nan]))
    with pytest.raises(UserError, match=r"function\(x\): returns NaN or infinity"):
        spectrum(lambda x: x / 0.0, np.ones(2))
    with pytest.raises(UserError, match="condition: needs all singular values"):
        _ = spectrum(lambda x: x, np.ones(3), k=1).condition
    assert spectrum(lambda x: x * jnp.array([1.0, 0.0]), np.ones(2)).condition == np.inf
