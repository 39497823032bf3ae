"""Follow a live run while it is active by reading new lines of the journal in its folder.

Nothing is imported, built or written, so following a run does not affect it.
"""

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from personax.evaluation.scores import Evaluation
from personax.evaluation.scoring import Scoring
from personax.experiment.folders import Folder
from personax.experiment.records import EvaluationRecord, ScoreRecord
from personax.experiment.summaries import evaluation_record
from personax.live.journal import JOURNAL
from personax.live.status import ClientStatus
from personax.live.view import latest
from personax.report.document import Row, Table, TableCell, table
from personax.report.following import Followed, FollowedScore, Progress, latest_of, read_config
from personax.report.runs import Looks
from personax.report.words import seconds


@dataclass(frozen=True)
class Seen:
    """The state of a client according to the journal."""

    id: int
    heard: float  # when it last sent something, in seconds since the run began
    num_applied: int = 0
    num_refused: int = 0
    num_late: int = 0
    staleness: int = 0
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    num_samples: int = 1  # number of test samples behind the numbers


@dataclass
class Follower:
    """A reader of a journal that continues where it stopped and keeps what the page shows."""

    root: Path
    place: int = 0  # offset in the journal, in bytes
    least: int = 1  # number of clients that the run waits for
    clients: dict[str, Seen] = field(default_factory=dict)
    num_events: int = 0
    version: int = 0
    now: float = 0.0
    has_rounds: bool = False
    history: list[tuple[int, float, dict[str, Seen]]] = field(default_factory=list)  # position, time, clients

    def read(self) -> Followed:
        """Read new lines and return the current state of the run."""
        folder = Folder(self.root)
        config = read_config(folder)
        schedule, (name,) = config["schedule"], config["algorithms"]
        self.least = config.get("live", {}).get("num_clients", 1)
        self._read_on(config["evaluation"]["every"], schedule["cohort_size"])
        cohort = self._cohort(schedule["cohort_size"])
        total = schedule["num_rounds"] * (1 if self.has_rounds else cohort)
        done = self.version if self.has_rounds else self.num_events
        state = "finished" if folder.results.exists() or done >= total else "training"
        histories = self._histories(cohort, config["algorithms"][name].get("scores", {}))
        looks = Looks()
        scores = [FollowedScore(s, looks.next(""), ScoreRecord(s, {}, "", "", of, {})) for s, of in histories.items()]
        facts = {
            "state": state,
            "mode": "synchronous" if self.has_rounds else "asynchronous",
            "clients": str(len(self.clients)),
            "version of the model": f"{self.version:,}",
            "updates applied": f"{self.num_events:,}",
        }
        progress = [Progress(name, state, done, total, self.now, latest_of(histories))]
        unit, note = "rounds" if self.has_rounds else "updates", ""
        if not scores:
            note = (
                "No client has reported numbers, so there are no curves. Clients report with `personax join --report`."
            )
        return Followed(config["name"], facts, unit, progress, scores, note, self._table())

    def _read_on(self, every: int, cohort_size: int | str) -> None:
        """Read the new lines; read from the beginning if the journal became shorter, as after a crash."""
        path = self.root / JOURNAL
        if not path.exists():
            return
        if path.stat().st_size < self.place:
            self.__init__(self.root)
        with path.open("rb") as file:
            file.seek(self.place)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.place += len(line)
                self._fold(json.loads(line), every, cohort_size)

    def _fold(self, about: dict[str, Any], every: int, cohort_size: int | str) -> None:
        """Update the state with one line."""
        what, name = about["what"], about.get("client", "")
        self.now = about["time"]
        if "state" in about:
            self.version = about["version"]
        if what == "join":
            self.clients[name] = Seen(about["id"], self.now)
        elif what == "cohort":
            self.has_rounds = True
        elif what == "upload":
            self.clients[name] = self._uploaded(self.clients[name], about)
        elif what == "rollback":
            self.num_events = about["events"]
        elif what == "report":
            reported = {"numbers": about["numbers"], "num_samples": max(int(about.get("samples", 1)), 1)}
            self.clients[name] = replace(self.clients[name], heard=self.now, **reported)
            self._chronicle(every * (1 if self.has_rounds else self._cohort(cohort_size)))

    def _uploaded(self, seen: Seen, about: dict[str, Any]) -> Seen:
        outcome = about["outcome"]
        seen = replace(seen, heard=self.now)
        if outcome == "applied":
            self.num_events += 1
            return replace(seen, num_applied=seen.num_applied + 1, staleness=about["staleness"])
        if outcome == "late":
            return replace(seen, num_late=seen.num_late + 1)
        return replace(seen, num_refused=seen.num_refused + 1)

    def _chronicle(self, every: int) -> None:
        """Append the state of all clients that report, as often as the configuration evaluates."""
        position = self.version if self.has_rounds else self.num_events
        if self.history and position // every == self.history[-1][0] // every:
            self.history.pop()
        self.history.append((position, self.now, {name: one for name, one in self.clients.items() if one.numbers}))

    def _cohort(self, cohort_size: int | str) -> int:
        """The number of updates that count as a round in runs without rounds."""
        return max(len(self.clients), self.least) if cohort_size == "all" else int(cohort_size)

    def _histories(self, cohort: int, scorings: dict[str, Any]) -> dict[str, list[EvaluationRecord]]:
        """The numbers reported by clients, by score, as evaluations with one seed."""
        found: dict[str, list[EvaluationRecord]] = {}
        for position, at, clients in self.history:
            for score in dict.fromkeys(score for one in clients.values() for score in one.numbers):
                weighting = scorings.get(score, {}).get("weighting", "uniform")
                made = _evaluation([one for one in clients.values() if one.numbers.get(score)], score, weighting, at)
                if made is not None:
                    record = evaluation_record(made, position if self.has_rounds else position // cohort, at)
                    found.setdefault(score, []).append(record)
        return found

    def _table(self) -> Table:
        """The clients, in the order in which they joined."""
        since = time.time() - (self.root / JOURNAL).stat().st_mtime if (self.root / JOURNAL).exists() else 0.0
        rows = []
        for name, seen in self.clients.items():
            ago = max(self.now - seen.heard + since, 0.0)
            counts = (seen.num_applied, seen.num_refused, seen.num_late, seen.staleness)
            now = ClientStatus(name, ago, *counts, seen.numbers)
            cells = [f"{seconds(ago)} ago", *map(str, counts), latest(now) or "–"]
            rows.append(Row(TableCell(name), [TableCell(cell) for cell in cells]))
        heads = ("Client", "last heard", "applied", "refused", "late", "staleness", "reported")
        return table("The clients", heads, rows)


def _evaluation(clients: list[Seen], score: str, weighting: Any, at: float) -> Evaluation | None:
    """The numbers of the clients that report, for the metrics that all of them have."""
    numbers = [one.numbers[score] for one in clients]
    common = [name for name in numbers[0] if all(name in one for one in numbers)] if numbers else []
    if not common:
        return None
    metrics = {name: np.array([[one[name] for one in numbers]]) for name in common}
    ids, counts = (np.array([[getattr(one, name) for one in clients]]) for name in ("id", "num_samples"))
    scoring = Scoring("personal", weighting=weighting)  # only its weighting matters here
    return Evaluation(scoring, metrics, ids, counts, counts, np.zeros(1, int), np.array([at]))
