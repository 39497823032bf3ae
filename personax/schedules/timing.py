"""The contract of delays: who reports at which virtual time, for arrivals and for rounds."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from personax.typing import Array


class Times(NamedTuple):
    """The virtual times of visits: the request, the end of the download, and the arrival of the update."""

    requested: np.ndarray
    received: np.ndarray
    arrived: np.ndarray


class Visits(NamedTuple):
    """Visits in any order: clients, their numbers of earlier updates, and times.

    The first arrivals are complete, and each client also has its next visit after them.
    """

    client: np.ndarray
    update: np.ndarray
    times: Times


class RoundPlan(NamedTuple):
    """The cohorts of synchronous rounds: the members of a round, and their times if it begins at some time."""

    members: Callable[[int, float], np.ndarray]
    times: Callable[[int, np.ndarray, float], Times]


StartVisit = Callable[[int, int, float], tuple[float, float, float]]  # of a client, its updates, and a time
IsOnline = Callable[[int, float], bool]


class Timing(Protocol):
    """The questions of `arrivals` and `rounds`. `px.delays.Delays` and the delays of traces answer it."""

    def visits(self, num_clients: int, num_events: int, key: Array) -> Visits: ...
    def plan_rounds(
        self, num_clients: int, num_rounds: int, cohort_size: int, key: Array, cohorts: np.ndarray | None
    ) -> RoundPlan: ...
    def visit_starter(self, key: Array) -> tuple[IsOnline, StartVisit]: ...
