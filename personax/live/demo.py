"""Run a whole federation on one machine: certificates, a server and three clients, each in its own process."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from personax.experiment.build import make_federation
from personax.experiment.config import dump, load
from personax.live import certificates

CLIENTS = ("anna", "bert", "cleo")
CONFIG = Path(__file__).with_name("demo.toml")


def prepare(folder: Path, overrides: list[str]) -> None:
    """Write a configuration, certificates, and a file of samples for each client."""
    folder.mkdir(parents=True, exist_ok=True)
    config = load(CONFIG, overrides)
    (folder / "config.toml").write_text(dump(config), encoding="utf-8")
    certificates.create(folder / "certificates", ["127.0.0.1", "localhost"], CLIENTS)
    federation = make_federation(replace(config, data=replace(config.data, standardize=False)))  # the clients do that
    for i, name in enumerate(CLIENTS):
        (x, y), (test_x, test_y) = federation.client(i), federation.client_test(i)
        np.savez(folder / f"{name}.npz", x=x, y=y, test_x=test_x, test_y=test_y)


class Parts:
    """The processes of a demo, all of which end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self, name: str, *words: str, before: tuple[str, ...] = ()) -> None:
        """Start a personax command, with the words `before` in front of it; its output goes to a log file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [*before, sys.executable, "-c", "from personax.cli import app; app()", *words]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)

    def log(self, name: str) -> str:
        """The output of a process so far."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_demo(folder: Path, overrides: list[str], notify: Callable[[str], None], watch: Callable[[int], None]) -> None:
    """Start all processes and wait for their end. Meanwhile, `watch(port)` is called about twice a second."""
    prepare(folder, overrides)
    place = folder / "certificates"
    with Parts(folder) as parts:
        serving = ("--listen", "127.0.0.1:0", "--identity", str(place / "server"))
        out = ("--out", str(folder / "run"), "--no-view")
        parts.begin("server", "serve", str(folder / "config.toml"), *serving, *out)
        port = wait_for_port(parts)
        notify(f"The server listens on 127.0.0.1:{port}. Starting the clients {', '.join(CLIENTS)}.")
        for name in CLIENTS:
            given = ("--data", str(folder / f"{name}.npz"), "--identity", str(place / "clients" / name))
            kept = ("--folder", str(folder / name), "--report", "2")
            parts.begin(name, "join", f"127.0.0.1:{port}", *given, *kept)
        while any(process.poll() is None for process in parts.processes.values()):
            ended = [n for n, process in parts.processes.items() if process.poll() not in (None, 0)]
            if ended:
                raise ValueError(f"{ended[0]} ended early:\n{parts.log(ended[0])[-2000:]}")
            if parts.processes["server"].poll() is None:
                watch(port)
            time.sleep(0.5)
        failed = [n for n, process in parts.processes.items() if process.returncode]
        if failed:
            raise ValueError(f"{failed[0]} failed:\n{parts.log(failed[0])[-2000:]}")


def wait_for_port(parts: Parts, name: str = "server", seconds: float = 90.0) -> int:
    """Wait until a server logs its port, and return the port."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for line in parts.log(name).splitlines():
            if line.startswith("Listening on "):
                return int(line.split()[2].rpartition(":")[2])
        if parts.processes[name].poll() is not None:
            break
        time.sleep(0.1)
    raise ValueError(f"The server did not start:\n{parts.log(name)[-2000:]}")
