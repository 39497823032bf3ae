"""Jobs as processes on this machine, or as arrays on Slurm: both by submitit."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from personax.cluster.engine import Launch, typed
from personax.cluster.jobs import Job, run_job, stopping_at
from personax.experiment.folders import Folder
from personax.values.imports import optional_import

LONG = 365 * 24 * 60  # minutes: processes on this machine have no limit of time
HOURS = 4  # of a job on Slurm, by default; one that needs more is queued again
_MOST_TIMEOUTS = 1000
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")


class ResumableJob:
    """A job that submitit queues again when its time is over or its machine is taken away."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self) -> None:
        with stopping_at(signal.SIGTERM):
            run_job(self.job)

    def checkpoint(self) -> Any:
        """Return the same job, which continues from its last checkpoint."""
        return _submitit().helpers.DelayedSubmission(self)


class LocalEngine:
    """Processes on this machine, each with its own GPU if there are any. They survive the process that started them."""

    pause = 0.2

    def __init__(self, launch: Launch, root: Path) -> None:
        self.gpus, self.executor, self.processes = _gpus(), _submitit().LocalExecutor(_logs(root)), {}
        self.parallel = launch.parallel or len(self.gpus) or os.cpu_count() or 1
        if launch.options:
            raise ValueError("`--job` is for Slurm and Ray. Processes on this machine have no options.")

    @property
    def room(self) -> int | None:
        return self.parallel

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Start a process for each job. Ctrl-C does not reach them, because a person is asked what to do with them."""
        with _ignored(signal.SIGINT):
            return {job.name: self._start(job) for job in jobs}

    def _start(self, job: Job) -> str:
        busy = [gpu for gpu, process in self.processes.values() if not process.done()]
        gpu = min(self.gpus, key=busy.count, default=None)
        visible = {} if gpu is None else {"gpus_per_node": 1, "visible_gpus": (gpu,)}
        self.executor.update_parameters(timeout_min=LONG, **visible)
        process = self.executor.submit(ResumableJob(job))
        self.processes[process.job_id] = gpu, process
        return process.job_id

    def alive(self, ids: Mapping[str, str]) -> dict[str, str]:
        return {name: "" for name, number in ids.items() if self._is_alive(number)}

    def _is_alive(self, number: str) -> bool:
        """Return whether a process that this one, or an earlier head of the study, has started still runs."""
        if number in self.processes:
            return not self.processes[number][1].done()
        try:
            return b"submitit.local._local" in Path(f"/proc/{number}/cmdline").read_bytes()
        except OSError:
            return False

    def cancel(self, ids: Mapping[str, str]) -> None:
        for number in ids.values():
            if self._is_alive(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGTERM)  # its controller passes the signal to the job

    def close(self, ids: Mapping[str, str]) -> None: ...


class SlurmEngine:
    """Arrays of jobs on Slurm, which starts those of a failed node again elsewhere."""

    pause = 3.0  # squeue is work for the controller that all users share

    def __init__(self, launch: Launch, root: Path) -> None:
        self.executor = _submitit().SlurmExecutor(_logs(root), max_num_timeout=_MOST_TIMEOUTS)
        options: dict[str, Any] = {"job_name": "personax", "time": 60 * HOURS, **typed(launch.options)}
        if launch.parallel is not None:
            options["array_parallelism"] = launch.parallel
        self.executor.update_parameters(**options, additional_parameters={"requeue": True})
        self.known: dict[str, tuple[str, str]] = {}  # state and reason of each job in the queue

    @property
    def room(self) -> int | None:
        return None

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        submitted = self.executor.submit_array([ResumableJob(job) for job in jobs]) if jobs else []
        self.known |= {one.job_id: ("PENDING", "") for one in submitted}
        return {job.name: one.job_id for job, one in zip(jobs, submitted, strict=True)}

    def alive(self, ids: Mapping[str, str]) -> dict[str, str]:
        """Ask squeue, which also works without Slurm's accounting; while the controller is away, nothing is known."""
        command = ["squeue", "--me", "--array", "--noheader", "--format=%i|%T|%r"]
        asked = subprocess.run(command, capture_output=True, text=True)
        if asked.returncode == 0:
            rows = (line.strip().split("|", 2) for line in asked.stdout.splitlines() if line.strip())
            self.known = {number: (state, reason) for number, state, reason in rows}
        described = lambda state, reason: reason if state in _WAITING and reason != "None" else ""
        return {name: described(*self.known[number]) for name, number in ids.items() if number in self.known}

    def cancel(self, ids: Mapping[str, str]) -> None:
        if ids:
            subprocess.run(["scancel", *ids.values()], check=True)

    def close(self, ids: Mapping[str, str]) -> None: ...


def _submitit() -> Any:
    return optional_import("submitit", "--launcher local or slurm", "slurm")


def _logs(root: Path) -> Path:
    return Folder(root).jobs / "log"


def _gpus() -> list[int]:
    """The NVIDIA GPUs of this machine; JAX is not asked, because it would take their memory."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [int(one) for one in given.split(",") if one.strip().isdigit()]
    return [int(path.name[6:]) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))]


@contextlib.contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    """Ignore a signal, here and in the processes that are started meanwhile."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
