"""Studies as commands: start them, kill parts of them, and compare what they leave with a plain run."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq

from personax.experiment.folders import Folder

CONFIG = """
name = "jobs"
seeds = [0, 1]
[data]
kind = "synthetic"
num_clients = 8
num_features = 3
num_classes = 3
num_samples = 20
[model]
kind = "logistic_regression"
[schedule]
num_rounds = {num_rounds}
cohort_size = 2
delays = "persafl"
[evaluation]
every = {every}
[local]
lr = 0.1
num_steps = 2
batch_size = 4
[tune]
{tuned}
num_extensions = 1
[algorithms.FedAvg]
recipe = "fedavg"
[algorithms.APFL]
recipe = "apfl"
mix = 0.5
"""
LISTED = "lr = [0.05, 0.1]"
LONG = {"num_rounds": 12000, "every": 20, "tuned": LISTED}  # long enough for a checkpoint and a kill
SHORT = {"num_rounds": 20, "every": 5, "tuned": LISTED}
SEARCH = {"num_rounds": 2000, "every": 1000, "tuned": ""}  # long enough for a kill; with ranges that can be extended


class Command:
    """A command that was started."""

    def __init__(self, process, log):
        self.process, self.log = process, log

    def said(self):
        return self.log.read_text()

    def finish(self, status=0, seconds=600):
        """Wait for the end, and return what it printed."""
        assert self.process.wait(seconds) == status, self.said()
        return self.said()

    def kill(self):
        self.process.kill()
        self.process.wait()


class Typed:
    """A command in its own terminal, into which keys are typed."""

    def __init__(self, place, *words):
        self.keyboard, screen = pty.openpty()
        terminal = dict.fromkeys(("stdin", "stdout", "stderr"), screen)
        self.command, self.screen = place.start(*words, **terminal), b""
        os.close(screen)

    def type(self, keys):
        os.write(self.keyboard, keys.encode())

    def wait_for(self, text, seconds=90):
        """Wait until the terminal shows a text, or with an empty text until the command ends."""
        until = time.monotonic() + seconds
        while not text or text not in self.screen.decode(errors="replace"):
            assert time.monotonic() < until, self.screen.decode(errors="replace")
            try:
                self.screen += os.read(self.keyboard, 10000)
            except OSError:  # the command has closed the terminal
                break

    def finish(self, status):
        """Wait for the end, and return what the terminal shows."""
        self.wait_for("")
        os.close(self.keyboard)
        assert self.command.process.wait(60) == status, self.screen.decode(errors="replace")
        return self.screen.decode(errors="replace")


class Place:
    """A folder for studies, with an environment for the commands that are run in it."""

    def __init__(self, root, **environment):
        self.root = Path(root)
        self.environment = {**os.environ, "PERSONAX_COMPILED": str(self.root / "compiled"), **environment}

    def write(self, name, **settings):
        path = self.root / f"{name}.toml"
        path.write_text(CONFIG.format(**settings))
        return path

    def start(self, *words, **streams):
        """Start a command in a new session; its output goes to a file."""
        session = ["setsid", "--ctty"] if "stdin" in streams else ["setsid"]  # at a terminal: Ctrl-C sends SIGINT
        command = [*session, str(Path(sys.executable).with_name("personax")), *map(str, words)]
        log = self.root / f"command-{len(list(self.root.glob('command-*')))}.log"
        with log.open("w") as file:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, **streams}
            process = subprocess.Popen(command, cwd=self.root, env=self.environment, **pipes)
        return Command(process, log)

    def run(self, *words, status=0):
        """Run a command to its end, and return what it printed."""
        return self.start(*words).finish(status)

    def plain(self, name, *words, **settings):
        """Run a study in one process without interruptions, and return its folder."""
        config = self.write(name, **settings)
        self.run("compare", config, "--out", self.root / f"plain-{name}", *words)
        return self.root / f"plain-{name}"


def records(root):
    """The last report of each job, by name."""
    found = {}
    for path in Folder(Path(root)).jobs.glob("*.json"):
        with contextlib.suppress(ValueError, KeyError):
            table = json.loads(path.read_text())
            found[table["name"]] = table
    return found


def wait_for(condition, seconds=180, coordinator=None):
    """Wait until a condition holds, and return its result. The coordinator of the study must not end before."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "The condition did not hold in time."
        assert coordinator is None or coordinator.process.poll() is None, coordinator.said()
        time.sleep(0.05)
    return found


def running_worker(root):
    """A job that has begun to train: (name, process id); None if there is none."""
    found = ((name, one["pid"]) for name, one in records(root).items() if one["state"] == "running" and one["total"])
    return next(found, None)


def saved_worker(root):
    """A running job that has saved a checkpoint: (name, process id); None if there is none."""
    folder = Folder(Path(root))
    for name, record in records(root).items():
        if record["state"] == "running" and list(folder.checkpoints(name).glob("*.json")):
            return name, record["pid"]
    return None


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def timeless(item):
    """Remove times from plain data."""
    if isinstance(item, dict):
        return {key: timeless(entry) for key, entry in item.items() if key not in ("seconds", "started")}
    return [timeless(entry) for entry in item] if isinstance(item, list) else item


def assert_same(root, plain):
    """The same results, models and numbers of clients, to the last bit."""
    one, other = Folder(Path(root)), Folder(Path(plain))
    read = lambda folder: timeless(json.loads(folder.results.read_text()))
    assert read(one) == read(other)
    models = lambda folder: {path.name: path.read_bytes() for path in folder.models.iterdir()}
    assert models(one) == models(other)
    assert pq.read_table(one.clients).equals(pq.read_table(other.clients))
    lines = lambda folder: [timeless(json.loads(line)) for line in folder.metrics.read_text().splitlines()]
    assert lines(one) == lines(other)
    assert one.config.read_bytes() == other.config.read_bytes()
