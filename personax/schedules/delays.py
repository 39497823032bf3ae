"""Random delays: how long downloads, computation and uploads take in virtual time."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from personax.keys import HostStream, host_generator
from personax.typing import Array
from personax.values import DELAY_TIMES, DELAYS, require, require_count, require_nonnegative, require_positive, value

BLOCK = 64  # rounds, or updates of each client, drawn at once, so that a longer schedule begins like a shorter one


@DELAY_TIMES.describes
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


@DELAY_TIMES.register()
@value
class Fixed:
    """The same time always."""

    mean: PerClient = 0.0

    def __post_init__(self) -> None:
        require_nonnegative("mean", self.mean)

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """The mean itself."""
        return _of(self.mean, clients)


@DELAY_TIMES.register()
@value
class Exponential:
    """Exponential times of this mean."""

    mean: PerClient

    def __post_init__(self) -> None:
        require_positive("mean", self.mean, "For no delay leave it out.")

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Independent exponential times."""
        return rng.exponential(_of(self.mean, clients))


@DELAY_TIMES.register()
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


@DELAY_TIMES.register()
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


@DELAY_TIMES.register()
@value
class Uniform:
    """Times that are uniform within `spread` times the mean of the mean, and so bounded: PersA-FL Assumption 1."""

    mean: PerClient
    spread: float = 0.5

    def __post_init__(self) -> None:
        require_positive("mean", self.mean, "For no delay leave it out.")
        require(lambda v: (v >= 0) & (v <= 1), "spread", self.spread, "lie in [0, 1]")

    def sample(self, rng: np.random.Generator, clients: np.ndarray, updates: np.ndarray) -> np.ndarray:
        """Independent uniform times."""
        return _of(self.mean, clients) * rng.uniform(1 - self.spread, 1 + self.spread, clients.shape)


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


@DELAYS.register()
@value
class Delays:
    """What an update waits for: the download, the computation, the upload; and a pause before the next request."""

    download: Delay = Fixed()
    compute: Delay = Fixed()
    upload: Delay = Fixed()
    pause: Delay = Fixed()

    def sample(self, key: Array, block: int, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times to download, from then to the arrival, and to pause, for the `block`-th block of updates or rounds."""
        rng = host_generator(key, HostStream.DELAYS + block)
        updates = np.broadcast_to(BLOCK * block + np.arange(BLOCK)[:, None], clients.shape)
        download, compute, upload, pause = (
            delay.sample(rng, clients, updates) for delay in (self.download, self.compute, self.upload, self.pause)
        )
        return download, compute + upload, pause


@DELAYS.register("persafl")
def persafl_delays(num_clients: int = 30, *, download_mean: float = 1.0, key: Array) -> Delays:
    """PersA-FL section 5: random download and upload times, the mean upload 4 to 6 times the mean download.

    Each client's factor is uniform in [4, 6] and its times are exponential; computing takes no time, as there.
    The paper does not name the distributions.
    """
    require_count("num_clients", num_clients)
    require_positive("download_mean", download_mean)
    factors = host_generator(key, HostStream.DELAY_FACTORS).uniform(4, 6, num_clients)
    return Delays(download=Exponential(download_mean), upload=Exponential(tuple((download_mean * factors).tolist())))


@DELAYS.register("none")
def no_delays() -> Delays:
    """No delays: every client answers at once."""
    return Delays()
