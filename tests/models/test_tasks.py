"""Tasks: losses against their formulas in NumPy, weights and padding, bytes, types, metrics and checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from personax.curvature import exact
from personax.models import cnn, logistic_regression, mlp
from personax.models.tasks import classification, regression, rematerialize
from personax.typing import Batch, Model

# A model whose outputs are its only parameter: the loss as a function of the outputs.
DIRECT = Model(lambda key, x: jnp.zeros((x.shape[0], 4)), lambda params, x, key=None: params)
MODEL = mlp((6,), 4, "tanh")
TASKS = {"classification": classification, "regression": regression}


def batch_for(name, seed=0, num=5, weight=None):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(num, 3)))
    y = jnp.asarray(rng.integers(0, 4, num) if name == "classification" else rng.normal(size=(num, 4)))
    return Batch(x, y, np.ones(num) if weight is None else jnp.asarray(weight), jax.random.key(seed))


def outputs_and(batch, seed=3):
    params = jax.jit(MODEL.init)(jax.random.key(seed), batch.x)
    return params, np.asarray(jax.jit(MODEL.apply)(params, batch.x))


def loss_and_metrics(task, params, batch):
    return jax.jit(lambda *own: (task.loss(*own), task.metrics(*own)))(params, batch)


def squared_norm(params):
    return sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(params))


def cross_entropy(outputs, labels):
    return np.log(np.exp(outputs).sum(-1)) - np.take_along_axis(outputs, np.asarray(labels)[..., None], -1)[..., 0]


def assert_trees_close(left, right, rtol=1e-10):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14), left, right)


# formulas


@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_classification_is_its_formula(l2):
    task, batch = classification(MODEL, l2), batch_for("classification", weight=[1.0, 0.0, 2.0, 0.5, 1.0])
    params, outputs = outputs_and(batch)
    weight = np.asarray(batch.weight)
    expected = np.average(cross_entropy(outputs, batch.y), weights=weight) + l2 / 2 * squared_norm(params)
    loss, metrics = loss_and_metrics(task, params, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-10)
    assert set(metrics) == {"loss", "accuracy"}
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-10)
    hits = outputs.argmax(-1) == np.asarray(batch.y)
    np.testing.assert_allclose(metrics["accuracy"], np.average(hits, weights=weight), rtol=1e-10)


@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_regression_is_its_formula(l2):
    task, batch = regression(MODEL, l2), batch_for("regression", weight=[1.0, 0.0, 2.0, 0.5, 1.0])
    params, outputs = outputs_and(batch)
    errors = np.square(outputs - np.asarray(batch.y)).sum(-1) / 4
    error, penalty = np.average(errors, weights=np.asarray(batch.weight)), l2 / 2 * squared_norm(params)
    loss, metrics = loss_and_metrics(task, params, batch)
    np.testing.assert_allclose(loss, error + penalty, rtol=1e-10)
    assert set(metrics) == {"loss", "error"}
    np.testing.assert_allclose(metrics["loss"], error + penalty, rtol=1e-10)
    np.testing.assert_allclose(metrics["error"], error, rtol=1e-10)


def test_gradient_of_cross_entropy_is_softmax_minus_one_hot():
    batch = batch_for("classification")
    outputs = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4)))
    gradient = jax.jit(jax.grad(classification(DIRECT).loss))(outputs, batch)
    expected = (np.asarray(jax.nn.softmax(outputs)) - np.eye(4)[np.asarray(batch.y)]) / 5
    np.testing.assert_allclose(gradient, expected, rtol=1e-10)


def test_gradient_of_squared_error_is_twice_the_residual():
    batch = batch_for("regression")
    outputs = jnp.asarray(np.random.default_rng(1).normal(size=(5, 4)))
    gradient = jax.jit(jax.grad(regression(DIRECT).loss))(outputs, batch)
    np.testing.assert_allclose(gradient, 2 * np.asarray(outputs - batch.y) / (5 * 4), rtol=1e-10)


@pytest.mark.parametrize("name", TASKS)
def test_gradient_of_the_penalty_is_l2_times_the_parameters(name):
    batch = batch_for(name)
    params, _ = outputs_and(batch)
    plain, penalised = (jax.jit(jax.grad(TASKS[name](MODEL, l2).loss))(params, batch) for l2 in (0.0, 0.3))
    assert_trees_close(penalised, jax.tree.map(lambda g, p: g + 0.3 * p, plain, params))


def test_cross_entropy_survives_huge_outputs():
    batch = batch_for("classification", num=2)._replace(y=jnp.array([0, 1]))
    outputs = jnp.array([[1e4, 0.0, 0.0, 0.0], [1e4, 0.0, 0.0, 0.0]])
    value, gradient = jax.jit(jax.value_and_grad(classification(DIRECT).loss))(outputs, batch)
    np.testing.assert_allclose(value, 1e4 / 2)
    np.testing.assert_allclose(gradient, [[0, 0, 0, 0], [0.5, -0.5, 0, 0]])


def test_further_axes_are_averaged_within_an_example():
    outputs = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)))
    labels = jnp.array([[0, 1, 2], [3, 0, 1]])
    batch = Batch(jnp.zeros((2, 1)), labels, jnp.array([1.0, 3.0]), jax.random.key(0))
    expected = np.average(cross_entropy(np.asarray(outputs), labels).mean(-1), weights=[1, 3])
    np.testing.assert_allclose(classification(DIRECT).loss(outputs, batch), expected, rtol=1e-10)


def test_targets_without_an_axis_fit_one_output():
    outputs, targets = jnp.arange(3.0)[:, None], jnp.array([1.0, 1.0, 5.0])
    batch = Batch(jnp.zeros((3, 1)), targets, jnp.ones(3), jax.random.key(0))
    np.testing.assert_allclose(regression(DIRECT).loss(outputs, batch), (1 + 0 + 9) / 3)
    assert regression(DIRECT).check(outputs, np.asarray(targets)) == ""


# weights and fillers


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_padding_rows_are_ignored(name, l2):
    task, batch = TASKS[name](MODEL, l2), batch_for(name, num=3)
    params, _ = outputs_and(batch)
    filler = [np.concatenate([rows, np.full_like(rows[:2], 7)]) for rows in batch[:2]]
    padded = Batch(*filler, np.concatenate([batch.weight, np.zeros(2)]), batch.key)
    if name == "classification":  # filler labels may be anything in range
        padded = padded._replace(y=np.minimum(padded.y, 3))
    of_each = lambda params, *both: [(jax.grad(task.loss)(params, one), task.metrics(params, one)) for one in both]
    assert_trees_close(*jax.jit(of_each)(params, padded, batch))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_batch_of_fillers_has_zero_loss_and_gradient(name, dtype):
    task, batch = TASKS[name](MODEL), batch_for(name, weight=[0.0] * 5)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), outputs_and(batch)[0])

    def everything(params):
        curvature = jax.jvp(lambda p: jax.grad(task.loss)(p, batch), (params,), (params,))[1]
        return jax.value_and_grad(task.loss)(params, batch), task.metrics(params, batch), curvature

    values = jax.jit(everything)(params)
    assert_trees_close(values, jax.tree.map(jnp.zeros_like, values))


@pytest.mark.parametrize("name", TASKS)
def test_scaling_all_weights_changes_nothing(name):
    task, batch = TASKS[name](MODEL), batch_for(name)
    params, _ = outputs_and(batch)
    scaled = batch._replace(weight=0.01 * batch.weight)
    loss = jax.jit(task.loss)
    np.testing.assert_allclose(loss(params, scaled), loss(params, batch), rtol=1e-10)


# bytes, types, dropout


@pytest.mark.parametrize("name", TASKS)
def test_bytes_are_scaled_inside_the_loss_and_the_metrics(name):
    task, batch = TASKS[name](MODEL), batch_for(name)
    pixels = jnp.arange(15, dtype=jnp.uint8).reshape(5, 3) * 17
    params, _ = outputs_and(batch)
    stored, floats = batch._replace(x=pixels), batch._replace(x=jnp.asarray(np.asarray(pixels) / 255))
    assert_trees_close(loss_and_metrics(task, params, stored), loss_and_metrics(task, params, floats))


@pytest.mark.parametrize(
    ("dtype", "seen"), [(jnp.uint8, jnp.float32), (jnp.int32, jnp.int32), (jnp.float64, jnp.float64)]
)
def test_only_bytes_are_converted_and_to_the_parameters_type(dtype, seen):
    dtypes = []
    model = Model(DIRECT.init, lambda params, x, key=None: dtypes.append(x.dtype) or params["outputs"])
    batch = batch_for("classification")._replace(x=jnp.ones((5, 3), dtype))
    params = {"outputs": jnp.zeros((5, 4), jnp.float32), "steps": jnp.zeros((), jnp.int32)}
    classification(model).loss(params, batch)
    classification(model).metrics(params, batch)
    assert dtypes == [seen, seen]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_the_parameters_type_is_kept(name, dtype, l2):
    task, batch = TASKS[name](MODEL, l2), batch_for(name)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), outputs_and(batch)[0])
    values = jax.eval_shape(lambda: (jax.value_and_grad(task.loss)(params, batch), task.metrics(params, batch)))
    assert {leaf.dtype for leaf in jax.tree.leaves(values)} == {np.dtype(dtype)}


def test_the_loss_drops_units_by_the_batch_key_and_the_metrics_do_not():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 6)))
    dropped, plain = (classification(cnn((2,), (30,), 3, dropout=rate)) for rate in (0.5, 0.0))
    params = jax.jit(dropped.model.init)(jax.random.key(0), x)
    one, other = (Batch(x, jnp.array([0, 1, 2, 0]), jnp.ones(4), jax.random.key(seed)) for seed in (1, 2))
    loss = jax.jit(dropped.loss)
    assert loss(params, one) == loss(params, one)
    assert not np.allclose(loss(params, one), loss(params, other))
    assert_trees_close(jax.jit(dropped.metrics)(params, one), jax.jit(plain.metrics)(params, other))


@pytest.mark.parametrize("name", TASKS)
def test_mapping_over_clients_and_scanning_equals_a_loop(name):
    task = TASKS[name](MODEL, 0.1)
    batches = [batch_for(name, seed) for seed in range(3)]
    params, _ = outputs_and(batches[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    loss = jax.jit(task.loss)
    one_by_one = [loss(params, batch) for batch in batches]
    np.testing.assert_allclose(jax.jit(jax.vmap(task.loss, (None, 0)))(params, stacked), one_by_one, rtol=1e-10)
    scan = lambda params: jax.lax.scan(lambda _, batch: (None, task.loss(params, batch)), None, stacked)[1]
    np.testing.assert_allclose(jax.jit(scan)(params), one_by_one, rtol=1e-10)


# construction


@pytest.mark.parametrize("name", TASKS)
def test_equal_arguments_give_the_same_task(name):
    make = TASKS[name]
    assert make(mlp((6,), 4, "tanh")) is make(model=mlp((6,), 4, "tanh"), l2=0)
    assert make(MODEL, 0.1).loss is make(MODEL, l2=np.float64(0.1)).loss
    assert make(MODEL, 0.1) is not make(MODEL)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("l2", [-0.1, float("nan")])
def test_a_bad_penalty_is_refused(name, l2):
    with pytest.raises(ValueError, match="`l2` must not be negative, got"):
        TASKS[name](MODEL, l2)


# checks of the data

TEN = jax.ShapeDtypeStruct((8, 10), jnp.float32)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array([0, 9, 3]), ""),
        (np.array([0, 9], np.uint8), ""),
        (np.array([], np.int64), ""),
        (np.array([0, 12, 3]), "labels must be in 0..9, got 12"),
        (np.array([0, 10]), "labels must be in 0..9, got 10"),
        (np.array([-1, 3]), "labels must be in 0..9, got -1"),
        (np.array([0.0, 1.0]), "labels must be integers, got float64"),
        (np.array([True]), "labels must be integers, got bool"),
        (np.eye(10, dtype=int), "labels must have shape [n], got [n, 10]"),
    ],
)
def test_labels_are_checked(labels, message):
    task = classification(logistic_regression(10))
    assert task.check(TEN, labels) == message
    assert task.check(jnp.zeros(TEN.shape), labels) == message


def test_labels_of_sequences_are_checked():
    outputs = jax.ShapeDtypeStruct((8, 5, 10), jnp.float32)
    check = classification(logistic_regression(10)).check
    assert check(outputs, np.zeros((3, 5), int)) == ""
    assert check(outputs, np.zeros(3, int)) == "labels must have shape [n, 5], got [n]"


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.zeros((3, 10)), ""),
        (np.zeros((3, 10), int), ""),
        (np.zeros((3, 2)), "targets must have shape [n, 10], got [n, 2]"),
        (np.zeros(3), "targets must have shape [n, 10], got [n]"),
        (np.full((3, 10), "a"), "targets must be numbers, got <U1"),
        (np.full((3, 10), np.nan), "targets must be finite numbers, got NaN or infinity"),
    ],
)
def test_targets_are_checked(targets, message):
    assert regression(logistic_regression(10)).check(TEN, targets) == message


# Rematerialization


@pytest.mark.parametrize("slice_size", [1, 3, 7, 9])
def test_a_loss_in_slices_is_the_loss(slice_size):
    rng = np.random.default_rng(0)
    task = classification(mlp((5,), 3), l2=0.1)
    x = jnp.asarray(rng.normal(size=(7, 4)))
    batch = Batch(x, jnp.asarray(rng.integers(0, 3, 7)), jnp.ones(7), jax.random.key(0))
    params = jax.jit(task.model.init)(jax.random.key(1), x)
    asked = lambda loss, *own: (jax.value_and_grad(loss)(*own), exact(loss, own[0], *own))
    losses = task.loss, rematerialize(task, slice_size).loss
    all_of = jax.jit(lambda *own: [asked(loss, *own) for loss in losses])
    for weight in ([2, 0, 1, 0, 0, 0, 0.5], [0] * 7):
        assert_trees_close(*all_of(params, batch._replace(weight=jnp.asarray(weight, float))))


def test_a_rematerialized_task_is_the_same_value_each_time():
    task = classification(mlp((5,), 3))
    assert rematerialize(task, 4) == rematerialize(task, 4) != rematerialize(task, 5)
    with pytest.raises(ValueError, match="`slice_size` must be a whole number of at least 1, got 0"):
        rematerialize(task, 0)
