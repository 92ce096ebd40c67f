"""The files of a report: complete, exact, the same each time, safe and self-contained."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import report_workdirs
import run_folders
from report_workdirs import read_csv
from scipy import stats

from normjax.errors import UserError
from normjax.reporting import palette, report
from normjax.runs import files
from normjax.runs.run_folder import RunFolder
from tests.pages import Page

FULL = {f"{name}-s{seed}-0.003" for name in report_workdirs.ABLATION for seed in range(3)}


def _page(workdir: Path) -> Page:
    return Page(report.write(workdir).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    workdir = report_workdirs.ablation(tmp_path_factory.mktemp("finished"))
    return report.write(workdir).parent


@pytest.fixture(scope="module")
def troubled(tmp_path_factory) -> Path:
    workdir = report_workdirs.troubled(tmp_path_factory.mktemp("troubled"))
    return report.write(workdir).parent


def test_no_jax_is_imported(tmp_path):
    script = (
        "import sys, pathlib; sys.path[:0] = sys.argv[2:]\n"
        "import report_workdirs; from normjax.reporting import report\n"
        "w = report_workdirs.ablation(pathlib.Path(sys.argv[1]), seeds=1)\n"
        "report.write(w); report.headline(w)\n"
        "bad = {'jax', 'jaxlib', 'flax', 'optax', 'orbax', 'tensorflow'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", script, str(tmp_path), str(here), str(here.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_results_hold_every_run_and_evaluation(troubled):
    rows = read_csv(troubled / "results.csv")
    assert {row["run"] for row in rows} == FULL
    for run in FULL:
        lines = RunFolder(troubled / "runs" / run).metrics()
        assert sum(row["run"] == run for row in rows) == max(1, len(lines))
    states = {row["run"]: row["state"] for row in rows}
    assert states["post-norm-s2-0.003"] == "missing"
    assert states["no-mlp-s2-0.003"] == "interrupted"
    assert states["no-positions-s0-0.003"] == "running"
    assert {row["diverged_at"] for row in rows if row["run"] == "no-norm-s1-0.003"} == {"250"}


def test_numbers_survive_the_csv_exactly(finished):
    rows = [r for r in read_csv(finished / "results.csv") if r["run"] == "full-s1-0.003"]
    lines = RunFolder(finished / "runs" / "full-s1-0.003").metrics()
    for row, line in zip(rows, lines, strict=True):
        assert float(row["validation_loss"]) == line["validation/loss"]
        assert row["validation_loss"] == repr(line["validation/loss"])
        assert row["train_loss"] == ("" if line["train/loss"] is None else repr(line["train/loss"]))
        assert int(row["step"]) == line["step"] and int(row["tokens"]) == line["tokens"]


def test_same_folder_gives_the_same_bytes(troubled, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(troubled, copy)
    report.write(copy)
    names = [p.relative_to(troubled) for p in troubled.rglob("*") if p.is_file()]
    assert Path("figures/decoder.svg") in names
    for name in names:
        assert (copy / name).read_bytes() == (troubled / name).read_bytes(), name


def test_only_time_columns_differ_between_equal_runs(finished, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    for path in copy.glob("runs/*"):
        slower = {"time/tokens_per_s": 12345.0}
        run_folders.write(path, [
            line | slower | {"time/wall_s": line["time/wall_s"] * 1.7}
            for line in RunFolder(path).metrics()
        ])  # fmt: skip
    report.write(copy)
    first, second = read_csv(finished / "results.csv"), read_csv(copy / "results.csv")
    columns = list(first[0])
    times = [name for name in columns if name.startswith("time_")]
    assert columns[-len(times) :] == times and len(times) == 2
    assert any(a[times[0]] != b[times[0]] for a, b in zip(first, second, strict=True))
    for a, b in zip(first, second, strict=True):
        assert [a[c] for c in columns[:-2]] == [b[c] for c in columns[:-2]]
    assert (finished / "summary.csv").read_bytes() == (copy / "summary.csv").read_bytes()


def test_summary_agrees_with_scipy(finished):
    def losses(arm: str) -> np.ndarray:
        folders = [finished / "runs" / f"{arm}-s{seed}-0.003" for seed in range(3)]
        return np.array([RunFolder(f).metrics()[-1]["test/loss"] for f in folders])

    rows = {row["arm"]: row for row in read_csv(finished / "summary.csv")}
    assert list(rows) == list(report_workdirs.ABLATION)
    for arm, row in rows.items():
        values = losses(arm)
        alone = stats.ttest_1samp(values, 0).confidence_interval()
        names = ["test_loss", "test_loss_low", "test_loss_high"]
        expected = [values.mean(), alone.low, alone.high]
        np.testing.assert_allclose([float(row[n]) for n in names], expected, rtol=1e-12)
        np.testing.assert_allclose(float(row["test_loss_sd"]), values.std(ddof=1), rtol=1e-9)
        if arm == "full":
            assert row["difference"] == "" and row["pairs"] == "0"
            continue
        pair = stats.ttest_rel(values, losses("full")).confidence_interval()
        names = ["difference", "difference_low", "difference_high"]
        expected = [(values - losses("full")).mean(), pair.low, pair.high]
        np.testing.assert_allclose([float(row[n]) for n in names], expected, rtol=1e-9)
        assert row["pairs"] == "3" and row["parameters"] == "218432"


def test_divergence_is_counted_and_never_averaged(troubled):
    rows = {row["arm"]: row for row in read_csv(troubled / "summary.csv")}
    lost, partial = rows["no-residual"], rows["no-norm"]
    assert (lost["runs"], lost["finished"], lost["diverged"]) == ("3", "0", "3")
    assert lost["test_loss"] == lost["test_loss_low"] == lost["difference"] == ""
    ranks = {arm: row["rank"] for arm, row in rows.items()}
    # Diverged runs count before any loss, and what is not finished has no place.
    assert ranks == {"full": "1", "no-attention": "2", "no-norm": "3", "no-residual": "4",
                     "no-mlp": "", "no-positions": "", "post-norm": ""}  # fmt: skip
    assert (partial["finished"], partial["diverged"], partial["pairs"]) == ("2", "1", "2")
    survivors = [
        RunFolder(troubled / "runs" / f"no-norm-s{seed}-0.003").metrics()[-1]["test/loss"]
        for seed in (0, 2)
    ]
    assert float(partial["test_loss"]) == pytest.approx(np.mean(survivors), rel=1e-14)
    assert "nan" not in (troubled / "summary.csv").read_text().lower()
    assert "nan" not in (troubled / "results.csv").read_text().lower()


def test_run_without_a_finite_last_loss_counts_as_diverged(tmp_path):
    workdir = report_workdirs.ablation(tmp_path, seeds=2)
    path = workdir / "runs" / "no-mlp-s0-0.003"
    run_folders.write(path, [RunFolder(path).metrics()[-1] | {"test/loss": None}])
    report.write(workdir)
    row = next(r for r in read_csv(workdir / "summary.csv") if r["arm"] == "no-mlp")
    assert (row["finished"], row["diverged"]) == ("1", "1")


def test_torn_and_repeated_lines(tmp_path):
    workdir = report_workdirs.ablation(tmp_path, seeds=1)
    path = workdir / "runs" / "full-s0-0.003"
    before = RunFolder(path).metrics()
    run_folders.write(path, [{**before[-1], "validation/loss": 1.25}])
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 650, "valid')
    report.write(workdir)
    rows = [r for r in read_csv(workdir / "results.csv") if r["run"] == "full-s0-0.003"]
    assert len(rows) == len(before) and rows[-1]["validation_loss"] == "1.25"


def test_a_damaged_manifest_does_not_drop_a_run(tmp_path):
    workdir = report_workdirs.ablation(tmp_path, seeds=1)
    for name in ("manifest.json", "manifest.before.json"):
        (workdir / "runs" / "no-mlp-s0-0.003" / name).write_text('{"state": "do')
    page = _page(workdir)
    assert "no-mlp seed 0: not readable" in page.text
    assert "1 run folder is not as sealed (no-mlp-s0-0.003: manifest.json: " in page.text
    row = next(r for r in read_csv(workdir / "summary.csv") if r["arm"] == "no-mlp")
    assert (row["runs"], row["finished"], row["diverged"]) == ("1", "0", "0")


def test_page_is_self_contained(troubled):
    text = (troubled / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "img"} & set(page.tags)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids))
    inside = [link[1:] for link in page.links if link.startswith("#")]
    assert inside and set(inside) <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(page.ids)
    outside = [link for link in page.links if not link.startswith("#")]
    assert "results.csv" in outside and "summary.csv" in outside
    assert all((troubled / link).is_file() for link in outside)


def test_page_names_every_run_and_what_was_run(troubled):
    page = Page((troubled / "report.html").read_text(encoding="utf-8"))
    for run in FULL:
        assert run in page.text
    for part in (
        "python launch.py --experiment=ablation", "9f2c66d1a4b7e803", "0a1b2c3+dirty",
        "jax 0.10.2", "cpu:0, cpu:1", "A processor", "model.depth", "512 evenly spaced windows",
        "612 MB", "Student", "n − 1", "Satterthwaite", "Holm", "The plays of Shakespeare",
    ):  # fmt: skip
        assert part in page.text, part
    answer = page.text.index("Every run diverged with removing residual")
    assert page.text.index("not complete: 3 of 21") < answer


def test_figures_have_picture_vector_and_data(finished):
    folder = finished / "figures"
    names = {path.stem for path in folder.iterdir()}
    expected = {"learning_curves", "final_loss", "paired_differences", "gradient_norm", "decoder"}
    assert names == expected
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        root = ElementTree.parse(folder / f"{name}.svg").getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert read_csv(folder / f"{name}.csv")
    data = read_csv(folder / "learning_curves.csv")
    assert len(data) == 21 * 13
    assert {row["variant"] for row in data} == set(report_workdirs.ABLATION)


def test_text_from_files_is_escaped(tmp_path):
    evil = "<b>bold</b>&\"'<script>alert(1)</script>${\\frac}$"
    arms = [
        report_workdirs.arm("full", "full", "", {}),
        report_workdirs.arm(evil, evil, evil, {"model." + evil: evil}),
    ]
    runs = [report_workdirs.planned(name, seed) for name in ("full", evil) for seed in (0, 1)]
    for number, run in enumerate(runs):
        run["id"] = f"run{number}"
    more = dict.fromkeys(["title", "question", "hypothesis", "command", "experiment"], evil)
    plan = report_workdirs.plan(arms, runs, notes=[evil], **more)
    plan["corpus"]["name"] = plan["corpus"]["description"] = evil
    plan["evaluation"]["description"] = evil
    plan["config"] = {"model": {**plan["config"]["model"], "norm": evil}, evil: evil}
    files.write_sealed(tmp_path / "grid.json", plan)
    report_workdirs.train(tmp_path, runs[0], 1.9)
    report_workdirs.train(tmp_path, runs[2], 2.1)
    report_workdirs.train(tmp_path, runs[3], 2.1, state="diverged", stop=300)
    own = {evil: evil, "cpu": evil}
    run_folders.write(
        tmp_path / "runs/run3", record=report_workdirs.CONFIG, environment=own, reason=evil,
        state="diverged",
    )  # fmt: skip
    page = _page(tmp_path)
    assert "script" not in page.tags
    assert "<b>bold</b>" in page.text
    raw = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<b>bold" not in raw and "<script" not in raw


def test_depth_grid_is_ranked_within_each_depth(tmp_path):
    report.write(report_workdirs.depth(tmp_path))
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert {"loss_by_depth", "difference_by_depth"} <= names
    rows = read_csv(tmp_path / "summary.csv")
    assert len(rows) == 24
    by_x: dict[str, list[int]] = {}
    for row in rows:
        by_x.setdefault(row["x"], []).append(int(row["rank"]))
    assert by_x.keys() == {"2.0", "4.0", "8.0", "16.0"}
    assert all(sorted(ranks) == [1, 2, 3, 4, 5, 6] for ranks in by_x.values())


def test_several_rates_give_a_row_each(tmp_path):
    report.write(report_workdirs.ablation(tmp_path, seeds=2, rates=(0.001, 0.003)))
    rows = read_csv(tmp_path / "summary.csv")
    assert len(rows) == 14
    assert {(r["arm"], r["learning_rate"]) for r in rows} == {
        (arm, rate) for arm in report_workdirs.ABLATION for rate in ("0.001", "0.003")
    }
    runs = {r["run"]: float(r["test_loss"] or "nan") for r in read_csv(tmp_path / "results.csv")}
    for row in rows:
        if row["arm"] != "full":
            arm, end = row["arm"], row["learning_rate"]
            gaps = [runs[f"{arm}-s{s}-{end}"] - runs[f"full-s{s}-{end}"] for s in (0, 1)]
            assert float(row["difference"]) == pytest.approx(np.mean(gaps), rel=1e-12)
    assert (tmp_path / "figures" / "loss_by_learning_rate.svg").exists()


def test_nothing_started_yet(tmp_path):
    arms = [report_workdirs.arm("full", "full", "", {}), report_workdirs.arm("b", "b", "", {})]
    runs = [report_workdirs.planned("full", 0)]
    files.write_sealed(tmp_path / "grid.json", report_workdirs.plan(arms, runs))
    page = _page(tmp_path)
    assert "1 of 1 runs has not finished" in page.text
    assert "No run was planned for b" in page.text
    assert [row["state"] for row in read_csv(tmp_path / "results.csv")] == ["missing"]
    assert [row["arm"] for row in read_csv(tmp_path / "summary.csv")] == ["full", "b"]
    assert "full" in report.headline(tmp_path)


def test_headline_is_ranked_plain_text(troubled):
    text = report.headline(troubled)
    assert text.isascii()
    table = text.split("\n\n")[1].splitlines()
    order = [line.split()[1] for line in table[1:]]
    assert order[0] == "full" and order[3] == "no-residual" and len(order) == 7
    assert "not complete" in text and "Every run diverged with removing residual" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("content", [None, "{", "[]", '{"format": 1}', '{"format": 2, "arms": 3}'])
def test_unusable_plan_is_one_clear_line(tmp_path, content):
    if content is not None:
        (tmp_path / "grid.json").write_text(content)
    with pytest.raises(UserError, match=re.escape(str(tmp_path))) as caught:
        report.write(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_run_of_an_unknown_cell_is_refused(tmp_path):
    plan = report_workdirs.plan([], [report_workdirs.planned("ghost", 0)])
    files.write_sealed(tmp_path / "grid.json", plan)
    with pytest.raises(UserError, match="ghost"):
        report.write(tmp_path)


def test_colours_are_fixed_and_distinct():
    names = ["full", *report_workdirs.ABLATION]
    own = {"no-residual": palette.VERMILLION, "post-norm": palette.SKY}
    looks = palette.looks(names, "full", own)
    assert looks["full"].colour == palette.INK
    assert len({look.colour for look in looks.values()}) == len(looks) == 7
    assert len({look.marker for look in looks.values()}) == 7
    for name, colour in own.items():  # whoever else is there, and where it is the baseline
        assert palette.looks(["full", name], "full", own)[name].colour == colour
        assert palette.looks(["full", name], name, own)[name].colour == colour
    two = palette.looks(["a", "b", "c"], "a", {"b": palette.SKY, "c": palette.SKY})
    assert two["b"].dash != two["c"].dash
    many = palette.looks([f"s{i}" for i in range(25)], "s0")
    assert len({(look.colour, look.marker, look.dash) for look in many.values()}) == 25


def test_every_colour_of_a_page_has_a_dark_partner_that_reads():
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    def contrast(a: str, b: str) -> float:
        low, high = sorted([luminance(a), luminance(b)])
        return (high + 0.05) / (low + 0.05)

    dark = palette.DARK
    for text in (palette.INK, palette.MUTED):
        assert contrast(text, palette.PAPER) >= 4.5
        assert contrast(dark[text], dark[palette.PAPER]) >= 4.5
    for colour in palette.looks(list(report_workdirs.ABLATION), "full").values():
        assert contrast(dark[colour.colour], dark[palette.PAPER]) >= 3
