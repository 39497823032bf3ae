"""Measures of a run other than model scores: shares of active clients, a baseline, and curvature."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple
from typing import Protocol as Interface

import jax
import jax.numpy as jnp
import numpy as np
import optax

from personax.curvature import exact
from personax.data.federation import Federation
from personax.schedules import Schedule
from personax.simulation.results import Snapshot
from personax.typing import Array, Batch, Params, Task

NUM_POWER_STEPS = 30


class MeasuredRun(NamedTuple):
    """The state of a run that measures may read."""

    task: Task
    federation: Federation
    schedules: Sequence[Schedule]  # one per seed
    snapshot: Snapshot


class RunMeasure(Interface):
    """A measure that gives one number per seed and is not a model score."""

    @property
    def flag(self) -> str: ...
    @property
    def metric(self) -> str: ...
    def describe(self) -> str: ...
    def of_seeds(self, run: MeasuredRun) -> list[float]: ...


@dataclass(frozen=True)
class ActiveShare:
    """The mean share of active clients up to a virtual time, in % (see `Schedule.active_share`).

    With `to_the_end`, all members of a round count as active until it ends.
    """

    to_the_end: bool = False
    flag = ""
    metric = "active_share"

    def describe(self) -> str:
        """Describe the measure."""
        if self.to_the_end:
            return "the share of clients in the cohort"
        return "the share of clients that hold a model and have not yet delivered an update, averaged over virtual time"

    def of_seeds(self, run: MeasuredRun) -> list[float]:
        """Return the share of each seed's schedule so far."""
        times = np.broadcast_to(run.snapshot.time, len(run.schedules))
        return [self.of(schedule, when) for schedule, when in zip(run.schedules, times, strict=True)]

    def of(self, schedule: Schedule, time: float) -> float:
        """Average over 1000 time points up to `time`."""
        if self.to_the_end:
            return 100 * schedule.num_events / int(schedule.round_ends.sum()) / schedule.num_clients
        return 100 * float(schedule.active_share(np.linspace(0, time, 1000, endpoint=False)).mean())


@dataclass(frozen=True)
class MostFrequentClass:
    """The accuracy of always predicting the most frequent class of a client's training data.

    With `held_out`, the federation's newcomers are scored.
    """

    held_out: bool = False
    flag = ""
    metric = "accuracy"

    def describe(self) -> str:
        """Describe the measure."""
        return "always predicts the most frequent class of the client's training data; scored on its test data"

    def of_seeds(self, run: MeasuredRun) -> list[float]:
        """Return the accuracy in %, the same for every seed."""
        return [100 * self.of(self._scored(run.federation))] * len(run.schedules)

    def _scored(self, federation: Federation) -> Federation:
        if not self.held_out:
            return federation
        assert federation.newcomers is not None  # the experiment holds out some clients
        return federation.newcomers

    def of(self, federation: Federation) -> float:
        """Average over clients; the smaller class wins ties."""
        assert federation.test_y is not None and federation.test_offsets is not None  # every experiment has test data
        labels, test_labels = np.asarray(federation.y), np.asarray(federation.test_y)
        bounds = zip(pairwise(federation.offsets), pairwise(federation.test_offsets), strict=True)
        shares = []
        for train, test in bounds:
            classes, counts = np.unique(labels[slice(*train)], return_counts=True)
            shares.append(np.mean(test_labels[slice(*test)] == classes[counts.argmax()]))
        return float(np.mean(shares))


@dataclass(frozen=True)
class StepTimesCurvature:
    """A step size times the largest absolute Hessian eigenvalue of a client's training loss, averaged over clients.

    Above 2, a gradient step of this size on a quadratic with this eigenvalue moves away from the minimum. The
    eigenvalue is computed at the shared model by power iteration on all training data of `num_clients` evenly spaced
    clients.
    """

    lr: float
    num_clients: int = 10
    flag = ""
    metric = "step_times_curvature"

    def describe(self) -> str:
        """Describe the measure."""
        return (
            f"{self.lr:g} times the largest absolute Hessian eigenvalue of a client's training loss at the shared "
            f"model ({NUM_POWER_STEPS} steps of power iteration), averaged over {self.num_clients} clients"
        )

    def of_seeds(self, run: MeasuredRun) -> list[float]:
        """Average over the clients for each seed; not finite if the model is not."""
        federation = run.federation
        at = np.linspace(0, federation.num_clients - 1, min(self.num_clients, federation.num_clients)).astype(int)
        largest = partial(_largest_eigenvalue, run.task)
        found = [np.atleast_1d(largest(run.snapshot.params, _whole(federation, client))) for client in at]
        return (self.lr * np.mean(found, axis=0)).tolist()


def _whole(federation: Federation, client: int) -> Batch:
    """Return all training data of a client, padded to the longest client's length so that one program serves all."""
    begin, end = federation.offsets[client : client + 2]
    rows = np.minimum(begin + np.arange(federation.counts.max()), end - 1)
    weight = (begin + np.arange(len(rows)) < end).astype(np.float32)
    x, y = np.asarray(federation.x)[rows], np.asarray(federation.y)[rows]
    return Batch(jnp.asarray(x), jnp.asarray(y), jnp.asarray(weight), jax.random.key(0))


@partial(jax.jit, static_argnums=0)
def _largest_eigenvalue(task: Task, params: Params, batch: Batch) -> Array:
    """Compute the largest absolute eigenvalue of each seed's Hessian by power iteration from a random vector."""

    def of_one(params: Params) -> Array:
        start = optax.tree.random_like(jax.random.key(0), params)

        def step(vector: Params, _: None) -> tuple[Params, Array]:
            moved = exact(task.loss, params, vector, batch)
            norm = jnp.asarray(optax.tree.norm(moved))
            return jax.tree.map(lambda leaf: leaf / norm, moved), norm

        return jax.lax.scan(step, start, None, length=NUM_POWER_STEPS)[1][-1]

    return jax.vmap(of_one)(params)
