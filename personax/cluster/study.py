"""The coordinator of a study: it submits the jobs, follows them, and resubmits those that die.

All its state is in the run folder, so a study survives its coordinator: `jobs/launched.json` has the engine and the ids
of the jobs, and each job reports its own progress.
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from personax.cluster.engine import Engine, EngineUnavailable, Launch, Launcher
from personax.cluster.jobs import ATTEMPTS, Attempts, Job, JobRecord, JobTask, read_record, record_path, write_record
from personax.data.locks import sole_user
from personax.experiment.checkpoint import write_atomically
from personax.experiment.folders import Folder

LONGEST_PAUSE = 60.0  # seconds between two attempts to reach an engine that does not answer

Notify = Callable[[str], None]


@dataclass(frozen=True)
class Launched:
    """The state of a coordinator: the engine, the names of all jobs of the study, and the ids of the submitted ones.

    `host` is the machine of the coordinator, and with `--launcher local` that of its jobs.
    """

    launcher: Launcher
    address: str | None
    options: dict[str, str]
    parallel: int | None
    task: JobTask
    started: str
    names: list[str]
    ids: dict[str, str] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    setting: dict[str, Any] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)

    @property
    def launch(self) -> Launch:
        """The engine of the study."""
        return Launch(self.launcher, self.address, self.options, self.parallel, tuple(self.log))

    @property
    def is_elsewhere(self) -> bool:
        """True if the jobs are processes of another machine, whose state cannot be queried from here."""
        return self.launcher == "local" and self.host != socket.gethostname()

    def has_same_work(self, other: "Launched") -> bool:
        """Return True if the jobs of both do the same."""
        return self.task == other.task and self.setting == other.setting


_LAUNCHED = TypeAdapter(Launched)


class JobView(NamedTuple):
    """The state of a job according to its own last report and to its engine."""

    name: str
    state: str  # waiting, running, stopped, finished, failed, or lost: it died or was never submitted
    record: JobRecord
    message: str = ""


class JobsFailed(ValueError):
    """Jobs of a study ended with an error, or died repeatedly."""


def now() -> str:
    """Return the current time for records."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_launched(root: Path) -> Launched | None:
    """Read the state of the last coordinator of a run, if there was one."""
    path = _launched_path(root)
    return _LAUNCHED.validate_json(path.read_bytes()) if path.exists() else None


def _write_launched(root: Path, launched: Launched) -> None:
    write_atomically(_launched_path(root), _LAUNCHED.dump_json(launched))


def _launched_path(root: Path) -> Path:
    return Folder(root).jobs / "launched.json"


def coordinating(root: Path) -> AbstractContextManager[None]:
    """Acquire the coordinator lock of a study, or raise `Taken`."""
    path = Folder(root).lock("coordinator")
    path.parent.mkdir(parents=True, exist_ok=True)
    return sole_user(path, f"The study in {root}")


def continued(root: Path, engine: Engine, launched: Launched) -> Launched:
    """Add the ids of jobs that an earlier coordinator has submitted for the same work.

    Raises an error if jobs with other settings are still running, because both would write the same files.
    """
    before = read_launched(root)
    known = before is not None and before.launcher == launched.launcher and not before.is_elsewhere
    if before is not None and before.has_same_work(launched):
        return replace(launched, started=before.started, ids=before.ids if known else {})
    if before is not None and known and before.ids and (alive := engine.alive(before.ids)):
        raise ValueError(
            f"Jobs with other settings are still running in {root}: {', '.join(alive)}. Wait for their end, or cancel "
            "them: rerun the command that started them and press Ctrl-C."
        )
    for name in launched.names:  # reports about other work
        record_path(root, name).unlink(missing_ok=True)
    return launched


def views(root: Path, names: Sequence[str], alive: Mapping[str, str] | None) -> list[JobView]:
    """Return the state of jobs. Those in `alive` are queued or running; if it is None, only the reports are known."""
    found = []
    for name in names:
        record = read_record(root, name) or JobRecord(name, "waiting")
        if alive is None or record.state in ("finished", "failed"):
            state, message = record.state, record.message
        elif name in alive:
            state, message = ("running" if record.state == "running" else "waiting"), alive[name] or record.message
        else:
            state, message = "lost", ""
        found.append(JobView(name, state, record, message))
    return found


def follow(
    root: Path,
    engine: Engine,
    jobs: Sequence[Job],
    launched: Launched,
    show: Callable[[list[JobView]], None],
    notify: Notify,
) -> None:
    """Submit the jobs that are not queued or running, follow all of them to their end, and resubmit those that die.

    `launched` names all jobs of the study, `jobs` are those that have not finished. If the engine stops answering, its
    jobs are left alone until it answers again. Raises `JobsFailed` at the end if jobs failed.
    """
    coordinator = _Coordinator(root, engine, {job.name: job for job in jobs}, launched, notify)
    coordinator.prepare()
    pause, answered = engine.pause, False
    while True:
        try:
            found, ended = coordinator.step(show)
        except EngineUnavailable as error:
            if not answered:
                raise
            pause = min(max(2 * pause, 1.0), LONGEST_PAUSE)
            notify(f"{error} Trying again in {pause:.0f} s.")
        else:
            pause, answered = engine.pause, True
            if ended:
                break
        time.sleep(pause)
    engine.close()
    if failed := [view for view in found if view.state == "failed"]:
        lines = [f"{view.name}: {view.message}" for view in failed]
        raise JobsFailed("\n".join([*lines, f"Their logs are in {Folder(root).jobs / 'log'}."]))


class _Coordinator:
    """The loop body of `follow`."""

    def __init__(self, root: Path, engine: Engine, jobs: dict[str, Job], launched: Launched, notify: Notify) -> None:
        self.root, self.engine, self.jobs, self.launched, self.notify = root, engine, jobs, launched, notify
        self.attempts: dict[str, Attempts] = {}
        self.submitted: set[str] = set()  # and not known to have died

    def prepare(self) -> None:
        """Write the state, and reset the reports of jobs that are not alive, so that earlier failures are retried."""
        alive = self._alive()
        _write_launched(self.root, self.launched)
        for name in self.jobs:
            if name not in alive:
                write_record(self.root, _waiting(self.root, name))
            before = read_record(self.root, name)
            self.attempts[name] = Attempts(0, 0 if before is None else before.done)
        self.submitted = set(alive)

    def step(self, show: Callable[[list[JobView]], None]) -> tuple[list[JobView], bool]:
        """Query all jobs and resubmit those that died; return their states, and True if all have ended."""
        alive = self._alive()
        found = views(self.root, self.launched.names, alive)
        show(found)
        lost = [view for view in found if view.state == "lost" and view.name in self.jobs]
        free = len(lost) if self.engine.max_jobs is None else max(self.engine.max_jobs - len(alive), 0)
        again = [view for view in lost[:free] if self._may_retry(view)]
        if again:
            self._submit(again)
        return found, not (again or alive or lost)

    def _alive(self) -> dict[str, str]:
        return self.engine.alive(self.launched.ids) if self.launched.ids else {}

    def _submit(self, lost: list[JobView]) -> None:
        for view in lost:
            write_record(self.root, _waiting(self.root, view.name))
        # A submission that was accepted although the answer got lost is repeated. The second job waits for the lock of
        # the first one, and finds its work done.
        ids = self.engine.submit([self.jobs[view.name] for view in lost])
        self.submitted |= ids.keys()
        self.launched = replace(self.launched, ids={**self.launched.ids, **ids})
        _write_launched(self.root, self.launched)

    def _may_retry(self, view: JobView) -> bool:
        """Return True if a job that is not alive may be submitted; one that dies repeatedly without progress failed."""
        died = view.name in self.submitted
        if died:
            self.submitted.remove(view.name)
            self.attempts[view.name] = self.attempts[view.name].another(view.record.done)
        if self.attempts[view.name].number < ATTEMPTS:
            if died:
                where = f" on {view.record.host}" if view.record.host else ""
                self.notify(f"{view.name} died{where} and is resubmitted.")
            return True
        message = f"died {ATTEMPTS} times without progress"
        write_record(self.root, replace(view.record, state="failed", message=message))
        return False


def _waiting(root: Path, name: str) -> JobRecord:
    """Return the report of a job that is about to be submitted, with the progress of earlier attempts."""
    before = read_record(root, name) or JobRecord(name)
    return JobRecord(name, "waiting", done=before.done, total=before.total, updated=time.time())
