"""The pages of the atlas: one of each row, and the index of all."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.atlas import block, source
from experiments.atlas.profile import config_of, profile
from experiments.atlas.setting import Atlas
from normjax.equation import FACTORS, SLOTS
from normjax.errors import UserError
from normjax.initializers import INITIALIZERS
from normjax.jacobians.verification import verify
from normjax.norm_derivatives import NormDerivative
from normjax.norms import NORMS, Norm
from normjax.placements import PLACEMENTS
from normjax.reporting import drawing, explanations, html, pictures, tables
from normjax.reporting.drawing import Figure
from normjax.reporting.html import Page, Section
from normjax.reporting.palette import BLUE, ORANGE, Look
from normjax.reporting.pictures import Axis, Panel
from normjax.reporting.tables import facts, tag

_STYLE = """
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: 1rem; }
.card { border: 1px solid var(--line); padding: .6rem; color: inherit; text-decoration: none; }
.card img { width: 100%; height: 11rem; object-fit: contain; background: #ffffff; }
.card b, .card small { display: block; }
"""
_FEATURES = 8
NUMBERS = ("stream_rms", "jacobian_rms", "jacobian_mean_log10", "zeros", "gradient_norm")


@dataclasses.dataclass(frozen=True)
class Card:
    """What the index shows of a row."""

    group: str
    title: str
    line: str
    link: str
    picture: str


def write(
    folder: Path, placements: Sequence[str], norms: Sequence[str], config: Atlas, command: str
) -> Path:
    """Write ``atlas/NAME.html`` of every row, ``atlas.csv`` and ``atlas.html``; return the last.

    A norm that has the name of a placement gets ``atlas/norm-NAME.html``.

    Raises:
      UserError: a ladder that is no CSV with a column "placement".
    """
    rungs = _ladder(config.ladder)
    cards, numbers = [], []
    for name in placements:
        card, rows = _placement(folder, name, config, rungs, command)
        cards.append(card)
        numbers += [{"placement": name} | row for row in rows]
    cards += [_norm(folder, name, command) for name in norms]
    columns = ("placement", "depth", *NUMBERS)
    lines = ([row.get(column) for column in columns] for row in numbers)
    tables.write_text(folder / "atlas.csv", tables.csv_text(columns, lines))
    sections = []
    for number, group in enumerate(dict.fromkeys(card.group for card in cards), 1):
        own = [_shown(card) for card in cards if card.group == group]
        sections.append(Section(f"group{number}", group, [tag("div", *own, cls="cards")]))
    page = Page(
        "Atlas of placements and norms", "What is in the tables?", sections=sections, no_answer="",
        style=_STYLE, record=html.record(command, title="How this page was made"),
    )  # fmt: skip
    return tables.write_text(folder / "atlas.html", page.render())


def _shown(card: Card) -> Any:
    image = html.prose('<img src="{}" alt="" loading="lazy">', card.picture)
    return tag("a", image, tag("b", card.title), tag("small", card.line), cls="card",
               href=card.link)  # fmt: skip


def _ladder(path: str) -> list[dict[str, str]]:
    if not path:
        return []
    try:
        rows = list(csv.DictReader(Path(path).read_text(encoding="utf-8").splitlines()))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config.atlas.ladder={path}: {error}; name a ladder.csv") from None
    if not rows or "placement" not in rows[0]:
        raise UserError(
            f"config.atlas.ladder={path}: must be a CSV with a column 'placement'; name a"
            " ladder.csv"
        )
    return rows


# --- a placement ----------------------------------------------------------------------------------


def _placement(
    folder: Path, name: str, config: Atlas, rungs: Sequence[Mapping[str, str]], command: str
) -> tuple[Card, list[dict[str, Any]]]:
    row, decoder = PLACEMENTS[name], config_of(name, config.depth, config.width)
    rows, said = decoder.record(), []
    figure = block.figure(rows, decoder.rows, name, row.title)
    picture = _saved(folder, figure, command)
    try:
        measured = profile(decoder, config.tokens, config.seeds)
        said = _profile(folder, name, measured, config, command)
    except UserError as error:
        measured, said = [], [f"Its profile cannot be measured: {error}"]
    sections = [
        Section("equation", "Equation", [
            tag("p", explanations.equation(rows), cls="equation"),
            tag("p", explanations.jacobian(rows), cls="equation"), picture,
        ]),
        Section("holds", "What it holds", [
            f"In a decoder of {config.depth} blocks.", _held_table(rows["placement"]),
            facts(_facts(row, decoder, rows)),
        ]),
        Section("profile", "At initialization", said),
        Section("code", "In the code", _code(folder, "placement", name)),
    ]  # fmt: skip
    own = [rung for rung in rungs if rung["placement"] in (name, row.title)]
    if own:
        shown = tables.Table([tables.view(k, lambda r, k=k: r[k]) for k in own[0]])
        sections.insert(3, Section("ladder", "Trained", [shown(own)]))
    style = f"#{name} .scroll > svg {{ width: auto; height: 30rem; min-width: 0; }}"
    link = _page(folder, name, row.title, row.summary or row.source, sections, command, style)
    group = "Placements of one stream" if row.streams is None else "Placements of several streams"
    return Card(group, row.title, row.summary or row.source, link, _picture(name)), measured


def _facts(row: Any, decoder: Any, rows: Mapping[str, Any]) -> list[tuple[str, str]]:
    place, known = rows["placement"], decoder.initialization
    streams = row.streams
    said = f"{decoder.rows}, beginning as {streams.start}" if streams else "one"
    if streams:
        readout = place["streams"]["readout"]
        said += f"; read out by {held(readout) if readout else 'their sum'}"
        said += f"; {held(place['streams']['norm'])} on what is read out" * bool(streams.norm)
    named = next((k for k, v in INITIALIZERS.items() if v == known), "its own")
    gains = [f"{word} × {place[key]:.4g}" for key, word in (
        ("branch_gain", "value, output and MLP weights"), ("value_gain", "value weights, further"),
        ("embedding_gain", "embedding")) if place[key] != 1]  # fmt: skip
    after = [f"{key.replace('_', ' ')}: {place[key]}" for key in ("after_init", "after_step")
             if place[key]]  # fmt: skip
    return [
        ("Streams", said), ("Final norm", "yes" if rows["has_final_norm"] else "no"),
        ("Norm of the embedding", held(place["embedding_norm"])),
        ("Initialization", "; ".join([f"{named}: {known.source}", *gains, *after])),
        ("Source", row.source),
    ]  # fmt: skip


_LETTERS = dict(zip(SLOTS, "NQSPU", strict=True)) | FACTORS | {"read": "R", "inner_norms": ""}


def _held_table(place: Mapping[str, Any]) -> Any:
    keys = list(place["attention"])
    same = place["attention"] == place["mlp"]
    branches = (("attention", "Each sub-layer"),) if same else (
        ("attention", "Attention"), ("mlp", "MLP"))  # fmt: skip
    shown = [tables.view("Part", lambda key: f"{_LETTERS.get(key, '')} {key.replace('_', ' ')}")]
    shown += [tables.view(t, lambda key, b=b: blocks(place[b][key])) for b, t in branches]
    return tables.Table(shown)(keys)


def blocks(value: Any) -> str:
    """Return what blocks hold as text; where they differ, each with the blocks that have it.

    >>> blocks({"blocks": ["model", "model", None]})
    "blocks 1 to 2: the model's norm; block 3: –"
    """
    if not (isinstance(value, Mapping) and "blocks" in value):
        return held(value)
    spans: list[list[Any]] = []
    for number, text in enumerate(map(held, value["blocks"]), 1):
        if spans and spans[-1][2] == text:
            spans[-1][1] = number
        else:
            spans.append([number, number, text])
    return "; ".join(
        f"block {a}: {text}" if a == b else f"blocks {a} to {b}: {text}" for a, b, text in spans
    )


def held(value: Any) -> str:
    """Return what a slot or a factor holds, as JSON has it, in words.

    >>> held({"learned": "feature", "start": 0.1, "shared": False})
    'learned for each feature, starts at 0.1'
    """
    if value is None or value is False or value == []:
        return "–"
    if value is True:
        return "yes"
    if isinstance(value, Mapping):
        if "rows" in value:
            on = ", ".join(str(row + 1) for row in value["rows"])
            return f"{held(value['norm'])} on stream {on}"
        if "norm" in value:
            return f"{held(value['norm'])}, its gain starting at {value['gain']:.4g}"
        if "learned" in value:
            over = "for each feature" if value["learned"] == "feature" else "as one number"
            tied = ", the same in a block" * bool(value["shared"])
            made = ", through a function" * ("through" in value)
            return f"learned {over}, starts at {value['start']:.4g}{made}{tied}"
        if "weights" in value:
            return f"{value.get('word', '')} ({value['weights']})"
        return str(explanations.lookup(value, "shown.title", "a norm of its own"))
    if isinstance(value, str):
        return {"model": "the model's norm", "shared": "the pre-norm again"}.get(value, value)
    return f"{value:.4g}" if isinstance(value, float | int) else html.pretty(value)


def _profile(
    folder: Path, name: str, measured: Sequence[dict[str, Any]], config: Atlas, command: str
) -> list[Any]:
    words = ("rms of the stream", "rms singular value", "mean log10 singular value",
             "zero singular values", "gradient norm of a block")  # fmt: skip
    panels = [
        Panel([r | {"variant": word, "y": r[key]} for r in measured if key in r],
              word, y=Axis("y", scale="linear"))
        for key, word in zip(NUMBERS, words, strict=True) if key != "zeros"
    ]  # fmt: skip
    looks = {panel.title: Look(BLUE, "o") for panel in panels}
    with drawing.style():
        canvas = pictures.lines(
            panels, looks, Axis("depth", "blocks", "steps"), Axis("y"), height=4.5, columns=2,
            key=[("mean over seeds", Look(BLUE, "o"))],
        )  # fmt: skip
    columns = ("depth", *NUMBERS)
    lines = [[row.get(column) for column in columns] for row in measured]
    caption = (
        f"{config.width} features, {config.tokens} random tokens, mean of {config.seeds}"
        " initializations, eps = 0. The Jacobian is that of a token from block 1 to a depth, keys"
        " and values of other tokens held fixed, of the whole state where there are several"
        " streams; the mean of log10 leaves out singular values below 1e-13 of the largest, which"
        f" are zero to rounding: {measured[-1]['zeros']:.3g} of them at the end."
    )
    figure = Figure(f"{name}_profile", "Profile by depth", caption, canvas, columns, lines)
    return [_saved(folder, figure, command)]


# --- a norm ---------------------------------------------------------------------------------------


def _norm(folder: Path, name: str, command: str) -> Card:
    row, stem = NORMS[name], f"norm-{name}" if name in PLACEMENTS else name
    formula = (inspect.getdoc(getattr(row.function, "func", row.function)) or "").split("\n")[0]
    formula = formula or "Its function has no docstring."
    x = np.random.default_rng(0).standard_normal(_FEATURES)
    drawn = {
        p.name: p.started(_FEATURES) + 0.3 * np.random.default_rng(k).standard_normal(
            p.shape_at(_FEATURES)) for k, p in enumerate(row.parameters, 1)
    }  # fmt: skip
    try:
        picture = _saved(folder, _norm_figure(row, stem, x, drawn), command)
    except Exception as error:
        picture = f"It cannot be drawn: {type(error).__name__}: {error}".splitlines()[0]
    try:
        checked = str(verify(row, None, at=x, parameters=drawn))
        kind = row.derivative_at(x, drawn, 1e-6)
        closed = "NormDerivative" if isinstance(kind, NormDerivative) else "a matrix"
    except UserError as error:
        checked, closed = str(error), "none" if row.derivative is None else "fails"
    law = "none" if row.law is None else "; ".join(
        f"factor {row.law.factor(square, 1e-6, _FEATURES):.4g} on a stream of mean square {square}"
        for square in (1.0, 4.0)
    )  # fmt: skip
    learned = "; ".join(
        f"{p.name} {p.shape_at(_FEATURES)}, starts at {np.ravel(p.started(_FEATURES))[0]:.4g}"
        + f" (+ {p.offset:g} when used)" * bool(p.offset)
        + f", spread {p.spread:g}" * bool(p.spread)
        for p in row.parameters
    )
    what = [
        (f"Parameters ({_FEATURES} features)", learned or "none"), ("Forgets", row.forgets),
        ("Law", law), ("Closed form of its Jacobian", closed), ("Verified", checked),
        ("Source", row.source),
    ]  # fmt: skip
    sections = [
        Section("formula", "Formula", [tag("p", formula, cls="equation"), picture]),
        Section("holds", "What is known of it", [facts(what)]),
        Section("code", "In the code", _code(folder, "norm", name)),
    ]
    link = _page(folder, stem, row.title, "", sections, command)
    return Card("Norms", row.title, formula, link, _picture(stem))


def _norm_figure(row: Norm, stem: str, x: np.ndarray, drawn: Mapping[str, Any]) -> Figure:
    scales, started = np.linspace(0.02, 4, 100), row.started(_FEATURES)
    with jax.enable_x64(True):
        cases = {"as it starts": started, "parameters drawn": drawn}
        if not row.parameters:
            cases = {"no parameters": started}
        listed = []
        for word, own in cases.items():
            held = {k: jnp.asarray(v) for k, v in own.items()}
            y = row(jnp.asarray(scales[:, None] * x), held, 1e-6)
            J = jax.jacfwd(lambda z, held=held: row(z, held, 1e-6))(jnp.asarray(x))
            values = np.linalg.svd(np.asarray(J), compute_uv=False)
            listed += [("output", word, float(s), float(v))
                       for s, v in zip(scales, y[:, 0], strict=True)]  # fmt: skip
            listed += [("singular value", word, k, float(v)) for k, v in enumerate(values, 1)]
    rows = [dict(zip(("panel", "variant", "x", "y"), each, strict=True)) for each in listed]
    looks = dict(zip(cases, (Look(BLUE, ""), Look(ORANGE, "", (0, (5, 2)))), strict=False))
    panels = [
        Panel([r for r in rows if r["panel"] == "output"], "first feature of the output",
              Axis("x", "scale of the input"), Axis("y")),
        Panel([r for r in rows if r["panel"] == "singular value"], "singular values",
              Axis("x", "number", "steps"), Axis("y")),
    ]  # fmt: skip
    with drawing.style():
        canvas = pictures.lines(panels, looks, Axis("x"), Axis("y"), height=3.0, columns=2)
    caption = (
        f"Left: along one direction of {_FEATURES} features, drawn at random. Right: of its"
        " Jacobian there, at scale 1."
    )
    return Figure(stem, row.title, caption, canvas, ("panel", "variant", "x", "y"), listed)


# --- both -----------------------------------------------------------------------------------------


def _saved(folder: Path, figure: Figure, command: str) -> html.Picture:
    return html.picture(figure, drawing.save(figure, folder / "atlas" / "figures", command))


def _picture(stem: str) -> str:
    return f"atlas/figures/{stem}.svg"


def _code(folder: Path, kind: str, name: str) -> list[Any]:
    place = source.find(kind, name)
    if place is None:
        return ["Its place in the code was not found."]
    path = os.path.relpath(place.path.resolve(), (folder / "atlas").resolve())
    link = tag("a", f"{place.path.name}, line {place.line}", href=f"{path}#L{place.line}")
    return [tag("p", link), tag("pre", place.text)]


def _page(
    folder: Path, stem: str, title: str, lead: str, sections: Sequence[Section], command: str,
    style: str = "",
) -> str:  # fmt: skip
    back = tag("p", tag("a", "All rows", href="../atlas.html"))
    page = Page(title, lead, [back], sections=sections, no_answer="", style=style,
                record=html.record(command, title="How this page was made"))  # fmt: skip
    tables.write_text(folder / "atlas" / f"{stem}.html", page.render())
    return f"atlas/{stem}.html"
