"""A short list of the faults of faults.py, in make test-all; `make test-faults` tries more."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_nothing_is_lost_by_a_few_faults():
    # A process of its own: it forks, which a process that has computed must not.
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--kills=1", "--damage=2", "--changed=1",
         "--limits=1", "--disks=1", "--seed=3"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("seed 3\n") and re.search(r"killed +1 +0\n", done.stdout)
