"""Personal states on the host: a client has one of its own from its first visit on, and what is too much goes to disk.

States are immutable records in a dictionary. A new state replaces the client's record; a view is a copy of the
dictionary, so it stays as it is while the run goes on, and what nobody looks at any more is freed.
"""

import tempfile
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np

from personax.typing import Personal


class _Layout:
    """How a state becomes one row of bytes, all its leaves in a row."""

    def __init__(self, default: Personal, num_axes: int) -> None:
        leaves, self.structure = jax.tree.flatten(default)
        self.shapes = [leaf.shape[num_axes:] for leaf in leaves]
        self.dtypes = [np.dtype(leaf.dtype) for leaf in leaves]
        sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        self.bounds = np.cumsum([0, *sizes]).tolist()

    @property
    def num_bytes(self) -> int:
        return self.bounds[-1]

    def pack(self, states: Personal, num_axes: int) -> np.ndarray:
        """Rows [..., bytes] of states whose leaves have `num_axes` leading axes."""
        leaves = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(states)]
        flat = [leaf.reshape(*leaf.shape[:num_axes], -1).view(np.uint8) for leaf in leaves]
        return flat[0] if len(flat) == 1 else np.concatenate(flat, axis=-1)

    def unpack(self, rows: np.ndarray) -> Personal:
        """States with the leading axes of the rows."""
        cuts = zip(self.bounds[:-1], self.bounds[1:], self.dtypes, self.shapes, strict=True)
        whole = [(np.ascontiguousarray(rows[..., a:b]), dtype, shape) for a, b, dtype, shape in cuts]
        leaves = [part.view(dtype).reshape(*rows.shape[:-1], *shape) for part, dtype, shape in whole]
        return jax.tree.unflatten(self.structure, leaves)


class _File:
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
        if self.file.write(memoryview(row)) != self.num_bytes:
            raise OSError(f"A personal state of {self.num_bytes} bytes could not be written: the disk is full.")
        return place


class _OnDisk:
    """A row of a file; when nothing refers to it any more, its place is free."""

    def __init__(self, file: _File, at: int) -> None:
        self.file, self.at = file, at

    def __del__(self) -> None:
        self.file.free.append(self.at)

    def read(self, target: np.ndarray) -> None:
        self.file.file.seek(self.at * self.file.num_bytes)
        if self.file.file.readinto(memoryview(target)) != self.file.num_bytes:
            raise OSError(f"A personal state of {self.file.num_bytes} bytes could not be read back from the disk.")


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
    def layout(self) -> _Layout:
        """How one state becomes bytes."""
        return _Layout(self.default, int(self.has_seeds))

    @cached_property
    def records(self) -> dict[int, Any]:
        """The states of those visited, by number."""
        if isinstance(self._visited, dict):
            return self._visited
        keys, states = self._visited
        rows = self.layout.pack(states, 1) if len(keys) else []
        return {int(key): row.copy() for key, row in zip(keys, rows, strict=True)}

    def read(self, positions: np.ndarray) -> Personal:
        """The states of the clients at these positions, [positions] or [seeds, positions]."""
        if not self.layout.num_bytes:
            return self.default
        axes = int(self.has_seeds)
        rows = np.empty((*positions.shape, self.layout.num_bytes), np.uint8)
        rows[...] = self.layout.pack(self.default, axes)[..., None, :]
        self._fill(rows.reshape(-1, self.layout.num_bytes), self.keys(positions).ravel().tolist())
        return self.layout.unpack(rows)

    def keys(self, positions: np.ndarray) -> np.ndarray:
        """The numbers of these clients' records; those of a seed come after those of the seed before."""
        seeds = np.arange(len(positions))[:, None] if self.has_seeds else 0
        return self.num_clients * seeds + positions

    def _fill(self, rows: np.ndarray, keys: Sequence[int]) -> None:
        for row, key in zip(rows, keys, strict=True):
            record = self.records.get(key)
            if isinstance(record, _OnDisk):
                record.read(row)
            elif record is not None:
                row[:] = record

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Its parts, and what is the same in all of its kind."""
        names = [jax.tree_util.GetAttrKey(name) for name in ("default", "clients", "states")]
        return list(zip(names, (self.default, *self._parts()), strict=True)), (self.num_clients, self.has_seeds)

    def _parts(self) -> Any:
        if not isinstance(self._visited, dict):
            return self._visited
        keys = np.sort(np.fromiter(self.records, np.int64, len(self.records)))
        rows = np.empty((len(keys), self.layout.num_bytes), np.uint8)
        self._fill(rows, keys.tolist())
        return keys, self.layout.unpack(rows)

    @classmethod
    def tree_unflatten(cls, about: Any, parts: Any) -> "Kept":
        """From its parts, whatever they are: JAX also makes trees of shapes."""
        default, *visited = parts
        return cls(*about, default, tuple(visited))


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
        rows = self.kept.layout.pack(states, positions.ndim)[visited]
        for key, row in zip(self.kept.keys(positions)[visited].tolist(), rows, strict=True):
            self.kept.records[key] = self._record(self.kept.records.get(key), row.copy())

    def _record(self, old: Any, row: np.ndarray) -> Any:
        if isinstance(old, np.ndarray):
            return row
        if old is None and self.num_in_memory < self.most:
            self.num_in_memory += 1
            return row
        self.file = self.file or _File(len(row), self.folder)
        return self.file.put(row)

    def view(self) -> Kept:
        """What it holds now, whatever is written later."""
        return Kept(self.kept.num_clients, self.kept.has_seeds, self.kept.default, dict(self.kept.records))
