"""Single clients at the end of a run: their numbers in order, and their differences to a baseline."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

MOST_POINTS = 200


class Sorted(NamedTuple):
    """Numbers of clients in ascending order: at `at[j]` % of the clients, client `names[j]` has `values[j]`.

    These are enough points to draw; `below` and `above` are the shares of all clients on either side of zero.
    """

    at: np.ndarray
    values: np.ndarray
    names: list[str]
    below: float
    above: float


@dataclass(frozen=True, eq=False)
class Clients:
    """The rows of `clients.parquet` of one score: one for each client and seed.

    The rows of a seed that diverged have no numbers.
    """

    rows: pa.Table

    def numbers(self, column: str) -> np.ndarray | None:
        """A column, NaN where it is empty; None where there is nothing at all."""
        if column not in self.rows.column_names or self.rows[column].null_count == len(self.rows):
            return None
        return self.rows[column].to_numpy()

    def sorted(self, metric: str, most: int = MOST_POINTS) -> Sorted | None:
        """Each client's mean over seeds, in ascending order, as at most this many points."""
        values = self.numbers(metric)
        if values is None:
            return None
        here = np.flatnonzero(self._has_numbers(metric))
        return self._sorted(here, values[here], most)

    def sorted_change(self, other: "Clients", metric: str, most: int = MOST_POINTS) -> Sorted | None:
        """Each client's mean difference to another score over the seeds that both have, in ascending order."""
        mine, theirs = self.numbers(metric), other.numbers(metric)
        if mine is None or theirs is None:
            return None
        _, here, there = np.intersect1d(self._keys(), other._keys(), assume_unique=True, return_indices=True)
        both = self._has_numbers(metric)[here] & other._has_numbers(metric)[there]
        here, there = here[both], there[both]
        return self._sorted(here, mine[here] - theirs[there], most) if len(here) else None

    def _has_numbers(self, metric: str) -> np.ndarray:
        """True for the rows whose seed did not diverge."""
        return self.rows[metric].is_valid().to_numpy()

    def _keys(self) -> np.ndarray:
        """One complex number for each pair of a client and a seed."""
        return self.rows["client"].to_numpy() + 1j * self.rows["seed"].to_numpy()

    def _sorted(self, rows: np.ndarray, values: np.ndarray, most: int) -> Sorted:
        """Average over the rows of each client and sort; NaN comes last."""
        client = self.rows["client"].to_numpy()[rows]
        _, first, place = np.unique(client, return_index=True, return_inverse=True)
        means = np.bincount(place, values) / np.bincount(place)
        order = np.argsort(means, kind="stable")
        kept = thinned(len(order), most)
        names = self.rows["name"].take(pa.array(rows[first[order[kept]]])).to_pylist()
        shares = float(np.mean(means < 0)), float(np.mean(means > 0))
        return Sorted(100 * (kept + 1) / len(order), means[order[kept]], names, *shares)


def thinned(num: int, most: int = MOST_POINTS) -> np.ndarray:
    """Positions to draw of `num`: all of few, evenly chosen ones of many, always both ends."""
    return np.unique(np.linspace(0, num - 1, min(num, most)).round().astype(int))
