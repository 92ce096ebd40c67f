"""Diagnostics, verdicts and autopsies of a workdir's runs, and their medians over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from normjax import configs
from normjax.diagnostics import autopsy_record, definitions, evidence, self_test, verdict
from normjax.diagnostics.autopsy_record import Autopsy
from normjax.diagnostics.bands import VerdictConfig
from normjax.diagnostics.events import Event
from normjax.diagnostics.evidence import Evidence, Series
from normjax.diagnostics.self_test import SelfTest
from normjax.diagnostics.verdict import Verdict
from normjax.reporting import tables
from normjax.reporting.palette import Look
from normjax.reporting.results import Results, RunResult, Variant
from normjax.reporting.tables import Column, Table, dotted, stacked, tag
from normjax.runs.run_folder import run_folder

CHOSEN = (
    "residual/rms_after", "gradient/stream_rms", "attention/logit_max", "attention/entropy_share",
    "residual/token_similarity", "branch/stream_ratio",
)  # fmt: skip
"""The diagnostics that a page shows first."""
SMALLEST_HEAD = ("attention/entropy", "attention/entropy_share")
"""Of these the smallest over the heads is drawn, of the other diagnostics of heads the largest."""


@dataclass(frozen=True)
class Diagnostics:
    """What the runs of a workdir measured inside, by the id of the run.

    Attributes:
      found: all evidence.
      verdicts: on every run that was started.
      autopsies: of diverged runs, with their dense diagnostics.
      self_test: of the instrument, where one applied.
    """

    found: dict[str, Evidence]
    verdicts: dict[str, Verdict]
    autopsies: dict[str, tuple[Autopsy, dict[str, Series]]]
    self_test: SelfTest | None = None

    @property
    def known(self) -> bool:
        """Whether any run has diagnostics, of samples or of every step."""
        return any(each.series or each.extremes for each in self.found.values())

    @property
    def measured(self) -> bool:
        """Whether any run has sampled diagnostics."""
        return any(each.series for each in self.found.values())

    def names(self, each: str = "") -> list[str]:
        """Return the diagnostics that some run has and that have layers, in the order of the table.

        With ``each``, "parameter" or "norm", those of parameters or norms, with brackets.
        """
        have = {name for one in self.found.values() for name in one.series}
        order = list(definitions.DIAGNOSTICS)
        rows = [(name, definitions.DIAGNOSTICS.get(definitions.split(name)[0])) for name in have]
        kept = [n for n, row in rows if row and row.each == each and "layer" in row.axes]
        return sorted(kept, key=lambda n: (order.index(definitions.split(n)[0]), n))


@dataclass(frozen=True)
class Grid:
    """A diagnostic of a variant: medians over its runs, by layer and step.

    Attributes:
      steps: (n,).
      values: (n, rows): median over the runs' finite values; NaN without one.
      lost: (n, rows): whether a run measured something that is not finite there.
      rows: (block from 1, sub-layer or "") from input to output.
    """

    steps: np.ndarray
    values: np.ndarray
    lost: np.ndarray
    rows: tuple[tuple[int, str], ...]


def load(results: Results) -> Diagnostics:
    """Return what the run folders of a workdir hold; damaged or missing files are less of it.

    Raises:
      UserError: a band in the plan's configuration is none.
    """
    settings = (results.plan.get("config") or {}).get("verdict")
    known = isinstance(settings, dict)
    config = configs.from_dict(VerdictConfig(), settings) if known else VerdictConfig()
    found, verdicts, autopsies = {}, {}, {}
    references = evidence.references_of(results.plan)
    for run in results.runs:
        folder = run_folder(results.workdir, run.id)
        if folder.is_dir():
            found[run.id] = evidence.read(folder, references)
            verdicts[run.id] = verdict.judge(found[run.id], config)
            if (done := autopsy_record.read(folder)) is not None:
                autopsies[run.id] = done
    model = (results.plan.get("config") or {}).get("model") or {}
    tested = self_test.run_test(found, str(model.get("dtype", "float32")))
    return Diagnostics(found, verdicts, autopsies, tested)


def slug(name: str) -> str:
    """Return a diagnostic's name as part of a file name.

    >>> slug("gain/max[mlp.pre_norm]")
    'gain_max_mlp_pre_norm'
    """
    return "".join(c if c.isalnum() else "_" for c in name).strip("_")


def short_title(name: str) -> str:
    """Return a diagnostic's title with its unit, short enough for the margin of a figure.

    >>> short_title("attention/entropy_share"), short_title("attention/entropy")
    ('attention entropy share', 'attention entropy (nats)')
    """
    row = definitions.diagnostic(name)
    title = row.title.replace(", of the largest possible", " share")
    return title + (f" ({row.unit})" if row.unit else "")


def write(results: Results, diagnostics: Diagnostics) -> None:
    """Write ``verdicts.csv``, and ``verdict.json`` into each run's folder."""
    for run_id, each in diagnostics.verdicts.items():
        verdict.write(run_folder(results.workdir, run_id), each)
    tables.write_text(
        results.workdir / "verdicts.csv", VERDICTS.csv(judged(results, diagnostics, {}))
    )


class JudgedRun(NamedTuple):
    """A run with its verdict, a row of :data:`VERDICTS`; ``verdict`` is None without a folder."""

    run: RunResult
    series: str
    verdict: Verdict | None
    colour: str = ""

    @property
    def first(self) -> Event | None:
        """What happened first."""
        return None if self.verdict is None else self.verdict.first


def judged(
    results: Results, diagnostics: Diagnostics, looks: Mapping[str, Look]
) -> list[JudgedRun]:
    """Return all runs with their verdicts; ``looks`` may be empty."""
    series = {arm.name: arm.series for arm in results.arms}
    colours = {name: look.colour for name, look in looks.items()}
    named = [(run, series[run.arm]) for run in results.runs]
    return [JudgedRun(r, n, diagnostics.verdicts.get(r.id), colours.get(n, "")) for r, n in named]


MARKS = {
    "well behaved": "●", "idle part": "◔", "drifting": "◐", "too slow": "▷", "not learning": "■",
    "unstable": "▲", "diverged": "✕", "unknown": "○",
}  # fmt: skip
_FIRST = (
    *("kind", "diagnostic", "step", "layer", "sublayer", "head", "value", "limit"),
    *("against", "factor"),
)


def _where(row: JudgedRun) -> Markup:
    rate = row.run.rates.learning_rate
    return stacked(dotted(row.colour, row.run.arm), f"seed {row.run.seed}, rate {rate}")


def _state(row: JudgedRun) -> Markup:
    state = row.verdict.state if row.verdict else ""
    return tag("span", MARKS[state], cls="mark") + state


VERDICTS = Table([
    Column("run", lambda row: row.run.id, "Run", _where, "name"),
    Column("arm", lambda row: row.run.arm),
    Column("series", lambda row: row.series),
    Column("seed", lambda row: row.run.seed),
    Column("state", lambda row: row.verdict.state if row.verdict else "missing", "Verdict", _state,
           "name"),
    Column("basis", lambda row: row.verdict and row.verdict.basis),
    *(Column(f"first_{name}", lambda row, name=name: row.first and getattr(row.first, name))
      for name in _FIRST),
    Column("events", lambda row: row.verdict and len(row.verdict.events)),
    Column("unjudged", lambda row: row.verdict and "; ".join(row.verdict.unjudged)),
    Column("sentence", lambda row: row.verdict and row.verdict.sentence, "In words", None, "words"),
])  # fmt: skip


# --- medians over seeds ---------------------------------------------------------------------------


def layered(series: Series, sublayers: Sequence[str]) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """Return (n, rows) of a diagnostic with layers, and the rows' blocks and sub-layers.

    Heads are reduced to the largest or smallest; what is not finite in one of them stays so.
    """
    values = series.values
    axes = definitions.diagnostic(series.name).axes
    if "head" in axes:
        least = definitions.split(series.name)[0] in SMALLEST_HEAD
        values = (values.min if least else values.max)(axis=axes.index("head") + 1)
    names = [""]
    if "sublayer" in axes:
        names = [sublayers[i] if i < len(sublayers) else "" for i in range(values.shape[2])]
    rows = [(block, name) for block in range(1, values.shape[1] + 1) for name in names]
    return values.reshape(len(values), -1), rows


def grid(diagnostics: Diagnostics, variant: Variant, name: str) -> Grid | None:
    """Return a diagnostic of a variant by layer and step; None where no run measured it."""
    parts = []
    for run in variant.runs:
        found = diagnostics.found.get(run.id)
        series = found.series.get(name) if found else None
        if found is not None and series is not None and series.values.ndim > 1:
            parts.append((series.steps, *layered(series, found.sublayers)))
    if not parts:
        return None
    rows = parts[0][2]
    parts = [part for part in parts if part[2] == rows]
    steps = np.unique(np.concatenate([part[0] for part in parts]))
    stacked = np.full((len(parts), len(steps), len(rows)), np.nan)
    lost = np.zeros(stacked.shape[1:], bool)
    for i, (own, values, _) in enumerate(parts):
        at = np.searchsorted(steps, own)
        stacked[i, at] = np.where(np.isfinite(values), values, np.nan)
        lost[at] |= ~np.isfinite(values)
    return Grid(steps, _median(stacked), lost, tuple(rows))


def tidy(results: Results, diagnostics: Diagnostics, name: str) -> dict[str, list[dict[str, Any]]]:
    """Return a diagnostic's medians by variant, a row for each step and place, input first."""
    found = {v.label: grid(diagnostics, v, name) for v in results.variants}
    return {
        label: [
            {"variant": label, "step": int(step), "block": block, "sublayer": sublayer,
             "median": float(value), "not_finite": bool(lost)}
            for step, values, bad in zip(each.steps, each.values, each.lost, strict=True)
            for (block, sublayer), value, lost in zip(each.rows, values, bad, strict=True)
        ]
        for label, each in found.items() if each is not None
    }  # fmt: skip


def _median(stacked: np.ndarray) -> np.ndarray:
    """The median over the first axis of what is finite; NaN without any, and without a warning."""
    known = np.isfinite(stacked).any(axis=0)
    out = np.full(known.shape, np.nan)
    out[known] = np.nanmedian(stacked[:, known], axis=0)
    return out
