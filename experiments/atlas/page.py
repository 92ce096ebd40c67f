"""The pages of the atlas: one of each row, and the index of all."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.atlas import block, proofs, source
from experiments.atlas.profile import LAST, STEPS, Rows, config_of, profile, trained
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
from normjax.reporting.wording import counted
from normjax.runs import machine

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
    """Write ``atlas/NAME.html`` of every row, ``atlas.csv``, ``atlas_trained.csv`` and
    ``atlas.html``; return the last.

    A norm that has the name of a placement gets ``atlas/norm-NAME.html``.

    Raises:
      UserError: a ladder that is no CSV with a column "placement".
    """
    rungs = _ladder(config.ladder)
    cards, numbers, runs = [], [], []
    # Most of the time is compiling: two rows at once. Drawing is not for threads.
    with ThreadPoolExecutor(min(2, machine.usable_cores())) as pool:
        found = [pool.submit(_measured, name, config) for name in placements]
        for name, future in zip(placements, found, strict=True):
            own = future.result()
            cards.append(_placement(folder, name, own, config, rungs, command))
            numbers += [{"placement": name} | row for row in own.by_depth]
            runs += [{"placement": name} | row for row in own.trained]
    cards += [_norm(folder, name, command) for name in norms]
    columns = ("placement", "depth", *NUMBERS)
    lines = ([row.get(column) for column in columns] for row in numbers)
    tables.write_text(folder / "atlas.csv", tables.csv_text(columns, lines))
    columns = ("placement", "depth", "rate", "loss")
    lines = ([row[column] for column in columns] for row in runs)
    tables.write_text(folder / "atlas_trained.csv", tables.csv_text(columns, lines))
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


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of a placement, see profile.py, or why it was not."""

    by_depth: Rows = dataclasses.field(default_factory=list)
    spectra: Rows = dataclasses.field(default_factory=list)
    trained: Rows = dataclasses.field(default_factory=list)
    why_not: str = ""


def _measured(name: str, config: Atlas) -> Measured:
    try:
        decoder = config_of(name, config.depth, config.width)
        by_depth, spectra = profile(decoder, config.tokens, config.seeds)
        runs = trained(name, config.train_depths, config.width, config.seeds)
    except UserError as error:
        return Measured(why_not=f"Its profile cannot be measured: {error}")
    return Measured(by_depth, spectra, runs)


def _placement(
    folder: Path, name: str, own: Measured, config: Atlas, rungs: Sequence[Mapping[str, str]],
    command: str,
) -> Card:  # fmt: skip
    row, decoder = PLACEMENTS[name], config_of(name, config.depth, config.width)
    rows, said = decoder.record(), [own.why_not]
    figure = block.figure(rows, decoder.rows, name, row.title)
    picture = _saved(folder, figure, command)
    if own.by_depth:
        said = [
            _profile(folder, name, own.by_depth, config, command),
            _spectra(folder, name, own, config, command),
        ]
    sections = [
        Section("equation", "Equation", [
            tag("p", explanations.equation(rows), cls="equation"),
            tag("p", explanations.jacobian(rows), cls="equation"), picture,
        ]),
        Section("holds", "What it holds", [
            f"In a decoder of {config.depth} blocks.", _held_table(rows["placement"]),
            facts(_facts(row, decoder, rows)),
        ]),
        Section("proof", "Compared with", _proofs(name)),
        Section("profile", "At initialization", said),
        Section("code", "In the code", _code(folder, "placement", name)),
    ]  # fmt: skip
    if own.trained:
        figure = _trained(folder, name, own.trained, config, command)
        sections.insert(-1, Section("trained", "In its first steps", [figure]))
    climbed = [rung for rung in rungs if rung["placement"] in (name, row.title)]
    if climbed:
        shown = tables.Table([tables.view(k, lambda r, k=k: r[k]) for k in climbed[0]])
        sections.insert(-1, Section("ladder", "On the ladder", [shown(climbed)]))
    style = f"#{name} .scroll > svg {{ width: auto; height: 30rem; min-width: 0; }}"
    link = _page(folder, name, row.title, row.summary or row.source, sections, command, style)
    group = "Placements of one stream" if decoder.rows == 1 else "Placements of several streams"
    return Card(group, row.title, row.summary or row.source, link, _picture(name))


def _proofs(name: str) -> list[Any]:
    lines = proofs.of(name)
    if not lines:
        return [
            "No stored comparison with a model of the transformers library is of this row as it is;"
            " tests/test_catalogue.py holds it against its formula, written a second time."
        ]
    table = tables.Table([
        tables.view("Model", lambda x: x["model_type"]),
        tables.view("What", lambda x: x["compared"] + f" ({x['note']})" * bool(x["note"])),
        tables.view("In", lambda x: x["dtype"]),
        tables.view("Largest difference", lambda x: x["difference"]),
        tables.view("Tolerance", lambda x: x["tolerance"]),
    ])  # fmt: skip
    versions = {f"transformers {x['transformers']}, torch {x['torch']}" for x in lines}
    return [
        table(lines),
        f"Tiny random models of {', '.join(sorted(versions))}, all parameters moved from their"
        " start. Residual scheme: the branches return what theirs did; all between them is ours."
        f" Differences are relative to the largest entry. Stored by {proofs.COMMAND}.",
    ]


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


_LETTERS = dict(zip(SLOTS, "NQSPU", strict=True)) | FACTORS | {"read": "R", "join": "K"}


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
        if "join" in value:
            return f"{value['word']} ({value['join']})"
        if "weights" in value:
            return f"{value.get('word', '')} ({value['weights']})"
        return str(explanations.lookup(value, "shown.title", "a norm of its own"))
    if isinstance(value, str):
        return {"model": "the model's norm", "shared": "the pre-norm again"}.get(value, value)
    return f"{value:.4g}" if isinstance(value, float | int) else html.pretty(value)


def _profile(
    folder: Path, name: str, measured: Sequence[dict[str, Any]], config: Atlas, command: str
) -> html.Picture:
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
    return _saved(folder, figure, command)


_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)), (0, (8, 2)), (0, (3, 3)))


def _by_depth(rows: Rows) -> tuple[Rows, dict[str, Look]]:
    """Return rows with a name for their depth, and a look of each, from light to dark."""
    depths = list(dict.fromkeys(row["depth"] for row in rows))
    shades = ("#a6cee3", "#56b4e9", "#0072b2", "#08306b", "#1a1a1a", "#8c6d4f", "#b33a3a")
    names = [counted(depth, "block") for depth in depths]
    shades = shades[-len(depths) :] if len(depths) > 4 else shades[1 : 1 + len(depths)]
    looks = {
        word: Look(shade, mark, dash)
        for word, shade, dash, mark in zip(names, shades, _DASHES, ".ovs^D", strict=False)
    }
    return [r | {"variant": names[depths.index(r["depth"])]} for r in rows], looks


def _spectra(folder: Path, name: str, own: Measured, config: Atlas, command: str) -> html.Picture:
    rows, looks = _by_depth(own.spectra)
    panel = Panel(rows, "singular values of a token's Jacobian")
    with drawing.style():
        canvas = pictures.lines(
            [panel], looks, Axis("share", "share of the values that are as large or larger"),
            Axis("value", scale="log"), height=3.2,
        )  # fmt: skip
    caption = (
        "From block 1 to that many blocks: the k-th largest, median over tokens and seeds; what is"
        " zero to rounding is left out. A vertical distance is a factor between directions."
    )
    columns = ("depth", "share", "value")
    lines = [[row[column] for column in columns] for row in own.spectra]
    figure = Figure(f"{name}_spectrum", "Spectrum", caption, canvas, columns, lines)
    return _saved(folder, figure, command)


def _trained(folder: Path, name: str, measured: Rows, config: Atlas, command: str) -> html.Picture:
    top = 2 * np.log(32)
    rows, looks = _by_depth(
        [r | {"y": None if r["loss"] is None else min(r["loss"], top)} for r in measured]
    )
    with drawing.style():
        canvas = pictures.lines(
            [Panel(rows, "loss by learning rate")], looks, Axis("rate", "learning rate", "log"),
            Axis("y", limits=(1.0, top), marks=[(np.log(32), "ln 32"), (np.log(4), "ln 4")]),
            height=3.0,
        )  # fmt: skip
    lost = sum(r["loss"] is None for r in measured)
    caption = (
        f"Mean of the last {LAST} of {STEPS} steps and of {config.seeds} seeds, AdamW, gradients"
        f" clipped, {config.width} features, words of a Markov chain with four successors of each"
        " symbol: ln 4 is all that can be had of it, ln 32 is what knows nothing. Losses above 2 ln"
        " 32 are drawn there"
        + f"; {counted(lost, 'run')} without a finite loss" * bool(lost)
        + ". So few steps show where training breaks, not which placement ends best."
    )
    columns = ("depth", "rate", "loss")
    lines = [[row[column] for column in columns] for row in measured]
    figure = Figure(f"{name}_trained", "First steps", caption, canvas, columns, lines)
    return _saved(folder, figure, command)


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
    scales, started, exact = np.linspace(0.02, 4, 100), row.started(_FEATURES), row.exact()
    with jax.enable_x64(True):
        cases = {"as it starts": started, "parameters drawn": drawn}
        if not row.parameters:
            cases = {"no parameters": started}
        listed = []
        for word, own in cases.items():
            held = {k: jnp.asarray(v) for k, v in own.items()}
            y = row(jnp.asarray(scales[:, None] * x), held, 1e-6)
            J = jax.jacfwd(lambda z, held=held: exact(z, held, 1e-6))(jnp.asarray(x))
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
