"""Which samples a local step sees.

A batch is a function of (key, stable client id, that client's own update count, step, role, draw) and of nothing else:
not of the cohort, the event or the thread. So a vmapped run equals a sequential one, a live run a simulated one, and
first-order, Hessian-free and exact methods see the same batches.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from personax.federation import ClientData, Federation
from personax.typing import Array, Batch, Scalar
from personax.values import Static, require_count, value

Sampling = Literal["replacement", "shuffled"]
ROLES = ("outer", "adapt", "curvature")

_INIT, _BATCHES, _EPOCHS = 0, 1, 2  # streams of a run's key


@value
class BatchSizes:
    """A batch size for each role; `adapt` and `curvature` default to `outer`."""

    outer: Static[int]
    adapt: Static[int | None] = None
    curvature: Static[int | None] = None

    def __post_init__(self) -> None:
        for role in ROLES:
            require_count(f"batch_size.{role}", getattr(self, role))

    def of(self, role: str) -> int:
        """The size of this role's batches."""
        return getattr(self, role) or self.outer


class Draw(NamedTuple):
    """One batch of a local step: the `index`-th of its role."""

    role: str
    index: int
    size: int


class Client(NamedTuple):
    """Where one client's rows lie, its stable number, and how many updates it has made before this one."""

    start: Array
    count: Array
    id: Array
    update: Array


def init_key(key: Array) -> Array:
    """The key that initialises the model of a run."""
    return jax.random.fold_in(key, _INIT)


def draw_rows(
    key: Array, client: Client, step: Scalar, draw: Draw, sampling: Sampling, query_share: Scalar | None = None
) -> tuple[Array, Array, Array]:
    """The rows of one batch, their weights (0 for filler), and the key for its dropout."""
    start, count = _part(client, draw.role, query_share)
    stream = 3 * draw.index + ROLES.index(draw.role)
    visit_key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, _BATCHES), client.id), client.update)
    batch_key = jax.random.fold_in(jax.random.fold_in(visit_key, step), stream)
    if sampling == "replacement":
        positions = jax.random.randint(batch_key, (draw.size,), 0, count, jnp.int32)
        return start + positions, jnp.ones(draw.size), batch_key
    per_epoch = -(-count // draw.size)
    epoch_key = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(visit_key, step // per_epoch), stream), _EPOCHS)
    places = (step % per_epoch) * draw.size + jnp.arange(draw.size, dtype=jnp.int32)
    positions = permute(epoch_key, jnp.minimum(places, count - 1), count)
    return start + positions, (places < count).astype(jnp.result_type(float)), batch_key


def _part(client: Client, role: str, query_share: Scalar | None) -> tuple[Array, Array]:
    """The rows that a role draws from: all of them, or the query part for `outer` and the support part for the others."""
    if query_share is None:
        return client.start, client.count
    wanted = jnp.round(client.count * query_share).astype(client.count.dtype)
    query = jnp.clip(wanted, 1, jnp.maximum(client.count - 1, 1))
    support = jnp.maximum(client.count - query, 1)  # a client with one sample uses it for both
    return (client.start + client.count - query, query) if role == "outer" else (client.start, support)


def permute(key: Array, places: Array, count: Array) -> Array:
    """Images of `places` under a random permutation of 0 ... count - 1, without forming the permutation.

    A Feistel network permutes the smallest enclosing power of four; places that leave the range are sent through it
    again until they are back inside. So one batch of a shuffled epoch costs its own size, not the client's.
    """
    halves = jnp.maximum((33 - jax.lax.clz(jnp.maximum(count - 1, 1).astype(jnp.uint32))) // 2, 1)
    mask = (jnp.uint32(1) << halves) - jnp.uint32(1)
    round_keys = jax.random.bits(key, (6,), jnp.uint32)

    def network(values: Array) -> Array:
        left, right = values >> halves, values & mask
        for round_key in round_keys:
            left, right = right, left ^ (_scramble(right, round_key) & mask)
        return (left << halves) | right

    outside = lambda values: values >= count.astype(jnp.uint32)
    walk = lambda values: jnp.where(outside(values), network(values), values)
    values = jax.lax.while_loop(lambda v: jnp.any(outside(v)), walk, network(places.astype(jnp.uint32)))
    return values.astype(jnp.int32)


def _scramble(values: Array, key: Array) -> Array:
    # The finishing rounds of a 32-bit hash: two multiplications by odd constants, each between two shifts.
    mixed = values ^ key
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return mixed ^ (mixed >> 16)


def gather(data: ClientData, rows: Array, weight: Array, key: Array) -> Batch:
    """The samples of these rows."""
    return Batch(data.x[rows], data.y[rows], weight, key)


def batch_indices(
    federation: Federation,
    key: Array,
    client: int,
    update: int,
    step: int,
    role: str,
    size: int,
    *,
    draw: int = 0,
    sampling: Sampling = "replacement",
    query_share: float | None = None,
) -> Array:
    """The rows of `federation.x` that a client's local step saw, -1 for filler.

    `client` is the position in the federation, `update` counts that client's own earlier visits, `draw` tells the batches of
    a role apart (adaptation steps), and `key` is the run's key as given to `simulate`.
    """
    data = federation.train
    where = Client(data.start[client], data.count[client], data.ids[client], jnp.asarray(update))
    rows, weight, _ = draw_rows(key, where, step, Draw(role, draw, size), sampling, query_share)
    return jnp.where(weight > 0, rows, -1)
