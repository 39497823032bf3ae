"""Arrivals at a server that keeps a limited number of clients active."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from personax.keys import HostStream, host_generator
from personax.schedules.timing import Times, Timing, Visits
from personax.typing import Array

_TRIES = 64  # clients that are drawn before the server takes the one that comes online next
_DRAWN = 1 << 16


def limited_visits(num_clients: int, num_events: int, concurrency: int, delays: Timing, key: Array) -> Visits:
    """Return the first `num_events` visits to arrive, and those that are still active then."""
    is_online, start = delays.visit_starter(key)
    drawn, busy = _draws(num_clients, key), bytearray(num_clients)
    updates = np.zeros(num_clients, np.int64)

    def begin(time: float) -> tuple[float, int, int, float, float]:
        """Give the model to the next client; return its arrival, update, position, request and receipt."""
        idle: list[int] = []
        while len(idle) < _TRIES:
            client = next(drawn)
            if busy[client]:
                continue
            if is_online(client, time):
                break
            idle.append(client)
        else:
            client = min(idle, key=lambda one: start(one, int(updates[one]), time)[0])
        busy[client] = True
        update = int(updates[client])
        updates[client] += 1
        requested, received, arrived = start(client, update, time)
        return arrived, update, client, requested, received

    at_work = [begin(0.0) for _ in range(concurrency)]
    heapify(at_work)
    arrived = []
    for _ in range(num_events):
        first = heappop(at_work)
        arrived.append(first)
        busy[first[2]] = False
        heappush(at_work, begin(first[0]))
    time, update, client, requested, received = (np.asarray(column) for column in zip(*arrived, *at_work, strict=True))
    return Visits(client, update, Times(requested, received, time))


def _draws(num_clients: int, key: Array) -> Iterator[int]:
    """Draw clients uniformly, in blocks."""
    rng = host_generator(key, HostStream.NEXT_CLIENTS)
    while True:
        yield from rng.integers(num_clients, size=_DRAWN).tolist()
