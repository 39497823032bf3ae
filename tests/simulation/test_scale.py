"""Larger runs: `make test-slow`."""

import subprocess
import sys

import jax
import numpy as np
import pytest

import personax
from tests.test_contract import assert_close

pytestmark = pytest.mark.slow


def many(num_clients):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, num_clients)
    data = [(rng.normal(size=(n, 8)), rng.integers(0, 4, n)) for n in sizes]
    return personax.Federation.from_clients(data)


@pytest.mark.parametrize("num_clients", [30, 300])
def test_waves_equal_sequential_training_with_hundreds_of_clients(num_clients):
    key, fed = jax.random.key(0), many(num_clients)
    task = personax.classification(personax.mlp((16,), 4))
    schedule = personax.arrivals(
        num_clients, 3000, delays=personax.delays.persafl_delays(num_clients, key=key), key=key
    )
    algorithm = personax.persafl(personax.Moreau(20.0, 0.02, 10), lr=0.02, num_steps=5, batch_size=8)
    results = [
        personax.simulate(algorithm, task, fed, schedule, key=key, execution=personax.Execution(wave_width=w))
        for w in (None, 1)
    ]
    assert_close(*((r.params, r.personal) for r in results), rtol=1e-6, atol=1e-9)


def test_a_hundred_thousand_clients_cost_what_their_cohorts_cost():
    key, fed = jax.random.key(0), many(100_000)
    task = personax.classification(personax.mlp((16,), 4))
    schedule = personax.rounds(fed.num_clients, 50, 20, key=key)
    result = personax.simulate(personax.per_fedavg(adapt_lr=0.01, lr=0.05, num_steps=5), task, fed, schedule, key=key)
    small = {position: fed.client(position) for position in np.unique(schedule.client).tolist()}
    part = personax.Federation.from_clients(list(small.values()), ids=list(small))
    moved = np.searchsorted(list(small), schedule.client).astype(np.int32)
    fields = {**vars(schedule), "client": moved, "num_clients": part.num_clients}
    same = personax.simulate(
        personax.per_fedavg(adapt_lr=0.01, lr=0.05, num_steps=5), task, part, personax.Schedule(**fields), key=key
    )
    assert_close(result.params, same.params)


READ_A_MILLION = """
import resource, time
import numpy as np
from personax import Federation

num = 10_000_000
client = np.random.default_rng(0).permutation(np.repeat(np.arange(1_000_000), 10))
x, y = np.ones((num, 8), np.float32), np.ones(num, np.int64)
data = x.nbytes + y.nbytes + client.nbytes
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10  # not its parent's, too
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
begin = time.perf_counter()
federation = Federation.from_columns(x, y, client)
seconds = time.perf_counter() - begin
assert federation.num_clients == 1_000_000 and set(federation.counts.tolist()) == {10}
print(seconds, (peak() - before + data) / data)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads its own memory from /proc")
def test_a_million_clients_from_one_array_take_seconds_and_twice_the_memory():
    done = subprocess.run([sys.executable, "-c", READ_A_MILLION], capture_output=True, text=True, check=True)
    seconds, memory = map(float, done.stdout.split())
    assert seconds < 60 and memory < 2.02, done.stdout  # some 4 s on an idle core


SCHEDULE_A_MILLION = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, numpy as np
import personax as px

num, concurrency, key = 1_000_000, int(sys.argv[1]) or None, jax.random.key(0)
begin = time.process_time()
work = px.traces.VisitWork(np.full(num, 50.0), 4e5, 4e5)
delays = px.traces.generate(num, key=key).delays(work, key=key)
schedule = px.arrivals(num, num, delays=delays, key=key, concurrency=concurrency)
seconds = time.process_time() - begin
assert schedule.num_events == num and np.all(np.diff(schedule.time) >= 0)
assert schedule.time.max() > 0 and delays.online.share < 0.9  # devices are offline for a part of the time
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
print(seconds, peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads its own memory from /proc")
@pytest.mark.parametrize("concurrency", [0, 1000])
def test_a_million_arrivals_of_a_million_devices_take_a_minute_of_one_core(concurrency):
    command = [sys.executable, "-c", SCHEDULE_A_MILLION, str(concurrency)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, memory = map(float, done.stdout.split())
    assert seconds < 60 and memory < 4e9, done.stdout


def test_a_run_along_a_million_arrivals_is_streamed(tmp_path):
    num, key = 1_000_000, jax.random.key(0)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (num, 8))
    rng = np.random.default_rng(0)
    x[:] = rng.normal(size=(num, 8)).astype(np.float32)
    x.flush()
    labels = rng.integers(0, 4, num).astype(np.uint8)
    fed = personax.Federation(np.load(tmp_path / "x.npy", mmap_mode="r"), labels, np.arange(num + 1))
    task = personax.classification(personax.logistic_regression(4))
    algorithm = personax.fedbuff(lr=0.05, buffer_size=100, num_steps=1, batch_size=1)
    devices = personax.traces.generate(num, key=key)
    delays = devices.delays(personax.work_of(algorithm, task, fed), key=key)
    schedule = personax.arrivals(num, num, delays=delays, key=key, concurrency=1000)
    result = personax.simulate(algorithm, task, fed, schedule, key=key)
    assert result.snapshot.num_events == num and int(result.num_skipped) == 0
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf) for leaf in jax.tree.leaves(result.params))
