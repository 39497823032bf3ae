"""Speed and memory beside a bare echo; what is asserted is a floor, `benchmarks/live.py` has the numbers."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[1] / "benchmarks" / "live.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("live_benchmark", PATH)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("size, floor", [("280 KB", 0.25), ("10 MB", 0.5)])
def test_a_server_keeps_up_with_a_bare_echo(benchmark, size, floor):
    found = benchmark.measure(benchmark.SIZES[size], 1.5, 4)
    assert found["ratio"] >= floor, found


@pytest.mark.slow
def test_a_thousand_clients_fit_into_a_gigabyte(benchmark):
    found = benchmark.measure_crowd(1000)
    assert found["connected"] == 1000 and found["most"] < 1e9, found
