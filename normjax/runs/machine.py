"""The machine that this process runs on, and JAX set up for it before its first computation.

JAX is imported where it is set up only: whoever wants to know the cores need not wait for it.
"""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path
from typing import Any

from normjax.data import cache_folder
from normjax.errors import UserError

SETTINGS: dict[str, tuple[Any, str | None]] = {
    # Only checks of other people's code, which change no number; and a step that is not finite is
    # no error here: it is counted and skipped.
    "jax_numpy_rank_promotion": ("allow", None),
    "jax_numpy_dtype_promotion": ("standard", None),
    "jax_debug_key_reuse": (False, None),
    "jax_debug_nans": (False, None),
    "jax_debug_infs": (False, None),
    "jax_disable_jit": (False, "every program here is compiled"),
    "jax_no_tracing": (False, "programs are traced here"),
    "jax_no_execution": (False, "programs are run here"),
    "jax_transfer_guard": (None, "batches go to the device and losses come back"),
    "jax_transfer_guard_host_to_device": (None, "batches go to the device"),
    "jax_transfer_guard_device_to_host": (None, "losses come back from the device"),
    "jax_transfer_guard_device_to_device": (None, "states move between devices"),
    "jax_default_prng_impl": ("threefry2x32", "a seed stands for its numbers"),
    "jax_threefry_partitionable": (True, "a seed stands for its numbers"),
    "jax_random_seed_offset": (0, "a seed stands for its numbers"),
}  # fmt: skip
"""By setting of JAX: the value that the program needs, and why another one is refused; where no
reason is given the program sets it for itself."""


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads() -> int:
    """Return for how many threads XLA divides a program on a CPU: rounding differs between them.

    That is as many as there are devices, if they are more than this.
    """
    told = os.environ.get("NPROC", "")
    return int(told) if told.isdecimal() and int(told) else usable_cores()


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


def import_jax() -> Any:
    """Import JAX, set for this process whatever :data:`SETTINGS` says; return the module.

    Raises:
      UserError: one of its variables holds what cannot be, or what the program cannot work under.
    """
    try:
        import jax
    except ImportError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"JAX cannot start: {reason}; look at {_variables() or 'its set-up'}"
        ) from None
    for name, (needed, why) in SETTINGS.items():
        value = getattr(jax.config, name, needed)
        value = getattr(value, "value", value)  # of an enum
        if value == needed or (needed is None and value in ("allow", "log")):
            continue
        if why is not None:
            raise UserError(f"{name.upper()}={value}: {why}; unset {name.upper()}")
        jax.config.update(name, needed)
    return jax


def check_devices() -> None:
    """Find the devices that JAX was told to use.

    Raises:
      UserError: there are none of that kind.
    """
    jax = import_jax()
    try:
        jax.local_devices()
    except Exception as error:  # of several kinds; some have no words
        told = next((f"{n}={os.environ[n]}" for n in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME")
                     if os.environ.get(n)), "")  # fmt: skip
        reason = " ".join(str(error).split()) or "JAX finds none"
        fix = f"unset {told.split('=')[0]}, or name a platform that is here: JAX_PLATFORMS=cpu"
        start = f"{told}: " if told else ""
        raise UserError(
            f"{start}no such device here ({reason[:200]}); {fix if told else 'JAX_PLATFORMS=cpu'}"
        ) from None


def _variables() -> str:
    """Return the environment variables of JAX and XLA that are set, as a person would set them."""
    return ", ".join(
        f"{name}={value}" for name, value in sorted(os.environ.items())
        if name.startswith(("JAX_", "XLA_"))
    )  # fmt: skip


def memory_bytes() -> int:
    """Return the memory that this process may use at most: of the machine, its group, its limit."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    found += [n for n in (resource.getrlimit(resource.RLIMIT_AS)[0],) if n > 0]
    found += _group_limits()
    return min(found)


def _group_limits() -> list[int]:
    """Return the limits of memory of this process's control groups, those around them included."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        root = Path("/sys/fs/cgroup", kinds)
        name = "memory.limit_in_bytes" if kinds else "memory.max"
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            try:
                text = (folder / name).read_text(encoding="utf-8").strip()
            except OSError:
                text = ""
            found += [int(text)] if text.isdecimal() and int(text) > 0 else []
            if folder == root:
                break
    return found


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
    jax = import_jax()
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
