"""Schedules: which client reports when, and which model it started from.

An *event* is the arrival of one client's update at the server. `started_at` counts the events that had arrived when the
client requested its model; the staleness in server versions depends on the server's buffer. Delays do not depend on
parameters, so a schedule is a table that is computed before the run.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from personax.schedules.rules import Cohorts, RoundColumns, RoundRules
from personax.values import optional_import
from personax.values.notebook import html_table

_COLUMNS = ("client", "started_at", "requested", "received", "time", "aggregated", "round_ends", "reported")


@dataclass(frozen=True, eq=False)
class Schedule:
    """A table of events in order of arrival, with one entry per event in each array. A round lists its cohort.

    Args:
        num_clients: the number of clients in the federation.
        client: the client that reports.
        started_at: the number of events that had arrived when the client requested its model.
        requested: the virtual time at which the client requested the model.
        received: the virtual time at which the client received the model.
        time: the virtual time at which the update arrived.
        aggregated: False for clients that train without being aggregated (pFedMe).
        round_ends: True at the last event of each round; False everywhere in a schedule of arrivals.
        pending: the times at which clients received models whose updates arrive after the last event.
        reported: False for members of a cohort that the server did not wait for: their visit changes nothing. By
            default all have reported.
        wanted: True for members of a cohort whose updates are aggregated if they have reported. By default, the
            aggregated ones.
        rules: the rules by which rounds can be replayed with other cohorts (`with_cohorts`); None for arrivals.

    >>> import numpy as np, personax as px
    >>> column = lambda *numbers: np.array(numbers)
    >>> schedule = px.Schedule(
    ...     num_clients=2,
    ...     client=column(0, 1),
    ...     started_at=column(0, 0),
    ...     requested=column(0.0, 0.0),
    ...     received=column(0.5, 0.5),
    ...     time=column(1.0, 2.0),
    ...     aggregated=column(True, True),
    ...     round_ends=column(False, False),
    ... )
    >>> schedule.staleness().tolist()  # the second client's model was one update old
    [0, 1]
    """

    num_clients: int
    client: np.ndarray
    started_at: np.ndarray
    requested: np.ndarray
    received: np.ndarray
    time: np.ndarray
    aggregated: np.ndarray
    round_ends: np.ndarray
    pending: np.ndarray = field(default_factory=lambda: np.zeros(0))
    reported: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    wanted: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    rules: RoundRules | None = None

    def __post_init__(self) -> None:
        if not len(self.reported):
            object.__setattr__(self, "reported", np.ones(len(self.client), bool))
        if not len(self.wanted):
            object.__setattr__(self, "wanted", self.aggregated)
        arrays = (
            self.started_at,
            self.requested,
            self.received,
            self.time,
            self.aggregated,
            self.round_ends,
            self.reported,
            self.wanted,
        )
        if not len(self.client) or any(len(array) != len(self.client) for array in arrays):
            raise ValueError(
                f"All columns of a schedule must have one entry for each of its {len(self.client)} events."
            )
        if self.client.min() < 0 or self.client.max() >= self.num_clients:
            raise ValueError(f"`client` must lie in 0..{self.num_clients - 1}, got up to {self.client.max()}.")
        late = np.flatnonzero((self.started_at > np.arange(len(self.client))) | (self.started_at < 0))
        if len(late):
            raise ValueError(
                f"`started_at` must not be later than the event itself, got {self.started_at[late[0]]} at {late[0]}."
            )
        ends = np.flatnonzero(self.round_ends) + 1
        if len(ends) and (ends[-1] != len(self.client) or np.any(np.diff(ends, prepend=0) != ends[0])):
            raise ValueError(
                f"Rounds must have equal length and end with the last event, got ends {ends[:5].tolist()}."
            )

    def __repr__(self) -> str:
        return f"<Schedule: {', '.join(f'{title} {text}' for title, text in self._facts())}>"

    def _repr_html_(self) -> str:
        return html_table("Schedule", self._facts())

    def _facts(self) -> list[tuple[str, str]]:
        """Return the titles and texts of a summary."""
        clients = f"{self.num_clients:,} clients"
        if self.has_rounds:
            num = self.num_events // self.round_size
            facts = [("rounds", f"{num:,}"), ("cohort", f"{self.round_size:,} of {clients}")]
            if not self.reported.all():
                facts.append(("stopped", f"{np.mean(~self.reported):.0%} of the visits"))
        else:
            stale = self.staleness()
            facts = [("arrivals", f"{self.num_events:,} of {clients}")]
            facts += [("staleness", f"{stale.mean():.3g} on average and at most {stale.max()}")]
        end = float(self.time.max())
        return [*facts, ("virtual time", f"{end:.4g}")] if end > 0 else facts

    def to_pandas(self) -> Any:
        """Return the events as a pandas data frame, one row per event."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return optional_import("pandas", "`to_pandas`", "pandas").DataFrame({**columns, "staleness": self.staleness()})

    @property
    def num_events(self) -> int:
        """The number of events."""
        return len(self.client)

    @property
    def round_size(self) -> int:
        """The number of events in a round."""
        return self.num_events // int(self.round_ends.sum())

    @property
    def has_rounds(self) -> bool:
        """True if the events are grouped into rounds."""
        return bool(self.round_ends.any())

    def begins_with(self, shorter: "Schedule") -> bool:
        """Return True if the first events are those of another schedule."""
        same = lambda name: np.array_equal(getattr(self, name)[: shorter.num_events], getattr(shorter, name))
        return self.num_clients == shorter.num_clients and all(map(same, _COLUMNS))

    @property
    def downloaded(self) -> np.ndarray:
        """True for events whose client has downloaded the model, or begun to, before it was stopped."""
        return self.reported | (self.requested < self.time)

    def with_cohorts(self, round: int, cohorts: Cohorts) -> "Schedule":
        """Return the same rounds with other cohorts from `round` on; where a cohort is None, it is drawn.

        The rounds after these are unchanged: they do not yet begin when the replaced ones end.

        >>> import jax, personax as px
        >>> schedule = px.rounds(20, num_rounds=50, cohort_size=2, key=jax.random.key(0))
        >>> schedule.with_cohorts(1, [[7, 3]]).client[2:4].tolist()
        [7, 3]
        """
        if self.rules is None:
            raise ValueError("A schedule of arrivals has no cohorts. Use `rounds(...)` with a synchronous server.")
        shape = (-1, self.round_size)
        times = np.stack([column.reshape(shape) for column in (self.requested, self.received, self.time)])
        before = RoundColumns(self.client.reshape(shape), times, self.reported.reshape(shape))
        after = self.rules.replay(before, round, cohorts)
        names = zip(("requested", "received", "time"), after.times, strict=True)
        return replace(
            self,
            **{name: times.ravel() for name, times in names},
            client=after.client.ravel(),
            reported=after.reported.ravel(),
            aggregated=after.reported.ravel() & self.wanted,
        )

    def updates(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """Count, for each event from `begin` to `end`, the earlier events of the same client."""
        client = self.client[begin:end]
        order = np.argsort(client, kind="stable")
        sorted_clients = client[order]
        first = np.r_[True, sorted_clients[1:] != sorted_clients[:-1]]
        run_start = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
        counts = np.empty(len(order), np.int32)
        counts[order] = np.arange(len(order)) - run_start
        return counts + self.visits(begin)[client].astype(np.int32) if begin else counts

    def visits(self, num_events: int) -> np.ndarray:
        """Count each client's events among the first `num_events`."""
        return np.bincount(self.client[:num_events], minlength=self.num_clients)

    def cohort(self, num_events: int) -> np.ndarray:
        """Return the clients of the round that ends with the `num_events`-th event; before any, of the first round."""
        if not self.has_rounds:
            raise ValueError("A schedule of arrivals has no rounds and therefore no cohort. Score all clients.")
        size = self.round_size
        last = max(num_events, size)
        return np.sort(self.client[last - size : last])

    def staleness(self, buffer_size: int | None = None) -> np.ndarray:
        """Return the server versions between request and arrival if the server steps every `buffer_size` events.

        By default the server steps at the end of each round, or at each event if there are no rounds.
        """
        if buffer_size is None:
            buffer_size = self.round_size if self.has_rounds else 1
        return np.arange(self.num_events) // buffer_size - self.started_at // buffer_size

    def active_share(self, times: np.ndarray) -> np.ndarray:
        """Return the share of clients that are active at each of these virtual times.

        A client is active from receiving a model until its update arrives, that is, while it computes or uploads. It
        is idle while it waits for a download or pauses and, in a synchronous schedule, while it is not in the cohort or
        waits for the slowest client. (PersA-FL section 5 reports about 80 % active, "not idle", clients. This
        definition gives that number when uploads take 4 to 6 times as long as downloads.)
        """
        received = np.searchsorted(np.sort(np.r_[self.received, self.pending]), times, side="right")
        arrived = np.searchsorted(np.sort(self.time), times, side="right")
        return (received - arrived) / self.num_clients
