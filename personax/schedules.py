"""Who reports when, from which model: tables of events, made before a run because delays do not depend on parameters.

An *event* is the arrival of one client's update at the server. `started_at` counts the events that had arrived when
that client asked for its model; how many server versions ago that was depends on the server's buffer.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from personax.keys import host_generator
from personax.typing import Array
from personax.values import require, require_count, require_nonnegative, require_positive, value

# Streams of a key; delays take one for each block, from 5 on.
_FACTORS, _COHORTS, _AGGREGATED, _CLIENTS, _DOWNLOADS, _DELAYS = range(6)
_BLOCK = 64  # rounds, or updates of each client, that are drawn at once: a longer schedule begins like a shorter one


class Delay(Protocol):
    """Random times: one for each entry of `clients`; `updates` counts each one's earlier updates, or rounds."""

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray: ...


PerClient = float | tuple[float, ...]  # one number, or one for each client


def _of(numbers: PerClient, clients: np.ndarray) -> np.ndarray:
    given = np.asarray(numbers, float)
    if given.ndim == 0:
        return np.broadcast_to(given, clients.shape)
    if clients.max() >= len(given):
        raise ValueError(f"Give one delay, or one for each client, got {len(given)} for client {clients.max()}.")
    return given[clients]


@value
class Fixed:
    """The same time always."""

    mean: PerClient = 0.0

    def __post_init__(self) -> None:
        require_nonnegative("mean", self.mean)

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """The mean itself."""
        return _of(self.mean, clients)


@value
class Exponential:
    """Exponential times of this mean."""

    mean: PerClient

    def __post_init__(self) -> None:
        require_positive("mean", self.mean, "For no delay leave it out.")

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Independent exponential times."""
        return rng.exponential(_of(self.mean, clients))


@value
class LogNormal:
    """Log-normal times of this mean, whose logarithm has standard deviation `spread`."""

    mean: PerClient
    spread: float = 1.0

    def __post_init__(self) -> None:
        require_positive("mean", self.mean, "For no delay leave it out.")
        require_positive("spread", self.spread)

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Independent log-normal times."""
        return rng.lognormal(np.log(_of(self.mean, clients)) - self.spread**2 / 2, self.spread)


@value
class Gamma:
    """Gamma times of this mean and shape; a shape of 1 is exponential, a large one nearly constant."""

    mean: PerClient
    shape: float = 2.0

    def __post_init__(self) -> None:
        require_positive("mean", self.mean, "For no delay leave it out.")
        require_positive("shape", self.shape)

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Independent gamma times."""
        return rng.gamma(self.shape, _of(self.mean, clients) / self.shape)


@dataclass(frozen=True, eq=False)
class Given:
    """Times from an array [updates, clients], read from the top again when it runs out."""

    times: np.ndarray

    def __post_init__(self) -> None:
        require_nonnegative("times", self.times)
        if np.ndim(self.times) != 2:
            raise ValueError(f"`times` must be an array [updates, clients], got shape {np.shape(self.times)}.")

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """The given times."""
        rows = np.asarray(self.times, float)[updates % len(self.times)]
        if clients.max() >= rows.shape[-1]:
            raise ValueError(f"`times` must have a column for each client, got {rows.shape[-1]} columns.")
        return np.take_along_axis(rows, clients[..., None], axis=-1)[..., 0]


@value
class Delays:
    """What an update waits for: the download, the computation, the upload; and a pause before the next request."""

    download: Delay = Fixed()
    compute: Delay = Fixed()
    upload: Delay = Fixed()
    pause: Delay = Fixed()

    def sample(self, key: Array, block: int, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times to download, from then to the arrival, and to pause, for the `block`-th block of updates or rounds."""
        rng = host_generator(key, _DELAYS + block)
        updates = np.broadcast_to(_BLOCK * block + np.arange(_BLOCK)[:, None], clients.shape)
        download, compute, upload, pause = (
            delay.sample(rng, clients, updates) for delay in (self.download, self.compute, self.upload, self.pause)
        )
        return download, compute + upload, pause


def persafl_delays(num_clients: int = 30, *, download_mean: float = 1.0, key: Array) -> Delays:
    """PersA-FL section 5: random download and upload times, the mean upload 4 to 6 times the mean download.

    Each client's factor is uniform in [4, 6] and its times are exponential; computing takes no time, as there.
    The paper does not name the distributions.
    """
    require_count("num_clients", num_clients)
    require_positive("download_mean", download_mean)
    factors = host_generator(key, _FACTORS).uniform(4, 6, num_clients)
    return Delays(download=Exponential(download_mean), upload=Exponential(tuple((download_mean * factors).tolist())))


@dataclass(frozen=True, eq=False)
class Schedule:
    """A table of events, one entry of each array for each, in the order of arrival (within a round: of the cohort).

    `requested`, `received` and `time` are the virtual times at which the client asked for a model, had it, and its
    update arrived. `pending` has the times at which clients received the models of updates that come after the last
    event.
    `aggregated` is False for clients that train without being aggregated (pFedMe). `round_ends` is True at the last
    event of each round, and nowhere in a schedule of arrivals.
    """

    num_clients: int
    client: np.ndarray
    started_at: np.ndarray
    requested: np.ndarray
    received: np.ndarray
    time: np.ndarray
    aggregated: np.ndarray
    round_ends: np.ndarray
    pending: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __post_init__(self) -> None:
        arrays = (self.started_at, self.requested, self.received, self.time, self.aggregated, self.round_ends)
        if not len(self.client) or any(len(array) != len(self.client) for array in arrays):
            raise ValueError(
                f"All columns of a schedule must have one entry for each of its {len(self.client)} events."
            )
        if self.client.min() < 0 or self.client.max() >= self.num_clients:
            raise ValueError(f"`client` must lie in 0..{self.num_clients - 1}, got up to {self.client.max()}.")
        late = np.flatnonzero((self.started_at > np.arange(len(self.client))) | (self.started_at < 0))
        if len(late):
            raise ValueError(
                f"`started_at` must not be after the event itself, got {self.started_at[late[0]]} at {late[0]}."
            )
        ends = np.flatnonzero(self.round_ends) + 1
        if len(ends) and (ends[-1] != len(self.client) or len(set(np.diff(ends, prepend=0).tolist())) > 1):
            raise ValueError(
                f"Rounds must have the same length and end with the last event, got ends {ends[:5].tolist()}."
            )

    @property
    def num_events(self) -> int:
        """The number of events."""
        return len(self.client)

    @property
    def has_rounds(self) -> bool:
        """Whether the events come in rounds."""
        return bool(self.round_ends.any())

    def updates(self) -> np.ndarray:
        """For each event, how many events of the same client came before it."""
        order = np.argsort(self.client, kind="stable")
        sorted_clients = self.client[order]
        first = np.r_[True, sorted_clients[1:] != sorted_clients[:-1]]
        run_start = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
        counts = np.empty(len(order), np.int32)
        counts[order] = np.arange(len(order)) - run_start
        return counts

    def visits(self, num_events: int) -> np.ndarray:
        """How many of the first `num_events` events are of each client."""
        return np.bincount(self.client[:num_events], minlength=self.num_clients)

    def cohort(self, num_events: int) -> np.ndarray:
        """The clients of the round that ends with the `num_events`-th event (before the first round: of that)."""
        if not self.has_rounds:
            raise ValueError("A cohort is of a round, and a schedule of arrivals has none. Score all clients.")
        size = self.num_events // int(self.round_ends.sum())
        last = max(num_events, size)
        return np.sort(self.client[last - size : last])

    def staleness(self, buffer_size: int | None = None) -> np.ndarray:
        """Server versions between download and arrival, for a server that steps every `buffer_size` events.

        By default a server steps at the end of each round, or at each event where there are no rounds.
        """
        if buffer_size is None:
            buffer_size = self.num_events // int(self.round_ends.sum()) if self.has_rounds else 1
        return np.arange(self.num_events) // buffer_size - self.started_at // buffer_size

    def active_share(self, times: np.ndarray) -> np.ndarray:
        """The share of clients that are active at each of these virtual times.

        A client is active from receiving a model until its update arrives: computing or uploading. It is idle while it
        waits for a download or pauses, and in a synchronous schedule while it is not in the cohort or waits for the
        slowest. (PersA-FL section 5 reports about 80 % of active, "not idle", clients: with uploads 4 to 6 times as
        long as downloads this is the reading that gives it.)
        """
        received = np.searchsorted(np.sort(np.r_[self.received, self.pending]), times, side="right")
        arrived = np.searchsorted(np.sort(self.time), times, side="right")
        return (received - arrived) / self.num_clients


def rounds(
    num_clients: int,
    num_rounds: int,
    cohort_size: int | None = None,
    *,
    key: Array,
    num_aggregated: int | None = None,
    delays: Delays = Delays(),
) -> Schedule:
    """Synchronous rounds: a cohort drawn uniformly without replacement, which the server waits for.

    Without a `cohort_size` all clients take part. With `num_aggregated`, that many of the cohort, drawn uniformly, are
    aggregated (pFedMe: all clients train, a sample is averaged). A round lasts as long as its slowest member.
    """
    cohort_size = num_clients if cohort_size is None else cohort_size
    require_count("num_clients", num_clients)
    require_count("num_rounds", num_rounds)
    require_count("cohort_size", cohort_size)
    _require_at_most("cohort_size", cohort_size, num_clients, "clients of the federation")
    require_count("num_aggregated", num_aggregated)
    _require_at_most("num_aggregated", num_aggregated, cohort_size, "members of the cohort")
    num_drawn = -(-num_rounds // _BLOCK) * _BLOCK
    rng = host_generator(key, _COHORTS)
    cohorts = np.stack([rng.choice(num_clients, cohort_size, replace=False) for _ in range(num_drawn)])
    chosen = np.broadcast_to(np.arange(cohort_size) < (num_aggregated or cohort_size), cohorts.shape)
    aggregated = host_generator(key, _AGGREGATED).permuted(chosen, axis=1)
    blocks = [delays.sample(key, block, who) for block, who in enumerate(np.split(cohorts, num_drawn // _BLOCK))]
    download, rest = (np.concatenate([times[i] for times in blocks])[:num_rounds] for i in (0, 1))
    cohorts, aggregated, durations = cohorts[:num_rounds], aggregated[:num_rounds], download + rest
    begins = np.r_[0.0, np.cumsum(durations.max(axis=1))[:-1]][:, None]
    events = np.arange(num_rounds * cohort_size).reshape(num_rounds, cohort_size)
    return Schedule(
        num_clients=num_clients,
        client=cohorts.ravel().astype(np.int32),
        started_at=np.broadcast_to(events[:, :1], events.shape).ravel(),
        requested=np.broadcast_to(begins, events.shape).ravel(),
        received=(begins + download).ravel(),
        time=(begins + durations).ravel(),
        aggregated=aggregated.ravel(),
        round_ends=np.broadcast_to(np.arange(cohort_size) == cohort_size - 1, events.shape).ravel(),
    )


def arrivals(num_clients: int, num_events: int, *, delays: Delays, key: Array) -> Schedule:
    """Asynchronous arrivals: each client downloads, trains, uploads, and begins again.

    A client receives the model as it is when it asks. Where several things happen at the same time, clients with fewer
    updates come first, then those of lower position; a request sees the arrivals that came before it in that order.
    """
    require_count("num_clients", num_clients)
    require_count("num_events", num_events)
    clients = np.broadcast_to(np.arange(num_clients), (_BLOCK, num_clients))
    requested, received, arrived, begin = [], [], [], np.zeros(num_clients)
    while not arrived or not _complete(np.concatenate(arrived), num_events):
        waits = np.stack(delays.sample(key, len(arrived), clients), axis=1).reshape(-1, num_clients)
        times = begin + np.cumsum(waits, axis=0)
        requested.append(np.r_[begin[None], times[2:-1:3]])
        received.append(times[::3])
        arrived.append(times[1::3])
        begin = times[-1]
    update, client = np.divmod(np.arange(len(arrived) * _BLOCK * num_clients), num_clients)
    asked, had, time = (np.concatenate(parts).ravel() for parts in (requested, received, arrived))
    order, rest = np.split(np.lexsort((client, update, time)), [num_events])
    next_of_each = had[rest[np.unique(client[rest], return_index=True)[1]]]
    return Schedule(
        num_clients=num_clients,
        client=client[order].astype(np.int32),
        started_at=_num_before(time[order], update[order], asked[order]),
        requested=asked[order],
        received=had[order],
        time=time[order],
        aggregated=np.ones(num_events, bool),
        round_ends=np.zeros(num_events, bool),
        pending=next_of_each[next_of_each <= time[order[-1]]],
    )


def _complete(arrived: np.ndarray, num_events: int) -> bool:
    """Whether the first `num_events` arrivals are known: no later one of any client can come before."""
    return (
        arrived.size >= num_events
        and np.partition(arrived.ravel(), num_events - 1)[num_events - 1] <= arrived[-1].min()
    )


def _num_before(time: np.ndarray, update: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """For each request, the arrivals before it: earlier in time, or at the same time with fewer updates."""
    keys = np.stack([np.r_[time, asked], np.r_[update, update], np.repeat([1, 0], len(time))])
    order = np.lexsort((keys[2], keys[1], keys[0]))
    is_arrival = keys[2][order] == 1
    counts = np.empty(len(order), np.int64)
    counts[order] = np.cumsum(is_arrival) - is_arrival
    return counts[len(time) :]


def uniform_arrivals(num_clients: int, num_events: int, max_staleness: int, *, key: Array) -> Schedule:
    """PersA-FL Assumption 1: the client of each event is uniform, and no update is older than `max_staleness` events.

    The download is uniform over what the bound allows, and comes after the client's own previous update.
    """
    require_count("num_clients", num_clients)
    require_count("num_events", num_events)
    require_count("max_staleness", max_staleness, least=0)
    client = host_generator(key, _CLIENTS).integers(num_clients, size=num_events).astype(np.int32)
    position = host_generator(key, _DOWNLOADS).uniform(size=num_events)
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


def _require_at_most(name: str, given: int | None, most: int, of: str) -> None:
    require(lambda v: v <= most, name, given, f"be at most the {most} {of}")
