"""A job: one algorithm of a study, one search for its options, or one training of a reproduction, with all its seeds.

A job runs in its own process, possibly on another machine that mounts the run folder from a shared disk. It continues
from the files of earlier attempts, and reports its progress in `jobs/NAME.json`.
"""

import contextlib
import hashlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from personax.data.locks import Taken
from personax.experiment.checkpoint import write_atomically
from personax.experiment.config import load_run
from personax.experiment.folders import Folder, slug
from personax.experiment.loggers import open_loggers
from personax.experiment.parts import execute_part
from personax.experiment.records import TrialRecord, TunedAlgorithm
from personax.experiment.search import Options
from personax.experiment.state import owning
from personax.experiment.tuning import Trials, Try, prepare_tuning, tune_algorithm
from personax.fast.compilation_cache import keep_compiled
from personax.reproduce import EXPERIMENTS
from personax.reproduce.run import is_reproduced, reproduce, reproduce_part

JobTask = Literal["train", "tune", "reproduce"]
WAIT = 2.0  # seconds between attempts to get the lock of another process that runs the same job
EVERY = 1.0  # seconds between two reports of progress
ATTEMPTS = 5  # without progress, before a job counts as failed


@dataclass(frozen=True)
class Job:
    """Everything that a process needs to run a job.

    Relative paths of the configuration are resolved in the folder `place`. `flags` are the XLA flags of the study,
    `log` names loggers, and `setting` has the arguments of a reproduction.
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
    """The progress that a job reports: `done` of `total` steps, and in `message` why it waits or failed.

    Steps are rounds of a training, stages of a search, or parts of a reproduction's training.
    """

    name: str
    state: Literal["waiting", "running", "finished", "failed", "stopped"] = "running"
    host: str = ""
    pid: int = 0
    done: int = 0
    total: int = 0
    latest: str = ""
    began: float = 0.0
    updated: float = 0.0
    message: str = ""


_RECORD = TypeAdapter(JobRecord)


def record_path(root: Path, name: str) -> Path:
    """Return the file in which a job reports its progress."""
    return Folder(root).jobs / f"{slug(name)}.json"


def read_record(root: Path, name: str) -> JobRecord | None:
    """Read the last report of a job, if there is one."""
    try:
        return _RECORD.validate_json(record_path(root, name).read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def write_record(root: Path, record: JobRecord) -> None:
    """Write the report of a job."""
    write_atomically(record_path(root, record.name), _RECORD.dump_json(record))


class Attempts(NamedTuple):
    """The number of consecutive attempts of a job without progress, and the steps that are done."""

    number: int = 0
    done: int = 0

    def another(self, done: int) -> "Attempts":
        """Add an attempt that has reached this step.

        >>> Attempts(3, done=10).another(done=10), Attempts(3, done=10).another(done=11)
        (Attempts(number=4, done=10), Attempts(number=0, done=11))
        """
        return Attempts(0, done) if done > self.done else Attempts(self.number + 1, self.done)


class Reporter:
    """A `Watch` that writes the progress of a job to its file."""

    def __init__(self, root: Path, name: str) -> None:
        now = time.time()
        self.root = root
        self.record = JobRecord(name, host=socket.gethostname(), pid=os.getpid(), began=now, updated=now)
        self.put()

    def put(self, **changes: Any) -> None:
        """Update the record and write it."""
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
        print(text, flush=True)  # to the log of the job


def run_job(job: Job) -> None:
    """Run the rest of a job in this process."""
    os.chdir(job.place)
    os.environ["XLA_FLAGS"] = job.flags  # so that all programs of the study are compiled with the same flags
    keep_compiled()
    reporter = Reporter(Path(job.root), job.name)
    try:
        _run_when_unlocked(job, _TASKS[job.task], reporter)
    except Exception as error:
        reporter.put(state="failed", message=f"{type(error).__name__}: {error}")
        raise
    except BaseException:  # Ctrl-C, or the signal of a scheduler that reclaims the machine
        reporter.put(state="stopped")
        raise
    reporter.put(state="finished", done=reporter.record.total, message="")


def _run_when_unlocked(job: Job, work: Callable[[Job, Reporter], None], reporter: Reporter) -> None:
    """Do the work of a job. If another process runs it, such as an attempt that was presumed dead, wait for its end."""
    while True:
        try:
            work(job, reporter)
            return
        except Taken as taken:
            reporter.put(message=str(taken))
            time.sleep(WAIT)


def _train(job: Job, reporter: Reporter) -> None:
    folder = Folder(Path(job.root))
    execute_part(folder, job.name, job.started, reporter, listeners=open_loggers(job.log, reporter.note))


def _reproduce(job: Job, reporter: Reporter) -> None:
    folder, setting = Path(job.root), job.setting
    experiment = EXPERIMENTS[setting["experiment"]](setting["quick"])
    with owning(Folder(folder), [job.name]):
        reproduce_part(experiment, folder, job.name, setting["num_seeds"], _reporting(reporter))
    if is_reproduced(experiment, folder, setting["num_seeds"]):
        reproduce(experiment, folder, num_seeds=setting["num_seeds"], command=setting["command"], side_by_side=False)


def _reporting(reporter: Reporter) -> Callable[[int, int], None]:
    """Return a callback that reports the progress of a training of a reproduction."""

    def progress(done: int, total: int) -> None:
        if total != reporter.record.total:
            reporter.begin(reporter.record.name, total, done)
        reporter.advance(reporter.record.name, done, "")

    return progress


@dataclass(frozen=True)
class Search:
    """The progress of the search for one algorithm's options, and at its end the result.

    `config` is the digest of the configuration that the search uses. A stage consists of the combinations tried, the
    metric and the trials.
    """

    config: str
    stages: list[tuple[list[dict[str, Any]], str, list[TrialRecord]]] = field(default_factory=list)
    found: TunedAlgorithm | None = None


_SEARCH = TypeAdapter(Search)


def read_search(folder: Folder, name: str) -> Search:
    """Read the progress of a search. One that used another configuration is ignored."""
    config = hashlib.sha256(folder.untuned.read_bytes()).hexdigest()
    path = _search_path(folder, name)
    search = _SEARCH.validate_json(path.read_bytes()) if path.exists() else Search(config)
    return search if search.config == config else Search(config)


def _write_search(folder: Folder, name: str, search: Search) -> None:
    write_atomically(_search_path(folder, name), _SEARCH.dump_json(search))


def _search_path(folder: Folder, name: str) -> Path:
    return folder.jobs / f"{slug(name)}.search"


def _tune(job: Job, reporter: Reporter) -> None:
    folder = Folder(Path(job.root))
    config = load_run(folder.untuned)
    study = prepare_tuning(config)
    with owning(folder, [job.name]):
        reporter.begin(job.name, 1 + config.tune.num_extensions, len(read_search(folder, job.name).stages))
        if read_search(folder, job.name).found is None:
            save_stages = lambda attempt: _saving_stages(attempt, folder, job.name, reporter)
            found = tune_algorithm(study, job.name, lambda text: reporter.put(latest=text), save_stages)
            _write_search(folder, job.name, replace(read_search(folder, job.name), found=found))


def _saving_stages(attempt: Try, folder: Folder, name: str, reporter: Reporter) -> Try:
    """Save the trials of each stage of a search, so that a job that was killed continues with the next stage."""

    def saved(choices: Sequence[Options]) -> Trials:
        search = read_search(folder, name)
        for known, metric, trials in search.stages:
            if known == list(choices):
                return metric, trials
        metric, trials = attempt(choices)
        stages = [*search.stages, (list(choices), metric, trials)]
        _write_search(folder, name, replace(search, stages=stages))
        reporter.put(done=len(stages))
        return metric, trials

    return saved


_TASKS: dict[JobTask, Callable[[Job, Reporter], None]] = {"train": _train, "tune": _tune, "reproduce": _reproduce}


@contextlib.contextmanager
def stopping_at(number: int) -> Iterator[None]:
    """Treat a signal like Ctrl-C: the job saves a checkpoint and ends."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)
