"""The program's numbers are those that were recorded; see goldens.py for what they are."""

import json

import goldens
import jax
import pytest

from normjax.runs import machine

pytestmark = pytest.mark.usefixtures("optimized")


@pytest.fixture(scope="module")
def stored():
    path = goldens.path_of_this_version()
    if not path.exists():
        # Another version's numbers, to the tolerance, are better than none.
        path = max(path.parent.glob("jax-*.json"), key=lambda p: int(p.stem.split(".")[-1]))
    return path, json.loads(path.read_text())


@pytest.mark.parametrize(
    "section",
    [*goldens.FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in goldens.SLOW)],
)
def test_values_are_those_recorded(stored, section):
    path, record = stored
    exact = (record["jax"], record["processor"]) == (jax.__version__, machine.vector_isa())
    if not exact and section in goldens.ONLY_EXACT:
        pytest.skip("decided by rounding: compared on the recorded processor and version only")
    assert section in record["sections"], f"run `{goldens.COMMAND} {section}`"
    computed = json.loads(json.dumps(goldens.SECTIONS[section]()))
    found = goldens.differences(record["sections"][section], computed, exact)
    assert not found, (
        f"{len(found)} golden values of {section} differ from {path.name}"
        f" ({'to the bit' if exact else f'by more than {goldens.TOLERANCE:g}'}):\n  "
        + "\n  ".join(found[:20])
        + f"\nIf this was meant, run `{goldens.COMMAND} {section}` and say in CHANGELOG.md that"
        " results move; if not, the change is a mistake"
    )


def test_a_difference_names_row_number_and_size():
    old = {"row": {"loss": 2.0, "digest": "sha256:a", "column": ["1.5", "pre"]}}
    assert goldens.differences(old, old | {"further": 1}, exact=True) == []
    new = {"row": {"loss": 2.0 + 1e-8, "digest": "sha256:b", "column": ["1.5", "post"]}}
    lines = goldens.differences(old, new, exact=True)
    assert lines[0].startswith("row/loss: 2.0 -> 2.00000001, differs by 1.0e-08")
    assert [line.split(":")[0] for line in lines] == ["row/loss", "row/digest", "row/column[1]"]
    assert goldens.differences(old, new, exact=False) == []
    assert goldens.differences(old, {"row": {}}, exact=False)[0] == "row/loss: missing"


def test_a_renamed_column_is_found_by_its_new_name(monkeypatch):
    monkeypatch.setattr(goldens, "COLUMNS", {"x": "value"})
    assert goldens.differences({"x": ["1"]}, {"value": ["1"]}, exact=True) == []
    assert goldens.differences({"x": ["1"]}, {"value": ["2"]}, exact=True)
