"""The score of a prediction: against hand-made numbers, scipy, and all orders by brute force."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import report_workdirs
from report_workdirs import read_csv
from scipy import stats

from normjax.predictions import given, parsing, record
from normjax.predictions.prediction import Candidate, Expected
from normjax.reporting import loading, prediction, prediction_words, rank_correlation, report
from normjax.reporting.prediction import Item, Pairs
from normjax.reporting.rank_correlation import kendall, spearman
from normjax.runs import files

EPS = np.finfo(float).eps
TIED = ([1, 2, 2, 4, 5, 5, 5], [3, 1, 4, 1, 5, 9, 2], [math.inf, 2, 1, math.inf, 0, 3, 7])


def item(name, place, losses, loss=None, low=None, high=None, parameters=None):
    """An item with final losses by seed; None stands for a variant whose runs all diverged."""
    by_seed = dict(enumerate(losses or ()))
    entry = Expected(name, place, loss, low, high)
    return Item(entry, name, by_seed, losses is None, 0, parameters)


# --- rank correlations ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_correlations_agree_with_scipy(seed):
    rng = random.Random(seed)
    n = rng.randint(3, 12)
    a, b = ([rng.randint(0, n) for _ in range(n)] for _ in range(2))
    a[0], a[1], b[0], b[1] = 0, 1, 1, 0  # neither is constant
    assert rank_correlation.ranks(a) == stats.rankdata(a).tolist()
    # Sums of n products, a root and a quotient.
    tolerance = 8 * n * EPS
    assert abs(spearman(a, b) - stats.spearmanr(a, b).statistic) <= tolerance
    assert abs(kendall(a, b) - stats.kendalltau(a, b, variant="b").statistic) <= tolerance


def test_values_by_hand():
    # d = (0, 1, -1): 1 - 6 * 2 / (3 * 8) = 1/2; two pairs of three agree.
    assert spearman([1, 2, 3], [1, 3, 2]) == 0.5
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3, abs=4 * EPS)
    # One tie in a: 5 untied pairs of 6, all agree: 5 / sqrt(5 * 6).
    assert kendall([1, 2, 2, 4], [1, 2, 3, 4]) == pytest.approx(5 / math.sqrt(30), abs=4 * EPS)
    assert spearman([1, 2], [math.inf, math.inf]) is None and kendall([1, 1], [1, 2]) is None
    assert spearman([], []) is None and kendall([1], [2]) is None


@pytest.mark.parametrize("statistic", [spearman, kendall])
@pytest.mark.parametrize("pair", list(itertools.permutations(TIED, 2)))
def test_p_is_the_share_of_orders_by_brute_force(statistic, pair):
    a, b = (list(values)[:6] for values in pair)
    found = rank_correlation.correlate(statistic, a, b)
    # Scores of two orders are equal or differ by far more than rounding.
    scores = [statistic(order, b) for order in itertools.permutations(a)]
    assert found.exact and found.value == statistic(a, b)
    share = sum(score >= found.value - 1e-9 for score in scores) / len(scores)
    assert found.p == share


def test_p_of_a_perfect_order_and_of_the_reverse():
    order = list(range(5))
    assert rank_correlation.correlate(spearman, order, order).p == 1 / math.factorial(5)
    assert rank_correlation.correlate(kendall, order, order[::-1]).p == 1


def test_drawn_orders_come_near_the_exact_share(monkeypatch):
    a, b = (values[:7] for values in TIED[:2])
    for statistic in (spearman, kendall):
        exact = rank_correlation.correlate(statistic, a, b)
        with monkeypatch.context() as patch:
            patch.setattr(rank_correlation, "EXACT", 3)
            drawn = rank_correlation.correlate(statistic, a, b)
            assert drawn == rank_correlation.correlate(statistic, a, b)
        deviation = math.sqrt(exact.p * (1 - exact.p) / rank_correlation.DRAWS)
        assert exact.exact and not drawn.exact
        assert abs(drawn.p - exact.p) < 4 * deviation + 1 / rank_correlation.DRAWS


def test_bootstrap_counts_every_ordered_resample():
    losses = [{0: 1.0, 1: 3.0, 2: 2.0}, {0: 2.0, 1: 1.0, 2: 2.5}, {0: 3.0, 1: 2.0, 2: 1.0}, {}]
    order = [1, 2, 3, 4]
    values = []
    for drawn in itertools.product(range(3), repeat=3):
        means = [math.fsum(own[s] for s in drawn) / 3 if own else math.inf for own in losses]
        values.append(stats.spearmanr(order, means).statistic)
    found = rank_correlation.bootstrap(spearman, order, losses)
    assert found == pytest.approx(tuple(np.quantile(values, (0.025, 0.975))), abs=1e-12)
    assert rank_correlation.bootstrap(spearman, order, [{0: 1.0}, {0: 2.0}, {}, {}]) is None


def test_bootstrap_of_many_seeds_is_drawn_alike_each_time():
    rng = random.Random(1)
    losses = [{s: i + rng.gauss(0, 0.5) for s in range(9)} for i in range(4)]
    first = rank_correlation.bootstrap(kendall, [1, 2, 3, 4], losses)
    assert first == rank_correlation.bootstrap(kendall, [1, 2, 3, 4], losses)
    assert -1 <= first[0] <= first[1] == 1


def test_a_random_order_scores_nothing_on_average():
    values = [statistic(order, TIED[2][:5]) for statistic in (spearman, kendall)
              for order in itertools.permutations(range(5))]  # fmt: skip
    assert abs(math.fsum(values)) < 1e-10


# --- pairs, losses, the worst ---------------------------------------------------------------------

ITEMS = [
    item("a", 1, [1.00, 1.01, 1.02], 1.1, 0.9, 1.3, 10),
    item("b", 2, [1.01, 1.02, 1.00], 0.9, 0.8, 1.0, 20),  # not told from a
    item("c", 3, None, 2.0, 1.5, 2.5, 40),  # diverged
    item("d", 4, [2.0, 2.02, 2.01], 2.5, None, None, 30),
    item("e", 4, [3.0, 3.02, 3.01], 2.6, 2.9, 3.1, 30),
]


def test_pairs_by_hand():
    # ab undecided; ac ad ae bc bd be right; cd ce: c was put before d and e, and is behind;
    # de were called equal.
    assert prediction.pairs(ITEMS) == Pairs(9, 6, 1, (("c", "d"), ("c", "e")))
    both = [item("x", 1, None), item("y", 2, None)]
    assert prediction.pairs(both) == Pairs(0, 0, 0, ())
    assert prediction.pairs([item("x", 1, [1.0]), item("y", 2, [2.0])]).decided == 0


def test_a_pair_is_told_apart_where_scipy_says_so():
    rng = random.Random(3)
    for _ in range(30):
        a = [rng.gauss(0, 1) for _ in range(5)]
        b = [x + 0.4 + rng.gauss(0, 0.4) for x in a]
        told = stats.ttest_rel(a, b).pvalue < 0.05
        assert prediction.pairs([item("a", 1, a), item("b", 2, b)]).decided == told


def test_losses_by_hand():
    found = prediction.losses(ITEMS)
    # Errors: 1.1 - 1.01, 0.9 - 1.01, 2.5 - 2.01, 2.6 - 3.01; c has no loss and its interval fails.
    errors = [0.09, -0.11, 0.49, -0.41]
    assert found.n == 4 and found.intervals == 4 and found.covered == 2
    assert found.absolute == pytest.approx(sum(map(abs, errors)) / 4, abs=16 * EPS)
    assert found.signed == pytest.approx(sum(errors) / 4, abs=16 * EPS)


def test_the_worst():
    assert ITEMS[prediction.worst(ITEMS, "losses")].name == "c"
    trained = [ITEMS[i] for i in (0, 1, 3, 4)]
    assert trained[prediction.worst(trained, "losses")].name == "d"
    # Places 1, 2, 3, 4.5, 4.5 against 2 (1.01), 1, 5, 3, 4: c moved by 2.
    assert ITEMS[prediction.worst(ITEMS, "ranking")].name == "c"
    assert prediction.worst([item("x", 1, [1.0]), item("y", 2, [2.0])], "ranking") is None


def test_diverged_variants_share_the_last_place():
    items = [item("x", 1, None), item("y", 2, [1.0, 1.1]), item("z", 3, None)]
    score = prediction.score(items, "ranking")
    assert score.measured == (2.5, 1.0, 2.5) and score.predicted == (1.0, 2.0, 3.0)
    assert score.spearman.value == pytest.approx(
        stats.spearmanr([1, 2, 3], [9, 1, 9]).statistic, abs=32 * EPS
    )


def test_parameters_rank_most_first():
    found = prediction.by_size([i for i in ITEMS if not i.diverged])
    # 10, 20, 30, 30 parameters while the losses rise: as wrong as it can be, but for two ties.
    order = [-10, -20, -30, -30]
    measured = [i.value for i in ITEMS if not i.diverged]
    assert found.value == pytest.approx(stats.spearmanr(order, measured).statistic, abs=32 * EPS)
    assert found.value < -0.3
    assert prediction.by_size([item("x", 1, [1.0]), item("y", 2, [2.0])]).value is None


# --- on a workdir ---------------------------------------------------------------------------------


def predict(workdir: Path, text: str, candidates: list[Candidate]) -> Path:
    """Give a made-up workdir a prediction, as if it had been stored before its runs."""
    stated = parsing.parse(text, "--predict=x", candidates)
    kept = record.settle(workdir / "before", "--predict=x", stated, "G")
    (workdir / "before" / record.FILE).rename(workdir / record.FILE)
    plan = files.read_sealed(workdir / "grid.json") | {"identity": "G", "prediction": kept}
    files.write_sealed(workdir / "grid.json", plan)
    return workdir


ABLATION = [Candidate(name) for name in report_workdirs.ABLATION]
LOSSES = """author: somebody <b>bold</b>
reason: a & b
full: 1.9 (1.8 to 2)
no-mlp: 2.1 ± 0.2
no-residual: 2.3 (2 to 3)
no-attention: 2.6
"""


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    workdir = report_workdirs.ablation(tmp_path_factory.mktemp("ranked"))
    predict(workdir, given.read("expected"), ABLATION)
    report.write(workdir)
    return workdir


@pytest.fixture(scope="module")
def stated(tmp_path_factory):
    workdir = report_workdirs.troubled(tmp_path_factory.mktemp("stated"))
    predict(workdir, LOSSES, ABLATION)
    report.write(workdir)
    return workdir


def judged(workdir):
    results = loading.load(workdir)
    found = prediction.judge(results)
    return found, prediction_words.sentences(found, results)


def test_a_ranking_on_a_workdir_agrees_with_its_summary(ranked):
    measured = {r["arm"]: float(r["validation_loss"]) for r in read_csv(ranked / "summary.csv")}
    place = {"full": 1, "post-norm": 2, "no-norm": 3, "no-mlp": 4.5, "no-positions": 4.5,
             "no-residual": 6, "no-attention": 7}  # fmt: skip
    found, said = judged(ranked)
    a, b = ([table[name] for name in place] for table in (place, measured))
    assert found.score.spearman.value == pytest.approx(stats.spearmanr(a, b)[0], abs=64 * EPS)
    assert found.score.kendall.value == pytest.approx(stats.kendalltau(a, b)[0], abs=64 * EPS)
    assert f"Spearman correlation of {found.score.spearman.value:+.2f}" in said[0]
    assert any("Wrong: no-residual before no-attention" in text for text in said)
    assert said[-1] == "Most wrong: no-residual, expected in place 6, measured in place 7 of 7."
    drawn = {row["name"]: row for row in read_csv(ranked / "figures" / "prediction.csv")}
    assert {name: float(row["predicted_rank"]) for name, row in drawn.items()} == place
    assert {name: float(row["measured_loss"]) for name, row in drawn.items()} == measured


def test_the_page_has_the_section(ranked, stated):
    for workdir, words in ((ranked, ("normjax", "Attention is the only way")),
                           (stated, ("expected − measured", "Covered", "a &amp; b"))):  # fmt: skip
        page = (workdir / "report.html").read_text(encoding="utf-8")
        for word in ('<h2 id="predicted">Predicted and measured</h2>', 'href="#predicted"',
                     '<figure id="prediction">', "figures/prediction.csv", *words):  # fmt: skip
            assert word in page, word
        for ending in ("png", "svg", "csv"):
            assert (workdir / "figures" / f"prediction.{ending}").stat().st_size > 100
        head = report.headline(workdir)
        assert "Predicted by" in head and "Most wrong: " in head
    assert "<b>bold</b>" not in page


def test_losses_on_a_troubled_workdir(stated):
    found, said = judged(stated)
    text = "\n".join(said)
    assert found.score.losses.n == 3 and found.score.losses.intervals == 3
    assert found.score.losses.covered == 2  # no-residual diverged
    assert "3 stated intervals 2 hold the measured mean, 67 % where 80 % was meant" in text
    assert "Most wrong: no-residual, expected 2.300 nats, all its runs diverged." in text
    assert "Not predicted, so not scored: no-positions, no-norm and post-norm." in text


def test_the_report_is_the_same_each_time(ranked):
    names = ["report.html", *(f"figures/prediction.{e}" for e in ("png", "svg", "csv"))]
    before = [(ranked / name).read_bytes() for name in names]
    report.write(ranked)
    assert [(ranked / name).read_bytes() for name in names] == before


def test_over_depth_variants_or_series_are_ranked(tmp_path):
    workdir = report_workdirs.depth(tmp_path / "depth")
    names = list(report_workdirs.DEPTH)
    candidates = [Candidate(name, subject="series") for name in names]
    candidates += [Candidate(f"{name}-{x}") for name in names for x in (2, 4, 8, 16)]
    predict(workdir, "sandwich\npre\npost\nno-residual\nnone", candidates)
    found, said = judged(workdir)
    by_name = {i.name: i for i in found.score.items}
    assert by_name["none"].diverged and found.missing == ("deepnorm",)
    results = loading.load(workdir)
    pre = [v for v in results.variants if v.arm.series == "pre"]
    for seed, loss in by_name["pre"].losses.items():
        assert loss == pytest.approx(np.mean([v.losses[seed] for v in pre]), abs=8 * EPS)
    assert set(by_name["post"].losses) == {1, 2}  # seed 0 diverged at one depth
    assert any(text.startswith("Some runs of post diverged") for text in said)
    (workdir / record.FILE).unlink()
    plan = files.read_sealed(workdir / "grid.json")
    plan.pop("prediction")
    files.write_sealed(workdir / "grid.json", plan)
    assert prediction.judge(loading.load(workdir)) is None
    assert "Predicted" not in report.headline(workdir)


def test_nothing_finished_yet_is_said(tmp_path):
    arms = [report_workdirs.arm(n, n, "", {}) for n in ("full", "no-mlp")]
    runs = [report_workdirs.planned(n, 0) for n in ("full", "no-mlp")]
    files.write_sealed(tmp_path / "grid.json", report_workdirs.plan(arms, runs))
    predict(tmp_path, "full\nno-mlp", ABLATION)
    report.write(tmp_path)
    assert "nothing to score yet" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "figures" / "prediction.png").exists()
    assert "Prediction: An order of 2 variants" in " ".join(report.headline(tmp_path).split())
