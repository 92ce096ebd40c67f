"""The examples of README.md run as they stand, on a run made for them."""

import re
from pathlib import Path

import pytest

from experiments import ablation
from normjax import configs
from normjax.runs.experiment import Options

ROOT = Path(__file__).parents[1]
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def test_there_are_three_examples():
    assert len(EXAMPLES) == 3


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with a finished grid of one run in runs/ablation-default."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "text.txt").write_text("to be or not to be, that is the question: " * 60)
    config = configs.replace(ablation.get_config("smoke"), {
        "grid.arms": ("full",), "grid.seeds": 1, "train.steps": 2, "train.warmup_steps": 1,
        "data.corpus": str(folder / "text.txt"), "data.cache_dir": str(folder / "cache"),
    })  # fmt: skip
    ablation.run(config, "smoke", Options(folder / "runs" / "ablation-default", "none", live=False))
    return folder


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    exec(compile(EXAMPLES[number], f"README example {number + 1}", "exec"), {})
    out = capsys.readouterr().out.splitlines()
    if number == 0:
        assert out[0].startswith("power_norm: closed form agrees with jax.jacfwd")
        largest, smallest = (float(x) for x in out[1].strip("[]").split())
        assert largest > 0.5 and abs(smallest) < 1e-14
    elif number == 1:
        assert out[0] == "(32, 64, 64)"
        assert "RadialReport(rr=" in out[1] and "complete=False, resolved=True" in "".join(out[2:])
    else:
        steps = [line.split()[0] for line in out]
        assert steps == ["0", "2"]
        raw, deflated = (float(x) for x in out[-1].split()[1:])
        assert 1 < deflated <= raw * (1 + 1e-9)


def test_every_public_name_loads():
    import normjax

    for name in normjax.__all__:
        assert getattr(normjax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        normjax.no_such_name  # noqa: B018
