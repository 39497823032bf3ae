"""Files of a server: opened without following links, for their owner alone."""

import os
from pathlib import Path


def open_private(path: Path, flags: int) -> int:
    """Open or create a file with mode 0600; raise if the path is a link, which someone else may have put there."""
    try:
        file = os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        if path.is_symlink():
            raise ValueError(f"{path} is a link, which is not followed. Remove it.") from None
        raise error
    os.fchmod(file, 0o600)  # of an older version it may have been more
    return file


def require_folder(path: Path) -> None:
    """Make a folder for its owner alone; raise if it is a link."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, which is not followed. Remove it.")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
