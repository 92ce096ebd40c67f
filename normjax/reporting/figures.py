"""All figures of a report, in the order of the page."""

from __future__ import annotations

from normjax.reporting import (
    autopsies,
    curves,
    diagram,
    drawing,
    forests,
    heat_maps,
    signal_profiles,
    slopes,
    sweeps,
)
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import Look
from normjax.reporting.prediction import Judged
from normjax.reporting.results import Results
from normjax.reporting.signal_data import Signals


def all_figures(
    results: Results,
    looks: dict[str, Look],
    judged: Judged | None = None,
    signals: Signals | None = None,
) -> list[Figure]:
    """Return every figure that the results allow.

    Args:
        results: a workdir read back.
        looks: colour and marker by series.
        judged: a prediction and its score, where there is one.
        signals: what the runs measured inside, where that is known.

    Returns:
        The figures; each is left out where it would be empty.
    """
    with drawing.style():
        made: list[Figure | None] = [slopes.figure(judged, results, looks)]
        if results.x:
            made += [sweeps.by_x(results, looks), sweeps.by_x(results, looks, relative=True)]
        made += [sweeps.by_rate(results, looks, name) for name in results.varied]
        made.append(curves.learning_curves(results, looks))
        made.append(forests.final_losses(results, looks))
        made.append(forests.paired_differences(results, looks))
        made.append(curves.gradient_norms(results, looks))
        made.append(diagram.decoder(results, looks))
        if signals is not None and signals.measured:
            made += heat_maps.figures(results, signals)
            made += signal_profiles.figures(results, signals, looks)
            made += [figure for _, figure in autopsies.figures(signals)]
    return [figure for figure in made if figure is not None]
