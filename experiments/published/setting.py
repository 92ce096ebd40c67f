"""Sizes and seeds of the board, and decoders with the weights that the papers assume."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.claim import Tolerance
from experiments.published.result import LEAST_SEEDS
from normjax import configs
from normjax.configs import field
from normjax.decoder import Decoder, DecoderConfig


@dataclasses.dataclass(frozen=True)
class Board:
    """Sizes and seeds. Every field is a flag: ``--config.board.seeds=10``."""

    seed: int = field(0, "the first of the seeds", least=0, most=2**20)
    seeds: int = field(
        10, "independent seeds of a random row; cheap rows take more", least=LEAST_SEEDS, most=1000
    )
    width: int = field(128, "features of the decoders", least=16, most=4096)
    depth: int = field(32, "blocks of the deepest decoders, a power of two", least=8, most=1024)
    tokens: int = field(32, "positions of the decoders", least=8, most=1024)
    matrix: int = field(
        256, "rows of the largest random matrices, a multiple of 32", least=64, most=8192
    )
    steps: int = field(4000, "of a random walk or a long product", least=500, most=1_000_000)
    keys: int = field(16, "the base-2 logarithm of the keys of a softmax", least=10, most=24)


@dataclasses.dataclass(frozen=True)
class PublishedConfig:
    """The configuration of the experiment."""

    board: Board = Board()


def check(config: PublishedConfig) -> None:
    """Raise :class:`UserError` for sizes at which the board cannot be computed."""
    configs.check(config)


def seeds(board: Board, purpose: int, times: int = 1) -> list[np.random.Generator]:
    """Return a generator for each seed, independent of those of other purposes.

    ``times`` as many where a seed takes milliseconds and scatters much.
    """
    return [np.random.default_rng([board.seed + s, purpose]) for s in range(times * board.seeds)]


def decoder(placement: Any, width: int, depth: int, tokens: int, **changes: Any) -> Decoder:
    """Return a decoder as the papers on initialization have it.

    One head, no positions, a ReLU MLP of the stream's own width, LayerNorm with a tiny eps. There
    is a token of its own for every position.

    Args:
      placement: a name or a row.
      width, depth, tokens: D, L and T.
      **changes: other fields of :class:`normjax.decoder.DecoderConfig`.
    """
    settings: dict[str, Any] = {
        "heads": 1, "positions": "none", "mlp": "relu", "mlp_width": width, "tied": False,
        "norm": "layernorm_plain", "norm_eps": 1e-12, "scan_layers": True,
    }  # fmt: skip
    settings |= {"width": width, "depth": depth, "placement": placement} | changes
    return Decoder(DecoderConfig(**settings), tokens, tokens)


def weights(model: Decoder, generator: np.random.Generator, **given: Any) -> Any:
    """Return weights N(0, 1 / fan in), embeddings N(0, 1), and what a decoder starts with besides.

    Args:
      model: the decoder.
      generator: of the draws.
      **given: arrays, or 0, by the name of a matrix: ``query=0`` makes attention uniform.
    """

    def draw(path: Any, leaf: Any) -> Any:
        names = [key.key for key in path if key.key != "kernel"]
        if names[-1] in given:
            return jnp.broadcast_to(jnp.asarray(given[names[-1]], leaf.dtype), leaf.shape)
        if path[-1].key == "kernel":
            size = leaf.shape[-2] ** -0.5
        elif names[-1] == "embedding":
            size = 1.0
        else:  # gains, factors: those that the decoder starts with
            return started(path)
        return jnp.asarray(size * generator.standard_normal(leaf.shape), leaf.dtype)

    own: list[Any] = []

    def started(path: Any) -> Any:
        if not own:
            own.append(model.init(jax.random.key(0)))
        found = own[0]
        for key in path:
            found = found[key.key]
        return found

    return jax.tree_util.tree_map_with_path(draw, _shapes(model))


@functools.lru_cache(maxsize=64)
def _shapes(model: Decoder) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0))


def mean_squares(model: Decoder) -> Callable[[Any, Any], Mapping[str, Any]]:
    """Return a compiled (params, tokens (B, T)) -> mean squares over the blocks, (L,) each.

    Keys are such as "mlp.sum": the point "sum" of the MLP sub-layers' equation.
    """

    @jax.jit
    def function(params: Any, tokens: Any) -> dict[str, Any]:
        blocks = model.tapped(params, tokens)[1]["blocks"]
        return {
            f"{name}.{point}": jnp.mean(blocks[name][point] ** 2, axis=(1, 2, 3))
            for name in model.config.sublayers for point in ("before", "written", "sum", "after")
        }  # fmt: skip

    return function


def resolution(value: float, share: float = 0.03) -> Tolerance:
    """Return the tolerance of a mean that a statement gives exactly: a share of it.

    >>> resolution(2.0).value
    0.06
    """
    why = "the statement is about a mean: the difference asked of the seeds to tell"
    return Tolerance(share * abs(value), f"{share:.0%} of the value; {why}")


def shown(value: Any) -> str:
    """Return a number of a note to three digits.

    >>> shown(1234.567), shown(0.012345)
    ('1.23e+03', '0.0123')
    """
    return f"{value:.3g}"
