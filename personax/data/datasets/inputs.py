"""Inputs for trained models, read from arrays, data frames and files without labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from personax.data.datasets.arrays import read_array
from personax.data.datasets.files import require_file
from personax.data.schema import Notify, Schema, listed


@runtime_checkable
class ColumnTable(Protocol):
    """A table in memory: a pandas or Polars data frame, or an Arrow table."""

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any: ...


def read_inputs(given: Any, schema: Schema, notify: Notify = lambda text: None) -> np.ndarray:
    """Convert samples to the inputs that a schema describes: its columns in order, its dtype, standardized.

    `given` is an array with samples along its first axis, a data frame of pandas or Polars, an Arrow table, or the path
    of a .csv, .parquet or .npz file (with an array `x`). Columns are matched by name, and those that the model does not
    use are ignored; `notify` is called with their names. Columns without names are taken in order.

    >>> schema = Schema((2,), "float32", ("age", "dose"), ("ill", "well"))
    >>> read_inputs(np.array([[50, 0.5]]), schema)
    array([[50. ,  0.5]], dtype=float32)
    """
    if isinstance(given, str | Path):
        x, names, where = _of_file(Path(given), schema, notify)
    elif isinstance(given, ColumnTable):
        from personax.data.datasets.tables import table_features  # Arrow is slow to import

        where, names = "The table", schema.features
        x = table_features(given, lambda there: _chosen(there, schema, where, notify), where)
    else:
        x, names, where = _of_array(given, schema), (), "The array"
    if not len(x):
        raise ValueError(f"{where} has no rows.")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        row, *place = np.argwhere(~np.isfinite(x))[0].tolist()
        column = schema.column(int(np.ravel_multi_index(place, x.shape[1:])) if place else 0)
        raise ValueError(f"{where}: nonfinite value in row {row} (counted from 0), {column}. Replace it.")
    return schema.inputs(x, Schema(x.shape[1:], str(x.dtype), names), where, notify)


def _of_file(path: Path, schema: Schema, notify: Notify) -> tuple[np.ndarray, tuple[str, ...], str]:
    """Return the samples of a file, the names of their columns if any, and the file's name."""
    require_file(path)
    if path.suffix == ".npz":
        return read_array(path, "x"), (), path.name
    from personax.data.datasets.tables import read_features

    return read_features(path, lambda there: _chosen(there, schema, path.name, notify)), schema.features, path.name


def _chosen(there: Sequence[str], schema: Schema, where: str, notify: Notify) -> Sequence[str]:
    """Choose the columns to read: the model's by name, or all if it has no names and their number matches."""
    if schema.features:
        return schema.columns_in(there, where, notify)
    if len(there) != schema.num_inputs:
        raise ValueError(
            f"{where} has {len(there)} columns, but the model takes {schema.num_inputs} inputs without names. "
            f"The columns are {listed(there)}. Keep only the inputs, in the order of training."
        )
    notify(f"{where}: the model has no column names, so columns are read in the order of the file.")
    return there


def _of_array(given: Any, schema: Schema) -> np.ndarray:
    x = np.asarray(given)
    if x.dtype.kind not in "iufb":
        raise ValueError(f"Samples must be an array of numbers, a data frame or a path, got {type(given).__name__}.")
    if x.ndim == 0 or (x.ndim == 1 and schema.shape):
        shape = ", ".join(["samples", *map(str, schema.shape)])
        raise ValueError(f"The array must have the shape ({shape}), got {x.shape}. For one sample, use `x[None]`.")
    return x
