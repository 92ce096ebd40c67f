"""The answer in words, made from the numbers.

Each sentence is true of the numbers in summary.csv and says how sure it is: a difference is called
one only where its 95 % interval excludes 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from normjax.reporting import explanations
from normjax.reporting.results import DIVERGED, UNFINISHED, Results, Variant
from normjax.reporting.statistics import Estimate
from normjax.reporting.tables import number, span
from normjax.reporting.wording import (
    DETAIL,
    MAIN,
    WARNING,
    Finding,
    capital,
    change,
    counted,
    difference,
    listed,
    no_baseline,
    pairs,
    references,
    representatives,
    scales,
    shortened,
    state_text,
    subject,
)
from normjax.runs import segments


def warnings(results: Results) -> list[Finding]:
    """Return what a reader must know before any number: unfinished runs, few seeds."""
    return [Finding(WARNING, text) for text in _warnings(results)]


def _warnings(results: Results) -> Iterator[str]:
    left = [run for run in results.runs if run.outcome == UNFINISHED]
    if left:
        verb = "has" if len(left) == 1 else "have"
        each = shortened(f"{run.arm} seed {run.seed}: {state_text(run)}" for run in left)
        yield (
            f"This report is not complete: {len(left)} of {len(results.runs)} runs {verb} not "
            f"finished ({each}). Means cover finished runs only; starting the same command again "
            "does what is left."
        )
    torn = [run for run in results.runs if run.problems]
    if torn:
        each = shortened(f"{run.id}: {'; '.join(run.problems)}" for run in torn)
        yield (
            f"{counted(len(torn), 'run folder')} {'is' if len(torn) == 1 else 'are'} not as sealed"
            f" ({each}). What is damaged is left out here; starting the same command again makes a"
            " lost last evaluation anew from its checkpoint."
        )
    hybrid = {run.id: said for run in results.runs if (said := segments.said(run.segments))}
    if hybrid:
        each = shortened(f"{run}: {said}" for run, said in hybrid.items())
        yield (
            f"{len(hybrid)} of {counted(len(results.runs), 'run')} went on under other conditions"
            f" than at the start ({each}). The last bits of their numbers may differ from those of"
            " uninterrupted runs."
        )
    bare = [c.name for c in results.arms if all(run.arm != c.name for run in results.runs)]
    if bare:
        yield f"No run was planned for {listed(bare)}."
    if len(results.seeds) == 1:
        yield "Only one seed was run. One seed gives no interval, so any difference may be chance."
    elif len(results.seeds) == 2:
        yield (
            "Only two seeds were run: an interval from two values is 12.7 standard errors wide to "
            "each side, so little can be decided."
        )


def comparison(results: Results) -> list[Finding]:
    """Return the findings of a grid without an x axis: what hurts, what does not, what diverged."""
    best = representatives(results)
    base = next((v for v in best if v.arm.series == results.baseline), None)
    gaps = [(v, difference(v, base)) for v in best if v is not base]
    gaps.sort(key=lambda pair: pair[1].mean or 0.0, reverse=True)
    known = [(v, gap) for v, gap in gaps if gap.mean is not None]
    return [
        *(Finding(MAIN, text) for text in _worst(results, base, best, known)),
        *(Finding(DETAIL, text) for text in _rest(results, known)),
        *residual_or_norm(results, best),
        *(Finding(DETAIL, text) for text in (
            *_baseline(results, base), *no_better_than_counting(results, best), *_ranks(best),
            *divergence(results), *best_rates(results, best), *_many(best, base),
        )),
    ]  # fmt: skip


Gaps = Sequence[tuple[Variant, Estimate]]


def _worst(
    results: Results, base: Variant | None, best: Sequence[Variant], gaps: Gaps
) -> Iterator[str]:
    lost = [v for v in best if v.all_diverged and v is not base]
    if lost:
        names = capital(listed(subject(results, v) for v in lost))
        verb, runs = ("hurts", "") if len(lost) == 1 else ("hurt", " of each")
        yield f"{names} {verb} most: every run{runs} diverged."
    if base is None or base.loss.mean is None:
        yield no_baseline(results)
    elif gaps and (gaps[0][1].mean or 0.0) <= 0:
        yield f"No variant that trained ends at a higher mean loss than {results.baseline}."
    elif gaps:
        (worst, gap), *others = gaps
        name = subject(results, worst)
        start = f"Among what trained, {name}" if lost else capital(name)
        text = f"{start} {_harm(gap, f'nats per {results.unit}', bool(lost))}"
        if others and gap.excludes_zero:
            text += f" {_runner_up(results, worst, others[0][0])}"
        yield text


def _harm(gap: Estimate, unit: str, lost: bool) -> str:
    if gap.excludes_zero:
        verb = "costs most" if lost else "hurts most"
        return f"{verb}: {change(gap)} {unit} (95 % interval {span(gap, True)}, {pairs(gap)})."
    if gap.low is None:
        return f"shows the largest difference: {change(gap)} {unit}, without an interval."
    return (
        f"has the largest mean difference, {change(gap)} {unit}, but its interval "
        f"({span(gap, True)}, {pairs(gap)}) contains 0: not distinguishable from the baseline."
    )


def _runner_up(results: Results, first: Variant, second: Variant) -> str:
    gap, name = difference(first, second), subject(results, second)
    if gap.excludes_zero:
        return f"It is clearly worse than the next, {name}: their difference is {change(gap)}."
    if gap.low is None:
        return f"The next is {name}, {change(gap)} apart."
    return (
        f"Whether it is worse than the next, {name}, is not decided: their difference, "
        f"{change(gap)}, has an interval that contains 0."
    )


def _rest(results: Results, gaps: Gaps) -> Iterator[str]:
    """Sort the variants into worse, better and not distinguishable from the baseline."""
    worse, better, same, bare = groups = ([], [], [], [])
    for variant, gap in gaps:
        sure = gap.excludes_zero
        kind = 3 if gap.low is None else 2 if not sure else 0 if (gap.mean or 0) > 0 else 1
        groups[kind].append(f"{subject(results, variant)} {change(gap)}")
    if len(worse) > 1:
        yield (
            f"Clearly worse than {results.baseline} (the interval of the difference excludes 0), "
            f"from most to least: {listed(worse)}."
        )
    if better:
        yield f"Clearly better than {results.baseline}: {listed(better)}."
    if same:
        yield (
            f"Not distinguishable from {results.baseline} with these seeds (the interval contains "
            f"0): {listed(same)}. That is no proof of equality; the effect, if any, lies within "
            "the interval."
        )
    if bare:
        yield f"Without an interval, so not decided: {listed(bare)}."


def _baseline(results: Results, base: Variant | None) -> Iterator[str]:
    mean = None if base is None else base.loss.mean
    if base is not None and mean is not None:
        loss, unit = base.loss, results.unit
        sure = "" if loss.low is None else f" (95 % interval {span(loss)}, {loss.n} seeds)"
        text = f"The baseline ({results.baseline}) ends at {number(mean)} nats per {unit}{sure}"
        yield f"{text}{scales(mean, unit)}. {references(results)}".strip()


def no_better_than_counting(results: Results, best: Sequence[Variant]) -> Iterator[str]:
    """Name the variants that are not shown to beat the unigram model."""
    unigram = results.reference("unigram")
    ends = [(v, v.loss.mean if v.loss.high is None else v.loss.high) for v in best]
    poor = [v for v, end in ends if unigram is not None and end is not None and end >= unigram]
    if poor:
        names = listed(f"{v.label} ({number(v.loss.mean)})" for v in poor)
        yield (
            f"Not shown to be better than counting {results.unit}s (unigram loss "
            f"{number(unigram)}): {names}."
        )


def _ranks(best: Sequence[Variant]) -> Iterator[str]:
    order = sorted((v for v in best if v.loss.mean is not None), key=lambda v: v.loss.mean or 0.0)
    if len(order) < 2:
        return
    names = [f"{v.arm.series} {number(v.loss.mean)}" for v in order]
    names += [f"{v.arm.series} (diverged)" for v in best if v.all_diverged]
    close = [
        f"{a.arm.series} and {b.arm.series}" for a, b in itertools.pairwise(order)
        if not difference(b, a).excludes_zero
    ]  # fmt: skip
    unsure = f" Not decided between these neighbours: {'; '.join(close)}." if close else ""
    yield f"From lowest to highest mean loss: {', '.join(names)}.{unsure}"


def divergence(results: Results) -> Iterator[str]:
    """Say which runs diverged and when; means of the others are flattered by their absence."""
    hit = [v for v in results.variants if v.count(DIVERGED)]
    if not hit:
        if results.runs and all(run.outcome != UNFINISHED for run in results.runs):
            yield "No run diverged."
        return
    each = []
    for v in hit:
        runs = [run for run in v.runs if run.outcome == DIVERGED]
        when = ", ".join(f"seed {run.seed} {state_text(run)[9:]}".strip() for run in runs)
        each.append(f"{v.label}: {len(runs)} of {len(v.runs)} ({when})")
    text = f"Diverged: {'; '.join(each)}."
    if any(not v.all_diverged and v.loss.mean is not None for v in hit):
        text += " Means cover the runs that did not diverge and so flatter these variants."
    yield text


def best_rates(results: Results, best: Sequence[Variant]) -> Iterator[str]:
    """Say that each variant is compared at its best rates, and where the best lies at an edge."""
    if not results.varied:
        return
    names = listed(name.replace("_", " ") for name in results.varied)
    trained = [v for v in best if v.loss.mean is not None]
    text = (
        f"Several values of {names} were tried. The sentences here compare each variant at its own "
        f"best ({'; '.join(v.label for v in trained)}), chosen on the same validation text and so "
        "a little flattered; the table compares at equal values."
    )
    edge = [v.arm.series for v in trained if _at_edge(results, v)]
    if edge:
        text += (
            f" The best lies at the edge of what was tried for {listed(edge)}: a wider range may "
            "do better."
        )
    yield text


def _at_edge(results: Results, variant: Variant) -> bool:
    own = [v.rates for v in results.variants if v.arm.name == variant.arm.name and v.rates]
    for name in results.varied:
        tried = {getattr(rates, name) for rates in own}
        ends = (min(tried), max(tried))
        if len(tried) > 1 and getattr(variant.rates, name) in ends:
            return True
    return False


def _many(best: Sequence[Variant], base: Variant | None) -> Iterator[str]:
    count = sum(v.loss.low is not None for v in best if v is not base)
    if count >= 4:
        yield (
            f"{count} variants are compared with the baseline, each by its own 95 % interval; about"
            " one interval in twenty misses the truth by chance, so a single close result needs"
            " care."
        )


# --- which of two removals hurts more -------------------------------------------------------------

_REMOVED = ("residual connections", "normalization")


def residual_or_norm(results: Results, best: Iterable[Variant]) -> list[Finding]:
    """Say whether removing residual connections or removing normalization hurts more."""
    by_x: dict[float | None, dict[str, Variant]] = {}
    for variant in best:
        changes = explanations.effective(results, variant.arm)
        for what in _REMOVED:
            if explanations.removes(changes, variant.arm.rows, what):
                by_x.setdefault(variant.arm.x, {}).setdefault(what, variant)
    duels = {
        x: _duel({what: found[what] for what in _REMOVED})
        for x, found in sorted(by_x.items(), key=lambda item: item[0] or 0.0)
        if len(found) == len(_REMOVED)
    }
    if not duels:
        return []
    text = next(iter(duels.values()))[1]
    if results.x:
        each = (f"at {results.x['name']} {x:g} {brief}" for x, (brief, _) in duels.items())
        text = f"What hurts more to remove: {'; '.join(each)}."
    return [Finding(MAIN, f"Residual connections or normalization? {text}")]


def _duel(without: Mapping[str, Variant]) -> tuple[str, str]:
    """Return what hurts more to remove, in a few words and in sentences."""
    dead = [what for what, variant in without.items() if variant.all_diverged]
    if len(dead) == len(without):
        return "neither can be trained", (
            "Every run diverged without either, so the loss cannot tell which hurts more."
        )
    for lost in dead:
        kept, survivor = next((what, v) for what, v in without.items() if what != lost)
        if survivor.losses:
            return f"{lost} (every run diverged; without {kept} some finished)", (
                f"Removing {lost} hurts more: every run without {lost} diverged, while "
                f"{survivor.loss.n} of {len(survivor.runs)} without {kept} finished, at a mean "
                f"loss of {number(survivor.loss.mean)}."
            )
    gap = difference(*without.values())
    if gap.mean is None:
        return "not known yet", "Not enough finished runs to compare the two by seed."
    more, less = list(without)[:: 1 if gap.mean > 0 else -1]
    plain = number(abs(gap.mean))
    size = plain if gap.half_width is None else f"{plain}\u00a0±\u00a0{number(gap.half_width)}"
    brief = f"{more}, by {size}"
    if gap.excludes_zero:
        text = (
            f"Removing {more} hurts more than removing {less}, by {size} nats ({pairs(gap)}). The "
            "95 % interval of the paired difference excludes 0, so this is clear at that level."
        )
    elif gap.low is None:
        brief += " in a single pair"
        text = f"Removing {more} ended higher by {size} nats, but one pair decides nothing."
    else:
        brief += ", not decided: the interval contains 0"
        text = (
            f"Not decided: removing {more} ended higher by {size} nats on average "
            f"({pairs(gap)}), but the 95 % interval of the paired difference contains 0."
        )
    lost = [(what, v.count(DIVERGED), len(v.runs)) for what, v in without.items()]
    if any(count for _, count, _ in lost):
        (first, n, runs), (second, m, others) = lost
        text += f" Without {first} {n} of {runs} runs diverged, without {second} {m} of {others}."
    return brief, text
