"""A grid: arms (what is changed) times seeds and rates, as runs, grouped into cohorts.

A *arm* changes the program: placement, depth, a removed part. Its runs differ in what is an array:
seed, learning rate, weight decay, initial scale. Runs of one program form a *cohort* and train
together. A run's name ends in a hash of all that defines its result, so that a grid started again
knows what it has.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from normjax import configs, decoder_config, plugins
from normjax.configs import field
from normjax.data import corpora
from normjax.decoder import Decoder
from normjax.decoder_config import MAX_DEPTH, DecoderConfig
from normjax.diagnostics import bands
from normjax.diagnostics.bands import VerdictConfig
from normjax.errors import UserError, suggest
from normjax.runs import files, run_folder, segments
from normjax.training import train
from normjax.training.train import Hyper, TrainConfig

C = TypeVar("C")
FORMAT = run_folder.FORMAT
MAX_SEED = 2**31 - 1
MAX_SEEDS = 10_000
MAX_RUNS = 100_000
"""Of one grid: each has a folder and a line in grid.json."""
# How a run is computed, not what it computes: not part of its name.
MANNER = tuple(
    name.removeprefix("config.train.")
    for name in segments.CLASSES
    if name.startswith("config.train.")
)


@dataclasses.dataclass(frozen=True)
class GridConfig:
    """Which runs there are. Empty lists stand for the one value in ``config.train``."""

    seeds: int = field(
        3, "runs per variant, with seeds first_seed, first_seed + 1, ...", least=1, most=MAX_SEEDS
    )
    first_seed: int = field(0, "the first seed", least=0, most=MAX_SEED)
    arms: tuple[str, ...] = field((), "names of the arms to run; empty: all")
    learning_rates: tuple[float, ...] = field(
        (),
        "peak learning rates; empty: train.learning_rate",
        least=0,
        most=train.MAX_RATE,
        distinct=True,
    )
    weight_decays: tuple[float, ...] = field(
        (), "weight decays; empty: train.weight_decay", least=0, most=train.MAX_RATE, distinct=True
    )
    init_scales: tuple[float, ...] = field(
        (),
        "initialization scales; empty: train.init_scale",
        least=0,
        most=train.MAX_RATE,
        distinct=True,
    )
    depths: tuple[int, ...] = field(
        (), "depths, where the experiment varies them; empty: its own", least=1, most=MAX_DEPTH
    )


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """All that an experiment can be told."""

    model: DecoderConfig = DecoderConfig()
    data: corpora.DataConfig = corpora.DataConfig()
    train: TrainConfig = TrainConfig()
    grid: GridConfig = GridConfig()
    verdict: VerdictConfig = VerdictConfig()


@dataclasses.dataclass(frozen=True)
class SweepAxis:
    """The number that an experiment varies besides the series, such as depth."""

    name: str
    label: str
    scale: str = "linear"


@dataclasses.dataclass(frozen=True)
class Arm:
    """One program of the grid: a name and what it changes in the configuration.

    ``condition`` names the circumstances that it shares with the arms that it is compared with, and
    ``setting`` is what they, or a rate of its own, change in the configuration besides.
    """

    name: str
    title: str
    description: str
    changes: Mapping[str, Any]
    series: str = ""
    x: float | None = None
    colour: str = ""
    condition: str = ""
    setting: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def configured(self, config: C) -> C:
        """Return a configuration with all that the arm changes."""
        return configs.replace(config, {**self.setting, **self.changes})


@dataclasses.dataclass(frozen=True)
class Question:
    """What an experiment asks, as its report will print it."""

    experiment: str
    preset: str
    title: str
    question: str
    hypothesis: str
    baseline: str
    notes: tuple[str, ...] = ()
    x: SweepAxis | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run."""

    id: str
    arm: Arm
    config: ExperimentConfig
    hyper: Hyper

    def record(self) -> dict[str, Any]:
        """Return the run as grid.json lists it."""
        seed, rate, decay, scale = self.hyper
        return {
            "id": self.id, "arm": self.arm.name, "seed": seed, "learning_rate": rate,
            "weight_decay": decay, "init_scale": scale, "steps": self.config.train.steps,
        }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CohortPlan:
    """Runs that share one program."""

    runs: tuple[Run, ...]

    @property
    def config(self) -> ExperimentConfig:
        """The configuration that the runs share."""
        return self.runs[0].config

    @property
    def name(self) -> str:
        """The names of its arms."""
        return " + ".join(dict.fromkeys(run.arm.name for run in self.runs))

    def model(self, vocabulary: int) -> Decoder:
        """The decoder that the runs train."""
        return Decoder(self.config.model, vocabulary, self.config.data.window)


def select(arms: Sequence[Arm], names: Sequence[str]) -> list[Arm]:
    """Return the arms whose series or name is listed; all of them for an empty list."""
    if not names:
        return list(arms)
    known = list(dict.fromkeys(n for arm in arms for n in (arm.series or arm.name, arm.name)))
    for name in names:
        if name not in known:
            raise UserError(
                f"config.grid.arms={name}: must be among {', '.join(known)}{suggest(name, known)}"
            )
    return [arm for arm in arms if {arm.name, arm.series} & set(names)]


def check(config: ExperimentConfig, arms: Sequence[Arm], devices: int) -> None:
    """Raise :class:`UserError` for anything in the grid that cannot be run."""
    g = config.grid
    configs.check(config)
    if g.first_seed > MAX_SEED - g.seeds:
        raise UserError(
            f"config.grid.first_seed={g.first_seed}: must be from 0 to {MAX_SEED - g.seeds} with"
            f" seeds={g.seeds}; pass --config.grid.first_seed=0"
        )
    lists = {
        "seeds": g.seeds, "learning_rates": len(g.learning_rates) or 1,
        "weight_decays": len(g.weight_decays) or 1, "init_scales": len(g.init_scales) or 1,
    }  # fmt: skip
    runs = len(arms) * math.prod(lists.values())
    if runs > MAX_RUNS:
        name = max(lists, key=lambda key: lists[key])
        raise UserError(
            f"config.grid.{name}={configs.shown(getattr(g, name))[:80]}: {runs} runs in all, at"
            f" most {MAX_RUNS} make a grid; list fewer, or divide it over several workdirs"
        )
    bands.adjusted(config.verdict.bands)
    for arm in arms:
        changed = arm.configured(config)
        decoder_config.check(changed.model)
        train.check(changed.train, devices if changed.train.parallel == "data" else 1)


def check_format(workdir: Path) -> None:
    """Raise :class:`UserError` where a workdir holds the grid of another version."""
    try:  # earlier versions sealed nothing
        plan = files.parsed(files.read_bytes(workdir / "grid.json") or b"{}")
    except ValueError:
        return
    found = plan.get("format", FORMAT) if isinstance(plan, dict) else FORMAT
    if found != FORMAT:
        raise UserError(
            f"workdir={workdir}: its grid.json has format {found!r}, this version writes format"
            f" {FORMAT}; use another --workdir, or go on with the version that began it"
        )


def plan(config: ExperimentConfig, arms: Sequence[Arm], fingerprint: str) -> list[CohortPlan]:
    """Return the cohorts of a grid, in the order of its arms.

    Args:
      config: the experiment's configuration, which each arm changes.
      arms: what is varied besides seeds and rates.
      fingerprint: of the corpus; it is part of what defines a run.
    """
    g, groups = config.grid, {}
    for arm in arms:
        changed = arm.configured(config)
        t = changed.train
        hypers = [
            Hyper(g.first_seed + seed, rate, decay, scale)
            for rate, decay, scale, seed in itertools.product(
                g.learning_rates or (t.learning_rate,), g.weight_decays or (t.weight_decay,),
                g.init_scales or (t.init_scale,), range(g.seeds),
            )
        ]  # fmt: skip
        shared = _identity(changed, hypers[0], fingerprint)
        shared.pop("hyper")
        group = groups.setdefault(configs.digest(shared, 64), [])
        for hyper in hypers:
            name = configs.digest(shared | {"hyper": list(hyper)})
            group.append(Run(f"{arm.name}-s{hyper.seed}-{name}", arm, changed, hyper))
    return [CohortPlan(tuple(runs)) for runs in groups.values()]


def identity(question: Question, config: ExperimentConfig, fingerprint: str) -> str:
    """Return the SHA-256 of what a grid asks: question, configuration, corpus, rates.

    Its extent (seeds, arms, depths) and how it is computed are no part of it: a grid that is
    given more seeds asks the same.
    """
    asked = _identity(config, Hyper(0, 0.0, 0.0, 0.0), fingerprint)
    asked.pop("hyper")
    t = config.train
    own = {f.name for f in dataclasses.fields(ExperimentConfig)}
    for part in dataclasses.fields(config):
        if part.name not in own:  # of this experiment alone
            asked[part.name] = configs.to_dict(getattr(config, part.name))
    return configs.digest(
        asked | {
            "experiment": question.experiment, "question": question.question,
            "baseline": question.baseline,
            "learning_rates": list(config.grid.learning_rates or (t.learning_rate,)),
            "weight_decays": list(config.grid.weight_decays or (t.weight_decay,)),
            "init_scales": list(config.grid.init_scales or (t.init_scale,)),
        }, 64,
    )  # fmt: skip


def defines(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a run's record that its numbers depend on."""
    train_config = {k: v for k, v in (record.get("train") or {}).items() if k not in MANNER}
    data = record.get("data") or {}
    return {
        "model": record.get("model"), "train": train_config, "hyper": record.get("hyper"),
        "data": {k: data.get(k) for k in ("fingerprint", "window")},
    }  # fmt: skip


def _identity(config: ExperimentConfig, hyper: Hyper, fingerprint: str) -> dict[str, Any]:
    train_config = configs.to_dict(config.train)
    for name in (*MANNER, "learning_rate", "weight_decay", "init_scale"):
        train_config.pop(name)
    return {
        "format": FORMAT, "model": config.model.identity(), "train": train_config,
        "corpus": fingerprint, "window": config.data.window, "hyper": list(hyper),
        **plugins.entry(),
    }  # fmt: skip
