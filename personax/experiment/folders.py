"""Paths of the files of a run. `records` describes their contents."""

import re
import zlib
from pathlib import Path
from typing import NamedTuple

_CUT_OFF = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # as `write_atomically` names what it has not finished


class Folder(NamedTuple):
    """The paths of a run; those of one of its jobs, which has a stream of metrics of its own, name its algorithm."""

    root: Path
    job: str | None = None

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def results(self) -> Path:
        return self.root / "results.json"

    @property
    def tuning(self) -> Path:
        return self.root / "tuning.json"

    @property
    def clients(self) -> Path:
        return self.root / "clients.parquet"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl" if self.job is None else self.jobs / f"{slug(self.job)}.jsonl"

    @property
    def jobs(self) -> Path:
        """The folder in which the jobs of a study on a cluster report."""
        return self.root / "jobs"

    @property
    def untuned(self) -> Path:
        """The configuration of a study whose options are still searched for."""
        return self.root / "untuned.toml"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def checkpoints(self, name: str) -> Path:
        """The folder with the states of one algorithm."""
        return self.root / "checkpoints" / slug(name)

    @property
    def models(self) -> Path:
        return self.root / "models"

    def model(self, name: str) -> Path:
        """The shared model that one algorithm ended with."""
        return self.models / f"{slug(name)}.safetensors"

    @property
    def parts(self) -> Path:
        return self.root / "parts"

    def part(self, name: str) -> Path:
        """The results of one algorithm that has ended, from which `results.json` is made."""
        return self.parts / f"{slug(name)}.json"

    def part_clients(self, name: str) -> Path:
        """Its clients' numbers."""
        return self.parts / f"{slug(name)}.parquet"

    @property
    def merging(self) -> Path:
        """The lock file of the results of all algorithms together."""
        return self.root / "locks" / "results.lock"

    def lock(self, name: str) -> Path:
        """The lock file of one algorithm, whose states and results one process at a time writes."""
        return self.root / "locks" / f"{slug(name)}.lock"


def slug(name: str) -> str:
    """A file name for a name; different names that look alike get different ones."""
    return f"{_plain(name)}-{zlib.crc32(name.encode()):08x}"


def readable_slug(name: str, otherwise: str = "run") -> str:
    """The letters and digits of a name, for a file name that something else makes unique; `otherwise` if it has none.

    >>> readable_slug("../Per-FedAvg (HF)"), readable_slug("...")
    ('per-fedavg-hf', 'run')
    """
    return _plain(name).rstrip("-") or otherwise


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]


def refuse_used(root: Path) -> None:
    """Refuse a folder that has a run."""
    if Folder(root).config.exists():
        raise ValueError(
            f"{root} has a run already. Continue it with `personax resume {root}`, or choose another folder."
        )


def tidy(folder: Folder) -> None:
    """Remove files that were cut off while they were written."""
    for place in (folder.root, folder.models, folder.parts):
        for path in place.glob(".*"):
            if _CUT_OFF.fullmatch(path.name):
                path.unlink()
