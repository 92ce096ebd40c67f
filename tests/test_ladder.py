"""All placements against each other: when seeds are enough, the table, the page, the command."""

import math

import numpy as np
import pages
import pytest
import report_workdirs
import run_folders
import scipy.stats

from experiments.ladder import data, experiment, page, sequential
from normjax import configs
from normjax.errors import UserError
from normjax.placements import PLACEMENTS
from normjax.reporting import effects, statistics
from normjax.runs import files
from normjax.runs.experiment import Options

LOOKS = (3, 5, 8)


def climbed(rng, means, looks=LOOKS, corrected=True):
    """Carry out one experiment on normal numbers; return what it says differs, and its seeds.

    All comparisons share the baseline's noise, so they depend on each other.
    """
    noise = rng.normal(size=(len(means) + 1, looks[-1]))
    gaps = np.asarray(means)[:, None] + noise[1:] - noise[0]
    number, many = (len(looks), len(means)) if corrected else (1, 1)

    def decided(left, seeds):
        found = {i: statistics.estimate(gaps[i, :seeds]) for i in left}
        return {
            i for i, gap in found.items()
            if effects.is_shown(gap, sequential.at_a_look(gap, number, many))
        }  # fmt: skip

    stopped = sequential.climb(range(len(means)), looks, decided)
    at_end = {i: statistics.estimate(gaps[i, :seeds]) for i, seeds in stopped.items()}
    p = sequential.at_the_end(at_end, number)
    return {i for i, gap in at_end.items() if effects.is_shown(gap, p[i])}, stopped


@pytest.mark.parametrize("means", [(0.0,) * 6, (0.0, 0.0, 0.0, 9.0, -9.0, 9.0)])
def test_the_chance_of_any_false_decision_is_at_most_the_stated_one(means):
    rng, false, repeats = np.random.default_rng(7), 0, 2000
    nulls = {i for i, mean in enumerate(means) if mean == 0}
    for _ in range(repeats):
        said, _ = climbed(rng, means)
        false += bool(said & nulls)
    assert false / repeats <= effects.LEVEL
    assert false > 0  # a rule that never says anything would pass too


def test_without_its_corrections_the_same_rule_errs_more_often_than_stated():
    rng, repeats = np.random.default_rng(7), 300
    false = 0
    for _ in range(repeats):
        _, stopped = climbed(rng, (0.0,) * 6, corrected=False)
        false += min(stopped.values()) < LOOKS[-1]
    assert false / repeats > 2 * effects.LEVEL


def test_a_true_difference_is_found_as_often_as_the_noncentral_t_says():
    mean, many, repeats = 4.5, 6, 400
    rng, found, seeds = np.random.default_rng(3), 0, []
    for _ in range(repeats):
        said, stopped = climbed(rng, (mean, *(0.0,) * (many - 1)))
        found += 0 in said
        seeds.append(stopped[0])
    # The last look alone, at its share of the error; the spread of a difference is sqrt(2).
    n = LOOKS[-1]
    bound = scipy.stats.t.isf(effects.LEVEL / (2 * len(LOOKS) * many), n - 1)
    power = scipy.stats.nct.sf(bound, n - 1, mean / math.sqrt(2) * math.sqrt(n))
    assert power > 0.9
    assert found / repeats > power - 3 * math.sqrt(power * (1 - power) / repeats)
    assert np.mean(seeds) < 0.9 * n  # and with fewer seeds than all


def test_a_climb_asks_for_what_is_left_only():
    asked = []

    def decided(left, seeds):
        asked.append((left, seeds))
        return {"b"} if seeds == 3 else {"a", "c"}

    found = sequential.climb(("a", "b", "c"), LOOKS, decided)
    assert asked == [(("a", "b", "c"), 3), (("a", "c"), 5)]
    assert found == {"a": 5, "b": 3, "c": 5}


# --- the table and the page -----------------------------------------------------------------------

LOSSES = {
    "pre-2": (2.00, 2.02, 1.98, 2.01, 1.99), "post-2": (2.30, 2.321, 2.279),
    "none-2": (2.01, 2.01, 2.00, 2.00, 2.00),
}  # fmt: skip
RATES = (0.001, 0.003, 0.009)
TUNED = {"pre-2": (2.5, 2.2, 2.3), "post-2": (2.6, 2.4, None), "none-2": (2.5, 2.4, 2.2)}
START = 4.0


@pytest.fixture
def workdir(tmp_path):
    """Two looks, of 3 and of 5 seeds; at the second, post is decided."""
    colours = {"pre": PLACEMENTS["pre"].colour, "post": PLACEMENTS["post"].colour, "none": ""}
    arms = [
        report_workdirs.arm(
            f"{name}-2", f"{name} title, 2 blocks", "", {"model.placement": name}, series=name,
            x=2.0, colour=colour, flops_per_token=2e6 if name == "none" else 4e6,
        )
        for name, colour in colours.items()
    ]  # fmt: skip
    ids = []
    for name, losses in TUNED.items():
        for i, loss in enumerate(losses):
            ids.append(f"{name}-s1000000-{i}")
            run_folders.write(
                tmp_path / "look-3" / "tuning" / "runs" / ids[-1],
                [{"step": 0, "validation/loss": START}, {"step": 100, "validation/loss": loss}],
                record={"arm": name, "hyper": {"seed": 10**6, "learning_rate": RATES[i]}},
                state="done" if loss else "diverged", step=100,
            )  # fmt: skip
    plan = {
        "config": {"train": {"batch_size": 8}, "data": {"window": 30}},
        "baseline": "pre", "x": {"name": "depth", "label": "depth", "scale": "log2"},
        "tuning": {
            "rates": list(RATES), "rungs": [100], "seeds": 1, "first_seed": 10**6, "runs": 9,
            "run_steps": 900, "seconds": 1.0, "chosen": {},
        },
    }  # fmt: skip
    for seeds, first in ((3, 0), (5, 3)):
        own = [arm for arm in arms if len(LOSSES[arm["name"]]) >= seeds]
        runs = [
            report_workdirs.planned(arm["name"], seed, 0.009 if arm["series"] == "none" else 0.003)
            for arm in own for seed in range(first, seeds)
        ]  # fmt: skip
        folder = tmp_path / f"look-{seeds}"
        files.write_sealed(folder / "grid.json", report_workdirs.plan(own, runs, **plan))
        for run in runs:
            loss = LOSSES[run["arm"]][run["seed"]]
            run_folders.write(
                folder / "runs" / run["id"],
                [{"step": 600, "validation/loss": loss, "test/loss": loss,
                  "time/tokens_per_s": 6000.0 if seeds == 3 else 7000.0}],
                state="done", step=600, steps=600,
            )  # fmt: skip
    files.write_sealed(tmp_path / data.RECORD, {
        "command": "the command", "title": "Ladder", "question": "Which?", "hypothesis": "None.",
        "config": {"ladder": {"sequences": 2}}, "looks": [3, 5], "reached": [3, 5], "itemsize": 4,
        "tuning_runs": ids,
    })  # fmt: skip
    return tmp_path


def test_the_table_has_what_was_measured(workdir):
    found = {r.variant.arm.series: r for r in data.read(workdir).rungs}
    assert {name: len(r.variant.runs) for name, r in found.items()} == {
        "pre": 5, "post": 3, "none": 5
    }  # fmt: skip
    p = {}
    for name in ("post", "none"):
        own = LOSSES[f"{name}-2"]
        test = scipy.stats.ttest_rel(own, LOSSES["pre-2"][: len(own)])
        interval = test.confidence_interval(0.95)
        gap = found[name].effect.gap
        assert (gap.low, gap.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
        p[name] = min(1.0, 2 * test.pvalue)  # two looks
    assert p["post"] < p["none"]  # Holm: the smaller of two is doubled
    assert found["post"].effect.adjusted == pytest.approx(2 * p["post"], rel=1e-9)
    assert found["none"].effect.adjusted == pytest.approx(p["none"], rel=1e-9)
    assert found["post"].effect.kind == effects.WORSE
    assert found["none"].effect.kind == effects.UNDECIDED and found["pre"].effect is None
    by_hand = {
        "pre": (0.3 + 0.0 + 0.1) / 3, "post": (0.2 + 0.0 + 1.6) / 3, "none": (0.3 + 0.2 + 0.0) / 3
    }  # fmt: skip
    for name, value in by_hand.items():  # a diverged run counts as the start
        assert found[name].sensitivity.mean == pytest.approx(value, rel=1e-12)
    assert {name for name, r in found.items() if r.at_edge} == {"none"}
    assert found["none"].multiply_adds == 1e6
    # Three runs together are faster, 18000 tokens a second, than two at 7000 each.
    assert found["pre"].seconds == pytest.approx(8 * 30 / 18000, rel=1e-12)
    assert found["pre"].parameter_bytes == 4 * 218432


def test_a_look_divides_the_error_over_looks_and_comparisons(workdir):
    judged = data.read(workdir).at_a_look()
    own = LOSSES["post-2"]
    p = scipy.stats.ttest_rel(own, LOSSES["pre-2"][:3]).pvalue
    assert judged["post-2"].adjusted == pytest.approx(min(1.0, 2 * 2 * p), rel=1e-9)
    assert set(judged) == {"post-2", "none-2"}


def test_the_front_is_what_nothing_beats():
    rows = [(2.0, 4.0), (2.0, 5.0), (1.5, 9.0), (3.0, 4.0), (3.0, 1.0)]
    assert data.front(rows) == [True, False, True, False, True]
    assert data.front([(1.0, 1.0), (1.0, 1.0)]) == [True, True]  # equals do not beat each other


def test_a_spectrum_is_summed_up_by_its_logarithm_and_its_size():
    class Point:
        arrays = {"log_raw": np.log([[1.0, 10.0]]), "log_deflated": np.log([[10.0]])}

    found = data.passed([Point(), Point()])
    assert found.mean_log10 == pytest.approx(1.0, rel=1e-15)
    assert found.rms == pytest.approx(math.sqrt((1 + 100) / 2), rel=1e-15)
    assert data.passed([]) is None


def test_the_page(workdir):
    written, text = page.write(workdir)
    assert "Worse than pre: post. Not decided: none." in text
    assert "2 of 15 runs were not needed" in text
    seen = pages.Page(written.read_text())
    assert "ladder" in seen.ids and "+0.300" in seen.text and "end of range" in seen.text
    assert not [x for x in seen.dead_links(workdir) if "figures" in x or "ladder" in x]
    rows = report_workdirs.read_csv(workdir / "ladder.csv")
    assert [row["placement"] for row in rows] == ["pre", "none", "post"]  # by loss
    assert rows[2]["shown"] == "worse" and rows[0]["shown"] == "baseline"
    assert rows[0]["learning_rate"] == "0.003"


# --- the command ----------------------------------------------------------------------------------


def small(folder, **changes):
    (folder / "text.txt").write_text("to be or not to be, that is the question: " * 60)
    return configs.replace(experiment.get_config("smoke"), {
        "data.corpus": str(folder / "text.txt"), "data.cache_dir": str(folder / "cache"),
    } | changes)  # fmt: skip


def test_a_dry_run_says_what_would_run_and_writes_nothing(tmp_path, capsys):
    work = tmp_path / "work"
    assert experiment.run(small(tmp_path), "smoke", Options(work, "c", dry_run=True)) is None
    said = capsys.readouterr().out
    assert "4 runs in 2 cohorts" in said and "to choose rates: 4 runs" in said
    assert "at most 2 runs more" in said and not work.exists()


def test_every_placement_keeps_its_own_initialization():
    config = configs.replace(
        experiment.get_config("default"), {"ladder.placements": tuple(PLACEMENTS)}
    )
    for arm in experiment.arms(config):
        row = PLACEMENTS[arm.series]
        made = arm.configured(config).model
        if isinstance(row.init, str):
            explicit = configs.replace(made, {"init": row.init or "gpt2"})
            assert made.initialization == explicit.initialization
        else:
            assert made.initialization == row.init
    assert len(experiment.arms(config)) == len(PLACEMENTS) * len(config.ladder.depths)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ladder.placements": ("pre", "posst")}, r"placements=posst: must be .*'post'"),
        ({"ladder.placements": ("pre",)}, r"placements=pre: must list at least 2"),
        ({"ladder.looks": (5, 3)}, r"looks=5,3: must rise; pass --config.ladder.looks=3,5$"),
        ({"ladder.looks": (1, 3)}, r"looks=1: must be at least 2|looks=1: must be from 2"),
        ({"ladder.tokens": 9}, r"tokens=9: must be at most data.window=8; pass .*=8$"),
        ({"model.depth": 3}, r"model.depth=3: this experiment sets it; use --config.ladder.depths"),
        ({"model.init": "xavier"}, r"model.init=xavier: .*each placement has its own$"),
        ({"tuning.rungs": (3,)}, r"rungs=3: must be a multiple of train.evaluate_every=2"),
    ],
)
def test_mistakes_get_one_line(tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        experiment.run(small(tmp_path, **changes), "smoke", Options(tmp_path / "w", "c"))
    assert not (tmp_path / "w").exists()


@pytest.mark.slow
def test_the_whole_experiment(tmp_path):
    work = tmp_path / "work"
    outcome = experiment.run(small(tmp_path), "smoke", Options(work, "the command", live=False))
    assert outcome.page == work / "ladder.html" and outcome.code == 0
    rungs = data.read(work).rungs
    assert [len(r.variant.runs) for r in rungs] == [3, 3]
    for rung in rungs:
        assert rung.before is not None and rung.after is not None and rung.rate in (1e-3, 1e-2)
        assert rung.before != rung.after and rung.before.rms > 0
        assert rung.growth > 0 and 0 <= rung.entropy <= 1 and rung.seconds > 0
        assert rung.sensitivity.n == 1
    seeds = {run.seed for run in data.read(work).results.runs}
    assert seeds == {0, 1, 2}
    before = (work / "ladder.csv").read_text()
    experiment.run(small(tmp_path), "smoke", Options(work, "the command", live=False))
    assert (work / "ladder.csv").read_text() == before  # again: nothing is trained anew
