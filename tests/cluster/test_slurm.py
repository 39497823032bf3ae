"""Studies as arrays of jobs on Slurm, on this machine, killed and continued."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, can_run, free_ports
from tests.cluster.studies import LONG, SHORT, Place, assert_same, kill, running_worker, saved_worker, wait_for

pytestmark = pytest.mark.skipif(not can_run(), reason="needs slurmctld, slurmd and munged, and root to start them")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    opened = Slurm(tmp_path_factory.mktemp("slurm"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory, slurm):
    return Place(tmp_path_factory.mktemp("studies"), **slurm.environment)


@pytest.fixture(scope="module")
def plain(place):
    return place.plain("long", **LONG)


def begin(place, out, *words):
    return place.start("compare", place.root / "long.toml", "--out", out, "--launcher", "slurm", *words)


def test_a_worker_that_is_killed_continues_from_its_checkpoint(place, plain):
    head = begin(place, "worker")
    name, pid = wait_for(lambda: saved_worker(place.root / "worker"), head=head)
    kill(pid)
    assert f"{name} died" in head.finish()
    assert_same(place.root / "worker", plain)


def test_jobs_of_a_node_that_is_killed_start_again(place, plain, slurm):
    head = begin(place, "node")
    wait_for(lambda: saved_worker(place.root / "node"), head=head)
    slurm.kill_node()
    time.sleep(2)
    slurm.begin_node()
    head.finish()
    assert_same(place.root / "node", plain)


def test_a_job_whose_time_is_over_is_queued_again(place, plain, slurm):
    """The signal that Slurm sends before the limit of time; the same job continues under the same number."""
    head = begin(place, "time")
    name, _ = wait_for(lambda: saved_worker(place.root / "time"), head=head)
    launched = json.loads((place.root / "time" / "jobs" / "launched.json").read_text())
    number = launched["ids"][name]
    slurm.ask("scancel", "--signal=USR2", number)
    head.finish()
    log = (place.root / "time" / "jobs" / "log" / f"{number}_0_log.err").read_text()
    assert "Caught signal SIGUSR2" in log
    assert json.loads((place.root / "time" / "jobs" / "launched.json").read_text())["ids"] == launched["ids"]
    assert_same(place.root / "time", plain)


def test_jobs_survive_the_head_of_the_study(place, plain):
    root = place.root / "head"
    head = begin(place, "head", "--parallel", "1")
    _, worker = wait_for(lambda: running_worker(root), head=head)
    head.kill()
    rows = json.loads(place.run("status", "head", "--json"))
    assert any(row["state"] == "running" and str(worker) in row["where"] for row in rows)
    assert any(row["state"] == "waiting" for row in rows)
    os.kill(worker, 0)  # still there
    place.run("resume", "head")
    assert_same(root, plain)


def test_srun_runs_one_run_in_two_processes(place, slurm):
    """`--hosts auto`: Slurm knows the processes, and their numbers are those of one process with two devices."""
    config = place.write("short", **SHORT)
    personax = str(Path(sys.executable).with_name("personax"))
    words = ["compare", str(config), "--hosts"]
    one = Place(place.root)
    one.environment |= {"JAX_NUM_CPU_DEVICES": "2"}
    one.run(*words, f"127.0.0.1:{free_ports(1)[0]},0/1", "--out", place.root / "one")
    slurm.ask("srun", "--ntasks=2", personax, *words, "auto", "--out", str(place.root / "two"))
    assert_same(place.root / "two", place.root / "one")


def test_an_option_that_slurm_does_not_have_is_one_message(place, plain):
    said = place.run(
        "compare", place.root / "long.toml", "--out", "odd", "--launcher", "slurm", "--job", "color=red", status=1
    )
    assert "color" in said and "partition" in said and "Traceback" not in said
