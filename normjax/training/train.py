"""Training: the state of a run, one step, a chunk of steps on the device, evaluation.

One step function serves every way of running it: under jit, under pmap with runs spread over
devices, and under pmap with each batch split over devices and gradients averaged.

A step whose loss or gradient is not finite changes nothing but a counter. A run that takes
``patience`` of them in a row has diverged: it is frozen at its last finite state, and its first bad
step is recorded.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from normjax import configs
from normjax.configs import field
from normjax.decoder import Decoder, Params
from normjax.errors import UserError
from normjax.training import extremes, optimizer
from normjax.training.extremes import Extremes

PARALLEL = ("runs", "data")
LANES = ("auto", "vmap", "map")
DIAGNOSTICS = ("off", "on")
MAX_STEPS = 2**31 - 1  # steps are counted in int32
MAX_POINTS = 10**6  # of steps that are measured at: each is a line of diagnostics.jsonl
MAX_RATE = 1e30  # of rates, decays and scales: beyond all use, and float32 holds it
INIT_PURPOSE = 0  # keys are fold_in(seed, purpose); further purposes get further numbers


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How a run is trained. Every field is a flag: ``--config.train.steps=2000``."""

    steps: int = field(400, "optimizer steps", least=1, most=MAX_STEPS)
    batch_size: int = field(12, "sequences per step", least=1, most=2**20)
    learning_rate: float = field(1e-3, "peak learning rate", least=0, most=MAX_RATE)
    warmup_steps: int = field(50, "steps of linear warm-up", least=0, most=MAX_STEPS)
    final_fraction: float = field(
        0.1, "learning rate at the end, as a fraction of the peak", least=0, most=1
    )
    weight_decay: float = field(
        0.1, "decoupled weight decay of matrices; gains and biases have none", least=0,
        most=MAX_RATE,
    )  # fmt: skip
    beta1: float = field(0.9, "Adam's decay of the mean gradient", least=0, below=1)
    beta2: float = field(0.99, "Adam's decay of the mean squared gradient", least=0, below=1)
    adam_eps: float = field(1e-8, "Adam's epsilon", above=0, most=1e6)
    clip: float = field(
        1.0, "limit of the gradient's global norm; 0: no clipping", least=0, most=1e30
    )
    init_scale: float = field(1.0, "factor on all initial weight matrices", least=0, most=MAX_RATE)
    patience: int = field(
        20, "non-finite steps in a row after which a run counts as diverged", least=1,
        most=MAX_STEPS,
    )  # fmt: skip
    evaluate_every: int = field(100, "steps between evaluations", least=1, most=MAX_STEPS)
    evaluation_windows: int = field(
        256, "windows per evaluation, evenly spaced; 0: all", least=0, most=2**31 - 1
    )
    final_windows: int = field(
        1024, "windows of the evaluation after the last step; 0: all", least=0, most=2**31 - 1
    )
    chunk_steps: int = field(
        50, "at most so many steps between two looks at the program's host side", least=1,
        most=10**6,
    )  # fmt: skip
    checkpoint_seconds: float = field(
        60.0, "seconds between checkpoints; one is always kept at the end", least=0, most=1e9
    )
    checkpoint_every: int = field(
        0, "also checkpoint at every multiple of so many steps; 0: no", least=0, most=MAX_STEPS
    )
    keep_checkpoints: int = field(
        2, "checkpoints of a run that stay on disk; 0: all", least=0, most=MAX_STEPS
    )
    parallel: str = field(
        "runs", "runs: spread over devices; data: each batch split over devices", choices=PARALLEL
    )
    lanes: str = field(
        "auto", "runs on one device: vmap (together), map (in turn), auto: map on CPU",
        choices=LANES,
    )  # fmt: skip
    diagnostics: str = field(
        "off",
        "on: measure inside the model at some steps, to diagnostics.jsonl",
        choices=DIAGNOSTICS,
    )
    diagnostic_points: int = field(
        0, "steps to measure at, log-spaced; 0: as many as cost at most 3 % of the training",
        least=0, most=MAX_POINTS,
    )  # fmt: skip
    diagnostic_every: int = field(
        0, "also measure at every multiple of so many steps; 0: no", least=0, most=MAX_STEPS
    )


def check(config: TrainConfig, devices: int = 1, prefix: str = "config.train") -> None:
    """Raise :class:`UserError` for training that cannot be done, naming field, value and fix."""
    configs.check(config, prefix)
    c = config
    if c.warmup_steps > c.steps:
        raise UserError(
            f"{prefix}.warmup_steps={c.warmup_steps}: must not pass steps={c.steps};"
            f" pass --{prefix}.warmup_steps={c.steps // 10}"
        )
    if c.diagnostics == "on" and c.diagnostic_every and c.steps // c.diagnostic_every > MAX_POINTS:
        raise UserError(
            f"{prefix}.diagnostic_every={c.diagnostic_every}: measures at"
            f" {c.steps // c.diagnostic_every} of steps={c.steps}, at most at {MAX_POINTS}; pass"
            f" --{prefix}.diagnostic_every={-(-c.steps // MAX_POINTS)}"
        )
    if c.parallel == "data" and c.batch_size % devices:
        raise UserError(
            f"{prefix}.batch_size={c.batch_size}: must be a multiple of the {devices} devices"
            " for parallel=data"
        )


class Hyper(NamedTuple):
    """What may differ between runs of one program."""

    seed: Any
    learning_rate: Any
    weight_decay: Any
    init_scale: Any


class State(NamedTuple):
    """Everything a run needs to go on.

    Attributes:
      params, moments: the model and AdamW's averages.
      step: steps taken, skipped ones included.
      skipped: non-finite steps, which changed nothing.
      bad_streak: how many of the last steps in a row were such.
      diverged_at: the first step (counted from 1) of the streak that ended the run, or -1.
      loss_sum, norm_sum, sum_steps: of the finite steps since the last evaluation.
      extremes: of what every step measures.
    """

    params: Params
    moments: Any
    step: Array
    skipped: Array
    bad_streak: Array
    diverged_at: Array
    loss_sum: Array
    norm_sum: Array
    sum_steps: Array
    extremes: Extremes


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Return -log softmax(logits)[target] in nats: (..., V), (...) -> (...), float32 at least."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # A masked sum instead of an indexed look-up: its derivative is no scatter.
    hit = targets[..., None] == jnp.arange(logits.shape[-1])
    picked = jnp.sum(jnp.where(hit, logits, 0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


def token_losses(model: Decoder, params: Params, windows: Array) -> Array:
    """Return the loss of every predicted token: windows (B, T + 1) -> (B, T)."""
    return cross_entropy(model.apply(params, windows[:, :-1]), windows[:, 1:])


def init_state(model: Decoder, config: TrainConfig, hyper: Hyper) -> State:
    """Return the state before the first step: parameters from the seed, zero moments."""
    key = jax.random.fold_in(_key(hyper.seed), INIT_PURPOSE)
    params = model.init(key)
    scaled = jax.tree.map(
        lambda p, is_matrix: (p * hyper.init_scale).astype(p.dtype) if is_matrix else p,
        params, optimizer.decay_mask(params),
    )  # fmt: skip
    moments = _transformation(config, hyper).init(_wide(scaled))
    zero = jnp.zeros((), jnp.float32)
    count = jnp.zeros((), jnp.int32)
    return State(scaled, moments, count, count, count, count - 1, zero, zero, count,
                 extremes.start(model))  # fmt: skip


def _key(seed: Array) -> Array:
    """Return the Threefry key of a seed; jax.random.key would ask JAX's settings which kind."""
    words = jnp.stack([jnp.zeros((), jnp.uint32), jnp.asarray(seed, jnp.uint32)])
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _transformation(config: TrainConfig, hyper: Hyper) -> optax.GradientTransformation:
    return optimizer.adamw(config.beta1, config.beta2, config.adam_eps, hyper.weight_decay)


def train_step(
    model: Decoder, config: TrainConfig, state: State, hyper: Hyper, windows: Array,
    axis_name: str | None = None, weights: np.ndarray | None = None,
) -> State:  # fmt: skip
    """Take one step on windows (B, T + 1).

    With ``axis_name`` the batch is one part of a larger one that is split over the devices of that
    axis: loss and gradients are averaged over it, and all devices take the same step.

    With ``weights`` (T,), constants of the program, the loss is the weighted mean over target
    positions; without, the plain mean.
    """
    (loss, seen), (raw, meters) = jax.value_and_grad(_watched_loss, 1, has_aux=True)(
        model, (state.params, model.meters() if hasattr(model, "meters") else {}), windows, weights
    )
    if axis_name is not None:
        loss, raw, meters = jax.lax.pmean((loss, raw, meters), axis_name)
        seen = {
            branch: {
                name: (jax.lax.pmax if name == "logit_max" else jax.lax.pmean)(x, axis_name)
                for name, x in own.items()
            }
            for branch, own in seen.items()
        }
    gradients, (updates, rate, moments, norm) = _planned(config, state, hyper, raw)
    values = {}
    if len(seen) > 1:  # there are sub-layers
        values = extremes.inside(seen, meters, state.params, raw, updates, rate)
    params = jax.tree.map(lambda p, u: (p - rate * u).astype(p.dtype), state.params, updates)
    params = getattr(model, "after_step", _unchanged)(params)

    alive = state.diverged_at < 0
    # The norm of finite gradients may overflow; what counts is where the step would lead.
    finite = jnp.isfinite(loss) & _all_finite((gradients, params, moments))
    good = alive & finite
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)  # noqa: E731
    bad = (alive & ~finite).astype(jnp.int32)
    streak = jnp.where(good, 0, state.bad_streak + bad)
    out = streak >= config.patience
    return State(
        params=keep(params, state.params),
        moments=keep(moments, state.moments),
        step=state.step + 1,
        skipped=state.skipped + bad,
        bad_streak=streak,
        # Steps are counted from 1 here: this one is step + 1, and the streak ends with it.
        diverged_at=jnp.where(alive & out, state.step + 2 - streak, state.diverged_at),
        loss_sum=_added(state.loss_sum, jnp.where(good, loss, 0)),
        # A norm beyond float32 is logged as 1e30: the mean of the others stays readable.
        norm_sum=_added(state.norm_sum, jnp.where(good, jnp.minimum(norm, 1e30), 0)),
        sum_steps=state.sum_steps + good.astype(jnp.int32),
        extremes=extremes.taken(
            state.extremes, model, values, loss, norm, state.step, config.warmup_steps, alive
        ),
    )


def _watched_loss(
    model: Any, trained: tuple[Params, Params], windows: Array, weights: np.ndarray | None
) -> tuple[Array, dict[str, Params]]:
    """Return the loss of a step and what was seen on the way; ``trained``: parameters, meters."""
    params, meters = trained
    if not meters:
        return mean_loss(token_losses(model, params, windows), weights), {}
    logits, seen = model.watched(params, windows[:, :-1], meters)
    return mean_loss(cross_entropy(logits, windows[:, 1:]), weights), seen


def _unchanged(params: Params) -> Params:
    return params


class PlannedStep(NamedTuple):
    """What the optimizer would do at a step: p becomes p - rate * update.

    Attributes:
      updates: a tree like the parameters, float32 at least.
      rate: the learning rate of the step.
      moments: AdamW's averages after the step.
      norm: the gradient's global norm before clipping.
    """

    updates: Any
    rate: Array
    moments: Any
    norm: Array


def plan_step(config: TrainConfig, state: State, hyper: Hyper, gradients: Params) -> PlannedStep:
    """Return what the optimizer would do with these gradients at the state's step."""
    return _planned(config, state, hyper, gradients)[1]


def _planned(
    config: TrainConfig, state: State, hyper: Hyper, gradients: Params
) -> tuple[Params, PlannedStep]:
    # AdamW computes in float32 at least: in float16 its eps is zero and its squares vanish.
    gradients, norm = optimizer.clip(_wide(gradients), config.clip)
    updates, moments = _transformation(config, hyper).update(
        gradients, state.moments, _wide(state.params)
    )
    schedule = optimizer.unit_schedule(config.steps, config.warmup_steps, config.final_fraction)
    return gradients, PlannedStep(
        updates, hyper.learning_rate * schedule(state.step), moments, norm
    )


def mean_loss(losses: Array, weights: np.ndarray | None) -> Array:
    """Return the mean of (B, T), with weights (T,) of the positions if there are any."""
    if weights is None:
        return jnp.mean(losses)
    share = jnp.asarray(weights / weights.sum(), losses.dtype)
    return jnp.mean(jnp.sum(losses * share[None, :], axis=-1))


def _added(total: Array, x: Array) -> Array:
    """Return the sum in the dtype of the total, which a float64 model does not change."""
    return total + x.astype(total.dtype)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), tree)


def _all_finite(tree: Any) -> Array:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def train_chunk(
    model: Decoder, config: TrainConfig, state: State, hyper: Hyper, windows: Array, count: Array,
    axis_name: str | None = None, weights: np.ndarray | None = None,
) -> State:  # fmt: skip
    """Take the first ``count`` of the steps whose batches are windows (S, B, T + 1).

    The count is traced: one program serves chunks of every length up to S.
    """
    step = lambda i, s: train_step(  # noqa: E731
        model, config, s, hyper, windows[i], axis_name, weights
    )
    return jax.lax.fori_loop(0, count, step, state)


def evaluate(model: Decoder, params: Params, windows: Array, weights: Array, count: Array) -> Array:
    """Return the summed loss in nats of each of the first ``count`` batches of windows: (N,).

    Args:
      windows: (N, B, T + 1) tokens.
      weights: (N, B, T), 1 for a target that counts, 0 for padding.
      count: how many of the N batches to use (traced); the others give 0.
    """

    def body(i, sums):
        losses = token_losses(model, params, windows[i])
        return sums.at[i].set(jnp.sum(losses * weights[i]).astype(sums.dtype))

    return jax.lax.fori_loop(0, count, body, jnp.zeros(len(windows), jnp.float32))
