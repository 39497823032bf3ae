"""The page of a run in progress: the progress of each algorithm, its curves and its clients.

`read_simulated` reads what a simulation has written so far. Live runs have their own reader in `personax.live`.
"""

import contextlib
import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from personax.evaluation.scores import interval, show
from personax.experiment.folders import Folder
from personax.experiment.records import EvaluationRecord, ScoreRecord
from personax.experiment.summaries import headline_of
from personax.report.clients import Clients
from personax.report.document import Facts, PageSection, Paragraph, Row, Table, TableCell, document, table
from personax.report.figures import deciles, distribution, learning_curves
from personax.report.runs import Look, Looks
from personax.report.words import seconds, unit

QUIET = 60.0  # seconds without an evaluation before the page says so


class Progress(NamedTuple):
    """The progress of one algorithm."""

    name: str
    state: str
    done: int
    total: int
    spent: float  # seconds of training
    latest: str = ""

    @property
    def left(self) -> str:
        """Describe the estimated remaining training time."""
        if self.state == "finished" or not self.done or self.done >= self.total:
            return "–"
        return seconds(self.spent / self.done * (self.total - self.done))


class FollowedScore(NamedTuple):
    """A score of a run in progress, as figures need it; its clients are known once the algorithm ends."""

    label: str
    look: Look
    record: ScoreRecord
    clients: Clients | None = None
    diverged: str = ""


class Followed(NamedTuple):
    """The current state of a run."""

    name: str
    facts: dict[str, str]
    unit: str  # of progress: rounds or updates
    progress: Sequence[Progress]
    scores: Sequence[FollowedScore]
    note: str = ""
    clients: Table | None = None


def render(run: Followed, follow: float) -> str:
    """Render the page, which reloads its numbers every `follow` seconds."""
    scores = [score for score in run.scores if score.record.evaluations]
    metrics = list(dict.fromkeys(metric for score in scores for metric in score.record.evaluations[-1].mean))
    metrics = [] if not metrics else list(dict.fromkeys([headline_of(metrics), *metrics]))
    note = [Paragraph(run.note, "flag")] if run.note else []
    sections = [PageSection("progress", "Progress", [*note, _progress(run)])]
    if metrics:
        sections.append(PageSection("curves", "Learning curves", figures=[learning_curves(scores, metrics)]))
    drawn = [deciles(scores, metrics)] if metrics else []
    ended = [score for score in scores if score.clients is not None]
    drawn += [distribution(ended, metrics)] if ended else []
    if drawn or run.clients is not None:
        blocks = [] if run.clients is None else [run.clients]
        sections.append(PageSection("clients", "Clients", blocks, drawn))
    return document(run.name, Facts(run.facts), sections, "the files of a run in progress", follow)


def _progress(run: Followed) -> Table:
    heads = ("Algorithm", "", run.unit, "training", "time left (estimate)", "latest")
    rows = []
    for one in run.progress:
        share = min(one.done / one.total, 1.0) if one.total else 0.0
        cells = [
            TableCell(f"{100 * share:.0f} %", share=share),
            TableCell(f"{one.done:,} of {one.total:,}"),
            TableCell(seconds(one.spent) if one.spent else "–"),
            TableCell(one.left),
            TableCell(one.latest or "–"),
        ]
        rows.append(Row(TableCell(one.name, small=[one.state]), cells))
    return table("The algorithms of the run, in training order", heads, rows)


def read_simulated(root: Path) -> Followed:
    """Read the current state of a simulated run from its folder."""
    folder = Folder(root)
    config = read_config(folder)
    histories = _histories(folder)
    names = list(config["algorithms"])
    waiting = [name for name in names if not folder.part(name).exists()]
    progress = []
    for name in names:
        state = "finished" if name not in waiting else "training" if name == waiting[0] else "waiting"
        progress.append(_progress_of(name, state, config["schedule"]["num_rounds"], histories.get(name, {})))
    looks, scores = Looks(), []
    for name in names:
        for score, evaluations in histories.get(name, {}).items():
            record = ScoreRecord(score, {}, "", "", evaluations, {})
            clients = None if name in waiting else _clients_of(folder, name, score)
            scores.append(FollowedScore(score, looks.next(""), record, clients))
    seeds = config["seeds"]
    facts = {
        "seeds": ", ".join(map(str, seeds)) if isinstance(seeds, list) else str(seeds),
        "algorithms": f"{len(names) - len(waiting)} of {len(names)} finished",
        "state": "finished" if folder.results.exists() else "training",
    }
    return Followed(config["name"], facts, "rounds", progress, scores, _note(folder, facts["state"]))


def read_config(folder: Folder) -> dict[str, Any]:
    """Read the configuration of a run as plain tables, without importing or building anything."""
    if not folder.config.exists():
        raise ValueError(f"No run in {folder.root}: config.toml not found. Give the folder of a run.")
    return tomllib.loads(folder.config.read_text(encoding="utf-8"))


def latest_of(histories: dict[str, list[EvaluationRecord]]) -> str:
    """Format the latest values of an algorithm's headline metric."""
    shown = []
    for evaluations in histories.values():
        last = evaluations[-1].mean
        metric = headline_of(list(last))
        shown.append(f"{show(interval(last[metric]).mean, metric)}{unit(metric)}")
    return ", ".join(shown)


def _progress_of(name: str, state: str, total: int, histories: dict[str, list[EvaluationRecord]]) -> Progress:
    if not histories:
        return Progress(name, state, 0, total, 0.0)
    last = next(iter(histories.values()))[-1]
    return Progress(name, state, last.round, total, last.seconds, latest_of(histories))


def _histories(folder: Folder) -> dict[str, dict[str, list[EvaluationRecord]]]:
    """Read the evaluations so far, by algorithm and score, without a line that is still being written."""
    found: dict[str, dict[str, list[EvaluationRecord]]] = {}
    for path in [*folder.jobs.glob("*.jsonl"), folder.metrics]:  # of jobs on a cluster, then of the run itself
        own: dict[str, dict[str, list[EvaluationRecord]]] = {}
        with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    fields = json.loads(line)
                    of_algorithm = own.setdefault(fields.pop("algorithm"), {})
                    of_algorithm.setdefault(fields.pop("score"), []).append(EvaluationRecord(**fields))
        found |= own
    return found


def _clients_of(folder: Folder, algorithm: str, score: str) -> Clients | None:
    """Read the clients' values of a finished algorithm."""
    try:
        rows = pq.read_table(folder.part_clients(algorithm)).filter(pc.field("score") == score)
    except (pa.ArrowException, OSError):
        return None
    return Clients(rows) if len(rows) else None


def _note(folder: Folder, state: str) -> str:
    """Return a note if the run has ended or seems to have stopped."""
    if state == "finished":
        return f"The run is finished. To write its report, run `personax report {folder.root}`."
    streams = [path for path in (*folder.jobs.glob("*.jsonl"), folder.metrics) if path.exists()]
    changed = max(path.stat().st_mtime for path in streams or [folder.config])
    quiet = time.time() - changed
    if quiet < QUIET:
        return ""
    return (
        f"There has been no evaluation for {seconds(quiet)}. If the run was interrupted, resume it with "
        f"`personax resume {folder.root}`."
    )
