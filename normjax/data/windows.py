"""Windows of tokens: batches to train on, and fixed windows to evaluate on.

A batch is a pure function of ``(seed, step)``: nothing has to be saved to resume, and any number of
runs and processes draw from one array.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from normjax.data import philox
from normjax.data.philox import key as _key
from normjax.errors import UserError


def batch(tokens: np.ndarray, seed: int, step: int, size: int, window: int) -> np.ndarray:
    """Return the training windows of one step: a pure function of ``(seed, step)``.

    Row r starts at ``floor(x_r (n - window) / 2^64)`` where ``x_0, x_1, ...`` are the 64-bit words
    of Philox-4x64 with key ``(seed, step)`` and counter from 1. NumPy guarantees that stream, so a
    batch is the same in every process, on every machine and with every version.

    Args:
      tokens: (n,) integers with ``n > window``.
      seed: of the run, from 0 to 2^64 - 1.
      step: from 0 to 2^64 - 1.
      size: windows B, at least 1.
      window: inputs per window T, at least 1.

    Returns:
      (B, T + 1) int32; inputs are ``[:, :-1]`` and targets ``[:, 1:]``.

    >>> batch(np.arange(100), seed=0, step=0, size=2, window=3)
    array([[ 1,  2,  3,  4],
           [23, 24, 25, 26]], dtype=int32)
    """
    starts = _starts(len(tokens), _key(seed, step), size, window)
    return _gather(tokens, starts, window)


def batches(
    tokens: np.ndarray, seed: int, first_step: int, steps: int, size: int, window: int
) -> np.ndarray:
    """Return :func:`batch` for ``steps`` steps from ``first_step``: (steps, B, T + 1) int32."""
    _at_least("steps", steps, 1)
    _key(seed, first_step + steps - 1)
    keys = (_key(seed, first_step + i) for i in range(steps))
    starts = [_starts(len(tokens), key, size, window) for key in keys]
    return _gather(tokens, starts, window)


def _starts(length: int, key: np.ndarray, size: int, window: int) -> list[int]:
    _at_least("size", size, 1)
    _at_least("window", window, 1)
    places = length - window
    if places < 1:
        raise UserError(f"window={window}: needs {window + 1} tokens, there are {length}")
    # Multiply-shift in Python's integers: exact for every length, and fast for a batch.
    return [(x * places) >> 64 for x in philox.words(key, size).tolist()]


def _gather(tokens: np.ndarray, starts: Any, window: int) -> np.ndarray:
    """Return (..., window + 1) int32 from starts (...)."""
    at = np.asarray(starts, np.int64)[..., None] + np.arange(window + 1)
    return np.asarray(tokens)[at].astype(np.int32)  # a plain view: indexing a memmap is slower


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name}={value}: must be at least {least}; pass {name}={max(least, 1)}")


def evaluation_windows(
    tokens: np.ndarray, window: int, count: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return fixed windows to evaluate on; each target token is predicted at most once.

    The part is cut into consecutive windows: window i reads tokens ``i T .. i T + T - 1`` and
    predicts the T tokens one further. With ``count=0`` all of them are returned, so that every
    token but the first is predicted exactly once; the last one is filled up with zeros of weight 0.
    With ``count=k`` k of the m whole windows are returned, evenly spaced: those numbered
    ``floor((2 i + 1) m / (2 k))``; all m where k is larger.

    Args:
      tokens: (n,) integers, at least two; with ``count > 0`` more than ``window``.
      window: T, at least 1.
      count: windows wanted, 0 for the whole part.

    Returns:
      Windows (W, T + 1) int32 and weights (W, T) float32, 1 for a target that counts.

    >>> windows, weights = evaluation_windows(np.arange(6), window=3)
    >>> windows.tolist()
    [[0, 1, 2, 3], [3, 4, 5, 0]]
    >>> weights.tolist()
    [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]
    """
    _at_least("window", window, 1)
    _at_least("count", count, 0)
    targets = len(tokens) - 1
    needed = window if count else 1
    if targets < needed:
        raise UserError(f"window={window}: needs {needed + 1} tokens, there are {len(tokens)}")
    whole = targets // window
    if count:
        count = min(count, whole)
        numbers = (2 * np.arange(count) + 1) * whole // (2 * count)
        return _gather(tokens, numbers * window, window), np.ones((count, window), np.float32)
    rows = -(-targets // window)
    padded = np.zeros(rows * window + 1, np.int32)
    padded[: len(tokens)] = tokens
    windows = np.lib.stride_tricks.sliding_window_view(padded, window + 1)[::window].copy()
    weights = (np.arange(rows * window) < targets).astype(np.float32).reshape(rows, window)
    return windows, weights
