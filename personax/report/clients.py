"""Per-client results at the end of a run: sorted values, and differences from a baseline."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

MOST_POINTS = 200


class Sorted(NamedTuple):
    """Values of clients in ascending order: at `at[j]` % of the clients, client `names[j]` has `values[j]`.

    Only the points that a figure needs are kept; `below` and `above` are the shares of clients on either side of 0.
    """

    at: np.ndarray
    values: np.ndarray
    names: list[str]
    below: float
    above: float


@dataclass(frozen=True, eq=False)
class Clients:
    """The rows of `clients.parquet` for one score, one for each client and seed.

    The rows of a seed that diverged have no values.
    """

    rows: pa.Table

    def numbers(self, column: str) -> np.ndarray | None:
        """Return a column with NaN for empty entries, or None if it is missing or empty."""
        if column not in self.rows.column_names or self.rows[column].null_count == len(self.rows):
            return None
        return self.rows[column].to_numpy()

    def sorted(self, metric: str, most: int = MOST_POINTS) -> Sorted | None:
        """Sort each client's mean over seeds in ascending order, thinned to `most` points."""
        values = self.numbers(metric)
        if values is None:
            return None
        here = np.flatnonzero(self._has_numbers(metric))
        return self._sorted(here, values[here], most)

    def sorted_change(self, other: "Clients", metric: str, most: int = MOST_POINTS) -> Sorted | None:
        """Sort each client's mean difference from another score, over the seeds that both have."""
        mine, theirs = self.numbers(metric), other.numbers(metric)
        if mine is None or theirs is None:
            return None
        _, here, there = np.intersect1d(self._keys(), other._keys(), assume_unique=True, return_indices=True)
        both = self._has_numbers(metric)[here] & other._has_numbers(metric)[there]
        here, there = here[both], there[both]
        return self._sorted(here, mine[here] - theirs[there], most) if len(here) else None

    def _has_numbers(self, metric: str) -> np.ndarray:
        """Return True for the rows whose seed did not diverge."""
        return self.rows[metric].is_valid().to_numpy()

    def _keys(self) -> np.ndarray:
        """Encode each pair of client and seed as one complex number."""
        return self.rows["client"].to_numpy() + 1j * self.rows["seed"].to_numpy()

    def _sorted(self, rows: np.ndarray, values: np.ndarray, most: int) -> Sorted:
        """Average over the rows of each client and sort, NaN last."""
        client = self.rows["client"].to_numpy()[rows]
        _, first, place = np.unique(client, return_index=True, return_inverse=True)
        means = np.bincount(place, values) / np.bincount(place)
        order = np.argsort(means, kind="stable")
        kept = thinned(len(order), most)
        names = self.rows["name"].take(pa.array(rows[first[order[kept]]])).to_pylist()
        shares = float(np.mean(means < 0)), float(np.mean(means > 0))
        return Sorted(100 * (kept + 1) / len(order), means[order[kept]], names, *shares)


def thinned(num: int, most: int = MOST_POINTS) -> np.ndarray:
    """Return the positions to draw out of `num`: at most `most`, evenly spaced, including both ends."""
    return np.unique(np.linspace(0, num - 1, min(num, most)).round().astype(int))
