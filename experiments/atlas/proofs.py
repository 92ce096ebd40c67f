"""What rows were compared with: the stored table of ``make test-parity``, read for a page.

A line counts only while the row is what was compared: it carries a fingerprint of it.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normjax.decoder_config import decided
from normjax.placements import PLACEMENTS

PATH = Path(__file__).parent / "parity.csv"
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
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(lines: Sequence[dict[str, str]], path: Path = PATH) -> None:
    """Write the lines of the table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def of(name: str) -> list[dict[str, str]]:
    """Return the lines of a placement that are of the row as it is now."""
    now = fingerprint(PLACEMENTS[name])
    return [line for line in read() if (line["row"], line["fingerprint"]) == (name, now)]
