"""Studies as tasks of a Ray cluster: a head and one more node on this machine, killed and continued."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from personax.cluster.jobs import JobRecord, write_record
from personax.cluster.study import Launched
from personax.experiment.folders import Folder
from tests.cluster.studies import (
    LONG,
    SHORT,
    Place,
    Typed,
    assert_same,
    kill,
    running_worker,
    saved_worker,
    wait_for,
)

RAY = str(Path(sys.executable).with_name("ray"))


class Cluster:
    """A Ray head without room for jobs, and nodes with room for one job each."""

    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.folder, self.nodes = folder, []
        self.begin("--head", f"--port={self.address.split(':')[1]}", f"--temp-dir={folder}", num_cpus=0)

    def begin(self, *words, num_cpus):
        command = [RAY, "start", *words, f"--num-cpus={num_cpus}", "--node-ip-address=127.0.0.1", "--block"]
        command += ["--disable-usage-stats", "--include-dashboard=false"] if "--head" in words else []
        log = self.folder / f"node-{len(self.nodes)}.log"
        with log.open("w") as file:
            node = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        self.nodes.append(node)
        wait_for(lambda: "Ray runtime started" in log.read_text())
        return node

    def add(self):
        """A node with room for one job."""
        return self.begin(f"--address={self.address}", num_cpus=1)

    def kill(self, node):
        """Kill a node with everything that runs on it, as a power cut does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()

    def close(self):
        for node in reversed(self.nodes):
            self.kill(node)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    opened = Cluster(tmp_path_factory.mktemp("r"))
    opened.add()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def plain(place):
    return place.plain("long", **LONG)


def begin(place, cluster, out):
    words = ["--out", out, "--launcher", "ray", "--address", cluster.address]
    return place.start("compare", place.root / "long.toml", *words)


def test_a_worker_that_is_killed_continues_from_its_checkpoint(place, plain, cluster):
    coordinator = begin(place, cluster, "worker")
    _, pid = wait_for(lambda: saved_worker(place.root / "worker"), coordinator=coordinator)
    kill(pid)
    coordinator.finish()
    assert_same(place.root / "worker", plain)


def test_jobs_of_a_node_that_is_killed_continue_on_another(place, plain, cluster):
    node = cluster.nodes[-1]
    coordinator = begin(place, cluster, "node")
    wait_for(lambda: saved_worker(place.root / "node"), coordinator=coordinator)
    cluster.kill(node)
    cluster.add()
    coordinator.finish()
    assert_same(place.root / "node", plain)


def test_jobs_survive_the_coordinator(place, plain, cluster):
    root = place.root / "survived"
    coordinator = begin(place, cluster, "survived")
    _, worker = wait_for(lambda: running_worker(root), coordinator=coordinator)
    coordinator.kill()
    os.kill(worker, 0)  # still running
    rows = json.loads(place.run("status", "survived", "--json"))
    assert {row["state"] for row in rows} <= {"waiting", "running", "finished"}
    place.run("resume", "survived")
    assert_same(root, plain)


def actors(cluster):
    """The names of the actors that are alive in a cluster."""
    program = "import ray, sys; ray.init(sys.argv[1], logging_level='ERROR'); from ray.util import list_named_actors; "
    program += "print('actors:', *(one['name'] for one in list_named_actors(all_namespaces=True)))"
    asked = subprocess.run([sys.executable, "-c", program, cluster.address], capture_output=True, text=True, check=True)
    return asked.stdout.partition("actors:")[2].split()


def test_ctrl_c_cancels_jobs_and_leaves_nothing_in_the_cluster(place, plain, cluster):
    root = place.root / "canceled"
    words = ["compare", place.root / "long.toml", "--out", root, "--launcher", "ray", "--address", cluster.address]
    terminal = Typed(place, *words)
    _, worker = wait_for(lambda: saved_worker(root), coordinator=terminal.command)
    terminal.type("\x03")
    terminal.wait_for("Leave them running?")
    os.kill(worker, 0)
    assert actors(cluster)
    terminal.type("n\n")
    assert "Jobs canceled. Completed work is kept." in terminal.finish(130)
    assert not actors(cluster)
    place.run("resume", root)
    assert_same(root, plain)


def test_jobs_that_fail_leave_nothing_in_the_cluster(place, cluster):
    config = place.write("bad", **SHORT)
    config.write_text('on_nonfinite = "raise"\n' + config.read_text() + "lr = 1e308\nnum_steps = 30\n")
    words = ["--out", "bad", "--launcher", "ray", "--address", cluster.address]
    assert "APFL: NonFiniteUpdate" in place.run("compare", config, *words, status=1)
    assert not actors(cluster)


def test_status_without_the_cluster_shows_the_last_reports(place, plain, cluster):
    root = place.root / "away"
    jobs = Folder(root).jobs
    jobs.mkdir(parents=True)
    launched = Launched("ray", "127.0.0.1:1", {}, None, "train", "2026", ["APFL"], ids={"APFL": "study"})
    (jobs / "launched.json").write_bytes(TypeAdapter(Launched).dump_json(launched))
    write_record(root, JobRecord("APFL", host="there", pid=1, done=5, total=10))
    said = place.run("status", root)
    assert "There is no Ray cluster at 127.0.0.1:1" in said and "Showing the last reports" in said
    [row] = json.loads(place.run("status", root, "--json").splitlines()[-1])
    assert (row["state"], row["progress"]) == ("running", "5/10")


def test_a_cluster_that_is_not_there_is_one_message(place, plain):
    words = ["--launcher", "ray", "--address", "127.0.0.1:1"]
    said = place.run("compare", place.root / "long.toml", "--out", "nowhere", *words, status=1)
    assert "There is no Ray cluster at 127.0.0.1:1" in said and "Traceback" not in said
