"""A pytree as named arrays of types that NumPy itself has. Imports neither JAX nor Flower."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # its module imports JAX
    from personax.live.messages import Layout
    from personax.typing import PyTree

Arrays = dict[str, np.ndarray]


def to_arrays(layout: "Layout", tree: "PyTree") -> Arrays:
    """The leaves of a pytree of this layout by their names.

    A type that NumPy lacks (bfloat16) travels as whole numbers of the same bits: NumPy's file format, in which Flower
    sends arrays, forgets such types.
    """
    leaves = layout.structure.flatten_up_to(tree)
    found = {}
    for leaf, given in zip(layout.leaves, leaves, strict=True):
        array = np.asarray(given)
        if array.shape != leaf.shape or array.dtype != leaf.dtype:
            raise ValueError(f"`{leaf.name}` must be {leaf}, got {array.dtype.name} of shape {array.shape}.")
        found[leaf.name] = np.asarray(array.view(_plain(leaf.dtype)), order="C")
    return found


def to_tree(layout: "Layout", arrays: Mapping[str, np.ndarray]) -> "PyTree":
    """The pytree whose `to_arrays` gave these."""
    expected = {leaf.name for leaf in layout.leaves}
    odd = sorted(expected ^ set(arrays))
    if odd:
        raise ValueError(f"Arrays must be {', '.join(sorted(expected))}, got otherwise: {odd[0]}. Use the same recipe.")
    leaves = []
    for leaf in layout.leaves:
        array = arrays[leaf.name]
        if array.shape != leaf.shape or array.dtype != _plain(leaf.dtype):
            raise ValueError(f"`{leaf.name}` must be {leaf}, got {array.dtype.name} of shape {array.shape}.")
        leaves.append(array.view(leaf.dtype))
    return layout.structure.unflatten(leaves)


def _plain(kind: np.dtype) -> np.dtype:
    """The type itself, or whole numbers of its size where NumPy does not know it."""
    return kind if kind.kind in "biuf" else np.dtype(f"uint{8 * kind.itemsize}")
