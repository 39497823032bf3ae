"""Leaves of a model that no gradient moves, such as the running means of batch normalization.

`Task.statistics` gives their values after a step, as a part of the model: its own tree with None for all other leaves.
"""

import jax
import jax.numpy as jnp

from personax.sharing import is_none
from personax.typing import Batch, Params, PyTree, Scalar, Task


def statistics_of(task: Task, params: Params, batch: Batch) -> Params | None:
    """Return the shapes of a model's statistics, with None for all other leaves; None if it has no statistics."""
    found = None if task.statistics is None else jax.eval_shape(task.statistics, params, batch)
    return found if jax.tree.leaves(found) else None


def without_statistics(tree: PyTree, statistics: Params | None) -> PyTree:
    """Return the leaves of a tree that are not statistics.

    >>> without_statistics({"scale": 1.0, "mean": 2.0}, {"scale": None, "mean": 0.0})
    {'mean': None, 'scale': 1.0}
    """
    if statistics is None:
        return tree
    return jax.tree.map(lambda leaf, own: leaf if own is None else None, tree, statistics, is_leaf=is_none)


def updated(params: Params, new: Params | None, is_taken: Scalar = True) -> Params:
    """Return the parameters with new values of the statistics, where `is_taken`.

    >>> updated({"scale": 1.0, "mean": jnp.float32(2)}, {"scale": None, "mean": 0.5})
    {'mean': Array(0.5, dtype=float32), 'scale': 1.0}
    """
    if new is None:
        return params
    keeps = lambda old, own: old is None or own is None
    pick = lambda old, own: old if keeps(old, own) else jnp.where(is_taken, own, old).astype(old.dtype)
    return jax.tree.map(pick, params, new, is_leaf=is_none)
