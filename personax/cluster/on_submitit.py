"""Jobs as processes on this machine, or as arrays on Slurm: both through submitit."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from personax.cluster.engine import EngineUnavailable, Launch, typed
from personax.cluster.jobs import ATTEMPTS, Attempts, Job, read_record, run_job, stopping_at
from personax.experiment.folders import Folder
from personax.values.imports import optional_import

LONG = 365 * 24 * 60  # minutes: processes on this machine have no time limit
HOURS = 4  # the default time limit of a job on Slurm; a job that needs longer is requeued
ANSWER_SECONDS = 60.0  # the time limit of Slurm's commands
_MOST_TIMEOUTS = 100_000  # the limit is on attempts without progress
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")


class ResumableJob:
    """A job that submitit requeues when it reaches its time limit or is preempted."""

    def __init__(self, job: Job, attempts: Attempts = Attempts()) -> None:
        self.job, self.attempts = job, attempts

    def __call__(self) -> None:
        with stopping_at(signal.SIGTERM):
            run_job(self.job)

    def checkpoint(self) -> Any:
        """Return the same job, which continues from its last checkpoint; raise if repeated attempts made no progress.

        submitit calls this in the running job.
        """
        record = read_record(Path(self.job.root), self.job.name)
        attempts = self.attempts.another(0 if record is None else record.done)
        if attempts.number >= ATTEMPTS:
            raise TimeoutError(
                f"interrupted {ATTEMPTS} times without progress. If the time limit was the cause, raise it: "
                "--job time=MINUTES"
            )
        return _submitit().helpers.DelayedSubmission(ResumableJob(self.job, attempts))


class LocalEngine:
    """Processes on this machine, each with its own GPU if there are any. They survive the process that started them.

    An id is the number of a process, which only means something on the machine that started it.
    """

    pause = 0.2

    def __init__(self, launch: Launch, root: Path) -> None:
        self.logs = _logs(root)
        self.gpus, self.executor, self.processes = _gpus(), _submitit().LocalExecutor(self.logs), {}
        self.parallel = launch.parallel or len(self.gpus) or os.cpu_count() or 1
        if launch.options:
            raise ValueError("`--job` is only for Slurm and Ray. Processes on this machine have no options.")

    @property
    def max_jobs(self) -> int | None:
        return self.parallel

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Start a process for each job. They ignore Ctrl-C: the coordinator asks whether to cancel them."""
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
        """Return True if a process that this or an earlier coordinator has started is still running."""
        if number in self.processes:
            return not self.processes[number][1].done()
        command = _command_of(int(number))  # another process may have this number now
        return "submitit.local._local" in command and str(self.logs) in command

    def cancel(self, ids: Mapping[str, str]) -> None:
        for number in ids.values():
            if self._is_alive(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGTERM)  # its controller forwards the signal to the job

    def close(self) -> None: ...


class SlurmEngine:
    """Arrays of jobs on Slurm, which restarts those of a failed node on another one."""

    pause = 3.0  # squeue puts load on the controller, which all users share

    def __init__(self, launch: Launch, root: Path) -> None:
        self.executor = _submitit().SlurmExecutor(_logs(root), max_num_timeout=_MOST_TIMEOUTS)
        options: dict[str, Any] = {"job_name": "personax", "time": 60 * HOURS, **typed(launch.options)}
        if launch.parallel is not None:
            options["array_parallelism"] = launch.parallel
        self.executor.update_parameters(**options, additional_parameters={"requeue": True})

    @property
    def max_jobs(self) -> int | None:
        return None

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        try:
            submitted = self.executor.submit_array([ResumableJob(job) for job in jobs])
        except _submitit().core.utils.FailedJobError as error:
            raise EngineUnavailable(f"sbatch failed: {str(error).strip()}") from None
        return {job.name: one.job_id for job, one in zip(jobs, submitted, strict=True)}

    def alive(self, ids: Mapping[str, str]) -> dict[str, str]:
        """Ask squeue, which also works without Slurm's accounting."""
        listed = _ask("squeue", "--me", "--array", "--noheader", "--format=%i|%T|%r")
        rows = (line.strip().split("|", 2) for line in listed.splitlines() if line.strip())
        known = {number: reason if state in _WAITING and reason != "None" else "" for number, state, reason in rows}
        return {name: known[number] for name, number in ids.items() if number in known}

    def cancel(self, ids: Mapping[str, str]) -> None:
        if ids:
            _ask("scancel", "--quiet", *ids.values())

    def close(self) -> None: ...


def _ask(*command: str) -> str:
    """Run a command of Slurm and return its output."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise EngineUnavailable(f"{command[0]} failed: {error}") from None
    if asked.returncode:
        raise EngineUnavailable(f"{command[0]} failed: {asked.stderr.strip()}")
    return asked.stdout


def _command_of(number: int) -> str:
    """Return the command line of a process of this machine; an empty text if there is none."""
    if Path("/proc/self/cmdline").exists():  # Linux
        with contextlib.suppress(OSError):
            return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return ""
    listed = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(number)], capture_output=True, text=True)
    return listed.stdout.strip()


def _submitit() -> Any:
    return optional_import("submitit", "--launcher local or slurm", "slurm")


def _logs(root: Path) -> Path:
    return Folder(root.resolve()).jobs / "log"


def _gpus() -> list[int]:
    """Return the NVIDIA GPUs of this machine, without asking JAX, which would reserve their memory."""
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
