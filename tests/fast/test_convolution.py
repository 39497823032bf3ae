"""Convolutions by windows, patches and tiles against XLA's own; pooling against XLA's own and by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from personax.fast import convolution
from personax.fast.backends import pretend
from personax.fast.convolution import (
    DEEP,
    convolve,
    convolve_by_patches,
    convolve_by_tiles,
    convolve_by_windows,
    largest,
)
from personax.fast.precision import ambient_precision, products_in
from personax.fast.rewrite import count_rewrites, rewritten

WAYS = {"windows": convolve_by_windows, "patches": convolve_by_patches, "tiles": convolve_by_tiles}


def draw(seed, shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def native(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def assert_trees_close(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), one, other)


def assert_the_same(ours, theirs, *operands):
    """Values, gradients, and Hessian products along the operands themselves."""

    def derive(function, own):
        gradient = jax.grad(lambda *own: jnp.sum(jnp.sin(function(*own))), argnums=tuple(range(len(own))))
        return function(*own), gradient(*own), jax.jvp(gradient, own, own)[1]

    found, truth = jax.jit(lambda *own: [derive(function, own) for function in (ours, theirs)])(*operands)
    assert found[0].shape == truth[0].shape
    assert_trees_close(found, truth)


@pytest.mark.parametrize(
    ("way", "kernel_size", "size"),
    [(way, kernel_size, (7, 6)) for way in ("windows", "patches") for kernel_size in [(1, 1), (4, 4), (2, 3)]]
    + [(way, (3, 3), size) for way in WAYS for size in [(7, 6), (8, 9)]],
)
def test_each_way_is_the_native_convolution(way, kernel_size, size):
    assert_the_same(WAYS[way], native, draw(0, (3, *size, 2)), draw(1, (*kernel_size, 2, 4)))


@pytest.mark.parametrize(
    ("kernel_size", "depth", "tiled"),
    [((5, 5), 2, (99, 99)), ((2, 3), 2, (99, 99)), ((3, 3), DEEP, (1, 3)), ((3, 3), DEEP, (99, 99))],
    ids=["windows", "uneven windows", "tiles", "patches"],
)
def test_whichever_is_taken_is_the_native_convolution(kernel_size, depth, tiled, monkeypatch):
    monkeypatch.setattr(convolution, "TILED", tiled)
    assert_the_same(convolve, native, draw(0, (2, 7, 6, depth)), draw(1, (*kernel_size, depth, 4)))


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
        note = lambda *operands, name=name, take=take: (taken.append(name), take(*operands))[1]
        monkeypatch.setattr(convolution, f"convolve_by_{name}", note)
    shapes = (2, side, side, depth), (kernel_size, kernel_size, depth, 4)
    with pretend(backend):
        jax.eval_shape(convolve, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    assert taken == [way]


@pytest.mark.parametrize("way", WAYS)
def test_they_agree_to_second_order_under_vmap(way):
    x, kernel = draw(0, (2, 3, 7, 7, 2)), draw(1, (2, 3, 3, 2, 4))
    assert_the_same(jax.vmap(WAYS[way]), jax.vmap(native), x, kernel)


def test_each_way_has_the_digits_of_float32():
    x, kernel = draw(0, (4, 20, 20, 32)), draw(1, (3, 3, 32, 8))
    wanted = np.asarray(native(x, kernel))
    for way in WAYS.values():
        found = jax.jit(way)(x.astype(jnp.float32), kernel.astype(jnp.float32))
        assert found.dtype == jnp.float32
        assert np.sqrt(np.mean((np.asarray(found, float) - wanted) ** 2) / np.mean(wanted**2)) < 3e-7


@pytest.mark.parametrize("way", ["windows", "patches"])
def test_what_is_not_a_number_stays_so_in_a_gradient(way):
    x, kernel = draw(0, (2, 6, 6, 2)), draw(1, (3, 3, 2, 4)).at[0, 0, 0, 0].set(jnp.nan)
    pool = lambda y: jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    found = jax.jit(jax.grad(lambda kernel: (rewritten(pool)(WAYS[way](x, kernel)) ** 2).sum()))(kernel)
    assert np.isnan(found[:, :, :, 0]).all() and np.isfinite(found[:, :, :, 1:]).all()


LAYOUTS = {1: [("NHC", "HIO", "NHC"), ("NCH", "OIH", "NCH"), ("HNC", "IHO", "CHN")],
           2: [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NCWH", "WIHO", "HNWC")]}  # fmt: skip


@st.composite
def variants(draw_from):
    """Shapes and options of a convolution with one or two spatial axes."""
    num_axes = draw_from(st.sampled_from((1, 2)))
    pairs = lambda *choices: tuple(draw_from(st.sampled_from(choices)) for _ in range(num_axes))
    groups = draw_from(st.sampled_from((1, 1, 2, 3)))
    depth, width = groups * draw_from(st.sampled_from((1, 2))), groups * draw_from(st.sampled_from((1, 2, 3)))
    sizes, kernel_sizes = pairs(4, 5, 7, 9), pairs(1, 2, 3, 4)
    options = {
        "window_strides": pairs(1, 1, 2, 3),
        "padding": draw_from(st.sampled_from(("SAME", "VALID", ((2, 1),) * num_axes, ((-1, 2),) * num_axes))),
        "lhs_dilation": pairs(1, 1, 2),
        "rhs_dilation": pairs(1, 1, 2),
        "dimension_numbers": draw_from(st.sampled_from(LAYOUTS[num_axes])),
        "feature_group_count": groups,
    }
    if isinstance(options["padding"], str) and set(options["lhs_dilation"]) != {1}:
        options["lhs_dilation"] = (1,) * num_axes  # JAX takes no names of paddings there
    of_images = dict(zip("HW", sizes, strict=False), N=2, C=depth)
    of_kernels = dict(zip("HW", kernel_sizes, strict=False), I=depth // groups, O=width)
    images, kernels, _ = options["dimension_numbers"]
    return [of_images[axis] for axis in images], [of_kernels[axis] for axis in kernels], options


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(variants())
def test_any_convolution_is_rewritten_and_stays_the_same(variant):
    image_shape, kernel_shape, options = variant
    conv = functools.partial(jax.lax.conv_general_dilated, **options)
    x, kernel = draw(0, image_shape), draw(1, kernel_shape)
    assume(0 not in jax.eval_shape(conv, x, kernel).shape)
    assert count_rewrites(conv, x, kernel)["conv_general_dilated"] == 1
    assert_the_same(rewritten(conv), conv, x, kernel)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((1, 2, 4, 4, 4), (3, 2, 2, 2, 2)), {}),
        (((4, 2, 5, 5), (4, 2, 3, 3)), {"batch_group_count": 2}),
        (((2, 2, 5, 5), (3, 2, 3, 3)), {"preferred_element_type": jnp.float32}),
        (((2, 2, 5, 5), (3, 2, 3, 3)), {"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32}),
    ],
    ids=["three axes", "groups of the batch", "another type", "an algorithm"],
)
def test_other_convolutions_are_left_as_they_are(shapes, options):
    x, kernel = (draw(seed, shape).astype(jnp.bfloat16) for seed, shape in enumerate(shapes))
    window = (1,) * (x.ndim - 2)
    conv = functools.partial(jax.lax.conv_general_dilated, window_strides=window, padding="VALID", **options)
    assert not count_rewrites(conv, x, kernel)
    np.testing.assert_array_equal(*jax.jit(lambda *own: (rewritten(conv)(*own), conv(*own)))(x, kernel))


def test_a_convolution_keeps_its_precision():
    x, kernel = draw(0, (1, 3, 6, 6)), draw(1, (4, 3, 3, 3))
    conv = functools.partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME", precision="highest")
    program = jax.make_jaxpr(rewritten(conv))(x, kernel)
    products = [one for one in program.eqns if one.primitive.name == "dot_general"]
    assert products and {one.params["precision"] for one in products} == {(jax.lax.Precision.HIGHEST,) * 2}


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_convolution_follows_the_precision_of_the_run(precision):
    x, kernel = draw(0, (1, 3, 6, 6)).astype(jnp.float32), draw(1, (4, 3, 3, 3)).astype(jnp.float32)
    with products_in(precision):
        program = jax.make_jaxpr(rewritten(lambda *own: jax.lax.conv(*own, (1, 1), "SAME")))(x, kernel)
        products = [one for one in program.eqns if one.primitive.name == "dot_general"]
        assert products and {one.params["precision"] for one in products} == {ambient_precision()} != {None}


POOLS = [  # window, strides, padding
    ((1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    ((1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    ((1, 2, 3, 1), (1, 1, 1, 1), ((0, 0), (1, 0), (1, 1), (0, 0))),
    ((1, 1, 4, 2), (1, 1, 3, 1), "VALID"),
]


@pytest.mark.parametrize(("window", "strides", "padding"), POOLS)
@pytest.mark.parametrize("kind", ["max", "sum"])
def test_pooling_is_rewritten_and_stays_the_same(kind, window, strides, padding):
    start, combine = {"max": (-jnp.inf, jax.lax.max), "sum": (0.0, jax.lax.add)}[kind]
    pool = lambda x: jax.lax.reduce_window(x, start, combine, window, strides, padding)
    x = draw(0, (2, 7, 8, 3))
    assert count_rewrites(pool, x) == {f"reduce_window_{kind}": 1}
    both = jnp.stack([x, jnp.round(draw(1, x.shape))])  # the second has many equal entries
    assert_the_same(*map(jax.vmap, (rewritten(pool), pool)), both)


def test_large_windows_and_integers_are_left_as_they_are():
    pool = lambda size: (
        lambda x: jax.lax.reduce_window(x, x.dtype.type(0), jax.lax.add, (1, size, size, 1), (1, 1, 1, 1), "VALID")
    )
    x = draw(0, (2, 8, 8, 3))
    assert count_rewrites(pool(4), x) and not count_rewrites(pool(5), x)
    assert not count_rewrites(pool(2), x.astype(jnp.int32))


def test_the_first_of_equal_entries_has_the_gradient_of_their_maximum():
    parts = tuple(jnp.asarray([[1.0, 3, 3, 2], [5, 5, 5, 5], [0, -1, -2, -3], [2, 2, 7, 7]]).T)
    found, pull_back = jax.vjp(largest, parts)
    np.testing.assert_array_equal(found, [3, 5, 0, 7])
    slopes = np.stack(pull_back(jnp.asarray([1.0, 1, 1, 8]))[0], axis=1)
    np.testing.assert_array_equal(slopes, [[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 8, 0]])
    np.testing.assert_array_equal(jax.jvp(largest, (parts,), (parts,))[1], [3, 5, 0, 7])
