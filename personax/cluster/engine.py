"""The interface of an engine that runs jobs, and the choice of one by name."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from personax.cluster.jobs import Job
from personax.values.imports import optional_import

Launcher = Literal["local", "slurm", "ray"]
LAUNCHERS: tuple[Launcher, ...] = ("local", "slurm", "ray")


class Launch(NamedTuple):
    """The engine of a study.

    `address` is the address of a Ray cluster, `options` are passed to the engine with each job, `parallel` is the
    maximum number of concurrent jobs, and `log` names the loggers that jobs open.
    """

    launcher: Launcher
    address: str | None = None
    options: Mapping[str, str] = {}
    parallel: int | None = None
    log: tuple[str, ...] = ()


class EngineUnavailable(ConnectionError):
    """The engine does not answer, so the state of its jobs is unknown."""


class Engine(Protocol):
    """Runs jobs. Each job has an id, a text by which any process can find the job again.

    `submit`, `alive` and `cancel` raise `EngineUnavailable` if the engine does not answer.
    """

    @property
    def max_jobs(self) -> int | None:
        """The maximum number of jobs submitted at a time; None for an engine with its own queue."""
        ...

    @property
    def pause(self) -> float:
        """Seconds between two queries of the state of the jobs."""
        ...

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Start or queue jobs, and return their ids by name."""
        ...

    def alive(self, ids: Mapping[str, str]) -> dict[str, str]:
        """Return the queued and running jobs by name, each with the reason why it waits or an empty text."""
        ...

    def cancel(self, ids: Mapping[str, str]) -> None:
        """Stop jobs, after they have saved a checkpoint if possible."""
        ...

    def close(self) -> None:
        """Release the resources that the engine holds for a study, once all its jobs have ended."""
        ...


def require_engine(launcher: Launcher) -> None:
    """Raise an error, before anything is computed, if the package or the commands of an engine are missing."""
    extra = "ray" if launcher == "ray" else "slurm"
    optional_import("ray" if launcher == "ray" else "submitit", f"--launcher {launcher}", extra)
    if launcher == "slurm" and shutil.which("sbatch") is None:
        raise EngineUnavailable("Command not found: sbatch. Run this on a Slurm node, or use --launcher local or ray.")


def make_engine(launch: Launch, root: Path) -> Engine:
    """Return the engine of a study in the folder `root`."""
    require_engine(launch.launcher)
    if launch.launcher == "ray":
        from personax.cluster.on_ray import RayEngine

        return RayEngine(launch, root)
    if launch.address is not None:
        raise ValueError("`--address` is only for Ray. Omit it, or use --launcher ray.")
    from personax.cluster.on_submitit import LocalEngine, SlurmEngine

    return LocalEngine(launch, root) if launch.launcher == "local" else SlurmEngine(launch, root)


def typed(options: Mapping[str, str]) -> dict[str, int | float | str]:
    """Convert the options of an engine that are numbers.

    >>> typed({"time": "60", "num_gpus": "0.5", "partition": "gpu"})
    {'time': 60, 'num_gpus': 0.5, 'partition': 'gpu'}
    """
    return {name: _typed(text) for name, text in options.items()}


def _typed(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
