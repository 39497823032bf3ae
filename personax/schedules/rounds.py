"""Synchronous rounds: the server waits for a cohort in each round."""

import numpy as np

from personax.keys import HostStream, host_generator
from personax.schedules.delays import BLOCK, Delays
from personax.schedules.schedule import Schedule
from personax.typing import Array
from personax.values import require, require_count


def rounds(
    num_clients: int,
    num_rounds: int,
    cohort_size: int | None = None,
    *,
    key: Array,
    num_aggregated: int | None = None,
    delays: Delays = Delays(),
) -> Schedule:
    """Create a schedule of synchronous rounds, each with a cohort drawn uniformly without replacement.

    A round lasts as long as its slowest client.

    Args:
        num_clients: the number of clients in the federation.
        num_rounds: the number of rounds.
        cohort_size: the number of clients in each round; by default all.
        num_aggregated: the number of cohort members, drawn uniformly, whose updates are aggregated; by default all.
            In pFedMe, all clients train and a sample is averaged.
        delays: the delays of downloads, computation and uploads.
        key: the random key of cohorts and delays.

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
    num_drawn = -(-num_rounds // BLOCK) * BLOCK
    rng = host_generator(key, HostStream.COHORTS)
    cohorts = np.stack([rng.choice(num_clients, cohort_size, replace=False) for _ in range(num_drawn)])
    chosen = np.broadcast_to(np.arange(cohort_size) < (num_aggregated or cohort_size), cohorts.shape)
    aggregated = host_generator(key, HostStream.AGGREGATED).permuted(chosen, axis=1)
    blocks = [delays.sample(key, block, who) for block, who in enumerate(np.split(cohorts, num_drawn // BLOCK))]
    download, rest = (np.concatenate([times[i] for times in blocks])[:num_rounds] for i in (0, 1))
    cohorts, aggregated, durations = cohorts[:num_rounds], aggregated[:num_rounds], download + rest
    begins = np.r_[0.0, np.cumsum(durations.max(axis=1))[:-1]][:, None]
    events = np.arange(num_rounds * cohort_size).reshape(num_rounds, cohort_size)
    return Schedule(
        num_clients=num_clients,
        client=cohorts.ravel().astype(np.int32),
        started_at=np.broadcast_to(events[:, :1], events.shape).ravel(),
        requested=np.broadcast_to(begins, events.shape).ravel(),
        received=(begins + download).ravel(),
        time=(begins + durations).ravel(),
        aggregated=aggregated.ravel(),
        round_ends=np.broadcast_to(np.arange(cohort_size) == cohort_size - 1, events.shape).ravel(),
    )


def _require_at_most(name: str, given: int | None, most: int, of: str) -> None:
    require(lambda v: v <= most, name, given, f"be at most the {most} {of}")
