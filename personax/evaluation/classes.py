"""Results per class: recall and precision, pooled over all clients.

If class c has n_c samples, p_c samples are predicted to be c, and h_c samples are both, then the recall is h_c / n_c
and the precision h_c / p_c.
"""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.data.federation import Federation
from personax.evaluation.evaluate import evaluate
from personax.evaluation.scoring import Scoring
from personax.models.tasks import inputs_of
from personax.simulation.results import Result, Snapshot
from personax.typing import Array, Batch, Metrics, Params, Task


class ClassCounts(NamedTuple):
    """Counts of samples per class, [seeds, classes], or [classes] for a run with a single key."""

    actual: np.ndarray
    predicted: np.ndarray
    hits: np.ndarray  # predicted correctly

    @property
    def recall(self) -> np.ndarray:
        """Return the share of each class's samples that were predicted correctly; NaN for a class without samples."""
        return _ratio(self.hits, self.actual)

    @property
    def precision(self) -> np.ndarray:
        """Return the share of each class's predictions that were correct; NaN for a class that was never predicted."""
        return _ratio(self.hits, self.predicted)


def count_classes(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    result: Result | Snapshot,
    scoring: Scoring,
    *,
    key: Array,
) -> ClassCounts:
    """Count the scored samples of all clients per class, with the models and data of `evaluate`.

    The task's model must have one output per class of the federation's schema, and the scoring must read test data.
    """
    num_classes = len(federation.schema.classes)
    if not num_classes or scoring.score_on != "test":
        raise ValueError(
            f"Counting classes needs labeled test data, got {scoring.score_on} data and {num_classes} classes. "
            'Score a classification with `score_on="test"`.'
        )
    counted = _counting(task, num_classes)
    found = evaluate(algorithm, counted, federation, result, scoring, key=key)
    of = lambda name: np.einsum("...ck,...c->...k", found.metrics[name], found.num_samples)
    return ClassCounts(*(np.rint(of(name)) for name in ClassCounts._fields))


@cache  # so that scores and seeds of the same task share a program
def _counting(task: Task, num_classes: int) -> Task:
    """Replace the metrics of a task by shares of samples per class."""

    def metrics(params: Params, batch: Batch) -> Metrics:
        outputs = task.model.apply(params, inputs_of(params, batch.x))
        actual = jax.nn.one_hot(batch.y, num_classes, dtype=outputs.dtype)
        predicted = jax.nn.one_hot(jnp.argmax(outputs, axis=-1), num_classes, dtype=outputs.dtype)
        weight = batch.weight.astype(outputs.dtype) / jnp.maximum(batch.weight.sum(), 1)
        mean = lambda part: weight @ part.reshape(len(weight), -1, num_classes).sum(axis=1)  # each label of a sequence
        return dict(zip(ClassCounts._fields, map(mean, (actual, predicted, actual * predicted)), strict=True))

    return task._replace(metrics=metrics)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=whole > 0)
