"""The output of `personax bench --json`: one `BenchRecord`. docs/benchmarks/schema.json is its JSON schema."""

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from personax.bench.setting import BenchSetting

_KNOWN = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_KNOWN)
class MachineRecord:
    """The machine, and its peak speed for a large matrix product and a large copy."""

    device: str
    backend: str
    cores: int
    system: str
    python: str
    jax: str
    precision: str  # of matrix products, in JAX's terms
    operations_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, config=_KNOWN)
class PeerRecord:
    """A peer on the same setting, timed alternately with ours.

    `ratio` is its time per round divided by ours, the median over turns. `error` is the distance of its parameters from
    ours after the same work, relative to the change of ours. A peer that could not run has only a `note` with the
    reason.
    """

    name: str
    version: str = ""
    note: str = ""
    error: float | None = None
    seconds_per_round: float | None = None
    ratio: float | None = None


@dataclass(frozen=True, config=_KNOWN)
class RowRecord:
    """One setting: medians over turns. A round of an asynchronous setting is one event.

    `operations` and `bytes` are the least work of a round, the two peaks are the best speeds of the machine before or
    between turns, `floor_seconds` is the longer of the two resulting times, and the shares are the achieved fractions.
    """

    name: str
    workload: str
    words: str
    setting: BenchSetting
    seconds_per_round: float
    rounds_per_second: float
    local_steps_per_second: float
    operations: float
    bytes: float
    operations_per_second: float
    bytes_per_second: float
    floor_seconds: float
    share_of_operations: float
    share_of_bytes: float
    compile_seconds: float
    host_peak_bytes: int
    device_peak_bytes: int | None
    mean_wave: float | None  # mean number of events trained together, for asynchronous settings
    turns: int
    peers: list[PeerRecord]


@dataclass(frozen=True, config=_KNOWN)
class StartRecord:
    """Seconds from process start to the first round on the default digits, with an empty and a filled cache."""

    first: list[float]
    second: list[float]


@dataclass(frozen=True, config=_KNOWN)
class BenchRecord:
    """One run of the benchmark."""

    version: str
    started: str
    command: str
    seconds: float
    load: float  # load average over the preceding minute
    note: str
    machine: MachineRecord
    rows: list[RowRecord]
    start: StartRecord | None = None


BENCH = TypeAdapter(BenchRecord)
