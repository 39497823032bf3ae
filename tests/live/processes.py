"""A live federation of processes, with faults: killed, cut off and brought back, until its journal proves the rest."""

import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import jax
import numpy as np

from personax import simulate
from personax.data.datasets import synthetic
from personax.data.federation import Federation
from personax.data.schema import Schema, numbered
from personax.experiment.build import resolve
from personax.experiment.checkpoint import read_model
from personax.experiment.config import load
from personax.experiment.folders import Folder
from personax.live import certificates
from personax.live.demo import Parts
from personax.live.journal import read_lines
from personax.live.recipe import make_recipe
from personax.schedules import Schedule

CONFIG = """
name = "faults"
seeds = [3]
[data]
kind = "file"
path = "on the clients"
[model]
kind = "logistic_regression"
[schedule]
num_rounds = {num_rounds}
cohort_size = {cohort_size}
[live]
num_clients = {num_clients}
rate = {rate}
[live.sample]
shape = [4]
num_outputs = 3
[local]
lr = 0.1
num_steps = 2
batch_size = 8
[algorithms.{algorithm}]
"""
ALGORITHMS = {
    "APFL": """recipe = "apfl"\nmix = 0.5\nserver = { kind = "asynchronous", lr = 0.5 }\n""",
    "FedAvg": """recipe = "fedavg"\n""",
    "SCAFFOLD": """recipe = "scaffold"\n""",
}


def free_port():
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Faulty:
    """Server and clients as commands, in places of their own where there are any.

    The server lets each client ask `rate` times a second: that is the pace of the run on any machine. FedAvg and
    SCAFFOLD run in rounds of all clients.
    """

    def __init__(
        self, folder, parts, names, num_updates, host="127.0.0.1", port=None, places=None, rate=10, algorithm="APFL"
    ):
        self.algorithm, self.in_rounds = algorithm, algorithm != "APFL"
        self.folder, self.parts, self.names = Path(folder), parts, names
        self.host, self.port, self.places = host, port or free_port(), places or {}
        made = synthetic(0.5, 0.5, num_clients=3, num_features=4, num_classes=3, num_samples=20, key=jax.random.key(7))
        single = lambda pair: (pair[0].astype(np.float32), pair[1])
        clients, tests = ([single(of(n)) for n in range(3)] for of in (made.client, made.client_test))
        self.federation = Federation.from_clients(clients[: len(names)], tests[: len(names)])
        rounds = {"num_rounds": num_updates // len(names), "cohort_size": '"all"'}
        rounds = rounds if self.in_rounds else {"num_rounds": num_updates, "cohort_size": 1}
        text = CONFIG.format(**rounds, num_clients=len(names), rate=rate, algorithm=algorithm)
        (self.folder / "config.toml").write_text(text + ALGORITHMS[algorithm])
        certificates.create(self.folder / "certificates", [host], names)
        for i, name in enumerate(names):
            (x, y), (test_x, test_y) = clients[i], tests[i]
            np.savez(self.folder / f"{name}.npz", x=x, y=y, test_x=test_x, test_y=test_y)

    def begin(self, name, *more):
        certified = self.folder / "certificates"
        before = self.places.get(name, ())
        if name == "server":
            words = ["serve", str(self.folder / "config.toml"), "--listen", f"{self.host}:{self.port}", "--no-view"]
            words += ["--identity", str(certified / "server"), "--out", str(self.folder / "run")]
        else:
            words = ["join", f"{self.host}:{self.port}", "--data", str(self.folder / f"{name}.npz"), "--report", "50"]
            words += ["--identity", str(certified / "clients" / name), "--folder", str(self.folder / name)]
        self.parts.begin(name, *words, *more, before=before)

    def kill(self, name):
        """As with kill -9."""
        process = self.parts.processes[name]
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def uploads(self, of=None):
        with contextlib.suppress(FileNotFoundError):
            lines = [line for line in read_lines(self.folder / "run") if line["what"] == "upload"]
            return [line for line in lines if of in (None, line["client"])]
        return []

    def wait_for(self, num, of=None, seconds=180):
        """Wait until this number of uploads is settled, of all clients or of one."""
        until = time.monotonic() + seconds
        while len(self.uploads(of)) < num:
            assert time.monotonic() < until, self.told()
            for name, process in self.parts.processes.items():
                assert process.poll() in (None, 0), f"{name} ended: {self.parts.log(name)[-1500:]}"
            time.sleep(0.02)

    def wait_for_end(self, seconds=90):
        until = time.monotonic() + seconds
        for name, process in self.parts.processes.items():
            assert process.wait(max(until - time.monotonic(), 1)) == 0, f"{name}: {self.parts.log(name)[-1500:]}"

    def told(self):
        return "\n".join(f"{name}: {self.parts.log(name)[-800:]}" for name in self.parts.processes)

    def prove(self, num_updates):
        """Nothing lost, nothing twice, and the model is what the simulator makes of the journal."""
        lines = read_lines(self.folder / "run")
        assert [line["number"] for line in lines] == list(range(1, len(lines) + 1))
        uploads = [line for line in lines if line["what"] == "upload"]
        assert len({line["upload"] for line in uploads}) == len(uploads)
        settled = [(line["client"], line["update"]) for line in uploads]
        assert len(set(settled)) == len(settled)
        applied = [line for line in uploads if line["outcome"] == "applied"]
        assert len(applied) == num_updates
        for name in self.names:  # a client's numbers follow each other: none of its updates is missing
            own = [line["update"] for line in uploads if line["client"] == name]
            assert own == list(range(len(own))), name
        flat, size = np.zeros(num_updates), len(self.names)
        started_at = np.array([line["started"] for line in applied])
        table = Schedule(
            num_clients=len(self.names),
            client=np.array([self.names.index(line["client"]) for line in applied], np.int32),
            started_at=started_at * size if self.in_rounds else started_at,
            requested=flat,
            received=flat,
            time=flat,
            aggregated=np.ones(num_updates, bool),
            round_ends=(np.arange(num_updates) % size == size - 1) & self.in_rounds,
        )
        config = resolve(load(self.folder / "config.toml"), baselines=False)
        recipe = make_recipe(config, Schema((4,), "float32", classes=numbered(3)))
        with jax.enable_x64(False):  # as in the processes
            simulated = simulate(recipe.algorithm, recipe.task, self.federation, table, key=recipe.key)
        trees, _ = read_model(Folder(self.folder / "run").model(self.algorithm))
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
        jax.tree.map(close, trees["params"], jax.tree.map(np.asarray, simulated.params))
        for name in self.names:
            (found,) = (self.folder / name).glob("*/personal.safetensors")
            assert found.stat().st_size


@contextlib.contextmanager
def faulty(folder, names, num_updates, **keywords):
    with Parts(Path(folder)) as parts:
        yield Faulty(folder, parts, names, num_updates, **keywords)
