"""Readers of CSV and Parquet files, in blocks of rows, and of tables in memory."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from personax.data.datasets.columns import Choice, Column, Columns, Words, require_column, which_are_tests, words

BLOCK, _BUFFER = 1 << 22, 1 << 20  # bytes
_NOT_COUNTED = "counted from 0, without the header"
_INDEX = "__index_level_"  # pandas' prefix for an unnamed index


def column_names(path: Path) -> list[str]:
    """Return the names of a file's columns."""
    return _schema(path).names


def read_columns(path: Path, client: str | None, label: str, split: str | None, choice: Choice = Choice()) -> Columns:
    """Read the client, label and split columns by name, and the chosen features among the others.

    Without `client`, all rows belong to one client.
    """
    special = [name for name in (client, label, split) if name is not None]
    schema = _schema(path)
    for role, name in (("client", client), ("label", label), ("split", split)):
        if name is not None:
            require_column("a column", role, name, schema.names, path.name)
    features = choice.of([name for name in schema.names if name not in special], path.name)
    dtype = _feature_type(schema, features, path.name, "Encode it, or remove it with `exclude`.")
    x, columns_of, done = np.empty((_most_rows(path), len(features)), dtype), {name: [] for name in special}, 0
    with _opened(path, features, special) as batches:
        for batch in batches:
            _require_no_nulls(batch, path.name, done)
            _fill(x[done : done + batch.num_rows], batch, features)
            for name in special:
                columns_of[name].append(batch.column(name))
            done += batch.num_rows
    if not done:
        raise ValueError(f"{path.name} has a header but no rows.")
    is_test = None if split is None else which_are_tests(_words(columns_of.pop(split)), split, path.name)
    infer = path.suffix == ".csv"  # types are known in a Parquet file
    clients = np.zeros(done, int) if client is None else _clients(columns_of.pop(client), infer)
    columns = Columns([x[:done]], _labels(columns_of.pop(label), infer), clients, is_test, tuple(features))
    pa.default_memory_pool().release_unused()
    return columns


def read_features(path: Path, choose: Callable[[Sequence[str]], Sequence[str]]) -> np.ndarray:
    """Read the columns of a file that `choose` selects from its names, in that order."""
    schema = _schema(path)
    features = list(choose(schema.names))
    dtype = _feature_type(schema, features, path.name, "Encode it as it was for training.")
    with _opened(path, features, []) as batches:
        return _rows(batches, features, np.empty((_most_rows(path), len(features)), dtype), path.name)


def table_features(table: Any, choose: Callable[[Sequence[str]], Sequence[str]], where: str) -> np.ndarray:
    """Read the columns of a table in memory (pandas, Polars or Arrow) that `choose` selects from its names."""
    found = pa.table(table)
    features = list(choose([name for name in found.column_names if not name.startswith(_INDEX)]))
    dtype = _feature_type(found.schema, features, where, "Encode it as it was for training.")
    empty = np.empty((found.num_rows, len(features)), dtype)
    return _rows(found.select(features).to_batches(), features, empty, where)


def _rows(batches: Iterable[pa.RecordBatch], features: list[str], x: np.ndarray, where: str) -> np.ndarray:
    """Copy the rows of all batches into `x`."""
    done = 0
    for batch in batches:
        _require_no_nulls(batch, where, done)
        _fill(x[done : done + batch.num_rows], batch, features)
        done += batch.num_rows
    if not done:
        raise ValueError(f"{where} has no rows.")
    return x[:done]


def _schema(path: Path) -> pa.Schema:
    try:
        if path.suffix == ".csv":
            with pa_csv.open_csv(path) as reader:
                schema = reader.schema
        else:
            schema = pa_parquet.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"Cannot read {path} as a {path.suffix[1:]} file ({error}).") from error
    names = schema.names
    odd = [name for name in names if not name or name.startswith(_INDEX) or names.count(name) > 1]
    if odd:
        raise ValueError(
            f"Duplicate or unnamed column in {path.name}: {odd[0]!r}. "
            "If it is the index of a pandas table, write the file with `index=False`."
        )
    return schema


def _feature_type(schema: pa.Schema, features: Sequence[str], where: str, remedy: str) -> type:
    if not features:
        raise ValueError(f"{where} has no feature columns, only {', '.join(map(repr, schema.names))}.")
    types = {name: schema.field(name).type for name in features}
    numeric = lambda t: any(check(t) for check in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))
    for name, kind in types.items():
        if not numeric(kind) and not pa.types.is_null(kind):
            raise ValueError(f"{where}: the feature column {name!r} must be numeric, got {kind}. {remedy}")
    return np.uint8 if all(kind == pa.uint8() for kind in types.values()) else np.float32


@contextmanager
def _opened(path: Path, features: list[str], special: list[str]) -> Iterator[Any]:
    """Open a file as blocks of rows; reader errors name the file, and the invalid entry if there is one."""
    try:
        if path.suffix == ".csv":
            types = {**dict.fromkeys(features, pa.float32()), **dict.fromkeys(special, pa.string())}
            convert = pa_csv.ConvertOptions(column_types=types, strings_can_be_null=True, include_columns=list(types))
            with pa_csv.open_csv(path, pa_csv.ReadOptions(block_size=BLOCK), convert_options=convert) as reader:
                yield reader
        else:
            rows = max(256, BLOCK // (4 * len(features)))
            with pa_parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
                yield file.iter_batches(rows, columns=[*features, *special])
    except (pa.ArrowException, OSError) as error:
        found = _not_a_number(path, features) if path.suffix == ".csv" else ""
        raise ValueError(found or f"Cannot read {path} ({error}).") from error


def _not_a_number(path: Path, features: list[str]) -> str:
    with path.open(newline="", errors="replace") as file:
        for row, entries in enumerate(csv.DictReader(file)):
            for name in features:
                try:
                    float(entries[name] or "nan")
                except ValueError:
                    where = f"row {row} ({_NOT_COUNTED}) of the feature column {name!r}"
                    return f"{path.name}: {where} must be a number, got {entries[name]!r:.60}."
    return ""


def _most_rows(path: Path) -> int:
    """Estimate the number of rows from above: unwritten memory costs nothing."""
    if path.suffix == ".parquet":
        return pa_parquet.read_metadata(path).num_rows
    with path.open("rb") as file:
        return 1 + sum(max(chunk.count(b"\n"), chunk.count(b"\r")) for chunk in iter(lambda: file.read(BLOCK), b""))


def _require_no_nulls(batch: pa.RecordBatch, where: str, done: int) -> None:
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if column.null_count:
            row = done + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            raise ValueError(
                f"{where}: missing value in row {row} ({_NOT_COUNTED}), column {name!r}. Fill it in, or remove the row."
            )


def _fill(rows: np.ndarray, batch: pa.RecordBatch, features: list[str]) -> None:
    with np.errstate(over="ignore"):  # the federation reports nonfinite values
        for j, name in enumerate(features):
            rows[:, j] = batch.column(name).to_numpy(zero_copy_only=False)


def _joined(chunks: list[pa.Array]) -> Any:
    kind = chunks[0].type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    kind = pa.large_string() if pa.types.is_string(kind) or pa.types.is_string_view(kind) else kind
    joined = pa.chunked_array([chunk.cast(kind) for chunk in chunks]).combine_chunks()
    chunks.clear()
    return joined


def _labels(chunks: list[pa.Array], infer: bool) -> Column:
    column = _joined(chunks)
    for kind in (pa.int64(), pa.float64()) if infer else ():
        numbers = _cast(column, kind)
        if numbers is not None:
            return numbers.to_numpy()
    return _column(column)


def _clients(chunks: list[pa.Array], infer: bool) -> Column:
    column = _joined(chunks)
    numbers = _cast(column, pa.int64()) if infer else None
    if numbers is None or not numbers.cast(pa.large_string()).equals(column):  # "7" and "007" are different clients
        return _column(column)
    return numbers.to_numpy()


def _cast(strings: Any, kind: pa.DataType) -> Any:
    try:
        strings[:1].cast(kind)
        return strings.cast(kind)
    except pa.ArrowInvalid:
        return None


def _column(column: Any) -> Column:
    return words(column) if pa.types.is_large_string(column.type) else column.to_numpy(zero_copy_only=False)


def _words(chunks: list[pa.Array]) -> Words:
    return words(_joined(chunks).cast(pa.large_string()))
