"""The machine that this process runs on, and JAX set up for it before its first computation.

JAX is imported where it is set up only: whoever wants to know the cores need not wait for it.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

from normjax.data import cache_folder
from normjax.errors import UserError


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
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


def set_up(cpu_devices: int = 0, programs: str = "", cache: Path | None = None) -> None:
    """Give a CPU its host devices and keep compiled programs from one start to the next.

    Args:
      cpu_devices: host devices on a CPU, each of which trains a run; 0 for one per usable core.
      programs: folder of compiled programs; empty for one in ``cache``, "off" for none. Results do
        not depend on it: it holds the programs that would be compiled again. None are kept where
        others may write to it.
      cache: the user's cache; None keeps no programs there.

    Raises:
      UserError: a number of devices that cannot be.
    """
    import jax

    cores = usable_cores()
    if not 0 <= cpu_devices <= 1024:
        raise UserError(
            f"--cpu_devices={cpu_devices}: must be from 0 (one per core, here {cores}) to 1024"
        )
    # Not where it is so already: a plug-in may have computed since then.
    if jax.config.jax_num_cpu_devices != (cpu_devices or cores):  # type: ignore[missing-attribute]
        jax.config.update("jax_num_cpu_devices", cpu_devices or cores)
    if not programs and cache is not None:
        # A program compiled for one processor may not run on another that shares the folder.
        programs = str(cache / f"programs-{jax.__version__}-{vector_isa()}")
    # Machine code is run: it is taken from, and put into, a folder of one's own only.
    if programs not in ("", "off") and ("://" in programs or cache_folder.make(Path(programs))):
        jax.config.update("jax_compilation_cache_dir", programs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
