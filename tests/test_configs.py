"""Configurations: flags, dotted paths, JSON and digests."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from normjax import configs
from normjax.errors import UserError, check_choice, suggest

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
