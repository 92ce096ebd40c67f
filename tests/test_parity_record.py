"""The stored table of comparisons with the transformers library speaks of today's rows."""

import pytest

from experiments.atlas import proofs
from normjax.placements import PLACEMENTS

LINES = proofs.read()


@pytest.mark.parametrize("line", LINES, ids=lambda x: f"{x['row']}-{x['model_type']}")
def test_a_line_is_of_the_row_as_it_is(line):
    assert tuple(line) == proofs.COLUMNS and line["row"] in PLACEMENTS
    found = proofs.fingerprint(PLACEMENTS[line["row"]])
    assert line["fingerprint"] == found, f"{line['row']} has changed: run `{proofs.COMMAND}`"
    assert float(line["difference"]) <= float(line["tolerance"])


def test_the_table_has_both_precisions_and_both_kinds():
    assert {x["dtype"] for x in LINES} == {"float64", "float32"}
    assert {x["compared"] for x in LINES} == {"residual scheme", "whole decoder"}
    assert len({x["row"] for x in LINES}) >= 15


def test_another_number_is_another_fingerprint():
    pre, minicpm = (proofs.fingerprint(PLACEMENTS[name]) for name in ("pre", "minicpm"))
    assert pre != minicpm and len(pre) == 12
    assert proofs.fingerprint(PLACEMENTS["minicpm"], 5) != minicpm
