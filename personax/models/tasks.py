"""Tasks that a network is trained for: `classification` and `regression`, each with a loss, metrics and a data check.

Losses are weighted means over the batch, sum_j weight_j l_j / sum_j weight_j, so padding rows of weight 0 are ignored
and a batch of padding has zero loss and gradient. With `l2 > 0`, they add l2/2 |params|^2, excluding statistics such as
the running means of batch normalization. Images stored as uint8 become floats in [0, 1] inside the loss, so that a
federation stays in bytes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from personax.objectives.statistics import statistics_of, without_statistics
from personax.typing import Batch, LossFn, Metrics, Model, Params, Scalar, StatisticsFn, Task
from personax.values import require_count, require_nonnegative


def classification(model: Model, l2: float = 0.0) -> Task:
    """Make a classification task with softmax cross-entropy: l_j = log sum_c exp(o_jc) - o_jy for label y.

    With `l2 > 0`, the loss adds l2/2 |params|^2, which makes logistic regression strongly convex (APFL 2020 section 5).
    Metrics, computed without dropout, are "loss", the same function, and "accuracy". Outputs with more axes
    (`[batch, time, class]`, labels `[batch, time]`) are averaged over them within each example.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> task = px.classification(px.logistic_regression(3), l2=0.01)
    >>> params = task.model.init(jax.random.key(0), jnp.zeros((1, 2)))
    >>> batch = px.Batch(jnp.zeros((4, 2)), jnp.array([0, 1, 2, 0]), jnp.ones(4), jax.random.key(0))
    >>> sorted(task.metrics(params, batch))
    ['accuracy', 'loss']
    """
    require_nonnegative("l2", l2)
    return _classification(model, float(l2))


def regression(model: Model, l2: float = 0.0, deviation: tuple[float, ...] | None = None) -> Task:
    """Make a regression task with squared error, averaged over the d outputs of an example: l_j = |o_j - y_j|^2 / d.

    With `l2 > 0`, the loss adds l2/2 |params|^2. Metrics, computed without dropout, are "loss", the same function, and
    "error", the mean squared error without the penalty. It is not the root mean square, because means of squares can be
    averaged over batches and clients. Targets `[batch]` match outputs `[batch, 1]`.

    If `deviation` has the standard deviations of standardized targets (one per output), "error" is in their original
    units, mean_d deviation_d^2 (o_jd - y_jd)^2; "loss" remains the minimized function.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> task = px.regression(px.logistic_regression(1))
    >>> params = task.model.init(jax.random.key(0), jnp.zeros((1, 2)))
    >>> batch = px.Batch(jnp.zeros((2, 2)), jnp.array([1.0, 3.0]), jnp.ones(2), jax.random.key(0))
    >>> float(task.loss(params, batch))  # the outputs are 0
    5.0
    """
    require_nonnegative("l2", l2)
    return _regression(model, float(l2), None if deviation is None else tuple(map(float, deviation)))


def rematerialize(task: Task, slice_size: int) -> Task:
    """Limit the memory of activations: compute the loss on `slice_size` examples of a batch at a time.

    Only one slice's activations are in memory, and they are recomputed for the gradient. The loss must be a weighted
    mean over examples, as here: loss(B) = sum_s (weight of slice s / weight of B) loss(s). Dropout masks differ from
    those on the whole batch. Networks with batch normalization, in which an example's loss depends on the rest of its
    batch, are an error.

    >>> import jax, jax.numpy as jnp, personax as px
    >>> task = px.rematerialize(px.regression(px.logistic_regression(1)), slice_size=1)
    >>> params = task.model.init(jax.random.key(0), jnp.zeros((1, 2)))
    >>> batch = px.Batch(jnp.zeros((2, 2)), jnp.array([1.0, 3.0]), jnp.ones(2), jax.random.key(0))
    >>> float(task.loss(params, batch))
    5.0
    """
    require_count("slice_size", slice_size)
    return _rematerialized(task, int(slice_size))


@functools.cache
def _rematerialized(task: Task, slice_size: int) -> Task:
    def loss(params: Params, batch: Batch) -> Scalar:
        num = -(-len(batch.weight) // slice_size)
        if num == 1:
            return task.loss(params, batch)
        if statistics_of(task, params, batch) is not None:
            raise ValueError(
                "`rematerialize` computes the mean loss of slices, which with batch normalization is not the loss of "
                f"the batch of {len(batch.weight)} examples. Use layer or group normalization, or one slice."
            )
        filler = num * slice_size - len(batch.weight)
        pad = lambda leaf: jnp.pad(leaf, ((0, filler),) + ((0, 0),) * (leaf.ndim - 1), mode="edge")
        x, y, weight = (pad(leaf).reshape(num, slice_size, *leaf.shape[1:]) for leaf in batch[:3])
        weight = jnp.where(jnp.arange(num * slice_size).reshape(weight.shape) < len(batch.weight), weight, 0)
        # If a batch is all padding, weight all slices equally: its loss is that of each slice.
        shares = jnp.where(weight.any(), weight.sum(axis=1) / jnp.maximum(weight.sum(), 1e-30), 1 / num)
        keys = jax.vmap(lambda at: jax.random.fold_in(batch.key, at))(jnp.arange(num))

        @jax.checkpoint
        def add(total: Array, part: tuple[Array, Batch]) -> tuple[Array, None]:
            return total + (part[0] * task.loss(params, part[1])).astype(total.dtype), None

        zero = jnp.zeros((), jax.eval_shape(task.loss, params, batch).dtype)
        return jax.lax.scan(add, zero, (shares, Batch(x, y, weight, keys)))[0]

    return task._replace(loss=loss)


@functools.cache
def _classification(model: Model, l2: float) -> Task:
    def metrics(params: Params, batch: Batch) -> Metrics:
        outputs = model.apply(params, inputs_of(params, batch.x))
        hits = (jnp.argmax(outputs, axis=-1) == batch.y).astype(outputs.dtype)
        cross_entropy = _weighted_mean(_cross_entropy(outputs, batch.y), batch.weight)
        penalty = _penalty(params, l2, _statistics_in(model, params, batch) if l2 else None)
        return {"loss": cross_entropy + penalty, "accuracy": _weighted_mean(hits, batch.weight)}

    return Task(model, _loss(model, _cross_entropy, l2), metrics, _check_labels, _statistics(model))


@functools.cache
def _regression(model: Model, l2: float, deviation: tuple[float, ...] | None) -> Task:
    def metrics(params: Params, batch: Batch) -> Metrics:
        outputs = model.apply(params, inputs_of(params, batch.x))
        errors = _squared_error(outputs, batch.y)
        error = _weighted_mean(errors, batch.weight)
        loss = error + _penalty(params, l2, _statistics_in(model, params, batch) if l2 else None)
        if deviation is not None:
            units = jnp.square(jnp.asarray(deviation, errors.dtype)).reshape(1, *errors.shape[1:])
            error = _weighted_mean(units * errors, batch.weight)
        return {"loss": loss, "error": error}

    return Task(model, _loss(model, _squared_error, l2), metrics, _check_targets, _statistics(model))


def _loss(model: Model, of_examples: Callable[[Array, Array], Array], l2: float) -> LossFn:
    """Return the weighted mean of the examples' losses plus the penalty."""

    def mean(outputs: Array, batch: Batch) -> Array:
        return _weighted_mean(of_examples(outputs, batch.y), batch.weight)

    def loss(params: Params, batch: Batch) -> Array:
        outputs, statistics = _trained(model, params, batch)
        return mean(outputs, batch) + _penalty(params, l2, statistics)

    return loss


def _trained(model: Model, params: Params, batch: Batch) -> tuple[Array, Params]:
    """Return the outputs in training and the new statistics, which are None if the model has none."""
    x = inputs_of(params, batch.x)
    if model.train is None:
        return model.apply(params, x, batch.key), None
    return model.train(params, x, batch.weight, batch.key)


def _statistics_in(model: Model, params: Params, batch: Batch) -> Params:
    """The shapes of the statistics, with None for all other leaves."""
    return jax.eval_shape(functools.partial(_trained, model), params, batch)[1]


def _statistics(model: Model) -> StatisticsFn | None:
    """The statistics after a step on a batch; those of a batch of fillers are the old ones."""
    if model.train is None:
        return None

    def statistics(params: Params, batch: Batch) -> Params:
        new = _trained(model, params, batch)[1]
        counts = jnp.any(batch.weight > 0)
        keep = lambda new, old: None if new is None else jnp.where(counts, new, old).astype(old.dtype)
        return jax.tree.map(keep, new, params, is_leaf=lambda leaf: leaf is None)

    return statistics


def as_inputs(x: Array, dtype: Any = float) -> Array:
    """Convert inputs for a model: images in bytes become floats in [0, 1]; others are unchanged."""
    return x.astype(dtype) / 255 if x.dtype == jnp.uint8 else x


def inputs_of(params: Params, x: Array) -> Array:
    """Convert inputs for a model with these parameters, in their dtype."""
    dtype = jnp.result_type(*(leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact)))
    return as_inputs(x, dtype)


def _cross_entropy(outputs: Array, labels: Array) -> Array:
    # Indexing would have a scatter as its gradient, which is a separate kernel on a GPU and slow on a CPU.
    chosen = jax.nn.one_hot(labels.astype(jnp.int32), outputs.shape[-1], dtype=bool)
    # `jax.nn.logsumexp` would add a kernel to each gradient to handle infinite outputs.
    largest = jax.lax.stop_gradient(outputs.max(axis=-1))
    sums = jnp.exp(outputs - largest[..., None]).sum(axis=-1)
    return jnp.log(sums) + largest - jnp.sum(outputs, axis=-1, where=chosen)


def _squared_error(outputs: Array, targets: Array) -> Array:
    return jnp.square(outputs - targets.reshape(outputs.shape).astype(outputs.dtype))


def _weighted_mean(losses: Array, weight: Array) -> Array:
    """Return the weighted mean of losses; 0, with gradient 0, if all weights are 0."""
    per_example = losses.mean(axis=tuple(range(1, losses.ndim)))
    weight = weight.astype(losses.dtype)
    return jnp.sum(weight * per_example) / jnp.maximum(jnp.sum(weight), jnp.finfo(losses.dtype).tiny)


def _penalty(params: Params, l2: float, statistics: Params) -> Array | float:
    """Return l2/2 |params|^2 without statistics, or a plain 0, which costs nothing, without a penalty."""
    if not l2:
        return 0.0
    moved = without_statistics(params, statistics)
    return l2 / 2 * sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(moved))


def _check_labels(outputs: Any, targets: Any) -> str:
    labels = np.asarray(targets)
    num_classes = outputs.shape[-1]
    if not np.issubdtype(labels.dtype, np.integer):
        return f"labels must be integers, got {labels.dtype}"
    if labels.shape[1:] != tuple(outputs.shape[1:-1]):
        return f"labels must have shape {_shape(outputs.shape[1:-1])}, got {_shape(labels.shape[1:])}"
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    return f"labels must be in 0..{num_classes - 1}, got {wrong[0]}" if wrong.size else ""


def _check_targets(outputs: Any, targets: Any) -> str:
    values = np.asarray(targets)
    expected, given = tuple(outputs.shape[1:]), values.shape[1:]
    if expected not in (given, (*given, 1)):
        return f"targets must have shape {_shape(expected)}, got {_shape(given)}"
    if not np.issubdtype(values.dtype, np.number):
        return f"targets must be numbers, got {values.dtype}"
    if not np.all(np.isfinite(values)):
        return "targets must be finite numbers, got NaN or infinity"
    return ""


def _shape(per_example: tuple[int, ...]) -> str:
    return f"[{', '.join(['n', *map(str, per_example)])}]"
