"""Synchronous rounds: the server waits for a cohort in each round."""

from typing import Literal

import numpy as np

from personax.keys import HostStream, host_generator
from personax.schedules.delays import Delays, whole_blocks
from personax.schedules.rules import RoundColumns, RoundRules
from personax.schedules.schedule import Schedule
from personax.schedules.timing import Timing
from personax.typing import Array
from personax.values import require, require_count, require_one_of, require_positive


def rounds(
    num_clients: int,
    num_rounds: int,
    cohort_size: int | None = None,
    *,
    key: Array,
    num_aggregated: int | None = None,
    aggregate: Literal["random", "first"] = "random",
    deadline: float | None = None,
    delays: Timing = Delays(),
    cohorts: np.ndarray | None = None,
) -> Schedule:
    """Create a schedule of synchronous rounds, each with a cohort drawn uniformly without replacement.

    A round lasts as long as its slowest client takes. With `aggregate="first"` (over-selection) it ends when
    `num_aggregated` members of its larger cohort have reported. With a `deadline` it ends after that time at the
    latest, and the clients that have reported are aggregated; if none has, the model is unchanged. Clients that have
    not reported are stopped: they upload nothing, and their personal state does not change.

    Args:
        num_clients: the number of clients in the federation.
        num_rounds: the number of rounds.
        cohort_size: the number of clients in each round; by default all.
        num_aggregated: the number of cohort members whose updates are aggregated; by default all.
        aggregate: `"random"` draws them uniformly, and the server waits for all members. In pFedMe, all clients train
            and a sample is averaged. `"first"` takes those that report first (over-selection).
        deadline: the longest time that the server waits in a round.
        delays: the delays of downloads, computation and uploads. With the delays of devices, cohorts are drawn among
            the clients that are online; if there are too few, the next clients to come online complete the cohort.
        key: the random key of cohorts and delays.
        cohorts: the cohorts of the first rounds, [rounds, cohort_size]; the others are drawn.

    >>> import jax, personax as px
    >>> schedule = px.rounds(20, num_rounds=50, cohort_size=5, key=jax.random.key(0))
    >>> schedule
    <Schedule: rounds 50, cohort 5 of 20 clients>
    """
    cohort_size = num_clients if cohort_size is None else cohort_size
    require_count("num_clients", num_clients)
    require_count("num_rounds", num_rounds)
    require_count("cohort_size", cohort_size)
    _require_at_most("cohort_size", cohort_size, num_clients, "clients of the federation")
    require_count("num_aggregated", num_aggregated)
    _require_at_most("num_aggregated", num_aggregated, cohort_size, "members of the cohort")
    require_one_of("aggregate", aggregate, ("random", "first"))
    require_positive("deadline", deadline)
    shape = (num_rounds, cohort_size)
    given = [] if cohorts is None else list(_checked_cohorts(np.asarray(cohorts), shape, num_clients))
    plan = delays.plan_rounds(num_clients, num_rounds, cohort_size, key)
    if aggregate == "first":
        rules, wanted = RoundRules(plan, num_aggregated, deadline), np.ones(shape, bool)
    else:
        rules, wanted = RoundRules(plan, None, deadline), _drawn(shape, num_aggregated or cohort_size, key)
    empty = RoundColumns(np.zeros(shape, np.int32), np.zeros((3, *shape)), np.zeros(shape, bool))
    columns = rules.replay(empty, 0, [*given, *[None] * (num_rounds - len(given))])
    return _schedule_of(columns, wanted, num_clients, rules)


def _drawn(shape: tuple[int, int], num_aggregated: int, key: Array) -> np.ndarray:
    """Draw the members of each cohort that are aggregated."""
    chosen = np.broadcast_to(np.arange(shape[1]) < num_aggregated, (whole_blocks(shape[0]), shape[1]))
    return host_generator(key, HostStream.AGGREGATED).permuted(chosen, axis=1)[: shape[0]]


def _schedule_of(columns: RoundColumns, wanted: np.ndarray, num_clients: int, rules: RoundRules) -> Schedule:
    """Make a schedule in which the `wanted` members that have reported are aggregated."""
    events = np.arange(wanted.size).reshape(wanted.shape)
    return Schedule(
        num_clients=num_clients,
        client=columns.client.ravel(),
        started_at=np.broadcast_to(events[:, :1], events.shape).ravel(),
        requested=columns.times[0].ravel(),
        received=columns.times[1].ravel(),
        time=columns.times[2].ravel(),
        aggregated=(columns.reported & wanted).ravel(),
        round_ends=np.broadcast_to(np.arange(wanted.shape[1]) == wanted.shape[1] - 1, wanted.shape).ravel(),
        reported=columns.reported.ravel(),
        wanted=wanted.ravel(),
        rules=rules,
    )


def _checked_cohorts(cohorts: np.ndarray, shape: tuple[int, int], num_clients: int) -> np.ndarray:
    if cohorts.ndim != 2 or len(cohorts) > shape[0] or cohorts.shape[1] != shape[1]:
        raise ValueError(f"`cohorts` must be [at most {shape[0]} rounds, {shape[1]} clients], got {cohorts.shape}.")
    ordered = np.sort(cohorts, axis=1)
    if np.any((ordered < 0) | (ordered >= num_clients)) or np.any(ordered[:, 1:] == ordered[:, :-1]):
        raise ValueError(f"Each cohort must have different clients in 0..{num_clients - 1}.")
    return cohorts


def _require_at_most(name: str, given: int | None, most: int, of: str) -> None:
    require(lambda v: v <= most, name, given, f"be at most the {most} {of}")
