"""Speed and memory beside a bare echo under the same TLS; `benchmarks/live.py` explains the measurements."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("live processes")
PATH = Path(__file__).parents[2] / "benchmarks" / "live.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("live_benchmark", PATH)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.slow
def test_a_server_is_not_far_from_a_bare_echo(benchmark):
    """In short turns, while other tests run: a floor."""
    found = benchmark.measure(benchmark.SIZES["280 KB"], 0.4, 4)
    assert found["ratio"] >= 0.3, found


@pytest.mark.slow
@pytest.mark.parametrize("size", ["280 KB", "10 MB"])
def test_a_server_has_seven_tenths_of_the_speed_of_a_bare_echo(benchmark, size):
    found = benchmark.measure(benchmark.SIZES[size])
    assert found["ratio"] >= 0.7, found


@pytest.mark.slow
def test_a_thousand_clients_fit_into_a_gigabyte(benchmark):
    found = benchmark.measure_crowd(1000)
    assert found["connected"] == 1000 and found["most"] < 1e9, found
