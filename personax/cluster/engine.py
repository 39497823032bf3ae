"""The contract of an engine that runs jobs, and the choice of one by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from personax.cluster.jobs import Job
from personax.values import check_names

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
        """The most jobs to submit at the same time; None for an engine with a queue of its own."""
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


def make_engine(launch: Launch, root: Path) -> Engine:
    """The engine of a study in the folder `root`. Its package is imported now."""
    check_names("--launcher", [launch.launcher], LAUNCHERS, "launcher")
    if launch.launcher == "ray":
        from personax.cluster.on_ray import RayEngine

        return RayEngine(launch, root)
    if launch.address is not None:
        raise ValueError("`--address` is that of a Ray cluster. Leave it out, or use --launcher ray.")
    from personax.cluster.on_submitit import LocalEngine, SlurmEngine

    return LocalEngine(launch, root) if launch.launcher == "local" else SlurmEngine(launch, root)


def typed(options: Mapping[str, str]) -> dict[str, int | float | str]:
    """Options of an engine as numbers where they are.

    >>> typed({"timeout_min": "60", "num_gpus": "0.5", "partition": "gpu"})
    {'timeout_min': 60, 'num_gpus': 0.5, 'partition': 'gpu'}
    """
    return {name: _typed(text) for name, text in options.items()}


def _typed(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
