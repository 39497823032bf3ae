"""Studies as arrays of jobs on Slurm, on this machine, killed and continued."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.slurm import Slurm, can_run, free_ports
from tests.cluster.studies import (
    LONG,
    SHORT,
    Place,
    Typed,
    assert_same,
    kill,
    records,
    running_worker,
    saved_worker,
    wait_for,
)

pytestmark = pytest.mark.skipif(
    not can_run(), reason="Slurm is not installed or this user is not root. As root: apt-get install -y slurm-wlm munge"
)


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
    coordinator = begin(place, "worker")
    name, pid = wait_for(lambda: saved_worker(place.root / "worker"), coordinator=coordinator)
    kill(pid)
    assert f"{name} died" in coordinator.finish()
    assert_same(place.root / "worker", plain)


def test_jobs_of_a_node_that_is_killed_start_again(place, plain, slurm):
    coordinator = begin(place, "node")
    wait_for(lambda: saved_worker(place.root / "node"), coordinator=coordinator)
    slurm.kill_node()
    time.sleep(2)
    slurm.begin_node()
    coordinator.finish()
    assert_same(place.root / "node", plain)


def test_a_job_whose_time_is_over_is_queued_again(place, plain, slurm):
    """The signal that Slurm sends before the limit of time; the same job continues under the same number."""
    coordinator = begin(place, "time")
    name, _ = wait_for(lambda: saved_worker(place.root / "time"), coordinator=coordinator)
    launched = json.loads((place.root / "time" / "jobs" / "launched.json").read_text())
    number = launched["ids"][name]
    slurm.ask("scancel", "--signal=USR2", number)
    coordinator.finish()
    log = (place.root / "time" / "jobs" / "log" / f"{number}_0_log.err").read_text()
    assert "Caught signal SIGUSR2" in log
    assert json.loads((place.root / "time" / "jobs" / "launched.json").read_text())["ids"] == launched["ids"]
    assert_same(place.root / "time", plain)


def test_jobs_survive_the_coordinator(place, plain):
    root = place.root / "survived"
    coordinator = begin(place, "survived", "--parallel", "1")
    _, worker = wait_for(lambda: running_worker(root), coordinator=coordinator)
    coordinator.kill()
    os.kill(worker, 0)  # still running
    rows = json.loads(place.run("status", "survived", "--json"))
    assert {row["state"] for row in rows} <= {"waiting", "running", "finished"}
    assert any(row["state"] == "waiting" for row in rows)
    place.run("resume", "survived")
    assert_same(root, plain)


def test_ctrl_c_cancels_jobs(place, plain, slurm):
    root = place.root / "canceled"
    terminal = Typed(place, "compare", place.root / "long.toml", "--out", root, "--launcher", "slurm")
    wait_for(lambda: saved_worker(root), coordinator=terminal.command)
    terminal.type("\x03")
    terminal.wait_for("Leave them running?")
    terminal.type("n\n")
    assert "Jobs canceled. Completed work is kept." in terminal.finish(130)
    assert not slurm.ask("squeue", "--noheader")
    place.run("resume", root)
    assert_same(root, plain)


def test_jobs_survive_an_outage_of_the_controller(place, plain, slurm):
    """Without an answer nothing is known about the jobs: they are neither reset nor submitted twice."""
    root = place.root / "outage"
    coordinator = begin(place, "outage")
    wait_for(lambda: running_worker(root), coordinator=coordinator)
    ids = json.loads((root / "jobs" / "launched.json").read_text())["ids"]
    slurm.kill_controller()
    wait_for(lambda: "squeue failed" in coordinator.said(), coordinator=coordinator)
    coordinator.kill()
    before = {name: record["began"] for name, record in records(root).items()}
    assert "squeue failed" in place.run("resume", root, status=1)
    said = place.run("status", root)
    assert "Showing the last reports of the jobs" in said and "waiting" in said and "killed" not in said
    slurm.begin_controller()
    place.run("resume", root)
    assert json.loads((root / "jobs" / "launched.json").read_text())["ids"] == ids
    assert {name: records(root)[name]["began"] for name, began in before.items() if began} == {
        name: began for name, began in before.items() if began
    }
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
