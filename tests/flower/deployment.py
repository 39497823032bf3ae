"""A Flower deployment on this machine: a SuperLink, SuperNodes, and apps that `personax flower init` writes."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from personax.data.datasets import synthetic
from personax.data.federation import Federation
from personax.experiment.checkpoint import read_model
from personax.experiment.config import load
from personax.experiment.folders import Folder
from personax.flower.template import write_app
from personax.live.journal import read_lines
from personax.live.server import choose

NAMES = ("anna", "bert", "cleo")
MADE = synthetic(0.5, 0.5, num_clients=3, num_features=4, num_classes=3, num_samples=20, key=jax.random.key(7))
CLIENTS, TESTS = ([(x.astype(np.float32), y) for x, y in map(of, range(3))] for of in (MADE.client, MADE.client_test))
FEDERATION = Federation.from_clients(CLIENTS, TESTS)  # as files of samples are read
RECIPE = """
name = "parity"
seeds = [3]
[data]
kind = "file"
path = "on the nodes"
[live.sample]
shape = [4]
num_outputs = 3
[model]
kind = "logistic_regression"
[schedule]
num_rounds = {num_rounds}
cohort_size = {num_clients}
[local]
lr = 0.1
num_steps = 2
batch_size = 8
[algorithms.FedAvg]
recipe = "fedavg"
[algorithms."Per-FedAvg (HF)"]
recipe = "per_fedavg"
adapt_lr = 0.1
[algorithms.APFL]
recipe = "apfl"
mix = 0.5
[algorithms."APFL, asynchronous"]
recipe = "apfl"
mix = 0.5
server = {{ kind = "asynchronous", lr = 0.5 }}
[algorithms."PersA-FL-ME"]
recipe = "persafl"
objective = {{ kind = "Moreau", strength = 1.0, prox_lr = 0.1, num_prox_steps = 3 }}
[algorithms.FedPer]
recipe = "fedper"
personal = "*.bias"
[algorithms.SCAFFOLD]
recipe = "scaffold"
server = {{ kind = "asynchronous" }}
"""
# 64 bits as in the tests, quick compilation, and Flower as on a closed network.
ENVIRONMENT = {
    "JAX_ENABLE_X64": "1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
    "OMP_NUM_THREADS": "1",
}


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Deployment:
    """Processes and their files; none of them outlives it."""

    def __init__(self, folder):
        self.folder, self.processes, self.port = Path(folder), {}, free_port()
        self.link = ("--insecure",)  # how the SuperLink is protected
        self.node = ("--insecure", "--superlink", f"127.0.0.1:{self.port}")  # how nodes reach it
        runtime = self.folder / "runtime"
        runtime.mkdir(mode=0o700)
        places = {"FLWR_HOME": str(self.folder / "home"), "XDG_RUNTIME_DIR": str(runtime)}
        self.env = {**os.environ, **ENVIRONMENT, **places}
        self.env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self.env['PATH']}"
        for i, name in enumerate(NAMES):
            (x, y), (test_x, test_y) = CLIENTS[i], TESTS[i]
            np.savez(self.folder / f"{name}.npz", x=x, y=y, test_x=test_x, test_y=test_y)
        self.connect(f'address = "127.0.0.1:{self.port}"\ninsecure = true')

    def connect(self, text):
        """Tell Flower's command line of the SuperLink."""
        place = self.folder / "home" / "config.toml"
        place.parent.mkdir(exist_ok=True)
        place.write_text(f'[superlink]\ndefault = "deployment"\n[superlink.deployment]\n{text}\n')

    def begin(self, name, *words):
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, env=self.env, cwd=self.folder, start_new_session=True
            )

    def begin_link(self):
        words = ("--port", str(self.port), "--disable-runtime-dependency-installation")
        self.begin("link", "flower-superlink", *self.link, *words)
        wait_until(lambda: listens(self.port), 60, lambda: self.log("link"))

    def begin_node(self, name, *more):
        config = f'name="{name}" client-id={NAMES.index(name)} data="{self.folder / name}.npz" idle-minutes=5'
        config += f' folder="{self.folder / "nodes" / name}"'
        self.begin(name, "flower-supernode", *self.node, "--port", str(free_port()), "--node-config", config, *more)

    def flwr(self, *words):
        ended = subprocess.run(
            ["flwr", *words], env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr + self.log("link")
        return ended.stdout

    def log(self, name):
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def kill(self, name):
        """As with kill -9; what it started notices that by itself."""
        os.kill(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()

    def close(self):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for lock in self.folder.glob("nodes/*/worker.lock"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(lock.read_text()), signal.SIGTERM)


class Run:
    """One algorithm on a deployment."""

    def __init__(self, deployment, algorithm, num_rounds, label, num_clients=3):
        self.deployment, self.algorithm, self.num_rounds = deployment, algorithm, num_rounds
        self.root, self.app = deployment.folder / f"run-{label}", deployment.folder / f"app-{label}"
        config = deployment.folder / f"{label}.toml"
        config.write_text(RECIPE.format(num_rounds=num_rounds, num_clients=num_clients))
        write_app(self.app, config, algorithm, num_clients)
        self.recipe = choose(load(config), algorithm)

    def begin(self):
        """`flwr run`; again, in a new run of Flower's, where the last ServerApp was killed."""
        given = f'out="{self.root}" outlier-factor=0.0 deadline=600.0'
        told = self.deployment.flwr("run", str(self.app), "deployment", "--run-config", given, "--format", "json")
        self.id = json.loads(told)["run-id"]

    @property
    def uploads(self):
        with contextlib.suppress(FileNotFoundError):
            return [line for line in read_lines(self.root) if line["what"] == "upload"]
        return []

    def wait_for(self, num, of=None, seconds=600):
        """Wait until this number of uploads is settled, of all clients or of one."""
        wait_until(lambda: sum(of in (None, u["client"]) for u in self.uploads) >= num, seconds, self.told)

    def wait_for_end(self, seconds=600):
        wait_until(self.model.exists, seconds, self.told)

    @property
    def model(self):
        return Folder(self.root).model(self.algorithm)

    def told(self):
        lines = "\n".join(str(upload) for upload in self.uploads)
        logs = (self.deployment.log(name) for name in ("link", *NAMES))
        return "\n".join([*logs, lines, self.deployment.flwr("log", self.id, "deployment", "--show")])

    def kill_server(self):
        """The ServerApp's process, as with kill -9."""
        os.kill(int((self.root / "server.lock").read_text()), signal.SIGKILL)

    def params(self):
        trees, _ = read_model(self.model)
        return trees["params"]

    def personal(self, name):
        """Read a client's private state from its own disk."""
        (place,) = (self.deployment.folder / "nodes" / name).glob(f"{self.run}/state")
        return place

    @property
    def run(self):
        return json.loads((self.root / "live.json").read_text())["run"]


def listens(port):
    with contextlib.suppress(OSError), contextlib.closing(socket.create_connection(("127.0.0.1", port), 2)):
        return True
    return False


def wait_until(done, seconds, told):
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, told()
        time.sleep(0.1)
