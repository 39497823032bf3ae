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

from tests.cluster.studies import LONG, Place, assert_same, kill, running_worker, saved_worker, wait_for

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
    head = begin(place, cluster, "worker")
    _, pid = wait_for(lambda: saved_worker(place.root / "worker"), head=head)
    kill(pid)
    head.finish()
    assert_same(place.root / "worker", plain)


def test_jobs_of_a_node_that_is_killed_continue_on_another(place, plain, cluster):
    node = cluster.nodes[-1]
    head = begin(place, cluster, "node")
    wait_for(lambda: saved_worker(place.root / "node"), head=head)
    cluster.kill(node)
    cluster.add()
    head.finish()
    assert_same(place.root / "node", plain)


def test_jobs_survive_the_head_of_the_study(place, plain, cluster):
    root = place.root / "head"
    head = begin(place, cluster, "head")
    _, worker = wait_for(lambda: running_worker(root), head=head)
    head.kill()
    rows = json.loads(place.run("status", "head", "--json"))
    assert any(row["state"] == "running" and str(worker) in row["where"] for row in rows)
    os.kill(worker, 0)  # still there
    place.run("resume", "head")
    assert_same(root, plain)


def test_a_cluster_that_is_not_there_is_one_message(place, plain):
    words = ["--launcher", "ray", "--address", "127.0.0.1:1"]
    said = place.run("compare", place.root / "long.toml", "--out", "nowhere", *words, status=1)
    assert "There is no Ray cluster at 127.0.0.1:1" in said and "Traceback" not in said
