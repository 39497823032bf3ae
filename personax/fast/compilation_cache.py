"""A cache of compiled programs that makes later runs of the command line start faster."""

import os
import platform
from pathlib import Path

import jax
from platformdirs import user_cache_path

VARIABLE = "PERSONAX_COMPILED"
OFF = ("0", "off", "no")


def compiled_folder() -> Path | None:
    """Return the folder in the user's cache, or the one that the variable names; None if it is "off"."""
    given = os.environ.get(VARIABLE, "")
    if given.lower() in OFF:
        return None
    # Machines with different processors may share a home folder but not compiled programs.
    return Path(given).expanduser() if given else user_cache_path("personax") / "compiled" / platform.node()


def keep_compiled() -> None:
    """Cache all programs compiled from now on. JAX's own variable JAX_COMPILATION_CACHE_DIR has priority."""
    folder = compiled_folder()
    if folder is None or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Cache small programs too: a start has about sixteen, and compiling them takes longer than reading them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
