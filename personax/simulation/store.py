"""Personal states on the host: one for each client that has been visited; those that exceed the memory go to disk.

States are immutable records in a dictionary. A new state replaces the client's record. A view is a copy of the
dictionary, so it does not change while the run continues, and unused records are freed.
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
    """The layout of a state as one row of bytes, with its leaves one after another."""

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
        """Buffers for the bytes of `num` states."""
        return [np.empty((num, part.stop - part.start), np.uint8) for part in self.parts]

    def states_of(self, leaves: list[np.ndarray], axes: tuple[int, ...]) -> Personal:
        """The states with these bytes, along these leading axes."""
        shaped = zip(leaves, self.dtypes, self.shapes, strict=True)
        return jax.tree.unflatten(
            self.structure, [leaf.view(kind).reshape(*axes, *shape) for leaf, kind, shape in shaped]
        )


class _StateFile:
    """Rows of bytes in an anonymous file. Unused rows are overwritten."""

    def __init__(self, num_bytes: int, folder: str | None) -> None:
        self.num_bytes, self.num_rows, self.free = num_bytes, 0, []
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # open while a row is in use

    def __del__(self) -> None:
        self.file.close()

    def put(self, row: np.ndarray) -> "_OnDisk":
        if not self.free:
            self.free.append(self.num_rows)
            self.num_rows += 1
        place = _OnDisk(self, self.free.pop())
        self.file.seek(place.at * self.num_bytes)
        if self.file.write(row.data) != self.num_bytes:
            raise OSError(f"The disk is full: a personal state of {self.num_bytes} bytes could not be written.")
        return place


class _OnDisk:
    """A row of a file. When it is no longer referenced, its place becomes free."""

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
    """The personal states of all clients at one moment: those of visited clients, and the default of all others.

    As a pytree, it consists of the default, the sorted keys of visited clients (seed times number of clients, plus
    position), and their states. Checkpoints contain these and rebuild it from them.
    """

    def __init__(self, num_clients: int, has_seeds: bool, default: Personal, visited: Any) -> None:
        self.num_clients, self.has_seeds, self.default = num_clients, has_seeds, default
        self._visited = visited  # records by key, or (keys, states) as in a checkpoint

    @cached_property
    def layout(self) -> _StateLayout:
        """The layout of a state as bytes."""
        return _StateLayout(self.default, int(self.has_seeds))

    @cached_property
    def records(self) -> dict[int, Any]:
        """The states of visited clients, by key."""
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
        """The keys of these clients' records, which are consecutive for each seed."""
        seeds = np.arange(len(positions))[:, None] if self.has_seeds else 0
        return self.num_clients * seeds + positions

    def of_seeds(self, begin: int, end: int) -> "Kept":
        """The states of some of the seeds."""
        first, last = begin * self.num_clients, end * self.num_clients
        records = {key - first: record for key, record in self.records.items() if first <= key < last}
        return Kept(self.num_clients, True, jax.tree.map(lambda leaf: leaf[begin:end], self.default), records)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Return the children and the static part."""
        names = [jax.tree_util.GetAttrKey(name) for name in ("default", "clients", "states")]
        return list(zip(names, (self.default, *self._parts()), strict=True)), (self.num_clients, self.has_seeds)

    def _parts(self) -> Any:
        if not isinstance(self._visited, dict):
            return self._visited
        keys = np.sort(np.fromiter(self.records, np.int64, len(self.records)))
        return keys, self.layout.states_of(self._read(keys.tolist()), keys.shape)

    @classmethod
    def tree_unflatten(cls, about: Any, parts: Any) -> "Kept":
        """Rebuild from the parts, which need not be arrays: JAX also makes trees of shapes."""
        (num_clients, has_seeds), (default, *visited) = about, parts
        return cls(num_clients, has_seeds, default, tuple(visited))


def kept_shapes(num_clients: int, has_seeds: bool, one: Personal, num_visited: int) -> Kept:
    """The shapes of a `Kept` with `num_visited` visited clients, given one client's, [1, ...] or [seeds, 1, ...]."""
    shape = lambda leaf, *leading: jax.ShapeDtypeStruct((*leading, *leaf.shape[has_seeds + 1 :]), leaf.dtype)
    num = num_visited if jax.tree.leaves(one) else 0
    default = jax.tree.map(lambda leaf: shape(leaf, *leaf.shape[:has_seeds]), one)
    states = jax.tree.map(lambda leaf: shape(leaf, num), one)
    return Kept(num_clients, has_seeds, default, (jax.ShapeDtypeStruct((num,), np.int64), states))


class Store:
    """The personal states of a run in progress, starting with those of `kept`.

    Up to `memory` bytes of states stay in memory. Those of later clients go to a file in `folder` (by default the
    system's folder for temporary files), which is deleted when it is no longer needed.
    """

    def __init__(self, kept: Kept, memory: int, folder: str | None) -> None:
        self.kept = Kept(kept.num_clients, kept.has_seeds, kept.default, {})
        self.is_empty = kept.layout.num_bytes == 0  # clients have no personal state
        self.most = 0 if self.is_empty else memory // kept.layout.num_bytes
        self.folder, self.file, self.num_in_memory = folder, None, 0
        for key, record in kept.records.items():
            self.kept.records[key] = self._record(None, record) if isinstance(record, np.ndarray) else record

    def write(self, positions: np.ndarray, visited: np.ndarray, states: Personal) -> None:
        """Store the new states of visited clients. All arguments have shape [..., positions]."""
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
        """The current states, unaffected by later writes."""
        return Kept(self.kept.num_clients, self.kept.has_seeds, self.kept.default, dict(self.kept.records))
