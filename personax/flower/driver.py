"""Drives a book over Flower's grid: one thread for each node asks, waits and settles, so that none waits for another.

Pulling the reply of one node waits until all of it has come, however slow its connection: hence a thread for each. What
was under way with a node that goes away is lost; the node's worker has the update on its disk and sends it when it is
asked again, whoever asks.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

from personax.experiment.names import require_client_name
from personax.flower.api import ArrayRecord, Grid, Message  # pyright: ignore[reportAttributeAccessIssue]
from personax.flower.arrays import Arrays, to_tree
from personax.flower.channel import PROTOCOL
from personax.flower.records import from_content, to_content, to_record
from personax.live.book import Book
from personax.live.exchange import Arrived
from personax.live.recipe import Recipe
from personax.values import require_nonnegative, require_positive

logger = logging.getLogger("personax.flower")
_PAUSES = (0.1, 1.0)  # seconds between two looks for a reply: at first, and at most
_MOST_FAULTS = 3  # failures of a node in a row, after which it is left alone
Notify = tuple[dict[str, Any], Arrays]


@dataclass(frozen=True)
class Manners:
    """How a driver deals with nodes. Times are in seconds."""

    ttl: float = 1800.0  # of a message and its reply: how long a visit may take
    drain: float = 120.0  # after the end, for what is under way and for the clients' own models

    def __post_init__(self) -> None:
        require_positive("ttl", self.ttl)
        require_nonnegative("drain", self.drain)


class Lost(Exception):
    """A message whose reply does not come any more."""


class NodeFailed(Exception):
    """A message that a node could not deal with; in its words."""


class Driver:
    """Asks all nodes of a run to train until its book is finished."""

    def __init__(self, grid: Grid, book: Book, manners: Manners) -> None:
        self.grid, self.book, self.manners = grid, book, manners
        self.changed = threading.Condition()  # held by who touches the book; tells that it has changed
        self.activated: dict[int, str] = {}  # of each node that is there: when it came
        self.registered: dict[int, str] = {}  # the names under which keys of nodes were registered, if they were
        self.threads: dict[tuple[int, str], threading.Thread] = {}
        self.speaker: dict[str, int] = {}  # of each client: the node that spoke for it last
        self.replaced: set[tuple[int, str]] = set()  # nodes that spoke for it before
        self.model: tuple[int, ArrayRecord] | None = None  # the newest, as it is sent
        self.failure: BaseException | None = None
        self.bytes_up = self.bytes_down = 0
        self.stopped = False
        book.present = lambda: [name for name, node in self.speaker.items() if node in self.activated]

    def run(self) -> None:
        """Until the book is finished, nothing is under way and the clients have their own models."""
        saved, ended = time.monotonic(), 0.0
        try:
            while self.failure is None and (not ended or self._waits(ended)):
                self._look()
                with self._touching():
                    self.book.advance()
                    if time.monotonic() - saved >= self.book.terms.checkpoint:
                        self.book.save()
                        saved = time.monotonic()
                    ended = ended or (time.monotonic() if self.book.finished else 0.0)
                time.sleep(0.5)
        finally:
            self.stopped = True
            with self.changed:
                self.changed.notify_all()
                self.book.save()
        if self.failure is not None:
            raise self.failure

    def _waits(self, ended: float) -> bool:
        """Whether threads are at work that may still end in time."""
        if self._busy() and time.monotonic() - ended > self.manners.drain:
            logger.warning("Some nodes did not answer in %g s after the end.", self.manners.drain)
            return False
        return self._busy()

    def _busy(self) -> bool:
        return any(thread.is_alive() for thread in self.threads.values())

    def _look(self) -> None:
        """See which nodes are there. One that came back is a new one: what it had been asked is lost."""
        nodes = list(self.grid.get_nodes())
        found = {node.node_id: node.last_activated_at for node in nodes}
        with self.changed:
            self.activated, self.registered = found, {node.node_id: node.name for node in nodes}
        self.threads = {visit: one for visit, one in self.threads.items() if one.is_alive() or self._is_there(*visit)}
        for visit in found.items():
            if visit not in self.threads and not self.book.finished:
                self.threads[visit] = threading.Thread(target=self._guard, args=visit, daemon=True)
                self.threads[visit].start()
        enough, idle = len(found) >= (self.book.terms.num_clients or 1), not self._busy()
        if enough and idle and not self.book.finished:
            raise NodeFailed("None of the nodes can take part; the log says why. Start again to continue.")

    def _is_there(self, node: int, since: str) -> bool:
        """Whether a node is there since then, and speaks for a client that no other node speaks for now."""
        return self.activated.get(node) == since and (node, since) not in self.replaced

    def _guard(self, node: int, since: str) -> None:
        """Attend to a node while it is there."""
        try:
            while not self.stopped and self._is_there(node, since):
                try:
                    return self._attend(node, since)
                except Lost as lost:
                    logger.info("Node %d: %s", node, lost)
        except Exception as error:  # such as a full disk: the run must end, and say why
            self.failure = self.failure or error

    def _attend(self, node: int, since: str) -> None:
        """A node's part in the run: it says who it is, trains as often as it is due, and gets its own model."""
        name = self._greet(node, since)
        faults = 0
        while name and faults < _MOST_FAULTS and self._wait_for_work(name, node):
            try:
                settled = self._train(name, node, since)
            except NodeFailed as failed:
                faults += 1
                logger.warning("%s failed: %s", name, failed)
                time.sleep(min(2.0**faults, 10.0))
            else:
                faults = 0 if settled else faults + 1
        if name and self._speaks(name, node) and not self.stopped:
            if faults >= _MOST_FAULTS:
                logger.error("%s failed %d times in a row and is left alone.", name, faults)
                with self.changed:
                    del self.speaker[name]
            else:
                self._finish(name, node, since)

    def _greet(self, node: int, since: str) -> str:
        """The name of a node's client, which has a seat then; nothing for one that cannot take part."""
        try:
            reply, _ = self._ask(node, since, "query", {}, ArrayRecord())
            name, id = require_client_name(reply["name"]), reply["id"]
            if self.registered.get(node) not in (None, "", name):
                raise NodeFailed(f"Its key is registered for {self.registered[node]}, and it says that it is {name}.")
            with self._touching():
                self.book.join(name, None if id is None else int(id))
                if "moments" in reply:
                    self.book.contribute(name, dict(reply["moments"]))
                other = self.speaker.get(name, node)
                if other in self.activated and other != node:
                    self.replaced.add((other, self.activated[other]))
                    logger.warning("%s speaks through another node now: %d instead of %d.", name, node, other)
                self.speaker[name] = node
        except (NodeFailed, KeyError, TypeError, ValueError) as error:
            logger.error("Node %d cannot take part: %s", node, error)
            return ""
        logger.info("%s takes part, through node %d.", name, node)
        return name

    def _speaks(self, name: str, node: int) -> bool:
        return self.speaker.get(name) == node

    def _wait_for_work(self, name: str, node: int) -> bool:
        """Until the client is to train; False when there is nothing more to do for it."""
        with self.changed:
            while not self.book.trains(name):
                if self.stopped or self.book.finished or not self._speaks(name, node):
                    return False
                self.changed.wait(1.0)
            return self._speaks(name, node) and not self.stopped

    def _train(self, name: str, node: int, since: str) -> bool:
        """Ask for an update and settle it; whether there was one."""
        about, record = self._newest(name)
        reply, arrays = self._ask(node, since, "train", about, record)
        if "fault" in reply:
            logger.warning("%s: %s", name, reply["fault"])
            return False
        arrived = arrived_of(self.book.recipe, reply, arrays)
        with self._touching():
            self.bytes_up += len(arrived.content)
            self.book.settle(name, arrived)
            self._keep_report(name, reply)
        return True

    def _finish(self, name: str, node: int, since: str) -> None:
        """Let the client make its own model of the last one."""
        about, record = self._newest(name)
        try:
            reply, _ = self._ask(node, since, "evaluate", about, record)
        except NodeFailed as failed:
            logger.warning("%s could not make its own model: %s", name, failed)
            return
        with self._touching():
            self._keep_report(name, reply)

    def _keep_report(self, name: str, reply: dict[str, Any]) -> None:
        kept = report_of(self.book.recipe, reply.get("report"))
        if kept["numbers"]:
            self.book.report(name, kept)

    def _newest(self, name: str) -> tuple[dict[str, Any], ArrayRecord]:
        """The answer to a client with the newest model, encoded once for all that ask."""
        with self.changed:
            published, layout = self.book.published(), self.book.recipe.down
            if self.model is None or self.model[0] != published.version:
                self.model = published.version, to_record(layout, layout.decode(published.content))
            self.book.hand_out(name, published.version, published.num_events)
            self.bytes_down += len(published.content)
            seat = self.book.ledger.seats[name]
            about = {"id": seat.id, "update": seat.next_update, "version": published.version}
            return about, self.model[1]

    def _ask(self, node: int, since: str, task: str, about: dict[str, Any], record: ArrayRecord) -> Notify:
        """A node's answer. It is lost when the node goes away, or comes back, before it has answered."""
        recipe = self.book.recipe
        agreed = {"run": self.book.ledger.run, "recipe": recipe.to_text(), "layout": recipe.layout_text()}
        content = to_content({"protocol": PROTOCOL, **agreed, **about}, record)
        ttl, group = self.manners.ttl, str(about.get("version", ""))
        taken = list(self.grid.push_messages([Message(content, node, task, ttl=ttl, group_id=group)]))
        until, pause = time.monotonic() + (ttl if taken and taken[0] else 0.0), _PAUSES[0]
        while time.monotonic() < until and self._is_there(node, since) and not self.stopped:
            for reply in self.grid.pull_messages(taken):
                return _opened(reply)
            if task == "query" and self.book.finished:  # whoever it is comes too late
                break
            time.sleep(pause)
            pause = min(1.2 * pause, _PAUSES[1])
        time.sleep(_PAUSES[1])
        raise Lost(f"no answer to {task}: the node went away, Flower did not take the message, or {ttl:g} s passed.")

    @contextlib.contextmanager
    def _touching(self) -> Iterator[None]:
        """Alone with the book; whoever waits looks again afterwards."""
        with self.changed:
            yield
            self.changed.notify_all()


def _opened(reply: Message) -> Notify:
    """What a reply says, or `Failed`."""
    if reply.has_error():
        raise NodeFailed(reply.error.reason)
    try:
        return from_content(reply.content)
    except (KeyError, TypeError, ValueError) as error:
        raise NodeFailed(f"Its reply cannot be read: {error!r}") from None


def arrived_of(recipe: Recipe, reply: dict[str, Any], arrays: Arrays) -> Arrived:
    """An upload as a book takes it, or `Failed`: what a node sends is not to be trusted."""
    try:
        content = recipe.up.encode(to_tree(recipe.up, arrays))
        weight = float(reply["samples"]) if recipe.counts_samples else 1.0
        described = (str(reply["id"])[:64], int(reply["update"]), int(reply["version"]))
    except (KeyError, TypeError, ValueError) as error:
        raise NodeFailed(f"The upload is not what was agreed: {error}") from None
    if not 0 < weight < 2**31:
        raise NodeFailed(f"`samples` must be positive, got {weight}.")
    return Arrived(*described, weight, content)


def report_of(recipe: Recipe, reply: Any) -> dict[str, Any]:
    """A report as a book keeps it; numbers of scores that the recipe does not have, and odd ones, are left out."""
    kept: dict[str, dict[str, float]] = {}
    try:
        for score in recipe.training.scorings:
            found = reply["numbers"].get(score, {}).items()
            kept[score] = {str(metric)[:40]: float(value) for metric, value in found if isfinite(float(value))}
        counts = {key: int(reply[key]) for key in ("version", "samples", "train_samples")}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {"numbers": {}}
    return {"numbers": {score: numbers for score, numbers in kept.items() if numbers}, **counts}
