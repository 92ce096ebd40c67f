"""Any workdir: a page, words or one line of what is wrong; and who reads it leaves it as it was."""

from __future__ import annotations

import json
import shutil
import zlib

import numpy as np
import pytest
import report_workdirs
import run_folders
from fuzzing import assert_one_line, bounded, changed, digests, resealed
from hypothesis import given, settings
from hypothesis import strategies as st

from normjax.diagnostics import autopsy_record, evidence, verdict
from normjax.errors import UserError
from normjax.predictions import parsing, record
from normjax.predictions.prediction import Candidate
from normjax.reporting import loading, report
from normjax.runs import checking, files
from normjax.runs.run_folder import MANIFEST, METRICS, STATES, RunFolder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small finished grid with diagnostics, an autopsy, a prediction and its page."""
    workdir = tmp_path_factory.mktemp("whole") / "work"
    arms = [report_workdirs.arm(name, *report_workdirs.ABLATION[name][:3])
            for name in ("full", "no-norm")]  # fmt: skip
    runs = [report_workdirs.planned(arm["name"], seed, steps=24) for arm in arms for seed in (0, 1)]
    names = [Candidate(arm["name"]) for arm in arms]
    expected = parsing.parse("full\nno-norm", "--predict=x", names)
    files.write_sealed(workdir / "grid.json", report_workdirs.plan(arms, runs))
    for run in runs:
        lost = run["arm"] == "no-norm" and run["seed"] == 1
        report_workdirs.train(workdir, run, 2.0, **({"state": "diverged"} if lost else {}))
        folder = workdir / "runs" / run["id"]
        values = {"residual/rms_after": np.ones((4, 2)), "loss/value": np.array(2.0)}
        saved = folder / "checkpoints" / "24" / "state"
        saved.parent.mkdir(parents=True)
        saved.write_bytes(b"weights")
        run_folders.write(
            folder, samples=[(step, values) for step in (0, 8, 24)],
            checkpoints={"24": {"state": files.sha256(b"weights")}},
        )  # fmt: skip
        if lost:
            samples = [(step, {**values, "gradient/norm": np.array(4.0**step)}) for step in (6, 7)]
            checks = [autopsy_record.ReplayCheck("step", True, "the same step")]
            done = autopsy_record.examine(samples, 8, 0, checks)
            autopsy_record.write(folder, done, samples)
    report_workdirs.predicted(workdir, expected)
    report.write(workdir)
    return workdir


@pytest.fixture(scope="module")
def sources(whole):
    """The documents of the workdir that may be changed, by their path; a record's are its lines."""
    found = {}
    for path in sorted([*whole.rglob("*.json"), *whole.rglob("*.jsonl")]):
        name, text = str(path.relative_to(whole)), path.read_text()
        if path.suffix == ".json":
            found[name] = json.loads(text)
        else:
            found[name] = [{k: v for k, v in json.loads(line).items() if k != "check"}
                           for line in text.splitlines()]  # fmt: skip
    return found


@pytest.fixture(scope="module")
def copy(whole, tmp_path_factory):
    """Return a function that makes the workdir anew, as it was."""
    kept = tmp_path_factory.mktemp("kept") / "work"
    shutil.copytree(whole, kept, ignore=shutil.ignore_patterns("figures", "*.csv", "*.html"))
    place = tmp_path_factory.mktemp("copy") / "work"

    def made():
        shutil.rmtree(place, ignore_errors=True)
        return shutil.copytree(kept, place)

    return made


def put(workdir, name, document):
    """Write a changed document so that its seals hold."""
    path = workdir / name
    if name == record.FILE and isinstance(document, dict):
        resealed(path, document)
        plan = json.loads((workdir / "grid.json").read_text())
        seal = json.loads(path.read_text())["seal"]
        return resealed(workdir / "grid.json", report_workdirs.drawn(plan, seal))
    if path.suffix == ".json":
        return resealed(path, document)
    content = b"".join(map(line_of, document if isinstance(document, list) else [document]))
    path.write_bytes(content)
    if path.name == autopsy_record.DIAGNOSTICS_FILE:
        beside = path.with_name(autopsy_record.FILE)
        files.write_sealed(beside, json.loads(beside.read_text()), beside=(path.name,))
    manifest = json.loads((path.parent / MANIFEST).read_text())
    if path.name in manifest["records"]:
        entry = {"bytes": len(content), "lines": content.count(b"\n")}
        manifest["records"][path.name] = entry | {"sha256": files.sha256(content)}
        files.write_sealed(path.parent / MANIFEST, manifest)
    return None


def line_of(value):
    """Return any value as a line whose checksum holds."""
    text = json.dumps(value)
    return f'{text[:-1]}, "check": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def said(read, *arguments):
    """Return what a reader returns, or None where it says in one line why not."""
    with bounded():
        try:
            return read(*arguments)
        except UserError as error:
            assert_one_line(str(error))
    return None


def read_all(workdir):
    """Read a workdir in every way that writes nothing, and hold the answers to its files."""
    before = digests(workdir)
    for folder in (workdir / "runs").iterdir():
        run = said(RunFolder, folder)
        assert run.state in ("missing", "damaged", *STATES)
        problems = said(run.problems)
        lines = said(run.metrics)
        if run.manifest is not None and problems == []:
            assert lines is not None
            assert len(lines) <= (folder / METRICS).read_bytes().count(b"\n")
            steps = [line["step"] for line in lines]
            assert steps == sorted(set(steps))
        found = said(evidence.read, folder)
        assert found is None or said(verdict.judge, found).state in verdict.STATES
    checked = said(checking.check, workdir)
    if checked is not None:
        lines, bad = checked
        assert len(lines) >= bad >= 0
        for line in lines:
            assert_one_line(line)
    results = said(loading.load, workdir)
    text = said(report.headline, workdir)
    if results is not None and text is not None:
        text.encode()
        for run in results.runs:
            assert run.final_loss is None or run.final_loss == run.evaluations[-1]["test/loss"]
    assert digests(workdir) == before


@given(st.data())
def test_a_changed_document_is_read_or_named(copy, sources, data):
    workdir = copy()
    kind = data.draw(st.sampled_from(sorted({name.rsplit("/", 1)[-1] for name in sources})))
    name = data.draw(st.sampled_from([name for name in sources if name.endswith(kind)]))
    put(workdir, name, data.draw(changed(sources[name])))
    read_all(workdir)


def page_of(workdir, name, document):
    """Make the page of a workdir with a changed document, which may be refused."""
    put(workdir, name, document)
    before = digests(workdir)
    page = said(report.write, workdir)
    after = digests(workdir)
    kept = [each for each in before if not each.endswith(verdict.FILE)]
    assert [after.get(each) for each in kept] == [before[each] for each in kept]
    assert page is None or page.read_text(encoding="utf-8").endswith("</html>")


@given(st.data())
def test_a_page_of_a_changed_workdir_is_written_or_refused(copy, sources, data):
    """Without its figures, which take a second and more."""
    name = data.draw(st.sampled_from(sorted(sources)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_saved", lambda *_: [])
        page_of(copy(), name, data.draw(changed(sources[name])))


@pytest.mark.slow
@settings(max_examples=100)
@given(st.data())
def test_a_page_with_figures_of_a_changed_workdir_is_written_or_refused(copy, sources, data):
    name = data.draw(st.sampled_from(["grid.json", *sorted(sources)]))
    page_of(copy(), name, data.draw(changed(sources[name])))
