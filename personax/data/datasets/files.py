"""Files of samples with a client column."""

from dataclasses import replace
from pathlib import Path
from zipfile import is_zipfile

import numpy as np

from personax.data.datasets.arrays import read_arrays
from personax.data.datasets.columns import Column, Columns, Words
from personax.data.federation import Federation
from personax.values import DATASETS

_SUFFIXES = (".npz", ".csv", ".parquet")


@DATASETS.register("file", summary="a .csv, .parquet or .npz file with a column of clients", source="Your own")
def read_table(
    path: str | Path,
    *,
    client: str | None = "client",
    label: str = "label",
    split: str | None = None,
    shape: tuple[int, ...] | None = None,
) -> Federation:
    """A federation from one file: `.csv`, `.parquet`, or `.npz`; rows in any order.

    A `.csv` or `.parquet` file has a column of client ids (whole numbers or strings), a column of labels, and features
    in all other columns: float32, or uint8 where all of them are, which models read as images in [0, 1]. An `.npz` file
    has the arrays `x`, `y` (or the one that `label` names) and `client`, and for test data `test_x`, `test_y` and
    `test_client`; its types are kept, but float64 becomes float32.

    Labels that are whole numbers are kept; other numbers are targets of a regression, in float32; strings become
    0, 1, ... in sorted order, which the federation's `origin` tells.

    Args:
        path: the file.
        client: the column of client ids; None where all samples are of one client.
        label: the column of labels.
        split: a column that says "train" or "test".
        shape: the shape of a sample, for example (28, 28); None keeps a row of features.
    """
    path = Path(path)
    named = [name for name in (client, label, split) if name is not None]
    if len(set(named)) < len(named):
        raise ValueError(f"`client`, `label` and `split` must be different columns, got {', '.join(named)}.")
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"`path` must end in one of {', '.join(_SUFFIXES)}, got {path.name!r}. Convert the file.")
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a file, got none there. Check the path.")
    if path.suffix == ".npz":
        columns = read_arrays(path, client, label, split)
    else:
        from personax.data.datasets.tables import read_columns  # Arrow takes a while to load

        columns = read_columns(path, client, label, split)
    return _federation(columns, path, shape)


def read_client(
    path: str | Path, *, client: str = "client", label: str = "label", shape: tuple[int, ...] | None = None
) -> Federation:
    """The one client whose samples a file holds; the client column may be missing."""
    path = Path(path)
    there = _names(path)
    found = read_table(path, client=client if client in there else None, label=label, shape=shape)
    if found.num_clients > 1:
        raise ValueError(
            f"{path.name} must hold the samples of one client, got {found.num_clients} in the column {client!r}. "
            "Write a file for each."
        )
    return found


def _names(path: Path) -> list[str]:
    """The names of a file's columns; none where it cannot be read, which reading it then explains."""
    if path.suffix in (".csv", ".parquet") and path.is_file():
        from personax.data.datasets.tables import column_names

        return column_names(path)
    if path.suffix == ".npz" and is_zipfile(path):
        with np.load(path) as file:
            return file.files
    return []


def _federation(columns: Columns, path: Path, shape: tuple[int, ...] | None) -> Federation:
    labels, ids, mask = columns.y, columns.client, columns.is_test
    numbers = labels.codes if isinstance(labels, Words) else _numbers(labels, path.name)
    codes = ids.codes if isinstance(ids, Words) else ids
    parts = lambda column: [column] if mask is None else [column[~mask], column[mask]]
    xs = columns.xs if len(columns.xs) == 2 else parts(columns.xs.pop())
    xs[:] = [_shaped(x, shape, path.name) for x in xs]
    train, *test = zip(xs, parts(numbers), parts(codes), strict=True)
    xs.clear()  # so that they are freed as soon as they are copied
    make = lambda name: Federation.from_columns(
        *train[:2],
        name(train[2]),
        test=(*test[0][:2], name(test[0][2])) if test else None,
        origin=_origin(labels, path),
    )
    if not isinstance(ids, Words):
        return make(lambda codes: codes)
    try:
        return replace(make(lambda codes: codes), names=ids.names)
    except ValueError:  # strings take long, but give an error that names the client
        return make(np.array(ids.names).__getitem__)


def _origin(labels: Column, path: Path) -> str:
    if not isinstance(labels, Words):
        return f"{path.name}."
    names = ", ".join(f"{i} is {name!r}" for i, name in enumerate(labels.names[:20]))
    return f"{path.name}. Labels: {names}{' and so on' if len(labels.names) > 20 else ''}."


def _shaped(x: np.ndarray, shape: tuple[int, ...] | None, where: str) -> np.ndarray:
    if shape is None:
        return x
    if any(size < 1 for size in shape) or np.prod(shape, dtype=int) != np.prod(x.shape[1:], dtype=int):
        raise ValueError(
            f"{where}: `shape` must be that of {np.prod(x.shape[1:], dtype=int)} features, got {tuple(shape)}."
        )
    return x.reshape(len(x), *shape)


def _numbers(column: np.ndarray, where: str) -> np.ndarray:
    """The same numbers: whole ones as they are, others in float32."""
    if column.dtype.kind not in "iufb":
        raise ValueError(f"{where}: labels must be numbers or strings, got {column.dtype}. Convert them.")
    if column.dtype.kind == "b":
        return column.astype(np.int32)
    with np.errstate(over="ignore"):  # the federation names what is not finite
        return column.astype(np.float32) if column.dtype.kind == "f" else column
