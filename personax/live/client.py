"""A client over gRPC, which downloads, trains, uploads, and finally writes its personal model."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from personax.data.locks import sole_user
from personax.experiment.names import printable
from personax.live.acceptance import read_recipe
from personax.live.connection import Connection, Newest, Unreachable
from personax.live.limits import Limits
from personax.live.membership import Anchor, Assignment, Membership, SavedUpload
from personax.live.messages import Content
from personax.live.samples import SampleSource, conformed, moments_of
from personax.values import name_of

_GOODBYE = 20.0  # seconds of patience for the last report
_LOOK = 0.5  # seconds between requests while other clients' moments are missing
_MOST_FAULTS = 3  # consecutive visits whose result is not finite
Notify = Callable[[str], None]


@dataclass(frozen=True)
class Habits:
    """Choices of a client's owner other than its limits."""

    report_every: int | None = None  # updates between reports of its numbers; None: never report
    wait_seconds: float = 20.0  # the longest wait for work in one request


class Farewell(NamedTuple):
    """The outcome for a client: the file with its personal model, its numbers, and its number of updates."""

    model: Path
    numbers: dict[str, Any]
    num_updates: int


def take_part(
    connection: Connection,
    data: SampleSource,
    folder: Path,
    *,
    limits: Limits = Limits(),
    habits: Habits = Habits(),
    notify: Notify = lambda text: None,
) -> Farewell:
    """Train with the other clients until the run is finished, then write the personal model."""
    with _sole_client(folder):
        client = LiveClient(connection, data, folder, limits, habits, notify)
        client.enter()
        while client.advance():
            pass
        return client.leave()


def personalize_only(
    connection: Connection,
    data: SampleSource,
    folder: Path,
    *,
    limits: Limits = Limits(),
    notify: Notify = lambda text: None,
) -> Farewell:
    """Make a personal model for a client that did not train. Nothing but its request reaches the server."""
    with _sole_client(folder):
        client = LiveClient(connection, data, folder, limits, Habits(), notify)
        client.enter(newcomer=True)
        return client.leave()


def _sole_client(folder: Path) -> AbstractContextManager[None]:
    """Lock a client's folder, or raise `Taken`: two processes would overwrite each other's personal state."""
    folder.mkdir(parents=True, exist_ok=True)
    return sole_user(folder / "client.lock", f"The client's folder {folder}")


class LiveClient:
    """One client's connection to a server, and its part in the run."""

    member: Membership  # from `enter` on

    def __init__(
        self, connection: Connection, data: SampleSource, folder: Path, limits: Limits, habits: Habits, notify: Notify
    ) -> None:
        self.connection, self.data, self.folder = connection, data, folder
        self.limits, self.habits = limits, habits
        self.notify: Notify = lambda text: notify(printable(text))  # some texts come from the server
        self.num_updates = self.faults = 0
        self.newest = Newest(-1, None, train=False, finished=False)
        self.model: Content = b""  # the newest model, encoded
        self.start: dict[str, Any] = {}

    def enter(self, newcomer: bool = False) -> None:
        """Register, check the server's recipe, and resume from the state on disk."""
        welcome = self._register(newcomer)
        given = Assignment(welcome.run, welcome.id, welcome.recipe, welcome.layout)
        name = self.connection.name or "this client"
        owned = (name, self.data, self.folder, self.limits, self.habits.report_every)
        self.member = Membership(given, *owned, authority=self.connection.authority)
        if not newcomer:
            self.member.restore()
        training = self.member.recipe.training
        objective = name_of(training.algorithm.objective)
        self.notify(f"{welcome.run}: {training.name} ({objective}) on {len(self.member.data.x)} samples")
        self.receive(self.connection.fetch())
        if not newcomer:
            upload = self.member.resume(welcome.next_update)
            if upload is not None:  # the server may not have received it
                self.notify(f"Sending update {upload.update} again.")
                self.send(upload)

    def _register(self, newcomer: bool) -> Any:
        """Register with data that conform to the server's schema; nothing about the data is sent before that."""
        given, digest, moments, num_samples = self.data, "", None, 0.0
        while not (welcome := self.connection.register(digest, newcomer, moments, num_samples)).registered:
            recipe = read_recipe(welcome.recipe, welcome.layout, self.limits)
            if recipe.digest == digest:
                time.sleep(_LOOK)  # wait for the moments of other clients
                continue
            found = conformed(given, recipe, self.notify)
            self.data, digest, moments = found, recipe.digest, None
            if recipe.counts_samples and not newcomer:
                num_samples = float(found.counts[0])
            if recipe.fits_scaling and not newcomer:
                moments = moments_of(found, self.limits)
                self.notify("Sent the count, mean and spread of each column. Waiting for those of other clients.")
        return welcome

    def advance(self) -> bool:
        """Wait for work, or train and upload. Return True if there is more to do."""
        most = self.limits.max_updates
        if self.newest.finished or (most is not None and self.num_updates >= most):
            return False
        if not self.newest.train:
            time.sleep(0 if self.newest.content is not None else self.newest.retry_seconds / 10)
            self.receive(self._fetch(self.habits.wait_seconds))
            return True
        upload = self.train()
        if upload is not None:
            self.send(upload)
        return True

    def train(self) -> SavedUpload | None:
        """Run one visit; return its upload, which is saved on disk together with the new personal state."""
        update = self.member.held.update
        upload = self.member.train(self._anchor())
        self.faults = 0 if upload is not None else self.faults + 1
        if upload is None:
            self.notify(f"Update {update} has NaN or infinite numbers and was not sent.")
        if self.faults >= _MOST_FAULTS:
            raise FloatingPointError(
                f"{self.faults} updates in a row were not finite. Ask the server's operator for smaller step sizes."
            )
        return upload

    def send(self, upload: SavedUpload) -> None:
        """Upload, and keep the newest model from the answer."""
        recipe = self.member.recipe
        content = recipe.up.buffers_of(upload.vectors)
        about, weight = (upload.id, upload.update, upload.version), self.member.num_samples or 0.0
        synchronous = recipe.algorithm.server.is_synchronous
        answer = self.connection.send(*about, content, weight, not synchronous, upload.rollbacks)
        if answer.outcome != "applied":
            self.notify(f"Update {upload.update}: {answer.outcome}. {answer.words}")
        self.num_updates += 1
        self.receive(answer)
        report = self.member.report(self._anchor())
        if report is not None:
            self.connection.report(report, self.member.held.update)

    def leave(self) -> Farewell:
        """Write the personal model to its own file, and send the last numbers."""
        if not self.model:
            self.receive(self.connection.fetch())
        path, numbers = self.member.finish(self._anchor(), {"start": self.start})
        if self.member.holding is not None:
            self._say_goodbye(self.member.reported(numbers["scores"], self.newest.version))
        return Farewell(path, numbers, self.num_updates)

    def _say_goodbye(self, report: dict[str, Any] | None) -> None:
        """Send the last report, unless the server is already gone."""
        self.connection.patience = min(self.connection.patience, _GOODBYE)
        try:
            self.connection.report(report, self.member.held.update, last=True)
        except Unreachable:
            self.notify("The server is gone. The last numbers are only in numbers.json.")

    def receive(self, newest: Newest) -> None:
        """Keep the newest model."""
        known = (self.newest.version, self.newest.rollbacks)
        if newest.content is None and (newest.version, newest.rollbacks) != known and newest.train:
            # The client did not ask for the model with the answer.
            newest = self._fetch()._replace(outcome=newest.outcome, words=newest.words)
        if newest.content is not None:
            self.member.recipe.down.require(newest.content)
            self.newest, self.model = newest, newest.content
            self.start = self.start or self.member.score_shared(self._anchor())
        else:
            self.newest = newest._replace(version=self.newest.version, rollbacks=self.newest.rollbacks)

    def _fetch(self, wait_seconds: float = 0.0) -> Newest:
        """The newest model, unless the client already has it."""
        return self.connection.fetch(self.newest.version, wait_seconds, self.newest.rollbacks)

    def _anchor(self) -> Anchor:
        """The newest model, decoded."""
        tree = self.member.recipe.down.decode(self.model)
        return Anchor(tree["params"], tree["shared"], self.newest.version, self.newest.rollbacks)
