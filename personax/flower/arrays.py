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
    given = zip(layout.leaves, map(np.asarray, layout.leaves_of(tree)), strict=True)
    return {leaf.name: np.asarray(array.view(_plain(leaf.dtype)), order="C") for leaf, array in given}


def to_tree(layout: "Layout", arrays: Mapping[str, np.ndarray]) -> "PyTree":
    """The pytree whose `to_arrays` gave these."""
    expected = {leaf.name for leaf in layout.leaves}
    odd = sorted(expected ^ set(arrays))
    if odd:
        raise ValueError(f"Arrays must be {', '.join(sorted(expected))}, got otherwise: {odd[0]}. Use the same recipe.")
    given = ((leaf.dtype, arrays[leaf.name]) for leaf in layout.leaves)
    found = [array.view(kind) if array.dtype == _plain(kind) else array for kind, array in given]
    return layout.structure.unflatten(layout.leaves_of(found))


def _plain(kind: np.dtype) -> np.dtype:
    """The type itself, or whole numbers of its size where NumPy does not know it."""
    return kind if kind.kind in "biuf" else np.dtype(f"uint{8 * kind.itemsize}")
