"""Optimizers as values: by name, by function, with options, at a step size; and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from personax.client.optimizers import Optimizer, optimizer

PARAMS = {"w": np.array([1.0, -2.0, 3.0]), "b": np.array(0.5)}
GRADIENTS = {"w": np.array([0.3, 0.1, -0.7]), "b": np.array(2.0)}
NAMES = ["sgd", "adam", "adamw", "adagrad", "rmsprop", "lion", "lamb", "nadam", "yogi", "adabelief"]


def run(transformation, num_steps=3, state=None):
    """Some steps from `PARAMS` along constant gradients, optionally from a given state."""
    params, gradients = (jax.tree.map(jnp.asarray, tree) for tree in (PARAMS, GRADIENTS))
    state = transformation.init(params) if state is None else state

    def step(carry, _):
        updates, state = transformation.update(gradients, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), ()

    return jax.jit(lambda carry: jax.lax.scan(step, carry, length=num_steps)[0][0])((params, state))


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), left, right)


def signs(learning_rate, power=1.0):
    return optax.chain(optax.scale_by_sign(), optax.scale(-learning_rate * power))


# closed forms


def test_the_default_is_plain_descent():
    assert optimizer() == Optimizer() == Optimizer("sgd")
    assert_close(run(optimizer().at(0.1)), jax.tree.map(lambda w, g: w - 3 * 0.1 * g, PARAMS, GRADIENTS))


def test_momentum_is_an_option():
    """With trace m_k = g + mu m_{k-1}, three steps move by (3 + 2 mu + mu^2) lr g."""
    moved = 0.1 * (3 + 2 * 0.9 + 0.9**2)
    expected = jax.tree.map(lambda w, g: w - moved * g, PARAMS, GRADIENTS)
    assert_close(run(optimizer("sgd", momentum=0.9).at(0.1)), expected)


def test_a_function_makes_one_too():
    expected = jax.tree.map(lambda w, g: w - 3 * 0.1 * 2.0 * np.sign(g), PARAMS, GRADIENTS)
    assert_close(run(optimizer(signs, power=2.0).at(0.1)), expected)


# identities


@pytest.mark.parametrize("name", NAMES)
def test_states_do_not_depend_on_the_step_size(name):
    """A visit's state is made at one step size and used at others: the steps are those of optax."""
    made = optimizer(name)
    state = made.at(0.0).init(jax.tree.map(jnp.asarray, PARAMS))
    assert_close(run(made.at(0.05), state=state), run(getattr(optax, name)(0.05)))


def test_the_step_size_may_be_traced():
    made = optimizer("adam", b1=0.8)
    sweep = jax.vmap(lambda lr: run(made.at(lr)))(jnp.asarray([0.1, 0.2]))
    for i, lr in enumerate((0.1, 0.2)):
        assert_close(jax.tree.map(lambda leaf, i=i: leaf[i], sweep), run(optax.adam(lr, b1=0.8)))


def test_extra_arguments_are_ignored():
    transformation = optimizer("sgd").at(0.1)
    updates, _ = transformation.update(GRADIENTS, transformation.init(PARAMS), PARAMS, value=1.0)
    assert_close(updates, jax.tree.map(lambda g: -0.1 * g, GRADIENTS))


# values


def test_optimizers_are_static_values():
    one = optimizer("adam", b2=0.9, b1=0.8)
    assert one == optimizer("adam", b1=0.8, b2=0.9) != optimizer("adam", b1=0.8) != optimizer("sgd")
    assert hash(one) == hash(optimizer("adam", b1=0.8, b2=0.9)) and jax.tree.leaves(one) == []
    assert repr(one) == "Optimizer(name='adam', options=(('b1', 0.8), ('b2', 0.9)))"
    assert optimizer(signs) == optimizer(signs) != optimizer("sign_sgd")


# errors


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: optimizer("sdg"),
            "No optimizer can be made from name 'sdg' and options {}.*Use an optax name",
        ),
        (lambda: optimizer("tree"), "from name 'tree'"),  # a module
        (lambda: optimizer("chain"), "from name 'chain'"),  # a function, but not one of a step size
        (lambda: optimizer("adam", momentum=0.9), "from name 'adam' and options {'momentum': 0.9}"),
        (lambda: optimizer(signs, beta=1), "and options {'beta': 1}"),
        (lambda: optimizer(lambda lr: optax.sgd(lr)), "an importable function of a learning rate"),
        (lambda: optimizer("no.such.module:make"), "No module named 'no'"),
        (lambda: Optimizer(3), "from name 3"),
    ],
)
def test_errors_name_the_problem(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_a_function_must_make_an_optimizer():
    with pytest.raises(ValueError, match="must"):
        optimizer(lambda learning_rate: learning_rate)


def test_options_must_hash():
    at_boundaries = lambda learning_rate, boundaries: optax.sgd(learning_rate)
    with pytest.raises(ValueError, match="boundaries"):
        optimizer(at_boundaries, boundaries=[10, 20])
