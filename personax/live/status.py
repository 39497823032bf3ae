"""The state of a live run, as shown by the terminal view, `personax status` and Prometheus."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import pydantic

from personax.live.book import Book


@dataclass(frozen=True)
class ClientStatus:
    """The state of one client."""

    name: str
    seconds_ago: float | None  # seconds since its last request
    num_applied: int
    num_refused: int
    num_late: int
    staleness: int  # staleness of its last update, in versions
    numbers: dict[str, dict[str, float]]  # the numbers that it last chose to report, by score and metric


@dataclass(frozen=True)
class FederationStatus:
    """The state of the whole federation."""

    name: str
    algorithm: str
    mode: str
    version: int
    num_events: int
    target: str
    seconds: float
    finished: bool
    bytes_up: int
    bytes_down: int
    refusals: dict[str, int]  # refused requests by reason
    clients: tuple[ClientStatus, ...]

    def of_one(self, name: str) -> "FederationStatus":
        """The part that a client may see: the run, and itself."""
        return replace(self, clients=tuple(one for one in self.clients if one.name == name), refusals={})

    def to_json(self) -> str:
        """The state as sent."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "FederationStatus":
        """The inverse of `to_json`."""
        return pydantic.TypeAdapter(cls).validate_json(text)


def status_of(
    book: Book, ago: Mapping[str, float], refusals: Counter[tuple[str, str]], bytes_up: int, bytes_down: int
) -> FederationStatus:
    """The current state of a server."""
    ledger, section = book.ledger, book.recipe.config.schedule
    clients = []
    for name, seat in sorted(ledger.seats.items(), key=lambda item: item[1].id):
        numbers = ledger.reports.get(name, {}).get("numbers", {})
        counts = (seat.num_applied, seat.num_refused, seat.num_late, seat.staleness)
        clients.append(ClientStatus(name, ago.get(name), *counts, numbers))
    reasons: Counter[str] = Counter()
    for (_, why), num in list(refusals.items()):
        reasons[why] += num
    server = book.recipe.algorithm.server
    mode = "synchronous" if book.is_synchronous else "asynchronous" if server.buffer_size == 1 else "buffered"
    target = (
        f"{section.num_rounds} rounds" if book.is_synchronous else f"{section.num_rounds * book.cohort_size} updates"
    )
    return FederationStatus(
        name=book.recipe.config.name,
        algorithm=book.recipe.training.name,
        mode=mode,
        version=book.version,
        num_events=ledger.num_events,
        target=target,
        seconds=book.now,
        finished=book.finished,
        bytes_up=bytes_up,
        bytes_down=bytes_down,
        refusals=dict(reasons),
        clients=tuple(clients),
    )
