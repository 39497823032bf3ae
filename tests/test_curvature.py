import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax
from personax.typing import Batch
from tests import closed_forms

EXACT_ON_QUADRATICS = [
    personax.curvature.exact,
    personax.curvature.finite_difference(1e-2),
    personax.curvature.relative_difference(1e-2),
]


def network(dtype=jnp.float64, batch_size=8):
    """A smooth, non-quadratic loss with its parameters, a vector and a batch."""
    task = personax.classification(personax.mlp((5,), 3, "tanh"))
    keys = jax.random.split(jax.random.key(0), 4)
    x, y = jax.random.normal(keys[0], (batch_size, 4), dtype), jax.random.randint(keys[1], (batch_size,), 0, 3)
    batch = Batch(x, y, jnp.ones(batch_size, dtype), keys[2])
    cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
    return task.loss, cast(task.model.init(keys[2], x)), cast(task.model.init(keys[3], x)), batch


def distance(a, b):
    return float(jnp.sqrt(sum(jnp.sum((p - q) ** 2) for p, q in zip(*map(jax.tree.leaves, (a, b)), strict=True))))


@pytest.mark.parametrize("hvp", EXACT_ON_QUADRATICS, ids=str)
def test_products_on_a_quadratic_are_the_hessian_times_the_vector(hvp):
    x, y = closed_forms.clients()[0]
    w, v = np.random.default_rng(1).normal(size=(2, closed_forms.DIMENSION))
    found = hvp(closed_forms.TASK.loss, {"w": w}, {"w": v}, closed_forms.whole(x, y))["w"]
    np.testing.assert_allclose(found, closed_forms.quadratic(x, y).hessian @ v, rtol=1e-9)


def test_exact_is_the_hessian_of_a_network():
    loss, params, vector, batch = network()
    flat, restore = jax.flatten_util.ravel_pytree(params)
    hessian = jax.hessian(lambda w: loss(restore(w), batch))(flat)
    product = jax.flatten_util.ravel_pytree(personax.curvature.exact(loss, params, vector, batch))[0]
    np.testing.assert_allclose(product, hessian @ jax.flatten_util.ravel_pytree(vector)[0], rtol=1e-9)


@pytest.mark.parametrize("make", [personax.curvature.finite_difference, personax.curvature.relative_difference])
def test_the_error_of_a_difference_falls_as_the_radius_squared(make):
    loss, params, vector, batch = network()
    truth = personax.curvature.exact(loss, params, vector, batch)
    radii = np.array([0.08, 0.04, 0.02, 0.01])
    errors = [distance(make(float(r))(loss, params, vector, batch), truth) for r in radii]
    orders = np.diff(np.log(errors)) / np.diff(np.log(radii))
    np.testing.assert_allclose(orders, 2, atol=0.1)


def test_a_difference_is_divided_by_twice_the_radius():
    """Fallah (119) and gMeta (34), against the slip of Fallah section 5 and PersA-FL (D1)."""
    loss, params, vector, batch = network()
    truth = personax.curvature.exact(loss, params, vector, batch)
    found = personax.curvature.finite_difference(1e-4)(loss, params, vector, batch)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, found)
    assert distance(found, truth) < 1e-6 * distance(doubled, truth)


def test_first_order_is_zero_and_needs_no_batch():
    loss, params, vector, batch = network()
    product = personax.curvature.first_order(loss, params, vector, batch)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(product))
    assert not personax.curvature.first_order.needs_batch


def test_relative_difference_of_a_zero_vector_is_zero():
    loss, params, vector, batch = network()
    product = personax.curvature.relative_difference(1e-2)(loss, params, jax.tree.map(jnp.zeros_like, vector), batch)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(product))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_relative_difference_in_float32_does_not_care_how_long_the_vector_is(scale):
    loss, params, vector, batch = network(jnp.float32)
    vector = jax.tree.map(lambda leaf: leaf * np.float32(scale), vector)
    truth = personax.curvature.exact(loss, params, vector, batch)
    assert distance(personax.curvature.relative_difference(1e-2)(loss, params, vector, batch), truth) < 0.01 * distance(
        truth, jax.tree.map(jnp.zeros_like, truth)
    )


@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_a_fixed_radius_fails_in_float32_where_the_relative_one_does_not(scale):
    """FL-bench's trap: a fixed radius on an unnormalized vector is lost in rounding, or leaves the neighborhood."""
    loss, params, vector, batch = network(jnp.float32)
    vector = jax.tree.map(lambda leaf: leaf * np.float32(scale), vector)
    truth = personax.curvature.exact(loss, params, vector, batch)
    error = {
        make: distance(make(1e-2)(loss, params, vector, batch), truth)
        for make in (personax.curvature.finite_difference, personax.curvature.relative_difference)
    }
    assert error[personax.curvature.finite_difference] > 10 * error[personax.curvature.relative_difference]


def test_both_ends_of_a_difference_see_the_same_dropout_mask():
    """FL-bench's trap: different masks turn the difference into noise, multiplied by 1 / radius."""
    task = personax.classification(personax.cnn((2,), (16,), 3, kernel_size=3, dropout=0.5))
    x, y = jax.random.normal(jax.random.key(1), (6, 8, 8)), jnp.arange(6) % 3
    batch = Batch(x, y, jnp.ones(6), jax.random.key(2))
    params, vector = (task.model.init(jax.random.key(seed), x) for seed in (3, 4))
    truth = personax.curvature.exact(task.loss, params, vector, batch)
    found = personax.curvature.relative_difference(1e-4)(task.loss, params, vector, batch)
    assert distance(found, truth) < 1e-2 * distance(truth, jax.tree.map(jnp.zeros_like, truth))


@pytest.mark.parametrize("make", [personax.curvature.finite_difference, personax.curvature.relative_difference])
@pytest.mark.parametrize("radius", [0.0, -1e-3, float("nan")])
def test_a_radius_must_be_positive(make, radius):
    with pytest.raises(ValueError, match=r"`radius` must be positive, got .*first_order"):
        make(radius)
