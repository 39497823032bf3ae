"""Batch sampling: the samples that each local step uses.

A batch depends only on (key, stable client id, that client's own update count, step, role, draw), never on the cohort,
the event or the thread. Therefore a vmapped run equals a sequential one, a live run equals a simulated one, and
first-order, Hessian-free and exact methods use the same batches.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.data.federation import ClientData, Federation
from personax.keys import draw_key, dropout_key, epoch_key, run_stream, typed_key, visit_key
from personax.typing import Array, Batch, Scalar
from personax.values import BATCH_SIZES, Static, require_count, value

Sampling = Literal["replacement", "shuffled"]
ROLES = ("outer", "adapt", "curvature")


@BATCH_SIZES.register()
@value
class BatchSizes:
    """Batch sizes by role; `adapt` and `curvature` default to `outer`.

    `adapt` and `curvature` may also give one size for each adaptation step: D_{i,0}, D_{i,1}, ... of gMeta Remark 2.
    All batches of a role are then padded to the largest with rows of weight 0.

    >>> BatchSizes(40, adapt=(10, 20)).each("adapt", 2)
    (10, 20)
    """

    outer: Static[int]
    adapt: Static[int | tuple[int, ...] | None] = None
    curvature: Static[int | tuple[int, ...] | None] = None

    def __post_init__(self) -> None:
        for role in ROLES:
            sizes = getattr(self, role)
            is_several = isinstance(sizes, tuple) and role != "outer"
            if sizes == () or np.ndim(sizes) > is_several:
                must = "one size" if role == "outer" else "one size, or a tuple with one for each adaptation step"
                raise ValueError(f"`batch_size.{role}` must be {must}, got {sizes}.")
            for size in sizes if is_several else (sizes,):
                require_count(f"batch_size.{role}", size)

    def of(self, role: str) -> int:
        """Return the batch size of a role that draws one batch."""
        return self.each(role, 1)[0]

    def each(self, role: str, num: int) -> tuple[int, ...]:
        """Return the sizes of this role's `num` batches."""
        sizes = getattr(self, role) or self.outer
        if not isinstance(sizes, tuple):
            return (sizes,) * num
        if num not in (0, len(sizes)):
            raise ValueError(
                f"`batch_size.{role}` has {len(sizes)} sizes, but this role draws {num} batches. "
                "Give one size, or one for each adaptation step."
            )
        return sizes[:num]


class Draw(NamedTuple):
    """One batch of a local step: the `number`-th of its role."""

    role: str
    number: int
    size: int


class ClientRows(NamedTuple):
    """One client's rows in the data, its stable id, and its number of earlier updates."""

    start: Array
    num_samples: Array
    id: Array
    update: Array


def draw_rows(
    stream: Array,
    client: ClientRows,
    steps: Array,
    draws: tuple[Draw, ...],
    sampling: Sampling,
    query_share: Scalar | None = None,
) -> tuple[Array, Array, Array]:
    """Draw the batches of each of `steps`: joined rows and weights (0 for filler), and one dropout key per batch."""
    sizes, width_of = [draw.size for draw in draws], widths(draws)
    num_rows = [width_of[draw.role] for draw in draws]
    codes = jnp.array([len(ROLES) * draw.number + ROLES.index(draw.role) for draw in draws], jnp.uint32)
    start, count = map(jnp.stack, zip(*(_part(client, draw.role, query_share) for draw in draws), strict=True))
    batch = partial(_draw, visit_key(stream, client.id, client.update), sampling, max(sizes))
    batches_of_step = jax.vmap(batch, in_axes=(None, 0, 0, 0, 0))
    batches = jax.vmap(batches_of_step, in_axes=(0, None, None, None, None))
    rows, weight, keys = batches(steps.astype(jnp.int32), codes, jnp.array(sizes, jnp.int32), start, count)
    if num_rows != sizes:
        weight *= (np.arange(max(sizes)) < np.array(sizes)[:, None])[None]
    in_a_row = lambda leaf: jnp.concatenate([leaf[:, i, :num] for i, num in enumerate(num_rows)], axis=1)
    return in_a_row(rows), in_a_row(weight), keys


def widths(draws: tuple[Draw, ...]) -> dict[str, int]:
    """Return the size of each role's largest batch, in the order of the draws; its batches are padded to this size."""
    found: dict[str, int] = {}
    for draw in draws:
        found[draw.role] = max(found.get(draw.role, 0), draw.size)
    return found


def _draw(
    visit: Array, sampling: Sampling, width: int, step: Array, code: Array, size: Array, start: Array, count: Array
) -> tuple[Array, Array, Array]:
    """Draw one batch from `count` rows that begin at `start`, padded to `width`: rows, weights and dropout key."""
    key = draw_key(visit, step, code)
    if sampling == "replacement":
        positions, weight = scale_word(jax.random.bits(key, (width,), jnp.uint32), count), jnp.ones(width)
    else:
        per_epoch = -(-count // size)
        places = step % per_epoch * size + jnp.arange(width, dtype=count.dtype)
        shuffle = draw_key(epoch_key(visit), step // per_epoch, code)
        positions = permute(shuffle, jnp.minimum(places, count - 1), count)
        weight = (places < count).astype(float)
    return start + positions, weight, dropout_key(key)


def scale_word(words: Array, count: Array) -> Array:
    """Return `floor(word * count / 2^32)`, which maps words to 0 ... count - 1 without 64-bit arithmetic."""
    count = count.astype(jnp.uint32)
    low = (words & 0xFFFF) * (count & 0xFFFF)
    middle = (words >> 16) * (count & 0xFFFF) + (low >> 16)
    carry = (words & 0xFFFF) * (count >> 16) + (middle & 0xFFFF)
    return ((words >> 16) * (count >> 16) + (middle >> 16) + (carry >> 16)).astype(jnp.int32)


def _part(client: ClientRows, role: str, query_share: Scalar | None) -> tuple[Array, Array]:
    """Return the rows that a role draws from: all, or the query part for `outer` and the support part otherwise."""
    if query_share is None:
        return client.start, client.num_samples
    wanted = jnp.round(client.num_samples * query_share).astype(client.num_samples.dtype)
    query = jnp.clip(wanted, 1, jnp.maximum(client.num_samples - 1, 1))
    support = jnp.maximum(client.num_samples - query, 1)  # a client with one sample uses it for both
    return (client.start + client.num_samples - query, query) if role == "outer" else (client.start, support)


def permute(key: Array, places: Array, count: Array) -> Array:
    """Apply a random permutation of 0 ... count - 1 to `places` without forming the permutation.

    A Feistel network permutes the smallest enclosing power of four. Places that leave the range go through it again
    until they return. One batch of a shuffled epoch therefore costs its own size, not the client's.
    """
    round_keys = jax.random.bits(key, (12,), jnp.uint32)
    halves = jnp.maximum((33 - jax.lax.clz(jnp.maximum(count - 1, 1).astype(jnp.uint32))) // 2, 1)
    mask = (jnp.uint32(1) << halves) - jnp.uint32(1)

    def network(values: Array) -> Array:
        left, right = values >> halves, values & mask
        for round_key in round_keys:
            left, right = right, left ^ (_scramble(right, round_key) & mask)
        return (left << halves) | right

    def walk(walked: tuple[Array, Array]) -> tuple[Array, Array]:
        values = jnp.where(walked[1], network(walked[0]), walked[0])
        return values, values >= count.astype(jnp.uint32)

    begin = (places.astype(jnp.uint32), jnp.ones(places.shape, bool))
    return jax.lax.while_loop(lambda walked: walked[1].any(), walk, begin)[0].astype(jnp.int32)


def _scramble(values: Array, key: Array) -> Array:
    # The finalizer of a 32-bit hash: two multiplications by odd constants, each between two shifts.
    mixed = values ^ key
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ (mixed >> shift)) * jnp.uint32(factor)
    return mixed ^ (mixed >> 16)


def gather(data: ClientData, rows: Array, weight: Array, key: Array) -> Batch:
    """Return the samples of these rows as a batch."""
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
    """Return the rows of `federation.x` that a client's local step used, -1 for filler.

    Args:
        federation: the federation that the run used.
        key: the run's key, as given to `simulate`.
        client: the client's position in the federation.
        update: the number of that client's earlier visits.
        step: the local step.
        role: `"adapt"`, `"outer"` or `"curvature"`.
        size: the batch size.
        draw: the number of the batch within its role (the adaptation step).
        sampling: as in `Local`.
        query_share: as in `Local`.

    >>> import jax, numpy as np, personax as px
    >>> fed = px.Federation.from_clients([(np.zeros((6, 1)), np.zeros(6, int)), (np.zeros((4, 1)), np.zeros(4, int))])
    >>> rows = px.batch_indices(fed, jax.random.key(0), client=1, update=0, step=0, role="outer", size=3)
    >>> rows.shape, bool((rows >= 6).all())  # the second client's rows begin at 6
    ((3,), True)
    """
    data = federation.train
    where = ClientRows(data.start[client], data.num_samples[client], data.ids[client], jnp.asarray(update))
    steps, one = jnp.asarray([step]), (Draw(role, draw, size),)
    rows, weight, _ = draw_rows(run_stream(typed_key(key)), where, steps, one, sampling, query_share)
    return jnp.where(weight > 0, rows, -1)[0]
