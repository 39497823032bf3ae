"""A server's files: readable only by their owner, and opened without following links."""

import os
from pathlib import Path


def open_private(path: Path, flags: int) -> int:
    """Open or create a file with mode 0600; raise if the path is a link, which another user may have created."""
    try:
        file = os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        if path.is_symlink():
            raise ValueError(f"{path} is a symbolic link, which is not allowed. Remove it.") from None
        raise error
    os.fchmod(file, 0o600)  # an older version may have created it with another mode
    return file


def require_folder(path: Path) -> None:
    """Create a folder for its owner only; raise if it is a link."""
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link, which is not allowed. Remove it.")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
