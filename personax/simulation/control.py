"""Control of a run between blocks of events: end it, or choose the next cohort, from what is measured."""

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

State = dict[str, Any]  # plain numbers, strings and lists, as JSON holds them: a checkpoint saves it


class ClientLosses(NamedTuple):
    """Losses of the server's model on the training samples of some clients: means, and roots of mean squares."""

    mean: np.ndarray
    root_mean_square: np.ndarray


class Observed(NamedTuple):
    """The observations of a controller about one seed, between two blocks.

    `event` counts events and `round` rounds (0 for arrivals), `time` is virtual and `bytes` are those sent up and down.
    `score` is that of the validation data, None if the controller does not need it. `members` are the clients of the
    last round that reported and `durations` their virtual times. `losses(positions)` computes the losses of clients at
    the server's model. `rng` is a function of the run's key and of the event.
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
    losses: Callable[[np.ndarray], ClientLosses]
    rng: np.random.Generator

    @property
    def gain(self) -> float:
        """The score, with the sign by which higher is better."""
        assert self.score is not None  # of controllers that need it
        return self.score if self.higher_is_better else -self.score


class Decision(NamedTuple):
    """A controller's next state, the reason to end the run (or nothing), and the next cohort (None: as scheduled)."""

    state: State
    end: str = ""
    cohort: np.ndarray | None = None


@CONTROLLERS.describes
class Controller(Protocol):
    """A value that decides between blocks of events, as a function of its state and of what is seen.

    `needs_score` asks for a validation score, `needs_losses` for `Observed.losses`; `selects` chooses cohorts, which
    needs a schedule of rounds.
    """

    @property
    def needs_score(self) -> bool: ...
    @property
    def needs_losses(self) -> bool: ...
    @property
    def selects(self) -> bool: ...
    def begin(self) -> State: ...
    def decide(self, state: State, seen: Observed) -> Decision: ...


@dataclass(frozen=True)
class Control:
    """A controller, and how it measures. `px.controlled` makes one from validation data.

    Args:
        controller: a controller such as `px.controllers.EarlyStopping()`.
        every: rounds, or events of arrivals, between two decisions.
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
        if self.controller.selects and any(schedule.with_cohorts is None for schedule in schedules):
            raise ValueError(
                f"{self.controller} chooses cohorts, and a schedule of arrivals has none. Use `rounds(...)` with a "
                "synchronous server."
            )

    def decide(
        self, algorithm: Algorithm, snapshot: Snapshot, samples: np.ndarray, keys: Sequence[jax.Array]
    ) -> tuple[Controlled, ...]:
        """Decide for each seed that has not ended."""
        found = list(snapshot.control)
        going = [seed for seed, one in enumerate(found) if not one.ended]
        scores = np.atleast_1d(self.score(snapshot)) if self.score and self.controller.needs_score else None
        moved = np.sum(traffic(algorithm, snapshot), axis=0)
        for seed in going:
            score = None if scores is None else float(scores[seed])
            seen = self._seen(snapshot, seed, score, float(moved[seed]), samples, keys[seed])
            decision = self.controller.decide(found[seed].state, seen)
            found[seed] = _noted(found[seed], decision, seen, snapshot.wave)
        return tuple(found)

    def _seen(
        self, snapshot: Snapshot, seed: int, score: float | None, moved: float, samples: np.ndarray, key: jax.Array
    ) -> Observed:
        schedule, event = snapshot.schedules[seed], int(np.atleast_1d(snapshot.num_events)[seed])
        size = schedule.round_size if schedule.has_rounds else 0
        last = np.arange(max(event - size, 0), event) if size else np.zeros(0, int)
        last = last[schedule.reported[last]]
        losses = self.losses

        def ask(positions: np.ndarray) -> ClientLosses:
            assert losses is not None  # or it had raised before the run
            return losses(snapshot, seed, np.asarray(positions))

        return Observed(
            event=event,
            round=event // size if size else 0,
            time=float(np.atleast_1d(snapshot.time)[seed]),
            bytes=moved,
            score=score,
            higher_is_better=self.higher_is_better,
            samples=samples,
            cohort_size=size,
            members=schedule.client[last],
            durations=schedule.time[last] - schedule.requested[last],
            losses=ask,
            rng=host_generator(key, HostStream.CONTROL, event),
        )


def _noted(before: Controlled, decision: Decision, seen: Observed, wave: int) -> Controlled:
    """Record a decision."""
    if decision.end:
        return replace(before, state=decision.state, ended=decision.end, wave=wave)
    previous = before.chosen[-1][1] if before.chosen else None
    members = None if decision.cohort is None else tuple(int(one) for one in decision.cohort)
    if members is not None and len(members) != seen.cohort_size:
        raise ValueError(f"A controller must choose {seen.cohort_size} clients, got {len(members)}.")
    chosen = before.chosen if members == previous else (*before.chosen, (seen.round, members))
    return replace(before, state=decision.state, chosen=chosen)


def with_chosen(schedule: Schedule, control: Controlled) -> Schedule:
    """Return a schedule of rounds with the cohorts that a controller chose; after the last choice, with that one."""
    if not control.chosen or schedule.with_cohorts is None:
        return schedule
    cohorts = schedule.client.reshape(-1, schedule.round_size).copy()
    ends = [first for first, _ in control.chosen[1:]] + [len(cohorts)]
    for (first, members), end in zip(control.chosen, ends, strict=True):
        if members is not None:
            cohorts[first:end] = members
    return schedule.with_cohorts(cohorts)
