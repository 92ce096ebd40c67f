"""The segments of a run: what another value means when it goes on, and how that is said.

A run that is stopped may go on elsewhere, with other versions or other code. Its manifest keeps
each part under what made it; nothing is overwritten. No JAX is imported here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from normjax import configs
from normjax.runs import files

REFUSE, WARN, FREE = "refuse", "warn", "free"
CLASSES = {
    # What defines a run: another value is another run.
    "config.model": REFUSE, "config.hyper": REFUSE, "config.data.fingerprint": REFUSE,
    "config.data.window": REFUSE, "config.train": REFUSE,
    # How it is computed: said, and shown as a segment, because last bits may differ.
    **{f"config.train.{name}": WARN for name in ("chunk_steps", "parallel", "lanes")},
    **{f"environment.{name}": WARN
       for name in ("versions", "devices", "platform", "isa", "xla_flags", "code", "settings",
                    "threads", "devices_taken")},
    # What no number depends on.
    **{f"config.train.{name}": FREE for name in (
        "checkpoint_seconds", "checkpoint_every", "keep_checkpoints", "diagnostics",
        "diagnostic_points", "diagnostic_every")},
    "config": FREE, "environment": FREE,
}  # fmt: skip
"""What another value of a field means for a run that goes on; the longest name that fits counts."""
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return what has changed between two segments of a run, by what it means.

    Args:
      before, now: {"config": ..., "environment": ...}.

    Returns:
      {REFUSE: [...], WARN: [...], FREE: [...]}, each "field: old -> new".

    >>> old = {"config": {}, "environment": {"versions": {"jax": "0.10.1"}, "hostname": "a"}}
    >>> new = {"config": {}, "environment": {"versions": {"jax": "0.10.2"}, "hostname": "b"}}
    >>> differences(old, new)["warn"]
    ['environment.versions.jax: "0.10.1" -> "0.10.2"']
    """
    found: dict[str, list[str]] = {REFUSE: [], WARN: [], FREE: []}
    kept = ("config", "environment")
    old, new = ({k: json.loads(files.canonical(s[k])) for k in kept} for s in (before, now))
    for each in configs.differences(old, new):
        line = _DIGEST.sub(r"\1", each)  # enough of it to tell two apart
        found[_class(line.split(":", 1)[0])].append(line)
    return found


def _class(field: str) -> str:
    parts = field.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((CLASSES[name] for name in names if name in CLASSES), WARN)


def said(segments: Sequence[Mapping[str, Any]]) -> str:
    """Return the segments of a run that has several, in words; "" for one.

    >>> made = [{"from": 0, "config": {}, "environment": {"isa": "avx2"}},
    ...         {"from": 40, "config": {}, "environment": {"isa": "sse4_2"}}]
    >>> said(made)
    'from step 40 with environment.isa: "avx2" -> "sse4_2"'
    """
    parts = []
    for before, now in zip(segments[:-1], segments[1:], strict=True):
        found = differences(before, now)
        changed = found[REFUSE] + found[WARN]
        parts.append(f"from step {now['from']} with {'; '.join(changed[:8]) or 'nothing changed'}")
    return "; ".join(parts)
