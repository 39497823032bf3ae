"""The time that a program should take, and the primitive that takes it."""

import jax
import jax.numpy as jnp
import pytest

from personax.fast import speed
from personax.fast.speed import OVERHEAD, expected_seconds, slowest_primitive


def program(function, *shapes):
    return jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)).jaxpr


def test_the_expected_time_grows_with_operations_bytes_and_loops(monkeypatch):
    monkeypatch.setattr(speed, "quick_peaks", lambda: {"operations_per_second": 1e11, "bytes_per_second": 1e10})
    matmul = lambda a: a @ a
    of = lambda function, side: expected_seconds(program(function, (side, side)))
    assert of(matmul, 1024) - OVERHEAD == pytest.approx(8 * (of(matmul, 512) - OVERHEAD), rel=0.01)
    assert of(jnp.sin, 2048) - OVERHEAD == pytest.approx(4 * (of(jnp.sin, 1024) - OVERHEAD), rel=0.01)
    loop = lambda a: jax.lax.scan(lambda c, _: (c @ c, None), a, length=5)[0]
    assert of(loop, 512) == pytest.approx(5 * of(matmul, 512), rel=0.01)
    assert of(jax.jit(lambda a: jnp.sin(a @ a)), 512) == pytest.approx(of(matmul, 512) + of(jnp.sin, 512), rel=0.01)


def test_the_slowest_primitive_is_named():
    def mostly_sorting(x):
        return jnp.sum(jnp.sort(x.ravel())) + jnp.sum(jnp.tanh(x))

    found = slowest_primitive(program(mostly_sorting, (200, 200)), num_members=2)
    assert found.primitive == "sort" and 0.3 < found.share <= 1
    mostly_products = lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, length=20)[0].sum()
    assert slowest_primitive(program(mostly_products, (800, 800)), num_members=2).primitive == "dot_general"


@pytest.mark.parametrize("peaks", [(1e11, 1e10), (1e11, 1e9), (1e9, 1e10)])
def test_the_equation_with_the_most_work_is_timed_on_any_machine(peaks, monkeypatch):
    """Even if every equation of the program is so small that its overhead takes longer than its work."""
    names = ("operations_per_second", "bytes_per_second")
    monkeypatch.setattr(speed, "quick_peaks", lambda: dict(zip(names, peaks, strict=True)))
    timed = []
    monkeypatch.setattr(speed, "seconds_of", lambda equation, _: timed.append(equation.primitive.name) or 1.0)
    many_and_small = lambda x: [scale * jnp.sin(one) for scale in range(9) for one in x[:, 0]]
    slowest_primitive(program(lambda x: (jnp.cumsum(x), many_and_small(x)), (20, 20)), num_members=2)
    assert "cumsum" in timed and len(timed) == speed.MOST_TIMED


def test_a_program_without_numbers_names_nothing():
    assert slowest_primitive(program(lambda x: x, (3,)), num_members=2) is None
    random = jax.make_jaxpr(lambda key: jax.random.split(key))(jax.random.key(0)).jaxpr
    assert slowest_primitive(random, num_members=2) is None
