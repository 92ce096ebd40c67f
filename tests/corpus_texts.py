"""A short text, and what the tests of corpora do with texts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from normjax.data import corpora
from normjax.data.corpora import DataConfig
from normjax.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
VERSE = "The quick brown fox\njumps over the lazy dog;\nagain, again, again!\n"


def write(path: Path, text: str = VERSE * 20) -> str:
    """Write a text file and return its path."""
    path.write_bytes(text.encode("utf-8"))
    return str(path)


def error(**fields) -> str:
    """Return the one line that a configuration of data is refused with."""
    with pytest.raises(UserError) as caught:
        corpora.open_corpus(DataConfig(**fields))
    message = str(caught.value)
    assert "\n" not in message
    return message


def run(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter and return what it printed last."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
