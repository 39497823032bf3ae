"""Process settings for a live federation, to be made before the first array exists and before gRPC is imported."""

import contextlib
import ctypes
import gc
import os

import jax

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of mallopt


def set_up_server() -> None:
    """Settle uploads in the calling thread. They are small, so passing them to another thread would cost more."""
    os.environ.setdefault("PJRT_NPROC", "1")  # number of threads in XLA
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    set_up_client()
    allow_many_files()


def set_up_client() -> None:
    """Reduce the overhead of exchanging models."""
    keep_memory()
    read_where_one_waits()


def read_where_one_waits() -> None:
    """Let threads that wait for gRPC read the sockets: its event engine passes each message through three threads.

    When no thread waits, as between two attempts to connect, a timer polls; the default of 5 s is too slow.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
    os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "50")


def keep_modules() -> None:
    """Exempt everything that is loaded by now from garbage collection."""
    gc.collect()
    gc.freeze()


def keep_memory() -> None:
    """Keep the memory of a freed model for the next one rather than returning it to the system."""
    with contextlib.suppress(OSError, AttributeError):  # only the GNU C library has this function
        allocator = ctypes.CDLL("libc.so.6").mallopt
        for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            allocator(option, 256 << 20)


def allow_many_files() -> None:
    """Raise the limit on open files to this user's maximum, because every connection is an open file."""
    with contextlib.suppress(ImportError):  # Windows does not have this module
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
