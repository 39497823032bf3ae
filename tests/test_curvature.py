import functools

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


DIFFERENCES = personax.curvature.finite_difference, personax.curvature.relative_difference
TASK = personax.classification(personax.mlp((5,), 3, "tanh"))


@functools.cache
def network(dtype=np.float64):
    """A smooth, non-quadratic loss with its parameters, a vector and a batch."""
    return TASK.loss, *_drawn(dtype)


@functools.partial(jax.jit, static_argnums=0)
def _drawn(dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    x, y = jax.random.normal(keys[0], (8, 4), dtype), jax.random.randint(keys[1], (8,), 0, 3)
    cast = lambda tree: jax.tree.map(lambda leaf: leaf.astype(dtype), tree)
    params, vector = (cast(TASK.model.init(key, x)) for key in keys[2:])
    return params, vector, Batch(x, y, jnp.ones(8, dtype), keys[2])


def products(hvps, loss, params, vector, batch):
    """The vector times the Hessian, in each of several ways."""
    return jax.jit(lambda *given: [hvp(loss, *given) for hvp in hvps])(params, vector, batch)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))


def distance(a, b):
    return norm(jax.tree.map(np.subtract, a, b))


@pytest.mark.parametrize("hvp", EXACT_ON_QUADRATICS, ids=str)
def test_products_on_a_quadratic_are_the_hessian_times_the_vector(hvp):
    x, y = closed_forms.clients()[0]
    w, v = np.random.default_rng(1).normal(size=(2, closed_forms.DIMENSION))
    found = hvp(closed_forms.TASK.loss, {"w": w}, {"w": v}, closed_forms.whole(x, y))["w"]
    np.testing.assert_allclose(found, closed_forms.quadratic(x, y).hessian @ v, rtol=1e-9)


def test_exact_is_the_hessian_of_a_network():
    loss, params, vector, batch = network()
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    @jax.jit
    def hessian(params):
        w, restore = jax.flatten_util.ravel_pytree(params)
        return jax.hessian(lambda w: loss(restore(w), batch))(w)

    (product,) = products([personax.curvature.exact], loss, params, vector, batch)
    np.testing.assert_allclose(flat(product), np.asarray(hessian(params)) @ flat(vector), rtol=1e-9)


@pytest.mark.parametrize("make", DIFFERENCES)
def test_the_error_of_a_difference_falls_as_the_radius_squared(make):
    radii = np.array([0.08, 0.04, 0.02, 0.01])
    truth, *found = products([personax.curvature.exact, *map(make, radii.tolist())], *network())
    errors = [distance(one, truth) for one in found]
    orders = np.diff(np.log(errors)) / np.diff(np.log(radii))
    np.testing.assert_allclose(orders, 2, atol=0.1)


def test_a_difference_is_divided_by_twice_the_radius():
    """Fallah (119) and gMeta (34), against the slip of Fallah section 5 and PersA-FL (D1)."""
    truth, found = products([personax.curvature.exact, personax.curvature.finite_difference(1e-4)], *network())
    doubled = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), found)
    assert distance(found, truth) < 1e-6 * distance(doubled, truth)


def test_first_order_is_zero_and_needs_no_batch():
    (product,) = products([personax.curvature.first_order], *network())
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(product))
    assert not personax.curvature.first_order.needs_batch


def test_relative_difference_of_a_zero_vector_is_zero():
    loss, params, vector, batch = network()
    zeros = jax.tree.map(np.zeros_like, vector)
    (product,) = products([personax.curvature.relative_difference(1e-2)], loss, params, zeros, batch)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(product))


def test_in_float32_a_fixed_radius_fails_where_the_relative_one_does_not_care_how_long_the_vector_is():
    """FL-bench's trap: a fixed radius on an unnormalized vector is lost in rounding, or leaves the neighborhood."""
    loss, params, vector, batch = network(np.float32)
    hvps = [personax.curvature.exact, *(make(1e-2) for make in DIFFERENCES)]
    ways = jax.jit(lambda vector: [hvp(loss, params, vector, batch) for hvp in hvps])
    for scale in (1e-6, 1.0, 1e4):
        truth, fixed, relative = ways(jax.tree.map(lambda leaf, scale=scale: leaf * np.float32(scale), vector))
        assert distance(relative, truth) < 0.01 * norm(truth)
        if scale != 1:
            assert distance(fixed, truth) > 10 * distance(relative, truth)


def test_both_ends_of_a_difference_see_the_same_dropout_mask():
    """FL-bench's trap: different masks turn the difference into noise, multiplied by 1 / radius."""
    task = personax.classification(personax.cnn((2,), (16,), 3, kernel_size=3, dropout=0.5))
    x, y = jax.random.normal(jax.random.key(1), (6, 8, 8)), jnp.arange(6) % 3
    batch = Batch(x, y, jnp.ones(6), jax.random.key(2))
    params, vector = map(jax.jit(task.model.init), map(jax.random.key, (3, 4)), (x, x))
    hvps = personax.curvature.exact, personax.curvature.relative_difference(1e-4)
    truth, found = products(hvps, task.loss, params, vector, batch)
    assert distance(found, truth) < 1e-2 * norm(truth)


@pytest.mark.parametrize("make", DIFFERENCES)
@pytest.mark.parametrize("radius", [0.0, -1e-3, float("nan")])
def test_a_radius_must_be_positive(make, radius):
    with pytest.raises(ValueError, match=r"`radius` must be positive, got .*first_order"):
        make(radius)
