"""Any command line and any configuration: what was asked for, or one line and code 2."""

from __future__ import annotations

import json
import math
import random
import re

import pytest
from fuzzing import SCALARS, TEXTS, assert_one_line, bounded, call, changed, digests
from hypothesis import given
from hypothesis import strategies as st

from experiments import cli
from normjax import configs
from normjax.configs import Limits
from normjax.errors import UserError
from normjax.runs import grid, machine

WORDS = "the quick brown fox jumps over a lazy dog and nobody hears it fall"
CONFIGS = {
    (name, preset): cli.find(name).get_config(preset)
    for name in cli.names() for preset in cli.find(name).PRESETS
}  # fmt: skip
GRIDS = [key for key, config in CONFIGS.items() if type(config) is grid.ExperimentConfig]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory):
    """A folder with a text, in which the program works, with the devices that the tests have."""
    folder = tmp_path_factory.mktemp("flags")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("NORMJAX_CACHE", str(folder / "cache"))
        patch.setenv("TFDS_DATA_DIR", str(folder / "tfds"))
        patch.setattr(machine, "set_up", lambda *_: None)
        words = random.Random(0).choices(WORDS.split(), k=600)
        (folder / "text.txt").write_text(" ".join(words))
        yield folder


ARGUMENTS = (TEXTS | SCALARS.map(str)).filter(lambda text: "\ud800" not in text)
"""What a system can hand over: only halves of surrogates that stand for bytes."""


def fitting(leaf):
    """Values that a field's declaration admits."""
    limits: Limits = leaf.limits
    if limits.choices is not None:
        return st.sampled_from(limits.names() or [""])
    if leaf.kind is bool:
        return st.booleans()
    if leaf.kind is str:
        return ARGUMENTS
    low = limits.least if limits.least is not None else limits.above
    high = limits.most if limits.most is not None else limits.below
    if leaf.kind is int:
        return st.integers(low, high) | st.integers(low, min(high, (low or 0) + 9))
    open_ends = {"exclude_min": limits.least is None, "exclude_max": limits.most is None}
    return st.floats(low, high, **open_ends)


def answered(code, out, err):
    """Whether a command was carried out; if not, it was refused as a mistake is."""
    assert code in (0, 2), (code, out, err)
    if code == 0:
        assert err == "", err
        return True
    assert out == "" and err.startswith("normjax: ") and err.endswith("\n"), (out, err)
    assert_one_line(err[:-1])
    return False


@st.composite
def flagged(draw, config, own=frozenset()):
    """Return flags of a configuration, and the values by path that they must give if accepted."""
    leaves = [leaf for leaf in configs.leaves(config) if leaf.path not in own]
    given, expected = [], {}
    for leaf in draw(st.lists(st.sampled_from(leaves), max_size=4, unique_by=lambda f: f.path)):
        if draw(st.booleans()):
            given.append(f"--config.{leaf.path}={draw(ARGUMENTS)}")
            continue
        value = draw(st.lists(fitting(leaf), max_size=3) if leaf.is_list else fitting(leaf))
        if leaf.kind is not str or leaf.limits.choices is not None:
            expected[leaf.path] = value
        given.append(f"--config.{leaf.path}={configs.shown(value)}")
    return given, expected


def lookup(record, path):
    for name in path.split("."):
        record = record[name]
    return record


@given(st.data())
def test_any_fields_are_what_was_said_or_one_line(data):
    (name, preset), config = data.draw(st.sampled_from(list(CONFIGS.items())))
    arguments, expected = data.draw(flagged(config))
    start = [f"--experiment={name}", f"--preset={preset}", "--print_config"]
    code, out, err = call(*start, *arguments)
    if answered(code, out, err):
        found = json.loads(out)
        for path, value in expected.items():
            assert lookup(found, path) == value, (path, value)
        again = [f"--config.{leaf.path}={configs.shown(leaf.value)}"
                 for leaf in configs.leaves(configs.from_dict(config, found))]  # fmt: skip
        assert json.loads(call(*start, *again)[1]) == found


OWN = (
    "experiment", "preset", "workdir", "verify", "predict", "compilation_cache", "cpu_devices",
    "plugins", "dry_run", "print_config", "list", "help", "helpfull", "config", "config.x",
    "config.model", "config.model.", "config..depth", "config.model.depth.x", "flagfile",
    "undefok", "v", "logtostderr",
)  # fmt: skip


@given(st.lists(st.one_of(
    st.builds("--{}={}".format, st.sampled_from(OWN) | ARGUMENTS, ARGUMENTS),
    st.builds("--{}".format, st.sampled_from(OWN) | ARGUMENTS), ARGUMENTS,
), max_size=4))  # fmt: skip
def test_any_words_are_a_command_or_one_line(place, arguments):
    before = digests(place)
    answered(*call("--preset=smoke", "--config.data.corpus=text.txt", "--config.grid.arms=full",
                   *arguments, "--dry_run"))  # fmt: skip
    after = digests(place)
    assert {k: v for k, v in after.items() if k in before} == before
    assert not list(place.rglob("manifest.json"))


@given(st.data())
def test_any_grid_is_planned_or_refused_in_one_line(place, data):
    """What a dry run plans is what the flags multiply to; nothing is written but cached tokens."""
    name, preset = data.draw(st.sampled_from(GRIDS))
    config = CONFIGS[name, preset]
    arguments, expected = data.draw(flagged(config, own={"grid.arms", "data.corpus"}))
    arm = cli.find(name).ARMS[0].name if hasattr(cli.find(name), "ARMS") else "pre-2"
    code, out, err = call(
        f"--experiment={name}", f"--preset={preset}", "--config.data.corpus=text.txt",
        f"--config.grid.arms={arm}", *arguments, "--workdir=work", "--dry_run",
    )  # fmt: skip
    assert not (place / "work").exists()
    if answered(code, out, err):
        axes = ("learning_rates", "weight_decays", "init_scales")
        runs = math.prod(len(expected.get(f"grid.{axis}") or [0]) for axis in axes)
        runs *= expected.get("grid.seeds", config.grid.seeds)
        assert re.search(rf"\b{runs:,} runs?\b|\b{runs} runs?\b", out), (runs, out)


# --- configurations as values and as documents ----------------------------------------------------


ALL = (grid.Arm("all", "all", "", {}),)


@given(st.data())
def test_any_document_is_a_configuration_or_an_error(data):
    config = data.draw(st.sampled_from(list(CONFIGS.values())))
    document = data.draw(changed(configs.to_dict(config)))
    with bounded():
        try:
            made = configs.from_dict(config, document)
            configs.check(made)
            if type(config) is grid.ExperimentConfig:
                grid.check(made, ALL, 1)
        except UserError as error:
            assert_one_line(str(error))
            return
    kept = configs.to_dict(made)
    assert configs.from_dict(config, kept) == made
