"""Synchronous rounds: the server waits for a cohort in each round."""

from functools import partial
from typing import Literal

import numpy as np

from personax.keys import HostStream, host_generator
from personax.schedules.delays import BLOCK, Delays
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

    A round lasts as long as its slowest client, or as its server waits. With `aggregate="first"` more clients are
    selected than are aggregated: the round ends when `num_aggregated` of them have reported. With a `deadline` it ends
    at the latest that long after its beginning, and the clients that have reported are aggregated; if none has, the
    model is unchanged. Clients that have not reported are stopped: they upload nothing and their personal state does
    not change.

    Args:
        num_clients: the number of clients in the federation.
        num_rounds: the number of rounds.
        cohort_size: the number of clients in each round; by default all.
        num_aggregated: the number of cohort members whose updates are aggregated; by default all.
        aggregate: `"random"` draws them uniformly, and the server waits for all members. In pFedMe, all clients train
            and a sample is averaged. `"first"` takes those that report first (over-selection).
        deadline: the longest time that the server waits in a round.
        delays: the delays of downloads, computation and uploads. Those of devices with availability draw cohorts among
            the clients that are online; if there are too few, the next clients that come online complete the cohort.
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
    if cohorts is not None:
        cohorts = np.asarray(cohorts)
        _check_cohorts(cohorts, shape, num_clients)
    plan = delays.plan_rounds(num_clients, num_rounds, cohort_size, key, cohorts)
    chosen = np.broadcast_to(
        np.arange(cohort_size) < (num_aggregated or cohort_size), (_whole_blocks(num_rounds), cohort_size)
    )
    drawn = host_generator(key, HostStream.AGGREGATED).permuted(chosen, axis=1)[:num_rounds]
    first = num_aggregated if aggregate == "first" else None
    clients, times, begin = np.empty(shape, np.int32), np.empty((3, *shape)), 0.0
    reported = np.empty(shape, bool)
    for at in range(num_rounds):
        clients[at] = plan.members(at, begin)
        found = plan.times(at, clients[at], begin)
        reported[at], end = _close(found.arrived, begin, first, deadline)
        times[:, at] = np.minimum(found, end)
        begin = end
    events = np.arange(num_rounds * cohort_size).reshape(shape)
    again = partial(
        rounds,
        num_clients,
        num_rounds,
        cohort_size,
        key=key,
        num_aggregated=num_aggregated,
        aggregate=aggregate,
        deadline=deadline,
        delays=delays,
    )
    return Schedule(
        num_clients=num_clients,
        client=clients.ravel(),
        started_at=np.broadcast_to(events[:, :1], events.shape).ravel(),
        requested=times[0].ravel(),
        received=times[1].ravel(),
        time=times[2].ravel(),
        aggregated=(reported & (drawn | (aggregate == "first"))).ravel(),
        round_ends=np.broadcast_to(np.arange(cohort_size) == cohort_size - 1, events.shape).ravel(),
        reported=reported.ravel(),
        with_cohorts=lambda cohorts: again(cohorts=cohorts),
    )


def _close(arrived: np.ndarray, begin: float, first: int | None, deadline: float | None) -> tuple[np.ndarray, float]:
    """Return which members have reported when the server closes a round, and when that is."""
    if first is None and deadline is None:
        return np.ones(len(arrived), bool), float(arrived.max())
    order = np.argsort(arrived, kind="stable")[:first]
    end = float(arrived[order[-1]])
    if deadline is not None:
        end = min(end, begin + deadline)
    reported = np.zeros(len(arrived), bool)
    reported[order[arrived[order] <= end]] = True
    return reported, end


def _whole_blocks(num_rounds: int) -> int:
    return -(-num_rounds // BLOCK) * BLOCK


def _check_cohorts(cohorts: np.ndarray, shape: tuple[int, int], num_clients: int) -> None:
    if cohorts.ndim != 2 or len(cohorts) > shape[0] or cohorts.shape[1] != shape[1]:
        raise ValueError(f"`cohorts` must be [at most {shape[0]} rounds, {shape[1]} clients], got {cohorts.shape}.")
    if not len(cohorts):
        return
    ordered = np.sort(cohorts, axis=1)
    if ordered[:, 0].min() < 0 or ordered[:, -1].max() >= num_clients or np.any(ordered[:, 1:] == ordered[:, :-1]):
        raise ValueError(f"Each cohort must have different clients in 0..{num_clients - 1}.")


def _require_at_most(name: str, given: int | None, most: int, of: str) -> None:
    require(lambda v: v <= most, name, given, f"be at most the {most} {of}")
