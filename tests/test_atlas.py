"""The atlas: a card and a page for every row, and nothing on them that the tables do not say."""

import csv
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from experiments.atlas import block, page, source
from experiments.atlas.profile import config_of, profile
from experiments.atlas.setting import Atlas
from normjax import plugins, registry
from normjax.errors import UserError
from normjax.norms import NORMS
from normjax.placements import PLACEMENTS
from normjax.reporting import explanations
from tests.pages import Page

SMALL = Atlas(depth=4, width=8, tokens=2, seeds=1)
MINE = """
import normjax

normjax.register_placement(
    "halved", normjax.Placement("Halved", "this test", normjax.Sublayer(keep=0.5))
)
"""


@pytest.fixture
def unmeasured(monkeypatch):
    """Nothing is compiled or drawn: tables and links are what is looked at."""

    def refuse(*arguments, **named):
        raise UserError("not here")

    monkeypatch.setattr(page, "profile", refuse)
    monkeypatch.setattr(page, "verify", refuse)
    monkeypatch.setattr(page.drawing, "save", _blank)


def _blank(figure, folder, description):
    folder.mkdir(parents=True, exist_ok=True)
    for end in ("svg", "png", "csv"):
        (folder / f"{figure.name}.{end}").write_text("")
    return '<svg width="1pt"></svg>'


def dead(text, folder):
    """Links of a page that lead to no file, whatever line of it they name."""
    return [x for x in Page(text).dead_links(folder)
            if not (folder / unquote(x.partition("#")[0])).is_file()]  # fmt: skip


def test_every_row_has_a_card_and_a_page_whose_links_resolve(tmp_path, unmeasured, monkeypatch):
    monkeypatch.setattr(page, "_norm_figure", lambda row, stem, *_: page.Figure(
        stem, row.title, "", None, (), ()))  # fmt: skip
    monkeypatch.setattr(page.block, "figure", lambda rows, streams, name, title: page.Figure(
        name, title, "", None, (), ()))  # fmt: skip
    index = page.write(tmp_path, list(PLACEMENTS), list(NORMS), SMALL, "x").read_text()
    seen = Page(index)
    assert dead(index, tmp_path) == []
    assert len([x for x in seen.links if x.endswith(".html")]) == len(PLACEMENTS) + len(NORMS)
    for kind, table in (("placement", PLACEMENTS), ("norm", NORMS)):
        for name, row in table.items():
            stem = f"norm-{name}" if kind == "norm" and name in PLACEMENTS else name
            assert f"atlas/{stem}.html" in seen.links
            text = (tmp_path / "atlas" / f"{stem}.html").read_text()
            own = Page(text)
            assert row.title in own.text and dead(text, tmp_path / "atlas") == []
            where = next(x for x in own.links if re.search(r"#L\d+$", x))
            file, line = where.split("#L")
            lines = (tmp_path / "atlas" / file).resolve().read_text().splitlines()
            assert f'"{name}"' in lines[int(line) - 1]
            if kind == "placement":
                said = explanations.equation(config_of(name, SMALL.depth, SMALL.width).record())
                assert " ".join(said.split()) in own.text
                assert "cannot be measured: not here" in own.text


def test_a_row_of_ones_own_is_on_a_page_with_its_line(tmp_path, unmeasured, monkeypatch):
    before = registry.added()
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    monkeypatch.setattr(plugins, "_LOADED", {})
    monkeypatch.setattr(plugins, "_COUNTED", set())
    try:
        plugins.load(file)
        index = page.write(tmp_path, ["halved"], [], SMALL, "x").read_text()
        assert "Halved" in Page(index).text
        assert source.find("placement", "halved").line == 5
        text = Page((tmp_path / "atlas" / "halved.html").read_text()).text
        assert "a keep 0.5" in text and "h′ = a h + F(h)" in text
    finally:
        registry.take_back(before)


def test_the_picture_has_what_the_equation_has():
    """Pre-norm: norm, then branch, nothing else. mix-LN of 4 blocks: two forms, from 1 and 2."""
    ((_, (attention, mlp)),) = block.paths(config_of("pre", 4, 8).record())
    assert attention == block.Path(("norm", "attention")) and mlp.read == ("norm", "mlp")
    assert [first for first, _ in block.paths(config_of("mix_ln", 4, 8).record())] == [1, 2]
    (_, (one, _)), *_ = block.paths(config_of("residual", 4, 8).record())
    assert one.after == ("norm, stream 1",)


def test_a_stack_whose_branches_start_at_zero_is_the_identity(tmp_path):
    """SkipInit: every singular value is 1, none is zero, and the stream keeps its size."""
    rows, spectra = profile(config_of("skipinit", 2, 8), 3, 1)
    assert [row["depth"] for row in spectra] == [1] * 8 + [2] * 8
    assert all(row["value"] == pytest.approx(1, rel=1e-12) for row in spectra)
    assert [row["depth"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["jacobian_rms"] == pytest.approx(1, rel=1e-12)
        assert row["jacobian_mean_log10"] == pytest.approx(0, abs=1e-12)
        assert row["zeros"] == 0 and row["stream_rms"] == pytest.approx(rows[0]["stream_rms"])


def test_a_ladder_is_shown_where_it_has_the_row(tmp_path, unmeasured):
    ladder = Path(tmp_path / "ladder.csv")
    with ladder.open("w") as file:
        csv.writer(file).writerows([["placement", "loss"], ["pre-norm", "1.234"]])
    config = Atlas(depth=4, width=8, ladder=str(ladder))
    page.write(tmp_path, ["pre", "post"], [], config, "x")
    texts = [Page((tmp_path / "atlas" / f"{n}.html").read_text()).text for n in ("pre", "post")]
    assert "1.234" in texts[0] and "On the ladder" not in texts[1]
    ladder.write_text("loss\n1\n")
    with pytest.raises(UserError, match="column 'placement'"):
        page.write(tmp_path, ["pre"], [], config, "x")
