"""Execution and monitoring of a run: the options of `simulate` that do not define the run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from personax.fast.passes import Passes
from personax.fast.precision import Precision, require_precision
from personax.simulation.averages import Tracker
from personax.simulation.control import Control
from personax.simulation.results import Snapshot
from personax.simulation.stream import Stream
from personax.values import require_count, require_one_of


@dataclass(frozen=True)
class Execution:
    """Settings for executing a run. Apart from rounding, its numbers do not depend on them.

    Args:
        cohort_chunk: the number of clients that train at the same time on each device. The default is all of them, or
            one if the model is large for a CPU.
        wave_width: the largest number of clients in an asynchronous wave. By default, the width with the lowest
            estimated cost.
        on_nonfinite: "raise" raises `NonFiniteUpdate` for an update that is not finite; "skip" skips and counts it.
        stream: keeps data and personal states on the host and moves only those of the next waves to the device. A
            memory-mapped federation is always streamed. (docs/scale.md)
        devices: the devices among which the members of each wave are divided.
        precision: the precision of the clients' matrix products. "bf16" and "tf32" accumulate in float32.
        passes: "all" rewrites the task's programs for speed, with the same results up to rounding
            (docs/performance.md); "none" runs them unchanged.

    >>> Execution(wave_width=4).on_nonfinite
    'raise'
    """

    cohort_chunk: int | None = None
    wave_width: int | None = None
    on_nonfinite: Literal["raise", "skip"] = "raise"
    stream: Stream | None = None
    devices: Sequence[Any] | None = None
    precision: Precision = "default"
    passes: Passes = "all"

    def __post_init__(self) -> None:
        require_count("cohort_chunk", self.cohort_chunk)
        require_count("wave_width", self.wave_width)
        require_one_of("on_nonfinite", self.on_nonfinite, ("raise", "skip"))
        if self.devices is not None and not len(self.devices):
            raise ValueError("`devices` is empty. Give `jax.devices()`, or omit it.")
        require_precision(self.precision)
        require_one_of("passes", self.passes, ("all", "none"))


@dataclass(frozen=True)
class Monitor:
    """Callbacks and trackers that observe a run.

    Args:
        observe: called with a snapshot before the first event, then every `every` rounds (without rounds: at the next
            wave after every `every` events) and at the end. Its results are collected in `result.history`.
        every: the number of rounds or events between calls. By default, only the first and the last call are made.
        tracker: an observer of local iterates, such as `RandomIterate()`.
        until: called with a snapshot before the first event and at each pause. If it returns True, the run ends there.
        control: a controller that may end the run, seed by seed, or choose the next cohort (docs/devices.md).

    >>> Monitor(every=10).every
    10
    """

    observe: Callable[[Snapshot], Any] | None = None
    every: int | None = None
    tracker: Tracker | None = None
    until: Callable[[Snapshot], bool] | None = None
    control: Control | None = None

    def __post_init__(self) -> None:
        require_count("every", self.every)
