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
    """The delays of synchronous rounds.

    Args:
        members: the drawn cohort of a round that begins at a given time.
        times: the times of the visits of a round, for its clients and its beginning.
        online_from: the times at which clients are online, from a given time on.
        durations: the expected durations of the visits of clients, while they are online.
    """

    members: Callable[[int, float], np.ndarray]
    times: Callable[[int, np.ndarray, float], Times]
    online_from: Callable[[np.ndarray, float], np.ndarray]
    durations: Callable[[np.ndarray], np.ndarray]


class VisitStarter(NamedTuple):
    """Functions of a single client: when it is online, and the times of a visit that begins at a given time.

    `start` takes the client, its number of earlier updates and the time, and returns the request, which is not before
    that time, the end of the download, and the arrival.
    """

    online_from: Callable[[int, float], float]
    start: Callable[[int, int, float], tuple[float, float, float]]


class Timing(Protocol):
    """The delays behind `arrivals` and `rounds`: `px.delays.Delays`, those of devices, or your own."""

    def visits(self, num_clients: int, num_events: int, key: Array) -> Visits: ...
    def plan_rounds(self, num_clients: int, num_rounds: int, cohort_size: int, key: Array) -> RoundPlan: ...
    def visit_starter(self, key: Array) -> VisitStarter: ...


TIMING = ("visits", "plan_rounds", "visit_starter")  # the methods of `Timing`
