"""The members of a wave divided among devices: the same numbers as on one, in one process and in two."""

import os
import socket
import subprocess
import sys

import pytest

RUN = """
import json, os, sys
import jax
jax.config.update("jax_enable_x64", True)
if len(sys.argv) > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import numpy as np
import personax as px
from tests.recipes import RECIPES
from tests.simulation.options import grouped
from tests.test_contract import FED, TASK, assert_close, end, schedule_for

assert jax.device_count() == 8, jax.devices()
seeds = jax.random.split(jax.random.key(0), 2)
cases = [
    ("scaffold_async", {}),
    ("per_fedavg_hf", {"cohort_chunk": 1}),
    ("pfedme", {"stream": px.Stream()}),
    ("apfl", {"key": seeds, "schedule": [schedule_for("apfl", seed) for seed in (0, 1)]}),
]
cases = [case for case in cases if case[0] in os.environ["CASES"].split()]
local = lambda tree: jax.tree.map(np.asarray, tree)
for name, options in cases:
    options = {"key": jax.random.key(0), "schedule": schedule_for(name), **options}
    schedule = options.pop("schedule")
    run = lambda **more: px.simulate(
        RECIPES[name](1.0), TASK, FED, schedule, **grouped(wave_width=4, **{**options, **more})
    )
    snapshots = []
    many = run(devices=jax.devices(), every=6, observe=snapshots.append)
    resumed = run(devices=jax.devices(), start=snapshots[1])
    one = run(cohort_chunk=None)
    assert len(jax.tree.leaves(many.params)[0].sharding.device_set) == 8
    assert_close(local(end(one)), local(end(many)), rtol=1e-10)
    assert_close(local(end(one)), local(end(resumed)), rtol=1e-10)
    score = lambda result: px.evaluate(
        RECIPES[name](1.0), TASK, FED, result, px.Scoring("adapted", num_steps=2), key=jax.random.key(1)
    )
    assert_close(score(one).metrics, score(many).metrics, rtol=1e-10)
    print(name, "agrees")
"""


ALL = ["scaffold_async", "per_fedavg_hf", "pfedme", "apfl"]


def start(num_devices, names, *arguments):
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    environment = {**os.environ, "XLA_FLAGS": f"{flags} {os.environ['XLA_FLAGS']}", "JAX_PLATFORMS": "cpu"}
    environment["CASES"] = " ".join(names)
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process, names):
    out, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors[-3000:]
    assert [line.split()[0] for line in out.splitlines() if line.endswith(" agrees")] == names


@pytest.mark.parametrize("names", [["scaffold_async", "apfl"], pytest.param(ALL, marks=pytest.mark.slow)], ids=len)
def test_eight_devices_equal_one(names):
    finish(start(8, names), names)


@pytest.mark.slow
def test_two_processes_of_four_devices_equal_one():
    names = ["pfedme", "apfl"]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for process in [start(4, names, port, number) for number in range(2)]:
        finish(process, names)
