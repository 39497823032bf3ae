"""What a process of a live federation sets up before its first array, and before anything imports gRPC."""

import contextlib
import ctypes
import gc
import os

import jax

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt


def set_up_server() -> None:
    """Settle uploads in the thread that asks: they are many and small, and handing them on costs more than they do."""
    os.environ.setdefault("PJRT_NPROC", "1")  # threads of XLA
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    set_up_client()
    allow_many_files()


def set_up_client() -> None:
    """Exchange models with little around them."""
    keep_memory()
    read_where_one_waits()


def read_where_one_waits() -> None:
    """Let threads that wait for gRPC read the sockets: its event engine hands each message through three of its own.

    Where nobody waits, as between two tries to connect, a timer looks after them; every 5 s would be too rarely.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
    os.environ.setdefault("GRPC_CLIENT_CHANNEL_BACKUP_POLL_INTERVAL_MS", "50")


def keep_modules() -> None:
    """What is loaded by now stays: Python need not look for garbage there, which it does again and again."""
    gc.collect()
    gc.freeze()


def keep_memory() -> None:
    """Models come and go all the time: memory that one leaves is kept for the next, not given back page by page."""
    with contextlib.suppress(OSError, AttributeError):  # only GNU's C library has it
        allocator = ctypes.CDLL("libc.so.6").mallopt
        for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD):
            allocator(option, 256 << 20)


def allow_many_files() -> None:
    """Every connection is an open file: take as many as this user may have."""
    with contextlib.suppress(ImportError):  # which Windows has not
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
