"""Windows, patches and tiles against XLA's own convolution; pooling by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from personax.fast import convolution
from personax.fast.backends import pretend
from personax.fast.convolution import (
    DEEP,
    convolve,
    convolve_by_patches,
    convolve_by_tiles,
    convolve_by_windows,
    largest_of_four,
    max_pool,
)

spread = lambda bias: bias[None, None, None, :]
WAYS = {
    "windows": convolve_by_windows,
    "patches": lambda x, kernel, bias, pooled: (
        (max_pool if pooled else jnp.asarray)(convolve_by_patches(x, kernel)) + spread(bias)
    ),
    "tiles": lambda x, kernel, bias, pooled: convolve_by_tiles(x, kernel, pooled) + spread(bias),
}


def draw(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def native(x, kernel, bias, pooled, padding="VALID"):
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
    y = y + spread(bias)
    return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") if pooled else y


def assert_trees_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), one, other)


def assert_the_same(ours, theirs, *given):
    derive = lambda conv: jax.jit(jax.value_and_grad(lambda *given: jnp.sum(jnp.sin(conv(*given))), argnums=(0, 1, 2)))
    assert ours(*given).shape == theirs(*given).shape
    assert_trees_close(derive(ours)(*given), derive(theirs)(*given))


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    ("way", "kernel_size", "size"),
    [(way, kernel_size, (7, 6)) for way in ("windows", "patches") for kernel_size in [(1, 1), (4, 4), (2, 3)]]
    + [(way, (3, 3), size) for way in WAYS for size in [(7, 6), (8, 9)]],
)
def test_each_way_is_the_native_convolution(way, kernel_size, size, pooled):
    given = draw(0, (3, *size, 2)), draw(1, (*kernel_size, 2, 4)), draw(2, (4,))
    assert_the_same(lambda *given: WAYS[way](*given, pooled), lambda *given: native(*given, pooled), *given)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize(
    ("kernel_size", "depth", "tiled"),
    [((5, 5), 2, (99, 99)), ((2, 3), 2, (99, 99)), ((3, 3), DEEP, (1, 3)), ((3, 3), DEEP, (99, 99))],
    ids=["windows", "uneven windows", "tiles", "patches"],
)
def test_whichever_is_taken_is_the_native_convolution(padding, pooled, kernel_size, depth, tiled, monkeypatch):
    monkeypatch.setattr(convolution, "TILED", tiled)
    given = draw(0, (2, 7, 6, depth)), draw(1, (*kernel_size, depth, 4)), draw(2, (4,))
    ours = lambda *given: convolve(*given, padding, pooled)
    assert_the_same(ours, lambda *given: native(*given, pooled, padding), *given)


@pytest.mark.parametrize(
    ("backend", "depth", "kernel_size", "side", "way"),
    [
        ("gpu", 64, 3, 30, "windows"),
        ("gpu", 16, 3, 10, "windows"),
        ("cpu", 3, 3, 30, "windows"),
        ("cpu", 16, 5, 18, "windows"),
        ("cpu", 16, 3, 30, "patches"),
        ("cpu", 32, 3, 10, "patches"),
        ("cpu", 32, 3, 30, "tiles"),
    ],
)
def test_each_backend_takes_the_way_that_measured_best(backend, depth, kernel_size, side, way, monkeypatch):
    taken = []
    for name in WAYS:
        take = getattr(convolution, f"convolve_by_{name}")
        note = lambda *given, name=name, take=take: (taken.append(name), take(*given))[1]
        monkeypatch.setattr(convolution, f"convolve_by_{name}", note)
    shapes = (2, side, side, depth), (kernel_size, kernel_size, depth, 4), (4,)
    with pretend(backend):
        given = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
        jax.eval_shape(lambda *given: convolve(*given, "VALID"), *given)
    assert taken == [way]


@pytest.mark.parametrize("way", WAYS)
def test_they_agree_to_second_order_and_under_vmap(way):
    shapes = (2, 3, 7, 7, 2), (2, 3, 3, 2, 4), (2, 4), (2, 3, 3, 2, 4)
    given = [draw(seed, shape) for seed, shape in enumerate(shapes)]

    def hvp(conv):
        def one(x, kernel, bias, vector):
            gradient = jax.grad(lambda k: jnp.sum(jnp.sin(conv(x, k, bias, True))))
            return jax.jvp(gradient, (kernel,), (vector,))[1]

        return jax.jit(jax.vmap(one))(*given)

    assert_trees_close(hvp(WAYS[way]), hvp(native))


def test_each_way_has_the_digits_of_float32():
    x, kernel, bias = draw(0, (4, 20, 20, 32)), draw(1, (3, 3, 32, 8)), jnp.zeros(8)
    wanted = native(x, kernel, bias, False)
    for way in WAYS.values():
        found = way(*(array.astype(jnp.float32) for array in (x, kernel, bias)), False)
        assert found.dtype == jnp.float32
        assert float(jnp.sqrt(jnp.mean((found - wanted) ** 2) / jnp.mean(wanted**2))) < 3e-7


def test_equal_pixels_share_the_gradient_of_their_maximum():
    y = jnp.asarray([[1.0, 3, 3, 2], [5, 5, 5, 5], [0, -1, -2, -3], [2, 2, 7, 7]])[:, :, None]
    largest, pull_back = jax.vjp(largest_of_four, y)
    np.testing.assert_array_equal(largest[:, 0], [3, 5, 0, 7])
    found = pull_back(jnp.asarray([[1.0], [1], [1], [8]]))[0][:, :, 0]
    np.testing.assert_array_equal(found, [[0, 0.5, 0.5, 0], [0.25] * 4, [1, 0, 0, 0], [0, 0, 4, 4]])
    np.testing.assert_array_equal(jax.jvp(largest_of_four, (y,), (y,))[1][:, 0], [3, 5, 0, 7])


@pytest.mark.parametrize("way", ["windows", "patches"])
def test_what_is_not_a_number_stays_so_in_a_gradient(way):
    x, kernel, bias = draw(0, (2, 6, 6, 2)), draw(1, (3, 3, 2, 4)).at[0, 0, 0, 0].set(jnp.nan), jnp.zeros(4)
    found = jax.grad(lambda kernel: WAYS[way](x, kernel, bias, True).sum())(kernel)
    assert jnp.isnan(found[:, :, :, 0]).all()


@pytest.mark.parametrize("size", [(4, 6), (5, 7), (3, 2)])
def test_max_pool_takes_the_largest_of_four_and_drops_odd_edges(size):
    x = draw(0, (2, *size, 3))
    pooled = np.asarray(max_pool(x))
    assert pooled.shape == (2, size[0] // 2, size[1] // 2, 3)
    for row, col in np.ndindex(*pooled.shape[1:3]):
        block = np.asarray(x)[:, 2 * row : 2 * row + 2, 2 * col : 2 * col + 2]
        np.testing.assert_array_equal(pooled[:, row, col], block.max(axis=(1, 2)))
