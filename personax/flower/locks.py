"""A folder that one process at a time may use."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Taken(ValueError):
    """Another process uses the folder."""


@contextlib.contextmanager
def sole_user(path: Path) -> Iterator[None]:
    """Hold this lock file, which has the number of the process that holds it. The end of a process frees its locks."""
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            who = lock.read().strip()
            raise Taken(f"{path.parent} is used by process {who}. Wait for its end, or use another.") from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield
