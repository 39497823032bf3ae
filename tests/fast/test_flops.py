"""Operations counted in traced programs, and what depends on them."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import personax as px
from personax.fast.backends import CPU_WAVE_OVERHEAD, LAUNCH_OPERATIONS, pretend
from personax.fast.flops import largest_array, operations_of

simulation = importlib.import_module("personax.simulation.simulate")  # the name is the function's, too


def count(function, *shapes):
    return operations_of(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)).jaxpr)


def test_products_are_counted_wherever_they_stand():
    product = 2 * 3 * 4 * 5
    assert count(jnp.matmul, (3, 4), (4, 5)) == product
    assert count(jax.jit(lambda a, b: jnp.sin(a @ b)), (3, 4), (4, 5)) == product
    assert count(jax.vmap(jnp.matmul), (7, 3, 4), (7, 4, 5)) == 7 * product
    assert count(jax.grad(lambda a, b: jnp.sum((a @ b) ** 2), argnums=(0, 1)), (3, 4), (4, 5)) == 3 * product
    assert count(jnp.add, (3, 4), (3, 4)) == 0


def test_a_convolution_is_a_product_for_each_output():
    convolve = lambda x, k: jax.lax.conv_general_dilated(
        x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert count(convolve, (2, 8, 8, 3), (5, 5, 3, 7)) == 2 * (2 * 4 * 4 * 7) * (5 * 5 * 3)


@pytest.mark.parametrize("num_seeds", [1, 4])
def test_a_wave_of_an_accelerator_is_dear_for_small_models_alone(num_seeds):
    rng = np.random.default_rng(0)
    clients = [(rng.integers(0, 256, (9, 8, 8), dtype=np.uint8), rng.integers(0, 10, 9)) for _ in range(2)]
    federation = px.Federation.from_clients(clients)
    algorithm = px.fedasync(lr=0.1, num_steps=1, batch_size=5)
    of = lambda model: simulation.overhead_of(algorithm, px.classification(model), federation, num_seeds)
    assert of(px.logistic_regression(10)) == CPU_WAVE_OVERHEAD
    gradient = 2 * (2 * 5 * 64 * 10)  # the outputs, and the kernel's gradient
    with pretend("gpu"):
        assert of(px.logistic_regression(10)) == pytest.approx(LAUNCH_OPERATIONS / (num_seeds * gradient))
        assert of(px.cnn2(10)) < 0.05 * of(px.logistic_regression(10))
    waits = px.fedavg(lr=0.1, num_steps=1, batch_size=5)
    assert simulation.overhead_of(waits, px.classification(px.cnn2(10)), federation, 1) == 0


def test_the_largest_array_is_found_in_calls_and_loops():
    size = lambda function, *shapes: largest_array(
        jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)).jaxpr
    )
    of_one = jnp.ones(1).itemsize
    assert size(lambda a: jnp.sum(a * 2), (3, 4)) == 12 * of_one
    assert size(jax.jit(lambda a, b: jnp.sum(jnp.sin(a @ b))), (3, 4), (4, 50)) == 150 * of_one
    outer = lambda a: jax.lax.scan(lambda c, _: (c + jnp.sum(c[:, None] * c[None, :]), None), a, length=3)[0]
    assert size(outer, (9,)) == 81 * of_one
