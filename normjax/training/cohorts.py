"""Many runs at once: a cohort trains in lockstep, spread over devices and over lanes within each.

All ways give the losses that each run has alone, up to the last bits of float32: another number of
devices or lanes is another program. Arrays of a cohort have two leading axes, (devices, lanes).
``jax.pmap`` carries the first one; it is kept outermost, and the state stays on the devices between
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from normjax.decoder import Decoder
from normjax.training import extremes, train
from normjax.training.train import Hyper, State, TrainConfig

BATCH_AXIS = "batch"
Axes = tuple[int | None, ...]


def _over_lanes(function: Callable[..., Any], in_axes: Axes, together: bool) -> Callable[..., Any]:
    """Map a function over the leading axis of the arguments whose axis is 0.

    By vmap where ``together``, else one after the other; an axis of one is dropped, which keeps the
    plain program.
    """

    def mapped(*arguments):
        lanes = [a for a, axis in zip(arguments, in_axes, strict=True) if axis == 0]

        def one(lane):
            rest = iter(lane)
            return function(*(next(rest) if axis == 0 else a
                              for a, axis in zip(arguments, in_axes, strict=True)))  # fmt: skip

        if jax.tree.leaves(lanes)[0].shape[0] == 1:
            return jax.tree.map(lambda x: x[None], one(jax.tree.map(lambda x: x[0], lanes)))
        return jax.vmap(one)(lanes) if together else jax.lax.map(one, lanes)

    return mapped


def _in_place_of(old: jax.Array, new: np.ndarray) -> jax.Array:
    """Put a host array where an array of the state lies; elsewhere it would compile anew."""
    return jax.device_put(new, old.sharding)


def devices_for(config: TrainConfig, available: int, runs: int) -> int:
    """Return how many devices a cohort of so many runs takes."""
    return available if config.parallel == "data" else min(available, runs)


class Cohort:
    """Runs of one program, trained in lockstep on the given devices.

    With parallel="runs" member i sits on device i // lanes in lane i % lanes, and lanes left over
    repeat the last member; with parallel="data" every device holds all members and its part of each
    batch. A cohort of ``planned`` runs, of which some are left to train, takes the devices that all
    of them would take: how a device splits its sums depends on how many devices there are, so a run
    that goes on alone has the numbers that it has beside the others, bit for bit.

    ``target_weights`` (T,) are constants of the training program: the weight of each target
    position in the loss; None weighs all alike.

    Lanes of one device run under vmap on an accelerator; on a CPU they run in turn, which is faster
    there (a batch of small matrix products is slower than the products one by one).
    """

    def __init__(
        self, model: Decoder, config: TrainConfig, members: Sequence[Hyper],
        devices: Sequence[Any] | None = None, target_weights: np.ndarray | None = None,
        planned: int = 1,
    ):  # fmt: skip
        available = list(jax.local_devices() if devices is None else devices)
        self.model, self.config, self.size = model, config, len(members)
        self._split_batch = config.parallel == "data" and len(available) > 1
        wanted = devices_for(config, len(available), max(self.size, planned))
        self.devices = available[:wanted]
        self.lanes = self.size if self._split_batch else -(-self.size // wanted)
        train.check(config, wanted if self._split_batch else 1)
        self.enlist(members)
        axis = BATCH_AXIS if self._split_batch else None

        def chunk(state, hyper, windows, count):
            return train.train_chunk(
                model, config, state, hyper, windows, count, axis, target_weights
            )

        def evaluate(params, windows, weights, count):
            return train.evaluate(model, params, windows, weights, count)

        self._init = self._mapped(lambda hyper: train.init_state(model, config, hyper), (0,))
        self._chunk = self._mapped(chunk, (0, 0, 0, None), donate=(0,))
        self._evaluate = self._mapped(evaluate, (0, None, None, None))
        self._state: State | None = None

    def enlist(self, members: Sequence[Hyper]) -> None:
        """Take as many other members, before a start; the compiled programs are kept."""
        self._hyper = self._place(
            [Hyper(np.uint32(h.seed), *(np.float32(x) for x in h[1:])) for h in members]
        )
        if len(self.devices) == 1:  # what a program is given first decides where all of it runs
            self._hyper = jax.device_put(self._hyper, self.devices[0])

    def _mapped(self, function, in_axes: Axes, donate: tuple[int, ...] = ()):
        together = self.config.lanes == "vmap" or (
            self.config.lanes == "auto" and self.devices[0].platform != "cpu"
        )
        lanes = _over_lanes(function, in_axes, together)
        if len(self.devices) == 1:
            return jax.jit(_over_lanes(lanes, in_axes, together), donate_argnums=donate)
        return jax.pmap(
            lanes, axis_name=BATCH_AXIS, in_axes=in_axes, devices=self.devices,
            donate_argnums=donate,
        )  # fmt: skip

    def _layout(self) -> list[list[int]]:
        """Return the member of every device and lane."""
        if self._split_batch:
            return [list(range(self.size)) for _ in self.devices]
        flat = [min(i, self.size - 1) for i in range(len(self.devices) * self.lanes)]
        return [flat[d * self.lanes : (d + 1) * self.lanes] for d in range(len(self.devices))]

    def _place(self, trees: Sequence[Any]) -> Any:
        """Stack one tree per member into (devices, lanes, ...) arrays on the host."""

        def stack(*leaves):
            rows = [np.stack([np.asarray(leaves[i]) for i in row]) for row in self._layout()]
            return np.stack(rows)

        return jax.tree.map(stack, *trees)

    def _members(self, array: Any) -> np.ndarray:
        """Return (members, ...) from (devices, lanes, ...)."""
        host = np.asarray(array)
        if self._split_batch:
            return host[0]
        return host.reshape(-1, *host.shape[2:])[: self.size]

    @property
    def state(self) -> State:
        """The state of all lanes, on the devices."""
        if self._state is None:
            raise RuntimeError("the cohort has not been started: call start() first")
        return self._state

    def start(self, states: Sequence[State] | None = None) -> None:
        """Begin from the seeds, or from one saved state per member."""
        self._state = self._init(self._hyper)
        if states is not None:
            self._state = jax.tree.map(_in_place_of, self._state, self._place(states))

    def advance(self, windows: np.ndarray, count: int) -> None:
        """Take ``count`` steps on windows (members, S, B, T + 1), the batches of up to S steps.

        With count 0 the program is compiled and nothing else happens.
        """
        batches = self._place(list(windows))
        if self._split_batch:  # equal on all devices so far: give each its part of the batch axis
            batches = np.stack(np.split(batches[0], len(self.devices), axis=2))
        self._state = self._chunk(self.state, self._hyper, batches, np.int32(count))
        jax.block_until_ready(self._state)

    def evaluate(self, windows: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
        """Return (members, N): the summed losses of each of ``count`` batches of (N, B, T + 1)."""
        return self._members(self._evaluate(self.state.params, windows, weights, np.int32(count)))

    def measurement(
        self, function: Callable[[State, Hyper, Any], dict[str, Any]]
    ) -> Callable[[np.ndarray], dict[str, np.ndarray]]:
        """Return a program that applies a function to every member where the cohort stands.

        Args:
          function: ``(state, hyper, windows (B, T + 1)) -> {name: array}`` of one run.

        Returns:
          ``windows (members, B, T + 1) -> {name: (members, ...)}``. The state stays as it is; with
          a batch split over devices every device computes all of it.
        """
        program = self._mapped(function, (0, 0, 0))

        def measure(windows: np.ndarray) -> dict[str, np.ndarray]:
            out = program(self.state, self._hyper, self._place(list(windows)))
            return {name: self._members(value) for name, value in out.items()}

        return measure

    def counters(self) -> dict[str, np.ndarray]:
        """Return the small parts of the state, one entry per member."""
        names = [name for name in State._fields if name not in ("params", "moments", "extremes")]
        return {name: self._members(getattr(self.state, name)) for name in names}

    def extremes(self) -> list[dict[str, dict[str, np.ndarray]]]:
        """Return what the steps so far measured, one entry per member."""
        found = jax.tree.map(self._members, self.state.extremes)
        return [
            extremes.by_name(self.model, jax.tree.map(lambda x, i=i: x[i], found))
            for i in range(self.size)
        ]

    def reset_sums(self) -> None:
        """Zero what the state sums up between evaluations."""
        sums = {name: getattr(self.state, name) for name in ("loss_sum", "norm_sum", "sum_steps")}
        zeros: Any = {name: _in_place_of(x, np.zeros(x.shape, x.dtype)) for name, x in sums.items()}
        self._state = self.state._replace(**zeros)

    def member_state(self, member: int) -> State:
        """Return the whole state of one member as arrays on the host."""
        return jax.tree.map(lambda x: self._members(x)[member], self.state)
