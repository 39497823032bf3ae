"""Personal states on the host: each client has its own from its first visit on, and what exceeds memory goes to disk.

States are immutable records in a dictionary. A new state replaces the client's record; a view is a copy of the
dictionary, so it stays as it is while the run goes on, and what nobody looks at any more is freed.
"""

import tempfile
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from personax.typing import Personal


class _StateLayout:
    """How a state becomes one row of bytes, all its leaves in a row."""

    def __init__(self, default: Personal, num_axes: int) -> None:
        leaves, self.structure = jax.tree.flatten(default)
        self.shapes = [leaf.shape[num_axes:] for leaf in leaves]
        self.dtypes = [np.dtype(leaf.dtype) for leaf in leaves]
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        bounds = np.cumsum([0, *sizes]).tolist()
        self.num_bytes, self.parts = bounds[-1], [slice(a, b) for a, b in pairwise(bounds)]

    def bytes_of(self, states: Personal) -> list[np.ndarray]:
        """The bytes [states, bytes] of each leaf."""
        sizes = [part.stop - part.start for part in self.parts]
        leaves = zip(jax.tree.leaves(states), sizes, strict=True)
        return [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).reshape(-1, size) for leaf, size in leaves]

    def empty(self, num: int) -> list[np.ndarray]:
        """Room for the bytes of so many states."""
        return [np.empty((num, part.stop - part.start), np.uint8) for part in self.parts]

    def states_of(self, leaves: list[np.ndarray], axes: tuple[int, ...]) -> Personal:
        """The states of these bytes, along these leading axes."""
        shaped = zip(leaves, self.dtypes, self.shapes, strict=True)
        return jax.tree.unflatten(
            self.structure, [leaf.view(kind).reshape(*axes, *shape) for leaf, kind, shape in shaped]
        )


class _StateFile:
    """Rows of bytes in a file without a name; those that nobody refers to any more are written over."""

    def __init__(self, num_bytes: int, folder: str | None) -> None:
        self.num_bytes, self.num_rows, self.free = num_bytes, 0, []
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # open as long as a row is needed

    def __del__(self) -> None:
        self.file.close()

    def put(self, row: np.ndarray) -> "_OnDisk":
        if not self.free:
            self.free.append(self.num_rows)
            self.num_rows += 1
        place = _OnDisk(self, self.free.pop())
        self.file.seek(place.at * self.num_bytes)
        if self.file.write(row.data) != self.num_bytes:
            raise OSError(f"A personal state of {self.num_bytes} bytes could not be written: the disk is full.")
        return place


class _OnDisk:
    """A row of a file; when nothing refers to it any more, its place is free."""

    def __init__(self, file: _StateFile, at: int) -> None:
        self.file, self.at = file, at

    def __del__(self) -> None:
        self.file.free.append(self.at)

    def read(self) -> np.ndarray:
        row = np.empty(self.file.num_bytes, np.uint8)
        self.file.file.seek(self.at * self.file.num_bytes)
        if self.file.file.readinto(row.data) != len(row):
            raise OSError(f"A personal state of {len(row)} bytes could not be read back from the disk.")
        return row


@jax.tree_util.register_pytree_with_keys_class
class Kept:
    """The personal states of all clients at one moment: of those visited so far, and the one that all others have.

    As a pytree it is the default, the numbers of those visited (seed times number of clients, plus position) in order,
    and their states: what a checkpoint holds, and what it is rebuilt from.
    """

    def __init__(self, num_clients: int, has_seeds: bool, default: Personal, visited: Any) -> None:
        self.num_clients, self.has_seeds, self.default = num_clients, has_seeds, default
        self._visited = visited  # records by number, or (numbers, states) as a checkpoint has them

    @cached_property
    def layout(self) -> _StateLayout:
        """How one state becomes bytes."""
        return _StateLayout(self.default, int(self.has_seeds))

    @cached_property
    def records(self) -> dict[int, Any]:
        """The states of those visited, by number."""
        if isinstance(self._visited, dict):
            return self._visited
        keys, states = self._visited
        leaves = self.layout.bytes_of(states)
        return {int(key): np.concatenate([leaf[i] for leaf in leaves]) for i, key in enumerate(keys)}

    def read(self, positions: np.ndarray) -> Personal:
        """The states of the clients at these positions, [positions] or [seeds, positions]."""
        if not self.layout.num_bytes:
            return self.default
        return self.layout.states_of(self._read(self.keys(positions).ravel().tolist()), positions.shape)

    def _read(self, keys: Sequence[int]) -> list[np.ndarray]:
        leaves, default = self.layout.empty(len(keys)), self.layout.bytes_of(self.default)
        for i, key in enumerate(keys):
            record = self.records.get(key)
            if record is None:
                for leaf, first in zip(leaves, default, strict=True):
                    leaf[i] = first[key // self.num_clients]
                continue
            row = record.read() if isinstance(record, _OnDisk) else record
            for leaf, part in zip(leaves, self.layout.parts, strict=True):
                leaf[i] = row[part]
        return leaves

    def keys(self, positions: np.ndarray) -> np.ndarray:
        """The numbers of these clients' records; those of a seed come after those of the seed before."""
        seeds = np.arange(len(positions))[:, None] if self.has_seeds else 0
        return self.num_clients * seeds + positions

    def of_seeds(self, begin: int, end: int) -> "Kept":
        """The states of some of several seeds."""
        first, last = begin * self.num_clients, end * self.num_clients
        records = {key - first: record for key, record in self.records.items() if first <= key < last}
        return Kept(self.num_clients, True, jax.tree.map(lambda leaf: leaf[begin:end], self.default), records)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Its parts, and what is the same in all of its kind."""
        names = [jax.tree_util.GetAttrKey(name) for name in ("default", "clients", "states")]
        return list(zip(names, (self.default, *self._parts()), strict=True)), (self.num_clients, self.has_seeds)

    def _parts(self) -> Any:
        if not isinstance(self._visited, dict):
            return self._visited
        keys = np.sort(np.fromiter(self.records, np.int64, len(self.records)))
        return keys, self.layout.states_of(self._read(keys.tolist()), keys.shape)

    @classmethod
    def tree_unflatten(cls, about: Any, parts: Any) -> "Kept":
        """From its parts, whatever they are: JAX also makes trees of shapes."""
        (num_clients, has_seeds), (default, *visited) = about, parts
        return cls(num_clients, has_seeds, default, tuple(visited))


def kept_shapes(num_clients: int, has_seeds: bool, one: Personal, num_visited: int) -> Kept:
    """The shapes of what is kept of so many visited, from those of one client's state, [1, ...] or [seeds, 1, ...]."""
    shape = lambda leaf, *leading: jax.ShapeDtypeStruct((*leading, *leaf.shape[has_seeds + 1 :]), leaf.dtype)
    num = num_visited if jax.tree.leaves(one) else 0
    default = jax.tree.map(lambda leaf: shape(leaf, *leaf.shape[:has_seeds]), one)
    states = jax.tree.map(lambda leaf: shape(leaf, num), one)
    return Kept(num_clients, has_seeds, default, (jax.ShapeDtypeStruct((num,), np.int64), states))


class Store:
    """The personal states of a run as it goes on, from those of `kept`.

    Up to `memory` bytes of states stay in memory, and those of clients that come later go to a file in `folder` (by
    default where temporary files are), which is gone when nothing needs it.
    """

    def __init__(self, kept: Kept, memory: int, folder: str | None) -> None:
        self.kept = Kept(kept.num_clients, kept.has_seeds, kept.default, {})
        self.is_empty = kept.layout.num_bytes == 0  # clients keep nothing
        self.most = 0 if self.is_empty else memory // kept.layout.num_bytes
        self.folder, self.file, self.num_in_memory = folder, None, 0
        for key, record in kept.records.items():
            self.kept.records[key] = self._record(None, record) if isinstance(record, np.ndarray) else record

    def write(self, positions: np.ndarray, visited: np.ndarray, states: Personal) -> None:
        """New states of those of the clients at these positions that were visited; all are [..., positions]."""
        leaves, keys = self.kept.layout.bytes_of(states), self.kept.keys(positions).ravel()
        for i in np.flatnonzero(visited).tolist():
            key, row = int(keys[i]), np.concatenate([leaf[i] for leaf in leaves])
            self.kept.records[key] = self._record(self.kept.records.get(key), row)

    def _record(self, old: Any, row: np.ndarray) -> Any:
        if isinstance(old, np.ndarray):
            return row
        if old is None and self.num_in_memory < self.most:
            self.num_in_memory += 1
            return row
        self.file = self.file or _StateFile(len(row), self.folder)
        return self.file.put(row)

    def view(self) -> Kept:
        """What it holds now, whatever is written later."""
        return Kept(self.kept.num_clients, self.kept.has_seeds, self.kept.default, dict(self.kept.records))
