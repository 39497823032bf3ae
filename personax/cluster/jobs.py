"""A job: one algorithm of a study, one search for its options, or one training of a reproduction, with all its seeds.

A job runs in its own process, perhaps on another machine that has the run folder on a shared disk. It continues
from what its predecessors left, and reports its progress in `jobs/NAME.json`.
"""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from personax.data.locks import Taken
from personax.experiment.checkpoint import write_atomically
from personax.experiment.config import load_run
from personax.experiment.folders import Folder, slug
from personax.experiment.loggers import open_loggers
from personax.experiment.parts import execute_part
from personax.experiment.records import TrialRecord, TunedAlgorithm
from personax.experiment.search import Options
from personax.experiment.standing import owning
from personax.experiment.tuning import Trials, Try, prepare_tuning, tune_algorithm
from personax.fast.compilation_cache import keep_compiled
from personax.reproduce import EXPERIMENTS
from personax.reproduce.run import is_reproduced, reproduce, reproduce_part

JobTask = Literal["train", "tune", "reproduce"]
WAIT = 2.0  # seconds, for another process that does the same job
EVERY = 1.0  # seconds between two reports of progress
_TUNED = TypeAdapter(TunedAlgorithm)
_STAGES = TypeAdapter(list[tuple[list[dict[str, Any]], str, list[TrialRecord]]])


@dataclass(frozen=True)
class Job:
    """The description of a job, for the process that does it.

    `place` is the folder in which relative paths of the configuration are looked up, `flags` are those of XLA, `log`
    names loggers, and `setting` has the arguments of a reproduction.
    """

    task: JobTask
    root: str
    name: str
    started: str
    place: str
    flags: str
    log: list[str] = field(default_factory=list)
    setting: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobRecord:
    """The progress of a job, in its own words: `done` of `total` rounds, and why it failed."""

    name: str
    state: Literal["waiting", "running", "finished", "failed", "stopped"] = "running"
    host: str = ""
    pid: int = 0
    done: int = 0
    total: int = 0
    latest: str = ""
    began: float = 0.0
    updated: float = 0.0
    words: str = ""


_RECORD = TypeAdapter(JobRecord)


def record_path(root: Path, name: str) -> Path:
    """The file in which a job reports its progress."""
    return Folder(root).jobs / f"{slug(name)}.json"


def read_record(root: Path, name: str) -> JobRecord | None:
    """Read the progress that a job has reported last, if any."""
    try:
        return _RECORD.validate_json(record_path(root, name).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def write_record(root: Path, record: JobRecord) -> None:
    """Write the progress of a job."""
    write_atomically(record_path(root, record.name), _RECORD.dump_json(record))


class Reporter:
    """A `Watch` that writes the progress of a job into its file."""

    def __init__(self, root: Path, name: str) -> None:
        now = time.time()
        self.root = root
        self.record = JobRecord(name, host=socket.gethostname(), pid=os.getpid(), began=now, updated=now)
        self.put()

    def put(self, **changes: Any) -> None:
        """Write the record with these changes."""
        self.record = replace(self.record, **changes, updated=time.time())
        write_record(self.root, self.record)

    def begin(self, name: str, num_rounds: int, done: int) -> None:
        self.put(done=done, total=num_rounds)

    def advance(self, name: str, done: int, latest: str) -> None:
        if time.time() - self.record.updated >= EVERY:
            self.put(done=done, latest=latest)
        else:
            self.record = replace(self.record, done=done, latest=latest)

    def end(self, name: str, seconds: dict[str, float]) -> None:
        self.put()

    def note(self, text: str) -> None:
        print(text, flush=True)  # into the log of the job


def run_job(job: Job) -> None:
    """Do a job, or what is left of it, in this process."""
    os.chdir(job.place)
    os.environ["XLA_FLAGS"] = job.flags  # of the study, so that all its programs are compiled alike
    keep_compiled()
    reporter = Reporter(Path(job.root), job.name)
    try:
        _when_free(job, _TASKS[job.task], reporter)
    except Exception as error:
        reporter.put(state="failed", words=f"{type(error).__name__}: {error}")
        raise
    except BaseException:  # Ctrl-C, or the signal of a scheduler that takes the machine away
        reporter.put(state="stopped")
        raise
    reporter.put(state="finished", done=reporter.record.total)


def _when_free(job: Job, work: Callable[[Job, Reporter], None], reporter: Reporter) -> None:
    """Do the work of a job; while another process does it, such as a predecessor that was given up, wait."""
    while True:
        try:
            work(job, reporter)
            return
        except Taken as taken:
            reporter.put(words=str(taken))
            time.sleep(WAIT)


def _train(job: Job, reporter: Reporter) -> None:
    folder = Folder(Path(job.root))
    execute_part(folder, job.name, job.started, reporter, listeners=open_loggers(job.log, reporter.note))


def _reproduce(job: Job, reporter: Reporter) -> None:
    folder, setting = Path(job.root), job.setting
    experiment = EXPERIMENTS[setting["experiment"]](setting["quick"])
    with owning(Folder(folder), [job.name]):
        reproduce_part(experiment, folder, job.name, setting["num_seeds"])
    if is_reproduced(experiment, folder):
        reproduce(experiment, folder, num_seeds=setting["num_seeds"], command=setting["command"], side_by_side=False)


def tuned_path(root: Path, name: str) -> Path:
    """The result of the search for one algorithm's options."""
    return Folder(root).jobs / f"{slug(name)}.tuned"


def read_tuned(root: Path, name: str) -> TunedAlgorithm | None:
    """Read the options that were found for an algorithm, if its search has ended."""
    path = tuned_path(root, name)
    return _TUNED.validate_json(path.read_bytes()) if path.exists() else None


def _tune(job: Job, reporter: Reporter) -> None:
    folder = Folder(Path(job.root))
    study = prepare_tuning(load_run(folder.untuned))
    with owning(folder, [job.name]):
        if read_tuned(folder.root, job.name) is None:
            keep = lambda attempt: _keeping(attempt, folder.jobs / f"{slug(job.name)}.trials")
            found = tune_algorithm(study, job.name, lambda text: reporter.put(latest=text), keep)
            write_atomically(tuned_path(folder.root, job.name), _TUNED.dump_json(found))


def _keeping(attempt: Try, path: Path) -> Try:
    """Keep the trials of each stage of a search in a file, from which a job that was killed continues."""
    kept = _STAGES.validate_json(path.read_bytes()) if path.exists() else []

    def remembered(choices: Sequence[Options]) -> Trials:
        for known, metric, trials in kept:
            if known == list(choices):
                return metric, trials
        found = attempt(choices)
        kept.append((list(choices), *found))
        write_atomically(path, _STAGES.dump_json(kept))
        return found

    return remembered


_TASKS: dict[JobTask, Callable[[Job, Reporter], None]] = {"train": _train, "tune": _tune, "reproduce": _reproduce}


@contextlib.contextmanager
def stopping_at(number: int) -> Iterator[None]:
    """Treat a signal as Ctrl-C: the job saves its state and ends."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)
