"""Drive a book over Flower's grid with one thread per node, so that no node waits for another.

Pulling a reply blocks until it is complete, however slow the node's connection, so each node has a thread. If a node
goes away, its pending message is lost; its worker has the update on disk and sends it when it is asked again.
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
_PAUSES = (0.1, 1.0)  # initial and longest pause between polls for a reply, in seconds
_MOST_FAULTS = 3  # consecutive failures of a node, after which it is no longer asked
Notify = tuple[dict[str, Any], Arrays]


@dataclass(frozen=True)
class Manners:
    """Timeouts of a driver, in seconds."""

    ttl: float = 1800.0  # for a message and its reply, and hence for a visit
    drain: float = 120.0  # after the end, for pending visits and for the clients' personal models

    def __post_init__(self) -> None:
        require_positive("ttl", self.ttl)
        require_nonnegative("drain", self.drain)


class Lost(Exception):
    """A message whose reply will not arrive."""


class NodeFailed(Exception):
    """A message that a node could not process, with the node's error message."""


class Driver:
    """The loop of a run over Flower, which asks all nodes to train until the book is finished."""

    def __init__(self, grid: Grid, book: Book, manners: Manners) -> None:
        self.grid, self.book, self.manners = grid, book, manners
        self.changed = threading.Condition()  # held while the book is used; notified when it changes
        self.activated: dict[int, str] = {}  # the activation time of each connected node
        self.registered: dict[int, str] = {}  # the names under which the nodes' keys were registered, if any
        self.threads: dict[tuple[int, str], threading.Thread] = {}
        self.speaker: dict[str, int] = {}  # for each client, the node that represents it now
        self.replaced: set[tuple[int, str]] = set()  # nodes that represented a client before
        self.model: tuple[int, ArrayRecord] | None = None  # the newest model as sent
        self.failure: BaseException | None = None
        self.bytes_up = self.bytes_down = 0
        self.stopped = False
        book.present = lambda: [name for name, node in self.speaker.items() if node in self.activated]

    def run(self) -> None:
        """Run until the book is finished, no visit is pending, and the clients have their personal models."""
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
        """True if threads are busy that may still end within the drain time."""
        if self._busy() and time.monotonic() - ended > self.manners.drain:
            logger.warning("Some nodes did not answer within %g s after the end.", self.manners.drain)
            return False
        return self._busy()

    def _busy(self) -> bool:
        return any(thread.is_alive() for thread in self.threads.values())

    def _look(self) -> None:
        """Update the set of connected nodes. A reconnected node counts as new, because its pending message is lost."""
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
            raise NodeFailed("None of the nodes can take part. See the log for the reasons, then start again.")

    def _is_there(self, node: int, since: str) -> bool:
        """True if a node has been connected since then and no other node has replaced it."""
        return self.activated.get(node) == since and (node, since) not in self.replaced

    def _guard(self, node: int, since: str) -> None:
        """Attend to a node while it is connected."""
        try:
            while not self.stopped and self._is_there(node, since):
                try:
                    return self._attend(node, since)
                except Lost as lost:
                    logger.info("Node %d: %s", node, lost)
        except Exception as error:  # such as a full disk: the run must end with this error
            self.failure = self.failure or error

    def _attend(self, node: int, since: str) -> None:
        """Handle a node's part in the run: identify its client, let it train when due, and let it personalize."""
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
                logger.error("%s failed %d times in a row and is no longer asked.", name, faults)
                with self.changed:
                    del self.speaker[name]
            else:
                self._finish(name, node, since)

    def _greet(self, node: int, since: str) -> str:
        """Register a node's client and return its name; return "" if it cannot take part."""
        try:
            reply, _ = self._ask(node, since, "query", {}, ArrayRecord())
            name, id = require_client_name(reply["name"]), reply["id"]
            if self.registered.get(node) not in (None, "", name):
                raise NodeFailed(f"Its key is registered for {self.registered[node]}, but it claims to be {name}.")
            with self._touching():
                self.book.join(name, None if id is None else int(id))
                if "moments" in reply:
                    self.book.contribute(name, dict(reply["moments"]))
                other = self.speaker.get(name, node)
                if other in self.activated and other != node:
                    self.replaced.add((other, self.activated[other]))
                    logger.warning("%s is now represented by node %d instead of %d.", name, node, other)
                self.speaker[name] = node
        except (NodeFailed, KeyError, TypeError, ValueError) as error:
            logger.error("Node %d cannot take part: %s", node, error)
            return ""
        logger.info("%s takes part through node %d.", name, node)
        return name

    def _speaks(self, name: str, node: int) -> bool:
        return self.speaker.get(name) == node

    def _wait_for_work(self, name: str, node: int) -> bool:
        """Wait until the client should train; return False if there is nothing more to do for it."""
        with self.changed:
            while not self.book.trains(name):
                if self.stopped or self.book.finished or not self._speaks(name, node):
                    return False
                self.changed.wait(1.0)
            return self._speaks(name, node) and not self.stopped

    def _train(self, name: str, node: int, since: str) -> bool:
        """Ask for an update and settle it. Return False if there was none."""
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
        """Let the client make its personal model from the last shared one."""
        about, record = self._newest(name)
        try:
            reply, _ = self._ask(node, since, "evaluate", about, record)
        except NodeFailed as failed:
            logger.warning("%s could not make its personal model: %s", name, failed)
            return
        with self._touching():
            self._keep_report(name, reply)

    def _keep_report(self, name: str, reply: dict[str, Any]) -> None:
        kept = report_of(self.book.recipe, reply.get("report"))
        if kept["numbers"]:
            self.book.report(name, kept)

    def _newest(self, name: str) -> tuple[dict[str, Any], ArrayRecord]:
        """The answer to a client with the newest model, which is encoded once for all clients."""
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
        """Ask a node and return its answer. Raise `Lost` if the node disconnects or reconnects before it answers."""
        recipe = self.book.recipe
        agreed = {"run": self.book.ledger.run, "recipe": recipe.to_text(), "layout": recipe.layout_text()}
        content = to_content({"protocol": PROTOCOL, **agreed, **about}, record)
        ttl, group = self.manners.ttl, str(about.get("version", ""))
        taken = list(self.grid.push_messages([Message(content, node, task, ttl=ttl, group_id=group)]))
        until, pause = time.monotonic() + (ttl if taken and taken[0] else 0.0), _PAUSES[0]
        while time.monotonic() < until and self._is_there(node, since) and not self.stopped:
            for reply in self.grid.pull_messages(taken):
                return _opened(reply)
            if task == "query" and self.book.finished:  # too late for a new client
                break
            time.sleep(pause)
            pause = min(1.2 * pause, _PAUSES[1])
        time.sleep(_PAUSES[1])
        raise Lost(f"no answer to {task}: the node left, Flower did not accept the message, or {ttl:g} s passed.")

    @contextlib.contextmanager
    def _touching(self) -> Iterator[None]:
        """Hold the lock on the book, and wake waiting threads afterwards."""
        with self.changed:
            yield
            self.changed.notify_all()


def _opened(reply: Message) -> Notify:
    """Read a reply; raise `NodeFailed` if it is an error or unreadable."""
    if reply.has_error():
        raise NodeFailed(reply.error.reason)
    try:
        return from_content(reply.content)
    except (KeyError, TypeError, ValueError) as error:
        raise NodeFailed(f"Its reply cannot be read: {error!r}") from None


def arrived_of(recipe: Recipe, reply: dict[str, Any], arrays: Arrays) -> Arrived:
    """Convert a reply to an upload for the book; raise `NodeFailed` if it is invalid, since nodes are untrusted."""
    try:
        content = recipe.up.encode(to_tree(recipe.up, arrays))
        weight = float(reply["samples"]) if recipe.counts_samples else 1.0
        described = (str(reply["id"])[:64], int(reply["update"]), int(reply["version"]))
    except (KeyError, TypeError, ValueError) as error:
        raise NodeFailed(f"The upload does not match the recipe: {error}") from None
    if not 0 < weight < 2**31:
        raise NodeFailed(f"`samples` must be positive, got {weight}.")
    return Arrived(*described, weight, content)


def report_of(recipe: Recipe, reply: Any) -> dict[str, Any]:
    """A report as the book stores it, without unknown scores and numbers that are not finite."""
    kept: dict[str, dict[str, float]] = {}
    try:
        for score in recipe.training.scorings:
            found = reply["numbers"].get(score, {}).items()
            kept[score] = {str(metric)[:40]: float(value) for metric, value in found if isfinite(float(value))}
        counts = {key: int(reply[key]) for key in ("version", "samples", "train_samples")}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {"numbers": {}}
    return {"numbers": {score: numbers for score, numbers in kept.items() if numbers}, **counts}
