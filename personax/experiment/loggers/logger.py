"""A listener that writes each score of a run as a separate series to a tracking library."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from personax.experiment.checkpoint import write_atomically
from personax.experiment.loggers.events import Evaluated, Event, TrainingEnded, TrainingStarted, values_of

IDS = "loggers.json"  # in the run folder: the id of each series, by logger and score


@dataclass(frozen=True)
class Series:
    """One score of one algorithm, which tracking libraries call a run."""

    folder: Path
    run: str
    algorithm: str
    score: str
    settings: Mapping[str, Any]
    last_round: int  # of the last earlier evaluation, or 0; after an interrupt it may not have been logged
    id: str | None  # the id under which it was logged before


class Writer(Protocol):
    """An open series of a tracking library."""

    @property
    def id(self) -> str:
        """Return the id with which a resumed run reopens the series; "" if the library needs none."""
        ...

    @property
    def next_round(self) -> int:
        """Return the first round that the series does not have yet."""
        ...

    def write(self, round: int, values: Mapping[str, float]) -> None: ...
    def close(self, status: str) -> None: ...


class Logger:
    """A listener for `execute`. `open_series` is the adapter of a tracking library.

    An error at the start of an algorithm's training is raised. After that, an error must not end a long run: it is
    passed to `notify`, and the logger stops.
    """

    def __init__(
        self, name: str, open_series: Callable[[Series], Writer], notify: Callable[[str], None] = lambda text: None
    ) -> None:
        self.name, self.open_series, self.notify = name, open_series, notify
        self.writers: dict[str, Writer] = {}
        self.failed = False

    def __call__(self, event: Event) -> None:
        """Write one event."""
        match event:
            case TrainingStarted():
                try:
                    self._start(event)
                except Exception as error:  # each library has its own errors
                    raise ValueError(f"Cannot log to {self.name}: {error}") from error
            case Evaluated():
                self._try(lambda: self._write(event))
            case TrainingEnded():
                self._try(lambda: self._end(event.status))

    def _start(self, event: TrainingStarted) -> None:
        known = _read_ids(event.folder)
        for score, history in event.history.items():
            id = known.get(self.name, {}).get(score) if history else None
            last = history[-1].round if history else 0
            about = (event.folder, event.run, event.algorithm, score, event.settings)
            writer = self.writers[score] = self.open_series(Series(*about, last, id))
            known = {**known, self.name: {**known.get(self.name, {}), score: writer.id}}
            for record in history:
                if record.round >= writer.next_round:
                    writer.write(record.round, values_of(record))
        write_atomically(event.folder / IDS, json.dumps(known, indent=1).encode())

    def _write(self, event: Evaluated) -> None:
        writer = self.writers[event.score]
        if event.record.round >= writer.next_round:  # a resumed run repeats the rounds after its checkpoint
            writer.write(event.record.round, values_of(event.record))

    def _end(self, status: str) -> None:
        while self.writers:
            _, writer = self.writers.popitem()
            writer.close(status)

    def _try(self, do: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            do()
        except Exception as error:  # each library has its own errors
            self.failed = True
            self.notify(f"Warning: {self.name} failed and receives no further events: {error}")


def _read_ids(folder: Path) -> dict[str, dict[str, str]]:
    path = folder / IDS
    return json.loads(path.read_text()) if path.exists() else {}
