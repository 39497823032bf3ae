"""Fast convolution and pooling for many small networks at once, inside `scan` and under `vmap` over kernels.

A convolution is computed as one matrix product of image patches and the kernel; as one matrix product of windows, which
hold the inputs of a 2x2 block of outputs, and the kernel at four offsets (`convolve_by_windows`); or, for a 3x3 kernel,
as sixteen smaller products (`convolve_by_tiles`). In these programs, XLA's own convolution is more than ten times
slower on a CPU and at least five times slower on an H200, where it becomes a grouped convolution.

`convolution` and `pooling` take the operands and parameters of JAX's primitives, in any layout. The functions below
them take images `[batch, height, width, channel]`, already padded, and kernels `[row, column, channel, new channel]`.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from personax.fast.backends import saves_multiplications
from personax.fast.precision import ambient_precision

Pair = Sequence[int]  # rows and columns
# On a CPU, multiplications cost more than memory traffic from this number of channels and up to this kernel size.
DEEP, SMALL = 16, 3 * 3
TILED = 32, 18  # least channels and image side for tiles; with 16 or 10 they are up to a third slower than patches
MOST_TAPS = 16  # entries of a pooling window; XLA's own pooling is as fast for larger windows


def convolution(
    x: Array,
    kernel: Array,
    *,
    window_strides: Sequence[int],
    padding: Sequence[Pair],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    precision: Any,
    preferred_element_type: Any,
    **_: Any,
) -> Array:
    """Compute `conv_general_dilated` with one or two spatial axes; return `NotImplemented` for others."""
    num_axes = kernel.ndim - 2
    name = _precision_name(precision)
    of_type = preferred_element_type in (None, x.dtype) and jnp.issubdtype(x.dtype, jnp.floating)
    if num_axes not in (1, 2) or batch_group_count != 1 or not of_type or name is NotImplemented:
        return NotImplemented
    images, kernels, outputs = (tuple(spec) for spec in dimension_numbers)
    x = x.transpose(images[0], *images[2:], images[1])
    kernel = kernel.transpose(*kernels[2:], kernels[1], kernels[0])
    inside = [(low, high, dilation - 1) for (low, high), dilation in zip(padding, lhs_dilation, strict=True)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), *inside, (0, 0, 0)))
    strides, dilation = tuple(window_strides), tuple(rhs_dilation)
    if num_axes == 1:  # treat a signal as an image with one row
        x, kernel, strides, dilation = x[:, None], kernel[None], (1, *strides), (1, *dilation)
    with jax.default_matmul_precision(name or jax.config.jax_default_matmul_precision):  # pyright: ignore
        y = convolve(x, kernel, strides, dilation, feature_group_count)
    y = y[:, 0] if num_axes == 1 else y
    return y.transpose(np.argsort((outputs[0], *outputs[2:], outputs[1])))


def _precision_name(precision: Any) -> Any:
    """Return the common precision of both factors, None for the ambient one, or `NotImplemented` if they differ."""
    if precision == ambient_precision():
        return None
    names = {getattr(one, "name", one) for one in (precision if isinstance(precision, tuple) else (precision,))}
    known = {None: "default", "DEFAULT": "default", "HIGH": "high", "HIGHEST": "highest"}
    return known.get(names.pop(), NotImplemented) if len(names) == 1 else NotImplemented


def pooling(
    kind: str,
    x: Array,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[Pair],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
    **_: Any,
) -> Array:
    """Compute `reduce_window_max` or `reduce_window_sum` of small windows; return `NotImplemented` for others."""
    plain = set(base_dilation) | set(window_dilation) == {1} and jnp.issubdtype(x.dtype, jnp.floating)
    if not plain or not 1 < math.prod(window_dimensions) <= MOST_TAPS:
        return NotImplemented
    outside = -jnp.inf if kind == "max" else 0
    x = jax.lax.pad(x, jnp.asarray(outside, x.dtype), [(low, high, 0) for low, high in padding])
    parts = [x]
    for axis, (size, stride) in enumerate(zip(window_dimensions, window_strides, strict=True)):
        if (size, stride) != (1, 1):
            parts = [piece for part in parts for piece in _places(part, axis, size, stride)]
    return largest(tuple(parts)) if kind == "max" else sum(parts[1:], parts[0])


def _places(x: Array, axis: int, size: int, stride: int) -> list[Array]:
    """Return the first, second, ... entries along an axis of all windows of this size."""
    num = (x.shape[axis] - size) // stride + 1
    if size == stride:
        x = jax.lax.slice_in_dim(x, 0, num * size, axis=axis)
        return _unstack(x.reshape(*x.shape[:axis], num, size, *x.shape[axis + 1 :]), axis + 1)
    ends = lambda at: (at, at + (num - 1) * stride + 1)
    return [jax.lax.slice_in_dim(x, *ends(at), stride=stride, axis=axis) for at in range(size)]


@jax.custom_jvp
def largest(parts: tuple[Array, ...]) -> Array:
    """Compute the elementwise maximum of several arrays; the gradient goes to the first of equal ones, as in XLA.

    Only one byte per entry, the index of the maximum, is stored for the gradient.
    """
    return functools.reduce(jnp.maximum, parts)


@largest.defjvp
def _largest_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
    parts, most = primals[0], largest(*primals)
    found = jnp.zeros(most.shape, jnp.uint8)
    for at, part in reversed(list(enumerate(parts))):
        found = jnp.where(part < most, found, jnp.uint8(at))  # also finds NaN
    # Without the barrier, XLA stores and reads the parts instead, which are sixteen times as large.
    found = jax.lax.optimization_barrier(found)
    return most, functools.reduce(jnp.add, (jnp.where(found == at, own, 0) for at, own in enumerate(tangents[0])))


def convolve(x: Array, kernel: Array, strides: Pair = (1, 1), dilation: Pair = (1, 1), num_groups: int = 1) -> Array:
    """Convolve padded images with the fastest kind of product."""
    rows, cols, depth, _ = kernel.shape
    if num_groups > 1:
        return _convolve_groups(x, kernel, strides, dilation, num_groups)
    if {*strides, *dilation} != {1} or 1 in (rows, cols):
        return convolve_by_patches(x, kernel, strides, dilation)
    if not saves_multiplications() or depth < DEEP or rows * cols > SMALL:
        return convolve_by_windows(x, kernel)
    if (rows, cols) == (3, 3) and depth >= TILED[0] and min(x.shape[1:3]) >= TILED[1]:
        return convolve_by_tiles(x, kernel)
    return convolve_by_patches(x, kernel)


def _taps(x: Array, size: Pair, strides: Pair, dilation: Pair) -> list[Array]:
    """Return, for each entry of a kernel, the pixels that it multiplies, as an array of the output's size."""
    num, depth = x.shape[0], x.shape[3]
    reach = [step * (entries - 1) for step, entries in zip(dilation, size, strict=True)]
    height, width = ((side - far - 1) // step + 1 for side, far, step in zip(x.shape[1:3], reach, strides, strict=True))
    # Cut images into blocks of the stride's size, so that every slice is contiguous: strided slices are slow.
    blocks = [far // step + out for far, step, out in zip(reach, strides, (height, width), strict=True)]
    more = [b * step - side for b, step, side in zip(blocks, strides, x.shape[1:3], strict=True)]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, more[0], 0), (0, more[1], 0), (0, 0, 0)))
    x = x.reshape(num, blocks[0], strides[0], blocks[1], strides[1] * depth)
    taps = []
    for place in itertools.product(*map(range, size)):
        (i, down), (j, across) = (divmod(at * d, step) for at, d, step in zip(place, dilation, strides, strict=True))
        taps.append(x[:, i : i + height, down, j : j + width, across * depth : (across + 1) * depth])
    return taps


def convolve_by_patches(x: Array, kernel: Array, strides: Pair = (1, 1), dilation: Pair = (1, 1)) -> Array:
    """Multiply image patches, one per output pixel, by the kernel."""
    num_channels = kernel.shape[3]
    taps = _taps(x, kernel.shape[:2], strides, dilation)
    patches = jnp.concatenate(taps, axis=3)
    y = patches.reshape(-1, patches.shape[3]) @ kernel.reshape(-1, num_channels)
    return y.reshape(*patches.shape[:3], num_channels)


def _convolve_groups(x: Array, kernel: Array, strides: Pair, dilation: Pair, num_groups: int) -> Array:
    """Convolve each group of channels with its own kernel; a depthwise convolution needs no matrix products."""
    rows, cols, depth, num_channels = kernel.shape
    taps = _taps(x, (rows, cols), strides, dilation)
    of_groups = [tap.reshape(*tap.shape[:3], num_groups, depth) for tap in taps]
    kernels = kernel.reshape(rows * cols, depth, num_groups, num_channels // num_groups)
    if depth == 1:
        y: Any = sum(tap * own[None, None, None, 0] for tap, own in zip(of_groups, kernels, strict=True))
    else:
        y = jnp.einsum("tnhwgc,tcgo->nhwgo", jnp.stack(of_groups), kernels)
    return y.reshape(*y.shape[:3], num_channels)


def convolve_by_windows(x: Array, kernel: Array) -> Array:
    """Compute a 2x2 block of outputs per input window, which reads less memory.

    The side of a window is the kernel's plus one, rounded up to even. With a 3x3 kernel, windows take 4 times the
    memory of the image, and patches 9 times; in exchange, products take 16 multiplications instead of 9, because the
    kernel is padded with zeros at each of its four offsets.
    """
    rows, cols, depth, num_channels = kernel.shape
    height, width = x.shape[1] - rows + 1, x.shape[2] - cols + 1
    down, across = -(-height // 2), -(-width // 2)  # windows
    tall, wide = rows // 2 + 1, cols // 2 + 1  # pairs of pixels in a window
    more = 2 * (down + tall - 1) - x.shape[1], 2 * (across + wide - 1) - x.shape[2]  # rows and columns; may be negative
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, more[0], 0), (0, more[1], 0), (0, 0, 0)))
    x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2 * depth)
    parts = [x[:, i : i + down, half, j : j + across] for i in range(tall) for half in (0, 1) for j in range(wide)]
    windows = jnp.concatenate(parts, axis=3).reshape(-1, 4 * tall * wide * depth)
    at = lambda i, j: jnp.pad(kernel, ((i, 2 * tall - rows - i), (j, 2 * wide - cols - j), (0, 0), (0, 0)))
    places = jnp.stack([at(i, j) for i in (0, 1) for j in (0, 1)], axis=3)
    y = windows @ places.reshape(windows.shape[1], 4 * num_channels)
    y = y.reshape(-1, down, across, 2, 2 * num_channels)
    return y.swapaxes(2, 3).reshape(-1, 2 * down, 2 * across, num_channels)[:, :height, :width]


def convolve_by_tiles(x: Array, kernel: Array) -> Array:
    """Convolve by Winograd's F(2x2, 3x3) (Lavin and Gray 2016, section 4.1), with 16 multiplications instead of 36.

    Sums of the pixels of each 4x4 tile are multiplied by sums of the kernel's entries; sums of these products are the
    2x2 output pixels of the tile.
    """
    height, width = (side - 2 for side in x.shape[1:3])
    x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
    tiles = [part for row in _tile_sums(x, 1) for part in _tile_sums(row, 2)]
    kernels = [part for row in _kernel_sums(kernel) for part in _kernel_sums(row)]
    products = _unstack(jnp.stack([tile.reshape(-1, x.shape[3]) for tile in tiles]) @ jnp.stack(kernels), 0)
    halves = zip(*(_pixel_sums(products[at::4]) for at in range(4)), strict=True)
    pixels = [pixel.reshape(*tiles[0].shape[:3], -1) for half in halves for pixel in _pixel_sums(half)]
    rows = [jnp.stack(pair, axis=3) for pair in (pixels[:2], pixels[2:])]
    return jnp.stack(rows, axis=2).reshape(*x.shape[:1], x.shape[1] - 2, x.shape[2] - 2, -1)[:, :height, :width]


def _tile_sums(x: Array, axis: int) -> list[Array]:
    """Compute the sums of the entries d0, d1, d2 and d3 of each tile along an axis."""
    num = x.shape[axis] // 2 - 1
    even, odd = _unstack(x.reshape(*x.shape[:axis], num + 1, 2, *x.shape[axis + 1 :]), axis + 1)
    d0, d1, d2, d3 = (jax.lax.slice_in_dim(d, i, i + num, axis=axis) for i in (0, 1) for d in (even, odd))
    return [d0 - d2, d1 + d2, d2 - d1, d1 - d3]


def _kernel_sums(kernel: Array) -> list[Array]:
    """Compute the sums of the kernel's entries along the first axis."""
    g0, g1, g2 = _unstack(kernel, 0)
    return [g0, (g0 + g1 + g2) / 2, (g0 - g1 + g2) / 2, g2]


def _pixel_sums(products: Sequence[Array]) -> list[Array]:
    """Compute the two output pixels from the products of each row or column of a tile."""
    m0, m1, m2, m3 = products
    return [m0 + m1 + m2, m1 - m2 - m3]


def _unstack(x: Array, axis: int) -> list[Array]:
    """Split an axis at once: the gradient of each single slice would be a full array of zeros to be summed."""
    return [jnp.squeeze(part, axis) for part in jax.lax.split(x, (1,) * x.shape[axis], axis)]
