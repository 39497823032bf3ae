"""Convolution and pooling of many small networks at once: inside `scan`, and under `vmap` over kernels.

A convolution is one matrix product of image patches and the kernel. XLA's own is more than ten times slower there on a
CPU, and on an H200, where it becomes a grouped convolution, five times or more.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

DEEP = 16  # channels of an image whose pixels are copied one by one rather than number by number: 64 bytes


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


def convolve(x: Array, kernel: Array, padding: str, layout: Layout) -> Array:
    """The convolution of images in a layout with a kernel `[rows, columns, channel, new channel]`."""
    rows, cols, depth, num_channels = kernel.shape
    if padding == "SAME":
        around = {layout.height: ((rows - 1) // 2, rows // 2), layout.width: ((cols - 1) // 2, cols // 2)}
        x = jnp.pad(x, [around.get(axis, (0, 0)) for axis in range(4)])
    height, width = x.shape[layout.height] - rows + 1, x.shape[layout.width] - cols + 1
    down = lambda x, i: jax.lax.slice_in_dim(x, i, i + height, axis=layout.height)
    across = lambda x, j: jax.lax.slice_in_dim(x, j, j + width, axis=layout.width)
    join = lambda parts: jnp.concatenate(parts, axis=layout.channel)
    if jax.default_backend() == "cpu" and depth >= DEEP:
        # All at once: the step between would be `rows` more images to write, and XLA concatenates with one thread.
        x = join([down(across(x, j), i) for j in range(cols) for i in range(rows)])
    else:
        # One axis after the other: rows + cols slices instead of rows * cols halve the time to compile.
        x = join([down(x, i) for i in range(rows)])
        x = join([across(x, j) for j in range(cols)])
    matrix = kernel.transpose(1, 0, 2, 3).reshape(cols * rows * depth, num_channels)
    if layout == LAST:
        return (x.reshape(-1, len(matrix)) @ matrix).reshape(*x.shape[:3], num_channels)
    return (matrix.T @ x.reshape(len(matrix), -1)).reshape(num_channels, *x.shape[1:])


def max_pool(x: Array, layout: Layout) -> Array:
    """2x2 maximum with stride 2; an odd last row or column is dropped."""
    for axis in (layout.height, layout.width):
        x = jax.lax.slice_in_dim(x, 0, x.shape[axis] // 2 * 2, axis=axis)
    shape = list(x.shape)
    shape[layout.height : layout.width + 1] = [x.shape[layout.height] // 2, 2, x.shape[layout.width] // 2, 2]
    return x.reshape(shape).max(axis=(layout.height + 1, layout.width + 2))
