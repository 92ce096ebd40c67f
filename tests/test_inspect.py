"""`inspect` on a run of this program: a page, numbers in files, one line for what cannot be."""

import csv

import numpy as np
import pytest

from experiments import depth
from experiments.inspect import compare, findings, page, sources
from experiments.inspect.experiment import InspectConfig, get_config, run
from experiments.inspect.setting import Inspect
from normjax import configs
from normjax.diagnostics.walk import Walk, held, walk
from normjax.errors import UserError
from normjax.runs.experiment import Options
from tests import foreign_files as made
from tests.pages import Page

SMALL = {"inspect.windows": 3, "inspect.length": 8, "inspect.gains_tokens": 4}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of one run of two blocks, trained for two steps."""
    folder = tmp_path_factory.mktemp("grid")
    (folder / "text.txt").write_text("to be or not to be, that is the question: " * 60)
    config = configs.replace(depth.get_config("quick"), {
        "model.width": 8, "train.steps": 2, "train.warmup_steps": 1, "train.batch_size": 2,
        "train.evaluation_windows": 2, "train.final_windows": 2, "data.window": 8,
        "data.corpus": str(folder / "text.txt"), "data.cache_dir": str(folder / "cache"),
        "grid.seeds": 1, "grid.depths": (2,), "grid.arms": ("pre-2",),
    })  # fmt: skip
    depth.run(config, "quick", Options(folder / "work", "x", live=False))
    return next((folder / "work" / "runs").glob("pre-2-*"))


@pytest.fixture(scope="module")
def inspected(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    config = configs.replace(InspectConfig(), SMALL | {"inspect.model": (str(trained),)})
    return folder, run(config, "default", Options(folder, "x"))


def test_a_run_of_this_program_gets_a_page(inspected):
    folder, outcome = inspected
    seen = Page(outcome.page.read_text())
    assert seen.dead_links(folder) == []
    assert "nats per token over 24 tokens" in outcome.text and "nats per token" in seen.text
    rows = list(csv.DictReader((folder / "inspect.csv").read_text().splitlines()))
    assert [(r["block"], r["branch"]) for r in rows[:3]] == [
        ("0", "embedding"), ("1", "attention"), ("1", "mlp")
    ]  # fmt: skip
    for row in rows:
        assert float(row["size_low"]) <= float(row["size"]) <= float(row["size_high"])
    assert all(float(r["top"]) > 0 and float(r["bound"]) >= 0 for r in rows if r["top"])


def test_the_numbers_are_those_of_the_walk(trained, inspected):
    found = sources.find(Inspect(model=(str(trained),)))[0]
    windows, _ = sources.windows(found, Inspect(model=(str(trained),), windows=3, length=8))
    seen = walk(found.held, windows)
    rows = list(csv.DictReader((inspected[0] / "inspect.csv").read_text().splitlines()))
    assert seen.ordinary.all()
    np.testing.assert_allclose([float(r["size"]) for r in rows], seen.sizes.mean((0, 1)), rtol=1e-6)
    ratio = (seen.written / seen.sizes[..., :-1]).mean((0, 1))
    np.testing.assert_allclose([float(r["written"]) for r in rows[1:]], ratio, rtol=1e-5)


def test_what_is_kept_apart_enters_no_mean():
    states = np.ones((3, 2, 4, 5))
    states[1:, 0, 0] = 100.0
    sizes = np.moveaxis(np.sqrt(np.mean(states**2, -1)), 0, -1)
    ordinary = np.ones((2, 4), bool)
    ordinary[0, 0] = False
    one = np.ones((2, 4, 2))
    seen = Walk(((1, "attention"), (1, "mlp")), states, sizes, one, one, sizes, sizes[..., 0], {},
                ordinary)  # fmt: skip
    numbers = findings.by_depth(seen)
    assert [x.mean for x in numbers.size] == [1.0, 1.0, 1.0]
    assert numbers.apart == [1.0, 100.0, 100.0]
    assert "attention of block 1 wrote it" in findings.outliers(seen)
    table = page._OUTLIERS.csv(seen.outliers())
    assert table.splitlines()[1].startswith("1,1,")


def test_a_branch_at_right_angles_adds_in_squares(trained):
    """The sentence on growth: 1 and 3 times at right angles make sqrt(10)."""
    config = sources.find(Inspect(model=(str(trained),)))[0].held.decoder.config
    states = np.zeros((2, 1, 2, 2))
    states[0, ..., 0], states[1] = 1.0, (1.0, 3.0)
    sizes = np.moveaxis(np.sqrt(np.mean(states**2, -1)), 0, -1)
    wrote = np.full((1, 2, 1), 3 / 2**0.5)
    seen = Walk(((1, "attention"),), states, sizes, wrote, 0 * wrote, sizes, sizes[..., 0], {},
                np.ones((1, 2), bool))  # fmt: skip
    said = findings._growth(config, seen, findings.by_depth(seen))
    assert "it would end at 2.24" in said and "(1.00 times)" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 4096}, "the run has windows of"),
        ({"text": "/nowhere.txt"}, "no tokenizer that is known here"),
    ],
)
def test_what_cannot_be_is_one_line(trained, changes, message):
    asked = Inspect(model=(str(trained),), **changes)
    with pytest.raises(UserError, match=message):
        sources.windows(sources.find(asked)[0], asked)


def test_the_quick_preset_takes_no_jacobians():
    assert get_config("quick").inspect.gains_tokens == 0


def test_a_checkpoint_from_elsewhere_is_walked_on_ids(tmp_path):
    """What the page's numbers are made of is what its own parameters give."""
    (tmp_path / "model").mkdir()
    made.write_folder(tmp_path / "model", made.llama_tensors(made.decoder()[1]))
    (tmp_path / "ids.txt").write_text(" ".join(str(i % 64) for i in range(40)))
    asked = Inspect(model=(str(tmp_path / "model"),), tokens=str(tmp_path / "ids.txt"), length=9)
    (found,) = sources.find(asked)
    windows, said = sources.windows(found, asked)
    assert windows.shape == (4, 10) and "ids.txt" in said and "llama" in found.said
    model, params = made.decoder()
    ours, own = walk(found.held, windows), walk(held(model, params), windows)
    np.testing.assert_array_equal(ours.losses, own.losses)
    np.testing.assert_array_equal(ours.states, own.states)
    assert "GiB" in sources.cost(found, asked)


def test_two_steps_of_a_run_are_compared_window_by_window(trained, tmp_path):
    """Against itself nothing differs; against its initialization what both walks say."""
    where = str(trained)
    for first, same in ((f"{where}@2", True), (f"{where}@0", False)):
        model = {"inspect.model": (first, where)}
        config = configs.replace(InspectConfig(), SMALL | model)
        outcome = run(config, "default", Options(tmp_path / str(same), "x"))
        assert Page(outcome.page.read_text()).dead_links(tmp_path / str(same)) == []
        rows = list(
            csv.DictReader((tmp_path / str(same) / "compared.csv").read_text().splitlines())
        )
        asked = Inspect(model=(first, where), windows=3, length=8)
        a, b = (walk(f.held, sources.windows(f, asked)[0]) for f in sources.find(asked))
        ratio = np.exp(np.log(b.sizes.mean(1) / a.sizes.mean(1)).mean(0))
        np.testing.assert_allclose([float(r["size"]) for r in rows], ratio, rtol=1e-5)
        turned = (b.turned.mean(1) - a.turned.mean(1)).mean(0)
        np.testing.assert_allclose([float(r["turned"]) for r in rows[1:]], turned, atol=1e-6)
        assert all(float(r["size"]) == 1 for r in rows) == same
        loss = (b.losses - a.losses).mean()
        assert f"{loss:.4g}" in outcome.text.splitlines()[0]
    assert "most apart after" in outcome.text


def test_models_that_read_other_tokens_have_no_differences(trained, tmp_path):
    asked = Inspect(model=(str(trained),), windows=3, length=8)
    (found,) = sources.find(asked)
    seen = walk(found.held, sources.windows(found, asked)[0])
    pair = [compare.One(name, found, seen) for name in ("one", "other")]
    path, said = compare.write(tmp_path, pair, False, "a text", {"Command": "x"})
    assert "No differences are taken: the two have other vocabularies" in said[0]
    assert "None were taken" in Page(path.read_text()).text
    with pytest.raises(UserError, match="one model, or two"):
        sources.find(Inspect(model=("a", "b", "c")))


@pytest.mark.slow
def test_what_is_known_of_smollm2():
    """Another implementation's numbers of 28 tokens: loss, and rms without the first token."""
    try:
        (found,) = sources.find(Inspect())
    except UserError as error:
        pytest.skip(str(error))
    ids = found.encode(
        "Once upon a time, there was a little girl who lived in a small house near the forest. She"
        " loved to play with her dog."
    )
    assert len(ids) == 28
    seen = walk(found.held, np.asarray([ids + ids[:1]]))
    assert seen.losses[0, :27].mean() == pytest.approx(2.337, abs=5e-4)
    size = np.mean(seen.sizes[0, 1:], axis=0)
    assert size[0] == pytest.approx(0.11, abs=5e-3)
    assert size[2] == pytest.approx(1.90, abs=5e-2)
    assert size[58] == pytest.approx(29.9, rel=0.02)
    (wrote, took), *_ = seen.outliers()
    assert (wrote.position, wrote.block, wrote.branch) == (0, 12, "mlp")
    assert wrote.after > 20_000 and took.block >= 29
