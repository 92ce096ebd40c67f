"""Run folders to tables, figures and one HTML page. Imports no JAX: reports are made anywhere."""

from __future__ import annotations

import textwrap
from pathlib import Path

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


def write_survey(workdir: Path) -> Path:
    """Write ``spectrum.csv``, ``figures/`` and ``spectrum.html`` of a survey of spectra.

    Raises:
        UserError: if the workdir holds no usable survey.
    """
    from normjax.reporting import drawing, survey_data, survey_page

    folder = Path(workdir)
    survey = survey_data.load(folder)
    tables.write_text(folder / "spectrum.csv", survey_data.csv(survey))
    source = str(survey.record.get("command", ""))
    with drawing.style():
        made = survey_page.figures(survey)
    drawn = [(figure, drawing.save(figure, folder / "figures", source)) for figure in made]
    return tables.write_text(folder / "spectrum.html", survey_page.render(survey, drawn))


def survey_headline(workdir: Path) -> str:
    """Return what a survey found as plain text for a terminal."""
    from normjax.reporting import survey_data, survey_page

    survey = survey_data.load(Path(workdir))
    said = [*survey_page.warnings(survey), *survey_page.findings(survey)]
    return "\n".join(textwrap.fill(tables.plain(text), width=98) for text in said)


def write_stability(workdir: Path) -> Path:
    """Write ``stability.csv``, figures and ``stability.html`` of a map of learning rates.

    Raises:
        UserError: if the workdir holds no usable plan.
    """
    from normjax.reporting import drawing, stability_data, stability_page

    folder = Path(workdir)
    stability = stability_data.load(folder)
    found = stability_data.predictors(stability)
    tables.write_text(folder / "stability.csv", stability_page.csv(stability))
    source = str(stability.results.plan.get("command", ""))
    with drawing.style():
        made = stability_page.figures(stability, found)
    drawn = [(figure, drawing.save(figure, folder / "figures", source)) for figure in made]
    page = stability_page.render(stability, found, drawn)
    return tables.write_text(folder / "stability.html", page)


def stability_headline(workdir: Path) -> str:
    """Return what a map of learning rates says as plain text for a terminal."""
    from normjax.reporting import stability_data, stability_page

    stability = stability_data.load(Path(workdir))
    said = stability_page.findings(stability, stability_data.predictors(stability))
    return "\n".join(textwrap.fill(tables.plain(text), width=98) for text in said)


def write_mechanisms(workdir: Path) -> Path:
    """Write ``mechanisms.csv``, ``figures/`` and ``mechanisms.html`` of the tasks' workdirs.

    Raises:
        UserError: if the workdir holds no usable plan.
    """
    from normjax.reporting import drawing, mechanisms_data, mechanisms_figures, mechanisms_page

    folder = Path(workdir)
    found = mechanisms_data.load(folder)
    tables.write_text(folder / "mechanisms.csv", mechanisms_data.csv(found))
    source = str(found.record.get("command", ""))
    with drawing.style():
        made = mechanisms_figures.all_figures(found)
    drawn = [(figure, drawing.save(figure, folder / "figures", source)) for figure in made]
    return tables.write_text(folder / "mechanisms.html", mechanisms_page.render(found, drawn))


def mechanisms_headline(workdir: Path) -> tuple[str, bool]:
    """Return the verdicts as plain text, and whether floors and evaluation agree."""
    from normjax.reporting import mechanisms_data, mechanisms_page

    found = mechanisms_data.load(Path(workdir))
    alarms = mechanisms_page.alarms(found)
    said = [*alarms, *mechanisms_page.warnings(found), *mechanisms_page.answer(found)]
    words = [textwrap.fill(text, width=98) for text in said]
    text = "\n".join([mechanisms_page.TITLE, "", mechanisms_page.headline(found), "", *words])
    return tables.plain(text), not alarms


def _fingerprint(results: Results) -> str:
    return str(results.plan.get("corpus", {}).get("fingerprint", "unknown"))
