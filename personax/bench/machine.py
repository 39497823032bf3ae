"""What the machine can do at best: the largest matrix product and the largest copy, measured."""

import os
import platform
import resource
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from personax.bench.record import MachineRecord
from personax.summarise import machine

REPEATS = 10


def measure_machine() -> MachineRecord:
    """The machine in words, and its peaks at JAX's default precision."""
    named = machine()
    on_cpu = jax.default_backend() == "cpu"
    matrix = jax.random.normal(jax.random.key(0), (2048, 2048) if on_cpu else (8192, 8192))
    numbers = jnp.zeros(2**26 if on_cpu else 2**30)
    product = best_of(jax.jit(jnp.matmul), matrix, matrix)
    copy = best_of(jax.jit(lambda array: array + 1), numbers)
    return MachineRecord(
        device=named["device"],
        backend=jax.default_backend(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        system=platform.platform(terse=True),
        python=platform.python_version(),
        jax=jax.__version__,
        precision=jax.config.jax_default_matmul_precision or "default",  # pyright: ignore[reportAttributeAccessIssue]
        operations_per_second=2 * matrix.shape[0] ** 3 / product,
        bytes_per_second=2 * numbers.nbytes / copy,
    )


def best_of(function: Callable[..., jax.Array], *arguments: jax.Array) -> float:
    """Seconds of the fastest of several calls."""
    function(*arguments).block_until_ready()
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        function(*arguments).block_until_ready()
        times.append(time.perf_counter() - begin)
    return min(times)


def host_peak() -> int:
    """The most bytes that this process has held in memory."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def device_peak() -> int | None:
    """The most bytes that this process has held on its accelerator; None where there is none."""
    held = jax.devices()[0].memory_stats()
    return held.get("peak_bytes_in_use") if held and jax.default_backend() != "cpu" else None
