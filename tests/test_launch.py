"""The command line as a user meets it: one line for a mistake, exit codes, nothing written."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import cli

ROOT = Path(__file__).parents[1]
TEXT = "the quick brown fox jumps over a lazy dog and nobody hears it fall\n" * 40
OWN = ("experiment", "preset", "workdir", "dry_run", "print_config", "list", "cpu_devices",
       "compilation_cache", "predict", "plugins")  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a text, away from the user's cache."""
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.setenv("NORMJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def call(place, command):
    """Run a command in this process; return exit code, output and error output."""
    return command


def smoke(place, *more):
    return [
        "--preset=smoke", f"--config.data.corpus={place / 'text.txt'}",
        f"--workdir={place / 'work'}", *more,
    ]  # fmt: skip


def process(place, *arguments):
    """Run the real command in a process of its own, from another folder."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "NORMJAX_CACHE": str(place / "cache")}
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *arguments], cwd=place, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip


def assert_one_line(code, out, err, *words):
    assert code == 2, (code, out, err)
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in err and out == ""
    for word in words:
        assert word in err, (word, err)


# --- what can be asked ----------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--help", "-h", "--helpshort", "--helpfull"])
def test_help_names_every_flag_with_its_default(call, flag):
    code, out, err = call(flag, "--preset=smoke")
    assert (code, err) == (0, "")
    for name in OWN:
        assert f"--{name}" in out
    for text in ("--config.model.depth", "[2]", "--config.grid.seeds", "runs per variant"):
        assert text in out
    assert "Exit codes" in out
    assert "smoke" in out and "standard" in out
    assert max(map(len, out.splitlines())) <= 100


def test_list_names_every_experiment_and_preset(call):
    code, out, err = call("--list")
    assert (code, err) == (0, "")
    for name in cli.names():
        assert f"{name}: " in out
        for preset in cli.find(name).PRESETS:
            assert f"--preset={preset}" in out
    assert "ablation" in cli.names()


@pytest.mark.parametrize("experiment", cli.names())
def test_every_preset_prints_and_is_possible(call, place, experiment):
    for preset in cli.find(experiment).PRESETS:
        code, out, err = call(f"--experiment={experiment}", f"--preset={preset}", "--print_config")
        assert (code, err) == (0, "")
        config = json.loads(out)
        if "grid" not in config:
            continue  # an experiment that trains nothing has fields of its own
        # Its corpora are tasks, each with a window of its own.
        own = "mechanisms" if experiment == "mechanisms" else "data"
        assert {"model", "train", "grid", own} <= set(config)
        assert config["train"]["warmup_steps"] < config["train"]["steps"]
        assert config["model"]["width"] % config["model"]["heads"] == 0


def test_flags_reach_the_configuration_in_any_order_and_form(call):
    given = (
        "--config.model.depth", "5", "--experiment", "ablation", "--preset", "smoke",
        "--config.grid.arms=full, no-mlp", "--noconfig.model.residual",
        "-config.train.learning_rate=1e-2",
        "--config.model.qk_norm", "--config.grid.learning_rates=0.1,2", "--config.data.corpus=a=b",
    )  # fmt: skip
    code, out, err = call(*given, "--print_config")
    assert (code, err) == (0, "")
    config = json.loads(out)
    assert config["model"]["depth"] == 5 and config["model"]["width"] == 16
    assert config["grid"]["arms"] == ["full", "no-mlp"]
    assert config["grid"]["learning_rates"] == [0.1, 2.0]
    assert config["model"]["residual"] is False and config["model"]["qk_norm"] is True
    assert config["train"]["learning_rate"] == 1e-2
    assert config["data"]["corpus"] == "a=b"


def test_dry_run_says_what_would_run_and_writes_nothing(call, place):
    code, out, err = call(*smoke(place, "--dry_run"))
    assert (code, err) == (0, "")
    module = cli.find("ablation")
    names = [arm.name for arm in (*module.ARMS, *module.NORMS_APART)]
    for name in names:
        assert f"{name}-s0-" in out and f"{name}-s1-" in out
    assert f"{2 * len(names)} runs" in out
    assert "parameters" in out and "time: about" in out
    assert not (place / "work").exists()
    assert {p.name for p in place.iterdir()} <= {"text.txt", "cache"}


def test_dry_run_of_a_workdir_leaves_it_alone(call, place):
    (place / "work").mkdir()
    code, _, _ = call(*smoke(place, "--dry_run"))
    assert code == 0 and list((place / "work").iterdir()) == []


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES = {
    "heads that do not divide": (["--config.model.heads=3"], ["model.heads=3", "divide", "16"]),
    "depth 0": (
        ["--config.model.depth=0"],
        ["config.model.depth=0", "from 1 to 10000", "--config.model.depth=4"],
    ),
    "no such placement": (["--config.model.placement=pree"], ["=pree", "did you mean 'pre'?"]),
    "no such norm": (["--config.model.norm=rmsnrm"], ["=rmsnrm", "did you mean 'rmsnorm'?"]),
    "no seeds": (["--config.grid.seeds=0"], ["config.grid.seeds=0", "from 1 to 10000"]),
    "negative rate": (
        ["--config.train.learning_rate=-1e-3"],
        ["=-0.001", "from 0 to 1e+30", "--config.train.learning_rate="],
    ),
    "negative rate in a list": (["--config.grid.learning_rates=1e-3,-1"], ["learning_rates=-1.0"]),
    "a rate that is no number": (["--config.train.learning_rate=nan"], ["learning_rate=nan"]),
    "an infinite rate": (["--config.train.learning_rate=inf"], ["learning_rate=inf"]),
    "no steps": (["--config.train.steps=0"], ["config.train.steps=0"]),
    "warm-up too long": (["--config.train.warmup_steps=21"], ["warmup_steps=21", "20"]),
    "no window": (["--config.data.window=0"], ["data.window=0"]),
    "window too long": (["--config.data.window=999"], ["data.window=999", "window"]),
    "missing file": (["--config.data.corpus=/no/such/file.txt"], ["/no/such/file.txt"]),
    "no such set": (["--config.data.corpus="], ["data.corpus"]),
    "no such vocabulary": (["--config.data.vocabulary=chars"], ["did you mean 'char'?"]),
    "left over": (["depth=4"], ["depth=4", "left over", "--name=value"]),
    "left over word": (["please"], ["please", "left over"]),
    "wrong flag": (["--workdirs=x"], ["--workdirs", "did you mean 'workdir'?"]),
    "wrong field": (["--config.model.dpeth=4"], ["dpeth", "did you mean 'config.model.depth'?"]),
    "wrong section": (["--config.modle.depth=4"], ["config.modle.depth", "did you mean"]),
    "not a whole number": (["--config.model.depth=many"], ["depth=many", "whole number"]),
    "half a block": (["--config.model.depth=2.5"], ["depth=2.5", "whole number"]),
    "not a number": (["--config.train.learning_rate=fast"], ["learning_rate=fast", "a number"]),
    "not a boolean": (["--config.model.residual=maybe"], ["residual=maybe", "true or false"]),
    "not a list of numbers": (["--config.grid.learning_rates=1,x"], ["learning_rates", "'1,x'"]),
    "wrong experiment": (["--experiment=ablatoin"], ["ablatoin", "did you mean 'ablation'?"]),
    "helper as experiment": (["--experiment=cli"], ["--experiment=cli", "must be one of"]),
    "wrong preset": (["--preset=smokey"], ["--preset=smokey", "did you mean 'smoke'?"]),
    "wrong variant": (["--config.grid.arms=full,no-attn"], ["no-attn", "did you mean"]),
    "no such prediction": (["--predict=expcted"], ["=expcted", "did you mean 'expected'?"]),
    "a prediction of no variant": (["--predict=text.txt"], ["line 1: ", "no variant"]),
    "asked without a terminal": (["--predict=ask"], ["--predict=ask", "no terminal"]),
    "workdir is a file": (["--workdir=text.txt"], ["text.txt", "is a file"]),
    "workdir under a file": (["--workdir=text.txt/below"], ["text.txt is a file"]),
    "workdir that cannot be made": (["--workdir=/proc/normjax"], ["/proc/normjax", "cannot write"]),
    "a value missing": (["--config.model.depth"], ["config.model.depth"]),
    "a bucket": (["--workdir=gs://bucket/runs"], ["--workdir=gs://bucket/runs", "an address"]),
    "a bucket in a dry run": (["--workdir=s3://bucket/runs", "--dry_run"], ["s3://bucket/runs"]),
    "a page of the web": (["--workdir=http://example.org/runs"], ["http://", "name a folder"]),
    "a cache in a bucket": (["--config.data.cache_dir=gs://bucket"], ["cache_dir=gs://bucket"]),
    "a home that is nobody's": (["--workdir=~nobody-at-all/runs"], ["~nobody-at-all", "no home"]),
    "letters that are no text": (["--workdir=\udcff"], ["\\xff", "UTF-8"]),
    "more sequences than 64 bits": ([f"--config.train.batch_size={2**63 - 1}"], ["batch_size=922"]),
    "a batch beyond memory": (
        ["--config.train.batch_size=1048576", "--config.data.window=120"],
        ["config.train.batch_size=1048576", "GB of memory", "pass --config.train.batch_size="],
    ),
    "a width beyond all": (["--config.model.width=1000000000000"], ["from 1 to 65536"]),
    "a width beyond memory": (["--config.model.width=65536"], ["width=65536", "GB of memory"]),
    "a depth beyond all": (["--config.model.depth=1000000"], ["from 1 to 10000"]),
    "a depth beyond memory": (
        ["--config.model.depth=10000", "--config.model.width=8192"],
        ["10000 blocks, 8192 wide", "GB of memory"],
    ),
    "chunks beyond memory": (
        ["--config.train.chunk_steps=1000000", "--config.train.batch_size=65536"],
        ["config.train.chunk_steps=1000000", "GB of memory"],
    ),
    "runs beyond memory": (
        ["--config.grid.seeds=10000", "--config.model.width=512"],
        ["config.grid.seeds", "GB of memory", "fewer runs"],
    ),
    "runs beyond all": (
        ["--config.grid.seeds=10000", f"--config.grid.init_scales={','.join(map(str, range(9)))}"],
        ["config.grid.seeds=10000", "at most 100000"],
    ),
    "an evaluation beyond memory": (
        ["--config.data.corpus=task:copy", f"--config.train.final_windows={2**31 - 1}"],
        ["config.train.final_windows=2147483647", "GB of memory"],
    ),
    "checkpoints beyond the disk": (
        [
            f"--config.train.steps={2**31 - 1}",
            "--config.train.checkpoint_every=1",
            "--config.train.keep_checkpoints=0",
        ],
        ["the checkpoints and the page of this grid", "are free there", "keep_checkpoints=1"],
    ),
    "steps that int32 cannot count": ([f"--config.train.steps={2**31}"], ["to 2147483647"]),
    "diagnostics at every one of them": (
        [
            f"--config.train.steps={2**31 - 1}",
            "--config.train.diagnostics=on",
            "--config.train.diagnostic_every=1",
        ],
        ["diagnostic_every=1", "pass --config.train.diagnostic_every=2148"],
    ),
    "a number of 4000 digits": ([f"--config.grid.seeds={'9' * 4000}"], ["seeds=99999999...:"]),
    "a number of 5000 digits": ([f"--config.model.depth={'9' * 5000}"], ["whole number"]),
    "a rate beyond all floats": (["--config.train.learning_rate=1e400"], ["learning_rate=inf"]),
    "heads beyond all": (["--config.model.heads=100000000000"], ["from 1 to 65536"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(call, place, monkeypatch, case):
    arguments, words = MISTAKES[case]
    monkeypatch.chdir(place)
    assert_one_line(*call(*smoke(place), *arguments), *words)
    assert not (place / "work").exists()
    assert (place / "text.txt").read_text() == TEXT


def test_jacobians_beyond_memory_are_one_line(call, place):
    text = f"--config.data.corpus={place / 'text.txt'}"
    wide = (
        "--experiment=spectrum", "--config.model.width=65536", text, "--dry_run",
        "--config.spectrum.sequence_tokens=0",
    )  # fmt: skip
    assert_one_line(*call(*wide), "config.model.width=65536", "GB of memory")
    assert call("--experiment=spectrum", text, "--dry_run")[0] == 0


def _sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


NAMED = {
    "a pipe": (os.mkfifo, "is a pipe"),
    "a folder": (os.mkdir, "is a folder"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "a terabyte": (_sparse, "1,099,511,627,776 bytes"),
    "bytes": (lambda path: path.write_bytes(bytes(range(256))), ""),
    "brackets without end": (lambda path: path.write_text("[" * 10**5), "nest"),
    "brackets": (lambda path: path.write_text("[" * 900 + "]" * 900), ""),
    "a link to itself": (lambda path: path.symlink_to(path), ""),
}


@pytest.mark.parametrize("case", NAMED)
@pytest.mark.parametrize("flag", ["predict", "plugins", "experiment"])
def test_a_named_file_that_is_none_is_one_line_and_no_wait(call, place, flag, case):
    make, words = NAMED[case]
    make(place / "named.py")
    code, out, err = call(*smoke(place), f"--{flag}={place / 'named.py'}")
    assert_one_line(code, out, err, "named.py", *([words] if flag == "predict" else []))
    assert len(err) < 2000 and not (place / "work").exists()


@pytest.mark.parametrize("experiment", ["claims", "figures", "spectrum"])
def test_a_prediction_needs_a_grid(call, place, experiment):
    arguments = (f"--experiment={experiment}", f"--workdir={place / 'work'}", "--predict=expected")
    assert_one_line(
        *call(*arguments), "--predict=expected", f"--experiment={experiment}", "no grid"
    )
    assert not (place / "work").exists()


TEXTS = {
    "empty": (b"", ["empty"]),
    "white space only": (b" \n\n ", ["text"]),
    "too short": (b"short", ["data.window=16"]),
    "not UTF-8": (TEXT.encode() + b"\xff\xfe caf\xe9", ["UTF-8"]),
    "Latin-1": ("caf\u00e9 ".encode("latin-1") * 300, ["UTF-8"]),
    "a picture": (b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 20, ["UTF-8"]),
}


@pytest.mark.parametrize("case", TEXTS)
def test_a_text_that_cannot_be_used_is_one_line(call, place, case):
    data, words = TEXTS[case]
    (place / "text.txt").write_bytes(data)
    assert_one_line(*call(*smoke(place)), "text.txt", *words)
    assert not (place / "work").exists()


def test_a_folder_without_texts_is_one_line(call, place):
    (place / "empty").mkdir()
    assert_one_line(*call(*smoke(place, f"--config.data.corpus={place / 'empty'}")), "empty")


def test_a_mistake_in_a_cell_is_found_before_anything_is_written(call, place):
    """Rotary positions need an even head width; the arm without positions does not."""
    odd = ["--config.model.width=6", "--config.model.heads=2"]
    assert_one_line(*call(*smoke(place, *odd)), "config.model.heads=2", "even")
    assert not (place / "work").exists()


# --- as a process ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.model.heads=3"], ["heads=3"]),
        (["--config.model.dpeth=4"], ["did you mean"]),
        (["--cpu_devices=-1"], ["--cpu_devices=-1", "0"]),
    ],
)
def test_a_mistake_in_a_process(place, arguments, words):
    out = process(place, *smoke(place), *arguments)
    assert_one_line(out.returncode, out.stdout, out.stderr, *words)
    assert not (place / "work").exists()


def test_help_and_list_as_a_process_need_no_network_no_cache_and_no_workdir(place):
    for flag in ("--help", "--list"):
        out = process(place, flag)
        assert out.returncode == 0 and out.stderr == "" and "ablation" in out.stdout
    assert {p.name for p in place.iterdir()} == {"text.txt"}


def test_output_into_a_closed_pipe_is_no_traceback(place):
    command = shlex.join([sys.executable, str(ROOT / "launch.py"), "--print_config"])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "NORMJAX_CACHE": str(place / "cache")}
    out = subprocess.run(
        f"{command} | true", shell=True, env=environment, capture_output=True, text=True
    )
    assert "Traceback" not in out.stderr
