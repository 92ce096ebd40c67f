"""The part of the page on diagnostics: verdicts, heat maps, profiles, autopsies, definitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from normjax.diagnostics import bands, definitions, verdict
from normjax.diagnostics.bands import Band
from normjax.reporting import diagnostics_data, html
from normjax.reporting.diagnostics_data import CHOSEN, VERDICTS, Diagnostics, slug
from normjax.reporting.html import Picture, Section, details, muted, part, prose
from normjax.reporting.palette import Look
from normjax.reporting.results import Results
from normjax.reporting.tables import Table, tag, view
from normjax.reporting.wording import capital, listed

BANDS = Table([
    view("Diagnostic", lambda row: row[0]),
    view("Out of its band", lambda row: row[1]),
    view("What that means", lambda row: row[2].reason, "words"),
    view("Needs", lambda row: row[2].needs, "words"),
    view("Why one side only", lambda row: row[2].one_sided, "words"),
    view("Source", lambda row: row[2].source, "words"),
])  # fmt: skip


def sections(
    results: Results,
    diagnostics: Diagnostics,
    pictures: dict[str, Picture],
    looks: Mapping[str, Look],
) -> list[Section]:
    """Return the sections of the part; none where no run measured anything inside.

    Takes its pictures out of ``pictures``.
    """
    if not diagnostics.known:
        return []
    rows = [
        row
        for row in diagnostics_data.judged(results, diagnostics, looks)
        if row.verdict is not None
    ]
    counts = Counter(row.verdict.state for row in rows if row.verdict)
    said = [f"{counts[state]} {state}" for state in verdict.STATES if counts[state]]

    def take(start: str) -> list[Picture]:
        return [pictures.pop(name) for name in list(pictures) if name.startswith(start)]

    autopsies, maps, profiles = take("autopsy_"), take("diagnostic_"), take("profiles_")
    first = {f"diagnostic_{slug(name)}" for name in CHOSEN}
    chosen = [part(p.title, p) for p in maps if p.name in first]
    others = [part(p.title, p) for p in maps if p.name not in first]
    told = [
        part(run, capital(each.sentence), *(p for p in autopsies if p.name == f"autopsy_{run}"))
        for run, (each, _) in diagnostics.autopsies.items()
    ]
    made = [
        Section("verdicts", "Verdicts", [
            f"Of {len(rows)} runs: {listed(said)}.",
            muted("{}", str(diagnostics.self_test)) if diagnostics.self_test else Markup(""),
            muted(
                "The first that holds. Diverged: the run ended so. Unstable: loss or gradient norm"
                " spiked, or something was not finite. Not learning: the final loss is not below"
                " that of who knows only how frequent tokens are, and nothing shows that more steps"
                " would help. Too slow: the same, but the loss was still falling. Drifting: a"
                ' diagnostic was outside its <a href="#bands">band</a> at some step. Idle part: a'
                " part did next to nothing. Cheap diagnostics are measured at every step, the"
                " others at samples; what could not be judged is listed. “First” is the smallest"
                " step; within a step causes come before effects: gains, then the forward pass from"
                " the input on, the loss, gradients from the output back, the optimizer's step. Of"
                " what left its band later than at step 0 only the step of the largest departure is"
                " known where every step was measured: among those the order of computation alone"
                " decides."
                ' (<a href="verdicts.csv">All verdicts</a>;'
                " all events of a run: <code>verdict.json</code> in its folder.)"
            ),
            VERDICTS(rows),
        ]),
    ]  # fmt: skip
    if diagnostics.measured:
        made.append(Section("diagnostics", "Diagnostics by block and step", [
            *chosen,
            *([details("The other diagnostics by block and step", *others)] if others else []),
            details("Every diagnostic over the blocks, at the first and the last measured step",
                    *(part(p.title, p) for p in profiles)),
        ]))  # fmt: skip
    if told:
        lead = muted(
            "Diverged runs, replayed from a checkpoint or their initialization with every"
            " diagnostic measured before every step around the first bad one, by the program and on"
            " the layout that trained them. A replay that is not the run, bit for bit, tells"
            " nothing."
        )
        made.append(Section("autopsies", "Autopsies", [lead, *told]))
    return made


def definitions_and_bands() -> list[Any]:
    """Return what every diagnostic and every band is, for the reading help."""
    return [
        part("What every diagnostic is", html.definitions(
            (prose("{} ", row.title) + tag("code", name), _definition(row))
            for name, row in definitions.DIAGNOSTICS.items()
        ), id="definitions"),
        part(
            "Bands",
            prose(
                "<p>A diagnostic outside these bounds is called out of its band. They are rules of"
                " thumb, wide on purpose, and can be changed:"
                " <code>--config.verdict.bands=attention/logit_max::50</code>.</p>"
            ),
            BANDS(band_rows()), id="bands",
        ),
    ]  # fmt: skip


def _definition(row: definitions.Diagnostic) -> Markup:
    unit = f" Unit: {row.unit}." if row.unit else ""
    source = Markup(" ") + tag("span", f"{row.source}.", cls="muted") if row.source else ""
    return prose("{}.{}{}", row.definition, unit, source)


def band_rows() -> list[tuple[str, str, Band]]:
    """Return (title, bounds in words, band) of every band in the table."""
    return [
        (definitions.diagnostic(band.diagnostic).title, _bounds(band), band) for band in bands.BANDS
    ]


def _bounds(band: Band) -> str:
    ends = []
    if band.low > float("-inf"):
        ends.append(f"below {band.low:g}")
    if band.high < float("inf"):
        ends.append(f"above {band.high:g}")
    part = f" ({band.part})" if band.part != "*" else ""
    always = " at every step" * band.always
    return " or ".join(ends) + bands.IN_WORDS[band.against] + part + always
