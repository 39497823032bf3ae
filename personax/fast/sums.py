"""Sums over axes on both sides of a kept axis, as in group normalization: splitting them is many times faster."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array


def is_two_sums(equation: Any) -> bool:
    """Return True if a `reduce_sum` is over last axes and over others before a kept axis."""
    axes = equation.params["axes"]
    return 0 < len(_last_axes(equation.invars[0].aval.ndim, axes)) < len(axes)


def sum_in_two(x: Array, *, axes: Sequence[int], **_: Any) -> Array:
    """Compute `reduce_sum` over the outer axes, then over the last ones."""
    last = _last_axes(x.ndim, axes)
    outer = tuple(axis for axis in axes if axis not in last)
    # Without the barrier, XLA merges them into one sum again.
    partial = jax.lax.optimization_barrier(jax.lax.reduce_sum(x, outer))
    return jax.lax.reduce_sum(partial, tuple(axis - len(outer) for axis in last))


def _last_axes(ndim: int, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the axes that are not followed by a kept axis."""
    num = 0
    while num < ndim and ndim - 1 - num in axes:
        num += 1
    return tuple(range(ndim - num, ndim))
