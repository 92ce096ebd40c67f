"""Each run judged: well behaved, drifting, unstable or diverged; what left its band first.

    judge(evidence.read("out/runs/full-s0-1f2e3d4c")).sentence

- **diverged**: the run ended so (its manifest says so), or without a finite loss;
- **unstable**: else, loss or gradient norm spiked, or something was not finite;
- **drifting**: else, a diagnostic left its band and stayed out to the last measurement;
- **well behaved**: else. One that left its band and came back is told, and changes no state;
- **unknown**: nothing was measured.

All of it is derived from the files of the run folder and the bands; no JAX is imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normjax.diagnostics import bands, definitions, events, evidence
from normjax.diagnostics.bands import Band, VerdictConfig
from normjax.diagnostics.events import DRIFT, EXCURSION, NON_FINITE, SKIPPED, SPIKE, Event
from normjax.diagnostics.evidence import METRICS, Evidence
from normjax.runs import files
from normjax.runs.run_folder import RunFolder

STATES = ("well behaved", "drifting", "unstable", "diverged", "unknown")
FILE = "verdict.json"
DEFAULT = VerdictConfig()
_STANDS_FOR = {"loss/value": "validation/loss", "gradient/norm": "gradient/norm"}
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a run is judged.

    Attributes:
      state: one of :data:`STATES`.
      sentence: the verdict in words.
      events: what happened, first things first.
      basis: "diagnostics", "metrics" or "nothing": what it was judged from.
    """

    state: str
    sentence: str
    events: tuple[Event, ...]
    basis: str

    @property
    def first(self) -> Event | None:
        """What happened first; in a run that is not well behaved, without what came right again."""
        serious = [event for event in self.events if event.kind != EXCURSION]
        return next(iter(serious or self.events), None)

    def record(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {
            "state": self.state, "sentence": self.sentence, "basis": self.basis,
            "events": [event.record() for event in self.events],
        }  # fmt: skip


def judge(found: Evidence, config: VerdictConfig = DEFAULT) -> Verdict:
    """Return the verdict on a run.

    Args:
      found: what its folder holds.
      config: bands and what counts as a spike.

    Raises:
      UserError: a band of the configuration is none.

    >>> judge(Evidence({})).state
    'unknown'
    """
    events_found = events.ordered(_events(found, config))
    basis = "diagnostics" if found.series else "metrics" if found.metrics else "nothing"
    kinds = {event.kind for event in events_found}
    if found.state == "diverged":
        state = "diverged"
    elif kinds & {SPIKE, NON_FINITE, SKIPPED}:
        state = "unstable"
    elif DRIFT in kinds:
        state = "drifting"
    else:
        state = "unknown" if basis == "nothing" else "well behaved"
    verdict = Verdict(state, "", events_found, basis)
    return dataclasses.replace(verdict, sentence=_sentence(verdict, found))


def judge_run(run_dir: str | Path, config: VerdictConfig = DEFAULT) -> Verdict:
    """Return the verdict on the run in a folder, which may be empty or absent."""
    return judge(evidence.read(run_dir), config)


def write(run_dir: Path, verdict: Verdict) -> None:
    """Write ``verdict.json`` into a run folder; it says nothing that is not in the other files.

    A file that says the same already is left alone.
    """
    record = files.strict(verdict.record() | {"run": RunFolder(run_dir).value("run")})
    if files.read_object(run_dir / FILE) != record:
        files.write_sealed(run_dir / FILE, record)


def read(run_dir: Path) -> dict[str, Any]:
    """Return ``verdict.json``; empty where there is none, or it is damaged, or another run's."""
    record = files.read_object(run_dir / FILE) or {}
    return record if record.get("run") == RunFolder(run_dir).value("run") else {}


def _events(found: Evidence, config: VerdictConfig) -> list[Event]:
    rows = bands.adjusted(config.bands)
    out: list[Event] = []
    for name, series in found.series.items():
        if definitions.split(name)[0] not in definitions.DIAGNOSTICS:
            continue  # of another version
        out += events.non_finite(series, found.sublayers)
        for band in rows:
            if band.covers(name):
                out += events.departures(series, band, found)
    if not found.series:
        out += _from_metrics(found, rows)
    out += events.skipped(found)
    wanted = {
        "train/loss": config.loss_spike, "validation/loss": config.loss_spike,
        "loss/value": config.loss_spike, "gradient/norm": config.gradient_spike,
    }  # fmt: skip
    every = [*found.metrics.values(), *found.series.values()]
    spikes = [e for s in every if s.name in wanted for e in events.spikes(s, wanted[s.name])]
    return out + list(
        {event.diagnostic: event for event in reversed(events.ordered(spikes))}.values()
    )


def _from_metrics(found: Evidence, rows: Sequence[Band]) -> list[Event]:
    out: list[Event] = []
    for band in rows:
        series = found.metrics.get(_STANDS_FOR.get(band.diagnostic, ""))
        if series is not None:
            out += events.departures(series, band, found)
    for name in ("validation/loss",):
        series = found.metrics.get(name)
        if series is not None and found.state != "diverged":
            out += events.non_finite(series, found.sublayers)
    return out


# --- words ----------------------------------------------------------------------------------------


def _sentence(verdict: Verdict, found: Evidence) -> str:
    head = verdict.state[0].upper() + verdict.state[1:]
    if verdict.state == "diverged" and found.diverged_at is not None:
        head += f" at step {found.diverged_at}"
    if verdict.state == "unknown":
        return "Unknown: nothing was measured."
    first, text = verdict.first, head
    if first is None:
        text += ": no measurement told why" if verdict.state == "diverged" else ""
    elif verdict.state == "well behaved":
        text += f"; {what(first)}"
    else:
        text += f": first {what(first)}"
        later = [e for e in verdict.events if e is not first and e.kind != EXCURSION]
        heads = dict.fromkeys(definitions.split(e.diagnostic)[0] for e in later)
        names = [title(name) for name in heads if name != definitions.split(first.diagnostic)[0]]
        if names:
            shown = ", ".join(names[:_SHOWN])
            more = len(names) - _SHOWN
            text += f"; then {shown}" + (f" and {more} more" if more > 0 else "")
    if verdict.basis == "metrics":
        text += ". Judged from losses and gradient norms alone: no diagnostics were measured"
    return text + "."


def title(name: str) -> str:
    """Return what a diagnostic or metric is called.

    >>> title("gain/max[mlp.pre_norm]")
    'gain, largest (mlp.pre_norm)'
    """
    diagnostic, part = definitions.split(name)
    if diagnostic in METRICS and not part:
        return METRICS[diagnostic]
    if diagnostic not in definitions.DIAGNOSTICS:
        return name.replace("/", " ")
    return definitions.DIAGNOSTICS[diagnostic].title + (f" ({part})" if part else "")


def where(event: Event) -> str:
    """Return the place of an event in words, "" for a number of the whole run."""
    parts = [f"block {event.layer}"] if event.layer is not None else []
    parts += [event.sublayer] if event.sublayer else []
    parts += [f"head {event.head}"] if event.head is not None else []
    return ", ".join(parts)


def beyond(event: Event) -> str:
    """Return the value of an event and how far out of its band that is."""
    value = "" if event.value is None else f"{event.value:.3g}"
    factor = f"{times(event.factor)} times " if event.factor and event.factor > 1.05 else ""
    side, limit = "below" if event.below else "above", f"{event.limit:g}"
    return f"{value}, {factor}{side} {limit}{bands.IN_WORDS.get(event.against, '')}"


def what(event: Event) -> str:
    """Return what happened as a clause."""
    at = where(event)
    head = f"{title(event.diagnostic)} at step {event.step}" + (f" in {at}" if at else "")
    many = f", {event.places} of {event.of} places" if event.of > 1 else ""
    if event.kind == SKIPPED:
        return f"at step {event.step} {event.reason}"
    if event.kind == NON_FINITE:
        return f"{head} {event.reason}{many}"
    if event.kind == SPIKE:
        count = f", {event.places} spikes in all" if event.places > 1 else ""
        size = f"{event.value:.3g}, {times(event.factor or 1.0)} times its running median"
        return f"{head} spiked to {size}{count}"
    stay = f"until step {event.until}, and came back"
    if event.kind == DRIFT:
        stay = "and moved further away" if event.moving else "and stayed out"
    return f"{head} left its band: {beyond(event)} {stay}{many}"


def times(factor: float) -> str:
    """Return a factor in few digits."""
    if factor < 1000:
        return f"{factor:.3g}"
    return f"{factor:,.0f}" if factor < 1e6 else f"{factor:.0e}".replace("e+", "e")
