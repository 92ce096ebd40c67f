"""The mistakes that are made on purpose: of the mathematics, one at a time, the same each time."""

import ast

import pytest

from tests import mutants

TEXT = '''"""Text 1 + 1."""
def f(x: int = 1) -> float:
    if x < 0:
        raise ValueError(f"x={x + 1}: below {0}")
    return abs(x) + min(x, 2.5) if not x > 3 else -x
'''


def test_only_what_is_computed_is_changed():
    """Not texts, messages, annotations, nor what is refused."""
    found = {change.after for change in mutants.changes("f.py", TEXT)}
    assert found == {
        "abs(x)  ->  x", "abs(x) + min(x, 2.5)  ->  abs(x) - min(x, 2.5)",
        "min(x, 2.5)  ->  max(x, 2.5)", "2.5  ->  5.0", "not x > 3  ->  x > 3", "-x  ->  x",
        "x > 3  ->  x >= 3", "x > 3  ->  x < 3", "3  ->  4",
        "abs(x) + min(x, 2.5) if not x > 3 else -x  ->"
        "  abs(x) + min(x, 2.5) if not not x > 3 else -x",
    }  # fmt: skip


@pytest.mark.parametrize("name", mutants.GROUPS)
def test_every_change_of_a_sample_is_one_of_its_files(name):
    group = mutants.GROUPS[name]
    assert all((mutants.ROOT / path).is_file() for path in (*group.files, *group.tests))
    some = mutants.sample(mutants.ROOT, group.files, 12, "0")
    assert len({(c.file, c.line) for c in some}) == 12
    assert some == mutants.sample(mutants.ROOT, group.files, 12, "0")
    for change in some:
        right = ast.parse((mutants.ROOT / change.file).read_text())
        assert ast.dump(ast.parse(change.source)) != ast.dump(right)
