"""The worker of a node: `python -m personax.flower.worker FOLDER`, which the ClientApp starts (see `channel`).

It keeps the samples and the compiled programs in memory, and the personal states in its folder, which no other process
uses. It ends after an idle period, and can be killed at any time.
"""

import contextlib
import logging
import os
import socket
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from personax.data.federation import Federation
from personax.data.locks import Taken, sole_user
from personax.experiment.build import make_federation
from personax.experiment.config import load
from personax.flower import member
from personax.flower.arrays import Arrays
from personax.flower.channel import PROTOCOL, receive, send, socket_of
from personax.flower.member import Answer
from personax.live.acceptance import read_recipe
from personax.live.limits import Limits
from personax.live.membership import Membership
from personax.live.recipe import Recipe
from personax.live.samples import SampleFile, SampleSource, conformed, moments_of

_IDLE_MINUTES = 60.0
logger = logging.getLogger("personax.flower")


class Worker:
    """A process that answers the ServerApp's messages sequentially."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node: dict[str, Any] = {}
        self.data: SampleSource | None = None
        self.samples: dict[str, Federation] = {}  # by the digest of their schema
        self.members: dict[str, Membership] = {}

    def answer(self, about: dict[str, Any], arrays: Arrays) -> Answer:
        """Answer a message; a failure is reported as an `error` with its message."""
        try:
            if about.get("protocol") != PROTOCOL:
                spoken = f"{PROTOCOL} here and {about.get('protocol')} at the server"
                raise ValueError(f"The protocols differ: {spoken}. Update the older version of personax.")
            self._know(about["node"])
            if about["task"] == "query":
                return self._introduce(about), {}
            answer = member.train if about["task"] == "train" else member.finish
            return answer(self._member(about), about, arrays)
        except Exception as error:  # report it to the server and keep the worker alive
            logger.exception("%s failed", about.get("task"))
            return {"error": f"{type(error).__name__}: {error}"}, {}

    @property
    def idle_seconds(self) -> float:
        """The idle time after which the worker ends, in seconds."""
        return 60 * float(self.node.get("idle-minutes", _IDLE_MINUTES))

    def _know(self, node: dict[str, Any]) -> None:
        """Reset the worker if the node's settings changed since the last message."""
        if node == self.node and self.data is not None:
            return
        self.node, self.data, self.samples, self.members = node, samples_of(node), {}, {}

    def _introduce(self, about: dict[str, Any]) -> dict[str, Any]:
        """The client's name and number; raise if its samples do not match the recipe."""
        limits = limits_of(self.node)
        recipe = read_recipe(about["recipe"], about["layout"], limits)
        samples = self._samples(recipe)
        known = {"name": self.node["name"], "id": self.node.get("client-id", self.node.get("partition-id"))}
        return {**known, "moments": moments_of(samples, limits)} if recipe.fits_scaling else known

    def _samples(self, recipe: Recipe) -> Federation:
        """The samples in the form a recipe describes."""
        assert self.data is not None
        if recipe.digest not in self.samples:
            try:
                found = conformed(self.data, recipe, logger.info)
            except ValueError as error:  # the message may name labels and columns, so it stays on the node
                logger.error("%s", error)
                what = "The node's samples do not match the recipe"
                raise ValueError(f"{what}. See its worker.log for the label, column or number.") from None
            logger.info("%s: %d samples", self.node["name"], len(found.x))
            self.samples[recipe.digest] = found
        return self.samples[recipe.digest]

    def _member(self, about: dict[str, Any]) -> Membership:
        """The client in a run, created again if the server describes it differently."""
        key = "\n".join(str(about[what]) for what in ("run", "id", "recipe", "layout"))
        if key not in self.members:
            limits = limits_of(self.node)
            samples = self._samples(read_recipe(about["recipe"], about["layout"], limits))
            own = (limits, self.node.get("report"))
            self.members[key] = member.join(self.node["name"], about, samples, self.folder, *own)
        return self.members[key]


def limits_of(node: dict[str, Any]) -> Limits:
    """The limits that the owner sets on a server's requests."""
    given = {field.name: node[key] for field in fields(Limits) if (key := field.name.replace("_", "-")) in node}
    if "objectives" in given:
        given["objectives"] = tuple(str(given["objectives"]).split(","))
    if "base" in given:
        given["base"] = str(Path(given["base"]).expanduser())
    return Limits(**given)


def samples_of(node: dict[str, Any]) -> SampleSource:
    """The node's own file, or its part of the data in the recipe."""
    if "data" in node:
        shape = tuple(int(part) for part in node["shape"].split("x")) if "shape" in node else None
        return SampleFile(Path(node["data"]).expanduser(), node.get("label", "label"), shape)
    whole, part = make_federation(load(Path(node["recipe"]))), int(node["partition-id"])
    if not 0 <= part < whole.num_clients:
        raise ValueError(f"`partition-id` must be below the recipe's {whole.num_clients} clients, got {part}.")
    return Federation.from_clients([whole.client(part)], [whole.client_test(part)])


def run(folder: Path) -> None:
    """Serve until the worker has been idle for long enough. A second worker for the same folder ends at once."""
    with contextlib.suppress(Taken), sole_user(folder / "worker.lock"):
        path, worker = socket_of(folder), Worker(folder)
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(64)
            try:
                while True:
                    listener.settimeout(worker.idle_seconds)
                    link, _ = listener.accept()
                    with link, contextlib.suppress(EOFError, ConnectionError):  # the ClientApp was killed
                        link.settimeout(None)
                        _serve(worker, link)
            except TimeoutError:
                logger.info("The worker was idle for %g s and ends.", worker.idle_seconds)
            finally:
                path.unlink(missing_ok=True)


def _serve(worker: Worker, link: socket.socket) -> None:
    began = time.monotonic()
    about, arrays = receive(link)
    answer, found = worker.answer(about, arrays)
    send(link, answer, found)
    logger.info("%s: %.3f s", about.get("task"), time.monotonic() - began)


def main() -> None:
    """Run the worker from the command line."""
    os.umask(0o077)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
