"""Faults planted into small trainings, healthy ones beside them, and what the verdicts say.

    python -m tests.planted              the whole table
    python -m tests.planted NAME ...     some faults, and no healthy runs

Every run is trained at the default cadence of diagnostics on a Markov chain whose unigram and
bigram losses are known. A fault is planted by another initial state, another configuration or a
placement of one's own; it is named right where state, cause and place are.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from normjax.decoder import Decoder
from normjax.decoder_config import DecoderConfig
from normjax.diagnostics import log, sampling, verdict
from normjax.diagnostics.evidence import Evidence, Series, gather
from normjax.diagnostics.probe import Probe
from normjax.diagnostics.verdict import Verdict
from normjax.placements import COMMON, PLACEMENTS
from normjax.training import extremes
from normjax.training.cohorts import Cohort
from normjax.training.train import Hyper, TrainConfig

VOCABULARY, WINDOW, DEPTH, HEADS = 12, 16, 3, 2
MODEL = DecoderConfig(depth=DEPTH, width=16, heads=HEADS, mlp="relu", bias=True)
TRAIN = TrainConfig(
    steps=120, batch_size=8, warmup_steps=20, evaluate_every=20, chunk_steps=20, patience=10,
    learning_rate=1e-2, diagnostics="on",
)  # fmt: skip
HEALTHY_SEEDS = 4
"""Of every placement: 52 runs with the 13 of the table."""
Edit = Callable[[dict[str, Any]], None]


def _chain() -> tuple[np.ndarray, np.ndarray]:
    """Return the transitions of the text and how frequent its tokens are."""
    rng = np.random.default_rng(7)
    steps = rng.dirichlet(np.full(VOCABULARY, 0.25), size=VOCABULARY) * 0.95 + 0.05 / VOCABULARY
    share = np.full(VOCABULARY, 1 / VOCABULARY)
    for _ in range(1000):
        share = share @ steps
    return steps, share


STEPS, SHARE = _chain()
REFERENCES = {
    "unigram": float(-(SHARE * np.log(SHARE)).sum()),
    "bigram": float(-(SHARE[:, None] * STEPS * np.log(STEPS)).sum()),
}


def text(seed: int, count: int) -> np.ndarray:
    """Return windows (count, T + 1) of the chain."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(STEPS, axis=1)
    out = np.empty((count, WINDOW + 1), np.int32)
    out[:, 0] = rng.choice(VOCABULARY, count, p=SHARE)
    for t in range(WINDOW):
        drawn = rng.random(count)[:, None]
        out[:, t + 1] = np.minimum((drawn > ends[out[:, t]]).sum(axis=1), VOCABULARY - 1)
    return out


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      state: what the verdict must be.
      cause: the diagnostic that must be named first.
      layer, sublayer, head: its place; None where it has none.
      edit: what is done to the initial parameters.
      model: changes of the decoder's configuration.
      train: changes of the training's.
      rate: peak learning rate, None for the usual one.
      scale: initial scale.
      decay: weight decay.
    """

    state: str
    cause: str
    layer: int | None = None
    sublayer: str | None = None
    head: int | None = None
    edit: Edit | None = None
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    train: dict[str, Any] = dataclasses.field(default_factory=dict)
    rate: float | None = None
    scale: float = 1.0
    decay: float = 0.1


def times(factor: float, *path: str, block: int | None = None, head: int | None = None) -> Edit:
    """Return what multiplies an array of the blocks: of one block, and one head's part of it.

    A path that ends at a group multiplies all matrices in it.
    """

    def edit(params: dict[str, Any]) -> None:
        tree = params["blocks"]
        for name in path[:-1]:
            tree = tree[name]
        last, width = path[-1], MODEL.width // HEADS
        names = [last] if isinstance(tree[last], np.ndarray) else []
        arrays = [tree[n] for n in names] or [
            x
            for p, x in jax.tree_util.tree_flatten_with_path(tree[last])[0]
            if p[-1].key == "kernel"
        ]
        for array in arrays:
            at: Any = (slice(None) if block is None else block - 1,)
            if head is not None:
                own = slice((head - 1) * width, head * width)
                at += (own, slice(None)) if "output" in path else (slice(None), own)
            array[at] *= factor

    return edit


def every(*edits: Edit) -> Edit:
    """Return one after the other."""

    def edit(params: dict[str, Any]) -> None:
        for each in edits:
            each(params)

    return edit


def put(value: float, *path: str, index: Any) -> Edit:
    """Return what sets entries of an array of the blocks."""

    def edit(params: dict[str, Any]) -> None:
        tree = params["blocks"]
        for name in path:
            tree = tree[name]
        tree[index] = value

    return edit


def alike(params: dict[str, Any]) -> None:
    """Give all tokens the embedding of the first."""
    params["embedding"][:] = params["embedding"][0]


def after(factor: float, *path: str, block: int | None, base: str = "pre") -> dict[str, Any]:
    """Return a placement that multiplies a matrix after every step; block None: outside of them."""

    def rule(params: Any) -> Any:
        def changed(keys: Any, leaf: Any) -> Any:
            names = [key.key for key in keys]
            if block is None:
                return leaf * factor if names == list(path) else leaf
            return leaf.at[block - 1].multiply(factor) if names[1:] == list(path) else leaf

        return jax.tree_util.tree_map_with_path(changed, params)

    row = dataclasses.replace(PLACEMENTS[base], after_step=rule, name=f"{base} of its own")
    return {"placement": row}


def keeping(value: float, blocks: Iterable[int], base: str = "none") -> dict[str, Any]:
    """Return a placement whose skip path has another factor in some blocks."""
    chosen = tuple(blocks)
    row = PLACEMENTS[base]
    keep = lambda block, depth: value if block in chosen else 1.0  # noqa: E731
    own = dataclasses.replace(row.attention, keep=keep, write=keep)
    return {"placement": dataclasses.replace(row, attention=own, name=f"{base} of its own")}


ATTENTION, MLP = ("attention", "branch"), ("mlp", "branch")
Q, K, V, O = (  # noqa: E741
    (*ATTENTION, name, "kernel") for name in ("query", "key", "value", "output")
)


def dead_head(block: int, head: int) -> Edit:
    """Return what leaves a head without values and without rows that read it."""
    return every(times(0, *V, block=block, head=head), times(0, *O, block=block, head=head))


def uniform(block: int, head: int | None = None) -> Edit:
    """Return what leaves attention without queries and keys."""
    return every(*(times(0, *path, block=block, head=head) for path in (Q, K)))


FAULTS: dict[str, Fault] = {
    "rate 0": Fault("not learning", "update/block_ratio", 1, "attention", rate=0.0),
    "rate 1e-7": Fault("too slow", "update/block_ratio", 1, "attention", rate=1e-7),
    "rate 1e-5": Fault("too slow", "test/loss", rate=1e-5),
    "clipped to nothing": Fault(
        "too slow", "test/loss", train={"clip": 1e-10, "adam_eps": 1e-8}, rate=1e-3
    ),
    "rate 3": Fault("unstable", "update/block_ratio", 1, "attention", rate=3.0),
    "dead head 1 of block 1": Fault(
        "idle part", "attention/head_share", 1, None, 1, edit=dead_head(1, 1)
    ),
    "dead head 2 of block 3": Fault(
        "idle part", "attention/head_share", 3, None, 2, edit=dead_head(3, 2)
    ),
    "dead attention of block 2": Fault(
        "idle part", "attention/head_share", 2, None, 1,
        edit=every(dead_head(2, 1), dead_head(2, 2)),
    ),
    "dead MLP of block 1": Fault(
        "idle part", "mlp/dead_share", 1, edit=times(0, *MLP, block=1)
    ),
    "dead block 3": Fault(
        "idle part", "mlp/dead_share", 3,
        edit=every(dead_head(3, 1), dead_head(3, 2), times(0, *MLP, block=3)),
    ),
    "relu that never fires in block 2": Fault(
        "idle part", "mlp/dead_share", 2, None,
        edit=put(-100.0, *MLP, "in", "bias", index=1),
    ),
    "uniform attention in block 2": Fault(
        "idle part", "attention/logit_max", 2, None, 1, edit=uniform(2)
    ),
    "uniform attention in block 1": Fault(
        "idle part", "attention/logit_max", 1, None, 1, edit=uniform(1)
    ),
    "uniform head 2 of block 3": Fault(
        "idle part", "attention/logit_max", 3, None, 2, edit=uniform(3, 2)
    ),
    "frozen block 2": Fault(
        "idle part", "update/block_ratio", 2, "attention",
        edit=times(1e6, "attention", "branch", block=2),
        model={"qk_norm": True, "placement": "sandwich", "bias": False}, decay=0.0,
    ),
    "attention of block 2 a thousand times": Fault(
        "drifting", "branch/stream_ratio", 2, "attention", edit=times(1e4, *O, block=2)
    ),
    "MLP of block 3 a thousand times": Fault(
        "drifting", "branch/stream_ratio", 3, "mlp", edit=times(1e5, *MLP, "out", "kernel", block=3)
    ),
    "MLP of block 1 a thousand times": Fault(
        "drifting", "branch/stream_ratio", 1, "mlp", edit=times(1e5, *MLP, "out", "kernel", block=1)
    ),
    "queries of block 1 a million times": Fault(
        "drifting", "attention/logit_max", 1, None, 1, edit=times(1e8, *Q, block=1)
    ),
    "queries of block 3, head 2 a thousand times": Fault(
        "drifting", "attention/logit_max", 3, None, 2, edit=times(1e5, *Q, block=3, head=2)
    ),
    "gain of block 2 at 40": Fault(
        "drifting", "gain/max", 2, None, edit=put(40.0, "mlp", "pre_norm", "gain", index=(1, 3))
    ),
    "gain of block 3 at -40": Fault(
        "drifting", "gain/min", 3, None,
        edit=put(-40.0, "attention", "pre_norm", "gain", index=(2, 3)),
    ),
    "tiny matrices in the MLP of block 2": Fault(
        "drifting", "update/block_ratio", 2, "mlp", edit=times(1e-3, *MLP, block=2)
    ),
    "tiny matrices in the attention of block 3": Fault(
        "drifting", "update/block_ratio", 3, "attention", edit=times(1e-3, *ATTENTION, block=3)
    ),
    "block 1 attenuates": Fault(
        "not learning", "residual/depth_ratio", 1, "attention", model=keeping(1e-4, [1])
    ),
    "block 2 attenuates": Fault(
        "not learning", "residual/depth_ratio", 2, "attention", model=keeping(1e-4, [2])
    ),
    "blocks 1 and 2 attenuate": Fault(
        "not learning", "residual/depth_ratio", 1, "attention", model=keeping(1e-2, [1, 2])
    ),
    "block 3 explodes": Fault(
        "unstable", "residual/depth_ratio", 3, "attention", model=keeping(1e4, [3])
    ),
    "the stream grows in block 1": Fault(
        "drifting", "residual/rms_after", 1, "mlp",
        model=after(1.035, *MLP, "out", "kernel", block=1),
    ),
    "the stream grows in block 3": Fault(
        "drifting", "residual/rms_after", 3, "attention",
        model=after(1.09, *O, block=3),
    ),
    "logits grow in block 2": Fault(
        "drifting", "attention/logit_max", 2, None, 1, model=after(1.1, *Q, block=2)
    ),
    "NaN in block 2": Fault(
        "diverged", "branch/rms", 2, "attention", edit=put(np.nan, *O, index=(1, 0, 0))
    ),
    "MLP of block 2 held at 0": Fault(
        "idle part", "branch/stream_ratio", 2, "mlp",
        edit=times(0, *MLP, "out", "kernel", block=2),
        model={"bias": False, **after(0.0, *MLP, "out", "kernel", block=2)},
    ),
    "all tokens alike": Fault(
        "drifting", "residual/token_similarity", 1, "attention", edit=alike
    ),
    "the embedding grows": Fault(
        "unstable", "residual/rms_before", 1, "attention",
        model=after(1.15, "embedding", block=None),
    ),
    "matrices of 0": Fault("not learning", "residual/rms_before", 1, "attention", scale=0.0),
    "no residual path, matrices of 0.01": Fault(
        "not learning", "residual/rms_before", 1, "mlp", model={"residual": False}, scale=1e-2
    ),
}  # fmt: skip


# --- runs -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One run: its name, what is planted (None: healthy), its seed and its placement."""

    name: str
    fault: Fault
    seed: int = 0


def _config(case: Case) -> tuple[DecoderConfig, TrainConfig]:
    model = dataclasses.replace(MODEL, **case.fault.model)
    return model, dataclasses.replace(TRAIN, **case.fault.train)


def healthy(seeds: int = HEALTHY_SEEDS) -> list[Case]:
    """Return healthy runs of one placement of each kind."""
    return [
        Case(f"{name}, seed {seed}", Fault("well behaved", "", model={"placement": name}), seed)
        for name in COMMON for seed in range(1, seeds + 1)
    ]  # fmt: skip


def evidence(cases: Iterable[Case], points: int = 0) -> Iterator[tuple[Case, Evidence]]:
    """Train cases, those of one program together; yield what is known of each."""
    groups: dict[Any, list[Case]] = {}
    for case in cases:
        model, config = _config(case)
        groups.setdefault((repr(sorted(case.fault.model.items(), key=str)), config), []).append(
            case
        )
    for group in groups.values():
        model, config = _config(group[0])
        config = dataclasses.replace(config, diagnostic_points=points)
        yield from zip(
            group, _trained(Decoder(model, VOCABULARY, WINDOW), config, group), strict=True
        )


def _trained(model: Decoder, config: TrainConfig, cases: list[Case]) -> list[Evidence]:
    hypers = [
        Hyper(c.seed, config.learning_rate if c.fault.rate is None else c.fault.rate,
              c.fault.decay, c.fault.scale) for c in cases
    ]  # fmt: skip
    cohort = Cohort(model, config, hypers, jax.local_devices()[:1])
    cohort.start()
    states = [cohort.member_state(i) for i in range(len(cases))]
    for i, case in enumerate(cases):
        if case.fault.edit:
            params = jax.tree.map(np.array, states[i].params)
            case.fault.edit(params)
            states[i] = states[i]._replace(params=params)
    cohort.start(states)
    windows = np.stack([
        text(1000 + c.seed, config.steps * config.batch_size).reshape(
            config.steps, config.batch_size, -1
        ) for c in cases
    ])  # fmt: skip
    held = text(1, 256).reshape(32, 8, -1)
    weights = np.ones((32, 8, WINDOW), np.float32)
    measure = cohort.measurement(Probe(model, config).measure)
    sampled, samples = sampling.sampled_steps(config), [[] for _ in cases]

    def mean(first: int, last: int) -> np.ndarray:
        sums = cohort.evaluate(held, weights, last)[:, first:]
        return sums.sum(axis=1) / weights[first:last].sum()

    losses, at = [mean(0, 16)], [0]
    step, every = 0, config.evaluate_every
    while step < config.steps:
        if step in sampled:
            for i in range(len(cases)):
                values = measure(windows[:, step])
                samples[i].append((step, {k: v[i] for k, v in values.items()}))
        until = min(x for x in (*sampled, (step // every + 1) * every, config.steps) if x > step)
        batch = np.zeros((len(cases), config.chunk_steps, *windows.shape[2:]), np.int32)
        batch[:, : until - step] = windows[:, step:until]
        cohort.advance(batch, until - step)
        step = until
        if step % every == 0 or step == config.steps:
            at.append(step)
            losses.append(mean(0, 16))
    tested = mean(16, 32)
    out, counters = [], cohort.counters()
    for i, found in enumerate(cohort.extremes()):
        line = log.extremes_line(step, found, extremes.expected(model))
        known, expected = log.extremes_of(line)
        bad = int(counters["diverged_at"][i])
        out.append(Evidence(
            gather(samples[i]),
            metrics={
                "validation/loss": Series(
                    "validation/loss", np.array(at), np.array([float(x[i]) for x in losses])
                ),
                "test/loss": Series("test/loss", np.array(at[-1:]), np.array([float(tested[i])])),
            },
            skipped=(np.array(at[-1:]), counters["skipped"][i : i + 1]),
            state="done" if bad < 0 else "diverged", diverged_at=None if bad < 0 else bad,
            sublayers=model.config.sublayers, warmup=config.warmup_steps, steps=config.steps,
            references=REFERENCES, extremes=known, expected=expected,
        ))  # fmt: skip
    return out


def named_right(fault: Fault, found: Verdict) -> bool:
    """Whether state, cause and place of a verdict are those of a fault."""
    first = found.first
    if first is None:
        return False
    cause = first.diagnostic.split("[")[0]
    place = (first.layer, first.sublayer, first.head)
    return (found.state, cause) == (fault.state, fault.cause) and place == (
        fault.layer, fault.sublayer, fault.head,
    )  # fmt: skip


def main() -> None:
    """Print the table and its counts."""
    chosen = sys.argv[1:] or list(FAULTS)
    cases = [Case(name, FAULTS[name]) for name in chosen]
    right = 0
    for case, found in evidence(cases):
        judged = verdict.judge(found)
        ok = named_right(case.fault, judged)
        right += ok
        print(f"{'right' if ok else 'WRONG':<6}{case.name}\n      {judged.sentence}", flush=True)
    print(f"{right} of {len(cases)} planted faults named right: state, cause and place")
    if sys.argv[1:]:
        return
    alarms = [
        f"{case.name}: {judged.sentence}" for case, found in evidence(healthy())
        if (judged := verdict.judge(found)).state != "well behaved"
    ]  # fmt: skip
    print("\n".join(alarms))
    print(
        f"{len(alarms)} false alarms on {len(healthy())} healthy runs of {len(PLACEMENTS)}"
        " placements"
    )


if __name__ == "__main__":
    main()
