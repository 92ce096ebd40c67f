"""Files of a user's own: what they add, what is remembered of them, and how they fail."""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from normjax import plugins, registry
from normjax.data import corpora
from normjax.data.corpora import DataConfig
from normjax.data.tasks import floors, table
from normjax.errors import UserError
from normjax.runs import grid
from normjax.runs.grid import Arm, ExperimentConfig
from normjax.runs.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
TASK = """
from normjax.data.tasks.table import Row
from normjax.data.tasks.markov import Markov1
import normjax

normjax.register_task("mine", Row("a task of mine", "A chain.", "H", "this test", Markov1))
"""
CORPUS = """
import normjax

TEXT = "whoever comes here reads the same line\\n" * 40

def source(config):
    return normjax.Source("lines", "one line over and over", "", lambda: (TEXT, TEXT[:400]))

normjax.register_corpus("lines", source)
"""
EXPERIMENT = '''"""Does it matter? One line that says what is asked."""
from normjax import configs
from normjax.runs import runner
from normjax.runs.grid import Arm, ExperimentConfig, Question

ARMS = (Arm("full", "full", "all", {}), Arm("bare", "bare", "no MLP", {"model.mlp": "none"}))
PRESETS = {"tiny": ("4 steps", {
    "model.depth": 1, "model.width": 8, "model.heads": 2, "data.window": 8, "train.steps": 4,
    "train.warmup_steps": 1, "train.batch_size": 2, "train.evaluate_every": 4, "grid.seeds": 1,
    "train.evaluation_windows": 2, "train.final_windows": 4,
})}

def get_config(preset):
    return configs.replace(ExperimentConfig(), PRESETS[preset][1])

def run(config, preset, options):
    question = Question("own", preset, "Mine", "What?", "That.", "full")
    return runner.carry_out(question, ARMS, config, options)
'''


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch):
    """What a test loads is gone after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_LOADED", {})
    monkeypatch.setattr(plugins, "_COUNTED", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules, rows = set(sys.modules), registry.added()
    yield
    registry.take_back(rows)
    for name in set(sys.modules) - modules:
        if not name.startswith(("normjax.", "experiments.", "jax", "numpy", "scipy")):
            sys.modules.pop(name)


def write(name, text):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


def error(path, **more):
    with pytest.raises(UserError) as caught:
        plugins.load(path, **more)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- loading --------------------------------------------------------------------------------------


def test_a_file_is_loaded_once_and_remembered_by_its_content(tmp_path):
    assert plugins.record() == [] and plugins.entry() == {}
    first = plugins.load(write("mine.py", TASK))
    assert "mine" in table.TASKS
    assert (first.path, first.name) == (tmp_path / "mine.py", "mine")
    assert first.sha256 == hashlib.sha256(TASK.encode()).hexdigest()
    for copy in ("elsewhere/mine.py", "copy.py"):  # the same content: not executed again
        assert plugins.load(write(copy, TASK)) == first
    assert plugins.loaded() == (first,)
    assert plugins.entry() == {"plugins": [{"name": "mine", "sha256": first.sha256}]}
    assert json.loads(json.dumps(plugins.record())) == plugins.record()


def test_a_module_is_loaded_by_its_dotted_name(tmp_path):
    write("shelf/__init__.py", "")
    write("shelf/tasks.py", TASK)
    found = plugins.load("shelf.tasks")
    assert found.name == "shelf.tasks" and found.module.__name__ == "shelf.tasks"
    assert plugins.load("shelf.tasks") == found and "mine" in table.TASKS


def test_modules_beside_a_file_count_with_it():
    write("helper.py", "NAME = 'mine'\n")
    plugins.load(write("main.py", "import helper\n"))
    assert [plugin["name"] for plugin in plugins.record()] == ["helper", "main"]
    assert plugins.record()[0]["sha256"] == hashlib.sha256(b"NAME = 'mine'\n").hexdigest()


def test_an_edited_file_whose_name_is_taken_says_so():
    plugins.load(write("mine.py", TASK))
    edited = TASK.replace("A chain.", "Another chain.")
    said = error(write("mine.py", edited))
    assert "mine.py line 6: task 'mine': the name is taken" in said
    plugins.load(write("mine.py", edited.replace("))", "), replace=True)")))
    assert table.TASKS["mine"].description == "Another chain."


FAILURES = {
    "a syntax error": ("x = 1\ndef f(:\n", ["mine.py line 2: SyntaxError: "]),
    "a name that is none": ("\nprint(undefined)\n", ["line 2: NameError: name 'undefined'"]),
    "an import that fails": (
        "import no_such_package\n",
        ["line 1: ModuleNotFoundError", "no_such"],
    ),
    "in a function": ("def f():\n    1 / 0\n\nf()\n", ["line 2: ZeroDivisionError"]),
    "an exit": ("import sys\nsys.exit(3)\n", ["line 2: SystemExit: 3"]),
    "several lines": ("raise ValueError('a\\nb')\n", ["line 1: ValueError: a b"]),
    "a name twice": (TASK + TASK.replace("A chain", "B"), ["line 12: task 'mine': the name is ta"]),
    "a bad name": (TASK.replace('"mine"', '"Mine!"'), ["line 6: task 'Mine!': a name must be"]),
    "no row": ("import normjax\nnormjax.register_task('mine', 3)\n", ["line 2: ", "int is no"]),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_file_that_fails_is_one_line_with_its_line_and_leaves_nothing(case):
    text, words = FAILURES[case]
    tasks, modules = dict(table.TASKS), {n for n in sys.modules if n.startswith("normjax_plugin")}
    said = error(write("mine.py", text))
    assert said.startswith("--plugins=mine.py: ")
    for word in words:
        assert word in said
    assert tasks == table.TASKS and plugins.record() == []
    assert {n for n in sys.modules if n.startswith("normjax_plugin")} == modules
    plugins.load(write("mine.py", TASK))  # put right, it loads


def test_what_is_no_plugin_is_one_line(tmp_path):
    write("mine.py", "")
    write("notes.txt", "")
    assert "--plugins=mien.py: no such file; did you mean 'mine.py'?" in error("mien.py")
    assert "no such file; name a Python file" in error("/no/such/folder/x.py")
    assert "--plugins=./: is a folder; name a Python file" in error("./")
    assert "is no Python file" in error("./notes.txt")
    assert "--plugins=mien: no such module; name a Python file" in error("mien")
    assert "No module named 'no_such'" in error("no_such.module")
    assert error("x.py", argument="--experiment").startswith("--experiment=x.py: no such file")


# --- what is registered ---------------------------------------------------------------------------


@pytest.mark.usefixtures("own_folders")
def test_a_task_of_ones_own_is_a_corpus_with_floors():
    plugins.load(write("mine.py", TASK))
    corpus = corpora.open_corpus(DataConfig(corpus="task:mine", window=8))
    assert corpus.vocabulary_size == 4 and "a task of mine" in corpus.description
    loss, entry = floors.floor("mine", table.build("mine", 8), "no-attention")
    assert loss is not None and entry.information == "current" and not entry.reached
    with pytest.raises(UserError, match="did you mean 'task:mine'"):
        corpora.open_corpus(DataConfig(corpus="task:minee"))


@pytest.mark.usefixtures("own_folders")
def test_a_text_of_ones_own_is_a_corpus_known_by_its_content():
    plugins.load(write("mine.py", CORPUS))
    first = corpora.open_corpus(DataConfig(corpus="lines", window=8))
    assert first.name == "lines" and len(first.held_out) == 400
    plugins.load(
        write("other.py", CORPUS.replace("reads", "finds").replace('("lines", s', '("others", s'))
    )
    other = corpora.open_corpus(DataConfig(corpus="others", window=8))
    assert other.fingerprint != first.fingerprint
    assert (
        corpora.open_corpus(DataConfig(corpus="lines", window=8)).fingerprint == first.fingerprint
    )
    for name in ("first", "second"):
        corpora.register_corpus(
            name,
            lambda config, name=name: corpora.Source(name, "", "v1", lambda: (name * 99, name)),
        )
    first, second = (
        corpora.open_corpus(DataConfig(corpus=n, window=1)) for n in ("first", "second")
    )
    assert first.fingerprint != second.fingerprint and first.vocabulary != second.vocabulary
    corpora.register_corpus("none", lambda config: "text")
    with pytest.raises(UserError, match="data.corpus=none: its function returned a str; it must"):
        corpora.open_corpus(DataConfig(corpus="none"))
    with pytest.raises(UserError, match="did you mean 'lines'"):
        corpora.open_corpus(DataConfig(corpus="linse"))


# --- identity -------------------------------------------------------------------------------------


def test_plugins_are_part_of_what_defines_a_run_and_their_absence_is_not():
    def names():
        plan = grid.plan(ExperimentConfig(), [Arm("full", "", "", {})], "text")
        return [run.id for cohort in plan for run in cohort.runs]

    plain = names()
    assert "plugins" not in grid._identity(ExperimentConfig(), (0, 0, 0, 0), "text")
    plugins.load(write("mine.py", "x = 1\n"))
    one = names()
    plugins.load(write("mine.py", "x = 2\n"))
    assert len({*plain, *one, *names()}) == 9


def test_an_experiment_counts_only_where_it_adds_a_row():
    """Otherwise an edit of its words would train everything again."""
    plugins.load(write("own.py", EXPERIMENT), "--experiment", counts=False)
    assert plugins.record() == []
    plugins.load(write("rows.py", EXPERIMENT + TASK), "--experiment", counts=False)
    assert [plugin["name"] for plugin in plugins.record()] == ["rows"]


# --- the command ----------------------------------------------------------------------------------


def call(*arguments):
    environment = {
        **os.environ, "JAX_PLATFORMS": "cpu", "NORMJAX_CACHE": str(Path("cache").absolute())
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *arguments, "--compilation_cache=off"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip


def test_a_strangers_experiment_on_a_strangers_text_runs():
    """One process: the plug-in is loaded first, and all that is written says with which."""
    write("mine.py", "import jax.numpy as jnp\nZERO = jnp.zeros(3)\n" + CORPUS)
    write("lab/own.py", EXPERIMENT)
    done = call(
        "--plugins=mine.py", "--experiment=lab/own.py", "--preset=tiny",
        "--config.data.corpus=lines", "--config.grid.arms=full",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    work = Path("runs/own-tiny")
    plan = json.loads((work / "grid.json").read_text())
    sha = hashlib.sha256(Path("mine.py").read_bytes()).hexdigest()
    assert plan["plugins"] == [{"name": "mine", "sha256": sha}]
    assert plan["corpus"]["name"] == "lines"
    assert {"--plugins=mine.py", "--experiment=lab/own.py"} <= set(shlex.split(plan["command"]))
    for folder in (work / "runs").iterdir():
        assert RunFolder(folder).environment["plugins"] == plan["plugins"]
    assert (work / "report.html").exists()


def test_help_and_list_know_what_was_loaded_and_mistakes_are_one_line(
    tmp_path, monkeypatch, capsys
):
    from absl import flags

    from experiments import cli
    from normjax.runs import machine

    monkeypatch.setattr(machine, "set_up", lambda *_: None)

    def run(*arguments):
        values = flags.FlagValues()
        cli.define_flags(values)
        monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
        try:
            cli.parse(values, list(sys.argv))
            code = cli.carry_out(values)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    write("mine.py", TASK)
    write("own.py", EXPERIMENT)
    code, out, _ = run("--plugins=mine.py", "--experiment=own.py", "--list")
    assert code == 0 and "own.py: Does it matter?" in out and "--preset=tiny" in out
    code, out, _ = run("--plugins=mine.py", "--experiment=mechanisms", "--help")
    assert code == 0 and "parity, mine" in " ".join(out.split())
    code, out, err = run("--experiment=own.py")
    assert (code, out) == (2, "") and "--preset=default: must be one of tiny" in err
    code, out, err = run("--plugins=mine.py,no.py")
    assert (code, out) == (2, "") and err.startswith("normjax: --plugins=no.py: no such file")
    code, out, err = run(f"--experiment={write('bad.py', 'PRESETS = dict(a=1)')}")
    assert code == 2 and err.count("\n") == 1
    assert "--experiment=bad.py: has no a docstring, no get_config(preset), no run(" in err
