"""Patches and tiles against XLA's own convolution, in both layouts; pooling by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from personax import convolution
from personax.convolution import DEEP, FIRST, LAST, _by_patches, _by_tiles, arrange, convolve, max_pool, restore


def images(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def ours(layout, pooled=False):
    return lambda x, kernel, padding: restore(convolve(arrange(x, layout), kernel, padding, layout, pooled), layout)


def native(x, kernel, padding):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def native_pooled(x, kernel, padding):
    y = native(x, kernel, padding)
    return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def assert_trees_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), one, other)


def assert_the_same(ours, theirs, x, kernel, padding):
    derived = [
        jax.jit(jax.value_and_grad(lambda x, k, conv=conv: jnp.sum(jnp.sin(conv(x, k, padding))), argnums=(0, 1)))
        for conv in (ours, theirs)
    ]
    assert ours(x, kernel, padding).shape == theirs(x, kernel, padding).shape
    assert_trees_close(derived[0](x, kernel), derived[1](x, kernel))


@pytest.mark.parametrize("layout", [LAST, FIRST])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("kernel_shape", [(1, 1), (4, 4), (5, 5), (2, 3)])
@pytest.mark.parametrize("depth", [2, DEEP])
def test_patches_are_the_native_convolution(layout, padding, kernel_shape, depth):
    x, kernel = images(0, (3, 7, 6, depth)), images(1, (*kernel_shape, depth, 4))
    assert_the_same(ours(layout), native, x, kernel, padding)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("size", [(7, 6), (8, 9)])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("tiled", [(1, 3), (99, 99)])
def test_tiles_are_the_native_convolution(padding, size, pooled, tiled, monkeypatch):
    monkeypatch.setattr(convolution, "TILED", tiled)
    x, kernel = images(0, (3, *size, 2)), images(1, (3, 3, 2, 4))
    assert_the_same(ours(LAST, pooled), native_pooled if pooled else native, x, kernel, padding)


@pytest.mark.parametrize("layout", [LAST, FIRST])
@pytest.mark.parametrize("tiled", [False, True])
def test_they_agree_to_second_order_and_under_vmap(layout, tiled, monkeypatch):
    monkeypatch.setattr(convolution, "TILED", (1, 3) if tiled else (99, 99))
    shapes = (2, 3, 5, 5, 2), (2, 3, 3, 2, 4), (2, 3, 3, 2, 4)
    x, kernels, direction = (images(seed, shape) for seed, shape in enumerate(shapes))

    def hvp(conv):
        def one(x, kernel, vector):
            gradient = jax.grad(lambda k: jnp.sum(jnp.sin(conv(x, k, "SAME"))))
            return jax.jvp(gradient, (kernel,), (vector,))[1]

        return jax.jit(jax.vmap(one))(x, kernels, direction)

    assert_trees_close(hvp(ours(layout)), hvp(native))


def test_tiles_are_as_exact_as_patches_in_float32():
    x, kernel = images(0, (4, 20, 20, 32)), images(1, (3, 3, 32, 8))
    wanted = native(x, kernel, "VALID")
    short = lambda convolve, *given: convolve(*(array.astype(jnp.float32) for array in (x, kernel)), *given)
    error = lambda found: float(jnp.sqrt(jnp.mean((found - wanted) ** 2) / jnp.mean(wanted**2)))
    assert error(short(_by_patches, LAST)) < 3e-7
    assert error(short(_by_tiles, False)) < 3e-7


@pytest.mark.parametrize("layout", [LAST, FIRST])
@pytest.mark.parametrize("size", [(4, 6), (5, 7), (3, 2)])
def test_max_pool_takes_the_largest_of_four_and_drops_odd_edges(layout, size):
    x = images(0, (2, *size, 3))
    pooled = np.asarray(restore(max_pool(arrange(x, layout), layout), layout))
    assert pooled.shape == (2, size[0] // 2, size[1] // 2, 3)
    for row, col in np.ndindex(*pooled.shape[1:3]):
        block = np.asarray(x)[:, 2 * row : 2 * row + 2, 2 * col : 2 * col + 2]
        np.testing.assert_array_equal(pooled[:, row, col], block.max(axis=(1, 2)))
