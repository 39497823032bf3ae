"""Asynchronous arrivals: each client reports when it is ready, then starts again."""

from typing import Literal

import numpy as np

from personax.keys import HostStream, host_generator
from personax.schedules.concurrency import limited_visits
from personax.schedules.schedule import Schedule
from personax.schedules.timing import Timing
from personax.typing import Array
from personax.values import require, require_count, require_one_of


def arrivals(
    num_clients: int,
    num_events: int,
    *,
    delays: Timing,
    key: Array,
    model_at: Literal["request", "receipt"] = "request",
    concurrency: int | None = None,
) -> Schedule:
    """Create a schedule of asynchronous arrivals: each client downloads, trains, uploads, and repeats.

    By default a client receives the model as of its request: the server sends the current model, and the download
    takes time. With `model_at="receipt"` it receives the model as of the end of the download, which makes updates less
    stale. This is PersA-FL's reading: Omega(t) is "the timestep of the round at which client i_t has received the
    server's parameters".

    `delays` are `px.delays.Delays`, or those of devices: `px.traces.generate(...).delays(work, key=key)`.

    By default, all clients are active at the same time. With `concurrency` only that many are, as in FedBuff: when an
    update arrives, the server gives the model to a client drawn uniformly among those that are online and idle. If
    none of 64 drawn idle clients is online, it takes the one of them that comes online first.

    Simultaneous events are ordered by the client's number of earlier updates, then by its position. A request or a
    receipt sees the arrivals that come before it in this order.

    >>> import jax, personax as px
    >>> delays = px.delays.Delays(upload=px.delays.Fixed((1.0, 1.0, 4.0)))  # the third client is slow
    >>> schedule = px.arrivals(3, num_events=9, delays=delays, key=jax.random.key(0))
    >>> schedule.client.tolist(), schedule.staleness().tolist()
    ([0, 1, 0, 1, 0, 1, 2, 0, 1], [0, 1, 0, 1, 0, 1, 6, 1, 2])
    """
    require_count("num_clients", num_clients)
    require_count("num_events", num_events)
    require_one_of("model_at", model_at, ("request", "receipt"))
    require_count("concurrency", concurrency)
    if concurrency is not None:
        require(lambda v: v <= num_clients, "concurrency", concurrency, f"be at most the {num_clients} clients")
        visits = limited_visits(num_clients, num_events, concurrency, delays, key)
    else:
        visits = delays.visits(num_clients, num_events, key)
    client, update, (asked, had, time) = visits
    order, rest = np.split(np.lexsort((client, update, time)), [num_events])
    next_of_each = had[rest[np.unique(client[rest], return_index=True)[1]]]
    seen = (asked if model_at == "request" else had)[order]
    own = time[order]
    return Schedule(
        num_clients=num_clients,
        client=client[order].astype(np.int32),
        started_at=_num_before(own, update[order], seen) if concurrency is None else _num_up_to(own, seen),
        requested=asked[order],
        received=had[order],
        time=own,
        aggregated=np.ones(num_events, bool),
        round_ends=np.zeros(num_events, bool),
        pending=next_of_each[next_of_each <= own[-1]],
    )


def _num_up_to(time: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Count the arrivals up to each request, including the one that caused it."""
    return np.minimum(np.searchsorted(time, asked, side="right"), np.arange(len(time)))


def _num_before(time: np.ndarray, update: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Count the arrivals before each request: earlier in time, or simultaneous with fewer updates."""
    keys = np.stack([np.r_[time, asked], np.r_[update, update], np.repeat([1, 0], len(time))])
    order = np.lexsort((keys[2], keys[1], keys[0]))
    is_arrival = keys[2][order] == 1
    counts = np.empty(len(order), np.int64)
    counts[order] = np.cumsum(is_arrival) - is_arrival
    return counts[len(time) :]


def uniform_arrivals(num_clients: int, num_events: int, max_staleness: int, *, key: Array) -> Schedule:
    """Create a schedule of uniformly random arrivals with bounded staleness: PersA-FL Assumption 1.

    The client of each event is uniform, and no update is older than `max_staleness` events. Each download is uniform
    over the events that the bound allows, and comes after the client's own previous update.

    >>> import jax, personax as px
    >>> schedule = px.uniform_arrivals(10, num_events=50, max_staleness=4, key=jax.random.key(0))
    >>> bool(schedule.staleness().max() <= 4)
    True
    """
    require_count("num_clients", num_clients)
    require_count("num_events", num_events)
    require_count("max_staleness", max_staleness, least=0)
    client = host_generator(key, HostStream.ARRIVING_CLIENTS).integers(num_clients, size=num_events).astype(np.int32)
    position = host_generator(key, HostStream.DOWNLOADS).uniform(size=num_events)
    next_download = np.zeros(num_clients, np.int64)
    started_at = np.empty(num_events, np.int64)
    for event, who in enumerate(client):
        earliest = max(event - max_staleness, next_download[who])
        started_at[event] = earliest + int(position[event] * (event - earliest + 1))
        next_download[who] = event + 1
    time = np.arange(1.0, num_events + 1)
    return Schedule(
        num_clients=num_clients,
        client=client,
        started_at=started_at,
        requested=started_at.astype(float),
        received=started_at.astype(float),
        time=time,
        aggregated=np.ones(num_events, bool),
        round_ends=np.zeros(num_events, bool),
    )
