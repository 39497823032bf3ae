"""Controllers: they end a run, or choose its next cohort, from observations between blocks of events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from personax.algorithms import Algorithm
from personax.keys import HostStream, host_generator
from personax.schedules import Schedule
from personax.simulation.results import Controlled, Snapshot
from personax.simulation.work import traffic
from personax.values import CONTROLLERS, require_count

State = dict[str, Any]  # numbers, strings and lists, which a checkpoint saves as JSON


class ClientLosses(NamedTuple):
    """Losses of the server's model on the training samples of some clients: means, and roots of mean squares."""

    mean: np.ndarray
    root_mean_square: np.ndarray


class Observed(NamedTuple):
    """The observations of a controller about one seed, between two blocks.

    Args:
        event: the number of events so far.
        round: the number of rounds so far; 0 for arrivals.
        time: the virtual time.
        bytes: the bytes sent so far, up and down.
        score: the score on the validation data; None if the controller does not need it.
        higher_is_better: False if a lower score is better.
        samples: the number of training samples of each client.
        cohort_size: the number of clients in a cohort.
        members: the clients of the last round that reported.
        durations: the virtual times of their visits.
        stopped: the clients of the last round that did not report before it ended.
        losses: computes the losses of the server's model for clients, which download it.
        waits: returns the time until clients are online, which is 0 if they are.
        expected: returns the expected durations of clients' visits.
        rng: a generator that follows from the run's key and the event.
    """

    event: int
    round: int
    time: float
    bytes: float
    score: float | None
    higher_is_better: bool
    samples: np.ndarray
    cohort_size: int
    members: np.ndarray
    durations: np.ndarray
    stopped: np.ndarray
    losses: Callable[[np.ndarray], ClientLosses]
    waits: Callable[[np.ndarray], np.ndarray]
    expected: Callable[[np.ndarray], np.ndarray]
    rng: np.random.Generator

    @property
    def gain(self) -> float:
        """The score, with the sign by which higher is better."""
        assert self.score is not None  # of controllers that need it
        return self.score if self.higher_is_better else -self.score

    def available(self, least: int) -> np.ndarray:
        """Return the clients that are online; if there are fewer than `least`, add the next ones to come online."""
        waits = self.waits(np.arange(len(self.samples)))
        online = np.flatnonzero(waits <= 0)
        return online if len(online) >= least else np.sort(np.argsort(waits, kind="stable")[:least])


class Decision(NamedTuple):
    """A controller's next state, the reason to end the run (or nothing), and the next cohort (None: as scheduled)."""

    state: State
    end: str = ""
    cohort: np.ndarray | None = None


@CONTROLLERS.describes
class Controller(Protocol):
    """A value that decides between blocks of events, as a function of its state and its observations.

    `needs_score` requests a validation score, and `needs_losses` requests `Observed.losses`. A controller that
    `selects` chooses cohorts, so it needs a schedule of rounds. `check` raises a `ValueError` before the run if the
    controller cannot work with this number of clients and cohort size (0 for arrivals).
    """

    @property
    def needs_score(self) -> bool: ...
    @property
    def needs_losses(self) -> bool: ...
    @property
    def selects(self) -> bool: ...
    def check(self, num_clients: int, cohort_size: int) -> None: ...
    def begin(self) -> State: ...
    def decide(self, state: State, seen: Observed) -> Decision: ...


def any_run(self: Controller, num_clients: int, cohort_size: int) -> None:
    """Accept any number of clients and any cohort size: the `check` of a controller without requirements."""


@dataclass(frozen=True)
class Control:
    """A controller with its measurements. `px.controlled` makes one from validation data.

    Args:
        controller: a controller such as `px.controllers.EarlyStopping()`.
        every: the number of rounds, or of events for arrivals, between two decisions.
        score: the validation score of a snapshot, one number for each seed.
        losses: the losses of clients at these positions, for a snapshot and the position of a seed.
        higher_is_better: False if a lower score is better.

    >>> import personax as px
    >>> Control(px.controllers.RunBudget(time=100.0), every=5).every
    5
    """

    controller: Controller
    every: int = 1
    score: Callable[[Snapshot], np.ndarray] | None = None
    losses: Callable[[Snapshot, int, np.ndarray], ClientLosses] | None = None
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        require_count("every", self.every)
        for needs, given, name in (
            (self.controller.needs_score, self.score, "score"),
            (self.controller.needs_losses, self.losses, "losses"),
        ):
            if needs and given is None:
                raise ValueError(f"{self.controller} needs a `{name}`. Make the control with `px.controlled(...)`.")

    def begin(self, num_seeds: int) -> tuple[Controlled, ...]:
        """Return the state before the first decision, of each seed."""
        return tuple(Controlled(self.controller.begin()) for _ in range(num_seeds))

    def check(self, schedules: Sequence[Schedule]) -> None:
        """Raise if the controller cannot work with these schedules."""
        for schedule in schedules:
            if self.controller.selects and schedule.rules is None:
                raise ValueError(
                    f"{self.controller} chooses cohorts, and a schedule of arrivals has none. Use `rounds(...)` with a "
                    "synchronous server."
                )
            self.controller.check(schedule.num_clients, schedule.round_size if schedule.has_rounds else 0)

    def decide(
        self, algorithm: Algorithm, snapshot: Snapshot, samples: np.ndarray, keys: Sequence[jax.Array]
    ) -> tuple[Controlled, ...]:
        """Decide for each seed that has not ended."""
        found = list(snapshot.control)
        going = [seed for seed, one in enumerate(found) if not one.ended]
        scores = np.atleast_1d(self.score(snapshot)) if self.score and self.controller.needs_score else None
        moved = np.sum(traffic(algorithm, snapshot), axis=0)
        for seed in going:
            score, asked = None if scores is None else float(scores[seed]), set[int]()
            seen = self._seen(snapshot, seed, score, float(moved[seed]), samples, keys[seed], asked)
            decision = self.controller.decide(found[seed].state, seen)
            found[seed] = _recorded(found[seed], decision, seen, snapshot.wave, asked)
        return tuple(found)

    def _seen(
        self,
        snapshot: Snapshot,
        seed: int,
        score: float | None,
        moved: float,
        samples: np.ndarray,
        key: jax.Array,
        asked: set[int],
    ) -> Observed:
        """Collect the observations about a seed; `asked` collects the clients whose losses are computed."""
        schedule, event = snapshot.schedules[seed], int(np.atleast_1d(snapshot.num_events)[seed])
        time = float(np.atleast_1d(snapshot.time)[seed])
        size = schedule.round_size if schedule.has_rounds else 0
        cohort = np.arange(max(event - size, 0), event)
        last = cohort[schedule.reported[cohort]]
        plan, losses = None if schedule.rules is None else schedule.rules.plan, self.losses

        def ask(positions: np.ndarray) -> ClientLosses:
            assert losses is not None  # `Control` has checked it
            asked.update(np.asarray(positions).tolist())
            return losses(snapshot, seed, np.asarray(positions))

        nothing = lambda clients: np.zeros(len(clients))
        return Observed(
            event=event,
            round=event // size if size else 0,
            time=time,
            bytes=moved,
            score=score,
            higher_is_better=self.higher_is_better,
            samples=samples,
            cohort_size=size,
            members=schedule.client[last],
            durations=schedule.time[last] - schedule.requested[last],
            stopped=schedule.client[cohort[~schedule.reported[cohort]]],
            losses=ask,
            waits=nothing if plan is None else lambda clients: plan.online_from(clients, time) - time,
            expected=nothing if plan is None else plan.durations,
            rng=host_generator(key, HostStream.CONTROL, event),
        )


def _recorded(before: Controlled, decision: Decision, seen: Observed, wave: int, asked: set[int]) -> Controlled:
    """Record a decision, and the downloads of clients that report their losses but are not selected."""
    members = None if decision.cohort is None else tuple(int(one) for one in decision.cohort)
    if members is not None and (len(members) != seen.cohort_size or len(set(members)) != len(members)):
        raise ValueError(f"A controller must choose {seen.cohort_size} different clients, got {list(members)}.")
    num_asked = len(asked.difference(members or ()))
    downloads = (*before.asked, (seen.event, num_asked)) if num_asked else before.asked
    now = replace(before, state=decision.state, asked=downloads)
    if decision.end:
        return replace(now, ended=decision.end, wave=wave)
    previous = before.chosen[-1][1] if before.chosen else None
    return now if members == previous else replace(now, chosen=(*before.chosen, (seen.round, members)))


def with_chosen(schedule: Schedule, control: Controlled) -> Schedule:
    """Return a schedule of rounds with the cohorts that a controller chose; after the last choice, with that one."""
    if not control.chosen:
        return schedule
    num_rounds = schedule.num_events // schedule.round_size
    ends = [first for first, _ in control.chosen[1:]] + [num_rounds]
    chosen = zip(control.chosen, ends, strict=True)
    cohorts = [members for (first, members), end in chosen for _ in range(first, end)]
    return schedule.with_cohorts(control.chosen[0][0], cohorts)
