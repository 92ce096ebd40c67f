"""Predictions: what files may say, what they may not, and that they are stored before the runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import run_folders

from experiments import ablation
from normjax.errors import UserError
from normjax.predictions import asking, given, parsing, record
from normjax.predictions.prediction import LOSSES, RANKING, Candidate, from_json, to_json
from normjax.reporting import report
from normjax.runs import files
from normjax.runs.run_folder import FORMAT

ROOT = Path(__file__).parents[1]
NAMES = ("full", "no-attention", "no-mlp", "post-norm")
GRID = [Candidate(name, name.replace("no-", "minus "), f"{name}.") for name in NAMES]
PLANNED = record.Planned(NAMES, 3)
DEPTHS = [Candidate(f"{s}-{x}") for s in ("pre", "post") for x in (2, 4)]
DEPTHS += [Candidate(s, subject="series") for s in ("pre", "post")]


def read(text, candidates=GRID):
    return parsing.parse(text, "--predict=mine.txt", candidates)


def places(prediction):
    return {entry.name: entry.place for entry in prediction.entries}


def stated(prediction):
    return {entry.name: (entry.loss, entry.low, entry.high) for entry in prediction.entries}


# --- what is understood ---------------------------------------------------------------------------

ORDER = {"full": 1, "post-norm": 2, "no-mlp": 2, "no-attention": 4}
ORDERS = {
    "plain": "full\npost-norm = no-mlp\nno-attention\n",
    "Windows, a mark, blanks": "\ufeff  full \r\n\r\npost-norm=no-mlp\r\n\tno-attention",
    "comments": "# best first\nfull # surely\npost-norm = no-mlp\n  # so-so\nno-attention",
    "numbered": "1. full\n2) no-mlp = post-norm\n4. no-attention",
    "bulleted": "- full\n* no-mlp = post-norm\n• no-attention",
    "titles and case": "FULL\nPost-Norm = minus MLP\nMinus  Attention",
    "JSON": '{"ranking": ["full", ["post-norm", "no-mlp"], "no-attention"]}',
    "a JSON list": '["full", ["no-mlp", "post-norm"], "no-attention"]',
}


@pytest.mark.parametrize("case", ORDERS)
def test_orders(case):
    prediction = read(ORDERS[case])
    assert prediction.kind == RANKING and places(prediction) == ORDER
    assert set(stated(prediction).values()) == {(None, None, None)}


VALUES = {
    "2.1": (2.1, None, None), "2.1 nats": (2.1, None, None), "2": (2.0, None, None),
    ".5": (0.5, None, None), "2.1 (1.9 to 2.3)": (2.1, 1.9, 2.3), "2.1(1.9-2.3)": (2.1, 1.9, 2.3),
    "2.1 [1.9, 2.3]": (2.1, 1.9, 2.3), "2.1 (1.9 – 2.3) # why": (2.1, 1.9, 2.3),
    "2.1 (1.9..2.3)": (2.1, 1.9, 2.3), "2 ± 0.25": (2.0, 1.75, 2.25), "2 +/- .5": (2.0, 1.5, 2.5),
    "2e0 nats (1.5e0 to 25e-1)": (2.0, 1.5, 2.5),
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_losses(value):
    prediction = read(f"full: {value}\nno-mlp : 1.0\n")
    assert prediction.kind == LOSSES
    assert stated(prediction) == {"full": VALUES[value], "no-mlp": (1.0, None, None)}
    assert places(prediction)["full"] == (1 if VALUES[value][0] < 1 else 2)


def test_equal_losses_are_equal_places_and_json_says_the_same():
    text = read("level: 95 %\nauthor: A. B.\nfull: 2 (1 to 3)\nno-mlp: 2\nno-attention: 2.5")
    value = {"losses": {"full": [2, 1, 3], "no-mlp": 2, "no-attention": [2.5]}, "level": 95}
    assert read(json.dumps(value | {"author": "A. B."})) == text
    assert places(text) == {"full": 1, "no-mlp": 1, "no-attention": 3}
    assert text.level == 95 and read("full: 2").level == 80
    assert from_json(json.loads(json.dumps(to_json(text)))) == text


def test_author_and_reason_keep_their_words():
    prediction = read("Author: A # B\nreason: first: one\nreason: # two\nfull\nno-mlp")
    assert prediction.author == "A # B" and prediction.reason == "first: one # two"


def test_variants_may_be_left_out_and_series_may_be_ranked():
    assert places(read("no-mlp\nfull")) == {"no-mlp": 1, "full": 2}
    assert read("pre\npost", DEPTHS).subject == "series"
    assert read("pre-4\npost-2", DEPTHS).subject == "variants"


# --- what is not ----------------------------------------------------------------------------------

WRONG = {
    "nothing": ("", ["predicts nothing", '"full"', '"full: 2.1 (1.9 to 2.3)"']),
    "only comments": ("# full\nauthor: me\n", ["predicts nothing", '"no-attention"']),
    "empty JSON": ("{}", ["predicts nothing"]),
    "an unknown name": ("full\nno-mpl", ["line 2", "'no-mpl'", "did you mean 'no-mlp'?"]),
    "a name like no other": ("xyzzy\nfull", ["'xyzzy'", "they are full, no-attention"]),
    "an unknown name with a loss": ("ful: 2", ["'ful'", "did you mean 'full'?"]),
    "a misspelt header": ("athor: me\nfull\nno-mlp", ["'athor'", "did you mean 'author'?"]),
    "named twice": ("full\nno-mlp\nFull", ["line 3", "full is named twice", "line 1"]),
    "equal to itself": ("full = full", ["named twice"]),
    "several on a line": ("full, no-mlp", ["one name per line"]),
    "larger than": ("full < no-mlp", ["one name per line"]),
    "order and loss": ("full\nno-mlp: 2", ["line 2", "not both"]),
    "a word for a loss": ("full: low", ["'low' is no loss", "2.1 (1.9 to 2.3)"]),
    "no loss": ("full:", ["'' is no loss"]),
    "decimal comma": ("full: 2,1", ["'2,1'", "decimal points"]),
    "half an interval": ("full: 2.1 (1.9)", ["is no loss"]),
    "turned interval": ("full: 2 (3 to 1)", ["3 to 1", "does not hold"]),
    "beside the interval": ("full: 2 (2.1 to 3)", ["does not hold the expected 2"]),
    "negative": ("full: -1", ["-1.0 cannot be a loss", "at least 0"]),
    "infinite": ('{"losses": {"full": Infinity}}', ["full: inf", "finite"]),
    "an unknown level": ("level: 90\nfull: 2", ["level=90", "80 or 95"]),
    "two authors": ("author: a\nauthor: b\nfull\nno-mlp", ["author is given twice"]),
    "numbers that fall": ("2. full\n1. no-mlp", ["line 2", "numbered 1 after 2"]),
    "one name alone": ("full", ["only full", "nothing to compare"]),
    "a wrong key": ('{"rankin": ["full"]}', ["'rankin'", "did you mean 'ranking'?"]),
    "broken JSON": ('{"ranking": ["full"', ["none"]),
    "both in JSON": ('{"ranking": ["full"], "losses": {}}', ["state one"]),
    "a number in a ranking": ('["full", 3]', ["3, which is no name"]),
    "a text for a loss": ('{"losses": {"full": "2.1"}}', ["'2.1' is no number"]),
    "two numbers": ('{"losses": {"full": [2, 1]}}', ["[loss, lower end, upper end]"]),
    "an object for an author": ('{"author": {}, "ranking": ["full"]}', ["must be text"]),
    "no list": ('{"ranking": "full"}', ["must be a list"]),
    "no object": ('{"losses": ["full"]}', ["must be an object"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line(case):
    text, words = WRONG[case]
    with pytest.raises(UserError) as caught:
        read(text)
    message = str(caught.value)
    assert message.startswith("--predict=mine.txt: ") and "\n" not in message
    for word in words:
        assert word in message, message


def test_variants_and_series_do_not_mix():
    with pytest.raises(UserError, match="either variants or series"):
        read("pre\npost-2", DEPTHS)


def test_variants_that_do_not_run_are_kept_but_do_not_suffice():
    idle = [Candidate("full"), *(Candidate(name, planned=False) for name in NAMES[1:])]
    with pytest.raises(UserError, match="only full"):
        read("full\nno-mlp", idle)
    idle[1] = Candidate("no-attention")
    assert len(read("full\nno-attention\nno-mlp", idle).entries) == 3


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    cases = {
        tmp_path: "folder",
        tmp_path / "latin.txt": "UTF-8",
        tmp_path / "none.txt": "no such file",
        "a\0b": "cannot be read",
    }
    for path, word in cases.items():
        with pytest.raises(UserError, match=word) as caught:
            given.read(str(path))
        assert "\n" not in str(caught.value) and str(caught.value).startswith("--predict=")


def test_the_shipped_prediction_ranks_the_ablation_and_gives_reasons():
    candidates = [Candidate(arm.name, arm.title) for arm in (*ablation.ARMS, *ablation.NORMS_APART)]
    prediction = parsing.parse(given.read("expected"), "--predict=expected", candidates)
    place = places(prediction)
    assert set(place) == {c.name for c in candidates}
    assert place["full"] < place["post-norm"] == place["no-final-norm"] < place["no-branch-norm"]
    assert place["no-branch-norm"] < place["no-norm"] < place["no-mlp"]
    assert place["no-mlp"] == place["no-positions"] < place["no-residual"] < place["no-attention"]
    assert len(prediction.reason) > 200 and given.names() == ["expected"]


# --- asked for ------------------------------------------------------------------------------------


def ask(*answers):
    shown, left = [], list(answers)

    def answer(question):
        shown.append(question)
        if not left:
            raise EOFError
        return left.pop(0)

    found = asking.ask(GRID, "--predict=ask", answer, lambda text: shown.append(text) or "")
    assert not left
    return found, "\n".join(shown)


def test_equals_may_be_written_in_any_order():
    assert read("no-mlp = full = no-attention") == read("full = no-attention = no-mlp")
    assert read("no-mlp: 2\nfull: 2") == read("full: 2\nno-mlp: 2")


def test_asked_order_by_number_or_name():
    prediction, shown = ask("1, post-norm=3, 2", "me", "because")
    assert places(prediction) == ORDER
    assert (prediction.author, prediction.reason) == ("me", "because")
    for candidate in GRID:
        assert candidate.name in shown and candidate.description in shown


def test_asked_losses():
    prediction, _ = ask("", "2 (1 to 3)", "", "2.5", "", "", "")
    assert stated(prediction) == {"full": (2.0, 1.0, 3.0), "no-mlp": (2.5, None, None)}


def test_asked_again_after_a_mistake_and_not_for_ever():
    prediction, shown = ask("full, no-mpl", "full, no-mlp", "", "")
    assert places(prediction) == {"full": 1, "no-mlp": 2} and "did you mean 'no-mlp'?" in shown
    with pytest.raises(UserError, match="--predict=ask: the input ended"):
        ask("full, no-mlp")


def test_asking_needs_a_terminal_unless_it_is_stored(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no terminal"):
        given.prepare("ask", GRID, tmp_path, "G")
    mine = read("full\nno-mlp")
    record.settle(tmp_path, "--predict=ask", mine, "G", PLANNED)
    assert given.prepare("ask", GRID, tmp_path, "G") == mine


# --- stored ---------------------------------------------------------------------------------------

MINE = read("author: me\nfull\nno-mlp\nno-attention")
OTHER = read("author: me\nno-mlp\nfull\nno-attention")


def settle(workdir, prediction=MINE, grid="G"):
    """Store, and write grid.json as the runner does."""
    kept = record.settle(workdir, "--predict=x", prediction, grid, PLANNED)
    plan = {"format": FORMAT, "identity": grid, **({"prediction": kept} if kept else {})}
    files.write_sealed(workdir / "grid.json", plan)
    return record.read_stored(workdir, plan)


def step(workdir, number, kind="metrics"):
    folder = workdir / "runs" / "full-s0"
    if kind == "metrics":
        run_folders.write(folder, [{"step": number, "validation/loss": 2.0}])
    elif kind == "status":
        run_folders.write(folder, step=number)
    else:
        (folder / kind / str(number)).mkdir(parents=True)


def test_what_is_stored(tmp_path):
    before = datetime.now(UTC).replace(microsecond=0)
    stored = settle(tmp_path)
    kept = json.loads((tmp_path / "prediction.json").read_text())
    assert stored.prediction == MINE and stored.problem == ""
    assert before <= datetime.fromisoformat(kept["stored"]) <= datetime.now(UTC)
    assert datetime.fromisoformat(kept["stored"]).utcoffset().total_seconds() == 0
    assert kept["format"] == 3 and kept["steps_taken"] == 0 and kept["grid_sha256"] == "G"
    assert kept["kind"] == "ranking" and kept["author"] == "me" and len(kept["seal"]) == 64
    assert kept["planned"] == {"arms": list(NAMES), "seeds": 3} and len(kept["nonce"]) == 32
    assert stored.planned == PLANNED


@pytest.mark.parametrize("kind", ["metrics", "status", "checkpoints", "quarantine"])
def test_nothing_is_stored_after_a_step(tmp_path, kind):
    step(tmp_path, 7, kind)
    assert record.steps_taken(tmp_path) == 7
    with pytest.raises(UserError, match="took 7 steps, and a prediction comes before the first"):
        settle(tmp_path)
    assert not (tmp_path / "prediction.json").exists()


def test_step_zero_is_no_step(tmp_path):
    step(tmp_path, 0)
    step(tmp_path, 0, "checkpoints")
    assert settle(tmp_path).prediction == MINE


def test_the_same_again_is_fine_and_changes_nothing(tmp_path):
    settle(tmp_path)
    before = (tmp_path / "prediction.json").read_bytes()
    step(tmp_path, 5)
    for prediction in (MINE, None, read("1. full\nno-mlp # why\nno-attention\nauthor: me")):
        assert settle(tmp_path, prediction).prediction == MINE
        assert (tmp_path / "prediction.json").read_bytes() == before


def test_another_is_refused_before_and_after_the_first_step(tmp_path):
    settle(tmp_path)
    for _ in range(2):
        with pytest.raises(UserError, match="another prediction, stored 20.*cannot be changed"):
            settle(tmp_path, OTHER)
        with pytest.raises(UserError, match="another configuration"):
            settle(tmp_path, MINE, "H")
        step(tmp_path, 5)


def edit(workdir, **changes):
    kept = json.loads((workdir / "prediction.json").read_text()) | changes
    (workdir / "prediction.json").write_text(json.dumps(kept))
    return kept


def loaded(workdir):
    return record.read_stored(workdir, files.read_sealed(workdir / "grid.json"))


def test_every_changed_field_is_noticed(tmp_path):
    settle(tmp_path)
    whole = (tmp_path / "prediction.json").read_bytes()
    kept = json.loads(whole)
    for name in set(kept) - {"seal"}:
        edit(tmp_path, **{name: "2020-01-01"})
        assert loaded(tmp_path).problem == "was changed after it was stored", name
    (tmp_path / "prediction.json").write_bytes(whole)
    edit(tmp_path, entries=kept["entries"][::-1])
    assert loaded(tmp_path).problem == "was changed after it was stored"
    (tmp_path / "prediction.json").write_bytes(whole[:50])
    assert loaded(tmp_path).problem.startswith("was changed after it was stored")
    (tmp_path / "prediction.json").write_bytes(whole)
    assert loaded(tmp_path).problem == ""


def test_a_change_with_a_new_hash_is_noticed_by_the_plan(tmp_path):
    settle(tmp_path)
    kept = edit(tmp_path, stored="2020-01-01T00:00:00+00:00")
    files.write_sealed(tmp_path / "prediction.json", kept)
    assert loaded(tmp_path).problem == "was changed after it was stored"
    step(tmp_path, 5)
    with pytest.raises(UserError, match="not stored before the first step"):
        settle(tmp_path, MINE)


def test_one_that_was_removed_or_added_later_is_noticed(tmp_path):
    settle(tmp_path / "a")
    step(tmp_path / "a", 5)
    (tmp_path / "a" / "prediction.json").rename(tmp_path / "kept.json")
    assert "is gone" in settle(tmp_path / "a", None).problem
    with pytest.raises(UserError, match="took 5 steps"):
        settle(tmp_path / "a", MINE)
    settle(tmp_path / "b", None)
    step(tmp_path / "b", 5)
    (tmp_path / "kept.json").rename(tmp_path / "b" / "prediction.json")
    assert "was not stored by this program before" in settle(tmp_path / "b", None).problem
    with pytest.raises(UserError, match="not stored before the first step"):
        settle(tmp_path / "b", MINE)


def test_a_kill_between_the_two_files_loses_nothing(tmp_path):
    first = record.settle(tmp_path, "--predict=x", MINE, "G", PLANNED)
    assert record.seal_of(tmp_path) == first["sha256"]
    assert settle(tmp_path, None).prediction == MINE


def test_another_configuration_afterwards_is_not_scored(tmp_path):
    settle(tmp_path)
    assert "another configuration" in settle(tmp_path, None, "H").problem


# --- whole ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_line_stores_trains_and_scores(tmp_path):
    text = "the quick brown fox jumps over a lazy dog and nobody hears it fall\n" * 40
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "mine.txt").write_text("author: me\nno-mlp\nfull\n")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "NORMJAX_CACHE": str(tmp_path / "cache")}

    def launch(*more):
        command = [
            sys.executable, str(ROOT / "launch.py"), "--preset=smoke", "--workdir=work",
            "--config.data.corpus=text.txt", "--config.grid.arms=full,no-mlp",
            "--cpu_devices=1", *more,
        ]  # fmt: skip
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    done = launch("--predict=mine.txt")
    assert done.returncode == 0, done.stderr
    right = "Nothing is out of place" in done.stdout
    value = "+1.00" if right else "-1.00"  # of two variants there is no other
    assert f"Predicted by me: rank correlation {value} (Spearman" in done.stdout
    assert right or "Most wrong: " in done.stdout
    work = tmp_path / "work"
    plan = files.read_sealed(work / "grid.json")
    stored = record.read_stored(work, plan)
    assert stored.problem == "" and "--predict=mine.txt" in plan["command"]
    assert "Predicted and measured" in (work / "report.html").read_text(encoding="utf-8")
    (tmp_path / "mine.txt").write_text("full\nno-mlp\n")
    refused = launch("--predict=mine.txt", "--dry_run")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "holds another prediction" in refused.stderr
    edit(work, author="somebody else")
    report.write(work)
    assert "changed after it was stored" in (work / "report.html").read_text(encoding="utf-8")
    assert "changed after it was stored" in " ".join(report.headline(work).split())
