"""Startup time: from the start of a process to the first round on the default digits.

`python -m personax.bench.start` runs everything that `personax compare` does up to its first round, once.
"""

import importlib
import os
import subprocess
import sys
import tempfile
import time

from personax.bench.record import StartRecord

REPEATS = 3


def measure_start() -> StartRecord:
    """Measure fresh processes in pairs: one with an empty compilation cache, one with the cache of the first."""
    pairs = []
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            pairs.append([_once(folder) for _ in range(2)])
    first, second = map(list, zip(*pairs, strict=True))
    return StartRecord(first, second)


def _once(folder: str) -> float:
    """Return the seconds until a new process reports that the round is over, not counting its exit."""
    begin = time.perf_counter()
    environment = {**os.environ, "PERSONAX_COMPILED": folder}
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # because it is a pipe
        process.stdout.readline()
        seconds = time.perf_counter() - begin
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return seconds


def first_round() -> None:
    """Run the first round of the first trained algorithm of the default configuration, with all its seeds."""
    import jax

    importlib.import_module("personax.cli").set_up("compare")  # the command line imports this too
    from personax.experiment.build import resolve
    from personax.experiment.config import load
    from personax.experiment.runs import prepare
    from personax.simulation.simulate import run_plan

    work = prepare(resolve(load(None, ["schedule.num_rounds=1"]), baselines=True))
    training = next(one for one in work.plan.trainings if one.algorithm.objective.federated)
    jax.block_until_ready(run_plan(work.runs[training.name]).params)


if __name__ == "__main__":
    first_round()
    print("The first round is over.", flush=True)
