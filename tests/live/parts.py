"""A live federation inside a test: a server on a port of its own in a thread, and clients that are led by hand."""

import asyncio
import contextlib
import threading
from pathlib import Path

import jax
import numpy as np

from personax.data.datasets import synthetic
from personax.data.federation import Federation
from personax.data.schema import Schema, numbered
from personax.experiment import checkpoint
from personax.experiment.build import resolve
from personax.experiment.config import Terms, parse
from personax.live.book import Book
from personax.live.certificates import Revocations, read_credentials
from personax.live.client import Habits, LiveClient
from personax.live.connection import Connection
from personax.live.journal import Journal
from personax.live.limits import Limits
from personax.live.recipe import make_recipe
from personax.live.serving import run_service

NAMES = ("anna", "bert", "cleo")
FEDERATION = synthetic(0.5, 0.5, num_clients=3, num_features=4, num_classes=3, num_samples=20, key=jax.random.key(7))
ADAPTERS = {
    "FedSA": {
        "recipe": "fedsa_lora",
        "lr": 0.1,
        "num_steps": 2,
        "batch_size": 8,
        "server": {"kind": "asynchronous", "lr": 0.5},
    }
}
ALGORITHMS = {
    "FedAsync": {"recipe": "fedasync", "server": {"kind": "asynchronous", "lr": 0.5}},
    "PersA-FL-MAML": {"recipe": "persafl", "objective": {"kind": "Meta", "adapt_lr": 0.1}},
    "PersA-FL-ME": {
        "recipe": "persafl",
        "objective": {"kind": "Moreau", "strength": 1.0, "prox_lr": 0.1, "num_prox_steps": 3},
    },
    "APFL": {"recipe": "apfl", "mix": 0.5, "server": {"kind": "asynchronous", "lr": 0.5}},
    "Ditto": {"recipe": "ditto", "strength": 1.0, "server": {"kind": "asynchronous", "lr": 0.5}},
    "FedAvg": {"recipe": "fedavg"},
    "FedBuff": {"recipe": "fedbuff", "buffer_size": 2},
    "SCAFFOLD": {"recipe": "scaffold", "server": {"kind": "asynchronous"}},
    "FedBN": {"recipe": "fedbn", "server": {"kind": "asynchronous", "lr": 0.5}},
    "FedPer": {"recipe": "fedper", "personal": "*.bias", "server": {"kind": "asynchronous", "lr": 0.5}},
    "FedRep": {
        "recipe": "fedrep",
        "personal": "*.bias",
        "num_personal_steps": 2,
        "server": {"kind": "asynchronous", "lr": 0.5},
    },
    "FedBABU": {"recipe": "fedbabu", "head": "*.bias", "server": {"kind": "asynchronous", "lr": 0.5}},
    "ANIL": {"recipe": "anil", "head": "*.bias", "adapt_lr": 0.1, "server": {"kind": "asynchronous", "lr": 0.5}},
    "PersA-FL-ME, personal biases": {
        "recipe": "persafl",
        "objective": {"kind": "Moreau", "strength": 1.0, "prox_lr": 0.1, "num_prox_steps": 3},
        "sharing": {"personal": ["*.bias"]},
    },
    "ARUBA": {"recipe": "aruba", "server": {"kind": "asynchronous", "lr": 0.5}},
}


LOGISTIC = {"kind": "logistic_regression"}
NORMALIZED = {"kind": "mlp", "widths": [4], "norm": "batch"}


def recipe(name="FedAsync", num_rounds=4, cohort_size="all", federation=FEDERATION, model=LOGISTIC, **options):
    entry = {**ALGORITHMS[name], "lr": 0.1, "num_steps": 2, "batch_size": 8, **options}
    table = {
        "name": "live",
        "seeds": [3],
        "model": model,
        "schedule": {"num_rounds": num_rounds, "cohort_size": cohort_size},
        "evaluation": {"every": 1},
        "algorithms": {name: entry},
    }
    schema = Schema(federation.x.shape[1:], str(federation.x.dtype), classes=numbered(3))
    return make_recipe(resolve(parse(table), baselines=False), schema)


def recipe_over(path, algorithms):
    """The recipe of one algorithm whose model has adapters over a base in a file."""
    model = {**LOGISTIC, "base": str(path), "lora": {"rank": 2}}
    table = {"name": "live", "seeds": [3], "model": model, "schedule": {"num_rounds": 4}, "algorithms": algorithms}
    return make_recipe(resolve(parse(table), baselines=False), recipe().schema)


def write_base(path, dtype=np.float64):
    """Write parameters that no seed gives, as the base of `recipe_over`."""
    params = recipe().initial_params()
    checkpoint.export(path, jax.tree.map(lambda leaf: np.asarray(leaf, dtype) + dtype(1), params), {})
    return path


def data_of(i, federation=FEDERATION):
    """One client's data alone."""
    return Federation.from_clients([federation.client(i)], [federation.client_test(i)])


def make_book(folder, given=None, terms=None, **keywords):
    terms = terms or Terms(num_clients=3)
    return Book(given or recipe(), terms, Journal(folder), folder / "checkpoints", "test-run", **keywords)


class Running:
    """A server in a thread, and what it is made of."""

    def __init__(self, book, terms, certificates, port="0", stay=True):
        self.book, self.certificates, self.error, self.service = book, certificates, None, None
        self.ready, self.loop, self.stopped = threading.Event(), None, None
        self.thread = threading.Thread(target=self._run, args=(terms, f"127.0.0.1:{port}", stay), daemon=True)
        self.thread.start()
        assert self.ready.wait(20)
        if self.error:
            raise self.error

    def _run(self, terms, address, stay):
        async def main():
            self.loop, self.stopped = asyncio.get_running_loop(), asyncio.Event()
            shown = self.certificates and read_credentials(self.certificates / "server")
            listed = shown and Revocations(self.certificates / "server" / "revoked.pem", shown.authority)

            def opened(port, service):
                self.port, self.service = port, service
                self.ready.set()

            keywords = {"credentials": shown, "revocations": listed, "stop": self.stopped, "stay": stay}
            await run_service(self.book, terms, address, opened=opened, **keywords)

        try:
            asyncio.run(main())
        except BaseException as error:
            self.error = error
        finally:
            self.ready.set()

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def connect(self, name, **keywords):
        place = self.certificates and self.certificates / ("operator" if name == "operator" else f"clients/{name}")
        shown = place and read_credentials(place)
        role = "operator" if name == "operator" else "client"
        keywords = {"patience": 5.0, "call_seconds": 20.0, **keywords}
        return Connection(self.address, shown, name=name, role=role, **keywords)

    def stop(self):
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.stopped.set)
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def serving(folder, given=None, terms=None, certificates=None, stay=True, **keywords):
    terms = terms or Terms(num_clients=3, outlier_factor=0.0, rate=1e5)
    book = make_book(Path(folder), given, terms, **keywords)
    running = Running(book, terms, certificates, stay=stay)
    try:
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def clients_of(running, folder, names=NAMES, federation=FEDERATION, limits=Limits(), habits=Habits()):
    made = []
    for i, name in enumerate(names):
        connection = running.connect(name)
        made.append(
            LiveClient(connection, data_of(i, federation), Path(folder) / name, limits, habits, lambda text: None)
        )
    try:
        yield made
    finally:
        for one in made:
            one.connection.close()


def follow(clients, schedule):
    """Lead clients through a table of events: each downloads, trains and uploads when the table says so."""
    events = list(zip(schedule.client.tolist(), schedule.started_at.tolist(), strict=True))
    position = [0] * len(clients)  # of each client's next event among its own
    own = [[e for e, (who, _) in enumerate(events) if who == i] for i in range(len(clients))]
    ready = {}
    for event in range(len(events)):
        for i, client in enumerate(clients):
            if i not in ready and position[i] < len(own[i]) and events[own[i][position[i]]][1] <= event:
                client.receive(client.connection.fetch(client.newest.version))
                ready[i] = client.train()
        who = events[event][0]
        clients[who].send(ready.pop(who))
        position[who] += 1


def assert_same(found, expected, tolerance=1e-9):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), found, expected)
