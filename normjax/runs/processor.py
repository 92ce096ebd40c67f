"""The processor that this process runs on: its name, usable cores, widest vector extension."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def name() -> str:
    """Return the processor's name as the system tells it."""
    return _field("model name") or platform.processor() or platform.machine()


def vector_isa() -> str:
    """Return the widest vector extension that XLA may use: rounding differs between them."""
    present = set(_field("flags").split())
    for extension in ("avx512f", "avx2", "avx", "sse4_2"):
        if extension in present:
            return extension
    return platform.machine()


def _field(wanted: str) -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(wanted):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""
