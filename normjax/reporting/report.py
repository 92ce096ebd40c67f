"""Run folders to tables, figures and one HTML page. Imports no JAX: reports are made anywhere."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normjax.reporting import (
    diagnostics_data,
    explanations,
    findings,
    loading,
    palette,
    prediction,
    prediction_words,
    tables,
    trends,
)
from normjax.reporting.results import DIVERGED, FINISHED, RATES, Variant, finite
from normjax.reporting.statistics import Estimate
from normjax.reporting.tables import Column, Table, number, span, view
from normjax.reporting.wording import DETAIL, runs_text

if TYPE_CHECKING:
    from normjax.reporting.drawing import Figure


def _metric(name: str, key: str) -> Column:
    return Column(name, lambda row: finite(row[2].get(key)))


def _rate(name: str) -> Column:
    return Column(name, lambda v: getattr(v.rates, name, None))


# A row is a run, its arm and an evaluation. Columns that hold times stand last, so that all others
# of two equal runs agree byte for byte.
RESULTS = Table([
    Column("run", lambda row: row[0].id),
    Column("arm", lambda row: row[0].arm),
    Column("series", lambda row: row[1].series),
    Column("x", lambda row: row[1].x),
    Column("seed", lambda row: row[0].seed),
    *(Column(name, lambda row, name=name: getattr(row[0].rates, name)) for name in RATES),
    Column("step", lambda row: row[2].get("step")),
    Column("tokens", lambda row: row[2].get("tokens")),
    _metric("train_loss", "train/loss"),
    _metric("validation_loss", "validation/loss"),
    _metric("test_loss", "test/loss"),
    _metric("gradient_norm", "gradient/norm"),
    Column("skipped_updates", lambda row: row[2].get("update/skipped")),
    Column("state", lambda row: row[0].state),
    Column("diverged_at", lambda row: row[0].diverged_at),
    _metric("time_wall_s", "time/wall_s"),
    _metric("time_tokens_per_s", "time/tokens_per_s"),
])  # fmt: skip


def _gap(variant: Variant) -> Estimate:
    return variant.difference or Estimate(0)


SUMMARY = Table([
    Column("arm", lambda v: v.arm.name),
    Column("series", lambda v: v.arm.series),
    Column("condition", lambda v: v.arm.condition),
    Column("x", lambda v: v.arm.x),
    *(_rate(name) for name in (*RATES, "steps")),
    Column("runs", lambda v: len(v.runs)),
    Column("finished", lambda v: v.count(FINISHED)),
    Column("diverged", lambda v: v.count(DIVERGED)),
    Column("rank", lambda v: v.rank, "rank"),
    view("variant", lambda v: v.label),
    Column("test_loss", lambda v: v.loss.mean, "loss", lambda v: number(v.loss.mean)),
    Column("test_loss_low", lambda v: v.loss.low, "95 % interval", lambda v: span(v.loss)),
    Column("test_loss_high", lambda v: v.loss.high),
    Column("test_loss_sd", lambda v: v.loss.sd),
    Column("seed_error", lambda v: v.loss.seed_error),
    Column("text_error", lambda v: v.loss.text_error),
    Column("difference", lambda v: _gap(v).mean, "vs baseline",
           lambda v: number(_gap(v).mean, signed=True)),
    Column("difference_low", lambda v: _gap(v).low, "95 % interval",
           lambda v: span(_gap(v), signed=True)),
    Column("difference_high", lambda v: _gap(v).high),
    Column("difference_p", lambda v: _gap(v).p),
    Column("pairs", lambda v: _gap(v).n),
    view("runs", runs_text),
    Column("parameters", lambda v: v.arm.parameters),
])  # fmt: skip


def write(workdir: Path) -> Path:
    """Write tables, ``figures/`` and ``report.html`` into a workdir, a verdict into each run.

    The tables are ``results.csv``, ``summary.csv`` and ``verdicts.csv``; a run's verdict is
    ``verdict.json`` in its folder.

    Args:
        workdir: folder with ``grid.json`` and ``runs/``; runs may be missing or unfinished.

    Returns:
        The path of the page.

    Raises:
        UserError: if the workdir holds no usable plan.
    """
    # Drawing takes half a second to import: not something that --help should wait for.
    from normjax.reporting import figures, page

    results = loading.load(Path(workdir))
    folder = results.workdir
    arms = {arm.name: arm for arm in results.arms}
    lines = ((r, arms[r.arm], line) for r in results.runs for line in r.evaluations or ({},))
    tables.write_text(folder / "results.csv", RESULTS.csv(lines))
    tables.write_text(folder / "summary.csv", SUMMARY.csv(results.variants))
    diagnostics = diagnostics_data.load(results)
    diagnostics_data.write(results, diagnostics)
    looks = palette.looks(results.series, results.baseline, explanations.colours(results))
    judged = prediction.judge(results)
    fingerprint = results.plan.get("corpus", {}).get("fingerprint", "unknown")
    drawn = _saved(
        folder, f"{results.plan.get('command', '')} (corpus {fingerprint})",
        lambda: figures.all_figures(results, looks, judged, diagnostics),
    )  # fmt: skip
    text = page.render(results, drawn, looks, judged, diagnostics)
    return tables.write_text(folder / "report.html", text)


def headline(workdir: Path) -> str:
    """Return the ranked table and the answer as plain text for a terminal.

    Args:
        workdir: folder with ``grid.json`` and ``runs/``.

    Returns:
        Lines without a trailing newline.

    Raises:
        UserError: if the workdir holds no usable plan.
    """
    results = loading.load(Path(workdir))
    said = [*findings.warnings(results), *trends.answer(results)]
    texts = [finding.text for finding in said if finding.kind != DETAIL]
    judged = prediction.judge(results)
    texts += [] if judged is None else prediction_words.headline(judged)
    title = f"{results.plan.get('title', '')} (test loss in nats per {results.unit})"
    ranking = SUMMARY.terminal(results.ranked())
    return "\n".join([tables.plain(title), "", ranking, "", wrapped(texts)])


def write_page(
    folder: Path, name: str, table: str, record: Mapping[str, Any],
    figures: Callable[[], Sequence[Figure]],
    render: Callable[[Sequence[tuple[Figure, str]]], str],
) -> Path:  # fmt: skip
    """Write NAME.csv, the figures, and NAME.html made of them; return the page."""
    tables.write_text(folder / f"{name}.csv", table)
    drawn = _saved(folder, str(record.get("command", "")), figures)
    return tables.write_text(folder / f"{name}.html", render(drawn))


def _saved(
    folder: Path, source: str, figures: Callable[[], Sequence[Figure]]
) -> list[tuple[Figure, str]]:
    """Draw figures and save them under ``figures/``; return each with its SVG text."""
    from normjax.reporting import drawing

    with drawing.style():
        made = figures()
    return [(figure, drawing.save(figure, folder / "figures", source)) for figure in made]


def wrapped(texts: Iterable[str]) -> str:
    """Return texts for a terminal, a paragraph each."""
    return "\n".join(textwrap.fill(tables.plain(text), width=98) for text in texts)
