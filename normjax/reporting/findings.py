"""The answer in words, made from the numbers.

Each sentence is true of the numbers in summary.csv and says how sure it is: a difference is called
one only where its 95 % interval excludes 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def warnings(results: Results) -> list[Finding]:
    """Return what a reader must know before any number: unfinished runs, few seeds."""
    found = []
    cells = {cell.name: cell for cell in results.cells}
    left = [run for run in results.runs if run.outcome == UNFINISHED]
    if left:
        verb = "has" if len(left) == 1 else "have"
        each = (f"{cells[run.cell].name} seed {run.seed}: {state_text(run)}" for run in left)
        text = (
            f"This report is not complete: {len(left)} of {len(results.runs)} runs {verb} not "
            f"finished ({shortened(each)}). Means cover finished runs only; starting the same "
            "command again does what is left."
        )
        found.append(Finding(WARNING, text))
    used = {run.cell for run in results.runs}
    bare = [cell.name for cell in results.cells if cell.name not in used]
    if bare:
        found.append(Finding(WARNING, f"No run was planned for {listed(bare)}."))
    if len(results.seeds) == 1:
        text = "Only one seed was run. One seed gives no interval, so any difference may be chance."
        found.append(Finding(WARNING, text))
    elif len(results.seeds) == 2:
        text = (
            "Only two seeds were run: an interval from two values is 12.7 standard errors wide to "
            "each side, so little can be decided."
        )
        found.append(Finding(WARNING, text))
    return found


def comparison(results: Results) -> list[Finding]:
    """Return the findings of a grid without an x axis: what hurts, what does not, what diverged."""
    best = representatives(results)
    base = next((v for v in best if v.cell.series == results.baseline), None)
    others = [v for v in best if v is not base]
    found = [*_worst(results, base, others)]
    found += _rest(results, base, others)
    found += residual_or_norm(results, best)
    found += _baseline(results, base)
    found += no_better_than_counting(results, best)
    found += _ranks(results, best)
    found += divergence(results)
    found += best_rates(results, best)
    found += _many_comparisons(others)
    return found


def _worst(results: Results, base: Variant | None, others: list[Variant]) -> list[Finding]:
    lost = [v for v in others if v.all_diverged]
    trained = [v for v in others if difference(v, base).mean is not None]
    trained.sort(key=lambda v: difference(v, base).mean or 0.0, reverse=True)
    found = []
    if lost:
        names = listed(subject(results, v) for v in lost)
        runs = "every run" if len(lost) == 1 else "every run of each"
        found.append(f"{capital(names)} hurt{'s' if len(lost) == 1 else ''} most: {runs} diverged.")
    if base is None or base.loss.mean is None:
        return [Finding(MAIN, text) for text in [*found, no_baseline(results)]]
    if not trained:
        return [Finding(MAIN, text) for text in found]
    worst, gap = trained[0], difference(trained[0], base)
    unit = f"nats per {results.unit}"
    if (gap.mean or 0.0) <= 0:
        found.append(f"No variant that trained ends at a higher mean loss than {results.baseline}.")
    else:
        name = subject(results, worst)
        start = f"Among what trained, {name}" if lost else capital(name)
        found.append(f"{start} {_harm(gap, unit, lost)}")
        if len(trained) > 1 and gap.excludes_zero:
            found[-1] += " " + _runner_up(results, worst, trained[1])
    return [Finding(MAIN, text) for text in found]


def _harm(gap: Estimate, unit: str, lost: Sequence[Variant]) -> str:
    verb = "hurts most" if not lost else "costs most"
    if gap.excludes_zero:
        return f"{verb}: {change(gap)} {unit} (95 % interval {span(gap, True)}, {pairs(gap)})."
    if gap.low is None:
        return f"shows the largest difference: {change(gap)} {unit}, without an interval."
    return (
        f"has the largest mean difference, {change(gap)} {unit}, but its interval "
        f"({span(gap, True)}, {pairs(gap)}) contains 0: not distinguishable from the baseline."
    )


def _runner_up(results: Results, first: Variant, second: Variant) -> str:
    gap = difference(first, second)
    name = subject(results, second)
    if gap.excludes_zero:
        return f"It is clearly worse than the next, {name}: their difference is {change(gap)}."
    if gap.low is None:
        return f"The next is {name}, {change(gap)} apart."
    return (
        f"Whether it is worse than the next, {name}, is not decided: their difference, "
        f"{change(gap)}, has an interval that contains 0."
    )


def _rest(results: Results, base: Variant | None, others: list[Variant]) -> list[Finding]:
    """Sort the variants into worse, better and not distinguishable from the baseline."""
    gaps = [(v, difference(v, base)) for v in others]
    gaps = [(v, gap) for v, gap in gaps if gap.mean is not None]
    gaps.sort(key=lambda pair: pair[1].mean or 0.0, reverse=True)

    def item(pair: tuple[Variant, Estimate]) -> str:
        return f"{subject(results, pair[0])} {change(pair[1])}"

    worse = [item(p) for p in gaps if p[1].excludes_zero and (p[1].mean or 0) > 0]
    better = [item(p) for p in gaps if p[1].excludes_zero and (p[1].mean or 0) < 0]
    same = [item(p) for p in gaps if p[1].low is not None and not p[1].excludes_zero]
    bare = [item(p) for p in gaps if p[1].low is None]
    found = []
    if len(worse) > 1:
        found.append(
            f"Clearly worse than {results.baseline} (the interval of the difference excludes 0), "
            f"from most to least: {listed(worse)}."
        )
    if better:
        found.append(f"Clearly better than {results.baseline}: {listed(better)}.")
    if same:
        found.append(
            f"Not distinguishable from {results.baseline} with these seeds (the interval contains "
            f"0): {listed(same)}. That is no proof of equality; the effect, if any, lies within "
            "the interval."
        )
    if bare:
        found.append(f"Without an interval, so not decided: {listed(bare)}.")
    return [Finding(DETAIL, text) for text in found]


def _baseline(results: Results, base: Variant | None) -> list[Finding]:
    if base is None or base.loss.mean is None:
        return []
    text = f"The baseline ({results.baseline}) ends at {number(base.loss.mean)} nats"
    text += f" per {results.unit}"
    if base.loss.low is not None:
        text += f" (95 % interval {span(base.loss)}, {base.loss.n} seeds)"
    text += f"{scales(base.loss.mean, results.unit)}. {references(results)}"
    return [Finding(DETAIL, text.strip())]


def no_better_than_counting(results: Results, best: list[Variant]) -> list[Finding]:
    """Name the variants that are not shown to beat the unigram model."""
    unigram = results.reference("unigram")
    if unigram is None:
        return []
    poor = [v for v in best if v.loss.mean is not None and _upper(v) >= unigram]
    if not poor:
        return []
    names = listed(f"{v.label} ({number(v.loss.mean)})" for v in poor)
    text = (
        f"Not shown to be better than counting {results.unit}s (unigram loss {number(unigram)}): "
        f"{names}."
    )
    return [Finding(DETAIL, text)]


def _upper(variant: Variant) -> float:
    high = variant.loss.high
    return high if high is not None else variant.loss.mean or 0.0


def _ranks(results: Results, best: list[Variant]) -> list[Finding]:
    order = sorted((v for v in best if v.loss.mean is not None), key=lambda v: v.loss.mean or 0.0)
    if len(order) < 2:
        return []
    names = [f"{v.cell.series} {number(v.loss.mean)}" for v in order]
    names += [f"{v.cell.series} (diverged)" for v in best if v.all_diverged]
    text = f"From lowest to highest mean loss: {', '.join(names)}."
    close = [
        f"{a.cell.series} and {b.cell.series}"
        for a, b in zip(order, order[1:], strict=False)
        if not difference(b, a).excludes_zero
    ]
    if close:
        text += f" Not decided between these neighbours: {'; '.join(close)}."
    return [Finding(DETAIL, text)]


def divergence(results: Results) -> list[Finding]:
    """Say which runs diverged and when; means of the others are flattered by their absence."""
    hit = [v for v in results.variants if v.count(DIVERGED)]
    if not hit:
        finished = all(run.outcome != UNFINISHED for run in results.runs)
        return [Finding(DETAIL, "No run diverged.")] if finished and results.runs else []
    each = []
    for variant in hit:
        runs = [run for run in variant.runs if run.outcome == DIVERGED]
        when = ", ".join(f"seed {run.seed} {state_text(run)[9:]}".strip() for run in runs)
        each.append(f"{variant.label}: {len(runs)} of {len(variant.runs)} ({when})")
    text = f"Diverged: {'; '.join(each)}."
    if any(not v.all_diverged and v.loss.mean is not None for v in hit):
        text += " Means cover the runs that did not diverge and so flatter these variants."
    return [Finding(DETAIL, text)]


def best_rates(results: Results, best: list[Variant]) -> list[Finding]:
    """Say that each variant is compared at its best rates, and where the best lies at an edge."""
    if not results.varied:
        return []
    names = listed(name.replace("_", " ") for name in results.varied)
    each = [v.label for v in best if v.loss.mean is not None]
    text = (
        f"Several values of {names} were tried. The sentences here compare each variant at its own "
        f"best ({'; '.join(each)}), chosen on the same validation text and so a little flattered; "
        "the table compares at equal values."
    )
    edge = [v.cell.series for v in best if v.loss.mean is not None and _at_edge(results, v)]
    if edge:
        text += (
            f" The best lies at the edge of what was tried for {listed(edge)}: a wider range may "
            "do better."
        )
    return [Finding(DETAIL, text)]


def _at_edge(results: Results, variant: Variant) -> bool:
    own = [v.rates for v in results.variants if v.cell.name == variant.cell.name and v.rates]
    for name in results.varied:
        tried = sorted({getattr(rates, name) for rates in own})
        if len(tried) > 1 and getattr(variant.rates, name) in (tried[0], tried[-1]):
            return True
    return False


def _many_comparisons(others: list[Variant]) -> list[Finding]:
    count = sum(v.loss.low is not None for v in others)
    if count < 4:
        return []
    text = (
        f"{count} variants are compared with the baseline, each by its own 95 % interval; about "
        "one interval in twenty misses the truth by chance, so a single close result needs care."
    )
    return [Finding(DETAIL, text)]


# --- which of two removals hurts more -------------------------------------------------------------

_REMOVED = ("residual connections", "normalization")


def residual_or_norm(results: Results, best: Iterable[Variant]) -> list[Finding]:
    """Say whether removing residual connections or removing normalization hurts more."""
    by_x: dict[float | None, dict[str, Variant]] = {}
    for variant in best:
        changes = explanations.effective(results, variant.cell)
        for what in _REMOVED:
            if explanations.removes(changes, variant.cell.rows, what):
                by_x.setdefault(variant.cell.x, {}).setdefault(what, variant)
    duels = {x: cells for x, cells in by_x.items() if len(cells) == 2}
    if not duels:
        return []
    opening = "Residual connections or normalization?"
    if not results.x:
        text = _duel(*(next(iter(duels.values()))[what] for what in _REMOVED))
        return [Finding(MAIN, f"{opening} {text}")]
    name = results.x["name"]
    each = (
        f"at {name} {x:g} {_verdict(*(cells[what] for what in _REMOVED))}"
        for x, cells in sorted(duels.items(), key=lambda item: item[0] or 0.0)
    )
    return [Finding(MAIN, f"{opening} What hurts more to remove: {'; '.join(each)}.")]


def _verdict(residual: Variant, norm: Variant) -> str:
    """Return a duel's outcome in a few words."""
    if residual.all_diverged and norm.all_diverged:
        return "neither can be trained"
    if (norm.all_diverged and residual.losses) or (residual.all_diverged and norm.losses):
        lost, kept = _REMOVED[:: -1 if norm.all_diverged else 1]
        return f"{lost} (every run diverged; without {kept} some finished)"
    gap = difference(residual, norm)
    if gap.mean is None:
        return "not known yet"
    more = _REMOVED[0 if gap.mean > 0 else 1]
    if gap.low is None:
        return f"{more}, by {number(abs(gap.mean))} in a single pair"
    sure = "" if gap.excludes_zero else ", not decided: the interval contains 0"
    return f"{more}, by {number(abs(gap.mean))}\u00a0±\u00a0{number(gap.half_width)}{sure}"


def _duel(residual: Variant, norm: Variant) -> str:
    lost = (residual.count(DIVERGED), norm.count(DIVERGED))
    counts = (
        f"Without residual connections {lost[0]} of {len(residual.runs)} runs diverged, without "
        f"normalization {lost[1]} of {len(norm.runs)}."
    )
    if residual.all_diverged and norm.all_diverged:
        return "Every run diverged without either, so the loss cannot tell which hurts more."
    if norm.all_diverged and residual.loss.mean is not None:
        return _fatal(residual, "normalization", "residual connections")
    if residual.all_diverged and norm.loss.mean is not None:
        return _fatal(norm, "residual connections", "normalization")
    gap = difference(residual, norm)
    if gap.mean is None:
        return "Not enough finished runs to compare the two by seed."
    more, less = _REMOVED[:: 1 if gap.mean > 0 else -1]
    size = f"{number(abs(gap.mean))}" + (
        f"\u00a0±\u00a0{number(gap.half_width)}" if gap.half_width is not None else ""
    )
    if gap.excludes_zero:
        text = (
            f"Removing {more} hurts more than removing {less}, by {size} nats ({pairs(gap)}). The "
            "95 % interval of the paired difference excludes 0, so this is clear at that level."
        )
    elif gap.low is None:
        text = f"Removing {more} ended higher by {size} nats, but one pair decides nothing."
    else:
        text = (
            f"Not decided: removing {more} ended higher by {size} nats on average "
            f"({pairs(gap)}), but the 95 % interval of the paired difference contains 0."
        )
    return f"{text} {counts}" if any(lost) else text


def _fatal(survivor: Variant, lost: str, kept: str) -> str:
    return (
        f"Removing {lost} hurts more: every run without {lost} diverged, while "
        f"{survivor.loss.n} of {len(survivor.runs)} without {kept} finished, at a mean loss of "
        f"{number(survivor.loss.mean)}."
    )
