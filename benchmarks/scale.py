"""Measure the growth of a round's time and a process's memory from 1000 to a million clients, 100 per round.

`python benchmarks/scale.py` prints a line for each algorithm and number of clients, each measured in a process of its
own: milliseconds a round (the median over the run, and over repeats that take turns) and of processors (for machines
that do other things, too), the memory beyond that of the program before the run, the data on disk, and the states of
the clients that were visited. The federation is written to disk first and memory-mapped.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

NUMBERS = (1_000, 10_000, 100_000, 1_000_000)
SAMPLES, FEATURES, CLASSES, COHORT, STEPS = 10, 784, 10, 100, 10


def write(folder: Path, num_clients: int) -> None:
    """A federation of random images in files, written in slices."""
    import numpy as np

    rng, rows = np.random.default_rng(0), num_clients * SAMPLES
    folder.mkdir(parents=True)
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.uint8, (rows, FEATURES))
    for begin in range(0, rows, 100_000):
        x[begin : begin + 100_000] = rng.integers(0, 256, (min(100_000, rows - begin), FEATURES), np.uint8)
    np.save(folder / "y.npy", rng.integers(0, CLASSES, rows).astype(np.uint8))


def measure(name: str, folder: str, num_rounds: int) -> None:
    """Print time and memory of one algorithm on one federation, as JSON."""
    import time

    import jax
    import numpy as np

    import personax as px

    status = lambda: Path("/proc/self/status").read_text()  # what getrusage says begins with the parent's
    peak = lambda: int(status().split("VmHWM:")[1].split()[0]) << 10
    read = lambda file: np.load(Path(folder) / file, mmap_mode="r")
    y = np.array(read("y.npy"))
    fed = px.Federation(read("x.npy"), y, np.arange(0, len(y) + 1, SAMPLES))
    task = px.classification(px.mlp((80, 60), CLASSES))
    local = {"num_steps": STEPS, "batch_size": SAMPLES}
    algorithm = {"fedavg": px.fedavg(lr=0.05, **local), "apfl": px.apfl(lr=0.05, **local)}[name]
    empty, marks, key = peak(), [], jax.random.key(0)
    schedule = px.rounds(fed.num_clients, num_rounds, COHORT, key=key)

    def observe(snapshot: px.Snapshot) -> None:
        jax.block_until_ready(snapshot.params)
        marks.append((time.perf_counter(), time.process_time()))

    result = px.simulate(
        algorithm, task, fed, schedule, key=key, monitor=px.Monitor(every=num_rounds // 10, observe=observe)
    )
    visited = len(np.unique(schedule.client)) if name == "apfl" else 0
    states = visited * sum(leaf.nbytes for leaf in jax.tree.leaves(result.snapshot.personal_of(np.zeros(1, int))))
    spent = np.diff(marks, axis=0)[1:] / (num_rounds // 10)  # the first has the compilation in it
    ms, cpu_ms = (1e3 * np.median(spent, axis=0)).tolist()
    print(json.dumps({"ms": ms, "cpu_ms": cpu_ms, "memory": peak() - empty, "states": states}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most", type=int, default=NUMBERS[-1])
    parser.add_argument("--folder", default=None, help="where the data is written; by default a temporary folder")
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "FOLDER"))
    options = parser.parse_args()
    if options.measure:
        measure(*options.measure, options.rounds)
        return
    numbers = [number for number in NUMBERS if number <= options.most]
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        for number in numbers:
            write(Path(place) / str(number), number)
        cases = [(name, number) for name in ("fedavg", "apfl") for number in numbers]
        found = {case: [] for case in cases}
        for _ in range(options.repeats):
            for name, number in cases:
                command = [sys.executable, __file__, "--measure", name, str(Path(place) / str(number))]
                done = subprocess.run([*command, "--rounds", str(options.rounds)], check=True, stdout=subprocess.PIPE)
                found[name, number].append(json.loads(done.stdout))
    titles = ("clients", "ms a round", "CPU ms", "memory (MB)", "data (MB)", "states (MB)")
    print(" " * 8 + "".join(f"{title:>13}" for title in titles))
    for (name, number), runs in found.items():
        ms, cpu_ms = (sorted(run[what] for run in runs)[len(runs) // 2] for what in ("ms", "cpu_ms"))
        sizes = (max(run["memory"] for run in runs), number * SAMPLES * (FEATURES + 1), runs[0]["states"])
        print(f"{name:8}{number:13,}{ms:13.1f}{cpu_ms:13.1f}" + "".join(f"{size / 1e6:13.0f}" for size in sizes))


if __name__ == "__main__":
    main()
