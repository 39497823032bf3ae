"""Steps in a span of inputs give the numbers of the plain way, which a loss of no known structure takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax
from personax.objectives.span import Place, Span, spans
from personax.typing import Batch, LayeredLoss

NUM_INPUTS = 60
TASKS = {
    "classification": personax.classification(personax.mlp((32, 16), 3)),
    "regression": personax.regression(personax.mlp((32,), 2, "tanh")),
    "linear": personax.classification(personax.logistic_regression(40)),
    "standardized": personax.classification(personax.standardized(personax.mlp((32,), 3), 0.5, 0.25)),
}
HVPS = (
    personax.exact,
    personax.first_order,
    personax.finite_difference(1e-3),
    personax.relative_difference(1e-3),
)


def plain(loss):
    return lambda params, batch: loss(params, batch)


def setting(name):
    """A task, parameters and batches of `role`, the last row of each a filler."""
    task, rng = TASKS[name], np.random.default_rng(7)
    params = task.model.init(jax.random.key(1), jnp.zeros((1, NUM_INPUTS)))
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape)) / 3, params)

    def batches(num, size):
        y = rng.normal(size=(num, size, 2)) if name == "regression" else rng.integers(0, 3, (num, size))
        weight = jnp.ones((num, size)).at[:, -1].set(0)
        return Batch(jnp.asarray(rng.random((num, size, NUM_INPUTS))), jnp.asarray(y), weight, _keys(num))

    return task, params, batches


def _keys(num):
    return jax.random.split(jax.random.key(2), num)


def assert_same(found, truth, rtol=1e-9):
    for leaf, true in zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(leaf, true, rtol=rtol, atol=rtol * float(jnp.abs(true).max()))


@pytest.mark.parametrize("hvp", HVPS, ids=str)
@pytest.mark.parametrize("num_adapt_steps", [1, 2, 3])
@pytest.mark.parametrize("name", TASKS)
def test_the_meta_gradient_in_a_span_is_the_plain_one(name, num_adapt_steps, hvp):
    task, params, batches = setting(name)
    objective = personax.Meta(0.3, num_adapt_steps, hvp)
    sizes = {"adapt": 6, "outer": 8, "curvature": 5}
    given = {role: batches(num, sizes[role]) for role, num in objective.roles().items() if num}
    assert spans(task.loss, params, sum(of_role.weight.size for of_role in given.values()))
    found, truth = (objective.gradient(loss, params, (), None, given)[0] for loss in (task.loss, plain(task.loss)))
    assert_same(found, truth)


@pytest.mark.parametrize("tolerance", [None, 0.5, 1e-3])
@pytest.mark.parametrize("num_steps", [2, 12])
@pytest.mark.parametrize("name", TASKS)
def test_the_prox_in_a_span_is_the_plain_one(name, num_steps, tolerance):
    task, params, batches = setting(name)
    batch = jax.tree.map(lambda leaf: leaf[0], batches(1, 12))
    objective = personax.Moreau(2.0, 0.1, num_steps, tolerance)
    found, truth = (objective.prox(loss, params, batch) for loss in (task.loss, plain(task.loss)))
    assert_same(found, truth)
    assert max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (found, params)), strict=True)) > 1e-2


def test_a_span_needs_less_arithmetic():
    task, params, batches = setting("regression")
    batch = jax.tree.map(lambda leaf: leaf[0], batches(1, 12))

    def cost(loss):
        solve = jax.jit(lambda params, batch: personax.Moreau(2.0, 0.1, 3).prox(loss, params, batch))
        return solve.lower(params, batch).compile().cost_analysis()["flops"]

    assert cost(task.loss) < 0.6 * cost(plain(task.loss))


def test_norms_and_models_of_a_span_are_those_of_the_parameters():
    task, params, batches = setting("classification")
    span = Span(task.loss, params, {"outer": batches(2, 6)})
    at = span.start().plus(-0.5, span.gradient(span.start(), ("outer", 0)))
    vector = at.plus(2.0, span.gradient(at, ("outer", 1)))
    as_tree = span.vector(vector)
    np.testing.assert_allclose(span.norm(vector), np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(as_tree))))
    kernel, rest = task.model.first.split(params)
    moved = span.model(vector)
    assert_same(moved, task.model.first.join(kernel + task.model.first.split(as_tree)[0], vector.rest))
    assert_same(span.model(span.start()), task.model.first.join(kernel, rest))


def test_a_place_keeps_its_types_and_adds_what_is_along_the_same_batch():
    a, b = ("outer", 0), ("outer", 1)
    place = Place({"bias": jnp.ones(2, jnp.float32)}, {a: jnp.ones(1, jnp.float32)})
    vector = Place({"bias": jnp.ones(2)}, {a: jnp.ones(1), b: jnp.full(1, 3.0)})
    found = place.plus(0.5, vector)
    assert found.rest["bias"].dtype == found.along[a].dtype == jnp.float32
    np.testing.assert_array_equal([found.rest["bias"][0], found.along[a][0], found.along[b][0]], [1.5, 1.5, 1.5])


def test_only_few_rows_and_losses_without_a_penalty_span():
    model = personax.mlp((20,), 3)
    loss = personax.classification(model).loss
    params = model.init(jax.random.key(0), jnp.zeros((1, 30)))
    assert isinstance(loss, LayeredLoss)
    assert spans(loss, params, 30) and not spans(loss, params, 31)  # no more rows than inputs
    wide = model.init(jax.random.key(0), jnp.zeros((1, 100)))
    assert spans(loss, wide, 40) and not spans(loss, wide, 41)  # nor than twice the columns
    for task in (
        personax.classification(model, l2=0.1),
        personax.rematerialize(personax.classification(model), 2),
        personax.classification(personax.cnn((2,), (4,), 3)),
    ):
        assert not spans(task.loss, params, 1)


@pytest.mark.parametrize("name", TASKS)
def test_a_first_layer_is_the_network(name):
    task, params, batches = setting(name)
    x = batches(1, 5).x[0]
    first = task.model.first
    kernel, rest = first.split(params)
    np.testing.assert_allclose(first.apply(rest, first.rows(x) @ kernel), task.model.apply(params, x), rtol=1e-12)
    assert jax.tree.all(jax.tree.map(np.array_equal, first.join(kernel, rest), params))
    assert len(jax.tree.leaves(rest)) == len(jax.tree.leaves(params)) - 1
