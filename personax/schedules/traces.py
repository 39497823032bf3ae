"""Device traces: the speed, the bandwidth and the availability of the devices that clients run on.

A trace is read from CSV files or drawn from published distributions. A client's delays follow from its device, the
samples that a visit processes and the bytes that it moves. Downloads, training and uploads continue only while the
device is online.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypedDict, Unpack

import numpy as np

from personax.keys import HostStream, client_uniforms, host_generator
from personax.schedules.availability import AlwaysOnline, Availability, Online
from personax.schedules.concurrency import TRIES
from personax.schedules.timing import RoundPlan, Times, Visits, VisitStarter
from personax.schedules.trace_files import read_devices, read_intervals
from personax.typing import Array
from personax.values import DELAYS, require_count, require_nonnegative, require_one_of, require_positive

__all__ = ["DeviceDelays", "Devices", "VisitWork", "generate", "read"]

Assign = Literal["drawn", "in_order"]
HOUR, DAY = 3600.0, 24 * 3600.0
_SLACK = 1.05  # compute at most this many times the requested arrivals, unless more are simultaneous


@dataclass(frozen=True, eq=False)
class VisitWork:
    """The work of one visit: samples processed by each client, and the bytes that it uploads and downloads.

    `ids` are the clients' stable ids; by default their positions. `px.work_of` makes it from an algorithm.

    >>> VisitWork(samples=np.array([50.0, 20.0]), upload=4000.0, download=4000.0).num_clients
    2
    """

    samples: np.ndarray
    upload: float
    download: float
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, int))

    def __post_init__(self) -> None:
        for name in ("samples", "upload", "download"):
            require_nonnegative(name, getattr(self, name))
        if not len(self.ids):
            object.__setattr__(self, "ids", np.arange(len(self.samples)))
        if len(self.ids) != len(self.samples):
            raise ValueError(f"`ids` must have one entry for each of the {len(self.samples)} clients.")

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.samples)


@dataclass(frozen=True, eq=False)
class Devices:
    """Devices: samples that each processes per second, bytes per second up and down, and availability.

    >>> import jax
    >>> phones = Devices(np.array([10.0, 40.0]), upload=np.array([1e5, 1e6]), download=np.array([1e6, 1e7]))
    >>> phones.delays(VisitWork(np.array([20.0, 20.0]), 4e5, 4e5), key=jax.random.key(0), assign="in_order").compute
    array([2. , 0.5])
    """

    samples_per_second: np.ndarray
    upload: np.ndarray
    download: np.ndarray
    online: Online = AlwaysOnline()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("samples_per_second", "upload", "download"):
            require_positive(name, getattr(self, name))
            if len(getattr(self, name)) != self.num_devices:
                raise ValueError(f"`{name}` must have one entry for each of the {self.num_devices} devices.")

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return len(self.samples_per_second)

    def delays(self, work: VisitWork, *, key: Array, assign: Assign = "drawn") -> "DeviceDelays":
        """Give each client a device, and return the delays of its visits.

        `assign="drawn"` draws the device uniformly, as a function of the key and the client's stable id;
        `"in_order"` gives the client with stable id i the i-th device of the trace.
        """
        require_one_of("assign", assign, ("drawn", "in_order"))
        if assign == "drawn":
            device = (client_uniforms(key, HostStream.DEVICES, work.ids) * self.num_devices).astype(np.int64)
        else:
            device = np.asarray(work.ids, np.int64)
            if device.max() >= self.num_devices:
                raise ValueError(
                    f"The trace has {self.num_devices} devices, and a client has the id {device.max()}. "
                    'Add devices, or use `assign="drawn"`.'
                )
        download, upload = work.download / self.download[device], work.upload / self.upload[device]
        return DeviceDelays(device, download, work.samples / self.samples_per_second[device], upload, self.online)


def read(devices: Path | str, availability: Path | str | None = None, *, period: float | None = None) -> Devices:
    """Read a trace from CSV files.

    Args:
        devices: a file with the columns `device`, `samples_per_second`, `upload` and `download` (bytes per second).
        availability: a file with the columns `device`, `start` and `end`, in seconds: the intervals in which each
            device is online. By default devices are always online.
        period: the seconds after which the intervals repeat; by default the largest `end`.

    >>> import personax as px
    >>> import csv
    >>> with open("devices.csv", "w", newline="") as file:
    ...     rows = [("device", "samples_per_second", "upload", "download"), ("phone", 20.0, 5e5, 2e6)]
    ...     csv.writer(file).writerows(rows)
    >>> px.traces.read("devices.csv").num_devices
    1
    """
    names, numbers = read_devices(Path(devices))
    found = Devices(*numbers.T, names=tuple(names))
    if availability is None:
        return found
    offsets, start, end = read_intervals(Path(availability), names)
    longest = float(end.max())
    if period is not None and period < longest:
        raise ValueError(f"`period` must be at least the largest `end`, {longest:g}, got {period:g}. Raise it.")
    return replace(found, online=Availability(offsets, start, end, longest if period is None else period))


def generate(
    num_devices: int = 1000,
    *,
    mean_speed: float = 20.0,
    speed_spread: float = 1.0,
    mean_download: float = 2.5e6,
    bandwidth_spread: float = 0.5,
    upload_factor: tuple[float, float] = (4.0, 6.0),
    unavailability: float | None = 0.1,
    key: Array,
) -> Devices:
    """Draw devices from published distributions.

    - Samples per second are log-normal over devices with mean `mean_speed`, whose logarithm has the standard deviation
      `speed_spread`. FLGo's simulator has log-normal response times ("LN").
    - Downloads are log-normal with `mean_download` bytes per second; the standard deviation is `bandwidth_spread`
      times the mean. The defaults have the moments of SelecEval's normal distribution: 20 and 10 Mbit/s.
    - Uploads are slower by a factor that is uniform in `upload_factor`: PersA-FL section 5.
    - In hour h of each day, a device is online with probability (0.4 sin(2 pi h / 24) + 0.5) q, where
      q = c / max c over devices and c is log-normal with parameters 0 and -ln(1 - unavailability): the "SLN" mode of
      FLGo's simulator, which has one such draw per round. A device that would never be online is online in the hour
      that is most likely. With None, devices are always online.

    >>> import jax
    >>> generate(100, key=jax.random.key(0)).num_devices
    100
    """
    require_count("num_devices", num_devices)
    for name, given in (("mean_speed", mean_speed), ("mean_download", mean_download), ("speed_spread", speed_spread)):
        require_positive(name, given)
    require_positive("bandwidth_spread", bandwidth_spread)
    require_positive("upload_factor", upload_factor)
    rng = host_generator(key, HostStream.GENERATED_DEVICES)
    log_normal = lambda mean, spread: rng.lognormal(np.log(mean) - spread**2 / 2, spread, num_devices)
    speed = log_normal(mean_speed, speed_spread)
    download = log_normal(mean_download, np.sqrt(np.log1p(bandwidth_spread**2)))
    upload = download / rng.uniform(*upload_factor, num_devices)
    online = AlwaysOnline() if unavailability is None else _daily(num_devices, unavailability, rng)
    return Devices(speed, upload, download, online)


def _daily(num_devices: int, unavailability: float, rng: np.random.Generator) -> Availability:
    """Hours of a day in which devices are online, adjacent ones joined."""
    if not 0 < unavailability < 1:
        raise ValueError(f"`unavailability` must lie strictly between 0 and 1, got {unavailability}.")
    rate = rng.lognormal(0.0, -np.log1p(-unavailability), num_devices)
    of_hour = 0.4 * np.sin(2 * np.pi * np.arange(24) / 24) + 0.5
    online = rng.random((num_devices, 24)) < of_hour * (rate / rate.max())[:, None]
    online[~online.any(axis=1), np.argmax(of_hour)] = True
    edges = np.diff(np.pad(online, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    device, begin = np.nonzero(edges == 1)
    offsets = np.r_[0, np.cumsum(np.bincount(device, minlength=num_devices))]
    return Availability(offsets, HOUR * begin, HOUR * np.nonzero(edges == -1)[1], DAY)


@dataclass(frozen=True, eq=False)
class DeviceDelays:
    """The delays of each client's visits on its device: seconds online for download, computation and upload.

    `arrivals` and `rounds` take it in place of `px.delays.Delays`. Cohorts are drawn among the clients that are online
    when a round begins.

    >>> import jax, numpy as np, personax as px
    >>> devices = px.traces.generate(10, key=jax.random.key(0))
    >>> work = px.traces.VisitWork(samples=np.full(4, 50.0), upload=4e6, download=4e6)
    >>> delays = devices.delays(work, key=jax.random.key(1))
    >>> px.rounds(4, num_rounds=3, cohort_size=2, delays=delays, key=jax.random.key(2)).num_events
    6
    """

    device: np.ndarray
    download: np.ndarray
    compute: np.ndarray
    upload: np.ndarray
    online: Online

    def __post_init__(self) -> None:
        require_positive("download + compute + upload", self._flight, "A visit must take time.")

    @property
    def _flight(self) -> np.ndarray:
        return self.download + self.compute + self.upload

    def visits(self, num_clients: int, num_events: int, key: Array) -> Visits:
        """Return the visits of clients that each start again as soon as they have reported.

        A client's k-th update arrives when its device has been online for k flights, so the time of the last event is
        found by bisection, and nothing is computed beyond it.
        """
        self._require(num_clients)
        flight, counted = self._flight, lambda end: np.floor(self.online.worked(self.device, end) / flight)
        low, high = 0.0, float(np.median(flight))
        while counted(high).sum() < num_events:
            low, high = high, 2 * high
        for _ in range(60):
            if counted(high).sum() <= _SLACK * num_events:
                break
            middle = (low + high) / 2
            low, high = (low, middle) if counted(middle).sum() >= num_events else (middle, high)
        nums = counted(high).astype(np.int64) + 2  # the next one, and one for rounding
        client = np.repeat(np.arange(num_clients, dtype=np.int32), nums)
        update = np.arange(len(client)) - np.repeat(np.cumsum(nums) - nums, nums)
        device, own = self.device[client], flight[client]
        ended = self.online.ends(device, (update + 1) * own)
        before = np.where(update > 0, np.r_[0.0, ended[:-1]], 0.0)  # later than `begins` by rounding, if at all
        requested = np.maximum(before, self.online.begins(device, update * own))
        received = np.maximum(requested, self.online.ends(device, update * own + self.download[client]))
        return Visits(client, update, Times(requested, received, np.maximum(received, ended)))

    def plan_rounds(self, num_clients: int, num_rounds: int, cohort_size: int, key: Array) -> RoundPlan:
        """Draw each cohort among the clients that are online when its round begins."""
        self._require(num_clients)

        def members(round: int, begin: float) -> np.ndarray:
            rng = host_generator(key, HostStream.ONLINE_COHORTS, round)
            return self._draw(rng, num_clients, cohort_size, begin)

        return RoundPlan(
            members=members,
            times=lambda round, clients, begin: self._times(clients, begin),
            online_from=self._online_from,
            durations=lambda clients: self._flight[clients],
        )

    def visit_starter(self, key: Array) -> VisitStarter:
        """Return functions of single clients."""
        scalars = self.online.scalars()
        device, download, flight = (column.tolist() for column in (self.device, self.download, self._flight))

        def start(client: int, update: int, time: float) -> tuple[float, float, float]:
            own = device[client]
            worked, requested = scalars.worked(own, time), scalars.online_from(own, time)
            received = max(requested, scalars.ends(own, worked + download[client]))
            return requested, received, max(received, scalars.ends(own, worked + flight[client]))

        return VisitStarter(lambda client, time: scalars.online_from(device[client], time), start)

    def _online_from(self, clients: np.ndarray, time: float) -> np.ndarray:
        return self.online.online_from(self.device[clients], np.full(len(clients), time))

    def _times(self, clients: np.ndarray, begin: float) -> Times:
        """Return the times of visits that begin at a given time, or as soon after it as the device is online."""
        device, requested = self.device[clients], self._online_from(clients, begin)
        worked = self.online.worked(device, np.full(len(clients), begin))
        received = np.maximum(requested, self.online.ends(device, worked + self.download[clients]))
        arrived = np.maximum(received, self.online.ends(device, worked + self._flight[clients]))
        return Times(requested, received, arrived)

    def _draw(self, rng: np.random.Generator, num_clients: int, size: int, begin: float) -> np.ndarray:
        """Draw a cohort of clients that are online; if there are too few, add the next ones to come online."""
        drawn = rng.integers(num_clients, size=TRIES * size)
        _, first = np.unique(drawn, return_index=True)
        distinct = drawn[np.sort(first)]
        found = distinct[self._online_from(distinct, begin) == begin][:size]
        if len(found) == size:
            return found
        order = rng.permutation(num_clients)
        return order[np.argsort(self._online_from(order, begin), kind="stable")[:size]]

    def _require(self, num_clients: int) -> None:
        if num_clients != len(self.device):
            raise ValueError(
                f"The delays are for {len(self.device)} clients, but the schedule has {num_clients}. "
                "Create the `VisitWork` from the federation that trains."
            )


@DELAYS.register("traces", summary="Devices in CSV files: speed, bandwidth and availability", source="your files")
def trace_delays(
    devices: Path,
    availability: Path | None = None,
    period: float | None = None,
    assign: Assign = "drawn",
    *,
    key: Array,
    work: VisitWork,
) -> DeviceDelays:
    """Create the delays of devices in CSV files: see `px.traces.read`."""
    return read(devices, availability, period=period).delays(work, key=key, assign=assign)


class GeneratedOptions(TypedDict, total=False):
    """The options of `generate`; with `always_online`, devices are never offline."""

    num_devices: int
    mean_speed: float
    speed_spread: float
    mean_download: float
    bandwidth_spread: float
    upload_factor: tuple[float, float]
    unavailability: float


@DELAYS.register(
    "devices",
    summary="Devices drawn from published distributions",
    source="Wang 2023; PersA-FL 2023, section 5",
    citations=("wang2023", "toghani2023"),
)
def generated_delays(
    *, key: Array, work: VisitWork, always_online: bool = False, **options: Unpack[GeneratedOptions]
) -> DeviceDelays:
    """Create the delays of devices drawn from published distributions: see `px.traces.generate`."""
    never = {"unavailability": None} if always_online else {}
    return generate(**{**options, **never}, key=key).delays(work, key=key)
