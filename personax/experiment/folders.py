"""Paths of the files of a run. `records` describes their contents."""

import re
import zlib
from pathlib import Path
from typing import NamedTuple

_CUT_OFF = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")  # temporary files of `write_atomically`


class Folder(NamedTuple):
    """The paths of a run, or of one of its jobs; a job has one algorithm and its own stream of metrics."""

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
        """Return the folder with the reports of the jobs of a study on a cluster."""
        return self.root / "jobs"

    @property
    def untuned(self) -> Path:
        """Return the configuration of a study before its options are tuned."""
        return self.root / "untuned.toml"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def checkpoints(self, name: str) -> Path:
        """Return the folder with the states of one algorithm."""
        return self.root / "checkpoints" / slug(name)

    @property
    def models(self) -> Path:
        return self.root / "models"

    def model(self, name: str) -> Path:
        """Return the file of an algorithm's final shared model."""
        return self.models / f"{slug(name)}.safetensors"

    @property
    def parts(self) -> Path:
        return self.root / "parts"

    def part(self, name: str) -> Path:
        """Return the file with the results of a finished algorithm, from which `results.json` is made."""
        return self.parts / f"{slug(name)}.json"

    def part_clients(self, name: str) -> Path:
        """Return the file with the clients' values of one algorithm."""
        return self.parts / f"{slug(name)}.parquet"

    @property
    def merging(self) -> Path:
        """Return the lock file of the merged results."""
        return self.root / "locks" / "results.lock"

    def lock(self, name: str) -> Path:
        """Return the lock file of one algorithm, held by the process that writes its states and results."""
        return self.root / "locks" / f"{slug(name)}.lock"


def slug(name: str) -> str:
    """Return a file name for a name; similar names get different file names."""
    return f"{_plain(name)}-{zlib.crc32(name.encode()):08x}"


def readable_slug(name: str, otherwise: str = "run") -> str:
    """Return the letters and digits of a name, for part of a file name; `otherwise` if it has none.

    >>> readable_slug("../Per-FedAvg (HF)"), readable_slug("...")
    ('per-fedavg-hf', 'run')
    """
    return _plain(name).rstrip("-") or otherwise


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]


def refuse_used(root: Path) -> None:
    """Raise an error if a folder already has a run, or the search for its options."""
    if Folder(root).config.exists() or Folder(root).untuned.exists():
        raise ValueError(
            f"{root} already has a run. Resume it with `personax resume {root}`, or choose another folder."
        )


def tidy(folder: Folder) -> None:
    """Remove temporary files of interrupted writes."""
    for place in (folder.root, folder.models, folder.parts):
        for path in place.glob(".*"):
            if _CUT_OFF.fullmatch(path.name):
                path.unlink()
