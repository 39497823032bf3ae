"""Random delays: the virtual time that downloads, computation and uploads take."""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np

from personax.keys import HostStream, host_generator
from personax.schedules.timing import RoundPlan, Times, Visits, VisitStarter
from personax.typing import Array
from personax.values import DELAY_TIMES, DELAYS, require, require_count, require_nonnegative, require_positive, value

__all__ = [
    "Delay",
    "Delays",
    "Exponential",
    "Fixed",
    "Gamma",
    "Given",
    "LogNormal",
    "Uniform",
    "no_delays",
    "persafl_delays",
]

BLOCK = 64  # rounds, or updates of each client, drawn together, so that a longer schedule starts like a shorter one


@DELAY_TIMES.describes
class Delay(Protocol):
    """Random times, one per entry of `clients`; `updates` is each client's number of earlier updates, or rounds.

    >>> import jax, numpy as np, personax as px
    >>> @px.value
    ... class EveryThirdSlow:
    ...     def sample(self, rng, clients, updates):
    ...         return np.where(clients % 3 == 0, 5.0, 1.0)
    >>> delays = px.delays.Delays(upload=EveryThirdSlow())
    >>> px.arrivals(4, num_events=3, delays=delays, key=jax.random.key(0)).client.tolist()
    [1, 2, 1]
    """

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray: ...


PerClient = float | tuple[float, ...]  # one number, or one for each client


def _of(numbers: PerClient, clients: np.ndarray) -> np.ndarray:
    given = np.asarray(numbers, float)
    if given.ndim == 0:
        return np.broadcast_to(given, clients.shape)
    if clients.max() >= len(given):
        raise ValueError(f"Give one delay, or one for each client, got {len(given)} for client {clients.max()}.")
    return given[clients]


@DELAY_TIMES.register()
@value
class Fixed:
    """A constant time.

    >>> import numpy as np, personax as px
    >>> px.delays.Fixed((1.0, 5.0)).sample(np.random.default_rng(0), np.array([0, 1, 0]), np.zeros(3, int)).tolist()
    [1.0, 5.0, 1.0]
    """

    mean: PerClient = 0.0

    def __post_init__(self) -> None:
        require_nonnegative("mean", self.mean)

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Return the mean."""
        return _of(self.mean, clients)


@DELAY_TIMES.register()
@value
class Exponential:
    """Exponential times with this mean.

    >>> import numpy as np, personax as px
    >>> delay, updates = px.delays.Exponential(2.0), np.arange(10_000)
    >>> times = delay.sample(np.random.default_rng(0), 0 * updates, updates)
    >>> round(float(times.mean()), 1)
    2.0
    """

    mean: PerClient

    def __post_init__(self) -> None:
        require_positive("mean", self.mean, "For no delay, omit it.")

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Draw independent exponential times."""
        return rng.exponential(_of(self.mean, clients))


@DELAY_TIMES.register()
@value
class LogNormal:
    """Log-normal times with this mean, whose logarithm has standard deviation `spread`.

    >>> import numpy as np, personax as px
    >>> delay, updates = px.delays.LogNormal(2.0, spread=0.5), np.arange(10_000)
    >>> times = delay.sample(np.random.default_rng(0), 0 * updates, updates)
    >>> round(float(times.mean()), 1)
    2.0
    """

    mean: PerClient
    spread: float = 1.0

    def __post_init__(self) -> None:
        require_positive("mean", self.mean, "For no delay, omit it.")
        require_positive("spread", self.spread)

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Draw independent log-normal times."""
        return rng.lognormal(np.log(_of(self.mean, clients)) - self.spread**2 / 2, self.spread)


@DELAY_TIMES.register()
@value
class Gamma:
    """Gamma times with this mean and shape. Shape 1 is exponential; a large shape is nearly constant.

    >>> import numpy as np, personax as px
    >>> delay, updates = px.delays.Gamma(2.0, shape=100.0), np.arange(10_000)
    >>> times = delay.sample(np.random.default_rng(0), 0 * updates, updates)
    >>> round(float(times.mean()), 1), round(float(times.std()), 1)
    (2.0, 0.2)
    """

    mean: PerClient
    shape: float = 2.0

    def __post_init__(self) -> None:
        require_positive("mean", self.mean, "For no delay, omit it.")
        require_positive("shape", self.shape)

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Draw independent gamma times."""
        return rng.gamma(self.shape, _of(self.mean, clients) / self.shape)


@DELAY_TIMES.register()
@value
class Uniform:
    """Uniform times in `mean * [1 - spread, 1 + spread]`, which are bounded as in PersA-FL Assumption 1.

    >>> import numpy as np, personax as px
    >>> delay, updates = px.delays.Uniform(2.0, spread=0.5), np.arange(10_000)
    >>> times = delay.sample(np.random.default_rng(0), 0 * updates, updates)
    >>> bool(times.min() >= 1.0), bool(times.max() <= 3.0)
    (True, True)
    """

    mean: PerClient
    spread: float = 0.5

    def __post_init__(self) -> None:
        require_positive("mean", self.mean, "For no delay, omit it.")
        require(lambda v: (v >= 0) & (v <= 1), "spread", self.spread, "lie in [0, 1]")

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Draw independent uniform times."""
        return _of(self.mean, clients) * rng.uniform(1 - self.spread, 1 + self.spread, clients.shape)


@dataclass(frozen=True, eq=False)
class Given:
    """Times from an array [updates, clients], which repeats from the start when it runs out.

    >>> import numpy as np, personax as px
    >>> times = np.array([[1.0, 2.0], [3.0, 4.0]])  # [updates, clients]
    >>> px.delays.Given(times).sample(np.random.default_rng(0), np.array([0, 1, 0]), np.array([0, 0, 1])).tolist()
    [1.0, 2.0, 3.0]
    """

    times: np.ndarray

    def __post_init__(self) -> None:
        require_nonnegative("times", self.times)
        if np.ndim(self.times) != 2:
            raise ValueError(f"`times` must be an array [updates, clients], got shape {np.shape(self.times)}.")

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Return the given times."""
        rows = np.asarray(self.times, float)[updates % len(self.times)]
        if clients.max() >= rows.shape[-1]:
            raise ValueError(f"`times` must have one column for each client, got {rows.shape[-1]} columns.")
        return np.take_along_axis(rows, clients[..., None], axis=-1)[..., 0]


@DELAYS.register(summary="Random downloads, computation, uploads and pauses", source="common practice")
@value
class Delays:
    """The delays of an update: download, computation and upload, then a pause before the next request.

    >>> import personax as px
    >>> px.delays.Delays(compute=px.delays.Gamma(2.0), upload=px.delays.Exponential(5.0)).upload
    Exponential(mean=5.0)
    """

    download: Delay = Fixed()
    compute: Delay = Fixed()
    upload: Delay = Fixed()
    pause: Delay = Fixed()

    def sample(self, key: Array, block: int, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw the times of a block of updates or rounds: the download, from then to the arrival, and the pause."""
        rng = host_generator(key, HostStream.DELAYS + block)
        updates = np.broadcast_to(BLOCK * block + np.arange(BLOCK)[:, None], clients.shape)
        download, compute, upload, pause = (
            delay.sample(rng, clients, updates) for delay in (self.download, self.compute, self.upload, self.pause)
        )
        return download, compute + upload, pause

    def visits(self, num_clients: int, num_events: int, key: Array) -> Visits:
        """Return the visits of clients that each start again after a pause, in blocks until none is missing."""
        clients = np.broadcast_to(np.arange(num_clients), (BLOCK, num_clients))
        requested, received, arrived, begin = [], [], [], np.zeros(num_clients)
        while not arrived or not _complete(np.concatenate(arrived), num_events):
            waits = np.stack(self.sample(key, len(arrived), clients), axis=1).reshape(-1, num_clients)
            times = begin + np.cumsum(waits, axis=0)
            requested.append(np.r_[begin[None], times[2:-1:3]])
            received.append(times[::3])
            arrived.append(times[1::3])
            begin = times[-1]
        update, client = np.divmod(np.arange(len(arrived) * BLOCK * num_clients), num_clients)
        return Visits(
            client, update, Times(*(np.concatenate(parts).ravel() for parts in (requested, received, arrived)))
        )

    def plan_rounds(self, num_clients: int, num_rounds: int, cohort_size: int, key: Array) -> RoundPlan:
        """Draw cohorts of all clients, and their delays, in blocks of rounds."""
        num_drawn = whole_blocks(num_rounds)
        rng = host_generator(key, HostStream.COHORTS)
        drawn = np.stack([rng.choice(num_clients, cohort_size, replace=False) for _ in range(num_drawn)])
        blocks = np.split(drawn, num_drawn // BLOCK)
        sampled = [self.sample(key, block, who)[:2] for block, who in enumerate(blocks)]

        def waits(round: int, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            block, row = divmod(round, BLOCK)
            if np.array_equal(clients, drawn[round]):
                return sampled[block][0][row], sampled[block][1][row]
            others = blocks[block].copy()
            others[row] = clients
            download, rest, _ = self.sample(key, block, others)
            return download[row], rest[row]

        def times(round: int, clients: np.ndarray, begin: float) -> Times:
            download, rest = waits(round, clients)
            return Times(np.full(len(clients), begin), begin + download, begin + (download + rest))

        durations = cache(lambda: self._durations(num_clients, key))
        return RoundPlan(
            members=lambda round, begin: drawn[round],
            times=times,
            online_from=lambda clients, time: np.full(len(clients), time),
            durations=lambda clients: durations()[clients],
        )

    def _durations(self, num_clients: int, key: Array) -> np.ndarray:
        """Estimate the mean duration of each client's visits from draws of their own."""
        rng, clients = host_generator(key, HostStream.EXPECTED_DELAYS), np.arange(num_clients)
        draw = lambda delay, update: delay.sample(rng, clients, np.full(num_clients, update))
        visit = lambda update: sum(draw(delay, update) for delay in (self.download, self.compute, self.upload))
        return np.asarray(sum(map(visit, range(BLOCK)))) / BLOCK

    def visit_starter(self, key: Array) -> VisitStarter:
        """Return functions of single clients, which are always online."""

        def start(client: int, update: int, time: float) -> tuple[float, float, float]:
            rng = host_generator(key, HostStream.VISIT_DELAYS, client, update)
            draw = lambda delay: float(delay.sample(rng, np.array([client]), np.array([update]))[0])
            received = time + draw(self.download)
            return time, received, received + (draw(self.compute) + draw(self.upload))

        return VisitStarter(lambda client, time: time, start)


def whole_blocks(num_rounds: int) -> int:
    """Round up to whole blocks of rounds."""
    return -(-num_rounds // BLOCK) * BLOCK


def _complete(arrived: np.ndarray, num_events: int) -> bool:
    """Return True if the first `num_events` arrivals are final: no client can still report before them."""
    return (
        arrived.size >= num_events
        and np.partition(arrived.ravel(), num_events - 1)[num_events - 1] <= arrived[-1].min()
    )


@DELAYS.register(
    "persafl",
    summary="Random downloads, and uploads that take 4 to 6 times as long",
    source="PersA-FL 2023, section 5",
    citations=("toghani2023",),
)
def persafl_delays(num_clients: int = 30, *, download_mean: float = 1.0, key: Array) -> Delays:
    """Create the delays of PersA-FL section 5: random downloads and uploads; uploads take 4 to 6 times as long.

    Each client's mean upload time is its mean download time multiplied by a factor that is uniform in [4, 6].
    Computation takes no time, as in the paper. The paper does not name the distributions; here they are exponential.

    >>> import jax, personax as px
    >>> delays = px.delays.persafl_delays(30, key=jax.random.key(0))
    >>> min(delays.upload.mean) >= 4, max(delays.upload.mean) <= 6
    (True, True)
    """
    require_count("num_clients", num_clients)
    require_positive("download_mean", download_mean)
    factors = host_generator(key, HostStream.DELAY_FACTORS).uniform(4, 6, num_clients)
    return Delays(download=Exponential(download_mean), upload=Exponential(tuple((download_mean * factors).tolist())))


@DELAYS.register("none", summary="No delays: every client answers immediately", source="common practice")
def no_delays() -> Delays:
    """Create delays of zero: every client answers immediately.

    >>> import personax as px
    >>> px.delays.no_delays() == px.delays.Delays()
    True
    """
    return Delays()
