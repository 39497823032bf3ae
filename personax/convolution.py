"""Convolution and pooling of many small networks at once: inside `scan`, and under `vmap` over kernels.

A convolution is one matrix product of image patches and the kernel, or, with channels last and a 3x3 kernel, sixteen
smaller ones (`_by_tiles`). XLA's own is more than ten times slower there on a CPU, and on an H200, where it becomes a
grouped convolution, five times or more.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

DEEP = 16  # channels of an image whose pixels are copied one by one rather than number by number: 64 bytes
TILED = 32, 18  # channels and sides from which on products by tiles are long enough; 16 or 10: up to a third slower


class Layout(NamedTuple):
    """The axes of a batch of images."""

    batch: int
    height: int
    width: int
    channel: int


LAST = Layout(0, 1, 2, 3)
FIRST = Layout(1, 2, 3, 0)


def fastest() -> Layout:
    """Channels last on a CPU. First on an accelerator: sums over pixels, as of a bias's gradient, are fast there."""
    return LAST if jax.default_backend() == "cpu" else FIRST


def arrange(x: Array, layout: Layout) -> Array:
    """Images `[batch, height, width, channel]` in a layout."""
    return x if layout == LAST else x.transpose(3, 0, 1, 2)


def restore(x: Array, layout: Layout) -> Array:
    """Images as `[batch, height, width, channel]` from a layout."""
    return x if layout == LAST else x.transpose(layout)


def convolve(x: Array, kernel: Array, padding: str, layout: Layout, pooled: bool = False) -> Array:
    """The convolution of images in a layout with a kernel `[rows, columns, channel, new channel]`; pooled if wanted."""
    rows, cols, depth, _ = kernel.shape
    if padding == "SAME":
        around = {layout.height: ((rows - 1) // 2, rows // 2), layout.width: ((cols - 1) // 2, cols // 2)}
        x = jnp.pad(x, [around.get(axis, (0, 0)) for axis in range(4)])
    if layout == LAST and (rows, cols) == (3, 3) and depth >= TILED[0] and min(x.shape[1:3]) >= TILED[1]:
        return _by_tiles(x, kernel, pooled)
    y = _by_patches(x, kernel, layout)
    return max_pool(y, layout) if pooled else y


def _by_patches(x: Array, kernel: Array, layout: Layout) -> Array:
    rows, cols, depth, num_channels = kernel.shape
    height, width = x.shape[layout.height] - rows + 1, x.shape[layout.width] - cols + 1
    down = lambda x, i: jax.lax.slice_in_dim(x, i, i + height, axis=layout.height)
    across = lambda x, j: jax.lax.slice_in_dim(x, j, j + width, axis=layout.width)
    join = lambda parts: jnp.concatenate(parts, axis=layout.channel)
    if depth >= DEEP:
        # All at once: the step between would be `rows` more images to write.
        x = join([down(across(x, j), i) for j in range(cols) for i in range(rows)])
    else:
        # One axis after the other: rows + cols slices instead of rows * cols halve the time to compile.
        x = join([down(x, i) for i in range(rows)])
        x = join([across(x, j) for j in range(cols)])
    matrix = kernel.transpose(1, 0, 2, 3).reshape(cols * rows * depth, num_channels)
    if layout == LAST:
        return (x.reshape(-1, len(matrix)) @ matrix).reshape(*x.shape[:3], num_channels)
    return (matrix.T @ x.reshape(len(matrix), -1)).reshape(num_channels, *x.shape[1:])


def _by_tiles(x: Array, kernel: Array, pooled: bool) -> Array:
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


def max_pool(x: Array, layout: Layout) -> Array:
    """2x2 maximum with stride 2; an odd last row or column is dropped."""
    for axis in (layout.height, layout.width):
        x = jax.lax.slice_in_dim(x, 0, x.shape[axis] // 2 * 2, axis=axis)
    shape = list(x.shape)
    shape[layout.height : layout.width + 1] = [x.shape[layout.height] // 2, 2, x.shape[layout.width] // 2, 2]
    return x.reshape(shape).max(axis=(layout.height + 1, layout.width + 2))
