"""Random words that are a pure function of ``(seed, step)``: Philox-4x64, counted from 1.

NumPy guarantees the raw stream of a bit generator, not what its ``Generator`` methods make of it;
so everything drawn in this package is made from the words themselves and stays the same in every
process, on every machine and with every version.
"""

from __future__ import annotations

import operator

import numpy as np

from normjax.errors import UserError


def key(seed: int, step: int) -> np.ndarray:
    """Return the key (seed, step) as two 64-bit words.

    Raises:
      UserError: either lies outside 0 .. 2^64 - 1.
    """
    for name, value in (("seed", seed), ("step", step)):
        if not 0 <= operator.index(value) < 1 << 64:
            raise UserError(f"{name}={value}: must be between 0 and 2**64 - 1; pass {name}=0")
    return np.array([seed, step], np.uint64)


def words(key: np.ndarray, count: int) -> np.ndarray:
    """Return the first ``count`` words of Philox-4x64 with a key and counter from 1: uint64."""
    return np.random.Philox(key=key).random_raw(count)


def uniforms(seed: int, step: int, count: int) -> np.ndarray:
    """Return numbers in [0, 1): ``(w >> 11) 2^-53`` of the words w of the key (seed, step).

    A smaller count gives the beginning of a larger one.

    >>> uniforms(0, 0, 2).round(6)
    array([0.011547, 0.241549])
    """
    return (words(key(seed, step), count) >> np.uint64(11)) * 2.0**-53
