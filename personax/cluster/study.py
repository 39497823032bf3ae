"""The head of a study: submits its jobs, follows them, and submits again what died.

Everything that it knows is in the run folder, so a study survives its head: `jobs/launched.json` has the engine and the
ids of the jobs, and each job reports its own progress.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from personax.cluster.engine import Engine, Launch, Launcher
from personax.cluster.jobs import Job, JobRecord, JobTask, read_record, write_record
from personax.data.locks import sole_user
from personax.experiment.checkpoint import write_atomically
from personax.experiment.folders import Folder

ATTEMPTS = 5  # of a job without progress, before it counts as failed


@dataclass(frozen=True)
class Launched:
    """The last state of the head of a study: the engine, the jobs and their ids."""

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

    @property
    def launch(self) -> Launch:
        """The engine that the study uses."""
        return Launch(self.launcher, self.address, self.options, self.parallel, tuple(self.log))


_LAUNCHED = TypeAdapter(Launched)


class JobView(NamedTuple):
    """The standing of a job: what it reported last, and whether its engine knows it."""

    name: str
    state: str  # waiting, running, finished, failed, or lost: it died, or was never started
    record: JobRecord
    words: str = ""


class JobsFailed(ValueError):
    """Jobs of a study ended with an error, or died again and again."""


def now() -> str:
    """The time of day, for records."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_launched(root: Path) -> Launched | None:
    """Read how the jobs of a run were started, if they were."""
    path = _launched_path(root)
    return _LAUNCHED.validate_json(path.read_bytes()) if path.exists() else None


def _launched_path(root: Path) -> Path:
    return Folder(root).jobs / "launched.json"


def heading(root: Path) -> AbstractContextManager[None]:
    """Be the only head of a study, or raise `Taken`."""
    path = Folder(root).lock("head of the study")
    path.parent.mkdir(parents=True, exist_ok=True)
    return sole_user(path, f"The study in {root}")


def views(root: Path, names: Sequence[str], alive: dict[str, str]) -> list[JobView]:
    """The standing of jobs, of which the engine has those in `alive`."""
    found = []
    for name in names:
        record = read_record(root, name) or JobRecord(name, "waiting")
        if record.state in ("finished", "failed"):
            state, words = record.state, record.words
        elif name in alive:
            state, words = ("running" if record.state == "running" else "waiting"), alive[name] or record.words
        else:
            state, words = "lost", ""
        found.append(JobView(name, state, record, words))
    return found


def follow(
    root: Path,
    engine: Engine,
    jobs: Sequence[Job],
    launched: Launched,
    show: Callable[[list[JobView]], None],
    notify: Callable[[str], None],
) -> None:
    """Submit the jobs that no engine has, follow all of them to their end, and submit again those that died.

    Raises `JobsFailed` at the end if some failed. Ctrl-C does not affect the jobs.
    """
    by_name = {job.name: job for job in jobs}
    tries: dict[str, tuple[int, int]] = {}  # since the last progress, and the rounds that were done then
    write_atomically(_launched_path(root), _LAUNCHED.dump_json(launched))
    alive = engine.alive(launched.ids)
    for name in by_name:  # what an earlier head saw end is tried again
        if name not in alive:
            write_record(root, _waiting(root, name))
    while True:
        alive = engine.alive(launched.ids)
        found = views(root, list(by_name), alive)
        show(found)
        lost = [view for view in found if view.state == "lost"]
        room = len(lost) if engine.room is None else max(engine.room - len(alive), 0)
        again = [by_name[view.name] for view in lost[:room] if _may_try(root, view, tries, notify)]
        if again:
            for job in again:
                write_record(root, _waiting(root, job.name))
            launched = replace(launched, ids={**launched.ids, **engine.submit(again)})
            write_atomically(_launched_path(root), _LAUNCHED.dump_json(launched))
        elif not alive and not lost:
            break
        time.sleep(engine.pause)
    if failed := [view for view in found if view.state == "failed"]:
        lines = [f"{view.name}: {view.words}" for view in failed]
        raise JobsFailed("\n".join([*lines, f"Their logs are in {Folder(root).jobs / 'log'}."]))
    engine.close(launched.ids)


def _waiting(root: Path, name: str) -> JobRecord:
    """The record of a job that is submitted now: where it was, if it has run before."""
    before = read_record(root, name) or JobRecord(name)
    return JobRecord(name, "waiting", done=before.done, total=before.total, updated=time.time())


def _may_try(root: Path, view: JobView, tries: dict[str, tuple[int, int]], notify: Callable[[str], None]) -> bool:
    """Return whether to submit a job that is nowhere; one that dies again and again without progress failed."""
    number, done = tries.get(view.name, (0, 0))
    if view.record.done > done:
        number, done = 1, view.record.done
    tries[view.name] = number + 1, done
    if number < ATTEMPTS:
        if number:
            notify(f"{view.name} died{_where(view.record)} and is submitted again.")
        return True
    words = f"died {ATTEMPTS} times without progress"
    write_record(root, replace(view.record, state="failed", words=words))
    return False


def _where(record: JobRecord) -> str:
    return f" on {record.host}" if record.host else ""
