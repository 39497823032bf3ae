"""A client: it downloads, trains, uploads, and keeps what is its own on its own disk.

Before an upload leaves, the new personal state and the upload itself are on the disk, in one checkpoint: a client that
is killed comes back with both and sends the same upload again, which the server settles once.
"""

import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from personax.data import datasets
from personax.data.federation import Federation
from personax.experiment import checkpoint
from personax.live.connection import Connection, Newest, RefusedByServer, Unreachable
from personax.live.messages import Content
from personax.live.recipe import Limits, read_recipe, require_within
from personax.live.visits import make_visit, personal_model, score, score_one
from personax.simulation.checks import check_model
from personax.typing import Params, Personal, Shared
from personax.values import name_of

logger = logging.getLogger("personax.live")
_GOODBYE = 20.0  # seconds of patience for the last report
_MOST_FAULTS = 3  # visits in a row whose result is not finite
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Habits:
    """What a client's owner decides beside its limits."""

    report_every: int | None = None  # updates between reports of its numbers; None: it reports nothing
    wait_seconds: float = 20.0  # for work, in one request


class Farewell(NamedTuple):
    """What a client has at the end: its model's file, its numbers, and how many updates it made."""

    model: Path
    numbers: dict[str, Any]
    num_updates: int


@dataclass(frozen=True)
class Holding:
    """What a client keeps: never sent, but for `upload`."""

    personal: Personal
    update: int  # the number of its next update
    upload: dict[str, Any] | None = None  # the last one: its id, number, version and vectors


def read_data(path: Path, *, label: str = "label", shape: tuple[int, ...] | None = None, seed: int = 0) -> Federation:
    """One client's file; a fifth is kept apart for tests where it has none."""
    found = datasets.read_client(path, label=label, shape=shape)
    return found if found.test_x is not None else found.split_tests(0.2, key=jax.random.key(seed))


def take_part(
    connection: Connection,
    data: Federation,
    folder: Path,
    *,
    limits: Limits = Limits(),
    habits: Habits = Habits(),
    notify: Notify = lambda text: None,
) -> Farewell:
    """Train with the others until the server says that it is done, then write the personal model."""
    client = LiveClient(connection, data, folder, limits, habits, notify)
    client.enter()
    while client.go_on():
        pass
    return client.leave()


def personalize_only(
    connection: Connection,
    data: Federation,
    folder: Path,
    *,
    limits: Limits = Limits(),
    notify: Notify = lambda text: None,
) -> Farewell:
    """A personal model for a client that took no part in training; nothing but its request reaches the server."""
    client = LiveClient(connection, data, folder, limits, Habits(), notify)
    client.enter(newcomer=True)
    return client.leave()


class LiveClient:
    """One client's life in a run."""

    def __init__(
        self, connection: Connection, data: Federation, folder: Path, limits: Limits, habits: Habits, notify: Notify
    ) -> None:
        self.connection, self.data, self.folder = connection, data, folder
        self.limits, self.habits, self.notify = limits, habits, notify
        self.num_updates = self.faults = 0
        self.newest = Newest(-1, None, train=False, finished=False)
        self.model: Content = b""  # the newest
        self.start: dict[str, Any] = {}

    def enter(self, newcomer: bool = False) -> None:
        """Register, check what the server wants, and come back to what the disk has."""
        sample = (self.data.x.shape[1:], str(self.data.x.dtype))
        welcome = self.connection.register(*sample, version_of("personax"), newcomer)
        self.recipe = read_recipe(welcome.recipe, welcome.layout, self.limits)
        self.data = replace(self.data, ids=np.array([welcome.id]), names=[self.connection.name or "this client"])
        require_within(self.recipe, int(self.data.counts[0]), self.limits)
        check_model(self.recipe.task, self.data, None)
        self.place = self.folder / welcome.run
        self.holding = None if newcomer else self._restored(welcome)
        self.visit = make_visit(self.recipe, self.data)
        objective = name_of(self.recipe.algorithm.objective)
        self.notify(f"{welcome.run}: {self.recipe.training.name} ({objective}) on {len(self.data.x)} samples")
        self.receive(self.connection.fetch())
        if self.holding is not None and self.holding.upload is not None:
            self._send_again(welcome.next_update)

    def go_on(self) -> bool:
        """One turn: wait for work, or train and upload; whether there is more to do."""
        assert self.holding is not None  # newcomers do not train
        most = self.limits.max_updates
        if self.newest.finished or (most is not None and self.num_updates >= most):
            return False
        if not self.newest.train:
            time.sleep(0 if self.newest.content is not None else self.newest.retry_seconds / 10)
            self.receive(self.connection.fetch(self.newest.version, self.habits.wait_seconds))
            return True
        upload = self.train()
        if upload is not None:
            self.send(upload)
        return True

    def train(self) -> dict[str, Any] | None:
        """A visit; its upload, which is on the disk with the new personal state when this returns."""
        holding, version = self.holding, self.newest.version
        assert holding is not None
        vectors, personal, finite = self.visit(*self._shown(), holding.personal, version, holding.update)
        if not finite:
            self.faults += 1
            self.holding = replace(holding, update=holding.update + 1)
            self.notify(f"Update {holding.update} is not finite and was not sent.")
            if self.faults >= _MOST_FAULTS:
                raise FloatingPointError(f"{self.faults} updates in a row were not finite. Ask for smaller step sizes.")
            return None
        self.faults = 0
        sent = [np.asarray(vector) for vector in vectors]
        upload = {"id": secrets.token_hex(16), "update": holding.update, "version": version, "vectors": sent}
        self.holding = Holding(jax.tree.map(np.asarray, personal), holding.update + 1, upload)
        self._save()
        return upload

    def send(self, upload: dict[str, Any]) -> None:
        """Upload, and take the newest model that comes back."""
        weight = float(self.data.counts[0]) if self.recipe.counts_samples else 0.0
        content = self.recipe.up.buffers_of(upload["vectors"])
        synchronous = self.recipe.algorithm.server.is_synchronous
        about = (upload["id"], upload["update"], upload["version"])
        answer = self.connection.send(*about, content, weight, want_model=not synchronous)
        if answer.outcome != "applied":
            self.notify(f"Update {upload['update']}: {answer.outcome}. {answer.words}")
        self.num_updates += 1
        self.receive(answer)
        every = self.habits.report_every
        if every is not None and self.num_updates % every == 0:
            self.report(self.score(), last=False)

    def score(self) -> dict[str, dict[str, float]]:
        """The client's numbers with the newest model and its personal state."""
        assert self.holding is not None
        held = (self.holding.personal, self.newest.version, self.holding.update)
        return score(self.recipe, self.data, *self._shown(), *held)

    def report(self, numbers: dict[str, dict[str, float]], last: bool) -> None:
        """Tell the server numbers if the owner wants that, and whether they are the last."""
        assert self.holding is not None
        shown = numbers if self.habits.report_every is not None else {}
        counts = (len(self.data.client_test(0)[1]), int(self.data.counts[0])) if shown else (0, 0)
        self.connection.report(shown, self.newest.version, self.holding.update, *counts, last)

    def leave(self) -> Farewell:
        """The last numbers, and the personal model as a file of its own."""
        if not self.model:
            self.receive(self.connection.fetch())
        params, shared = self._shown()
        numbers: dict[str, Any] = {"start": self.start, "shared": score_one(self.recipe, self.data, params)}
        holding = self.holding
        if holding is not None:
            numbers["scores"] = self.score()
        own, update = (None, 0) if holding is None else (holding.personal, holding.update)
        model, words = personal_model(self.recipe, self.data, params, shared, own, update)
        numbers["personal"] = score_one(self.recipe, self.data, model)
        path = self.place / "personal.safetensors"
        about = {"algorithm": self.recipe.training.name, "scoring": words, "numbers": json.dumps(numbers)}
        checkpoint.export(path, model, about)
        checkpoint.write_atomically(self.place / "numbers.json", json.dumps(numbers, indent=1).encode())
        if holding is not None:
            self._say_goodbye(numbers["scores"])
        return Farewell(path, numbers, self.num_updates)

    def _say_goodbye(self, numbers: dict[str, dict[str, float]]) -> None:
        """The last report; a server that has gone does not need it any more."""
        self.connection.patience = min(self.connection.patience, _GOODBYE)
        try:
            self.report(numbers, last=True)
        except Unreachable:
            self.notify("The server has gone: the last numbers are in numbers.json alone.")

    def receive(self, newest: Newest) -> None:
        """Keep the newest model."""
        if newest.content is None and newest.version != self.newest.version and newest.train:
            # It was not wanted with the answer.
            newest = self.connection.fetch(self.newest.version)._replace(outcome=newest.outcome, words=newest.words)
        if newest.content is not None:
            self.recipe.down.require(newest.content)
            self.newest, self.model = newest, newest.content
            self.start = self.start or score_one(self.recipe, self.data, self._shown()[0])
        else:
            self.newest = newest._replace(version=self.newest.version)

    def _shown(self) -> tuple[Params, Shared]:
        """The newest model, and what the server broadcasts beside it."""
        tree = self.recipe.down.decode(self.model)
        return tree["params"], tree["shared"]

    def _send_again(self, next_update: int) -> None:
        """An upload that left before the client ended may have been lost on the way; the server knows."""
        assert self.holding is not None
        upload = self.holding.upload
        if upload is not None and upload["update"] >= next_update:
            self.notify(f"Update {upload['update']} is sent again.")
            self.send(upload)
        elif self.holding.update < next_update:
            self.holding = replace(self.holding, update=next_update)

    # The disk

    def _template(self) -> dict[str, Any]:
        own = jax.eval_shape(self.recipe.algorithm.objective.init_personal, self.recipe.params_shape)
        return {"personal": own, "upload": self.recipe.up.vector_shapes}

    def _restored(self, welcome: Any) -> Holding:
        place = self.place / "state"
        saved = checkpoint.load(place, self._template(), notify=logger.warning)
        if saved is None:
            first = self.recipe.algorithm.objective.init_personal(self.recipe.initial_params())
            return Holding(first, welcome.next_update)
        about = saved.about
        if about["client"] != [self.connection.name, welcome.id]:
            known = "the client {} with number {}".format(*about["client"])
            raise RefusedByServer(f"{place} is of {known}, the server says {welcome.id}. Use another --folder.", None)  # pyright: ignore[reportArgumentType]
        self.notify(f"Goes on after {about['update']} updates of its own.")
        upload = {**about["upload"], "vectors": saved.tree["upload"]}
        return Holding(saved.tree["personal"], about["update"], upload)

    def _save(self) -> None:
        holding = self.holding
        assert holding is not None and holding.upload is not None
        upload = {key: item for key, item in holding.upload.items() if key != "vectors"}
        client = [self.connection.name, int(self.data.ids[0])]
        tree = {"personal": holding.personal, "upload": holding.upload["vectors"]}
        checkpoint.save(
            self.place / "state", holding.update, tree, {"client": client, "update": holding.update, "upload": upload}
        )
