"""Run folders to tables, figures and one HTML page. Imports no JAX: reports are made anywhere."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normjax.reporting import (
    findings,
    loading,
    palette,
    prediction,
    prediction_words,
    signal_data,
    tables,
    trends,
)
from normjax.reporting.results import Results
from normjax.reporting.wording import DETAIL

if TYPE_CHECKING:
    from normjax.reporting.drawing import Figure


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
    from normjax.reporting import drawing, figures, page

    results = loading.load(Path(workdir))
    folder = results.workdir
    tables.write_text(folder / "results.csv", tables.results_csv(results))
    tables.write_text(folder / "summary.csv", tables.summary_csv(results))
    signals = signal_data.load(results)
    signal_data.write(results, signals)
    looks = palette.looks(results.series, results.baseline)
    source = f"{results.plan.get('command', '')} (corpus {_fingerprint(results)})"
    judged = prediction.judge(results)
    drawn = [
        (figure, drawing.save(figure, folder / "figures", source))
        for figure in figures.all_figures(results, looks, judged, signals)
    ]
    text = page.render(results, drawn, looks, judged, signals)
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
    said = findings.warnings(results)
    said += [
        finding
        for finding in (trends.sweep(results) if results.x else findings.ablation(results))
        if finding.kind != DETAIL
    ]
    judged = prediction.judge(results)
    texts = [finding.text for finding in said]
    texts += [] if judged is None else prediction_words.headline(judged)
    answer = [textwrap.fill(tables.plain(text), width=98) for text in texts]
    title = f"{results.plan.get('title', '')} (validation loss in nats per {results.unit})"
    return "\n".join([tables.plain(title), "", tables.ranking(results), "", *answer])


def write_page(
    folder: Path, name: str, table: str, record: Mapping[str, Any],
    figures: Callable[[], Sequence[Figure]],
    render: Callable[[Sequence[tuple[Figure, str]]], str],
) -> Path:  # fmt: skip
    """Write NAME.csv, the figures, and NAME.html made of them; return the page."""
    from normjax.reporting import drawing

    tables.write_text(folder / f"{name}.csv", table)
    source = str(record.get("command", ""))
    with drawing.style():
        made = figures()
    drawn = [(figure, drawing.save(figure, folder / "figures", source)) for figure in made]
    return tables.write_text(folder / f"{name}.html", render(drawn))


def wrapped(texts: Iterable[str]) -> str:
    """Return texts for a terminal, a paragraph each."""
    return "\n".join(textwrap.fill(tables.plain(text), width=98) for text in texts)


def _fingerprint(results: Results) -> str:
    return str(results.plan.get("corpus", {}).get("fingerprint", "unknown"))
