"""Checks before compilation, with errors that name the client and the remedy."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.keys import MAX_STEPS
from personax.models.tasks import as_inputs
from personax.objectives.objective import require_one_model
from personax.objectives.statistics import statistics_of
from personax.schedules import Schedule
from personax.simulation.averages import Tracker
from personax.typing import Batch, Params, Task


def check_run(
    algorithm: Algorithm,
    federation: Federation,
    schedules: Sequence[Schedule],
    num_seeds: int,
    tracker: Tracker | None,
    streams: bool = False,
) -> None:
    """Check that an algorithm, a federation and schedules are compatible."""
    if len(schedules) != num_seeds:
        raise ValueError(f"Got {len(schedules)} schedules for {num_seeds} keys. Give one for all, or one for each key.")
    for schedule in schedules:
        if schedule.num_clients != federation.num_clients:
            raise ValueError(
                f"The schedule has {schedule.num_clients} clients, but the federation has {federation.num_clients}. "
                "Create it with the federation's `num_clients`."
            )
        if algorithm.server.is_synchronous and not schedule.has_rounds:
            raise ValueError(
                "A synchronous server needs rounds, and this schedule has none. "
                "Use `rounds(...)`, or a server that is `asynchronous(...)` or `buffered(...)`."
            )
    shapes = {(s.num_events, int(s.round_ends.sum())) for s in schedules}
    if len(shapes) > 1:
        raise ValueError(f"The schedules of all seeds must have the same length, got {sorted(shapes)}.")
    if (longest := algorithm.local.steps_of(int(federation.counts.max()))) > MAX_STEPS:
        raise ValueError(f"A visit would take {longest} local steps, more than {MAX_STEPS}. Use fewer `num_epochs`.")
    draws_alone = set(algorithm.objective.roles()) == {"outer"}
    if algorithm.local.query_share is not None and draws_alone:
        raise ValueError(
            f"`query_share` reserves a part of the data for the outer batches, and {algorithm.objective} draws no "
            "other batches. Remove it."
        )
    if tracker is not None and (not algorithm.server.is_synchronous or algorithm.local.num_steps is None):
        raise ValueError("A tracker needs a synchronous server and a fixed number of local steps. Give `num_steps`.")
    if tracker is not None and algorithm.sharing.divides:
        raise ValueError(f"A tracker follows whole models, and here {algorithm.sharing.describe()}. Remove it.")
    if tracker is not None and (problem := tracker.explain(algorithm.objective, streams)):
        raise ValueError(problem)


def check_statistics(algorithm: Algorithm, task: Task, x: Any, y: Any) -> None:
    """Check that the algorithm can train the model's statistics, if it has some; a sample may be given as shapes."""
    require_one_model(algorithm.objective, find_statistics(task, x, y))


def find_statistics(task: Task, x: Any, y: Any) -> Params | None:
    """Return the shapes of the statistics of a task's model, with None for all other leaves; None if it has none."""
    if task.statistics is None:
        return None
    key, inputs = jax.random.key(0), jax.eval_shape(as_inputs, x)
    batch = Batch(x, y, np.ones(1, np.float32), key)  # pyright: ignore[reportArgumentType]
    return statistics_of(task, jax.eval_shape(task.model.init, key, inputs), batch)


def check_model(task: Task, federation: Federation, params: Params | None) -> Params:
    """Check that the task's model accepts the clients' data and that the task accepts the targets.

    Return the parameters, or their shapes if none are given.
    """
    x, y = federation.first_sample
    try:
        # JAX caches traces by function, so the functions of a task are traced only once.
        key, inputs = jax.random.key(0), jax.eval_shape(as_inputs, x)
        shapes = jax.eval_shape(task.model.init, key, inputs) if params is None else params
        batch = Batch(x, y, np.ones(1, np.float32), key)  # pyright: ignore[reportArgumentType]
        outputs = jax.eval_shape(task.model.apply, shapes, inputs)
        loss = jax.eval_shape(task.loss, shapes, batch)
    except (TypeError, ValueError) as error:
        given = f"samples of shape {x.shape[1:]} and type {x.dtype}"
        raise ValueError(
            f"The model and its parameters must take the clients' data, got {given} (bytes are read as images): {error}"
        ) from error
    classes = federation.schema.classes
    if not federation.schema.has_numbered_classes and outputs.shape[-1:] < (len(classes),):
        raise ValueError(
            f"There are {len(classes)} classes, {classes[0]!r} to {classes[-1]!r}, but the model has outputs of shape "
            f"{outputs.shape[1:]}. Give it an output for each class; for a regression on the numbers that name the "
            "classes, use `federation.as_targets()`."
        )
    parts = [("training", federation.y, federation.offsets)]
    if federation.test_y is not None and federation.test_offsets is not None:
        parts.append(("test", federation.test_y, federation.test_offsets))
    for part, targets, offsets in parts:
        if task.check(outputs, targets):
            for i, name in enumerate(federation.names):
                if message := task.check(outputs, targets[offsets[i] : offsets[i + 1]]):
                    raise ValueError(f"{name}: the {part} {message}.")
    if loss.shape != ():
        raise ValueError(f"The loss of a batch must be a scalar, got shape {loss.shape}. Take a mean over examples.")
    return shapes
