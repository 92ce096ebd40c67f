"""Set JAX up for this machine, before its first computation: devices and compiled programs."""

from __future__ import annotations

import jax

from normjax.data import token_cache
from normjax.errors import UserError
from normjax.runs import processor


def set_up(cpu_devices: int = 0, compilation_cache: str = "") -> None:
    """Give a CPU its host devices and keep compiled programs from one start to the next.

    Args:
      cpu_devices: host devices on a CPU, each of which trains a run; 0 for one per usable core.
      compilation_cache: folder of compiled programs; empty for one in the user's cache, "off" for
        none. Results do not depend on it: it holds the programs that would be compiled again.

    Raises:
      UserError: a number of devices that cannot be.
    """
    cores = processor.usable_cores()
    if not 0 <= cpu_devices <= 1024:
        raise UserError(
            f"--cpu_devices={cpu_devices}: must be from 0 (one per core, here {cores}) to 1024"
        )
    # Not where it is so already: a plug-in may have computed since then.
    if jax.config.jax_num_cpu_devices != (cpu_devices or cores):  # type: ignore[missing-attribute]
        jax.config.update("jax_num_cpu_devices", cpu_devices or cores)
    if compilation_cache != "off":
        # A program compiled for one processor may not run on another that shares the folder.
        folder = f"programs-{jax.__version__}-{processor.vector_isa()}"
        default = token_cache.root("") / folder
        jax.config.update("jax_compilation_cache_dir", compilation_cache or str(default))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
