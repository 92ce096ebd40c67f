"""The map of learning rates: outcomes, sensitivity, early predictors, the page, the command."""

import math
from pathlib import Path

import numpy as np
import pytest
import run_folders
from scipy.stats import spearmanr

from experiments.stability import data as stability_data
from experiments.stability import experiment
from experiments.stability import figures as stability_figures
from experiments.stability import page as stability_page
from experiments.stability.data import (
    DIVERGES,
    IS_STUCK,
    OPEN,
    TRAINS,
    Place,
    Stability,
    Trial,
    predictors,
)
from normjax import configs
from normjax.errors import UserError
from normjax.reporting.results import Results
from normjax.runs.experiment import Options

RATES = (1e-3, 1e-2, 1e-1)
PLAN = {"corpus": {"unigram_loss": 3.0}, "config": {"train": {"steps": 100}}, "title": "t",
        "question": "q", "hypothesis": "h", "command": "c"}  # fmt: skip


def trial(series, depth, warmup, rate, seed, loss, folder="none", start=4.0):
    outcome = TRAINS if loss is not None and loss < 2.95 else IS_STUCK
    outcome = DIVERGES if loss == math.inf else OPEN if loss is None else outcome
    place = Place(series, depth, warmup)
    return Trial(place, rate, seed, outcome, loss, loss, start, Path(folder))


def grid(trials, plan=PLAN):
    return Stability(Results(Path("."), plan, (), ()), tuple(trials))


def test_sensitivity_is_the_mean_loss_above_the_best_rate_of_a_seed():
    losses = {0: (2.5, 2.0, math.inf), 1: (2.4, 2.1, 4.5)}
    made = grid(
        trial("pre", 2, 0, rate, seed, loss)
        for seed, own in losses.items()
        for rate, loss in zip(RATES, own, strict=True)
    )
    # A diverged run, and one worse than the start, count as the start, 4.0.
    by_hand = [(0.5 + 0.0 + 2.0) / 3, (0.3 + 0.0 + 1.9) / 3]
    found = made.sensitivity(Place("pre", 2, 0))
    assert found.n == 2
    assert abs(found.mean - np.mean(by_hand)) < 4e-16 * 8
    without = grid(t for t in made.trials if t.seed == 0 and t.rate < 0.1)
    assert without.sensitivity(Place("pre", 2, 0)).mean == pytest.approx(0.25, rel=1e-15)


def test_best_rate_working_range_and_counts():
    made = grid(
        [
            trial("pre", 2, 0, 1e-3, 0, 2.09), trial("pre", 2, 0, 1e-2, 0, 2.0),
            trial("pre", 2, 0, 1e-1, 0, 2.05), trial("pre", 2, 0, 1e-1, 1, math.inf),
        ]
    )  # fmt: skip
    place = Place("pre", 2, 0)
    assert made.best(place).rate == 1e-2
    assert made.working_range(place) == pytest.approx(1.0)  # 0.1 has a diverged run
    cell = made.cell(place, 1e-1)
    assert (cell.count(DIVERGES), cell.count(TRAINS), cell.trains) == (1, 1, False)
    assert cell.loss.mean == 2.05
    gone = grid([trial("post", 2, 0, 1e-3, 0, math.inf)])
    assert gone.best(Place("post", 2, 0)) is None
    assert gone.working_range(Place("post", 2, 0)) is None


@pytest.fixture
def planted(tmp_path):
    """Runs whose diagnostic at step 0 orders their losses, and one that is noise."""
    rng = np.random.default_rng(3)
    trials = []
    for i in range(24):
        folder = tmp_path / f"run{i}"
        loss = 2.0 + 0.02 * i if i < 22 else math.inf
        rows = [
            (0, {"residual/rms_after": [[1.0, 2.0], [1.0, 3.0 + i]],
                 "loss/value": float(rng.normal())}),
            (1, {"loss/value": 5.0 - 0.1 * i}), (50, {"loss/value": 1.0 * i}),
        ]  # fmt: skip
        run_folders.write(folder, samples=rows)
        trials.append(trial("pre", 2 + i % 2, 0, RATES[i % 3], i // 3, loss, folder))
    return grid(trials)


def test_early_diagnostics_are_ranked_by_what_they_say_of_the_end(planted):
    found = {(p.name, p.when): p for p in predictors(planted)}
    best = found["residual/rms_after, largest", "at initialization"]
    # The last two diverged: their order among themselves is no information.
    assert best.value == pytest.approx(
        spearmanr(range(24), [*range(22), 22.5, 22.5]).statistic, abs=1e-12
    )
    assert best.low > 0.95 and best.within > 0.95 and best.runs == 24
    later = found["loss/value", "in the first 1 % of steps"]
    assert later.value == pytest.approx(-best.value, abs=1e-12)
    assert abs(found["loss/value", "at initialization"].value) < 0.6
    assert ("learning rate", "set by the grid") in found
    assert not any(name == "loss/value" and "50" in when for name, when in found)
    ratio = found["residual/rms_after, last over first layer", "at initialization"]
    assert ratio.value == pytest.approx(best.value)


def test_answers_say_what_the_numbers_say(planted):
    losses = {
        "pre": (2.0, 2.1),
        "none": (2.2, 2.9),
        "no-residual": (2.6, math.inf),
        "post": (2.0, 2.4),
    }
    made = grid(
        trial(series, depth, warmup, rate, seed, loss + (0.5 if rate != 1e-2 else 0.0))
        for series, own in losses.items()
        for depth, loss in zip((2, 8), own, strict=True)
        for warmup in (0, 50)
        for rate in RATES
        for seed in (0, 1)
    )
    text = " ".join(stability_page.findings(made, predictors(planted)))
    text = text.replace("\u00a0", " ")
    assert "2 blocks +0.600 ± 0.000 and +0.200 ± 0.000" in text
    assert "8 blocks no rate without a diverged run and +0.800" in text
    assert "The residual path matters more at 2 and 8 blocks." in text
    sensitive = "pre 0.333 ± 0.000, none 0.333 ± 0.000 and post 0.333 ± 0.000"
    assert f"no warm-up: {sensitive}" in text and "Shown to differ, of 6 pairs: none." in text
    assert "2 blocks 6 of 6 (pre-norm 6) and 8 blocks 2 of 6 (pre-norm 6)" in text
    assert "it ends +0.200 ± 0.000 nats from pre-norm: 20% of the way to the unigram loss" in text
    assert "post-norm 0.0 / 0.0, best losses +0.300 ± 0.000 apart" in text
    close = grid(trial(name, 2, 0, rate, seed, 2.0 + gap * (-1) ** seed + shift)
                 for name, gap, shift in (
                     ("pre", 0, 0), ("none", 0.1, 0.2), ("no-residual", 0, 0.3))
                 for rate in RATES for seed in (0, 1))  # fmt: skip
    said = " ".join(stability_page.findings(close, []))
    assert "Which matters more is not decided at 2 blocks." in said
    assert "+0.200 ± 1.271 (not decided)" in said.replace("\u00a0", " ")
    assert "Without any norm" in said and "of the way to the unigram" not in said
    assert "residual/rms_after, largest at initialization has the largest rank" in text
    table = stability_page.CELLS
    rows = table.csv(made.cells(*made.places)).splitlines()
    assert len(rows) == 1 + 4 * 2 * 2 * 3
    assert rows[0].split(",") == table.names


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stability")
    config = small(folder)
    outcome = experiment.run(config, "smoke", Options(folder / "work", "the command", live=False))
    return folder, outcome


def small(folder, **changes):
    (folder / "text.txt").write_text("to be or not to be, that is the question: " * 60)
    return configs.replace(experiment.get_config("smoke"), {
        "data.corpus": str(folder / "text.txt"), "data.cache_dir": str(folder / "cache"),
        "grid.learning_rates": (1e-3, 1e-2), "stability.warmups": (1,),
    } | changes)  # fmt: skip


def test_the_whole_experiment(workdir):
    folder, outcome = workdir
    work = folder / "work"
    assert outcome.page == work / "stability.html" and outcome.code == 0
    made = stability_data.read_stability(work)
    assert made.series == ["pre", "post"] and made.rates == [1e-3, 1e-2]
    assert made.values("depth") == [1] and made.values("warmup") == [1]
    assert {t.outcome for t in made.trials} <= {TRAINS, IS_STUCK} and len(made.trials) == 8
    page = outcome.page.read_text()
    for name in ("stability_map", "loss_by_rate", "rate_sensitivity", "early_predictors"):
        assert f'id="{name}"' in page
        for kind in ("png", "svg", "csv"):
            assert (work / "figures" / f"{name}.{kind}").stat().st_size > 50
    assert (work / "report.html").exists()
    assert "post-norm" in outcome.text
    rows = (work / "stability.csv").read_text().splitlines()
    assert len(rows) == 1 + 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stability.placements": ("prre",)}, r"placements=prre: must be .*did you mean 'pre'"),
        ({"stability.depths": (0,)}, r"depths=0: must be from 1 to 10000; pass .*depths=2,6$"),
        ({"stability.depths": ()}, r"depths=: must list at least 1; pass .*depths=2"),
        ({"stability.warmups": (9,)}, r"warmups=9: must be from 0 to train.steps=4"),
        (
            {"grid.learning_rates": (1e-3,)},
            r"learning_rates=0.001: must list at least 2; pass .*=0.001,0.004",
        ),
    ],
)
def test_mistakes_get_one_line(tmp_path, changes, words):
    with pytest.raises(UserError, match=words):
        experiment.run(small(tmp_path, **changes), "smoke", Options(tmp_path / "w", "c"))
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(("best", "shown"), [(3.5, (3.0, 4.0)), (2.0, (2.0, 3.3))])
def test_the_figure_of_the_losses_shows_some_whatever_they_are(best, shown):
    """Where nothing beats the unigram loss, 3.0, the better half is shown; the worst never is."""
    losses = (best, best + 0.5, 1e9)
    made = grid(trial("pre", 2, 0, rate, 0, loss) for rate, loss in zip(RATES, losses, strict=True))
    figure = stability_figures.curves(made)
    assert figure.canvas.axes[0].get_ylim() == pytest.approx((shown[0] - 0.05, shown[1] + 0.05))
