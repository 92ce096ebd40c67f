"""Names of runs, cohorts, selection, and what a grid refuses."""

from __future__ import annotations

import dataclasses
import itertools
import json
import string
import subprocess
import sys
from pathlib import Path

import pytest

from normjax import configs
from normjax.errors import UserError
from normjax.runs import grid
from normjax.runs.grid import Arm, ExperimentConfig

ROOT = Path(__file__).parents[1]
FULL = Arm("full", "full model", "Everything.", {})
DEEP = Arm("deep", "deeper", "Two more blocks.", {"model.depth": 6})
SLOW = Arm("slow", "slower", "A smaller rate.", {"train.learning_rate": 1e-4})
PRINT = """
import sys
from normjax.runs import grid
from normjax.runs.grid import Arm, ExperimentConfig
arms = [Arm("full", "", "", {}), Arm("deep", "", "", {"model.depth": 6})]
cohorts = grid.plan(ExperimentConfig(), arms, "f00d")
print(*(run.id for cohort in cohorts for run in cohort.runs))
"""


def ids(config, arms=(FULL,), fingerprint="f00d"):
    return [run.id for cohort in grid.plan(config, list(arms), fingerprint) for run in cohort.runs]


def with_grid(**changes):
    return configs.replace(ExperimentConfig(), {f"grid.{k}": v for k, v in changes.items()})


# --- names ----------------------------------------------------------------------------------------


def test_names_are_the_same_in_any_process():
    here = ids(ExperimentConfig(), [FULL, DEEP])
    out = subprocess.run(
        [sys.executable, "-c", PRINT], cwd=ROOT, capture_output=True, text=True, check=True,
        env={"PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu", "PATH": ""},
    )  # fmt: skip
    assert out.stdout.split() == here


def test_names_are_distinct_and_say_cell_and_seed():
    names = ids(with_grid(learning_rates=(1e-3, 2e-3), seeds=4), [FULL, DEEP])
    assert len(names) == len(set(names)) == 16
    for name in names:
        arm, seed, digest = name.rsplit("-", 2)
        assert arm in ("full", "deep") and seed in ("s0", "s1", "s2", "s3")
        assert len(digest) == 8 and int(digest, 16) >= 0


def _another(leaf):
    """Return a value of the leaf's type that differs from its own."""
    if leaf.type is bool:
        return not leaf.value
    if leaf.type in (int, float):
        return leaf.value + 1
    if names := leaf.limits.names():  # what a name stands for is in the name of a run
        return next(name for name in names if name != leaf.value)
    return (*leaf.value, "x") if leaf.is_list else leaf.value + "x"


LEAVES = [
    leaf for leaf in configs.leaves(ExperimentConfig())
    if leaf.path.split(".")[0] in ("model", "data", "train")
]  # fmt: skip
# The text, how it is read and where it is cached show in the corpus' fingerprint.
IN_FINGERPRINT = (
    "data.corpus", "data.vocabulary", "data.validation_fraction", "data.cache_dir",
    "data.suffixes", "data.encoding", "data.field", "data.max_bytes",
)  # fmt: skip


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: leaf.path)
def test_every_field_is_in_the_name_unless_it_is_manner(leaf):
    config = ExperimentConfig()
    changed = configs.replace(config, {leaf.path: _another(leaf)})
    same = leaf.path.removeprefix("train.") in grid.MANNER or leaf.path in IN_FINGERPRINT
    assert (ids(changed) == ids(config)) is same
    assert set(ids(changed)).isdisjoint(ids(config)) is not same


def test_manner_names_fields_that_exist():
    assert {f"train.{name}" for name in grid.MANNER} <= {leaf.path for leaf in LEAVES}
    assert set(IN_FINGERPRINT) <= {leaf.path for leaf in LEAVES}


def test_the_text_is_in_the_name():
    config = ExperimentConfig()
    assert set(ids(config, fingerprint="f00d")).isdisjoint(ids(config, fingerprint="beef"))


def test_more_seeds_or_cells_leave_the_names_of_the_others():
    few = ids(with_grid(seeds=2), [FULL])
    many = ids(with_grid(seeds=5), [DEEP, FULL])
    assert set(few) < set(many)
    assert set(ids(with_grid(first_seed=1, seeds=1))) < set(few)


def test_a_rate_from_the_list_names_the_run_that_the_plain_rate_names():
    plain = configs.replace(ExperimentConfig(), {"train.learning_rate": 2e-3})
    assert ids(plain) == ids(with_grid(learning_rates=(2e-3,)))


def test_names_are_fit_for_folders():
    for name in ids(with_grid(learning_rates=(1e-3, 1e6)), [FULL, DEEP, SLOW]):
        assert not set(name) - set(string.ascii_lowercase + string.digits + "-")


# --- cohorts --------------------------------------------------------------------------------------


def test_runs_are_the_product_of_rates_decays_scales_and_seeds():
    config = with_grid(
        seeds=2, first_seed=5, learning_rates=(1e-3, 3e-3), weight_decays=(0.0, 0.1, 0.2),
        init_scales=(1.0, 2.0),
    )  # fmt: skip
    (cohort,) = grid.plan(config, [FULL], "f00d")
    expected = itertools.product((5, 6), (1e-3, 3e-3), (0.0, 0.1, 0.2), (1.0, 2.0))
    assert sorted(tuple(run.hyper) for run in cohort.runs) == sorted(expected)
    assert len({run.id for run in cohort.runs}) == 24


def test_runs_of_one_program_form_one_cohort():
    cohorts = grid.plan(with_grid(seeds=3, learning_rates=()), [FULL, DEEP, SLOW], "f00d")
    members = [[(run.arm.name, run.hyper.seed) for run in cohort.runs] for cohort in cohorts]
    both = [("full", s) for s in range(3)] + [("slow", s) for s in range(3)]
    assert members == [both, [("deep", s) for s in range(3)]]
    assert [cohort.name for cohort in cohorts] == ["full + slow", "deep"]
    assert cohorts[1].config.model.depth == 6
    assert cohorts[0].runs[3].hyper.learning_rate == 1e-4


def test_a_cohort_never_mixes_programs():
    arms = [FULL, DEEP, SLOW, Arm("wide", "", "", {"model.width": 64}),
             Arm("long", "", "", {"train.steps": 900})]  # fmt: skip
    for cohort in grid.plan(with_grid(learning_rates=(1e-3, 2e-3)), arms, "f00d"):
        programs = set()
        for run in cohort.runs:
            fixed = dataclasses.replace(
                run.config.train, learning_rate=0.0, weight_decay=0.0, init_scale=0.0
            )
            programs.add((run.config.model, run.config.data, fixed))
        assert len(programs) == 1


def test_the_record_of_a_run_is_json_and_tells_what_it_is():
    (cohort,) = grid.plan(with_grid(seeds=1, learning_rates=(0.25,)), [FULL], "f00d")
    record = json.loads(json.dumps(cohort.runs[0].record()))
    assert record == {
        "id": cohort.runs[0].id, "arm": "full", "seed": 0, "learning_rate": 0.25,
        "weight_decay": ExperimentConfig().train.weight_decay, "init_scale": 1.0,
        "steps": ExperimentConfig().train.steps,
    }  # fmt: skip


def test_a_cohort_makes_the_model_of_its_configuration():
    small = {"model.width": 16, "model.heads": 2, "data.window": 8}
    config = configs.replace(ExperimentConfig(), small)
    (cohort,) = grid.plan(config, [DEEP], "f00d")
    model = cohort.model(23)
    assert (model.config.depth, model.vocabulary, model.window) == (6, 23, 8)


# --- selection ------------------------------------------------------------------------------------

SERIES = [
    Arm(f"{placement}-d{depth}", "", "", {"model.depth": depth}, placement, depth)
    for placement in ("pre", "post") for depth in (2, 4)
]  # fmt: skip


def test_select_takes_series_and_names_in_the_order_of_the_plan():
    names = lambda chosen: [arm.name for arm in grid.select(SERIES, chosen)]  # noqa: E731
    assert names(()) == ["pre-d2", "pre-d4", "post-d2", "post-d4"]
    assert names(("pre",)) == ["pre-d2", "pre-d4"]
    assert names(("post-d4", "pre-d2")) == ["pre-d2", "post-d4"]
    assert names(("post", "post-d2", "post")) == ["post-d2", "post-d4"]


def test_select_refuses_an_unknown_name_with_a_suggestion():
    with pytest.raises(UserError) as caught:
        grid.select([FULL, DEEP], ["ful"])
    message = str(caught.value)
    assert "config.grid.arms=ful" in message and "did you mean 'full'?" in message
    assert "full, deep" in message and "\n" not in message


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid.seeds": 0}, "config.grid.seeds=0"),
        ({"grid.seeds": -3}, "config.grid.seeds=-3"),
        ({"grid.first_seed": -1}, "config.grid.first_seed=-1"),
        ({"grid.first_seed": 2**31 - 1}, "config.grid.first_seed=2147483647"),
        ({"grid.learning_rates": (1e-3, -1e-3)}, "config.grid.learning_rates=-0.001"),
        ({"grid.weight_decays": (float("nan"),)}, "config.grid.weight_decays=nan"),
        ({"grid.init_scales": (float("inf"),)}, "config.grid.init_scales=inf"),
        ({"model.heads": 3}, "config.model.heads=3"),
        ({"model.depth": 0}, "config.model.depth=0"),
        ({"model.placement": "pree"}, "did you mean 'pre'?"),
        ({"train.learning_rate": -1.0}, "config.train.learning_rate=-1.0"),
        ({"train.parallel": "data", "train.batch_size": 5}, "multiple of the 2 devices"),
    ],
)
def test_impossible_grids_are_refused_in_one_line(changes, words):
    with pytest.raises(UserError) as caught:
        grid.check(configs.replace(ExperimentConfig(), changes), [FULL], devices=2)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_cell_that_cannot_be_built_is_refused_too():
    odd = Arm("odd", "", "", {"model.heads": 5})
    with pytest.raises(UserError, match="heads=5"):
        grid.check(ExperimentConfig(), [FULL, odd], devices=1)


def test_a_workdir_of_another_version_is_refused_before_it_is_overwritten(tmp_path):
    for plan in ({"format": 3, "runs": []}, {"format": 5, "seal": "x"}):
        (tmp_path / "grid.json").write_text(json.dumps(plan))
        with pytest.raises(UserError, match=f"format {plan['format']}, .* format 4; use another"):
            grid.check_format(tmp_path)
    (tmp_path / "grid.json").write_text("{")  # a torn one is made anew
    grid.check_format(tmp_path)
    grid.check_format(tmp_path / "new")


@pytest.mark.parametrize("field", ["learning_rates", "weight_decays", "init_scales"])
def test_a_value_listed_twice_does_not_plan_two_runs_of_one_name(field):
    """Two runs of one name would write into one folder."""
    config = with_grid(**{field: (0.5, 0.5)})
    try:
        grid.check(config, [FULL], devices=1)
    except UserError as error:
        assert field in str(error)
        return
    names = ids(config)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("changes", [{}, {"grid.seeds": 1}, {"grid.first_seed": 2**31 - 4}])
def test_possible_grids_are_accepted(changes):
    grid.check(configs.replace(ExperimentConfig(), changes), [FULL, DEEP, SLOW], devices=4)
