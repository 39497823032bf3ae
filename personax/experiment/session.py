"""The state of one algorithm's training between waves: scores, elapsed time, and checkpoints."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from personax.evaluation.scores import Evaluation
from personax.experiment import checkpoint
from personax.experiment.build import Training
from personax.experiment.control import to_json
from personax.experiment.convergence import Convergence
from personax.experiment.divergence import masked
from personax.experiment.provenance import Provenance
from personax.experiment.records import EvaluationRecord
from personax.experiment.summaries import evaluation_record, personal_numbers
from personax.simulation.results import Snapshot
from personax.simulation.work import traffic

_COMPILED = [0.0]  # seconds of XLA compilation in this process


def _count_compilation(event: str, duration_secs: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COMPILED[0] += duration_secs


jax.monitoring.register_event_duration_secs_listener(_count_compilation)


class Session:
    """The hooks of a run between its waves: score, record and save."""

    def __init__(
        self,
        ask: Callable[[Snapshot, str], Evaluation],
        diverged: Callable[[Snapshot], list[int]],
        training: Training,
        cohort: int,
        convergence: Convergence | None,
        provenance: Provenance,
    ) -> None:
        self.ask, self.diverged = ask, diverged
        self.training, self.cohort, self.convergence = training, cohort, convergence
        self.provenance = provenance
        self.history: dict[str, list[EvaluationRecord]] = {name: [] for name in training.scorings}
        self.seconds = {"compile": 0.0, "train": 0.0, "evaluate": 0.0}
        self.found: dict[str, Evaluation] = {}
        self.seen: tuple[Snapshot, int] | None = None  # the last snapshot, and the number of evaluations up to it
        self.began = self.compiled = 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        self.began, self.compiled = time.perf_counter(), _COMPILED[0]

    def spend(self, on: str) -> None:
        """Count the time since the last call, with XLA's compilation time counted separately."""
        compiled = _COMPILED[0] - self.compiled
        self.seconds["compile"] += compiled
        self.seconds[on] += max(time.perf_counter() - self.began - compiled, 0.0)
        self.restart_clock()

    def observe(self, snapshot: Snapshot) -> bool:
        """Score the current state of the run; return False if all seeds have diverged, which ends the curve."""
        jax.block_until_ready(snapshot.params)
        self.spend("train")
        if self.has_ended(snapshot):
            self.found, self.seen = {}, (snapshot, self.num_evaluations)
            return False
        self.found = {name: self.score(snapshot, name) for name in self.training.scorings}
        at, iterate = (None, None) if self.convergence is None else self.convergence.at(snapshot)
        self.spend("evaluate")
        own, diverged = personal_numbers(self.training.algorithm, snapshot), self.diverged(snapshot)
        up, down = traffic(self.training.algorithm, snapshot)
        of_run = {
            "bytes_up": up.tolist(),
            "bytes_down": down.tolist(),
            "personal_number": None if own is None else masked(np.mean(own, axis=-1), diverged),
            "stationarity": masked(at, diverged),
            "iterate_stationarity": masked(iterate, diverged),
        }
        events = np.atleast_1d(snapshot.num_events)
        furthest = events.max() if any(one.ended for one in snapshot.control) else events[0]
        for name, found in self.found.items():
            position = int(furthest) // self.cohort
            self.history[name].append(evaluation_record(found, position, self.seconds["train"], **of_run))
        self.seen = snapshot, self.num_evaluations  # one assignment, so that both agree even if interrupted
        return True

    def score(self, snapshot: Snapshot, name: str) -> Evaluation:
        """Return one score of the seeds that have not diverged; the others are NaN."""
        return self.ask(snapshot, name).without_seeds(self.diverged(snapshot))

    def has_ended(self, snapshot: Snapshot) -> bool:
        """Return True if all seeds have diverged."""
        return len(self.diverged(snapshot)) == len(snapshot.schedules)

    @property
    def num_evaluations(self) -> int:
        return min(map(len, self.history.values()))

    @property
    def round(self) -> int:
        """Return the round of the last evaluation."""
        return next(iter(self.history.values()))[-1].round

    def save(self, place: Path) -> None:
        """Write a checkpoint of the last observation, if there was one."""
        if self.seen is not None:
            snapshot, num = self.seen
            about = {
                "provenance": self.provenance.table,
                "base": snapshot.unshared.fingerprint,
                "wave": snapshot.wave,
                "events": np.asarray(snapshot.num_events).tolist(),
                "time": np.asarray(snapshot.time).tolist(),
                "seconds": self.seconds,
                "control": to_json(snapshot.control),
                "history": {name: [asdict(one) for one in records[:num]] for name, records in self.history.items()},
            }
            private = bool(jax.tree.leaves(snapshot.state.personal))
            checkpoint.save(place, snapshot.wave, snapshot.state, about, private=private)
