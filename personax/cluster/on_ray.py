"""Jobs as tasks of an existing Ray cluster.

The tasks belong to a detached actor, so that they survive the process that started the study; without it, a Ray task
ends with its owner. Ray runs a task again if its worker process or its node dies.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from personax.cluster.engine import Launch, typed
from personax.cluster.jobs import Job, run_job
from personax.experiment.folders import slug
from personax.values.imports import optional_import

NAMESPACE = "personax"
RETRIES = 3  # of a task whose worker or node died; then the head of the study starts it again
SECONDS = 60.0  # to wait for an answer
CONNECT_SECONDS = 10.0
_PASSED = ("JAX_", "PERSONAX_", "PYTHONPATH", "XLA_")  # beginnings of the names of variables that jobs inherit


class Keeper:
    """The actor that owns the tasks of a study; it runs in the cluster."""

    def __init__(self) -> None:
        self.tasks: dict[str, Any] = {}

    def submit(self, jobs: list[Job], options: dict[str, Any]) -> None:
        """Start a task for each job. A worker process does one job: its memory is free again at the end."""
        ray = _ray()
        task = ray.remote(max_calls=1)(run_job).options(max_retries=RETRIES, **options)
        for job in jobs:
            self.tasks[job.name] = task.remote(job)

    def alive(self) -> list[str]:
        """Return the names of the jobs that wait or run."""
        ray = _ray()
        waiting = list(self.tasks.values())
        ended = set(ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]) if waiting else set()
        return [name for name, task in self.tasks.items() if task not in ended]

    def cancel(self) -> None:
        """Interrupt all jobs, as Ctrl-C does."""
        ray = _ray()
        for name in self.alive():
            ray.cancel(self.tasks[name])


class RayEngine:
    """Tasks on the cluster at an address, by default the one that runs on this machine."""

    pause = 0.5

    def __init__(self, launch: Launch, root: Path) -> None:
        self.ray = _ray()
        self.parallel, self.options = launch.parallel, {"num_cpus": 1, **typed(launch.options)}
        passed = {name: text for name, text in os.environ.items() if name.startswith(_PASSED)}
        address = launch.address or os.environ.get("RAY_ADDRESS") or "auto"
        try:
            _require_listening(address)
            self.ray.init(
                address,
                namespace=NAMESPACE,
                runtime_env={"env_vars": passed},
                log_to_driver=False,
                logging_level="ERROR",
            )
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"There is no Ray cluster at {address} ({error}). Start one with `ray start --head`, or give --address."
            ) from None
        self.name = f"study-{slug(str(root.resolve()))}"

    @property
    def room(self) -> int | None:
        return self.parallel

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        lasting = {"name": self.name, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
        keeper = self.ray.remote(Keeper).options(**lasting).remote()
        self._ask(keeper.submit.remote(list(jobs), self.options))
        return {job.name: self.name for job in jobs}

    def alive(self, ids: Mapping[str, str]) -> dict[str, str]:
        keeper, errors = self._keeper(), self.ray.exceptions
        if keeper is None:
            return {}
        try:
            known = self.ray.get(keeper.alive.remote(), timeout=SECONDS)
        except (errors.ActorUnavailableError, errors.GetTimeoutError):
            return dict.fromkeys(ids, "the cluster does not answer")
        except errors.RayActorError:  # its node died, and with it the tasks that it owned
            return {}
        return {name: "" for name in known if name in ids}

    def cancel(self, ids: Mapping[str, str]) -> None:
        if keeper := self._keeper():
            self._ask(keeper.cancel.remote())

    def close(self, ids: Mapping[str, str]) -> None:
        """End the actor, and with it tasks that still run."""
        if keeper := self._keeper():
            self.ray.kill(keeper)

    def _keeper(self) -> Any:
        """Return the actor of the study, if there is one."""
        try:
            return self.ray.get_actor(self.name)
        except ValueError:
            return None

    def _ask(self, answer: Any) -> Any:
        """Wait for the actor; a cluster that went away is an error in words."""
        try:
            return self.ray.get(answer, timeout=SECONDS)
        except self.ray.exceptions.RayError as error:
            name = type(error).__name__
            raise ConnectionError(f"The Ray cluster does not answer ({name}). Run `personax resume` later.") from None


def _require_listening(address: str) -> None:
    """Raise `OSError` if nobody listens at HOST:PORT, because Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def _ray() -> Any:
    return optional_import("ray", "--launcher ray", "ray")
