"""Columns of samples read from a file, before they are assigned to clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from personax.values import did_you_mean

_SLICE, _WIDEST = 1 << 16, 1 << 24


class Words(NamedTuple):
    """A column of strings: for each row, the index of its string among the sorted distinct strings."""

    codes: np.ndarray
    names: list[str]


Column = np.ndarray | Words


@dataclass
class Columns:
    """Samples and their clients. `xs` has training and test samples, or all in one array with the mask `is_test`.

    `features` are the names of the columns of a flat sample, in order; () if they have none.
    """

    xs: list[np.ndarray]
    y: Column
    client: Column
    is_test: np.ndarray | None = None
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choice:
    """The selection of feature columns: those of `include` in order (None: all others), without those of `exclude`."""

    include: Sequence[str] | None = None
    exclude: Sequence[str] = ()

    def of(self, names: Sequence[str], where: str) -> list[str]:
        """Select from a file's columns."""
        for role, chosen in (("include", self.include or ()), ("exclude", self.exclude)):
            for name in chosen:
                require_column("a feature column", role, name, names, where)
        return [name for name in (names if self.include is None else self.include) if name not in self.exclude]


def words(strings: Any) -> Words:
    """Encode a column of strings, given as a NumPy or Arrow array, as numbers."""
    import pyarrow as pa  # slow to import

    found = (strings if isinstance(strings, pa.Array) else pa.array(strings, pa.large_string())).dictionary_encode()
    names = found.dictionary.to_pylist()
    order = sorted(range(len(names)), key=names.__getitem__)
    rank = np.empty(len(names), np.int32)
    rank[order] = np.arange(len(names))
    return Words(rank[found.indices.to_numpy()], [names[i] for i in order])


def require_column(kind: str, role: str, name: str, there: Sequence[str], where: str) -> None:
    """Raise a ValueError with the existing columns and the closest match, unless `name` is among them."""
    if name in there:
        return
    rest = f" and {len(there) - 10} more" if len(there) > 10 else ""
    pooled = " For data without clients, use `read_pool`." if role == "client" else ""
    raise ValueError(
        f"{where} must have {kind} {name!r}, got {', '.join(map(repr, there[:10])) or 'none'}{rest}."
        f"{did_you_mean(name, there)} Name it with `{role}=...`.{pooled}"
    )


def numbered_classes(y: np.ndarray) -> Words | None:
    """Encode integer labels as consecutive classes that keep their names; None if they already are consecutive."""
    values = _distinct(y)
    if np.array_equal(values, np.arange(len(values))):
        return None
    codes = np.empty(y.shape, np.int32)
    for begin in range(0, len(y), _SLICE):
        codes[begin : begin + _SLICE] = np.searchsorted(values, y[begin : begin + _SLICE])
    return Words(codes, [str(value) for value in values.tolist()])


def _distinct(y: np.ndarray) -> np.ndarray:
    """Return the distinct labels in order, in slices and without sorting if their range allows it."""
    least, most = int(y.min()), int(y.max())
    if most - least >= _WIDEST:
        return np.unique(y)
    seen = np.zeros(most - least + 1, bool)
    for begin in range(0, len(y), _SLICE):
        seen[y[begin : begin + _SLICE].astype(np.int64) - least] = True
    return np.flatnonzero(seen) + least


def which_are_tests(split: Words, name: str, where: str) -> np.ndarray | None:
    """Return the mask of test samples; None if there are none."""
    others = sorted(set(split.names) - {"train", "test"})
    if others or "train" not in split.names:
        got = ", ".join(map(repr, others[:5] or split.names))
        raise ValueError(
            f"{where}: the column {name!r} must contain 'train' or 'test', and at least one 'train', got {got}."
        )
    return split.codes == split.names.index("test") if "test" in split.names else None
