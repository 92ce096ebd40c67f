"""What dense diagnostics around a divergence say: which moved first, where, when, by which factor.

A diagnostic has moved once it is :data:`MOVED` times its baseline, or baseline over that, and stays
so to the last finite value; the baseline is its own median over the first fifth of the steps before
the bad one, ten at most. All but the replay itself is here, without JAX: pages are made from these
files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normjax.diagnostics import bands, definitions, events, log, verdict
from normjax.diagnostics.bands import Band
from normjax.diagnostics.events import DRIFT, NON_FINITE, Event
from normjax.diagnostics.evidence import Evidence, Series, gather
from normjax.errors import UserError
from normjax.runs import files
from normjax.runs.run_folder import RunFolder, lines_of, text_of

FILE, DIAGNOSTICS_FILE = "autopsy.json", "autopsy.jsonl"
MOVED = 5.0
BASELINE = 10
_SHAPE = {
    "bad_step": int, "start": int, "first": int, "last": int, "sentence": str,
    "checks": [{"name": str, "agrees": bool, "text": str}],
    "events": [{
        "kind": str, "diagnostic": str, "step": int,
        **{f"{name}?": int for name in ("layer", "head", "places", "of", "until")},
        **{f"{name}?": float for name in ("value", "factor", "limit", "largest")},
        **{f"{name}?": str for name in ("sublayer", "against", "reason")},
        "below?": bool, "moving?": bool,
    }],
}  # fmt: skip
_SIGNED = ("branch/stream_cosine", "loss/slope", "loss/curvature")
_STEP_SIZES = ("update/parameter_ratio", "update/norm")
_OWN_ZERO = ("instrument/radial_defect", "instrument/radial_defect_last")


@dataclasses.dataclass(frozen=True)
class ReplayCheck:
    """One comparison of the replay with the run: what, whether it agrees, in words."""

    name: str
    agrees: bool
    text: str


@dataclasses.dataclass(frozen=True)
class Autopsy:
    """What a replay of a diverged run found. Steps are those *before* which was measured, from 0.

    Attributes:
      bad_step: the first step of the streak that ended the run.
      start: where the replay began: a checkpoint, or 0.
      first, last: the measured steps.
      checks: whether the replay is the run again, bit for bit.
      events: what moved, what left its band, what was not finite; first things first. None of a
        replay that is not the run.
      sentence: in words.
    """

    bad_step: int
    start: int
    first: int
    last: int
    checks: tuple[ReplayCheck, ...]
    events: tuple[Event, ...]
    sentence: str

    @property
    def reproduced(self) -> bool:
        """Whether the replay agrees with the run in everything that could be compared."""
        return all(check.agrees for check in self.checks)

    def record(self) -> dict[str, Any]:
        """Return the autopsy as JSON values."""
        return {**dataclasses.asdict(self), "reproduced": self.reproduced}


def examine(
    samples: Iterable[tuple[int, Mapping[str, np.ndarray]]], bad_step: int, start: int,
    checks: Sequence[ReplayCheck], sublayers: Sequence[str] = definitions.SUBLAYER_ORDER,
    schedule: Mapping[int, float] | None = None,
) -> Autopsy:  # fmt: skip
    """Return what dense samples say; of a replay that is not the run, why it is not.

    Args:
      samples: (step, {diagnostic: array}), ascending, one step apart.
      bad_step: the first step that was not finite in the run.
      start: where the replay began.
      checks: of the replay against the run.
      sublayers: what the sub-layer axis holds.
      schedule: learning rate by step in units of its peak; sizes of steps are divided by it, so
        that a warm-up is no movement.
    """
    samples = list(samples)
    steps = [step for step, _ in samples]
    ends = (min(steps, default=start), max(steps, default=start))
    if not all(check.agrees for check in checks):
        wrong = "; ".join(check.text for check in checks if not check.agrees)
        text = f"The replay is not the run again, so it tells nothing of it: {wrong}."
        return Autopsy(bad_step, start, *ends, tuple(checks), (), text)
    series = gather(samples)
    found = Evidence(series, sublayers=tuple(sublayers))
    out: list[Event] = []
    for name, each in series.items():
        if definitions.split(name)[0] not in definitions.DIAGNOSTICS:
            continue
        out += moved(each, bad_step, found.sublayers, schedule)
        out += events.non_finite(each, found.sublayers)
        for band in bands.BANDS:
            if band.against in ("value", "layers") and band.covers(name):
                out += [e for e in events.departures(each, band, found) or [] if e.kind == DRIFT]
    ordered = events.ordered(out)
    sentence = _sentence(ordered, checks, bad_step, start, steps)
    return Autopsy(bad_step, start, *ends, tuple(checks), ordered, sentence)


def moved(
    series: Series, bad_step: int, sublayers: Sequence[str],
    schedule: Mapping[int, float] | None = None,
) -> list[Event]:  # fmt: skip
    """Return where and when a diagnostic first moved away from its baseline for good, if it did.

    >>> values = np.array([1.0, 1.1, 0.9, 1.0, 8.0, 90.0])[:, None]
    >>> s = Series("mlp/activation_rms", np.arange(6), values)
    >>> event = moved(s, 6, ("attention", "mlp"))[0]
    >>> event.step, event.layer, round(event.factor, 1)
    (4, 1, 8.0)
    """
    diagnostic = definitions.split(series.name)[0]
    if diagnostic in _SIGNED + _OWN_ZERO:
        return []
    ratio = over_baseline(series, bad_step, schedule)
    low = -math.inf if diagnostic in _STEP_SIZES else 1 / MOVED
    band = Band(series.name, low, MOVED, "baseline", reason="moved away from its baseline")
    found = events.leave(series, band, ratio, sublayers, stays=True)
    # Beyond its baseline, not beyond the bound: that is what a reader wants to know.
    return [dataclasses.replace(e, factor=(e.factor or 1.0) * MOVED, limit=1.0,
                                largest=(e.largest or 1.0) * MOVED) for e in found]  # fmt: skip


def over_baseline(
    series: Series, bad_step: int, schedule: Mapping[int, float] | None = None
) -> np.ndarray:
    """Return (n, places): a diagnostic over its baseline; NaN where that is not above 0."""
    values = np.where(np.isfinite(series.flat), series.flat, np.nan)
    if schedule and definitions.split(series.name)[0] in _STEP_SIZES:
        rates = np.array([schedule.get(int(step), math.nan) for step in series.steps])
        values = values / np.where(rates > 0, rates, np.nan)[:, None]
    count = max(1, min(BASELINE, int((series.steps < bad_step).sum()) // 5))
    columns = []
    for column in values.T:
        early = column[np.isfinite(column)][:count]
        middle = float(np.median(early)) if len(early) else math.nan
        columns.append(column / (middle if middle > 0 else math.nan))
    return np.stack(columns, axis=1)


ECHOES = (
    "read/rms", "attention/logit_std", "attention/entropy", "attention/saturated_share",
    "gain/mean", "gain/min", "branch/stream_ratio", *_STEP_SIZES,
)  # fmt: skip
"""What moves because another diagnostic does: told among the events, not drawn."""


def leading(autopsy: Autopsy, count: int = 6) -> list[Event]:
    """Return the first event of each diagnostic that moved, first things first, without echoes."""
    first: dict[str, Event] = {}
    for event in autopsy.events:
        if event.against == "baseline" and definitions.split(event.diagnostic)[0] not in ECHOES:
            first.setdefault(definitions.split(event.diagnostic)[0], event)
    return list(first.values())[:count]


def write(
    run_dir: Path, autopsy: Autopsy, samples: Iterable[tuple[int, Mapping[str, Any]]]
) -> None:
    """Write what was measured while replaying to ``autopsy.jsonl``, then ``autopsy.json``."""
    text = b"".join(text_of(log.line(step, values)) for step, values in samples)
    files.write_bytes(run_dir / DIAGNOSTICS_FILE, text)
    record = autopsy.record() | {"run": RunFolder(run_dir).value("run")}
    files.write_sealed(run_dir / FILE, record, beside=(DIAGNOSTICS_FILE,))


def read(run_dir: str | Path) -> tuple[Autopsy, dict[str, Series]] | None:
    """Return an autopsy and its dense diagnostics.

    None where there is none, or it is damaged, or another run's.
    """
    folder = Path(run_dir)
    record = files.read_object(folder / FILE)
    if record is None or record.pop("run", None) != RunFolder(folder).value("run"):
        return None
    try:
        files.check_shape(record, _SHAPE)
        record.pop("reproduced", None)
        checks = tuple(ReplayCheck(**check) for check in record.pop("checks"))
        happened = tuple(Event(**event) for event in record.pop("events"))
        autopsy = Autopsy(checks=checks, events=happened, **record)
    except (UserError, TypeError):  # a part of another kind, or one that is not known here
        return None
    lines = lines_of(files.read_bytes(folder / DIAGNOSTICS_FILE) or b"")
    return autopsy, gather(log.samples(lines))


# --- words ----------------------------------------------------------------------------------------


def _sentence(
    happened: Sequence[Event], checks: Sequence[ReplayCheck], bad_step: int, start: int,
    steps: Sequence[int],
) -> str:  # fmt: skip
    if not steps:
        return "Nothing was measured."
    origin = "the initialization" if start == 0 else f"the checkpoint of step {start}"
    text = [f"Replayed from {origin}, measured before every step from {steps[0]} to {steps[-1]};"
            f" step {bad_step} was the first whose result was not finite."]  # fmt: skip
    first = next((e for e in happened if e.against == "baseline" and e.step <= bad_step), None)
    out = next((e for e in happened if e.kind == DRIFT and e.against != "baseline"), None)
    if out is not None and out.step <= min(first.step if first else bad_step, bad_step):
        at = verdict.where(out)
        text.append(
            f"First out of its band was the {verdict.title(out.diagnostic)}"
            + (f" in {at}" if at else "") + f", before step {out.step}: {verdict.beyond(out)}."
        )  # fmt: skip
    if first is not None:
        at = verdict.where(first)
        text.append(
            f"First to move was the {verdict.title(first.diagnostic)}" + (f" in {at}" if at else "")
            + f", before step {first.step}: {verdict.times(first.factor or 1.0)} times"
            + (" below" if first.below else "") + " its baseline."
        )  # fmt: skip
    else:
        text.append("No diagnostic moved away from its baseline before that.")
    lost = next((e for e in happened if e.kind == NON_FINITE), None)
    if lost is not None:
        at = verdict.where(lost)
        text.append(
            f"First not to be finite was the {verdict.title(lost.diagnostic)}"
            + (f" in {at}" if at else "") + f", before step {lost.step}."
        )  # fmt: skip
    if checks:
        text.append("The replay is the run again: " + "; ".join(c.text for c in checks) + ".")
    return " ".join(text)
