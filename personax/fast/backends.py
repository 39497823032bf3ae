"""Every decision that depends on the backend, as a named function. No other module asks which backend runs.

A test requests another backend with `pretend("gpu")`.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax

# Model size in bytes beyond which a CPU's caches hold only one model. Measured: 784-150-100-10 is faster under `vmap`,
# 784-200-200-10 and `cnn3` sequentially. The same bound holds for all models of a wave: with ten clients, seeds of
# 64-64-10 are as fast together, and seeds of 784-20-10 are faster sequentially.
LARGE_MODEL = 600_000
CPU_WAVE_WIDTH = 16  # measured: 24 or more are slower for every model because caches overflow
CPU_WAVE_OVERHEAD = 2.0
LAUNCH_OPERATIONS = 2.4e8  # operations that an H200 can do in the time it takes to launch the kernels of one gradient
UNROLLED_ARRIVALS = 8  # measured: 20 take 8 s longer to compile

_PRETENDED: ContextVar[str | None] = ContextVar("pretended backend", default=None)


def backend() -> str:
    """Return the name of the backend: "cpu", "gpu" or "tpu"."""
    return _PRETENDED.get() or jax.default_backend()


@contextlib.contextmanager
def pretend(name: str) -> Iterator[None]:
    """Make the decisions of another backend, for tests. Programs still run on the real one.

    Decisions are part of a traced program: call `jax.clear_caches()` where a function was traced before.

    >>> with pretend("gpu"):
    ...     unroll_length(8)
    8
    """
    token = _PRETENDED.set(name)
    try:
        yield
    finally:
        _PRETENDED.reset(token)


def _on_cpu() -> bool:
    return backend() == "cpu"


def unroll_length(num_steps: int) -> int:
    """Return how far to unroll a loop over inner steps: short loops fully, which saves copies of the model.

    A GPU runs one small kernel after another, so longer loops are worth the compilation time there.
    """
    return num_steps if num_steps <= (3 if _on_cpu() else 8) else 1


def unrolled_arrivals() -> int:
    """Return the number of arrivals to apply per loop iteration: an accelerator fuses their kernels."""
    return 1 if _on_cpu() else UNROLLED_ARRIVALS


def reads_batches_together() -> bool:
    """Return True to gather all batches of a step at once and convert them inside each product.

    On an accelerator, separating and converting them would be extra kernels that every product waits for.
    """
    return _on_cpu()


def holds_one_model(num_bytes: int, largest_array: Callable[[], int] = lambda: 0) -> bool:
    """Return True if models of this size should be trained sequentially: on a CPU whose caches hold only one.

    `largest_array` gives the bytes of the largest array of one model's gradient, such as the patches of a convolution.
    """
    return _on_cpu() and (num_bytes > LARGE_MODEL or largest_array() > LARGE_MODEL)


def wave_width() -> float:
    """The largest useful number of clients in an asynchronous wave."""
    return CPU_WAVE_WIDTH if _on_cpu() else float("inf")


def wave_overhead(count_operations: Callable[[], int]) -> float:
    """The fixed cost of a wave, in units of its members' cost: on an accelerator, the launches of many small kernels.

    `count_operations` counts those of one member's gradient, which takes time and is not needed on a CPU.
    """
    return CPU_WAVE_OVERHEAD if _on_cpu() else LAUNCH_OPERATIONS / max(count_operations(), 1)


def saves_multiplications() -> bool:
    """Return True if a convolution should save multiplications rather than memory traffic."""
    return _on_cpu()


def runs_side_by_side() -> bool:
    """Return True if independent runs gain from sharing the device, which one run alone would leave idle."""
    return not _on_cpu()


def has_tf32() -> bool:
    """Return True if matrix products can take TF32 factors."""
    return not _on_cpu()


def has_device_memory() -> bool:
    """Return True if the device has its own memory, separate from the host's."""
    return not _on_cpu()


def peak_sizes() -> tuple[int, int]:
    """Side of the matrix and number of floats with which the peak speed of this machine is measured."""
    return (2048, 2**25) if _on_cpu() else (8192, 2**30)
