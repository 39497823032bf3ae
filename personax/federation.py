"""Client data: flat arrays and offsets, nothing padded."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.describe import describe_labels, describe_samples
from personax.keys import host_generator
from personax.partition import Partition, natural
from personax.typing import Array
from personax.values import require_count

_HELD_OUT = 2**31 + 16  # stream of a key, away from those of schedules and partitions


class ClientData(NamedTuple):
    """A federation's training data on the device. Client i holds rows `start[i] : start[i] + num_samples[i]`."""

    x: Array
    y: Array
    start: Array
    num_samples: Array
    ids: Array  # stable numbers: random streams follow them, whatever the order of the clients


class _Part(NamedTuple):
    """Training or test data on the host."""

    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray

    def take(self, rows: np.ndarray | None, offsets: np.ndarray) -> "_Part":
        """Other rows of the same arrays (None: all as they are)."""
        return _Part(self.x, self.y, offsets) if rows is None else _Part(self.x[rows], self.y[rows], offsets)


class Numbered(Sequence[str]):
    """Names made from numbers when they are asked for: a million of them cost nothing."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: Any) -> Any:
        return Numbered(self.ids[at]) if isinstance(at, slice) else f"client {self.ids[at]}"


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Training (and test) data of all clients, one after another.

    Client i trains on `x[offsets[i]:offsets[i + 1]]` and is tested on the rows that `test_offsets` gives. Images stay
    uint8. `ids` are stable whole numbers (default: the position), which the random streams follow, so that a client
    sees the same batches wherever it stands. `names` and `origin`, where the data comes from, are for people.
    `newcomers` are clients that no training sees. `print` shows a summary.

    >>> fed = Federation.from_clients([(np.ones((3, 2)), np.array([0, 1, 1])), (np.ones((1, 2)), np.array([0]))])
    >>> print(fed)
    2 clients
    training       4 samples, 1 to 3 a client (median 2); 2, float64
    labels         2 classes: 0: 50.0%, 1: 50.0%
    heterogeneity  0.33 (total variation of labels, 0 is IID); 1 to 2 classes a client (median 2)
    """

    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None
    test_offsets: np.ndarray | None = None
    ids: np.ndarray = field(default=None)  # pyright: ignore[reportAssignmentType]  # filled in below
    names: Sequence[str] = ()
    origin: str = ""
    newcomers: "Federation | None" = None

    def __post_init__(self) -> None:
        n = len(self.offsets) - 1
        object.__setattr__(self, "ids", np.arange(n) if self.ids is None else np.asarray(self.ids))
        object.__setattr__(self, "names", self.names if len(self.names) else Numbered(self.ids))
        _check_names(n, self.ids, self.names)
        _check_part("training", self.x, self.y, np.asarray(self.offsets), self.names)
        if self.test_x is not None:
            if self.test_y is None or self.test_offsets is None:
                raise ValueError("Test data needs all of `test_x`, `test_y` and `test_offsets`.")
            if len(self.test_offsets) != n + 1:
                raise ValueError(f"`test_offsets` must have {n + 1} entries, got {len(self.test_offsets)}.")
            _check_part("test", self.test_x, self.test_y, np.asarray(self.test_offsets), self.names)
            looks = [(x.shape[1:], y.shape[1:], x.dtype) for x, y in ((self.x, self.y), (self.test_x, self.test_y))]
            if looks[0] != looks[1]:
                raise ValueError(
                    f"{self.names[0]}: test samples must look like training ones, {looks[0]}, got {looks[1]}."
                )

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[tuple[Any, Any]],
        test: Sequence[tuple[Any, Any]] | None = None,
        *,
        ids: Sequence[int] | None = None,
        names: Sequence[str] = (),
        origin: str = "",
    ) -> "Federation":
        """A federation from one (x, y) pair for each client, and optionally one test pair for each."""
        if not len(clients):
            raise ValueError("A federation needs at least one client, got none.")
        if test is not None and len(test) != len(clients):
            raise ValueError(f"`test` must have one pair for each of the {len(clients)} clients, got {len(test)}.")
        numbers = np.arange(len(clients)) if ids is None else np.asarray(ids)
        names = names if len(names) else Numbered(numbers)
        _check_names(len(clients), numbers, names)
        tests = None if test is None else _flatten(test, names)
        return _federation(_flatten(clients, names), tests, ids=numbers, names=names, origin=origin)

    @classmethod
    def from_columns(
        cls,
        x: np.ndarray,
        y: np.ndarray,
        client: np.ndarray,
        *,
        test: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        origin: str = "",
    ) -> "Federation":
        """A federation from samples in any order and a column that says whose each is: numbers or strings.

        Whole numbers from 0 to 2^32 - 1 become the clients' `ids`; other entries become `names`, numbered in their
        sorted order. `test` has three such columns, of the same clients.
        """
        clients, train = _by_client("training", x, y, client)
        numbered = np.issubdtype(clients.dtype, np.integer) and clients[0] >= 0 and clients[-1] < 2**32
        naming = {"ids": clients} if numbered else {"names": [str(name) for name in clients]}
        if test is None:
            return _federation(train, None, origin=origin, **naming)
        test_clients, tests = _by_client("test", *test)
        if clients.dtype.kind != test_clients.dtype.kind:
            kinds = f"{clients.dtype} and {test_clients.dtype}"
            raise ValueError(f"Client columns of training and test data must be of one type, got {kinds}. Convert one.")
        if not np.array_equal(clients, test_clients):
            odd = np.setxor1d(clients, test_clients)
            raise ValueError(
                f"Training and test data must be of the same clients; {len(odd)} have only one of them, first "
                f"{odd[0].item()!r}. Drop those rows, or hold clients out of training with `hold_out`."
            )
        return _federation(train, tests, origin=origin, **naming)

    @classmethod
    def from_partition(
        cls,
        x: np.ndarray,
        y: np.ndarray,
        partition: Partition,
        test: Partition | None = None,
        *,
        test_x: np.ndarray | None = None,
        test_y: np.ndarray | None = None,
        origin: str = "",
    ) -> "Federation":
        """A federation from a pool of samples and who gets which of them.

        `test` divides the same pool, or the pool of `test_x` and `test_y` where they are given.
        """
        notes = dict.fromkeys([*partition.notes, *(test.notes if test else ())])
        origins = [f"{part.origin}." for part in (partition, test) if part is not None and part.origin]
        told = " ".join(filter(None, [origin, *origins, *notes]))
        if (test_x is None) != (test_y is None) or (test is None and test_x is not None):
            raise ValueError("A pool of test samples needs all of `test`, `test_x` and `test_y`. Give all or none.")
        _check_rows("partition", partition, len(x))
        train = _Part(x, y, partition.offsets).take(partition.rows, partition.offsets)
        if test is None:
            return _federation(train, None, origin=told)
        pool = _Part(x if test_x is None else test_x, y if test_y is None else test_y, test.offsets)
        _check_rows("test", test, len(pool.x))
        if test_x is None:
            _check_disjoint(partition, test)
        return _federation(train, pool.take(test.rows, test.offsets), origin=told)

    def split_tests(self, share: float = 0.2, *, key: Array) -> "Federation":
        """The same clients, with that share of each one's data kept for its tests: section 5 of APFL and of gMeta."""
        if self.test_x is not None:
            raise ValueError("This federation has test data already. Build it without, or use it as it is.")
        whole = Partition(np.arange(len(self.x)), np.asarray(self.offsets))
        train, test = (self._train_part.take(p.rows, p.offsets) for p in whole.split(share, key=key))
        new = self.newcomers
        new = new if new is None or new.test_x is not None else new.split_tests(share, key=key)
        return _federation(train, test, ids=self.ids, names=self.names, origin=self.origin, newcomers=new)

    def select(self, positions: Sequence[int] | np.ndarray) -> "Federation":
        """These clients alone, in this order; without newcomers."""
        at = np.asarray(positions, int)
        if at.ndim != 1 or not len(at) or at.min() < 0 or at.max() >= self.num_clients:
            raise ValueError(f"Positions must lie in 0..{self.num_clients - 1}, at least one, got {positions}.")
        tests = None if self.test_x is None else _take_clients(self._test_part, at)
        names = Numbered(self.ids[at]) if isinstance(self.names, Numbered) else [self.names[i] for i in at]
        train = _take_clients(self._train_part, at)
        return _federation(train, tests, ids=self.ids[at], names=names, origin=self.origin)

    def hold_out(self, clients: int | Sequence[int] | np.ndarray, *, key: Array | None = None) -> "Federation":
        """A federation whose `newcomers` are the given clients, or that many drawn at random, and which lacks them."""
        if self.newcomers is not None:
            raise ValueError("This federation holds clients out already. Hold all of them out at once.")
        if not isinstance(clients, Sequence | np.ndarray):
            require_count("clients", clients)
            if key is None:
                raise ValueError(f"Drawing {clients} clients at random needs a `key`. Or give their positions.")
            if int(clients) >= self.num_clients:
                raise ValueError(f"Of {self.num_clients} clients at least one must be kept, got {clients} to hold out.")
            chosen = host_generator(key, _HELD_OUT).permutation(self.num_clients)[: int(clients)]
        else:
            chosen = np.asarray(clients, int)
        mask = np.isin(np.arange(self.num_clients), chosen)
        if mask.all() or mask.sum() != len(chosen) or not len(chosen):
            raise ValueError(
                f"Hold out at least one client, each once, and keep at least one of the {self.num_clients}, "
                f"got {len(chosen)} positions, {mask.sum()} of them different ones of the federation."
            )
        return replace(self.select(np.flatnonzero(~mask)), newcomers=self.select(np.flatnonzero(mask)))

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.offsets) - 1

    @cached_property
    def counts(self) -> np.ndarray:
        """Training samples of each client."""
        return np.diff(self.offsets)

    def client(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """One client's training data."""
        rows = slice(self.offsets[position], self.offsets[position + 1])
        return self.x[rows], self.y[rows]

    def client_test(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """One client's test data."""
        x, y, offsets = self._test_part
        rows = slice(offsets[position], offsets[position + 1])
        return x[rows], y[rows]

    @cached_property
    def train(self) -> ClientData:
        """The training data on the default device, copied there once."""
        return self._on_device(self._train_part)

    @cached_property
    def test(self) -> ClientData:
        """The test data on the default device, copied there once."""
        return self._on_device(self._test_part)

    @property
    def _train_part(self) -> _Part:
        return _Part(self.x, self.y, np.asarray(self.offsets))

    @property
    def _test_part(self) -> _Part:
        if self.test_x is None or self.test_y is None or self.test_offsets is None:
            raise ValueError(
                "This federation has no test data. Build it with `test=...`, or use `split_tests(key=...)`."
            )
        return _Part(self.test_x, self.test_y, np.asarray(self.test_offsets))

    def _on_device(self, part: _Part) -> ClientData:
        _check_fits(part, self.names)
        start, count = np.asarray(part.offsets[:-1], np.int32), np.asarray(np.diff(part.offsets), np.int32)
        with jax.ensure_compile_time_eval():  # what is kept must be arrays, even when first read inside a trace
            return ClientData(*map(jnp.asarray, (part.x, part.y, start, count, np.asarray(self.ids, np.uint32))))

    def __repr__(self) -> str:
        return f"<Federation: {self.num_clients:,} clients, {len(self.x):,} training samples>"

    def __str__(self) -> str:
        """A summary for people."""
        lines = [("training", describe_samples(self.x, self.offsets))]
        if self.test_x is not None and self.test_offsets is not None:
            lines.append(("test", describe_samples(self.test_x, self.test_offsets)))
        lines += describe_labels(self.y, self.offsets)
        if self.newcomers is not None:
            held = self.newcomers
            lines.append(("held out", f"{held.num_clients:,} clients, {describe_samples(held.x, held.offsets)}"))
        if self.origin:
            lines.append(("origin", self.origin))
        return "\n".join([f"{self.num_clients:,} clients", *(f"{title:15}{text}" for title, text in lines)])


def _federation(train: _Part, test: _Part | None, **about: Any) -> Federation:
    return Federation(*train, *(test or (None, None, None)), **about)


def _check_rows(name: str, partition: Partition, num_samples: int) -> None:
    if len(partition.rows) and partition.rows.max() >= num_samples:
        raise ValueError(
            f"`{name}` must divide the {num_samples} samples of its pool, got row {partition.rows.max()}. "
            "A partition of a test pool needs `test_x` and `test_y`."
        )


def _check_disjoint(train: Partition, test: Partition) -> None:
    """No client may be tested on a row that it trains on."""
    if train.num_clients != test.num_clients:
        return  # the federation says so
    owned = lambda part: np.repeat(np.arange(part.num_clients), part.counts) << 40 | part.rows
    both = np.intersect1d(owned(train), owned(test))
    if len(both):
        raise ValueError(
            f"Training and test rows of a client must be disjoint, got {len(both)} in both, first row "
            f"{both[0] & (2**40 - 1)} of client {both[0] >> 40}. Use `partition.split(...)`."
        )


def _check_fits(part: _Part, names: Sequence[str]) -> None:
    """Refuse numbers that do not survive the device's narrower types."""
    for letter, array in (("x", part.x), ("y", part.y)):
        kind = jax.dtypes.canonicalize_dtype(array.dtype)
        if kind == array.dtype or not array.size or array.dtype.kind not in "iuf":
            continue
        most = (np.iinfo if kind.kind in "iu" else np.finfo)(kind).max
        if array.max() > most or array.min() < -most:
            row = int(np.argmax(np.abs(array.reshape(len(array), -1)).max(axis=1)))
            owner = int(np.searchsorted(part.offsets, row, side="right")) - 1
            raise ValueError(
                f"{names[owner]}: {letter} must fit into {kind}, got numbers up to {array.max()}. "
                "Scale them, or enable 64 bits with `jax.config.update('jax_enable_x64', True)`."
            )


def _by_client(part: str, x: np.ndarray, y: np.ndarray, client: np.ndarray) -> tuple[np.ndarray, _Part]:
    """The clients of a column in sorted order, and their samples, one client after another."""
    x, y, client = (np.asarray(column) for column in (x, y, client))
    if client.ndim != 1 or not len(client) or len(x) != len(client) or len(y) != len(client):
        raise ValueError(
            f"The {part} columns must have one entry for each sample, got {len(x)} of x, {len(y)} of y and a client "
            f"column of shape {client.shape}."
        )
    parts = natural(client)
    rows, offsets = parts.rows.astype(np.int32 if len(client) < 2**31 else np.int64), parts.offsets
    del parts  # half of the memory of the rows
    clients = client[rows[offsets[:-1]]]
    if np.all(rows[1:] > rows[:-1]):
        return clients, _Part(x, y, offsets)
    return clients, _Part(_take_lean(x, rows), _take_lean(y, rows), offsets)


def _take_lean(array: np.ndarray, rows: np.ndarray, slice_rows: int = 1 << 16) -> np.ndarray:
    """`array[rows]`; in slices, because NumPy makes a wide copy of narrow rows."""
    taken = np.empty_like(array)
    for begin in range(0, len(rows), slice_rows):
        taken[begin : begin + slice_rows] = array[rows[begin : begin + slice_rows]]
    return taken


def _take_clients(part: _Part, at: np.ndarray) -> _Part:
    """The samples of these clients, one client after another."""
    counts = np.diff(part.offsets)[at]
    ends = np.cumsum(counts)
    rows = np.repeat(part.offsets[at] - ends + counts, counts) + np.arange(counts.sum())
    return part.take(rows, np.r_[0, ends])


def _flatten(clients: Sequence[tuple[Any, Any]], names: Sequence[str]) -> _Part:
    xs, ys = [np.asarray(x) for x, _ in clients], [np.asarray(y) for _, y in clients]
    for name, x, y in zip(names, xs, ys, strict=True):
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
            raise ValueError(f"{name}: x and y must have one row for each sample, got shapes {x.shape} and {y.shape}.")
        if x.shape[1:] != xs[0].shape[1:] or y.shape[1:] != ys[0].shape[1:] or x.dtype != xs[0].dtype:
            raise ValueError(
                f"{name}: samples must look like those of {names[0]}, x {xs[0].shape[1:]} {xs[0].dtype} and "
                f"y {ys[0].shape[1:]}, got x {x.shape[1:]} {x.dtype} and y {y.shape[1:]}."
            )
    return _Part(np.concatenate(xs), np.concatenate(ys), np.r_[0, np.cumsum([len(x) for x in xs])])


def _check_names(num: int, ids: np.ndarray, names: Sequence[str]) -> None:
    num_ids = len(np.unique(ids))
    if len(ids) != num or num_ids != num or len(names) != num:
        raise ValueError(
            f"`ids` and `names` must name each of the {num} clients once, "
            f"got {num_ids} different ids and {len(names)} names."
        )
    if not np.issubdtype(ids.dtype, np.integer) or ids.min(initial=0) < 0 or ids.max(initial=0) >= 2**32:
        raise ValueError(f"`ids` must be whole numbers from 0 to 2^32 - 1, got {ids.tolist()[:5]}.")


def _check_part(part: str, x: np.ndarray, y: np.ndarray, offsets: np.ndarray, names: Sequence[str]) -> None:
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(x) or len(x) != len(y) or np.any(counts < 0):
        raise ValueError(
            f"The {part} offsets must rise from 0 to the number of rows, got {offsets[0]} to {offsets[-1]} "
            f"for {len(x)} rows of x and {len(y)} of y."
        )
    if not len(counts):
        raise ValueError("A federation needs at least one client, got none.")
    if np.any(counts == 0):
        empty = int(np.argmin(counts))
        raise ValueError(f"{names[empty]} has no {part} samples. Leave it out of the federation, or give it some.")
    for letter, array in (("x", x), ("y", y)):
        if array.dtype.kind not in "biuf":
            raise ValueError(
                f"{names[0]}: the {part} data must be numbers, got {letter} of type {array.dtype}. Encode it."
            )
        row = _first_not_finite(array)
        if row is not None:
            owner = int(np.searchsorted(offsets, row, side="right")) - 1
            raise ValueError(
                f"{names[owner]}: the {part} data must be finite, got {letter} with a NaN or infinite entry in its row "
                f"{row - offsets[owner]}. Remove or repair that sample."
            )


def _first_not_finite(array: np.ndarray, slice_rows: int = 1 << 16) -> int | None:
    """The first row with an entry that is not finite; looked for in slices, which costs no memory."""
    if not np.issubdtype(array.dtype, np.floating):
        return None
    for begin in range(0, len(array), slice_rows):
        part = array[begin : begin + slice_rows]
        if not np.isfinite(part).all():
            return begin + int(np.argmin(np.isfinite(part.reshape(len(part), -1)).all(axis=1)))
    return None
