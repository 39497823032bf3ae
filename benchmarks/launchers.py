"""A study of 24 jobs with each launcher against the plain loop: overhead beyond startup and compilation.

`python benchmarks/launchers.py` runs `personax compare` in one process, then with `--launcher local`, and with `ray`
and `slurm` if there are clusters (`--address`, SLURM_CONF), each with a separate compilation cache. To start Slurm's
daemons for the benchmark: `python -m tests.cluster.slurm python benchmarks/launchers.py`.

Startup is measured, not inferred: the time from the start of a job's process, or from the moment its slot is free if
that is later (Ray starts processes in advance), until it reports that training begins. Everything else that a job does,
from locks and checkpoints to writing and merging, and the time between jobs count as overhead. With S slots,

    overhead = (wall - (startup + compilation) / S) / (wall - startup - compilation of the plain loop) - 1

where startup and compilation are sums over jobs, and the coordinator's own startup is added to the first.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

POLL = 0.1  # seconds
CONFIG = """
name = "launchers"
seeds = 3
[partition]
kind = "classes_per_client"
num_clients = 66
num_classes_each = 4
[schedule]
num_rounds = {rounds}
cohort_size = 10
[evaluation]
every = {every}
adaptation_steps = []
[local]
num_steps = 5
batch_size = 10
"""
ENTRY = """
[algorithms."FedAvg {number}"]
recipe = "fedavg"
lr = {lr}
"""


class Times(NamedTuple):
    """When a job's process started, began to train, and reported its end: seconds since 1970."""

    process: float
    training: float
    end: float


class Observer(threading.Thread):
    """Reads the reports of jobs while they run, and the start times of their processes from the system."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.has_ended = folder, threading.Event()
        self.processes: dict[int, float] = {}
        self.training: dict[str, float] = {}

    def run(self) -> None:
        while not self.has_ended.wait(POLL):
            for record in self.records():
                if record["pid"] not in self.processes and record["pid"]:
                    self.processes[record["pid"]] = started(record["pid"]) or record["began"]
                if record["total"] and record["state"] == "running":
                    self.training.setdefault(record["name"], time.time())

    def records(self) -> list[dict]:
        paths = (path for path in (self.folder / "jobs").glob("*.json") if path.name != "launched.json")
        return [json.loads(path.read_bytes()) for path in paths]

    def times(self) -> list[Times]:
        """Return the times of all jobs, after the end of the study."""
        return [
            Times(self.processes[record["pid"]], self.training[record["name"]], record["updated"])
            for record in self.records()
        ]


def started(pid: int) -> float | None:
    """Return the time at which a process of this machine, or submitit's controller of it, started (Linux)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if b"submitit.local" in Path(f"/proc/{fields[1]}/cmdline").read_bytes():
            return started(int(fields[1]))
    except FileNotFoundError:
        return None
    booted = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    return booted + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def startup_of(times: list[Times], num_slots: int, first: float) -> float:
    """Sum the startup of jobs; `first` is when the study began, and with it the first jobs' slots."""
    free, total = [first] * num_slots, 0.0
    for job in sorted(times, key=lambda job: job.training):
        slot = min(range(num_slots), key=lambda slot: free[slot])
        begin = free[slot] if free[slot] == first else max(job.process, free[slot])  # the coordinator starts first
        total += job.training - begin
        free[slot] = job.end
    return total


def measure(place: Path, name: str, words: list[str], num_slots: int) -> dict[str, float]:
    """Run the study once, and return seconds by activity; startup and compilation are divided by the slots."""
    environment = {**os.environ, "PERSONAX_COMPILED": str(place / f"compiled-{name}")}
    personax = str(Path(sys.executable).with_name("personax"))
    command = [personax, "compare", str(place / "study.toml"), "--out", str(place / name), *words]
    observer, first = Observer(place / name), time.time()
    observer.start()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    began = 0.0
    while process.poll() is None:
        if not began and (place / name / "metrics.jsonl").exists():
            began = time.time()  # the plain loop creates this file just before it trains
        time.sleep(POLL)
    wall = time.time() - first
    observer.has_ended.set()
    observer.join()
    assert process.returncode == 0, command
    algorithms = json.loads((place / name / "results.json").read_text())["algorithms"]
    spent = {what: sum(one["seconds"][what] for one in algorithms) for what in ("compile", "train", "evaluate")}
    startup = startup_of(observer.times(), num_slots, first) if words else began - first
    return {
        "wall": wall,
        "startup": startup / num_slots,
        "compile": spent["compile"] / num_slots,
        "work": (spent["train"] + spent["evaluate"]) / num_slots,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--slots", type=int, default=2, help="concurrent jobs")
    parser.add_argument("--address", help="of a Ray cluster with room for that many jobs")
    options = parser.parse_args()
    launchers = {"plain": [], "local": ["--launcher", "local"]}
    if options.address:
        launchers["ray"] = ["--launcher", "ray", "--address", options.address]
    if shutil.which("sbatch") and os.environ.get("SLURM_CONF"):
        launchers["slurm"] = ["--launcher", "slurm"]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        entries = [ENTRY.format(number=number, lr=0.01 * (number + 1)) for number in range(options.jobs - 1)]
        text = CONFIG.format(rounds=options.rounds, every=options.rounds // 10)  # and local training
        (place / "study.toml").write_text(text + "".join(entries))
        titles = ("wall s", "startup s", "compile s", "work s", "rest s")
        print(f"{'launcher':10}" + "".join(f"{title:>12}" for title in titles) + f"{'overhead':>12}")
        plain = 0.0
        for name, words in launchers.items():
            given = [*words, "--parallel", str(options.slots)] if words else []
            found = measure(place, name, given, options.slots if words else 1)
            rest = found["wall"] - found["startup"] - found["compile"]
            plain = plain or rest
            row = "".join(f"{number:12.1f}" for number in (*found.values(), rest))
            print(f"{name:10}{row}{rest / plain - 1:12.1%}", flush=True)


if __name__ == "__main__":
    main()
