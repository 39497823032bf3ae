"""HTML reports of runs, reproductions and inspections, each a single self-contained file.

Plotting libraries are imported only when a page is written, so that runs start fast.
"""

from collections.abc import Sequence
from pathlib import Path

from personax.experiment.checkpoint import write_atomically
from personax.inspection import Inspection
from personax.reproduce.outcome import ReproductionRecord

__all__ = ["claims_text", "verdict", "write_inspection", "write_report", "write_reproduction"]


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write the report of run folders to one HTML file that needs no network, and return its path.

    Separate runs are shown side by side: each has its own baselines, and nothing is paired between them. The file
    is written atomically.
    """
    from personax.report.page import render
    from personax.report.runs import read_runs

    write_atomically(path, render(read_runs(folders)).encode())
    return path


def verdict(folder: Path) -> str:
    """Return the opening sentences of a run folder's report; empty if there is nothing to compare."""
    from personax.report import words
    from personax.report.runs import read_runs, scores_of

    (run,) = read_runs([folder])
    return words.verdict(run, scores_of([run]), run.record.headline)


def write_reproduction(record: ReproductionRecord, path: Path) -> Path:
    """Write the page of a reproduction to one HTML file and return its path."""
    from personax.report import reproduction

    write_atomically(path, reproduction.render(record).encode())
    return path


def claims_text(record: ReproductionRecord) -> str:
    """Return the claims of a reproduction with their verdicts and effects, one per line."""
    from personax.report.comparison import claim_lines

    return "\n".join(claim_lines(record.claims))


def write_inspection(found: Inspection, path: Path) -> Path:
    """Write the page of an inspection to one HTML file and return its path."""
    from personax.report import inspection

    write_atomically(path, inspection.render(found).encode())
    return path
