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
from normjax.reporting.interval_score import baseline, interval_score
from normjax.reporting.prediction import Growth, Item, Pairs
from normjax.reporting.rank_correlation import kendall, spearman
from normjax.runs import files

EPS = np.finfo(float).eps
TIED = ([1, 2, 2, 4, 5, 5, 5], [3, 1, 4, 1, 5, 9, 2], [math.inf, 2, 1, math.inf, 0, 3, 7])


# What the made-up grid has of it.
EXPECTED = "\n".join(
    line.replace(" = no-final-norm", "")
    for line in given.read("expected").splitlines() if line != "no-branch-norm"
)  # fmt: skip


def item(name, place, losses, loss=None, low=None, high=None, parameters=None):
    """An item with final losses by seed; None stands for a variant whose runs all diverged."""
    by_seed = dict(enumerate([math.inf] * 3 if losses is None else losses))
    return Item(Expected(name, place, loss, low, high), name, by_seed, parameters)


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


def test_the_order_of_outcomes_is_the_one_of_the_ranking(tmp_path):
    """By hand and as ``Variant.standing`` has it: share of diverged runs, then the others' mean."""
    cases = [[1.0, 2.0, 4.0], [1.0, None, 3.0], [None, None, 0.1], [None] * 3, [9.0, 9.0, 9.0]]
    mine = [rank_correlation.standing([math.inf if x is None else x for x in c]) for c in cases]
    ends = {f"v{i}": case for i, case in enumerate(cases)}
    arms = [report_workdirs.arm(name, name, "", {}) for name in ends]
    results = report_workdirs.finals(tmp_path, arms, ends)
    theirs = [variant.standing for variant in results.variants]
    assert mine == theirs == [(0, 7 / 3), (1 / 3, 2), (2 / 3, 0.1), (1, math.inf), (0, 9)]
    assert rank_correlation.order(mine) == [0, 2, 3, 4, 1]


def test_no_mean_of_survivors_scores_as_if_nothing_had_diverged():
    """b's only survivor has the lowest loss of all, as was said; two of three runs diverged."""
    inf = math.inf
    a, b = (
        item("a", 2, [2.0, 2.01, 2.02], 2.0, 1.9, 2.1),
        item("b", 1, [1.0, inf, inf], 1, 0.9, 1.1),
    )
    c = item("c", 3, [3.0, inf, 3.1], 3.0, 2.5, 3.5)
    score = prediction.score([a, b, c], "losses", 80, {"a": 2.01}, 3.3)
    assert score.predicted == (2, 1, 3) and score.measured == (1, 3, 2)
    assert score.spearman.value == -0.5
    # Of the resamples only the first seed alone loses no run, and has the predicted order.
    known = []
    for drawn in itertools.product(range(3), repeat=3):
        lost = [drawn.count(1) + drawn.count(2), drawn.count(1)]
        after_a = 0.5 if lost[0] < 3 else stats.spearmanr([2, 1, 3], [1, 2.5, 2.5]).statistic
        known.append(1.0 if lost == [0, 0] else after_a if lost[0] == lost[1] else -0.5)
    ends = np.quantile(known, (0.025, 0.975))
    assert (score.spearman.low, score.spearman.high) == pytest.approx(tuple(ends), abs=1e-12)
    found = score.losses
    assert (found.n, found.intervals, found.covered, found.scored) == (1, 3, 1, 1)
    assert score.worst == 1 and score.pairs.decided == 0
    assert b.error is c.error is None and (b.covered, c.covered) == (False, False)


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
    measured = [i.loss for i in ITEMS if not i.diverged]
    assert found.value == pytest.approx(stats.spearmanr(order, measured).statistic, abs=32 * EPS)
    assert found.value < -0.3
    assert prediction.by_size([item("x", 1, [1.0]), item("y", 2, [2.0])]).value is None


# --- intervals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [80, 95])
def test_the_score_by_hand(level):
    penalty = {80: 10, 95: 40}[level]  # 2 / alpha
    assert interval_score(1, 3, level, 1) == interval_score(1, 3, level, 2.5) == 2
    assert interval_score(1, 3, level, 3.5) == 2 + penalty * 0.5
    assert interval_score(1, 3, level, 0.75) == 2 + penalty * 0.25


@pytest.mark.parametrize("level", [80, 95])
def test_the_score_is_proper(level):
    """Of a uniform x the mean score is known: (u - l) + (l^2 + (1 - u)^2) / alpha, least where

    l = alpha/2 and u = 1 - alpha/2. The midpoint rule of 4000 points is off by 2e-7 at most.
    """
    alpha = (100 - level) / 100
    points = (np.arange(4000) + 0.5) / 4000

    def mean(low, high):
        return np.mean([interval_score(low, high, level, x) for x in points])

    best = mean(alpha / 2, 1 - alpha / 2)
    assert best == pytest.approx(1 - alpha / 2, abs=1e-5)
    for low, high in itertools.product((0, alpha / 4, alpha / 2, alpha, 0.4), repeat=2):
        exact = (1 - high - low) + (low**2 + high**2) / alpha
        assert mean(low, 1 - high) == pytest.approx(exact, abs=1e-5)
        assert mean(low, 1 - high) >= best - 1e-12


def test_honest_quantiles_score_best_for_a_belief_that_is_not_symmetric():
    rng = np.random.default_rng(0)
    drawn = rng.exponential(size=20_000)

    def mean(low, high):
        return np.mean([interval_score(low, high, 80, x) for x in drawn])

    low, high = -math.log(0.9), -math.log(0.1)  # the true 10 % and 90 % quantiles
    best = mean(low, high)
    # Differences of such means have a standard error below 0.01 here, the gaps are above 0.03.
    for a, b in [(0, high), (low, high + 0.6), (low, high - 0.6), (low + 0.25, high), (0, 100),
                 (0.6, 0.8), (low - 0.3, high - 0.3)]:  # fmt: skip
        assert mean(a, b) > best + 0.01, (a, b)


def intervals(*ends, losses=(2.0, 2.1, 2.2, 2.5, 3.0, 3.3)):
    """Score intervals for variants with those losses, the baseline knowing all of them."""
    items = [item(str(i), i, [x, x, x], (a + b) / 2, a, b)
             for i, (x, (a, b)) in enumerate(zip(losses, ends, strict=False))]  # fmt: skip
    means = {str(i): x for i, x in enumerate(losses)}
    return prediction.losses(items, 80, means, 3.34)


def test_wide_sharp_right_and_wrong():
    losses = (2.0, 2.1, 2.2, 2.5, 3.0, 3.3)
    sharp = intervals(*[(x - 0.05, x + 0.05) for x in losses])
    wide = intervals(*[(0, 100)] * 6)
    modest = intervals(*[(x - 0.4, x + 0.2) for x in losses])
    wrong = intervals(*[(x + 0.25, x + 0.35) for x in losses])
    assert sharp.covered == wide.covered == modest.covered == 6
    assert sharp.interval == pytest.approx(0.1) and wide.interval == 100
    assert sharp.skill > 0.9 and sharp.skill > modest.skill > wrong.skill > wide.skill
    assert wide.skill < -50 and wrong.skill < 0
    assert sharp.reference == wide.reference


def test_the_baseline_knows_the_others_and_not_the_one():
    # Five others at 80 %: (5 + 1) / 10 < 1, so from the least to the largest.
    expected = [(1.2 + 10 * 0.1), *[1.3] * 4, (1.0 + 10 * 0.3)]
    found = intervals(*[(1, 2)] * 6)
    assert found.reference == pytest.approx(math.fsum(expected) / 6) and found.ceiling is None
    # Nine others hold a tenth with the probability 8/10 between their ends; of 19 the second do.
    assert baseline(range(9), 80, None) == (0, 8) and baseline(range(19), 80, None) == (1, 17)
    few = intervals((1, 2), (1, 3), losses=(2.0, 2.1))
    assert few.reference == few.ceiling == 3.34
    assert prediction.losses(ITEMS, 80, {}, None).skill is None


def test_a_baseline_interval_holds_the_next_one_as_often_as_it_says():
    rng = random.Random(0)
    held = 0
    for _ in range(4000):
        *others, value = (rng.gauss(0, 1) for _ in range(15))
        low, high = baseline(others, 80, None)
        held += low <= value <= high
    # (m + 1) / 10 = 1.5: between ranks 1 and 2 the share is near 80 %; standard error 0.6 %.
    assert abs(held / 4000 - 0.8) < 0.03


# --- on a workdir ---------------------------------------------------------------------------------


def predict(workdir: Path, text: str, candidates: list[Candidate], planned=None) -> Path:
    """Give a made-up workdir a prediction, as if it had been stored before its runs."""
    stated = parsing.parse(text, "--predict=x", candidates)
    report_workdirs.predicted(workdir, stated, planned)
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
    predict(workdir, EXPECTED, ABLATION)
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
    measured = {r["arm"]: float(r["test_loss"]) for r in read_csv(ranked / "summary.csv")}
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
    assert found.score.losses.n == 2 and found.score.losses.intervals == 2
    assert found.score.losses.covered == 1  # no-residual diverged
    assert found.score.losses.scored == 1 and found.open == ("no-mlp",)  # one run is not at its end
    assert "2 stated intervals 1 holds the measured mean, 50 % where 80 % was meant" in text
    assert "The intervals score 0.200 nats per character on average over 1 variant" in text
    assert "0 to the unigram loss, 3.310, since too few others are there, scores 3.310" in text
    assert "skill is +0.94" in text and "Where a run diverged there is no loss" in text
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
    first, *others = sorted(by_name["post"].losses)
    assert set(by_name["post"].finished) == set(others)  # the first diverged at one depth
    assert by_name["post"].lost == 1 and not by_name["post"].diverged
    places = dict(zip(by_name, found.score.measured, strict=True))
    assert places["none"] == 5 and places["post"] == 4  # behind no-residual, whatever its mean
    assert any(text.startswith("Some runs of post diverged") for text in said)
    (workdir / record.FILE).unlink()
    plan = files.read_sealed(workdir / "grid.json")
    plan.pop("prediction")
    files.write_sealed(workdir / "grid.json", plan)
    assert prediction.judge(loading.load(workdir)) is None
    assert "Predicted" not in report.headline(workdir)


def test_seeds_of_the_prediction_are_told(ranked):
    seal = files.read_sealed(ranked / record.FILE)["seal"]
    page = (ranked / "report.html").read_text(encoding="utf-8")
    assert f"drawn from the prediction, from {record.first_seed(seal)} on" in page


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """Seven variants and three seeds, of which four and two were planned, and one that is gone."""
    workdir = report_workdirs.ablation(tmp_path_factory.mktemp("grown"))
    planned = record.Planned(("full", "no-mlp", "no-norm", "no-attention", "no-skip"), 2)
    predict(workdir, EXPECTED, ABLATION, planned)
    report.write(workdir)
    return workdir


def test_growth_is_told_and_what_was_planned_comes_first(grown, ranked):
    found, said = judged(grown)
    assert {i.name for i in found.score.items} == {"full", "no-mlp", "no-norm", "no-attention"}
    assert all(len(i.losses) == 2 for i in found.score.items)
    added = ("no-positions", "no-residual", "post-norm")
    assert found.growth == Growth(added, ("no-skip",), 3, 2, found.growth.score)
    whole, _ = judged(ranked)
    assert whole.growth is None and found.growth.score.measured == whole.score.measured
    page = (grown / "report.html").read_text(encoding="utf-8")
    words = (
        "variants were added (no-positions, no-residual and post-norm)",
        "variants were left out (no-skip)", "there are 3 seeds, not 2",
        "The score of what was planned comes first", "Over all that ran",
    )  # fmt: skip
    head = " ".join(report.headline(grown).split())
    for text in (page, head.replace("- ", "-")):  # a line may end within a name
        places = [text.index(word) for word in words]
        assert places[-1] == max(places)
    assert "The predicted and the measured order of 4 agree" in page
    assert "The predicted and the measured order of 7 agree" in page


def test_fewer_seeds_than_planned_are_told(tmp_path):
    workdir = report_workdirs.ablation(tmp_path / "fewer", seeds=2)
    planned = record.Planned(tuple(report_workdirs.ABLATION), 5)
    predict(workdir, EXPECTED, ABLATION, planned)
    found, _ = judged(workdir)
    assert found.growth == Growth((), (), 2, 5, None) and found.score is not None
    head = " ".join(report.headline(workdir).split())
    assert "there are 2 seeds, not 5" in head and "Over all that ran" not in head


def test_where_nothing_of_the_plan_ran_the_rest_is_told_apart(tmp_path):
    workdir = report_workdirs.ablation(tmp_path / "other", seeds=2)
    predict(workdir, EXPECTED, ABLATION, record.Planned(("no-skip",), 2))
    found, said = judged(workdir)
    assert found.score is None and len(found.growth.score.items) == 7
    assert said == ["There is nothing to score yet: too few of what was predicted have finished."]
    head = " ".join(report.headline(workdir).split())
    assert "The grid is not the one that was planned" in head and "Over all that ran: rank" in head
    report.write(workdir)


def test_nothing_finished_yet_is_said(tmp_path):
    arms = [report_workdirs.arm(n, n, "", {}) for n in ("full", "no-mlp")]
    runs = [report_workdirs.planned(n, 0) for n in ("full", "no-mlp")]
    files.write_sealed(tmp_path / "grid.json", report_workdirs.plan(arms, runs))
    predict(tmp_path, "full\nno-mlp", ABLATION)
    report.write(tmp_path)
    assert "nothing to score yet" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not (tmp_path / "figures" / "prediction.png").exists()
    assert "Prediction: An order of 2 variants" in " ".join(report.headline(tmp_path).split())
