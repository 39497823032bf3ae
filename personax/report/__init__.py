"""The report of a run, or of several, for people: one HTML file with everything in it."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from personax.report.page import render
from personax.report.runs import read_runs

__all__ = ["write_report"]


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write the report of run folders to one HTML file, which needs no network; its path.

    Runs made apart are shown side by side: each has its own baselines, and nothing is paired between them. The file
    appears whole or not at all.
    """
    content = render(read_runs(folders)).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return path
