"""Client data: flat arrays and offsets, nothing padded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from personax.typing import Array


class ClientData(NamedTuple):
    """A federation's training data on the device. Client i holds rows `start[i] : start[i] + num_samples[i]`."""

    x: Array
    y: Array
    start: Array
    num_samples: Array
    ids: Array  # stable numbers: random streams follow them, whatever the order of the clients


@dataclass(frozen=True, eq=False)
class Federation:
    """Training (and test) data of all clients, one after another.

    Client i trains on `x[offsets[i]:offsets[i + 1]]` and is tested on the rows that `test_offsets` gives. Images stay
    uint8. `ids` are stable whole numbers (default: the position), which the random streams follow, so that a client
    sees the same batches wherever it stands. `names` are for people.

    >>> fed = Federation.from_clients([(np.ones((3, 2)), np.array([0, 1, 1])), (np.ones((1, 2)), np.array([0]))])
    >>> fed.num_clients, fed.counts.tolist()
    (2, [3, 1])
    """

    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray
    test_x: np.ndarray | None = None
    test_y: np.ndarray | None = None
    test_offsets: np.ndarray | None = None
    ids: np.ndarray = field(default=None)  # pyright: ignore[reportAssignmentType]  # filled in below
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.offsets) - 1
        object.__setattr__(self, "ids", np.arange(n) if self.ids is None else np.asarray(self.ids))
        object.__setattr__(self, "names", tuple(self.names) or tuple(f"client {i}" for i in self.ids))
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
    ) -> "Federation":
        """A federation from one (x, y) pair for each client, and optionally one test pair for each."""
        if not len(clients):
            raise ValueError("A federation needs at least one client, got none.")
        if test is not None and len(test) != len(clients):
            raise ValueError(f"`test` must have one pair for each of the {len(clients)} clients, got {len(test)}.")
        numbers = np.arange(len(clients)) if ids is None else np.asarray(ids)
        names = tuple(names) or tuple(f"client {i}" for i in numbers)
        _check_names(len(clients), numbers, names)
        train = _flatten(clients, names)
        held_out = (None, None, None) if test is None else _flatten(test, names)
        return cls(*train, *held_out, ids=numbers, names=names)  # pyright: ignore[reportArgumentType]

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
        if self.test_x is None or self.test_y is None or self.test_offsets is None:
            raise ValueError("This federation has no test data. Build it with `test=...`.")
        rows = slice(self.test_offsets[position], self.test_offsets[position + 1])
        return self.test_x[rows], self.test_y[rows]

    @cached_property
    def train(self) -> ClientData:
        """The training data on the default device, copied there once."""
        return self._on_device(self.x, self.y, self.offsets)

    @cached_property
    def test(self) -> ClientData:
        """The test data on the default device, copied there once."""
        if self.test_x is None or self.test_y is None or self.test_offsets is None:
            raise ValueError("This federation has no test data. Build it with `test=...`.")
        return self._on_device(self.test_x, self.test_y, self.test_offsets)

    def _on_device(self, x: np.ndarray, y: np.ndarray, offsets: np.ndarray) -> ClientData:
        start, count = np.asarray(offsets[:-1], np.int32), np.asarray(np.diff(offsets), np.int32)
        with jax.ensure_compile_time_eval():  # what is kept must be arrays, even when first read inside a trace
            return ClientData(*map(jnp.asarray, (x, y, start, count, np.asarray(self.ids, np.uint32))))


def _flatten(clients: Sequence[tuple[Any, Any]], names: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    xs, ys = [np.asarray(x) for x, _ in clients], [np.asarray(y) for _, y in clients]
    for name, x, y in zip(names, xs, ys, strict=True):
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
            raise ValueError(f"{name}: x and y must have one row for each sample, got shapes {x.shape} and {y.shape}.")
        if x.shape[1:] != xs[0].shape[1:] or y.shape[1:] != ys[0].shape[1:] or x.dtype != xs[0].dtype:
            raise ValueError(
                f"{name}: samples must look like those of {names[0]}, x {xs[0].shape[1:]} {xs[0].dtype} and "
                f"y {ys[0].shape[1:]}, got x {x.shape[1:]} {x.dtype} and y {y.shape[1:]}."
            )
    return np.concatenate(xs), np.concatenate(ys), np.concatenate([[0], np.cumsum([len(x) for x in xs])])


def _check_names(num: int, ids: np.ndarray, names: Sequence[str]) -> None:
    if len(ids) != num or len(set(ids.tolist())) != num or len(names) != num:
        raise ValueError(
            f"`ids` and `names` must name each of the {num} clients once, "
            f"got {len(set(ids.tolist()))} different ids and {len(names)} names."
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
        if np.issubdtype(array.dtype, np.floating) and not np.all(np.isfinite(array)):
            row = int(np.argmin(np.isfinite(array.reshape(len(array), -1)).all(axis=1)))
            owner = int(np.searchsorted(offsets, row, side="right")) - 1
            raise ValueError(
                f"{names[owner]}: the {part} data must be finite, got {letter} with a NaN or infinite entry in its row "
                f"{row - offsets[owner]}. Remove or repair that sample."
            )
