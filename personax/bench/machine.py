"""What the machine can do at best: the largest matrix product and the largest copy, measured."""

import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from personax.bench.record import MachineRecord
from personax.experiment.summaries import machine
from personax.fast.backends import backend, has_device_memory, peak_sizes

REPEATS = 3


def measure_machine() -> MachineRecord:
    """The machine in words, and its peaks at JAX's default precision."""
    peaks = Peaks()
    found = [peaks.measure() for _ in range(REPEATS)]
    return MachineRecord(
        device=machine()["device"],
        backend=backend(),
        cores=num_cores(),
        system=platform.platform(terse=True),
        python=platform.python_version(),
        jax=jax.__version__,
        precision=jax.config.jax_default_matmul_precision or "default",  # pyright: ignore[reportAttributeAccessIssue]
        **{name: max(one[name] for one in found) for name in found[0]},
    )


def num_cores() -> int:
    """Of this process's CPU."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Peaks:
    """A large matrix product and a large copy, ready to be timed."""

    def __init__(self) -> None:
        side, num_floats = peak_sizes()
        self.matrix = jax.random.normal(jax.random.key(0), (side, side))
        self.numbers = jnp.zeros(num_floats)
        self.product, self.copy = jax.jit(jnp.matmul), jax.jit(lambda array: array + 1)
        self.measure()

    def measure(self) -> dict[str, float]:
        """Operations and bytes a second, the best of a few."""
        product = best_of(lambda: self.product(self.matrix, self.matrix))
        copy = best_of(lambda: self.copy(self.numbers))
        operations = 2 * self.matrix.shape[0] ** 3 / product
        return {"operations_per_second": operations, "bytes_per_second": 2 * self.numbers.nbytes / copy}


def best_of(function: Callable[[], jax.Array]) -> float:
    """Seconds of the fastest of several calls."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        function().block_until_ready()
        times.append(time.perf_counter() - begin)
    return min(times)


def host_peak() -> int:
    """The most bytes that this process has held in memory."""
    if sys.platform == "linux":  # where the other figure begins with what the parent held
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def device_peak() -> int | None:
    """The most bytes that this process has held on its accelerator; None where there is none."""
    held = jax.devices()[0].memory_stats()
    return held.get("peak_bytes_in_use") if held and has_device_memory() else None
