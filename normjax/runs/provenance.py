"""Where and by what a run is computed: versions, devices, processor, code, settings of JAX."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
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


SILENT = re.compile(
    r".*(cache|log|trace|debug_|dump|pgle|pprint|location|explain|_dir|checks|leak|absl|jaxpr_|guard)"
    r".*|jax_platforms|jax_num_cpu_devices"
)
"""Settings of JAX that no number depends on, or that stand under another name."""


def environment(flags: list[str] | None = None) -> dict[str, Any]:
    """Return where and by what a segment of a run is computed."""
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
        "threads": max(machine.threads(), jax.local_device_count())
        if jax.default_backend() == "cpu" else None,
        "commit": _commit(),
        "code": code(),
        **plugins.entry(),
        "flags": list(sys.argv[1:] if flags is None else flags),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "settings": {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in sorted(jax.config.values.items())
            if value is not None and not SILENT.fullmatch(name)
        },
        "isa": machine.vector_isa(),
        "hostname": socket.gethostname(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


@functools.cache
def code() -> str:
    """Return the SHA-256 of the package's own source files, names and contents."""
    folder = Path(normjax.__file__).parent
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        total.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return total.hexdigest()


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
