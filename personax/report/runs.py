"""Run folders as a report shows them: labels that distinguish runs, and a style for each score."""

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

# Distinguishable in normal vision and with the common forms of color blindness, also from the two grays
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
GREYS = {"local": ("#6b7280", "#9aa3af"), "global": ("#1c2128", "#f4f6f8")}
DASHES = {"local": ("dash", "longdash"), "global": ("dot", "dashdot"), "": ("solid", "dashdot", "longdash")}
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "pentagon", "star")
NEEDED = ("algorithm", "score", "seed", "client", "name")


class Look(NamedTuple):
    """How a score is drawn, the same in every figure."""

    colour: str
    dash: str
    symbol: str


@dataclass(frozen=True, eq=False)
class ReportedRun:
    """One run folder, as it was given."""

    folder: Path
    label: str
    record: RunRecord
    config: str
    clients: pa.Table
    is_live: bool  # on real machines, so that it cannot be run again


@dataclass(frozen=True, eq=False)
class Score:
    """One score of one algorithm of a run, by its name in the run and by its label among all that are shown.

    `role` is "local" or "global" where it is one of the run's baselines.
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
        """Its row in the table of a metric."""
        mine = (self.algorithm.name, self.record.name, metric)
        return next((row for row in self.run.record.table if (row.algorithm, row.score, row.metric) == mine), None)

    def num_lost(self, metric: str) -> int:
        """The number of seeds that have no finite mean of a metric, because they diverged."""
        row = self.row(metric)
        return 0 if row is None else row.num_lost

    @property
    def diverged(self) -> str:
        """The round, client and seed at which the algorithm diverged; empty if it did not."""
        return describe(self.algorithm.divergences) if self.algorithm.divergences else ""

    @property
    def group(self) -> str:
        """Whose data is scored: only scores of the same clients can be compared."""
        return str(self.record.scoring.get("clients", "all"))


def read_runs(folders: Sequence[Path]) -> list[ReportedRun]:
    """Read run folders; where several have one name, the folder's name or a number tells them apart."""
    if not folders:
        raise ValueError("A report needs at least one run folder, got none.")
    twice = [folder for folder, num in Counter(folder.resolve() for folder in folders).items() if num > 1]
    if twice:
        raise ValueError(f"{twice[0]} is given twice. Give each run folder once.")
    runs = [_read(folder) for folder in folders]
    labels = _distinct([run.label for run in runs], [folder.resolve().name for folder in folders])
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def scores_of(runs: Sequence[ReportedRun]) -> list[Score]:
    """The scores of all runs, in order, with labels that tell them apart."""
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
    """Every algorithm, with a label that tells it from those of other runs."""
    num = Counter(algorithm.name for run in runs for algorithm in run.record.algorithms)
    for run in runs:
        for algorithm in run.record.algorithms:
            yield f"{run.label}: {algorithm.name}" if num[algorithm.name] > 1 else algorithm.name, run, algorithm


class Looks:
    """Hands out looks: greys to baselines, the palette to the others; dashes change when the colours are used up."""

    def __init__(self) -> None:
        self.num = {"local": count(), "global": count(), "": count()}

    def next(self, role: str) -> Look:
        """The look of the next score of a role."""
        at, dashes = next(self.num[role]), DASHES[role]
        if role:
            return Look(GREYS[role][0], dashes[at % len(dashes)], f"{SYMBOLS[at % len(SYMBOLS)]}-open")
        return Look(PALETTE[at % len(PALETTE)][0], dashes[at // len(PALETTE) % len(dashes)], SYMBOLS[at % len(SYMBOLS)])


def _read(folder: Path) -> ReportedRun:
    record = read_results(folder)
    remedy = f"Give the folder of a finished run, or finish it: personax resume {folder}"
    config, clients = folder / "config.toml", folder / "clients.parquet"
    for path in (config, clients):
        if not path.exists():
            raise ValueError(f"{folder} has no {path.name}. {remedy}")
    try:
        text = config.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{config} is not UTF-8 text: {error.reason}. Run it again.") from None
    try:
        table = pq.read_table(clients, read_dictionary=["algorithm", "score", "name"])
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{clients} cannot be read: {reason} Run it again, or copy the file again.") from None
    missing = [name for name in (*NEEDED, record.headline) if name not in table.column_names]
    if missing:
        raise ValueError(f"{clients} is not what a run writes: it has no column {missing[0]!r}. Run it again.")
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
            f"The clients.parquet of run {run.label!r} has no rows for score {score!r} of algorithm {algorithm!r}, "
            "which its results.json has. The two are not of one run: run it again."
        )
    return Clients(rows)
