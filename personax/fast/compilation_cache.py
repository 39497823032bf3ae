"""A cache of compiled programs between runs of the command line, so that a second start does not compile again."""

import os
import platform
from pathlib import Path

import jax
from platformdirs import user_cache_path

VARIABLE = "PERSONAX_COMPILED"
OFF = ("0", "off", "no")


def compiled_folder() -> Path | None:
    """The folder in the user's cache, or the one that the variable names; None where it says off."""
    given = os.environ.get(VARIABLE, "")
    if given.lower() in OFF:
        return None
    # A home may be shared by machines with other processors, whose programs are not for this one.
    return Path(given).expanduser() if given else user_cache_path("personax") / "compiled" / platform.node()


def keep_compiled() -> None:
    """Keep what is compiled from now on. JAX's own variable JAX_COMPILATION_CACHE_DIR goes before ours."""
    folder = compiled_folder()
    if folder is None or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The small programs too: a start has some sixteen, and compiling them again takes longer than reading them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
