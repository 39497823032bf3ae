"""Jobs as tasks of an existing Ray cluster.

A Ray task ends with its owner. The tasks of a study are therefore owned by a detached actor, which survives the process
that started the study. Ray retries a task if its worker process or its node dies.
"""

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from personax.cluster.engine import EngineUnavailable, Launch, typed
from personax.cluster.jobs import Job, run_job
from personax.experiment.folders import slug
from personax.values.imports import optional_import

NAMESPACE = "personax"
RETRIES = 3  # of a task whose worker or node died; then the coordinator resubmits the job
ANSWER_SECONDS = 60.0
CONNECT_SECONDS = 10.0
_PASSED = ("JAX_", "PERSONAX_", "PYTHONPATH", "XLA_")  # prefixes of the environment variables that jobs inherit


class Keeper:
    """The actor in the cluster that owns the tasks of a study."""

    def __init__(self) -> None:
        self.tasks: dict[str, Any] = {}

    def submit(self, jobs: list[Job], options: dict[str, Any]) -> None:
        """Start a task for each job, in its own worker process, which frees its memory at the end."""
        ray = _ray()
        task = ray.remote(max_calls=1)(run_job).options(max_retries=RETRIES, **options)
        for job in jobs:
            self.tasks[job.name] = task.remote(job)

    def alive(self) -> list[str]:
        """Return the names of the jobs that are waiting or running."""
        ray = _ray()
        waiting = list(self.tasks.values())
        ended = set(ray.wait(waiting, num_returns=len(waiting), timeout=0)[0]) if waiting else set()
        return [name for name, task in self.tasks.items() if task not in ended]

    def cancel(self) -> None:
        """Interrupt all jobs, like Ctrl-C."""
        ray = _ray()
        for name in self.alive():
            ray.cancel(self.tasks[name])


class RayEngine:
    """Tasks on the cluster at an address, by default the cluster on this machine."""

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
            raise EngineUnavailable(
                f"There is no Ray cluster at {address} ({error}). Start one with `ray start --head`, or give --address."
            ) from None
        self.name = f"study-{slug(str(root.resolve()))}"

    @property
    def max_jobs(self) -> int | None:
        return self.parallel

    def submit(self, jobs: Sequence[Job]) -> dict[str, str]:
        lasting = {"name": self.name, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
        keeper = self.ray.remote(Keeper).options(**lasting).remote()
        try:
            self._ask(keeper.submit.remote(list(jobs), self.options))
        except self.ray.exceptions.RayActorError as error:
            raise _unavailable(error) from None
        return {job.name: self.name for job in jobs}

    def alive(self, ids: Mapping[str, str]) -> dict[str, str]:
        keeper = self._keeper()
        if keeper is None:
            return {}
        try:
            known = self._ask(keeper.alive.remote())
        except self.ray.exceptions.RayActorError:  # its node died, and with it the tasks that it owned
            return {}
        return {name: "" for name in known if name in ids}

    def cancel(self, ids: Mapping[str, str]) -> None:
        if keeper := self._keeper():
            with contextlib.suppress(self.ray.exceptions.RayActorError):  # its tasks died with it
                self._ask(keeper.cancel.remote())

    def close(self) -> None:
        """End the actor, and with it any remaining tasks."""
        if keeper := self._keeper():
            self.ray.kill(keeper)

    def _keeper(self) -> Any:
        """Return the actor of the study, if there is one."""
        try:
            return self.ray.get_actor(self.name)
        except ValueError:
            return None
        except self.ray.exceptions.RayError as error:
            raise _unavailable(error) from None

    def _ask(self, answer: Any) -> Any:
        """Wait for an answer of the actor; raise `RayActorError` if the actor is dead."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(answer, timeout=ANSWER_SECONDS)
        except errors.RayTaskError as error:
            raise ValueError(f"Ray rejected the request: {error.cause}") from None
        except errors.RayError as error:
            if isinstance(error, errors.RayActorError) and not isinstance(error, errors.ActorUnavailableError):
                raise
            raise _unavailable(error) from None


def _unavailable(error: Exception) -> EngineUnavailable:
    return EngineUnavailable(f"The Ray cluster does not answer ({type(error).__name__}).")


def _require_listening(address: str) -> None:
    """Raise `OSError` if nothing listens at HOST:PORT, because Ray would keep trying for many minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()


def _ray() -> Any:
    return optional_import("ray", "--launcher ray", "ray")
