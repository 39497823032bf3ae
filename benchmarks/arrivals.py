"""Schedules of a million clients with availability: their time and memory on one core, and a run along one.

`python benchmarks/arrivals.py` draws as many devices as clients, with hours in which each is online, and schedules as
many arrivals as there are clients: of all clients training together, and of at most 1000. Each case is a process of its
own on one core, which prints the CPU seconds of its parts and its peak memory. With `--simulate`, FedBuff with a
logistic regression then runs along the second schedule, with the data of all clients in memory-mapped files.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUMBERS = (10_000, 100_000, 1_000_000)
CONCURRENCY, SAMPLES, FEATURES, CLASSES, BUFFER = 1000, 4, 8, 4, 100


def peak() -> int:
    """Return the peak memory of this process in bytes, not of the parent, as `getrusage` would."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10


def measure(num_clients: int, concurrency: int | None, simulates: bool) -> None:
    """Print the CPU time and the memory of one schedule, and of a run along it, as JSON."""
    if not simulates:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    import jax
    import numpy as np

    import personax as px

    key, empty, marks = jax.random.key(0), peak(), [time.process_time()]
    devices = px.traces.generate(num_clients, key=key)
    work = px.traces.VisitWork(np.full(num_clients, 50.0), 4e5, 4e5)
    delays = devices.delays(work, key=key)
    marks.append(time.process_time())
    schedule = px.arrivals(num_clients, num_clients, delays=delays, key=key, concurrency=concurrency)
    marks.append(time.process_time())
    prepare, arrange = np.diff(marks).tolist()
    found = {"devices": prepare, "schedule": arrange, "memory": peak() - empty, "peak": peak()}
    found["staleness"] = float(schedule.staleness().mean())
    if simulates:
        found |= simulate(px, schedule, num_clients)
    print(json.dumps(found))


def simulate(px, schedule, num_clients: int) -> dict[str, float]:
    """Run FedBuff along a schedule, with data in files; return the CPU seconds and the peak memory."""
    import jax
    import numpy as np

    rng, rows = np.random.default_rng(0), num_clients * SAMPLES
    with tempfile.TemporaryDirectory() as folder:
        x = np.lib.format.open_memmap(Path(folder) / "x.npy", "w+", np.float32, (rows, FEATURES))
        for begin in range(0, rows, 1 << 20):
            x[begin : begin + (1 << 20)] = rng.normal(size=(min(1 << 20, rows - begin), FEATURES))
        x.flush()
        mapped = np.load(Path(folder) / "x.npy", mmap_mode="r")
        fed = px.Federation(mapped, rng.integers(0, CLASSES, rows).astype(np.uint8), np.arange(0, rows + 1, SAMPLES))
        algorithm = px.fedbuff(lr=0.05, buffer_size=BUFFER, num_steps=2, batch_size=SAMPLES)
        task, begin = px.classification(px.logistic_regression(CLASSES)), time.process_time()
        result = px.simulate(algorithm, task, fed, schedule, key=jax.random.key(1))
        jax.block_until_ready(result.params)
        return {"run": time.process_time() - begin, "run_peak": peak(), "events": int(result.snapshot.num_events)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, default=NUMBERS[-1])
    parser.add_argument("--simulate", action="store_true", help="run along the schedules with limited arrivals, too")
    parser.add_argument("--measure", nargs=3, metavar=("CLIENTS", "CONCURRENCY", "SIMULATES"))
    options = parser.parse_args()
    if options.measure:
        number, limit, simulates = map(int, options.measure)
        measure(number, limit or None, bool(simulates))
        return
    for number in (number for number in NUMBERS if number <= options.most):
        for limit in (0, CONCURRENCY):
            command = [sys.executable, __file__, "--measure", str(number), str(limit)]
            done = subprocess.run(
                [*command, str(int(options.simulate and limit > 0))], check=True, stdout=subprocess.PIPE, text=True
            )
            print(f"{number:,} clients, at most {limit or 'all'} training: {done.stdout.strip()}", flush=True)


if __name__ == "__main__":
    main()
