"""What `personax bench --json` writes: one `BenchRecord`. docs/benchmarks/schema.json is the same as a JSON schema."""

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from personax.bench.setting import BenchSetting

_KNOWN = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_KNOWN)
class MachineRecord:
    """Where it ran, and what it can do at best: the largest matrix product and the largest copy."""

    device: str
    backend: str
    cores: int
    system: str
    python: str
    jax: str
    precision: str  # of matrix products, as JAX names it
    operations_per_second: float
    bytes_per_second: float


@dataclass(frozen=True, config=_KNOWN)
class PeerRecord:
    """A peer on the same setting, timed in turn with ours.

    `ratio` is its time for a round over ours, the median over turns. `error` is the distance of its parameters from
    ours after the same work, relative to how far ours moved. A peer that could not run has only a `note`, which says
    why.
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

    `operations` and `bytes` are the least that a round needs, the two peaks the best that the machine did before or
    between the turns, `floor_seconds` the longer of the times that they give, and the shares what was reached of them.
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
    mean_wave: float | None  # events trained together, of asynchronous settings
    turns: int
    peers: list[PeerRecord]


@dataclass(frozen=True, config=_KNOWN)
class StartRecord:
    """Seconds from the start of a process to its first round on the default digits, with a new and a filled cache."""

    first: list[float]
    second: list[float]


@dataclass(frozen=True, config=_KNOWN)
class BenchRecord:
    """One run of the benchmark."""

    version: str
    started: str
    command: str
    seconds: float
    load: float  # processes that wanted to run on the machine, the mean over the minute before
    note: str
    machine: MachineRecord
    rows: list[RowRecord]
    start: StartRecord | None = None


BENCH = TypeAdapter(BenchRecord)
