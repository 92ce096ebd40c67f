"""The page: what the template is given, and the pictures inside it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from normjax.reporting import (
    explanations,
    findings,
    forests,
    html,
    palette,
    prediction_words,
    signal_page,
    statistics,
    tables,
    trends,
    wording,
)
from normjax.reporting.drawing import Figure
from normjax.reporting.palette import Look
from normjax.reporting.prediction import Judged
from normjax.reporting.results import Results, Variant
from normjax.reporting.signal_data import Signals


def render(
    results: Results, figures: Sequence[tuple[Figure, str]], looks: dict[str, Look],
    judged: Judged | None = None, signals: Signals | None = None,
) -> str:  # fmt: skip
    """Return the page as one self-contained HTML text.

    Args:
        results: a workdir read back.
        figures: each figure with its SVG text.
        looks: colour and marker by series.
        judged: a prediction and its score, where there is one.
        signals: what the runs measured inside, where that is known.

    Returns:
        HTML without scripts or external resources. All text from files is escaped.
    """
    pictures = {figure.name: html.picture(figure, svg) for figure, svg in figures}
    inside = None if signals is None else signal_page.section(results, signals, pictures, looks)
    said = findings.warnings(results)
    if signals is not None and signals.self_test is not None and not signals.self_test.sound:
        said.insert(0, wording.Finding(wording.WARNING, str(signals.self_test)))
    said += trends.sweep(results) if results.x else findings.ablation(results)
    config = results.plan.get("config") or {}
    return html.render(
        html.TEMPLATES / "report.html.j2",
        pretty=pretty,
        plan=results.plan,
        results=results,
        unit=results.unit,
        said={kind: [f.text for f in said if f.kind == kind] for kind in wording.KINDS},
        groups=_groups(results, looks),
        variants=_variants(results, looks),
        predicted=None if judged is None else prediction_words.section(judged, results, looks),
        signals=inside,
        slopes=pictures.pop("prediction", None),
        diagram=pictures.pop("decoder", None),
        figures=list(pictures.values()),
        parts=[(name, text.format(unit=results.unit)) for name, text in explanations.PARTS],
        form=explanations.equation(
            str(explanations.lookup(config, "model.placement", "")),
            bool(explanations.lookup(config, "model.residual", True)),
        ),
        settings=list(flat(config)),
        runs=_runs(results, looks),
        machine=_machine(results),
        cost=_cost(results),
        factor=statistics.t_factor,
        references=wording.references(results),
    )


def _groups(results: Results, looks: dict[str, Look]) -> list[dict[str, Any]]:
    """Return the ranked table: one group of rows per x, else a single one."""
    ranked = results.ranked()
    rows = [(v, v.difference or statistics.Estimate(0), _gaps(results, v)) for v in ranked]
    shown = [row for row in rows if row[2]]
    window = forests.limits(shown, 0.0) if shown else None
    groups: dict[float | None, list[dict[str, Any]]] = {}
    for variant, _, gaps in rows:
        row: dict[str, Any] = {
            "variant": variant,
            "colour": palette.variable(looks[variant.cell.series].colour),
            "label": _label(results, variant),
            "runs": tables.runs_text(variant).split(", "),
            "baseline": variant.cell.series == results.baseline,
            "perplexity": None,
            "bits": None,
            "plot": _interval_plot(variant, gaps, window, looks),
        }
        if variant.loss.mean is not None:
            row["perplexity"] = statistics.perplexity(variant.loss.mean)
            row["bits"] = statistics.bits(variant.loss.mean)
        groups.setdefault(variant.cell.x, []).append(row)
    name = results.x["name"] if results.x else ""
    return [
        {"title": f"{name} {x:g}" if x is not None else "", "rows": rows}
        for x, rows in groups.items()
    ]


def _label(results: Results, variant: Variant) -> str:
    """Return a variant's name without the x that the group's heading already says."""
    if results.x is None or variant.cell.x is None:
        return variant.label
    return variant.label.replace(f", {results.x['name']} {variant.cell.x:g}", "", 1)


def _gaps(results: Results, variant: Variant) -> dict[int, float]:
    for base in results.variants:
        same = (base.cell.x, base.rates) == (variant.cell.x, variant.rates)
        if same and base.cell.series == results.baseline and variant.difference is not None:
            return statistics.differences(variant.losses, base.losses)
    return {}


def _interval_plot(
    variant: Variant,
    gaps: Mapping[int, float],
    window: tuple[float, float] | None,
    looks: dict[str, Look],
) -> Markup:
    """Return a row's small picture: seeds, mean and interval of the difference, and a line at 0."""
    if window is None:
        return Markup("")
    wide, tall = 150, 22

    def at(value: float) -> str:
        place = (value - window[0]) / (window[1] - window[0])
        return f"{2 + (wide - 4) * min(max(place, 0.0), 1.0):.1f}"

    parts = [f'<line x1="{at(0)}" x2="{at(0)}" y1="0" y2="{tall}" class="zero"/>']
    colour = palette.variable(looks[variant.cell.series].colour)
    change, words = variant.difference, "no difference"
    if change is not None and change.mean is not None:
        words = f"difference {tables.number(change.mean, True)}, {tables.span(change, True)}"
        if change.low is not None and change.high is not None:
            parts.append(
                f'<line x1="{at(change.low)}" x2="{at(change.high)}" y1="9" y2="9" '
                f'stroke="{colour}" stroke-width="2.5"/>'
            )
        parts += [
            f'<circle cx="{at(gap)}" cy="17.5" r="1.8" fill="none" stroke="{colour}"/>'
            for gap in gaps.values()
        ]
        parts.append(f'<circle cx="{at(change.mean)}" cy="9" r="4" fill="{colour}"/>')
    return Markup(
        f'<svg class="row" viewBox="0 0 {wide} {tall}" width="{wide}" height="{tall}" role="img" '
        f'aria-label="{escape(words)}">{"".join(parts)}</svg>'
    )


def _variants(results: Results, looks: dict[str, Look]) -> list[dict[str, Any]]:
    """Return one entry per series: what it changes, in words and in the equation."""
    entries = []
    numbers = iter(range(1, len(results.cells) + 1))
    for series, changes in explanations.series_changes(results).items():
        cells = [cell for cell in results.cells if cell.series == series]
        look = looks[series]
        entries.append(
            {
                "number": "" if series == results.baseline else next(numbers),
                "series": series,
                "title": cells[0].title if not results.x else "",
                "description": cells[0].description,
                "changes": explanations.change_text(changes),
                "effect": explanations.effect(results, changes),
                "colour": palette.variable(look.colour),
                "parameters": sorted({c.parameters for c in cells if c.parameters is not None}),
            }
        )
    return entries


def flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return a nested configuration as pairs of dotted path and text.

    >>> flat({"model": {"depth": 4}})
    [('model.depth', '4')]
    """
    pairs: list[tuple[str, str]] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            pairs += flat(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, pretty(value)))
    return pairs


def pretty(value: Any) -> str:
    """Return a JSON value as text for a reader."""
    if isinstance(value, str):
        return value or "(empty)"
    if isinstance(value, (list, tuple)):
        return ", ".join(pretty(item) for item in value) or "(none)"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {pretty(v)}" for k, v in value.items())
    return "not recorded" if value is None else json.dumps(value)


def _runs(results: Results, looks: dict[str, Look]) -> list[dict[str, Any]]:
    cells = {cell.name: cell for cell in results.cells}
    return [
        {
            "run": run,
            "state": wording.state_text(run),
            "reason": run.reason or "",
            "colour": palette.variable(looks[cells[run.cell].series].colour),
            "skipped": max([int(e.get("update/skipped") or 0) for e in run.evaluations], default=0),
        }
        for run in results.runs
    ]


_MACHINE = (
    *("versions", "platform", "devices", "cpu", "cores", "isa", "xla_flags", "commit", "flags"),
    *("hostname", "started"),
)


_TITLES = {"cpu": "CPU", "isa": "Instruction set", "xla_flags": "XLA flags", "hostname": "Host"}


def _machine(results: Results) -> list[tuple[str, list[tuple[str, int]]]]:
    """Return each field of the environments with its distinct values and how many runs had them."""
    known = [run.environment for run in results.runs if run.environment]
    extra = sorted({name for env in known for name in env} - set(_MACHINE))
    rows = []
    for name in (*_MACHINE, *extra):
        values = [pretty(env[name]) for env in known if name in env]
        if name == "started" and values:
            values = [
                min(values) if min(values) == max(values) else f"{min(values)} to {max(values)}"
            ]
        if values:
            rows.append(
                (
                    _TITLES.get(name, name.replace("_", " ").capitalize()),
                    list(Counter(values).items()),
                )
            )
    return rows


def _cost(results: Results) -> dict[str, float | None]:
    """Return the sums of training and compile seconds, and the largest peak memory in MB."""
    times = [run.time for run in results.runs]
    train = [time["train_s"] for time in times if "train_s" in time]
    build = [time["compile_s"] for time in times if "compile_s" in time]
    memory = [time["peak_memory_mb"] for time in times if "peak_memory_mb" in time]
    return {
        "train_s": sum(train) if train else None,
        "compile_s": sum(build) if build else None,
        "memory_mb": max(memory, default=None),
    }
