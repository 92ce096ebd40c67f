"""The part of the page on signals: verdicts, heat maps, profiles, autopsies, definitions."""

from __future__ import annotations

from collections import Counter
from typing import Any

from normjax.diagnostics import bands, definitions, verdict
from normjax.diagnostics.bands import Band
from normjax.reporting import autopsies, heat_maps, palette, signal_profiles
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import Look
from normjax.reporting.results import Results
from normjax.reporting.signal_data import Signals
from normjax.reporting.wording import listed

MARKS = {"well behaved": "●", "drifting": "◐", "unstable": "▲", "diverged": "✕", "unknown": "○"}


def figures(results: Results, signals: Signals, looks: dict[str, Look]) -> list[Figure]:
    """Return all figures of the part, none where no run measured signals.

    To be called with the style of :func:`normjax.reporting.drawing.style` set.
    """
    if not signals.measured:
        return []
    return [
        *heat_maps.figures(results, signals), *signal_profiles.figures(results, signals, looks),
        *(figure for _, figure in autopsies.figures(signals)),
    ]  # fmt: skip


def section(
    results: Results, signals: Signals, pictures: dict[str, Any], looks: dict[str, Look]
) -> dict[str, Any] | None:
    """Return what the template shows; None where no run measured signals.

    Takes its pictures out of ``pictures``.
    """
    if not signals.measured:
        return None
    cells = {cell.name: cell for cell in results.cells}
    rows = [
        {
            "run": run,
            "colour": palette.variable(looks[cells[run.cell].series].colour),
            "mark": MARKS[each.state],
            "verdict": each,
        }
        for run in results.runs
        if (each := signals.verdicts.get(run.id)) is not None
    ]
    counts = Counter(row["verdict"].state for row in rows)
    said = [f"{counts[state]} {state}" for state in verdict.STATES if counts[state]]
    take = lambda start: [pictures.pop(n) for n in list(pictures) if n.startswith(start)]  # noqa: E731
    by_run = {p["name"].removeprefix("autopsy_"): p for p in take("autopsy_")}
    maps = take("signal_")
    first = {f"signal_{heat_maps.slug(name)}" for name in heat_maps.CHOSEN}
    return {
        "summary": f"Of {len(rows)} runs: {listed(said)}.",
        "self_test": "" if signals.self_test is None else str(signals.self_test),
        "rows": rows,
        "heat_maps": [p for p in maps if p["name"] in first],
        "more_heat_maps": [p for p in maps if p["name"] not in first],
        "profiles": take("profiles_"),
        "autopsies": [
            {"run": run, "text": text, "picture": by_run.get(run)}
            for run, text in autopsies.sentences(signals)
        ],
        "definitions": list(definitions.SIGNALS.items()),
        "bands": band_rows(),
    }


def band_rows() -> list[tuple[str, str, Band]]:
    """Return (title, bounds in words, band) of every band in the table."""
    return [(definitions.signal(band.signal).title, _bounds(band), band) for band in bands.BANDS]


def _bounds(band: Band) -> str:
    ends = []
    if band.low > float("-inf"):
        ends.append(f"below {band.low:g}")
    if band.high < float("inf"):
        ends.append(f"above {band.high:g}")
    part = f" ({band.part})" if band.part != "*" else ""
    return " or ".join(ends) + bands.IN_WORDS[band.against] + part
