"""A page is declared: question, warnings, answer, sections, how to read it, what was run.

One template writes all pages: self-contained, without scripts or external resources, with a light
and a dark theme. A block of a section is text, which becomes a paragraph, or something that knows
its HTML: Markup (tables and the functions here make it) or a :class:`Picture`.

    Page(
        "Title", "What is asked?", answer=["What came out."],
        sections=[Section("table", "The table", [TABLE(rows)]), *figure_sections(pictures)],
        reading=reading("<b>Loss.</b> In nats per {unit}.", unit="character"),
        record=record("python launch.py", [("Text", "plays")], config),
    ).render()
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from normjax.reporting import palette, tables
from normjax.reporting.tables import facts, tag

if TYPE_CHECKING:
    from normjax.reporting.drawing import Figure

TEMPLATES = Path(__file__).parent / "templates"
RUN = "What was run"
NO_ANSWER = "There is no answer yet: too little has finished to compare."


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure as a page shows it, with links to its files; its anchor is its name."""

    name: str
    title: str
    caption: str
    svg: Markup

    def __html__(self) -> str:
        ends = (("png", "PNG"), ("svg", "SVG"), ("csv", "data"))
        links = (tag("a", word, href=f"figures/{self.name}.{end}") for end, word in ends)
        caption = Markup("{} ({})").format(self.caption, Markup(", ").join(links))
        return tag("figure", tables.scroll(self.svg), tag("figcaption", caption), id=self.name)


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading and what stands below it.

    Attributes:
      id: the anchor; that of a picture in it, where they share it.
      title: "" for blocks without a heading, which the contents leave out.
      blocks: text, Markup, pictures.
      short: the title in the contents, where it is another one.
    """

    id: str
    title: str
    blocks: Sequence[Any]
    short: str = ""

    @property
    def anchor(self) -> str:
        """The id of the heading; "" where a picture below has it."""
        return (
            "" if any(getattr(each, "name", None) == self.id for each in self.blocks) else self.id
        )


@dataclasses.dataclass(frozen=True)
class Page:
    """All that a page says.

    Attributes:
      title: of the page.
      question: that is asked.
      lead: blocks below the question.
      alarms: what forbids to use the page at all.
      warnings: what a reader must know before the answer.
      answer: in sentences.
      details: more sentences, as a list.
      sections: in order.
      reading: how to read the page, from :func:`reading`.
      record: what was run, from :func:`record`.
      no_answer: said without an answer; "" for a page that gives none.
      style: CSS of this page alone.
      heading: the title at the top, where it is another one.
    """

    title: str
    question: str = ""
    lead: Sequence[Any] = ()
    alarms: Sequence[str] = ()
    warnings: Sequence[str] = ()
    answer: Sequence[str] = ()
    details: Sequence[str] = ()
    sections: Sequence[Section] = ()
    reading: Section | None = None
    record: Section | None = None
    no_answer: str = NO_ANSWER
    style: str = ""
    heading: str = ""

    def render(self) -> str:
        """Return the page as one self-contained HTML text; all text in it is escaped."""
        every = [*self.sections, *(s for s in (self.reading, self.record) if s is not None)]
        return render(TEMPLATES / "page.html.j2", page=self, sections=every, joined=joined)


# --- blocks ---------------------------------------------------------------------------------------


def joined(*blocks: Any) -> Markup:
    """Return blocks one below the other; text becomes paragraphs."""
    shown = (x if hasattr(x, "__html__") else tag("p", x) for x in blocks)
    return Markup("\n").join(shown)


def prose(text: str, *given: Any, **values: Any) -> Markup:
    """Return HTML of the program's own with values put in; these are escaped."""
    return Markup(text).format(*given, **values)


def muted(text: str, *given: Any, **values: Any) -> Markup:
    """Return a paragraph of less weight; like :func:`prose`."""
    return tag("p", prose(text, *given, **values), cls="muted")


def listing(items: Iterable[Any], empty: str = "") -> Markup:
    """Return a list; ``empty`` is its only item where there is none, "" for no list."""
    shown = list(items) or [empty] * bool(empty)
    return tag("ul", *(tag("li", each) for each in shown)) if shown else Markup("")


def details(summary: str, *blocks: Any) -> Markup:
    """Return blocks that open on a click, and in print."""
    return tag("details", tag("summary", summary), joined(*blocks))


def part(title: str, *blocks: Any, id: str = "") -> Markup:
    """Return blocks below a heading within a section."""
    return joined(tag("h3", title, id=id), *blocks)


def definitions(pairs: Iterable[tuple[Any, Any]]) -> Markup:
    """Return terms with what they mean."""
    return tag("dl", *(tag("dt", a) + tag("dd", b) for a, b in pairs))


def figure_sections(pictures: Iterable[Picture]) -> list[Section]:
    """Return a section for each picture, with its title."""
    return [Section(each.name, each.title, [each]) for each in pictures]


def reading(
    *items: str, title: str = "How to read this page", more: Sequence[Any] = (), **values: Any
) -> Section:
    """Return how to read the page: HTML items, see :func:`prose`, and more blocks below."""
    return Section("reading", title, [listing(prose(each, **values) for each in items), *more])


def record(
    command: str, rows: Iterable[tuple[Any, Any]] = (), config: Mapping[str, Any] | None = None,
    *after: Any, before: Sequence[Any] = (), notes: Sequence[str] = (), title: str = RUN,
) -> Section:  # fmt: skip
    """Return the section that says what was run.

    Args:
      command: that made the page; "" for none.
      rows: name and value of what is worth a line.
      config: nested settings, shown on a click.
      *after: blocks at the end.
      before: blocks between command and rows.
      notes: said below the rows.
      title: of the section.
    """
    rows, settings = list(rows), flat(config or {})
    blocks = [tag("pre", command)] if command else []
    blocks += [*before, *([facts(rows)] if rows else []), listing(notes)]
    if settings:
        named = ((tag("code", path), value) for path, value in settings)
        blocks.append(details(f"Configuration ({len(settings)} settings)", facts(named)))
    return Section("record", title, [*blocks, *after])


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


# --- from templates and pictures ------------------------------------------------------------------


@functools.cache
def _environment(folder: Path) -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, TEMPLATES]), autoescape=True,
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {"number": tables.number, "span": tables.span}
    return made


def render(template: Path, **values: Any) -> str:
    """Return a template's page; all text in it is escaped.

    Args:
        template: the file; it extends ``base.html.j2`` and may include what lies beside it.
        **values: what the template names; a missing one is an error.
    """
    return (
        _environment(template.parent)
        .get_template(template.name)
        .render(
            light={palette.variable(c)[4:-1]: c for c in palette.DARK},
            dark={palette.variable(c)[4:-1]: d for c, d in palette.DARK.items()},
            **values,
        )
    )


def picture(figure: Figure, svg: str) -> Picture:
    """Return a figure, of which ``svg`` is the text, as a page shows it."""
    shown = Markup(inline(svg, figure.name, figure.title))
    return Picture(figure.name, figure.title, figure.caption, shown)


def inline(svg: str, name: str, title: str) -> str:
    """Return an SVG file's text as an element of a page.

    Its ids get a prefix, since several pictures share the page; its colours become variables, so
    that it follows the theme; metadata and fixed size go.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<title>.*?</title>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    head, rest = body.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    label = str(escape(title))
    return palette.use_variables(f'{head} role="img" aria-label="{label}">{rest}').strip()
