"""Pytrees as named arrays with NumPy's own types. Imports neither JAX nor Flower."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # these modules import JAX
    from personax.live.messages import Layout
    from personax.typing import PyTree

Arrays = dict[str, np.ndarray]


def to_arrays(layout: "Layout", tree: "PyTree") -> Arrays:
    """Convert a pytree of this layout to a dict of its leaves by name.

    A type that NumPy lacks (bfloat16) is sent as integers with the same bits, because NumPy's file format, in which
    Flower sends arrays, loses such types.
    """
    given = zip(layout.leaves, map(np.asarray, layout.leaves_of(tree)), strict=True)
    return {leaf.name: np.asarray(array.view(_plain(leaf.dtype)), order="C") for leaf, array in given}


def to_tree(layout: "Layout", arrays: Mapping[str, np.ndarray]) -> "PyTree":
    """The inverse of `to_arrays`."""
    expected = {leaf.name for leaf in layout.leaves}
    odd = sorted(expected ^ set(arrays))
    if odd:
        problem = "missing" if odd[0] in expected else "unexpected"
        raise ValueError(f"Arrays must be {', '.join(sorted(expected))}; {problem}: {odd[0]}. Use the same recipe.")
    given = ((leaf.dtype, arrays[leaf.name]) for leaf in layout.leaves)
    found = [array.view(kind) if array.dtype == _plain(kind) else array for kind, array in given]
    return layout.structure.unflatten(layout.leaves_of(found))


def _plain(kind: np.dtype) -> np.dtype:
    """The type itself, or an integer type of the same size if NumPy does not have it."""
    return kind if kind.kind in "biuf" else np.dtype(f"uint{8 * kind.itemsize}")
