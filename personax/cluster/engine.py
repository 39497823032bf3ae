"""The contract of an engine that runs jobs, and the choice of one by name."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from personax.cluster.jobs import Job
from personax.values.imports import optional_import

Launcher = Literal["local", "slurm", "ray"]
LAUNCHERS: tuple[Launcher, ...] = ("local", "slurm", "ray")


class Launch(NamedTuple):
    """The engine that a study uses.

    `address` is that of a Ray cluster, `options` are given to the engine with each job, `parallel` is the most jobs at
    the same time, and `log` names the loggers that jobs open.
    """

    launcher: Launcher
    address: str | None = None
    options: Mapping[str, str] = {}
    parallel: int | None = None
    log: tuple[str, ...] = ()


class Engine(Protocol):
    """Runs jobs somewhere. Their ids are texts that another process can use to find them again."""

    @property
    def room(self) -> int | None:
        """The most jobs to submit at the same time; None for an engine with its own queue."""
        ...

    @property
    def pause(self) -> float:
        """Seconds between two looks at the jobs."""
        ...

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Start jobs, or queue them; return the id of each by its name."""
        ...

    def alive(self, ids: Mapping[str, str]) -> dict[str, str]:
        """Return the jobs, by name, that are queued or running, each with a word about it or an empty text."""
        ...

    def cancel(self, ids: Mapping[str, str]) -> None:
        """Stop jobs; each saves its state if it can."""
        ...

    def close(self, ids: Mapping[str, str]) -> None:
        """Release what the engine holds for a study that has ended."""
        ...


def require_engine(launcher: Launcher) -> None:
    """Raise, before anything is computed, if the package or the commands of an engine are missing."""
    extra = "ray" if launcher == "ray" else "slurm"
    optional_import("ray" if launcher == "ray" else "submitit", f"--launcher {launcher}", extra)
    if launcher == "slurm" and shutil.which("sbatch") is None:
        raise ValueError("sbatch is not found: this machine cannot submit to Slurm. Use --launcher local or ray.")


def make_engine(launch: Launch, root: Path) -> Engine:
    """The engine of a study in the folder `root`."""
    require_engine(launch.launcher)
    if launch.launcher == "ray":
        from personax.cluster.on_ray import RayEngine

        return RayEngine(launch, root)
    if launch.address is not None:
        raise ValueError("`--address` is that of a Ray cluster. Leave it out, or use --launcher ray.")
    from personax.cluster.on_submitit import LocalEngine, SlurmEngine

    return LocalEngine(launch, root) if launch.launcher == "local" else SlurmEngine(launch, root)


def typed(options: Mapping[str, str]) -> dict[str, int | float | str]:
    """Options of an engine as numbers where they are.

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
