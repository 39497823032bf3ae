"""Patches against XLA's own convolution, in both layouts; pooling by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from personax.convolution import DEEP, FIRST, LAST, arrange, convolve, max_pool, restore


def images(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def patches(layout):
    return lambda x, kernel, padding: restore(convolve(arrange(x, layout), kernel, padding, layout), layout)


def native(x, kernel, padding):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def assert_trees_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), one, other)


@pytest.mark.parametrize("layout", [LAST, FIRST])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("kernel_shape", [(1, 1), (4, 4), (5, 5), (2, 3)])
@pytest.mark.parametrize("depth", [2, DEEP])
def test_patches_and_native_convolution_agree(layout, padding, kernel_shape, depth):
    x, kernel = images(0, (3, 7, 6, depth)), images(1, (*kernel_shape, depth, 4))
    theirs, ours = (
        jax.jit(jax.value_and_grad(lambda x, k, conv=conv: jnp.sum(jnp.sin(conv(x, k, padding))), argnums=(0, 1)))
        for conv in (native, patches(layout))
    )
    assert patches(layout)(x, kernel, padding).shape == native(x, kernel, padding).shape
    assert_trees_close(ours(x, kernel), theirs(x, kernel))


@pytest.mark.parametrize("layout", [LAST, FIRST])
def test_they_agree_to_second_order_and_under_vmap(layout):
    x, kernels, direction = images(0, (2, 3, 5, 5, 2)), images(1, (2, 3, 3, 2, 4)), images(2, (2, 3, 3, 2, 4))

    def hvp(conv):
        def one(x, kernel, vector):
            gradient = jax.grad(lambda k: jnp.sum(jnp.sin(conv(x, k, "SAME"))))
            return jax.jvp(gradient, (kernel,), (vector,))[1]

        return jax.jit(jax.vmap(one))(x, kernels, direction)

    assert_trees_close(hvp(patches(layout)), hvp(native))


@pytest.mark.parametrize("layout", [LAST, FIRST])
@pytest.mark.parametrize("size", [(4, 6), (5, 7), (3, 2)])
def test_max_pool_takes_the_largest_of_four_and_drops_odd_edges(layout, size):
    x = images(0, (2, *size, 3))
    pooled = np.asarray(restore(max_pool(arrange(x, layout), layout), layout))
    assert pooled.shape == (2, size[0] // 2, size[1] // 2, 3)
    for row, col in np.ndindex(*pooled.shape[1:3]):
        block = np.asarray(x)[:, 2 * row : 2 * row + 2, 2 * col : 2 * col + 2]
        np.testing.assert_array_equal(pooled[:, row, col], block.max(axis=(1, 2)))
