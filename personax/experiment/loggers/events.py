"""Events of a training run, with which its callbacks are called."""

import contextlib
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from personax.experiment.config import Config, dump
from personax.experiment.records import EvaluationRecord

__all__ = ["Evaluated", "TrainingEnded", "TrainingStarted"]


@dataclass(frozen=True)
class TrainingStarted:
    """The training of one algorithm starts, or resumes after the evaluations in `history`.

    >>> event = TrainingStarted(Path("runs/mine"), "mine", "FedAvg", {"seeds": 3}, {"FedAvg": []})
    >>> event.settings["seeds"]
    3
    """

    folder: Path  # the run folder
    run: str  # the name of the run
    algorithm: str
    settings: dict[str, Any]  # the configuration of the run, with only this algorithm
    history: Mapping[str, Sequence[EvaluationRecord]]  # by score: empty lists at the start


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of an algorithm under one of its scores: `record.mean["accuracy"]` has a mean for each seed."""

    algorithm: str
    score: str
    record: EvaluationRecord


@dataclass(frozen=True)
class TrainingEnded:
    """The training of one algorithm ended.

    >>> TrainingEnded("FedAvg", "finished").status
    'finished'
    """

    algorithm: str
    status: Literal["finished", "interrupted", "failed"]


Event = TrainingStarted | Evaluated | TrainingEnded
Listener = Callable[[Event], None]


def started(
    folder: Path, config: Config, algorithm: str, history: Mapping[str, Sequence[EvaluationRecord]]
) -> TrainingStarted:
    """Describe the training of an algorithm of a run after these evaluations."""
    settings = tomllib.loads(dump(replace(config, algorithms={algorithm: config.algorithms[algorithm]})))
    known = {score: tuple(records) for score, records in history.items()}
    return TrainingStarted(folder, config.name, algorithm, settings, known)


def values_of(record: EvaluationRecord) -> dict[str, float]:
    """Return the numbers to plot: means over seeds that have not diverged, for all clients and the worst decile."""
    found = {}
    for prefix, statistic in (("", record.mean), ("worst_decile/", record.worst_decile)):
        for metric, of_seeds in statistic.items():
            left = [number for number in of_seeds if np.isfinite(number)]
            if left:
                found[prefix + metric] = float(np.mean(left))
    return found


def send(listeners: Sequence[Listener], event: Event) -> None:
    """Call all listeners with an event."""
    for listen in listeners:
        listen(event)


@contextlib.contextmanager
def announced(listeners: Sequence[Listener], start: TrainingStarted) -> Iterator[None]:
    """Send the start of a training before the body, and its end afterwards, even if the body raises."""
    status = "failed"
    try:
        send(listeners, start)
        yield
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        send(listeners, TrainingEnded(start.algorithm, status))
