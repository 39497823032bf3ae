"""Standardization with column means and deviations, fitted from clients' sums without their samples."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

_SLICE = 1 << 16  # rows
_ROUNDING = 1e-12  # deviations below this share of the mean are rounding errors of a constant column


@dataclass(frozen=True, eq=False)
class ColumnSums:
    """The number of a client's samples, and each column's sum and sum of squared deviations.

    Deviations are from the client's own mean, because plain sums of squares lose all digits for columns with a large
    mean. `+` combines clients (Chan et al. 1979); the combined squares are sum_i (x_i - mean)^2.

    >>> both = moments(np.array([[1.0], [3.0]])) + moments(np.array([[5.0]]))
    >>> both.count, both.total, both.squares
    (3, array([9.]), array([8.]))
    """

    count: int
    total: np.ndarray
    squares: np.ndarray

    def __add__(self, other: "ColumnSums") -> "ColumnSums":
        if not self.count or not other.count:
            return self if self.count else other
        between = self.total / self.count - other.total / other.count
        weight = self.count * other.count / (self.count + other.count)
        squares = self.squares + other.squares + weight * between**2
        return ColumnSums(self.count + other.count, self.total + other.total, squares)


def moments(x: np.ndarray) -> ColumnSums:
    """Compute one client's moments, which it shares for a common scaling. Columns are the entries of a flat sample."""
    rows = np.asarray(x).reshape(len(x), -1)
    parts = (rows[begin : begin + _SLICE].astype(np.float64) for begin in range(0, len(rows), _SLICE))
    return add_up(_of_rows(part) for part in parts)


def _of_rows(rows: np.ndarray) -> ColumnSums:
    total = rows.sum(axis=0)
    return ColumnSums(len(rows), total, np.square(rows - total / len(rows)).sum(axis=0))


def add_up(parts: Iterable[ColumnSums]) -> ColumnSums:
    """Combine the moments of all clients."""
    return reduce(ColumnSums.__add__, parts)


@dataclass(frozen=True)
class Scaling:
    """Standardization (x - mean) / deviation, with one entry for each number of a flat sample.

    The deviation of a constant column is 1, so that it is only centered.

    >>> Scaling.from_moments(moments(np.array([[1.0, 7.0], [3.0, 7.0]])))
    Scaling(mean=(2.0, 7.0), deviation=(1.0, 1.0))
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self) -> None:
        numbers = np.array([*self.mean, *self.deviation], float)
        if len(self.mean) != len(self.deviation) or not len(self.mean):
            raise ValueError(f"A scaling needs one mean and one deviation per column, got {len(self.mean)} means.")
        if not np.isfinite(numbers).all() or min(self.deviation) <= 0:
            raise ValueError("Means must be finite and deviations positive. Fit the scaling with `from_moments`.")

    @classmethod
    def from_moments(cls, found: ColumnSums) -> "Scaling":
        """Return the scaling that standardizes the samples with these moments."""
        if not np.isfinite(found.squares).all():
            raise ValueError("The values of a column are too large to square. Divide that column first.")
        mean = found.total / found.count
        deviation = np.sqrt(found.squares / found.count)
        constant = deviation <= _ROUNDING * np.abs(mean)
        return cls(tuple(mean.tolist()), tuple(np.where(constant, 1.0, deviation).tolist()))

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Standardize samples; floats keep their type, other numbers become float32."""
        if x.dtype == np.uint8:
            raise ValueError("Images in bytes cannot be standardized. Convert them to float32 first.")
        if int(np.prod(x.shape[1:])) != len(self.mean):
            raise ValueError(f"The scaling has {len(self.mean)} columns, got samples of shape {x.shape[1:]}.")
        mean, deviation = np.array(self.mean), np.array(self.deviation)
        rows = x.reshape(len(x), -1)
        scaled = np.empty(rows.shape, scaled_type(x.dtype))
        for begin in range(0, len(rows), _SLICE):
            at = slice(begin, begin + _SLICE)
            scaled[at] = (rows[at].astype(np.float64) - mean) / deviation
        return scaled.reshape(x.shape)

    def to_dict(self) -> dict[str, list[float]]:
        """Return the scaling as a plain table."""
        return {"mean": list(self.mean), "deviation": list(self.deviation)}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "Scaling":
        """Read a scaling from a plain table, which may come from another machine."""
        if not isinstance(table, Mapping) or table.keys() != {"mean", "deviation"}:
            raise ValueError("A scaling must be a table with `mean` and `deviation`. Write it with `to_dict`.")
        return cls(*(tuple(float(number) for number in table[name]) for name in ("mean", "deviation")))


def scaled_type(dtype: Any) -> np.dtype:
    """Return the dtype of standardized numbers."""
    kind = np.dtype(dtype)
    return kind if kind.kind == "f" else np.dtype(np.float32)
