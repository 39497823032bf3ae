"""The peak speed of the machine, measured with a large matrix product and a large copy."""

import os
import platform
import resource
import sys
from pathlib import Path

import jax

from personax.bench.record import MachineRecord
from personax.experiment.summaries import machine
from personax.fast.backends import backend, has_device_memory, peak_sizes
from personax.fast.speed import REPEATS, Peaks


def measure_machine() -> MachineRecord:
    """Describe the machine, and measure its peaks at JAX's default precision."""
    peaks = Peaks(*peak_sizes())
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
    """Return the number of CPU cores of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_peak() -> int:
    """Return the peak memory of this process in bytes."""
    if sys.platform == "linux":  # where ru_maxrss includes the parent's peak
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def device_peak() -> int | None:
    """Return this process's peak accelerator memory in bytes; None without an accelerator."""
    held = jax.devices()[0].memory_stats()
    return held.get("peak_bytes_in_use") if held and has_device_memory() else None
