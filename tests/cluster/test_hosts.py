"""One run on several hosts: the bits of one process with as many devices, and files from the first host alone."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import personax as px
from tests.cluster.slurm import free_ports
from tests.cluster.studies import Place, assert_same

pytestmark = pytest.mark.slow
SETTINGS = {"num_rounds": 6, "every": 2, "tuned": ""}
MAPPED = """
name = "mapped"
seeds = [0, 1]
[data]
kind = "folder"
path = "mapped"
[model]
kind = "mlp"
widths = [8]
[schedule]
num_rounds = 6
cohort_size = 5
[evaluation]
every = 2
[local]
lr = 0.1
num_steps = 2
batch_size = 4
[algorithms.FedAvg]
recipe = "fedavg"
[algorithms.APFL]
recipe = "apfl"
mix = 0.5
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = Place(tmp_path_factory.mktemp("hosts"))
    made.write("synthetic", **SETTINGS)
    made.root.joinpath("mapped.toml").write_text(MAPPED)
    federation = px.datasets.synthetic(0.5, 0.5, num_clients=12, num_samples=20, key=jax.random.key(0))
    federation.save(made.root / "mapped")
    return made


def free_address():
    return f"127.0.0.1:{free_ports(1)[0]}"


def run(place, words, num_processes, num_devices, words_of_others=None):
    """Run processes that share these devices to their end; return the text that each has printed."""
    address, one = free_address(), Place(place.root)
    one.environment = {**place.environment, "JAX_NUM_CPU_DEVICES": str(num_devices // num_processes)}
    started = [
        one.start(*((number and words_of_others) or words), "--hosts", f"{address},{number}/{num_processes}")
        for number in range(num_processes)
    ]
    return [process.finish() for process in started]


@pytest.mark.parametrize("config", ["synthetic", "mapped"])
def test_two_and_four_processes_equal_one_with_as_many_devices(place, config):
    compare = lambda out: ["compare", f"{config}.toml", "--out", out]
    run(place, compare(f"{config}-1"), 1, 4)
    for num_processes in (2, 4):
        out = f"{config}-{num_processes}"
        said = run(place, compare(out), num_processes, 4, compare(f"{out}-others"))
        assert not (place.root / f"{out}-others").exists()  # only the first process writes
        assert "The results are in" in said[0] and not any("The results" in text for text in said[1:])
        assert_same(place.root / out, place.root / f"{config}-1")


def test_each_host_reads_only_the_clients_that_it_trains(place):
    address = free_address()
    command = [sys.executable, "-m", "tests.cluster.reading", str(place.root / "mapped"), address]
    environment = {**place.environment, "JAX_NUM_CPU_DEVICES": "1"}
    pipes = {"stdout": subprocess.PIPE, "text": True, "env": environment, "cwd": Path(__file__).parents[2]}
    started = [subprocess.Popen([*command, str(number)], **pipes) for number in range(2)]
    said = [process.communicate(timeout=300)[0] for process in started]
    (cohort, one), (_, other) = (json.loads(text.partition("READ ")[2]) for text in said)
    assert len(cohort) == 6 and len(one) == len(other) == 3
    assert sorted([*one, *other]) == cohort


def test_a_run_of_two_hosts_is_extended_by_resume(place):
    words = ["compare", "mapped.toml", "--out", "resumed", "--set", "schedule.num_rounds=4"]
    run(place, words, 2, 4)
    config = place.root / "resumed" / "config.toml"
    config.write_text(config.read_text().replace("num_rounds = 4", "num_rounds = 6"))
    run(place, ["resume", "resumed"], 2, 4)
    run(place, ["compare", "mapped.toml", "--out", "at-once"], 1, 4)
    assert_same(place.root / "resumed", place.root / "at-once")


def test_hosts_with_other_settings_are_refused(place):
    words = ["compare", "synthetic.toml", "--out", "other"]
    address = free_address()
    started = [
        place.start(*words, "--hosts", f"{address},{number}/2", "--set", f"local.lr=0.{number + 1}")
        for number in range(2)
    ]
    for process in started:
        assert "differ from those of process 0" in process.finish(1)
    assert not (place.root / "other" / "results.json").exists()


def test_the_numbers_are_those_of_one_device_up_to_rounding(place):
    run(place, ["compare", "mapped.toml", "--out", "many"], 2, 4)
    place.run("compare", "mapped.toml", "--out", "one")
    of = lambda name: json.loads((place.root / name / "results.json").read_text())["table"]
    means = lambda name: [row["mean"]["mean"] for row in of(name)]
    np.testing.assert_allclose(means("many"), means("one"), rtol=1e-4)
