"""Convolution and pooling of many small networks at once: inside `scan`, and under `vmap` over kernels.

A convolution is one matrix product: of image patches and the kernel, or, with all that 2x2 pixels see in one row, of
windows and the kernel at four places (`convolve_by_windows`); or, with a 3x3 kernel, sixteen smaller ones
(`convolve_by_tiles`). XLA's own is more than ten times slower there on a CPU, and on an H200, where it becomes a
grouped convolution, five times or more. Images are `[batch, height, width, channel]`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from personax.fast.backends import saves_multiplications

# Multiplications count more than memory on a CPU, with so many channels or more and such a kernel or a smaller one.
DEEP, SMALL = 16, 3 * 3
TILED = 32, 18  # channels and sides from which on products by tiles are long enough; 16 or 10: up to a third slower


def convolve(x: Array, kernel: Array, bias: Array, padding: str, pooled: bool = False) -> Array:
    """The convolution with a kernel `[rows, columns, channel, new channel]`, and a bias; max-pooled if wanted."""
    rows, cols, depth, _ = kernel.shape
    if padding == "SAME":
        x = jnp.pad(x, ((0, 0), ((rows - 1) // 2, rows // 2), ((cols - 1) // 2, cols // 2), (0, 0)))
    if not saves_multiplications() or depth < DEEP or rows * cols > SMALL:
        return convolve_by_windows(x, kernel, bias, pooled)
    if (rows, cols) == (3, 3) and depth >= TILED[0] and min(x.shape[1:3]) >= TILED[1]:
        y = convolve_by_tiles(x, kernel, pooled)
    else:
        y = convolve_by_patches(x, kernel)
        y = max_pool(y) if pooled else y
    return y + bias[None, None, None, :]  # it commutes with the maximum; after it, it costs a quarter


def convolve_by_patches(x: Array, kernel: Array) -> Array:
    """Multiply image patches, one for each pixel of the result, by the kernel. Adds no bias."""
    rows, cols, depth, num_channels = kernel.shape
    height, width = x.shape[1] - rows + 1, x.shape[2] - cols + 1
    parts = [x[:, i : i + height, j : j + width] for i in range(rows) for j in range(cols)]
    patches = jnp.concatenate(parts, axis=3).reshape(-1, rows * cols * depth)
    return (patches @ kernel.reshape(-1, num_channels)).reshape(-1, height, width, num_channels)


def convolve_by_windows(x: Array, kernel: Array, bias: Array, pooled: bool) -> Array:
    """Four pixels of the result from each window of what they see: for the speed of memory.

    The side of a window is the kernel's and one, made even. With a 3x3 kernel, windows are 4 times as large as the
    image, where patches are 9 times; for that the products have 16 multiplications where patches take 9, since the
    kernel at each of four places is filled up with zeros.
    """
    rows, cols, depth, num_channels = kernel.shape
    height, width = x.shape[1] - rows + 1, x.shape[2] - cols + 1
    down, across = (side // 2 if pooled else -(-side // 2) for side in (height, width))  # windows
    tall, wide = rows // 2 + 1, cols // 2 + 1  # pairs of pixels in a window
    more = 2 * (down + tall - 1) - x.shape[1], 2 * (across + wide - 1) - x.shape[2]  # rows and columns; may be negative
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, more[0], 0), (0, more[1], 0), (0, 0, 0)))
    x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2 * depth)
    parts = [x[:, i : i + down, half, j : j + across] for i in range(tall) for half in (0, 1) for j in range(wide)]
    windows = jnp.concatenate(parts, axis=3).reshape(-1, 4 * tall * wide * depth)
    at = lambda i, j: jnp.pad(kernel, ((i, 2 * tall - rows - i), (j, 2 * wide - cols - j), (0, 0), (0, 0)))
    places = jnp.stack([at(i, j) for i in (0, 1) for j in (0, 1)], axis=3)
    y = windows @ places.reshape(windows.shape[1], 4 * num_channels)
    if pooled:
        return (largest_of_four(y.reshape(-1, 4, num_channels)) + bias[None, :]).reshape(-1, down, across, num_channels)
    y = y + jnp.tile(bias, 4)[None, :]  # here, because its gradient is a sum over rows: wide ones are faster
    y = y.reshape(-1, down, across, 2, 2 * num_channels)
    return y.swapaxes(2, 3).reshape(-1, 2 * down, 2 * across, num_channels)[:, :height, :width]


@jax.custom_jvp
def largest_of_four(y: Array) -> Array:
    """The maximum over the second axis, of four; for a gradient it keeps one byte of each: which are the largest."""
    return y.max(axis=1)


@largest_of_four.defjvp
def _largest_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y, largest = primals[0], largest_of_four(*primals)
    bits = jnp.arange(4, dtype=jnp.uint8)[None, :, None]
    # Without the barrier XLA keeps and reads `y` in its place, which is sixteen times as large.
    found = jax.lax.optimization_barrier(jnp.sum((y == largest[:, None]) << bits, axis=1, dtype=jnp.uint8))
    num_found = jax.lax.population_count(found).astype(y.dtype)
    is_largest = (found[:, None] >> bits) & 1 == 1
    # Multiplied, not chosen: where nothing is found, because it is not a number, neither is the gradient.
    return largest, jnp.sum(tangents[0] * is_largest.astype(y.dtype), axis=1) / num_found


def convolve_by_tiles(x: Array, kernel: Array, pooled: bool) -> Array:
    """Winograd's F(2x2, 3x3) (Lavin and Gray 2016, section 4.1): 16 multiplications where patches take 36.

    Sums of the pixels of each 4x4 tile, of which there is one for every 2x2 pixels of the result, are multiplied by
    sums of the kernel's numbers; sums of the products are those pixels, which pooling need not put together first.
    """
    height, width = (side - 2 for side in x.shape[1:3])
    x = jnp.pad(x, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)))
    tiles = [part for row in _tile_sums(x, 1) for part in _tile_sums(row, 2)]
    kernels = [part for row in _kernel_sums(kernel) for part in _kernel_sums(row)]
    products = _unstack(jnp.stack([tile.reshape(-1, x.shape[3]) for tile in tiles]) @ jnp.stack(kernels), 0)
    halves = zip(*(_pixel_sums(products[at::4]) for at in range(4)), strict=True)
    pixels = [pixel.reshape(*tiles[0].shape[:3], -1) for half in halves for pixel in _pixel_sums(half)]
    if pooled:
        top, bottom = jnp.maximum(*pixels[:2]), jnp.maximum(*pixels[2:])
        return jnp.maximum(top, bottom)[:, : height // 2, : width // 2]
    rows = [jnp.stack(pair, axis=3) for pair in (pixels[:2], pixels[2:])]
    return jnp.stack(rows, axis=2).reshape(*x.shape[:1], x.shape[1] - 2, x.shape[2] - 2, -1)[:, :height, :width]


def _tile_sums(x: Array, axis: int) -> list[Array]:
    """Of the numbers d0, d1, d2 and d3 of each tile along an axis."""
    num = x.shape[axis] // 2 - 1
    even, odd = _unstack(x.reshape(*x.shape[:axis], num + 1, 2, *x.shape[axis + 1 :]), axis + 1)
    d0, d1, d2, d3 = (jax.lax.slice_in_dim(d, i, i + num, axis=axis) for i in (0, 1) for d in (even, odd))
    return [d0 - d2, d1 + d2, d2 - d1, d1 - d3]


def _kernel_sums(kernel: Array) -> list[Array]:
    """Of the numbers of each row or column, which the first axis counts."""
    g0, g1, g2 = _unstack(kernel, 0)
    return [g0, (g0 + g1 + g2) / 2, (g0 - g1 + g2) / 2, g2]


def _pixel_sums(products: Sequence[Array]) -> list[Array]:
    """Of the products of each row or column of a tile: its two pixels."""
    m0, m1, m2, m3 = products
    return [m0 + m1 + m2, m1 - m2 - m3]


def _unstack(x: Array, axis: int) -> list[Array]:
    """The parts of an axis. Of each alone the gradient would be an array of zeros, but for it, to be added up."""
    return [jnp.squeeze(part, axis) for part in jax.lax.split(x, (1,) * x.shape[axis], axis)]


def max_pool(x: Array) -> Array:
    """2x2 maximum with stride 2; an odd last row or column is dropped."""
    num, height, width, depth = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(num, height // 2, 2, width // 2, 2, depth).max(axis=(2, 4))
