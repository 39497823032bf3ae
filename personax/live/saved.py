"""Saved states of a live run, to which its operator can roll back: `saved/VERSION` in the run folder."""

import shutil
from pathlib import Path
from typing import Any

from personax.experiment import checkpoint
from personax.live.files import require_folder
from personax.live.ledger import Ledger
from personax.live.log import logger
from personax.typing import PyTree


def keep(folder: Path, version: int, number: int, tree: PyTree, about: dict[str, Any], most: int) -> None:
    """Save the state of a version, and keep only the newest `most` states."""
    require_folder(folder)
    place = folder / f"{version:08d}"
    checkpoint.save(place, number, tree, about, private=True)
    for old in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-most]:
        if not old.is_symlink() and old != place:
            shutil.rmtree(old)


def versions(folder: Path) -> list[int]:
    """The saved versions in increasing order."""
    return sorted(int(path.name) for path in folder.glob("[0-9]*") if path.is_dir())


def load(folder: Path, version: int, template: PyTree) -> tuple[PyTree, Ledger]:
    """Load the state of a saved version."""
    known = versions(folder)
    if version not in known:
        there = ", ".join(map(str, known)) or "none yet"
        raise ValueError(f"Version {version} is not saved in {folder}. Saved versions: {there}.")
    found = checkpoint.load(folder / f"{version:08d}", template, notify=logger.warning)
    if found is None:
        raise ValueError(f"{folder / f'{version:08d}'} has no state. Saved versions: {', '.join(map(str, known))}.")
    return found.tree, Ledger.from_table(found.about["ledger"])
