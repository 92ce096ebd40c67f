"""The page of the stability map: the answers in sentences, each from numbers of the grid."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from experiments.stability import data, figures
from experiments.stability.data import (
    BARE,
    DIVERGES,
    EARLY,
    IS_STUCK,
    NEAR,
    NO_RESIDUAL,
    OPEN,
    POST,
    PRE,
    STUCK,
    TRAINS,
    MapCell,
    Place,
    Predictor,
    Stability,
)
from experiments.stability.figures import in_words
from normjax.diagnostics import verdict
from normjax.reporting import effects, html, report, statistics
from normjax.reporting.drawing import Figure
from normjax.reporting.html import Page, Section, details, muted
from normjax.reporting.statistics import Estimate
from normjax.reporting.tables import Column, Table, dotted, interval, number, stacked, tag, view
from normjax.reporting.wording import change, counted, listed

CELLS = Table([
    *(Column(name, lambda c, name=name: getattr(c.place, name)) for name in Place._fields),
    Column("learning_rate", lambda c: c.rate),
    Column("loss", lambda c: c.loss.mean),
    Column("loss_low", lambda c: c.loss.low),
    Column("loss_high", lambda c: c.loss.high),
    *(Column(name, lambda c, outcome=outcome: c.count(outcome)) for name, outcome in (
        ("trains", TRAINS), ("stuck", IS_STUCK), ("diverged", DIVERGES), ("unfinished", OPEN))),
    Column("runs", lambda c: len(c.trials)),
    Column("verdict", lambda c: "; ".join(dict.fromkeys(t.state for t in c.trials if t.state))),
])  # fmt: skip
PREDICTORS = Table([
    view("Number", lambda p: tag("code", p.name), "words"),
    view("Known", lambda p: p.when, "name"),
    view("Rank correlation", lambda p: number(p.value, True, 2), "n"),
    view("95 % interval", lambda p: f"{number(p.low, True, 2)} to {number(p.high, True, 2)}", "n"),
    view("Within one rate", lambda p: number(p.within, True, 2), "n"),
], empty="Too few finished runs with diagnostics.")  # fmt: skip
VERDICTS = Table([
    view("Run", lambda t: tag("code", t.folder.name), "id"),
    view("Verdict", lambda t: t.state, "name"),
    view("Why", lambda t: t.verdict.get("sentence", ""), "words"),
])  # fmt: skip


def write(workdir: Path) -> tuple[Path, str]:
    """Write ``stability.csv``, figures and ``stability.html``; return the page and its answer.

    Raises:
        UserError: if the workdir holds no usable plan.
    """
    stability = data.read_stability(Path(workdir))
    found = data.predictors(stability)
    cells = CELLS.csv(stability.cells(*stability.places))
    page = report.write_page(
        Path(workdir), "stability", cells, stability.results.plan,
        lambda: figures.all_figures(stability, found),
        lambda drawn: render(stability, found, drawn),
    )  # fmt: skip
    return page, report.wrapped(findings(stability, found))


def render(
    stability: Stability, found: Sequence[Predictor], drawn: Sequence[tuple[Figure, str]]
) -> str:
    """Return the page as one self-contained HTML text."""
    plan = stability.results.plan
    judged = sorted((t for t in stability.trials if t.verdict), key=lambda t: t.folder.name)
    verdicts = [details(f"All {len(judged)} runs", VERDICTS(judged))]
    places = sorted(stability.places, key=lambda place: (place.depth, place.warmup))
    return Page(
        plan["title"], plan["question"],
        lead=[muted("Expected beforehand: {}", plan["hypothesis"])],
        answer=findings(stability, found),
        sections=[
            *html.figure_sections(html.picture(figure, svg) for figure, svg in drawn),
            Section("places", "Every placement, depth and warm-up", [
                _places(stability)(places),
                muted('Every cell: <a href="stability.csv">stability.csv</a>. Every run and'
                      ' evaluation: <a href="results.csv">results.csv</a>; the runs one by one:'
                      ' <a href="report.html">report.html</a>.'),
            ]),
            Section("predictors", "Early predictors", [PREDICTORS(found[:30])]),
            *([Section("verdicts", "Verdicts", verdicts)] if judged else []),
        ],
        reading=html.reading(
            "<b>Outcomes.</b> Diverged: the loss or the gradient was not finite for many steps in a"
            " row. Stuck: the final loss is no lower than {stuck} nats below the unigram loss, that"
            " of a model that knows only how frequent each {unit} is. Trains: anything better. A"
            " cell trains if all its runs do.",
            "<b>Working range.</b> The powers of ten between the smallest and the largest learning"
            " rate of the grid whose mean loss is within {near} nats of the best rate's and at"
            " which no run diverged. None where not every run trains even at the best rate.",
            "<b>Not decided.</b> No difference is shown after Holm's correction over the"
            " comparisons of losses in the sentences above (of sensitivities: over theirs). The"
            " intervals, in sentences and table, are each one's own.",
            "<b>Sensitivity.</b> E[min(L(rate), L₀) − L*] over the learning rates of the grid,"
            " within each seed (Wortsman et al. 2023, arXiv 2309.14322). It depends on the range of"
            " rates: compare within a page. A variant that trains at no rate is insensitive too,"
            " and no better for it.",
            "<b>Early predictors.</b> Numbers at initialization or in the first {early:g} % of the"
            " steps; one number per run and diagnostic: the largest or smallest over layers, heads"
            " and parameters, or the last layer over the first. Spearman's correlation with the"
            " final loss, diverged runs last. Many were tried, so the strongest is flattered; its"
            " interval is not corrected for that.",
            "<b>What varies.</b> Few seeds, one text, small models and a short training: a map of"
            " this size, not a law.",
            stuck=STUCK, near=NEAR, early=100 * EARLY, unit=stability.results.unit,
        ),
        record=html.record(plan["command"], config=plan.get("config")),
    ).render()  # fmt: skip


def _places(stability: Stability) -> Table:
    """Return the table of places: best rate, loss, range, sensitivity, counts."""

    def rate(place: Place) -> str | None:
        best = stability.best(place)
        return None if best is None else f"{best.rate:.2g}"

    def loss(place: Place) -> str:
        best = stability.best(place)
        return interval(None if best is None else best.loss)

    def reach(place: Place) -> str:
        return number(stability.working_range(place), digits=1)

    def trains(place: Place) -> str:
        cells = stability.cells(place)
        return f"{sum(cell.trains for cell in cells)} of {len(cells)}"

    def count(place: Place, outcome: str) -> int:
        return sum(trial.outcome == outcome for trial in of(place))

    def states(place: Place) -> str:
        counts = Counter(trial.state or "not judged" for trial in of(place))
        return ", ".join(f"{n} {state}" for state, n in counts.most_common())

    def of(place: Place) -> list[data.Trial]:
        return [trial for cell in stability.cells(place) for trial in cell.trials]

    return Table([
        view("Blocks", lambda p: p.depth, "n"),
        view("Warm-up", lambda p: p.warmup, "n"),
        view("Placement", lambda p: dotted(stability.looks[p.series].colour, p.series), "name"),
        view("Best rate", rate, "n"),
        view("Loss there", loss, "n"),
        view(stacked("Working range", "powers of ten"), reach, "n"),
        view(stacked("Sensitivity", "nats"), lambda p: interval(stability.sensitivity(p)), "n"),
        view("Cells that train", trains, "n"),
        view("Diverged", lambda p: f"{count(p, DIVERGES)} of {len(of(p))}", "n"),
        view("Stuck", lambda p: count(p, IS_STUCK), "n"),
        view("Verdicts", states, "words"),
    ])  # fmt: skip


# --- words ----------------------------------------------------------------------------------------


def findings(stability: Stability, found: Sequence[Predictor]) -> list[str]:
    """Return the answers in sentences."""
    gaps = _gaps(stability)
    said = [
        _open(stability), _residual_or_norm(stability, gaps), _without_norm(stability, gaps),
        _pre_or_post(stability, gaps), _sensitivity(stability), _judged(stability),
        _predicted(found),
    ]  # fmt: skip
    return [text for text in said if text]


def _open(stability: Stability) -> str:
    waiting = sum(t.outcome == OPEN for t in stability.trials)
    if not waiting:
        return ""
    return f"{waiting} of {len(stability.trials)} runs are not finished: what follows may change."


@dataclasses.dataclass(frozen=True)
class Gap:
    """What a placement's loss lies above another's at a depth, each at its best cell.

    Attributes:
      value: over pairs of runs of one seed; without a mean where a side has no best cell.
      worse: whether the first is worse, as shown after Holm's correction over the comparisons that
        the page makes; None where that is not decided. No rate without a diverged run is worse
        than any loss.
    """

    value: Estimate
    worse: bool | None

    @property
    def words(self) -> str:
        """The difference, and whether it is shown to be one."""
        if self.value.mean is None:
            return "no rate without a diverged run"
        if self.value.low is None:
            return change(self.value) + " (no interval)"
        return change(self.value) + ("" if self.worse is not None else " (not decided)")


COMPARED = ((NO_RESIDUAL, PRE), (BARE, PRE), (NO_RESIDUAL, BARE), (POST, PRE))
"""What the sentences are about: the first against the second, at every depth."""


def _gaps(stability: Stability) -> dict[tuple[str, str, int], Gap]:
    """Return the comparisons that the grid has runs for, by pair and depth."""
    values, sides = {}, {}
    for pair in COMPARED:
        if not set(pair) <= set(stability.series):
            continue
        for depth in stability.values("depth"):
            own, other = (_best(stability, series, depth) for series in pair)
            sides[(*pair, depth)] = own, other
            both = own is not None and other is not None
            values[(*pair, depth)] = own.above(other) if both else Estimate(0)
    shown, out = effects.shown(values), {}
    for key, value in values.items():
        own, other = sides[key]
        worse = None
        if own is None or other is None:
            worse = None if own is other else own is None
        elif shown[key]:
            worse = (value.mean or 0) > 0
        out[key] = Gap(value, worse)
    return out


def _best(stability: Stability, series: str, depth: int) -> MapCell | None:
    """Return the best cell of a placement at a depth over rates and warm-ups."""
    warmups = stability.values("warmup")
    return stability.best_of([Place(series, depth, w) for w in warmups])


def _residual_or_norm(stability: Stability, gaps: dict[tuple[str, str, int], Gap]) -> str:
    if not {PRE, BARE, NO_RESIDUAL} <= set(stability.series):
        return ""
    parts, more, less, unsure = [], [], [], []
    for depth in stability.values("depth"):
        residual, norm = gaps[NO_RESIDUAL, PRE, depth], gaps[BARE, PRE, depth]
        parts.append(f"{counted(depth, 'block')} {residual.words} and {norm.words}")
        worse = gaps[NO_RESIDUAL, BARE, depth].worse
        (unsure if worse is None else more if worse else less).append(str(depth))
    said = [
        "Removing the residual path and removing every norm, each at its own best rate and warm-up,"
        f" cost against pre-norm, in nats: {listed(parts)}."
    ]
    for which, words in (
        (more, "The residual path matters more at"), (less, "The norms matter more at"),
        (unsure, "Which matters more is not decided at"),
    ):  # fmt: skip
        if which:
            noun = "block" if which == ["1"] else "blocks"
            said.append(f"{words} {listed(which)} {noun}.")
    return " ".join(said)


def _share(stability: Stability, series: str, depth: int) -> tuple[int, int]:
    cells = stability.cells(*(Place(series, depth, w) for w in stability.values("warmup")))
    return sum(c.trains for c in cells), len(cells)


def _without_norm(stability: Stability, gaps: dict[tuple[str, str, int], Gap]) -> str:
    if not {PRE, BARE} <= set(stability.series):
        return ""
    parts = []
    for depth in stability.values("depth"):
        own, base = _share(stability, BARE, depth), _share(stability, PRE, depth)
        parts.append(f"{counted(depth, 'block')} {own[0]} of {own[1]} (pre-norm {base[0]})")
    text = (
        "Without any norm a decoder trains in these numbers of cells of rate and warm-up:"
        f" {listed(parts)}."
    )
    shallow = stability.values("depth")[0]
    gap, base = gaps[BARE, PRE, shallow], _best(stability, PRE, shallow)
    unigram = stability.results.reference("unigram")
    if gap.value.mean is None or base is None or base.loss.mean is None:
        return text
    if gap.worse is None or unigram is None or unigram <= base.loss.mean:
        return text
    share = gap.value.mean / (unigram - base.loss.mean)
    return (
        f"{text} At {counted(shallow, 'block')} and its best rate it ends {gap.words} nats from"
        f" pre-norm: {share:.0%} of the way to the unigram loss, at which a decoder has learned"
        " nothing of order."
    )


def _pre_or_post(stability: Stability, gaps: dict[tuple[str, str, int], Gap]) -> str:
    if not {PRE, POST} <= set(stability.series):
        return ""
    warmups = stability.values("warmup")
    parts = []
    for depth in stability.values("depth"):
        ranges = []
        for series in (PRE, POST):
            for warmup in warmups:
                width = stability.working_range(Place(series, depth, warmup))
                ranges.append("none" if width is None else f"{width:.1f}")
        half = len(warmups)
        parts.append(
            f"{counted(depth, 'block')}: pre-norm {' / '.join(ranges[:half])}, post-norm"
            f" {' / '.join(ranges[half:])}, best losses {gaps[POST, PRE, depth].words} apart"
        )
    shown = " / ".join(map(in_words, warmups))
    return (
        "Pre-norm and post-norm: powers of ten of learning rate at which the mean loss is within"
        f" {NEAR:g} nats of the best ({shown}), and how far post-norm's best loss is from"
        f" pre-norm's: {'; '.join(parts)}."
    )


def _sensitivity(stability: Stability) -> str:
    """Say how sensitive those that train at the deepest are, and which are shown to differ."""
    deepest = stability.values("depth")[-1]
    parts, pairs = [], {}
    for warmup in stability.values("warmup"):
        places = [Place(series, deepest, warmup) for series in stability.series]
        known = [
            place for place in places
            if stability.working_range(place) is not None and stability.sensitivities(place)
        ]  # fmt: skip
        if known:
            each = [f"{p.series} {_unsigned(stability.sensitivity(p))}" for p in known]
            parts.append(f"{in_words(warmup)}: {listed(each)}")
        for a, b in combinations(known, 2):
            pairs[warmup, a.series, b.series] = statistics.paired(
                stability.sensitivities(a), stability.sensitivities(b)
            )
    if not parts:
        return ""
    shown = [
        f"{a} {'above' if (pairs[warmup, a, b].mean or 0) > 0 else 'below'} {b}"
        f" ({in_words(warmup)})"
        for (warmup, a, b), sure in effects.shown(pairs).items() if sure
    ]  # fmt: skip
    text = (
        f"Learning-rate sensitivity at {counted(deepest, 'block')}, in nats, of those that train at"
        f" their best rate: {'; '.join(parts)}."
    )
    if pairs:
        text += f" Shown to differ, of {counted(len(pairs), 'pair')}: {listed(shown) or 'none'}."
    return text


def _unsigned(value: Estimate) -> str:
    return change(value).removeprefix("+")


def _judged(stability: Stability) -> str:
    """Say how the verdicts on the diagnostics go with the outcomes."""
    counts: dict[str, list[int]] = {}
    for trial in stability.trials:
        if trial.state not in ("", "unknown") and trial.outcome != OPEN:
            own = counts.setdefault(trial.state, [0, 0])
            own[0] += trial.outcome == TRAINS
            own[1] += 1
    if not counts:
        return ""
    parts = [f"{counts[s][0]} of {counts[s][1]} {s}" for s in verdict.STATES if s in counts]
    return f"By the verdict on their diagnostics, so many runs train: {listed(parts)}."


def _predicted(found: Sequence[Predictor]) -> str:
    diagnostics = [p for p in found if p.when != "set by the grid"]
    if not diagnostics:
        return ""
    best = diagnostics[0]
    text = (
        f"Of {len(diagnostics)} numbers known early, {best.name} {best.when} has the largest rank"
        f" correlation with the outcomes: {number(best.value, True, 2)}"
        f" ({number(best.low, True, 2)} to {number(best.high, True, 2)}, which does not allow for"
        " its being the largest of so many)."
    )
    rate = next((p for p in found if p.name == "learning rate"), None)
    if rate is not None:
        text += f" The learning rate alone gives {number(rate.value, True, 2)}."
    inside = max(
        (p for p in diagnostics if p.within is not None),
        key=lambda p: abs(p.within or 0),
        default=None,
    )
    if inside is not None:
        text += (
            f" Among runs of one learning rate {inside.name} {inside.when} has the largest, with"
            f" {number(inside.within, True, 2)} on average."
        )
    return text
