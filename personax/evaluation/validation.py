"""Validation data: a part of the clients' training data that controls a run."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.data.federation import ClientData, Federation
from personax.evaluation.evaluate import evaluate
from personax.evaluation.scores import higher_is_better
from personax.evaluation.scoring import Scoring
from personax.fast.passes import optimized
from personax.simulation.control import ClientLosses, Control, Controller
from personax.simulation.results import Snapshot
from personax.simulation.stream import roomy
from personax.typing import Array, Batch, Params, Task

SHARE = 0.2  # of each client's training data
_CHUNK = 64  # clients and samples whose losses are computed at once


@dataclass(frozen=True, eq=False)
class ValidationData:
    """The clients of a federation with validation data instead of test data: see `split_validation`.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(num_clients=3, num_features=4, num_samples=20, key=jax.random.key(0))
    >>> type(px.split_validation(fed, key=jax.random.key(0))[1]).__name__
    'ValidationData'
    """

    federation: Federation


def split_validation(federation: Federation, share: float = SHARE, *, key: Array) -> tuple[Federation, ValidationData]:
    """Split off a share of each client's training data; return the training federation and the validation data.

    Test data and newcomers are unchanged, and only the validation data may control a run.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(num_clients=3, num_features=4, num_samples=20, key=jax.random.key(0))
    >>> training, validation = px.split_validation(fed, 0.25, key=jax.random.key(0))
    >>> training.counts.tolist(), validation.federation.test_x.shape[0]
    ([12, 12, 12], 12)
    """
    if federation.is_mapped:
        raise ValueError(
            "Splitting validation data off a memory-mapped federation would read all of it. Split it "
            "before `save(...)`."
        )
    held = validation_of(federation, key, share)
    tests = {name: getattr(federation, name) for name in ("test_x", "test_y", "test_offsets", "newcomers", "schema")}
    return replace(held, **tests, origin=federation.origin), ValidationData(held)


def validation_of(federation: Federation, key: Array, share: float = SHARE) -> Federation:
    """Return the same clients with a part of their training data instead of their test data."""
    train = Federation(federation.x, federation.y, federation.offsets, ids=federation.ids, names=federation.names)
    return train.split_tests(share, key=key)


def controlled(
    controller: Controller,
    algorithm: Algorithm,
    task: Task,
    validation: ValidationData | None = None,
    scoring: Scoring = Scoring("global"),
    *,
    metric: str | None = None,
    training: Federation | None = None,
    every: int = 1,
    key: Array,
) -> Control:
    """Make the control of a run, for `Monitor(control=...)`.

    Args:
        controller: a controller such as `px.controllers.EarlyStopping()`.
        algorithm: the algorithm that is trained.
        task: the model and its loss.
        validation: validation data from `split_validation`, for controllers that need a score. Test data is refused.
        scoring: the model to score on it; the mean over clients is the score.
        metric: the metric; by default the accuracy, or the error, or the loss.
        training: the training federation, for controllers that use the clients' training losses.
        every: the number of rounds, or of events for arrivals, between two decisions.
        key: the key of the run.

    >>> import jax, personax as px
    >>> fed = px.datasets.synthetic(num_clients=3, num_features=4, num_samples=20, key=jax.random.key(0))
    >>> training, validation = px.split_validation(fed, key=jax.random.key(0))
    >>> task, algorithm = px.classification(px.logistic_regression(10)), px.fedavg(lr=0.1, num_steps=2)
    >>> stop = px.controllers.Target(0.0)  # which the first decision reaches
    >>> control = px.controlled(stop, algorithm, task, validation, every=2, key=jax.random.key(1))
    >>> monitor, schedule = px.Monitor(control=control), px.rounds(3, num_rounds=10, key=jax.random.key(1))
    >>> result = px.simulate(algorithm, task, training, schedule, key=jax.random.key(1), monitor=monitor)
    >>> int(result.snapshot.num_events)  # the first decision comes before the first round
    0
    """
    if controller.needs_score and not isinstance(validation, ValidationData):
        given = "none" if validation is None else type(validation).__name__
        raise ValueError(
            f"{controller} may use only validation data, got {given}. Split it off the training data: "
            "`training, validation = px.split_validation(federation, key=key)`."
        )
    if controller.needs_losses and training is None:
        raise ValueError(f"{controller} needs the clients' training losses. Give the federation as `training=...`.")
    if controller.needs_losses and algorithm.sharing.divides:
        raise ValueError(
            f"{controller} needs losses of a complete model, but the server has only a part. Share everything."
        )
    score, losses, better = None, None, True
    if controller.needs_score and validation is not None:
        scored = replace(scoring, clients="all", score_on="test")
        name = metric or _metric_of(task, validation.federation)
        better = higher_is_better(name)
        found = lambda snapshot: evaluate(algorithm, task, validation.federation, snapshot, scored, key=key)
        score = lambda snapshot: np.asarray(found(snapshot).mean(name), float)
    if controller.needs_losses and training is not None:
        losses = partial(sample_losses, task, training)
    return Control(controller, every, score, losses, better)


def _metric_of(task: Task, federation: Federation) -> str:
    """Return the accuracy if there is one, otherwise the error or the first metric."""
    x, y = federation.first_sample
    batch = Batch(jnp.asarray(x), jnp.asarray(y), jnp.ones(1), jax.random.key(0))
    names = list(jax.eval_shape(lambda: task.metrics(task.model.init(jax.random.key(0), batch.x.astype(float)), batch)))
    return next((name for name in ("accuracy", "error") if name in names), names[0])


def sample_losses(
    task: Task, federation: Federation, snapshot: Snapshot, seed: int, positions: np.ndarray
) -> ClientLosses:
    """Return the losses of the server's model on the training samples of the clients at these positions.

    The loss of a sample is the task's metric `loss`, without dropout.
    """
    params = jax.tree.map(lambda leaf: leaf[seed], snapshot.params) if snapshot.has_seeds else snapshot.params
    clients, places = np.unique(positions, return_inverse=True)
    num_rows = roomy(int(federation.counts[clients].sum()))
    data = federation.train_of(clients, num_rows, roomy(len(clients)))
    owner = np.full(num_rows, len(data.start))
    filled = np.repeat(np.arange(len(clients)), federation.counts[clients])
    owner[: len(filled)] = filled
    total, squares = (np.asarray(part)[places] for part in _sums(optimized(task), params, data, owner))
    counts = federation.counts[positions]
    return ClientLosses(total / counts, np.sqrt(squares / counts))


@partial(jax.jit, static_argnums=0)
def _sums(task: Task, params: Params, data: ClientData, owner: Array) -> tuple[Array, Array]:
    """Sum each client's losses and their squares; `owner` is the client of each row, if it has one."""

    def loss_of(row: Array) -> Array:
        batch = Batch(data.x[row][None], data.y[row][None], jnp.ones(1), jax.random.key(0))
        return task.metrics(params, batch)["loss"]

    losses = jax.lax.map(loss_of, jnp.arange(len(data.y)), batch_size=_CHUNK)
    add = lambda values: jnp.zeros(len(data.start)).at[owner].add(values, mode="drop")
    return add(losses), add(losses**2)
