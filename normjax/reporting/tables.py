"""A table is stated once and read as CSV, on a terminal and on a page; numbers as text."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from normjax.reporting import palette
from normjax.reporting.statistics import Estimate
from normjax.runs import files


@dataclass(frozen=True)
class Column:
    """What a file holds of a row, and what a reader sees of it.

    Attributes:
      name: in the CSV; "" where the file lacks it.
      value: of a row, as the file has it: a number, text, None.
      title: for readers; None where only the file has it.
      text: of a row, for readers: text, or HTML as Markup; without it the value as text.
      kind: CSS class on a page: "n" for numbers, "name" for one line, "words", "id".
    """

    name: str = ""
    value: Callable[[Any], Any] | None = None
    title: str | None = None
    text: Callable[[Any], Any] | None = None
    kind: str = ""

    def cell(self, row: Any) -> str:
        """Return what a reader sees of a row; a dash for None."""
        shown = self.text or self.value
        found = None if shown is None else shown(row)
        return "–" if found is None else found if isinstance(found, str) else str(found)


def view(title: str, text: Callable[[Any], Any], kind: str = "") -> Column:
    """Return a column for readers alone."""
    return Column("", None, title, text, kind)


@dataclass(frozen=True)
class Table:
    """Columns, and how a page shows the rows.

    Attributes:
      columns: in order.
      mark: CSS class of a row, "" for none.
      group: of a row: the heading that it stands below, "" for none; text or Markup.
      empty: said where there are no rows.
      kind: CSS class of the table; "stack" puts cells below one another on a narrow screen.
    """

    columns: Sequence[Column]
    mark: Callable[[Any], str] = lambda row: ""
    group: Callable[[Any], str] = lambda row: ""
    empty: str = ""
    kind: str = ""

    @property
    def names(self) -> list[str]:
        """The columns of the file."""
        return [c.name for c in self.columns if c.name]

    def values(self, rows: Iterable[Any]) -> list[tuple[Any, ...]]:
        """Return what the file holds of each row."""
        shown = [c.value for c in self.columns if c.name]
        return [tuple(value and value(row) for value in shown) for row in rows]

    def csv(self, rows: Iterable[Any]) -> str:
        """Return CSV text."""
        return csv_text(self.names, self.values(rows))

    @property
    def _shown(self) -> list[Column]:
        return [c for c in self.columns if c.title is not None]

    def terminal(self, rows: Iterable[Any]) -> str:
        """Return aligned plain text."""
        lines = [[c.title or "" for c in self._shown]]
        lines += [[c.cell(row) for c in self._shown] for row in rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ("  ".join(f.ljust(w) for f, w in zip(x, widths, strict=True)) for x in lines)
        return plain("\n".join(line.rstrip() for line in padded))

    def __call__(self, rows: Iterable[Any]) -> Markup:
        """Return HTML."""
        shown, body = self._shown, []
        for group, own in itertools.groupby(rows, self.group):
            lines = [
                tag("tr", *(self._data(c, row) for c in shown), cls=self.mark(row)) for row in own
            ]
            head = tag("th", group, cls="group", colspan=len(shown))
            body.append(tag("tbody", *([tag("tr", head)] if group else []), *lines))
        if not body and self.empty:
            body = [tag("tbody", tag("tr", tag("td", self.empty, colspan=len(shown))))]
        head = tag("thead", tag("tr", *(tag("th", c.title, cls=_n(c)) for c in shown)))
        return scroll(tag("table", head, *body, cls=self.kind))

    def _data(self, column: Column, row: Any) -> Markup:
        name = Markup(escape(column.title)).striptags() if "stack" in self.kind.split() else ""
        return tag("td", column.cell(row), cls=column.kind, **{"data-name": name})


def _n(column: Column) -> str:
    return "n" if "n" in column.kind.split() else ""


# --- HTML -----------------------------------------------------------------------------------------


def tag(name: str, *content: Any, cls: str = "", **attributes: Any) -> Markup:
    """Return an HTML element; text in it is escaped, attributes that are empty are left out.

    >>> tag("td", "<b>", cls="n")
    Markup('<td class="n">&lt;b&gt;</td>')
    """
    given = {"class": cls, **attributes}
    written = (Markup(' {}="{}"').format(k, v) for k, v in given.items() if v not in ("", None))
    inside = Markup("").join(escape(each) for each in content)
    return Markup("<{0}{1}>{2}</{0}>").format(name, Markup("").join(written), inside)


def scroll(content: Markup) -> Markup:
    """Return what may be wider than the page in a box that scrolls."""
    return Markup('<div class="scroll">{}</div>').format(content)


def stacked(main: Any, *notes: Any) -> Markup:
    """Return a cell with small lines below; empty ones are left out."""
    return Markup("").join([escape(main), *(tag("small", note) for note in notes if note)])


def dotted(colour: str, name: str) -> Markup:
    """Return a name behind a dot of a colour of the palette."""
    dot = '<span class="dot" style="background: {}"></span>{}'
    return Markup(dot).format(palette.variable(colour), name)


def facts(rows: Iterable[tuple[Any, Any]]) -> Markup:
    """Return names with what is known of each, as a table without a head."""
    lines = (tag("tr", tag("th", name), tag("td", value)) for name, value in rows)
    return scroll(tag("table", tag("tbody", *lines)))


# --- text -----------------------------------------------------------------------------------------


def text(value: Any) -> str:
    """Return a CSV field: floats in their shortest exact form, None as an empty field.

    >>> text(0.1), text(None), text(3)
    ('0.1', '', '3')
    """
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return CSV text with a header line and ``\\n`` line ends."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([text(value) for value in row] for row in rows)
    return out.getvalue()


def write_text(path: Path, content: str) -> Path:
    """Write a whole UTF-8 file atomically, creating its folder."""
    return files.write_bytes(path, content.encode())


def number(value: float | None, signed: bool = False, digits: int = 3) -> str:
    """Return a number with fixed decimals and a true minus sign; a dash for None.

    >>> number(1.23456), number(0.5, signed=True), number(None)
    ('1.235', '+0.500', '–')
    """
    if value is None:
        return "–"
    return f"{value:{'+' if signed else ''}.{digits}f}".replace("-", "−")


def span(estimate: Estimate | None, signed: bool = False) -> str:
    """Return ``low to high`` of an interval; a dash where there is none."""
    if estimate is None or estimate.low is None:
        return "–"
    return f"{number(estimate.low, signed)} to {number(estimate.high, signed)}"


def interval(estimate: Estimate | None, signed: bool = False) -> Markup:
    """Return a mean with its interval in small below, for a page."""
    known = estimate is not None and estimate.low is not None
    mean = None if estimate is None else estimate.mean
    return stacked(number(mean, signed), span(estimate, signed) if known else "")


_PLAIN = {"−": "-", "±": "+/-", "–": "-", "×": "x", "“": '"', "”": '"', "’": "'", "…": "..."}


def plain(content: str) -> str:
    """Return text with the report's own signs in ASCII; letters of the user's names stay."""
    return content.translate(str.maketrans(_PLAIN | {"\u00a0": " "}))
