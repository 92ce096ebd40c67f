"""Where a run is computed: versions, devices, processor, commit; and what differs on resume."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

import normjax
from normjax import plugins
from normjax.runs import machine

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def environment(flags: list[str] | None = None) -> dict[str, Any]:
    """Return what a run's environment.json holds."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
            "normjax": normjax.__version__,
        },
        "devices": [f"{d.platform}:{d.id}" for d in jax.local_devices()],
        "platform": jax.default_backend(),
        "cpu": machine.processor_name(),
        "cores": machine.usable_cores(),
        "commit": _commit(),
        **plugins.entry(),
        "flags": list(sys.argv[1:] if flags is None else flags),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "isa": machine.vector_isa(),
        "hostname": socket.gethostname(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what has changed between two environments that may change a result's last bits.

    >>> old = {"versions": {"jax": "0.10.1"}, "isa": "avx2", "xla_flags": "", "platform": "cpu"}
    >>> new = {"versions": {"jax": "0.10.2"}, "isa": "avx2", "xla_flags": "", "platform": "cpu"}
    >>> differences(old, new)
    ['jax 0.10.1 -> 0.10.2']
    """
    changed = [
        f"{name} {version} -> {now['versions'].get(name)}"
        for name, version in before.get("versions", {}).items()
        if now["versions"].get(name) != version
    ]
    for name in ("platform", "isa", "xla_flags", "devices"):
        if name in before and before[name] != now.get(name):
            changed.append(f"{name} {before[name]} -> {now.get(name)}")
    return changed


def _commit() -> str | None:
    """Return the commit of the checkout that this package lies in, or None outside of one."""
    folder = Path(__file__).resolve().parent
    try:
        run = lambda *a: subprocess.run(  # noqa: E731
            ["git", "-C", str(folder), *a], capture_output=True, text=True, timeout=10
        )
        # Installed into another project's environment, it lies in that project's checkout.
        tracked = run("ls-files", "--error-unmatch", Path(__file__).name)
        head = run("rev-parse", "HEAD")
        if tracked.returncode or head.returncode:
            return None
        dirty = run("status", "--porcelain", "--untracked-files=no").stdout.strip()
        return head.stdout.strip() + ("+dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None
