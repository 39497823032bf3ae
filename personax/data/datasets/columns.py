"""Columns of samples as they come out of a file, before they are given to clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from personax.values import did_you_mean


class Words(NamedTuple):
    """A column of strings: for each row the number of its string among the different ones in sorted order."""

    codes: np.ndarray
    names: list[str]


Column = np.ndarray | Words


@dataclass
class Columns:
    """Samples and whose they are. `xs` is training and test samples, or all in one where `is_test` tells them apart."""

    xs: list[np.ndarray]
    y: Column
    client: Column
    is_test: np.ndarray | None = None


def words(strings: Any) -> Words:
    """A column of strings, in a NumPy or Arrow array, as numbers."""
    import pyarrow as pa  # takes a while to load

    found = (strings if isinstance(strings, pa.Array) else pa.array(strings, pa.large_string())).dictionary_encode()
    names = found.dictionary.to_pylist()
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.empty(len(names), np.int32)
    rank[order] = np.arange(len(names))
    return Words(rank[found.indices.to_numpy()], [names[i] for i in order])


def require_column(kind: str, role: str, name: str, there: Sequence[str], where: str) -> None:
    """Raise a ValueError that names the columns that are there and the nearest one, unless `name` is among them."""
    if name in there:
        return
    rest = f" and {len(there) - 10} more" if len(there) > 10 else ""
    raise ValueError(
        f"{where} must have {kind} {name!r}, got {', '.join(map(repr, there[:10])) or 'none'}{rest}."
        f"{did_you_mean(name, there)} Name it with `{role}=...`."
    )


def which_are_tests(split: Words, name: str, where: str) -> np.ndarray | None:
    """Which rows are test samples; None where none is."""
    others = sorted(set(split.names) - {"train", "test"})
    if others or "train" not in split.names:
        got = ", ".join(map(repr, others[:5] or split.names))
        raise ValueError(f"{where}: the column {name!r} must say 'train' or 'test', and 'train' somewhere, got {got}.")
    return split.codes == split.names.index("test") if "test" in split.names else None
