"""Numbers, runs and variants put into phrases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from normjax.reporting import explanations, statistics
from normjax.reporting.results import DIVERGED, FINISHED, UNFINISHED, Results, RunResult, Variant
from normjax.reporting.statistics import Estimate
from normjax.reporting.tables import number

WARNING, MAIN, DETAIL = KINDS = ("warning", "main", "detail")
_SHOWN = 6


@dataclass(frozen=True)
class Finding:
    """A sentence or two; ``kind`` is WARNING (said first), MAIN (the answer) or DETAIL."""

    kind: str
    text: str


def representatives(results: Results) -> list[Variant]:
    """Return one variant per arm: its only one, or the best of the rates on validation text."""
    chosen = []
    for arm in results.arms:
        variants = [v for v in results.variants if v.arm.name == arm.name]
        chosen.append(min(variants, key=lambda v: v.choice))
    return chosen


def no_baseline(results: Results) -> str:
    """Say that differences are missing because the baseline has no finished run."""
    return f"There is no finished run of the baseline ({results.baseline}), so no difference to it."


def subject(results: Results, variant: Variant) -> str:
    """Return a variant as a noun phrase, such as ``removing attention (its name)``."""
    name = variant.arm.series
    phrase = explanations.action(explanations.effective(results, variant.arm), variant.arm.rows)
    return f"{phrase} ({name})" if phrase else f"the variant {name}"


def change(estimate: Estimate) -> str:
    """Return a difference with its interval, such as ``+0.210 ± 0.013``."""
    shown = number(estimate.mean, signed=True)
    half = estimate.half_width
    return shown if half is None else f"{shown}\u00a0±\u00a0{number(half)}"


def scales(loss: float, unit: str) -> str:
    """Return a loss in nats as perplexity and bits, as a clause."""
    return (
        f", that is a perplexity of {number(statistics.perplexity(loss), digits=2)} or "
        f"{number(statistics.bits(loss))} bits per {unit}"
    )


def references(results: Results) -> str:
    """Return the losses of models that know nothing of context, as a sentence.

    For a task the least loss possible follows.
    """
    unigram, uniform = results.reference("unigram"), results.reference("uniform")
    if unigram is None or uniform is None:
        return ""
    bigram = results.reference("bigram")
    pairs = "" if bigram is None else f"; which follows which, {number(bigram)}"
    optimum = results.reference("optimum")
    least = "" if optimum is None else f" The least loss possible is {number(optimum)}."
    return (
        f"Knowing only how frequent each {results.unit} is gives {number(unigram)} nats on the"
        f" same text{pairs}; guessing all alike, {number(uniform)}.{least}"
    )


def state_text(run: RunResult) -> str:
    """Return how a run stands, in words."""
    if run.outcome == DIVERGED:
        return "diverged" if run.diverged_at is None else f"diverged at step {run.diverged_at}"
    if run.state == "missing":
        return "not started"
    if run.state == "damaged":
        return "not readable"
    if run.state == "done":
        return "done" if run.final_loss is not None else "done, but its last evaluation is missing"
    return f"{run.state} at step {run.step} of {run.rates.steps}"


def runs_text(variant: Variant) -> str:
    """Return how the runs of a variant ended, such as ``2 of 3, 1 diverged``."""
    parts = [f"{variant.count(FINISHED)} of {len(variant.runs)}"]
    parts += [f"{n} {kind}" for kind in (DIVERGED, UNFINISHED) if (n := variant.count(kind))]
    return ", ".join(parts)


def pairs(estimate: Estimate) -> str:
    """Return the number of pairs in words."""
    return f"{counted(estimate.n, 'pair')} of runs"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "block"), counted(2, "block")
    ('1 block', '2 blocks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def capital(text: str) -> str:
    """Return text with its first letter large."""
    return text[:1].upper() + text[1:]


def listed(items: Iterable[str]) -> str:
    """Return items as an English list.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    items = list(items)
    parts = [", ".join(items[:-1]), *items[-1:]]
    return " and ".join(part for part in parts if part)


def shortened(items: Iterable[str]) -> str:
    """Return items separated by semicolons, the later ones only counted."""
    items = list(items)
    more = [f"and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
    return "; ".join(items[:_SHOWN] + more)
