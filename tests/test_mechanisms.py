"""The experiment on mechanisms: the rule, its evidence, the page, and a small run of it all."""

import math
import shutil

import jax
import numpy as np
import pytest

from experiments.mechanisms import answers, experiment
from experiments.mechanisms import data as mechanisms_data
from experiments.mechanisms import page as mechanisms_page
from experiments.mechanisms.verdicts import (
    AT_FLOOR,
    COMPUTES,
    FAILS,
    NO_FLOOR,
    NO_RUN,
    UNRELIABLE,
    VERDICTS,
    FinalLoss,
    OwnFloor,
    Rule,
    evidence,
    judge,
)
from normjax import configs
from normjax.data import corpora
from normjax.data.tasks.corpus import TaskCorpus
from normjax.decoder import Decoder, DecoderConfig
from normjax.errors import UserError
from normjax.reporting.results import DIVERGED, FINISHED, UNFINISHED
from normjax.runs import files, rescoring
from normjax.runs.experiment import Options
from tests import mechanisms_workdirs as made
from tests.pages import Page
from tests.report_workdirs import read_csv

RULE = Rule(margin=0.02, errors=2.0, alarm=4.0)
FULL, HIGHER = OwnFloor(0.5, "full", True, ""), OwnFloor(0.9, "current", True, "")
UNKNOWN = OwnFloor(None, "unordered", False, "")


def outcomes(*losses, error=0.001, rates=(1e-3,)):
    """Finished runs with the losses, the rates in turn."""
    return [
        FinalLoss(f"r{i}", i // len(rates), rates[i % len(rates)], FINISHED, loss, error)
        for i, loss in enumerate(losses)
    ]


LOST = FinalLoss("lost", 9, 1e-3, DIVERGED)
OPEN = FinalLoss("open", 8, 1e-3, UNFINISHED)


@pytest.mark.parametrize(
    ("runs", "floor", "kind", "k_of_n"),
    [
        (outcomes(0.501, 0.51), FULL, COMPUTES, "2 of 2"),
        (outcomes(0.901, 0.899), HIGHER, AT_FLOOR, "2 of 2"),
        (outcomes(0.501, 0.7), FULL, UNRELIABLE, "1 of 2"),
        (outcomes(0.901, 0.95), HIGHER, UNRELIABLE, "1 of 2"),
        (outcomes(0.6, 0.7), FULL, FAILS, "0 of 2"),
        (outcomes(0.95, 1.0), HIGHER, FAILS, "0 of 2"),
        (outcomes(0.6), UNKNOWN, NO_FLOOR, "0 of 1"),
        (outcomes(0.501), UNKNOWN, COMPUTES, "1 of 1"),
        ([], FULL, NO_RUN, "0 of 0"),
        # a run that diverged counts, one that is not finished does not
        ([*outcomes(0.501), LOST], FULL, UNRELIABLE, "1 of 2"),
        ([LOST], FULL, FAILS, "0 of 1"),
        ([*outcomes(0.501), OPEN], FULL, COMPUTES, "1 of 1"),
        ([OPEN], FULL, NO_RUN, "0 of 0"),
        # finished, but nobody knows how exactly it was evaluated
        ([FinalLoss("x", 0, 1e-3, FINISHED, 0.5, None)], FULL, NO_RUN, "0 of 0"),
        # a floor above the optimum by less than the margin leaves the optimum as the goal
        (outcomes(0.515), OwnFloor(0.515, "current", True, ""), COMPUTES, "1 of 1"),
        (outcomes(0.525), OwnFloor(0.515, "current", True, ""), FAILS, "0 of 1"),
    ],
)
def test_every_verdict_follows_from_the_runs(runs, floor, kind, k_of_n):
    verdict = judge(runs, 0.5, floor, RULE)
    assert (verdict.kind, verdict.k_of_n) == (kind, k_of_n)
    assert verdict.kind in VERDICTS


def test_the_margin_is_met_exactly_at_its_edge():
    # Powers of two: the sum is exact, so equality is.
    rule = Rule(margin=0.25, errors=2.0)
    assert judge(outcomes(0.625, error=0.0625), 0.5, FULL, rule).kind == COMPUTES
    above = math.nextafter(0.625, 1)
    assert judge(outcomes(above, error=0.0625), 0.5, FULL, rule).kind == FAILS


def test_the_sampling_error_counts_against_the_run_and_is_said():
    sharp = judge(outcomes(0.519, error=0.0001), 0.5, FULL, RULE)
    blunt = judge(outcomes(0.519, error=0.01), 0.5, FULL, RULE)
    assert (sharp.kind, sharp.close) == (COMPUTES, False)
    assert (blunt.kind, blunt.close) == (FAILS, True)
    far = judge(outcomes(0.7, error=0.01), 0.5, FULL, RULE)
    assert (far.kind, far.close) == (FAILS, False)


@pytest.mark.parametrize(
    ("loss", "floor", "alarm"),
    [
        (0.497, FULL, False),  # 3 standard errors below
        (0.495, FULL, True),  # 5
        (0.895, HIGHER, True),
        (0.495, UNKNOWN, True),  # nothing gets below the full optimum
    ],
)
def test_a_loss_below_the_floor_is_an_alarm(loss, floor, alarm):
    assert bool(judge(outcomes(loss, 0.9), 0.5, floor, RULE).alarms) == alarm


def test_rounding_alone_is_no_alarm():
    zero = OwnFloor(0.0, "full", True, "")
    assert not judge(outcomes(-1e-6, error=1e-9), 0.0, zero, RULE).alarms


def test_rates_are_told_apart():
    runs = outcomes(0.501, 0.7, 0.502, 0.6, rates=(1e-3, 1e-2))
    assert judge(runs, 0.5, FULL, RULE).by_rate() == {1e-3: (2, 2), 1e-2: (0, 2)}


def test_evidence_is_best_median_worst_and_the_best_rate():
    runs = outcomes(0.50, 0.7, 0.52, 0.6, rates=(1e-3, 1e-2))
    seen = evidence([*runs, OPEN])
    assert (seen.best, seen.worst, seen.rate, seen.unfinished) == (0.50, 0.7, 1e-3, 1)
    assert seen.median == pytest.approx(0.56)
    assert seen.at_rate.mean == pytest.approx(0.51)
    # t of one degree of freedom at 97.5 %: 12.7062; standard error 0.01
    assert seen.at_rate.half_width == pytest.approx(0.127062, rel=1e-5)


def test_a_rate_at_which_runs_diverge_is_not_the_best():
    runs = [
        FinalLoss("a", 0, 1e-2, FINISHED, 0.50, 0.001), FinalLoss("b", 1, 1e-2, DIVERGED),
        FinalLoss("c", 0, 1e-3, FINISHED, 0.51, 0.001),
        FinalLoss("d", 1, 1e-3, FINISHED, 0.53, 0.001),
    ]  # fmt: skip
    seen = evidence(runs)
    assert (seen.rate, seen.best, seen.diverged) == (1e-3, 0.50, 1)


def test_no_run_gives_no_evidence():
    seen = evidence([OPEN])
    assert (seen.best, seen.median, seen.rate, seen.at_rate.n) == (None, None, None, 0)


# --- evaluation -----------------------------------------------------------------------------------


def test_losses_of_sequences_are_those_of_their_scored_tokens():
    corpus = TaskCorpus("copy", 6)
    sequences, weights = corpus.evaluation_set(6, 5)
    model = Decoder(DecoderConfig(depth=1, width=8, heads=2), 3, 6)
    params = jax.jit(model.init)(jax.random.key(0))
    found = rescoring.sequence_losses(model, params, sequences, weights[0] > 0)
    logits = np.asarray(jax.jit(model.apply)(params, sequences[:, :-1]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for i, sequence in enumerate(sequences):
        own = [-log_p[i, t, sequence[t + 1]] for t in range(6) if t + 1 >= 5]
        assert found[i] == pytest.approx(np.mean(own), abs=2e-6)  # float32 logits


def test_the_standard_error_shrinks_with_the_root_of_the_sample():
    values = np.random.default_rng(0).normal(size=10_000)
    assert rescoring.standard_error(values) == pytest.approx(0.01, rel=0.05)
    with pytest.raises(UserError, match=r"final_windows=1: .* pass --config"):
        rescoring.standard_error(values[:1])


# --- page and table -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = made.workdir(
        tmp_path_factory.mktemp("made"), {t: made.MIXED[t] for t in ("copy", "modular_addition")},
        command="python launch.py --experiment=<b>bold</b>",
    )  # fmt: skip
    mechanisms_page.write(path)
    return path


@pytest.fixture(scope="module")
def found(folder):
    return mechanisms_data.read_mechanisms(folder)


def table(folder):
    return read_csv(folder / "mechanisms.csv")


def test_the_csv_has_a_row_for_every_cell(folder, found):
    rows = table(folder)
    assert len(rows) == 2 * len(made.VARIANTS)
    by_cell = {(row["task"], row["variant"]): row for row in rows}
    assert by_cell["copy", "no-attention"]["verdict"] == AT_FLOOR
    assert by_cell["copy", "no-residual"]["diverged"] == "4"
    assert by_cell["copy", "no-residual"]["loss_best"] == ""
    row = by_cell["copy", "no-norm"]
    assert (row["verdict"], row["within"], row["runs"]) == (UNRELIABLE, "2", "4")
    # H(noise): right with 1 - 2/3 0.2, each of two wrong tokens with 0.2 / 3
    p, q = 1 - 0.4 / 3, 0.2 / 3
    optimum = -p * math.log(p) - 2 * q * math.log(q)
    assert float(row["optimum"]) == pytest.approx(optimum, rel=1e-12)
    excess = float(row["loss_at_best_rate"]) - optimum
    assert float(row["excess_over_optimum"]) == pytest.approx(excess, abs=1e-12)
    assert float(by_cell["copy", "no-attention"]["floor"]) == pytest.approx(math.log(3), rel=1e-12)


def test_the_page_says_what_it_must(folder):
    page = (folder / "mechanisms.html").read_text()
    read = Page(page)
    for wanted in (
        "What can be computed is decided by attention (copy and modular_addition)",
        "no-attention on copy: 4 of 4 runs within 0.02 of the floor 1.099",
        "no-norm on copy: 2 of 2 at rate 0.002 and 0 of 2 at rate 0.005",
        "no-residual on copy: none of 4 runs; the best is – above 0.485. 4 diverged.",
        "0.0020 nats",
        "2 standard errors is",
        "floors and evaluation agree",
    ):
        assert wanted in read.text, wanted
    assert "<b>bold</b>" not in page and "Something is wrong" not in read.text
    assert {link.split("/")[-1] for link in read.dead_links(folder)} == {"report.html"}


def test_a_failure_at_the_optimum_of_less_information_is_named(tmp_path):
    # Copying without knowing the places: the multiset of earlier tokens, a sum over counts.
    task = TaskCorpus("copy", 16).task
    unordered, full, guess = (task.optimum(k) for k in ("unordered", "full", "nothing"))
    assert unordered is not None and full is not None and guess is not None
    over = {"no-positions": unordered - full + 0.002, "no-norm": guess - full + 0.001, "full": 0.2}
    said = answers.separated(
        mechanisms_data.read_mechanisms(made.workdir(tmp_path, {"copy": over}))
    )
    items = {text.split(" on ")[0]: text for texts in said.values() for text in texts}
    assert "the exact optimum of the information “unordered”" in items["no-positions"]
    assert "nothing was learned" in items["no-norm"]
    assert "That is" not in items["full"]


def test_what_the_full_decoder_did_not_get_to_decides_nothing(tmp_path):
    over = {"copy": {"full": 0.001, "no-attention": 0.001},
            "recall": {"full": 0.3, "no-attention": 0.001}}  # fmt: skip
    said = answers.answer(mechanisms_data.read_mechanisms(made.workdir(tmp_path, over)))
    assert said[0].startswith("What can be computed is decided by attention (copy): without it")


def test_the_verdicts_can_be_told_without_colour(folder):
    page = (folder / "mechanisms.html").read_text()
    for sign, words in (
        ("●", "computes it"), ("■", "sits at its own floor"), ("◐", "learns unreliably"),
        ("✕", "not reached"),
    ):  # fmt: skip
        assert sign in page and words in page


def test_a_loss_below_its_floor_stands_at_the_top(tmp_path):
    made.workdir(tmp_path, {"copy": {"full": -0.05, "no-attention": 0.001}})
    _, text, sound = mechanisms_page.write(tmp_path)
    page = (tmp_path / "mechanisms.html").read_text()
    assert page.index("Something is wrong") < page.index('aria-label="The answer"')
    assert "this floor or the evaluation is wrong" in page
    assert not sound and "standard errors below 0.4851" in " ".join(text.split())
    assert "floors and evaluation agree" not in text


def test_two_evaluations_that_disagree_are_reported(tmp_path):
    made.workdir(tmp_path, {"copy": {"full": 0.001}})
    path = tmp_path / "copy" / "sampling.json"
    sampled = files.read_object(path)
    next(iter(sampled["runs"].values()))["loss"] += 0.01
    files.write_sealed(path, sampled)
    alarms = answers.alarms(mechanisms_data.read_mechanisms(tmp_path))
    assert len(alarms) == 1 and "+0.01000 nats off" in alarms[0]


def test_missing_runs_and_tasks_are_said(tmp_path):
    made.workdir(tmp_path, {"copy": {"full": 0.001}}, planned_only=("parity",))
    run = sorted((tmp_path / "copy" / "runs").iterdir())[0]
    shutil.rmtree(run)
    said = answers.warnings(mechanisms_data.read_mechanisms(tmp_path))
    assert said[0] == "Not begun yet: parity."
    assert "not counted: 1 of full" in said[1]
    mechanisms_page.write(tmp_path)


def test_nothing_yet_is_a_page_too(tmp_path):
    made.workdir(tmp_path, {}, planned_only=("parity",))
    mechanisms_page.write(tmp_path)
    assert "There is no answer yet" in (tmp_path / "mechanisms.html").read_text()


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no mechanisms\.json .* pass the workdir"):
        mechanisms_data.read_mechanisms(tmp_path)


# --- the experiment -------------------------------------------------------------------------------


def changed(preset="smoke", **changes):
    """The configuration of a preset with changes, underscores doubled for dots."""
    paths = {name.replace("__", "."): value for name, value in changes.items()}
    return configs.replace(experiment.get_config(preset), paths)


@pytest.mark.parametrize("preset", experiment.PRESETS)
def test_every_task_of_a_preset_can_be_run(preset):
    config = experiment.get_config(preset)
    plans = {n: experiment.of_task(config, preset, n) for n in experiment.tasks_of(config, preset)}
    sources = experiment.check(config, plans)
    for name, plan in plans.items():
        assert sources[name].window == plan.data.window
        for variant, floor in experiment.floors_of(plan, sources[name]).items():
            optimum = sources[name].task.optimum("full")
            assert floor.loss is None or floor.loss >= optimum - 1e-12, (name, variant)


def test_a_flag_wins_over_the_table_of_tasks():
    own = experiment.SETTINGS["default"]["markov1"]["train.steps"]
    config = experiment.get_config("default")
    assert experiment.of_task(config, "default", "markov1").train.steps == own
    told = configs.replace(config, {"train.steps": 7})
    assert experiment.of_task(told, "default", "markov1").train.steps == 7


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mechanisms__tasks": ("copi",)}, r"mechanisms\.tasks=copi: .*copy"),
        (
            {"mechanisms__tasks": ("copy", "copy")},
            r"copy,copy: must list each value once; pass .*tasks=copy$",
        ),
        (
            {"mechanisms__margin": 0.0},
            r"margin=0\.0: must be above 0 and at most 1000; pass --config",
        ),
        ({"mechanisms__errors": math.inf}, r"errors=inf: must be above 0 and at most 1000"),
        (
            {"mechanisms__window": 2},
            r"^mechanisms\.window=2: .* at least 5 .*--config\.mechanisms\.window=32",
        ),
        ({"model__attention": "none"}, r"attention=none: .* pass --config\.model\.attention"),
        ({"model__residual": False}, r"residual=false: .* pass --config\.model\.residual"),
        ({"grid__depths": (2, 4)}, r"grid\.depths=2,4: .* use --config\.model\.depth"),
        ({"grid__arms": ("ful",)}, r"arms=ful: .*full"),
        ({"train__final_windows": 1}, r"final_windows=1: .* pass --config"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(changes, words, tmp_path):
    options = Options(tmp_path / "w", "again", live=False)
    with pytest.raises(UserError, match=words) as caught:
        experiment.run(changed(**changes), "smoke", options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "w").exists()


def test_decoders_have_the_floor_of_their_kind():
    source = TaskCorpus("clock", 32)
    rotary = experiment.of_task(changed("default", model__depth=1), "full", "markov1")
    assert experiment.decoder_of("no-positions", rotary.model) == "no-positions-one-block"
    plan = experiment.of_task(changed("default"), "default", "clock")
    assert plan.model.positions == "learned"
    floors = experiment.floors_of(plan, source)
    optimum = source.task.optimum("full")
    assert floors["no-attention"].loss == pytest.approx(optimum, rel=1e-12)  # the position is all
    assert "learned" in floors["full"].reason


def test_a_small_run_of_it_all_then_of_what_is_left(tmp_path):
    folder = tmp_path / "w"
    options = Options(folder, "again", live=False)
    first = experiment.run(changed(mechanisms__tasks=("markov1",)), "smoke", options)
    assert first is not None and [row["task"] for row in table(folder)] == ["markov1"] * 2
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/runs/*/metrics.jsonl")}
    rows = table(folder)

    outcome = experiment.run(changed(), "smoke", options)
    assert outcome is not None and outcome.code == 0 and "computing or learning" in outcome.text
    assert outcome.page == folder / "mechanisms.html"
    assert [(row["task"], row["variant"]) for row in table(folder)] == [
        (task, variant) for task in ("markov1", "copy") for variant in ("full", "no-attention")
    ]
    assert table(folder)[:2] == rows
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert all(float(row["standard_error"]) > 0 for row in table(folder))
    assert all((folder / row["task"] / "report.html").exists() for row in rows)


def test_a_dry_run_writes_nothing(tmp_path, capsys):
    options = Options(tmp_path / "w", "again", dry_run=True, live=False)
    assert experiment.run(changed(), "smoke", options) is None
    said = capsys.readouterr().out
    assert "task markov1: 5 steps, window 6" in said and "task copy: 5 steps, window 6" in said
    assert not (tmp_path / "w").exists()


def test_the_corpus_of_a_task_is_the_one_that_is_judged():
    plan = experiment.of_task(changed(), "smoke", "copy")
    assert corpora.open_corpus(plan.data).name == "task:copy"
