"""Tables of a trained model's predictions, written to a file."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from personax.data.schema import Notify
from personax.experiment.checkpoint import write_atomically
from personax.experiment.trained import TrainedModel

_SUFFIXES = (".csv", ".parquet")


def require_table_path(path: Path, data: Path) -> None:
    """Raise an error unless a table can be written to a path without replacing the data."""
    if path.suffix not in _SUFFIXES:
        raise ValueError(
            f"Predictions must be written as {' or '.join(_SUFFIXES)}, got {path.name!r}. Change the suffix."
        )
    if path.resolve() == data.resolve():
        raise ValueError(f"The predictions would replace the data in {data}. Choose another --out.")


def predictions(model: TrainedModel, x: Any, *, notify: Notify = lambda text: None) -> pa.Table:
    """Return a row for each sample with its `prediction` and, for classes, its `probability`.

    If a sample has several labels or targets, columns are numbered: `prediction_0`, `prediction_1`, ...
    """
    if not model.schema.classes:
        return pa.table(_columns("prediction", model.predict(x, notify=notify)))
    shares = model.probabilities(x, notify=notify)
    labels = model.classes[shares.argmax(axis=-1)]
    return pa.table({**_columns("prediction", labels), **_columns("probability", shares.max(axis=-1))})


def write_predictions(model: TrainedModel, data: Path, path: Path, *, notify: Notify = lambda text: None) -> int:
    """Predict the samples of a file and write the table to a .csv or .parquet file; return the number of rows."""
    require_table_path(path, data)
    table = predictions(model, data, notify=notify)
    content = BytesIO()
    write = pa_csv.write_csv if path.suffix == ".csv" else pa_parquet.write_table
    write(table, content)
    write_atomically(path, content.getvalue())
    return table.num_rows


def _columns(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    flat = values.reshape(len(values), -1)
    return {name: flat[:, 0]} if values.ndim == 1 else {f"{name}_{i}": column for i, column in enumerate(flat.T)}
