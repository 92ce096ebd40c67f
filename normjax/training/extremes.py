"""What every step of a training measures: numbers of one state each, kept as running extremes.

Every number is at hand in the step: nothing is run twice, no array is kept for it. The dearest are
thinned out: logits and probabilities of attention are those of the batch's first sequence, updates
and parameters those of one row in eight of the matrices. What stays of a number are its first and
last value, that of the step at which the warm-up ends, the smallest and the largest with their
steps, over all steps and over those from the end of the warm-up on. They are part of the state:
they travel in the checkpoint, and a run that goes on has those that it would have had. A value that
is NaN counts nowhere; an infinite one counts as the largest float32. Sizes are roots of float32
sums of squares: above 1.8e19 they count as that, below 1e-19 as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Values = dict[str, Array]
AVERAGED = 5
"""Jumps are taken to the running mean of about so many steps before; from that step on."""
ROWS = 8
"""Of updates and parameters one row in so many is measured."""
_LARGEST = float(np.finfo(np.float32).max)
SCALARS = ("loss/value", "loss/jump", "gradient/norm", "gradient/jump")
ENDS = ("residual/depth_ratio", "gradient/depth_ratio")
BY_SUBLAYER = (
    "residual/rms_before", "residual/rms_after", "residual/transfer", "branch/stream_ratio",
    "gradient/stream_rms", "gradient/transfer", "gradient/block_norm", "update/block_ratio",
)  # fmt: skip
BY_HEAD = ("attention/logit_max", "attention/collision_share", "attention/head_share")


class Extremes(NamedTuple):
    """Extremes of n numbers, each field (n,); what has not been yet is NaN, its step -1.

    Attributes:
      first, settled, last: at the first step, at the one that ends the warm-up, at the last one.
      low, high, low_step, high_step: over all steps; steps are counted from 0, before which the
        number was measured, and are the first of equal ones.
      settled_low, ...: the same over the steps from the end of the warm-up on.
      means: (2,), running means of loss and gradient norm.
    """

    first: Array
    settled: Array
    last: Array
    low: Array
    high: Array
    low_step: Array
    high_step: Array
    settled_low: Array
    settled_high: Array
    settled_low_step: Array
    settled_high_step: Array
    means: Array


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the numbers that a model's steps measure, {name: shape}, in order.

    Shapes are (), (L, S) by block and sub-layer, or (L, H) by block and head. Of a model that shows
    nothing there are loss and gradient norm.
    """
    out: dict[str, tuple[int, ...]] = dict.fromkeys(SCALARS, ())
    if not hasattr(model, "watched") or not model.config.sublayers:
        return out
    c = model.config
    out |= dict.fromkeys(ENDS, ())
    out |= dict.fromkeys(BY_SUBLAYER, (c.depth, len(c.sublayers)))
    if "attention" in c.sublayers:
        out |= dict.fromkeys(BY_HEAD, (c.depth, c.heads))
    return out


def start(model: Any) -> Extremes:
    """Return the extremes of no step."""
    count = sum(int(np.prod(shape)) for shape in shapes(model).values())
    none, never = jnp.full(count, jnp.nan, jnp.float32), jnp.full(count, -1, jnp.int32)
    return Extremes(
        first=none, settled=none, last=none, low=none, high=none, low_step=never, high_step=never,
        settled_low=none, settled_high=none, settled_low_step=never, settled_high_step=never,
        means=jnp.full(2, jnp.nan, jnp.float32),
    )  # fmt: skip


def inside(
    seen: Mapping[str, Any], meters: Mapping[str, Any], params: Any, gradients: Any, updates: Any,
    rate: Array,
) -> Values:  # fmt: skip
    """Return what a step measures inside a model, {name: (), (L, S) or (L, H)}.

    Args:
      seen, meters: as ``Decoder.watched`` gives them, the meters' gradients.
      params, gradients, updates, rate: of the step; it takes ``rate * updates`` off the parameters.
    """
    names = tuple(name for name in seen if name)

    def each(key: str) -> Array:  # (L, S)
        return jnp.sqrt(jnp.stack([seen[name][key] for name in names], axis=1))

    def size(tree: Any, every: int) -> Array:
        return jnp.sqrt(jnp.stack([_squares(tree["blocks"][n], every) for n in names], axis=1))

    def behind(x: Array, last: Array) -> Array:
        """What comes after a sub-layer is what the next one starts from."""
        return jnp.append(x.ravel()[1:], jnp.sqrt(last)).reshape(x.shape)

    before, written = each("before"), each("written")
    pulled = jnp.sqrt(jnp.stack([meters["blocks"][name]["before"] for name in names], axis=1))
    after, pulled_after = behind(before, seen[""]["last"]), behind(pulled, meters["last"])
    out = {
        "residual/depth_ratio": after[-1, -1] / before[0, 0],
        "gradient/depth_ratio": pulled[0, 0] / pulled_after[-1, -1],
        "residual/rms_before": before,
        "residual/rms_after": after,
        "residual/transfer": after / before,
        "branch/stream_ratio": written / before,
        "gradient/stream_rms": pulled,
        "gradient/transfer": pulled / pulled_after,
        "gradient/block_norm": size(gradients, 0),
        "update/block_ratio": rate * size(updates, ROWS) / size(params, ROWS),
    }
    if "attention" in seen:
        own = seen["attention"]
        squares = own["head_square"]
        total = jnp.sum(squares, 1, keepdims=True)
        out["attention/logit_max"] = own["logit_max"]
        out["attention/collision_share"] = own["collision"]
        out["attention/head_share"] = jnp.sqrt(squares / jnp.where(total == 0, 1, total))
    return out


def _squares(tree: Any, every: int) -> Array:
    """Return the sum of squares by block of the leaves (L, ...) of a sub-layer: (L,).

    With ``every`` of the matrices only, one row in so many.
    """
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = [x for path, x in flat if path[-1].key == "kernel" or not every]
    leaves = [x[:, ::every] if every else x for x in leaves]
    wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in leaves]
    squares = [jnp.sum(jnp.square(x), tuple(range(1, x.ndim))) for x in wide]
    return jnp.sum(jnp.stack(squares), axis=0)


def taken(
    old: Extremes, model: Any, values: Values, loss: Array, norm: Array, step: Array, warmup: int,
    alive: Array,
) -> Extremes:  # fmt: skip
    """Return the extremes after one more step.

    Args:
      old: before it.
      model: that is trained.
      values: of :func:`inside`; empty for a model that shows nothing.
      loss, norm: of the step, the norm before clipping.
      step: which, from 0.
      warmup: steps of warm-up.
      alive: whether the run has not diverged: where it has, nothing changes.
    """
    now = jnp.stack([loss, norm]).astype(jnp.float32)
    jumps = jnp.where(step >= AVERAGED, now / old.means, jnp.nan)
    numbers = values | {
        "loss/value": now[0], "loss/jump": jumps[0], "gradient/norm": now[1],
        "gradient/jump": jumps[1],
    }  # fmt: skip
    flat = jnp.concatenate([
        jnp.reshape(numbers[name], -1).astype(jnp.float32) for name in shapes(model)
    ])  # fmt: skip
    x = jnp.minimum(flat, _LARGEST)
    known = alive & ~jnp.isnan(x)
    settled = known & (step >= warmup)
    lower, higher = known & ~(x >= old.low), known & ~(x <= old.high)
    under, over = settled & ~(x >= old.settled_low), settled & ~(x <= old.settled_high)
    put = jnp.where
    usable = alive & jnp.isfinite(now)
    mean = put(jnp.isnan(old.means), now, old.means + (now - old.means) / AVERAGED)
    return Extremes(
        first=put(known & (step == 0), x, old.first),
        settled=put(settled & (step == warmup), x, old.settled),
        last=put(known, x, old.last),
        low=put(lower, x, old.low), high=put(higher, x, old.high),
        low_step=put(lower, step, old.low_step), high_step=put(higher, step, old.high_step),
        settled_low=put(under, x, old.settled_low), settled_high=put(over, x, old.settled_high),
        settled_low_step=put(under, step, old.settled_low_step),
        settled_high_step=put(over, step, old.settled_high_step),
        means=put(usable, mean, old.means),
    )  # fmt: skip


def expected(model: Any) -> dict[str, np.ndarray]:
    """Return what a placement's row says of a number beforehand, {name: array of its shape}.

    Of branch/stream_ratio the size at which B starts, where the row makes it a number or one that
    is learned, and 1 elsewhere: a branch may write that much less, and at first nothing where B
    starts at 0.
    """
    names = model.config.sublayers
    if not names:
        return {}
    depth, rows = model.config.depth, [model.config.placement_row.of(name) for name in names]
    starts = [[_start(row.at(block, depth).write) for row in rows] for block in range(1, depth + 1)]
    return {"branch/stream_ratio": np.array(starts)}


def _start(write: Any) -> float:
    value = getattr(write, "start", write)
    return min(abs(float(value)), 1.0) if isinstance(value, int | float) else 1.0


def by_name(model: Any, extremes: Extremes) -> dict[str, dict[str, np.ndarray]]:
    """Return one run's extremes on the host as {name: {field: array of the number's shape}}."""
    out, at = {}, 0
    for name, shape in shapes(model).items():
        size = int(np.prod(shape))
        out[name] = {
            field: np.asarray(getattr(extremes, field))[at : at + size].reshape(shape)
            for field in Extremes._fields if field != "means"
        }  # fmt: skip
        at += size
    return out
