"""The table of what was compared: ``experiments/atlas/parity.csv``. Needs neither torch nor JAX's
64-bit mode; a page or a test can read it anywhere."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

from normjax.decoder_config import decided

PATH = Path(__file__).parent.parent.parent / "experiments" / "atlas" / "parity.csv"
COLUMNS = (
    "row", "fingerprint", "model_type", "transformers", "torch", "compared", "note", "dtype",
    "difference", "tolerance",
)  # fmt: skip
COMMAND = "make test-parity and python -m tests.parity --write"


def fingerprint(row: Any, depth: int = 4) -> str:
    """Return 12 hex digits of a placement's record at a depth, without what only readers see."""
    text = json.dumps(decided(row.record(depth)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def read(path: Path = PATH) -> list[dict[str, str]]:
    """Return the lines of the table; none where it was never written."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(lines: list[dict[str, str]], path: Path = PATH) -> None:
    """Write the lines of the table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
