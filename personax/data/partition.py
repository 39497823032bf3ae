"""Partitions: assignments of a pool's rows to clients, drawn on the host before a run, deterministic in a key.

A *pool* is a data set before it is divided. The rows of a client are in random order, so that its last rows are not
special; only `natural` keeps the order of the pool. If a partition chooses classes for each client, the choice depends
on the key and the classes but not on the number of samples: a training and a test pool with the same classes, divided
with the same key, give every client the same classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from personax.keys import HostStream, host_generator
from personax.typing import Array
from personax.values import PARTITIONS, require, require_count, require_positive

__all__ = [
    "Partition",
    "classes_per_client",
    "dirichlet",
    "dirichlet_by_class",
    "fallah_halves",
    "iid",
    "natural",
    "shards",
]

_MAX_DRAWS = 1000


@dataclass(frozen=True, eq=False)
class Partition:
    """The rows of a pool grouped by client: client i holds `rows[offsets[i]:offsets[i + 1]]`.

    `origin` describes the request, and `notes` describe important properties of the result.

    >>> partition = natural(["bo", "al", "bo"])
    >>> partition.num_clients, [rows.tolist() for rows in partition]
    (2, [[1], [0, 2]])
    """

    rows: np.ndarray
    offsets: np.ndarray
    origin: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rows", "offsets"):
            object.__setattr__(self, name, _whole_numbers(name, getattr(self, name)).astype(np.int64, copy=False))
        if len(self.offsets) < 2 or self.offsets[0] != 0 or self.offsets[-1] != len(self.rows):
            what = f"`offsets` must run from 0 to the {len(self.rows)} rows, with one entry more than clients"
            raise ValueError(f"{what}, got {self.offsets}.")
        require(lambda counts: counts >= 0, "offsets", np.diff(self.offsets), "not decrease")

    @property
    def num_clients(self) -> int:
        """Return the number of clients."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> np.ndarray:
        """Return the number of samples of each client."""
        return np.diff(self.offsets)

    @property
    def num_shared(self) -> int:
        """Return the number of pool rows that more than one client holds."""
        pairs = np.sort(self.rows * self.num_clients + _owners(self.counts))
        held = pairs[np.diff(pairs, prepend=-1) > 0] // self.num_clients
        return len(np.unique(held[1:][held[1:] == held[:-1]]))

    def client(self, position: int) -> np.ndarray:
        """Return one client's rows of the pool."""
        if not 0 <= position < self.num_clients:
            raise IndexError(f"`position` must be between 0 and {self.num_clients - 1}, got {position}.")
        return self.rows[self.offsets[position] : self.offsets[position + 1]]

    def __len__(self) -> int:
        return self.num_clients

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.client(position) for position in range(self.num_clients))

    def split(self, share: float = 0.2, *, key: Array) -> tuple["Partition", "Partition"]:
        """Split each client's rows at random into a training and a test partition, `share` of them for tests.

        Of a client's m rows, round(share * m) are for tests, but at least one and at most m - 1. The choice does not
        depend on the order of the rows. APFL section 5 (80% and 20%) and gMeta section 5 (800 and 200 of 1000).

        Departures from the paper: none.
        """
        require(lambda v: (v > 0) & (v < 1), "share", share, "be strictly between 0 and 1")
        few = np.flatnonzero(self.counts < 2)
        if few.size:
            what = "Each client must have at least 2 samples, one for training and one for tests"
            got = f"got {self.counts[few[0]]} for client {few[0]}"
            raise ValueError(f"{what}, {got} and fewer than 2 for {few.size} of {self.num_clients} clients.")
        owner = _owners(self.counts)
        rows = self.rows[np.lexsort((self.rows, owner))][_shuffled(owner, host_generator(key, HostStream.TEST_SPLIT))]
        num_test = np.clip(np.rint(share * self.counts).astype(np.int64), 1, self.counts - 1)
        is_test = np.arange(len(rows)) - self.offsets[owner] < num_test[owner]
        shared = ("A test sample of one client may be a training sample of another.",) if self.num_shared else ()
        name = lambda part: f"{self.origin or 'given rows'}, {part} part of a local split with a test share of {share}"
        train = Partition(rows[~is_test], _offsets(self.counts - num_test), name("training"), self.notes)
        return train, Partition(rows[is_test], _offsets(num_test), name("test"), self.notes + shared)

    def __str__(self) -> str:
        few, many = self.counts.min(), self.counts.max()
        sizes = f"{few}" if few == many else f"{few} to {many}"
        size = f"{self.num_clients} clients, {len(self.rows)} samples, {sizes} each"
        return "\n  ".join([f"Partition: {self.origin or 'given rows'}", size, *(f"note: {n}" for n in self.notes)])


@PARTITIONS.register(
    summary="A shuffled pool divided into clients of equal size",
    source="McMahan 2017, section 3",
    citations=("mcmahan2017",),
)
def iid(labels: Any, num_clients: int, *, num_per_client: int | None = None, key: Array) -> Partition:
    """Divide a shuffled pool into clients of equal size (McMahan 2017 section 3, "IID").

    Sizes differ by at most one, and every row is used; with `num_per_client`, every client gets that many rows.

    Departures from the paper: none.

    >>> import jax, numpy as np, personax as px
    >>> labels = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2])
    >>> px.partition.iid(labels, num_clients=3, key=jax.random.key(0)).counts.tolist()
    [3, 3, 3]
    """
    num_samples = len(labels)
    require_count("number of labels", num_samples)
    require_count("num_per_client", num_per_client)
    _require_places(num_samples, num_clients, num_per_client or 1, "`num_clients` or `num_per_client`")
    sizes = _even_sizes(num_samples, num_clients) if num_per_client is None else np.full(num_clients, num_per_client)
    rows = host_generator(key, HostStream.PARTITION_ROWS).permutation(num_samples)[: sizes.sum()]
    return Partition(rows, _offsets(sizes), f"iid over {num_clients} clients{_each(num_per_client)}")


@PARTITIONS.register(
    summary="Shards of the pool sorted by label, a few for each client",
    source="McMahan 2017, section 3",
    citations=("mcmahan2017",),
)
def shards(labels: Any, num_clients: int, num_shards_each: int = 2, *, key: Array) -> Partition:
    """Cut the pool, sorted by label, into shards of equal size, and give each client `num_shards_each` random ones.

    McMahan 2017 section 3, "Non-IID": 200 shards of 300 for 100 clients. A shard can span two classes.

    Departures from the paper: shard sizes differ by one if the pool size is not divisible.

    >>> import jax, numpy as np, personax as px
    >>> labels = np.repeat([0, 1, 2, 3], 10)
    >>> partition = px.partition.shards(labels, num_clients=4, num_shards_each=2, key=jax.random.key(0))
    >>> partition.counts.tolist()
    [10, 10, 10, 10]
    """
    pool = _pool(labels)
    require_count("num_shards_each", num_shards_each)
    _require_places(len(pool.labels), num_clients, num_shards_each, "`num_clients` or `num_shards_each`")
    num_shards = num_clients * num_shards_each
    rng = host_generator(key, HostStream.PARTITION_ROWS)
    owner_of_shard = rng.permutation(num_shards) // num_shards_each
    owner = np.repeat(owner_of_shard, _even_sizes(len(pool.labels), num_shards))
    origin = f"{num_shards_each} of {num_shards} shards sorted by label for each of {num_clients} clients"
    return _by_client(_shuffled(pool.labels, rng), owner, num_clients, rng, origin)


@PARTITIONS.register(
    summary="A fixed number of classes per client, each class held equally often",
    source="APFL 2020, appendix B.1; PersA-FL 2023, section 5",
    citations=("deng2020", "toghani2023"),
)
def classes_per_client(
    labels: Any, num_clients: int, num_classes_each: int, *, num_per_client: int | None = None, key: Array
) -> Partition:
    """Give each client samples of exactly `num_classes_each` classes, with each class held equally often.

    APFL appendix B.1 (2 or 4 classes), PersA-FL section 5 ("c out of 10 classes"). The numbers of clients per class
    differ by at most one. The clients of a class share all its samples evenly; with `num_per_client`, each client gets
    that many, spread evenly over its classes.

    Departures from the paper: APFL and PersA-FL do not state how classes are chosen; here, the choice is balanced and
    random.

    >>> import jax, numpy as np, personax as px
    >>> labels = np.repeat([0, 1, 2, 3], 10)
    >>> partition = px.partition.classes_per_client(labels, num_clients=4, num_classes_each=2, key=jax.random.key(0))
    >>> [len(np.unique(labels[rows])) for rows in partition]
    [2, 2, 2, 2]
    """
    pool = _pool(labels)
    require_count("num_classes_each", num_classes_each)
    require_count("num_per_client", num_per_client)
    _require_places(len(pool.labels), num_clients, num_per_client or 1, "`num_clients` or `num_per_client`")
    num_classes = len(pool.classes)
    must = f"be at most the {num_classes} classes of the pool"
    require(lambda v: v <= num_classes, "num_classes_each", num_classes_each, must)
    must = f"be at least 1 for each of the {num_classes_each} classes of a client"
    require(lambda v: v >= num_classes_each, "num_per_client", num_per_client, must)
    chosen = _choose_classes(
        num_clients, num_classes, num_classes_each, host_generator(key, HostStream.PARTITION_CLASSES)
    )
    wanted = _divided(pool, chosen) if num_per_client is None else _spread(pool, chosen, num_per_client)
    _require_enough(pool, wanted, "Reduce `num_clients` or the samples per client.")
    origin = f"{num_classes_each} of {num_classes} classes for each of {num_clients} clients{_each(num_per_client)}"
    unheld = pool.classes[wanted.sum(axis=0) == 0].tolist()
    places = f"{num_clients} x {num_classes_each} places are fewer than {num_classes} classes"
    notes = (f"No client holds classes {', '.join(map(str, unheld))}: {places}.",) if unheld else ()
    return _deal(pool, wanted, host_generator(key, HostStream.PARTITION_ROWS), origin, notes)


@PARTITIONS.register(
    summary="A Dirichlet class distribution for each client, from which samples are drawn",
    source="gMeta 2025, section 5; Hsu 2019",
    citations=("jamali2025", "hsu2019"),
)
def dirichlet(labels: Any, num_clients: int, concentration: float, *, num_per_client: int, key: Array) -> Partition:
    """Draw a class distribution per client from a symmetric Dirichlet, then `num_per_client` samples from it.

    gMeta section 5 (50 clients, 1000 samples of 50000, concentration alpha_d = 0.01); Hsu 2019, arXiv:1909.06335. If
    clients together need more samples of a class than exist, they share them: each sample is held equally often up to
    one, never twice by a client, and a note reports it. Samples of other classes are not shared.

    Departures from the paper: the sharing; gMeta does not state what happens when a class runs out.

    >>> import jax, numpy as np, personax as px
    >>> labels = np.repeat([0, 1, 2, 3], 50)
    >>> partition = px.partition.dirichlet(labels, 4, 0.3, num_per_client=20, key=jax.random.key(0))
    >>> partition.counts.tolist()
    [20, 20, 20, 20]
    """
    pool = _pool(labels)
    require_positive("concentration", concentration)
    require_count("num_clients", num_clients)
    require_count("num_per_client", num_per_client)
    num_samples, num_classes = len(pool.labels), len(pool.classes)
    require(lambda v: v <= num_samples, "num_per_client", num_per_client, f"be at most the {num_samples} samples")
    weights = np.full(num_classes, float(concentration))
    distributions = host_generator(key, HostStream.PARTITION_CLASSES).dirichlet(weights, num_clients)
    wanted = host_generator(key, HostStream.PARTITION_COUNTS).multinomial(num_per_client, distributions)
    for client, place in np.argwhere(wanted > pool.sizes)[:1]:
        raise ValueError(
            f"No client may hold a sample twice, but client {client} drew {wanted[client, place]} of class "
            f"{pool.classes[place]}, which has {pool.sizes[place]} samples. Reduce `num_per_client` "
            f"({num_per_client}); up to {pool.sizes.min()} always works."
        )
    totals = wanted.sum(axis=0)
    overdrawn = [
        f"class {pool.classes[place]} (needed {totals[place]}, available {pool.sizes[place]})"
        for place in np.flatnonzero(totals > pool.sizes)
    ]
    notes = (f"Clients share samples of {', '.join(overdrawn)}.",) if overdrawn else ()
    origin = f"class distributions of {num_clients} clients from Dirichlet({concentration}){_each(num_per_client)}"
    return _deal(pool, wanted, host_generator(key, HostStream.PARTITION_ROWS), origin, notes)


@PARTITIONS.register(
    summary="Each class divided among clients in Dirichlet proportions",
    source="Yurochkin 2019",
    citations=("yurochkin2019",),
)
def dirichlet_by_class(labels: Any, num_clients: int, concentration: float, *, least: int = 2, key: Array) -> Partition:
    """Divide each class among the clients in proportions from a symmetric Dirichlet, using every sample once.

    Yurochkin 2019, arXiv:1905.12022 (concentration 0.5). Proportions are redrawn up to 1000 times until every client
    has `least` samples. Sizes vary between clients. A second pool would be divided differently: use `Partition.split`.

    Departures from the paper: the repeated draws.

    >>> import jax, numpy as np, personax as px
    >>> labels = np.repeat([0, 1, 2, 3], 50)
    >>> partition = px.partition.dirichlet_by_class(labels, 4, 0.5, key=jax.random.key(0))
    >>> int(partition.counts.sum())  # every sample is used once
    200
    """
    pool = _pool(labels)
    require_positive("concentration", concentration)
    require_count("least", least, least=0)
    _require_places(len(pool.labels), num_clients, least, "`num_clients` or `least`")
    rng, weights = host_generator(key, HostStream.PARTITION_CLASSES), np.full(num_clients, float(concentration))
    smallest = 0
    for _ in range(_MAX_DRAWS):
        ends = np.rint(np.cumsum(rng.dirichlet(weights, len(pool.sizes)), axis=1) * pool.sizes[:, None])
        ends[:, -1] = pool.sizes
        wanted = np.diff(ends.astype(np.int64), axis=1, prepend=0).T
        if wanted.sum(axis=1).min() >= least:
            origin = f"each class divided over {num_clients} clients by Dirichlet({concentration})"
            return _deal(pool, wanted, host_generator(key, HostStream.PARTITION_ROWS), origin)
        smallest = max(smallest, wanted.sum(axis=1).min())
    raise ValueError(
        f"Every client must have at least {least} of the {len(pool.labels)} samples, got at most {smallest} for the "
        f"smallest of {num_clients} in {_MAX_DRAWS} draws. Increase `concentration` or reduce `num_clients`."
    )


@PARTITIONS.register(
    summary="Half of the clients with the first half of the classes, the others with two classes each",
    source="Fallah 2020, section 5",
    citations=("fallah2020",),
)
def fallah_halves(
    labels: Any, num_clients: int, num_each: int, *, without_first: bool = False, key: Array
) -> Partition:
    """Give half of the clients the first half of the classes, and each other client one class of each half.

    Fallah 2020 section 5, a = `num_each`, ten classes: (i) half of the clients, here the first num_clients // 2, each
    have a samples of each of the first five classes; (ii) the rest each have a/2 of one of the first five and 2a of one
    of the other five. `without_first` leaves out the a/2 ("diff. hetero." of Table 1). Each class is chosen equally
    often, up to one, at random and independently for the two kinds; no sample is held twice.

    Departures from the paper: the choice of classes, which it does not state; half of an odd a is rounded down; any
    even number of classes is allowed.

    >>> import jax, numpy as np, personax as px
    >>> labels = np.repeat(np.arange(10), 100)
    >>> partition = px.partition.fallah_halves(labels, num_clients=4, num_each=10, key=jax.random.key(0))
    >>> [len(np.unique(labels[rows])) for rows in partition]
    [5, 5, 2, 2]
    """
    pool = _pool(labels)
    require_count("num_clients", num_clients, least=2)
    require_count("num_each", num_each, least=1 if without_first else 2)
    num_first, num_classes = num_clients // 2, len(pool.classes)
    if num_classes % 2:
        raise ValueError(f"The pool must have an even number of classes, got {num_classes}.")
    rng, half = host_generator(key, HostStream.PARTITION_CLASSES), num_classes // 2
    others, num_others = np.arange(num_first, num_clients), num_clients - num_first
    of_first, of_last = (_balanced(num_others, half, rng) for _ in range(2))
    wanted = np.zeros((num_clients, num_classes), np.int64)
    wanted[:num_first, :half] = num_each
    wanted[others, of_first] = 0 if without_first else num_each // 2
    wanted[others, half + of_last] = 2 * num_each
    _require_enough(pool, wanted, "Reduce `num_each` or `num_clients`.")
    less = "" if without_first else f"{num_each // 2} of one of these and "
    origin = (
        f"{num_first} clients with {num_each} samples of each of the first {half} classes, "
        f"{num_others} with {less}{2 * num_each} of one of the last {half}"
    )
    return _deal(pool, wanted, host_generator(key, HostStream.PARTITION_ROWS), origin)


def natural(client_ids: Any) -> Partition:
    """Keep the clients of the data: one for each different id, an integer or string, in sorted order.

    Client i is `np.unique(client_ids)[i]`; its rows keep the order of the pool. APFL appendix B.1 (EMNIST by author).

    Departures from the paper: none.

    >>> import personax as px
    >>> partition = px.partition.natural(["bo", "al", "bo"])
    >>> [rows.tolist() for rows in partition]
    [[1], [0, 2]]
    """
    ids = np.asarray(client_ids)
    words = ids.dtype.kind in "USTO" and (ids.dtype.kind != "O" or all(isinstance(name, str) for name in ids.flat))
    if ids.ndim != 1 or not ids.size or not (words or np.issubdtype(ids.dtype, np.integer)):
        what = "`client_ids` must be a row of integers or strings, one for each sample"
        raise ValueError(f"{what}, got {ids.dtype} of shape {ids.shape}.")
    rows = np.argsort(ids, kind="stable")
    ids = ids[rows]
    offsets = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1, [len(ids)]])
    return Partition(rows, offsets, f"by id, {len(offsets) - 1} clients")


class _PoolByClass(NamedTuple):
    """The labels of a pool, its classes in order, and the number of samples of each."""

    labels: np.ndarray
    classes: np.ndarray
    sizes: np.ndarray


def _pool(labels: Any) -> _PoolByClass:
    labels = _whole_numbers("labels", labels)
    if not labels.size:
        raise ValueError("`labels` is empty. Give one entry per sample.")
    return _PoolByClass(labels, *np.unique(labels, return_counts=True))


def _whole_numbers(name: str, given: Any) -> np.ndarray:
    given = np.asarray(given)
    if given.ndim != 1 or not (np.issubdtype(given.dtype, np.integer) or not given.size):
        raise ValueError(f"`{name}` must be a row of integers, got {given.dtype} of shape {given.shape}.")
    if given.size and given.min() < 0:
        raise ValueError(f"`{name}` must not be negative, got {given.min()} at {given.argmin()}.")
    return given


def _require_places(num_samples: int, num_clients: int, each: int, lower: str) -> None:
    require_count("num_clients", num_clients)
    need = num_clients * each
    if need > num_samples:
        what = f"The pool must have at least {num_clients} clients x {each} = {need} samples"
        raise ValueError(f"{what}, got {num_samples}. Reduce {lower}.")


def _require_enough(pool: _PoolByClass, wanted: np.ndarray, hint: str) -> None:
    for place in np.flatnonzero(wanted.sum(axis=0) > pool.sizes)[:1]:
        column = wanted[:, place]
        terms = zip(*np.unique(column[column > 0], return_counts=True), strict=True)
        needed = " + ".join(f"{num} x {each}" for each, num in terms)
        what = f"Class {pool.classes[place]} must have {needed} = {column.sum()} samples"
        raise ValueError(f"{what} (clients x samples), got {pool.sizes[place]}. {hint}")


def _choose_classes(num_clients: int, num_classes: int, num_each: int, rng: np.random.Generator) -> np.ndarray:
    """Choose `num_each` different classes for each client, with every class chosen equally often up to one.

    Each client takes the classes with the most remaining places, with random ties. The numbers of remaining places then
    never differ by more than one, so at least `num_each` classes remain for the last client.
    """
    left = _even_sizes(num_clients * num_each, num_classes)[rng.permutation(num_classes)]
    chosen = np.empty((num_clients, num_each), np.int64)
    for client in range(num_clients):
        chosen[client] = np.argsort(rng.random(num_classes) - left)[:num_each]
        left[chosen[client]] -= 1
    return chosen[rng.permutation(num_clients)]


def _divided(pool: _PoolByClass, chosen: np.ndarray) -> np.ndarray:
    """Return the samples of each client and class if the clients of a class share all of it."""
    holds = _holds(pool, chosen)
    num_holders = np.maximum(holds.sum(axis=0), 1)
    has_more = np.cumsum(holds, axis=0) <= pool.sizes % num_holders
    return np.where(holds, np.maximum(pool.sizes // num_holders + has_more, 1), 0)


def _spread(pool: _PoolByClass, chosen: np.ndarray, num_per_client: int) -> np.ndarray:
    """Return the samples of each client and class if it spreads `num_per_client` over its classes.

    A remainder goes to a client's first classes. If that exceeds a class, single samples move along chains of classes,
    from one class to another of the same client, to a class with samples left. Without such a chain, which is an
    augmenting path of a maximum flow, the request is impossible.
    """
    each, rest = divmod(num_per_client, chosen.shape[1])
    holds, extra = _holds(pool, chosen), _holds(pool, chosen[:, :rest])
    while True:
        left = pool.sizes - (each * holds + extra).sum(axis=0)
        can_move = extra.T.astype(float) @ (
            holds & ~extra
        )  # the number of clients that can move a sample from class to class
        chain = _chain(can_move > 0, int(left.argmin()), left > 0) if left.min() < 0 else ()
        if not chain:
            return each * holds + extra
        steps = list(pairwise(chain))
        num = int(min(-left[chain[0]], left[chain[-1]], *(can_move[step] for step in steps)))
        for old, new in steps:
            movers = np.flatnonzero(extra[:, old] & holds[:, new] & ~extra[:, new])[:num]
            extra[movers, old], extra[movers, new] = False, True


def _chain(linked: np.ndarray, start: int, is_goal: np.ndarray) -> tuple[int, ...]:
    """Return the shortest path from `start` to a goal, or an empty one."""
    paths: list[tuple[int, ...]] = [(start,)]
    seen = {start}
    for path in paths:  # the list grows in the loop
        if is_goal[path[-1]]:
            return path
        new = [place for place in np.flatnonzero(linked[path[-1]]).tolist() if place not in seen]
        seen.update(new)
        paths.extend((*path, place) for place in new)
    return ()


def _holds(pool: _PoolByClass, chosen: np.ndarray) -> np.ndarray:
    holds = np.zeros((len(chosen), len(pool.sizes)), bool)
    holds[np.arange(len(chosen))[:, None], chosen] = True
    return holds


def _balanced(num: int, num_kinds: int, rng: np.random.Generator) -> np.ndarray:
    """Return `num` entries of 0 ... num_kinds - 1 in random order, each equally often up to one."""
    return rng.permutation(rng.permutation(num_kinds)[np.arange(num) % num_kinds])


def _deal(
    pool: _PoolByClass, wanted: np.ndarray, rng: np.random.Generator, origin: str, notes: tuple = ()
) -> Partition:
    """Deal samples by a table [clients, classes] of counts; a class that runs out restarts from the beginning."""
    num_clients, totals = len(wanted), wanted.sum(axis=0)
    place = _owners(totals)  # position of the class
    turn = np.arange(len(place)) - _offsets(totals)[place]
    rows = _shuffled(pool.labels, rng)[_offsets(pool.sizes)[place] + turn % pool.sizes[place]]
    owner = np.repeat(np.tile(np.arange(num_clients), len(totals)), wanted.T.ravel())
    return _by_client(rows, owner, num_clients, rng, origin, notes)


def _by_client(
    rows: np.ndarray, owner: np.ndarray, num_clients: int, rng: np.random.Generator, origin: str, notes: tuple = ()
) -> Partition:
    order = _shuffled(owner, rng)
    return Partition(rows[order], _offsets(np.bincount(owner, minlength=num_clients)), origin, notes)


def _shuffled(groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return an order that sorts by group and is random within each group."""
    order = rng.permutation(len(groups))
    return order[np.argsort(groups[order], kind="stable")]


def _owners(counts: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(counts)), counts)


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)])


def _even_sizes(total: int, num_parts: int) -> np.ndarray:
    return total // num_parts + (np.arange(num_parts) < total % num_parts)


def _each(num_per_client: int | None) -> str:
    return "" if num_per_client is None else f", {num_per_client} samples each"
