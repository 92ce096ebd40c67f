"""A scored prediction as sentences, as the rows of a table, and as lines for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from markupsafe import Markup

from normjax.predictions import record
from normjax.predictions.prediction import LOSSES, SERIES, Prediction
from normjax.reporting.html import Section, listing, muted
from normjax.reporting.palette import Look
from normjax.reporting.prediction import Growth, Item, Judged, LossScore, Pairs, Score
from normjax.reporting.rank_correlation import DRAWS, Correlation
from normjax.reporting.results import Results
from normjax.reporting.tables import Column, Table, dotted, interval, number, stacked, tag, view
from normjax.reporting.wording import counted, listed, shortened


class Placed(NamedTuple):
    """A row of the table: what was predicted, and its places in both orders."""

    item: Item
    predicted: float
    measured: float
    colour: str = ""

    @property
    def moved(self) -> str:
        """By how many places it came out elsewhere."""
        away = self.measured - self.predicted
        return f"{away:+g}".replace("-", "−") if away else "0"


def placed(score: Score, looks: Mapping[str, Look]) -> list[Placed]:
    """Return every item with its places; ``looks`` may be empty."""
    colours = {name: look.colour for name, look in looks.items()}
    places = zip(score.items, score.predicted, score.measured, strict=True)
    return [Placed(i, there, came, colours.get(i.series, "")) for i, there, came in places]


def table(prediction: Prediction, score: Score) -> Table:
    """Return the columns of a scored prediction; a ranking has no losses to show."""
    losses, kind = score.losses, "Series" if prediction.subject == SERIES else "Variant"
    expected = stacked("Expected", "loss") if losses else None
    entry = lambda name: lambda row: getattr(row.item.entry, name)  # noqa: E731
    loss = lambda name: lambda row: getattr(row.item.measured, name)  # noqa: E731
    shown = Table([
        Column("name", lambda row: row.item.name, kind,
               lambda row: dotted(row.colour, row.item.name), "name"),
        Column("predicted_rank", lambda row: row.predicted, stacked("Predicted", "place"),
               lambda row: f"{row.predicted:g}", "n"),
        Column("measured_rank", lambda row: row.measured, stacked("Measured", "place"),
               lambda row: f"{row.measured:g}", "n"),
        view(stacked("Moved by", "places"), lambda row: row.moved, "n"),
        Column("expected_loss", entry("loss"), expected, _expected, "n"),
        Column("expected_low", entry("low")),
        Column("expected_high", entry("high")),
        Column("measured_loss", loss("mean"), stacked("Measured", "loss"),
               lambda row: lost(row.item) or interval(row.item.measured), "n"),
        Column("measured_low", loss("low")),
        Column("measured_high", loss("high")),
        Column("diverged", lambda row: row.item.lost),
    ])  # fmt: skip
    more = []
    if losses:
        error = stacked("Error", "expected − measured")
        more.append(view(error, lambda row: number(row.item.error, signed=True), "n"))
    if losses and losses.intervals:
        words = {True: "yes", False: "no", None: "–"}
        more.append(view("Covered", lambda row: words[row.item.covered]))
    return Table([*shown.columns, *more])


def lost(item: Item) -> str:
    """Say how many of an item's seeds diverged, "" where none did."""
    if not item.lost:
        return ""
    return "diverged" if item.diverged else f"{item.lost} of {len(item.losses)} diverged"


def _expected(row: Placed) -> Markup:
    entry = row.item.entry
    known = entry.low is not None and entry.high is not None
    span = f"{number(entry.low)} to {number(entry.high)}" if known else ""
    return stacked(number(entry.loss), span)


def section(
    judged: Judged | None, results: Results, looks: Mapping[str, Look], picture: Any
) -> list[Section]:
    """Return the page's section: sentences, reason, and a table where scored; none without one."""
    if judged is None:
        return []
    prediction, score, growth = judged.stored.prediction, judged.score, judged.growth
    blocks = [tag("p", stored(judged), cls="warning" if judged.stored.problem else "")]
    if prediction and prediction.reason:
        blocks.append(tag("blockquote", prediction.reason))
    blocks += [tag("p", grown(growth), cls="warning")] if growth else []
    blocks += [listing(sentences(judged, results)), *([picture] if picture else [])]
    if score is not None and prediction is not None:
        rows = sorted(placed(score, looks), key=lambda row: row.item.standing)
        averaged = (
            "A series is ranked by the mean of its losses over its variants; a seed for which one"
            " of them diverged counts as diverged. "
        )
        blocks += [table(prediction, score)(rows), muted(
            "Place 1 is the lowest loss; equals share the mean of their places. {}The range of a"
            " correlation is the 95 % percentile interval of the bootstrap over whole seeds; from"
            ' few seeds it is coarse and rather too narrow. Record: <a href="prediction.json">'
            "prediction.json</a>, SHA-256 <code>{}…</code>,"
            ' <a href="figures/prediction.csv">data</a>.',
            averaged if prediction.subject == SERIES else "",
            str(judged.stored.record.get("seal", ""))[:16],
        )]  # fmt: skip
    if growth and growth.score is not None and prediction is not None:
        blocks += [tag("p", "Over all that ran:"),
                   listing(_scored(growth.score, prediction, results.unit))]  # fmt: skip
    return [Section("predicted", "Predicted and measured", blocks)]


def stored(judged: Judged) -> str:
    """Return whose prediction it is and when it was stored, or why it is not scored."""
    kept, prediction = judged.stored.record, judged.stored.prediction
    if judged.stored.problem or prediction is None:
        return f"{record.FILE} {judged.stored.problem}. It is not scored."
    what = "Losses" if prediction.kind == LOSSES else "An order"
    kind = "series" if prediction.subject == SERIES else "variants"
    by = f" by {prediction.author}" if prediction.author else ""
    when = str(kept.get("stored", "")).replace("T", " ").replace("+00:00", " UTC")
    steps = kept.get("steps_taken")
    return (
        f"{what} of {len(prediction.entries)} {kind}, predicted{by} and stored on {when}, when the"
        f" runs of this folder had taken {steps} steps. Their seeds are drawn from the prediction,"
        f" from {record.first_seed(kept['seal'])} on."
    )


def grown(growth: Growth) -> str:
    """Say how what ran differs from what was planned when the prediction was stored."""
    parts = [f"variants were added ({listed(growth.added)})"] if growth.added else []
    parts += [f"variants were left out ({listed(growth.dropped)})"] if growth.dropped else []
    if growth.seeds != growth.planned:
        count = counted(growth.seeds, "seed")
        parts.append(f"there {'is' if growth.seeds == 1 else 'are'} {count}, not {growth.planned}")
    first = " The score of what was planned comes first." if growth.score else ""
    return (
        f"The grid is not the one that was planned when the prediction was stored: {listed(parts)}."
        f" That may have been decided with a look at results.{first}"
    )


def sentences(judged: Judged, results: Results) -> list[str]:
    """Return how good the prediction was, the main number first."""
    said, prediction = [], judged.stored.prediction
    if judged.score is not None and prediction is not None:
        said = _scored(judged.score, prediction, results.unit)
    elif not judged.stored.problem:
        said.append("There is nothing to score yet: too few of what was predicted have finished.")
    if judged.open:
        said.append(f"Not scored, since no outcome is there: {listed(judged.open)}.")
    if judged.missing and not judged.stored.problem:
        said.append(f"Not predicted, so not scored: {listed(judged.missing)}.")
    return [text for text in said if text]


def _scored(score: Score, prediction: Prediction, unit: str) -> list[str]:
    said = []
    if len(score.items) > 1:
        said += [agreement(score), baselines(score), told_apart(score.pairs)]
    if score.losses is not None:
        said += _losses(score.losses, f"nats per {unit}", prediction.level)
    return [text for text in [*said, most_wrong(score), *_some_lost(score)] if text]


def headline(judged: Judged) -> list[str]:
    """Return the lines for a terminal: how the grid grew, the score, the most wrong."""
    prediction, score = judged.stored.prediction, judged.score
    if judged.stored.problem or prediction is None:
        return [f"Prediction: {stored(judged)}"]
    said = [grown(judged.growth)] if judged.growth is not None else []
    if score is None:
        said.append(f"Prediction: {stored(judged)}")
    else:
        by = f" by {prediction.author}" if prediction.author else ""
        said += [f"Predicted{by}: {_short(score)}.", most_wrong(score)]
    if judged.growth is not None and judged.growth.score is not None:
        said.append(f"Over all that ran: {_short(judged.growth.score)}.")
    return said


def _short(score: Score) -> str:
    rho, parts = score.spearman, []
    if rho.value is not None:
        parts.append(f"rank correlation {_value(rho.value)} (Spearman, p = {_p(rho)})")
    if score.pairs.decided:
        parts.append(f"{score.pairs.right} of {score.pairs.decided} decided pairs right")
    if score.losses is not None and score.losses.absolute is not None:
        parts.append(f"losses off by {number(score.losses.absolute)} nats on average")
    if score.losses is not None and score.losses.skill is not None:
        parts.append(f"intervals' skill {_value(score.losses.skill)} (0: the baseline, 1: perfect)")
    return ", ".join(parts) or "nothing to compare"


def agreement(score: Score) -> str:
    """Say how well the orders agree and how often chance would do as well."""
    rho, tau = score.spearman, score.kendall
    if rho.value is None:
        side = "predicted" if len(set(score.predicted)) == 1 else "measured"
        return f"No rank correlation exists: everything is {side} to be equal."
    count = "all" if rho.exact else "the drawn"
    how = "exact permutation test" if rho.exact else f"{DRAWS:,} drawn orders"
    return (
        f"The predicted and the measured order of {len(score.items)} agree to a Spearman"
        f" correlation of {_with_interval(rho)} and a Kendall tau-b of {_with_interval(tau)}. Of"
        f" {count} possible orders a share of {_p(rho)} reaches this Spearman correlation or a"
        f" higher one, and {_p(tau)} this tau-b ({how}, one-sided)."
    )


def baselines(score: Score) -> str:
    """Say what a random order and the order of parameter counts would score."""
    if score.spearman.value is None:
        return ""
    text = "A random order scores 0 on average"
    rho = score.spearman
    if rho.low is not None and rho.high is not None:
        side = "holds 0" if rho.low <= 0 <= rho.high else "does not hold 0"
        text += f" (the interval of the Spearman correlation {side})"
    if score.by_size.value is None:
        return f"{text}; the parameter counts give no order to compare with."
    return (
        f"{text}; expecting lower loss from more parameters scores"
        f" {_value(score.by_size.value)} (Spearman)."
    )


def told_apart(pairs: Pairs) -> str:
    """Say how the pairs that differ by more than their noise were predicted."""
    if not pairs.decided:
        return "No pair is told apart by the data, so no pair can be right or wrong."
    text = (
        f"The data tell {counted(pairs.decided, 'pair')} apart (95 % interval of the paired"
        " difference without 0, or all runs of one diverged and none of the other):"
        f" {pairs.right} predicted in the right order,"
        f" {len(pairs.wrong)} in the wrong one"
    )
    text += f", {pairs.equal} as equal." if pairs.equal else "."
    if pairs.wrong:
        each = shortened(f"{first} before {second}" for first, second in pairs.wrong)
        text += f" Wrong: {each}."
    return text


def most_wrong(score: Score) -> str:
    """Name the variant that came out furthest from what was expected."""
    if score.worst is None:
        return "Nothing is out of place."
    item = score.items[score.worst]
    places = (
        f"expected in place {score.predicted[score.worst]:g}, measured in place"
        f" {score.measured[score.worst]:g} of {len(score.items)}"
    )
    if score.losses is None:
        return f"Most wrong: {item.name}, {places}."
    came = f"measured {number(item.loss)}"
    if item.lost:
        came = "all its runs diverged" if item.diverged else lost(item)
    return f"Most wrong: {item.name}, expected {number(item.entry.loss)} nats, {came}."


def _losses(score: LossScore, unit: str, level: int) -> list[str]:
    said = []
    if score.absolute is not None and score.signed is not None:
        side = "above" if score.signed > 0 else "below"
        said.append(
            f"Expected losses differ from measured ones by {number(score.absolute)} {unit} on"
            f" average over {counted(score.n, 'variant')} (mean absolute error); with the sign kept"
            f" they lie {number(abs(score.signed))} {side}."
        )
    if score.intervals:
        share = 100 * score.covered / score.intervals
        said.append(
            f"Of {counted(score.intervals, 'stated interval')} {score.covered} "
            f"{'holds' if score.covered == 1 else 'hold'} the measured mean, {share:.0f} % where"
            f" {level} % was meant (about {score.intervals * level / 100:.1f})."
        )
    if score.interval is not None:
        said.append(_interval_score(score, unit, level))
    return said


def _interval_score(score: LossScore, unit: str, level: int) -> str:
    alpha = (100 - level) / 100
    text = (
        f"The intervals score {number(score.interval)} {unit} on average over"
        f" {counted(score.scored, 'variant')}, less is better: the width, and {2 / alpha:g} times"
        f" (2/alpha, alpha = {alpha:g}) by how much the measured mean lies outside (Gneiting and"
        " Raftery 2007)"
    )
    if score.reference is None or score.skill is None:
        return f"{text}; there is no baseline to compare with."
    made = f"the central {level} % range of the measured means of the others"
    if score.ceiling is not None:
        made = f"0 to the unigram loss, {number(score.ceiling)}, since too few others are there,"
    return (
        f"{text}. A forecaster who states for each {made} scores {number(score.reference)}: the"
        f" skill is {_value(score.skill)} (1 is perfect, 0 no better than that forecaster)."
    )


def _some_lost(score: Score) -> list[str]:
    last = [item.name for item in score.items if item.diverged]
    partly = [item.name for item in score.items if item.lost and not item.diverged]
    said = []
    if last:
        shared = ", equal among themselves" if len(last) > 1 else ""
        said.append(f"Diverged, and so in the last place{shared}: {listed(last)}.")
    if partly:
        put = "it" if len(partly) == 1 else "them"
        said.append(
            f"Some runs of {listed(partly)} diverged, which puts {put} behind all of which fewer"
            " did, whatever the others came to."
        )
    if score.losses is not None and (last or partly):
        said.append(
            "Where a run diverged there is no loss: a stated interval counts as missed, and it is"
            " in no mean of errors or scores, the baseline's included."
        )
    return said


def _with_interval(correlation: Correlation) -> str:
    shown = _value(correlation.value)
    if correlation.low is None or correlation.high is None:
        return shown
    return f"{shown} ({_value(correlation.low)} to {_value(correlation.high)} over seeds)"


def _value(value: float | None) -> str:
    return number(value, signed=True, digits=2)


def _p(correlation: Correlation) -> str:
    p = correlation.p
    if p is None or math.isnan(p):
        return "–"
    return f"{p:.2g}" if p < 0.1 else f"{p:.2f}"
