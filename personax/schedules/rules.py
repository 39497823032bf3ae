"""The rules of synchronous rounds: their cohorts, when they end, and which members have reported by that time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from personax.schedules.timing import RoundPlan

Cohorts = Sequence[np.ndarray | Sequence[int] | None]  # of consecutive rounds; a None cohort is drawn


class RoundColumns(NamedTuple):
    """Columns of a schedule whose first axis is the round: cohorts [rounds, size], and their times [3, rounds, size].

    `reported` is False for members that the server did not wait for.
    """

    client: np.ndarray
    times: np.ndarray
    reported: np.ndarray


@dataclass(frozen=True, eq=False)
class RoundRules:
    """The delays of rounds, and when the server closes one: after `first` reports, and at the `deadline`.

    A round begins when the one before it ends, so any round can be replayed with another cohort.
    """

    plan: RoundPlan
    first: int | None
    deadline: float | None

    def replay(self, columns: RoundColumns, begin: int, cohorts: Cohorts) -> RoundColumns:
        """Replay one round for each of the `cohorts`, from round `begin` on.

        Later rounds are unchanged, with the times of before.
        """
        client, times, reported = (column.copy() for column in columns)
        now = float(times[2, begin - 1].max()) if begin else 0.0
        for at, given in enumerate(cohorts, begin):
            client[at] = self.plan.members(at, now) if given is None else given
            found = self.plan.times(at, client[at], now)
            reported[at], end = self._close(found.arrived, now)
            times[:, at] = np.minimum(found, end)
            now = end
        return RoundColumns(client, times, reported)

    def _close(self, arrived: np.ndarray, begin: float) -> tuple[np.ndarray, float]:
        """Return which members have reported when the server closes a round, and when that is."""
        if self.first is None and self.deadline is None:
            return np.ones(len(arrived), bool), float(arrived.max())
        order = np.argsort(arrived, kind="stable")[: self.first]
        end = float(arrived[order[-1]])
        if self.deadline is not None:
            end = min(end, begin + self.deadline)
        reported = np.zeros(len(arrived), bool)
        reported[order[arrived[order] <= end]] = True
        return reported, end
