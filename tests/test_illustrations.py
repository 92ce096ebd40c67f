"""The figures of normalization's geometry: what is drawn is true, saved, and the same each time."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import subprocess
import sys
from decimal import Decimal, getcontext
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.colors import to_hex
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text

from experiments.figures import (
    attention_scale,
    experiment,
    gains,
    maths,
    page,
    second_order,
    sheet,
    sphere,
    stream_growth,
    zoom,
)
from normjax.decoder import Decoder
from normjax.equation import SLOTS
from normjax.errors import UserError
from normjax.jacobians.blocks import Parts
from normjax.placements import PLACEMENTS
from normjax.reporting import drawing, palette, tables
from normjax.runs.experiment import Options
from tests.pages import Page

ROOT = Path(__file__).parents[1]
EPS = float(np.finfo(np.float64).eps)


# These take seconds each to compute; what they show is tested below on smaller cases as well.
SLOW = ("stream_growth", "gradient_gains")
EVERY = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in page.ILLUSTRATIONS
]

WITHOUT_ANGLES = (*SLOW, "attention_and_scale")
WITH_ANGLES = [name for name in page.ILLUSTRATIONS if name not in WITHOUT_ANGLES]


class _Drawn(dict):
    def __missing__(self, name):
        self[name] = page.draw(name, 0)
        return self[name]


@pytest.fixture(scope="module")
def figures():
    """Figures by name, each drawn once, when it is first asked for."""
    return _Drawn()


def data(figure, panel, series):
    """The points of a series as its table has them: (n, 2) or (n, 3)."""
    rows = [row[2:] for row in figure.rows if row[0].startswith(panel) and row[1] == series]
    assert rows, (panel, series, sorted({row[:2] for row in figure.rows}))
    width = 2 if rows[0][2] is None else 3
    return np.array([row[:width] for row in rows], np.float64)


def panel(figure, title):
    return next(a for a in figure.canvas.axes if a.get_title(loc="left").startswith(title))


# --- what every figure has ------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_names_and_words(figures, name):
    figure, entry = figures[name], page.ILLUSTRATIONS[name]
    assert figure.name == name and figure.title and entry.formula and entry.lead
    assert len(figure.caption) > 300 and "What follows:" in figure.caption
    assert "  " not in figure.caption


@pytest.mark.parametrize("name", EVERY)
def test_every_letter_of_a_figure_is_in_its_font(figures, name):
    letters = FT2Font(font_manager.findfont("DejaVu Sans")).get_charmap()
    for label in figures[name].canvas.findobj(Text):
        content = label.get_text()
        assert "$" not in content, content
        assert not [c for c in content if ord(c) not in letters and c != "\n"], content


@pytest.mark.parametrize("name", EVERY)
def test_only_colours_of_the_palette_are_drawn(figures, name):
    for axes in figures[name].canvas.axes:
        for artist in (*axes.lines, *axes.texts):
            assert to_hex(artist.get_color()) in palette.DARK


@pytest.mark.parametrize("name", [n for n in EVERY if n != "placement_paths"])
def test_every_point_of_the_table_is_drawn_where_it_says(figures, name):
    figure = figures[name]
    for title, series in {row[:2] for row in figure.rows}:
        axes = panel(figure, title)
        if not axes.axison:
            continue  # seen through a camera
        points = np.array([r[2:4] for r in figure.rows if r[:2] == (title, series)], float)
        shown = [np.asarray(line.get_xydata()) for line in axes.lines]
        shown += [np.array([t.xyann, t.xy]) for t in axes.texts if getattr(t, "arrow_patch", None)]
        every = np.concatenate(shown)
        every = every[np.isfinite(every).all(axis=1)]
        gap = np.abs(points[:, None] - every).max(axis=-1).min(axis=1)
        # A radial image that vanishes has no arrow: it is drawn as the point N(h).
        assert gap.max() <= (4 * EPS if series == "J dh, radial" else 0), (title, series)


@pytest.mark.parametrize("name", WITH_ANGLES)
def test_axes_are_equal_where_angles_are_shown(figures, name):
    canvas = figures[name].canvas
    canvas.draw_without_rendering()
    for axes in canvas.axes:
        title = axes.get_title(loc="left")
        if title.startswith(("x²", "What the tangent", "How much longer")):
            continue
        assert axes.get_aspect() == 1, title
        box, (x, y) = axes.get_window_extent(), (np.ptp(axes.get_xlim()), np.ptp(axes.get_ylim()))
        assert box.width / x == pytest.approx(box.height / y, rel=1e-6), title


# --- one truth per figure -------------------------------------------------------------------------


def test_two_vectors_share_their_direction(figures):
    figure = figures["magnitude_and_direction"]
    for name, r in (("[3, 4]", 5), ("[9, 12]", 15)):
        start, tip = data(figure, "Two", name)
        assert np.all(start == 0) and np.hypot(*tip) == r
        assert np.allclose(tip / r, data(figure, "Their", "u")[1], rtol=0, atol=EPS)


def test_images_lie_on_the_sphere_to_rounding(figures):
    figure = figures["onto_the_sphere"]
    h, image = (data(figure, "ε = 0:", s) for s in ("h", "N(h)"))
    assert np.abs(np.linalg.norm(image, axis=1) - 2**0.5).max() <= 8 * EPS
    cross = h[:, 0] * image[:, 1] - h[:, 1] * image[:, 0]
    assert np.abs(cross).max() <= 16 * EPS * np.abs(h).max()
    assert np.all(np.sum(h * image, axis=1) > 0)
    space = data(figure, "d = 3", "N(h)")
    assert np.abs(np.linalg.norm(space, axis=1) - 3**0.5).max() <= 8 * EPS


def test_with_eps_images_stay_inside_at_the_length_of_the_formula(figures):
    figure = figures["onto_the_sphere"]
    h = data(figure, "ε = 0.25", "h")
    image = np.concatenate([data(figure, "ε = 0.25", s) for s in ("N(h)", "N(h) of small h")])
    r = np.linalg.norm(h, axis=1)
    assert np.linalg.norm(image, axis=1) == pytest.approx(
        r / np.sqrt(r * r / 2 + sphere.EPS), rel=1e-14
    )
    assert np.all(np.linalg.norm(image, axis=1) < 2**0.5)
    gained = data(figure, "gain", "N(h)")[:-2]  # without the arrow's ends
    assert np.sum((gained / sphere.GAIN) ** 2, axis=1) == pytest.approx(2.0, rel=1e-14)


def test_the_shadow_and_the_rest(figures):
    figure = figures["shadow"]
    u, v, parallel, rest = (data(figure, "A", s)[1] for s in ("u", "v", "parallel", "rest"))
    assert np.allclose(parallel, [1.8, 2.4], rtol=0, atol=4 * EPS)
    assert np.allclose(rest, [3.2, -2.4], rtol=0, atol=4 * EPS)
    assert np.allclose(parallel + rest, v, rtol=0, atol=4 * EPS)
    assert abs(rest @ u) <= 8 * EPS and abs(np.hypot(*u) - 1) <= EPS
    assert rest @ rest + parallel @ parallel == pytest.approx(25, rel=1e-15)


def test_projection_matrices(figures):
    onto, across = maths.projections([3.0, 4.0, 12.0])
    for matrix, rank in ((onto, 1), (across, 2)):
        assert np.allclose(matrix @ matrix, matrix, rtol=0, atol=4 * EPS)
        assert np.array_equal(matrix, matrix.T) and np.linalg.matrix_rank(matrix) == rank
    assert np.allclose(onto @ across, 0, rtol=0, atol=4 * EPS)
    # Another way to the second one: the norm's own Jacobian, times s.
    h = np.array([3.0, 4.0, 12.0])
    assert np.allclose(maths.verified_jacobian(h) * 13 / 3**0.5, across, rtol=0, atol=8 * EPS)
    figure = figures["projection_matrices"]
    before = data(figure, "Before", "grid after")
    first, second = (data(figure, p, "grid after") for p in ("u uᵀ", "I −"))
    assert np.allclose(first + second, before, rtol=0, atol=8 * EPS)
    assert np.allclose(first[:, 0] * 0.8, first[:, 1] * 0.6, rtol=0, atol=8 * EPS)
    assert np.allclose(second @ [0.6, 0.8], 0, rtol=0, atol=8 * EPS)
    with pytest.raises(UserError, match="no direction"):
        maths.projections([0.0, 0.0])


def test_the_jacobian_keeps_the_tangent(figures):
    figure = figures["tangent_plane"]
    for title in ("ε = 0", "gain", "d = 3"):
        start, end = data(figure, title, "J dh, radial")
        assert np.linalg.norm(end - start) <= 4 * EPS
    start, end = data(figure, "ε = 0", "J dh, tangential")
    h = np.array([1.38, 1.84])
    assert np.linalg.norm(end - start) == pytest.approx(0.5 * 2**0.5 / 2.3, rel=1e-14)
    assert abs((end - start) @ h) <= 8 * EPS
    disc = data(figure, "d = 3", "N(h) + J dh")
    y = data(figure, "d = 3", "h and N(h)")[1]
    assert np.abs((disc - y) @ y).max() <= 16 * EPS  # in the tangent plane at N(h)
    # with eps: the axes of the ellipse are eps/s^3 and 1/s
    s2 = 2.3**2 / 2 + 2.0
    for name, factor in (("radial", 2.0 / s2**1.5), ("tangential", s2**-0.5)):
        start, end = data(figure, "ε = 2", f"J dh, {name}")
        assert np.linalg.norm(end - start) == pytest.approx(0.5 * factor, rel=1e-13)


def test_remainders_have_slope_two_until_rounding(figures):
    figure = figures["tangent_zoom"]
    for name, level in (("x²", 1.0), ("N", 1 / (2 * 2**0.5))):
        e, size = data(figure, "What", f"remainder of {name}").T
        clear = (e > 1e-5) & (e < 1e-2)
        # Rounding adds at most 4 eps to a remainder of level 1e-10: 1e-5 of it in the worst place.
        assert maths.slope(e[clear], size[clear]) == pytest.approx(2, abs=1e-4)
        assert size[clear] == pytest.approx(level * e[clear] ** 2, rel=1e-4)
        assert size[e < 1e-8].max() <= 4 * EPS
    curve, line = zoom.linearized(zoom.square, 3.0, 1.0, [0.25])
    assert (curve[0], line[0]) == (3.25**2, 9 + 6 * 0.25)


def test_a_step_across_lengthens_at_second_order(figures):
    getcontext().prec = 50
    for e in (1e-8, 0.05, 0.1, 3.0):
        exact = (Decimal(25) + Decimal(e) ** 2).sqrt() - 5
        assert float(second_order.growth(5.0, e)) == pytest.approx(float(exact), rel=4 * EPS)
    figure = figures["second_order_step"]
    marked = data(figure, "How", "across, marked")
    assert marked[:, 0].tolist() == [0.05, 0.1]
    assert marked[:, 1] == pytest.approx([0.00025, 0.001], rel=1e-3)
    for series, expected in (("across, exact", 2), ("along: e", 1), ("across: e²/(2r)", 2)):
        e, size = data(figure, "How", series).T
        assert maths.slope(e[e < 0.05], size[e < 0.05]) == pytest.approx(expected, abs=1e-4)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match="r="):
            second_order.growth(bad, 1.0)


def test_attention_without_norm_scales_its_logits():
    scales = np.array([0.1, 1.0, 10.0])
    bare = attention_scale.attention_logits({}, 0, scales)
    assert bare == pytest.approx(bare[1] * scales[:, None] ** 2, rel=1e-12)


@pytest.mark.parametrize("case", ["pre-norm", pytest.param("QK-norm", marks=pytest.mark.slow)])
def test_probabilities_are_those_the_attention_itself_applies(case):
    """Read them back from its output: o = p V, with V invertible from the right."""
    changes = attention_scale.CASES[case][0]
    config = dataclasses.replace(attention_scale.CONFIG, **changes)
    keys = attention_scale.KEYS
    model = Decoder(config, vocabulary=keys, window=keys)
    parts = Parts(model, model.init(jax.random.key(5)))
    stream = np.random.default_rng(5).normal(size=(keys, config.width))
    for scale in (0.5, 2.0):
        h = scale * stream
        out = (np.asarray(parts.sublayer(1, "attention")(h)) - h)[-1]
        read = maths.normalize(h, eps=config.norm_eps) if changes.get("placement") else h
        branch = parts.layer(1)[0]["attention"]["branch"]
        value, output = (np.asarray(branch[k]["kernel"]) for k in ("value", "output"))
        value = read @ value @ output
        p = np.linalg.lstsq(value.T, out, rcond=None)[0]
        logits = attention_scale.attention_logits(changes, 5, [scale])
        assert attention_scale.softmax(logits)[0] == pytest.approx(p, abs=1e-12)


def test_entropy_and_jacobian_of_the_two_logits(figures):
    figure = figures["attention_and_scale"]
    one, ten = (data(figure, "Two", f"logits [{a}, {2 * a}]") for a in (1, 10))
    assert one[:, 1] == pytest.approx([1 / (1 + np.e), np.e / (1 + np.e)], rel=1e-14)
    assert ten[:, 1] == pytest.approx([4.5397868702434e-05, 1 - 4.5397868702434e-05], rel=1e-12)
    p = attention_scale.softmax([1.0, 2.0])
    # diag(p) - p p^T of two is p1 p2 [[1, -1], [-1, 1]], of largest singular value 2 p1 p2
    size = attention_scale.jacobian_size(np.array([1.0, 2.0]))
    assert float(size) == pytest.approx(2 * p[0] * p[1], rel=1e-14)
    assert float(attention_scale.entropy(np.full(4, 0.25))) == pytest.approx(np.log(4), rel=1e-15)
    for name in ("pre-norm", "QK-norm"):
        for title in ("Entropy", "Size"):
            y = data(figure, title, name)[:, 1]
            assert np.ptp(y) <= 1e-3 * y.max()
    assert data(figure, "Entropy", "no norm")[-1, 1] < 1e-3


def test_paths_are_those_of_the_placement_table(figures):
    figure = figures["placement_paths"]
    for axes, row in zip(figure.canvas.axes, figure.rows, strict=True):
        place = PLACEMENTS[row[0]]
        norms = [getattr(place.attention, slot) is not None for slot in SLOTS]
        assert row[1:] == (*norms, place.final_norm)
        words = [t.get_text() for t in axes.findobj(Text)]
        assert words.count("norm") == 2 * sum(norms)
        assert words.count("final norm") == place.final_norm
        assert words.count("+") == 2


def test_pinned_streams_follow_their_recurrences():
    n = np.arange(stream_growth.DEPTH + 1)
    laws = {"none": 1.1**n, "pre": 1 + 0.1 * n, "post": np.ones(len(n))}
    for name, law in laws.items():
        assert stream_growth.pinned_sizes(name) == pytest.approx(law, rel=len(n) * 8 * EPS)


@pytest.mark.slow
def test_random_streams(figures):
    figure = figures["stream_growth"]
    post = data(figure, "Random", "post, seed 0")[1:, 1]
    assert post == pytest.approx(np.ones(len(post)), rel=1e-4)
    pre, none = (data(figure, "Random", f"{name}, seed 0")[:, 1] for name in ("pre", "none"))
    assert np.all(np.diff(none) > 0) and none[-1] > 100 * pre[-1] > 100


def test_gains_are_those_of_autodiff(monkeypatch):
    """By jax.jacfwd of the whole block, all positions together, instead of closed forms."""
    for name, value in (("DEPTH", 1), ("WIDTH", 8), ("LENGTH", 3)):
        monkeypatch.setattr(gains, name, value)
    parts, h = gains.random_decoder("post", 1)
    got = gains.gains_by_depth(parts, h)[0]
    with jax.enable_x64(True):
        whole = np.asarray(jax.jit(jax.jacfwd(parts.block(1)))(h))
    out = np.asarray(parts.block(1)(h))
    J = np.einsum("tatb->tab", whole)
    u, v = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (h, out))
    P, Q = (np.eye(8) - x[:, :, None] * x[:, None, :] for x in (u, v))
    radial_in = np.linalg.norm(np.einsum("tab,tb->ta", J, u), axis=-1)
    tangential = np.linalg.norm(Q @ J @ P, axis=(-2, -1)) / 7**0.5
    radial_out = np.linalg.norm(np.einsum("ta,tab->tb", v, J), axis=-1)
    for value, expected, rel in zip(
        got, (radial_in, tangential, radial_out), (1e-11, 1e-11, 1e-7), strict=True
    ):
        # What comes out along h' is 1e-6 of J, left over from a cancellation in autodiff.
        assert value == pytest.approx(np.sqrt(np.mean(expected**2)), rel=rel)
    assert got[2] < 1e-4 < got[1]  # post-norm: nothing comes out along h'


# --- small parts ----------------------------------------------------------------------------------


def test_the_camera_keeps_one_scale():
    camera = sheet.Camera(17.0, -40.0)
    frame = camera.frame()
    assert np.allclose(frame @ frame.T, np.eye(3), rtol=0, atol=4 * EPS)
    assert np.linalg.det(frame) == pytest.approx(1, rel=1e-14)
    points = np.random.default_rng(0).normal(size=(5, 3))
    squares = np.sum(camera.flat(points) ** 2, axis=1) + camera.depth(points) ** 2
    assert squares == pytest.approx(np.sum(points**2, axis=1), rel=1e-14)


def test_orthonormal_to():
    for u in ([0.6, 0.8], [1.0, 2.0, -3.0], [0.0, 0.0, 2.0]):
        rows = np.vstack([np.array(u) / np.linalg.norm(u), maths.orthonormal_to(u)])
        assert np.allclose(rows @ rows.T, np.eye(len(u)), rtol=0, atol=4 * EPS)


def test_a_wrong_jacobian_is_not_drawn(monkeypatch):
    from normjax.jacobians import verification

    monkeypatch.setattr(
        verification, "norm_jacobian", lambda norm, h, parameters, eps: 1.001 * np.eye(len(h))
    )
    with pytest.raises(verification.VerificationError):
        maths.verified_jacobian([1.0, 2.0])


# --- files and page -------------------------------------------------------------------------------


def test_saved_files_hold_the_table_and_repeat_byte_for_byte(tmp_path):
    names = ("shadow", "placement_paths")
    for folder in ("a", "b"):
        page.write(tmp_path / folder, names, 0)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 3 * len(names) + 1
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    saved = (tmp_path / "a/figures/shadow.csv").read_text(encoding="utf-8")
    assert_same_table(saved, page.draw("shadow", 0))


def test_the_csv_holds_the_table_in_space_too(figures):
    figure = figures["onto_the_sphere"]
    assert_same_table(tables.csv_text(figure.columns, figure.rows), figure)


def assert_same_table(text, figure):
    header, *rows = csv.reader(io.StringIO(text))
    assert tuple(header) == sheet.COLUMNS and len(rows) == len(figure.rows)
    for row, expected in zip(rows, figure.rows, strict=True):
        assert row[:2] == list(expected[:2])
        assert [float(v) if v else None for v in row[2:]] == list(expected[2:])


def test_another_seed_moves_the_random_points(figures):
    assert page.draw("onto_the_sphere", 1).rows != figures["onto_the_sphere"].rows


def test_the_page_links_what_exists_and_shows_figures_in_order(tmp_path):
    written = page.write(tmp_path, ["shadow", "magnitude_and_direction"], 0)
    text = written.read_text(encoding="utf-8")
    seen = Page(text)
    assert len(seen.ids) == len(set(seen.ids)) and "script" not in seen.tags
    assert not seen.dead_links(tmp_path)
    assert text.index('id="magnitude_and_direction"') < text.index('id="shadow"')
    for name in ("shadow", "magnitude_and_direction"):
        assert page.ILLUSTRATIONS[name].lead.split(".")[0] in text
    assert str(tmp_path) not in text and "http" not in text.replace("http://www.w3.org", "")


def test_unknown_names_are_one_line():
    with pytest.raises(UserError, match=r"config.figures=shadwo: .*did you mean 'shadow'\?"):
        page.chosen(["shadwo"])
    assert page.chosen([]) == list(page.ILLUSTRATIONS)


def test_figures_are_drawn_in_the_project_style_whatever_is_set(tmp_path):
    import matplotlib

    before = drawing.save(page.draw("shadow", 0), tmp_path / "a", "x")
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True}):
        assert drawing.save(page.draw("shadow", 0), tmp_path / "b", "x") == before


# --- the command ----------------------------------------------------------------------------------


def command(tmp_path, *arguments):
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "NORMJAX_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), "--experiment=figures", *arguments],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip


def test_the_command_draws_what_is_asked(tmp_path):
    done = command(tmp_path, "--config.figures=shadow", "--workdir=out")
    assert done.returncode == 0, done.stderr
    assert "1 figure with its data" in done.stdout and "report: out/figures.html" in done.stdout
    found = {p.name for p in (tmp_path / "out/figures").iterdir()}
    assert found == {"shadow.png", "shadow.svg", "shadow.csv"}


def test_a_mistake_is_one_line(tmp_path):
    done = command(tmp_path, "--config.figures=shadwo", "--workdir=out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
    assert "config.figures=shadwo" in done.stderr and "did you mean 'shadow'?" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_an_impossible_seed_is_refused(tmp_path, seed):
    config = experiment.FiguresConfig(seed=seed)
    with pytest.raises(UserError, match=f"config.seed={seed}: must be from 0 to 4294967295"):
        experiment.run(config, "default", Options(tmp_path / "out", "command"))
    assert not (tmp_path / "out").exists()


def test_dry_run_lists_and_writes_nothing(tmp_path, capsys):
    options = Options(tmp_path / "out", "command", dry_run=True)
    assert experiment.run(experiment.get_config("default"), "default", options) is None
    shown = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == list(page.ILLUSTRATIONS)
    assert not (tmp_path / "out").exists()
