"""Tables, pages and pictures are what they were declared to be."""

import re

import pytest
from markupsafe import Markup

from normjax.reporting import drawing, html, pictures
from normjax.reporting.html import Page, Section, reading, record
from normjax.reporting.palette import Look
from normjax.reporting.pictures import Axis, Panel, Span
from normjax.reporting.tables import Column, Table, stacked, view

LOOKS = {"a": Look("#0072b2", "s"), "b": Look("#1b1b1b", "o")}
TABLE = Table(
    [
        Column("name", lambda row: row[0], "Name", kind="name"),
        Column("size", lambda row: row[1]),
        view(
            stacked("Shown", "half"), lambda row: None if row[1] is None else f"{row[1]:.1f}", "n"
        ),
    ],
    mark=lambda row: "fails" if row[1] is None else "",
    group=lambda row: row[2],
    empty="Nothing here.",
    kind="stack",
)
ROWS = [("<x>", 0.25, "one & two"), ("y", None, "one & two"), ("z", 3.0, "three")]


def test_a_table_stated_once_is_csv_terminal_and_page():
    assert TABLE.csv(ROWS) == "name,size\n<x>,0.25\ny,\nz,3.0\n"
    flat = Table([TABLE.columns[0], view("Size", TABLE.columns[2].text)])
    assert flat.terminal(ROWS) == "Name  Size\n<x>   0.2\ny     -\nz     3.0"
    page = TABLE(ROWS)
    assert isinstance(page, Markup) and "<x>" not in page
    assert page.count("<tbody>") == 2 and 'class="group" colspan="2">one &amp; two<' in page
    assert '<th class="n">Shown<small>half</small></th>' in page
    assert '<tr class="fails"><td class="name" data-name="Name">y</td>' in page
    assert '<td class="n" data-name="Shownhalf">–</td>' in page
    assert '<td colspan="2">Nothing here.</td>' in TABLE([])


def test_a_page_has_its_parts_in_order_and_an_anchor_for_every_entry():
    picture = html.Picture("curve", "A curve", "It <falls>.", Markup("<svg></svg>"))
    page = Page(
        "Title & more", "What?", lead=["First <of> all."], alarms=["Broken."],
        warnings=["Careful."], answer=["So it is."], details=["Also."],
        sections=[
            Section("", "", ["Untitled."]), *html.figure_sections([picture]),
            Section("table", "The table", [TABLE(ROWS)], short="Table"),
        ],
        reading=reading("<b>Loss</b> of {it}.", it="<b>"),
        record=record("run <it>", [("Text", "plays")], {"model": {"depth": 4}}, notes=["A note."]),
    ).render()  # fmt: skip
    words = ("Title &amp; more", "What?", "First &lt;of&gt; all.", "Broken.", "Careful.",
             'aria-label="The answer"', "So it is.", "Also.", "<nav", "Untitled.", "A curve",
             "It &lt;falls&gt;.", "The table", "<b>Loss</b> of &lt;b&gt;.", "<pre>run &lt;it&gt;",
             "A note.", "model.depth")  # fmt: skip
    body = page[page.index("<h1>") :]
    places = [body.index(word, body.index("</nav>") if word == "A curve" else 0) for word in words]
    assert places == sorted(places)
    links = re.findall(r'href="#([^"]+)"', page)
    assert links == ["curve", "table", "reading", "record"]
    assert sorted(re.findall(r'\bid="([^"]+)"', page)) == sorted(links)
    assert "<script" not in page and ">Table</a>" in page


def test_a_page_without_an_answer_says_so_or_gives_none():
    assert html.NO_ANSWER in Page("T").render()
    assert "The answer" not in Page("T", no_answer="").render()


@pytest.fixture
def styled():
    with drawing.style():
        yield


def _rows(values: dict[tuple[str, int], list[float]]) -> list[dict]:
    return [
        {"variant": name, "seed": seed, "step": step, "y": y}
        for (name, seed), own in values.items() for step, y in enumerate(own)
    ]  # fmt: skip


def test_lines_are_means_of_the_units_that_count(styled):
    rows = _rows({("a", 0): [4, 2], ("a", 1): [6, 4], ("a", 2): [9], ("b", 0): [1, 1e9]})
    canvas = pictures.lines(
        [Panel(rows)], LOOKS, Axis("step", "step"), Axis("y", "y", "log", marks=[(2.0, "known")]),
        unit="seed", ended={("a", 2): "x", ("b", 0): "x"}, height=3,
    )  # fmt: skip
    (axes,) = canvas.axes
    drawn = [list(line.get_ydata()) for line in axes.lines if len(line.get_ydata()) == 2]
    assert [5.0, 3.0] in drawn  # of the first two seeds; the third and b diverged
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [line.get_ydata()[0] for line in crosses] == [9, 1e9]
    words = {text.get_text() for text in axes.texts}
    assert words == {"a", "b (diverged)", "known"}
    assert len(axes.get_yticks()) >= 2


def test_intervals_are_students_and_say_where_they_leave(styled):
    rows = _rows({("a", 0): [1.0], ("a", 1): [2.0], ("b", 0): [0.0]})
    canvas = pictures.intervals(
        [Panel(rows, names=["b", "a", "gone"])], {**LOOKS, "gone": LOOKS["a"]}, Axis("y", "y"),
        unit="seed", notes={"gone": "no run"},
    )  # fmt: skip
    (axes,) = canvas.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["b", "a", "gone"]
    marks = [str(line.get_marker()) for line in axes.lines]
    assert "<" in marks and ">" in marks  # 12.7 standard errors are not drawn whole
    assert "no run" in {text.get_text() for text in axes.texts}
    stated = [{"variant": "a", "mean": 0.5, "low": 0.0, "high": 1.0}]
    (axes,) = pictures.intervals(
        [Panel(stated)], LOOKS, Axis("", "y"), spans=[Span("mean", "low", "high", hollow=True)]
    ).axes  # fmt: skip
    assert (0.0, 1.0) in {tuple(line.get_xdata()) for line in axes.lines}


def test_lines_have_bands_and_closed_forms_where_rows_have_them(styled):
    rows = [
        {"name": "a", "part": 1, "x": 1, "y": 2.0, "low": 1.0, "high": 3.0, "law": 2.1},
        {"name": "a", "part": 1, "x": 2, "y": None, "low": None, "high": None, "law": 4.1},
        {"name": "a", "part": 1, "x": 3, "y": 6.0, "low": None, "high": None, "law": None},
    ]
    best = ("best", Look("#000000", "", "-"))
    panel = Panel(rows, "one", Axis("x", limits=(0, 4)), Axis("y", marks=[(5.0, *best)]))
    for joined in (True, False):
        (axes, other) = pictures.lines(
            [panel, Panel([])], LOOKS, Axis("x", "x"), Axis("y", "y"), columns=2, height=3,
            series=lambda row: row["name"], band=("low", "high"), theory="law", joined=joined,
        ).axes  # fmt: skip
        drawn = {tuple(line.get_ydata()): line for line in axes.lines}
        assert drawn[2.0, 6.0].get_linestyle() == ("-" if joined else "None")
        assert (drawn[2.1, 4.1].get_linestyle() == "-") is not joined
        assert drawn[5.0, 5.0].get_color() == "#000000"
        (band,) = axes.collections
        assert set(band.get_paths()[0].vertices[:, 1]) == {1.0, 3.0}
        assert axes.get_xlim() == (0, 4) and other.get_xlim() != (0, 4)


def test_marks_of_intervals_have_shapes_of_their_own(styled):
    rows = [{"k": 1, "mean": 0.5, "low": 0.0, "high": 1.0, "other": 0.2},
            {"k": 2, "mean": 0.4, "low": 0.0, "high": 1.0, "other": None}]  # fmt: skip
    canvas = pictures.intervals(
        [Panel(rows)], {"part 1": LOOKS["a"], "part 2": LOOKS["a"]}, Axis("", "y"),
        series=lambda row: f"part {row['k']}", letters=5,
        spans=[Span("mean", "low", "high"), Span("other", "", "", hollow=True, marker="D")],
    )  # fmt: skip
    (axes,) = canvas.axes
    assert [t.get_text() for t in axes.get_yticklabels()] == ["part…"] * 2
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "D"] == [0.2]
