"""What the fuzz tests share: odd values, documents that are changed somewhere, and bounds."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import sys
import time
import tracemalloc
from pathlib import Path

from absl import flags
from hypothesis import strategies as st

from experiments import cli
from normjax.runs import files

MOST_SECONDS = 20
"""Of processor time for one example, on a slow machine and with memory traced."""
MOST_BYTES = 1 << 29
ODD_TEXTS = (
    "", " ", "\0", "a\0b", "\n", "\r\n", "\ud800", "\udcff", "\ufeff", "\u202e", "\x1b[31m", "é",
    "e\u0301", "٣", "²", "½", "Ⅷ", "𝟗", "nan", "inf", "-inf", "-0", "1e400", "-1e-400", "0x10",
    "1_0", "+1", "1.", ".5", "1,2", "1,,2", ",", "[1]", "[", "]", "((", "()", "{}", "--", "-", "=",
    "a=b", "True", "none", "null", "~", "*", "?", "%s", "{0}", "$HOME", "`", "'", '"', "\\", ".",
    "..", "a" * 300, "9" * 5000, "a," * 3000, "[" * 3000, "task:", "tfds:", "task:copy",
)  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(ODD_TEXTS),
    st.text(st.characters(exclude_characters="/"), max_size=12),
)
"""Without a slash: what names a file stays in the folder that the test works in."""
WHOLE = st.one_of(
    st.integers(-3, 70), st.integers(-(2**70), 2**70),
    st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, -(10**400)]),
)  # fmt: skip
SCALARS = st.one_of(st.none(), st.booleans(), WHOLE, st.floats(), TEXTS)


def nested(depth, inner=0, kind=list):
    """Return a value within so many brackets."""
    for _ in range(depth):
        inner = [inner] if kind is list else {"a": inner}
    return inner


VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(TEXTS, SCALARS, max_size=3),
    st.builds(nested, st.sampled_from([2, 30, 150, 300]), SCALARS, st.sampled_from([list, dict])),
)
"""What JSON can say, and NaN and infinities, which Python's says as well."""


@st.composite
def changed(draw, document, most=3):
    """Return a document of JSON with up to so many changes, most of them near its root."""
    document = {"": json.loads(json.dumps(document))}
    for _ in range(draw(st.integers(1, most))):
        holder, last = document, ""
        while isinstance(holder[last], dict | list) and holder[last] and draw(st.integers(0, 2)):
            holder = holder[last]
            last = draw(st.sampled_from(keys(holder)))
        deed = draw(st.sampled_from(["other", "other", "drop", "add", "twice", "swap"]))
        if deed == "other" or holder is document:
            holder[last] = draw(VALUES)
        elif deed == "drop":
            del holder[last]
        elif deed == "swap":
            other = draw(st.sampled_from(keys(holder)))
            holder[last], holder[other] = holder[other], holder[last]
        elif isinstance(holder, list):
            holder.insert(0, holder[last] if deed == "twice" else draw(VALUES))
        else:
            holder[draw(TEXTS)] = holder[last] if deed == "twice" else draw(VALUES)
    return document[""]


def keys(holder):
    """Return what the values of a dict or a list are found by."""
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


@contextlib.contextmanager
def bounded(most_bytes=MOST_BYTES):
    """Hold what is done within the bounds of time and memory."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    held, start = tracemalloc.get_traced_memory()[0], time.process_time()
    try:
        yield
        taken = time.process_time() - start
        most = tracemalloc.get_traced_memory()[1] - held
    finally:
        if not tracing:
            tracemalloc.stop()
    assert taken < MOST_SECONDS and most < most_bytes, (taken, most)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip


def call(*arguments):
    """Carry out a command line in this process; return exit code, output and error output."""
    values = flags.FlagValues()
    cli.define_flags(values)
    argv, before = ["launch.py", *arguments], sys.argv
    sys.argv = argv
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), bounded():
            cli.parse(values, list(argv))
            code = cli.carry_out(values)
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    return code or 0, out.getvalue(), err.getvalue()


def assert_one_line(message):
    """Hold a message to what a person reads: one line that is not endless."""
    assert message and "\n" not in message and len(message) < 20_000, message[:2000]


def resealed(path: Path, value) -> None:
    """Write a document with a seal that holds, whatever it says."""
    if isinstance(value, dict):
        plain = {k: v for k, v in value.items() if k != "seal"}
        text = json.dumps(files.strict(plain), sort_keys=True, separators=(",", ":"))
        value = plain | {"seal": files.sha256(text.encode())}
    path.write_text(json.dumps(value))
