"""The page on diagnostics: drawn from files alone, complete, safe, silent where there are none."""

import json
import re
import shutil

import numpy as np
import pytest
import report_workdirs
import run_folders
from report_workdirs import read_csv

from normjax.diagnostics import autopsy_record, definitions, evidence, log, self_test, verdict
from normjax.diagnostics.autopsy_record import ReplayCheck
from normjax.reporting import (
    diagnostics_data,
    diagnostics_page,
    drawing,
    heat_maps,
    loading,
    palette,
    report,
)
from normjax.runs import files
from normjax.runs.run_folder import RunFolder

L, H = 3, 2
STEPS = (0, 5, 50, 200, 599)


def values(rng, step, factor=1.0):
    """Every diagnostic of one step."""
    size = {"layer": L, "sublayer": 2, "head": H}
    out = {}
    for name, row in definitions.DIAGNOSTICS.items():
        parts = {"": [""], "parameter": ["[mlp.branch.in.kernel]"], "norm": ["[mlp.pre_norm]"]}
        for part in parts[row.each]:
            shape = tuple(size[axis] for axis in row.axes)
            out[name + part] = np.asarray(0.05 * np.exp(0.1 * rng.standard_normal(shape)))
    out["residual/rms_after"] *= factor * (1 + step / 300)
    out["attention/entropy_share"] += 0.5
    for name in self_test.NAMES:
        out[name] = out[name] * 1e-6
    return out


def made(folder, seeds=2):
    """Three variants with diagnostics; no-norm diverges in seed 0, and has an autopsy."""
    arms = [
        report_workdirs.arm(name, *report_workdirs.ABLATION[name][:3])
        for name in ("full", "no-norm", "post-norm")
    ]
    runs = [report_workdirs.planned(c["name"], seed) for c in arms for seed in range(seeds)]
    files.write_sealed(folder / "grid.json", report_workdirs.plan(arms, runs))
    rng = np.random.default_rng(0)
    for run in runs:
        sick = run["arm"] == "no-norm" and run["seed"] == 0
        fate = {"state": "diverged", "stop": 250} if sick else {}
        report_workdirs.train(folder, run, report_workdirs.ABLATION[run["arm"]][3], **fate)
        path = folder / "runs" / run["id"]
        samples = []
        for step in STEPS:
            found = values(rng, step, 10.0 if sick else 1.0)
            if sick and step >= 200:
                found["attention/logit_max"][1, 1] = 5e4
                found["residual/rms_after"][2] = np.nan
            samples.append((step, found))
        run_folders.write(path, samples=samples)
        if sick:
            dense = [(step, values(rng, step)) for step in range(220, 252)]
            for step, each in dense:
                each["attention/logit_max"][1, 1] *= 10.0 ** max(0, step - 240)
            checks = [ReplayCheck("bad step", True, "its first bad step is 249")]
            autopsy_record.write(path, autopsy_record.examine(dense, 249, 200, checks), dense)
    return folder


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = made(tmp_path_factory.mktemp("diagnostics"))
    report.write(folder)
    return folder


def test_verdicts_stand_in_a_table_and_in_every_folder(workdir):
    found = {row["run"]: row for row in read_csv(workdir / "verdicts.csv")}
    assert len(found) == 6
    page = (workdir / "report.html").read_text()
    for run, row in found.items():
        record = json.loads((workdir / "runs" / run / verdict.FILE).read_text())
        assert record["state"] == row["state"] and record["sentence"] == row["sentence"]
        said = json.loads(json.dumps(verdict.judge_run(workdir / "runs" / run).record()))
        assert {name: record[name] for name in said} == said
        assert row["sentence"].split(";")[0].split("(")[0].rstrip(".") in page
    sick = found["no-norm-s0-0.003"]
    assert (sick["state"], sick["first_diagnostic"]) == ("diverged", "attention/logit_max")
    assert (sick["first_step"], sick["first_layer"], sick["first_head"]) == ("200", "2", "2")
    assert float(sick["first_factor"]) == 50.0
    assert {row["state"] for run, row in found.items() if run != "no-norm-s0-0.003"} == {
        "well behaved"
    }
    assert "Of 6 runs: 5 well behaved and 1 diverged." in page


def test_every_figure_has_picture_vector_and_data(workdir):
    figures = workdir / "figures"
    layered = [
        n for n, row in definitions.DIAGNOSTICS.items() if "layer" in row.axes and not row.each
    ]
    assert set(diagnostics_data.CHOSEN) < set(layered)
    names = [f"diagnostic_{diagnostics_data.slug(name)}" for name in layered]
    kinds = ("layers", "gains", "parameters")
    names += [f"profiles_{kind}_{when}" for kind in kinds for when in ("first", "last")]
    names += ["autopsy_no-norm-s0-0.003"]
    page = (workdir / "report.html").read_text()
    for name in names:
        assert (figures / f"{name}.png").stat().st_size > 3000
        assert len(read_csv(figures / f"{name}.csv")) >= L
        assert f'id="{name}"' in page and f"figures/{name}.svg" in page
    assert "http" not in re.sub(r"http://www\.w3\.org/\S+", "", page)


def test_heat_map_data_are_medians_over_seeds(workdir):
    found = read_csv(workdir / "figures" / "diagnostic_residual_rms_after.csv")
    own = [
        dict(log.read_diagnostics(workdir / "runs" / f"full-s{seed}-0.003")) for seed in range(2)
    ]  # fmt: skip
    picked = [r for r in found if (r["variant"], r["step"], r["block"]) == ("full", "50", "2")]
    assert [row["sublayer"] for row in picked] == ["attention", "mlp"]
    for i, row in enumerate(picked):
        expected = np.mean([each[50]["residual/rms_after"][1, i] for each in own])
        assert float(row["median"]) == pytest.approx(expected, rel=1e-12)
    lost = [row for row in found if row["not_finite"] == "True"]
    assert {(row["variant"], row["block"]) for row in lost} == {("no-norm", "3")}
    # The finite seed still counts there.
    assert all(float(row["median"]) > 0 for row in lost)
    every = read_csv(workdir / "figures" / "profiles_layers_last.csv")
    layered = [
        n for n, row in definitions.DIAGNOSTICS.items() if "layer" in row.axes and not row.each
    ]
    assert {row["diagnostic"] for row in every} == set(layered)


def test_all_definitions_and_bands_are_printed(workdir):
    page = re.sub(r"\s+", " ", (workdir / "report.html").read_text())
    page = page.replace("&#39;", "'").replace("&gt;", ">").replace("&lt;", "<")
    for name, row in definitions.DIAGNOSTICS.items():
        assert f"<code>{name}</code>" in page and row.definition in page and row.source in page
    for _, bounds, band in diagnostics_page.band_rows():
        assert bounds in page and band.reason in page and band.source in page


def test_the_autopsy_is_told(workdir):
    page = re.sub(r"\s+", " ", (workdir / "report.html").read_text())
    assert "Replayed from the checkpoint of step 200, measured before every step from 220" in page
    assert "First to move was the largest logit in block 2, head 2, before step 241" in page
    moved = read_csv(workdir / "figures" / "autopsy_no-norm-s0-0.003.csv")
    assert moved[0]["diagnostic"] == "attention/logit_max"
    assert moved[0]["place"] == "block 2, head 2"


def test_the_instrument_reports_its_own_faults(workdir, tmp_path):
    """Rounding is said to be rounding; a defect beyond it stands first on the page."""
    page = (workdir / "report.html").read_text()
    assert "The instrument tested itself 210 times" in page  # (3 x 2 + 1) x 5 steps x 6 runs
    assert "A fault of the instrument" not in page
    made(tmp_path, seeds=1)
    path = next(p for p in (tmp_path / "runs").iterdir() if p.name.startswith("post-norm"))
    found = values(np.random.default_rng(1), 50)
    found["instrument/radial_defect"][2, 1] = 1e-3
    run_folders.write(path, samples=[(50, found)])
    report.write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert page.index("A fault of the instrument") < page.index('aria-label="The answer"')
    assert f"off by 1.0e-03 in run {path.name} at step 50" in page


def test_a_wrong_value_in_one_layer_is_no_rounding_and_a_lost_one_no_fault():
    series = evidence.Series("instrument/radial_defect", np.array([0, 4]), np.array(
        [[[1e-7, 2e-7], [3e-7, 1e-7]], [[np.nan, np.inf], [1e-7, 4e-7]]]
    ))  # fmt: skip
    made_of = lambda s: type("Run", (), {"series": {s.name: s}})()  # noqa: E731
    good = self_test.run_test({"a": made_of(series)}, "float32")
    assert (
        good.sound and good.worst == 4e-7 and good.tests == 6 and (good.run, good.step) == ("a", 4)
    )
    assert not self_test.run_test({"a": made_of(series)}, "float64").sound
    assert self_test.run_test({}, "float32") is None


def test_no_diagnostics_no_section(tmp_path):
    folder = report_workdirs.ablation(tmp_path, seeds=1)
    results = loading.load(folder)
    diagnostics = diagnostics_data.load(results)
    assert not diagnostics.measured
    looks = palette.looks(results.series, results.baseline)
    assert diagnostics_page.sections(results, diagnostics, {}, looks) == []
    diagnostics_data.write(results, diagnostics)
    found = read_csv(folder / "verdicts.csv")
    assert {row["basis"] for row in found} == {"metrics"}
    assert all("no diagnostics were measured" in row["sentence"] for row in found)


def test_bands_of_the_plan_are_used(tmp_path):
    folder = made(tmp_path, seeds=1)
    plan = files.read_sealed(folder / "grid.json")
    plan["config"]["verdict"] = {"bands": ["residual/token_similarity::0.001"]}
    files.write_sealed(folder / "grid.json", plan)
    diagnostics = diagnostics_data.load(loading.load(folder))
    first = diagnostics.verdicts["full-s0-0.003"].first
    assert (first.diagnostic, first.step, first.limit) == ("residual/token_similarity", 0, 0.001)


def test_damaged_and_missing_files_cost_no_page(tmp_path):
    folder = made(tmp_path, seeds=1)
    runs = sorted((folder / "runs").iterdir())
    (runs[0] / log.FILE).write_text('{"step": 0, "values": {"loss/value"\n\x00\n')
    (runs[1] / autopsy_record.FILE).write_text("{")
    (runs[2] / log.FILE).unlink()
    results = loading.load(folder)
    diagnostics = diagnostics_data.load(results)
    assert len(diagnostics.verdicts) == 3 and not diagnostics.autopsies
    looks = palette.looks(results.series, results.baseline)
    with drawing.style():
        assert heat_maps.figures(results, diagnostics)
    assert diagnostics_page.sections(results, diagnostics, {}, looks)


def test_sublayers_of_another_number_stand_side_by_side(tmp_path):
    folder = made(tmp_path, seeds=1)
    path = folder / "runs" / "post-norm-s0-0.003"
    config = RunFolder(path).record
    config["model"]["attention"] = "none"
    shutil.rmtree(path)
    samples = [(step, {"residual/rms_after": np.full((5, 1), 2.0)}) for step in (0, 7)]
    run_folders.write(path, record=config, samples=samples, state="done")
    results = loading.load(folder)
    diagnostics = diagnostics_data.load(results)
    (variant,) = [v for v in results.variants if v.arm.name == "post-norm"]
    each = diagnostics_data.grid(diagnostics, variant, "residual/rms_after")
    assert each.rows == tuple((block, "mlp") for block in range(1, 6))
    assert each.steps.tolist() == [0, 7] and (each.values == 2.0).all()
    with drawing.style():
        assert len(heat_maps.figures(results, diagnostics)) == len(diagnostics.names())


def test_the_scale_is_monotone_in_grey():
    import matplotlib

    colours = matplotlib.colormaps[heat_maps.COLOURS](np.linspace(0, 1, 64))[:, :3]
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    assert (np.diff(linear @ [0.2126, 0.7152, 0.0722]) > 0).all()
