"""Ways to a better score than one's foresight deserves, tried on a grid that really trains."""

from __future__ import annotations

import shutil

import pytest

from normjax import configs
from normjax.errors import UserError
from normjax.predictions import record
from normjax.reporting import loading, prediction
from normjax.runs import files, grid, runner, tuning
from normjax.runs.experiment import Options
from normjax.runs.grid import Arm, ExperimentConfig, Question
from normjax.runs.run_folder import MANIFEST, RunFolder

ARMS = (Arm("full", "full", "all", {}), Arm("no-mlp", "no MLP", "", {"model.mlp": "none"}),
        Arm("no-norm", "no norm", "", {"model.norm": "identity"}))  # fmt: skip
QUESTION = Question("own", "tiny", "Mine", "What?", "That.", "full")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forging")
    (folder / "text.txt").write_text("whoever comes here reads the same line\n" * 40)
    (folder / "mine.txt").write_text("full\nno-mlp\n")
    return folder


@pytest.fixture(scope="module", autouse=True)
def no_pages():
    """Pages are tested elsewhere, and take their time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.report, "write", lambda workdir: workdir / "report.html")
        yield


def launch(place, name, predict=True, dry_run=False, tuned=None, **changes):
    config = configs.replace(ExperimentConfig(), {
        "model.depth": 1, "model.width": 8, "model.heads": 2, "data.window": 8, "train.steps": 2,
        "data.corpus": str(place / "text.txt"), "data.cache_dir": str(place / "cache"),
        "train.warmup_steps": 1, "train.batch_size": 2, "train.evaluate_every": 2, "grid.seeds": 2,
        "train.evaluation_windows": 2, "train.final_windows": 4, "grid.arms": ("full", "no-mlp"),
    } | {key.replace("__", "."): value for key, value in changes.items()})  # fmt: skip
    stated = str(place / "mine.txt") if predict else ""
    options = Options(place / name, "the command", dry_run, live=False, predict=stated)
    runner.carry_out(QUESTION, ARMS, config, options, tuned)
    return place / name


def seeds(workdir):
    plan = files.read_sealed(workdir / "grid.json")
    return sorted({run["seed"] for run in plan["runs"]})


def judged(workdir):
    return prediction.judge(loading.load(workdir))


@pytest.fixture(scope="module")
def predicted(place):
    return launch(place, "predicted")


def test_seeds_are_drawn_from_the_prediction_and_are_nobody_elses(place, predicted):
    seal = files.read_sealed(predicted / record.FILE)["seal"]
    first = record.first_seed(seal)
    plan = files.read_sealed(predicted / "grid.json")
    assert seeds(predicted) == [first, first + 1]
    assert plan["prediction"] == {"sha256": seal, "first_seed": first}
    assert plan["config"]["grid"]["first_seed"] == first
    assert judged(predicted).stored.problem == "" and judged(predicted).score is not None
    again = launch(place, "again")  # the same words in another workdir
    assert not set(seeds(again)) & set(seeds(predicted))


def test_seeds_leave_room_and_are_not_those_of_tuning():
    drawn = [record.first_seed(str(i)) for i in range(2000)]
    assert len(set(drawn)) == 2000
    assert record.FIRST > tuning.FIRST_SEED + 1000  # the most seeds that tuning may be given
    assert record.LAST == grid.MAX_SEED - grid.MAX_SEEDS
    assert record.FIRST <= min(drawn) < record.LAST / 20 and max(drawn) > record.LAST * 0.95
    assert max(drawn) <= record.LAST


@pytest.mark.parametrize("predict", [True, False])
def test_starting_again_goes_on_with_the_same_runs(place, predicted, predict):
    before = {path: path.read_bytes() for path in predicted.glob(f"runs/*/{MANIFEST}")}
    plan = files.read_sealed(predicted / "grid.json")
    launch(place, "predicted", predict)
    assert files.read_sealed(predicted / "grid.json") == plan
    assert {path: path.read_bytes() for path in predicted.glob(f"runs/*/{MANIFEST}")} == before


def test_runs_moved_aside_and_back_are_not_what_is_scored(place):
    """The recipe: train, move the runs aside, predict with the results in sight, move them back."""
    work = launch(place, "recipe", predict=False)
    old = seeds(work)
    with pytest.raises(UserError, match="took 2 steps"):
        launch(place, "recipe")
    (work / "runs").rename(place / "aside")
    launch(place, "recipe")
    for run in (place / "aside").iterdir():
        run.rename(work / "runs" / run.name)
    launch(place, "recipe")
    found = judged(work)
    assert not set(old) & set(seeds(work)) and found.stored.problem == ""
    scored = {seed for item in found.score.items for seed in item.losses}
    assert scored == set(seeds(work))
    # The plan of before, brought back as well, names no prediction; one with its name is refused.
    plan = files.read_sealed(work / "grid.json")
    old_runs = [run | {"seed": run["seed"] - seeds(work)[0]} for run in plan["runs"]]
    files.write_sealed(work / "grid.json", plan | {"runs": old_runs})
    assert "seeds of these runs" in judged(work).stored.problem and judged(work).score is None


def restart(workdir, started):
    """Write another start into one of the runs."""
    path = sorted(workdir.glob(f"runs/*/{MANIFEST}"))[0]
    manifest = files.read_sealed(path)
    environment = manifest["segments"][0]["environment"]
    environment.pop("started")
    environment |= {"started": started} if started else {}
    files.write_sealed(path, manifest)
    return path.parent.name


@pytest.mark.parametrize(("started", "words"), [
    ("2020-01-01T00:00:00+00:00", "after the run {} began, 2020-01-01"),
    ("2020-01-01T00:00:00", "older than the run {}: a time is missing"),
    ("soon", "older than the run {}: a time is missing"),
    (None, "older than the run {}: a time is missing"),
])  # fmt: skip
def test_a_run_from_before_the_prediction_leaves_it_unscored(
    place, predicted, tmp_path, started, words
):
    work = shutil.copytree(predicted, tmp_path / "work")
    name = restart(work, started)
    found = judged(work)
    assert words.format(name) in found.stored.problem and found.score is None


@pytest.mark.slow
def test_runs_that_chose_the_rates_count_too(place):
    choice = tuning.TuningConfig(rates=(1e-3, 2e-3), rungs=(2,))
    work = launch(place, "tuned", tuned=choice)
    assert judged(work).stored.problem == ""
    (name, *_) = sorted(path.name for path in work.glob("tuning/runs/*"))
    path = work / "tuning" / "runs" / name / MANIFEST
    manifest = files.read_sealed(path)
    manifest["segments"][0]["environment"]["started"] = "2020-01-01T00:00:00+00:00"
    files.write_sealed(path, manifest)
    assert f"after the run {name} began" in judged(work).stored.problem


def test_chosen_seeds_are_refused(place):
    with pytest.raises(UserError, match="config.grid.first_seed=7: .*seeds that are drawn") as told:
        launch(place, "chosen", grid__first_seed=7)
    assert "\n" not in str(told.value) and not (place / "chosen").exists()


def test_a_dry_run_says_that_seeds_are_drawn_and_writes_nothing(place, predicted, capsys):
    launch(place, "dry", dry_run=True)
    assert "seeds: drawn from the prediction when it is stored" in capsys.readouterr().out
    assert not (place / "dry").exists()
    launch(place, "predicted", dry_run=True)
    said = capsys.readouterr().out
    assert "seeds: drawn" not in said
    for run in files.read_sealed(predicted / "grid.json")["runs"]:
        assert run["id"] in said


def test_what_was_added_after_a_look_is_told_and_scored_apart(place, predicted, tmp_path):
    few = judged(predicted)
    work = shutil.copytree(predicted, place / "grown")
    launch(place, "grown", grid__arms=("full", "no-mlp", "no-norm"), grid__seeds=3)
    more, first = judged(work), seeds(predicted)[0]
    assert few.growth is None and more.score == few.score
    assert more.growth.added == ("no-norm",) and more.growth.dropped == ()
    assert (more.growth.seeds, more.growth.planned) == (3, 2)
    assert set(more.growth.score.items[0].losses) == {first, first + 1, first + 2}
    assert more.missing == ("no-norm",)
    assert RunFolder(next(work.glob(f"runs/full-s{first}-*"))).state == "done"
