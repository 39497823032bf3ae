"""Arrivals at a server that keeps a limited number of clients active."""

from array import array
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from personax.keys import HostStream, host_generator
from personax.schedules.timing import Times, Timing, Visits
from personax.typing import Array

TRIES = 64  # clients per place that are drawn before the server waits for one of them to come online
_DRAWN = 1 << 16


class _Idle:
    """The idle clients, in an array from which each draw takes constant time, however few they are."""

    def __init__(self, num_clients: int, key: Array) -> None:
        self.order, self.num = array("q", range(num_clients)), num_clients
        self.uniforms = _uniforms(key)

    def add(self, client: int) -> None:
        """Add a client that has reported."""
        self.order[self.num] = client
        self.num += 1

    def take(self, online_from: Callable[[int], float], time: float) -> int:
        """Remove and return a client that is online, or the one of `TRIES` that comes online first."""
        order, best, earliest = self.order, 0, float("inf")
        for place in range(min(TRIES, self.num)):
            other = place + int(next(self.uniforms) * (self.num - place))
            order[place], order[other] = order[other], order[place]
            begins = online_from(order[place])
            if begins < earliest:
                best, earliest = place, begins
            if begins <= time:
                break
        client, self.num = order[best], self.num - 1
        order[best] = order[self.num]
        return client


def limited_visits(num_clients: int, num_events: int, concurrency: int, delays: Timing, key: Array) -> Visits:
    """Return the first `num_events` visits to arrive, and those that are still active then."""
    starter, idle = delays.visit_starter(key), _Idle(num_clients, key)
    updates = array("q", bytes(8 * num_clients))

    def begin(time: float) -> tuple[float, int, int, float, float]:
        """Give the model to the next client; return its arrival, update, position, request and receipt."""
        client = idle.take(lambda one: starter.online_from(one, time), time)
        update = updates[client]
        updates[client] += 1
        requested, received, arrived = starter.start(client, update, time)
        return arrived, update, client, requested, received

    active = [begin(0.0) for _ in range(concurrency)]
    heapify(active)
    arrived = []
    for _ in range(num_events):
        first = heappop(active)
        arrived.append(first)
        idle.add(first[2])
        heappush(active, begin(first[0]))
    time, update, client, requested, received = (np.asarray(column) for column in zip(*arrived, *active, strict=True))
    return Visits(client, update, Times(requested, received, time))


def _uniforms(key: Array) -> Iterator[float]:
    """Draw uniform numbers in [0, 1), in blocks."""
    rng = host_generator(key, HostStream.NEXT_CLIENTS)
    while True:
        yield from rng.random(_DRAWN).tolist()
