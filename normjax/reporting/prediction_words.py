"""A scored prediction as sentences, as the rows of a table, and as two lines for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from normjax.predictions import record
from normjax.predictions.prediction import LOSSES, SERIES
from normjax.reporting import palette
from normjax.reporting.palette import Look
from normjax.reporting.prediction import Judged, LossScore, Pairs, Score
from normjax.reporting.rank_correlation import DRAWS, Correlation
from normjax.reporting.results import Results
from normjax.reporting.tables import number
from normjax.reporting.wording import listed, shortened


def section(judged: Judged, results: Results, looks: Mapping[str, Look]) -> dict[str, Any]:
    """Return what the page's section is made of: sentences, reason, and a table where scored."""
    prediction = judged.stored.prediction
    score = judged.score
    return {
        "stored": stored(judged),
        "problem": judged.stored.problem,
        "reason": prediction.reason if prediction else "",
        "said": sentences(judged, results),
        "rows": [] if score is None else _rows(score, looks),
        "losses": score is not None and score.losses is not None,
        "intervals": score is not None and bool(score.losses and score.losses.intervals),
        "level": prediction.level if prediction else None,
        "series": prediction is not None and prediction.subject == SERIES,
        "sha256": str(judged.stored.record.get("sha256", "")),
    }


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
        f" runs of this folder had taken {steps} steps."
    )


def sentences(judged: Judged, results: Results) -> list[str]:
    """Return how good the prediction was, the main number first."""
    said = []
    if judged.score is not None:
        score = judged.score
        if len(score.items) > 1:
            said += [agreement(score), baselines(score), told_apart(score.pairs)]
        if score.losses is not None and judged.stored.prediction is not None:
            level = judged.stored.prediction.level
            said += [*_losses(score.losses, f"nats per {results.unit}", level)]
        said.append(most_wrong(score))
        said += _some_lost(score)
    elif not judged.stored.problem:
        said.append("There is nothing to score yet: too few of what was predicted have finished.")
    if judged.open:
        said.append(f"Not scored, since no outcome is there: {listed(judged.open)}.")
    if judged.missing and not judged.stored.problem:
        said.append(f"Not predicted, so not scored: {listed(judged.missing)}.")
    return [text for text in said if text]


def headline(judged: Judged) -> list[str]:
    """Return two lines for a terminal."""
    prediction, score = judged.stored.prediction, judged.score
    if judged.stored.problem or score is None or prediction is None:
        return [f"Prediction: {stored(judged)}"]
    by = f" by {prediction.author}" if prediction.author else ""
    rho = score.spearman
    parts = []
    if rho.value is not None:
        parts.append(f"rank correlation {_value(rho.value)} (Spearman, p = {_p(rho)})")
    if score.pairs.decided:
        parts.append(f"{score.pairs.right} of {score.pairs.decided} decided pairs right")
    if score.losses is not None and score.losses.absolute is not None:
        parts.append(f"losses off by {number(score.losses.absolute)} nats on average")
    return [f"Predicted{by}: {', '.join(parts) or 'nothing to compare'}.", most_wrong(score)]


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
        f"The data tell {_count(pairs.decided, 'pair')} apart (95 % interval of the paired"
        f" difference without 0, or one diverged): {pairs.right} predicted in the right order,"
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
    came = "all its runs diverged" if item.diverged else f"measured {number(item.measured.mean)}"
    return f"Most wrong: {item.name}, expected {number(item.entry.loss)} nats, {came}."


def _losses(score: LossScore, unit: str, level: int) -> list[str]:
    said = []
    if score.absolute is not None and score.signed is not None:
        side = "above" if score.signed > 0 else "below"
        said.append(
            f"Expected losses differ from measured ones by {number(score.absolute)} {unit} on"
            f" average over {_count(score.n, 'variant')} (mean absolute error); with the sign kept"
            f" they lie {number(abs(score.signed))} {side}."
        )
    if score.intervals:
        share = 100 * score.covered / score.intervals
        said.append(
            f"Of {_count(score.intervals, 'stated interval')} {score.covered} "
            f"{'holds' if score.covered == 1 else 'hold'} the measured mean, {share:.0f} % where"
            f" {level} % was meant (about {score.intervals * level / 100:.1f})."
        )
    return said


def _some_lost(score: Score) -> list[str]:
    last = [item.name for item in score.items if item.diverged]
    partly = [item.name for item in score.items if item.lost and not item.diverged]
    said = []
    if last:
        shared = ", equal among themselves" if len(last) > 1 else ""
        said.append(f"Diverged, and so in the last place{shared}: {listed(last)}.")
    if partly:
        said.append(
            f"Some runs of {listed(partly)} diverged; the measured means cover the others and"
            " flatter."
        )
    return said


def _rows(score: Score, looks: Mapping[str, Look]) -> list[dict[str, Any]]:
    order = sorted(range(len(score.items)), key=lambda i: score.items[i].value)
    return [
        {
            "name": score.items[i].name,
            "colour": palette.variable(looks[score.items[i].series].colour),
            "predicted": f"{score.predicted[i]:g}",
            "measured": f"{score.measured[i]:g}",
            "moved": f"{score.measured[i] - score.predicted[i]:+g}".replace("-", "−")
            if score.measured[i] != score.predicted[i]
            else "0",
            "entry": score.items[i].entry,
            "loss": score.items[i].measured,
            "diverged": score.items[i].diverged,
            "error": score.items[i].error,
            "covered": {True: "yes", False: "no", None: "–"}[score.items[i].covered],
        }
        for i in order
    ]


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


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
