"""The state of a run except for its arrays: the clients, settled uploads, and the operator's decisions.

A `Ledger` changes only by folding journal records into it, so a restart rebuilds it from the same records.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from personax.live.journal import Record


class Seat(NamedTuple):
    """The server's information about a client."""

    id: int
    next_update: int = 0
    last_upload: str = ""
    last_outcome: str = ""
    norm: float | None = None  # norm of its last applied upload
    num_applied: int = 0
    num_refused: int = 0
    num_late: int = 0
    staleness: int = 0  # staleness of its last upload, in versions
    extras: Mapping[str, float] = {}  # the largest norm so far of each part of its extra
    excess: float = 0.0  # amount spent of its budget for loud uploads
    samples: float = 0.0  # the number it registered with or claimed last, if the server weights by samples
    excluded: bool = False  # True if the operator excluded it


@dataclass(frozen=True)
class Round:
    """A synchronous round: its cohort, the members that have reported, and the time since which it has waited."""

    members: tuple[str, ...]
    reported: tuple[str, ...]
    since: float


@dataclass
class Ledger:
    """Everything in a book that is not an array."""

    run: str
    began: float  # the wall clock, in seconds since 1970
    seats: dict[str, Seat] = field(default_factory=dict)
    num_events: int = 0
    round: Round | None = None
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)  # the last report of each client that reports
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)  # each client's, until the scaling is fitted
    scaling: dict[str, Any] | None = None  # the scaling fitted from the moments
    rollbacks: int = 0  # the number of times that the operator returned to a saved state

    def to_table(self) -> dict[str, Any]:
        """A copy that can be written as JSON."""
        return {**asdict(self), "seats": {name: seat._asdict() for name, seat in self.seats.items()}}

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> "Ledger":
        """The inverse of `to_table`, which also reads tables of older versions with more fields."""
        table = {one.name: table[one.name] for one in fields(cls) if one.name in table}
        seats = {name: Seat(**seat) for name, seat in table["seats"].items()}
        at = table["round"]
        waiting = at and Round(tuple(at["members"]), tuple(at["reported"]), at["since"])
        return cls(**{**table, "seats": seats, "round": waiting})

    def fold(self, about: Record) -> None:
        """Apply a journal record, in the same way now and after a restart."""
        change = getattr(self, f"_fold_{about['what']}", None)
        if change is not None:
            change(about)

    def peers_of(self, name: str) -> list[Seat]:
        """The other clients that are not excluded."""
        return [seat for other, seat in self.seats.items() if other != name and not seat.excluded]

    def _change(self, name: str, **changes: Any) -> None:
        self.seats[name] = self.seats[name]._replace(**changes)

    def _fold_join(self, about: Record) -> None:
        self.seats[about["client"]] = Seat(about["id"], samples=about.get("samples", 0.0))

    def _fold_samples(self, about: Record) -> None:
        self._change(about["client"], samples=about["samples"])

    def _fold_cohort(self, about: Record) -> None:
        before = () if self.round is None else self.round.reported
        self.round = Round(tuple(about["members"]), before, about["time"])

    def _fold_step(self, about: Record) -> None:
        self.round = None

    def _fold_report(self, about: Record) -> None:
        self.reports[about["client"]] = {
            key: item for key, item in about.items() if key not in ("what", "number", "client")
        }

    def _fold_rollback(self, about: Record) -> None:
        self.num_events, self.round, self.rollbacks = about["events"], None, self.rollbacks + 1
        new = {"norm": None, "extras": {}, "excess": 0.0, "num_applied": 0}  # for clients that joined later
        for name in self.seats:
            self._change(name, **about["seats"].get(name, new))

    def _fold_moments(self, about: Record) -> None:
        self.moments[about["client"]] = about["moments"]

    def _fold_scaling(self, about: Record) -> None:
        self.scaling, self.moments = about["scaling"], {}

    def _fold_exclude(self, about: Record) -> None:
        name, excluded = about["client"], about["excluded"]
        self._change(name, excluded=excluded)
        if self.round is not None and excluded and name not in self.round.reported:
            self.round = replace(self.round, members=tuple(one for one in self.round.members if one != name))

    def _fold_upload(self, about: Record) -> None:
        name = about["client"]
        seat = self.seats[name]
        settled: dict[str, Any] = {"next_update": about["update"] + 1, "last_upload": about["upload"]}
        settled["last_outcome"] = about["outcome"]
        if about["outcome"] == "applied":
            if self.round is not None:
                self.round = replace(self.round, reported=(*self.round.reported, name))
            self.num_events += 1
            settled |= {"num_applied": seat.num_applied + 1, "norm": about["norm"], "staleness": about["staleness"]}
            found = about.get("extras", {})
            settled["extras"] = {part: max(norm, seat.extras.get(part, 0.0)) for part, norm in found.items()}
            settled["excess"] = about.get("excess", 0.0)
            settled["samples"] = about.get("claimed", about["samples"])
        elif about["outcome"] == "late":
            settled["num_late"] = seat.num_late + 1
        self._change(name, **settled)
