"""What the server computes: an upload's size and fitness, and the simulator's own steps, compiled."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.server import ServerState, Upload
from personax.typing import PyTree


@cache
def compiled(algorithm: Algorithm) -> tuple[Callable[..., ServerState], Callable[..., ServerState]]:
    """Receive one upload, and take a step at the end of a round: the simulator's functions, compiled."""
    server, objective = algorithm.server, algorithm.objective

    @jax.jit
    def receive(
        state: ServerState, tree: PyTree, version: Any, samples: Any, scale: Any, num_clients: Any
    ) -> ServerState:
        sent = tree["delta"] if "delta" in tree else tree["end"]
        scaled = jax.tree.map(lambda leaf: (leaf * scale).astype(leaf.dtype)[None], sent)
        extra = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], tree["extra"])
        one = lambda number, kind: jnp.asarray(number, kind)[None]
        upload = Upload(
            delta=scaled,
            end=scaled,
            extra=extra,
            version=one(version, jnp.int32),
            weight=one(samples, float),
            accepted=jnp.ones(1, bool),
        )
        received = server.receive(state, upload)
        return received if server.buffer_size is None else server.step_if_full(received, objective, num_clients)

    return receive, jax.jit(partial(_step, algorithm))


def _step(algorithm: Algorithm, state: ServerState, num_clients: Any) -> ServerState:
    return algorithm.server.step(state, algorithm.objective, num_clients)


def measure(tree: dict[str, PyTree]) -> tuple[dict[str, float], str]:
    """The sum of squares of each part of an upload, and why it can never be applied, or nothing.

    Numbers must be finite. (A sum of squares is when its terms are, or they are too large to be of any use.) A whole
    number beside the delta counts the visit itself.
    """
    sums = {part: sum_of_squares(inner) for part, inner in tree.items()}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree["extra"])[0]:
        if np.issubdtype(leaf.dtype, np.integer) and leaf.size and (leaf.min() < 0 or leaf.max() > 1):
            name = jax.tree_util.keystr(keys, simple=True, separator=".")
            return sums, f"`extra.{name}` counts one visit and must be 0 or 1, got {leaf.max()}."
    broken = [part for part, total in sums.items() if not np.isfinite(total)]
    return sums, f"`{broken[0]}` must be finite, got NaN or infinite numbers." if broken else ""


def sum_of_squares(tree: PyTree) -> float:
    """Over all leaves."""
    flat = (np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(tree))
    wide = (leaf if leaf.dtype in (np.float32, np.float64) else leaf.astype(np.float32) for leaf in flat)
    with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at
        return sum(float(np.dot(leaf, leaf)) for leaf in wide)
