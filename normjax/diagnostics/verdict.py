"""Each run judged: how it went in one word, what went first, what could not be judged.

    judge(evidence.read("out/runs/full-s0-1f2e3d4c")).sentence

The first that holds:

- **diverged**: the run ended so (its manifest says so), or without a finite loss;
- **unstable**: loss or gradient norm jumped, or something was not finite;
- **not learning**: the final loss is not below the unigram loss of the test text, by a
  margin, and nothing shows that more steps would help (what is below that and not below the bigram
  loss has learned something: the sentence says how little);
- **too slow**: the same, but the loss was still falling;
- **drifting**: a diagnostic was outside its band, at any step;
- **idle part**: a head, branch, block or the hidden units did next to nothing, or no step changed
  a block;
- **well behaved**: nothing of it was seen, as far as it could be judged;
- **unknown**: nothing was measured.

What could not be judged, for want of a measurement or a reference, is listed. Every departure
counts, wherever it was seen: with more measured steps a verdict becomes worse or stays.

All of it is derived from the files of the run folder and the bands; no JAX is imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normjax.diagnostics import bands, definitions, events, evidence
from normjax.diagnostics.bands import Band, VerdictConfig
from normjax.diagnostics.events import (
    DRIFT,
    IDLE,
    NON_FINITE,
    NOT_LEARNING,
    SKIPPED,
    SPIKE,
    TOO_SLOW,
    Event,
)
from normjax.diagnostics.evidence import METRICS, Evidence
from normjax.runs import files
from normjax.runs.run_folder import RunFolder

OF_EVENTS = {
    SPIKE: "unstable", NON_FINITE: "unstable", SKIPPED: "unstable", NOT_LEARNING: "not learning",
    TOO_SLOW: "too slow", DRIFT: "drifting", IDLE: "idle part",
}  # fmt: skip
"""The state that an event makes, the gravest first."""
STATES = (
    "well behaved", "idle part", "drifting", "too slow", "not learning", "unstable", "diverged",
    "unknown",
)  # fmt: skip
FILE = "verdict.json"
DEFAULT = VerdictConfig()
STILL_FALLING = 0.2
"""A loss falls still if the second half of its evaluations has so much of its whole fall."""
_STANDS_FOR = {"loss/value": "validation/loss", "gradient/norm": "gradient/norm"}
_SHOWN = 3
_UNLEARNED = (NOT_LEARNING, TOO_SLOW)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How a run is judged.

    Attributes:
      state: one of :data:`STATES`.
      sentence: the verdict in words.
      events: what happened, first things first.
      basis: what it was judged from: "diagnostics" (samples, and every step where there is one),
        "every step", "metrics" or "nothing".
      unjudged: what could not be judged, each with what it needs.
    """

    state: str
    sentence: str
    events: tuple[Event, ...]
    basis: str
    unjudged: tuple[str, ...] = ()

    @property
    def first(self) -> Event | None:
        """What happened first."""
        return next(iter(self.events), None)

    def record(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {
            "state": self.state, "sentence": self.sentence, "basis": self.basis,
            "events": [event.record() for event in self.events], "unjudged": list(self.unjudged),
        }  # fmt: skip


def judge(found: Evidence, config: VerdictConfig = DEFAULT) -> Verdict:
    """Return the verdict on a run.

    Args:
      found: what its folder holds.
      config: bands, what counts as a spike, what as learned.

    Raises:
      UserError: a band of the configuration is none.

    >>> judge(Evidence({})).state
    'unknown'
    """
    happened, unjudged = _events(found, config)
    ordered = events.ordered(happened)
    basis = next((name for name, known in (
        ("diagnostics", found.series), ("every step", found.extremes), ("metrics", found.metrics),
    ) if known), "nothing")  # fmt: skip
    kinds = {event.kind for event in ordered}
    if found.state == "diverged":
        state = "diverged"
    else:
        quiet = "unknown" if basis == "nothing" else "well behaved"
        state = next((state for kind, state in OF_EVENTS.items() if kind in kinds), quiet)
    verdict = Verdict(state, "", ordered, basis, tuple(dict.fromkeys(unjudged)))
    sentence = _sentence(verdict, found) + _against_pairs(verdict, found, config)
    return dataclasses.replace(verdict, sentence=sentence)


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


def _events(found: Evidence, config: VerdictConfig) -> tuple[list[Event], list[str]]:
    """Return what happened, and what could not be judged."""
    out, unjudged = [], []
    for name, series in found.series.items():
        if definitions.split(name)[0] in definitions.DIAGNOSTICS:  # not of another version
            out += events.non_finite(series, found.sublayers)
    for band in bands.of(config):
        happened = _departed(band, found)
        if happened is None:
            unjudged.append(f"{title(band.diagnostic)} ({band.needs})")
        out += happened or []
    if not found.series and not found.extremes and found.state != "diverged":
        losses = found.metrics.get("validation/loss")
        out += [] if losses is None else events.non_finite(losses, found.sublayers)
    out += events.skipped(found)
    wanted = {
        "train/loss": config.loss_spike, "validation/loss": config.loss_spike,
        "gradient/norm": config.gradient_spike,
    }  # fmt: skip
    for series in found.metrics.values():
        if series.name in wanted:
            out += events.spikes(series, wanted[series.name])
    learned, missing = _learning(found, config)
    return out + learned, unjudged + missing


def _departed(band: Band, found: Evidence) -> list[Event] | None:
    """Return how a band was left; None where that cannot be told, [] where it does not apply."""
    area = band.diagnostic.split("/")[0]
    if area in definitions.SUBLAYER_ORDER and area not in found.sublayers:
        return []
    fields = found.extremes.get(band.diagnostic)
    if (
        fields is not None
        and (told := events.over_steps(band.diagnostic, fields, band, found)) is not None
    ):
        return told
    own = [series for name, series in found.series.items() if band.covers(name)]
    if not own and not found.series and not found.extremes:
        stands = found.metrics.get(_STANDS_FOR.get(band.diagnostic, ""))
        own = [] if stands is None else [stands]
    elif not own and found.series:  # such as gains, of a norm that has none
        return None if fields is not None or band.kind in (SPIKE, IDLE) else []
    each = [events.departures(series, band, found) for series in own]
    known = [told for told in each if told is not None]
    return [event for told in known for event in told] if known else None


def _learning(found: Evidence, config: VerdictConfig) -> tuple[list[Event], list[str]]:
    """Return whether the final loss shows that anything was learned, and what is missing for that.

    Learned is less than unigram - margin, both of the test text. What is not may need more steps:
    the second half of the evaluations has a part of the whole fall, and the loss only fell.
    """
    losses, unigram = found.metrics.get("validation/loss"), found.references.get("unigram")
    tested = found.metrics.get("test/loss")
    if found.state == "diverged":
        return [], []
    if unigram is None:
        return [], ["whether it learned (the unigram loss of the test text)"]
    if losses is None or tested is None or tested.steps[-1] != found.steps:
        return [], ["whether it learned (a last evaluation)"]
    between, bound = losses.flat[:, 0], unigram - config.margin
    last = float(tested.flat[-1, 0])
    if not last > bound:
        return [], []
    if len(between) < 3 or not np.isfinite(between).all():
        kind, missing = NOT_LEARNING, ["whether more steps would help (three evaluations)"]
    else:
        fall, late = between[0] - between[-1], between[len(between) // 2] - between[-1]
        falls = bool((np.diff(between) < 0).all()) and late >= STILL_FALLING * fall
        kind, missing = TOO_SLOW if falls else NOT_LEARNING, []
    reason = "the loss was still falling" if kind == TOO_SLOW else "the loss had stopped falling"
    return [Event(
        kind, "test/loss", found.steps, value=last, limit=bound,
        reason="" if missing else reason,
    )], missing  # fmt: skip


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
    else:
        text += f": first {what(first)}"
        later = [e for e in verdict.events if e is not first]
        heads = dict.fromkeys(definitions.split(e.diagnostic)[0] for e in later)
        names = [title(name) for name in heads if name != definitions.split(first.diagnostic)[0]]
        if names:
            text += f"; then {_listed(names)}"
    if verdict.basis == "metrics":
        text += ". Judged from losses and gradient norms alone: no diagnostics were measured"
    elif verdict.unjudged:
        text += f". Not judged: {_listed(verdict.unjudged)}"
    return text + "."


def _against_pairs(verdict: Verdict, found: Evidence, config: VerdictConfig) -> str:
    """Return what to add where a run that learned shows no use of more than the last token."""
    tested, bigram = found.metrics.get("test/loss"), found.references.get("bigram")
    if verdict.state in ("diverged", "unknown") or bigram is None:
        return ""
    if tested is None or tested.steps[-1] != found.steps:
        return ""
    last = float(tested.flat[-1, 0])
    if last < bigram - config.margin or any(e.kind in _UNLEARNED for e in verdict.events):
        return ""
    return (f" Its final loss, {last:.3g}, is not {config.margin:g} below the {bigram:.3g} of who"
            " knows which token follows which: it does not show that more than the last token is"
            " used.")  # fmt: skip


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


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
    at, when = where(event), "every step" if event.throughout else f"step {event.step}"
    head = f"{title(event.diagnostic)} at {when}" + (f" in {at}" if at else "")
    many = f", {event.places} of {event.of} places" if event.of > 1 else ""
    if event.kind == SKIPPED:
        return f"at step {event.step} {event.reason}"
    if event.kind == NON_FINITE:
        return f"{head} {event.reason}{many}"
    if event.kind == SPIKE and definitions.split(event.diagnostic)[0] in METRICS:
        count = f", {event.places} spikes in all" if event.places > 1 else ""
        size = f"{event.value:.3g}, {times(event.factor or 1.0)} times its running median"
        return f"{head} spiked to {size}{count}"
    if event.kind in _UNLEARNED:
        more = f"; {event.reason}" if event.reason else ""
        return (f"{title(event.diagnostic)} at step {event.step}: {event.value:.3g}, not below the"
                f" {event.limit:.3g} of who knows only how frequent tokens are{more}")  # fmt: skip
    if event.kind == IDLE:
        return f"{head}: {event.reason}; {beyond(event)}{many}"
    return f"{head} was outside its band: {beyond(event)}{many}"


def times(factor: float) -> str:
    """Return a factor in few digits."""
    if factor < 1000:
        return f"{factor:.3g}"
    return f"{factor:,.0f}" if factor < 1e6 else f"{factor:.0e}".replace("e+", "e")
