"""The server's computation: checks of an upload, and the simulator's server steps, compiled."""

from collections.abc import Callable
from functools import cache
from math import isfinite
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from personax.algorithms import Algorithm
from personax.live.messages import Layout
from personax.server import ServerState, Upload
from personax.typing import Extra, Params, PyTree

Vectors = list[Any]  # the vectors of a layout
VersionedState = tuple[Vectors, Any]  # a server's state and its version


def first_state(algorithm: Algorithm, params: Params) -> ServerState:
    """The state before the first upload, of a whole model, without the sums of a server that steps at every upload."""
    return _kept(algorithm, algorithm.init_server(params))


@cache
def compiled(
    algorithm: Algorithm, up: Layout, kept: Layout
) -> tuple[Callable[..., Any], Callable[..., VersionedState]]:
    """Compile the simulator's functions that receive one upload and that take a step at the end of a round.

    State and upload are passed as the vectors of their layouts, and an upload's scalars as two more vectors, because
    passing fewer arrays is faster. `receive` also returns the sum of squares of each part of the upload and of the
    displacement it causes.
    """
    server, objective = algorithm.server, algorithm.objective
    versioned = lambda state: (kept.flatten(state), state.version)

    @jax.jit
    def receive(given: Vectors, vectors: Vectors, counts: Any, factors: Any) -> tuple[VersionedState, Any]:
        tree, (version, num_clients), (samples, scale) = up.unflatten(vectors), counts, factors
        state = _completed(algorithm, kept.unflatten(given), tree["extra"])
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
        sums = {part: sum(_squares(vectors[i][at]) for i, at in places) for part, places in up.spans.items()}
        moved = sums["delta"] if "delta" in tree else _distance(state.params, sent)
        squares = jnp.stack([*sums.values(), moved])
        if server.is_synchronous:
            return versioned(received), squares
        return versioned(_kept(algorithm, server.step_if_full(received, objective, num_clients))), squares

    @jax.jit
    def step(given: Vectors, num_clients: Any) -> VersionedState:
        return versioned(server.step(kept.unflatten(given), objective, num_clients))

    return receive, step


def _kept(algorithm: Algorithm, state: ServerState) -> ServerState:
    """The part of a state that must be kept until the next upload."""
    if algorithm.server.buffer_size != 1:
        return state
    return state._replace(pending=None, pending_extra=None, pending_weight=None, num_pending=None)


def _completed(algorithm: Algorithm, state: ServerState, extra: Extra) -> ServerState:
    """Undo `_kept`, at a moment when nothing is pending."""
    if algorithm.server.buffer_size != 1:
        return state
    nothing = algorithm.server.init(algorithm.objective, state.params, extra)
    names = ("pending", "pending_extra", "pending_weight", "num_pending")
    return state._replace(**{name: getattr(nothing, name) for name in names})


def miscounted(up: Layout, vectors: Vectors) -> str:
    """Describe the problem with the integers uploaded beside a delta, or return "". They count the visit itself.

    A server may loop that many times, so this check precedes any computation.
    """
    for leaf, i, at in up.whole_numbers:
        found = vectors[i][at]
        if leaf.name.startswith("extra.") and found.size and (found.min() < 0 or found.max() > 1):
            return f"`{leaf.name}` counts one visit, so it must be 0 or 1, got {found.max()}."
    return ""


def not_finite(up: Layout, squares: np.ndarray) -> str:
    """Name the part of an upload whose numbers, or the sum of their squares, are not finite; or return ""."""
    broken = [part for part, total in zip(up.spans, squares.tolist(), strict=False) if not isfinite(total)]
    return f"`{broken[0]}` must be finite, got NaN or infinite numbers." if broken else ""


def _distance(one: PyTree, other: PyTree) -> Any:
    """The squared distance of two trees, summed over all leaves."""
    return sum(_squares(a - b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def _squares(array: Any) -> Any:
    """The sum of squares, in at least float32."""
    wide = array.astype(jnp.promote_types(array.dtype, jnp.float32))
    return (wide * wide).sum()
