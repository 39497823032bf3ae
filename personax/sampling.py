"""Which samples a local step sees.

A batch is a function of (key, stable client id, that client's own update count, step, role, draw) and of nothing else:
not of the cohort, the event or the thread. So a vmapped run equals a sequential one, a live run a simulated one, and
first-order, Hessian-free and exact methods see the same batches.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from personax.federation import ClientData, Federation
from personax.typing import Array, Batch, Scalar
from personax.values import Static, require_count, value

Sampling = Literal["replacement", "shuffled"]
ROLES = ("outer", "adapt", "curvature")

_INIT, _BATCHES = 0, 1  # streams of a run's key
_ROWS = 1 << 24  # counters of one batch: its rows from below, its dropout key and permutation from above


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


def run_stream(key: Array) -> Array:
    """The two words from which all batches of a run follow."""
    return jax.random.bits(jax.random.fold_in(key, _BATCHES), (2,), jnp.uint32)


def draw_rows(
    stream: Array,
    client: Client,
    steps: Array,
    draw: Draw,
    sampling: Sampling,
    query_share: Scalar | None = None,
) -> tuple[Array, Array, Array]:
    """For each of `steps`, the rows of one batch, their weights (0 for filler), and the key for its dropout.

    Two threefry blocks make them: one from the run's words for the visit, and one from the visit's for (step, role,
    draw, row). Splitting keys for each of these would cost more than the gradient of a small model.
    """
    start, count = _part(client, draw.role, query_share)
    visit = _hash(stream, client.id, client.update)
    batch = (3 * draw.index + ROLES.index(draw.role)) * _ROWS
    row = jnp.arange(draw.size, dtype=jnp.uint32)[None, :]
    dropout_key = jax.random.wrap_key_data(
        jnp.stack(_hash(visit, steps, batch + _ROWS - 1), axis=-1), impl="threefry2x32"
    )
    if sampling == "replacement":
        positions = _scaled(_hash(visit, steps[:, None], batch + row)[0], count)
        return start + positions, jnp.ones((len(steps), draw.size)), dropout_key
    per_epoch = -(-count // draw.size)
    place = (steps % per_epoch)[:, None] * draw.size + row.astype(steps.dtype)
    round_keys = _hash(visit, (steps // per_epoch)[:, None], batch + _ROWS - 2 - jnp.arange(6)[None, :])[0]
    positions = jax.vmap(permute, in_axes=(0, 0, None))(round_keys, jnp.minimum(place, count - 1), count)
    return start + positions, (place < count).astype(float), dropout_key


def _hash(words: Array | tuple[Array, Array], high: Any, low: Any) -> tuple[Array, Array]:
    """Two random words for each pair of counters: threefry-2x32 with 20 rounds (Salmon 2011).

    Written out because it is elementwise, so that it broadcasts and fuses under any `vmap`.
    """
    keys = (words[0], words[1], words[0] ^ words[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = jnp.asarray(high).astype(jnp.uint32) + keys[0], jnp.asarray(low).astype(jnp.uint32) + keys[1]
    for block in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x = x + y
            y = x ^ ((y << turn) | (y >> (32 - turn)))
        x, y = x + keys[(block + 1) % 3], y + keys[(block + 2) % 3] + jnp.uint32(block + 1)
    return x, y


def _scaled(words: Array, count: Array) -> Array:
    """`floor(word * count / 2^32)`: words to 0 ... count - 1, without 64-bit arithmetic."""
    count = count.astype(jnp.uint32)
    low = (words & 0xFFFF) * (count & 0xFFFF)
    middle = (words >> 16) * (count & 0xFFFF) + (low >> 16)
    carry = (words & 0xFFFF) * (count >> 16) + (middle & 0xFFFF)
    return ((words >> 16) * (count >> 16) + (middle >> 16) + (carry >> 16)).astype(jnp.int32)


def _part(client: Client, role: str, query_share: Scalar | None) -> tuple[Array, Array]:
    """The rows that a role draws from: all, or the query part for `outer` and the support part for the others."""
    if query_share is None:
        return client.start, client.count
    wanted = jnp.round(client.count * query_share).astype(client.count.dtype)
    query = jnp.clip(wanted, 1, jnp.maximum(client.count - 1, 1))
    support = jnp.maximum(client.count - query, 1)  # a client with one sample uses it for both
    return (client.start + client.count - query, query) if role == "outer" else (client.start, support)


def permute(round_keys: Array, places: Array, count: Array) -> Array:
    """Images of `places` under a random permutation of 0 ... count - 1, without forming the permutation.

    A Feistel network permutes the smallest enclosing power of four; places that leave the range are sent through it
    again until they are back inside. So one batch of a shuffled epoch costs its own size, not the client's.
    """
    halves = jnp.maximum((33 - jax.lax.clz(jnp.maximum(count - 1, 1).astype(jnp.uint32))) // 2, 1)
    mask = (jnp.uint32(1) << halves) - jnp.uint32(1)

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

    `client` is the position in the federation, `update` counts that client's own earlier visits, `draw` tells the
    batches of a role apart (adaptation steps), and `key` is the run's key as given to `simulate`.
    """
    data = federation.train
    where = Client(data.start[client], data.count[client], data.ids[client], jnp.asarray(update))
    steps, one = jnp.asarray([step]), Draw(role, draw, size)
    rows, weight, _ = draw_rows(run_stream(key), where, steps, one, sampling, query_share)
    return jnp.where(weight > 0, rows, -1)[0]
