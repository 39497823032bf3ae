"""Readers of files of samples, with or without a client column."""

from dataclasses import replace
from pathlib import Path
from zipfile import is_zipfile

import numpy as np

from personax.data.datasets.arrays import read_arrays
from personax.data.datasets.columns import Choice, Column, Columns, Words, numbered_classes
from personax.data.datasets.pool import Pool
from personax.data.federation import Federation
from personax.data.schema import Notify, Schema, numbered
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
    include: tuple[str, ...] | None = None,
    exclude: tuple[str, ...] | None = None,
) -> Federation:
    """Read a federation from a `.csv`, `.parquet` or `.npz` file, with rows in any order.

    A `.csv` or `.parquet` file has a column of client ids (integers or strings), a column of labels, and features in
    all other columns: float32, or uint8 if all of them are, which models read as images in [0, 1]. An `.npz` file has
    the arrays `x`, `y` (or the one that `label` names) and `client`, and for test data `test_x`, `test_y` and
    `test_client`; its types are kept, except that float64 becomes float32.

    Labels that are integers or strings are classes, numbered 0, 1, ... in sorted order; other numbers are regression
    targets in float32. The federation's `schema` has the names of the classes and features. For integer targets, use
    `as_targets`.

    Args:
        path: the file.
        client: the column of client ids; None if all samples belong to one client.
        label: the column of labels.
        split: a column with "train" or "test" in each row.
        shape: the shape of a sample, for example (28, 28); None keeps a row of features.
        include: the columns that are features, in this order; None takes all others.
        exclude: columns that are not features, such as names or row numbers.

    >>> import personax as px
    >>> import csv
    >>> with open("patients.csv", "w", newline="") as file:
    ...     rows = [("patient", "age", "sick"), ("anna", 30, "no"), ("anna", 41, "yes"), ("bert", 52, "no")]
    ...     csv.writer(file).writerows(rows)
    >>> fed = px.datasets.read_table("patients.csv", client="patient", label="sick")
    >>> fed.names, fed.schema.features, fed.schema.classes
    (['anna', 'bert'], ('age',), ('no', 'yes'))
    """
    columns = _columns(Path(path), client, label, split, Choice(include, exclude or ()))
    return _federation(columns, Path(path), shape)


@DATASETS.register("pool", summary="a .csv, .parquet or .npz file to be divided by [partition]", source="Your own")
def read_pool(
    path: str | Path,
    *,
    label: str = "label",
    shape: tuple[int, ...] | None = None,
    include: tuple[str, ...] | None = None,
    exclude: tuple[str, ...] | None = None,
) -> Pool:
    """Read a pool from a file without clients, to be divided by a partition; otherwise like `read_table`.

    Args:
        path: the file.
        label: the column of labels.
        shape: the shape of a sample, for example (28, 28); None keeps a row of features.
        include: the columns that are features, in this order; None takes all others.
        exclude: columns that are not features, such as names or row numbers.

    >>> import personax as px
    >>> import csv
    >>> with open("samples.csv", "w", newline="") as file:
    ...     csv.writer(file).writerows([("age", "sick"), (30, "no"), (41, "yes"), (52, "no")])
    >>> px.datasets.read_pool("samples.csv", label="sick").schema.classes
    ('no', 'yes')
    """
    whole = _federation(_columns(Path(path), None, label, None, Choice(include, exclude or ())), Path(path), shape)
    arrays = (whole.x, whole.y, whole.test_x, whole.test_y)
    return Pool(*arrays, num_classes=len(whole.schema.classes), name=Path(path).name, citation="", schema=whole.schema)


def read_client(
    path: str | Path,
    *,
    client: str = "client",
    label: str = "label",
    shape: tuple[int, ...] | None = None,
    schema: Schema | None = None,
    notify: Notify = lambda text: None,
) -> Federation:
    """Read a file that holds the samples of one client; the client column is optional.

    With the `schema` of a model, only its columns are read, and `notify` is called with a message about the others.
    `Federation.conform` then encodes the classes and scales the samples for the model.

    >>> import personax as px
    >>> import csv
    >>> with open("anna.csv", "w", newline="") as file:
    ...     csv.writer(file).writerows([("age", "sick"), (30, "no"), (41, "yes")])
    >>> px.datasets.read_client("anna.csv", label="sick").num_clients
    1
    """
    path = Path(path)
    there = _names(path)
    own, include = client if client in there else None, None
    if schema is not None and schema.features and path.suffix != ".npz":
        others = [name for name in there if name not in (own, label)]
        include = schema.columns_in(others, path.name, notify) if label in there else None
    found = read_table(path, client=own, label=label, shape=shape, include=include)
    if found.num_clients > 1:
        raise ValueError(
            f"{path.name} must hold the samples of one client, got {found.num_clients} in column {client!r}. "
            "Write one file per client."
        )
    return found


def _columns(path: Path, client: str | None, label: str, split: str | None, choice: Choice) -> Columns:
    named = [name for name in (client, label, split) if name is not None]
    if len(set(named)) < len(named):
        raise ValueError(f"`client`, `label` and `split` must be different columns, got {', '.join(named)}.")
    require_file(path)
    if path.suffix != ".npz":
        from personax.data.datasets.tables import read_columns  # Arrow is slow to import

        return read_columns(path, client, label, split, choice)
    if choice != Choice():
        raise ValueError(f"{path.name}: columns of an .npz file have no names. Remove `include` and `exclude`.")
    return read_arrays(path, client, label, split)


def require_file(path: Path) -> None:
    """Raise an error unless a path is an existing file with a supported suffix."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"`path` must end in one of {', '.join(_SUFFIXES)}, got {path.name!r}. Convert the file.")
    if not path.is_file():
        raise FileNotFoundError(f"File not found: {path}.")


def _names(path: Path) -> list[str]:
    """Return the names of a file's columns; none if it cannot be read, which a later read will report."""
    if path.suffix in (".csv", ".parquet") and path.is_file():
        from personax.data.datasets.tables import column_names

        return column_names(path)
    if path.suffix == ".npz" and is_zipfile(path):
        with np.load(path) as file:
            return file.files
    return []


def _federation(columns: Columns, path: Path, shape: tuple[int, ...] | None) -> Federation:
    ids, mask = columns.client, columns.is_test
    numbers, classes = _labels(columns.y, path.name)
    codes = ids.codes if isinstance(ids, Words) else ids
    parts = lambda column: [column] if mask is None else [column[~mask], column[mask]]
    xs = columns.xs if len(columns.xs) == 2 else parts(columns.xs.pop())
    xs[:] = [_shaped(x, shape, path.name) for x in xs]
    train, *test = zip(xs, parts(numbers), parts(codes), strict=True)
    x, y = train[:2]
    targets = {"classes": classes, "target_shape": y.shape[1:]}
    schema = Schema(x.shape[1:], str(x.dtype), columns.features, **targets)
    del x, y
    xs.clear()  # free the arrays as soon as they are copied
    make = lambda name: Federation.from_columns(
        *train[:2],
        name(train[2]),
        test=(*test[0][:2], name(test[0][2])) if test else None,
        origin=f"{path.name}.",
        schema=schema,
    )
    if not isinstance(ids, Words):
        return make(lambda codes: codes)
    try:
        return replace(make(lambda codes: codes), names=ids.names)
    except ValueError:  # strings are slow, but give an error that names the client
        return make(np.array(ids.names).__getitem__)


def _shaped(x: np.ndarray, shape: tuple[int, ...] | None, where: str) -> np.ndarray:
    if shape is None:
        return x
    if any(size < 1 for size in shape) or np.prod(shape, dtype=int) != np.prod(x.shape[1:], dtype=int):
        raise ValueError(
            f"{where}: `shape` must be that of {np.prod(x.shape[1:], dtype=int)} features, got {tuple(shape)}."
        )
    return x.reshape(len(x), *shape)


def _labels(column: Column, where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the class number of each label and the names of the classes, or targets in float32 without names."""
    if isinstance(column, Words):
        return column.codes, tuple(column.names)
    if column.dtype.kind not in "iufb":
        raise ValueError(f"{where}: labels must be numbers or strings, got {column.dtype}. Convert them.")
    if column.dtype.kind == "f":
        with np.errstate(over="ignore"):  # the federation reports nonfinite values
            return column.astype(np.float32), ()
    labels = column.astype(np.int32) if column.dtype.kind == "b" else column
    named = numbered_classes(labels) if len(labels) else None
    return (labels, numbered(int(labels.max(initial=-1)) + 1)) if named is None else (named.codes, tuple(named.names))
