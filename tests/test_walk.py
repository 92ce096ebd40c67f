"""The walk of BUILD.md: a norm, a placement and an experiment in files of one's own."""

import csv
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import run_folders

import normjax
from normjax.runs.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
MINE, QUESTION = re.findall(r"```python\n(.*?)```", (ROOT / "BUILD.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """A folder where the experiment of the walk was run, in a process of its own."""
    folder = tmp_path_factory.mktemp("walk")
    (folder / "mine.py").write_text(MINE)
    (folder / "question.py").write_text(QUESTION)
    (folder / "text.txt").write_text("to be or not to be, that is the question: " * 60)
    small = {"train.steps": 4, "train.warmup_steps": 1, "train.evaluate_every": 2,
             "model.width": 8, "data.window": 8, "train.batch_size": 2, "grid.seeds": 2,
             "train.evaluation_windows": 2, "train.final_windows": 2, "train.diagnostics": "on",
             "model.norm": "dynamic_tanh", "data.corpus": "text.txt"}  # fmt: skip
    command = [sys.executable, str(ROOT / "launch.py"), "--plugins=mine.py",
               "--experiment=question.py", "--workdir=out", "--compilation_cache=off",
               *(f"--config.{k}={v}" for k, v in small.items())]  # fmt: skip
    environment = os.environ | {"NORMJAX_CACHE": str(folder / "cache")}
    again = partial(subprocess.run, command, cwd=folder, env=environment, capture_output=True,
                    text=True)  # fmt: skip
    done = again()
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, again


@pytest.fixture
def mine():
    """The rows of the walk in this process's tables, and nowhere afterwards."""
    before = dict(normjax.NORMS), dict(normjax.PLACEMENTS)
    try:
        exec(compile(MINE, "mine.py", "exec"), {})
        yield
    finally:
        for table, rows in zip((normjax.NORMS, normjax.PLACEMENTS), before, strict=True):
            table.clear()
            table.update(rows)


def test_the_experiment_trains_and_writes_its_page(walked):
    folder, said, _ = walked
    with open(folder / "out" / "question.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == ["pre", "two_norms"]
    assert all(0 < float(row["loss"]) < 10 for row in rows)
    assert "Placement" in said and "two_norms" in said
    page = (folder / "out" / "question.html").read_text()
    assert "<h1>Two norms beside pre-norm</h1>" in page and "2 placements were trained." in page


def test_the_report_knows_the_rows_and_finds_no_fault(walked):
    """Equation, colour and norm of rows that the package has never seen; no false alarm."""
    out = walked[0] / "out"
    text = re.sub(r"<[^>]+>", " ", (out / "report.html").read_text())
    assert "h′ = Norm(a h + F(Norm(h)))" in text
    assert "fault of the instrument" not in text
    plan = json.loads((out / "grid.json").read_text())
    own = plan["arms"][1]["rows"]
    assert own["placement"]["attention"]["keep"] == 2 * 2**0.5  # of two blocks
    assert [p["name"] for p in own["norm"]["parameters"]] == ["gain", "alpha"]
    assert plan["plugins"][0]["name"] == "mine"


def test_another_row_under_the_name_is_another_run(walked, mine):
    """What a name stands for is part of a run's identity, the learned parameter as well."""
    import dataclasses

    config = normjax.DecoderConfig(depth=2, width=8, heads=2, norm="dynamic_tanh")
    before = config.identity()
    row = normjax.NORMS["dynamic_tanh"]
    normjax.register_norm(
        "dynamic_tanh", dataclasses.replace(row, parameters=row.parameters[:1],
                                            function=lambda x, gain: gain * jax.numpy.tanh(x / 2)),
        replace=True,
    )  # fmt: skip
    assert config.identity() != before


def test_the_norm_and_the_block_are_verified(mine):
    x = np.random.default_rng(0).normal(size=8)
    parameters = {"gain": np.exp(x), "alpha": np.asarray(0.7)}
    # Not beyond scale 1: there autodiff's 1 - tanh^2 is rounding, and the closed form is not.
    normjax.verify("dynamic_tanh", None, x, parameters=parameters, scales=(0.0, 1e-3, 1.0)).check()
    rows = {"placement": "two_norms", "norm": "dynamic_tanh"}
    config = normjax.DecoderConfig(depth=2, width=8, heads=2, **rows)
    model = normjax.Decoder(config, vocabulary=5, window=4)
    part = normjax.Parts(model, model.init(jax.random.key(0))).block(2)
    h = np.random.default_rng(1).normal(size=(3, 8))
    with jax.enable_x64(True):
        expected = np.asarray(jax.jacfwd(part)(jax.numpy.asarray(h)))
    np.testing.assert_allclose(part.sequence_jacobian(h), expected, rtol=0, atol=1e-13)


def test_theory_says_that_it_knows_no_law(mine):
    from normjax.theory.sublayer_theory import predict

    config = normjax.DecoderConfig(depth=2, width=8, heads=2, norm="dynamic_tanh")
    params = normjax.Decoder(config, vocabulary=5, window=4).init(jax.random.key(0))
    said = predict(config, params, 0, "mlp", 0.1)
    assert said.law is None and said.assumption == "no law: Dynamic Tanh states none"


def test_a_folder_that_holds_another_row_is_refused_field_by_field(walked):
    """A finished run is reused only if what it was agrees with what is asked."""
    folder, _, again = walked
    path = next((folder / "out" / "runs").glob("two_norms-s0-*"))
    record = RunFolder(path).record
    record["model"]["rows"]["placement"]["attention"]["keep"] = 0.5
    run_folders.write(path, record=record, state="done")
    done = again()
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("normjax: out/runs/two_norms-s0-") and "holds another run" in line
    assert "model.rows.placement.attention.keep: 0.5 -> 2.82842" in line
