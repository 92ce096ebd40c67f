"""What a walk through a model comes to: numbers by depth with intervals, and sentences.

Every number is a mean over the ordinary tokens of each window, then over windows; its interval is
Student's t over windows of one text, 95 %. Tokens that are set apart are counted and told apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from normjax.decoder_config import DecoderConfig
from normjax.diagnostics.block_gains import BlockGains
from normjax.diagnostics.walk import MASSIVE, Floats, Walk
from normjax.reporting.statistics import Estimate, estimate
from normjax.reporting.wording import counted

SINK, NARROW, IDLE = 0.5, 0.05, 0.01
"""Share of a head's attention on the first key from which it is called a sink head; share of the
largest entropy below which a head is narrow; size of what a branch writes, over the stream, below
which it is called idle. Rules of thumb: they only say what is counted."""


@dataclasses.dataclass(frozen=True)
class ByDepth:
    """Estimates before each sub-layer and at the end (S + 1), or of each sub-layer (S).

    Attributes:
      size: root mean square of the stream, over ordinary tokens (S + 1).
      apart: that of the tokens set apart, their largest (S + 1); None where there are none.
      written: what a sub-layer writes, over the stream that it reads (S).
      turned: cosine of what it writes to that stream (S).
      gradient: rms over a window's tokens of the loss's derivative by the stream, over that at the
        end (S + 1).
      similarity: cosine of two tokens of a window (S + 1).
      participation: directions that share the stream's size (S + 1), numbers.
    """

    size: list[Estimate]
    apart: list[float] | None
    written: list[Estimate]
    turned: list[Estimate]
    gradient: list[Estimate]
    similarity: list[Estimate]
    participation: list[float]


def per_window(seen: Walk) -> dict[str, Floats]:
    """Return {name: (W, n)}: the numbers of each window, NaN for one without ordinary tokens."""
    # Of a window's tokens together: where a token is sure of the next, its own is next to nothing.
    squares = np.where(seen.ordinary[..., None], seen.gradients, 0).astype(np.float64) ** 2
    back = np.sqrt(squares.sum(1))
    return {
        "size": _mean(seen, seen.sizes), "turned": _mean(seen, seen.turned),
        "written": _mean(seen, seen.written / seen.sizes[..., :-1]),
        "gradient": back / np.where(back[:, -1:] > 0, back[:, -1:], np.nan),
        "similarity": seen.similarity().T,
    }  # fmt: skip


def by_depth(seen: Walk) -> ByDepth:
    """Return the numbers of a walk by depth."""
    apart = None
    if not seen.ordinary.all():
        apart = [float(x) for x in seen.sizes[~seen.ordinary].max(0)]
    found = {name: [_of(x) for x in values.T] for name, values in per_window(seen).items()}
    return ByDepth(**found, apart=apart, participation=[float(x) for x in seen.participation()])


def loss(seen: Walk) -> Estimate:
    """Return the loss in nats per token, over all tokens."""
    return _of(seen.losses.mean(-1))


def _mean(seen: Walk, values: Any) -> Floats:
    """Return the mean of (B, T, n) over each window's ordinary tokens, (B, n)."""
    count = seen.ordinary.sum(-1)[:, None]
    total = np.where(seen.ordinary[..., None], values, 0).sum(1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _of(values: Any) -> Estimate:
    return estimate([float(x) for x in values if math.isfinite(x)])


def sentences(
    config: DecoderConfig, seen: Walk, numbers: ByDepth, gains: Sequence[BlockGains]
) -> list[str]:
    """Return what was found, the most remarkable first."""
    return [
        outliers(seen), _growth(config, seen, numbers), *_attention(seen), _idle(seen, numbers),
        _way_back(seen, numbers), *_jacobians(gains),
    ]  # fmt: skip


def outliers(seen: Walk) -> str:
    """Say which tokens stand out, and who wrote the largest entry."""
    apart = int((~seen.ordinary).sum())
    if not apart:
        return f"No token's stream is {MASSIVE:g} times the median of its window at any depth."
    first = int((~seen.ordinary[:, 0]).sum())
    found = seen.outliers(1)
    text = (
        f"{counted(apart, 'token')} of {seen.ordinary.size} have a stream of more than {MASSIVE:g}"
        f" times the median of their window ({first} of them the first of a window); they are kept"
        " apart in every average."
    )
    if found:
        wrote, took = found[0]
        text += (
            f" The largest entry, {wrote.after:,.0f}, stands in feature {wrote.feature} of position"
            f" {wrote.position + 1}: {place(wrote)} wrote it (it was {wrote.before:,.1f})"
        )
        text += (
            f" and {place(took)} took it away ({took.before:,.0f} to {took.after:,.1f})." if took
            else "; nothing took half of it away before the end."
        )  # fmt: skip
    return text


def place(write: Any) -> str:
    """Return where an entry was written, in words."""
    names = {"attention": "attention", "mlp": "the MLP", "embedding": "the embedding"}
    name = names.get(write.branch, write.branch)
    return f"{name} of block {write.block}" if write.block else name


def _growth(config: DecoderConfig, seen: Walk, numbers: ByDepth) -> str:
    sizes = [x.mean or math.nan for x in numbers.size]
    start, end = sizes[0], sizes[-1]
    row = config.placement_row
    text = (
        f"Over ordinary tokens the stream's rms goes from {start:.3g} to {end:.3g},"
        f" {end / start:.3g} times."
    )
    normed = any(row.of(name).norms("post_norm", config.depth) for name in config.sublayers)
    squares = np.square(np.where(seen.ordinary[..., None], seen.written, np.nan))
    plain = all(
        row.of(name).at(block, config.depth).keep == 1.0
        for name in config.sublayers for block in (1, config.depth)
    )  # fmt: skip
    if plain and not normed:
        alone = math.sqrt(
            float(np.nanmean(np.square(seen.sizes[..., 0][seen.ordinary])))
            + float(np.nansum(np.nanmean(squares, (0, 1))))
        )
        both = math.sqrt(float(np.mean(np.square(seen.sizes[..., -1][seen.ordinary]))))
        text += (
            f" Were what the sub-layers write at right angles to the stream, it would end at"
            f" {alone:.3g}: they write {'along' if both > alone else 'against'} it"
            f" ({both / alone:.2f} times)."
        )
    grown = np.argmax(np.diff(sizes))
    text += f" It grows most in {_named(seen.branches[grown])}."
    return text


def _named(branch: tuple[int, str]) -> str:
    block, name = branch
    return f"{'attention' if name == 'attention' else 'the MLP'} of block {block}"


def _attention(seen: Walk) -> list[str]:
    if not seen.attention:
        return []
    first, entropy = (seen.attention[k].mean(1) for k in ("first", "entropy"))  # (A, H)
    sinks, narrow = int((first > SINK).sum()), int((entropy < NARROW).sum())
    logit = seen.attention["logit"].max(1)
    block, head = np.unravel_index(int(np.argmax(logit)), logit.shape)
    return [
        f"Of {first.size} heads {sinks} give more than {SINK:.0%} of their attention to the first"
        f" key and {narrow} have less than {NARROW:.0%} of the largest possible entropy; the"
        f" largest logit is {logit.max():.3g} (block {block + 1}, head {head + 1})."
    ]


def _idle(seen: Walk, numbers: ByDepth) -> str:
    small = [i for i, x in enumerate(numbers.written) if x.mean is not None and x.mean < IDLE]
    if small:
        listed = ", ".join(_named(seen.branches[i]) for i in small[:5])
        return f"Below {IDLE:.0%} of the stream writes: {listed}" + ", ..." * (len(small) > 5) + "."
    least = min(range(len(numbers.written)), key=lambda i: numbers.written[i].mean or 0.0)
    return (
        f"Every sub-layer writes more than {IDLE:.0%} of the stream it reads; least does"
        f" {_named(seen.branches[least])}: {numbers.written[least].mean:.1%}."
    )


def _way_back(seen: Walk, numbers: ByDepth) -> str:
    sizes = [x.mean or math.nan for x in numbers.gradient]
    return (
        f"On its way back the gradient by the stream is {sizes[0]:.3g} times at the embedding what"
        f" it is at the end, at most {max(sizes):.3g} times"
        f" and at least {min(sizes):.3g} times in between."
    )


def _jacobians(gains: Sequence[BlockGains]) -> list[str]:
    if not gains:
        return []
    top = max(gains, key=lambda g: g.top.values[0])
    across = [g.radial.tt for g in gains]
    return [
        f"Jacobians of blocks: the largest singular value is {top.top.values[0]:.3g} (block"
        f" {top.block}, within {top.top.bounds[0]:.1g}); a random change across the stream is"
        f" multiplied by {min(across):.3g} to {max(across):.3g} in a block."
    ]
