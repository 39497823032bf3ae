"""Federations: flat, unpadded arrays of all clients' data with offsets."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from personax.data.arrays import (
    ArrayPart,
    ClientData,
    by_client,
    check_fits,
    check_part,
    flatten,
    gather_clients,
    take_clients,
)
from personax.data.describe import describe_features, describe_labels, describe_samples
from personax.data.partition import Partition
from personax.data.scaling import Scaling, add_up, moments, scaled_type
from personax.data.schema import Notify, Samples, Schema, settle
from personax.keys import HostStream, host_generator
from personax.typing import Array
from personax.values import require_count
from personax.values.notebook import html_table

_ARRAYS = ("x", "y", "offsets", "test_x", "test_y", "test_offsets", "ids")
_ABOUT = "about.json"


class Numbered(Sequence[str]):
    """Names that are generated from numbers on access, so that a million of them take no memory."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: Any) -> Any:
        return Numbered(self.ids[at]) if isinstance(at, slice) else f"client {self.ids[at]}"


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """The training (and test) data of all clients, concatenated.

    Client i trains on `x[offsets[i]:offsets[i + 1]]` and is tested on the rows given by `test_offsets`. Images stay
    uint8. `ids` are stable integers (default: the position) that seed the random streams, so that a client sees the
    same batches at any position. `names` and `origin`, the source of the data, are shown to people. `newcomers` are
    clients that are held out of training. `schema` describes a sample: columns, classes and scaling; by default it
    has the shapes and types of the arrays, with classes from 0 to the largest label. If `x` is memory-mapped
    (`np.memmap`, `Federation.open`), it stays on disk, and runs read what their cohorts need. `print` shows a summary.

    >>> fed = Federation.from_clients([(np.ones((3, 2)), np.array([0, 1, 1])), (np.ones((1, 2)), np.array([0]))])
    >>> print(fed)
    2 clients
    training       4 samples, 1 to 3 per client (median 2); 2, float64
    labels         2 classes: 0: 50.0%, 1: 50.0%
    heterogeneity  0.33 (total variation of labels, 0 is IID); 1 to 2 classes per client (median 2)
    """

    is_divided: ClassVar[bool] = True  # among clients
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
    schema: Schema = field(default=None)  # pyright: ignore[reportAssignmentType]  # filled in below

    def __post_init__(self) -> None:
        n = len(self.offsets) - 1
        object.__setattr__(self, "ids", np.arange(n) if self.ids is None else np.asarray(self.ids))
        object.__setattr__(self, "names", self.names if len(self.names) else Numbered(self.ids))
        _check_names(n, self.ids, self.names)
        check_part("training", self.x, self.y, np.asarray(self.offsets), self.names)
        if self.test_x is not None:
            if self.test_y is None or self.test_offsets is None:
                raise ValueError("Test data needs all of `test_x`, `test_y` and `test_offsets`.")
            if len(self.test_offsets) != n + 1:
                raise ValueError(f"`test_offsets` must have {n + 1} entries, got {len(self.test_offsets)}.")
            check_part("test", self.test_x, self.test_y, np.asarray(self.test_offsets), self.names)
            looks = [(x.shape[1:], y.shape[1:], x.dtype) for x, y in ((self.x, self.y), (self.test_x, self.test_y))]
            if looks[0] != looks[1]:
                raise ValueError(
                    f"{self.names[0]}: test samples must look like training samples, {looks[0]}, got {looks[1]}."
                )
        found = Schema.of(self.x, [self.y] if self.test_y is None else [self.y, self.test_y])
        newcomers = None if self.newcomers is None else self.newcomers.schema
        object.__setattr__(self, "schema", settle(found, self.schema, newcomers))

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[tuple[Any, Any]],
        test: Sequence[tuple[Any, Any]] | None = None,
        *,
        ids: Sequence[int] | None = None,
        names: Sequence[str] = (),
        origin: str = "",
        schema: Schema | None = None,
    ) -> "Federation":
        """Build a federation from one (x, y) pair per client, and optionally one test pair per client."""
        if not len(clients):
            raise ValueError("A federation needs at least one client, got none.")
        if test is not None and len(test) != len(clients):
            raise ValueError(f"`test` must have one pair for each of the {len(clients)} clients, got {len(test)}.")
        numbers = np.arange(len(clients)) if ids is None else np.asarray(ids)
        names = names if len(names) else Numbered(numbers)
        _check_names(len(clients), numbers, names)
        tests = None if test is None else flatten(test, names)
        return _federation(flatten(clients, names), tests, ids=numbers, names=names, origin=origin, schema=schema)

    @classmethod
    def from_columns(
        cls,
        x: np.ndarray,
        y: np.ndarray,
        client: np.ndarray,
        *,
        test: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        origin: str = "",
        schema: Schema | None = None,
    ) -> "Federation":
        """Build a federation from samples in any order and a column of client ids, which are numbers or strings.

        Integers from 0 to 2^32 - 1 become the clients' `ids`; other entries become `names`, numbered in sorted order.
        `test` has three such columns for the same clients.
        """
        clients, train = by_client("training", x, y, client)
        numbered = np.issubdtype(clients.dtype, np.integer) and clients[0] >= 0 and clients[-1] < 2**32
        naming = {"ids": clients} if numbered else {"names": [str(name) for name in clients]}
        if test is None:
            return _federation(train, None, origin=origin, schema=schema, **naming)
        test_clients, tests = by_client("test", *test)
        if clients.dtype.kind != test_clients.dtype.kind:
            kinds = f"{clients.dtype} and {test_clients.dtype}"
            raise ValueError(
                f"Client columns of training and test data must have the same type, got {kinds}. Convert one."
            )
        if not np.array_equal(clients, test_clients):
            odd = np.setxor1d(clients, test_clients)
            raise ValueError(
                f"Training and test data must have the same clients; {len(odd)} have only one of them, the first is "
                f"{odd[0].item()!r}. Drop those rows, or hold clients out of training with `hold_out`."
            )
        return _federation(train, tests, origin=origin, schema=schema, **naming)

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
        schema: Schema | None = None,
    ) -> "Federation":
        """Build a federation from a pool of samples and a partition of it.

        `test` divides the same pool, or the pool of `test_x` and `test_y` if they are given.
        """
        notes = dict.fromkeys([*partition.notes, *(test.notes if test else ())])
        origins = [f"{part.origin}." for part in (partition, test) if part is not None and part.origin]
        text = " ".join(filter(None, [origin, *origins, *notes]))
        if (test_x is None) != (test_y is None) or (test is None and test_x is not None):
            raise ValueError("A pool of test samples needs all of `test`, `test_x` and `test_y`. Give all or none.")
        _check_rows("partition", partition, len(x))
        train = ArrayPart(x, y, partition.offsets).take(partition.rows, partition.offsets)
        if test is None:
            return _federation(train, None, origin=text, schema=schema)
        pool = ArrayPart(x if test_x is None else test_x, y if test_y is None else test_y, test.offsets)
        _check_rows("test", test, len(pool.x))
        if test_x is None:
            _check_disjoint(partition, test)
        return _federation(train, pool.take(test.rows, test.offsets), origin=text, schema=schema)

    @classmethod
    def open(cls, folder: Path | str) -> "Federation":
        """Open a federation written by `save`, with memory-mapped data."""
        place = Path(folder)
        if not (place / _ABOUT).exists():
            raise ValueError(f"File not found: {place / _ABOUT}. Give a folder written by `Federation.save`.")
        about = json.loads((place / _ABOUT).read_text(encoding="utf-8"))
        small = ("offsets", "test_offsets", "ids")
        read = lambda name: np.load(place / f"{name}.npy", mmap_mode=None if name in small else "r")
        arrays = {name: read(name) for name in _ARRAYS if (place / f"{name}.npy").exists()}
        newcomers = cls.open(place / "newcomers") if (place / "newcomers").exists() else None
        schema = (
            Schema.from_dict(about["schema"]) if "schema" in about else None
        )  # missing if written by an older version
        return cls(**arrays, names=about["names"], origin=about["origin"], newcomers=newcomers, schema=schema)  # pyright: ignore[reportArgumentType]

    def save(self, folder: Path | str) -> None:
        """Write the data to a new folder, one `.npy` file per array; `Federation.open` memory-maps them."""
        place = Path(folder)
        if place.exists() and any(place.iterdir()):
            raise ValueError(f"Folder not empty: {place}. Choose another folder.")
        place.mkdir(parents=True, exist_ok=True)
        for name in _ARRAYS:
            if getattr(self, name) is not None:
                np.save(place / f"{name}.npy", getattr(self, name))
        if self.newcomers is not None:
            self.newcomers.save(place / "newcomers")
        names = [] if isinstance(self.names, Numbered) else list(self.names)
        about = {"names": names, "origin": self.origin, "schema": self.schema.to_dict()}
        (place / _ABOUT).write_text(json.dumps(about), encoding="utf-8")  # written last, to mark the folder as complete

    def split_tests(self, share: float = 0.2, *, key: Array) -> "Federation":
        """Hold out a share of each client's data for tests, as in section 5 of APFL and of gMeta."""
        if self.test_x is not None:
            raise ValueError("This federation already has test data. Build it without test data, or use it unchanged.")
        _require_unscaled(self.schema, "split_tests")
        whole = Partition(np.arange(len(self.x)), np.asarray(self.offsets))
        train, test = (self._train_part.take(p.rows, p.offsets) for p in whole.split(share, key=key))
        new = self.newcomers
        new = new if new is None or new.test_x is not None else new.split_tests(share, key=key)
        about = {"ids": self.ids, "names": self.names, "origin": self.origin, "schema": self.schema}
        return _federation(train, test, newcomers=new, **about)

    def select(self, positions: Sequence[int] | np.ndarray) -> "Federation":
        """Select clients, in this order and without newcomers."""
        at = np.asarray(positions, int)
        if at.ndim != 1 or not len(at) or at.min() < 0 or at.max() >= self.num_clients:
            raise ValueError(
                f"Positions must be between 0 and {self.num_clients - 1}, and at least one, got {positions}."
            )
        tests = None if self.test_x is None else take_clients(self._test_part, at)
        names = Numbered(self.ids[at]) if isinstance(self.names, Numbered) else [self.names[i] for i in at]
        train = take_clients(self._train_part, at)
        return _federation(train, tests, ids=self.ids[at], names=names, origin=self.origin, schema=self.schema)

    def hold_out(self, clients: int | Sequence[int] | np.ndarray, *, key: Array | None = None) -> "Federation":
        """Move the given clients, or that many random ones, from training to `newcomers`."""
        if self.newcomers is not None:
            raise ValueError("This federation already has held-out clients. Hold out all clients in one call.")
        _require_unscaled(self.schema, "hold_out")
        if not isinstance(clients, Sequence | np.ndarray):
            require_count("clients", clients)
            if key is None:
                raise ValueError(
                    f"Drawing {clients} clients at random needs a `key`. Alternatively, give their positions."
                )
            if int(clients) >= self.num_clients:
                raise ValueError(
                    f"At least one of the {self.num_clients} clients must remain, got {clients} to hold out."
                )
            chosen = host_generator(key, HostStream.HELD_OUT).permutation(self.num_clients)[: int(clients)]
        else:
            chosen = np.asarray(clients, int)
        mask = np.isin(np.arange(self.num_clients), chosen)
        if mask.all() or mask.sum() != len(chosen) or not len(chosen):
            raise ValueError(
                f"Hold out at least one client, each once, and keep at least one of the {self.num_clients}, "
                f"got {len(chosen)} positions with {mask.sum()} different clients."
            )
        return replace(self.select(np.flatnonzero(~mask)), newcomers=self.select(np.flatnonzero(mask)))

    def conform(self, schema: Schema, notify: Notify = lambda text: None) -> "Federation":
        """Convert the samples to `schema`: match columns and classes by name, then convert types and scale.

        An unknown class or a missing column raises a ValueError; `notify` is called with a message about ignored
        columns.
        """
        where, notes = self.origin.removesuffix(".") or "The data", dict[str, None]()
        change = lambda x, y: schema.conform(Samples(x, y, where), self.schema, notes.setdefault)
        found = self._mapped_by(schema, change)
        for note in notes:
            notify(note)
        return found

    def as_targets(self) -> "Federation":
        """Convert numeric labels to the targets of a regression."""
        return self.conform(replace(self.schema, classes=()))

    def standardize(self) -> "Federation":
        """Standardize the features, and the targets of a regression, to mean 0 and standard deviation 1.

        Means and deviations are fitted on the data of the training clients, from each client's `moments`, and stored in
        the `schema`; test data and newcomers are scaled with the same numbers. Constant columns are only centered.
        Hold out clients and split off tests first.
        """
        if self.is_mapped:
            raise ValueError("Memory-mapped data cannot be standardized. Standardize it before `save(...)`.")
        if self.x.dtype == np.uint8:
            raise ValueError(
                "Images in bytes cannot be standardized: models read them as numbers from 0 to 1. Omit `standardize`."
            )
        _require_unscaled(self.schema, "standardize")
        fit = lambda array: Scaling.from_moments(
            add_up(moments(array[begin:end]) for begin, end in pairwise(np.asarray(self.offsets).tolist()))
        )
        targets = None if self.schema.classes else fit(self.y)
        dtype = str(scaled_type(self.x.dtype))
        return self.conform(replace(self.schema, dtype=dtype, feature_scaling=fit(self.x), target_scaling=targets))

    def _mapped_by(self, schema: Schema, change: Callable[[Any, Any], tuple[Any, Any]]) -> "Federation":
        """Return the federation with this schema, whose inputs and labels are converted by `change`."""
        (x, y), tests = change(self.x, self.y), (None, None)
        if self.test_x is not None:
            tests = change(self.test_x, self.test_y)
        new = None if self.newcomers is None else self.newcomers._mapped_by(schema, change)
        return replace(self, x=x, y=y, test_x=tests[0], test_y=tests[1], newcomers=new, schema=schema)

    @property
    def num_clients(self) -> int:
        """Return the number of clients."""
        return len(self.offsets) - 1

    @property
    def is_mapped(self) -> bool:
        """Return True if the training data is in a memory-mapped file, which is read on demand."""
        return isinstance(self.x, np.memmap)

    @cached_property
    def counts(self) -> np.ndarray:
        """Return the number of training samples of each client."""
        return np.diff(self.offsets)

    @property
    def test_counts(self) -> np.ndarray:
        """Return the number of test samples of each client."""
        return np.diff(self._test_part.offsets)

    def client(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return one client's training data."""
        rows = slice(self.offsets[position], self.offsets[position + 1])
        return self.x[rows], self.y[rows]

    def client_test(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Return one client's test data."""
        x, y, offsets = self._test_part
        rows = slice(offsets[position], offsets[position + 1])
        return x[rows], y[rows]

    @cached_property
    def train(self) -> ClientData:
        """Return the training data on the default device, copied there once."""
        return self._on_device(self._train_part)

    @cached_property
    def test(self) -> ClientData:
        """Return the test data on the default device, copied there once."""
        return self._on_device(self._test_part)

    @property
    def first_sample(self) -> tuple[Array, Array]:
        """Return one training sample on the device, from which models and losses infer their shapes."""
        return jax.device_put((self.x[:1], self.y[:1]))

    def train_of(self, clients: np.ndarray, num_rows: int, num_clients: int) -> ClientData:
        """Return the training data of these clients on the host, padded to these numbers of rows and clients."""
        return gather_clients(self._train_part, self.ids, clients, num_rows, num_clients)

    def test_of(self, clients: np.ndarray, num_rows: int, num_clients: int) -> ClientData:
        """Return the test data of these clients on the host, padded to these numbers of rows and clients."""
        return gather_clients(self._test_part, self.ids, clients, num_rows, num_clients)

    @property
    def _train_part(self) -> ArrayPart:
        return ArrayPart(self.x, self.y, np.asarray(self.offsets))

    @property
    def _test_part(self) -> ArrayPart:
        if self.test_x is None or self.test_y is None or self.test_offsets is None:
            raise ValueError(
                "This federation has no test data. Build it with `test=...`, or use `split_tests(key=...)`."
            )
        return ArrayPart(self.test_x, self.test_y, np.asarray(self.test_offsets))

    def _on_device(self, part: ArrayPart) -> ClientData:
        check_fits(part, self.names)
        start, count = np.asarray(part.offsets[:-1], np.int32), np.asarray(np.diff(part.offsets), np.int32)
        with jax.ensure_compile_time_eval():  # cache concrete arrays, even if first used inside a trace
            return ClientData(*jax.device_put((part.x, part.y, start, count, np.asarray(self.ids, np.uint32))))

    def __repr__(self) -> str:
        return f"<Federation: {self.num_clients:,} clients, {len(self.x):,} training samples>"

    def __str__(self) -> str:
        """Return a summary."""
        return "\n".join([f"{self.num_clients:,} clients", *(f"{title:15}{text}" for title, text in self._facts())])

    def _repr_html_(self) -> str:
        return html_table(f"Federation: {self.num_clients:,} clients", self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        """Return the titled lines of a summary."""
        lines = [("training", describe_samples(self.x, self.offsets))]
        if self.test_x is not None and self.test_offsets is not None:
            lines.append(("test", describe_samples(self.test_x, self.test_offsets)))
        lines += describe_features(self.schema)
        lines += describe_labels(self.y, self.offsets, self.schema.classes)
        if self.newcomers is not None:
            held = self.newcomers
            lines.append(("held out", f"{held.num_clients:,} clients, {describe_samples(held.x, held.offsets)}"))
        if self.origin:
            lines.append(("origin", self.origin))
        return lines


def _federation(train: ArrayPart, test: ArrayPart | None, **about: Any) -> Federation:
    return Federation(*train, *(test or (None, None, None)), **about)


def _require_unscaled(schema: Schema, method: str) -> None:
    """Raise an error if a scaling would no longer match the training data."""
    if schema.feature_scaling is not None:
        raise ValueError(f"The samples are already standardized. Call `{method}` before `standardize`.")


def _check_rows(name: str, partition: Partition, num_samples: int) -> None:
    if len(partition.rows) and partition.rows.max() >= num_samples:
        raise ValueError(
            f"`{name}` must divide the {num_samples} samples of its pool, got row {partition.rows.max()}. "
            "A partition of a test pool needs `test_x` and `test_y`."
        )


def _check_disjoint(train: Partition, test: Partition) -> None:
    """Raise an error if a client is tested on a row that it trains on."""
    if train.num_clients != test.num_clients:
        return  # the federation reports this
    owned = lambda part: np.repeat(np.arange(part.num_clients), part.counts) << 40 | part.rows
    both = np.intersect1d(owned(train), owned(test))
    if len(both):
        raise ValueError(
            f"Training and test rows of a client must be disjoint, got {len(both)} in both, first row "
            f"{both[0] & (2**40 - 1)} of client {both[0] >> 40}. Use `partition.split(...)`."
        )


def _check_names(num: int, ids: np.ndarray, names: Sequence[str]) -> None:
    num_ids = len(np.unique(ids))
    if len(ids) != num or num_ids != num or len(names) != num:
        raise ValueError(
            f"`ids` and `names` must be unique for each of the {num} clients, "
            f"got {num_ids} different ids and {len(names)} names."
        )
    if not np.issubdtype(ids.dtype, np.integer) or ids.min(initial=0) < 0 or ids.max(initial=0) >= 2**32:
        raise ValueError(f"`ids` must be integers from 0 to 2^32 - 1, got {ids.tolist()[:5]}.")
