"""Compare every row that has a model in the transformers library with it, and print the table.

python -m tests.parity             some minutes; ends with 1 where a row differs
python -m tests.parity --write     and stores the table, where none does
"""

import argparse
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import torch
import transformers

from experiments.atlas import proofs
from tests.parity.comparisons import NO_ROWS, cases, compare, row_of


def main() -> int:
    """Print the table; return 1 where a row differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"store it as {proofs.PATH.name}")
    arguments = parser.parse_args()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"{'row':20}{'model':18}{'compared':22}{'dtype':9}{'difference':>11}{'tolerance':>11}")
    lines, wrong = [], 0
    for case in cases():
        found = compare(*case)
        c, compared = found.comparison, "whole decoder" if found.whole else "residual scheme"
        differs = not found.largest <= found.tolerance
        wrong += differs
        print(
            f"{c.row:20}{c.model_type:18}{compared:22}{found.dtype:9}{found.largest:11.1e}"
            f"{found.tolerance:11.1e}{'  DIFFERS' if differs else ''}"
            f"{'  ' + c.note if c.note else ''}",
            flush=True,
        )
        lines.append({
            "row": c.row, "fingerprint": proofs.fingerprint(row_of(c)), "model_type": c.model_type,
            "transformers": transformers.__version__, "torch": torch.__version__.split("+")[0],
            "compared": compared, "note": c.note, "dtype": found.dtype,
            "difference": f"{found.largest:.1e}", "tolerance": f"{found.tolerance:.1e}",
        })  # fmt: skip
    for model_type, what in NO_ROWS.items():
        print(f"no row: {model_type}: {what}")
    if arguments.write and not wrong:
        proofs.write(lines)
        print(f"wrote {proofs.PATH}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
