"""Flat arrays of all clients' training or test data, on the host, in files, and on a device."""

import mmap
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from personax.data.partition import natural
from personax.typing import Array


class ClientData(NamedTuple):
    """A federation's training data on the device. Client i holds rows `start[i] : start[i] + num_samples[i]`."""

    x: Array
    y: Array
    start: Array
    num_samples: Array
    ids: Array  # stable numbers that seed random streams, independent of the order of clients


class ArrayPart(NamedTuple):
    """Training or test data on the host."""

    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray

    def take(self, rows: np.ndarray | None, offsets: np.ndarray) -> "ArrayPart":
        """Select rows of the arrays (None: all of them, unchanged)."""
        return ArrayPart(self.x, self.y, offsets) if rows is None else ArrayPart(self.x[rows], self.y[rows], offsets)


def gather_clients(
    part: ArrayPart, ids: np.ndarray, clients: np.ndarray, num_rows: int, num_clients: int
) -> ClientData:
    """Gather the data of these clients in the device's dtypes: the i-th becomes client i of `num_clients`.

    Remaining rows are zeros, and remaining clients have one row of zeros.
    """
    begins, counts = part.offsets[clients], part.offsets[clients + 1] - part.offsets[clients]
    device_type = lambda array: jax.dtypes.canonicalize_dtype(array.dtype)
    empty = lambda array: np.zeros((num_rows, *array.shape[1:]), device_type(array))
    # Allocate new memory each time, because the device may still read or share the previous buffer.
    data = ClientData(
        empty(part.x),  # pyright: ignore[reportArgumentType]
        empty(part.y),  # pyright: ignore[reportArgumentType]
        *(np.zeros(num_clients, kind) for kind in (np.int32, np.int32, np.uint32)),  # pyright: ignore[reportArgumentType]
    )
    ends = np.cumsum(counts)
    for array, target in ((part.x, data.x), (part.y, data.y)):
        for begin, end, count in zip(begins.tolist(), ends.tolist(), counts.tolist(), strict=True):
            target[end - count : end] = array[begin : begin + count]
        _let_go(array)
    data.start[: len(clients)], data.ids[: len(clients)] = ends - counts, ids[clients]
    data.num_samples[: len(clients)], data.num_samples[len(clients) :] = counts, 1
    return data


def _let_go(array: np.ndarray) -> None:
    """Release the memory of pages read from a mapped file; the system may keep them cached."""
    if sys.platform == "linux" and isinstance(array, np.memmap) and array.mode == "r":
        if isinstance(array.base, mmap.mmap):
            array.base.madvise(mmap.MADV_DONTNEED)


def check_fits(part: ArrayPart, names: Sequence[str]) -> None:
    """Raise an error for numbers that do not fit into the device's narrower dtypes."""
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


def by_client(part: str, x: np.ndarray, y: np.ndarray, client: np.ndarray) -> tuple[np.ndarray, ArrayPart]:
    """Return the clients of a column in sorted order, and the samples grouped by client."""
    x, y, client = (np.asarray(column) for column in (x, y, client))
    if client.ndim != 1 or not len(client) or len(x) != len(client) or len(y) != len(client):
        raise ValueError(
            f"The {part} columns must have one entry per sample, got {len(x)} of x, {len(y)} of y and a client "
            f"column of shape {client.shape}."
        )
    parts = natural(client)
    rows, offsets = parts.rows.astype(np.int32 if len(client) < 2**31 else np.int64), parts.offsets
    del parts  # frees half of the memory of the rows
    clients = client[rows[offsets[:-1]]]
    if np.all(rows[1:] > rows[:-1]):
        return clients, ArrayPart(x, y, offsets)
    return clients, ArrayPart(_take_lean(x, rows), _take_lean(y, rows), offsets)


def _take_lean(array: np.ndarray, rows: np.ndarray, slice_rows: int = 1 << 16) -> np.ndarray:
    """Return `array[rows]`, computed in slices because NumPy makes a wide copy of narrow rows."""
    taken = np.empty_like(array)
    for begin in range(0, len(rows), slice_rows):
        taken[begin : begin + slice_rows] = array[rows[begin : begin + slice_rows]]
    return taken


def take_clients(part: ArrayPart, at: np.ndarray) -> ArrayPart:
    """Return the samples of these clients, grouped by client."""
    counts = np.diff(part.offsets)[at]
    ends = np.cumsum(counts)
    rows = np.repeat(part.offsets[at] - ends + counts, counts) + np.arange(counts.sum())
    return part.take(rows, np.r_[0, ends])


def flatten(clients: Sequence[tuple[Any, Any]], names: Sequence[str]) -> ArrayPart:
    """Concatenate one (x, y) pair per client."""
    xs, ys = [np.asarray(x) for x, _ in clients], [np.asarray(y) for _, y in clients]
    for name, x, y in zip(names, xs, ys, strict=True):
        if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
            raise ValueError(f"{name}: x and y must have one row per sample, got shapes {x.shape} and {y.shape}.")
        if x.shape[1:] != xs[0].shape[1:] or y.shape[1:] != ys[0].shape[1:] or x.dtype != xs[0].dtype:
            raise ValueError(
                f"{name}: samples must have the shapes and types of {names[0]}, x {xs[0].shape[1:]} {xs[0].dtype} and "
                f"y {ys[0].shape[1:]}, got x {x.shape[1:]} {x.dtype} and y {y.shape[1:]}."
            )
    return ArrayPart(np.concatenate(xs), np.concatenate(ys), np.r_[0, np.cumsum([len(x) for x in xs])])


def check_part(part: str, x: np.ndarray, y: np.ndarray, offsets: np.ndarray, names: Sequence[str]) -> None:
    """Raise an error unless these arrays are valid client data; memory-mapped inputs are not scanned."""
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != len(x) or len(x) != len(y) or np.any(counts < 0):
        raise ValueError(
            f"The {part} offsets must increase from 0 to the number of rows, got {offsets[0]} to {offsets[-1]} "
            f"for {len(x)} rows of x and {len(y)} of y."
        )
    if not len(counts):
        raise ValueError("A federation needs at least one client.")
    if np.any(counts == 0):
        empty = int(np.argmin(counts))
        raise ValueError(f"{names[empty]} has no {part} samples. Remove it from the federation, or add samples.")
    for letter, array in (("x", x), ("y", y)):
        if array.dtype.kind not in "biuf":
            raise ValueError(
                f"{names[0]}: the {part} data must be numbers, got {letter} of type {array.dtype}. Encode it."
            )
        row = None if letter == "x" and isinstance(array, np.memmap) else _first_not_finite(array)
        if row is not None:
            owner = int(np.searchsorted(offsets, row, side="right")) - 1
            raise ValueError(
                f"{names[owner]}: the {part} data must be finite, got {letter} with a NaN or infinite entry in its row "
                f"{row - offsets[owner]}. Remove or repair that sample."
            )


def _first_not_finite(array: np.ndarray, slice_rows: int = 1 << 16) -> int | None:
    """Find the first row with a nonfinite entry, in slices to save memory."""
    if not np.issubdtype(array.dtype, np.floating):
        return None
    for begin in range(0, len(array), slice_rows):
        part = array[begin : begin + slice_rows]
        if not np.isfinite(part).all():
            return begin + int(np.argmin(np.isfinite(part.reshape(len(part), -1)).all(axis=1)))
    return None
