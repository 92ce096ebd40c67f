"""The page of the ladder: one table, loss against cost, and what is shown of whom."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.ladder import data
from experiments.ladder.data import Ladder, Passed, Rung
from normjax.reporting import drawing, explanations, html, palette, pictures, report
from normjax.reporting.drawing import Figure
from normjax.reporting.effects import BETTER, LEVEL, UNDECIDED, UNKNOWN, WORSE
from normjax.reporting.html import Page, Section, muted
from normjax.reporting.pictures import Axis, Panel
from normjax.reporting.results import DIVERGED
from normjax.reporting.statistics import Estimate
from normjax.reporting.tables import Column, Table, dotted, interval, number, stacked
from normjax.reporting.wording import capital, counted, listed

KINDS = {WORSE: "worse", BETTER: "better", UNDECIDED: "not decided", UNKNOWN: "not known"}


def _gap(rung: Rung) -> Estimate:
    return Estimate(0) if rung.effect is None else rung.effect.gap


def _said(rung: Rung) -> str:
    return "baseline" if rung.effect is None else KINDS[rung.effect.kind]


def _numbers(name: str, of: Any) -> list[Column]:
    """Return the columns of a mean and its interval that only the file has."""
    return [
        Column(name, lambda r: of(r).mean), Column(f"{name}_low", lambda r: of(r).low),
        Column(f"{name}_high", lambda r: of(r).high),
    ]  # fmt: skip


def _loss(rung: Rung) -> Any:
    diverged = rung.variant.count(DIVERGED)
    return stacked(
        interval(rung.variant.loss), counted(len(rung.variant.runs), "seed"),
        f"{diverged} diverged" if diverged else "",
    )  # fmt: skip


def _rate(rung: Rung) -> Any:
    wrong = f"sensitivity {number(rung.sensitivity.mean)}"
    return stacked(
        f"{rung.rate:.2g}" if rung.rate is not None else "–",
        wrong if rung.sensitivity.mean is not None else "", "end of range" * rung.at_edge,
    )  # fmt: skip


def _cost(rung: Rung) -> Any:
    a, s, p = rung.multiply_adds, rung.seconds, rung.parameter_bytes
    return stacked(
        "–" if a is None else f"{a / 1e3:,.0f}k", s and f"{1e3 * s:.1f} ms a step",
        p and f"{p / 1e3:,.0f} kB", "Pareto" * rung.front,
    )  # fmt: skip


def _passed(found: Passed | None) -> Any:
    return stacked(number(found.mean_log10, True, 2), f"rms {found.rms:.3g}") if found else None


def _signals(rung: Rung) -> Any:
    growth, entropy = rung.growth, rung.entropy
    return stacked(
        "–" if growth is None else f"× {growth:.3g}",
        "" if entropy is None else f"entropy {entropy:.2g}",
    )  # fmt: skip


def _of(name: str, part: str) -> Column:
    return Column(f"{name}_{part}", lambda r: getattr(getattr(r, name), part, None))


def table(ladder: Ladder) -> Table:
    """Return the table, with headings for the depths where there are several."""
    base = ladder.results.baseline
    depths = {rung.depth for rung in ladder.rungs}
    columns = [
        Column("placement", lambda r: r.variant.arm.series, "Placement",
               lambda r: dotted(r.variant.arm.colour or palette.MUTED,
                                r.variant.arm.title.rsplit(", ", 1)[0])),
        Column("depth", lambda r: r.depth),
        *_numbers("test_loss", lambda r: r.variant.loss),
        Column(title="Loss", text=_loss, kind="n"),
        *_numbers("difference", _gap),
        Column("adjusted_p", lambda r: r.effect and r.effect.adjusted),
        Column("shown", _said),
        Column(title=f"Against {base}", kind="n",
               text=lambda r: stacked(interval(r.effect and _gap(r), True), _said(r))),
        Column("seeds", lambda r: len(r.variant.runs)),
        Column("diverged", lambda r: r.variant.count(DIVERGED)),
        Column("learning_rate", lambda r: r.rate, "Rate", _rate, "n"),
        Column("rate_at_end_of_range", lambda r: int(r.at_edge)),
        *_numbers("rate_sensitivity", lambda r: r.sensitivity),
        Column("multiply_adds_per_token", lambda r: r.multiply_adds, "Cost", _cost, "n"),
        Column("milliseconds_per_step", lambda r: r.seconds and 1e3 * r.seconds),
        Column("parameter_bytes", lambda r: r.parameter_bytes),
        Column("pareto", lambda r: int(r.front)),
        *(_of(name, part) for name in ("before", "after") for part in ("mean_log10", "rms")),
        Column(title="Stack at first", text=lambda r: _passed(r.before), kind="n"),
        Column(title="trained", text=lambda r: _passed(r.after), kind="n"),
        Column("residual_growth", lambda r: r.growth, "Growth", _signals, "n"),
        Column("attention_entropy", lambda r: r.entropy),
    ]  # fmt: skip
    return Table(
        columns,
        group=lambda r: counted(r.depth, "block") if len(depths) > 1 else "",
        empty="No run has finished yet.",
    )


def write(workdir: Path) -> tuple[Path, str]:
    """Write ``ladder.csv``, the picture and ``ladder.html``; return the page and its answer.

    Raises:
      UserError: the workdir holds no usable record.
    """
    ladder = data.read(Path(workdir))
    page = report.write_page(
        Path(workdir), "ladder", table(ladder).csv(ladder.rungs), ladder.record,
        lambda: pareto(ladder), lambda drawn: render(ladder, drawn),
    )  # fmt: skip
    return page, report.wrapped(findings(ladder))


def pareto(ladder: Ladder) -> list[Figure]:
    """Draw loss against arithmetic and against time; empty where nothing finished."""
    costs = {
        "10³ multiply-adds per token": lambda r: r.multiply_adds and r.multiply_adds / 1e3,
        "ms per step": lambda r: r.seconds and 1e3 * r.seconds,
    }
    rows = [
        {
            "placement": r.variant.arm.series, "depth": r.depth, "loss": r.variant.loss.mean,
            "measure": name, "cost": cost(r), "pareto": int(r.front),
        }
        for name, cost in costs.items() for r in ladder.rungs
        if r.variant.loss.mean is not None and cost(r) is not None
    ]  # fmt: skip
    if not rows:
        return []
    r = ladder.results
    looks = palette.looks(r.series, r.baseline, explanations.colours(r))
    looks = {name: dataclasses.replace(look, dash="") for name, look in looks.items()}
    panels = [
        Panel(own, name, Axis("cost", name)) for name, own in pictures.by(rows, "measure").items()
    ]
    y = Axis("loss", f"test loss (nats per {r.unit})")
    canvas = pictures.lines(
        panels, looks, Axis("cost"), y, height=4.2, columns=2, series="placement",
        joined=False,
    )  # fmt: skip
    caption = (
        "Mean test loss against what a training step costs, every placement and depth. Time is of"
        " this machine, with whatever else it did."
    )
    return [drawing.figure("loss_by_cost", "Loss against cost", caption, canvas, rows)]


def findings(ladder: Ladder) -> list[str]:
    """Return what came out, a sentence each: nothing beyond what is shown."""
    said, base = [], ladder.results.baseline
    for depth in dict.fromkeys(rung.depth for rung in ladder.rungs):
        own = [rung for rung in ladder.rungs if rung.depth == depth]
        known = [r for r in own if r.variant.loss.mean is not None]
        if not known:
            continue
        best = min(known, key=lambda r: r.variant.loss.mean or 0.0)
        told = [f"At {counted(depth, 'block')} the lowest mean loss,"
                f" {number(best.variant.loss.mean)}, has {best.variant.arm.series}."]  # fmt: skip
        for kind, words in KINDS.items():
            names = [r.variant.arm.series for r in own if r.effect and r.effect.kind == kind]
            than = f" than {base}" if kind in (WORSE, BETTER) else ""
            told += [f"{capital(words)}{than}: {listed(names)}."] if names else []
        said.append(" ".join(told))
    most = ladder.looks[-1] * len(ladder.results.variants)
    spared = most - len(ladder.results.runs)
    if spared:
        said.append(f"{spared} of {most} runs were not needed: their comparisons were decided.")
    edge = [r.variant.arm.name for r in ladder.rungs if r.at_edge]
    if edge:
        said.append(
            f"The rate chosen is the smallest or largest tried for {listed(edge)}: one beyond may"
            " be better."
        )
    return said


def render(ladder: Ladder, drawn: Sequence[tuple[Figure, str]]) -> str:
    """Return the page as one self-contained HTML text."""
    record, results = ladder.record, ladder.results
    grids = listed(f"look-{seeds}" for seeds in record["reached"])
    return Page(
        record["title"], record["question"],
        lead=[muted("Expected beforehand: {}", record["hypothesis"])],
        answer=findings(ladder),
        sections=[
            Section("ladder", "The table", [
                table(ladder)(ladder.rungs),
                muted('All digits: <a href="ladder.csv">ladder.csv</a>. Every run: report.html and'
                      " results.csv in {}.", grids),
            ]),
            *html.figure_sections(html.picture(figure, svg) for figure, svg in drawn),
        ],
        reading=html.reading(
            "<b>Loss.</b> Of test text, in nats per {unit}: mean over seeds of the runs that"
            " finished, with its own 95 % interval.",
            "<b>Against {base}.</b> Paired by seed, each at its own rate, with its own 95 %"
            " interval. Worse or better is said where that is shown at an overall error of"
            " {level:g}: p-values of Student's t times the number of looks ({looks}), then Holm's"
            " method over {count}. The error holds for differences that are normal;"
            " none is stated for variants of which runs diverged: all of one side and none of the"
            " other counts as shown.",
            "<b>Seeds.</b> After {seeds} seeds a comparison stops where its p-value, times the"
            " number of looks and of comparisons, is below {level:g}.",
            "<b>Rate.</b> Chosen on validation text with other seeds. <b>Sensitivity</b> is"
            " E[min(L(rate), L₀) − L*] over the rates tried (Wortsman et al. 2023, arXiv"
            " 2309.14322), of the validation loss at the first rung of tuning: after it, half of"
            " the rates are dropped.",
            "<b>Cost.</b> Multiply-adds of the matrix products for a training token, backward pass"
            " included: what a norm or a gate multiplies elementwise is not among them. Wall time"
            " of a step of one run among those that trained together, the fastest seen, compiling"
            " and evaluation left out; then bytes of parameters. Pareto: no other row is lower in"
            " one of mean loss, multiply-adds and time, and no higher in the others.",
            "<b>Stack.</b> Singular values of the Jacobian of all blocks at a token: mean of their"
            " log₁₀ without the directions that the norms forget, and below their root mean"
            " square. One seed, {sequences}.",
            "<b>Growth.</b> The largest ratio of the stream behind the last sub-layer to that"
            " before the first one, and the smallest collision entropy of a head's attention, as a"
            " share of the largest possible, over all steps and seeds.",
            "<b>What varies.</b> Few seeds, one text, small models and a short training: a ladder"
            " of this size, not a law.",
            unit=results.unit, base=results.baseline, level=LEVEL, looks=len(ladder.looks),
            count=counted(len(ladder.compared), "comparison"), seeds=listed(map(str, ladder.looks)),
            sequences=counted(record["config"]["ladder"]["sequences"], "sequence"),
        ),
        record=html.record(record["command"], config=record["config"]),
    ).render()  # fmt: skip
