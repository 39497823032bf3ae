"""Lock files, held by one process or thread at a time and released when the process ends."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Taken(ValueError):
    """Another process uses the folder."""


@contextlib.contextmanager
def sole_user(path: Path, what: str = "") -> Iterator[None]:
    """Hold the lock file `path` or raise `Taken`. The file names the process that holds it.

    `what` names in the error what the lock is for; by default the folder of the file.
    """
    with open(path, "a+", opener=_without_links) as file:
        if not _lock(file):
            file.seek(0)
            who = file.read().strip()
            raise Taken(f"{what or path.parent} is used by process {who}. Wait for its end, or use another.")
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextlib.contextmanager
def taking_turns(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`. If it is held already, call `waiting` and wait until it is released.

    If files cannot be locked, as on some network file systems, this does not wait.
    """
    with open(path, "ab", opener=_without_links) as file:
        with contextlib.suppress(OSError):
            if not _lock(file):
                waiting()
                _lock(file, wait=True)
        yield


def _without_links(path: str, flags: int) -> int:
    """Open a lock file; a link in its place, which might lead to someone's file, is an error."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _lock(file: IO, wait: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process or thread has locked it."""
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True
