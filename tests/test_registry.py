"""Tables of named rows: what may be added to them, and under which names."""

import copy

import numpy as np
import pytest

from normjax.errors import UserError
from normjax.registry import Registry


@pytest.fixture
def table():
    return Registry("norm", {"plain": (1, 2)})


def test_a_row_is_added_and_returned(table):
    row = object()
    assert table.register("mine_2", row) is row
    assert table["mine_2"] is row and list(table) == ["plain", "mine_2"]


def test_a_table_is_a_dict_that_copies(table):
    assert table == {"plain": (1, 2)}
    copied = copy.copy(table)
    assert type(copied) is Registry and copied.kind == "norm"
    copied.register("other", 3)
    assert "other" not in table


def test_a_taken_name_is_refused_unless_the_row_is_equal_or_to_be_replaced(table):
    table.register("plain", (1, 2))
    with pytest.raises(UserError, match=r"^norm 'plain': the name is taken.*replace=True$"):
        table.register("plain", (1, 3))
    assert table["plain"] == (1, 2)
    assert table.register("plain", (1, 3), replace=True) == (1, 3)


@pytest.mark.parametrize(
    "name", ["", "A", "aB", "1a", "_a", "a-b", "a b", "a.b", "a/b", "a\n", "é", "a,b", 3, None]
)
def test_a_name_that_is_none_is_refused(table, name):
    with pytest.raises(UserError, match=r"^norm .*small letter.*my_norm$") as caught:
        table.register(name, 1, replace=True)
    assert "\n" not in str(caught.value) and list(table) == ["plain"]


def test_rows_that_cannot_be_compared_are_different(table):
    table.register("arrays", (np.zeros(3),))
    with pytest.raises(UserError, match="taken"):
        table.register("arrays", (np.zeros(3),))
