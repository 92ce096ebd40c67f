"""Attention's softmax answers to the scale of its input, unless a norm takes the scale away."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.figures.sheet import Sheet, SheetPanel
from normjax.decoder import Decoder, DecoderConfig, SubLayer
from normjax.jacobians.blocks import Parts
from normjax.jacobians.branch_jacobians import softmax_jacobian
from normjax.norm_derivatives import Floats
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import BLUE, GREEN, INK, MUTED, ORANGE, PURPLE, VERMILLION

SCALES = np.logspace(-1, 1, 61)
KEYS = 4
CONFIG = DecoderConfig(
    depth=1, width=16, heads=1, mlp="none", positions="none", placement="none", init="fan_in"
)
CASES: dict[str, tuple[dict[str, Any], str, Any]] = {
    "no norm": ({}, ORANGE, "-"),
    "pre-norm": ({"placement": "pre"}, INK, "-"),
    "QK-norm": ({"qk_norm": True}, GREEN, (0, (4, 2))),
}
"""What is changed of the configuration, colour and dash, by name."""


def attention_logits(changes: dict[str, Any], seed: int, scales: Any) -> Floats:
    """Return the logits of the last query when the stream is multiplied by each scale.

    The decoder's own attention sub-layer runs with random weights on a random stream of KEYS
    tokens; its queries and keys, norms included, are recorded on the way.

    Args:
        changes: to :data:`CONFIG`.
        seed: of weights and stream; the same weights for every ``changes``.
        scales: (n,), above 0.

    Returns:
        (n, KEYS) float64, q . k / sqrt(C).
    """
    config = dataclasses.replace(CONFIG, **changes)
    model = Decoder(config, vocabulary=KEYS, window=KEYS)
    parts = Parts(model, model.init(jax.random.key(seed)))
    stream = np.random.default_rng(seed).normal(size=(KEYS, config.width))
    sublayer = SubLayer(parts.config, "attention")
    variables, factors = (each["attention"] for each in parts.layer(1))

    @jax.jit
    def record(h: Any) -> Any:
        return sublayer.apply(
            {"params": variables}, h, factors, {}, capture_intermediates=True,
            mutable=["intermediates"],
        )[1]  # fmt: skip

    with jax.enable_x64(True):
        h = jnp.asarray(np.asarray(scales)[:, None, None] * stream)
        inside = record(h)["intermediates"]["branch"]
        q, k = (_recorded(inside, name).reshape(h.shape) for name in ("query", "key"))
        return np.einsum("nc,nmc->nm", q[:, -1], k) * config.head_width**-0.5


def _recorded(inside: Any, name: str) -> Floats:
    """Return queries or keys as they enter the logits: after their norm where they have one."""
    return np.asarray(inside[f"{name}_norm" if f"{name}_norm" in inside else name]["__call__"][0])


def softmax(logits: Any) -> Floats:
    """Return softmax over the last axis in float64.

    >>> softmax([0.0, 0.0])
    array([0.5, 0.5])
    """
    with jax.enable_x64(True):
        return np.asarray(jax.nn.softmax(jnp.asarray(logits, jnp.float64), axis=-1))


def entropy(p: Floats) -> Floats:
    """Return -sum p ln p in nats, with 0 ln 0 = 0.

    >>> float(entropy(np.array([0.5, 0.5, 0.0])) / np.log(2))
    1.0
    """
    return -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=-1)


def jacobian_size(logits: Floats) -> Floats:
    """Return the largest singular value of the softmax Jacobian at logits (..., n)."""
    return np.linalg.norm(softmax_jacobian(logits), ord=2, axis=(-2, -1))


def attention_and_scale(seed: int = 0) -> Figure:
    """Draw attention's probabilities, entropy and Jacobian against the scale of its input.

    The seed is that of the attention's weights and of the stream.
    """
    logits = {name: attention_logits(case[0], seed, SCALES) for name, case in CASES.items()}
    sheet = Sheet(6.3)
    places = sheet.grid(2, 2)
    _two(sheet.panel(places[0, 0], "Two logits, c² × [1, 2]"))
    _keys(sheet.panel(places[0, 1], f"Real attention over {KEYS} keys"), logits)
    _measure(
        sheet.panel(places[1, 0], "Entropy of the probabilities"), logits, "nats",
        lambda x: entropy(softmax(x)),
    )  # fmt: skip
    _measure(
        sheet.panel(places[1, 1], "Size of the softmax Jacobian"), logits, "‖diag(p) − p pᵀ‖",
        jacobian_size,
    )  # fmt: skip
    caption = (
        "The input of attention is multiplied by c (horizontal, logarithmic); queries and keys "
        "are linear in it, so that the logits qᵀk/√C are multiplied by c². Top left: logits [1, "
        "2] at c = 1 give probabilities 0.27 and 0.73; at c = √10 they are [10, 20] and give "
        "0.00005 and 0.99995. Top right: the same with the decoder's own attention, random "
        "weights, one query over four keys: solid without a norm, dashed with pre-norm, one "
        "colour per key. Bottom left: the entropy −Σ p ln p falls from ln 4 (all keys alike) to "
        "0 (one key takes all). Bottom right: the largest singular value of the softmax's "
        "Jacobian, at most ½, vanishes as one key takes all: then no gradient gets through to "
        "queries and keys. "
        "What follows: without a norm the size of the stream decides how sharply attention "
        "chooses, although it says nothing about which key fits. Pre-norm takes the size away "
        "before queries "
        "and keys are formed, QK-norm after; either way the curves are flat, and sharpness is "
        "left to learned weights."
    )
    return sheet.figure("attention_and_scale", "Attention and the scale of its input", caption)


def _scale_axis(panel: SheetPanel) -> None:
    panel.axes.set_xscale("log")
    panel.axes.set_xticks([0.1, 1, 10], ["0.1", "1", "10"])
    panel.axes.set_xlabel("scale c of the input")


def _two(panel: SheetPanel) -> None:
    p = softmax(SCALES[:, None] ** 2 * np.array([1.0, 2.0]))
    for index, colour in ((0, BLUE), (1, VERMILLION)):
        panel.curve(f"p of logit {index + 1}", np.stack([SCALES, p[:, index]], -1), colour)
    for c, text in ((1.0, "[1, 2]"), (10**0.5, "[10, 20]")):
        q = softmax(c * c * np.array([1.0, 2.0]))
        panel.dots(f"logits {text}", [(c, q[0]), (c, q[1])], INK, ms=5, zorder=5)
        panel.curve(f"line at {text}", [(c, q[0]), (c, q[1])], MUTED, lw=0.8, ls=(0, (2, 2)))
        panel.label((c, 0.5), text, (5, 0))
    panel.label((0.1, 0.5), "second", (6, 9), color=VERMILLION)
    panel.label((0.1, 0.5), "first", (6, -9), color=BLUE)
    panel.axes.set_ylim(-0.03, 1.03)
    panel.axes.set_ylabel("probability")
    _scale_axis(panel)


def _keys(panel: SheetPanel, logits: dict[str, Floats]) -> None:
    bare, normed = softmax(logits["no norm"]), softmax(logits["pre-norm"])
    for key, colour in enumerate((BLUE, VERMILLION, GREEN, PURPLE)):
        panel.curve(f"key {key + 1}, no norm", np.stack([SCALES, bare[:, key]], -1), colour)
        panel.curve(f"key {key + 1}, pre-norm", np.stack([SCALES, normed[:, key]], -1), colour,
                    lw=1.2, ls=(0, (4, 2)))  # fmt: skip
    panel.axes.set_ylim(-0.03, 1.03)
    panel.axes.plot([], [], color=INK, label="no norm")
    panel.axes.plot([], [], color=INK, lw=1.2, ls=(0, (4, 2)), label="pre-norm")
    panel.axes.legend(loc="upper left", fontsize=8, handlelength=2.4)
    _scale_axis(panel)


def _measure(panel: SheetPanel, logits: dict[str, Floats], unit: str, measure: Any) -> None:
    for name, (_, colour, dash) in CASES.items():
        values = measure(logits[name])
        panel.curve(name, np.stack([SCALES, values], -1), colour, ls=dash)
        panel.label((SCALES[-1], values[-1]), name, (4, 0), color=colour)
    panel.axes.set_ylim(-0.03 * panel.axes.get_ylim()[1], 1.03 * panel.axes.get_ylim()[1])
    panel.axes.set_ylabel(unit)
    _scale_axis(panel)
