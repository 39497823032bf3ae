"""The work of a visit: what the delays of device traces are computed from."""

import jax
import numpy as np

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.schedules import VisitWork
from personax.server import ServerState
from personax.simulation.engine import initial_params
from personax.simulation.results import Snapshot
from personax.typing import PyTree, Task


def work_of(algorithm: Algorithm, task: Task, federation: Federation) -> VisitWork:
    """Return the samples that each client processes in a visit, and the bytes that it uploads and downloads.

    Samples are counted once for each gradient of a local step, of which `objective.gradients_per_step()` states the
    approximate number. Bytes are those of the arrays that are exchanged, without any compression or protocol.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(num_clients=3, num_features=4, num_samples=20, key=jax.random.key(0))
    >>> algorithm = px.fedavg(lr=0.1, num_steps=5, batch_size=10)
    >>> work = px.work_of(algorithm, px.classification(px.logistic_regression(10)), fed)
    >>> work.samples.tolist()  # five batches of ten
    [50.0, 50.0, 50.0]
    """
    samples = np.broadcast_to(algorithm.local.samples_of(federation.counts), federation.counts.shape)

    def first_state(key: jax.Array) -> ServerState:
        return algorithm.init_server(initial_params(task, federation, key=key))

    up, down = bytes_per_event(algorithm, jax.eval_shape(first_state, jax.random.key(0)), has_seeds=False)
    return VisitWork(samples * float(algorithm.objective.gradients_per_step()), float(up), float(down), federation.ids)


def bytes_per_event(algorithm: Algorithm, server: ServerState, has_seeds: bool) -> tuple[int, int]:
    """Return the bytes that one event moves up and down."""
    if not algorithm.objective.federated:
        return 0, 0
    pending, sent = (server.pending, server.pending_extra), (server.params, server.shared)
    return _size(pending, has_seeds), _size(sent, has_seeds)


def traffic(algorithm: Algorithm, snapshot: Snapshot) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that each seed has moved up and down so far."""
    up, down = bytes_per_event(algorithm, snapshot.state.server, snapshot.has_seeds)
    seeds = list(zip(snapshot.schedules, np.atleast_1d(snapshot.num_events).tolist(), strict=True))
    aggregated = [float(schedule.aggregated[:num].sum()) for schedule, num in seeds]
    downloaded = [float(schedule.downloaded[:num].sum()) for schedule, num in seeds]
    return up * np.asarray(aggregated), down * (np.asarray(downloaded) + _num_asked(snapshot))


def traffic_of_events(algorithm: Algorithm, snapshot: Snapshot) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that each event has moved up and down, [seeds, events]: 0 for those that have not arrived."""
    up, down = bytes_per_event(algorithm, snapshot.state.server, snapshot.has_seeds)
    schedules = snapshot.schedules
    arrived = np.arange(schedules[0].num_events) < np.atleast_1d(snapshot.num_events)[:, None]
    downloads = (np.stack([schedule.downloaded for schedule in schedules]) & arrived).astype(int)
    for seed, control in enumerate(snapshot.control):
        for event, num in control.asked:
            downloads[seed, event] += num
    return np.stack([schedule.aggregated for schedule in schedules]) * arrived * up, downloads * down


def _num_asked(snapshot: Snapshot) -> np.ndarray:
    """Count the downloads of each seed whose only purpose was to report a loss."""
    if not snapshot.control:
        return np.zeros(len(snapshot.schedules))
    return np.asarray([float(sum(num for _, num in one.asked)) for one in snapshot.control])


def _size(tree: PyTree, has_seeds: bool) -> int:
    leaves = jax.tree.leaves(tree)
    return sum(leaf.size * leaf.dtype.itemsize // (len(leaf) if has_seeds else 1) for leaf in leaves)
