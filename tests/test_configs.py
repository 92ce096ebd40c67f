"""Configurations: flags, dotted paths, JSON and digests."""

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from experiments import cli
from normjax import configs
from normjax.errors import UserError, check_choice, suggest
from normjax.runs import grid

ROOT = Path(__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Inner:
    depth: int = configs.field(4, "blocks")
    rate: float = configs.field(1e-3, "step size")
    residual: bool = configs.field(True, "keep the path")
    name: str = configs.field("pre", "placement")


@dataclasses.dataclass(frozen=True)
class Outer:
    model: Inner = Inner()
    other: Inner = Inner(depth=7)
    seeds: tuple[int, ...] = configs.field((0, 1, 2), "seeds")
    rates: tuple[float, ...] = configs.field((), "rates")
    names: tuple[str, ...] = configs.field(("a",), "names")


def parse(*arguments, config=None):
    values = flags.FlagValues()
    config = Outer() if config is None else config
    configs.define_flags(config, values)
    values(["program", *arguments])
    return configs.from_flags(config, values)


def flag_lines(config):
    """The command line that says a whole configuration."""
    for leaf in configs.leaves(config):
        value = leaf.value
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        yield f"--config.{leaf.path}={text}"


def test_leaves_in_order_with_type_and_help():
    leaves = list(configs.leaves(Outer()))
    assert [leaf.path for leaf in leaves] == [
        "model.depth", "model.rate", "model.residual", "model.name",
        "other.depth", "other.rate", "other.residual", "other.name",
        "seeds", "rates", "names",
    ]  # fmt: skip
    assert (leaves[1].type, leaves[1].value, leaves[1].help) == (float, 1e-3, "step size")
    assert [leaf.value for leaf in leaves if leaf.path == "other.depth"] == [7]


def test_no_flags_change_nothing():
    assert parse() == Outer()


def test_flags_at_every_depth():
    config = parse(
        "--config.model.depth=8", "--config.other.rate=1", "--noconfig.model.residual",
        "--config.other.residual=false", "--config.model.name=post", "--config.seeds=5",
    )  # fmt: skip
    assert config.model == Inner(depth=8, residual=False, name="post")
    assert config.other == Inner(depth=7, rate=1.0, residual=False)
    assert type(config.other.rate) is float
    assert config.seeds == (5,)


def test_flags_round_trip():
    config = Outer(
        Inner(2, 1.2345678901234567e-08, False, "x"), Inner(0, -0.0, True, ""),
        (9, -1), (0.1, 1e300), ("b", "c d"),
    )  # fmt: skip
    assert parse(*flag_lines(config)) == config


def test_flags_round_trip_through_absl_serialization():
    """What absl would write into a flag file reads back as the same configuration."""
    values = flags.FlagValues()
    wanted = Outer(seeds=(3, 4), rates=(0.25, 1e-7))
    configs.define_flags(wanted, values)
    values(["program"])
    lines = [values[f"config.{leaf.path}"].serialize() for leaf in configs.leaves(wanted)]
    assert parse(*(line for line in lines if line)) == wanted


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1,2,3", (1, 2, 3)), ("(1, 2)", (1, 2)), ("[4]", (4,)), ("", ()), ("7,", (7,)), ("()", ())],
)
def test_tuples(text, expected):
    assert parse(f"--config.seeds={text}").seeds == expected


@pytest.mark.parametrize(
    "argument",
    ["--config.seeds=1,x", "--config.seeds=1.5", "--config.rates=a", "--config.model.depth=two",
     "--config.model.depth=1.5", "--config.model.rate=fast", "--config.model.residual=perhaps"],
)  # fmt: skip
def test_values_of_the_wrong_kind_name_their_flag(argument):
    with pytest.raises(flags.IllegalFlagValueError, match=argument.split("=")[0].strip("-")):
        parse(argument)


def test_unknown_flag():
    with pytest.raises(flags.UnrecognizedFlagError, match="config.model.deth"):
        parse("--config.model.deth=3")


def test_help_text_of_every_flag():
    values = flags.FlagValues()
    configs.define_flags(Outer(), values)
    for leaf in configs.leaves(Outer()):
        assert leaf.help in values[f"config.{leaf.path}"].help


def test_replace_touches_one_field_and_leaves_the_original():
    before = Outer()
    after = configs.replace(before, {"model.depth": 8, "seeds": (1,), "model.name": "post"})
    assert after == Outer(model=Inner(depth=8, name="post"), seeds=(1,))
    assert before == Outer()
    assert configs.replace(before, {}) == before


@pytest.mark.parametrize(
    ("path", "hint"),
    [("model.dept", "model.depth"), ("seed", "seeds"), ("modle.rate", "model.rate")],
)
def test_replace_with_an_unknown_path_suggests(path, hint):
    with pytest.raises(UserError, match=rf"^config\.{path}: no such field; did you mean '{hint}'"):
        configs.replace(Outer(), {path: 1})


def test_replace_refuses_a_whole_part_and_a_path_below_a_field():
    for path in ("model", "model.depth.x", "zzzzzz", ""):
        with pytest.raises(UserError, match="no such field") as caught:
            configs.replace(Outer(), {path: 1})
        assert "\n" not in str(caught.value)


def test_to_dict_is_json():
    assert configs.to_dict(Outer(rates=(0.5,)))["rates"] == [0.5]
    assert configs.to_dict(Outer())["model"] == dataclasses.asdict(Inner())


def test_digest_is_sha256_of_canonical_json():
    """The digest of {} as any SHA-256 tool gives it; key order and tuple or list do not matter."""
    assert configs.digest({}) == "44136fa3"
    assert configs.digest({"b": [1, 2.5], "a": {"c": None}}, 64) == configs.digest(
        {"a": {"c": None}, "b": (1, 2.5)}, 64
    )
    assert len(configs.digest({}, 12)) == 12


def test_digest_tells_values_apart():
    values = [{}, {"a": 1}, {"a": 2}, {"a": "1"}, {"a": True}, {"a": None}, {"a": [1]}, {"b": 1}]
    assert len({configs.digest(value) for value in values}) == len(values)


def test_digest_is_the_same_in_another_process():
    """Whatever the order of sets, the hash seed and the locale of that process."""
    code = "from normjax.configs import digest; print(digest({'é': [1e-08, 'x', None], 'a': {}}))"
    here = configs.digest({"a": {}, "é": [1e-08, "x", None]})
    for seed in ("0", "1"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "LC_ALL": "C"}
        there = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert there.stdout.strip() == here, there.stderr


def test_suggestions():
    assert suggest("sandwhich", ["sandwich", "pre"]) == "; did you mean 'sandwich'?"
    assert suggest("qqq", ["sandwich", "pre"]) == ""
    assert suggest("x", []) == ""
    message = r"^mlp=gleu: must be one of gelu, relu; did you mean 'gelu'"
    with pytest.raises(UserError, match=message):
        check_choice("mlp", "gleu", iter(["gelu", "relu"]))


def test_suggestions_ignore_case():
    assert suggest("RMSNorm", ["rmsnorm", "identity"]) == "; did you mean 'rmsnorm'?"


# --- limits ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Limited:
    count: int = configs.field(4, "a count", least=1, most=8)
    share: float = configs.field(0.5, "a share", above=0, below=1)
    kind: str = configs.field("on", "a kind", choices=lambda: KNOWN)
    rates: tuple[float, ...] = configs.field((), "rates", least=0, most=9, distinct=True)
    depths: tuple[int, ...] = configs.field((2, 4), "depths", least=1, most=9, fewest=2)
    kinds: tuple[str, ...] = configs.field((), "kinds", choices=lambda: KNOWN)
    free: float = configs.field(1.0, "anything finite")
    text: str = configs.field("", "any text")


@dataclasses.dataclass(frozen=True)
class Holder:
    usual: Limited = Limited(count=7)
    other: Limited = configs.part(Limited(), count={"least": 0}, depths={"fewest": 0})


KNOWN = ["on", "off"]
REFUSED = {
    "count=0: must be from 1 to 8; pass --config.count=4": {"count": 0},
    "count=9: must be from 1 to 8; pass --config.count=4": {"count": 9},
    "count=2.0: must be a whole number; pass --config.count=4": {"count": 2.0},
    "count=true: must be a whole number; pass --config.count=4": {"count": True},
    "share=0.0: must be above 0 and below 1; pass --config.share=0.5": {"share": 0.0},
    "share=nan: must be above 0 and below 1; pass --config.share=0.5": {"share": float("nan")},
    "share=x: must be a number; pass --config.share=0.5": {"share": "x"},
    "kind=onn: must be one of on, off; did you mean 'on'? pass --config.kind=on": {"kind": "onn"},
    "kind=zzz: must be one of on, off; pass --config.kind=on": {"kind": "zzz"},
    "rates=-1: must be from 0 to 9; pass --config.rates=2,3": {"rates": (2, -1, 3)},
    "rates=nan: must be from 0 to 9; pass --config.rates=": {"rates": (float("nan"),)},
    "rates=2,3,2: must list each value once; pass --config.rates=2,3": {"rates": (2, 3, 2)},
    "depths=5: must list at least 2; pass --config.depths=2,4": {"depths": (5,)},
    "depths=: must list at least 2; pass --config.depths=2,4": {"depths": ()},
    "depths=0: must be from 1 to 9; pass --config.depths=2,4": {"depths": (0, 3)},
    "kinds=of: must be one of on, off; did you mean 'off'? pass --config.kinds=on,off": {
        "kinds": ("on", "of")
    },
    "free=inf: must be finite; pass --config.free=1.0": {"free": float("inf")},
    "text=3: must be a text; pass --config.text=": {"text": 3},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_value_outside_its_limits_is_one_line_with_the_fix(message):
    with pytest.raises(UserError) as caught:
        configs.check(Limited(**REFUSED[message]))
    assert str(caught.value) == f"config.{message}"


@pytest.mark.parametrize(
    ("path", "value", "single"),
    [
        ("train.beta1", 0.99999999, "1"), ("train.beta2", 0.99999999, "1"),  # 1 - beta^t is 0
        ("train.adam_eps", 1e-60, "0"), ("train.adam_eps", 1e-39, "0"), ("train.clip", 1e-50, "0"),
        ("train.learning_rate", 1e-60, "0"), ("model.norm_eps", 1e-60, "0"),
        ("grid.learning_rates", (1e-3, 1e-60), "0"),
    ],
)  # fmt: skip
def test_a_number_that_float32_makes_another_kind_of_is_refused(path, value, single):
    """Right as it is written, and 0 or 1 where it is computed with: all updates 0 or NaN."""
    config = configs.replace(grid.ExperimentConfig(), {path: value})
    with pytest.raises(UserError, match=f"^config.{path}=.*, and in float32 it is {single}; pass "):
        configs.check(config)


def test_limits_are_held_to_at_every_depth_and_may_differ_by_place():
    configs.check(Holder())
    configs.check(Holder(other=Limited(count=0, depths=())))
    with pytest.raises(UserError, match=r"^c\.usual\.count=0: .* 1 to 8; pass --c\.usual\.count=7"):
        configs.check(Holder(usual=Limited(count=0)), "c")
    with pytest.raises(UserError, match=r"^config\.other\.count=9: must be from 0 to 8; pass .*=4"):
        configs.check(Holder(other=Limited(count=9)))


def test_names_that_came_later_are_allowed(monkeypatch):
    monkeypatch.setitem(globals(), "KNOWN", [*KNOWN, "mine"])
    configs.check(Limited(kind="mine", kinds=("mine",)))
    assert "one of on, off, mine" in next(
        leaf.help for leaf in configs.leaves(Limited()) if leaf.path == "kind"
    )


def outside(leaf):
    """Values that a field must refuse, each alone: beyond both ends, not finite, no such name."""
    limits, values = leaf.limits, []
    if leaf.kind in (int, float):
        low = limits.least if limits.above is None else limits.above
        high = limits.most if limits.below is None else limits.below
        assert low is not None and high is not None, f"{leaf.path} needs a lower and an upper end"
        step = 1 if leaf.kind is int else max(1e-9, 1e-9 * abs(high))
        values = [low - step, high + step]
        values += [low] * (limits.above is not None) + [high] * (limits.below is not None)
        values = [leaf.kind(value) for value in values]
        values += [math.nan, math.inf, -math.inf] if leaf.kind is float else []
    if limits.choices is not None:
        values = ["no such name", ""]
    return [((value,) if leaf.is_list else value, value) for value in values]


@pytest.mark.parametrize("experiment", cli.names())
def test_every_field_of_every_experiment_refuses_what_lies_outside(experiment):
    config = cli.find(experiment).get_config("default")
    for leaf in configs.leaves(config):
        for value, bad in outside(leaf):
            with pytest.raises(UserError) as caught:
                configs.check(configs.replace(config, {leaf.path: value}))
            message, flag = str(caught.value), f"config.{leaf.path}"
            assert message.startswith(f"{flag}={configs.shown(bad)}: must be "), message
            assert (leaf.limits.words in message) and f"pass --{flag}=" in message, message
            assert "\n" not in message
            fix = message.rpartition(f"--{flag}=")[2]
            values = flags.FlagValues()
            configs.define_flags(config, values)
            values(["program", f"--{flag}={fix}"])
            configs.check(configs.from_flags(config, values))  # the fix is one


@pytest.mark.parametrize("experiment", cli.names())
def test_every_preset_and_every_end_of_a_range_is_accepted(experiment):
    module = cli.find(experiment)
    for preset in module.PRESETS:
        configs.check(module.get_config(preset))
    config = module.get_config("default")
    for leaf in configs.leaves(config):
        names = leaf.limits.names()
        ends = [end for end in (leaf.limits.least, leaf.limits.most) if end is not None]
        for value in [leaf.kind(end) for end in ends] + names:
            given = value
            if leaf.is_list:  # in front of the usual ones, once
                given = tuple(dict.fromkeys((value, *leaf.usual)))[: len(leaf.usual) or 1]
            configs.check(configs.replace(config, {leaf.path: given}))
