"""The expected speed of a program on this machine, and the primitive that slows it down."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core

from personax.fast.flops import operations_of_equation
from personax.fast.programs import bind

REPEATS = 3
OVERHEAD = 5e-6  # seconds that even the smallest equation takes
MOST_TIMED = 8  # equations to time, each of which is compiled


class Peaks:
    """A compiled large matrix product and large copy, ready to be timed."""

    def __init__(self, side: int, num_floats: int) -> None:
        self.matrix = jax.random.normal(jax.random.key(0), (side, side))
        self.numbers = jnp.zeros(num_floats)
        self.product, self.copy = jax.jit(jnp.matmul), jax.jit(lambda array: array + 1)
        self.measure()

    def measure(self) -> dict[str, float]:
        """Measure operations and bytes per second, the best of a few runs."""
        product = best_of(lambda: self.product(self.matrix, self.matrix))
        copy = best_of(lambda: self.copy(self.numbers))
        operations = 2 * self.matrix.shape[0] ** 3 / product
        return {"operations_per_second": operations, "bytes_per_second": 2 * self.numbers.nbytes / copy}


def best_of(function: Callable[[], Any]) -> float:
    """Return the time of the fastest of several calls, in seconds."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - begin)
    return min(times)


@functools.cache
def quick_peaks() -> dict[str, float]:
    """Return the peaks of this machine, measured once per process with small arrays."""
    return Peaks(1024, 2**22).measure()


class Slowest(NamedTuple):
    """The primitive that takes the most time in a program, and its share of the timed equations."""

    primitive: str
    share: float


def expected_seconds(jaxpr: Any) -> float:
    """Estimate the time of a program from its arithmetic and the arrays that it reads and writes."""
    return sum(times * (_work(equation) + OVERHEAD) for equation, times in _equations(jaxpr))


def slowest_primitive(jaxpr: Any, num_members: int) -> Slowest | None:
    """Time the largest equations of a program separately, for several clients and inside a loop, as they run.

    Returns None if nothing can be timed.
    """
    counts: dict[str, list[Any]] = {}
    for equation, times in _equations(jaxpr):
        counts.setdefault(_signature(equation), [equation, 0])[1] += times
    largest = sorted(counts.values(), key=lambda entry: -entry[1] * _work(entry[0]))[:MOST_TIMED]
    spent: dict[str, float] = {}
    for equation, times in largest:
        name = equation.primitive.name
        spent[name] = spent.get(name, 0.0) + times * seconds_of(equation, num_members)
    if not any(spent.values()):
        return None
    name = max(spent, key=lambda name: spent[name])
    return Slowest(name, spent[name] / sum(spent.values()))


def _equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield the equations that compute something with their number of runs; a `while` counts as one pass."""
    for equation in jaxpr.eqns:
        inner = list(core.jaxprs_in_params(equation.params))
        for program in inner:
            yield from _equations(program, times * equation.params.get("length", 1))
        if not inner:
            yield equation, times


def _work(equation: Any) -> float:
    """Estimate the time of an equation without its overhead."""
    peaks = quick_peaks()
    atoms = [*equation.invars, *equation.outvars]
    num_bytes = sum(atom.aval.size * atom.aval.dtype.itemsize for atom in atoms if hasattr(atom.aval, "dtype"))
    by_operations = operations_of_equation(equation) / peaks["operations_per_second"]
    return max(by_operations, num_bytes / peaks["bytes_per_second"])


def _signature(equation: Any) -> str:
    return f"{equation.primitive.name} {[atom.aval for atom in equation.invars]} {equation.params}"


def seconds_of(equation: Any, num_members: int) -> float:
    """Measure the time of an equation on random numbers, per member; 0 if it has no numeric operands."""
    inputs = [atom.aval for atom in equation.invars if not isinstance(atom, core.Literal)]
    if equation.effects or not inputs or not all(jnp.issubdtype(aval.dtype, jnp.floating) for aval in inputs[:1]):
        return 0.0
    keys = jax.random.split(jax.random.key(0), len(inputs))
    if any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in inputs):
        return 0.0
    given = [_random(key, (num_members, *aval.shape), aval.dtype) for key, aval in zip(keys, inputs, strict=True)]

    def once(values: list[Array]) -> Array:
        own = iter(values)
        operands = [atom.val if isinstance(atom, core.Literal) else next(own) for atom in equation.invars]
        return jax.lax.optimization_barrier(bind(equation, operands))[0]

    def step(shift: Array, _: None) -> tuple[Array, None]:
        # The first operand depends on the previous step, so that nothing is hoisted out of the loop.
        result = jax.vmap(once)([given[0] + shift.astype(given[0].dtype), *given[1:]])
        return jnp.zeros_like(shift) * result.ravel()[0].astype(shift.dtype), None

    run = jax.jit(lambda: jax.lax.scan(step, jnp.zeros(()), length=3)[0])
    jax.block_until_ready(run())
    return best_of(run) / 3 / num_members


def _random(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.random.uniform(key, shape, dtype)
    return jnp.zeros(shape, dtype)
