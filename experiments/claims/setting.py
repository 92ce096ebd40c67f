"""Where the claims are computed: sizes of vectors and decoders, and the seed of all draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax import configs
from normjax.configs import field
from normjax.decoder import Decoder, DecoderConfig
from normjax.errors import UserError
from normjax.jacobians.blocks import Parts
from normjax.norm_derivatives import Floats


@dataclasses.dataclass(frozen=True)
class Point:
    """Sizes and seed. Every field is a flag: ``--config.point.width=32``."""

    seed: int = field(0, "of vectors, gains and weights", least=0, most=2**31 - 1)
    width: int = field(
        16, "features D of vectors and of the decoders, even in every head", least=4, most=64
    )
    heads: int = field(2, "attention heads of the decoders", least=1, most=16)
    tokens: int = field(6, "positions T of the sequences, at most the width", least=2, most=16)


@dataclasses.dataclass(frozen=True)
class ClaimsConfig:
    """The configuration of the experiment."""

    point: Point = Point()


def check(config: ClaimsConfig) -> None:
    """Raise :class:`UserError` for sizes at which the claims cannot be computed."""
    configs.check(config)
    point = config.point
    if point.width % (2 * point.heads):
        fitting = [h for h in range(1, 17) if point.width % (2 * h) == 0]
        fix = f"for example {fitting[-1]}" if fitting else "take an even width"
        raise UserError(
            f"config.point.heads={point.heads}: must leave an even number of the"
            f" {point.width} features to each head; {fix}"
        )
    if point.tokens > point.width:
        raise UserError(
            f"config.point.tokens={point.tokens}: must be at most the width {point.width}, so that"
            " the attention of every position can be read out of the module"
        )


def draws(point: Point, purpose: int) -> np.random.Generator:
    """Return the random numbers of one purpose, independent of those of the others."""
    return np.random.default_rng([point.seed, purpose])


def decoder_parts(
    point: Point, given: Mapping[str, Any] | None = None, gains: bool = True, **changes: Any
) -> Parts:
    """Return a decoder with weights of size 1/sqrt(fan in) and gains in [0.5, 1.5], in float64.

    The parameters have the decoder's own names and shapes; drawn here, they need no compilation.

    Args:
      point: sizes and seed. There is one token for every position: the embedding is the stream.
      given: weights by their last names, such as {"out": (F, D)}, the same in every block.
      gains: whether to draw gains; all are 1 otherwise.
      **changes: fields of :class:`normjax.decoder.DecoderConfig`; the depth is 1.
    """
    settings: dict[str, Any] = {
        "depth": 1, "width": point.width, "heads": point.heads,
        "dtype": "float64", "param_dtype": "float64",
    }  # fmt: skip
    generator, given = draws(point, 100), given or {}
    with jax.enable_x64(True):
        model = Decoder(DecoderConfig(**{**settings, **changes}), point.tokens, point.tokens)

        def draw(path: Any, leaf: Any) -> Any:
            names = [key.key for key in path if key.key != "kernel"]
            if names[-1] == "gain":
                value = generator.uniform(0.5, 1.5, leaf.shape) if gains else np.ones(leaf.shape)
            elif names[-1] in given:
                value = np.broadcast_to(given[names[-1]], leaf.shape)
            else:
                value = generator.normal(size=leaf.shape) * leaf.shape[-2] ** -0.5
            return jnp.asarray(value, leaf.dtype)

        shapes = jax.eval_shape(model.init, jax.random.key(0))
        return Parts(model, jax.tree_util.tree_map_with_path(draw, shapes))


def stream(point: Point, purpose: int = 101) -> Floats:
    """Return a hidden state (T, D) of independent normal entries, of mean square about 1."""
    return draws(point, purpose).normal(size=(point.tokens, point.width))
