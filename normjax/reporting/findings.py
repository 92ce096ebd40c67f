"""The answer in words, made from the numbers.

Each sentence is made from effects (``effects.py``), which carry their interval, their number of
pairs and the condition that they were seen under; what all of it was seen under stands beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from normjax.reporting import effects, explanations
from normjax.reporting.effects import BETTER, UNDECIDED, UNKNOWN, WORSE, Effect, Effects
from normjax.reporting.results import DIVERGED, UNFINISHED, Results, Variant, difference
from normjax.reporting.tables import number, span
from normjax.reporting.wording import (
    DETAIL,
    MAIN,
    WARNING,
    Finding,
    capital,
    change,
    counted,
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
    found = effects.compare(results)
    return [
        *(Finding(MAIN, text) for text in _hurts_most(results, found)),
        *(Finding(MAIN, text) for text in _kinds(results, found)),
        *residual_or_norm(results, best, found.tells_apart),
        Finding(MAIN, seen_under(results)),
        *(Finding(DETAIL, text) for text in (
            *_baseline(results, best), *no_better_than_counting(results, best),
            *_order(results, found), *divergence(results), *best_rates(results, best),
            *many(found.count),
        )),
    ]  # fmt: skip


def _hurts_most(results: Results, found: Effects) -> Iterator[str]:
    """Name the series that is shown to be worse than every other, or say that none is."""
    if not any(e.base.losses for own in found.by_series.values() for e in own.values()):
        yield no_baseline(results)
        return
    lost = _lost(found)
    names = [name for name in found.by_series if name not in lost]
    if lost:
        subjects = listed(_subject(found, name, results) for name in lost)
        yield f"Every run diverged with {subjects}: that is worse than any loss."
    worse = [name for name in names if found.agreed(name) == WORSE]
    among = "Among what trained, " if lost else ""
    under = _under(found)
    candidates = [
        name for name in worse
        if not any(found.order(other, name) == WORSE for other in names if other != name)
    ]  # fmt: skip
    if len(candidates) > 1:
        each = (f"{_subject(found, name, results)} ({_costs(found, name)})" for name in candidates)
        yield (
            f"{among + 'w' if among else 'W'}hich hurts most is not decided between"
            f" {listed(each)}{under}."
        )
    elif candidates:
        name = candidates[0]
        subjects = _subject(found, name, results)
        first = all(found.order(name, other) == WORSE for other in names if other != name)
        start = f"{among}{subjects}" if among else capital(subjects)
        yield (
            f"{start} hurts most: {_costs(found, name)}{under}." if first else
            f"{start} costs {_costs(found, name)}{under}; whether another variant costs more is"
            " not decided."
        )  # fmt: skip


def _lost(found: Effects) -> list[str]:
    """Return the series of which every run diverged, whatever the condition."""
    return [
        name for name, own in found.by_series.items()
        if own and all(effect.variant.all_diverged for effect in own.values())
    ]  # fmt: skip


def _kinds(results: Results, found: Effects) -> Iterator[str]:
    """Sort the series by what is shown of them; a condition is named where they differ in it."""
    groups: dict[str, list[str]] = {}
    for name in found.by_series:
        groups.setdefault(found.agreed(name), []).append(name)
    lost = _lost(found)
    words = {
        WORSE: f"Shown to be worse than {results.baseline}",
        BETTER: f"Shown to be better than {results.baseline}",
        UNDECIDED: f"Not decided against {results.baseline}",
    }
    for kind, start in words.items():
        names = [name for name in groups.get(kind, ()) if name not in lost]
        names.sort(key=lambda n: -_mean(found.by_series[n]))
        if names and not (kind == WORSE and len(found.by_series) == 1):
            each = "; ".join(f"{name} {_costs(found, name)}" for name in names)
            yield f"{start}{_under(found)}: {each}." + (
                " That is no proof of equality: the effect, if any, lies within the interval."
                f" {more_seeds(results)}" if kind == UNDECIDED else ""
            )  # fmt: skip
    for name in groups.get("", ()):
        own = found.by_series[name]
        each = "; ".join(f"{own[c].kind} with {c} ({_cost(own[c])})" for c in own)
        yield f"{capital(_subject(found, name, results))} depends on the condition: {each}."
    unknown = groups.get(UNKNOWN, ())
    if unknown:
        yield f"Not known yet: {listed(unknown)}."


def _order(results: Results, found: Effects) -> Iterator[str]:
    """Say which of the other series are shown to differ, and where conditions disagree."""
    if len(found.by_series) < 2:
        return
    pairs = list(found.pairs)
    sure = [(a, b) if found.order(a, b) == WORSE else (b, a) for a, b in pairs
            if found.order(a, b) in (WORSE, BETTER)]  # fmt: skip
    below: dict[str, list[str]] = {}
    for high, low in sure:
        below.setdefault(high, []).append(low)
    if below:
        each = "; ".join(f"{name} more than {listed(own)}" for name, own in below.items())
        yield f"Shown to cost more than another variant{_under(found)}: {each}."
    turned = [
        f"{a} and {b} ({'; '.join(f'{c}: {change(e.gap)}' for c, e in own.items())})"
        for (a, b), own in found.pairs.items()
        if {e.kind for e in own.values()} >= {WORSE, BETTER}
    ]  # fmt: skip
    if turned:
        yield f"In an order that turns with the condition: {'; '.join(turned)}."
    open_pairs = [f"{a} and {b}" for a, b in pairs if found.order(a, b) == UNDECIDED]
    if open_pairs:
        yield f"Order not decided{_under(found)}: {shortened(open_pairs)}."


def _under(found: Effects) -> str:
    """Say that something holds under all conditions, where there are several."""
    count = len(found.conditions)
    if count < 2:
        return ""
    return f" under {'both' if count == 2 else 'all'} conditions ({', '.join(found.conditions)})"


def _subject(found: Effects, name: str, results: Results) -> str:
    return subject(results, next(iter(found.by_series[name].values())).variant)


def _mean(own: Mapping[str, Effect]) -> float:
    means = [math.inf if e.variant.all_diverged else e.gap.mean for e in own.values()]
    return max((m for m in means if m is not None), default=0.0)


def _costs(found: Effects, name: str) -> str:
    """Return a series' effect under every condition, in plan order."""
    own = found.by_series[name]
    texts = [_cost(own[c]) for c in found.conditions if c in own]
    return listed(dict.fromkeys(texts))


def _cost(effect: Effect) -> str:
    """Return one effect in nats: its size with interval and pairs, and what diverged."""
    lost, runs = effect.variant.count(DIVERGED), len(effect.variant.runs)
    if lost == runs:
        return "every run diverged"
    parts = [f"{change(effect.gap)} nats"] if effect.gap.mean is not None else []
    if effect.gap.low is None and parts:
        parts.append("without an interval")
    elif parts and effect.gap.n < runs:
        parts.append(pairs(effect.gap))
    if lost:
        parts.append(f"{lost} of {runs} runs diverged")
    return ", ".join(parts) or "no pair of finished runs"


def more_seeds(results: Results) -> str:
    """Return the command that decides more, as a sentence."""
    command = str(results.plan.get("command") or "").strip()
    if not command:
        return ""
    seeds = 2 * max(2, len(results.seeds))
    flag = f"--config.grid.seeds={seeds}"
    words = [w for w in command.split() if not w.startswith("--config.grid.seeds")]
    return f"More seeds decide more: {' '.join([*words, flag])}"


def seen_under(results: Results) -> str:
    """Say under what circumstances all of a page was seen."""
    config = results.plan.get("config") or {}
    model, data = config.get("model") or {}, results.plan.get("corpus") or {}
    steps = sorted({run.rates.steps for run in results.runs})
    rates = sorted({run.rates.learning_rate for run in results.runs})
    axis = sorted({arm.x for arm in results.arms if arm.x is not None})
    if results.x and axis:  # what the experiment varies is not what the configuration says
        model = model | {
            results.x["name"]: " to ".join(dict.fromkeys(f"{x:g}" for x in (axis[0], axis[-1])))
        }
    sizes = {"depth": "blocks" if model.get("depth") != 1 else "block", "width": "wide"}
    size = ", ".join(f"{model[name]} {word}" for name, word in sizes.items() if name in model)
    several = [c for c in results.conditions if c]
    inits = listed(several) if several else f"one initialization ({model.get('init', 'auto')})"
    how = "each variant at a rate of its own" if results.plan.get("tuning") else (
        "one rate for all" if len(rates) == 1 else "several rates"
    )  # fmt: skip
    ends = dict.fromkeys(f"{rate:g}" for rate in (*rates[:1], *rates[-1:]))
    text = (
        f"Seen with {inits}; {how} ({' to '.join(ends)}); {' and '.join(map(str, steps))} steps;"
        f" {size}; text"
        f" {data.get('name', '?')}; {counted(len(results.seeds), 'seed')}. Nothing here says what"
        " holds elsewhere"
    )
    if len(several) < 2:
        text += ", and with one initialization and rate an order may be theirs"
    return f"{text}."


def _baseline(results: Results, best: Sequence[Variant]) -> Iterator[str]:
    for base in best:
        mean = base.loss.mean
        if base.arm.series == results.baseline and mean is not None:
            loss, unit = base.loss, results.unit
            sure = "" if loss.low is None else f" (95 % interval {span(loss)}, {loss.n} seeds)"
            where = f" with {base.arm.condition}" if base.arm.condition else ""
            text = f"The baseline ({results.baseline}) ends at {number(mean)} nats per {unit}"
            yield f"{text}{where}{sure}{scales(mean, unit)}."
    yield references(results)


def no_better_than_counting(results: Results, best: Sequence[Variant]) -> Iterator[str]:
    """Name the variants that are not shown to beat models that only count."""
    ends = [(v, v.loss.mean if v.loss.high is None else v.loss.high) for v in best]
    said: list[str] = []
    for name, what in (("unigram", f"counting {results.unit}s"),
                       ("bigram", f"counting pairs of {results.unit}s")):  # fmt: skip
        loss = results.reference(name)
        poor = [v for v, end in ends if loss is not None and end is not None and end >= loss]
        shown = [f"{v.label} ({number(v.loss.mean)})" for v in poor if v.label not in said]
        said += [v.label for v in poor]
        if shown:
            yield (
                f"Not shown to be better than {what} ({name} loss {number(loss)}): {listed(shown)}."
            )


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
    if tuning := results.plan.get("tuning"):
        yield from _tuned(results, tuning)
    if not results.varied:
        return
    names = listed(name.replace("_", " ") for name in results.varied)
    trained = [v for v in best if v.loss.mean is not None]
    text = (
        f"Several values of {names} were tried. The sentences here compare each variant at its own "
        f"best ({'; '.join(v.label for v in trained)}), chosen on validation text with the same "
        "seeds and so a little flattered; the table compares at equal values."
    )
    edge = [v.arm.series for v in trained if _at_edge(results, v)]
    if edge:
        text += (
            f" The best lies at the edge of what was tried for {listed(edge)}: a wider range may "
            "do better."
        )
    yield text


def _tuned(results: Results, tuning: Mapping[str, Any]) -> Iterator[str]:
    """Say how the rates were chosen, and for which variants the range may have been too narrow."""
    rates, chosen = sorted(tuning["rates"]), tuning["chosen"]
    yield (
        f"Each variant trained at the best of {len(rates)} learning rates for it"
        f" ({', '.join(f'{rate:g}' for rate in rates)}), by the validation loss at step"
        f" {tuning['rungs'][-1]} of {counted(tuning['seeds'], 'run')} with seeds of their own. A"
        " rate that is best early need not be best at the end."
    )
    labels = {arm.name: f"{arm.series} ({arm.condition})" if arm.condition else arm.series
              for arm in results.arms}  # fmt: skip
    for end, word in ((rates[0], "lowest"), (rates[-1], "highest")):
        names = [labels[n] for n, own in chosen.items() if own["rate"] == end and n in labels]
        if names and len(rates) > 1:
            yield (
                f"The {word} rate tried was the best for {shortened(names)}: a wider range may do"
                " better."
            )


def _at_edge(results: Results, variant: Variant) -> bool:
    own = [v.rates for v in results.variants if v.arm.name == variant.arm.name and v.rates]
    for name in results.varied:
        tried = {getattr(rates, name) for rates in own}
        ends = (min(tried), max(tried))
        if len(tried) > 1 and getattr(variant.rates, name) in ends:
            return True
    return False


def many(count: int) -> Iterator[str]:
    """Say what "shown" means where several comparisons are made."""
    if count > 1:
        yield (
            f"{count} comparisons are made here. “Shown” means a p-value below"
            f" {effects.LEVEL:g} after Holm's correction for all of them; intervals are each one's"
            " own 95 %."
        )


# --- which of two removals hurts more -------------------------------------------------------------

_REMOVED = ("residual connections", "normalization")


def residual_or_norm(
    results: Results, best: Iterable[Variant], tells_apart: Callable[[Variant, Variant], bool]
) -> list[Finding]:
    """Say whether removing residual connections or removing normalization hurts more.

    ``tells_apart`` says of two variants whether the page's comparisons show that they differ.
    """
    found: dict[tuple[str, float | None], dict[str, Variant]] = {}
    for variant in best:
        changes = explanations.effective(results, variant.arm)
        for what in _REMOVED:
            if explanations.removes(changes, variant.arm.rows, what):
                place = (variant.arm.condition, variant.arm.x)
                found.setdefault(place, {}).setdefault(what, variant)
    duels = {
        place: _duel({what: own[what] for what in _REMOVED}, tells_apart)
        for place, own in sorted(found.items(), key=lambda item: (item[0][0], item[0][1] or 0.0))
        if len(own) == len(_REMOVED)
    }
    if not duels:
        return []
    if len(duels) == 1 and not results.x:
        text = next(iter(duels.values()))[1]
    else:
        name = results.x["name"] if results.x else ""
        each = (
            f"{f'at {name} {x:g}' if x is not None else f'with {condition}'}: {brief}"
            for (condition, x), (brief, _) in duels.items()
        )
        text = f"What hurts more to remove: {'; '.join(each)}."
    return [Finding(MAIN, f"Residual connections or normalization? {text}")]


def _duel(
    without: Mapping[str, Variant], tells_apart: Callable[[Variant, Variant], bool]
) -> tuple[str, str]:
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
    if tells_apart(*without.values()):
        text = f"Removing {more} hurts more than removing {less}, by {size} nats ({pairs(gap)})."
    elif gap.low is None:
        brief += " in a single pair"
        text = f"Removing {more} ended higher by {size} nats, but one pair decides nothing."
    else:
        brief += ", not decided"
        text = (
            f"Not decided: removing {more} ended higher by {size} nats on average ({pairs(gap)}),"
            " and chance alone may do that."
        )
    lost = [(what, v.count(DIVERGED), len(v.runs)) for what, v in without.items()]
    if any(count for _, count, _ in lost):
        (first, n, runs), (second, m, others) = lost
        text += f" Without {first} {n} of {runs} runs diverged, without {second} {m} of {others}."
    return brief, text
