"""Run folders as reports show them: unique labels for runs, and a style for each score."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from personax.evaluation.scores import ScoreRow
from personax.experiment.divergence import describe
from personax.experiment.records import AlgorithmRecord, RunRecord, ScoreRecord, read_results
from personax.report.clients import Clients

# Distinguishable from each other and from the two grays, in normal vision and with common forms of color blindness
# (tests/report/test_colors.py). The second of a pair is for dark pages.
PALETTE = (
    ("#0b62c4", "#5aa9ff"),
    ("#d1570a", "#ff8b3d"),
    ("#b1274e", "#ff3b89"),
    ("#769d76", "#89ebb1"),
    ("#623b62", "#894ed8"),
    ("#009dd8", "#008976"),
    ("#143b00", "#627600"),
    ("#140089", "#ffff4e"),
)
GRAYS = {"local": ("#6b7280", "#9aa3af"), "global": ("#1c2128", "#f4f6f8")}
DASHES = {"local": ("dash", "longdash"), "global": ("dot", "dashdot"), "": ("solid", "dashdot", "longdash")}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "pentagon", "star")
NEEDED = ("algorithm", "score", "seed", "client", "name")


class Look(NamedTuple):
    """The style of a score, the same in every figure."""

    color: str
    dash: str
    symbol: str


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """A run folder, read for a report."""

    folder: Path
    label: str
    record: RunRecord
    config: str
    clients: pa.Table
    is_live: bool  # trained on real machines, so it cannot be rerun


@dataclass(frozen=True, eq=False)
class Score:
    """One score of one algorithm of a run; `label` distinguishes it from all other scores shown.

    `role` is "local" or "global" if it is one of the run's baselines.
    """

    name: str
    label: str
    run: ReportedRun
    algorithm: AlgorithmRecord
    record: ScoreRecord
    clients: Clients
    role: str
    look: Look

    def row(self, metric: str) -> ScoreRow | None:
        """Return its row in the table of a metric."""
        mine = (self.algorithm.name, self.record.name, metric)
        return next((row for row in self.run.record.table if (row.algorithm, row.score, row.metric) == mine), None)

    def num_lost(self, metric: str) -> int:
        """Return the number of seeds without a finite mean of a metric, because they diverged."""
        row = self.row(metric)
        return 0 if row is None else row.num_lost

    @property
    def diverged(self) -> str:
        """Return the round, client and seed at which the algorithm diverged; empty if it did not."""
        return describe(self.algorithm.divergences) if self.algorithm.divergences else ""

    @property
    def group(self) -> str:
        """Return the group of clients whose data is scored; only scores of the same group are compared."""
        return str(self.record.scoring.get("clients", "all"))


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read run folders, and add the folder's name or a number to labels that would be equal."""
    if not folders:
        raise ValueError("No run folder given. Give at least one.")
    twice = [folder for folder, num in Counter(folder.resolve() for folder in folders).items() if num > 1]
    if twice:
        raise ValueError(f"Run folder given twice: {twice[0]}. Give each one once.")
    runs = [_read(folder) for folder in folders]
    labels = _distinct([run.label for run in runs], [folder.resolve().name for folder in folders])
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def scores_of(runs: Sequence[ReportedRun]) -> list[Score]:
    """Return the scores of all runs, in order, with unique labels."""
    found = [
        (run, algorithm, score) for run in runs for algorithm in run.record.algorithms for score in algorithm.scores
    ]
    num = Counter(score.name for _, _, score in found)
    in_run = Counter((run.label, score.name) for run, _, score in found)
    looks, scores = Looks(), []
    for run, algorithm, score in found:
        name = f"{algorithm.name}: {score.name}" if in_run[run.label, score.name] > 1 else score.name
        label = f"{run.label}: {name}" if num[score.name] > in_run[run.label, score.name] else name
        role = {run.record.local_baseline: "local", run.record.global_baseline: "global"}.get(score.name, "")
        clients = _clients_of(run, algorithm.name, score.name)
        scores.append(Score(name, label, run, algorithm, score, clients, role, looks.next(role)))
    return scores


def algorithm_labels(runs: Sequence[ReportedRun]) -> Iterator[tuple[str, ReportedRun, AlgorithmRecord]]:
    """Yield every algorithm with a label that is unique across runs."""
    num = Counter(algorithm.name for run in runs for algorithm in run.record.algorithms)
    for run in runs:
        for algorithm in run.record.algorithms:
            yield f"{run.label}: {algorithm.name}" if num[algorithm.name] > 1 else algorithm.name, run, algorithm


class Looks:
    """An allocator of looks: grays for baselines, then the palette, with new dashes once colors run out."""

    def __init__(self) -> None:
        self.num = {"local": count(), "global": count(), "": count()}

    def next(self, role: str) -> Look:
        """Return the look of the next score of a role."""
        at, dashes = next(self.num[role]), DASHES[role]
        if role:
            return Look(GRAYS[role][0], dashes[at % len(dashes)], f"{SYMBOLS[at % len(SYMBOLS)]}-open")
        return Look(PALETTE[at % len(PALETTE)][0], dashes[at // len(PALETTE) % len(dashes)], SYMBOLS[at % len(SYMBOLS)])


def _read(folder: Path) -> ReportedRun:
    record = read_results(folder)
    remedy = f"Give the folder of a finished run, or finish it: personax resume {folder}"
    config, clients = folder / "config.toml", folder / "clients.parquet"
    for path in (config, clients):
        if not path.exists():
            raise ValueError(f"File not found: {path}. {remedy}")
    try:
        text = config.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{config} is not UTF-8 text: {error.reason}. Rerun the experiment.") from None
    try:
        table = pq.read_table(clients, read_dictionary=["algorithm", "score", "name"])
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"Cannot read {clients}: {reason} Copy the file again, or rerun the experiment.") from None
    missing = [name for name in (*NEEDED, record.headline) if name not in table.column_names]
    if missing:
        raise ValueError(f"Missing column {missing[0]!r} in {clients}. Rerun the experiment.")
    return ReportedRun(folder, record.name, record, text, table, (folder / "live.json").exists())


def _distinct(names: list[str], second: list[str]) -> list[str]:
    num = Counter(names)
    named = [f"{name} ({other})" if num[name] > 1 else name for name, other in zip(names, second, strict=True)]
    again, seen = Counter(named), Counter[str]()
    for i, name in enumerate(named):
        if again[name] > 1:
            seen[name] += 1
            named[i] = f"{name} {seen[name]}"
    return named


def _clients_of(run: ReportedRun, algorithm: str, score: str) -> Clients:
    rows = run.clients.filter((pc.field("algorithm") == algorithm) & (pc.field("score") == score))
    if not len(rows):
        raise ValueError(
            f"No rows for score {score!r} of algorithm {algorithm!r} in the clients.parquet of run {run.label!r}, "
            "although its results.json lists it. The two files are from different runs: rerun the experiment."
        )
    return Clients(rows)
